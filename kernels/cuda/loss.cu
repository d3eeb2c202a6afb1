/*
 * loss.cu: cross entropy on the device, from logits and from the factors of logits that are never
 * held whole.
 *
 * A row is read once for its loss: every thread keeps the largest so far and the sum of e^(x -
 * largest), and the threads' pairs are combined at the end, in f64. A label out of range counts as
 * ignored and is noted.
 */
#include <float.h>
#include <math.h>
#include <stdio.h>

#include "rows.h"

#define THREADS 256 /* of a block; a long row has all of them, a short one (SHORT) a warp */
#define SHORT 1024
#define SUM_THREADS 1024 /* of the one block that adds the rows' losses */
#define LINEAR_THREADS 512
/* Logits that linear_cross_entropy holds at a time, at most, and rows of them. */
#define LINEAR_LOGITS ((int64_t)1 << 27)
#define LINEAR_ROWS 8192
#define LINEAR_LEAST 256
#define PAD 64 /* rows of logits begin at multiples of it, in elements */

enum reduction { MEAN, SUM, NONE };

struct options {
    enum reduction reduction;
    int64_t ignore;   /* the label of rows that count nowhere */
    int64_t classes;  /* labels are below it */
    double smoothing; /* the share of the target spread over all classes */
};

static struct options options_of(const union xt_attr *attrs, int64_t classes) {
    struct options o = {(enum reduction)attrs[0].i, attrs[1].i, classes, attrs[2].f};
    return o;
}

struct labels {
    const void *data;
    bool wide; /* i64, else i32 */
    struct xt_places at;
};

static struct labels labels_of(const struct xt_tensor *t) {
    struct labels l;
    l.data = t->storage->data ? xt_data(t) : NULL;
    l.wide = t->dtype == XT_I64;
    l.at = xt_places_of(t, t->ndim);
    return l;
}

static __device__ int64_t label_at(const struct labels &l, int64_t i) {
    const int64_t at = xt_place(l.at, i);
    return l.wide ? ((const int64_t *)l.data)[at] : (int64_t)((const int32_t *)l.data)[at];
}

static struct xt_cuda_fault label_fault(struct xt_ctx *ctx, const struct xt_launch *l,
                                        const struct options *o) {
    char wanted[96];
    snprintf(wanted, sizeof wanted, "there are %lld classes (0 to %lld) and the ignored is %lld",
             (long long)o->classes, (long long)o->classes - 1, (long long)o->ignore);
    return xt_cuda_fault(ctx, l->op, "labels", wanted);
}

/* ---- sums over all rows: one block ----------------------------------------------------------- */

/* How many labels are not the ignored one. */
static __device__ int64_t valid_labels(const struct labels &labels, int64_t ignore) {
    int64_t count = 0;
    for (int64_t i = threadIdx.x; i < labels.at.count; i += SUM_THREADS)
        count += label_at(labels, i) != ignore;
    return xt_block_sum<SUM_THREADS>(count);
}

static __global__ void __launch_bounds__(SUM_THREADS)
    count_rows(const struct labels labels, int64_t ignore, int64_t *out) {
    const int64_t valid = valid_labels(labels, ignore);
    if (threadIdx.x == 0) *out = valid;
}

/* What a sum of losses is divided by; of nothing, the mean is to be 0. */
static __global__ void __launch_bounds__(SUM_THREADS)
    write_divisor(const struct labels labels, int64_t ignore, double *out) {
    const int64_t valid = valid_labels(labels, ignore);
    if (threadIdx.x == 0) *out = valid > 0 ? (double)valid : 1;
}

template <class R>
static __global__ void __launch_bounds__(SUM_THREADS)
    add_losses(const R *losses, int64_t rows, const double *divisor, R *out) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < rows; i += SUM_THREADS) sum += (double)losses[i];
    sum = xt_block_sum<SUM_THREADS>(sum);
    if (threadIdx.x == 0) *out = (R)(divisor ? sum / *divisor : sum);
}

