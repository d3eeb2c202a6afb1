/*
 * mlp.c: swiglu_mlp, the feed-forward part of a block as one op.
 *
 * Where a device has the fused kernel, what lies between the products never leaves it: widths that
 * tensor cores take slowly are grown inside, and the product's input is made again in backward
 * instead of being kept. Elsewhere the op is the four ops that it stands for.
 */
#include "../op.h"

#include <stdio.h>

#define TEXT_BYTES 160
#define FACTORS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

enum input { X, GATE, UP, DOWN, INPUTS };

static enum xt_status want_weight(struct xt_ctx *ctx, const char *name, const struct xt_tensor *w,
                                  const struct xt_tensor *x, int64_t out, int64_t in,
                                  const char *sizes) {
    char text[TEXT_BYTES], x_text[TEXT_BYTES];
    if (w->dtype != x->dtype)
        return xt_fail(ctx, XT_DTYPE, "%s is %s, x is %s: wanted the same dtype", name,
                       xt_describe(w, text, sizeof text), xt_describe(x, x_text, sizeof x_text));
    if (w->ndim == 2 && (out < 0 || w->shape[0] == out) && w->shape[1] == in) return XT_OK;
    return xt_fail(ctx, XT_SHAPE, "%s is %s, wanted %s, for an x of %s", name,
                   xt_describe(w, text, sizeof text), sizes, xt_describe(x, x_text, sizeof x_text));
}

static enum xt_status check(struct xt_ctx *ctx, const struct xt_args *args) {
    const struct xt_tensor *x = args->inputs[X], *gate = args->inputs[GATE];
    char text[TEXT_BYTES], sizes[TEXT_BYTES];
    if (x->ndim == 0)
        return xt_fail(ctx, XT_SHAPE, "x is a scalar (%s), wanted 1 dimension or more",
                       xt_dtype_name(x->dtype));
    const int64_t in = x->shape[x->ndim - 1];
    snprintf(sizes, sizeof sizes, "ffn x %lld", (long long)in);
    XT_TRY(want_weight(ctx, "gate", gate, x, -1, in, sizes));
    snprintf(sizes, sizeof sizes, "%lldx%lld as gate is", (long long)gate->shape[0], (long long)in);
    XT_TRY(want_weight(ctx, "up", args->inputs[UP], x, gate->shape[0], in, sizes));
    snprintf(sizes, sizeof sizes, "out x %lld with gate %s", (long long)gate->shape[0],
             xt_describe(gate, text, sizeof text));
    return want_weight(ctx, "down", args->inputs[DOWN], x, -1, gate->shape[0], sizes);
}

/* ---- fused ----------------------------------------------------------------------------------- */

static int64_t rows_of(const struct xt_tensor *x) {
    int64_t rows = 1;
    for (int d = 0; d < x->ndim - 1; d++) rows *= x->shape[d];
    return rows;
}

int64_t xt_mlp_width(const struct xt_tensor *x, const struct xt_tensor *gate) {
    const int64_t ffn = gate->shape[0], in = gate->shape[1];
    const bool half = x->dtype == XT_BF16 || x->dtype == XT_F16;
    return half && rows_of(x) * ffn * in >= 1 << 24 ? (ffn + 7) / 8 * 8 : ffn;
}

static enum xt_status fused_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                  const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    XT_TRY(check(ctx, args));
    const struct xt_tensor *x = args->inputs[X];
    xt_output_like(&outputs[0], x);
    outputs[0].spec.shape[x->ndim - 1] = args->inputs[DOWN]->shape[0];
    outputs[1].spec = (struct xt_spec){.dtype = x->dtype, .ndim = 2};
    outputs[1].spec.shape[0] = rows_of(x);
    outputs[1].spec.shape[1] = 2 * xt_mlp_width(x, args->inputs[GATE]);
    return XT_OK;
}

static enum xt_status grad_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    xt_output_like(&outputs[0], args->inputs[X]);
    if (args->attrs[0].i) return XT_OK;
    outputs[0].spec.ndim = 1;
    outputs[0].spec.shape[0] = 0;
    return XT_OK;
}

static const struct xt_param grad_params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "gate", .kind = XT_P_TENSOR},
    {.name = "up", .kind = XT_P_TENSOR},
    {.name = "down", .kind = XT_P_TENSOR},
    {.name = "grad", .kind = XT_P_TENSOR},
    {.name = "pair", .kind = XT_P_TENSOR},                    /* what forward kept */
    {.name = "dgate", .kind = XT_P_TENSOR, .optional = true}, /* f32 (f64), written */
    {.name = "dup", .kind = XT_P_TENSOR, .optional = true},
    {.name = "ddown", .kind = XT_P_TENSOR, .optional = true},
    {.name = "input", .kind = XT_P_BOOL}, /* whether the gradient of x is wanted */
    {.name = "add_gate", .kind = XT_P_BOOL},
    {.name = "add_up", .kind = XT_P_BOOL},
    {.name = "add_down", .kind = XT_P_BOOL},
    {0},
};

