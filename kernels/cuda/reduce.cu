/*
 * reduce.cu: folding dimensions: sum, mean, amax, amin, norm.
 *
 * A tensor is (outer, n, inner) with n folded. It is cut into units by shape and dtype alone; where
 * n is cut too, the totals of its chunks are folded in a second step. Few elements are added in
 * their own type (f32 for 16-bit floats), such sums in f64; squares in f64, integers wrap around.
 *
 * Traffic: each element read once; chunks add 16 bytes for every 4,096 elements or so.
 */
#include <type_traits>

#include "layout.h"

#include "../dims.h"

#define THREADS 256
#define FEW_UNITS 512   /* with fewer, n is cut */
#define MANY_UNITS 1024 /* so that there are at most this many */

/* ---- what is folded, and how ----------------------------------------------------------------- */

enum { FOLD_SUM, FOLD_SQUARES, FOLD_MAX, FOLD_MIN };

template <int FOLD, class T> struct folder {
    static constexpr bool ADDS = FOLD == FOLD_SUM || FOLD == FOLD_SQUARES;
    static constexpr bool WHOLE = std::is_integral_v<T>;
    using E = T; /* element */
    /* What elements are widened to, and totals. */
    using W = std::conditional_t<FOLD == FOLD_SQUARES, double,
                                 std::conditional_t<WHOLE && ADDS, uint64_t, xt_real<T>>>;
    using A = std::conditional_t<ADDS && !WHOLE, double, W>;
    using Out = std::conditional_t<WHOLE && ADDS, int64_t, T>;

    static __device__ A start() {
        if constexpr (ADDS)
            return 0;
        else if constexpr (WHOLE)
            return FOLD == FOLD_MAX ? INT64_MIN : INT64_MAX;
        else
            return FOLD == FOLD_MAX ? -(A)INFINITY : (A)INFINITY;
    }
    static __device__ W widen(T x) {
        xt_real<T> wide = xt_to<xt_real<T>>(x);
        if constexpr (FOLD == FOLD_SQUARES)
            return (double)wide * (double)wide; /* f32 squares neither overflow nor vanish */
        else
            return (W)wide;
    }
    /* Of a and what comes after it; NaN wins and stays. */
    template <class X> static __device__ X join(X a, X b) {
        if constexpr (ADDS)
            return a + b;
        else if constexpr (FOLD == FOLD_MAX)
            return b != b || b > a ? b : a;
        else
            return b != b || b < a ? b : a;
    }
    /* count: how many were folded, for a mean; else 0. */
    static __device__ Out finish(A total, bool mean, int64_t count) {
        if constexpr (WHOLE) {
            return (Out)total;
        } else {
            double v = (double)total;
            if (mean) v /= (double)count;
            if (FOLD == FOLD_SQUARES) v = sqrt(v);
            if constexpr (sizeof(T) == 8)
                return v;
            else
                return xt_to<T>((float)v);
        }
    }
};

/* The second step: the elements are totals. */
template <class F> struct again : F {
    using E = typename F::A;
    using W = typename F::A;
    static __device__ W widen(E x) { return x; }
};

struct folding {
    int64_t outer, n, inner;
    int64_t chunks, chunk; /* n is cut in `chunks` of `chunk` */
    int64_t strips, units; /* columns are cut in `strips` (1 for rows); outer * chunks * strips */
    int64_t count;         /* folded into one in all */
    bool mean;
    bool whole; /* rows begin on 16 bytes */
};

/* ---- kernels --------------------------------------------------------------------------------- */

/* The lanes of a vector joined as a tree. */
template <class F, int V> static __device__ inline typename F::W join_lanes(typename F::W *w) {
#pragma unroll
    for (int half = V / 2; half > 0; half /= 2)
#pragma unroll
        for (int k = 0; k < half; k++) w[k] = F::join(w[k], w[k + half]);
    return w[0];
}

/* Over GROUP threads; the first of them gets it. */
template <class F, int GROUP> static __device__ inline typename F::A join_group(typename F::A a) {
    constexpr int WARPS = GROUP / 32;
#pragma unroll
    for (int step = (GROUP < 32 ? GROUP : 32) / 2; step; step /= 2)
        a = F::join(a, __shfl_down_sync(0xFFFFFFFFu, a, step, 32));
    if constexpr (WARPS > 1) {
        __shared__ typename F::A part[WARPS];
        __syncthreads();
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = a;
        __syncthreads();
        if (threadIdx.x == 0)
            for (int w = 1; w < WARPS; w++) a = F::join(a, part[w]);
    }
    return a;
}

