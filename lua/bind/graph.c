/*
 * graph.c: graphs for lua/xtrain/graph.lua: a userdata that holds one pointer, and functions of it
 * in xt.core. Numbers of roots, values, nodes and exports count from 1 in Lua.
 */
#include <string.h>

#include "bind.h"
#include "graph.h"

#define META "xtrain.graph"

struct box {
    struct xt_graph *g; /* NULL when released */
    struct xtbind *b;
};

static struct xt_graph *graph_at(lua_State *L, int index) {
    struct box *box = luaL_checkudata(L, index, META);
    if (!box->g) xtbind_error(L, "the graph has been released");
    return box->g;
}

static int collect(lua_State *L) {
    struct box *box = luaL_checkudata(L, 1, META);
    struct xt_graph *g = box->g;
    if (!g) return 0;
    box->g = NULL;
    xt_graph_release(box->b->ctx, g);
    xtbind_unref(box->b);
    return 0;
}

static struct box *new_box(lua_State *L, struct xtbind *b) {
    struct box *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (struct box){NULL, b};
    luaL_setmetatable(L, META);
    return box;
}

/* graph_record(fn, frozen) -> graph: fn(graph) is called once. Recording ends whatever happens. */
static int record(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    bool frozen = lua_toboolean(L, 2);
    lua_settop(L, 1);
    struct box *box = new_box(L, b);
    if (xt_graph_begin(b->ctx, frozen, &box->g) != XT_OK)
        xtbind_error(L, "graph: %s", xt_error(b->ctx));
    b->refs++;
    struct xt_graph *g = box->g;
    lua_pushvalue(L, 1);
    lua_pushvalue(L, -2);
    int status = lua_pcall(L, 1, 0, 0);
    xt_graph_end(b->ctx, g);
    if (status != LUA_OK) {
        lua_pushvalue(L, -2);
        lua_replace(L, 1);
        collect(L); /* at once: it holds tensors */
        return lua_error(L);
    }
    return 1;
}

static int recording(lua_State *L) {
    lua_pushboolean(L, xt_graph_recording(xtbind_carried(L)->ctx));
    return 1;
}

/* graph_input(g, name, tensor, required, lent) -> tensor */
static int input(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_graph *g = graph_at(L, 1);
    const char *name = luaL_checkstring(L, 2);
    struct xt_tensor *value = xtbind_check_tensor(L, 3), *out = NULL;
    struct xt_tensor **box = xtbind_box(L, b);
    enum xt_input_kind kind = lua_toboolean(L, 5)   ? XT_INPUT_LENT
                              : lua_toboolean(L, 4) ? XT_INPUT_REQUIRED
                                                    : XT_INPUT_DEFAULT;
    xtbind_check(L, xt_graph_input(b->ctx, g, name, value, kind, &out));
    xtbind_fill(b, box, out);
    return 1;
}

/* graph_export(g, name, names, tensors) */
static int export(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_graph *g = graph_at(L, 1);
    const char *name = luaL_checkstring(L, 2);
    int n = (int)lua_rawlen(L, 3);
    size_t room = (size_t)(n ? n : 1);
    const char **names = lua_newuserdatauv(L, room * sizeof *names, 0);
    struct xt_tensor **values = lua_newuserdatauv(L, room * sizeof *values, 0);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, 3, i + 1);
        names[i] = lua_tostring(L, -1); /* the table keeps it */
        lua_pop(L, 1);
        lua_rawgeti(L, 4, i + 1);
        values[i] = xtbind_to_tensor(L, -1);
        if (!values[i])
            xtbind_error(L, "export '%s': '%s' is %s, wanted a tensor", name, names[i],
                         xtbind_kind(L, -1));
        lua_pop(L, 1);
    }
    if (xt_graph_export(b->ctx, g, name, names, values, n) != XT_OK)
        xtbind_error(L, "export '%s': %s", name, xt_error(b->ctx));
    return 0;
}

/* graph_name(g, name, tensor) */
static int name_state(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    xtbind_check(L, xt_graph_name(b->ctx, graph_at(L, 1), luaL_checkstring(L, 2),
                                  xtbind_check_tensor(L, 3)));
    return 0;
}

