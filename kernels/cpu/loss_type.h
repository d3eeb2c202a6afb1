/*
 * loss_type.h: the losses in one arithmetic: T is float or double. loss.c includes this once for
 * each, with F(name) naming the functions and T_DTYPE the dtype that needs no conversion.
 */

static const T *F(load)(const void *row, enum xt_dtype dtype, int64_t n, T *buffer) {
    if (dtype == T_DTYPE) return row;
    XT_CPU(load_f32)(row, dtype, n, (float *)(void *)buffer); /* only when T is float */
    return buffer;
}

static void F(store)(const T *row, enum xt_dtype dtype, int64_t n, void *to) {
    if (dtype != T_DTYPE) XT_CPU(store_f32)((const float *)(const void *)row, dtype, n, to);
}

static T F(largest)(const T *x, int64_t n) {
    T most = -(T)INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Long sums are cut in blocks, added in f64. */
static T F(sum)(const T *x, int64_t n) {
    double all = 0;
    for (int64_t at = 0; at < n; at += LOSS_BLOCK) {
        int64_t end = at + LOSS_BLOCK < n ? at + LOSS_BLOCK : n;
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = at; i < end; i++) sum += x[i];
        all += (double)sum;
    }
    return (T)all;
}

/* sum of e^(x - most) */
static T F(exp_sum)(const T *x, T most, int64_t n) {
    double all = 0;
    for (int64_t at = 0; at < n; at += LOSS_BLOCK) {
        int64_t end = at + LOSS_BLOCK < n ? at + LOSS_BLOCK : n;
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = at; i < end; i++) sum += XT_EXP(x[i] - most);
        all += (double)sum;
    }
    return (T)all;
}

/* The same, leaving e^(x - most) in x. */
static T F(exp_in_place)(T *x, T most, int64_t n) {
    double all = 0;
    for (int64_t at = 0; at < n; at += LOSS_BLOCK) {
        int64_t end = at + LOSS_BLOCK < n ? at + LOSS_BLOCK : n;
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = at; i < end; i++) {
            T e = XT_EXP(x[i] - most);
            x[i] = e;
            sum += e;
        }
        all += (double)sum;
    }
    return (T)all;
}

/* The loss of one row: lse - x[label], blended with the mean over all classes. */
static T F(row_loss)(const T *x, int64_t n, T lse, int64_t label, T smoothing) {
    T loss = lse - x[label];
    if (smoothing == 0) return loss;
    return (1 - smoothing) * loss + smoothing * (lse - F(sum)(x, n) / (T)n);
}

/* Adds the rows' losses in order. */
static void F(reduce)(const T *losses, int64_t rows, double divisor, T *out) {
    double sum = 0;
    for (int64_t i = 0; i < rows; i++) sum += (double)losses[i];
    *out = (T)(sum / divisor);
}

/* ---- cross_entropy --------------------------------------------------------------------------- */

static enum xt_status F(cross_entropy)(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *labels = l->in[1];
    const struct options o = options_of(l->attrs);
    struct rows x;
    int64_t valid;
    rows_of(l->in[0], &x);
    XT_TRY(check_labels(ctx, labels, x.d, o.ignore, &valid));
    const int64_t n = x.d;
    const int threads = x.count * n > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    const int64_t room = x.dtype == T_DTYPE ? 0 : n;
    const size_t bytes = (size_t)(threads * room + (o.reduction == NONE ? 0 : x.count)) * sizeof(T);
    T *scratch, *out = l->out[0]->storage->data ? xt_data(l->out[0]) : NULL;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&scratch));
    T *losses = o.reduction == NONE ? out : scratch + threads * room;
    T *kept = l->out[1] ? xt_data(l->out[1]) : NULL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t i = 0; i < x.count; i++) {
        int64_t label = label_at(labels, i);
        T lse = 0, loss = 0;
        if (label != o.ignore) {
            T *buffer = room ? scratch + omp_get_thread_num() * room : NULL;
            const T *row = F(load)(row_at(&x, i), x.dtype, n, buffer);
            T most = F(largest)(row, n);
            lse = most + XT_LOG(F(exp_sum)(row, most, n));
            loss = F(row_loss)(row, n, lse, label, (T)o.smoothing);
        }
        losses[i] = loss;
        if (kept) kept[i] = lse;
    }
    if (o.reduction != NONE) F(reduce)(losses, x.count, divisor(&o, valid), out);
    xt_scratch_put(ctx, XT_CPU, scratch, bytes);
    return XT_OK;
}

/* (e^(x - lse) - smoothing / n) * scale, less (1 - smoothing) * scale at the label. */
static void F(row_grad)(const T *restrict x, int64_t n, T lse, int64_t label, T smoothing, T scale,
                        T *restrict dx) {
    const T even = smoothing / (T)n;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) dx[i] = (XT_EXP(x[i] - lse) - even) * scale;
    dx[label] -= (1 - smoothing) * scale;
}

