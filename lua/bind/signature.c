/*
 * signature.c: what an op says of itself: its signature, and the fields of its userdata.
 */
#include <stdio.h>
#include <string.h>

#include "op_parts.h"

static void add_default(luaL_Buffer *buffer, const struct xt_param *p) {
    char text[64] = "";
    int choice = (int)p->fallback;
    const char *next = p->choices;
    int64_t whole = (int64_t)p->fallback;
    if (p->kind == XT_P_DIM && whole >= 0) whole++;
    if ((strcmp(p->name, "first") == 0 || strcmp(p->name, "i") == 0) && whole >= 0) whole++;
    switch (p->kind) {
    case XT_P_BOOL:
        snprintf(text, sizeof text, " = %s", p->fallback != 0 ? "true" : "false");
        break;
    case XT_P_INT:
    case XT_P_DIM: snprintf(text, sizeof text, " = %lld", (long long)whole); break;
    case XT_P_REAL: snprintf(text, sizeof text, " = %.6g", p->fallback); break;
    case XT_P_DTYPE:
        snprintf(text, sizeof text, " = \"%s\"", xt_dtype_name((enum xt_dtype)p->fallback));
        break;
    case XT_P_CHOICE:
        while (next && choice-- > 0) {
            next = strchr(next, '|');
            if (next) next++;
        }
        if (next) snprintf(text, sizeof text, " = \"%.*s\"", (int)strcspn(next, "|"), next);
        break;
    default: break;
    }
    luaL_addstring(buffer, text);
}

const char *xtbind_signature(lua_State *L, const struct xt_op *op) {
    luaL_Buffer buffer;
    bool first = true, any_named = false;
    luaL_buffinit(L, &buffer);
    luaL_addstring(&buffer, op->name);
    luaL_addchar(&buffer, '(');
    for (const struct xt_param *p = op->params; p->name; p++) {
        if (p->named) {
            any_named = true;
            continue;
        }
        if (p->optional) luaL_addstring(&buffer, first ? "[" : " [");
        if (!first) luaL_addstring(&buffer, ", ");
        if (p->kind == XT_P_TENSORS) {
            luaL_addchar(&buffer, '{');
            luaL_addstring(&buffer, p->name);
            luaL_addstring(&buffer, "...}");
        } else
            luaL_addstring(&buffer, p->name);
        if (p->optional) {
            if (p->kind != XT_P_DIMS && !xt_takes_slot(p)) add_default(&buffer, p);
            luaL_addchar(&buffer, ']');
        }
        first = false;
    }
    if (any_named) {
        luaL_addstring(&buffer, first ? "{" : " [, {");
        const char *comma = "";
        for (const struct xt_param *p = op->params; p->name; p++) {
            if (!p->named) continue;
            luaL_addstring(&buffer, comma);
            luaL_addstring(&buffer, p->name);
            if (p->optional && !xt_takes_slot(p)) add_default(&buffer, p);
            comma = ", ";
        }
        luaL_addstring(&buffer, first ? "}" : "}]");
    }
    luaL_addchar(&buffer, ')');
    luaL_pushresult(&buffer);
    return lua_tostring(L, -1);
}

static const char *const kinds[] = {
    [XT_P_TENSOR] = "tensor", [XT_P_TENSORS] = "tensors", [XT_P_SEED] = "seed",
    [XT_P_INT] = "integer",   [XT_P_REAL] = "number",     [XT_P_BOOL] = "boolean",
    [XT_P_DIM] = "dim",       [XT_P_DIMS] = "dims",       [XT_P_SHAPE] = "shape",
    [XT_P_CHOICE] = "choice", [XT_P_DTYPE] = "dtype",
};

/* An array of {name, kind, optional, named, choices}: for the generator of docs, and for help. */
static void push_params(lua_State *L, const struct xt_op *op) {
    int i = 0;
    lua_newtable(L);
    for (const struct xt_param *p = op->params; p->name; p++) {
        lua_createtable(L, 0, 5);
        lua_pushstring(L, p->name);
        lua_setfield(L, -2, "name");
        lua_pushstring(L, kinds[p->kind]);
        lua_setfield(L, -2, "kind");
        lua_pushboolean(L, p->optional);
        lua_setfield(L, -2, "optional");
        lua_pushboolean(L, p->named);
        lua_setfield(L, -2, "named");
        lua_pushstring(L, p->choices);
        lua_setfield(L, -2, "choices");
        lua_rawseti(L, -2, ++i);
    }
}

static void push_dtypes(lua_State *L, const struct xt_op *op) {
    int n = 0;
    lua_newtable(L);
    for (int d = 0; d < XT_DTYPE_COUNT; d++) {
        if (op->dtypes && !(op->dtypes & XT_BIT(d))) continue;
        lua_pushstring(L, xt_dtype_name((enum xt_dtype)d));
        lua_rawseti(L, -2, ++n);
    }
}

int xtbind_op_index(lua_State *L) {
    const struct xt_op *op = *(const struct xt_op **)lua_touserdata(L, 1);
    const char *name = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "";
    if (strcmp(name, "name") == 0)
        lua_pushstring(L, op->name);
    else if (strcmp(name, "doc") == 0)
        lua_pushstring(L, op->doc);
    else if (strcmp(name, "signature") == 0)
        xtbind_signature(L, op);
    else if (strcmp(name, "params") == 0)
        push_params(L, op);
    else if (strcmp(name, "dtypes") == 0)
        push_dtypes(L, op);
    else if (strcmp(name, "outputs") == 0)
        lua_pushinteger(L, op->n_outputs - op->n_hidden);
    else if (strcmp(name, "differentiable") == 0)
        lua_pushboolean(L, !(op->flags & XT_NO_GRADIENT));
    else if (strcmp(name, "view") == 0)
        lua_pushboolean(L, (op->flags & XT_VIEW) != 0);
    else if (strcmp(name, "writes") == 0)
        lua_pushboolean(L, op->writes || op->write_group);
    else
        lua_pushnil(L);
    return 1;
}

int xtbind_op_to_string(lua_State *L) {
    const struct xt_op *op = *(const struct xt_op **)lua_touserdata(L, 1);
    lua_pushfstring(L, "%s\n  %s", xtbind_signature(L, op), op->doc);
    return 1;
}
