/*
 * linalg.c: matmul and linear. Gradients of weights are summed in f32 (f64) straight into the
 * leaf's buffer by matmul_acc, whatever the dtype of the factors, so accumulation costs no extra
 * pass.
 */
#include "../op.h"

#include <string.h>

#define TEXT_BYTES 160
#define FACTORS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

/* ---- shapes ---------------------------------------------------------------------------------- */

/* "3x4": what xt_describe writes after the dtype. */
static const char *shape_text(const struct xt_tensor *t, char *buffer) {
    const char *space = strchr(xt_describe(t, buffer, TEXT_BYTES), ' ');
    return space ? space + 1 : buffer;
}

static enum xt_status want_factors(struct xt_ctx *ctx, const char *a_name,
                                   const struct xt_tensor *a, const char *b_name,
                                   const struct xt_tensor *b) {
    char a_text[TEXT_BYTES], b_text[TEXT_BYTES];
    const struct xt_tensor *scalar = a->ndim == 0 ? a : b;
    if (scalar->ndim == 0)
        return xt_fail(ctx, XT_SHAPE, "%s is a scalar (%s), wanted 1 dimension or more",
                       scalar == a ? a_name : b_name, xt_dtype_name(scalar->dtype));
    if (a->dtype != b->dtype)
        return xt_fail(ctx, XT_DTYPE, "%s is %s, %s is %s: wanted the same dtype", a_name,
                       xt_describe(a, a_text, sizeof a_text), b_name,
                       xt_describe(b, b_text, sizeof b_text));
    return XT_OK;
}

/* The shape of a @ b: dimensions that were added to a row or a column factor are dropped again. */
static enum xt_status product(struct xt_ctx *ctx, const struct xt_tensor *a,
                              const struct xt_tensor *b, struct xt_spec *out) {
    char a_text[TEXT_BYTES], b_text[TEXT_BYTES];
    XT_TRY(want_factors(ctx, "a", a, "b", b));
    const int64_t a_inner = a->shape[a->ndim - 1];
    const int64_t b_inner = b->shape[b->ndim > 1 ? b->ndim - 2 : 0];
    if (a_inner != b_inner)
        return xt_fail(ctx, XT_SHAPE, "a is %s, b is %s: inner sizes %lld and %lld differ",
                       shape_text(a, a_text), shape_text(b, b_text), (long long)a_inner,
                       (long long)b_inner);
    const int a_batch = a->ndim > 2 ? a->ndim - 2 : 0, b_batch = b->ndim > 2 ? b->ndim - 2 : 0;
    const int batch = a_batch > b_batch ? a_batch : b_batch;
    *out = (struct xt_spec){.dtype = a->dtype};
    for (int d = 0; d < batch; d++) {
        const int in_a = d - (batch - a_batch), in_b = d - (batch - b_batch);
        const int64_t x = in_a < 0 ? 1 : a->shape[in_a], y = in_b < 0 ? 1 : b->shape[in_b];
        if (x != y && x != 1 && y != 1)
            return xt_fail(
                ctx, XT_SHAPE, "a is %s, b is %s: batch sizes %lld and %lld do not broadcast",
                shape_text(a, a_text), shape_text(b, b_text), (long long)x, (long long)y);
        out->shape[out->ndim++] = x == 1 ? y : x;
    }
    if (a->ndim > 1) out->shape[out->ndim++] = a->shape[a->ndim - 2];
    if (b->ndim > 1) out->shape[out->ndim++] = b->shape[b->ndim - 1];
    return XT_OK;
}

/* ---- matmul_acc ------------------------------------------------------------------------------ */

