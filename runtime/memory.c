/*
 * memory.c: the caching allocator of the host, for tensors' bytes and the runtime's own objects;
 * pool.c is that of other devices.
 *
 * Blocks come in size classes, an eighth of a power of two apart, and go back to the list of their
 * class: a training loop asks the system for nothing after its second step. Freed blocks are linked
 * through their own first bytes. Counting is done here, for every device.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "context.h"

#define SMALLEST 64
#define HUGE_PAGE ((size_t)2 << 20)

/* The class of `bytes` and, in *capacity, its block size: 64, 128, ... 512, then 8 steps a
   power. */
static int size_class(size_t bytes, size_t *capacity) {
    if (bytes <= 8 * SMALLEST) {
        size_t k = bytes ? (bytes - 1) / SMALLEST : 0;
        *capacity = (k + 1) * SMALLEST;
        return (int)k;
    }
    int power =
        63 - __builtin_clzll((unsigned long long)(bytes - 1)); /* 2^power < bytes <= 2^(power+1) */
    size_t step = (size_t)1 << (power - 3);
    size_t k = (bytes - 1 - ((size_t)1 << power)) / step;
    *capacity = ((size_t)1 << power) + (k + 1) * step;
    return 8 + (power - 9) * 8 + (int)k;
}

static void *from_system(struct xt_ctx *ctx, size_t capacity) {
    size_t limit = ctx->limit[XT_CPU];
    struct xt_memory *m = &ctx->memory[XT_CPU];
    if (limit && m->reserved_bytes + capacity > limit) {
        xt_memory_trim(ctx, XT_CPU);
        if (m->reserved_bytes + capacity > limit) return NULL;
    }
    size_t alignment = capacity >= 2 * HUGE_PAGE ? HUGE_PAGE : SMALLEST;
    void *data = aligned_alloc(alignment, (capacity + alignment - 1) / alignment * alignment);
    if (!data) return NULL;
    if (alignment == HUGE_PAGE) madvise(data, capacity, MADV_HUGEPAGE);
    m->reserved_bytes += capacity;
    m->system_allocs++;
    return data;
}

/* Whether the planned failure is due now. */
static bool must_fail(struct xt_ctx *ctx) {
    return ctx->fail_in > 0 && --ctx->fail_in == 0;
}

static void *take(struct xt_ctx *ctx, size_t bytes, size_t *capacity) {
    int k = size_class(bytes, capacity);
    void *data = ctx->pool.free_list[k];
    if (data)
        memcpy(&ctx->pool.free_list[k], data, sizeof(void *));
    else
        data = from_system(ctx, *capacity);
    if (data && ctx->poison) memset(data, 0xFF, *capacity);
    return data;
}

static void give(struct xt_ctx *ctx, void *data, size_t capacity) {
    if (!data) return;
    if (ctx->no_cache) {
        free(data);
        ctx->memory[XT_CPU].reserved_bytes -= capacity;
        return;
    }
    size_t same;
    int k = size_class(capacity, &same);
    if (ctx->poison) memset(data, 0xFF, capacity);
    memcpy(data, &ctx->pool.free_list[k], sizeof(void *));
    ctx->pool.free_list[k] = data;
}

void xt_memory_trim(struct xt_ctx *ctx, enum xt_device device) {
    if (device != XT_CPU) {
        if (ctx->arena[device]) xt_arena_trim(ctx, ctx->arena[device]);
        return;
    }
    for (int power = 0; power < XT_SIZE_CLASSES; power++) {
        void *data = ctx->pool.free_list[power];
        size_t capacity = power < 8 ? (size_t)(power + 1) * SMALLEST : 0;
        if (power >= 8) {
            int p = 9 + (power - 8) / 8, k = (power - 8) % 8;
            if (p < 63) capacity = ((size_t)1 << p) + ((size_t)k + 1) * ((size_t)1 << (p - 3));
        }
        while (data) {
            void *next;
            memcpy(&next, data, sizeof next);
            free(data);
            ctx->memory[XT_CPU].reserved_bytes -= capacity;
            data = next;
        }
        ctx->pool.free_list[power] = NULL;
    }
}

