/*
 * linalg.cu: matrix products, by cuBLASLt, which is opened at run time.
 *
 * A product's algorithm is chosen once by its shape, strides and alignment: the library's first
 * heuristic among those that add in a fixed order, within a fixed workspace, never by timing. So
 * the same product gives the same bits in every run on the same device and library.
 */
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#include "../product.h"

#define WORKSPACE ((size_t)32 << 20)
#define PLANS 1024 /* places of the table, a power of two */

/* ---- the library ----------------------------------------------------------------------------- */

#define FUNCTIONS(X)                                                                               \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtGetVersion)                                                                          \
    X(cublasLtGetStatusString)                                                                     \
    X(cublasLtMatmul)                                                                              \
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

/* What decides an algorithm; compared as bytes, so it is zeroed before it is filled. */
struct key {
    int64_t m, n, k, batch, lda, ldb, ldc, a_batch, b_batch, c_batch;
    int32_t in, out, a_turned, b_turned, bias, add;
    int32_t a_align, b_align, c_align; /* bytes, at most 256 */
    int32_t unused;                    /* no padding that would not be zero */
};

struct plan {
    bool used;
    struct key key;
    cublasLtMatmulDesc_t what;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
};

struct xt_cublas {
    void *library;
#define POINTER(name) decltype(&::name) name;
    FUNCTIONS(POINTER)
#undef POINTER
    cublasLtHandle_t handle;
    int n_plans;
    struct plan plans[PLANS]; /* open addressing; emptied when three quarters full */
};

static void drop_plans(struct xt_cublas *blas) {
    for (int i = 0; i < PLANS; i++) {
        struct plan *p = &blas->plans[i];
        if (!p->used) continue;
        if (p->a) blas->cublasLtMatrixLayoutDestroy(p->a);
        if (p->b) blas->cublasLtMatrixLayoutDestroy(p->b);
        if (p->c) blas->cublasLtMatrixLayoutDestroy(p->c);
        if (p->what) blas->cublasLtMatmulDescDestroy(p->what);
        memset(p, 0, sizeof *p);
    }
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
    *out = *place = blas;
    return XT_OK;
}

/* ---- plans ----------------------------------------------------------------------------------- */

