/* The allocator of devices (runtime/pool.c) over a device made of host memory. */
#include <stdlib.h>
#include <string.h>

#include "call.h"

#include "../../runtime/context.h"

/* ---- a device -------------------------------------------------------------------------------- */

static size_t taken, most_taken, room; /* bytes of the system's, and how much it has */

static void *allocate(struct xt_ctx *ctx, size_t bytes) {
    (void)ctx;
    if (taken + bytes > room) return NULL;
    size_t *data = aligned_alloc(512, (bytes + 1023) / 512 * 512);
    assert_non_null(data);
    *data = bytes; /* the block's size stands before it */
    taken += bytes;
    if (taken > most_taken) most_taken = taken;
    return (char *)data + 512;
}

static void release(struct xt_ctx *ctx, void *data) {
    (void)ctx;
    size_t *start = (size_t *)(void *)((char *)data - 512);
    taken -= *start;
    free(start);
}

static enum xt_status fill(struct xt_ctx *ctx, void *data, int byte, size_t bytes) {
    (void)ctx;
    memset(data, byte, bytes);
    return XT_OK;
}

static enum xt_status finish(struct xt_ctx *ctx) {
    (void)ctx;
    return XT_OK;
}

static void close_device(struct xt_ctx *ctx, void *state) {
    (void)ctx, (void)state;
}

static const struct xt_backend device = {.name = "made of host memory",
                                         .close = close_device,
                                         .allocate = allocate,
                                         .release = release,
                                         .fill = fill,
                                         .finish = finish};

static struct xt_ctx *open_device(size_t bytes) {
    struct xt_ctx *ctx = xt_ctx_new();
    assert_non_null(ctx);
    ctx->backend[XT_CUDA] = &device;
    ctx->arena[XT_CUDA] = xt_arena_new(XT_CUDA);
    assert_non_null(ctx->arena[XT_CUDA]);
    taken = most_taken = 0;
    room = bytes;
    return ctx;
}

#define MiB ((size_t)1 << 20)

/* ---- tests ----------------------------------------------------------------------------------- */

struct held {
    unsigned char *data;
    size_t bytes;
    unsigned char mark; /* every byte */
};

static void check(const struct held *h) {
    for (size_t i = 0; i < h->bytes; i++) assert_int_equal(h->data[i], h->mark);
}

/* Blocks of all sizes, taken and given in any order: none overlaps another, all start at multiples
   of 512, and nothing is left in the end. */
static void random_use(void **state) {
    (void)state;
    struct xt_ctx *ctx = open_device((size_t)1 << 32);
    struct xt_arena *a = ctx->arena[XT_CUDA];
    enum { MOST = 200 };
    struct held held[MOST] = {{0}};
    uint64_t seed = 7;
    for (int step = 0; step < 6000; step++) {
        seed = xt_splitmix64(seed);
        struct held *h = &held[seed % MOST];
        if (h->data) {
            check(h);
            xt_arena_give(ctx, a, h->data);
            h->data = NULL;
            continue;
        }
        const uint64_t kind = seed >> 40 & 7, r = seed >> 20 & 0xFFFFF;
        h->bytes = kind < 5 ? r % 5000 : kind < 7 ? r % 60000 : r;
        h->mark = (unsigned char)step;
        h->data = xt_arena_take(ctx, a, h->bytes);
        assert_non_null(h->data);
        assert_int_equal((uintptr_t)h->data % 512, 0);
        memset(h->data, h->mark, h->bytes);
    }
    for (int i = 0; i < MOST; i++) {
        if (!held[i].data) continue;
        check(&held[i]);
        xt_arena_give(ctx, a, held[i].data);
    }
    xt_memory_trim(ctx, XT_CUDA);
    assert_int_equal(taken, 0);
    struct xt_memory m;
    xt_memory(ctx, XT_CUDA, &m);
    assert_int_equal(m.reserved_bytes, 0);
    xt_ctx_free(ctx);
}

/* The same blocks again and again: the system is asked for nothing after the first round. */
static void steady_loop(void **state) {
    (void)state;
    struct xt_ctx *ctx = open_device((size_t)1 << 32);
    struct xt_arena *a = ctx->arena[XT_CUDA];
    struct xt_memory m;
    int64_t asked = 0;
    for (int round = 0; round < 20; round++) {
        void *list[64];
        for (size_t i = 0; i < 64; i++) {
            list[i] = xt_arena_take(ctx, a, (i * i * 997 + 13) % (3 * MiB));
            assert_non_null(list[i]);
        }
        for (size_t i = 0; i < 64; i++) xt_arena_give(ctx, a, list[i * 37 % 64]);
        xt_memory(ctx, XT_CUDA, &m);
        if (round == 1) asked = m.system_allocs;
    }
    assert_int_equal(m.system_allocs, asked);
    xt_ctx_free(ctx);
    assert_int_equal(taken, 0);
}

/* Blocks side by side grow together: what was many small ones is one large one again. */
static void growing_together(void **state) {
    (void)state;
    struct xt_ctx *ctx = open_device(32 * MiB);
    struct xt_arena *a = ctx->arena[XT_CUDA];
    void *list[16];
    for (int i = 0; i < 16; i++) assert_non_null(list[i] = xt_arena_take(ctx, a, 2 * MiB));
    assert_null(xt_arena_take(ctx, a, 2 * MiB));
    for (int i = 0; i < 16; i++) xt_arena_give(ctx, a, list[i * 5 % 16]);
    void *all = xt_arena_take(ctx, a, 32 * MiB);
    assert_non_null(all);
    xt_arena_give(ctx, a, all);
    xt_ctx_free(ctx);
    assert_int_equal(taken, 0);
}

/* A device that is full, or a limit: NULL, and what is cached is given back to make room. */
static void full(void **state) {
    (void)state;
    struct xt_ctx *ctx = open_device(40 * MiB);
    struct xt_arena *a = ctx->arena[XT_CUDA];
    void *small = xt_arena_take(ctx, a, 100);
    assert_non_null(small);
    xt_arena_give(ctx, a, small); /* its piece stays cached */
    void *large = xt_arena_take(ctx, a, 39 * MiB);
    assert_non_null(large);
    assert_null(xt_arena_take(ctx, a, 2 * MiB));
    xt_arena_give(ctx, a, large);
    xt_memory_limit(ctx, XT_CUDA, 8 * MiB);
    xt_memory_trim(ctx, XT_CUDA);
    assert_null(xt_arena_take(ctx, a, 9 * MiB));
    large = xt_arena_take(ctx, a, 8 * MiB);
    assert_non_null(large);
    xt_arena_give(ctx, a, large);
    assert_null(xt_arena_take(ctx, a, SIZE_MAX - 5));
    xt_ctx_free(ctx);
    assert_int_equal(taken, 0);
}

/* Without a cache every block is the system's own. */
static void without_cache(void **state) {
    (void)state;
    struct xt_ctx *ctx = open_device((size_t)1 << 30);
    struct xt_arena *a = ctx->arena[XT_CUDA];
    xt_memory_cache(ctx, false);
    void *one = xt_arena_take(ctx, a, 1000), *two = xt_arena_take(ctx, a, 3 * MiB);
    assert_int_equal(taken, 1024 + 3 * MiB);
    xt_arena_give(ctx, a, one);
    assert_int_equal(taken, 3 * MiB);
    xt_arena_give(ctx, a, two);
    assert_int_equal(taken, 0);
    xt_ctx_free(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_use),       cmocka_unit_test(steady_loop),
        cmocka_unit_test(growing_together), cmocka_unit_test(full),
        cmocka_unit_test(without_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
