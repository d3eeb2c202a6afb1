/*
 * value.c: Lua values as the binding reads them: what one is called in a sentence, exact integers,
 * names that were nearly right.
 */
#include <string.h>

#include "bind.h"

const char *xtbind_kind(lua_State *L, int index) {
    index = lua_absindex(L, index);
    char text[128];
    switch (lua_type(L, index)) {
    case LUA_TNONE:
    case LUA_TNIL: return lua_pushliteral(L, "missing");
    case LUA_TBOOLEAN: return lua_toboolean(L, index) ? "true" : "false";
    case LUA_TNUMBER: return lua_pushfstring(L, "the number %s", luaL_tolstring(L, index, NULL));
    case LUA_TSTRING: return lua_pushfstring(L, "the string '%s'", lua_tostring(L, index));
    default: break;
    }
    struct xt_tensor *t = xtbind_to_tensor(L, index);
    if (t) return lua_pushstring(L, xt_describe(t, text, sizeof text));
    return lua_pushfstring(L, "a %s", luaL_typename(L, index));
}

int xtbind_distance(const char *a, const char *b) {
    enum { MOST = 64 };
    int row[MOST + 1];
    int n = (int)strnlen(b, MOST);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; *a && i <= MOST; a++, i++) {
        int corner = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int change = corner + (*a != b[j - 1]);
            corner = row[j];
            int step = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            row[j] = step < change ? step : change;
        }
    }
    return row[n];
}

const char *xtbind_nearest(lua_State *L, const char *given, const char *const *names, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (xtbind_distance(given, names[i]) < xtbind_distance(given, names[best])) best = i;
    if (n == 0) return "none";
    lua_pushfstring(L, "'%s'", names[best]);
    for (int i = 0; i < n; i++) {
        if (i == best) continue;
        lua_pushfstring(L, ", '%s'", names[i]);
        lua_concat(L, 2);
    }
    return lua_tostring(L, -1);
}

const char *xtbind_near(lua_State *L, const char *given, int table) {
    const char *best = NULL;
    int least = strlen(given) < 4 ? 2 : 3;
    lua_pushnil(L);
    while (lua_next(L, table)) {
        lua_pop(L, 1);
        const char *name = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : NULL;
        int d = name ? xtbind_distance(given, name) : least;
        /* Of equally near ones the first by byte, whatever the order of the table. */
        if (d < least || (best && d == least && strcmp(name, best) < 0)) {
            least = d;
            best = name;
        }
    }
    return best;
}

bool xtbind_to_int(lua_State *L, int index, int64_t *out) {
    if (lua_type(L, index) != LUA_TNUMBER) return false;
    int exact = 0;
    lua_Integer i = lua_tointegerx(L, index, &exact);
    if (exact) *out = i;
    return exact != 0;
}

uint64_t xtbind_check_seed(lua_State *L, int index, const char *who, const char *what) {
    int64_t seed = 0;
    if (xtbind_to_int(L, index, &seed)) return (uint64_t)seed;
    if (lua_type(L, index) == LUA_TNUMBER)
        xtbind_error(L,
                     "%s: %s is %s, which is no exact 64-bit integer: write large seeds in hex, "
                     "e.g. 0x8000000000000005",
                     who, what, xtbind_kind(L, index));
    xtbind_error(L, "%s: %s is %s, wanted an integer", who, what, xtbind_kind(L, index));
}
