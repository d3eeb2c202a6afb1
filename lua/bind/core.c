/*
 * core.c: what concerns the script itself: Ctrl-C, the line that runs, the embedded library.
 */
#include <string.h>

#include "bind.h"

/* shielded(fn, ...): Ctrl-C waits until fn has returned: for what must not stop half-way. */
static int shielded(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    b->shields++;
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    b->shields--;
    return status == LUA_OK ? lua_gettop(L) : lua_error(L);
}

static int interrupted(lua_State *L) {
    xtbind_polled = 1;
    lua_pushboolean(L, xtbind_interrupt != 0);
    return 1;
}

/* polling(on): whether the script asks xt.interrupted by itself, and is not stopped where it is. */
static int polling(lua_State *L) {
    xtbind_polled = lua_toboolean(L, 1);
    return 0;
}

/* here(): "FILE:LINE" of the user's code that is running, as records and errors name it. */
static int here(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_where where;
    xtbind_locate(b, &where);
    xtbind_push_where(L, where);
    return 1;
}

/* source(module): the text of an embedded file, or nil. */
static int source(lua_State *L) {
    const char *name = luaL_checkstring(L, 1);
    for (const struct xt_embedded *file = xt_embedded_files; file->name; file++)
        if (strcmp(file->name, name) == 0) {
            lua_pushlstring(L, file->text, file->bytes);
            return 1;
        }
    return 0;
}

/* modules(): the names of the embedded files. */
static int modules(lua_State *L) {
    int n = 0;
    lua_newtable(L);
    for (const struct xt_embedded *file = xt_embedded_files; file->name; file++) {
        lua_pushstring(L, file->name);
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

/* fail(message): an error at the user's line, for the library's Lua files. */
static int fail(lua_State *L) {
    return xtbind_error(L, "%s", luaL_checkstring(L, 1));
}

void xtbind_open_core(lua_State *L, struct xtbind *b) {
    static const luaL_Reg public[] = {{"interrupted", interrupted}, {NULL, NULL}};
    static const luaL_Reg private[] = {
        {"shielded", shielded}, {"polling", polling}, {"here", here}, {"fail", fail},
        {"source", source},     {"modules", modules}, {NULL, NULL}};
    xtbind_functions(L, b, public, private);
    lua_pushliteral(L, XT_VERSION);
    lua_setfield(L, -2, "version");
}
