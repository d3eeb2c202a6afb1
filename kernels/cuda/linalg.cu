/*
 * linalg.cu: matrix products, by cuBLASLt (cublas.cu); here is what it lacks: operands that lie
 * badly, sizes that tensor cores take slowly, batches in several dimensions.
 */
#include <string.h>

#include "cublas.h"
#include "cuda.h"

#include "../product.h"

/* ---- kernels beside the library -------------------------------------------------------------- */

/*
 * A matrix to a place of its own, as units U: `to` has to_rows x to_cols, its rows to_row apart;
 * what is beyond rows x cols of `from` becomes zero. Strides in units.
 */
template <class U>
static __global__ void copy_matrix(U *to, int64_t to_row, int64_t to_batch, int64_t to_rows,
                                   int64_t to_cols, const U *from, int64_t row, int64_t col,
                                   int64_t batch, int64_t rows, int64_t cols) {
    constexpr int ROWS = 8; /* under way at a time, so that memory is kept busy */
    to += blockIdx.z * to_batch;
    from += blockIdx.z * batch;
    const int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= to_cols) return;
    for (int64_t i = (int64_t)blockIdx.y * ROWS; i < to_rows; i += (int64_t)gridDim.y * ROWS) {
        U x[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            x[r] = i + r < rows && j < cols ? from[(i + r) * row + j * col] : U{};
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (i + r < to_rows) to[(i + r) * to_row + j] = x[r];
    }
}

/* The two matrices of a copy; sizes and strides in elements. */
struct copying {
    void *to;
    int64_t to_row, to_batch, to_rows, to_cols;
    const void *from;
    int64_t row, col, batch, rows, cols;
    int64_t items; /* of the batch */
};

template <class U>
static void copy_units(struct xt_ctx *ctx, const struct copying *c, int64_t per) {
    constexpr int THREADS = 256;
    const int64_t cols = c->to_cols / per;
    for (int64_t at = 0; at < c->items; at += 65535) {
        const int64_t rows = (c->to_rows + 7) / 8;
        dim3 grid((unsigned)((cols + THREADS - 1) / THREADS),
                  (unsigned)(rows < 65535 ? rows : 65535),
                  (unsigned)(c->items - at < 65535 ? c->items - at : 65535));
        copy_matrix<<<grid, THREADS, 0, xt_cuda_stream(ctx)>>>(
            (U *)c->to + at * c->to_batch / per, c->to_row / per, c->to_batch / per, c->to_rows,
            cols, (const U *)c->from + at * c->batch / per, c->row / per, c->col, c->batch / per,
            c->rows, c->cols / per);
    }
}

/* Whether rows may be copied as units of `wide` bytes, `per` elements each. */
static bool goes_by(const struct copying *c, size_t wide, int64_t per) {
    if (per == 1) return true;
    if (c->col != 1 || (uintptr_t)c->to % wide || (uintptr_t)c->from % wide) return false;
    return c->to_row % per == 0 && c->to_batch % per == 0 && c->to_cols % per == 0 &&
           c->row % per == 0 && c->batch % per == 0 && c->cols % per == 0;
}

static enum xt_status copy(struct xt_ctx *ctx, size_t bytes, const struct copying *c) {
    if (c->to_rows == 0 || c->to_cols == 0 || c->items == 0) return XT_OK;
    const int64_t size = (int64_t)bytes;
    if (goes_by(c, 16, 16 / size))
        copy_units<uint4>(ctx, c, 16 / size);
    else if (bytes <= 8 && goes_by(c, 8, 8 / size))
        copy_units<uint2>(ctx, c, 8 / size);
    else if (bytes <= 4 && goes_by(c, 4, 4 / size))
        copy_units<uint32_t>(ctx, c, 4 / size);
    else if (bytes == 2)
        copy_units<uint16_t>(ctx, c, 1);
    return xt_cuda_launched(ctx);
}

