/* reduce_test.c: folds, softmax and its kin, argmax and topk, against plain loops in f64. */
#include "ops.h"

static struct xt_tensor *fold(struct xt_ctx *ctx, const char *name, struct xt_tensor *x, int n,
                              const int64_t *dims, bool keepdim) {
    struct xt_args args;
    const struct xt_op *op;
    struct xt_tensor *y;
    begin(ctx, &args, name, &x, 1, &op);
    xt_args_list(&args, 0, dims, n);
    args.attrs[1].i = keepdim;
    ok(ctx, xt_call_run(ctx, op, &args, &y));
    return y;
}

/* The plain loop: out[place of kept dims] folded in order. kind: s sum, m mean, > amax, < amin,
   n norm.
   size[place] gets the sum of absolute values, from which tolerances follow. */
static int64_t fold_by_hand(char kind, const double *x, int ndim, const int64_t *shape,
                            unsigned mask, double *out, double *size) {
    int64_t n = count_of(ndim, shape), kept = 1, folded = 1;
    for (int d = 0; d < ndim; d++) *(mask & 1u << d ? &folded : &kept) *= shape[d];
    for (int64_t k = 0; k < kept; k++) {
        out[k] = kind == '>' ? -INFINITY : kind == '<' ? INFINITY : 0;
        size[k] = 0;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t rest = i, place = 0, step = 1;
        for (int d = ndim - 1; d >= 0; d--) {
            if (!(mask & 1u << d)) {
                place += rest % shape[d] * step;
                step *= shape[d];
            }
            rest /= shape[d];
        }
        if (kind == '>')
            out[place] = fmax(out[place], x[i]);
        else if (kind == '<')
            out[place] = fmin(out[place], x[i]);
        else
            out[place] += kind == 'n' ? x[i] * x[i] : x[i];
        size[place] += fabs(x[i]);
    }
    for (int64_t k = 0; k < kept; k++) {
        if (kind == 'm') out[k] /= (double)folded;
        if (kind == 'm') size[k] /= (double)folded;
        if (kind == 'n') out[k] = sqrt(out[k]);
    }
    return kept;
}

/* Half an ulp of the dtype's rounding, relative. */
static double rounding(enum xt_dtype dtype) {
    return dtype == XT_F32    ? 0x1p-24
           : dtype == XT_BF16 ? 0x1p-8
           : dtype == XT_F16  ? 0x1p-11
                              : 0x1p-53;
}

static const struct {
    int ndim;
    int64_t shape[5];
} shapes[] = {
    {1, {1}},         {1, {7}},           {1, {200000}},        {2, {3, 5000}},
    {2, {5000, 3}},   {2, {900, 700}},    {2, {1, 40000}},      {3, {4, 129, 33}},
    {3, {2, 1, 600}}, {4, {3, 5, 7, 11}}, {5, {2, 9, 3, 8, 5}}, {3, {2, 20000, 2}},
    {2, {40, 17}},
};

static void folds_agree_with_a_plain_loop(void **state) {
    struct xt_ctx *ctx = *state;
    static const char *const names[] = {"sum", "mean", "amax", "amin", "norm"};
    static const char kinds[] = "sm><n";
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        int ndim = shapes[s].ndim;
        for (unsigned mask = 1; mask < 1u << ndim; mask++)
            for (int k = 0; k < 5; k++) {
                enum xt_dtype dtype = (enum xt_dtype)((s + mask + (unsigned)k) % 4);
                if (s < 3) dtype = k % 2 ? XT_F32 : XT_F64;
                struct xt_tensor *x = make(ctx, dtype, ndim, shapes[s].shape, NULL, s + 1);
                double *in = numbers(ctx, x);
                double *want = malloc((size_t)xt_numel(x) * 8 + 8);
                double *size = malloc((size_t)xt_numel(x) * 8 + 8);
                int64_t dims[5];
                int n = 0;
                for (int d = 0; d < ndim; d++)
                    if (mask & 1u << d) dims[n++] = d;
                int64_t kept = fold_by_hand(kinds[k], in, ndim, shapes[s].shape, mask, want, size);
                struct xt_tensor *y = fold(ctx, names[k], x, n, dims, mask % 2);
                assert_int_equal(xt_numel(y), kept);
                assert_int_equal(xt_ndim(y), mask % 2 ? ndim : ndim - n);
                double *have = numbers(ctx, y);
                /* Three additions in f32 (a tree of eight), all others in f64, and the result's
                   rounding. */
                double adds = dtype == XT_F64 ? 0x1p-40 : 4 * 0x1p-24;
                for (int64_t i = 0; i < kept; i++) {
                    double t = rounding(dtype) * fabs(want[i]) + (k < 2 ? adds * size[i] : 1e-12);
                    if (!(fabs(have[i] - want[i]) <= t * (1 + 1e-9)))
                        fail_msg("%s: shape %zu mask %u: %.9g, wanted %.9g", names[k], s, mask,
                                 have[i], want[i]);
                }
                free(in);
                free(want);
                free(size);
                free(have);
                xt_tensor_release(ctx, x);
                xt_tensor_release(ctx, y);
            }
    }
}

