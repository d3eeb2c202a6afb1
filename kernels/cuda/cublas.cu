/*
 * cublas.cu: cuBLASLt, opened at run time, and which of its algorithms a product takes.
 *
 * The algorithm of a product is chosen once by its shape, strides and alignment, the device and the
 * library's version: by the context's choices (choice.c: a run's, or the committed table's), else
 * the library's first heuristic. Only those that add in a fixed order, within a fixed workspace,
 * are taken; and never by timing, except while tuning is on, which is how the table is made. So
 * the same product gives the same bits in every run on the same device, library and table.
 */
#include <cublasLt.h>
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cublas.h"
#include "cuda.h"

#define WORKSPACE ((size_t)32 << 20)
#define PLANS 1024 /* places of the table, a power of two */
#define RANKED 16  /* of the library's algorithms are measured, its best */

/* ---- the library ----------------------------------------------------------------------------- */

#define FUNCTIONS(X)                                                                               \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtGetVersion)                                                                          \
    X(cublasLtGetStatusString)                                                                     \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulAlgoCheck)                                                                     \
    X(cublasLtMatmulAlgoConfigGetAttribute)                                                        \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatrixLayoutSetAttribute)                                                            \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)

struct plan {
    bool used;
    struct xt_choice_key key;
    cublasLtMatmulDesc_t what;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace; /* bytes that the algorithm wants */
};

struct xt_cublas {
    void *library;
#define POINTER(name) decltype(&::name) name;
    FUNCTIONS(POINTER)
#undef POINTER
    cublasLtHandle_t handle;
    int64_t version;          /* 10000 * major + 100 * minor + patch */
    int changed;              /* xt_choices_changed when the plans were made */
    int n_plans;              /* used of plans */
    struct plan plans[PLANS]; /* open addressing; emptied when three quarters full */
};

static void drop_plan(const struct xt_cublas *blas, struct plan *p) {
    if (p->a) blas->cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) blas->cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) blas->cublasLtMatrixLayoutDestroy(p->c);
    if (p->what) blas->cublasLtMatmulDescDestroy(p->what);
    memset(p, 0, sizeof *p);
}

static void drop_plans(struct xt_cublas *blas) {
    for (int i = 0; i < PLANS; i++)
        if (blas->plans[i].used) drop_plan(blas, &blas->plans[i]);
    blas->n_plans = 0;
}

void xt_cublas_free(struct xt_cublas *blas) {
    drop_plans(blas);
    if (blas->handle) blas->cublasLtDestroy(blas->handle);
    if (blas->library) dlclose(blas->library);
    free(blas);
}

static enum xt_status open_library(struct xt_ctx *ctx, struct xt_cublas **out) {
    struct xt_cublas **place = xt_cuda_cublas(ctx);
    if (*place) {
        *out = *place;
        return XT_OK;
    }
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12",
                                        "/usr/local/cuda/lib64/libcublasLt.so.13",
                                        "/usr/local/cuda/lib64/libcublasLt.so.12"};
    struct xt_cublas *blas = (struct xt_cublas *)calloc(1, sizeof *blas);
    if (!blas) return xt_fail(ctx, XT_MEMORY, "out of memory: the records of a library");
    for (size_t i = 0; i < sizeof names / sizeof *names && !blas->library; i++)
        blas->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!blas->library) {
        free(blas);
        return xt_fail(ctx, XT_UNSUPPORTED,
                       "products on cuda need cuBLASLt (libcublasLt.so.13), which was not found; "
                       "the package libcublas-13-0 brings it");
    }
    bool complete = true;
#define LOOK_UP(name)                                                                              \
    blas->name = (decltype(&::name))dlsym(blas->library, #name);                                   \
    complete = complete && blas->name;
    FUNCTIONS(LOOK_UP)
#undef LOOK_UP
    if (!complete || blas->cublasLtCreate(&blas->handle) != CUBLAS_STATUS_SUCCESS) {
        blas->handle = NULL;
        xt_cublas_free(blas);
        return xt_fail(ctx, XT_UNSUPPORTED, "cuBLASLt was found and does not start");
    }
    blas->version = (int64_t)blas->cublasLtGetVersion();
    *out = *place = blas;
    return XT_OK;
}

