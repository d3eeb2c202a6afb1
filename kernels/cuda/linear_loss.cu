/*
 * linear_loss.cu: cross entropy from the factors of logits, which are made block by block of rows
 * and never held whole.
 *
 * The gradient of a block's logits takes their place, for two more products. A row that fits is
 * held in registers and read once for loss and gradient both.
 */
#include <cooperative_groups.h>

#include "loss.h"

#define LINEAR_THREADS 512
#define HELD 25 /* vectors of a row that a thread holds: 100 of its 128 registers */
/*
 * Logits that linear_cross_entropy has at a time, at most, and rows of them. But never fewer than
 * LINEAR_LEAST rows: a block of rows reads and writes the whole gradient of the weights, 8 V D
 * bytes, for products of 6 rows V D operations, and with 2048 rows that is 1536 operations a byte,
 * several times what a GPU does while it moves one. With 151936 classes they take 1.2 GB.
 */
#define LINEAR_LOGITS ((int64_t)1 << 27)
#define LINEAR_ROWS 8192
#define LINEAR_LEAST 2048
#define PAD 64 /* rows of logits begin at multiples of it, in elements */

/* ---- linear_cross_entropy -------------------------------------------------------------------- */

/* Rows of logits. Each becomes its loss and, with `grad`, its gradient, of type T, in the same
   place: a row begins where the logits' row did. What is written is no wider than what was read. */
template <class T> struct logit_rows {
    xt_real<T> *data; /* (m, width): a row's first `classes` count, the rest becomes zeros */
    int64_t width;    /* a multiple of PAD */
    int64_t first, m; /* which of all rows they are */
    struct labels labels;
    struct options o;
    struct xt_cuda_fault fault; /* where a label out of range is noted */
    struct upstream<xt_real<T>> up;
    xt_real<T> *losses; /* of all rows, or NULL */
    bool grad;          /* else `data` is only read */
};

/* Row i counts nowhere: its loss is 0, and so is its gradient, all of it. */
template <class T, int LANES>
static __device__ void clear_row(const struct logit_rows<T> &b, int64_t i, T *to, int lane) {
    constexpr int N = xt_lanes<xt_real<T>>;
    const xt_real<T> zeros[N] = {};
    if (b.losses && lane == 0) b.losses[i] = 0;
    if (!b.grad) return;
    for (int64_t k = (int64_t)lane * N; k < b.width; k += LANES * N) xt_store<N>(zeros, to + k);
}

/* The gradient of a row: e^(x - most) * share - even, less keep at the label. */
template <class R> struct row_slope { R share, even, keep; };

template <class T, class R>
static __device__ struct row_slope<R> slope_of(const struct options &o, R sum, R by) {
    struct row_slope<R> g;
    g.even = by * (R)(o.smoothing * o.each);
    g.keep = by * (1 - (R)o.smoothing);
    if constexpr (sizeof(T) == 2)
        g.share = __fdividef(by, sum); /* to 2 units in the last place */
    else
        g.share = by / sum;
    return g;
}

/* What comes from upstream to row i, of contiguous rows. */
template <class T>
static __device__ xt_real<T> upstream_in_order(const struct logit_rows<T> &b, int64_t i) {
    return b.up.each ? b.up.data[i] : upstream_to_all(b.up);
}

/* Its element at the label, written once more by the thread that wrote it like the others. */
template <class T>
static __device__ void store_label(const struct row_slope<xt_real<T>> &g, xt_real<T> over, T *to) {
    *to = xt_to<T>(exp_for<T>(over) * g.share - g.even - g.keep);
}

