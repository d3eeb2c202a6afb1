/*
 * gemm.c: the tiled matrix product: b is packed into panels, rows of a meet them in register tiles.
 * Which thread does what changes with the number of threads; no bit of the result does (gemm.h).
 */
#include "gemm.h"

#include <string.h>

#include <omp.h>

#if defined(__AVX512F__)
#define GEMM_VECTOR 64
#define GEMM_ROWS 12
#define GEMM_EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#else
#if defined(__AVX__)
#define GEMM_VECTOR 32
#else
#define GEMM_VECTOR 16
#endif
#define GEMM_ROWS 6
#define GEMM_EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5)
#endif

#define GEMM_PITCH (GEMM_DEPTH + 16) /* between copied rows: not a power of two */
#define GEMM_AHEAD 16                /* steps that packing fetches ahead */
#define GEMM_MOST_N 512    /* columns of a part: its tile stays in the second-level cache */
#define GEMM_CHUNK 1024    /* steps of a chunk of a split sum */
#define GEMM_FEW (1 << 18) /* elements of chunks that one thread may add up */
#define GEMM_SMALL 2048    /* elements: operands up to here are packed on the stack */

/* A piece of c and the steps summed into it by one call. */
struct gemm_part {
    int64_t item;       /* of the batch */
    int64_t i, m, j, n; /* rows and columns of c: first, count */
    int64_t p, k;       /* steps: first, count */
    int64_t b_j;        /* the first column's place among the packed ones */
};

/* How the work is cut. Nothing here shows in the bits. */
struct gemm_plan {
    int threads;
    enum {
        TOGETHER,
        ROWS,
        APART,
        SPLIT
    } how;              /* see run_together and its siblings in gemm_type.h */
    int64_t items;      /* of the batch */
    int64_t m, n;       /* rows and columns of a part */
    int64_t k;          /* steps packed at a time */
    int64_t wide;       /* together: columns of b packed at a time */
    int64_t split;      /* split: rows a thread takes at a time */
    int64_t ended;      /* split: units done so far */
    int64_t common;     /* elements of scratch for all threads: packed b, or a split's sums */
    int64_t own;        /* elements for each thread: pack, then tile, then packed b */
    int64_t pack, tile; /* elements: rows of a, a bf16 part's sums */
};

#define T float
#define INDEX int32_t
#define F(name) name##_f32
#include "gemm_type.h"
#undef T
#undef INDEX
#undef F

#define T double
#define INDEX int64_t
#define F(name) name##_f64
#include "gemm_type.h"
#undef T
#undef INDEX
#undef F

static int64_t at_most(int64_t x, int64_t most) {
    return x < most ? x : most;
}
static int64_t at_least(int64_t x, int64_t least) {
    return x > least ? x : least;
}
static int64_t ceil_to(int64_t x, int64_t unit) {
    return (x + unit - 1) / unit * unit;
}

/* Long sums of few elements. Looks at the shape alone: the bits depend on it. */
static bool gemm_split(const struct gemm *g, int64_t items) {
    return items == 1 && g->k >= 2 * GEMM_CHUNK && g->m >= 32 && g->n >= 32 &&
           g->m * g->n <= 1 << 18;
}

static void plan_split(const struct gemm *g, int64_t cols, struct gemm_plan *plan) {
    const int64_t chunks = (g->k + GEMM_CHUNK - 1) / GEMM_CHUNK;
    const int64_t parts = (plan->threads + chunks - 1) / chunks; /* each packs all of b again */
    plan->how = SPLIT;
    plan->split = ceil_to((g->m + parts - 1) / parts, GEMM_ROWS);
#ifndef PM
#define PM 192
#endif
    plan->m = at_most(plan->split, PM);
    plan->common = (g->c_dtype == XT_BF16 ? chunks : chunks - 1) * g->m * g->n;
    plan->own = ceil_to(g->n, cols) * at_most(g->k, GEMM_CHUNK);
}

