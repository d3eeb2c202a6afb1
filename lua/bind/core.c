/*
 * core.c: what of `xt` is neither a tensor's nor an op's: constructors, autograd over functions,
 * seeds, memory, and the switches that tests throw.
 */
#include <stdio.h>
#include <string.h>

#include "bind.h"

/* The bind that every function here carries as its first upvalue. */
static struct xtbind *bind_of(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    b->L = L;
    return b;
}

/* ---- devices --------------------------------------------------------------------------------- */

const char *xtbind_device_name(enum xt_device device) {
    return xt_device_name(device);
}

enum xt_device xtbind_check_device(lua_State *L, int index, const char *who) {
    const char *text = lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index) : "";
    struct xt_ctx *ctx = xtbind_ctx(L);
    for (int d = 0; d < XT_DEVICE_COUNT; d++) {
        if (strcmp(text, xt_device_name((enum xt_device)d)) != 0) continue;
        enum xt_status status = xt_device_open(ctx, (enum xt_device)d);
        if (status == XT_OK) return (enum xt_device)d;
        xt_fail_in(ctx, status, who);
        xtbind_check(L, status);
    }
    xtbind_error(L, "%s: device is %s, wanted 'cpu' or 'cuda'", who, xtbind_kind(L, index));
}

static int device(lua_State *L) {
    struct xtbind *b = bind_of(L);
    if (!lua_isnoneornil(L, 1)) {
        b->device = xtbind_check_device(L, 1, "device");
        xt_set_device(b->ctx, b->device);
    }
    lua_pushstring(L, xt_device_name(b->device));
    return 1;
}

/* finish(): waits for every open device, and raises what went wrong there. */
static int finish(lua_State *L) {
    struct xtbind *b = bind_of(L);
    xtbind_check(L, xt_devices_finish(b->ctx));
    return 0;
}

static int devices(lua_State *L) {
    struct xtbind *b = bind_of(L);
    int n = 0;
    lua_newtable(L);
    for (int d = 0; d < XT_DEVICE_COUNT; d++) {
        if (xt_device_open(b->ctx, (enum xt_device)d) != XT_OK) continue;
        lua_pushstring(L, xt_device_name((enum xt_device)d));
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

/* ---- constructors ---------------------------------------------------------------------------- */

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
    struct xtbind *b = bind_of(L);
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
    struct xtbind *b = bind_of(L);
    struct xt_spec spec = {.dtype = XT_F32};
    enum xt_device on = b->device;
    xtbind_check_shape(L, 1, "full", &spec);
    if (lua_type(L, 2) != LUA_TNUMBER)
        xtbind_error(L, "full: value is %s, wanted a number", xtbind_kind(L, 2));
    read_options(L, 3, "full", &spec.dtype, &on);
    return push_full(L, b, &spec, on, lua_tonumber(L, 2), "full");
}

static int from_bytes(lua_State *L) {
    struct xtbind *b = bind_of(L);
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
    struct xtbind *b = bind_of(L);
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

/* ---- autograd -------------------------------------------------------------------------------- */

static int var(lua_State *L) {
    struct xtbind *b = bind_of(L);
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

/* xt.grad(output, {inputs} [, seed] [, {retain = true}]): a table of gradients in the order of the
   inputs; nil where output does not depend on one. */
static int grad(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct xt_tensor *output = xtbind_to_tensor(L, 1), *seed;
    lua_settop(L, 4);
    if (!output) xtbind_error(L, "grad: output is %s, wanted a tensor", xtbind_kind(L, 1));
    if (xtbind_to_tensor(L, 2)) { /* a single input may come bare */
        lua_createtable(L, 1, 0);
        lua_pushvalue(L, 2);
        lua_rawseti(L, -2, 1);
        lua_replace(L, 2);
    }
    if (!lua_istable(L, 2))
        xtbind_error(L, "grad: inputs is %s, wanted a table of tensors", xtbind_kind(L, 2));
    bool retain = xtbind_check_seed_and_retain(L, 3, "grad", &seed);
    int n = (int)lua_rawlen(L, 2);
    size_t bytes = (size_t)(n ? n : 1) * sizeof(struct xt_tensor *);
    struct xt_tensor **inputs = lua_newuserdatauv(L, bytes, 0);
    struct xt_tensor **grads = lua_newuserdatauv(L, bytes, 0);
    lua_createtable(L, n, 0);
    int result = lua_gettop(L);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, 2, i + 1);
        inputs[i] = xtbind_to_tensor(L, -1);
        grads[i] = NULL;
        if (!inputs[i])
            xtbind_error(L, "grad: inputs[%d] is %s, wanted a tensor", i + 1, xtbind_kind(L, -1));
        xtbind_box(L, b);
        lua_rawseti(L, result, i + 1);
        lua_pop(L, 1);
    }
    xtbind_collect_soon(b);
    b->walks++;
    enum xt_status status = xt_grad(b->ctx, output, inputs, n, seed, retain, grads);
    b->walks--;
    if (status != XT_OK) xtbind_error(L, "grad: %s", xt_error(b->ctx));
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, result, i + 1);
        xtbind_fill(b, lua_touserdata(L, -1), grads[i]);
        lua_pop(L, 1);
    }
    for (int i = 0; i < n; i++) {
        if (grads[i]) continue;
        lua_pushnil(L);
        lua_rawseti(L, result, i + 1);
    }
    lua_settop(L, result);
    return 1;
}

