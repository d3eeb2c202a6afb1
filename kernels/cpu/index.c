/*
 * index.c: picking elements by position, and adding gradients back where they were picked.
 *
 * No two threads ever add to the same element: they own columns, or whole outer places, and each
 * goes through the positions in ascending order. So the split never shows in the bits.
 */
#include "cpu.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Positions as contiguous i64: the tensor's own bytes or a copy in scratch of `bytes`. */
struct positions {
    const int64_t *at;
    int64_t n;
    void *copy;   /* NULL when `at` is the tensor's */
    size_t bytes; /* of copy */
};

static enum xt_status load_positions(struct xt_ctx *ctx, const struct xt_tensor *t,
                                     struct positions *out) {
    struct positions p = {.n = xt_numel(t)};
    if (t->dtype == XT_I64 && xt_is_contiguous(t)) {
        p.at = xt_data(t);
        *out = p;
        return XT_OK;
    }
    p.bytes = (size_t)p.n * sizeof(int64_t);
    XT_TRY(xt_scratch_get(ctx, XT_CPU, p.bytes, &p.copy));
    int64_t *to = p.copy, stride[XT_MAX_DIMS], step = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= t->shape[d];
    }
    if (p.n > 0)
        XT_CPU(copy_strided)
        (ctx, xt_dtype_bytes(t->dtype), t->ndim, t->shape, to, stride, xt_data(t), t->stride);
    /* From the end, where each is read before its place is written. */
    if (t->dtype == XT_I32)
        for (int64_t i = p.n; i-- > 0;) {
            int32_t narrow;
            memcpy(&narrow, (char *)to + i * 4, sizeof narrow);
            to[i] = narrow;
        }
    p.at = to;
    *out = p;
    return XT_OK;
}

static void drop_positions(struct xt_ctx *ctx, const struct positions *p) {
    if (p->copy) xt_scratch_put(ctx, XT_CPU, p->copy, p->bytes);
}

/* Fails with the first position outside [0, size): its place as a user counts it, and its value. */
static enum xt_status check_positions(struct xt_ctx *ctx, const struct positions *p,
                                      const struct xt_tensor *t, const char *name, int64_t size,
                                      const char *what) {
    uint64_t bad = 0;
    for (int64_t i = 0; i < p->n; i++) bad |= (uint64_t)p->at[i] >= (uint64_t)size;
    if (!bad) return XT_OK;
    int64_t i = 0, index[XT_MAX_DIMS];
    while ((uint64_t)p->at[i] < (uint64_t)size) i++;
    int64_t value = p->at[i];
    for (int d = t->ndim - 1; d >= 0; d--) {
        index[d] = i % t->shape[d];
        i /= t->shape[d];
    }
    char place[200] = "";
    size_t used = 0;
    for (int d = 0; d < t->ndim; d++)
        used += (size_t)snprintf(place + used, sizeof place - used, "[%" PRId64 "]", index[d] + 1);
    return xt_fail(ctx, XT_VALUE, "%s%s is %" PRId64 ", %s %" PRId64, name, place, value, what,
                   size);
}

/* ---- embedding, index_select ----------------------------------------------------------------- */

static enum xt_status embedding(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *weight = l->in[0], *ids = l->in[1];
    struct positions p;
    size_t bytes = xt_dtype_bytes(weight->dtype), row = (size_t)weight->shape[1] * bytes;
    size_t step = (size_t)weight->stride[0] * bytes;
    const char *from = xt_data(weight);
    char *to = xt_data(l->out[0]);
    XT_TRY(load_positions(ctx, ids, &p));
    enum xt_status status =
        check_positions(ctx, &p, ids, "ids", weight->shape[0], "the vocabulary has");
    if (status == XT_OK && row > 0) {
#pragma omp parallel for num_threads(xt_threads(ctx))                                              \
    schedule(static) if (p.n * weight->shape[1] > XT_CPU_GRAIN)
        for (int64_t i = 0; i < p.n; i++)
            memcpy(to + (size_t)i * row, from + (size_t)p.at[i] * step, row);
    }
    drop_positions(ctx, &p);
    return status;
}