static void plan_apart(const struct gemm *g, int64_t cols, int64_t own, struct gemm_plan *plan) {
    const int64_t n = ceil_to(g->n, cols);
    plan->how = APART;
    plan->n = ceil_to((n * plan->items + 4 * plan->threads - 1) / (4 * plan->threads), cols);
    plan->n = at_least(at_most(plan->n, at_most(n, GEMM_MOST_N / 2)), cols);
    plan->m = ceil_to(at_most(g->m, 96), GEMM_ROWS);
    if (plan->n * g->k > own && g->m <= plan->m)
        plan->k = at_least(own / plan->n / GEMM_DEPTH * GEMM_DEPTH, GEMM_DEPTH);
    plan->k = at_most(plan->k, g->k);
    plan->own = plan->n * plan->k;
}

static void plan_together(const struct gemm *g, int64_t cols, int64_t most,
                          struct gemm_plan *plan) {
    const int64_t n = ceil_to(g->n, cols), units = 4 * plan->threads;
    plan->how = TOGETHER;
    plan->m = ceil_to((g->m + units - 1) / units, GEMM_ROWS);
    plan->m = at_least(at_most(plan->m, 96), 4 * GEMM_ROWS);
    const int64_t rows = (g->m + plan->m - 1) / plan->m, parts = (units + rows - 1) / rows;
    plan->n = at_least(at_most(ceil_to((n + parts - 1) / parts, cols), GEMM_MOST_N), cols);
    if (g->c_dtype == XT_BF16) { /* sums live in the tile, so all steps at once */
        plan->wide = at_least(at_most(n, most / g->k / cols * cols), cols);
    } else {
        plan->wide = at_most(n, ceil_to(most / (2 * GEMM_DEPTH), cols));
        plan->k = at_least(most / plan->wide / GEMM_DEPTH * GEMM_DEPTH, GEMM_DEPTH);
        plan->k = at_most(plan->k, g->k);
    }
    plan->common = plan->wide * plan->k;
}

static void plan_rows(const struct gemm *g, int64_t cols, struct gemm_plan *plan) {
    const int64_t n = ceil_to(g->n, cols);
    plan->how = ROWS;
    plan->m = 96 / GEMM_ROWS * GEMM_ROWS;
    plan->n = at_most(n, GEMM_MOST_N);
    plan->own = n * g->k;
}

static struct gemm_plan plan_make(struct xt_ctx *ctx, const struct gemm *g, int64_t bytes,
                                  int64_t items) {
    const int64_t cols = 2 * GEMM_VECTOR / bytes, n = ceil_to(g->n, cols);
    const double work = (double)items * (double)g->m * (double)g->n * (double)g->k;
    struct gemm_plan plan = {
        .threads = work < 5e5 ? 1 : xt_threads(ctx), .items = items, .k = g->k};
    const int64_t own = (1 << 20) / bytes; /* elements of packed b of one thread */
    if (gemm_split(g, items))
        plan_split(g, cols, &plan);
    else if (items == 1 && g->m >= 512 * plan.threads && n * g->k <= 2 * own)
        plan_rows(g, cols, &plan);
    else if (g->m <= 4 * GEMM_ROWS || ((plan.threads == 1 || items >= 2 * plan.threads) &&
                                       g->k * at_most(n, GEMM_MOST_N / 2) <= own))
        plan_apart(g, cols, own, &plan);
    else
        plan_together(g, cols, 8 * own, &plan);
    plan.pack = plan.m * GEMM_PITCH;
    if (g->c_dtype == XT_BF16 && plan.how != SPLIT) plan.tile = plan.m * plan.n;
    plan.own += plan.pack + plan.tile;
    return plan;
}

/* What one thread of the team does. */
static void run_plan(const struct gemm *g, struct gemm_plan *plan, void *scratch) {
    const int64_t from = plan->common + plan->own * omp_get_thread_num();
#define RUN(type, suffix)                                                                          \
    do {                                                                                           \
        type *all = scratch, *own = all + from;                                                    \
        switch (plan->how) {                                                                       \
        case ROWS: run_rows_##suffix(g, plan, own); break;                                         \
        case APART: run_apart_##suffix(g, plan, own); break;                                       \
        case SPLIT: run_split_##suffix(g, plan, all, own); break;                                  \
        case TOGETHER: run_together_##suffix(g, plan, all, own); break;                            \
        }                                                                                          \
    } while (0)
    if (g->dtype == XT_F64)
        RUN(double, f64);
    else
        RUN(float, f32);
#undef RUN
}

