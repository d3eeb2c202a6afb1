/* safetensors.c: reading by map, writing in one deterministic layout. */
#include "safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "file.h"

struct xt_safetensors {
    struct xt_map map;                    /* the whole file */
    json_t *header;                       /* owns the names and the metadata */
    struct xt_safetensors_entry *entries; /* n, in order of the header */
    int64_t n;
    const char **pairs; /* key, value, key, value ... of __metadata__ */
    int64_t n_pairs;    /* pairs */
};

/* The format's names of our dtypes, in the order of enum xt_dtype. */
static const char *const dtype_names[] = {"F32", "BF16", "F16", "F64", "I32", "I64", "U8"};

static bool find_dtype(const char *text, enum xt_dtype *out) {
    if (strcmp(text, "BOOL") == 0) {
        *out = XT_U8;
        return true;
    }
    for (int d = 0; d < XT_DTYPE_COUNT; d++) {
        if (strcmp(dtype_names[d], text) != 0) continue;
        *out = (enum xt_dtype)d;
        return true;
    }
    return false;
}

/* Product of the sizes times the element size; false when it does not fit in 63 bits. */
static bool spec_bytes(const struct xt_spec *spec, size_t *out) {
    int64_t n = (int64_t)xt_dtype_bytes(spec->dtype);
    for (int d = 0; d < spec->ndim; d++)
        if (spec->shape[d] == 0) {
            *out = 0;
            return true;
        }
    for (int d = 0; d < spec->ndim; d++)
        if (__builtin_mul_overflow(n, spec->shape[d], &n)) return false;
    *out = (size_t)n;
    return true;
}

static enum xt_status read_entry(struct xt_ctx *ctx, const char *path, const char *name,
                                 const json_t *value, const unsigned char *base, size_t room,
                                 struct xt_safetensors_entry *e) {
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    const json_t *shape = json_object_get(value, "shape");
    const json_t *range = json_object_get(value, "data_offsets");
    if (!dtype || !json_is_array(shape) || json_array_size(range) != 2)
        return xt_fail(ctx, XT_FORMAT, "%s: tensor %s lacks dtype, shape or data_offsets", path,
                       name);
    e->name = name;
    if (!find_dtype(dtype, &e->spec.dtype))
        return xt_fail(ctx, XT_FORMAT, "%s: tensor %s has dtype %s, which is not supported", path,
                       name, dtype);
    if (json_array_size(shape) > XT_MAX_DIMS)
        return xt_fail(ctx, XT_FORMAT, "%s: tensor %s has %zu dimensions, at most %d can be read",
                       path, name, json_array_size(shape), XT_MAX_DIMS);
    e->spec.ndim = (int)json_array_size(shape);
    for (int d = 0; d < e->spec.ndim; d++) {
        const json_t *size = json_array_get(shape, (size_t)d);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return xt_fail(ctx, XT_FORMAT, "%s: tensor %s has a size that is no count", path, name);
        e->spec.shape[d] = json_integer_value(size);
    }
    const json_t *from = json_array_get(range, 0), *to = json_array_get(range, 1);
    if (!json_is_integer(from) || !json_is_integer(to) || json_integer_value(from) < 0 ||
        json_integer_value(to) < json_integer_value(from))
        return xt_fail(ctx, XT_FORMAT, "%s: tensor %s has data_offsets that are no range", path,
                       name);
    size_t begin = (size_t)json_integer_value(from), end = (size_t)json_integer_value(to), bytes;
    if (end > room)
        return xt_fail(ctx, XT_FORMAT, "%s: tensor %s ends at byte %zu, the data ends at %zu", path,
                       name, end, room);
    if (!spec_bytes(&e->spec, &bytes) || bytes != end - begin)
        return xt_fail(ctx, XT_FORMAT,
                       "%s: tensor %s has %zu bytes, its shape and dtype want "
                       "another number",
                       path, name, end - begin);
    e->data = base + begin;
    e->bytes = bytes;
    return XT_OK;
}

static int by_place(const void *a, const void *b) {
    const struct xt_safetensors_entry *const *x = a, *const *y = b;
    const unsigned char *dx = (*x)->data, *dy = (*y)->data;
    if (dx != dy) return dx < dy ? -1 : 1;
    return (*x)->bytes < (*y)->bytes ? -1 : (*x)->bytes > (*y)->bytes;
}

