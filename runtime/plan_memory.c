/*
 * plan_memory.c: where the values of a run lie.
 *
 * Values that live only in the run share one block, placed by their lifetimes, so the memory of a
 * run is known before it. What a run gives out has blocks of its own.
 */
#include <stdlib.h>

#include "plan.h"

static int64_t count(const struct xt_graph_value *v) {
    int64_t n = 1;
    for (int d = 0; d < v->ndim; d++) n *= v->shape[d];
    return n;
}

static size_t rounded(enum xt_device device, size_t bytes) {
    const size_t grain = xt_grain(device);
    return (bytes + grain - 1) / grain * grain;
}

static int by_falling_size(const void *a, const void *b) {
    const struct xt_plan_item *x = *(const struct xt_plan_item *const *)a;
    const struct xt_plan_item *y = *(const struct xt_plan_item *const *)b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? 1 : -1;
    return x < y ? -1 : 1;
}

static int by_place(const void *a, const void *b) {
    const struct xt_plan_item *x = *(const struct xt_plan_item *const *)a;
    const struct xt_plan_item *y = *(const struct xt_plan_item *const *)b;
    return x->at < y->at ? -1 : x->at > y->at;
}

void xt_plan_list_values(struct xt_plan_making *m) {
    struct xt_plan *plan = m->plan;
    for (int r = 0; r < m->g->n_roots; r++) {
        size_t bytes = m->g->roots[r].bytes;
        if (plan->place[r] == XT_PLACE_OUTPUT) plan->memory.outputs += bytes;
        if (plan->place[r] != XT_PLACE_ARENA) continue;
        plan->items[plan->n_items++] =
            (struct xt_plan_item){.root = r,
                                  .device = m->g->roots[r].device,
                                  .first = m->first[r],
                                  .last = m->last[r],
                                  .bytes = rounded(m->g->roots[r].device, bytes ? bytes : 1)};
    }
}

/* Largest first, each in the lowest gap among those that live at the same time. */
enum xt_status xt_plan_place_items(struct xt_ctx *ctx, struct xt_plan *plan) {
    int n = plan->n_items;
    for (int p = 0; p < plan->n_nodes && plan->memory.placed; p++)
        if (plan->steps[p].scratch)
            plan->items[n++] = (struct xt_plan_item){
                .root = -1,
                .device = plan->steps[p].device,
                .first = p,
                .last = p,
                .bytes = rounded(plan->steps[p].device, plan->steps[p].scratch)};
    size_t bytes = ((size_t)n + 1) * sizeof(struct xt_plan_item *);
    struct xt_plan_item **order = xt_host_alloc(ctx, bytes), **near = xt_host_alloc(ctx, bytes);
    if (order && near) {
        size_t most[XT_DEVICE_COUNT] = {0};
        for (int i = 0; i < n; i++) order[i] = &plan->items[i];
        qsort(order, (size_t)n, sizeof *order, by_falling_size);
        for (int i = 0; i < n; i++) {
            struct xt_plan_item *own = order[i];
            size_t at = 0;
            int k = 0;
            for (int j = 0; j < i; j++)
                if (order[j]->first <= own->last && own->first <= order[j]->last &&
                    order[j]->device == own->device)
                    near[k++] = order[j];
            qsort(near, (size_t)k, sizeof *near, by_place);
            for (int j = 0; j < k && near[j]->at < at + own->bytes; j++)
                if (near[j]->at + near[j]->bytes > at) at = near[j]->at + near[j]->bytes;
            own->at = at;
            if (own->root >= 0)
                plan->arena_at[own->root] = at;
            else
                plan->steps[own->first].scratch_at = at;
            if (at + own->bytes > most[own->device]) most[own->device] = at + own->bytes;
        }
        plan->memory.arena = 0;
        for (int d = 0; d < XT_DEVICE_COUNT; d++) {
            plan->arena_bytes[d] = most[d];
            plan->memory.arena += most[d];
        }
    }
    enum xt_status status = order && near ? XT_OK : XT_MEMORY;
    xt_host_free(ctx, order, bytes);
    xt_host_free(ctx, near, bytes);
    return status;
}

void xt_plan_find_places(struct xt_plan_making *m) {
    struct xt_plan *plan = m->plan;
    const struct xt_graph *g = m->g;
    const struct xt_graph_export *x = &g->exports[plan->export];
    for (int t = 0; t < plan->n_tensors; t++) {
        int r = plan->tensor_root[t];
        plan->place[r] = g->roots[r].kind == XT_ROOT_TEMP ? XT_PLACE_ARENA : XT_PLACE_BOUND;
    }
    for (int i = 0; i < x->n; i++) {
        int r = xt_plan_root_of(m, x->values[i]);
        if (g->roots[r].kind == XT_ROOT_TEMP)
            plan->place[r] = XT_PLACE_OUTPUT;
        else if (!g->roots[r].lent) {
            plan->memory.outputs += (size_t)count(xt_graph_value_at(g, x->values[i])) *
                                    xt_dtype_bytes(xt_graph_value_at(g, x->values[i])->dtype);
            for (int s = 0; s < g->n_roots; s++) plan->backup = plan->backup || plan->updated[s];
        }
    }
    for (int p = 0; p < plan->n_nodes; p++) { /* a launch that has to copy can fail */
        const struct xt_plan_step *step = &plan->steps[p];
        const struct xt_tensor *first = step->args.n_inputs ? step->args.inputs[0] : NULL;
        size_t copied = 0;
        for (int k = 0; k < step->args.n_inputs && first; k++) {
            const struct xt_tensor *t = step->args.inputs[k];
            if (!t) continue;
            const struct xt_graph_value *v =
                xt_graph_value_at(g, plan->tensor_value[t - plan->tensors]);
            if (xt_slot_fits(step->slot, g->roots[v->root].device, first->dtype, t)) continue;
            copied += (size_t)count(v) * xt_dtype_bytes(v->dtype);
            plan->backup = plan->backup || step->updates;
        }
        if (copied > plan->memory.copies) plan->memory.copies = copied;
    }
    for (int r = 0; r < g->n_roots && plan->backup; r++)
        if (plan->updated[r]) plan->memory.backup += g->roots[r].bytes;
    for (int i = 0; i < g->n_nodes; i++)
        plan->memory.views += (g->nodes[i].call->slot->op->flags & XT_VIEW) != 0;
    plan->memory.calls = plan->n_nodes;
}
