/*
 * loss.h: what the losses of rows of logits share, whether the rows lie in memory (loss.cu) or are
 * made block by block (linear_loss.cu): options, labels, sums over a row and over all rows.
 */
#ifndef XT_CUDA_LOSS_H
#define XT_CUDA_LOSS_H

#include <float.h>
#include <math.h>
#include <stdio.h>

#include "rows.h"

#define THREADS 256 /* of a block; a long row has all of them, a short one (SHORT) a warp */
#define SHORT 1024
#define SUM_THREADS 1024 /* of the one block that adds the rows' losses */
#define AHEAD 4          /* vectors of a row that a thread has under way at a time */

enum reduction { MEAN, SUM, NONE };

struct options {
    enum reduction reduction;
    int64_t ignore;   /* the label of rows that count nowhere */
    int64_t classes;  /* labels are below it */
    double smoothing; /* the share of the target spread over all classes */
    double each;      /* 1 / classes */
};

static inline struct options options_of(const union xt_attr *attrs, int64_t classes) {
    struct options o = {(enum reduction)attrs[0].i, attrs[1].i, classes, attrs[2].f,
                        1 / (double)classes};
    return o;
}

struct labels {
    const void *data;
    bool wide; /* i64, else i32 */
    struct xt_places at;
};

static inline struct labels labels_of(const struct xt_tensor *t) {
    struct labels l;
    l.data = t->storage->data ? xt_data(t) : NULL;
    l.wide = t->dtype == XT_I64;
    l.at = xt_places_of(t, t->ndim);
    return l;
}

/* Of contiguous labels. */
static __device__ inline int64_t label_in_order(const struct labels &l, int64_t i) {
    return l.wide ? ((const int64_t *)l.data)[i] : (int64_t)((const int32_t *)l.data)[i];
}

static __device__ inline int64_t label_at(const struct labels &l, int64_t i) {
    return label_in_order(l, xt_place(l.at, i));
}

static inline struct xt_cuda_fault label_fault(struct xt_ctx *ctx, const struct xt_launch *l,
                                               const struct options *o) {
    char wanted[96];
    snprintf(wanted, sizeof wanted, "there are %lld classes (0 to %lld) and the ignored is %lld",
             (long long)o->classes, (long long)o->classes - 1, (long long)o->ignore);
    return xt_cuda_fault(ctx, l->op, "labels", wanted);
}

/* ---- sums over all rows: one block ----------------------------------------------------------- */

/* How many labels are not the ignored one. */
static __device__ inline int64_t valid_labels(const struct labels &labels, int64_t ignore) {
    int64_t count = 0;
    for (int64_t i = threadIdx.x; i < labels.at.count; i += SUM_THREADS)
        count += label_at(labels, i) != ignore;
    return xt_block_sum<SUM_THREADS>(count);
}

/* What a row counts in a mean; of nothing, the mean is to be 0. */
static __global__ void __launch_bounds__(SUM_THREADS)
    write_part(const __grid_constant__ struct labels labels, int64_t ignore, double *out) {
    const int64_t valid = valid_labels(labels, ignore);
    if (threadIdx.x == 0) *out = valid > 0 ? 1 / (double)valid : 1;
}

template <class R>
static __global__ void __launch_bounds__(SUM_THREADS)
    add_losses(const R *losses, int64_t rows, const double *part, R *out) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < rows; i += SUM_THREADS) sum += (double)losses[i];
    sum = xt_block_sum<SUM_THREADS>(sum);
    if (threadIdx.x == 0) *out = (R)(part ? sum * *part : sum);
}

/* What a row counts in a mean, 8 bytes of scratch, or NULL: 1. */
static inline enum xt_status part_of(struct xt_ctx *ctx, const struct options *o,
                                     const struct labels *labels, double **out) {
    *out = NULL;
    if (o->reduction != MEAN) return XT_OK;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, sizeof(double), (void **)out));
    write_part<<<1, SUM_THREADS, 0, xt_cuda_stream(ctx)>>>(*labels, o->ignore, *out);
    return xt_cuda_launched(ctx);
}

/* ---- one row --------------------------------------------------------------------------------- */

/*
 * e^x on the way to a T. For the 16-bit floats by the device's 2^x, whose relative error, 2^-22 +
 * |x| 2^-23 with the rounding of x log2(e), is nothing beside their own 2^-9 and 2^-12; what is
 * below 2^-126 becomes 0. In the sum of n terms e^(x - largest) errors weigh as the terms do, so
 * that |x| is log(n) at most on average (with the sum's logarithm it is their entropy): the sum,
 * and with it a loss, is right to 2^-22 (1 + log(n) / 2), were all errors of one sign. With 50000
 * classes that is 1.5e-6, beside f32's own roundings of 1e-6 in a loss of log(50000).
 */
