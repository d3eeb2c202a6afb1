/*
 * pool.c: the caching allocator of a device whose memory the host cannot touch.
 *
 * Memory comes from the system in pieces, is cut into blocks as they are asked for, and blocks that
 * lie side by side grow together again when both are free. All records are kept on the host. Work
 * on a device runs in the order it was queued, so a block given back may be taken again at once.
 */
#include <stdlib.h>

#include "context.h"

#define GRAIN ((size_t)512)            /* all blocks are multiples of it */
#define SMALL ((size_t)1 << 20)        /* blocks up to this are cut from small pieces */
#define SMALL_PIECE ((size_t)2 << 20)  /* a piece for small blocks */
#define LARGE_PIECE ((size_t)32 << 20) /* the least piece for large ones */
#define BUCKETS 4096                   /* of the table from addresses to blocks */
#define BINS 512                       /* free blocks by size, an eighth of a power of two each */

struct block {
    char *data;
    size_t bytes;
    bool free, small;
    struct block *before, *after; /* its neighbours within the piece */
    struct block *prev, *next;    /* in its bin when free, in its bucket when not */
};

struct xt_arena {
    enum xt_device device;
    struct block *bins[2][BINS];    /* [small] */
    struct block *buckets[BUCKETS]; /* blocks in use, by address */
    struct block *spare;            /* records without a block, linked by next */
};

/* The bin of a free block, growing with its size. */
static int bin_of(size_t bytes) {
    size_t units = bytes / GRAIN; /* 1 or more */
    int power = 63 - __builtin_clzll((unsigned long long)units);
    if (power < 3) return (int)units;
    return 8 + (power - 3) * 8 + (int)((units >> (power - 3)) - 8);
}

static size_t bucket_of(const void *data) {
    return (size_t)(((uintptr_t)data >> 9) * 0x9E3779B97F4A7C15u >> 52) % BUCKETS;
}

static void push(struct block **head, struct block *b) {
    b->prev = NULL;
    b->next = *head;
    if (b->next) b->next->prev = b;
    *head = b;
}

static void drop(struct block **head, struct block *b) {
    if (b->prev)
        b->prev->next = b->next;
    else
        *head = b->next;
    if (b->next) b->next->prev = b->prev;
}

static struct block **bin(struct xt_arena *a, const struct block *b) {
    return &a->bins[b->small][bin_of(b->bytes)];
}

static struct block *record_new(struct xt_arena *a) {
    struct block *b = a->spare;
    if (!b) return malloc(sizeof *b);
    a->spare = b->next;
    return b;
}

static void record_free(struct xt_arena *a, struct block *b) {
    b->next = a->spare;
    a->spare = b;
}

struct xt_arena *xt_arena_new(enum xt_device device) {
    struct xt_arena *a = calloc(1, sizeof *a);
    if (a) a->device = device;
    return a;
}

/* ---- pieces of the system's memory ----------------------------------------------------------- */

static void piece_free(struct xt_ctx *ctx, struct xt_arena *a, struct block *b) {
    drop(bin(a, b), b);
    ctx->memory[a->device].reserved_bytes -= b->bytes;
    ctx->backend[a->device]->release(ctx, b->data);
    record_free(a, b);
}

void xt_arena_trim(struct xt_ctx *ctx, struct xt_arena *a) {
    for (int small = 0; small < 2; small++)
        for (int k = 0; k < BINS; k++)
            for (struct block *b = a->bins[small][k], *next; b; b = next) {
                next = b->next;
                if (!b->before && !b->after) piece_free(ctx, a, b);
            }
}

void xt_arena_free(struct xt_ctx *ctx, struct xt_arena *a) {
    if (!a) return;
    /* Blocks still in use belong to tensors that outlive the context: none in a tidy program. */
    xt_arena_trim(ctx, a);
    while (a->spare) {
        struct block *next = a->spare->next;
        free(a->spare);
        a->spare = next;
    }
    free(a);
}

