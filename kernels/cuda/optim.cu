/*
 * optim.cu: updates of many tensors in few launches: a launch carries a table of up to TABLE of
 * them as its argument, and blocks find theirs in it. Compiled without fused multiply-adds: with
 * the formulas of update.h, elements get the CPU's bits.
 *
 * Traffic is all there is to them: adamw reads p, g, m, v and writes p, m, v and the copy, each
 * once. What a step takes to all elements (norm, learning rate, corrections) is computed by one
 * thread beforehand, so the host never waits for a norm.
 */
#include <math.h>

#include "../update.h"
#include "rows.h"

#define THREADS 256
#define SUM_THREADS 1024
#define TABLE 56                 /* tensors of one launch: its arguments stay below 4 KiB */
#define UPDATE_BLOCK (4 * 1024)  /* elements of a block that updates or scales */
#define SQUARE_BLOCK (16 * 1024) /* and of one that sums squares */

/* One parameter with what belongs to it; a plain list fills in p alone. */
struct entry {
    void *p;
    const void *g;
    void *m, *v, *copy; /* copy may be NULL, and m and v where there is no state */
    int64_t n;          /* elements */
    int64_t block;      /* its first block of the launch */
    int dtype;          /* of p and g */
    int copy_dtype;     /* of copy */
};

struct table {
    int n;          /* entries */
    int64_t blocks; /* of all of them */
    struct entry at[TABLE];
};

static bool is_full(const struct table *t) {
    return t->n == TABLE;
}

static void add_entry(struct table *t, const struct entry *e, int64_t block) {
    t->at[t->n] = *e;
    t->at[t->n++].block = t->blocks;
    t->blocks += (e->n + block - 1) / block;
}

