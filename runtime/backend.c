/*
 * backend.c: which devices and which CPU kernels this process has.
 *
 * The CPU kernels are the same sources compiled for several instruction sets; the best that the
 * processor runs is taken. XT_ISA=v1|v3|v4 in the environment asks for a lower one.
 */
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

void xt_backend_open(struct xt_ctx *ctx) {
    const char *asked = getenv("XT_ISA");
    size_t n = sizeof isas / sizeof *isas, chosen = n - 1;
    for (size_t i = n; i-- > 0;) {
        if (!processor_runs(isas[i].name)) continue;
        chosen = i;
        if (asked && strcmp(asked, isas[i].name) == 0) break;
    }
    ctx->isa = isas[chosen].name;
    ctx->backend[XT_CPU] = &xt_backend_cpu;
    ctx->device = XT_CPU;
}

const struct xt_kernel *const *xt_cpu_kernel_tables(const char *isa) {
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
        if (strcmp(isas[i].name, isa) == 0) return isas[i].tables;
    return NULL;
}
