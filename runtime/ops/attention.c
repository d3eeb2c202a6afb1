/*
 * attention.c: scaled dot-product attention, composed of public ops or tiled.
 *
 * Tiled attention (Dao 2022, FlashAttention) never holds the Sq x Sk scores: it keeps the running
 * maximum and sum of each row, and backward computes the probabilities again from the kept
 * logsumexp.
 */
#include <math.h>

#include "../op.h"

enum { Q, K, V, MASK, LENGTHS, DOCUMENTS, SEED, INPUTS };
enum { CAUSAL, SCALE, DROPOUT, SEED_ATTR, IMPL };
enum impl { AUTO, COMPOSED, FLASH, CUDNN };

/* The parameters that attention and its tiled form share, in the order of the two enums above. */
/* clang-format off */
#define SHARED_PARAMS                                                                              \
    {.name = "q", .kind = XT_P_TENSOR},                                                            \
    {.name = "k", .kind = XT_P_TENSOR},                                                            \
    {.name = "v", .kind = XT_P_TENSOR},                                                            \
    {.name = "causal", .kind = XT_P_BOOL, .optional = true, .named = true},                        \
    {.name = "scale", .kind = XT_P_REAL, .optional = true, .named = true},                         \
    {.name = "mask", .kind = XT_P_TENSOR, .optional = true, .named = true},                        \
    {.name = "lengths", .kind = XT_P_TENSOR, .optional = true, .named = true},                     \
    {.name = "documents", .kind = XT_P_TENSOR, .optional = true, .named = true},                   \
    {.name = "dropout", .kind = XT_P_REAL, .optional = true, .named = true},                       \
    {.name = "seed", .kind = XT_P_SEED, .optional = true, .named = true}
/* clang-format on */

static const struct xt_param params[] = {
    SHARED_PARAMS,
    {.name = "impl",
     .kind = XT_P_CHOICE,
     .optional = true,
     .named = true,
     .choices = "auto|composed|flash|cudnn"},
    {0},
};

static enum xt_status want_ints(struct xt_ctx *ctx, const char *name, const struct xt_tensor *t) {
    if (!xt_dtype_is_float(t->dtype)) return XT_OK;
    return xt_fail(ctx, XT_DTYPE, "%s is %s, wanted integers", name, xt_dtype_name(t->dtype));
}

static enum xt_status check_mask(struct xt_ctx *ctx, const struct xt_tensor *mask,
                                 const int64_t full[4]) {
    char text[128];
    bool fits = mask->ndim <= 4;
    for (int d = 0; d < mask->ndim && fits; d++) {
        int64_t want = full[4 - mask->ndim + d];
        fits = mask->shape[d] == want || mask->shape[d] == 1;
    }
    if (fits) return XT_OK;
    return xt_fail(ctx, XT_SHAPE, "mask is %s, wanted what broadcasts to %lldx%lldx%lldx%lld",
                   xt_describe(mask, text, sizeof text), (long long)full[0], (long long)full[1],
                   (long long)full[2], (long long)full[3]);
}

