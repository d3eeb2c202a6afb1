/*
 * norm.cu: rmsnorm and layernorm on the device.
 *
 * A row is shared by a group of 8 to 256 threads, as its length asks, and is read once and kept
 * in registers where it fits: forward reads x and writes y, backward reads g and x and writes dx.
 * The gradient of a gain is a sum over rows: each block sums its own in registers, in an order that
 * the shape alone decides, and a second kernel adds the blocks' sums in order.
 */
#include "rows.h"

#define THREADS 256
#define HELD 4    /* vectors of a row that a thread keeps */
#define PARTS 264 /* of the rows, at most, whose gains' gradients are summed together */
/* Backward of rows of at most NARROW vectors: by blocks of so many threads, each with one vector,
   so that many rows are under way on a multiprocessor. */
#define NARROW 128
#define NARROW_BLOCKS 6  /* on a multiprocessor */
#define NARROW_PARTS 792 /* as PARTS */

/* ---- forward --------------------------------------------------------------------------------- */

/*
 * rmsnorm:   rstd = 1 / sqrt(mean(x^2) + eps), y = round(x * rstd) * w
 * layernorm: rstd = 1 / sqrt(mean((x - mean)^2) + eps), y = (x - mean) * rstd * w + b
 * N elements at a time; a row of at most LANES * N * HOLD is held, any other (HOLD 0) read again.
 */
template <class T, bool LAYER, int LANES, int N, int HOLD>
static __global__ void __launch_bounds__(THREADS)
    norm_rows(const __grid_constant__ struct xt_rows x, const __grid_constant__ struct xt_gain w,
              const __grid_constant__ struct xt_gain b, const xt_real<T> eps, T *y,
              xt_real<T> *means, xt_real<T> *rstds) {
    using R = xt_real<T>;
    const int lane = xt_lane<LANES>();
    const int64_t d = x.d, groups = THREADS / LANES, step = (int64_t)gridDim.x * groups;
    /* All threads of a warp stay in the loop together: sums take all of them. */
    for (int64_t first = (int64_t)blockIdx.x * groups; first < x.at.count; first += step) {
        const int64_t row = first + threadIdx.x / LANES;
        const bool live = row < x.at.count;
        const T *from = xt_row<T>(x, live ? row : 0);
        R held[HOLD > 0 ? HOLD : 1][N];
        if constexpr (HOLD > 0) {
#pragma unroll
            for (int k = 0; k < HOLD; k++) {
                const int64_t i = (int64_t)(k * LANES + lane) * N;
                if (live && i < d) xt_load<N>(from + i, held[k]);
            }
        }
        auto each = [&](auto take) {
            if constexpr (HOLD > 0) {
#pragma unroll
                for (int k = 0; k < HOLD; k++) {
                    const int64_t i = (int64_t)(k * LANES + lane) * N;
                    if (live && i < d) take(i, held[k]);
                }
            } else {
                for (int64_t i = (int64_t)lane * N; live && i < d; i += LANES * N) {
                    xt_load<N>(from + i, held[0]);
                    take(i, held[0]);
                }
            }
        };
        R mean = 0, squares = 0;
        if constexpr (LAYER) {
            each([&](int64_t, const R *v) {
#pragma unroll
                for (int k = 0; k < N; k++) mean += v[k];
            });
            mean = xt_group_sum<LANES>(mean) / (R)d;
        }
        each([&](int64_t, const R *v) {
#pragma unroll
            for (int k = 0; k < N; k++) squares += (v[k] - mean) * (v[k] - mean);
        });
        const R rstd = 1 / sqrt(xt_group_sum<LANES>(squares) / (R)d + eps);
        each([&](int64_t i, const R *v) {
            R gain[N], bias[N], out[N];
            xt_load_gain<T, N>(w, i, 1, gain);
            if constexpr (LAYER) xt_load_gain<T, N>(b, i, 0, bias);
#pragma unroll
            for (int k = 0; k < N; k++) {
                if constexpr (LAYER)
                    out[k] = (v[k] - mean) * rstd * gain[k] + bias[k];
                else
                    out[k] = xt_to<R>(xt_to<T>(v[k] * rstd)) * gain[k];
            }
            xt_store<N>(out, y + row * d + i);
        });
        if (live && lane == 0) {
            if (means) means[row] = mean;
            if (rstds) rstds[row] = rstd;
        }
    }
}

