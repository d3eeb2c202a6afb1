/*
 * tensor.c: the tensor userdata: one pointer, its properties, methods and operators.
 *
 * The metatable's index function looks names up in one table: an integer there is a property, any
 * other value a method; every op is a method. Operators are ops called by their rows.
 */
#include <stdio.h>
#include <string.h>

#include "bind.h"

/* ---- boxes ----------------------------------------------------------------------------------- */

struct xt_tensor **xtbind_box(lua_State *L, const struct xtbind *b) {
    struct xt_tensor **box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = NULL;
    lua_rawgeti(L, LUA_REGISTRYINDEX, b->tensor_meta);
    lua_setmetatable(L, -2);
    return box;
}

struct xt_tensor **xtbind_new_box(lua_State *L) {
    return xtbind_box(L, xtbind_of(L));
}

void xtbind_fill(struct xtbind *b, struct xt_tensor **box, struct xt_tensor *t) {
    *box = t;
    if (t) b->refs++;
}

void xtbind_push_tensor(lua_State *L, struct xt_tensor *t) {
    struct xtbind *b = xtbind_of(L);
    xtbind_fill(b, xtbind_box(L, b), t);
}

struct xt_tensor *xtbind_as_tensor(lua_State *L, const struct xtbind *b, int index) {
    struct xt_tensor **box = lua_touserdata(L, index);
    if (!box || !lua_getmetatable(L, index)) return NULL;
    bool is_tensor = lua_topointer(L, -1) == b->tensor_meta_at;
    lua_pop(L, 1);
    return is_tensor ? *box : NULL;
}

struct xt_tensor *xtbind_to_tensor(lua_State *L, int index) {
    return xtbind_as_tensor(L, xtbind_of(L), index);
}

struct xt_tensor *xtbind_check_tensor(lua_State *L, int index) {
    struct xt_tensor *t = xtbind_to_tensor(L, index);
    if (!t) xtbind_error(L, "argument %d is %s, wanted a tensor", index, xtbind_kind(L, index));
    return t;
}

static struct xt_tensor *self_of(lua_State *L, const struct xtbind *b) {
    struct xt_tensor *t = xtbind_as_tensor(L, b, 1);
    if (!t)
        xtbind_error(L, "a method of a tensor was called on %s: write t:name(), not t.name()",
                     xtbind_kind(L, 1));
    return t;
}

/* Freeing the tensor may free the context: the box is emptied first. */
static int collect_box(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    struct xt_tensor **box = lua_touserdata(L, 1);
    struct xt_tensor *t = *box;
    if (!t) return 0;
    *box = NULL;
    xt_tensor_release(b->ctx, t);
    xtbind_unref(b);
    return 0;
}

/* ---- arguments that several functions take --------------------------------------------------- */

void xtbind_check_shape(lua_State *L, int index, const char *who, struct xt_spec *spec) {
    if (!lua_istable(L, index))
        xtbind_error(L, "%s: shape is %s, wanted a table of sizes", who, xtbind_kind(L, index));
    lua_Integer n = luaL_len(L, index);
    if (n > XT_MAX_DIMS)
        xtbind_error(L, "%s: shape has %I dimensions, at most %d are possible", who, n,
                     XT_MAX_DIMS);
    spec->ndim = (int)n;
    for (int d = 0; d < spec->ndim; d++) {
        lua_geti(L, index, d + 1);
        if (!xtbind_to_int(L, -1, &spec->shape[d]) || spec->shape[d] < 0)
            xtbind_error(L, "%s: shape[%d] is %s, wanted a size", who, d + 1, xtbind_kind(L, -1));
        lua_pop(L, 1);
    }
}

enum xt_dtype xtbind_check_dtype(lua_State *L, int index, const char *who) {
    enum xt_dtype dtype = XT_F32;
    const char *text = lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index) : NULL;
    if (!text || !xt_dtype_parse(text, &dtype)) {
        if (text) lua_pushfstring(L, "'%s'", text);
        xtbind_error(L, "%s: dtype is %s, wanted one of f32, bf16, f16, f64, i32, i64, u8", who,
                     text ? lua_tostring(L, -1) : xtbind_kind(L, index));
    }
    return dtype;
}

/* ---- reading --------------------------------------------------------------------------------- */

