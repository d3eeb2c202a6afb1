/*
 * reduce.c: folding dimensions, and ops along one dimension.
 *
 * Sums have one shape whatever the threads: blocks of eight elements (or rows) are added as a tree
 * in the element's type, block sums in double, long runs in chunks whose length follows from the
 * tensor's shape. Half-precision elements are widened to f32 first, integers to i64.
 */
#include "cpu.h"
#include "math.h"

#include <omp.h>
#include <string.h>

/* The type in which elements of a dtype are worked on. */
enum work { WORK_F32, WORK_F64, WORK_I64 };

static enum work work_of(enum xt_dtype dtype) {
    if (dtype == XT_F64) return WORK_F64;
    return xt_dtype_is_float(dtype) ? WORK_F32 : WORK_I64;
}

static size_t work_bytes(enum work work) {
    return work == WORK_F32 ? 4 : 8;
}

static bool is_work(enum xt_dtype dtype) {
    return dtype == XT_F32 || dtype == XT_F64 || dtype == XT_I64;
}

/* n elements of a dtype, widened to its work type; itself where nothing is to be done. */
static const void *widen(const void *from, enum xt_dtype dtype, int64_t n, void *to) {
    int64_t *wide = to;
    switch (dtype) {
    case XT_BF16:
    case XT_F16: XT_CPU(load_f32)(from, dtype, n, to); return to;
    case XT_I32:
        for (int64_t i = 0; i < n; i++) wide[i] = ((const int32_t *)from)[i];
        return to;
    case XT_U8:
        for (int64_t i = 0; i < n; i++) wide[i] = ((const uint8_t *)from)[i];
        return to;
    default: return from;
    }
}

/* The other way; `from` and `to` may not be the same place. */
static void narrow(const void *from, enum xt_dtype dtype, int64_t n, void *to) {
    const int64_t *wide = from;
    switch (dtype) {
    case XT_BF16:
    case XT_F16: XT_CPU(store_f32)(from, dtype, n, to); break;
    case XT_I32:
        for (int64_t i = 0; i < n; i++) ((int32_t *)to)[i] = (int32_t)wide[i];
        break;
    case XT_U8:
        for (int64_t i = 0; i < n; i++) ((uint8_t *)to)[i] = (uint8_t)wide[i];
        break;
    default: memcpy(to, from, (size_t)n * xt_dtype_bytes(dtype));
    }
}

/* ---- folding: what is done to a run of elements, and to rows of them ------------------------- */

enum fold { FOLD_SUM, FOLD_SQUARES, FOLD_MAX, FOLD_MIN };

/* Running results: double for floats, 64-bit integers for integers. */
union total {
    double f;
    int64_t i;
};

typedef void run_fn(const void *x, int64_t n, union total *acc);
/* rows[0..m), each of `wide` elements, into wide totals; 1 <= m <= 8. */
typedef void rows_fn(const void *const *rows, int m, int64_t wide, union total *acc);

#define TREE8(x, at)                                                                               \
    (((x(at, 0) + x(at, 1)) + (x(at, 2) + x(at, 3))) +                                             \
     ((x(at, 4) + x(at, 5)) + (x(at, 6) + x(at, 7))))
#define LANES 16

#define IN_RUN(j, k) x[(j) + (k)*LANES]
#define IN_ROWS(j, k) row[k][j]

/* TYPE elements are summed as SUM, results kept as ACC in field `field`. */
#define SUMS(name, TYPE, SUM, ACC, field)                                                          \
    static void sum_run_##name(const void *from, int64_t n, union total *acc) {                    \
        const TYPE *x = from;                                                                      \
        ACC lane[LANES] = {0}, rest = 0;                                                           \
        for (; n >= 8 * LANES; n -= 8 * LANES, x += 8 * LANES)                                     \
            for (int j = 0; j < LANES; j++) lane[j] += (ACC)TREE8((SUM)IN_RUN, j);                 \
        for (int64_t j = 0; j < n; j++) rest += (ACC)x[j];                                         \
        for (int half = LANES / 2; half > 0; half /= 2)                                            \
            for (int j = 0; j < half; j++) lane[j] += lane[j + half];                              \
        acc->field += lane[0] + rest;                                                              \
    }                                                                                              \
    static void sum_rows_##name(const void *const *rows, int m, int64_t wide, union total *acc) {  \
        const TYPE *row[8];                                                                        \
        for (int k = 0; k < m; k++) row[k] = rows[k];                                              \
        if (m == 8)                                                                                \
            for (int64_t j = 0; j < wide; j++) acc[j].field += (ACC)TREE8((SUM)IN_ROWS, j);        \
        else                                                                                       \
            for (int k = 0; k < m; k++)                                                            \
                for (int64_t j = 0; j < wide; j++) acc[j].field += (ACC)row[k][j];                 \
    }

