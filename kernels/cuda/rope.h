/*
 * rope.h: the angles of rotations on the device, as the CPU computes them, and how heads lie.
 */
#ifndef XT_CUDA_ROPE_H
#define XT_CUDA_ROPE_H

#include <math.h>

#include "../both.h"
#include "cuda.h"

#define XT_ROPE_PAIRS 256 /* of one launch: their frequencies travel as an argument */

/* Frequencies of pairs first .. first + n - 1. */
template <class R> struct xt_frequencies {
    int64_t first;       /* pair */
    int n;               /* pairs */
    R at[XT_ROPE_PAIRS]; /* angle of a pair at position 1 */
};

/* CPU's own functions, so that the angles have the same bits. */
static inline float xt_rope_power(float x, float p) {
    return powf(x, p);
}
static inline double xt_rope_power(double x, double p) {
    return pow(x, p);
}

/* Of the pairs from `first` on of rows of D elements, as many as fit. */
template <class R>
static struct xt_frequencies<R> xt_frequencies_of(R theta, int64_t first, int64_t D) {
    struct xt_frequencies<R> f = {};
    const int64_t left = D / 2 - first;
    f.first = first;
    f.n = (int)(left < XT_ROPE_PAIRS ? left : XT_ROPE_PAIRS);
    for (int i = 0; i < f.n; i++) f.at[i] = 1 / xt_rope_power(theta, (R)(2 * (first + i)) / (R)D);
    return f;
}

/* Where each place of a sequence stands. */
struct xt_positions {
    const void *data; /* NULL: offset + s */
    bool wide;        /* i64, else i32 */
    int64_t b, s;     /* strides in elements; b is 0 where all sequences share theirs */
    int64_t offset;   /* of place 0, without data */
};

/* p: (S) or (B, S), or NULL. */
static inline struct xt_positions xt_positions_of(const struct xt_tensor *p, int64_t offset) {
    struct xt_positions at = {};
    at.offset = offset;
    if (p) {
        at.data = xt_data(p);
        at.wide = p->dtype == XT_I64;
        at.b = p->ndim == 2 ? p->stride[0] : 0;
        at.s = p->stride[p->ndim - 1];
    }
    return at;
}

__device__ inline int64_t xt_position_at(const struct xt_positions &at, int64_t b, int64_t s) {
    if (!at.data) return at.offset + s;
    const int64_t place = b * at.b + s * at.s;
    return at.wide ? ((const int64_t *)at.data)[place] : (int64_t)((const int32_t *)at.data)[place];
}

/* Of one pair at one position; sign is -1 to turn back. */
template <class R>
__device__ inline void xt_angle(R position, R frequency, R sign, R *cosine, R *sine) {
    double turn_s, turn_c;
    const R angle = position * frequency;
    xt_sine_cosine((double)angle, &turn_s, &turn_c);
    *cosine = (R)turn_c;
    *sine = sign * (R)turn_s;
}

/* A tensor (B, S, H, D) and how its outer dimensions lie. */
struct xt_rope_heads {
    int64_t B, S, H, D; /* shape */
    int64_t b, s, h;    /* strides in elements */
};

static inline struct xt_rope_heads xt_rope_heads_of(const struct xt_tensor *x) {
    const struct xt_rope_heads q = {x->shape[0],  x->shape[1],  x->shape[2], x->shape[3],
                                    x->stride[0], x->stride[1], x->stride[2]};
    return q;
}

/* Whether every row begins at a multiple of 16 bytes, of which an element takes 1 / lanes. */
static inline bool xt_rope_heads_aligned(const struct xt_tensor *x, int lanes) {
    bool aligned = xt_is_aligned16(xt_data(x));
    for (int d = 0; d < 3; d++)
        aligned = aligned && (x->shape[d] == 1 || x->stride[d] % lanes == 0);
    return aligned;
}

#endif
