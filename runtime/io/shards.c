/* shards.c: see shards.h. Ids are little-endian, as every machine this runs on. */
#include "shards.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"

struct shard {
    struct xt_map map; /* the whole file */
    int width;         /* bytes an id */
    int64_t first;     /* position of its first id in the whole sequence */
    int64_t count;     /* ids in it */
};

struct xt_shards {
    struct shard *list; /* n */
    int n;
    int64_t count; /* all ids */
};

static enum xt_status open_one(struct xt_ctx *ctx, const char *path, struct shard *s) {
    enum xt_status status = xt_map_open(ctx, path, &s->map);
    if (status != XT_OK) return status;
    int32_t head[3];
    if (s->map.bytes < XT_SHARD_HEADER)
        return xt_fail(ctx, XT_FORMAT, "%s: %zu bytes, a token shard begins with %d", path,
                       s->map.bytes, XT_SHARD_HEADER);
    memcpy(head, s->map.data, sizeof head);
    if (head[0] != XT_SHARD_MAGIC)
        return xt_fail(ctx, XT_FORMAT, "%s: not a token shard (it begins with %d, wanted %d)", path,
                       head[0], XT_SHARD_MAGIC);
    if (head[1] != 1 && head[1] != 2)
        return xt_fail(ctx, XT_FORMAT, "%s: version %d, wanted 1 (u16 ids) or 2 (u32 ids)", path,
                       head[1]);
    s->width = head[1] == 1 ? 2 : 4;
    s->count = (uint32_t)head[2];
    size_t want = XT_SHARD_HEADER + (size_t)s->count * (size_t)s->width;
    if (s->map.bytes != want)
        return xt_fail(ctx, XT_FORMAT,
                       "%s: %lld ids of %d bytes make a file of %zu bytes, it has "
                       "%zu",
                       path, (long long)s->count, s->width, want, s->map.bytes);
    return XT_OK;
}

enum xt_status xt_shards_open(struct xt_ctx *ctx, const char *const *paths, int n,
                              struct xt_shards **out) {
    struct xt_shards *shards = calloc(1, sizeof *shards);
    if (shards) shards->list = calloc((size_t)n + 1, sizeof *shards->list);
    if (!shards || !shards->list) {
        free(shards);
        return xt_fail(ctx, XT_MEMORY, "out of memory");
    }
    enum xt_status status = XT_OK;
    for (int i = 0; i < n && status == XT_OK; i++) {
        status = open_one(ctx, paths[i], &shards->list[shards->n++]);
        shards->list[i].first = shards->count;
        shards->count += shards->list[i].count;
    }
    if (status == XT_OK)
        *out = shards;
    else
        xt_shards_close(shards);
    return status;
}

void xt_shards_close(struct xt_shards *shards) {
    if (!shards) return;
    for (int i = 0; i < shards->n; i++) xt_map_close(&shards->list[i].map);
    free(shards->list);
    free(shards);
}

int64_t xt_shards_count(const struct xt_shards *shards) {
    return shards->count;
}

void xt_shards_read(const struct xt_shards *shards, int64_t first, int64_t n, int32_t *out) {
    assert(first >= 0 && n >= 0 && first + n <= shards->count);
    for (int i = 0; i < shards->n && n > 0; i++) {
        const struct shard *s = &shards->list[i];
        if (first >= s->first + s->count) continue;
        int64_t at = first - s->first, take = s->count - at < n ? s->count - at : n;
        const unsigned char *ids = s->map.data + XT_SHARD_HEADER;
        if (s->width == 2) {
            const uint16_t *from = (const uint16_t *)(const void *)ids + at;
            for (int64_t k = 0; k < take; k++) out[k] = from[k];
        } else
            memcpy(out, ids + 4 * at, (size_t)take * 4);
        out += take;
        first += take;
        n -= take;
    }
}

enum xt_status xt_shard_write(struct xt_ctx *ctx, const char *path, int width, const void *ids,
                              int64_t count) {
    if (count > (int64_t)UINT32_MAX)
        return xt_fail(ctx, XT_ARGUMENT, "%s: %lld ids are too many for one shard", path,
                       (long long)count);
    int32_t head[XT_SHARD_HEADER / 4] = {XT_SHARD_MAGIC, width == 2 ? 1 : 2, (int32_t)count};
    struct xt_writer w;
    enum xt_status status = xt_writer_open(ctx, path, &w);
    if (status != XT_OK) return status;
    status = xt_writer_put(ctx, &w, head, sizeof head);
    if (status == XT_OK) status = xt_writer_put(ctx, &w, ids, (size_t)count * (size_t)width);
    if (status == XT_OK) return xt_writer_commit(ctx, &w);
    xt_writer_abandon(&w);
    return status;
}
