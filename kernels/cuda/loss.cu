/*
 * loss.cu: cross entropy of rows of logits on the device, and gradients times what comes from
 * upstream.
 *
 * A row is read once for its loss: every thread keeps the largest so far and the sum of e^(x -
 * largest), and the threads' pairs are combined at the end, in f64. A label out of range counts as
 * ignored and is noted.
 */
#include "loss.h"

/* ---- how many rows count -------------------------------------------------------------------- */

static __global__ void __launch_bounds__(SUM_THREADS)
    count_rows(const __grid_constant__ struct labels labels, int64_t ignore, int64_t *out) {
    const int64_t valid = valid_labels(labels, ignore);
    if (threadIdx.x == 0) *out = valid;
}

/* ---- cross_entropy --------------------------------------------------------------------------- */

template <class T, int LANES>
static __global__ void __launch_bounds__(THREADS)
    cross_entropy_rows(const __grid_constant__ struct xt_rows x,
                       const __grid_constant__ struct labels labels,
                       const __grid_constant__ struct options o,
                       const __grid_constant__ struct xt_cuda_fault fault, xt_real<T> *losses,
                       xt_real<T> *kept) {
    using R = xt_real<T>;
    constexpr int GROUPS = THREADS / LANES;
    for (int64_t i = (int64_t)blockIdx.x * GROUPS + threadIdx.x / LANES; i < x.at.count;
         i += (int64_t)gridDim.x * GROUPS) {
        const bool first = xt_lane<LANES>() == 0;
        const int64_t label = checked_label(label_at(labels, i), o, fault, i, first);
        R lse = 0, loss = 0;
        if (label != o.ignore) {
            const T *row = xt_row<T>(x, i);
            const struct row_sums<R> s = sum_row<T, LANES>(row, x.d, o.smoothing != 0);
            lse = s.lse;
            loss = row_loss(s, xt_to<R>(row[label]), o);
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
    double *part = NULL;
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
    XT_GO(part_of(ctx, &o, &labels, &part));
    add_losses<R><<<1, SUM_THREADS, 0, s>>>(losses, rows, part, out);
    status = xt_cuda_launched(ctx);
done:
    if (part) xt_scratch_put(ctx, XT_CUDA, part, sizeof *part);
    if (bytes) xt_scratch_put(ctx, XT_CUDA, scratch, bytes);
    return status;
}

/* (e^(x - lse) - smoothing / n) * by, less (1 - smoothing) * by at the label. */
template <class T, int LANES>
static __global__ void __launch_bounds__(THREADS)
    cross_entropy_grad_rows(const __grid_constant__ struct xt_rows x,
                            const __grid_constant__ struct labels labels,
                            const __grid_constant__ struct options o, const xt_real<T> *lses,
                            const __grid_constant__ struct upstream<xt_real<T>> up, T *dx) {
    using R = xt_real<T>;
    constexpr int GROUPS = THREADS / LANES, N = xt_lanes<T>;
    const int lane = xt_lane<LANES>();
    const int64_t n = x.d;
    const R even = (R)(o.smoothing * o.each), keep = 1 - (R)o.smoothing;
    for (int64_t i = (int64_t)blockIdx.x * GROUPS + threadIdx.x / LANES; i < x.at.count;
         i += (int64_t)gridDim.x * GROUPS) {
        const int64_t label = label_at(labels, i);
        const bool valid = label != o.ignore && label >= 0 && label < n;
        const T *row = xt_row<T>(x, i);
        T *to = dx + i * n;
        const R lse = lses[i], by = valid ? upstream_at(up, i) : 0;
        auto value = [&](int64_t k, R v) {
            const R d = (exp_for<T>(v - lse) - even) * by;
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
    double *part = NULL;
    enum xt_status status = XT_OK;
    XT_GO(part_of(ctx, &o, &labels, &part));
    {
        const struct upstream<R> up = upstream_of<R>(l->in[3], o.reduction == NONE, part);
        if (x.d <= SHORT)
            cross_entropy_grad_rows<T, 32>
                <<<xt_cuda_blocks(rows, THREADS / 32), THREADS, 0, s>>>(x, labels, o, lses, up, dx);
        else
            cross_entropy_grad_rows<T, THREADS>
                <<<xt_cuda_blocks(rows, 1), THREADS, 0, s>>>(x, labels, o, lses, up, dx);
    }
    status = xt_cuda_launched(ctx);
done:
    if (part) xt_scratch_put(ctx, XT_CUDA, part, sizeof *part);
    return status;
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

const struct xt_kernel xt_cuda_loss_kernels[] = {
    {"cross_entropy", XT_FLOATS, XT_INNER, cross_entropy},
    {"cross_entropy_grad", XT_FLOATS, XT_INNER, cross_entropy_grad},
    {"scaled", XT_FLOATS, XT_CONTIGUOUS, scaled},
    {"write_scaled_", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, write_scaled},
    {"count_valid", XT_BIT(XT_I32) | XT_BIT(XT_I64), XT_STRIDED, count_valid},
    {},
};