/* A shape as (outer, size, inner) about one dimension. */
static void around(const struct xt_tensor *t, int64_t dim, int64_t *outer, int64_t *inner) {
    *outer = *inner = 1;
    for (int d = 0; d < t->ndim; d++)
        if (d != dim) *(d < dim ? outer : inner) *= t->shape[d];
}

static enum xt_status index_select(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    int64_t dim = l->attrs[0].i, outer, inner, size = x->shape[dim];
    struct positions p;
    char what[64];
    snprintf(what, sizeof what, "dim %d of x has size", (int)dim + 1);
    around(x, dim, &outer, &inner);
    int64_t row = inner * (int64_t)xt_dtype_bytes(x->dtype);
    const char *from = xt_data(x);
    char *to = xt_data(l->out[0]);
    XT_TRY(load_positions(ctx, l->in[1], &p));
    enum xt_status status = check_positions(ctx, &p, l->in[1], "index", size, what);
    if (status == XT_OK && row > 0) {
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static)                             \
    collapse(2) if (outer * p.n * inner > XT_CPU_GRAIN)
        for (int64_t o = 0; o < outer; o++)
            for (int64_t i = 0; i < p.n; i++)
                memcpy(to + (o * p.n + i) * row, from + (o * size + p.at[i]) * row, (size_t)row);
    }
    drop_positions(ctx, &p);
    return status;
}

/* ---- adding back ----------------------------------------------------------------------------- */

#define STRIP 512

/* target row at[i] += grad row i, i ascending, for columns of one strip. */
static void add_rows(const struct positions *p, int64_t wide, char *target, int64_t target_step,
                     enum xt_dtype dtype, const char *grad, int64_t grad_step) {
    if (dtype == XT_F64) {
        for (int64_t i = 0; i < p->n; i++) {
            double *t = (double *)(void *)target + p->at[i] * target_step;
            const double *g = (const double *)(const void *)grad + i * grad_step;
            for (int64_t j = 0; j < wide; j++) t[j] += g[j];
        }
        return;
    }
    int64_t bytes = (int64_t)xt_dtype_bytes(dtype);
    for (int64_t i = 0; i < p->n; i++) {
        float *t = (float *)(void *)target + p->at[i] * target_step, wider[STRIP];
        const float *g = (const float *)(const void *)(grad + i * grad_step * bytes);
        if (dtype != XT_F32) {
            XT_CPU(load_f32)(g, dtype, wide, wider);
            g = wider;
        }
        for (int64_t j = 0; j < wide; j++) t[j] += g[j];
    }
}

/* (outer, n, inner) of grad into (outer, size, inner) of target, f32, or f64 when grad is. */
static void scatter(struct xt_ctx *ctx, const struct positions *p, int64_t outer, int64_t size,
                    int64_t inner, char *target, int64_t target_step, enum xt_dtype dtype,
                    const char *grad, int64_t grad_step) {
    int threads = outer * p->n * inner > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    /* Columns are shared when there are not enough outer places; any cut gives the same bits. */
    int64_t wide = outer >= threads ? inner : (inner + threads - 1) / threads;
    wide = (wide + 15) / 16 * 16;
    if (wide > STRIP) wide = STRIP;
    if (inner == 0) return;
    int64_t strips = (inner + wide - 1) / wide, units = outer * strips;
    int64_t bytes = (int64_t)xt_dtype_bytes(dtype), target_bytes = dtype == XT_F64 ? 8 : 4;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t u = 0; u < units; u++) {
        int64_t o = u / strips, j = u % strips * wide, left = inner - j;
        add_rows(p, left < wide ? left : wide, target + (o * size * target_step + j) * target_bytes,
                 target_step, dtype, grad + (o * p->n * grad_step + j) * bytes, grad_step);
    }
}

static void fill_zeros(struct xt_ctx *ctx, char *to, size_t bytes) {
    const size_t unit = 1u << 18;
    int64_t units = (int64_t)((bytes + unit - 1) / unit);
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (units > 1)
    for (int64_t u = 0; u < units; u++) {
        size_t begin = (size_t)u * unit, left = bytes - begin;
        memset(to + begin, 0, left < unit ? left : unit);
    }
}

