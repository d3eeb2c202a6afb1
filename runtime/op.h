/*
 * op.h: what an op is. The one header that ops and kernels share.
 *
 * An op is declared once, as one `struct xt_op`: name, parameters, shape rule, what backward needs
 * kept, its backward, one line of documentation. From that row come the Lua binding, the argument
 * errors, the docs, the editor types and the tests. A kernel is one `struct xt_kernel` in the table
 * of a backend, found by the op's name. A missing kernel row means unsupported, and says so.
 */
#ifndef XT_OP_H
#define XT_OP_H

#include <string.h>

#include "half.h"
#include "xtrain.h"

#define XT_MAX_PARAMS 16
#define XT_MAX_OUTPUTS 4
#define XT_MAX_INTS 24
#define XT_APART 2 /* gradients of an output beside the first that a rule may take apart */

/* ---- the tensor, as kernels see it ---------------------------------------------------------- */

struct xt_storage {
    int refs;
    enum xt_device device;
    size_t bytes;          /* asked for */
    size_t capacity;       /* of the block: bytes rounded up to its size class */
    void *data;            /* 64-byte aligned; NULL when capacity is 0 */
    uint64_t version;      /* grows with every write in place */
    int64_t number;        /* counts storages, from 1: older than a segment or made inside it */
    struct xt_where made;  /* the line that made it */
    struct xt_where wrote; /* the line of the last write in place */
    uint64_t mark;         /* of the walk that counted it last */
    bool hollow; /* has no bytes: a value of a graph being recorded that depends on an input */
    bool loaded; /* bytes came from the host, not from an op */
    struct xt_storage *prev, *next; /* all storages of the context */
};

struct xt_tensor {
    int refs;
    int ndim;
    enum xt_dtype dtype;
    int maker_output; /* which output of maker this is */
    struct xt_storage *storage;
    int64_t offset; /* first element, counted in elements from the storage's start */
    int64_t shape[XT_MAX_DIMS];
    int64_t stride[XT_MAX_DIMS]; /* in elements; 0 for a broadcast dimension */
    struct xt_call *maker;       /* the record that made it, or NULL */
    struct xt_leaf *leaf;        /* set on a variable and on its compute copies */
};

static inline void *xt_data(const struct xt_tensor *t) {
    return (char *)t->storage->data + (size_t)t->offset * xt_dtype_bytes(t->dtype);
}

static inline bool xt_has_shape(const struct xt_tensor *t, const int64_t *shape, int ndim) {
    return t->ndim == ndim && memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) == 0;
}

/* ---- parameters and attributes -------------------------------------------------------------- */

/*
 * Inputs and attributes are numbered apart, each in the order of the parameters. A parameter of
 * kind TENSOR takes one input slot (NULL when optional and left out). TENSORS takes all inputs from
 * its slot on: it is the last tensor parameter. SEED takes an attribute AND an input slot: a 0-dim
 * i64 tensor there overrides the attribute (kernels ask xt_launch_seed). All others take an
 * attribute.
 */
enum xt_param_kind {
    XT_P_TENSOR,
    XT_P_TENSORS, /* a list of one or more */
    XT_P_SEED,    /* 64-bit integer, or a 0-dim i64 tensor */
    XT_P_INT,
    XT_P_REAL,
    XT_P_BOOL,
    XT_P_DIM,    /* counted from 0 here; negative counted from the end is resolved by xt_call_run
                    against input 0 (rank + 1 places for XT_NEW_DIM ops) */
    XT_P_DIMS,   /* list of dims; an empty list (the default) means all */
    XT_P_SHAPE,  /* list of sizes; -1 allowed where the op says so */
    XT_P_CHOICE, /* index into choices */
    XT_P_DTYPE,
};

struct xt_param {
    const char *name; /* NULL ends the list */
    enum xt_param_kind kind;
    bool optional;       /* may be left out: then `fallback` (or NULL tensor, empty list) */
    bool named;          /* given in the options table, not by position */
    double fallback;     /* default of INT, REAL, BOOL, DIM, CHOICE (its index), DTYPE */
    const char *choices; /* "a|b|c" for CHOICE */
};

