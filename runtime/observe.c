/*
 * observe.c: one function that is told of every call as it has run, and of every record as a
 * backward passes it. What it runs itself is neither recorded nor told.
 *
 * The launch point and the walk ask one pointer whether anybody looks: all that it costs when
 * nobody does.
 */
#include <stddef.h>

#include "context.h"
#include "tape.h"

void xt_observe(struct xt_ctx *ctx, xt_observe_fn *fn, void *user) {
    ctx->observer = fn;
    ctx->observe_user = user;
    if (!ctx->observing) ctx->observe = fn;
}

void xt_pause(struct xt_ctx *ctx, struct xt_pause *p) {
    *p = (struct xt_pause){ctx->observe, ctx->segment, ctx->graph, ctx->fixed_where, ctx->trap};
    ctx->observe = NULL;
    ctx->segment = NULL;
    ctx->graph = NULL;
    ctx->fixed_where = (struct xt_where){0};
    ctx->trap = XT_TRAP_OFF;
    xt_no_grad_push(ctx);
}

void xt_resume(struct xt_ctx *ctx, const struct xt_pause *p) {
    xt_no_grad_pop(ctx);
    ctx->observe = p->observe;
    ctx->segment = p->segment;
    ctx->graph = p->graph;
    ctx->fixed_where = p->where;
    ctx->trap = (enum xt_trap)p->trap;
}

/* The observer may put another one, or none, in its place. */
static enum xt_status tell(struct xt_ctx *ctx, const struct xt_seen *seen) {
    struct xt_pause pause;
    xt_pause(ctx, &pause);
    ctx->observing = true;
    enum xt_status status = ctx->observer(ctx->observe_user, ctx, seen);
    ctx->observing = false;
    xt_resume(ctx, &pause);
    ctx->observe = ctx->observer;
    return status;
}

enum xt_status xt_observe_call(struct xt_ctx *ctx, const struct xt_op *op,
                               const struct xt_args *args, struct xt_tensor **outputs) {
    int n_out = op->n_outputs - op->n_hidden;
    if (ctx->graph) return XT_OK; /* what is being recorded has no bytes yet */
    const struct xt_call *rule = ctx->walk ? ctx->walk->call : NULL;
    const struct xt_call *maker = n_out && outputs[0] ? outputs[0]->maker : NULL;
    struct xt_seen seen = {
        .kind = XT_SEEN_CALL,
        .op = op,
        .rule = rule ? rule->slot->op : NULL,
        .within = rule ? rule->within : ctx->within,
        .where = xt_here(ctx),
        .number = maker ? maker->number : 0,
        .n_in = args->n_inputs,
        .n_out = n_out,
        .in = args->inputs,
        .out = outputs,
    };
    const struct xt_slot *slot = xt_slot_find(ctx, op);
    for (int i = 0; i < args->n_inputs && i < 64; i++) {
        const struct xt_tensor *t = args->inputs[i];
        if (xt_slot_writes(slot, i)) seen.written |= UINT64_C(1) << i;
        if (t && xt_requires_grad(t)) seen.wants |= UINT64_C(1) << i;
    }
    enum xt_status status = tell(ctx, &seen);
    for (int k = 0; k < n_out && status != XT_OK; k++) {
        xt_tensor_release(ctx, outputs[k]);
        outputs[k] = NULL;
    }
    return status;
}

enum xt_status xt_observe_record(struct xt_ctx *ctx, const struct xt_call *call,
                                 struct xt_tensor *const *grad_in) {
    if (ctx->graph) return XT_OK;
    size_t n = (size_t)call->n_inputs;
    struct xt_tensor **grads = xt_host_alloc(ctx, n * sizeof *grads);
    struct xt_source *from = xt_host_alloc(ctx, n * sizeof *from);
    enum xt_status status = XT_MEMORY;
    if (!grads || !from) goto done;
    for (size_t i = 0; i < n; i++) {
        const struct xt_edge *e = &call->edges[i];
        from[i] = (struct xt_source){e->maker ? e->maker->number : 0, e->output, e->leaf, false};
        grads[i] = grad_in[i];
        if (ctx->walk->share && ctx->walk->share_of == (int)i) grads[i] = ctx->walk->share;
        if (grads[i] || !e->leaf || !e->wants || ctx->walk->as_values) continue;
        if (e->leaf->touched != ctx->walk->stamp) continue;
        grads[i] = e->leaf->grad;
        from[i].added = true;
    }
    struct xt_seen seen = {
        .kind = XT_SEEN_RECORD,
        .op = call->slot->op,
        .rule = call->slot->op,
        .where = call->where,
        .number = call->number,
        .as_values = ctx->walk->as_values,
        .n_in = call->n_inputs,
        .n_out = call->n_outputs - call->slot->op->n_hidden,
        .in = call->in,
        .out = call->out,
        .grad_in = grads,
        .grad_out = call->grad_out,
        .from = from,
    };
    status = tell(ctx, &seen);
done:
    xt_host_free(ctx, grads, n * sizeof *grads);
    xt_host_free(ctx, from, n * sizeof *from);
    return status;
}

enum xt_status xt_observe_end(struct xt_ctx *ctx, bool as_values) {
    return tell(
        ctx, &(struct xt_seen){.kind = XT_SEEN_END, .where = xt_here(ctx), .as_values = as_values});
}

struct xt_tensor *xt_leaf_grad(const void *leaf) {
    return ((const struct xt_leaf *)leaf)->grad;
}

bool xt_observed(const struct xt_ctx *ctx) {
    return ctx->observe != NULL;
}
