/*
 * loss.c: cross entropy from logits, and from the factors of logits that are never held whole.
 *
 * A loss is f32 (f64 for f64) whatever the dtype of the logits. Rows whose label is the ignored one
 * count nowhere; of no valid label at all the loss is 0 and so are the gradients. A label out of
 * range fails the call, on the CPU before anything is computed.
 */
#include "../op.h"

#include <math.h>
#include <string.h>

#define TEXT_BYTES 160

enum reduction { MEAN, SUM, NONE };

/* ---- what both losses share ------------------------------------------------------------------ */

#define LOSS_OPTIONS                                                                               \
    {.name = "reduction",                                                                          \
     .kind = XT_P_CHOICE,                                                                          \
     .optional = true,                                                                             \
     .named = true,                                                                                \
     .choices = "mean|sum|none"},                                                                  \
        {.name = "ignore", .kind = XT_P_INT, .optional = true, .named = true, .fallback = -100},   \
        {.name = "label_smoothing", .kind = XT_P_REAL, .optional = true, .named = true}, {         \
        0                                                                                          \
    }

/* labels: integers, one for each row of x, whose last dimension is not theirs. */
static enum xt_status want_labels(struct xt_ctx *ctx, const struct xt_args *args, const char *name,
                                  const struct xt_tensor *x, const struct xt_tensor *labels) {
    char text[TEXT_BYTES], x_text[TEXT_BYTES];
    double smoothing = args->attrs[2].f;
    if (x->ndim == 0)
        return xt_fail(ctx, XT_SHAPE, "%s is a scalar, wanted 1 dimension or more", name);
    if (labels->dtype != XT_I32 && labels->dtype != XT_I64)
        return xt_fail(ctx, XT_DTYPE, "labels is %s, wanted i32 or i64",
                       xt_describe(labels, text, sizeof text));
    bool fits = labels->ndim == x->ndim - 1;
    for (int d = 0; fits && d < labels->ndim; d++) fits = labels->shape[d] == x->shape[d];
    if (!fits)
        return xt_fail(ctx, XT_SHAPE, "labels is %s, wanted one for each row of %s, which is %s",
                       xt_describe(labels, text, sizeof text), name,
                       xt_describe(x, x_text, sizeof x_text));
    if (!(smoothing >= 0 && smoothing <= 1))
        return xt_fail(ctx, XT_ARGUMENT, "label_smoothing is %g, wanted 0 to 1", smoothing);
    return XT_OK;
}

static void loss_spec(const struct xt_args *args, const struct xt_tensor *labels,
                      enum xt_dtype dtype, struct xt_spec *out) {
    *out = (struct xt_spec){.dtype = xt_arithmetic(dtype)};
    if (args->attrs[0].i != NONE) return;
    out->ndim = labels->ndim;
    memcpy(out->shape, labels->shape, sizeof out->shape);
}

/* ---- cross_entropy --------------------------------------------------------------------------- */

static enum xt_status cross_entropy_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                          const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    const struct xt_tensor *x = args->inputs[0], *labels = args->inputs[1];
    XT_TRY(want_labels(ctx, args, "logits", x, labels));
    loss_spec(args, labels, x->dtype, &outputs[0].spec);
    xt_spec_of(labels, &outputs[1].spec);
    outputs[1].spec.dtype = xt_arithmetic(x->dtype);
    return XT_OK;
}

static enum xt_status cross_entropy_grad_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                               const struct xt_args *args,
                                               struct xt_output *outputs) {
    (void)ctx, (void)op;
    xt_output_like(&outputs[0], args->inputs[0]);
    return XT_OK;
}

static const struct xt_param cross_entropy_grad_params[] = {
    {.name = "logits", .kind = XT_P_TENSOR},
    {.name = "labels", .kind = XT_P_TENSOR},
    {.name = "logsumexp", .kind = XT_P_TENSOR},
    {.name = "grad", .kind = XT_P_TENSOR},
    LOSS_OPTIONS,
};

static const struct xt_op xt_op_cross_entropy_grad = {
    .name = "cross_entropy_grad",
    .doc =
        "(softmax(logits) - target) * grad, grad divided by the count of valid labels for a mean",
    .params = cross_entropy_grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = cross_entropy_grad_infer,
};

static enum xt_status cross_entropy_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *in[] = {g->in[0], g->in[1], g->out[1], g->grad_out[0]};
    struct xt_args args;
    xt_args_init(&args, &xt_op_cross_entropy_grad, in, 4);
    memcpy(args.attrs, xt_call_attrs(g->call), 3 * sizeof *args.attrs);
    return xt_call_run(ctx, &xt_op_cross_entropy_grad, &args, &g->grad_in[0]);
}