template <class T, bool LAYER>
static enum xt_status norm_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<T>;
    const enum xt_dtype dtype = l->in[0]->dtype;
    const struct xt_rows x = xt_rows_of(l->in[0]);
    if (x.at.count == 0 || x.d == 0) return xt_fill_nothing(ctx, l);
    const struct xt_gain w = xt_gain_of(l->in[1], dtype);
    const struct xt_gain b = xt_gain_of(LAYER ? l->in[2] : NULL, dtype);
    struct xt_tensor *mean = LAYER ? l->out[1] : NULL, *rstd = l->out[LAYER ? 2 : 1];
    T *y = (T *)xt_data(l->out[0]);
    R *means = mean ? (R *)xt_data(mean) : NULL, *rstds = rstd ? (R *)xt_data(rstd) : NULL;
    const R eps = (R)l->attrs[0].f;
    const bool aligned = xt_rows_aligned(&x, sizeof(T)) && xt_is_aligned16(w.data) &&
                         xt_is_aligned16(b.data) && xt_is_aligned16(y);
    const int64_t vectors = x.d / N;
    const unsigned few = xt_cuda_blocks(x.at.count, THREADS / 8);
    const unsigned some = xt_cuda_blocks(x.at.count, THREADS / 32);
    const unsigned all = xt_cuda_blocks(x.at.count, 1);
    cudaStream_t s = xt_cuda_stream(ctx);
    if (aligned && vectors <= 8 * HELD)
        norm_rows<T, LAYER, 8, N, HELD><<<few, THREADS, 0, s>>>(x, w, b, eps, y, means, rstds);
    else if (aligned && vectors <= 32 * HELD)
        norm_rows<T, LAYER, 32, N, HELD><<<some, THREADS, 0, s>>>(x, w, b, eps, y, means, rstds);
    else if (aligned && vectors <= THREADS * HELD)
        norm_rows<T, LAYER, 256, N, HELD><<<all, THREADS, 0, s>>>(x, w, b, eps, y, means, rstds);
    else if (aligned)
        norm_rows<T, LAYER, 256, N, 0><<<all, THREADS, 0, s>>>(x, w, b, eps, y, means, rstds);
    else if (x.d <= 1024)
        norm_rows<T, LAYER, 32, 1, 0><<<some, THREADS, 0, s>>>(x, w, b, eps, y, means, rstds);
    else
        norm_rows<T, LAYER, 256, 1, 0><<<all, THREADS, 0, s>>>(x, w, b, eps, y, means, rstds);
    return xt_cuda_launched(ctx);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* What is added on the way, contiguous in the shape of x; of each, NULL: nothing. */
template <class T> struct norm_beside {
    const T *more[2]; /* to the gradient that comes in, which is then rounded once */
    const T *onto;    /* to the gradient of x */
};

/* N elements of the gradient that comes in, made whole; `at` is where they lie in what is added. */
template <class T, int N>
static __device__ void add_more(const struct norm_beside<T> &b, int64_t at, T (&g)[N]) {
    using R = xt_real<T>;
    if (!b.more[0]) return;
    const auto one = *(const xt_vector<T, N> *)(b.more[0] + at);
    xt_vector<T, N> two = {};
    if (b.more[1]) two = *(const xt_vector<T, N> *)(b.more[1] + at);
#pragma unroll
    for (int k = 0; k < N; k++)
        g[k] = xt_to<T>(xt_to<R>(g[k]) + xt_to<R>(one.at[k]) + xt_to<R>(two.at[k]));
}
template <int N, class T>
static __device__ void load_sum(const struct norm_beside<T> &b, const T *from, int64_t at,
                                xt_real<T> *to) {
    auto g = *(const xt_vector<T, N> *)from;
    add_more(b, at, g.at);
#pragma unroll
    for (int k = 0; k < N; k++) to[k] = xt_to<xt_real<T>>(g.at[k]);
}

