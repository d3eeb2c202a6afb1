/*
 * reduce.c: ops that fold dimensions, and softmax and its kin along one dimension.
 *
 * Gradients of sum and mean are views: the gradient expanded back. The others have fused rows of
 * their own (NAME_grad), which the backward rules run.
 */
#include "../op.h"

#include <inttypes.h>

#define TEXT_BYTES 160

/* Bit d is set when dimension d of ndim is folded; an empty list means all. */
static unsigned folded(const union xt_attr *dims, const int64_t *ints, int ndim) {
    unsigned mask = 0;
    if (dims->list.count == 0) return (1u << ndim) - 1;
    for (int i = 0; i < dims->list.count; i++) mask |= 1u << ints[dims->list.start + i];
    return mask;
}

/* Number of elements folded into each output element. */
static int64_t folded_count(const struct xt_spec *x, unsigned mask) {
    int64_t n = 1;
    for (int d = 0; d < x->ndim; d++)
        if (mask & 1u << d) n *= x->shape[d];
    return n;
}

static void fold_spec(const struct xt_spec *x, unsigned mask, bool keepdim, struct xt_spec *out) {
    out->dtype = x->dtype;
    out->ndim = 0;
    for (int d = 0; d < x->ndim; d++) {
        bool fold = mask & 1u << d;
        if (!fold || keepdim) out->shape[out->ndim++] = fold ? 1 : x->shape[d];
    }
}

/* t, shaped like the output, as a view in x's shape: repeated along the folded dimensions. */
static enum xt_status unfold(struct xt_ctx *ctx, struct xt_tensor *t, const struct xt_spec *x,
                             unsigned mask, struct xt_tensor **out) {
    struct xt_spec kept;
    struct xt_tensor *ones;
    fold_spec(x, mask, true, &kept);
    XT_TRY(xt_reshape(ctx, t, kept.shape, kept.ndim, &ones));
    enum xt_status status = xt_expand(ctx, ones, x->shape, x->ndim, out);
    xt_tensor_release(ctx, ones);
    return status;
}

static unsigned folded_in(const struct xt_grads *g) {
    return folded(xt_call_attrs(g->call), xt_call_ints(g->call), g->in_spec[0].ndim);
}

/* ---- sum, mean, amax, amin, norm ------------------------------------------------------------- */

static enum xt_status fold_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    struct xt_spec x;
    xt_spec_of(args->inputs[0], &x);
    fold_spec(&x, folded(&args->attrs[0], args->ints, x.ndim), args->attrs[1].i, &outputs->spec);
    return XT_OK;
}

static enum xt_status sum_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                const struct xt_args *args, struct xt_output *outputs) {
    XT_TRY(fold_infer(ctx, op, args, outputs));
    if (!xt_dtype_is_float(outputs->spec.dtype)) outputs->spec.dtype = XT_I64;
    return XT_OK;
}

/* Of nothing there is no largest. */
static enum xt_status extreme_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                    const struct xt_args *args, struct xt_output *outputs) {
    char text[TEXT_BYTES];
    struct xt_spec x;
    xt_spec_of(args->inputs[0], &x);
    if (folded_count(&x, folded(&args->attrs[0], args->ints, x.ndim)) == 0)
        return xt_fail(ctx, XT_SHAPE, "nothing to choose from: x is %s",
                       xt_describe(args->inputs[0], text, sizeof text));
    return fold_infer(ctx, op, args, outputs);
}

static enum xt_status sum_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return unfold(ctx, g->grad_out[0], &g->in_spec[0], folded_in(g), &g->grad_in[0]);
}

static enum xt_status mean_back(struct xt_ctx *ctx, struct xt_grads *g) {
    int64_t n = folded_count(&g->in_spec[0], folded_in(g));
    struct xt_tensor *scaled;
    XT_TRY(xt_scale(ctx, g->grad_out[0], 1.0 / (double)n, &scaled));
    enum xt_status status = unfold(ctx, scaled, &g->in_spec[0], folded_in(g), &g->grad_in[0]);
    xt_tensor_release(ctx, scaled);
    return status;
}

static enum xt_status permute(struct xt_ctx *ctx, struct xt_tensor *x, const int64_t *order,
                              struct xt_tensor **out) {
    const struct xt_op *op = xt_op_find(ctx, "permute");
    struct xt_args args;
    xt_args_init(&args, op, &x, 1);
    xt_args_list(&args, 0, order, xt_ndim(x));
    return xt_call_run(ctx, op, &args, out);
}

