/*
 * shape.c: copies. Every kernel here but two is copy_strided with other strides.
 */
#include "cpu.h"

#include "../dims.h"

#include <string.h>

/* What one thread takes at a time, in elements. */
#define UNIT 16384
/* Side of the square in which a transposed copy stays within the first-level cache. */
#define TILE 32

/* One line of n elements. */
static void copy_line(size_t bytes, int64_t n, char *to, int64_t ts, const char *from, int64_t fs) {
    if (ts == 1 && fs == 1) {
        memcpy(to, from, (size_t)n * bytes);
        return;
    }
#define LINE(type)                                                                                 \
    do {                                                                                           \
        type *t = (type *)to;                                                                      \
        const type *f = (const type *)from;                                                        \
        if (ts == 1 && fs == 0)                                                                    \
            for (int64_t i = 0; i < n; i++) t[i] = f[0];                                           \
        else if (ts == 1)                                                                          \
            for (int64_t i = 0; i < n; i++) t[i] = f[i * fs];                                      \
        else                                                                                       \
            for (int64_t i = 0; i < n; i++) t[i * ts] = f[i * fs];                                 \
    } while (0)
    switch (bytes) {
    case 1: LINE(uint8_t); break;
    case 2: LINE(uint16_t); break;
    case 4: LINE(uint32_t); break;
    default: LINE(uint64_t); break;
    }
#undef LINE
}

/* Where row `row` of all dimensions but the last starts, and the index it has in each. */
static void seek(const struct xt_copy *c, int64_t row, int64_t *index, int64_t *to, int64_t *from) {
    *to = *from = 0;
    for (int d = c->ndim - 2; d >= 0; d--) {
        index[d] = row % c->shape[d];
        row /= c->shape[d];
        *to += index[d] * c->to[d];
        *from += index[d] * c->from[d];
    }
}

static void step(const struct xt_copy *c, int64_t *index, int64_t *to, int64_t *from) {
    for (int d = c->ndim - 2; d >= 0; d--) {
        *to += c->to[d];
        *from += c->from[d];
        if (++index[d] < c->shape[d]) return;
        index[d] = 0;
        *to -= c->shape[d] * c->to[d];
        *from -= c->shape[d] * c->from[d];
    }
}

/* Rows first .. first + count - 1, of each the elements begin .. begin + n - 1. */
static void copy_rows(const struct xt_copy *c, int64_t first, int64_t count, int64_t begin,
                      int64_t n) {
    int64_t index[XT_MAX_DIMS], to, from;
    int64_t ts = c->to[c->ndim - 1], fs = c->from[c->ndim - 1];
    seek(c, first, index, &to, &from);
    to += begin * ts;
    from += begin * fs;
    for (int64_t r = 0; r < count; r++) {
        copy_line(c->bytes, n, c->to_data + to * (int64_t)c->bytes, ts,
                  c->from_data + from * (int64_t)c->bytes, fs);
        step(c, index, &to, &from);
    }
}

/* One square of a transposed copy: `to` has stride 1 along i, `from` along j. Through a small
   array: lines that lie a power of two apart would push each other out of the cache. */
static void copy_tile(size_t bytes, int64_t ni, int64_t nj, char *to, int64_t ts, const char *from,
                      int64_t fs) {
#define SQUARE(type)                                                                               \
    do {                                                                                           \
        type turned[TILE][TILE], *t = (type *)to;                                                  \
        const type *f = (const type *)from;                                                        \
        for (int64_t i = 0; i < ni; i++)                                                           \
            for (int64_t j = 0; j < nj; j++) turned[j][i] = f[i * fs + j];                         \
        for (int64_t j = 0; j < nj; j++) memcpy(t + j * ts, turned[j], (size_t)ni * sizeof *t);    \
    } while (0)
    switch (bytes) {
    case 1: SQUARE(uint8_t); break;
    case 2: SQUARE(uint16_t); break;
    case 4: SQUARE(uint32_t); break;
    default: SQUARE(uint64_t); break;
    }
#undef SQUARE
}

/* `to` is dense along the last dimension, `from` along dimension ndim - 2. */
static void copy_transposed(struct xt_ctx *ctx, const struct xt_copy *c, int64_t numel) {
    struct xt_copy outer = *c; /* the dimensions before the two */
    int last = c->ndim - 1;
    int64_t ni = c->shape[last], nj = c->shape[last - 1];
    int64_t strips = (nj + TILE - 1) / TILE, units = strips;
    outer.ndim = c->ndim - 1; /* seek leaves out the last of these: dimension j */
    for (int d = 0; d < last - 1; d++) units *= c->shape[d];
    int64_t bytes = (int64_t)c->bytes, ts = c->to[last - 1], fs = c->from[last];
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (numel > XT_CPU_GRAIN)
    for (int64_t u = 0; u < units; u++) {
        int64_t index[XT_MAX_DIMS], to, from, j = u % strips * TILE;
        int64_t wide = nj - j < TILE ? nj - j : TILE;
        seek(&outer, u / strips, index, &to, &from);
        to += j * ts;
        from += j;
        for (int64_t i = 0; i < ni; i += TILE)
            copy_tile(c->bytes, ni - i < TILE ? ni - i : TILE, wide, c->to_data + (to + i) * bytes,
                      ts, c->from_data + (from + i * fs) * bytes, fs);
    }
}