static enum xt_status check(struct xt_ctx *ctx, const struct xt_op *op, const struct xt_args *a) {
    const struct xt_tensor *q = a->inputs[Q], *k = a->inputs[K], *v = a->inputs[V];
    char tq[128], tk[128];
    XT_TRY(xt_want_ndim(ctx, op, "q", q, 4));
    XT_TRY(xt_want_ndim(ctx, op, "k", k, 4));
    XT_TRY(xt_want_ndim(ctx, op, "v", v, 4));
    XT_TRY(xt_want_same_dtype(ctx, op, "q", q, "k", k));
    XT_TRY(xt_want_same_dtype(ctx, op, "q", q, "v", v));
    for (int d = 0; d < 4; d++)
        if (k->shape[d] != v->shape[d])
            return xt_fail(ctx, XT_SHAPE, "k is %s and v is %s: they differ",
                           xt_describe(k, tq, sizeof tq), xt_describe(v, tk, sizeof tk));
    bool groups = k->shape[2] > 0 ? q->shape[2] % k->shape[2] == 0 : q->shape[2] == 0;
    if (q->shape[0] != k->shape[0] || q->shape[3] != k->shape[3] || !groups)
        return xt_fail(ctx, XT_SHAPE,
                       "q is %s and k is %s, wanted (B, Sq, H, D) and (B, Sk, Hkv, D) with H a "
                       "multiple of Hkv",
                       xt_describe(q, tq, sizeof tq), xt_describe(k, tk, sizeof tk));
    if (q->shape[3] > 256)
        return xt_fail(ctx, XT_SHAPE, "the head dimension is %lld, wanted at most 256",
                       (long long)q->shape[3]);
    int64_t full[4] = {q->shape[0], q->shape[2], q->shape[1], k->shape[1]};
    if (a->inputs[MASK]) {
        XT_TRY(xt_want_dtype(ctx, op, "mask", a->inputs[MASK], XT_U8));
        XT_TRY(check_mask(ctx, a->inputs[MASK], full));
    }
    const struct xt_tensor *lengths = a->inputs[LENGTHS], *documents = a->inputs[DOCUMENTS];
    if (lengths) {
        XT_TRY(want_ints(ctx, "lengths", lengths));
        if (lengths->ndim != 1 || lengths->shape[0] != full[0])
            return xt_fail(ctx, XT_SHAPE, "lengths is %s, wanted one a sequence (%lld)",
                           xt_describe(lengths, tq, sizeof tq), (long long)full[0]);
    }
    if (documents) {
        XT_TRY(want_ints(ctx, "documents", documents));
        if (documents->ndim != 2 || documents->shape[0] != full[0] ||
            documents->shape[1] != full[3] || full[2] > full[3])
            return xt_fail(ctx, XT_SHAPE, "documents is %s, wanted one a key (%lldx%lld)",
                           xt_describe(documents, tq, sizeof tq), (long long)full[0],
                           (long long)full[3]);
    }
    double p = a->attrs[DROPOUT].f;
    if (!(p >= 0 && p <= 1))
        return xt_fail(ctx, XT_ARGUMENT, "dropout is %g, wanted a probability from 0 to 1",
                       isnan(p) ? NAN : p);
    return XT_OK;
}

/* ---- tiled ----------------------------------------------------------------------------------- */

static enum xt_status infer_tiled(struct xt_ctx *ctx, const struct xt_op *op,
                                  const struct xt_args *a, struct xt_output *outputs) {
    XT_TRY(check(ctx, op, a));
    const struct xt_tensor *q = a->inputs[Q];
    xt_output_like(&outputs[0], q);
    outputs[1].spec = (struct xt_spec){
        .dtype = xt_arithmetic(q->dtype),
        .ndim = 3,
        .shape = {q->shape[0], q->shape[2], q->shape[1]},
    };
    return XT_OK;
}

/* Inputs: those of the forward, then g, out and lse. */
static enum xt_status infer_tiled_grad(struct xt_ctx *ctx, const struct xt_op *op,
                                       const struct xt_args *a, struct xt_output *outputs) {
    (void)ctx;
    (void)op;
    for (int i = Q; i <= V; i++) xt_output_like(&outputs[i], a->inputs[i]);
    return XT_OK;
}

static const struct xt_param grad_params[] = {
    SHARED_PARAMS,
    {.name = "g", .kind = XT_P_TENSOR},
    {.name = "out", .kind = XT_P_TENSOR},
    {.name = "lse", .kind = XT_P_TENSOR},
    {0},
};

static const struct xt_op op_tiled_grad = {
    .name = "attention_tiled_grad",
    .doc = "The gradients of attention_tiled by q, k and v.",
    .params = grad_params,
    .n_outputs = 3,
    .flags = XT_INTERNAL | XT_NO_GRADIENT,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64),
    .infer = infer_tiled_grad,
};

static enum xt_status backward_tiled(struct xt_ctx *ctx, struct xt_grads *g) {
    struct xt_tensor *inputs[INPUTS + 3], *outputs[3];
    for (int i = 0; i < INPUTS; i++) inputs[i] = g->in[i];
    inputs[INPUTS] = g->grad_out[0];
    inputs[INPUTS + 1] = g->out[0];
    inputs[INPUTS + 2] = g->out[1];
    struct xt_args args;
    xt_args_init(&args, &op_tiled_grad, inputs, INPUTS + 3);
    const union xt_attr *attrs = xt_call_attrs(g->call);
    for (int k = CAUSAL; k <= SEED_ATTR; k++) args.attrs[k] = attrs[k];
    XT_TRY(xt_call_run(ctx, &op_tiled_grad, &args, outputs));
    for (int i = Q; i <= V; i++) g->grad_in[i] = outputs[i];
    return XT_OK;
}