static void push_element(lua_State *L, enum xt_dtype dtype, const void *data, int64_t i) {
    switch (dtype) {
    case XT_F32: lua_pushnumber(L, (double)((const float *)data)[i]); break;
    case XT_F64: lua_pushnumber(L, ((const double *)data)[i]); break;
    case XT_I32: lua_pushinteger(L, ((const int32_t *)data)[i]); break;
    case XT_I64: lua_pushinteger(L, ((const int64_t *)data)[i]); break;
    default: lua_pushinteger(L, ((const uint8_t *)data)[i]); break;
    }
}

static void push_at(lua_State *L, struct xtbind *b, struct xt_tensor *t, const int64_t *index) {
    if (xt_dtype_is_float(xt_dtype_of(t))) {
        double value = 0;
        xtbind_check(L, xt_tensor_get(b->ctx, t, index, &value));
        lua_pushnumber(L, value);
    } else {
        int64_t value = 0;
        xtbind_check(L, xt_tensor_get_int(b->ctx, t, index, &value));
        lua_pushinteger(L, value);
    }
}

static int item(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b);
    char text[128];
    if (xt_numel(t) != 1)
        xtbind_error(L, "item: the tensor is %s, wanted one element",
                     xt_describe(t, text, sizeof text));
    push_at(L, b, t, (int64_t[XT_MAX_DIMS]){0});
    return 1;
}

/* core.at(t, i, j, ...): one element, positions from 1; for printing. */
static int at(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b);
    int64_t index[XT_MAX_DIMS];
    for (int d = 0; d < xt_ndim(t); d++) {
        if (!xtbind_to_int(L, d + 2, &index[d]) || index[d] < 1 || index[d] > xt_shape(t)[d])
            xtbind_error(L, "at: position %d is %s, the size there is %I", d + 1,
                         xtbind_kind(L, d + 2), (lua_Integer)xt_shape(t)[d]);
        index[d]--;
    }
    push_at(L, b, t, index);
    return 1;
}

/* The elements from *next on as nested tables, dimensions dim..; row-major. */
static void push_rows(lua_State *L, const struct xt_spec *spec, int dim, const void *data,
                      int64_t *next) {
    if (dim == spec->ndim) {
        push_element(L, spec->dtype, data, (*next)++);
        return;
    }
    int64_t n = spec->shape[dim];
    luaL_checkstack(L, 4, "totable");
    lua_createtable(L, n < (1 << 28) ? (int)n : 0, 0);
    for (int64_t i = 0; i < n; i++) {
        push_rows(L, spec, dim + 1, data, next);
        lua_rawseti(L, -2, i + 1);
    }
}

static int totable(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b);
    enum xt_dtype dtype = xt_dtype_of(t);
    enum xt_dtype wide = dtype == XT_BF16 || dtype == XT_F16 ? XT_F32 : dtype;
    size_t bytes = (size_t)xt_numel(t) * xt_dtype_bytes(wide);
    void *data = lua_newuserdatauv(L, bytes ? bytes : 1, 0);
    struct xt_tensor **box = xtbind_box(L, b), *cast = NULL;
    xt_no_grad_push(b->ctx);
    enum xt_status status = xt_cast(b->ctx, t, wide, &cast);
    xt_no_grad_pop(b->ctx);
    xtbind_check(L, status);
    xtbind_fill(b, box, cast);
    xtbind_check(L, xt_tensor_to_host(b->ctx, cast, data, bytes));
    struct xt_spec spec;
    int64_t next = 0;
    xt_spec_of(cast, &spec);
    push_rows(L, &spec, 0, data, &next);
    return 1;
}

static int bytes_of(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b);
    size_t bytes = xt_nbytes(t);
    luaL_Buffer buffer;
    char *data = luaL_buffinitsize(L, &buffer, bytes);
    xtbind_check(L, xt_tensor_to_host(b->ctx, t, data, bytes));
    luaL_pushresultsize(&buffer, bytes);
    return 1;
}

/* 16 digits of hexadecimal: it prints, compares and goes through JSON unchanged. */
static int digest(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    uint64_t h = 0;
    char text[17];
    xtbind_check(L, xt_tensor_digest(b->ctx, self_of(L, b), &h));
    snprintf(text, sizeof text, "%016llx", (unsigned long long)h);
    lua_pushstring(L, text);
    return 1;
}

static int is_contiguous(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    lua_pushboolean(L, xt_is_contiguous(self_of(L, b)));
    return 1;
}

