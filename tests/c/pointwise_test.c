/* pointwise_test.c: values, strides, broadcasting, dtypes, gradients of the elementwise ops. */
#include "ops.h"

#define SCALAR 0, NULL

static struct xt_tensor *run_op(struct xt_ctx *ctx, const char *name, int n,
                                struct xt_tensor *const *in) {
    struct xt_tensor *out[MOST] = {NULL};
    const struct xt_op *op;
    struct xt_args args;
    begin(ctx, &args, name, in, n, &op);
    ok(ctx, xt_call_run(ctx, op, &args, out));
    return out[0];
}
#define RUN(name, ...)                                                                             \
    run_op(ctx, name, (int)(sizeof((struct xt_tensor *[]){__VA_ARGS__}) / sizeof(void *)),         \
           (struct xt_tensor *[]){__VA_ARGS__})

static struct xt_tensor *clamp(struct xt_ctx *ctx, struct xt_tensor *x, double lo, double hi) {
    struct xt_tensor *out;
    const struct xt_op *op;
    struct xt_args args;
    begin(ctx, &args, "clamp", &x, 1, &op);
    args.attrs[0].f = lo;
    args.attrs[1].f = hi;
    ok(ctx, xt_call_run(ctx, op, &args, &out));
    return out;
}

static struct xt_tensor *cast(struct xt_ctx *ctx, struct xt_tensor *x, enum xt_dtype dtype) {
    struct xt_tensor *out;
    ok(ctx, xt_cast(ctx, x, dtype, &out));
    return out;
}

static struct xt_tensor *numbers_1d(struct xt_ctx *ctx, enum xt_dtype dtype, int64_t n,
                                    const double *values) {
    return make(ctx, dtype, 1, &n, values, 0);
}

static void drop(struct xt_ctx *ctx, int n, struct xt_tensor **list) {
    for (int i = 0; i < n; i++) xt_tensor_release(ctx, list[i]);
}
#define DROP(...)                                                                                  \
    drop(ctx, (int)(sizeof((struct xt_tensor *[]){__VA_ARGS__}) / sizeof(void *)),                 \
         (struct xt_tensor *[]){__VA_ARGS__})

/* ---- values ---------------------------------------------------------------------------------- */

static double plain_sigmoid(double x) {
    return 1 / (1 + exp(-x));
}
static double plain_rsqrt(double x) {
    return 1 / sqrt(x);
}
static double plain_relu(double x) {
    return x < 0 ? 0 : x;
}
static double plain_silu(double x) {
    return x * plain_sigmoid(x);
}
static double plain_gelu(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
}
static double plain_neg(double x) {
    return -x;
}

static const struct {
    const char *name;        /* of the op */
    double (*plain)(double); /* its definition */
    bool positive;           /* only for x > 0 */
} unary[] = {
    {"neg", plain_neg, false},    {"exp", exp, false},
    {"log", log, true},           {"sqrt", sqrt, true},
    {"rsqrt", plain_rsqrt, true}, {"abs", fabs, false},
    {"sin", sin, false},          {"cos", cos, false},
    {"tanh", tanh, false},        {"sigmoid", plain_sigmoid, false},
    {"relu", plain_relu, false},  {"silu", plain_silu, false},
    {"erf", erf, false},          {"gelu", plain_gelu, false},
};
enum { UNARIES = sizeof unary / sizeof unary[0] };