/*
 * With n = (x - mean) * rstd and h = g * w: dx = rstd * (h - mean(h) - n * mean(h * n)), where
 * rmsnorm has mean 0 and no mean(h). dw = sum of g * n and db = sum of g over rows.
 *
 * parts, unless NULL: each block's sum, dw's d numbers and after them, for layernorm, db's.
 */
template <class T, bool LAYER, int LANES, int BLOCK, int HOLD>
static __global__ void __launch_bounds__(BLOCK, HOLD == 1 ? NARROW_BLOCKS
                                                : LAYER   ? 1
                                                          : 2)
    norm_grad_rows(const __grid_constant__ struct xt_rows g,
                   const __grid_constant__ struct xt_rows x,
                   const __grid_constant__ struct xt_gain w, const xt_real<T> *means,
                   const xt_real<T> *rstds, const __grid_constant__ struct norm_beside<T> beside,
                   T *dx, xt_real<T> *parts) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<T>;
    const int lane = xt_lane<LANES>(), group = (int)threadIdx.x / LANES;
    const int64_t d = x.d, groups = BLOCK / LANES, step = (int64_t)gridDim.x * groups;
    R dw[HOLD][N] = {}, db[LAYER ? HOLD : 1][N] = {}, own_gain[N];
    /* What a thread that holds one vector multiplies by is the same in every row. */
    if (HOLD == 1 && lane * N < d) xt_load_gain<T, N>(w, lane * N, 1, own_gain);
    for (int64_t first = (int64_t)blockIdx.x * groups; first < x.at.count; first += step) {
        const int64_t row = first + group;
        const bool live = row < x.at.count;
        const T *g_row = xt_row<T>(g, live ? row : 0), *x_row = xt_row<T>(x, live ? row : 0);
        xt_vector<T, N> gv[HOLD], xv[HOLD], before[HOLD] = {};
#pragma unroll
        for (int j = 0; j < HOLD; j++) {
            const int64_t i = (int64_t)(j * LANES + lane) * N;
            if (!live || i >= d) continue;
            gv[j] = *(const xt_vector<T, N> *)(g_row + i);
            xv[j] = *(const xt_vector<T, N> *)(x_row + i);
            if (HOLD == 1 && beside.onto)
                before[j] = *(const xt_vector<T, N> *)(beside.onto + row * d + i);
            add_more(beside, row * d + i, gv[j].at);
        }
        const R rstd = live ? rstds[row] : 0, mean = LAYER && live ? means[row] : 0;
        R dot = 0, sum = 0;
#pragma unroll
        for (int j = 0; j < HOLD; j++) {
            const int64_t i = (int64_t)(j * LANES + lane) * N;
            if (!live || i >= d) continue;
            R gain[N];
            if constexpr (HOLD > 1) xt_load_gain<T, N>(w, i, 1, gain);
#pragma unroll
            for (int k = 0; k < N; k++) {
                if constexpr (HOLD == 1) gain[k] = own_gain[k];
                const R up = xt_to<R>(gv[j].at[k]), n = (xt_to<R>(xv[j].at[k]) - mean) * rstd;
                dot += up * gain[k] * n;
                dw[j][k] += up * n;
                if constexpr (LAYER) {
                    sum += up * gain[k];
                    db[j][k] += up;
                }
            }
        }
        dot = xt_group_sum<LANES>(dot) / (R)d;
        if constexpr (LAYER) sum = xt_group_sum<LANES>(sum) / (R)d;
#pragma unroll
        for (int j = 0; j < HOLD; j++) {
            const int64_t i = (int64_t)(j * LANES + lane) * N;
            if (!live || i >= d) continue;
            R gain[N], out[N];
            if (HOLD > 1 && beside.onto)
                before[j] = *(const xt_vector<T, N> *)(beside.onto + row * d + i);
            if constexpr (HOLD > 1) xt_load_gain<T, N>(w, i, 1, gain);
#pragma unroll
            for (int k = 0; k < N; k++) {
                if constexpr (HOLD == 1) gain[k] = own_gain[k];
                const R n = (xt_to<R>(xv[j].at[k]) - mean) * rstd;
                out[k] = xt_to<R>(before[j].at[k]) +
                         rstd * (xt_to<R>(gv[j].at[k]) * gain[k] - sum - n * dot);
            }
            xt_store<N>(out, dx + row * d + i);
        }
    }
    if (!parts) return;
    R *part = parts + (int64_t)blockIdx.x * (LAYER ? 2 : 1) * d;
    if constexpr (LANES == BLOCK) {
#pragma unroll
        for (int j = 0; j < HOLD; j++) {
            const int64_t i = (int64_t)(j * LANES + lane) * N;
            if (i >= d) continue;
#pragma unroll
            for (int k = 0; k < N; k++) {
                part[i + k] = dw[j][k];
                if constexpr (LAYER) part[d + i + k] = db[j][k];
            }
        }
    } else {
        /* Group after group adds what it has. */
        constexpr int ROOM = LANES * N * HOLD;
        __shared__ R all[(LAYER ? 2 : 1) * ROOM];
        for (int i = (int)threadIdx.x; i < (LAYER ? 2 : 1) * ROOM; i += BLOCK) all[i] = 0;
        for (int turn = 0; turn < groups; turn++) {
            __syncthreads();
            if (turn != group) continue;
#pragma unroll
            for (int j = 0; j < HOLD; j++)
#pragma unroll
                for (int k = 0; k < N; k++) {
                    const int i = (j * LANES + lane) * N + k;
                    all[i] += dw[j][k];
                    if constexpr (LAYER) all[ROOM + i] += db[j][k];
                }
        }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < d; i += BLOCK) {
            part[i] = all[i];
            if constexpr (LAYER) part[d + i] = all[ROOM + i];
        }
    }
}