static enum xt_status check(struct xt_ctx *ctx, const struct xt_cublas *blas, cublasStatus_t status,
                            const struct key *k) {
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
    const struct key *k = &p->key;
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

static cublasStatus_t choose_algorithm(const struct xt_cublas *blas, struct plan *p,
                                       cublasLtMatmulPreference_t preference) {
    cublasStatus_t status;
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
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    GO(blas->cublasLtMatmulAlgoGetHeuristic(blas->handle, p->what, p->b, p->a, p->c, p->c,
                                            preference, 1, &found, &n));
    if (n == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    p->algorithm = found.algo;
    p->workspace = found.workspaceSize;
    return CUBLAS_STATUS_SUCCESS;
}

static size_t hash_of(const struct key *k) {
    uint64_t words[sizeof *k / 8], h = 0;
    memcpy(words, k, sizeof words);
    for (size_t i = 0; i < sizeof words / 8; i++) h = xt_seed_mix(h, words[i]);
    return (size_t)h;
}

static enum xt_status plan_of(struct xt_ctx *ctx, struct xt_cublas *blas, const struct key *k,
                              struct plan **out) {
    size_t at = hash_of(k) & (PLANS - 1);
    for (; blas->plans[at].used; at = (at + 1) & (PLANS - 1))
        if (memcmp(&blas->plans[at].key, k, sizeof *k) == 0) {
            *out = &blas->plans[at];
            return XT_OK;
        }
    if (4 * blas->n_plans >= 3 * PLANS) {
        drop_plans(blas);
        at = hash_of(k) & (PLANS - 1);
    }
    struct plan *p = &blas->plans[at];
    p->key = *k;
    cublasLtMatmulPreference_t preference = NULL;
    cublasStatus_t status = blas->cublasLtMatmulPreferenceCreate(&preference);
    if (status == CUBLAS_STATUS_SUCCESS) status = describe_product(blas, p);
    if (status == CUBLAS_STATUS_SUCCESS) status = choose_algorithm(blas, p, preference);
    if (preference) blas->cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS) {
        if (p->a) blas->cublasLtMatrixLayoutDestroy(p->a);
        if (p->b) blas->cublasLtMatrixLayoutDestroy(p->b);
        if (p->c) blas->cublasLtMatrixLayoutDestroy(p->c);
        if (p->what) blas->cublasLtMatmulDescDestroy(p->what);
        memset(p, 0, sizeof *p);
        return check(ctx, blas, status, k);
    }
    p->used = true;
    blas->n_plans++;
    *out = p;
    return XT_OK;
}

/* ---- kernels beside the library -------------------------------------------------------------- */

/* rows x cols of a matrix to a place whose rows lie side by side; strides in elements. */
template <class U>
__global__ void copy_matrix(U *to, int64_t to_row, int64_t to_batch, const U *from, int64_t row,
                            int64_t col, int64_t batch, int64_t rows, int64_t cols) {
    to += blockIdx.z * to_batch;
    from += blockIdx.z * batch;
    for (int64_t i = blockIdx.y; i < rows; i += gridDim.y)
        for (int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; j < cols;
             j += (int64_t)gridDim.x * blockDim.x)
            to[i * to_row + j] = from[i * row + j * col];
}

static enum xt_status copy(struct xt_ctx *ctx, size_t bytes, void *to, int64_t to_row,
                           int64_t to_batch, const void *from, int64_t row, int64_t col,
                           int64_t step, int64_t rows, int64_t cols, int64_t batch) {
    constexpr int THREADS = 256;
    for (int64_t at = 0; at < batch; at += 65535) {
        unsigned z = (unsigned)(batch - at < 65535 ? batch - at : 65535);
        dim3 grid((unsigned)((cols + THREADS - 1) / THREADS),
                  (unsigned)(rows < 65535 ? rows : 65535), z);
        size_t t = (size_t)(at * to_batch) * bytes, f = (size_t)(at * step) * bytes;
        cudaStream_t stream = xt_cuda_stream(ctx);
        if (bytes == 2)
            copy_matrix<<<grid, THREADS, 0, stream>>>(
                (uint16_t *)((char *)to + t), to_row, to_batch,
                (const uint16_t *)((const char *)from + f), row, col, step, rows, cols);
        else if (bytes == 4)
            copy_matrix<<<grid, THREADS, 0, stream>>>(
                (uint32_t *)((char *)to + t), to_row, to_batch,
                (const uint32_t *)((const char *)from + f), row, col, step, rows, cols);
        else
            copy_matrix<<<grid, THREADS, 0, stream>>>(
                (uint64_t *)((char *)to + t), to_row, to_batch,
                (const uint64_t *)((const char *)from + f), row, col, step, rows, cols);
        XT_TRY(xt_cuda_launched(ctx));
    }
    return XT_OK;
}

/* c = beta * c + bias: what is left of a product over nothing, and of a bias the library lacks. */
template <class T>
__global__ void add_bias(T *c, int64_t c_row, int64_t c_batch, const T *bias, double beta,
                         int64_t rows, int64_t cols) {
    c += blockIdx.z * c_batch;
    for (int64_t i = blockIdx.y; i < rows; i += gridDim.y)
        for (int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; j < cols;
             j += (int64_t)gridDim.x * blockDim.x) {
            xt_real<T> x = bias ? xt_to<xt_real<T>>(bias[j]) : 0;
            if (beta != 0) x += (xt_real<T>)beta * xt_to<xt_real<T>>(c[i * c_row + j]);
            c[i * c_row + j] = xt_to<T>(x);
        }
}

static enum xt_status scale_and_add(struct xt_ctx *ctx, const struct xt_cuda_gemm *g, double beta) {
    constexpr int THREADS = 256;
    for (int64_t at = 0; at < g->batch; at += 65535) {
        dim3 grid((unsigned)((g->n + THREADS - 1) / THREADS),
                  (unsigned)(g->m < 65535 ? g->m : 65535),
                  (unsigned)(g->batch - at < 65535 ? g->batch - at : 65535));
        XT_CUDA_FLOATS(g->out, add_bias<<<grid, THREADS, 0, xt_cuda_stream(ctx)>>>(
                                   (T *)g->c + at * g->c_batch, g->c_row, g->c_batch,
                                   (const T *)g->bias, beta, g->m, g->n);)
        XT_TRY(xt_cuda_launched(ctx));
    }
    return XT_OK;
}

/* ---- one product ----------------------------------------------------------------------------- */

/* An operand as the library takes it. */
struct side {
    const void *data;
    int64_t lead, step; /* between the columns it sees, and between products of the batch */
    bool turned;        /* its rows are the library's rows */
    void *scratch;      /* a copy, to be given back; NULL: none */
    size_t bytes;       /* of scratch */
};

static int32_t alignment(const void *data) {
    uintptr_t p = (uintptr_t)data;
    return (int32_t)(p & 255 ? p & (~p + 1) : 256);
}

/* Rows a multiple of 64 elements apart: what tensor cores like. */
static int64_t padded(int64_t n) {
    return (n + 63) / 64 * 64;
}

/* Whether the library multiplies what lies so at full speed: 16-bit rows start at 16 bytes. */
static bool is_fast(enum xt_dtype dtype, const void *data, int64_t lead, int64_t step) {
    if (dtype != XT_BF16 && dtype != XT_F16) return true;
    return lead % 8 == 0 && step % 8 == 0 && ((uintptr_t)data & 15) == 0;
}

/* The operand of rows x cols; copied when it lies badly. `row` or `col` is 1, or it is copied. */
static enum xt_status prepare(struct xt_ctx *ctx, enum xt_dtype dtype, const void *data,
                              int64_t row, int64_t col, int64_t step, int64_t rows, int64_t cols,
                              int64_t batch, bool large, struct side *s) {
    memset(s, 0, sizeof *s);
    if (cols == 1) col = 1;
    if (rows == 1) row = col == 1 ? cols : 1;
    bool turned = col != 1;
    int64_t lead = turned ? col : row, across = turned ? rows : cols;
    if (batch == 1) step = 0;
    bool fits = (col == 1 || row == 1) && lead >= across;
    if (fits && (!large || is_fast(dtype, data, lead, step))) {
        s->data = data;
        s->lead = lead;
        s->step = step;
        s->turned = turned;
        return XT_OK;
    }
    size_t bytes = xt_dtype_bytes(dtype);
    int64_t copies = step == 0 ? 1 : batch;
    s->turned = fits && turned; /* a copy keeps the order of what is copied */
    int64_t inner = s->turned ? rows : cols, outer = s->turned ? cols : rows;
    s->lead = padded(inner);
    s->step = copies == 1 ? 0 : s->lead * outer;
    s->bytes = (size_t)(s->lead * outer * copies) * bytes;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, s->bytes, &s->scratch));
    s->data = s->scratch;
    return copy(ctx, bytes, s->scratch, s->lead, s->step, data, s->turned ? col : row,
                s->turned ? row : col, step, outer, inner, copies);
}

