/*
 * attention_type.h: the tiles of attention.c in one arithmetic type; included once a type.
 * REAL is the type, NAME(x) its names, REAL_EXP its exponential, LANES how many make 32 bytes.
 */

typedef REAL NAME(lanes) __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));

/* Scratch of one thread. Tiles are rows of dp (or TILE, transposed) elements, padding zero. */
struct NAME(tiles) {
    REAL q[TILE * MAX_D], k[TILE * MAX_D], v[TILE * MAX_D], g[TILE * MAX_D];
    REAL kt[MAX_D * TILE], vt[MAX_D * TILE]; /* d rows of TILE keys */
    REAL o[TILE * MAX_D], dk[TILE * MAX_D], dv[TILE * MAX_D];
    REAL s[TILE * TILE], ds[TILE * TILE];
    REAL m[TILE], l[TILE];
};

/* c (m x n, row c_row) (+)= a b: a (m x k) by any strides, b (k x n) by rows, n a multiple of
   16. */
static void NAME(multiply)(REAL *c, int c_row, const REAL *a, int a_row, int a_column,
                           const REAL *b, int b_row, int m, int n, int k, bool add) {
    enum { ROWS = 4 };
    typedef NAME(lanes) lanes;
    for (int j = 0; j < n; j += 2 * LANES) {
        for (int i = 0; i < m; i += ROWS) {
            lanes sum[ROWS][2];
            const REAL *row[ROWS];
            for (int r = 0; r < ROWS; r++) {
                int at = i + r < m ? i + r : m - 1; /* a last, short block repeats its last row */
                row[r] = a + (int64_t)at * a_row;
                const lanes *from = (const lanes *)(c + (int64_t)at * c_row + j);
                sum[r][0] = add ? from[0] : (lanes){0};
                sum[r][1] = add ? from[1] : (lanes){0};
            }
            for (int t = 0; t < k; t++) {
                const lanes *right = (const lanes *)(b + (int64_t)t * b_row + j);
                lanes b0 = right[0], b1 = right[1];
                for (int r = 0; r < ROWS; r++) {
                    REAL x = row[r][(int64_t)t * a_column];
                    sum[r][0] += x * b0;
                    sum[r][1] += x * b1;
                }
            }
            for (int r = 0; r < ROWS && i + r < m; r++) {
                lanes *to = (lanes *)(c + (int64_t)(i + r) * c_row + j);
                to[0] = sum[r][0];
                to[1] = sum[r][1];
            }
        }
    }
}

/* Rows [first, first + rows) of head h of t (B, S, H, D), as rows of dp; the rest zero. */
static void NAME(load)(const struct xt_tensor *t, int64_t b, int64_t h, int64_t first, int rows,
                       int d, int dp, REAL *to) {
    for (int r = 0; r < TILE; r++) {
        REAL *row = to + (int64_t)r * dp;
        if (r < rows) {
            int64_t at = b * t->stride[0] + (first + r) * t->stride[1] + h * t->stride[2];
            if (t->dtype == XT_BF16) {
                const uint16_t *x = (const uint16_t *)xt_data(t) + at;
                for (int c = 0; c < d; c++) row[c] = (REAL)xt_bf16_to_f32(x[c]);
            } else {
                const REAL *x = (const REAL *)xt_data(t) + at;
                for (int c = 0; c < d; c++) row[c] = x[c];
            }
        }
        for (int c = r < rows ? d : 0; c < dp; c++) row[c] = 0;
    }
}

/* The reverse, times `scale` a row (NULL: 1), into a contiguous or strided t. */
static void NAME(save)(const struct xt_tensor *t, int64_t b, int64_t h, int64_t first, int rows,
                       int d, int dp, const REAL *from, const REAL *scale) {
    for (int r = 0; r < rows; r++) {
        const REAL *row = from + (int64_t)r * dp;
        REAL by = scale ? scale[r] : 1;
        int64_t at = b * t->stride[0] + (first + r) * t->stride[1] + h * t->stride[2];
        if (t->dtype == XT_BF16) {
            uint16_t *x = (uint16_t *)xt_data(t) + at;
            for (int c = 0; c < d; c++) x[c] = xt_f32_to_bf16((float)(row[c] * by));
        } else {
            REAL *x = (REAL *)xt_data(t) + at;
            for (int c = 0; c < d; c++) x[c] = row[c] * by;
        }
    }
}

