/*
 * context.h: the state everything lives in, private to runtime/.
 *
 * One context belongs to one thread at a time; kernels fan out below it. The order of the fields is
 * the order in which the files of this folder own them.
 */
#ifndef XT_CONTEXT_H
#define XT_CONTEXT_H

#include "op.h"

#define XT_ERROR_BYTES 2048
#define XT_SIZE_CLASSES 512

/* What happens at the first result that is not finite. */
enum xt_trap { XT_TRAP_OFF, XT_TRAP_FAIL, XT_TRAP_NOTE };

/* One registered op with its kernels. */
struct xt_slot {
    const struct xt_op *op;
    int n_params, n_attrs;
    int n_slots;   /* input slots; the last one open-ended when has_list */
    bool has_list; /* the last slot is a TENSORS list */
    bool has_dims; /* some attribute is a DIM or DIMS */
    const struct xt_kernel *kernels[XT_DEVICE_COUNT][XT_DTYPE_COUNT];
};

/* The host's cache of blocks by size class, linked through their first bytes. */
struct xt_pool {
    void *free_list[XT_SIZE_CLASSES];
};

struct xt_arena; /* pool.c: the cache of a device whose memory the host cannot touch */

/* Where a kernel that a graph runs finds its scratch: last in, first out. */
struct xt_scratch_room {
    bool on; /* a graph runs, on this device */
    enum xt_device device;
    char *base;        /* in the run's arena; NULL: not known yet how much is wanted */
    size_t bytes;      /* room from there */
    size_t used, most; /* by the kernel that runs; what it had at most */
};

struct xt_ctx {
    /* status.c */
    char error[XT_ERROR_BYTES];

    /* context.c */
    struct xt_hooks hooks;
    struct xt_where fixed_where; /* set while a backward rule runs: the line of its record */
    char **interned;             /* open-addressing set of strings */
    size_t n_interned, cap_interned;
    const char *last_interned; /* the string asked for last */
    int threads;
    int no_grad; /* pushes not yet popped */

    /* trap.c */
    enum xt_trap trap;
    char trapped[XT_ERROR_BYTES]; /* what the trap noted first, or "" */

    /* profile.c */
    struct xt_profile_row *profile; /* one a slot, while times are taken; or NULL */
    int64_t profile_inner;          /* nanoseconds of launches inside the present one */

    /* observe.c */
    xt_observe_fn *observer; /* or NULL */
    xt_observe_fn *observe;  /* the same, but NULL while nothing shall be told */
    void *observe_user;      /* passed to it first */
    bool observing;          /* it is being told */

    /* memory.c */
    struct xt_pool pool;
    struct xt_arena *arena[XT_DEVICE_COUNT]; /* NULL for the CPU and for what is not open */
    struct xt_memory memory[XT_DEVICE_COUNT];
    size_t limit[XT_DEVICE_COUNT];
    int64_t live;    /* host objects and storages */
    int64_t fail_in; /* allocations until one fails; 0: never */
    bool poison, no_cache, collecting;
    struct xt_scratch_room scratch;

    /* backend.c */
    const struct xt_backend *backend[XT_DEVICE_COUNT]; /* NULL: not open */
    void *backend_state[XT_DEVICE_COUNT];
    char closed_because[256]; /* why there is no CUDA device; "" when it was not asked for yet */
    enum xt_device device;    /* of ops without inputs */
    const char *isa;
    bool sync; /* wait after every launch, so that a fault is found where it is */

    /* onednn.c */
    struct xt_onednn *onednn; /* NULL until it is asked for */

    /* choice.c */
    struct xt_choices *choices; /* NULL until they are asked for */
    int choices_changed;        /* how often they are to be looked up anew */
    bool tuning;                /* products are measured */

    /* storage.c */
    struct xt_storage *storages; /* the newest */
    int64_t n_storages;          /* ever made */

    /* call.c */
    struct xt_slot *slots; /* in order of declaration */
    int n_slots;
    int *slot_of;       /* open-addressing table by row pointer: index + 1 */
    int *slot_named;    /* the same by name */
    size_t cap_slot_of; /* of either table */

    /* tape.c, segment.c */
    int64_t n_calls;                   /* records ever made */
    uint64_t mark;                     /* the stamp of the current walk */
    struct xt_call *dying;             /* records whose last reference is gone, not yet freed */
    struct xt_segment *dying_segments; /* likewise, whole segments */
    bool draining;
    struct xt_segment *segment; /* the innermost open one */
    struct xt_walk *walk;       /* the backward in progress, or NULL */
    const struct xt_op *within; /* the composed op in progress, the outermost one, or NULL */
    struct xt_call *newest;     /* the record made last, while it lives; or NULL */

    /* graph.c */
    struct xt_graph *graph; /* the one being recorded, or NULL */
};

/* memory.c: small host objects. NULL when memory is out (the sentence is set). Zeroed. */
void *xt_host_alloc(struct xt_ctx *ctx, size_t bytes);
void xt_host_free(struct xt_ctx *ctx, void *data, size_t bytes);
void xt_memory_close(struct xt_ctx *ctx);
size_t xt_grain(enum xt_device device); /* what starts of blocks are multiples of, in bytes */
enum xt_status xt_device_alloc(struct xt_ctx *ctx, enum xt_device device, size_t bytes, void **data,
                               size_t *capacity);
void xt_device_free(struct xt_ctx *ctx, enum xt_device device, void *data, size_t bytes,
                    size_t capacity);

/* pool.c: the memory of a device, cut from large pieces of the system's */
struct xt_arena *xt_arena_new(enum xt_device device); /* NULL when memory is out */
void xt_arena_free(struct xt_ctx *ctx, struct xt_arena *a);
/* At least `bytes`, aligned to 512; NULL when the device has no more, or the limit does not let
   it. */
