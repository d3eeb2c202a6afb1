/*
 * graph.c: recording a graph: the hooks of the launch point, inputs, exports, names of the state.
 *
 * A call that depends on an input or on the state is recorded with hollow outputs: their shapes are
 * known, their bytes do not exist. So recording costs no memory, changes no parameter, and cannot
 * be confused by the value of a default. All other calls run, and their results may be read.
 */
#include <stdio.h>
#include <string.h>

#include "graph.h"
#include "tape.h"

enum xt_status xt_graph_grow(struct xt_ctx *ctx, void *items, int n, int *cap, size_t size) {
    void **list = items;
    if (n < *cap) return XT_OK;
    int more = *cap ? 2 * *cap : 64;
    void *bigger = xt_host_alloc(ctx, (size_t)more * size);
    if (!bigger) return XT_MEMORY;
    if (n) memcpy(bigger, *list, (size_t)n * size);
    xt_host_free(ctx, *list, (size_t)*cap * size);
    *list = bigger;
    *cap = more;
    return XT_OK;
}

/* ---- hooks of the launch point --------------------------------------------------------------- */

int64_t xt_graph_first_storage(const struct xt_ctx *ctx) {
    return ctx->graph->first_storage;
}

bool xt_graph_is_frozen(const struct xt_ctx *ctx) {
    return ctx->graph->frozen;
}

bool xt_graph_is_hollow(struct xt_ctx *ctx, const struct xt_slot *slot,
                        const struct xt_args *args) {
    const struct xt_graph *g = ctx->graph;
    for (int i = 0; i < args->n_inputs; i++) {
        const struct xt_tensor *t = args->inputs[i];
        if (!t) continue;
        if (t->storage->hollow || (t->leaf && !g->frozen)) return true;
        int v = xt_graph_find(g, t);
        if (v >= 0 && g->roots[g->values[v].root].varies) return true;
        if (xt_slot_writes(slot, i) && t->storage->number <= g->first_storage && !g->frozen)
            return true;
    }
    return false;
}

/* A probability that makes the seed pointless. */
static bool draws(const struct xt_op *op, const struct xt_args *args) {
    int k = 0;
    for (const struct xt_param *p = op->params; p->name; p++) {
        if (!xt_takes_attr(p)) continue;
        if (p->kind == XT_P_REAL && (strcmp(p->name, "p") == 0 || strcmp(p->name, "dropout") == 0))
            return args->attrs[k].f != 0;
        k++;
    }
    return true;
}

enum xt_status xt_graph_check(struct xt_ctx *ctx, const struct xt_slot *slot,
                              const struct xt_args *args) {
    int i = 0;
    for (const struct xt_param *p = slot->op->params; p->name; p++) {
        if (p->kind == XT_P_SEED && !(i < args->n_inputs && args->inputs[i]) &&
            strcmp(slot->op->name, "seed_mix") != 0 && draws(slot->op, args))
            return xt_fail(ctx, XT_STATE,
                           "%s is a plain number inside a graph and would repeat at every run: "
                           "make it an input, b:input(\"seed\", 0), and mix with xt.seed",
                           p->name);
        i += xt_takes_slot(p);
    }
    return XT_OK;
}

/* Whether a call of a frozen graph has been computed for good. */
static bool is_settled(const struct xt_graph *g, const struct xt_call *call,
                       struct xt_tensor *const *inputs) {
    for (int i = 0; i < call->n_inputs && g->frozen; i++)
        if (inputs[i] && inputs[i]->storage->hollow) return false;
    return g->frozen;
}

