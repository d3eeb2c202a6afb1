/*
 * pointwise.h: runs a function of elements over tensors of any strides; what ../pointwise.def
 * says, in the words of CUDA.
 *
 * The function is a struct Op with IN and OUT, the counts of its operands, and
 * `template <class real> static void of(const real *in, real *out, real p0, real p1)`. Operands are
 * broadcast to the shape of output 0; one that is left out reads as 0. Tensors that lie one behind
 * the other are read and written 16 bytes at a time.
 */
#ifndef XT_CUDA_POINTWISE_H
#define XT_CUDA_POINTWISE_H

#include "cuda.h"

#define XT_POINTWISE_OPERANDS 6

/* The loop over one op's operands, inputs first; dimensions that lie as one are merged. */
struct xt_plan {
    int ndim;  /* 1 or more */
    int64_t n; /* elements in all */
    int64_t shape[XT_MAX_DIMS];
    int64_t stride[XT_POINTWISE_OPERANDS][XT_MAX_DIMS]; /* in elements, 0 where broadcast */
    void *data[XT_POINTWISE_OPERANDS];                  /* NULL: left out */
};

static inline void xt_plan_start(struct xt_plan *p, const struct xt_tensor *like) {
    p->ndim = like->ndim;
    p->n = 1;
    for (int d = 0; d < like->ndim; d++) p->n *= p->shape[d] = like->shape[d];
}

static inline void xt_plan_operand(struct xt_plan *p, int k, const struct xt_tensor *t) {
    p->data[k] = t ? xt_data(t) : NULL;
    int lead = p->ndim - (t ? t->ndim : 0);
    for (int d = 0; d < p->ndim; d++)
        p->stride[k][d] = !t || d < lead || t->shape[d - lead] == 1 ? 0 : t->stride[d - lead];
}

static inline void xt_plan_merge(struct xt_plan *p, int operands) {
    int kept = -1;
    for (int d = 0; d < p->ndim; d++) {
        if (p->shape[d] == 1) continue;
        bool merge = kept >= 0;
        for (int k = 0; k < operands && merge; k++)
            merge = p->stride[k][kept] == p->shape[d] * p->stride[k][d];
        if (!merge) kept++;
        p->shape[kept] = merge ? p->shape[kept] * p->shape[d] : p->shape[d];
        for (int k = 0; k < operands; k++) p->stride[k][kept] = p->stride[k][d];
    }
    p->ndim = kept + 1;
    if (p->ndim > 0) return;
    p->ndim = 1;
    p->shape[0] = 1;
    for (int k = 0; k < operands; k++) p->stride[k][0] = 0;
}

/* One element, by its place in each operand. */
template <class Op, class T, class R>
__device__ inline void xt_point(const struct xt_plan &p, const int64_t *at, double p0, double p1) {
    using real = xt_real<T>;
    real in[Op::IN], out[Op::OUT];
#pragma unroll
    for (int k = 0; k < Op::IN; k++)
        in[k] = p.data[k] ? xt_to<real>(((const T *)p.data[k])[at[k]]) : (real)0;
    Op::template of<real>(in, out, (real)p0, (real)p1);
#pragma unroll
    for (int k = 0; k < Op::OUT; k++) ((R *)p.data[Op::IN + k])[at[Op::IN + k]] = xt_to<R>(out[k]);
}

/* All operands lie one behind the other, or are one element; aligned to VEC of them. */
template <class Op, class T, class R, int VEC>
__global__ void xt_pointwise_flat(struct xt_plan p, double p0, double p1) {
    using real = xt_real<T>;
    int64_t step = (int64_t)gridDim.x * blockDim.x * VEC;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * VEC; i < p.n; i += step) {
        if (i + VEC > p.n) {
            for (int64_t j = i; j < p.n; j++) {
                int64_t at[Op::IN + Op::OUT];
#pragma unroll
                for (int k = 0; k < Op::IN + Op::OUT; k++) at[k] = p.stride[k][0] * j;
                xt_point<Op, T, R>(p, at, p0, p1);
            }
            return;
        }
        xt_vector<T, VEC> in[Op::IN];
        xt_vector<R, VEC> out[Op::OUT];
#pragma unroll
        for (int k = 0; k < Op::IN; k++) {
            if (!p.data[k]) continue;
            if (p.stride[k][0])
                in[k] = *(const xt_vector<T, VEC> *)((const T *)p.data[k] + i);
            else
                in[k].at[0] = *(const T *)p.data[k];
        }
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            real x[Op::IN], y[Op::OUT];
#pragma unroll
            for (int k = 0; k < Op::IN; k++)
                x[k] =
                    !p.data[k] ? (real)0 : xt_to<real>(p.stride[k][0] ? in[k].at[j] : in[k].at[0]);
            Op::template of<real>(x, y, (real)p0, (real)p1);
#pragma unroll
            for (int k = 0; k < Op::OUT; k++) out[k].at[j] = xt_to<R>(y[k]);
        }
