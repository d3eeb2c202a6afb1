/*
 * random.c: ops that draw from a seed. Each is a pure function of (seed, element index): there is
 * no generator state, and a replay or a backward draws the same again (design, section 5).
 */
#include "../op.h"

#include <math.h>
#include <string.h>

#define TEXT_BYTES 160

static enum xt_status want_seed(struct xt_ctx *ctx, const struct xt_tensor *seed) {
    char text[TEXT_BYTES];
    if (!seed || (seed->dtype == XT_I64 && seed->ndim == 0)) return XT_OK;
    return xt_fail(ctx, XT_DTYPE, "seed is %s, wanted an integer or a 0-dim i64 tensor",
                   xt_describe(seed, text, sizeof text));
}

static enum xt_status want_probability(struct xt_ctx *ctx, double p) {
    if (p >= 0 && p <= 1) return XT_OK; /* NaN fails both */
    return xt_fail(ctx, XT_ARGUMENT, "p is %g, wanted 0 to 1", isnan(p) ? NAN : p);
}

/* ---- dropout --------------------------------------------------------------------------------- */

static const struct xt_param dropout_params[] = {
    {.name = "x"}, {.name = "p", .kind = XT_P_REAL}, {.name = "seed", .kind = XT_P_SEED}, {0}};

static enum xt_status run_dropout(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor *seed,
                                  const union xt_attr *attrs, struct xt_tensor **out);

static enum xt_status dropout_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                    const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    XT_TRY(want_seed(ctx, args->inputs[1]));
    xt_output_like(outputs, args->inputs[0]);
    return XT_OK;
}

/* The mask is drawn again: nothing but a seed that was a tensor is kept. */
static enum xt_status dropout_back(struct xt_ctx *ctx, struct xt_grads *g) {
    return run_dropout(ctx, g->grad_out[0], g->in[1], xt_call_attrs(g->call), &g->grad_in[0]);
}

static const struct xt_op xt_op_dropout_apply = {
    .name = "dropout_apply",
    .doc = "dropout with 0 < p <= 1",
    .params = dropout_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .dtypes = XT_FLOATS,
    .keeps_in = 2,
    .infer = dropout_infer,
    .backward = dropout_back,
};

static enum xt_status run_dropout(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor *seed,
                                  const union xt_attr *attrs, struct xt_tensor **out) {
    struct xt_tensor *in[2] = {x, seed};
    struct xt_args args;
    xt_args_init(&args, &xt_op_dropout_apply, in, 2);
    memcpy(args.attrs, attrs, 2 * sizeof *attrs);
    return xt_call_run(ctx, &xt_op_dropout_apply, &args, out);
}

/* p = 0 is no op at all: the same tensor, the same graph, the same bits. */
static enum xt_status dropout_compose(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, struct xt_tensor **outputs) {
    (void)op;
    XT_TRY(want_probability(ctx, args->attrs[0].f));
    XT_TRY(want_seed(ctx, args->inputs[1]));
    if (args->attrs[0].f == 0) {
        outputs[0] = xt_tensor_retain(args->inputs[0]);
        return XT_OK;
    }
    return run_dropout(ctx, args->inputs[0], args->inputs[1], args->attrs, outputs);
}

static const struct xt_op xt_op_dropout = {
    .name = "dropout",
    .doc = "x / (1 - p) where u >= p, else 0; u uniform from (seed, element); p = 0 gives x itself",
    .params = dropout_params,
    .n_outputs = 1,
    .flags = XT_COMPOSED,
    .dtypes = XT_FLOATS,
    .compose = dropout_compose,
};

/* ---- masks and numbers of a shape ------------------------------------------------------------ */

/* Output 0 is f32 of the shape in attribute 0; the seed is input 0. */
static enum xt_status shape_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                  const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    XT_TRY(want_seed(ctx, args->inputs[0]));
    return xt_output_sized(ctx, args, 0, XT_F32, outputs);
}

static enum xt_status mask_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                 const struct xt_args *args, struct xt_output *outputs) {
    XT_TRY(want_probability(ctx, args->attrs[1].f));
    return shape_infer(ctx, op, args, outputs);
}

