/*
 * view.c: views: ops that show the elements of their input in another way.
 *
 * A view has no kernel: its shape rule says where the output lies in the storage of input 0. The
 * gradient of a view is the opposite view of the gradient, or for a part of a tensor (slice,
 * select) the gradient put into zeros.
 */
#include "../op.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TEXT_BYTES 192

/* "2x3", or "scalar" for no dimensions; returns the buffer. */
static const char *shape_text(const int64_t *shape, int ndim, char *buffer) {
    size_t used = 0;
    if (ndim == 0) return "scalar";
    buffer[0] = 0;
    for (int d = 0; d < ndim && used < TEXT_BYTES; d++) {
        int n = snprintf(buffer + used, TEXT_BYTES - used, d ? "x%" PRId64 : "%" PRId64, shape[d]);
        used += (size_t)n;
    }
    return buffer;
}

/* A position as its user counts: from 1, or from the end as it was given. */
static int64_t shown(int64_t position) {
    return position < 0 ? position : position + 1;
}

static const int64_t *list_of(const struct xt_args *args, int attr, int *count) {
    *count = args->attrs[attr].list.count;
    return args->ints + args->attrs[attr].list.start;
}

/* Output 0 as the same view as input 0, for a shape rule to change. */
static void view_like(struct xt_output *output, const struct xt_tensor *x) {
    xt_spec_of(x, &output->spec);
    memcpy(output->stride, x->stride, sizeof output->stride);
    output->offset = x->offset;
}

/* Runs a row of this file that takes one tensor and one list. */
static enum xt_status run_list(struct xt_ctx *ctx, const struct xt_op *op, struct xt_tensor *x,
                               const int64_t *values, int n, struct xt_tensor **out) {
    struct xt_args args;
    xt_args_init(&args, op, &x, 1);
    xt_args_list(&args, 0, values, n);
    return xt_call_run(ctx, op, &args, out);
}

/* d(x) = d(y) in x's shape: for every op that only renames positions. */
static enum xt_status reshape_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return xt_reshape(ctx, g->grad_out[0], g->in_spec[0].shape, g->in_spec[0].ndim, &g->grad_in[0]);
}

/* ---- view, reshape --------------------------------------------------------------------------- */

/* Strides with which x's elements read in row-major order have another shape of the same size.
   False when no strides can: the elements must be copied first. */
static bool view_strides(const struct xt_tensor *x, const int64_t *shape, int ndim,
                         int64_t *stride) {
    if (xt_numel(x) == 0) {
        int64_t step = 1;
        for (int d = ndim - 1; d >= 0; d--) {
            stride[d] = step;
            step *= shape[d] > 1 ? shape[d] : 1;
        }
        return true;
    }
    /* From the end: each run of x's dimensions that lies evenly takes the new sizes it can hold. */
    int d = ndim - 1;
    int64_t base = 1, held = 1, given = 1; /* stride of the run, its elements, those given out */
    int last = x->ndim - 1;
    if (last >= 0) base = x->stride[last];
    for (int s = last; s >= 0; s--) {
        held *= x->shape[s];
        bool ends = s == 0 || (x->shape[s - 1] != 1 && x->stride[s - 1] != held * base);
        if (!ends) continue;
        while (d >= 0 && (given < held || shape[d] == 1)) {
            stride[d] = given * base;
            given *= shape[d];
            d--;
        }
        if (given != held) return false;
        if (s > 0) {
            base = x->stride[s - 1];
            held = given = 1;
        }
    }
    for (; d >= 0; d--) stride[d] = given * base; /* leading sizes of 1 */
    return true;
}

static enum xt_status view_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    int ndim;
    const int64_t *shape = list_of(args, 0, &ndim);
    const struct xt_tensor *x = args->inputs[0];
    view_like(outputs, x);
    outputs->spec.ndim = ndim;
    memcpy(outputs->spec.shape, shape, (size_t)ndim * sizeof *shape);
    if (!view_strides(x, shape, ndim, outputs->stride))
        return xt_fail(ctx, XT_SHAPE, "the elements do not lie so that a view can show them");
    return XT_OK;
}

static const struct xt_param view_params[] = {
    {.name = "x"}, {.name = "shape", .kind = XT_P_SHAPE}, {0}};

