/* storage.c: bytes on a device with a reference count; the only file that frees device memory. */
#include "context.h"

enum xt_status xt_storage_new(struct xt_ctx *ctx, enum xt_device device, size_t bytes,
                              struct xt_storage **out) {
    struct xt_storage *s = xt_host_alloc(ctx, sizeof *s);
    if (!s) return XT_MEMORY;
    if (bytes) {
        enum xt_status status = xt_device_alloc(ctx, device, bytes, &s->data, &s->capacity);
        if (status != XT_OK) {
            xt_host_free(ctx, s, sizeof *s);
            return status;
        }
    }
    s->refs = 1;
    s->device = device;
    s->bytes = bytes;
    s->number = ++ctx->n_storages;
    s->made = xt_here(ctx);
    s->next = ctx->storages;
    if (s->next) s->next->prev = s;
    ctx->storages = s;
    ctx->memory[device].live_storages++;
    *out = s;
    return XT_OK;
}

void xt_storage_retain(struct xt_storage *s) {
    s->refs++;
}

void xt_storage_release(struct xt_ctx *ctx, struct xt_storage *s) {
    if (--s->refs) return;
    if (s->prev)
        s->prev->next = s->next;
    else
        ctx->storages = s->next;
    if (s->next) s->next->prev = s->prev;
    ctx->memory[s->device].live_storages--;
    if (s->data) xt_device_free(ctx, s->device, s->data, s->bytes, s->capacity);
    xt_host_free(ctx, s, sizeof *s);
}

void xt_storage_written(struct xt_ctx *ctx, struct xt_storage *s) {
    s->version++;
    s->wrote = xt_here(ctx);
}