static enum xt_status F(cross_entropy_grad)(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *labels = l->in[1], *grad = l->in[3];
    const struct options o = options_of(l->attrs);
    struct rows x;
    int64_t valid;
    rows_of(l->in[0], &x);
    XT_TRY(check_labels(ctx, labels, x.d, o.ignore, &valid));
    const int64_t n = x.d, each = (int64_t)xt_dtype_bytes(x.dtype);
    if (x.count == 0 || n == 0) return XT_OK;
    const int threads = x.count * n > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    const int64_t room = x.dtype == T_DTYPE ? 0 : 2 * n;
    const size_t bytes = (size_t)(threads * room) * sizeof(T);
    T *scratch = NULL;
    if (room) XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&scratch));
    char *out = xt_data(l->out[0]);
    const T *lse = xt_data(l->in[2]), *g = xt_data(grad);
    const T scale = o.reduction == NONE ? 1 : (T)((double)*g / divisor(&o, valid));
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t i = 0; i < x.count; i++) {
        int64_t label = label_at(labels, i);
        char *to = out + i * n * each;
        if (label == o.ignore) {
            memset(to, 0, (size_t)(n * each));
            continue;
        }
        T *buffer = room ? scratch + omp_get_thread_num() * room : NULL;
        const T *row = F(load)(row_at(&x, i), x.dtype, n, buffer);
        T *result = room ? buffer + n : (T *)(void *)to;
        T by = o.reduction == NONE ? g[element_at(grad, i)] : scale;
        F(row_grad)(row, n, lse[i], label, (T)o.smoothing, by, result);
        F(store)(result, x.dtype, n, to);
    }
    if (room) xt_scratch_put(ctx, XT_CPU, scratch, bytes);
    return XT_OK;
}

/* ---- linear_cross_entropy -------------------------------------------------------------------- */

/* The loss of a row of logits; with `grad` they become its gradient times scale. */
static T F(logits_row)(T *x, int64_t n, int64_t label, T smoothing, T scale, bool grad) {
    T most = F(largest)(x, n);
    if (!grad) return F(row_loss)(x, n, most + XT_LOG(F(exp_sum)(x, most, n)), label, smoothing);
    T at_label = x[label], all = smoothing == 0 ? 0 : F(sum)(x, n);
    T sum = F(exp_in_place)(x, most, n), lse = most + XT_LOG(sum);
    const T by = scale / sum, even = scale * (smoothing / (T)n);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * by - even;
    x[label] -= (1 - smoothing) * scale;
    T loss = lse - at_label;
    return smoothing == 0 ? loss : (1 - smoothing) * loss + smoothing * (lse - all / (T)n);
}

/* What one pass over the logits reads and leaves. */
struct F(linear) {
    const struct xt_tensor *x;      /* (rows, D) */
    const struct xt_tensor *w;      /* (V, D) */
    const struct xt_tensor *labels; /* (rows) */
    const struct xt_tensor *grad;   /* (rows) upstream, or NULL: then all rows have `scale` */
    struct options o;
    T scale;
    T *losses; /* (rows), or NULL */
    char *dx;  /* (rows, D) of x's dtype, or NULL */
    T *dw;     /* (V, D), or NULL */
};

/* Rows first .. first + m of the logits become losses and, when there is a gradient, its rows;
   `narrow` takes those in x's dtype, or is NULL. */
static void F(linear_rows)(struct xt_ctx *ctx, const struct F(linear) * p, int64_t first, int64_t m,
                           T *logits, char *narrow) {
    const int64_t V = p->w->shape[0], each = (int64_t)xt_dtype_bytes(p->x->dtype);
    const int threads = m * V > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    const bool grad = p->dx || p->dw;
    const T *g = p->grad ? xt_data(p->grad) : NULL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t i = 0; i < m; i++) {
        const int64_t label = label_at(p->labels, first + i);
        const T scale = g ? g[element_at(p->grad, first + i)] : p->scale;
        T *row = logits + i * V, loss = 0;
        if (label != p->o.ignore)
            loss = F(logits_row)(row, V, label, (T)p->o.smoothing, scale, grad);
        else if (grad)
            memset(row, 0, (size_t)V * sizeof(T));
        if (p->losses) p->losses[first + i] = loss;
        if (narrow) F(store)(row, p->x->dtype, V, narrow + i * V * each);
    }
}

/* Block by block of rows: logits = x w^T; loss and gradient of each row; dx = dlogits w;
   dw += dlogits^T x. */
