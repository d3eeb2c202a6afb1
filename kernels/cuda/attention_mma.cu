/*
 * attention_mma.cu: the forward of tiled attention in bf16 on the tensor cores.
 *
 *     s = q k^T;  m' = max(m, max s);
 *     l' = l e^(m-m') + sum e^(s-m');  o' = o e^(m-m') + e^(s-m') v;  out = o / l, lse = m + log l
 *
 * (Dao 2023, FlashAttention-2; Shah and others 2024, FlashAttention-3.) A warpgroup owns 64 queries
 * of a head and keeps their s and o in registers; a block's warpgroups share the key tiles, which
 * arrive while the ones before are used. The s of the next tile and the p v of this one are under
 * way together. Products of bf16 are summed in f32; p is rounded to bf16 for p v alone.
 *
 * Traffic: q and out once, k and v once a block of queries, from L2 where the heads under way fit.
 */
#include <math.h>

#include "attention_mma.h"

/* Registers of a warpgroup's running softmax: of rows l / 4 and l / 4 + 8 of lane l. */
struct running {
    float m[2]; /* largest s so far */
    float l[2]; /* sum of e^(s - m) over this thread's columns */
};

/* s becomes e^(s - m) in the tile at key0; shrink is what the sums so far are to be multiplied by.
   `limit` is the number of keys that each row sees. */
template <int J, bool PAIRS>
__device__ static void softmax_tile(const struct xt_attention &p, uint64_t seed, int64_t b,
                                    int64_t h, int64_t row, int64_t key0, const int64_t (&limit)[2],
                                    bool whole, float log2_scale, float (&s)[J][4],
                                    struct running &r, float (&shrink)[2]) {
    struct xt_pair_bits bits;
    int column = (int)threadIdx.x % 4 * 2;
    if (PAIRS) {
        bits = xt_pairs<J, false>(p, seed, b, h, row, key0);
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (p.scale < 0) s[j][e] = -s[j][e]; /* the largest of scale s, by |scale| */
                if (!(bits.seen[e / 2] >> (2 * j + e % 2) & 1)) s[j][e] = -INFINITY;
            }
    }
    if (!whole) {
        int n[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int64_t left = limit[half] - key0 - column;
            n[half] = left < 0 ? 0 : left < 8 * J ? (int)left : 8 * J;
        }
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (8 * j + e % 2 >= n[e / 2]) s[j][e] = -INFINITY;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float m = r.m[half], sum = 0;
#pragma unroll
        for (int j = 0; j < J; j++) m = fmaxf(m, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
        float base = m == -INFINITY ? 0.0f : m * log2_scale;
        shrink[half] = xt_exp2(r.m[half] * log2_scale - base);
        r.m[half] = m;
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s[j][e] = xt_exp2(s[j][e] * log2_scale - base);
                sum += s[j][e];
            }
        r.l[half] = r.l[half] * shrink[half] + sum;
    }
    if (PAIRS && p.p > 0) {
        float by = (float)p.keep_scale;
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[j][e] = bits.kept[e / 2] >> (2 * j + e % 2) & 1 ? s[j][e] * by : 0.0f;
    }
}

