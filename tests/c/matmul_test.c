/* matmul_test.c: products of every layout and dtype, their bits, and their gradients. */
#include "ops.h"

static struct xt_tensor *product(struct xt_ctx *ctx, struct xt_tensor *a, struct xt_tensor *b) {
    struct xt_tensor *out;
    ok(ctx, xt_binary(ctx, "matmul", a, b, &out));
    return out;
}

static struct xt_tensor *turned(struct xt_ctx *ctx, struct xt_tensor *x) {
    struct xt_tensor *out;
    ok(ctx, xt_transpose(ctx, x, xt_ndim(x) - 2, xt_ndim(x) - 1, &out));
    return out;
}

static struct xt_tensor *linear(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor *weight,
                                struct xt_tensor *bias) {
    struct xt_tensor *out;
    ok(ctx, xt_apply_name(ctx, "linear", (struct xt_tensor *[]){x, weight, bias}, 3, &out));
    return out;
}

/* How far a sum of k products of numbers below 1 may be from the exact one: every addition rounds
   at most sqrt(k) in size typically, k at most; the result is rounded to dtype once. */
static double tolerance(enum xt_dtype dtype, int64_t k) {
    const double unit = dtype == XT_F64 ? 0x1p-53 : 0x1p-24, sum = 4 * sqrt((double)k) + 4;
    return unit * sum * sqrt((double)k + 1) + (dtype == XT_BF16 ? 0x1p-9 * sum : 0);
}

/* out (m x n) against the formula, for the last two dimensions of item `item` of each. */
static void want_product(struct xt_ctx *ctx, struct xt_tensor *a, struct xt_tensor *b,
                         struct xt_tensor *out) {
    double *x = numbers(ctx, a), *y = numbers(ctx, b), *z = numbers(ctx, out);
    const int64_t m = xt_shape(a)[xt_ndim(a) - 2], k = xt_shape(a)[xt_ndim(a) - 1];
    const int64_t n = xt_shape(b)[xt_ndim(b) - 1];
    const int64_t items = m * n > 0 ? xt_numel(out) / (m * n) : 0;
    const bool many_a = m * k > 0 && xt_numel(a) > m * k, many_b = n * k > 0 && xt_numel(b) > n * k;
    for (int64_t q = 0; q < items; q++)
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++) {
                double sum = 0, got = z[(q * m + i) * n + j];
                for (int64_t p = 0; p < k; p++)
                    sum += x[((many_a ? q : 0) * m + i) * k + p] *
                           y[((many_b ? q : 0) * k + p) * n + j];
                if (!(fabs(got - sum) <= tolerance(xt_dtype_of(out), k)))
                    fail_msg("%lldx%lldx%lld: (%lld, %lld) is %.9g, wanted %.9g", (long long)m,
                             (long long)n, (long long)k, (long long)i, (long long)j, got, sum);
            }
    free(x);
    free(y);
    free(z);
}

/* ---- values ---------------------------------------------------------------------------------- */

static void golden_values(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *a = make(ctx, XT_F32, SHAPE(2, 3), (double[]){1, 2, 3, 4, 5, 6}, 0);
    struct xt_tensor *b = make(ctx, XT_F32, SHAPE(3, 2), (double[]){1, 0, 2, 1, 0, 3}, 0);
    struct xt_tensor *row = make(ctx, XT_F32, SHAPE(3), (double[]){1, 2, 3}, 0);
    struct xt_tensor *c = product(ctx, a, b);
    want_shape(c, SHAPE(2, 2));
    want_near(ctx, c, (double[]){5, 11, 14, 23}, 0);
    xt_tensor_release(ctx, c);
    c = product(ctx, row, b);
    want_shape(c, SHAPE(2));
    want_near(ctx, c, (double[]){5, 11}, 0);
    xt_tensor_release(ctx, c);
    c = product(ctx, a, row);
    want_shape(c, SHAPE(2));
    want_near(ctx, c, (double[]){14, 32}, 0);
    xt_tensor_release(ctx, c);
    c = product(ctx, row, row);
    assert_int_equal(xt_ndim(c), 0);
    want_near(ctx, c, (double[]){14}, 0);
    xt_tensor_release(ctx, c);
    struct xt_tensor *bias = make(ctx, XT_F32, SHAPE(2), (double[]){10, -10}, 0);
    c = linear(ctx, row, a, bias);
    want_shape(c, SHAPE(2));
    want_near(ctx, c, (double[]){24, 22}, 0);
    xt_tensor_release(ctx, c);
    xt_tensor_release(ctx, bias);
    xt_tensor_release(ctx, a);
    xt_tensor_release(ctx, b);
    xt_tensor_release(ctx, row);
}