static void NAME(transpose)(const REAL *from, int dp, REAL *to) {
    for (int c = 0; c < dp; c++)
        for (int r = 0; r < TILE; r++) to[c * TILE + r] = from[r * dp + c];
}

/* s = scale q k^T with -inf where a query may not look. Returns false when it may look nowhere. */
static bool NAME(scores)(const struct problem *p, const struct NAME(tiles) * w, REAL *s, int64_t b,
                         int64_t h, int64_t row0, int rows, int64_t key0, int keys) {
    bool any = false;
    int limit[TILE];
    for (int r = 0; r < rows; r++) {
        int64_t n = visible(p, b, row0 + r) - key0;
        limit[r] = n < 0 ? 0 : n > keys ? keys : (int)n;
        any = any || limit[r] > 0;
    }
    if (!any) return false;
    NAME(multiply)(s, TILE, w->q, p->dp, 1, w->kt, TILE, rows, TILE, p->d, false);
    REAL scale = (REAL)p->scale;
    for (int r = 0; r < rows; r++) {
        REAL *row = s + r * TILE;
        for (int c = 0; c < TILE; c++) row[c] = c < limit[r] ? row[c] * scale : -(REAL)INFINITY;
        if (!p->mask && !p->documents) continue;
        for (int c = 0; c < limit[r]; c++)
            if (hidden(p, b, h, row0 + r, key0 + c)) row[c] = -(REAL)INFINITY;
    }
    return true;
}

static uint64_t NAME(element)(const struct problem *p, int64_t b, int64_t h, int64_t row,
                              int64_t key) {
    return (uint64_t)(((b * p->heads + h) * p->sq + row) * p->sk + key);
}

static void NAME(drop)(const struct problem *p, REAL *s, int64_t b, int64_t h, int64_t row0,
                       int rows, int64_t key0, int keys) {
    REAL scale = (REAL)p->keep_scale;
    for (int r = 0; r < rows; r++) {
        uint64_t first = NAME(element)(p, b, h, row0 + r, key0);
        for (int c = 0; c < keys; c++)
            s[r * TILE + c] = keeps(p, first + (uint64_t)c) ? s[r * TILE + c] * scale : 0;
    }
}

/* One key tile: the running maximum, sum and output of each row. */
static void NAME(absorb)(const struct problem *p, struct NAME(tiles) * w, int64_t b, int64_t h,
                         int64_t row0, int rows, int64_t key0, int keys) {
    for (int r = 0; r < rows; r++) {
        REAL *s = w->s + r * TILE, *o = w->o + (int64_t)r * p->dp;
        REAL m = w->m[r], sum = 0;
        for (int c = 0; c < TILE; c++) m = s[c] > m ? s[c] : m;
        REAL base = m == -(REAL)INFINITY ? 0 : m;
        REAL shrink = REAL_EXP(w->m[r] - base);
        for (int c = 0; c < TILE; c++) s[c] = REAL_EXP(s[c] - base);
        /* LANES partial sums in a fixed order. */
        REAL part[LANES] = {0};
        for (int c = 0; c < TILE; c += LANES)
            for (int t = 0; t < LANES; t++) part[t] += s[c + t];
        for (int t = 0; t < LANES; t++) sum += part[t];
        w->l[r] = w->l[r] * shrink + sum;
        w->m[r] = m;
        for (int c = 0; c < p->dp; c++) o[c] *= shrink;
    }
    if (p->p > 0) NAME(drop)(p, w->s, b, h, row0, rows, key0, keys);
    NAME(multiply)(w->o, p->dp, w->s, TILE, 1, w->v, p->dp, rows, p->dp, keys, true);
}

