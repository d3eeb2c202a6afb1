/*
 * segment.c: checkpoint segments: recompute by replaying records, not by calling the recipe again.
 *
 * While a segment is open every call is recorded. Its end drops what the records hold of values
 * made inside it; what came from outside stays. When a backward arrives, the records that are
 * needed run again in order and the kept values are back, the same bits, since every op is a pure
 * function of its inputs and attributes. Segments nest: the records of all levels lie in one list,
 * the outermost segment's, and each level is a range of it.
 */
#include <stdio.h>
#include <string.h>

#include "tape.h"

enum xt_status xt_segment_begin(struct xt_ctx *ctx, const struct xt_segment_options *options,
                                struct xt_segment **out) {
    *out = NULL;
    if (!xt_recording(ctx)) return XT_OK;
    struct xt_segment *s = xt_host_alloc(ctx, sizeof *s);
    if (!s) return XT_MEMORY;
    s->parent = ctx->segment;
    s->owner = s->parent ? s->parent->owner : s;
    s->options = *options;
    s->first = s->owner->n_calls;
    s->first_storage = ctx->n_storages;
    s->refs = 1; /* the recorder's, of the outermost only */
    if (s->parent) {
        s->next = s->owner->next;
        s->owner->next = s;
    }
    ctx->segment = s;
    *out = s;
    return XT_OK;
}

enum xt_status xt_segment_add(struct xt_ctx *ctx, struct xt_call *call) {
    struct xt_segment *owner = ctx->segment->owner;
    if (owner->n_calls == owner->cap_calls) {
        int64_t cap = owner->cap_calls ? 2 * owner->cap_calls : 64;
        struct xt_call **calls = xt_host_alloc(ctx, (size_t)cap * sizeof *calls);
        if (!calls) return XT_MEMORY;
        if (owner->n_calls) memcpy(calls, owner->calls, (size_t)owner->n_calls * sizeof *calls);
        xt_host_free(ctx, owner->calls, (size_t)owner->cap_calls * sizeof *calls);
        owner->calls = calls;
        owner->cap_calls = cap;
    }
    call->owner = owner;
    call->segment = ctx->segment;
    call->position = owner->n_calls;
    owner->calls[owner->n_calls++] = call;
    return XT_OK;
}

void xt_segment_remove_last(struct xt_ctx *ctx, struct xt_call *call) {
    (void)ctx;
    call->owner->n_calls--;
}

static bool inside(const struct xt_segment *s, const struct xt_call *call) {
    return call && call->owner == s->owner && call->position >= s->first &&
           call->position < s->last;
}

static void close_range(struct xt_ctx *ctx, struct xt_segment *s) {
    s->last = s->owner->n_calls;
    ctx->segment = s->parent;
}

static void release_tensor(struct xt_ctx *ctx, struct xt_tensor **t) {
    xt_tensor_release(ctx, *t);
    *t = NULL;
}

/* Drops every held value that was made inside s. */
static void drop(struct xt_ctx *ctx, struct xt_segment *s) {
    for (int64_t p = s->first; p < s->last; p++) {
        struct xt_call *call = s->owner->calls[p];
        for (int i = 0; i < call->n_inputs; i++)
            if (inside(s, xt_inner_maker(call, i))) release_tensor(ctx, &call->in[i]);
        for (int k = 0; k < call->n_outputs; k++) release_tensor(ctx, &call->out[k]);
        if (!s->options.selective)
            for (int k = 0; k < call->n_outputs; k++) release_tensor(ctx, &call->value[k]);
    }
    s->dropped = true;
}

void xt_segment_abort(struct xt_ctx *ctx, struct xt_segment *segment) {
    if (!segment) return;
    close_range(ctx, segment);
    if (!segment->parent) xt_segment_release(ctx, segment);
}

/* ---- replay ---------------------------------------------------------------------------------- */

struct replay {
    struct xt_segment *segment;
    int64_t n;                 /* calls in it */
    bool *needed;              /* n: must run (or be taken from a kept value) */
    int64_t *last_use;         /* n: position of the last call that reads its outputs */
    struct xt_tensor **values; /* n * XT_MAX_OUTPUTS */
};

/* Whether, after the replay, call i's input i stands in in[i]: as it was after recording. */
static bool holds_input(const struct xt_segment *s, const struct xt_call *call, int i) {
    const struct xt_call *maker = xt_inner_maker(call, i);
    if (!inside(s, maker)) return false;
    if (call->segment == s) return xt_keeps_input(call, i);
    /* The call of an inner segment, itself still dropped: it holds what comes from outside of
       it. */
    return maker->segment != call->segment && maker->position < call->segment->first;
}

static bool holds_output(const struct xt_segment *s, const struct xt_call *call, int k) {
    return call->segment == s && call->wants && xt_keeps(call->slot->op->keeps_out, k);
}

