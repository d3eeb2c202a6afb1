/*
 * cuda.h: what the CUDA kernel files share.
 *
 * Everything is queued on one stream, in the order of the calls; nothing here waits for the device.
 * Every sum has a fixed order and floating-point atomics are not used, so that the bits never
 * depend on timing. 16-bit floats are computed in f32.
 */
#ifndef XT_CUDA_H
#define XT_CUDA_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

extern "C" {
#include "../../runtime/op.h"
}

/* ---- the host's side ------------------------------------------------------------------------- */

extern "C" {
cudaStream_t xt_cuda_stream(const struct xt_ctx *ctx); /* where everything is queued */
int xt_cuda_multiprocessors(const struct xt_ctx *ctx);
int xt_cuda_capability(const struct xt_ctx *ctx);   /* 90: 9.0 */
const char *xt_cuda_name(const struct xt_ctx *ctx); /* "NVIDIA H200" */
/* XT_OK, or XT_DEVICE with CUDA's own words. */
enum xt_status xt_cuda_status(struct xt_ctx *ctx, cudaError_t error);
}

/* After a launch: whether it was accepted. */
static inline enum xt_status xt_cuda_launched(struct xt_ctx *ctx) {
    return xt_cuda_status(ctx, cudaGetLastError());
}

#define XT_CUDA_TRY(expression) XT_TRY(xt_cuda_status(ctx, (expression)))

/*
 * A value that only the device sees may be out of range: a label, an id. The kernel then reads and
 * writes nothing for it and notes the least row at which that happened; the next wait of the host
 * finds the note and fails with XT_VALUE. `wanted` is a sentence's end such as "the vocabulary has
 * 50257", copied; `name` is what is out of range, a literal.
 */
struct xt_cuda_fault {
    unsigned long long *worst; /* row << 32 | value, both clipped to 32 bits */
    volatile int *any;         /* set when some fault was noted */
};
extern "C" struct xt_cuda_fault xt_cuda_fault(struct xt_ctx *ctx, const struct xt_op *op,
                                              const char *name, const char *wanted);

/* How many items of work a launch has handed out, where blocks stay and take one after the other.
   Zeros between launches; the last block to leave sees to that. */
struct xt_cuda_counter {
    unsigned next, left; /* items beyond each block's first; blocks that have left */
};
extern "C" struct xt_cuda_counter *xt_cuda_counter(const struct xt_ctx *ctx); /* on the device */

/* The seed of a SEED parameter: a number, or where it lies on the device. */
struct xt_cuda_seed {
    uint64_t value;
    const uint64_t *at; /* NULL: value is the seed */
};
static inline struct xt_cuda_seed xt_cuda_seed(const struct xt_launch *l, int attr, int input) {
    const struct xt_tensor *t = input < l->n_in ? l->in[input] : NULL;
    struct xt_cuda_seed seed = {l->attrs[attr].seed, t ? (const uint64_t *)xt_data(t) : NULL};
    return seed;
}

/* Blocks that cover n items, `each` a block, clipped to what a grid takes: kernels loop. */
static inline unsigned xt_cuda_blocks(int64_t n, int64_t each) {
    int64_t blocks = (n + each - 1) / each;
    return (unsigned)(blocks < 1 ? 1 : blocks > 0x3FFFFFFF ? 0x3FFFFFFF : blocks);
}

