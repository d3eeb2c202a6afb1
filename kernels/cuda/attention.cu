/*
 * attention.cu: tiled attention and its backward on the ordinary cores, and which cores a call goes
 * to.
 *
 *     s = scale q k^T;  m' = max(m, max s);
 *     l' = l e^(m-m') + sum e^(s-m');  o' = o e^(m-m') + e^(s-m') v;  out = o / l, lse = m + log l
 *     dv = p^T do;  dp = do v^T;  ds = p (dp - rowsum(do o)) scale;  dq = ds k;  dk = ds^T q
 *
 * A block owns a tile of queries (forward, dq) or of keys (dk, dv, summed over the query heads of
 * its group) and meets the tiles of the other side in order, so the bits do not depend on timing.
 * Traffic: q and out once, k and v once a query tile. bf16 goes to attention_wgmma.cu, or
 * attention_mma.cu on other devices.
 */
#include <math.h>

#include "attention.h"
#include "wgmma.h"

#define THREADS 256

enum { Q, K, V, MASK, LENGTHS, DOCUMENTS, SEED, GRAD, OUT, LSE };
enum { CAUSAL, SCALE, DROPOUT, SEED_ATTR };

/* ---- the call -------------------------------------------------------------------------------- */

static struct xt_heads heads_of(const struct xt_tensor *t) {
    struct xt_heads h = {xt_data(t), t->stride[0], t->stride[1], t->stride[2]};
    return h;
}

static struct xt_attention describe(const struct xt_launch *l) {
    const struct xt_tensor *q = l->in[Q], *k = l->in[K];
    struct xt_attention p = {};
    p.batch = q->shape[0];
    p.heads = q->shape[2];
    p.kv_heads = k->shape[2];
    p.group = p.kv_heads ? p.heads / p.kv_heads : 1;
    p.sq = q->shape[1];
    p.sk = k->shape[1];
    p.d = (int)q->shape[3];
    p.causal = l->attrs[CAUSAL].i != 0;
    p.scale = l->attrs[SCALE].f;
    if (p.scale == 0) p.scale = p.d ? 1.0 / sqrt((double)p.d) : 1.0;
    p.p = (float)l->attrs[DROPOUT].f;
    if (p.p > 0) {
        p.seed = xt_cuda_seed(l, SEED_ATTR, SEED);
        p.keep_scale = p.p < 1 ? (double)(float)(1.0 / (1.0 - l->attrs[DROPOUT].f)) : 0;
    }
    xt_attention_set_mask(&p, l->in[MASK]);
    p.lengths = xt_ints_of(l->in[LENGTHS]);
    p.documents = xt_ints_of(l->in[DOCUMENTS]);
    p.any_pair_hidden = p.mask || p.documents.data || p.p > 0;
    p.q = heads_of(q);
    p.k = heads_of(k);
    p.v = heads_of(l->in[V]);
    return p;
}

/* ---- tiles ----------------------------------------------------------------------------------- */

/* Rows [first, first + T) of one head as rows of d + 1; those from `rows` on are zero. */
template <class R, int T>
__device__ static void load_tile(const struct xt_heads &t, int64_t b, int64_t h, int64_t first,
                                 int64_t rows, int d, R *to) {
    const R *from = (const R *)t.data + b * t.batch + h * t.head;
    for (int i = (int)threadIdx.x; i < T * d; i += THREADS) {
        int r = i / d, c = i - r * d;
        to[r * (d + 1) + c] = first + r < rows ? from[(first + r) * t.row + c] : R(0);
    }
}

/* to[i][j] = a row i . b row j, for T x T. */
template <class R, int T> __device__ static void dot_rows(const R *a, const R *b, int d, R *to) {
    constexpr int EACH = T / 16;
    int ty = (int)threadIdx.x / 16, tx = (int)threadIdx.x % 16;
    R sum[EACH][EACH] = {};
    for (int c = 0; c < d; c++) {
        R x[EACH], y[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            x[i] = a[(ty + 16 * i) * (d + 1) + c];
            y[i] = b[(tx + 16 * i) * (d + 1) + c];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) sum[i][j] += x[i] * y[j];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) to[(ty + 16 * i) * (T + 1) + tx + 16 * j] = sum[i][j];
}

/* The tile sizes, and how the threads lie over T x D: each has COLUMNS of one row, PER_ROW
   apart. */
