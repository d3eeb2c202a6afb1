/*
 * plan.c: what a run of an export launches, where its values lie, and the run itself.
 *
 * A plan is made once for each (export, set of fed inputs). Walking the nodes forward, products
 * with an unfed input of ones are left out (x * 1 = x to the bit); walking them backward, what does
 * not reach the export is. Values that live only in the run share one block, placed by their
 * lifetimes, so the memory of a run is known before it. Writes to the state come last.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph.h"
#include "tape.h"

/* One launch. */
struct step {
    const struct xt_slot *slot;
    struct xt_args args;                       /* its inputs lie in the plan */
    struct xt_tensor *outputs[XT_MAX_OUTPUTS]; /* in the plan; NULL: not wanted */
    struct xt_where where;                     /* the line of the record */
    bool updates;                              /* writes to the state */
    size_t scratch;                            /* what its kernel takes; known after a run */
    size_t scratch_at;                         /* where that lies in the arena */
    enum xt_device device;                     /* where it is launched */
};

/* What is placed in the arena: the value of a root, or the scratch of a launch. */
struct item {
    int root; /* or -1: scratch */
    enum xt_device device;
    int first, last; /* launches at which it lives */
    size_t bytes, at;
};

/* Where a root of a plan lies. */
enum place { NOWHERE, ARENA, OUTPUT, BOUND };

struct xt_plan {
    struct xt_plan *next;
    int export;            /* which one */
    int n_inputs, n_roots; /* of the graph */
    bool *fed;             /* n_inputs: the set it is for */
    int n_nodes;           /* launched */
    int *order;            /* n_nodes: of the graph's nodes */
    struct step *steps;    /* n_nodes */
    struct xt_tensor **in; /* the inputs of all steps: n_in places */
    int n_in;
    struct xt_tensor *tensors; /* n_tensors: views that steps and outputs use */
    int *tensor_value;         /* n_tensors: the value each is */
    int *tensor_root;          /* n_tensors: resolved */
    int64_t *tensor_offset;    /* n_tensors: from the root's beginning */
    int n_tensors, cap_tensors;
    int *export_tensor; /* of each value of the export */
    int n_outputs;
    enum place *place;  /* n_roots */
    size_t *arena_at;   /* n_roots: bytes from the arena's beginning */
    struct item *items; /* n_items values, then the scratch of each launch */
    int n_items;
    size_t arena_bytes[XT_DEVICE_COUNT]; /* of the block on each device */
    struct xt_storage **bind;            /* n_roots: during a run */
    int64_t *bind_at;                    /* n_roots: bytes from that storage's beginning */
    bool *updated;                       /* n_roots: states that it writes */
    bool *lent;                          /* n_roots: inputs that it writes */
    bool backup; /* something that can fail comes after a write to the state */
    struct xt_plan_memory memory;
};

/* What is known while a plan is made. */
struct making {
    struct xt_graph *g;
    struct xt_plan *plan;
    const bool *fed;
    int *to;           /* root -> the root it is the same bytes as */
    int64_t *to_at;    /* elements from that root's beginning */
    bool *ones;        /* root holds ones alone */
    int *maker;        /* root -> the node that made it, or -1 */
    bool *elided;      /* node */
    bool *taken;       /* node */
    bool *needed;      /* root */
    int *tensor_of;    /* value -> tensor of the plan, or -1 */
    int *first, *last; /* root: positions of the launches that use it */
};

static const struct xt_graph_value *value_at(const struct xt_graph *g, int v) {
    return &g->values[v];
}

/* ---- what is left out ------------------------------------------------------------------------ */

static int64_t count(const struct xt_graph_value *v) {
    int64_t n = 1;
    for (int d = 0; d < v->ndim; d++) n *= v->shape[d];
    return n;
}

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
static bool can_stand_for(const struct making *m, int x, int out) {
    const struct xt_graph_value *a = value_at(m->g, x), *b = value_at(m->g, out);
    const struct xt_graph_root *ra = &m->g->roots[m->to[a->root]], *rb = &m->g->roots[b->root];
    return same_spec(a, b) && is_plain(a) && is_plain(b) && b->offset == 0 && !ra->writes &&
           !rb->writes && !m->g->roots[a->root].writes && rb->kind == XT_ROOT_TEMP;
}

