/* loss_test.c: cross_entropy and linear_cross_entropy against formulas, finite differences and each
   other. */
#include "call.h"

enum { MEAN, SUM, NONE };

static struct xt_tensor *labels_of(struct xt_ctx *ctx, int ndim, int64_t a, int64_t b,
                                   const int32_t *values) {
    struct xt_spec spec = spec_of(XT_I32, ndim, a, b, 0, 0);
    struct xt_tensor *t;
    size_t n = (size_t)(ndim > 0 ? a : 1) * (size_t)(ndim > 1 ? b : 1);
    ok(ctx, xt_tensor_from_host(ctx, &spec, XT_CPU, values, n * sizeof *values, &t));
    return t;
}

/* Labels 0..classes - 1, every seventh ignored. */
static struct xt_tensor *made_up_labels(struct xt_ctx *ctx, int64_t n, int64_t classes) {
    int32_t *values = malloc((size_t)n * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < n; i++)
        values[i] = i % 7 == 3 ? -100 : (int32_t)(xt_seed_mix(5, (uint64_t)i) % (uint64_t)classes);
    struct xt_tensor *t = labels_of(ctx, 1, n, 0, values);
    free(values);
    return t;
}

static struct xt_tensor *cross_entropy(struct xt_ctx *ctx, struct xt_tensor *x,
                                       struct xt_tensor *labels, int reduction, double smoothing) {
    struct xt_args args;
    const struct xt_op *op =
        begin(ctx, &args, "cross_entropy", (struct xt_tensor *[]){x, labels}, 2);
    args.attrs[0].i = reduction;
    args.attrs[2].f = smoothing;
    return run(ctx, op, &args);
}

static struct xt_tensor *linear_cross_entropy(struct xt_ctx *ctx, struct xt_tensor *x,
                                              struct xt_tensor *w, struct xt_tensor *labels,
                                              int reduction, double smoothing) {
    struct xt_args args;
    const struct xt_op *op =
        begin(ctx, &args, "linear_cross_entropy", (struct xt_tensor *[]){x, w, labels}, 3);
    args.attrs[0].i = reduction;
    args.attrs[2].f = smoothing;
    return run(ctx, op, &args);
}

static void of_no_valid_label_the_loss_and_gradients_are_zero(void **state) {
    struct xt_ctx *ctx = *state;
    const double zeros[10] = {0};
    struct xt_tensor *x = from_doubles(ctx, spec_of(XT_F32, 2, 2, 5, 0, 0), zeros);
    struct xt_tensor *v = var_of(ctx, x);
    struct xt_tensor *labels = labels_of(ctx, 1, 2, 0, (int32_t[]){-100, -100});
    struct xt_tensor *loss = cross_entropy(ctx, v, labels, MEAN, 0);
    assert_true(value_at(ctx, loss, 0) == 0);
    ok(ctx, xt_backward(ctx, loss, NULL, false));
    assert_values(ctx, xt_grad_of(v), zeros, 0);
    drop(ctx, (struct xt_tensor *[]){x, v, labels, loss}, 4);
}

static void the_mean_is_over_valid_labels(void **state) {
    struct xt_ctx *ctx = *state;
    const double zeros[10] = {0}, grads[10] = {.2, .2, -.8, .2, .2};
    struct xt_tensor *x = from_doubles(ctx, spec_of(XT_F32, 2, 2, 5, 0, 0), zeros);
    struct xt_tensor *v = var_of(ctx, x);
    struct xt_tensor *labels = labels_of(ctx, 1, 2, 0, (int32_t[]){2, -100});
    struct xt_tensor *loss = cross_entropy(ctx, v, labels, MEAN, 0), *count;
    assert_values(ctx, loss, (double[]){1.609438}, 1e-6);
    ok(ctx, xt_backward(ctx, loss, NULL, false));
    assert_values(ctx, xt_grad_of(v), grads, 1e-6);
    ok(ctx, xt_unary(ctx, "count_valid", labels, &count));
    assert_int_equal(xt_dtype_of(count), XT_I64);
    assert_true(value_at(ctx, count, 0) == 1);
    drop(ctx, (struct xt_tensor *[]){x, v, labels, loss, count}, 5);
}

