/*
 * reading.c: the arguments of an op, read from Lua's stack by the row's parameters.
 *
 * Those not `named` come by position, then one table of options that may name any of the rest. What
 * Lua counts from 1 (dimensions, first, last, i) counts from 0 in the row. Everything is read
 * before anything is made, so raising leaks nothing.
 */
#include <stdio.h>
#include <string.h>

#include "op_parts.h"

static int bad_value(lua_State *L, const struct xtbind_reading *r, const struct xt_param *p,
                     int index, const char *wanted) {
    return xtbind_error(L, "%s: %s is %s, wanted %s", r->op->name, p->name, xtbind_kind(L, index),
                        wanted);
}

/* ---- values ---------------------------------------------------------------------------------- */

/* 1, 2, ... become 0, 1, ...; -1, -2, ... stay. */
static int64_t position(lua_State *L, const struct xtbind_reading *r, const struct xt_param *p,
                        int64_t i) {
    if (i == 0)
        xtbind_error(L, "%s: %s is 0: positions count from 1, or from the end with -1", r->op->name,
                     p->name);
    return i > 0 ? i - 1 : i;
}

static bool is_position(const struct xt_param *p) {
    return p->kind == XT_P_DIM || p->kind == XT_P_DIMS || strcmp(p->name, "dims") == 0 ||
           strcmp(p->name, "first") == 0 || strcmp(p->name, "last") == 0 ||
           strcmp(p->name, "i") == 0;
}

static int64_t check_int(lua_State *L, const struct xtbind_reading *r, const struct xt_param *p,
                         int index) {
    int64_t i = 0;
    if (!xtbind_to_int(L, index, &i)) bad_value(L, r, p, index, "an integer");
    return is_position(p) ? position(L, r, p, i) : i;
}

static int64_t check_choice(lua_State *L, const struct xtbind_reading *r, const struct xt_param *p,
                            int index) {
    const char *names[16];
    char text[256];
    int n = 0;
    const char *given = lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index) : "";
    snprintf(text, sizeof text, "%s", p->choices);
    char *next = text;
    while (next && n < 16) {
        char *name = strsep(&next, "|");
        if (strcmp(name, given) == 0) return n;
        names[n++] = name;
    }
    const char *list = xtbind_nearest(L, given, names, n);
    bad_value(L, r, p, index, lua_pushfstring(L, "one of %s", list));
    return 0;
}

/* ---- parameters into slots ------------------------------------------------------------------- */

static void add_list(lua_State *L, struct xtbind_reading *r, const struct xt_param *p, int attr,
                     const int64_t *values, int n) {
    if (r->args.n_ints + n > XT_MAX_INTS || n > XT_MAX_DIMS)
        xtbind_error(L, "%s: %s lists %d values, at most %d are possible", r->op->name, p->name, n,
                     XT_MAX_DIMS);
    xt_args_list(&r->args, attr, values, n);
}

static void read_list(lua_State *L, struct xtbind_reading *r, const struct xt_param *p, int attr,
                      int index) {
    int64_t values[XT_MAX_DIMS];
    if (!lua_istable(L, index))
        bad_value(L, r, p, index,
                  p->kind == XT_P_DIMS ? "a dimension or a table of them" : "a table of sizes");
    lua_Integer n = (lua_Integer)lua_rawlen(L, index);
    if (n > XT_MAX_DIMS)
        xtbind_error(L, "%s: %s lists %I values, at most %d are possible", r->op->name, p->name, n,
                     XT_MAX_DIMS);
    for (int i = 0; i < (int)n; i++) {
        lua_rawgeti(L, index, i + 1);
        values[i] = check_int(L, r, p, lua_gettop(L));
        lua_pop(L, 1);
    }
    add_list(L, r, p, attr, values, (int)n);
}

/* concat{x, y, z}: the last tensor parameter. */
static void read_tensors(lua_State *L, struct xtbind_reading *r, const struct xt_param *p, int slot,
                         int index) {
    if (!lua_istable(L, index)) bad_value(L, r, p, index, "a table of tensors");
    size_t n = (size_t)lua_rawlen(L, index);
    if (n == 0) xtbind_error(L, "%s: %s is empty, wanted a table of tensors", r->op->name, p->name);
    size_t all = (size_t)slot + n;
    if (all > 1u << 20)
        xtbind_error(L, "%s: %s lists %d tensors, too many", r->op->name, p->name, (int)n);
    if (all > XTBIND_SMALL_INPUTS) {
        struct xt_tensor **inputs = lua_newuserdatauv(L, all * sizeof(struct xt_tensor *), 0);
        memcpy(inputs, r->inputs, (size_t)slot * sizeof *inputs);
        r->inputs = inputs;
    }
    for (size_t i = 0; i < n; i++) {
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        struct xt_tensor *t = xtbind_as_tensor(L, r->b, -1);
        bool absent = r->op->write_group && lua_isboolean(L, -1) && !lua_toboolean(L, -1);
        if (!t && !absent) /* false stands for an absent member of a group */
            xtbind_error(L, "%s: %s[%d] is %s, wanted a tensor", r->op->name, p->name, (int)i + 1,
                         xtbind_kind(L, -1));
        r->inputs[(size_t)slot + i] = t; /* the table keeps it alive */
        lua_pop(L, 1);
    }
    r->n_inputs = (int)all;
}

