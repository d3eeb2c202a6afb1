/*
 * rows.h: tensors as rows along their last dimension on the device, and what a group of threads
 * that shares a row does together.
 */
#ifndef XT_CUDA_ROWS_H
#define XT_CUDA_ROWS_H

#include "cuda.h"

/* Where item i of some dimensions, counted in row-major order, lies, in elements. Dimensions that
   lie evenly are merged, so that finding an item rarely takes a division. */
struct xt_places {
    int64_t count; /* items */
    int ndim;      /* dimensions after merging, 1 or more */
    int64_t shape[XT_MAX_DIMS];
    int64_t stride[XT_MAX_DIMS]; /* in elements */
};

/* The places of t's first n dimensions. */
static inline struct xt_places xt_places_of(const struct xt_tensor *t, int n) {
    struct xt_places p = {};
    p.count = 1;
    for (int k = 0; k < n; k++) {
        p.count *= t->shape[k];
        if (t->shape[k] == 1) continue;
        int last = p.ndim - 1;
        if (last >= 0 && p.stride[last] == t->stride[k] * t->shape[k]) {
            p.shape[last] *= t->shape[k];
            p.stride[last] = t->stride[k];
        } else {
            p.shape[p.ndim] = t->shape[k];
            p.stride[p.ndim++] = t->stride[k];
        }
    }
    if (p.ndim == 0) {
        p.shape[0] = 1;
        p.ndim = 1;
    }
    return p;
}

__device__ inline int64_t xt_place(const struct xt_places &p, int64_t i) {
    int64_t at = 0;
    for (int k = p.ndim - 1; k > 0; k--) {
        at += i % p.shape[k] * p.stride[k];
        i /= p.shape[k];
    }
    return at + i * p.stride[0];
}

/* The rows of a tensor of XT_INNER. */
struct xt_rows {
    const void *data;
    struct xt_places at;
    int64_t d; /* elements of a row, which lie side by side */
};

static inline struct xt_rows xt_rows_of(const struct xt_tensor *t) {
    struct xt_rows r;
    r.data = t->storage->data ? xt_data(t) : NULL;
    r.at = xt_places_of(t, t->ndim - 1);
    r.d = t->shape[t->ndim - 1];
    return r;
}

/* Whether every row begins at a multiple of 16 bytes and is a number of whole 16 bytes. */
static inline bool xt_rows_aligned(const struct xt_rows *r, size_t bytes) {
    int64_t lanes = (int64_t)(16 / bytes);
    if (!xt_is_aligned16(r->data) || r->d % lanes) return false;
    for (int k = 0; k < r->at.ndim; k++)
        if (r->at.stride[k] % lanes) return false;
    return true;
}

template <class T> __device__ inline const T *xt_row(const struct xt_rows &r, int64_t i) {
    return (const T *)r.data + xt_place(r.at, i);
}

/* ---- a group of LANES threads: a part of a warp, a warp, or a whole block -------------------- */

