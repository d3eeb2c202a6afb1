/*
 * pointwise_loop.h: runs a function of contiguous blocks over tensors of any strides and dtypes.
 *
 * The one thing to know: strides, broadcasting, 16-bit floats and threads are handled here, once. A
 * block function sees plain arrays of the type it computes in: the tensor's own memory where that
 * will do, else a block gathered and converted on the stack. Dimensions that lie one behind the
 * other for every operand are merged first, so that most calls are one loop.
 */
#ifndef XT_CPU_POINTWISE_LOOP_H
#define XT_CPU_POINTWISE_LOOP_H

#include <string.h>

#include "cpu.h"

#define BLOCK 1024   /* elements gathered or converted at a time */
#define SHORT_ROW 64 /* rows shorter than this are gathered together into blocks */
/* A block of rows and columns, where an operand lies across: as many columns as fill a cache
   line. */
#define PATCH_ROWS 64
#define PATCH_COLS (BLOCK / PATCH_ROWS)
#define MAX_IN 4
#define MAX_OUT 2

/* n elements of each operand; p: the op's numbers. */
typedef void block_fn(int64_t n, const void *const *in, void *const *out, const double *p);

struct operand {
    char *data;                  /* its first element; NULL: left out, never read */
    enum xt_dtype dtype;         /* as it lies in memory */
    enum xt_dtype compute;       /* as the block function takes it */
    size_t bytes;                /* of an element in memory */
    bool linear;                 /* the elements lie one behind the other */
    bool constant;               /* all strides are 0 */
    int64_t stride[XT_MAX_DIMS]; /* in elements, over the dimensions of the loop */
};

struct loop {
    block_fn *block; /* NULL: copy in[0] to out[0] */
    const double *p; /* for block */
    int64_t n;       /* elements in all */
    int64_t longest; /* a block has at most so many elements */
    int across;      /* work in patches of this dimension and the last; -1: do not */
    int ndim;        /* at least 1 after loop_run has merged dimensions */
    int64_t shape[XT_MAX_DIMS];
    int n_in, n_out;
    struct operand in[MAX_IN], out[MAX_OUT];
};

struct scratch {
    _Alignas(64) char block[MAX_IN + MAX_OUT][BLOCK * sizeof(double)]; /* one for each operand */
    _Alignas(64) char raw[BLOCK * sizeof(double)]; /* gathered, before conversion */
};

/* The type that elements of a dtype are computed in. */
static inline enum xt_dtype compute_dtype(enum xt_dtype dtype) {
    return dtype == XT_BF16 || dtype == XT_F16 ? XT_F32 : dtype;
}

static inline void loop_shape(struct loop *l, int ndim, const int64_t *shape) {
    l->ndim = ndim;
    l->n = 1;
    for (int d = 0; d < ndim; d++) l->n *= l->shape[d] = shape[d];
}

/* t, broadcast to the loop's shape; NULL stands for an operand that the block will not read. */
static inline void set_operand(const struct loop *l, struct operand *o, const struct xt_tensor *t,
                               enum xt_dtype compute) {
    *o = (struct operand){0};
    if (!t) return;
    o->data = xt_data(t);
    o->dtype = t->dtype;
    o->compute = compute;
    o->bytes = xt_dtype_bytes(t->dtype);
    int lead = l->ndim - t->ndim;
    for (int d = 0; d < l->ndim; d++)
        o->stride[d] = d < lead || t->shape[d - lead] == 1 ? 0 : t->stride[d - lead];
}

static inline void add_in(struct loop *l, const struct xt_tensor *t, enum xt_dtype compute) {
    set_operand(l, &l->in[l->n_in++], t, compute);
}

static inline void add_out(struct loop *l, const struct xt_tensor *t, enum xt_dtype compute) {
    set_operand(l, &l->out[l->n_out++], t, compute);
}

/* One value of a dtype for every element. */
static inline void add_constant(struct loop *l, void *value, enum xt_dtype dtype) {
    l->in[l->n_in++] = (struct operand){
        .data = value, .dtype = dtype, .compute = dtype, .bytes = xt_dtype_bytes(dtype)};
}

static inline struct operand *operand_at(struct loop *l, int k) {
    return k < l->n_in ? &l->in[k] : &l->out[k - l->n_in];
}

/* Whether dimension d can be counted on behind dimension `kept`, for every operand. */
static bool merges(struct loop *l, int kept, int d) {
    for (int k = 0; k < l->n_in + l->n_out; k++) {
        const struct operand *o = operand_at(l, k);
        if (o->data && o->stride[kept] != l->shape[d] * o->stride[d]) return false;
    }
    return true;
}

