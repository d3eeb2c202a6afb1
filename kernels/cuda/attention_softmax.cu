/*
 * attention_softmax.cu: the masked softmax of composed attention.
 *
 *     y = e^(x - max x) / sum e^(x - max x) over the keys that a query sees, 0 elsewhere
 *
 * Traffic: scores read three times where keys are seen, two of them from the caches; the answer
 * written once.
 */
#include <math.h>

#include "attention.h"

#define THREADS 256

/* ---- kernels --------------------------------------------------------------------------------- */

/* A block a row of (B, H, Sq, Sk) scores. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    softmax(const __grid_constant__ struct xt_attention p, const T *x, int64_t x_batch,
            int64_t x_head, int64_t x_row, T *y) {
    using R = xt_real<T>;
    int64_t i = blockIdx.x, row = i % p.sq, h = i / p.sq % p.heads, b = i / p.sq / p.heads;
    int64_t limit = xt_visible(p, xt_keys_of(p, b), row);
    R m = -(R)INFINITY, sum = 0;
    x += b * x_batch + h * x_head + row * x_row;
    y += i * p.sk;
    for (int64_t c = threadIdx.x; c < limit; c += THREADS) {
        R s = xt_to<R>(x[c]);
        if (s > m && !xt_hidden(p, b, h, row, c)) m = s;
    }
    m = xt_block_max<THREADS>(m);
    bool none = m == -(R)INFINITY;
    for (int64_t c = threadIdx.x; c < limit && !none; c += THREADS)
        if (!xt_hidden(p, b, h, row, c)) sum += exp(xt_to<R>(x[c]) - m);
    sum = xt_block_sum<THREADS>(sum);
    for (int64_t c = threadIdx.x; c < p.sk; c += THREADS) {
        bool seen = c < limit && !none && !xt_hidden(p, b, h, row, c);
        y[c] = xt_to<T>(seen && sum > 0 ? exp(xt_to<R>(x[c]) - m) / sum : R(0));
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

/* In: scores (B, H, Sq, Sk), mask, lengths, documents; attribute: causal. */
static enum xt_status attention_softmax(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    struct xt_attention p = {};
    p.batch = x->shape[0];
    p.heads = x->shape[1];
    p.sq = x->shape[2];
    p.sk = x->shape[3];
    p.causal = l->attrs[0].i != 0;
    xt_attention_set_mask(&p, l->in[1]);
    p.lengths = xt_ints_of(l->in[2]);
    p.documents = xt_ints_of(l->in[3]);
    int64_t rows = p.batch * p.heads * p.sq;
    if (!rows || !p.sk) return XT_OK;
    XT_CUDA_FLOATS(x->dtype, {
        softmax<T><<<(unsigned)rows, THREADS, 0, xt_cuda_stream(ctx)>>>(
            p, (const T *)xt_data(x), x->stride[0], x->stride[1], x->stride[2], (T *)xt_data(y));
    })
    return xt_cuda_launched(ctx);
}

/* ---- the table ------------------------------------------------------------------------------- */

const struct xt_kernel xt_cuda_attention_softmax_kernels[] = {
    {"attention_softmax", XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64), XT_INNER,
     attention_softmax},
    {},
};