/* dx alone, of rows that are too long to be held or do not lie well. */
template <class T, bool LAYER, int LANES, int N>
static __global__ void __launch_bounds__(THREADS)
    norm_grad_long(const __grid_constant__ struct xt_rows g,
                   const __grid_constant__ struct xt_rows x,
                   const __grid_constant__ struct xt_gain w, const xt_real<T> *means,
                   const xt_real<T> *rstds, const __grid_constant__ struct norm_beside<T> beside,
                   T *dx) {
    using R = xt_real<T>;
    const int lane = xt_lane<LANES>();
    const int64_t d = x.d, groups = THREADS / LANES, step = (int64_t)gridDim.x * groups;
    for (int64_t first = (int64_t)blockIdx.x * groups; first < x.at.count; first += step) {
        const int64_t row = first + threadIdx.x / LANES;
        const bool live = row < x.at.count;
        const T *g_row = xt_row<T>(g, live ? row : 0), *x_row = xt_row<T>(x, live ? row : 0);
        const R rstd = live ? rstds[row] : 0, mean = LAYER && live ? means[row] : 0;
        R dot = 0, sum = 0, up[N], v[N], gain[N], out[N], before[N] = {};
        for (int64_t i = (int64_t)lane * N; live && i < d; i += LANES * N) {
            load_sum<N>(beside, g_row + i, row * d + i, up);
            xt_load<N>(x_row + i, v);
            xt_load_gain<T, N>(w, i, 1, gain);
#pragma unroll
            for (int k = 0; k < N; k++) {
                dot += up[k] * gain[k] * ((v[k] - mean) * rstd);
                if constexpr (LAYER) sum += up[k] * gain[k];
            }
        }
        dot = xt_group_sum<LANES>(dot) / (R)d;
        if constexpr (LAYER) sum = xt_group_sum<LANES>(sum) / (R)d;
        for (int64_t i = (int64_t)lane * N; live && i < d; i += LANES * N) {
            load_sum<N>(beside, g_row + i, row * d + i, up);
            xt_load<N>(x_row + i, v);
            xt_load_gain<T, N>(w, i, 1, gain);
            if (beside.onto) xt_load<N>(beside.onto + row * d + i, before);
#pragma unroll
            for (int k = 0; k < N; k++)
                out[k] = before[k] + rstd * (up[k] * gain[k] - sum - (v[k] - mean) * rstd * dot);
            xt_store<N>(out, dx + row * d + i);
        }
    }
}