/* A value for parameter p: its input slot and its attribute. */
static void read_value(lua_State *L, struct xtbind_reading *r, const struct xt_param *p, int slot,
                       int attr, int index) {
    union xt_attr *a = &r->args.attrs[attr];
    switch (p->kind) {
    case XT_P_TENSOR:
        if (lua_type(L, index) == LUA_TNUMBER) {
            r->numbers |= 1u << slot;
            r->stack[slot] = index;
        } else {
            struct xt_tensor *t = xtbind_as_tensor(L, r->b, index);
            if (!t) bad_value(L, r, p, index, "a tensor");
            r->inputs[slot] = t;
        }
        break;
    case XT_P_TENSORS: read_tensors(L, r, p, slot, index); break;
    case XT_P_SEED:
        r->inputs[slot] = xtbind_as_tensor(L, r->b, index);
        if (!r->inputs[slot])
            a->seed = xtbind_check_seed(L, index, r->op->name, p->name);
        else if (xt_ndim(r->inputs[slot]) != 0 || xt_dtype_of(r->inputs[slot]) != XT_I64)
            bad_value(L, r, p, index, "an integer or a 0-dim i64 tensor");
        break;
    case XT_P_INT:
    case XT_P_DIM: a->i = check_int(L, r, p, index); break;
    case XT_P_REAL:
        if (lua_type(L, index) != LUA_TNUMBER) bad_value(L, r, p, index, "a number");
        a->f = lua_tonumber(L, index);
        break;
    case XT_P_BOOL:
        if (lua_type(L, index) != LUA_TBOOLEAN) bad_value(L, r, p, index, "true or false");
        a->i = lua_toboolean(L, index);
        break;
    case XT_P_DIMS:
    case XT_P_SHAPE:
        if (lua_type(L, index) == LUA_TNUMBER) {
            int64_t one = check_int(L, r, p, index);
            add_list(L, r, p, attr, &one, 1);
        } else
            read_list(L, r, p, attr, index);
        break;
    case XT_P_CHOICE: a->i = check_choice(L, r, p, index); break;
    case XT_P_DTYPE: a->i = xtbind_check_dtype(L, index, r->op->name); break;
    }
}

static bool takes_list(const struct xt_param *p) {
    return p->kind == XT_P_TENSORS || p->kind == XT_P_DIMS || p->kind == XT_P_SHAPE;
}

/* ---- the options table ----------------------------------------------------------------------- */

/* A table whose keys are names; an empty one is none. */
static bool is_options(lua_State *L, int index) {
    if (!lua_istable(L, index) || lua_rawlen(L, index) > 0) return false;
    lua_pushnil(L);
    if (!lua_next(L, index)) return false;
    bool named = lua_type(L, -2) == LUA_TSTRING;
    lua_pop(L, 2);
    return named;
}

static int unknown_option(lua_State *L, const struct xtbind_reading *r, int key) {
    const char *names[XT_MAX_PARAMS];
    int n = 0;
    for (const struct xt_param *p = r->op->params; p->name; p++)
        if (p->named || p->optional) names[n++] = p->name;
    if (lua_type(L, key) != LUA_TSTRING && !(r->given & 1u) && r->op->params->kind == XT_P_TENSOR)
        return xtbind_error(L, "%s: %s is a table, wanted a tensor: xt.tensor{...} makes one",
                            r->op->name, r->op->params->name);
    if (lua_type(L, key) != LUA_TSTRING)
        return xtbind_error(L, "%s: options are named, but the table has the key %s", r->op->name,
                            luaL_tolstring(L, key, NULL));
    const char *given = lua_tostring(L, key);
    if (n == 0)
        return xtbind_error(L, "%s: unknown option '%s'; it takes no options", r->op->name, given);
    return xtbind_error(L, "%s: unknown option '%s'; the options are %s", r->op->name, given,
                        xtbind_nearest(L, given, names, n));
}

