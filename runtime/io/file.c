/* file.c: mapping, atomic writing, and unpacking of gzip and zstd. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <zlib.h>
#include <zstd.h>

static enum xt_status refused(struct xt_ctx *ctx, const char *doing, const char *path) {
    return xt_fail(ctx, XT_IO, "cannot %s %s: %s", doing, path, strerror(errno));
}

enum xt_status xt_map_open(struct xt_ctx *ctx, const char *path, struct xt_map *out) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return refused(ctx, "open", path);
    struct stat info;
    enum xt_status status = XT_OK;
    void *data = NULL;
    if (fstat(fd, &info) != 0)
        status = refused(ctx, "look at", path);
    else if (!S_ISREG(info.st_mode))
        status = xt_fail(ctx, XT_IO, "cannot read %s: it is not a file", path);
    else if (info.st_size > 0) {
        data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) status = refused(ctx, "map", path);
    }
    close(fd);
    if (status == XT_OK) *out = (struct xt_map){data, (size_t)info.st_size};
    return status;
}

void xt_map_close(struct xt_map *map) {
    if (map->data) munmap((void *)(uintptr_t)map->data, map->bytes);
    *map = (struct xt_map){0};
}

/* ---- writing --------------------------------------------------------------------------------- */

enum xt_status xt_sync_folder(struct xt_ctx *ctx, const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return refused(ctx, "open the folder", path);
    enum xt_status status = fsync(fd) == 0 || errno == EINVAL ? XT_OK : refused(ctx, "sync", path);
    close(fd);
    return status;
}

enum xt_status xt_writer_open(struct xt_ctx *ctx, const char *path, struct xt_writer *out) {
    struct xt_writer w = {.path = strdup(path), .fd = -1};
    if (!w.path || asprintf(&w.temporary, "%s.%ld.tmp", path, (long)getpid()) < 0) {
        free(w.path);
        return xt_fail(ctx, XT_MEMORY, "out of memory");
    }
    w.fd = open(w.temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w.fd < 0) {
        enum xt_status status = refused(ctx, "write", w.temporary);
        free(w.path);
        free(w.temporary);
        return status;
    }
    *out = w;
    return XT_OK;
}