/* inner is 1: GROUP threads fold a unit (o, chunk), whose elements lie side by side. */
template <class F, int GROUP>
static __global__ void __launch_bounds__(THREADS)
    fold_rows(const typename F::E *x, const __grid_constant__ struct folding f,
              typename F::A *partial, typename F::Out *y) {
    using E = typename F::E;
    using W = typename F::W;
    using A = typename F::A;
    constexpr int V = xt_lanes<E>, UNITS = THREADS / GROUP;
    const E fill = xt_to<E>((xt_real<E>)0);
    int lane = (int)threadIdx.x % GROUP;
    for (int64_t base = (int64_t)blockIdx.x * UNITS; base < f.units;
         base += (int64_t)gridDim.x * UNITS) {
        int64_t u = base + threadIdx.x / GROUP;
        A total = F::start();
        if (u < f.units) {
            int64_t o = f.chunks == 1 ? u : u / f.chunks, first = (u - o * f.chunks) * f.chunk;
            int64_t count = f.n - first < f.chunk ? f.n - first : f.chunk, i = lane * V;
            const E *from = x + o * f.n + first;
            auto take = [&total](const struct xt_vector<E, V> &v) {
                W w[V];
#pragma unroll
                for (int k = 0; k < V; k++) w[k] = F::widen(v.at[k]);
                total = F::join(total, (A)join_lanes<F, V>(w));
            };
            for (; i + 3 * GROUP * V + V <= count; i += 4 * GROUP * V) {
                struct xt_vector<E, V> v[4];
                xt_load_many(from + i, GROUP * V, V, fill, f.whole, v);
#pragma unroll
                for (int q = 0; q < 4; q++) take(v[q]);
            }
            for (; i + V <= count; i += GROUP * V) take(xt_load_lanes(from + i, V, fill, f.whole));
            /* Of the one thread whose vector is cut off. */
            for (; i < count; i++) total = F::join(total, (A)F::widen(from[i]));
        }
        total = join_group<F, GROUP>(total);
        if (lane == 0 && u < f.units) {
            if (partial)
                partial[u] = total;
            else
                y[u] = F::finish(total, f.mean, f.count);
        }
    }
}

/* A unit (o, chunk, strip) of columns: `across` threads, a power of two, each with V columns, and
   THREADS / across rows of them, which are joined as a tree. */