static const struct xt_param mask_params[] = {{.name = "shape", .kind = XT_P_SHAPE},
                                              {.name = "p", .kind = XT_P_REAL},
                                              {.name = "seed", .kind = XT_P_SEED},
                                              {0}};

static const struct xt_op xt_op_dropout_mask = {
    .name = "dropout_mask",
    .doc = "f32 of a shape: 1 / (1 - p) where dropout keeps, else 0",
    .params = mask_params,
    .n_outputs = 1,
    .flags = XT_NO_GRADIENT,
    .infer = mask_infer,
};

static const struct xt_param rand_params[] = {
    {.name = "shape", .kind = XT_P_SHAPE}, {.name = "seed", .kind = XT_P_SEED, .named = true}, {0}};

static const struct xt_op xt_op_rand = {
    .name = "rand",
    .doc = "f32 of a shape, uniform in [0, 1): (h >> 40) / 2^24 with h = splitmix64(seed XOR "
           "i * 0x9E3779B97F4A7C15) for element i",
    .params = rand_params,
    .n_outputs = 1,
    .flags = XT_NO_GRADIENT,
    .infer = shape_infer,
};

static const struct xt_op xt_op_randn = {
    .name = "randn",
    .doc = "f32 of a shape, normal with mean 0 and variance 1: Box and Muller's "
           "sqrt(-2 log u) cos(2 pi v), u = ((h >> 33) + 1) / 2^31, v = (h >> 2 mod 2^31) / 2^31, "
           "h as in rand, in f64",
    .params = rand_params,
    .n_outputs = 1,
    .flags = XT_NO_GRADIENT,
    .infer = shape_infer,
};

/* ---- multinomial ----------------------------------------------------------------------------- */

static enum xt_status multinomial_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                        const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    char text[TEXT_BYTES];
    const struct xt_tensor *probs = args->inputs[0];
    XT_TRY(want_seed(ctx, args->inputs[1]));
    if (probs->ndim == 0 || probs->shape[probs->ndim - 1] == 0)
        return xt_fail(ctx, XT_SHAPE, "probs is %s: there is nothing to choose from",
                       xt_describe(probs, text, sizeof text));
    xt_output_like(outputs, probs);
    outputs->spec.dtype = XT_I64;
    outputs->spec.ndim--;
    return XT_OK;
}

static const struct xt_param multinomial_params[] = {
    {.name = "probs"}, {.name = "seed", .kind = XT_P_SEED}, {0}};

static const struct xt_op xt_op_multinomial = {
    .name = "multinomial",
    .doc =
        "one position, counted from 0, drawn from each row of probs (..., V), which need not sum "
        "to 1: the first whose running sum is above u times the row's sum, with u = (h >> 11) / "
        "2^53, h as in rand for element = row; i64 (...)",
    .params = multinomial_params,
    .n_outputs = 1,
    .flags = XT_NO_GRADIENT,
    .dtypes = XT_FLOATS,
    .infer = multinomial_infer,
};

/* ---- seed_mix -------------------------------------------------------------------------------- */

static enum xt_status seed_mix_infer(struct xt_ctx *ctx, const struct xt_op *op,
                                     const struct xt_args *args, struct xt_output *outputs) {
    (void)op;
    XT_TRY(want_seed(ctx, args->inputs[0]));
    XT_TRY(want_seed(ctx, args->inputs[1]));
    outputs->spec = (struct xt_spec){.dtype = XT_I64};
    return XT_OK;
}

static const struct xt_param seed_mix_params[] = {
    {.name = "seed", .kind = XT_P_SEED}, {.name = "a", .kind = XT_P_SEED}, {0}};

static const struct xt_op xt_op_seed_mix = {
    .name = "seed_mix",
    .doc = "splitmix64(splitmix64(seed) XOR a), a 0-dim i64 tensor: xt.seed in a graph",
    .params = seed_mix_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .infer = seed_mix_infer,
};

xt_op_list xt_ops_random = {
    &xt_op_dropout,     &xt_op_dropout_mask,  &xt_op_rand,     &xt_op_randn,
    &xt_op_multinomial, &xt_op_dropout_apply, &xt_op_seed_mix, NULL,
};
