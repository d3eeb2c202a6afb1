/*
 * call.c: THE path. Every launch, forward, backward or optimizer, goes through xt_call_run: check
 * the arguments against the op's row, run its shape rule, allocate outputs, launch the kernel,
 * record.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "tape.h"

/* ---- registered ops -------------------------------------------------------------------------- */

extern xt_op_list xt_ops_pointwise, xt_ops_reduce, xt_ops_view, xt_ops_shape, xt_ops_linalg,
    xt_ops_norm, xt_ops_index, xt_ops_loss, xt_ops_attention, xt_ops_mlp, xt_ops_random,
    xt_ops_optim;

static const struct xt_op *const *const families[] = {
    xt_ops_pointwise, xt_ops_reduce, xt_ops_view,      xt_ops_shape, xt_ops_linalg, xt_ops_norm,
    xt_ops_index,     xt_ops_loss,   xt_ops_attention, xt_ops_mlp,   xt_ops_random, xt_ops_optim,
};

static struct xt_slot make_slot(const struct xt_op *op) {
    struct xt_slot slot = {.op = op};
    for (const struct xt_param *p = op->params; p->name; p++) {
        slot.n_params++;
        slot.n_slots += xt_takes_slot(p);
        slot.n_attrs += xt_takes_attr(p);
        slot.has_list = slot.has_list || p->kind == XT_P_TENSORS;
        slot.has_dims = slot.has_dims || p->kind == XT_P_DIM || p->kind == XT_P_DIMS;
    }
    assert(slot.n_params <= XT_MAX_PARAMS && op->n_outputs <= XT_MAX_OUTPUTS);
    return slot;
}

static size_t pointer_hash(const void *p) {
    return (size_t)(((uintptr_t)p >> 4) * 0x9E3779B97F4A7C15u >> 40);
}

static size_t name_hash(const char *name) {
    size_t h = 5381;
    while (*name) h = h * 33 + (unsigned char)*name++;
    return h;
}

static int compare_rows(const void *a, const void *b) {
    return strcmp((*(const struct xt_kernel *const *)a)->op,
                  (*(const struct xt_kernel *const *)b)->op);
}

/* Fills in the kernels of every op: rows sorted by name once, then found by bisection. */
enum xt_status xt_find_kernels(struct xt_ctx *ctx, enum xt_device device,
                               const struct xt_kernel *const *tables) {
    size_t n = 0;
    for (int t = 0; tables[t]; t++)
        for (const struct xt_kernel *k = tables[t]; k->op; k++) n++;
    const struct xt_kernel **rows = malloc((n + 1) * sizeof *rows);
    if (!rows) return XT_MEMORY;
    n = 0;
    for (int t = 0; tables[t]; t++)
        for (const struct xt_kernel *k = tables[t]; k->op; k++) rows[n++] = k;
    qsort(rows, n, sizeof *rows, compare_rows);
    for (int i = 0; i < ctx->n_slots; i++) {
        struct xt_slot *slot = &ctx->slots[i];
        size_t low = 0, high = n;
        while (low < high) {
            size_t middle = (low + high) / 2;
            if (strcmp(rows[middle]->op, slot->op->name) < 0)
                low = middle + 1;
            else
                high = middle;
        }
        for (; low < n && strcmp(rows[low]->op, slot->op->name) == 0; low++)
            for (int d = 0; d < XT_DTYPE_COUNT; d++)
                if (rows[low]->dtypes & XT_BIT(d)) slot->kernels[device][d] = rows[low];
    }
    free(rows);
    return XT_OK;
}

static int *free_place(const struct xt_ctx *ctx, int *table, size_t hash) {
    size_t at = hash & (ctx->cap_slot_of - 1);
    while (table[at]) at = (at + 1) & (ctx->cap_slot_of - 1);
    return &table[at];
}