static void check_callable(lua_State *L, const char *who) {
    if (lua_isfunction(L, 1)) return;
    if (!luaL_getmetafield(L, 1, "__call"))
        xtbind_error(L, "%s: fn is %s, wanted a function", who, xtbind_kind(L, 1));
    lua_pop(L, 1);
}

static int no_grad(lua_State *L) {
    struct xtbind *b = bind_of(L);
    check_callable(L, "no_grad");
    xt_no_grad_push(b->ctx);
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    xt_no_grad_pop(b->ctx);
    return status == LUA_OK ? lua_gettop(L) : lua_error(L);
}

/* Whether index holds a table of options: all its keys are those of a segment. */
static bool is_segment_options(lua_State *L, int index) {
    if (!lua_istable(L, index) || lua_getmetatable(L, index)) return false;
    bool any = false;
    lua_pushnil(L);
    while (lua_next(L, index)) {
        const char *name = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "";
        any = strcmp(name, "selective") == 0 || strcmp(name, "verify") == 0;
        lua_pop(L, 1);
        if (any) continue;
        lua_pop(L, 1);
        return false;
    }
    return any;
}

/* Reads {selective, verify}, the first argument or the last one, and removes it. */
static struct xt_segment_options segment_options(lua_State *L) {
    struct xt_segment_options options = {false, false};
    int index = lua_gettop(L);
    if (is_segment_options(L, 1))
        index = 1;
    else if (index < 2 || !is_segment_options(L, index))
        return options;
    lua_getfield(L, index, "selective");
    lua_getfield(L, index, "verify");
    options.selective = lua_toboolean(L, -2);
    options.verify = lua_toboolean(L, -1);
    lua_pop(L, 2);
    lua_remove(L, index);
    return options;
}

/* xt.checkpoint([options,] fn, ... [, options]): fn is called once; backward replays records. */
static int checkpoint(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct xt_segment_options options = segment_options(L);
    struct xt_segment *segment = NULL;
    check_callable(L, "checkpoint");
    xtbind_check(L, xt_segment_begin(b->ctx, &options, &segment));
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    if (status != LUA_OK) {
        xt_segment_abort(b->ctx, segment);
        return lua_error(L);
    }
    xtbind_check(L, xt_segment_end(b->ctx, segment));
    return lua_gettop(L);
}

static int is_recording(lua_State *L) {
    lua_pushboolean(L, xt_recording(bind_of(L)->ctx));
    return 1;
}

/* quietly(fn, ...): nothing that fn calls is recorded or trapped: for looking at values. */
static int quietly(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct xt_pause pause;
    xt_pause(b->ctx, &pause);
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    xt_resume(b->ctx, &pause);
    return status == LUA_OK ? lua_gettop(L) : lua_error(L);
}

/* shielded(fn, ...): Ctrl-C waits until fn has returned: for what must not stop half-way. */
static int shielded(lua_State *L) {
    struct xtbind *b = bind_of(L);
    b->shields++;
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    b->shields--;
    return status == LUA_OK ? lua_gettop(L) : lua_error(L);
}

static int set_grad(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct xt_tensor *t = xtbind_check_tensor(L, 1);
    struct xt_tensor *g = lua_isnoneornil(L, 2) ? NULL : xtbind_check_tensor(L, 2);
    xtbind_check(L, xt_set_grad(b->ctx, t, g));
    return 0;
}