static const struct xt_param tiled_params[] = {SHARED_PARAMS, {0}};

static const struct xt_op op_tiled = {
    .name = "attention_tiled",
    .doc = "attention without the Sq x Sk scores in memory.",
    .params = tiled_params,
    .n_outputs = 2,
    .n_hidden = 1,
    .flags = XT_INTERNAL | XT_EXPENSIVE,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64),
    .keeps_in = (1u << INPUTS) - 1,
    .keeps_out = 3,
    .infer = infer_tiled,
    .backward = backward_tiled,
};

/* ---- composed -------------------------------------------------------------------------------- */

static enum xt_status infer_softmax(struct xt_ctx *ctx, const struct xt_op *op,
                                    const struct xt_args *a, struct xt_output *outputs) {
    XT_TRY(xt_want_ndim(ctx, op, "scores", a->inputs[0], 4));
    xt_output_like(&outputs[0], a->inputs[0]);
    return XT_OK;
}

static enum xt_status backward_softmax(struct xt_ctx *ctx, struct xt_grads *g) {
    /* dx = p * (g - sum(g * p)): rows of zeros stay zero. */
    struct xt_tensor *gp = NULL, *sum = NULL, *centred = NULL;
    const struct xt_op *op_sum = xt_op_find(ctx, "sum");
    struct xt_args args;
    enum xt_status status = XT_OK;
    XT_GO(xt_binary(ctx, "mul", g->grad_out[0], g->out[0], &gp));
    xt_args_init(&args, op_sum, &gp, 1);
    xt_args_list(&args, 0, (int64_t[]){3}, 1);
    args.attrs[1].i = 1;
    XT_GO(xt_call_run(ctx, op_sum, &args, &sum));
    XT_GO(xt_binary(ctx, "sub", g->grad_out[0], sum, &centred));
    XT_GO(xt_binary(ctx, "mul", centred, g->out[0], &g->grad_in[0]));
done:
    xt_tensor_release(ctx, gp);
    xt_tensor_release(ctx, sum);
    xt_tensor_release(ctx, centred);
    return status;
}

static const struct xt_param softmax_params[] = {
    {.name = "scores", .kind = XT_P_TENSOR},
    {.name = "mask", .kind = XT_P_TENSOR, .optional = true},
    {.name = "lengths", .kind = XT_P_TENSOR, .optional = true},
    {.name = "documents", .kind = XT_P_TENSOR, .optional = true},
    {.name = "causal", .kind = XT_P_BOOL, .optional = true},
    {0},
};

static const struct xt_op op_softmax = {
    .name = "attention_softmax",
    .doc = "softmax over the allowed keys of (B, H, Sq, Sk) scores; a row without any is zero.",
    .params = softmax_params,
    .n_outputs = 1,
    .flags = XT_INTERNAL,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64),
    .keeps_out = 1,
    .infer = infer_softmax,
    .backward = backward_softmax,
};

/* (B, S, H, D) to (B, H, S, D), with k and v repeated for the query heads of their group. */
static enum xt_status heads_first(struct xt_ctx *ctx, struct xt_tensor *x, int64_t group,
                                  struct xt_tensor **out) {
    struct xt_tensor *repeated = NULL;
    enum xt_status status = XT_OK;
    if (group > 1) {
        const struct xt_op *op = xt_op_find(ctx, "repeat_kv");
        struct xt_args args;
        xt_args_init(&args, op, &x, 1);
        args.attrs[0].i = group;
        XT_TRY(xt_call_run(ctx, op, &args, &repeated));
        x = repeated;
    }
    status = xt_transpose(ctx, x, 1, 2, out);
    xt_tensor_release(ctx, repeated);
    return status;
}

static enum xt_status dropped(struct xt_ctx *ctx, struct xt_tensor *x, const struct xt_args *a,
                              struct xt_tensor **out) {
    if (a->attrs[DROPOUT].f == 0) {
        *out = xt_tensor_retain(x);
        return XT_OK;
    }
    const struct xt_op *op = xt_op_find(ctx, "dropout");
    struct xt_tensor *inputs[2] = {x, a->inputs[SEED]};
    struct xt_args args;
    xt_args_init(&args, op, inputs, 2);
    args.attrs[0].f = a->attrs[DROPOUT].f;
    args.attrs[1].seed = a->attrs[SEED_ATTR].seed;
    return xt_call_run(ctx, op, &args, out);
}

