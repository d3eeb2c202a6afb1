/*
 * grads.c: where gradients go; the only file that adds them.
 *
 * A gradient of an input goes to the output of the record that made it, or to the leaf it is. The
 * second one for the same place is added, unless the maker's rule takes several apart.
 */
#include "tape.h"

static bool sole_owner(const struct xt_tensor *t) {
    return t->refs == 1 && t->storage->refs == 1;
}

/* *sum += g, by reference where there was nothing. Takes g's reference, also on failure. With an
   observer, who may hold on to what it sees, never in place: what runs then depends on nothing
   else. */
static enum xt_status add_into(struct xt_ctx *ctx, struct xt_tensor **sum, struct xt_tensor *g) {
    if (!*sum) {
        *sum = g;
        return XT_OK;
    }
    enum xt_status status;
    if (!ctx->observe && sole_owner(*sum) && xt_is_contiguous(*sum)) {
        status = xt_apply_name(ctx, "add_", (struct xt_tensor *[]){*sum, g}, 2, NULL);
    } else {
        struct xt_tensor *total;
        status = xt_binary(ctx, "add", *sum, g, &total);
        if (status == XT_OK) {
            xt_tensor_release(ctx, *sum);
            *sum = total;
        }
    }
    xt_tensor_release(ctx, g);
    return status;
}

/* g itself, or a copy of it that is contiguous: what is computed is not to depend on how it lies.
   Takes g's reference, also on failure. */
static enum xt_status in_order(struct xt_ctx *ctx, struct xt_tensor *g, struct xt_tensor **out) {
    if (xt_is_contiguous(g)) {
        *out = g;
        return XT_OK;
    }
    enum xt_status status = xt_unary(ctx, "contiguous", g, out);
    xt_tensor_release(ctx, g);
    return status;
}

/* Whether the maker's rule takes one gradient more of output 0 as it is. */
static bool takes_apart(struct xt_ctx *ctx, const struct xt_call *maker, int output,
                        const struct xt_tensor *g) {
    const struct xt_op *several = maker->slot->op->several;
    return several && output == 0 && maker->grad_out[0] &&
           xt_op_has_kernel(ctx, several, g->storage->device, g->dtype);
}

/* Adds g to the gradients of a record's output. Takes g's reference. */
static enum xt_status add_to_output(struct xt_ctx *ctx, struct xt_call *maker, int output,
                                    struct xt_tensor *g) {
    struct xt_tensor **sum = &maker->grad_out[output];
    if (takes_apart(ctx, maker, output, g)) {
        XT_TRY(in_order(ctx, g, &g));
        int k = 0;
        while (k < XT_APART - 1 && maker->more[k]) k++;
        sum = &maker->more[k];
    }
    return add_into(ctx, sum, g);
}

enum xt_status xt_grads_join(struct xt_ctx *ctx, struct xt_call *call) {
    struct xt_tensor *sum, *terms[1 + XT_APART] = {call->grad_out[0]};
    for (int k = 0; k < XT_APART; k++) terms[1 + k] = call->more[k];
    XT_TRY(xt_apply_name(ctx, "add_terms", terms, 1 + XT_APART, &sum));
    xt_drop_tensors(ctx, call->more, XT_APART);
    xt_tensor_release(ctx, call->grad_out[0]);
    call->grad_out[0] = sum;
    return XT_OK;
}

/* In a graph a gradient starts from nothing: what an earlier backward left is not the graph's. */
static enum xt_status check_fresh(struct xt_ctx *ctx, const struct xt_leaf *leaf) {
    if (!ctx->graph || !leaf->grad || leaf->grad->storage->number > xt_graph_first_storage(ctx))
        return XT_OK;
    return xt_fail(ctx, XT_STATE,
                   "a variable has a gradient from before the graph: zero_grad() it first");
}