/* Moves a dimension along which `from` is dense next to the last one; false when there is none. */
static bool find_transposed(struct xt_copy *c) {
    int last = c->ndim - 1;
    if (c->to[last] != 1 || c->from[last] <= 1) return false;
    for (int d = last - 1; d >= 0; d--) {
        if (c->from[d] != 1) continue;
        int64_t shape = c->shape[d], to = c->to[d];
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

void XT_CPU(copy_strided)(struct xt_ctx *ctx, size_t bytes, int ndim, const int64_t *shape,
                          void *to, const int64_t *to_stride, const void *from,
                          const int64_t *from_stride) {
    struct xt_copy c = {.bytes = bytes, .to_data = to, .from_data = from};
    int64_t numel = xt_copy_plan(&c, ndim, shape, to_stride, from_stride);
    if (numel == 0) return;
    if (find_transposed(&c)) {
        copy_transposed(ctx, &c, numel);
        return;
    }
    /* A unit is some whole rows, or a part of a long one. */
    int64_t n = c.shape[c.ndim - 1], rows = numel / n;
    if (numel <= XT_CPU_GRAIN) {
        copy_rows(&c, 0, rows, 0, n);
        return;
    }
    int64_t parts = (n + UNIT - 1) / UNIT, each = n < UNIT ? UNIT / n : 1;
    int64_t units = parts * ((rows + each - 1) / each);
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static)
    for (int64_t u = 0; u < units; u++) {
        int64_t first = u / parts * each, begin = u % parts * UNIT;
        int64_t count = rows - first < each ? rows - first : each;
        copy_rows(&c, first, count, begin, n - begin < UNIT ? n - begin : UNIT);
    }
}

/* ---- kernels --------------------------------------------------------------------------------- */

static enum xt_status contiguous(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    XT_CPU(copy_strided)
    (ctx, xt_dtype_bytes(x->dtype), x->ndim, x->shape, xt_data(y), y->stride, xt_data(x),
     x->stride);
    return XT_OK;
}

static enum xt_status concat(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *y = l->out[0];
    size_t bytes = xt_dtype_bytes(y->dtype);
    int64_t dim = l->attrs[0].i;
    char *to = xt_data(y);
    for (int i = 0; i < l->n_in; i++) {
        const struct xt_tensor *x = l->in[i];
        XT_CPU(copy_strided)(ctx, bytes, x->ndim, x->shape, to, y->stride, xt_data(x), x->stride);
        to += x->shape[dim] * y->stride[dim] * (int64_t)bytes;
    }
    return XT_OK;
}

static enum xt_status stack(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *y = l->out[0];
    size_t bytes = xt_dtype_bytes(y->dtype);
    int dim = (int)l->attrs[0].i;
    int64_t stride[XT_MAX_DIMS]; /* of y without dimension dim */
    for (int d = 0; d < y->ndim - 1; d++) stride[d] = y->stride[d < dim ? d : d + 1];
    char *to = xt_data(y);
    for (int i = 0; i < l->n_in; i++) {
        const struct xt_tensor *x = l->in[i];
        XT_CPU(copy_strided)(ctx, bytes, x->ndim, x->shape, to, stride, xt_data(x), x->stride);
        to += y->stride[dim] * (int64_t)bytes;
    }
    return XT_OK;
}

static enum xt_status slice_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *g = l->in[0], *y = l->out[0];
    size_t bytes = xt_dtype_bytes(y->dtype), total = xt_nbytes(y);
    char *to = xt_data(y);
    /* All zeros have the same bytes in every dtype. */
    if (total <= UNIT * 8) {
        if (total) memset(to, 0, total);
    } else {
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static)
        for (size_t begin = 0; begin < total; begin += UNIT * 8)
            memset(to + begin, 0, total - begin < UNIT * 8 ? total - begin : UNIT * 8);
    }
    to += l->attrs[2].i * y->stride[l->attrs[1].i] * (int64_t)bytes;
    XT_CPU(copy_strided)(ctx, bytes, g->ndim, g->shape, to, y->stride, xt_data(g), g->stride);
    return XT_OK;
}

static enum xt_status repeat_kv(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    int64_t group = l->attrs[0].i;
    /* As (B, S, Hkv, group, D), where x stands still along group. */
    int64_t shape[5] = {x->shape[0], x->shape[1], x->shape[2], group, x->shape[3]};
    int64_t from[5] = {x->stride[0], x->stride[1], x->stride[2], 0, x->stride[3]};
    int64_t to[5] = {y->stride[0], y->stride[1], group * x->shape[3], x->shape[3], 1};
    XT_CPU(copy_strided)(ctx, xt_dtype_bytes(x->dtype), 5, shape, xt_data(y), to, xt_data(x), from);
    return XT_OK;
}

