/*
 * plan.c: plans: made, kept, asked.
 *
 * A plan says what a run of an export launches, where its values lie. It is made once for each
 * (export, set of fed inputs).
 */
#include <string.h>

#include "plan.h"

/* ---- tensors of the steps -------------------------------------------------------------------- */

static int tensor_for(struct xt_plan_making *m, int v) {
    struct xt_plan *plan = m->plan;
    if (m->tensor_of[v] >= 0) return m->tensor_of[v];
    const struct xt_graph_value *value = xt_graph_value_at(m->g, v);
    int t = plan->n_tensors++;
    m->tensor_of[v] = t;
    plan->tensors[t] = (struct xt_tensor){.refs = 1, .ndim = value->ndim, .dtype = value->dtype};
    memcpy(plan->tensors[t].shape, value->shape, sizeof value->shape);
    memcpy(plan->tensors[t].stride, value->stride, sizeof value->stride);
    plan->tensor_value[t] = v;
    plan->tensor_root[t] = m->to[value->root];
    plan->tensor_offset[t] = m->to_at[value->root] + value->offset;
    return t;
}

static void make_steps(struct xt_plan_making *m) {
    struct xt_plan *plan = m->plan;
    const struct xt_graph *g = m->g;
    struct xt_tensor **in = plan->in;
    for (int p = 0; p < plan->n_nodes; p++) {
        const struct xt_graph_node *node = &g->nodes[plan->order[p]];
        const struct xt_call *call = node->call;
        struct xt_plan_step *step = &plan->steps[p];
        step->slot = call->slot;
        step->where = call->where;
        step->args.inputs = in;
        step->args.n_inputs = call->n_inputs;
        step->args.n_ints = call->n_ints;
        memcpy(step->args.attrs, call->attrs, (size_t)call->slot->n_attrs * sizeof *call->attrs);
        memcpy(step->args.ints, call->ints, (size_t)call->n_ints * sizeof *call->ints);
        step->updates = xt_graph_node_updates(g, node);
        step->device = XT_DEVICE_COUNT;
        for (int k = 0; k < call->n_inputs + call->n_outputs; k++) {
            struct xt_tensor *t = NULL;
            if (node->values[k] >= 0) {
                t = &plan->tensors[tensor_for(m, node->values[k])];
                int r = xt_plan_root_of(m, node->values[k]);
                if (step->device == XT_DEVICE_COUNT) step->device = g->roots[r].device;
                if (m->first[r] < 0) m->first[r] = p;
                m->last[r] = p;
                if (k < call->n_inputs && xt_slot_writes(call->slot, k)) {
                    plan->updated[r] = g->roots[r].kind == XT_ROOT_STATE;
                    plan->lent[r] = g->roots[r].lent;
                }
            }
            if (k < call->n_inputs)
                *in++ = t;
            else
                step->outputs[k - call->n_inputs] = t;
        }
    }
    const struct xt_graph_export *x = &g->exports[plan->export];
    for (int i = 0; i < x->n; i++) plan->export_tensor[i] = tensor_for(m, x->values[i]);
}

/* ---- making a plan --------------------------------------------------------------------------- */

/* A block that lives as long as the plan, or NULL. */
#define ARRAY(count, type) xt_host_alloc(ctx, ((size_t)(count) + 1) * sizeof(type))
#define DROP(field, count)                                                                         \
    xt_host_free(ctx, plan->field, ((size_t)(count) + 1) * sizeof *plan->field)

static void free_plan(struct xt_ctx *ctx, struct xt_plan *plan) {
    DROP(fed, plan->n_inputs);
    DROP(items, plan->n_roots + plan->n_nodes);
    DROP(order, plan->n_nodes);
    DROP(steps, plan->n_nodes);
    DROP(in, plan->n_in);
    DROP(tensors, plan->cap_tensors);
    DROP(tensor_value, plan->cap_tensors);
    DROP(tensor_root, plan->cap_tensors);
    DROP(tensor_offset, plan->cap_tensors);
    DROP(export_tensor, plan->n_outputs);
    DROP(place, plan->n_roots);
    DROP(arena_at, plan->n_roots);
    DROP(bind, plan->n_roots);
    DROP(bind_at, plan->n_roots);
    DROP(updated, plan->n_roots);
    DROP(lent, plan->n_roots);
    xt_host_free(ctx, plan, sizeof *plan);
}

void xt_plan_free(struct xt_ctx *ctx, struct xt_plan *plan) {
    for (struct xt_plan *next; plan; plan = next) {
        next = plan->next;
        free_plan(ctx, plan);
    }
}

static enum xt_status fill_plan(struct xt_ctx *ctx, struct xt_plan_making *m) {
    struct xt_plan *plan = m->plan;
    xt_plan_find_nodes(m);
    plan->order = ARRAY(plan->n_nodes, int);
    plan->steps = ARRAY(plan->n_nodes, struct xt_plan_step);
    plan->in = ARRAY(plan->n_in, struct xt_tensor *);
    if (!plan->order || !plan->steps || !plan->in) return XT_MEMORY;
    XT_TRY(xt_plan_find_order(ctx, m));
    make_steps(m);
    xt_plan_find_places(m);
    plan->items = ARRAY(m->g->n_roots + plan->n_nodes, struct xt_plan_item);
    if (!plan->items) return XT_MEMORY;
    xt_plan_list_values(m);
    return xt_plan_place_items(ctx, plan);
}