static enum xt_status embedding_acc(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *target = l->in[0], *grad = l->in[2];
    struct positions p;
    if ((target->dtype == XT_F64) != (grad->dtype == XT_F64))
        return xt_fail(ctx, XT_DTYPE, "target is %s, grad is %s", xt_dtype_name(target->dtype),
                       xt_dtype_name(grad->dtype));
    XT_TRY(load_positions(ctx, l->in[1], &p));
    enum xt_status status =
        check_positions(ctx, &p, l->in[1], "ids", target->shape[0], "the vocabulary has");
    if (status == XT_OK) {
        if (!l->attrs[0].i) fill_zeros(ctx, xt_data(target), xt_nbytes(target));
        scatter(ctx, &p, 1, target->shape[0], target->shape[1], xt_data(target), target->stride[0],
                grad->dtype, xt_data(grad), grad->stride[0]);
    }
    drop_positions(ctx, &p);
    return status;
}

/* Where sums are made: y itself when it is f32 or f64, else f32 scratch of `bytes`, zeroed. */
static enum xt_status open_sums(struct xt_ctx *ctx, const struct xt_tensor *y, char **sums,
                                size_t *bytes) {
    bool own = y->dtype == XT_F32 || y->dtype == XT_F64;
    *bytes = own ? 0 : (size_t)xt_numel(y) * sizeof(float);
    *sums = own ? xt_data(y) : NULL;
    if (!own) XT_TRY(xt_scratch_get(ctx, XT_CPU, *bytes, (void **)sums));
    fill_zeros(ctx, *sums, own ? xt_nbytes(y) : *bytes);
    return XT_OK;
}

static void close_sums(struct xt_ctx *ctx, const struct xt_tensor *y, char *sums, size_t bytes) {
    if (sums == xt_data(y)) return;
    XT_CPU(store_f32)((const float *)(const void *)sums, y->dtype, xt_numel(y), xt_data(y));
    xt_scratch_put(ctx, XT_CPU, sums, bytes);
}

static enum xt_status index_select_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *grad = l->in[1], *y = l->out[0];
    int64_t dim = l->attrs[0].i, outer, inner;
    struct positions p;
    char what[64], *sums;
    size_t bytes;
    snprintf(what, sizeof what, "dim %d has size", (int)dim + 1);
    around(y, dim, &outer, &inner);
    XT_TRY(load_positions(ctx, l->in[0], &p));
    enum xt_status status = check_positions(ctx, &p, l->in[0], "index", y->shape[dim], what);
    if (status == XT_OK) status = open_sums(ctx, y, &sums, &bytes);
    if (status == XT_OK) {
        scatter(ctx, &p, outer, y->shape[dim], inner, sums, inner, grad->dtype, xt_data(grad),
                inner);
        close_sums(ctx, y, sums, bytes);
    }
    drop_positions(ctx, &p);
    return status;
}

/* ---- gather ---------------------------------------------------------------------------------- */

/* The lines of index along its last dimension, each with where it starts in x. */
struct lines {
    int64_t count, n;            /* lines, and elements of one */
    int64_t dim_step, last_step; /* x's strides along dim and the last dimension */
    int ndim;
    int64_t shape[XT_MAX_DIMS];  /* of index, without the last */
    int64_t stride[XT_MAX_DIMS]; /* of x, 0 for dim */
};

static struct lines lines_of(const struct xt_tensor *index, const int64_t *x_shape, int64_t dim) {
    struct lines s = {.count = 1, .n = 1, .ndim = index->ndim - 1, .dim_step = 1};
    int64_t step = 1;
    if (index->ndim == 0) {
        s.ndim = 0;
        return s;
    }
    for (int d = index->ndim - 1; d >= 0; d--) {
        if (d == dim) s.dim_step = step;
        if (d == s.ndim) {
            s.n = index->shape[d];
            s.last_step = d == dim ? 0 : 1;
        } else {
            s.count *= index->shape[d];
            s.shape[d] = index->shape[d];
            s.stride[d] = d == dim ? 0 : step;
        }
        step *= x_shape[d];
    }
    return s;
}