void xt_memory_close(struct xt_ctx *ctx) {
    xt_memory_trim(ctx, XT_CPU);
}

/* ---- host objects ---------------------------------------------------------------------------- */

static void collect(struct xt_ctx *ctx) {
    if (!ctx->hooks.collect || ctx->collecting) return;
    ctx->collecting = true;
    ctx->hooks.collect(ctx->hooks.user);
    ctx->collecting = false;
}

void *xt_host_alloc(struct xt_ctx *ctx, size_t bytes) {
    size_t capacity;
    void *data = NULL;
    bool planned = must_fail(ctx);
    if (!planned) {
        data = take(ctx, bytes, &capacity);
        if (!data) {
            collect(ctx);
            data = take(ctx, bytes, &capacity);
        }
    }
    if (!data) {
        xt_fail(ctx, XT_MEMORY, "out of memory: %zu bytes for the runtime's records", bytes);
        return NULL;
    }
    ctx->live++;
    return memset(data, 0, bytes);
}

void xt_host_free(struct xt_ctx *ctx, void *data, size_t bytes) {
    if (!data) return;
    size_t capacity;
    size_class(bytes, &capacity);
    ctx->live--;
    give(ctx, data, capacity);
}

/* ---- device bytes ---------------------------------------------------------------------------- */

struct holders {
    char *text;   /* where to write */
    size_t bytes; /* room left */
};

static void list_holder(void *user, struct xt_where where, size_t bytes, int64_t storages) {
    struct holders *h = user;
    int n = snprintf(h->text, h->bytes, "\n  %8.1f MiB in %lld tensors made at %s:%d",
                     (double)bytes / 1048576.0, (long long)storages,
                     where.file ? where.file : "(unknown)", where.line);
    if (n < 0) return;
    size_t used = (size_t)n < h->bytes ? (size_t)n : h->bytes;
    h->text += used;
    h->bytes -= used;
}

static enum xt_status out_of_memory(struct xt_ctx *ctx, enum xt_device device, size_t bytes) {
    struct xt_memory *m = &ctx->memory[device];
    char text[1400] = "";
    struct holders h = {text, sizeof text};
    xt_memory_holders(ctx, device, 8, list_holder, &h);
    return xt_fail(ctx, XT_MEMORY, "out of memory on %s: %.1f MiB wanted, %.1f MiB live%s%s",
                   ctx->backend[device]->name, (double)bytes / 1048576.0,
                   (double)m->live_bytes / 1048576.0, *text ? "; the biggest holders:" : "", text);
}

static void *take_on(struct xt_ctx *ctx, enum xt_device device, size_t bytes, size_t *capacity) {
    if (device == XT_CPU) return take(ctx, bytes, capacity);
    *capacity = bytes;
    return xt_arena_take(ctx, ctx->arena[device], bytes);
}

enum xt_status xt_device_alloc(struct xt_ctx *ctx, enum xt_device device, size_t bytes, void **data,
                               size_t *capacity) {
    if (must_fail(ctx)) return out_of_memory(ctx, device, bytes);
    void *block = take_on(ctx, device, bytes, capacity);
    if (!block) {
        collect(ctx);
        block = take_on(ctx, device, bytes, capacity);
        if (!block) return out_of_memory(ctx, device, bytes);
    }
    *data = block;
    struct xt_memory *m = &ctx->memory[device];
    m->live_bytes += bytes;
    m->made_bytes += bytes;
    if (m->live_bytes > m->peak_bytes) m->peak_bytes = m->live_bytes;
    ctx->live++;
    return XT_OK;
}

void xt_device_free(struct xt_ctx *ctx, enum xt_device device, void *data, size_t bytes,
                    size_t capacity) {
    ctx->memory[device].live_bytes -= bytes;
    ctx->live--;
    if (device == XT_CPU)
        give(ctx, data, capacity);
    else
        xt_arena_give(ctx, ctx->arena[device], data);
}

