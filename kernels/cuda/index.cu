/*
 * index.cu: picking elements by position, and adding gradients back where they were picked.
 *
 * Adding back never races: positions are sorted by what they name, equal ones staying in order, and
 * the sorted list is cut in tiles of fixed length. A tile adds its runs of equal positions itself,
 * in order; a run that goes over the end of a tile is added from the tiles' sums, in order. So the
 * bits follow from the input alone.
 *
 * Traffic: picking reads and writes each row once. Adding back reads each row of the gradient once,
 * reads and writes each named row of the target once, and sorts with 3 short launches for every 8
 * bits of the largest position.
 */
#include <inttypes.h>
#include <stdio.h>

#include "layout.h"

#define THREADS 256
#define WARPS (THREADS / 32)

enum { VOCABULARY = -1 };

/* ---- positions ------------------------------------------------------------------------------- */

struct positions {
    const void *at; /* i32 or i64, contiguous */
    bool wide;      /* i64 */
    int64_t n;
    int64_t size; /* they lie in [0, size) */
    struct xt_cuda_fault fault;
    void *copy;   /* scratch, or NULL when `at` is the tensor's */
    size_t bytes; /* of copy */
};

/* dim is the dimension of x that is picked from, or VOCABULARY. */
static enum xt_status load_positions(struct xt_ctx *ctx, const struct xt_launch *l,
                                     const struct xt_tensor *t, const char *name, int64_t size,
                                     int64_t dim, struct positions *out) {
    struct positions p = {};
    char wanted[96];
    p.at = xt_data(t);
    p.wide = t->dtype == XT_I64;
    p.n = xt_numel(t);
    p.size = size;
    if (!xt_is_contiguous(t) && p.n > 0) {
        int64_t stride[XT_MAX_DIMS], step = 1;
        for (int d = t->ndim - 1; d >= 0; d--) {
            stride[d] = step;
            step *= t->shape[d];
        }
        p.bytes = xt_nbytes(t);
        XT_TRY(xt_scratch_get(ctx, XT_CUDA, p.bytes, &p.copy));
        enum xt_status status = xt_cuda_copy_strided(ctx, xt_dtype_bytes(t->dtype), t->ndim,
                                                     t->shape, p.copy, stride, p.at, t->stride);
        if (status != XT_OK) {
            xt_scratch_put(ctx, XT_CUDA, p.copy, p.bytes);
            return status;
        }
        p.at = p.copy;
    }
    if (dim == VOCABULARY)
        snprintf(wanted, sizeof wanted, "the vocabulary has %" PRId64, size);
    else
        snprintf(wanted, sizeof wanted, "dim %" PRId64 " of x has size %" PRId64, dim + 1, size);
    p.fault = xt_cuda_fault(ctx, l->op, name, wanted);
    *out = p;
    return XT_OK;
}

static void drop_positions(struct xt_ctx *ctx, const struct positions *p) {
    if (p->copy) xt_scratch_put(ctx, XT_CUDA, p->copy, p->bytes);
}

static __device__ inline int64_t position_at(const struct positions &p, int64_t i) {
    return p.wide ? ((const int64_t *)p.at)[i] : (int64_t)((const int32_t *)p.at)[i];
}

static __device__ inline bool in_range(const struct positions &p, int64_t at) {
    return (uint64_t)at < (uint64_t)p.size;
}

/* ---- embedding, index_select ----------------------------------------------------------------- */

/* (outer, size, row) to (outer, n, row), in units of U. */
struct pick {
    int64_t rows, units; /* outer * n, and units of a row */
    int64_t step;        /* units from row to row of `from` */
    int across;          /* threads along a row, a power of two */
};

template <class U>
static __global__ void pick_rows(U *to, const U *from, struct positions p, struct pick k) {
    int down = THREADS / k.across, x = (int)threadIdx.x % k.across;
    int64_t begin = (int64_t)blockIdx.y * k.across + x, next = (int64_t)gridDim.y * k.across;
    for (int64_t r = (int64_t)blockIdx.x * down + threadIdx.x / k.across; r < k.rows;
         r += (int64_t)gridDim.x * down) {
        int64_t o = k.rows == p.n ? 0 : r / p.n, i = r - o * p.n, at = position_at(p, i);
        bool good = in_range(p, at);
        if (!good && begin == 0) xt_note_fault(p.fault, i, at);
        const U *source = from + (o * p.size + at) * k.step;
        U *target = to + r * k.units;
        for (int64_t c = begin; c < k.units; c += next) target[c] = good ? source[c] : U();
    }
}

