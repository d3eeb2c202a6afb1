/*
 * cumsum.cu: running sums along one dimension.
 *
 * Floats are added in f64, integers wrap around. Long rows, where they are few, are cut in chunks:
 * the totals of chunks come first, then their sums, then each chunk from there. Within a chunk
 * vectors, warps and blocks are scanned as trees: against a serial sum the f64 totals differ by
 * rounding, at most log2(n) + n / 2048 times 2^-53 of the sum of magnitudes.
 *
 * Traffic: x read once, y written once; x twice where rows are cut.
 */
#include <type_traits>

#include "along.h"

#define THREADS 256
#define CHUNK 8192    /* a multiple of what a block scans at once */
#define FEW_UNITS 512 /* with fewer rows, long ones are cut */

/* ---- kernels --------------------------------------------------------------------------------- */

/* Rows of n elements, each cut in chunks. */
struct scanning {
    int64_t rows, n;
    int64_t chunks, chunk; /* of a row, and elements of one */
    int64_t units;         /* rows * chunks */
    bool whole;            /* rows begin on 16 bytes, in both tensors */
};

/* The sum over the threads of the group before this one; *all gets that of all. */
template <class A, int GROUP> static __device__ inline A sum_before(A x, A *all) {
    int lane = (int)threadIdx.x % 32;
    A sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        A other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
    }
    A before = __shfl_up_sync(0xFFFFFFFFu, sum, 1);
    if (lane == 0) before = 0;
    *all = __shfl_sync(0xFFFFFFFFu, sum, 31);
    if constexpr (GROUP > 32) {
        constexpr int WARPS = GROUP / 32;
        __shared__ A part[WARPS];
        int warp = (int)threadIdx.x / 32;
        __syncthreads();
        if (lane == 0) part[warp] = *all;
        __syncthreads();
        A earlier = 0, total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w == warp) earlier = total;
            total += part[w];
        }
        before = earlier + before;
        *all = total;
    }
    return before;
}

/* y[j] = carry + x[0] + ... + x[j] of a unit (row, chunk); BACK: counted from the row's end. With
   `totals` only the unit's sum is written, to it. */
template <class E, class Out, class A, bool BACK, int GROUP>
static __global__ void __launch_bounds__(THREADS)
    scan_rows(const E *x, Out *y, const A *carry, A *totals,
              const __grid_constant__ struct scanning s) {
    constexpr int V = xt_lanes<E>, UNITS = THREADS / GROUP;
    int lane = (int)threadIdx.x % GROUP;
    for (int64_t base = (int64_t)blockIdx.x * UNITS; base < s.units;
         base += (int64_t)gridDim.x * UNITS) {
        int64_t u = base + threadIdx.x / GROUP, row = u / s.chunks;
        int64_t first = (u - row * s.chunks) * s.chunk, count = s.n - first;
        if (count > s.chunk) count = s.chunk;
        if (u >= s.units) count = 0;
        const E *from = x + row * s.n;
        Out *to = y + row * s.n;
        A run = carry && u < s.units ? carry[u] : (A)0;
        for (int64_t i = 0; i < count; i += GROUP * V) {
            int64_t j = i + lane * V, live = count - j; /* may be none */
            int64_t at = first + j, low = BACK ? s.n - at - V : at;
            A v[V], all;
            if (s.whole && live >= V) {
                auto vector = *(const struct xt_vector<E, V> *)(from + low);
#pragma unroll
                for (int k = 0; k < V; k++)
                    v[k] = (A)xt_to<xt_real<E>>(vector.at[BACK ? V - 1 - k : k]);
            } else {
#pragma unroll
                for (int k = 0; k < V; k++)
                    v[k] = k < live ? (A)xt_to<xt_real<E>>(from[BACK ? s.n - 1 - at - k : at + k])
                                    : (A)0;
            }
#pragma unroll
            for (int k = 1; k < V; k++) v[k] += v[k - 1];
            A before = sum_before<A, GROUP>(v[V - 1], &all) + run;
            run += all;
            if (totals) continue;
            Out out[V];
#pragma unroll
            for (int k = 0; k < V; k++) {
                if constexpr (sizeof(Out) == 8)
                    out[k] = (Out)(before + v[k]);
                else
                    out[k] = xt_to<Out>((float)(before + v[k]));
            }
            if (sizeof(Out) == sizeof(E) && s.whole && live >= V) {
                struct xt_vector<Out, V> vector;
#pragma unroll
                for (int k = 0; k < V; k++) vector.at[k] = out[BACK ? V - 1 - k : k];
                *(struct xt_vector<Out, V> *)(to + low) = vector;
            } else {
#pragma unroll
                for (int k = 0; k < V; k++)
                    if (k < live) to[BACK ? s.n - 1 - at - k : at + k] = out[k];
            }
        }
        if (totals && lane == 0 && u < s.units) totals[u] = run;
    }
}