static const enum xt_dtype dtypes[] = {XT_F32, XT_BF16, XT_F64};

/* a and b in all four layouts, each against the formula and the contiguous one's bits. */
static void want_layouts(struct xt_ctx *ctx, enum xt_dtype dtype, int64_t m, int64_t n, int64_t k) {
    struct xt_tensor *a = make(ctx, dtype, SHAPE(m, k), NULL, 1), *at_, *at, *bt_, *bt, *c, *d;
    struct xt_tensor *b = make(ctx, dtype, SHAPE(k, n), NULL, 2);
    c = product(ctx, a, b);
    want_shape(c, SHAPE(m, n));
    want_product(ctx, a, b, c);
    at_ = turned(ctx, a);
    ok(ctx, xt_contiguous(ctx, at_, &at));
    xt_tensor_release(ctx, at_);
    at_ = turned(ctx, at); /* a's values, column after column */
    bt_ = turned(ctx, b);
    ok(ctx, xt_contiguous(ctx, bt_, &bt));
    xt_tensor_release(ctx, bt_);
    bt_ = turned(ctx, bt);
    struct xt_tensor *pairs[3][2] = {{at_, b}, {a, bt_}, {at_, bt_}};
    for (int i = 0; i < 3; i++) {
        d = product(ctx, pairs[i][0], pairs[i][1]);
        want_same_bits(ctx, c, d);
        xt_tensor_release(ctx, d);
    }
    struct xt_tensor *all[] = {a, b, c, at, at_, bt, bt_};
    for (int i = 0; i < 7; i++) xt_tensor_release(ctx, all[i]);
}

