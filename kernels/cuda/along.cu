/*
 * along.cu: ops along one dimension: softmax and its kin, cumsum, argmax, topk, and gradients that
 * rows of a matrix give.
 *
 * A tensor is (outer, n, inner) with rows along n. How many threads share a row, and which of its
 * elements each takes, follows from n, inner and the dtype. Sums over a row are f32 over the lanes
 * of a vector, f64 beyond.
 *
 * Traffic: rows that fit into registers (up to 4,096 f32) are read once, longer ones once for each
 * pass over them, mostly from the caches; outputs are written once.
 */
#include <type_traits>

#include "layout.h"

#define THREADS 256
#define LONG_THREADS 1024 /* for one long row */

static int64_t over(int64_t n, int64_t by) {
    return (n + by - 1) / by;
}

/* x as (outer, n, inner) about dimension dim; a scalar is one row of one element. */
struct rows {
    int64_t count; /* outer * inner */
    int64_t n, inner;
    bool whole; /* inner is 1 and rows begin on 16 bytes, in all tensors */
};

static struct rows rows_along(const struct xt_tensor *x, int64_t dim) {
    struct rows r = {1, 1, 1, false};
    if (x->ndim) r.n = x->shape[dim];
    for (int d = 0; d < x->ndim; d++) {
        if (d == dim) continue;
        r.count *= x->shape[d];
        if (d > dim) r.inner *= x->shape[d];
    }
    return r;
}

/* Where row `row` begins in a tensor whose rows have n elements. */
static __device__ inline int64_t row_start(const struct rows &r, int64_t row, int64_t n) {
    if (r.inner == 1) return row * n;
    int64_t o = row / r.inner;
    return o * n * r.inner + (row - o * r.inner);
}

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

/* ---- softmax and its kin --------------------------------------------------------------------- */

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

/* The operands, NULL where an op has none. */
template <class E> struct operands {
    const E *a, *b, *s, *t;
    E *y;
};

/* G shares out rows; K vectors of a row are held in registers by each thread, all that there are,
   or none (K is 0), and the row is read for each pass. */
template <template <class> class Op, class E, class G, int K>
static __global__ void __launch_bounds__(G::BLOCK) along_rows(struct operands<E> p, struct rows r) {
    using W = xt_real<E>;
    constexpr int V = G::template V<E>, HELD = K ? K : 1;
    const int lane = G::lane();
    for (int64_t base = (int64_t)blockIdx.x * G::ROWS; base < r.count;
         base += (int64_t)gridDim.x * G::ROWS) {
        int64_t row = base + G::row(), n = row < r.count ? r.n : 0; /* none beyond the last */
        int64_t start = n ? row_start(r, row, n) : 0;
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

template <template <class> class Op, class E, class G, int K>
static void launch_rows(cudaStream_t stream, const struct operands<E> *p, const struct rows *r) {
    along_rows<Op, E, G, K><<<xt_cuda_blocks(r->count, G::ROWS), G::BLOCK, 0, stream>>>(*p, *r);
}

template <template <class> class Op, class E>
static enum xt_status run_rows(struct xt_ctx *ctx, const struct xt_launch *l, struct rows r) {
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
    struct rows r = rows_along(x, dim);
    XT_CUDA_FLOATS(x->dtype, return run_rows<Op, T>(ctx, l, r);)
    return XT_OK;
}

static enum xt_status softmax(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<softmax_of>(ctx, l, l->attrs[0].i);
}

static enum xt_status log_softmax(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<log_softmax_of>(ctx, l, l->attrs[0].i);
}

static enum xt_status logsumexp(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<logsumexp_of>(ctx, l, l->attrs[0].i);
}

static enum xt_status softmax_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<softmax_grad_of>(ctx, l, l->attrs[0].i);
}

static enum xt_status log_softmax_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<log_softmax_grad_of>(ctx, l, l->attrs[0].i);
}

static enum xt_status logsumexp_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<logsumexp_grad_of>(ctx, l, l->attrs[0].i);
}

static enum xt_status amax_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<amax_grad_of>(ctx, l, 1);
}

static enum xt_status norm_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    return along<norm_grad_of>(ctx, l, 1);
}

/* ---- cumsum ---------------------------------------------------------------------------------- */

