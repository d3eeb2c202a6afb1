/*
 * rows.h: a tensor as rows along its last dimension, whose elements lie side by side (XT_INNER).
 * Outer dimensions that lie evenly are merged, so that finding a row rarely takes a division.
 */
#ifndef XT_CPU_ROWS_H
#define XT_CPU_ROWS_H

#include "cpu.h"

struct rows {
    const char *data;
    enum xt_dtype dtype;
    int ndim;                    /* outer dimensions after merging, 1 or more */
    int64_t count;               /* rows */
    int64_t d;                   /* elements of a row */
    int64_t shape[XT_MAX_DIMS];  /* of the outer dimensions */
    int64_t stride[XT_MAX_DIMS]; /* in bytes */
};

/* The rows of t over its first `outer` dimensions; what is left is one row. */
static inline void rows_over(const struct xt_tensor *t, int outer, struct rows *r) {
    int64_t bytes = (int64_t)xt_dtype_bytes(t->dtype);
    r->data = t->storage->data ? (const char *)xt_data(t) : NULL;
    r->dtype = t->dtype;
    r->ndim = 0;
    r->count = r->d = 1;
    for (int k = outer; k < t->ndim; k++) r->d *= t->shape[k];
    for (int k = 0; k < outer; k++) {
        int64_t n = t->shape[k], stride = t->stride[k] * bytes;
        r->count *= n;
        if (n == 1) continue;
        int last = r->ndim - 1;
        if (last >= 0 && r->stride[last] == stride * n) {
            r->shape[last] *= n;
            r->stride[last] = stride;
        } else {
            r->shape[r->ndim] = n;
            r->stride[r->ndim++] = stride;
        }
    }
    if (r->ndim == 0) {
        r->shape[0] = 1;
        r->stride[0] = 0;
        r->ndim = 1;
    }
}

static inline void rows_of(const struct xt_tensor *t, struct rows *r) {
    rows_over(t, t->ndim > 0 ? t->ndim - 1 : 0, r);
}

static inline const void *row_at(const struct rows *r, int64_t i) {
    int64_t at = 0;
    for (int k = r->ndim - 1; k > 0; k--) {
        at += i % r->shape[k] * r->stride[k];
        i /= r->shape[k];
    }
    return r->data + at + i * r->stride[0];
}

#endif
