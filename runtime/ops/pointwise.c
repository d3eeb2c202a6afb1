/*
 * pointwise.c: the rows of the elementwise ops, most of them expanded from kernels/pointwise.def.
 *
 * A row there makes two or three ops here: NAME, and the internal ones that compute its
 * derivatives, NAME_grad (g, x, y), or NAME_grad_a and NAME_grad_b (g, a, b, y), with NULL for what
 * is not kept.
 */
#include "../op.h"

#include <math.h>
#include <string.h>

/* What a derivative needs kept. */
enum keeps { XT_NOTHING = 0, XT_A = 1, XT_B = 2, XT_X = XT_A, XT_Y = 4 };

#define KEEPS_IN(keeps) ((unsigned)(keeps)&3u)
#define KEEPS_OUT(keeps) ((unsigned)(keeps) >> 2)

/* ---- shape rules ----------------------------------------------------------------------------- */

static enum xt_status infer_like(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    (void)ctx;
    for (int k = 0; k < op->n_outputs; k++) xt_output_like(&outputs[k], args->inputs[0]);
    return XT_OK;
}

static enum xt_status same_dtype(struct xt_ctx *ctx, const struct xt_op *op, int a, int b,
                                 const struct xt_args *args) {
    char a_text[128], b_text[128];
    const struct xt_tensor *ta = args->inputs[a], *tb = args->inputs[b];
    if (ta->dtype == tb->dtype) return XT_OK;
    return xt_fail(ctx, XT_DTYPE,
                   "%s is %s, %s is %s: nothing is converted by itself, cast one of them",
                   op->params[a].name, xt_describe(ta, a_text, sizeof a_text), op->params[b].name,
                   xt_describe(tb, b_text, sizeof b_text));
}

static enum xt_status infer_broadcast(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_output *outputs) {
    XT_TRY(same_dtype(ctx, op, 0, 1, args));
    return xt_broadcast(ctx, op, args->inputs[0], args->inputs[1], &outputs[0].spec);
}

static enum xt_status infer_compare(struct xt_ctx *ctx, const struct xt_op *op,
                                    const struct xt_args *args, struct xt_output *outputs) {
    XT_TRY(infer_broadcast(ctx, op, args, outputs));
    outputs[0].spec.dtype = XT_U8;
    return XT_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dx, by the internal op `grad`, which takes the attributes of the op itself. */
static enum xt_status backward_unary(struct xt_ctx *ctx, struct xt_grads *g,
                                     const struct xt_op *grad) {
    struct xt_tensor *in[3] = {g->grad_out[0], g->in[0], g->out[0]};
    struct xt_args args;
    xt_args_init(&args, grad, in, 3);
    int k = 0;
    for (const struct xt_param *p = grad->params; p->name; p++)
        if (p->kind != XT_P_TENSOR) {
            args.attrs[k] = xt_call_attrs(g->call)[k];
            k++;
        }
    return xt_call_run(ctx, grad, &args, &g->grad_in[0]);
}

/* The derivative of input i; `passes`: it is the gradient itself. */
static enum xt_status backward_one(struct xt_ctx *ctx, struct xt_grads *g, int i, bool passes,
                                   const struct xt_op *grad) {
    if (!g->wants[i]) return XT_OK;
    if (passes) {
        g->grad_in[i] = xt_tensor_retain(g->grad_out[0]);
        return XT_OK;
    }
    struct xt_tensor *in[4] = {g->grad_out[0], g->in[0], g->in[1], g->out[0]};
    return xt_apply(ctx, grad, in, 4, &g->grad_in[i]);
}

/* Both derivatives by one op. */
static enum xt_status backward_both(struct xt_ctx *ctx, struct xt_grads *g,
                                    const struct xt_op *grad) {
    struct xt_tensor *in[3] = {g->grad_out[0], g->in[0], g->in[1]}, *out[2];
    XT_TRY(xt_apply(ctx, grad, in, 3, out));
    for (int i = 0; i < 2; i++) {
        if (g->wants[i])
            g->grad_in[i] = out[i];
        else
            xt_tensor_release(ctx, out[i]);
    }
    return XT_OK;
}

/* ---- rows from pointwise.def ----------------------------------------------------------------- */

#define TENSOR(text)                                                                               \
    { .name = text, .kind = XT_P_TENSOR }
#define KEPT(text)                                                                                 \
    { .name = text, .kind = XT_P_TENSOR, .optional = true }

static const struct xt_param params_x[] = {TENSOR("x"), {0}};
static const struct xt_param params_ab[] = {TENSOR("a"), TENSOR("b"), {0}};
static const struct xt_param params_grad_x[] = {TENSOR("g"), KEPT("x"), KEPT("y"), {0}};
static const struct xt_param params_grad_ab[] = {TENSOR("g"), KEPT("a"), KEPT("b"), KEPT("y"), {0}};

/* An internal op that computes derivatives. */
#define GRAD_ROW(symbol, text, parameters, outputs)                                                \
    static const struct xt_op xt_op_##symbol = {                                                   \
        .name = #symbol,                                                                           \
        .doc = text,                                                                               \
        .params = parameters,                                                                      \
        .n_outputs = outputs,                                                                      \
        .flags = XT_INTERNAL,                                                                      \
        .dtypes = XT_FLOATS,                                                                       \
        .infer = infer_like,                                                                       \
    };