static void unary_ops_are_their_formulas_in_every_float_dtype(void **state) {
    struct xt_ctx *ctx = *state;
    enum { N = 1003 };
    static const struct {
        enum xt_dtype dtype; /* of x */
        double eps;          /* its rounding */
    } kinds[] = {{XT_F32, 0x1p-24}, {XT_BF16, 0x1p-9}, {XT_F16, 0x1p-12}, {XT_F64, 0x1p-53}};
    double values[N];
    for (int k = 0; k < UNARIES; k++)
        for (size_t t = 0; t < sizeof kinds / sizeof kinds[0]; t++) {
            for (int i = 0; i < N; i++) {
                values[i] = 8 * noise(3, i);
                if (unary[k].positive) values[i] = fabs(values[i]) + 0.01;
            }
            struct xt_tensor *x = numbers_1d(ctx, kinds[t].dtype, N, values);
            struct xt_tensor *y = RUN(unary[k].name, x);
            double *given = numbers(ctx, x), *have = numbers(ctx, y);
            for (int i = 0; i < N; i++) {
                double want = unary[k].plain(given[i]);
                /* 4 roundings of the result, and of terms of size x that cancel (gelu). */
                double most = 4 * kinds[t].eps * (fabs(want) + 0x1p-14) +
                              (kinds[t].dtype == XT_F64 ? 0x1p-50 : 0x1p-20) * 0.5;
                if (!(fabs(have[i] - want) <= most))
                    fail_msg("%s of %.9g in %s is %.9g, wanted %.9g", unary[k].name, given[i],
                             xt_dtype_name(kinds[t].dtype), have[i], want);
            }
            free(given);
            free(have);
            DROP(x, y);
        }
}

static void limits_are_those_of_the_functions(void **state) {
    struct xt_ctx *ctx = *state;
    static const struct {
        const char *name; /* of the op */
        double x, y;      /* its value there */
    } cases[] = {
        {"exp", 100, INFINITY},
        {"exp", -INFINITY, 0},
        {"exp", INFINITY, INFINITY},
        {"exp", NAN, NAN},
        {"exp", 0, 1},
        {"log", 0, -INFINITY},
        {"log", -1, NAN},
        {"log", INFINITY, INFINITY},
        {"log", 1, 0},
        {"log", NAN, NAN},
        {"tanh", 100, 1},
        {"tanh", -INFINITY, -1},
        {"tanh", NAN, NAN},
        {"erf", INFINITY, 1},
        {"erf", -100, -1},
        {"erf", NAN, NAN},
        {"sigmoid", -INFINITY, 0},
        {"sigmoid", INFINITY, 1},
        {"sin", INFINITY, NAN},
        {"cos", NAN, NAN},
        {"sqrt", -1, NAN},
        {"rsqrt", 0, INFINITY},
        {"relu", NAN, NAN},
        {"relu", -INFINITY, 0},
        {"abs", -INFINITY, INFINITY},
        {"cos", 257, 0.8193055},
        {"cos", 15962, -0.9080159},
        {"cos", 15963, -0.8431253},
        {"sin", 1000000, -0.34999350217129294},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++)
        for (int wide = 0; wide < 2; wide++) {
            struct xt_tensor *x = numbers_1d(ctx, wide ? XT_F64 : XT_F32, 1, &cases[k].x);
            struct xt_tensor *y = RUN(cases[k].name, x);
            double finite = exp(100); /* in f64 */
            bool large = wide && cases[k].x == 100 && cases[k].y == (double)INFINITY;
            want_near(ctx, y, large ? &finite : &cases[k].y, large ? finite * 1e-15 : 1e-6);
            DROP(x, y);
        }
}