/* Drops dimensions of size 1, merges what lies in a row. */
static void merge_dims(struct loop *l) {
    int kept = -1;
    for (int d = 0; d < l->ndim; d++) {
        if (l->shape[d] == 1) continue;
        bool merge = kept >= 0 && merges(l, kept, d);
        if (!merge) kept++;
        l->shape[kept] = merge ? l->shape[kept] * l->shape[d] : l->shape[d];
        for (int k = 0; k < l->n_in + l->n_out; k++) {
            struct operand *o = operand_at(l, k);
            if (o->data) o->stride[kept] = o->stride[d];
        }
    }
    l->ndim = kept + 1;
    if (l->ndim > 0) return;
    l->ndim = 1;
    l->shape[0] = 1;
    for (int k = 0; k < l->n_in + l->n_out; k++) operand_at(l, k)->stride[0] = 1;
}

/* ---- one operand ----------------------------------------------------------------------------- */

static int64_t offset_of(const struct loop *l, const struct operand *o, const int64_t *at) {
    int64_t offset = 0;
    for (int d = 0; d < l->ndim; d++) offset += at[d] * o->stride[d];
    return offset;
}

static void advance(const struct loop *l, int64_t *at, int64_t by) {
    int d = l->ndim - 1;
    at[d] += by;
    for (; d > 0 && at[d] >= l->shape[d]; d--) {
        int64_t rows = at[d] / l->shape[d];
        at[d] -= rows * l->shape[d];
        at[d - 1] += rows;
    }
}

/* n elements from one line to another, strides in elements. */
static void move_line(size_t bytes, int64_t n, char *to, int64_t ts, const char *from, int64_t fs) {
#define MOVE(T)                                                                                    \
    do {                                                                                           \
        T *t = (T *)(void *)to;                                                                    \
        const T *f = (const T *)(const void *)from;                                                \
        if (ts == 1 && fs == 0)                                                                    \
            for (int64_t i = 0; i < n; i++) t[i] = *f;                                             \
        else                                                                                       \
            for (int64_t i = 0; i < n; i++) t[i * ts] = f[i * fs];                                 \
    } while (0)
    switch (bytes) {
    case 1: MOVE(uint8_t); break;
    case 2: MOVE(uint16_t); break;
    case 4: MOVE(uint32_t); break;
    default: MOVE(uint64_t); break;
    }
#undef MOVE
}

/* m elements from index `start` on between the operand's memory and contiguous memory. */
static void move_rows(const struct loop *l, const struct operand *o, const int64_t *start,
                      int64_t m, char *flat, bool put) {
    int last = l->ndim - 1;
    int64_t at[XT_MAX_DIMS];
    memcpy(at, start, (size_t)l->ndim * sizeof *at);
    while (m > 0) {
        int64_t run = l->shape[last] - at[last];
        if (run > m) run = m;
        char *row = o->data + offset_of(l, o, at) * (int64_t)o->bytes;
        if (put)
            move_line(o->bytes, run, row, o->stride[last], flat, 1);
        else
            move_line(o->bytes, run, flat, 1, row, o->stride[last]);
        flat += run * (int64_t)o->bytes;
        m -= run;
        advance(l, at, run);
    }
}

/* Where a block stands. */
struct place {
    int64_t i;               /* its first element, in row-major order */
    int64_t m;               /* its elements */
    int64_t at[XT_MAX_DIMS]; /* the index of the first */
};

/* The block of an operand where it lies contiguous in memory, or NULL. */
static inline char *in_place(const struct loop *l, const struct operand *o, const struct place *b) {
    if (o->linear) return o->data + b->i * (int64_t)o->bytes;
    int last = l->ndim - 1;
    if (o->stride[last] != 1 || b->m > l->shape[last] - b->at[last]) return NULL;
    return o->data + offset_of(l, o, b->at) * (int64_t)o->bytes;
}

/* The block of an input, as the type computed in. into: where it must go, or NULL for anywhere. */
static const void *fetch(const struct loop *l, int k, const struct place *b, struct scratch *s,
                         void *into) {
    const struct operand *o = &l->in[k];
    void *to = into ? into : s->block[k];
    const void *from = s->block[k]; /* filled once, when constant */
    if (!o->constant) {
        from = in_place(l, o, b);
        if (!from) {
            char *flat = o->dtype == o->compute ? to : s->raw;
            move_rows(l, o, b->at, b->m, flat, false);
            from = flat;
        }
        if (o->dtype != o->compute) {
            XT_CPU(convert)(from, o->dtype, b->m, to, o->compute);
            return to;
        }
    }
    if (!into || from == into) return from;
    memcpy(into, from, (size_t)b->m * xt_dtype_bytes(o->compute));
    return into;
}

