/* data.c: require "xtrain.core.data": token shards as batches; runtime/io/shards.h. */
#include <string.h>

#include "bind.h"
#include "io/shards.h"

#define TYPE "xtrain.shards"

static struct xt_shards *check(lua_State *L) {
    struct xt_shards **box = luaL_checkudata(L, 1, TYPE);
    if (!*box) xtbind_error(L, "data: these shards are closed");
    return *box;
}

static int close_shards(lua_State *L) {
    struct xt_shards **box = luaL_checkudata(L, 1, TYPE);
    xt_shards_close(*box);
    *box = NULL;
    return 0;
}

/* open({path, ...}) -> shards, or nil and a message. */
static int open_shards(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    int n = (int)lua_rawlen(L, 1);
    const char **paths = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *paths, 0);
    for (int i = 0; i < n; i++) {
        if (lua_rawgeti(L, 1, i + 1) != LUA_TSTRING)
            xtbind_error(L, "data: file %d is %s, wanted a path", i + 1,
                         xtbind_kind(L, lua_gettop(L)));
        paths[i] = lua_tostring(L, -1);
        lua_pop(L, 1);
    }
    struct xt_shards **box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = NULL;
    luaL_setmetatable(L, TYPE);
    if (xt_shards_open(xtbind_ctx(L), paths, n, box) != XT_OK) return xtbind_nil(L, NULL);
    return 1;
}

/* shards:count() -> ids in all files. */
static int count(lua_State *L) {
    lua_pushinteger(L, xt_shards_count(check(L)));
    return 1;
}

/* shards:windows({start, ...}, seq) -> ids, labels: i32 (rows, seq); labels stand one further.
   Starts count from 0. */
static int windows(lua_State *L) {
    struct xt_shards *shards = check(L);
    struct xtbind *b = xtbind_of(L);
    struct xt_ctx *ctx = xtbind_ctx(L);
    luaL_checktype(L, 2, LUA_TTABLE);
    int64_t rows = (int64_t)lua_rawlen(L, 2), seq = luaL_checkinteger(L, 3);
    int64_t total = xt_shards_count(shards);
    if (seq < 1) xtbind_error(L, "data: seq is %d, wanted at least 1", (int)seq);
    for (int64_t r = 0; r < rows; r++) {
        lua_rawgeti(L, 2, r + 1);
        lua_Integer start = lua_tointeger(L, -1);
        if (!lua_isinteger(L, -1) || start < 0 || start + seq + 1 > total)
            xtbind_error(L, "data: window %d starts at %s, wanted an integer from 0 to %I",
                         (int)r + 1, luaL_tolstring(L, -1, NULL), (lua_Integer)(total - seq - 1));
        lua_pop(L, 1);
    }
    int64_t row = seq + 1;
    int32_t *both = lua_newuserdatauv(L, (size_t)(rows * (row + 2 * seq)) * sizeof *both, 0);
    int32_t *ids = both + rows * row, *labels = ids + rows * seq;
    for (int64_t r = 0; r < rows; r++) {
        lua_rawgeti(L, 2, r + 1);
        xt_shards_read(shards, lua_tointeger(L, -1), row, both + r * row);
        lua_pop(L, 1);
        memcpy(ids + r * seq, both + r * row, (size_t)seq * sizeof *ids);
        memcpy(labels + r * seq, both + r * row + 1, (size_t)seq * sizeof *ids);
    }
    struct xt_spec spec = {.dtype = XT_I32, .ndim = 2, .shape = {rows, seq}};
    for (int k = 0; k < 2; k++) {
        struct xt_tensor **box = xtbind_new_box(L), *t;
        xtbind_check(L, xt_tensor_from_host(ctx, &spec, b->device, k ? labels : ids,
                                            (size_t)(rows * seq) * sizeof *ids, &t));
        xtbind_fill(b, box, t);
    }
    return 2;
}

/* shards:read(first, n) -> i32 (n): ids from position `first`, counted from 0. */
static int read_ids(lua_State *L) {
    struct xt_shards *shards = check(L);
    struct xtbind *b = xtbind_of(L);
    int64_t first = luaL_checkinteger(L, 2), n = luaL_checkinteger(L, 3);
    int64_t total = xt_shards_count(shards);
    if (first < 0 || n < 0 || n > total - first)
        xtbind_error(L, "data: ids %I to %I were asked for, there are %I", (lua_Integer)first,
                     (lua_Integer)(first + n - 1), (lua_Integer)total);
    int32_t *ids = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *ids, 0);
    xt_shards_read(shards, first, n, ids);
    struct xt_spec spec = {.dtype = XT_I32, .ndim = 1, .shape = {n}};
    struct xt_tensor **box = xtbind_new_box(L), *t;
    xtbind_check(
        L, xt_tensor_from_host(xtbind_ctx(L), &spec, b->device, ids, (size_t)n * sizeof *ids, &t));
    xtbind_fill(b, box, t);
    return 1;
}

/* write(path, ids, width) -> true, or nil and a message. ids: a string of little-endian numbers of
   width 2 or 4 bytes. */
static int write_shard(lua_State *L) {
    size_t bytes;
    const char *path = luaL_checkstring(L, 1), *ids = luaL_checklstring(L, 2, &bytes);
    int width = (int)luaL_checkinteger(L, 3);
    if ((width != 2 && width != 4) || bytes % (size_t)width)
        xtbind_error(L, "data: %d bytes of ids of width %d, wanted width 2 or 4 and whole ids",
                     (int)bytes, width);
    if (xt_shard_write(xtbind_ctx(L), path, width, ids, (int64_t)(bytes / (size_t)width)) != XT_OK)
        return xtbind_nil(L, NULL);
    lua_pushboolean(L, 1);
    return 1;
}

int xtbind_data(lua_State *L) {
    static const luaL_Reg methods[] = {{"count", count},
                                       {"windows", windows},
                                       {"read", read_ids},
                                       {"close", close_shards},
                                       {NULL, NULL}};
    static const luaL_Reg functions[] = {
        {"open", open_shards}, {"write", write_shard}, {NULL, NULL}};
    luaL_newmetatable(L, TYPE);
    luaL_newlib(L, methods);
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, close_shards);
    lua_setfield(L, -2, "__gc");
    lua_pop(L, 1);
    luaL_newlib(L, functions);
    return 1;
}
