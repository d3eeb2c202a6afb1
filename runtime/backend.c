/*
 * backend.c: which devices and which CPU kernels this process has.
 *
 * The CPU kernels are the same sources compiled for several instruction sets; the best that the
 * processor runs is taken. XT_ISA=v1|v3|v4 in the environment asks for a lower one.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"

#define DECLARE(isa) extern const struct xt_kernel *const xt_cpu_kernel_tables_##isa[]
DECLARE(v1);
DECLARE(v3);
DECLARE(v4);

/* Instruction sets from the best to the least. */
static const struct isa {
    const char *name;
    const struct xt_kernel *const *tables; /* ended by NULL */
} isas[] = {
#ifdef XT_HAVE_V4
    {"v4", xt_cpu_kernel_tables_v4},
#endif
#ifdef XT_HAVE_V3
    {"v3", xt_cpu_kernel_tables_v3},
#endif
#ifdef XT_HAVE_V1
    {"v1", xt_cpu_kernel_tables_v1},
#endif
};

static bool processor_runs(const char *isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    if (strcmp(isa, "v3") == 0) return v3;
    if (strcmp(isa, "v4") == 0)
        return v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512cd");
#endif
    return strcmp(isa, "v1") == 0;
}

/* ---- the CPU as a device ----------------------------------------------------------------------
   Its memory is memory.c's. */

static enum xt_status copy(struct xt_ctx *ctx, void *to, const void *from, size_t bytes) {
    (void)ctx;
    if (bytes) memcpy(to, from, bytes);
    return XT_OK;
}

static enum xt_status fill(struct xt_ctx *ctx, void *data, int byte, size_t bytes) {
    (void)ctx;
    if (bytes) memset(data, byte, bytes);
    return XT_OK;
}

static enum xt_status finish(struct xt_ctx *ctx) {
    (void)ctx;
    return XT_OK;
}

static void describe(struct xt_ctx *ctx, char *text, size_t bytes) {
    snprintf(text, bytes, "%d threads, kernels for x86-64-%s", ctx->threads, ctx->isa);
}

static const struct xt_backend cpu = {
    .name = "cpu",
    .to_host = copy,
    .from_host = copy,
    .fill = fill,
    .finish = finish,
    .describe = describe,
};

/* ---- opening --------------------------------------------------------------------------------- */

#ifdef XT_HAVE_CUDA
extern const struct xt_backend xt_backend_cuda;
#endif

const char *xt_device_name(enum xt_device device) {
    return device == XT_CPU ? "cpu" : "cuda";
}

void xt_backend_open(struct xt_ctx *ctx) {
    const char *asked = getenv("XT_ISA"), *sync = getenv("XT_SYNC");
    size_t n = sizeof isas / sizeof *isas, chosen = n - 1;
    for (size_t i = n; i-- > 0;) {
        if (!processor_runs(isas[i].name)) continue;
        chosen = i;
        if (asked && strcmp(asked, isas[i].name) == 0) break;
    }
    ctx->isa = isas[chosen].name;
    ctx->backend[XT_CPU] = &cpu;
    ctx->device = XT_CPU;
    ctx->sync = sync && strcmp(sync, "0") != 0;
}

static enum xt_status open_cuda(struct xt_ctx *ctx) {
#ifdef XT_HAVE_CUDA
    const struct xt_backend *backend = &xt_backend_cuda;
    struct xt_arena *arena = xt_arena_new(XT_CUDA);
    if (!arena) return xt_fail(ctx, XT_MEMORY, "out of memory: the records of a device");
    enum xt_status status = backend->open(ctx, &ctx->backend_state[XT_CUDA]);
    if (status == XT_OK) status = xt_find_kernels(ctx, XT_CUDA, backend->kernels);
    if (status != XT_OK) {
        if (ctx->backend_state[XT_CUDA]) backend->close(ctx, ctx->backend_state[XT_CUDA]);
        ctx->backend_state[XT_CUDA] = NULL;
        xt_arena_free(ctx, arena);
        return status;
    }
    ctx->backend[XT_CUDA] = backend;
    ctx->arena[XT_CUDA] = arena;
    return XT_OK;
#else
    return xt_fail(ctx, XT_DEVICE, "this xtrain was built without CUDA");
#endif
}

enum xt_status xt_device_open(struct xt_ctx *ctx, enum xt_device device) {
    if (ctx->backend[device]) return XT_OK;
    if (!*ctx->closed_because) {
        enum xt_status status = open_cuda(ctx);
        if (status != XT_DEVICE) return status;
        snprintf(ctx->closed_because, sizeof ctx->closed_because, "%.255s", ctx->error);
    }
    return xt_fail(ctx, XT_DEVICE, "there is no device cuda on this machine: %s",
                   ctx->closed_because);
}

void xt_backend_close(struct xt_ctx *ctx) {
    for (int d = XT_CPU + 1; d < XT_DEVICE_COUNT; d++) {
        if (!ctx->backend[d]) continue;
        ctx->backend[d]->finish(ctx);
        xt_arena_free(ctx, ctx->arena[d]);
        ctx->backend[d]->close(ctx, ctx->backend_state[d]);
        ctx->backend[d] = NULL;
    }
}

void *xt_backend_state(const struct xt_ctx *ctx, enum xt_device device) {
    return ctx->backend_state[device];
}

void xt_count_wait(struct xt_ctx *ctx, enum xt_device device) {
    ctx->memory[device].waits++;
}

void xt_device_describe(struct xt_ctx *ctx, enum xt_device device, char *text, size_t bytes) {
    ctx->backend[device]->describe(ctx, text, bytes);
}

enum xt_status xt_devices_finish(struct xt_ctx *ctx) {
    for (int d = 0; d < XT_DEVICE_COUNT; d++)
        if (ctx->backend[d]) XT_TRY(ctx->backend[d]->finish(ctx));
    return XT_OK;
}

const struct xt_kernel *const *xt_cpu_kernel_tables(const char *isa) {
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
        if (strcmp(isas[i].name, isa) == 0) return isas[i].tables;
    return NULL;
}
