/*
 * reduce.c: folding dimensions: sum, mean, amax, amin, norm.
 *
 * Runs are cut in chunks and columns in strips by the tensor's shape alone, and the totals of
 * chunks are taken in order: the number of threads never shows.
 */
#include "fold.h"

#include "../dims.h"

#define STRIP 512 /* columns folded at a time */

enum fold { FOLD_SUM, FOLD_SQUARES, FOLD_MAX, FOLD_MIN };

/* Folds n elements into *acc. */
typedef void run_fn(const void *x, int64_t n, union total *acc);
/* rows[0..m), each of `wide` elements, into wide totals; 1 <= m <= 8. */
typedef void rows_fn(const void *const *rows, int m, int64_t wide, union total *acc);

#define RUN(name, TYPE, field, expression)                                                         \
    static void run_##name(const void *from, int64_t n, union total *acc) {                        \
        const TYPE *x = from;                                                                      \
        acc->field = expression;                                                                   \
    }

/* Eight rows at once by `all`, fewer one by one by `one`, an expression of x. */
#define ROWS(name, TYPE, field, all, one)                                                          \
    static void rows_##name(const void *const *rows, int m, int64_t wide, union total *acc) {      \
        const TYPE *row[8];                                                                        \
        for (int k = 0; k < m; k++) row[k] = rows[k];                                              \
        if (m == 8)                                                                                \
            for (int64_t j = 0; j < wide; j++) acc[j].field = all;                                 \
        else                                                                                       \
            for (int k = 0; k < m; k++)                                                            \
                for (int64_t j = 0; j < wide; j++) {                                               \
                    TYPE x = row[k][j];                                                            \
                    acc[j].field = one;                                                            \
                }                                                                                  \
    }

#define SQUARE(x) ((double)(x) * (double)(x))
#define IN_ROWS(j, k) row[k][j]
#define SQUARE_IN_ROWS(j, k) SQUARE(row[k][j])
#define BETTER(x, op, y) ((x) != (x) ? (x) : (x)op(y) ? (x) : (y))

/* In double: f32 squares neither overflow nor vanish. */
#define SQUARES_RUN(name, TYPE)                                                                    \
    static double squares_run_##name(const TYPE *x, int64_t n) {                                   \
        double lane[LANES] = {0}, rest = 0;                                                        \
        for (; n >= LANES; n -= LANES, x += LANES)                                                 \
            for (int j = 0; j < LANES; j++) lane[j] += SQUARE(x[j]);                               \
        for (int64_t j = 0; j < n; j++) rest += SQUARE(x[j]);                                      \
        return add_lanes(lane) + rest;                                                             \
    }

SQUARES_RUN(f32, float)
SQUARES_RUN(f64, double)

EXTREME_RUN(min_run_f32, float, <, INFINITY)
EXTREME_RUN(min_run_f64, double, <, INFINITY)
EXTREME_RUN(min_run_i64, int64_t, <, INT64_MAX)

/* Integers wrap around. */
static uint64_t sum_run_i64(const uint64_t *x, int64_t n) {
    uint64_t sum = 0;
    for (int64_t j = 0; j < n; j++) sum += x[j];
    return sum;
}

static inline double better_max_f(double x, double best) {
    return BETTER(x, >, best);
}
static inline double better_min_f(double x, double best) {
    return BETTER(x, <, best);
}
static inline int64_t better_max_i(int64_t x, int64_t best) {
    return BETTER(x, >, best);
}
static inline int64_t better_min_i(int64_t x, int64_t best) {
    return BETTER(x, <, best);
}