static void every_size_and_layout_gives_the_formula(void **state) {
    static const int64_t sizes[][3] = {
        {1, 1, 1},    {2, 3, 4},    {1, 17, 5},     {17, 1, 33},    {6, 16, 256},  {7, 15, 257},
        {5, 31, 300}, {12, 32, 64}, {13, 33, 520},  {100, 50, 70},  {97, 130, 35}, {3, 700, 90},
        {200, 2, 90}, {64, 64, 64}, {40, 40, 2500}, {33, 65, 4099},
    };
    for (size_t d = 0; d < 3; d++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            want_layouts(*state, dtypes[d], sizes[i][0], sizes[i][1], sizes[i][2]);
}

static void leading_dimensions_broadcast(void **state) {
    struct xt_ctx *ctx = *state;
    for (size_t d = 0; d < 3; d++)
        for (int64_t size = 3; size <= 40; size += 37) {
            struct xt_tensor *a = make(ctx, dtypes[d], SHAPE(2, 5, size, 7), NULL, 1);
            struct xt_tensor *b = make(ctx, dtypes[d], SHAPE(2, 5, 7, size), NULL, 2);
            struct xt_tensor *one = make(ctx, dtypes[d], SHAPE(7, size), NULL, 3);
            struct xt_tensor *left = make(ctx, dtypes[d], SHAPE(1, 1, size, 7), NULL, 4);
            struct xt_tensor *pairs[][2] = {{a, b}, {a, one}, {left, b}};
            for (int i = 0; i < 3; i++) {
                struct xt_tensor *c = product(ctx, pairs[i][0], pairs[i][1]);
                want_shape(c, SHAPE(2, 5, size, size));
                want_product(ctx, pairs[i][0], pairs[i][1], c);
                xt_tensor_release(ctx, c);
            }
            xt_tensor_release(ctx, a);
            xt_tensor_release(ctx, b);
            xt_tensor_release(ctx, one);
            xt_tensor_release(ctx, left);
        }
}

/* (B, S, H, D) permuted to (B, H, S, D), a slice with steps left out, an expanded batch: as
   copies. */
static void any_view_gives_the_bits_of_its_copy(void **state) {
    struct xt_ctx *ctx = *state;
    for (size_t d = 0; d < 3; d++) {
        struct xt_tensor *base = make(ctx, dtypes[d], SHAPE(2, 20, 3, 24), NULL, 1);
        struct xt_tensor *views[4], *copies[4];
        views[0] = with_list(ctx, "permute", base, SHAPE(0, 2, 1, 3));
        views[1] = turned(ctx, views[0]);
        struct xt_tensor *few = with_ints(ctx, "slice", views[0], 3, (int64_t[]){3, 2, 21});
        views[2] = turned(ctx, few);
        struct xt_tensor *single = make(ctx, dtypes[d], SHAPE(1, 1, 24, 9), NULL, 2);
        ok(ctx, xt_expand(ctx, single, (int64_t[]){2, 3, 24, 9}, 4, &views[3]));
        for (int i = 0; i < 4; i++) ok(ctx, xt_contiguous(ctx, views[i], &copies[i]));
        static const int pairs[][2] = {{0, 1}, {1, 0}, {0, 3}, {2, 0}};
        for (int i = 0; i < 3; i++) {
            struct xt_tensor *c = product(ctx, views[pairs[i][0]], views[pairs[i][1]]);
            struct xt_tensor *e = product(ctx, copies[pairs[i][0]], copies[pairs[i][1]]);
            want_product(ctx, copies[pairs[i][0]], copies[pairs[i][1]], c);
            want_same_bits(ctx, c, e);
            xt_tensor_release(ctx, c);
            xt_tensor_release(ctx, e);
        }
        for (int i = 0; i < 4; i++) xt_tensor_release(ctx, views[i]);
        for (int i = 0; i < 4; i++) xt_tensor_release(ctx, copies[i]);
        xt_tensor_release(ctx, base);
        xt_tensor_release(ctx, few);
        xt_tensor_release(ctx, single);
    }
}

static void sizes_of_zero_give_zeros_or_nothing(void **state) {
    struct xt_ctx *ctx = *state;
    static const int64_t sizes[][3] = {{0, 3, 4}, {3, 0, 4}, {3, 4, 0}, {0, 0, 0}};
    for (size_t d = 0; d < 3; d++)
        for (int i = 0; i < 4; i++)
            want_layouts(ctx, dtypes[d], sizes[i][0], sizes[i][1], sizes[i][2]);
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(2, 0), NULL, 1), *out;
    struct xt_tensor *weight = make(ctx, XT_F32, SHAPE(3, 0), NULL, 1);
    struct xt_tensor *bias = make(ctx, XT_F32, SHAPE(3), (double[]){1, 2, 3}, 0);
    out = linear(ctx, x, weight, bias);
    want_near(ctx, out, (double[]){1, 2, 3, 1, 2, 3}, 0);
    xt_tensor_release(ctx, out);
    xt_tensor_release(ctx, x);
    xt_tensor_release(ctx, weight);
    xt_tensor_release(ctx, bias);
}

