/*
 * tiles.h: bf16 tiles in shared memory for the tensor cores, and results in the registers of a
 * warpgroup, 128 threads.
 *
 * A tile is ROWS rows of WIDTH elements, cut in panels of 64 (or 32) columns that lie one after
 * another; the 16-byte chunks of a row are swizzled within their panel by the row, which is the
 * pattern of the tensor cores' own 128-byte (64-byte) mode. Tiles start at multiples of 1024 bytes.
 *
 * Warp w of the warpgroup has rows 16 w to 16 w + 15 of a 64 x N result: c[j][e] of lane l is the
 * element of row l / 4 + e / 2 * 8 and column 8 j + l % 4 * 2 + e % 2.
 */
#ifndef XT_CUDA_TILES_H
#define XT_CUDA_TILES_H

#include "cuda.h"

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
/* Until the copies of this thread are done. */
__device__ inline void xt_copies_wait() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
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

/* ---- results --------------------------------------------------------------------------------- */

/* f(j, e) for each element of a thread's. */
template <int J, class F> __device__ inline void xt_each(F f) {
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) f(j, e);
}

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