/*
 * Floats are added in f64, integers wrap around. Long rows, where they are few, are cut in chunks:
 * the totals of chunks come first, then their sums, then each chunk from there. Within a chunk
 * vectors, warps and blocks are scanned as trees: against a serial sum the f64 totals differ by
 * rounding, at most log2(n) + n / 2048 times 2^-53 of the sum of magnitudes.
 */
#define CHUNK 8192    /* a multiple of what a block scans at once */
#define FEW_UNITS 512 /* with fewer rows, long ones are cut */

struct scanning {
    int64_t rows, n, chunks, chunk, units;
    bool whole; /* rows begin on 16 bytes, in both tensors */
};

/* The sum over the threads of the group before this one; *all gets that of all. */
template <class A, int GROUP> static __device__ inline A sum_before(A x, A *all) {
    int lane = (int)threadIdx.x % 32;
    A sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        A other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
    }
    A before = __shfl_up_sync(0xFFFFFFFFu, sum, 1);
    if (lane == 0) before = 0;
    *all = __shfl_sync(0xFFFFFFFFu, sum, 31);
    if constexpr (GROUP > 32) {
        constexpr int WARPS = GROUP / 32;
        __shared__ A part[WARPS];
        int warp = (int)threadIdx.x / 32;
        __syncthreads();
        if (lane == 0) part[warp] = *all;
        __syncthreads();
        A earlier = 0, total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w == warp) earlier = total;
            total += part[w];
        }
        before = earlier + before;
        *all = total;
    }
    return before;
}

/* y[j] = carry + x[0] + ... + x[j] of a unit (row, chunk); BACK: counted from the row's end. With
   `totals` only the unit's sum is written, to it. */
template <class E, class Out, class A, bool BACK, int GROUP>
static __global__ void __launch_bounds__(THREADS)
    scan_rows(const E *x, Out *y, const A *carry, A *totals, struct scanning s) {
    constexpr int V = xt_lanes<E>, UNITS = THREADS / GROUP;
    int lane = (int)threadIdx.x % GROUP;
    for (int64_t base = (int64_t)blockIdx.x * UNITS; base < s.units;
         base += (int64_t)gridDim.x * UNITS) {
        int64_t u = base + threadIdx.x / GROUP, row = u / s.chunks;
        int64_t first = (u - row * s.chunks) * s.chunk, count = s.n - first;
        if (count > s.chunk) count = s.chunk;
        if (u >= s.units) count = 0;
        const E *from = x + row * s.n;
        Out *to = y + row * s.n;
        A run = carry && u < s.units ? carry[u] : (A)0;
        for (int64_t i = 0; i < count; i += GROUP * V) {
            int64_t j = i + lane * V, live = count - j; /* may be none */
            int64_t at = first + j, low = BACK ? s.n - at - V : at;
            A v[V], all;
            if (s.whole && live >= V) {
                auto vector = *(const struct xt_vector<E, V> *)(from + low);
#pragma unroll
                for (int k = 0; k < V; k++)
                    v[k] = (A)xt_to<xt_real<E>>(vector.at[BACK ? V - 1 - k : k]);
            } else {
#pragma unroll
                for (int k = 0; k < V; k++)
                    v[k] = k < live ? (A)xt_to<xt_real<E>>(from[BACK ? s.n - 1 - at - k : at + k])
                                    : (A)0;
            }
#pragma unroll
            for (int k = 1; k < V; k++) v[k] += v[k - 1];
            A before = sum_before<A, GROUP>(v[V - 1], &all) + run;
            run += all;
            if (totals) continue;
            Out out[V];
#pragma unroll
            for (int k = 0; k < V; k++) {
                if constexpr (sizeof(Out) == 8)
                    out[k] = (Out)(before + v[k]);
                else
                    out[k] = xt_to<Out>((float)(before + v[k]));
            }
            if (sizeof(Out) == sizeof(E) && s.whole && live >= V) {
                struct xt_vector<Out, V> vector;
#pragma unroll
                for (int k = 0; k < V; k++) vector.at[k] = out[BACK ? V - 1 - k : k];
                *(struct xt_vector<Out, V> *)(to + low) = vector;
            } else {
#pragma unroll
                for (int k = 0; k < V; k++)
                    if (k < live) to[BACK ? s.n - 1 - at - k : at + k] = out[k];
            }
        }
        if (totals && lane == 0 && u < s.units) totals[u] = run;
    }
}

