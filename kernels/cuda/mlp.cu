/*
 * mlp.cu: swiglu_mlp on the device: three products, and between them one pass over what they made.
 *
 * A width that tensor cores take slowly (2730) is grown by zeros inside: the weights are copied,
 * which is little, and the values of all rows are made in the grown width, where what was added
 * stays zero. Backward makes the input of the last product again in the pass that needs its
 * factors anyway.
 */
#include "cuda.h"

#define THREADS 256

/* ---- between the products -------------------------------------------------------------------- */

/* 1 / (1 + e^-x). Under 16-bit results its last bits are of no account: 2 ulp of f32. */
template <class T> static __device__ xt_real<T> mlp_sigmoid(xt_real<T> x) {
    if constexpr (sizeof(T) == 2)
        return __fdividef(1.0f, 1.0f + __expf(-x));
    else
        return 1 / (1 + exp(-x));
}

/* What one thread reads and writes at a time. */
template <class T> using mlp_vector = struct xt_vector<T, xt_lanes<T>>;

/* inner = silu(gated) * upped */
template <class T>
static __device__ void mlp_gate(const mlp_vector<T> &gated, const mlp_vector<T> &upped,
                                mlp_vector<T> *inner) {
    using R = xt_real<T>;
#pragma unroll
    for (int k = 0; k < xt_lanes<T>; k++) {
        const R g = xt_to<R>(gated.at[k]);
        inner->at[k] = xt_to<T>(g * mlp_sigmoid<T>(g) * xt_to<R>(upped.at[k]));
    }
}

/* Both gradients from that of inner, which becomes inner itself. No gradient gives none. */
template <class T>
static __device__ void mlp_gate_grad(const mlp_vector<T> &gated, const mlp_vector<T> &upped,
                                     mlp_vector<T> *inner, mlp_vector<T> *dgated,
                                     mlp_vector<T> *dupped) {
    using R = xt_real<T>;
#pragma unroll
    for (int k = 0; k < xt_lanes<T>; k++) {
        const R g = xt_to<R>(gated.at[k]), u = xt_to<R>(upped.at[k]), d = xt_to<R>(inner->at[k]);
        const R s = mlp_sigmoid<T>(g), silu = g * s;
        inner->at[k] = xt_to<T>(silu * u);
        dgated->at[k] = xt_to<T>(d == 0 ? d : d * u * (s * (1 + g * (1 - s))));
        dupped->at[k] = xt_to<T>(d == 0 ? d : d * silu);
    }
}

/* Elements i to i + N - 1 of those below n. */
template <class T> static __device__ mlp_vector<T> mlp_read(const T *from, int64_t i, int64_t n) {
    mlp_vector<T> v;
    if (i + xt_lanes<T> <= n) return *(const mlp_vector<T> *)(from + i);
#pragma unroll
    for (int k = 0; k < xt_lanes<T>; k++) v.at[k] = i + k < n ? from[i + k] : T();
    return v;
}
template <class T>
static __device__ void mlp_write(const mlp_vector<T> &v, T *to, int64_t i, int64_t n) {
    if (i + xt_lanes<T> <= n) {
        *(mlp_vector<T> *)(to + i) = v;
        return;
    }
#pragma unroll
    for (int k = 0; k < xt_lanes<T>; k++)
        if (i + k < n) to[i + k] = v.at[k];
}

/* All arrays hold n elements, aligned to 16 bytes. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    mlp_forward(const T *gated, const T *upped, T *inner, int64_t n) {
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t j = (int64_t)blockIdx.x * THREADS + threadIdx.x; j * xt_lanes<T> < n; j += step) {
        const int64_t i = j * xt_lanes<T>;
        const mlp_vector<T> g = mlp_read(gated, i, n), u = mlp_read(upped, i, n);
        mlp_vector<T> out;
        mlp_gate<T>(g, u, &out);
        mlp_write(out, inner, i, n);
    }
}

/* inner holds its gradient before and itself after. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    mlp_backward(const T *gated, const T *upped, T *inner, T *dgated, T *dupped, int64_t n) {
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t j = (int64_t)blockIdx.x * THREADS + threadIdx.x; j * xt_lanes<T> < n; j += step) {
        const int64_t i = j * xt_lanes<T>;
        const mlp_vector<T> g = mlp_read(gated, i, n), u = mlp_read(upped, i, n);
        mlp_vector<T> d = mlp_read<T>(inner, i, n), dg, du;
        mlp_gate_grad<T>(g, u, &d, &dg, &du);
        mlp_write(d, inner, i, n);
        mlp_write(dg, dgated, i, n);
        mlp_write(du, dupped, i, n);
    }
}

static unsigned mlp_blocks(int64_t n, enum xt_dtype dtype) {
    return xt_cuda_blocks(n, THREADS * (int64_t)(16 / xt_dtype_bytes(dtype)));
}

/* ---- sizes and scratch ----------------------------------------------------------------------- */

struct mlp {
    enum xt_dtype dtype, wide; /* of x, and of its weights' gradients */
    int64_t rows, in, ffn, out;
    int64_t width;                /* ffn, grown */
    const void *gate, *up, *down; /* weights: width x in, width x in, out x width */
};

