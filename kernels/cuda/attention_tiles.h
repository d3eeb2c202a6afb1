/*
 * attention_tiles.h: what tiled attention on the tensor cores shares, forward and backward: in what
 * order tiles are dealt, and masks of the pairs that a thread holds.
 */
#ifndef XT_CUDA_ATTENTION_TILES_H
#define XT_CUDA_ATTENTION_TILES_H

#include <math.h>

#include "attention.h"
#include "tiles.h"

#define XT_LOG2E 1.4426950408889634

/*
 * Work is dealt by heads of a batch and tiles. Tiles with more work come first, so that the last
 * ones to run are short; `section` heads at a time, so that what they read stays in L2.
 */
struct xt_deal {
    int64_t heads, tiles, section;
};
static inline struct xt_deal xt_deal_of(int64_t heads, int64_t tiles, int64_t bytes_a_head) {
    int64_t section = ((int64_t)20 << 20) / (bytes_a_head > 0 ? bytes_a_head : 1);
    struct xt_deal deal = {heads, tiles, section < 1 ? 1 : section < heads ? section : heads};
    return deal;
}
/* Tiles of `rows` queries of a head. The heads of a group read the same keys. */
static inline struct xt_deal xt_deal_queries(const struct xt_attention &p, int rows) {
    return xt_deal_of(p.batch * p.heads, (p.sq + rows - 1) / rows,
                      4 * p.sk * p.d / (p.group > 0 ? p.group : 1));
}
/* As a number of blocks: of too many the launch is refused. */
static inline unsigned xt_deal_items(const struct xt_deal &deal) {
    const int64_t items = deal.heads * deal.tiles;
    return (unsigned)(items < UINT32_MAX ? items : UINT32_MAX);
}
/* The head of a batch and the tile, 0 the first, of item `at`. */
__device__ inline void xt_dealt(const struct xt_deal &deal, int64_t at, int64_t *head,
                                int64_t *tile) {
    int64_t first = at / (deal.section * deal.tiles) * deal.section;
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

/* Zeroes p where the mask or documents hide a pair. */
template <int J> __device__ inline void xt_hide(const struct xt_pair_bits &bits, float (&x)[J][4]) {
    xt_each<J>([&](int j, int e) {
        if (!(bits.seen[e / 2] >> (2 * j + e % 2) & 1)) x[j][e] = 0;
    });
}

/* x becomes `hidden` where a row does not see the key, of those from key0 on. */
template <int J>
__device__ inline void xt_hide_beyond(const int64_t (&limit)[2], int64_t key0, float hidden,
                                      float (&x)[J][4]) {
    const int column = (int)threadIdx.x % 4 * 2;
    int seen[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t left = limit[half] - key0 - column;
        seen[half] = left < 0 ? 0 : left < 8 * J ? (int)left : 8 * J;
    }
    xt_each<J>([&](int j, int e) {
        if (8 * j + e % 2 >= seen[e / 2]) x[j][e] = hidden;
    });
}

/* What dropout keeps is multiplied by `by`, the rest is zero. */
template <int J>
__device__ inline void xt_drop(const struct xt_pair_bits &bits, float by, float (&x)[J][4]) {
    xt_each<J>([&](int j, int e) {
        x[j][e] = bits.kept[e / 2] >> (2 * j + e % 2) & 1 ? x[j][e] * by : 0.0f;
    });
}

/* s may exceed what it is taken relative to by so many powers of 2, for which f32 and bf16 have
   room: so sums are seldom rescaled. */
#define XT_SOFTMAX_ROOM 8.0f

/* Registers of a warpgroup's running softmax: of rows l / 4 and l / 4 + 8 of lane l. */
struct xt_running {
    float m[2]; /* what s is taken relative to */
    float l[2]; /* sum of e^(s - m) over this thread's columns */
};

/* s becomes e^(s - m) in the tile at key0; shrink is what the sums so far are to be multiplied by.
   `limit` is the number of keys that each row sees. */
template <int J, bool PAIRS>
__device__ inline void xt_softmax_keys(const struct xt_attention &p, uint64_t seed, int64_t b,
                                       int64_t h, int64_t row, int64_t key0,
                                       const int64_t (&limit)[2], bool whole, float log2_scale,
                                       float (&s)[J][4], struct xt_running &r, float (&shrink)[2]) {
    struct xt_pair_bits bits;
    if (PAIRS) {
        bits = xt_pairs<J, false>(p, seed, b, h, row, key0);
        xt_each<J>([&](int j, int e) {
            if (p.scale < 0) s[j][e] = -s[j][e]; /* the largest of scale s, by |scale| */
            if (!(bits.seen[e / 2] >> (2 * j + e % 2) & 1)) s[j][e] = -INFINITY;
        });
    }
    if (!whole) xt_hide_beyond(limit, key0, -INFINITY, s);
    /* Two chains a row, for a warpgroup waits for its own results most of the time. */
    float largest[4], sum[4] = {}, base[2];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        largest[e] = s[0][e];
#pragma unroll
        for (int j = 1; j < J; j++) largest[e] = fmaxf(largest[e], s[j][e]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float before = r.m[half];
        float m = fmaxf(largest[2 * half], largest[2 * half + 1]);
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
        if (m <= before || (m - before) * log2_scale <= XT_SOFTMAX_ROOM) m = before;
        base[half] = m == -INFINITY ? 0.0f : m * log2_scale;
        shrink[half] = m == before ? 1.0f : xt_exp2(before * log2_scale - base[half]);
        r.m[half] = m;
    }
    xt_each<J>([&](int j, int e) {
        s[j][e] = xt_exp2(s[j][e] * log2_scale - base[e / 2]);
        sum[e] += s[j][e];
    });
#pragma unroll
    for (int half = 0; half < 2; half++)
        r.l[half] = r.l[half] * shrink[half] + (sum[2 * half] + sum[2 * half + 1]);
    if (PAIRS && p.p > 0) xt_drop(bits, (float)p.keep_scale, s);
}

/* by is 1 / l, of rows l / 4 and l / 4 + 8 of lane l, for o to be multiplied by; lse is written. */
__device__ inline void xt_softmax_end(const struct xt_attention &p, int64_t b, int64_t h,
                                      int64_t row, const struct xt_running &r, float (&by)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float l = r.l[half];
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 1);
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);
        by[half] = l == 0 ? 0.0f : 1 / l;
        /* +inf for a row without keys, so that backward finds e^(s - lse) = 0 there. */
        if (p.lse && threadIdx.x % 4 == 0 && row + 8 * half < p.sq)
            ((float *)p.lse)[b * p.lse_batch + h * p.lse_head + row + 8 * half] =
                l == 0 ? INFINITY : r.m[half] * fabsf((float)p.scale) + logf(l);
    }
}

/* One item: a tile of queries of a head. */
struct xt_query_tile {
    int64_t b, h, kv, row0, keys; /* keys: of this sequence */
    int n;                        /* tiles of keys that it meets */
};
template <int KEYS, int ROWS>
__device__ inline struct xt_query_tile xt_query_tile_at(const struct xt_attention &p,
                                                        const struct xt_deal &deal, int64_t at) {
    struct xt_query_tile w;
    int64_t head, tile;
    xt_dealt(deal, at, &head, &tile);
    w.b = head / p.heads, w.h = head % p.heads, w.kv = w.h / p.group;
    w.row0 = (deal.tiles - 1 - tile) * ROWS; /* the last see the most keys */
    w.keys = xt_keys_of(p, w.b);
    const int64_t last = w.row0 + ROWS < p.sq ? w.row0 + ROWS - 1 : p.sq - 1;
    w.n = (int)((xt_visible(p, w.keys, last) + KEYS - 1) / KEYS);
    return w;
}

/* Whether all rows of all of them begin on 16 bytes. */
template <class... Heads> static inline bool xt_heads_aligned(const Heads &...t) {
    return ((xt_is_aligned16(t.data) && (t.batch | t.row | t.head) % 8 == 0) && ...);
}

#endif
