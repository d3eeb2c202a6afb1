/*
 * graph_run.c: a run of an export: what is given is checked and bound, the launches of the plan
 * are made, and the outputs given out.
 *
 * A run that fails leaves the state as it was: the plan says when that takes a backup.
 */
#include <stdio.h>
#include <string.h>

#include "plan.h"

static enum xt_status copy_of(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor **out) {
    const struct xt_slot *slot = xt_slot_find(ctx, xt_op_find(ctx, "contiguous"));
    struct xt_args args = {.inputs = &t, .n_inputs = 1};
    return xt_execute(ctx, slot, &args, false, out);
}

static enum xt_status write_back(struct xt_ctx *ctx, struct xt_tensor *to, struct xt_tensor *from) {
    const struct xt_slot *slot = xt_slot_find(ctx, xt_op_find(ctx, "copy_"));
    struct xt_tensor *in[2] = {to, from}, *none[XT_MAX_OUTPUTS] = {NULL};
    struct xt_args args = {.inputs = in, .n_inputs = 2};
    return xt_launch_ready(ctx, slot, &args, none);
}

/* "input 'x' (recipe.lua:12)", "state 'norm.weight'" */
static const char *who_is(const struct xt_graph_root *root, char *text, size_t bytes) {
    if (root->kind == XT_ROOT_INPUT)
        snprintf(text, bytes, "input '%s' (%s:%d)", root->name,
                 root->where.file ? root->where.file : "?", root->where.line);
    else
        snprintf(text, bytes, "state '%s'", root->name);
    return text;
}

/* What stands for a root in this run, after it has been checked. */
static enum xt_status source_of(struct xt_ctx *ctx, const struct xt_graph_root *root,
                                struct xt_tensor *given, struct xt_tensor **out) {
    char got[128], want[128], who[300];
    if (root->kind == XT_ROOT_CONST && root->tensor->storage->version != root->version) {
        const struct xt_where *wrote = &root->tensor->storage->wrote;
        return xt_fail(ctx, XT_STATE, "a constant of the graph (%s) was changed in place at %s:%d",
                       xt_describe(root->tensor, want, sizeof want),
                       wrote->file ? wrote->file : "?", wrote->line);
    }
    *out = given ? given : root->tensor;
    if (!given && root->required)
        return xt_fail(ctx, XT_ARGUMENT, "%s is required and was not fed, wanted %s",
                       who_is(root, who, sizeof who), xt_describe(root->tensor, want, sizeof want));
    if (!given) return XT_OK;
    if (given->storage->hollow)
        return xt_fail(ctx, XT_STATE, "%s is given a value of a recorded graph",
                       who_is(root, who, sizeof who));
    if (given->storage->device != root->device)
        return xt_fail(ctx, XT_DEVICE, "%s is on %s, wanted %s", who_is(root, who, sizeof who),
                       ctx->backend[given->storage->device]->name,
                       ctx->backend[root->device]->name);
    if (given->dtype != root->tensor->dtype ||
        !xt_has_shape(given, root->tensor->shape, root->tensor->ndim))
        return xt_fail(ctx, given->dtype != root->tensor->dtype ? XT_DTYPE : XT_SHAPE,
                       "%s is %s, wanted %s", who_is(root, who, sizeof who),
                       xt_describe(given, got, sizeof got),
                       xt_describe(root->tensor, want, sizeof want));
    bool whole = root->lent || (root->kind == XT_ROOT_STATE && xt_is_contiguous(root->tensor));
    if (whole && !xt_is_contiguous(given))
        return xt_fail(ctx, XT_ARGUMENT,
                       "%s is written in place and is given a tensor that is "
                       "not contiguous",
                       who_is(root, who, sizeof who));
    return XT_OK;
}

/* What one run holds. */
struct running {
    struct xt_graph *g;
    struct xt_plan *plan;
    struct xt_tensor **sources; /* n_roots: new references */
    struct xt_tensor **backups; /* n_roots */
};

/* What is written may not be what anything else of the run reads. */
static enum xt_status check_lent(struct xt_ctx *ctx, const struct running *run, int r) {
    const struct xt_graph_root *roots = run->g->roots;
    char who[300];
    for (int s = 0; s < run->g->n_roots; s++) {
        const struct xt_tensor *other = run->sources[s];
        if (s == r || !other || other->storage != run->sources[r]->storage) continue;
        return xt_fail(ctx, XT_ARGUMENT, "%s is lent and shares its bytes with %s",
                       who_is(&roots[r], who, sizeof who),
                       roots[s].name ? roots[s].name : "a constant");
    }
    return XT_OK;
}