static void binary_ops_handle_nans_ties_and_powers(void **state) {
    struct xt_ctx *ctx = *state;
    double av[] = {1, NAN, 2, -2, 0, 4}, bv[] = {NAN, 1, 2, 3, 0, 0.5};
    struct xt_tensor *a = numbers_1d(ctx, XT_F32, 6, av), *b = numbers_1d(ctx, XT_F32, 6, bv);
    static const struct {
        const char *name; /* of the op */
        double y[6];      /* its values */
    } cases[] = {
        {"maximum", {NAN, NAN, 2, 3, 0, 4}}, {"minimum", {NAN, NAN, 2, -2, 0, 0.5}},
        {"pow", {1, NAN, 4, -8, 1, 2}},      {"eq", {0, 0, 1, 0, 1, 0}},
        {"lt", {0, 0, 0, 1, 0, 0}},          {"gt", {0, 0, 0, 0, 0, 1}},
        {"sub", {NAN, NAN, 0, -5, 0, 3.5}},  {"div", {NAN, NAN, 1, -2. / 3, NAN, 8}},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        struct xt_tensor *y = RUN(cases[k].name, a, b);
        want_near(ctx, y, cases[k].y, 1e-6);
        DROP(y);
    }
    struct xt_tensor *c = clamp(ctx, a, -1, 1.5);
    want_near(ctx, c, (double[]){1, NAN, 1.5, -1, 0, 1.5}, 0);
    DROP(a, b, c);
}

static void integers_are_exact_and_wrap(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *a = numbers_1d(ctx, XT_U8, 3, (double[]){250, 7, 0});
    struct xt_tensor *b = numbers_1d(ctx, XT_U8, 3, (double[]){10, 9, 1});
    struct xt_tensor *sum = RUN("add", a, b), *less = RUN("sub", a, b),
                     *more = RUN("maximum", a, b);
    want_near(ctx, sum, (double[]){4, 16, 1}, 0);
    want_near(ctx, less, (double[]){240, 254, 255}, 0);
    want_near(ctx, more, (double[]){250, 9, 1}, 0);
    DROP(a, b, sum, less, more);
    int64_t big[2] = {INT64_MAX, (1LL << 53) + 1};
    struct xt_spec spec = spec_of(XT_I64, SHAPE(2));
    ok(ctx, xt_tensor_from_host(ctx, &spec, XT_CPU, big, sizeof big, &a));
    struct xt_tensor *two = make(ctx, XT_I64, SCALAR, (double[]){2}, 0);
    struct xt_tensor *y = RUN("mul", a, two), *z = RUN("neg", y), *w = RUN("abs", z);
    int64_t have[2];
    ok(ctx, xt_tensor_to_host(ctx, w, have, sizeof have));
    assert_true(have[0] == 2 && have[1] == (1LL << 54) + 2);
    DROP(a, two, y, z, w);
}

/* ---- strides and broadcasting ---------------------------------------------------------------- */