#define UNARY_ROW(symbol, text, kept, types, parameters, grad_parameters)                          \
    GRAD_ROW(symbol##_grad, "the gradient of x in " #symbol, grad_parameters, 1)                   \
    static enum xt_status backward_##symbol(struct xt_ctx *ctx, struct xt_grads *g) {              \
        return backward_unary(ctx, g, &xt_op_##symbol##_grad);                                     \
    }                                                                                              \
    static const struct xt_op xt_op_##symbol = {                                                   \
        .name = #symbol,                                                                           \
        .doc = text,                                                                               \
        .params = parameters,                                                                      \
        .n_outputs = 1,                                                                            \
        .dtypes = types,                                                                           \
        .keeps_in = KEEPS_IN(kept),                                                                \
        .keeps_out = KEEPS_OUT(kept),                                                              \
        .infer = infer_like,                                                                       \
        .backward = backward_##symbol,                                                             \
    };

#define XT_UNARY(name, doc, keeps, y, dx)                                                          \
    UNARY_ROW(name, doc, keeps, XT_FLOATS, params_x, params_grad_x)
#define XT_UNARY_ANY(name, doc, keeps, y, int_y, dx)                                               \
    UNARY_ROW(name, doc, keeps, XT_ANY, params_x, params_grad_x)

#define CHOICE(text, of)                                                                           \
    { .name = text, .kind = XT_P_CHOICE, .optional = true, .named = true, .choices = of }