SUMS(f32, float, float, double, f)
SUMS(f64, double, double, double, f)

/* Integers wrap around. */
static void sum_run_i64(const void *from, int64_t n, union total *acc) {
    const uint64_t *x = from;
    uint64_t sum = 0;
    for (int64_t j = 0; j < n; j++) sum += x[j];
    acc->i = (int64_t)((uint64_t)acc->i + sum);
}

static void sum_rows_i64(const void *const *rows, int m, int64_t wide, union total *acc) {
    for (int k = 0; k < m; k++)
        for (int64_t j = 0; j < wide; j++)
            acc[j].i = (int64_t)((uint64_t)acc[j].i + ((const uint64_t *)rows[k])[j]);
}

/* In double: f32 squares neither overflow nor vanish. */
#define SQUARES(name, TYPE)                                                                        \
    static void squares_run_##name(const void *from, int64_t n, union total *acc) {                \
        const TYPE *x = from;                                                                      \
        double lane[LANES] = {0}, rest = 0;                                                        \
        for (; n >= LANES; n -= LANES, x += LANES)                                                 \
            for (int j = 0; j < LANES; j++) lane[j] += (double)x[j] * (double)x[j];                \
        for (int64_t j = 0; j < n; j++) rest += (double)x[j] * (double)x[j];                       \
        for (int half = LANES / 2; half > 0; half /= 2)                                            \
            for (int j = 0; j < half; j++) lane[j] += lane[j + half];                              \
        acc->f += lane[0] + rest;                                                                  \
    }                                                                                              \
    static void squares_rows_##name(const void *const *rows, int m, int64_t wide,                  \
                                    union total *acc) {                                            \
        for (int k = 0; k < m; k++) {                                                              \
            const TYPE *x = rows[k];                                                               \
            for (int64_t j = 0; j < wide; j++) acc[j].f += (double)x[j] * (double)x[j];            \
        }                                                                                          \
    }

SQUARES(f32, float)
SQUARES(f64, double)

/* NaN wins and stays. For integers the second test is never true. */
#define WINS(x, op, best) ((x)op(best) || (x) != (x))

#define EXTREME(name, TYPE, ACC, field, op)                                                        \
    static void name##_run(const void *from, int64_t n, union total *acc) {                        \
        const TYPE *x = from;                                                                      \
        TYPE lane[LANES], best;                                                                    \
        for (int j = 0; j < LANES; j++) lane[j] = (TYPE)acc->field;                                \
        for (; n >= LANES; n -= LANES, x += LANES)                                                 \
            for (int j = 0; j < LANES; j++) lane[j] = WINS(x[j], op, lane[j]) ? x[j] : lane[j];    \
        best = lane[0];                                                                            \
        for (int j = 1; j < LANES; j++) best = WINS(lane[j], op, best) ? lane[j] : best;           \
        for (int64_t j = 0; j < n; j++) best = WINS(x[j], op, best) ? x[j] : best;                 \
        acc->field = (ACC)best;                                                                    \
    }                                                                                              \
    static void name##_rows(const void *const *rows, int m, int64_t wide, union total *acc) {      \
        for (int k = 0; k < m; k++) {                                                              \
            const TYPE *x = rows[k];                                                               \
            for (int64_t j = 0; j < wide; j++) {                                                   \
                ACC v = (ACC)x[j];                                                                 \
                acc[j].field = WINS(v, op, acc[j].field) ? v : acc[j].field;                       \
            }                                                                                      \
        }                                                                                          \
    }

EXTREME(max_f32, float, double, f, >)
EXTREME(min_f32, float, double, f, <)
EXTREME(max_f64, double, double, f, >)
EXTREME(min_f64, double, double, f, <)
EXTREME(max_i64, int64_t, int64_t, i, >)
EXTREME(min_i64, int64_t, int64_t, i, <)

