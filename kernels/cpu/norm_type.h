/*
 * norm_type.h: rmsnorm, layernorm and rope in one arithmetic: T is float, for f32, bf16 and f16, or
 * double. norm.c includes this once for each, with F(name) naming the functions and T_DTYPE the
 * dtype that needs no conversion.
 */

/* A row as T: itself, or converted into `buffer`. */
static const T *F(load)(const void *row, enum xt_dtype dtype, int64_t d, T *buffer) {
    if (dtype == T_DTYPE) return row;
    XT_CPU(load_f32)(row, dtype, d, (float *)(void *)buffer); /* only when T is float */
    return buffer;
}

static void F(store)(const T *row, enum xt_dtype dtype, int64_t d, void *to) {
    if (dtype != T_DTYPE) XT_CPU(store_f32)((const float *)(const void *)row, dtype, d, to);
}

/* Numbers summed side by side, at any address. Two of them hide the time an addition takes. */
typedef T F(lanes) __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));

static inline T F(total)(const F(lanes) * a, const F(lanes) * b) {
    T t[32 / sizeof(T)];
    for (size_t i = 0; i < 32 / sizeof(T); i++) t[i] = (*a)[i] + (*b)[i];
    for (size_t n = 16 / sizeof(T); n > 0; n /= 2)
        for (size_t i = 0; i < n; i++) t[i] += t[n + i];
    return t[0];
}

static inline T F(sum)(const T *x, int64_t d) {
    const int64_t step = 32 / sizeof(T);
    F(lanes) a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 2 * step <= d; i += 2 * step) {
        a += *(const F(lanes) *)(x + i);
        b += *(const F(lanes) *)(x + i + step);
    }
    T s = F(total)(&a, &b);
    for (; i < d; i++) s += x[i];
    return s;
}

/* sum of (x - mean)^2 */
static inline T F(sum_squares)(const T *x, int64_t d, T mean) {
    const int64_t step = 32 / sizeof(T);
    F(lanes) a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 2 * step <= d; i += 2 * step) {
        F(lanes) u = *(const F(lanes) *)(x + i) - mean;
        F(lanes) v = *(const F(lanes) *)(x + i + step) - mean;
        a += u * u;
        b += v * v;
    }
    T s = F(total)(&a, &b);
    for (; i < d; i++) s += (x[i] - mean) * (x[i] - mean);
    return s;
}

