/*
 * matmul.c: our products beside plain multi-threaded oneDNN, in the same run, on the shapes of
 * recipes/tiny.lua and two long sums. bf16 is held against oneDNN's f32 product of the same
 * numbers, and against its bf16 primitive where the processor has one.
 *
 *     bench_matmul [THREADS [ROUNDS]]
 *
 * A line a shape: microseconds (medians) and the median of the rounds' ratios, oneDNN / ours. The
 * last line weighs shapes by time: the sum of oneDNN's medians over the sum of ours.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <omp.h>

#include "op.h"

/* dnnl_sgemm of oneDNN 2.x and 3.x (include/oneapi/dnnl/dnnl.h): row-major. */
typedef int sgemm_fn(char trans_a, char trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                     const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                     int64_t ldc);

/* NT is the forward of a linear layer, NN its gradient of x, TN that of the weight. */
static const struct shape {
    const char *kind;
    int64_t m, n, k;
} shapes[] = {
    {"NT", 2048, 192, 192},  {"NT", 2048, 256, 256},  {"NT", 2048, 512, 192},
    {"NT", 2048, 768, 192},  {"NT", 2048, 192, 512},  {"NT", 2048, 192, 768},
    {"NT", 2048, 2048, 192}, {"NT", 4096, 192, 192},  {"NN", 2048, 192, 192},
    {"NN", 2048, 256, 256},  {"NN", 2048, 192, 512},  {"NN", 2048, 192, 768},
    {"NN", 2048, 512, 192},  {"NN", 2048, 768, 192},  {"NN", 2048, 192, 2048},
    {"TN", 192, 192, 2048},  {"TN", 256, 256, 2048},  {"TN", 512, 192, 2048},
    {"TN", 768, 192, 2048},  {"TN", 192, 512, 2048},  {"TN", 192, 768, 2048},
    {"TN", 2048, 192, 2048}, {"TN", 192, 192, 4096},  {"NN", 33, 65, 4099},
    {"TN", 128, 128, 65536}, {"NT", 128, 128, 65536},
};
enum { SHAPES = sizeof shapes / sizeof *shapes, MOST_ROUNDS = 1000 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, by_size);
    return values[n / 2];
}

static void want(struct xt_ctx *ctx, enum xt_status status) {
    if (status == XT_OK) return;
    fprintf(stderr, "%s\n", xt_error(ctx));
    exit(1);
}

/* rows x cols numbers in [-1, 1), in f32 and the same ones as a tensor of dtype. */
static struct xt_tensor *numbers(struct xt_ctx *ctx, enum xt_dtype dtype, int64_t rows,
                                 int64_t cols, uint64_t seed, float **plain) {
    const size_t count = (size_t)(rows * cols);
    const struct xt_spec spec = {XT_F32, 2, {rows, cols}};
    struct xt_tensor *whole, *t;
    *plain = aligned_alloc(64, (count * sizeof **plain + 4096) / 64 * 64);
    if (!*plain) exit(1);
    for (size_t i = 0; i < count; i++) {
        const uint64_t h = xt_splitmix64(seed + i);
        (*plain)[i] = (float)(h >> 40) * 0x1p-23f - 1;
    }
    want(ctx, xt_tensor_from_host(ctx, &spec, XT_CPU, *plain, count * sizeof **plain, &whole));
    want(ctx, xt_cast(ctx, whole, dtype, &t));
    xt_tensor_release(ctx, whole);
    return t;
}

/* c = a @ b by oneDNN's bf16 primitive, left to its own threads; false where there is none. */
static bool library_bf16(struct xt_ctx *ctx, const struct xt_onednn_product *p, const void *a,
                         const void *b, float *c) {
    struct xt_onednn_job *job = xt_onednn_prepare(ctx, 0, p);
    return job && xt_onednn_run(ctx, 0, job, a, b, c);
}