static void every_layout_gives_the_bits_of_a_copy(void **state) {
    struct xt_ctx *ctx = *state;
    static const enum xt_dtype dtypes[] = {XT_F32, XT_BF16, XT_F16, XT_F64, XT_I32, XT_U8};
    static const int64_t shapes[][3] = {{3, 5, 7}, {2, 70, 90}, {65, 1, 600}, {4, 0, 3}, {1, 1, 1}};
    for (size_t t = 0; t < sizeof dtypes / sizeof dtypes[0]; t++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            for (int d = 0; d < 3; d++) {
                struct xt_tensor *x = make(ctx, dtypes[t], 3, shapes[s], NULL, 1), *other, *flat;
                struct xt_tensor *v =
                    with_ints(ctx, "transpose", x, 2, (int64_t[]){d, (d + 1) % 3});
                other = make(ctx, dtypes[t], 3, xt_shape(v), NULL, 2);
                ok(ctx, xt_contiguous(ctx, v, &flat));
                struct xt_tensor *have = RUN("mul", v, other), *want = RUN("mul", flat, other);
                want_same_bits(ctx, have, want);
                struct xt_tensor *have2 = RUN("gt", other, v), *want2 = RUN("gt", other, flat);
                want_same_bits(ctx, have2, want2);
                struct xt_tensor *have3 = cast(ctx, v, XT_F16), *want3 = cast(ctx, flat, XT_F16);
                want_same_bits(ctx, have3, want3);
                struct xt_tensor *have4 = RUN("where", have2, v, other);
                struct xt_tensor *want4 = RUN("where", have2, flat, other);
                want_same_bits(ctx, have4, want4);
                DROP(x, v, flat, other, have, want, have2, want2, have3, want3, have4, want4);
            }
}

static void operands_broadcast_and_so_do_their_gradients(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *a = make(ctx, XT_F32, SHAPE(4, 1), (double[]){1, 2, 3, 4}, 0);
    struct xt_tensor *b = make(ctx, XT_F32, SHAPE(3), (double[]){10, 20, 30}, 0);
    struct xt_tensor *one = make(ctx, XT_F32, SCALAR, (double[]){0.5}, 0);
    struct xt_tensor *y = RUN("mul", a, b), *z = RUN("add", y, one), *w = RUN("sub", one, b);
    want_shape(y, SHAPE(4, 3));
    want_near(ctx, z,
              (double[]){10.5, 20.5, 30.5, 20.5, 40.5, 60.5, 30.5, 60.5, 90.5, 40.5, 80.5, 120.5},
              0);
    want_near(ctx, w, (double[]){-9.5, -19.5, -29.5}, 0);
    DROP(y, z, w, a, b);
    struct xt_tensor *va, *vb, *seed;
    a = make(ctx, XT_F32, SHAPE(1), (double[]){3}, 0);
    b = make(ctx, XT_F32, SHAPE(5, 4), NULL, 5);
    ok(ctx, xt_var_new(ctx, a, &va));
    ok(ctx, xt_var_new(ctx, b, &vb));
    y = RUN("add", va, vb);
    seed = make(ctx, XT_F32, SHAPE(5, 4),
                (double[]){1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 0);
    ok(ctx, xt_backward(ctx, y, seed, false));
    want_shape(xt_grad_of(va), SHAPE(1));
    want_near(ctx, xt_grad_of(va), (double[]){20}, 0);
    want_same_bits(ctx, xt_grad_of(vb), seed);
    DROP(a, b, va, vb, y, seed, one);
}

static void threads_never_show_in_the_bits(void **state) {
    struct xt_ctx *ctx = *state;
    static const char *const names[] = {"exp", "gelu", "tanh", "silu", "sin", "erf", "sqrt"};
    for (int half = 0; half < 2; half++) {
        enum xt_dtype dtype = half ? XT_BF16 : XT_F32;
        struct xt_tensor *x = make(ctx, dtype, SHAPE(257, 301), NULL, 3);
        struct xt_tensor *t = with_ints(ctx, "transpose", x, 2, (int64_t[]){0, 1});
        struct xt_tensor *row = make(ctx, dtype, SHAPE(257), NULL, 4);
        for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
            xt_set_threads(ctx, 1);
            struct xt_tensor *y1 = RUN(names[k], x), *z1 = RUN("mul", t, row);
            struct xt_tensor *c1 = RUN(names[k], t);
            for (int threads = 2; threads < 6; threads++) {
                xt_set_threads(ctx, threads);
                struct xt_tensor *y = RUN(names[k], x), *z = RUN("mul", t, row);
                struct xt_tensor *c = RUN(names[k], t);
                want_same_bits(ctx, y1, y);
                want_same_bits(ctx, z1, z);
                want_same_bits(ctx, c1, c);
                DROP(y, z, c);
            }
            DROP(y1, z1, c1);
        }
        DROP(x, t, row);
    }
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

static void casts_round_once_truncate_and_saturate(void **state) {
    struct xt_ctx *ctx = *state;
    /* Halfway between two bf16 after rounding to f32, but not before. */
    double tie = 1 + 0x1p-8, above = tie + 0x1p-40, below = tie - 0x1p-40;
    struct xt_tensor *x = numbers_1d(ctx, XT_F64, 3, (double[]){tie, above, below});
    struct xt_tensor *y = cast(ctx, x, XT_BF16), *z;
    want_near(ctx, y, (double[]){1, 1 + 0x1p-7, 1}, 0);
    DROP(x, y);
    x = numbers_1d(ctx, XT_F32, 7, (double[]){1.9, -1.9, NAN, INFINITY, -INFINITY, 300, 3e9});
    y = cast(ctx, x, XT_I32);
    want_near(ctx, y, (double[]){1, -1, 0, 2147483647, -2147483648., 300, 2147483647}, 0);
    z = cast(ctx, x, XT_U8);
    want_near(ctx, z, (double[]){1, 0, 0, 255, 0, 255, 255}, 0);
    DROP(x, y, z);
    x = numbers_1d(ctx, XT_F32, 5, (double[]){65504, 65520, 0x1p-24, -0x1p-26, 1.0009765625});
    y = cast(ctx, x, XT_F16);
    want_near(ctx, y, (double[]){65504, INFINITY, 0x1p-24, 0, 1.0009765625}, 0);
    DROP(x, y);
}

static void every_pair_of_dtypes_converts(void **state) {
    struct xt_ctx *ctx = *state;
    double values[600];
    for (int i = 0; i < 600; i++) values[i] = (double)(i % 101);
    for (int from = 0; from < XT_DTYPE_COUNT; from++)
        for (int to = 0; to < XT_DTYPE_COUNT; to++) {
            struct xt_tensor *x = numbers_1d(ctx, (enum xt_dtype)from, 600, values);
            struct xt_tensor *y = cast(ctx, x, (enum xt_dtype)to);
            assert_int_equal(xt_dtype_of(y), to);
            want_near(ctx, y, values, 0);
            DROP(x, y);
        }
}

static void a_cast_gives_its_gradient_back_in_the_old_dtype(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F16, SHAPE(3), (double[]){1, 2, 3}, 0), *v;
    ok(ctx, xt_var_new(ctx, x, &v));
    struct xt_tensor *y = cast(ctx, v, XT_F64);
    struct xt_tensor *seed = make(ctx, XT_F64, SHAPE(3), (double[]){0.5, 1 + 0x1p-30, -2}, 0);
    ok(ctx, xt_backward(ctx, y, seed, false));
    assert_int_equal(xt_dtype_of(xt_grad_of(v)), XT_F16);
    want_near(ctx, xt_grad_of(v), (double[]){0.5, 1, -2}, 0);
    DROP(x, v, y, seed);
}

static void dtypes_that_differ_are_refused_by_name(void **state) {
    struct xt_ctx *ctx = *state;
    const struct xt_op *op;
    struct xt_args args;
    struct xt_tensor *a = make(ctx, XT_F32, SHAPE(2, 3), NULL, 1);
    struct xt_tensor *b = make(ctx, XT_BF16, SHAPE(3), NULL, 1);
    struct xt_tensor *c = make(ctx, XT_I32, SHAPE(3), NULL, 1),
                     *d = make(ctx, XT_F32, SHAPE(2), NULL, 1);
    begin(ctx, &args, "add", (struct xt_tensor *[]){a, b}, 2, &op);
    want_failure(ctx, op, &args, XT_DTYPE, "add: a is f32 2x3, b is bf16 3");
    begin(ctx, &args, "mul", (struct xt_tensor *[]){a, c}, 2, &op);
    want_failure(ctx, op, &args, XT_DTYPE, "b is i32 3");
    begin(ctx, &args, "sub", (struct xt_tensor *[]){a, d}, 2, &op);
    want_failure(ctx, op, &args, XT_SHAPE, "sizes 3 and 2");
    begin(ctx, &args, "where", (struct xt_tensor *[]){a, a, a}, 3, &op);
    want_failure(ctx, op, &args, XT_DTYPE, "cond");
    begin(ctx, &args, "exp", &c, 1, &op);
    want_failure(ctx, op, &args, XT_DTYPE, "i32 3");
    DROP(a, b, c, d);
}

/* ---- gradients ------------------------------------------------------------------------------- */

static void gradients_agree_with_differences(void **state) {
    struct xt_ctx *ctx = *state;
    const struct xt_op *op;
    struct xt_args args;
    double values[60];
    for (int k = 0; k < UNARIES; k++) {
        for (int i = 0; i < 60; i++) {
            values[i] = 2 * noise(11, i);
            if (unary[k].positive) values[i] = fabs(values[i]) + 0.3;
        }
        struct xt_tensor *x = make(ctx, XT_F64, SHAPE(5, 12), values, 0);
        begin(ctx, &args, unary[k].name, &x, 1, &op);
        want_gradient(ctx, op, &args, 0);
        if (strcmp(unary[k].name, "gelu") == 0) {
            args.attrs[0].i = 1;
            want_gradient(ctx, op, &args, 0);
        }
        DROP(x);
    }
    static const char *const names[] = {"add", "sub",     "mul",     "div",
                                        "pow", "minimum", "maximum", "swiglu"};
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        for (int i = 0; i < 60; i++) values[i] = fabs(noise(12, i)) + 0.3;
        struct xt_tensor *a = make(ctx, XT_F64, SHAPE(5, 12), values, 0);
        struct xt_tensor *b = make(ctx, XT_F64, SHAPE(5, 1), values + 7, 0);
        struct xt_tensor *ab[2] = {a, b};
        begin(ctx, &args, names[k], ab, 2, &op);
        want_gradient(ctx, op, &args, 0);
        want_gradient(ctx, op, &args, 1);
        DROP(a, b);
    }
    struct xt_tensor *cond = make(ctx, XT_U8, SHAPE(5, 1), (double[]){1, 0, 0, 1, 0}, 0);
    struct xt_tensor *a = make(ctx, XT_F64, SHAPE(4), NULL, 2);
    struct xt_tensor *b = make(ctx, XT_F64, SHAPE(5, 4), NULL, 3);
    begin(ctx, &args, "where", (struct xt_tensor *[]){cond, a, b}, 3, &op);
    struct xt_tensor *three[3] = {cond, a, b};
    args.inputs = three;
    want_gradient(ctx, op, &args, 1);
    want_gradient(ctx, op, &args, 2);
    struct xt_tensor *two[2] = {b, cond};
    begin(ctx, &args, "masked_fill", two, 2, &op);
    args.attrs[0].f = 7;
    want_gradient(ctx, op, &args, 0);
    begin(ctx, &args, "clamp", &b, 1, &op);
    args.attrs[0].f = -0.5;
    args.attrs[1].f = 0.4;
    want_gradient(ctx, op, &args, 0);
    DROP(cond, a, b);
}