static void put_back(struct xt_ctx *ctx, const struct side *s) {
    if (s->scratch) xt_scratch_put(ctx, XT_CUDA, s->scratch, s->bytes);
}

static enum xt_status multiply(struct xt_ctx *ctx, struct xt_cublas *blas,
                               const struct xt_cuda_gemm *g, const struct side *a,
                               const struct side *b, void *c, int64_t ldc, int64_t c_batch) {
    struct key k;
    memset(&k, 0, sizeof k);
    k.m = g->m, k.n = g->n, k.k = g->k, k.batch = g->batch;
    k.lda = a->lead, k.ldb = b->lead, k.ldc = ldc;
    k.a_batch = a->step, k.b_batch = b->step, k.c_batch = g->batch == 1 ? 0 : c_batch;
    k.in = g->in, k.out = g->out, k.a_turned = a->turned, k.b_turned = b->turned;
    k.bias = g->bias != NULL, k.add = g->beta != 0;
    k.a_align = alignment(a->data), k.b_align = alignment(b->data), k.c_align = alignment(c);
    struct plan *p = NULL;
    XT_TRY(plan_of(ctx, blas, &k, &p));
    if (g->bias) {
        cublasStatus_t status = blas->cublasLtMatmulDescSetAttribute(
            p->what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias);
        XT_TRY(check(ctx, blas, status, &k));
    }
    void *workspace = NULL;
    if (p->workspace) XT_TRY(xt_scratch_get(ctx, XT_CUDA, p->workspace, &workspace));
    float alpha = (float)g->alpha, beta = (float)g->beta;
    bool wide = g->in == XT_F64;
    cublasStatus_t status = blas->cublasLtMatmul(
        blas->handle, p->what, wide ? (const void *)&g->alpha : &alpha, b->data, p->b, a->data,
        p->a, wide ? (const void *)&g->beta : &beta, c, p->c, c, p->c, &p->algorithm, workspace,
        p->workspace, xt_cuda_stream(ctx));
    if (workspace) xt_scratch_put(ctx, XT_CUDA, workspace, p->workspace);
    return check(ctx, blas, status, &k);
}

