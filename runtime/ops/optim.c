/*
 * optim.c: optimizer updates over all tensors of a group in one pass.
 *
 * Every update takes `norm`, the 0-dim norm of the raw accumulated gradients, and judges it itself:
 * when norm * grad_scale is not finite, nothing at all is written. The gradient that an update sees
 * is g * grad_scale * min(1, clip / (norm * grad_scale + 1e-6)),    without the min when clip is 0,
 * so that dividing by a token count and clipping cost no pass of their own. Lists repeat groups of
 * tensors; the compute copy at the end of each may be NULL and is otherwise written in the same
 * pass. Learning rate, step and divisor may be 0-dim tensors, as in a graph: lr_tensor is
 * multiplied by lr, step_tensor stands in the place of step, and divisor makes grad_scale its
 * reciprocal.
 */
#include "../op.h"

#include <math.h>

#define TEXT_BYTES 160
#define LIST 4 /* the input at which the list begins: after norm, lr, step and divisor */

static enum xt_status want_norm(struct xt_ctx *ctx, const struct xt_tensor *norm) {
    char text[TEXT_BYTES];
    if (norm->ndim == 0) return XT_OK;
    return xt_fail(ctx, XT_SHAPE, "norm is %s, wanted a scalar",
                   xt_describe(norm, text, sizeof text));
}

/* Learning rate, step and divisor as tensors stand in the place of the numbers. */
static enum xt_status want_scalars(struct xt_ctx *ctx, const struct xt_args *args) {
    static const char *const names[] = {"lr", "step", "divisor"};
    char text[TEXT_BYTES];
    for (int i = 0; i < 3; i++) {
        const struct xt_tensor *t = args->inputs[1 + i];
        bool whole = t && (t->dtype == XT_I64 || t->dtype == XT_I32);
        bool real = t && (t->dtype == XT_F32 || t->dtype == XT_F64);
        if (t && (t->ndim != 0 || !(whole || (real && i != 1))))
            return xt_fail(ctx, XT_ARGUMENT, "%s is %s, wanted a number or a 0-dim tensor%s",
                           names[i], xt_describe(t, text, sizeof text),
                           i == 1 ? " of integers" : "");
    }
    return XT_OK;
}

/*
 * Groups of `roles`: parameter, gradient, states, copy. `names` has a letter for each; states may
 * be NULL when `stateless`. Gradients have the parameter's dtype, states the arithmetic's: f64 for
 * f64, else f32.
 */
static enum xt_status want_groups(struct xt_ctx *ctx, const struct xt_args *args, int roles,
                                  const char *const *names, bool stateless) {
    char text[TEXT_BYTES], p_text[TEXT_BYTES];
    int n = args->n_inputs - LIST;
    if (n % roles != 0)
        return xt_fail(ctx, XT_ARGUMENT, "the list holds %d tensors, wanted groups of %d", n,
                       roles);
    for (int i = 0; i < n; i++) {
        int role = i % roles, group = i / roles + 1;
        const struct xt_tensor *t = args->inputs[LIST + i];
        const struct xt_tensor *p = args->inputs[LIST + i - role];
        bool copy = role == roles - 1, state = role >= 2 && !copy;
        if (!t) {
            if (copy || (state && stateless)) continue;
            return xt_fail(ctx, XT_ARGUMENT, "%s %d is missing", names[role], group);
        }
        if (!xt_dtype_is_float(t->dtype))
            return xt_fail(ctx, XT_DTYPE, "%s %d is %s, wanted a float dtype", names[role], group,
                           xt_describe(t, text, sizeof text));
        if (role == 0) continue;
        if (!xt_has_shape(t, p->shape, p->ndim))
            return xt_fail(ctx, XT_SHAPE, "%s %d is %s, its parameter is %s", names[role], group,
                           xt_describe(t, text, sizeof text),
                           xt_describe(p, p_text, sizeof p_text));
        enum xt_dtype wanted = state ? xt_arithmetic(p->dtype) : p->dtype;
        if (!copy && t->dtype != wanted)
            return xt_fail(ctx, XT_DTYPE, "%s %d is %s, wanted %s for a parameter of %s",
                           names[role], group, xt_dtype_name(t->dtype), xt_dtype_name(wanted),
                           xt_dtype_name(p->dtype));
    }
    return XT_OK;
}

