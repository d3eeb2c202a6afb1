/* optim_test.c: optimizer updates against their recurrences written out in double. */
#include "call.h"

static const struct xt_spec scalar_f32 = {.dtype = XT_F32};

/* A scalar for the norm argument. */
static struct xt_tensor *number(struct xt_ctx *ctx, double value, enum xt_dtype dtype) {
    struct xt_tensor *t;
    ok(ctx, xt_tensor_scalar(ctx, value, dtype, XT_CPU, &t));
    return t;
}

static struct xt_tensor *zeros(struct xt_ctx *ctx, struct xt_spec spec) {
    struct xt_tensor *t;
    ok(ctx, xt_full(ctx, &spec, XT_CPU, 0, &t));
    return t;
}

static struct xt_tensor *full(struct xt_ctx *ctx, struct xt_spec spec, double value) {
    struct xt_tensor *t;
    ok(ctx, xt_full(ctx, &spec, XT_CPU, value, &t));
    return t;
}

struct adamw {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step;
    double grad_scale, clip;
};

static const struct adamw usual = {.1, .9, .999, 1e-8, 0, 1, 1, 0};

/* norm, no tensors for lr, step and divisor, the list: as the fused updates take them. */
static struct xt_tensor *const *spread(struct xt_tensor *const *in, int n) {
    static struct xt_tensor *all[64];
    all[0] = in[0];
    memcpy(all + 4, in + 1, (size_t)(n - 1) * sizeof *all);
    return all;
}

static const struct xt_op *adamw_args(struct xt_ctx *ctx, struct xt_args *args,
                                      const struct adamw *o, struct xt_tensor *const *in, int n) {
    const struct xt_op *op = begin(ctx, args, "adamw", spread(in, n), n + 3);
    args->attrs[0].f = o->lr;
    args->attrs[1].f = o->beta1;
    args->attrs[2].f = o->beta2;
    args->attrs[3].f = o->eps;
    args->attrs[4].f = o->weight_decay;
    args->attrs[5].i = o->step;
    args->attrs[6].f = o->grad_scale;
    args->attrs[7].f = o->clip;
    return op;
}

static void adamw(struct xt_ctx *ctx, const struct adamw *o, struct xt_tensor *const *in, int n) {
    struct xt_args args;
    const struct xt_op *op = adamw_args(ctx, &args, o, in, n);
    ok(ctx, xt_call_run(ctx, op, &args, NULL));
}

static void the_first_step_is_corrected_for_bias(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *in[] = {number(ctx, .1, XT_F32), number(ctx, 1, XT_F32),
                              number(ctx, .1, XT_F32), zeros(ctx, scalar_f32),
                              zeros(ctx, scalar_f32),  NULL};
    adamw(ctx, &usual, in, 6);
    assert_values(ctx, in[1], (double[]){.90000001}, 1e-7);
    drop(ctx, in, 6);
}

static void weight_decay_is_decoupled(void **state) {
    struct xt_ctx *ctx = *state;
    struct adamw o = usual;
    struct xt_spec spec = spec_of(XT_F32, 2, 2, 2, 0, 0);
    struct xt_tensor *in[] = {number(ctx, 0, XT_F32), full(ctx, spec, 1), zeros(ctx, spec),
                              zeros(ctx, spec),       zeros(ctx, spec),   NULL};
    adamw(ctx, &o, in, 6); /* no decay: exactly as it was */
    assert_values(ctx, in[1], (double[]){1, 1, 1, 1}, 0);
    o.weight_decay = .1;
    adamw(ctx, &o, in, 6);
    assert_values(ctx, in[1], (double[]){.99, .99, .99, .99}, 1e-7);
    drop(ctx, in, 6);
}

