/*
 * mlp.cu: swiglu_mlp on the device: one product for gate and up, one pass over what it made, and
 * the product of down.
 *
 * A row of the pair is gate's values and then up's. A width that tensor cores take slowly (2730) is
 * grown by zeros inside: the weights are copied for that, which is little, and the values of all
 * rows are made in the grown width, where what was added stays zero. Backward makes the input of
 * the last product again in the pass that needs its factors anyway.
 */
#include "layout.h"

#define THREADS 256

/* ---- between the products -------------------------------------------------------------------- */

/* 1 / (1 + e^-x). Under 16-bit results its last bits are of no account: 2 ulp of f32. */
template <class T> static __device__ xt_real<T> mlp_sigmoid(xt_real<T> x) {
    if constexpr (sizeof(T) == 2)
        return __fdividef(1.0f, 1.0f + __expf(-x));
    else
        return 1 / (1 + exp(-x));
}

/* `vectors` of N elements, `across` of them a row of inner. */
struct mlp_rows {
    uint32_t vectors, across;
    struct xt_divisor by; /* across */
};

/* Where vector v lies in the pair (its gate) and in inner, in elements. */
struct mlp_place {
    int64_t pair, inner;
};

template <int N>
static __device__ struct mlp_place mlp_place_of(const struct mlp_rows &r, uint32_t v) {
    const uint32_t row = xt_divide(v, r.by), col = v - row * r.across;
    const int64_t width = (int64_t)r.across * N;
    const struct mlp_place at = {2 * row * width + (int64_t)col * N, (int64_t)v * N};
    return at;
}

/* Past what the caches still hold for others: backward takes 149 us in the place of 192 so (16384
   rows of 3072, H200). */
template <class T, int N> static __device__ void mlp_store(struct xt_vector<T, N> v, T *to) {
    if constexpr (sizeof v == sizeof(uint4))
        __stcs((uint4 *)to, *(const uint4 *)&v);
    else
        *(xt_vector<T, N> *)to = v;
}

/* inner = silu(gate) * up */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    mlp_forward(const __grid_constant__ struct mlp_rows r, const T *pair, T *inner) {
    using R = xt_real<T>;
    const int64_t width = (int64_t)r.across * N;
    for (uint32_t v = blockIdx.x * THREADS + threadIdx.x; v < r.vectors; v += gridDim.x * THREADS) {
        const struct mlp_place at = mlp_place_of<N>(r, v);
        const auto gate = *(const xt_vector<T, N> *)(pair + at.pair);
        const auto up = *(const xt_vector<T, N> *)(pair + at.pair + width);
        xt_vector<T, N> out;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const R g = xt_to<R>(gate.at[k]);
            out.at[k] = xt_to<T>(g * mlp_sigmoid<T>(g) * xt_to<R>(up.at[k]));
        }
        *(xt_vector<T, N> *)(inner + at.inner) = out;
    }
}

/* dpair from the gradient of inner, in the place of which comes inner itself. No gradient gives
   none. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    mlp_backward(const __grid_constant__ struct mlp_rows r, const T *pair, T *inner, T *dpair) {
    using R = xt_real<T>;
    const int64_t width = (int64_t)r.across * N;
    for (uint32_t v = blockIdx.x * THREADS + threadIdx.x; v < r.vectors; v += gridDim.x * THREADS) {
        const struct mlp_place at = mlp_place_of<N>(r, v);
        const auto gate = *(const xt_vector<T, N> *)(pair + at.pair);
        const auto up = *(const xt_vector<T, N> *)(pair + at.pair + width);
        auto in = *(const xt_vector<T, N> *)(inner + at.inner);
        xt_vector<T, N> dgate, dup;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const R g = xt_to<R>(gate.at[k]), u = xt_to<R>(up.at[k]), d = xt_to<R>(in.at[k]);
            const R s = mlp_sigmoid<T>(g), silu = g * s;
            in.at[k] = xt_to<T>(silu * u);
            dgate.at[k] = xt_to<T>(d == 0 ? d : d * u * (s * (1 + g * (1 - s))));
            dup.at[k] = xt_to<T>(d == 0 ? d : d * silu);
        }
        mlp_store(in, inner + at.inner);
        mlp_store(dgate, dpair + at.pair);
        mlp_store(dup, dpair + at.pair + width);
    }
}

/* Runs forward, or with dpair backward, in parts of fewer than 2^31 vectors. */
template <class T, int N>
static enum xt_status mlp_pass(struct xt_ctx *ctx, int64_t rows, int64_t width, const T *pair,
                               T *inner, T *dpair) {
    const int64_t across = width / N, most = across ? INT32_MAX / across : 0;
    for (int64_t first = 0; first < rows && across; first += most) {
        const int64_t part = rows - first < most ? rows - first : most;
        const struct mlp_rows r = {(uint32_t)(part * across), (uint32_t)across,
                                   xt_divisor_of(across)};
        const unsigned blocks = xt_cuda_blocks(r.vectors, THREADS);
        const T *from = pair + 2 * first * width;
        T *in = inner + first * width;
        if (dpair)
            mlp_backward<T, N><<<blocks, THREADS, 0, xt_cuda_stream(ctx)>>>(
                r, from, in, dpair + 2 * first * width);
        else
            mlp_forward<T, N><<<blocks, THREADS, 0, xt_cuda_stream(ctx)>>>(r, from, in);
        XT_TRY(xt_cuda_launched(ctx));
    }
    return XT_OK;
}