static const struct xt_op xt_op_view = {
    .name = "view",
    .doc = "x in another shape, sharing its bytes",
    .params = view_params,
    .n_outputs = 1,
    .flags = XT_VIEW | XT_INTERNAL,
    .infer = view_infer,
    .backward = reshape_back,
};

/* Fills in the size given as -1 and checks the number of elements. */
static enum xt_status resolve_shape(struct xt_ctx *ctx, const struct xt_tensor *x,
                                    const int64_t *shape, int ndim, int64_t *out) {
    char text[TEXT_BYTES], given[TEXT_BYTES];
    int64_t numel = xt_numel(x), product = 1;
    int inferred = -1;
    if (ndim > XT_MAX_DIMS)
        return xt_fail(ctx, XT_SHAPE, "shape has %d dimensions, at most %d are possible", ndim,
                       XT_MAX_DIMS);
    for (int d = 0; d < ndim; d++) {
        out[d] = shape[d];
        if (shape[d] == -1) {
            if (inferred >= 0)
                return xt_fail(ctx, XT_SHAPE, "shape %s has more than one -1",
                               shape_text(shape, ndim, text));
            inferred = d;
        } else if (shape[d] < 0 || __builtin_mul_overflow(product, shape[d], &product)) {
            return xt_fail(ctx, XT_SHAPE, "shape %s: size %" PRId64 " at place %d is no size",
                           shape_text(shape, ndim, text), shape[d], d + 1);
        }
    }
    if (inferred >= 0) {
        if (product == 0)
            return xt_fail(ctx, XT_SHAPE, "shape %s: any size would do for -1",
                           shape_text(shape, ndim, text));
        out[inferred] = numel / product;
        product *= out[inferred];
    }
    if (product != numel)
        return xt_fail(ctx, XT_SHAPE, "shape %s does not hold the %" PRId64 " elements of x (%s)",
                       shape_text(shape, ndim, text), numel, xt_describe(x, given, sizeof given));
    return XT_OK;
}

static enum xt_status reshape_compose(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_tensor **outputs) {
    (void)op;
    int64_t shape[XT_MAX_DIMS], stride[XT_MAX_DIMS];
    int ndim;
    const int64_t *given = list_of(args, 0, &ndim);
    struct xt_tensor *x = args->inputs[0];
    XT_TRY(resolve_shape(ctx, x, given, ndim, shape));
    if (view_strides(x, shape, ndim, stride))
        return run_list(ctx, &xt_op_view, x, shape, ndim, outputs);
    struct xt_tensor *copy;
    XT_TRY(xt_contiguous(ctx, x, &copy));
    enum xt_status status = run_list(ctx, &xt_op_view, copy, shape, ndim, outputs);
    xt_tensor_release(ctx, copy);
    return status;
}

static const struct xt_op xt_op_reshape = {
    .name = "reshape",
    .doc = "x's elements, row by row, in another shape; one size may be -1. A view where "
           "x's strides allow it, else a copy",
    .params = view_params,
    .n_outputs = 1,
    .flags = XT_COMPOSED,
    .compose = reshape_compose,
};

/* ---- transpose, permute ---------------------------------------------------------------------- */

static enum xt_status transpose_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    const struct xt_tensor *x = args->inputs[0];
    int64_t a = args->attrs[0].i, b = args->attrs[1].i;
    view_like(outputs, x);
    if (x->ndim == 0) return XT_OK;
    outputs->spec.shape[a] = x->shape[b];
    outputs->spec.shape[b] = x->shape[a];
    outputs->stride[a] = x->stride[b];
    outputs->stride[b] = x->stride[a];
    return XT_OK;
}

static enum xt_status transpose_back(struct xt_ctx *ctx, struct xt_grads *g) {
    const union xt_attr *attrs = xt_call_attrs(g->call);
    return xt_transpose(ctx, g->grad_out[0], (int)attrs[0].i, (int)attrs[1].i, &g->grad_in[0]);
}

static const struct xt_param transpose_params[] = {
    {.name = "x"}, {.name = "d1", .kind = XT_P_DIM}, {.name = "d2", .kind = XT_P_DIM}, {0}};

static const struct xt_op xt_op_transpose = {
    .name = "transpose",
    .doc = "x with dimensions d1 and d2 swapped; a view",
    .params = transpose_params,
    .n_outputs = 1,
    .flags = XT_VIEW,
    .infer = transpose_infer,
    .backward = transpose_back,
};