/* Each row of totals, one a block: the sum of those before it. */
template <class A> static __global__ void scan_totals(A *totals, int64_t rows, int64_t chunks) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        A *at = totals + row * chunks, run = 0;
        for (int64_t i = 0; i < chunks; i += THREADS) {
            int64_t c = i + threadIdx.x;
            A all, before = sum_before<A, THREADS>(c < chunks ? at[c] : (A)0, &all);
            if (c < chunks) at[c] = run + before;
            run += all;
        }
    }
}

/* Rows that lie across memory: a thread for each. */
template <class E, class Out, class A, bool BACK>
static __global__ void scan_columns(const E *x, Out *y, struct rows r) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x; row < r.count; row += step) {
        int64_t start = row_start(r, row, r.n);
        A run = 0;
        for (int64_t i = 0; i < r.n; i++) {
            int64_t at = start + (BACK ? r.n - 1 - i : i) * r.inner;
            run += (A)xt_to<xt_real<E>>(x[at]);
            if constexpr (sizeof(Out) == 8)
                y[at] = (Out)run;
            else
                y[at] = xt_to<Out>((float)run);
        }
    }
}

template <class E, bool BACK>
static enum xt_status run_scan(struct xt_ctx *ctx, const struct rows *r, const void *from,
                               void *to) {
    constexpr bool WHOLE = std::is_integral_v<E>;
    using A = std::conditional_t<WHOLE, uint64_t, double>;
    using Out = std::conditional_t<WHOLE, int64_t, E>;
    constexpr int V = xt_lanes<E>;
    cudaStream_t stream = xt_cuda_stream(ctx);
    const E *x = (const E *)from;
    Out *y = (Out *)to;
    if (r->inner > 1) {
        scan_columns<E, Out, A, BACK>
            <<<xt_cuda_blocks(r->count, THREADS), THREADS, 0, stream>>>(x, y, *r);
        return xt_cuda_launched(ctx);
    }
    struct scanning s = {r->count, r->n, 1, r->n, r->count, false};
    s.whole = xt_rows_aligned<E>(x, r->n) && xt_is_aligned16(y);
    if (r->n <= 32 * 4 * V) {
        scan_rows<E, Out, A, BACK, 32>
            <<<xt_cuda_blocks(s.units, THREADS / 32), THREADS, 0, stream>>>(x, y, NULL, NULL, s);
        return xt_cuda_launched(ctx);
    }
    if (s.rows < FEW_UNITS && s.n >= 2 * CHUNK) {
        s.chunk = CHUNK;
        s.chunks = over(s.n, CHUNK);
        s.units = s.rows * s.chunks;
    }
    unsigned blocks = xt_cuda_blocks(s.units, 1);
    A *totals = NULL;
    size_t bytes = s.chunks > 1 ? (size_t)s.units * sizeof(A) : 0;
    if (bytes) {
        XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&totals));
        scan_rows<E, Out, A, BACK, THREADS><<<blocks, THREADS, 0, stream>>>(x, y, NULL, totals, s);
        scan_totals<<<xt_cuda_blocks(s.rows, 1), THREADS, 0, stream>>>(totals, s.rows, s.chunks);
    }
    scan_rows<E, Out, A, BACK, THREADS><<<blocks, THREADS, 0, stream>>>(x, y, totals, NULL, s);
    if (bytes) xt_scratch_put(ctx, XT_CUDA, totals, bytes);
    return xt_cuda_launched(ctx);
}

static enum xt_status cumsum(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    if (xt_numel(x) == 0) return XT_OK;
    struct rows r = rows_along(x, l->attrs[0].i);
    void *y = xt_data(l->out[0]);
    XT_CUDA_ANY(x->dtype, return (run_scan<T, false>(ctx, &r, xt_data(x), y));)
    return XT_OK;
}

static enum xt_status cumsum_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *g = l->in[0];
    if (xt_numel(g) == 0) return XT_OK;
    struct rows r = rows_along(g, l->attrs[0].i);
    void *y = xt_data(l->out[0]);
    XT_CUDA_FLOATS(g->dtype, return (run_scan<T, true>(ctx, &r, xt_data(g), y));)
    return XT_OK;
}

/* ---- argmax, topk ---------------------------------------------------------------------------- */

/* An element of a row and its place; -1: none yet. */
template <class W> struct choice {
    W value;
    int64_t at;
};

