/*
 * tape.c: records: what they hold, and leaves; the walk back over them is in backward.c.
 *
 * Building and freeing are iterative: a chain of any length works with a small stack.
 */
#include <string.h>

#include "tape.h"

/* ---- references ------------------------------------------------------------------------------ */

static void drain(struct xt_ctx *ctx);

void xt_call_retain(struct xt_call *call) {
    if (call->owner)
        call->owner->refs++;
    else
        call->refs++;
}

void xt_call_release(struct xt_ctx *ctx, struct xt_call *call) {
    if (call->owner) {
        xt_segment_release(ctx, call->owner);
        return;
    }
    if (--call->refs) return;
    call->next_dying = ctx->dying;
    ctx->dying = call;
    drain(ctx);
}

void xt_segment_release(struct xt_ctx *ctx, struct xt_segment *owner) {
    if (--owner->refs) return;
    owner->next_dying = ctx->dying_segments;
    ctx->dying_segments = owner;
    drain(ctx);
}

static void free_segment(struct xt_ctx *ctx, struct xt_segment *owner) {
    for (int64_t i = owner->n_calls; i-- > 0;) xt_call_free_body(ctx, owner->calls[i]);
    xt_host_free(ctx, owner->calls, (size_t)owner->cap_calls * sizeof(struct xt_call *));
    for (struct xt_segment *s = owner->next, *next; s; s = next) {
        next = s->next;
        xt_host_free(ctx, s, sizeof *s);
    }
    xt_host_free(ctx, owner, sizeof *owner);
}

/* Frees what has died; what dies meanwhile is appended, so that the depth of the stack is
   constant. */
static void drain(struct xt_ctx *ctx) {
    if (ctx->draining) return;
    ctx->draining = true;
    while (ctx->dying || ctx->dying_segments) {
        if (ctx->dying) {
            struct xt_call *call = ctx->dying;
            ctx->dying = call->next_dying;
            xt_call_free_body(ctx, call);
        } else {
            struct xt_segment *owner = ctx->dying_segments;
            ctx->dying_segments = owner->next_dying;
            free_segment(ctx, owner);
        }
    }
    ctx->draining = false;
}

void xt_drop_tensors(struct xt_ctx *ctx, struct xt_tensor **list, int n) {
    for (int i = 0; i < n; i++) {
        xt_tensor_release(ctx, list[i]);
        list[i] = NULL;
    }
}

void xt_record_drop_kept(struct xt_ctx *ctx, struct xt_call *call) {
    xt_drop_tensors(ctx, call->in, call->n_inputs);
    xt_drop_tensors(ctx, call->out, call->n_outputs);
    xt_drop_tensors(ctx, call->value, call->n_outputs);
}

struct xt_call *xt_inner_maker(const struct xt_call *call, int input) {
    struct xt_call *maker = call->edges[input].maker;
    return maker && maker->owner && maker->owner == call->owner ? maker : NULL;
}

void xt_call_free_body(struct xt_ctx *ctx, struct xt_call *call) {
    if (ctx->newest == call) ctx->newest = NULL;
    xt_record_drop_kept(ctx, call);
    xt_drop_tensors(ctx, call->grad_out, call->n_outputs);
    xt_drop_tensors(ctx, call->more, XT_APART);
    for (int i = 0; i < call->n_inputs; i++) {
        struct xt_edge *e = &call->edges[i];
        if (e->leaf) xt_leaf_release(ctx, e->leaf);
        if (e->maker && !xt_inner_maker(call, i)) xt_call_release(ctx, e->maker);
    }
    if (call->digests)
        xt_host_free(ctx, call->digests, (size_t)call->n_outputs * sizeof *call->digests);
    xt_host_free(ctx, call, call->bytes);
}

void xt_leaf_release(struct xt_ctx *ctx, struct xt_leaf *leaf) {
    if (--leaf->refs) return;
    xt_tensor_release(ctx, leaf->grad);
    xt_tensor_release(ctx, leaf->copy);
    xt_host_free(ctx, leaf, sizeof *leaf);
}