static int strides(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b);
    lua_createtable(L, xt_ndim(t), 0);
    for (int d = 0; d < xt_ndim(t); d++) {
        lua_pushinteger(L, xt_strides(t)[d]);
        lua_rawseti(L, -2, d + 1);
    }
    return 1;
}

static int shares_storage(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b), *other = xtbind_as_tensor(L, b, 2);
    lua_pushboolean(L, other && xt_same_storage(t, other));
    return 1;
}

/* ---- new tensors from old -------------------------------------------------------------------- */

static int detach(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b), *out = NULL;
    struct xt_tensor **box = xtbind_box(L, b);
    xtbind_check(L, xt_detach(b->ctx, t, &out));
    xtbind_fill(b, box, out);
    return 1;
}

/* t:to("bf16"), t:to("cpu"), t:to("cpu", "bf16") in any order. A variable's half-width copy is its
   compute copy. What is so already is returned itself. No gradient crosses to another device. */
static int to(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b), *out = NULL;
    enum xt_dtype dtype = xt_dtype_of(t);
    enum xt_device device = xt_device_of(t);
    if (lua_gettop(L) < 2) xtbind_error(L, "to: wanted a dtype or a device");
    for (int i = 2; i <= lua_gettop(L); i++) {
        const char *text = lua_type(L, i) == LUA_TSTRING ? lua_tostring(L, i) : "";
        if (strcmp(text, "cpu") == 0 || strcmp(text, "cuda") == 0)
            device = xtbind_check_device(L, i, "to");
        else
            dtype = xtbind_check_dtype(L, i, "to");
    }
    if (device != xt_device_of(t)) {
        struct xt_tensor **box = xtbind_box(L, b);
        if (xt_requires_grad(t) && xt_recording(b->ctx))
            xtbind_error(L, "to: no gradient crosses from %s to %s: take t:detach() along",
                         xt_device_name(xt_device_of(t)), xt_device_name(device));
        xtbind_check(L, xt_tensor_to_device(b->ctx, t, device, &out));
        xtbind_fill(b, box, out);
        t = out;
        lua_replace(L, 1);
        out = NULL;
    }
    if (dtype == xt_dtype_of(t)) {
        lua_settop(L, 1);
        return 1;
    }
    struct xt_tensor **box = xtbind_box(L, b);
    bool copy = xt_is_leaf(t) && xt_dtype_of(t) == XT_F32 && (dtype == XT_BF16 || dtype == XT_F16);
    xtbind_check(L,
                 copy ? xt_compute_copy(b->ctx, t, dtype, &out) : xt_cast(b->ctx, t, dtype, &out));
    xtbind_fill(b, box, out);
    xtbind_collect(b, false);
    return 1;
}

/* ---- autograd -------------------------------------------------------------------------------- */

/* Reads an options table at index: {retain = true}. */
static bool check_retain(lua_State *L, int index, const char *who) {
    if (lua_isnoneornil(L, index)) return false;
    if (!lua_istable(L, index))
        xtbind_error(L, "%s: options are %s, wanted a table like {retain = true}", who,
                     xtbind_kind(L, index));
    lua_pushnil(L);
    while (lua_next(L, index)) {
        if (lua_type(L, -2) != LUA_TSTRING || strcmp(lua_tostring(L, -2), "retain") != 0)
            xtbind_error(L, "%s: unknown option %s; the options are 'retain'", who,
                         luaL_tolstring(L, -2, NULL));
        lua_pop(L, 1);
    }
    lua_getfield(L, index, "retain");
    bool retain = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return retain;
}

bool xtbind_check_seed_and_retain(lua_State *L, int index, const char *who,
                                  struct xt_tensor **seed) {
    *seed = xtbind_to_tensor(L, index);
    if (!*seed && !lua_isnoneornil(L, index)) {
        if (lua_istable(L, index)) return check_retain(L, index, who);
        xtbind_error(L, "%s: seed is %s, wanted a tensor", who, xtbind_kind(L, index));
    }
    return check_retain(L, index + 1, who);
}

static int backward(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b), *seed;
    bool retain = xtbind_check_seed_and_retain(L, 2, "backward", &seed);
    xtbind_collect_soon(b);
    b->walks++;
    enum xt_status status = xt_backward(b->ctx, t, seed, retain);
    b->walks--;
    xtbind_check(L, status);
    xtbind_collect(b, false);
    return 0;
}

