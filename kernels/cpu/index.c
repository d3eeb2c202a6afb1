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

enum { VOCABULARY = -1 };

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
    if (p.n > 0) XT_CPU(copy_strided)
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

/* Fails with the first position outside [0, size): its place as a user counts it, and its value.
   dim is the dimension of x that is picked from, or VOCABULARY. */
static enum xt_status check_positions(struct xt_ctx *ctx, const struct positions *p,
                                      const struct xt_tensor *t, const char *name, int64_t size,
                                      int64_t dim) {
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
    if (dim == VOCABULARY)
        return xt_fail(ctx, XT_VALUE, "%s%s is %" PRId64 ", the vocabulary has %" PRId64, name,
                       place, value, size);
    return xt_fail(ctx, XT_VALUE, "%s%s is %" PRId64 ", dim %" PRId64 " of x has size %" PRId64,
                   name, place, value, dim + 1, size);
}

/* ---- embedding, index_select ----------------------------------------------------------------- */

/* (outer, size, row) to (outer, n, row): rows as bytes. */
struct pick {
    const char *from;
    char *to;
    int64_t outer, size;
    size_t row, step; /* bytes of a row, and between rows of `from` */
};

/* Rows first .. last - 1 of the result. */
static void pick_rows(const struct pick *k, const struct positions *p, int64_t first,
                      int64_t last) {
    for (int64_t i = first; i < last; i++) {
        int64_t source = i / p->n * k->size + p->at[i % p->n];
        memcpy(k->to + (size_t)i * k->row, k->from + (size_t)source * k->step, k->row);
    }
}

static void pick(struct xt_ctx *ctx, const struct pick *k, const struct positions *p) {
    int64_t rows = k->outer * p->n, bytes = rows * (int64_t)k->row;
    if (bytes == 0) return;
    if (bytes <= 4 * XT_CPU_GRAIN) {
        pick_rows(k, p, 0, rows);
        return;
    }
    int64_t each = 16384 / (int64_t)k->row + 1;
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static)
    for (int64_t i = 0; i < rows; i += each) pick_rows(k, p, i, rows - i < each ? rows : i + each);
}

static enum xt_status embedding(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *weight = l->in[0], *ids = l->in[1];
    struct positions p;
    size_t bytes = xt_dtype_bytes(weight->dtype);
    struct pick k = {.from = xt_data(weight),
                     .to = xt_data(l->out[0]),
                     .outer = 1,
                     .size = weight->shape[0],
                     .row = (size_t)weight->shape[1] * bytes,
                     .step = (size_t)weight->stride[0] * bytes};
    XT_TRY(load_positions(ctx, ids, &p));
    enum xt_status status = check_positions(ctx, &p, ids, "ids", k.size, VOCABULARY);
    if (status == XT_OK) pick(ctx, &k, &p);
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
    int64_t dim = l->attrs[0].i, inner;
    struct pick k = {.from = xt_data(x), .to = xt_data(l->out[0]), .size = x->shape[dim]};
    struct positions p;
    around(x, dim, &k.outer, &inner);
    k.row = k.step = (size_t)inner * xt_dtype_bytes(x->dtype);
    XT_TRY(load_positions(ctx, l->in[1], &p));
    enum xt_status status = check_positions(ctx, &p, l->in[1], "index", k.size, dim);
    if (status == XT_OK) pick(ctx, &k, &p);
    drop_positions(ctx, &p);
    return status;
}

