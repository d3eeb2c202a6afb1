/*
 * product.h: what a matrix product of two tensors is, for every backend: sizes, strides, batch.
 *
 * Transposed and other views are passed by their strides. Batch dimensions that lie as one are
 * merged, and those that only a has become rows: x (B, S, K) by a weight is one product.
 */
#ifndef XT_PRODUCT_H
#define XT_PRODUCT_H

/* One factor: element (i, j) of a batch item is data[item + i * row + j * col]. */
struct xt_product_side {
    const void *data;
    int64_t row, col;           /* strides in elements */
    int64_t batch[XT_MAX_DIMS]; /* strides of the batch dimensions; 0 where broadcast */
};

struct xt_product {
    int64_t m, n, k; /* a is m x k, b is k x n */
    struct xt_product_side a, b;
    int n_batch;                /* batch dimensions; 0 for one matrix */
    int64_t batch[XT_MAX_DIMS]; /* their sizes */
};

/* The last two dimensions of a factor; a 1-dimensional a is a row, a 1-dimensional b a column. */
static inline void xt_product_side_of(const struct xt_tensor *t, bool column,
                                      struct xt_product_side *s) {
    const int64_t last = t->stride[t->ndim - 1];
    s->data = xt_data(t);
    s->row = 0;
    s->col = last;
    if (t->ndim > 1) {
        s->row = t->stride[t->ndim - 2];
    } else if (column) {
        s->row = last;
        s->col = 1;
    }
}

/* Stride of output batch dimension d, of `batch`, in a factor: 0 where it is broadcast. */
static inline int64_t xt_product_stride(const struct xt_tensor *t, int d, int batch) {
    const int at = d - (batch - (t->ndim - 2));
    return t->ndim <= 2 || at < 0 || t->shape[at] == 1 ? 0 : t->stride[at];
}

/* Adds a batch dimension, outer ones first; one that continues the last one is merged with it. */
static inline void xt_product_add(struct xt_product *p, int64_t size, int64_t a, int64_t b) {
    if (size == 1) return;
    const int last = p->n_batch - 1;
    if (last >= 0 && p->a.batch[last] == a * size && p->b.batch[last] == b * size) {
        p->batch[last] *= size;
        p->a.batch[last] = a;
        p->b.batch[last] = b;
        return;
    }
    p->batch[p->n_batch] = size;
    p->a.batch[p->n_batch] = a;
    p->b.batch[p->n_batch++] = b;
}

/* The innermost batch dimension as more rows, when b is the same in it and a continues in it. */
static inline void xt_product_rows(struct xt_product *p) {
    while (p->n_batch > 0 && p->b.batch[p->n_batch - 1] == 0) {
        const int last = p->n_batch - 1;
        if (p->m == 1)
            p->a.row = p->a.batch[last];
        else if (p->a.batch[last] != p->a.row * p->m)
            return;
        p->m *= p->batch[last];
        p->n_batch--;
    }
}

/* a @ b, whose shapes fit. */
static inline void xt_product_of(const struct xt_tensor *a, const struct xt_tensor *b,
                                 struct xt_product *p) {
    xt_product_side_of(a, false, &p->a);
    xt_product_side_of(b, true, &p->b);
    p->m = a->ndim > 1 ? a->shape[a->ndim - 2] : 1;
    p->n = b->ndim > 1 ? b->shape[b->ndim - 1] : 1;
    p->k = a->shape[a->ndim - 1];
    p->n_batch = 0;
    const int batch = (a->ndim > b->ndim ? a->ndim : b->ndim) - 2;
    for (int d = 0; d < batch; d++) {
        const int in_a = d - (batch - (a->ndim - 2)), in_b = d - (batch - (b->ndim - 2));
        const int64_t x = a->ndim > 2 && in_a >= 0 ? a->shape[in_a] : 1;
        const int64_t y = b->ndim > 2 && in_b >= 0 ? b->shape[in_b] : 1;
        xt_product_add(p, x == 1 ? y : x, xt_product_stride(a, d, batch),
                       xt_product_stride(b, d, batch));
    }
    xt_product_rows(p);
}

/* A matrix as its transpose: a view, for `linear`. */
static inline void xt_product_turn(const struct xt_tensor *t, struct xt_tensor *turned) {
    *turned = *t;
    turned->shape[0] = t->shape[1];
    turned->shape[1] = t->shape[0];
    turned->stride[0] = t->stride[1];
    turned->stride[1] = t->stride[0];
}

#endif
