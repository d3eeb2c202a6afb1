/*
 * attention_mma.h: what the forward and the backward on the tensor cores share: which block does
 * what, and masks of the pairs that a thread holds.
 */
#ifndef XT_CUDA_ATTENTION_MMA_H
#define XT_CUDA_ATTENTION_MMA_H

#include "attention.h"
#include "mma.h"

#define XT_LOG2E 1.4426950408889634

/*
 * Blocks are dealt by heads of a batch and tiles. Tiles with more work come first, so that the last
 * blocks to run are short ones; `section` heads at a time, so that what they read stays in L2.
 */
struct xt_deal {
    int64_t heads, tiles, section;
};
static inline struct xt_deal xt_deal_of(int64_t heads, int64_t tiles, int64_t bytes_a_head) {
    int64_t section = ((int64_t)20 << 20) / (bytes_a_head > 0 ? bytes_a_head : 1);
    struct xt_deal deal = {heads, tiles, section < 1 ? 1 : section < heads ? section : heads};
    return deal;
}
/* Blocks that own `rows` queries of a head each. The heads of a group read the same keys. */
static inline struct xt_deal xt_deal_queries(const struct xt_attention &p, int rows) {
    return xt_deal_of(p.batch * p.heads, (p.sq + rows - 1) / rows,
                      4 * p.sk * p.d / (p.group > 0 ? p.group : 1));
}
static inline unsigned xt_deal_blocks(const struct xt_deal &deal) {
    return (unsigned)(deal.heads * deal.tiles);
}
/* The head of a batch and the tile, 0 the first, of this block. */
__device__ inline void xt_dealt(const struct xt_deal &deal, int64_t *head, int64_t *tile) {
    int64_t at = blockIdx.x, first = at / (deal.section * deal.tiles) * deal.section;
    int64_t n = deal.heads - first < deal.section ? deal.heads - first : deal.section;
    at -= first * deal.tiles;
    *tile = at / n;
    *head = first + at % n;
}

__device__ inline const __nv_bfloat16 *xt_head_at(const struct xt_heads &t, int64_t b, int64_t h,
                                                  int64_t row) {
    return (const __nv_bfloat16 *)t.data + b * t.batch + h * t.head + row * t.row;
}

/* e^x of x log2(e), to 2 units in the last place; -inf gives 0. */
__device__ inline float xt_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Bit 2 j + e of [half]: what holds for element c[j][2 half + e] of a thread. */
struct xt_pair_bits {
    uint32_t seen[2]; /* neither mask nor documents hide it */
    uint32_t kept[2]; /* dropout keeps it */
};

/*
 * The bits of a thread's pairs in a 64 x 8 J result. Its rows are `first` and `first` + 8 of the
 * one side and its columns lie in [column0, column0 + 8 J) of the other; queries are the rows, or
 * keys are (BY_KEY).
 */
template <int J, bool BY_KEY>
__device__ inline struct xt_pair_bits xt_pairs(const struct xt_attention &p, uint64_t seed,
                                               int64_t b, int64_t h, int64_t first,
                                               int64_t column0) {
    struct xt_pair_bits bits = {{0, 0}, {0, 0}};
#pragma unroll 1
    for (int i = 0; i < 4 * J; i++) {
        int half = i / (2 * J), at = i % (2 * J);
        int64_t one = first + 8 * half;
        int64_t other = column0 + at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2;
        int64_t row = BY_KEY ? other : one, key = BY_KEY ? one : other;
        if (row >= p.sq || key >= p.sk || xt_hidden(p, b, h, row, key)) continue;
        bits.seen[half] |= 1u << at;
        if (p.p == 0 || xt_keeps(p, seed, b, h, row, key)) bits.kept[half] |= 1u << at;
    }
    return bits;
}

/* Whether all rows of all of them begin on 16 bytes. */
template <class... Heads> static inline bool xt_heads_aligned(const Heads &...t) {
    return ((xt_is_aligned16(t.data) && (t.batch | t.row | t.head) % 8 == 0) && ...);
}

#endif