static const struct folder {
    run_fn *run;
    rows_fn *rows;
} folders[4][3] = {
    [FOLD_SUM] = {{sum_run_f32, sum_rows_f32},
                  {sum_run_f64, sum_rows_f64},
                  {sum_run_i64, sum_rows_i64}},
    [FOLD_SQUARES] = {{squares_run_f32, squares_rows_f32},
                      {squares_run_f64, squares_rows_f64},
                      {NULL, NULL}},
    [FOLD_MAX] = {{max_f32_run, max_f32_rows},
                  {max_f64_run, max_f64_rows},
                  {max_i64_run, max_i64_rows}},
    [FOLD_MIN] = {{min_f32_run, min_f32_rows},
                  {min_f64_run, min_f64_rows},
                  {min_i64_run, min_i64_rows}},
};

/* ---- folding: how the tensor is cut ---------------------------------------------------------- */

#define CHUNK 16384 /* elements of a long run that are folded into one total */
#define STRIP 512   /* columns folded at a time */
#define PIECE 1024  /* elements widened at a time */

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
                acc[j].f = WINS(b, >, a) ? b : a;
            break;
        case FOLD_MIN:
            if (whole)
                acc[j].i = bi < ai ? bi : ai;
            else
                acc[j].f = WINS(b, <, a) ? b : a;
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
#pragma omp parallel for num_threads(xt_threads(ctx))                                              \
    schedule(static) if (total > XT_CPU_GRAIN && units > 1)
    for (int64_t u = 0; u < units; u++) {
        _Alignas(64) union total here[STRIP];
        int64_t o = u / strips / f->chunks, c = u / strips % f->chunks;
        int64_t begin = u % strips * STRIP;
        int64_t wide = f->inner - begin < STRIP ? f->inner - begin : STRIP;
        union total *acc = partial ? partial + (o * f->chunks + c) * f->inner + begin : here;
        fold_chunk(f, o, c, begin, wide, acc);
        if (!partial) finish(f, mean, acc, wide, y, o * f->inner + begin);
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

/* Dimensions of x, merged while neighbours are both folded or both kept; those of size 1 dropped. */
static int merge(const struct xt_tensor *x, unsigned mask, int64_t *size, bool *fold) {
    int n = 0;
    for (int d = 0; d < x->ndim; d++) {
        bool folds = mask & 1u << d;
        if (x->shape[d] == 1) continue;
        if (n > 0 && fold[n - 1] == folds) {
            size[n - 1] *= x->shape[d];
            continue;
        }
        size[n] = x->shape[d];
        fold[n++] = folds;
    }
    return n;
}

static enum xt_status fold_dims(struct xt_ctx *ctx, const struct xt_launch *l, enum fold fold,
                                bool mean) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    int64_t size[XT_MAX_DIMS];
    bool folds[XT_MAX_DIMS];
    unsigned mask = l->attrs[0].list.count ? 0 : ~0u;
    for (int i = 0; i < l->attrs[0].list.count; i++)
        mask |= 1u << l->ints[l->attrs[0].list.start + i];
    int n = merge(x, mask, size, folds);
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

/* ---- along one dimension: rows handed to a function ------------------------------------------ */

struct job;
/* at[k] are the rows of operand k, in its work type, one after another. */
typedef void job_fn(const struct job *job, void *const *at, int64_t rows);

/*
 * Operands that lie as (outer, len, inner), each with its own len. Rows run along len. Where they
 * do not lie so in memory (inner > 1), or are not of a work type, they are packed a block at a time.
 */
struct job {
    job_fn *run;
    int64_t outer, inner;
    int64_t n; /* len of operand 0 */
    int64_t k; /* of topk */
    int n_operands, n_inputs;
    struct operand {
        char *data;
        enum xt_dtype dtype;
        int64_t len;
        bool packed;
    } operands[4];
};

static void add_operand(struct job *job, const struct xt_tensor *t, int64_t len) {
    job->operands[job->n_operands++] =
        (struct operand){.data = xt_data(t),
                         .dtype = t->dtype,
                         .len = len,
                         .packed = job->inner > 1 || !is_work(t->dtype)};
}

/* Moves `rows` rows, the first being number `first` (outer * inner + column), in or out. */
static void move(const struct job *job, const struct operand *p, int64_t first, int64_t rows,
                 char *pack, bool in) {
    size_t wide = work_bytes(work_of(p->dtype)), bytes = xt_dtype_bytes(p->dtype);
    if (job->inner == 1) {
        char *x = p->data + first * p->len * (int64_t)bytes;
        if (!in)
            narrow(pack, p->dtype, rows * p->len, x);
        else
            widen(x, p->dtype, rows * p->len, pack);
        return;
    }
    int64_t outer = first / job->inner, column = first % job->inner;
    for (int64_t i = 0; i < p->len; i++) {
        _Alignas(64) int64_t line[64];
        char *x = p->data + ((outer * p->len + i) * job->inner + column) * (int64_t)bytes;
        char *at = pack + i * (int64_t)wide;
        size_t step = (size_t)p->len * wide;
        const char *source = in ? widen(x, p->dtype, rows, line) : NULL;
        for (int64_t r = 0; r < rows; r++) {
            char *place = at + (size_t)r * step;
            if (in)
                memcpy(place, source + (size_t)r * wide, wide);
            else
                memcpy((char *)line + (size_t)r * wide, place, wide);
        }
        if (!in) narrow(line, p->dtype, rows, x);
    }
}

static void run_block(const struct job *job, int64_t first, int64_t rows, int64_t block,
                      char *pack) {
    void *at[4];
    char *next = pack;
    for (int k = 0; k < job->n_operands; k++) {
        const struct operand *p = &job->operands[k];
        if (!p->packed) {
            at[k] = p->data + first * p->len * (int64_t)xt_dtype_bytes(p->dtype);
            continue;
        }
        at[k] = next;
        next += (size_t)(block * p->len) * work_bytes(work_of(p->dtype));
        if (k < job->n_inputs) move(job, p, first, rows, at[k], true);
    }
    job->run(job, at, rows);
    for (int k = job->n_inputs; k < job->n_operands; k++)
        if (job->operands[k].packed) move(job, &job->operands[k], first, rows, at[k], false);
}

static enum xt_status run_job(struct xt_ctx *ctx, const struct job *job) {
    int64_t rows = job->outer * job->inner, longest = 1;
    size_t row_bytes = 0;
    for (int k = 0; k < job->n_operands; k++) {
        const struct operand *p = &job->operands[k];
        if (p->len > longest) longest = p->len;
        if (p->packed) row_bytes += (size_t)p->len * work_bytes(work_of(p->dtype));
    }
    if (rows == 0) return XT_OK;
    /* A block is some whole rows; of columns at most 64, and never from two outer places. */
    int64_t block = 4096 / longest;
    if (job->inner > 1) block = block < 16 ? 16 : block > 64 ? 64 : block;
    if (block < 1) block = 1;
    int64_t run = job->inner > 1 ? job->inner : rows, blocks = (run + block - 1) / block;
    int64_t units = rows / run * blocks;
    int threads = rows * longest > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    if (threads > units) threads = (int)units;
    size_t each = (row_bytes * (size_t)block + 63) / 64 * 64, bytes = each * (size_t)threads;
    _Alignas(64) char local[4096];
    char *pack = local;
    if (bytes > sizeof local) XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&pack));
    if (threads == 1) {
        for (int64_t u = 0; u < units; u++) {
            int64_t begin = u % blocks * block, left = run - begin;
            run_block(job, u / blocks * run + begin, left < block ? left : block, block, pack);
        }
    } else {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t u = 0; u < units; u++) {
            int64_t begin = u % blocks * block, left = run - begin;
            run_block(job, u / blocks * run + begin, left < block ? left : block, block,
                      pack + each * (size_t)omp_get_thread_num());
        }
    }
    if (bytes > sizeof local) xt_scratch_put(ctx, XT_CPU, pack, bytes);
    return XT_OK;
}