/* Whether a parameter takes an input slot, or an attribute: a SEED takes both. */
static inline bool xt_takes_slot(const struct xt_param *p) {
    return p->kind == XT_P_TENSOR || p->kind == XT_P_TENSORS || p->kind == XT_P_SEED;
}

static inline bool xt_takes_attr(const struct xt_param *p) {
    return p->kind != XT_P_TENSOR && p->kind != XT_P_TENSORS;
}

union xt_attr {
    int64_t i;     /* INT, BOOL, DIM, CHOICE, DTYPE */
    uint64_t seed; /* SEED */
    double f;      /* REAL */
    struct {
        int start, count; /* of the values in ints: DIMS, SHAPE */
    } list;
};

/* The arguments of one call. Attributes not filled in by the caller come from xt_args_init. */
struct xt_args {
    struct xt_tensor *const *inputs;
    int n_inputs;
    int n_ints;                         /* used of ints */
    union xt_attr attrs[XT_MAX_PARAMS]; /* in the order of the non-tensor parameters and seeds */
    int64_t ints[XT_MAX_INTS];          /* the values of DIMS and SHAPE attributes */
};

/* Sets every attribute to its default. */
void xt_args_init(struct xt_args *args, const struct xt_op *op, struct xt_tensor *const *inputs,
                  int n_inputs);
/* Appends n values and makes attribute `attr` that list. n must fit (asserted). */
void xt_args_list(struct xt_args *args, int attr, const int64_t *values, int n);

/* ---- the op row ------------------------------------------------------------------------------ */

/* What the shape rule fills in for an output. Views also say where the output lies in input 0. */
struct xt_output {
    struct xt_spec spec;
    int64_t stride[XT_MAX_DIMS]; /* views only */
    int64_t offset;              /* views only: absolute, in elements of the storage */
};

enum xt_op_flags {
    XT_VIEW = 1,        /* the output aliases input 0: shape rule gives strides, no kernel */
    XT_NO_GRADIENT = 2, /* said explicitly: not differentiable; outputs never require gradients */
    XT_COMPOSED = 4,    /* `compose` runs other ops instead of a kernel */
    XT_EXPENSIVE = 8,   /* a selective segment keeps its outputs */
    XT_INTERNAL = 16,   /* backward helpers and the like: not in xt.op */
    XT_NEW_DIM = 32,    /* DIM may name the place after the last: stack */
};

/* Filled by the tape for a backward rule. Kept values are there when the row keeps them. */
struct xt_grads {
    const struct xt_call *call; /* the record: attributes by xt_call_attr and friends */
    int n_inputs, n_outputs;
    struct xt_tensor **in;  /* kept inputs, NULL when not kept or not given */
    struct xt_tensor **out; /* kept outputs */
    const struct xt_spec
        *in_spec; /* of every input, kept or not; of optional ones left out: zeros */
    const struct xt_spec *out_spec; /* of every output */
    struct xt_tensor **grad_out; /* gradient of each output; NULL means zero. Output 0 of an op with
                                        one visible output is never NULL */
    struct xt_tensor *const *more; /* XT_APART: to be added to grad_out[0], contiguous, or NULL */
    const bool *wants;             /* which inputs want a gradient */
    struct xt_tensor **grad_in; /* the rule's answer: new references; NULL means zero. A gradient of
                                        a shape that broadcasts is summed down by the tape */
};

typedef enum xt_status xt_infer_fn(struct xt_ctx *ctx, const struct xt_op *op,
                                   const struct xt_args *args, struct xt_output *outputs);
typedef enum xt_status xt_compose_fn(struct xt_ctx *ctx, const struct xt_op *op,
                                     const struct xt_args *args, struct xt_tensor **outputs);
typedef enum xt_status xt_backward_fn(struct xt_ctx *ctx, struct xt_grads *g);