static struct xt_tensor *gradient(struct xt_ctx *ctx, const char *name, int which, int n,
                                  const double *a, const double *b) {
    struct xt_tensor *in[2] = {numbers_1d(ctx, XT_F32, n, a),
                               b ? numbers_1d(ctx, XT_F32, n, b) : NULL};
    struct xt_tensor *var, *y, *seed, *plain = in[which], *grad;
    double ones[16];
    for (int i = 0; i < n; i++) ones[i] = 1;
    ok(ctx, xt_var_new(ctx, plain, &var));
    in[which] = var;
    y = run_op(ctx, name, b ? 2 : 1, in);
    seed = numbers_1d(ctx, XT_F32, n, ones);
    ok(ctx, xt_backward(ctx, y, seed, false));
    grad = xt_tensor_retain(xt_grad_of(var));
    DROP(plain, var, y, seed, b ? in[1 - which] : NULL);
    return grad;
}

static void gradients_at_kinks_ties_and_zeros_are_the_usual_ones(void **state) {
    struct xt_ctx *ctx = *state;
    static const struct {
        const char *name;  /* of the op */
        int which;         /* whose gradient */
        double a[4], b[4]; /* arguments */
        double want[4];    /* the gradient for ones */
    } cases[] = {
        {"relu", 0, {-1, 0, 1, NAN}, {0}, {0, 0, 1, 1}},
        {"abs", 0, {-2, 0, 3, -0.0}, {0}, {-1, 0, 1, 0}},
        {"sqrt", 0, {0, 1, 4, 0.25}, {0}, {INFINITY, 0.5, 0.25, 1}},
        {"maximum", 0, {1, 2, 3, 0}, {1, 3, 2, 0}, {0.5, 0, 1, 0.5}},
        {"maximum", 1, {1, 2, 3, 0}, {1, 3, 2, 0}, {0.5, 1, 0, 0.5}},
        {"minimum", 0, {1, 2, 3, 0}, {1, 3, 2, 0}, {0.5, 1, 0, 0.5}},
        {"minimum", 1, {1, 2, 3, 0}, {1, 3, 2, 0}, {0.5, 0, 1, 0.5}},
        {"pow", 0, {0, 0, -2, 0}, {2, 0, 3, 1}, {0, 0, 12, 1}},
        {"pow", 1, {0, 0, -2, 1}, {2, 0, 3, 5}, {0, 0, NAN, 0}},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        bool two = cases[k].name[0] == 'm' || cases[k].name[0] == 'p';
        struct xt_tensor *g =
            gradient(ctx, cases[k].name, cases[k].which, 4, cases[k].a, two ? cases[k].b : NULL);
        want_near(ctx, g, cases[k].want, 1e-6);
        DROP(g);
    }
}