static void a_label_out_of_range_names_place_and_value(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = made_up(ctx, spec_of(XT_F32, 2, 4, 3, 0, 0), 1);
    struct xt_tensor *w = made_up(ctx, spec_of(XT_F32, 2, 3, 3, 0, 0), 2);
    struct xt_tensor *bad[] = {
        labels_of(ctx, 1, 4, 0, (int32_t[]){0, -100, 7, 8}),
        labels_of(ctx, 1, 4, 0, (int32_t[]){-4, 0, 0, 0}),
    };
    const char *sentences[] = {
        "labels[3] is 7, there are 3 classes (0 to 2) and the ignored label is -100",
        "labels[1] is -4, there are 3 classes (0 to 2) and the ignored label is -100",
    };
    int64_t live = xt_live_count(ctx);
    for (int i = 0; i < 2; i++) {
        struct xt_args args;
        struct xt_tensor *out[XT_MAX_OUTPUTS];
        const struct xt_op *op =
            begin(ctx, &args, "cross_entropy", (struct xt_tensor *[]){x, bad[i]}, 2);
        assert_int_equal(xt_call_run(ctx, op, &args, out), XT_VALUE);
        assert_non_null(strstr(xt_error(ctx), sentences[i]));
        op = begin(ctx, &args, "linear_cross_entropy", (struct xt_tensor *[]){x, w, bad[i]}, 3);
        assert_int_equal(xt_call_run(ctx, op, &args, out), XT_VALUE);
        assert_non_null(strstr(xt_error(ctx), sentences[i]));
        assert_int_equal(xt_live_count(ctx), live);
    }
    struct xt_tensor *good = labels_of(ctx, 1, 4, 0, (int32_t[]){0, 1, 2, 0});
    struct xt_tensor *loss = cross_entropy(ctx, x, good, MEAN, 0);
    assert_true(value_at(ctx, loss, 0) > 0);
    drop(ctx, (struct xt_tensor *[]){x, w, bad[0], bad[1], good, loss}, 6);
}

static void another_label_may_be_the_ignored_one(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = made_up(ctx, spec_of(XT_F32, 2, 2, 3, 0, 0), 1);
    struct xt_tensor *labels = labels_of(ctx, 1, 2, 0, (int32_t[]){255, 1});
    struct xt_args args;
    const struct xt_op *op =
        begin(ctx, &args, "cross_entropy", (struct xt_tensor *[]){x, labels}, 2);
    args.attrs[0].i = NONE;
    args.attrs[1].i = 255;
    struct xt_tensor *loss = run(ctx, op, &args);
    assert_true(value_at(ctx, loss, 0) == 0 && value_at(ctx, loss, 1) > 0);
    drop(ctx, (struct xt_tensor *[]){x, labels, loss}, 3);
}

/* loss of rows of logits, straight from the formula */
static double plain(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor *labels,
                    int reduction, double smoothing) {
    int64_t rows = xt_shape(x)[0], n = xt_shape(x)[1], valid = 0;
    double total = 0;
    for (int64_t i = 0; i < rows; i++) {
        int64_t label = (int64_t)value_at(ctx, labels, i);
        if (label == -100) continue;
        double sum = 0, all = 0;
        for (int64_t j = 0; j < n; j++) {
            sum += exp(value_at(ctx, x, i * n + j));
            all += value_at(ctx, x, i * n + j);
        }
        double lse = log(sum);
        total += (1 - smoothing) * (lse - value_at(ctx, x, i * n + label)) +
                 smoothing * (lse - all / (double)n);
        valid++;
    }
    return reduction == MEAN ? total / (double)valid : total;
}

static void values_follow_the_formula(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = made_up(ctx, spec_of(XT_F64, 2, 30, 11, 0, 0), 9);
    struct xt_tensor *labels = made_up_labels(ctx, 30, 11);
    for (int reduction = MEAN; reduction <= SUM; reduction++)
        for (int s = 0; s < 2; s++) {
            struct xt_tensor *loss = cross_entropy(ctx, x, labels, reduction, 0.1 * s);
            double wanted = plain(ctx, x, labels, reduction, 0.1 * s);
            assert_values(ctx, loss, &wanted, 1e-12 * wanted);
            xt_tensor_release(ctx, loss);
        }
    drop(ctx, (struct xt_tensor *[]){x, labels}, 2);
}

/* The logits as one product, for comparison. */
static struct xt_tensor *logits_of(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor *w) {
    struct xt_tensor *turned, *out;
    ok(ctx, xt_transpose(ctx, w, 0, 1, &turned));
    ok(ctx, xt_binary(ctx, "matmul", x, turned, &out));
    xt_tensor_release(ctx, turned);
    return out;
}

