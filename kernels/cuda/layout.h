/*
 * layout.h: how elements lie: from their number to their place, and several of them at a time.
 *
 * Which thread takes which elements follows from shape and dtype alone, never from the alignment
 * of a pointer: a view and a copy of it give the same bits.
 */
#ifndef XT_CUDA_LAYOUT_H
#define XT_CUDA_LAYOUT_H

#include "cuda.h"

/* ---- places ---------------------------------------------------------------------------------- */

/* Division by a number that is known before the launch, for dividends below 2^31 (after Granlund
   and Montgomery 1994): n / by = (n * factor / 2^32 + n) / 2^shift. */
struct xt_divisor {
    uint32_t factor;
    int shift;
};

/* 1 <= by <= 2^31 */
static inline struct xt_divisor xt_divisor_of(int64_t by) {
    struct xt_divisor d = {0, 0};
    while (((int64_t)1 << d.shift) < by) d.shift++;
    d.factor = (uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << d.shift) - (uint64_t)by)) /
                              (uint64_t)by +
                          1);
    return d;
}

__host__ __device__ inline uint32_t xt_divide(uint32_t n, struct xt_divisor d) {
    return ((uint32_t)(((uint64_t)n * d.factor) >> 32) + n) >> d.shift;
}

/* Elements numbered in row-major order over `shape`, and the strides of N arrays that hold them. */
template <int N> struct xt_places {
    int ndim;                   /* 1 or more */
    bool small;                 /* fewer than 2^31 elements: the divisors serve */
    int64_t shape[XT_MAX_DIMS]; /* none is 0 */
    struct xt_divisor divisor[XT_MAX_DIMS];
    int64_t stride[N][XT_MAX_DIMS]; /* in elements, any */
};

/* Once ndim, shape and stride are set. No dimensions become one of size 1. */
template <int N> static inline void xt_places_ready(struct xt_places<N> *p) {
    int64_t numel = 1;
    if (p->ndim == 0) {
        p->ndim = 1;
        p->shape[0] = 1;
        for (int k = 0; k < N; k++) p->stride[k][0] = 0;
    }
    for (int d = 0; d < p->ndim; d++) numel *= p->shape[d];
    p->small = numel <= INT32_MAX;
    for (int d = 0; d < p->ndim; d++)
        if (p->small) p->divisor[d] = xt_divisor_of(p->shape[d]);
}

/* Where element e lies in each of the arrays. */
template <int N>
__host__ __device__ inline void xt_place_of(const struct xt_places<N> &p, int64_t e,
                                            int64_t (&at)[N]) {
    for (int k = 0; k < N; k++) at[k] = 0;
    if (p.small) {
        uint32_t rest = (uint32_t)e;
        for (int d = p.ndim - 1; d > 0; d--) {
            uint32_t next = xt_divide(rest, p.divisor[d]);
            int64_t i = rest - next * (uint32_t)p.shape[d];
            for (int k = 0; k < N; k++) at[k] += i * p.stride[k][d];
            rest = next;
        }
        e = rest;
    } else {
        for (int d = p.ndim - 1; d > 0; d--) {
            int64_t next = e / p.shape[d], i = e - next * p.shape[d];
            for (int k = 0; k < N; k++) at[k] += i * p.stride[k][d];
            e = next;
        }
    }
    for (int k = 0; k < N; k++) at[k] += e * p.stride[k][0];
}

/* A shape as (outer, size, inner) about one dimension. */
static inline void xt_around(const struct xt_tensor *t, int64_t dim, int64_t *outer,
                             int64_t *inner) {
    *outer = *inner = 1;
    for (int d = 0; d < t->ndim; d++)
        if (d != dim) *(d < dim ? outer : inner) *= t->shape[d];
}

/* Copies shape's elements of `bytes` (1, 2, 4 or 8) each; strides in elements, any. The two places
   do not overlap. In shape.cu. */
enum xt_status xt_cuda_copy_strided(struct xt_ctx *ctx, size_t bytes, int ndim,
                                    const int64_t *shape, void *to, const int64_t *to_stride,
                                    const void *from, const int64_t *from_stride);

/* ---- lanes: 16 bytes of elements ------------------------------------------------------------- */

/* The elements of the 16 bytes at p: of them `count`, the rest are `fill`. `whole`: p is aligned to
   16 bytes. */
template <class T>
__device__ inline struct xt_vector<T, xt_lanes<T>> xt_load_lanes(const T *p, int64_t count, T fill,
                                                                 bool whole) {
    constexpr int V = xt_lanes<T>;
    if (whole && count >= V) return *(const struct xt_vector<T, V> *)p;
    struct xt_vector<T, V> v;
#pragma unroll
    for (int i = 0; i < V; i++) v.at[i] = i < count ? p[i] : fill;
    return v;
}

/* N of them, `step` elements apart, under way together. */
template <int N, class T>
__device__ inline void xt_load_many(const T *p, int64_t step, int64_t count, T fill, bool whole,
                                    struct xt_vector<T, xt_lanes<T>> (&v)[N]) {
    if (whole && count >= xt_lanes<T>) {
#pragma unroll
        for (int q = 0; q < N; q++)
            v[q] = *(const struct xt_vector<T, xt_lanes<T>> *)(p + q * step);
    } else {
#pragma unroll
        for (int q = 0; q < N; q++) v[q] = xt_load_lanes(p + q * step, count, fill, false);
    }
}

template <class T>
__device__ inline void xt_store_lanes(T *p, int64_t count, struct xt_vector<T, xt_lanes<T>> v,
                                      bool whole) {
    constexpr int V = xt_lanes<T>;
    if (whole && count >= V) {
        *(struct xt_vector<T, V> *)p = v;
        return;
    }
#pragma unroll
    for (int i = 0; i < V; i++)
        if (i < count) p[i] = v.at[i];
}

/* Rows of n elements, one after another from p on, all begin on 16 bytes. */
template <class T> static inline bool xt_rows_aligned(const void *p, int64_t n) {
    return xt_is_aligned16(p) && n % xt_lanes<T> == 0;
}

/* The least power of two that is n or more, at most `most`. */
static inline int xt_power_of_two(int64_t n, int most) {
    int p = 1;
    while (p < n && p < most) p *= 2;
    return p;
}

#endif
