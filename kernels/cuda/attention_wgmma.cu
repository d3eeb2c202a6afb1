/*
 * attention_wgmma.cu: the forward of tiled attention in bf16 for tensor cores that work beside the
 * warps. The formulas are attention_mma.cu's.
 *
 * An item is a tile of queries of a head; a warpgroup owns 64 of them and keeps their s and o in
 * registers. Warpgroups take turns at starting products, so that the tensor cores work for one
 * while another is at its softmax; and within one, the s of the next keys and the p v of these are
 * under way together (Shah and others 2024, FlashAttention-3). Sums are rescaled only when the
 * largest s has grown by more than a factor that f32 and bf16 have room for.
 *
 * Traffic: q and out once, k and v once an item, from L2 where the heads under way fit.
 */
#include <math.h>

#include "attention_wgmma.h"

/* Where things lie in shared memory, in bytes; tiles first, for they are aligned. */
template <int D, int KEYS, int GROUPS, int TURNS, int STAGES> struct xt_forward_room {
    static constexpr uint32_t owned = GROUPS * xt_tile_bytes<64, D>, tile = xt_tile_bytes<KEYS, D>;
    static constexpr uint32_t k = TURNS * owned, v = k + STAGES * tile;
    static constexpr uint32_t q_ring = v + STAGES * tile, k_ring = q_ring + 16 * TURNS;
    static constexpr uint32_t v_ring = k_ring + 16 * STAGES, slots = v_ring + 16 * STAGES;
    static constexpr uint32_t bytes = slots + 8 * TURNS;
};