/* Two parameters, 20 steps with decay, scale and clipping; g depends on the step. */
static void twenty_steps_follow_the_recurrence(void **state) {
    struct xt_ctx *ctx = *state;
    enum { A = 1500, B = 7, N = A + B };
    static double p[N], m[N], v[N], g[N];
    struct adamw o = {3e-3, .9, .99, 1e-8, .1, 0, .25, .05};
    struct xt_spec specs[2] = {spec_of(XT_F64, 2, A / 3, 3, 0, 0), spec_of(XT_F64, 1, B, 0, 0, 0)};
    struct xt_tensor *in[11] = {NULL};
    for (int k = 0; k < 2; k++) {
        in[1 + 5 * k] = made_up(ctx, specs[k], (uint64_t)k);
        in[3 + 5 * k] = zeros(ctx, specs[k]);
        in[4 + 5 * k] = zeros(ctx, specs[k]);
        for (int i = 0; i < (k ? B : A); i++) p[k * A + i] = value_at(ctx, in[1 + 5 * k], i);
    }
    in[10] = zeros(ctx, spec_of(XT_BF16, 1, B, 0, 0, 0));
    for (int t = 1; t <= 20; t++) {
        double squares = 0;
        for (int k = 0; k < 2; k++) {
            in[2 + 5 * k] = made_up(ctx, specs[k], (uint64_t)(100 * t + k));
            for (int i = 0; i < (k ? B : A); i++) g[k * A + i] = value_at(ctx, in[2 + 5 * k], i);
        }
        for (int i = 0; i < N; i++) squares += g[i] * g[i];
        struct xt_args args;
        const struct xt_op *op =
            begin(ctx, &args, "grad_norm", (struct xt_tensor *[]){in[2], in[7]}, 2);
        in[0] = run(ctx, op, &args);
        assert_int_equal(xt_dtype_of(in[0]), XT_F64);
        double norm = sqrt(squares), by = .05 / (norm * .25 + 1e-6);
        assert_values(ctx, in[0], &norm, 1e-12 * norm);
        for (int i = 0; i < N; i++) {
            double e = g[i] * .25 * (by < 1 ? by : 1);
            p[i] *= 1 - o.lr * o.weight_decay;
            m[i] = .9 * m[i] + (1 - .9) * e;
            v[i] = .99 * v[i] + (1 - .99) * e * e;
            double unbiased_m = m[i] / (1 - pow(.9, t)), unbiased_v = v[i] / (1 - pow(.99, t));
            p[i] -= o.lr * unbiased_m / (sqrt(unbiased_v) + 1e-8);
        }
        o.step = t;
        adamw(ctx, &o, in, 11);
        assert_values(ctx, in[1], p, 1e-12);
        assert_values(ctx, in[6], p + A, 1e-12);
        for (int i = 0; i < B; i++) /* the copy is the parameter to bf16's 2^-9 */
            assert_true(fabs(value_at(ctx, in[10], i) - p[A + i]) <= fabs(p[A + i]) * 0x1p-8);
        drop(ctx, (struct xt_tensor *[]){in[0], in[2], in[7]}, 3);
    }
    in[0] = in[2] = in[7] = NULL;
    drop(ctx, in, 11);
}

static void sgd_follows_its_recurrence(void **state) {
    struct xt_ctx *ctx = *state;
    enum { N = 5 };
    struct xt_spec spec = spec_of(XT_F64, 1, N, 0, 0, 0);
    for (int kind = 0; kind < 3; kind++) { /* plain, momentum with dampening, nesterov */
        double p[N], b[N], momentum = kind ? .9 : 0, dampening = kind == 1 ? .3 : 0;
        struct xt_tensor *in[5] = {number(ctx, 1, XT_F32), made_up(ctx, spec, 1), NULL,
                                   kind ? zeros(ctx, spec) : NULL, NULL};
        for (int i = 0; i < N; i++) p[i] = value_at(ctx, in[1], i);
        for (int t = 1; t <= 20; t++) {
            in[2] = made_up(ctx, spec, (uint64_t)(10 * t));
            for (int i = 0; i < N; i++) {
                double g = value_at(ctx, in[2], i) * .5 + .01 * p[i];
                if (kind) {
                    b[i] = t == 1 ? g : momentum * b[i] + (1 - dampening) * g;
                    g = kind == 2 ? g + momentum * b[i] : b[i];
                }
                p[i] -= .1 * g;
            }
            struct xt_args args;
            const struct xt_op *op = begin(ctx, &args, "sgd", spread(in, 5), 8);
            args.attrs[0].f = .1;
            args.attrs[1].f = momentum;
            args.attrs[2].f = dampening;
            args.attrs[3].i = kind == 2;
            args.attrs[4].f = .01;
            args.attrs[5].i = t;
            args.attrs[6].f = .5;
            ok(ctx, xt_call_run(ctx, op, &args, NULL));
            assert_values(ctx, in[1], p, 1e-13);
            xt_tensor_release(ctx, in[2]);
        }
        in[2] = NULL;
        drop(ctx, in, 5);
    }
}

static void a_norm_that_is_not_finite_changes_nothing(void **state) {
    struct xt_ctx *ctx = *state;
    const double norms[] = {NAN, INFINITY, -INFINITY, 1};
    const double scales[] = {1, 1, 1, INFINITY}; /* 1 / (no token at all) */
    struct xt_spec spec = spec_of(XT_F32, 1, 3, 0, 0, 0);
    for (int k = 0; k < COUNT(norms); k++) {
        struct adamw o = usual;
        o.weight_decay = .1;
        o.grad_scale = scales[k];
        struct xt_tensor *in[] = {number(ctx, norms[k], XT_F32),
                                  full(ctx, spec, 1),
                                  full(ctx, spec, NAN),
                                  full(ctx, spec, 2),
                                  full(ctx, spec, 3),
                                  full(ctx, spec, 4)};
        adamw(ctx, &o, in, 6);
        assert_values(ctx, in[1], (double[]){1, 1, 1}, 0);
        assert_values(ctx, in[3], (double[]){2, 2, 2}, 0);
        assert_values(ctx, in[4], (double[]){3, 3, 3}, 0);
        assert_values(ctx, in[5], (double[]){4, 4, 4}, 0);
        struct xt_args args;
        const struct xt_op *op =
            begin(ctx, &args, "sgd",
                  spread((struct xt_tensor *[]){in[0], in[1], in[2], NULL, in[5]}, 5), 8);
        args.attrs[0].f = .1;
        args.attrs[6].f = scales[k];
        ok(ctx, xt_call_run(ctx, op, &args, NULL));
        assert_values(ctx, in[1], (double[]){1, 1, 1}, 0);
        drop(ctx, in, 6);
    }
}