enum xt_status xt_graph_add(struct xt_ctx *ctx, struct xt_call *call,
                            struct xt_tensor *const *inputs, struct xt_tensor *const *outputs) {
    struct xt_graph *g = ctx->graph;
    if (is_settled(g, call, inputs)) return XT_OK;
    int n_in = call->n_inputs, n = n_in + call->n_outputs, input = -1;
    bool varies = false;
    XT_TRY(xt_graph_grow(ctx, &g->nodes, g->n_nodes, &g->cap_nodes, sizeof *g->nodes));
    size_t bytes = (size_t)(n ? n : 1) * sizeof(int);
    int *values = xt_host_alloc(ctx, bytes);
    if (!values) return XT_MEMORY;
    enum xt_status status = XT_OK;
    for (int i = 0; i < n_in; i++) {
        values[i] = -1;
        if (!inputs[i]) continue;
        XT_GO(xt_graph_use(ctx, g, inputs[i], xt_slot_writes(call->slot, i), &values[i]));
        const struct xt_graph_root *root = &g->roots[g->values[values[i]].root];
        varies = varies || root->varies;
        if (input < 0) input = root->input;
    }
    for (int i = 0; i < n_in; i++) {
        if (values[i] < 0 || !xt_slot_writes(call->slot, i)) continue;
        struct xt_graph_root *root = &g->roots[g->values[values[i]].root];
        root->varies = root->varies || varies;
        if (root->input < 0) root->input = input;
    }
    for (int k = 0; k < call->n_outputs; k++) {
        values[n_in + k] = -1;
        if (!outputs[k]) continue;
        int r, v = xt_graph_find(g, outputs[k]);
        if (v < 0) {
            if (call->slot->op->flags & XT_VIEW) {
                r = g->values[values[0]].root;
            } else {
                XT_GO(xt_graph_add_root(ctx, g, XT_ROOT_TEMP, outputs[k], &r));
                g->roots[r].varies = varies;
                g->roots[r].input = input;
            }
            XT_GO(xt_graph_add_value(ctx, g, r, outputs[k], &v));
        }
        values[n_in + k] = v;
    }
    xt_call_retain(call);
    g->nodes[g->n_nodes++] = (struct xt_graph_node){call, values, call->wants, -1};
    return XT_OK;
done:
    xt_host_free(ctx, values, bytes);
    return status;
}

static size_t values_bytes(const struct xt_graph_node *node) {
    int n = node->call->n_inputs + node->call->n_outputs;
    return (size_t)(n ? n : 1) * sizeof(int);
}

void xt_graph_remove(struct xt_ctx *ctx, struct xt_call *call) {
    struct xt_graph *g = ctx->graph;
    if (!g->n_nodes || g->nodes[g->n_nodes - 1].call != call) return;
    struct xt_graph_node *node = &g->nodes[--g->n_nodes];
    xt_host_free(ctx, node->values, values_bytes(node));
    xt_call_release(ctx, call);
}

enum xt_status xt_graph_check_read(struct xt_ctx *ctx, const struct xt_tensor *t) {
    const struct xt_graph *g = ctx->graph;
    if (!g && !t->storage->hollow) return XT_OK;
    if (!g)
        return xt_fail(ctx, XT_STATE, "a value of a recorded graph has no bytes outside of a run");
    int v = xt_graph_find(g, t);
    const struct xt_graph_root *root = v < 0 ? NULL : &g->roots[g->values[v].root];
    if (!t->storage->hollow &&
        !(root && root->varies && (root->writes || root->kind == XT_ROOT_TEMP)))
        return XT_OK;
    if (!root || root->input < 0)
        return xt_fail(
            ctx, XT_STATE,
            "reading a value on the host inside a graph: it depends on the graph's state");
    const struct xt_graph_root *input = &g->roots[root->input];
    return xt_fail(ctx, XT_STATE,
                   "reading a value on the host inside a graph: it depends on input '%s' (%s:%d)",
                   input->name, input->where.file ? input->where.file : "?", input->where.line);
}

/* ---- inputs, exports, state ------------------------------------------------------------------ */

/* By two reductions where t lies: reading it element by element would be slow on a device. */
static enum xt_status all_ones(struct xt_ctx *ctx, struct xt_tensor *t, bool *out) {
    static const char *const names[] = {"amin", "amax"};
    *out = xt_dtype_is_float(t->dtype) && xt_numel(t) > 0;
    for (int i = 0; i < 2 && *out; i++) {
        struct xt_tensor *most;
        double value = 0;
        XT_TRY(xt_unary(ctx, names[i], t, &most));
        enum xt_status status = xt_tensor_get(ctx, most, NULL, &value);
        xt_tensor_release(ctx, most);
        if (status != XT_OK) return status;
        *out = value == 1;
    }
    return XT_OK;
}

