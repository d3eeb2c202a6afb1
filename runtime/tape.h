/*
 * tape.h: records, leaves and segments, private to runtime/.
 *
 * A record (struct xt_call) is made when an input requires a gradient, and for EVERY call inside a
 * segment. It is held by its outputs and by the records that read them. The records of a segment
 * are owned together, by the outermost segment (`owner`): references to one of them count for the
 * owner, and edges between two of them do not count at all, since they live and die together.
 */
#ifndef XT_TAPE_H
#define XT_TAPE_H

#include "context.h"

/* A variable's gradient and compute copy; shared by the variable and its compute copies. */
struct xt_leaf {
    int refs;
    struct xt_spec spec; /* of the variable, and so of its gradient */
    enum xt_device device;
    struct xt_tensor *grad; /* NULL: none since the last zero_grad */
    struct xt_tensor *copy; /* the compute copy's bytes, without leaf or maker; or NULL */
    uint64_t copy_version;  /* the master's version when the copy was last written */
    uint64_t touched;       /* the walk that last wrote grad */
};

/* Where an input came from, and so where its gradient goes. */
struct xt_edge {
    struct xt_call *maker; /* the record that made the input, or NULL */
    int output;            /* which of its outputs */
    bool wants;            /* a gradient is wanted */
    struct xt_leaf *leaf;  /* the variable it is, or NULL */
};

struct xt_call {
    int refs;
    int n_inputs, n_outputs;
    int n_ints;
    bool wants;     /* some input wants a gradient: backward may come through here */
    bool freed;     /* a backward passed and freed what was kept */
    uint64_t mark;  /* of the walk that saw it last */
    int64_t number; /* grows: inputs have smaller numbers */
    const struct xt_slot *slot;
    const struct xt_op *within;       /* the composed op that it is a part of, or NULL */
    struct xt_where where;            /* the line that made it */
    struct xt_where freed_at;         /* the line of the backward that freed it */
    struct xt_segment *owner;         /* the outermost segment around it, or NULL */
    struct xt_segment *segment;       /* the innermost one */
    int64_t position;                 /* among owner's calls */
    struct xt_call *next_dying;       /* links ctx->dying */
    uint64_t *digests;                /* one an output, for a verified segment; or NULL */
    struct xt_tensor *more[XT_APART]; /* gradients of output 0 beside grad_out[0], see op.h */
    size_t bytes;                     /* of this block */
    /* Arrays in the same block. */
    struct xt_edge *edges;       /* n_inputs */
    struct xt_tensor **in;       /* n_inputs: kept, or NULL */
    uint64_t *in_version;        /* n_inputs: of the storage when kept */
    struct xt_spec *in_spec;     /* n_inputs */
    struct xt_tensor **out;      /* n_outputs: kept aliases, or NULL */
    uint64_t *out_version;       /* n_outputs */
    struct xt_spec *out_spec;    /* n_outputs */
    struct xt_tensor **grad_out; /* n_outputs: gradients, during a backward */
    struct xt_tensor **value;    /* n_outputs: a selective segment's kept values */
    union xt_attr *attrs;        /* slot->n_attrs */
    int64_t *ints;               /* n_ints */
};

struct xt_segment {
    int refs;                  /* the owner's: of all its records together */
    struct xt_segment *owner;  /* the outermost one; itself when outermost */
    struct xt_segment *parent; /* the one around it */
    struct xt_segment *next;   /* the owner's list of segments inside it */
    struct xt_segment *next_dying;
    struct xt_segment_options options;
    int64_t first, last;    /* its calls are owner->calls[first .. last) */
    bool dropped;           /* what its records held was dropped: replay before use */
    int64_t first_storage;  /* storages with smaller numbers were made outside */
    struct xt_call **calls; /* the owner's: all calls in order */
    int64_t n_calls, cap_calls;
};

/* A backward or a grad in progress. */
struct xt_walk {
    uint64_t stamp;                   /* tells this walk's touches from earlier ones */
    bool as_values;                   /* xt_grad: leaves are left alone */
    struct xt_tensor *const *targets; /* xt_grad: the inputs asked for */
    struct xt_tensor **results;       /* their gradients */
    int n_targets;
    const struct xt_call *call; /* the record whose rule runs, or NULL */
    struct xt_tensor *share; /* for observers: the rule's own part of input share_of's, or NULL */
    int share_of;
};

/* tape.c */
void xt_call_retain(struct xt_call *call);
void xt_call_release(struct xt_ctx *ctx, struct xt_call *call);
void xt_call_free_body(struct xt_ctx *ctx, struct xt_call *call); /* for a segment's owner */
void xt_leaf_release(struct xt_ctx *ctx, struct xt_leaf *leaf);
/* A record for a call about to run, holding the inputs it needs; not yet linked to outputs. */
enum xt_status xt_record_new(struct xt_ctx *ctx, const struct xt_slot *slot,
                             const struct xt_args *args, bool wants, struct xt_call **out);
/* Keeps the outputs that backward needs and makes `call` the maker of all of them. */
enum xt_status xt_record_finish(struct xt_ctx *ctx, struct xt_call *call,
                                struct xt_tensor **outputs);
/* A record for graph_load: no inputs, nothing kept; the caller fills in specs and attributes. */
enum xt_status xt_record_blank(struct xt_ctx *ctx, const struct xt_slot *slot, int n_inputs,
                               int n_ints, struct xt_call **out);
/* Lets go of everything that was kept for backward and replay. */
void xt_record_drop_kept(struct xt_ctx *ctx, struct xt_call *call);
/* Releases each of a list and makes it NULL. */
void xt_drop_tensors(struct xt_ctx *ctx, struct xt_tensor **list, int n);
/* Undoes xt_record_new for a call that failed. */
void xt_record_abandon(struct xt_ctx *ctx, struct xt_call *call);
/* Whether bit i of a row's mask is set; bit 31 stands for all from there on. */
bool xt_keeps(unsigned mask, int i);
/* Whether a backward through `call`, whose edges are made, needs the value of input i. */
bool xt_keeps_input(const struct xt_call *call, int i);
/* The edge's maker when it lies in the same owner's records as `call`. */
struct xt_call *xt_inner_maker(const struct xt_call *call, int input);

/* grads.c */
/* Hands g to where input i of the call came from, broadcasting undone and dtype restored. Takes
   g's reference, also on failure. */
enum xt_status xt_grads_give(struct xt_ctx *ctx, struct xt_call *call, int i, struct xt_tensor *g);
/* Adds g to a leaf's gradient. Takes g's reference, also on failure. */
enum xt_status xt_grads_add_to_leaf(struct xt_ctx *ctx, struct xt_leaf *leaf, struct xt_tensor *g);
/* grad_out[0] becomes the sum that the rule would have made of it and `more`, for those who look
   at it. */
enum xt_status xt_grads_join(struct xt_ctx *ctx, struct xt_call *call);
/* In xt_grad, only what leads to an input asked for is computed: those records carry stamp + 1. */
bool xt_edge_wanted(const struct xt_walk *walk, const struct xt_edge *e);

/* segment.c */
enum xt_status xt_segment_add(struct xt_ctx *ctx,
                              struct xt_call *call); /* to the innermost open one */
void xt_segment_remove_last(struct xt_ctx *ctx, struct xt_call *call);
void xt_segment_release(struct xt_ctx *ctx, struct xt_segment *owner);
/* Makes the kept values of `call` live, replaying the segments around it, outermost first. */
enum xt_status xt_segment_revive(struct xt_ctx *ctx, struct xt_call *call);

#endif