static int check_export(lua_State *L, const struct xt_graph *g, int index) {
    lua_Integer e = luaL_checkinteger(L, index);
    if (e < 1 || e > g->n_exports) xtbind_error(L, "there is no export number %I", e);
    return (int)e - 1;
}

/* A table of tensors by place into an array of n, NULL where there is none. */
static struct xt_tensor **read_places(lua_State *L, int index, int n) {
    struct xt_tensor **list = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *list, 0);
    memset(list, 0, (size_t)(n + 1) * sizeof *list);
    if (lua_isnoneornil(L, index)) return list;
    lua_pushnil(L);
    while (lua_next(L, index)) {
        lua_Integer i = luaL_checkinteger(L, -2);
        luaL_argcheck(L, i >= 1 && i <= n, index, "no such place");
        list[i - 1] = xtbind_check_tensor(L, lua_gettop(L));
        lua_pop(L, 1);
    }
    return list;
}

/* graph_run(g, export, feeds, state) -> list of tensors. feeds and state: place -> tensor. */
static int run(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_graph *g = graph_at(L, 1);
    int e = check_export(L, g, 2), n = g->exports[e].n;
    lua_settop(L, 4);
    struct xt_tensor **feeds = read_places(L, 3, g->n_inputs);
    struct xt_tensor **state = read_places(L, 4, g->n_states);
    struct xt_tensor **outputs = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *outputs, 0);
    lua_createtable(L, n, 0);
    int result = lua_gettop(L);
    for (int i = 0; i < n; i++) {
        xtbind_box(L, b);
        lua_rawseti(L, result, i + 1);
    }
    if (xt_graph_run(b->ctx, g, e, feeds, state, outputs) != XT_OK)
        xtbind_error(L, "%s: %s", g->exports[e].name, xt_error(b->ctx));
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, result, i + 1);
        xtbind_fill(b, lua_touserdata(L, -1), outputs[i]);
        lua_pop(L, 1);
    }
    xtbind_collect(b, false);
    lua_settop(L, result);
    return 1;
}

/* ---- looking --------------------------------------------------------------------------------- */

static void set_integer(lua_State *L, const char *name, lua_Integer value) {
    lua_pushinteger(L, value);
    lua_setfield(L, -2, name);
}

static void set_where(lua_State *L, const struct xt_where *where) {
    lua_pushstring(L, where->file ? where->file : "?");
    lua_setfield(L, -2, "file");
    set_integer(L, "line", where->line);
}

static void set_integers(lua_State *L, const char *name, const int64_t *list, int n, int add) {
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushinteger(L, list[i] + add);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, name);
}

static const char *const kinds[] = {"input", "state", "constant", "value"};

static void push_root(lua_State *L, struct xtbind *b, const struct xt_graph_root *root) {
    lua_createtable(L, 0, 14);
    lua_pushstring(L, kinds[root->kind]);
    lua_setfield(L, -2, "kind");
    set_integer(L, "bytes", (lua_Integer)root->bytes);
    set_integer(L, "place", root->index + 1);
    set_integer(L, "writes", root->writes);
    lua_pushstring(L, root->name);
    lua_setfield(L, -2, "name");
    lua_pushboolean(L, root->required);
    lua_setfield(L, -2, "required");
    lua_pushboolean(L, root->lent);
    lua_setfield(L, -2, "lent");
    lua_pushboolean(L, root->ones);
    lua_setfield(L, -2, "ones");
    lua_pushboolean(L, root->used);
    lua_setfield(L, -2, "used");
    set_where(L, &root->where);
    if (!root->tensor) return;
    struct xt_tensor **box = xtbind_box(L, b), *t = NULL;
    xtbind_check(L, xt_detach(b->ctx, root->tensor, &t));
    xtbind_fill(b, box, t);
    lua_setfield(L, -2, "tensor");
}

static void push_value(lua_State *L, const struct xt_graph_value *v) {
    lua_createtable(L, 0, 5);
    set_integer(L, "root", v->root + 1);
    set_integer(L, "offset", v->offset);
    lua_pushstring(L, xt_dtype_name(v->dtype));
    lua_setfield(L, -2, "dtype");
    set_integers(L, "shape", v->shape, v->ndim, 0);
    set_integers(L, "stride", v->stride, v->ndim, 0);
}

