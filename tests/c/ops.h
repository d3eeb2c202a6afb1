/*
 * ops.h: what the C tests of ops share: tensors from numbers, calls by name, gradients against
 * differences. Every function fails the running test itself when a call does.
 */
#ifndef XT_TEST_OPS_H
#define XT_TEST_OPS_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../runtime/op.h"

#define MOST 4 /* outputs and inputs of a call in a test */

static inline void ok(struct xt_ctx *ctx, enum xt_status status) {
    if (status != XT_OK) fail_msg("%s: %s", xt_status_name(status), xt_error(ctx));
}

static inline int open_ctx(void **state) {
    *state = xt_ctx_new();
    return *state ? 0 : -1;
}

/* Nothing may be left over from a test. */
static inline int close_ctx(void **state) {
    int64_t left = xt_live_count(*state);
    xt_ctx_free(*state);
    return left == 0 ? 0 : -1;
}

/* The same numbers in every run, uniform in [-1, 1). */
static inline double noise(uint64_t seed, int64_t i) {
    return (double)(xt_splitmix64(seed * 0x10001 + (uint64_t)i) >> 11) * 0x1p-52 - 1;
}

static inline struct xt_spec spec_of(enum xt_dtype dtype, int ndim, const int64_t *shape) {
    struct xt_spec spec = {.dtype = dtype, .ndim = ndim};
    for (int d = 0; d < ndim; d++) spec.shape[d] = shape[d];
    return spec;
}

static inline int64_t count_of(int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) n *= shape[d];
    return n;
}

static inline void put(void *data, enum xt_dtype dtype, int64_t i, double v) {
    switch (dtype) {
    case XT_F32: ((float *)data)[i] = (float)v; break;
    case XT_BF16: ((uint16_t *)data)[i] = xt_f32_to_bf16((float)v); break;
    case XT_F16: ((uint16_t *)data)[i] = xt_f32_to_f16((float)v); break;
    case XT_F64: ((double *)data)[i] = v; break;
    case XT_I32: ((int32_t *)data)[i] = (int32_t)v; break;
    case XT_I64: ((int64_t *)data)[i] = (int64_t)v; break;
    default: ((uint8_t *)data)[i] = (uint8_t)v; break;
    }
}

static inline double pick(const void *data, enum xt_dtype dtype, int64_t i) {
    switch (dtype) {
    case XT_F32: return (double)((const float *)data)[i];
    case XT_BF16: return (double)xt_bf16_to_f32(((const uint16_t *)data)[i]);
    case XT_F16: return (double)xt_f16_to_f32(((const uint16_t *)data)[i]);
    case XT_F64: return ((const double *)data)[i];
    case XT_I32: return ((const int32_t *)data)[i];
    case XT_I64: return (double)((const int64_t *)data)[i];
    default: return ((const uint8_t *)data)[i];
    }
}

/* A tensor holding `values`, rounded to dtype; with values NULL noise of `seed`, times 4 and whole
   for integers (u8: not negative). */
static inline struct xt_tensor *make(struct xt_ctx *ctx, enum xt_dtype dtype, int ndim,
                                     const int64_t *shape, const double *values, uint64_t seed) {
    struct xt_spec spec = spec_of(dtype, ndim, shape);
    int64_t n = count_of(ndim, shape);
    size_t bytes = (size_t)n * xt_dtype_bytes(dtype);
    void *data = malloc(bytes + 8);
    struct xt_tensor *t;
    assert_non_null(data);
    for (int64_t i = 0; i < n; i++) {
        double v = values ? values[i] : noise(seed, i);
        if (!values && !xt_dtype_is_float(dtype)) v = floor(v * 4);
        if (!values && dtype == XT_U8) v = fabs(v);
        put(data, dtype, i, v);
    }
    ok(ctx, xt_tensor_from_host(ctx, &spec, XT_CPU, data, bytes, &t));
    free(data);
    return t;
}

/* The elements in row-major order as doubles; to be freed. */
static inline double *numbers(struct xt_ctx *ctx, struct xt_tensor *t) {
    size_t bytes = xt_nbytes(t);
    void *data = malloc(bytes + 8);
    double *out = malloc(((size_t)xt_numel(t) + 1) * sizeof *out);
    assert_non_null(data);
    assert_non_null(out);
    ok(ctx, xt_tensor_to_host(ctx, t, data, bytes));
    for (int64_t i = 0; i < xt_numel(t); i++) out[i] = pick(data, xt_dtype_of(t), i);
    free(data);
    return out;
}

static inline void want_shape(struct xt_tensor *t, int ndim, const int64_t *shape) {
    assert_int_equal(xt_ndim(t), ndim);
    for (int d = 0; d < ndim; d++) assert_int_equal(xt_shape(t)[d], shape[d]);
}

/* Every element within tolerance of values; NaN is equal to NaN. */
static inline void want_near(struct xt_ctx *ctx, struct xt_tensor *t, const double *values,
                             double tolerance) {
    double *have = numbers(ctx, t);
    for (int64_t i = 0; i < xt_numel(t); i++) {
        bool same = have[i] == values[i] || (isnan(have[i]) && isnan(values[i]));
        if (!same && !(fabs(have[i] - values[i]) <= tolerance))
            fail_msg("element %lld is %.9g, wanted %.9g", (long long)i, have[i], values[i]);
    }
    free(have);
}

static inline void want_same_bits(struct xt_ctx *ctx, struct xt_tensor *a, struct xt_tensor *b) {
    uint64_t x, y;
    ok(ctx, xt_tensor_digest(ctx, a, &x));
    ok(ctx, xt_tensor_digest(ctx, b, &y));
    assert_true(x == y);
}

