/* tensor.c: strided views of storages. Everything that computes goes through an op instead. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#define XXH_STATIC_LINKING_ONLY /* XXH3_state_t on the stack */
#include <xxhash.h>

#include "context.h"
#include "tape.h"

void xt_contiguous_strides(const struct xt_spec *spec, int64_t *stride) {
    int64_t step = 1;
    for (int d = spec->ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= spec->shape[d] > 0 ? spec->shape[d] : 1;
    }
}

/* The number of elements, or -1 when the bytes would not fit in 63 bits. */
static int64_t spec_numel(const struct xt_spec *spec) {
    int64_t n = 1;
    bool overflow = false;
    for (int d = 0; d < spec->ndim; d++) {
        if (spec->shape[d] == 0) return 0;
        overflow = overflow || __builtin_mul_overflow(n, spec->shape[d], &n);
    }
    int64_t bytes;
    if (overflow || __builtin_mul_overflow(n, (int64_t)xt_dtype_bytes(spec->dtype), &bytes))
        return -1;
    return n;
}

/* A contiguous tensor over a new storage of that many bytes. */
static enum xt_status over_bytes(struct xt_ctx *ctx, const struct xt_spec *spec,
                                 enum xt_device device, size_t bytes, struct xt_tensor **out) {
    struct xt_tensor *t = xt_host_alloc(ctx, sizeof *t);
    if (!t) return XT_MEMORY;
    enum xt_status status = xt_storage_new(ctx, device, bytes, &t->storage);
    if (status != XT_OK) {
        xt_host_free(ctx, t, sizeof *t);
        return status;
    }
    t->refs = 1;
    t->ndim = spec->ndim;
    t->dtype = spec->dtype;
    memcpy(t->shape, spec->shape, (size_t)spec->ndim * sizeof *t->shape);
    xt_contiguous_strides(spec, t->stride);
    *out = t;
    return XT_OK;
}

enum xt_status xt_tensor_new(struct xt_ctx *ctx, const struct xt_spec *spec, enum xt_device device,
                             struct xt_tensor **out) {
    char text[128];
    if (spec->ndim < 0 || spec->ndim > XT_MAX_DIMS)
        return xt_fail(ctx, XT_SHAPE, "a tensor has 0 to %d dimensions, not %d", XT_MAX_DIMS,
                       spec->ndim);
    for (int d = 0; d < spec->ndim; d++)
        if (spec->shape[d] < 0)
            return xt_fail(ctx, XT_SHAPE, "size %lld of dimension %d is negative",
                           (long long)spec->shape[d], d + 1);
    int64_t n = spec_numel(spec);
    if (n < 0)
        return xt_fail(ctx, XT_MEMORY, "%s has more bytes than can be counted",
                       xt_describe_spec(spec, text, sizeof text));
    if (!ctx->backend[device])
        return xt_fail(ctx, XT_DEVICE, "there is no device of that kind on this machine");
    return over_bytes(ctx, spec, device, (size_t)n * xt_dtype_bytes(spec->dtype), out);
}

enum xt_status xt_tensor_hollow(struct xt_ctx *ctx, const struct xt_spec *spec,
                                enum xt_device device, struct xt_tensor **out) {
    XT_TRY(over_bytes(ctx, spec, device, 0, out));
    (*out)->storage->hollow = true;
    return XT_OK;
}

enum xt_status xt_tensor_alias(struct xt_ctx *ctx, const struct xt_tensor *t,
                               struct xt_tensor **out) {
    struct xt_tensor *alias = xt_host_alloc(ctx, sizeof *alias);
    if (!alias) return XT_MEMORY;
    *alias = *t;
    alias->refs = 1;
    alias->maker = NULL;
    alias->maker_output = 0;
    alias->leaf = NULL;
    xt_storage_retain(alias->storage);
    *out = alias;
    return XT_OK;
}

enum xt_status xt_tensor_scalar(struct xt_ctx *ctx, double value, enum xt_dtype dtype,
                                enum xt_device device, struct xt_tensor **out) {
    struct xt_spec spec = {.dtype = dtype};
    struct xt_tensor *t;
    XT_TRY(xt_tensor_new(ctx, &spec, device, &t));
    enum xt_status status = XT_OK;
    t->storage->loaded = true;
    if (device == XT_CPU && dtype == XT_F32)
        *(float *)xt_data(t) = (float)value;
    else
        status = xt_tensor_set(ctx, t, NULL, value);
    if (status != XT_OK) {
        xt_tensor_release(ctx, t);
        return status;
    }
    *out = t;
    return XT_OK;
}