static void push_node(lua_State *L, const struct xt_graph *g, int i) {
    const struct xt_graph_node *node = &g->nodes[i];
    struct xt_graph_call call;
    xt_graph_call_of(g, i, &call);
    lua_createtable(L, 0, 12);
    lua_pushstring(L, call.op->name);
    lua_setfield(L, -2, "op");
    set_where(L, &call.where);
    for (int part = 0; part < 2; part++) {
        int n = part ? call.n_outputs : call.n_inputs;
        lua_createtable(L, n, 0);
        for (int k = 0; k < n; k++) {
            lua_pushinteger(L, node->values[part ? call.n_inputs + k : k] + 1);
            lua_rawseti(L, -2, k + 1);
        }
        lua_setfield(L, -2, part ? "outputs" : "inputs");
    }
    lua_createtable(L, call.n_attrs, 0);
    for (int k = 0; k < call.n_attrs; k++) {
        lua_pushinteger(L, call.attrs[k].i);
        lua_rawseti(L, -2, k + 1);
    }
    lua_setfield(L, -2, "attrs");
    set_integers(L, "ints", call.ints, call.n_ints, 0);
    lua_pushboolean(L, node->hidden);
    lua_setfield(L, -2, "hidden");
    lua_pushboolean(L, (call.op->flags & XT_VIEW) != 0);
    lua_setfield(L, -2, "view");
    lua_pushboolean(L, call.updates);
    lua_setfield(L, -2, "updates");
    set_integer(L, "update", node->update + 1);
}

static void push_export(lua_State *L, const struct xt_graph_export *x) {
    lua_createtable(L, 0, 5);
    lua_pushstring(L, x->name);
    lua_setfield(L, -2, "name");
    set_where(L, &x->where);
    lua_createtable(L, x->n, 0);
    for (int k = 0; k < x->n; k++) {
        lua_pushstring(L, x->names[k]);
        lua_rawseti(L, -2, k + 1);
    }
    lua_setfield(L, -2, "names");
    lua_createtable(L, x->n, 0);
    for (int k = 0; k < x->n; k++) {
        lua_pushinteger(L, x->values[k] + 1);
        lua_rawseti(L, -2, k + 1);
    }
    lua_setfield(L, -2, "values");
}

