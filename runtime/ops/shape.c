/*
 * shape.c: copies, and the ops that put tensors together or make them of nothing.
 */
#include "../op.h"

#include <inttypes.h>

/* Runs an op that takes one tensor and up to three integers. */
static enum xt_status run_ints(struct xt_ctx *ctx, const struct xt_op *op, struct xt_tensor *x,
                               int64_t a, int64_t b, int64_t c, struct xt_tensor **out) {
    struct xt_args args;
    xt_args_init(&args, op, &x, 1);
    int64_t values[3] = {a, b, c};
    for (int i = 0; op->params[i + 1].name; i++) args.attrs[i].i = values[i];
    return xt_call_run(ctx, op, &args, out);
}

/* ---- contiguous, clone ----------------------------------------------------------------------- */

static enum xt_status pass_back(struct xt_ctx *ctx, struct xt_grads *g) {
    (void)ctx;
    g->grad_in[0] = xt_tensor_retain(g->grad_out[0]);
    return XT_OK;
}

static const struct xt_param x_params[] = {{.name = "x"}, {0}};

static const struct xt_op xt_op_contiguous = {
    .name = "contiguous",
    .doc = "x's elements in row-major order",
    .params = x_params,
    .n_outputs = 1,
    .infer = xt_infer_like,
    .backward = pass_back,
};

static const struct xt_op xt_op_clone = {
    .name = "clone",
    .doc = "a copy of x with bytes of its own",
    .params = x_params,
    .n_outputs = 1,
    .infer = xt_infer_like,
    .backward = pass_back,
};

/* ---- flip ------------------------------------------------------------------------------------ */

static enum xt_status flip_back(struct xt_ctx *ctx, struct xt_grads *g);

static const struct xt_param flip_params[] = {
    {.name = "x"}, {.name = "dim", .kind = XT_P_DIM}, {0}};

static const struct xt_op xt_op_flip = {
    .name = "flip",
    .doc = "x with the order along dim reversed",
    .params = flip_params,
    .n_outputs = 1,
    .infer = xt_infer_like,
    .backward = flip_back,
};

static enum xt_status flip_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_args args;
    xt_args_init(&args, &xt_op_flip, g->grad_out, 1);
    args.attrs[0] = xt_call_attrs(g->call)[0];
    return xt_call_run(ctx, &xt_op_flip, &args, g->grad_in);
}

/* ---- concat, stack --------------------------------------------------------------------------- */

/* All inputs have the dtype and, dimension `except` (-1: none) aside, the shape of the first. */
static enum xt_status want_alike(struct xt_ctx *ctx, const struct xt_args *args, int except) {
    char a[128], b[128];
    const struct xt_tensor *x = args->inputs[0];
    for (int i = 1; i < args->n_inputs; i++) {
        const struct xt_tensor *y = args->inputs[i];
        bool fits = x->ndim == y->ndim;
        for (int d = 0; fits && d < x->ndim; d++) fits = d == except || x->shape[d] == y->shape[d];
        if (!fits || x->dtype != y->dtype)
            return xt_fail(ctx, fits ? XT_DTYPE : XT_SHAPE, "tensor 1 is %s, tensor %d is %s",
                           xt_describe(x, a, sizeof a), i + 1, xt_describe(y, b, sizeof b));
    }
    return XT_OK;
}

static enum xt_status concat_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    const struct xt_tensor *x = args->inputs[0];
    int dim = (int)args->attrs[0].i;
    if (x->ndim == 0)
        return xt_fail(ctx, XT_SHAPE, "tensor 1 has no dimension to join along; use stack");
    XT_TRY(want_alike(ctx, args, dim));
    xt_output_like(outputs, x);
    for (int i = 1; i < args->n_inputs; i++)
        outputs->spec.shape[dim] += args->inputs[i]->shape[dim];
    return XT_OK;
}

static enum xt_status concat_back(struct xt_ctx *ctx, struct xt_grads *g) {
    const struct xt_op *slice = xt_op_find(ctx, "slice");
    int64_t dim = xt_call_attrs(g->call)[0].i, first = 0;
    for (int i = 0; i < g->n_inputs; i++) {
        int64_t size = g->in_spec[i].shape[dim];
        if (g->wants[i] && size == 0) /* a slice has at least one place */
            XT_TRY(xt_full(ctx, &g->in_spec[i], xt_call_device(g->call), 0, &g->grad_in[i]));
        else if (g->wants[i])
            XT_TRY(
                run_ints(ctx, slice, g->grad_out[0], dim, first, first + size - 1, &g->grad_in[i]));
        first += size;
    }
    return XT_OK;
}

static const struct xt_param join_params[] = {
    {.name = "tensors", .kind = XT_P_TENSORS},
    {.name = "dim", .kind = XT_P_DIM, .optional = true, .fallback = 0},
    {0}};

static const struct xt_op xt_op_concat = {
    .name = "concat",
    .doc = "the tensors one after another along dim; other sizes are equal",
    .params = join_params,
    .n_outputs = 1,
    .infer = concat_infer,
    .backward = concat_back,
};

static enum xt_status stack_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                  const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    const struct xt_tensor *x = args->inputs[0];
    int dim = (int)args->attrs[0].i;
    XT_TRY(want_alike(ctx, args, -1));
    if (x->ndim == XT_MAX_DIMS)
        return xt_fail(ctx, XT_SHAPE, "tensor 1 already has %d dimensions, the most possible",
                       x->ndim);
    xt_output_like(outputs, x);
    outputs->spec.ndim++;
    for (int d = x->ndim; d > dim; d--) outputs->spec.shape[d] = x->shape[d - 1];
    outputs->spec.shape[dim] = args->n_inputs;
    return XT_OK;
}

