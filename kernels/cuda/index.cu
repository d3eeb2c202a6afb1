/*
 * index.cu: picking rows by position (embedding, index_select), their gradients, and putting rows
 * where positions say (index_copy_).
 *
 * Traffic: a row that is picked or put is read and written once; gradients: scatter.cu.
 */
#include "positions.h"
#include "scatter.h"

#define THREADS 256

/* ---- kernels --------------------------------------------------------------------------------- */

/* (outer, size, row) to (outer, n, row), in units of U. */
struct pick {
    int64_t rows, units; /* outer * n, and units of a row */
    int64_t step;        /* units from row to row of `from` */
    int across;          /* threads along a row, a power of two */
};

template <class U>
static __global__ void pick_rows(U *to, const U *from,
                                 const __grid_constant__ struct xt_positions p,
                                 const __grid_constant__ struct pick k) {
    int down = THREADS / k.across, x = (int)threadIdx.x % k.across;
    int64_t begin = (int64_t)blockIdx.y * k.across + x, next = (int64_t)gridDim.y * k.across;
    for (int64_t r = (int64_t)blockIdx.x * down + threadIdx.x / k.across; r < k.rows;
         r += (int64_t)gridDim.x * down) {
        int64_t o = k.rows == p.n ? 0 : r / p.n, i = r - o * p.n, at = xt_position_at(p, i);
        bool good = xt_position_in_range(p, at);
        if (!good && begin == 0) xt_note_fault(p.fault, i, at);
        const U *source = from + (o * p.size + at) * k.step;
        U *target = to + r * k.units;
        for (int64_t c = begin; c < k.units; c += next) target[c] = good ? source[c] : U();
    }
}

/* The opposite: a row of `from` goes to where its position says; of equal positions only the last
   does, whose number, from 1, is in `last` (NULL: there is only one). */
template <class U>
static __global__ void put_rows(U *to, const U *from, const unsigned long long *last,
                                const __grid_constant__ struct xt_positions p,
                                const __grid_constant__ struct pick k) {
    int down = THREADS / k.across, x = (int)threadIdx.x % k.across;
    int64_t begin = (int64_t)blockIdx.y * k.across + x, next = (int64_t)gridDim.y * k.across;
    for (int64_t r = (int64_t)blockIdx.x * down + threadIdx.x / k.across; r < k.rows;
         r += (int64_t)gridDim.x * down) {
        int64_t o = k.rows == p.n ? 0 : r / p.n, i = r - o * p.n, at = xt_position_at(p, i);
        if (!xt_position_in_range(p, at)) {
            if (begin == 0) xt_note_fault(p.fault, i, at);
            continue;
        }
        if (last && last[at] != (unsigned long long)i + 1) continue;
        const U *source = from + r * k.units;
        U *target = to + (o * p.size + at) * k.units;
        for (int64_t c = begin; c < k.units; c += next) target[c] = source[c];
    }
}

