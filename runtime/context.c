/* context.c: making and closing a context, interned strings, seeds. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "context.h"

static int default_threads(void) {
    const char *text = getenv("OMP_NUM_THREADS");
    int asked = text ? atoi(text) : 0;
    if (asked > 0) return asked;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores > 0 ? (int)cores : 1;
}

struct xt_ctx *xt_ctx_new(void) {
    struct xt_ctx *ctx = calloc(1, sizeof *ctx);
    if (!ctx) return NULL;
    ctx->threads = default_threads();
    xt_backend_open(ctx);
    if (xt_ops_open(ctx) != XT_OK) {
        xt_ctx_free(ctx);
        return NULL;
    }
    return ctx;
}

void xt_ctx_free(struct xt_ctx *ctx) {
    if (!ctx) return;
    xt_profile_stop(ctx);
    xt_ops_close(ctx);
    xt_onednn_close(ctx);
    xt_backend_close(ctx);
    xt_choices_free(ctx->choices);
    xt_memory_close(ctx);
    for (size_t i = 0; i < ctx->cap_interned; i++) free(ctx->interned[i]);
    free(ctx->interned);
    free(ctx);
}

void xt_ctx_hooks(struct xt_ctx *ctx, const struct xt_hooks *hooks) {
    ctx->hooks = *hooks;
}

/* ---- interned strings ----------------------------------------------------------------------- */

static char **find_interned(char **table, size_t capacity, const char *text) {
    size_t i = (size_t)xt_hash(text, strlen(text)) & (capacity - 1);
    while (table[i] && strcmp(table[i], text) != 0) i = (i + 1) & (capacity - 1);
    return &table[i];
}

static bool grow_interned(struct xt_ctx *ctx) {
    size_t capacity = ctx->cap_interned ? 2 * ctx->cap_interned : 64;
    char **table = calloc(capacity, sizeof *table);
    if (!table) return false;
    for (size_t i = 0; i < ctx->cap_interned; i++)
        if (ctx->interned[i]) *find_interned(table, capacity, ctx->interned[i]) = ctx->interned[i];
    free(ctx->interned);
    ctx->interned = table;
    ctx->cap_interned = capacity;
    return true;
}

const char *xt_intern(struct xt_ctx *ctx, const char *text) {
    if (ctx->last_interned && strcmp(ctx->last_interned, text) == 0) return ctx->last_interned;
    if (2 * ctx->n_interned >= ctx->cap_interned && !grow_interned(ctx)) return NULL;
    char **place = find_interned(ctx->interned, ctx->cap_interned, text);
    if (!*place) {
        *place = strdup(text);
        if (!*place) return NULL;
        ctx->n_interned++;
    }
    return ctx->last_interned = *place;
}

struct xt_where xt_here(struct xt_ctx *ctx) {
    struct xt_where where = ctx->fixed_where;
    if (!where.file && ctx->hooks.locate) ctx->hooks.locate(ctx->hooks.user, ctx, &where);
    return where;
}

/* ---- modes ---------------------------------------------------------------------------------- */

int xt_threads(const struct xt_ctx *ctx) {
    return ctx->threads;
}

void xt_set_threads(struct xt_ctx *ctx, int threads) {
    ctx->threads = threads < 1 ? 1 : threads > 1024 ? 1024 : threads;
}

const char *xt_isa(const struct xt_ctx *ctx) {
    return ctx->isa;
}

void xt_set_device(struct xt_ctx *ctx, enum xt_device device) {
    ctx->device = device;
}

void xt_no_grad_push(struct xt_ctx *ctx) {
    ctx->no_grad++;
}

void xt_no_grad_pop(struct xt_ctx *ctx) {
    ctx->no_grad--;
}

bool xt_recording(const struct xt_ctx *ctx) {
    return ctx->no_grad == 0;
}

/* ---- seeds: splitmix64 (Steele, Lea, Flood 2014) -------------------------------------------- */

uint64_t xt_splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

uint64_t xt_seed_mix(uint64_t seed, uint64_t a) {
    return xt_splitmix64(xt_splitmix64(seed) ^ a);
}

uint64_t xt_hash(const void *data, size_t bytes) {
    return XXH3_64bits(data, bytes);
}