enum xt_status xt_cublas_describe(struct xt_ctx *ctx, char *device, size_t bytes,
                                  int64_t *version) {
    struct xt_cublas *blas = NULL;
    XT_TRY(open_library(ctx, &blas));
    const char *name = xt_cuda_name(ctx);
    const size_t n = strlen(name) < bytes ? strlen(name) : bytes - 1;
    memcpy(device, name, n);
    device[n] = 0;
    *version = blas->version;
    return XT_OK;
}

/* ---- plans ----------------------------------------------------------------------------------- */

static enum xt_status check(struct xt_ctx *ctx, const struct xt_cublas *blas, cublasStatus_t status,
                            const struct xt_choice_key *k) {
    if (status == CUBLAS_STATUS_SUCCESS) return XT_OK;
    return xt_fail(ctx, XT_UNSUPPORTED, "cuBLASLt: %s (%lld x %lld x %lld, batch %lld, %s to %s)",
                   blas->cublasLtGetStatusString(status), (long long)k->m, (long long)k->n,
                   (long long)k->k, (long long)k->batch, xt_dtype_name((enum xt_dtype)k->in),
                   xt_dtype_name((enum xt_dtype)k->out));
}

static cudaDataType type_of(int32_t dtype) {
    return dtype == XT_F32    ? CUDA_R_32F
           : dtype == XT_BF16 ? CUDA_R_16BF
           : dtype == XT_F16  ? CUDA_R_16F
                              : CUDA_R_64F;
}

static cublasStatus_t make_layout(const struct xt_cublas *blas, cublasLtMatrixLayout_t *layout,
                                  int32_t dtype, bool turned, int64_t rows, int64_t cols,
                                  int64_t lead, int64_t batch, int64_t step) {
    cublasStatus_t status =
        blas->cublasLtMatrixLayoutCreate(layout, type_of(dtype), (uint64_t)(turned ? cols : rows),
                                         (uint64_t)(turned ? rows : cols), lead);
    if (status != CUBLAS_STATUS_SUCCESS || batch == 1) return status;
    int32_t count = (int32_t)batch;
    status = blas->cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                    &count, sizeof count);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return blas->cublasLtMatrixLayoutSetAttribute(
        *layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step);
}

#define GO(expression)                                                                             \
    do {                                                                                           \
        status = (expression);                                                                     \
        if (status != CUBLAS_STATUS_SUCCESS) return status;                                        \
    } while (0)