static inline void begin(struct xt_ctx *ctx, struct xt_args *args, const char *name,
                         struct xt_tensor *const *inputs, int n, const struct xt_op **op) {
    *op = xt_op_find(ctx, name);
    if (!*op) fail_msg("there is no op %s", name);
    xt_args_init(args, *op, inputs, n);
}

/* One tensor in, one out, integers as attributes. */
static inline struct xt_tensor *with_ints(struct xt_ctx *ctx, const char *name, struct xt_tensor *x,
                                          int n, const int64_t *values) {
    struct xt_args args;
    const struct xt_op *op;
    struct xt_tensor *out[MOST];
    begin(ctx, &args, name, &x, 1, &op);
    for (int i = 0; i < n; i++) args.attrs[i].i = values[i];
    ok(ctx, xt_call_run(ctx, op, &args, out));
    return out[0];
}

/* One tensor in, one out, a list as attribute 0. */
static inline struct xt_tensor *with_list(struct xt_ctx *ctx, const char *name, struct xt_tensor *x,
                                          int n, const int64_t *values) {
    struct xt_args args;
    const struct xt_op *op;
    struct xt_tensor *out[MOST];
    begin(ctx, &args, name, &x, 1, &op);
    xt_args_list(&args, 0, values, n);
    ok(ctx, xt_call_run(ctx, op, &args, out));
    return out[0];
}

/* The call fails with this status, its sentence holds `text`, and nothing is left behind. */
static inline void want_failure(struct xt_ctx *ctx, const struct xt_op *op,
                                const struct xt_args *args, enum xt_status status,
                                const char *text) {
    struct xt_tensor *out[MOST];
    int64_t live = xt_live_count(ctx);
    assert_int_equal(xt_call_run(ctx, op, args, out), status);
    if (!strstr(xt_error(ctx), text)) fail_msg("\"%s\" lacks \"%s\"", xt_error(ctx), text);
    assert_int_equal(xt_live_count(ctx), live);
}

/* Lets each allocation of the call fail in turn: the call says so and leaves nothing behind. */
static inline void want_clean_failures(struct xt_ctx *ctx, const struct xt_op *op,
                                       const struct xt_args *args) {
    int64_t live = xt_live_count(ctx);
    for (int n = 1;; n++) {
        struct xt_tensor *out[MOST] = {NULL};
        xt_fail_allocation(ctx, n);
        enum xt_status status = xt_call_run(ctx, op, args, out);
        xt_fail_allocation(ctx, 0);
        for (int k = 0; status == XT_OK && k < op->n_outputs - op->n_hidden; k++)
            xt_tensor_release(ctx, out[k]);
        assert_int_equal(xt_live_count(ctx), live);
        if (status == XT_OK) return;
        assert_int_equal(status, XT_MEMORY);
        assert_true(n < 100);
    }
}

/* sum of out 0 of the call times noise. */
static inline double loss_of(struct xt_ctx *ctx, const struct xt_op *op,
                             const struct xt_args *args) {
    struct xt_tensor *out[MOST] = {NULL};
    ok(ctx, xt_call_run(ctx, op, args, out));
    double *y = numbers(ctx, out[0]), sum = 0;
    for (int64_t i = 0; i < xt_numel(out[0]); i++) sum += y[i] * noise(99, i);
    free(y);
    for (int k = 0; k < op->n_outputs - op->n_hidden; k++) xt_tensor_release(ctx, out[k]);
    return sum;
}

/* Checks the gradient of f64 input `which` along one direction, against a central difference. */
static inline void want_gradient(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, int which) {
    struct xt_tensor *inputs[8], *out[MOST] = {NULL}, *var, *seed;
    struct xt_args moved = *args;
    struct xt_tensor *x = args->inputs[which];
    int64_t n = xt_numel(x);
    want_clean_failures(ctx, op, args);
    double step = 1e-5, along = 0, *values = numbers(ctx, x), *shifted;
    assert_true(args->n_inputs <= 8);
    memcpy(inputs, args->inputs, (size_t)args->n_inputs * sizeof *inputs);
    moved.inputs = inputs;
    shifted = malloc(((size_t)n + 1) * sizeof *shifted);
    assert_non_null(shifted);
    double sides[2];
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < n; i++)
            shifted[i] = values[i] + (side ? step : -step) * noise(7, i);
        inputs[which] = make(ctx, XT_F64, xt_ndim(x), xt_shape(x), shifted, 0);
        sides[side] = loss_of(ctx, op, &moved);
        xt_tensor_release(ctx, inputs[which]);
    }
    ok(ctx, xt_var_new(ctx, x, &var));
    inputs[which] = var;
    want_clean_failures(ctx, op, &moved);
    ok(ctx, xt_call_run(ctx, op, &moved, out));
    seed = make(ctx, XT_F64, xt_ndim(out[0]), xt_shape(out[0]), NULL, 99);
    ok(ctx, xt_backward(ctx, out[0], seed, false));
    struct xt_tensor *grad = xt_grad_of(var);
    if (grad) {
        double *g = numbers(ctx, grad);
        for (int64_t i = 0; i < n; i++) along += g[i] * noise(7, i);
        free(g);
    }
    double difference = (sides[1] - sides[0]) / (2 * step);
    if (!(fabs(difference - along) <= 1e-7 * (1 + fabs(difference))))
        fail_msg("%s: the gradient gives %.12g, differences %.12g", op->name, along, difference);
    xt_tensor_release(ctx, seed);
    xt_tensor_release(ctx, var);
    for (int k = 0; k < op->n_outputs - op->n_hidden; k++) xt_tensor_release(ctx, out[k]);
    free(values);
    free(shifted);
}

#define SHAPE(...)                                                                                 \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]) {                 \
        __VA_ARGS__                                                                                \
    }

#endif
