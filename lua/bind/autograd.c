/*
 * autograd.c: gradients of functions, what is recorded while one runs, and the records there are.
 */
#include <stdio.h>
#include <string.h>

#include "bind.h"

/* xt.grad(output, {inputs} [, seed] [, {retain = true}]): a table of gradients in the order of the
   inputs; nil where output does not depend on one. */
static int grad(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *output = xtbind_to_tensor(L, 1), *seed;
    lua_settop(L, 4);
    if (!output) xtbind_error(L, "grad: output is %s, wanted a tensor", xtbind_kind(L, 1));
    if (xtbind_to_tensor(L, 2)) { /* a single input may come bare */
        lua_createtable(L, 1, 0);
        lua_pushvalue(L, 2);
        lua_rawseti(L, -2, 1);
        lua_replace(L, 2);
    }
    if (!lua_istable(L, 2))
        xtbind_error(L, "grad: inputs is %s, wanted a table of tensors", xtbind_kind(L, 2));
    bool retain = xtbind_check_seed_and_retain(L, 3, "grad", &seed);
    int n = (int)lua_rawlen(L, 2);
    size_t bytes = (size_t)(n ? n : 1) * sizeof(struct xt_tensor *);
    struct xt_tensor **inputs = lua_newuserdatauv(L, bytes, 0);
    struct xt_tensor **grads = lua_newuserdatauv(L, bytes, 0);
    lua_createtable(L, n, 0);
    int result = lua_gettop(L);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, 2, i + 1);
        inputs[i] = xtbind_to_tensor(L, -1);
        grads[i] = NULL;
        if (!inputs[i])
            xtbind_error(L, "grad: inputs[%d] is %s, wanted a tensor", i + 1, xtbind_kind(L, -1));
        xtbind_box(L, b);
        lua_rawseti(L, result, i + 1);
        lua_pop(L, 1);
    }
    xtbind_collect_soon(b);
    b->walks++;
    enum xt_status status = xt_grad(b->ctx, output, inputs, n, seed, retain, grads);
    b->walks--;
    if (status != XT_OK) xtbind_error(L, "grad: %s", xt_error(b->ctx));
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, result, i + 1);
        xtbind_fill(b, lua_touserdata(L, -1), grads[i]);
        lua_pop(L, 1);
    }
    for (int i = 0; i < n; i++) {
        if (grads[i]) continue;
        lua_pushnil(L);
        lua_rawseti(L, result, i + 1);
    }
    lua_settop(L, result);
    return 1;
}

static void check_callable(lua_State *L, const char *who) {
    if (lua_isfunction(L, 1)) return;
    if (!luaL_getmetafield(L, 1, "__call"))
        xtbind_error(L, "%s: fn is %s, wanted a function", who, xtbind_kind(L, 1));
    lua_pop(L, 1);
}

static int no_grad(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    check_callable(L, "no_grad");
    xt_no_grad_push(b->ctx);
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    xt_no_grad_pop(b->ctx);
    return status == LUA_OK ? lua_gettop(L) : lua_error(L);
}

/* Whether index holds a table of options: all its keys are those of a segment. */
static bool is_segment_options(lua_State *L, int index) {
    if (!lua_istable(L, index) || lua_getmetatable(L, index)) return false;
    bool any = false;
    lua_pushnil(L);
    while (lua_next(L, index)) {
        const char *name = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "";
        any = strcmp(name, "selective") == 0 || strcmp(name, "verify") == 0;
        lua_pop(L, 1);
        if (any) continue;
        lua_pop(L, 1);
        return false;
    }
    return any;
}

/* Reads {selective, verify}, the first argument or the last one, and removes it. */
static struct xt_segment_options segment_options(lua_State *L) {
    struct xt_segment_options options = {false, false};
    int index = lua_gettop(L);
    if (is_segment_options(L, 1))
        index = 1;
    else if (index < 2 || !is_segment_options(L, index))
        return options;
    lua_getfield(L, index, "selective");
    lua_getfield(L, index, "verify");
    options.selective = lua_toboolean(L, -2);
    options.verify = lua_toboolean(L, -1);
    lua_pop(L, 2);
    lua_remove(L, index);
    return options;
}

/* xt.checkpoint([options,] fn, ... [, options]): fn is called once; backward replays records. */
static int checkpoint(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_segment_options options = segment_options(L);
    struct xt_segment *segment = NULL;
    check_callable(L, "checkpoint");
    xtbind_check(L, xt_segment_begin(b->ctx, &options, &segment));
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    if (status != LUA_OK) {
        xt_segment_abort(b->ctx, segment);
        return lua_error(L);
    }
    xtbind_check(L, xt_segment_end(b->ctx, segment));
    return lua_gettop(L);
}

