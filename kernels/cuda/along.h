/* along.h: a tensor as rows along one dimension, on the device. */
#ifndef XT_CUDA_ALONG_H
#define XT_CUDA_ALONG_H

#include "layout.h"

/* x as (outer, n, inner) about dimension dim; a scalar is one row of one element. */
struct xt_along {
    int64_t count; /* rows: outer * inner */
    int64_t n;     /* elements of a row */
    int64_t inner; /* from one to the next */
    bool whole;    /* inner is 1 and rows begin on 16 bytes, in all tensors */
};

static inline struct xt_along xt_along_of(const struct xt_tensor *x, int64_t dim) {
    struct xt_along r = {1, 1, 1, false};
    int64_t outer;
    if (x->ndim) r.n = x->shape[dim];
    xt_around(x, dim, &outer, &r.inner);
    r.count = outer * r.inner;
    return r;
}

/* Where row `row` begins in a tensor whose rows have n elements. */
__device__ inline int64_t xt_along_start(const struct xt_along &r, int64_t row, int64_t n) {
    if (r.inner == 1) return row * n;
    int64_t o = row / r.inner;
    return o * n * r.inner + (row - o * r.inner);
}

#endif
