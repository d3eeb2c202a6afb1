/*
 * gemm.h: c (+)= a @ b for a batch of matrices, wherever their elements lie.
 *
 * Each element of c is one sum over k, ascending, in blocks of GEMM_DEPTH: a block is summed from
 * zero by fused multiply-adds (where the instruction set has them) and the blocks are added in
 * order. That alone decides the bits: layouts, tiles, batches and threads never show.
 */
#ifndef XT_CPU_GEMM_H
#define XT_CPU_GEMM_H

#include "cpu.h"

#define GEMM_DEPTH 256

/* One operand: element (i, j) of batch item q is data[item(q) + i * row + j * col]. */
struct gemm_side {
    const void *data;
    int64_t row, col;           /* strides in elements */
    int64_t batch[XT_MAX_DIMS]; /* strides of the batch dimensions; 0 where broadcast */
};

struct gemm {
    enum xt_dtype dtype;      /* of a and b: f32, bf16 or f64 */
    enum xt_dtype c_dtype;    /* dtype, or f32 with bf16 operands */
    bool add;                 /* c += a @ b; c is then f32 or f64 */
    const void *bias;         /* n numbers added to every row before it is rounded, or NULL */
    enum xt_dtype bias_dtype; /* dtype, or f32 with bf16 operands */
    int64_t bias_step;        /* its stride in elements */
    int64_t m, n, k;          /* a is m x k, b is k x n, c is m x n */
    struct gemm_side a, b;
    void *c;                    /* items one after another, each m x n, contiguous */
    int n_batch;                /* batch dimensions; 0 for one matrix */
    int64_t batch[XT_MAX_DIMS]; /* their sizes */
};

enum xt_status XT_CPU(gemm)(struct xt_ctx *ctx, const struct gemm *g);

#endif