/* Each row of totals, one a block: the sum of those before it. */
template <class A> static __global__ void scan_totals(A *totals, int64_t rows, int64_t chunks) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        A *at = totals + row * chunks, run = 0;
        for (int64_t i = 0; i < chunks; i += THREADS) {
            int64_t c = i + threadIdx.x;
            A all, before = sum_before<A, THREADS>(c < chunks ? at[c] : (A)0, &all);
            if (c < chunks) at[c] = run + before;
            run += all;
        }
    }
}

/* Rows that lie across memory: a thread for each. */
template <class E, class Out, class A, bool BACK>
static __global__ void scan_columns(const E *x, Out *y, const __grid_constant__ struct xt_along r) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x; row < r.count; row += step) {
        int64_t start = xt_along_start(r, row, r.n);
        A run = 0;
        for (int64_t i = 0; i < r.n; i++) {
            int64_t at = start + (BACK ? r.n - 1 - i : i) * r.inner;
            run += (A)xt_to<xt_real<E>>(x[at]);
            if constexpr (sizeof(Out) == 8)
                y[at] = (Out)run;
            else
                y[at] = xt_to<Out>((float)run);
        }
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

template <class E, bool BACK>
static enum xt_status run_scan(struct xt_ctx *ctx, const struct xt_along *r, const void *from,
                               void *to) {
    constexpr bool WHOLE = std::is_integral_v<E>;
    using A = std::conditional_t<WHOLE, uint64_t, double>;
    using Out = std::conditional_t<WHOLE, int64_t, E>;
    constexpr int V = xt_lanes<E>;
    cudaStream_t stream = xt_cuda_stream(ctx);
    const E *x = (const E *)from;
    Out *y = (Out *)to;
    if (r->inner > 1) {
        scan_columns<E, Out, A, BACK>
            <<<xt_cuda_blocks(r->count, THREADS), THREADS, 0, stream>>>(x, y, *r);
        return xt_cuda_launched(ctx);
    }
    struct scanning s = {r->count, r->n, 1, r->n, r->count, false};
    s.whole = xt_rows_aligned<E>(x, r->n) && xt_is_aligned16(y);
    if (r->n <= 32 * 4 * V) {
        scan_rows<E, Out, A, BACK, 32>
            <<<xt_cuda_blocks(s.units, THREADS / 32), THREADS, 0, stream>>>(x, y, NULL, NULL, s);
        return xt_cuda_launched(ctx);
    }
    if (s.rows < FEW_UNITS && s.n >= 2 * CHUNK) {
        s.chunk = CHUNK;
        s.chunks = (s.n + CHUNK - 1) / CHUNK;
        s.units = s.rows * s.chunks;
    }
    unsigned blocks = xt_cuda_blocks(s.units, 1);
    A *totals = NULL;
    size_t bytes = s.chunks > 1 ? (size_t)s.units * sizeof(A) : 0;
    if (bytes) {
        XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&totals));
        scan_rows<E, Out, A, BACK, THREADS><<<blocks, THREADS, 0, stream>>>(x, y, NULL, totals, s);
        scan_totals<<<xt_cuda_blocks(s.rows, 1), THREADS, 0, stream>>>(totals, s.rows, s.chunks);
    }
    scan_rows<E, Out, A, BACK, THREADS><<<blocks, THREADS, 0, stream>>>(x, y, totals, NULL, s);
    if (bytes) xt_scratch_put(ctx, XT_CUDA, totals, bytes);
    return xt_cuda_launched(ctx);
}

static enum xt_status cumsum(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    if (xt_numel(x) == 0) return XT_OK;
    struct xt_along r = xt_along_of(x, l->attrs[0].i);
    void *y = xt_data(l->out[0]);
    XT_CUDA_ANY(x->dtype, return (run_scan<T, false>(ctx, &r, xt_data(x), y));)
    return XT_OK;
}

static enum xt_status cumsum_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *g = l->in[0];
    if (xt_numel(g) == 0) return XT_OK;
    struct xt_along r = xt_along_of(g, l->attrs[0].i);
    void *y = xt_data(l->out[0]);
    XT_CUDA_FLOATS(g->dtype, return (run_scan<T, true>(ctx, &r, xt_data(g), y));)
    return XT_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

const struct xt_kernel xt_cuda_cumsum_kernels[] = {
    {"cumsum", XT_ANY, XT_CONTIGUOUS, cumsum},
    {"cumsum_grad", XT_FLOATS, XT_CONTIGUOUS, cumsum_grad},
    {},
};
