/*
 * index.c: ops that pick elements by positions held in a tensor (i32 or i64, counted from 0).
 *
 * A position out of range is an error with its place and value, never a wrong read. Gradients add
 * in ascending order of place, so that repeated positions give the same bits every time.
 */
#include "../op.h"

#define TEXT_BYTES 160

static enum xt_status want_positions(struct xt_ctx *ctx, const char *name,
                                     const struct xt_tensor *t) {
    char text[TEXT_BYTES];
    if (t->dtype == XT_I32 || t->dtype == XT_I64) return XT_OK;
    return xt_fail(ctx, XT_DTYPE, "%s is %s, wanted i32 or i64", name,
                   xt_describe(t, text, sizeof text));
}

/* The rows that give gradients take (index, grad), the dimension, and the shape of x. */
static const struct xt_param grad_params[] = {{.name = "index"},
                                              {.name = "grad"},
                                              {.name = "along", .kind = XT_P_INT},
                                              {.name = "shape", .kind = XT_P_SHAPE},
                                              {0}};

static enum xt_status grad_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    return xt_output_sized(ctx, args, 1, args->inputs[1]->dtype, outputs);
}

static enum xt_status run_grad(struct xt_ctx *ctx, const struct xt_op *op, struct xt_tensor *index,
                               struct xt_tensor *grad, int64_t dim, const struct xt_spec *x,
                               struct xt_tensor **out) {
    struct xt_tensor *in[2] = {index, grad};
    struct xt_args args;
    xt_args_init(&args, op, in, 2);
    args.attrs[0].i = dim;
    xt_args_list(&args, 1, x->shape, x->ndim);
    return xt_call_run(ctx, op, &args, out);
}

static const struct xt_op xt_op_index_select_grad = {
    .name = "index_select_grad",
    .doc = "zeros of a shape, with grad's slice i along one dimension added at index[i]",
    .params = grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .infer = grad_infer,
};

static const struct xt_op xt_op_gather_grad = {
    .name = "gather_grad",
    .doc = "zeros of a shape, with each element of grad added where gather read it",
    .params = grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .infer = grad_infer,
};

/* ---- index_select, gather -------------------------------------------------------------------- */

static enum xt_status index_select_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                         const struct xt_args *args, struct xt_output *outputs) {
    const struct xt_tensor *x = args->inputs[0], *index = args->inputs[1];
    if (x->ndim == 0) return xt_fail(ctx, XT_SHAPE, "x has no dimensions");
    XT_TRY(want_positions(ctx, "index", index));
    XT_TRY(xt_want_ndim(ctx, op, "index", index, 1));
    xt_output_like(outputs, x);
    outputs->spec.shape[args->attrs[0].i] = index->shape[0];
    return XT_OK;
}

static enum xt_status index_select_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return run_grad(ctx, &xt_op_index_select_grad, g->in[1], g->grad_out[0],
                    xt_call_attrs(g->call)[0].i, &g->in_spec[0], &g->grad_in[0]);
}

static const struct xt_param index_params[] = {
    {.name = "x"}, {.name = "dim", .kind = XT_P_DIM}, {.name = "index"}, {0}};

static const struct xt_op xt_op_index_select = {
    .name = "index_select",
    .doc = "x's slices along dim at the positions in index (n), counted from 0",
    .params = index_params,
    .n_outputs = 1,
    .keeps_in = 2,
    .infer = index_select_infer,
    .backward = index_select_back,
};

static enum xt_status gather_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    char a[TEXT_BYTES], b[TEXT_BYTES];
    const struct xt_tensor *x = args->inputs[0], *index = args->inputs[1];
    bool fits = x->ndim == index->ndim;
    XT_TRY(want_positions(ctx, "index", index));
    for (int d = 0; fits && d < x->ndim; d++)
        fits = d == args->attrs[0].i || index->shape[d] <= x->shape[d];
    if (!fits)
        return xt_fail(ctx, XT_SHAPE,
                       "index is %s, x is %s: sizes apart from dim may not be larger",
                       xt_describe(index, a, sizeof a), xt_describe(x, b, sizeof b));
    xt_output_like(outputs, index);
    outputs->spec.dtype = x->dtype;
    return XT_OK;
}

static enum xt_status gather_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return run_grad(ctx, &xt_op_gather_grad, g->in[1], g->grad_out[0], xt_call_attrs(g->call)[0].i,
                    &g->in_spec[0], &g->grad_in[0]);
}

static const struct xt_op xt_op_gather = {
    .name = "gather",
    .doc = "the shape of index: each element is x's at the same place, but at index along dim, "
           "counted from 0",
    .params = index_params,
    .n_outputs = 1,
    .keeps_in = 2,
    .infer = gather_infer,
    .backward = gather_back,
};

/* ---- index_copy_ ----------------------------------------------------------------------------- */

