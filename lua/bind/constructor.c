/*
 * constructor.c: tensors and variables made of numbers, nested tables and bytes.
 */
#include <stdio.h>
#include <string.h>

#include "bind.h"

/* {dtype, device} at index; what is not given stays. */
static void read_options(lua_State *L, int index, const char *who, enum xt_dtype *dtype,
                         enum xt_device *on) {
    if (lua_isnoneornil(L, index)) return;
    if (!lua_istable(L, index))
        xtbind_error(L, "%s: options are %s, wanted a table like {dtype = \"bf16\"}", who,
                     xtbind_kind(L, index));
    lua_pushnil(L);
    while (lua_next(L, index)) {
        const char *name = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "";
        if (strcmp(name, "dtype") == 0)
            *dtype = xtbind_check_dtype(L, lua_gettop(L), who);
        else if (strcmp(name, "device") == 0)
            *on = xtbind_check_device(L, lua_gettop(L), who);
        else
            xtbind_error(L, "%s: unknown option '%s'; the options are 'dtype', 'device'", who,
                         luaL_tolstring(L, -2, NULL));
        lua_pop(L, 1);
    }
}

static int push_full(lua_State *L, struct xtbind *b, const struct xt_spec *spec, enum xt_device on,
                     double value, const char *who) {
    struct xt_tensor **box = xtbind_box(L, b), *t = NULL;
    if (xt_full(b->ctx, spec, on, value, &t) != XT_OK)
        xtbind_error(L, "%s: %s", who, xt_error(b->ctx));
    xtbind_fill(b, box, t);
    xtbind_collect(b, false);
    return 1;
}

static int filled(lua_State *L, double value, const char *who) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_spec spec = {.dtype = XT_F32};
    enum xt_device on = b->device;
    xtbind_check_shape(L, 1, who, &spec);
    read_options(L, 2, who, &spec.dtype, &on);
    return push_full(L, b, &spec, on, value, who);
}

static int zeros(lua_State *L) {
    return filled(L, 0, "zeros");
}

static int ones(lua_State *L) {
    return filled(L, 1, "ones");
}

static int full(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_spec spec = {.dtype = XT_F32};
    enum xt_device on = b->device;
    xtbind_check_shape(L, 1, "full", &spec);
    if (lua_type(L, 2) != LUA_TNUMBER)
        xtbind_error(L, "full: value is %s, wanted a number", xtbind_kind(L, 2));
    read_options(L, 3, "full", &spec.dtype, &on);
    return push_full(L, b, &spec, on, lua_tonumber(L, 2), "full");
}

static int from_bytes(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = NULL;
    size_t bytes;
    if (lua_type(L, 1) != LUA_TSTRING)
        xtbind_error(L, "from_bytes: bytes is %s, wanted a string", xtbind_kind(L, 1));
    const char *data = lua_tolstring(L, 1, &bytes);
    struct xt_spec spec = {.dtype = xtbind_check_dtype(L, 2, "from_bytes")};
    xtbind_check_shape(L, 3, "from_bytes", &spec);
    struct xt_tensor **box = xtbind_box(L, b);
    if (xt_tensor_from_host(b->ctx, &spec, b->device, data, bytes, &t) != XT_OK)
        xtbind_error(L, "from_bytes: %s", xt_error(b->ctx));
    xtbind_fill(b, box, t);
    return 1;
}

/* ---- xt.tensor: nested tables ---------------------------------------------------------------- */

struct filling {
    struct xt_spec spec;        /* of the buffer */
    void *data;                 /* the buffer: contiguous, row-major */
    int64_t next;               /* element to be written */
    int64_t index[XT_MAX_DIMS]; /* where in the tables, from 1 */
};

/* "value[2][3]", pushed. */
static const char *place(lua_State *L, const struct filling *f, int depth) {
    luaL_Buffer buffer;
    luaL_buffinit(L, &buffer);
    luaL_addstring(&buffer, "value");
    for (int d = 0; d < depth; d++) {
        char text[32];
        snprintf(text, sizeof text, "[%lld]", (long long)f->index[d]);
        luaL_addstring(&buffer, text);
    }
    luaL_pushresult(&buffer);
    return lua_tostring(L, -1);
}

/* The shape along the first elements. */
static void find_shape(lua_State *L, struct xt_spec *spec) {
    lua_pushvalue(L, 1);
    spec->ndim = 0;
    while (lua_istable(L, -1)) {
        if (spec->ndim == XT_MAX_DIMS)
            xtbind_error(L, "tensor: the tables are nested more than %d deep", XT_MAX_DIMS);
        spec->shape[spec->ndim++] = (int64_t)lua_rawlen(L, -1);
        lua_rawgeti(L, -1, 1);
        lua_remove(L, -2);
    }
    lua_pop(L, 1);
}

