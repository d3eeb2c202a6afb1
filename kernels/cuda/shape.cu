/*
 * shape.cu: copies. Every kernel here but three is xt_cuda_copy_strided with other strides.
 *
 * Traffic of a copy: each element read once and written once.
 */
#include "layout.h"

#include "../dims.h"

#define THREADS 256
#define EACH 4   /* elements a thread copies before the grid is too small */
#define TILE 32  /* side of the square that a transposed copy turns in shared memory */
#define TILE_Y 8 /* rows of threads over it */

/* ---- kernels --------------------------------------------------------------------------------- */

template <class U>
static __global__ void copy_elements(U *to, const U *from,
                                     const __grid_constant__ struct xt_places<2> places,
                                     int64_t numel) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x; e < numel; e += step) {
        int64_t at[2];
        xt_place_of(places, e, at);
        to[at[0]] = from[at[1]];
    }
}

/* The two dimensions of a transposed copy: `to` has stride 1 along i, `from` along j. */
struct square {
    int64_t ni, nj;
    int64_t to_step, from_step; /* of `to` along j, of `from` along i */
    int64_t tiles_i, tiles_j, tiles;
};

template <class U>
static __global__ void copy_squares(U *to, const U *from,
                                    const __grid_constant__ struct xt_places<2> outer,
                                    const __grid_constant__ struct square s) {
    __shared__ U turned[TILE][TILE + 1];
    int x = (int)threadIdx.x % TILE, y = (int)threadIdx.x / TILE;
    for (int64_t tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
        int64_t rest = tile / s.tiles_i, i0 = tile % s.tiles_i * TILE;
        int64_t j0 = rest % s.tiles_j * TILE, at[2];
        xt_place_of(outer, rest / s.tiles_j, at);
        for (int r = y; r < TILE; r += TILE_Y)
            if (i0 + r < s.ni && j0 + x < s.nj)
                turned[r][x] = from[at[1] + (i0 + r) * s.from_step + j0 + x];
        __syncthreads();
        for (int r = y; r < TILE; r += TILE_Y)
            if (j0 + r < s.nj && i0 + x < s.ni)
                to[at[0] + (j0 + r) * s.to_step + i0 + x] = turned[x][r];
        __syncthreads();
    }
}

/* y[h][d] = sum of g[h * group + i][d] for i = 0, 1, ... in f32 (f64 for f64), rounded once. */
template <class T>
static __global__ void add_groups(T *y, const T *g, int64_t heads, int64_t n, int64_t group,
                                  bool whole) {
    using W = xt_real<T>;
    constexpr int V = xt_lanes<T>;
    int64_t parts = (n + V - 1) / V, step = (int64_t)gridDim.x * THREADS;
    for (int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x; e < heads * parts; e += step) {
        int64_t h = e / parts, d = e % parts * V;
        const T *from = g + h * group * n + d;
        W sum[V];
        for (int64_t i = 0; i < group; i++) {
            struct xt_vector<T, V> v = xt_load_lanes(from + i * n, n - d, xt_to<T>((W)0), whole);
#pragma unroll
            for (int k = 0; k < V; k++)
                sum[k] = i == 0 ? xt_to<W>(v.at[k]) : sum[k] + xt_to<W>(v.at[k]);
        }
        struct xt_vector<T, V> out;
#pragma unroll
        for (int k = 0; k < V; k++) out.at[k] = xt_to<T>(group > 0 ? sum[k] : (W)0);
        xt_store_lanes(y + h * n + d, n - d, out, whole);
    }
}

template <class T> static __global__ void fill_elements(T *y, int64_t n, T value, bool whole) {
    constexpr int V = xt_lanes<T>;
    int64_t step = (int64_t)gridDim.x * THREADS * V;
    struct xt_vector<T, V> v;
#pragma unroll
    for (int k = 0; k < V; k++) v.at[k] = value;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * V; i < n; i += step)
        xt_store_lanes(y + i, n - i, v, whole);
}