enum xt_status xt_cuda_gemm(struct xt_ctx *ctx, const struct xt_cuda_gemm *given) {
    struct xt_cuda_gemm g = *given;
    struct xt_cublas *blas = NULL;
    if (g.m == 0 || g.n == 0 || g.batch == 0) return XT_OK;
    if (g.k == 0) return scale_and_add(ctx, &g, g.beta);
    XT_TRY(open_library(ctx, &blas));
    const void *late_bias = g.in == XT_F64 ? g.bias : NULL; /* the library has none in f64 */
    if (late_bias) g.bias = NULL;
    bool large = g.m * g.n * g.k >= 1 << 20;
    struct side a = {}, b = {};
    void *c = g.c, *apart = NULL;
    int64_t ldc = g.m == 1 && g.c_row < g.n ? g.n : g.c_row, c_batch = g.c_batch;
    size_t bytes = xt_dtype_bytes(g.out), c_bytes = 0;
    enum xt_status status = XT_OK;
    XT_GO(prepare(ctx, g.in, g.a, g.a_row, g.a_col, g.a_batch, g.m, g.k, g.batch, large, &a));
    XT_GO(prepare(ctx, g.in, g.b, g.b_row, g.b_col, g.b_batch, g.k, g.n, g.batch, large, &b));
    if (large && g.beta == 0 && !is_fast(g.out, c, ldc, g.batch == 1 ? 0 : c_batch)) {
        ldc = padded(g.n);
        c_batch = ldc * g.m;
        c_bytes = (size_t)(c_batch * g.batch) * bytes;
        XT_GO(xt_scratch_get(ctx, XT_CUDA, c_bytes, &apart));
        c = apart;
    }
    XT_GO(multiply(ctx, blas, &g, &a, &b, c, ldc, c_batch));
    if (apart)
        XT_GO(copy(ctx, bytes, g.c, g.c_row, g.c_batch, c, ldc, 1, c_batch, g.m, g.n, g.batch));
    if (late_bias) {
        g.bias = late_bias;
        XT_GO(scale_and_add(ctx, &g, 1));
    }
done:
    put_back(ctx, &a);
    put_back(ctx, &b);
    if (apart) xt_scratch_put(ctx, XT_CUDA, apart, c_bytes);
    return status;
}

/* ---- the ops --------------------------------------------------------------------------------- */