enum xt_status xt_graph_input(struct xt_ctx *ctx, struct xt_graph *g, const char *name,
                              struct xt_tensor *value, enum xt_input_kind kind,
                              struct xt_tensor **out) {
    struct xt_tensor *box = NULL, *own = NULL;
    struct xt_spec spec;
    int r, v;
    for (int i = 0; i < g->n_roots; i++)
        if (g->roots[i].kind == XT_ROOT_INPUT && strcmp(g->roots[i].name, name) == 0)
            return xt_fail(ctx, XT_ARGUMENT, "input '%s' is declared twice, first at %s:%d", name,
                           g->roots[i].where.file ? g->roots[i].where.file : "?",
                           g->roots[i].where.line);
    XT_TRY(xt_graph_check_read(ctx, value));
    xt_spec_of(value, &spec);
    enum xt_status status;
    /* The default is a copy: what is done to the caller's tensor later is nothing to the graph. */
    ctx->graph = NULL;
    xt_no_grad_push(ctx);
    if (kind == XT_INPUT_DEFAULT)
        status = xt_apply_name(ctx, "contiguous", &value, 1, &own);
    else
        status = xt_tensor_alias(ctx, value, &own);
    bool ones = false;
    if (status == XT_OK && kind == XT_INPUT_DEFAULT) status = all_ones(ctx, own, &ones);
    xt_no_grad_pop(ctx);
    ctx->graph = g;
    if (status != XT_OK) goto done;
    XT_GO(xt_tensor_hollow(ctx, &spec, value->storage->device, &box));
    XT_GO(xt_graph_add_root(ctx, g, XT_ROOT_INPUT, box, &r));
    struct xt_graph_root *root = &g->roots[r];
    root->name = xt_intern(ctx, name);
    root->varies = true;
    root->input = r;
    root->required = kind != XT_INPUT_DEFAULT;
    root->lent = kind == XT_INPUT_LENT;
    root->ones = ones;
    root->tensor = own;
    root->where = xt_here(ctx);
    root->index = g->n_inputs++;
    own = NULL;
    XT_GO(root->name ? xt_graph_add_value(ctx, g, r, box, &v) : XT_MEMORY);
    *out = box;
    return XT_OK;
done:
    xt_tensor_release(ctx, own);
    xt_tensor_release(ctx, box);
    return status;
}

bool xt_graph_node_updates(const struct xt_graph *g, const struct xt_graph_node *node) {
    for (int i = 0; i < node->call->n_inputs; i++)
        if (node->values[i] >= 0 && xt_slot_writes(node->call->slot, i) &&
            g->roots[g->values[node->values[i]].root].kind == XT_ROOT_STATE)
            return true;
    return false;
}

enum xt_status xt_graph_export(struct xt_ctx *ctx, struct xt_graph *g, const char *name,
                               const char *const *names, struct xt_tensor *const *values, int n) {
    for (int e = 0; e < g->n_exports; e++)
        if (strcmp(g->exports[e].name, name) == 0)
            return xt_fail(ctx, XT_ARGUMENT, "export '%s' is declared twice, first at %s:%d", name,
                           g->exports[e].where.file ? g->exports[e].where.file : "?",
                           g->exports[e].where.line);
    XT_TRY(xt_graph_grow(ctx, &g->exports, g->n_exports, &g->cap_exports, sizeof *g->exports));
    struct xt_graph_export x = {.name = xt_intern(ctx, name), .n = n, .where = xt_here(ctx)};
    size_t room = (size_t)(n ? n : 1);
    enum xt_status status = XT_MEMORY;
    x.names = xt_host_alloc(ctx, room * sizeof *x.names);
    x.values = xt_host_alloc(ctx, room * sizeof *x.values);
    if (!x.name || !x.names || !x.values) goto done;
    for (int i = 0; i < n; i++) {
        status = XT_MEMORY;
        x.names[i] = xt_intern(ctx, names[i]);
        if (!x.names[i]) goto done;
        XT_GO(xt_graph_value_of(ctx, g, values[i], &x.values[i]));
    }
    for (int i = 0; i < g->n_nodes; i++)
        if (g->nodes[i].update < 0 && xt_graph_node_updates(g, &g->nodes[i]))
            g->nodes[i].update = g->n_exports;
    g->exports[g->n_exports++] = x;
    return XT_OK;
done:
    xt_host_free(ctx, x.names, room * sizeof *x.names);
    xt_host_free(ctx, x.values, room * sizeof *x.values);
    return status;
}

