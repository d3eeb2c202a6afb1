/*
 * plan_nodes.c: which calls of a graph a run of an export launches, and in what order.
 *
 * Walking the nodes forward, products with an unfed input of ones are left out (x * 1 = x to the
 * bit); walking them backward, what does not reach the export is. Writes to the state come last.
 */
#include <string.h>

#include "plan.h"

/* ---- what is left out ------------------------------------------------------------------------ */

static bool is_plain(const struct xt_graph_value *v) {
    int64_t step = 1;
    for (int d = v->ndim - 1; d >= 0; d--) {
        if (v->shape[d] > 1 && v->stride[d] != step) return false;
        step *= v->shape[d];
    }
    return true;
}

static bool same_spec(const struct xt_graph_value *a, const struct xt_graph_value *b) {
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

/* Whether `out` may be the bytes of `x`: both plain, and neither ever written in place. */
static bool can_stand_for(const struct xt_plan_making *m, int x, int out) {
    const struct xt_graph_value *a = xt_graph_value_at(m->g, x), *b = xt_graph_value_at(m->g, out);
    const struct xt_graph_root *ra = &m->g->roots[m->to[a->root]], *rb = &m->g->roots[b->root];
    return same_spec(a, b) && is_plain(a) && is_plain(b) && b->offset == 0 && !ra->writes &&
           !rb->writes && !m->g->roots[a->root].writes && rb->kind == XT_ROOT_TEMP;
}

static void stand_for(struct xt_plan_making *m, int node, int x, int out) {
    const struct xt_graph_value *a = xt_graph_value_at(m->g, x);
    int r = xt_graph_value_at(m->g, out)->root;
    m->to_at[r] = m->to_at[a->root] + a->offset;
    m->to[r] = m->to[a->root];
    m->elided[node] = true;
    m->plan->memory.elided++;
}

static bool widens(enum xt_dtype from, enum xt_dtype to) {
    return to == XT_F32 && (from == XT_BF16 || from == XT_F16);
}

static void leave_out(struct xt_plan_making *m) {
    const struct xt_graph *g = m->g;
    for (int i = 0; i < g->n_nodes; i++) {
        const struct xt_graph_node *node = &g->nodes[i];
        const char *name = node->call->slot->op->name;
        const int *in = node->values, *out = in + node->call->n_inputs;
        for (int k = 0; k < node->call->n_outputs; k++)
            if (out[k] >= 0 && !(node->call->slot->op->flags & XT_VIEW))
                m->maker[xt_graph_value_at(g, out[k])->root] = i;
        if (strcmp(name, "mul") == 0 && in[0] >= 0 && in[1] >= 0) {
            for (int k = 0; k < 2; k++) {
                if (!m->ones[xt_graph_value_at(g, in[1 - k])->root] ||
                    !can_stand_for(m, in[k], out[0]))
                    continue;
                stand_for(m, i, in[k], out[0]);
                break;
            }
        } else if (strcmp(name, "cast") == 0 || strcmp(name, "contiguous") == 0) {
            int r = xt_graph_value_at(g, in[0])->root;
            const struct xt_graph_root *made = &g->roots[xt_graph_value_at(g, out[0])->root];
            if (m->ones[r] && !made->writes) m->ones[xt_graph_value_at(g, out[0])->root] = true;
            /* Narrowing what was only widened gives it back. */
            int before = m->maker[m->to[r]];
            if (before < 0 || strcmp(g->nodes[before].call->slot->op->name, "cast") != 0) continue;
            int source = g->nodes[before].values[0], wide = g->nodes[before].values[1];
            const struct xt_graph_value *x = xt_graph_value_at(g, in[0]);
            if (widens(xt_graph_value_at(g, source)->dtype, xt_graph_value_at(g, wide)->dtype) &&
                m->to_at[r] + x->offset == 0 && is_plain(x) && !g->roots[r].writes &&
                !g->roots[m->to[r]].writes && can_stand_for(m, source, out[0]))
                stand_for(m, i, source, out[0]);
        }
    }
}

/* ---- what is needed -------------------------------------------------------------------------- */

static void find_needed(struct xt_plan_making *m) {
    const struct xt_graph *g = m->g;
    const struct xt_graph_export *x = &g->exports[m->plan->export];
    for (int i = 0; i < x->n; i++) m->needed[xt_plan_root_of(m, x->values[i])] = true;
    for (int i = g->n_nodes; i-- > 0;) {
        const struct xt_graph_node *node = &g->nodes[i];
        const struct xt_call *call = node->call;
        if (m->elided[i] || (call->slot->op->flags & XT_VIEW)) continue;
        bool take = false;
        if (xt_graph_node_updates(g, node)) {
            if (node->update != m->plan->export) continue;
            take = true;
        }
        for (int k = 0; k < call->n_inputs && !take; k++)
            take = node->values[k] >= 0 && xt_slot_writes(call->slot, k) &&
                   m->needed[xt_plan_root_of(m, node->values[k])];
        for (int k = call->n_inputs; k < call->n_inputs + call->n_outputs && !take; k++)
            take = node->values[k] >= 0 && m->needed[xt_plan_root_of(m, node->values[k])];
        if (!take) continue;
        m->taken[i] = true;
        m->plan->n_nodes++;
        m->plan->n_in += call->n_inputs;
        for (int k = 0; k < call->n_inputs + call->n_outputs; k++)
            if (node->values[k] >= 0) m->needed[xt_plan_root_of(m, node->values[k])] = true;
    }
}

void xt_plan_find_nodes(struct xt_plan_making *m) {
    leave_out(m);
    find_needed(m);
}

/* ---- the order ------------------------------------------------------------------------------- */

/* Whether call `later` could not run before call `writer`, a write to the state. */
static bool clash(const struct xt_plan_making *m, const struct xt_graph_node *writer,
                  const struct xt_graph_node *later) {
    int n = writer->call->n_inputs + writer->call->n_outputs;
    for (int k = 0; k < n; k++) {
        if (writer->values[k] < 0) continue;
        int r = xt_plan_root_of(m, writer->values[k]);
        bool written = k >= writer->call->n_inputs || xt_slot_writes(writer->call->slot, k);
        int later_n = later->call->n_inputs + later->call->n_outputs;
        for (int j = 0; j < later_n; j++) {
            if (later->values[j] < 0 || xt_plan_root_of(m, later->values[j]) != r) continue;
            bool other = j >= later->call->n_inputs || xt_slot_writes(later->call->slot, j);
            if (written || other) return true;
        }
    }
    return false;
}

/* Writes to the state go behind everything that does not need them. */
enum xt_status xt_plan_find_order(struct xt_ctx *ctx, struct xt_plan_making *m) {
    const struct xt_graph *g = m->g;
    struct xt_plan *plan = m->plan;
    size_t bytes = (size_t)(g->n_nodes + 1) * sizeof(bool);
    bool *late = xt_host_alloc(ctx, bytes);
    if (!late) return XT_MEMORY;
    for (int i = g->n_nodes; i-- > 0;) {
        if (!m->taken[i] || !xt_graph_node_updates(g, &g->nodes[i])) continue;
        late[i] = true;
        for (int j = i + 1; j < g->n_nodes && late[i]; j++)
            if (m->taken[j] && !late[j]) late[i] = !clash(m, &g->nodes[i], &g->nodes[j]);
    }
    int n = 0;
    bool written = false;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < g->n_nodes; i++) {
            if (!m->taken[i] || late[i] != (pass == 1)) continue;
            bool updates = xt_graph_node_updates(g, &g->nodes[i]);
            plan->backup = plan->backup || (written && !updates);
            written = written || updates;
            plan->order[n++] = i;
        }
    xt_host_free(ctx, late, bytes);
    return XT_OK;
}
