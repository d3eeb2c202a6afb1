/* apply.c: calling ops from C, for backward rules, composed ops and shape rules. */
#include <assert.h>
#include <string.h>

#include "context.h"

enum xt_status xt_apply(struct xt_ctx *ctx, const struct xt_op *op, struct xt_tensor *const *inputs,
                        int n_inputs, struct xt_tensor **outputs) {
    struct xt_args args;
    xt_args_init(&args, op, inputs, n_inputs);
    return xt_call_run(ctx, op, &args, outputs);
}

static const struct xt_op *find(struct xt_ctx *ctx, const char *name) {
    const struct xt_op *op = xt_op_find(ctx, name);
    assert(op);
    return op;
}

enum xt_status xt_apply_name(struct xt_ctx *ctx, const char *name, struct xt_tensor *const *inputs,
                             int n_inputs, struct xt_tensor **outputs) {
    return xt_apply(ctx, find(ctx, name), inputs, n_inputs, outputs);
}

enum xt_status xt_unary(struct xt_ctx *ctx, const char *name, struct xt_tensor *x,
                        struct xt_tensor **out) {
    return xt_apply_name(ctx, name, &x, 1, out);
}

enum xt_status xt_binary(struct xt_ctx *ctx, const char *name, struct xt_tensor *a,
                         struct xt_tensor *b, struct xt_tensor **out) {
    return xt_apply_name(ctx, name, (struct xt_tensor *[]){a, b}, 2, out);
}

enum xt_status xt_scale(struct xt_ctx *ctx, struct xt_tensor *x, double by,
                        struct xt_tensor **out) {
    struct xt_tensor *factor;
    XT_TRY(xt_tensor_scalar(ctx, by, x->dtype, x->storage->device, &factor));
    enum xt_status status = xt_binary(ctx, "mul", x, factor, out);
    xt_tensor_release(ctx, factor);
    return status;
}

enum xt_status xt_cast(struct xt_ctx *ctx, struct xt_tensor *x, enum xt_dtype dtype,
                       struct xt_tensor **out) {
    if (x->dtype == dtype) {
        *out = xt_tensor_retain(x);
        return XT_OK;
    }
    const struct xt_op *op = find(ctx, "cast");
    struct xt_args args;
    xt_args_init(&args, op, &x, 1);
    args.attrs[0].i = dtype;
    return xt_call_run(ctx, op, &args, out);
}

enum xt_status xt_contiguous(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor **out) {
    if (xt_is_contiguous(x)) {
        *out = xt_tensor_retain(x);
        return XT_OK;
    }
    return xt_unary(ctx, "contiguous", x, out);
}

static enum xt_status with_shape(struct xt_ctx *ctx, const char *name, struct xt_tensor *x,
                                 const int64_t *shape, int ndim, struct xt_tensor **out) {
    const struct xt_op *op = find(ctx, name);
    struct xt_args args;
    xt_args_init(&args, op, &x, 1);
    xt_args_list(&args, 0, shape, ndim);
    return xt_call_run(ctx, op, &args, out);
}

enum xt_status xt_reshape(struct xt_ctx *ctx, struct xt_tensor *x, const int64_t *shape, int ndim,
                          struct xt_tensor **out) {
    return with_shape(ctx, "reshape", x, shape, ndim, out);
}

enum xt_status xt_expand(struct xt_ctx *ctx, struct xt_tensor *x, const int64_t *shape, int ndim,
                         struct xt_tensor **out) {
    return with_shape(ctx, "expand", x, shape, ndim, out);
}

enum xt_status xt_transpose(struct xt_ctx *ctx, struct xt_tensor *x, int d1, int d2,
                            struct xt_tensor **out) {
    const struct xt_op *op = find(ctx, "transpose");
    struct xt_args args;
    xt_args_init(&args, op, &x, 1);
    args.attrs[0].i = d1;
    args.attrs[1].i = d2;
    return xt_call_run(ctx, op, &args, out);
}

enum xt_status xt_sum_to(struct xt_ctx *ctx, struct xt_tensor *x, const int64_t *shape, int ndim,
                         struct xt_tensor **out) {
    if (xt_has_shape(x, shape, ndim)) {
        *out = xt_tensor_retain(x);
        return XT_OK;
    }
    int64_t dims[XT_MAX_DIMS];
    int n = 0, lead = x->ndim - ndim;
    assert(lead >= 0);
    for (int d = 0; d < x->ndim; d++)
        if (d < lead || (shape[d - lead] == 1 && x->shape[d] != 1)) dims[n++] = d;
    const struct xt_op *op = find(ctx, "sum");
    struct xt_args args;
    xt_args_init(&args, op, &x, 1);
    if (n) xt_args_list(&args, 0, dims, n);
    struct xt_tensor *sum;
    if (n)
        XT_TRY(xt_call_run(ctx, op, &args, &sum));
    else
        sum = xt_tensor_retain(x);
    enum xt_status status = XT_OK;
    if (xt_has_shape(sum, shape, ndim))
        *out = xt_tensor_retain(sum);
    else
        status = xt_reshape(ctx, sum, shape, ndim, out);
    xt_tensor_release(ctx, sum);
    return status;
}

