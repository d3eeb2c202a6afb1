/*
 * graph_load.c: a graph read back from a file, part by part, each checked before it is taken; and
 * what a file has to say of a node.
 */
#include <string.h>

#include "graph.h"
#include "tape.h"

void xt_graph_call_of(const struct xt_graph *g, int node, struct xt_graph_call *out) {
    const struct xt_call *call = g->nodes[node].call;
    *out = (struct xt_graph_call){.op = call->slot->op,
                                  .where = call->where,
                                  .n_inputs = call->n_inputs,
                                  .n_outputs = call->n_outputs,
                                  .n_attrs = call->slot->n_attrs,
                                  .n_ints = call->n_ints,
                                  .attrs = call->attrs,
                                  .ints = call->ints,
                                  .updates = xt_graph_node_updates(g, &g->nodes[node])};
}

enum xt_status xt_graph_blank(struct xt_ctx *ctx, struct xt_graph **out) {
    struct xt_graph *g = xt_host_alloc(ctx, sizeof *g);
    if (!g) return XT_MEMORY;
    g->ctx = ctx;
    *out = g;
    return XT_OK;
}

enum xt_status xt_graph_load_root(struct xt_ctx *ctx, struct xt_graph *g,
                                  const struct xt_graph_root *root) {
    bool bound = root->kind != XT_ROOT_TEMP;
    if (root->kind > XT_ROOT_TEMP || bound != (root->tensor != NULL))
        return xt_fail(ctx, XT_FORMAT, "root %d has no bytes", g->n_roots + 1);
    XT_TRY(xt_graph_grow(ctx, &g->roots, g->n_roots, &g->cap_roots, sizeof *g->roots));
    struct xt_graph_root *own = &g->roots[g->n_roots];
    *own = *root;
    own->leaf = NULL;
    own->index = -1;
    if (root->kind == XT_ROOT_INPUT) own->index = g->n_inputs++;
    if (root->kind == XT_ROOT_STATE) own->index = g->n_states++;
    if (bound) own->version = root->tensor->storage->version;
    xt_tensor_retain(own->tensor);
    g->n_roots++;
    return XT_OK;
}

/* Whether a value stays inside its root. */
static bool fits_root(const struct xt_graph *g, const struct xt_graph_value *v) {
    if (v->root < 0 || v->root >= g->n_roots || v->ndim < 0 || v->ndim > XT_MAX_DIMS) return false;
    if (v->dtype >= XT_DTYPE_COUNT || v->offset < 0) return false;
    int64_t last = v->offset, room = (int64_t)(g->roots[v->root].bytes / xt_dtype_bytes(v->dtype));
    for (int d = 0; d < v->ndim; d++) {
        int64_t reach;
        if (v->shape[d] < 0 || v->stride[d] < 0) return false;
        if (v->shape[d] == 0) return true;
        if (__builtin_mul_overflow(v->shape[d] - 1, v->stride[d], &reach) ||
            __builtin_add_overflow(last, reach, &last))
            return false;
    }
    return last < room;
}

enum xt_status xt_graph_load_value(struct xt_ctx *ctx, struct xt_graph *g,
                                   const struct xt_graph_value *value) {
    if (!fits_root(g, value))
        return xt_fail(ctx, XT_FORMAT, "value %d lies outside its bytes", g->n_values + 1);
    XT_TRY(xt_graph_grow(ctx, &g->values, g->n_values, &g->cap_values, sizeof *g->values));
    g->values[g->n_values] = *value;
    g->values[g->n_values++].next = -1;
    return XT_OK;
}

static struct xt_tensor view_of(const struct xt_graph_value *v, struct xt_storage *storage) {
    struct xt_tensor t = {.refs = 1, .ndim = v->ndim, .dtype = v->dtype, .storage = storage};
    memcpy(t.shape, v->shape, sizeof t.shape);
    memcpy(t.stride, v->stride, sizeof t.stride);
    return t;
}