enum xt_status xt_tensor_from_host(struct xt_ctx *ctx, const struct xt_spec *spec,
                                   enum xt_device device, const void *data, size_t bytes,
                                   struct xt_tensor **out) {
    struct xt_tensor *t;
    XT_TRY(xt_tensor_new(ctx, spec, device, &t));
    enum xt_status status;
    char text[128];
    if (xt_nbytes(t) != bytes)
        status = xt_fail(ctx, XT_SHAPE, "%s takes %zu bytes, given %zu",
                         xt_describe(t, text, sizeof text), xt_nbytes(t), bytes);
    else
        status = ctx->backend[device]->from_host(ctx, xt_data(t), data, bytes);
    t->storage->loaded = true;
    if (status != XT_OK) {
        xt_tensor_release(ctx, t);
        return status;
    }
    *out = t;
    return XT_OK;
}

/* t's elements in order, for the host to read; a new reference. */
static enum xt_status whole_of(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor **out) {
    XT_TRY(xt_graph_check_read(ctx, t));
    xt_no_grad_push(ctx);
    enum xt_status status = xt_contiguous(ctx, t, out);
    xt_no_grad_pop(ctx);
    return status;
}

enum xt_status xt_tensor_to_host(struct xt_ctx *ctx, struct xt_tensor *t, void *data,
                                 size_t bytes) {
    char text[128];
    if (xt_nbytes(t) != bytes)
        return xt_fail(ctx, XT_SHAPE, "%s holds %zu bytes, wanted %zu",
                       xt_describe(t, text, sizeof text), xt_nbytes(t), bytes);
    struct xt_tensor *whole;
    XT_TRY(whole_of(ctx, t, &whole));
    enum xt_status status = XT_OK;
    if (bytes) status = ctx->backend[t->storage->device]->to_host(ctx, data, xt_data(whole), bytes);
    xt_tensor_release(ctx, whole);
    return status;
}

enum xt_status xt_tensor_to_device(struct xt_ctx *ctx, struct xt_tensor *t, enum xt_device device,
                                   struct xt_tensor **out) {
    size_t bytes = xt_nbytes(t);
    enum xt_device from = t->storage->device;
    struct xt_spec spec;
    struct xt_tensor *whole = NULL, *copy = NULL;
    void *staged = NULL;
    XT_TRY(xt_graph_check_read(ctx, t));
    xt_spec_of(t, &spec);
    xt_no_grad_push(ctx);
    enum xt_status status = xt_contiguous(ctx, t, &whole);
    xt_no_grad_pop(ctx);
    if (status != XT_OK) return status;
    XT_GO(xt_tensor_new(ctx, &spec, device, &copy));
    if (bytes && from == XT_CPU)
        XT_GO(ctx->backend[device]->from_host(ctx, xt_data(copy), xt_data(whole), bytes));
    else if (bytes && device == XT_CPU)
        XT_GO(ctx->backend[from]->to_host(ctx, xt_data(copy), xt_data(whole), bytes));
    else if (bytes) {
        XT_GO(xt_scratch_get(ctx, XT_CPU, bytes, &staged));
        XT_GO(ctx->backend[from]->to_host(ctx, staged, xt_data(whole), bytes));
        XT_GO(ctx->backend[device]->from_host(ctx, xt_data(copy), staged, bytes));
    }
    *out = copy;
    copy = NULL;
done:
    xt_scratch_put(ctx, XT_CPU, staged, bytes);
    xt_tensor_release(ctx, copy);
    xt_tensor_release(ctx, whole);
    return status;
}

struct xt_tensor *xt_tensor_retain(struct xt_tensor *t) {
    if (t) t->refs++;
    return t;
}

void xt_tensor_release(struct xt_ctx *ctx, struct xt_tensor *t) {
    if (!t || --t->refs) return;
    struct xt_call *maker = t->maker;
    if (t->leaf) xt_leaf_release(ctx, t->leaf);
    xt_storage_release(ctx, t->storage);
    xt_host_free(ctx, t, sizeof *t);
    if (maker) xt_call_release(ctx, maker);
}

/* ---- reading --------------------------------------------------------------------------------- */

int xt_ndim(const struct xt_tensor *t) {
    return t->ndim;
}

const int64_t *xt_shape(const struct xt_tensor *t) {
    return t->shape;
}

const int64_t *xt_strides(const struct xt_tensor *t) {
    return t->stride;
}