/* NaN is above all numbers. */
template <class W> static __device__ inline bool above(W a, W b) {
    return a > b || (a != a && b == b);
}

/* Whether a comes before b in falling order, the first of equal ones first. */
template <class W>
static __device__ inline bool comes_before(struct choice<W> a, struct choice<W> b) {
    return above(a.value, b.value) || (!above(b.value, a.value) && a.at < b.at);
}

template <class W>
static __device__ inline struct choice<W> better(struct choice<W> a, struct choice<W> b) {
    if (a.at < 0) return b;
    return b.at >= 0 && comes_before(b, a) ? b : a;
}

/* The best over GROUP threads; every thread gets it. */
template <class W, int GROUP>
static __device__ inline struct choice<W> best_of_group(struct choice<W> c) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        struct choice<W> other = {
            __shfl_xor_sync(0xFFFFFFFFu, c.value, step), __shfl_xor_sync(0xFFFFFFFFu, c.at, step)
        };
        c = better(c, other);
    }
    if constexpr (GROUP > 32) {
        constexpr int WARPS = GROUP / 32;
        __shared__ struct choice<W> part[WARPS];
        __syncthreads();
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = c;
        __syncthreads();
        c = part[0];
        for (int w = 1; w < WARPS; w++) c = better(c, part[w]);
    }
    return c;
}

/* The k best of a row, one after another; without `values` only places. GROUP threads share a row
   in blocks of BLOCK. */
template <class E, int GROUP, int BLOCK>
static __global__ void __launch_bounds__(BLOCK)
    choose_rows(const E *x, E *values, int64_t *places, struct rows r, int64_t k) {
    using W = xt_real<E>;
    constexpr int ROWS = BLOCK / GROUP;
    int lane = (int)threadIdx.x % GROUP;
    for (int64_t base = (int64_t)blockIdx.x * ROWS; base < r.count;
         base += (int64_t)gridDim.x * ROWS) {
        int64_t row = base + threadIdx.x / GROUP, n = row < r.count ? r.n : 0;
        const E *from = x + (n ? row_start(r, row, r.n) : 0);
        int64_t to = n ? row_start(r, row, k) : 0;
        struct choice<W> last = {
            (W)0, -1
        };
        for (int64_t i = 0; i < k; i++) {
            struct choice<W> best = {
                (W)0, -1
            };
#pragma unroll 4
            for (int64_t j = lane; j < n; j += GROUP) {
                struct choice<W> c = {
                    xt_to<W>(from[j * r.inner]), j
                };
                /* What was chosen before, and all that comes before it. */
                if (i > 0 && !comes_before(last, c)) continue;
                best = better(best, c);
            }
            last = best_of_group<W, GROUP>(best);
            if (lane > 0 || n == 0) continue;
            if (values) values[to + i * r.inner] = xt_to<E>(last.value);
            places[to + i * r.inner] = last.at;
        }
    }
}

/* Rows that lie across memory: a thread finds the best of each. */
template <class E>
static __global__ void argmax_columns(const E *x, int64_t *places, struct rows r) {
    using W = xt_real<E>;
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x; row < r.count; row += step) {
        const E *from = x + row_start(r, row, r.n);
        struct choice<W> best = {
            xt_to<W>(from[0]), 0
        };
        for (int64_t j = 1; j < r.n; j++) {
            W value = xt_to<W>(from[j * r.inner]);
            if (!above(value, best.value)) continue;
            best.value = value;
            best.at = j;
        }
        places[row] = best.at;
    }
}

/* An element's place in the answer is the number of those that come before it: a thread for each
   element, blocks of THREADS elements of one row. */
template <class E>
static __global__ void __launch_bounds__(THREADS)
    rank_rows(const E *x, E *values, int64_t *places, struct rows r, int64_t k, int64_t parts) {
    using W = xt_real<E>;
    __shared__ W tile[THREADS];
    for (int64_t unit = blockIdx.x; unit < r.count * parts; unit += gridDim.x) {
        int64_t row = unit / parts, i = (unit - row * parts) * THREADS + threadIdx.x;
        const E *from = x + row_start(r, row, r.n);
        struct choice<W> mine = {
            i < r.n ? xt_to<W>(from[i * r.inner]) : (W)0, i
        };
        int64_t rank = 0;
        for (int64_t begin = 0; begin < r.n; begin += THREADS) {
            int64_t j = begin + threadIdx.x;
            int count = r.n - begin < THREADS ? (int)(r.n - begin) : THREADS;
            __syncthreads();
            if (j < r.n) tile[threadIdx.x] = xt_to<W>(from[j * r.inner]);
            __syncthreads();
            for (int q = 0; q < count; q++) {
                struct choice<W> other = {
                    tile[q], begin + q
                };
                rank += comes_before(other, mine);
            }
        }
        if (i >= r.n || rank >= k) continue;
        int64_t to = row_start(r, row, k) + rank * r.inner;
        values[to] = xt_to<E>(mine.value);
        places[to] = i;
    }
}