static enum xt_status want_range(struct xt_ctx *ctx, const char *name, double value, double low,
                                 double high) {
    if (isfinite(value) && value >= low && value < high) return XT_OK;
    return xt_fail(ctx, XT_ARGUMENT, "%s is %g, wanted a number in [%g, %g)", name, value, low,
                   high);
}

/* ---- norm and scaling ------------------------------------------------------------------------ */

static enum xt_status grad_norm_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    char text[TEXT_BYTES];
    for (int i = 0; i < args->n_inputs; i++)
        if (!xt_dtype_is_float(args->inputs[i]->dtype))
            return xt_fail(ctx, XT_DTYPE, "gradient %d is %s, wanted a float dtype", i + 1,
                           xt_describe(args->inputs[i], text, sizeof text));
    outputs[0].spec = (struct xt_spec){
        .dtype = xt_arithmetic(args->inputs[0]->dtype),
    };
    return XT_OK;
}

static const struct xt_param grad_norm_params[] = {
    {.name = "grads", .kind = XT_P_TENSORS},
    {0},
};

static const struct xt_op xt_op_grad_norm = {
    .name = "grad_norm",
    .doc = "the square root of the sum of the squares of all elements of all tensors, summed in "
           "f64; f32, or f64 when the first tensor is",
    .params = grad_norm_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = grad_norm_infer,
};

static enum xt_status scale_list_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                       const struct xt_args *args, struct xt_output *outputs) {
    (void)op, (void)outputs;
    XT_TRY(want_norm(ctx, args->inputs[0]));
    XT_TRY(want_range(ctx, "max", args->attrs[0].f, 0, INFINITY));
    for (int i = 1; i < args->n_inputs; i++)
        if (args->inputs[i] && !xt_dtype_is_float(args->inputs[i]->dtype))
            return xt_fail(ctx, XT_DTYPE, "gradient %d is %s, wanted a float dtype", i,
                           xt_dtype_name(args->inputs[i]->dtype));
    return XT_OK;
}

static const struct xt_param scale_list_params[] = {
    {.name = "norm", .kind = XT_P_TENSOR},
    {.name = "grads", .kind = XT_P_TENSORS},
    {.name = "max", .kind = XT_P_REAL},
    {0},
};

static const struct xt_op xt_op_scale_list_ = {
    .name = "scale_list_",
    .doc =
        "multiplies every tensor by min(1, max / (norm + 1e-6)); nothing when norm is not finite",
    .params = scale_list_params,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_F64),
    .write_group = 1,
    .write_group_mask = 1,
    .infer = scale_list_infer,
};

/* ---- adamw ----------------------------------------------------------------------------------- */

static enum xt_status adamw_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                  const struct xt_args *args, struct xt_output *outputs) {
    static const char *const names[] = {"parameter", "gradient", "m", "v", "copy"};
    (void)op, (void)outputs;
    const union xt_attr *a = args->attrs;
    XT_TRY(want_norm(ctx, args->inputs[0]));
    XT_TRY(want_scalars(ctx, args));
    XT_TRY(want_range(ctx, "lr", a[0].f, -INFINITY, INFINITY));
    XT_TRY(want_range(ctx, "beta1", a[1].f, 0, 1));
    XT_TRY(want_range(ctx, "beta2", a[2].f, 0, 1));
    XT_TRY(want_range(ctx, "eps", a[3].f, 0, INFINITY));
    XT_TRY(want_range(ctx, "weight_decay", a[4].f, 0, INFINITY));
    XT_TRY(want_range(ctx, "clip", a[7].f, 0, INFINITY));
    if (a[5].i < 1)
        return xt_fail(ctx, XT_ARGUMENT, "step is %lld, steps count from 1", (long long)a[5].i);
    return want_groups(ctx, args, 5, names, false);
}

