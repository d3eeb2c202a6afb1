/*
 * state.c: what one Lua state owns: the context, its hooks, the collector's policy, the embedded
 * library.
 *
 * The context outlives the state's own anchor: finalisers run in any order when a state closes, so
 * the last of the anchor and the tensors frees it.
 */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "bind.h"

volatile sig_atomic_t xtbind_interrupt;
volatile sig_atomic_t xtbind_polled;
volatile sig_atomic_t xtbind_stop;

/* Their addresses are keys in the registry. */
static const char anchor_key = 0, library_key = 1;

#define COLLECT_BYTES ((size_t)1 << 20)

struct xtbind *xtbind_of(lua_State *L) {
    lua_rawgetp(L, LUA_REGISTRYINDEX, &anchor_key);
    struct xtbind **anchor = lua_touserdata(L, -1);
    lua_pop(L, 1);
    if (!anchor || !*anchor) luaL_error(L, "xtrain is not open in this state");
    return *anchor;
}

struct xt_ctx *xtbind_ctx(lua_State *L) {
    struct xtbind *b = xtbind_of(L);
    b->L = L;
    return b->ctx;
}

void xtbind_unref(struct xtbind *b) {
    if (--b->refs) return;
    xt_ctx_free(b->ctx);
    free(b);
}

static int close_anchor(lua_State *L) {
    struct xtbind **anchor = lua_touserdata(L, 1);
    if (*anchor) {
        (*anchor)->main = (*anchor)->L = NULL; /* the hooks must not touch a closing state */
        xtbind_unref(*anchor);
    }
    *anchor = NULL;
    return 0;
}

/* ---- where in the user's code ---------------------------------------------------------------- */

static bool is_library(const char *source) {
    return strncmp(source, "=xtrain.", 8) == 0 || strncmp(source, "@xtrain/", 8) == 0;
}

/* The innermost Lua function with a line that is not the library's; failing that, the library's. */
static bool find_line(lua_State *L, lua_Debug *ar) {
    lua_Debug at;
    bool found = false;
    /* Level 0 is the function of C that asks. */
    for (int level = 1; lua_getstack(L, level, &at); level++) {
        lua_getinfo(L, "Sl", &at);
        if (at.currentline <= 0) continue;
        if (!found || !is_library(at.source)) *ar = at;
        found = true;
        if (!is_library(at.source)) break;
    }
    return found;
}

static const char *file_of(const lua_Debug *ar) {
    return *ar->source == '@' || *ar->source == '=' ? ar->source + 1 : ar->short_src;
}

static void locate(void *user, struct xt_ctx *ctx, struct xt_where *out) {
    (void)ctx;
    xtbind_locate(user, out);
}

void xtbind_locate(struct xtbind *b, struct xt_where *out) {
    lua_Debug ar;
    *out = (struct xt_where){NULL, 0};
    if (!b->L || !find_line(b->L, &ar)) return;
    out->file = xt_intern(b->ctx, file_of(&ar));
    out->line = out->file ? ar.currentline : 0;
}

void xtbind_push_where(lua_State *L, struct xt_where where) {
    if (where.file)
        lua_pushfstring(L, "%s:%d", where.file, where.line);
    else
        lua_pushliteral(L, "?");
}

int xtbind_error(lua_State *L, const char *format, ...) {
    lua_Debug ar;
    if (find_line(L, &ar))
        lua_pushfstring(L, "%s:%d: ", file_of(&ar), ar.currentline);
    else
        lua_pushliteral(L, "");
    va_list values;
    va_start(values, format);
    lua_pushvfstring(L, format, values);
    va_end(values);
    lua_concat(L, 2);
    lua_error(L);
    abort(); /* not reached: lua_error does not return */
}

void xtbind_check(lua_State *L, enum xt_status status) {
    if (status != XT_OK) xtbind_error(L, "%s", xt_error(xtbind_of(L)->ctx));
}

int xtbind_nil(lua_State *L, const char *who) {
    lua_pushnil(L);
    const char *sentence = xt_error(xtbind_of(L)->ctx);
    if (who)
        lua_pushfstring(L, "%s: %s", who, sentence);
    else
        lua_pushstring(L, sentence);
    return 2;
}

/* ---- collection ------------------------------------------------------------------------------ */

static void count_bytes(const struct xtbind *b, size_t *made, size_t *live) {
    *made = *live = 0;
    for (int d = 0; d < XT_DEVICE_COUNT; d++) {
        struct xt_memory m;
        xt_memory(b->ctx, (enum xt_device)d, &m);
        *made += m.made_bytes;
        *live += m.live_bytes;
    }
}

void xtbind_collect(struct xtbind *b, bool all) {
    size_t made, live;
    b->unchecked_bytes = 0;
    count_bytes(b, &made, &live);
    size_t since = made - b->made_bytes;
    if (!all && since <= (live / 32 > COLLECT_BYTES ? live / 32 : COLLECT_BYTES)) return;
    if (b->collecting || !b->main) return;
    b->collecting = true;
    lua_gc(b->main, LUA_GCCOLLECT);
    b->collecting = false;
    b->made_bytes = made;
}

/* A full collection takes a tenth of a millisecond: not worth it for a few kilobytes. */
void xtbind_collect_soon(struct xtbind *b) {
    size_t made, live;
    count_bytes(b, &made, &live);
    if (made - b->made_bytes > COLLECT_BYTES) xtbind_collect(b, true);
}

static void collect(void *user) {
    xtbind_collect(user, true);
}

