/* random_test.c: the golden masks, and what a seed alone must fix. */
#include "ops.h"

/* dropout_mask, rand and randn: `n` attributes before the seed. */
static struct xt_tensor *drawn(struct xt_ctx *ctx, const char *name, int ndim, const int64_t *shape,
                               double p, uint64_t seed) {
    struct xt_args args;
    const struct xt_op *op;
    struct xt_tensor *none = NULL, *y;
    begin(ctx, &args, name, &none, 1, &op);
    xt_args_list(&args, 0, shape, ndim);
    bool mask = strcmp(name, "dropout_mask") == 0;
    if (mask) args.attrs[1].f = p;
    args.attrs[mask ? 2 : 1].seed = seed;
    ok(ctx, xt_call_run(ctx, op, &args, &y));
    return y;
}

static struct xt_tensor *dropped(struct xt_ctx *ctx, struct xt_tensor *x, double p, uint64_t seed) {
    struct xt_args args;
    const struct xt_op *op;
    struct xt_tensor *in[2] = {x, NULL}, *y;
    begin(ctx, &args, "dropout", in, 2, &op);
    args.attrs[0].f = p;
    args.attrs[1].seed = seed;
    ok(ctx, xt_call_run(ctx, op, &args, &y));
    return y;
}

static void the_golden_masks_are_drawn(void **state) {
    struct xt_ctx *ctx = *state;
    static const struct {
        double p;
        uint64_t seed;
        const char *keeps;
    } rows[] = {
        {0.3, 42, "1011000110111111"},
        {0.5, 42, "1000000110011111"},
        {0.1, 0x8000000000000005, "111111111011111010111111"},
    };
    for (size_t r = 0; r < 3; r++) {
        int64_t n = (int64_t)strlen(rows[r].keeps);
        struct xt_tensor *y = drawn(ctx, "dropout_mask", 1, &n, rows[r].p, rows[r].seed);
        double want[24];
        for (int64_t i = 0; i < n; i++)
            want[i] = rows[r].keeps[i] == '1' ? (double)(float)(1 / (1 - rows[r].p)) : 0;
        want_near(ctx, y, want, 0);
        xt_tensor_release(ctx, y);
    }
}

static void dropout_is_its_mask_and_its_gradient_the_same_mask(void **state) {
    struct xt_ctx *ctx = *state;
    enum { N = 40000 };
    double ones[N];
    for (int i = 0; i < N; i++) ones[i] = 1;
    for (int dtype = XT_F32; dtype <= XT_F64; dtype++) {
        struct xt_tensor *x = make(ctx, (enum xt_dtype)dtype, SHAPE(200, 200), ones, 0), *var;
        ok(ctx, xt_var_new(ctx, x, &var));
        struct xt_tensor *y = dropped(ctx, var, .5, 7);
        struct xt_tensor *mask = drawn(ctx, "dropout_mask", SHAPE(200, 200), .5, 7);
        double *m = numbers(ctx, mask);
        want_near(ctx, y, m, 0);
        ok(ctx, xt_backward(ctx, y, x, false));
        want_near(ctx, xt_grad_of(var), m, 0);
        int kept = 0;
        for (int i = 0; i < N; i++) kept += m[i] != 0;
        assert_in_range(kept, N / 2 - 500, N / 2 + 500); /* five standard deviations */
        free(m);
        xt_tensor_release(ctx, mask);
        xt_tensor_release(ctx, y);
        xt_tensor_release(ctx, var);
        xt_tensor_release(ctx, x);
    }
}