RUN(sum_f32, float, f, acc->f + sum_run_f32(x, n))
RUN(sum_f64, double, f, acc->f + sum_run_f64(x, n))
RUN(sum_i64, uint64_t, i, (int64_t)((uint64_t)acc->i + sum_run_i64(x, n)))
RUN(squares_f32, float, f, acc->f + squares_run_f32(x, n))
RUN(squares_f64, double, f, acc->f + squares_run_f64(x, n))
RUN(max_f32, float, f, better_max_f((double)max_run_f32(x, n), acc->f))
RUN(max_f64, double, f, better_max_f(max_run_f64(x, n), acc->f))
RUN(max_i64, int64_t, i, better_max_i(max_run_i64(x, n), acc->i))
RUN(min_f32, float, f, better_min_f((double)min_run_f32(x, n), acc->f))
RUN(min_f64, double, f, better_min_f(min_run_f64(x, n), acc->f))
RUN(min_i64, int64_t, i, better_min_i(min_run_i64(x, n), acc->i))

ROWS(sum_f32, float, f, acc[j].f + (double)TREE8(IN_ROWS, j), acc[j].f + (double)x)
ROWS(sum_f64, double, f, acc[j].f + TREE8(IN_ROWS, j), acc[j].f + x)
ROWS(sum_i64, uint64_t, i, (int64_t)((uint64_t)acc[j].i + TREE8(IN_ROWS, j)),
     (int64_t)((uint64_t)acc[j].i + x))
ROWS(squares_f32, float, f, acc[j].f + TREE8(SQUARE_IN_ROWS, j), acc[j].f + SQUARE(x))
ROWS(squares_f64, double, f, acc[j].f + TREE8(SQUARE_IN_ROWS, j), acc[j].f + SQUARE(x))
/* The best of the rows first, in their own type. */
#define EXTREME_ROWS(name, TYPE, op, field, better, ACC)                                           \
    static void rows_##name(const void *const *rows, int m, int64_t wide, union total *acc) {      \
        TYPE best[STRIP];                                                                          \
        memcpy(best, rows[0], (size_t)wide * sizeof *best);                                        \
        for (int k = 1; k < m; k++) {                                                              \
            const TYPE *row = rows[k];                                                             \
            for (int64_t j = 0; j < wide; j++) {                                                   \
                TYPE x = row[j], y = best[j], z = x op y ? x : y;                                  \
                best[j] = x != x ? x : z;                                                          \
            }                                                                                      \
        }                                                                                          \
        for (int64_t j = 0; j < wide; j++) acc[j].field = better((ACC)best[j], acc[j].field);      \
    }

EXTREME_ROWS(max_f32, float, >, f, better_max_f, double)
EXTREME_ROWS(max_f64, double, >, f, better_max_f, double)
EXTREME_ROWS(max_i64, int64_t, >, i, better_max_i, int64_t)
EXTREME_ROWS(min_f32, float, <, f, better_min_f, double)
EXTREME_ROWS(min_f64, double, <, f, better_min_f, double)
EXTREME_ROWS(min_i64, int64_t, <, i, better_min_i, int64_t)

static const struct folder {
    run_fn *run;   /* of elements that lie side by side */
    rows_fn *rows; /* of columns */
} folders[4][3] = {
    [FOLD_SUM] = {{run_sum_f32, rows_sum_f32},
                  {run_sum_f64, rows_sum_f64},
                  {run_sum_i64, rows_sum_i64}},
    [FOLD_SQUARES] = {{run_squares_f32, rows_squares_f32},
                      {run_squares_f64, rows_squares_f64},
                      {NULL, NULL}},
    [FOLD_MAX] = {{run_max_f32, rows_max_f32},
                  {run_max_f64, rows_max_f64},
                  {run_max_i64, rows_max_i64}},
    [FOLD_MIN] = {{run_min_f32, rows_min_f32},
                  {run_min_f64, rows_min_f64},
                  {run_min_i64, rows_min_i64}},
};

/* ---- folding: how the tensor is cut ---------------------------------------------------------- */

#define CHUNK 16384 /* elements of a long run that are folded into one total */