enum { GRAD = INPUTS, PAIR, TARGETS, ALL = TARGETS + 3 };

static const struct xt_op op_grad = {
    .name = "swiglu_mlp_grad",
    .doc = "the gradient of x; those of the weights are written or, with add_..., added to",
    .params = grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = FACTORS,
    .writes = 7u << TARGETS,
    .infer = grad_infer,
};

static enum xt_status fused_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *in[ALL] = {NULL}, *own[INPUTS] = {NULL}, *dx = NULL;
    struct xt_args args;
    enum xt_status status = XT_OK;
    for (int i = X; i <= DOWN; i++) in[i] = g->in[i];
    in[GRAD] = g->grad_out[0];
    in[PAIR] = g->out[1];
    xt_args_init(&args, &op_grad, in, ALL);
    args.attrs[0].i = g->wants[X];
    for (int i = GATE; i <= DOWN; i++) {
        struct xt_tensor **target = &in[TARGETS + i - GATE];
        bool add = false;
        if (!g->wants[i]) continue;
        XT_GO(xt_grads_target(ctx, g, i, target, &add));
        if (!*target) {
            struct xt_spec spec = g->in_spec[i];
            spec.dtype = xt_arithmetic(spec.dtype);
            XT_GO(xt_tensor_new(ctx, &spec, xt_call_device(g->call), &own[i]));
            *target = own[i];
        }
        args.attrs[i].i = add;
    }
    XT_GO(xt_call_run(ctx, &op_grad, &args, &dx));
    if (g->wants[X]) {
        g->grad_in[X] = dx;
        dx = NULL;
    }
    for (int i = GATE; i <= DOWN; i++)
        if (own[i]) XT_GO(xt_cast(ctx, own[i], g->in_spec[i].dtype, &g->grad_in[i]));
done:
    xt_tensor_release(ctx, dx);
    for (int i = GATE; i <= DOWN; i++) xt_tensor_release(ctx, own[i]);
    return status;
}

static const struct xt_param params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "gate", .kind = XT_P_TENSOR},
    {.name = "up", .kind = XT_P_TENSOR},
    {.name = "down", .kind = XT_P_TENSOR},
    {0},
};

static const struct xt_op op_fused = {
    .name = "swiglu_mlp_fused",
    .doc = "swiglu_mlp, of whose inner values only the factors of swiglu stay in memory",
    .params = params,
    .n_outputs = 2,
    .n_hidden = 1, /* x gate^T and x up^T, side by side */
    .flags = XT_INTERNAL | XT_EXPENSIVE,
    .dtypes = FACTORS,
    .keeps_in = 15,
    .keeps_out = 2,
    .infer = fused_infer,
    .backward = fused_back,
};

/* ---- the op ---------------------------------------------------------------------------------- */

static enum xt_status compose(struct xt_ctx *ctx, const struct xt_op *op,
                              const struct xt_args *args, struct xt_tensor **outputs) {
    (void)op;
    struct xt_tensor *x = args->inputs[X], *gated = NULL, *upped = NULL, *inner = NULL;
    enum xt_status status = XT_OK;
    XT_TRY(check(ctx, args));
    if (xt_op_has_kernel(ctx, &op_fused, x->storage->device, x->dtype)) {
        struct xt_args same;
        xt_args_init(&same, &op_fused, args->inputs, INPUTS);
        return xt_call_run(ctx, &op_fused, &same, outputs);
    }
    XT_GO(xt_apply_name(ctx, "linear", (struct xt_tensor *[]){x, args->inputs[GATE], NULL}, 3,
                        &gated));
    XT_GO(
        xt_apply_name(ctx, "linear", (struct xt_tensor *[]){x, args->inputs[UP], NULL}, 3, &upped));
    XT_GO(xt_binary(ctx, "swiglu", gated, upped, &inner));
    XT_GO(xt_apply_name(ctx, "linear", (struct xt_tensor *[]){inner, args->inputs[DOWN], NULL}, 3,
                        &outputs[0]));
done:
    xt_tensor_release(ctx, gated);
    xt_tensor_release(ctx, upped);
    xt_tensor_release(ctx, inner);
    return status;
}

static const struct xt_op op_swiglu_mlp = {
    .name = "swiglu_mlp",
    .doc = "(silu(x gate^T) * (x up^T)) down^T: x (..., D), gate and up (ffn, D), down (out, ffn) "
           "-> (..., out)",
    .params = params,
    .n_outputs = 1,
    .flags = XT_COMPOSED,
    .dtypes = FACTORS,
    .compose = compose,
};

xt_op_list xt_ops_mlp = {&op_swiglu_mlp, &op_fused, &op_grad, NULL};