/* The divisor of a mean, 8 bytes of scratch, or NULL: 1. */
static enum xt_status divisor_of(struct xt_ctx *ctx, const struct options *o,
                                 const struct labels *labels, double **out) {
    *out = NULL;
    if (o->reduction != MEAN) return XT_OK;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, sizeof(double), (void **)out));
    write_divisor<<<1, SUM_THREADS, 0, xt_cuda_stream(ctx)>>>(*labels, o->ignore, *out);
    return xt_cuda_launched(ctx);
}

/* ---- one row --------------------------------------------------------------------------------- */

/* Calls take(i, x[i]) for the elements of a row, at any address, this thread's share of LANES. */
template <class T, int LANES, class F>
static __device__ void each_of_row(const T *x, int64_t n, int lane, F take) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<T>;
    int64_t head = (int64_t)((16 - ((uintptr_t)x & 15)) & 15) / (int64_t)sizeof(T);
    head = head < n ? head : n;
    if (lane < head) take((int64_t)lane, xt_to<R>(x[lane]));
    const int64_t end = head + (n - head) / N * N;
    for (int64_t i = head + (int64_t)lane * N; i < end; i += LANES * N) {
        R v[N];
        xt_load<N>(x + i, v);
#pragma unroll
        for (int k = 0; k < N; k++) take(i + k, v[k]);
    }
    if (end + lane < n) take(end + lane, xt_to<R>(x[end + lane]));
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

/* The largest starts at the lowest finite number, so that -infinity adds e^-infinity = 0. */
template <class T, int LANES>
static __device__ struct row_sums<xt_real<T>> sum_row(const T *x, int64_t n, bool with_all) {
    using R = xt_real<T>;
    R most = lowest<R>(), sum = 0, all = 0;
    each_of_row<T, LANES>(x, n, xt_lane<LANES>(), [&](int64_t, R v) {
        const R over = v - most, e = exp(over > 0 ? -over : over);
        sum = over > 0 ? sum * e + 1 : sum + e;
        most = over > 0 ? v : most;
        if (with_all) all += v;
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
static __device__ R row_loss(const struct row_sums<R> &s, R at_label, int64_t n, R smoothing) {
    const R loss = s.lse - at_label;
    if (smoothing == 0) return loss;
    return (1 - smoothing) * loss + smoothing * (s.lse - (R)s.all / (R)n);
}

/* The label of row i; a bad one is noted and then `ignore`. */
static __device__ int64_t checked_label(const struct labels &labels, const struct options &o,
                                        const struct xt_cuda_fault &fault, int64_t i, bool note) {
    const int64_t label = label_at(labels, i);
    if (label == o.ignore || (label >= 0 && label < o.classes)) return label;
    if (note) xt_note_fault(fault, i, label);
    return o.ignore;
}

/* ---- cross_entropy --------------------------------------------------------------------------- */

template <class T, int LANES>
static __global__ void __launch_bounds__(THREADS)
    cross_entropy_rows(const struct xt_rows x, const struct labels labels, const struct options o,
                       const struct xt_cuda_fault fault, xt_real<T> *losses, xt_real<T> *kept) {
    using R = xt_real<T>;
    constexpr int GROUPS = THREADS / LANES;
    for (int64_t i = (int64_t)blockIdx.x * GROUPS + threadIdx.x / LANES; i < x.at.count;
         i += (int64_t)gridDim.x * GROUPS) {
        const bool first = xt_lane<LANES>() == 0;
        const int64_t label = checked_label(labels, o, fault, i, first);
        R lse = 0, loss = 0;
        if (label != o.ignore) {
            const T *row = xt_row<T>(x, i);
            const struct row_sums<R> s = sum_row<T, LANES>(row, x.d, o.smoothing != 0);
            lse = s.lse;
            loss = row_loss(s, xt_to<R>(row[label]), x.d, (R)o.smoothing);
        }
        if (!first) continue;
        losses[i] = loss;
        if (kept) kept[i] = lse;
    }
}

template <class T>
static enum xt_status cross_entropy_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    const struct xt_rows x = xt_rows_of(l->in[0]);
    const struct labels labels = labels_of(l->in[1]);
    const struct options o = options_of(l->attrs, x.d);
    const struct xt_cuda_fault fault = label_fault(ctx, l, &o);
    const int64_t rows = x.at.count;
    const size_t bytes = o.reduction == NONE ? 0 : (size_t)rows * sizeof(R);
    cudaStream_t s = xt_cuda_stream(ctx);
    R *out = l->out[0]->storage->data ? (R *)xt_data(l->out[0]) : NULL;
    R *kept = l->out[1] && rows ? (R *)xt_data(l->out[1]) : NULL;
    R *scratch = NULL;
    double *divisor = NULL;
    enum xt_status status = XT_OK;
    if (bytes) XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&scratch));
    R *losses = o.reduction == NONE ? out : scratch;
    if (rows && x.d <= SHORT)
        cross_entropy_rows<T, 32><<<xt_cuda_blocks(rows, THREADS / 32), THREADS, 0, s>>>(
            x, labels, o, fault, losses, kept);
    else if (rows)
        cross_entropy_rows<T, THREADS>
            <<<xt_cuda_blocks(rows, 1), THREADS, 0, s>>>(x, labels, o, fault, losses, kept);
    XT_GO(xt_cuda_launched(ctx));
    if (o.reduction == NONE) goto done;
    XT_GO(divisor_of(ctx, &o, &labels, &divisor));
    add_losses<R><<<1, SUM_THREADS, 0, s>>>(losses, rows, divisor, out);
    status = xt_cuda_launched(ctx);
done:
    if (divisor) xt_scratch_put(ctx, XT_CUDA, divisor, sizeof *divisor);
    if (bytes) xt_scratch_put(ctx, XT_CUDA, scratch, bytes);
    return status;
}

