/*
 * backward.c: the walk back over the records.
 *
 * The walk is a loop over a list, not a recursion: a chain of any length works with a small stack.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tape.h"

/* ---- the walk -------------------------------------------------------------------------------- */

struct call_list {
    struct xt_call **items; /* n of cap */
    size_t n, cap;
};

static enum xt_status push(struct xt_ctx *ctx, struct call_list *list, struct xt_call *call) {
    if (list->n == list->cap) {
        size_t cap = list->cap ? 2 * list->cap : 64;
        struct xt_call **items = xt_host_alloc(ctx, cap * sizeof *items);
        if (!items) return XT_MEMORY;
        if (list->n) memcpy(items, list->items, list->n * sizeof *items);
        xt_host_free(ctx, list->items, list->cap * sizeof *items);
        list->items = items;
        list->cap = cap;
    }
    list->items[list->n++] = call;
    return XT_OK;
}

static void free_list(struct xt_ctx *ctx, struct call_list *list) {
    xt_host_free(ctx, list->items, list->cap * sizeof *list->items);
}

static int by_falling_number(const void *a, const void *b) {
    int64_t x = (*(struct xt_call *const *)a)->number, y = (*(struct xt_call *const *)b)->number;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* All records that lead to `root`, by falling number. The list doubles as the stack of the
   search. */
static enum xt_status reachable(struct xt_ctx *ctx, struct xt_call *root, uint64_t stamp,
                                struct call_list *list) {
    root->mark = stamp;
    XT_TRY(push(ctx, list, root));
    for (size_t next = 0; next < list->n; next++) {
        struct xt_call *call = list->items[next];
        for (int i = 0; i < call->n_inputs; i++) {
            struct xt_call *maker = call->edges[i].wants ? call->edges[i].maker : NULL;
            if (!maker || maker->mark == stamp) continue;
            maker->mark = stamp;
            XT_TRY(push(ctx, list, maker));
        }
    }
    qsort(list->items, list->n, sizeof *list->items, by_falling_number);
    return XT_OK;
}

/* Marks the records that lead to an input asked for with stamp + 1: makers come before users. */
static void mark_needed(struct xt_walk *walk, struct call_list *list) {
    for (size_t n = list->n; n-- > 0;) {
        struct xt_call *call = list->items[n];
        for (int i = 0; i < call->n_inputs && call->mark == walk->stamp; i++)
            if (xt_edge_wanted(walk, &call->edges[i])) call->mark = walk->stamp + 1;
    }
}

static enum xt_status check_version(struct xt_ctx *ctx, const struct xt_call *call,
                                    const struct xt_tensor *t, uint64_t version) {
    if (!t || t->storage->version == version) return XT_OK;
    char text[128];
    const struct xt_where *wrote = &t->storage->wrote;
    return xt_fail(ctx, XT_STATE,
                   "a value (%s) kept at %s:%d for the backward of %s was changed "
                   "in place at %s:%d",
                   xt_describe(t, text, sizeof text), call->where.file ? call->where.file : "?",
                   call->where.line, call->slot->op->name, wrote->file ? wrote->file : "?",
                   wrote->line);
}

static enum xt_status check_kept(struct xt_ctx *ctx, const struct xt_call *call) {
    if (call->freed)
        return xt_fail(ctx, XT_STATE,
                       "the records were freed by the backward at %s:%d: give it "
                       "{retain = true} to walk them twice",
                       call->freed_at.file ? call->freed_at.file : "?", call->freed_at.line);
    for (int i = 0; i < call->n_inputs; i++)
        XT_TRY(check_version(ctx, call, call->in[i], call->in_version[i]));
    for (int k = 0; k < call->n_outputs; k++)
        XT_TRY(check_version(ctx, call, call->out[k], call->out_version[k]));
    return XT_OK;
}

/* Runs one record's rule and routes what it gives. */
static enum xt_status step(struct xt_ctx *ctx, struct xt_call *call) {
    enum { FEW = 8 };
    struct xt_tensor *few_grads[FEW] = {NULL};
    bool few_wants[FEW] = {false};
    size_t n = (size_t)call->n_inputs;
    void *many = NULL;
    size_t many_bytes = n * (sizeof(struct xt_tensor *) + sizeof(bool));
    struct xt_tensor **grad_in = few_grads;
    bool *wants = few_wants;
    XT_TRY(xt_segment_revive(ctx, call));
    XT_TRY(check_kept(ctx, call));
    if (n > FEW) {
        many = xt_host_alloc(ctx, many_bytes);
        if (!many) return XT_MEMORY;
        grad_in = many;
        wants = (bool *)(grad_in + n);
    }
    for (size_t i = 0; i < n; i++) wants[i] = xt_edge_wanted(ctx->walk, &call->edges[i]);
    struct xt_grads g = {
        .call = call,
        .n_inputs = call->n_inputs,
        .n_outputs = call->n_outputs,
        .in = call->in,
        .out = call->out,
        .in_spec = call->in_spec,
        .out_spec = call->out_spec,
        .grad_out = call->grad_out,
        .more = call->more,
        .wants = wants,
        .grad_in = grad_in,
    };
    ctx->fixed_where = call->where;
    ctx->walk->call = call;
    enum xt_status status = call->slot->op->backward(ctx, &g);
    if (status == XT_OK && ctx->observe) status = xt_observe_record(ctx, call, grad_in);
    xt_grads_share(ctx, 0, NULL);
    for (int i = 0; i < call->n_inputs && status == XT_OK; i++) {
        struct xt_tensor *gradient = grad_in[i];
        grad_in[i] = NULL;
        if (gradient && wants[i])
            status = xt_grads_give(ctx, call, i, gradient);
        else
            xt_tensor_release(ctx, gradient);
    }
    ctx->fixed_where = (struct xt_where){0};
    ctx->walk->call = NULL;
    if (status != XT_OK) {
        char who[160];
        snprintf(who, sizeof who, "%s made at %s:%d", call->slot->op->name,
                 call->where.file ? call->where.file : "?", call->where.line);
        xt_fail_in(ctx, status, who);
    }
    xt_drop_tensors(ctx, grad_in, call->n_inputs);
    xt_host_free(ctx, many, many_bytes);
    return status;
}

static bool has_gradient(const struct xt_call *call) {
    for (int k = 0; k < call->n_outputs; k++)
        if (call->grad_out[k]) return true;
    return false;
}

static void take_results(struct xt_walk *walk, struct xt_call *call) {
    for (int i = 0; i < walk->n_targets; i++) {
        const struct xt_tensor *t = walk->targets[i];
        if (t->leaf || t->maker != call || walk->results[i]) continue;
        walk->results[i] = xt_tensor_retain(call->grad_out[t->maker_output]);
    }
}

/* After a failure: what this walk added cannot be taken out again, so gradients it touched are no
   gradients any more, and what flowed between records is dropped. */
static void undo(struct xt_ctx *ctx, struct call_list *list) {
    for (size_t n = 0; n < list->n; n++) {
        struct xt_call *call = list->items[n];
        xt_drop_tensors(ctx, call->grad_out, call->n_outputs);
        xt_drop_tensors(ctx, call->more, XT_APART);
        for (int i = 0; i < call->n_inputs; i++) {
            struct xt_leaf *leaf = call->edges[i].leaf;
            if (!leaf || leaf->touched != ctx->walk->stamp || !leaf->grad) continue;
            xt_tensor_release(ctx, leaf->grad);
            leaf->grad = NULL;
        }
    }
}

static enum xt_status first_gradient(struct xt_ctx *ctx, struct xt_tensor *output,
                                     struct xt_tensor *seed, struct xt_tensor **out) {
    char text[128], given[128];
    struct xt_spec spec;
    xt_spec_of(output, &spec);
    if (!seed) {
        if (xt_numel(output) != 1)
            return xt_fail(ctx, XT_SHAPE,
                           "the value is %s, not one number: give a seed of its "
                           "shape, or reduce it first",
                           xt_describe(output, text, sizeof text));
        return xt_full(ctx, &spec, output->storage->device, 1.0, out);
    }
    if (seed->dtype != output->dtype || !xt_has_shape(seed, spec.shape, spec.ndim))
        return xt_fail(ctx, XT_SHAPE, "the seed is %s, the value is %s",
                       xt_describe(seed, given, sizeof given),
                       xt_describe(output, text, sizeof text));
    return xt_tensor_alias(ctx, seed, out);
}

static enum xt_status walk_back(struct xt_ctx *ctx, struct xt_tensor *output,
                                struct xt_tensor *seed, bool retain) {
    struct call_list list = {0};
    struct xt_tensor *first = NULL;
    struct xt_where here = xt_here(ctx);
    enum xt_status status = XT_OK;
    XT_GO(first_gradient(ctx, output, seed, &first));
    struct xt_edge whole = {.maker = output->maker,
                            .output = output->maker_output,
                            .leaf = output->leaf,
                            .wants = true};
    if (ctx->walk->as_values) {
        for (int i = 0; i < ctx->walk->n_targets; i++)
            if (ctx->walk->targets[i] == output ||
                (output->leaf && ctx->walk->targets[i]->leaf == output->leaf))
                ctx->walk->results[i] = xt_tensor_retain(first);
    }
    if (whole.leaf) {
        if (!ctx->walk->as_values) {
            struct xt_tensor *g = first;
            first = NULL;
            if (g->dtype != whole.leaf->spec.dtype) {
                struct xt_tensor *next;
                status = xt_cast(ctx, g, whole.leaf->spec.dtype, &next);
                xt_tensor_release(ctx, g);
                if (status != XT_OK) goto done;
                g = next;
            }
            status = xt_grads_add_to_leaf(ctx, whole.leaf, g);
        }
        goto done;
    }
    XT_GO(reachable(ctx, whole.maker, ctx->walk->stamp, &list));
    if (ctx->walk->as_values) mark_needed(ctx->walk, &list);
    whole.maker->grad_out[whole.output] = first;
    first = NULL;
    for (size_t n = 0; n < list.n && status == XT_OK; n++) {
        struct xt_call *call = list.items[n];
        bool needed = !ctx->walk->as_values || call->mark == ctx->walk->stamp + 1;
        if (call->more[0] && (ctx->walk->as_values || ctx->observe))
            status = xt_grads_join(ctx, call);
        if (status != XT_OK) break;
        if (ctx->walk->as_values) take_results(ctx->walk, call);
        if (needed && has_gradient(call)) status = step(ctx, call);
        if (status != XT_OK) break;
        xt_drop_tensors(ctx, call->grad_out, call->n_outputs);
        xt_drop_tensors(ctx, call->more, XT_APART);
        if (retain) continue;
        xt_record_drop_kept(ctx, call);
        call->freed = true;
        call->freed_at = here;
    }
    if (status != XT_OK) undo(ctx, &list);
done:
    xt_tensor_release(ctx, first);
    free_list(ctx, &list);
    return status;
}

static enum xt_status start(struct xt_ctx *ctx, const char *who, struct xt_walk *walk,
                            struct xt_tensor *output, struct xt_tensor *seed, bool retain) {
    char text[128];
    enum xt_status status;
    if (ctx->walk) return xt_fail(ctx, XT_STATE, "%s: a backward is in progress", who);
    if (ctx->segment) return xt_fail(ctx, XT_STATE, "%s: not inside a checkpoint segment", who);
    if (!xt_requires_grad(output))
        return xt_fail(ctx, XT_STATE, "%s: the value (%s) does not depend on any variable", who,
                       xt_describe(output, text, sizeof text));
    walk->stamp = ctx->mark += 2;
    ctx->walk = walk;
    xt_no_grad_push(ctx);
    status = walk_back(ctx, output, seed, retain);
    xt_no_grad_pop(ctx);
    ctx->walk = NULL;
    if (status == XT_OK && ctx->observe) status = xt_observe_end(ctx, walk->as_values);
    return status == XT_OK ? XT_OK : xt_fail_in(ctx, status, who);
}

enum xt_status xt_backward(struct xt_ctx *ctx, struct xt_tensor *output, struct xt_tensor *seed,
                           bool retain) {
    struct xt_walk walk = {0};
    return start(ctx, "backward", &walk, output, seed, retain);
}

enum xt_status xt_grad(struct xt_ctx *ctx, struct xt_tensor *output,
                       struct xt_tensor *const *inputs, int n, struct xt_tensor *seed, bool retain,
                       struct xt_tensor **grads) {
    struct xt_walk walk = {.as_values = true, .targets = inputs, .n_targets = n};
    size_t bytes = (size_t)n * sizeof(struct xt_tensor *);
    walk.results = xt_host_alloc(ctx, bytes);
    if (!walk.results) return XT_MEMORY;
    enum xt_status status = start(ctx, "grad", &walk, output, seed, retain);
    /* An input asked for twice has its gradient under its first place only. */
    for (int i = 0; i < n && status == XT_OK; i++)
        for (int j = 0; j < i && !walk.results[i]; j++)
            if (inputs[i]->leaf && inputs[i]->leaf == inputs[j]->leaf)
                walk.results[i] = xt_tensor_retain(walk.results[j]);
    if (status == XT_OK)
        memcpy(grads, walk.results, bytes);
    else
        xt_drop_tensors(ctx, walk.results, n);
    xt_host_free(ctx, walk.results, bytes);
    return status;
}

/* ---- looking --------------------------------------------------------------------------------- */

static size_t kept_bytes(struct xt_tensor *const *list, int n, uint64_t stamp) {
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        if (!list[i] || list[i]->storage->mark == stamp) continue;
        list[i]->storage->mark = stamp;
        bytes += list[i]->storage->bytes;
    }
    return bytes;
}

