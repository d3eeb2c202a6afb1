/*
 * safetensors.h: Hugging Face's container: 8 bytes header length, a JSON header, the tensors'
 * bytes.
 *
 * Source: the format's specification in the safetensors repository's README. A file is mapped, its
 * header checked whole before anything is allocated for a tensor: known dtypes, byte ranges that
 * match the shapes, follow each other without gaps and end at the end of the file.
 */
#ifndef XT_SAFETENSORS_H
#define XT_SAFETENSORS_H

#include "../xtrain.h"

#define XT_SAFETENSORS_MAX_HEADER 100000000u /* bytes, as the reference implementation */

struct xt_safetensors;

struct xt_safetensors_entry {
    const char *name;    /* lives as long as the open file */
    struct xt_spec spec; /* dtype and shape; BOOL reads as u8 */
    const void *data;    /* contiguous, in the map; may be unaligned */
    size_t bytes;        /* of data */
};

/* XT_IO when the system refuses, XT_FORMAT when the file is not what it should be. */
enum xt_status xt_safetensors_open(struct xt_ctx *ctx, const char *path,
                                   struct xt_safetensors **out);
void xt_safetensors_close(struct xt_safetensors *file);
int64_t xt_safetensors_count(const struct xt_safetensors *file);
const struct xt_safetensors_entry *xt_safetensors_at(const struct xt_safetensors *file,
                                                     int64_t index); /* in order of the header */
/* The i-th pair of __metadata__; false behind the last. */
bool xt_safetensors_metadata(const struct xt_safetensors *file, int64_t index, const char **key,
                             const char **value);

/* Writes beside `path`, syncs, and renames over it: an old file stays whole until the new one is.
   Tensors are laid out by falling element size, then by name in byte order, metadata by key: the
   same input gives the same bytes. keys and values hold n_metadata strings. */
enum xt_status xt_safetensors_write(struct xt_ctx *ctx, const char *path, const char *const *names,
                                    struct xt_tensor *const *tensors, int64_t n,
                                    const char *const *keys, const char *const *values,
                                    int64_t n_metadata);

#endif