static void stand_for(struct making *m, int node, int x, int out) {
    const struct xt_graph_value *a = value_at(m->g, x);
    int r = value_at(m->g, out)->root;
    m->to_at[r] = m->to_at[a->root] + a->offset;
    m->to[r] = m->to[a->root];
    m->elided[node] = true;
    m->plan->memory.elided++;
}

static bool widens(enum xt_dtype from, enum xt_dtype to) {
    return to == XT_F32 && (from == XT_BF16 || from == XT_F16);
}

static void leave_out(struct making *m) {
    const struct xt_graph *g = m->g;
    for (int i = 0; i < g->n_nodes; i++) {
        const struct xt_graph_node *node = &g->nodes[i];
        const char *name = node->call->slot->op->name;
        const int *in = node->values, *out = in + node->call->n_inputs;
        for (int k = 0; k < node->call->n_outputs; k++)
            if (out[k] >= 0 && !(node->call->slot->op->flags & XT_VIEW))
                m->maker[value_at(g, out[k])->root] = i;
        if (strcmp(name, "mul") == 0 && in[0] >= 0 && in[1] >= 0) {
            for (int k = 0; k < 2; k++) {
                if (!m->ones[value_at(g, in[1 - k])->root] || !can_stand_for(m, in[k], out[0]))
                    continue;
                stand_for(m, i, in[k], out[0]);
                break;
            }
        } else if (strcmp(name, "cast") == 0 || strcmp(name, "contiguous") == 0) {
            int r = value_at(g, in[0])->root;
            const struct xt_graph_root *made = &g->roots[value_at(g, out[0])->root];
            if (m->ones[r] && !made->writes) m->ones[value_at(g, out[0])->root] = true;
            /* Narrowing what was only widened gives it back. */
            int before = m->maker[m->to[r]];
            if (before < 0 || strcmp(g->nodes[before].call->slot->op->name, "cast") != 0) continue;
            int source = g->nodes[before].values[0], wide = g->nodes[before].values[1];
            const struct xt_graph_value *x = value_at(g, in[0]);
            if (widens(value_at(g, source)->dtype, value_at(g, wide)->dtype) &&
                m->to_at[r] + x->offset == 0 && is_plain(x) && !g->roots[r].writes &&
                !g->roots[m->to[r]].writes && can_stand_for(m, source, out[0]))
                stand_for(m, i, source, out[0]);
        }
    }
}

/* ---- what is needed -------------------------------------------------------------------------- */

static int root_of(const struct making *m, int v) {
    return m->to[value_at(m->g, v)->root];
}

static void find_needed(struct making *m) {
    const struct xt_graph *g = m->g;
    const struct xt_graph_export *x = &g->exports[m->plan->export];
    for (int i = 0; i < x->n; i++) m->needed[root_of(m, x->values[i])] = true;
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
                   m->needed[root_of(m, node->values[k])];
        for (int k = call->n_inputs; k < call->n_inputs + call->n_outputs && !take; k++)
            take = node->values[k] >= 0 && m->needed[root_of(m, node->values[k])];
        if (!take) continue;
        m->taken[i] = true;
        m->plan->n_nodes++;
        m->plan->n_in += call->n_inputs;
        for (int k = 0; k < call->n_inputs + call->n_outputs; k++)
            if (node->values[k] >= 0) m->needed[root_of(m, node->values[k])] = true;
    }
}

/* ---- the order ------------------------------------------------------------------------------- */