enum xt_status xt_ops_open(struct xt_ctx *ctx) {
    int n = 0;
    for (size_t f = 0; f < sizeof families / sizeof *families; f++)
        for (const struct xt_op *const *op = families[f]; *op; op++) n++;
    ctx->cap_slot_of = 64;
    while (ctx->cap_slot_of < 4 * (size_t)n) ctx->cap_slot_of *= 2;
    ctx->slots = calloc((size_t)n, sizeof *ctx->slots);
    ctx->slot_of = calloc(ctx->cap_slot_of, sizeof *ctx->slot_of);
    ctx->slot_named = calloc(ctx->cap_slot_of, sizeof *ctx->slot_named);
    if (!ctx->slots || !ctx->slot_of || !ctx->slot_named) return XT_MEMORY;
    for (size_t f = 0; f < sizeof families / sizeof *families; f++)
        for (const struct xt_op *const *op = families[f]; *op; op++) {
            ctx->slots[ctx->n_slots++] = make_slot(*op);
            *free_place(ctx, ctx->slot_of, pointer_hash(*op)) = ctx->n_slots;
            *free_place(ctx, ctx->slot_named, name_hash((*op)->name)) = ctx->n_slots;
        }
    return xt_find_kernels(ctx, XT_CPU, xt_cpu_kernel_tables(ctx->isa));
}

void xt_ops_close(struct xt_ctx *ctx) {
    free(ctx->slots);
    free(ctx->slot_of);
    free(ctx->slot_named);
}

const struct xt_slot *xt_slot_find(const struct xt_ctx *ctx, const struct xt_op *op) {
    size_t at = pointer_hash(op) & (ctx->cap_slot_of - 1);
    while (ctx->slot_of[at]) {
        const struct xt_slot *slot = &ctx->slots[ctx->slot_of[at] - 1];
        if (slot->op == op) return slot;
        at = (at + 1) & (ctx->cap_slot_of - 1);
    }
    return NULL;
}

int xt_op_count(const struct xt_ctx *ctx) {
    return ctx->n_slots;
}

const struct xt_op *xt_op_at(const struct xt_ctx *ctx, int index) {
    return index >= 0 && index < ctx->n_slots ? ctx->slots[index].op : NULL;
}

const struct xt_op *xt_op_find(const struct xt_ctx *ctx, const char *name) {
    size_t at = name_hash(name) & (ctx->cap_slot_of - 1);
    for (; ctx->slot_named[at]; at = (at + 1) & (ctx->cap_slot_of - 1)) {
        const struct xt_op *op = ctx->slots[ctx->slot_named[at] - 1].op;
        if (strcmp(op->name, name) == 0) return op;
    }
    return NULL;
}

bool xt_op_has_kernel(const struct xt_ctx *ctx, const struct xt_op *op, enum xt_device device,
                      enum xt_dtype dtype) {
    const struct xt_slot *slot = xt_slot_find(ctx, op);
    if (op->flags & (XT_VIEW | XT_COMPOSED)) return !op->dtypes || (op->dtypes & XT_BIT(dtype));
    return slot && slot->kernels[device][dtype];
}

/* ---- arguments ------------------------------------------------------------------------------- */

void xt_args_init(struct xt_args *args, const struct xt_op *op, struct xt_tensor *const *inputs,
                  int n_inputs) {
    args->inputs = inputs;
    args->n_inputs = n_inputs;
    args->n_ints = 0;
    int k = 0;
    for (const struct xt_param *p = op->params; p->name; p++) {
        if (!xt_takes_attr(p)) continue;
        union xt_attr *a = &args->attrs[k++];
        a->i = 0;
        if (p->kind == XT_P_REAL)
            a->f = p->fallback;
        else if (p->kind != XT_P_DIMS && p->kind != XT_P_SHAPE)
            a->i = (int64_t)p->fallback;
    }
}

void xt_args_list(struct xt_args *args, int attr, const int64_t *values, int n) {
    assert(args->n_ints + n <= XT_MAX_INTS);
    args->attrs[attr].list.start = args->n_ints;
    args->attrs[attr].list.count = n;
    for (int i = 0; i < n; i++) args->ints[args->n_ints++] = values[i];
}

uint64_t xt_launch_seed(const struct xt_launch *l, int attr, int input) {
    const struct xt_tensor *t = input < l->n_in ? l->in[input] : NULL;
    return t ? *(const uint64_t *)xt_data(t) : l->attrs[attr].seed;
}

/* The parameter of input slot i. */
static const struct xt_param *input_param(const struct xt_op *op, int i) {
    for (const struct xt_param *p = op->params; p->name; p++)
        if (xt_takes_slot(p) && (i-- == 0 || p->kind == XT_P_TENSORS)) return p;
    return NULL;
}

const char *xt_input_name(const struct xt_op *op, int i) {
    return input_param(op, i)->name;
}