/* The ranges must follow each other and end where the file ends. */
static enum xt_status check_ranges(struct xt_ctx *ctx, const char *path,
                                   const struct xt_safetensors *f, const unsigned char *base,
                                   size_t room) {
    const struct xt_safetensors_entry **list = malloc((size_t)(f->n + 1) * sizeof *list);
    if (!list) return xt_fail(ctx, XT_MEMORY, "out of memory");
    for (int64_t i = 0; i < f->n; i++) list[i] = &f->entries[i];
    qsort(list, (size_t)f->n, sizeof *list, by_place);
    enum xt_status status = XT_OK;
    const unsigned char *at = base;
    for (int64_t i = 0; i < f->n && status == XT_OK; i++) {
        if (list[i]->data != at)
            status =
                xt_fail(ctx, XT_FORMAT,
                        "%s: tensor %s starts at byte %zu of the data, wanted "
                        "%zu: there is a gap or an overlap",
                        path, list[i]->name, (size_t)((const unsigned char *)list[i]->data - base),
                        (size_t)(at - base));
        at = (const unsigned char *)list[i]->data + list[i]->bytes;
    }
    if (status == XT_OK && at != base + room)
        status = xt_fail(ctx, XT_FORMAT,
                         "%s: the tensors end at byte %zu of the data, the file "
                         "holds %zu",
                         path, (size_t)(at - base), room);
    free(list);
    return status;
}

static enum xt_status read_metadata(struct xt_ctx *ctx, const char *path, json_t *object,
                                    struct xt_safetensors *f) {
    const char *key;
    json_t *value;
    if (!json_is_object(object))
        return xt_fail(ctx, XT_FORMAT, "%s: __metadata__ is not an object", path);
    f->pairs = malloc(2 * (json_object_size(object) + 1) * sizeof *f->pairs);
    if (!f->pairs) return xt_fail(ctx, XT_MEMORY, "out of memory");
    json_object_foreach(object, key, value) {
        if (!json_is_string(value))
            return xt_fail(ctx, XT_FORMAT, "%s: metadata %s is not a string", path, key);
        f->pairs[2 * f->n_pairs] = key;
        f->pairs[2 * f->n_pairs++ + 1] = json_string_value(value);
    }
    return XT_OK;
}

static enum xt_status read_header(struct xt_ctx *ctx, const char *path, struct xt_safetensors *f) {
    const unsigned char *d = f->map.data;
    if (f->map.bytes < 8)
        return xt_fail(ctx, XT_FORMAT, "%s: %zu bytes are too few for a safetensors file", path,
                       f->map.bytes);
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--) n = n << 8 | d[i];
    if (n > XT_SAFETENSORS_MAX_HEADER)
        return xt_fail(ctx, XT_FORMAT, "%s: a header of %llu bytes, at most %u are allowed", path,
                       (unsigned long long)n, XT_SAFETENSORS_MAX_HEADER);
    if (n > f->map.bytes - 8)
        return xt_fail(ctx, XT_FORMAT,
                       "%s: a header of %llu bytes in a file of %zu: it is cut "
                       "short",
                       path, (unsigned long long)n, f->map.bytes);
    json_error_t error;
    f->header = json_loadb((const char *)d + 8, (size_t)n, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(f->header))
        return xt_fail(ctx, XT_FORMAT, "%s: the header is not a JSON object%s%s", path,
                       f->header ? "" : ": ", f->header ? "" : error.text);
    f->entries = calloc(json_object_size(f->header) + 1, sizeof *f->entries);
    if (!f->entries) return xt_fail(ctx, XT_MEMORY, "out of memory");
    const unsigned char *base = d + 8 + n;
    size_t room = f->map.bytes - 8 - (size_t)n;
    const char *name;
    json_t *value;
    json_object_foreach(f->header, name, value) {
        enum xt_status status;
        if (strcmp(name, "__metadata__") == 0)
            status = read_metadata(ctx, path, value, f);
        else
            status = read_entry(ctx, path, name, value, base, room, &f->entries[f->n++]);
        if (status != XT_OK) return status;
    }
    return check_ranges(ctx, path, f, base, room);
}

enum xt_status xt_safetensors_open(struct xt_ctx *ctx, const char *path,
                                   struct xt_safetensors **out) {
    struct xt_safetensors *f = calloc(1, sizeof *f);
    if (!f) return xt_fail(ctx, XT_MEMORY, "out of memory");
    enum xt_status status = xt_map_open(ctx, path, &f->map);
    if (status == XT_OK) status = read_header(ctx, path, f);
    if (status == XT_OK)
        *out = f;
    else
        xt_safetensors_close(f);
    return status;
}

void xt_safetensors_close(struct xt_safetensors *f) {
    if (!f) return;
    json_decref(f->header);
    xt_map_close(&f->map);
    free(f->entries);
    free(f->pairs);
    free(f);
}

int64_t xt_safetensors_count(const struct xt_safetensors *f) {
    return f->n;
}

const struct xt_safetensors_entry *xt_safetensors_at(const struct xt_safetensors *f,
                                                     int64_t index) {
    return &f->entries[index];
}