/* x as (outer, n, inner), contiguous; n is folded. */
struct folding {
    enum fold fold;
    enum work work;
    enum xt_dtype dtype; /* of x */
    int64_t outer, n, inner;
    int64_t chunks, chunk; /* n is cut in `chunks` of `chunk` */
    const char *data;
};

static union total start_of(const struct folding *f) {
    union total t = {0};
    if (f->fold == FOLD_SUM || f->fold == FOLD_SQUARES) return t;
    bool max = f->fold == FOLD_MAX;
    if (f->work == WORK_I64)
        t.i = max ? INT64_MIN : INT64_MAX;
    else
        t.f = max ? -INFINITY : INFINITY;
    return t;
}

/* acc[0..wide) takes in what a later chunk gave. */
static void take_in(const struct folding *f, union total *acc, const union total *more,
                    int64_t wide) {
    bool whole = f->work == WORK_I64;
    for (int64_t j = 0; j < wide; j++) {
        double a = acc[j].f, b = more[j].f;
        int64_t ai = acc[j].i, bi = more[j].i;
        switch (f->fold) {
        case FOLD_SUM:
        case FOLD_SQUARES:
            if (whole)
                acc[j].i = (int64_t)((uint64_t)ai + (uint64_t)bi);
            else
                acc[j].f = a + b;
            break;
        case FOLD_MAX:
            if (whole)
                acc[j].i = bi > ai ? bi : ai;
            else
                acc[j].f = BETTER(b, >, a);
            break;
        case FOLD_MIN:
            if (whole)
                acc[j].i = bi < ai ? bi : ai;
            else
                acc[j].f = BETTER(b, <, a);
            break;
        }
    }
}

/* Chunk c of outer place o, columns begin .. begin + wide - 1. */
static void fold_chunk(const struct folding *f, int64_t o, int64_t c, int64_t begin, int64_t wide,
                       union total *acc) {
    const struct folder *folder = &folders[f->fold][f->work];
    int64_t bytes = (int64_t)xt_dtype_bytes(f->dtype), first = c * f->chunk;
    int64_t count = f->n - first < f->chunk ? f->n - first : f->chunk;
    const char *x = f->data + ((o * f->n + first) * f->inner + begin) * bytes;
    bool direct = is_work(f->dtype);
    for (int64_t j = 0; j < wide; j++) acc[j] = start_of(f);
    if (f->inner == 1) {
        _Alignas(64) int64_t wider[PIECE];
        if (direct)
            folder->run(x, count, acc);
        else
            for (int64_t i = 0; i < count; i += PIECE) {
                int64_t m = count - i < PIECE ? count - i : PIECE;
                folder->run(widen(x + i * bytes, f->dtype, m, wider), m, acc);
            }
        return;
    }
    _Alignas(64) int64_t wider[8][STRIP];
    for (int64_t i = 0; i < count; i += 8) {
        const void *rows[8];
        int m = count - i < 8 ? (int)(count - i) : 8;
        for (int k = 0; k < m; k++)
            rows[k] = widen(x + (i + k) * f->inner * bytes, f->dtype, wide, wider[k]);
        folder->rows(rows, m, wide, acc);
    }
}

/* Totals to elements at, at + 1, ... of y. */
static void finish(const struct folding *f, bool mean, const union total *acc, int64_t count,
                   const struct xt_tensor *y, int64_t at) {
    char *to = (char *)xt_data(y) + at * (int64_t)xt_dtype_bytes(y->dtype);
    for (int64_t j = 0; j < count; j++) {
        double v = acc[j].f;
        if (mean) v /= (double)f->n;
        if (f->fold == FOLD_SQUARES) v = sqrt(v);
        switch (y->dtype) {
        case XT_F32: ((float *)(void *)to)[j] = (float)v; break;
        case XT_BF16: ((uint16_t *)(void *)to)[j] = xt_f32_to_bf16((float)v); break;
        case XT_F16: ((uint16_t *)(void *)to)[j] = xt_f32_to_f16((float)v); break;
        case XT_F64: ((double *)(void *)to)[j] = v; break;
        default: narrow(&acc[j].i, y->dtype, 1, to + j * (int64_t)xt_dtype_bytes(y->dtype));
        }
    }
}