/* The entry of a block. */
static __device__ const struct entry &entry_of(const struct table &t) {
    int low = 0, high = t.n - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (t.at[middle].block <= (int64_t)blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    return t.at[low];
}

/* A number on the device, or what stands for it. */
struct number {
    const void *data; /* NULL: value */
    int dtype;
    double value;
};

static struct number number_of(const struct xt_tensor *t, double value) {
    struct number n = {t ? xt_data(t) : NULL, t ? (int)t->dtype : 0, value};
    return n;
}

static __device__ double read_number(const struct number &n) {
    if (!n.data) return n.value;
    switch (n.dtype) {
    case XT_F64: return *(const double *)n.data;
    case XT_I64: return (double)*(const int64_t *)n.data;
    case XT_I32: return (double)*(const int32_t *)n.data;
    default: return (double)*(const float *)n.data;
    }
}

/* N numbers at i, as many of them as there are; the rest are 0. */
template <int N, class R, class S>
static __device__ void take(const S *from, int64_t i, int64_t n, R *to) {
    if (i + N <= n &&
        ((uintptr_t)(from + i) & (sizeof(S) * N < 16 ? sizeof(S) * N - 1 : 15)) == 0) {
        xt_load<N>(from + i, to);
        return;
    }
#pragma unroll
    for (int k = 0; k < N; k++) to[k] = i + k < n ? xt_to<R>(from[i + k]) : (R)0;
}

template <int N, class R, class S>
static __device__ void give(const R *from, S *to, int64_t i, int64_t n) {
    if (i + N <= n && ((uintptr_t)(to + i) & (sizeof(S) * N < 16 ? sizeof(S) * N - 1 : 15)) == 0) {
        xt_store<N>(from, to + i);
        return;
    }
#pragma unroll
    for (int k = 0; k < N; k++)
        if (i + k < n) to[i + k] = xt_to<S>(from[k]);
}

/* Into a tensor of any float dtype; to a 16-bit one through f32, as on the CPU. */
template <int N, class R>
static __device__ void give_any(const R *from, void *to, int dtype, int64_t i, int64_t n) {
    float narrow[N];
#pragma unroll
    for (int k = 0; k < N; k++) narrow[k] = (float)from[k];
    switch (dtype) {
    case XT_F32: give<N>(narrow, (float *)to, i, n); break;
    case XT_BF16: give<N>(narrow, (__nv_bfloat16 *)to, i, n); break;
    case XT_F16: give<N>(narrow, (__half *)to, i, n); break;
    case XT_F64: give<N>(from, (double *)to, i, n); break;
    }
}

/* ---- adamw and sgd --------------------------------------------------------------------------- */

/* What is done to all elements, in each arithmetic. */
struct step {
    int write; /* 0: nothing is to be written */
    struct xt_adamw_factors_f32 adamw_f32;
    struct xt_adamw_factors_f64 adamw_f64;
    struct xt_sgd_factors_f32 sgd_f32;
    struct xt_sgd_factors_f64 sgd_f64;
};

/* What a step is made from. */
struct request {
    bool adamw; /* else sgd */
    struct number norm, lr, step, divisor;
    bool has_divisor; /* its reciprocal is the scale */
    double scale, clip;
    struct xt_adamw a; /* but for lr, scale and the corrections */
    struct xt_sgd s;   /* but for lr, scale and first */
    struct xt_cuda_fault bad_lr, bad_step;
};

static __global__ void prepare(const struct request q, struct step *out) {
    const double norm = read_number(q.norm), lr = q.lr.value * (q.lr.data ? read_number(q.lr) : 1);
    const int64_t count = (int64_t)read_number(q.step);
    double scale = q.has_divisor ? 1 / read_number(q.divisor) : q.scale;
    out->write = isfinite(lr) && count >= 1 && isfinite(norm * scale);
    if (!isfinite(lr) && q.lr.data) xt_note_fault(q.bad_lr, 0, 0);
    if (count < 1 && q.step.data) xt_note_fault(q.bad_step, 0, count);
    if (q.clip > 0) scale *= xt_clipping(norm * scale, q.clip);
    if (q.adamw) {
        struct xt_adamw a = q.a;
        a.lr = lr;
        a.scale = scale;
        a.unbias1 = 1 - xt_power(a.beta1, count);
        a.unbias2 = 1 - xt_power(a.beta2, count);
        out->adamw_f32 = xt_adamw_factors_of_f32(&a);
        out->adamw_f64 = xt_adamw_factors_of_f64(&a);
    } else {
        struct xt_sgd s = q.s;
        s.lr = lr;
        s.scale = scale;
        s.first = count == 1;
        out->sgd_f32 = xt_sgd_factors_of_f32(&s);
        out->sgd_f64 = xt_sgd_factors_of_f64(&s);
    }
}

static __device__ void adamw_one(const struct step *s, float g, float *p, float *m, float *v) {
    xt_adamw_element_f32(&s->adamw_f32, g, p, m, v);
}
static __device__ void adamw_one(const struct step *s, double g, double *p, double *m, double *v) {
    xt_adamw_element_f64(&s->adamw_f64, g, p, m, v);
}
static __device__ void sgd_one(const struct step *s, float g, float *p, float *b) {
    xt_sgd_element_f32(&s->sgd_f32, g, p, b);
}
static __device__ void sgd_one(const struct step *s, double g, double *p, double *b) {
    xt_sgd_element_f64(&s->sgd_f64, g, p, b);
}
static __device__ void sgd_plain_one(const struct step *s, float g, float *p) {
    xt_sgd_plain_element_f32(&s->sgd_f32, g, p);
}
static __device__ void sgd_plain_one(const struct step *s, double g, double *p) {
    xt_sgd_plain_element_f64(&s->sgd_f64, g, p);
}

enum rule { ADAMW, SGD, SGD_PLAIN };

/* Parameters of type P. */
template <class P, enum rule RULE>
static __global__ void __launch_bounds__(THREADS)
    update_blocks(const __grid_constant__ struct table t, const struct step *at) {
    using R = xt_real<P>;
    constexpr int N = xt_lanes<R>;
    const struct step s = *at;
    if (!s.write) return;
    const struct entry &e = entry_of(t);
    const int64_t first = ((int64_t)blockIdx.x - e.block) * UPDATE_BLOCK;
    const int64_t end = first + UPDATE_BLOCK < e.n ? first + UPDATE_BLOCK : e.n;
    P *to = (P *)e.p;
    const P *from = (const P *)e.g;
    R *ms = (R *)e.m, *vs = (R *)e.v;
    for (int64_t i = first + threadIdx.x * N; i < end; i += THREADS * N) {
        R p[N], g[N], m[N], v[N];
        take<N>(to, i, end, p);
        take<N>(from, i, end, g);
        if (RULE != SGD_PLAIN) take<N>(ms, i, end, m);
        if (RULE == ADAMW) take<N>(vs, i, end, v);
#pragma unroll
        for (int k = 0; k < N; k++) {
            if (RULE == ADAMW)
                adamw_one(&s, g[k], p + k, m + k, v + k);
            else if (RULE == SGD)
                sgd_one(&s, g[k], p + k, m + k);
            else
                sgd_plain_one(&s, g[k], p + k);
        }
        give<N>(p, to, i, end);
        if (RULE != SGD_PLAIN) give<N>(m, ms, i, end);
        if (RULE == ADAMW) give<N>(v, vs, i, end);
        if (e.copy) give_any<N>(p, e.copy, e.copy_dtype, i, end);
    }
}

template <class P>
static enum xt_status launch_table(struct xt_ctx *ctx, enum rule rule, const struct table *t,
                                   const struct step *step) {
    if (t->blocks == 0) return XT_OK;
    const unsigned blocks = (unsigned)t->blocks;
    cudaStream_t s = xt_cuda_stream(ctx);
    switch (rule) {
    case ADAMW: update_blocks<P, ADAMW><<<blocks, THREADS, 0, s>>>(*t, step); break;
    case SGD: update_blocks<P, SGD><<<blocks, THREADS, 0, s>>>(*t, step); break;
    case SGD_PLAIN: update_blocks<P, SGD_PLAIN><<<blocks, THREADS, 0, s>>>(*t, step); break;
    }
    return xt_cuda_launched(ctx);
}

/* All groups whose parameter has type P. */
template <class P>
static enum xt_status update_type(struct xt_ctx *ctx, enum rule rule, enum xt_dtype dtype,
                                  struct xt_tensor *const *list, int n, const struct step *step) {
    const int roles = rule == ADAMW ? 5 : 4;
    struct table t;
    t.n = 0;
    t.blocks = 0;
    for (int i = 0; i < n; i += roles) {
        struct xt_tensor *const *group = list + i, *copy = group[roles - 1];
        if (group[0]->dtype != dtype || xt_numel(group[0]) == 0) continue;
        struct entry e = {};
        e.p = xt_data(group[0]);
        e.g = xt_data(group[1]);
        if (rule != SGD_PLAIN) e.m = xt_data(group[2]);
        if (rule == ADAMW) e.v = xt_data(group[3]);
        if (copy) {
            e.copy = xt_data(copy);
            e.copy_dtype = (int)copy->dtype;
        }
        e.n = xt_numel(group[0]);
        e.dtype = (int)dtype;
        add_entry(&t, &e, UPDATE_BLOCK);
        if (!is_full(&t)) continue;
        XT_TRY(launch_table<P>(ctx, rule, &t, step));
        t.n = 0;
        t.blocks = 0;
    }
    return launch_table<P>(ctx, rule, &t, step);
}

/* How many tensors come before the list. */
static int list_at(const struct xt_op *op) {
    int n = 0;
    while (op->params[n].kind != XT_P_TENSORS) n++;
    return n;
}

static enum xt_status update(struct xt_ctx *ctx, const struct xt_launch *l, bool is_adamw) {
    const union xt_attr *a = l->attrs;
    const int at = list_at(l->op), n = l->n_in - at;
    const struct xt_tensor *lr = at > 1 ? l->in[1] : NULL, *count = at > 2 ? l->in[2] : NULL;
    const struct xt_tensor *divisor = at > 3 ? l->in[3] : NULL;
    const enum rule rule = is_adamw ? ADAMW : a[1].f == 0 ? SGD_PLAIN : SGD;
    struct request q = {};
    q.adamw = is_adamw;
    q.norm = number_of(l->in[0], 0);
    q.lr = number_of(lr, a[0].f); /* a tensor multiplies it */
    q.step = number_of(count, (double)a[5].i);
    q.divisor = number_of(divisor, 1);
    q.has_divisor = divisor != NULL;
    q.scale = a[6].f;
    q.clip = a[7].f;
    if (is_adamw) {
        q.a.beta1 = a[1].f;
        q.a.beta2 = a[2].f;
        q.a.eps = a[3].f;
        q.a.decay = a[4].f;
    } else {
        q.s.momentum = a[1].f;
        q.s.dampening = a[2].f;
        q.s.nesterov = a[3].i != 0;
        q.s.decay = a[4].f;
    }
    if (lr) q.bad_lr = xt_cuda_fault(ctx, l->op, "finite lr", "wanted 1: it is not finite");
    if (count) q.bad_step = xt_cuda_fault(ctx, l->op, "step", "steps count from 1");
    struct step *step;
    enum xt_status status;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, sizeof *step, (void **)&step));
    prepare<<<1, 1, 0, xt_cuda_stream(ctx)>>>(q, step);
    XT_GO(xt_cuda_launched(ctx));
    XT_GO(update_type<float>(ctx, rule, XT_F32, l->in + at, n, step));
    XT_GO(update_type<__nv_bfloat16>(ctx, rule, XT_BF16, l->in + at, n, step));
    XT_GO(update_type<__half>(ctx, rule, XT_F16, l->in + at, n, step));
    XT_GO(update_type<double>(ctx, rule, XT_F64, l->in + at, n, step));
