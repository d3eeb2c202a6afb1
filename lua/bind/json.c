/*
 * json.c: JSON in and out: require "xtrain.core.json".
 *
 * Integers stay integers and floats floats. A decoded object remembers the order of its keys in its
 * metatable and a decoded array that it is one, so that decoding and encoding again gives the same
 * text but for white space. null is the light userdata json.null.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "bind.h"

#define MAX_DEPTH 200

static const char array_key = 0; /* its address names the metatable of arrays in the registry */

static void push_value(lua_State *L, const json_t *value);

static void push_object(lua_State *L, const json_t *object) {
    const char *key;
    json_t *value;
    int n = 0;
    lua_createtable(L, 0, (int)json_object_size(object));
    lua_createtable(L, 0, 1);
    lua_createtable(L, (int)json_object_size(object), 0);
    json_object_foreach((json_t *)(uintptr_t)object, key, value) {
        lua_pushstring(L, key);
        lua_pushvalue(L, -1);
        lua_rawseti(L, -3, ++n);
        push_value(L, value);
        lua_rawset(L, -5);
    }
    lua_setfield(L, -2, "keys");
    lua_setmetatable(L, -2);
}

static void push_value(lua_State *L, const json_t *value) {
    luaL_checkstack(L, 8, "JSON nests too deep");
    switch (json_typeof(value)) {
    case JSON_OBJECT: push_object(L, value); break;
    case JSON_ARRAY:
        lua_createtable(L, (int)json_array_size(value), 0);
        for (size_t i = 0; i < json_array_size(value); i++) {
            push_value(L, json_array_get(value, i));
            lua_rawseti(L, -2, (lua_Integer)i + 1);
        }
        lua_rawgetp(L, LUA_REGISTRYINDEX, &array_key);
        lua_setmetatable(L, -2);
        break;
    case JSON_STRING:
        lua_pushlstring(L, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER: lua_pushinteger(L, json_integer_value(value)); break;
    case JSON_REAL: lua_pushnumber(L, json_real_value(value)); break;
    case JSON_TRUE: lua_pushboolean(L, 1); break;
    case JSON_FALSE: lua_pushboolean(L, 0); break;
    default: lua_pushlightuserdata(L, NULL);
    }
}

static int free_document(lua_State *L) {
    json_t **box = lua_touserdata(L, 1);
    json_decref(*box);
    *box = NULL;
    return 0;
}

/* decode(text) -> value, or nil and a message that names line and column. */
static int decode(lua_State *L) {
    size_t bytes;
    const char *text = luaL_checklstring(L, 1, &bytes);
    json_t **box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = NULL;
    if (luaL_newmetatable(L, "xtrain.json")) {
        lua_pushcfunction(L, free_document);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    json_error_t error;
    *box = json_loadb(text, bytes, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
    if (!*box) {
        lua_pushnil(L);
        lua_pushfstring(L, "JSON, line %d, column %d: %s", error.line, error.column, error.text);
        return 2;
    }
    push_value(L, *box);
    json_decref(*box);
    *box = NULL;
    return 1;
}

/* ---- encoding -------------------------------------------------------------------------------- */

/* The text being written: in a userdata, so that an error frees it. */
struct text {
    char *data;
    size_t bytes, capacity;
    int indent; /* spaces a level; 0: one line */
};

static int free_text(lua_State *L) {
    struct text *t = lua_touserdata(L, 1);
    free(t->data);
    t->data = NULL;
    return 0;
}

static void put(lua_State *L, struct text *t, const char *data, size_t bytes) {
    if (t->bytes + bytes > t->capacity) {
        size_t capacity = 2 * (t->bytes + bytes) + 256;
        char *grown = realloc(t->data, capacity);
        if (!grown) luaL_error(L, "json.encode: out of memory");
        t->data = grown;
        t->capacity = capacity;
    }
    memcpy(t->data + t->bytes, data, bytes);
    t->bytes += bytes;
}

static void put_text(lua_State *L, struct text *t, const char *text) {
    put(L, t, text, strlen(text));
}

static void put_string(lua_State *L, struct text *t, const char *text, size_t bytes) {
    static const char *const short_escapes[128] = {
        ['"'] = "\\\"", ['\\'] = "\\\\", ['\n'] = "\\n", ['\r'] = "\\r",
        ['\t'] = "\\t", ['\b'] = "\\b",  ['\f'] = "\\f",
    };
    put_text(L, t, "\"");
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        char escape[8];
        if (c < 128 && short_escapes[c])
            put_text(L, t, short_escapes[c]);
        else if (c >= 0x20)
            put(L, t, text + i, 1);
        else {
            snprintf(escape, sizeof escape, "\\u%04x", c);
            put_text(L, t, escape);
        }
    }
    put_text(L, t, "\"");
}

/* The shortest digits that read back as the same double, and always as a float. JSON has no NaN and
   no infinity: they become null. */
static void put_float(lua_State *L, struct text *t, double x) {
    char text[40];
    if (!isfinite(x)) {
        put_text(L, t, "null");
        return;
    }
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    if (!strpbrk(text, ".e")) strcat(text, ".0");
    put_text(L, t, text);
}

static void new_line(lua_State *L, struct text *t, int depth) {
    if (!t->indent) return;
    put_text(L, t, "\n");
    for (int i = 0; i < depth * t->indent; i++) put_text(L, t, " ");
}

/* Whether the table at index is an array: it says so, or it has the keys 1 to n and no others. */
static bool is_array(lua_State *L, int index) {
    if (lua_getmetatable(L, index)) {
        lua_rawgetp(L, LUA_REGISTRYINDEX, &array_key);
        bool same = lua_rawequal(L, -1, -2);
        lua_pop(L, 2);
        if (same) return true;
    }
    lua_Integer n = (lua_Integer)lua_rawlen(L, index), seen = 0;
    if (n == 0) return false;
    for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) seen++;
    return seen == n;
}

static void put_value(lua_State *L, struct text *t, int index, int depth);

static void put_array(lua_State *L, struct text *t, int index, int depth) {
    lua_Integer n = (lua_Integer)lua_rawlen(L, index);
    put_text(L, t, "[");
    for (lua_Integer i = 1; i <= n; i++) {
        if (i > 1) put_text(L, t, t->indent ? "," : ", ");
        new_line(L, t, depth + 1);
        lua_rawgeti(L, index, i);
        put_value(L, t, lua_gettop(L), depth + 1);
        lua_pop(L, 1);
    }
    if (n) new_line(L, t, depth);
    put_text(L, t, "]");
}

/* Pushes a sequence of the object's keys: in decoded order first, the others by byte. */
static void push_keys(lua_State *L, int index) {
    lua_newtable(L);
    int keys = lua_gettop(L), n = 0, known = 0;
    if (luaL_getmetafield(L, index, "keys") == LUA_TTABLE) {
        known = lua_gettop(L);
        lua_newtable(L); /* known + 1: the set of those */
        for (lua_Integer i = 1; i <= (lua_Integer)lua_rawlen(L, known); i++) {
            lua_rawgeti(L, known, i);
            lua_pushvalue(L, -1);
            if (lua_rawget(L, index) != LUA_TNIL) {
                lua_pushvalue(L, -2);
                lua_rawseti(L, keys, ++n);
            }
            lua_pop(L, 1);
            lua_pushboolean(L, 1);
            lua_rawset(L, known + 1);
        }
    }
    int sorted_from = n + 1;
    for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            xtbind_error(L, "json.encode: an object has a key that is %s, wanted a string",
                         xtbind_kind(L, lua_gettop(L) - 1));
        int key = lua_gettop(L) - 1;
        if (known) {
            lua_pushvalue(L, key);
            bool there = lua_rawget(L, known + 1) != LUA_TNIL;
            lua_pop(L, 1);
            if (there) continue;
        }
        int at = ++n; /* insertion sort: objects are small */
        for (; at > sorted_from; at--) {
            lua_rawgeti(L, keys, at - 1);
            bool before = strcmp(lua_tostring(L, -1), lua_tostring(L, key)) < 0;
            if (before)
                lua_pop(L, 1);
            else
                lua_rawseti(L, keys, at);
            if (before) break;
        }
        lua_pushvalue(L, key);
        lua_rawseti(L, keys, at);
    }
    lua_settop(L, keys);
}