struct xt_op {
    const char *name;
    const char *doc;               /* one line: the formula and shapes */
    const struct xt_param *params; /* ended by {0} */
    int n_outputs;                 /* all of them; 0 for an op that only writes its inputs */
    int n_hidden;    /* the last n_hidden are kept for backward and never shown; kernels
                                      get NULL for them when nothing is recorded */
    unsigned flags;  /* enum xt_op_flags */
    unsigned dtypes; /* mask of 1u << dtype for input 0; 0: any */
    unsigned keeps_in, keeps_out; /* masks of inputs and outputs that backward needs; bit 31 stands
                                      for all inputs from 31 on */
    unsigned keeps_for[2];  /* of two inputs: what the gradient of each needs of keeps_in, when that
                               differs; both 0: all of it */
    unsigned writes;        /* mask of inputs written in place, as keeps_in */
    xt_infer_fn *infer;     /* checks shapes and dtypes, fills outputs */
    xt_compose_fn *compose; /* with XT_COMPOSED */
    xt_backward_fn *backward; /* NULL only with XT_NO_GRADIENT, XT_INTERNAL or XT_COMPOSED */
    /* What backward runs when output 0 has several gradients, or NULL: where a device has its
       kernel they come apart, in xt_grads.more, and are not added up before. */
    const struct xt_op *several;
    /* With a TENSORS list and writes: how many tensors one group has and which of a group are
       written; e.g. adamw's (p, g, m, v, copy) with bits 0, 2, 3, 4. group 0: no groups. */
    int write_group;
    unsigned write_group_mask;
};

#define XT_BIT(dtype) (1u << (dtype))
#define XT_FLOATS (XT_BIT(XT_F32) | XT_BIT(XT_BF16) | XT_BIT(XT_F16) | XT_BIT(XT_F64))
#define XT_INTS (XT_BIT(XT_I32) | XT_BIT(XT_I64) | XT_BIT(XT_U8))
#define XT_ANY (XT_FLOATS | XT_INTS)

/* What a float dtype is computed and summed in. */
static inline enum xt_dtype xt_arithmetic(enum xt_dtype dtype) {
    return dtype == XT_F64 ? XT_F64 : XT_F32;
}

/* One line for each ops file: its rows, ended by NULL. call.c lists the files. */
typedef const struct xt_op *const xt_op_list[];

/* ---- what a kernel is ------------------------------------------------------------------------ */

struct xt_launch {
    const struct xt_op *op;
    struct xt_tensor *const *in; /* NULL for an optional one left out */
    int n_in;
    struct xt_tensor *const *out; /* allocated, contiguous; NULL for a hidden one nobody needs */
    int n_out;
    const union xt_attr *attrs;
    const int64_t *ints;
};

/* The seed of the SEED parameter whose input slot is `input` and attribute is `attr` (CPU). */
uint64_t xt_launch_seed(const struct xt_launch *l, int attr, int input);

typedef enum xt_status xt_kernel_fn(struct xt_ctx *ctx, const struct xt_launch *l);

/* How inputs may lie. The launch point copies those that do not fit, so results are the same
   bits. */
enum xt_layout {
    XT_CONTIGUOUS, /* kernels get contiguous inputs (optional NULLs aside) */
    XT_INNER,      /* the last dimension has stride 1 (or size <= 1), others any multiple */
    XT_STRIDED,    /* any strides, 0 included */
};

struct xt_kernel {
    const char *op;
    unsigned dtypes; /* of input 0, mask */
    enum xt_layout layout;
    xt_kernel_fn *run;
};

/* ---- what a backend is ----------------------------------------------------------------------- */

/*
 * A device: its memory and its kernels. Work on a device other than the CPU is queued in the order
 * of the calls and may not be done when they return; to_host and finish wait for it.
 */
struct xt_backend {
    const char *name;                       /* "cpu" */
    const struct xt_kernel *const *kernels; /* tables, ended by NULL */
    /* Opens the device and sets what xt_backend_state then returns; XT_DEVICE where there is
       none, with the reason. NULL: nothing to open. */
    enum xt_status (*open)(struct xt_ctx *ctx, void **state);
    void (*close)(struct xt_ctx *ctx, void *state);
    /* Memory straight from the system, aligned to 512 bytes; NULL when there is none left. */
    void *(*allocate)(struct xt_ctx *ctx, size_t bytes);
    void (*release)(struct xt_ctx *ctx, void *data);
    /* Bytes between the host and this device's memory. The host's may be used again when they
       return. */
    enum xt_status (*to_host)(struct xt_ctx *ctx, void *host, const void *data, size_t bytes);
    enum xt_status (*from_host)(struct xt_ctx *ctx, void *data, const void *host, size_t bytes);
    /* Sets every byte; poisons memory. */
    enum xt_status (*fill)(struct xt_ctx *ctx, void *data, int byte, size_t bytes);
    /* Waits for all that was queued and reports what went wrong in it. */
    enum xt_status (*finish)(struct xt_ctx *ctx);
    /* One line for people: model, memory, versions. */
    void (*describe)(struct xt_ctx *ctx, char *text, size_t bytes);
    /* The name of the device, and the version of the library of its products; NULL: none. */
    enum xt_status (*product_library)(struct xt_ctx *ctx, char *device, size_t bytes,
                                      int64_t *version);
};