enum xt_status xt_cuda_grow(struct xt_ctx *ctx, enum xt_dtype dtype, void *to, int64_t to_rows,
                            int64_t to_cols, const void *from, int64_t rows, int64_t cols) {
    const struct copying c = {to, to_cols, 0, to_rows, to_cols, from, cols, 1, 0, rows, cols, 1};
    return copy(ctx, xt_dtype_bytes(dtype), &c);
}

/* c += s: what a product in padded scratch adds to. */
template <class T>
static __global__ void add_matrix(T *c, int64_t c_row, const T *s, int64_t s_row, T beta,
                                  int64_t rows, int64_t cols) {
    for (int64_t i = blockIdx.y; i < rows; i += gridDim.y)
        for (int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; j < cols;
             j += (int64_t)gridDim.x * blockDim.x)
            c[i * c_row + j] = beta * c[i * c_row + j] + s[i * s_row + j];
}

/* c = beta * c + bias: what is left of a product over nothing, and of a bias the library lacks. */
template <class T>
static __global__ void add_bias(T *c, int64_t c_row, int64_t c_batch, const T *bias, double beta,
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
    return (int32_t)(p & 63 ? p & (~p + 1) : 64); /* what every tensor has, wherever it is placed */
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

/*
 * The operand of rows x cols as the library takes it, grown by zeros to to_rows x to_cols. It is
 * copied when it grows, when neither stride is 1, or, being `large`, when it lies badly.
 */
static enum xt_status prepare(struct xt_ctx *ctx, enum xt_dtype dtype, const void *data,
                              int64_t row, int64_t col, int64_t step, int64_t rows, int64_t cols,
                              int64_t to_rows, int64_t to_cols, int64_t batch, bool large,
                              struct side *s) {
    memset(s, 0, sizeof *s);
    if (cols == 1) col = 1;
    if (rows == 1) row = col == 1 ? cols : 1;
    const bool grows = to_rows != rows || to_cols != cols, turned = col != 1;
    const int64_t lead = turned ? col : row, across = turned ? rows : cols;
    if (batch == 1) step = 0;
    const bool fits = (col == 1 || row == 1) && lead >= across;
    if (fits && !grows && (!large || is_fast(dtype, data, lead, step))) {
        s->data = data;
        s->lead = lead;
        s->step = step;
        s->turned = turned;
        return XT_OK;
    }
    const size_t bytes = xt_dtype_bytes(dtype);
    const int64_t copies = step == 0 ? 1 : batch;
    s->turned = fits && turned; /* a copy keeps the order of what is copied */
    const int64_t inner = s->turned ? to_rows : to_cols, outer = s->turned ? to_cols : to_rows;
    s->lead = padded(inner);
    s->step = copies == 1 ? 0 : s->lead * outer;
    s->bytes = (size_t)(s->lead * outer * copies) * bytes;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, s->bytes, &s->scratch));
    s->data = s->scratch;
    const struct copying c = {s->scratch,
                              s->lead,
                              s->step,
                              outer,
                              s->lead,
                              data,
                              s->turned ? col : row,
                              s->turned ? row : col,
                              step,
                              s->turned ? cols : rows,
                              s->turned ? rows : cols,
                              copies};
    return copy(ctx, bytes, &c);
}

static void put_back(struct xt_ctx *ctx, const struct side *s) {
    if (s->scratch) xt_scratch_put(ctx, XT_CUDA, s->scratch, s->bytes);
}

static enum xt_status multiply(struct xt_ctx *ctx, const struct xt_cuda_gemm *g,
                               const struct side *a, const struct side *b, void *c, int64_t ldc,
                               int64_t c_batch) {
    struct xt_cublas_product p;
    memset(&p, 0, sizeof p);
    struct xt_choice_key *k = &p.key;
    k->m = g->m, k->n = g->n, k->k = g->k, k->batch = g->batch;
    k->lda = a->lead, k->ldb = b->lead, k->ldc = ldc;
    k->a_batch = a->step, k->b_batch = b->step, k->c_batch = g->batch == 1 ? 0 : c_batch;
    k->in = g->in, k->out = g->out, k->a_turned = a->turned, k->b_turned = b->turned;
    k->bias = g->bias != NULL, k->add = g->beta != 0;
    k->a_align = alignment(a->data), k->b_align = alignment(b->data), k->c_align = alignment(c);
    p.a = a->data, p.b = b->data, p.c = c, p.bias = g->bias;
    p.alpha = g->alpha, p.beta = g->beta;
    return xt_cublas_multiply(ctx, &p);
}