static int is_recording(lua_State *L) {
    lua_pushboolean(L, xt_recording(xtbind_carried(L)->ctx));
    return 1;
}

/* quietly(fn, ...): nothing that fn calls is recorded or trapped: for looking at values. */
static int quietly(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_pause pause;
    xt_pause(b->ctx, &pause);
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    xt_resume(b->ctx, &pause);
    return status == LUA_OK ? lua_gettop(L) : lua_error(L);
}

static int set_grad(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = xtbind_check_tensor(L, 1);
    struct xt_tensor *g = lua_isnoneornil(L, 2) ? NULL : xtbind_check_tensor(L, 2);
    xtbind_check(L, xt_set_grad(b->ctx, t, g));
    return 0;
}

/* The compute copy as it is, or nil; for an optimizer, which writes it and then calls the next. */
static int compute_copy_peek(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *copy = xt_compute_copy_peek(b->ctx, xtbind_check_tensor(L, 1));
    if (!copy) return 0;
    struct xt_tensor **box = xtbind_box(L, b);
    xtbind_fill(b, box, xt_tensor_retain(copy));
    return 1;
}

static int compute_copy_fresh(lua_State *L) {
    xtbind_carried(L);
    xt_compute_copy_fresh(xtbind_check_tensor(L, 1));
    return 0;
}

/* ---- records --------------------------------------------------------------------------------- */

struct records {
    struct xt_record_info *list; /* NULL while counting */
    int n, room;                 /* seen, and room in list */
};

static void note_record(void *user, const struct xt_record_info *info) {
    struct records *r = user;
    if (r->list && r->n < r->room) r->list[r->n] = *info;
    r->n++;
}

static void push_spec(lua_State *L, const struct xt_spec *spec) {
    luaL_Buffer buffer;
    luaL_buffinit(L, &buffer);
    luaL_addstring(&buffer, xt_dtype_name(spec->dtype));
    luaL_addstring(&buffer, spec->ndim ? " " : " scalar");
    for (int d = 0; d < spec->ndim; d++) {
        char text[32];
        snprintf(text, sizeof text, d ? "x%lld" : "%lld", (long long)spec->shape[d]);
        luaL_addstring(&buffer, text);
    }
    luaL_pushresult(&buffer);
}

/* tape([t]): {{number, op, where, kept_bytes, outputs = {"f32 2x3"}}, ...}, newest first. */
static int tape(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = lua_isnoneornil(L, 1) ? NULL : xtbind_check_tensor(L, 1);
    struct records r = {.list = NULL};
    xtbind_check(L, xt_tape_walk(b->ctx, t, note_record, &r));
    r.room = r.n;
    r.n = 0;
    r.list = lua_newuserdatauv(L, (size_t)(r.room ? r.room : 1) * sizeof *r.list, 0);
    xtbind_check(L, xt_tape_walk(b->ctx, t, note_record, &r));
    lua_createtable(L, r.room, 0);
    for (int i = 0; i < r.room && i < r.n; i++) {
        const struct xt_record_info *info = &r.list[i];
        lua_createtable(L, 0, 5);
        lua_pushinteger(L, info->number);
        lua_setfield(L, -2, "number");
        lua_pushstring(L, info->op->name);
        lua_setfield(L, -2, "op");
        xtbind_push_where(L, info->where);
        lua_setfield(L, -2, "where");
        lua_pushinteger(L, (lua_Integer)info->kept_bytes);
        lua_setfield(L, -2, "kept_bytes");
        lua_createtable(L, info->n_outputs, 0);
        for (int k = 0; k < info->n_outputs && k < 4; k++) {
            push_spec(L, &info->outputs[k]);
            lua_rawseti(L, -2, k + 1);
        }
        lua_setfield(L, -2, "outputs");
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* maker(t): the name of the op that made t and the line where; nothing for a leaf or a value. */
static int maker(lua_State *L) {
    xtbind_carried(L);
    struct xt_record_info info;
    if (!xt_record_of(xtbind_check_tensor(L, 1), &info)) return 0;
    lua_pushstring(L, info.op->name);
    xtbind_push_where(L, info.where);
    return 2;
}

void xtbind_open_autograd(lua_State *L, struct xtbind *b) {
    static const luaL_Reg public[] = {{"grad", grad},
                                      {"no_grad", no_grad},
                                      {"checkpoint", checkpoint},
                                      {"compute_copy_peek", compute_copy_peek},
                                      {"compute_copy_fresh", compute_copy_fresh},
                                      {NULL, NULL}};
    static const luaL_Reg private[] = {{"is_recording", is_recording},
                                       {"quietly", quietly},
                                       {"set_grad", set_grad},
                                       {"tape", tape},
                                       {"maker", maker},
                                       {NULL, NULL}};
    xtbind_functions(L, b, public, private);
}