int64_t xt_numel(const struct xt_tensor *t) {
    int64_t n = 1;
    for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
    return n;
}

enum xt_dtype xt_dtype_of(const struct xt_tensor *t) {
    return t->dtype;
}

enum xt_device xt_device_of(const struct xt_tensor *t) {
    return t->storage->device;
}

size_t xt_nbytes(const struct xt_tensor *t) {
    return (size_t)xt_numel(t) * xt_dtype_bytes(t->dtype);
}

/* A dimension of size 1 may have any stride, and an empty tensor any strides. */
bool xt_is_contiguous(const struct xt_tensor *t) {
    int64_t step = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] == 0) return true;
        if (t->shape[d] != 1 && t->stride[d] != step) {
            for (int k = d - 1; k >= 0; k--)
                if (t->shape[k] == 0) return true;
            return false;
        }
        step *= t->shape[d];
    }
    return true;
}

bool xt_same_storage(const struct xt_tensor *a, const struct xt_tensor *b) {
    return a->storage == b->storage;
}

void xt_spec_of(const struct xt_tensor *t, struct xt_spec *out) {
    *out = (struct xt_spec){.dtype = t->dtype, .ndim = t->ndim};
    memcpy(out->shape, t->shape, sizeof out->shape);
}

/* Sorted by stride, each dimension must step over all that the smaller ones reach. */
bool xt_tensor_has_overlap(const struct xt_tensor *t) {
    if (xt_is_contiguous(t)) return false;
    bool used[XT_MAX_DIMS] = {false};
    int64_t reach = 1;
    for (int k = 0; k < t->ndim; k++) {
        int best = -1;
        for (int d = 0; d < t->ndim; d++)
            if (!used[d] && (best < 0 || t->stride[d] < t->stride[best])) best = d;
        used[best] = true;
        if (t->shape[best] <= 1) continue;
        if (t->stride[best] < reach) return true;
        reach = t->stride[best] * (t->shape[best] - 1) + reach;
    }
    return false;
}

/* ---- one element ----------------------------------------------------------------------------- */

union element {
    float f32;
    double f64;
    uint16_t h;
    int32_t i32;
    int64_t i64;
    uint8_t u8;
};

static const char *address(const struct xt_tensor *t, const int64_t *index) {
    int64_t at = t->offset;
    for (int d = 0; d < t->ndim; d++) {
        assert(index[d] >= 0 && index[d] < t->shape[d]);
        at += index[d] * t->stride[d];
    }
    return (const char *)t->storage->data + (size_t)at * xt_dtype_bytes(t->dtype);
}

static enum xt_status fetch(struct xt_ctx *ctx, struct xt_tensor *t, const int64_t *index,
                            union element *e) {
    XT_TRY(xt_graph_check_read(ctx, t));
    return ctx->backend[t->storage->device]->to_host(ctx, e, address(t, index),
                                                     xt_dtype_bytes(t->dtype));
}

enum xt_status xt_tensor_get(struct xt_ctx *ctx, struct xt_tensor *t, const int64_t *index,
                             double *out) {
    union element e = {0};
    XT_TRY(fetch(ctx, t, index, &e));
    switch (t->dtype) {
    case XT_F32: *out = e.f32; break;
    case XT_BF16: *out = (double)xt_bf16_to_f32(e.h); break;
    case XT_F16: *out = (double)xt_f16_to_f32(e.h); break;
    case XT_F64: *out = e.f64; break;
    case XT_I32: *out = e.i32; break;
    case XT_I64: *out = (double)e.i64; break;
    default: *out = e.u8; break;
    }
    return XT_OK;
}

enum xt_status xt_tensor_get_int(struct xt_ctx *ctx, struct xt_tensor *t, const int64_t *index,
                                 int64_t *out) {
    union element e = {0};
    XT_TRY(fetch(ctx, t, index, &e));
    switch (t->dtype) {
    case XT_I32: *out = e.i32; return XT_OK;
    case XT_I64: *out = e.i64; return XT_OK;
    case XT_U8: *out = e.u8; return XT_OK;
    default: break;
    }
    double value;
    XT_TRY(xt_tensor_get(ctx, t, index, &value));
    *out = (int64_t)value;
    return XT_OK;
}

