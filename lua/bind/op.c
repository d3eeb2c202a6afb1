/*
 * op.c: the op userdata: one pointer to its row, callable from Lua.
 *
 * Arguments come from the row's parameters: those not `named` by position, then one table of
 * options that may name any of the rest. What Lua counts from 1 (dimensions, first, last, i) counts
 * from 0 in the row. Everything is read before anything is made, so raising leaks nothing. The path
 * of tensors and numbers alone makes no table and no string: it is what a small op costs.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bind.h"

#define SMALL_INPUTS 16

/* The arguments of one call while they are read. */
struct reading {
    struct xtbind *b;
    const struct xt_op *op;
    struct xt_args args;
    struct xt_tensor **inputs; /* `small`, or a userdata's memory for long lists */
    int n_inputs;
    unsigned numbers; /* bit i: input i is to be made of the number at stack[i] */
    int stack[32];    /* where the numbers are */
    unsigned given;   /* bit p: parameter p was given */
    struct xt_tensor *small[SMALL_INPUTS];
};

/* ---- sentences ------------------------------------------------------------------------------- */

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

static int edit_distance(const char *a, const char *b) {
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
        if (edit_distance(given, names[i]) < edit_distance(given, names[best])) best = i;
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
        int d = name ? edit_distance(given, name) : least;
        /* Of equally near ones the first by byte, whatever the order of the table. */
        if (d < least || (best && d == least && strcmp(name, best) < 0)) {
            least = d;
            best = name;
        }
    }
    return best;
}

static int bad_value(lua_State *L, const struct reading *r, const struct xt_param *p, int index,
                     const char *wanted) {
    return xtbind_error(L, "%s: %s is %s, wanted %s", r->op->name, p->name, xtbind_kind(L, index),
                        wanted);
}

/* ---- values ---------------------------------------------------------------------------------- */

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