#define SET(kind, object, name, value)                                                             \
    GO(blas->kind##SetAttribute(object, name, &(value), sizeof(value)))

/* The library counts by columns, so it is asked for the transpose: c' = b' a'. */
static cublasStatus_t describe_product(const struct xt_cublas *blas, struct plan *p) {
    const struct xt_choice_key *k = &p->key;
    cublasStatus_t status;
    bool wide = k->in == XT_F64;
    cublasOperation_t turn = CUBLAS_OP_T;
    GO(blas->cublasLtMatmulDescCreate(&p->what, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                      wide ? CUDA_R_64F : CUDA_R_32F));
    if (k->b_turned) SET(cublasLtMatmulDesc, p->what, CUBLASLT_MATMUL_DESC_TRANSA, turn);
    if (k->a_turned) SET(cublasLtMatmulDesc, p->what, CUBLASLT_MATMUL_DESC_TRANSB, turn);
    if (k->bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        cudaDataType type = type_of(k->out);
        SET(cublasLtMatmulDesc, p->what, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        SET(cublasLtMatmulDesc, p->what, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
    }
    GO(make_layout(blas, &p->b, k->in, k->b_turned, k->n, k->k, k->ldb, k->batch, k->b_batch));
    GO(make_layout(blas, &p->a, k->in, k->a_turned, k->k, k->m, k->lda, k->batch, k->a_batch));
    return make_layout(blas, &p->c, k->out, false, k->n, k->m, k->ldc, k->batch, k->c_batch);
}

static enum xt_status point_at_bias(struct xt_ctx *ctx, const struct xt_cublas *blas,
                                    const struct plan *p, const struct xt_cublas_product *x) {
    if (!x->bias) return XT_OK;
    return check(ctx, blas,
                 blas->cublasLtMatmulDescSetAttribute(p->what, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                      &x->bias, sizeof x->bias),
                 &x->key);
}

/* ---- algorithms ------------------------------------------------------------------------------ */

/* One that may be taken, and what it wants. */
struct candidate {
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace; /* bytes */
};

/* The library's ranking, `most` of it at most, best first. */
static cublasStatus_t rank(const struct xt_cublas *blas, const struct plan *p,
                           cublasLtMatmulPreference_t preference, int most, struct candidate *found,
                           int *n) {
    cublasStatus_t status;
    cublasLtMatmulHeuristicResult_t results[RANKED];
    size_t workspace = WORKSPACE;
    /* Partial sums are added by a second kernel in order, never as the blocks happen to end. */
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint32_t a = (uint32_t)p->key.b_align, b = (uint32_t)p->key.a_align,
             c = (uint32_t)p->key.c_align;
    SET(cublasLtMatmulPreference, preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    SET(cublasLtMatmulPreference, preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
    SET(cublasLtMatmulPreference, preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a);
    SET(cublasLtMatmulPreference, preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b);
    SET(cublasLtMatmulPreference, preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c);
    SET(cublasLtMatmulPreference, preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c);
    int count = 0;
    GO(blas->cublasLtMatmulAlgoGetHeuristic(blas->handle, p->what, p->b, p->a, p->c, p->c,
                                            preference, most, results, &count));
    *n = 0;
    for (int i = 0; i < count; i++) {
        if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
        found[*n].algorithm = results[i].algo;
        found[(*n)++].workspace = results[i].workspaceSize;
    }
    return *n ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Whether a choice may be taken for the product: the library runs it, within the workspace, and it
   adds in a fixed order. */
static bool is_allowed(const struct xt_cublas *blas, const struct plan *p,
                       const uint64_t words[XT_CHOICE_WORDS], struct candidate *out) {
    cublasLtMatmulHeuristicResult_t result;
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_INPLACE;
    size_t written = 0;
    static_assert(sizeof out->algorithm == XT_CHOICE_WORDS * sizeof *words,
                  "an algorithm is so many words");
    memset(&result, 0, sizeof result);
    memcpy(&out->algorithm, words, sizeof out->algorithm);
    if (blas->cublasLtMatmulAlgoCheck(blas->handle, p->what, p->b, p->a, p->c, p->c,
                                      &out->algorithm, &result) != CUBLAS_STATUS_SUCCESS ||
        result.workspaceSize > WORKSPACE ||
        blas->cublasLtMatmulAlgoConfigGetAttribute(
            &out->algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme,
            &written) != CUBLAS_STATUS_SUCCESS)
        return false;
    out->workspace = result.workspaceSize;
    return scheme == CUBLASLT_REDUCTION_SCHEME_NONE ||
           scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

static cublasStatus_t launch(struct xt_ctx *ctx, const struct xt_cublas *blas, const struct plan *p,
                             const struct xt_cublas_product *x, void *c,
                             const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes) {
    const float alpha = (float)x->alpha, beta = (float)x->beta;
    const bool wide = x->key.in == XT_F64;
    return blas->cublasLtMatmul(blas->handle, p->what, wide ? (const void *)&x->alpha : &alpha,
                                x->b, p->b, x->a, p->a, wide ? (const void *)&x->beta : &beta, c,
                                p->c, c, p->c, algorithm, workspace, bytes, xt_cuda_stream(ctx));
}

/* ---- tuning ---------------------------------------------------------------------------------- */

#define ROUNDS 7           /* each candidate is timed once a round, so that all see what changes */
#define MOST_LAUNCHES 20   /* of one timing */
#define TIMED_MS 0.4f      /* of one timing, at least, where so many launches take that */
#define HELD_NS 200000     /* the device waits so long while the host queues the launches */
#define GAIN 0.98f         /* of the incumbent's time: what is not faster than this stays out */
#define TIMED (1 + RANKED) /* candidates at most */

/* Room in which a product is measured, so that c is not added to. */
struct bench {
    void *room;        /* a matrix as c lies */
    size_t room_bytes; /* of room */
    void *workspace;   /* WORKSPACE bytes */
    cudaEvent_t from;  /* before the launches */
    cudaEvent_t to;    /* after them */
};

static __global__ void hold_device(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}

/* Milliseconds of one launch among `launches`; infinite when the library refuses. */
static enum xt_status time_candidate(struct xt_ctx *ctx, const struct xt_cublas *blas,
                                     const struct plan *p, const struct xt_cublas_product *x,
                                     const struct bench *at, const struct candidate *one,
                                     int launches, float *ms) {
    /* As far from 64 bytes as c is. */
    void *c = (char *)at->room + (x->key.c_align < 64 ? x->key.c_align : 0);
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    hold_device<<<1, 1, 0, xt_cuda_stream(ctx)>>>(HELD_NS);
    XT_TRY(xt_cuda_launched(ctx));
    XT_CUDA_TRY(cudaEventRecord(at->from, xt_cuda_stream(ctx)));
    for (int i = 0; i < launches && status == CUBLAS_STATUS_SUCCESS; i++)
        status = launch(ctx, blas, p, x, c, &one->algorithm, at->workspace, one->workspace);
    XT_CUDA_TRY(cudaEventRecord(at->to, xt_cuda_stream(ctx)));
    xt_count_wait(ctx, XT_CUDA);
    XT_CUDA_TRY(cudaEventSynchronize(at->to));
    XT_CUDA_TRY(cudaEventElapsedTime(ms, at->from, at->to));
    *ms = status == CUBLAS_STATUS_SUCCESS ? *ms / (float)launches : INFINITY;
    return XT_OK;
}

static float middle(const float *times) {
    float sorted[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        int at = i;
        for (; at > 0 && sorted[at - 1] > times[i]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = times[i];
    }
    return sorted[ROUNDS / 2];
}

/* Which of n candidates is fastest; 0, the incumbent, unless another is so by more than GAIN. */
static enum xt_status find_fastest(struct xt_ctx *ctx, const struct xt_cublas *blas,
                                   const struct plan *p, const struct xt_cublas_product *x,
                                   const struct bench *at, const struct candidate *list, int n,
                                   int *fastest, struct xt_choice *made) {
    float times[TIMED][ROUNDS], once = 0;
    for (int i = n; i-- > 0;) /* the first launch of a kernel loads it */
        for (int warm = 0; warm < 2; warm++)
            XT_TRY(time_candidate(ctx, blas, p, x, at, &list[i], 1, &once));
    int launches = MOST_LAUNCHES; /* by the incumbent's time */
    if (once > TIMED_MS / MOST_LAUNCHES) launches = once < TIMED_MS ? (int)(TIMED_MS / once) : 1;
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < n; i++)
            XT_TRY(time_candidate(ctx, blas, p, x, at, &list[i], launches, &times[i][round]));
    int best = 0;
    for (int i = 1; i < n; i++)
        if (middle(times[i]) < middle(times[best])) best = i;
    *fastest = best = middle(times[best]) < GAIN * middle(times[0]) ? best : 0;
    made->measured = n;
    made->before_us = 1e3 * (double)middle(times[0]);
    made->after_us = 1e3 * (double)middle(times[best]);
    return XT_OK;
}

/* Puts the fastest candidate first. */
static enum xt_status measure(struct xt_ctx *ctx, const struct xt_cublas *blas,
                              const struct plan *p, const struct xt_cublas_product *x,
                              struct candidate *list, int n, struct xt_choice *made) {
    const struct xt_choice_key *k = &x->key;
    const int64_t elements = (k->batch - 1) * k->c_batch + (k->m - 1) * k->ldc + k->n;
    struct bench at = {};
    int fastest = 0;
    enum xt_status status = XT_OK;
    at.room_bytes = (size_t)elements * xt_dtype_bytes((enum xt_dtype)k->out) + 64;
    XT_GO(xt_scratch_get(ctx, XT_CUDA, at.room_bytes, &at.room));
    XT_GO(xt_scratch_get(ctx, XT_CUDA, WORKSPACE, &at.workspace));
    XT_GO(xt_cuda_status(
        ctx, cudaMemsetAsync(at.room, 0, at.room_bytes, xt_cuda_stream(ctx)))); /* no NaN */
    XT_GO(xt_cuda_status(ctx, cudaEventCreate(&at.from)));
    XT_GO(xt_cuda_status(ctx, cudaEventCreate(&at.to)));
    XT_GO(find_fastest(ctx, blas, p, x, &at, list, n, &fastest, made));
    list[0] = list[fastest];
done:
    if (at.to) cudaEventDestroy(at.to);
    if (at.from) cudaEventDestroy(at.from);
    if (at.workspace) xt_scratch_put(ctx, XT_CUDA, at.workspace, WORKSPACE);
    if (at.room) xt_scratch_put(ctx, XT_CUDA, at.room, at.room_bytes);
    return status;
}

static bool is_same(const cublasLtMatmulAlgo_t *a, const cublasLtMatmulAlgo_t *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

/*
 * `one` is what would be taken, and becomes the fastest. What is neither the library's first nor in
 * the choices yet, or takes a place there, is said to come from tuning.
 */
static enum xt_status tune(struct xt_ctx *ctx, const struct xt_cublas *blas, const struct plan *p,
                           const struct xt_cublas_product *x, cublasLtMatmulPreference_t preference,
                           struct candidate *one, struct xt_choice *made) {
    struct candidate list[TIMED], ranked[RANKED];
    int n = 0, n_ranked = 0;
    XT_TRY(check(ctx, blas, rank(blas, p, preference, RANKED, ranked, &n_ranked), &x->key));
    XT_TRY(point_at_bias(ctx, blas, p, x));
    list[n++] = *one;
    for (int i = 0; i < n_ranked; i++) {
        uint64_t words[XT_CHOICE_WORDS];
        memcpy(words, &ranked[i].algorithm, sizeof words);
        if (!is_same(&ranked[i].algorithm, &one->algorithm) && is_allowed(blas, p, words, &list[n]))
            n++;
    }
    const cublasLtMatmulAlgo_t before = one->algorithm;
    if (n > 1) XT_TRY(measure(ctx, blas, p, x, list, n, made));
    *one = list[0];
    if (made->from != XT_FROM_LIBRARY || !is_same(&before, &one->algorithm))
        made->from = XT_FROM_TUNING;
    return XT_OK;
}

/* ---- choosing -------------------------------------------------------------------------------- */

/* What to take for a product that is met for the first time; notes it in the context's choices. */
static enum xt_status choose(struct xt_ctx *ctx, const struct xt_cublas *blas, struct plan *p,
                             const struct xt_cublas_product *x,
                             cublasLtMatmulPreference_t preference) {
    struct xt_choices *choices = NULL;
    struct xt_choice made;
    struct candidate one;
    int n = 0;
    memset(&made, 0, sizeof made);
    memset(&one, 0, sizeof one);
    XT_TRY(xt_choices_of(ctx, &choices));
    XT_TRY(xt_cublas_describe(ctx, made.device, sizeof made.device, &made.version));
    made.key = x->key;
    made.used = true;
    const struct xt_choice *known = xt_choices_find(choices, made.device, made.version, &x->key);
    if (known) XT_TRY(point_at_bias(ctx, blas, p, x));
    if (known && is_allowed(blas, p, known->words, &one)) {
        made.from = known->from;
    } else if (known && known->from == XT_FROM_RUN) {
        return xt_fail(
            ctx, XT_UNSUPPORTED,
            "the library refuses the algorithm that the run's saves keep for a product of "
            "%lld x %lld x %lld (%s to %s): another would give other bits",
            (long long)x->key.m, (long long)x->key.n, (long long)x->key.k,
            xt_dtype_name((enum xt_dtype)x->key.in), xt_dtype_name((enum xt_dtype)x->key.out));
    } else {
        made.from = XT_FROM_LIBRARY;
        XT_TRY(check(ctx, blas, rank(blas, p, preference, 1, &one, &n), &x->key));
    }
    if (xt_tuning(ctx)) XT_TRY(tune(ctx, blas, p, x, preference, &one, &made));
    memcpy(made.words, &one.algorithm, sizeof made.words);
    p->algorithm = one.algorithm;
    p->workspace = one.workspace;
    return xt_choices_put(ctx, choices, &made);
}

static size_t place_of(const struct xt_choice_key *k) {
    uint64_t words[sizeof *k / 8], h = 0;
    memcpy(words, k, sizeof words);
    for (size_t i = 0; i < sizeof words / 8; i++) h = xt_seed_mix(h, words[i]);
    return (size_t)h & (PLANS - 1);
}

static enum xt_status plan_of(struct xt_ctx *ctx, struct xt_cublas *blas,
                              const struct xt_cublas_product *x, struct plan **out) {
    const struct xt_choice_key *k = &x->key;
    if (blas->changed != xt_choices_changed(ctx)) {
        drop_plans(blas);
        blas->changed = xt_choices_changed(ctx);
    }
    size_t at = place_of(k);
    for (; blas->plans[at].used; at = (at + 1) & (PLANS - 1))
        if (memcmp(&blas->plans[at].key, k, sizeof *k) == 0) {
            *out = &blas->plans[at];
            return XT_OK;
        }
    if (4 * blas->n_plans >= 3 * PLANS) {
        drop_plans(blas);
        at = place_of(k);
    }
    struct plan *p = &blas->plans[at];
    p->key = *k;
    cublasLtMatmulPreference_t preference = NULL;
    enum xt_status status = XT_OK;
    XT_GO(check(ctx, blas, blas->cublasLtMatmulPreferenceCreate(&preference), k));
    XT_GO(check(ctx, blas, describe_product(blas, p), k));
    XT_GO(choose(ctx, blas, p, x, preference));
    p->used = true;
    blas->n_plans++;
    *out = p;
done:
    if (preference) blas->cublasLtMatmulPreferenceDestroy(preference);
    if (status != XT_OK) drop_plan(blas, p);
    return status;
}

enum xt_status xt_cublas_multiply(struct xt_ctx *ctx, const struct xt_cublas_product *x) {
    struct xt_cublas *blas = NULL;
    struct plan *p = NULL;
    XT_TRY(open_library(ctx, &blas));
    XT_TRY(plan_of(ctx, blas, x, &p));
    XT_TRY(point_at_bias(ctx, blas, p, x));
    void *workspace = NULL;
    if (p->workspace) XT_TRY(xt_scratch_get(ctx, XT_CUDA, p->workspace, &workspace));
    cublasStatus_t status = launch(ctx, blas, p, x, x->c, &p->algorithm, workspace, p->workspace);
    if (workspace) xt_scratch_put(ctx, XT_CUDA, workspace, p->workspace);
    return check(ctx, blas, status, &x->key);
}
