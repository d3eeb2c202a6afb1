/*
 * shards.h: token shards: files of token ids, mapped, read as one sequence.
 *
 * A shard is a 1024-byte header of little-endian int32 (magic 20240520, version 1: u16 ids or 2:
 * u32 ids, count), then the ids: what llm.c and nanoGPT-style tools write.
 */
#ifndef XT_SHARDS_H
#define XT_SHARDS_H

#include "../xtrain.h"

#define XT_SHARD_MAGIC 20240520
#define XT_SHARD_HEADER 1024 /* bytes */

struct xt_shards;

enum xt_status xt_shards_open(struct xt_ctx *ctx, const char *const *paths, int n,
                              struct xt_shards **out);
void xt_shards_close(struct xt_shards *shards);
int64_t xt_shards_count(const struct xt_shards *shards); /* ids in all files together */
/* n ids from position `first` (from 0) on, as int32. The range must lie inside (asserted). */
void xt_shards_read(const struct xt_shards *shards, int64_t first, int64_t n, int32_t *out);
/* Writes one shard, whole or not at all. width 2 or 4: bytes an id; ids: count * width bytes. */
enum xt_status xt_shard_write(struct xt_ctx *ctx, const char *path, int width, const void *ids,
                              int64_t count);

#endif
