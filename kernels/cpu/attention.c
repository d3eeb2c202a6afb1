/*
 * attention.c: tiled attention and its backward, and the masked softmax of the composed form.
 *
 * A query tile meets the key tiles in order, keeping the row maximum m, the row sum l and the
 * output row (Milakov and Gimelshein 2018, Dao 2022):
 *
 *     s = scale q k^T;  m' = max(m, max s);
 *     l' = l e^(m-m') + sum e^(s-m');  o' = o e^(m-m') + e^(s-m') v
 *
 * and at the end out = o / l, lse = m + log l. Backward computes p = e^(s - lse) again:
 *
 *     dv = p^T do;  dp = do v^T;  ds = p (dp - rowsum(do o)) scale;  dq = ds k;  dk = ds^T q
 *
 * Work is split by (batch, head, query tile) forward and by (batch, key head) backward, each with
 * one owner and one order, so the bits do not depend on the threads. Arithmetic is f32 (f64 for
 * f64).
 */
#include <math.h>

#include "cpu.h"
#include "math.h"

#define TILE 64    /* rows of queries and of keys at a time */
#define MAX_D 256  /* widest head */
#define MAX_PAD 16 /* head widths are padded to a multiple of this */

enum { Q, K, V, MASK, LENGTHS, DOCUMENTS, SEED, GRAD, OUT, LSE };
enum { CAUSAL, SCALE, DROPOUT, SEED_ATTR };

/* What a tile needs to know of the call. Strides in elements. */
struct problem {
    int64_t batch, heads, kv_heads, group; /* B, H, Hkv, H / Hkv */
    int64_t sq, sk;                        /* queries, keys */
    int d, dp;                             /* head width, and padded to MAX_PAD */
    bool causal;
    double scale;
    float p;           /* dropout probability; 0: none */
    double keep_scale; /* 1 / (1 - p), or 0 when p is 1 */
    uint64_t seed;
    const struct xt_tensor *mask, *lengths, *documents; /* or NULL */
    int64_t mask_stride[4];                             /* of (B, H, Sq, Sk); 0 where broadcast */
};

static int64_t read_int(const struct xt_tensor *t, int64_t at) {
    const void *data = xt_data(t);
    switch (t->dtype) {
    case XT_I32: return ((const int32_t *)data)[at];
    case XT_I64: return ((const int64_t *)data)[at];
    default: return ((const uint8_t *)data)[at];
    }
}

static void set_mask(struct problem *p, const struct xt_tensor *mask) {
    p->mask = mask;
    if (!mask) return;
    for (int d = 0; d < mask->ndim; d++)
        p->mask_stride[4 - mask->ndim + d] = mask->shape[d] == 1 ? 0 : mask->stride[d];
}

static struct problem describe(const struct xt_launch *l) {
    const struct xt_tensor *q = l->in[Q], *k = l->in[K];
    struct problem p = {
        .batch = q->shape[0],
        .heads = q->shape[2],
        .kv_heads = k->shape[2],
        .group = k->shape[2] ? q->shape[2] / k->shape[2] : 1,
        .sq = q->shape[1],
        .sk = k->shape[1],
        .d = (int)q->shape[3],
        .dp = (int)((q->shape[3] + MAX_PAD - 1) / MAX_PAD * MAX_PAD),
        .causal = l->attrs[CAUSAL].i != 0,
        .scale = l->attrs[SCALE].f,
        .p = (float)l->attrs[DROPOUT].f,
        .lengths = l->in[LENGTHS],
        .documents = l->in[DOCUMENTS],
    };
    if (p.scale == 0) p.scale = p.d ? 1.0 / sqrt((double)p.d) : 1.0;
    if (p.p > 0) {
        p.seed = xt_launch_seed(l, SEED_ATTR, SEED);
        p.keep_scale = p.p < 1 ? (double)(float)(1.0 / (1.0 - l->attrs[DROPOUT].f)) : 0;
    }
    set_mask(&p, l->in[MASK]);
    return p;
}

/* The number of keys that query row `row` of sequence b may look at, before mask and documents. */
static int64_t visible(const struct problem *p, int64_t b, int64_t row) {
    int64_t n = p->sk;
    if (p->causal && row + p->sk - p->sq + 1 < n) n = row + p->sk - p->sq + 1;
    if (p->lengths) {
        int64_t length = read_int(p->lengths, b * p->lengths->stride[0]);
        if (length < n) n = length;
    }
    return n < 0 ? 0 : n;
}

/* Whether key `key` is hidden from query `row` by the mask or by being in another document. */
static bool hidden(const struct problem *p, int64_t b, int64_t h, int64_t row, int64_t key) {
    if (p->mask) {
        const int64_t *s = p->mask_stride;
        const uint8_t *mask = xt_data(p->mask);
        if (!mask[b * s[0] + h * s[1] + row * s[2] + key * s[3]]) return true;
    }
    if (p->documents) {
        const int64_t *s = p->documents->stride;
        int64_t at = row + p->sk - p->sq;
        if (read_int(p->documents, b * s[0] + at * s[1]) !=
            read_int(p->documents, b * s[0] + key * s[1]))
            return true;
    }
    return false;
}

/* Design, section 5. element = ((b*H + h)*Sq + row)*Sk + key. */
static inline bool keeps(const struct problem *p, uint64_t element) {
    uint64_t x = (p->seed ^ (element * 0x9E3779B97F4A7C15u)) + 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return (float)(x >> 40) * 0x1p-24f >= p->p;
}

#define REAL float
#define NAME(name) name##_f32
#define REAL_EXP(x) xt_exp_f32(x)
#define LANES 8
#include "attention_type.h"
#undef REAL
#undef NAME
#undef REAL_EXP
#undef LANES

#define REAL double
#define NAME(name) name##_f64
#define REAL_EXP(x) exp(x)
#define LANES 4
#include "attention_type.h"
#undef REAL
#undef NAME
#undef REAL_EXP
#undef LANES

static enum xt_status attention_tiled(struct xt_ctx *ctx, const struct xt_launch *l) {
    return l->in[Q]->dtype == XT_F64 ? forward_f64(ctx, l) : forward_f32(ctx, l);
}

static enum xt_status attention_tiled_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    return l->in[Q]->dtype == XT_F64 ? backward_f64(ctx, l) : backward_f32(ctx, l);
}

static enum xt_status attention_softmax(struct xt_ctx *ctx, const struct xt_launch *l) {
    return l->in[0]->dtype == XT_F64 ? softmax_f64(ctx, l) : softmax_f32(ctx, l);
}

#define FLOATS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

extern const struct xt_kernel XT_CPU(attention_kernels)[];
const struct xt_kernel XT_CPU(attention_kernels)[] = {
    {"attention_tiled", FLOATS, XT_INNER, attention_tiled},
    {"attention_tiled_grad", FLOATS, XT_INNER, attention_tiled_grad},
    {"attention_softmax", FLOATS, XT_INNER, attention_softmax},
    {0},
};