template <class T>
static enum xt_status mlp_between(struct xt_ctx *ctx, int64_t rows, int64_t width, const void *pair,
                                  void *inner, void *dpair) {
    constexpr int N = xt_lanes<T>;
    if (width % N == 0)
        return mlp_pass<T, N>(ctx, rows, width, (const T *)pair, (T *)inner, (T *)dpair);
    return mlp_pass<T, 1>(ctx, rows, width, (const T *)pair, (T *)inner, (T *)dpair);
}

/* ---- sizes and scratch ----------------------------------------------------------------------- */

struct mlp {
    enum xt_dtype dtype;
    int64_t rows, in, ffn, out;
    int64_t width;                /* ffn, grown */
    const void *gate, *up, *down; /* the weights as they were given */
    /* Pieces of one scratch. */
    void *scratch;
    size_t bytes;       /* of scratch */
    const void *both;   /* gate over up, 2 width x in: a piece unless they lie so */
    const void *narrow; /* down as out x width: a piece if it was grown */
    void *pair;         /* rows x 2 width, unless it is kept */
    void *inner;        /* rows x width */
    void *dpair;        /* rows x 2 width */
};

static struct mlp mlp_of(struct xt_tensor *const *in, int64_t width) {
    struct mlp m = {};
    m.dtype = in[0]->dtype;
    m.in = in[1]->shape[1], m.ffn = in[1]->shape[0], m.out = in[3]->shape[0];
    m.rows = 1;
    for (int d = 0; d < in[0]->ndim - 1; d++) m.rows *= in[0]->shape[d];
    m.width = width;
    m.gate = xt_data(in[1]), m.up = xt_data(in[2]), m.down = xt_data(in[3]);
    return m;
}

/* n elements more of the scratch, at a multiple of 512 bytes; NULL while it is measured. */
static void *piece(struct mlp *m, int64_t n, size_t *used) {
    void *data = m->scratch ? (char *)m->scratch + *used : NULL;
    *used += ((size_t)n * xt_dtype_bytes(m->dtype) + 511) / 512 * 512;
    return data;
}

static void lay_out_pieces(struct mlp *m, bool keeps_pair, bool backward) {
    size_t used = 0;
    m->both = piece(m, 2 * m->width * m->in, &used);
    m->narrow = m->width == m->ffn ? m->down : piece(m, m->out * m->width, &used);
    m->inner = piece(m, m->rows * m->width, &used);
    if (!keeps_pair) m->pair = piece(m, 2 * m->rows * m->width, &used);
    if (backward) m->dpair = piece(m, 2 * m->rows * m->width, &used);
    m->bytes = used;
}

/* Takes scratch and brings the weights there. */
static enum xt_status begin(struct xt_ctx *ctx, struct mlp *m, bool keeps_pair, bool backward) {
    lay_out_pieces(m, keeps_pair, backward);
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, m->bytes, &m->scratch));
    lay_out_pieces(m, keeps_pair, backward);
    const size_t half = (size_t)(m->width * m->in) * xt_dtype_bytes(m->dtype);
    void *first = (void *)m->both, *second = (char *)first + half;
    enum xt_status status = XT_OK;
    if (m->width == m->ffn && (const char *)m->up == (const char *)m->gate + half) {
        m->both = m->gate; /* the copies that compute are made one after the other */
    } else {
        XT_GO(xt_cuda_grow(ctx, m->dtype, first, m->width, m->in, m->gate, m->ffn, m->in));
        XT_GO(xt_cuda_grow(ctx, m->dtype, second, m->width, m->in, m->up, m->ffn, m->in));
    }
    if (m->narrow != m->down)
        XT_GO(xt_cuda_grow(ctx, m->dtype, (void *)m->narrow, m->out, m->width, m->down, m->out,
                           m->ffn));
    return XT_OK;
done:
    xt_scratch_put(ctx, XT_CUDA, m->scratch, m->bytes);
    return status;
}

/* ---- products -------------------------------------------------------------------------------- */

/* c (m x n) = a (m x k) @ b (k x n), all contiguous, but b is n x k when it is turned. */
static enum xt_status multiply_rows(struct xt_ctx *ctx, enum xt_dtype dtype, int64_t m, int64_t n,
                                    int64_t k, const void *a, const void *b, bool turned, void *c) {
    const struct xt_cuda_factor rows = xt_cuda_rows(a, m, k, k);
    const struct xt_cuda_factor by =
        turned ? xt_cuda_turned(xt_cuda_rows(b, n, k, k)) : xt_cuda_rows(b, k, n, n);
    const struct xt_cuda_gemm g = xt_cuda_gemm_of(dtype, rows, by, dtype, c, n);
    return xt_cuda_gemm(ctx, &g);
}