static void NAME(forward_tile)(const struct problem *p, const struct xt_launch *l,
                               struct NAME(tiles) * w, int64_t b, int64_t h, int64_t row0) {
    int rows = p->sq - row0 < TILE ? (int)(p->sq - row0) : TILE;
    int64_t kv = h / p->group;
    int64_t last = 0;
    NAME(load)(l->in[Q], b, h, row0, rows, p->d, p->dp, w->q);
    for (int r = 0; r < rows; r++) {
        w->m[r] = -(REAL)INFINITY;
        w->l[r] = 0;
        int64_t n = visible(p, b, row0 + r);
        last = n > last ? n : last;
    }
    for (int i = 0; i < TILE * p->dp; i++) w->o[i] = 0;
    for (int64_t key0 = 0; key0 < last; key0 += TILE) {
        int keys = p->sk - key0 < TILE ? (int)(p->sk - key0) : TILE;
        NAME(load)(l->in[K], b, kv, key0, keys, p->d, p->dp, w->k);
        NAME(transpose)(w->k, p->dp, w->kt);
        if (!NAME(scores)(p, w, w->s, b, h, row0, rows, key0, keys)) continue;
        NAME(load)(l->in[V], b, kv, key0, keys, p->d, p->dp, w->v);
        NAME(absorb)(p, w, b, h, row0, rows, key0, keys);
    }
    REAL *lse = l->out[1] ? (REAL *)xt_data(l->out[1]) + (b * p->heads + h) * p->sq + row0 : NULL;
    for (int r = 0; r < rows; r++) {
        bool none = w->l[r] == 0;
        /* +inf for a row without keys, so that backward finds e^(s - lse) = 0 there. */
        if (lse) lse[r] = none ? (REAL)INFINITY : w->m[r] + (REAL)log((double)w->l[r]);
        w->l[r] = none ? 0 : 1 / w->l[r];
    }
    NAME(save)(l->out[0], b, h, row0, rows, p->d, p->dp, w->o, w->l);
}

static enum xt_status NAME(forward)(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct problem p = describe(l);
    int64_t tiles = (p.sq + TILE - 1) / TILE, n = p.batch * p.heads * tiles;
    if (!n) return XT_OK;
    bool small = n == 1 || n * TILE * p.sk * p.d < 65536;
    int threads = small ? 1 : n < xt_threads(ctx) ? (int)n : xt_threads(ctx);
    size_t bytes = (size_t)threads * sizeof(struct NAME(tiles));
    void *scratch;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, &scratch));
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int t = 0; t < threads; t++) {
        struct NAME(tiles) *w = (struct NAME(tiles) *)scratch + t;
        /* Tiles dealt in turn, so that causal rows of all lengths mix. */
        for (int64_t i = t; i < n; i += threads) NAME(forward_tile)
        (&p, l, w, i / (p.heads * tiles), i / tiles % p.heads, i % tiles * TILE);
    }
    xt_scratch_put(ctx, XT_CPU, scratch, bytes);
    return XT_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* rowsum(g * out), a row. */
static void NAME(deltas)(const struct problem *p, const struct xt_launch *l, struct NAME(tiles) * w,
                         int64_t b, int64_t h, REAL *delta) {
    for (int64_t row0 = 0; row0 < p->sq; row0 += TILE) {
        int rows = p->sq - row0 < TILE ? (int)(p->sq - row0) : TILE;
        NAME(load)(l->in[GRAD], b, h, row0, rows, p->d, p->dp, w->g);
        NAME(load)(l->in[OUT], b, h, row0, rows, p->d, p->dp, w->o);
        for (int r = 0; r < rows; r++) {
            REAL part[LANES] = {0}, sum = 0;
            const REAL *x = w->g + (int64_t)r * p->dp, *y = w->o + (int64_t)r * p->dp;
            for (int c = 0; c < p->dp; c += LANES)
                for (int t = 0; t < LANES; t++) part[t] += x[c + t] * y[c + t];
            for (int t = 0; t < LANES; t++) sum += part[t];
            delta[row0 + r] = sum;
        }
    }
}

