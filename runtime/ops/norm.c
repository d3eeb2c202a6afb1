/*
 * norm.c: rmsnorm, layernorm, rope, and rope of rmsnorm in one. Each backward is one fused internal
 * op, NAME_grad, beside it.
 *
 * The gain may be f32 under a bf16 or f16 x: everything is computed in f32 and rounded where the
 * doc line says so. Gradients of gain and bias leave the kernels in the type of the arithmetic.
 */
#include "../op.h"

#include <string.h>

#define TEXT_BYTES 160

/* ---- what rmsnorm and layernorm share -------------------------------------------------------- */

static enum xt_status want_row(struct xt_ctx *ctx, const struct xt_tensor *x) {
    if (x->ndim > 0) return XT_OK;
    return xt_fail(ctx, XT_SHAPE, "x is a scalar, wanted 1 dimension or more");
}

/* A gain or bias: (D), of x's dtype or of the arithmetic's. */
static enum xt_status want_gain(struct xt_ctx *ctx, const char *name, const struct xt_tensor *gain,
                                const struct xt_tensor *x) {
    char gain_text[TEXT_BYTES], x_text[TEXT_BYTES];
    if (!gain) return XT_OK;
    if (gain->ndim != 1 || gain->shape[0] != x->shape[x->ndim - 1])
        return xt_fail(ctx, XT_SHAPE,
                       "%s is %s, wanted one number for each of the last dimension "
                       "of x, which is %s",
                       name, xt_describe(gain, gain_text, sizeof gain_text),
                       xt_describe(x, x_text, sizeof x_text));
    if (gain->dtype != x->dtype && gain->dtype != xt_arithmetic(x->dtype))
        return xt_fail(ctx, XT_DTYPE, "%s is %s, wanted %s or %s for an x of %s", name,
                       xt_dtype_name(gain->dtype), xt_dtype_name(x->dtype),
                       xt_dtype_name(xt_arithmetic(x->dtype)), xt_dtype_name(x->dtype));
    return XT_OK;
}

/* One number a row, in the type of the arithmetic. */
static void row_spec(const struct xt_tensor *x, struct xt_spec *out) {
    xt_spec_of(x, out);
    out->dtype = xt_arithmetic(x->dtype);
    out->ndim--;
}

/* The gradient of a gain: (D), or nothing when nobody wants it. */
static void gain_spec(const struct xt_tensor *x, bool wanted, struct xt_spec *out) {
    *out = (struct xt_spec){.dtype = xt_arithmetic(x->dtype), .ndim = 1};
    out->shape[0] = wanted ? x->shape[x->ndim - 1] : 0;
}

/* Gives input i the gradient `grad`, in the input's dtype. */
static enum xt_status answer(struct xt_ctx *ctx, struct xt_grads *g, int i,
                             struct xt_tensor *grad) {
    if (!g->wants[i]) return XT_OK;
    return xt_cast(ctx, grad, g->in_spec[i].dtype, &g->grad_in[i]);
}

/* ---- rmsnorm --------------------------------------------------------------------------------- */

static enum xt_status rmsnorm_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                    const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    const struct xt_tensor *x = args->inputs[0];
    XT_TRY(want_row(ctx, x));
    XT_TRY(want_gain(ctx, "weight", args->inputs[1], x));
    xt_output_like(&outputs[0], x);
    row_spec(x, &outputs[1].spec);
    return XT_OK;
}

static const struct xt_param rmsnorm_grad_params[] = {
    {.name = "grad", .kind = XT_P_TENSOR},   {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR}, {.name = "rstd", .kind = XT_P_TENSOR},
    {.name = "gain", .kind = XT_P_BOOL},     {0},
};

static enum xt_status rmsnorm_grad_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                         const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    xt_output_like(&outputs[0], args->inputs[1]);
    gain_spec(args->inputs[1], args->attrs[0].i, &outputs[1].spec);
    return XT_OK;
}

static const struct xt_op xt_op_rmsnorm_grad = {
    .name = "rmsnorm_grad",
    .doc = "the gradients of x and, with gain, of weight; weight's is f32 (f64)",
    .params = rmsnorm_grad_params,
    .n_outputs = 2,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = rmsnorm_grad_infer,
};