static enum xt_status check_inputs(struct xt_ctx *ctx, const struct xt_slot *slot,
                                   const struct xt_args *args) {
    const struct xt_op *op = slot->op;
    char text[128];
    int need = slot->has_list ? slot->n_slots - 1 : slot->n_slots;
    if (args->n_inputs < need || (!slot->has_list && args->n_inputs > need))
        return xt_fail(ctx, XT_ARGUMENT, "given %d tensors, wanted %d%s", args->n_inputs, need,
                       slot->has_list ? " and a list" : "");
    if (slot->has_list && args->n_inputs == need)
        return xt_fail(ctx, XT_ARGUMENT, "%s is an empty list, wanted one tensor or more",
                       input_param(op, need)->name);
    const struct xt_tensor *first = NULL;
    for (int i = 0; i < args->n_inputs; i++) {
        const struct xt_tensor *t = args->inputs[i];
        if (!t) {
            if (i >= need && op->write_group) continue;
            const struct xt_param *p = input_param(op, i);
            if (p->optional || p->kind == XT_P_SEED) continue;
            return xt_fail(ctx, XT_ARGUMENT, "%s is missing, wanted a tensor", p->name);
        }
        if (t->storage->hollow && !ctx->graph)
            return xt_fail(ctx, XT_STATE,
                           "%s is a value of a graph that was recorded: it has no bytes here",
                           input_param(op, i)->name);
        if (first && first->storage->device != t->storage->device)
            return xt_fail(ctx, XT_DEVICE, "%s is on %s, %s is on %s", input_param(op, 0)->name,
                           ctx->backend[first->storage->device]->name, input_param(op, i)->name,
                           ctx->backend[t->storage->device]->name);
        if (!first) first = t;
    }
    const struct xt_tensor *x = args->n_inputs ? args->inputs[0] : NULL;
    if (x && op->dtypes && !(op->dtypes & XT_BIT(x->dtype))) {
        size_t used = 0;
        char wanted[64] = "";
        for (int d = 0; d < XT_DTYPE_COUNT; d++)
            if (op->dtypes & XT_BIT(d))
                used += (size_t)snprintf(wanted + used, sizeof wanted - used, used ? ", %s" : "%s",
                                         xt_dtype_name((enum xt_dtype)d));
        return xt_fail(ctx, XT_DTYPE, "%s is %s, wanted %s", input_param(op, 0)->name,
                       xt_describe(x, text, sizeof text), wanted);
    }
    return XT_OK;
}

static enum xt_status resolve_dim(struct xt_ctx *ctx, const struct xt_param *p,
                                  const struct xt_tensor *x, int rank, int64_t *dim) {
    char text[128];
    int64_t d = *dim < 0 ? *dim + rank : *dim;
    if (d < 0 || d >= rank)
        return xt_fail(ctx, XT_ARGUMENT, "%s is %lld, x has %d dimension%s (%s)", p->name,
                       (long long)(*dim < 0 ? *dim : *dim + 1), rank, rank == 1 ? "" : "s",
                       xt_describe(x, text, sizeof text));
    *dim = d;
    return XT_OK;
}

/* Makes DIM and DIMS attributes count from 0; lists ascending and without repetition. */
static enum xt_status resolve_dims(struct xt_ctx *ctx, const struct xt_slot *slot,
                                   struct xt_args *args) {
    const struct xt_op *op = slot->op;
    const struct xt_tensor *x = args->inputs[0];
    int rank = x->ndim + ((op->flags & XT_NEW_DIM) != 0), k = 0;
    for (const struct xt_param *p = op->params; p->name; p++) {
        if (!xt_takes_attr(p)) continue;
        union xt_attr *a = &args->attrs[k++];
        if (p->kind == XT_P_DIM) {
            /* Of a scalar, the only dimension there is to name is the last of none. */
            if (rank == 0 && (a->i == -1 || a->i == 0))
                a->i = 0;
            else
                XT_TRY(resolve_dim(ctx, p, x, rank, &a->i));
        } else if (p->kind == XT_P_DIMS) {
            int64_t *list = args->ints + a->list.start;
            unsigned seen = 0;
            for (int i = 0; i < a->list.count; i++) {
                XT_TRY(resolve_dim(ctx, p, x, rank, &list[i]));
                if (seen & (1u << list[i]))
                    return xt_fail(ctx, XT_ARGUMENT, "dimension %lld is named twice",
                                   (long long)list[i] + 1);
                seen |= 1u << list[i];
            }
            int n = 0;
            for (int d = 0; d < rank; d++)
                if (seen & (1u << d)) list[n++] = d;
        }
    }
    return XT_OK;
}