template <class R> constexpr int tile = sizeof(R) == 4 ? 32 : 16;
template <class R> constexpr int per_row = THREADS / tile<R>;
template <class R> constexpr int columns = 256 / per_row<R>;

/* sum[i] += weights row . rows of `from`; `step` 1 takes a row of weights, T + 1 a column. */
template <class R>
__device__ static void add_rows(R (&sum)[columns<R>], const R *weights, int step, const R *from,
                                int d) {
    int c0 = (int)threadIdx.x % per_row<R>;
    for (int k = 0; k < tile<R>; k++) {
        R w = weights[k * step];
#pragma unroll
        for (int i = 0; i < columns<R>; i++) {
            int c = c0 + i * per_row<R>;
            if (c < d) sum[i] += w * from[k * (d + 1) + c];
        }
    }
}

template <class R>
__device__ static void save_row(const struct xt_heads &t, int64_t b, int64_t h, int64_t row, int d,
                                const R (&x)[columns<R>], R by) {
    R *to = (R *)t.data + b * t.batch + h * t.head + row * t.row;
#pragma unroll
    for (int i = 0; i < columns<R>; i++) {
        int c = (int)threadIdx.x % per_row<R> + i * per_row<R>;
        if (c < d) to[c] = x[i] * by;
    }
}

template <class R> __device__ static R infinity() {
    return (R)INFINITY;
}

/* The score of a pair: -inf where the query may not look. */
template <class R>
__device__ static R score(const struct xt_attention &p, int64_t b, int64_t h, int64_t row,
                          int64_t key, int64_t keys, R dot) {
    bool seen = row < p.sq && key < xt_visible(p, keys, row) && !xt_hidden(p, b, h, row, key);
    return seen ? dot * (R)p.scale : -infinity<R>();
}

/* The largest, or the sum, over the threads of a row. */
template <class R> __device__ static R row_max(R x) {
#pragma unroll
    for (int step = per_row<R> / 2; step; step >>= 1) {
        R other = __shfl_xor_sync(0xFFFFFFFFu, x, step);
        x = other > x ? other : x;
    }
    return x;
}
template <class R> __device__ static R row_sum(R x) {
#pragma unroll
    for (int step = per_row<R> / 2; step; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* A block a query tile of a head. Shared: q and k (or v), T x (d + 1), and s, T x (T + 1). */
template <class R>
static __global__ void __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ struct xt_attention p, int64_t tiles) {
    constexpr int T = tile<R>, EACH = T / per_row<R>;
    extern __shared__ double shared[];
    R *q = (R *)shared, *kv = q + T * (p.d + 1), *s = kv + T * (p.d + 1);
    int64_t at = blockIdx.x, row0 = (tiles - 1 - at % tiles) * T;
    int64_t h = at / tiles % p.heads, b = at / tiles / p.heads;
    int r = (int)threadIdx.x / per_row<R>, c0 = (int)threadIdx.x % per_row<R>;
    int64_t row = row0 + r, keys = xt_keys_of(p, b);
    int64_t last = xt_visible(p, keys, row0 + T < p.sq ? row0 + T - 1 : p.sq - 1);
    uint64_t seed = p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    R m = -infinity<R>(), l = 0, o[columns<R>] = {};

    load_tile<R, T>(p.q, b, h, row0, p.sq, p.d, q);
    for (int64_t key0 = 0; key0 < last; key0 += T) {
        __syncthreads();
        load_tile<R, T>(p.k, b, h / p.group, key0, p.sk, p.d, kv);
        __syncthreads();
        dot_rows<R, T>(q, kv, p.d, s);
        __syncthreads();
        load_tile<R, T>(p.v, b, h / p.group, key0, p.sk, p.d, kv);
        R x[EACH], most = m, sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int c = c0 + i * per_row<R>;
            x[i] = score(p, b, h, row, key0 + c, keys, s[r * (T + 1) + c]);
            most = x[i] > most ? x[i] : most;
        }
        most = row_max(most);
        R base = most == -infinity<R>() ? R(0) : most;
        R shrink = exp(m - base);
        m = most;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int c = c0 + i * per_row<R>;
            x[i] = exp(x[i] - base);
            sum += x[i];
            if (p.p > 0)
                x[i] = xt_keeps(p, seed, b, h, row, key0 + c) ? x[i] * (R)p.keep_scale : R(0);
            s[r * (T + 1) + c] = x[i];
        }
        l = l * shrink + row_sum(sum);
#pragma unroll
        for (int i = 0; i < columns<R>; i++) o[i] *= shrink;
        __syncthreads();
        add_rows(o, s + r * (T + 1), 1, kv, p.d);
    }
    if (row >= p.sq) return;
    /* +inf for a row without keys, so that backward finds e^(s - lse) = 0 there. */
    if (p.lse && c0 == 0)
        ((R *)p.lse)[b * p.lse_batch + h * p.lse_head + row] = l == 0 ? infinity<R>() : m + log(l);
    save_row(p.out, b, h, row, p.d, o, l == 0 ? R(0) : 1 / l);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* delta = sum(g * out), LANES threads a row, N elements at a time; the sum goes by lanes. */