/* A job along dimension dim of x. */
static struct job job_along(const struct xt_tensor *x, int64_t dim, int n_inputs) {
    struct job job = {.outer = 1, .inner = 1, .n = 1, .n_inputs = n_inputs};
    if (x->ndim) job.n = x->shape[dim];
    for (int d = 0; d < x->ndim; d++)
        if (d != dim) *(d < dim ? &job.outer : &job.inner) *= x->shape[d];
    return job;
}

/* ---- softmax and its kin --------------------------------------------------------------------- */

#define MAX_OF(name, TYPE)                                                                         \
    static TYPE max_of_##name(const TYPE *x, int64_t n) {                                          \
        union total t = {.f = -INFINITY};                                                          \
        max_##name##_run(x, n, &t);                                                                \
        return (TYPE)t.f;                                                                          \
    }
MAX_OF(f32, float)
MAX_OF(f64, double)

#define PRODUCT(j, k) x[(j) + (k)*LANES] * y[(j) + (k)*LANES]

/* The functions of one work type. Rows of softmax fit in the caches: they are walked again. */
#define ALONG(name, TYPE)                                                                          \
    static double sum_of_##name(const TYPE *x, int64_t n) {                                        \
        union total t = {0};                                                                       \
        sum_run_##name(x, n, &t);                                                                  \
        return t.f;                                                                                \
    }                                                                                              \
    static double dot_of_##name(const TYPE *x, const TYPE *y, int64_t n) {                         \
        double lane[LANES] = {0}, rest = 0;                                                        \
        for (; n >= 8 * LANES; n -= 8 * LANES, x += 8 * LANES, y += 8 * LANES)                     \
            for (int j = 0; j < LANES; j++) lane[j] += (double)TREE8(PRODUCT, j);                  \
        for (int64_t j = 0; j < n; j++) rest += (double)x[j] * (double)y[j];                       \
        for (int half = LANES / 2; half > 0; half /= 2)                                            \
            for (int j = 0; j < half; j++) lane[j] += lane[j + half];                              \
        return lane[0] + rest;                                                                     \
    }                                                                                              \
    static void softmax_rows_##name(const struct job *job, void *const *at, int64_t rows) {        \
        int64_t n = job->n;                                                                        \
        const TYPE *x = at[0];                                                                     \
        TYPE *restrict y = at[1];                                                                  \
        for (int64_t r = 0; r < rows; r++, x += n, y += n) {                                       \
            TYPE max = max_of_##name(x, n);                                                        \
            for (int64_t j = 0; j < n; j++) y[j] = XT_EXP(x[j] - max);                             \
            TYPE scale = (TYPE)(1.0 / sum_of_##name(y, n));                                        \
            for (int64_t j = 0; j < n; j++) y[j] *= scale;                                         \
        }                                                                                          \
    }                                                                                              \
    /* sum of exp(x - max), by pieces: nothing is written. */                                      \
    static double exp_sum_##name(const TYPE *x, int64_t n, TYPE max) {                             \
        TYPE e[PIECE];                                                                             \
        double total = 0;                                                                          \
        for (int64_t i = 0; i < n; i += PIECE) {                                                   \
            int64_t m = n - i < PIECE ? n - i : PIECE;                                             \
            for (int64_t j = 0; j < m; j++) e[j] = XT_EXP(x[i + j] - max);                         \
            total += sum_of_##name(e, m);                                                          \
        }                                                                                          \
        return total;                                                                              \
    }                                                                                              \
    static void log_softmax_rows_##name(const struct job *job, void *const *at, int64_t rows) {    \
        int64_t n = job->n;                                                                        \
        const TYPE *x = at[0];                                                                     \
        TYPE *restrict y = at[1];                                                                  \
        for (int64_t r = 0; r < rows; r++, x += n, y += n) {                                       \
            TYPE max = max_of_##name(x, n), shift = (TYPE)log(exp_sum_##name(x, n, max));          \
            for (int64_t j = 0; j < n; j++) y[j] = (x[j] - max) - shift;                           \
        }                                                                                          \
    }                                                                                              \
    static void logsumexp_rows_##name(const struct job *job, void *const *at, int64_t rows) {      \
        int64_t n = job->n;                                                                        \
        const TYPE *x = at[0];                                                                     \
        TYPE *y = at[1];                                                                           \
        for (int64_t r = 0; r < rows; r++, x += n) {                                               \
            TYPE max = max_of_##name(x, n), from = isinf(max) ? 0 : max;                           \
            y[r] = isinf(max) ? max : (TYPE)(log(exp_sum_##name(x, n, from)) + (double)from);      \
        }                                                                                          \
    }                                                                                              \
    static void softmax_grad_rows_##name(const struct job *job, void *const *at, int64_t rows) {   \
        int64_t n = job->n;                                                                        \
        const TYPE *y = at[0], *g = at[1];                                                         \
        TYPE *restrict dx = at[2];                                                                 \
        for (int64_t r = 0; r < rows; r++, y += n, g += n, dx += n) {                              \
            TYPE dot = (TYPE)dot_of_##name(y, g, n);                                               \
            for (int64_t j = 0; j < n; j++) dx[j] = y[j] * (g[j] - dot);                           \
        }                                                                                          \
    }                                                                                              \
    static void log_softmax_grad_rows_##name(const struct job *job, void *const *at,               \
                                             int64_t rows) {                                       \
        int64_t n = job->n;                                                                        \
        const TYPE *y = at[0], *g = at[1];                                                         \
        TYPE *restrict dx = at[2];                                                                 \
        for (int64_t r = 0; r < rows; r++, y += n, g += n, dx += n) {                              \
            TYPE total = (TYPE)sum_of_##name(g, n);                                                \
            for (int64_t j = 0; j < n; j++) dx[j] = g[j] - XT_EXP(y[j]) * total;                   \
        }                                                                                          \
    }                                                                                              \
    static void logsumexp_grad_rows_##name(const struct job *job, void *const *at, int64_t rows) { \
        int64_t n = job->n;                                                                        \
        const TYPE *x = at[0], *y = at[1], *g = at[2];                                             \
        TYPE *restrict dx = at[3];                                                                 \
        for (int64_t r = 0; r < rows; r++, x += n, dx += n) {                                      \
            if (y[r] == -(TYPE)INFINITY)                                                           \
                memset(dx, 0, (size_t)n * sizeof *dx);                                             \
            else                                                                                   \
                for (int64_t j = 0; j < n; j++) dx[j] = g[r] * XT_EXP(x[j] - y[r]);                \
        }                                                                                          \
    }                                                                                              \
    static void cumsum_rows_##name(const struct job *job, void *const *at, int64_t rows) {         \
        const TYPE *x = at[0];                                                                     \
        TYPE *y = at[1];                                                                           \
        for (int64_t r = 0; r < rows; r++, x += job->n, y += job->n) {                             \
            double total = 0;                                                                      \
            for (int64_t j = 0; j < job->n; j++) y[j] = (TYPE)(total += (double)x[j]);             \
        }                                                                                          \
    }                                                                                              \
    static void cumsum_grad_rows_##name(const struct job *job, void *const *at, int64_t rows) {    \
        const TYPE *g = at[0];                                                                     \
        TYPE *dx = at[1];                                                                          \
        for (int64_t r = 0; r < rows; r++, g += job->n, dx += job->n) {                            \
            double total = 0;                                                                      \
            for (int64_t j = job->n - 1; j >= 0; j--) dx[j] = (TYPE)(total += (double)g[j]);       \
        }                                                                                          \
    }                                                                                              \
    static void amax_grad_rows_##name(const struct job *job, void *const *at, int64_t rows) {      \
        int64_t n = job->n;                                                                        \
        const TYPE *x = at[0], *y = at[1], *g = at[2];                                             \
        TYPE *restrict dx = at[3];                                                                 \
        for (int64_t r = 0; r < rows; r++, x += n, dx += n) {                                      \
            int64_t equal = 0;                                                                     \
            for (int64_t j = 0; j < n; j++) equal += x[j] == y[r];                                 \
            TYPE share = equal ? g[r] / (TYPE)equal : 0;                                           \
            for (int64_t j = 0; j < n; j++) dx[j] = x[j] == y[r] ? share : 0;                      \
        }                                                                                          \
    }                                                                                              \
    static void norm_grad_rows_##name(const struct job *job, void *const *at, int64_t rows) {      \
        int64_t n = job->n;                                                                        \
        const TYPE *x = at[0], *y = at[1], *g = at[2];                                             \
        TYPE *restrict dx = at[3];                                                                 \
        for (int64_t r = 0; r < rows; r++, x += n, dx += n) {                                      \
            TYPE scale = y[r] == 0 ? 0 : g[r] / y[r];                                              \
            for (int64_t j = 0; j < n; j++) dx[j] = x[j] * scale;                                  \
        }                                                                                          \
    }