static void dropout_does_not_guess_from_zeros_and_signs(void **state) {
    struct xt_ctx *ctx = *state;
    uint64_t seed = 0; /* one that keeps 0 1 1 0 */
    for (;; seed++) {
        struct xt_tensor *mask = drawn(ctx, "dropout_mask", SHAPE(4), .5, seed);
        double *m = numbers(ctx, mask);
        bool found = m[0] == 0 && m[1] != 0 && m[2] != 0 && m[3] == 0;
        free(m);
        xt_tensor_release(ctx, mask);
        if (found) break;
    }
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(4), (double[]){0, -1, 0, 2}, 0), *var;
    struct xt_tensor *one = make(ctx, XT_F32, SHAPE(4), (double[]){1, 1, 1, 1}, 0);
    ok(ctx, xt_var_new(ctx, x, &var));
    struct xt_tensor *y = dropped(ctx, var, .5, seed);
    want_near(ctx, y, (double[]){0, -2, 0, 0}, 0);
    ok(ctx, xt_backward(ctx, y, one, false));
    want_near(ctx, xt_grad_of(var), (double[]){0, 2, 2, 0}, 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, var);
    xt_tensor_release(ctx, x);
    xt_tensor_release(ctx, one);
}

static void the_ends_of_p_are_exact_and_what_lies_beyond_is_refused(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(3), (double[]){1, INFINITY, -3}, 0);
    struct xt_tensor *y = dropped(ctx, x, 0, 1);
    assert_ptr_equal(x, y);
    xt_tensor_release(ctx, y);
    y = dropped(ctx, x, 1, 1);
    want_near(ctx, y, (double[]){0, 0, 0}, 0);
    xt_tensor_release(ctx, y);
    static const double wrong[] = {-0.1, 1.5, NAN};
    static const char *const text[] = {"dropout: p is -0.1", "dropout: p is 1.5", "nan"};
    for (int i = 0; i < 3; i++) {
        struct xt_args args;
        const struct xt_op *op;
        struct xt_tensor *in[2] = {x, NULL};
        begin(ctx, &args, "dropout", in, 2, &op);
        args.attrs[0].f = wrong[i];
        want_failure(ctx, op, &args, XT_ARGUMENT, text[i]);
        begin(ctx, &args, "dropout_mask", in + 1, 1, &op);
        args.attrs[1].f = wrong[i];
        want_failure(ctx, op, &args, XT_ARGUMENT, "p is");
    }
    xt_tensor_release(ctx, x);
}

static void a_seed_tensor_counts_like_the_same_integer(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(100), NULL, 1), *a, *b, *grad, *var;
    struct xt_tensor *seed = make(ctx, XT_I64, 0, NULL, (double[]){42}, 0);
    struct xt_args args;
    const struct xt_op *op;
    ok(ctx, xt_var_new(ctx, x, &var));
    a = dropped(ctx, x, .3, 42);
    begin(ctx, &args, "dropout", (struct xt_tensor *[]){var, seed}, 2, &op);
    args.attrs[0].f = .3;
    ok(ctx, xt_call_run(ctx, op, &args, &b));
    want_same_bits(ctx, a, b);
    ok(ctx, xt_backward(ctx, b, x, false));
    grad = xt_grad_of(var);
    want_same_bits(ctx, a, grad);
    xt_tensor_release(ctx, a);
    xt_tensor_release(ctx, b);
    xt_tensor_release(ctx, seed);
    xt_tensor_release(ctx, var);
    xt_tensor_release(ctx, x);
}