template <class T, int LANES, int N>
static __global__ void __launch_bounds__(THREADS)
    deltas(const __grid_constant__ struct xt_attention p) {
    using R = xt_real<T>;
    const int64_t i = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const bool there = i < p.batch * p.heads * p.sq;
    const int64_t row = i % p.sq, h = i / p.sq % p.heads, b = there ? i / p.sq / p.heads : 0;
    const T *g = (const T *)p.g.data + b * p.g.batch + h * p.g.head + row * p.g.row;
    const T *o = (const T *)p.out.data + b * p.out.batch + h * p.out.head + row * p.out.row;
    R sum = 0;
    for (int c = (int)threadIdx.x % LANES * N; there && c < p.d; c += LANES * N) {
        const xt_vector<T, N> x = *(const xt_vector<T, N> *)(g + c);
        const xt_vector<T, N> y = *(const xt_vector<T, N> *)(o + c);
#pragma unroll
        for (int k = 0; k < N; k++) sum += xt_to<R>(x.at[k]) * xt_to<R>(y.at[k]);
    }
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (there && threadIdx.x % LANES == 0) ((R *)p.delta)[i] = sum;
}

/*
 * p in s and ds in ds of a query tile and a key tile; s and ds hold q k^T and g v^T. Dropped
 * pairs: p is what met v, times 1 / (1 - p) or zero.
 */
template <class R>
__device__ static void probabilities(const struct xt_attention &p, uint64_t seed, int64_t b,
                                     int64_t h, int64_t row0, int64_t key0, int64_t keys, R *s,
                                     R *ds) {
    constexpr int T = tile<R>;
    int r = (int)threadIdx.x / per_row<R>, c0 = (int)threadIdx.x % per_row<R>;
    int64_t row = row0 + r;
    R lse = 0, delta = 0;
    if (row < p.sq) {
        lse = ((const R *)p.lse)[b * p.lse_batch + h * p.lse_head + row];
        delta = ((const R *)p.delta)[(b * p.heads + h) * p.sq + row];
    }
    for (int c = c0; c < T; c += per_row<R>) {
        int at = r * (T + 1) + c;
        R x = exp(score(p, b, h, row, key0 + c, keys, s[at]) - lse), dx = ds[at], kept = x;
        if (p.p > 0) {
            R by = xt_keeps(p, seed, b, h, row, key0 + c) ? (R)p.keep_scale : R(0);
            dx *= by;
            kept *= by;
        }
        s[at] = kept;
        ds[at] = x * (dx - delta) * (R)p.scale;
    }
}

/* A block a key tile of a key head. Shared: k, v, q, g, T x (d + 1), and s, ds, T x (T + 1). */
template <class R>
static __global__ void __launch_bounds__(THREADS, 1)
    backward_keys(const __grid_constant__ struct xt_attention p, int64_t tiles) {
    constexpr int T = tile<R>;
    extern __shared__ double shared[];
    int size = T * (p.d + 1);
    R *k = (R *)shared, *v = k + size, *q = v + size, *g = q + size;
    R *s = g + size, *ds = s + T * (T + 1);
    int64_t at = blockIdx.x, key0 = at % tiles * T;
    int64_t kv = at / tiles % p.kv_heads, b = at / tiles / p.kv_heads;
    int r = (int)threadIdx.x / per_row<R>;
    int64_t keys = xt_keys_of(p, b);
    uint64_t seed = p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    R dk[columns<R>] = {}, dv[columns<R>] = {};

    load_tile<R, T>(p.k, b, kv, key0, p.sk, p.d, k);
    load_tile<R, T>(p.v, b, kv, key0, p.sk, p.d, v);
    for (int64_t h = kv * p.group; h < (kv + 1) * p.group; h++)
        for (int64_t row0 = 0; row0 < p.sq; row0 += T) {
            if (xt_visible(p, keys, row0 + T - 1) <= key0) continue;
            __syncthreads();
            load_tile<R, T>(p.q, b, h, row0, p.sq, p.d, q);
            load_tile<R, T>(p.g, b, h, row0, p.sq, p.d, g);
            __syncthreads();
            dot_rows<R, T>(q, k, p.d, s);
            dot_rows<R, T>(g, v, p.d, ds);
            __syncthreads();
            probabilities(p, seed, b, h, row0, key0, keys, s, ds);
            __syncthreads();
            add_rows(dv, s + r, T + 1, g, p.d);
            add_rows(dk, ds + r, T + 1, q, p.d);
        }
    if (key0 + r >= p.sk) return;
    save_row(p.dk, b, kv, key0 + r, p.d, dk, R(1));
    save_row(p.dv, b, kv, key0 + r, p.d, dv, R(1));
}