/* y[h][d] = sum of g[h * group + i][d] for i = 0, 1, ... in f32 (f64 for f64), rounded once. */
static enum xt_status repeat_kv_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    enum { STRIP = 256 };
    const struct xt_tensor *g = l->in[0], *y = l->out[0];
    int64_t group = l->attrs[0].i, n = y->shape[3], numel = xt_numel(y);
    int64_t heads = n > 0 ? numel / n : 0;
    enum xt_dtype dtype = y->dtype;
    int64_t bytes = (int64_t)xt_dtype_bytes(dtype);
    const char *from = xt_data(g);
    char *to = xt_data(y);
#pragma omp parallel for num_threads(xt_threads(ctx))                                              \
    schedule(static) if (numel * group > XT_CPU_GRAIN)
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t d = 0; d < n; d += STRIP) {
            int64_t wide = n - d < STRIP ? n - d : STRIP;
            const char *row = from + (h * group * n + d) * bytes;
            char *out = to + (h * n + d) * bytes;
            if (dtype == XT_F64) {
                double *o = (double *)out;
                memcpy(o, row, (size_t)wide * sizeof *o);
                for (int64_t i = 1; i < group; i++)
                    for (int64_t j = 0; j < wide; j++) o[j] += ((const double *)row)[i * n + j];
                continue;
            }
            float sum[STRIP], next[STRIP];
            XT_CPU(load_f32)(row, dtype, wide, sum);
            for (int64_t i = 1; i < group; i++) {
                XT_CPU(load_f32)(row + i * n * bytes, dtype, wide, next);
                for (int64_t j = 0; j < wide; j++) sum[j] += next[j];
            }
            XT_CPU(store_f32)(sum, dtype, wide, out);
        }
    }
    return XT_OK;
}

/* ---- full, arange ---------------------------------------------------------------------------- */

/* y[o][i] = x[o][n - 1 - i]: rows of what stands behind dim, `outer` times n of them. */
static enum xt_status flip(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    int dim = (int)l->attrs[0].i;
    int64_t n = x->ndim ? x->shape[dim] : 1, inner = 1, total = xt_numel(x);
    if (!total) return XT_OK;
    for (int d = dim + 1; d < x->ndim; d++) inner *= x->shape[d];
    size_t bytes = (size_t)inner * xt_dtype_bytes(x->dtype);
    const char *from = xt_data(x);
    char *to = xt_data(l->out[0]);
    int64_t rows = total / inner;
    int threads = total > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        int64_t source = r / n * n + n - 1 - r % n;
        memcpy(to + (size_t)r * bytes, from + (size_t)source * bytes, bytes);
    }
    return XT_OK;
}

static enum xt_status full(struct xt_ctx *ctx, const struct xt_launch *l) {
    static const int64_t one[1] = {1}, none[1] = {0};
    const struct xt_tensor *y = l->out[0];
    double value = l->attrs[1].f;
    int64_t n = xt_numel(y);
    union {
        float f32;
        double f64;
        int32_t i32;
        int64_t i64;
        uint16_t half;
        uint8_t u8;
    } element;
    switch (y->dtype) {
    case XT_F32: element.f32 = (float)value; break;
    case XT_BF16: element.half = xt_f32_to_bf16((float)value); break;
    case XT_F16: element.half = xt_f32_to_f16((float)value); break;
    case XT_F64: element.f64 = value; break;
    case XT_I32: element.i32 = (int32_t)value; break;
    case XT_I64: element.i64 = (int64_t)value; break;
    default: element.u8 = (uint8_t)value; break;
    }
    XT_CPU(copy_strided)(ctx, xt_dtype_bytes(y->dtype), 1, &n, xt_data(y), one, &element, none);
    return XT_OK;
}

static enum xt_status arange(struct xt_ctx *ctx, const struct xt_launch *l) {
    (void)ctx;
    const struct xt_tensor *y = l->out[0];
    int64_t n = xt_numel(y);
    void *to = xt_data(y);
#define COUNT(type, convert)                                                                       \
    for (int64_t i = 0; i < n; i++) ((type *)to)[i] = convert;                                     \
    break
    switch (y->dtype) {
    case XT_F32: COUNT(float, (float)i);
    case XT_BF16: COUNT(uint16_t, xt_f32_to_bf16((float)i));
    case XT_F16: COUNT(uint16_t, xt_f32_to_f16((float)i));
    case XT_F64: COUNT(double, (double)i);
    case XT_I32: COUNT(int32_t, (int32_t)i);
    case XT_I64: COUNT(int64_t, i);
    default: COUNT(uint8_t, (uint8_t)i);
    }
#undef COUNT
    return XT_OK;
}

const struct xt_kernel XT_CPU(shape_kernels)[] = {
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
    {0},
};