/* The opposite: a row of `from` goes to where its position says; of equal positions only the last
   does, whose number, from 1, is in `last` (NULL: there is only one). */
template <class U>
static __global__ void put_rows(U *to, const U *from, const unsigned long long *last,
                                struct positions p, struct pick k) {
    int down = THREADS / k.across, x = (int)threadIdx.x % k.across;
    int64_t begin = (int64_t)blockIdx.y * k.across + x, next = (int64_t)gridDim.y * k.across;
    for (int64_t r = (int64_t)blockIdx.x * down + threadIdx.x / k.across; r < k.rows;
         r += (int64_t)gridDim.x * down) {
        int64_t o = k.rows == p.n ? 0 : r / p.n, i = r - o * p.n, at = position_at(p, i);
        if (!in_range(p, at)) {
            if (begin == 0) xt_note_fault(p.fault, i, at);
            continue;
        }
        if (last && last[at] != (unsigned long long)i + 1) continue;
        const U *source = from + r * k.units;
        U *target = to + (o * p.size + at) * k.units;
        for (int64_t c = begin; c < k.units; c += next) target[c] = source[c];
    }
}

static __global__ void find_last(unsigned long long *last, struct positions p) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.n; i += step) {
        int64_t at = position_at(p, i);
        if (in_range(p, at)) atomicMax(&last[at], (unsigned long long)i + 1); /* in any order */
    }
}

/* How rows are copied: the widest unit that rows, steps and places allow. */
struct copying {
    struct pick pick;
    int64_t unit; /* bytes */
    dim3 grid;
};

static struct copying copying_of(int64_t rows, const void *to, const void *from, int64_t row,
                                 int64_t step) {
    struct copying c = {{rows, row, step, 1}, 16, dim3(1)};
    uint64_t places =
        (uint64_t)(uintptr_t)to | (uint64_t)(uintptr_t)from | (uint64_t)row | (uint64_t)step | 16;
    c.unit = (int64_t)(places & (0 - places)); /* the largest power of two in all */
    c.pick.units /= c.unit;
    c.pick.step /= c.unit;
    c.pick.across = xt_power_of_two(c.pick.units, THREADS);
    int64_t parts = (c.pick.units + 4 * c.pick.across - 1) / (4 * c.pick.across);
    c.grid =
        dim3(xt_cuda_blocks(rows, THREADS / c.pick.across), (unsigned)(parts < 1      ? 1
                                                                       : parts > 1024 ? 1024
                                                                                      : parts));
    return c;
}