/* ---- making a record ------------------------------------------------------------------------- */

bool xt_keeps(unsigned mask, int i) {
    return mask >> (i < 31 ? i : 31) & 1u;
}

bool xt_keeps_input(const struct xt_call *call, int i) {
    const struct xt_op *op = call->slot->op;
    if (!call->wants) return false;
    if (!op->keeps_for[0] && !op->keeps_for[1]) return xt_keeps(op->keeps_in, i);
    return (call->edges[0].wants && xt_keeps(op->keeps_for[0], i)) ||
           (call->edges[1].wants && xt_keeps(op->keeps_for[1], i));
}

/* Where the arrays of a record lie behind it, in order; also how long the whole block is. */
static size_t lay_out(struct xt_call *call, const struct xt_slot *slot, int n_in, int n_ints) {
    size_t n_out = (size_t)slot->op->n_outputs, in = (size_t)n_in, at = sizeof *call;
    char *base = (char *)call;
#define PLACE(field, count)                                                                        \
    do {                                                                                           \
        if (call) call->field = (void *)(base + at);                                               \
        at += (count) * sizeof(*call->field);                                                      \
    } while (0)
    PLACE(edges, in);
    PLACE(in, in);
    PLACE(in_version, in);
    PLACE(in_spec, in);
    PLACE(out, n_out);
    PLACE(out_version, n_out);
    PLACE(out_spec, n_out);
    PLACE(grad_out, n_out);
    PLACE(value, n_out);
    PLACE(attrs, (size_t)slot->n_attrs);
    PLACE(ints, (size_t)n_ints);
#undef PLACE
    return at;
}

/* Keeps input i when backward or a replay needs it; the records of one owner never hold each other
   through a kept tensor, so there an alias without maker is kept. */
static enum xt_status keep_input(struct xt_ctx *ctx, struct xt_call *call, int i,
                                 struct xt_tensor *t) {
    struct xt_call *inner = xt_inner_maker(call, i);
    bool backward = xt_keeps_input(call, i);
    bool replay = call->segment && (!inner || inner->segment != call->segment);
    if (!backward && !replay) return XT_OK;
    if (t->maker && t->maker->owner && t->maker->owner == call->owner)
        XT_TRY(xt_tensor_alias(ctx, t, &call->in[i]));
    else
        call->in[i] = xt_tensor_retain(t);
    call->in_version[i] = t->storage->version;
    return XT_OK;
}

static void make_edge(struct xt_call *call, int i, struct xt_tensor *t) {
    struct xt_edge *e = &call->edges[i];
    bool inner = t->maker && t->maker->owner && t->maker->owner == call->owner;
    bool is_float = xt_dtype_is_float(t->dtype);
    if (t->leaf) {
        e->leaf = t->leaf;
        e->leaf->refs++;
        e->wants = call->wants;
    } else if (t->maker && (inner || (t->maker->wants && is_float))) {
        e->maker = t->maker;
        e->output = t->maker_output;
        e->wants = call->wants && t->maker->wants && is_float;
        if (!inner) xt_call_retain(e->maker);
    }
}

enum xt_status xt_record_blank(struct xt_ctx *ctx, const struct xt_slot *slot, int n_inputs,
                               int n_ints, struct xt_call **out) {
    size_t bytes = lay_out(NULL, slot, n_inputs, n_ints);
    struct xt_call *call = xt_host_alloc(ctx, bytes);
    if (!call) return XT_MEMORY;
    lay_out(call, slot, n_inputs, n_ints);
    call->refs = 1;
    call->n_inputs = n_inputs;
    call->n_outputs = slot->op->n_outputs;
    call->n_ints = n_ints;
    call->number = ++ctx->n_calls;
    call->slot = slot;
    call->bytes = bytes;
    *out = call;
    return XT_OK;
}