static T F(rsqrt)(T x) {
    return 1 / XT_SQRT(x);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* y = round(x * rstd) * w; y is x's row in T, and `out` its place when that is another dtype. */
static T F(rms_row)(const T *restrict x, const T *restrict w, int64_t d, T eps, enum xt_dtype dtype,
                    T *restrict y, void *out) {
    T rstd = F(rsqrt)(F(sum_squares)(x, d, 0) / (T)d + eps);
    if (dtype == T_DTYPE) {
        for (int64_t i = 0; i < d; i++) y[i] = x[i] * rstd * w[i];
        return rstd;
    }
    for (int64_t i = 0; i < d; i++) y[i] = x[i] * rstd;
    F(store)(y, dtype, d, out);
    F(load)(out, dtype, d, y);
    for (int64_t i = 0; i < d; i++) y[i] *= w[i];
    F(store)(y, dtype, d, out);
    return rstd;
}

/* w and b may be NULL. */
static void F(layer_row)(const T *restrict x, const T *restrict w, const T *restrict b, int64_t d,
                         T eps, T *restrict y, T *mean, T *rstd) {
    T m = F(sum)(x, d) / (T)d;
    T r = F(rsqrt)(F(sum_squares)(x, d, m) / (T)d + eps);
    if (w && b)
        for (int64_t i = 0; i < d; i++) y[i] = (x[i] - m) * r * w[i] + b[i];
    else if (w)
        for (int64_t i = 0; i < d; i++) y[i] = (x[i] - m) * r * w[i];
    else if (b)
        for (int64_t i = 0; i < d; i++) y[i] = (x[i] - m) * r + b[i];
    else
        for (int64_t i = 0; i < d; i++) y[i] = (x[i] - m) * r;
    *mean = m;
    *rstd = r;
}

/* Both norms; `layer` tells which. Per thread, room for a row of x and one of y. */
static enum xt_status F(norm)(struct xt_ctx *ctx, const struct xt_launch *l, bool layer) {
    const struct xt_tensor *wt = l->in[1], *bt = layer ? l->in[2] : NULL;
    struct xt_tensor *y = l->out[0], *mean = layer ? l->out[1] : NULL,
                     *rstd = l->out[layer ? 2 : 1];
    struct rows x;
    rows_of(l->in[0], &x);
    if (x.count == 0 || x.d == 0) return fill_nothing(l);
    const T eps = (T)l->attrs[0].f;
    const int64_t d = x.d, yb = (int64_t)xt_dtype_bytes(y->dtype);
    const bool same = x.dtype == T_DTYPE;
    const int threads = x.count * d > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    const int64_t room = same ? 0 : 2 * d;
    const size_t bytes = (size_t)(threads * room + 2 * d) * sizeof(T);
    const bool plain = same && (!wt || wt->dtype == T_DTYPE) && (!bt || bt->dtype == T_DTYPE);
    T *scratch = NULL;
    if (!plain) XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&scratch));
    const T *w = wt ? F(load)(xt_data(wt), wt->dtype, d, scratch + threads * room) : NULL;
    const T *b = bt ? F(load)(xt_data(bt), bt->dtype, d, scratch + threads * room + d) : NULL;
    char *out = xt_data(y);
    T *means = mean ? xt_data(mean) : NULL, *rstds = rstd ? xt_data(rstd) : NULL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t i = 0; i < x.count; i++) {
        T *buffer = same ? NULL : scratch + omp_get_thread_num() * room;
        char *to = out + i * d * yb;
        const T *row = F(load)(row_at(&x, i), x.dtype, d, buffer);
        T *result = same ? (T *)(void *)to : buffer + d;
        T m = 0, r;
        if (layer) {
            F(layer_row)(row, w, b, d, eps, result, &m, &r);
            F(store)(result, y->dtype, d, to);
        } else {
            r = F(rms_row)(row, w, d, eps, y->dtype, result, to);
        }
        if (means) means[i] = m;
        if (rstds) rstds[i] = r;
    }
    if (!plain) xt_scratch_put(ctx, XT_CPU, scratch, bytes);
    return XT_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/*
 * With n = (x - mean) * rstd and h = g * w: dx = rstd * (h - mean(h) - n * mean(h * n)), where
 * rmsnorm has mean 0 and no mean(h). dw += g * n and db += g, where not NULL.
 */
static void F(rms_row_grad)(const T *restrict g, const T *restrict x, const T *restrict w, T rstd,
                            int64_t d, T *restrict dx, T *restrict dw) {
    T dot = 0;
    if (dw) {
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < d; i++) {
            T gn = g[i] * (x[i] * rstd);
            dw[i] += gn;
            dot += gn * w[i];
        }
    } else {
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < d; i++) dot += g[i] * (x[i] * rstd) * w[i];
    }
    dot /= (T)d;
    for (int64_t i = 0; i < d; i++) dx[i] = rstd * (g[i] * w[i] - x[i] * rstd * dot);
}

static void F(layer_row_grad)(const T *restrict g, const T *restrict x, const T *restrict w, T mean,
                              T rstd, int64_t d, T *restrict dx, T *restrict dw, T *restrict db) {
    T dot = 0, sum = 0;
#pragma omp simd reduction(+ : dot, sum)
    for (int64_t i = 0; i < d; i++) {
        T h = g[i] * w[i];
        sum += h;
        dot += h * ((x[i] - mean) * rstd);
    }
    dot /= (T)d;
    sum /= (T)d;
    if (dw)
        for (int64_t i = 0; i < d; i++) {
            dw[i] += g[i] * ((x[i] - mean) * rstd);
            db[i] += g[i];
        }
    for (int64_t i = 0; i < d; i++) dx[i] = rstd * (g[i] * w[i] - sum - (x[i] - mean) * rstd * dot);
}