/* Runs grad_op on x (K, R), output (K), gradient (K): kept elements and folded ones. */
static enum xt_status rows_back(struct xt_ctx *ctx, struct xt_grads *g, const char *grad_op) {
    const struct xt_spec *x = &g->in_spec[0];
    unsigned mask = folded_in(g);
    int64_t order[XT_MAX_DIMS] = {0}, back[XT_MAX_DIMS] = {0}, moved[XT_MAX_DIMS] = {0};
    int64_t flat[2] = {1, folded_count(x, mask)};
    struct xt_tensor *turned = NULL, *in[3] = {NULL}, *rows = NULL, *shaped = NULL;
    enum xt_status status = XT_OK;
    int n = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int d = 0; d < x->ndim; d++) {
            bool fold = mask & 1u << d;
            if (fold != (pass == 1)) continue;
            if (!fold) flat[0] *= x->shape[d];
            moved[n] = x->shape[d];
            back[d] = n;
            order[n++] = d;
        }
    XT_GO(permute(ctx, g->in[0], order, &turned));
    XT_GO(xt_reshape(ctx, turned, flat, 2, &in[0]));
    XT_GO(xt_reshape(ctx, g->out[0], flat, 1, &in[1]));
    XT_GO(xt_reshape(ctx, g->grad_out[0], flat, 1, &in[2]));
    XT_GO(xt_apply_name(ctx, grad_op, in, 3, &rows));
    XT_GO(xt_reshape(ctx, rows, moved, x->ndim, &shaped));
    XT_GO(permute(ctx, shaped, back, &g->grad_in[0]));
done:
    xt_tensor_release(ctx, turned);
    for (int i = 0; i < 3; i++) xt_tensor_release(ctx, in[i]);
    xt_tensor_release(ctx, rows);
    xt_tensor_release(ctx, shaped);
    return status;
}

static enum xt_status extreme_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return rows_back(ctx, g, "amax_grad");
}

static enum xt_status norm_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return rows_back(ctx, g, "norm_grad");
}

static const struct xt_param fold_params[] = {
    {.name = "x"},
    {.name = "dims", .kind = XT_P_DIMS, .optional = true},
    {.name = "keepdim", .kind = XT_P_BOOL, .optional = true, .named = true},
    {0}};

static const struct xt_op xt_op_sum = {
    .name = "sum",
    .doc = "sum over dims (all, when none is given), kept as 1 with keepdim; integers give i64; "
           "the sum of nothing is 0",
    .params = fold_params,
    .n_outputs = 1,
    .infer = sum_infer,
    .backward = sum_back,
};

static const struct xt_op xt_op_mean = {
    .name = "mean",
    .doc = "mean over dims (all, when none is given); the mean of nothing is NaN",
    .params = fold_params,
    .n_outputs = 1,
    .dtypes = XT_FLOATS,
    .infer = fold_infer,
    .backward = mean_back,
};

static const struct xt_op xt_op_amax = {
    .name = "amax",
    .doc = "largest element over dims; NaN wins; equal largest elements share the gradient",
    .params = fold_params,
    .n_outputs = 1,
    .keeps_in = 1,
    .keeps_out = 1,
    .infer = extreme_infer,
    .backward = extreme_back,
};

static const struct xt_op xt_op_amin = {
    .name = "amin",
    .doc = "smallest element over dims; NaN wins; equal smallest elements share the gradient",
    .params = fold_params,
    .n_outputs = 1,
    .keeps_in = 1,
    .keeps_out = 1,
    .infer = extreme_infer,
    .backward = extreme_back,
};

static const struct xt_op xt_op_norm = {
    .name = "norm",
    .doc = "sqrt(sum(x^2)) over dims; its gradient at 0 is 0",
    .params = fold_params,
    .n_outputs = 1,
    .dtypes = XT_FLOATS,
    .keeps_in = 1,
    .keeps_out = 1,
    .infer = fold_infer,
    .backward = norm_back,
};

static const struct xt_param rows_grad_params[] = {
    {.name = "x"}, {.name = "y"}, {.name = "grad"}, {0}};

static const struct xt_op xt_op_amax_grad = {
    .name = "amax_grad",
    .doc = "x (K, R), y (K), grad (K): grad / (number of x equal to y) where x is y, else 0",
    .params = rows_grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .dtypes = XT_FLOATS,
    .infer = xt_infer_like,
};

static const struct xt_op xt_op_norm_grad = {
    .name = "norm_grad",
    .doc = "x (K, R), y (K), grad (K): x * grad / y, and 0 where y is 0",
    .params = rows_grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .dtypes = XT_FLOATS,
    .infer = xt_infer_like,
};

