/*
 * mma.h: products of bf16 tiles in shared memory by a warpgroup, 128 threads.
 *
 * A tile is ROWS rows of WIDTH elements, cut in panels of 64 (or 32) columns that lie one after
 * another; the 16-byte chunks of a row are swizzled within their panel by the row, which is the
 * pattern of the tensor cores' own 128-byte (64-byte) mode. Tiles start at multiples of 1024 bytes.
 *
 * Warp w of the warpgroup has rows 16 w to 16 w + 15 of a 64 x N result: c[j][e] of lane l is the
 * element of row l / 4 + e / 2 * 8 and column 8 j + l % 4 * 2 + e % 2. With the instructions of
 * compute capability 9.0a (wgmma) a product is under way until xt_mma_wait; without them (mma.sync)
 * it is done at once.
 */
#ifndef XT_CUDA_MMA_H
#define XT_CUDA_MMA_H

#include "cuda.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define XT_WGMMA 1
#else
#define XT_WGMMA 0
#endif

/* ---- tiles ----------------------------------------------------------------------------------- */

template <int WIDTH> constexpr int xt_panel = WIDTH % 64 == 0 ? 64 : 32; /* columns */
template <int ROWS, int WIDTH> constexpr int xt_tile_bytes = ROWS *WIDTH * 2;
template <int ROWS, int WIDTH> constexpr int xt_panel_bytes = ROWS *xt_panel<WIDTH> * 2;

/* The byte where chunk c (8 elements) of a row lies. */
template <int ROWS, int WIDTH> __device__ inline uint32_t xt_chunk_at(int row, int c) {
    constexpr int CHUNKS = xt_panel<WIDTH> / 8;
    int swizzle = CHUNKS == 8 ? row & 7 : row >> 1 & 3;
    return (uint32_t)(c / CHUNKS * xt_panel_bytes<ROWS, WIDTH> + row * CHUNKS * 16 +
                      ((c % CHUNKS ^ swizzle) << 4));
}

