/* norm_test.c: rmsnorm, layernorm and rope against their formulas and finite differences. */
#include "call.h"

enum { HALF, INTERLEAVED };

static struct xt_tensor *rope(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor *positions,
                              int layout, int64_t offset) {
    struct xt_args args;
    const struct xt_op *op = begin(ctx, &args, "rope", (struct xt_tensor *[]){x, positions}, 2);
    args.attrs[1].i = layout;
    args.attrs[2].i = offset;
    return run(ctx, op, &args);
}

static void both_layouts_of_rope_have_their_values(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = from_doubles(ctx, spec_of(XT_F32, 4, 1, 1, 1, 4), (double[]){1, 2, 3, 4});
    struct xt_tensor *half = rope(ctx, x, NULL, HALF, 1);
    struct xt_tensor *interleaved = rope(ctx, x, NULL, INTERLEAVED, 1);
    assert_values(ctx, half, (double[]){-1.984111, 1.959901, 2.462378, 4.019800}, 2e-6);
    assert_values(ctx, interleaved, (double[]){-1.142640, 1.922076, 2.959851, 4.029800}, 2e-6);
    drop(ctx, (struct xt_tensor *[]){x, half, interleaved}, 3);
}

/* Pair 0 of (1, 0) turned by the position gives its cosine: in bf16 too it is that of the exact
 * one. */
static void positions_are_never_rounded_to_bf16(void **state) {
    struct xt_ctx *ctx = *state;
    const double cosines[] = {.8193055, -.9080159, -.8431253};
    const struct xt_spec spec = {.dtype = XT_I64, .ndim = 1, .shape = {3}};
    struct xt_tensor *positions, *x, *y;
    ok(ctx,
       xt_tensor_from_host(ctx, &spec, XT_CPU, (int64_t[]){257, 15962, 15963}, 24, &positions));
    for (int k = 0; k < 2; k++) {
        x = from_doubles(ctx, spec_of(k ? XT_BF16 : XT_F32, 4, 1, 3, 1, 2),
                         (double[]){1, 0, 1, 0, 1, 0});
        y = rope(ctx, x, positions, HALF, 0);
        for (int i = 0; i < 3; i++)
            assert_true(fabs(value_at(ctx, y, 2 * i) - cosines[i]) < (k ? 0x1p-9 : 1e-6));
        drop(ctx, (struct xt_tensor *[]){x, y}, 2);
    }
    xt_tensor_release(ctx, positions);
}

/* Offsets, positions (S) and positions (B, S) that say the same give the same bits. */
static void positions_equal_offsets(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = made_up(ctx, spec_of(XT_F32, 4, 2, 3, 2, 8), 1);
    const struct xt_spec one = {.dtype = XT_I32, .ndim = 1, .shape = {3}};
    const struct xt_spec two = {.dtype = XT_I64, .ndim = 2, .shape = {2, 3}};
    struct xt_tensor *p[2];
    ok(ctx, xt_tensor_from_host(ctx, &one, XT_CPU, (int32_t[]){5, 6, 7}, 12, &p[0]));
    ok(ctx, xt_tensor_from_host(ctx, &two, XT_CPU, (int64_t[]){5, 6, 7, 5, 6, 7}, 48, &p[1]));
    for (int layout = HALF; layout <= INTERLEAVED; layout++) {
        struct xt_tensor *a = rope(ctx, x, NULL, layout, 5);
        for (int k = 0; k < 2; k++) {
            struct xt_tensor *b = rope(ctx, x, p[k], layout, 0);
            assert_same_bits(ctx, a, b);
            xt_tensor_release(ctx, b);
        }
        xt_tensor_release(ctx, a);
    }
    drop(ctx, (struct xt_tensor *[]){x, p[0], p[1]}, 3);
}