/* A factor of a weight's gradient: columns of a matrix with a row for each row of x. */
struct mlp_columns {
    const void *data;
    int64_t n;     /* columns that count */
    int64_t grown; /* columns that may be read */
    int64_t row;   /* elements from row to row */
};

/* target (a.n x b.n) = or += a^T @ b over the rows. */
static enum xt_status weight_gradient(struct xt_ctx *ctx, const struct mlp *m,
                                      const struct mlp_columns &a, const struct mlp_columns &b,
                                      struct xt_tensor *target, bool add) {
    if (!target) return XT_OK;
    struct xt_cuda_gemm g = xt_cuda_gemm_of(
        m->dtype, xt_cuda_turned(xt_cuda_rows(a.data, m->rows, a.n, a.row)),
        xt_cuda_rows(b.data, m->rows, b.n, b.row), target->dtype, xt_data(target), b.n);
    g.beta = add;
    g.grown_m = a.grown, g.grown_n = b.grown;
    return xt_cuda_gemm(ctx, &g);
}

/* ---- forward --------------------------------------------------------------------------------- */

template <class T>
static enum xt_status mlp_of_rows(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    struct mlp m = mlp_of(l->in, xt_mlp_width(x, l->in[1]));
    enum xt_status status = XT_OK;
    if (m.rows == 0 || m.out == 0) return XT_OK;
    if (l->out[1]) m.pair = xt_data(l->out[1]);
    XT_TRY(begin(ctx, &m, l->out[1] != NULL, false));
    XT_GO(multiply_rows(ctx, m.dtype, m.rows, 2 * m.width, m.in, xt_data(x), m.both, true, m.pair));
    XT_GO(mlp_between<T>(ctx, m.rows, m.width, m.pair, m.inner, NULL));
    XT_GO(multiply_rows(ctx, m.dtype, m.rows, m.out, m.width, m.inner, m.narrow, true,
                        xt_data(l->out[0])));
done:
    xt_scratch_put(ctx, XT_CUDA, m.scratch, m.bytes);
    return status;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Inputs x, gate, up, down as in forward; then the gradient, the pair and what is written. */
enum { X, GATE, UP, DOWN, GRAD, PAIR, DGATE, DUP, DDOWN };

template <class T>
static enum xt_status mlp_grad_of_rows(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct xt_tensor *const *in = l->in;
    struct mlp m = mlp_of(in, in[PAIR]->shape[1] / 2);
    const void *grad = xt_data(in[GRAD]), *x = xt_data(in[X]);
    enum xt_status status = XT_OK;
    m.pair = xt_data(in[PAIR]);
    XT_TRY(begin(ctx, &m, true, true));
    XT_GO(multiply_rows(ctx, m.dtype, m.rows, m.width, m.out, grad, m.narrow, false, m.inner));
    XT_GO(mlp_between<T>(ctx, m.rows, m.width, m.pair, m.inner, m.dpair));
    {
        const struct mlp_columns of_x = {x, m.in, m.in, m.in},
                                 of_grad = {grad, m.out, m.out, m.out};
        const struct mlp_columns inner = {m.inner, m.ffn, m.width, m.width};
        const struct mlp_columns gate = {m.dpair, m.ffn, m.width, 2 * m.width};
        const struct mlp_columns up = {(T *)m.dpair + m.width, m.ffn, m.width, 2 * m.width};
        XT_GO(weight_gradient(ctx, &m, gate, of_x, in[DGATE], l->attrs[1].i != 0));
        XT_GO(weight_gradient(ctx, &m, up, of_x, in[DUP], l->attrs[2].i != 0));
        XT_GO(weight_gradient(ctx, &m, of_grad, inner, in[DDOWN], l->attrs[3].i != 0));
    }
    if (l->attrs[0].i)
        status = multiply_rows(ctx, m.dtype, m.rows, m.in, 2 * m.width, m.dpair, m.both, false,
                               xt_data(l->out[0]));
done:
    xt_scratch_put(ctx, XT_CUDA, m.scratch, m.bytes);
    return status;
}

/* ---- the table ------------------------------------------------------------------------------- */

static enum xt_status swiglu_mlp(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return mlp_of_rows<T>(ctx, l);)
    return XT_OK;
}

static enum xt_status swiglu_mlp_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return mlp_grad_of_rows<T>(ctx, l);)
    return XT_OK;
}

const struct xt_kernel xt_cuda_mlp_kernels[] = {
    {"swiglu_mlp_fused", XT_CUDA_FACTORS, XT_CONTIGUOUS, swiglu_mlp},
    {"swiglu_mlp_grad", XT_CUDA_FACTORS, XT_CONTIGUOUS, swiglu_mlp_grad},
    {},
};
