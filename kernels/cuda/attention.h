/*
 * attention.h: what the attention kernels share: the problem of one call, and who sees whom.
 *
 * The definition is kernels/cpu/attention.c. attention.cu is f32 and f64 on the ordinary cores;
 * attention_wgmma.cu and attention_mma.cu, each with its NAME_grad.cu, are bf16 on the tensor
 * cores; attention_softmax.cu is the composed form's.
 */
#ifndef XT_CUDA_ATTENTION_H
#define XT_CUDA_ATTENTION_H

#include "cuda.h"

/* (B, S, heads, D), D side by side; strides in elements. */
struct xt_heads {
    void *data;
    int64_t batch, row, head;
};

/* Integers of any type. Strides in elements. */
struct xt_ints {
    const void *data; /* NULL: left out */
    enum xt_dtype dtype;
    int64_t stride[2];
};

static inline struct xt_ints xt_ints_of(const struct xt_tensor *t) {
    struct xt_ints x = {};
    if (!t) return x;
    x.data = xt_data(t);
    x.dtype = t->dtype;
    for (int d = 0; d < t->ndim; d++) x.stride[d] = t->stride[d];
    return x;
}

/* One call, forward or backward. A kernel's argument. */
struct xt_attention {
    int64_t batch, heads, kv_heads, group; /* B, H, Hkv, H / Hkv */
    int64_t sq, sk;                        /* queries, keys */
    int d;                                 /* head width, at most 256 */
    bool causal;
    bool any_pair_hidden; /* there are a mask, documents or dropout: not limits of a row alone */
    double scale;
    float p;           /* dropout probability; 0: none */
    double keep_scale; /* 1 / (1 - p), or 0 when p is 1 */
    struct xt_cuda_seed seed;
    const uint8_t *mask;               /* or NULL */
    int64_t mask_stride[4];            /* of (B, H, Sq, Sk); 0 where broadcast */
    struct xt_ints lengths, documents; /* (B), (B, Sk) */
    struct xt_heads q, k, v, out;
    struct xt_heads g, dq, dk, dv; /* backward: the gradient of out, and the answers */
    void *lse;                     /* (B, H, Sq) f32 or f64; NULL: not wanted */
    int64_t lse_batch, lse_head;   /* its strides; 1 along Sq */
    void *delta;                   /* backward: (B, H, Sq), rowsum(g * out) */
};

static inline void xt_attention_set_mask(struct xt_attention *p, const struct xt_tensor *mask) {
    if (!mask) return;
    p->mask = (const uint8_t *)xt_data(mask);
    for (int d = 0; d < mask->ndim; d++)
        p->mask_stride[4 - mask->ndim + d] = mask->shape[d] == 1 ? 0 : mask->stride[d];
}

__device__ inline int64_t xt_int_at(const struct xt_ints &t, int64_t at) {
    switch (t.dtype) {
    case XT_I32: return ((const int32_t *)t.data)[at];
    case XT_I64: return ((const int64_t *)t.data)[at];
    default: return ((const uint8_t *)t.data)[at];
    }
}

/* Keys of sequence b that are not padding. */
__device__ inline int64_t xt_keys_of(const struct xt_attention &p, int64_t b) {
    if (!p.lengths.data) return p.sk;
    int64_t n = xt_int_at(p.lengths, b * p.lengths.stride[0]);
    return n < 0 ? 0 : n < p.sk ? n : p.sk;
}

/* How many of the `keys` of a sequence query `row` may look at, before mask and documents. */
__device__ inline int64_t xt_visible(const struct xt_attention &p, int64_t keys, int64_t row) {
    if (!p.causal) return keys;
    int64_t n = row + p.sk - p.sq + 1;
    return n < 0 ? 0 : n < keys ? n : keys;
}

/* Whether the mask hides a key from a query, or their being in two documents does. */
__device__ inline bool xt_hidden(const struct xt_attention &p, int64_t b, int64_t h, int64_t row,
                                 int64_t key) {
    if (p.mask) {
        const int64_t *s = p.mask_stride;
        if (!p.mask[b * s[0] + h * s[1] + row * s[2] + key * s[3]]) return true;
    }
    if (p.documents.data) {
        const int64_t *s = p.documents.stride;
        int64_t at = row + p.sk - p.sq;
        return xt_int_at(p.documents, b * s[0] + at * s[1]) !=
               xt_int_at(p.documents, b * s[0] + key * s[1]);
    }
    return false;
}

/* Whether dropout keeps a pair: by its element of (B, H, Sq, Sk). */
__device__ inline bool xt_keeps(const struct xt_attention &p, uint64_t seed, int64_t b, int64_t h,
                                int64_t row, int64_t key) {
    uint64_t element = (uint64_t)(((b * p.heads + h) * p.sq + row) * p.sk + key);
    return xt_uniform_at(seed, element) >= p.p;
}

/* Launches a kernel that takes `bytes` of shared memory, more than a kernel has unless it asks. An
   empty grid is no error. */
template <class... Params, class... Args>
static inline enum xt_status xt_attention_launch(struct xt_ctx *ctx, void (*kernel)(Params...),
                                                 dim3 blocks, int threads, size_t bytes,
                                                 const Args &...args) {
    if (blocks.x == 0) return XT_OK;
    XT_CUDA_TRY(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<blocks, (unsigned)threads, bytes, xt_cuda_stream(ctx)>>>(args...);
    return xt_cuda_launched(ctx);
}

/* bf16 on the tensor cores; wgmma where xt_has_wgmma. */
enum xt_status xt_attention_wgmma(struct xt_ctx *ctx, const struct xt_attention &p);
enum xt_status xt_attention_wgmma_grad(struct xt_ctx *ctx, const struct xt_attention &p);
enum xt_status xt_attention_mma(struct xt_ctx *ctx, const struct xt_attention &p);
enum xt_status xt_attention_mma_grad(struct xt_ctx *ctx, const struct xt_attention &p);

#endif
