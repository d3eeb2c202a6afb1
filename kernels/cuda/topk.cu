/*
 * topk.cu: the largest elements along one dimension and where they are: argmax, topk.
 *
 * Of equal elements the first comes first, and NaN is above all numbers.
 *
 * Traffic: each row read once for each of its k best, mostly from the caches; beyond FEW_CHOSEN of
 * them, once for every THREADS of its elements. What is chosen is written once.
 */
#include "along.h"

#define THREADS 256
#define WARP_ROW 1024 /* up to this many elements a warp has a row, else a block */
#define ROW_THREADS 512
#define FEW_CHOSEN 128 /* up to this many, one after another */

/* ---- an order of elements -------------------------------------------------------------------- */

/* An element of a row and its place; -1: none yet. */
template <class W> struct choice {
    W value;
    int64_t at;
};

/* NaN is above all numbers. */
template <class W> static __device__ inline bool above(W a, W b) {
    return a > b || (a != a && b == b);
}

/* Whether a comes before b in falling order, the first of equal ones first. */
template <class W>
static __device__ inline bool comes_before(struct choice<W> a, struct choice<W> b) {
    return above(a.value, b.value) || (!above(b.value, a.value) && a.at < b.at);
}

template <class W>
static __device__ inline struct choice<W> better(struct choice<W> a, struct choice<W> b) {
    if (a.at < 0) return b;
    return b.at >= 0 && comes_before(b, a) ? b : a;
}

/* The best over GROUP threads; every thread gets it. */
template <class W, int GROUP>
static __device__ inline struct choice<W> best_of_group(struct choice<W> c) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        struct choice<W> other = {
            __shfl_xor_sync(0xFFFFFFFFu, c.value, step), __shfl_xor_sync(0xFFFFFFFFu, c.at, step)
        };
        c = better(c, other);
    }
    if constexpr (GROUP > 32) {
        constexpr int WARPS = GROUP / 32;
        __shared__ struct choice<W> part[WARPS];
        __syncthreads();
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = c;
        __syncthreads();
        c = part[0];
        for (int w = 1; w < WARPS; w++) c = better(c, part[w]);
    }
    return c;
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* The k best of a row, one after another; without `values` only places. GROUP threads share a row
   in blocks of BLOCK. */
template <class E, int GROUP, int BLOCK>
static __global__ void __launch_bounds__(BLOCK)
    choose_rows(const E *x, E *values, int64_t *places, const __grid_constant__ struct xt_along r,
                int64_t k) {
    using W = xt_real<E>;
    constexpr int ROWS = BLOCK / GROUP;
    int lane = (int)threadIdx.x % GROUP;
    for (int64_t base = (int64_t)blockIdx.x * ROWS; base < r.count;
         base += (int64_t)gridDim.x * ROWS) {
        int64_t row = base + threadIdx.x / GROUP, n = row < r.count ? r.n : 0;
        const E *from = x + (n ? xt_along_start(r, row, r.n) : 0);
        int64_t to = n ? xt_along_start(r, row, k) : 0;
        struct choice<W> last = {
            (W)0, -1
        };
        for (int64_t i = 0; i < k; i++) {
            struct choice<W> best = {
                (W)0, -1
            };
#pragma unroll 4
            for (int64_t j = lane; j < n; j += GROUP) {
                struct choice<W> c = {
                    xt_to<W>(from[j * r.inner]), j
                };
                /* What was chosen before, and all that comes before it. */
                if (i > 0 && !comes_before(last, c)) continue;
                best = better(best, c);
            }
            last = best_of_group<W, GROUP>(best);
            if (lane > 0 || n == 0) continue;
            if (values) values[to + i * r.inner] = xt_to<E>(last.value);
            places[to + i * r.inner] = last.at;
        }
    }
}

/* Rows that lie across memory: a thread finds the best of each. */
template <class E>
static __global__ void argmax_columns(const E *x, int64_t *places,
                                      const __grid_constant__ struct xt_along r) {
    using W = xt_real<E>;
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x; row < r.count; row += step) {
        const E *from = x + xt_along_start(r, row, r.n);
        struct choice<W> best = {
            xt_to<W>(from[0]), 0
        };
        for (int64_t j = 1; j < r.n; j++) {
            W value = xt_to<W>(from[j * r.inner]);
            if (!above(value, best.value)) continue;
            best.value = value;
            best.at = j;
        }
        places[row] = best.at;
    }
}

