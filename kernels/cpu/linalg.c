/*
 * linalg.c: matmul, linear and matmul_acc: from tensors to one struct gemm.
 *
 * Transposed and other views are passed by their strides. Batch dimensions that lie as one are
 * merged, and those that only a has become rows: x (B, S, K) by a weight is one product.
 */
#include "gemm.h"

/* The last two dimensions of a factor; a 1-dimensional a is a row, a 1-dimensional b a column. */
static struct gemm_side side(const struct xt_tensor *t, bool column) {
    const int64_t last = t->stride[t->ndim - 1];
    struct gemm_side s = {.data = xt_data(t), .col = last};
    if (t->ndim > 1)
        s.row = t->stride[t->ndim - 2];
    else if (column)
        s.row = last, s.col = 1;
    return s;
}

/* Stride of output batch dimension d, of `batch`, in a factor: 0 where it is broadcast. */
static int64_t batch_stride(const struct xt_tensor *t, int d, int batch) {
    const int at = d - (batch - (t->ndim - 2));
    return t->ndim <= 2 || at < 0 || t->shape[at] == 1 ? 0 : t->stride[at];
}

/* Adds a batch dimension, outer ones first; one that continues the last one is merged with it. */
static void add_batch(struct gemm *g, int64_t size, int64_t a, int64_t b) {
    if (size == 1) return;
    const int last = g->n_batch - 1;
    if (last >= 0 && g->a.batch[last] == a * size && g->b.batch[last] == b * size) {
        g->batch[last] *= size;
        g->a.batch[last] = a;
        g->b.batch[last] = b;
        return;
    }
    g->batch[g->n_batch] = size;
    g->a.batch[g->n_batch] = a;
    g->b.batch[g->n_batch++] = b;
}

/* The innermost batch dimension as more rows, when b is the same in it and a continues in it. */
static void batch_to_rows(struct gemm *g) {
    while (g->n_batch > 0 && g->b.batch[g->n_batch - 1] == 0) {
        const int last = g->n_batch - 1;
        if (g->m == 1)
            g->a.row = g->a.batch[last];
        else if (g->a.batch[last] != g->a.row * g->m)
            return;
        g->m *= g->batch[last];
        g->n_batch--;
    }
}

static void factors(const struct xt_tensor *a, const struct xt_tensor *b, struct gemm *g) {
    g->dtype = a->dtype;
    g->a = side(a, false);
    g->b = side(b, true);
    g->m = a->ndim > 1 ? a->shape[a->ndim - 2] : 1;
    g->n = b->ndim > 1 ? b->shape[b->ndim - 1] : 1;
    g->k = a->shape[a->ndim - 1];
    const int batch = (a->ndim > b->ndim ? a->ndim : b->ndim) - 2;
    for (int d = 0; d < batch; d++) {
        const int in_a = d - (batch - (a->ndim - 2)), in_b = d - (batch - (b->ndim - 2));
        const int64_t x = a->ndim > 2 && in_a >= 0 ? a->shape[in_a] : 1;
        const int64_t y = b->ndim > 2 && in_b >= 0 ? b->shape[in_b] : 1;
        add_batch(g, x == 1 ? y : x, batch_stride(a, d, batch), batch_stride(b, d, batch));
    }
    batch_to_rows(g);
}

static enum xt_status matmul(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct gemm g = {.c_dtype = l->out[0]->dtype, .c = xt_data(l->out[0])};
    factors(l->in[0], l->in[1], &g);
    return XT_CPU(gemm)(ctx, &g);
}

static enum xt_status linear(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *bias = l->in[2];
    struct xt_tensor turned = *l->in[1];
    struct gemm g = {.c_dtype = l->out[0]->dtype, .c = xt_data(l->out[0])};
    turned.shape[0] = l->in[1]->shape[1];
    turned.shape[1] = l->in[1]->shape[0];
    turned.stride[0] = l->in[1]->stride[1];
    turned.stride[1] = l->in[1]->stride[0];
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