/* 600 rows: two whole blocks of rows and a part. */
static void linear_equals_product_then_loss(void **state) {
    struct xt_ctx *ctx = *state;
    for (int reduction = MEAN; reduction <= NONE; reduction++)
        for (int s = 0; s < 2; s++) {
            struct xt_tensor *x = made_up(ctx, spec_of(XT_F64, 2, 600, 5, 0, 0), 1);
            struct xt_tensor *w = made_up(ctx, spec_of(XT_F64, 2, 37, 5, 0, 0), 2);
            struct xt_tensor *labels = made_up_labels(ctx, 600, 37);
            struct xt_tensor *seed =
                reduction == NONE
                    ? made_up(ctx, spec_of(XT_F64, 1, 600, 0, 0, 0), 3)
                    : from_doubles(ctx, spec_of(XT_F64, 0, 0, 0, 0, 0), (double[]){.7});
            struct xt_tensor *v[2] = {var_of(ctx, x), var_of(ctx, w)};
            struct xt_tensor *u[2] = {var_of(ctx, x), var_of(ctx, w)};
            struct xt_tensor *a = linear_cross_entropy(ctx, v[0], v[1], labels, reduction, .1 * s);
            struct xt_tensor *logits = logits_of(ctx, u[0], u[1]);
            struct xt_tensor *b = cross_entropy(ctx, logits, labels, reduction, .1 * s);
            assert_close(ctx, a, b, 1e-12);
            for (int pass = 0; pass < 2; pass++) { /* the second adds to the first */
                ok(ctx, xt_backward(ctx, a, seed, true));
                ok(ctx, xt_backward(ctx, b, seed, true));
                for (int i = 0; i < 2; i++)
                    assert_close(ctx, xt_grad_of(v[i]), xt_grad_of(u[i]), 1e-12);
            }
            drop(ctx, v, 2);
            drop(ctx, u, 2);
            drop(ctx, (struct xt_tensor *[]){x, w, labels, seed, a, b, logits}, 7);
        }
}

/* Along one direction: f(x + h d) - f(x - h d) over 2h is the gradient times d. */
static void gradients_agree_with_finite_differences(void **state) {
    struct xt_ctx *ctx = *state;
    const double h = 1e-5;
    for (int reduction = MEAN; reduction <= SUM; reduction++) {
        struct xt_spec spec = spec_of(XT_F64, 2, 9, 6, 0, 0);
        struct xt_tensor *x = made_up(ctx, spec, 1), *d = made_up(ctx, spec, 2), *step, *shifted[2];
        struct xt_tensor *labels = made_up_labels(ctx, 9, 6), *v = var_of(ctx, x), *loss;
        double f[2], dot = 0;
        ok(ctx, xt_scale(ctx, d, h, &step));
        ok(ctx, xt_binary(ctx, "add", x, step, &shifted[0]));
        ok(ctx, xt_binary(ctx, "sub", x, step, &shifted[1]));
        for (int i = 0; i < 2; i++) {
            loss = cross_entropy(ctx, shifted[i], labels, reduction, .2);
            f[i] = value_at(ctx, loss, 0);
            xt_tensor_release(ctx, loss);
        }
        loss = cross_entropy(ctx, v, labels, reduction, .2);
        ok(ctx, xt_backward(ctx, loss, NULL, false));
        for (int64_t i = 0; i < 54; i++)
            dot += value_at(ctx, xt_grad_of(v), i) * value_at(ctx, d, i);
        assert_true(fabs((f[0] - f[1]) / (2 * h) - dot) < 1e-8);
        drop(ctx, (struct xt_tensor *[]){x, d, step, shifted[0], shifted[1], labels, v, loss}, 8);
    }
}

