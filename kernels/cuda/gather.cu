/*
 * gather.cu: picking single elements by position, and adding gradients back to them.
 *
 * Traffic: a position and an element read, an element written. Backward reads both, reads and
 * writes what is added to, and beyond FEW_MEET elements that may meet sorts (scatter.cu).
 */
#include "positions.h"
#include "scatter.h"

#define THREADS 256
#define FEW_MEET 64 /* up to this many, lines rather than sorting */

/* ---- places ---------------------------------------------------------------------------------- */

/* Elements of index, and where they lie in x without their own position: stride 0 along dim. */
static struct xt_places<1> places_of(const struct xt_tensor *index, const int64_t *x_shape,
                                     int64_t dim, int64_t *dim_step) {
    struct xt_places<1> p = {};
    int64_t step = 1;
    *dim_step = 1;
    p.ndim = index->ndim;
    for (int d = index->ndim - 1; d >= 0; d--) {
        if (d == dim) *dim_step = step;
        p.shape[d] = index->shape[d];
        p.stride[0][d] = d == dim ? 0 : step;
        step *= x_shape[d];
    }
    xt_places_ready(&p);
    return p;
}

/* ---- kernels --------------------------------------------------------------------------------- */

template <class U>
static __global__ void
gather_elements(U *to, const U *from, const __grid_constant__ struct xt_positions p,
                const __grid_constant__ struct xt_places<1> places, int64_t dim_step) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x; e < p.n; e += step) {
        int64_t at[1], position = xt_position_at(p, e);
        if (!xt_position_in_range(p, position)) {
            xt_note_fault(p.fault, e, position);
            to[e] = 0;
            continue;
        }
        xt_place_of(places, e, at);
        to[e] = from[at[0] + position * dim_step];
    }
}

/* Elements of index that differ along dim alone may meet: with few of those (`n`), a thread adds
   them one after another. Index is (outer, n, inner), e = (o * n + i) * inner + j. */
template <class A, class T>
static __global__ void gather_back_lines(A *sums, const T *grad,
                                         const __grid_constant__ struct xt_positions p,
                                         const __grid_constant__ struct xt_places<1> places,
                                         int64_t dim_step, int64_t n, int64_t inner) {
    int64_t step = (int64_t)gridDim.x * THREADS, lines = p.n / n;
    for (int64_t line = (int64_t)blockIdx.x * THREADS + threadIdx.x; line < lines; line += step) {
        int64_t o = inner == 1 ? line : line / inner, first = o * n * inner + (line - o * inner);
        int64_t at[1];
        xt_place_of(places, first, at);
        for (int64_t i = 0; i < n; i++) {
            int64_t e = first + i * inner, position = xt_position_at(p, e);
            if (xt_position_in_range(p, position))
                sums[at[0] + position * dim_step] += (A)xt_to<xt_real<T>>(grad[e]);
            else
                xt_note_fault(p.fault, e, position);
        }
    }
}

/* keys[i] = where element begin + i is added, or total where its position is out of range. */
static __global__ void keys_of_places(uint64_t *keys, const __grid_constant__ struct xt_positions p,
                                      const __grid_constant__ struct xt_places<1> places,
                                      int64_t dim_step, int64_t total, int64_t begin, int count) {
    int step = (int)gridDim.x * THREADS;
    for (int i = (int)(blockIdx.x * THREADS + threadIdx.x); i < count; i += step) {
        int64_t e = begin + i, at[1], position = xt_position_at(p, e);
        bool good = xt_position_in_range(p, position);
        if (!good) xt_note_fault(p.fault, e, position);
        xt_place_of(places, e, at);
        keys[i] = (uint64_t)(good ? at[0] + position * dim_step : total);
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

static enum xt_status gather(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *index = l->in[1];
    int64_t dim = l->attrs[0].i, step;
    void *to = xt_data(l->out[0]);
    const void *from = xt_data(x);
    struct xt_positions p;
    if (xt_numel(index) == 0) return XT_OK;
    struct xt_places<1> places = places_of(index, x->shape, dim, &step);
    XT_TRY(xt_positions_load(ctx, l, index, "index", x->ndim ? x->shape[dim] : 1, dim, &p));
    unsigned blocks = xt_cuda_blocks(p.n, THREADS);
    cudaStream_t stream = xt_cuda_stream(ctx);
    XT_CUDA_UNITS(xt_dtype_bytes(x->dtype), gather_elements<<<blocks, THREADS, 0, stream>>>(
                                                (U *)to, (const U *)from, p, places, step);)
    xt_positions_drop(ctx, &p);
    return xt_cuda_launched(ctx);
}

static enum xt_status gather_back(struct xt_ctx *ctx, const struct xt_positions &p,
                                  const struct xt_tensor *index, const struct xt_tensor *grad,
                                  const struct xt_tensor *y, int64_t dim, void *sums) {
    int64_t dim_step, outer, inner, n = index->ndim ? index->shape[dim] : 1;
    cudaStream_t stream = xt_cuda_stream(ctx);
    struct xt_places<1> places = places_of(index, y->shape, dim, &dim_step);
    xt_around(index, dim, &outer, &inner);
    if (n <= FEW_MEET) {
        unsigned blocks = xt_cuda_blocks(p.n / n, THREADS);
        XT_CUDA_FLOATS(grad->dtype, gather_back_lines<<<blocks, THREADS, 0, stream>>>(
                                        (xt_real<T> *)sums, (const T *)xt_data(grad), p, places,
                                        dim_step, n, inner);)
        return xt_cuda_launched(ctx);
    }
    const struct xt_scatter a = {sums, xt_data(grad), grad->dtype, 1, p.n, xt_numel(y), 1};
    return xt_scatter_add(ctx, a, [&](uint64_t *keys, int64_t begin, int count) {
        keys_of_places<<<xt_cuda_blocks(count, THREADS), THREADS, 0, stream>>>(
            keys, p, places, dim_step, a.size, begin, count);
    });
}

static enum xt_status gather_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *index = l->in[0], *grad = l->in[1], *y = l->out[0];
    int64_t dim = l->attrs[0].i;
    struct xt_positions p;
    void *sums;
    size_t bytes;
    XT_TRY(xt_positions_load(ctx, l, index, "index", y->ndim ? y->shape[dim] : 1, dim, &p));
    enum xt_status status = xt_sums_open(ctx, y, &sums, &bytes);
    if (status == XT_OK) {
        if (p.n > 0) status = gather_back(ctx, p, index, grad, y, dim, sums);
        status = xt_sums_close(ctx, y, sums, bytes, status);
    }
    xt_positions_drop(ctx, &p);
    return status;
}

/* ---- the table ------------------------------------------------------------------------------- */

const struct xt_kernel xt_cuda_gather_kernels[] = {
    {"gather", XT_ANY, XT_CONTIGUOUS, gather},
    {"gather_grad", XT_INTS, XT_CONTIGUOUS, gather_grad},
    {},
};