/* Numbers that gradients are scaled by: one for all rows, or one a row. */
template <class R> struct upstream {
    const R *data;         /* NULL: 1 */
    bool each;             /* one a row, else one in all */
    struct xt_places at;   /* of those */
    const double *divisor; /* NULL: 1 */
};

template <class R> static __device__ R upstream_at(const struct upstream<R> &u, int64_t i) {
    if (u.each) return u.data[xt_place(u.at, i)];
    const double g = u.data ? (double)*u.data : 1;
    return (R)(u.divisor ? g / *u.divisor : g);
}

template <class R>
static struct upstream<R> upstream_of(const struct xt_tensor *grad, bool each,
                                      const double *divisor) {
    struct upstream<R> u = {};
    u.data = grad && grad->storage->data ? (const R *)xt_data(grad) : NULL;
    u.each = each;
    if (each) u.at = xt_places_of(grad, grad->ndim);
    u.divisor = divisor;
    return u;
}

/* (e^(x - lse) - smoothing / n) * by, less (1 - smoothing) * by at the label. */
template <class T, int LANES>
static __global__ void __launch_bounds__(THREADS)
    cross_entropy_grad_rows(const struct xt_rows x, const struct labels labels,
                            const struct options o, const xt_real<T> *lses,
                            const struct upstream<xt_real<T>> up, T *dx) {
    using R = xt_real<T>;
    constexpr int GROUPS = THREADS / LANES, N = xt_lanes<T>;
    const int lane = xt_lane<LANES>();
    const int64_t n = x.d;
    const R even = (R)o.smoothing / (R)n, keep = 1 - (R)o.smoothing;
    for (int64_t i = (int64_t)blockIdx.x * GROUPS + threadIdx.x / LANES; i < x.at.count;
         i += (int64_t)gridDim.x * GROUPS) {
        const int64_t label = label_at(labels, i);
        const bool valid = label != o.ignore && label >= 0 && label < n;
        const T *row = xt_row<T>(x, i);
        T *to = dx + i * n;
        const R lse = lses[i], by = valid ? upstream_at(up, i) : 0;
        auto value = [&](int64_t k, R v) {
            const R d = (exp(v - lse) - even) * by;
            return valid ? d - (k == label ? keep * by : 0) : 0;
        };
        if (((uintptr_t)row & 15) != ((uintptr_t)to & 15)) {
            for (int64_t k = lane; k < n; k += LANES) to[k] = xt_to<T>(value(k, xt_to<R>(row[k])));
            continue;
        }
        int64_t head = (int64_t)((16 - ((uintptr_t)row & 15)) & 15) / (int64_t)sizeof(T);
        head = head < n ? head : n;
        if (lane < head) to[lane] = xt_to<T>(value(lane, xt_to<R>(row[lane])));
        const int64_t end = head + (n - head) / N * N;
        for (int64_t k = head + (int64_t)lane * N; k < end; k += LANES * N) {
            R v[N];
            xt_load<N>(row + k, v);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = value(k + j, v[j]);
            xt_store<N>(v, to + k);
        }
        if (end + lane < n) to[end + lane] = xt_to<T>(value(end + lane, xt_to<R>(row[end + lane])));
    }
}