#pragma unroll
        for (int k = 0; k < Op::OUT; k++)
            *(xt_vector<R, VEC> *)((R *)p.data[Op::IN + k] + i) = out[k];
    }
}

/* Any strides; I is wide enough for every count. */
template <class Op, class T, class R, class I>
__global__ void xt_pointwise_strided(struct xt_plan p, double p0, double p1) {
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += step) {
        int64_t at[Op::IN + Op::OUT] = {0};
        I rest = (I)i;
        for (int d = p.ndim - 1; d >= 0; d--) {
            I size = (I)p.shape[d], q = rest / size, r = rest - q * size;
#pragma unroll
            for (int k = 0; k < Op::IN + Op::OUT; k++) at[k] += (int64_t)r * p.stride[k][d];
            rest = q;
        }
        xt_point<Op, T, R>(p, at, p0, p1);
    }
}

/* Whether one loop over vectors will do. */
static inline bool xt_plan_is_flat(const struct xt_plan *p, int operands, int inputs,
                                   size_t in_bytes, size_t out_bytes, int lanes) {
    if (p->ndim > 1) return false;
    for (int k = 0; k < operands; k++) {
        size_t bytes = (k < inputs ? in_bytes : out_bytes) * (size_t)lanes;
        if (!p->data[k]) continue;
        if (p->stride[k][0] == 0 && k < inputs) continue;
        if (p->stride[k][0] != 1 && p->n > 1) return false;
        if ((uintptr_t)p->data[k] % bytes) return false;
    }
    return true;
}

/* Runs a plan whose operands are set: Op of T to R. */
template <class Op, class T, class R>
enum xt_status xt_pointwise_plan(struct xt_ctx *ctx, struct xt_plan *p, double p0, double p1) {
    constexpr int LANES = 16 / (int)(sizeof(T) > sizeof(R) ? sizeof(T) : sizeof(R));
    constexpr int THREADS = 256;
    if (p->n == 0) return XT_OK;
    xt_plan_merge(p, Op::IN + Op::OUT);
    cudaStream_t stream = xt_cuda_stream(ctx);
    if (xt_plan_is_flat(p, Op::IN + Op::OUT, Op::IN, sizeof(T), sizeof(R), LANES)) {
        unsigned blocks = xt_cuda_blocks(p->n, THREADS * LANES);
        xt_pointwise_flat<Op, T, R, LANES><<<blocks, THREADS, 0, stream>>>(*p, p0, p1);
    } else {
        unsigned blocks = xt_cuda_blocks(p->n, THREADS);
        if (p->n < INT32_MAX)
            xt_pointwise_strided<Op, T, R, uint32_t><<<blocks, THREADS, 0, stream>>>(*p, p0, p1);
        else
            xt_pointwise_strided<Op, T, R, int64_t><<<blocks, THREADS, 0, stream>>>(*p, p0, p1);
    }
    return xt_cuda_launched(ctx);
}

template <class Op, class T, class R>
enum xt_status xt_pointwise(struct xt_ctx *ctx, const struct xt_launch *l, double p0, double p1) {
    struct xt_plan p;
    xt_plan_start(&p, l->out[0]);
    for (int k = 0; k < Op::IN; k++) xt_plan_operand(&p, k, k < l->n_in ? l->in[k] : NULL);
    for (int k = 0; k < Op::OUT; k++) xt_plan_operand(&p, Op::IN + k, l->out[k]);
    return xt_pointwise_plan<Op, T, R>(ctx, &p, p0, p1);
}