static const struct xt_param rmsnorm_sum_params[] = {
    {.name = "grad", .kind = XT_P_TENSOR},
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR},
    {.name = "rstd", .kind = XT_P_TENSOR},
    {.name = "onto", .kind = XT_P_TENSOR, .optional = true},
    {.name = "second", .kind = XT_P_TENSOR, .optional = true},
    {.name = "third", .kind = XT_P_TENSOR, .optional = true},
    {.name = "gain", .kind = XT_P_BOOL},
    {0},
};

/* A norm is read by several projections, and what comes before it also passes it by: both its
   gradients are mostly sums. */
static const struct xt_op xt_op_rmsnorm_grad_sum = {
    .name = "rmsnorm_grad_sum",
    .doc =
        "rmsnorm_grad of grad + second + third, rounded once; onto is added to the gradient of x",
    .params = rmsnorm_sum_params,
    .n_outputs = 2,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = rmsnorm_grad_infer,
};

static enum xt_status rmsnorm_back(struct xt_ctx *ctx, struct xt_grads *g) {
    enum { ONTO = 4, ALL = ONTO + 1 + XT_APART };
    struct xt_tensor *in[ALL] = {g->grad_out[0], g->in[0], g->in[1], g->out[1]};
    struct xt_tensor *out[2] = {NULL};
    const struct xt_op *op = &xt_op_rmsnorm_grad;
    struct xt_args args;
    enum xt_status status = XT_OK;
    if (xt_op_has_kernel(ctx, &xt_op_rmsnorm_grad_sum, in[1]->storage->device, in[1]->dtype))
        XT_GO(xt_grads_take(ctx, g, 0, &in[ONTO]));
    for (int k = 0; k < XT_APART; k++) in[ONTO + 1 + k] = g->more[k];
    if (in[ONTO] || g->more[0]) op = &xt_op_rmsnorm_grad_sum;
    xt_args_init(&args, op, in, op == &xt_op_rmsnorm_grad ? ONTO : ALL);
    args.attrs[0].i = g->wants[1];
    XT_GO(xt_call_run(ctx, op, &args, out));
    XT_GO(answer(ctx, g, 0, out[0]));
    XT_GO(answer(ctx, g, 1, out[1]));
    if (in[ONTO] && xt_observed(ctx)) {
        struct xt_tensor *own[2];
        xt_args_init(&args, &xt_op_rmsnorm_grad, in, ONTO);
        args.attrs[0].i = g->wants[1]; /* as where nothing is taken: devices' calls pair */
        XT_GO(xt_call_run(ctx, &xt_op_rmsnorm_grad, &args, own));
        xt_tensor_release(ctx, own[1]);
        xt_grads_share(ctx, 0, own[0]);
    }
done:
    xt_tensor_release(ctx, in[ONTO]);
    for (int i = 0; i < 2; i++) xt_tensor_release(ctx, out[i]);
    return status;
}

static const struct xt_param rmsnorm_params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR},
    {.name = "eps", .kind = XT_P_REAL, .optional = true, .fallback = 1e-6},
    {0},
};

static const struct xt_op xt_op_rmsnorm = {
    .name = "rmsnorm",
    .doc = "x / sqrt(mean(x^2) + eps) * weight over the last dimension: x (..., D), weight (D) in "
           "x's dtype or f32; the quotient is rounded to x's dtype before the product",
    .params = rmsnorm_params,
    .n_outputs = 2,
    .n_hidden = 1, /* 1/sqrt(mean(x^2) + eps), one a row */
    .dtypes = XT_FLOATS,
    .keeps_in = 3,
    .keeps_out = 2,
    .infer = rmsnorm_infer,
    .backward = rmsnorm_back,
    .several = &xt_op_rmsnorm_grad_sum,
};

/* ---- layernorm ------------------------------------------------------------------------------- */

