/*
 * pointwise_loop.h: runs a function of contiguous blocks over tensors of any strides and dtypes.
 *
 * The one thing to know: strides, broadcasting, 16-bit floats and threads are handled here, once. A
 * block function sees plain arrays of the type it computes in: the tensor's own memory where that
 * will do, else a block gathered and converted on the stack. Dimensions that lie one behind the other
 * for every operand are merged first, so that most calls are one loop.
 */
#ifndef XT_CPU_POINTWISE_LOOP_H
#define XT_CPU_POINTWISE_LOOP_H

#include <string.h>

#include "cpu.h"

#define BLOCK 512    /* elements gathered or converted at a time */
#define SHORT_ROW 64 /* rows shorter than this are gathered together into blocks */
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

/* ---- one operand ------------------------------------------------------------------------------ */

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

/* n elements between a strided row and contiguous memory, in the direction of `put`. */
static void move_row(char *row, int64_t stride, size_t bytes, int64_t n, char *flat, bool put) {
#define MOVE(T)                                                                                    \
    do {                                                                                           \
        T *r = (T *)(void *)row, *f = (T *)(void *)flat;                                           \
        if (put)                                                                                   \
            for (int64_t i = 0; i < n; i++) r[i * stride] = f[i];                                  \
        else                                                                                       \
            for (int64_t i = 0; i < n; i++) f[i] = r[i * stride];                                  \
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
        move_row(o->data + offset_of(l, o, at) * (int64_t)o->bytes, o->stride[last], o->bytes, run,
                 flat, put);
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

/* ---- the loop --------------------------------------------------------------------------------- */

/* Elements first .. end - 1. */
static void run_part(struct loop *l, int64_t first, int64_t end) {
    struct scratch s;
    struct place b = {.i = first};
    int64_t rest = first, inner = l->shape[l->ndim - 1];
    for (int d = l->ndim - 1; d >= 0; rest /= l->shape[d--]) b.at[d] = rest % l->shape[d];
    for (int k = 0; k < l->n_in; k++) {
        const struct operand *o = &l->in[k];
        if (!o->data || !o->constant) continue;
        int64_t n = end - first < BLOCK ? end - first : BLOCK;
        char value[sizeof(double)];
        XT_CPU(convert)(o->data, o->dtype, 1, value, o->compute);
        move_row(value, 0, xt_dtype_bytes(o->compute), n, s.block[k], false);
    }
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

/* Which operands lie how, and how long blocks may get. */
static void plan(struct loop *l) {
    merge_dims(l);
    int last = l->ndim - 1;
    bool rows = l->shape[last] >= SHORT_ROW;
    l->longest = INT64_MAX;
    for (int k = 0; k < l->n_in + l->n_out; k++) {
        struct operand *o = operand_at(l, k);
        if (!o->data) continue;
        o->linear = true;
        o->constant = k < l->n_in;
        for (int64_t d = last, after = 1; d >= 0; after *= l->shape[d--]) {
            o->linear = o->linear && o->stride[d] == after;
            o->constant = o->constant && o->stride[d] == 0;
        }
        bool direct = o->linear || (rows && o->stride[last] == 1);
        if (!direct || o->dtype != o->compute) l->longest = BLOCK;
    }
}

/* Runs the block over all elements. The parts of threads change nothing: each element is its own. */
static void loop_run(struct xt_ctx *ctx, struct loop *l) {
    if (l->n == 0) return;
    plan(l);
    int threads = xt_threads(ctx);
    if (l->n <= XT_CPU_GRAIN || threads == 1) {
        run_part(l, 0, l->n);
        return;
    }
    int64_t each = (l->n / threads / BLOCK + 1) * BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
        int64_t first = t * each, end = first + each < l->n ? first + each : l->n;
        if (first < end) run_part(l, first, end);
    }
}

#endif