static void the_side_not_selected_leaks_no_nan(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *a = make(ctx, XT_F32, SHAPE(1), (double[]){100}, 0), *v;
    struct xt_tensor *zero = make(ctx, XT_F32, SCALAR, (double[]){0}, 0);
    struct xt_tensor *one = make(ctx, XT_F32, SCALAR, (double[]){1}, 0);
    ok(ctx, xt_var_new(ctx, a, &v));
    struct xt_tensor *cond = RUN("lt", v, zero), *e = RUN("exp", v), *s = RUN("add", one, v);
    struct xt_tensor *y = RUN("where", cond, e, s);
    want_near(ctx, y, (double[]){101}, 0);
    /* exp(100) is infinite; the gradient that reaches it is 0, and must stay 0. */
    struct xt_tensor *grads[3], *inputs[3] = {e, s, v};
    ok(ctx, xt_grad(ctx, y, inputs, 3, NULL, false, grads));
    want_near(ctx, grads[0], (double[]){0}, 0);
    want_near(ctx, grads[1], (double[]){1}, 0);
    want_near(ctx, grads[2], (double[]){1}, 0);
    DROP(grads[0], grads[1], grads[2], a, v, zero, one, cond, e, s, y);
}

static void a_product_keeps_only_what_its_gradients_need(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(1000), NULL, 1), *v;
    struct xt_tensor *mask = make(ctx, XT_F32, SHAPE(10, 1), NULL, 2);
    struct xt_memory before, after;
    ok(ctx, xt_var_new(ctx, x, &v));
    xt_memory(ctx, XT_CPU, &before);
    struct xt_tensor *y = RUN("neg", v), *z = RUN("mul", y, mask), *w = RUN("add", z, mask);
    DROP(y, z);
    xt_memory(ctx, XT_CPU, &after);
    /* Neither y (its gradient does not need it) nor z (a sum keeps nothing) is held: w alone. */
    assert_true(after.live_bytes - before.live_bytes == xt_nbytes(w));
    DROP(x, v, mask, w);
}