/* i as T, rounded once; integers wrap around. */
template <class T> static __device__ inline T count_to(int64_t i) {
    return static_cast<T>(i);
}
template <> __device__ inline __nv_bfloat16 count_to(int64_t i) {
    return __float2bfloat16_rn((float)i);
}
template <> __device__ inline __half count_to(int64_t i) {
    return __float2half_rn((float)i);
}

template <class T> static __global__ void count_up(T *y, int64_t n) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        y[i] = count_to<T>(i);
}

/* ---- strided copies: planning ---------------------------------------------------------------- */

/* Two neighbours as one element, as often as the places allow: up to 16 bytes at once. */
static void widen(struct xt_copy *c) {
    int last = c->ndim - 1;
    while (c->bytes < 16 && c->to[last] == 1 && c->from[last] == 1 && c->shape[last] % 2 == 0) {
        size_t wide = 2 * c->bytes;
        bool even = (uintptr_t)c->to_data % wide == 0 && (uintptr_t)c->from_data % wide == 0;
        for (int d = 0; d < last; d++) even = even && c->to[d] % 2 == 0 && c->from[d] % 2 == 0;
        if (!even) return;
        c->bytes = wide;
        c->shape[last] /= 2;
        for (int d = 0; d < last; d++) {
            c->to[d] /= 2;
            c->from[d] /= 2;
        }
    }
}

/* The dimension along which `from` is dense while `to` is along the last: it moves next to the last
   one. False when there is none, or the square is too narrow to gain. */
static bool find_transposed(struct xt_copy *c) {
    int last = c->ndim - 1;
    if (c->to[last] != 1 || c->from[last] <= 1 || c->shape[last] < 8) return false;
    for (int d = last - 1; d >= 0; d--) {
        if (c->from[d] != 1) continue;
        int64_t shape = c->shape[d], to = c->to[d];
        if (shape < 8) return false;
        for (; d < last - 1; d++) {
            c->shape[d] = c->shape[d + 1];
            c->to[d] = c->to[d + 1];
            c->from[d] = c->from[d + 1];
        }
        c->shape[d] = shape;
        c->to[d] = to;
        c->from[d] = 1;
        return true;
    }
    return false;
}

static struct xt_places<2> places_of(const struct xt_copy *c, int ndim) {
    struct xt_places<2> p = {};
    p.ndim = ndim;
    for (int d = 0; d < ndim; d++) {
        p.shape[d] = c->shape[d];
        p.stride[0][d] = c->to[d];
        p.stride[1][d] = c->from[d];
    }
    xt_places_ready(&p);
    return p;
}

template <class U>
static void launch_copy(cudaStream_t stream, const struct xt_copy *c) {
    int64_t numel = 1;
    for (int d = 0; d < c->ndim; d++) numel *= c->shape[d];
    copy_elements<<<xt_cuda_blocks(numel, THREADS * EACH), THREADS, 0, stream>>>(
        (U *)c->to_data, (const U *)c->from_data, places_of(c, c->ndim), numel);
}

template <class U> static void launch_squares(cudaStream_t stream, const struct xt_copy *c) {
    int i = c->ndim - 1, j = i - 1;
    struct square s = {c->shape[i], c->shape[j], c->to[j], c->from[i], 0, 0, 0};
    s.tiles_i = (s.ni + TILE - 1) / TILE;
    s.tiles_j = (s.nj + TILE - 1) / TILE;
    s.tiles = s.tiles_i * s.tiles_j;
    for (int d = 0; d < j; d++) s.tiles *= c->shape[d];
    copy_squares<<<xt_cuda_blocks(s.tiles, 1), TILE * TILE_Y, 0, stream>>>(
        (U *)c->to_data, (const U *)c->from_data, places_of(c, j), s);
}