/* Outer batch dimensions that do not lie as one are walked here, the innermost is the library's. */
static enum xt_status run(struct xt_ctx *ctx, const struct xt_product *p, struct xt_cuda_gemm *g) {
    int inner = p->n_batch - 1;
    g->m = p->m, g->n = p->n, g->k = p->k;
    g->a_row = p->a.row, g->a_col = p->a.col, g->b_row = p->b.row, g->b_col = p->b.col;
    g->c_row = p->n;
    g->batch = 1;
    if (inner >= 0) {
        g->batch = p->batch[inner];
        g->a_batch = p->a.batch[inner], g->b_batch = p->b.batch[inner];
        g->c_batch = p->m * p->n;
    }
    int64_t outer = 1;
    for (int d = 0; d < inner; d++) outer *= p->batch[d];
    size_t in = xt_dtype_bytes(g->in), out = xt_dtype_bytes(g->out);
    char *c = (char *)g->c;
    for (int64_t i = 0; i < outer; i++) {
        int64_t rest = i, a = 0, b = 0;
        for (int d = inner - 1; d >= 0; d--) {
            a += rest % p->batch[d] * p->a.batch[d];
            b += rest % p->batch[d] * p->b.batch[d];
            rest /= p->batch[d];
        }
        g->a = (const char *)p->a.data + a * (int64_t)in;
        g->b = (const char *)p->b.data + b * (int64_t)in;
        g->c = c + i * g->batch * p->m * p->n * (int64_t)out;
        XT_TRY(xt_cuda_gemm(ctx, g));
    }
    return XT_OK;
}

static enum xt_status matmul(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *a = l->in[0], *c = l->out[0];
    struct xt_cuda_gemm g = {.in = a->dtype, .out = c->dtype, .c = xt_data(c), .alpha = 1};
    struct xt_product p;
    xt_product_of(a, l->in[1], &p);
    return run(ctx, &p, &g);
}

static enum xt_status linear(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *bias = l->in[2], *y = l->out[0];
    struct xt_cuda_gemm g = {.in = x->dtype, .out = y->dtype, .c = xt_data(y), .alpha = 1};
    struct xt_product p;
    struct xt_tensor turned;
    xt_product_turn(l->in[1], &turned);
    xt_product_of(x, &turned, &p);
    void *copied = NULL;
    size_t bytes = (size_t)p.n * xt_dtype_bytes(g.out);
    enum xt_status status = XT_OK;
    if (bias && p.n) {
        g.bias = xt_data(bias);
        if (bias->stride[0] != 1 && p.n > 1) {
            XT_GO(xt_scratch_get(ctx, XT_CUDA, bytes, &copied));
            XT_GO(copy(ctx, xt_dtype_bytes(g.out), copied, p.n, 0, g.bias, 0, bias->stride[0], 0, 1,
                       p.n, 1));
            g.bias = copied;
        }
    }
    XT_GO(run(ctx, &p, &g));
done:
    if (copied) xt_scratch_put(ctx, XT_CUDA, copied, bytes);
    return status;
}

static enum xt_status matmul_acc(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *target = l->in[0], *a = l->in[1];
    struct xt_cuda_gemm g = {.in = a->dtype,
                             .out = target->dtype,
                             .c = xt_data(target),
                             .alpha = 1,
                             .beta = l->attrs[0].i ? 1.0 : 0.0};
    if (!xt_is_contiguous(target)) return xt_fail(ctx, XT_ARGUMENT, "target must be contiguous");
    struct xt_product p;
    xt_product_of(a, l->in[2], &p);
    return run(ctx, &p, &g);
}

#define FACTORS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F64))

const struct xt_kernel xt_cuda_linalg_kernels[] = {
    {"matmul", FACTORS, XT_STRIDED, matmul},
    {"linear", FACTORS, XT_STRIDED, linear},
    {"matmul_acc", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_STRIDED, matmul_acc},
    {},
};