enum xt_status xt_grads_add_to_leaf(struct xt_ctx *ctx, struct xt_leaf *leaf, struct xt_tensor *g) {
    leaf->touched = ctx->walk->stamp;
    enum xt_status fresh = check_fresh(ctx, leaf);
    if (fresh != XT_OK) {
        xt_tensor_release(ctx, g);
        return fresh;
    }
    if (leaf->grad) {
        enum xt_status status =
            xt_apply_name(ctx, "add_", (struct xt_tensor *[]){leaf->grad, g}, 2, NULL);
        xt_tensor_release(ctx, g);
        return status;
    }
    if (!sole_owner(g) || !xt_is_contiguous(g)) {
        struct xt_tensor *own;
        enum xt_status status = xt_unary(ctx, "contiguous", g, &own);
        xt_tensor_release(ctx, g);
        if (status != XT_OK) return status;
        g = own;
    }
    leaf->grad = g;
    return XT_OK;
}

static int target_of(const struct xt_walk *walk, const struct xt_edge *e) {
    for (int i = 0; i < walk->n_targets; i++) {
        const struct xt_tensor *t = walk->targets[i];
        if (e->leaf ? t->leaf == e->leaf : t->maker == e->maker && t->maker_output == e->output)
            return i;
    }
    return -1;
}

bool xt_edge_wanted(const struct xt_walk *walk, const struct xt_edge *e) {
    if (!e->wants) return false;
    if (!walk->as_values) return true;
    if (target_of(walk, e) >= 0) return true;
    return e->maker && e->maker->mark == walk->stamp + 1;
}

enum xt_status xt_grads_give(struct xt_ctx *ctx, struct xt_call *call, int i, struct xt_tensor *g) {
    const struct xt_edge *e = &call->edges[i];
    const struct xt_spec *spec = &call->in_spec[i];
    enum xt_dtype dtype = e->leaf ? e->leaf->spec.dtype : spec->dtype;
    enum xt_status status = XT_OK;
    struct xt_tensor *next;
    if (!xt_has_shape(g, spec->shape, spec->ndim)) {
        status = xt_sum_to(ctx, g, spec->shape, spec->ndim, &next);
        xt_tensor_release(ctx, g);
        if (status != XT_OK) return status;
        g = next;
    }
    if (g->dtype != dtype) {
        status = xt_cast(ctx, g, dtype, &next);
        xt_tensor_release(ctx, g);
        if (status != XT_OK) return status;
        g = next;
    }
    if (!e->leaf) return add_to_output(ctx, e->maker, e->output, g);
    if (!ctx->walk->as_values) return xt_grads_add_to_leaf(ctx, e->leaf, g);
    int target = target_of(ctx->walk, e);
    if (target >= 0) return add_into(ctx, &ctx->walk->results[target], g);
    xt_tensor_release(ctx, g);
    return XT_OK;
}

enum xt_status xt_grads_target(struct xt_ctx *ctx, struct xt_grads *g, int i,
                               struct xt_tensor **target, bool *add) {
    struct xt_leaf *leaf = g->call->edges[i].leaf;
    *target = NULL;
    *add = false;
    if (!leaf || ctx->walk->as_values || !g->wants[i]) return XT_OK;
    if (leaf->spec.dtype != XT_F32 && leaf->spec.dtype != XT_F64) return XT_OK;
    if (leaf->grad && !xt_is_contiguous(leaf->grad)) return XT_OK;
    XT_TRY(check_fresh(ctx, leaf));
    if (leaf->grad) {
        *add = true;
    } else {
        XT_TRY(xt_tensor_new(ctx, &leaf->spec, leaf->device, &leaf->grad));
    }
    leaf->touched = ctx->walk->stamp;
    *target = leaf->grad;
    return XT_OK;
}

enum xt_status xt_grads_take(struct xt_ctx *ctx, struct xt_grads *g, int i,
                             struct xt_tensor **out) {
    const struct xt_edge *e = &g->call->edges[i];
    *out = NULL;
    if (!g->wants[i] || !e->maker) return XT_OK;
    struct xt_tensor **place = &e->maker->grad_out[e->output], *sum = *place;
    const struct xt_spec *spec = &g->in_spec[i];
    if (!sum || sum->dtype != spec->dtype || !xt_has_shape(sum, spec->shape, spec->ndim))
        return XT_OK;
    *place = NULL;
    return in_order(ctx, sum, out);
}

void xt_grads_share(struct xt_ctx *ctx, int i, struct xt_tensor *share) {
    xt_tensor_release(ctx, ctx->walk->share);
    ctx->walk->share = share;
    ctx->walk->share_of = i;
}