/* Sines and cosines against libm over angles of up to a million radians. */
static void rope_turns_by_the_right_angles(void **state) {
    struct xt_ctx *ctx = *state;
    enum { S = 500, D = 16 };
    static double ones[S * D];
    static int64_t places[S];
    for (int i = 0; i < S * D; i++) ones[i] = i % D < D / 2;
    for (int i = 0; i < S; i++) places[i] = i < 250 ? i : (int64_t)i * i * 7 - 500000;
    const struct xt_spec spec = {.dtype = XT_I64, .ndim = 1, .shape = {S}};
    struct xt_tensor *p, *x = from_doubles(ctx, spec_of(XT_F32, 4, 1, S, 1, D), ones);
    ok(ctx, xt_tensor_from_host(ctx, &spec, XT_CPU, places, sizeof places, &p));
    struct xt_tensor *y = rope(ctx, x, p, HALF, 0);
    for (int s = 0; s < S; s++)
        for (int i = 0; i < D / 2; i++) {
            float frequency = 1 / powf(10000.0f, (float)(2 * i) / (float)D);
            float angle = (float)places[s] * frequency;
            assert_true(fabs(value_at(ctx, y, s * D + i) - cos((double)angle)) < 1e-7);
            assert_true(fabs(value_at(ctx, y, s * D + D / 2 + i) - sin((double)angle)) < 1e-7);
        }
    drop(ctx, (struct xt_tensor *[]){x, p, y}, 3);
}

/* ---- gradients along one direction ----------------------------------------------------------- */

/* sum(op(inputs) * weights) with every attribute at its default. */
static struct xt_tensor *score(struct xt_ctx *ctx, const char *name, struct xt_tensor *const *in,
                               int n, struct xt_tensor *weights) {
    struct xt_args args;
    struct xt_tensor *y, *product, *sum;
    const struct xt_op *op = begin(ctx, &args, name, in, n);
    y = run(ctx, op, &args);
    ok(ctx, xt_binary(ctx, "mul", y, weights, &product));
    ok(ctx, xt_unary(ctx, "sum", product, &sum));
    drop(ctx, (struct xt_tensor *[]){y, product}, 2);
    return sum;
}

/* All inputs move at once; NULL ones are left out. */
static void check_gradients(struct xt_ctx *ctx, const char *name, struct xt_tensor *const *in,
                            int n, struct xt_spec out) {
    const double h = 1e-5;
    struct xt_tensor *weights = made_up(ctx, out, 77), *v[4] = {NULL}, *moved[4], *d[4] = {NULL};
    double f[2], dot = 0;
    for (int i = 0; i < n; i++) {
        struct xt_spec spec;
        if (!in[i]) continue;
        xt_spec_of(in[i], &spec);
        d[i] = made_up(ctx, spec, 50 + (uint64_t)i);
        v[i] = var_of(ctx, in[i]);
    }
    for (int side = 0; side < 2; side++) {
        for (int i = 0; i < n; i++) {
            struct xt_tensor *step;
            moved[i] = NULL;
            if (!in[i]) continue;
            ok(ctx, xt_scale(ctx, d[i], side ? -h : h, &step));
            ok(ctx, xt_binary(ctx, "add", in[i], step, &moved[i]));
            xt_tensor_release(ctx, step);
        }
        struct xt_tensor *sum = score(ctx, name, moved, n, weights);
        f[side] = value_at(ctx, sum, 0);
        xt_tensor_release(ctx, sum);
        drop(ctx, moved, n);
    }
    struct xt_tensor *sum = score(ctx, name, v, n, weights);
    ok(ctx, xt_backward(ctx, sum, NULL, false));
    for (int i = 0; i < n; i++)
        for (int64_t j = 0; v[i] && j < xt_numel(v[i]); j++)
            dot += value_at(ctx, xt_grad_of(v[i]), j) * value_at(ctx, d[i], j);
    double slope = (f[0] - f[1]) / (2 * h);
    if (!(fabs(slope - dot) < 1e-7 * (1 + fabs(slope))))
        fail_msg("%s: slope %.12g, gradient %.12g", name, slope, dot);
    drop(ctx, v, n);
    drop(ctx, d, n);
    drop(ctx, (struct xt_tensor *[]){weights, sum}, 2);
}