/* to[i] = sum over b of parts[b * stride + i], in order of b. */
static void F(add_parts)(const T *parts, int64_t n_parts, int64_t stride, int64_t d, T *to) {
    memcpy(to, parts, (size_t)d * sizeof(T));
    for (int64_t b = 1; b < n_parts; b++) {
        const T *part = parts + b * stride;
        for (int64_t i = 0; i < d; i++) to[i] += part[i];
    }
}

/*
 * The gains' gradients are sums over rows: each block of rows, cut by the shape alone, sums its own
 * in order, then the blocks are added in order.
 */
static enum xt_status F(norm_grad)(struct xt_ctx *ctx, const struct xt_launch *l, bool layer) {
    const struct xt_tensor *wt = l->in[2];
    const T *means = layer ? xt_data(l->in[3]) : NULL, *rstds = xt_data(l->in[layer ? 4 : 3]);
    struct xt_tensor *dx = l->out[0];
    struct rows g, x;
    rows_of(l->in[0], &g);
    rows_of(l->in[1], &x);
    const bool gain = l->attrs[0].i != 0, same = g.dtype == T_DTYPE && x.dtype == T_DTYPE;
    if (x.count == 0 || x.d == 0) return fill_nothing(l);
    const int64_t d = x.d, xb = (int64_t)xt_dtype_bytes(dx->dtype);
    const int64_t least = (x.count + NORM_PARTS - 1) / NORM_PARTS;
    const int64_t tall = least > NORM_PART_ROWS ? least : NORM_PART_ROWS;
    const int64_t parts = (x.count + tall - 1) / tall;
    const int threads = x.count * d > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    const int64_t room = same ? 0 : 3 * d, part = gain ? (layer ? 2 : 1) * d : 0;
    const bool one = parts == 1;
    const size_t bytes = (size_t)(threads * room + d + (one ? 0 : parts * part)) * sizeof(T);
    const bool plain = same && wt && wt->dtype == T_DTYPE && (one || !gain);
    T *scratch = NULL;
    if (!plain) XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&scratch));
    T *ones = scratch + threads * room, *sums = ones + d;
    const T *w = ones;
    if (wt)
        w = F(load)(xt_data(wt), wt->dtype, d, ones);
    else
        for (int64_t i = 0; i < d; i++) ones[i] = 1;
    T *dw = gain ? xt_data(l->out[1]) : NULL, *db = gain && layer ? xt_data(l->out[2]) : NULL;
    char *out = xt_data(dx);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t p = 0; p < parts; p++) {
        T *buffer = same ? NULL : scratch + omp_get_thread_num() * room;
        T *dw_part = !gain || one ? dw : sums + p * part;
        T *db_part = !gain || one || !layer ? db : dw_part + d;
        if (dw_part) memset(dw_part, 0, (size_t)d * sizeof(T));
        if (db_part) memset(db_part, 0, (size_t)d * sizeof(T));
        int64_t end = (p + 1) * tall < x.count ? (p + 1) * tall : x.count;
        for (int64_t i = p * tall; i < end; i++) {
            const T *gr = F(load)(row_at(&g, i), g.dtype, d, buffer);
            const T *xr = F(load)(row_at(&x, i), x.dtype, d, same ? NULL : buffer + d);
            char *to = out + i * d * xb;
            T *result = dx->dtype == T_DTYPE ? (T *)(void *)to : buffer + 2 * d;
            if (layer)
                F(layer_row_grad)(gr, xr, w, means[i], rstds[i], d, result, dw_part, db_part);
            else
                F(rms_row_grad)(gr, xr, w, rstds[i], d, result, dw_part);
            F(store)(result, dx->dtype, d, to);
        }
    }
    if (gain && !one) {
        F(add_parts)(sums, parts, part, d, dw);
        if (layer) F(add_parts)(sums + d, parts, part, d, db);
    }
    if (!plain) xt_scratch_put(ctx, XT_CPU, scratch, bytes);
    return XT_OK;
}