/* Everything on the stack and on this thread: few items of few elements. */
static bool run_small(const struct gemm *g, int64_t items) {
    const int64_t cols = 2 * GEMM_VECTOR / (g->dtype == XT_F64 ? 8 : 4), n = ceil_to(g->n, cols);
    if (items * g->m * g->n > 32768 || items * g->m * g->n * g->k > 65536) return false;
    if (n * g->k > GEMM_SMALL || ceil_to(g->m, GEMM_ROWS) * GEMM_PITCH > 4 * GEMM_SMALL ||
        g->m * n > GEMM_SMALL)
        return false;
    union {
        double f64[6 * GEMM_SMALL];
        float f32[6 * GEMM_SMALL];
    } stack; /* packed b, the tile, rows of a */
    struct gemm_part t = {.m = g->m, .n = g->n, .k = g->k};
    for (; t.item < items; t.item++)
        if (g->dtype == XT_F64) {
            const struct packed_f64 b = {stack.f64, n / cols, true};
            part_f64(g, &t, &b, stack.f64 + 2 * GEMM_SMALL, stack.f64 + GEMM_SMALL);
        } else {
            const struct packed_f32 b = {stack.f32, n / cols, true};
            part_f32(g, &t, &b, stack.f32 + 2 * GEMM_SMALL, stack.f32 + GEMM_SMALL);
        }
    return true;
}

/* A sum of nothing: zeros, or the bias. */
static void run_empty(const struct gemm *g, int64_t items) {
    const size_t bytes = xt_dtype_bytes(g->c_dtype), row = (size_t)g->n * bytes;
    if (!g->add) memset(g->c, 0, (size_t)(items * g->m) * row);
    if (!g->bias) return;
    for (int64_t i = 0; i < items * g->m; i++)
        for (int64_t j = 0; j < g->n; j++) {
            char *to = (char *)g->c + (size_t)i * row + (size_t)j * bytes;
            const char *from =
                (const char *)g->bias + j * g->bias_step * (int64_t)xt_dtype_bytes(g->bias_dtype);
            if (g->bias_dtype == g->c_dtype)
                memcpy(to, from, bytes);
            else
                *(uint16_t *)to = xt_f32_to_bf16(*(const float *)from);
        }
}

enum xt_status XT_CPU(gemm)(struct xt_ctx *ctx, const struct gemm *given) {
    struct gemm g = *given;
    int64_t items = 1;
    for (int d = 0; d < g.n_batch; d++) items *= g.batch[d];
    if (items == 0 || g.m == 0 || g.n == 0) return XT_OK;
    if (g.k == 0) {
        run_empty(&g, items);
        return XT_OK;
    }
    if (g.n == 1 && g.m > 1 && !g.bias) { /* a column is a row of the transposed product */
        g.m = 1;
        g.n = given->m;
        g.a = given->b;
        g.a.col = given->b.row;
        g.b = given->a;
        g.b.row = given->a.col;
        g.b.col = given->a.row;
    }
    if (g.m == 1) g.a.row = g.k + 1; /* any but 1, which would say that steps lie apart */
    if (run_small(&g, items)) return XT_OK;
    bool served;
    XT_TRY(XT_CPU(gemm_onednn)(ctx, &g, &served));
    if (served) return XT_OK;
    const size_t element = g.dtype == XT_F64 ? sizeof(double) : sizeof(float);
    struct gemm_plan plan = plan_make(ctx, &g, (int64_t)element, items);
    const size_t bytes = (size_t)(plan.common + plan.own * plan.threads) * element;
    void *scratch;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, &scratch));
    if (plan.threads == 1)
        run_plan(&g, &plan, scratch);
    else {
#pragma omp parallel num_threads(plan.threads)
        run_plan(&g, &plan, scratch);
    }
    xt_scratch_put(ctx, XT_CPU, scratch, bytes);
    return XT_OK;
}