/* A row is read twice; AHEAD tiles are read by all before any of them is written. */
template <class T, int LANES>
static __global__ void __launch_bounds__(LANES > 32 ? LANES : THREADS)
    pass_logits(const __grid_constant__ struct logit_rows<T> b) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<R>, TILE = LANES * N, GROUPS = LANES > 32 ? 1 : THREADS / LANES;
    const int lane = xt_lane<LANES>();
    const int64_t n = b.o.classes;
    for (int64_t r = (int64_t)blockIdx.x * GROUPS + threadIdx.x / LANES; r < b.m;
         r += (int64_t)gridDim.x * GROUPS) {
        const int64_t i = b.first + r;
        const int64_t label =
            checked_label(label_in_order(b.labels, i), b.o, b.fault, i, lane == 0);
        const R *x = b.data + r * b.width;
        T *to = (T *)(b.data + r * b.width);
        if (label == b.o.ignore) {
            clear_row<T, LANES>(b, i, to, lane);
            continue;
        }
        const R at_label = x[label], smoothing = (R)b.o.smoothing;
        const struct row_sums<R> s = sum_row<T, LANES>(x, n, smoothing != 0);
        if (b.losses && lane == 0) b.losses[i] = row_loss(s, at_label, b.o);
        if (!b.grad) continue;
        const struct row_slope<R> g = slope_of<T>(b.o, s.sum, upstream_in_order(b, i));
        for (int64_t tile = 0; tile < b.width; tile += AHEAD * TILE) {
            const int64_t at = tile + lane * N;
            R v[AHEAD][N];
#pragma unroll
            for (int t = 0; t < AHEAD; t++)
                if (at + t * TILE < b.width) xt_load<N>(x + at + t * TILE, v[t]);
            if constexpr (LANES > 32)
                __syncthreads();
            else
                __syncwarp();
#pragma unroll
            for (int t = 0; t < AHEAD; t++) {
                const int64_t k = at + t * TILE, left = n - k;
                if (k >= b.width) break;
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[t][j] = j < left ? exp_for<T>(v[t][j] - s.most) * g.share - g.even : 0;
                xt_store<N>(v[t], to + k);
            }
        }
        if (label / N % LANES == lane) store_label(g, at_label - s.most, to + label);
    }
}

/* Blocks that reach each other's shared memory came with compute capability 9.0. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTERS 1
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTERS 0
#define CLUSTER_OF(blocks)
#endif

/*
 * x of each of the BLOCKS that share a row, combined in order. Every block has it brought to its
 * own memory, so that none need stay for another that still reads; they must all have begun, and a
 * second call for the same type would write over what is read. When it returns they have all read
 * what they read before.
 */
template <int BLOCKS, class X, class F> static __device__ X over_blocks(X x, F with) {
#if CLUSTERS
    if constexpr (BLOCKS > 1) {
        const cooperative_groups::cluster_group blocks = cooperative_groups::this_cluster();
        __shared__ X theirs[BLOCKS];
        if (threadIdx.x < BLOCKS)
            *blocks.map_shared_rank(&theirs[blocks.block_rank()], threadIdx.x) = x;
        blocks.sync();
        x = theirs[0];
#pragma unroll
        for (int b = 1; b < BLOCKS; b++) x = with(x, theirs[b]);
    }
#endif
    return x;
}

/* What a part of a row comes to. */
struct part_sums {
    double exps; /* the sum of e^(x - most) */
    double all;  /* the sum of x, when asked for */
};

/*
 * Rows of at most LANES * HELD vectors, LANES being THREADS_EACH threads of each of BLOCKS blocks:
 * a row is read once, all of it under way at a time, and held as e^(x - most) until the sum is
 * known. Two rows or parts of rows are under way on a multiprocessor, so that one is computed while
 * the other is read: rows of 25601 elements and more are shared by a cluster of blocks, as few as
 * hold them (2048 rows of 151936: 463 us by 6 blocks, 520 by 8, 566 by 4 of twice the threads).
 */