/* 70 rows: three parts in the sums over rows. */
static void gradients_agree_with_finite_differences(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_spec spec = spec_of(XT_F64, 2, 70, 9, 0, 0), gain = spec_of(XT_F64, 1, 9, 0, 0, 0);
    struct xt_spec heads = spec_of(XT_F64, 4, 2, 5, 3, 8);
    struct xt_tensor *x = made_up(ctx, spec, 1), *w = made_up(ctx, gain, 2);
    struct xt_tensor *b = made_up(ctx, gain, 3), *q = made_up(ctx, heads, 4);
    check_gradients(ctx, "rmsnorm", (struct xt_tensor *[]){x, w}, 2, spec);
    check_gradients(ctx, "layernorm", (struct xt_tensor *[]){x, w, b}, 3, spec);
    check_gradients(ctx, "layernorm", (struct xt_tensor *[]){x, w, NULL}, 3, spec);
    check_gradients(ctx, "layernorm", (struct xt_tensor *[]){x, NULL, b}, 3, spec);
    check_gradients(ctx, "layernorm", (struct xt_tensor *[]){x, NULL, NULL}, 3, spec);
    check_gradients(ctx, "rope", (struct xt_tensor *[]){q, NULL}, 2, heads);
    drop(ctx, (struct xt_tensor *[]){x, w, b, q}, 4);
}

static float to_bf16(double value) {
    union {
        float f;
        uint32_t u;
    } v = {(float)value};
    v.u = (v.u + 0x7FFF + (v.u >> 16 & 1)) & 0xFFFF0000u;
    return v.f;
}

static void rmsnorm_in_bf16_rounds_before_the_gain(void **state) {
    struct xt_ctx *ctx = *state;
    enum { D = 64 };
    struct xt_tensor *x = made_up(ctx, spec_of(XT_BF16, 2, 3, D, 0, 0), 1);
    struct xt_tensor *w = made_up(ctx, spec_of(XT_F32, 1, D, 0, 0, 0), 2);
    struct xt_args args;
    const struct xt_op *op = begin(ctx, &args, "rmsnorm", (struct xt_tensor *[]){x, w}, 2);
    struct xt_tensor *y = run(ctx, op, &args);
    assert_int_equal(xt_dtype_of(y), XT_BF16);
    for (int r = 0; r < 3; r++) {
        double squares = 0;
        int differ = 0;
        for (int i = 0; i < D; i++) squares += pow(value_at(ctx, x, r * D + i), 2);
        double rstd = 1 / sqrt(squares / D + 1e-6);
        for (int i = 0; i < D; i++) {
            double gain = value_at(ctx, w, i), exact = value_at(ctx, x, r * D + i) * rstd;
            differ += (float)value_at(ctx, y, r * D + i) != to_bf16(to_bf16(exact) * gain);
        }
        assert_true(differ <= 1); /* f32 and double may round one apart */
    }
    drop(ctx, (struct xt_tensor *[]){x, w, y}, 3);
}

/* A head slice of a fused projection: strided rows give the bits of a copy. */
static void strided_inputs_equal_copies(void **state) {
    struct xt_ctx *ctx = *state;
    const char *const names[] = {"rmsnorm", "layernorm", "rope"};
    struct xt_tensor *whole = made_up(ctx, spec_of(XT_F32, 4, 3, 40, 4, 16), 1), *x, *copy;
    struct xt_tensor *w = made_up(ctx, spec_of(XT_F32, 1, 16, 0, 0, 0), 2);
    ok(ctx, xt_transpose(ctx, whole, 1, 2, &x));
    ok(ctx, xt_contiguous(ctx, x, &copy));
    for (int k = 0; k < COUNT(names); k++) {
        struct xt_tensor *v[2] = {var_of(ctx, x), var_of(ctx, copy)}, *y[2], *sum;
        struct xt_args args;
        for (int i = 0; i < 2; i++) {
            struct xt_tensor *in[3] = {v[i], k < 2 ? w : NULL, NULL};
            const struct xt_op *op = begin(ctx, &args, names[k], in, k == 1 ? 3 : 2);
            y[i] = run(ctx, op, &args);
            ok(ctx, xt_unary(ctx, "sum", y[i], &sum));
            ok(ctx, xt_backward(ctx, sum, NULL, false));
            xt_tensor_release(ctx, sum);
        }
        assert_same_bits(ctx, y[0], y[1]);
        assert_same_bits(ctx, xt_grad_of(v[0]), xt_grad_of(v[1]));
        drop(ctx, v, 2);
        drop(ctx, y, 2);
    }
    drop(ctx, (struct xt_tensor *[]){whole, x, copy, w}, 4);
}

