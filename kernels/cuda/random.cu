/*
 * random.cu: numbers drawn by counting on the device (design, section 5): element i hashes seed XOR
 * i * golden, with the CPU's bits. Compiled without fused multiply-adds, for randn's.
 *
 * Traffic: dropout reads x and writes y, the others only write; a thread takes 16 bytes at a time.
 */
#include <math.h>

#include "../both.h"
#include "rows.h"

#define THREADS 256
#define TILE 1024 /* weights of a row that multinomial holds at a time */
#define ENDS 512  /* tiles of a row whose running sums it keeps */

/* ---- dropout --------------------------------------------------------------------------------- */

/* One dropout: p as what the bits are compared with. */
struct drop {
    uint32_t least; /* bits of kept elements are this or more */
    float scale;    /* of kept elements: 1 / (1 - p) */
};

/* u >= p in f32, u = bits / 2^24, is bits >= least: p * 2^24 is exact in f64. */
static struct drop drop_of(double p) {
    struct drop d = {(uint32_t)ceil((double)(float)p * 0x1p24), (float)(1.0 / (1.0 - p))};
    return d;
}

/* The top 24 bits of an element's hash. */
static __device__ uint32_t bits_at(uint64_t seed, uint64_t steps) {
    return (uint32_t)(xt_draw_high(seed, steps) >> 40);
}

template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    drop_all(const T *x, const struct xt_cuda_seed at, const struct drop drop, int64_t n, T *y) {
    using R = xt_real<T>;
    const uint64_t seed = xt_seed_on_device(at);
    const int64_t step = (int64_t)gridDim.x * THREADS * N;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N; i < n; i += step) {
        uint64_t steps = (uint64_t)i * XT_GOLDEN;
        R v[N];
        xt_load<N>(x + i, v);
#pragma unroll
        for (int k = 0; k < N; k++, steps += XT_GOLDEN)
            v[k] = bits_at(seed, steps) >= drop.least ? v[k] * (R)drop.scale : 0;
        xt_store<N>(v, y + i);
    }
}

template <class T> static enum xt_status dropout_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    constexpr int N = xt_lanes<T>;
    const int64_t n = xt_numel(l->in[0]);
    if (n == 0) return XT_OK;
    const T *x = (const T *)xt_data(l->in[0]);
    T *y = (T *)xt_data(l->out[0]);
    const struct xt_cuda_seed seed = xt_cuda_seed(l, 1, 1);
    const struct drop drop = drop_of(l->attrs[0].f);
    cudaStream_t s = xt_cuda_stream(ctx);
    if (n % N == 0 && xt_is_aligned16(x) && xt_is_aligned16(y))
        drop_all<T, N><<<xt_cuda_blocks(n, THREADS * N), THREADS, 0, s>>>(x, seed, drop, n, y);
    else
        drop_all<T, 1><<<xt_cuda_blocks(n, THREADS), THREADS, 0, s>>>(x, seed, drop, n, y);
    return xt_cuda_launched(ctx);
}

static enum xt_status dropout_apply(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return dropout_of<T>(ctx, l);)
    return XT_OK;
}

/* ---- numbers of a shape ---------------------------------------------------------------------- */

struct mask {
    struct drop drop;
    __device__ float operator()(uint64_t seed, uint64_t steps) const {
        return bits_at(seed, steps) >= drop.least ? drop.scale : 0.0f;
    }
};

struct uniform {
    __device__ float operator()(uint64_t seed, uint64_t steps) const {
        return (float)bits_at(seed, steps) * 0x1p-24f;
    }
};

/* Products and sums are rounded apart, as on the CPU. */
struct normal {
    __device__ float operator()(uint64_t seed, uint64_t steps) const {
        const uint64_t h = xt_draw(seed, steps);
        const int32_t high = (int32_t)(h >> 33), low = (int32_t)(h >> 2 & 0x7FFFFFFF);
        const double radius = sqrt(-2.0 * xt_log_unit(((double)high + 1.0) * 0x1p-31));
        return (float)(radius * xt_cos_turn(low));
    }
};

template <class D>
static __global__ void __launch_bounds__(THREADS)
    draw_all(const struct xt_cuda_seed at, const D draw, int64_t n, float *y) {
    constexpr int N = 4;
    const uint64_t seed = xt_seed_on_device(at);
    const int64_t step = (int64_t)gridDim.x * THREADS * N;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N; i < n; i += step) {
        uint64_t steps = (uint64_t)i * XT_GOLDEN;
        float v[N];
#pragma unroll
        for (int k = 0; k < N; k++, steps += XT_GOLDEN) v[k] = draw(seed, steps);
        if (i + N <= n) {
            xt_store<N>(v, y + i);
        } else {
#pragma unroll
            for (int k = 0; k < N; k++)
                if (i + k < n) y[i + k] = v[k];
        }
    }
}

/* Outputs are aligned. */
template <class D>
static enum xt_status draw(struct xt_ctx *ctx, const struct xt_launch *l, int attr, const D &what) {
    const int64_t n = xt_numel(l->out[0]);
    if (n == 0) return XT_OK;
    draw_all<D><<<xt_cuda_blocks(n, THREADS * 4), THREADS, 0, xt_cuda_stream(ctx)>>>(
        xt_cuda_seed(l, attr, 0), what, n, (float *)xt_data(l->out[0]));
    return xt_cuda_launched(ctx);
}

