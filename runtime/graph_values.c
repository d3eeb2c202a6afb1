/*
 * graph_values.c: the roots and values of a graph, and which of them a tensor is.
 *
 * Values are told apart by storage number and geometry, in a table by storage number.
 */
#include <stdio.h>
#include <string.h>

#include "graph.h"
#include "tape.h"

static int place_of(const struct xt_graph *g, int64_t storage) {
    return (int)((uint64_t)storage * 0x9E3779B97F4A7C15u >> 33) & (g->cap_table - 1);
}

static bool same_place(const struct xt_graph_value *v, const struct xt_tensor *t) {
    if (v->absolute != t->offset || v->dtype != t->dtype || v->ndim != t->ndim) return false;
    for (int d = 0; d < t->ndim; d++)
        if (v->shape[d] != t->shape[d] || (v->shape[d] > 1 && v->stride[d] != t->stride[d]))
            return false;
    return true;
}

int xt_graph_find(const struct xt_graph *g, const struct xt_tensor *t) {
    if (!g->cap_table) return -1;
    for (int v = g->table[place_of(g, t->storage->number)]; v >= 0; v = g->values[v].next)
        if (g->roots[g->values[v].root].storage == t->storage->number &&
            same_place(&g->values[v], t))
            return v;
    return -1;
}

static enum xt_status grow_table(struct xt_ctx *ctx, struct xt_graph *g) {
    if (g->n_values < g->cap_table) return XT_OK;
    int cap = g->cap_table ? 2 * g->cap_table : 256;
    int *table = xt_host_alloc(ctx, (size_t)cap * sizeof *table);
    if (!table) return XT_MEMORY;
    xt_host_free(ctx, g->table, (size_t)g->cap_table * sizeof *table);
    g->table = table;
    g->cap_table = cap;
    for (int i = 0; i < cap; i++) table[i] = -1;
    for (int v = 0; v < g->n_values; v++) {
        int place = place_of(g, g->roots[g->values[v].root].storage);
        g->values[v].next = table[place];
        table[place] = v;
    }
    return XT_OK;
}

enum xt_status xt_graph_add_value(struct xt_ctx *ctx, struct xt_graph *g, int root,
                                  const struct xt_tensor *t, int *out) {
    XT_TRY(grow_table(ctx, g));
    XT_TRY(xt_graph_grow(ctx, &g->values, g->n_values, &g->cap_values, sizeof *g->values));
    struct xt_graph_value *v = &g->values[g->n_values];
    int place = place_of(g, t->storage->number);
    *v = (struct xt_graph_value){.root = root,
                                 .next = g->table[place],
                                 .offset = t->offset - g->roots[root].base,
                                 .absolute = t->offset,
                                 .dtype = t->dtype,
                                 .ndim = t->ndim};
    memcpy(v->shape, t->shape, sizeof v->shape);
    memcpy(v->stride, t->stride, sizeof v->stride);
    g->table[place] = g->n_values;
    *out = g->n_values++;
    return XT_OK;
}

enum xt_status xt_graph_add_root(struct xt_ctx *ctx, struct xt_graph *g, enum xt_root_kind kind,
                                 const struct xt_tensor *t, int *out) {
    XT_TRY(xt_graph_grow(ctx, &g->roots, g->n_roots, &g->cap_roots, sizeof *g->roots));
    g->roots[g->n_roots] = (struct xt_graph_root){.kind = kind,
                                                  .device = t->storage->device,
                                                  .bytes = xt_nbytes(t),
                                                  .storage = t->storage->number,
                                                  .base = t->offset,
                                                  .index = -1,
                                                  .input = -1};
    *out = g->n_roots++;
    return XT_OK;
}

enum xt_status xt_graph_make_state(struct xt_ctx *ctx, struct xt_graph *g,
                                   struct xt_graph_root *root) {
    char name[32];
    root->kind = XT_ROOT_STATE;
    root->varies = true;
    root->index = g->n_states++;
    if (root->name) return XT_OK;
    snprintf(name, sizeof name, "state.%d", g->n_states);
    root->name = xt_intern(ctx, name);
    return root->name ? XT_OK : XT_MEMORY;
}

enum xt_status xt_graph_meet(struct xt_ctx *ctx, struct xt_graph *g, struct xt_tensor *t,
                             bool written, int *out) {
    char text[128];
    struct xt_storage *s = t->storage;
    int r;
    if (s->hollow)
        return xt_fail(ctx, XT_STATE, "%s is a value of another graph",
                       xt_describe(t, text, sizeof text));
    if (t->leaf && t->dtype != t->leaf->spec.dtype && !g->frozen)
        return xt_fail(ctx, XT_STATE,
                       "the compute copy (%s) of a variable was made outside the graph: call "
                       "w:to(dtype) inside",
                       xt_describe(t, text, sizeof text));
    bool fresh = s->number > g->first_storage;
    if (!t->leaf && fresh && !s->loaded && !g->frozen) { /* memory that a call will fill */
        XT_TRY(xt_graph_add_root(ctx, g, XT_ROOT_TEMP, t, &r));
        g->roots[r].base = 0;
        g->roots[r].bytes = s->bytes;
        return xt_graph_add_value(ctx, g, r, t, out);
    }
    if (written && !t->leaf && fresh)
        return xt_fail(ctx, XT_STATE,
                       "a constant (%s) of a graph is written in place: write to its clone()",
                       xt_describe(t, text, sizeof text));
    XT_TRY(xt_graph_add_root(ctx, g, XT_ROOT_CONST, t, &r));
    struct xt_graph_root *root = &g->roots[r];
    root->version = s->version;
    XT_TRY(xt_tensor_alias(ctx, t, &root->tensor));
    if (written && g->frozen)
        return xt_fail(ctx, XT_STATE, "a frozen graph writes to %s, which was made outside of it",
                       xt_describe(t, text, sizeof text));
    if (g->frozen) return xt_graph_add_value(ctx, g, r, t, out);
    if (t->leaf) {
        root->leaf = t->leaf;
        root->leaf->refs++;
    }
    if (t->leaf || written) XT_TRY(xt_graph_make_state(ctx, g, root));
    return xt_graph_add_value(ctx, g, r, t, out);
}

enum xt_status xt_graph_use(struct xt_ctx *ctx, struct xt_graph *g, struct xt_tensor *t,
                            bool written, int *out) {
    char text[128];
    int v = xt_graph_find(g, t);
    if (v < 0) XT_TRY(xt_graph_meet(ctx, g, t, written, &v));
    struct xt_graph_root *root = &g->roots[g->values[v].root];
    if (written && root->kind == XT_ROOT_INPUT && !root->lent)
        return xt_fail(ctx, XT_STATE, "input '%s' is written in place: write to its clone()",
                       root->name);
    if (written && root->kind == XT_ROOT_CONST) {
        if (g->frozen || t->storage->number > g->first_storage)
            return xt_fail(ctx, XT_STATE,
                           "a constant (%s) of a graph is written in place: write to its clone()",
                           xt_describe(t, text, sizeof text));
        XT_TRY(xt_graph_make_state(ctx, g, root));
    }
    root->used = true;
    root->writes += written;
    *out = v;
    return XT_OK;
}

enum xt_status xt_graph_value_of(struct xt_ctx *ctx, struct xt_graph *g, const struct xt_tensor *t,
                                 int *out) {
    int v = xt_graph_find(g, t);
    if (v < 0) XT_TRY(xt_graph_meet(ctx, g, (struct xt_tensor *)(uintptr_t)t, false, &v));
    *out = v;
    return XT_OK;
}