#define WARP_ROW 1024 /* up to this many elements a warp has a row, else a block */
#define ROW_THREADS 512

template <class E>
static enum xt_status run_choose(struct xt_ctx *ctx, const struct rows *r, const void *x,
                                 void *values, void *places, int64_t k) {
    cudaStream_t stream = xt_cuda_stream(ctx);
    if (r->n <= WARP_ROW)
        choose_rows<E, 32, THREADS><<<xt_cuda_blocks(r->count, THREADS / 32), THREADS, 0, stream>>>(
            (const E *)x, (E *)values, (int64_t *)places, *r, k);
    else
        choose_rows<E, ROW_THREADS, ROW_THREADS>
            <<<xt_cuda_blocks(r->count, 1), ROW_THREADS, 0, stream>>>((const E *)x, (E *)values,
                                                                      (int64_t *)places, *r, k);
    return xt_cuda_launched(ctx);
}

static enum xt_status argmax(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    if (xt_numel(y) == 0) return XT_OK;
    struct rows r = rows_along(x, l->attrs[0].i);
    if (r.inner > 1) {
        XT_CUDA_ANY(
            x->dtype,
            argmax_columns<<<xt_cuda_blocks(r.count, THREADS), THREADS, 0, xt_cuda_stream(ctx)>>>(
                (const T *)xt_data(x), (int64_t *)xt_data(y), r);)
        return xt_cuda_launched(ctx);
    }
    XT_CUDA_ANY(x->dtype, return run_choose<T>(ctx, &r, xt_data(x), NULL, xt_data(y), 1);)
    return XT_OK;
}

#define FEW_CHOSEN 128 /* up to this many, one after another */

static enum xt_status topk(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    void *values = xt_data(l->out[0]), *places = xt_data(l->out[1]);
    int64_t k = l->attrs[0].i;
    if (xt_numel(l->out[0]) == 0) return XT_OK;
    struct rows r = rows_along(x, l->attrs[1].i);
    if (k <= FEW_CHOSEN) {
        XT_CUDA_ANY(x->dtype, return run_choose<T>(ctx, &r, xt_data(x), values, places, k);)
        return XT_OK;
    }
    int64_t parts = over(r.n, THREADS);
    XT_CUDA_ANY(x->dtype,
                rank_rows<<<xt_cuda_blocks(r.count * parts, 1), THREADS, 0, xt_cuda_stream(ctx)>>>(
                    (const T *)xt_data(x), (T *)values, (int64_t *)places, r, k, parts);)
    return xt_cuda_launched(ctx);
}

const struct xt_kernel xt_cuda_along_kernels[] = {
    {"argmax", XT_ANY, XT_CONTIGUOUS, argmax},
    {"cumsum", XT_ANY, XT_CONTIGUOUS, cumsum},
    {"softmax", XT_FLOATS, XT_CONTIGUOUS, softmax},
    {"log_softmax", XT_FLOATS, XT_CONTIGUOUS, log_softmax},
    {"logsumexp", XT_FLOATS, XT_CONTIGUOUS, logsumexp},
    {"topk", XT_ANY, XT_CONTIGUOUS, topk},
    {"amax_grad", XT_FLOATS, XT_CONTIGUOUS, amax_grad},
    {"norm_grad", XT_FLOATS, XT_CONTIGUOUS, norm_grad},
    {"cumsum_grad", XT_FLOATS, XT_CONTIGUOUS, cumsum_grad},
    {"softmax_grad", XT_FLOATS, XT_CONTIGUOUS, softmax_grad},
    {"log_softmax_grad", XT_FLOATS, XT_CONTIGUOUS, log_softmax_grad},
    {"logsumexp_grad", XT_FLOATS, XT_CONTIGUOUS, logsumexp_grad},
    {},
};