/* Calls `...` with U being a type of `unit` bytes. */
#define BY_UNIT(unit, ...)                                                                         \
    switch (unit) {                                                                                \
    case 1: {                                                                                      \
        using U = uint8_t;                                                                         \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case 2: {                                                                                      \
        using U = uint16_t;                                                                        \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case 4: {                                                                                      \
        using U = uint32_t;                                                                        \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case 8: {                                                                                      \
        using U = uint64_t;                                                                        \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    default: {                                                                                     \
        using U = uint4;                                                                           \
        __VA_ARGS__                                                                                \
    }                                                                                              \
    }

/* `step` is from row to row of `from`, in bytes like `row`. */
static enum xt_status pick(struct xt_ctx *ctx, const struct positions *p, int64_t outer, void *to,
                           const void *from, int64_t row, int64_t step) {
    if (outer * p->n == 0) return XT_OK;
    struct copying c = copying_of(outer * p->n, to, from, row, step);
    BY_UNIT(c.unit, pick_rows<<<c.grid, THREADS, 0, xt_cuda_stream(ctx)>>>((U *)to, (const U *)from,
                                                                           *p, c.pick);)
    return xt_cuda_launched(ctx);
}

static enum xt_status embedding(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *weight = l->in[0];
    int64_t bytes = (int64_t)xt_dtype_bytes(weight->dtype);
    struct positions p;
    XT_TRY(load_positions(ctx, l, l->in[1], "ids", weight->shape[0], VOCABULARY, &p));
    enum xt_status status = pick(ctx, &p, 1, xt_data(l->out[0]), xt_data(weight),
                                 weight->shape[1] * bytes, weight->stride[0] * bytes);
    drop_positions(ctx, &p);
    return status;
}

/* A shape as (outer, size, inner) about one dimension. */
static void around(const struct xt_tensor *t, int64_t dim, int64_t *outer, int64_t *inner) {
    *outer = *inner = 1;
    for (int d = 0; d < t->ndim; d++)
        if (d != dim) *(d < dim ? outer : inner) *= t->shape[d];
}

static enum xt_status index_select(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    int64_t dim = l->attrs[0].i, outer, inner;
    struct positions p;
    around(x, dim, &outer, &inner);
    int64_t row = inner * (int64_t)xt_dtype_bytes(x->dtype);
    XT_TRY(load_positions(ctx, l, l->in[1], "index", x->shape[dim], dim, &p));
    enum xt_status status = pick(ctx, &p, outer, xt_data(l->out[0]), xt_data(x), row, row);
    drop_positions(ctx, &p);
    return status;
}

/* In order: the last of equal positions stays. */
static enum xt_status index_copy(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *src = l->in[2];
    int64_t dim = l->attrs[0].i, outer, inner;
    cudaStream_t stream = xt_cuda_stream(ctx);
    struct positions p;
    void *last = NULL, *to = xt_data(x);
    const void *from = xt_data(src);
    enum xt_status status = XT_OK;
    around(x, dim, &outer, &inner);
    int64_t row = inner * (int64_t)xt_dtype_bytes(x->dtype);
    XT_TRY(load_positions(ctx, l, l->in[1], "index", x->shape[dim], dim, &p));
    size_t bytes = p.n > 1 ? (size_t)p.size * sizeof(unsigned long long) : 0;
    if (outer * p.n == 0) goto done;
    if (bytes) {
        XT_GO(xt_scratch_get(ctx, XT_CUDA, bytes, &last));
        XT_GO(xt_cuda_status(ctx, cudaMemsetAsync(last, 0, bytes, stream)));
        find_last<<<xt_cuda_blocks(p.n, THREADS), THREADS, 0, stream>>>((unsigned long long *)last,
                                                                        p);
    }
    {
        struct copying c = copying_of(outer * p.n, to, from, row, row);
        BY_UNIT(c.unit, put_rows<<<c.grid, THREADS, 0, stream>>>(
                            (U *)to, (const U *)from, (const unsigned long long *)last, p, c.pick);)
    }
    status = xt_cuda_launched(ctx);
done:
    xt_scratch_put(ctx, XT_CUDA, last, bytes);
    drop_positions(ctx, &p);
    return status;
}

/* ---- sorting positions ----------------------------------------------------------------------- */

/*
 * A stable radix sort, 8 bits a pass: counts of each digit for each block of BLOCK places, their
 * running sums digit by digit, then each block puts its places where they go. Places are numbers of
 * keys below SLAB; longer lists are added slab after slab.
 */
#define SLAB ((int64_t)1 << 22)
#define DIGITS 256
#define BLOCK 2048
#define ROUNDS (BLOCK / THREADS) /* of 32 places for each warp */

static __global__ void count_digits(const uint64_t *keys, const uint32_t *order, int n, int shift,
                                    uint32_t *counts, int blocks) {
    __shared__ uint32_t count[DIGITS];
    count[threadIdx.x] = 0;
    __syncthreads();
    int begin = (int)blockIdx.x * BLOCK;
    for (int i = begin + (int)threadIdx.x; i < n && i < begin + BLOCK; i += THREADS)
        atomicAdd(&count[keys[order ? order[i] : (uint32_t)i] >> shift & (DIGITS - 1)], 1u);
    __syncthreads();
    counts[(int64_t)threadIdx.x * blocks + blockIdx.x] = count[threadIdx.x];
}

#define SCANNERS 1024
/* Each number becomes the sum of those before it; one block. */
static __global__ void sum_before(uint32_t *counts, int n) {
    __shared__ uint32_t part[SCANNERS];
    int me = (int)threadIdx.x, each = (n + SCANNERS - 1) / SCANNERS;
    int begin = me * each < n ? me * each : n, end = begin + each < n ? begin + each : n;
    uint32_t sum = 0;
    for (int i = begin; i < end; i++) sum += counts[i];
    part[me] = sum;
    __syncthreads();
    for (int step = 1; step < SCANNERS; step *= 2) {
        uint32_t before = me >= step ? part[me - step] : 0;
        __syncthreads();
        part[me] += before;
        __syncthreads();
    }
    sum = me > 0 ? part[me - 1] : 0;
    for (int i = begin; i < end; i++) {
        uint32_t count = counts[i];
        counts[i] = sum;
        sum += count;
    }
}

static __global__ void place_digits(const uint64_t *keys, const uint32_t *order, int n, int shift,
                                    const uint32_t *counts, int blocks, uint32_t *sorted) {
    __shared__ uint32_t next[WARPS][DIGITS]; /* where a warp's next place with a digit goes */
    int me = (int)threadIdx.x, warp = me / 32, lane = me % 32;
    for (int w = 0; w < WARPS; w++) next[w][me] = 0;
    __syncthreads();
    /* A warp has 32 * ROUNDS places side by side. */
    int begin = (int)blockIdx.x * BLOCK + warp * 32 * ROUNDS + lane;
    uint32_t place[ROUNDS], digit[ROUNDS], same[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int i = begin + r * 32;
        place[r] = i >= n ? 0 : order ? order[i] : (uint32_t)i;
        /* Beyond the end: a digit of its own, which is counted nowhere. */
        digit[r] = i < n ? (uint32_t)(keys[place[r]] >> shift & (DIGITS - 1)) : DIGITS;
        same[r] = __match_any_sync(0xFFFFFFFFu, digit[r]);
        if (digit[r] < DIGITS && __ffs((int)same[r]) - 1 == lane)
            next[warp][digit[r]] += (uint32_t)__popc(same[r]);
        __syncwarp();
    }
    __syncthreads();
    uint32_t sum = counts[(int64_t)me * blocks + blockIdx.x];
    for (int w = 0; w < WARPS; w++) {
        uint32_t count = next[w][me];
        next[w][me] = sum;
        sum += count;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        if (digit[r] < DIGITS) {
            uint32_t before = (uint32_t)__popc(same[r] & ((1u << lane) - 1));
            sorted[next[warp][digit[r]] + before] = place[r];
        }
        __syncwarp();
        if (digit[r] < DIGITS && __ffs((int)same[r]) - 1 == lane)
            next[warp][digit[r]] += (uint32_t)__popc(same[r]);
        __syncwarp();
    }
}

/* What sorting takes, for one slab. */
struct sorter {
    uint64_t *keys;          /* of each place; `size` and above: left out */
    uint32_t *order, *spare; /* places, sorted by key when done; what the next pass writes */
    uint32_t *counts;        /* of digits */
    int64_t most;            /* places there is room for */
    void *data;              /* all of the above */
    size_t bytes;            /* of data */
};

static int sort_blocks(int64_t n) {
    return (int)((n + BLOCK - 1) / BLOCK);
}

static enum xt_status sorter_open(struct xt_ctx *ctx, int64_t n, struct sorter *s) {
    s->most = n < SLAB ? n : SLAB;
    size_t keys = (size_t)s->most * 8, places = ((size_t)s->most * 4 + 15) / 16 * 16;
    s->bytes = keys + 2 * places + (size_t)sort_blocks(s->most) * DIGITS * 4;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, s->bytes, &s->data));
    char *at = (char *)s->data;
    s->keys = (uint64_t *)at;
    s->order = (uint32_t *)(at + keys);
    s->spare = (uint32_t *)(at + keys + places);
    s->counts = (uint32_t *)(at + keys + 2 * places);
    return XT_OK;
}

static void sorter_close(struct xt_ctx *ctx, const struct sorter *s) {
    xt_scratch_put(ctx, XT_CUDA, s->data, s->bytes);
}

/* Fills `order` from n keys, none above `largest`; n >= 1. */
static enum xt_status sort(struct xt_ctx *ctx, struct sorter *s, int64_t n, uint64_t largest) {
    cudaStream_t stream = xt_cuda_stream(ctx);
    int blocks = sort_blocks(n), shift = 0;
    do {
        const uint32_t *from = shift ? s->order : NULL;
        count_digits<<<blocks, THREADS, 0, stream>>>(s->keys, from, (int)n, shift, s->counts,
                                                     blocks);
        sum_before<<<1, SCANNERS, 0, stream>>>(s->counts, blocks * DIGITS);
        place_digits<<<blocks, THREADS, 0, stream>>>(s->keys, from, (int)n, shift, s->counts,
                                                     blocks, s->spare);
        uint32_t *sorted = s->spare;
        s->spare = s->order;
        s->order = sorted;
        XT_TRY(xt_cuda_launched(ctx));
        shift += 8;
    } while (shift < 64 && largest >> shift);
    return XT_OK;
}

/* ---- adding back ----------------------------------------------------------------------------- */

#define RUN 32  /* sorted places of a tile */
#define AHEAD 8 /* rows under way together */

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
              struct adding f) {
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
               struct adding f) {
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

/* keys[i] = position begin + i, or size where that is out of range. */
static __global__ void keys_of_positions(uint64_t *keys, struct positions p, int64_t begin,
                                         int count) {
    int step = (int)gridDim.x * THREADS;
    for (int i = (int)(blockIdx.x * THREADS + threadIdx.x); i < count; i += step) {
        int64_t at = position_at(p, begin + i);
        bool good = in_range(p, at);
        if (!good) xt_note_fault(p.fault, begin + i, at);
        keys[i] = good ? (uint64_t)at : (uint64_t)p.size;
    }
}

/* Adds one slab, whose keys are filled in. */
template <class A, class T>
static enum xt_status add_slab(struct xt_ctx *ctx, struct sorter *s, const struct adding *f,
                               void *target, const void *grad) {
    cudaStream_t stream = xt_cuda_stream(ctx);
    A *edges = NULL;
    int64_t items = f->outer * f->vectors;
    size_t bytes = (size_t)(2 * f->tiles * f->outer * f->row) * sizeof(A);
    XT_TRY(sort(ctx, s, f->count, (uint64_t)f->size));
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&edges));
    add_tiles<A, T><<<xt_cuda_blocks(items * f->tiles, THREADS), THREADS, 0, stream>>>(
        (A *)target, (const T *)grad, s->keys, s->order, edges, *f);
    if (f->tiles > 1)
        join_tiles<A, xt_lanes<T>>
            <<<xt_cuda_blocks(items * (f->tiles - 1), THREADS), THREADS, 0, stream>>>(
                (A *)target, s->keys, s->order, edges, *f);
    xt_scratch_put(ctx, XT_CUDA, edges, bytes);
    return xt_cuda_launched(ctx);
}