static __global__ void find_last(unsigned long long *last,
                                 const __grid_constant__ struct xt_positions p) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < p.n; i += step) {
        int64_t at = xt_position_at(p, i);
        if (xt_position_in_range(p, at))
            atomicMax(&last[at], (unsigned long long)i + 1); /* in any order */
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

/* How rows are copied: the widest unit that rows, steps and places allow. */
struct pick_plan {
    struct pick pick;
    int64_t unit; /* bytes */
    dim3 grid;
};

static struct pick_plan pick_plan_of(int64_t rows, const void *to, const void *from, int64_t row,
                                     int64_t step) {
    struct pick_plan c = {{rows, row, step, 1}, 16, dim3(1)};
    uint64_t places =
        (uint64_t)(uintptr_t)to | (uint64_t)(uintptr_t)from | (uint64_t)row | (uint64_t)step | 16;
    c.unit = (int64_t)(places & (0 - places)); /* the largest power of two in all */
    c.pick.units /= c.unit;
    c.pick.step /= c.unit;
    c.pick.across = xt_power_of_two(c.pick.units, THREADS);
    int64_t parts = (c.pick.units + 4 * c.pick.across - 1) / (4 * c.pick.across);
    c.grid =
        dim3(xt_cuda_blocks(rows, THREADS / c.pick.across), (unsigned)(parts < 1      ? 1
                                                                       : parts > 1024 ? 1024
                                                                                      : parts));
    return c;
}

/* Calls `...` with U being a type of `unit` bytes. */
#define BY_UNIT(unit, ...)                                                                         \
    if ((unit) == 16) {                                                                            \
        using U = uint4;                                                                           \
        __VA_ARGS__                                                                                \
    } else {                                                                                       \
        XT_CUDA_UNITS(unit, __VA_ARGS__)                                                           \
    }

/* `step` is from row to row of `from`, in bytes like `row`. */
static enum xt_status pick_all(struct xt_ctx *ctx, const struct xt_positions *p, int64_t outer,
                               void *to, const void *from, int64_t row, int64_t step) {
    if (outer * p->n == 0) return XT_OK;
    struct pick_plan c = pick_plan_of(outer * p->n, to, from, row, step);
    BY_UNIT(c.unit, pick_rows<<<c.grid, THREADS, 0, xt_cuda_stream(ctx)>>>((U *)to, (const U *)from,
                                                                           *p, c.pick);)
    return xt_cuda_launched(ctx);
}

static enum xt_status embedding(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *weight = l->in[0];
    int64_t bytes = (int64_t)xt_dtype_bytes(weight->dtype);
    struct xt_positions p;
    XT_TRY(xt_positions_load(ctx, l, l->in[1], "ids", weight->shape[0], XT_VOCABULARY, &p));
    enum xt_status status = pick_all(ctx, &p, 1, xt_data(l->out[0]), xt_data(weight),
                                     weight->shape[1] * bytes, weight->stride[0] * bytes);
    xt_positions_drop(ctx, &p);
    return status;
}

static enum xt_status index_select(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    int64_t dim = l->attrs[0].i, outer, inner;
    struct xt_positions p;
    xt_around(x, dim, &outer, &inner);
    int64_t row = inner * (int64_t)xt_dtype_bytes(x->dtype);
    XT_TRY(xt_positions_load(ctx, l, l->in[1], "index", x->shape[dim], dim, &p));
    enum xt_status status = pick_all(ctx, &p, outer, xt_data(l->out[0]), xt_data(x), row, row);
    xt_positions_drop(ctx, &p);
    return status;
}

/* In order: the last of equal positions stays. */
static enum xt_status index_copy(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *src = l->in[2];
    int64_t dim = l->attrs[0].i, outer, inner;
    cudaStream_t stream = xt_cuda_stream(ctx);
    struct xt_positions p;
    void *last = NULL, *to = xt_data(x);
    const void *from = xt_data(src);
    enum xt_status status = XT_OK;
    xt_around(x, dim, &outer, &inner);
    int64_t row = inner * (int64_t)xt_dtype_bytes(x->dtype);
    XT_TRY(xt_positions_load(ctx, l, l->in[1], "index", x->shape[dim], dim, &p));
    size_t bytes = p.n > 1 ? (size_t)p.size * sizeof(unsigned long long) : 0;
    if (outer * p.n == 0) goto done;
    if (bytes) {
        XT_GO(xt_scratch_get(ctx, XT_CUDA, bytes, &last));
        XT_GO(xt_cuda_status(ctx, cudaMemsetAsync(last, 0, bytes, stream)));
        find_last<<<xt_cuda_blocks(p.n, THREADS), THREADS, 0, stream>>>((unsigned long long *)last,
                                                                        p);
    }
    {
        struct pick_plan c = pick_plan_of(outer * p.n, to, from, row, row);
        BY_UNIT(c.unit, put_rows<<<c.grid, THREADS, 0, stream>>>(
                            (U *)to, (const U *)from, (const unsigned long long *)last, p, c.pick);)
    }
    status = xt_cuda_launched(ctx);
done:
    xt_scratch_put(ctx, XT_CUDA, last, bytes);
    xt_positions_drop(ctx, &p);
    return status;
}

/* ---- gradients: rows are added back ---------------------------------------------------------- */

/* keys[i] = position begin + i, or size where that is out of range. */
static __global__ void keys_of_positions(uint64_t *keys,
                                         const __grid_constant__ struct xt_positions p,
                                         int64_t begin, int count) {
    int step = (int)gridDim.x * THREADS;
    for (int i = (int)(blockIdx.x * THREADS + threadIdx.x); i < count; i += step) {
        int64_t at = xt_position_at(p, begin + i);
        bool good = xt_position_in_range(p, at);
        if (!good) xt_note_fault(p.fault, begin + i, at);
        keys[i] = good ? (uint64_t)at : (uint64_t)p.size;
    }
}

/* target, (outer, size, row), += grad, (outer, n, row), at the positions p. */
static enum xt_status add_rows(struct xt_ctx *ctx, const struct xt_positions &p, int64_t outer,
                               int64_t row, void *target, const struct xt_tensor *grad) {
    const struct xt_scatter a = {target, xt_data(grad), grad->dtype, outer, p.n, p.size, row};
    cudaStream_t stream = xt_cuda_stream(ctx);
    return xt_scatter_add(ctx, a, [&](uint64_t *keys, int64_t begin, int count) {
        keys_of_positions<<<xt_cuda_blocks(count, THREADS), THREADS, 0, stream>>>(keys, p, begin,
                                                                                  count);
    });
}

static enum xt_status embedding_acc(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *target = l->in[0], *grad = l->in[2];
    struct xt_positions p;
    if ((target->dtype == XT_F64) != (grad->dtype == XT_F64))
        return xt_fail(ctx, XT_DTYPE, "target is %s, grad is %s", xt_dtype_name(target->dtype),
                       xt_dtype_name(grad->dtype));
    XT_TRY(xt_positions_load(ctx, l, l->in[1], "ids", target->shape[0], XT_VOCABULARY, &p));
    enum xt_status status = XT_OK;
    if (!l->attrs[0].i) status = xt_sums_zero(ctx, xt_data(target), xt_nbytes(target));
    if (status == XT_OK) status = add_rows(ctx, p, 1, target->shape[1], xt_data(target), grad);
    xt_positions_drop(ctx, &p);
    return status;
}

static enum xt_status index_select_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *grad = l->in[1], *y = l->out[0];
    int64_t dim = l->attrs[0].i, outer, inner;
    struct xt_positions p;
    void *sums;
    size_t bytes;
    xt_around(y, dim, &outer, &inner);
    XT_TRY(xt_positions_load(ctx, l, l->in[0], "index", y->shape[dim], dim, &p));
    enum xt_status status = xt_sums_open(ctx, y, &sums, &bytes);
    if (status == XT_OK) {
        status = add_rows(ctx, p, outer, inner, sums, grad);
        status = xt_sums_close(ctx, y, sums, bytes, status);
    }
    xt_positions_drop(ctx, &p);
    return status;
}

/* ---- the table ------------------------------------------------------------------------------- */

const struct xt_kernel xt_cuda_index_kernels[] = {
    {"index_select", XT_ANY, XT_CONTIGUOUS, index_select},
    {"index_copy_", XT_ANY, XT_CONTIGUOUS, index_copy},
    {"embedding", XT_ANY, XT_INNER, embedding},
    {"index_select_grad", XT_INTS, XT_CONTIGUOUS, index_select_grad},
    {"embedding_acc", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, embedding_acc},
    {},
};
