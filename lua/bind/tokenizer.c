/*
 * tokenizer.c: require "xtrain.core.tokenizer": runtime/io/tokenizer.h; lua/xtrain/tokenizer.lua is
 * what the user sees.
 *
 * The vocabulary stays in C: a tokenizer is one userdata, whatever its size.
 */
#include <string.h>

#include "bind.h"
#include "io/tokenizer.h"

#define TYPE "xtrain.tokenizer"

static struct xt_tokenizer *check(lua_State *L) {
    struct xt_tokenizer **box = luaL_checkudata(L, 1, TYPE);
    if (!*box) xtbind_error(L, "tokenizer: this one was never loaded");
    return *box;
}

static int free_tokenizer(lua_State *L) {
    struct xt_tokenizer **box = luaL_checkudata(L, 1, TYPE);
    xt_tokenizer_free(*box);
    *box = NULL;
    return 0;
}

static struct xt_tokenizer **push_box(lua_State *L) {
    struct xt_tokenizer **box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = NULL;
    luaL_setmetatable(L, TYPE);
    return box;
}

/* Raises the sentence when the caller asked for something wrong, else returns nil and it. */
static int refuse(lua_State *L, enum xt_status status, const char *who) {
    struct xt_ctx *ctx = xtbind_ctx(L);
    if (status == XT_ARGUMENT) xtbind_check(L, xt_fail_in(ctx, status, who));
    return xtbind_nil(L, who);
}

/* A list of strings at index, as a block that lives as long as it is on the stack. */
static const char *const *strings(lua_State *L, int index, const char *who, int *n) {
    luaL_checktype(L, index, LUA_TTABLE);
    *n = (int)lua_rawlen(L, index);
    const char **list = lua_newuserdatauv(L, (size_t)(*n + 1) * sizeof *list, 0);
    for (int i = 0; i < *n; i++) {
        if (lua_rawgeti(L, index, i + 1) != LUA_TSTRING)
            xtbind_error(L, "%s: entry %d is %s, wanted a string", who, i + 1,
                         xtbind_kind(L, lua_gettop(L)));
        list[i] = lua_tostring(L, -1); /* the table keeps it */
        lua_pop(L, 1);
    }
    return list;
}

/* ---- making one ----------------------------------------------------------------------------- */

/* load(path [, pattern]) -> tokenizer, or nil and a message. */
static int load(lua_State *L) {
    const char *path = luaL_checkstring(L, 1), *pattern = luaL_optstring(L, 2, NULL);
    struct xt_tokenizer **box = push_box(L);
    enum xt_status status = xt_tokenizer_load(xtbind_ctx(L), path, pattern, box);
    return status == XT_OK ? 1 : refuse(L, status, "tokenizer.load");
}

/* train(files, vocab, pattern, special) -> tokenizer, or nil and a message. */
static int train(lua_State *L) {
    struct xt_tokenizer_training how = {.vocab = luaL_checkinteger(L, 2),
                                        .pattern = luaL_checkstring(L, 3)};
    lua_settop(L, 4);
    how.files = strings(L, 1, "tokenizer.train: files", &how.n_files);
    how.special = strings(L, 4, "tokenizer.train: special", &how.n_special);
    struct xt_tokenizer **box = push_box(L);
    enum xt_status status = xt_tokenizer_train(xtbind_ctx(L), &how, box);
    return status == XT_OK ? 1 : refuse(L, status, "tokenizer.train");
}

/* bytes() -> tokenizer. */
static int bytes(lua_State *L) {
    struct xt_tokenizer **box = push_box(L);
    xtbind_check(L, xt_tokenizer_bytes(xtbind_ctx(L), box));
    return 1;
}

/* ---- text to ids and back ------------------------------------------------------------------- */

/* {special = boolean} at index 3, or nothing. */
static bool check_special(lua_State *L, const char *who) {
    if (lua_isnoneornil(L, 3)) return false;
    if (!lua_istable(L, 3))
        xtbind_error(L, "%s: argument 2 is %s, wanted a table of options", who, xtbind_kind(L, 3));
    for (lua_pushnil(L); lua_next(L, 3); lua_pop(L, 1)) {
        const char *name = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "?";
        if (strcmp(name, "special") != 0)
            xtbind_error(L, "%s: unknown option '%s'; the options are special", who, name);
        if (!lua_isboolean(L, -1))
            xtbind_error(L, "%s: special is %s, wanted a boolean", who, xtbind_kind(L, -1));
    }
    lua_getfield(L, 3, "special");
    bool special = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return special;
}

/* The ids are lent by the tokenizer: nothing is owned. */
static size_t encode_argument(lua_State *L, const char *who, const int32_t **ids) {
    struct xt_tokenizer *tok = check(L);
    size_t n, n_ids;
    if (lua_type(L, 2) != LUA_TSTRING)
        xtbind_error(L, "%s: argument 1 is %s, wanted a string", who, xtbind_kind(L, 2));
    const char *text = lua_tolstring(L, 2, &n);
    bool special = check_special(L, who);
    struct xt_ctx *ctx = xtbind_ctx(L);
    enum xt_status status = xt_tokenizer_encode(ctx, tok, text, n, special, ids, &n_ids);
    if (status != XT_OK) xtbind_check(L, xt_fail_in(ctx, status, who));
    return n_ids;
}