enum xt_status xt_record_new(struct xt_ctx *ctx, const struct xt_slot *slot,
                             const struct xt_args *args, bool wants, struct xt_call **out) {
    struct xt_call *call;
    XT_TRY(xt_record_blank(ctx, slot, args->n_inputs, args->n_ints, &call));
    call->wants = wants;
    call->where = xt_here(ctx);
    call->within = ctx->within;
    memcpy(call->attrs, args->attrs, (size_t)slot->n_attrs * sizeof *call->attrs);
    memcpy(call->ints, args->ints, (size_t)args->n_ints * sizeof *call->ints);
    enum xt_status status = XT_OK;
    if (ctx->segment) XT_GO(xt_segment_add(ctx, call));
    for (int i = 0; i < args->n_inputs; i++) {
        struct xt_tensor *t = args->inputs[i];
        if (!t) continue;
        xt_spec_of(t, &call->in_spec[i]);
        make_edge(call, i, t);
    }
    for (int i = 0; i < args->n_inputs; i++)
        if (args->inputs[i]) XT_GO(keep_input(ctx, call, i, args->inputs[i]));
    *out = call;
    return XT_OK;
done:
    xt_record_abandon(ctx, call);
    return status;
}

void xt_record_abandon(struct xt_ctx *ctx, struct xt_call *call) {
    if (call->owner) xt_segment_remove_last(ctx, call);
    xt_call_free_body(ctx, call);
}

enum xt_status xt_record_finish(struct xt_ctx *ctx, struct xt_call *call,
                                struct xt_tensor **outputs) {
    const struct xt_op *op = call->slot->op;
    bool selective = call->segment && call->segment->options.selective;
    bool verify = call->segment && call->segment->options.verify && !ctx->graph;
    if (verify && call->n_outputs) {
        call->digests = xt_host_alloc(ctx, (size_t)call->n_outputs * sizeof *call->digests);
        if (!call->digests) return XT_MEMORY;
    }
    for (int k = 0; k < call->n_outputs; k++) {
        struct xt_tensor *t = outputs[k];
        if (!t) continue;
        xt_spec_of(t, &call->out_spec[k]);
        if (verify) XT_TRY(xt_tensor_digest(ctx, t, &call->digests[k]));
        if (selective && (op->flags & XT_EXPENSIVE))
            XT_TRY(xt_tensor_alias(ctx, t, &call->value[k]));
        if (!call->wants || !xt_keeps(op->keeps_out, k)) continue;
        XT_TRY(xt_tensor_alias(ctx, t, &call->out[k]));
        call->out_version[k] = t->storage->version;
    }
    for (int k = 0; k < call->n_outputs; k++) {
        if (!outputs[k]) continue;
        outputs[k]->maker = call;
        outputs[k]->maker_output = k;
        xt_call_retain(call);
    }
    /* The making reference of a lone record goes over to its outputs; a segment's list needs
       none. */
    if (!call->owner) xt_call_release(ctx, call);
    if (call->wants) ctx->newest = call;
    return XT_OK;
}

/* ---- leaves ---------------------------------------------------------------------------------- */

enum xt_status xt_var_new(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor **out) {
    char text[128];
    if (!xt_dtype_is_float(t->dtype))
        return xt_fail(ctx, XT_DTYPE, "var: given %s, only floats have gradients",
                       xt_describe(t, text, sizeof text));
    struct xt_tensor *var;
    XT_TRY(xt_tensor_alias(ctx, t, &var));
    struct xt_leaf *leaf = xt_host_alloc(ctx, sizeof *leaf);
    if (!leaf) {
        xt_tensor_release(ctx, var);
        return XT_MEMORY;
    }
    leaf->refs = 1;
    leaf->device = t->storage->device;
    xt_spec_of(t, &leaf->spec);
    var->leaf = leaf;
    *out = var;
    return XT_OK;
}

/* A compute copy shares its master's leaf but not its dtype. */
bool xt_is_leaf(const struct xt_tensor *t) {
    return t->leaf && t->leaf->spec.dtype == t->dtype;
}

bool xt_requires_grad(const struct xt_tensor *t) {
    return t->leaf || (t->maker && t->maker->wants && xt_dtype_is_float(t->dtype));
}

struct xt_tensor *xt_grad_of(const struct xt_tensor *t) {
    return t->leaf ? t->leaf->grad : NULL;
}