template <class T, int THREADS_EACH, int BLOCKS>
static __global__ void CLUSTER_OF(BLOCKS)
    __launch_bounds__(THREADS_EACH, LINEAR_THREADS / THREADS_EACH)
        hold_logits(const __grid_constant__ struct logit_rows<T> b) {
    using R = xt_real<T>;
    constexpr int N = xt_lanes<R>, LANES = THREADS_EACH * BLOCKS, TILE = LANES * N;
#if CLUSTERS
    if constexpr (BLOCKS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
    const int lane = (int)(blockIdx.x % BLOCKS * THREADS_EACH + threadIdx.x);
    const int64_t r = blockIdx.x / BLOCKS, i = b.first + r, given = label_in_order(b.labels, i);
    const R *x = b.data + r * b.width, smoothing = (R)b.o.smoothing;
    T *to = (T *)(b.data + r * b.width);
    /* A row is whole vectors, of which `left` elements are not before this thread's first, then
       fewer than N elements, one a thread, and then the padding. */
    const int n = (int)b.o.classes, whole = n / N * N, left = whole - lane * N;
    const bool has_rest = lane < n - whole;
    R e[HELD][N], rest = (R)-INFINITY;
#pragma unroll
    for (int t = 0; t < HELD; t++)
        if (t * TILE < left)
            xt_load<N>(x + lane * N + t * TILE, e[t]);
        else
#pragma unroll
            for (int j = 0; j < N; j++) e[t][j] = (R)-INFINITY; /* adds nothing */
    if (has_rest) rest = x[whole + lane];
    /* The label comes while the row is under way, and so do the other blocks. */
    const int64_t label = checked_label(given, b.o, b.fault, i, lane == 0);
#if CLUSTERS
    if constexpr (BLOCKS > 1) cooperative_groups::this_cluster().barrier_wait();
#endif
    if (label == b.o.ignore) {
        clear_row<T, LANES>(b, i, to, lane);
        return;
    }
    const R at_label = x[label], by = upstream_in_order(b, i);
    R top = fmax(lowest<R>(), rest), sum = 0, all = 0;
#pragma unroll
    for (int t = 0; t < HELD; t++)
#pragma unroll
        for (int j = 0; j < N; j++) top = fmax(top, e[t][j]); /* passes a NaN over */
    struct row_sums<R> s = {};
    struct part_sums sums = {};
    top = xt_block_max<THREADS_EACH>(top);
    s.most = over_blocks<BLOCKS>(top, [](R a, R c) { return fmax(a, c); });
    /* All have read the row: it may be written. */
    if (smoothing != 0) {
#pragma unroll
        for (int t = 0; t < HELD; t++)
            if (t * TILE < left)
#pragma unroll
                for (int j = 0; j < N; j++) all += e[t][j];
        sums.all = xt_block_sum<THREADS_EACH>((double)(has_rest ? all + rest : all));
    }
#pragma unroll
    for (int t = 0; t < HELD; t++) {
        R part = 0;
#pragma unroll
        for (int j = 0; j < N; j++) part += e[t][j] = exp_for<T>(e[t][j] - s.most);
        sum += part;
    }
    rest = exp_for<T>(rest - s.most);
    sums.exps = xt_block_sum<THREADS_EACH>((double)(sum + rest));
    sums = over_blocks<BLOCKS>(sums, [](const struct part_sums &a, const struct part_sums &c) {
        return part_sums{a.exps + c.exps, a.all + c.all};
    });
    s.sum = (R)sums.exps;
    s.all = sums.all;
    s.lse = s.most + log(s.sum);
    if (b.losses && lane == 0) b.losses[i] = row_loss(s, at_label, b.o);
    if (!b.grad) return;
    const struct row_slope<R> g = slope_of<T>(b.o, s.sum, by);
#pragma unroll
    for (int t = 0; t < HELD; t++) {
        if (t * TILE >= left) break;
#pragma unroll
        for (int j = 0; j < N; j++) e[t][j] = e[t][j] * g.share - g.even;
        xt_store<N>(e[t], to + lane * N + t * TILE);
    }
    static_assert(PAD <= LANES, "a thread writes one zero");
    if (n + lane < b.width) to[n + lane] = xt_to<T>((R)0);
    if (has_rest) to[whole + lane] = xt_to<T>(rest * g.share - g.even);
    const int64_t owner = label < whole ? label / N % LANES : label - whole;
    if (owner == lane) store_label(g, at_label - s.most, to + label);
}

#define SHARED_THREADS 256
#define MOST_SHARED 8 /* blocks of a cluster that every device has room for */

/* Rows that `blocks` blocks share, BLOCKS or more. */
template <class T, int BLOCKS>
static void share_logits(const struct logit_rows<T> &b, int blocks, cudaStream_t s) {
    if (blocks == BLOCKS)
        hold_logits<T, SHARED_THREADS, BLOCKS><<<BLOCKS *(unsigned)b.m, SHARED_THREADS, 0, s>>>(b);
    else if constexpr (BLOCKS < MOST_SHARED)
        share_logits<T, BLOCKS + 1>(b, blocks, s);
}

template <class T>
static enum xt_status logits_to_losses(struct xt_ctx *ctx, const struct logit_rows<T> *b) {
    cudaStream_t s = xt_cuda_stream(ctx);
    if (b->o.classes <= SHORT) {
        pass_logits<T, 32><<<xt_cuda_blocks(b->m, THREADS / 32), THREADS, 0, s>>>(*b);
        return xt_cuda_launched(ctx);
    }
    const unsigned rows = (unsigned)b->m; /* at most LINEAR_ROWS */
    if constexpr (sizeof(T) == 2) {
        constexpr int64_t each = HELD * xt_lanes<float>; /* elements that a thread holds */
        const int64_t blocks = (b->width + SHARED_THREADS * each - 1) / (SHARED_THREADS * each);
        bool held = true;
        if (b->width <= 128 * each)
            hold_logits<T, 128, 1><<<rows, 128, 0, s>>>(*b);
        else if (blocks <= (xt_cuda_capability(ctx) >= 90 ? MOST_SHARED : 1))
            share_logits<T, 1>(*b, (int)blocks, s);
        else if (b->width <= LINEAR_THREADS * each)
            hold_logits<T, LINEAR_THREADS, 1><<<rows, LINEAR_THREADS, 0, s>>>(*b);
        else
            held = false;
        if (held) return xt_cuda_launched(ctx);
    }
    pass_logits<T, LINEAR_THREADS><<<rows, LINEAR_THREADS, 0, s>>>(*b);
    return xt_cuda_launched(ctx);
}

/* What one pass over the logits reads and leaves. */
template <class T> struct linear {
    const struct xt_tensor *x;      /* (rows, D) */
    const struct xt_tensor *w;      /* (V, D) */
    const struct xt_tensor *labels; /* (rows) */
    struct options o;
    struct xt_cuda_fault fault;
    struct upstream<xt_real<T>> up;
    xt_real<T> *losses; /* (rows), or NULL */
    T *dx;              /* (rows, D), or NULL */
    xt_real<T> *dw;     /* (V, D), or NULL */
};

/* Rows of logits held at a time, by the shape alone: a power of two. */
static int64_t linear_block(int64_t rows, int64_t width) {
    int64_t block = LINEAR_ROWS;
    while (block > LINEAR_LEAST && block * width > LINEAR_LOGITS) block /= 2;
    return rows < block ? rows : block;
}

/* Block by block of rows: logits = x w^T; loss and gradient of each row; dx = dlogits w;
   dw += dlogits^T x. */
template <class T>
static enum xt_status linear_pass(struct xt_ctx *ctx, const struct linear<T> *p) {
    using R = xt_real<T>;
    const enum xt_dtype in = p->x->dtype, wide = xt_arithmetic(in);
    const int64_t V = p->w->shape[0], D = p->w->shape[1], rows = xt_numel(p->labels);
    const int64_t width = (V + PAD - 1) / PAD * PAD, block = linear_block(rows, width);
    const int64_t narrow = width * (int64_t)(sizeof(R) / sizeof(T)); /* of gradients, in T */
    const size_t bytes = (size_t)(block * width) * sizeof(R);
    const struct labels labels = labels_of(p->labels);
    const bool grad = p->dx || p->dw;
    cudaStream_t s = xt_cuda_stream(ctx);
    enum xt_status status = XT_OK;
    if (p->dw && rows == 0 && V * D > 0)
        XT_CUDA_TRY(cudaMemsetAsync(p->dw, 0, (size_t)(V * D) * sizeof(R), s));
    if (rows == 0) return XT_OK;
    /* A vocabulary that tensor cores take slowly is grown by rows of zeros, once for all blocks. */
    const bool grown = sizeof(T) == 2 && V % 8 && rows * V * D >= 1 << 24;
    const int64_t classes = grown ? width : V;
    const size_t w_bytes = grown ? (size_t)(width * D) * sizeof(T) : 0;
    const T *w = (const T *)xt_data(p->w);
    T *copy = NULL;
    R *logits = NULL;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&logits));
    if (grown) {
        const size_t used = (size_t)(V * D) * sizeof(T);
        XT_GO(xt_scratch_get(ctx, XT_CUDA, w_bytes, (void **)&copy));
        XT_GO(xt_cuda_status(ctx, cudaMemcpyAsync(copy, w, used, cudaMemcpyDeviceToDevice, s)));
        XT_GO(xt_cuda_status(ctx, cudaMemsetAsync((char *)copy + used, 0, w_bytes - used, s)));
        w = copy;
    }
    for (int64_t first = 0; first < rows; first += block) {
        const int64_t m = rows - first < block ? rows - first : block;
        const T *x = (const T *)xt_data(p->x) + first * D;
        const struct xt_cuda_factor inputs = xt_cuda_rows(x, m, D, D);
        const struct xt_cuda_factor weights = xt_cuda_rows(w, classes, D, D);
        const struct xt_cuda_gemm forward =
            xt_cuda_gemm_of(in, inputs, xt_cuda_turned(weights), wide, logits, width);
        XT_GO(xt_cuda_gemm(ctx, &forward));
        const struct logit_rows<T> rows_of_block = {
            logits, width, first, m, labels, p->o, p->fault, p->up, p->losses, grad
        };
        XT_GO(logits_to_losses(ctx, &rows_of_block));
        if (p->dx) {
            const struct xt_cuda_gemm to_x = xt_cuda_gemm_of(
                in, xt_cuda_rows(logits, m, classes, narrow), weights, in, p->dx + first * D, D);
            XT_GO(xt_cuda_gemm(ctx, &to_x));
        }
        /* The classes that tensor cores take at full speed, then the few that are left. */
        const int64_t even = V - V % 8;
        for (int64_t from = 0; p->dw && from < V; from = from < even ? even : V) {
            const struct xt_cuda_factor gradients =
                xt_cuda_rows((const T *)logits + from, m, from < even ? even : V - even, narrow);
            struct xt_cuda_gemm to_w =
                xt_cuda_gemm_of(in, xt_cuda_turned(gradients), inputs, wide, p->dw + from * D, D);
            to_w.beta = first > 0;
            XT_GO(xt_cuda_gemm(ctx, &to_w));
        }
    }