/* Fills order with the dims counted from 0, each once. The list is of kind SHAPE because its order
   matters; the binding knows it by the name "dims" and counts from 0. */
static enum xt_status permute_order(struct xt_ctx *ctx, const int64_t *dims, int n, int ndim,
                                    int *order) {
    unsigned seen = 0;
    if (n != ndim) return xt_fail(ctx, XT_SHAPE, "dims lists %d dimensions, x has %d", n, ndim);
    for (int i = 0; i < n; i++) {
        int64_t d = dims[i] < 0 ? dims[i] + ndim : dims[i];
        if (d < 0 || d >= ndim)
            return xt_fail(ctx, XT_ARGUMENT, "dims[%d] is %" PRId64 ", x has %d dimensions", i + 1,
                           shown(dims[i]), ndim);
        if (seen & 1u << d)
            return xt_fail(ctx, XT_ARGUMENT, "dims names dimension %d twice", (int)d + 1);
        seen |= 1u << d;
        order[i] = (int)d;
    }
    return XT_OK;
}

static enum xt_status permute_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                    const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    int n, order[XT_MAX_DIMS];
    const int64_t *dims = list_of(args, 0, &n);
    const struct xt_tensor *x = args->inputs[0];
    XT_TRY(permute_order(ctx, dims, n, x->ndim, order));
    view_like(outputs, x);
    for (int i = 0; i < n; i++) {
        outputs->spec.shape[i] = x->shape[order[i]];
        outputs->stride[i] = x->stride[order[i]];
    }
    return XT_OK;
}

static enum xt_status permute_back(struct xt_ctx *ctx, struct xt_grads *g);

static const struct xt_param permute_params[] = {
    {.name = "x"}, {.name = "dims", .kind = XT_P_SHAPE}, {0}};

static const struct xt_op xt_op_permute = {
    .name = "permute",
    .doc = "x with its dimensions in the order of dims, each named once; a view",
    .params = permute_params,
    .n_outputs = 1,
    .flags = XT_VIEW,
    .infer = permute_infer,
    .backward = permute_back,
};

static enum xt_status permute_back(struct xt_ctx *ctx, struct xt_grads *g) {
    const union xt_attr *attrs = xt_call_attrs(g->call);
    const int64_t *dims = xt_call_ints(g->call) + attrs[0].list.start;
    int n = attrs[0].list.count, order[XT_MAX_DIMS];
    int64_t back[XT_MAX_DIMS];
    XT_TRY(permute_order(ctx, dims, n, g->in_spec[0].ndim, order));
    for (int i = 0; i < n; i++) back[order[i]] = i;
    return run_list(ctx, &xt_op_permute, g->grad_out[0], back, n, &g->grad_in[0]);
}

/* ---- slice, select --------------------------------------------------------------------------- */

static enum xt_status slice_grad_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                       const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    return xt_output_sized(ctx, args, 0, args->inputs[0]->dtype, outputs);
}

static const struct xt_param slice_grad_params[] = {{.name = "grad"},
                                                    {.name = "shape", .kind = XT_P_SHAPE},
                                                    {.name = "along", .kind = XT_P_INT},
                                                    {.name = "start", .kind = XT_P_INT},
                                                    {0}};

static const struct xt_op xt_op_slice_grad = {
    .name = "slice_grad",
    .doc = "zeros of a shape, holding grad from start on along one dimension",
    .params = slice_grad_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .infer = slice_grad_infer,
};

static enum xt_status into_zeros(struct xt_ctx *ctx, struct xt_tensor *grad,
                                 const struct xt_spec *spec, int64_t dim, int64_t start,
                                 struct xt_tensor **out) {
    struct xt_args args;
    xt_args_init(&args, &xt_op_slice_grad, &grad, 1);
    xt_args_list(&args, 0, spec->shape, spec->ndim);
    args.attrs[1].i = dim;
    args.attrs[2].i = start;
    return xt_call_run(ctx, &xt_op_slice_grad, &args, out);
}