static void folds_give_the_same_bits_at_any_thread_count_and_for_views(void **state) {
    struct xt_ctx *ctx = *state;
    static const char *const names[] = {"sum", "mean", "amax", "norm"};
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(130, 37, 90), NULL, 1);
    struct xt_tensor *t = with_list(ctx, "permute", x, SHAPE(2, 0, 1)), *copy;
    ok(ctx, xt_unary(ctx, "contiguous", t, &copy));
    for (unsigned mask = 1; mask < 8; mask++)
        for (int k = 0; k < 4; k++) {
            int64_t dims[3];
            int n = 0;
            for (int d = 0; d < 3; d++)
                if (mask & 1u << d) dims[n++] = d;
            xt_set_threads(ctx, 1);
            struct xt_tensor *one = fold(ctx, names[k], copy, n, dims, false);
            for (int threads = 2; threads <= 4; threads++) {
                xt_set_threads(ctx, threads);
                struct xt_tensor *y = fold(ctx, names[k], t, n, dims, false);
                want_same_bits(ctx, one, y);
                xt_tensor_release(ctx, y);
            }
            xt_tensor_release(ctx, one);
        }
    xt_tensor_release(ctx, x);
    xt_tensor_release(ctx, t);
    xt_tensor_release(ctx, copy);
}

static void a_long_sum_of_a_tenth_is_exact_to_the_last_bit_of_f32(void **state) {
    struct xt_ctx *ctx = *state;
    enum { N = 1 << 22 };
    struct xt_spec spec = spec_of(XT_F32, SHAPE(N));
    struct xt_tensor *x;
    ok(ctx, xt_full(ctx, &spec, XT_CPU, 0.1, &x));
    struct xt_tensor *y = fold(ctx, "sum", x, 0, NULL, false);
    want_near(ctx, y, (double[]){(double)(float)((double)0.1f * N)}, 0.04); /* one ulp is 0.03125 */
    xt_tensor_release(ctx, x);
    xt_tensor_release(ctx, y);
}

static void integers_sum_to_i64_and_nothing_sums_to_zero(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_U8, SHAPE(3), (double[]){200, 200, 200}, 0);
    struct xt_tensor *y = fold(ctx, "sum", x, 0, NULL, false);
    assert_int_equal(xt_dtype_of(y), XT_I64);
    want_near(ctx, y, (double[]){600}, 0);
    xt_tensor_release(ctx, x);
    xt_tensor_release(ctx, y);
    x = make(ctx, XT_I32, SHAPE(2, 2), (double[]){-3, 4, 7, -9}, 0);
    y = fold(ctx, "amin", x, 1, (int64_t[]){0}, false);
    assert_int_equal(xt_dtype_of(y), XT_I32);
    want_near(ctx, y, (double[]){-3, -9}, 0);
    xt_tensor_release(ctx, x);
    xt_tensor_release(ctx, y);

    x = make(ctx, XT_F32, SHAPE(0, 2), NULL, 0);
    y = fold(ctx, "sum", x, 1, (int64_t[]){0}, false);
    want_near(ctx, y, (double[]){0, 0}, 0);
    xt_tensor_release(ctx, y);
    y = fold(ctx, "mean", x, 0, NULL, false);
    want_near(ctx, y, (double[]){NAN}, 0);
    xt_tensor_release(ctx, y);
    y = fold(ctx, "norm", x, 1, (int64_t[]){1}, true);
    want_shape(y, SHAPE(0, 1));
    xt_tensor_release(ctx, y);
    const struct xt_op *op;
    struct xt_args args;
    begin(ctx, &args, "amax", &x, 1, &op);
    want_failure(ctx, op, &args, XT_SHAPE, "amax: nothing to choose from: x is f32 0x2");
    begin(ctx, &args, "argmax", &x, 1, &op);
    args.attrs[0].i = 0;
    want_failure(ctx, op, &args, XT_SHAPE, "nothing to choose from");
    xt_tensor_release(ctx, x);
}