static void linear_is_a_product_and_a_bias_rounded_once(void **state) {
    struct xt_ctx *ctx = *state;
    static const int64_t sizes[][3] = {{4, 5, 6}, {300, 40, 200}, {1, 40, 600}, {90, 50, 3000}};
    for (size_t d = 0; d < 3; d++)
        for (int i = 0; i < 4; i++)
            for (int bf16_bias = 0; bf16_bias < (dtypes[d] == XT_BF16 ? 2 : 1); bf16_bias++) {
                const int64_t m = sizes[i][0], n = sizes[i][1], k = sizes[i][2];
                const enum xt_dtype wide = dtypes[d] == XT_F64 ? XT_F64 : XT_F32;
                struct xt_tensor *x = make(ctx, dtypes[d], SHAPE(m, 1, k), NULL, 1);
                struct xt_tensor *w = make(ctx, dtypes[d], SHAPE(n, k), NULL, 2);
                struct xt_tensor *b = make(ctx, bf16_bias ? XT_BF16 : wide, SHAPE(n), NULL, 3);
                struct xt_tensor *out = linear(ctx, x, w, b);
                want_shape(out, SHAPE(m, 1, n));
                double *vx = numbers(ctx, x), *vw = numbers(ctx, w), *vb = numbers(ctx, b);
                double *want = malloc((size_t)(m * n) * sizeof *want);
                assert_non_null(want);
                for (int64_t r = 0; r < m * n; r++) {
                    want[r] = vb[r % n];
                    for (int64_t p = 0; p < k; p++)
                        want[r] += vx[r / n * k + p] * vw[r % n * k + p];
                }
                want_near(ctx, out, want, tolerance(dtypes[d], k + 1));
                free(vx);
                free(vw);
                free(vb);
                free(want);
                xt_tensor_release(ctx, x);
                xt_tensor_release(ctx, w);
                xt_tensor_release(ctx, b);
                xt_tensor_release(ctx, out);
            }
}

/* ---- bits ------------------------------------------------------------------------------------ */

/* target (+)= a @ b in f32, at several numbers of threads, and a @ b in its own dtype. */
static void want_bits_at_any_threads(struct xt_ctx *ctx, enum xt_dtype dtype, int64_t m, int64_t n,
                                     int64_t k, bool turn_a, bool turn_b) {
    static const int threads[] = {1, 2, 3, 4, 7};
    struct xt_tensor *a = make(ctx, dtype, 2, (int64_t[]){turn_a ? k : m, turn_a ? m : k}, NULL, 1);
    struct xt_tensor *b = make(ctx, dtype, 2, (int64_t[]){turn_b ? n : k, turn_b ? k : n}, NULL, 2);
    struct xt_tensor *x = turn_a ? turned(ctx, a) : xt_tensor_retain(a);
    struct xt_tensor *y = turn_b ? turned(ctx, b) : xt_tensor_retain(b), *first = NULL, *sum = NULL;
    const int before = xt_threads(ctx);
    for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
        xt_set_threads(ctx, threads[t]);
        struct xt_tensor *c = product(ctx, x, y);
        struct xt_tensor *target = make(ctx, XT_F32, SHAPE(m, n), NULL, 3);
        struct xt_args args;
        const struct xt_op *op;
        begin(ctx, &args, "matmul_acc", (struct xt_tensor *[]){target, x, y}, 3, &op);
        args.attrs[0].i = 1;
        ok(ctx, xt_call_run(ctx, op, &args, NULL));
        if (!first) {
            first = xt_tensor_retain(c);
            sum = xt_tensor_retain(target);
        }
        want_same_bits(ctx, first, c);
        want_same_bits(ctx, sum, target);
        xt_tensor_release(ctx, c);
        xt_tensor_release(ctx, target);
    }
    xt_set_threads(ctx, before);
    struct xt_tensor *all[] = {a, b, x, y, first, sum};
    for (int i = 0; i < 6; i++) xt_tensor_release(ctx, all[i]);
}