/* An element's place in the answer is the number of those that come before it: a thread for each
   element, blocks of THREADS elements of one row. */
template <class E>
static __global__ void __launch_bounds__(THREADS)
    rank_rows(const E *x, E *values, int64_t *places, const __grid_constant__ struct xt_along r,
              int64_t k, int64_t parts) {
    using W = xt_real<E>;
    __shared__ W tile[THREADS];
    for (int64_t unit = blockIdx.x; unit < r.count * parts; unit += gridDim.x) {
        int64_t row = unit / parts, i = (unit - row * parts) * THREADS + threadIdx.x;
        const E *from = x + xt_along_start(r, row, r.n);
        struct choice<W> mine = {
            i < r.n ? xt_to<W>(from[i * r.inner]) : (W)0, i
        };
        int64_t rank = 0;
        for (int64_t begin = 0; begin < r.n; begin += THREADS) {
            int64_t j = begin + threadIdx.x;
            int count = r.n - begin < THREADS ? (int)(r.n - begin) : THREADS;
            __syncthreads();
            if (j < r.n) tile[threadIdx.x] = xt_to<W>(from[j * r.inner]);
            __syncthreads();
            for (int q = 0; q < count; q++) {
                struct choice<W> other = {
                    tile[q], begin + q
                };
                rank += comes_before(other, mine);
            }
        }
        if (i >= r.n || rank >= k) continue;
        int64_t to = xt_along_start(r, row, k) + rank * r.inner;
        values[to] = xt_to<E>(mine.value);
        places[to] = i;
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

template <class E>
static enum xt_status run_choose(struct xt_ctx *ctx, const struct xt_along *r, const void *x,
                                 void *values, void *places, int64_t k) {
    cudaStream_t stream = xt_cuda_stream(ctx);
    if (r->n <= WARP_ROW)
        choose_rows<E, 32, THREADS><<<xt_cuda_blocks(r->count, THREADS / 32), THREADS, 0, stream>>>(
            (const E *)x, (E *)values, (int64_t *)places, *r, k);
    else
        choose_rows<E, ROW_THREADS, ROW_THREADS>
            <<<xt_cuda_blocks(r->count, 1), ROW_THREADS, 0, stream>>>((const E *)x, (E *)values,
                                                                      (int64_t *)places, *r, k);
    return xt_cuda_launched(ctx);
}

static enum xt_status argmax(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    if (xt_numel(y) == 0) return XT_OK;
    struct xt_along r = xt_along_of(x, l->attrs[0].i);
    if (r.inner > 1) {
        XT_CUDA_ANY(
            x->dtype,
            argmax_columns<<<xt_cuda_blocks(r.count, THREADS), THREADS, 0, xt_cuda_stream(ctx)>>>(
                (const T *)xt_data(x), (int64_t *)xt_data(y), r);)
        return xt_cuda_launched(ctx);
    }
    XT_CUDA_ANY(x->dtype, return run_choose<T>(ctx, &r, xt_data(x), NULL, xt_data(y), 1);)
    return XT_OK;
}

static enum xt_status topk(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    void *values = xt_data(l->out[0]), *places = xt_data(l->out[1]);
    int64_t k = l->attrs[0].i;
    if (xt_numel(l->out[0]) == 0) return XT_OK;
    struct xt_along r = xt_along_of(x, l->attrs[1].i);
    if (k <= FEW_CHOSEN) {
        XT_CUDA_ANY(x->dtype, return run_choose<T>(ctx, &r, xt_data(x), values, places, k);)
        return XT_OK;
    }
    int64_t parts = (r.n + THREADS - 1) / THREADS;
    XT_CUDA_ANY(x->dtype,
                rank_rows<<<xt_cuda_blocks(r.count * parts, 1), THREADS, 0, xt_cuda_stream(ctx)>>>(
                    (const T *)xt_data(x), (T *)values, (int64_t *)places, r, k, parts);)
    return xt_cuda_launched(ctx);
}

/* ---- the table ------------------------------------------------------------------------------- */

const struct xt_kernel xt_cuda_topk_kernels[] = {
    {"argmax", XT_ANY, XT_CONTIGUOUS, argmax},
    {"topk", XT_ANY, XT_CONTIGUOUS, topk},
    {},
};