static enum xt_status slice_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                  const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    char text[TEXT_BYTES];
    const struct xt_tensor *x = args->inputs[0];
    int64_t dim = args->attrs[0].i, first = args->attrs[1].i, last = args->attrs[2].i;
    if (x->ndim == 0) return xt_fail(ctx, XT_SHAPE, "x has no dimensions");
    int64_t size = x->shape[dim];
    int64_t from = first < 0 ? first + size : first, to = last < 0 ? last + size : last;
    if (from < 0 || from > size || to >= size || to < from - 1)
        return xt_fail(ctx, XT_ARGUMENT,
                       "first is %" PRId64 ", last is %" PRId64 ", dim %" PRId64
                       " has size %" PRId64 " (%s)",
                       shown(first), shown(last), dim + 1, size, xt_describe(x, text, sizeof text));
    view_like(outputs, x);
    outputs->spec.shape[dim] = to - from + 1;
    outputs->offset += from * x->stride[dim];
    return XT_OK;
}

static enum xt_status slice_back(struct xt_ctx *ctx, struct xt_grads *g) {
    const union xt_attr *attrs = xt_call_attrs(g->call);
    const struct xt_spec *spec = &g->in_spec[0];
    int64_t dim = attrs[0].i, first = attrs[1].i;
    if (first < 0) first += spec->shape[dim];
    return into_zeros(ctx, g->grad_out[0], spec, dim, first, &g->grad_in[0]);
}

static const struct xt_param slice_params[] = {
    {.name = "x"},
    {.name = "dim", .kind = XT_P_DIM},
    {.name = "first", .kind = XT_P_INT, .optional = true, .fallback = 0},
    {.name = "last", .kind = XT_P_INT, .optional = true, .fallback = -1},
    {0}};

static const struct xt_op xt_op_slice = {
    .name = "slice",
    .doc = "the part of x from first to last, both included, along dim; negative counts from the "
           "end; a view",
    .params = slice_params,
    .n_outputs = 1,
    .flags = XT_VIEW,
    .infer = slice_infer,
    .backward = slice_back,
};

static enum xt_status select_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    char text[TEXT_BYTES];
    const struct xt_tensor *x = args->inputs[0];
    int64_t dim = args->attrs[0].i, i = args->attrs[1].i;
    if (x->ndim == 0) return xt_fail(ctx, XT_SHAPE, "x has no dimensions");
    int64_t size = x->shape[dim], at = i < 0 ? i + size : i;
    if (at < 0 || at >= size)
        return xt_fail(ctx, XT_ARGUMENT,
                       "i is %" PRId64 ", dim %" PRId64 " has size %" PRId64 " (%s)", shown(i),
                       dim + 1, size, xt_describe(x, text, sizeof text));
    view_like(outputs, x);
    outputs->offset += at * x->stride[dim];
    outputs->spec.ndim--;
    for (int d = (int)dim; d < outputs->spec.ndim; d++) {
        outputs->spec.shape[d] = x->shape[d + 1];
        outputs->stride[d] = x->stride[d + 1];
    }
    return XT_OK;
}

static enum xt_status select_back(struct xt_ctx *ctx, struct xt_grads *g) {
    const union xt_attr *attrs = xt_call_attrs(g->call);
    struct xt_spec one = g->in_spec[0];
    int64_t dim = attrs[0].i, i = attrs[1].i;
    struct xt_tensor *grad;
    if (i < 0) i += one.shape[dim];
    one.shape[dim] = 1;
    XT_TRY(xt_reshape(ctx, g->grad_out[0], one.shape, one.ndim, &grad));
    enum xt_status status = into_zeros(ctx, grad, &g->in_spec[0], dim, i, &g->grad_in[0]);
    xt_tensor_release(ctx, grad);
    return status;
}

static const struct xt_param select_params[] = {
    {.name = "x"}, {.name = "dim", .kind = XT_P_DIM}, {.name = "i", .kind = XT_P_INT}, {0}};

static const struct xt_op xt_op_select = {
    .name = "select",
    .doc = "x at position i of dim, without that dimension; negative counts from the end; a view",
    .params = select_params,
    .n_outputs = 1,
    .flags = XT_VIEW,
    .infer = select_infer,
    .backward = select_back,
};

/* ---- expand, unsqueeze, squeeze -------------------------------------------------------------- */