enum xt_status xt_tensor_set(struct xt_ctx *ctx, struct xt_tensor *t, const int64_t *index,
                             double value) {
    union element e = {0};
    switch (t->dtype) {
    case XT_F32: e.f32 = (float)value; break;
    case XT_BF16: e.h = xt_f32_to_bf16((float)value); break;
    case XT_F16: e.h = xt_f32_to_f16((float)value); break;
    case XT_F64: e.f64 = value; break;
    case XT_I32: e.i32 = (int32_t)value; break;
    case XT_I64: e.i64 = (int64_t)value; break;
    default: e.u8 = (uint8_t)value; break;
    }
    void *at = (char *)t->storage->data + (address(t, index) - (const char *)t->storage->data);
    XT_TRY(ctx->backend[t->storage->device]->from_host(ctx, at, &e, xt_dtype_bytes(t->dtype)));
    if (t->storage->refs > 1 || t->refs > 1) xt_storage_written(ctx, t->storage);
    return XT_OK;
}

/* ---- whole tensors --------------------------------------------------------------------------- */

#define DIGEST_BLOCK 4096

enum xt_status xt_tensor_digest(struct xt_ctx *ctx, struct xt_tensor *t, uint64_t *out) {
    size_t bytes = xt_nbytes(t);
    struct xt_tensor *whole;
    XT_TRY(whole_of(ctx, t, &whole));
    enum xt_status status = XT_OK;
    void *copy = NULL;
    const char *data = bytes ? xt_data(whole) : NULL;
    if (bytes && t->storage->device != XT_CPU) {
        XT_GO(xt_scratch_get(ctx, XT_CPU, bytes, &copy));
        XT_GO(ctx->backend[t->storage->device]->to_host(ctx, copy, data, bytes));
        data = copy;
    }
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (size_t at = 0; at < bytes; at += DIGEST_BLOCK) {
        size_t n = bytes - at < DIGEST_BLOCK ? bytes - at : DIGEST_BLOCK;
        uint64_t h = XXH3_64bits(data + at, n);
        XXH3_64bits_update(&state, &h, sizeof h);
    }
    int64_t tail[2 + XT_MAX_DIMS] = {t->dtype, t->ndim};
    memcpy(tail + 2, t->shape, (size_t)t->ndim * sizeof *tail);
    XXH3_64bits_update(&state, tail, (size_t)(2 + t->ndim) * sizeof *tail);
    *out = XXH3_64bits_digest(&state);
done:
    xt_scratch_put(ctx, XT_CPU, copy, bytes);
    xt_tensor_release(ctx, whole);
    return status;
}

/* Whether any element of a contiguous float tensor is NaN or infinite; one that cannot be read is
   not. */
bool xt_tensor_nonfinite(struct xt_ctx *ctx, struct xt_tensor *t) {
    if (!xt_dtype_is_float(t->dtype) || !xt_is_contiguous(t)) return false;
    if (t->storage->device != XT_CPU) {
        struct xt_tensor *copy;
        if (xt_tensor_to_device(ctx, t, XT_CPU, &copy) != XT_OK) return false;
        bool found = xt_tensor_nonfinite(ctx, copy);
        xt_tensor_release(ctx, copy);
        return found;
    }
    int64_t n = xt_numel(t), bad = 0;
    if (t->dtype == XT_F32) {
        const uint32_t *x = xt_data(t);
        for (int64_t i = 0; i < n; i++) bad += (x[i] & 0x7F800000u) == 0x7F800000u;
    } else if (t->dtype == XT_F64) {
        const uint64_t *x = xt_data(t);
        for (int64_t i = 0; i < n; i++) bad += (x[i] & 0x7FF0000000000000u) == 0x7FF0000000000000u;
    } else {
        uint16_t mask = t->dtype == XT_BF16 ? 0x7F80u : 0x7C00u;
        const uint16_t *x = xt_data(t);
        for (int64_t i = 0; i < n; i++) bad += (x[i] & mask) == mask;
    }
    return bad > 0;
}

const char *xt_describe_spec(const struct xt_spec *spec, char *buffer, size_t bytes) {
    size_t used = (size_t)snprintf(buffer, bytes, "%s ", xt_dtype_name(spec->dtype));
    if (spec->ndim == 0) snprintf(buffer + used, bytes - used, "scalar");
    for (int d = 0; d < spec->ndim && used < bytes; d++)
        used += (size_t)snprintf(buffer + used, bytes - used, d ? "x%lld" : "%lld",
                                 (long long)spec->shape[d]);
    return buffer;
}

const char *xt_describe(const struct xt_tensor *t, char *buffer, size_t bytes) {
    struct xt_spec spec;
    xt_spec_of(t, &spec);
    return xt_describe_spec(&spec, buffer, bytes);
}
