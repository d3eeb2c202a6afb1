/*
 * positions.h: tensors of positions (ids, index) on the device: where they lie, and which of them
 * name something.
 */
#ifndef XT_CUDA_POSITIONS_H
#define XT_CUDA_POSITIONS_H

#include <inttypes.h>
#include <stdio.h>

#include "layout.h"

enum { XT_VOCABULARY = -1 };

struct xt_positions {
    const void *at; /* i32 or i64, contiguous */
    bool wide;      /* i64 */
    int64_t n;
    int64_t size; /* they lie in [0, size) */
    struct xt_cuda_fault fault;
    void *copy;   /* scratch, or NULL when `at` is the tensor's */
    size_t bytes; /* of copy */
};

/* dim is the dimension of x that is picked from, or XT_VOCABULARY. */
static inline enum xt_status xt_positions_load(struct xt_ctx *ctx, const struct xt_launch *l,
                                               const struct xt_tensor *t, const char *name,
                                               int64_t size, int64_t dim,
                                               struct xt_positions *out) {
    struct xt_positions p = {};
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
    if (dim == XT_VOCABULARY)
        snprintf(wanted, sizeof wanted, "the vocabulary has %" PRId64, size);
    else
        snprintf(wanted, sizeof wanted, "dim %" PRId64 " of x has size %" PRId64, dim + 1, size);
    p.fault = xt_cuda_fault(ctx, l->op, name, wanted);
    *out = p;
    return XT_OK;
}

static inline void xt_positions_drop(struct xt_ctx *ctx, const struct xt_positions *p) {
    if (p->copy) xt_scratch_put(ctx, XT_CUDA, p->copy, p->bytes);
}

__device__ inline int64_t xt_position_at(const struct xt_positions &p, int64_t i) {
    return p.wide ? ((const int64_t *)p.at)[i] : (int64_t)((const int32_t *)p.at)[i];
}

__device__ inline bool xt_position_in_range(const struct xt_positions &p, int64_t at) {
    return (uint64_t)at < (uint64_t)p.size;
}

#endif