/* In order, so that the last of equal positions stays. */
static enum xt_status index_copy(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *src = l->in[2];
    int64_t dim = l->attrs[0].i, size = x->shape[dim], outer, inner;
    struct positions p;
    around(x, dim, &outer, &inner);
    size_t row = (size_t)inner * xt_dtype_bytes(x->dtype);
    XT_TRY(load_positions(ctx, l->in[1], &p));
    enum xt_status status = check_positions(ctx, &p, l->in[1], "index", size, dim);
    if (status == XT_OK && row)
        for (int64_t i = 0; i < outer * p.n; i++)
            memcpy((char *)xt_data(x) + (size_t)(i / p.n * size + p.at[i % p.n]) * row,
                   (const char *)xt_data(src) + (size_t)i * row, row);
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

/* (outer, n, inner) of grad into (outer, size, inner) of target: f32, or f64 when grad is. */
struct scatter {
    char *target;
    const char *grad;
    enum xt_dtype dtype; /* of grad */
    int64_t outer, size, inner;
    int64_t target_step, grad_step; /* between rows, in elements */
    int64_t wide;                   /* columns of a strip */
};

/* Unit u of (outer, strip). */
static void scatter_unit(const struct scatter *s, const struct positions *p, int64_t u) {
    int64_t strips = (s->inner + s->wide - 1) / s->wide, o = u / strips, j = u % strips * s->wide;
    int64_t bytes = (int64_t)xt_dtype_bytes(s->dtype), target_bytes = s->dtype == XT_F64 ? 8 : 4;
    add_rows(p, s->inner - j < s->wide ? s->inner - j : s->wide,
             s->target + (o * s->size * s->target_step + j) * target_bytes, s->target_step,
             s->dtype, s->grad + (o * p->n * s->grad_step + j) * bytes, s->grad_step);
}

static void scatter(struct xt_ctx *ctx, struct scatter *s, const struct positions *p) {
    int threads = s->outer * p->n * s->inner > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    /* Columns are shared when there are not enough outer places; any cut gives the same bits. */
    int64_t wide = s->outer >= threads ? s->inner : (s->inner + threads - 1) / threads;
    wide = (wide + 15) / 16 * 16;
    s->wide = wide > STRIP ? STRIP : wide;
    if (s->inner == 0) return;
    int64_t units = s->outer * ((s->inner + s->wide - 1) / s->wide);
    if (threads == 1) {
        for (int64_t u = 0; u < units; u++) scatter_unit(s, p, u);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t u = 0; u < units; u++) scatter_unit(s, p, u);
}

static void fill_zeros(struct xt_ctx *ctx, char *to, size_t bytes) {
    const size_t unit = 1u << 18;
    int64_t units = (int64_t)((bytes + unit - 1) / unit);
    if (units <= 1) {
        if (units) memset(to, 0, bytes);
        return;
    }
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static)
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
    struct scatter s = {.target = xt_data(target),
                        .grad = xt_data(grad),
                        .dtype = grad->dtype,
                        .outer = 1,
                        .size = target->shape[0],
                        .inner = target->shape[1],
                        .target_step = target->stride[0],
                        .grad_step = grad->stride[0]};
    XT_TRY(load_positions(ctx, l->in[1], &p));
    enum xt_status status = check_positions(ctx, &p, l->in[1], "ids", s.size, VOCABULARY);
    if (status == XT_OK) {
        if (!l->attrs[0].i) fill_zeros(ctx, s.target, xt_nbytes(target));
        scatter(ctx, &s, &p);
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
    int64_t dim = l->attrs[0].i;
    struct scatter s = {.grad = xt_data(grad), .dtype = grad->dtype, .size = y->shape[dim]};
    struct positions p;
    size_t bytes;
    around(y, dim, &s.outer, &s.inner);
    s.target_step = s.grad_step = s.inner;
    XT_TRY(load_positions(ctx, l->in[0], &p));
    enum xt_status status = check_positions(ctx, &p, l->in[0], "index", s.size, dim);
    if (status == XT_OK) status = open_sums(ctx, y, &s.target, &bytes);
    if (status == XT_OK) {
        scatter(ctx, &s, &p);
        close_sums(ctx, y, s.target, bytes);
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

/* Lines first .. last - 1. */
static void gather_lines(const struct lines *s, const struct positions *p, size_t bytes,
                         const void *from, void *to, int64_t first, int64_t last) {
#define PICK(type)                                                                                 \
    for (int64_t j = 0; j < s->n; j++)                                                             \
        ((type *)to)[i * s->n + j] =                                                               \
            ((const type *)from)[start + at[j] * s->dim_step + j * s->last_step];                  \
    break
    for (int64_t i = first; i < last; i++) {
        int64_t start = line_start(s, i);
        const int64_t *at = p->at + i * s->n;
        switch (bytes) {
        case 1: PICK(uint8_t);
        case 2: PICK(uint16_t);
        case 4: PICK(uint32_t);
        default: PICK(uint64_t);
        }
    }
#undef PICK
}

static enum xt_status gather(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *index = l->in[1];
    int64_t dim = l->attrs[0].i;
    struct positions p;
    struct lines s = lines_of(index, x->shape, dim);
    size_t bytes = xt_dtype_bytes(x->dtype);
    const void *from = xt_data(x);
    void *to = xt_data(l->out[0]);
    XT_TRY(load_positions(ctx, index, &p));
    enum xt_status status =
        check_positions(ctx, &p, index, "index", x->ndim ? x->shape[dim] : 1, dim);
    if (status != XT_OK || p.n == 0) goto done;
    if (p.n <= XT_CPU_GRAIN) {
        gather_lines(&s, &p, bytes, from, to, 0, s.count);
        goto done;
    }
    int64_t each = 4096 / s.n + 1;
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static)
    for (int64_t i = 0; i < s.count; i += each)
        gather_lines(&s, &p, bytes, from, to, i, s.count - i < each ? s.count : i + each);
done:
    drop_positions(ctx, &p);
    return status;
}

/* Adds lines first .. last - 1 of grad into sums, f32 or f64. */
static void gather_back(const struct lines *s, const struct positions *p, enum xt_dtype dtype,
                        const char *grad, void *sums, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
        int64_t start = line_start(s, i);
        for (int64_t j = 0; j < s->n; j++) {
            int64_t from = i * s->n + j, to = start + p->at[from] * s->dim_step + j * s->last_step;
            float g;
            if (dtype == XT_F64) {
                ((double *)sums)[to] += ((const double *)(const void *)grad)[from];
                continue;
            }
            if (dtype == XT_F32)
                g = ((const float *)(const void *)grad)[from];
            else
                XT_CPU(load_f32)(grad + from * 2, dtype, 1, &g);
            ((float *)sums)[to] += g;
        }
    }
}

/* Lines that differ in dim alone may meet, so threads share what stands before dim. */
static enum xt_status gather_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *index = l->in[0], *grad = l->in[1], *y = l->out[0];
    int64_t dim = l->attrs[0].i, outer = 1;
    struct positions p;
    char *sums;
    size_t bytes;
    struct lines s = lines_of(index, y->shape, dim);
    for (int d = 0; d < s.ndim && d < dim; d++) outer *= s.shape[d];
    XT_TRY(load_positions(ctx, index, &p));
    enum xt_status status =
        check_positions(ctx, &p, index, "index", y->ndim ? y->shape[dim] : 1, dim);
    if (status == XT_OK) status = open_sums(ctx, y, &sums, &bytes);
    if (status != XT_OK) goto done;
    if (p.n <= XT_CPU_GRAIN) {
        gather_back(&s, &p, grad->dtype, xt_data(grad), sums, 0, p.n ? s.count : 0);
    } else {
        int64_t each = s.count / outer;
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static)
        for (int64_t o = 0; o < outer; o++)
            gather_back(&s, &p, grad->dtype, xt_data(grad), sums, o * each, (o + 1) * each);
    }
    close_sums(ctx, y, sums, bytes);
done:
    drop_positions(ctx, &p);
    return status;
}

const struct xt_kernel XT_CPU(index_kernels)[] = {
    {"index_select", XT_ANY, XT_CONTIGUOUS, index_select},
    {"gather", XT_ANY, XT_CONTIGUOUS, gather},
    {"index_copy_", XT_ANY, XT_CONTIGUOUS, index_copy},
    {"embedding", XT_ANY, XT_INNER, embedding},
    {"index_select_grad", XT_INTS, XT_CONTIGUOUS, index_select_grad},
    {"gather_grad", XT_INTS, XT_CONTIGUOUS, gather_grad},
    {"embedding_acc", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, embedding_acc},
    {0},
};