static void store_number(lua_State *L, struct filling *f) {
    int64_t whole = 0, n = f->next++;
    double value = 0;
    if (lua_isboolean(L, -1))
        value = (double)(whole = lua_toboolean(L, -1));
    else if (lua_type(L, -1) == LUA_TNUMBER) {
        value = lua_tonumber(L, -1);
        enum xt_dtype dtype = f->spec.dtype;
        int64_t low = dtype == XT_U8 ? 0 : dtype == XT_I32 ? INT32_MIN : INT64_MIN;
        int64_t high = dtype == XT_U8 ? UINT8_MAX : dtype == XT_I32 ? INT32_MAX : INT64_MAX;
        if (!xt_dtype_is_float(dtype) &&
            (!xtbind_to_int(L, -1, &whole) || whole < low || whole > high)) {
            const char *kind = xtbind_kind(L, -1);
            xtbind_error(L, "tensor: %s is %s, which does not fit in %s", place(L, f, f->spec.ndim),
                         kind, xt_dtype_name(dtype));
        }
    } else {
        const char *kind = xtbind_kind(L, -1);
        xtbind_error(L, "tensor: %s is %s, wanted a number", place(L, f, f->spec.ndim), kind);
    }
    switch (f->spec.dtype) {
    case XT_F64: ((double *)f->data)[n] = value; break;
    case XT_I32: ((int32_t *)f->data)[n] = (int32_t)whole; break;
    case XT_I64: ((int64_t *)f->data)[n] = whole; break;
    case XT_U8: ((uint8_t *)f->data)[n] = (uint8_t)whole; break;
    default: ((float *)f->data)[n] = (float)value; break;
    }
}

/* The value on top of the stack into the buffer; it stays there. */
static void store_value(lua_State *L, struct filling *f, int depth) {
    if (depth == f->spec.ndim) {
        store_number(L, f);
        return;
    }
    if (!lua_istable(L, -1)) {
        const char *kind = xtbind_kind(L, -1);
        xtbind_error(L, "tensor: %s is %s, wanted a table of %I values", place(L, f, depth), kind,
                     (lua_Integer)f->spec.shape[depth]);
    }
    int64_t n = f->spec.shape[depth], given = (int64_t)lua_rawlen(L, -1);
    if (given != n)
        xtbind_error(L, "tensor: %s has %I values, wanted %I as in the first one",
                     place(L, f, depth), (lua_Integer)given, (lua_Integer)n);
    for (int64_t i = 1; i <= n; i++) {
        f->index[depth] = i;
        lua_rawgeti(L, -1, i);
        store_value(L, f, depth + 1);
        lua_pop(L, 1);
    }
}

/* A tensor as the value: cast, or copied. */
static int tensor_of_tensor(lua_State *L, struct xtbind *b, struct xt_tensor *t) {
    enum xt_dtype dtype = xt_dtype_of(t);
    enum xt_device on = xt_device_of(t);
    struct xt_tensor **box = xtbind_box(L, b), *out = NULL;
    read_options(L, 2, "tensor", &dtype, &on);
    xt_no_grad_push(b->ctx);
    enum xt_status status =
        dtype == xt_dtype_of(t)
            ? xt_apply_name(b->ctx, "contiguous", (struct xt_tensor *[]){t}, 1, &out)
            : xt_cast(b->ctx, t, dtype, &out);
    xt_no_grad_pop(b->ctx);
    xtbind_check(L, status);
    xtbind_fill(b, box, out);
    return 1;
}

static int tensor(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct filling f = {.next = 0};
    enum xt_dtype dtype = XT_F32;
    enum xt_device on = b->device;
    lua_settop(L, 2);
    struct xt_tensor *given = xtbind_to_tensor(L, 1);
    if (given) return tensor_of_tensor(L, b, given);
    if (!lua_istable(L, 1) && lua_type(L, 1) != LUA_TNUMBER && !lua_isboolean(L, 1))
        xtbind_error(L, "tensor: value is %s, wanted a number or nested tables of numbers",
                     xtbind_kind(L, 1));
    read_options(L, 2, "tensor", &dtype, &on);
    find_shape(L, &f.spec);
    bool half = dtype == XT_BF16 || dtype == XT_F16;
    f.spec.dtype = half ? XT_F32 : dtype;
    size_t bytes = xt_dtype_bytes(f.spec.dtype);
    for (int d = 0; d < f.spec.ndim; d++)
        if (__builtin_mul_overflow(bytes, (size_t)f.spec.shape[d], &bytes))
            xtbind_error(L, "tensor: the tables are ragged");
    f.data = lua_newuserdatauv(L, bytes ? bytes : 1, 0);
    luaL_checkstack(L, XT_MAX_DIMS + 8, "tensor");
    lua_pushvalue(L, 1);
    store_value(L, &f, 0);
    struct xt_tensor **box = xtbind_box(L, b), *t = NULL;
    xtbind_check(L, xt_tensor_from_host(b->ctx, &f.spec, on, f.data, bytes, &t));
    xtbind_fill(b, box, t);
    if (half) {
        struct xt_tensor **cast_box = xtbind_box(L, b), *cast = NULL;
        xtbind_check(L, xt_cast(b->ctx, t, dtype, &cast));
        xtbind_fill(b, cast_box, cast);
    }
    xtbind_collect(b, false);
    return 1;
}

/* A variable, of a tensor or of what xt.tensor takes. */
static int var(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = xtbind_to_tensor(L, 1), *out = NULL;
    if (!t) {
        tensor(L);
        t = xtbind_to_tensor(L, -1);
    }
    struct xt_tensor **box = xtbind_box(L, b);
    if (xt_var_new(b->ctx, t, &out) != XT_OK) xtbind_error(L, "var: %s", xt_error(b->ctx));
    xtbind_fill(b, box, out);
    return 1;
}

void xtbind_open_constructor(lua_State *L, struct xtbind *b) {
    static const luaL_Reg public[] = {
        {"tensor", tensor},         {"zeros", zeros}, {"ones", ones}, {"full", full},
        {"from_bytes", from_bytes}, {"var", var},     {NULL, NULL}};
    xtbind_functions(L, b, public, NULL);
}