#define XT_CHOICE(name, doc, keeps, attribute, choices, y_0, dx_0, y_1, dx_1)                      \
    static const struct xt_param params_##name[] = {                                               \
        TENSOR("x"), CHOICE(#attribute, choices), {0}};                                            \
    static const struct xt_param params_##name##_grad[] = {                                        \
        TENSOR("g"), KEPT("x"), KEPT("y"), CHOICE(#attribute, choices), {0}};                      \
    UNARY_ROW(name, doc, keeps, XT_FLOATS, params_##name, params_##name##_grad)

#define NUMBER(text)                                                                               \
    { .name = text, .kind = XT_P_REAL }
#define XT_BOUNDED(name, doc, keeps, first, second, y, dx)                                         \
    static const struct xt_param params_##name[] = {                                               \
        TENSOR("x"), NUMBER(#first), NUMBER(#second), {0}};                                        \
    static const struct xt_param params_##name##_grad[] = {                                        \
        TENSOR("g"), KEPT("x"), KEPT("y"), NUMBER(#first), NUMBER(#second), {0}};                  \
    UNARY_ROW(name, doc, keeps, XT_FLOATS, params_##name, params_##name##_grad)

#define PASSES(derivative) (strcmp(#derivative, "g") == 0)

#define BINARY_OP(symbol, text, keeps_a, keeps_b, types, parameters)                               \
    static const struct xt_op xt_op_##symbol = {                                                   \
        .name = #symbol,                                                                           \
        .doc = text,                                                                               \
        .params = parameters,                                                                      \
        .n_outputs = 1,                                                                            \
        .dtypes = types,                                                                           \
        .keeps_in = KEEPS_IN((keeps_a) | (keeps_b)),                                               \
        .keeps_out = KEEPS_OUT((keeps_a) | (keeps_b)),                                             \
        .keeps_for = {KEEPS_IN(keeps_a), KEEPS_IN(keeps_b)},                                       \
        .infer = infer_broadcast,                                                                  \
        .backward = backward_##symbol,                                                             \
    };
#define BINARY_ROW(symbol, text, keeps_a, keeps_b, types, da, db)                                  \
    GRAD_ROW(symbol##_grad_a, "the gradient of a in " #symbol, params_grad_ab, 1)                  \
    GRAD_ROW(symbol##_grad_b, "the gradient of b in " #symbol, params_grad_ab, 1)                  \
    static enum xt_status backward_##symbol(struct xt_ctx *ctx, struct xt_grads *g) {              \
        XT_TRY(backward_one(ctx, g, 0, PASSES(da), &xt_op_##symbol##_grad_a));                     \
        return backward_one(ctx, g, 1, PASSES(db), &xt_op_##symbol##_grad_b);                      \
    }                                                                                              \
    BINARY_OP(symbol, text, keeps_a, keeps_b, types, params_ab)

#define XT_BINARY(name, doc, keeps_a, keeps_b, y, da, db)                                          \
    BINARY_ROW(name, doc, keeps_a, keeps_b, XT_FLOATS, da, db)
#define XT_BINARY_ANY(name, doc, keeps_a, keeps_b, y, int_y, da, db)                               \
    BINARY_ROW(name, doc, keeps_a, keeps_b, XT_ANY, da, db)

#define XT_BINARY_BOTH(name, a, b, doc, keeps_a, keeps_b, y, da, db)                               \
    static const struct xt_param params_##name[] = {TENSOR(#a), TENSOR(#b), {0}};                  \
    static const struct xt_param params_##name##_grad[] = {TENSOR("g"), KEPT(#a), KEPT(#b), {0}};  \
    GRAD_ROW(name##_grad, "the gradients of " #a " and " #b " in " #name, params_##name##_grad, 2) \
    static enum xt_status backward_##name(struct xt_ctx *ctx, struct xt_grads *g) {                \
        return backward_both(ctx, g, &xt_op_##name##_grad);                                        \
    }                                                                                              \
    BINARY_OP(name, doc, keeps_a, keeps_b, XT_FLOATS, params_##name)

#define XT_COMPARE(symbol, text, y)                                                                \
    static const struct xt_op xt_op_##symbol = {                                                   \
        .name = #symbol,                                                                           \
        .doc = text,                                                                               \
        .params = params_ab,                                                                       \
        .n_outputs = 1,                                                                            \
        .flags = XT_NO_GRADIENT,                                                                   \
        .dtypes = XT_ANY,                                                                          \
        .infer = infer_compare,                                                                    \
    };

#include "../../kernels/pointwise.def"

/* ---- where, masked_fill ---------------------------------------------------------------------- */

static enum xt_status infer_where(struct xt_ctx *ctx, const struct xt_op *op,
                                  const struct xt_args *args, struct xt_output *outputs) {
    const struct xt_tensor *cond = args->inputs[0], *a = args->inputs[1], *b = args->inputs[2];
    XT_TRY(same_dtype(ctx, op, 1, 2, args));
    struct xt_spec ab;
    struct xt_op naming = *op; /* xt_broadcast names the first two parameters */
    naming.params = op->params + 1;
    XT_TRY(xt_broadcast(ctx, &naming, a, b, &ab));
    struct xt_tensor both = {.dtype = ab.dtype, .ndim = ab.ndim};
    memcpy(both.shape, ab.shape, sizeof both.shape);
    XT_TRY(xt_broadcast(ctx, op, cond, &both, &outputs[0].spec));
    outputs[0].spec.dtype = a->dtype;
    return XT_OK;
}

/* The gradient goes to the side taken; the other gets 0, whatever stands there. */
static enum xt_status backward_where(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *zero, *grad = g->grad_out[0];
    XT_TRY(xt_tensor_scalar(ctx, 0, grad->dtype, grad->storage->device, &zero));
    enum xt_status status = XT_OK;
    if (g->wants[1])
        XT_GO(xt_apply_name(ctx, "where", (struct xt_tensor *[]){g->in[0], grad, zero}, 3,
                            &g->grad_in[1]));
    if (g->wants[2])
        XT_GO(xt_apply_name(ctx, "where", (struct xt_tensor *[]){g->in[0], zero, grad}, 3,
                            &g->grad_in[2]));
done:
    xt_tensor_release(ctx, zero);
    return status;
}

static const struct xt_param params_where[] = {TENSOR("cond"), TENSOR("a"), TENSOR("b"), {0}};
static const struct xt_op xt_op_where = {
    .name = "where",
    .doc = "a where cond is not 0, else b; all three broadcast, cond of an integer dtype",
    .params = params_where,
    .n_outputs = 1,
    .dtypes = XT_INTS,
    .keeps_in = 1u << 0,
    .infer = infer_where,
    .backward = backward_where,
};

static enum xt_status want_mask(struct xt_ctx *ctx, const struct xt_tensor *mask) {
    char text[128];
    if (!xt_dtype_is_float(mask->dtype)) return XT_OK;
    return xt_fail(ctx, XT_DTYPE, "mask is %s, wanted u8, i32 or i64",
                   xt_describe(mask, text, sizeof text));
}

static enum xt_status infer_masked_fill(struct xt_ctx *ctx, const struct xt_op *op,
                                        const struct xt_args *args, struct xt_output *outputs) {
    XT_TRY(want_mask(ctx, args->inputs[1]));
    return xt_broadcast(ctx, op, args->inputs[0], args->inputs[1], &outputs[0].spec);
}

static enum xt_status backward_masked_fill(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *in[2] = {g->grad_out[0], g->in[1]};
    return xt_apply_name(ctx, "masked_fill", in, 2, &g->grad_in[0]); /* by 0 */
}

static const struct xt_param params_masked_fill[] = {
    TENSOR("x"), TENSOR("mask"), {.name = "value", .kind = XT_P_REAL}, {0}};
static const struct xt_op xt_op_masked_fill = {
    .name = "masked_fill",
    .doc = "value where mask is not 0, else x; broadcast, mask of an integer dtype",
    .params = params_masked_fill,
    .n_outputs = 1,
    .dtypes = XT_ANY,
    .keeps_in = 1u << 1,
    .infer = infer_masked_fill,
    .backward = backward_masked_fill,
};

/* ---- cast ------------------------------------------------------------------------------------ */

static enum xt_status infer_cast(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    int64_t dtype = args->attrs[0].i;
    (void)op;
    if (dtype < 0 || dtype >= XT_DTYPE_COUNT)
        return xt_fail(ctx, XT_ARGUMENT, "there is no dtype number %lld", (long long)dtype);
    xt_output_like(&outputs[0], args->inputs[0]);
    outputs[0].spec.dtype = (enum xt_dtype)dtype;
    return XT_OK;
}

static enum xt_status backward_cast(struct xt_ctx *ctx, struct xt_grads *g) {
    return xt_cast(ctx, g->grad_out[0], g->in_spec[0].dtype, &g->grad_in[0]);
}

static const struct xt_param params_cast[] = {
    TENSOR("x"), {.name = "dtype", .kind = XT_P_DTYPE}, {0}};
static const struct xt_op xt_op_cast = {
    .name = "cast",
    .doc =
        "x in another dtype, rounded once; to integers: truncated, held to their range, NaN to 0",
    .params = params_cast,
    .n_outputs = 1,
    .dtypes = XT_ANY,
    .infer = infer_cast,
    .backward = backward_cast,
};

/* ---- in place -------------------------------------------------------------------------------- */

/* The second input must broadcast to exactly the shape of x. */
static enum xt_status infer_in_place(struct xt_ctx *ctx, const struct xt_op *op,
                                     const struct xt_args *args, struct xt_output *outputs) {
    (void)outputs;
    const struct xt_tensor *x = args->inputs[0];
    if (args->n_inputs < 2) return XT_OK;
    struct xt_spec spec;
    char x_text[128], other_text[128];
    XT_TRY(xt_broadcast(ctx, op, x, args->inputs[1], &spec));
    if (!xt_has_shape(x, spec.shape, spec.ndim))
        return xt_fail(ctx, XT_SHAPE, "%s is %s, which does not broadcast to x, %s",
                       op->params[1].name,
                       xt_describe(args->inputs[1], other_text, sizeof other_text),
                       xt_describe(x, x_text, sizeof x_text));
    return XT_OK;
}

static enum xt_status infer_add_in_place(struct xt_ctx *ctx, const struct xt_op *op,
                                         const struct xt_args *args, struct xt_output *outputs) {
    const struct xt_tensor *x = args->inputs[0], *other = args->inputs[1];
    double scale = args->attrs[0].f;
    if (xt_dtype_is_float(x->dtype) != xt_dtype_is_float(other->dtype))
        return xt_fail(ctx, XT_DTYPE, "x is %s, other is %s: cast one of them",
                       xt_dtype_name(x->dtype), xt_dtype_name(other->dtype));
    if (!xt_dtype_is_float(x->dtype) && !(fabs(scale) < 0x1p53 && trunc(scale) == scale))
        return xt_fail(ctx, XT_ARGUMENT, "scale is %g, wanted an integer, for x is %s", scale,
                       xt_dtype_name(x->dtype));
    return infer_in_place(ctx, op, args, outputs);
}

static const struct xt_param params_fill[] = {
    TENSOR("x"), {.name = "value", .kind = XT_P_REAL}, {0}};
static const struct xt_op xt_op_fill = {
    .name = "fill_",
    .doc = "x = value, in place",
    .params = params_fill,
    .flags = XT_NO_GRADIENT,
    .dtypes = XT_ANY,
    .writes = 1u << 0,
    .infer = infer_in_place,
};

static const struct xt_param params_copy[] = {TENSOR("x"), TENSOR("src"), {0}};
static const struct xt_op xt_op_copy = {
    .name = "copy_",
    .doc = "x = src, in place: broadcast to x and converted as by cast",
    .params = params_copy,
    .flags = XT_NO_GRADIENT,
    .dtypes = XT_ANY,
    .writes = 1u << 0,
    .infer = infer_in_place,
};

static const struct xt_param params_add[] = {
    TENSOR("x"),
    TENSOR("other"),
    {.name = "scale", .kind = XT_P_REAL, .optional = true, .fallback = 1},
    {0}};
static const struct xt_op xt_op_add_in_place = {
    .name = "add_",
    .doc = "x = x + scale * other, in place: other broadcast to x, computed in the type of x",
    .params = params_add,
    .flags = XT_NO_GRADIENT,
    .dtypes = XT_ANY,
    .writes = 1u << 0,
    .infer = infer_add_in_place,
};

/* ---- sums of gradients ----------------------------------------------------------------------- */

static enum xt_status infer_terms(struct xt_ctx *ctx, const struct xt_op *op,
                                  const struct xt_args *args, struct xt_output *outputs) {
    for (int i = 1; i < args->n_inputs; i++)
        if (args->inputs[i])
            XT_TRY(xt_broadcast(ctx, op, args->inputs[0], args->inputs[i], &outputs[0].spec));
    xt_output_like(&outputs[0], args->inputs[0]);
    return XT_OK;
}

static const struct xt_param params_terms[] = {
    TENSOR("first"),
    TENSOR("second"),
    {.name = "third", .kind = XT_P_TENSOR, .optional = true},
    {0}};
static const struct xt_op xt_op_add_terms = {
    .name = "add_terms",
    .doc = "first + second + third, of one shape, rounded once",
    .params = params_terms,
    .n_outputs = 1,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = infer_terms,
};

/* ---- the list -------------------------------------------------------------------------------- */

/* First what users call, then the internal ones. */
#define XT_UNARY(name, ...) &xt_op_##name,
#define XT_UNARY_ANY XT_UNARY
#define XT_BINARY XT_UNARY
#define XT_BINARY_ANY XT_UNARY
#define XT_BINARY_BOTH XT_UNARY
#define XT_CHOICE XT_UNARY
#define XT_BOUNDED XT_UNARY
#define XT_COMPARE XT_UNARY

xt_op_list xt_ops_pointwise = {
#include "../../kernels/pointwise.def"
    &xt_op_where, &xt_op_masked_fill,  &xt_op_cast,      &xt_op_fill,
    &xt_op_copy,  &xt_op_add_in_place, &xt_op_add_terms,

#define XT_UNARY(name, ...) &xt_op_##name##_grad,
#define XT_UNARY_ANY XT_UNARY
#define XT_BINARY(name, ...) &xt_op_##name##_grad_a, &xt_op_##name##_grad_b,
#define XT_BINARY_ANY XT_BINARY
#define XT_BINARY_BOTH XT_UNARY
#define XT_CHOICE XT_UNARY
#define XT_BOUNDED XT_UNARY
#define XT_COMPARE(name, ...)
#include "../../kernels/pointwise.def"
    NULL,
};