/* All of a record but the bytes it keeps. */
static void describe_record(const struct xt_call *call, struct xt_record_info *out) {
    *out = (struct xt_record_info){.number = call->number,
                                   .op = call->slot->op,
                                   .where = call->where,
                                   .n_outputs = call->n_outputs};
    for (int k = 0; k < call->n_outputs && k < 4; k++) out->outputs[k] = call->out_spec[k];
}

bool xt_record_of(const struct xt_tensor *t, struct xt_record_info *out) {
    if (!t->maker) return false;
    describe_record(t->maker, out);
    return true;
}

enum xt_status xt_tape_walk(struct xt_ctx *ctx, struct xt_tensor *t, xt_record_fn *fn, void *user) {
    struct xt_call *root = t ? t->maker : ctx->newest;
    if (!root) return XT_OK;
    struct call_list list = {0};
    uint64_t stamp = ctx->mark += 2;
    enum xt_status status = reachable(ctx, root, stamp, &list);
    for (size_t n = 0; n < list.n && status == XT_OK; n++) {
        const struct xt_call *call = list.items[n];
        struct xt_record_info info;
        describe_record(call, &info);
        info.kept_bytes = kept_bytes(call->in, call->n_inputs, stamp) +
                          kept_bytes(call->out, call->n_outputs, stamp) +
                          kept_bytes(call->value, call->n_outputs, stamp);
        fn(user, &info);
    }
    free_list(ctx, &list);
    return status;
}