/* A graph's run places the scratch of its kernels among its values, once it has seen how much each
   takes; what does not fit after all comes from the allocator. */
enum xt_status xt_scratch_get(struct xt_ctx *ctx, enum xt_device device, size_t bytes, void **out) {
    struct xt_scratch_room *room = &ctx->scratch;
    size_t capacity, rounded = (bytes + XT_SCRATCH_ALIGN - 1) / XT_SCRATCH_ALIGN * XT_SCRATCH_ALIGN;
    if (room->on && room->device == device) {
        if (room->base && rounded <= room->bytes - room->used) {
            *out = room->base + room->used;
            room->used += rounded;
            return XT_OK;
        }
        if (!room->base) room->used += rounded;
        if (room->used > room->most) room->most = room->used;
    }
    return xt_device_alloc(ctx, device, bytes, out, &capacity);
}

void xt_scratch_put(struct xt_ctx *ctx, enum xt_device device, void *data, size_t bytes) {
    if (!data) return;
    struct xt_scratch_room *room = &ctx->scratch;
    size_t capacity, rounded = (bytes + XT_SCRATCH_ALIGN - 1) / XT_SCRATCH_ALIGN * XT_SCRATCH_ALIGN;
    if (room->on && room->device == device) {
        const size_t at = (size_t)((uintptr_t)data - (uintptr_t)room->base);
        if (room->base && at < room->bytes) {
            if (at + rounded == room->used) room->used = at; /* else it stays until the end */
            return;
        }
        if (!room->base) room->used -= rounded;
    }
    size_class(bytes, &capacity);
    xt_device_free(ctx, device, data, bytes, capacity);
}

/* ---- accounting ------------------------------------------------------------------------------ */

void xt_memory(const struct xt_ctx *ctx, enum xt_device device, struct xt_memory *out) {
    *out = ctx->memory[device];
}

void xt_memory_reset_peak(struct xt_ctx *ctx, enum xt_device device) {
    ctx->memory[device].peak_bytes = ctx->memory[device].live_bytes;
}

void xt_memory_limit(struct xt_ctx *ctx, enum xt_device device, size_t bytes) {
    ctx->limit[device] = bytes;
}

void xt_memory_poison(struct xt_ctx *ctx, bool on) {
    ctx->poison = on;
}

void xt_memory_cache(struct xt_ctx *ctx, bool on) {
    ctx->no_cache = !on;
    for (int d = 0; d < XT_DEVICE_COUNT && !on; d++) xt_memory_trim(ctx, (enum xt_device)d);
}

int64_t xt_live_count(const struct xt_ctx *ctx) {
    return ctx->live;
}

void xt_fail_allocation(struct xt_ctx *ctx, int64_t n) {
    ctx->fail_in = n;
}

struct holder {
    struct xt_where where;
    size_t bytes;
    int64_t storages;
};

static int by_bytes(const void *a, const void *b) {
    const struct holder *x = a, *y = b;
    return x->bytes < y->bytes ? 1 : x->bytes > y->bytes ? -1 : 0;
}

void xt_memory_holders(struct xt_ctx *ctx, enum xt_device device, int most, xt_holder_fn *fn,
                       void *user) {
    enum { PLACES = 256 }; /* later places are left out when there are more */
    struct holder *list = malloc(PLACES * sizeof *list);
    if (!list) return;
    int n = 0;
    for (struct xt_storage *s = ctx->storages; s; s = s->next) {
        if (s->device != device || !s->bytes) continue;
        int i = 0;
        while (i < n && (list[i].where.file != s->made.file || list[i].where.line != s->made.line))
            i++;
        if (i == PLACES) continue;
        if (i == n) list[n++] = (struct holder){.where = s->made};
        list[i].bytes += s->bytes;
        list[i].storages++;
    }
    qsort(list, (size_t)n, sizeof *list, by_bytes);
    for (int i = 0; i < n && i < most; i++)
        fn(user, list[i].where, list[i].bytes, list[i].storages);
    free(list);
}