bool xtbind_must_finish(const struct xtbind *b, int pressed) {
    return b->shields || (b->walks && pressed < 2);
}

/* An op fails once for each Ctrl-C: what was running ends, and its caller may go on. */
static bool interrupted(void *user) {
    const struct xtbind *b = user;
    if (!xtbind_stop || xtbind_must_finish(b, xtbind_stop)) return false;
    xtbind_stop = 0;
    return true;
}

/* ---- the embedded library -------------------------------------------------------------------- */

static void load_embedded(lua_State *L, const struct xt_embedded *file) {
    lua_pushfstring(L, "=%s", file->name);
    int status = luaL_loadbufferx(L, file->text, file->bytes, lua_tostring(L, -1), "t");
    lua_remove(L, -2);
    if (status != LUA_OK) lua_error(L);
}

/* A loader for package.preload: upvalue 1 is the file. */
static int require_embedded(lua_State *L) {
    load_embedded(L, lua_touserdata(L, lua_upvalueindex(1)));
    lua_pushvalue(L, 1);
    lua_call(L, 1, 1);
    return 1;
}

static void preload_library(lua_State *L) {
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
    for (const struct xt_embedded *file = xt_embedded_files; file->name; file++) {
        lua_pushlightuserdata(L, (void *)(uintptr_t)file);
        lua_pushcclosure(L, require_embedded, 1);
        lua_setfield(L, -2, file->name);
    }
    static const luaL_Reg parts[] = {
        {"json", xtbind_json}, {"safetensors", xtbind_safetensors}, {"data", xtbind_data},
        {"file", xtbind_file}, {"tokenizer", xtbind_tokenizer},     {NULL, NULL}};
    for (const luaL_Reg *part = parts; part->name; part++) {
        lua_pushfstring(L, "xtrain.core.%s", part->name);
        lua_pushcfunction(L, part->func);
        lua_settable(L, -3);
    }
    lua_pop(L, 1);
}

void xtbind_functions(lua_State *L, struct xtbind *b, const luaL_Reg *public,
                      const luaL_Reg *private) {
    if (public) {
        lua_pushlightuserdata(L, b);
        luaL_setfuncs(L, public, 1);
    }
    if (private) {
        lua_getfield(L, -1, "core");
        lua_pushlightuserdata(L, b);
        luaL_setfuncs(L, private, 1);
        lua_pop(L, 1);
    }
}

/* ---- opening --------------------------------------------------------------------------------- */

static struct xtbind *new_anchor(lua_State *L) {
    struct xtbind **anchor = lua_newuserdatauv(L, sizeof *anchor, 0);
    *anchor = NULL;
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, close_anchor);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &anchor_key);
    struct xtbind *b = calloc(1, sizeof *b);
    struct xt_ctx *ctx = b ? xt_ctx_new() : NULL;
    if (!ctx) {
        free(b);
        luaL_error(L, "xtrain: out of memory");
        return NULL;
    }
    b->ctx = ctx;
    b->refs = 1;
    b->L = L;
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    b->main = lua_tothread(L, -1);
    lua_pop(L, 1);
    *anchor = b;
    xt_ctx_hooks(ctx, &(struct xt_hooks){
                          .user = b,
                          .locate = locate,
                          .collect = collect,
                          .interrupted = interrupted,
                      });
    return b;
}

/* XT_DEVICE in the environment is where tensors are made from the start. */
static void default_device(lua_State *L, struct xtbind *b) {
    const char *name = getenv("XT_DEVICE");
    if (!name || !*name) return;
    lua_pushstring(L, name);
    b->device = xtbind_check_device(L, lua_gettop(L), "XT_DEVICE");
    xt_set_device(b->ctx, b->device);
    lua_pop(L, 1);
}

int luaopen_xtrain(lua_State *L) {
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &library_key) == LUA_TTABLE) return 1;
    lua_pop(L, 1);
    struct xtbind *b = new_anchor(L);
    /* Incremental: a userdata that lives through two young collections stays for good. Eager, since
       a tensor is more than Lua sees: with the defaults (200, 100) a loop of small ops makes
       garbage faster than it is swept, and the caches miss. */
    lua_gc(L, LUA_GCINC, 125, 400, 13);
    preload_library(L);
    lua_createtable(L, 0, 200); /* xt, which init.lua completes */
    int library = lua_gettop(L);
    lua_createtable(L, 0, 64);
    lua_setfield(L, library, "core"); /* what only the library's own files call */
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_pushvalue(L, library);
    lua_setfield(L, -2, "xtrain"); /* so that the library's files may require it while it opens */
    lua_pop(L, 1);
    xtbind_open_tensor(L, b);
    xtbind_open_op(L, b);
    xtbind_open_machine(L, b);
    xtbind_open_memory(L, b);
    xtbind_open_constructor(L, b);
    xtbind_open_autograd(L, b);
    xtbind_open_seed(L, b);
    xtbind_open_core(L, b);
    xtbind_open_observe(L, b);
    xtbind_open_choice(L, b);
    xtbind_open_graph(L, b);
    for (const struct xt_embedded *file = xt_embedded_files; file->name; file++) {
        if (strcmp(file->name, "xtrain.init") != 0) continue;
        load_embedded(L, file);
        lua_pushvalue(L, library);
        lua_call(L, 1, 0);
    }
    lua_settop(L, library);
    lua_pushvalue(L, library);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &library_key);
    default_device(L, b);
    return 1;
}