static void rand_and_randn_have_their_moments_and_known_bits(void **state) {
    struct xt_ctx *ctx = *state;
    enum { N = 1000000 };
    struct xt_tensor *u = drawn(ctx, "rand", SHAPE(N), 0, 3);
    struct xt_tensor *z = drawn(ctx, "randn", SHAPE(N), 0, 3);
    double *x = numbers(ctx, u), *y = numbers(ctx, z), m[6] = {0};
    for (int i = 0; i < N; i++) {
        uint64_t h = xt_splitmix64(3 ^ (uint64_t)i * 0x9E3779B97F4A7C15u);
        assert_true(x[i] == (double)(h >> 40) * 0x1p-24 && x[i] >= 0 && x[i] < 1);
        double r = sqrt(-2 * log((double)((h >> 33) + 1) * 0x1p-31));
        double n = r * cos(2 * acos(-1) * (double)(h >> 2 & 0x7FFFFFFF) * 0x1p-31);
        assert_true(fabs(y[i] - n) <= 0x1p-24 * fabs(n) + 1e-13);
        m[0] += x[i];
        m[1] += x[i] * x[i];
        m[2] += y[i];
        m[3] += y[i] * y[i];
        m[4] += y[i] * y[i] * y[i];
        m[5] += y[i] * y[i] * y[i] * y[i];
    }
    /* Five standard deviations of each mean. */
    assert_true(fabs(m[0] / N - .5) < 5 * .2887 / 1000);
    assert_true(fabs(m[1] / N - 1. / 3) < 5 * .2981 / 1000);
    assert_true(fabs(m[2] / N) < 5 * 1. / 1000);
    assert_true(fabs(m[3] / N - 1) < 5 * 1.414 / 1000);
    assert_true(fabs(m[4] / N) < 5 * 3.873 / 1000);
    assert_true(fabs(m[5] / N - 3) < 5 * 9.798 / 1000);
    free(x);
    free(y);
    xt_tensor_release(ctx, u);
    xt_tensor_release(ctx, z);
}

static void the_number_of_threads_never_shows(void **state) {
    struct xt_ctx *ctx = *state;
    static const char *const names[] = {"dropout_mask", "rand", "randn"};
    for (int k = 0; k < 3; k++) {
        xt_set_threads(ctx, 1);
        struct xt_tensor *one = drawn(ctx, names[k], SHAPE(33333), .2, 9);
        xt_set_threads(ctx, 3);
        struct xt_tensor *three = drawn(ctx, names[k], SHAPE(33333), .2, 9);
        want_same_bits(ctx, one, three);
        xt_tensor_release(ctx, one);
        xt_tensor_release(ctx, three);
    }
}

static void multinomial_draws_by_weight_and_refuses_what_has_none(void **state) {
    struct xt_ctx *ctx = *state;
    enum { ROWS = 20000, V = 4 };
    static double weights[ROWS * V];
    for (int r = 0; r < ROWS; r++) {
        weights[r * V] = 0;
        weights[r * V + 1] = 3;
        weights[r * V + 2] = 0;
        weights[r * V + 3] = 1;
    }
    struct xt_tensor *in[2] = {make(ctx, XT_F32, SHAPE(ROWS, V), weights, 0), NULL}, *y;
    struct xt_args args;
    const struct xt_op *op;
    begin(ctx, &args, "multinomial", in, 2, &op);
    args.attrs[0].seed = 11;
    ok(ctx, xt_call_run(ctx, op, &args, &y));
    want_shape(y, SHAPE(ROWS));
    double *at = numbers(ctx, y);
    int threes = 0;
    for (int r = 0; r < ROWS; r++) {
        assert_true(at[r] == 1 || at[r] == 3);
        threes += at[r] == 3;
    }
    assert_in_range(threes, ROWS / 4 - 310, ROWS / 4 + 310); /* five standard deviations */
    free(at);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, in[0]);
    static const double wrong[][2] = {{0, 0}, {1, -1}, {NAN, 1}, {INFINITY, 1}};
    for (int i = 0; i < 4; i++) {
        in[0] = make(ctx, XT_F32, SHAPE(2, 2), (double[]){1, 1, wrong[i][0], wrong[i][1]}, 0);
        want_failure(ctx, op, &args, XT_VALUE, "multinomial: row 2 of probs");
        xt_tensor_release(ctx, in[0]);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_ctx, close_ctx)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(the_golden_masks_are_drawn),
        TEST(dropout_is_its_mask_and_its_gradient_the_same_mask),
        TEST(dropout_does_not_guess_from_zeros_and_signs),
        TEST(the_ends_of_p_are_exact_and_what_lies_beyond_is_refused),
        TEST(a_seed_tensor_counts_like_the_same_integer),
        TEST(rand_and_randn_have_their_moments_and_known_bits),
        TEST(the_number_of_threads_never_shows),
        TEST(multinomial_draws_by_weight_and_refuses_what_has_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