static void threads_never_show(void **state) {
    struct xt_ctx *ctx = *state;
    const enum xt_dtype dtypes[] = {XT_F32, XT_BF16};
    int before = xt_threads(ctx);
    for (int k = 0; k < 2; k++) {
        struct xt_tensor *x = made_up(ctx, spec_of(dtypes[k], 2, 600, 24, 0, 0), 1);
        struct xt_tensor *w = made_up(ctx, spec_of(dtypes[k], 2, 301, 24, 0, 0), 2);
        struct xt_tensor *labels = made_up_labels(ctx, 600, 301);
        struct xt_tensor *first[3] = {NULL};
        for (int threads = 1; threads <= 3; threads++) {
            xt_set_threads(ctx, threads);
            struct xt_tensor *v[2] = {var_of(ctx, x), var_of(ctx, w)};
            struct xt_tensor *loss = linear_cross_entropy(ctx, v[0], v[1], labels, MEAN, 0);
            ok(ctx, xt_backward(ctx, loss, NULL, false));
            struct xt_tensor *got[3] = {loss, xt_grad_of(v[0]), xt_grad_of(v[1])};
            for (int i = 0; i < 3; i++) {
                if (threads == 1) first[i] = xt_tensor_retain(got[i]);
                assert_same_bits(ctx, first[i], got[i]);
            }
            drop(ctx, v, 2);
            xt_tensor_release(ctx, loss);
        }
        drop(ctx, first, 3);
        drop(ctx, (struct xt_tensor *[]){x, w, labels}, 3);
    }
    xt_set_threads(ctx, before);
}

static void linear_never_holds_the_full_logits(void **state) {
    struct xt_ctx *ctx = *state;
    const int64_t rows = 2048, classes = 1024;
    struct xt_tensor *x = made_up(ctx, spec_of(XT_F32, 2, rows, 8, 0, 0), 1);
    struct xt_tensor *w = made_up(ctx, spec_of(XT_F32, 2, classes, 8, 0, 0), 2);
    struct xt_tensor *labels = made_up_labels(ctx, rows, classes);
    struct xt_tensor *v[2] = {var_of(ctx, x), var_of(ctx, w)};
    struct xt_memory before, after;
    xt_memory_reset_peak(ctx, XT_CPU);
    xt_memory(ctx, XT_CPU, &before);
    struct xt_tensor *loss = linear_cross_entropy(ctx, v[0], v[1], labels, MEAN, 0);
    ok(ctx, xt_backward(ctx, loss, NULL, false));
    xt_memory(ctx, XT_CPU, &after);
    assert_true(after.peak_bytes - before.live_bytes < (size_t)(rows * classes * 4 / 4));
    drop(ctx, v, 2);
    drop(ctx, (struct xt_tensor *[]){x, w, labels, loss}, 4);
}

/* bf16 inputs exactly representable: the loss differs from f64's by f32 rounding only, gradients of
   x by bf16's 2^-9 of the terms summed, weight's by that of dlogits. */
static void bf16_takes_f32_losses(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = made_up(ctx, spec_of(XT_BF16, 2, 40, 16, 0, 0), 1), *wide_x, *wide_w;
    struct xt_tensor *w = made_up(ctx, spec_of(XT_BF16, 2, 50, 16, 0, 0), 2);
    struct xt_tensor *labels = made_up_labels(ctx, 40, 50);
    ok(ctx, xt_cast(ctx, x, XT_F64, &wide_x));
    ok(ctx, xt_cast(ctx, w, XT_F64, &wide_w));
    struct xt_tensor *v[4] = {var_of(ctx, x), var_of(ctx, w), var_of(ctx, wide_x),
                              var_of(ctx, wide_w)};
    struct xt_tensor *a = linear_cross_entropy(ctx, v[0], v[1], labels, SUM, 0);
    struct xt_tensor *b = linear_cross_entropy(ctx, v[2], v[3], labels, SUM, 0);
    assert_int_equal(xt_dtype_of(a), XT_F32);
    assert_close(ctx, a, b, 1e-5);
    ok(ctx, xt_backward(ctx, a, NULL, false));
    ok(ctx, xt_backward(ctx, b, NULL, false));
    for (int i = 0; i < 2; i++) assert_close(ctx, xt_grad_of(v[i]), xt_grad_of(v[i + 2]), 0x1p-6);
    drop(ctx, v, 4);
    drop(ctx, (struct xt_tensor *[]){x, w, wide_x, wide_w, labels, a, b}, 7);
}

