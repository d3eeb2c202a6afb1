/*
 * dims.h: dimensions that lie as one are treated as one, for every backend: in strided copies, and
 * in reductions. Included after op.h.
 */
#ifndef XT_DIMS_H
#define XT_DIMS_H

/* A copy between two places, with its dimensions merged: the fewest loops that do it. */
struct xt_copy {
    int ndim;                   /* 1 or more */
    int64_t shape[XT_MAX_DIMS]; /* none is 0 */
    int64_t to[XT_MAX_DIMS];    /* strides, in elements */
    int64_t from[XT_MAX_DIMS];
    size_t bytes; /* of an element: 1, 2, 4, 8 or, on a GPU, 16 */
    char *to_data;
    const char *from_data;
};

/* Sets ndim, shape and strides: sizes of 1 are dropped, neighbours that both sides step through
   evenly are merged. Returns the number of elements. */
static inline int64_t xt_copy_plan(struct xt_copy *c, int ndim, const int64_t *shape,
                                   const int64_t *to, const int64_t *from) {
    int64_t numel = 1;
    int n = 0;
    for (int d = 0; d < ndim; d++) {
        numel *= shape[d];
        if (shape[d] == 1) continue;
        bool joins =
            n > 0 && c->to[n - 1] == to[d] * shape[d] && c->from[n - 1] == from[d] * shape[d];
        int at = joins ? n - 1 : n++;
        c->shape[at] = joins ? c->shape[at] * shape[d] : shape[d];
        c->to[at] = to[d];
        c->from[at] = from[d];
    }
    if (n == 0) {
        c->shape[0] = c->to[0] = c->from[0] = 1;
        n = 1;
    }
    c->ndim = n;
    return numel;
}

/* Dimensions of x, merged while neighbours are both folded or both kept; sizes of 1 dropped. */
static inline int xt_merge_folds(const struct xt_tensor *x, unsigned mask, int64_t *size,
                                 bool *fold) {
    int n = 0;
    for (int d = 0; d < x->ndim; d++) {
        bool folds = mask & 1u << d;
        if (x->shape[d] == 1) continue;
        if (n > 0 && fold[n - 1] == folds) {
            size[n - 1] *= x->shape[d];
            continue;
        }
        size[n] = x->shape[d];
        fold[n++] = folds;
    }
    return n;
}

#endif