/* The same by the dtype of the gradient: f64 is added in f64, all others in f32. */
static enum xt_status add_slab_of(struct xt_ctx *ctx, struct sorter *s, struct adding *f,
                                  void *target, const void *grad, enum xt_dtype dtype) {
    int64_t lanes = 16 / (int64_t)xt_dtype_bytes(dtype);
    f->tiles = (f->count + RUN - 1) / RUN;
    f->vectors = (f->row + lanes - 1) / lanes;
    f->whole = xt_is_aligned16(grad) && f->row % lanes == 0;
    f->whole_sums = xt_is_aligned16(target) && f->row % (dtype == XT_F64 ? 2 : 4) == 0;
    switch (dtype) {
    case XT_F64: return add_slab<double, double>(ctx, s, f, target, grad);
    case XT_F32: return add_slab<float, float>(ctx, s, f, target, grad);
    case XT_BF16: return add_slab<float, __nv_bfloat16>(ctx, s, f, target, grad);
    default: return add_slab<float, __half>(ctx, s, f, target, grad);
    }
}

/* target (outer, size, row), of f32 or f64, at p += grad (outer, n, row). */
static enum xt_status add_rows(struct xt_ctx *ctx, const struct positions *p, int64_t outer,
                               int64_t row, void *target, const void *grad, enum xt_dtype dtype) {
    struct sorter s;
    enum xt_status status = XT_OK;
    if (p->n == 0) return XT_OK;
    XT_TRY(sorter_open(ctx, p->n, &s));
    for (int64_t begin = 0; begin < p->n && status == XT_OK; begin += s.most) {
        struct adding f = {};
        f.outer = outer;
        f.size = p->size;
        f.row = row;
        f.n = p->n;
        f.begin = begin;
        f.count = (int)(p->n - begin < s.most ? p->n - begin : s.most);
        keys_of_positions<<<xt_cuda_blocks(f.count, THREADS), THREADS, 0, xt_cuda_stream(ctx)>>>(
            s.keys, *p, begin, f.count);
        if (outer * row > 0) status = add_slab_of(ctx, &s, &f, target, grad, dtype);
    }
    if (status == XT_OK) status = xt_cuda_launched(ctx);
    sorter_close(ctx, &s);
    return status;
}

