/*
 * fold.h: what reduce.c and along.c share: the types elements are worked on in, and how a run of
 * them is folded.
 *
 * A sum has one shape whatever the threads: eight elements are added as a tree in their own type,
 * such sums in double, in LANES lanes.
 */
#ifndef XT_CPU_FOLD_H
#define XT_CPU_FOLD_H

#include "cpu.h"
#include "math.h"

#include <string.h>

/* The type in which elements of a dtype are worked on. */
enum work { WORK_F32, WORK_F64, WORK_I64 };

static inline enum work work_of(enum xt_dtype dtype) {
    if (dtype == XT_F64) return WORK_F64;
    return xt_dtype_is_float(dtype) ? WORK_F32 : WORK_I64;
}

static inline size_t work_bytes(enum work work) {
    return work == WORK_F32 ? 4 : 8;
}

static inline bool is_work(enum xt_dtype dtype) {
    return dtype == XT_F32 || dtype == XT_F64 || dtype == XT_I64;
}

/* n elements of a dtype, widened to its work type; itself where nothing is to be done. */
static inline const void *widen(const void *from, enum xt_dtype dtype, int64_t n, void *to) {
    int64_t *wide = to;
    switch (dtype) {
    case XT_BF16:
    case XT_F16: XT_CPU(load_f32)(from, dtype, n, to); return to;
    case XT_I32:
        for (int64_t i = 0; i < n; i++) wide[i] = ((const int32_t *)from)[i];
        return to;
    case XT_U8:
        for (int64_t i = 0; i < n; i++) wide[i] = ((const uint8_t *)from)[i];
        return to;
    default: return from;
    }
}

/* The other way; `from` and `to` may not be the same place. */
static inline void narrow(const void *from, enum xt_dtype dtype, int64_t n, void *to) {
    const int64_t *wide = from;
    switch (dtype) {
    case XT_BF16:
    case XT_F16: XT_CPU(store_f32)(from, dtype, n, to); break;
    case XT_I32:
        for (int64_t i = 0; i < n; i++) ((int32_t *)to)[i] = (int32_t)wide[i];
        break;
    case XT_U8:
        for (int64_t i = 0; i < n; i++) ((uint8_t *)to)[i] = (uint8_t)wide[i];
        break;
    default: memcpy(to, from, (size_t)n * xt_dtype_bytes(dtype));
    }
}

/* Running results: double for floats, 64-bit integers for integers. */
union total {
    double f;
    int64_t i;
};

#define PIECE 1024 /* elements widened at a time */
#define LANES 16

/* x(at, 0) + ... + x(at, 7). */
#define TREE8(x, at)                                                                               \
    (((x(at, 0) + x(at, 1)) + (x(at, 2) + x(at, 3))) +                                             \
     ((x(at, 4) + x(at, 5)) + (x(at, 6) + x(at, 7))))
#define IN_RUN(j, k) x[(j) + (k)*LANES]

static inline double add_lanes(double *lane) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
}

#define SUM_RUN(name, TYPE)                                                                        \
    static inline double sum_run_##name(const TYPE *x, int64_t n) {                                \
        double lane[LANES] = {0}, rest = 0;                                                        \
        for (; n >= 8 * LANES; n -= 8 * LANES, x += 8 * LANES)                                     \
            for (int j = 0; j < LANES; j++) lane[j] += (double)TREE8(IN_RUN, j);                   \
        for (; n >= LANES; n -= LANES, x += LANES)                                                 \
            for (int j = 0; j < LANES; j++) lane[j] += (double)x[j];                               \
        for (int64_t j = 0; j < n; j++) rest += (double)x[j];                                      \
        return add_lanes(lane) + rest;                                                             \
    }

SUM_RUN(f32, float)
SUM_RUN(f64, double)

/* NaN wins and stays. For integers the second test is never true. */
#define WINS(x, op, best) ((x)op(best) || (x) != (x))

/* `worst` loses to everything and is the answer for no elements. */
#define EXTREME_RUN(name, TYPE, op, worst)                                                         \
    static inline TYPE name(const TYPE *x, int64_t n) {                                            \
        enum { WIDE = 32 };                                                                        \
        TYPE lane[WIDE], best = worst;                                                             \
        if (n >= WIDE) {                                                                           \
            for (int j = 0; j < WIDE; j++) lane[j] = worst;                                        \
            for (; n >= WIDE; n -= WIDE, x += WIDE)                                                \
                for (int j = 0; j < WIDE; j++) lane[j] = WINS(x[j], op, lane[j]) ? x[j] : lane[j]; \
            for (int j = 0; j < WIDE; j++) best = WINS(lane[j], op, best) ? lane[j] : best;        \
        }                                                                                          \
        for (int64_t j = 0; j < n; j++) best = WINS(x[j], op, best) ? x[j] : best;                 \
        return best;                                                                               \
    }

EXTREME_RUN(max_run_f32, float, >, -INFINITY)
EXTREME_RUN(max_run_f64, double, >, -INFINITY)
EXTREME_RUN(max_run_i64, int64_t, >, INT64_MIN)

/* The kernels of along.c. */
#define ALONG_KERNEL(name)                                                                         \
    enum xt_status XT_CPU(name)(struct xt_ctx * ctx, const struct xt_launch *l)
ALONG_KERNEL(softmax);
ALONG_KERNEL(log_softmax);
ALONG_KERNEL(logsumexp);
ALONG_KERNEL(softmax_grad);
ALONG_KERNEL(log_softmax_grad);
ALONG_KERNEL(logsumexp_grad);
ALONG_KERNEL(cumsum);
ALONG_KERNEL(cumsum_grad);
ALONG_KERNEL(amax_grad);
ALONG_KERNEL(norm_grad);
ALONG_KERNEL(argmax);
ALONG_KERNEL(topk);
#undef ALONG_KERNEL

#endif