template <class F>
static __global__ void __launch_bounds__(THREADS)
    fold_columns(const typename F::E *x, const __grid_constant__ struct folding f, int across,
                 typename F::A *partial, typename F::Out *y) {
    using E = typename F::E;
    using W = typename F::W;
    using A = typename F::A;
    constexpr int V = xt_lanes<E>;
    __shared__ A part[V][THREADS];
    const E fill = xt_to<E>((xt_real<E>)0);
    int me = (int)threadIdx.x, row = me / across, down = THREADS / across;
    for (int64_t u = blockIdx.x; u < f.units; u += gridDim.x) {
        int64_t rest = u / f.strips, column = ((u - rest * f.strips) * across + me % across) * V;
        int64_t o = rest / f.chunks, c = rest - o * f.chunks;
        int64_t r = c * f.chunk, last = f.n - r < f.chunk ? f.n : r + f.chunk;
        int64_t live = f.inner - column; /* columns from here on */
        const E *from = x + o * f.n * f.inner + column;
        A total[V];
#pragma unroll
        for (int k = 0; k < V; k++) total[k] = F::start();
        r += row;
        if (live > 0) {
            for (; r + 3 * down < last; r += 4 * down) {
                struct xt_vector<E, V> v[4];
                xt_load_many(from + r * f.inner, down * f.inner, live, fill, f.whole, v);
#pragma unroll
                for (int k = 0; k < V; k++) {
                    W a = F::join(F::widen(v[0].at[k]), F::widen(v[1].at[k]));
                    W b = F::join(F::widen(v[2].at[k]), F::widen(v[3].at[k]));
                    total[k] = F::join(total[k], (A)F::join(a, b));
                }
            }
            for (; r < last; r += down) {
                struct xt_vector<E, V> v = xt_load_lanes(from + r * f.inner, live, fill, f.whole);
#pragma unroll
                for (int k = 0; k < V; k++) total[k] = F::join(total[k], (A)F::widen(v.at[k]));
            }
        }
        if (down > 1) {
#pragma unroll
            for (int k = 0; k < V; k++) part[k][me] = total[k];
            for (int half = down / 2; half > 0; half /= 2) {
                __syncthreads();
                if (row < half)
#pragma unroll
                    for (int k = 0; k < V; k++) {
                        total[k] = F::join(total[k], part[k][me + half * across]);
                        part[k][me] = total[k];
                    }
            }
            __syncthreads();
        }
        if (row > 0) continue;
#pragma unroll
        for (int k = 0; k < V; k++) {
            if (k >= live) continue;
            if (partial)
                partial[rest * f.inner + column + k] = total[k];
            else
                y[o * f.inner + column + k] = F::finish(total[k], f.mean, f.count);
        }
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

static int64_t over(int64_t n, int64_t by) {
    return (n + by - 1) / by;
}

/* At most `wanted` chunks, each a multiple of `grain`. */
static void cut(struct folding *f, int64_t wanted, int64_t grain) {
    f->chunks = 1;
    f->chunk = f->n;
    if (wanted <= 1) return;
    f->chunk = over(over(f->n, wanted), grain) * grain;
    f->chunks = over(f->n, f->chunk);
}

/* Cuts rows, and says how many threads fold a unit. */
template <class F> static int plan_rows(struct folding *f) {
    const int64_t vectors = xt_lanes<typename F::E>;
    cut(f,
        f->outer < FEW_UNITS && f->n >= 2 * THREADS * vectors * 4
            ? (MANY_UNITS / f->outer < f->n / (THREADS * vectors * 4)
                   ? MANY_UNITS / f->outer
                   : f->n / (THREADS * vectors * 4))
            : 1,
        THREADS * vectors);
    f->strips = 1;
    f->units = f->outer * f->chunks;
    if (f->chunk <= 2 * vectors) return 1;
    return f->chunk <= 8 * 2 * vectors ? 8 : f->chunk <= 32 * 4 * vectors ? 32 : THREADS;
}

/* Cuts columns, and says how many threads lie across. */
template <class F> static int plan_columns(struct folding *f) {
    int64_t vectors = over(f->inner, xt_lanes<typename F::E>);
    int across = xt_power_of_two(vectors, f->n <= 8 ? THREADS : 32);
    f->strips = over(vectors, across);
    int64_t units = f->outer * f->strips, most = f->n / (THREADS / across * 8);
    cut(f, units >= FEW_UNITS ? 1 : FEW_UNITS / units < most ? FEW_UNITS / units : most, 1);
    f->units = units * f->chunks;
    return across;
}

template <class F>
static enum xt_status launch(struct xt_ctx *ctx, const struct folding *f, int split, const void *x,
                             void *partial, void *y) {
    cudaStream_t stream = xt_cuda_stream(ctx);
    const typename F::E *from = (const typename F::E *)x;
    typename F::A *totals = (typename F::A *)partial;
    typename F::Out *to = (typename F::Out *)y;
    if (f->inner > 1) {
        fold_columns<F>
            <<<xt_cuda_blocks(f->units, 1), THREADS, 0, stream>>>(from, *f, split, totals, to);
        return xt_cuda_launched(ctx);
    }
    unsigned blocks = xt_cuda_blocks(f->units, THREADS / split);
    switch (split) {
    case 1: fold_rows<F, 1><<<blocks, THREADS, 0, stream>>>(from, *f, totals, to); break;
    case 8: fold_rows<F, 8><<<blocks, THREADS, 0, stream>>>(from, *f, totals, to); break;
    case 32: fold_rows<F, 32><<<blocks, THREADS, 0, stream>>>(from, *f, totals, to); break;
    default: fold_rows<F, THREADS><<<blocks, THREADS, 0, stream>>>(from, *f, totals, to); break;
    }
    return xt_cuda_launched(ctx);
}

/* f has outer, n, inner, count and mean. */
template <class F>
static enum xt_status run_folding(struct xt_ctx *ctx, struct folding f, const void *x, void *y) {
    using E = typename F::E;
    if (f.outer * f.inner == 0) return XT_OK;
    int split = f.inner > 1 ? plan_columns<F>(&f) : plan_rows<F>(&f);
    f.whole = f.inner > 1    ? xt_rows_aligned<E>(x, f.inner)
              : f.outer == 1 ? xt_is_aligned16(x)
                             : xt_rows_aligned<E>(x, f.n);
    if (f.chunks == 1) return launch<F>(ctx, &f, split, x, NULL, y);
    void *partial;
    size_t bytes = (size_t)(f.outer * f.chunks * f.inner) * sizeof(typename F::A);
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, &partial));
    enum xt_status status = launch<F>(ctx, &f, split, x, partial, NULL);
    if (status == XT_OK) {
        struct folding second = f;
        second.n = f.chunks;
        /* Not cut again: the totals of one place are few. */
        second.chunks = 1;
        second.chunk = second.n;
        second.whole = false;
        split = THREADS;
        if (f.inner > 1) {
            int64_t vectors = over(f.inner, xt_lanes<typename F::A>);
            split = xt_power_of_two(vectors, 32);
            second.strips = over(vectors, split);
            second.whole = xt_rows_aligned<typename F::A>(partial, f.inner);
        }
        second.units = second.outer * second.strips;
        status = launch<again<F>>(ctx, &second, split, partial, NULL, y);
    }
    xt_scratch_put(ctx, XT_CUDA, partial, bytes);
    return status;
}