static enum xt_status stack_back(struct xt_ctx *ctx, struct xt_grads *g) {
    const struct xt_op *select = xt_op_find(ctx, "select");
    int64_t dim = xt_call_attrs(g->call)[0].i;
    for (int i = 0; i < g->n_inputs; i++)
        if (g->wants[i]) XT_TRY(run_ints(ctx, select, g->grad_out[0], dim, i, 0, &g->grad_in[i]));
    return XT_OK;
}

static const struct xt_op xt_op_stack = {
    .name = "stack",
    .doc = "the tensors, of one shape, along a new dimension at dim",
    .params = join_params,
    .n_outputs = 1,
    .flags = XT_NEW_DIM,
    .infer = stack_infer,
    .backward = stack_back,
};

/* ---- repeat_kv ------------------------------------------------------------------------------- */

static enum xt_status repeat_kv_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_output *outputs) {
    int64_t group = args->attrs[0].i;
    XT_TRY(xt_want_ndim(ctx, op, "x", args->inputs[0], 4));
    if (group < 1)
        return xt_fail(ctx, XT_ARGUMENT, "group is %" PRId64 ", wanted 1 or more", group);
    xt_output_like(outputs, args->inputs[0]);
    outputs->spec.shape[2] *= group;
    return XT_OK;
}

static enum xt_status repeat_kv_grad_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                           const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    xt_output_like(outputs, args->inputs[0]);
    outputs->spec.shape[2] /= args->attrs[0].i;
    return XT_OK;
}

static const struct xt_param repeat_kv_params[] = {
    {.name = "x"}, {.name = "group", .kind = XT_P_INT}, {0}};

static const struct xt_op xt_op_repeat_kv_grad = {
    .name = "repeat_kv_grad",
    .doc = "(B, S, H*group, D) summed over each group of heads, in order: (B, S, H, D)",
    .params = repeat_kv_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .dtypes = XT_FLOATS,
    .infer = repeat_kv_grad_infer,
};

static enum xt_status repeat_kv_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return run_ints(ctx, &xt_op_repeat_kv_grad, g->grad_out[0], xt_call_attrs(g->call)[0].i, 0, 0,
                    &g->grad_in[0]);
}

static const struct xt_op xt_op_repeat_kv = {
    .name = "repeat_kv",
    .doc = "x (B, S, H, D) with each head repeated: (B, S, H*group, D), head h from "
           "head floor(h / group)",
    .params = repeat_kv_params,
    .n_outputs = 1,
    .infer = repeat_kv_infer,
    .backward = repeat_kv_back,
};

/* ---- full, arange: what constructors run ----------------------------------------------------- */

static enum xt_status full_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    double value = args->attrs[1].f;
    enum xt_dtype dtype = (enum xt_dtype)args->attrs[2].i;
    XT_TRY(xt_output_sized(ctx, args, 0, dtype, outputs));
    if (!xt_dtype_is_float(dtype)) {
        double low = dtype == XT_U8 ? 0 : dtype == XT_I32 ? -0x1p31 : -0x1p63;
        double high = dtype == XT_U8 ? 0x1p8 : dtype == XT_I32 ? 0x1p31 : 0x1p63;
        if (!(value >= low && value < high))
            return xt_fail(ctx, XT_ARGUMENT, "value is %g, which %s cannot hold", value,
                           xt_dtype_name(dtype));
    }
    return XT_OK;
}

static const struct xt_param full_params[] = {
    {.name = "shape", .kind = XT_P_SHAPE},
    {.name = "value", .kind = XT_P_REAL},
    {.name = "dtype", .kind = XT_P_DTYPE, .optional = true, .fallback = XT_F32},
    {0}};

static const struct xt_op xt_op_full = {
    .name = "full",
    .doc = "a tensor of a shape with every element equal to value",
    .params = full_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .infer = full_infer,
};

static enum xt_status arange_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    int64_t n = args->attrs[0].i;
    enum xt_dtype dtype = (enum xt_dtype)args->attrs[1].i;
    if (n < 0 || (dtype == XT_U8 && n > 256) || (dtype == XT_I32 && n > INT64_C(1) << 31))
        return xt_fail(ctx, XT_ARGUMENT, "n is %" PRId64 ", wanted a count that %s can hold", n,
                       xt_dtype_name(dtype));
    outputs->spec.dtype = dtype;
    outputs->spec.ndim = 1;
    outputs->spec.shape[0] = n;
    return XT_OK;
}

static const struct xt_param arange_params[] = {
    {.name = "n", .kind = XT_P_INT},
    {.name = "dtype", .kind = XT_P_DTYPE, .optional = true, .fallback = XT_I64},
    {0}};

static const struct xt_op xt_op_arange = {
    .name = "arange",
    .doc = "0, 1, ..., n - 1",
    .params = arange_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .infer = arange_infer,
};

xt_op_list xt_ops_shape = {
    &xt_op_contiguous, &xt_op_clone,          &xt_op_flip, &xt_op_concat, &xt_op_stack,
    &xt_op_repeat_kv,  &xt_op_repeat_kv_grad, &xt_op_full, &xt_op_arange, NULL,
};