template <class T> static __device__ xt_real<T> exp_for(xt_real<T> x) {
    if constexpr (sizeof(T) == 2) {
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
        return y;
    } else {
        return exp(x);
    }
}

/* Calls take(v) with arrays v of the elements of a row, at any address: this thread's share of
   LANES. AHEAD vectors are loaded before the first is used, so that memory is kept busy. */
template <class T, int LANES, class F>
static __device__ inline void each_of_row(const T *x, int64_t n, int lane, F take) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<T>, TILE = LANES * N;
    int64_t head = (int64_t)((16 - ((uintptr_t)x & 15)) & 15) / (int64_t)sizeof(T);
    head = head < n ? head : n;
    const int64_t end = head + (n - head) / N * N;
    int64_t i = head + (int64_t)lane * N;
    for (; i + (AHEAD - 1) * TILE < end; i += AHEAD * TILE) {
        R v[AHEAD * N];
#pragma unroll
        for (int t = 0; t < AHEAD; t++) xt_load<N>(x + i + t * TILE, v + t * N);
        take(v);
    }
    for (; i < end; i += TILE) {
        R v[N];
        xt_load<N>(x + i, v);
        take(v);
    }
    const int64_t rest[] = {lane < head ? lane : n, end + lane}; /* before and after the vectors */
    for (int64_t k : rest)
        if (k < n) {
            const R v[] = {xt_to<R>(x[k])};
            take(v);
        }
}

template <class R> static __device__ R lowest();
template <> __device__ float lowest() {
    return -FLT_MAX;
}
template <> __device__ double lowest() {
    return -DBL_MAX;
}

/* What a row comes to. */
template <class R> struct row_sums {
    R most;     /* the largest x */
    R sum;      /* of e^(x - most) */
    R lse;      /* log of the sum of e^x */
    double all; /* the sum of x, when asked for */
};

/* The sums of a row whose gradient, if any, is of type To. The largest starts at the lowest finite
   number, so that -infinity adds e^-infinity = 0. */
template <class To, int LANES, class T>
static __device__ inline struct row_sums<xt_real<T>> sum_row(const T *x, int64_t n, bool with_all) {
    using R = xt_real<T>;
    R most = lowest<R>(), sum = 0, all = 0;
    each_of_row<T, LANES>(x, n, xt_lane<LANES>(), [&](const auto &v) {
        R top = most, part = 0;
        for (R u : v) top = fmax(top, u); /* passes a NaN over: the sum is to have it */
        for (R u : v) part += exp_for<To>(u - top);
        sum = sum * exp_for<To>(most - top) + part;
        most = top;
        if (with_all)
            for (R u : v) all += u;
    });
    struct row_sums<R> s;
    s.most = xt_group_max<LANES>(most);
    s.sum = (R)xt_group_sum<LANES>((double)(sum * exp(most - s.most)));
    s.lse = s.most + log(s.sum);
    s.all = with_all ? xt_group_sum<LANES>((double)all) : 0;
    return s;
}

/* lse - x[label], blended with the mean over all classes. */
template <class R>
static __device__ inline R row_loss(const struct row_sums<R> &s, R at_label,
                                    const struct options &o) {
    const R smoothing = (R)o.smoothing;
    const R loss = s.lse - at_label;
    if (smoothing == 0) return loss;
    return (1 - smoothing) * loss + smoothing * (s.lse - (R)(s.all * o.each));
}

/* The label of row i when it is good; a bad one is noted and then `ignore`. */
static __device__ inline int64_t checked_label(int64_t label, const struct options &o,
                                               const struct xt_cuda_fault &fault, int64_t i,
                                               bool note) {
    if (label == o.ignore || (label >= 0 && label < o.classes)) return label;
    if (note) xt_note_fault(fault, i, label);
    return o.ignore;
}

/* ---- what comes from upstream ---------------------------------------------------------------- */

/* Numbers that gradients are scaled by: one for all rows, or one a row. */
template <class R> struct upstream {
    const R *data;       /* NULL: 1 */
    bool each;           /* one a row, else one in all */
    struct xt_places at; /* of those */
    const double *part;  /* what a row counts, or NULL: 1 */
};

template <class R> static __device__ R upstream_to_all(const struct upstream<R> &u) {
    const R g = u.data ? *u.data : 1;
    return u.part ? (R)((double)g * *u.part) : g;
}

template <class R> static __device__ R upstream_at(const struct upstream<R> &u, int64_t i) {
    if (u.each) return u.data[xt_place(u.at, i)];
    return upstream_to_all(u);
}

template <class R>
static struct upstream<R> upstream_of(const struct xt_tensor *grad, bool each, const double *part) {
    struct upstream<R> u = {};
    u.data = grad && grad->storage->data ? (const R *)xt_data(grad) : NULL;
    u.each = each;
    if (each) u.at = xt_places_of(grad, grad->ndim);
    u.part = part;
    return u;
}

#endif
