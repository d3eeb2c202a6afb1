/*
 * attention_wgmma_grad.cu: the backward of tiled attention in bf16 for tensor cores that work
 * beside the warps. Formulas, the two kernels and their order of sums are attention_mma_grad.cu's.
 *
 * An item is a tile of keys that meets the queries of all heads of its group, or a tile of queries
 * that meets its keys; a warpgroup owns 64 of them. The last product of a tile is under way with
 * the first two of the next, where registers allow it.
 */
#include <limits.h>
#include <math.h>

#include "attention_wgmma.h"

/* Where things lie in shared memory, in bytes; tiles first, for they are aligned. */
/* VALUES: f32 beside each tile that is met. */
template <int D, int MET, int VALUES, int GROUPS, int TURNS, int STAGES> struct xt_backward_room {
    static constexpr uint32_t owned = GROUPS * xt_tile_bytes<64, D>, tile = xt_tile_bytes<MET, D>;
    static constexpr uint32_t tiles = TURNS * 2 * owned, values = tiles + STAGES * 2 * tile;
    static constexpr uint32_t owned_ring = values + STAGES * VALUES * 4;
    static constexpr uint32_t ring = owned_ring + 16 * TURNS, slots = ring + 16 * STAGES;
    static constexpr uint32_t bytes = slots + 8 * TURNS;
};

/* ---- dk and dv ------------------------------------------------------------------------------- */

/* One item: a tile of keys of a head of k, and the columns of the answers from column0 on. */
struct xt_key_tile {
    int64_t b, kv, key0, keys, first; /* keys: of this sequence; queries from `first` on see some */
    int column0, n;                   /* n: tiles of queries that it meets, of all heads */
};
template <int QUERIES, int ROWS, int HALVES>
__device__ static struct xt_key_tile key_tile(const struct xt_attention &p,
                                              const struct xt_deal &deal, int64_t at, int out) {
    struct xt_key_tile w;
    int64_t head, tile;
    xt_dealt(deal, at / HALVES, &head, &tile);
    w.column0 = (int)(at % HALVES) * out;
    w.b = head / p.kv_heads, w.kv = head % p.kv_heads, w.key0 = tile * ROWS;
    w.keys = xt_keys_of(p, w.b);
    const int64_t first = p.causal ? w.key0 - (p.sk - p.sq) : 0;
    w.first = first < 0 ? 0 : first / QUERIES * QUERIES;
    w.n = w.key0 < w.keys && w.first < p.sq
              ? (int)((p.sq - w.first + QUERIES - 1) / QUERIES * p.group)
              : 0;
    return w;
}