/* Backwards: what is held, and what that is computed from. */
static void find_needed(struct replay *r) {
    const struct xt_segment *s = r->segment;
    for (int64_t p = r->n; p-- > 0;) {
        const struct xt_call *call = s->owner->calls[s->first + p];
        bool needed = r->needed[p] || call->n_outputs == 0;
        for (int k = 0; k < call->n_outputs; k++) needed = needed || holds_output(s, call, k);
        r->needed[p] = needed;
        bool runs = needed && !(call->n_outputs && call->value[0]);
        for (int i = 0; i < call->n_inputs; i++) {
            const struct xt_call *maker = xt_inner_maker(call, i);
            if (!inside(s, maker) || !(runs || holds_input(s, call, i))) continue;
            int64_t m = maker->position - s->first;
            r->needed[m] = true;
            if (r->last_use[m] < p) r->last_use[m] = p;
        }
    }
}

/* Of the values that a selective segment keeps, lets go of those that its replay never reads, such
   as what it ends with. With segments inside it all stay. */
static void drop_unread(struct xt_ctx *ctx, struct xt_segment *s) {
    if (!s->options.selective || s->parent || s->next) return;
    struct replay r = {.segment = s, .n = s->last - s->first};
    const size_t n = (size_t)r.n, use_bytes = n * sizeof *r.last_use;
    r.needed = xt_host_alloc(ctx, n);
    r.last_use = xt_host_alloc(ctx, use_bytes);
    const bool known = r.needed && r.last_use; /* without memory to find out, all stay */
    if (known) find_needed(&r);
    for (int64_t p = 0; p < r.n && known; p++) {
        struct xt_call *call = s->owner->calls[s->first + p];
        for (int k = 0; k < call->n_outputs && !r.needed[p]; k++)
            release_tensor(ctx, &call->value[k]);
    }
    xt_host_free(ctx, r.needed, n);
    xt_host_free(ctx, r.last_use, use_bytes);
}

enum xt_status xt_segment_end(struct xt_ctx *ctx, struct xt_segment *segment) {
    if (!segment) return XT_OK;
    close_range(ctx, segment);
    drop(ctx, segment);
    drop_unread(ctx, segment);
    if (!segment->parent) xt_segment_release(ctx, segment);
    return XT_OK;
}

static struct xt_tensor *input_value(const struct replay *r, const struct xt_call *call, int i) {
    const struct xt_call *maker = xt_inner_maker(call, i);
    if (!inside(r->segment, maker)) return call->in[i];
    int64_t m = maker->position - r->segment->first;
    return r->values[m * XT_MAX_OUTPUTS + call->edges[i].output];
}

static enum xt_status check_outside(struct xt_ctx *ctx, const struct replay *r,
                                    const struct xt_call *call) {
    for (int i = 0; i < call->n_inputs; i++) {
        const struct xt_tensor *t = call->in[i];
        if (!t || inside(r->segment, xt_inner_maker(call, i))) continue;
        if (t->storage->version == call->in_version[i]) continue;
        const struct xt_where *wrote = &t->storage->wrote;
        char text[128];
        return xt_fail(ctx, XT_STATE,
                       "replay of %s at %s:%d: its input (%s) was changed in place "
                       "at %s:%d",
                       call->slot->op->name, call->where.file ? call->where.file : "?",
                       call->where.line, xt_describe(t, text, sizeof text),
                       wrote->file ? wrote->file : "?", wrote->line);
    }
    return XT_OK;
}

static enum xt_status verify(struct xt_ctx *ctx, const struct xt_call *call,
                             struct xt_tensor **outputs) {
    for (int k = 0; k < call->n_outputs; k++) {
        uint64_t digest;
        if (!outputs[k]) continue;
        XT_TRY(xt_tensor_digest(ctx, outputs[k], &digest));
        if (digest != call->digests[k])
            return xt_fail(ctx, XT_STATE,
                           "the replay of %s at %s:%d gave other bits than the first "
                           "run",
                           call->slot->op->name, call->where.file ? call->where.file : "?",
                           call->where.line);
    }
    return XT_OK;
}