/* One query tile against the key tile in w: adds to dk and dv there and to dq (rows of dp). */
static void NAME(backward_tile)(const struct problem *p, const struct xt_launch *l,
                                struct NAME(tiles) * w, int64_t b, int64_t h, int64_t row0,
                                int64_t key0, int keys, const REAL *delta, REAL *dq) {
    int rows = p->sq - row0 < TILE ? (int)(p->sq - row0) : TILE;
    NAME(load)(l->in[Q], b, h, row0, rows, p->d, p->dp, w->q);
    if (!NAME(scores)(p, w, w->s, b, h, row0, rows, key0, keys)) return;
    NAME(load)(l->in[GRAD], b, h, row0, rows, p->d, p->dp, w->g);
    const struct xt_tensor *kept = l->in[LSE];
    const REAL *lse =
        (const REAL *)xt_data(kept) + b * kept->stride[0] + h * kept->stride[1] + row0;
    NAME(multiply)(w->ds, TILE, w->g, p->dp, 1, w->vt, TILE, rows, TILE, p->d, false);
    if (p->p > 0) NAME(drop)(p, w->ds, b, h, row0, rows, key0, keys);
    REAL scale = (REAL)p->scale;
    for (int r = 0; r < rows; r++) {
        REAL *s = w->s + r * TILE, *ds = w->ds + r * TILE;
        for (int c = 0; c < TILE; c++) {
            s[c] = REAL_EXP(s[c] - lse[r]);
            ds[c] = s[c] * (ds[c] - delta[row0 + r]) * scale;
        }
    }
    NAME(multiply)(dq + row0 * p->dp, p->dp, w->ds, TILE, 1, w->k, p->dp, rows, p->dp, keys, true);
    NAME(multiply)(w->dk, p->dp, w->ds, 1, TILE, w->q, p->dp, keys, p->dp, rows, true);
    if (p->p > 0) NAME(drop)(p, w->s, b, h, row0, rows, key0, keys);
    NAME(multiply)(w->dv, p->dp, w->s, 1, TILE, w->g, p->dp, keys, p->dp, rows, true);
}

/* All of one key head: its dk and dv, and dq of the query heads that use it. */
static void NAME(backward_head)(const struct problem *p, const struct xt_launch *l,
                                struct NAME(tiles) * w, int64_t b, int64_t kv, REAL *delta,
                                REAL *dq) {
    int64_t rows = p->sq, head = rows * p->dp;
    for (int64_t i = 0; i < p->group * head; i++) dq[i] = 0;
    for (int64_t g = 0; g < p->group; g++)
        NAME(deltas)(p, l, w, b, kv * p->group + g, delta + g * rows);
    for (int64_t key0 = 0; key0 < p->sk; key0 += TILE) {
        int keys = p->sk - key0 < TILE ? (int)(p->sk - key0) : TILE;
        NAME(load)(l->in[K], b, kv, key0, keys, p->d, p->dp, w->k);
        NAME(load)(l->in[V], b, kv, key0, keys, p->d, p->dp, w->v);
        NAME(transpose)(w->k, p->dp, w->kt);
        NAME(transpose)(w->v, p->dp, w->vt);
        for (int i = 0; i < TILE * p->dp; i++) w->dk[i] = w->dv[i] = 0;
        for (int64_t g = 0; g < p->group; g++)
            for (int64_t row0 = 0; row0 < rows; row0 += TILE) NAME(backward_tile)
        (p, l, w, b, kv * p->group + g, row0, key0, keys, delta + g * rows, dq + g * head);
        NAME(save)(l->out[K], b, kv, key0, keys, p->d, p->dp, w->dk, NULL);
        NAME(save)(l->out[V], b, kv, key0, keys, p->d, p->dp, w->dv, NULL);
    }
    for (int64_t g = 0; g < p->group; g++)
        for (int64_t row0 = 0; row0 < rows; row0 += TILE) NAME(save)
    (l->out[Q], b, kv * p->group + g, row0, rows - row0 < TILE ? (int)(rows - row0) : TILE, p->d,
     p->dp, dq + g * head + row0 * p->dp, NULL);
}

