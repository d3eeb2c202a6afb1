/*
 * scatter.cu: adding rows of a gradient back to the rows they were picked from.
 *
 * That never races: places are sorted by what they name, equal ones staying in order, and the
 * sorted list is cut in tiles of fixed length. A tile adds its runs of equal keys itself, in order;
 * a run that goes over the end of a tile is added from the tiles' sums, in order. So the bits
 * follow from the input alone.
 *
 * Traffic: each row of the gradient read once, each named row of the target read and written once,
 * and a sort with 3 short launches for every 8 bits of the largest key.
 */
#include "layout.h"
#include "scatter.h"

#define THREADS 256
#define RUN 32  /* sorted places of a tile */
#define AHEAD 8 /* rows under way together */

/* ---- kernels --------------------------------------------------------------------------------- */

/*
 * target[base(c) + key * row + j] += grad[place * row + j] of outer place o, for the columns
 * (o, j): target is (outer, size, row) of A, grad (outer, n, row) of T, this slab's places being
 * begin .. begin + count - 1 of n.
 */
struct adding {
    int64_t outer, size, row;
    int64_t n, begin;
    int count, tiles;
    int64_t vectors; /* of a row */
    bool whole;      /* rows of grad begin on 16 bytes */
    bool whole_sums; /* rows of target do */
};