template <int FOLD>
static enum xt_status fold_as(struct xt_ctx *ctx, const struct folding *f, enum xt_dtype dtype,
                              const void *x, void *y) {
    if constexpr (FOLD == FOLD_SQUARES)
        XT_CUDA_FLOATS(dtype, return run_folding<folder<FOLD, T>>(ctx, *f, x, y);)
    else
        XT_CUDA_ANY(dtype, return run_folding<folder<FOLD, T>>(ctx, *f, x, y);)
    return XT_OK;
}

template <int FOLD>
static enum xt_status fold_dims(struct xt_ctx *ctx, const struct xt_launch *l, bool mean) {
    const struct xt_tensor *x = l->in[0];
    void *y = xt_data(l->out[0]);
    int64_t size[XT_MAX_DIMS];
    bool folds[XT_MAX_DIMS];
    unsigned mask = l->attrs[0].list.count ? 0 : ~0u;
    for (int i = 0; i < l->attrs[0].list.count; i++)
        mask |= 1u << l->ints[l->attrs[0].list.start + i];
    int n = xt_merge_folds(x, mask, size, folds);
    struct folding f = {};
    f.outer = f.n = f.inner = f.count = 1;
    f.mean = mean;
    for (int d = 0; d < n; d++)
        if (folds[d]) f.count *= size[d];
    int first = 0; /* the merged dimension that is folded */
    while (first < n && !folds[first]) first++;
    if (n - first <= 2 && first <= 1) {
        if (first > 0) f.outer = size[0];
        if (first < n) f.n = size[first];
        if (first + 1 < n) f.inner = size[first + 1];
        if (first == n) { /* nothing to fold: columns of one row */
            f.inner = f.outer;
            f.outer = 1;
        }
        return fold_as<FOLD>(ctx, &f, x->dtype, xt_data(x), y);
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
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, &copy));
    enum xt_status status =
        xt_cuda_copy_strided(ctx, xt_dtype_bytes(x->dtype), m, shape, copy, to, xt_data(x), from);
    if (status == XT_OK) status = fold_as<FOLD>(ctx, &f, x->dtype, copy, y);
    xt_scratch_put(ctx, XT_CUDA, copy, bytes);
    return status;
}

static enum xt_status sum(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims<FOLD_SUM>(ctx, l, false);
}

static enum xt_status mean(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims<FOLD_SUM>(ctx, l, true);
}

static enum xt_status amax(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims<FOLD_MAX>(ctx, l, false);
}

static enum xt_status amin(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims<FOLD_MIN>(ctx, l, false);
}

static enum xt_status norm(struct xt_ctx *ctx, const struct xt_launch *l) {
    return fold_dims<FOLD_SQUARES>(ctx, l, false);
}

const struct xt_kernel xt_cuda_reduce_kernels[] = {
    {"sum", XT_ANY, XT_CONTIGUOUS, sum},      {"mean", XT_FLOATS, XT_CONTIGUOUS, mean},
    {"amax", XT_ANY, XT_CONTIGUOUS, amax},    {"amin", XT_ANY, XT_CONTIGUOUS, amin},
    {"norm", XT_FLOATS, XT_CONTIGUOUS, norm}, {},
};