/* A block a query tile of a head. Shared: as backward_keys. */
template <class R>
static __global__ void __launch_bounds__(THREADS, 1)
    backward_queries(const __grid_constant__ struct xt_attention p, int64_t tiles) {
    constexpr int T = tile<R>;
    extern __shared__ double shared[];
    int size = T * (p.d + 1);
    R *k = (R *)shared, *v = k + size, *q = v + size, *g = q + size;
    R *s = g + size, *ds = s + T * (T + 1);
    int64_t at = blockIdx.x, row0 = (tiles - 1 - at % tiles) * T;
    int64_t h = at / tiles % p.heads, b = at / tiles / p.heads;
    int r = (int)threadIdx.x / per_row<R>;
    int64_t keys = xt_keys_of(p, b);
    int64_t last = xt_visible(p, keys, row0 + T < p.sq ? row0 + T - 1 : p.sq - 1);
    uint64_t seed = p.p > 0 ? xt_seed_on_device(p.seed) : 0;
    R dq[columns<R>] = {};

    load_tile<R, T>(p.q, b, h, row0, p.sq, p.d, q);
    load_tile<R, T>(p.g, b, h, row0, p.sq, p.d, g);
    for (int64_t key0 = 0; key0 < last; key0 += T) {
        __syncthreads();
        load_tile<R, T>(p.k, b, h / p.group, key0, p.sk, p.d, k);
        load_tile<R, T>(p.v, b, h / p.group, key0, p.sk, p.d, v);
        __syncthreads();
        dot_rows<R, T>(q, k, p.d, s);
        dot_rows<R, T>(g, v, p.d, ds);
        __syncthreads();
        probabilities(p, seed, b, h, row0, key0, keys, s, ds);
        __syncthreads();
        add_rows(dq, ds + r * (T + 1), 1, k, p.d);
    }
    if (row0 + r < p.sq) save_row(p.dq, b, h, row0 + r, p.d, dq, R(1));
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Bytes of `rows` tiles of T x (d + 1) and `squares` of T x (T + 1). */
template <class R> static size_t shared_bytes(int d, int rows, int squares) {
    constexpr int T = tile<R>;
    return sizeof(R) * (size_t)(rows * T * (d + 1) + squares * T * (T + 1));
}

template <class R>
static enum xt_status run_forward(struct xt_ctx *ctx, const struct xt_attention &p) {
    const int64_t tiles = (p.sq + tile<R> - 1) / tile<R>;
    return xt_attention_launch(ctx, forward<R>, (unsigned)(p.batch * p.heads * tiles), THREADS,
                               shared_bytes<R>(p.d, 2, 1), p, tiles);
}

template <class R>
static enum xt_status run_backward(struct xt_ctx *ctx, const struct xt_attention &p) {
    const int64_t queries = (p.sq + tile<R> - 1) / tile<R>, keys = (p.sk + tile<R> - 1) / tile<R>;
    const size_t bytes = shared_bytes<R>(p.d, 4, 2);
    XT_TRY(xt_attention_launch(ctx, backward_keys<R>, (unsigned)(p.batch * p.kv_heads * keys),
                               THREADS, bytes, p, keys));
    return xt_attention_launch(ctx, backward_queries<R>, (unsigned)(p.batch * p.heads * queries),
                               THREADS, bytes, p, queries);
}

static enum xt_status run_deltas(struct xt_ctx *ctx, const struct xt_attention &p,
                                 enum xt_dtype dtype) {
    int64_t rows = p.batch * p.heads * p.sq;
    if (!rows) return XT_OK;
    const int64_t strides[] = {p.g.batch, p.g.head, p.g.row, p.out.batch, p.out.head, p.out.row};
    const int64_t lanes = 16 / (int64_t)xt_dtype_bytes(dtype);
    bool wide = p.d % lanes == 0 && xt_is_aligned16(p.g.data) && xt_is_aligned16(p.out.data);
    for (int k = 0; k < 6; k++) wide = wide && strides[k] % lanes == 0;
    const int64_t each = THREADS / (wide && p.d <= 4 * lanes    ? 4
                                    : wide && p.d <= 8 * lanes  ? 8
                                    : wide && p.d <= 16 * lanes ? 16
                                                                : 32);
    const unsigned blocks = (unsigned)((rows + each - 1) / each);
    cudaStream_t stream = xt_cuda_stream(ctx);
    XT_CUDA_FLOATS(dtype, {
        constexpr int N = xt_lanes<T>;
        if (!wide)
            deltas<T, 32, 1><<<blocks, THREADS, 0, stream>>>(p);
        else if (each == THREADS / 4)
            deltas<T, 4, N><<<blocks, THREADS, 0, stream>>>(p);
        else if (each == THREADS / 8)
            deltas<T, 8, N><<<blocks, THREADS, 0, stream>>>(p);
        else if (each == THREADS / 16)
            deltas<T, 16, N><<<blocks, THREADS, 0, stream>>>(p);
        else
            deltas<T, 32, N><<<blocks, THREADS, 0, stream>>>(p);
    })
    return xt_cuda_launched(ctx);
}

/* Those kernels count rows of a sequence and items of work in 32 bits. */
static bool takes_wgmma(const struct xt_ctx *ctx, const struct xt_attention &p) {
    const int64_t most = 1 << 30, longest = p.sq > p.sk ? p.sq : p.sk;
    return xt_has_wgmma(ctx) && longest < most && p.batch * p.heads * (longest / 64 + 1) < most;
}

static enum xt_status attention_tiled(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct xt_attention p = describe(l);
    p.out = heads_of(l->out[0]);
    if (l->out[1]) {
        p.lse = xt_data(l->out[1]);
        p.lse_batch = p.heads * p.sq;
        p.lse_head = p.sq;
    }
    switch (l->in[Q]->dtype) {
    case XT_F64: return run_forward<double>(ctx, p);
    case XT_F32: return run_forward<float>(ctx, p);
    default: return takes_wgmma(ctx, p) ? xt_attention_wgmma(ctx, p) : xt_attention_mma(ctx, p);
    }
}

static enum xt_status attention_tiled_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct xt_attention p = describe(l);
    enum xt_dtype dtype = l->in[Q]->dtype;
    enum xt_status status = XT_OK;
    size_t bytes = (size_t)(p.batch * p.heads * p.sq) * (dtype == XT_F64 ? 8 : 4);
    p.g = heads_of(l->in[GRAD]);
    p.out = heads_of(l->in[OUT]);
    p.dq = heads_of(l->out[Q]);
    p.dk = heads_of(l->out[K]);
    p.dv = heads_of(l->out[V]);
    p.lse = xt_data(l->in[LSE]);
    p.lse_batch = l->in[LSE]->stride[0];
    p.lse_head = l->in[LSE]->stride[1];
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, &p.delta));
    XT_GO(run_deltas(ctx, p, dtype));
    switch (dtype) {
    case XT_F64: status = run_backward<double>(ctx, p); break;
    case XT_F32: status = run_backward<float>(ctx, p); break;
    default:
        status =
            xt_has_wgmma(ctx) ? xt_attention_wgmma_grad(ctx, p) : xt_attention_mma_grad(ctx, p);
    }
done:
    xt_scratch_put(ctx, XT_CUDA, p.delta, bytes);
    return status;
}

/* ---- the table ------------------------------------------------------------------------------- */

#define FLOATS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

const struct xt_kernel xt_cuda_attention_kernels[] = {
    {"attention_tiled", FLOATS, XT_INNER, attention_tiled},
    {"attention_tiled_grad", FLOATS, XT_INNER, attention_tiled_grad},
    {},
};