static void measure(struct xt_ctx *ctx, const struct shape *s, enum xt_dtype dtype, sgemm_fn *sgemm,
                    int rounds, double *library, double *ours, double *ratio) {
    const bool ta = s->kind[0] == 'T', tb = s->kind[1] == 'T';
    static double theirs_at[MOST_ROUNDS], ours_at[MOST_ROUNDS], ratio_at[MOST_ROUNDS];
    float *a, *b, *c = aligned_alloc(64, ((size_t)(s->m * s->n) * sizeof *c + 4096) / 64 * 64);
    struct xt_tensor *x = numbers(ctx, dtype, ta ? s->k : s->m, ta ? s->m : s->k, 1, &a), *xt;
    struct xt_tensor *y = numbers(ctx, dtype, tb ? s->n : s->k, tb ? s->k : s->n, 2, &b), *yt, *out;
    const struct xt_op *acc = xt_op_find(ctx, "matmul_acc");
    const struct xt_spec spec = {XT_F32, 2, {s->m, s->n}};
    struct xt_args args;
    if (!c) exit(1);
    want(ctx, ta ? xt_transpose(ctx, x, 0, 1, &xt) : xt_transpose(ctx, x, 0, 0, &xt));
    want(ctx, tb ? xt_transpose(ctx, y, 0, 1, &yt) : xt_transpose(ctx, y, 0, 0, &yt));
    want(ctx, xt_tensor_new(ctx, &spec, XT_CPU, &out));
    xt_args_init(&args, acc, (struct xt_tensor *[]){out, xt, yt}, 3);
    for (int r = -2; r < rounds; r++) {
        const double start = seconds();
        sgemm(s->kind[0], s->kind[1], s->m, s->n, s->k, 1, a, ta ? s->m : s->k, b, tb ? s->k : s->n,
              0, c, s->n);
        const double middle = seconds();
        if (ta) { /* a weight's gradient: f32 whatever the factors */
            want(ctx, xt_call_run(ctx, acc, &args, NULL));
        } else {
            struct xt_tensor *made;
            want(ctx, xt_binary(ctx, "matmul", xt, yt, &made));
            xt_tensor_release(ctx, made);
        }
        const double end = seconds();
        if (r < 0) continue;
        theirs_at[r] = middle - start;
        ours_at[r] = end - middle;
        ratio_at[r] = theirs_at[r] / ours_at[r];
    }
    *library = median(theirs_at, rounds);
    *ours = median(ours_at, rounds);
    *ratio = median(ratio_at, rounds);
    if (dtype == XT_BF16) {
        const struct xt_onednn_product p = {
            XT_BF16, s->m, s->n, s->k, ta ? 1 : s->k, ta ? s->m : 1, tb ? 1 : s->n, tb ? s->k : 1};
        const double start = seconds();
        if (library_bf16(ctx, &p, xt_data(x), xt_data(y), c))
            printf("   oneDNN bf16, one thread: %.0f us", 1e6 * (seconds() - start));
    }
    free(a);
    free(b);
    free(c);
    struct xt_tensor *all[] = {x, y, xt, yt, out};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) xt_tensor_release(ctx, all[i]);
}

int main(int n, char **values) {
    const int threads = n > 1 ? atoi(values[1]) : 2, asked = n > 2 ? atoi(values[2]) : 31;
    const int rounds = asked < 1 ? 1 : asked > MOST_ROUNDS ? MOST_ROUNDS : asked;
    void *library = dlopen("libdnnl.so.3", RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen("libdnnl.so.2", RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, "dnnl_sgemm") : NULL;
    struct xt_ctx *ctx = xt_ctx_new();
    sgemm_fn *sgemm;
    if (!symbol || !ctx) {
        fprintf(stderr, "oneDNN is not here to be compared with: install libdnnl2\n");
        return 1;
    }
    memcpy(&sgemm, &symbol, sizeof sgemm);
    omp_set_num_threads(threads);
    xt_set_threads(ctx, threads);
    for (int d = 0; d < 2; d++) {
        const enum xt_dtype dtype = d ? XT_BF16 : XT_F32;
        double library_sum = 0, ours_sum = 0;
        printf("%s, %d threads, kernels %s\n", xt_dtype_name(dtype), threads, xt_isa(ctx));
        for (int i = 0; i < SHAPES; i++) {
            double theirs, ours, ratio;
            measure(ctx, &shapes[i], dtype, sgemm, rounds, &theirs, &ours, &ratio);
            printf("  %s %5lld x %4lld x %5lld   oneDNN %8.0f   ours %8.0f   ratio %.2f\n",
                   shapes[i].kind, (long long)shapes[i].m, (long long)shapes[i].n,
                   (long long)shapes[i].k, 1e6 * theirs, 1e6 * ours, ratio);
            library_sum += theirs;
            ours_sum += ours;
        }
        printf("  all: %.2f\n", library_sum / ours_sum);
    }
    xt_ctx_free(ctx);
    return 0;
}