template <int D, int KEYS, int GROUPS, int BLOCKS, int TURNS, int STAGES, bool PAIRS>
static __global__ void __launch_bounds__((GROUPS + 1) * 128, BLOCKS)
    attend(const __grid_constant__ struct xt_attention p,
           const __grid_constant__ struct xt_deal deal, struct xt_cuda_counter *counter,
           bool aligned) {
#if XT_WGMMA
    using room = xt_forward_room<D, KEYS, GROUPS, TURNS, STAGES>;
    using registers = xt_registers<GROUPS, BLOCKS, GROUPS == 2 && BLOCKS == 1 ? 40 : 32>;
    constexpr int ROWS = GROUPS * 64, J = KEYS / 8;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t base = xt_shared_address(shared), q_full = base + room::q_ring;
    const uint32_t k_full = base + room::k_ring, k_empty = k_full + 8 * STAGES;
    const uint32_t v_full = base + room::v_ring, v_empty = v_full + 8 * STAGES;
    int64_t *slots = (int64_t *)(shared + room::slots);
    struct xt_ring<STAGES> now;
    if (threadIdx.x == 0) {
        xt_ring_init(q_full, TURNS, GROUPS);
        xt_ring_init(k_full, STAGES, GROUPS);
        xt_ring_init(v_full, STAGES, GROUPS);
    }
    __syncthreads();
    if (threadIdx.x < XT_BRINGERS) {
        xt_registers_to_bring<registers>();
        auto bring = [&](int64_t at, uint32_t place, uint32_t full) {
            const struct xt_query_tile w = xt_query_tile_at<KEYS, ROWS>(p, deal, at);
            xt_bring_owned<D, GROUPS>(base + place * room::owned, xt_head_at(p.q, w.b, w.h, w.row0),
                                      p.q.row, p.sq - w.row0, p.d, aligned);
            xt_brought(full, aligned);
            for (int j = 0; j < w.n; j++, now.used++) {
                const uint32_t stage = now.place(), phase = now.phase() ^ 1;
                const int64_t key0 = (int64_t)j * KEYS;
                xt_mbarrier_wait(k_empty + 8 * stage, phase);
                xt_load_tile<KEYS, D, XT_BRINGERS>(base + room::k + stage * room::tile,
                                                   xt_head_at(p.k, w.b, w.kv, key0), p.k.row,
                                                   p.sk - key0, p.d, aligned);
                xt_brought(k_full + 8 * stage, aligned);
                xt_mbarrier_wait(v_empty + 8 * stage, phase);
                xt_load_tile<KEYS, D, XT_BRINGERS>(base + room::v + stage * room::tile,
                                                   xt_head_at(p.v, w.b, w.kv, key0), p.v.row,
                                                   p.sk - key0, p.d, aligned);
                xt_brought(v_full + 8 * stage, aligned);
            }
        };
        xt_bring_items<TURNS>(deal.heads * deal.tiles, counter, slots, q_full, bring);
        return;
    }
    xt_registers_to_compute<registers>();
    const int group = (int)threadIdx.x / 128 - 1, lane = (int)threadIdx.x % 32;
    const int mine = 1 + group, next = 1 + (group + 1) % GROUPS; /* named barriers: whose turn */
    const uint64_t seed = PAIRS && p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    const float log2_scale = (float)(fabs(p.scale) * XT_LOG2E);
    if (GROUPS > 1 && group == GROUPS - 1) xt_barrier_arrive<256>(next);
    for (struct xt_ring<TURNS> turn;; turn.used++) {
        xt_mbarrier_wait(q_full + 8 * turn.place(), turn.phase());
        const int64_t at = slots[turn.place()];
        if (at < 0) break;
        const struct xt_query_tile w = xt_query_tile_at<KEYS, ROWS>(p, deal, at);
        const int64_t own = w.row0 + group * 64, row = own + threadIdx.x / 32 % 4 * 16 + lane / 4;
        const int64_t limit[2] = {xt_visible(p, w.keys, row), xt_visible(p, w.keys, row + 8)};
        const int64_t whole = xt_visible(p, w.keys, own); /* every row of the group sees these */
        const uint32_t q = base + turn.place() * room::owned + group * xt_tile_bytes<64, D>;
        float s[J][4], o[D / 8][4] = {}, shrink[2];
        uint32_t a[KEYS / 16][4];
        struct xt_running r = {{-INFINITY, -INFINITY}, {0, 0}};
        auto softmax = [&](int j) {
            const int64_t key0 = (int64_t)j * KEYS;
            xt_softmax_keys<J, PAIRS>(p, seed, w.b, w.h, row, key0, limit, whole >= key0 + KEYS,
                                      log2_scale, s, r, shrink);
        };

        if (w.n) {
            xt_mbarrier_wait(k_full + 8 * now.place(), now.phase());
            xt_tiles_arrived();
            xt_wgmma_begin();
            xt_wgmma_rows<D>(s, q, base + room::k + now.place() * room::tile);
            xt_wgmma_commit();
            xt_wgmma_wait<0>();
            xt_wgmma_settle(s);
            xt_done_with(k_empty + 8 * now.place());
            softmax(0);
            xt_pack_left(a, s);
        }
        for (int j = 0; j < w.n - 1; j++) {
            const uint32_t stage = now.place();
            const uint32_t v_phase = now.phase();
            now.used++;
            xt_mbarrier_wait(k_full + 8 * now.place(), now.phase());
            xt_mbarrier_wait(v_full + 8 * stage, v_phase);
            xt_tiles_arrived();
            if (GROUPS > 1) xt_barrier_wait<256>(mine);
            xt_wgmma_settle(s);
            xt_wgmma_settle(o);
            xt_wgmma_settle(a);
            xt_wgmma_begin();
            xt_wgmma_rows<D>(s, q, base + room::k + now.place() * room::tile);
            xt_wgmma_commit();
            xt_wgmma_columns<D>(o, a, base + room::v + stage * room::tile);
            xt_wgmma_commit();
            if (GROUPS > 1) xt_barrier_arrive<256>(next);
            xt_wgmma_wait<1>();
            xt_wgmma_settle(s);
            xt_done_with(k_empty + 8 * now.place());
            softmax(j + 1);
            /* All take the same branch. Outside of one the wait would be moved before the softmax,
               during which p v is under way. */
            if (p.d > 0) {
                xt_wgmma_wait<0>();
                xt_wgmma_settle(o);
                xt_wgmma_settle(a);
            } else {
                xt_wgmma_wait<0, 1>();
                xt_wgmma_settle(o);
                xt_wgmma_settle(a);
            }
            if (__any_sync(0xFFFFFFFFu, shrink[0] != 1 || shrink[1] != 1)) { /* 1 changes no bit */
#pragma unroll
                for (int i = 0; i < D / 8; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) o[i][e] *= shrink[e / 2];
            }
            xt_done_with(v_empty + 8 * stage);
            xt_pack_left(a, s);
        }
        if (w.n) {
            xt_mbarrier_wait(v_full + 8 * now.place(), now.phase());
            xt_tiles_arrived();
            xt_wgmma_settle(o);
            xt_wgmma_settle(a);
            xt_wgmma_begin();
            xt_wgmma_columns<D>(o, a, base + room::v + now.place() * room::tile);
            xt_wgmma_commit();
            xt_wgmma_wait<0>();
            xt_wgmma_settle(o);
            xt_done_with(v_empty + 8 * now.place());
            now.used++;
        }
        float by[2];
        xt_softmax_end(p, w.b, w.h, row, r, by);
        xt_save_rows(o, by, q, (__nv_bfloat16 *)xt_head_at(p.out, w.b, w.h, own), p.out.row,
                     p.sq - own, p.d, aligned); /* by way of q, which this group alone reads */
        xt_done_with(q_full + 8 * (TURNS + turn.place()));
    }
    if (GROUPS > 1 && group == 0) xt_barrier_wait<256>(mine);
#else
    asm volatile("trap;");
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int D, int KEYS, int GROUPS, int BLOCKS, int TURNS, int STAGES, bool PAIRS>
static enum xt_status launch_attend(struct xt_ctx *ctx, const struct xt_attention &p) {
    constexpr int ROWS = GROUPS * 64;
    constexpr int BYTES = xt_forward_room<D, KEYS, GROUPS, TURNS, STAGES>::bytes;
    const struct xt_deal deal = xt_deal_queries(p, ROWS);
    return xt_attention_launch(ctx, attend<D, KEYS, GROUPS, BLOCKS, TURNS, STAGES, PAIRS>,
                               xt_persistent_blocks(ctx, deal.heads * deal.tiles, BLOCKS),
                               (GROUPS + 1) * 128, BYTES, p, deal, xt_cuda_counter(ctx),
                               xt_heads_aligned(p.q, p.k, p.v, p.out));
}

template <bool PAIRS>
static enum xt_status attend_by_width(struct xt_ctx *ctx, const struct xt_attention &p) {
    if (p.d <= 32) return launch_attend<32, 64, 2, 2, 2, 4, PAIRS>(ctx, p);
    if (p.d <= 64) return launch_attend<64, 128, 2, 1, 2, 4, PAIRS>(ctx, p);
    if (p.d <= 96) return launch_attend<96, 128, 2, 1, 2, 2, PAIRS>(ctx, p);
    if (p.d <= 128) return launch_attend<128, 128, 2, 1, 2, 2, PAIRS>(ctx, p);
    return launch_attend<256, 64, 2, 1, 1, 2, PAIRS>(ctx, p);
}

enum xt_status xt_attention_wgmma(struct xt_ctx *ctx, const struct xt_attention &p) {
    return p.any_pair_hidden || p.scale < 0 ? attend_by_width<true>(ctx, p)
                                            : attend_by_width<false>(ctx, p);
}