/* ---- what rows say beside arithmetic --------------------------------------------------------- */

#define XT_EXP(x) exp(x)
#define XT_LOG(x) log(x)
#define XT_SQRT(x) sqrt(x)
#define XT_ABS(x) fabs(x)
#define XT_SIN(x) sin(x)
#define XT_COS(x) cos(x)
#define XT_TANH(x) tanh(x)
#define XT_ERF(x) erf(x)
#define XT_SIGMOID(x) ((real)1 / ((real)1 + exp(-(x))))
#define XT_POW(x, power) pow(x, power)
#define XT_WRAP(x) ((uint64_t)(x))
#define XT_LESS(x, bound) ((x) > (bound) ? (bound) : (x)) /* NaN stays */
#define XT_MORE(x, bound) ((x) < (bound) ? (bound) : (x))
#define XT_GELU_INNER(x) ((real)0.79788456080286535588 * ((x) + (real)0.044715 * (x) * (x) * (x)))

#define XT_OP_BODY                                                                                 \
    template <class real>                                                                          \
    static __device__ inline void of(const real *in, real *out, real p0, real p1)
#define XT_UNUSED(a, b) (void)(a), (void)(b), (void)p0, (void)p1

/* y of x and two numbers. */
#define XT_OP_X(name, first, second, expression)                                                   \
    struct name {                                                                                  \
        static constexpr int IN = 1, OUT = 1;                                                      \
        XT_OP_BODY {                                                                               \
            const real x = in[0], first = p0, second = p1;                                         \
            XT_UNUSED(first, second);                                                              \
            out[0] = (real)(expression);                                                           \
        }                                                                                          \
    };
/* y of a and b. */
#define XT_OP_AB(name, a, b, expression)                                                           \
    struct name {                                                                                  \
        static constexpr int IN = 2, OUT = 1;                                                      \
        XT_OP_BODY {                                                                               \
            const real a = in[0], b = in[1];                                                       \
            XT_UNUSED(a, b);                                                                       \
            out[0] = (real)(expression);                                                           \
        }                                                                                          \
    };
/* dx; no gradient gives none, even where the derivative is infinite. */
#define XT_OP_DX(name, first, second, expression)                                                  \
    struct name {                                                                                  \
        static constexpr int IN = 3, OUT = 1;                                                      \
        XT_OP_BODY {                                                                               \
            const real g = in[0], x = in[1], y = in[2], first = p0, second = p1;                   \
            XT_UNUSED(first, second);                                                              \
            XT_UNUSED(x, y);                                                                       \
            out[0] = g == 0 ? g : (real)(expression);                                              \
        }                                                                                          \
    };
/* da or db. */
#define XT_OP_DAB(name, expression)                                                                \
    struct name {                                                                                  \
        static constexpr int IN = 4, OUT = 1;                                                      \
        XT_OP_BODY {                                                                               \
            const real g = in[0], a = in[1], b = in[2], y = in[3];                                 \
            XT_UNUSED(a, b);                                                                       \
            XT_UNUSED(y, y);                                                                       \
            out[0] = g == 0 ? g : (real)(expression);                                              \
        }                                                                                          \
    };
/* da and db. */
#define XT_OP_BOTH(name, a, b, da, db)                                                             \
    struct name {                                                                                  \
        static constexpr int IN = 3, OUT = 2;                                                      \
        XT_OP_BODY {                                                                               \
            const real g = in[0], a = in[1], b = in[2];                                            \
            XT_UNUSED(a, b);                                                                       \
            out[0] = g == 0 ? g : (real)(da);                                                      \
            out[1] = g == 0 ? g : (real)(db);                                                      \
        }                                                                                          \
    };

/* A kernel of Op for the float types, numbers p0 and p1 as given. */
#define XT_FLOAT_KERNEL(name, Op, p0, p1)                                                          \
    static enum xt_status name##_kernel(struct xt_ctx *ctx, const struct xt_launch *l) {           \
        XT_CUDA_FLOATS(l->in[0]->dtype, return (xt_pointwise<Op, T, T>(ctx, l, p0, p1));)          \
        return XT_OK;                                                                              \
    }

#endif