/* The compute copy as it is, or nil; for an optimizer, which writes it and then calls the next. */
static int compute_copy_peek(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct xt_tensor *copy = xt_compute_copy_peek(b->ctx, xtbind_check_tensor(L, 1));
    if (!copy) return 0;
    struct xt_tensor **box = xtbind_box(L, b);
    xtbind_fill(b, box, xt_tensor_retain(copy));
    return 1;
}

static int compute_copy_fresh(lua_State *L) {
    bind_of(L);
    xt_compute_copy_fresh(xtbind_check_tensor(L, 1));
    return 0;
}

/* ---- seeds ----------------------------------------------------------------------------------- */

static uint64_t seed_part(lua_State *L, struct xtbind *b, int index) {
    struct xt_tensor *t = xtbind_to_tensor(L, index);
    if (t) {
        int64_t value = 0;
        if (xt_ndim(t) != 0 || xt_dtype_is_float(xt_dtype_of(t)))
            xtbind_error(L, "seed: argument %d is %s, wanted an integer", index,
                         xtbind_kind(L, index));
        xtbind_check(L, xt_tensor_get_int(b->ctx, t, NULL, &value));
        return (uint64_t)value;
    }
    if (lua_type(L, index) == LUA_TSTRING) {
        size_t bytes;
        const char *text = lua_tolstring(L, index, &bytes);
        return xt_hash(text, bytes);
    }
    char what[32];
    snprintf(what, sizeof what, "argument %d", index);
    return xtbind_check_seed(L, index, "seed", what);
}

/* In a graph a seed made of tensors is a value of the graph: a chain of ops, a 0-dim i64. */
static int seed_as_ops(lua_State *L, struct xtbind *b, int n) {
    const struct xt_op *op = xt_op_find(b->ctx, "seed_mix");
    int last = 1; /* where the seed so far is on the stack: a tensor, or nothing but a number */
    for (int i = 2; i <= n; i++) {
        struct xt_tensor *in[2] = {xtbind_as_tensor(L, b, last), xtbind_as_tensor(L, b, i)};
        struct xt_tensor **box = xtbind_box(L, b), *out[XT_MAX_OUTPUTS] = {NULL};
        struct xt_args args;
        xt_args_init(&args, op, in, 2);
        if (!in[0]) args.attrs[0].seed = seed_part(L, b, last);
        if (!in[1]) args.attrs[1].seed = seed_part(L, b, i);
        xtbind_check(L, xt_call_run(b->ctx, op, &args, out));
        xtbind_fill(b, box, out[0]);
        last = lua_gettop(L);
    }
    lua_settop(L, last);
    return 1;
}

static int seed(lua_State *L) {
    struct xtbind *b = bind_of(L);
    int n = lua_gettop(L);
    if (n == 0) xtbind_error(L, "seed: wanted a base, and numbers or strings to mix into it");
    bool tensors = false;
    for (int i = 1; i <= n && !tensors; i++) tensors = xtbind_as_tensor(L, b, i) != NULL;
    if (tensors && xt_graph_recording(b->ctx)) return seed_as_ops(L, b, n);
    uint64_t h = seed_part(L, b, 1);
    for (int i = 2; i <= n; i++) h = xt_seed_mix(h, seed_part(L, b, i));
    lua_pushinteger(L, (lua_Integer)h);
    return 1;
}

/* core.hash(s): XXH3-64 as an integer. */
static int hash(lua_State *L) {
    size_t bytes;
    const char *text = luaL_checklstring(L, 1, &bytes);
    lua_pushinteger(L, (lua_Integer)xt_hash(text, bytes));
    return 1;
}

struct stream {
    uint64_t state; /* of splitmix64: grows by a constant each draw */
    double keep;    /* probability */
};

