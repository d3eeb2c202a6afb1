/*
 * gemm.h: c (+)= a @ b for a batch of matrices, wherever their elements lie.
 *
 * Each element of c is one sum over k, ascending, in blocks of GEMM_DEPTH: a block is summed from
 * zero by fused multiply-adds (where the instruction set has them) and the blocks are added in
 * order. That alone decides the bits: layouts, tiles, batches and threads never show. (Long sums of
 * few elements, and bf16 where oneDNN serves, are cut otherwise, but by the shape alone.)
 */
#ifndef XT_CPU_GEMM_H
#define XT_CPU_GEMM_H

#include "cpu.h"

#include "../product.h"

#define GEMM_DEPTH 256

struct gemm {
    enum xt_dtype dtype;      /* of a and b: f32, bf16 or f64 */
    enum xt_dtype c_dtype;    /* dtype, or f32 with bf16 operands */
    bool add;                 /* c += a @ b; c is then f32 or f64 */
    const void *bias;         /* n numbers added to every row before it is rounded, or NULL */
    enum xt_dtype bias_dtype; /* dtype, or f32 with bf16 operands */
    int64_t bias_step;        /* its stride in elements */
    int64_t m, n, k;          /* a is m x k, b is k x n, c is m x n */
    struct xt_product_side a, b;
    void *c;                    /* items one after another, each m x n, contiguous */
    int n_batch;                /* batch dimensions; 0 for one matrix */
    int64_t batch[XT_MAX_DIMS]; /* their sizes */
};

/* Offset of a batch item of an operand, in elements. */
static inline int64_t gemm_item(const struct gemm *g, const int64_t *stride, int64_t item) {
    int64_t at = 0;
    for (int d = g->n_batch - 1; d >= 0; d--) {
        at += item % g->batch[d] * stride[d];
        item /= g->batch[d];
    }
    return at;
}

enum xt_status XT_CPU(gemm)(struct xt_ctx *ctx, const struct gemm *g);
/* The same by oneDNN where it serves (onednn.c), which gemm asks first: *served says whether. */
enum xt_status XT_CPU(gemm_onednn)(struct xt_ctx *ctx, const struct gemm *g, bool *served);

#endif