static int64_t line_start(const struct lines *s, int64_t line) {
    int64_t start = 0;
    for (int d = s->ndim - 1; d >= 0; d--) {
        start += line % s->shape[d] * s->stride[d];
        line /= s->shape[d];
    }
    return start;
}

static enum xt_status gather(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *index = l->in[1];
    int64_t dim = l->attrs[0].i;
    struct positions p;
    char what[64];
    snprintf(what, sizeof what, "dim %d of x has size", (int)dim + 1);
    struct lines s = lines_of(index, x->shape, dim);
    const void *from = xt_data(x);
    void *to = xt_data(l->out[0]);
    XT_TRY(load_positions(ctx, index, &p));
    enum xt_status status =
        check_positions(ctx, &p, index, "index", x->ndim ? x->shape[dim] : 1, what);
    if (status == XT_OK && p.n > 0) {
#define PICK(type)                                                                                 \
    for (int64_t j = 0; j < s.n; j++)                                                              \
        ((type *)to)[i * s.n + j] =                                                                \
            ((const type *)from)[start + at[j] * s.dim_step + j * s.last_step];                    \
    break
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (p.n > XT_CPU_GRAIN)
        for (int64_t i = 0; i < s.count; i++) {
            int64_t start = line_start(&s, i);
            const int64_t *at = p.at + i * s.n;
            switch (xt_dtype_bytes(x->dtype)) {
            case 1: PICK(uint8_t);
            case 2: PICK(uint16_t);
            case 4: PICK(uint32_t);
            default: PICK(uint64_t);
            }
        }
#undef PICK
    }
    drop_positions(ctx, &p);
    return status;
}

/* Lines that differ in dim alone may meet, so threads share what stands before dim. */
static enum xt_status gather_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *index = l->in[0], *grad = l->in[1], *y = l->out[0];
    int64_t dim = l->attrs[0].i, outer = 1;
    struct positions p;
    char what[64], *sums;
    size_t bytes;
    snprintf(what, sizeof what, "dim %d has size", (int)dim + 1);
    struct lines s = lines_of(index, y->shape, dim);
    for (int d = 0; d < s.ndim && d < dim; d++) outer *= s.shape[d];
    XT_TRY(load_positions(ctx, index, &p));
    enum xt_status status =
        check_positions(ctx, &p, index, "index", y->ndim ? y->shape[dim] : 1, what);
    if (status == XT_OK) status = open_sums(ctx, y, &sums, &bytes);
    if (status == XT_OK && p.n > 0) {
        int64_t each = s.count / outer;
        enum xt_dtype dtype = grad->dtype;
        const char *from = xt_data(grad);
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (p.n > XT_CPU_GRAIN)
        for (int64_t o = 0; o < outer; o++)
            for (int64_t i = o * each; i < (o + 1) * each; i++) {
                int64_t start = line_start(&s, i);
                const int64_t *at = p.at + i * s.n;
                for (int64_t j = 0; j < s.n; j++) {
                    int64_t place = start + at[j] * s.dim_step + j * s.last_step;
                    if (dtype == XT_F64) {
                        ((double *)(void *)sums)[place] +=
                            ((const double *)(const void *)from)[i * s.n + j];
                        continue;
                    }
                    float g;
                    XT_CPU(load_f32)
                    (from + (i * s.n + j) * (int64_t)xt_dtype_bytes(dtype), dtype, 1, &g);
                    ((float *)(void *)sums)[place] += g;
                }
            }
    }
    if (status == XT_OK) close_sums(ctx, y, sums, bytes);
    drop_positions(ctx, &p);
    return status;
}

const struct xt_kernel XT_CPU(index_kernels)[] = {
    {"index_select", XT_ANY, XT_CONTIGUOUS, index_select},
    {"gather", XT_ANY, XT_CONTIGUOUS, gather},
    {"embedding", XT_ANY, XT_INNER, embedding},
    {"index_select_grad", XT_INTS, XT_CONTIGUOUS, index_select_grad},
    {"gather_grad", XT_INTS, XT_CONTIGUOUS, gather_grad},
    {"embedding_acc", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, embedding_acc},
    {0},
};