ALONG(f32, float)
ALONG(f64, double)

static void cumsum_rows_i64(const struct job *job, void *const *at, int64_t rows) {
    const uint64_t *x = at[0];
    uint64_t *y = at[1];
    for (int64_t r = 0; r < rows; r++, x += job->n, y += job->n) {
        uint64_t total = 0;
        for (int64_t j = 0; j < job->n; j++) y[j] = total += x[j];
    }
}

/* ---- argmax, topk ---------------------------------------------------------------------------- */

/* NaN is above all numbers. */
#define ABOVE(a, b) ((a) > (b) || ((a) != (a) && (b) == (b)))

#define CHOOSE(name, TYPE, field, least)                                                           \
    /* The best of each piece first; only a piece that beats all before it is searched. */         \
    static void argmax_rows_##name(const struct job *job, void *const *at, int64_t rows) {         \
        const TYPE *x = at[0];                                                                     \
        int64_t *y = at[1];                                                                        \
        for (int64_t r = 0; r < rows; r++, x += job->n) {                                          \
            TYPE best = x[0];                                                                      \
            int64_t where = 0;                                                                     \
            for (int64_t i = 0; i < job->n; i += PIECE) {                                          \
                int64_t m = job->n - i < PIECE ? job->n - i : PIECE, j = 0;                        \
                union total t = {.field = least};                                                  \
                max_##name##_run(x + i, m, &t);                                                    \
                TYPE v = (TYPE)t.field;                                                            \
                if (!ABOVE(v, best)) continue;                                                     \
                while (j < m - 1 && ABOVE(v, x[i + j])) j++;                                       \
                best = v;                                                                          \
                where = i + j;                                                                     \
            }                                                                                      \
            y[r] = where;                                                                          \
        }                                                                                          \
    }                                                                                              \
    /* Whether (a, i) comes after (b, j) in the answer. */                                         \
    static bool after_##name(TYPE a, int64_t i, TYPE b, int64_t j) {                               \
        return ABOVE(b, a) || (!ABOVE(a, b) && i > j);                                             \
    }                                                                                              \
    /* Puts (v, at) at `hole` of a heap of n, whose root comes last; heaps lie below the hole. */  \
    static void sift_##name(TYPE *value, int64_t *index, int64_t n, int64_t hole, TYPE v,          \
                            int64_t at) {                                                          \
        for (;;) {                                                                                 \
            int64_t child = 2 * hole + 1;                                                          \
            if (child >= n) break;                                                                 \
            if (child + 1 < n &&                                                                   \
                after_##name(value[child + 1], index[child + 1], value[child], index[child]))      \
                child++;                                                                           \
            if (!after_##name(value[child], index[child], v, at)) break;                           \
            value[hole] = value[child];                                                            \
            index[hole] = index[child];                                                            \
            hole = child;                                                                          \
        }                                                                                          \
        value[hole] = v;                                                                           \
        index[hole] = at;                                                                          \
    }                                                                                              \
    static void topk_row_##name(const TYPE *x, int64_t n, int64_t k, TYPE *value,                  \
                                int64_t *index) {                                                  \
        if (k == 0) return;                                                                        \
        for (int64_t i = k; i-- > 0;) sift_##name(value, index, k, i, x[i], i);                    \
        for (int64_t i = k; i < n; i++)                                                            \
            if (ABOVE(x[i], value[0])) sift_##name(value, index, k, 0, x[i], i);                   \
        for (int64_t m = k - 1; m > 0; m--) {                                                      \
            TYPE v = value[m];                                                                     \
            int64_t at = index[m];                                                                 \
            value[m] = value[0]; /* what comes last goes to the end */                             \
            index[m] = index[0];                                                                   \
            sift_##name(value, index, m, 0, v, at);                                                \
        }                                                                                          \
    }                                                                                              \
    static void topk_rows_##name(const struct job *job, void *const *at, int64_t rows) {           \
        for (int64_t r = 0; r < rows; r++)                                                         \
            topk_row_##name((const TYPE *)at[0] + r * job->n, job->n, job->k,                      \
                            (TYPE *)at[1] + r * job->k, (int64_t *)at[2] + r * job->k);            \
    }

