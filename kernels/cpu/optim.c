/*
 * optim.c: updates of many tensors as one loop over blocks. Traffic is all there is to them: adamw
 * reads p, g, m, v and writes p, m, v and the copy, each once.
 *
 * Blocks of all tensors are numbered through, each thread takes an equal run of them. Updates are
 * element by element, and the norm adds its blocks' sums in order, so threads never show in the
 * bits.
 */
#include "../update.h"
#include "cpu.h"

#include <math.h>
#include <string.h>

#include <omp.h>

#define OPTIM_BLOCK 1024 /* elements */

/* What one launch does to every block. */
struct update {
    const union xt_attr *attrs;
    int roles;               /* tensors of a group */
    double scale;            /* of gradients */
    double unbias1, unbias2; /* adamw: 1 - beta^step */
};

static void *element(const struct xt_tensor *t, int64_t at) {
    return (char *)xt_data(t) + (size_t)at * xt_dtype_bytes(t->dtype);
}

#define T float
#define T_DTYPE XT_F32
#define F(name) name##_f32
#define SHARED(name) xt_##name##_f32
#include "optim_type.h"
#undef T
#undef T_DTYPE
#undef F
#undef SHARED

#define T double
#define T_DTYPE XT_F64
#define F(name) name##_f64
#define SHARED(name) xt_##name##_f64
#include "optim_type.h"
#undef T
#undef T_DTYPE
#undef F
#undef SHARED

static void update_block(const struct update *u, struct xt_tensor *const *group, int64_t at,
                         int64_t n, double *sum) {
    (void)sum;
    if (group[0]->dtype == XT_F64)
        update_block_f64(u, group, at, n);
    else
        update_block_f32(u, group, at, n);
}

static void scale_block(const struct update *u, struct xt_tensor *const *group, int64_t at,
                        int64_t n, double *sum) {
    (void)sum;
    if (group[0]->dtype == XT_F64)
        scale_block_f64(u, group[0], at, n);
    else
        scale_block_f32(u, group[0], at, n);
}

static void square_block(const struct update *u, struct xt_tensor *const *group, int64_t at,
                         int64_t n, double *sum) {
    (void)u;
    *sum = group[0]->dtype == XT_F64 ? squares_f64(group[0], at, n) : squares_f32(group[0], at, n);
}

typedef void block_fn(const struct update *u, struct xt_tensor *const *group, int64_t at, int64_t n,
                      double *sum);

static int64_t block_count(const struct xt_tensor *t) {
    return t ? (xt_numel(t) + OPTIM_BLOCK - 1) / OPTIM_BLOCK : 0;
}

static int64_t count_blocks(struct xt_tensor *const *list, int n, int roles) {
    int64_t count = 0;
    for (int i = 0; i < n; i += roles) count += block_count(list[i]);
    return count;
}

/* Blocks first..end of the list's; sums, when not NULL, has one place for every block. */
static void run_blocks(const struct update *u, struct xt_tensor *const *list, int n, int64_t first,
                       int64_t end, block_fn *fn, double *sums) {
    int64_t number = 0;
    for (int i = 0; i < n && number < end; i += u->roles) {
        int64_t count = block_count(list[i]), numel = count ? xt_numel(list[i]) : 0;
        int64_t from = first > number ? first - number : 0;
        int64_t to = end - number < count ? end - number : count;
        for (int64_t b = from; b < to; b++) {
            int64_t at = b * OPTIM_BLOCK, left = numel - at;
            fn(u, list + i, at, left < OPTIM_BLOCK ? left : OPTIM_BLOCK,
               sums ? sums + number + b : NULL);
        }
        number += count;
    }
}

static void all_blocks(struct xt_ctx *ctx, const struct update *u, struct xt_tensor *const *list,
                       int n, int64_t count, block_fn *fn, double *sums) {
    const int threads = count * OPTIM_BLOCK > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
        run_blocks(u, list, n, count * t / all, count * (t + 1) / all, fn, sums);
    }
}