static enum xt_status bind_outside(struct xt_ctx *ctx, struct running *run,
                                   struct xt_tensor *const *feeds, struct xt_tensor *const *state) {
    struct xt_graph *g = run->g;
    struct xt_plan *plan = run->plan;
    for (int r = 0; r < g->n_roots; r++) {
        if (plan->place[r] != XT_PLACE_BOUND) continue;
        const struct xt_graph_root *root = &g->roots[r];
        struct xt_tensor *t = NULL, *given = NULL;
        if (root->kind == XT_ROOT_INPUT) given = feeds ? feeds[root->index] : NULL;
        if (root->kind == XT_ROOT_STATE) given = state ? state[root->index] : NULL;
        XT_TRY(source_of(ctx, root, given, &t));
        run->sources[r] = xt_tensor_retain(t);
    }
    for (int r = 0; r < g->n_roots; r++) {
        struct xt_tensor *t = run->sources[r];
        if (!t || g->roots[r].kind != XT_ROOT_INPUT) continue;
        if (plan->lent[r]) XT_TRY(check_lent(ctx, run, r));
        if (g->roots[r].lent) continue;
        bool copy = !xt_is_contiguous(t); /* also of bytes that the run will write */
        for (int s = 0; s < g->n_roots && !copy; s++)
            copy = plan->updated[s] && run->sources[s] && run->sources[s]->storage == t->storage;
        if (!copy) continue;
        struct xt_tensor *own;
        XT_TRY(copy_of(ctx, t, &own));
        xt_tensor_release(ctx, t);
        run->sources[r] = own;
    }
    for (int r = 0; r < g->n_roots; r++) {
        struct xt_tensor *t = run->sources[r];
        if (!t) continue;
        plan->bind[r] = t->storage;
        plan->bind_at[r] = t->offset * (int64_t)xt_dtype_bytes(t->dtype);
        if (plan->backup && plan->updated[r]) XT_TRY(copy_of(ctx, t, &run->backups[r]));
    }
    return XT_OK;
}

static void bind_tensors(const struct xt_plan *plan) {
    for (int i = 0; i < plan->n_tensors; i++) {
        struct xt_tensor *t = &plan->tensors[i];
        int r = plan->tensor_root[i];
        t->storage = plan->bind[r];
        t->offset = plan->bind_at[r] / (int64_t)xt_dtype_bytes(t->dtype) + plan->tensor_offset[i];
    }
}

static enum xt_status run_steps(struct xt_ctx *ctx, struct xt_plan *plan,
                                struct xt_storage *const *arena) {
    struct xt_scratch_room *room = &ctx->scratch;
    bool placed = plan->memory.placed;
    enum xt_status status = XT_OK;
    room->on = true;
    for (int p = 0; p < plan->n_nodes; p++) {
        struct xt_plan_step *step = &plan->steps[p];
        ctx->fixed_where = step->where;
        room->device = step->device;
        room->base =
            placed && step->scratch ? (char *)arena[step->device]->data + step->scratch_at : NULL;
        room->bytes = step->scratch;
        room->used = room->most = 0;
        status = xt_launch_ready(ctx, step->slot, &step->args, step->outputs);
        if (!placed) step->scratch = room->most;
        if (room->most > plan->memory.scratch) plan->memory.scratch = room->most;
        if (status == XT_OK) continue;
        char who[200];
        snprintf(who, sizeof who, "%s made at %s:%d", step->slot->op->name,
                 step->where.file ? step->where.file : "?", step->where.line);
        ctx->fixed_where = (struct xt_where){0};
        status = xt_fail_in(ctx, status, who);
        break;
    }
    ctx->fixed_where = (struct xt_where){0};
    *room = (struct xt_scratch_room){0};
    return status;
}

/* After the first run that came to its end: scratch has its place among the values. */
static enum xt_status place_scratch(struct xt_ctx *ctx, struct xt_plan *plan) {
    if (plan->memory.placed) return XT_OK;
    plan->memory.placed = true;
    enum xt_status status = xt_plan_place_items(ctx, plan);
    plan->memory.placed = status == XT_OK;
    return status;
}

