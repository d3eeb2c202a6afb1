/*
 * op.c: the op userdata: one pointer to its row, callable from Lua.
 *
 * The path of tensors and numbers alone makes no table and no string: it is what a small op costs.
 * All other arguments go through reading.c.
 */
#include <string.h>

#include "op_parts.h"

/* ---- numbers that become tensors ------------------------------------------------------------- */

/* The dtype that numbers take: of the first tensor that is no condition, else f32. */
static enum xt_dtype number_dtype(const struct xtbind_reading *r, enum xt_device *device) {
    int slot = 0;
    *device = r->b->device;
    enum xt_dtype dtype = XT_F32;
    for (const struct xt_param *p = r->op->params; p->name; p++) {
        if (!xt_takes_slot(p)) continue;
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

static void check_numbers(lua_State *L, const struct xtbind_reading *r, enum xt_dtype dtype) {
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
static enum xt_status run(lua_State *L, struct xtbind_reading *r, enum xt_dtype dtype,
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
static int finish(lua_State *L, struct xtbind_reading *r, int first) {
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
static bool read_tensors_alone(lua_State *L, struct xtbind_reading *r, int first) {
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
    struct xtbind_reading r; /* its arrays are filled as they are used */
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
    xtbind_read_arguments(L, &r, first);
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

/* ---- all of them ----------------------------------------------------------------------------- */

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
        int d = xtbind_distance(given, op->name);
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
    set_closure(L, b, "__index", xtbind_op_index);
    set_closure(L, b, "__tostring", xtbind_op_to_string);
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