static enum xt_status zero(struct xt_ctx *ctx, void *data, size_t bytes) {
    if (bytes == 0) return XT_OK;
    return xt_cuda_status(ctx, cudaMemsetAsync(data, 0, bytes, xt_cuda_stream(ctx)));
}

static enum xt_status embedding_acc(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *target = l->in[0], *grad = l->in[2];
    struct positions p;
    if ((target->dtype == XT_F64) != (grad->dtype == XT_F64))
        return xt_fail(ctx, XT_DTYPE, "target is %s, grad is %s", xt_dtype_name(target->dtype),
                       xt_dtype_name(grad->dtype));
    XT_TRY(load_positions(ctx, l, l->in[1], "ids", target->shape[0], VOCABULARY, &p));
    enum xt_status status = XT_OK;
    if (!l->attrs[0].i) status = zero(ctx, xt_data(target), xt_nbytes(target));
    if (status == XT_OK)
        status =
            add_rows(ctx, &p, 1, target->shape[1], xt_data(target), xt_data(grad), grad->dtype);
    drop_positions(ctx, &p);
    return status;
}

/* ---- sums of a gradient's own ---------------------------------------------------------------- */

template <class T> static __global__ void round_to(T *y, const float *sums, int64_t n) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        y[i] = xt_to<T>(sums[i]);
}