/* ---- in place -------------------------------------------------------------------------------- */

static void in_place_ops_write_views(void **state) {
    struct xt_ctx *ctx = *state;
    const struct xt_op *op;
    struct xt_args args;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(2, 3), (double[]){1, 2, 3, 4, 5, 6}, 0);
    struct xt_tensor *t = with_ints(ctx, "transpose", x, 2, (int64_t[]){0, 1});
    struct xt_tensor *row = make(ctx, XT_I32, SHAPE(2), (double[]){10, 20}, 0);
    struct xt_tensor *half = make(ctx, XT_BF16, SHAPE(3, 1), (double[]){1, 2, 3}, 0);
    struct xt_tensor *two[2] = {t, row};
    begin(ctx, &args, "copy_", two, 2, &op);
    ok(ctx, xt_call_run(ctx, op, &args, NULL));
    want_near(ctx, x, (double[]){10, 10, 10, 20, 20, 20}, 0);
    two[1] = half;
    begin(ctx, &args, "add_", two, 2, &op);
    args.attrs[0].f = -0.5;
    ok(ctx, xt_call_run(ctx, op, &args, NULL));
    want_near(ctx, x, (double[]){9.5, 9, 8.5, 19.5, 19, 18.5}, 0);
    struct xt_tensor *col = with_ints(ctx, "select", x, 2, (int64_t[]){1, 1});
    begin(ctx, &args, "fill_", &col, 1, &op);
    args.attrs[0].f = -1;
    ok(ctx, xt_call_run(ctx, op, &args, NULL));
    want_near(ctx, x, (double[]){9.5, -1, 8.5, 19.5, -1, 18.5}, 0);
    two[0] = two[1] = x;
    begin(ctx, &args, "add_", two, 2, &op);
    ok(ctx, xt_call_run(ctx, op, &args, NULL));
    want_near(ctx, x, (double[]){19, -2, 17, 39, -2, 37}, 0);
    DROP(x, t, row, half, col);
}