static void nan_is_the_largest_and_the_smallest(void **state) {
    struct xt_ctx *ctx = *state;
    double values[40];
    for (int at = 0; at < 40; at += 13) {
        for (int i = 0; i < 40; i++) values[i] = i == at ? NAN : noise(1, i);
        struct xt_tensor *x = make(ctx, XT_F32, SHAPE(40), values, 0), *y;
        y = fold(ctx, "amax", x, 0, NULL, false);
        want_near(ctx, y, (double[]){NAN}, 0);
        xt_tensor_release(ctx, y);
        y = fold(ctx, "amin", x, 0, NULL, false);
        want_near(ctx, y, (double[]){NAN}, 0);
        xt_tensor_release(ctx, y);
        y = with_ints(ctx, "argmax", x, 1, (int64_t[]){-1});
        want_near(ctx, y, (double[]){at}, 0);
        xt_tensor_release(ctx, y);
        xt_tensor_release(ctx, x);
    }
}

static void softmax_rows(const double *x, int64_t rows, int64_t n, double *y, double *lse) {
    for (int64_t r = 0; r < rows; r++) {
        double max = -INFINITY, sum = 0;
        for (int64_t j = 0; j < n; j++) max = fmax(max, x[r * n + j]);
        for (int64_t j = 0; j < n; j++) sum += exp(x[r * n + j] - max);
        for (int64_t j = 0; j < n; j++) y[r * n + j] = exp(x[r * n + j] - max) / sum;
        lse[r] = log(sum) + max;
    }
}

static void softmax_and_kin_agree_with_a_plain_loop_along_any_dim(void **state) {
    struct xt_ctx *ctx = *state;
    static const int64_t sizes[][2] = {{1, 1}, {3, 5}, {70, 257}, {2, 5000}, {300, 64}, {5, 0}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int dtype = XT_F32; dtype <= XT_F64; dtype++)
            for (int turned = 0; turned < 2; turned++) {
                int64_t rows = sizes[s][0], n = sizes[s][1];
                struct xt_tensor *x = make(ctx, (enum xt_dtype)dtype, 2, sizes[s], NULL, 5), *t, *b;
                double *in = numbers(ctx, x), *y = malloc((size_t)(rows * n) * 8 + 8);
                double *ly = malloc((size_t)(rows * n) * 8 + 8), *lse = malloc((size_t)rows * 8);
                softmax_rows(in, rows, n, y, lse);
                for (int64_t i = 0; i < rows * n; i++) ly[i] = in[i] - lse[n ? i / n : 0];
                if (turned) { /* the rows stand upright: dim 0 of the contiguous transpose */
                    t = with_ints(ctx, "transpose", x, 2, (int64_t[]){0, 1});
                    ok(ctx, xt_unary(ctx, "contiguous", t, &b));
                    xt_tensor_release(ctx, t);
                } else
                    b = xt_tensor_retain(x);
                int64_t dim = turned ? 0 : -1;
                /* exp is off by an ulp, x - max and the product by half one each. */
                double t_rel = 4 * rounding((enum xt_dtype)dtype) + 1e-15;
                struct xt_tensor *out = with_ints(ctx, "softmax", b, 1, &dim), *back;
                back = turned ? with_ints(ctx, "transpose", out, 2, (int64_t[]){0, 1})
                              : xt_tensor_retain(out);
                want_near(ctx, back, y, t_rel);
                xt_tensor_release(ctx, back);
                xt_tensor_release(ctx, out);
                out = with_ints(ctx, "log_softmax", b, 1, &dim);
                back = turned ? with_ints(ctx, "transpose", out, 2, (int64_t[]){0, 1})
                              : xt_tensor_retain(out);
                want_near(ctx, back, ly, t_rel * 12);
                xt_tensor_release(ctx, back);
                xt_tensor_release(ctx, out);
                out = with_ints(ctx, "logsumexp", b, 1, &dim);
                want_near(ctx, out, lse, t_rel * 12);
                xt_tensor_release(ctx, out);
                free(in);
                free(y);
                free(ly);
                free(lse);
                xt_tensor_release(ctx, x);
                xt_tensor_release(ctx, b);
            }
}