done:
    if (copy) xt_scratch_put(ctx, XT_CUDA, copy, w_bytes);
    xt_scratch_put(ctx, XT_CUDA, logits, bytes);
    return status;
}

/* What the op and its gradient have in common. */
template <class T>
static struct linear<T> inputs_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct linear<T> p = {};
    p.x = l->in[0];
    p.w = l->in[1];
    p.labels = l->in[2];
    p.o = options_of(l->attrs, p.w->shape[0]);
    p.fault = label_fault(ctx, l, &p.o);
    return p;
}

template <class T>
static enum xt_status linear_cross_entropy_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    struct linear<T> p = inputs_of<T>(ctx, l);
    const int64_t rows = xt_numel(p.labels);
    const struct labels labels = labels_of(p.labels);
    if (p.o.reduction == NONE) {
        p.losses = rows ? (R *)xt_data(l->out[0]) : NULL;
        return linear_pass(ctx, &p);
    }
    const size_t bytes = (size_t)rows * sizeof(R);
    double *part = NULL;
    enum xt_status status = XT_OK;
    p.dx = l->out[1] && xt_numel(l->out[1]) ? (T *)xt_data(l->out[1]) : NULL;
    p.dw = l->out[2] && xt_numel(l->out[2]) ? (R *)xt_data(l->out[2]) : NULL;
    if (bytes) XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&p.losses));
    XT_GO(part_of(ctx, &p.o, &labels, &part));
    p.up = upstream_of<R>(NULL, false, part);
    XT_GO(linear_pass(ctx, &p));
    add_losses<R>
        <<<1, SUM_THREADS, 0, xt_cuda_stream(ctx)>>>(p.losses, rows, part, (R *)xt_data(l->out[0]));
    status = xt_cuda_launched(ctx);
