/*
 * linalg.c: matmul, linear and matmul_acc: from tensors to one struct gemm.
 *
 * How a product reads two tensors stands in ../product.h, for every backend.
 */
#include <string.h>

#include "gemm.h"

static void factors(const struct xt_tensor *a, const struct xt_tensor *b, struct gemm *g) {
    struct xt_product p;
    xt_product_of(a, b, &p);
    g->dtype = a->dtype;
    g->m = p.m, g->n = p.n, g->k = p.k;
    g->a = p.a, g->b = p.b;
    g->n_batch = p.n_batch;
    memcpy(g->batch, p.batch, sizeof g->batch);
}

static enum xt_status matmul(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct gemm g = {.c_dtype = l->out[0]->dtype, .c = xt_data(l->out[0])};
    factors(l->in[0], l->in[1], &g);
    return XT_CPU(gemm)(ctx, &g);
}

static enum xt_status linear(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *bias = l->in[2];
    struct xt_tensor turned;
    struct gemm g = {.c_dtype = l->out[0]->dtype, .c = xt_data(l->out[0])};
    xt_product_turn(l->in[1], &turned);
    factors(l->in[0], &turned, &g);
    if (bias) {
        g.bias = xt_data(bias);
        g.bias_dtype = bias->dtype;
        g.bias_step = bias->stride[0];
    }
    return XT_CPU(gemm)(ctx, &g);
}

static enum xt_status matmul_acc(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct gemm g = {.c_dtype = l->in[0]->dtype, .c = xt_data(l->in[0]), .add = l->attrs[0].i != 0};
    if (!xt_is_contiguous(l->in[0])) return xt_fail(ctx, XT_ARGUMENT, "target must be contiguous");
    factors(l->in[1], l->in[2], &g);
    return XT_CPU(gemm)(ctx, &g);
}

#define FACTORS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

const struct xt_kernel XT_CPU(linalg_kernels)[] = {
    {"matmul", FACTORS, XT_STRIDED, matmul},
    {"linear", FACTORS, XT_STRIDED, linear},
    {"matmul_acc", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_STRIDED, matmul_acc},
    {0},
};