/* Upvalue 2 is the stream. */
static int draw_mask(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct stream *s = lua_touserdata(L, lua_upvalueindex(2));
    struct xt_spec spec = {.dtype = XT_F32};
    xtbind_check_shape(L, 1, "init.dropout", &spec);
    size_t n = 1;
    for (int d = 0; d < spec.ndim; d++)
        if (__builtin_mul_overflow(n, (size_t)spec.shape[d], &n) || n > SIZE_MAX / 8)
            xtbind_error(L, "init.dropout: a mask of that shape does not fit in memory");
    float *mask = lua_newuserdatauv(L, n ? n * sizeof *mask : 1, 0);
    float value = s->keep > 0 ? (float)(1.0 / s->keep) : 0.0f;
    uint64_t state = s->state;
    for (size_t i = 0; i < n; i++) {
        double u = (double)(xt_splitmix64(state) >> 11) * 0x1p-53;
        state += 0x9E3779B97F4A7C15u;
        mask[i] = u < s->keep ? value : 0.0f;
    }
    struct xt_tensor **box = xtbind_box(L, b), *t = NULL;
    xtbind_check(L, xt_tensor_from_host(b->ctx, &spec, b->device, mask, n * sizeof *mask, &t));
    s->state = state;
    xtbind_fill(b, box, t);
    xtbind_collect(b, false);
    return 1;
}

/* xt.init.dropout(seed, keep) */
static int dropout_stream(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct stream s = {.state = xtbind_check_seed(L, 1, "init.dropout", "seed"), .keep = -1};
    if (lua_type(L, 2) == LUA_TNUMBER) s.keep = lua_tonumber(L, 2);
    if (!(s.keep >= 0 && s.keep <= 1))
        xtbind_error(L, "init.dropout: keep is %s, wanted a number from 0 to 1", xtbind_kind(L, 2));
    lua_pushlightuserdata(L, b);
    memcpy(lua_newuserdatauv(L, sizeof s, 0), &s, sizeof s);
    lua_pushcclosure(L, draw_mask, 2);
    return 1;
}

/* ---- machine and memory ---------------------------------------------------------------------- */

static int threads(lua_State *L) {
    struct xtbind *b = bind_of(L);
    int64_t n = 0;
    if (!lua_isnoneornil(L, 1)) {
        if (!xtbind_to_int(L, 1, &n) || n < 1 || n > 1024)
            xtbind_error(L, "threads: n is %s, wanted 1 to 1024", xtbind_kind(L, 1));
        xt_set_threads(b->ctx, (int)n);
    }
    lua_pushinteger(L, xt_threads(b->ctx));
    return 1;
}

static enum xt_device optional_device(lua_State *L, const struct xtbind *b, int index,
                                      const char *who) {
    return lua_isnoneornil(L, index) ? b->device : xtbind_check_device(L, index, who);
}

static int memory(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct xt_memory m;
    xt_memory(b->ctx, optional_device(L, b, 1, "memory"), &m);
    const struct {
        const char *name;
        lua_Integer value;
    } fields[] = {{"live_bytes", (lua_Integer)m.live_bytes},
                  {"peak_bytes", (lua_Integer)m.peak_bytes},
                  {"reserved_bytes", (lua_Integer)m.reserved_bytes},
                  {"made_bytes", (lua_Integer)m.made_bytes},
                  {"live_storages", m.live_storages},
                  {"system_allocs", m.system_allocs},
                  {"waits", m.waits}};
    lua_createtable(L, 0, 7);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        lua_pushinteger(L, fields[i].value);
        lua_setfield(L, -2, fields[i].name);
    }
    return 1;
}

static int memory_reset_peak(lua_State *L) {
    struct xtbind *b = bind_of(L);
    xt_memory_reset_peak(b->ctx, optional_device(L, b, 1, "memory_reset_peak"));
    return 0;
}

static int memory_trim(lua_State *L) {
    struct xtbind *b = bind_of(L);
    xt_memory_trim(b->ctx, optional_device(L, b, 1, "memory_trim"));
    return 0;
}

/* memory_limit(bytes [, device]); 0: none. */
static int memory_limit(lua_State *L) {
    struct xtbind *b = bind_of(L);
    int64_t bytes = 0;
    if (!xtbind_to_int(L, 1, &bytes) || bytes < 0)
        xtbind_error(L, "memory_limit: bytes is %s, wanted 0 or more", xtbind_kind(L, 1));
    xt_memory_limit(b->ctx, optional_device(L, b, 2, "memory_limit"), (size_t)bytes);
    return 0;
}

struct holder {
    struct xt_where where; /* the line that made them */
    size_t bytes;          /* of its storages together */
    int64_t storages;      /* their count */
};

struct holders {
    struct holder list[64]; /* by falling size */
    int n;                  /* used of list */
};