static void logsumexp_of_minus_infinity_alone_has_zero_gradients(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(2), (double[]){-INFINITY, -INFINITY}, 0), *var;
    ok(ctx, xt_var_new(ctx, x, &var));
    struct xt_tensor *y = with_ints(ctx, "logsumexp", var, 1, (int64_t[]){-1});
    want_near(ctx, y, (double[]){-INFINITY}, 0);
    ok(ctx, xt_backward(ctx, y, NULL, false));
    want_near(ctx, xt_grad_of(var), (double[]){0, 0}, 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, var);
    xt_tensor_release(ctx, x);
    x = make(ctx, XT_F32, SHAPE(2), (double[]){INFINITY, 0}, 0);
    y = with_ints(ctx, "logsumexp", x, 1, (int64_t[]){-1});
    want_near(ctx, y, (double[]){INFINITY}, 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, x);
}

static void strided_rows_give_the_known_values(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(2, 3), (double[]){1, 2, 3, 4, 5, 6}, 0);
    struct xt_tensor *t = with_ints(ctx, "transpose", x, 2, (int64_t[]){0, 1}), *y;
    y = fold(ctx, "sum", t, 1, (int64_t[]){1}, false);
    want_near(ctx, y, (double[]){5, 7, 9}, 0);
    xt_tensor_release(ctx, y);
    y = with_ints(ctx, "softmax", t, 1, (int64_t[]){-1});
    want_near(ctx, y, (double[]){.0474259, .9525741, .0474259, .9525741, .0474259, .9525741}, 1e-6);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, t);
    xt_tensor_release(ctx, x);
}

static void argmax_takes_the_first_of_equals_and_cumsum_runs(void **state) {
    struct xt_ctx *ctx = *state;
    enum { N = 5000 };
    double values[N];
    for (int i = 0; i < N; i++) values[i] = i == 3001 || i == 4099 ? 2 : noise(1, i);
    struct xt_tensor *x = make(ctx, XT_BF16, SHAPE(N), values, 0), *y;
    y = with_ints(ctx, "argmax", x, 1, (int64_t[]){-1});
    assert_int_equal(xt_dtype_of(y), XT_I64);
    want_shape(y, 0, NULL);
    want_near(ctx, y, (double[]){3001}, 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, x);
    x = make(ctx, XT_I32, SHAPE(2, 3), (double[]){1, 7, 7, 9, 2, 3}, 0);
    y = with_ints(ctx, "argmax", x, 1, (int64_t[]){0});
    want_near(ctx, y, (double[]){1, 0, 0}, 0);
    xt_tensor_release(ctx, y);
    y = with_ints(ctx, "cumsum", x, 1, (int64_t[]){0});
    want_near(ctx, y, (double[]){1, 7, 7, 10, 9, 10}, 0);
    assert_int_equal(xt_dtype_of(y), XT_I64);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, x);
}

static void topk_falls_and_breaks_ties_by_place(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(6), (double[]){1, 5, 3, 5, NAN, -INFINITY}, 0);
    struct xt_tensor *out[2];
    const struct xt_op *op;
    struct xt_args args;
    for (int k = 0; k <= 6; k++) {
        begin(ctx, &args, "topk", &x, 1, &op);
        args.attrs[0].i = k;
        ok(ctx, xt_call_run(ctx, op, &args, out));
        want_shape(out[0], SHAPE(k));
        want_near(ctx, out[0], (double[]){NAN, 5, 5, 3, 1, -INFINITY}, 0);
        want_near(ctx, out[1], (double[]){4, 1, 3, 2, 0, 5}, 0);
        xt_tensor_release(ctx, out[0]);
        xt_tensor_release(ctx, out[1]);
    }
    args.attrs[0].i = 7;
    want_failure(ctx, op, &args, XT_ARGUMENT, "k is 7, dim 1 has size 6");
    xt_tensor_release(ctx, x);
    /* Many repeated values: the k places are those of a stable sort. */
    enum { N = 1000 };
    x = make(ctx, XT_I32, SHAPE(N), NULL, 8);
    begin(ctx, &args, "topk", &x, 1, &op);
    args.attrs[0].i = 700;
    ok(ctx, xt_call_run(ctx, op, &args, out));
    double *in = numbers(ctx, x), *v = numbers(ctx, out[0]), *at = numbers(ctx, out[1]);
    for (int i = 0; i < 700; i++) {
        assert_true(v[i] == in[(int)at[i]]);
        if (i > 0) assert_true(v[i - 1] > v[i] || (v[i - 1] == v[i] && at[i - 1] < at[i]));
    }
    free(in);
    free(v);
    free(at);
    xt_tensor_release(ctx, out[0]);
    xt_tensor_release(ctx, out[1]);
    xt_tensor_release(ctx, x);
}