static void read_options(lua_State *L, struct xtbind_reading *r, int index) {
    lua_pushnil(L);
    while (lua_next(L, index)) {
        int top = lua_gettop(L);
        const char *name = lua_type(L, top - 1) == LUA_TSTRING ? lua_tostring(L, top - 1) : NULL;
        int slot = 0, attr = 0;
        const struct xt_param *p = r->op->params;
        while (p->name && (!name || strcmp(p->name, name) != 0)) {
            slot += xt_takes_slot(p);
            attr += xt_takes_attr(p);
            p++;
        }
        if (!p->name) unknown_option(L, r, top - 1);
        unsigned bit = 1u << (p - r->op->params);
        if (r->given & bit) xtbind_error(L, "%s: %s is given twice", r->op->name, p->name);
        r->given |= bit;
        /* A number for a tensor must stay on the stack until the tensor is made of it. */
        luaL_checkstack(L, 4, "options");
        read_value(L, r, p, slot, attr, top);
        if (r->numbers && xt_takes_slot(p)) {
            lua_insert(L, top - 1); /* value below key */
            r->stack[slot] = top - 1;
            lua_settop(L, top);
        } else {
            lua_settop(L, top - 1);
        }
    }
}

/* ---- all arguments --------------------------------------------------------------------------- */

/* Consecutive integers for the last list parameter: t:reshape(2, -1), t:sum(1, 2). */
static int read_run(lua_State *L, struct xtbind_reading *r, const struct xt_param *p, int attr,
                    int index, int top) {
    int64_t values[XT_MAX_DIMS];
    int n = 0;
    for (; index <= top && lua_type(L, index) == LUA_TNUMBER; index++, n++) {
        if (n == XT_MAX_DIMS)
            xtbind_error(L, "%s: %s lists more than %d values", r->op->name, p->name, XT_MAX_DIMS);
        values[n] = check_int(L, r, p, index);
    }
    add_list(L, r, p, attr, values, n);
    return index;
}

static int too_many(lua_State *L, const struct xtbind_reading *r, int given) {
    int most = 0;
    bool named = false;
    for (const struct xt_param *p = r->op->params; p->name; p++) {
        most += !p->named;
        named = named || p->named;
    }
    return xtbind_error(L, "%s: given %d arguments, at most %d are taken%s", r->op->name, given,
                        most, named ? " and a table of options" : "");
}

/* The value of the number `dropout` among the arguments, 0 where there is none. */
static double dropout_of(const struct xtbind_reading *r) {
    int attr = 0;
    for (const struct xt_param *p = r->op->params; p->name; p++) {
        if (p->kind == XT_P_REAL && strcmp(p->name, "dropout") == 0) return r->args.attrs[attr].f;
        attr += xt_takes_attr(p);
    }
    return 0;
}

static void check_missing(lua_State *L, const struct xtbind_reading *r) {
    unsigned bit = 1;
    for (const struct xt_param *p = r->op->params; p->name; p++, bit <<= 1) {
        if (r->given & bit) continue;
        if (!p->optional)
            xtbind_error(L, "%s: %s is missing; the signature is %s", r->op->name, p->name,
                         xtbind_signature(L, r->op));
        if (p->kind == XT_P_SEED && dropout_of(r) > 0)
            xtbind_error(L,
                         "%s: dropout is %f and seed is missing: nothing is random unless a seed "
                         "says so",
                         r->op->name, dropout_of(r));
    }
}

void xtbind_read_arguments(lua_State *L, struct xtbind_reading *r, int first) {
    int top = lua_gettop(L), index = first, slot = 0, attr = 0;
    unsigned bit = 1;
    const struct xt_param *p = r->op->params;
    for (; p->name; p++, bit <<= 1) {
        if (xt_takes_slot(p) && p->kind != XT_P_TENSORS) {
            r->inputs[slot] = NULL;
            r->n_inputs = slot + 1;
        }
        if (!p->named && index <= top) {
            int type = lua_type(L, index);
            if (type == LUA_TNIL)
                index++;
            else if (type == LUA_TTABLE &&
                     (!takes_list(p) || (p->optional && is_options(L, index)))) {
                if (index < top && !lua_isnil(L, index + 1)) bad_value(L, r, p, index, "a value");
                top = index - 1; /* the options: read below */
                first = -index;
            } else if (type == LUA_TNUMBER && takes_list(p) && p->kind != XT_P_TENSORS) {
                r->given |= bit;
                index = read_run(L, r, p, attr, index, top);
            } else {
                r->given |= bit;
                read_value(L, r, p, slot, attr, index++);
            }
        }
        slot += xt_takes_slot(p);
        attr += xt_takes_attr(p);
    }
    if (index <= top && first > 0 && lua_istable(L, index)) first = -index++;
    while (index <= top && lua_isnil(L, index)) index++;
    if (index <= top) too_many(L, r, top - (first > 0 ? first : 0) + 1);
    if (first < 0) read_options(L, r, -first);
    check_missing(L, r);
}
