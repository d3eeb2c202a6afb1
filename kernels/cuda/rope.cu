/*
 * rope.cu: rotations on the device: forward, and backward as the rotation by the opposite angles.
 */
#include "rope.h"
#include "rows.h"

#define ROPE_THREADS 128

/*
 * A block turns the heads of one s in one b after the other, N pairs at a time. Its angles are of
 * s alone unless every b has positions of its own.
 */
template <class T, int N, bool INTERLEAVED>
static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_lines(const T *x, T *y, const __grid_constant__ struct xt_rope_heads q,
               const __grid_constant__ struct xt_positions at,
               const __grid_constant__ struct xt_frequencies<xt_real<T>> f, const xt_real<T> sign) {
    using R = xt_real<T>;
    __shared__ R cosine[XT_ROPE_PAIRS], sine[XT_ROPE_PAIRS];
    const int64_t half = q.D / 2;
    const int steps = f.n / N;
    const int64_t s = blockIdx.x % q.S, chunks = gridDim.x / q.S;
    for (int64_t b = blockIdx.x / q.S; b < q.B; b += chunks) {
        if (at.b || b < chunks) {
            const R position = (R)xt_position_at(at, b, s);
            __syncthreads();
            for (int i = (int)threadIdx.x; i < f.n; i += ROPE_THREADS)
                xt_angle(position, f.at[i], sign, &cosine[i], &sine[i]);
            __syncthreads();
        }
        const T *from = x + b * q.b + s * q.s;
        T *to = y + (b * q.S + s) * q.H * q.D;
        for (int64_t j = threadIdx.x; j < q.H * steps; j += ROPE_THREADS) {
            const int64_t h = j / steps, i = (j - h * steps) * N, pair = f.first + i;
            const T *row = from + h * q.h;
            T *out = to + h * q.D;
            if constexpr (INTERLEAVED) {
                R v[2 * N], w[2 * N];
                constexpr int M = N == 1 ? 1 : 2 * N; /* one pair alone need not be aligned */
#pragma unroll
                for (int k = 0; k < 2 * N; k += M) xt_load<M>(row + 2 * pair + k, v + k);
#pragma unroll
                for (int k = 0; k < N; k++) {
                    const R c = cosine[i + k], sn = sine[i + k];
                    w[2 * k] = v[2 * k] * c - v[2 * k + 1] * sn;
                    w[2 * k + 1] = v[2 * k + 1] * c + v[2 * k] * sn;
                }
#pragma unroll
                for (int k = 0; k < 2 * N; k += M) xt_store<M>(w + k, out + 2 * pair + k);
            } else {
                R low[N], high[N], w[N];
                xt_load<N>(row + pair, low);
                xt_load<N>(row + half + pair, high);
#pragma unroll
                for (int k = 0; k < N; k++) w[k] = low[k] * cosine[i + k] - high[k] * sine[i + k];
                xt_store<N>(w, out + pair);
#pragma unroll
                for (int k = 0; k < N; k++) w[k] = high[k] * cosine[i + k] + low[k] * sine[i + k];
                xt_store<N>(w, out + half + pair);
            }
        }
    }
}

template <class T>
static enum xt_status rope_of(struct xt_ctx *ctx, const struct xt_launch *l, int sign) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<T>;
    const struct xt_tensor *x = l->in[0];
    if (xt_numel(x) == 0) return XT_OK;
    const struct xt_rope_heads q = xt_rope_heads_of(x);
    const struct xt_positions at = xt_positions_of(l->in[1], l->attrs[2].i);
    const bool interleaved = l->attrs[1].i == 1;
    const int64_t half = q.D / 2;
    const T *from = (const T *)xt_data(x);
    T *to = (T *)xt_data(l->out[0]);
    const bool aligned =
        xt_rope_heads_aligned(x, N) && xt_is_aligned16(to) && (interleaved ? q.D : half) % N == 0;
    /* For every s so many blocks that the device is full, and at most one a batch. */
    const int64_t full = 8 * (int64_t)xt_cuda_multiprocessors(ctx), each = (full + q.S - 1) / q.S;
    if (q.S > 0x3FFFFFFF) return xt_fail(ctx, XT_UNSUPPORTED, "more than 2^30 positions");
    const unsigned blocks = (unsigned)(q.S * (each < q.B ? each : q.B));
    cudaStream_t s = xt_cuda_stream(ctx);
    for (int64_t first = 0; first < half; first += XT_ROPE_PAIRS) {
        const struct xt_frequencies<R> f = xt_frequencies_of<R>((R)l->attrs[0].f, first, q.D);
        if (interleaved && aligned)
            rope_lines<T, N / 2, true><<<blocks, ROPE_THREADS, 0, s>>>(from, to, q, at, f, sign);
        else if (interleaved)
            rope_lines<T, 1, true><<<blocks, ROPE_THREADS, 0, s>>>(from, to, q, at, f, sign);
        else if (aligned)
            rope_lines<T, N, false><<<blocks, ROPE_THREADS, 0, s>>>(from, to, q, at, f, sign);
        else
            rope_lines<T, 1, false><<<blocks, ROPE_THREADS, 0, s>>>(from, to, q, at, f, sign);
        XT_TRY(xt_cuda_launched(ctx));
    }
    return XT_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

static enum xt_status rope(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return rope_of<T>(ctx, l, 1);)
    return XT_OK;
}

static enum xt_status rope_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return rope_of<T>(ctx, l, -1);)
    return XT_OK;
}

const struct xt_kernel xt_cuda_rope_kernels[] = {
    {"rope", XT_FLOATS, XT_INNER, rope},
    {"rope_grad", XT_FLOATS, XT_INNER, rope_grad},
    {},
};