/* The record's shape rule must give the outputs that the file says it has. */
static enum xt_status check_node(struct xt_ctx *ctx, const struct xt_graph *g,
                                 const struct xt_slot *slot, const struct xt_graph_call *call,
                                 const int *values) {
    struct xt_output outputs[XT_MAX_OUTPUTS];
    struct xt_storage storage = {.refs = 1, .hollow = true};
    struct xt_args args = {.n_inputs = call->n_inputs, .n_ints = call->n_ints};
    size_t room = (size_t)call->n_inputs + 1;
    struct xt_tensor *views = xt_host_alloc(ctx, room * sizeof *views);
    struct xt_tensor **in = xt_host_alloc(ctx, room * sizeof *in);
    enum xt_status status = views && in ? XT_OK : XT_MEMORY;
    if (status != XT_OK) goto done;
    for (int i = 0; i < call->n_inputs; i++) {
        if (values[i] < 0) continue;
        views[i] = view_of(&g->values[values[i]], &storage);
        in[i] = &views[i];
    }
    args.inputs = in;
    memcpy(args.attrs, call->attrs, (size_t)call->n_attrs * sizeof *call->attrs);
    memcpy(args.ints, call->ints, (size_t)call->n_ints * sizeof *call->ints);
    if (slot->op->flags & XT_VIEW) goto done; /* never launched; its value has been checked */
    XT_GO(slot->op->infer(ctx, slot->op, &args, outputs));
    for (int k = 0; k < call->n_outputs; k++) {
        int v = values[call->n_inputs + k];
        if (v < 0) continue;
        const struct xt_graph_value *value = &g->values[v];
        const struct xt_spec *spec = &outputs[k].spec;
        if (value->dtype != spec->dtype || value->ndim != spec->ndim ||
            memcmp(value->shape, spec->shape, (size_t)spec->ndim * sizeof *spec->shape) != 0)
            status = xt_fail(ctx, XT_FORMAT, "the outputs of %s have other shapes", slot->op->name);
    }
done:
    xt_host_free(ctx, views, room * sizeof *views);
    xt_host_free(ctx, in, room * sizeof *in);
    return status;
}

enum xt_status xt_graph_load_node(struct xt_ctx *ctx, struct xt_graph *g,
                                  const struct xt_graph_call *call, const int *values, bool hidden,
                                  int update) {
    const struct xt_slot *slot = xt_slot_find(ctx, call->op);
    int n = call->n_inputs + call->n_outputs;
    bool fine = call->n_outputs == call->op->n_outputs && call->n_attrs == slot->n_attrs &&
                call->n_ints <= XT_MAX_INTS && call->n_inputs >= slot->n_slots - slot->has_list &&
                (slot->has_list || call->n_inputs == slot->n_slots) &&
                !(call->op->flags & XT_COMPOSED);
    for (int i = 0; i < n; i++) fine = fine && values[i] >= -1 && values[i] < g->n_values;
    if (!fine) return xt_fail(ctx, XT_FORMAT, "the record of %s is malformed", call->op->name);
    XT_TRY(check_node(ctx, g, slot, call, values));
    XT_TRY(xt_graph_grow(ctx, &g->nodes, g->n_nodes, &g->cap_nodes, sizeof *g->nodes));
    struct xt_graph_node node = {.hidden = hidden, .update = update};
    size_t bytes = (size_t)(n ? n : 1) * sizeof(int);
    node.values = xt_host_alloc(ctx, bytes);
    if (!node.values) return XT_MEMORY;
    enum xt_status status = xt_record_blank(ctx, slot, call->n_inputs, call->n_ints, &node.call);
    if (status != XT_OK) {
        xt_host_free(ctx, node.values, bytes);
        return status;
    }
    memcpy(node.values, values, (size_t)n * sizeof *values);
    memcpy(node.call->attrs, call->attrs, (size_t)call->n_attrs * sizeof *call->attrs);
    memcpy(node.call->ints, call->ints, (size_t)call->n_ints * sizeof *call->ints);
    node.call->wants = hidden;
    node.call->where = call->where;
    g->nodes[g->n_nodes++] = node;
    return XT_OK;
}

enum xt_status xt_graph_load_export(struct xt_ctx *ctx, struct xt_graph *g,
                                    const struct xt_graph_export *export) {
    for (int i = 0; i < export->n; i++)
        if (export->values[i] < 0 || export->values[i] >= g->n_values)
            return xt_fail(ctx, XT_FORMAT, "export '%s' names no value", export->name);
    XT_TRY(xt_graph_grow(ctx, &g->exports, g->n_exports, &g->cap_exports, sizeof *g->exports));
    struct xt_graph_export own = *export;
    size_t room = (size_t)(own.n ? own.n : 1);
    own.names = xt_host_alloc(ctx, room * sizeof *own.names);
    own.values = xt_host_alloc(ctx, room * sizeof *own.values);
    if (!own.names || !own.values) {
        xt_host_free(ctx, own.names, room * sizeof *own.names);
        xt_host_free(ctx, own.values, room * sizeof *own.values);
        return XT_MEMORY;
    }
    memcpy(own.names, export->names, (size_t)own.n * sizeof *own.names);
    memcpy(own.values, export->values, (size_t)own.n * sizeof *own.values);
    g->exports[g->n_exports++] = own;
    return XT_OK;
}