/* Pieces of one scratch, each at a multiple of 512 bytes. */
struct pieces {
    char *at;     /* NULL: only counted */
    size_t bytes; /* used up */
};

static void *piece(struct pieces *p, int64_t n, enum xt_dtype dtype) {
    void *data = p->at ? p->at + p->bytes : NULL;
    p->bytes += ((size_t)n * xt_dtype_bytes(dtype) + 511) / 512 * 512;
    return data;
}

static struct mlp mlp_of(const struct xt_tensor *x, const struct xt_tensor *gate,
                         const struct xt_tensor *up, const struct xt_tensor *down, int64_t width) {
    struct mlp m = {};
    m.dtype = x->dtype;
    m.wide = x->dtype == XT_F64 ? XT_F64 : XT_F32;
    m.in = gate->shape[1], m.ffn = gate->shape[0], m.out = down->shape[0];
    m.rows = 1;
    for (int d = 0; d < x->ndim - 1; d++) m.rows *= x->shape[d];
    m.width = width;
    m.gate = xt_data(gate), m.up = xt_data(up), m.down = xt_data(down);
    return m;
}

/* Where a width was grown, the weights are copied into it. */
static enum xt_status grow_weights(struct xt_ctx *ctx, struct mlp *m, struct pieces *p) {
    if (m->width == m->ffn) return XT_OK;
    void *gate = piece(p, m->width * m->in, m->dtype), *up = piece(p, m->width * m->in, m->dtype);
    void *down = piece(p, m->out * m->width, m->dtype);
    if (!p->at) return XT_OK;
    XT_TRY(xt_cuda_grow(ctx, m->dtype, gate, m->width, m->in, m->gate, m->ffn, m->in));
    XT_TRY(xt_cuda_grow(ctx, m->dtype, up, m->width, m->in, m->up, m->ffn, m->in));
    XT_TRY(xt_cuda_grow(ctx, m->dtype, down, m->out, m->width, m->down, m->out, m->ffn));
    m->gate = gate, m->up = up, m->down = down;
    return XT_OK;
}

/* ---- products -------------------------------------------------------------------------------- */

/* c (m x n) = a (m x k) @ b (k x n), all contiguous but b, when `turned`, is n x k. */
static struct xt_cuda_gemm product_of(enum xt_dtype dtype, int64_t m, int64_t n, int64_t k,
                                      const void *a, const void *b, bool turned, void *c) {
    struct xt_cuda_gemm g = {};
    g.in = g.out = dtype;
    g.m = m, g.n = n, g.k = k, g.batch = 1;
    g.a = a, g.a_row = k, g.a_col = 1;
    g.b = b, g.b_row = turned ? 1 : n, g.b_col = turned ? k : 1;
    g.c = c, g.c_row = n;
    g.alpha = 1;
    return g;
}

/* target (m x n) = or += a^T @ b over the rows; a and b are as wide as they were grown. */
static enum xt_status weight_gradient(struct xt_ctx *ctx, const struct mlp *p, const void *a,
                                      int64_t m, int64_t a_width, const void *b, int64_t n,
                                      int64_t b_width, struct xt_tensor *target, bool add) {
    if (!target) return XT_OK;
    struct xt_cuda_gemm g = product_of(p->dtype, m, n, p->rows, a, b, false, xt_data(target));
    g.out = p->wide;
    g.a_row = 1, g.a_col = a_width;
    g.b_row = b_width;
    g.grown_m = a_width == m ? 0 : a_width;
    g.grown_n = b_width == n ? 0 : b_width;
    g.beta = add;
    return xt_cuda_gemm(ctx, &g);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Lays out scratch; with p->at, also fills it: the weights, the factors unless they are kept. */
static enum xt_status forward_pieces(struct xt_ctx *ctx, struct mlp *m, struct pieces *p,
                                     void **gated, void **upped, void **inner) {
    const int64_t n = m->rows * m->width;
    XT_TRY(grow_weights(ctx, m, p));
    if (!*gated) *gated = piece(p, n, m->dtype);
    if (!*upped) *upped = piece(p, n, m->dtype);
    *inner = piece(p, n, m->dtype);
    return XT_OK;
}

template <class T>
static enum xt_status mlp_of_rows(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    struct mlp m = mlp_of(x, l->in[1], l->in[2], l->in[3], xt_mlp_width(x, l->in[1]));
    const int64_t n = m.rows * m.width;
    void *kept[2] = {l->out[1] ? xt_data(l->out[1]) : NULL, l->out[2] ? xt_data(l->out[2]) : NULL};
    void *gated = kept[0], *upped = kept[1], *inner = NULL;
    struct pieces p = {};
    if (m.rows == 0 || m.out == 0) return XT_OK;
    XT_TRY(forward_pieces(ctx, &m, &p, &gated, &upped, &inner));
    const size_t bytes = p.bytes;
    enum xt_status status = XT_OK;
    void *scratch = NULL;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, &scratch));
    p.at = (char *)scratch, p.bytes = 0;
    gated = kept[0], upped = kept[1];
    XT_GO(forward_pieces(ctx, &m, &p, &gated, &upped, &inner));
    {
        const struct xt_cuda_gemm to_gate =
            product_of(m.dtype, m.rows, m.width, m.in, xt_data(x), m.gate, true, gated);
        const struct xt_cuda_gemm to_up =
            product_of(m.dtype, m.rows, m.width, m.in, xt_data(x), m.up, true, upped);
        const struct xt_cuda_gemm to_out =
            product_of(m.dtype, m.rows, m.out, m.width, inner, m.down, true, xt_data(l->out[0]));
        XT_GO(xt_cuda_gemm(ctx, &to_gate));
        XT_GO(xt_cuda_gemm(ctx, &to_up));
        if (n > 0)
            mlp_forward<T><<<mlp_blocks(n, m.dtype), THREADS, 0, xt_cuda_stream(ctx)>>>(
                (const T *)gated, (const T *)upped, (T *)inner, n);
        XT_GO(xt_cuda_launched(ctx));
        XT_GO(xt_cuda_gemm(ctx, &to_out));
    }