done:
    if (part) xt_scratch_put(ctx, XT_CUDA, part, sizeof *part);
    if (bytes) xt_scratch_put(ctx, XT_CUDA, p.losses, bytes);
    return status;
}

template <class T>
static enum xt_status linear_cross_entropy_grad_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    struct linear<T> p = inputs_of<T>(ctx, l);
    p.up = upstream_of<R>(l->in[3], true, NULL);
    p.dx = xt_numel(l->out[0]) ? (T *)xt_data(l->out[0]) : NULL;
    p.dw = xt_numel(l->out[1]) ? (R *)xt_data(l->out[1]) : NULL;
    return linear_pass(ctx, &p);
}

/* ---- the table ------------------------------------------------------------------------------- */

static enum xt_status linear_cross_entropy(struct xt_ctx *ctx, const struct xt_launch *l) {
    switch (l->in[0]->dtype) {
    case XT_BF16: return linear_cross_entropy_of<__nv_bfloat16>(ctx, l);
    case XT_F64: return linear_cross_entropy_of<double>(ctx, l);
    default: return linear_cross_entropy_of<float>(ctx, l);
    }
}

static enum xt_status linear_cross_entropy_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    switch (l->in[0]->dtype) {
    case XT_BF16: return linear_cross_entropy_grad_of<__nv_bfloat16>(ctx, l);
    case XT_F64: return linear_cross_entropy_grad_of<double>(ctx, l);
    default: return linear_cross_entropy_grad_of<float>(ctx, l);
    }
}

const struct xt_kernel xt_cuda_linear_loss_kernels[] = {
    {"linear_cross_entropy", XT_CUDA_FACTORS, XT_CONTIGUOUS, linear_cross_entropy},
    {"linear_cross_entropy_grad", XT_CUDA_FACTORS, XT_CONTIGUOUS, linear_cross_entropy_grad},
    {},
};
