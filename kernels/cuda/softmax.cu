/*
 * softmax.cu: softmax and its kin along one dimension, their gradients, and the gradients of amax
 * and norm, which rows of a matrix give.
 *
 * How many threads share a row, and which of its elements each takes, follows from n, inner and the
 * dtype. Sums over a row are f32 over the lanes of a vector, f64 beyond.
 *
 * Traffic: rows that fit into registers (up to 4,096 f32) are read once, longer ones once for each
 * pass over them, mostly from the caches; outputs are written once.
 */
#include "along.h"

#define THREADS 256
#define LONG_THREADS 1024 /* for one long row */

/* ---- threads that share a row ---------------------------------------------------------------- */

/* SIZE threads side by side, for rows whose elements lie side by side: vectors of them. */
template <int SIZE_, int THREADS_> struct side_by_side {
    static constexpr int SIZE = SIZE_, BLOCK = THREADS_, ROWS = BLOCK / SIZE;
    template <class T> static constexpr int V = xt_lanes<T>;
    static __device__ int row() { return (int)threadIdx.x / SIZE; }
    static __device__ int lane() { return (int)threadIdx.x % SIZE; }
    template <class X> static __device__ X sum(X x) {
        if constexpr (SIZE > 32) {
            return xt_block_sum<SIZE>(x);
        } else {
#pragma unroll
            for (int step = SIZE / 2; step; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
            return x;
        }
    }
    template <class X> static __device__ X most(X x) {
        if constexpr (SIZE > 32) {
            return xt_block_max<SIZE>(x);
        } else {
#pragma unroll
            for (int step = SIZE / 2; step; step /= 2) {
                X other = __shfl_xor_sync(0xFFFFFFFFu, x, step);
                x = other != other || other > x ? other : x;
            }
            return x;
        }
    }
};

/* 8 warps, a row for each lane: for rows that lie across memory. */
struct across {
    static constexpr int SIZE = 8, BLOCK = THREADS, ROWS = 32;
    template <class T> static constexpr int V = 1;
    static __device__ int row() { return (int)threadIdx.x % ROWS; }
    static __device__ int lane() { return (int)threadIdx.x / ROWS; }
    template <class X> static __device__ X sum(X x) {
        __shared__ X part[SIZE][ROWS];
        __syncthreads();
        part[lane()][row()] = x;
        __syncthreads();
        x = part[0][row()];
        for (int i = 1; i < SIZE; i++) x += part[i][row()];
        return x;
    }
    template <class X> static __device__ X most(X x) {
        __shared__ X part[SIZE][ROWS];
        __syncthreads();
        part[lane()][row()] = x;
        __syncthreads();
        x = part[0][row()];
        for (int i = 1; i < SIZE; i++) {
            X other = part[i][row()];
            x = other != other || other > x ? other : x;
        }
        return x;
    }
};

/* ---- what is done with a row ----------------------------------------------------------------- */

static __device__ inline float exp_of(float x) {
    return expf(x);
}
static __device__ inline double exp_of(double x) {
    return exp(x);
}

/*
 * What is done with a row a, of some ops also a row b and two numbers of the row, s and t. In this
 * order: `most`, the row's largest element (MOST); `sum` of term over the row (SUMS); then map
 * gives each element of the output (MAPS), or value the only one. W is f32 or f64.
 */
template <class W> struct softmax_of {
    static constexpr bool MOST = true, SUMS = true, MAPS = true, B = false, S = false, T = false;
    W most, s, t, scale;
    __device__ W term(W a, W) const { return exp_of(a - most); }
    __device__ void ready(double sum) { scale = (W)(1.0 / sum); }
    __device__ W map(W a, W) const { return exp_of(a - most) * scale; }
};

template <class W> struct log_softmax_of {
    static constexpr bool MOST = true, SUMS = true, MAPS = true, B = false, S = false, T = false;
    W most, s, t, shift;
    __device__ W term(W a, W) const { return exp_of(a - most); }
    __device__ void ready(double sum) { shift = (W)log(sum); }
    __device__ W map(W a, W) const { return (a - most) - shift; }
};

template <class W> struct logsumexp_of {
    static constexpr bool MOST = true, SUMS = true, MAPS = false, B = false, S = false, T = false;
    W most, s, t, result;
    __device__ W term(W a, W) const { return isinf(most) ? (W)0 : exp_of(a - most); }
    __device__ void ready(double sum) {
        result = isinf(most) ? most : (W)(log(sum) + (double)most);
    }
    __device__ W value() const { return result; }
};

/* a is y, b the gradient. */
template <class W> struct softmax_grad_of {
    static constexpr bool MOST = false, SUMS = true, MAPS = true, B = true, S = false, T = false;
    W most, s, t, dot;
    __device__ W term(W a, W b) const { return a * b; }
    __device__ void ready(double sum) { dot = (W)sum; }
    __device__ W map(W a, W b) const { return a * (b - dot); }
};

template <class W> struct log_softmax_grad_of {
    static constexpr bool MOST = false, SUMS = true, MAPS = true, B = true, S = false, T = false;
    W most, s, t, total;
    __device__ W term(W, W b) const { return b; }
    __device__ void ready(double sum) { total = (W)sum; }
    __device__ W map(W a, W b) const { return b - exp_of(a) * total; }
};

/* In the rest a is x, s is y and t the gradient, one of each a row. */
template <class W> struct logsumexp_grad_of {
    static constexpr bool MOST = false, SUMS = false, MAPS = true, B = false, S = true, T = true;
    W most, s, t;
    __device__ W map(W a, W) const { return s == -(W)INFINITY ? (W)0 : t * exp_of(a - s); }
};

template <class W> struct amax_grad_of {
    static constexpr bool MOST = false, SUMS = true, MAPS = true, B = false, S = true, T = true;
    W most, s, t, share;
    __device__ W term(W a, W) const { return a == s ? (W)1 : (W)0; }
    __device__ void ready(double sum) { share = sum > 0 ? t / (W)sum : (W)0; }
    __device__ W map(W a, W) const { return a == s ? share : (W)0; }
};

template <class W> struct norm_grad_of {
    static constexpr bool MOST = false, SUMS = false, MAPS = true, B = false, S = true, T = true;
    W most, s, t;
    __device__ W map(W a, W) const { return a * (s == 0 ? (W)0 : t / s); }
};

/* ---- kernels --------------------------------------------------------------------------------- */

/* The operands, NULL where an op has none. */
template <class E> struct operands {
    const E *a, *b, *s, *t;
    E *y;
};

/* G shares out rows; K vectors of a row are held in registers by each thread, all that there are,
   or none (K is 0), and the row is read for each pass. */
template <template <class> class Op, class E, class G, int K>
static __global__ void __launch_bounds__(G::BLOCK)
    along_rows(const __grid_constant__ struct operands<E> p,
               const __grid_constant__ struct xt_along r) {
    using W = xt_real<E>;
    constexpr int V = G::template V<E>, HELD = K ? K : 1;
    const int lane = G::lane();
    for (int64_t base = (int64_t)blockIdx.x * G::ROWS; base < r.count;
         base += (int64_t)gridDim.x * G::ROWS) {
        int64_t row = base + G::row(), n = row < r.count ? r.n : 0; /* none beyond the last */
        int64_t start = n ? xt_along_start(r, row, n) : 0;
        W a[HELD][V], b[HELD][V];
        Op<W> op;
        /* The vector that begins with element j of the row, as number k. */
        auto load = [&](const E *from, int64_t j, W *to) {
            if constexpr (V == 1) {
                to[0] = xt_to<W>(from[start + j * r.inner]);
            } else {
                auto v = xt_load_lanes(from + start + j, n - j, xt_to<E>((W)0), r.whole);
#pragma unroll
                for (int i = 0; i < V; i++) to[i] = xt_to<W>(v.at[i]);
            }
        };
        auto each = [&](auto &&f) {
            if constexpr (K > 0) {
#pragma unroll
                for (int k = 0; k < K; k++) {
                    int64_t j = (int64_t)(k * G::SIZE + lane) * V;
                    if (j < n) f(j, a[k], b[k]);
                }
            } else {
                for (int64_t j = (int64_t)lane * V; j < n; j += G::SIZE * V) {
                    load(p.a, j, a[0]);
                    if constexpr (Op<W>::B) load(p.b, j, b[0]);
                    f(j, a[0], b[0]);
                }
            }
        };
        if constexpr (K > 0) {
#pragma unroll
            for (int k = 0; k < K; k++) {
                int64_t j = (int64_t)(k * G::SIZE + lane) * V;
                if (j >= n) continue;
                load(p.a, j, a[k]);
                if constexpr (Op<W>::B) load(p.b, j, b[k]);
            }
        }
        if constexpr (Op<W>::S) op.s = row < r.count ? xt_to<W>(p.s[row]) : (W)0;
        if constexpr (Op<W>::T) op.t = row < r.count ? xt_to<W>(p.t[row]) : (W)0;
        if constexpr (Op<W>::MOST) {
            W most = -(W)INFINITY; /* NaN wins and stays */
            each([&](int64_t j, const W *x, const W *) {
#pragma unroll
                for (int i = 0; i < V; i++)
                    if (i < n - j) most = x[i] != x[i] || x[i] > most ? x[i] : most;
            });
            op.most = G::most(most);
        }
        if constexpr (Op<W>::SUMS) {
            double sum = 0;
            each([&](int64_t j, const W *x, const W *z) {
                W term[V];
#pragma unroll
                for (int i = 0; i < V; i++) term[i] = i < n - j ? op.term(x[i], z[i]) : (W)0;
#pragma unroll
                for (int half = V / 2; half > 0; half /= 2)
#pragma unroll
                    for (int i = 0; i < half; i++) term[i] += term[i + half];
                sum += (double)term[0];
            });
            op.ready(G::sum(sum));
        }
        if constexpr (Op<W>::MAPS) {
            each([&](int64_t j, const W *x, const W *z) {
                if constexpr (V == 1) {
                    p.y[start + j * r.inner] = xt_to<E>(op.map(x[0], z[0]));
                } else {
                    struct xt_vector<E, V> v;
#pragma unroll
                    for (int i = 0; i < V; i++) v.at[i] = xt_to<E>(op.map(x[i], z[i]));
                    xt_store_lanes(p.y + start + j, n - j, v, r.whole);
                }
            });
        } else if (lane == 0 && row < r.count) {
            p.y[row] = xt_to<E>(op.value());
        }
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

template <template <class> class Op, class E, class G, int K>
static void launch_rows(cudaStream_t stream, const struct operands<E> *p,
                        const struct xt_along *r) {
    along_rows<Op, E, G, K><<<xt_cuda_blocks(r->count, G::ROWS), G::BLOCK, 0, stream>>>(*p, *r);
}

template <template <class> class Op, class E>
static enum xt_status run_rows(struct xt_ctx *ctx, const struct xt_launch *l, struct xt_along r) {
    using P = Op<xt_real<E>>;
    constexpr int64_t V = xt_lanes<E>;
    cudaStream_t stream = xt_cuda_stream(ctx);
    struct operands<E> p = {};
    int next = 1;
    p.a = (const E *)xt_data(l->in[0]);
    if (P::B) p.b = (const E *)xt_data(l->in[next++]);
    if (P::S) p.s = (const E *)xt_data(l->in[next++]);
    if (P::T) p.t = (const E *)xt_data(l->in[next++]);
    p.y = (E *)xt_data(l->out[0]);
    r.whole = r.inner == 1 && xt_rows_aligned<E>(p.a, r.n) && (!P::B || xt_is_aligned16(p.b)) &&
              (!P::MAPS || xt_is_aligned16(p.y));
    if (r.inner > 1)
        launch_rows<Op, E, across, 0>(stream, &p, &r);
    else if (r.n <= 8 * V)
        launch_rows<Op, E, side_by_side<8, THREADS>, 1>(stream, &p, &r);
    else if (r.n <= 32 * 4 * V)
        launch_rows<Op, E, side_by_side<32, THREADS>, 4>(stream, &p, &r);
    else if (r.n <= THREADS * 4 * V)
        launch_rows<Op, E, side_by_side<THREADS, THREADS>, 4>(stream, &p, &r);
    else
        launch_rows<Op, E, side_by_side<LONG_THREADS, LONG_THREADS>, 0>(stream, &p, &r);
    return xt_cuda_launched(ctx);
}

template <template <class> class Op>
static enum xt_status along(struct xt_ctx *ctx, const struct xt_launch *l, int64_t dim) {
    const struct xt_tensor *x = l->in[0];
    if (xt_numel(l->out[0]) == 0) return XT_OK;
    struct xt_along r = xt_along_of(x, dim);
    XT_CUDA_FLOATS(x->dtype, return run_rows<Op, T>(ctx, l, r);)
    return XT_OK;
}

template <template <class> class Op>
static enum xt_status along_dim(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<Op>(ctx, l, l->attrs[0].i);
}

/* Along the rows of a matrix. */
template <template <class> class Op>
static enum xt_status along_matrix(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<Op>(ctx, l, 1);
}

/* ---- the table ------------------------------------------------------------------------------- */

const struct xt_kernel xt_cuda_softmax_kernels[] = {
    {"softmax", XT_FLOATS, XT_CONTIGUOUS, along_dim<softmax_of>},
    {"log_softmax", XT_FLOATS, XT_CONTIGUOUS, along_dim<log_softmax_of>},
    {"logsumexp", XT_FLOATS, XT_CONTIGUOUS, along_dim<logsumexp_of>},
    {"softmax_grad", XT_FLOATS, XT_CONTIGUOUS, along_dim<softmax_grad_of>},
    {"log_softmax_grad", XT_FLOATS, XT_CONTIGUOUS, along_dim<log_softmax_grad_of>},
    {"logsumexp_grad", XT_FLOATS, XT_CONTIGUOUS, along_dim<logsumexp_grad_of>},
    {"amax_grad", XT_FLOATS, XT_CONTIGUOUS, along_matrix<amax_grad_of>},
    {"norm_grad", XT_FLOATS, XT_CONTIGUOUS, along_matrix<norm_grad_of>},
    {},
};
