/*
 * observe.c: the runtime's observer as one Lua function, the trap, statistics, times by op.
 *
 * The function gets a table an event: {kind = "call"|"record"|"end", op, rule, within, where,
 * number, as_values, written, wants, differentiable, n_in, n_out, names, inputs, outputs, grads_in,
 * grads_out, leaves, from}. Tensors there share the bytes but have no history; places where there
 * is none are empty. What it raises makes the op fail.
 */

#include "bind.h"

/* Its address is the key of the function in the registry. */
static const char observer_key = 0;

/* A field of the table on top: the tensors, without history, at their places from 1. */
static void set_tensors(lua_State *L, struct xtbind *b, const char *name,
                        struct xt_tensor *const *list, int n) {
    lua_createtable(L, n, 0);
    for (int i = 0; i < n && list; i++) {
        struct xt_tensor **box, *alias = NULL;
        if (!list[i]) continue;
        box = xtbind_box(L, b);
        xtbind_check(L, xt_detach(b->ctx, list[i], &alias));
        xtbind_fill(b, box, alias);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, name);
}

/* The names of the parameters that the inputs are for. */
static void set_names(lua_State *L, const struct xt_op *op, int n) {
    int i = 0;
    lua_createtable(L, n, 0);
    for (const struct xt_param *p = op->params; p->name && i < n; p++) {
        if (!xt_takes_slot(p)) continue;
        do {
            lua_pushstring(L, p->name);
            lua_rawseti(L, -2, ++i);
        } while (p->kind == XT_P_TENSORS && i < n);
    }
    lua_setfield(L, -2, "names");
}

/* {number, output, leaf, added} for each input of a record. */
static void set_sources(lua_State *L, const struct xt_source *from, int n) {
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_createtable(L, 0, 4);
        lua_pushinteger(L, from[i].number);
        lua_setfield(L, -2, "number");
        lua_pushinteger(L, from[i].output + 1);
        lua_setfield(L, -2, "output");
        if (from[i].leaf)
            lua_pushlightuserdata(L, (void *)(uintptr_t)from[i].leaf);
        else
            lua_pushnil(L);
        lua_setfield(L, -2, "leaf");
        lua_pushboolean(L, from[i].added);
        lua_setfield(L, -2, "added");
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "from");
}

/* {[i] = what stands for the variable that input i of a call is}. */
static void set_leaves(lua_State *L, struct xt_tensor *const *in, int n) {
    lua_createtable(L, 0, 0);
    for (int i = 0; i < n; i++) {
        if (!in[i] || !in[i]->leaf) continue;
        lua_pushlightuserdata(L, in[i]->leaf);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "leaves");
}

/* Argument 1: what was seen. Protected: nothing may be raised through the runtime. */
static int call_observer(lua_State *L) {
    static const char *const kinds[] = {
        [XT_SEEN_CALL] = "call", [XT_SEEN_RECORD] = "record", [XT_SEEN_END] = "end"};
    const struct xt_seen *seen = lua_touserdata(L, 1);
    struct xtbind *b = xtbind_of(L);
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &observer_key) != LUA_TFUNCTION) return 0;
    lua_createtable(L, 0, 12);
    lua_pushstring(L, kinds[seen->kind]);
    lua_setfield(L, -2, "kind");
    xtbind_push_where(L, seen->where);
    lua_setfield(L, -2, "where");
    lua_pushboolean(L, seen->as_values);
    lua_setfield(L, -2, "as_values");
    if (seen->kind != XT_SEEN_END) {
        lua_pushstring(L, seen->op->name);
        lua_setfield(L, -2, "op");
        lua_pushinteger(L, seen->number);
        lua_setfield(L, -2, "number");
        lua_pushinteger(L, seen->n_in);
        lua_setfield(L, -2, "n_in");
        lua_pushinteger(L, seen->n_out);
        lua_setfield(L, -2, "n_out");
        set_names(L, seen->op, seen->n_in);
        set_tensors(L, b, "inputs", seen->in, seen->n_in);
        set_tensors(L, b, "outputs", seen->out, seen->n_out);
        set_tensors(L, b, "grads_in", seen->grad_in, seen->n_in);
        set_tensors(L, b, "grads_out", seen->grad_out, seen->n_out);
    }
    if (seen->rule) {
        lua_pushstring(L, seen->rule->name);
        lua_setfield(L, -2, "rule");
    }
    if (seen->within) {
        lua_pushstring(L, seen->within->name);
        lua_setfield(L, -2, "within");
    }
    if (seen->kind == XT_SEEN_CALL) set_leaves(L, seen->in, seen->n_in);
    lua_pushinteger(L, (lua_Integer)seen->written);
    lua_setfield(L, -2, "written");
    lua_pushinteger(L, (lua_Integer)seen->wants);
    lua_setfield(L, -2, "wants");
    lua_pushboolean(L, seen->op && !(seen->op->flags & XT_NO_GRADIENT));
    lua_setfield(L, -2, "differentiable");
    if (seen->from) set_sources(L, seen->from, seen->n_in);
    lua_call(L, 1, 0);
    return 0;
}

static enum xt_status tell(void *user, struct xt_ctx *ctx, const struct xt_seen *seen) {
    struct xtbind *b = user;
    lua_State *L = b->L;
    if (!L || !lua_checkstack(L, LUA_MINSTACK)) return XT_OK;
    enum xt_status status = XT_OK;
    lua_pushcfunction(L, call_observer);
    lua_pushlightuserdata(L, (void *)(uintptr_t)seen);
    if (lua_pcall(L, 1, 0, 0) != LUA_OK) {
        const char *message = lua_tostring(L, -1);
        status = xt_fail(ctx, XT_STATE, "%s", message ? message : "an observer raised an error");
        lua_pop(L, 1);
    }
    b->L = L; /* a coroutine may have run in it */
    return status;
}