static void gradients_agree_with_differences(void **state) {
    struct xt_ctx *ctx = *state;
    static const char *const folds[] = {"sum", "mean", "amax", "amin", "norm"};
    static const char *const alongs[] = {"softmax", "log_softmax", "logsumexp", "cumsum"};
    struct xt_tensor *x = make(ctx, XT_F64, SHAPE(3, 5, 4), NULL, 3);
    const struct xt_op *op;
    struct xt_args args;
    for (int k = 0; k < 5; k++)
        for (unsigned mask = 0; mask < 8; mask++) {
            int64_t dims[3];
            int n = 0;
            for (int d = 0; d < 3; d++)
                if (mask & 1u << d) dims[n++] = d;
            begin(ctx, &args, folds[k], &x, 1, &op);
            xt_args_list(&args, 0, dims, n);
            args.attrs[1].i = mask & 1;
            want_gradient(ctx, op, &args, 0);
        }
    for (int k = 0; k < 4; k++)
        for (int dim = 0; dim < 3; dim++) {
            begin(ctx, &args, alongs[k], &x, 1, &op);
            args.attrs[0].i = dim;
            want_gradient(ctx, op, &args, 0);
        }
    for (int dim = 0; dim < 3; dim++) {
        begin(ctx, &args, "topk", &x, 1, &op);
        args.attrs[0].i = 2;
        args.attrs[1].i = dim;
        want_gradient(ctx, op, &args, 0);
    }
    xt_tensor_release(ctx, x);
}

static void equal_largest_elements_share_the_gradient_and_norm_has_none_at_zero(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(4), (double[]){2, 1, 2, 0}, 0), *var, *y;
    ok(ctx, xt_var_new(ctx, x, &var));
    y = fold(ctx, "amax", var, 0, NULL, false);
    ok(ctx, xt_backward(ctx, y, NULL, false));
    want_near(ctx, xt_grad_of(var), (double[]){.5, 0, .5, 0}, 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, var);
    xt_tensor_release(ctx, x);
    x = make(ctx, XT_F32, SHAPE(2), (double[]){0, 0}, 0);
    ok(ctx, xt_var_new(ctx, x, &var));
    y = fold(ctx, "norm", var, 0, NULL, false);
    ok(ctx, xt_backward(ctx, y, NULL, false));
    want_near(ctx, xt_grad_of(var), (double[]){0, 0}, 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, var);
    xt_tensor_release(ctx, x);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_ctx, close_ctx)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(folds_agree_with_a_plain_loop),
        TEST(folds_give_the_same_bits_at_any_thread_count_and_for_views),
        TEST(a_long_sum_of_a_tenth_is_exact_to_the_last_bit_of_f32),
        TEST(integers_sum_to_i64_and_nothing_sums_to_zero),
        TEST(nan_is_the_largest_and_the_smallest),
        TEST(softmax_and_kin_agree_with_a_plain_loop_along_any_dim),
        TEST(logsumexp_of_minus_infinity_alone_has_zero_gradients),
        TEST(strided_rows_give_the_known_values),
        TEST(argmax_takes_the_first_of_equals_and_cumsum_runs),
        TEST(topk_falls_and_breaks_ties_by_place),
        TEST(gradients_agree_with_differences),
        TEST(equal_largest_elements_share_the_gradient_and_norm_has_none_at_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