done:
    xt_scratch_put(ctx, XT_CUDA, step, sizeof *step);
    return status;
}

static enum xt_status adamw(struct xt_ctx *ctx, const struct xt_launch *l) {
    return update(ctx, l, true);
}

static enum xt_status sgd(struct xt_ctx *ctx, const struct xt_launch *l) {
    return update(ctx, l, false);
}

/* ---- lists ----------------------------------------------------------------------------------- */

template <class P>
static __device__ void scale_entry(const struct entry &e, int64_t first, int64_t end, double by) {
    using R = xt_real<P>;
    constexpr int N = xt_lanes<R>;
    P *to = (P *)e.p;
    for (int64_t i = first + threadIdx.x * N; i < end; i += THREADS * N) {
        R x[N];
        take<N>(to, i, end, x);
#pragma unroll
        for (int k = 0; k < N; k++) x[k] *= (R)by;
        give<N>(x, to, i, end);
    }
}

static __global__ void __launch_bounds__(THREADS)
    scale_blocks(const __grid_constant__ struct table t, const struct number norm, double max) {
    const double size = read_number(norm), by = xt_clipping(size, max);
    if (!isfinite(size) || by == 1) return;
    const struct entry &e = entry_of(t);
    const int64_t first = ((int64_t)blockIdx.x - e.block) * UPDATE_BLOCK;
    const int64_t end = first + UPDATE_BLOCK < e.n ? first + UPDATE_BLOCK : e.n;
    switch (e.dtype) {
    case XT_F32: scale_entry<float>(e, first, end, by); break;
    case XT_BF16: scale_entry<__nv_bfloat16>(e, first, end, by); break;
    case XT_F16: scale_entry<__half>(e, first, end, by); break;
    case XT_F64: scale_entry<double>(e, first, end, by); break;
    }
}