void *xt_backend_state(const struct xt_ctx *ctx, enum xt_device device);
/* Counts a wait of the host for the device: a training step has none. */
void xt_count_wait(struct xt_ctx *ctx, enum xt_device device);
/* The recipe's line that makes the current call. */
struct xt_where xt_here(struct xt_ctx *ctx);

/* ---- what kernels and composed ops may call -------------------------------------------------- */

/* Scratch memory of the op's device, 64-byte aligned, uninitialised; put back before returning.
   Counts as live bytes while held. bytes may be 0 (then *out may be NULL). */
enum xt_status xt_scratch_get(struct xt_ctx *ctx, enum xt_device device, size_t bytes, void **out);
void xt_scratch_put(struct xt_ctx *ctx, enum xt_device device, void *data, size_t bytes);

/*
 * oneDNN, where the library is there and the processor multiplies bf16 (onednn.c); kernels have
 * their own product for all other cases. A job is one product c = a @ b of a fixed shape for one
 * thread, c being f32 with rows n apart. Prepared outside of parallel regions, run inside one by
 * its thread; the last 32 prepared for a thread live. NULL or false: not served.
 */
struct xt_onednn_product {
    enum xt_dtype dtype;                /* of a and b: bf16 or f32 */
    int64_t m, n, k;                    /* a is m x k, b is k x n */
    int64_t a_row, a_col, b_row, b_col; /* strides in elements */
};
struct xt_onednn_job;
bool xt_onednn_serves(struct xt_ctx *ctx);
struct xt_onednn_job *xt_onednn_prepare(struct xt_ctx *ctx, int thread,
                                        const struct xt_onednn_product *product);
bool xt_onednn_run(struct xt_ctx *ctx, int thread, struct xt_onednn_job *job, const void *a,
                   const void *b, float *c);

/* ---- choice.c: the algorithms of matrix products on a GPU ------------------------------------ */

/*
 * What describes a product to the library: c = a @ b, sizes and strides in elements. Compared as
 * bytes, so it is zeroed before it is filled.
 */
struct xt_choice_key {
    int64_t m, n, k, batch;            /* a is m x k, b is k x n */
    int64_t lda, ldb, ldc;             /* between rows, or between columns where turned */
    int64_t a_batch, b_batch, c_batch; /* from one product of the batch to the next */
    int32_t in, out;                   /* enum xt_dtype: of a and b, and of c */
    int32_t a_turned, b_turned;        /* stored by columns */
    int32_t bias, add;                 /* whether a bias is added, and whether c is added to */
    int32_t a_align, b_align, c_align; /* bytes, at most 64 */
    int32_t unused;                    /* no padding that would not be zero */
};

enum xt_choice_from {
    XT_FROM_LIBRARY, /* its first */
    XT_FROM_TABLE,   /* kernels/products.def */
    XT_FROM_RUN,     /* a run that is gone on with, or made again */
    XT_FROM_TUNING,  /* measured in this process: goes into the table */
};

#define XT_CHOICE_DEVICE 64
#define XT_CHOICE_WORDS 8
#define XT_CHOICE_TEXT 768 /* bytes that hold every row */

struct xt_choice {
    char device[XT_CHOICE_DEVICE]; /* "NVIDIA H200" */
    int64_t version;               /* of the library, in its own counting */
    struct xt_choice_key key;
    uint64_t words[XT_CHOICE_WORDS]; /* the algorithm, opaque, of this version of the library */
    enum xt_choice_from from;
    bool used; /* in this process */
    /* Of tuning: how many algorithms were measured (0: none were), and the microseconds of the one
       that would have been taken and of the one that is. */
    int measured;
    double before_us, after_us;
};

