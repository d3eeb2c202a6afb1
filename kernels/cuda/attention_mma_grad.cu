/*
 * attention_mma_grad.cu: the backward of tiled attention in bf16 on the tensor cores.
 *
 *     p = e^(s - lse);  dv = p^T do;  dp = do v^T;  ds = p (dp - delta) scale;  dq = ds k;
 *     dk = ds^T q
 *
 * Two kernels, each computing p and ds again, so that every sum has one owner and one order: a
 * warpgroup owns 64 keys and meets the queries of all heads of its group for dk and dv; another
 * owns 64 queries and meets the keys for dq. Both keep the side they own in the rows of the
 * results, so that p and ds go from product to product in registers. p and ds are rounded to bf16
 * for the products that take them.
 *
 * Traffic: q, k, v, do and the answers once, and again, from L2 where the heads under way fit, the
 * other side's once a block.
 */
#include <math.h>

#include "attention_tiles.h"
#include "mma.h"

/* ---- dk and dv ------------------------------------------------------------------------------- */

/* Shared: k and v, GROUPS * 64 x D; q and do, two each of QUERIES x D; log2(e) lse and delta, two
   each of QUERIES. A block has OUT of the D columns of its answers. */
template <int D, int OUT, int QUERIES, int GROUPS, int BLOCKS, bool PAIRS>
static __global__ void __launch_bounds__(GROUPS * 128, BLOCKS)
    backward_keys(const __grid_constant__ struct xt_attention p,
                  const __grid_constant__ struct xt_deal deal, bool aligned, bool aligned_out) {
#if XT_MMA
    constexpr int THREADS = GROUPS * 128, ROWS = GROUPS * 64, J = QUERIES / 8;
    constexpr uint32_t OWNED = xt_tile_bytes<ROWS, D>, TILE = xt_tile_bytes<QUERIES, D>;
    extern __shared__ __align__(1024) unsigned char shared[];
    uint32_t k = xt_shared_address(shared), v = k + OWNED, q = v + OWNED, g = q + 2 * TILE;
    float *row_values = (float *)(shared + 2 * OWNED + 4 * TILE); /* [stage][lse, delta][QUERIES] */
    int64_t head, tile;
    xt_dealt(deal, blockIdx.x, &head, &tile);
    int64_t b = head / p.kv_heads, kv = head % p.kv_heads, key0 = tile * ROWS;
    int column0 = (int)blockIdx.y * OUT;
    int group = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
    int64_t key = key0 + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    int64_t keys = xt_keys_of(p, b);
    /* From here on queries see some key of the block. */
    int64_t first = p.causal ? key0 - (p.sk - p.sq) : 0;
    first = first < 0 ? 0 : first / QUERIES * QUERIES;
    int a_head = key0 < keys && first < p.sq ? (int)((p.sq - first + QUERIES - 1) / QUERIES) : 0;
    int n = a_head * (int)p.group;
    uint64_t seed = PAIRS && p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    float log2_scale = (float)(p.scale * XT_LOG2E), keep_scale = (float)p.keep_scale;
    float s[J][4], dp[J][4], dk[OUT / 8][4] = {}, dv[OUT / 8][4] = {};
    uint32_t a[QUERIES / 16][4], da[QUERIES / 16][4];

    auto load = [&](int i) {
        if (i >= n) return;
        int stage = i & 1;
        int64_t h = kv * p.group + i / a_head, row0 = first + (int64_t)(i % a_head) * QUERIES;
        xt_load_tile<QUERIES, D, THREADS>(q + stage * TILE, xt_head_at(p.q, b, h, row0), p.q.row,
                                          p.sq - row0, p.d, aligned);
        xt_load_tile<QUERIES, D, THREADS>(g + stage * TILE, xt_head_at(p.g, b, h, row0), p.g.row,
                                          p.sq - row0, p.d, aligned);
        int t = (int)threadIdx.x;
        if (t >= 2 * QUERIES) return;
        int64_t row = row0 + t % QUERIES;
        float x = t < QUERIES ? INFINITY : 0.0f; /* a row that is none: p is 0 */
        if (row < p.sq)
            x = t < QUERIES ? ((const float *)p.lse)[b * p.lse_batch + h * p.lse_head + row] *
                                  (float)XT_LOG2E
                            : ((const float *)p.delta)[(b * p.heads + h) * p.sq + row];
        row_values[stage * 2 * QUERIES + t] = x;
    };

    xt_load_tile<ROWS, D, THREADS>(k, xt_head_at(p.k, b, kv, key0), p.k.row, p.sk - key0, p.d,
                                   aligned);
    xt_load_tile<ROWS, D, THREADS>(v, xt_head_at(p.v, b, kv, key0), p.v.row, p.sk - key0, p.d,
                                   aligned);
    load(0);
    xt_copies_commit();
    for (int i = 0; i < n; i++) {
        uint32_t this_q = q + (i & 1) * TILE, this_g = g + (i & 1) * TILE;
        const float2 *values = (const float2 *)(row_values + (i & 1) * 2 * QUERIES) + lane % 4;
        int64_t h = kv * p.group + i / a_head, row0 = first + (int64_t)(i % a_head) * QUERIES;
        xt_copies_wait();
        __syncthreads();
        load(i + 1);
        xt_copies_commit();
        xt_mma_rows<J, ROWS, D>(s, k, group * 64, this_q);
        xt_mma_rows<J, ROWS, D>(dp, v, group * 64, this_g);
        xt_each<J>([&](int j, int e) {
            const float2 lse = values[4 * j];
            s[j][e] = xt_exp2(s[j][e] * log2_scale - (e % 2 ? lse.y : lse.x));
        });
        struct xt_pair_bits bits;
        if (PAIRS) {
            bits = xt_pairs<J, true>(p, seed, b, h, key, row0);
            xt_hide(bits, s);
        }
        if (xt_visible(p, keys, row0) < key0 + group * 64 + 64) {
            /* Query 8 j + e % 2 of this thread's sees the key: from the one at `from` on. */
            int from[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int64_t at = p.causal ? key + 8 * half - (p.sk - p.sq) - row0 - lane % 4 * 2 : 0;
                from[half] = key + 8 * half >= keys ? QUERIES : at < QUERIES ? (int)at : QUERIES;
            }
            xt_each<J>([&](int j, int e) {
                if (8 * j + e % 2 < from[e / 2]) s[j][e] = 0;
            });
        }
        if (PAIRS && p.p > 0) {
            float kept[J][4];
            xt_each<J>([&](int j, int e) { kept[j][e] = s[j][e]; });
            xt_drop(bits, keep_scale, kept);
            xt_pack_left(a, kept);
        } else {
            xt_pack_left(a, s);
        }
        xt_mma_columns<D>(dv, a, this_g, column0);
        if (PAIRS && p.p > 0) xt_drop(bits, keep_scale, dp);
        xt_each<J>([&](int j, int e) {
            const float2 delta = values[QUERIES / 2 + 4 * j];
            dp[j][e] = s[j][e] * (dp[j][e] - (e % 2 ? delta.y : delta.x));
        });
        xt_pack_left(da, dp);
        xt_mma_columns<D>(dk, da, this_q, column0);
    }
    xt_copies_wait();
    __syncthreads();
    const float one[2] = {1, 1}, scale[2] = {(float)p.scale, (float)p.scale};
    int64_t own = key0 + group * 64;
    xt_save_rows(dk, scale, k + group * xt_tile_bytes<64, D>,
                 (__nv_bfloat16 *)xt_head_at(p.dk, b, kv, own) + column0, p.dk.row, p.sk - own,
                 p.d - column0, aligned_out);
    xt_save_rows(dv, one, v + group * xt_tile_bytes<64, D>,
                 (__nv_bfloat16 *)xt_head_at(p.dv, b, kv, own) + column0, p.dv.row, p.sk - own,
                 p.d - column0, aligned_out);
#else
    asm volatile("trap;");
#endif
}