/* What is computed apart and then brought to c. */
struct apart {
    void *data; /* NULL: the product goes straight to c */
    size_t bytes;
    int64_t row, step; /* between rows, and between products of the batch */
};

static enum xt_status bring(struct xt_ctx *ctx, const struct xt_cuda_gemm *g,
                            const struct apart *p) {
    constexpr int THREADS = 256;
    if (g->beta == 0) {
        const struct copying c = {g->c,   g->c_row, g->c_batch, g->m, g->n, p->data,
                                  p->row, 1,        p->step,    g->m, g->n, g->batch};
        return copy(ctx, xt_dtype_bytes(g->out), &c);
    }
    dim3 grid((unsigned)((g->n + THREADS - 1) / THREADS), (unsigned)(g->m < 65535 ? g->m : 65535));
    for (int64_t i = 0; i < g->batch; i++) {
        add_matrix<<<grid, THREADS, 0, xt_cuda_stream(ctx)>>>(
            (float *)g->c + i * g->c_batch, g->c_row, (const float *)p->data + i * p->step, p->row,
            (float)g->beta, g->m, g->n);
        XT_TRY(xt_cuda_launched(ctx));
    }
    return XT_OK;
}

enum xt_status xt_cuda_gemm(struct xt_ctx *ctx, const struct xt_cuda_gemm *given) {
    struct xt_cuda_gemm g = *given;
    if (g.m == 0 || g.n == 0 || g.batch == 0) return XT_OK;
    if (g.k == 0) return scale_and_add(ctx, &g, g.beta);
    const void *late_bias = g.in == XT_F64 ? g.bias : NULL; /* the library has none in f64 */
    if (late_bias) g.bias = NULL;
    /* Sums and rows of 16-bit numbers are grown to what tensor cores take at full speed. */
    const bool half = g.in == XT_BF16 || g.in == XT_F16, large = half && g.m * g.n * g.k >= 1 << 24;
    struct xt_cuda_gemm wide = g;
    const int64_t m = g.grown_m ? g.grown_m : g.m, n = g.grown_n ? g.grown_n : g.n;
    wide.m = m, wide.n = n;
    if (large && g.k % 8) wide.k = padded(g.k);
    /* Its rows too, where a is turned and copied in any case. */
    if (large && m % 8 && g.a_row == 1 && g.out == XT_F32 && !is_fast(g.in, g.a, g.a_col, 0))
        wide.m = padded(m);
    if (large && n % 8 && !(g.beta != 0 && g.out != XT_F32)) wide.n = padded(n);
    struct side a = {}, b = {}, bias = {};
    struct apart apart = {NULL, 0, g.m == 1 && g.c_row < g.n ? g.n : g.c_row, g.c_batch};
    const size_t bytes = xt_dtype_bytes(g.out);
    enum xt_status status = XT_OK;
    XT_GO(prepare(ctx, g.in, g.a, g.a_row, g.a_col, g.a_batch, m, g.k, wide.m, wide.k, g.batch,
                  large, &a));
    XT_GO(prepare(ctx, g.in, g.b, g.b_row, g.b_col, g.b_batch, g.k, n, wide.k, wide.n, g.batch,
                  large, &b));
    /* c has no room for what was grown. */
    if (wide.m != g.m || wide.n != g.n ||
        (large && g.beta == 0 && !is_fast(g.out, g.c, apart.row, g.batch == 1 ? 0 : apart.step))) {
        apart.row = padded(wide.n);
        apart.step = apart.row * wide.m;
        apart.bytes = (size_t)(apart.step * g.batch) * bytes;
        XT_GO(xt_scratch_get(ctx, XT_CUDA, apart.bytes, &apart.data));
        wide.beta = 0;
        if (g.bias) {
            XT_GO(prepare(ctx, g.out, g.bias, g.n, 1, 0, 1, g.n, 1, apart.row, 1, true, &bias));
            wide.bias = bias.data;
        }
    }
    XT_GO(multiply(ctx, &wide, &a, &b, apart.data ? apart.data : g.c, apart.row, apart.step));
    if (apart.data) XT_GO(bring(ctx, &g, &apart));
    if (late_bias) {
        g.bias = late_bias;
        XT_GO(scale_and_add(ctx, &g, 1));
    }
done:
    put_back(ctx, &a);
    put_back(ctx, &b);
    put_back(ctx, &bias);
    if (apart.data) xt_scratch_put(ctx, XT_CUDA, apart.data, apart.bytes);
    return status;
}