/* graph_roots(g), graph_values(g), graph_nodes(g), graph_exports(g): lists of tables. */
static int roots(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    const struct xt_graph *g = graph_at(L, 1);
    lua_createtable(L, g->n_roots, 0);
    for (int i = 0; i < g->n_roots; i++) {
        push_root(L, b, &g->roots[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int values(lua_State *L) {
    const struct xt_graph *g = graph_at(L, 1);
    lua_createtable(L, g->n_values, 0);
    for (int i = 0; i < g->n_values; i++) {
        push_value(L, &g->values[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int nodes(lua_State *L) {
    const struct xt_graph *g = graph_at(L, 1);
    lua_createtable(L, g->n_nodes, 0);
    for (int i = 0; i < g->n_nodes; i++) {
        push_node(L, g, i);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int exports(lua_State *L) {
    const struct xt_graph *g = graph_at(L, 1);
    lua_createtable(L, g->n_exports, 0);
    for (int i = 0; i < g->n_exports; i++) {
        push_export(L, &g->exports[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* graph_plan(g, export, fed) -> {records = node numbers, roots = numbers needed, arena, outputs,
   copies, scratch, placed, backup, calls, elided}. fed: place of input -> true. */
static int plan(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_graph *g = graph_at(L, 1);
    int e = check_export(L, g, 2), n, at = 0;
    lua_settop(L, 3);
    bool *fed = lua_newuserdatauv(L, (size_t)g->n_inputs + 1, 0);
    memset(fed, 0, (size_t)g->n_inputs + 1);
    for (int i = 0; i < g->n_inputs && lua_istable(L, 3); i++) {
        lua_rawgeti(L, 3, i + 1);
        fed[i] = lua_toboolean(L, -1);
        lua_pop(L, 1);
    }
    struct xt_plan *plan;
    struct xt_plan_memory memory;
    xtbind_check(L, xt_plan_get(b->ctx, g, e, fed, &plan));
    xt_plan_memory(plan, &memory);
    lua_createtable(L, 0, 10);
    const int *order = xt_plan_order(plan, &n);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushinteger(L, order[i] + 1);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "records");
    lua_newtable(L);
    for (int r = 0; r < g->n_roots; r++) {
        if (!xt_plan_needs(plan, r)) continue;
        lua_pushinteger(L, r + 1);
        lua_rawseti(L, -2, ++at);
    }
    lua_setfield(L, -2, "roots");
    set_integer(L, "arena", (lua_Integer)memory.arena);
    set_integer(L, "outputs", (lua_Integer)memory.outputs);
    set_integer(L, "copies", (lua_Integer)memory.copies);
    set_integer(L, "scratch", (lua_Integer)memory.scratch);
    lua_pushboolean(L, memory.placed);
    lua_setfield(L, -2, "placed");
    set_integer(L, "backup", (lua_Integer)memory.backup);
    set_integer(L, "calls", memory.calls);
    set_integer(L, "elided", memory.elided);
    return 1;
}

/* ---- files ----------------------------------------------------------------------------------- */

static lua_Integer get_integer(lua_State *L, int index, const char *name) {
    int exact = 0;
    lua_getfield(L, index, name);
    lua_Integer value = lua_tointegerx(L, -1, &exact);
    if (!exact) xtbind_error(L, "graph_load: '%s' is missing", name);
    lua_pop(L, 1);
    return value;
}

static bool get_boolean(lua_State *L, int index, const char *name) {
    lua_getfield(L, index, name);
    bool value = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return value;
}

/* An interned string, or NULL. */
static const char *get_string(lua_State *L, struct xtbind *b, int index, const char *name) {
    lua_getfield(L, index, name);
    const char *text = lua_isstring(L, -1) ? xt_intern(b->ctx, lua_tostring(L, -1)) : NULL;
    lua_pop(L, 1);
    return text;
}

static struct xt_where get_where(lua_State *L, struct xtbind *b, int index) {
    struct xt_where where = {get_string(L, b, index, "file"), 0};
    where.line = (int)get_integer(L, index, "line");
    return where;
}

/* The list named `name` of the table at index: at most `most` integers. */
static int get_integers(lua_State *L, int index, const char *name, int64_t *list, int most) {
    lua_getfield(L, index, name);
    int n = lua_istable(L, -1) ? (int)lua_rawlen(L, -1) : -1;
    if (n < 0 || n > most) xtbind_error(L, "graph_load: '%s' is no list", name);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, -1, i + 1);
        list[i] = lua_tointeger(L, -1);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    return n;
}

static int list_length(lua_State *L, int index, const char *name) {
    lua_getfield(L, index, name);
    int n = lua_istable(L, -1) ? (int)lua_rawlen(L, -1) : 0;
    lua_pop(L, 1);
    return n;
}

/* graph_blank() -> an empty graph to load into. */
static int blank(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct box *box = new_box(L, b);
    xtbind_check(L, xt_graph_blank(b->ctx, &box->g));
    b->refs++;
    return 1;
}

/* graph_add_root(g, root), graph_add_value(g, value), graph_add_node, graph_add_export: tables as
   the functions above give them. */
static int add_root(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_graph *g = graph_at(L, 1);
    struct xt_graph_root root = {.input = -1, .used = true};
    const char *kind = get_string(L, b, 2, "kind");
    for (int k = 0; k < 4; k++)
        if (kind && strcmp(kind, kinds[k]) == 0) root.kind = (enum xt_root_kind)k;
    root.bytes = (size_t)get_integer(L, 2, "bytes");
    root.writes = (int)get_integer(L, 2, "writes");
    root.name = get_string(L, b, 2, "name");
    root.required = get_boolean(L, 2, "required");
    root.lent = get_boolean(L, 2, "lent");
    root.ones = get_boolean(L, 2, "ones");
    root.used = get_boolean(L, 2, "used");
    root.where = get_where(L, b, 2);
    lua_getfield(L, 2, "tensor");
    root.tensor = xtbind_to_tensor(L, -1);
    if (root.tensor) {
        root.bytes = xt_nbytes(root.tensor);
        root.device = xt_device_of(root.tensor);
    }
    if (!root.name && root.kind <= XT_ROOT_STATE) xtbind_error(L, "graph_load: a root has no name");
    xtbind_check(L, xt_graph_load_root(b->ctx, g, &root));
    return 0;
}

static int add_value(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_graph *g = graph_at(L, 1);
    struct xt_graph_value v = {.root = (int)get_integer(L, 2, "root") - 1};
    v.offset = get_integer(L, 2, "offset");
    lua_getfield(L, 2, "dtype");
    v.dtype = xtbind_check_dtype(L, lua_gettop(L), "graph_load");
    v.ndim = get_integers(L, 2, "shape", v.shape, XT_MAX_DIMS);
    if (get_integers(L, 2, "stride", v.stride, XT_MAX_DIMS) != v.ndim)
        xtbind_error(L, "graph_load: a value's strides are malformed");
    xtbind_check(L, xt_graph_load_value(b->ctx, g, &v));
    return 0;
}

static int add_node(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_graph *g = graph_at(L, 1);
    union xt_attr attrs[XT_MAX_PARAMS];
    int64_t ints[XT_MAX_INTS], numbers[XT_MAX_PARAMS];
    const char *name = get_string(L, b, 2, "op");
    struct xt_graph_call call = {.op = name ? xt_op_find(b->ctx, name) : NULL};
    if (!call.op) xtbind_error(L, "graph_load: there is no op '%s'", name ? name : "?");
    call.where = get_where(L, b, 2);
    call.n_inputs = list_length(L, 2, "inputs");
    call.n_outputs = list_length(L, 2, "outputs");
    call.n_attrs = get_integers(L, 2, "attrs", numbers, XT_MAX_PARAMS);
    call.n_ints = get_integers(L, 2, "ints", ints, XT_MAX_INTS);
    for (int k = 0; k < call.n_attrs; k++) attrs[k].i = numbers[k];
    call.attrs = attrs;
    call.ints = ints;
    int n = call.n_inputs + call.n_outputs;
    int64_t *wide = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *wide, 0);
    int *list = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *list, 0);
    get_integers(L, 2, "inputs", wide, call.n_inputs);
    get_integers(L, 2, "outputs", wide + call.n_inputs, call.n_outputs);
    for (int k = 0; k < n; k++) list[k] = (int)wide[k] - 1;
    xtbind_check(L, xt_graph_load_node(b->ctx, g, &call, list, get_boolean(L, 2, "hidden"),
                                       (int)get_integer(L, 2, "update") - 1));
    return 0;
}

static int add_export(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_graph *g = graph_at(L, 1);
    struct xt_graph_export x = {.name = get_string(L, b, 2, "name")};
    x.where = get_where(L, b, 2);
    x.n = list_length(L, 2, "values");
    int64_t *wide = lua_newuserdatauv(L, (size_t)(x.n + 1) * sizeof *wide, 0);
    x.values = lua_newuserdatauv(L, (size_t)(x.n + 1) * sizeof *x.values, 0);
    x.names = lua_newuserdatauv(L, (size_t)(x.n + 1) * sizeof *x.names, 0);
    get_integers(L, 2, "values", wide, x.n);
    lua_getfield(L, 2, "names");
    for (int k = 0; k < x.n; k++) {
        lua_rawgeti(L, -1, k + 1);
        x.names[k] = xt_intern(b->ctx, luaL_optstring(L, -1, ""));
        x.values[k] = (int)wide[k] - 1;
        lua_pop(L, 1);
    }
    if (!x.name) xtbind_error(L, "graph_load: an export has no name");
    xtbind_check(L, xt_graph_load_export(b->ctx, g, &x));
    return 0;
}

void xtbind_open_graph(lua_State *L, struct xtbind *b) {
    static const luaL_Reg functions[] = {{"graph_record", record},
                                         {"graph_recording", recording},
                                         {"graph_input", input},
                                         {"graph_export", export},
                                         {"graph_name", name_state},
                                         {"graph_run", run},
                                         {"graph_roots", roots},
                                         {"graph_values", values},
                                         {"graph_nodes", nodes},
                                         {"graph_exports", exports},
                                         {"graph_plan", plan},
                                         {"graph_blank", blank},
                                         {"graph_add_root", add_root},
                                         {"graph_add_value", add_value},
                                         {"graph_add_node", add_node},
                                         {"graph_add_export", add_export},
                                         {NULL, NULL}};
    luaL_newmetatable(L, META);
    lua_pushcfunction(L, collect);
    lua_setfield(L, -2, "__gc");
    lua_pop(L, 1);
    xtbind_functions(L, b, NULL, functions);
}