static enum xt_status index_copy_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                       const struct xt_args *args, struct xt_output *outputs) {
    (void)outputs;
    char a[TEXT_BYTES], b[TEXT_BYTES];
    const struct xt_tensor *x = args->inputs[0], *index = args->inputs[1], *src = args->inputs[2];
    if (x->ndim == 0) return xt_fail(ctx, XT_SHAPE, "x has no dimensions");
    XT_TRY(want_positions(ctx, "index", index));
    XT_TRY(xt_want_ndim(ctx, op, "index", index, 1));
    XT_TRY(xt_want_same_dtype(ctx, op, "x", x, "src", src));
    bool fits = x->ndim == src->ndim;
    for (int d = 0; fits && d < x->ndim; d++)
        fits = src->shape[d] == (d == args->attrs[0].i ? index->shape[0] : x->shape[d]);
    if (fits) return XT_OK;
    return xt_fail(ctx, XT_SHAPE, "src is %s, x is %s: wanted the shape of x with %lld along dim",
                   xt_describe(src, a, sizeof a), xt_describe(x, b, sizeof b),
                   (long long)index->shape[0]);
}

static const struct xt_param index_copy_params[] = {
    {.name = "x"}, {.name = "dim", .kind = XT_P_DIM}, {.name = "index"}, {.name = "src"}, {0}};

static const struct xt_op xt_op_index_copy = {
    .name = "index_copy_",
    .doc = "x's slices along dim at the positions in index (n), counted from 0, become those of "
           "src, in place, in order",
    .params = index_copy_params,
    .flags = XT_NO_GRADIENT,
    .dtypes = XT_ANY,
    .writes = 1,
    .infer = index_copy_infer,
};

/* ---- embedding ------------------------------------------------------------------------------- */

static enum xt_status embedding_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_output *outputs) {
    const struct xt_tensor *weight = args->inputs[0], *ids = args->inputs[1];
    XT_TRY(xt_want_ndim(ctx, op, "weight", weight, 2));
    XT_TRY(want_positions(ctx, "ids", ids));
    if (ids->ndim == XT_MAX_DIMS)
        return xt_fail(ctx, XT_SHAPE,
                       "ids has %d dimensions, the result would have one more than "
                       "possible",
                       ids->ndim);
    xt_output_like(outputs, ids);
    outputs->spec.dtype = weight->dtype;
    outputs->spec.shape[outputs->spec.ndim++] = weight->shape[1];
    return XT_OK;
}

/* Writes nothing but input 0: no output to describe. */
static enum xt_status nothing_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                    const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op, (void)args, (void)outputs;
    return XT_OK;
}

static const struct xt_param embedding_acc_params[] = {
    {.name = "target"}, {.name = "ids"}, {.name = "grad"}, {.name = "add", .kind = XT_P_BOOL}, {0}};

static const struct xt_op xt_op_embedding_acc = {
    .name = "embedding_acc",
    .doc = "target (V, D), zeroed first unless add: row ids[i] += grad[i], for ids (N), "
           "grad (N, D), i ascending",
    .params = embedding_acc_params,
    .n_outputs = 0,
    .flags = XT_INTERNAL,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_F64),
    .writes = 1,
    .infer = nothing_infer,
};

static enum xt_status embedding_back(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *target, *in[3] = {NULL};
    int64_t flat[2] = {1, g->in_spec[0].shape[1]};
    enum xt_status status = XT_OK;
    bool add;
    for (int d = 0; d < g->in_spec[1].ndim; d++) flat[0] *= g->in_spec[1].shape[d];
    XT_GO(xt_reshape(ctx, g->in[1], flat, 1, &in[1]));
    XT_GO(xt_reshape(ctx, g->grad_out[0], flat, 2, &in[2]));
    XT_GO(xt_grads_target(ctx, g, 0, &target, &add));
    if (target) {
        struct xt_args args;
        in[0] = xt_tensor_retain(target);
        xt_args_init(&args, &xt_op_embedding_acc, in, 3);
        args.attrs[0].i = add;
        XT_GO(xt_call_run(ctx, &xt_op_embedding_acc, &args, NULL));
    } else {
        XT_GO(run_grad(ctx, &xt_op_index_select_grad, in[1], in[2], 0, &g->in_spec[0],
                       &g->grad_in[0]));
    }
done:
    for (int i = 0; i < 3; i++) xt_tensor_release(ctx, in[i]);
    return status;
}

static const struct xt_param embedding_params[] = {{.name = "weight"}, {.name = "ids"}, {0}};

static const struct xt_op xt_op_embedding = {
    .name = "embedding",
    .doc = "weight (V, D), ids of any shape, counted from 0: row ids[...] of weight, (..., D)",
    .params = embedding_params,
    .n_outputs = 1,
    .keeps_in = 2,
    .infer = embedding_infer,
    .backward = embedding_back,
};

xt_op_list xt_ops_index = {
    &xt_op_index_select,      &xt_op_gather,      &xt_op_index_copy,    &xt_op_embedding,
    &xt_op_index_select_grad, &xt_op_gather_grad, &xt_op_embedding_acc, NULL,
};