static int zero_grad(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b);
    xt_zero_grad(b->ctx, t);
    return 0;
}

/* ---- properties ------------------------------------------------------------------------------ */

enum property { SHAPE = 1, NDIM, NUMEL, DTYPE, DEVICE, GRAD, IS_VAR, REQUIRES_GRAD };

static int push_property(lua_State *L, struct xtbind *b, struct xt_tensor *t, lua_Integer which) {
    switch (which) {
    case SHAPE:
        lua_createtable(L, xt_ndim(t), 0);
        for (int d = 0; d < xt_ndim(t); d++) {
            lua_pushinteger(L, xt_shape(t)[d]);
            lua_rawseti(L, -2, d + 1);
        }
        break;
    case NDIM: lua_pushinteger(L, xt_ndim(t)); break;
    case NUMEL: lua_pushinteger(L, xt_numel(t)); break;
    case DTYPE: lua_pushstring(L, xt_dtype_name(xt_dtype_of(t))); break;
    case DEVICE: lua_pushstring(L, xt_device_name(xt_device_of(t))); break;
    case GRAD: {
        struct xt_tensor *grad = xt_grad_of(t);
        if (!grad)
            lua_pushnil(L);
        else {
            struct xt_tensor **box = xtbind_box(L, b);
            xtbind_fill(b, box, xt_tensor_retain(grad));
        }
        break;
    }
    case IS_VAR: lua_pushboolean(L, xt_is_leaf(t)); break;
    default: lua_pushboolean(L, xt_requires_grad(t)); break;
    }
    return 1;
}

/* select(t, 1, i), i from 1 or from the end; the box is on the stack. */
static int select_first(lua_State *L, struct xtbind *b, struct xt_tensor *t, int64_t i) {
    struct xt_tensor **box = xtbind_box(L, b), *out = NULL;
    int64_t n = xt_ndim(t) ? xt_shape(t)[0] : 0;
    char text[128];
    if (i == 0 || i > n || i < -n)
        xtbind_error(L, "position %I is outside 1..%I of the first dimension (%s)", (lua_Integer)i,
                     (lua_Integer)n, xt_describe(t, text, sizeof text));
    const struct xt_op *op = xt_op_find(b->ctx, "select");
    struct xt_args args;
    xt_args_init(&args, op, &t, 1);
    args.attrs[0].i = 0;
    args.attrs[1].i = i < 0 ? i + n : i - 1;
    xtbind_check(L, xt_call_run(b->ctx, op, &args, &out));
    xtbind_fill(b, box, out);
    return 1;
}

/* Upvalue 2: names -> property number, or method. t[i] past the end is nil, so that ipairs ends. */
static int index_tensor(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    struct xt_tensor *t = *(struct xt_tensor **)lua_touserdata(L, 1);
    b->L = L;
    if (!t) return 0;
    if (lua_type(L, 2) == LUA_TSTRING) {
        lua_pushvalue(L, 2);
        if (lua_rawget(L, lua_upvalueindex(2)) == LUA_TNUMBER)
            return push_property(L, b, t, lua_tointeger(L, -1));
        if (!lua_isnil(L, -1)) return 1;
        const char *given = lua_tostring(L, 2);
        const char *near = xtbind_near(L, given, lua_upvalueindex(2));
        if (near)
            xtbind_error(L, "a tensor has no property or method '%s' (did you mean '%s'?)", given,
                         near);
        xtbind_error(L, "a tensor has no property or method '%s'; methods are called t:%s(...)",
                     given, given);
    }
    int64_t i;
    if (!xtbind_to_int(L, 2, &i))
        xtbind_error(L, "a tensor is indexed by %s, wanted a position or a name",
                     xtbind_kind(L, 2));
    if (xt_ndim(t) && i == xt_shape(t)[0] + 1) return 0;
    return select_first(L, b, t, i);
}