struct xt_choices *xt_choices_new(void); /* NULL when memory is out */
void xt_choices_free(struct xt_choices *set);
/* NULL: there is none. Valid until the set changes. */
const struct xt_choice *xt_choices_find(const struct xt_choices *set, const char *device,
                                        int64_t version, const struct xt_choice_key *key);
/* Takes the place of what was chosen for the same product, device and version. */
enum xt_status xt_choices_put(struct xt_ctx *ctx, struct xt_choices *set,
                              const struct xt_choice *choice);
/* Puts all rows of a text; XT_FORMAT names line and field, and the set is as it was. */
enum xt_status xt_choices_read(struct xt_ctx *ctx, struct xt_choices *set, const char *text,
                               const char *name, enum xt_choice_from from);
/* All, sorted; the caller frees the list, whose rows are the set's. */
enum xt_status xt_choices_list(struct xt_ctx *ctx, const struct xt_choices *set,
                               const struct xt_choice ***out, int *n);
/* One row as text, with a new line at its end. XT_CHOICE_TEXT bytes are enough. */
void xt_choice_write(const struct xt_choice *c, char *text, size_t bytes);

/* The context's: of the table at first. */
enum xt_status xt_choices_of(struct xt_ctx *ctx, struct xt_choices **out);
/* Those of a run, before others; what was chosen already is chosen anew. */
enum xt_status xt_choices_use(struct xt_ctx *ctx, const char *text, const char *name);
/* Back to the table alone, and to no tuning: for a new run. */
void xt_choices_reset(struct xt_ctx *ctx);
int xt_choices_changed(const struct xt_ctx *ctx); /* another number when choices are to be looked
                                                     up anew */
/* While on, each product is measured when it is first met, and the fastest algorithm taken. This
   waits for the device, and other runs give other choices: never in a run that counts. */
void xt_tune(struct xt_ctx *ctx, bool on);
bool xt_tuning(const struct xt_ctx *ctx);
uint64_t xt_choices_digest(void); /* of the table that is compiled in */
/* The device's name and the library's version, which is opened for it. */
enum xt_status xt_product_library(struct xt_ctx *ctx, char device[XT_CHOICE_DEVICE],
                                  int64_t *version);

/* The width that swiglu_mlp works in for an x and a gate: ffn or, where tensor cores take that
   slowly and the product is large, the next multiple of 8. */
int64_t xt_mlp_width(const struct xt_tensor *x, const struct xt_tensor *gate);

/* Runs an op by its row: inputs by position, attributes at their defaults or from `args`. */
enum xt_status xt_apply(struct xt_ctx *ctx, const struct xt_op *op, struct xt_tensor *const *inputs,
                        int n_inputs, struct xt_tensor **outputs);
/* The same by name, for rows that live in another file: asserts that the op exists. */
enum xt_status xt_apply_name(struct xt_ctx *ctx, const char *name, struct xt_tensor *const *inputs,
                             int n_inputs, struct xt_tensor **outputs);
/* One-output conveniences for backward rules and composed ops. */
enum xt_status xt_unary(struct xt_ctx *ctx, const char *name, struct xt_tensor *x,
                        struct xt_tensor **out);
enum xt_status xt_binary(struct xt_ctx *ctx, const char *name, struct xt_tensor *a,
                         struct xt_tensor *b, struct xt_tensor **out);
enum xt_status xt_scale(struct xt_ctx *ctx, struct xt_tensor *x, double by, struct xt_tensor **out);
enum xt_status xt_cast(struct xt_ctx *ctx, struct xt_tensor *x, enum xt_dtype dtype,
                       struct xt_tensor **out); /* x itself, retained, when it has that dtype */
enum xt_status xt_contiguous(struct xt_ctx *ctx, struct xt_tensor *x, struct xt_tensor **out);
enum xt_status xt_reshape(struct xt_ctx *ctx, struct xt_tensor *x, const int64_t *shape, int ndim,
                          struct xt_tensor **out);
enum xt_status xt_expand(struct xt_ctx *ctx, struct xt_tensor *x, const int64_t *shape, int ndim,
                         struct xt_tensor **out);
