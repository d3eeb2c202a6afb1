/*
 * scatter.h: adding rows to the rows that keys name, on the device, and where a gradient's own such
 * sums are made.
 */
#ifndef XT_CUDA_SCATTER_H
#define XT_CUDA_SCATTER_H

#include "sort.h"

/* target[o, key of place] += grad[o, place] for all o and places. */
struct xt_scatter {
    void *target;        /* (outer, size, row), f32, or f64 where grad is */
    const void *grad;    /* (outer, n, row) */
    enum xt_dtype dtype; /* of grad */
    int64_t outer, n;    /* places are 0 .. n - 1 */
    int64_t size, row;   /* keys are below size, or size for what names nothing */
};

/* Adds places begin .. begin + count - 1, whose keys stand in s. */
enum xt_status xt_scatter_slab(struct xt_ctx *ctx, const struct xt_scatter *a, struct xt_sorter *s,
                               int64_t begin, int count);

/* Adds all places; write_keys(to, begin, count) launches what writes the keys of some of them. */
template <class F>
static inline enum xt_status xt_scatter_add(struct xt_ctx *ctx, const struct xt_scatter &a,
                                            F write_keys) {
    struct xt_sorter s;
    enum xt_status status = XT_OK;
    if (a.n == 0) return XT_OK;
    XT_TRY(xt_sorter_open(ctx, a.n, &s));
    for (int64_t begin = 0; begin < a.n && status == XT_OK; begin += s.most) {
        int count = (int)(a.n - begin < s.most ? a.n - begin : s.most);
        write_keys(s.keys, begin, count);
        status = xt_scatter_slab(ctx, &a, &s, begin, count);
    }
    xt_sorter_close(ctx, &s);
    return status;
}

/* ---- the sums of a gradient that is an output ------------------------------------------------ */

enum xt_status xt_sums_zero(struct xt_ctx *ctx, void *data, size_t bytes);
/* Where sums are made: y itself when it is f32 or f64, else f32 scratch of `bytes`, zeroed. */
enum xt_status xt_sums_open(struct xt_ctx *ctx, const struct xt_tensor *y, void **sums,
                            size_t *bytes);
/* Brings them to y, after what made them gave `status`. */
enum xt_status xt_sums_close(struct xt_ctx *ctx, const struct xt_tensor *y, void *sums,
                             size_t bytes, enum xt_status status);

#endif