done:
    if (scratch) xt_scratch_put(ctx, XT_CUDA, scratch, bytes);
    return status;
}

/* ---- backward -------------------------------------------------------------------------------- */

enum { GRAD, X, GATE, UP, DOWN, GATED, UPPED, ONTO, DGATE, DUP, DDOWN };

static enum xt_status backward_pieces(struct xt_ctx *ctx, struct mlp *m, struct pieces *p,
                                      void **inner, void **dgated, void **dupped) {
    const int64_t n = m->rows * m->width;
    XT_TRY(grow_weights(ctx, m, p));
    *inner = piece(p, n, m->dtype);
    *dgated = piece(p, n, m->dtype);
    *dupped = piece(p, n, m->dtype);
    return XT_OK;
}

/* dx = onto + dgated @ gate + dupped @ up */
static enum xt_status input_gradient(struct xt_ctx *ctx, const struct mlp *m, const void *dgated,
                                     const void *dupped, const struct xt_tensor *onto,
                                     const struct xt_tensor *dx) {
    struct xt_cuda_gemm g =
        product_of(m->dtype, m->rows, m->in, m->width, dgated, m->gate, false, xt_data(dx));
    if (onto) {
        g.beta = 1;
        g.add = xt_data(onto);
    }
    XT_TRY(xt_cuda_gemm(ctx, &g));
    g.a = dupped, g.b = m->up;
    g.beta = 1;
    g.add = NULL;
    return xt_cuda_gemm(ctx, &g);
}

template <class T>
static enum xt_status mlp_grad_of_rows(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct xt_tensor *const *in = l->in;
    struct mlp m = mlp_of(in[X], in[GATE], in[UP], in[DOWN], in[GATED]->shape[1]);
    const int64_t n = m.rows * m.width;
    void *inner = NULL, *dgated = NULL, *dupped = NULL, *scratch = NULL;
    const void *grad = xt_data(in[GRAD]), *x = xt_data(in[X]);
    struct pieces p = {};
    XT_TRY(backward_pieces(ctx, &m, &p, &inner, &dgated, &dupped));
    const size_t bytes = p.bytes;
    enum xt_status status = XT_OK;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, &scratch));
    p.at = (char *)scratch, p.bytes = 0;
    XT_GO(backward_pieces(ctx, &m, &p, &inner, &dgated, &dupped));
    {
        const struct xt_cuda_gemm to_inner =
            product_of(m.dtype, m.rows, m.width, m.out, grad, m.down, false, inner);
        XT_GO(xt_cuda_gemm(ctx, &to_inner));
    }
    if (n > 0)
        mlp_backward<T><<<mlp_blocks(n, m.dtype), THREADS, 0, xt_cuda_stream(ctx)>>>(
            (const T *)xt_data(in[GATED]), (const T *)xt_data(in[UPPED]), (T *)inner, (T *)dgated,
            (T *)dupped, n);
    XT_GO(xt_cuda_launched(ctx));
    XT_GO(weight_gradient(ctx, &m, dgated, m.ffn, m.width, x, m.in, m.in, in[DGATE],
                          l->attrs[1].i != 0));
    XT_GO(weight_gradient(ctx, &m, dupped, m.ffn, m.width, x, m.in, m.in, in[DUP],
                          l->attrs[2].i != 0));
    XT_GO(weight_gradient(ctx, &m, grad, m.out, m.out, inner, m.ffn, m.width, in[DDOWN],
                          l->attrs[3].i != 0));
    if (l->attrs[0].i) status = input_gradient(ctx, &m, dgated, dupped, in[ONTO], l->out[0]);
done:
    if (scratch) xt_scratch_put(ctx, XT_CUDA, scratch, bytes);
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

#define FACTORS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

const struct xt_kernel xt_cuda_mlp_kernels[] = {
    {"swiglu_mlp_fused", FACTORS, XT_CONTIGUOUS, swiglu_mlp},
    {"swiglu_mlp_grad", FACTORS, XT_CONTIGUOUS, swiglu_mlp_grad},
    {},
};