template <class T>
static enum xt_status cross_entropy_grad_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    const struct xt_rows x = xt_rows_of(l->in[0]);
    const struct labels labels = labels_of(l->in[1]);
    const struct options o = options_of(l->attrs, x.d);
    const int64_t rows = x.at.count;
    if (rows == 0 || x.d == 0) return XT_OK;
    const R *lses = (const R *)xt_data(l->in[2]);
    T *dx = (T *)xt_data(l->out[0]);
    cudaStream_t s = xt_cuda_stream(ctx);
    double *divisor = NULL;
    enum xt_status status = XT_OK;
    XT_GO(divisor_of(ctx, &o, &labels, &divisor));
    {
        const struct upstream<R> up = upstream_of<R>(l->in[3], o.reduction == NONE, divisor);
        if (x.d <= SHORT)
            cross_entropy_grad_rows<T, 32>
                <<<xt_cuda_blocks(rows, THREADS / 32), THREADS, 0, s>>>(x, labels, o, lses, up, dx);
        else
            cross_entropy_grad_rows<T, THREADS>
                <<<xt_cuda_blocks(rows, 1), THREADS, 0, s>>>(x, labels, o, lses, up, dx);
    }
    status = xt_cuda_launched(ctx);
done:
    if (divisor) xt_scratch_put(ctx, XT_CUDA, divisor, sizeof *divisor);
    return status;
}

/* ---- linear_cross_entropy -------------------------------------------------------------------- */

/*
 * Rows first .. first + m - 1: logits, in rows of `width`, become losses and, with `grad`, their
 * gradient, of type T, in the same place: a row begins where the logits' row did. What is written
 * is no wider than what was read, and a tile is read by all before any of it is written.
 */
template <class T, int LANES>
static __global__ void __launch_bounds__(LANES > 32 ? LANES : THREADS)
    logits_rows(xt_real<T> *logits, int64_t first, int64_t m, int64_t width,
                const struct labels labels, const struct options o,
                const struct xt_cuda_fault fault, const struct upstream<xt_real<T>> up,
                xt_real<T> *losses, bool grad) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<R>, TILE = LANES * N, GROUPS = LANES > 32 ? 1 : THREADS / LANES;
    const int lane = xt_lane<LANES>();
    const int64_t n = o.classes;
    const R smoothing = (R)o.smoothing;
    for (int64_t r = (int64_t)blockIdx.x * GROUPS + threadIdx.x / LANES; r < m;
         r += (int64_t)gridDim.x * GROUPS) {
        const int64_t i = first + r, label = checked_label(labels, o, fault, i, lane == 0);
        R *x = logits + r * width;
        T *to = (T *)x;
        const bool valid = label != o.ignore;
        struct row_sums<R> s = {};
        R loss = 0, by = 0;
        if (valid) {
            s = sum_row<R, LANES>(x, n, smoothing != 0);
            loss = row_loss(s, x[label], n, smoothing);
            by = upstream_at(up, i);
        }
        if (losses && lane == 0) losses[i] = loss;
        if (!grad) continue;
        const R even = by * (smoothing / (R)n), at_label = (1 - smoothing) * by;
        const R share = valid ? by / s.sum : 0;
        for (int64_t at = 0; at < width; at += TILE) {
            const int64_t k = at + (int64_t)lane * N; /* rows are padded: whole vectors */
            R v[N];
            if (k < width) {
                xt_load<N>(x + k, v);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    v[j] = exp(v[j] - s.most) * share - even - (k + j == label ? at_label : 0);
                    if (!valid || k + j >= n) v[j] = 0;
                }
            }
            if constexpr (LANES > 32)
                __syncthreads();
            else
                __syncwarp();
            if (k < width) xt_store<N>(v, to + k);
        }
    }
}

