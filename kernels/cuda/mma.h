/*
 * mma.h: products of bf16 tiles by a warpgroup on any tensor cores (mma.sync, compute capability
 * 8.0): a product is done when the call is. Tiles and results are tiles.h's.
 *
 * A kernel that uses these has its body under XT_MMA: it is never launched where wgmma.h serves.
 */
#ifndef XT_CUDA_MMA_H
#define XT_CUDA_MMA_H

#include "tiles.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define XT_MMA 0
#else
#define XT_MMA 1
#endif

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

/* c = a b^T: 64 rows of tile `a` from `row` on, all rows of `b`; both WIDTH wide. */
template <int J, int A_ROWS, int WIDTH>
__device__ inline void xt_mma_rows(float (&c)[J][4], uint32_t a, int row, uint32_t b) {
    constexpr int B_ROWS = 8 * J;
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
}

/* c += a b: `a` in registers, 16 K wide; columns [column, column + 8 J) of tile `b`, 16 K rows of
   WIDTH. `column` is a multiple of a panel. */
template <int WIDTH, int J, int K>
__device__ inline void xt_mma_columns(float (&c)[J][4], const uint32_t (&a)[K][4], uint32_t b,
                                      int column = 0) {
    constexpr int ROWS = 16 * K;
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
}

#endif