enum xt_status xt_writer_put(struct xt_ctx *ctx, struct xt_writer *w, const void *data,
                             size_t bytes) {
    const char *at = data;
    while (bytes) {
        ssize_t n = write(w->fd, at, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return refused(ctx, "write", w->temporary);
        at += n;
        bytes -= (size_t)n;
    }
    return XT_OK;
}

static enum xt_status sync_parent(struct xt_ctx *ctx, const char *path) {
    char *copy = strdup(path);
    if (!copy) return xt_fail(ctx, XT_MEMORY, "out of memory");
    enum xt_status status = xt_sync_folder(ctx, dirname(copy));
    free(copy);
    return status;
}

enum xt_status xt_writer_commit(struct xt_ctx *ctx, struct xt_writer *w) {
    enum xt_status status = fsync(w->fd) == 0 ? XT_OK : refused(ctx, "sync", w->temporary);
    if (close(w->fd) != 0 && status == XT_OK) status = refused(ctx, "close", w->temporary);
    w->fd = -1;
    if (status == XT_OK && rename(w->temporary, w->path) != 0)
        status = refused(ctx, "rename a finished file to", w->path);
    if (status == XT_OK) {
        status = sync_parent(ctx, w->path);
        free(w->temporary);
        w->temporary = NULL;
    }
    xt_writer_abandon(w);
    return status;
}

void xt_writer_abandon(struct xt_writer *w) {
    if (w->fd >= 0) close(w->fd);
    w->fd = -1;
    if (w->temporary) unlink(w->temporary);
    free(w->temporary);
    free(w->path);
    w->temporary = w->path = NULL;
}

/* ---- reading text ---------------------------------------------------------------------------- */

/* A growing buffer. */
struct text {
    char *data;
    size_t bytes, capacity;
};

static bool reserve(struct text *t, size_t more) {
    if (t->bytes + more + 1 <= t->capacity) return true;
    size_t capacity = 2 * (t->bytes + more + 1);
    char *data = realloc(t->data, capacity);
    if (!data) return false;
    t->data = data;
    t->capacity = capacity;
    return true;
}

enum { CHUNK = 1 << 20 };

static enum xt_status unpack_gzip(struct xt_ctx *ctx, const char *path, const struct xt_map *map,
                                  struct text *t) {
    z_stream z = {0};
    if (inflateInit2(&z, 15 + 16) != Z_OK) return xt_fail(ctx, XT_MEMORY, "out of memory");
    enum xt_status status = XT_OK;
    size_t at = 0;
    for (;;) {
        if (!reserve(t, CHUNK)) {
            status = xt_fail(ctx, XT_MEMORY, "out of memory");
            break;
        }
        uInt given = map->bytes - at < CHUNK ? (uInt)(map->bytes - at) : CHUNK;
        z.next_in = (Bytef *)(uintptr_t)(map->data + at);
        z.avail_in = given;
        z.next_out = (Bytef *)t->data + t->bytes;
        z.avail_out = CHUNK;
        int code = inflate(&z, Z_NO_FLUSH);
        at += given - z.avail_in;
        t->bytes += CHUNK - z.avail_out;
        if (code == Z_STREAM_END) {
            if (at == map->bytes) break;
            if (inflateReset(&z) == Z_OK) continue; /* gzip files may follow each other */
        }
        if (code != Z_OK) {
            status = xt_fail(ctx, XT_FORMAT, "%s: the gzip data is damaged or cut short", path);
            break;
        }
    }
    inflateEnd(&z);
    return status;
}

static enum xt_status unpack_zstd(struct xt_ctx *ctx, const char *path, const struct xt_map *map,
                                  struct text *t) {
    ZSTD_DStream *z = ZSTD_createDStream();
    if (!z) return xt_fail(ctx, XT_MEMORY, "out of memory");
    enum xt_status status = XT_OK;
    ZSTD_inBuffer in = {map->data, map->bytes, 0};
    size_t left = 1;
    while (in.pos < in.size || left) {
        if (!reserve(t, CHUNK)) {
            status = xt_fail(ctx, XT_MEMORY, "out of memory");
            break;
        }
        ZSTD_outBuffer out = {t->data + t->bytes, CHUNK, 0};
        size_t before = in.pos;
        left = ZSTD_decompressStream(z, &out, &in);
        t->bytes += out.pos;
        if (ZSTD_isError(left) || (left && in.pos == in.size && !out.pos && before == in.pos)) {
            status = xt_fail(ctx, XT_FORMAT, "%s: the zstd data is damaged or cut short", path);
            break;
        }
    }
    ZSTD_freeDStream(z);
    return status;
}

/* All that is left to read of fd. */
static enum xt_status read_all(struct xt_ctx *ctx, int fd, const char *path, struct text *t) {
    for (;;) {
        if (!reserve(t, CHUNK)) return xt_fail(ctx, XT_MEMORY, "out of memory");
        ssize_t n = read(fd, t->data + t->bytes, CHUNK);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return refused(ctx, "read", path);
        if (n == 0) return XT_OK;
        t->bytes += (size_t)n;
    }
}

/* The bytes of a pipe, a terminal or the like; *is_stream says whether path is one. */
static enum xt_status read_stream(struct xt_ctx *ctx, const char *path, bool *is_stream,
                                  struct text *t) {
    struct stat info;
    bool standard = strcmp(path, "-") == 0;
    *is_stream =
        standard || (stat(path, &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode));
    if (!*is_stream) return XT_OK;
    if (standard) return read_all(ctx, STDIN_FILENO, "standard input", t);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return refused(ctx, "open", path);
    enum xt_status status = read_all(ctx, fd, path, t);
    close(fd);
    return status;
}

enum xt_status xt_read_text(struct xt_ctx *ctx, const char *path, char **text, size_t *bytes) {
    struct xt_map map = {0}; /* the bytes as they lie in the file */
    struct text raw = {0}, t = {0};
    bool is_stream;
    enum xt_status status = read_stream(ctx, path, &is_stream, &raw);
    if (is_stream)
        map = (struct xt_map){(const unsigned char *)raw.data, raw.bytes};
    else
        status = xt_map_open(ctx, path, &map);
    if (status != XT_OK) {
        free(raw.data);
        return status;
    }
    const unsigned char *d = map.data;
    if (map.bytes > 2 && d[0] == 0x1F && d[1] == 0x8B)
        status = unpack_gzip(ctx, path, &map, &t);
    else if (map.bytes > 4 && memcmp(d, "\x28\xB5\x2F\xFD", 4) == 0)
        status = unpack_zstd(ctx, path, &map, &t);
    else if (is_stream) {
        t = raw;
        raw = (struct text){0};
    } else if (!reserve(&t, map.bytes))
        status = xt_fail(ctx, XT_MEMORY, "out of memory");
    else if (map.bytes) {
        memcpy(t.data, d, map.bytes);
        t.bytes = map.bytes;
    }
    if (!is_stream) xt_map_close(&map);
    free(raw.data);
    if (status != XT_OK) {
        free(t.data);
        return status;
    }
    t.data[t.bytes] = '\0';
    *text = t.data;
    *bytes = t.bytes;
    return XT_OK;
}