static enum xt_status acc_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                const struct xt_args *args, struct xt_output *outputs) {
    (void)op, (void)outputs;
    char text[TEXT_BYTES];
    struct xt_spec wanted;
    const struct xt_tensor *target = args->inputs[0], *a = args->inputs[1];
    XT_TRY(product(ctx, a, args->inputs[2], &wanted));
    if (!xt_has_shape(target, wanted.shape, wanted.ndim))
        return xt_fail(ctx, XT_SHAPE, "target is %s, not of the product's shape",
                       shape_text(target, text));
    if (!(FACTORS & XT_BIT(a->dtype)) || target->dtype != xt_arithmetic(a->dtype))
        return xt_fail(ctx, XT_DTYPE,
                       "target is %s, a is %s: wanted a target of f32, or f64 for "
                       "f64 factors",
                       xt_dtype_name(target->dtype), xt_dtype_name(a->dtype));
    return XT_OK;
}

static const struct xt_param acc_params[] = {
    {.name = "target", .kind = XT_P_TENSOR},
    {.name = "a", .kind = XT_P_TENSOR},
    {.name = "b", .kind = XT_P_TENSOR},
    {.name = "add", .kind = XT_P_BOOL},
    {0},
};

static const struct xt_op xt_op_matmul_acc = {
    .name = "matmul_acc",
    .doc =
        "target = a @ b or, with add, target += a @ b, where target is f32 (f64 for f64 factors)",
    .params = acc_params,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_F64),
    .writes = 1,
    .infer = acc_infer,
};

static enum xt_status accumulate(struct xt_ctx *ctx, struct xt_tensor *target, struct xt_tensor *a,
                                 struct xt_tensor *b, bool add) {
    struct xt_args args;
    struct xt_tensor *in[] = {target, a, b};
    xt_args_init(&args, &xt_op_matmul_acc, in, 3);
    args.attrs[0].i = add;
    return xt_call_run(ctx, &xt_op_matmul_acc, &args, NULL);
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* Gives input i the gradient a @ b. Where the input was broadcast the tape sums it down. */
static enum xt_status give(struct xt_ctx *ctx, struct xt_grads *g, int i, struct xt_tensor *a,
                           struct xt_tensor *b) {
    struct xt_spec made;
    struct xt_tensor *target, *flat = NULL;
    const struct xt_spec *want = &g->in_spec[i];
    enum xt_status status = XT_OK;
    bool add, whole;
    XT_TRY(product(ctx, a, b, &made));
    int64_t have = 1, need = 1;
    for (int d = 0; d < made.ndim; d++) have *= made.shape[d];
    for (int d = 0; d < want->ndim; d++) need *= want->shape[d];
    whole = have == need;
    if (whole) {
        XT_TRY(xt_grads_target(ctx, g, i, &target, &add));
        if (target) {
            XT_GO(xt_reshape(ctx, target, made.shape, made.ndim, &flat));
            XT_GO(accumulate(ctx, flat, a, b, add));
            goto done;
        }
    }
    XT_GO(xt_binary(ctx, "matmul", a, b, &flat));
    if (whole) {
        status = xt_reshape(ctx, flat, want->shape, want->ndim, &g->grad_in[i]);
    } else if (want->ndim == 1) { /* a row that met a batch: (..., 1, K) to (..., K) */
        made.shape[made.ndim - 2] = made.shape[made.ndim - 1];
        status = xt_reshape(ctx, flat, made.shape, made.ndim - 1, &g->grad_in[i]);
    } else {
        g->grad_in[i] = xt_tensor_retain(flat);
    }
done:
    xt_tensor_release(ctx, flat);
    return status;
}

/* (..., D) as one matrix of rows. */
static enum xt_status rows_of(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor **out) {
    int64_t shape[2] = {1, x->shape[x->ndim - 1]};
    if (x->ndim == 2) {
        *out = xt_tensor_retain(x);
        return XT_OK;
    }
    for (int d = 0; d < x->ndim - 1; d++) shape[0] *= x->shape[d];
    return xt_reshape(ctx, x, shape, 2, out);
}

static enum xt_status turned(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor **out) {
    return xt_transpose(ctx, x, x->ndim - 2, x->ndim - 1, out);
}

/* x with a dimension of size 1 before its last (at 0) or after it (at 1) when `missing`. */
static enum xt_status with_one(struct xt_ctx *ctx, struct xt_tensor *x, bool missing, int at,
                               struct xt_tensor **out) {
    if (!missing) {
        *out = xt_tensor_retain(x);
        return XT_OK;
    }
    int64_t shape[XT_MAX_DIMS + 1];
    const int place = x->ndim - 1 + at < 0 ? 0 : x->ndim - 1 + at;
    for (int d = 0; d < place; d++) shape[d] = x->shape[d];
    shape[place] = 1;
    for (int d = place; d < x->ndim; d++) shape[d + 1] = x->shape[d];
    return xt_reshape(ctx, x, shape, x->ndim + 1, out);
}

/* With every factor and g at 2 dimensions or more: da = g @ b^T, db = a^T @ g. */
static enum xt_status matmul_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *a = NULL, *b = NULL, *grad = NULL, *half = NULL, *t = NULL;
    enum xt_status status = XT_OK;
    const bool row = g->in_spec[0].ndim == 1, column = g->in_spec[1].ndim == 1;
    XT_GO(with_one(ctx, g->grad_out[0], column, 1, &half));
    XT_GO(with_one(ctx, half, row, 0, &grad));
    XT_GO(with_one(ctx, g->in[0], row, 0, &a));
    XT_GO(with_one(ctx, g->in[1], column, 1, &b));
    if (b->ndim == 2 && a->ndim > 2) { /* one weight for all rows: one product, nothing to sum */
        struct xt_tensor *rows;
        XT_GO(rows_of(ctx, grad, &rows));
        xt_tensor_release(ctx, grad);
        grad = rows;
        XT_GO(rows_of(ctx, a, &rows));
        xt_tensor_release(ctx, a);
        a = rows;
    }
    if (g->wants[0]) {
        XT_GO(turned(ctx, b, &t));
        XT_GO(give(ctx, g, 0, grad, t));
        xt_tensor_release(ctx, t);
        t = NULL;
    }
    if (g->wants[1]) {
        XT_GO(turned(ctx, a, &t));
        XT_GO(give(ctx, g, 1, t, grad));
    }
done:
    xt_tensor_release(ctx, half);
    xt_tensor_release(ctx, grad);
    xt_tensor_release(ctx, a);
    xt_tensor_release(ctx, b);
    xt_tensor_release(ctx, t);
    return status;
}

