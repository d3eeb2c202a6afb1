/*
 * cpu.h: what the CPU kernel files share.
 *
 * Every file of this folder is compiled once for each instruction set (x86-64, -v3, -v4), the set
 * named by XT_ISA; symbols that leave a file carry it, through XT_CPU. Which set runs is chosen
 * when a context is made. Work is split among threads by shape alone, and every sum has a fixed
 * order, so that the number of threads never shows in the bits.
 */
#ifndef XT_CPU_H
#define XT_CPU_H

#include "../../runtime/op.h"

#define XT_PASTE2(a, b, c) a##_##b##_##c
#define XT_PASTE(a, b, c) XT_PASTE2(a, b, c)
/* XT_CPU(norm) is xt_cpu_norm_v3 when compiled for v3. */
#define XT_CPU(name) XT_PASTE(xt_cpu, name, XT_ISA)

/* Below this many elements a loop stays on one thread: waking the others costs more
   (microseconds). */
#define XT_CPU_GRAIN 16384

/* Converts n contiguous elements between a float dtype and f32. */
void XT_CPU(load_f32)(const void *from, enum xt_dtype dtype, int64_t n, float *to);
void XT_CPU(store_f32)(const float *from, enum xt_dtype dtype, int64_t n, void *to);
/* The same between any two dtypes, rounding once; float to integer truncates and saturates. */
void XT_CPU(convert)(const void *from, enum xt_dtype from_dtype, int64_t n, void *to,
                     enum xt_dtype to_dtype);

/* Copies shape's elements of `bytes` (1, 2, 4 or 8) each; strides in elements, any. The two places
   do not overlap. */
void XT_CPU(copy_strided)(struct xt_ctx *ctx, size_t bytes, int ndim, const int64_t *shape,
                          void *to, const int64_t *to_stride, const void *from,
                          const int64_t *from_stride);

#endif
