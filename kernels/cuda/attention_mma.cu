/*
 * attention_mma.cu: the forward of tiled attention in bf16 on any tensor cores.
 *
 *     s = q k^T;  m' = max(m, max s);
 *     l' = l e^(m-m') + sum e^(s-m');  o' = o e^(m-m') + e^(s-m') v;  out = o / l, lse = m + log l
 *
 * (Dao 2023, FlashAttention-2.) A warpgroup owns 64 queries of a head and keeps their s and o in
 * registers; a block's warpgroups share the key tiles, which arrive while the ones before are used.
 * Products of bf16 are summed in f32; p is rounded to bf16 for p v alone.
 *
 * Traffic: q and out once, k and v once a block of queries, from L2 where the heads under way fit.
 */
#include <math.h>

#include "attention_tiles.h"
#include "mma.h"

/* Shared: q, GROUPS * 64 x D; k and v, two each of KEYS x D. */
template <int D, int KEYS, int GROUPS, int BLOCKS, bool PAIRS>
static __global__ void __launch_bounds__(GROUPS * 128, BLOCKS)
    forward(const __grid_constant__ struct xt_attention p,
            const __grid_constant__ struct xt_deal deal, bool aligned) {
#if XT_MMA
    constexpr int THREADS = GROUPS * 128, ROWS = GROUPS * 64, J = KEYS / 8;
    constexpr uint32_t TILE = xt_tile_bytes<KEYS, D>;
    extern __shared__ __align__(1024) unsigned char shared[];
    uint32_t q = xt_shared_address(shared), k = q + xt_tile_bytes<ROWS, D>, v = k + 2 * TILE;
    const struct xt_query_tile w = xt_query_tile_at<KEYS, ROWS>(p, deal, blockIdx.x);
    const int group = (int)threadIdx.x / 128, lane = (int)threadIdx.x % 32;
    const int64_t own = w.row0 + group * 64, row = own + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int64_t limit[2] = {xt_visible(p, w.keys, row), xt_visible(p, w.keys, row + 8)};
    const int64_t whole = xt_visible(p, w.keys, own); /* every row of the group sees these */
    const uint64_t seed = PAIRS && p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    const float log2_scale = (float)(fabs(p.scale) * XT_LOG2E);
    float s[J][4], o[D / 8][4] = {}, shrink[2];
    uint32_t a[KEYS / 16][4];
    struct xt_running r = {{-INFINITY, -INFINITY}, {0, 0}};
    auto load = [&](int j) {
        if (j >= w.n) return;
        const int64_t key0 = (int64_t)j * KEYS;
        xt_load_tile<KEYS, D, THREADS>(k + (j & 1) * TILE, xt_head_at(p.k, w.b, w.kv, key0),
                                       p.k.row, p.sk - key0, p.d, aligned);
        xt_load_tile<KEYS, D, THREADS>(v + (j & 1) * TILE, xt_head_at(p.v, w.b, w.kv, key0),
                                       p.v.row, p.sk - key0, p.d, aligned);
    };

    xt_load_tile<ROWS, D, THREADS>(q, xt_head_at(p.q, w.b, w.h, w.row0), p.q.row, p.sq - w.row0,
                                   p.d, aligned);
    load(0);
    xt_copies_commit();
    for (int j = 0; j < w.n; j++) {
        const int64_t key0 = (int64_t)j * KEYS;
        xt_copies_wait();
        __syncthreads();
        load(j + 1);
        xt_copies_commit();
        xt_mma_rows<J, ROWS, D>(s, q, group * 64, k + (j & 1) * TILE);
        xt_softmax_keys<J, PAIRS>(p, seed, w.b, w.h, row, key0, limit, whole >= key0 + KEYS,
                                  log2_scale, s, r, shrink);
        xt_pack_left(a, s);
        if (__any_sync(0xFFFFFFFFu, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
            for (int i = 0; i < D / 8; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[i][e] *= shrink[e / 2];
        }
        xt_mma_columns<D>(o, a, v + (j & 1) * TILE);
    }
    xt_copies_wait();
    __syncthreads();
    float by[2];
    xt_softmax_end(p, w.b, w.h, row, r, by);
    /* By way of q, which no warp reads any more. */
    xt_save_rows(o, by, q + group * xt_tile_bytes<64, D>,
                 (__nv_bfloat16 *)xt_head_at(p.out, w.b, w.h, own), p.out.row, p.sq - own, p.d,
                 aligned);
#else
    asm volatile("trap;");
#endif
}

template <int D, int KEYS, int GROUPS, int BLOCKS, bool PAIRS>
static enum xt_status launch(struct xt_ctx *ctx, const struct xt_attention &p) {
    constexpr int ROWS = GROUPS * 64;
    constexpr int BYTES = xt_tile_bytes<ROWS, D> + 4 * xt_tile_bytes<KEYS, D>;
    const struct xt_deal deal = xt_deal_queries(p, ROWS);
    return xt_attention_launch(ctx, forward<D, KEYS, GROUPS, BLOCKS, PAIRS>, xt_deal_items(deal),
                               GROUPS * 128, BYTES, p, deal,
                               xt_heads_aligned(p.q, p.k, p.v, p.out));
}

/* Blocks of at most 99 KiB of shared memory, which every device has. */
template <bool PAIRS>
static enum xt_status by_width(struct xt_ctx *ctx, const struct xt_attention &p) {
    if (p.d <= 32) return launch<32, 128, 2, 2, PAIRS>(ctx, p);
    if (p.d <= 64) return launch<64, 64, 2, 2, PAIRS>(ctx, p);
    if (p.d <= 96) return launch<96, 64, 2, 1, PAIRS>(ctx, p);
    if (p.d <= 128) return launch<128, 64, 2, 1, PAIRS>(ctx, p);
    return launch<256, 32, 1, 1, PAIRS>(ctx, p);
}

enum xt_status xt_attention_mma(struct xt_ctx *ctx, const struct xt_attention &p) {
    return p.any_pair_hidden || p.scale < 0 ? by_width<true>(ctx, p) : by_width<false>(ctx, p);
}