/* What one pass over the logits reads and leaves. */
template <class T> struct linear {
    const struct xt_tensor *x;      /* (rows, D) */
    const struct xt_tensor *w;      /* (V, D) */
    const struct xt_tensor *labels; /* (rows) */
    struct options o;
    struct xt_cuda_fault fault;
    struct upstream<xt_real<T>> up;
    xt_real<T> *losses; /* (rows), or NULL */
    T *dx;              /* (rows, D), or NULL */
    xt_real<T> *dw;     /* (V, D), or NULL */
};

/* Rows of logits held at a time, by the shape alone: a power of two. */
static int64_t linear_block(int64_t rows, int64_t width) {
    int64_t block = LINEAR_ROWS;
    while (block > LINEAR_LEAST && block * width > LINEAR_LOGITS) block /= 2;
    return rows < block ? rows : block;
}

/* Block by block of rows: logits = x w^T; loss and gradient of each row; dx = dlogits w;
   dw += dlogits^T x. */
template <class T>
static enum xt_status linear_pass(struct xt_ctx *ctx, const struct linear<T> *p) {
    using R = xt_real<T>;
    const enum xt_dtype in = p->x->dtype, wide = in == XT_F64 ? XT_F64 : XT_F32;
    const int64_t V = p->w->shape[0], D = p->w->shape[1], rows = xt_numel(p->labels);
    const int64_t width = (V + PAD - 1) / PAD * PAD, block = linear_block(rows, width);
    const int64_t narrow = width * (int64_t)(sizeof(R) / sizeof(T)); /* of gradients, in T */
    const size_t bytes = (size_t)(block * width) * sizeof(R);
    const struct labels labels = labels_of(p->labels);
    const bool grad = p->dx || p->dw;
    cudaStream_t s = xt_cuda_stream(ctx);
    enum xt_status status = XT_OK;
    if (p->dw && rows == 0 && V * D > 0)
        XT_CUDA_TRY(cudaMemsetAsync(p->dw, 0, (size_t)(V * D) * sizeof(R), s));
    if (rows == 0) return XT_OK;
    /* A vocabulary that tensor cores take slowly is grown by rows of zeros, once for all blocks. */
    const bool grown = sizeof(T) == 2 && V % 8 && rows * V * D >= 1 << 24;
    const int64_t classes = grown ? width : V;
    const size_t w_bytes = grown ? (size_t)(width * D) * sizeof(T) : 0;
    const T *w = (const T *)xt_data(p->w);
    T *copy = NULL;
    R *logits = NULL;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&logits));
    if (grown) {
        const size_t used = (size_t)(V * D) * sizeof(T);
        XT_GO(xt_scratch_get(ctx, XT_CUDA, w_bytes, (void **)&copy));
        XT_GO(xt_cuda_status(ctx, cudaMemcpyAsync(copy, w, used, cudaMemcpyDeviceToDevice, s)));
        XT_GO(xt_cuda_status(ctx, cudaMemsetAsync((char *)copy + used, 0, w_bytes - used, s)));
        w = copy;
    }
    for (int64_t first = 0; first < rows; first += block) {
        const int64_t m = rows - first < block ? rows - first : block;
        const T *x = (const T *)xt_data(p->x) + first * D;
        struct xt_cuda_gemm forward = {};
        forward.in = in;
        forward.out = wide;
        forward.m = m;
        forward.n = classes;
        forward.k = D;
        forward.batch = 1;
        forward.a = x;
        forward.a_row = D;
        forward.a_col = 1;
        forward.b = w;
        forward.b_row = 1;
        forward.b_col = D;
        forward.c = logits;
        forward.c_row = width;
        forward.alpha = 1;
        XT_GO(xt_cuda_gemm(ctx, &forward));
        if (V <= SHORT)
            logits_rows<T, 32><<<xt_cuda_blocks(m, THREADS / 32), THREADS, 0, s>>>(
                logits, first, m, width, labels, p->o, p->fault, p->up, p->losses, grad);
        else
            logits_rows<T, LINEAR_THREADS><<<xt_cuda_blocks(m, 1), LINEAR_THREADS, 0, s>>>(
                logits, first, m, width, labels, p->o, p->fault, p->up, p->losses, grad);
        XT_GO(xt_cuda_launched(ctx));
        if (p->dx) {
            struct xt_cuda_gemm to_x = {};
            to_x.in = to_x.out = in;
            to_x.m = m;
            to_x.n = D;
            to_x.k = classes;
            to_x.batch = 1;
            to_x.a = logits;
            to_x.a_row = narrow;
            to_x.a_col = 1;
            to_x.b = w;
            to_x.b_row = D;
            to_x.b_col = 1;
            to_x.c = p->dx + first * D;
            to_x.c_row = D;
            to_x.alpha = 1;
            XT_GO(xt_cuda_gemm(ctx, &to_x));
        }
        if (p->dw) {
            struct xt_cuda_gemm to_w = {};
            to_w.in = in;
            to_w.out = wide;
            to_w.m = V;
            to_w.n = D;
            to_w.k = m;
            to_w.batch = 1;
            to_w.a = logits;
            to_w.a_row = 1;
            to_w.a_col = narrow;
            to_w.b = x;
            to_w.b_row = D;
            to_w.b_col = 1;
            to_w.c = p->dw;
            to_w.c_row = D;
            to_w.alpha = 1;
            to_w.beta = first > 0;
            XT_GO(xt_cuda_gemm(ctx, &to_w));
        }
    }