/* tok:encode(s [, {special = false}]) -> {id, ...}. */
static int encode(lua_State *L) {
    const int32_t *ids;
    size_t n = encode_argument(L, "tokenizer.encode", &ids);
    if (n > INT32_MAX) xtbind_error(L, "tokenizer.encode: too much for a table: use encode_bytes");
    lua_createtable(L, (int)n, 0);
    for (size_t i = 0; i < n; i++) {
        lua_pushinteger(L, ids[i]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* tok:encode_bytes(s [, {special = false}]) -> string, width: the ids as little-endian numbers of
   width bytes, as a token shard holds them: 2 when the vocabulary has at most 65536 ids, else 4. */
static int encode_bytes(lua_State *L) {
    const int32_t *ids;
    size_t n = encode_argument(L, "tokenizer.encode_bytes", &ids);
    size_t width = xt_tokenizer_vocab_size(check(L)) <= 65536 ? 2 : 4;
    luaL_Buffer buffer;
    unsigned char *out = (unsigned char *)luaL_buffinitsize(L, &buffer, n * width);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < width; k++)
            out[i * width + k] = (unsigned char)((uint32_t)ids[i] >> 8 * k);
    luaL_pushresultsize(&buffer, n * width);
    lua_pushinteger(L, (lua_Integer)width);
    return 2;
}

/* tok:decode(ids) -> string; ids is a list, or one id. */
static int decode(lua_State *L) {
    static const char who[] = "tokenizer.decode";
    struct xt_tokenizer *tok = check(L);
    int64_t one;
    int64_t *ids = &one;
    size_t n = 1, n_text;
    const char *text;
    if (lua_istable(L, 2)) {
        n = (size_t)lua_rawlen(L, 2);
        ids = lua_newuserdatauv(L, (n + 1) * sizeof *ids, 0);
        for (size_t i = 0; i < n; i++) {
            lua_rawgeti(L, 2, (lua_Integer)i + 1);
            if (!xtbind_to_int(L, -1, &ids[i]))
                xtbind_error(L, "%s: id %d is %s, wanted an integer", who, (int)i + 1,
                             xtbind_kind(L, lua_gettop(L)));
            lua_pop(L, 1);
        }
    } else if (!xtbind_to_int(L, 2, &one)) {
        xtbind_error(L, "%s: argument 1 is %s, wanted a list of ids", who, xtbind_kind(L, 2));
    }
    struct xt_ctx *ctx = xtbind_ctx(L);
    enum xt_status status = xt_tokenizer_decode(ctx, tok, ids, n, &text, &n_text);
    if (status != XT_OK) xtbind_check(L, xt_fail_in(ctx, status, who));
    lua_pushlstring(L, text, n_text);
    return 1;
}

/* tok:id(s) -> the id of the token that is exactly s, control tokens first; or nil. */
static int id(lua_State *L) {
    size_t n;
    struct xt_tokenizer *tok = check(L);
    const char *text = luaL_checklstring(L, 2, &n);
    int64_t found = xt_tokenizer_find(tok, text, n);
    if (found < 0) return 0;
    lua_pushinteger(L, found);
    return 1;
}

/* tok:save(dir) -> true, or nil and a message. Writes dir/tokenizer.json. */
static int save(lua_State *L) {
    struct xt_tokenizer *tok = check(L);
    const char *dir = luaL_checkstring(L, 2);
    if (xt_tokenizer_save(xtbind_ctx(L), tok, dir) != XT_OK) return xtbind_nil(L, "tokenizer.save");
    lua_pushboolean(L, 1);
    return 1;
}

/* whole(s) -> how many bytes of s do not belong to an unfinished UTF-8 character at its end. */
static int whole(lua_State *L) {
    size_t n;
    const char *text = luaL_checklstring(L, 1, &n);
    lua_pushinteger(L, (lua_Integer)xt_utf8_whole(text, n));
    return 1;
}

/* ---- the type ------------------------------------------------------------------------------- */

/* Upvalue 1 is the table of methods. */
static int index_field(lua_State *L) {
    struct xt_tokenizer *tok = check(L);
    const char *name = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "";
    if (strcmp(name, "vocab_size") == 0) {
        lua_pushinteger(L, xt_tokenizer_vocab_size(tok));
        return 1;
    }
    lua_settop(L, 2);
    lua_rawget(L, lua_upvalueindex(1));
    return 1;
}

static int describe(lua_State *L) {
    lua_pushfstring(L, "tokenizer: %I ids", (LUAI_UACINT)xt_tokenizer_vocab_size(check(L)));
    return 1;
}

int xtbind_tokenizer(lua_State *L) {
    static const luaL_Reg functions[] = {
        {"load", load}, {"train", train}, {"bytes", bytes}, {"whole", whole}, {NULL, NULL}};
    static const luaL_Reg methods[] = {{"encode", encode}, {"encode_bytes", encode_bytes},
                                       {"decode", decode}, {"id", id},
                                       {"save", save},     {NULL, NULL}};
    luaL_newlib(L, functions);
    luaL_newmetatable(L, TYPE);
    luaL_newlib(L, methods);
    lua_pushvalue(L, -1);
    lua_setfield(L, -4, "methods");
    lua_pushcclosure(L, index_field, 1);
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, free_tokenizer);
    lua_setfield(L, -2, "__gc");
    lua_pushcfunction(L, describe);
    lua_setfield(L, -2, "__tostring");
    lua_pop(L, 1);
    return 1;
}