#define COLUMNS 32 /* that a block of gain_parts has side by side */

/* The gains' gradients alone: a block sums COLUMNS columns of its share of the rows. */
template <class T, bool LAYER>
static __global__ void
gain_parts(const __grid_constant__ struct xt_rows g, const __grid_constant__ struct xt_rows x,
           const xt_real<T> *means, const xt_real<T> *rstds,
           const __grid_constant__ struct norm_beside<T> beside, xt_real<T> *parts) {
    using R = xt_real<T>;
    constexpr int TALL = THREADS / COLUMNS;
    __shared__ R all[2][TALL][COLUMNS];
    const int64_t c = (int64_t)blockIdx.x * COLUMNS + threadIdx.x, d = x.d;
    R dw = 0, db = 0;
    if (c < d)
        for (int64_t i = (int64_t)blockIdx.y * TALL + threadIdx.y; i < x.at.count;
             i += (int64_t)gridDim.y * TALL) {
            const R mean = LAYER ? means[i] : 0;
            R up;
            load_sum<1>(beside, xt_row<T>(g, i) + c, i * d + c, &up);
            dw += up * ((xt_to<R>(xt_row<T>(x, i)[c]) - mean) * rstds[i]);
            db += up;
        }
    all[0][threadIdx.y][threadIdx.x] = dw;
    all[1][threadIdx.y][threadIdx.x] = db;
    __syncthreads();
    if (c >= d || threadIdx.y != 0) return;
    for (int k = 1; k < TALL; k++) {
        dw += all[0][k][threadIdx.x];
        db += all[1][k][threadIdx.x];
    }
    R *part = parts + (int64_t)blockIdx.y * (LAYER ? 2 : 1) * d;
    part[c] = dw;
    if constexpr (LAYER) part[d + c] = db;
}

/* What one launch of a gradient works on. */
template <class T> struct norm_grad {
    struct xt_rows g, x;
    struct xt_gain w;
    const xt_real<T> *means, *rstds;
    struct norm_beside<T> beside;
    T *dx;
};

template <class T, bool LAYER, int LANES, int BLOCK, int HOLD>
static enum xt_status launch_rows(struct xt_ctx *ctx, const struct norm_grad<T> *p,
                                  xt_real<T> *parts, unsigned n_parts) {
    norm_grad_rows<T, LAYER, LANES, BLOCK, HOLD><<<n_parts, BLOCK, 0, xt_cuda_stream(ctx)>>>(
        p->g, p->x, p->w, p->means, p->rstds, p->beside, p->dx, parts);
    return xt_cuda_launched(ctx);
}

template <class T, bool LAYER>
static enum xt_status launch_long(struct xt_ctx *ctx, const struct norm_grad<T> *p, bool aligned,
                                  xt_real<T> *parts, unsigned n_parts) {
    constexpr int N = xt_lanes<T>;
    const int64_t rows = p->x.at.count, d = p->x.d;
    cudaStream_t s = xt_cuda_stream(ctx);
    if (aligned)
        norm_grad_long<T, LAYER, 256, N><<<xt_cuda_blocks(rows, 1), THREADS, 0, s>>>(
            p->g, p->x, p->w, p->means, p->rstds, p->beside, p->dx);
    else if (d <= 1024)
        norm_grad_long<T, LAYER, 32, 1><<<xt_cuda_blocks(rows, THREADS / 32), THREADS, 0, s>>>(
            p->g, p->x, p->w, p->means, p->rstds, p->beside, p->dx);
    else
        norm_grad_long<T, LAYER, 256, 1><<<xt_cuda_blocks(rows, 1), THREADS, 0, s>>>(
            p->g, p->x, p->w, p->means, p->rstds, p->beside, p->dx);
    XT_TRY(xt_cuda_launched(ctx));
    if (!parts) return XT_OK;
    const dim3 grid(xt_cuda_blocks(d, COLUMNS), n_parts), block(COLUMNS, THREADS / COLUMNS);
    gain_parts<T, LAYER><<<grid, block, 0, s>>>(p->g, p->x, p->means, p->rstds, p->beside, parts);
    return xt_cuda_launched(ctx);
}