static enum xt_status run_again(struct xt_ctx *ctx, const struct replay *r, struct xt_call *call,
                                struct xt_tensor **outputs) {
    if (call->n_outputs && call->value[0]) {
        for (int k = 0; k < call->n_outputs; k++) outputs[k] = xt_tensor_retain(call->value[k]);
        return XT_OK;
    }
    XT_TRY(check_outside(ctx, r, call));
    size_t bytes = (size_t)call->n_inputs * sizeof(struct xt_tensor *);
    struct xt_tensor **in = xt_host_alloc(ctx, bytes);
    if (!in) return XT_MEMORY;
    for (int i = 0; i < call->n_inputs; i++) in[i] = input_value(r, call, i);
    struct xt_args args = {.inputs = in, .n_inputs = call->n_inputs, .n_ints = call->n_ints};
    memcpy(args.attrs, call->attrs, (size_t)call->slot->n_attrs * sizeof *call->attrs);
    memcpy(args.ints, call->ints, (size_t)call->n_ints * sizeof *call->ints);
    struct xt_where before = ctx->fixed_where;
    ctx->fixed_where = call->where;
    enum xt_status status = xt_execute(ctx, call->slot, &args, call->wants, outputs);
    if (status == XT_OK && ctx->graph) {
        status = xt_graph_add(ctx, call, in, outputs);
        if (status != XT_OK)
            for (int k = 0; k < call->n_outputs; k++) release_tensor(ctx, &outputs[k]);
    }
    ctx->fixed_where = before;
    if (status == XT_OK && call->digests) status = verify(ctx, call, outputs);
    xt_host_free(ctx, in, bytes);
    return status;
}

/* Puts the values a record held after recording back where they were. */
static void refill(const struct replay *r, struct xt_call *call, struct xt_tensor **outputs) {
    const struct xt_segment *s = r->segment;
    for (int i = 0; i < call->n_inputs; i++) {
        if (call->in[i] || !holds_input(s, call, i)) continue;
        struct xt_tensor *t = input_value(r, call, i);
        call->in[i] = xt_tensor_retain(t);
        call->in_version[i] = t->storage->version;
    }
    for (int k = 0; k < call->n_outputs; k++) {
        if (!outputs[k] || !holds_output(s, call, k)) continue;
        call->out[k] = xt_tensor_retain(outputs[k]);
        call->out_version[k] = outputs[k]->storage->version;
    }
}

/* What is held again needs no kept value: it goes when backward has passed its readers. */
static void drop_values(struct xt_ctx *ctx, struct xt_segment *s) {
    for (int64_t p = s->first; p < s->last; p++) {
        struct xt_call *call = s->owner->calls[p];
        for (int k = 0; k < call->n_outputs && call->segment == s; k++)
            release_tensor(ctx, &call->value[k]);
    }
}

static enum xt_status replay(struct xt_ctx *ctx, struct xt_segment *s) {
    struct replay r = {.segment = s, .n = s->last - s->first};
    size_t n = (size_t)r.n, value_bytes = n * XT_MAX_OUTPUTS * sizeof *r.values;
    size_t use_bytes = n * sizeof *r.last_use;
    enum xt_status status = XT_MEMORY;
    r.values = xt_host_alloc(ctx, value_bytes);
    r.last_use = xt_host_alloc(ctx, use_bytes);
    r.needed = xt_host_alloc(ctx, n);
    if (!r.values || !r.last_use || !r.needed) goto done;
    find_needed(&r);
    status = XT_OK;
    for (int64_t p = 0; p < r.n && status == XT_OK; p++) {
        struct xt_call *call = s->owner->calls[s->first + p];
        struct xt_tensor **outputs = r.values + p * XT_MAX_OUTPUTS;
        if (r.needed[p]) status = run_again(ctx, &r, call, outputs);
        if (status != XT_OK) break;
        refill(&r, call, outputs);
        if (r.needed[p] && r.last_use[p] <= p)
            for (int k = 0; k < XT_MAX_OUTPUTS; k++) release_tensor(ctx, &outputs[k]);
        for (int i = 0; i < call->n_inputs; i++) {
            const struct xt_call *maker = xt_inner_maker(call, i);
            if (!inside(s, maker)) continue;
            int64_t m = maker->position - s->first;
            if (r.last_use[m] > p) continue;
            for (int k = 0; k < XT_MAX_OUTPUTS; k++)
                release_tensor(ctx, &r.values[m * XT_MAX_OUTPUTS + k]);
        }
    }
    if (status == XT_OK) {
        s->dropped = false;
        drop_values(ctx, s);
    }
done:
    if (r.values)
        for (size_t i = 0; i < n * XT_MAX_OUTPUTS; i++) release_tensor(ctx, &r.values[i]);
    if (status != XT_OK && r.values) drop(ctx, s);
    xt_host_free(ctx, r.values, value_bytes);
    xt_host_free(ctx, r.last_use, use_bytes);
    xt_host_free(ctx, r.needed, n);
    return status;
}

static enum xt_status revive(struct xt_ctx *ctx, struct xt_segment *s) {
    if (s->parent) XT_TRY(revive(ctx, s->parent)); /* as deep as segments nest */
    return s->dropped ? replay(ctx, s) : XT_OK;
}

enum xt_status xt_segment_revive(struct xt_ctx *ctx, struct xt_call *call) {
    if (!call->segment || call->freed) return XT_OK;
    return revive(ctx, call->segment);
}