/* Shared: q, GROUPS * 64 x D; k and v, two each of KEYS x D. */
template <int D, int KEYS, int GROUPS, int BLOCKS, bool PAIRS>
static __global__ void __launch_bounds__(GROUPS * 128, BLOCKS)
    forward(const __grid_constant__ struct xt_attention p,
            const __grid_constant__ struct xt_deal deal, bool aligned) {
    constexpr int THREADS = GROUPS * 128, ROWS = GROUPS * 64, J = KEYS / 8;
    constexpr uint32_t TILE = xt_tile_bytes<KEYS, D>;
    extern __shared__ __align__(1024) unsigned char shared[];
    uint32_t q = xt_shared_address(shared), k = q + xt_tile_bytes<ROWS, D>, v = k + 2 * TILE;
    int64_t head, tile;
    xt_dealt(deal, &head, &tile);
    int64_t b = head / p.heads, h = head % p.heads, kv = h / p.group;
    int64_t row0 = (deal.tiles - 1 - tile) * ROWS; /* the last see the most keys */
    int group = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
    int64_t row = row0 + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    int64_t keys = xt_keys_of(p, b);
    int64_t limit[2] = {xt_visible(p, keys, row), xt_visible(p, keys, row + 8)};
    int64_t whole = xt_visible(p, keys, row0 + group * 64); /* every row of the group sees these */
    int n =
        (int)((xt_visible(p, keys, row0 + ROWS < p.sq ? row0 + ROWS - 1 : p.sq - 1) + KEYS - 1) /
              KEYS);
    uint64_t seed = PAIRS && p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    float log2_scale = (float)(fabs(p.scale) * XT_LOG2E);
    const __nv_bfloat16 *keys_at = xt_head_at(p.k, b, kv, 0),
                        *values_at = xt_head_at(p.v, b, kv, 0);
    float s[J][4], o[D / 8][4] = {}, shrink[2];
    uint32_t a[KEYS / 16][4];
    struct running r = {{-INFINITY, -INFINITY}, {0, 0}};

    auto load = [&](uint32_t to, const __nv_bfloat16 *from, int64_t stride, int j) {
        if (j >= n) return;
        int64_t key0 = (int64_t)j * KEYS;
        xt_load_tile<KEYS, D, THREADS>(to + (j & 1) * TILE, from + key0 * stride, stride,
                                       p.sk - key0, p.d, aligned);
    };
    auto softmax = [&](int j) {
        int64_t key0 = (int64_t)j * KEYS;
        softmax_tile<J, PAIRS>(p, seed, b, h, row, key0, limit, whole >= key0 + KEYS, log2_scale, s,
                               r, shrink);
    };

    if (n) {
        xt_load_tile<ROWS, D, THREADS>(q, xt_head_at(p.q, b, h, row0), p.q.row, p.sq - row0, p.d,
                                       aligned);
        load(k, keys_at, p.k.row, 0);
        xt_copies_commit();
        xt_copies_wait();
        __syncthreads();
        load(k, keys_at, p.k.row, 1);
        load(v, values_at, p.v.row, 0);
        xt_copies_commit();
        xt_mma_begin();
        xt_mma_rows<J, ROWS, D>(s, q, group * 64, k);
        xt_mma_commit();
        xt_mma_wait<0>();
        xt_mma_settle(s);
        softmax(0);
        xt_pack_left(a, s);
    }
    for (int j = 0; j < n - 1; j++) {
        uint32_t this_v = v + (j & 1) * TILE, next_k = k + (~j & 1) * TILE;
        xt_copies_wait();
        __syncthreads();
        load(k, keys_at, p.k.row, j + 2);
        load(v, values_at, p.v.row, j + 1);
        xt_copies_commit();
        xt_mma_settle(s);
        xt_mma_settle(o);
        xt_mma_settle(a);
        xt_mma_begin();
        xt_mma_rows<J, ROWS, D>(s, q, group * 64, next_k);
        xt_mma_commit();
        xt_mma_columns<D>(o, a, this_v);
        xt_mma_commit();
        xt_mma_wait<1>();
        xt_mma_settle(s);
        softmax(j + 1);
        /* Mostly the largest stays the largest, and times 1 changes no bit. The wait stands in both
           branches, or it would be moved before the softmax, during which p v is under way. */
        if (__any_sync(0xFFFFFFFFu, shrink[0] != 1 || shrink[1] != 1)) {
            xt_mma_wait<0>();
            xt_mma_settle(o);
            xt_mma_settle(a);
#pragma unroll
            for (int i = 0; i < D / 8; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[i][e] *= shrink[e / 2];
        } else {
            xt_mma_wait<0, 1>();
            xt_mma_settle(o);
            xt_mma_settle(a);
        }
        xt_pack_left(a, s);
    }
    if (n) {
        xt_copies_wait();
        __syncthreads();
        xt_mma_settle(o);
        xt_mma_settle(a);
        xt_mma_begin();
        xt_mma_columns<D>(o, a, v + (uint32_t)((n - 1) & 1) * TILE);
        xt_mma_commit();
        xt_mma_wait<0>();
        xt_mma_settle(o);
    }
    float by[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float l = r.l[half];
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 1);
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);
        by[half] = l == 0 ? 0.0f : 1 / l;
        /* +inf for a row without keys, so that backward finds e^(s - lse) = 0 there. */
        if (p.lse && lane % 4 == 0 && row + 8 * half < p.sq)
            ((float *)p.lse)[b * p.lse_batch + h * p.lse_head + row + 8 * half] =
                l == 0 ? INFINITY : r.m[half] * fabsf((float)p.scale) + logf(l);
    }
    int64_t own = row0 + group * 64; /* no warp reads q any more */
    xt_save_rows(o, by, q + group * xt_tile_bytes<64, D>,
                 (__nv_bfloat16 *)xt_head_at(p.out, b, h, own), p.out.row, p.sq - own, p.d,
                 aligned);
}

template <int D, int KEYS, int GROUPS, int BLOCKS, bool PAIRS>
static enum xt_status launch(struct xt_ctx *ctx, const struct xt_attention &p) {
    constexpr int ROWS = GROUPS * 64;
    constexpr int BYTES = xt_tile_bytes<ROWS, D> + 4 * xt_tile_bytes<KEYS, D>;
    const struct xt_deal deal = xt_deal_queries(p, ROWS);
    return xt_attention_launch(ctx, forward<D, KEYS, GROUPS, BLOCKS, PAIRS>, xt_deal_blocks(deal),
                               GROUPS * 128, BYTES, p, deal,
                               xt_heads_aligned(p.q, p.k, p.v, p.out));
}

template <bool PAIRS>
static enum xt_status by_width(struct xt_ctx *ctx, const struct xt_attention &p) {
    if (p.d <= 32) return launch<32, 128, 2, 2, PAIRS>(ctx, p);
    if (p.d <= 64) return launch<64, 64, 2, 2, PAIRS>(ctx, p);
    if (p.d <= 96) return launch<96, 128, 2, 1, PAIRS>(ctx, p);
    if (p.d <= 128) return launch<128, 128, 2, 1, PAIRS>(ctx, p);
    return launch<256, 64, 2, 1, PAIRS>(ctx, p);
}

enum xt_status xt_attention_mma(struct xt_ctx *ctx, const struct xt_attention &p) {
    return p.any_pair_hidden || p.scale < 0 ? by_width<true>(ctx, p) : by_width<false>(ctx, p);
}