static void threads_never_show(void **state) {
    struct xt_ctx *ctx = *state;
    const char *const names[] = {"rmsnorm", "layernorm", "rope"};
    const enum xt_dtype dtypes[] = {XT_F32, XT_BF16};
    int before = xt_threads(ctx);
    for (int k = 0; k < 6; k++) {
        const enum xt_dtype dtype = dtypes[k / 3];
        struct xt_tensor *x = made_up(ctx, spec_of(dtype, 4, 2, 170, 4, 24), 1);
        struct xt_tensor *w = made_up(ctx, spec_of(XT_F32, 1, 24, 0, 0, 0), 2);
        struct xt_tensor *upstream = made_up(ctx, spec_of(dtype, 4, 2, 170, 4, 24), 3);
        struct xt_tensor *first[3] = {NULL};
        for (int threads = 1; threads <= 3; threads++) {
            xt_set_threads(ctx, threads);
            struct xt_tensor *v[2] = {var_of(ctx, x), var_of(ctx, w)};
            struct xt_tensor *in[3] = {v[0], k % 3 < 2 ? v[1] : NULL, NULL};
            struct xt_args args;
            const struct xt_op *op = begin(ctx, &args, names[k % 3], in, k % 3 == 1 ? 3 : 2);
            struct xt_tensor *y = run(ctx, op, &args);
            ok(ctx, xt_backward(ctx, y, upstream, false));
            struct xt_tensor *got[3] = {y, xt_grad_of(v[0]), k % 3 < 2 ? xt_grad_of(v[1]) : y};
            for (int i = 0; i < 3; i++) {
                if (threads == 1) first[i] = xt_tensor_retain(got[i]);
                assert_same_bits(ctx, first[i], got[i]);
            }
            drop(ctx, v, 2);
            xt_tensor_release(ctx, y);
        }
        drop(ctx, first, 3);
        drop(ctx, (struct xt_tensor *[]){x, w, upstream}, 3);
    }
    xt_set_threads(ctx, before);
}

static void no_rows_leave_zero_gains(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = made_up(ctx, spec_of(XT_F32, 2, 0, 4, 0, 0), 1);
    struct xt_tensor *w = made_up(ctx, spec_of(XT_F32, 1, 4, 0, 0, 0), 2);
    struct xt_tensor *v[2] = {var_of(ctx, x), var_of(ctx, w)}, *sum;
    struct xt_args args;
    const struct xt_op *op = begin(ctx, &args, "rmsnorm", v, 2);
    struct xt_tensor *y = run(ctx, op, &args);
    ok(ctx, xt_unary(ctx, "sum", y, &sum));
    ok(ctx, xt_backward(ctx, sum, NULL, false));
    assert_values(ctx, xt_grad_of(v[1]), (double[4]){0}, 0);
    drop(ctx, v, 2);
    drop(ctx, (struct xt_tensor *[]){x, w, y, sum}, 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(both_layouts_of_rope_have_their_values),
        TEST(positions_are_never_rounded_to_bf16),
        TEST(positions_equal_offsets),
        TEST(rope_turns_by_the_right_angles),
        TEST(gradients_agree_with_finite_differences),
        TEST(rmsnorm_in_bf16_rounds_before_the_gain),
        TEST(strided_inputs_equal_copies),
        TEST(threads_never_show),
        TEST(no_rows_leave_zero_gains),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