/* ---- rope ------------------------------------------------------------------------------------ */

/* cosines, then sines, of the half angles of one position. */
static void F(rope_angles)(int64_t position, const T *restrict frequency, int64_t half, T sign,
                           T *restrict table) {
    const T at = (T)position;
    T *restrict sine = table + half;
    for (int64_t i = 0; i < half; i++) {
        double s, c;
        T angle = at * frequency[i];
        xt_sine_cosine((double)angle, &s, &c);
        table[i] = (T)c;
        sine[i] = sign * (T)s;
    }
}

static void F(rope_half)(const T *restrict x, const T *restrict table, int64_t half,
                         T *restrict y) {
    const T *restrict c = table, *restrict s = table + half;
    for (int64_t i = 0; i < half; i++) {
        T a = x[i], b = x[half + i];
        y[i] = a * c[i] - b * s[i];
        y[half + i] = b * c[i] + a * s[i];
    }
}

static void F(rope_interleaved)(const T *restrict x, const T *restrict table, int64_t half,
                                T *restrict y) {
    const T *restrict c = table, *restrict s = table + half;
    for (int64_t i = 0; i < half; i++) {
        T a = x[2 * i], b = x[2 * i + 1];
        y[2 * i] = a * c[i] - b * s[i];
        y[2 * i + 1] = b * c[i] + a * s[i];
    }
}

static int64_t F(position)(const struct xt_tensor *p, int64_t offset, int64_t b, int64_t s) {
    if (!p) return offset + s;
    int64_t at = s * p->stride[p->ndim - 1] + (p->ndim == 2 ? b * p->stride[0] : 0);
    return p->dtype == XT_I32 ? ((const int32_t *)xt_data(p))[at]
                              : ((const int64_t *)xt_data(p))[at];
}

static enum xt_status F(rope)(struct xt_ctx *ctx, const struct xt_launch *l, T sign) {
    const struct xt_tensor *x = l->in[0], *p = l->in[1];
    const int64_t S = x->shape[1], H = x->shape[2], D = x->shape[3], half = D / 2;
    if (xt_numel(x) == 0) return XT_OK;
    const bool same = x->dtype == T_DTYPE, interleaved = l->attrs[1].i == 1;
    const int64_t lines = x->shape[0] * S;                /* (b, s) */
    const int64_t places = p && p->ndim == 2 ? lines : S; /* rows of the table */
    const int threads = lines * H * D > XT_CPU_GRAIN ? xt_threads(ctx) : 1;
    const size_t bytes = (size_t)(places * D + half + (same ? 0 : threads * 2 * D)) * sizeof(T);
    T *table;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, (void **)&table));
    T *frequency = table + places * D, *buffers = frequency + half;
    for (int64_t i = 0; i < half; i++)
        frequency[i] = 1 / POWER((T)l->attrs[0].f, (T)(2 * i) / (T)D);
    const int64_t bytes_x = (int64_t)xt_dtype_bytes(x->dtype), offset = l->attrs[2].i;
    const char *from = xt_data(x);
    char *out = xt_data(l->out[0]);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < places; i++) F(rope_angles)
        (F(position)(p, offset, i / S, i % S), frequency, half, sign, table + i * D);
        T *buffer = same ? NULL : buffers + omp_get_thread_num() * 2 * D;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < lines; i++) {
            const T *turn = table + (places == lines ? i : i % S) * D;
            const int64_t at = i / S * x->stride[0] + i % S * x->stride[1];
            for (int64_t h = 0; h < H; h++) {
                char *to = out + (i * H + h) * D * bytes_x;
                const T *row =
                    F(load)(from + (at + h * x->stride[2]) * bytes_x, x->dtype, D, buffer);
                T *result = same ? (T *)(void *)to : buffer + D;
                if (interleaved)
                    F(rope_interleaved)(row, turn, half, result);
                else
                    F(rope_half)(row, turn, half, result);
                F(store)(result, x->dtype, D, to);
            }
        }
    }
    xt_scratch_put(ctx, XT_CPU, table, bytes);
    return XT_OK;
}