/* Where sums are made: y itself when it is f32 or f64, else f32 scratch of `bytes`, zeroed. */
static enum xt_status open_sums(struct xt_ctx *ctx, const struct xt_tensor *y, void **sums,
                                size_t *bytes) {
    bool own = y->dtype == XT_F32 || y->dtype == XT_F64;
    *bytes = own ? 0 : (size_t)xt_numel(y) * sizeof(float);
    *sums = own ? xt_data(y) : NULL;
    if (!own) XT_TRY(xt_scratch_get(ctx, XT_CUDA, *bytes, sums));
    enum xt_status status = zero(ctx, *sums, own ? xt_nbytes(y) : *bytes);
    if (status != XT_OK && !own) xt_scratch_put(ctx, XT_CUDA, *sums, *bytes);
    return status;
}

/* After what made the sums gave `status`. */
static enum xt_status close_sums(struct xt_ctx *ctx, const struct xt_tensor *y, void *sums,
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

static enum xt_status index_select_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *grad = l->in[1], *y = l->out[0];
    int64_t dim = l->attrs[0].i, outer, inner;
    struct positions p;
    void *sums;
    size_t bytes;
    around(y, dim, &outer, &inner);
    XT_TRY(load_positions(ctx, l, l->in[0], "index", y->shape[dim], dim, &p));
    enum xt_status status = open_sums(ctx, y, &sums, &bytes);
    if (status == XT_OK) {
        status = add_rows(ctx, &p, outer, inner, sums, xt_data(grad), grad->dtype);
        status = close_sums(ctx, y, sums, bytes, status);
    }
    drop_positions(ctx, &p);
    return status;
}