/* Unit u of (outer, chunk, strip): into `partial`, or to the end when runs are not cut. */
static void fold_unit(const struct folding *f, int64_t u, bool mean, union total *partial,
                      const struct xt_tensor *y) {
    _Alignas(64) union total here[STRIP];
    int64_t strips = (f->inner + STRIP - 1) / STRIP, begin = u % strips * STRIP;
    int64_t o = u / strips / f->chunks, c = u / strips % f->chunks;
    int64_t wide = f->inner - begin < STRIP ? f->inner - begin : STRIP;
    union total *acc = partial ? partial + (o * f->chunks + c) * f->inner + begin : here;
    fold_chunk(f, o, c, begin, wide, acc);
    if (!partial) finish(f, mean, acc, wide, y, o * f->inner + begin);
}

static enum xt_status run_folding(struct xt_ctx *ctx, struct folding *f, bool mean,
                                  const struct xt_tensor *y) {
    int64_t strips = (f->inner + STRIP - 1) / STRIP, out = f->outer * f->inner;
    int64_t total = out * f->n;
    if (out == 0) return XT_OK;
    /* Cut long runs, and tall ones where the other dimensions give too little to share. */
    f->chunks = 1;
    if (f->inner == 1)
        f->chunks = (f->n + CHUNK - 1) / CHUNK;
    else if (f->outer * strips < 64) {
        f->chunks = 64 / (f->outer * strips);
        int64_t most = f->n * (f->inner < STRIP ? f->inner : STRIP) / CHUNK;
        if (f->chunks > most) f->chunks = most;
    }
    if (f->chunks < 1) f->chunks = 1;
    f->chunk = (f->n + f->chunks - 1) / f->chunks;
    f->chunk = (f->chunk + 7) / 8 * 8;
    if (f->inner == 1 && f->chunks > 1) f->chunk = CHUNK;
    int64_t units = f->outer * f->chunks * strips;
    size_t bytes = f->chunks > 1 ? (size_t)(f->chunks * out) * sizeof(union total) : 0;
    union total *partial = NULL;
    if (bytes) XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&partial));
    if (total <= XT_CPU_GRAIN || units == 1)
        for (int64_t u = 0; u < units; u++) fold_unit(f, u, mean, partial, y);
    else {
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static)
        for (int64_t u = 0; u < units; u++) fold_unit(f, u, mean, partial, y);
    }
    if (!partial) return XT_OK;
    for (int64_t o = 0; o < f->outer; o++) {
        union total *acc = partial + o * f->chunks * f->inner;
        for (int64_t c = 1; c < f->chunks; c++) take_in(f, acc, acc + c * f->inner, f->inner);
        finish(f, mean, acc, f->inner, y, o * f->inner);
    }
    xt_scratch_put(ctx, XT_CPU, partial, bytes);
    return XT_OK;
}