static void note_holder(void *user, struct xt_where where, size_t bytes, int64_t storages) {
    struct holders *h = user;
    if (h->n < 64) h->list[h->n++] = (struct holder){where, bytes, storages};
}

static void push_where(lua_State *L, struct xt_where where) {
    if (where.file)
        lua_pushfstring(L, "%s:%d", where.file, where.line);
    else
        lua_pushliteral(L, "?");
}

/* memory_holders([most [, device]]): {{where, bytes, storages}, ...} by falling size. */
static int memory_holders(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct holders h = {.n = 0};
    int most = (int)luaL_optinteger(L, 1, 16);
    xt_memory_holders(b->ctx, optional_device(L, b, 2, "memory_holders"), most, note_holder, &h);
    lua_createtable(L, h.n, 0);
    for (int i = 0; i < h.n; i++) {
        lua_createtable(L, 0, 3);
        push_where(L, h.list[i].where);
        lua_setfield(L, -2, "where");
        lua_pushinteger(L, (lua_Integer)h.list[i].bytes);
        lua_setfield(L, -2, "bytes");
        lua_pushinteger(L, h.list[i].storages);
        lua_setfield(L, -2, "storages");
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int collect(lua_State *L) {
    xtbind_collect(bind_of(L), true);
    return 0;
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

static int isa(lua_State *L) {
    lua_pushstring(L, xt_isa(bind_of(L)->ctx));
    return 1;
}

/* libraries(): {{name, found, version, detail}, ...} of what is opened at run time. */
static int libraries(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct xt_library library = {.name = "oneDNN"};
    xtbind_check(L, xt_library_onednn(b->ctx, &library));
    lua_createtable(L, 1, 0);
    lua_createtable(L, 0, 4);
    lua_pushstring(L, library.name);
    lua_setfield(L, -2, "name");
    lua_pushboolean(L, library.found);
    lua_setfield(L, -2, "found");
    lua_pushstring(L, library.version);
    lua_setfield(L, -2, "version");
    lua_pushstring(L, library.detail);
    lua_setfield(L, -2, "detail");
    lua_rawseti(L, -2, 1);
    return 1;
}

/* ---- switches for tests and for looking inside ----------------------------------------------- */

static int fail_allocation(lua_State *L) {
    struct xtbind *b = bind_of(L);
    xt_fail_allocation(b->ctx, luaL_checkinteger(L, 1));
    return 0;
}

static int live_count(lua_State *L) {
    lua_pushinteger(L, xt_live_count(bind_of(L)->ctx));
    return 1;
}

static int poison(lua_State *L) {
    xt_memory_poison(bind_of(L)->ctx, lua_toboolean(L, 1));
    return 0;
}

static int cache(lua_State *L) {
    xt_memory_cache(bind_of(L)->ctx, lua_toboolean(L, 1));
    return 0;
}

struct records {
    struct xt_record_info *list; /* NULL while counting */
    int n, room;                 /* seen, and room in list */
};

static void note_record(void *user, const struct xt_record_info *info) {
    struct records *r = user;
    if (r->list && r->n < r->room) r->list[r->n] = *info;
    r->n++;
}

static void push_spec(lua_State *L, const struct xt_spec *spec) {
    luaL_Buffer buffer;
    luaL_buffinit(L, &buffer);
    luaL_addstring(&buffer, xt_dtype_name(spec->dtype));
    luaL_addstring(&buffer, spec->ndim ? " " : " scalar");
    for (int d = 0; d < spec->ndim; d++) {
        char text[32];
        snprintf(text, sizeof text, d ? "x%lld" : "%lld", (long long)spec->shape[d]);
        luaL_addstring(&buffer, text);
    }
    luaL_pushresult(&buffer);
}

/* tape([t]): {{number, op, where, kept_bytes, outputs = {"f32 2x3"}}, ...}, newest first. */
static int tape(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct xt_tensor *t = lua_isnoneornil(L, 1) ? NULL : xtbind_check_tensor(L, 1);
    struct records r = {.list = NULL};
    xtbind_check(L, xt_tape_walk(b->ctx, t, note_record, &r));
    r.room = r.n;
    r.n = 0;
    r.list = lua_newuserdatauv(L, (size_t)(r.room ? r.room : 1) * sizeof *r.list, 0);
    xtbind_check(L, xt_tape_walk(b->ctx, t, note_record, &r));
    lua_createtable(L, r.room, 0);
    for (int i = 0; i < r.room && i < r.n; i++) {
        const struct xt_record_info *info = &r.list[i];
        lua_createtable(L, 0, 5);
        lua_pushinteger(L, info->number);
        lua_setfield(L, -2, "number");
        lua_pushstring(L, info->op->name);
        lua_setfield(L, -2, "op");
        push_where(L, info->where);
        lua_setfield(L, -2, "where");
        lua_pushinteger(L, (lua_Integer)info->kept_bytes);
        lua_setfield(L, -2, "kept_bytes");
        lua_createtable(L, info->n_outputs, 0);
        for (int k = 0; k < info->n_outputs && k < 4; k++) {
            push_spec(L, &info->outputs[k]);
            lua_rawseti(L, -2, k + 1);
        }
        lua_setfield(L, -2, "outputs");
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* maker(t): the name of the op that made t and the line where; nothing for a leaf or a value. */
static int maker(lua_State *L) {
    bind_of(L);
    struct xt_record_info info;
    if (!xt_record_of(xtbind_check_tensor(L, 1), &info)) return 0;
    lua_pushstring(L, info.op->name);
    push_where(L, info.where);
    return 2;
}

/* here(): "FILE:LINE" of the user's code that is running, as records and errors name it. */
static int here(lua_State *L) {
    struct xtbind *b = bind_of(L);
    struct xt_where where;
    xtbind_locate(b, &where);
    push_where(L, where);
    return 1;
}

/* kernels(op name, device): the dtypes of the first argument that have a kernel there. */
static int kernels(lua_State *L) {
    struct xtbind *b = bind_of(L);
    const struct xt_op *op = xt_op_find(b->ctx, luaL_checkstring(L, 1));
    enum xt_device on = xtbind_check_device(L, 2, "kernels");
    int n = 0;
    lua_newtable(L);
    for (int d = 0; op && d < XT_DTYPE_COUNT; d++) {
        if (!xt_op_has_kernel(b->ctx, op, on, (enum xt_dtype)d)) continue;
        lua_pushstring(L, xt_dtype_name((enum xt_dtype)d));
        lua_rawseti(L, -2, ++n);
    }
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
    static const luaL_Reg public[] = {{"device", device},
                                      {"devices", devices},
                                      {"tensor", tensor},
                                      {"zeros", zeros},
                                      {"ones", ones},
                                      {"full", full},
                                      {"from_bytes", from_bytes},
                                      {"var", var},
                                      {"grad", grad},
                                      {"no_grad", no_grad},
                                      {"checkpoint", checkpoint},
                                      {"seed", seed},
                                      {"threads", threads},
                                      {"memory", memory},
                                      {"memory_reset_peak", memory_reset_peak},
                                      {"collect", collect},
                                      {"interrupted", interrupted},
                                      {"isa", isa},
                                      {"compute_copy_peek", compute_copy_peek},
                                      {"compute_copy_fresh", compute_copy_fresh},
                                      {NULL, NULL}};
    static const luaL_Reg private[] = {{"is_recording", is_recording},
                                       {"quietly", quietly},
                                       {"shielded", shielded},
                                       {"polling", polling},
                                       {"maker", maker},
                                       {"set_grad", set_grad},
                                       {"hash", hash},
                                       {"dropout_stream", dropout_stream},
                                       {"memory_trim", memory_trim},
                                       {"memory_limit", memory_limit},
                                       {"memory_holders", memory_holders},
                                       {"libraries", libraries},
                                       {"fail_allocation", fail_allocation},
                                       {"live_count", live_count},
                                       {"poison", poison},
                                       {"cache", cache},
                                       {"tape", tape},
                                       {"here", here},
                                       {"fail", fail},
                                       {"source", source},
                                       {"kernels", kernels},
                                       {"finish", finish},
                                       {"modules", modules},
                                       {NULL, NULL}};
    lua_pushlightuserdata(L, b);
    luaL_setfuncs(L, public, 1);
    lua_pushliteral(L, XT_VERSION);
    lua_setfield(L, -2, "version");
    lua_getfield(L, -1, "core");
    lua_pushlightuserdata(L, b);
    luaL_setfuncs(L, private, 1);
    lua_pop(L, 1);
}