/* Calls `...` with T being the C++ type of a float dtype, or of any. */
#define XT_CUDA_FLOATS(dtype, ...)                                                                 \
    switch (dtype) {                                                                               \
    case XT_F32: {                                                                                 \
        using T = float;                                                                           \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case XT_BF16: {                                                                                \
        using T = __nv_bfloat16;                                                                   \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case XT_F16: {                                                                                 \
        using T = __half;                                                                          \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case XT_F64: {                                                                                 \
        using T = double;                                                                          \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    default: break;                                                                                \
    }
#define XT_CUDA_ANY(dtype, ...)                                                                    \
    switch (dtype) {                                                                               \
    case XT_I32: {                                                                                 \
        using T = int32_t;                                                                         \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case XT_I64: {                                                                                 \
        using T = int64_t;                                                                         \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case XT_U8: {                                                                                  \
        using T = uint8_t;                                                                         \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    default: XT_CUDA_FLOATS(dtype, __VA_ARGS__)                                                    \
    }

/* The same with U being an integer of so many bytes, for what is only moved. */
#define XT_CUDA_UNITS(bytes, ...)                                                                  \
    switch (bytes) {                                                                               \
    case 1: {                                                                                      \
        using U = uint8_t;                                                                         \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case 2: {                                                                                      \
        using U = uint16_t;                                                                        \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case 4: {                                                                                      \
        using U = uint32_t;                                                                        \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    case 8: {                                                                                      \
        using U = uint64_t;                                                                        \
        __VA_ARGS__                                                                                \
    } break;                                                                                       \
    default: break;                                                                                \
    }

/* ---- the device's side ----------------------------------------------------------------------- */

/* What T is computed in: f32 for the 16-bit floats, f64 for f64, int64_t for integers. */
template <class T> struct xt_real_of { using type = T; };
template <> struct xt_real_of<__nv_bfloat16> { using type = float; };
template <> struct xt_real_of<__half> { using type = float; };
template <> struct xt_real_of<int32_t> { using type = int64_t; };
template <> struct xt_real_of<uint8_t> { using type = int64_t; };
template <class T> using xt_real = typename xt_real_of<T>::type;

/* Between any two element types, rounded once. */
template <class To, class From> __host__ __device__ inline To xt_to(From x) {
    return static_cast<To>(x);
}
template <> __host__ __device__ inline float xt_to(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
template <> __host__ __device__ inline float xt_to(__half x) {
    return __half2float(x);
}
template <> __host__ __device__ inline __nv_bfloat16 xt_to(float x) {
    return __float2bfloat16_rn(x);
}
template <> __host__ __device__ inline __half xt_to(float x) {
    return __float2half_rn(x);
}
template <> __host__ __device__ inline __nv_bfloat16 xt_to(__nv_bfloat16 x) {
    return x;
}
template <> __host__ __device__ inline __half xt_to(__half x) {
    return x;
}

/* N elements that are read and written at once; sizeof is a power of two, at most 16. */
template <class T, int N> struct alignas(sizeof(T) * N) xt_vector { T at[N]; };
/* Elements of T in 16 bytes. */
template <class T> constexpr int xt_lanes = 16 / (int)sizeof(T);

static inline bool xt_is_aligned16(const void *p) {
    return ((uintptr_t)p & 15) == 0;
}

__device__ inline uint64_t xt_seed_on_device(struct xt_cuda_seed s) {
    return s.at ? *s.at : s.value;
}

/* splitmix64 (Steele, Lea, Flood 2014); design, section 5. */
__device__ inline uint64_t xt_mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The uniform number of element i under a seed, in [0, 1): 24 bits of it. */
__device__ inline float xt_uniform_at(uint64_t seed, uint64_t i) {
    return (float)(xt_mix64(seed ^ (i * 0x9E3779B97F4A7C15u)) >> 40) * 0x1p-24f;
}

__device__ inline void xt_note_fault(struct xt_cuda_fault f, int64_t row, int64_t value) {
    uint64_t r = row > 0xFFFFFFFE ? 0xFFFFFFFE : (uint64_t)row;
    int32_t v = value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : (int32_t)value;
    atomicMin(f.worst, (unsigned long long)(r << 32 | (uint32_t)v)); /* of integers: any order */
    *f.any = 1;
}

/* Sums over a warp: lane 0 to 31 in a fixed tree; every lane gets the sum. */
template <class T> __device__ inline T xt_warp_sum(T x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}
/* The largest over a warp; a NaN in any lane wins. */
template <class T> __device__ inline T xt_warp_max(T x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) {
        T other = __shfl_xor_sync(0xFFFFFFFFu, x, step);
        x = x != x ? x : other != other ? other : x > other ? x : other;
    }
    return x;
}
/* The same over a block of THREADS, a multiple of 32 and at most 1024; every thread gets it. May be
   called again at once. */
template <int THREADS, class T> __device__ inline T xt_block_sum(T x) {
    constexpr int WARPS = THREADS / 32;
    x = xt_warp_sum(x);
    if (WARPS == 1) return x;
    __shared__ T part[WARPS];
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    T sum = part[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += part[w];
    return sum;
}
template <int THREADS, class T> __device__ inline T xt_block_max(T x) {
    constexpr int WARPS = THREADS / 32;
    x = xt_warp_max(x);
    if (WARPS == 1) return x;
    __shared__ T part[WARPS];
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    T most = part[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        T other = part[w];
        most = most != most ? most : other != other ? other : most > other ? most : other;
    }
    return most;
}

/* ---- the tables of kernels, ended by {0} ----------------------------------------------------- */

extern "C" {
extern const struct xt_kernel xt_cuda_pointwise_kernels[], xt_cuda_pointwise_grad_kernels[],
    xt_cuda_shape_kernels[], xt_cuda_reduce_kernels[], xt_cuda_softmax_kernels[],
    xt_cuda_cumsum_kernels[], xt_cuda_topk_kernels[], xt_cuda_index_kernels[],
    xt_cuda_gather_kernels[], xt_cuda_linalg_kernels[], xt_cuda_norm_kernels[],
    xt_cuda_rope_kernels[], xt_cuda_norm_rope_kernels[], xt_cuda_loss_kernels[],
    xt_cuda_linear_loss_kernels[], xt_cuda_attention_kernels[], xt_cuda_attention_softmax_kernels[],
    xt_cuda_mlp_kernels[], xt_cuda_random_kernels[], xt_cuda_optim_kernels[];
}

/* ---- matrix products, in linalg.cu ----------------------------------------------------------- */

/*
 * c = alpha * a @ b + beta * c, with a of m x k, b of k x n, c of m x n, for each of `batch`.
 * Accumulated in f32 (f64 for f64), TF32 not used. Of each operand's two strides, in elements, one
 * is 1; c's columns lie side by side, c_row apart. Any alignment and any sizes, 0 included; what
 * the library multiplies slowly is padded inside.
 */
struct xt_cuda_gemm {
    enum xt_dtype in, out; /* of a and b, and of c: equal, or bf16 or f16 in and f32 out */
    int64_t m, n, k, batch;
    const void *a, *b;
    void *c;
    int64_t a_row, a_col, b_row, b_col, c_row;
    int64_t a_batch, b_batch, c_batch; /* from one product of the batch to the next; 0: the same */
    double alpha, beta;
    const void *bias; /* n elements of `out` added to every row, or NULL */
    /* 0, or sizes to which a and b go on in memory, multiples of 8 and with numbers that are of no
       concern: tensor cores then take them as they lie. c keeps m x n. */
    int64_t grown_m, grown_n;
};
extern "C" enum xt_status xt_cuda_gemm(struct xt_ctx *ctx, const struct xt_cuda_gemm *g);
/* What ops that multiply take. */
#define XT_CUDA_FACTORS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

/* A factor: element (i, j) of rows x cols lies at i * row + j * col, in elements. */
struct xt_cuda_factor {
    const void *data;   /* its first element */
    int64_t rows, cols; /* its sizes */
    int64_t row, col;   /* its strides */
};

/* Rows of `cols` elements that lie side by side, `row` apart. */
static inline struct xt_cuda_factor xt_cuda_rows(const void *data, int64_t rows, int64_t cols,
                                                 int64_t row) {
    struct xt_cuda_factor f = {data, rows, cols, row, 1};
    return f;
}

static inline struct xt_cuda_factor xt_cuda_turned(struct xt_cuda_factor f) {
    struct xt_cuda_factor turned = {f.data, f.cols, f.rows, f.col, f.row};
    return turned;
}

/* c = a @ b: one product, without what else one may be told. b has as many rows as a columns. */
static inline struct xt_cuda_gemm xt_cuda_gemm_of(enum xt_dtype in, struct xt_cuda_factor a,
                                                  struct xt_cuda_factor b, enum xt_dtype out,
                                                  void *c, int64_t c_row) {
    struct xt_cuda_gemm g = {};
    g.in = in, g.out = out;
    g.m = a.rows, g.n = b.cols, g.k = a.cols, g.batch = 1;
    g.a = a.data, g.a_row = a.row, g.a_col = a.col;
    g.b = b.data, g.b_row = b.row, g.b_col = b.col;
    g.c = c, g.c_row = c_row;
    g.alpha = 1;
    return g;
}

/* A matrix of rows x cols, contiguous, as the corner of one of to_rows x to_cols that is zero
   elsewhere. */
extern "C" enum xt_status xt_cuda_grow(struct xt_ctx *ctx, enum xt_dtype dtype, void *to,
                                       int64_t to_rows, int64_t to_cols, const void *from,
                                       int64_t rows, int64_t cols);

struct xt_cublas; /* the library, once it is open */
extern "C" void xt_cublas_free(struct xt_cublas *blas);
/* Where its pointer is kept: NULL until it is asked for. */
extern "C" struct xt_cublas **xt_cuda_cublas(const struct xt_ctx *ctx);

#endif
