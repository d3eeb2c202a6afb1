/*
 * plan.h: what a plan is made of, shared by the files that make it and the one that runs it.
 *
 * A plan is made in order: which calls are launched (plan_nodes.c), their order, the tensors that
 * they read and write (plan.c), where those lie (plan_memory.c).
 */
#ifndef XT_PLAN_H
#define XT_PLAN_H

#include "graph.h"
#include "tape.h"

/* One launch. */
struct xt_plan_step {
    const struct xt_slot *slot;
    struct xt_args args;                       /* its inputs lie in the plan */
    struct xt_tensor *outputs[XT_MAX_OUTPUTS]; /* in the plan; NULL: not wanted */
    struct xt_where where;                     /* the line of the record */
    bool updates;                              /* writes to the state */
    size_t scratch;                            /* what its kernel takes; known after a run */
    size_t scratch_at;                         /* where that lies in the arena */
    enum xt_device device;                     /* where it is launched */
};

/* What is placed in the arena: the value of a root, or the scratch of a launch. */
struct xt_plan_item {
    int root;              /* or -1: scratch */
    enum xt_device device; /* the arena it lies in */
    int first, last;       /* launches at which it lives */
    size_t bytes, at;      /* how large, and where in the arena */
};

/* Where a root of a plan lies. */
enum xt_plan_place {
    XT_PLACE_NOWHERE, /* the run does not use it */
    XT_PLACE_ARENA,   /* in the run's block */
    XT_PLACE_OUTPUT,  /* in a block of its own, which is given out */
    XT_PLACE_BOUND,   /* in memory that was there before: fed, state, constant */
};

struct xt_plan {
    struct xt_plan *next;
    int export;                 /* which one */
    int n_inputs, n_roots;      /* of the graph */
    bool *fed;                  /* n_inputs: the set it is for */
    int n_nodes;                /* launched */
    int *order;                 /* n_nodes: of the graph's nodes */
    struct xt_plan_step *steps; /* n_nodes */
    struct xt_tensor **in;      /* the inputs of all steps: n_in places */
    int n_in;
    struct xt_tensor *tensors; /* n_tensors: views that steps and outputs use */
    int *tensor_value;         /* n_tensors: the value each is */
    int *tensor_root;          /* n_tensors: resolved */
    int64_t *tensor_offset;    /* n_tensors: from the root's beginning */
    int n_tensors, cap_tensors;
    int *export_tensor; /* of each value of the export */
    int n_outputs;
    enum xt_plan_place *place;  /* n_roots */
    size_t *arena_at;           /* n_roots: bytes from the arena's beginning */
    struct xt_plan_item *items; /* n_items values, then the scratch of each launch */
    int n_items;
    size_t arena_bytes[XT_DEVICE_COUNT]; /* of the block on each device */
    struct xt_storage **bind;            /* n_roots: during a run */
    int64_t *bind_at;                    /* n_roots: bytes from that storage's beginning */
    bool *updated;                       /* n_roots: states that it writes */
    bool *lent;                          /* n_roots: inputs that it writes */
    bool backup; /* something that can fail comes after a write to the state */
    struct xt_plan_memory memory;
};

/* What is known while a plan is made. */
struct xt_plan_making {
    struct xt_graph *g;
    struct xt_plan *plan;
    const bool *fed;
    int *to;           /* root -> the root it is the same bytes as */
    int64_t *to_at;    /* elements from that root's beginning */
    bool *ones;        /* root holds ones alone */
    int *maker;        /* root -> the node that made it, or -1 */
    bool *elided;      /* node */
    bool *taken;       /* node */
    bool *needed;      /* root */
    int *tensor_of;    /* value -> tensor of the plan, or -1 */
    int *first, *last; /* root: positions of the launches that use it */
};

/* The root whose bytes a value has in the run. */
static inline int xt_plan_root_of(const struct xt_plan_making *m, int v) {
    return m->to[xt_graph_value_at(m->g, v)->root];
}

/* plan_nodes.c */
/* Marks what is left out and what is taken; counts the launches and their inputs. */
void xt_plan_find_nodes(struct xt_plan_making *m);
/* Fills plan->order, which has room for the launches. */
enum xt_status xt_plan_find_order(struct xt_ctx *ctx, struct xt_plan_making *m);

/* plan_memory.c */
/* Says for each root where it lies, and whether the state has to be backed up. */
void xt_plan_find_places(struct xt_plan_making *m);
/* Fills plan->items with the values of the arena. */
void xt_plan_list_values(struct xt_plan_making *m);
/* Gives every item its place, and scratch too once memory.placed says that it is known. */
enum xt_status xt_plan_place_items(struct xt_ctx *ctx, struct xt_plan *plan);

#endif
