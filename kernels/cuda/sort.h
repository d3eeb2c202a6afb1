/* sort.h: numbers in the order of their keys, equal keys staying in order, on the device. */
#ifndef XT_CUDA_SORT_H
#define XT_CUDA_SORT_H

#include "cuda.h"

/* What sorting takes. Lists longer than `most` are sorted part by part. */
struct xt_sorter {
    uint64_t *keys;          /* of each place */
    uint32_t *order, *spare; /* places, sorted by key when done; what the next pass writes */
    uint32_t *counts;        /* of digits */
    int64_t most;            /* places there is room for */
    void *data;              /* all of the above */
    size_t bytes;            /* of data */
};

/* Room for n places, or for as many as are sorted at a time. */
enum xt_status xt_sorter_open(struct xt_ctx *ctx, int64_t n, struct xt_sorter *s);
void xt_sorter_close(struct xt_ctx *ctx, const struct xt_sorter *s);
/* Fills `order` from n keys, none above `largest`; 1 <= n <= most. */
enum xt_status xt_sorter_run(struct xt_ctx *ctx, struct xt_sorter *s, int64_t n, uint64_t largest);

#endif