void *xt_arena_take(struct xt_ctx *ctx, struct xt_arena *a, size_t bytes);
void xt_arena_give(struct xt_ctx *ctx, struct xt_arena *a, void *data);
void xt_arena_trim(struct xt_ctx *ctx, struct xt_arena *a); /* unused pieces back to the system */

/* backend.c */
void xt_backend_open(struct xt_ctx *ctx);
void xt_backend_close(struct xt_ctx *ctx);
const struct xt_kernel *const *xt_cpu_kernel_tables(const char *isa);

/* onednn.c */
void xt_onednn_close(struct xt_ctx *ctx);

/* storage.c */
enum xt_status xt_storage_new(struct xt_ctx *ctx, enum xt_device device, size_t bytes,
                              struct xt_storage **out);
void xt_storage_retain(struct xt_storage *s);
void xt_storage_release(struct xt_ctx *ctx, struct xt_storage *s);
void xt_storage_written(struct xt_ctx *ctx, struct xt_storage *s); /* a new version, at this line */

/* tensor.c */
enum xt_status xt_tensor_alias(struct xt_ctx *ctx, const struct xt_tensor *t,
                               struct xt_tensor **out); /* same bytes, no maker, no leaf */
bool xt_tensor_has_overlap(const struct xt_tensor *t);  /* two indices, one element */
bool xt_tensor_nonfinite(struct xt_ctx *ctx, struct xt_tensor *t); /* contiguous, on the CPU */
/* A tensor without bytes: shape and dtype alone. */
enum xt_status xt_tensor_hollow(struct xt_ctx *ctx, const struct xt_spec *spec,
                                enum xt_device device, struct xt_tensor **out);
void xt_contiguous_strides(const struct xt_spec *spec, int64_t *stride);
const char *xt_describe_spec(const struct xt_spec *spec, char *buffer, size_t bytes);

/* profile.c: around a launch while ctx->profile is there. */
struct xt_timer {
    int64_t start; /* nanoseconds */
    int64_t inner; /* of launches before this one, inside the same */
};
struct xt_timer xt_profile_begin(struct xt_ctx *ctx);
void xt_profile_end(struct xt_ctx *ctx, const struct xt_timer *timer, const struct xt_slot *slot,
                    const struct xt_args *args, struct xt_tensor **outputs);

/* call.c */
enum xt_status xt_ops_open(struct xt_ctx *ctx);
enum xt_status xt_find_kernels(struct xt_ctx *ctx, enum xt_device device,
                               const struct xt_kernel *const *tables);
void xt_ops_close(struct xt_ctx *ctx);
const struct xt_slot *xt_slot_find(const struct xt_ctx *ctx, const struct xt_op *op);
/* Shape rule, outputs, kernel: no checks, no record. hidden: whether hidden outputs are wanted. */
enum xt_status xt_execute(struct xt_ctx *ctx, const struct xt_slot *slot,
                          const struct xt_args *args, bool hidden, struct xt_tensor **outputs);
/* The kernel alone, outputs being there: what a plan runs. */
enum xt_status xt_launch_ready(struct xt_ctx *ctx, const struct xt_slot *slot,
                               const struct xt_args *args, struct xt_tensor **outputs);
/* Whether a call of the op writes its input i. */
bool xt_slot_writes(const struct xt_slot *slot, int i);
/* Whether the kernel for a device and dtype can read t as it lies; false: it gets a copy. */
bool xt_slot_fits(const struct xt_slot *slot, enum xt_device device, enum xt_dtype dtype,
                  const struct xt_tensor *t);
const char *xt_input_name(const struct xt_op *op, int i); /* of the parameter of input slot i */

/* graph.c: hooks of the launch point; all are called only while a graph is recorded. */
/* Whether the call must not run now: it depends on an input or on the state. */
bool xt_graph_is_hollow(struct xt_ctx *ctx, const struct xt_slot *slot, const struct xt_args *args);
/* Refuses what would repeat at every run: a plain seed. */
enum xt_status xt_graph_check(struct xt_ctx *ctx, const struct xt_slot *slot,
                              const struct xt_args *args);
/* Appends a call that has run, with the values it read and made. */
enum xt_status xt_graph_add(struct xt_ctx *ctx, struct xt_call *call,
                            struct xt_tensor *const *inputs, struct xt_tensor *const *outputs);
/* Takes it out again, when it is the last one: the call has failed after all. */
void xt_graph_remove(struct xt_ctx *ctx, struct xt_call *call);
/* Fails when the host must not read t: it depends on an input. Called always. */
enum xt_status xt_graph_check_read(struct xt_ctx *ctx, const struct xt_tensor *t);
bool xt_graph_is_frozen(const struct xt_ctx *ctx);
/* The number of the last storage made before the graph was opened. */
int64_t xt_graph_first_storage(const struct xt_ctx *ctx);

/* observe.c */
/* Only while there is an observer. On failure the outputs are released. */
enum xt_status xt_observe_call(struct xt_ctx *ctx, const struct xt_op *op,
                               const struct xt_args *args, struct xt_tensor **outputs);
/* grad_in: what the record's rule gave, before it is handed on. */
enum xt_status xt_observe_record(struct xt_ctx *ctx, const struct xt_call *call,
                                 struct xt_tensor *const *grad_in);
enum xt_status xt_observe_end(struct xt_ctx *ctx, bool as_values); /* a backward has ended */

/* trap.c: fails, or notes, when a result is not finite. Only while the trap is on. */
enum xt_status xt_trap_check(struct xt_ctx *ctx, const struct xt_slot *slot,
                             const struct xt_args *args, struct xt_tensor *const *outputs);

#endif