/* observe(fn or nil): fn(event) for each call and each record passed. */
static int observe(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    lua_settop(L, 1);
    bool on = lua_isfunction(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &observer_key);
    xt_observe(b->ctx, on ? tell : NULL, b);
    return 0;
}

/* stats(t): {n, finite, nans, infs, minus_infs, min, max, mean, std, text}; of an integer dtype min
   and max are integers. */
static int stats(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_stats s;
    char text[256];
    struct xt_tensor *t = xtbind_check_tensor(L, 1);
    xtbind_check(L, xt_tensor_stats(b->ctx, t, &s));
    const struct {
        const char *name; /* of the field */
        int64_t value;    /* a count */
    } counts[] = {{"n", s.n},
                  {"finite", s.finite},
                  {"nans", s.nans},
                  {"infs", s.infs},
                  {"minus_infs", s.minus_infs}};
    const struct {
        const char *name; /* of the field */
        double value;     /* of the finite elements */
    } values[] = {{"min", s.min}, {"max", s.max}, {"mean", s.mean}, {"std", s.std}};
    lua_createtable(L, 0, 10);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        lua_pushinteger(L, counts[i].value);
        lua_setfield(L, -2, counts[i].name);
    }
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        lua_pushnumber(L, values[i].value);
        lua_setfield(L, -2, values[i].name);
    }
    if (s.finite && !xt_dtype_is_float(t->dtype)) {
        lua_pushinteger(L, s.least);
        lua_setfield(L, -2, "min");
        lua_pushinteger(L, s.most);
        lua_setfield(L, -2, "max");
    }
    lua_pushstring(L, xt_stats_describe(&s, text, sizeof text));
    lua_setfield(L, -2, "text");
    return 1;
}

/* leaf(t): what stands for the variable t is, or whose compute copy it is; nil for others. */
static int leaf(lua_State *L) {
    xtbind_carried(L);
    const struct xt_tensor *t = xtbind_check_tensor(L, 1);
    if (!t->leaf) return 0;
    lua_pushlightuserdata(L, t->leaf);
    return 1;
}

/* leaf_storage(leaf): the number of the storage of a variable's gradient, or nil; for a leaf of the
   event that is being told. */
static int leaf_storage(lua_State *L) {
    xtbind_carried(L);
    luaL_checktype(L, 1, LUA_TLIGHTUSERDATA);
    const struct xt_tensor *grad = xt_leaf_grad(lua_touserdata(L, 1));
    if (!grad) return 0;
    lua_pushinteger(L, grad->storage->number);
    return 1;
}

/* storage(t): the number of its storage, and the version, which grows with each write in place. */
static int storage(lua_State *L) {
    xtbind_carried(L);
    const struct xt_tensor *t = xtbind_check_tensor(L, 1);
    lua_pushinteger(L, t->storage->number);
    lua_pushinteger(L, (lua_Integer)t->storage->version);
    return 2;
}

/* trap(on): the first op whose result is not finite raises. */
static int trap(lua_State *L) {
    xt_set_trap(xtbind_carried(L)->ctx, lua_toboolean(L, 1));
    return 0;
}

/* trap_note(on): the same, noted and not raised. */
static int trap_note(lua_State *L) {
    xt_trap_note(xtbind_carried(L)->ctx, lua_toboolean(L, 1));
    return 0;
}

/* trap_found(): what was noted, or nil. */
static int trap_found(lua_State *L) {
    const char *text = xt_trap_found(xtbind_carried(L)->ctx);
    if (!*text) return 0;
    lua_pushstring(L, text);
    return 1;
}

/* profile(true) starts to take times; profile() ends it: {{op, calls, seconds, bytes}, ...} of the
   ops that were launched. */
static int profile(lua_State *L) {
    struct xt_ctx *ctx = xtbind_carried(L)->ctx;
    if (lua_toboolean(L, 1)) {
        if (xt_profile_start(ctx) != XT_OK) return luaL_error(L, "%s", xt_error(ctx));
        return 0;
    }
    int n, found = 0;
    const struct xt_profile_row *rows = xt_profile_rows(ctx, &n);
    lua_newtable(L);
    for (int i = 0; i < n; i++) {
        if (rows[i].calls == 0) continue;
        lua_createtable(L, 0, 4);
        lua_pushstring(L, rows[i].op);
        lua_setfield(L, -2, "op");
        lua_pushinteger(L, rows[i].calls);
        lua_setfield(L, -2, "calls");
        lua_pushnumber(L, 1e-9 * (double)rows[i].nanoseconds);
        lua_setfield(L, -2, "seconds");
        lua_pushinteger(L, rows[i].bytes);
        lua_setfield(L, -2, "bytes");
        lua_rawseti(L, -2, ++found);
    }
    xt_profile_stop(ctx);
    return 1;
}

void xtbind_open_observe(lua_State *L, struct xtbind *b) {
    static const luaL_Reg private[] = {{"observe", observe},     {"stats", stats},
                                       {"leaf", leaf},           {"leaf_storage", leaf_storage},
                                       {"storage", storage},     {"trap", trap},
                                       {"trap_note", trap_note}, {"trap_found", trap_found},
                                       {"profile", profile},     {NULL, NULL}};
    xtbind_functions(L, b, NULL, private);
}