void xt_zero_grad(struct xt_ctx *ctx, struct xt_tensor *t) {
    if (!t->leaf || !t->leaf->grad) return;
    xt_tensor_release(ctx, t->leaf->grad);
    t->leaf->grad = NULL;
}

enum xt_status xt_set_grad(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor *grad) {
    if (!t->leaf) return xt_fail(ctx, XT_ARGUMENT, "grad: the tensor is not a variable");
    const struct xt_spec *want = &t->leaf->spec;
    char given[128], wanted[128];
    if (grad && (grad->dtype != want->dtype || !xt_has_shape(grad, want->shape, want->ndim)))
        return xt_fail(ctx, XT_SHAPE, "grad: given %s, wanted %s",
                       xt_describe(grad, given, sizeof given),
                       xt_describe_spec(want, wanted, sizeof wanted));
    struct xt_tensor *plain = NULL;
    if (grad) XT_TRY(xt_tensor_alias(ctx, grad, &plain));
    xt_tensor_release(ctx, t->leaf->grad);
    t->leaf->grad = plain;
    return XT_OK;
}

enum xt_status xt_detach(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor **out) {
    return xt_tensor_alias(ctx, t, out);
}

/* Writes the master into an existing copy, or into a new one. Never part of a segment: a compute
   copy counts as made outside. */
static enum xt_status refresh_copy(struct xt_ctx *ctx, struct xt_tensor *master,
                                   enum xt_dtype dtype) {
    struct xt_leaf *leaf = master->leaf;
    struct xt_segment *segment = ctx->segment;
    struct xt_tensor *copy = NULL;
    ctx->segment = NULL;
    xt_no_grad_push(ctx);
    enum xt_status status = xt_cast(ctx, master, dtype, &copy);
    xt_no_grad_pop(ctx);
    ctx->segment = segment;
    if (status != XT_OK) return status;
    xt_tensor_release(ctx, leaf->copy);
    leaf->copy = copy;
    leaf->copy_version = master->storage->version;
    return XT_OK;
}

enum xt_status xt_compute_copy(struct xt_ctx *ctx, struct xt_tensor *master, enum xt_dtype dtype,
                               struct xt_tensor **out) {
    struct xt_leaf *leaf = master->leaf;
    if (!leaf || !xt_is_leaf(master))
        return xt_fail(ctx, XT_ARGUMENT, "compute copy: the tensor is not a variable");
    /* A graph makes its own, from its state. */
    bool outside = ctx->graph && !xt_graph_is_frozen(ctx) && leaf->copy &&
                   leaf->copy->storage->number <= xt_graph_first_storage(ctx);
    if (!leaf->copy || leaf->copy->dtype != dtype || outside ||
        leaf->copy_version != master->storage->version)
        XT_TRY(refresh_copy(ctx, master, dtype));
    struct xt_tensor *copy;
    XT_TRY(xt_tensor_alias(ctx, leaf->copy, &copy));
    copy->leaf = leaf;
    leaf->refs++;
    *out = copy;
    return XT_OK;
}

struct xt_tensor *xt_compute_copy_peek(struct xt_ctx *ctx, struct xt_tensor *master) {
    (void)ctx;
    return master->leaf ? master->leaf->copy : NULL;
}

void xt_compute_copy_fresh(struct xt_tensor *master) {
    if (master->leaf) master->leaf->copy_version = master->storage->version;
}

/* ---- what rules ask of a record -------------------------------------------------------------- */

const union xt_attr *xt_call_attrs(const struct xt_call *call) {
    return call->attrs;
}

const int64_t *xt_call_ints(const struct xt_call *call) {
    return call->ints;
}

enum xt_device xt_call_device(const struct xt_call *call) {
    for (int k = 0; k < call->n_outputs; k++)
        if (call->grad_out[k]) return call->grad_out[k]->storage->device;
    for (int i = 0; i < call->n_inputs; i++)
        if (call->in[i]) return call->in[i]->storage->device;
    return XT_CPU;
}