enum xt_status xt_graph_name(struct xt_ctx *ctx, struct xt_graph *g, const char *name,
                             struct xt_tensor *t) {
    int v = xt_graph_find(g, t);
    if (g->frozen) return XT_OK;
    if (v < 0) {
        if (t->storage->number > g->first_storage && !t->leaf) return XT_OK;
        XT_TRY(xt_graph_meet(ctx, g, t, true, &v));
    }
    struct xt_graph_root *root = &g->roots[g->values[v].root];
    if (root->kind != XT_ROOT_STATE && root->kind != XT_ROOT_CONST) return XT_OK;
    if (root->kind == XT_ROOT_STATE && root->name && strncmp(root->name, "state.", 6) != 0)
        return XT_OK; /* its first name stays */
    char longer[256];
    int number = 1;
    snprintf(longer, sizeof longer, "%s", name);
    for (int i = 0; i < g->n_roots; i++)
        if (g->roots[i].name && g->roots[i].kind == XT_ROOT_STATE &&
            strcmp(g->roots[i].name, longer) == 0) {
            snprintf(longer, sizeof longer, "%s#%d", name, ++number);
            i = -1;
        }
    root->name = xt_intern(ctx, longer);
    if (!root->name) return XT_MEMORY;
    return root->kind == XT_ROOT_STATE ? XT_OK : xt_graph_make_state(ctx, g, root);
}

/* ---- beginning and end ----------------------------------------------------------------------- */

enum xt_status xt_graph_begin(struct xt_ctx *ctx, bool frozen, struct xt_graph **out) {
    if (ctx->graph) return xt_fail(ctx, XT_STATE, "a graph is being recorded already");
    if (ctx->segment) return xt_fail(ctx, XT_STATE, "not inside a checkpoint segment");
    if (ctx->walk) return xt_fail(ctx, XT_STATE, "a backward is in progress");
    struct xt_graph *g = xt_host_alloc(ctx, sizeof *g);
    if (!g) return XT_MEMORY;
    g->ctx = ctx;
    g->first_storage = ctx->n_storages;
    g->frozen = frozen;
    if (frozen) xt_no_grad_push(ctx);
    ctx->graph = g;
    *out = g;
    return XT_OK;
}

bool xt_graph_recording(const struct xt_ctx *ctx) {
    return ctx->graph != NULL;
}

static void take_off(struct xt_ctx *ctx, const struct xt_graph *g, struct xt_tensor **t) {
    if (!*t || (*t)->storage->number <= g->first_storage) return;
    xt_tensor_release(ctx, *t);
    *t = NULL;
}

void xt_graph_end(struct xt_ctx *ctx, struct xt_graph *g) {
    if (ctx->graph != g) return;
    ctx->graph = NULL;
    if (g->frozen) xt_no_grad_pop(ctx);
    for (int i = 0; i < g->n_nodes; i++) xt_record_drop_kept(ctx, g->nodes[i].call);
    for (int i = 0; i < g->n_roots; i++) {
        struct xt_leaf *leaf = g->roots[i].leaf;
        if (!leaf) continue;
        take_off(ctx, g, &leaf->grad);
        take_off(ctx, g, &leaf->copy);
        g->roots[i].leaf = NULL;
        xt_leaf_release(ctx, leaf);
    }
}

void xt_graph_release(struct xt_ctx *ctx, struct xt_graph *g) {
    if (!g) return;
    xt_graph_end(ctx, g);
    xt_plan_free(ctx, g->plans);
    for (int i = g->n_nodes; i-- > 0;) {
        xt_host_free(ctx, g->nodes[i].values, values_bytes(&g->nodes[i]));
        xt_call_release(ctx, g->nodes[i].call);
    }
    for (int i = 0; i < g->n_roots; i++) xt_tensor_release(ctx, g->roots[i].tensor);
    for (int e = 0; e < g->n_exports; e++) {
        size_t room = (size_t)(g->exports[e].n ? g->exports[e].n : 1);
        xt_host_free(ctx, g->exports[e].names, room * sizeof *g->exports[e].names);
        xt_host_free(ctx, g->exports[e].values, room * sizeof *g->exports[e].values);
    }
    xt_host_free(ctx, g->roots, (size_t)g->cap_roots * sizeof *g->roots);
    xt_host_free(ctx, g->values, (size_t)g->cap_values * sizeof *g->values);
    xt_host_free(ctx, g->nodes, (size_t)g->cap_nodes * sizeof *g->nodes);
    xt_host_free(ctx, g->exports, (size_t)g->cap_exports * sizeof *g->exports);
    xt_host_free(ctx, g->table, (size_t)g->cap_table * sizeof *g->table);
    xt_host_free(ctx, g, sizeof *g);
}