/* ---- writes in place ------------------------------------------------------------------------- */

bool xt_slot_writes(const struct xt_slot *slot, int i) {
    const struct xt_op *op = slot->op;
    int list = slot->n_slots - 1;
    if (op->write_group && slot->has_list && i >= list)
        return op->write_group_mask >> ((i - list) % op->write_group) & 1u;
    return op->writes >> (i < 31 ? i : 31) & 1u;
}

static bool writes(const struct xt_op *op) {
    return op->writes || op->write_group;
}

/* Two tensors that share bytes without being the same view of them. */
static bool overlaps(const struct xt_tensor *a, const struct xt_tensor *b) {
    if (a->storage != b->storage) return false;
    if (a->offset == b->offset && xt_has_shape(a, b->shape, b->ndim) &&
        memcmp(a->stride, b->stride, (size_t)a->ndim * sizeof *a->stride) == 0)
        return false;
    int64_t end_a = a->offset, end_b = b->offset;
    for (int d = 0; d < a->ndim; d++) {
        if (a->shape[d] == 0) return false;
        end_a += (a->shape[d] - 1) * a->stride[d];
    }
    for (int d = 0; d < b->ndim; d++) {
        if (b->shape[d] == 0) return false;
        end_b += (b->shape[d] - 1) * b->stride[d];
    }
    return a->offset <= end_b && b->offset <= end_a;
}

static enum xt_status check_writes(struct xt_ctx *ctx, const struct xt_slot *slot,
                                   const struct xt_args *args) {
    bool lists = slot->op->write_group != 0;
    for (int i = 0; i < args->n_inputs; i++) {
        const struct xt_tensor *t = args->inputs[i];
        if (!t || !xt_slot_writes(slot, i)) continue;
        const char *name = input_param(slot->op, i)->name;
        if (xt_recording(ctx) && xt_requires_grad(t))
            return xt_fail(ctx, XT_STATE,
                           "%s is a variable: it is changed in place only under "
                           "no_grad",
                           name);
        if (ctx->segment && t->storage->number <= ctx->segment->first_storage)
            return xt_fail(ctx, XT_STATE,
                           "%s was made outside the checkpoint segment, and a "
                           "replay would change it again",
                           name);
        if (xt_tensor_has_overlap(t))
            return xt_fail(ctx, XT_ARGUMENT,
                           "%s has several elements in one place (an expanded "
                           "view): write to a contiguous copy",
                           name);
        if (lists) continue; /* made by optimizers, whose lists are long */
        for (int j = 0; j < args->n_inputs; j++) {
            const struct xt_tensor *other = args->inputs[j];
            if (j == i || !other) continue;
            if (overlaps(t, other))
                return xt_fail(ctx, XT_ARGUMENT, "%s and %s overlap in memory", name,
                               input_param(slot->op, j)->name);
            if (xt_recording(ctx) && xt_requires_grad(other))
                return xt_fail(ctx, XT_STATE,
                               "%s requires a gradient, which a change in place "
                               "would lose: use the op that returns a new tensor, or no_grad",
                               input_param(slot->op, j)->name);
        }
    }
    return XT_OK;
}

/* ---- launching ------------------------------------------------------------------------------- */

static bool fits(const struct xt_tensor *t, enum xt_layout layout) {
    if (layout == XT_STRIDED) return true;
    if (layout == XT_INNER) {
        int last = t->ndim - 1;
        return last < 0 || t->stride[last] == 1 || t->shape[last] <= 1;
    }
    return xt_is_contiguous(t);
}

/* A contiguous copy through the kernel of `contiguous`, unrecorded. */
static enum xt_status copy_of(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor **out) {
    const struct xt_slot *slot = xt_slot_find(ctx, xt_op_find(ctx, "contiguous"));
    struct xt_args args = {.inputs = &t, .n_inputs = 1};
    enum xt_trap trap = ctx->trap; /* what it copies is not its result */
    ctx->trap = XT_TRAP_OFF;
    enum xt_status status = xt_execute(ctx, slot, &args, false, out);
    ctx->trap = trap;
    return status;
}