static double scalar(const struct xt_tensor *t) {
    return t->dtype == XT_F64 ? *(const double *)xt_data(t) : (double)*(const float *)xt_data(t);
}

/* Where the list of the fused updates begins: after norm, lr, step and divisor. */
#define LIST 4

static double number(const struct xt_tensor *t) {
    switch (t->dtype) {
    case XT_I64: return (double)*(const int64_t *)xt_data(t);
    case XT_I32: return (double)*(const int32_t *)xt_data(t);
    default: return scalar(t);
    }
}

static enum xt_status update(struct xt_ctx *ctx, const struct xt_launch *l, int roles) {
    union xt_attr attrs[8];
    memcpy(attrs, l->attrs, sizeof attrs);
    if (l->in[1]) attrs[0].f *= number(l->in[1]);
    if (l->in[2]) attrs[5].i = (int64_t)number(l->in[2]);
    if (l->in[3]) attrs[6].f = 1 / number(l->in[3]);
    const double norm = scalar(l->in[0]), scale = attrs[6].f, clip = attrs[7].f;
    if (!isfinite(attrs[0].f))
        return xt_fail(ctx, XT_VALUE, "lr is %g, wanted a finite number", attrs[0].f);
    if (attrs[5].i < 1)
        return xt_fail(ctx, XT_VALUE, "step is %lld, steps count from 1", (long long)attrs[5].i);
    if (!isfinite(norm * scale)) return XT_OK;
    struct update u = {
        .attrs = attrs,
        .roles = roles,
        .scale = scale * (clip > 0 ? xt_clipping(norm * scale, clip) : 1),
    };
    if (roles == 5) {
        u.unbias1 = 1 - xt_power(attrs[1].f, attrs[5].i);
        u.unbias2 = 1 - xt_power(attrs[2].f, attrs[5].i);
    }
    all_blocks(ctx, &u, l->in + LIST, l->n_in - LIST,
               count_blocks(l->in + LIST, l->n_in - LIST, roles), update_block, NULL);
    return XT_OK;
}

static enum xt_status adamw(struct xt_ctx *ctx, const struct xt_launch *l) {
    return update(ctx, l, 5);
}

static enum xt_status sgd(struct xt_ctx *ctx, const struct xt_launch *l) {
    return update(ctx, l, 4);
}

static enum xt_status scale_list(struct xt_ctx *ctx, const struct xt_launch *l) {
    const double norm = scalar(l->in[0]);
    const struct update u = {.roles = 1, .scale = xt_clipping(norm, l->attrs[0].f)};
    if (!isfinite(norm) || u.scale == 1) return XT_OK;
    all_blocks(ctx, &u, l->in + 1, l->n_in - 1, count_blocks(l->in + 1, l->n_in - 1, 1),
               scale_block, NULL);
    return XT_OK;
}

static enum xt_status grad_norm(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct update u = {.roles = 1};
    const int64_t count = count_blocks(l->in, l->n_in, 1);
    const size_t bytes = (size_t)count * sizeof(double);
    double *sums = NULL, sum = 0;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&sums));
    all_blocks(ctx, &u, l->in, l->n_in, count, square_block, sums);
    for (int64_t b = 0; b < count; b++) sum += sums[b];
    xt_scratch_put(ctx, XT_CPU, sums, bytes);
    if (l->out[0]->dtype == XT_F64)
        *(double *)xt_data(l->out[0]) = sqrt(sum);
    else
        *(float *)xt_data(l->out[0]) = (float)sqrt(sum);
    return XT_OK;
}

const struct xt_kernel XT_CPU(optim_kernels)[] = {
    {"grad_norm", XT_FLOATS, XT_CONTIGUOUS, grad_norm},
    {"scale_list_", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, scale_list},
    {"adamw", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, adamw},
    {"sgd", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, sgd},
    {0},
};