/* V elements of A, a part of a row; `live` of them are there. whole: at 16 bytes, where all are. */
template <class A, int V>
static __device__ inline void take_from(const A *from, A *sum, int live, bool whole) {
    constexpr int L = xt_lanes<A>;
    if (whole && live == V) {
#pragma unroll
        for (int k = 0; k < V; k += L) {
            struct xt_vector<A, L> v = *(const struct xt_vector<A, L> *)(from + k);
#pragma unroll
            for (int i = 0; i < L; i++) sum[k + i] = v.at[i];
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < V; k++) sum[k] = k < live ? from[k] : (A)0;
}

template <class A, int V>
static __device__ inline void put_to(A *to, const A *sum, int live, bool whole) {
    constexpr int L = xt_lanes<A>;
    if (whole && live == V) {
#pragma unroll
        for (int k = 0; k < V; k += L) {
            struct xt_vector<A, L> v;
#pragma unroll
            for (int i = 0; i < L; i++) v.at[i] = sum[k + i];
            *(struct xt_vector<A, L> *)(to + k) = v;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < V; k++)
        if (k < live) to[k] = sum[k];
}

/* A thread takes V columns of one tile. A run that began in an earlier tile, or goes on in the
   next, leaves its sum in edges (tile, first or last, column); others are added to the target. A
   tile that is all one such run leaves its sum as the first. */
template <class A, class T>
static __global__ void __launch_bounds__(THREADS)
    add_tiles(A *target, const T *grad, const uint64_t *keys, const uint32_t *order, A *edges,
              const __grid_constant__ struct adding f) {
    constexpr int V = xt_lanes<T>;
    const T fill = xt_to<T>((xt_real<T>)0);
    int64_t columns = f.outer * f.vectors, items = columns * f.tiles;
    for (int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x; item < items;
         item += (int64_t)gridDim.x * THREADS) {
        int64_t tile = item / columns, c = item - tile * columns;
        int64_t o = c / f.vectors, j = (c - o * f.vectors) * V;
        int live = f.row - j < V ? (int)(f.row - j) : V;
        int first = (int)tile * RUN, last = first + RUN < f.count ? first + RUN : f.count;
        A *to = target + o * f.size * f.row + j;
        const T *from = grad + (o * f.n + f.begin) * f.row + j;
        A *edge = edges + (tile * 2 * f.outer + o) * f.row + j;
        uint64_t key = keys[order[first]];
        bool came = first > 0 && keys[order[first - 1]] == key;
        A sum[V];
        /* The run that goes on in the next tile, if there is one. */
        bool leaves = last < f.count && keys[order[last - 1]] == keys[order[last]];
        uint64_t leaving = keys[order[last - 1]];
        /* A run within the tile starts from the target: as if added one by one. */
        bool from_target = key < (uint64_t)f.size && !came && !(leaves && key == leaving);
        if (from_target) {
            take_from<A, V>(to + key * f.row, sum, live, f.whole_sums);
        } else {
#pragma unroll
            for (int k = 0; k < V; k++) sum[k] = 0;
        }
        auto finish = [&](uint64_t of, bool at_end) {
            /* Not the target's: it came from before, or goes on: `last` only when it began here. */
            A *edge_of = edge + (at_end && !came ? f.outer * f.row : 0);
            if (of < (uint64_t)f.size)
                put_to<A, V>(from_target ? to + of * f.row : edge_of, sum, live, f.whole_sums);
            came = false;
        };
        for (int i = first; i < last; i += AHEAD) {
            uint32_t place[AHEAD];
            uint64_t of[AHEAD];
            struct xt_vector<T, V> v[AHEAD];
            A old[AHEAD][V]; /* the target's rows where runs start */
#pragma unroll
            for (int q = 0; q < AHEAD; q++) place[q] = order[i + q < last ? i + q : last - 1];
#pragma unroll
            for (int q = 0; q < AHEAD; q++) of[q] = keys[place[q]];
            if (f.whole && live == V) {
#pragma unroll
                for (int q = 0; q < AHEAD; q++)
                    v[q] = *(const struct xt_vector<T, V> *)(from + place[q] * f.row);
            } else {
#pragma unroll
                for (int q = 0; q < AHEAD; q++)
                    v[q] = xt_load_lanes(from + place[q] * f.row, live, fill, false);
            }
#pragma unroll
            for (int q = 0; q < AHEAD; q++)
                if (of[q] != (q ? of[q - 1] : key) && of[q] < (uint64_t)f.size)
                    take_from<A, V>(to + of[q] * f.row, old[q], live, f.whole_sums);
#pragma unroll
            for (int q = 0; q < AHEAD; q++) {
                if (i + q >= last) break;
                if (of[q] != key) {
                    finish(key, false);
                    key = of[q];
                    from_target = key < (uint64_t)f.size && !(leaves && key == leaving);
#pragma unroll
                    for (int k = 0; k < V; k++) sum[k] = from_target ? old[q][k] : (A)0;
                }
#pragma unroll
                for (int k = 0; k < V; k++) sum[k] += (A)xt_to<xt_real<T>>(v[q].at[k]);
            }
        }
        finish(key, true);
    }
}

/* Runs that go over the ends of tiles: a thread takes V columns of the run that begins in a tile
   and leaves it. */
template <class A, int V>
static __global__ void __launch_bounds__(THREADS)
    join_tiles(A *target, const uint64_t *keys, const uint32_t *order, const A *edges,
               const __grid_constant__ struct adding f) {
    int64_t columns = f.outer * f.vectors, items = columns * (f.tiles - 1);
    int64_t next = 2 * f.outer * f.row; /* from tile to tile of edges */
    for (int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x; item < items;
         item += (int64_t)gridDim.x * THREADS) {
        int64_t tile = item / columns, c = item - tile * columns;
        int first = (int)tile * RUN, end = first + RUN; /* every tile but the last is full */
        uint64_t key = keys[order[end - 1]];
        if (key >= (uint64_t)f.size || keys[order[end]] != key) continue;
        /* Began in an earlier tile: that one's thread adds it. */
        if (keys[order[first]] == key && first > 0 && keys[order[first - 1]] == key) continue;
        int64_t o = c / f.vectors, j = (c - o * f.vectors) * V;
        int live = f.row - j < V ? (int)(f.row - j) : V;
        const A *edge = edges + tile * next + o * f.row + j;
        A *to = target + (o * f.size + (int64_t)key) * f.row + j, sum[V], more[AHEAD][V];
        /* The run's end, by halving: keys[order[low - 1]] is key, from high on it is not. */
        int low = end + 1, high = f.count;
        while (low < high) {
            int middle = low + (high - low) / 2;
            if (keys[order[middle]] == key)
                low = middle + 1;
            else
                high = middle;
        }
        int64_t last = (low - 1) / RUN; /* its last tile */
        take_from<A, V>(edge + f.outer * f.row, sum, live, f.whole_sums);
        edge -= tile * next;
        for (int64_t t = tile + 1; t <= last; t += AHEAD) {
#pragma unroll
            for (int q = 0; q < AHEAD; q++)
                take_from<A, V>(edge + (t + q <= last ? t + q : last) * next, more[q], live,
                                f.whole_sums);
#pragma unroll
            for (int q = 0; q < AHEAD; q++)
#pragma unroll
                for (int k = 0; k < V; k++)
                    if (t + q <= last) sum[k] += more[q][k];
        }
        take_from<A, V>(to, more[0], live, f.whole_sums);
#pragma unroll
        for (int k = 0; k < V; k++) sum[k] += more[0][k];
        put_to<A, V>(to, sum, live, f.whole_sums);
    }
}

/* For sums made in f32 and given in 16 bits. */
template <class T> static __global__ void round_to(T *y, const float *sums, int64_t n) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        y[i] = xt_to<T>(sums[i]);
}

/* ---- launchers ------------------------------------------------------------------------------- */

/* Adds a slab, whose keys are filled in. */
template <class A, class T>
static enum xt_status add_slab(struct xt_ctx *ctx, struct xt_sorter *s, const struct xt_scatter *a,
                               const struct adding *f) {
    cudaStream_t stream = xt_cuda_stream(ctx);
    A *edges = NULL;
    int64_t items = f->outer * f->vectors;
    size_t bytes = (size_t)(2 * f->tiles * f->outer * f->row) * sizeof(A);
    XT_TRY(xt_sorter_run(ctx, s, f->count, (uint64_t)f->size));
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&edges));
    add_tiles<A, T><<<xt_cuda_blocks(items * f->tiles, THREADS), THREADS, 0, stream>>>(
        (A *)a->target, (const T *)a->grad, s->keys, s->order, edges, *f);
    if (f->tiles > 1)
        join_tiles<A, xt_lanes<T>>
            <<<xt_cuda_blocks(items * (f->tiles - 1), THREADS), THREADS, 0, stream>>>(
                (A *)a->target, s->keys, s->order, edges, *f);
    xt_scratch_put(ctx, XT_CUDA, edges, bytes);
    return xt_cuda_launched(ctx);
}