static double scale_of(const struct xt_args *a) {
    double scale = a->attrs[SCALE].f;
    return scale != 0 ? scale : 1.0 / sqrt((double)a->inputs[Q]->shape[3]);
}

static enum xt_status compose_from_ops(struct xt_ctx *ctx, const struct xt_args *a,
                                       struct xt_tensor **outputs) {
    struct xt_tensor *q = NULL, *k = NULL, *v = NULL, *kt = NULL, *scores = NULL, *scaled = NULL;
    struct xt_tensor *probs = NULL, *kept = NULL, *mixed = NULL, *back = NULL;
    int64_t kv_heads = a->inputs[K]->shape[2];
    int64_t group = kv_heads ? a->inputs[Q]->shape[2] / kv_heads : 1;
    struct xt_args args;
    enum xt_status status = XT_OK;
    XT_GO(heads_first(ctx, a->inputs[Q], 1, &q));
    XT_GO(heads_first(ctx, a->inputs[K], group, &k));
    XT_GO(heads_first(ctx, a->inputs[V], group, &v));
    XT_GO(xt_transpose(ctx, k, 2, 3, &kt));
    XT_GO(xt_binary(ctx, "matmul", q, kt, &scores));
    XT_GO(xt_scale(ctx, scores, scale_of(a), &scaled));
    struct xt_tensor *in[4] = {scaled, a->inputs[MASK], a->inputs[LENGTHS], a->inputs[DOCUMENTS]};
    xt_args_init(&args, &op_softmax, in, 4);
    args.attrs[0].i = a->attrs[CAUSAL].i;
    XT_GO(xt_call_run(ctx, &op_softmax, &args, &probs));
    XT_GO(dropped(ctx, probs, a, &kept));
    XT_GO(xt_binary(ctx, "matmul", kept, v, &mixed));
    XT_GO(xt_transpose(ctx, mixed, 1, 2, &back));
    XT_GO(xt_contiguous(ctx, back, &outputs[0]));
done:
    xt_tensor_release(ctx, q);
    xt_tensor_release(ctx, k);
    xt_tensor_release(ctx, v);
    xt_tensor_release(ctx, kt);
    xt_tensor_release(ctx, scores);
    xt_tensor_release(ctx, scaled);
    xt_tensor_release(ctx, probs);
    xt_tensor_release(ctx, kept);
    xt_tensor_release(ctx, mixed);
    xt_tensor_release(ctx, back);
    return status;
}

static enum xt_status compose(struct xt_ctx *ctx, const struct xt_op *op, const struct xt_args *a,
                              struct xt_tensor **outputs) {
    XT_TRY(check(ctx, op, a));
    enum impl impl = (enum impl)a->attrs[IMPL].i;
    if (impl == CUDNN && a->inputs[Q]->storage->device == XT_CPU)
        return xt_fail(ctx, XT_UNSUPPORTED,
                       "impl cudnn needs a GPU; on the CPU there are auto, "
                       "composed and flash");
    if (impl == COMPOSED) return compose_from_ops(ctx, a, outputs);
    struct xt_args args;
    xt_args_init(&args, &op_tiled, a->inputs, a->n_inputs);
    for (int k = CAUSAL; k <= SEED_ATTR; k++) args.attrs[k] = a->attrs[k];
    return xt_call_run(ctx, &op_tiled, &args, outputs);
}

static const struct xt_op op_attention = {
    .name = "attention",
    .doc = "softmax(scale q k^T) v a head: q (B, Sq, H, D), k and v (B, Sk, Hkv, D) -> (B, Sq, H, "
           "D). Query head h uses key head floor(h / (H / Hkv)); scale is 1/sqrt(D) unless given; "
           "causal aligns the last query with the last key; mask (u8, 1: allowed) broadcasts to "
           "(B, H, Sq, Sk); lengths (B) are the valid keys; documents (B, Sk) attend within "
           "themselves; a row with no key is zero; dropout comes after the softmax.",
    .params = params,
    .n_outputs = 1,
    .flags = XT_COMPOSED,
    .dtypes = XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64),
    .compose = compose,
};

xt_op_list xt_ops_attention = {&op_attention, &op_tiled, &op_tiled_grad, &op_softmax, NULL};