enum xt_status xt_cuda_copy_strided(struct xt_ctx *ctx, size_t bytes, int ndim,
                                    const int64_t *shape, void *to, const int64_t *to_stride,
                                    const void *from, const int64_t *from_stride) {
    cudaStream_t stream = xt_cuda_stream(ctx);
    struct xt_copy c = {};
    c.bytes = bytes;
    c.to_data = (char *)to;
    c.from_data = (const char *)from;
    int64_t numel = xt_copy_plan(&c, ndim, shape, to_stride, from_stride);
    if (numel == 0) return XT_OK;
    if (c.ndim == 1 && c.to[0] == 1 && c.from[0] == 1)
        return xt_cuda_status(ctx, cudaMemcpyAsync(to, from, (size_t)numel * bytes,
                                                   cudaMemcpyDeviceToDevice, stream));
    bool squares = find_transposed(&c);
    if (!squares) widen(&c);
    XT_CUDA_UNITS(c.bytes, squares ? launch_squares<U>(stream, &c) : launch_copy<U>(stream, &c);)
    if (c.bytes == 16) launch_copy<uint4>(stream, &c);
    return xt_cuda_launched(ctx);
}

/* ---- launchers ------------------------------------------------------------------------------- */

static enum xt_status copy_into(struct xt_ctx *ctx, const struct xt_tensor *x, char *to,
                                const int64_t *stride) {
    return xt_cuda_copy_strided(ctx, xt_dtype_bytes(x->dtype), x->ndim, x->shape, to, stride,
                                xt_data(x), x->stride);
}

static enum xt_status contiguous(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *y = l->out[0];
    return copy_into(ctx, l->in[0], (char *)xt_data(y), y->stride);
}

static enum xt_status concat(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *y = l->out[0];
    int64_t dim = l->attrs[0].i;
    char *to = (char *)xt_data(y);
    for (int i = 0; i < l->n_in; i++) {
        const struct xt_tensor *x = l->in[i];
        XT_TRY(copy_into(ctx, x, to, y->stride));
        to += x->shape[dim] * y->stride[dim] * (int64_t)xt_dtype_bytes(y->dtype);
    }
    return XT_OK;
}

static enum xt_status stack(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *y = l->out[0];
    int dim = (int)l->attrs[0].i;
    int64_t stride[XT_MAX_DIMS]; /* of y without dimension dim */
    for (int d = 0; d < y->ndim - 1; d++) stride[d] = y->stride[d < dim ? d : d + 1];
    char *to = (char *)xt_data(y);
    for (int i = 0; i < l->n_in; i++) {
        XT_TRY(copy_into(ctx, l->in[i], to, stride));
        to += y->stride[dim] * (int64_t)xt_dtype_bytes(y->dtype);
    }
    return XT_OK;
}

static enum xt_status slice_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *y = l->out[0];
    char *to = (char *)xt_data(y);
    if (xt_numel(y) == 0) return XT_OK;
    /* All zeros have the same bytes in every dtype. */
    if (xt_numel(l->in[0]) != xt_numel(y))
        XT_CUDA_TRY(cudaMemsetAsync(to, 0, xt_nbytes(y), xt_cuda_stream(ctx)));
    to += l->attrs[2].i * y->stride[l->attrs[1].i] * (int64_t)xt_dtype_bytes(y->dtype);
    return copy_into(ctx, l->in[0], to, y->stride);
}

static enum xt_status repeat_kv(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    int64_t group = l->attrs[0].i;
    /* As (B, S, Hkv, group, D), where x stands still along group. */
    int64_t shape[5] = {x->shape[0], x->shape[1], x->shape[2], group, x->shape[3]};
    int64_t from[5] = {x->stride[0], x->stride[1], x->stride[2], 0, x->stride[3]};
    int64_t to[5] = {y->stride[0], y->stride[1], group * x->shape[3], x->shape[3], 1};
    return xt_cuda_copy_strided(ctx, xt_dtype_bytes(x->dtype), 5, shape, xt_data(y), to, xt_data(x),
                                from);
}

