/*
 * pointwise.cu: the elementwise ops. What they compute stands in ../pointwise.def; their
 * derivatives are in pointwise_grad.cu.
 */
#include <string.h>

#include "pointwise.h"

/* ---- from rows to kernels -------------------------------------------------------------------- */

/* Op for floats, IntOp for integers, which are computed as int64_t. */
#define ANY_KERNEL(name, Op, IntOp)                                                                \
    static enum xt_status name##_kernel(struct xt_ctx *ctx, const struct xt_launch *l) {           \
        switch (l->in[0]->dtype) {                                                                 \
        case XT_I32: return xt_pointwise<IntOp, int32_t, int32_t>(ctx, l, 0, 0);                   \
        case XT_I64: return xt_pointwise<IntOp, int64_t, int64_t>(ctx, l, 0, 0);                   \
        case XT_U8: return xt_pointwise<IntOp, uint8_t, uint8_t>(ctx, l, 0, 0);                    \
        default: break;                                                                            \
        }                                                                                          \
        XT_CUDA_FLOATS(l->in[0]->dtype, return (xt_pointwise<Op, T, T>(ctx, l, 0, 0));)            \
        return XT_OK;                                                                              \
    }

#define XT_UNARY(name, doc, keeps, y_of, dx_of)                                                    \
    XT_OP_X(op_##name, q0, q1, y_of)                                                               \
    XT_FLOAT_KERNEL(name, op_##name, 0, 0)
#define XT_UNARY_ANY(name, doc, keeps, y_of, int_of, dx_of)                                        \
    XT_OP_X(op_##name, q0, q1, y_of)                                                               \
    XT_OP_X(int_##name, q0, q1, int_of)                                                            \
    ANY_KERNEL(name, op_##name, int_##name)
#define XT_BINARY(name, doc, keeps_a, keeps_b, y_of, da_of, db_of)                                 \
    XT_OP_AB(op_##name, a, b, y_of)                                                                \
    XT_FLOAT_KERNEL(name, op_##name, 0, 0)
#define XT_BINARY_ANY(name, doc, keeps_a, keeps_b, y_of, int_of, da_of, db_of)                     \
    XT_OP_AB(op_##name, a, b, y_of)                                                                \
    XT_OP_AB(int_##name, a, b, int_of)                                                             \
    ANY_KERNEL(name, op_##name, int_##name)
#define XT_BINARY_BOTH(name, a, b, doc, keeps_a, keeps_b, y_of, da_of, db_of)                      \
    XT_OP_AB(op_##name, a, b, y_of)                                                                \
    XT_FLOAT_KERNEL(name, op_##name, 0, 0)
#define XT_COMPARE(name, doc, y_of)                                                                \
    XT_OP_AB(op_##name, a, b, y_of)                                                                \
    static enum xt_status name##_kernel(struct xt_ctx *ctx, const struct xt_launch *l) {           \
        XT_CUDA_ANY(l->in[0]->dtype, return (xt_pointwise<op_##name, T, uint8_t>(ctx, l, 0, 0));)  \
        return XT_OK;                                                                              \
    }
#define XT_CHOICE(name, doc, keeps, attribute, choices, y_0, dx_0, y_1, dx_1)                      \
    XT_OP_X(op_##name##_0, q0, q1, y_0)                                                            \
    XT_OP_X(op_##name##_1, q0, q1, y_1)                                                            \
    XT_FLOAT_KERNEL(name##_0, op_##name##_0, 0, 0)                                                 \
    XT_FLOAT_KERNEL(name##_1, op_##name##_1, 0, 0)                                                 \
    static enum xt_status name##_kernel(struct xt_ctx *ctx, const struct xt_launch *l) {           \
        return l->attrs[0].i ? name##_1_kernel(ctx, l) : name##_0_kernel(ctx, l);                  \
    }
#define XT_BOUNDED(name, doc, keeps, first, second, y_of, dx_of)                                   \
    XT_OP_X(op_##name, first, second, y_of)                                                        \
    XT_FLOAT_KERNEL(name, op_##name, l->attrs[0].f, l->attrs[1].f)

#include "../pointwise.def"

/* ---- between dtypes -------------------------------------------------------------------------- */

/* A double as f32 such that rounding on to 16 bits rounds once: to odd (Boldo, Melquiond 2008). */
__host__ __device__ static inline float odd_f32(double d) {
    float f = (float)d;
    if ((double)f == d || d != d) return f;
    union {
        float f;
        uint32_t u;
    } v = {f};
    if (((double)f > d) == (d > 0)) v.u -= 1; /* towards zero */
    v.u |= 1u;
    return v.f;
}

template <class I> __host__ __device__ static inline I truncate(double d, double low, double high) {
    if (d != d) return 0;
    if (d <= low) return (I)low;
    if (d >= high) return sizeof(I) == 8 ? (I)INT64_MAX : (I)high;
    return (I)d;
}

/* One element converted as `cast` says: rounded once; to integers truncated and saturated. */
template <class To, class From> struct convert {
    static __host__ __device__ inline To of(From x) { return xt_to<To>(x); }
};
#define FROM_HALF(H, ...)                                                                          \
    template <> struct convert<__VA_ARGS__, H> {                                                   \
        static __host__ __device__ inline __VA_ARGS__ of(H x) {                                    \
            return convert<__VA_ARGS__, float>::of(xt_to<float>(x));                               \
        }                                                                                          \
    };
#define TO_HALF(H)                                                                                 \
    template <> struct convert<H, double> {                                                        \
        static __host__ __device__ inline H of(double x) { return xt_to<H>(odd_f32(x)); }          \
    };                                                                                             \
    template <> struct convert<H, int64_t> {                                                       \
        static __host__ __device__ inline H of(int64_t x) { return xt_to<H>(odd_f32((double)x)); } \
    };                                                                                             \
    template <> struct convert<H, int32_t> {                                                       \
        static __host__ __device__ inline H of(int32_t x) { return xt_to<H>(odd_f32((double)x)); } \
    };                                                                                             \
    template <> struct convert<H, uint8_t> {                                                       \
        static __host__ __device__ inline H of(uint8_t x) { return xt_to<H>((float)x); }           \
    };
#define TO_INT(I, low, high)                                                                       \
    template <> struct convert<I, double> {                                                        \
        static __host__ __device__ inline I of(double x) { return truncate<I>(x, low, high); }     \
    };                                                                                             \
    template <> struct convert<I, float> {                                                         \
        static __host__ __device__ inline I of(float x) { return truncate<I>(x, low, high); }      \
    };
TO_HALF(__nv_bfloat16)
TO_HALF(__half)
TO_INT(int32_t, -2147483648.0, 2147483647.0)
TO_INT(int64_t, -9223372036854775808.0, 9223372036854775808.0)
TO_INT(uint8_t, 0.0, 255.0)
FROM_HALF(__nv_bfloat16, __half)
FROM_HALF(__nv_bfloat16, double)
FROM_HALF(__nv_bfloat16, int32_t)
FROM_HALF(__nv_bfloat16, int64_t)
FROM_HALF(__nv_bfloat16, uint8_t)
FROM_HALF(__half, __nv_bfloat16)
FROM_HALF(__half, double)
FROM_HALF(__half, int32_t)
FROM_HALF(__half, int64_t)
FROM_HALF(__half, uint8_t)

/* ---- copies and casts ------------------------------------------------------------------------ */

template <class From, class To, int VEC>
__global__ void cast_flat(const __grid_constant__ struct xt_plan p) {
    const From *from = (const From *)p.data[0];
    To *to = (To *)p.data[1];
    int64_t step = (int64_t)gridDim.x * blockDim.x * VEC;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * VEC; i < p.n; i += step) {
        if (i + VEC > p.n) {
            for (int64_t j = i; j < p.n; j++) to[j] = convert<To, From>::of(from[j]);
            return;
        }
        xt_vector<From, VEC> in = *(const xt_vector<From, VEC> *)(from + i);
        xt_vector<To, VEC> out;
#pragma unroll
        for (int j = 0; j < VEC; j++) out.at[j] = convert<To, From>::of(in.at[j]);
        *(xt_vector<To, VEC> *)(to + i) = out;
    }
}

template <class From, class To>
__global__ void cast_strided(const __grid_constant__ struct xt_plan p) {
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += step) {
        int64_t rest = i, from = 0, to = 0;
        for (int d = p.ndim - 1; d >= 0; d--) {
            int64_t r = p.n < INT32_MAX ? (int64_t)((uint32_t)rest % (uint32_t)p.shape[d])
                                        : rest % p.shape[d];
            rest = p.n < INT32_MAX ? (int64_t)((uint32_t)rest / (uint32_t)p.shape[d])
                                   : rest / p.shape[d];
            from += r * p.stride[0][d];
            to += r * p.stride[1][d];
        }
        ((To *)p.data[1])[to] = convert<To, From>::of(((const From *)p.data[0])[from]);
    }
}

template <class From, class To>
static enum xt_status cast_between(struct xt_ctx *ctx, struct xt_plan *p) {
    constexpr int LANES = 16 / (int)(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
    constexpr int THREADS = 256;
    cudaStream_t stream = xt_cuda_stream(ctx);
    if (p->stride[0][0] == 1 && xt_plan_is_flat(p, 2, 1, sizeof(From), sizeof(To), LANES)) {
        unsigned blocks = xt_cuda_blocks(p->n, THREADS * LANES);
        cast_flat<From, To, LANES><<<blocks, THREADS, 0, stream>>>(*p);
    } else {
        cast_strided<From, To><<<xt_cuda_blocks(p->n, THREADS), THREADS, 0, stream>>>(*p);
    }
    return xt_cuda_launched(ctx);
}

template <class From>
static enum xt_status cast_from(struct xt_ctx *ctx, struct xt_plan *p, enum xt_dtype to) {
    XT_CUDA_ANY(to, return (cast_between<From, T>(ctx, p));)
    return XT_OK;
}

static enum xt_status copy(struct xt_ctx *ctx, const struct xt_tensor *from,
                           const struct xt_tensor *to) {
    struct xt_plan p;
    xt_plan_start(&p, to);
    if (p.n == 0) return XT_OK;
    xt_plan_operand(&p, 0, from);
    xt_plan_operand(&p, 1, to);
    xt_plan_merge(&p, 2);
    XT_CUDA_ANY(from->dtype, return (cast_from<T>(ctx, &p, to->dtype));)
    return XT_OK;
}

static enum xt_status cast(struct xt_ctx *ctx, const struct xt_launch *l) {
    return copy(ctx, l->in[0], l->out[0]);
}

static enum xt_status copy_in_place(struct xt_ctx *ctx, const struct xt_launch *l) {
    return copy(ctx, l->in[1], l->in[0]);
}

/* ---- selection: bits are chosen, the dtype is only a size ------------------------------------ */

/* y = c != 0 ? a : b, or the value where a is left out. */
template <class C, class U>
__global__ void select(const __grid_constant__ struct xt_plan p, U value) {
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += step) {
        int64_t at[4] = {0}, rest = i;
        for (int d = p.ndim - 1; d >= 0; d--) {
            int64_t q = p.n < INT32_MAX ? (int64_t)((uint32_t)rest / (uint32_t)p.shape[d])
                                        : rest / p.shape[d];
            int64_t r = rest - q * p.shape[d];
#pragma unroll
            for (int k = 0; k < 4; k++) at[k] += r * p.stride[k][d];
            rest = q;
        }
        U a = p.data[1] ? ((const U *)p.data[1])[at[1]] : value;
        ((U *)p.data[3])[at[3]] =
            ((const C *)p.data[0])[at[0]] != 0 ? a : ((const U *)p.data[2])[at[2]];
    }
}

template <class C>
static void select_by_size(struct xt_ctx *ctx, const struct xt_plan *p, size_t bytes,
                           uint64_t value) {
    constexpr int THREADS = 256;
    unsigned blocks = xt_cuda_blocks(p->n, THREADS);
    cudaStream_t stream = xt_cuda_stream(ctx);
    if (bytes == 1)
        select<C, uint8_t><<<blocks, THREADS, 0, stream>>>(*p, (uint8_t)value);
    else if (bytes == 2)
        select<C, uint16_t><<<blocks, THREADS, 0, stream>>>(*p, (uint16_t)value);
    else if (bytes == 4)
        select<C, uint32_t><<<blocks, THREADS, 0, stream>>>(*p, (uint32_t)value);
    else
        select<C, uint64_t><<<blocks, THREADS, 0, stream>>>(*p, value);
}

static enum xt_status choose(struct xt_ctx *ctx, const struct xt_tensor *cond,
                             const struct xt_tensor *a, uint64_t value, const struct xt_tensor *b,
                             const struct xt_tensor *y) {
    struct xt_plan p;
    xt_plan_start(&p, y);
    if (p.n == 0) return XT_OK;
    const struct xt_tensor *operands[4] = {cond, a, b, y};
    for (int k = 0; k < 4; k++) xt_plan_operand(&p, k, operands[k]);
    xt_plan_merge(&p, 4);
    size_t bytes = xt_dtype_bytes(y->dtype);
    if (cond->dtype == XT_U8)
        select_by_size<uint8_t>(ctx, &p, bytes, value);
    else if (cond->dtype == XT_I32)
        select_by_size<int32_t>(ctx, &p, bytes, value);
    else
        select_by_size<int64_t>(ctx, &p, bytes, value);
    return xt_cuda_launched(ctx);
}

static enum xt_status where(struct xt_ctx *ctx, const struct xt_launch *l) {
    return choose(ctx, l->in[0], l->in[1], 0, l->in[2], l->out[0]);
}

/* A number as the bits of an element. */
static uint64_t bits_of(double value, enum xt_dtype dtype) {
    uint64_t bits = 0;
    XT_CUDA_ANY(dtype, T element = (convert<T, double>::of(value));
                memcpy(&bits, &element, sizeof element);)
    return bits;
}

/* y = mask ? value : x. */
static enum xt_status masked_fill(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    return choose(ctx, l->in[1], NULL, bits_of(l->attrs[0].f, x->dtype), x, l->out[0]);
}

/* ---- in place -------------------------------------------------------------------------------- */

template <class U> __global__ void set_elements(const __grid_constant__ struct xt_plan p, U value) {
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += step) {
        int64_t at = 0, rest = i;
        for (int d = p.ndim - 1; d >= 0 && p.ndim > 1; d--) {
            at += rest % p.shape[d] * p.stride[0][d];
            rest /= p.shape[d];
        }
        if (p.ndim == 1) at = i * p.stride[0][0];
        ((U *)p.data[0])[at] = value;
    }
}

static enum xt_status fill_in_place(struct xt_ctx *ctx, const struct xt_launch *l) {
    constexpr int THREADS = 256;
    const struct xt_tensor *x = l->in[0];
    uint64_t value = bits_of(l->attrs[0].f, x->dtype);
    struct xt_plan p;
    xt_plan_start(&p, x);
    if (p.n == 0) return XT_OK;
    xt_plan_operand(&p, 0, x);
    xt_plan_merge(&p, 1);
    unsigned blocks = xt_cuda_blocks(p.n, THREADS);
    cudaStream_t stream = xt_cuda_stream(ctx);
    switch (xt_dtype_bytes(x->dtype)) {
    case 1: set_elements<uint8_t><<<blocks, THREADS, 0, stream>>>(p, (uint8_t)value); break;
    case 2: set_elements<uint16_t><<<blocks, THREADS, 0, stream>>>(p, (uint16_t)value); break;
    case 4: set_elements<uint32_t><<<blocks, THREADS, 0, stream>>>(p, (uint32_t)value); break;
    default: set_elements<uint64_t><<<blocks, THREADS, 0, stream>>>(p, value); break;
    }
    return xt_cuda_launched(ctx);
}

/* x + scale * other; integers wrap. */
struct op_add_scaled {
    static constexpr int IN = 2, OUT = 1;
    XT_OP_BODY {
        (void)p1;
        out[0] = in[0] + p0 * in[1];
    }
};
struct int_add_scaled {
    static constexpr int IN = 2, OUT = 1;
    XT_OP_BODY {
        (void)p1;
        out[0] = (real)(XT_WRAP(in[0]) + XT_WRAP(p0) * XT_WRAP(in[1]));
    }
};

/* Of three terms, the last of which may be left out. */
struct op_add_terms {
    static constexpr int IN = 3, OUT = 1;
    XT_OP_BODY {
        XT_UNUSED(p0, p1);
        out[0] = in[0] + in[1] + in[2];
    }
};
XT_FLOAT_KERNEL(add_terms, op_add_terms, 0, 0)

static enum xt_status add_in_place(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    double scale = l->attrs[0].f;
    struct xt_plan p;
    xt_plan_start(&p, x);
    xt_plan_operand(&p, 0, x);
    xt_plan_operand(&p, 1, l->in[1]);
    xt_plan_operand(&p, 2, x);
    switch (x->dtype) {
    case XT_I32: return xt_pointwise_plan<int_add_scaled, int32_t, int32_t>(ctx, &p, scale, 0);
    case XT_I64: return xt_pointwise_plan<int_add_scaled, int64_t, int64_t>(ctx, &p, scale, 0);
    case XT_U8: return xt_pointwise_plan<int_add_scaled, uint8_t, uint8_t>(ctx, &p, scale, 0);
    default: break;
    }
    XT_CUDA_FLOATS(x->dtype, return (xt_pointwise_plan<op_add_scaled, T, T>(ctx, &p, scale, 0));)
    return XT_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

#define XT_UNARY(name, ...) {#name, XT_FLOATS, XT_STRIDED, name##_kernel},
#define XT_UNARY_ANY(name, ...) {#name, XT_ANY, XT_STRIDED, name##_kernel},
#define XT_BINARY XT_UNARY
#define XT_BINARY_ANY XT_UNARY_ANY
#define XT_BINARY_BOTH XT_UNARY
#define XT_CHOICE XT_UNARY
#define XT_BOUNDED XT_UNARY
#define XT_COMPARE XT_UNARY_ANY

const struct xt_kernel xt_cuda_pointwise_kernels[] = {
#include "../pointwise.def"
    {"where", XT_INTS, XT_STRIDED, where},
    {"masked_fill", XT_ANY, XT_STRIDED, masked_fill},
    {"cast", XT_ANY, XT_STRIDED, cast},
    {"fill_", XT_ANY, XT_STRIDED, fill_in_place},
    {"copy_", XT_ANY, XT_STRIDED, copy_in_place},
    {"add_", XT_ANY, XT_STRIDED, add_in_place},
    {"add_terms", XT_FLOATS, XT_STRIDED, add_terms_kernel},
    {},
};
