/* safetensors.c: require "xtrain.core.safetensors": load and save; runtime/io/safetensors.h. */
#include <stdlib.h>
#include <string.h>

#include "bind.h"
#include "io/safetensors.h"

static int close_file(lua_State *L) {
    struct xt_safetensors **box = lua_touserdata(L, 1);
    xt_safetensors_close(*box);
    *box = NULL;
    return 0;
}

static void push_box(lua_State *L, struct xt_safetensors ***out) {
    struct xt_safetensors **box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = NULL;
    if (luaL_newmetatable(L, "xtrain.safetensors")) {
        lua_pushcfunction(L, close_file);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    *out = box;
}

/* Whether names (a sequence at index, or nil: all) holds the string. */
static bool wanted(lua_State *L, int index, const char *name) {
    if (lua_isnoneornil(L, index)) return true;
    bool found = false;
    for (lua_Integer i = 1; i <= (lua_Integer)lua_rawlen(L, index) && !found; i++) {
        lua_rawgeti(L, index, i);
        const char *text = lua_tostring(L, -1);
        found = text && strcmp(text, name) == 0;
        lua_pop(L, 1);
    }
    return found;
}

/* load(path [, names]) -> {name = tensor}, {key = value}; or nil and a message. */
static int load(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    struct xtbind *b = xtbind_of(L);
    struct xt_ctx *ctx = xtbind_ctx(L);
    struct xt_safetensors **file;
    if (!lua_isnoneornil(L, 2)) luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 2);
    push_box(L, &file);
    if (xt_safetensors_open(ctx, path, file) != XT_OK) return xtbind_nil(L, NULL);
    lua_newtable(L);
    for (int64_t i = 0; i < xt_safetensors_count(*file); i++) {
        const struct xt_safetensors_entry *e = xt_safetensors_at(*file, i);
        if (!wanted(L, 2, e->name)) continue;
        struct xt_tensor **box = xtbind_new_box(L), *t;
        if (xt_tensor_from_host(ctx, &e->spec, b->device, e->data, e->bytes, &t) != XT_OK)
            return xtbind_nil(L, path);
        xtbind_fill(b, box, t);
        lua_setfield(L, -2, e->name);
    }
    lua_newtable(L);
    const char *key, *value;
    for (int64_t i = 0; xt_safetensors_metadata(*file, i, &key, &value); i++) {
        lua_pushstring(L, value);
        lua_setfield(L, -2, key);
    }
    xt_safetensors_close(*file);
    *file = NULL;
    return 2;
}

/* list(path) -> {{name =, dtype =, shape = {}, bytes =} ...}, metadata: the header alone. */
static int list(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    struct xt_safetensors **file;
    lua_settop(L, 1);
    push_box(L, &file);
    if (xt_safetensors_open(xtbind_ctx(L), path, file) != XT_OK) return xtbind_nil(L, NULL);
    lua_newtable(L);
    for (int64_t i = 0; i < xt_safetensors_count(*file); i++) {
        const struct xt_safetensors_entry *e = xt_safetensors_at(*file, i);
        lua_createtable(L, 0, 4);
        lua_pushstring(L, e->name);
        lua_setfield(L, -2, "name");
        lua_pushstring(L, xt_dtype_name(e->spec.dtype));
        lua_setfield(L, -2, "dtype");
        lua_pushinteger(L, (lua_Integer)e->bytes);
        lua_setfield(L, -2, "bytes");
        lua_createtable(L, e->spec.ndim, 0);
        for (int d = 0; d < e->spec.ndim; d++) {
            lua_pushinteger(L, e->spec.shape[d]);
            lua_rawseti(L, -2, d + 1);
        }
        lua_setfield(L, -2, "shape");
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* Counts a table's pairs and checks their kinds: string keys, and values tensors or strings. */
static int64_t count_pairs(lua_State *L, int index, const char *what, bool tensors) {
    int64_t n = 0;
    for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
        bool good = tensors ? xtbind_to_tensor(L, -1) != NULL : lua_type(L, -1) == LUA_TSTRING;
        if (lua_type(L, -2) != LUA_TSTRING || !good)
            xtbind_error(L, "safetensors.save: %s maps names to %s, given %s = %s", what,
                         tensors ? "tensors" : "strings", luaL_typename(L, -2),
                         xtbind_kind(L, lua_gettop(L)));
        n++;
    }
    return n;
}

/* save(path, {name = tensor} [, {key = text}]) -> true, or nil and a message. */
static int save(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    if (lua_isnoneornil(L, 3)) {
        lua_settop(L, 2);
        lua_newtable(L);
    }
    luaL_checktype(L, 3, LUA_TTABLE);
    lua_settop(L, 3);
    int64_t n = count_pairs(L, 2, "the table of tensors", true);
    int64_t m = count_pairs(L, 3, "the metadata", false);
    /* Names stay alive in the tables; the arrays live in one userdata. */
    const char **names = lua_newuserdatauv(
        L, (size_t)n * 2 * sizeof(void *) + (size_t)m * 2 * sizeof(void *) + sizeof(void *), 0);
    struct xt_tensor **tensors = (struct xt_tensor **)(names + n);
    const char **keys = (const char **)(tensors + n), **values = keys + m;
    int64_t i = 0;
    for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) {
        names[i] = lua_tostring(L, -2);
        tensors[i++] = xtbind_to_tensor(L, -1);
    }
    i = 0;
    for (lua_pushnil(L); lua_next(L, 3); lua_pop(L, 1)) {
        keys[i] = lua_tostring(L, -2);
        values[i++] = lua_tostring(L, -1);
    }
    struct xt_ctx *ctx = xtbind_ctx(L);
    if (xt_safetensors_write(ctx, path, names, tensors, n, keys, values, m) != XT_OK)
        return xtbind_nil(L, NULL);
    lua_pushboolean(L, 1);
    return 1;
}

int xtbind_safetensors(lua_State *L) {
    static const luaL_Reg functions[] = {
        {"load", load}, {"list", list}, {"save", save}, {NULL, NULL}};
    luaL_newlib(L, functions);
    return 1;
}