static enum xt_status launch(struct xt_ctx *ctx, const struct xt_slot *slot,
                             const struct xt_args *args, struct xt_tensor **outputs) {
    const struct xt_op *op = slot->op;
    const struct xt_tensor *x = args->n_inputs && args->inputs[0] ? args->inputs[0] : outputs[0];
    enum xt_device device = x->storage->device;
    const struct xt_kernel *kernel = slot->kernels[device][x->dtype];
    if (!kernel)
        return xt_fail(ctx, XT_UNSUPPORTED, "there is no kernel for %s on %s",
                       xt_dtype_name(x->dtype), ctx->backend[device]->name);
    struct xt_launch l = {op,          args->inputs, args->n_inputs, outputs, op->n_outputs,
                          args->attrs, args->ints};
    bool all_fit = true;
    if (kernel->layout != XT_STRIDED)
        for (int i = 0; i < args->n_inputs && all_fit; i++)
            all_fit = !args->inputs[i] || fits(args->inputs[i], kernel->layout);
    if (all_fit) return kernel->run(ctx, &l);

    enum xt_status status = XT_OK;
    size_t bytes = (size_t)args->n_inputs * sizeof(struct xt_tensor *);
    struct xt_tensor **in = xt_host_alloc(ctx, bytes);
    if (!in) return XT_MEMORY;
    for (int i = 0; i < args->n_inputs; i++) {
        struct xt_tensor *t = args->inputs[i];
        if (!t || fits(t, kernel->layout))
            in[i] = xt_tensor_retain(t);
        else if (xt_slot_writes(slot, i)) {
            status = xt_fail(ctx, XT_ARGUMENT, "%s must be contiguous to be written in place",
                             input_param(op, i)->name);
            goto done;
        } else
            XT_GO(copy_of(ctx, t, &in[i]));
    }
    l.in = in;
    status = kernel->run(ctx, &l);
done:
    for (int i = 0; i < args->n_inputs; i++) xt_tensor_release(ctx, in[i]);
    xt_host_free(ctx, in, bytes);
    return status;
}

static enum xt_status view_of(struct xt_ctx *ctx, struct xt_tensor *x,
                              const struct xt_output *where, struct xt_tensor **out) {
    XT_TRY(xt_tensor_alias(ctx, x, out));
    struct xt_tensor *t = *out;
    t->dtype = where->spec.dtype;
    t->ndim = where->spec.ndim;
    t->offset = where->offset;
    memcpy(t->shape, where->spec.shape, sizeof t->shape);
    memcpy(t->stride, where->stride, sizeof t->stride);
    return XT_OK;
}

enum xt_status xt_execute(struct xt_ctx *ctx, const struct xt_slot *slot,
                          const struct xt_args *args, bool hidden, struct xt_tensor **outputs) {
    const struct xt_op *op = slot->op;
    struct xt_output where[XT_MAX_OUTPUTS];
    struct xt_tensor *made[XT_MAX_OUTPUTS] = {NULL};
    enum xt_status status = XT_OK;
    XT_GO(op->infer(ctx, op, args, where));
    bool hollow = ctx->graph && xt_graph_is_hollow(ctx, slot, args);
    if (op->flags & XT_VIEW) {
        XT_GO(view_of(ctx, args->inputs[0], &where[0], &made[0]));
    } else {
        enum xt_device device = ctx->device;
        for (int i = args->n_inputs; i-- > 0;)
            if (args->inputs[i]) device = args->inputs[i]->storage->device;
        int n = op->n_outputs - (hidden ? 0 : op->n_hidden);
        for (int k = 0; k < n; k++)
            XT_GO(hollow ? xt_tensor_hollow(ctx, &where[k].spec, device, &made[k])
                         : xt_tensor_new(ctx, &where[k].spec, device, &made[k]));
        if (!hollow) XT_GO(xt_launch_ready(ctx, slot, args, made));
    }
    memcpy(outputs, made, (size_t)op->n_outputs * sizeof *made);
    return XT_OK;
done:
    for (int k = 0; k < op->n_outputs; k++) xt_tensor_release(ctx, made[k]);
    return status;
}