/* ---- matmul ---------------------------------------------------------------------------------- */

static enum xt_status matmul_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    return product(ctx, args->inputs[0], args->inputs[1], &outputs[0].spec);
}

static const struct xt_param matmul_params[] = {
    {.name = "a", .kind = XT_P_TENSOR},
    {.name = "b", .kind = XT_P_TENSOR},
    {0},
};

static const struct xt_op xt_op_matmul = {
    .name = "matmul",
    .doc = "a @ b: (..., M, K) by (..., K, N) gives (..., M, N), leading dimensions broadcast; a "
           "1-dimensional a is a row, b a column, and that dimension is dropped again",
    .params = matmul_params,
    .n_outputs = 1,
    .flags = XT_EXPENSIVE,
    .dtypes = FACTORS,
    .keeps_in = 3,
    .infer = matmul_infer,
    .backward = matmul_back,
};

/* ---- linear ---------------------------------------------------------------------------------- */

static enum xt_status linear_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    char x_text[TEXT_BYTES], text[TEXT_BYTES];
    const struct xt_tensor *x = args->inputs[0], *weight = args->inputs[1], *bias = args->inputs[2];
    XT_TRY(want_factors(ctx, "x", x, "weight", weight));
    if (weight->ndim != 2)
        return xt_fail(ctx, XT_SHAPE, "weight is %s, wanted 2 dimensions, out x in",
                       shape_text(weight, text));
    if (x->shape[x->ndim - 1] != weight->shape[1])
        return xt_fail(ctx, XT_SHAPE,
                       "x is %s, weight is %s (out x in): inner sizes %lld and %lld differ",
                       shape_text(x, x_text), shape_text(weight, text),
                       (long long)x->shape[x->ndim - 1], (long long)weight->shape[1]);
    if (bias && (bias->ndim != 1 || bias->shape[0] != weight->shape[0]))
        return xt_fail(ctx, XT_SHAPE, "bias is %s, wanted %lld, one number for each row of weight",
                       bias->ndim ? shape_text(bias, text) : "a scalar",
                       (long long)weight->shape[0]);
    if (bias && bias->dtype != x->dtype && bias->dtype != xt_arithmetic(x->dtype))
        return xt_fail(ctx, XT_DTYPE, "bias is %s, wanted %s or %s for an x of %s",
                       xt_dtype_name(bias->dtype), xt_dtype_name(x->dtype),
                       xt_dtype_name(xt_arithmetic(x->dtype)), xt_dtype_name(x->dtype));
    xt_spec_of(x, &outputs[0].spec);
    outputs[0].spec.shape[x->ndim - 1] = weight->shape[0];
    return XT_OK;
}