/* Before the run: the tensors around what it makes or was lent. After it: copies of the rest. */
static enum xt_status give_outputs(struct xt_ctx *ctx, const struct xt_graph *g,
                                   struct xt_plan *plan, bool after, struct xt_tensor **outputs) {
    for (int i = 0; i < plan->n_outputs; i++) {
        struct xt_tensor *t = &plan->tensors[plan->export_tensor[i]];
        int r = plan->tensor_root[plan->export_tensor[i]];
        bool own = plan->place[r] == XT_PLACE_OUTPUT || g->roots[r].lent;
        if (own && !after) XT_TRY(xt_tensor_alias(ctx, t, &outputs[i]));
        if (!own && after) XT_TRY(copy_of(ctx, t, &outputs[i]));
    }
    return XT_OK;
}

enum xt_status xt_graph_run(struct xt_ctx *ctx, struct xt_graph *g, int e,
                            struct xt_tensor *const *feeds, struct xt_tensor *const *state,
                            struct xt_tensor **outputs) {
    if (ctx->graph) return xt_fail(ctx, XT_STATE, "a graph cannot run while one is recorded");
    struct running run = {.g = g};
    struct xt_storage *arena[XT_DEVICE_COUNT] = {NULL};
    size_t bytes = ((size_t)g->n_roots + 1) * sizeof(struct xt_tensor *);
    size_t fed_bytes = ((size_t)g->n_inputs + 1) * sizeof(bool);
    size_t made_bytes = ((size_t)g->exports[e].n + 1) * sizeof(struct xt_tensor *);
    enum xt_status status = XT_MEMORY;
    bool ran = false;
    bool *fed = xt_host_alloc(ctx, fed_bytes);
    run.sources = xt_host_alloc(ctx, bytes);
    run.backups = xt_host_alloc(ctx, bytes);
    struct xt_tensor **made = xt_host_alloc(ctx, made_bytes);
    struct xt_plan *plan = NULL;
    if (!fed || !run.sources || !run.backups || !made) goto done;
    for (int i = 0; i < g->n_inputs; i++) fed[i] = feeds && feeds[i];
    XT_GO(xt_plan_get(ctx, g, e, fed, &plan));
    run.plan = plan;
    XT_GO(bind_outside(ctx, &run, feeds, state));
    for (int d = 0; d < XT_DEVICE_COUNT; d++)
        if (plan->arena_bytes[d])
            XT_GO(xt_storage_new(ctx, (enum xt_device)d, plan->arena_bytes[d], &arena[d]));
    for (int r = 0; r < g->n_roots; r++) {
        if (plan->place[r] == XT_PLACE_ARENA) {
            plan->bind[r] = arena[g->roots[r].device];
            plan->bind_at[r] = (int64_t)plan->arena_at[r];
        } else if (plan->place[r] == XT_PLACE_OUTPUT) {
            plan->bind[r] = NULL;
            plan->bind_at[r] = 0;
            XT_GO(xt_storage_new(ctx, g->roots[r].device, g->roots[r].bytes, &plan->bind[r]));
        }
    }
    bind_tensors(plan);
    XT_GO(give_outputs(ctx, g, plan, false, made));
    ran = true;
    XT_GO(run_steps(ctx, plan, arena));
    XT_GO(give_outputs(ctx, g, plan, true, made));
    for (int r = 0; r < g->n_roots; r++)
        if ((plan->updated[r] || plan->lent[r]) && run.sources[r])
            xt_storage_written(ctx, run.sources[r]->storage);
    memcpy(outputs, made, (size_t)g->exports[e].n * sizeof *made);
    place_scratch(ctx, plan); /* tried again after the next run where memory is short */
done:
    if (status != XT_OK && made)
        for (int i = 0; i < g->exports[e].n; i++) xt_tensor_release(ctx, made[i]);
    for (int r = 0; r < g->n_roots; r++) {
        if (run.backups && run.backups[r]) {
            if (status != XT_OK && ran) write_back(ctx, run.sources[r], run.backups[r]);
            xt_tensor_release(ctx, run.backups[r]);
        }
        if (plan && plan->place[r] == XT_PLACE_OUTPUT && plan->bind[r])
            xt_storage_release(ctx, plan->bind[r]);
        if (plan) plan->bind[r] = NULL;
        if (run.sources) xt_tensor_release(ctx, run.sources[r]);
    }
    for (int d = 0; d < XT_DEVICE_COUNT; d++)
        if (arena[d]) xt_storage_release(ctx, arena[d]);
    xt_host_free(ctx, made, made_bytes);
    xt_host_free(ctx, run.backups, bytes);
    xt_host_free(ctx, run.sources, bytes);
    xt_host_free(ctx, fed, fed_bytes);
    return status;
}
