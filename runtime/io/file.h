/*
 * file.h: whole files in and out.
 *
 * A file that others may read is written under a temporary name beside it, synced, and renamed: at
 * every moment there is the old one or the new one, whole.
 */
#ifndef XT_FILE_H
#define XT_FILE_H

#include "../xtrain.h"

/* A file mapped for reading. */
struct xt_map {
    const unsigned char *data; /* NULL when empty */
    size_t bytes;
};

enum xt_status xt_map_open(struct xt_ctx *ctx, const char *path, struct xt_map *out);
void xt_map_close(struct xt_map *map);

/* A file being written under a temporary name. */
struct xt_writer {
    char *path;      /* the final name */
    char *temporary; /* what it is called until then */
    int fd;          /* -1: not open */
};

enum xt_status xt_writer_open(struct xt_ctx *ctx, const char *path, struct xt_writer *out);
enum xt_status xt_writer_put(struct xt_ctx *ctx, struct xt_writer *w, const void *data,
                             size_t bytes);
/* Syncs, renames, syncs the folder. On failure the temporary file is gone and the old file
   there. */
enum xt_status xt_writer_commit(struct xt_ctx *ctx, struct xt_writer *w);
void xt_writer_abandon(struct xt_writer *w); /* after commit: nothing */

enum xt_status xt_sync_folder(struct xt_ctx *ctx, const char *path);

/* The text of a file, a pipe or, for "-", standard input; gzip and zstd are known by their first
   bytes and unpacked. malloc'd, NUL-terminated. */
enum xt_status xt_read_text(struct xt_ctx *ctx, const char *path, char **text, size_t *bytes);

#endif