enum xt_status xt_full(struct xt_ctx *ctx, const struct xt_spec *spec, enum xt_device device,
                       double value, struct xt_tensor **out) {
    struct xt_tensor *t;
    XT_TRY(xt_tensor_new(ctx, spec, device, &t));
    const struct xt_op *op = find(ctx, "fill_");
    struct xt_args args;
    xt_args_init(&args, op, &t, 1);
    args.attrs[0].f = value;
    enum xt_status status = xt_call_run(ctx, op, &args, NULL);
    if (status == XT_OK)
        *out = t;
    else
        xt_tensor_release(ctx, t);
    return status;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

enum xt_status xt_broadcast(struct xt_ctx *ctx, const struct xt_op *op, const struct xt_tensor *a,
                            const struct xt_tensor *b, struct xt_spec *out) {
    int ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
    *out = (struct xt_spec){.dtype = a->dtype, .ndim = ndim};
    for (int d = 0; d < ndim; d++) {
        int da = d - (ndim - a->ndim), db = d - (ndim - b->ndim);
        int64_t na = da < 0 ? 1 : a->shape[da], nb = db < 0 ? 1 : b->shape[db];
        if (na != nb && na != 1 && nb != 1) {
            char ta[128], tb[128];
            return xt_fail(ctx, XT_SHAPE,
                           "%s is %s, %s is %s: sizes %lld and %lld do not "
                           "broadcast",
                           op->params[0].name, xt_describe(a, ta, sizeof ta), op->params[1].name,
                           xt_describe(b, tb, sizeof tb), (long long)na, (long long)nb);
        }
        out->shape[d] = na == 1 ? nb : na;
    }
    return XT_OK;
}

enum xt_status xt_want_ndim(struct xt_ctx *ctx, const struct xt_op *op, const char *name,
                            const struct xt_tensor *t, int ndim) {
    (void)op;
    char text[128];
    if (t->ndim == ndim) return XT_OK;
    return xt_fail(ctx, XT_SHAPE, "%s is %s, wanted %d dimension%s", name,
                   xt_describe(t, text, sizeof text), ndim, ndim == 1 ? "" : "s");
}

enum xt_status xt_want_dtype(struct xt_ctx *ctx, const struct xt_op *op, const char *name,
                             const struct xt_tensor *t, enum xt_dtype dtype) {
    (void)op;
    char text[128];
    if (t->dtype == dtype) return XT_OK;
    return xt_fail(ctx, XT_DTYPE, "%s is %s, wanted %s", name, xt_describe(t, text, sizeof text),
                   xt_dtype_name(dtype));
}

enum xt_status xt_want_same_dtype(struct xt_ctx *ctx, const struct xt_op *op, const char *a_name,
                                  const struct xt_tensor *a, const char *b_name,
                                  const struct xt_tensor *b) {
    (void)op;
    if (a->dtype == b->dtype) return XT_OK;
    return xt_fail(ctx, XT_DTYPE, "%s is %s and %s is %s: cast one of them", a_name,
                   xt_dtype_name(a->dtype), b_name, xt_dtype_name(b->dtype));
}

void xt_output_like(struct xt_output *output, const struct xt_tensor *t) {
    xt_spec_of(t, &output->spec);
}

enum xt_status xt_infer_like(struct xt_ctx *ctx, const struct xt_op *op, const struct xt_args *args,
                             struct xt_output *outputs) {
    (void)ctx, (void)op;
    xt_output_like(outputs, args->inputs[0]);
    return XT_OK;
}

enum xt_status xt_output_sized(struct xt_ctx *ctx, const struct xt_args *args, int attr,
                               enum xt_dtype dtype, struct xt_output *output) {
    int ndim = args->attrs[attr].list.count;
    const int64_t *shape = args->ints + args->attrs[attr].list.start;
    if (ndim > XT_MAX_DIMS)
        return xt_fail(ctx, XT_SHAPE, "shape has %d dimensions, at most %d are possible", ndim,
                       XT_MAX_DIMS);
    for (int d = 0; d < ndim; d++)
        if (shape[d] < 0)
            return xt_fail(ctx, XT_SHAPE, "size %d of shape is %lld, wanted 0 or more", d + 1,
                           (long long)shape[d]);
    output->spec.dtype = dtype;
    output->spec.ndim = ndim;
    memcpy(output->spec.shape, shape, (size_t)ndim * sizeof *shape);
    return XT_OK;
}
