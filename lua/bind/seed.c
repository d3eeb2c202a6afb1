/*
 * seed.c: seeds, mixed of numbers and names, and the masks that one seed gives.
 */
#include <stdio.h>
#include <string.h>

#include "bind.h"

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
    struct xtbind *b = xtbind_carried(L);
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
    struct xtbind *b = xtbind_carried(L);
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
    struct xtbind *b = xtbind_carried(L);
    struct stream s = {.state = xtbind_check_seed(L, 1, "init.dropout", "seed"), .keep = -1};
    if (lua_type(L, 2) == LUA_TNUMBER) s.keep = lua_tonumber(L, 2);
    if (!(s.keep >= 0 && s.keep <= 1))
        xtbind_error(L, "init.dropout: keep is %s, wanted a number from 0 to 1", xtbind_kind(L, 2));
    lua_pushlightuserdata(L, b);
    memcpy(lua_newuserdatauv(L, sizeof s, 0), &s, sizeof s);
    lua_pushcclosure(L, draw_mask, 2);
    return 1;
}

void xtbind_open_seed(lua_State *L, struct xtbind *b) {
    static const luaL_Reg public[] = {{"seed", seed}, {NULL, NULL}};
    static const luaL_Reg private[] = {
        {"hash", hash}, {"dropout_stream", dropout_stream}, {NULL, NULL}};
    xtbind_functions(L, b, public, private);
}
