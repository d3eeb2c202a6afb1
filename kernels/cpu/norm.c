/*
 * norm.c: rmsnorm, layernorm and rope, row by row. The formulas are in norm_type.h, in f32 for f32,
 * bf16 and f16 and in f64 for f64.
 */
#include "../both.h"
#include "math.h"
#include "rows.h"

#include <string.h>

#include <omp.h>

/* Rows whose gains' gradients are summed together: at least so many, in at most so many parts. */
#define NORM_PART_ROWS 32
#define NORM_PARTS 64

/* No rows, or empty ones: outputs that are left, such as the gradient of a gain, are zero. */
static enum xt_status fill_nothing(const struct xt_launch *l) {
    for (int i = 0; i < l->n_out; i++)
        if (l->out[i] && xt_numel(l->out[i]) > 0)
            memset(xt_data(l->out[i]), 0, xt_nbytes(l->out[i]));
    return XT_OK;
}

#define T float
#define T_DTYPE XT_F32
#define F(name) name##_f32
#define POWER powf
#include "norm_type.h"
#undef T
#undef T_DTYPE
#undef F
#undef POWER

#define T double
#define T_DTYPE XT_F64
#define F(name) name##_f64
#define POWER pow
#include "norm_type.h"
#undef T
#undef T_DTYPE
#undef F
#undef POWER

static bool wide(const struct xt_launch *l) {
    return l->in[0]->dtype == XT_F64;
}

static enum xt_status rmsnorm(struct xt_ctx *ctx, const struct xt_launch *l) {
    return wide(l) ? norm_f64(ctx, l, false) : norm_f32(ctx, l, false);
}

static enum xt_status layernorm(struct xt_ctx *ctx, const struct xt_launch *l) {
    return wide(l) ? norm_f64(ctx, l, true) : norm_f32(ctx, l, true);
}

static enum xt_status rmsnorm_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    return wide(l) ? norm_grad_f64(ctx, l, false) : norm_grad_f32(ctx, l, false);
}

static enum xt_status layernorm_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    return wide(l) ? norm_grad_f64(ctx, l, true) : norm_grad_f32(ctx, l, true);
}

static enum xt_status rope(struct xt_ctx *ctx, const struct xt_launch *l) {
    return wide(l) ? rope_f64(ctx, l, 1) : rope_f32(ctx, l, 1);
}

static enum xt_status rope_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    return wide(l) ? rope_f64(ctx, l, -1) : rope_f32(ctx, l, -1);
}

const struct xt_kernel XT_CPU(norm_kernels)[] = {
    {"rmsnorm", XT_FLOATS, XT_INNER, rmsnorm},
    {"rmsnorm_grad", XT_FLOATS, XT_INNER, rmsnorm_grad},
    {"layernorm", XT_FLOATS, XT_INNER, layernorm},
    {"layernorm_grad", XT_FLOATS, XT_INNER, layernorm_grad},
    {"rope", XT_FLOATS, XT_INNER, rope},
    {"rope_grad", XT_FLOATS, XT_INNER, rope_grad},
    {0},
};