/* labels and logits as slices of larger tensors: the same bits as from copies. */
static void strided_rows_equal_copies(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *whole = made_up(ctx, spec_of(XT_F32, 3, 3, 5, 12, 0), 1), *x, *copy;
    struct xt_tensor *labels =
                         labels_of(ctx, 2, 5, 3,
                                   (int32_t[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, -100, 0, 1}),
                     *turned;
    ok(ctx, xt_transpose(ctx, whole, 0, 1, &x));
    ok(ctx, xt_contiguous(ctx, x, &copy));
    ok(ctx, xt_contiguous(ctx, labels, &turned));
    struct xt_tensor *v[2] = {var_of(ctx, x), var_of(ctx, copy)};
    struct xt_tensor *a = cross_entropy(ctx, v[0], labels, MEAN, .1);
    struct xt_tensor *b = cross_entropy(ctx, v[1], turned, MEAN, .1);
    assert_same_bits(ctx, a, b);
    ok(ctx, xt_backward(ctx, a, NULL, false));
    ok(ctx, xt_backward(ctx, b, NULL, false));
    assert_same_bits(ctx, xt_grad_of(v[0]), xt_grad_of(v[1]));
    drop(ctx, v, 2);
    drop(ctx, (struct xt_tensor *[]){whole, x, copy, labels, turned, a, b}, 7);
}

static void no_rows_leave_zero(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = made_up(ctx, spec_of(XT_F32, 2, 0, 4, 0, 0), 1);
    struct xt_tensor *w = made_up(ctx, spec_of(XT_F32, 2, 3, 4, 0, 0), 2);
    struct xt_tensor *labels = labels_of(ctx, 1, 0, 0, (int32_t[]){0});
    struct xt_tensor *v[2] = {var_of(ctx, x), var_of(ctx, w)};
    struct xt_tensor *loss = linear_cross_entropy(ctx, v[0], v[1], labels, MEAN, 0);
    assert_true(value_at(ctx, loss, 0) == 0);
    ok(ctx, xt_backward(ctx, loss, NULL, false));
    assert_values(ctx, xt_grad_of(v[1]), (double[12]){0}, 0);
    drop(ctx, v, 2);
    drop(ctx, (struct xt_tensor *[]){x, w, labels, loss}, 4);
}

/* Every allocation fails once: whatever it was, nothing is left behind and the next call
   succeeds. */
static void failing_allocations_leave_nothing(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = made_up(ctx, spec_of(XT_F32, 2, 6, 4, 0, 0), 1);
    struct xt_tensor *w = made_up(ctx, spec_of(XT_F32, 2, 5, 4, 0, 0), 2);
    struct xt_tensor *labels = made_up_labels(ctx, 6, 5);
    for (int reduction = MEAN; reduction <= NONE; reduction += NONE) {
        bool done = false;
        for (int64_t n = 1; !done && n < 200; n++) {
            struct xt_tensor *v[2] = {var_of(ctx, x), var_of(ctx, w)}, *loss = NULL, *seed;
            seed = reduction == NONE ? made_up(ctx, spec_of(XT_F32, 1, 6, 0, 0, 0), 3) : NULL;
            int64_t live = xt_live_count(ctx);
            struct xt_args args;
            const struct xt_op *op = begin(ctx, &args, "linear_cross_entropy",
                                           (struct xt_tensor *[]){v[0], v[1], labels}, 3);
            args.attrs[0].i = reduction;
            xt_fail_allocation(ctx, n);
            enum xt_status status = xt_call_run(ctx, op, &args, &loss);
            if (status == XT_OK) {
                status = xt_backward(ctx, loss, seed, false);
                xt_tensor_release(ctx, loss);
            } else {
                assert_int_equal(status, XT_MEMORY);
                assert_int_equal(xt_live_count(ctx), live);
            }
            done = status == XT_OK;
            xt_fail_allocation(ctx, 0);
            drop(ctx, v, 2);
            xt_tensor_release(ctx, seed);
        }
        assert_true(done);
    }
    drop(ctx, (struct xt_tensor *[]){x, w, labels}, 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(of_no_valid_label_the_loss_and_gradients_are_zero),
        TEST(the_mean_is_over_valid_labels),
        TEST(a_label_out_of_range_names_place_and_value),
        TEST(another_label_may_be_the_ignored_one),
        TEST(values_follow_the_formula),
        TEST(linear_equals_product_then_loss),
        TEST(gradients_agree_with_finite_differences),
        TEST(threads_never_show),
        TEST(linear_never_holds_the_full_logits),
        TEST(bf16_takes_f32_losses),
        TEST(strided_rows_equal_copies),
        TEST(no_rows_leave_zero),
        TEST(failing_allocations_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