done:
    if (copy) xt_scratch_put(ctx, XT_CUDA, copy, w_bytes);
    xt_scratch_put(ctx, XT_CUDA, logits, bytes);
    return status;
}

template <class T>
static enum xt_status linear_cross_entropy_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    struct linear<T> p = {};
    p.x = l->in[0];
    p.w = l->in[1];
    p.labels = l->in[2];
    p.o = options_of(l->attrs, p.w->shape[0]);
    p.fault = label_fault(ctx, l, &p.o);
    const int64_t rows = xt_numel(p.labels);
    const struct labels labels = labels_of(p.labels);
    if (p.o.reduction == NONE) {
        p.losses = rows ? (R *)xt_data(l->out[0]) : NULL;
        return linear_pass(ctx, &p);
    }
    const size_t bytes = (size_t)rows * sizeof(R);
    double *divisor = NULL;
    enum xt_status status = XT_OK;
    p.dx = l->out[1] && xt_numel(l->out[1]) ? (T *)xt_data(l->out[1]) : NULL;
    p.dw = l->out[2] && xt_numel(l->out[2]) ? (R *)xt_data(l->out[2]) : NULL;
    if (bytes) XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&p.losses));
    XT_GO(divisor_of(ctx, &p.o, &labels, &divisor));
    p.up = upstream_of<R>(NULL, false, divisor);
    XT_GO(linear_pass(ctx, &p));
    add_losses<R><<<1, SUM_THREADS, 0, xt_cuda_stream(ctx)>>>(p.losses, rows, divisor,
                                                              (R *)xt_data(l->out[0]));
    status = xt_cuda_launched(ctx);
done:
    if (divisor) xt_scratch_put(ctx, XT_CUDA, divisor, sizeof *divisor);
    if (bytes) xt_scratch_put(ctx, XT_CUDA, p.losses, bytes);
    return status;
}

template <class T>
static enum xt_status linear_cross_entropy_grad_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    struct linear<T> p = {};
    p.x = l->in[0];
    p.w = l->in[1];
    p.labels = l->in[2];
    p.o = options_of(l->attrs, p.w->shape[0]);
    p.fault = label_fault(ctx, l, &p.o);
    p.up = upstream_of<R>(l->in[3], true, NULL);
    p.dx = xt_numel(l->out[0]) ? (T *)xt_data(l->out[0]) : NULL;
    p.dw = xt_numel(l->out[1]) ? (R *)xt_data(l->out[1]) : NULL;
    return linear_pass(ctx, &p);
}

/* ---- gradients times an upstream number ------------------------------------------------------ */

