/*
 * pipe.h: barriers in shared memory (mbarrier) between the warps that bring tiles and those that
 * use them, and registers moved from the ones to the others. Compute capability 9.0a, as wgmma.h.
 */
#ifndef XT_CUDA_PIPE_H
#define XT_CUDA_PIPE_H

#include "tiles.h"

/* A barrier completes a phase when `count` threads have arrived; its phases are 0, 1, 0, ... Of a
   new one, phase 1 counts as complete. */
__device__ inline void xt_mbarrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void xt_mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Once the copies (cp.async) that this thread has started so far are done. */
__device__ inline void xt_mbarrier_arrive_copied(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void xt_mbarrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;}" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}
/* What other threads have written to shared memory, for the tensor cores, after a wait for it. */
__device__ inline void xt_tiles_arrived() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* A named barrier, 1 to 15, of the threads that wait for it and those that only arrive. */
template <int THREADS> __device__ inline void xt_barrier_wait(int name) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(THREADS) : "memory");
}
template <int THREADS> __device__ inline void xt_barrier_arrive(int name) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "n"(THREADS) : "memory");
}

/* All warps of a warpgroup: from here on it has COUNT registers a thread. */
template <int COUNT> __device__ inline void xt_registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ inline void xt_registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#endif