static const struct xt_param cross_entropy_params[] = {
    {.name = "logits", .kind = XT_P_TENSOR},
    {.name = "labels", .kind = XT_P_TENSOR},
    LOSS_OPTIONS,
};

static const struct xt_op xt_op_cross_entropy = {
    .name = "cross_entropy",
    .doc =
        "logsumexp(logits) - logits[label] over rows whose label is not ignored: logits (..., V), "
        "labels (...) i32 or i64 from 0; f32. label_smoothing s makes the target (1 - s) at the "
        "label plus s / V everywhere",
    .params = cross_entropy_params,
    .n_outputs = 2,
    .n_hidden = 1, /* logsumexp, one a row */
    .dtypes = XT_FLOATS,
    .keeps_in = 3,
    .keeps_out = 2,
    .infer = cross_entropy_infer,
    .backward = cross_entropy_back,
};

/* ---- linear_cross_entropy -------------------------------------------------------------------- */

static enum xt_status want_factors(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args) {
    char text[TEXT_BYTES], w_text[TEXT_BYTES];
    const struct xt_tensor *x = args->inputs[0], *w = args->inputs[1];
    XT_TRY(want_labels(ctx, args, "x", x, args->inputs[2]));
    XT_TRY(xt_want_ndim(ctx, op, "weight", w, 2));
    XT_TRY(xt_want_same_dtype(ctx, op, "x", x, "weight", w));
    if (w->shape[1] != x->shape[x->ndim - 1])
        return xt_fail(ctx, XT_SHAPE, "x is %s, weight is %s: inner sizes %lld and %lld differ",
                       xt_describe(x, text, sizeof text), xt_describe(w, w_text, sizeof w_text),
                       (long long)x->shape[x->ndim - 1], (long long)w->shape[1]);
    return XT_OK;
}

/* The gradients of x, in its dtype, and of weight, as it is summed. */
static void factor_specs(const struct xt_args *args, bool none, struct xt_output *outputs) {
    const struct xt_spec empty = {.dtype = xt_arithmetic(args->inputs[0]->dtype), .ndim = 1};
    outputs[0].spec = outputs[1].spec = empty;
    if (none) return;
    xt_spec_of(args->inputs[0], &outputs[0].spec);
    xt_spec_of(args->inputs[1], &outputs[1].spec);
    outputs[1].spec.dtype = empty.dtype;
}

static enum xt_status linear_cross_entropy_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                                 const struct xt_args *args,
                                                 struct xt_output *outputs) {
    XT_TRY(want_factors(ctx, op, args));
    loss_spec(args, args->inputs[2], args->inputs[0]->dtype, &outputs[0].spec);
    factor_specs(args, args->attrs[0].i == NONE, &outputs[1]);
    return XT_OK;
}

static enum xt_status linear_cross_entropy_grad_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                                      const struct xt_args *args,
                                                      struct xt_output *outputs) {
    (void)ctx, (void)op;
    factor_specs(args, false, outputs);
    return XT_OK;
}

static const struct xt_param linear_cross_entropy_grad_params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR},
    {.name = "labels", .kind = XT_P_TENSOR},
    {.name = "grad", .kind = XT_P_TENSOR},
    LOSS_OPTIONS,
};

static const struct xt_op xt_op_linear_cross_entropy_grad = {
    .name = "linear_cross_entropy_grad",
    .doc = "the gradients of x and weight for reduction none: grad has one number a row; weight's "
           "is f32 (f64)",
    .params = linear_cross_entropy_grad_params,
    .n_outputs = 2,
    .flags = XT_INTERNAL | XT_NO_GRADIENT | XT_EXPENSIVE,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64),
    .infer = linear_cross_entropy_grad_infer,
};

static enum xt_status scaled_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    xt_output_like(&outputs[0], args->inputs[0]);
    return XT_OK;
}

static const struct xt_param scaled_params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "by", .kind = XT_P_TENSOR},
    {0},
};

static const struct xt_op xt_op_scaled = {
    .name = "scaled",
    .doc = "x * by in x's dtype, by a scalar in the arithmetic's",
    .params = scaled_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = scaled_infer,
};

static enum xt_status write_scaled_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                         const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op, (void)args, (void)outputs;
    return XT_OK;
}

static const struct xt_param write_scaled_params[] = {
    {.name = "target", .kind = XT_P_TENSOR},
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "by", .kind = XT_P_TENSOR, .optional = true},
    {.name = "add", .kind = XT_P_BOOL},
    {0},
};

static const struct xt_op xt_op_write_scaled_ = {
    .name = "write_scaled_",
    .doc = "target = x * by or, with add, target += x * by; without by it is 1",
    .params = write_scaled_params,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_F64),
    .writes = 1,
    .infer = write_scaled_infer,
};