template <int D, int OUT, int QUERIES, int GROUPS, int BLOCKS, int TURNS, int STAGES, bool PAIRS>
static __global__ void __launch_bounds__((GROUPS + 1) * 128, BLOCKS)
    keys_grad(const __grid_constant__ struct xt_attention p,
              const __grid_constant__ struct xt_deal deal, struct xt_cuda_counter *counter,
              bool aligned, bool aligned_out) {
#if XT_WGMMA
    using room = xt_backward_room<D, QUERIES, 2 * QUERIES, GROUPS, TURNS, STAGES>;
    using registers = xt_registers<GROUPS, BLOCKS, GROUPS == 2 && BLOCKS == 1 ? 24 : 32>;
    constexpr bool DEFER = OUT < 128; /* the last product is waited for in the next tile */
    constexpr int ROWS = GROUPS * 64, J = QUERIES / 8, HALVES = D / OUT;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t base = xt_shared_address(shared), owned_full = base + room::owned_ring;
    const uint32_t full = base + room::ring, empty = full + 8 * STAGES;
    float *row_values = (float *)(shared + room::values); /* [stage][lse, delta][QUERIES] */
    int64_t *slots = (int64_t *)(shared + room::slots);
    struct xt_ring<STAGES> now;
    if (threadIdx.x == 0) {
        xt_ring_init(owned_full, TURNS, GROUPS);
        xt_ring_init(full, STAGES, GROUPS);
    }
    __syncthreads();
    if (threadIdx.x < XT_BRINGERS) {
        xt_registers_to_bring<registers>();
        auto bring = [&](int64_t at, uint32_t place, uint32_t owned) {
            const struct xt_key_tile w = key_tile<QUERIES, ROWS, HALVES>(p, deal, at, OUT);
            const uint32_t k = base + place * 2 * room::owned;
            xt_bring_owned<D, GROUPS>(k, xt_head_at(p.k, w.b, w.kv, w.key0), p.k.row, p.sk - w.key0,
                                      p.d, aligned);
            xt_bring_owned<D, GROUPS>(k + room::owned, xt_head_at(p.v, w.b, w.kv, w.key0), p.v.row,
                                      p.sk - w.key0, p.d, aligned);
            xt_brought(owned, aligned);
            int64_t h = w.kv * p.group, row0 = w.first;
            for (int i = 0; i < w.n; i++, now.used++) {
                const uint32_t stage = now.place(), q = base + room::tiles + stage * 2 * room::tile;
                xt_mbarrier_wait(empty + 8 * stage, now.phase() ^ 1);
                xt_load_tile<QUERIES, D, XT_BRINGERS>(q, xt_head_at(p.q, w.b, h, row0), p.q.row,
                                                      p.sq - row0, p.d, aligned);
                xt_load_tile<QUERIES, D, XT_BRINGERS>(q + room::tile, xt_head_at(p.g, w.b, h, row0),
                                                      p.g.row, p.sq - row0, p.d, aligned);
                for (int t = (int)threadIdx.x; t < 2 * QUERIES; t += XT_BRINGERS) {
                    const int64_t row = row0 + t % QUERIES;
                    float x = t < QUERIES ? INFINITY : 0.0f; /* a row that is none: p is 0 */
                    if (row < p.sq)
                        x = t < QUERIES
                                ? ((const float *)p.lse)[w.b * p.lse_batch + h * p.lse_head + row] *
                                      (float)XT_LOG2E
                                : ((const float *)p.delta)[(w.b * p.heads + h) * p.sq + row];
                    row_values[stage * 2 * QUERIES + t] = x;
                }
                xt_brought(full + 8 * stage, aligned);
                row0 += QUERIES;
                if (row0 >= p.sq) row0 = w.first, h++;
            }
        };
        xt_bring_items<TURNS>(deal.heads * deal.tiles * HALVES, counter, slots, owned_full, bring);
        return;
    }
    xt_registers_to_compute<registers>();
    const int group = (int)threadIdx.x / 128 - 1, lane = (int)threadIdx.x % 32;
    const uint64_t seed = PAIRS && p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    const float log2_scale = (float)(p.scale * XT_LOG2E), keep_scale = (float)p.keep_scale;
    for (struct xt_ring<TURNS> turn;; turn.used++) {
        xt_mbarrier_wait(owned_full + 8 * turn.place(), turn.phase());
        const int64_t at = slots[turn.place()];
        if (at < 0) break;
        const struct xt_key_tile w = key_tile<QUERIES, ROWS, HALVES>(p, deal, at, OUT);
        const int64_t own = w.key0 + group * 64, shift = p.sk - p.sq;
        const int64_t key = own + threadIdx.x / 32 % 4 * 16 + lane / 4;
        const uint32_t k = base + turn.place() * 2 * room::owned + group * xt_tile_bytes<64, D>;
        const uint32_t v = k + room::owned;
        /* From query `clear` on every key of the group is seen; query 8 j + e % 2 of this thread's
           in a tile at row0 sees key e / 2 unless it comes before from[e / 2] - row0. */
        const int clear = own + 63 >= w.keys ? INT_MAX : p.causal ? (int)(own + 63 - shift) : 0;
        int from[2], row0 = (int)w.first;
        int64_t h = w.kv * p.group;
#pragma unroll
        for (int half = 0; half < 2; half++)
            from[half] = key + 8 * half >= w.keys ? INT_MAX
                         : p.causal               ? (int)(key + 8 * half - shift) - lane % 4 * 2
                                                  : -QUERIES;
        float s[J][4], dp[J][4], dk[OUT / 8][4] = {}, dv[OUT / 8][4] = {};
        uint32_t a[QUERIES / 16][4];
        for (int i = 0; i < w.n; i++, now.used++) {
            const uint32_t stage = now.place(), q = base + room::tiles + stage * 2 * room::tile;
            const uint32_t g = q + room::tile;
            const float2 *values = (const float2 *)(row_values + stage * 2 * QUERIES) + lane % 4;
            xt_mbarrier_wait(full + 8 * stage, now.phase());
            xt_tiles_arrived();
            xt_wgmma_settle(s);
            xt_wgmma_settle(dp);
            xt_wgmma_begin();
            xt_wgmma_rows<D>(s, k, q);
            xt_wgmma_commit();
            xt_wgmma_rows<D>(dp, v, g);
            xt_wgmma_commit();
            xt_wgmma_wait<1>();
            xt_wgmma_settle(s);
            if constexpr (DEFER) {
                xt_wgmma_settle(dk);
                xt_wgmma_settle(a);
                if (i) xt_done_with(empty + 8 * now.before());
            }
            xt_each<J>([&](int j, int e) {
                const float2 lse = values[4 * j];
                s[j][e] = xt_exp2(s[j][e] * log2_scale - (e % 2 ? lse.y : lse.x));
            });
            struct xt_pair_bits bits;
            if (PAIRS) {
                bits = xt_pairs<J, true>(p, seed, w.b, h, key, row0);
                xt_hide(bits, s);
            }
            if (row0 < clear) {
                xt_each<J>([&](int j, int e) {
                    if (8 * j + e % 2 + row0 < from[e / 2]) s[j][e] = 0;
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
            xt_wgmma_settle(dv);
            xt_wgmma_settle(a);
            xt_wgmma_begin();
            xt_wgmma_columns<D>(dv, a, g, w.column0);
            xt_wgmma_commit();
            xt_wgmma_wait<1>();
            xt_wgmma_settle(dp);
            if (PAIRS && p.p > 0) xt_drop(bits, keep_scale, dp);
            xt_each<J>([&](int j, int e) {
                const float2 delta = values[QUERIES / 2 + 4 * j];
                dp[j][e] = s[j][e] * (dp[j][e] - (e % 2 ? delta.y : delta.x));
            });
            xt_wgmma_wait<0>();
            xt_wgmma_settle(dv);
            xt_wgmma_settle(a);
            xt_pack_left(a, dp);
            xt_wgmma_settle(dk);
            xt_wgmma_settle(a);
            xt_wgmma_begin();
            xt_wgmma_columns<D>(dk, a, q, w.column0);
            xt_wgmma_commit();
            row0 += QUERIES;
            if (row0 >= p.sq) row0 = (int)w.first, h++;
            if constexpr (!DEFER) {
                xt_wgmma_wait<0>();
                xt_wgmma_settle(dk);
                xt_wgmma_settle(a);
                xt_done_with(empty + 8 * stage);
            }
        }
        if constexpr (DEFER) {
            xt_wgmma_wait<0>();
            xt_wgmma_settle(dk);
            xt_wgmma_settle(a);
            if (w.n) xt_done_with(empty + 8 * now.before());
        }
        /* By way of k and v, which this group alone reads. */
        const float one[2] = {1, 1}, scale[2] = {(float)p.scale, (float)p.scale};
        xt_save_rows(dk, scale, k, (__nv_bfloat16 *)xt_head_at(p.dk, w.b, w.kv, own) + w.column0,
                     p.dk.row, p.sk - own, p.d - w.column0, aligned_out);
        xt_save_rows(dv, one, v, (__nv_bfloat16 *)xt_head_at(p.dv, w.b, w.kv, own) + w.column0,
                     p.dv.row, p.sk - own, p.d - w.column0, aligned_out);
        xt_done_with(owned_full + 8 * (TURNS + turn.place()));
    }
#else
    asm volatile("trap;");
#endif
}

/* ---- dq -------------------------------------------------------------------------------------- */

template <int D, int KEYS, int GROUPS, int BLOCKS, int TURNS, int STAGES, bool PAIRS>
static __global__ void __launch_bounds__((GROUPS + 1) * 128, BLOCKS)
    queries_grad(const __grid_constant__ struct xt_attention p,
                 const __grid_constant__ struct xt_deal deal, struct xt_cuda_counter *counter,
                 bool aligned, bool aligned_out) {
#if XT_WGMMA
    using room = xt_backward_room<D, KEYS, 0, GROUPS, TURNS, STAGES>;
    using registers = xt_registers<GROUPS, BLOCKS, GROUPS == 2 && BLOCKS == 1 ? 40 : 32>;
    constexpr int ROWS = GROUPS * 64, J = KEYS / 8;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t base = xt_shared_address(shared), owned_full = base + room::owned_ring;
    const uint32_t full = base + room::ring, empty = full + 8 * STAGES;
    int64_t *slots = (int64_t *)(shared + room::slots);
    struct xt_ring<STAGES> now;
    if (threadIdx.x == 0) {
        xt_ring_init(owned_full, TURNS, GROUPS);
        xt_ring_init(full, STAGES, GROUPS);
    }
    __syncthreads();
    if (threadIdx.x < XT_BRINGERS) {
        xt_registers_to_bring<registers>();
        auto bring = [&](int64_t at, uint32_t place, uint32_t owned) {
            const struct xt_query_tile w = xt_query_tile_at<KEYS, ROWS>(p, deal, at);
            const uint32_t q = base + place * 2 * room::owned;
            xt_bring_owned<D, GROUPS>(q, xt_head_at(p.q, w.b, w.h, w.row0), p.q.row, p.sq - w.row0,
                                      p.d, aligned);
            xt_bring_owned<D, GROUPS>(q + room::owned, xt_head_at(p.g, w.b, w.h, w.row0), p.g.row,
                                      p.sq - w.row0, p.d, aligned);
            xt_brought(owned, aligned);
            for (int j = 0; j < w.n; j++, now.used++) {
                const uint32_t stage = now.place(), k = base + room::tiles + stage * 2 * room::tile;
                const int64_t key0 = (int64_t)j * KEYS;
                xt_mbarrier_wait(empty + 8 * stage, now.phase() ^ 1);
                xt_load_tile<KEYS, D, XT_BRINGERS>(k, xt_head_at(p.k, w.b, w.kv, key0), p.k.row,
                                                   p.sk - key0, p.d, aligned);
                xt_load_tile<KEYS, D, XT_BRINGERS>(k + room::tile, xt_head_at(p.v, w.b, w.kv, key0),
                                                   p.v.row, p.sk - key0, p.d, aligned);
                xt_brought(full + 8 * stage, aligned);
            }
        };
        xt_bring_items<TURNS>(deal.heads * deal.tiles, counter, slots, owned_full, bring);
        return;
    }
    xt_registers_to_compute<registers>();
    const int group = (int)threadIdx.x / 128 - 1, lane = (int)threadIdx.x % 32;
    const uint64_t seed = PAIRS && p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    const float log2_scale = (float)(p.scale * XT_LOG2E), keep_scale = (float)p.keep_scale;
    for (struct xt_ring<TURNS> turn;; turn.used++) {
        xt_mbarrier_wait(owned_full + 8 * turn.place(), turn.phase());
        const int64_t at = slots[turn.place()];
        if (at < 0) break;
        const struct xt_query_tile w = xt_query_tile_at<KEYS, ROWS>(p, deal, at);
        const int64_t own = w.row0 + group * 64, row = own + threadIdx.x / 32 % 4 * 16 + lane / 4;
        const int64_t limit[2] = {xt_visible(p, w.keys, row), xt_visible(p, w.keys, row + 8)};
        const int64_t whole = xt_visible(p, w.keys, own); /* every row of the group sees these */
        const uint32_t q = base + turn.place() * 2 * room::owned + group * xt_tile_bytes<64, D>;
        const uint32_t g = q + room::owned;
        float s[J][4], dp[J][4], dq[D / 8][4] = {}, lse[2], delta[2];
        uint32_t a[KEYS / 16][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t r = row + 8 * half;
            const bool is_row = r < p.sq;
            lse[half] = is_row ? ((const float *)p.lse)[w.b * p.lse_batch + w.h * p.lse_head + r] *
                                     (float)XT_LOG2E
                               : INFINITY;
            delta[half] =
                is_row ? ((const float *)p.delta)[(w.b * p.heads + w.h) * p.sq + r] : 0.0f;
        }
        for (int j = 0; j < w.n; j++, now.used++) {
            const uint32_t stage = now.place(), k = base + room::tiles + stage * 2 * room::tile;
            const int64_t key0 = (int64_t)j * KEYS;
            xt_mbarrier_wait(full + 8 * stage, now.phase());
            xt_tiles_arrived();
            xt_wgmma_settle(s);
            xt_wgmma_settle(dp);
            xt_wgmma_begin();
            xt_wgmma_rows<D>(s, q, k);
            xt_wgmma_commit();
            xt_wgmma_rows<D>(dp, g, k + room::tile);
            xt_wgmma_commit();
            xt_wgmma_wait<1>();
            xt_wgmma_settle(s);
            xt_wgmma_settle(dq);
            xt_wgmma_settle(a);
            if (j) xt_done_with(empty + 8 * now.before());
            xt_each<J>([&](int j, int e) { s[j][e] = xt_exp2(s[j][e] * log2_scale - lse[e / 2]); });
            struct xt_pair_bits bits;
            if (PAIRS) {
                bits = xt_pairs<J, false>(p, seed, w.b, w.h, row, key0);
                xt_hide(bits, s);
            }
            if (whole < key0 + KEYS) xt_hide_beyond(limit, key0, 0, s);
            xt_wgmma_wait<0>();
            xt_wgmma_settle(dp);
            if (PAIRS && p.p > 0) xt_drop(bits, keep_scale, dp);
            xt_each<J>([&](int j, int e) { dp[j][e] = s[j][e] * (dp[j][e] - delta[e / 2]); });
            xt_pack_left(a, dp);
            xt_wgmma_settle(dq);
            xt_wgmma_settle(a);
            xt_wgmma_begin();
            xt_wgmma_columns<D>(dq, a, k);
            xt_wgmma_commit();
        }
        xt_wgmma_wait<0>();
        xt_wgmma_settle(dq);
        xt_wgmma_settle(a);
        if (w.n) xt_done_with(empty + 8 * now.before());
        /* By way of q, which this group alone reads. */
        const float scale[2] = {(float)p.scale, (float)p.scale};
        xt_save_rows(dq, scale, q, (__nv_bfloat16 *)xt_head_at(p.dq, w.b, w.h, own), p.dq.row,
                     p.sq - own, p.d, aligned_out);
        xt_done_with(owned_full + 8 * (TURNS + turn.place()));
    }
#else
    asm volatile("trap;");
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int D, int OUT, int QUERIES, int GROUPS, int BLOCKS, int TURNS, int STAGES, bool PAIRS>
static enum xt_status launch_keys(struct xt_ctx *ctx, const struct xt_attention &p) {
    constexpr int ROWS = GROUPS * 64,
                  BYTES = xt_backward_room<D, QUERIES, 2 * QUERIES, GROUPS, TURNS, STAGES>::bytes;
    const struct xt_deal deal =
        xt_deal_of(p.batch * p.kv_heads, (p.sk + ROWS - 1) / ROWS, 4 * p.sq * p.d * p.group);
    const int64_t items = deal.heads * deal.tiles * (D / OUT);
    return xt_attention_launch(
        ctx, keys_grad<D, OUT, QUERIES, GROUPS, BLOCKS, TURNS, STAGES, PAIRS>,
        xt_persistent_blocks(ctx, items, BLOCKS), (GROUPS + 1) * 128, BYTES, p, deal,
        xt_cuda_counter(ctx), xt_heads_aligned(p.q, p.k, p.v, p.g), xt_heads_aligned(p.dk, p.dv));
}

template <int D, int KEYS, int GROUPS, int BLOCKS, int TURNS, int STAGES, bool PAIRS>
static enum xt_status launch_queries(struct xt_ctx *ctx, const struct xt_attention &p) {
    constexpr int ROWS = GROUPS * 64,
                  BYTES = xt_backward_room<D, KEYS, 0, GROUPS, TURNS, STAGES>::bytes;
    const struct xt_deal deal = xt_deal_queries(p, ROWS);
    return xt_attention_launch(ctx, queries_grad<D, KEYS, GROUPS, BLOCKS, TURNS, STAGES, PAIRS>,
                               xt_persistent_blocks(ctx, deal.heads * deal.tiles, BLOCKS),
                               (GROUPS + 1) * 128, BYTES, p, deal, xt_cuda_counter(ctx),
                               xt_heads_aligned(p.q, p.k, p.v, p.g), xt_heads_aligned(p.dq));
}

template <bool PAIRS>
static enum xt_status grads_by_width(struct xt_ctx *ctx, const struct xt_attention &p) {
    if (p.d <= 32) {
        /* Tiles of 64 queries are not short of registers, and take 88 us where these take 77. */
        XT_TRY((launch_keys<32, 32, 128, 2, 1, 2, 3, PAIRS>(ctx, p)));
        return launch_queries<32, 128, 2, 1, 2, 3, PAIRS>(ctx, p);
    }
    if (p.d <= 64) {
        XT_TRY((launch_keys<64, 64, 64, 2, 1, 2, 4, PAIRS>(ctx, p)));
        return launch_queries<64, 128, 2, 1, 2, 3, PAIRS>(ctx, p);
    }
    if (p.d <= 96) {
        XT_TRY((launch_keys<96, 96, 64, 2, 1, 2, 3, PAIRS>(ctx, p)));
        return launch_queries<96, 64, 2, 1, 2, 3, PAIRS>(ctx, p);
    }
    if (p.d <= 128) {
        XT_TRY((launch_keys<128, 128, 64, 2, 1, 1, 3, PAIRS>(ctx, p)));
        return launch_queries<128, 64, 2, 1, 1, 4, PAIRS>(ctx, p);
    }
    XT_TRY((launch_keys<256, 128, 64, 1, 1, 1, 2, PAIRS>(ctx, p)));
    return launch_queries<256, 64, 1, 1, 1, 2, PAIRS>(ctx, p);
}

enum xt_status xt_attention_wgmma_grad(struct xt_ctx *ctx, const struct xt_attention &p) {
    return p.any_pair_hidden ? grads_by_width<true>(ctx, p) : grads_by_width<false>(ctx, p);
}