static enum xt_status fold_dims(struct xt_ctx *ctx, const struct xt_launch *l, enum fold fold,
                                bool mean) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    int64_t size[XT_MAX_DIMS];
    bool folds[XT_MAX_DIMS];
    unsigned mask = l->attrs[0].list.count ? 0 : ~0u;
    for (int i = 0; i < l->attrs[0].list.count; i++)
        mask |= 1u << l->ints[l->attrs[0].list.start + i];
    int n = xt_merge_folds(x, mask, size, folds);
    struct folding f = {.fold = fold,
                        .work = work_of(x->dtype),
                        .dtype = x->dtype,
                        .outer = 1,
                        .n = 1,
                        .inner = 1,
                        .data = xt_data(x)};
    int first = 0; /* the merged dimension that is folded */
    while (first < n && !folds[first]) first++;
    bool simple = n - first <= 2 && first <= 1;
    if (simple) {
        if (first > 0) f.outer = size[0];
        if (first < n) f.n = size[first];
        if (first + 1 < n) f.inner = size[first + 1];
        if (first == n) { /* nothing to fold: columns of one row */
            f.inner = f.outer;
            f.outer = 1;
        }
        return run_folding(ctx, &f, mean, y);
    }
    /* Several folded groups: a copy with the kept dimensions first. */
    int64_t shape[XT_MAX_DIMS], from[XT_MAX_DIMS], to[XT_MAX_DIMS], step = 1;
    int64_t stride[XT_MAX_DIMS], place = 1;
    int m = 0;
    for (int d = n - 1; d >= 0; d--) {
        stride[d] = place;
        place *= size[d];
    }
    for (int pass = 0; pass < 2; pass++)
        for (int d = 0; d < n; d++) {
            if (folds[d] != (pass == 1)) continue;
            shape[m] = size[d];
            from[m++] = stride[d];
            *(pass ? &f.n : &f.outer) *= size[d];
        }
    for (int d = m - 1; d >= 0; d--) {
        to[d] = step;
        step *= shape[d];
    }
    void *copy;
    size_t bytes = xt_nbytes(x);
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, &copy));
    if (bytes)
        XT_CPU(copy_strided)(ctx, xt_dtype_bytes(x->dtype), m, shape, copy, to, f.data, from);
    f.data = copy;
    enum xt_status status = run_folding(ctx, &f, mean, y);
    xt_scratch_put(ctx, XT_CPU, copy, bytes);
    return status;
}

static enum xt_status sum(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims(ctx, l, FOLD_SUM, false);
}

static enum xt_status mean(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims(ctx, l, FOLD_SUM, true);
}

static enum xt_status amax(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims(ctx, l, FOLD_MAX, false);
}

static enum xt_status amin(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims(ctx, l, FOLD_MIN, false);
}

static enum xt_status norm(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims(ctx, l, FOLD_SQUARES, false);
}

const struct xt_kernel XT_CPU(reduce_kernels)[] = {
    {"sum", XT_ANY, XT_CONTIGUOUS, sum},
    {"mean", XT_FLOATS, XT_CONTIGUOUS, mean},
    {"amax", XT_ANY, XT_CONTIGUOUS, amax},
    {"amin", XT_ANY, XT_CONTIGUOUS, amin},
    {"norm", XT_FLOATS, XT_CONTIGUOUS, norm},
    {"argmax", XT_ANY, XT_CONTIGUOUS, XT_CPU(argmax)},
    {"cumsum", XT_ANY, XT_CONTIGUOUS, XT_CPU(cumsum)},
    {"softmax", XT_FLOATS, XT_CONTIGUOUS, XT_CPU(softmax)},
    {"log_softmax", XT_FLOATS, XT_CONTIGUOUS, XT_CPU(log_softmax)},
    {"logsumexp", XT_FLOATS, XT_CONTIGUOUS, XT_CPU(logsumexp)},
    {"topk", XT_ANY, XT_CONTIGUOUS, XT_CPU(topk)},
    {"amax_grad", XT_FLOATS, XT_CONTIGUOUS, XT_CPU(amax_grad)},
    {"norm_grad", XT_FLOATS, XT_CONTIGUOUS, XT_CPU(norm_grad)},
    {"cumsum_grad", XT_FLOATS, XT_CONTIGUOUS, XT_CPU(cumsum_grad)},
    {"softmax_grad", XT_FLOATS, XT_CONTIGUOUS, XT_CPU(softmax_grad)},
    {"log_softmax_grad", XT_FLOATS, XT_CONTIGUOUS, XT_CPU(log_softmax_grad)},
    {"logsumexp_grad", XT_FLOATS, XT_CONTIGUOUS, XT_CPU(logsumexp_grad)},
    {0},
};