static enum xt_status expand_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    char text[TEXT_BYTES], given[TEXT_BYTES];
    int ndim;
    const int64_t *shape = list_of(args, 0, &ndim);
    const struct xt_tensor *x = args->inputs[0];
    int extra = ndim - x->ndim;
    bool fits = extra >= 0 && ndim <= XT_MAX_DIMS;
    view_like(outputs, x);
    outputs->spec.ndim = ndim;
    for (int d = ndim - 1; fits && d >= 0; d--) {
        int64_t have = d < extra ? 1 : x->shape[d - extra], want = shape[d];
        if (want == -1 && d >= extra) want = have;
        fits = want >= 0 && (want == have || have == 1);
        outputs->spec.shape[d] = want;
        outputs->stride[d] = d < extra || have != want ? 0 : x->stride[d - extra];
    }
    if (!fits)
        return xt_fail(ctx, XT_SHAPE, "x (%s) does not expand to %s: only sizes of 1 grow",
                       xt_describe(x, given, sizeof given), shape_text(shape, ndim, text));
    return XT_OK;
}

static enum xt_status expand_back(struct xt_ctx *ctx, struct xt_grads *g) {
    (void)ctx;
    g->grad_in[0] = xt_tensor_retain(g->grad_out[0]); /* the tape sums it down */
    return XT_OK;
}

static const struct xt_op xt_op_expand = {
    .name = "expand",
    .doc = "x repeated without a copy: sizes of 1 and new leading dimensions grow to shape; -1 "
           "keeps a size; a view",
    .params = view_params,
    .n_outputs = 1,
    .flags = XT_VIEW,
    .infer = expand_infer,
    .backward = expand_back,
};

static enum xt_status unsqueeze_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    const struct xt_tensor *x = args->inputs[0];
    int dim = (int)args->attrs[0].i;
    if (x->ndim == XT_MAX_DIMS)
        return xt_fail(ctx, XT_SHAPE, "x already has %d dimensions, the most possible", x->ndim);
    view_like(outputs, x);
    outputs->spec.ndim++;
    for (int d = x->ndim; d > dim; d--) {
        outputs->spec.shape[d] = x->shape[d - 1];
        outputs->stride[d] = x->stride[d - 1];
    }
    outputs->spec.shape[dim] = 1;
    outputs->stride[dim] = dim < x->ndim ? x->shape[dim] * x->stride[dim] : 1;
    return XT_OK;
}

static const struct xt_param unsqueeze_params[] = {
    {.name = "x"}, {.name = "dim", .kind = XT_P_DIM}, {0}};

static const struct xt_op xt_op_unsqueeze = {
    .name = "unsqueeze",
    .doc = "x with a new dimension of size 1 at dim; a view",
    .params = unsqueeze_params,
    .n_outputs = 1,
    .flags = XT_VIEW | XT_NEW_DIM,
    .infer = unsqueeze_infer,
    .backward = reshape_back,
};

static enum xt_status squeeze_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                    const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx, (void)op;
    int n;
    const int64_t *dims = list_of(args, 0, &n);
    const struct xt_tensor *x = args->inputs[0];
    unsigned named = n ? 0 : ~0u;
    for (int i = 0; i < n; i++) named |= 1u << dims[i];
    view_like(outputs, x);
    outputs->spec.ndim = 0;
    for (int d = 0; d < x->ndim; d++) {
        if (x->shape[d] == 1 && named & 1u << d) continue;
        outputs->spec.shape[outputs->spec.ndim] = x->shape[d];
        outputs->stride[outputs->spec.ndim++] = x->stride[d];
    }
    return XT_OK;
}

static const struct xt_param squeeze_params[] = {
    {.name = "x"}, {.name = "dims", .kind = XT_P_DIMS, .optional = true}, {0}};

static const struct xt_op xt_op_squeeze = {
    .name = "squeeze",
    .doc = "x without those of dims (all, when none is given) that have size 1; a view",
    .params = squeeze_params,
    .n_outputs = 1,
    .flags = XT_VIEW,
    .infer = squeeze_infer,
    .backward = reshape_back,
};

xt_op_list xt_ops_view = {
    &xt_op_reshape, &xt_op_transpose, &xt_op_permute, &xt_op_slice, &xt_op_select,
    &xt_op_expand,  &xt_op_unsqueeze, &xt_op_squeeze, &xt_op_view,  &xt_op_slice_grad,
    NULL,
};