static const struct xt_param adamw_params[] = {
    {.name = "norm", .kind = XT_P_TENSOR},
    {.name = "lr_tensor", .kind = XT_P_TENSOR, .optional = true, .named = true},
    {.name = "step_tensor", .kind = XT_P_TENSOR, .optional = true, .named = true},
    {.name = "divisor", .kind = XT_P_TENSOR, .optional = true, .named = true},
    {.name = "params", .kind = XT_P_TENSORS},
    {.name = "lr", .kind = XT_P_REAL},
    {.name = "beta1", .kind = XT_P_REAL, .optional = true, .fallback = 0.9},
    {.name = "beta2", .kind = XT_P_REAL, .optional = true, .fallback = 0.999},
    {.name = "eps", .kind = XT_P_REAL, .optional = true, .fallback = 1e-8},
    {.name = "weight_decay", .kind = XT_P_REAL, .optional = true},
    {.name = "step", .kind = XT_P_INT, .optional = true, .fallback = 1},
    {.name = "grad_scale", .kind = XT_P_REAL, .optional = true, .fallback = 1},
    {.name = "clip", .kind = XT_P_REAL, .optional = true},
    {0},
};

static const struct xt_op xt_op_adamw = {
    .name = "adamw",
    .doc = "one step of AdamW (Loshchilov and Hutter, 2019), as torch.optim.AdamW takes it, over "
           "groups parameter, gradient, m, v, copy (or NULL)",
    .params = adamw_params,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_F64),
    .write_group = 5,
    .write_group_mask = 1u << 0 | 1u << 2 | 1u << 3 | 1u << 4,
    .infer = adamw_infer,
};

/* ---- sgd ------------------------------------------------------------------------------------- */

static enum xt_status sgd_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                const struct xt_args *args, struct xt_output *outputs) {
    static const char *const names[] = {"parameter", "gradient", "momentum buffer", "copy"};
    (void)op, (void)outputs;
    const union xt_attr *a = args->attrs;
    XT_TRY(want_norm(ctx, args->inputs[0]));
    XT_TRY(want_scalars(ctx, args));
    XT_TRY(want_range(ctx, "lr", a[0].f, -INFINITY, INFINITY));
    XT_TRY(want_range(ctx, "momentum", a[1].f, 0, INFINITY));
    XT_TRY(want_range(ctx, "weight_decay", a[4].f, 0, INFINITY));
    XT_TRY(want_range(ctx, "clip", a[7].f, 0, INFINITY));
    if (a[5].i < 1)
        return xt_fail(ctx, XT_ARGUMENT, "step is %lld, steps count from 1", (long long)a[5].i);
    if (a[3].i && (a[1].f == 0 || a[2].f != 0))
        return xt_fail(ctx, XT_ARGUMENT, "nesterov wants a momentum and no dampening");
    return want_groups(ctx, args, 4, names, a[1].f == 0);
}

static const struct xt_param sgd_params[] = {
    {.name = "norm", .kind = XT_P_TENSOR},
    {.name = "lr_tensor", .kind = XT_P_TENSOR, .optional = true, .named = true},
    {.name = "step_tensor", .kind = XT_P_TENSOR, .optional = true, .named = true},
    {.name = "divisor", .kind = XT_P_TENSOR, .optional = true, .named = true},
    {.name = "params", .kind = XT_P_TENSORS},
    {.name = "lr", .kind = XT_P_REAL},
    {.name = "momentum", .kind = XT_P_REAL, .optional = true},
    {.name = "dampening", .kind = XT_P_REAL, .optional = true},
    {.name = "nesterov", .kind = XT_P_BOOL, .optional = true},
    {.name = "weight_decay", .kind = XT_P_REAL, .optional = true},
    {.name = "step", .kind = XT_P_INT, .optional = true, .fallback = 1},
    {.name = "grad_scale", .kind = XT_P_REAL, .optional = true, .fallback = 1},
    {.name = "clip", .kind = XT_P_REAL, .optional = true},
    {0},
};

static const struct xt_op xt_op_sgd = {
    .name = "sgd",
    .doc = "one step of gradient descent with momentum, as torch.optim.SGD takes it, over groups "
           "parameter, gradient, momentum buffer (NULL without momentum), copy (or NULL)",
    .params = sgd_params,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_F64),
    .write_group = 4,
    .write_group_mask = 1u << 0 | 1u << 2 | 1u << 3,
    .infer = sgd_infer,
};

xt_op_list xt_ops_optim = {
    &xt_op_grad_norm, &xt_op_scale_list_, &xt_op_adamw, &xt_op_sgd, NULL,
};