static enum xt_status layernorm_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    const struct xt_tensor *x = args->inputs[0];
    XT_TRY(want_row(ctx, x));
    XT_TRY(want_gain(ctx, "weight", args->inputs[1], x));
    XT_TRY(want_gain(ctx, "bias", args->inputs[2], x));
    xt_output_like(&outputs[0], x);
    row_spec(x, &outputs[1].spec);
    row_spec(x, &outputs[2].spec);
    return XT_OK;
}

static const struct xt_param layernorm_grad_params[] = {
    {.name = "grad", .kind = XT_P_TENSOR},
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR, .optional = true},
    {.name = "mean", .kind = XT_P_TENSOR},
    {.name = "rstd", .kind = XT_P_TENSOR},
    {.name = "gain", .kind = XT_P_BOOL},
    {0},
};

static enum xt_status layernorm_grad_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                           const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    xt_output_like(&outputs[0], args->inputs[1]);
    gain_spec(args->inputs[1], args->attrs[0].i, &outputs[1].spec);
    outputs[2].spec = outputs[1].spec;
    return XT_OK;
}

static const struct xt_op xt_op_layernorm_grad = {
    .name = "layernorm_grad",
    .doc = "the gradients of x and, with gain, of weight and bias; theirs are f32 (f64)",
    .params = layernorm_grad_params,
    .n_outputs = 3,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = layernorm_grad_infer,
};

static enum xt_status layernorm_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *in[] = {g->grad_out[0], g->in[0], g->in[1], g->out[1], g->out[2]}, *out[3];
    struct xt_args args;
    xt_args_init(&args, &xt_op_layernorm_grad, in, 5);
    args.attrs[0].i = g->wants[1] || g->wants[2];
    XT_TRY(xt_call_run(ctx, &xt_op_layernorm_grad, &args, out));
    enum xt_status status = XT_OK;
    for (int i = 0; i < 3; i++) XT_GO(answer(ctx, g, i, out[i]));
done:
    for (int i = 0; i < 3; i++) xt_tensor_release(ctx, out[i]);
    return status;
}

static const struct xt_param layernorm_params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR, .optional = true},
    {.name = "bias", .kind = XT_P_TENSOR, .optional = true},
    {.name = "eps", .kind = XT_P_REAL, .optional = true, .fallback = 1e-5},
    {0},
};

static const struct xt_op xt_op_layernorm = {
    .name = "layernorm",
    .doc = "(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension: x (..., D), "
           "weight and bias (D) in x's dtype or f32, each optional; rounded once",
    .params = layernorm_params,
    .n_outputs = 3,
    .n_hidden = 2, /* mean and 1/sqrt(variance + eps), one a row */
    .dtypes = XT_FLOATS,
    .keeps_in = 3,
    .keeps_out = 6,
    .infer = layernorm_infer,
    .backward = layernorm_back,
};

/* ---- rope ------------------------------------------------------------------------------------ */

/* What a rotation takes besides x: three attributes, ROPE_ATTRS, and one input. */
/* clang-format off */
#define ROPE_PARAMS                                                                                \
    {.name = "theta", .kind = XT_P_REAL, .optional = true, .named = true, .fallback = 10000},      \
    {.name = "layout", .kind = XT_P_CHOICE, .optional = true, .named = true,                       \
     .choices = "half|interleaved"},                                                               \
    {.name = "offset", .kind = XT_P_INT, .optional = true, .named = true},                         \
    {.name = "positions", .kind = XT_P_TENSOR, .optional = true, .named = true}
/* clang-format on */
#define ROPE_ATTRS 3

static const struct xt_param rope_params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    ROPE_PARAMS,
    {0},
};