static void in_place_ops_refuse_what_does_not_fit(void **state) {
    struct xt_ctx *ctx = *state;
    const struct xt_op *op;
    struct xt_args args;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(3), NULL, 1);
    struct xt_tensor *big = make(ctx, XT_F32, SHAPE(2, 3), NULL, 1);
    struct xt_tensor *whole = make(ctx, XT_I32, SHAPE(3), NULL, 1);
    struct xt_tensor *two[2] = {x, big};
    begin(ctx, &args, "copy_", two, 2, &op);
    want_failure(ctx, op, &args, XT_SHAPE, "copy_: src is f32 2x3, which does not broadcast");
    two[1] = whole;
    begin(ctx, &args, "add_", two, 2, &op);
    want_failure(ctx, op, &args, XT_DTYPE, "other is i32");
    two[0] = whole;
    begin(ctx, &args, "add_", two, 2, &op);
    args.attrs[0].f = 0.5;
    want_failure(ctx, op, &args, XT_ARGUMENT, "scale is 0.5");
    DROP(x, big, whole);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_ctx, close_ctx)
    const struct CMUnitTest tests[] = {
        TEST(unary_ops_are_their_formulas_in_every_float_dtype),
        TEST(limits_are_those_of_the_functions),
        TEST(binary_ops_handle_nans_ties_and_powers),
        TEST(integers_are_exact_and_wrap),
        TEST(every_layout_gives_the_bits_of_a_copy),
        TEST(operands_broadcast_and_so_do_their_gradients),
        TEST(threads_never_show_in_the_bits),
        TEST(casts_round_once_truncate_and_saturate),
        TEST(every_pair_of_dtypes_converts),
        TEST(a_cast_gives_its_gradient_back_in_the_old_dtype),
        TEST(dtypes_that_differ_are_refused_by_name),
        TEST(gradients_agree_with_differences),
        TEST(gradients_at_kinks_ties_and_zeros_are_the_usual_ones),
        TEST(the_side_not_selected_leaks_no_nan),
        TEST(a_product_keeps_only_what_its_gradients_need),
        TEST(in_place_ops_write_views),
        TEST(in_place_ops_refuse_what_does_not_fit),
    };
    return cmocka_run_group_tests_name("pointwise", tests, NULL, NULL);
}
