/*
 * onednn.c: bf16 products by oneDNN. c is cut into tiles and the sums into blocks by the shape
 * alone; a tile is computed by one thread with primitives of its own, its blocks added in order in
 * f32.
 */
#include "gemm.h"

#include <string.h>

#include <omp.h>

enum { TILE_M = 512, TILE_N = 256, TILE_K = 4096 };

/* A product with its tiles; jobs[thread][last row of tiles][last column][last block]. */
struct tiled {
    const struct gemm *g;
    int64_t items, rows, cols, blocks;
    struct xt_onednn_job **jobs;
    float *sums; /* two tiles for each thread */
};

static int64_t size_at(int64_t at, int64_t tile, int64_t whole) {
    return whole - at * tile < tile ? whole - at * tile : tile;
}

static struct xt_onednn_job **job_at(const struct tiled *t, int thread, bool row, bool col,
                                     bool block) {
    return &t->jobs[((thread * 2 + row) * 2 + col) * 2 + block];
}

static bool prepare(struct xt_ctx *ctx, const struct tiled *t, int threads) {
    const struct gemm *g = t->g;
    for (int i = 0; i < threads * 8; i++) {
        const bool row = i >> 2 & 1, col = i >> 1 & 1, block = i & 1;
        const struct xt_onednn_product p = {
            g->dtype,
            size_at(row ? t->rows - 1 : 0, TILE_M, g->m),
            size_at(col ? t->cols - 1 : 0, TILE_N, g->n),
            size_at(block ? t->blocks - 1 : 0, TILE_K, g->k),
            g->a.row,
            g->a.col,
            g->b.row,
            g->b.col,
        };
        t->jobs[i] = xt_onednn_prepare(ctx, i / 8, &p);
        if (!t->jobs[i]) return false;
    }
    return true;
}

static void add_bias(const struct gemm *g, int64_t j0, int64_t n, float *sums) {
    for (int64_t j = 0; j < n; j++) {
        const int64_t at = (j0 + j) * g->bias_step;
        sums[j] += g->bias_dtype == XT_BF16 ? xt_bf16_to_f32(((const uint16_t *)g->bias)[at])
                                            : ((const float *)g->bias)[at];
    }
}

static void put(const struct gemm *g, const float *sums, int64_t n, int64_t at) {
    if (g->c_dtype == XT_BF16)
        for (int64_t j = 0; j < n; j++) ((uint16_t *)g->c)[at + j] = xt_f32_to_bf16(sums[j]);
    else if (g->add)
        for (int64_t j = 0; j < n; j++) ((float *)g->c)[at + j] += sums[j];
    else
        memcpy((float *)g->c + at, sums, (size_t)n * sizeof *sums);
}

static bool run_tile(struct xt_ctx *ctx, const struct tiled *t, int64_t unit, int thread) {
    const struct gemm *g = t->g;
    const int64_t item = unit / (t->rows * t->cols), tile = unit % (t->rows * t->cols);
    const int64_t row = tile / t->cols, col = tile % t->cols;
    const int64_t m = size_at(row, TILE_M, g->m), n = size_at(col, TILE_N, g->n);
    const uint16_t *a =
        (const uint16_t *)g->a.data + gemm_item(g, g->a.batch, item) + row * TILE_M * g->a.row;
    const uint16_t *b =
        (const uint16_t *)g->b.data + gemm_item(g, g->b.batch, item) + col * TILE_N * g->b.col;
    float *sums = t->sums + (int64_t)thread * 2 * TILE_M * TILE_N;
    for (int64_t k = 0; k < t->blocks; k++) {
        float *to = sums + (k ? TILE_M * TILE_N : 0);
        struct xt_onednn_job *job =
            *job_at(t, thread, row == t->rows - 1, col == t->cols - 1, k == t->blocks - 1);
        if (!xt_onednn_run(ctx, thread, job, a + k * TILE_K * g->a.col, b + k * TILE_K * g->b.row,
                           to))
            return false;
        for (int64_t i = 0; k && i < m * n; i++) sums[i] += to[i];
    }
    for (int64_t i = 0; i < m; i++) {
        if (g->bias) add_bias(g, col * TILE_N, n, sums + i * n);
        put(g, sums + i * n, n, (item * g->m + row * TILE_M + i) * g->n + col * TILE_N);
    }
    return true;
}

static bool unit_stride(const struct xt_product_side *s) {
    return (s->row == 1 || s->col == 1) && s->row > 0 && s->col > 0;
}

enum xt_status XT_CPU(gemm_onednn)(struct xt_ctx *ctx, const struct gemm *g, bool *served) {
    struct tiled t = {.g = g, .items = 1};
    *served = false;
    for (int d = 0; d < g->n_batch; d++) t.items *= g->batch[d];
    if (g->dtype != XT_BF16 || g->m < 32 || g->n < 32 || g->k < 32 || t.items == 0) return XT_OK;
    if (!unit_stride(&g->a) || !unit_stride(&g->b) || !xt_onednn_serves(ctx)) return XT_OK;
    t.rows = (g->m + TILE_M - 1) / TILE_M;
    t.cols = (g->n + TILE_N - 1) / TILE_N;
    t.blocks = (g->k + TILE_K - 1) / TILE_K;
    const int64_t units = t.items * t.rows * t.cols;
    const int threads = units < xt_threads(ctx) ? (int)units : xt_threads(ctx);
    const size_t tiles = (size_t)threads * 2 * TILE_M * TILE_N * sizeof *t.sums;
    const size_t bytes = tiles + (size_t)threads * 8 * sizeof *t.jobs;
    void *scratch;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, &scratch));
    t.sums = scratch;
    t.jobs = (void *)((char *)scratch + tiles);
    enum xt_status status = XT_OK;
    if (prepare(ctx, &t, threads)) {
        int failed = 0;
        *served = true;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : failed)
        for (int64_t unit = 0; unit < units; unit++)
            failed += !run_tile(ctx, &t, unit, omp_get_thread_num());
        if (failed)
            status = xt_fail(ctx, XT_UNSUPPORTED, "oneDNN failed; XT_ONEDNN=0 does without");
    }
    xt_scratch_put(ctx, XT_CPU, scratch, bytes);
    return status;
}