/* ---- along one dimension --------------------------------------------------------------------- */

static const struct xt_param along_params[] = {
    {.name = "x"}, {.name = "dim", .kind = XT_P_DIM, .optional = true, .fallback = -1}, {0}};

/* A 0-dim x counts as one row of one element. */
static void without_dim(const struct xt_args *args, struct xt_spec *out) {
    struct xt_spec x;
    xt_spec_of(args->inputs[0], &x);
    fold_spec(&x, x.ndim ? 1u << args->attrs[0].i : 0, false, out);
}

static enum xt_status argmax_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    char text[TEXT_BYTES];
    const struct xt_tensor *x = args->inputs[0];
    if (x->ndim && x->shape[args->attrs[0].i] == 0)
        return xt_fail(ctx, XT_SHAPE, "nothing to choose from: x is %s",
                       xt_describe(x, text, sizeof text));
    without_dim(args, &outputs->spec);
    outputs->spec.dtype = XT_I64;
    return XT_OK;
}

static const struct xt_op xt_op_argmax = {
    .name = "argmax",
    .doc = "position, counted from 0, of the largest element along dim, as i64; the first of "
           "equal ones; NaN counts as largest",
    .params = along_params,
    .n_outputs = 1,
    .flags = XT_NO_GRADIENT,
    .infer = argmax_infer,
};

static enum xt_status cumsum_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    xt_output_like(outputs, args->inputs[0]);
    if (!xt_dtype_is_float(outputs->spec.dtype)) outputs->spec.dtype = XT_I64;
    return XT_OK;
}

/* Runs a row whose one attribute is a dimension. */
static enum xt_status run_along(struct xt_ctx *ctx, const struct xt_op *op,
                                struct xt_tensor *const *inputs, int n, int64_t dim,
                                struct xt_tensor **out) {
    struct xt_args args;
    xt_args_init(&args, op, inputs, n);
    args.attrs[0].i = dim;
    return xt_call_run(ctx, op, &args, out);
}

static const struct xt_op xt_op_cumsum_grad = {
    .name = "cumsum_grad",
    .doc = "sums from each position to the end along dim",
    .params = along_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .dtypes = XT_FLOATS,
    .infer = xt_infer_like,
};

static enum xt_status cumsum_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return run_along(ctx, &xt_op_cumsum_grad, g->grad_out, 1, xt_call_attrs(g->call)[0].i,
                     &g->grad_in[0]);
}

static const struct xt_op xt_op_cumsum = {
    .name = "cumsum",
    .doc = "sums from the start to each position along dim; integers give i64",
    .params = along_params,
    .n_outputs = 1,
    .infer = cumsum_infer,
    .backward = cumsum_back,
};

/* The gradient rows take (what was kept, grad) along dim. */
static const struct xt_param along_grad_params[] = {
    {.name = "kept"}, {.name = "grad"}, {.name = "dim", .kind = XT_P_DIM}, {0}};

static const struct xt_op xt_op_softmax_grad = {
    .name = "softmax_grad",
    .doc = "kept is y: y * (grad - sum(y * grad))",
    .params = along_grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .dtypes = XT_FLOATS,
    .infer = xt_infer_like,
};

static const struct xt_op xt_op_log_softmax_grad = {
    .name = "log_softmax_grad",
    .doc = "kept is y: grad - exp(y) * sum(grad)",
    .params = along_grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .dtypes = XT_FLOATS,
    .infer = xt_infer_like,
};

static enum xt_status kept_out_back(struct xt_ctx *ctx, struct xt_grads *g,
                                    const struct xt_op *op) {
    struct xt_tensor *in[2] = {g->out[0], g->grad_out[0]};
    return run_along(ctx, op, in, 2, xt_call_attrs(g->call)[0].i, &g->grad_in[0]);
}

static enum xt_status softmax_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return kept_out_back(ctx, g, &xt_op_softmax_grad);
}

static enum xt_status log_softmax_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return kept_out_back(ctx, g, &xt_op_log_softmax_grad);
}

static const struct xt_op xt_op_softmax = {
    .name = "softmax",
    .doc = "exp(x - max) / sum(exp(x - max)) along dim, computed in f32 (f64 for f64)",
    .params = along_params,
    .n_outputs = 1,
    .dtypes = XT_FLOATS,
    .keeps_out = 1,
    .infer = xt_infer_like,
    .backward = softmax_back,
};