/* ---- gather ---------------------------------------------------------------------------------- */

/* Elements of index, and where they lie in x without their own position: stride 0 along dim. */
static struct xt_places<1> places_of(const struct xt_tensor *index, const int64_t *x_shape,
                                     int64_t dim, int64_t *dim_step) {
    struct xt_places<1> p = {};
    int64_t step = 1;
    *dim_step = 1;
    p.ndim = index->ndim;
    for (int d = index->ndim - 1; d >= 0; d--) {
        if (d == dim) *dim_step = step;
        p.shape[d] = index->shape[d];
        p.stride[0][d] = d == dim ? 0 : step;
        step *= x_shape[d];
    }
    xt_places_ready(&p);
    return p;
}

template <class U>
static __global__ void gather_elements(U *to, const U *from, struct positions p,
                                       struct xt_places<1> places, int64_t dim_step) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x; e < p.n; e += step) {
        int64_t at[1], position = position_at(p, e);
        if (!in_range(p, position)) {
            xt_note_fault(p.fault, e, position);
            to[e] = 0;
            continue;
        }
        xt_place_of(places, e, at);
        to[e] = from[at[0] + position * dim_step];
    }
}

static enum xt_status gather(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *index = l->in[1];
    int64_t dim = l->attrs[0].i, step;
    void *to = xt_data(l->out[0]);
    const void *from = xt_data(x);
    struct positions p;
    if (xt_numel(index) == 0) return XT_OK;
    struct xt_places<1> places = places_of(index, x->shape, dim, &step);
    XT_TRY(load_positions(ctx, l, index, "index", x->ndim ? x->shape[dim] : 1, dim, &p));
    unsigned blocks = xt_cuda_blocks(p.n, THREADS);
    cudaStream_t stream = xt_cuda_stream(ctx);
    switch (xt_dtype_bytes(x->dtype)) {
    case 1:
        gather_elements<<<blocks, THREADS, 0, stream>>>((uint8_t *)to, (const uint8_t *)from, p,
                                                        places, step);
        break;
    case 2:
        gather_elements<<<blocks, THREADS, 0, stream>>>((uint16_t *)to, (const uint16_t *)from, p,
                                                        places, step);
        break;
    case 4:
        gather_elements<<<blocks, THREADS, 0, stream>>>((uint32_t *)to, (const uint32_t *)from, p,
                                                        places, step);
        break;
    default:
        gather_elements<<<blocks, THREADS, 0, stream>>>((uint64_t *)to, (const uint64_t *)from, p,
                                                        places, step);
        break;
    }
    drop_positions(ctx, &p);
    return xt_cuda_launched(ctx);
}

/* Elements of index that differ along dim alone may meet: with few of those (`n`), a thread adds
   them one after another. Index is (outer, n, inner), e = (o * n + i) * inner + j. */
template <class A, class T>
static __global__ void gather_back_lines(A *sums, const T *grad, struct positions p,
                                         struct xt_places<1> places, int64_t dim_step, int64_t n,
                                         int64_t inner) {
    int64_t step = (int64_t)gridDim.x * THREADS, lines = p.n / n;
    for (int64_t line = (int64_t)blockIdx.x * THREADS + threadIdx.x; line < lines; line += step) {
        int64_t o = inner == 1 ? line : line / inner, first = o * n * inner + (line - o * inner);
        int64_t at[1];
        xt_place_of(places, first, at);
        for (int64_t i = 0; i < n; i++) {
            int64_t e = first + i * inner, position = position_at(p, e);
            if (in_range(p, position))
                sums[at[0] + position * dim_step] += (A)xt_to<xt_real<T>>(grad[e]);
            else
                xt_note_fault(p.fault, e, position);
        }
    }
}

