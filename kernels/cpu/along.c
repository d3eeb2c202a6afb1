/*
 * along.c: ops along one dimension: softmax and its kin, cumsum, argmax, topk, and gradients that
 * rows of a matrix give. Each is a function of rows in f32, f64 or i64; run_job brings it the rows.
 */
#include "fold.h"

#include <omp.h>

#define BLOCK 64 /* columns packed at a time, at most */

struct job;
/* at[k] are the rows of operand k, in its work type, one after another. */
typedef void job_fn(const struct job *job, void *const *at, int64_t rows);

/*
 * Operands that lie as (outer, len, inner), each with its own len. Rows run along len. Where they
 * do not lie so in memory (inner > 1), or are not of a work type, blocks of them are packed.
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

/*
 * A square of `lines` lines, `rows` elements of each, turned about: line i, element r is at
 * pack[r * step + i]. Lines stand apart in a small array: in the tensor and in the pack they may
 * all fall on the same places of the cache.
 */
#define TURN(type)                                                                                 \
    do {                                                                                           \
        type *at = (type *)pack;                                                                   \
        type(*line)[BLOCK] = (type(*)[BLOCK])square;                                               \
        for (int64_t r = 0; r < rows; r++)                                                         \
            for (int64_t i = 0; i < lines; i++) {                                                  \
                if (in)                                                                            \
                    at[r * step + i] = line[i][r];                                                 \
                else                                                                               \
                    line[i][r] = at[r * step + i];                                                 \
            }                                                                                      \
    } while (0)

static void turn(void *square, int64_t lines, int64_t rows, size_t bytes, void *pack, int64_t step,
                 bool in) {
    if (bytes == 4)
        TURN(uint32_t);
    else
        TURN(uint64_t);
}

/* Moves `rows` rows, the first being number `first` (outer * inner + column), in or out. */
static void move(const struct job *job, const struct operand *p, int64_t first, int64_t rows,
                 char *pack, bool in) {
    enum { LINES = 16 };
    size_t wide = work_bytes(work_of(p->dtype)), bytes = xt_dtype_bytes(p->dtype);
    if (job->inner == 1) {
        char *x = p->data + (size_t)(first * p->len) * bytes;
        if (in)
            widen(x, p->dtype, rows * p->len, pack);
        else
            narrow(pack, p->dtype, rows * p->len, x);
        return;
    }
    _Alignas(64) char square[LINES * BLOCK * 8];
    char *x =
        p->data + (size_t)(first / job->inner * p->len * job->inner + first % job->inner) * bytes;
    for (int64_t i = 0; i < p->len; i += LINES) {
        int64_t lines = p->len - i < LINES ? p->len - i : LINES;
        for (int64_t k = 0; in && k < lines; k++) {
            char *line = square + (size_t)k * BLOCK * wide;
            const char *from = x + (size_t)((i + k) * job->inner) * bytes;
            if (widen(from, p->dtype, rows, line) == from) memcpy(line, from, (size_t)rows * bytes);
        }
        turn(square, lines, rows, wide, pack + (size_t)i * wide, p->len, in);
        for (int64_t k = 0; !in && k < lines; k++)
            narrow(square + (size_t)k * BLOCK * wide, p->dtype, rows,
                   x + (size_t)((i + k) * job->inner) * bytes);
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
    /* A block is some whole rows; of columns at most BLOCK, and never from two outer places. */
    int64_t block = 4096 / longest;
    if (job->inner > 1) block = block < 16 ? 16 : block > BLOCK ? BLOCK : block;
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

#define PRODUCT(j, k) x[(j) + (k)*LANES] * y[(j) + (k)*LANES]

/* The functions of one work type. Rows of softmax fit in the caches: they are walked again. */
#define ALONG(name, TYPE)                                                                          \
    static double dot_of_##name(const TYPE *x, const TYPE *y, int64_t n) {                         \
        double lane[LANES] = {0}, rest = 0;                                                        \
        for (; n >= 8 * LANES; n -= 8 * LANES, x += 8 * LANES, y += 8 * LANES)                     \
            for (int j = 0; j < LANES; j++) lane[j] += (double)TREE8(PRODUCT, j);                  \
        for (int64_t j = 0; j < n; j++) rest += (double)x[j] * (double)y[j];                       \
        return add_lanes(lane) + rest;                                                             \
    }                                                                                              \
    static void softmax_rows_##name(const struct job *job, void *const *at, int64_t rows) {        \
        int64_t n = job->n;                                                                        \
        const TYPE *x = at[0];                                                                     \
        TYPE *restrict y = at[1];                                                                  \
        for (int64_t r = 0; r < rows; r++, x += n, y += n) {                                       \
            TYPE max = max_run_##name(x, n);                                                       \
            for (int64_t j = 0; j < n; j++) y[j] = XT_EXP(x[j] - max);                             \
            TYPE scale = (TYPE)(1.0 / sum_run_##name(y, n));                                       \
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
            total += sum_run_##name(e, m);                                                         \
        }                                                                                          \
        return total;                                                                              \
    }                                                                                              \
    static void log_softmax_rows_##name(const struct job *job, void *const *at, int64_t rows) {    \
        int64_t n = job->n;                                                                        \
        const TYPE *x = at[0];                                                                     \
        TYPE *restrict y = at[1];                                                                  \
        for (int64_t r = 0; r < rows; r++, x += n, y += n) {                                       \
            TYPE max = max_run_##name(x, n), shift = (TYPE)log(exp_sum_##name(x, n, max));         \
            for (int64_t j = 0; j < n; j++) y[j] = (x[j] - max) - shift;                           \
        }                                                                                          \
    }                                                                                              \
    static void logsumexp_rows_##name(const struct job *job, void *const *at, int64_t rows) {      \
        int64_t n = job->n;                                                                        \
        const TYPE *x = at[0];                                                                     \
        TYPE *y = at[1];                                                                           \
        for (int64_t r = 0; r < rows; r++, x += n) {                                               \
            TYPE max = max_run_##name(x, n), from = isinf(max) ? 0 : max;                          \
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
            TYPE total = (TYPE)sum_run_##name(g, n);                                               \
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

#define CHOOSE(name, TYPE)                                                                         \
    /* The best of each piece first; only a piece that beats all before it is searched. */         \
    static void argmax_rows_##name(const struct job *job, void *const *at, int64_t rows) {         \
        const TYPE *x = at[0];                                                                     \
        int64_t *y = at[1];                                                                        \
        for (int64_t r = 0; r < rows; r++, x += job->n) {                                          \
            TYPE best = x[0];                                                                      \
            int64_t where = 0;                                                                     \
            for (int64_t i = 0; i < job->n; i += PIECE) {                                          \
                int64_t m = job->n - i < PIECE ? job->n - i : PIECE, j = 0;                        \
                TYPE v = max_run_##name(x + i, m);                                                 \
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

CHOOSE(f32, float)
CHOOSE(f64, double)
CHOOSE(i64, int64_t)

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
    enum xt_status XT_CPU(name)(struct xt_ctx * ctx, const struct xt_launch *l) {                  \
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

enum xt_status XT_CPU(topk)(struct xt_ctx *ctx, const struct xt_launch *l) {
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