enum xt_status xt_launch_ready(struct xt_ctx *ctx, const struct xt_slot *slot,
                               const struct xt_args *args, struct xt_tensor **outputs) {
    if (!ctx->profile) {
        XT_TRY(launch(ctx, slot, args, outputs));
    } else {
        struct xt_timer timer = xt_profile_begin(ctx);
        XT_TRY(launch(ctx, slot, args, outputs));
        xt_profile_end(ctx, &timer, slot, args, outputs);
    }
    if (ctx->sync) XT_TRY(xt_devices_finish(ctx));
    return ctx->trap ? xt_trap_check(ctx, slot, args, outputs) : XT_OK;
}

bool xt_slot_fits(const struct xt_slot *slot, enum xt_device device, enum xt_dtype dtype,
                  const struct xt_tensor *t) {
    const struct xt_kernel *kernel = slot->kernels[device][dtype];
    return !kernel || fits(t, kernel->layout);
}

/* Whether a call with these inputs makes outputs that require a gradient. */
static bool wants_gradient(const struct xt_ctx *ctx, const struct xt_op *op,
                           const struct xt_args *args) {
    if (ctx->no_grad || (op->flags & XT_NO_GRADIENT) || !op->backward) return false;
    for (int i = 0; i < args->n_inputs; i++)
        if (args->inputs[i] && xt_requires_grad(args->inputs[i])) return true;
    return false;
}

static enum xt_status compose(struct xt_ctx *ctx, const struct xt_op *op,
                              const struct xt_args *args, struct xt_tensor **outputs) {
    const struct xt_op *outer = ctx->within;
    if (!outer) ctx->within = op;
    enum xt_status status = op->compose(ctx, op, args, outputs);
    ctx->within = outer;
    return status;
}

static enum xt_status run(struct xt_ctx *ctx, const struct xt_slot *slot,
                          const struct xt_args *args, struct xt_tensor **outputs) {
    const struct xt_op *op = slot->op;
    struct xt_args resolved;
    XT_TRY(check_inputs(ctx, slot, args));
    if (slot->has_dims && args->n_inputs && args->inputs[0]) {
        resolved = *args;
        XT_TRY(resolve_dims(ctx, slot, &resolved));
        args = &resolved;
    }
    if (ctx->graph) XT_TRY(xt_graph_check(ctx, slot, args));
    if (op->flags & XT_COMPOSED) return compose(ctx, op, args, outputs);
    bool in_place = writes(op);
    if (in_place) XT_TRY(check_writes(ctx, slot, args));

    bool wants = wants_gradient(ctx, op, args);
    struct xt_call *call = NULL;
    if (wants || ctx->segment || ctx->graph) XT_TRY(xt_record_new(ctx, slot, args, wants, &call));
    struct xt_tensor *made[XT_MAX_OUTPUTS] = {NULL};
    enum xt_status status = xt_execute(ctx, slot, args, wants, made);
    if (status == XT_OK && ctx->graph) status = xt_graph_add(ctx, call, args->inputs, made);
    if (status == XT_OK && call) status = xt_record_finish(ctx, call, made);
    if (status != XT_OK) {
        for (int k = 0; k < op->n_outputs; k++) xt_tensor_release(ctx, made[k]);
        if (call && ctx->graph) xt_graph_remove(ctx, call);
        if (call) xt_record_abandon(ctx, call);
        return status;
    }
    if (in_place)
        for (int i = 0; i < args->n_inputs; i++)
            if (args->inputs[i] && xt_slot_writes(slot, i))
                xt_storage_written(ctx, args->inputs[i]->storage);
    int visible = op->n_outputs - op->n_hidden;
    for (int k = 0; k < op->n_outputs; k++) {
        if (k < visible)
            outputs[k] = made[k];
        else
            xt_tensor_release(ctx, made[k]);
    }
    return XT_OK;
}

enum xt_status xt_call_run(struct xt_ctx *ctx, const struct xt_op *op, const struct xt_args *args,
                           struct xt_tensor **outputs) {
    const struct xt_slot *slot = xt_slot_find(ctx, op);
    assert(slot);
    bool stop = ctx->hooks.interrupted && ctx->hooks.interrupted(ctx->hooks.user);
    enum xt_status status =
        stop ? xt_fail(ctx, XT_INTERRUPTED, "interrupted") : run(ctx, slot, args, outputs);
    if (status == XT_OK && ctx->observe) status = xt_observe_call(ctx, op, args, outputs);
    return status == XT_OK ? XT_OK : xt_fail_in(ctx, status, op->name);
}