/* keys[i] = where element begin + i is added, or total where its position is out of range. */
static __global__ void keys_of_places(uint64_t *keys, struct positions p,
                                      struct xt_places<1> places, int64_t dim_step, int64_t total,
                                      int64_t begin, int count) {
    int step = (int)gridDim.x * THREADS;
    for (int i = (int)(blockIdx.x * THREADS + threadIdx.x); i < count; i += step) {
        int64_t e = begin + i, at[1], position = position_at(p, e);
        bool good = in_range(p, position);
        if (!good) xt_note_fault(p.fault, e, position);
        xt_place_of(places, e, at);
        keys[i] = (uint64_t)(good ? at[0] + position * dim_step : total);
    }
}

#define FEW_MEET 64 /* up to this many, lines rather than sorting */

static enum xt_status gather_back(struct xt_ctx *ctx, const struct positions *p,
                                  const struct xt_tensor *index, const struct xt_tensor *y,
                                  int64_t dim, void *sums, const void *grad, enum xt_dtype dtype) {
    int64_t dim_step, outer, inner, n = index->ndim ? index->shape[dim] : 1;
    cudaStream_t stream = xt_cuda_stream(ctx);
    struct xt_places<1> places = places_of(index, y->shape, dim, &dim_step);
    around(index, dim, &outer, &inner);
    if (n <= FEW_MEET) {
        unsigned blocks = xt_cuda_blocks(p->n / n, THREADS);
        if (dtype == XT_F64)
            gather_back_lines<<<blocks, THREADS, 0, stream>>>((double *)sums, (const double *)grad,
                                                              *p, places, dim_step, n, inner);
        else if (dtype == XT_F32)
            gather_back_lines<<<blocks, THREADS, 0, stream>>>((float *)sums, (const float *)grad,
                                                              *p, places, dim_step, n, inner);
        else if (dtype == XT_BF16)
            gather_back_lines<<<blocks, THREADS, 0, stream>>>(
                (float *)sums, (const __nv_bfloat16 *)grad, *p, places, dim_step, n, inner);
        else
            gather_back_lines<<<blocks, THREADS, 0, stream>>>((float *)sums, (const __half *)grad,
                                                              *p, places, dim_step, n, inner);
        return xt_cuda_launched(ctx);
    }
    struct sorter s;
    enum xt_status status = XT_OK;
    XT_TRY(sorter_open(ctx, p->n, &s));
    for (int64_t begin = 0; begin < p->n && status == XT_OK; begin += s.most) {
        struct adding f = {};
        f.outer = f.row = 1;
        f.size = xt_numel(y);
        f.n = p->n;
        f.begin = begin;
        f.count = (int)(p->n - begin < s.most ? p->n - begin : s.most);
        keys_of_places<<<xt_cuda_blocks(f.count, THREADS), THREADS, 0, stream>>>(
            s.keys, *p, places, dim_step, f.size, begin, f.count);
        status = add_slab_of(ctx, &s, &f, sums, grad, dtype);
    }
    sorter_close(ctx, &s);
    return status;
}

static enum xt_status gather_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *index = l->in[0], *grad = l->in[1], *y = l->out[0];
    int64_t dim = l->attrs[0].i;
    struct positions p;
    void *sums;
    size_t bytes;
    XT_TRY(load_positions(ctx, l, index, "index", y->ndim ? y->shape[dim] : 1, dim, &p));
    enum xt_status status = open_sums(ctx, y, &sums, &bytes);
    if (status == XT_OK) {
        if (p.n > 0) status = gather_back(ctx, &p, index, y, dim, sums, xt_data(grad), grad->dtype);
        status = close_sums(ctx, y, sums, bytes, status);
    }
    drop_positions(ctx, &p);
    return status;
}

const struct xt_kernel xt_cuda_index_kernels[] = {
    {"index_select", XT_ANY, XT_CONTIGUOUS, index_select},
    {"gather", XT_ANY, XT_CONTIGUOUS, gather},
    {"index_copy_", XT_ANY, XT_CONTIGUOUS, index_copy},
    {"embedding", XT_ANY, XT_INNER, embedding},
    {"index_select_grad", XT_INTS, XT_CONTIGUOUS, index_select_grad},
    {"gather_grad", XT_INTS, XT_CONTIGUOUS, gather_grad},
    {"embedding_acc", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, embedding_acc},
    {},
};