static enum xt_status make_plan(struct xt_ctx *ctx, struct xt_graph *g, int e, const bool *fed,
                                struct xt_plan **out) {
    struct xt_plan *plan = xt_host_alloc(ctx, sizeof *plan);
    if (!plan) return XT_MEMORY;
    plan->export = e;
    plan->n_inputs = g->n_inputs;
    plan->n_roots = g->n_roots;
    plan->cap_tensors = g->n_values;
    plan->n_outputs = g->exports[e].n;
    plan->fed = ARRAY(plan->n_inputs, bool);
    plan->tensors = ARRAY(g->n_values, struct xt_tensor);
    plan->tensor_value = ARRAY(g->n_values, int);
    plan->tensor_root = ARRAY(g->n_values, int);
    plan->tensor_offset = ARRAY(g->n_values, int64_t);
    plan->export_tensor = ARRAY(plan->n_outputs, int);
    plan->place = ARRAY(g->n_roots, enum xt_plan_place);
    plan->arena_at = ARRAY(g->n_roots, size_t);
    plan->bind = ARRAY(g->n_roots, struct xt_storage *);
    plan->bind_at = ARRAY(g->n_roots, int64_t);
    plan->updated = ARRAY(g->n_roots, bool);
    plan->lent = ARRAY(g->n_roots, bool);
    struct xt_plan_making m = {.g = g, .plan = plan, .fed = fed};
    m.to = ARRAY(g->n_roots, int);
    m.to_at = ARRAY(g->n_roots, int64_t);
    m.ones = ARRAY(g->n_roots, bool);
    m.maker = ARRAY(g->n_roots, int);
    m.elided = ARRAY(g->n_nodes, bool);
    m.taken = ARRAY(g->n_nodes, bool);
    m.needed = ARRAY(g->n_roots, bool);
    m.tensor_of = ARRAY(g->n_values, int);
    m.first = ARRAY(g->n_roots, int);
    m.last = ARRAY(g->n_roots, int);
    enum xt_status status = XT_MEMORY;
    if (!plan->fed || !plan->tensors || !plan->tensor_value || !plan->tensor_root ||
        !plan->tensor_offset || !plan->export_tensor || !plan->place || !plan->arena_at ||
        !plan->bind || !plan->bind_at || !plan->updated || !plan->lent || !m.to || !m.to_at ||
        !m.ones || !m.maker || !m.elided || !m.taken || !m.needed || !m.tensor_of || !m.first ||
        !m.last)
        goto done;
    memcpy(plan->fed, fed, (size_t)g->n_inputs * sizeof *fed);
    for (int r = 0; r < g->n_roots; r++) {
        const struct xt_graph_root *root = &g->roots[r];
        m.to[r] = r;
        m.maker[r] = m.first[r] = -1;
        m.ones[r] = root->kind == XT_ROOT_INPUT && root->ones && !fed[root->index];
    }
    for (int v = 0; v < g->n_values; v++) m.tensor_of[v] = -1;
    status = fill_plan(ctx, &m);
done:
    xt_host_free(ctx, m.to, ((size_t)g->n_roots + 1) * sizeof *m.to);
    xt_host_free(ctx, m.to_at, ((size_t)g->n_roots + 1) * sizeof *m.to_at);
    xt_host_free(ctx, m.ones, ((size_t)g->n_roots + 1) * sizeof *m.ones);
    xt_host_free(ctx, m.maker, ((size_t)g->n_roots + 1) * sizeof *m.maker);
    xt_host_free(ctx, m.elided, ((size_t)g->n_nodes + 1) * sizeof *m.elided);
    xt_host_free(ctx, m.taken, ((size_t)g->n_nodes + 1) * sizeof *m.taken);
    xt_host_free(ctx, m.needed, ((size_t)g->n_roots + 1) * sizeof *m.needed);
    xt_host_free(ctx, m.tensor_of, ((size_t)g->n_values + 1) * sizeof *m.tensor_of);
    xt_host_free(ctx, m.first, ((size_t)g->n_roots + 1) * sizeof *m.first);
    xt_host_free(ctx, m.last, ((size_t)g->n_roots + 1) * sizeof *m.last);
    if (status == XT_OK)
        *out = plan;
    else
        free_plan(ctx, plan);
    return status;
}

enum xt_status xt_plan_get(struct xt_ctx *ctx, struct xt_graph *g, int e, const bool *fed,
                           struct xt_plan **out) {
    for (struct xt_plan *p = g->plans; p; p = p->next)
        if (p->export == e && memcmp(p->fed, fed, (size_t)g->n_inputs * sizeof *fed) == 0) {
            *out = p;
            return XT_OK;
        }
    struct xt_plan *plan;
    XT_TRY(make_plan(ctx, g, e, fed, &plan));
    plan->next = g->plans;
    g->plans = plan;
    *out = plan;
    return XT_OK;
}

void xt_plan_memory(const struct xt_plan *plan, struct xt_plan_memory *out) {
    *out = plan->memory;
}

const int *xt_plan_order(const struct xt_plan *plan, int *n) {
    *n = plan->n_nodes;
    return plan->order;
}

bool xt_plan_needs(const struct xt_plan *plan, int root) {
    return plan->place[root] != XT_PLACE_NOWHERE;
}