/* ---- dq -------------------------------------------------------------------------------------- */

/* Shared: q and do, GROUPS * 64 x D; k and v, two each of KEYS x D. */
template <int D, int KEYS, int GROUPS, int BLOCKS, bool PAIRS>
static __global__ void __launch_bounds__(GROUPS * 128, BLOCKS)
    backward_queries(const __grid_constant__ struct xt_attention p,
                     const __grid_constant__ struct xt_deal deal, bool aligned, bool aligned_out) {
#if XT_MMA
    constexpr int THREADS = GROUPS * 128, ROWS = GROUPS * 64, J = KEYS / 8;
    constexpr uint32_t OWNED = xt_tile_bytes<ROWS, D>, TILE = xt_tile_bytes<KEYS, D>;
    extern __shared__ __align__(1024) unsigned char shared[];
    uint32_t q = xt_shared_address(shared), g = q + OWNED, k = g + OWNED, v = k + 2 * TILE;
    const struct xt_query_tile w = xt_query_tile_at<KEYS, ROWS>(p, deal, blockIdx.x);
    const int group = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
    const int64_t own = w.row0 + group * 64, row = own + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int64_t limit[2] = {xt_visible(p, w.keys, row), xt_visible(p, w.keys, row + 8)};
    const int64_t whole = xt_visible(p, w.keys, own); /* every row of the group sees these */
    uint64_t seed = PAIRS && p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    float log2_scale = (float)(p.scale * XT_LOG2E), keep_scale = (float)p.keep_scale;
    float s[J][4], dp[J][4], dq[D / 8][4] = {}, lse[2], delta[2];
    uint32_t a[KEYS / 16][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bool is_row = row + 8 * half < p.sq;
        int64_t at = row + 8 * half;
        lse[half] = is_row ? ((const float *)p.lse)[w.b * p.lse_batch + w.h * p.lse_head + at] *
                                 (float)XT_LOG2E
                           : INFINITY;
        delta[half] = is_row ? ((const float *)p.delta)[(w.b * p.heads + w.h) * p.sq + at] : 0.0f;
    }

    auto load = [&](int j) {
        if (j >= w.n) return;
        int64_t key0 = (int64_t)j * KEYS;
        xt_load_tile<KEYS, D, THREADS>(k + (j & 1) * TILE, xt_head_at(p.k, w.b, w.kv, key0),
                                       p.k.row, p.sk - key0, p.d, aligned);
        xt_load_tile<KEYS, D, THREADS>(v + (j & 1) * TILE, xt_head_at(p.v, w.b, w.kv, key0),
                                       p.v.row, p.sk - key0, p.d, aligned);
    };

    xt_load_tile<ROWS, D, THREADS>(q, xt_head_at(p.q, w.b, w.h, w.row0), p.q.row, p.sq - w.row0,
                                   p.d, aligned);
    xt_load_tile<ROWS, D, THREADS>(g, xt_head_at(p.g, w.b, w.h, w.row0), p.g.row, p.sq - w.row0,
                                   p.d, aligned);
    load(0);
    xt_copies_commit();
    for (int j = 0; j < w.n; j++) {
        uint32_t this_k = k + (j & 1) * TILE, this_v = v + (j & 1) * TILE;
        int64_t key0 = (int64_t)j * KEYS;
        xt_copies_wait();
        __syncthreads();
        load(j + 1);
        xt_copies_commit();
        xt_mma_rows<J, ROWS, D>(s, q, group * 64, this_k);
        xt_mma_rows<J, ROWS, D>(dp, g, group * 64, this_v);
        xt_each<J>([&](int j, int e) { s[j][e] = xt_exp2(s[j][e] * log2_scale - lse[e / 2]); });
        struct xt_pair_bits bits;
        if (PAIRS) {
            bits = xt_pairs<J, false>(p, seed, w.b, w.h, row, key0);
            xt_hide(bits, s);
        }
        if (whole < key0 + KEYS) xt_hide_beyond(limit, key0, 0, s);
        if (PAIRS && p.p > 0) xt_drop(bits, keep_scale, dp);
        xt_each<J>([&](int j, int e) { dp[j][e] = s[j][e] * (dp[j][e] - delta[e / 2]); });
        xt_pack_left(a, dp);
        xt_mma_columns<D>(dq, a, this_k);
    }
    xt_copies_wait();
    __syncthreads();
    const float scale[2] = {(float)p.scale, (float)p.scale};
    xt_save_rows(dq, scale, q + group * xt_tile_bytes<64, D>,
                 (__nv_bfloat16 *)xt_head_at(p.dq, w.b, w.h, own), p.dq.row, p.sq - own, p.d,
                 aligned_out);
#else
    asm volatile("trap;");
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int D, int OUT, int QUERIES, int GROUPS, int BLOCKS, bool PAIRS>
static enum xt_status launch_keys(struct xt_ctx *ctx, const struct xt_attention &p) {
    constexpr int ROWS = GROUPS * 64;
    constexpr int BYTES =
        2 * xt_tile_bytes<ROWS, D> + 4 * xt_tile_bytes<QUERIES, D> + 4 * QUERIES * 4;
    const struct xt_deal deal =
        xt_deal_of(p.batch * p.kv_heads, (p.sk + ROWS - 1) / ROWS, 4 * p.sq * p.d * p.group);
    return xt_attention_launch(ctx, backward_keys<D, OUT, QUERIES, GROUPS, BLOCKS, PAIRS>,
                               dim3(xt_deal_items(deal), D / OUT), GROUPS * 128, BYTES, p, deal,
                               xt_heads_aligned(p.q, p.k, p.v, p.g), xt_heads_aligned(p.dk, p.dv));
}

template <int D, int KEYS, int GROUPS, int BLOCKS, bool PAIRS>
static enum xt_status launch_queries(struct xt_ctx *ctx, const struct xt_attention &p) {
    constexpr int ROWS = GROUPS * 64;
    constexpr int BYTES = 2 * xt_tile_bytes<ROWS, D> + 4 * xt_tile_bytes<KEYS, D>;
    const struct xt_deal deal = xt_deal_queries(p, ROWS);
    return xt_attention_launch(ctx, backward_queries<D, KEYS, GROUPS, BLOCKS, PAIRS>,
                               xt_deal_items(deal), GROUPS * 128, BYTES, p, deal,
                               xt_heads_aligned(p.q, p.k, p.v, p.g), xt_heads_aligned(p.dq));
}

/* Blocks of at most 99 KiB of shared memory, which every device has. */
template <bool PAIRS>
static enum xt_status keys_by_width(struct xt_ctx *ctx, const struct xt_attention &p) {
    if (p.d <= 32) return launch_keys<32, 32, 64, 2, 2, PAIRS>(ctx, p);
    if (p.d <= 64) return launch_keys<64, 64, 64, 2, 1, PAIRS>(ctx, p);
    if (p.d <= 96) return launch_keys<96, 96, 64, 2, 1, PAIRS>(ctx, p);
    if (p.d <= 128) return launch_keys<128, 128, 64, 1, 1, PAIRS>(ctx, p);
    return launch_keys<256, 128, 16, 1, 1, PAIRS>(ctx, p);
}

template <bool PAIRS>
static enum xt_status queries_by_width(struct xt_ctx *ctx, const struct xt_attention &p) {
    if (p.d <= 32) return launch_queries<32, 64, 2, 2, PAIRS>(ctx, p);
    if (p.d <= 64) return launch_queries<64, 64, 2, 1, PAIRS>(ctx, p);
    if (p.d <= 96) return launch_queries<96, 64, 2, 1, PAIRS>(ctx, p);
    if (p.d <= 128) return launch_queries<128, 64, 1, 1, PAIRS>(ctx, p);
    return launch_queries<256, 16, 1, 1, PAIRS>(ctx, p);
}

enum xt_status xt_attention_mma_grad(struct xt_ctx *ctx, const struct xt_attention &p) {
    if (p.any_pair_hidden) {
        XT_TRY(keys_by_width<true>(ctx, p));
        return queries_by_width<true>(ctx, p);
    }
    XT_TRY(keys_by_width<false>(ctx, p));
    return queries_by_width<false>(ctx, p);
}