/* Whether call `later` could not run before call `writer`, a write to the state. */
static bool clash(const struct making *m, const struct xt_graph_node *writer,
                  const struct xt_graph_node *later) {
    int n = writer->call->n_inputs + writer->call->n_outputs;
    for (int k = 0; k < n; k++) {
        if (writer->values[k] < 0) continue;
        int r = root_of(m, writer->values[k]);
        bool written = k >= writer->call->n_inputs || xt_slot_writes(writer->call->slot, k);
        int later_n = later->call->n_inputs + later->call->n_outputs;
        for (int j = 0; j < later_n; j++) {
            if (later->values[j] < 0 || root_of(m, later->values[j]) != r) continue;
            bool other = j >= later->call->n_inputs || xt_slot_writes(later->call->slot, j);
            if (written || other) return true;
        }
    }
    return false;
}

/* Writes to the state go behind everything that does not need them. */
static enum xt_status find_order(struct xt_ctx *ctx, struct making *m) {
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

/* ---- tensors of the steps -------------------------------------------------------------------- */

static int tensor_for(struct making *m, int v) {
    struct xt_plan *plan = m->plan;
    if (m->tensor_of[v] >= 0) return m->tensor_of[v];
    const struct xt_graph_value *value = value_at(m->g, v);
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

static void make_steps(struct making *m) {
    struct xt_plan *plan = m->plan;
    const struct xt_graph *g = m->g;
    struct xt_tensor **in = plan->in;
    for (int p = 0; p < plan->n_nodes; p++) {
        const struct xt_graph_node *node = &g->nodes[plan->order[p]];
        const struct xt_call *call = node->call;
        struct step *step = &plan->steps[p];
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
                int r = root_of(m, node->values[k]);
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

/* ---- memory ---------------------------------------------------------------------------------- */

static size_t rounded(size_t bytes) {
    return (bytes + XT_SCRATCH_ALIGN - 1) / XT_SCRATCH_ALIGN * XT_SCRATCH_ALIGN;
}

static int by_falling_size(const void *a, const void *b) {
    const struct item *x = *(const struct item *const *)a, *y = *(const struct item *const *)b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? 1 : -1;
    return x < y ? -1 : 1;
}

static int by_place(const void *a, const void *b) {
    const struct item *x = *(const struct item *const *)a, *y = *(const struct item *const *)b;
    return x->at < y->at ? -1 : x->at > y->at;
}

static void list_values(struct making *m) {
    struct xt_plan *plan = m->plan;
    for (int r = 0; r < m->g->n_roots; r++) {
        size_t bytes = m->g->roots[r].bytes;
        if (plan->place[r] == OUTPUT) plan->memory.outputs += bytes;
        if (plan->place[r] != ARENA) continue;
        plan->items[plan->n_items++] = (struct item){.root = r,
                                                     .device = m->g->roots[r].device,
                                                     .first = m->first[r],
                                                     .last = m->last[r],
                                                     .bytes = rounded(bytes ? bytes : 1)};
    }
}

/* Largest first, each in the lowest gap among those that live at the same time. */
static enum xt_status place_items(struct xt_ctx *ctx, struct xt_plan *plan) {
    int n = plan->n_items;
    for (int p = 0; p < plan->n_nodes && plan->memory.placed; p++)
        if (plan->steps[p].scratch)
            plan->items[n++] = (struct item){.root = -1,
                                             .device = plan->steps[p].device,
                                             .first = p,
                                             .last = p,
                                             .bytes = rounded(plan->steps[p].scratch)};
    size_t bytes = ((size_t)n + 1) * sizeof(struct item *);
    struct item **order = xt_host_alloc(ctx, bytes), **near = xt_host_alloc(ctx, bytes);
    if (order && near) {
        size_t most[XT_DEVICE_COUNT] = {0};
        for (int i = 0; i < n; i++) order[i] = &plan->items[i];
        qsort(order, (size_t)n, sizeof *order, by_falling_size);
        for (int i = 0; i < n; i++) {
            struct item *own = order[i];
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

static void find_places(struct making *m) {
    struct xt_plan *plan = m->plan;
    const struct xt_graph *g = m->g;
    const struct xt_graph_export *x = &g->exports[plan->export];
    for (int t = 0; t < plan->n_tensors; t++) {
        int r = plan->tensor_root[t];
        plan->place[r] = g->roots[r].kind == XT_ROOT_TEMP ? ARENA : BOUND;
    }
    for (int i = 0; i < x->n; i++) {
        int r = root_of(m, x->values[i]);
        if (g->roots[r].kind == XT_ROOT_TEMP)
            plan->place[r] = OUTPUT;
        else if (!g->roots[r].lent) {
            plan->memory.outputs += (size_t)count(value_at(g, x->values[i])) *
                                    xt_dtype_bytes(value_at(g, x->values[i])->dtype);
            for (int s = 0; s < g->n_roots; s++) plan->backup = plan->backup || plan->updated[s];
        }
    }
    for (int p = 0; p < plan->n_nodes; p++) { /* a launch that has to copy can fail */
        const struct step *step = &plan->steps[p];
        const struct xt_tensor *first = step->args.n_inputs ? step->args.inputs[0] : NULL;
        size_t copied = 0;
        for (int k = 0; k < step->args.n_inputs && first; k++) {
            const struct xt_tensor *t = step->args.inputs[k];
            if (!t) continue;
            const struct xt_graph_value *v = value_at(g, plan->tensor_value[t - plan->tensors]);
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

static enum xt_status fill_plan(struct xt_ctx *ctx, struct making *m) {
    struct xt_plan *plan = m->plan;
    leave_out(m);
    find_needed(m);
    plan->order = ARRAY(plan->n_nodes, int);
    plan->steps = ARRAY(plan->n_nodes, struct step);
    plan->in = ARRAY(plan->n_in, struct xt_tensor *);
    if (!plan->order || !plan->steps || !plan->in) return XT_MEMORY;
    XT_TRY(find_order(ctx, m));
    make_steps(m);
    find_places(m);
    plan->items = ARRAY(m->g->n_roots + plan->n_nodes, struct item);
    if (!plan->items) return XT_MEMORY;
    list_values(m);
    return place_items(ctx, plan);
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
    plan->place = ARRAY(g->n_roots, enum place);
    plan->arena_at = ARRAY(g->n_roots, size_t);
    plan->bind = ARRAY(g->n_roots, struct xt_storage *);
    plan->bind_at = ARRAY(g->n_roots, int64_t);
    plan->updated = ARRAY(g->n_roots, bool);
    plan->lent = ARRAY(g->n_roots, bool);
    struct making m = {.g = g, .plan = plan, .fed = fed};
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
    return plan->place[root] != NOWHERE;
}

/* ---- running --------------------------------------------------------------------------------- */

static enum xt_status copy_of(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor **out) {
    const struct xt_slot *slot = xt_slot_find(ctx, xt_op_find(ctx, "contiguous"));
    struct xt_args args = {.inputs = &t, .n_inputs = 1};
    return xt_execute(ctx, slot, &args, false, out);
}

static enum xt_status write_back(struct xt_ctx *ctx, struct xt_tensor *to, struct xt_tensor *from) {
    const struct xt_slot *slot = xt_slot_find(ctx, xt_op_find(ctx, "copy_"));
    struct xt_tensor *in[2] = {to, from}, *none[XT_MAX_OUTPUTS] = {NULL};
    struct xt_args args = {.inputs = in, .n_inputs = 2};
    return xt_launch_ready(ctx, slot, &args, none);
}

static bool same_as(const struct xt_tensor *a, const struct xt_tensor *b) {
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

/* "input 'x' (recipe.lua:12)", "state 'norm.weight'" */
static const char *who_is(const struct xt_graph_root *root, char *text, size_t bytes) {
    if (root->kind == XT_ROOT_INPUT)
        snprintf(text, bytes, "input '%s' (%s:%d)", root->name,
                 root->where.file ? root->where.file : "?", root->where.line);
    else
        snprintf(text, bytes, "state '%s'", root->name);
    return text;
}

/* What stands for a root in this run, after it has been checked. */
static enum xt_status source_of(struct xt_ctx *ctx, const struct xt_graph_root *root,
                                struct xt_tensor *given, struct xt_tensor **out) {
    char got[128], want[128], who[300];
    if (root->kind == XT_ROOT_CONST && root->tensor->storage->version != root->version) {
        const struct xt_where *wrote = &root->tensor->storage->wrote;
        return xt_fail(ctx, XT_STATE, "a constant of the graph (%s) was changed in place at %s:%d",
                       xt_describe(root->tensor, want, sizeof want),
                       wrote->file ? wrote->file : "?", wrote->line);
    }
    *out = given ? given : root->tensor;
    if (!given && root->required)
        return xt_fail(ctx, XT_ARGUMENT, "%s is required and was not fed, wanted %s",
                       who_is(root, who, sizeof who), xt_describe(root->tensor, want, sizeof want));
    if (!given) return XT_OK;
    if (given->storage->hollow)
        return xt_fail(ctx, XT_STATE, "%s is given a value of a recorded graph",
                       who_is(root, who, sizeof who));
    if (given->storage->device != root->device)
        return xt_fail(ctx, XT_DEVICE, "%s is on %s, wanted %s", who_is(root, who, sizeof who),
                       ctx->backend[given->storage->device]->name,
                       ctx->backend[root->device]->name);
    if (!same_as(given, root->tensor))
        return xt_fail(ctx, given->dtype != root->tensor->dtype ? XT_DTYPE : XT_SHAPE,
                       "%s is %s, wanted %s", who_is(root, who, sizeof who),
                       xt_describe(given, got, sizeof got),
                       xt_describe(root->tensor, want, sizeof want));
    bool whole = root->lent || (root->kind == XT_ROOT_STATE && xt_is_contiguous(root->tensor));
    if (whole && !xt_is_contiguous(given))
        return xt_fail(ctx, XT_ARGUMENT,
                       "%s is written in place and is given a tensor that is "
                       "not contiguous",
                       who_is(root, who, sizeof who));
    return XT_OK;
}

/* What one run holds. */
struct running {
    struct xt_graph *g;
    struct xt_plan *plan;
    struct xt_tensor **sources; /* n_roots: new references */
    struct xt_tensor **backups; /* n_roots */
};

/* What is written may not be what anything else of the run reads. */
static enum xt_status check_lent(struct xt_ctx *ctx, const struct running *run, int r) {
    const struct xt_graph_root *roots = run->g->roots;
    char who[300];
    for (int s = 0; s < run->g->n_roots; s++) {
        const struct xt_tensor *other = run->sources[s];
        if (s == r || !other || other->storage != run->sources[r]->storage) continue;
        return xt_fail(ctx, XT_ARGUMENT, "%s is lent and shares its bytes with %s",
                       who_is(&roots[r], who, sizeof who),
                       roots[s].name ? roots[s].name : "a constant");
    }
    return XT_OK;
}

static enum xt_status bind_outside(struct xt_ctx *ctx, struct running *run,
                                   struct xt_tensor *const *feeds, struct xt_tensor *const *state) {
    struct xt_graph *g = run->g;
    struct xt_plan *plan = run->plan;
    for (int r = 0; r < g->n_roots; r++) {
        if (plan->place[r] != BOUND) continue;
        const struct xt_graph_root *root = &g->roots[r];
        struct xt_tensor *t = NULL, *given = NULL;
        if (root->kind == XT_ROOT_INPUT) given = feeds ? feeds[root->index] : NULL;
        if (root->kind == XT_ROOT_STATE) given = state ? state[root->index] : NULL;
        XT_TRY(source_of(ctx, root, given, &t));
        run->sources[r] = xt_tensor_retain(t);
    }
    for (int r = 0; r < g->n_roots; r++) {
        struct xt_tensor *t = run->sources[r];
        if (!t || g->roots[r].kind != XT_ROOT_INPUT) continue;
        if (plan->lent[r]) XT_TRY(check_lent(ctx, run, r));
        if (g->roots[r].lent) continue;
        bool copy = !xt_is_contiguous(t); /* also of bytes that the run will write */
        for (int s = 0; s < g->n_roots && !copy; s++)
            copy = plan->updated[s] && run->sources[s] && run->sources[s]->storage == t->storage;
        if (!copy) continue;
        struct xt_tensor *own;
        XT_TRY(copy_of(ctx, t, &own));
        xt_tensor_release(ctx, t);
        run->sources[r] = own;
    }
    for (int r = 0; r < g->n_roots; r++) {
        struct xt_tensor *t = run->sources[r];
        if (!t) continue;
        plan->bind[r] = t->storage;
        plan->bind_at[r] = t->offset * (int64_t)xt_dtype_bytes(t->dtype);
        if (plan->backup && plan->updated[r]) XT_TRY(copy_of(ctx, t, &run->backups[r]));
    }
    return XT_OK;
}

static void bind_tensors(const struct xt_plan *plan) {
    for (int i = 0; i < plan->n_tensors; i++) {
        struct xt_tensor *t = &plan->tensors[i];
        int r = plan->tensor_root[i];
        t->storage = plan->bind[r];
        t->offset = plan->bind_at[r] / (int64_t)xt_dtype_bytes(t->dtype) + plan->tensor_offset[i];
    }
}

static enum xt_status run_steps(struct xt_ctx *ctx, struct xt_plan *plan,
                                struct xt_storage *const *arena) {
    struct xt_scratch_room *room = &ctx->scratch;
    bool placed = plan->memory.placed;
    enum xt_status status = XT_OK;
    room->on = true;
    for (int p = 0; p < plan->n_nodes; p++) {
        struct step *step = &plan->steps[p];
        ctx->fixed_where = step->where;
        room->device = step->device;
        room->base =
            placed && step->scratch ? (char *)arena[step->device]->data + step->scratch_at : NULL;
        room->bytes = step->scratch;
        room->used = room->most = 0;
        status = xt_launch_ready(ctx, step->slot, &step->args, step->outputs);
        if (!placed) step->scratch = room->most;
        if (room->most > plan->memory.scratch) plan->memory.scratch = room->most;
        if (status == XT_OK) continue;
        char who[200];
        snprintf(who, sizeof who, "%s made at %s:%d", step->slot->op->name,
                 step->where.file ? step->where.file : "?", step->where.line);
        ctx->fixed_where = (struct xt_where){0};
        status = xt_fail_in(ctx, status, who);
        break;
    }
    ctx->fixed_where = (struct xt_where){0};
    *room = (struct xt_scratch_room){0};
    return status;
}

/* After the first run that came to its end: scratch has its place among the values. */
static enum xt_status place_scratch(struct xt_ctx *ctx, struct xt_plan *plan) {
    if (plan->memory.placed) return XT_OK;
    plan->memory.placed = true;
    enum xt_status status = place_items(ctx, plan);
    plan->memory.placed = status == XT_OK;
    return status;
}

/* Before the run: the tensors around what it makes or was lent. After it: copies of the rest. */
static enum xt_status give_outputs(struct xt_ctx *ctx, const struct xt_graph *g,
                                   struct xt_plan *plan, bool after, struct xt_tensor **outputs) {
    for (int i = 0; i < plan->n_outputs; i++) {
        struct xt_tensor *t = &plan->tensors[plan->export_tensor[i]];
        int r = plan->tensor_root[plan->export_tensor[i]];
        bool own = plan->place[r] == OUTPUT || g->roots[r].lent;
        if (own && !after) XT_TRY(xt_tensor_alias(ctx, t, &outputs[i]));
        if (!own && after) XT_TRY(copy_of(ctx, t, &outputs[i]));
    }
    return XT_OK;
}

enum xt_status xt_graph_run(struct xt_ctx *ctx, struct xt_graph *g, int e,
                            struct xt_tensor *const *feeds, struct xt_tensor *const *state,
                            struct xt_tensor **outputs) {
    if (ctx->graph) return xt_fail(ctx, XT_STATE, "a graph cannot run while one is recorded");
    struct running run = {.g = g};
    struct xt_storage *arena[XT_DEVICE_COUNT] = {NULL};
    size_t bytes = ((size_t)g->n_roots + 1) * sizeof(struct xt_tensor *);
    size_t fed_bytes = ((size_t)g->n_inputs + 1) * sizeof(bool);
    size_t made_bytes = ((size_t)g->exports[e].n + 1) * sizeof(struct xt_tensor *);
    enum xt_status status = XT_MEMORY;
    bool ran = false;
    bool *fed = xt_host_alloc(ctx, fed_bytes);
    run.sources = xt_host_alloc(ctx, bytes);
    run.backups = xt_host_alloc(ctx, bytes);
    struct xt_tensor **made = xt_host_alloc(ctx, made_bytes);
    struct xt_plan *plan = NULL;
    if (!fed || !run.sources || !run.backups || !made) goto done;
    for (int i = 0; i < g->n_inputs; i++) fed[i] = feeds && feeds[i];
    XT_GO(xt_plan_get(ctx, g, e, fed, &plan));
    run.plan = plan;
    XT_GO(bind_outside(ctx, &run, feeds, state));
    for (int d = 0; d < XT_DEVICE_COUNT; d++)
        if (plan->arena_bytes[d])
            XT_GO(xt_storage_new(ctx, (enum xt_device)d, plan->arena_bytes[d], &arena[d]));
    for (int r = 0; r < g->n_roots; r++) {
        if (plan->place[r] == ARENA) {
            plan->bind[r] = arena[g->roots[r].device];
            plan->bind_at[r] = (int64_t)plan->arena_at[r];
        } else if (plan->place[r] == OUTPUT) {
            plan->bind[r] = NULL;
            plan->bind_at[r] = 0;
            XT_GO(xt_storage_new(ctx, g->roots[r].device, g->roots[r].bytes, &plan->bind[r]));
        }
    }
    bind_tensors(plan);
    XT_GO(give_outputs(ctx, g, plan, false, made));
    ran = true;
    XT_GO(run_steps(ctx, plan, arena));
    XT_GO(give_outputs(ctx, g, plan, true, made));
    for (int r = 0; r < g->n_roots; r++)
        if ((plan->updated[r] || plan->lent[r]) && run.sources[r])
            xt_storage_written(ctx, run.sources[r]->storage);
    memcpy(outputs, made, (size_t)g->exports[e].n * sizeof *made);
    place_scratch(ctx, plan); /* tried again after the next run where memory is short */
done:
    if (status != XT_OK && made)
        for (int i = 0; i < g->exports[e].n; i++) xt_tensor_release(ctx, made[i]);
    for (int r = 0; r < g->n_roots; r++) {
        if (run.backups && run.backups[r]) {
            if (status != XT_OK && ran) write_back(ctx, run.sources[r], run.backups[r]);
            xt_tensor_release(ctx, run.backups[r]);
        }
        if (plan && plan->place[r] == OUTPUT && plan->bind[r])
            xt_storage_release(ctx, plan->bind[r]);
        if (plan) plan->bind[r] = NULL;
        if (run.sources) xt_tensor_release(ctx, run.sources[r]);
    }
    for (int d = 0; d < XT_DEVICE_COUNT; d++)
        if (arena[d]) xt_storage_release(ctx, arena[d]);
    xt_host_free(ctx, made, made_bytes);
    xt_host_free(ctx, run.backups, bytes);
    xt_host_free(ctx, run.sources, bytes);
    xt_host_free(ctx, fed, fed_bytes);
    return status;
}