static void the_number_of_threads_never_shows(void **state) {
    static const struct {
        int64_t m, n, k;
        bool turn_a, turn_b;
    } cases[] = {
        {2048, 192, 192, false, true},   {2048, 256, 256, false, true},
        {2048, 768, 192, false, true},   {2048, 192, 768, false, true},
        {2048, 2048, 192, false, true},  {2048, 192, 256, false, false},
        {2048, 192, 768, false, false},  {2048, 768, 192, false, false},
        {2048, 192, 2048, false, false}, {192, 192, 2048, true, false},
        {256, 256, 4096, true, false},   {768, 192, 2048, true, false},
        {192, 768, 2048, true, false},   {2048, 192, 2048, true, false},
        {33, 65, 4099, false, false},    {33, 65, 4099, false, true},
        {33, 65, 4099, true, false},     {128, 128, 65536, false, false},
        {128, 128, 65536, false, true},  {128, 128, 65536, true, false},
        {5, 3000, 700, false, true},     {1, 4096, 1024, false, true},
    };
    /* Under valgrind the large ones would take an hour. */
    const int64_t most = getenv("XT_TEST_SMALL") ? 1 << 24 : INT64_MAX;
    for (size_t d = 0; d < 2; d++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
            if (cases[i].m * cases[i].n * cases[i].k <= most)
                want_bits_at_any_threads(*state, dtypes[d], cases[i].m, cases[i].n, cases[i].k,
                                         cases[i].turn_a, cases[i].turn_b);
}

static void batches_have_the_same_bits_at_any_threads(void **state) {
    struct xt_ctx *ctx = *state;
    const int before = xt_threads(ctx);
    for (size_t d = 0; d < 3; d++) {
        struct xt_tensor *a = make(ctx, dtypes[d], SHAPE(4, 6, 128, 64), NULL, 1), *first = NULL;
        struct xt_tensor *b = turned(ctx, a);
        for (int threads = 1; threads <= 7; threads++) {
            xt_set_threads(ctx, threads);
            struct xt_tensor *c = product(ctx, a, b);
            if (!first) first = xt_tensor_retain(c);
            want_same_bits(ctx, first, c);
            xt_tensor_release(ctx, c);
        }
        xt_tensor_release(ctx, a);
        xt_tensor_release(ctx, b);
        xt_tensor_release(ctx, first);
    }
    xt_set_threads(ctx, before);
}

/* ---- errors ---------------------------------------------------------------------------------- */

static void wants(struct xt_ctx *ctx, const char *name, struct xt_tensor *a, struct xt_tensor *b,
                  struct xt_tensor *c, enum xt_status status, const char *text) {
    struct xt_args args;
    const struct xt_op *op;
    begin(ctx, &args, name, (struct xt_tensor *[]){a, b, c}, strcmp(name, "matmul") ? 3 : 2, &op);
    want_failure(ctx, op, &args, status, text);
}

static void misuse_names_what_was_given(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *a = make(ctx, XT_F32, SHAPE(3, 4), NULL, 1);
    struct xt_tensor *b = make(ctx, XT_F32, SHAPE(5, 2), NULL, 1);
    struct xt_tensor *half = make(ctx, XT_BF16, SHAPE(4, 2), NULL, 1);
    struct xt_tensor *scalar = make(ctx, XT_F32, 0, NULL, NULL, 1);
    struct xt_tensor *many = make(ctx, XT_F32, SHAPE(2, 3, 4), NULL, 1);
    struct xt_tensor *more = make(ctx, XT_F32, SHAPE(3, 4, 5), NULL, 1);
    struct xt_tensor *whole = make(ctx, XT_I32, SHAPE(4, 2), NULL, 1);
    struct xt_tensor *square = make(ctx, XT_F32, SHAPE(4, 4), NULL, 1);
    wants(ctx, "matmul", a, b, NULL, XT_SHAPE,
          "matmul: a is 3x4, b is 5x2: inner sizes 4 and 5 differ");
    wants(ctx, "matmul", a, half, NULL, XT_DTYPE,
          "matmul: a is f32 3x4, b is bf16 4x2: wanted the same dtype");
    wants(ctx, "matmul", a, scalar, NULL, XT_SHAPE,
          "matmul: b is a scalar (f32), wanted 1 dimension or more");
    wants(ctx, "matmul", many, more, NULL, XT_SHAPE,
          "matmul: a is 2x3x4, b is 3x4x5: batch sizes 2 and 3 do not broadcast");
    wants(ctx, "matmul", whole, whole, NULL, XT_DTYPE,
          "matmul: a is i32 4x2, wanted f32, bf16, f64");
    wants(ctx, "linear", a, b, NULL, XT_SHAPE,
          "linear: x is 3x4, weight is 5x2 (out x in): inner sizes 4 and 2 differ");
    wants(ctx, "linear", a, many, NULL, XT_SHAPE,
          "linear: weight is 2x3x4, wanted 2 dimensions, out x in");
    wants(ctx, "linear", a, square, a, XT_SHAPE,
          "linear: bias is 3x4, wanted 4, one number for each row of weight");
    struct xt_tensor *all[] = {a, b, half, scalar, many, more, whole, square};
    for (int i = 0; i < 8; i++) xt_tensor_release(ctx, all[i]);
}

/* ---- gradients ------------------------------------------------------------------------------- */

static void gradients_agree_with_differences(void **state) {
    struct xt_ctx *ctx = *state;
    static const struct {
        int a_ndim;
        int64_t a[4];
        int b_ndim;
        int64_t b[4];
    } cases[] = {
        {2, {3, 4}, 2, {4, 5}},       {1, {4}, 2, {4, 5}},
        {2, {3, 4}, 1, {4}},          {1, {4}, 1, {4}},
        {3, {2, 3, 4}, 2, {4, 5}},    {2, {3, 4}, 3, {2, 4, 5}},
        {3, {2, 3, 4}, 3, {2, 4, 5}}, {3, {2, 3, 4}, 1, {4}},
        {1, {4}, 3, {2, 4, 5}},       {4, {2, 1, 3, 4}, 3, {6, 4, 5}},
        {3, {1, 3, 4}, 3, {2, 4, 5}}, {2, {0, 4}, 2, {4, 5}},
        {2, {3, 0}, 2, {0, 5}},       {3, {2, 3, 4}, 3, {1, 4, 5}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct xt_tensor *in[2] = {make(ctx, XT_F64, cases[i].a_ndim, cases[i].a, NULL, 1),
                                   make(ctx, XT_F64, cases[i].b_ndim, cases[i].b, NULL, 2)};
        struct xt_args args;
        const struct xt_op *op;
        begin(ctx, &args, "matmul", in, 2, &op);
        want_gradient(ctx, op, &args, 0);
        want_gradient(ctx, op, &args, 1);
        xt_tensor_release(ctx, in[0]);
        xt_tensor_release(ctx, in[1]);
    }
    struct xt_tensor *in[3] = {make(ctx, XT_F64, SHAPE(2, 3, 4), NULL, 1),
                               make(ctx, XT_F64, SHAPE(5, 4), NULL, 2),
                               make(ctx, XT_F64, SHAPE(5), NULL, 3)};
    struct xt_args args;
    const struct xt_op *op;
    begin(ctx, &args, "linear", in, 3, &op);
    for (int i = 0; i < 3; i++) want_gradient(ctx, op, &args, i);
    for (int i = 0; i < 3; i++) xt_tensor_release(ctx, in[i]);
}

/* The compute copy's gradient is f32, added where the master's lies, and never rounded to bf16. */
static void gradients_of_a_bf16_copy_add_up_in_f32(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *w0 = make(ctx, XT_F32, SHAPE(8, 16), NULL, 1), *w, *copy;
    struct xt_tensor *b0 = make(ctx, XT_F32, SHAPE(8), NULL, 4), *b;
    ok(ctx, xt_var_new(ctx, w0, &w));
    ok(ctx, xt_var_new(ctx, b0, &b));
    double want[8 * 16] = {0}, sums[8] = {0};
    for (uint64_t micro = 0; micro < 3; micro++) {
        struct xt_tensor *x = make(ctx, XT_BF16, SHAPE(2, 30, 16), NULL, 10 + micro), *y;
        struct xt_tensor *seed = make(ctx, XT_BF16, SHAPE(2, 30, 8), NULL, 20 + micro);
        ok(ctx, xt_compute_copy(ctx, w, XT_BF16, &copy));
        y = linear(ctx, x, copy, b);
        ok(ctx, xt_backward(ctx, y, seed, false));
        double *vx = numbers(ctx, x), *vs = numbers(ctx, seed);
        for (int r = 0; r < 60; r++)
            for (int i = 0; i < 8; i++) {
                sums[i] += vs[r * 8 + i];
                for (int j = 0; j < 16; j++) want[i * 16 + j] += vs[r * 8 + i] * vx[r * 16 + j];
            }
        free(vx);
        free(vs);
        xt_tensor_release(ctx, copy);
        xt_tensor_release(ctx, x);
        xt_tensor_release(ctx, y);
        xt_tensor_release(ctx, seed);
    }
    assert_int_equal(xt_dtype_of(xt_grad_of(w)), XT_F32);
    want_near(ctx, xt_grad_of(w), want, tolerance(XT_F32, 180));
    want_near(ctx, xt_grad_of(b), sums, tolerance(XT_F32, 180));
    xt_tensor_release(ctx, w0);
    xt_tensor_release(ctx, b0);
    xt_tensor_release(ctx, w);
    xt_tensor_release(ctx, b);
}

static void a_zero_size_batch_gives_zero_gradients(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *w0 = make(ctx, XT_F32, SHAPE(3, 4), NULL, 1), *w, *x, *y, *seed;
    struct xt_tensor *x0 = make(ctx, XT_F32, SHAPE(0, 4), NULL, 1);
    ok(ctx, xt_var_new(ctx, w0, &w));
    ok(ctx, xt_var_new(ctx, x0, &x));
    y = linear(ctx, x, w, NULL);
    want_shape(y, SHAPE(0, 3));
    seed = make(ctx, XT_F32, SHAPE(0, 3), NULL, 1);
    ok(ctx, xt_backward(ctx, y, seed, false));
    want_near(ctx, xt_grad_of(w), (double[12]){0}, 0);
    want_shape(xt_grad_of(x), SHAPE(0, 4));
    struct xt_tensor *all[] = {w0, w, x0, x, y, seed};
    for (int i = 0; i < 6; i++) xt_tensor_release(ctx, all[i]);
}

/* Every allocation of a step fails once; nothing is left behind, and the step can be made again. */
static void a_failed_allocation_leaves_nothing(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *w0 = make(ctx, XT_F32, SHAPE(40, 70), NULL, 1), *w;
    struct xt_tensor *x0 = make(ctx, XT_BF16, SHAPE(2, 90, 70), NULL, 2), *x;
    struct xt_tensor *seed = make(ctx, XT_BF16, SHAPE(2, 90, 40), NULL, 3);
    ok(ctx, xt_var_new(ctx, w0, &w));
    ok(ctx, xt_var_new(ctx, x0, &x));
    struct xt_tensor *warm;
    ok(ctx, xt_compute_copy(ctx, w, XT_BF16, &warm));
    xt_tensor_release(ctx, warm);
    bool done = false;
    for (int64_t n = 1; !done; n++) {
        assert_true(n < 1000);
        const int64_t live = xt_live_count(ctx);
        struct xt_tensor *copy = NULL, *y = NULL;
        xt_fail_allocation(ctx, n);
        enum xt_status status = xt_compute_copy(ctx, w, XT_BF16, &copy);
        if (status == XT_OK)
            status = xt_apply_name(ctx, "linear", (struct xt_tensor *[]){x, copy, NULL}, 3, &y);
        if (status == XT_OK) status = xt_backward(ctx, y, seed, false);
        done = status == XT_OK;
        xt_fail_allocation(ctx, 0);
        xt_tensor_release(ctx, copy);
        xt_tensor_release(ctx, y);
        xt_zero_grad(ctx, w);
        xt_zero_grad(ctx, x);
        if (!done) {
            assert_int_equal(status, XT_MEMORY);
            assert_true(xt_live_count(ctx) - live <= 4); /* gradient buffers, which are kept */
        }
    }
    xt_tensor_release(ctx, w0);
    xt_tensor_release(ctx, x0);
    xt_tensor_release(ctx, w);
    xt_tensor_release(ctx, x);
    xt_tensor_release(ctx, seed);
}

/* ---- oneDNN ---------------------------------------------------------------------------------- */

/* In f32, which every processor multiplies, so that what is declared of its API is exercised. */
static void onednn_runs_a_product_where_it_is_installed(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_library library;
    ok(ctx, xt_library_onednn(ctx, &library));
    if (!library.found) {
        assert_string_not_equal(library.detail, "");
        skip();
    }
    /* Room behind the arrays: oneDNN 2.6's f32 kernels load a few rows past the end of a turned
       a. */
    enum { M = 37, N = 20, K = 55, ROOM = 1024 };
    static float a[M * K + ROOM], b[N * K + ROOM], c[M * N + ROOM];
    for (int i = 0; i < M * K; i++) a[i] = (float)noise(1, i);
    for (int i = 0; i < N * K; i++) b[i] = (float)noise(2, i);
    for (int turn = 0; turn < 4; turn++) {
        const bool ta = turn & 1, tb = turn & 2;
        const struct xt_onednn_product p = {XT_F32,     M,          N,          K,
                                            ta ? 1 : K, ta ? M : 1, tb ? 1 : N, tb ? K : 1};
        for (int thread = 0; thread < 3; thread++) {
            struct xt_onednn_job *job = xt_onednn_prepare(ctx, thread, &p);
            assert_non_null(job);
            assert_ptr_equal(job, xt_onednn_prepare(ctx, thread, &p));
            assert_true(xt_onednn_run(ctx, thread, job, a, b, c));
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++) {
                    double sum = 0;
                    for (int k = 0; k < K; k++)
                        sum += (double)a[i * p.a_row + k * p.a_col] *
                               (double)b[k * p.b_row + j * p.b_col];
                    assert_true(fabs((double)c[i * N + j] - sum) <= tolerance(XT_F32, K));
                }
        }
    }
    /* More shapes than places: old ones go, the last 32 stay. */
    struct xt_onednn_job *last = NULL;
    for (int64_t m = 1; m <= 40; m++) {
        const struct xt_onednn_product p = {XT_F32, m, N, K, K, 1, N, 1};
        last = xt_onednn_prepare(ctx, 0, &p);
        assert_non_null(last);
    }
    assert_true(xt_onednn_run(ctx, 0, last, a, b, c));
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(golden_values, open_ctx, close_ctx),
        cmocka_unit_test_setup_teardown(every_size_and_layout_gives_the_formula, open_ctx,
                                        close_ctx),
        cmocka_unit_test_setup_teardown(leading_dimensions_broadcast, open_ctx, close_ctx),
        cmocka_unit_test_setup_teardown(any_view_gives_the_bits_of_its_copy, open_ctx, close_ctx),
        cmocka_unit_test_setup_teardown(sizes_of_zero_give_zeros_or_nothing, open_ctx, close_ctx),
        cmocka_unit_test_setup_teardown(linear_is_a_product_and_a_bias_rounded_once, open_ctx,
                                        close_ctx),
        cmocka_unit_test_setup_teardown(the_number_of_threads_never_shows, open_ctx, close_ctx),
        cmocka_unit_test_setup_teardown(batches_have_the_same_bits_at_any_threads, open_ctx,
                                        close_ctx),
        cmocka_unit_test_setup_teardown(misuse_names_what_was_given, open_ctx, close_ctx),
        cmocka_unit_test_setup_teardown(gradients_agree_with_differences, open_ctx, close_ctx),
        cmocka_unit_test_setup_teardown(gradients_of_a_bf16_copy_add_up_in_f32, open_ctx,
                                        close_ctx),
        cmocka_unit_test_setup_teardown(a_zero_size_batch_gives_zero_gradients, open_ctx,
                                        close_ctx),
        cmocka_unit_test_setup_teardown(a_failed_allocation_leaves_nothing, open_ctx, close_ctx),
        cmocka_unit_test_setup_teardown(onednn_runs_a_product_where_it_is_installed, open_ctx,
                                        close_ctx),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