static void clipping_scales_gradients_in_place(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *g[3] = {NULL};
    g[1] = from_doubles(ctx, spec_of(XT_F32, 1, 2, 0, 0, 0), (double[]){3, 0});
    g[2] = from_doubles(ctx, spec_of(XT_BF16, 1, 1, 0, 0, 0), (double[]){4});
    struct xt_args args;
    const struct xt_op *op = begin(ctx, &args, "grad_norm", g + 1, 2);
    g[0] = run(ctx, op, &args);
    assert_values(ctx, g[0], (double[]){5}, 0);
    op = begin(ctx, &args, "scale_list_", g, 3);
    args.attrs[0].f = 10; /* above the norm: untouched */
    ok(ctx, xt_call_run(ctx, op, &args, NULL));
    assert_values(ctx, g[1], (double[]){3, 0}, 0);
    args.attrs[0].f = 1;
    ok(ctx, xt_call_run(ctx, op, &args, NULL));
    assert_values(ctx, g[1], (double[]){.6, 0}, 1e-6);
    assert_values(ctx, g[2], (double[]){.8}, .8 * 0x1p-8);
    drop(ctx, g, 3);
}

static void threads_never_show(void **state) {
    struct xt_ctx *ctx = *state;
    const int64_t sizes[] = {40001, 3, 0, 70000};
    int before = xt_threads(ctx);
    struct xt_tensor *first[9] = {NULL};
    for (int threads = 1; threads <= 3; threads++) {
        xt_set_threads(ctx, threads);
        struct xt_tensor *in[21] = {NULL}, *g[4];
        for (int k = 0; k < 4; k++) {
            struct xt_spec spec = spec_of(XT_F32, 1, sizes[k], 0, 0, 0);
            in[1 + 5 * k] = made_up(ctx, spec, (uint64_t)k);
            g[k] = in[2 + 5 * k] = made_up(ctx, spec, (uint64_t)k + 10);
            in[3 + 5 * k] = zeros(ctx, spec);
            in[4 + 5 * k] = zeros(ctx, spec);
        }
        struct xt_args args;
        const struct xt_op *op = begin(ctx, &args, "grad_norm", g, 4);
        in[0] = run(ctx, op, &args);
        struct adamw o = usual;
        o.clip = 1;
        adamw(ctx, &o, in, 21);
        struct xt_tensor *got[9] = {in[0]};
        for (int k = 0; k < 4; k++) {
            got[1 + 2 * k] = in[1 + 5 * k];
            got[2 + 2 * k] = in[4 + 5 * k];
        }
        for (int i = 0; i < 9; i++) {
            if (threads == 1) first[i] = xt_tensor_retain(got[i]);
            assert_same_bits(ctx, first[i], got[i]);
        }
        drop(ctx, in, 21);
    }
    drop(ctx, first, 9);
    xt_set_threads(ctx, before);
}

static void groups_that_do_not_fit_are_named(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_spec spec = spec_of(XT_F32, 1, 3, 0, 0, 0);
    struct xt_tensor *in[] = {number(ctx, 1, XT_F32),
                              zeros(ctx, spec),
                              zeros(ctx, spec),
                              zeros(ctx, spec),
                              zeros(ctx, spec_of(XT_F32, 1, 4, 0, 0, 0)),
                              NULL};
    struct adamw o = usual;
    struct xt_args args;
    const struct xt_op *op = adamw_args(ctx, &args, &o, in, 6);
    assert_int_equal(xt_call_run(ctx, op, &args, NULL), XT_SHAPE);
    assert_string_equal(xt_error(ctx), "adamw: v 1 is f32 4, its parameter is f32 3");
    op = adamw_args(ctx, &args, &o, in, 5);
    assert_int_equal(xt_call_run(ctx, op, &args, NULL), XT_ARGUMENT);
    o.step = 0;
    op = adamw_args(ctx, &args, &o, in, 6);
    assert_int_equal(xt_call_run(ctx, op, &args, NULL), XT_ARGUMENT);
    assert_string_equal(xt_error(ctx), "adamw: step is 0, steps count from 1");
    drop(ctx, in, 6);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(the_first_step_is_corrected_for_bias),
        TEST(weight_decay_is_decoupled),
        TEST(twenty_steps_follow_the_recurrence),
        TEST(sgd_follows_its_recurrence),
        TEST(a_norm_that_is_not_finite_changes_nothing),
        TEST(clipping_scales_gradients_in_place),
        TEST(threads_never_show),
        TEST(groups_that_do_not_fit_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