/* The gradient of the bias: the sum of the rows of grad, as a product with ones so that it too is
   summed in f32 straight into the leaf's buffer. */
static enum xt_status bias_back(struct xt_ctx *ctx, struct xt_grads *g, struct xt_tensor *grad) {
    struct xt_tensor *ones, *target, *sum = NULL;
    struct xt_spec spec = {.dtype = grad->dtype, .ndim = 1};
    enum xt_status status = XT_OK;
    bool add;
    spec.shape[0] = grad->shape[0];
    XT_TRY(xt_full(ctx, &spec, grad->storage->device, 1, &ones));
    XT_GO(xt_grads_target(ctx, g, 2, &target, &add));
    if (target) {
        XT_GO(accumulate(ctx, target, ones, grad, add));
        goto done;
    }
    spec.dtype = xt_arithmetic(grad->dtype);
    spec.shape[0] = grad->shape[1];
    XT_GO(xt_tensor_new(ctx, &spec, grad->storage->device, &sum));
    XT_GO(accumulate(ctx, sum, ones, grad, false));
    XT_GO(xt_cast(ctx, sum, g->in_spec[2].dtype, &g->grad_in[2]));
done:
    xt_tensor_release(ctx, ones);
    xt_tensor_release(ctx, sum);
    return status;
}

/* dx = g @ weight, dweight = g^T @ x, dbias = the sum of g's rows. */
static enum xt_status linear_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *grad, *x = NULL, *t = NULL;
    enum xt_status status = XT_OK;
    XT_TRY(rows_of(ctx, g->grad_out[0], &grad));
    if (g->wants[0]) XT_GO(give(ctx, g, 0, grad, g->in[1]));
    if (g->wants[1]) {
        XT_GO(rows_of(ctx, g->in[0], &x));
        XT_GO(turned(ctx, grad, &t));
        XT_GO(give(ctx, g, 1, t, x));
    }
    if (g->n_inputs > 2 && g->wants[2]) XT_GO(bias_back(ctx, g, grad));
done:
    xt_tensor_release(ctx, grad);
    xt_tensor_release(ctx, x);
    xt_tensor_release(ctx, t);
    return status;
}

static const struct xt_param linear_params[] = {
    {.name = "x", .kind = XT_P_TENSOR},
    {.name = "weight", .kind = XT_P_TENSOR},
    {.name = "bias", .kind = XT_P_TENSOR, .optional = true},
    {0},
};

static const struct xt_op xt_op_linear = {
    .name = "linear",
    .doc =
        "x @ weight^T + bias: x (..., in), weight (out, in), bias (out) in x's dtype or f32; the "
        "sum is rounded once",
    .params = linear_params,
    .n_outputs = 1,
    .flags = XT_EXPENSIVE,
    .dtypes = FACTORS,
    .keeps_in = 3,
    .infer = linear_infer,
    .backward = linear_back,
};

xt_op_list xt_ops_linalg = {&xt_op_matmul, &xt_op_linear, &xt_op_matmul_acc, NULL};