bool xt_safetensors_metadata(const struct xt_safetensors *f, int64_t index, const char **key,
                             const char **value) {
    if (index >= f->n_pairs) return false;
    *key = f->pairs[2 * index];
    *value = f->pairs[2 * index + 1];
    return true;
}

/* ---- writing --------------------------------------------------------------------------------- */

struct item {
    const char *name;
    struct xt_tensor *tensor;
};

static int by_layout(const void *a, const void *b) {
    const struct item *x = a, *y = b;
    size_t wx = xt_dtype_bytes(xt_dtype_of(x->tensor)), wy = xt_dtype_bytes(xt_dtype_of(y->tensor));
    if (wx != wy) return wx > wy ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int by_text(const void *a, const void *b) {
    return strcmp(**(const char *const *const *)a, **(const char *const *const *)b);
}

static json_t *describe(const struct xt_tensor *t, size_t *at) {
    json_t *shape = json_array();
    for (int d = 0; d < xt_ndim(t); d++) json_array_append_new(shape, json_integer(xt_shape(t)[d]));
    size_t end = *at + xt_nbytes(t);
    json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_names[xt_dtype_of(t)], "shape",
                              shape, "data_offsets", (json_int_t)*at, (json_int_t)end);
    *at = end;
    return entry;
}

/* The header's text, padded with spaces so that the data starts at a multiple of 8. malloc'd. */
static char *header_text(const struct item *items, int64_t n, const char *const *keys,
                         const char *const *values, int64_t n_metadata, size_t *bytes) {
    json_t *header = json_object();
    if (n_metadata) {
        const char *const **order = malloc((size_t)n_metadata * sizeof *order);
        json_t *metadata = json_object();
        for (int64_t i = 0; order && i < n_metadata; i++) order[i] = &keys[i];
        if (order) qsort(order, (size_t)n_metadata, sizeof *order, by_text);
        for (int64_t i = 0; order && i < n_metadata; i++)
            json_object_set_new(metadata, *order[i], json_string(values[order[i] - keys]));
        free(order);
        json_object_set_new(header, "__metadata__", metadata);
    }
    size_t at = 0;
    for (int64_t i = 0; i < n; i++)
        json_object_set_new(header, items[i].name, describe(items[i].tensor, &at));
    char *text = json_dumps(header, JSON_COMPACT);
    bool whole = text && json_object_size(header) == (size_t)n + (n_metadata > 0);
    json_decref(header);
    if (!whole) {
        free(text);
        return NULL;
    }
    size_t used = strlen(text), padded = (used + 7) / 8 * 8;
    char *grown = realloc(text, padded + 1);
    if (!grown) {
        free(text);
        return NULL;
    }
    memset(grown + used, ' ', padded - used);
    *bytes = padded;
    return grown;
}

static enum xt_status write_tensor(struct xt_ctx *ctx, struct xt_writer *w, struct xt_tensor *t) {
    size_t bytes = xt_nbytes(t);
    if (!bytes) return XT_OK;
    void *data = malloc(bytes);
    if (!data) return xt_fail(ctx, XT_MEMORY, "out of memory");
    enum xt_status status = xt_tensor_to_host(ctx, t, data, bytes);
    if (status == XT_OK) status = xt_writer_put(ctx, w, data, bytes);
    free(data);
    return status;
}

enum xt_status xt_safetensors_write(struct xt_ctx *ctx, const char *path, const char *const *names,
                                    struct xt_tensor *const *tensors, int64_t n,
                                    const char *const *keys, const char *const *values,
                                    int64_t n_metadata) {
    struct item *items = malloc((size_t)(n + 1) * sizeof *items);
    if (!items) return xt_fail(ctx, XT_MEMORY, "out of memory");
    for (int64_t i = 0; i < n; i++) items[i] = (struct item){names[i], tensors[i]};
    qsort(items, (size_t)n, sizeof *items, by_layout);
    enum xt_status status = XT_OK;
    size_t bytes = 0;
    struct xt_writer w;
    char *header = header_text(items, n, keys, values, n_metadata, &bytes);
    if (!header)
        status = xt_fail(ctx, XT_ARGUMENT, "%s: a name is given twice or is not UTF-8", path);
    else
        status = xt_writer_open(ctx, path, &w);
    if (status == XT_OK) {
        unsigned char length[8];
        for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)bytes >> (8 * i));
        status = xt_writer_put(ctx, &w, length, sizeof length);
        if (status == XT_OK) status = xt_writer_put(ctx, &w, header, bytes);
        for (int64_t i = 0; i < n && status == XT_OK; i++)
            status = write_tensor(ctx, &w, items[i].tensor);
        if (status == XT_OK)
            status = xt_writer_commit(ctx, &w);
        else
            xt_writer_abandon(&w);
    }
    free(header);
    free(items);
    return status;
}