template <class T, bool LAYER>
static enum xt_status norm_grad_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<T>;
    struct norm_grad<T> p = {};
    p.g = xt_rows_of(l->in[0]);
    p.x = xt_rows_of(l->in[1]);
    if (p.x.at.count == 0 || p.x.d == 0) return xt_fill_nothing(ctx, l);
    p.w = xt_gain_of(l->in[2], l->in[1]->dtype);
    p.means = LAYER ? (const R *)xt_data(l->in[3]) : NULL;
    p.rstds = (const R *)xt_data(l->in[LAYER ? 4 : 3]);
    for (int k = 4; !LAYER && k < l->n_in; k++)
        (k == 4 ? p.beside.onto : p.beside.more[k - 5]) = l->in[k] ? (T *)xt_data(l->in[k]) : NULL;
    p.dx = (T *)xt_data(l->out[0]);
    const bool gain = l->attrs[0].i != 0;
    const bool aligned = xt_rows_aligned(&p.g, sizeof(T)) && xt_rows_aligned(&p.x, sizeof(T)) &&
                         xt_is_aligned16(p.w.data) && xt_is_aligned16(p.dx) &&
                         xt_is_aligned16(p.beside.onto) && xt_is_aligned16(p.beside.more[0]) &&
                         xt_is_aligned16(p.beside.more[1]);
    const int64_t d = p.x.d, rows = p.x.at.count, vectors = d / N, width = (LAYER ? 2 : 1) * d;
    const bool is_long = !aligned || vectors > THREADS * HELD;
    const bool narrow = !is_long && vectors > 8 * HELD && vectors <= NARROW;
    const int64_t groups = is_long ? THREADS / COLUMNS : vectors <= 8 * HELD ? THREADS / 8 : 1;
    const int64_t blocks = (rows + groups - 1) / groups, most = narrow ? NARROW_PARTS : PARTS;
    const unsigned n_parts = (unsigned)(blocks < most ? blocks : most);
    const size_t bytes = gain ? (size_t)(n_parts * width) * sizeof(R) : 0;
    R *parts = NULL;
    if (gain) XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&parts));
    enum xt_status status;
    if (is_long)
        status = launch_long<T, LAYER>(ctx, &p, aligned, parts, n_parts);
    else if (vectors <= 8 * HELD)
        status = launch_rows<T, LAYER, 8, THREADS, HELD>(ctx, &p, parts, n_parts);
    else if (narrow)
        status = launch_rows<T, LAYER, NARROW, NARROW, 1>(ctx, &p, parts, n_parts);
    else
        status = launch_rows<T, LAYER, THREADS, THREADS, HELD>(ctx, &p, parts, n_parts);
    if (gain && status == XT_OK) {
        R *dw = (R *)xt_data(l->out[1]), *db = LAYER ? (R *)xt_data(l->out[2]) : NULL;
        status = xt_sum_parts(ctx, parts, n_parts, width, d, dw, db);
    }
    if (gain) xt_scratch_put(ctx, XT_CUDA, parts, bytes);
    return status;
}

/* ---- the table ------------------------------------------------------------------------------- */

static enum xt_status rmsnorm(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return norm_of<T, false>(ctx, l);)
    return XT_OK;
}

static enum xt_status layernorm(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return norm_of<T, true>(ctx, l);)
    return XT_OK;
}

static enum xt_status rmsnorm_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return norm_grad_of<T, false>(ctx, l);)
    return XT_OK;
}

static enum xt_status layernorm_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return norm_grad_of<T, true>(ctx, l);)
    return XT_OK;
}

const struct xt_kernel xt_cuda_norm_kernels[] = {
    {"rmsnorm", XT_FLOATS, XT_INNER, rmsnorm},
    {"rmsnorm_grad", XT_FLOATS, XT_INNER, rmsnorm_grad},
    {"rmsnorm_grad_sum", XT_FLOATS, XT_INNER, rmsnorm_grad},
    {"layernorm", XT_FLOATS, XT_INNER, layernorm},
    {"layernorm_grad", XT_FLOATS, XT_INNER, layernorm_grad},
    {},
};