/* Where the block function writes an output: its memory, or a block for `store` to put there. */
static void *target(const struct loop *l, int k, const struct place *b, struct scratch *s) {
    const struct operand *o = &l->out[k];
    char *memory = o->dtype == o->compute ? in_place(l, o, b) : NULL;
    return memory ? memory : s->block[MAX_IN + k];
}

static void store(const struct loop *l, int k, const struct place *b, struct scratch *s,
                  void *block) {
    const struct operand *o = &l->out[k];
    if (block != s->block[MAX_IN + k]) return;
    char *memory = in_place(l, o, b);
    if (o->dtype != o->compute) {
        void *to = memory ? memory : s->raw;
        XT_CPU(convert)(block, o->compute, b->m, to, o->dtype);
        if (memory) return;
        block = s->raw;
    }
    move_rows(l, o, b->at, b->m, block, true);
}

/* ---- the loop -------------------------------------------------------------------------------- */

/* The blocks of operands that are the same number everywhere. */
static void fill_constants(const struct loop *l, int64_t n, struct scratch *s) {
    for (int k = 0; k < l->n_in; k++) {
        const struct operand *o = &l->in[k];
        char value[sizeof(double)];
        if (!o->data || !o->constant) continue;
        XT_CPU(convert)(o->data, o->dtype, 1, value, o->compute);
        move_line(xt_dtype_bytes(o->compute), n < BLOCK ? n : BLOCK, s->block[k], 1, value, 0);
    }
}

/* Elements first .. end - 1. */
static void run_part(const struct loop *l, int64_t first, int64_t end) {
    struct scratch s;
    struct place b = {.i = first};
    int64_t rest = first, inner = l->shape[l->ndim - 1];
    for (int d = l->ndim - 1; d >= 0; rest /= l->shape[d--]) b.at[d] = rest % l->shape[d];
    fill_constants(l, end - first, &s);
    while (b.i < end) {
        b.m = end - b.i < l->longest ? end - b.i : l->longest;
        int64_t row = inner - b.at[l->ndim - 1];
        if (l->ndim > 1 && inner >= SHORT_ROW && b.m > row) b.m = row;
        void *out[MAX_OUT];
        for (int k = 0; k < l->n_out; k++) out[k] = target(l, k, &b, &s);
        if (l->block) {
            const void *in[MAX_IN];
            for (int k = 0; k < l->n_in; k++)
                in[k] = l->in[k].data ? fetch(l, k, &b, &s, NULL) : in[0];
            l->block(b.m, in, out, l->p);
        } else {
            fetch(l, 0, &b, &s, out[0]);
        }
        for (int k = 0; k < l->n_out; k++) store(l, k, &b, &s, out[k]);
        b.i += b.m;
        advance(l, b.at, b.m);
    }
}

/* ---- patches --------------------------------------------------------------------------------- */

/* rows x cols elements at index `at` between an operand's memory and a block of that many; line by
   line in the direction in which the memory is dense. */
static void move_patch(const struct loop *l, const struct operand *o, const int64_t *at,
                       int64_t rows, int64_t cols, char *block, bool put) {
    int64_t bytes = (int64_t)o->bytes, rs = o->stride[l->across], cs = o->stride[l->ndim - 1];
    char *memory = o->data + offset_of(l, o, at) * bytes;
    bool by_cols = rs == 1;
    int64_t lines = by_cols ? cols : rows, n = by_cols ? rows : cols;
    int64_t step = by_cols ? cs : rs, stride = by_cols ? rs : cs;
    int64_t block_step = by_cols ? 1 : cols, block_stride = by_cols ? cols : 1;
    /* All lines at once, for each is a miss of its own. */
    for (int64_t i = 0; i < lines && by_cols; i++)
        for (int64_t far = 0; far < n * bytes; far += 64)
            __builtin_prefetch(memory + i * step * bytes + far);
    for (int64_t i = 0; i < lines; i++) {
        char *m = memory + i * step * bytes, *b = block + i * block_step * bytes;
        if (put)
            move_line(o->bytes, n, m, stride, b, block_stride);
        else
            move_line(o->bytes, n, b, block_stride, m, stride);
    }
}