static enum xt_status repeat_kv_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *g = l->in[0], *y = l->out[0];
    int64_t group = l->attrs[0].i, numel = xt_numel(y);
    if (numel == 0) return XT_OK;
    int64_t n = y->shape[3];
    XT_CUDA_FLOATS(y->dtype, T *to = (T *)xt_data(y); const T *from = (const T *)xt_data(g);
                   bool whole = xt_rows_aligned<T>(to, n) && xt_is_aligned16(from);
                   int64_t items = numel / n * ((n + xt_lanes<T> - 1) / xt_lanes<T>);
                   add_groups<<<xt_cuda_blocks(items, THREADS), THREADS, 0, xt_cuda_stream(ctx)>>>(
                       to, from, numel / n, n, group, whole);)
    return xt_cuda_launched(ctx);
}

/* y[o][i] = x[o][n - 1 - i]: x is walked backwards along dim. */
static enum xt_status flip(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    int64_t shape[3] = {1, 1, 1}, dim = l->attrs[0].i;
    for (int d = 0; d < x->ndim; d++) shape[d < dim ? 0 : d == dim ? 1 : 2] *= x->shape[d];
    if (xt_numel(x) == 0) return XT_OK;
    int64_t to[3] = {shape[1] * shape[2], shape[2], 1}, from[3] = {to[0], -shape[2], 1};
    size_t bytes = xt_dtype_bytes(x->dtype);
    const char *end = (const char *)xt_data(x) + (size_t)((shape[1] - 1) * shape[2]) * bytes;
    return xt_cuda_copy_strided(ctx, bytes, 3, shape, xt_data(y), to, end, from);
}

template <class T>
static enum xt_status run_fill(struct xt_ctx *ctx, const struct xt_tensor *y, T value) {
    int64_t n = xt_numel(y);
    if (n == 0) return XT_OK;
    fill_elements<<<xt_cuda_blocks(n, THREADS * EACH * xt_lanes<T>), THREADS, 0,
                    xt_cuda_stream(ctx)>>>((T *)xt_data(y), n, value, xt_is_aligned16(xt_data(y)));
    return xt_cuda_launched(ctx);
}

static enum xt_status full(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *y = l->out[0];
    double value = l->attrs[1].f;
    switch (y->dtype) {
    case XT_F32: return run_fill(ctx, y, (float)value);
    case XT_BF16: return run_fill(ctx, y, xt_f32_to_bf16((float)value));
    case XT_F16: return run_fill(ctx, y, xt_f32_to_f16((float)value));
    case XT_F64: return run_fill(ctx, y, value);
    case XT_I32: return run_fill(ctx, y, (int32_t)value);
    case XT_I64: return run_fill(ctx, y, (int64_t)value);
    default: return run_fill(ctx, y, (uint8_t)value);
    }
}

static enum xt_status arange(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *y = l->out[0];
    int64_t n = xt_numel(y);
    if (n == 0) return XT_OK;
    XT_CUDA_ANY(y->dtype,
                count_up<<<xt_cuda_blocks(n, THREADS * EACH), THREADS, 0, xt_cuda_stream(ctx)>>>(
                    (T *)xt_data(y), n);)
    return xt_cuda_launched(ctx);
}

const struct xt_kernel xt_cuda_shape_kernels[] = {
    {"contiguous", XT_ANY, XT_STRIDED, contiguous},
    {"clone", XT_ANY, XT_STRIDED, contiguous},
    {"flip", XT_ANY, XT_CONTIGUOUS, flip},
    {"concat", XT_ANY, XT_STRIDED, concat},
    {"stack", XT_ANY, XT_STRIDED, stack},
    {"slice_grad", XT_ANY, XT_STRIDED, slice_grad},
    {"repeat_kv", XT_ANY, XT_STRIDED, repeat_kv},
    {"repeat_kv_grad", XT_FLOATS, XT_CONTIGUOUS, repeat_kv_grad},
    {"full", XT_ANY, XT_STRIDED, full},
    {"arange", XT_ANY, XT_STRIDED, arange},
    {},
};
