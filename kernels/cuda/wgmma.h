/*
 * wgmma.h: products of bf16 tiles by tensor cores that work beside the warps (wgmma, compute
 * capability 9.0a): a product is under way from its commit until a wait for it. Tiles and results
 * are tiles.h's.
 *
 * A kernel that uses these has its body under XT_WGMMA; xt_has_wgmma says whether it may be
 * launched.
 */
#ifndef XT_CUDA_WGMMA_H
#define XT_CUDA_WGMMA_H

#include "tiles.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define XT_WGMMA 1
#else
#define XT_WGMMA 0
#endif

/* Whether the program was built for such a device and this is one. */
static inline bool xt_has_wgmma(const struct xt_ctx *ctx) {
#ifdef XT_CUDA_90A
    return xt_cuda_capability(ctx) == 90;
#else
    (void)ctx;
    return false;
#endif
}

/* Registers that a product reads or writes: nothing that touches them may move across. */
template <int J> __device__ inline void xt_wgmma_settle(float (&c)[J][4]) {
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(c[j][e])::"memory");
}
template <int K> __device__ inline void xt_wgmma_settle(uint32_t (&a)[K][4]) {
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[k][e])::"memory");
}

__device__ inline void xt_wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void xt_wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most PENDING of the committed products are under way. Waits of two PLACES are not made
   one. */
template <int PENDING, int PLACE = 0> __device__ inline void xt_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0; // %1" ::"n"(PENDING), "n"(PLACE) : "memory");
}

/* What the tensor cores need to know of a tile: 8 rows (of a panel) are `stride` bytes, the next
   panel is `leading` bytes on. */
template <int WIDTH> __device__ inline uint64_t xt_wgmma_tile(uint32_t address, int leading) {
    constexpr uint64_t MODE = xt_panel<WIDTH> == 64 ? 1 : 2;
    constexpr uint64_t STRIDE = xt_panel<WIDTH> * 16;
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (STRIDE >> 4) << 32 | MODE << 62;
}

#define XT_R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define XT_R1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define XT_R2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define XT_R3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define XT_C1(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define XT_C4(j) XT_C1(j), XT_C1(j + 1), XT_C1(j + 2), XT_C1(j + 3)
#define XT_C8(j) XT_C4(j), XT_C4(j + 4)
#define XT_C16(j) XT_C8(j), XT_C8(j + 8)
#define XT_WGMMA_TEXT(n, add)                                                                      \
    "{.reg .pred p; setp.ne.b32 p, " add ", 0;\n"                                                  \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {"

/* c (+)= a b^T, of 16 columns of both. */
template <int J>
__device__ inline void xt_wgmma_ss(float (&c)[J][4], uint64_t a, uint64_t b, int add) {
    static_assert(J == 8 || J == 16, "64 or 128 columns");
    if constexpr (J == 8)
        asm volatile(XT_WGMMA_TEXT("64", "%34") XT_R0 "," XT_R1 "}, %32, %33, p, 1, 1, 0, 0;}"
                     : XT_C8(0)
                     : "l"(a), "l"(b), "r"(add));
    else
        asm volatile(XT_WGMMA_TEXT("128", "%66") XT_R0 "," XT_R1 "," XT_R2 "," XT_R3
                                                       "}, %64, %65, p, 1, 1, 0, 0;}"
                     : XT_C16(0)
                     : "l"(a), "l"(b), "r"(add));
}

/* c += a b, a of 16 columns, b of 16 rows. */
template <int J>
__device__ inline void xt_wgmma_rs(float (&c)[J][4], const uint32_t (&a)[4], uint64_t b) {
    static_assert(J == 4 || J == 8 || J == 16, "32, 64 or 128 columns");
    if constexpr (J == 4)
        asm volatile(XT_WGMMA_TEXT("32", "1") XT_R0 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 1;}"
                     : XT_C4(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (J == 8)
        asm volatile(XT_WGMMA_TEXT("64", "1") XT_R0 "," XT_R1
                                                    "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;}"
                     : XT_C8(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile(XT_WGMMA_TEXT("128", "1") XT_R0 "," XT_R1 "," XT_R2 "," XT_R3
                                                     "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;}"
                     : XT_C16(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef XT_R0
#undef XT_R1
#undef XT_R2
#undef XT_R3
#undef XT_C1
#undef XT_C4
#undef XT_C8
#undef XT_C16
#undef XT_WGMMA_TEXT

/* c = a b^T: a tile of 64 rows, `b` of 8 J; both WIDTH wide. */
template <int WIDTH, int J>
__device__ inline void xt_wgmma_rows(float (&c)[J][4], uint32_t a, uint32_t b) {
    constexpr int B_ROWS = 8 * J, PANEL = xt_panel<WIDTH>;
    const uint64_t left = xt_wgmma_tile<WIDTH>(a, 16);
    const uint64_t right = xt_wgmma_tile<WIDTH>(b, 16);
#pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
        constexpr int A_PANEL = xt_panel_bytes<64, WIDTH>;
        constexpr int B_PANEL = xt_panel_bytes<B_ROWS, WIDTH>;
        const int inside = k % PANEL * 2;
        xt_wgmma_ss(c, left + ((k / PANEL * A_PANEL + inside) >> 4),
                    right + ((k / PANEL * B_PANEL + inside) >> 4), k > 0);
    }
}

/* c += a b: `a` in registers, 16 K wide; columns [column, column + 8 J) of tile `b`, 16 K rows of
   WIDTH. `column` is a multiple of a panel. */
template <int WIDTH, int J, int K>
__device__ inline void xt_wgmma_columns(float (&c)[J][4], const uint32_t (&a)[K][4], uint32_t b,
                                        int column = 0) {
    constexpr int ROWS = 16 * K, PANEL = xt_panel<WIDTH>;
    constexpr int STEP = PANEL == 32 ? 4 : J < 16 ? J : 16;
    static_assert(J % STEP == 0, "whole steps");
    b += (uint32_t)(column / PANEL) * xt_panel_bytes<ROWS, WIDTH>;
    const uint64_t right = xt_wgmma_tile<WIDTH>(b, xt_panel_bytes<ROWS, WIDTH>);
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int j = 0; j < J; j += STEP)
            xt_wgmma_rs<STEP>(
                (float(&)[STEP][4])c[j], a[k],
                right + ((j * 8 / PANEL * xt_panel_bytes<ROWS, WIDTH> + k * PANEL * 32) >> 4));
}

#endif
