/*
 * attention_wgmma.h: what the kernels of tiled attention share where the tensor cores work beside
 * the warps (wgmma, compute capability 9.0a).
 *
 * A block stays on its multiprocessor and takes one item of work, a tile of 64 rows a warpgroup,
 * after the other. Its first warpgroup brings tiles: those that an item owns into one of TURNS
 * places, those that it meets into one of STAGES. The other warpgroups compute, each at its own
 * pace; barriers say when a place is full and when nobody reads it any more.
 */
#ifndef XT_CUDA_ATTENTION_WGMMA_H
#define XT_CUDA_ATTENTION_WGMMA_H

#include "attention_tiles.h"
#include "pipe.h"
#include "wgmma.h"

#define XT_BRINGERS 128 /* threads of the first warpgroup */

/* Blocks for so many items, `blocks` on a multiprocessor. */
static inline unsigned xt_persistent_blocks(const struct xt_ctx *ctx, int64_t items, int blocks) {
    const int64_t most = blocks * xt_cuda_multiprocessors(ctx);
    return (unsigned)(items < most ? items : most);
}

/* Uses of the places of a ring so far. */
template <int PLACES> struct xt_ring {
    uint32_t used = 0;
    __device__ uint32_t place() const { return used % PLACES; }
    __device__ uint32_t before() const { return (used + PLACES - 1) % PLACES; }
    __device__ uint32_t phase() const { return used / PLACES & 1; } /* of the barrier `full` */
};

/* How registers are shared: BRING of a thread that brings, `compute` of one that computes. */
template <int GROUPS, int BLOCKS, int BRING> struct xt_registers {
    static constexpr int each = 65536 / ((GROUPS + 1) * 128 * BLOCKS) / 8 * 8;
    static constexpr int bring = BRING;
    static constexpr int rest = (each * (GROUPS + 1) - bring) / GROUPS / 8 * 8;
    static constexpr int compute = rest < 240 ? rest : 240;
};
template <class REGISTERS> __device__ inline void xt_registers_to_bring() {
    if constexpr (REGISTERS::each < REGISTERS::compute) xt_registers_lower<REGISTERS::bring>();
}
template <class REGISTERS> __device__ inline void xt_registers_to_compute() {
    if constexpr (REGISTERS::each < REGISTERS::compute) xt_registers_raise<REGISTERS::compute>();
}

/* By a thread that brings: a place is full once its copies are done, and what it has written
   itself is there. Such barriers count twice XT_BRINGERS. */
__device__ inline void xt_brought(uint32_t full, bool aligned) {
    if (aligned) {
        xt_mbarrier_arrive_copied(full);
    } else {
        xt_tiles_arrived(); /* what this thread has stored */
        xt_mbarrier_arrive(full);
    }
    xt_mbarrier_arrive(full);
}

/* By the warps that compute, when they no longer read a place. Such barriers count warps. */
__device__ inline void xt_done_with(uint32_t empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) xt_mbarrier_arrive(empty);
}

/* A thread's barriers of a ring of `places`, `full` and behind them `empty`. */
__device__ inline void xt_ring_init(uint32_t barriers, int places, int groups) {
    for (int i = 0; i < places; i++) {
        xt_mbarrier_init(barriers + 8 * i, 2 * XT_BRINGERS);
        xt_mbarrier_init(barriers + 8 * (places + i), 4 * groups);
    }
}

/*
 * The bringing warpgroup's loop: bring(at, place, full) for each item of this block, which are
 * handed out in order to whichever block asks first: results do not depend on who it is. `items` is
 * their number, `slots` are TURNS numbers in shared memory by which all learn the item, -1 the end.
 */
template <int TURNS, class F>
__device__ inline void xt_bring_items(int64_t items, struct xt_cuda_counter *counter,
                                      int64_t *slots, uint32_t full, F bring) {
    const uint32_t empty = full + 8 * TURNS;
    const bool first = threadIdx.x == 0;
    int64_t at = blockIdx.x;
    for (struct xt_ring<TURNS> turn;; turn.used++) {
        int64_t *slot = slots + turn.place();
        const uint32_t this_full = full + 8 * turn.place();
        xt_mbarrier_wait(empty + 8 * turn.place(), turn.phase() ^ 1);
        if (first) *slot = at < items ? at : -1;
        xt_barrier_wait<XT_BRINGERS>(15);
        const int64_t item = *slot;
        if (item < 0) {
            xt_brought(this_full, false);
            break;
        }
        if (first) at = (int64_t)gridDim.x + atomicAdd(&counter->next, 1u);
        bring(item, turn.place(), this_full);
    }
    xt_copies_wait();
    if (first && atomicAdd(&counter->left, 1u) == gridDim.x - 1) *counter = {0, 0};
}

/* A tile for each warpgroup that computes: 64 rows each. */
template <int D, int GROUPS>
__device__ inline void xt_bring_owned(uint32_t to, const __nv_bfloat16 *from, int64_t stride,
                                      int64_t rows, int d, bool aligned) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int64_t first = g * 64 < rows ? g * 64 : 0; /* of none, an address that may be read */
        xt_load_tile<64, D, XT_BRINGERS>(to + g * xt_tile_bytes<64, D>, from + first * stride,
                                         stride, rows - g * 64, d, aligned);
    }
}

#endif