/* The weight's gradient, times `by` when there is one, straight into a leaf where that is
   possible. */
static enum xt_status answer_weight(struct xt_ctx *ctx, struct xt_grads *g, struct xt_tensor *dw,
                                    struct xt_tensor *by) {
    struct xt_tensor *target = NULL, *scaled = NULL;
    bool add = false;
    XT_TRY(xt_grads_target(ctx, g, 1, &target, &add));
    if (target) {
        struct xt_tensor *in[] = {target, dw, by};
        struct xt_args args;
        xt_args_init(&args, &xt_op_write_scaled_, in, 3);
        args.attrs[0].i = add;
        return xt_call_run(ctx, &xt_op_write_scaled_, &args, NULL);
    }
    if (by)
        XT_TRY(xt_apply(ctx, &xt_op_scaled, (struct xt_tensor *[]){dw, by}, 2, &scaled));
    else
        scaled = xt_tensor_retain(dw);
    enum xt_status status = xt_cast(ctx, scaled, g->in_spec[1].dtype, &g->grad_in[1]);
    xt_tensor_release(ctx, scaled);
    return status;
}

static enum xt_status linear_cross_entropy_back(struct xt_ctx *ctx, struct xt_grads *g) {
    const union xt_attr *attrs = xt_call_attrs(g->call);
    struct xt_tensor *grad = g->grad_out[0], *out[2] = {NULL};
    if (attrs[0].i != NONE) {
        if (g->wants[0])
            XT_TRY(xt_apply(ctx, &xt_op_scaled, (struct xt_tensor *[]){g->out[1], grad}, 2,
                            &g->grad_in[0]));
        return g->wants[1] ? answer_weight(ctx, g, g->out[2], grad) : XT_OK;
    }
    struct xt_tensor *in[] = {g->in[0], g->in[1], g->in[2], grad};
    struct xt_args args;
    xt_args_init(&args, &xt_op_linear_cross_entropy_grad, in, 4);
    memcpy(args.attrs, attrs, 3 * sizeof *attrs);
    XT_TRY(xt_call_run(ctx, &xt_op_linear_cross_entropy_grad, &args, out));
    enum xt_status status = g->wants[1] ? answer_weight(ctx, g, out[1], NULL) : XT_OK;
    if (status == XT_OK && g->wants[0]) g->grad_in[0] = xt_tensor_retain(out[0]);
    for (int i = 0; i < 2; i++) xt_tensor_release(ctx, out[i]);
    return status;
}

static const struct xt_param linear_cross_entropy_params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR},
    {.name = "labels", .kind = XT_P_TENSOR},
    LOSS_OPTIONS,
};

/*
 * The gradient of a mean or a sum is linear in the one number that comes from upstream, so both
 * gradients are computed while a block of logits is there: three products in all, and no logits
 * kept.
 */
static const struct xt_op xt_op_linear_cross_entropy = {
    .name = "linear_cross_entropy",
    .doc =
        "cross_entropy(x weight^T, labels) that never holds all logits: x (..., D), weight (V, D), "
        "labels (...) i32 or i64; logits in f32 (f64)",
    .params = linear_cross_entropy_params,
    .n_outputs = 3,
    .n_hidden = 2, /* the gradients of x and weight for a gradient of 1; empty for reduction none */
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64),
    .keeps_in = 7,
    .keeps_out = 6,
    .infer = linear_cross_entropy_infer,
    .backward = linear_cross_entropy_back,
};

/* ---- count_valid ----------------------------------------------------------------------------- */

static enum xt_status count_valid_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                        const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op, (void)args;
    outputs[0].spec = (struct xt_spec){.dtype = XT_I64};
    return XT_OK;
}

static const struct xt_param count_valid_params[] = {
    {.name = "labels", .kind = XT_P_TENSOR},
    {.name = "ignore", .kind = XT_P_INT, .optional = true, .named = true, .fallback = -100},
    {0},
};

static const struct xt_op xt_op_count_valid = {
    .name = "count_valid",
    .doc = "how many labels are not the ignored one: a scalar i64",
    .params = count_valid_params,
    .n_outputs = 1,
    .flags = XT_NO_GRADIENT,
    .dtypes = XT_BIT(XT_I32) | XT_BIT(XT_I64),
    .infer = count_valid_infer,
};

xt_op_list xt_ops_loss = {
    &xt_op_cross_entropy,
    &xt_op_linear_cross_entropy,
    &xt_op_count_valid,
    &xt_op_cross_entropy_grad,
    &xt_op_linear_cross_entropy_grad,
    &xt_op_scaled,
    &xt_op_write_scaled_,
    NULL,
};