/* This thread's part: N elements at a time, THREADS * N apart, in order. */
template <class P>
static __device__ double squares(const struct entry &e, int64_t first, int64_t end) {
    using R = xt_real<P>;
    constexpr int N = xt_lanes<P>;
    double sum = 0;
    for (int64_t i = first + threadIdx.x * N; i < end; i += THREADS * N) {
        R x[N];
        take<N>((const P *)e.p, i, end, x);
#pragma unroll
        for (int k = 0; k < N; k++) sum += (double)x[k] * (double)x[k];
    }
    return sum;
}

/* sums has a place for every block of the launch. */
static __global__ void __launch_bounds__(THREADS)
    square_blocks(const __grid_constant__ struct table t, double *sums) {
    const struct entry &e = entry_of(t);
    const int64_t first = ((int64_t)blockIdx.x - e.block) * SQUARE_BLOCK;
    const int64_t end = first + SQUARE_BLOCK < e.n ? first + SQUARE_BLOCK : e.n;
    double sum = 0;
    switch (e.dtype) {
    case XT_F32: sum = squares<float>(e, first, end); break;
    case XT_BF16: sum = squares<__nv_bfloat16>(e, first, end); break;
    case XT_F16: sum = squares<__half>(e, first, end); break;
    case XT_F64: sum = squares<double>(e, first, end); break;
    }
    sum = xt_block_sum<THREADS>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(SUM_THREADS)
    root_of_sums(const double *sums, int64_t n, bool wide, void *out) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += SUM_THREADS) sum += sums[i];
    sum = xt_block_sum<SUM_THREADS>(sum);
    if (threadIdx.x != 0) return;
    if (wide)
        *(double *)out = sqrt(sum);
    else
        *(float *)out = (float)sqrt(sum);
}