__device__ inline uint32_t xt_shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes to shared memory, of which the first `bytes` are copied and the others zero. */
__device__ inline void xt_copy16(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ inline void xt_copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Until the copies of this thread are done, and seen by the tensor cores after a barrier. */
__device__ inline void xt_copies_wait() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#if XT_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/*
 * Starts the copy of a tile by THREADS threads: `rows` rows of d elements, `stride` apart; what
 * lies beyond is zero. `aligned`: every row starts at a multiple of 16 bytes.
 */
template <int ROWS, int WIDTH, int THREADS>
__device__ inline void xt_load_tile(uint32_t to, const __nv_bfloat16 *from, int64_t stride,
                                    int64_t rows, int d, bool aligned) {
    constexpr int CHUNKS = WIDTH / 8;
    int n = rows < 0 ? 0 : rows < ROWS ? (int)rows : ROWS;
    if constexpr (THREADS % CHUNKS == 0 && THREADS / CHUNKS % 8 == 0) {
        /* A whole tile: a thread keeps its column, and its rows are of one swizzle. */
        constexpr int STEP = THREADS / CHUNKS;
        if (aligned && n == ROWS && d == WIDTH) {
            int r = (int)threadIdx.x / CHUNKS, c = (int)threadIdx.x % CHUNKS;
            from += r * stride + 8 * c;
            to += xt_chunk_at<ROWS, WIDTH>(r, c);
#pragma unroll
            for (int i = 0; i < ROWS; i += STEP)
                if (ROWS % STEP == 0 || r + i < ROWS)
                    xt_copy16(to + i * xt_panel<WIDTH> * 2, from + i * stride, 16);
            return;
        }
    }
    if (aligned) {
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            int r = i / CHUNKS, c = i % CHUNKS;
            int bytes = r < n ? 2 * (d - 8 * c) : 0;
            bytes = bytes < 0 ? 0 : bytes < 16 ? bytes : 16;
            /* Of no bytes, the address must still be one that may be read. */
            xt_copy16(to + xt_chunk_at<ROWS, WIDTH>(r, c), bytes ? from + r * stride + 8 * c : from,
                      bytes);
        }
        return;
    }
    for (int i = (int)threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS;
        uint32_t x[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (r < n && 8 * c + e < d)
                x[e / 2] |= (uint32_t)__bfloat16_as_ushort(from[r * stride + 8 * c + e])
                            << 16 * (e % 2);
        asm volatile(
            "st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + xt_chunk_at<ROWS, WIDTH>(r, c)),
            "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
            : "memory");
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* Two f32 as a pair of bf16, the first in the low half. */
__device__ inline uint32_t xt_pack(float low, float high) {
    __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&x;
}

/* A result as the left side of the next product: its columns become the inner dimension. */
template <int J>
__device__ inline void xt_pack_left(uint32_t (&a)[J / 2][4], const float (&c)[J][4]) {
#pragma unroll
    for (int k = 0; k < J / 2; k++) {
        a[k][0] = xt_pack(c[2 * k][0], c[2 * k][1]);
        a[k][1] = xt_pack(c[2 * k][2], c[2 * k][3]);
        a[k][2] = xt_pack(c[2 * k + 1][0], c[2 * k + 1][1]);
        a[k][3] = xt_pack(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
}

/* Registers that a product reads or writes: nothing that touches them may move across. */
template <int J> __device__ inline void xt_mma_settle(float (&c)[J][4]) {
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(c[j][e])::"memory");
}
template <int K> __device__ inline void xt_mma_settle(uint32_t (&a)[K][4]) {
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[k][e])::"memory");
}

__device__ inline void xt_mma_begin() {
#if XT_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void xt_mma_commit() {
#if XT_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/* Until at most PENDING of the committed products are under way. Waits of two PLACES are not made
   one. */
template <int PENDING, int PLACE = 0> __device__ inline void xt_mma_wait() {
#if XT_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0; // %1" ::"n"(PENDING), "n"(PLACE) : "memory");
#endif
}

#if XT_WGMMA

/* What the tensor cores need to know of a tile: 8 rows (of a panel) are `stride` bytes, the next
   panel is `leading` bytes on. */
template <int WIDTH> __device__ inline uint64_t xt_mma_tile(uint32_t address, int leading) {
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
__device__ inline void xt_wgmma_rows(float (&c)[J][4], uint64_t a, uint64_t b, int add) {
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
__device__ inline void xt_wgmma_columns(float (&c)[J][4], const uint32_t (&a)[4], uint64_t b) {
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

#else

__device__ inline void xt_ldmatrix(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void xt_ldmatrix_transposed(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
/* c += a b for 16 x 8, 16 deep. */
__device__ inline void xt_mma_sync(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

/* c = a b^T: 64 rows of tile `a` from `row` on, all rows of `b`; both WIDTH wide. */
template <int J, int A_ROWS, int WIDTH>
__device__ inline void xt_mma_rows(float (&c)[J][4], uint32_t a, int row, uint32_t b) {
    constexpr int B_ROWS = 8 * J, PANEL = xt_panel<WIDTH>;
#if XT_WGMMA
    a += (uint32_t)row * PANEL * 2;
#pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
        constexpr int A_PANEL = xt_panel_bytes<A_ROWS, WIDTH>;
        constexpr int B_PANEL = xt_panel_bytes<B_ROWS, WIDTH>;
        uint32_t inside = k % PANEL * 2;
        xt_wgmma_rows(c, xt_mma_tile<WIDTH>(a + k / PANEL * A_PANEL + inside, 16),
                      xt_mma_tile<WIDTH>(b + k / PANEL * B_PANEL + inside, 16), k > 0);
    }
#else
    int lane = (int)threadIdx.x % 32;
    row += (int)threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[j][e] = 0;
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        uint32_t left[4];
        xt_ldmatrix(left, a + xt_chunk_at<A_ROWS, WIDTH>(row + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int j = 0; j < J; j += 2) {
            uint32_t right[4];
            xt_ldmatrix(right, b + xt_chunk_at<B_ROWS, WIDTH>(8 * j + lane % 8 + lane / 16 * 8,
                                                              2 * k + lane / 8 % 2));
            xt_mma_sync(c[j], left, right[0], right[1]);
            xt_mma_sync(c[j + 1], left, right[2], right[3]);
        }
    }
#endif
    (void)PANEL;
}

/* c += a b: `a` in registers, 16 K wide; columns [column, column + 8 J) of tile `b`, 16 K rows of
   WIDTH. `column` is a multiple of a panel. */
template <int WIDTH, int J, int K>
__device__ inline void xt_mma_columns(float (&c)[J][4], const uint32_t (&a)[K][4], uint32_t b,
                                      int column = 0) {
    constexpr int ROWS = 16 * K, PANEL = xt_panel<WIDTH>;
#if XT_WGMMA
    constexpr int STEP = PANEL == 32 ? 4 : J < 16 ? J : 16;
    static_assert(J % STEP == 0, "whole steps");
    b += (uint32_t)(column / PANEL) * xt_panel_bytes<ROWS, WIDTH>;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int j = 0; j < J; j += STEP)
            xt_wgmma_columns<STEP>(
                (float(&)[STEP][4])c[j], a[k],
                xt_mma_tile<WIDTH>(b + j * 8 / PANEL * xt_panel_bytes<ROWS, WIDTH> + k * PANEL * 32,
                                   xt_panel_bytes<ROWS, WIDTH>));
#else
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int j = 0; j < J; j += 2) {
            uint32_t right[4];
            xt_ldmatrix_transposed(right, b + xt_chunk_at<ROWS, WIDTH>(16 * k + lane % 16,
                                                                       column / 8 + j + lane / 16));
            xt_mma_sync(c[j], a[k], right[0], right[1]);
            xt_mma_sync(c[j + 1], a[k], right[2], right[3]);
        }
#endif
    (void)PANEL;
}

/*
 * Rows of a result to memory as bf16, row r of lane l times by[r]: 64 rows of d elements, `stride`
 * apart, of which `rows` exist. `tile` is room for 64 x 8 J in shared memory that the warpgroup no
 * longer reads. `aligned`: as xt_load_tile.
 */
template <int J>
__device__ inline void xt_save_rows(const float (&c)[J][4], const float (&by)[2], uint32_t tile,
                                    __nv_bfloat16 *to, int64_t stride, int64_t rows, int d,
                                    bool aligned) {
    constexpr int WIDTH = 8 * J;
    int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t x = xt_pack(c[j][2 * half] * by[half], c[j][2 * half + 1] * by[half]);
            int r = first + lane / 4 + 8 * half;
            asm volatile(
                "st.shared.b32 [%0], %1;" ::"r"(tile + xt_chunk_at<64, WIDTH>(r, j) + lane % 4 * 4),
                "r"(x)
                : "memory");
        }
    __syncwarp();
    for (int i = lane; i < 16 * J; i += 32) {
        int r = first + i / J, chunk = i % J;
        uint32_t x[4];
        if (r >= rows || 8 * chunk >= d) continue;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(tile + xt_chunk_at<64, WIDTH>(r, chunk))
                     : "memory");
        __nv_bfloat16 *at = to + r * stride + 8 * chunk;
        if (aligned && 8 * chunk + 8 <= d) {
            *(uint4 *)at = make_uint4(x[0], x[1], x[2], x[3]);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (8 * chunk + e < d)
                at[e] = __ushort_as_bfloat16((unsigned short)(x[e / 2] >> 16 * (e % 2)));
    }
}

#endif