template <int LANES> __device__ inline int xt_lane() {
    return (int)threadIdx.x % LANES;
}
template <int LANES, class T> __device__ inline T xt_group_sum(T x) {
    if constexpr (LANES > 32) {
        return xt_block_sum<LANES>(x);
    } else {
#pragma unroll
        for (int step = LANES / 2; step; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
        return x;
    }
}
template <int LANES, class T> __device__ inline T xt_group_max(T x) {
    if constexpr (LANES > 32)
        return xt_block_max<LANES>(x);
    else
        return xt_warp_max(x);
}

/* N numbers of type R from N elements of S side by side, in reads of at most 16 bytes; aligned when
   N is more than 1. */
template <int N, class R, class S> __device__ inline void xt_load(const S *from, R *to) {
    constexpr int M = N < xt_lanes<S> ? N : xt_lanes<S>;
#pragma unroll
    for (int i = 0; i < N; i += M) {
        xt_vector<S, M> v = *(const xt_vector<S, M> *)(from + i);
#pragma unroll
        for (int k = 0; k < M; k++) to[i + k] = xt_to<R>(v.at[k]);
    }
}
template <int N, class R, class S> __device__ inline void xt_store(const R *from, S *to) {
    constexpr int M = N < xt_lanes<S> ? N : xt_lanes<S>;
#pragma unroll
    for (int i = 0; i < N; i += M) {
        xt_vector<S, M> v;
#pragma unroll
        for (int k = 0; k < M; k++) v.at[k] = xt_to<S>(from[i + k]);
        *(xt_vector<S, M> *)(to + i) = v;
    }
}

/* ---- weights and biases of norms ------------------------------------------------------------- */

/* One number an element of a row: of x's dtype, or wide, in the type of the arithmetic. */
struct xt_gain {
    const void *data; /* NULL: there is none */
    bool wide;        /* in the type of the arithmetic */
};

static inline struct xt_gain xt_gain_of(const struct xt_tensor *t, enum xt_dtype dtype) {
    struct xt_gain g = {t ? xt_data(t) : NULL, t && t->dtype != dtype};
    return g;
}

/* The gain's elements i to i + N - 1, or `fallback`. */
template <class T, int N>
__device__ inline void xt_load_gain(const struct xt_gain &g, int64_t i, xt_real<T> fallback,
                                    xt_real<T> *to) {
    if (!g.data) {
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = fallback;
    } else if (g.wide) {
        xt_load<N>((const xt_real<T> *)g.data + i, to);
    } else {
        xt_load<N>((const T *)g.data + i, to);
    }
}

#define XT_PARTS_COLUMNS 8 /* that a block of xt_sum_parts adds up */
#define XT_PARTS_LINES 128 /* its threads for each of them */
#define XT_PARTS_AHEAD 8   /* parts that a thread has on their way */

/* The sum over parts of each of `width` numbers: the first d go to dw, what follows to db. Thread y
   of a column adds parts y, y + LINES, ... in order, then the threads' sums are added as a tree. */
template <class R>
static __global__ void __launch_bounds__(XT_PARTS_COLUMNS *XT_PARTS_LINES)
    xt_sum_parts_kernel(const R *parts, int n_parts, int64_t width, int64_t d, R *dw, R *db) {
    constexpr int LINES = XT_PARTS_LINES, AHEAD = XT_PARTS_AHEAD;
    __shared__ R all[LINES][XT_PARTS_COLUMNS];
    const int64_t c = (int64_t)blockIdx.x * XT_PARTS_COLUMNS + threadIdx.x;
    const int line = (int)threadIdx.y;
    R sum = 0;
    for (int first = line; c < width && first < n_parts; first += LINES * AHEAD) {
        R next[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int part = first + k * LINES;
            next[k] = part < n_parts ? parts[part * width + c] : R(0);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) sum += next[k];
    }
    all[line][threadIdx.x] = sum;
    for (int step = LINES / 2; step; step /= 2) {
        __syncthreads();
        if (line < step) all[line][threadIdx.x] += all[line + step][threadIdx.x];
    }
    if (c >= width || line != 0) return;
    if (c < d)
        dw[c] = all[0][threadIdx.x];
    else
        db[c - d] = all[0][threadIdx.x];
}
template <class R>
static enum xt_status xt_sum_parts(struct xt_ctx *ctx, const R *parts, unsigned n_parts,
                                   int64_t width, int64_t d, R *dw, R *db) {
    xt_sum_parts_kernel<<<xt_cuda_blocks(width, XT_PARTS_COLUMNS),
                          dim3(XT_PARTS_COLUMNS, XT_PARTS_LINES), 0, xt_cuda_stream(ctx)>>>(
        parts, (int)n_parts, width, d, dw, db);
    return xt_cuda_launched(ctx);
}

/* No rows, or empty ones: outputs that are left, such as the gradient of a gain, are zero. */
static inline enum xt_status xt_fill_nothing(struct xt_ctx *ctx, const struct xt_launch *l) {
    for (int i = 0; i < l->n_out; i++)
        if (l->out[i] && xt_numel(l->out[i]) > 0)
            XT_CUDA_TRY(
                cudaMemsetAsync(xt_data(l->out[i]), 0, xt_nbytes(l->out[i]), xt_cuda_stream(ctx)));
    return XT_OK;
}

#endif