static enum xt_status F(linear_pass)(struct xt_ctx *ctx, const struct F(linear) * p) {
    enum xt_status status = XT_OK;
    const enum xt_dtype dtype = p->x->dtype;
    const int64_t V = p->w->shape[0], D = p->w->shape[1], rows = xt_numel(p->labels);
    const int64_t most = V > LINEAR_WIDE ? LINEAR_ROWS / 2 : LINEAR_ROWS;
    const int64_t block = rows < most ? rows : most, each = (int64_t)xt_dtype_bytes(dtype);
    const bool narrow = (p->dx || p->dw) && dtype != T_DTYPE;
    const size_t bytes = (size_t)(block * V) * (sizeof(T) + (narrow ? (size_t)each : 0));
    T *logits = NULL;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&logits));
    char *narrowed = narrow ? (char *)(logits + block * V) : NULL;
    const void *dlogits = narrow ? narrowed : (char *)logits;
    for (int64_t first = 0; first < rows; first += block) {
        const int64_t m = rows - first < block ? rows - first : block;
        const void *x = (const char *)xt_data(p->x) + first * D * each, *w = xt_data(p->w);
        const struct gemm forward = {
            .dtype = dtype,
            .c_dtype = T_DTYPE,
            .m = m,
            .n = V,
            .k = D,
            .a = {.data = x, .row = D, .col = 1},
            .b = {.data = w, .row = 1, .col = D},
            .c = logits,
        };
        XT_GO(XT_CPU(gemm)(ctx, &forward));
        F(linear_rows)(ctx, p, first, m, logits, narrowed);
        const struct gemm to_x = {
            .dtype = dtype,
            .c_dtype = dtype,
            .m = m,
            .n = D,
            .k = V,
            .a = {.data = dlogits, .row = V, .col = 1},
            .b = {.data = w, .row = D, .col = 1},
            .c = p->dx ? p->dx + first * D * each : NULL,
        };
        if (p->dx) XT_GO(XT_CPU(gemm)(ctx, &to_x));
        const struct gemm to_w = {
            .dtype = dtype,
            .c_dtype = T_DTYPE,
            .add = first > 0,
            .m = V,
            .n = D,
            .k = m,
            .a = {.data = dlogits, .row = 1, .col = V},
            .b = {.data = x, .row = D, .col = 1},
            .c = p->dw,
        };
        if (p->dw) XT_GO(XT_CPU(gemm)(ctx, &to_w));
    }
    if (rows == 0 && p->dw) memset(p->dw, 0, (size_t)(V * D) * sizeof(T));
done:
    xt_scratch_put(ctx, XT_CPU, logits, bytes);
    return status;
}

static enum xt_status F(linear_cross_entropy)(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct F(linear) p = {.x = l->in[0], .w = l->in[1], .labels = l->in[2], .scale = 1};
    int64_t valid, rows = xt_numel(p.labels);
    p.o = options_of(l->attrs);
    XT_TRY(check_labels(ctx, p.labels, p.w->shape[0], p.o.ignore, &valid));
    if (p.o.reduction == NONE) {
        p.losses = rows ? xt_data(l->out[0]) : NULL;
        return F(linear_pass)(ctx, &p);
    }
    const double by = divisor(&p.o, valid);
    const size_t bytes = (size_t)rows * sizeof(T);
    p.scale = (T)(1 / by);
    p.dx = l->out[1] && rows ? xt_data(l->out[1]) : NULL;
    p.dw = l->out[2] ? xt_data(l->out[2]) : NULL;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&p.losses));
    enum xt_status status = F(linear_pass)(ctx, &p);
    if (status == XT_OK) F(reduce)(p.losses, rows, by, xt_data(l->out[0]));
    xt_scratch_put(ctx, XT_CPU, p.losses, bytes);
    return status;
}

static enum xt_status F(linear_cross_entropy_grad)(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct F(linear) p = {.x = l->in[0], .w = l->in[1], .labels = l->in[2], .grad = l->in[3]};
    int64_t valid, rows = xt_numel(p.labels);
    p.o = options_of(l->attrs);
    XT_TRY(check_labels(ctx, p.labels, p.w->shape[0], p.o.ignore, &valid));
    p.dx = rows ? xt_data(l->out[0]) : NULL;
    p.dw = xt_data(l->out[1]);
    return F(linear_pass)(ctx, &p);
}

/* ---- gradients times an upstream number ------------------------------------------------------ */

static enum xt_status F(scaled)(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    const int64_t n = xt_numel(x), each = (int64_t)xt_dtype_bytes(x->dtype);
    if (n == 0) return XT_OK;
    const int threads = n > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    const T by = *(const T *)xt_data(l->in[1]);
    const char *from = xt_data(x);
    char *out = xt_data(l->out[0]);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t at = 0; at < n; at += LOSS_BLOCK) {
        T buffer[LOSS_BLOCK];
        int64_t count = n - at < LOSS_BLOCK ? n - at : LOSS_BLOCK;
        const T *row = F(load)(from + at * each, x->dtype, count, buffer);
        T *to = x->dtype == T_DTYPE ? (T *)(void *)(out + at * each) : buffer;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) to[i] = row[i] * by;
        F(store)(to, x->dtype, count, out + at * each);
    }
    return XT_OK;
}

static enum xt_status F(write_scaled)(struct xt_ctx *ctx, const struct xt_launch *l) {
    const int64_t n = xt_numel(l->in[0]);
    if (n == 0) return XT_OK;
    const int threads = n > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    const T by = l->in[2] ? *(const T *)xt_data(l->in[2]) : 1;
    const bool add = l->attrs[0].i != 0;
    T *restrict to = xt_data(l->in[0]);
    const T *restrict x = xt_data(l->in[1]);
#pragma omp parallel for simd num_threads(threads) schedule(static) if (parallel : threads > 1)
    for (int64_t i = 0; i < n; i++) to[i] = (add ? to[i] : 0) + x[i] * by;
    return XT_OK;
}