/* 1, 2, ... become 0, 1, ...; -1, -2, ... stay. */
static int64_t position(lua_State *L, const struct reading *r, const struct xt_param *p,
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

static int64_t check_int(lua_State *L, const struct reading *r, const struct xt_param *p,
                         int index) {
    int64_t i = 0;
    if (!xtbind_to_int(L, index, &i)) bad_value(L, r, p, index, "an integer");
    return is_position(p) ? position(L, r, p, i) : i;
}

static int64_t check_choice(lua_State *L, const struct reading *r, const struct xt_param *p,
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

static void add_list(lua_State *L, struct reading *r, const struct xt_param *p, int attr,
                     const int64_t *values, int n) {
    if (r->args.n_ints + n > XT_MAX_INTS || n > XT_MAX_DIMS)
        xtbind_error(L, "%s: %s lists %d values, at most %d are possible", r->op->name, p->name, n,
                     XT_MAX_DIMS);
    xt_args_list(&r->args, attr, values, n);
}

static void read_list(lua_State *L, struct reading *r, const struct xt_param *p, int attr,
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
static void read_tensors(lua_State *L, struct reading *r, const struct xt_param *p, int slot,
                         int index) {
    if (!lua_istable(L, index)) bad_value(L, r, p, index, "a table of tensors");
    size_t n = (size_t)lua_rawlen(L, index);
    if (n == 0) xtbind_error(L, "%s: %s is empty, wanted a table of tensors", r->op->name, p->name);
    size_t all = (size_t)slot + n;
    if (all > 1u << 20)
        xtbind_error(L, "%s: %s lists %d tensors, too many", r->op->name, p->name, (int)n);
    if (all > SMALL_INPUTS) {
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
static void read_value(lua_State *L, struct reading *r, const struct xt_param *p, int slot,
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

static bool takes_slot(const struct xt_param *p) {
    return p->kind == XT_P_TENSOR || p->kind == XT_P_TENSORS || p->kind == XT_P_SEED;
}

static bool takes_attr(const struct xt_param *p) {
    return p->kind != XT_P_TENSOR && p->kind != XT_P_TENSORS;
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

static int unknown_option(lua_State *L, const struct reading *r, int key) {
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

static void read_options(lua_State *L, struct reading *r, int index) {
    lua_pushnil(L);
    while (lua_next(L, index)) {
        int top = lua_gettop(L);
        const char *name = lua_type(L, top - 1) == LUA_TSTRING ? lua_tostring(L, top - 1) : NULL;
        int slot = 0, attr = 0;
        const struct xt_param *p = r->op->params;
        while (p->name && (!name || strcmp(p->name, name) != 0)) {
            slot += takes_slot(p);
            attr += takes_attr(p);
            p++;
        }
        if (!p->name) unknown_option(L, r, top - 1);
        unsigned bit = 1u << (p - r->op->params);
        if (r->given & bit) xtbind_error(L, "%s: %s is given twice", r->op->name, p->name);
        r->given |= bit;
        /* A number for a tensor must stay on the stack until the tensor is made of it. */
        luaL_checkstack(L, 4, "options");
        read_value(L, r, p, slot, attr, top);
        if (r->numbers && takes_slot(p)) {
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
static int read_run(lua_State *L, struct reading *r, const struct xt_param *p, int attr, int index,
                    int top) {
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

static int too_many(lua_State *L, const struct reading *r, int given) {
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
static double dropout_of(const struct reading *r) {
    int attr = 0;
    for (const struct xt_param *p = r->op->params; p->name; p++) {
        if (p->kind == XT_P_REAL && strcmp(p->name, "dropout") == 0) return r->args.attrs[attr].f;
        attr += takes_attr(p);
    }
    return 0;
}

static void check_missing(lua_State *L, const struct reading *r) {
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

static void read_arguments(lua_State *L, struct reading *r, int first) {
    int top = lua_gettop(L), index = first, slot = 0, attr = 0;
    unsigned bit = 1;
    const struct xt_param *p = r->op->params;
    for (; p->name; p++, bit <<= 1) {
        if (takes_slot(p) && p->kind != XT_P_TENSORS) {
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
        slot += takes_slot(p);
        attr += takes_attr(p);
    }
    if (index <= top && first > 0 && lua_istable(L, index)) first = -index++;
    while (index <= top && lua_isnil(L, index)) index++;
    if (index <= top) too_many(L, r, top - (first > 0 ? first : 0) + 1);
    if (first < 0) read_options(L, r, -first);
    check_missing(L, r);
}

/* ---- numbers that become tensors ------------------------------------------------------------- */

/* The dtype that numbers take: of the first tensor that is no condition, else f32. */
static enum xt_dtype number_dtype(const struct reading *r, enum xt_device *device) {
    int slot = 0;
    *device = r->b->device;
    enum xt_dtype dtype = XT_F32;
    for (const struct xt_param *p = r->op->params; p->name; p++) {
        if (!takes_slot(p)) continue;
        const struct xt_tensor *t = slot < r->n_inputs ? r->inputs[slot] : NULL;
        slot++;
        if (!t || p->kind == XT_P_SEED) continue;
        *device = xt_device_of(t);
        dtype = xt_dtype_of(t);
        if (strcmp(p->name, "cond") != 0 && strcmp(p->name, "mask") != 0) return dtype;
        dtype = XT_F32;
    }
    return dtype;
}

static void check_numbers(lua_State *L, const struct reading *r, enum xt_dtype dtype) {
    if (xt_dtype_is_float(dtype)) return;
    int64_t low = dtype == XT_U8 ? 0 : dtype == XT_I32 ? INT32_MIN : INT64_MIN;
    int64_t high = dtype == XT_U8 ? UINT8_MAX : dtype == XT_I32 ? INT32_MAX : INT64_MAX;
    for (int i = 0; i < r->n_inputs && i < 32; i++) {
        int64_t value = 0;
        if (!(r->numbers >> i & 1u)) continue;
        if (!xtbind_to_int(L, r->stack[i], &value) || value < low || value > high)
            xtbind_error(L, "%s: %s does not fit in %s, the dtype of the tensor it meets",
                         r->op->name, xtbind_kind(L, r->stack[i]), xt_dtype_name(dtype));
    }
}

static enum xt_status make_number(lua_State *L, struct xt_ctx *ctx, int index, enum xt_dtype dtype,
                                  enum xt_device device, struct xt_tensor **out) {
    if (dtype == XT_I64) {
        struct xt_spec spec = {.dtype = XT_I64};
        int64_t value = lua_tointeger(L, index);
        return xt_tensor_from_host(ctx, &spec, device, &value, sizeof value, out);
    }
    return xt_tensor_scalar(ctx, lua_tonumber(L, index), dtype, device, out);
}

/* ---- running --------------------------------------------------------------------------------- */

/* Makes the numbers' tensors, runs, and lets them go. Raises nothing. */
static enum xt_status run(lua_State *L, struct reading *r, enum xt_dtype dtype,
                          enum xt_device device, struct xt_tensor **outputs) {
    struct xt_ctx *ctx = r->b->ctx;
    enum xt_status status = XT_OK;
    unsigned made = 0;
    for (int i = 0; r->numbers >> i && status == XT_OK; i++) {
        if (!(r->numbers >> i & 1u)) continue;
        status = make_number(L, ctx, r->stack[i], dtype, device, &r->inputs[i]);
        if (status == XT_OK) made |= 1u << i;
    }
    r->args.inputs = r->inputs;
    r->args.n_inputs = r->n_inputs;
    if (status == XT_OK) status = xt_call_run(ctx, r->op, &r->args, outputs);
    for (int i = 0; made >> i; i++)
        if (made >> i & 1u) xt_tensor_release(ctx, r->inputs[i]);
    return status;
}

/* Runs what has been read. Pushes the visible outputs; an op without any returns what it wrote. */
static int finish(lua_State *L, struct reading *r, int first) {
    struct xt_tensor **boxes[XT_MAX_OUTPUTS], *outputs[XT_MAX_OUTPUTS] = {NULL};
    enum xt_device device = XT_CPU;
    enum xt_dtype dtype = XT_F32;
    int n = r->op->n_outputs - r->op->n_hidden;
    if (r->numbers) {
        dtype = number_dtype(r, &device);
        check_numbers(L, r, dtype);
    }
    luaL_checkstack(L, XT_MAX_OUTPUTS + 4, r->op->name);
    for (int k = 0; k < n; k++) boxes[k] = xtbind_box(L, r->b);
    enum xt_status status = run(L, r, dtype, device, outputs);
    if (status != XT_OK) xtbind_error(L, "%s", xt_error(r->b->ctx));
    for (int k = 0; k < n; k++) {
        xtbind_fill(r->b, boxes[k], outputs[k]);
        r->b->unchecked_bytes += outputs[k] ? outputs[k]->storage->bytes : 0;
    }
    if (r->b->unchecked_bytes > (1u << 20)) xtbind_collect(r->b, false);
    if (n > 0) return n;
    lua_pushvalue(L, first);
    return 1;
}

/* The short way: an op that takes tensors alone, given just those (or numbers). */
static bool read_tensors_alone(lua_State *L, struct reading *r, int first) {
    int n = 0;
    const struct xt_param *p = r->op->params;
    for (; p->name; p++, n++) {
        if (p->kind != XT_P_TENSOR) return false;
        struct xt_tensor *t = xtbind_as_tensor(L, r->b, first + n);
        if (!t) {
            if (lua_type(L, first + n) != LUA_TNUMBER) return false;
            r->numbers |= 1u << n;
            r->stack[n] = first + n;
        }
        r->inputs[n] = t;
    }
    r->n_inputs = n;
    r->args.n_ints = 0;
    return lua_gettop(L) == first + n - 1;
}

static int call_op(lua_State *L, struct xtbind *b, const struct xt_op *op, int first) {
    struct reading r; /* its arrays are filled as they are used */
    r.b = b;
    r.op = op;
    r.inputs = r.small;
    r.n_inputs = 0;
    r.numbers = 0;
    r.given = 0;
    b->L = L;
    if (read_tensors_alone(L, &r, first)) return finish(L, &r, first);
    r.numbers = 0;
    xt_args_init(&r.args, op, NULL, 0);
    read_arguments(L, &r, first);
    return finish(L, &r, first);
}

static const struct xt_op *op_at(lua_State *L, const struct xtbind *b, int index) {
    const struct xt_op **box = lua_touserdata(L, index);
    if (!box || !lua_getmetatable(L, index)) return NULL;
    bool is_op = lua_topointer(L, -1) == b->op_meta_at;
    lua_pop(L, 1);
    return is_op ? *box : NULL;
}

/* __call of the op userdata, which is argument 1. */
static int call(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    const struct xt_op **box = lua_touserdata(L, 1);
    return call_op(L, b, *box, 2);
}

/* An operator of tensors: upvalue 2 is the row. A metamethod gets two operands always. */
static int binary(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    lua_settop(L, 2);
    return call_op(L, b, lua_touserdata(L, lua_upvalueindex(2)), 1);
}

static int unary(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    lua_settop(L, 1);
    return call_op(L, b, lua_touserdata(L, lua_upvalueindex(2)), 1);
}

/* ---- what an op says of itself --------------------------------------------------------------- */

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

/* "sum(x [, dims] [, {keepdim = false}])", pushed. */
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
            if (p->kind != XT_P_DIMS && !takes_slot(p)) add_default(&buffer, p);
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
            if (p->optional && !takes_slot(p)) add_default(&buffer, p);
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

static int index_op(lua_State *L) {
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

static int op_to_string(lua_State *L) {
    const struct xt_op *op = *(const struct xt_op **)lua_touserdata(L, 1);
    lua_pushfstring(L, "%s\n  %s", xtbind_signature(L, op), op->doc);
    return 1;
}

/* xt.ops(): all of them, in order of declaration. */
static int ops(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    int n = 0;
    lua_newtable(L);
    for (int i = 0; i < xt_op_count(b->ctx); i++) {
        const struct xt_op *op = xt_op_at(b->ctx, i);
        if (op->flags & XT_INTERNAL) continue;
        lua_getfield(L, lua_upvalueindex(2), op->name);
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

/* xt.call(name, ...): any op, the internal ones too; for the library's optimizers and tests. */
static int call_by_name(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    const char *name = luaL_checkstring(L, 1);
    const struct xt_op *op = xt_op_find(b->ctx, name);
    if (!op) xtbind_error(L, "there is no op '%s'", name);
    return call_op(L, b, op, 2);
}

/* core.is_op(value) */
static int is_op(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    lua_pushboolean(L, op_at(L, b, 1) != NULL);
    return 1;
}

/* An unknown op: the nearest known ones. */
static int unknown_op(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    const char *given = luaL_tolstring(L, 2, NULL), *best = "";
    int least = 1000;
    for (int i = 0; i < xt_op_count(b->ctx); i++) {
        const struct xt_op *op = xt_op_at(b->ctx, i);
        int d = edit_distance(given, op->name);
        if ((op->flags & XT_INTERNAL) || d >= least) continue;
        least = d;
        best = op->name;
    }
    return xtbind_error(L, "there is no op '%s'; the nearest is '%s', and xt.ops() lists all",
                        given, best);
}

/* ---- opening --------------------------------------------------------------------------------- */

static void set_closure(lua_State *L, struct xtbind *b, const char *name, lua_CFunction fn) {
    lua_pushlightuserdata(L, b);
    lua_pushcclosure(L, fn, 1);
    lua_setfield(L, -2, name);
}

static void open_operators(lua_State *L, struct xtbind *b) {
    static const struct {
        const char *event, *op;
        lua_CFunction fn;
    } operators[] = {{"__add", "add", binary}, {"__sub", "sub", binary}, {"__mul", "mul", binary},
                     {"__div", "div", binary}, {"__pow", "pow", binary}, {"__unm", "neg", unary}};
    lua_rawgeti(L, LUA_REGISTRYINDEX, b->tensor_meta);
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        const struct xt_op *op = xt_op_find(b->ctx, operators[i].op);
        if (!op) continue;
        lua_pushlightuserdata(L, b);
        lua_pushlightuserdata(L, (void *)(uintptr_t)op);
        lua_pushcclosure(L, operators[i].fn, 2);
        lua_setfield(L, -2, operators[i].event);
    }
    lua_pop(L, 1);
}

void xtbind_open_op(lua_State *L, struct xtbind *b) {
    int library = lua_gettop(L);
    lua_getfield(L, library, "core");
    int core = lua_gettop(L);
    lua_createtable(L, 0, 8); /* the metatable */
    set_closure(L, b, "__call", call);
    set_closure(L, b, "__index", index_op);
    set_closure(L, b, "__tostring", op_to_string);
    lua_pushliteral(L, "xtrain.op");
    lua_setfield(L, -2, "__name");
    b->op_meta_at = lua_topointer(L, -1);
    lua_pushvalue(L, -1);
    b->op_meta = luaL_ref(L, LUA_REGISTRYINDEX);
    int meta = lua_gettop(L);
    lua_getfield(L, core, "tensor_names");
    int names = lua_gettop(L);
    lua_createtable(L, 0, 150); /* xt.op */
    int all = lua_gettop(L);
    for (int i = 0; i < xt_op_count(b->ctx); i++) {
        const struct xt_op *op = xt_op_at(b->ctx, i);
        if (op->flags & XT_INTERNAL) continue;
        const struct xt_op **box = lua_newuserdatauv(L, sizeof *box, 0);
        *box = op;
        lua_pushvalue(L, meta);
        lua_setmetatable(L, -2);
        lua_pushvalue(L, -1);
        lua_setfield(L, all, op->name);
        lua_pushvalue(L, -1);
        lua_setfield(L, library, op->name);
        if (lua_getfield(L, names, op->name) == LUA_TNIL) {
            lua_pop(L, 1);
            lua_setfield(L, names, op->name);
        } else
            lua_pop(L, 2); /* the method of that name does more */
    }
    lua_createtable(L, 0, 1);
    set_closure(L, b, "__index", unknown_op);
    lua_setmetatable(L, all);
    lua_pushvalue(L, all);
    lua_setfield(L, library, "op");
    lua_pushlightuserdata(L, b);
    lua_pushvalue(L, all);
    lua_pushcclosure(L, ops, 2);
    lua_setfield(L, library, "ops");
    lua_settop(L, core);
    set_closure(L, b, "is_op", is_op);
    lua_pop(L, 1);
    set_closure(L, b, "call", call_by_name); /* xt.call */
    lua_settop(L, library);
    open_operators(L, b);
}