static enum xt_status dropout_mask(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct mask mask = {drop_of(l->attrs[1].f)};
    return draw(ctx, l, 2, mask);
}

static enum xt_status rand_all(struct xt_ctx *ctx, const struct xt_launch *l) {
    return draw(ctx, l, 1, uniform());
}

static enum xt_status randn_all(struct xt_ctx *ctx, const struct xt_launch *l) {
    return draw(ctx, l, 1, normal());
}

/* ---- multinomial ----------------------------------------------------------------------------- */

/*
 * A block draws from one row. Its threads fetch the weights and one of them adds, in order and in
 * f64: the running sum has the CPU's bits. The sums at the ends of tiles tell in which tile it
 * passes u times the row's sum, which alone is walked again.
 */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    multinomial_rows(const T *probs, int64_t rows, int64_t n, const struct xt_cuda_seed at,
                     const struct xt_cuda_fault fault, int64_t *y) {
    __shared__ double weights[TILE], ends[ENDS], target;
    __shared__ int64_t begin; /* where the walk begins, and -1 when it is over */
    const bool adds = threadIdx.x == 0;
    const int64_t tiles = (n + TILE - 1) / TILE;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *from = probs + row * n;
        double running = 0;
        int bad = 0;
        for (int64_t t = 0; t < tiles; t++) {
            const int m = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
            __syncthreads();
            for (int j = (int)threadIdx.x; j < m; j += THREADS) {
                weights[j] = (double)xt_to<xt_real<T>>(from[t * TILE + j]);
                bad |= !(weights[j] >= 0);
            }
            __syncthreads();
            if (!adds) continue;
            for (int j = 0; j < m; j++) running += weights[j];
            if (t < ENDS) ends[t] = running;
        }
        bad = __syncthreads_or(bad);
        int64_t last = -1;
        if (adds) {
            const uint64_t h = xt_draw(xt_seed_on_device(at), (uint64_t)row * XT_GOLDEN);
            begin = bad || !(running > 0) || isinf(running) ? -1 : 0;
            target = (double)(h >> 11) * 0x1p-53 * running;
            running = 0;
            if (begin < 0) {
                xt_note_fault(fault, row, 0);
                last = 0;
            } else if (tiles <= ENDS) {
                int64_t t = 0;
                while (t < tiles && !(ends[t] > target)) t++;
                if (t < tiles) { /* else u times the sum was rounded up to it: walk all */
                    begin = t * TILE;
                    running = t > 0 ? ends[t - 1] : 0;
                }
            }
        }
        __syncthreads();
        for (int64_t first = begin; first >= 0 && first < n; first += TILE) {
            const int m = (int)(n - first < TILE ? n - first : TILE);
            __syncthreads();
            for (int j = (int)threadIdx.x; j < m; j += THREADS)
                weights[j] = (double)xt_to<xt_real<T>>(from[first + j]);
            __syncthreads();
            if (adds)
                for (int j = 0; j < m && begin >= 0; j++) {
                    running += weights[j];
                    if (weights[j] == 0) continue;
                    last = first + j;
                    if (running > target) begin = -1;
                }
            __syncthreads();
            if (begin < 0) break;
        }
        if (adds) y[row] = last;
    }
}

template <class T>
static enum xt_status multinomial_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *probs = l->in[0];
    const int64_t n = probs->shape[probs->ndim - 1], rows = n ? xt_numel(probs) / n : 0;
    if (rows == 0) return XT_OK;
    const struct xt_cuda_fault fault =
        xt_cuda_fault(ctx, l->op, "the draw from probs",
                      "wanted a row of weights of 0 or more with a finite sum above 0");
    multinomial_rows<T><<<xt_cuda_blocks(rows, 1), THREADS, 0, xt_cuda_stream(ctx)>>>(
        (const T *)xt_data(probs), rows, n, xt_cuda_seed(l, 0, 1), fault,
        (int64_t *)xt_data(l->out[0]));
    return xt_cuda_launched(ctx);
}

static enum xt_status multinomial(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return multinomial_of<T>(ctx, l);)
    return XT_OK;
}

/* ---- seed_mix -------------------------------------------------------------------------------- */

static __global__ void mix_seeds(const struct xt_cuda_seed seed, const struct xt_cuda_seed a,
                                 uint64_t *y) {
    *y = xt_mix64(xt_mix64(xt_seed_on_device(seed)) ^ xt_seed_on_device(a));
}

static enum xt_status seed_mix(struct xt_ctx *ctx, const struct xt_launch *l) {
    mix_seeds<<<1, 1, 0, xt_cuda_stream(ctx)>>>(xt_cuda_seed(l, 0, 0), xt_cuda_seed(l, 1, 1),
                                                (uint64_t *)xt_data(l->out[0]));
    return xt_cuda_launched(ctx);
}

const struct xt_kernel xt_cuda_random_kernels[] = {
    {"dropout_apply", XT_FLOATS, XT_CONTIGUOUS, dropout_apply},
    {"dropout_mask", XT_ANY, XT_CONTIGUOUS, dropout_mask},
    {"rand", XT_ANY, XT_CONTIGUOUS, rand_all},
    {"randn", XT_ANY, XT_CONTIGUOUS, randn_all},
    {"multinomial", XT_FLOATS, XT_CONTIGUOUS, multinomial},
    {"seed_mix", XT_ANY, XT_STRIDED, seed_mix},
    {},
};