/* x and positions (may be NULL), and theta: the first of the attributes of a rotation. */
static enum xt_status want_heads(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_tensor *x, const struct xt_tensor *p,
                                 double theta) {
    char text[TEXT_BYTES], x_text[TEXT_BYTES];
    XT_TRY(xt_want_ndim(ctx, op, "x", x, 4));
    if (x->shape[3] % 2 != 0)
        return xt_fail(ctx, XT_SHAPE, "x is %s, wanted an even last dimension: pairs are turned",
                       xt_describe(x, text, sizeof text));
    if (!(theta > 0)) return xt_fail(ctx, XT_ARGUMENT, "theta is %g, wanted more than 0", theta);
    if (!p) return XT_OK;
    if (p->dtype != XT_I32 && p->dtype != XT_I64)
        return xt_fail(ctx, XT_DTYPE, "positions is %s, wanted i32 or i64",
                       xt_describe(p, text, sizeof text));
    bool fits = p->ndim == 1
                    ? p->shape[0] == x->shape[1]
                    : p->ndim == 2 && p->shape[0] == x->shape[0] && p->shape[1] == x->shape[1];
    if (!fits)
        return xt_fail(ctx, XT_SHAPE,
                       "positions is %s, wanted (S) or (B, S) for x (B, S, H, D), "
                       "which is %s",
                       xt_describe(p, text, sizeof text), xt_describe(x, x_text, sizeof x_text));
    return XT_OK;
}

static enum xt_status rope_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    XT_TRY(want_heads(ctx, op, args->inputs[0], args->inputs[1], args->attrs[0].f));
    xt_output_like(&outputs[0], args->inputs[0]);
    return XT_OK;
}

static const struct xt_op xt_op_rope_grad = {
    .name = "rope_grad",
    .doc = "rope by the negative angles",
    .params = rope_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = rope_infer,
};

static enum xt_status rope_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *in[] = {g->grad_out[0], g->in[1]};
    struct xt_args args;
    xt_args_init(&args, &xt_op_rope_grad, in, 2);
    memcpy(args.attrs, xt_call_attrs(g->call), ROPE_ATTRS * sizeof *args.attrs);
    return xt_call_run(ctx, &xt_op_rope_grad, &args, &g->grad_in[0]);
}

static const struct xt_op xt_op_rope = {
    .name = "rope",
    .doc = "turns pair i of each head by (offset + s) / theta^(2i/D), or positions[s] in place of "
           "offset + s: x (B, S, H, D); a pair is (x[i], x[i + D/2]) or, interleaved, "
           "(x[2i], x[2i + 1]); positions (S) or (B, S); angles in f32",
    .params = rope_params,
    .n_outputs = 1,
    .dtypes = XT_FLOATS,
    .keeps_in = 2,
    .infer = rope_infer,
    .backward = rope_back,
};

/* ---- rope of rmsnorm ------------------------------------------------------------------------- */

#define FUSED_HEAD 512 /* elements of the longest row that a fused kernel takes */

/* Whether a fused kernel takes x: it counts rows in 32 bits. */
static bool takes_fused(const struct xt_ctx *ctx, const struct xt_op *op,
                        const struct xt_tensor *x) {
    return x->shape[3] <= FUSED_HEAD && x->shape[0] * x->shape[1] * x->shape[2] <= INT32_MAX &&
           xt_op_has_kernel(ctx, op, x->storage->device, x->dtype);
}

static enum xt_status want_normed_heads(struct xt_ctx *ctx, const struct xt_op *op,
                                        const struct xt_args *args) {
    XT_TRY(want_heads(ctx, op, args->inputs[0], args->inputs[2], args->attrs[1].f));
    return want_gain(ctx, "weight", args->inputs[1], args->inputs[0]);
}

static enum xt_status rmsnorm_rope_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                         const struct xt_args *args, struct xt_output *outputs) {
    XT_TRY(want_normed_heads(ctx, op, args));
    xt_output_like(&outputs[0], args->inputs[0]);
    row_spec(args->inputs[0], &outputs[1].spec);
    return XT_OK;
}

static const struct xt_param rmsnorm_rope_grad_params[] = {
    {.name = "grad", .kind = XT_P_TENSOR},
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR},
    {.name = "rstd", .kind = XT_P_TENSOR},
    {.name = "gain", .kind = XT_P_BOOL},
    ROPE_PARAMS,
    {0},
};

static const struct xt_op xt_op_rmsnorm_rope_grad = {
    .name = "rmsnorm_rope_grad",
    .doc = "the gradients of x and, with gain, of weight; weight's is f32 (f64)",
    .params = rmsnorm_rope_grad_params,
    .n_outputs = 2,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = rmsnorm_grad_infer,
};

