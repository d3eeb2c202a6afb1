/*
 * trap.c: finds the first call whose result is not finite.
 *
 * A -inf that a call was given, as an attribute or in a tensor that is no variable, may be in its
 * result: masks are made of it. Hidden outputs are not looked at.
 */
#include <math.h>
#include <stdio.h>

#include "context.h"
#include "tape.h"

#define MOST_INPUTS 6 /* that a sentence describes */

void xt_set_trap(struct xt_ctx *ctx, bool on) {
    ctx->trap = on ? XT_TRAP_FAIL : XT_TRAP_OFF;
}

void xt_trap_note(struct xt_ctx *ctx, bool on) {
    ctx->trap = on ? XT_TRAP_NOTE : XT_TRAP_OFF;
    if (on) ctx->trapped[0] = 0;
}

const char *xt_trap_found(const struct xt_ctx *ctx) {
    return ctx->trapped;
}

/* On a device: 0 * x is NaN exactly where x is not finite, and so is a sum of it. */
static enum xt_status nonfinite_there(struct xt_ctx *ctx, struct xt_tensor *t, bool *bad) {
    struct xt_pause pause;
    struct xt_tensor *zeros = NULL, *sum = NULL;
    double value = 0;
    xt_pause(ctx, &pause);
    enum xt_status status = XT_OK;
    XT_GO(xt_scale(ctx, t, 0, &zeros));
    XT_GO(xt_unary(ctx, "sum", zeros, &sum));
    XT_GO(xt_tensor_get(ctx, sum, NULL, &value));
    *bad = isnan(value);
done:
    xt_resume(ctx, &pause);
    xt_tensor_release(ctx, zeros);
    xt_tensor_release(ctx, sum);
    return status;
}

static enum xt_status nonfinite(struct xt_ctx *ctx, struct xt_tensor *t, bool *bad) {
    *bad = false;
    if (!t || !xt_dtype_is_float(t->dtype)) return XT_OK;
    if (t->storage->device != XT_CPU) return nonfinite_there(ctx, t, bad);
    if (xt_is_contiguous(t)) {
        *bad = xt_tensor_nonfinite(ctx, t);
        return XT_OK;
    }
    struct xt_stats s;
    XT_TRY(xt_tensor_stats(ctx, t, &s));
    *bad = s.finite < s.n;
    return XT_OK;
}

static enum xt_status given_minus_inf(struct xt_ctx *ctx, const struct xt_op *op,
                                      const struct xt_args *args, bool *given) {
    int k = 0;
    *given = false;
    for (const struct xt_param *p = op->params; p->name; p++) {
        if (!xt_takes_attr(p)) continue;
        if (p->kind == XT_P_REAL && args->attrs[k].f == -(double)INFINITY) *given = true;
        k++;
    }
    for (int i = 0; i < args->n_inputs && !*given; i++) {
        struct xt_stats s;
        if (!args->inputs[i] || args->inputs[i]->leaf) continue;
        XT_TRY(xt_tensor_stats(ctx, args->inputs[i], &s));
        *given = s.minus_infs > 0;
    }
    return XT_OK;
}

struct sentence {
    char text[XT_ERROR_BYTES / 2];
    size_t used; /* bytes of text */
};

static void add(struct sentence *s, const char *before, const char *text) {
    if (s->used >= sizeof s->text) return;
    s->used += (size_t)snprintf(s->text + s->used, sizeof s->text - s->used, "%s%s", before, text);
}

/* "the result f32 4: 1 inf, min 0, max 2, ...; x f32 4: min 0, ..." */
static enum xt_status describe(struct xt_ctx *ctx, const struct xt_op *op,
                               const struct xt_args *args, const char *what, struct xt_tensor *bad,
                               const struct xt_stats *found, struct sentence *s) {
    char text[256];
    add(s, what, xt_describe(bad, text, sizeof text));
    add(s, ": ", xt_stats_describe(found, text, sizeof text));
    for (int i = 0; i < args->n_inputs && i < MOST_INPUTS; i++) {
        struct xt_tensor *t = args->inputs[i];
        struct xt_stats its;
        if (!t || t == bad) continue;
        XT_TRY(xt_tensor_stats(ctx, t, &its));
        add(s, "; ", xt_input_name(op, i));
        add(s, " ", xt_describe(t, text, sizeof text));
        if (t->leaf) add(s, "", ", a variable");
        add(s, ": ", xt_stats_describe(&its, text, sizeof text));
    }
    return XT_OK;
}

static enum xt_status caught(struct xt_ctx *ctx, const struct xt_op *op, const struct sentence *s) {
    if (ctx->trap == XT_TRAP_FAIL) return xt_fail(ctx, XT_VALUE, "%s", s->text);
    const struct xt_call *rule = ctx->walk ? ctx->walk->call : NULL;
    struct xt_where where = rule ? rule->where : xt_here(ctx);
    char in[128] = "forward";
    if (rule) snprintf(in, sizeof in, "the backward of %s", rule->slot->op->name);
    snprintf(ctx->trapped, sizeof ctx->trapped, "%s at %s:%d, in %s: %s", op->name,
             where.file ? where.file : "?", where.line, in, s->text);
    ctx->trap = XT_TRAP_OFF;
    return XT_OK;
}

static enum xt_status check(struct xt_ctx *ctx, const struct xt_op *op, const struct xt_args *args,
                            const char *what, struct xt_tensor *t) {
    struct sentence s = {.used = 0};
    struct xt_stats found;
    bool bad;
    XT_TRY(nonfinite(ctx, t, &bad));
    if (!bad) return XT_OK;
    XT_TRY(xt_tensor_stats(ctx, t, &found));
    if (found.nans + found.infs == 0) {
        bool given;
        XT_TRY(given_minus_inf(ctx, op, args, &given));
        if (given) return XT_OK;
    }
    XT_TRY(describe(ctx, op, args, what, t, &found, &s));
    return caught(ctx, op, &s);
}

enum xt_status xt_trap_check(struct xt_ctx *ctx, const struct xt_slot *slot,
                             const struct xt_args *args, struct xt_tensor *const *outputs) {
    const struct xt_op *op = slot->op;
    for (int k = 0; k < op->n_outputs - op->n_hidden && ctx->trap; k++)
        XT_TRY(check(ctx, op, args, "the result ", outputs[k]));
    /* Rules add to gradients in place. What is written elsewhere is not theirs to undo. */
    for (int i = 0; i < args->n_inputs && ctx->walk && ctx->trap; i++)
        if (args->inputs[i] && xt_slot_writes(slot, i))
            XT_TRY(check(ctx, op, args, "what it wrote, ", args->inputs[i]));
    return XT_OK;
}