CHOOSE(f32, float, f, -INFINITY)
CHOOSE(f64, double, f, -INFINITY)
CHOOSE(i64, int64_t, i, INT64_MIN)

/* ---- kernels along one dimension ------------------------------------------------------------- */

/* Every operand has len n, except those whose bit is in one_long: they have 1. */
static enum xt_status along(struct xt_ctx *ctx, const struct xt_launch *l, int64_t dim,
                            unsigned one_long, job_fn *f32, job_fn *f64, job_fn *i64) {
    const struct xt_tensor *x = l->in[0];
    job_fn *const fns[] = {f32, f64, i64};
    if (xt_numel(l->out[0]) == 0) return XT_OK;
    struct job job = job_along(x, dim, l->n_in);
    job.run = fns[work_of(x->dtype)];
    for (int k = 0; k < l->n_in + l->n_out; k++)
        add_operand(&job, k < l->n_in ? l->in[k] : l->out[k - l->n_in],
                    one_long & 1u << k ? 1 : job.n);
    return run_job(ctx, &job);
}

#define ALONG_KERNEL(name, attr_dim, one_long, i64)                                                \
    static enum xt_status name(struct xt_ctx *ctx, const struct xt_launch *l) {                    \
        return along(ctx, l, attr_dim, one_long, name##_rows_f32, name##_rows_f64, i64);           \
    }

ALONG_KERNEL(softmax, l->attrs[0].i, 0, NULL)
ALONG_KERNEL(log_softmax, l->attrs[0].i, 0, NULL)
ALONG_KERNEL(logsumexp, l->attrs[0].i, 2, NULL)
ALONG_KERNEL(softmax_grad, l->attrs[0].i, 0, NULL)
ALONG_KERNEL(log_softmax_grad, l->attrs[0].i, 0, NULL)
ALONG_KERNEL(logsumexp_grad, l->attrs[0].i, 2 | 4, NULL)
ALONG_KERNEL(cumsum, l->attrs[0].i, 0, cumsum_rows_i64)
ALONG_KERNEL(cumsum_grad, l->attrs[0].i, 0, NULL)
ALONG_KERNEL(amax_grad, 1, 2 | 4, NULL)
ALONG_KERNEL(norm_grad, 1, 2 | 4, NULL)
ALONG_KERNEL(argmax, l->attrs[0].i, 2, argmax_rows_i64)

static enum xt_status topk(struct xt_ctx *ctx, const struct xt_launch *l) {
    job_fn *const fns[] = {topk_rows_f32, topk_rows_f64, topk_rows_i64};
    const struct xt_tensor *x = l->in[0];
    struct job job = job_along(x, l->attrs[1].i, 1);
    job.run = fns[work_of(x->dtype)];
    job.k = l->attrs[0].i;
    add_operand(&job, x, job.n);
    add_operand(&job, l->out[0], job.k);
    add_operand(&job, l->out[1], job.k);
    return run_job(ctx, &job);
}

const struct xt_kernel XT_CPU(reduce_kernels)[] = {
    {"sum", XT_ANY, XT_CONTIGUOUS, sum},
    {"mean", XT_FLOATS, XT_CONTIGUOUS, mean},
    {"amax", XT_ANY, XT_CONTIGUOUS, amax},
    {"amin", XT_ANY, XT_CONTIGUOUS, amin},
    {"norm", XT_FLOATS, XT_CONTIGUOUS, norm},
    {"argmax", XT_ANY, XT_CONTIGUOUS, argmax},
    {"cumsum", XT_ANY, XT_CONTIGUOUS, cumsum},
    {"softmax", XT_FLOATS, XT_CONTIGUOUS, softmax},
    {"log_softmax", XT_FLOATS, XT_CONTIGUOUS, log_softmax},
    {"logsumexp", XT_FLOATS, XT_CONTIGUOUS, logsumexp},
    {"topk", XT_ANY, XT_CONTIGUOUS, topk},
    {"amax_grad", XT_FLOATS, XT_CONTIGUOUS, amax_grad},
    {"norm_grad", XT_FLOATS, XT_CONTIGUOUS, norm_grad},
    {"cumsum_grad", XT_FLOATS, XT_CONTIGUOUS, cumsum_grad},
    {"softmax_grad", XT_FLOATS, XT_CONTIGUOUS, softmax_grad},
    {"log_softmax_grad", XT_FLOATS, XT_CONTIGUOUS, log_softmax_grad},
    {"logsumexp_grad", XT_FLOATS, XT_CONTIGUOUS, logsumexp_grad},
    {0},
};