static void put_object(lua_State *L, struct text *t, int index, int depth) {
    push_keys(L, index);
    int keys = lua_gettop(L);
    lua_Integer n = (lua_Integer)lua_rawlen(L, keys);
    put_text(L, t, "{");
    for (lua_Integer i = 1; i <= n; i++) {
        size_t bytes;
        if (i > 1) put_text(L, t, t->indent ? "," : ", ");
        new_line(L, t, depth + 1);
        lua_rawgeti(L, keys, i);
        const char *key = lua_tolstring(L, -1, &bytes);
        put_string(L, t, key, bytes);
        put_text(L, t, ": ");
        lua_rawget(L, index);
        put_value(L, t, lua_gettop(L), depth + 1);
        lua_pop(L, 1);
    }
    if (n) new_line(L, t, depth);
    put_text(L, t, "}");
    lua_pop(L, 1);
}

static void put_value(lua_State *L, struct text *t, int index, int depth) {
    size_t bytes;
    const char *text;
    char digits[32];
    luaL_checkstack(L, 12, "json.encode: nested too deep");
    if (depth > MAX_DEPTH) xtbind_error(L, "json.encode: nested deeper than %d", MAX_DEPTH);
    switch (lua_type(L, index)) {
    case LUA_TNIL: put_text(L, t, "null"); break;
    case LUA_TBOOLEAN: put_text(L, t, lua_toboolean(L, index) ? "true" : "false"); break;
    case LUA_TSTRING:
        text = lua_tolstring(L, index, &bytes);
        put_string(L, t, text, bytes);
        break;
    case LUA_TNUMBER:
        if (lua_isinteger(L, index)) {
            snprintf(digits, sizeof digits, "%lld", (long long)lua_tointeger(L, index));
            put_text(L, t, digits);
        } else
            put_float(L, t, lua_tonumber(L, index));
        break;
    case LUA_TTABLE:
        if (is_array(L, index))
            put_array(L, t, index, depth);
        else
            put_object(L, t, index, depth);
        break;
    case LUA_TLIGHTUSERDATA:
        if (!lua_touserdata(L, index)) {
            put_text(L, t, "null");
            break;
        }
        /* fallthrough */
    default: xtbind_error(L, "json.encode: cannot write %s", xtbind_kind(L, index));
    }
}

/* encode(value [, indent]) -> text. A table is an array when its keys are 1 to n; {} is an object
   unless it was decoded as an array or made by json.array. */
static int encode(lua_State *L) {
    luaL_checkany(L, 1);
    int indent = (int)luaL_optinteger(L, 2, 0);
    lua_settop(L, 1);
    struct text *t = lua_newuserdatauv(L, sizeof *t, 0);
    *t = (struct text){.indent = indent};
    if (luaL_newmetatable(L, "xtrain.json.text")) {
        lua_pushcfunction(L, free_text);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    put_value(L, t, 1, 0);
    lua_pushlstring(L, t->data, t->bytes);
    free(t->data);
    *t = (struct text){0};
    return 1;
}

/* array(t) -> t, marked so that it is written as an array even when empty. */
static int array(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &array_key);
    lua_setmetatable(L, 1);
    return 1;
}

int xtbind_json(lua_State *L) {
    static const luaL_Reg functions[] = {
        {"decode", decode}, {"encode", encode}, {"array", array}, {NULL, NULL}};
    lua_newtable(L);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &array_key);
    luaL_newlib(L, functions);
    lua_pushlightuserdata(L, NULL);
    lua_setfield(L, -2, "null");
    return 1;
}