/* t[i] = tensor or number: a write in place along dimension 1, by the rules of copy_ and fill_. */
static int new_index_tensor(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b);
    int64_t i;
    if (!xtbind_to_int(L, 2, &i))
        xtbind_error(L, "the property '%s' of a tensor is read-only", luaL_tolstring(L, 2, NULL));
    struct xt_tensor *value = xtbind_as_tensor(L, b, 3);
    if (!value && lua_type(L, 3) != LUA_TNUMBER)
        xtbind_error(L, "t[%I] = %s: wanted a tensor or a number", (lua_Integer)i,
                     xtbind_kind(L, 3));
    if (xt_requires_grad(t) && xt_recording(b->ctx))
        xtbind_error(L,
                     "t[%I] = value: t requires a gradient, which a change in place would lose; "
                     "build the tensor with xt.stack or xt.where, or use no_grad",
                     (lua_Integer)i);
    select_first(L, b, t, i);
    struct xt_tensor *row = xtbind_as_tensor(L, b, -1);
    struct xt_tensor *outputs[XT_MAX_OUTPUTS] = {NULL};
    struct xt_args args;
    struct xt_tensor *inputs[2] = {row, value};
    const struct xt_op *op = xt_op_find(b->ctx, value ? "copy_" : "fill_");
    xt_args_init(&args, op, inputs, value ? 2 : 1);
    if (!value) args.attrs[0].f = lua_tonumber(L, 3);
    xtbind_check(L, xt_call_run(b->ctx, op, &args, outputs));
    return 0;
}

static int length(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *t = self_of(L, b);
    if (xt_ndim(t) == 0) xtbind_error(L, "# of a scalar: it has no first dimension");
    lua_pushinteger(L, xt_shape(t)[0]);
    return 1;
}

static int equal(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_tensor *x = xtbind_as_tensor(L, b, 1), *y = xtbind_as_tensor(L, b, 2);
    lua_pushboolean(L, x && x == y);
    return 1;
}

static int to_string(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    if (!xtbind_as_tensor(L, b, 1)) {
        lua_pushliteral(L, "tensor (released)");
        return 1;
    }
    lua_getglobal(L, "require");
    lua_pushliteral(L, "xtrain.print");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "text");
    lua_pushvalue(L, 1);
    lua_call(L, 1, 1);
    return 1;
}

/* ---- opening --------------------------------------------------------------------------------- */

void xtbind_open_tensor(lua_State *L, struct xtbind *b) {
    static const luaL_Reg metas[] = {{"__gc", collect_box},     {"__newindex", new_index_tensor},
                                     {"__len", length},         {"__eq", equal},
                                     {"__tostring", to_string}, {NULL, NULL}};
    static const luaL_Reg methods[] = {{"item", item},
                                       {"totable", totable},
                                       {"bytes", bytes_of},
                                       {"digest", digest},
                                       {"is_contiguous", is_contiguous},
                                       {"strides", strides},
                                       {"shares_storage", shares_storage},
                                       {"detach", detach},
                                       {"to", to},
                                       {"backward", backward},
                                       {"zero_grad", zero_grad},
                                       {NULL, NULL}};
    static const struct {
        const char *name;
        enum property which;
    } properties[] = {
        {"shape", SHAPE},   {"ndim", NDIM}, {"numel", NUMEL},   {"dtype", DTYPE},
        {"device", DEVICE}, {"grad", GRAD}, {"is_var", IS_VAR}, {"requires_grad", REQUIRES_GRAD}};
    lua_getfield(L, -1, "core");
    int core = lua_gettop(L);
    lua_createtable(L, 0, 16); /* the metatable */
    lua_pushlightuserdata(L, b);
    luaL_setfuncs(L, metas, 1);
    lua_pushliteral(L, "xtrain.tensor");
    lua_setfield(L, -2, "__name");
    lua_createtable(L, 0, 150); /* names */
    lua_pushlightuserdata(L, b);
    luaL_setfuncs(L, methods, 1);
    for (size_t i = 0; i < sizeof properties / sizeof *properties; i++) {
        lua_pushinteger(L, properties[i].which);
        lua_setfield(L, -2, properties[i].name);
    }
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "__names"); /* for completion */
    lua_pushvalue(L, -1);
    lua_setfield(L, core, "tensor_names"); /* op.c adds the ops; init.lua the rest */
    lua_pushlightuserdata(L, b);
    lua_insert(L, -2);
    lua_pushcclosure(L, index_tensor, 2);
    lua_setfield(L, -2, "__index");
    b->tensor_meta_at = lua_topointer(L, -1);
    lua_pushvalue(L, -1);
    lua_setfield(L, core, "tensor_meta");
    b->tensor_meta = luaL_ref(L, LUA_REGISTRYINDEX);
    lua_pushlightuserdata(L, b);
    lua_pushcclosure(L, at, 1);
    lua_setfield(L, core, "at");
    lua_settop(L, core - 1);
}
