/*
 * profile.c: how long each op's launches take, added up by op.
 *
 * On a device a launch is over when its results can be read, so each is waited for: a profiled step
 * is slower than others, and nothing overlaps in it.
 */
#include <time.h>

#include "context.h"

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

enum xt_status xt_profile_start(struct xt_ctx *ctx) {
    xt_profile_stop(ctx);
    size_t bytes = (size_t)ctx->n_slots * sizeof *ctx->profile;
    ctx->profile = xt_host_alloc(ctx, bytes);
    if (!ctx->profile) return XT_MEMORY;
    for (int i = 0; i < ctx->n_slots; i++) ctx->profile[i].op = ctx->slots[i].op->name;
    ctx->profile_inner = 0;
    return XT_OK;
}

void xt_profile_stop(struct xt_ctx *ctx) {
    if (!ctx->profile) return;
    xt_host_free(ctx, ctx->profile, (size_t)ctx->n_slots * sizeof *ctx->profile);
    ctx->profile = NULL;
}

const struct xt_profile_row *xt_profile_rows(const struct xt_ctx *ctx, int *n) {
    *n = ctx->profile ? ctx->n_slots : 0;
    return ctx->profile;
}

/* Reading one byte of a result waits for what makes it. */
static void wait_for(struct xt_ctx *ctx, const struct xt_tensor *t) {
    char byte;
    const struct xt_storage *s = t->storage;
    if (s->device != XT_CPU && s->bytes > 0)
        (void)ctx->backend[s->device]->to_host(ctx, &byte, s->data, 1);
}

static int64_t bytes_of(const struct xt_tensor *t) {
    return t ? (int64_t)xt_nbytes(t) : 0;
}

struct xt_timer xt_profile_begin(struct xt_ctx *ctx) {
    struct xt_timer timer = {now(), ctx->profile_inner};
    ctx->profile_inner = 0;
    return timer;
}

void xt_profile_end(struct xt_ctx *ctx, const struct xt_timer *timer, const struct xt_slot *slot,
                    const struct xt_args *args, struct xt_tensor **outputs) {
    struct xt_profile_row *row = &ctx->profile[slot - ctx->slots];
    const struct xt_tensor *last = NULL;
    for (int i = 0; i < args->n_inputs; i++) {
        row->bytes += bytes_of(args->inputs[i]);
        if (args->inputs[i]) last = args->inputs[i]; /* of an op without outputs: what it writes */
    }
    for (int k = 0; k < slot->op->n_outputs; k++) {
        row->bytes += bytes_of(outputs[k]);
        if (outputs[k]) last = outputs[k];
    }
    if (last) wait_for(ctx, last);
    int64_t took = now() - timer->start;
    row->calls++;
    row->nanoseconds += took - ctx->profile_inner; /* launches inside this one have had theirs */
    ctx->profile_inner = timer->inner + took;
}
