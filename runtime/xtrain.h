/*
 * xtrain.h: the whole public C API, grouped by noun; the C manual.
 *
 * Everything lives in a context, passed first; there is no global state, and a context belongs to
 * one thread at a time. What can fail returns enum xt_status and leaves one sentence in
 * xt_error(ctx): who, what was given, what was wanted. Out-parameters are written only on success,
 * and a call that failed changed nothing: it may simply be made again. `new` gives a reference,
 * `release` gives it back, everything else borrows. Dimensions count from 0 here (the Lua binding
 * counts from 1).
 */
#ifndef XTRAIN_H
#define XTRAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define XT_VERSION "0.1.0"
#define XT_MAX_DIMS 8

struct xt_ctx;
struct xt_storage;
struct xt_tensor;
struct xt_op;
struct xt_args;
struct xt_call;
struct xt_segment;
struct xt_graph;

/* ---- status ------------------------------------------------------------------------------- */

/* name, text: one list yields the enum, xt_status_name and the docs. */
#define XT_STATUS_LIST(X)                                                                          \
    X(OK, "success")                                                                               \
    X(ARGUMENT, "an argument is wrong: name, kind, value or range")                                \
    X(SHAPE, "shapes do not fit together")                                                         \
    X(DTYPE, "element types do not fit together")                                                  \
    X(DEVICE, "devices do not fit together, or there is no such device")                           \
    X(UNSUPPORTED, "no kernel for this op, device and dtype")                                      \
    X(MEMORY, "an allocation failed, after one collection and one retry")                          \
    X(STATE, "not possible in this state, e.g. a second backward")                                 \
    X(VALUE, "a number held in a tensor is out of range, e.g. a label")                            \
    X(INTERRUPTED, "the host asked to stop; nothing was changed")                                  \
    X(IO, "the operating system refused: open, read, write, rename")                               \
    X(FORMAT, "a file is not what its format says")

enum xt_status {
#define XT_STATUS_ENUM(name, text) XT_##name,
    XT_STATUS_LIST(XT_STATUS_ENUM)
#undef XT_STATUS_ENUM
};

