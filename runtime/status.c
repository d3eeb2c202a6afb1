/* status.c: one sentence a failure, kept in the context until the next one. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "context.h"

const char *xt_status_name(enum xt_status status) {
    static const char *const names[] = {
#define XT_STATUS_TEXT(name, text) #name,
        XT_STATUS_LIST(XT_STATUS_TEXT)
#undef XT_STATUS_TEXT
    };
    return names[status];
}

const char *xt_error(const struct xt_ctx *ctx) {
    return ctx->error;
}

enum xt_status xt_fail(struct xt_ctx *ctx, enum xt_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(ctx->error, sizeof ctx->error, format, values);
    va_end(values);
    return status;
}

enum xt_status xt_fail_in(struct xt_ctx *ctx, enum xt_status status, const char *who) {
    size_t n = strlen(who) + 2;
    if (n >= sizeof ctx->error) return status;
    size_t keep = strnlen(ctx->error, sizeof ctx->error - n - 1);
    memmove(ctx->error + n, ctx->error, keep);
    memcpy(ctx->error, who, n - 2);
    memcpy(ctx->error + n - 2, ": ", 2);
    ctx->error[n + keep] = '\0';
    return status;
}