/* f64 is added in f64, all others in f32. */
enum xt_status xt_scatter_slab(struct xt_ctx *ctx, const struct xt_scatter *a, struct xt_sorter *s,
                               int64_t begin, int count) {
    const int64_t lanes = 16 / (int64_t)xt_dtype_bytes(a->dtype);
    struct adding f = {};
    if (a->outer * a->row == 0) return xt_cuda_launched(ctx);
    f.outer = a->outer;
    f.size = a->size;
    f.row = a->row;
    f.n = a->n;
    f.begin = begin;
    f.count = count;
    f.tiles = (count + RUN - 1) / RUN;
    f.vectors = (a->row + lanes - 1) / lanes;
    f.whole = xt_is_aligned16(a->grad) && a->row % lanes == 0;
    f.whole_sums = xt_is_aligned16(a->target) && a->row % (a->dtype == XT_F64 ? 2 : 4) == 0;
    switch (a->dtype) {
    case XT_F64: return add_slab<double, double>(ctx, s, a, &f);
    case XT_F32: return add_slab<float, float>(ctx, s, a, &f);
    case XT_BF16: return add_slab<float, __nv_bfloat16>(ctx, s, a, &f);
    default: return add_slab<float, __half>(ctx, s, a, &f);
    }
}

enum xt_status xt_sums_zero(struct xt_ctx *ctx, void *data, size_t bytes) {
    if (bytes == 0) return XT_OK;
    return xt_cuda_status(ctx, cudaMemsetAsync(data, 0, bytes, xt_cuda_stream(ctx)));
}

enum xt_status xt_sums_open(struct xt_ctx *ctx, const struct xt_tensor *y, void **sums,
                            size_t *bytes) {
    bool own = y->dtype == XT_F32 || y->dtype == XT_F64;
    *bytes = own ? 0 : (size_t)xt_numel(y) * sizeof(float);
    *sums = own ? xt_data(y) : NULL;
    if (!own) XT_TRY(xt_scratch_get(ctx, XT_CUDA, *bytes, sums));
    enum xt_status status = xt_sums_zero(ctx, *sums, own ? xt_nbytes(y) : *bytes);
    if (status != XT_OK && !own) xt_scratch_put(ctx, XT_CUDA, *sums, *bytes);
    return status;
}

enum xt_status xt_sums_close(struct xt_ctx *ctx, const struct xt_tensor *y, void *sums,
                             size_t bytes, enum xt_status status) {
    int64_t n = xt_numel(y);
    if (y->dtype == XT_F32 || y->dtype == XT_F64) return status;
    unsigned blocks = xt_cuda_blocks(n, THREADS * 4);
    cudaStream_t stream = xt_cuda_stream(ctx);
    if (status == XT_OK && n > 0) {
        if (y->dtype == XT_BF16)
            round_to<<<blocks, THREADS, 0, stream>>>((__nv_bfloat16 *)xt_data(y),
                                                     (const float *)sums, n);
        else
            round_to<<<blocks, THREADS, 0, stream>>>((__half *)xt_data(y), (const float *)sums, n);
        status = xt_cuda_launched(ctx);
    }
    xt_scratch_put(ctx, XT_CUDA, sums, bytes);
    return status;
}