enum xt_status xt_transpose(struct xt_ctx *ctx, struct xt_tensor *x, int d1, int d2,
                            struct xt_tensor **out);
enum xt_status xt_sum_to(struct xt_ctx *ctx, struct xt_tensor *x, const int64_t *shape, int ndim,
                         struct xt_tensor **out); /* undoes broadcasting: the one place */
/* A tensor full of `value`. */
enum xt_status xt_full(struct xt_ctx *ctx, const struct xt_spec *spec, enum xt_device device,
                       double value, struct xt_tensor **out);

/* The attributes of a record, for backward rules. */
const union xt_attr *xt_call_attrs(const struct xt_call *call);
const int64_t *xt_call_ints(const struct xt_call *call);
/* The device of the record's outputs. */
enum xt_device xt_call_device(const struct xt_call *call);

/*
 * Where the gradient of input i may be accumulated without an extra pass: the leaf's own f32 (or
 * f64) gradient buffer of in_spec[i]'s shape, when input i is a leaf or a leaf's compute copy. On
 * XT_OK with *target non-NULL the rule must write (`*add` false) or add (`*add` true) the whole
 * gradient there, in that dtype, through an op whose row writes it, and leave grad_in[i] NULL.
 * *target NULL: give grad_in. The target is borrowed.
 */
enum xt_status xt_grads_target(struct xt_ctx *ctx, struct xt_grads *g, int i,
                               struct xt_tensor **target, bool *add);

/*
 * What other records gave for the gradient of input i so far, contiguous, when it has the input's
 * shape and dtype: the rule then owns it and must count it into grad_in[i], which costs no extra
 * pass. NULL: there is none, and grad_in[i] is this record's share alone, as ever.
 */
enum xt_status xt_grads_take(struct xt_ctx *ctx, struct xt_grads *g, int i, struct xt_tensor **out);
/* Whether someone looks on: a rule that has taken something then says what its own share of
   grad_in[i] is, of one input. The reference is taken. */
bool xt_observed(const struct xt_ctx *ctx);
void xt_grads_share(struct xt_ctx *ctx, int i, struct xt_tensor *share);

/* Shape helpers for shape rules. */
/* Broadcasts two shapes, aligned at the last dimension; XT_SHAPE names both when they do not
   fit. */
enum xt_status xt_broadcast(struct xt_ctx *ctx, const struct xt_op *op, const struct xt_tensor *a,
                            const struct xt_tensor *b, struct xt_spec *out);
/* "argument `name`: given 2x3, wanted ..." Fails with XT_SHAPE unless t has exactly ndim dims. */
enum xt_status xt_want_ndim(struct xt_ctx *ctx, const struct xt_op *op, const char *name,
                            const struct xt_tensor *t, int ndim);
/* Fails with XT_DTYPE unless t has that dtype. */
enum xt_status xt_want_dtype(struct xt_ctx *ctx, const struct xt_op *op, const char *name,
                             const struct xt_tensor *t, enum xt_dtype dtype);
enum xt_status xt_want_same_dtype(struct xt_ctx *ctx, const struct xt_op *op, const char *a_name,
                                  const struct xt_tensor *a, const char *b_name,
                                  const struct xt_tensor *b);
/* output = the spec of t, contiguous. */
void xt_output_like(struct xt_output *output, const struct xt_tensor *t);
/* The shape rule of an op whose output is like its first input. */
xt_infer_fn xt_infer_like;
/* output = of dtype, contiguous, of the sizes that the SHAPE in attribute `attr` lists. XT_SHAPE
   unless each is 0 or more and they are not too many. */
enum xt_status xt_output_sized(struct xt_ctx *ctx, const struct xt_args *args, int attr,
                               enum xt_dtype dtype, struct xt_output *output);

/* Returns on failure. Only while nothing is owned; once something is, `goto done`. */
#define XT_TRY(expression)                                                                         \
    do {                                                                                           \
        enum xt_status try_status = (expression);                                                  \
        if (try_status != XT_OK) return try_status;                                                \
    } while (0)

/* Jumps to `done` with `status` set: for functions that own something. */
#define XT_GO(expression)                                                                          \
    do {                                                                                           \
        status = (expression);                                                                     \
        if (status != XT_OK) goto done;                                                            \
    } while (0)

#endif
