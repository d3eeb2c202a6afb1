/*
 * call.h: what the C tests of ops share: tensors from arrays and back, and calls by name. All of it
 * asserts; a tensor made here is released by the caller.
 */
#ifndef XT_TEST_CALL_H
#define XT_TEST_CALL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static inline void ok(struct xt_ctx *ctx, enum xt_status status) {
    if (status != XT_OK) fail_msg("%s: %s", xt_status_name(status), xt_error(ctx));
}

static inline struct xt_spec spec_of(enum xt_dtype dtype, int ndim, int64_t a, int64_t b, int64_t c,
                                     int64_t d) {
    return (struct xt_spec){dtype, ndim, {a, b, c, d}};
}

/* A tensor of any dtype from doubles, each rounded once. */
static inline struct xt_tensor *from_doubles(struct xt_ctx *ctx, struct xt_spec spec,
                                             const double *values) {
    struct xt_spec wide = spec;
    struct xt_tensor *t, *out;
    int64_t n = 1;
    for (int d = 0; d < spec.ndim; d++) n *= spec.shape[d];
    wide.dtype = XT_F64;
    ok(ctx, xt_tensor_from_host(ctx, &wide, XT_CPU, values, (size_t)n * sizeof *values, &t));
    ok(ctx, xt_cast(ctx, t, spec.dtype, &out));
    xt_tensor_release(ctx, t);
    return out;
}

/* Numbers between -1 and 1 that depend on seed and place alone. */
static inline struct xt_tensor *made_up(struct xt_ctx *ctx, struct xt_spec spec, uint64_t seed) {
    int64_t n = 1;
    for (int d = 0; d < spec.ndim; d++) n *= spec.shape[d];
    double *values = malloc(((size_t)n + 1) * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < n; i++)
        values[i] = (double)(xt_seed_mix(seed, (uint64_t)i) >> 11) * 0x1p-52 - 1;
    struct xt_tensor *t = from_doubles(ctx, spec, values);
    free(values);
    return t;
}

/* Element i in row-major order. */
static inline double value_at(struct xt_ctx *ctx, struct xt_tensor *t, int64_t i) {
    int64_t index[XT_MAX_DIMS];
    double value;
    for (int d = xt_ndim(t) - 1; d >= 0; d--) {
        index[d] = i % xt_shape(t)[d];
        i /= xt_shape(t)[d];
    }
    ok(ctx, xt_tensor_get(ctx, t, index, &value));
    return value;
}

static inline void assert_values(struct xt_ctx *ctx, struct xt_tensor *t, const double *wanted,
                                 double tolerance) {
    for (int64_t i = 0; i < xt_numel(t); i++) {
        double got = value_at(ctx, t, i);
        if (!(fabs(got - wanted[i]) <= tolerance))
            fail_msg("element %lld is %.9g, wanted %.9g", (long long)i, got, wanted[i]);
    }
}

/* Within `tolerance` times (1 + |b|) of each other. */
static inline void assert_close(struct xt_ctx *ctx, struct xt_tensor *a, struct xt_tensor *b,
                                double tolerance) {
    assert_int_equal(xt_numel(a), xt_numel(b));
    for (int64_t i = 0; i < xt_numel(a); i++) {
        double x = value_at(ctx, a, i), y = value_at(ctx, b, i);
        if (!(fabs(x - y) <= tolerance * (1 + fabs(y))))
            fail_msg("element %lld: %.17g and %.17g", (long long)i, x, y);
    }
}

static inline void assert_same_bits(struct xt_ctx *ctx, struct xt_tensor *a, struct xt_tensor *b) {
    uint64_t x, y;
    ok(ctx, xt_tensor_digest(ctx, a, &x));
    ok(ctx, xt_tensor_digest(ctx, b, &y));
    assert_true(x == y);
}

/* The arguments of `op` with defaults; its row is returned for xt_call_run. */
static inline const struct xt_op *begin(struct xt_ctx *ctx, struct xt_args *args, const char *name,
                                        struct xt_tensor *const *in, int n) {
    const struct xt_op *op = xt_op_find(ctx, name);
    assert_non_null(op);
    xt_args_init(args, op, in, n);
    return op;
}

/* The first output; the others are released. */
static inline struct xt_tensor *run(struct xt_ctx *ctx, const struct xt_op *op,
                                    const struct xt_args *args) {
    struct xt_tensor *out[XT_MAX_OUTPUTS] = {NULL};
    ok(ctx, xt_call_run(ctx, op, args, out));
    for (int i = 1; i < op->n_outputs - op->n_hidden; i++) xt_tensor_release(ctx, out[i]);
    return out[0];
}

static inline struct xt_tensor *var_of(struct xt_ctx *ctx, struct xt_tensor *t) {
    struct xt_tensor *v;
    ok(ctx, xt_var_new(ctx, t, &v));
    return v;
}

static inline void drop(struct xt_ctx *ctx, struct xt_tensor **list, int n) {
    for (int i = 0; i < n; i++) xt_tensor_release(ctx, list[i]);
}

/* A context for each test; nothing may be alive in it at the end. */
static inline int setup(void **state) {
    *state = xt_ctx_new();
    return *state ? 0 : -1;
}

static inline int teardown(void **state) {
    int64_t live = xt_live_count(*state);
    xt_ctx_free(*state);
    return live == 0 ? 0 : -1;
}

#endif