/* Calls launch(table) until all tensors of the list had their turn. */
template <class F>
static enum xt_status each_table(struct xt_tensor *const *list, int n, int64_t block, F launch) {
    struct table t;
    t.n = 0;
    t.blocks = 0;
    for (int i = 0; i < n; i++) {
        if (!list[i] || xt_numel(list[i]) == 0) continue;
        struct entry e = {};
        e.p = xt_data(list[i]);
        e.n = xt_numel(list[i]);
        e.dtype = (int)list[i]->dtype;
        add_entry(&t, &e, block);
        if (!is_full(&t)) continue;
        XT_TRY(launch(t));
        t.n = 0;
        t.blocks = 0;
    }
    return t.n ? launch(t) : XT_OK;
}

static enum xt_status scale_list(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct number norm = number_of(l->in[0], 0);
    const double max = l->attrs[0].f;
    return each_table(l->in + 1, l->n_in - 1, UPDATE_BLOCK, [&](const struct table &t) {
        scale_blocks<<<(unsigned)t.blocks, THREADS, 0, xt_cuda_stream(ctx)>>>(t, norm, max);
        return xt_cuda_launched(ctx);
    });
}

/* Blocks of SQUARE_BLOCK elements are summed as squares() says and added in order, every
   SUM_THREADS-th by one thread. */
static enum xt_status grad_norm(struct xt_ctx *ctx, const struct xt_launch *l) {
    int64_t blocks = 0, done_blocks = 0;
    for (int i = 0; i < l->n_in; i++)
        blocks += (xt_numel(l->in[i]) + SQUARE_BLOCK - 1) / SQUARE_BLOCK;
    const size_t bytes = (size_t)blocks * sizeof(double);
    double *sums = NULL;
    if (bytes) XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&sums));
    enum xt_status status = each_table(l->in, l->n_in, SQUARE_BLOCK, [&](const struct table &t) {
        square_blocks<<<(unsigned)t.blocks, THREADS, 0, xt_cuda_stream(ctx)>>>(t,
                                                                               sums + done_blocks);
        done_blocks += t.blocks;
        return xt_cuda_launched(ctx);
    });
    if (status == XT_OK) {
        root_of_sums<<<1, SUM_THREADS, 0, xt_cuda_stream(ctx)>>>(
            sums, blocks, l->out[0]->dtype == XT_F64, xt_data(l->out[0]));
        status = xt_cuda_launched(ctx);
    }
    if (bytes) xt_scratch_put(ctx, XT_CUDA, sums, bytes);
    return status;
}

const struct xt_kernel xt_cuda_optim_kernels[] = {
    {"grad_norm", XT_FLOATS, XT_CONTIGUOUS, grad_norm},
    {"scale_list_", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, scale_list},
    {"adamw", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, adamw},
    {"sgd", XT_BIT(XT_F32) | XT_BIT(XT_F64), XT_CONTIGUOUS, sgd},
    {},
};