static enum xt_status NAME(backward)(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct problem p = describe(l);
    int64_t n = p.batch * p.kv_heads;
    if (!n) return XT_OK;
    bool small = n == 1 || n * p.group * p.sq * p.sk * p.d < 65536;
    int threads = small ? 1 : n < xt_threads(ctx) ? (int)n : xt_threads(ctx);
    /* Behind its tiles, each thread has the deltas and dq of one key head; 64-byte multiples. */
    size_t delta_bytes = ((size_t)(p.group * p.sq) * sizeof(REAL) + 63) / 64 * 64;
    size_t dq_bytes = ((size_t)(p.group * p.sq * p.dp) * sizeof(REAL) + 63) / 64 * 64;
    size_t one = sizeof(struct NAME(tiles)) + delta_bytes + dq_bytes;
    void *scratch;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, (size_t)threads * one, &scratch));
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int t = 0; t < threads; t++) {
        char *mine = (char *)scratch + (size_t)t * one;
        struct NAME(tiles) *w = (void *)mine;
        REAL *delta = (void *)(mine + sizeof *w);
        REAL *dq = (void *)(mine + sizeof *w + delta_bytes);
        for (int64_t i = t; i < n; i += threads)
            NAME(backward_head)(&p, l, w, i / p.kv_heads, i % p.kv_heads, delta, dq);
    }
    xt_scratch_put(ctx, XT_CPU, scratch, (size_t)threads * one);
    return XT_OK;
}

/* ---- the softmax of composed attention ------------------------------------------------------- */

static REAL NAME(at)(const struct xt_tensor *t, int64_t i) {
    return t->dtype == XT_BF16 ? (REAL)xt_bf16_to_f32(((const uint16_t *)xt_data(t))[i])
                               : ((const REAL *)xt_data(t))[i];
}

/* In: scores (B, H, Sq, Sk), mask, lengths, documents; attribute: causal. */
static enum xt_status NAME(softmax)(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *y = l->out[0];
    struct problem p = {
        .batch = x->shape[0],
        .heads = x->shape[1],
        .sq = x->shape[2],
        .sk = x->shape[3],
        .causal = l->attrs[0].i != 0,
        .lengths = l->in[2],
        .documents = l->in[3],
    };
    set_mask(&p, l->in[1]);
    int64_t n = p.batch * p.heads * p.sq;
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (n * p.sk > XT_CPU_GRAIN)
    for (int64_t i = 0; i < n; i++) {
        int64_t b = i / (p.heads * p.sq), h = i / p.sq % p.heads, row = i % p.sq;
        int64_t at = b * x->stride[0] + h * x->stride[1] + row * x->stride[2];
        int64_t limit = visible(&p, b, row), to = i * p.sk;
        REAL m = -(REAL)INFINITY, sum = 0;
        for (int64_t c = 0; c < limit; c++) {
            REAL s = NAME(at)(x, at + c);
            if (s > m && !hidden(&p, b, h, row, c)) m = s;
        }
        for (int pass = 0; pass < 2; pass++)
            for (int64_t c = 0; c < p.sk; c++) {
                bool out = c >= limit || m == -(REAL)INFINITY || hidden(&p, b, h, row, c);
                REAL e = out ? 0 : REAL_EXP(NAME(at)(x, at + c) - m);
                if (pass == 0)
                    sum += e;
                else if (y->dtype == XT_BF16)
                    ((uint16_t *)xt_data(y))[to + c] =
                        xt_f32_to_bf16((float)(sum > 0 ? e / sum : 0));
                else
                    ((REAL *)xt_data(y))[to + c] = sum > 0 ? e / sum : 0;
            }
    }
    return XT_OK;
}
