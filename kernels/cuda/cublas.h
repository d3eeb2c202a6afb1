/* cublas.h: one product of two matrices, as cuBLASLt takes it. */
#ifndef XT_CUBLAS_H
#define XT_CUBLAS_H

#include "cuda.h"

struct xt_cublas_product {
    struct xt_choice_key key; /* zeroed, then filled */
    const void *a, *b;
    void *c;
    const void *bias;   /* key.n elements of c's type, or NULL */
    double alpha, beta; /* c = alpha * a @ b + beta * c */
};

/* Nothing of it may be empty. */
extern "C" enum xt_status xt_cublas_multiply(struct xt_ctx *ctx, const struct xt_cublas_product *x);
/* A backend's product_library. */
extern "C" enum xt_status xt_cublas_describe(struct xt_ctx *ctx, char *device, size_t bytes,
                                             int64_t *version);

#endif