/* The patch of rows x cols elements at index `at`. */
static void run_patch(const struct loop *l, const int64_t *at, int64_t rows, int64_t cols,
                      struct scratch *s) {
    const void *in[MAX_IN];
    void *out[MAX_OUT];
    for (int k = 0; k < l->n_in; k++) {
        const struct operand *o = &l->in[k];
        in[k] = s->block[k];
        if (!o->data) in[k] = in[0];
        if (!o->data || o->constant) continue;
        char *block = o->dtype == o->compute ? s->block[k] : s->raw;
        move_patch(l, o, at, rows, cols, block, false);
        if (block == s->raw) XT_CPU(convert)(block, o->dtype, rows * cols, s->block[k], o->compute);
    }
    for (int k = 0; k < l->n_out; k++) out[k] = l->block ? s->block[MAX_IN + k] : s->block[0];
    if (l->block) l->block(rows * cols, in, out, l->p);
    for (int k = 0; k < l->n_out; k++) {
        const struct operand *o = &l->out[k];
        if (o->dtype != o->compute) {
            XT_CPU(convert)(out[k], o->compute, rows * cols, s->raw, o->dtype);
            out[k] = s->raw;
        }
        move_patch(l, o, at, rows, cols, out[k], true);
    }
}

static int64_t patches_along(const struct loop *l, int d) {
    int64_t size = d == l->across ? PATCH_ROWS : PATCH_COLS;
    return (l->shape[d] + size - 1) / size;
}

/* Patches first .. end - 1, counted along the last dimension, then `across`, then the others. */
static void run_patches(const struct loop *l, int64_t first, int64_t end) {
    struct scratch s;
    int across = l->across, last = l->ndim - 1;
    fill_constants(l, BLOCK, &s);
    for (int64_t unit = first; unit < end; unit++) {
        int64_t at[XT_MAX_DIMS], rest = unit, cols = patches_along(l, last);
        int64_t rows = patches_along(l, across);
        at[last] = rest % cols * PATCH_COLS;
        rest /= cols;
        at[across] = rest % rows * PATCH_ROWS;
        rest /= rows;
        for (int d = last - 1; d >= 0; d--) {
            if (d == across) continue;
            at[d] = rest % l->shape[d];
            rest /= l->shape[d];
        }
        rows = l->shape[across] - at[across];
        cols = l->shape[last] - at[last];
        run_patch(l, at, rows < PATCH_ROWS ? rows : PATCH_ROWS,
                  cols < PATCH_COLS ? cols : PATCH_COLS, &s);
    }
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* Whether an operand is dense along d and far apart along the last dimension, both long. */
static bool lies_across(const struct loop *l, const struct operand *o, int d) {
    int last = l->ndim - 1;
    return o->stride[d] == 1 && o->stride[last] >= SHORT_ROW && l->shape[d] >= PATCH_COLS &&
           l->shape[last] >= PATCH_COLS;
}

/* Which operands lie how, and how long blocks may get. */
static void plan(struct loop *l) {
    merge_dims(l);
    int last = l->ndim - 1;
    bool rows = l->shape[last] >= SHORT_ROW;
    l->longest = INT64_MAX;
    l->across = -1;
    for (int k = 0; k < l->n_in + l->n_out; k++) {
        struct operand *o = operand_at(l, k);
        if (!o->data) continue;
        o->linear = true;
        o->constant = k < l->n_in;
        for (int64_t d = last, after = 1; d >= 0; after *= l->shape[d--]) {
            o->linear = o->linear && o->stride[d] == after;
            o->constant = o->constant && o->stride[d] == 0;
        }
        for (int d = 0; d < last; d++)
            if (lies_across(l, o, d)) l->across = d;
        bool direct = o->linear || (rows && o->stride[last] == 1);
        if (!direct || o->dtype != o->compute) l->longest = BLOCK;
    }
}

/* Runs the block over all elements. The parts of threads change nothing: each element is its
   own. */
static void loop_run(struct xt_ctx *ctx, struct loop *l) {
    if (l->n == 0) return;
    plan(l);
    int64_t units = l->n, grid = BLOCK;
    void (*run)(const struct loop *, int64_t, int64_t) = run_part;
    if (l->across >= 0) {
        run = run_patches;
        units = l->n / l->shape[l->across] / l->shape[l->ndim - 1] * patches_along(l, l->across) *
                patches_along(l, l->ndim - 1);
        grid = 1;
    }
    int threads = xt_threads(ctx);
    if (l->n <= XT_CPU_GRAIN || threads == 1) {
        run(l, 0, units);
        return;
    }
    int64_t each = (units / threads / grid + 1) * grid;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
        int64_t first = t * each, end = first + each < units ? first + each : units;
        if (first < end) run(l, first, end);
    }
}

#endif
