/*
 * loss.c: cross entropy, row by row. The formulas are in loss_type.h, in f32 for f32, bf16 and f16
 * and in f64 for f64. Labels are checked before anything is written.
 */
#include "gemm.h"
#include "math.h"
#include "rows.h"

#include <stdio.h>
#include <string.h>

#include <omp.h>

#define LOSS_BLOCK 2048 /* elements summed together */
/* Rows of logits that linear_cross_entropy holds at a time: they stay in the last-level cache, and
   the products they feed are deep enough. Half as many when there are more than LINEAR_WIDE
   classes. */
#define LINEAR_ROWS 256
#define LINEAR_WIDE 16384

enum reduction { MEAN, SUM, NONE };

struct options {
    enum reduction reduction;
    int64_t ignore;   /* the label of rows that count nowhere */
    double smoothing; /* the share of the target spread over all classes */
};

static struct options options_of(const union xt_attr *attrs) {
    return (struct options){(enum reduction)attrs[0].i, attrs[1].i, attrs[2].f};
}

/* What a sum of losses is divided by; of nothing, the mean is to be 0. */
static double divisor(const struct options *o, int64_t valid) {
    return o->reduction == MEAN && valid > 0 ? (double)valid : 1;
}

/* Where element i, counted in row-major order, lies, in elements. */
static int64_t element_at(const struct xt_tensor *t, int64_t i) {
    int64_t at = 0;
    for (int d = t->ndim - 1; d > 0; d--) {
        at += i % t->shape[d] * t->stride[d];
        i /= t->shape[d];
    }
    return t->ndim ? at + i * t->stride[0] : 0;
}

static int64_t label_at(const struct xt_tensor *labels, int64_t i) {
    int64_t at = element_at(labels, i);
    return labels->dtype == XT_I32 ? ((const int32_t *)xt_data(labels))[at]
                                   : ((const int64_t *)xt_data(labels))[at];
}

/* "[2][5]": the place of element i, counted from 1. */
static void place_text(const struct xt_tensor *t, int64_t i, char *out, size_t bytes) {
    int64_t index[XT_MAX_DIMS];
    size_t used = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
        index[d] = i % t->shape[d];
        i /= t->shape[d];
    }
    out[0] = 0;
    for (int d = 0; d < t->ndim && used < bytes; d++)
        used += (size_t)snprintf(out + used, bytes - used, "[%lld]", (long long)index[d] + 1);
}

static enum xt_status check_labels(struct xt_ctx *ctx, const struct xt_tensor *labels,
                                   int64_t classes, int64_t ignore, int64_t *valid) {
    const int64_t n = xt_numel(labels);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t label = label_at(labels, i);
        if (label == ignore) continue;
        count++;
        if (label >= 0 && label < classes) continue;
        char place[160];
        place_text(labels, i, place, sizeof place);
        return xt_fail(ctx, XT_VALUE,
                       "labels%s is %lld, there are %lld classes (0 to %lld) and the ignored label "
                       "is %lld",
                       place, (long long)label, (long long)classes, (long long)classes - 1,
                       (long long)ignore);
    }
    *valid = count;
    return XT_OK;
}

#define T float
#define T_DTYPE XT_F32
#define F(name) name##_f32
#include "loss_type.h"
#undef T
#undef T_DTYPE
#undef F

#define T double
#define T_DTYPE XT_F64
#define F(name) name##_f64
#include "loss_type.h"
#undef T
#undef T_DTYPE
#undef F

/* Each by the dtype of input 0. */
#define EITHER(name)                                                                               \
    static enum xt_status name(struct xt_ctx *ctx, const struct xt_launch *l) {                    \
        return l->in[0]->dtype == XT_F64 ? name##_f64(ctx, l) : name##_f32(ctx, l);                \
    }
EITHER(cross_entropy)
EITHER(cross_entropy_grad)
EITHER(linear_cross_entropy)
EITHER(linear_cross_entropy_grad)
EITHER(scaled)
EITHER(write_scaled)

static enum xt_status count_valid(struct xt_ctx *ctx, const struct xt_launch *l) {
    (void)ctx;
    const int64_t n = xt_numel(l->in[0]), ignore = l->attrs[0].i;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += label_at(l->in[0], i) != ignore;
    *(int64_t *)xt_data(l->out[0]) = count;
    return XT_OK;
}

#define XT_PRODUCTS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

const struct xt_kernel XT_CPU(loss_kernels)[] = {
    {"cross_entropy", XT_FLOATS, XT_INNER, cross_entropy},
    {"cross_entropy_grad", XT_FLOATS, XT_INNER, cross_entropy_grad},
    {"linear_cross_entropy", XT_PRODUCTS, XT_CONTIGUOUS, linear_cross_entropy},
    {"linear_cross_entropy_grad", XT_PRODUCTS, XT_CONTIGUOUS, linear_cross_entropy_grad},
    {"scaled", XT_FLOATS, XT_CONTIGUOUS, scaled},
    {"write_scaled_", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, write_scaled},
    {"count_valid", XT_BIT(XT_I32) | XT_BIT(XT_I64), XT_STRIDED, count_valid},
    {0},
};