/* A new piece with a free block of at least `bytes`, or NULL. */
static struct block *piece_new(struct xt_ctx *ctx, struct xt_arena *a, size_t bytes, bool small) {
    struct xt_memory *m = &ctx->memory[a->device];
    size_t size = small ? SMALL_PIECE : LARGE_PIECE;
    if (bytes > size) size = (bytes + SMALL_PIECE - 1) / SMALL_PIECE * SMALL_PIECE;
    if (ctx->no_cache) size = bytes;
    size_t limit = ctx->limit[a->device];
    struct block *b = record_new(a);
    if (!b) return NULL;
    void *data = NULL;
    for (int attempt = 0; attempt < 3 && !data; attempt++) {
        if (attempt == 1) xt_arena_trim(ctx, a);
        if (attempt == 2) size = bytes; /* what is asked for and no more */
        if (limit && m->reserved_bytes + size > limit) continue;
        data = ctx->backend[a->device]->allocate(ctx, size);
    }
    if (!data) {
        record_free(a, b);
        return NULL;
    }
    m->reserved_bytes += size;
    m->system_allocs++;
    *b = (struct block){.data = data, .bytes = size, .free = true, .small = small};
    push(bin(a, b), b);
    return b;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* The smallest free block that holds `bytes`, or NULL. */
static struct block *best(struct xt_arena *a, size_t bytes, bool small) {
    for (int k = bin_of(bytes); k < BINS; k++) {
        struct block *found = NULL;
        for (struct block *b = a->bins[small][k]; b; b = b->next)
            if (b->bytes >= bytes && (!found || b->bytes < found->bytes)) found = b;
        if (found) return found;
    }
    return NULL;
}

/* Cuts what is more than `bytes` off block b, which is in no list. */
static void cut(struct xt_arena *a, struct block *b, size_t bytes) {
    size_t rest = b->bytes - bytes;
    if (rest < (b->small ? GRAIN : SMALL)) return;
    struct block *tail = record_new(a);
    if (!tail) return; /* then the block is larger than it need be */
    *tail = (struct block){.data = b->data + bytes,
                           .bytes = rest,
                           .free = true,
                           .small = b->small,
                           .before = b,
                           .after = b->after};
    if (tail->after) tail->after->before = tail;
    b->after = tail;
    b->bytes = bytes;
    push(bin(a, tail), tail);
}

void *xt_arena_take(struct xt_ctx *ctx, struct xt_arena *a, size_t bytes) {
    if (bytes > SIZE_MAX / 2) return NULL;
    bytes = bytes ? (bytes + GRAIN - 1) / GRAIN * GRAIN : GRAIN;
    bool small = bytes <= SMALL;
    struct block *b = best(a, bytes, small);
    if (!b) b = piece_new(ctx, a, bytes, small);
    if (!b) return NULL;
    drop(bin(a, b), b);
    cut(a, b, bytes);
    b->free = false;
    push(&a->buckets[bucket_of(b->data)], b);
    if (ctx->poison) ctx->backend[a->device]->fill(ctx, b->data, 0xFF, b->bytes);
    return b->data;
}

/* Joins b with the free block behind it; both are in no list. */
static void join(struct xt_arena *a, struct block *b, struct block *tail) {
    b->bytes += tail->bytes;
    b->after = tail->after;
    if (b->after) b->after->before = b;
    record_free(a, tail);
}

void xt_arena_give(struct xt_ctx *ctx, struct xt_arena *a, void *data) {
    struct block **bucket = &a->buckets[bucket_of(data)], *b = *bucket;
    while (b && b->data != data) b = b->next;
    if (!b) return;
    drop(bucket, b);
    if (ctx->poison) ctx->backend[a->device]->fill(ctx, b->data, 0xFF, b->bytes);
    b->free = true;
    if (b->after && b->after->free) {
        drop(bin(a, b->after), b->after);
        join(a, b, b->after);
    }
    if (b->before && b->before->free) {
        struct block *head = b->before;
        drop(bin(a, head), head);
        join(a, head, b);
        b = head;
    }
    push(bin(a, b), b);
    if (ctx->no_cache && !b->before && !b->after) piece_free(ctx, a, b);
}