static enum xt_status rmsnorm_rope_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *in[] = {g->grad_out[0], g->in[0], g->in[1], g->out[1], g->in[2]}, *out[2];
    struct xt_args args;
    xt_args_init(&args, &xt_op_rmsnorm_rope_grad, in, 5);
    args.attrs[0].i = g->wants[1];
    memcpy(args.attrs + 1, xt_call_attrs(g->call) + 1, ROPE_ATTRS * sizeof *args.attrs);
    XT_TRY(xt_call_run(ctx, &xt_op_rmsnorm_rope_grad, &args, out));
    enum xt_status status = XT_OK;
    XT_GO(answer(ctx, g, 0, out[0]));
    XT_GO(answer(ctx, g, 1, out[1]));
done:
    for (int i = 0; i < 2; i++) xt_tensor_release(ctx, out[i]);
    return status;
}

static const struct xt_param rmsnorm_rope_params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR},
    {.name = "eps", .kind = XT_P_REAL, .optional = true, .fallback = 1e-6},
    ROPE_PARAMS,
    {0},
};

static const struct xt_op xt_op_rmsnorm_rope_fused = {
    .name = "rmsnorm_rope_fused",
    .doc = "rmsnorm_rope in one pass, not rounded between the norm and the rotation",
    .params = rmsnorm_rope_params,
    .n_outputs = 2,
    .n_hidden = 1, /* 1/sqrt(mean(x^2) + eps), one a row */
    .flags = XT_INTERNAL,
    .dtypes = XT_FLOATS,
    .keeps_in = 7,
    .keeps_out = 2,
    .infer = rmsnorm_rope_infer,
    .backward = rmsnorm_rope_back,
};

/* In one pass where the device has the kernels, else by the two ops. */
static enum xt_status rmsnorm_rope_compose(struct xt_ctx *ctx, const struct xt_op *op,
                                           const struct xt_args *a, struct xt_tensor **outputs) {
    XT_TRY(want_normed_heads(ctx, op, a));
    struct xt_args args;
    if (takes_fused(ctx, &xt_op_rmsnorm_rope_fused, a->inputs[0])) {
        xt_args_init(&args, &xt_op_rmsnorm_rope_fused, a->inputs, a->n_inputs);
        memcpy(args.attrs, a->attrs, (1 + ROPE_ATTRS) * sizeof *args.attrs);
        return xt_call_run(ctx, &xt_op_rmsnorm_rope_fused, &args, outputs);
    }
    struct xt_tensor *normed;
    xt_args_init(&args, &xt_op_rmsnorm, a->inputs, 2);
    args.attrs[0] = a->attrs[0];
    XT_TRY(xt_call_run(ctx, &xt_op_rmsnorm, &args, &normed));
    struct xt_tensor *in[] = {normed, a->inputs[2]};
    xt_args_init(&args, &xt_op_rope, in, 2);
    memcpy(args.attrs, a->attrs + 1, ROPE_ATTRS * sizeof *args.attrs);
    enum xt_status status = xt_call_run(ctx, &xt_op_rope, &args, outputs);
    xt_tensor_release(ctx, normed);
    return status;
}

static const struct xt_op xt_op_rmsnorm_rope = {
    .name = "rmsnorm_rope",
    .doc = "rope(rmsnorm(x, weight, eps)): the norm of each head, then its rotation, x (B, S, H, "
           "D), weight (D); on a GPU in one pass for D up to 512, with what the norm gives not "
           "rounded before it is turned",
    .params = rmsnorm_rope_params,
    .n_outputs = 1,
    .flags = XT_COMPOSED,
    .dtypes = XT_FLOATS,
    .compose = rmsnorm_rope_compose,
};

xt_op_list xt_ops_norm = {
    &xt_op_rmsnorm,
    &xt_op_layernorm,
    &xt_op_rope,
    &xt_op_rmsnorm_rope,
    &xt_op_rmsnorm_grad,
    &xt_op_rmsnorm_grad_sum,
    &xt_op_layernorm_grad,
    &xt_op_rope_grad,
    &xt_op_rmsnorm_rope_fused,
    &xt_op_rmsnorm_rope_grad,
    NULL,
};