/* ---- the ops --------------------------------------------------------------------------------- */

/* What the library takes at once of a product into c, which is contiguous: the innermost dimension
   of the batch. */
static struct xt_cuda_gemm gemm_into(const struct xt_tensor *c, enum xt_dtype in,
                                     const struct xt_product *p) {
    const struct xt_cuda_factor a = {p->a.data, p->m, p->k, p->a.row, p->a.col};
    const struct xt_cuda_factor b = {p->b.data, p->k, p->n, p->b.row, p->b.col};
    struct xt_cuda_gemm g = xt_cuda_gemm_of(in, a, b, c->dtype, xt_data(c), p->n);
    const int inner = p->n_batch - 1;
    if (inner < 0) return g;
    g.batch = p->batch[inner];
    g.a_batch = p->a.batch[inner], g.b_batch = p->b.batch[inner];
    g.c_batch = p->m * p->n;
    return g;
}

/* The whole product: outer batch dimensions that do not lie as one are walked here. */
static enum xt_status run(struct xt_ctx *ctx, const struct xt_product *p, struct xt_cuda_gemm *g) {
    const int inner = p->n_batch - 1;
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
    const struct xt_tensor *a = l->in[0];
    struct xt_product p;
    xt_product_of(a, l->in[1], &p);
    struct xt_cuda_gemm g = gemm_into(l->out[0], a->dtype, &p);
    return run(ctx, &p, &g);
}

static enum xt_status linear(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *bias = l->in[2];
    struct xt_product p;
    struct xt_tensor turned;
    xt_product_turn(l->in[1], &turned);
    xt_product_of(x, &turned, &p);
    struct xt_cuda_gemm g = gemm_into(l->out[0], x->dtype, &p);
    void *copied = NULL;
    size_t bytes = (size_t)p.n * xt_dtype_bytes(g.out);
    enum xt_status status = XT_OK;
    if (bias && p.n) {
        g.bias = xt_data(bias);
        if (bias->stride[0] != 1 && p.n > 1) {
            XT_GO(xt_scratch_get(ctx, XT_CUDA, bytes, &copied));
            const struct copying c = {copied,          p.n, 0, 1,   p.n, g.bias, 0,
                                      bias->stride[0], 0,   1, p.n, 1};
            XT_GO(copy(ctx, xt_dtype_bytes(g.out), &c));
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
    if (!xt_is_contiguous(target)) return xt_fail(ctx, XT_ARGUMENT, "target must be contiguous");
    struct xt_product p;
    xt_product_of(a, l->in[2], &p);
    struct xt_cuda_gemm g = gemm_into(target, a->dtype, &p);
    g.beta = l->attrs[0].i ? 1 : 0;
    return run(ctx, &p, &g);
}

const struct xt_kernel xt_cuda_linalg_kernels[] = {
    {"matmul", XT_CUDA_FACTORS, XT_STRIDED, matmul},
    {"linear", XT_CUDA_FACTORS, XT_STRIDED, linear},
    {"matmul_acc", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_STRIDED, matmul_acc},
    {},
};