const char *xt_status_name(enum xt_status status); /* "OK", "SHAPE", ... */
const char *xt_error(const struct xt_ctx *ctx);    /* the sentence of the last failure, or "" */
/* Leaves a sentence (printf-like) and returns `status`: `return xt_fail(ctx, XT_SHAPE, "...")`. */
enum xt_status xt_fail(struct xt_ctx *ctx, enum xt_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Puts "who: " before the sentence of the last failure, and returns `status` unchanged. */
enum xt_status xt_fail_in(struct xt_ctx *ctx, enum xt_status status, const char *who);

/* ---- context ------------------------------------------------------------------------------ */

/* Where in a recipe something was made. file is interned: it lives as long as the context. */
struct xt_where {
    const char *file; /* NULL when unknown */
    int line;         /* from 1; 0 when unknown */
};

/* What the host language lends the runtime. All may be NULL. */
struct xt_hooks {
    void *user;                                                           /* passed first */
    void (*locate)(void *user, struct xt_ctx *ctx, struct xt_where *out); /* the current line */
    void (*collect)(void *user);     /* run a full collection: an allocation has failed */
    bool (*interrupted)(void *user); /* asked before each call: whether it shall fail instead */
};

struct xt_ctx *xt_ctx_new(void); /* NULL when memory is out */
void xt_ctx_free(struct xt_ctx *ctx);
void xt_ctx_hooks(struct xt_ctx *ctx, const struct xt_hooks *hooks);
const char *xt_intern(struct xt_ctx *ctx, const char *text); /* same text, same pointer; or NULL */

int xt_threads(const struct xt_ctx *ctx);
void xt_set_threads(struct xt_ctx *ctx, int threads); /* results do not depend on it, to the bit */
const char *xt_isa(const struct xt_ctx *ctx);         /* "v1", "v3", "v4": the CPU kernels in use */

/* Recording is on unless no_grad was pushed more often than popped. */
void xt_no_grad_push(struct xt_ctx *ctx);
void xt_no_grad_pop(struct xt_ctx *ctx);
bool xt_recording(const struct xt_ctx *ctx);
/* With the trap on, the first op whose output holds a NaN or infinity fails; the sentence has
   statistics of its inputs. A -inf that an op was given, but for a variable's, is no fault. */
void xt_set_trap(struct xt_ctx *ctx, bool on);
/* The same without failing: the first one is noted, with op, line and direction, and the trap is
   off again. */
void xt_trap_note(struct xt_ctx *ctx, bool on);
const char *xt_trap_found(const struct xt_ctx *ctx); /* what was noted since, or "" */

/* What the launches of an op took since the start of profiling; views launch nothing. */
struct xt_profile_row {
    const char *op;      /* its name */
    int64_t calls;       /* launches */
    int64_t nanoseconds; /* until their results were there */
    int64_t bytes;       /* of their inputs and outputs, each counted once a launch */
};
enum xt_status xt_profile_start(struct xt_ctx *ctx);
void xt_profile_stop(struct xt_ctx *ctx);
/* One row an op, with those that did nothing; NULL and 0 where nothing is profiled. */
const struct xt_profile_row *xt_profile_rows(const struct xt_ctx *ctx, int *n);

/* ---- memory ------------------------------------------------------------------------------- */

enum xt_device { XT_CPU, XT_CUDA, XT_DEVICE_COUNT };

/* "cpu", "cuda" */
const char *xt_device_name(enum xt_device device);
/* Opens the device if it is not open yet: XT_DEVICE, with the reason, where there is none. The CPU
   is always open. A device is used only once it is open. */
enum xt_status xt_device_open(struct xt_ctx *ctx, enum xt_device device);
/* Where ops without inputs make their outputs; an open device. */
void xt_set_device(struct xt_ctx *ctx, enum xt_device device);
/* One line for people about an open device. */
void xt_device_describe(struct xt_ctx *ctx, enum xt_device device, char *text, size_t bytes);
/* Waits for everything queued on the open devices and reports what failed there, such as a label
   out of range. */
enum xt_status xt_devices_finish(struct xt_ctx *ctx);

struct xt_memory {
    size_t live_bytes;     /* in storages now */
    size_t peak_bytes;     /* largest live_bytes since the last reset */
    size_t reserved_bytes; /* taken from the system: live, cached and rounding */
    size_t made_bytes;     /* sum over all storages ever made: never falls */
    int64_t live_storages; /* count */
    int64_t system_allocs; /* how often the system was asked; does not grow in a steady loop */
    int64_t waits;         /* how often the host has waited for the device */
};

void xt_memory(const struct xt_ctx *ctx, enum xt_device device, struct xt_memory *out);
void xt_memory_reset_peak(struct xt_ctx *ctx, enum xt_device device);
void xt_memory_trim(struct xt_ctx *ctx, enum xt_device device); /* cached blocks to the system */
void xt_memory_limit(struct xt_ctx *ctx, enum xt_device device, size_t bytes); /* 0: no limit */
void xt_memory_poison(struct xt_ctx *ctx, bool on); /* fill new and freed blocks with NaNs */
void xt_memory_cache(struct xt_ctx *ctx, bool on);  /* off: every block goes back at once */
/* Objects and storages alive in this context; equal before and after a call that failed. */
int64_t xt_live_count(const struct xt_ctx *ctx);
/* The n-th allocation from now fails, n from 1 (and, after its retry, only that one). 0: never. */
void xt_fail_allocation(struct xt_ctx *ctx, int64_t n);
/* For each place (file and line) that holds storage bytes: called by falling size, at most
   `most`. */
typedef void xt_holder_fn(void *user, struct xt_where where, size_t bytes, int64_t storages);
void xt_memory_holders(struct xt_ctx *ctx, enum xt_device device, int most, xt_holder_fn *fn,
                       void *user);

/* ---- dtypes ------------------------------------------------------------------------------- */

/* name, text, bytes, is float */
#define XT_DTYPE_LIST(X)                                                                           \
    X(F32, "f32", 4, true)                                                                         \
    X(BF16, "bf16", 2, true)                                                                       \
    X(F16, "f16", 2, true)                                                                         \
    X(F64, "f64", 8, true)                                                                         \
    X(I32, "i32", 4, false)                                                                        \
    X(I64, "i64", 8, false)                                                                        \
    X(U8, "u8", 1, false)

enum xt_dtype {
#define XT_DTYPE_ENUM(name, text, bytes, is_float) XT_##name,
    XT_DTYPE_LIST(XT_DTYPE_ENUM)
#undef XT_DTYPE_ENUM
        XT_DTYPE_COUNT
};

const char *xt_dtype_name(enum xt_dtype dtype);            /* "bf16" */
bool xt_dtype_parse(const char *text, enum xt_dtype *out); /* false: no such dtype */
size_t xt_dtype_bytes(enum xt_dtype dtype);
bool xt_dtype_is_float(enum xt_dtype dtype);

/* ---- tensors ------------------------------------------------------------------------------ */

/* A shape and a dtype, without bytes. Sizes may be 0; a scalar has ndim 0. */
struct xt_spec {
    enum xt_dtype dtype;
    int ndim;
    int64_t shape[XT_MAX_DIMS];
};

/* Uninitialised; 0 <= sizes, ndim <= XT_MAX_DIMS. */
enum xt_status xt_tensor_new(struct xt_ctx *ctx, const struct xt_spec *spec, enum xt_device device,
                             struct xt_tensor **out);
/* A 0-dim tensor holding `value`, rounded once to dtype. */
enum xt_status xt_tensor_scalar(struct xt_ctx *ctx, double value, enum xt_dtype dtype,
                                enum xt_device device, struct xt_tensor **out);
/* From and to contiguous row-major bytes on the host. `bytes` must match exactly. */
enum xt_status xt_tensor_from_host(struct xt_ctx *ctx, const struct xt_spec *spec,
                                   enum xt_device device, const void *data, size_t bytes,
                                   struct xt_tensor **out);
enum xt_status xt_tensor_to_host(struct xt_ctx *ctx, struct xt_tensor *t, void *data, size_t bytes);
/* A contiguous copy on an open device; no gradient passes. */
enum xt_status xt_tensor_to_device(struct xt_ctx *ctx, struct xt_tensor *t, enum xt_device device,
                                   struct xt_tensor **out);
struct xt_tensor *xt_tensor_retain(struct xt_tensor *t);         /* returns t; NULL stays NULL */
void xt_tensor_release(struct xt_ctx *ctx, struct xt_tensor *t); /* NULL is fine */

int xt_ndim(const struct xt_tensor *t);
const int64_t *xt_shape(const struct xt_tensor *t);
const int64_t *xt_strides(const struct xt_tensor *t); /* in elements */
int64_t xt_numel(const struct xt_tensor *t);
enum xt_dtype xt_dtype_of(const struct xt_tensor *t);
enum xt_device xt_device_of(const struct xt_tensor *t);
size_t xt_nbytes(const struct xt_tensor *t); /* of its elements, contiguous */
bool xt_is_contiguous(const struct xt_tensor *t);
bool xt_same_storage(const struct xt_tensor *a, const struct xt_tensor *b);
void xt_spec_of(const struct xt_tensor *t, struct xt_spec *out);
/* One element, converted. index has ndim entries, each within its size (asserted). */
enum xt_status xt_tensor_get(struct xt_ctx *ctx, struct xt_tensor *t, const int64_t *index,
                             double *out);
enum xt_status xt_tensor_get_int(struct xt_ctx *ctx, struct xt_tensor *t, const int64_t *index,
                                 int64_t *out);
enum xt_status xt_tensor_set(struct xt_ctx *ctx, struct xt_tensor *t, const int64_t *index,
                             double value);
/* XXH3-64 over the XXH3-64s of successive 4 KiB blocks of the contiguous bytes, then dtype and
   shape (design, section 7). */
enum xt_status xt_tensor_digest(struct xt_ctx *ctx, struct xt_tensor *t, uint64_t *out);
/* All but the counts are of the finite elements; NaN when there are none. */
struct xt_stats {
    int64_t n, finite, nans, infs, minus_infs; /* counts of elements */
    double min, max, mean;
    double std;          /* of the population */
    int64_t least, most; /* of integer dtypes: min and max, exactly */
};
enum xt_status xt_tensor_stats(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_stats *out);
/* "1 NaN, min 0, max 2, mean 1, std 0.5" into a buffer; returns it. */
const char *xt_stats_describe(const struct xt_stats *s, char *buffer, size_t bytes);
/* "f32 2x3" into a buffer; returns it. */
const char *xt_describe(const struct xt_tensor *t, char *buffer, size_t bytes);

/* ---- ops ---------------------------------------------------------------------------------- */

int xt_op_count(const struct xt_ctx *ctx);
const struct xt_op *xt_op_at(const struct xt_ctx *ctx, int index); /* in order of declaration */
const struct xt_op *xt_op_find(const struct xt_ctx *ctx, const char *name); /* NULL: none */
/* Whether the device has a kernel of the op for inputs of that dtype; views and composed ops need
   none and say true. */
bool xt_op_has_kernel(const struct xt_ctx *ctx, const struct xt_op *op, enum xt_device device,
                      enum xt_dtype dtype);
/* THE path: check, shape, allocate, launch, record. outputs: op->n_outputs new references. */
enum xt_status xt_call_run(struct xt_ctx *ctx, const struct xt_op *op, const struct xt_args *args,
                           struct xt_tensor **outputs);

/* ---- autograd ----------------------------------------------------------------------------- */

/* A leaf that shares t's bytes and wants a gradient. t must be of a float dtype. */
enum xt_status xt_var_new(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor **out);
bool xt_is_leaf(const struct xt_tensor *t);
bool xt_requires_grad(const struct xt_tensor *t);
/* The gradient a backward left on leaf t: borrowed, NULL when none did. Of t's dtype and shape. */
struct xt_tensor *xt_grad_of(const struct xt_tensor *t);
void xt_zero_grad(struct xt_ctx *ctx, struct xt_tensor *t); /* makes it NULL; the allocator keeps
                                                               the bytes for the next */
/* Makes `grad` (or NULL) the gradient of leaf t. Shape and dtype must be t's. */
enum xt_status xt_set_grad(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor *grad);
enum xt_status xt_detach(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_tensor **out);
/* The compute copy of an f32 leaf in `dtype`: cached by version, refreshed when the master changed.
   Its gradients go to the master's, in f32. */
enum xt_status xt_compute_copy(struct xt_ctx *ctx, struct xt_tensor *master, enum xt_dtype dtype,
                               struct xt_tensor **out);
/* The cached copy as it is, for an optimizer that writes it: borrowed until the next call; NULL
   when there is none. After writing master and copy together call xt_compute_copy_fresh. */
struct xt_tensor *xt_compute_copy_peek(struct xt_ctx *ctx, struct xt_tensor *master);
void xt_compute_copy_fresh(struct xt_tensor *master);
/* Adds d output / d leaf into every reachable leaf's gradient. seed: of output's shape, or NULL for
   a scalar output (then 1). retain keeps the records for another backward. */
enum xt_status xt_backward(struct xt_ctx *ctx, struct xt_tensor *output, struct xt_tensor *seed,
                           bool retain);
/* Gradients as values, leaves untouched. grads[i] is NULL where output does not depend on
 * inputs[i]. */
enum xt_status xt_grad(struct xt_ctx *ctx, struct xt_tensor *output,
                       struct xt_tensor *const *inputs, int n, struct xt_tensor *seed, bool retain,
                       struct xt_tensor **grads);
/* A checkpoint segment: between begin and end every call is recorded; end drops what the records
   hold, and a backward that gets there replays them. begin under no_grad gives *out = NULL, and end
   and abort of NULL do nothing. `selective` keeps the outputs of expensive ops (matmul, attention).
   `verify` digests every output now and again at replay. */
struct xt_segment_options {
    bool selective, verify;
};
enum xt_status xt_segment_begin(struct xt_ctx *ctx, const struct xt_segment_options *options,
                                struct xt_segment **out);
enum xt_status xt_segment_end(struct xt_ctx *ctx, struct xt_segment *segment);
void xt_segment_abort(struct xt_ctx *ctx, struct xt_segment *segment);
/* Walks the records reachable from t by falling number; t NULL: from the newest one alive. */
struct xt_record_info {
    int64_t number; /* of the record, from 1 in this context */
    const struct xt_op *op;
    struct xt_where where; /* the line that made it */
    size_t kept_bytes;     /* storage bytes held for backward, each storage counted once */
    int n_outputs;
    struct xt_spec outputs[4];
};
typedef void xt_record_fn(void *user, const struct xt_record_info *info);
/* The record that made t; false: t is a leaf, or was made without recording. */
bool xt_record_of(const struct xt_tensor *t, struct xt_record_info *out);
enum xt_status xt_tape_walk(struct xt_ctx *ctx, struct xt_tensor *t, xt_record_fn *fn, void *user);

/* ---- looking on ---------------------------------------------------------------------------- */

enum xt_seen_kind {
    XT_SEEN_CALL,   /* a call has run, forward or in a backward rule */
    XT_SEEN_RECORD, /* a backward has run the rule of a record, and not yet handed on the result */
    XT_SEEN_END,    /* a backward has ended well */
};

/* Where input i of a record came from. */
struct xt_source {
    int64_t number;   /* of the record that made it; 0: none */
    int output;       /* which of its outputs */
    const void *leaf; /* stands for the variable it is, or NULL */
    bool added;       /* its gradient is already the variable's, with all that was added to it */
};

/* Tensors are borrowed, and NULL where there is none. */
struct xt_seen {
    enum xt_seen_kind kind;
    const struct xt_op *op;     /* NULL at the end */
    const struct xt_op *rule;   /* of the record that a backward passes; NULL in forward */
    const struct xt_op *within; /* the composed op that the call, or that record, is a part of */
    struct xt_where where;      /* the line; in a backward, that of the record */
    int64_t number;             /* of the record; 0: none was made */
    bool as_values;             /* of a backward: it is xt_grad, which leaves variables alone */
    int n_in, n_out;
    uint64_t written; /* mask of the inputs that a call has written, of the first 64 */
    uint64_t wants;   /* mask of the inputs of a call that carry a gradient, likewise */
    struct xt_tensor *const *in, *const *out;           /* of a record: what it kept */
    struct xt_tensor *const *grad_in, *const *grad_out; /* of a record */
    const struct xt_source *from;                       /* n_in, of a record */
};
/* A status that is not XT_OK makes the call or the backward fail. Calls that fn makes are neither
   recorded nor told. */
typedef enum xt_status xt_observe_fn(void *user, struct xt_ctx *ctx, const struct xt_seen *seen);
void xt_observe(struct xt_ctx *ctx, xt_observe_fn *fn, void *user); /* fn NULL: nobody looks */
/* For looking at values, also in the middle of a call: between the two nothing is recorded, trapped
   or told to an observer. What was on comes back. */
struct xt_pause {
    xt_observe_fn *observe;     /* who was told */
    struct xt_segment *segment; /* the open one */
    struct xt_graph *graph;     /* the one being recorded */
    struct xt_where where;      /* the line of a backward rule */
    int trap;                   /* its mode */
};
void xt_pause(struct xt_ctx *ctx, struct xt_pause *p);
void xt_resume(struct xt_ctx *ctx, const struct xt_pause *p);
/* The gradient of the variable that stands in an xt_source; only while that is told of, or at the
   end of the same backward. Borrowed; NULL when there is none. */
struct xt_tensor *xt_leaf_grad(const void *leaf);

/* ---- graphs (design, section 4) ------------------------------------------------------------- */

/*
 * A graph is the list of records made by the launch point between begin and end. What depends on
 * an input or on the state is not computed meanwhile, only its shape is. A run binds feeds and
 * state, and launches the records that its export needs.
 */
struct xt_graph;
/* One at a time. frozen: variables are constants, there is no state, and what depends on no input
   is computed once, while recording. */
enum xt_status xt_graph_begin(struct xt_ctx *ctx, bool frozen, struct xt_graph **out);
/* Ends recording, also after a failure. Gradients that were recorded are taken off the leaves. */
void xt_graph_end(struct xt_ctx *ctx, struct xt_graph *g);
void xt_graph_release(struct xt_ctx *ctx, struct xt_graph *g);
bool xt_graph_recording(const struct xt_ctx *ctx);
/* Declares an input; *out stands for it while recording. `value` is its default, and only its
   shape and dtype count when it has none. */
enum xt_input_kind {
    XT_INPUT_DEFAULT,  /* may be left out */
    XT_INPUT_REQUIRED, /* must be fed */
    XT_INPUT_LENT,     /* must be fed, and may be written: a run that exports it gives it back */
};
enum xt_status xt_graph_input(struct xt_ctx *ctx, struct xt_graph *g, const char *name,
                              struct xt_tensor *value, enum xt_input_kind kind,
                              struct xt_tensor **out);
/* Names a result. Writes to the state recorded since the last export are part of its runs. */
enum xt_status xt_graph_export(struct xt_ctx *ctx, struct xt_graph *g, const char *name,
                               const char *const *names, struct xt_tensor *const *values, int n);
/* Gives a tensor made outside the name it has in the state. */
enum xt_status xt_graph_name(struct xt_ctx *ctx, struct xt_graph *g, const char *name,
                             struct xt_tensor *t);
/* Runs export number e. feeds: one place an input, NULL where it takes its default. state: one
   place a state, NULL (or no array) for the captured one. outputs: new references. After a failure
   the state is as it was. */
enum xt_status xt_graph_run(struct xt_ctx *ctx, struct xt_graph *g, int e,
                            struct xt_tensor *const *feeds, struct xt_tensor *const *state,
                            struct xt_tensor **outputs);

/* ---- seeds (design, section 5) -------------------------------------------------------------- */

uint64_t xt_splitmix64(uint64_t x);               /* one output for the state x */
uint64_t xt_seed_mix(uint64_t seed, uint64_t a);  /* splitmix64(splitmix64(seed) XOR a) */
uint64_t xt_hash(const void *data, size_t bytes); /* XXH3-64 */

/* ---- environment ---------------------------------------------------------------------------- */

/* A library opened at run time, for `xtrain info`. */
struct xt_library {
    const char *name; /* "oneDNN" */
    bool found;
    char version[32]; /* "" when not found */
    char detail[160]; /* where it was found, or which package brings it */
};
enum xt_status xt_library_onednn(struct xt_ctx *ctx, struct xt_library *out);

#endif