/* to = (add ? to : 0) + x * by, N at a time; without by it is 1. scaled has no 0 to add. */
template <class T, int N, bool WRITE>
static __global__ void __launch_bounds__(THREADS)
    scale_all(const T *x, const xt_real<T> *at, bool add, int64_t n, T *to) {
    using R = xt_real<T>;
    const R by = at ? *at : 1;
    const int64_t step = (int64_t)gridDim.x * THREADS * N;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N; i < n; i += step) {
        R v[N], old[N] = {};
        xt_load<N>(x + i, v);
        if (WRITE && add) xt_load<N>(to + i, old);
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = WRITE ? old[k] + v[k] * by : v[k] * by;
        xt_store<N>(v, to + i);
    }
}

template <class T, bool WRITE>
static enum xt_status scale_of(struct xt_ctx *ctx, const struct xt_tensor *x,
                               const struct xt_tensor *by, bool add, const struct xt_tensor *to) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<T>;
    const int64_t n = xt_numel(x);
    if (n == 0) return XT_OK;
    const T *from = (const T *)xt_data(x);
    T *out = (T *)xt_data(to);
    const R *at = by ? (const R *)xt_data(by) : NULL;
    cudaStream_t s = xt_cuda_stream(ctx);
    if (n % N == 0 && xt_is_aligned16(from) && xt_is_aligned16(out))
        scale_all<T, N, WRITE>
            <<<xt_cuda_blocks(n, THREADS * N), THREADS, 0, s>>>(from, at, add, n, out);
    else
        scale_all<T, 1, WRITE>
            <<<xt_cuda_blocks(n, THREADS), THREADS, 0, s>>>(from, at, add, n, out);
    return xt_cuda_launched(ctx);
}

/* ---- the table ------------------------------------------------------------------------------- */

static enum xt_status cross_entropy(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return cross_entropy_of<T>(ctx, l);)
    return XT_OK;
}

static enum xt_status cross_entropy_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return cross_entropy_grad_of<T>(ctx, l);)
    return XT_OK;
}

static enum xt_status linear_cross_entropy(struct xt_ctx *ctx, const struct xt_launch *l) {
    switch (l->in[0]->dtype) {
    case XT_BF16: return linear_cross_entropy_of<__nv_bfloat16>(ctx, l);
    case XT_F64: return linear_cross_entropy_of<double>(ctx, l);
    default: return linear_cross_entropy_of<float>(ctx, l);
    }
}

static enum xt_status linear_cross_entropy_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    switch (l->in[0]->dtype) {
    case XT_BF16: return linear_cross_entropy_grad_of<__nv_bfloat16>(ctx, l);
    case XT_F64: return linear_cross_entropy_grad_of<double>(ctx, l);
    default: return linear_cross_entropy_grad_of<float>(ctx, l);
    }
}

static enum xt_status scaled(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype,
                   return scale_of<T, false>(ctx, l->in[0], l->in[1], false, l->out[0]);)
    return XT_OK;
}

static enum xt_status write_scaled(struct xt_ctx *ctx, const struct xt_launch *l) {
    const bool add = l->attrs[0].i != 0;
    if (l->in[0]->dtype == XT_F64)
        return scale_of<double, true>(ctx, l->in[1], l->in[2], add, l->in[0]);
    return scale_of<float, true>(ctx, l->in[1], l->in[2], add, l->in[0]);
}

static enum xt_status count_valid(struct xt_ctx *ctx, const struct xt_launch *l) {
    count_rows<<<1, SUM_THREADS, 0, xt_cuda_stream(ctx)>>>(labels_of(l->in[0]), l->attrs[0].i,
                                                           (int64_t *)xt_data(l->out[0]));
    return xt_cuda_launched(ctx);
}

#define PRODUCTS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

const struct xt_kernel xt_cuda_loss_kernels[] = {
    {"cross_entropy", XT_FLOATS, XT_INNER, cross_entropy},
    {"cross_entropy_grad", XT_FLOATS, XT_INNER, cross_entropy_grad},
    {"linear_cross_entropy", PRODUCTS, XT_CONTIGUOUS, linear_cross_entropy},
    {"linear_cross_entropy_grad", PRODUCTS, XT_CONTIGUOUS, linear_cross_entropy_grad},
    {"scaled", XT_FLOATS, XT_CONTIGUOUS, scaled},
    {"write_scaled_", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, write_scaled},
    {"count_valid", XT_BIT(XT_I32) | XT_BIT(XT_I64), XT_STRIDED, count_valid},
    {},
};