static const struct xt_op xt_op_log_softmax = {
    .name = "log_softmax",
    .doc = "x - logsumexp(x) along dim, computed in f32 (f64 for f64)",
    .params = along_params,
    .n_outputs = 1,
    .dtypes = XT_FLOATS,
    .keeps_out = 1,
    .infer = xt_infer_like,
    .backward = log_softmax_back,
};

static enum xt_status logsumexp_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    without_dim(args, &outputs->spec);
    return XT_OK;
}

static const struct xt_param logsumexp_grad_params[] = {
    {.name = "x"}, {.name = "y"}, {.name = "grad"}, {.name = "dim", .kind = XT_P_DIM}, {0}};

static const struct xt_op xt_op_logsumexp_grad = {
    .name = "logsumexp_grad",
    .doc = "grad * exp(x - y) along dim, and 0 where y is -inf",
    .params = logsumexp_grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .dtypes = XT_FLOATS,
    .infer = xt_infer_like,
};

static enum xt_status logsumexp_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *in[3] = {g->in[0], g->out[0], g->grad_out[0]};
    return run_along(ctx, &xt_op_logsumexp_grad, in, 3, xt_call_attrs(g->call)[0].i,
                     &g->grad_in[0]);
}

static const struct xt_op xt_op_logsumexp = {
    .name = "logsumexp",
    .doc = "log(sum(exp(x))) along dim, without overflow; of nothing or of -inf alone it is -inf, "
           "with zero gradients",
    .params = along_params,
    .n_outputs = 1,
    .dtypes = XT_FLOATS,
    .keeps_in = 1,
    .keeps_out = 1,
    .infer = logsumexp_infer,
    .backward = logsumexp_back,
};

/* ---- topk ------------------------------------------------------------------------------------ */

static enum xt_status topk_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    char text[TEXT_BYTES];
    const struct xt_tensor *x = args->inputs[0];
    int64_t k = args->attrs[0].i, dim = args->attrs[1].i;
    int64_t size = x->ndim ? x->shape[dim] : 1;
    if (k < 0 || k > size || (x->ndim == 0 && k != 1))
        return xt_fail(ctx, XT_ARGUMENT,
                       "k is %" PRId64 ", dim %" PRId64 " has size %" PRId64 " (%s)", k, dim + 1,
                       size, xt_describe(x, text, sizeof text));
    for (int i = 0; i < 2; i++) {
        xt_output_like(&outputs[i], x);
        if (x->ndim) outputs[i].spec.shape[dim] = k;
    }
    outputs[1].spec.dtype = XT_I64;
    return XT_OK;
}

static enum xt_status topk_back(struct xt_ctx *ctx, struct xt_grads *g) {
    if (!g->grad_out[0]) return XT_OK;
    if (g->in_spec[0].ndim == 0) {
        g->grad_in[0] = xt_tensor_retain(g->grad_out[0]);
        return XT_OK;
    }
    const struct xt_op *op = xt_op_find(ctx, "gather_grad");
    struct xt_tensor *in[2] = {g->out[1], g->grad_out[0]};
    struct xt_args args;
    xt_args_init(&args, op, in, 2);
    args.attrs[0].i = xt_call_attrs(g->call)[1].i;
    xt_args_list(&args, 1, g->in_spec[0].shape, g->in_spec[0].ndim);
    return xt_call_run(ctx, op, &args, &g->grad_in[0]);
}

static const struct xt_param topk_params[] = {
    {.name = "x"},
    {.name = "k", .kind = XT_P_INT},
    {.name = "dim", .kind = XT_P_DIM, .optional = true, .fallback = -1},
    {0}};

static const struct xt_op xt_op_topk = {
    .name = "topk",
    .doc = "the k largest along dim, falling, and their positions, counted from 0, as i64; of "
           "equal ones the first; NaN counts as largest",
    .params = topk_params,
    .n_outputs = 2,
    .keeps_out = 2,
    .infer = topk_infer,
    .backward = topk_back,
};

xt_op_list xt_ops_reduce = {
    &xt_op_sum,
    &xt_op_mean,
    &xt_op_amax,
    &xt_op_amin,
    &xt_op_norm,
    &xt_op_argmax,
    &xt_op_cumsum,
    &xt_op_softmax,
    &xt_op_log_softmax,
    &xt_op_logsumexp,
    &xt_op_topk,
    &xt_op_amax_grad,
    &xt_op_norm_grad,
    &xt_op_cumsum_grad,
    &xt_op_softmax_grad,
    &xt_op_log_softmax_grad,
    &xt_op_logsumexp_grad,
    NULL,
};
