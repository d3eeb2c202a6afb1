/*
 * graph.h: what a recorded graph is made of: roots (bytes), values (views of them), nodes (records
 * with the values they read and made), exports, and the plans made of them.
 *
 * Values are told apart while recording by storage number and geometry, so recording keeps no
 * tensor alive. Nothing here changes once recording has ended, except the list of plans.
 */
#ifndef XT_GRAPH_H
#define XT_GRAPH_H

#include "op.h"

struct xt_leaf;

enum xt_root_kind {
    XT_ROOT_INPUT, /* fed, or its default */
    XT_ROOT_STATE, /* variables, and what is written in place though made outside */
    XT_ROOT_CONST, /* made outside and only read */
    XT_ROOT_TEMP,  /* made by a call of the graph */
};

/* Bytes that a run has to bind. */
struct xt_graph_root {
    enum xt_root_kind kind;
    enum xt_device device;
    size_t bytes;             /* of all it holds */
    struct xt_tensor *tensor; /* the default, the captured state, the constant; NULL: TEMP */
    struct xt_leaf *leaf;     /* of a variable, or NULL */
    const char *name;         /* of an input or a state; interned */
    uint64_t version;         /* of a constant's storage when it was captured */
    int64_t storage;          /* the number of its storage while recording */
    int64_t base;             /* where it began in that storage, in elements */
    int index;                /* among the inputs, or among the states; -1 */
    int input;                /* an input (root) that it depends on, or -1 */
    bool varies;              /* depends on an input or on the state */
    bool required;            /* an input without default */
    bool lent;                /* an input whose bytes a run may write */
    bool ones;                /* an input whose default is all ones */
    bool used;                /* some call reads or writes it */
    int writes;               /* calls that write it in place */
    struct xt_where where;    /* the line that declared an input */
};

/* A view of a root. */
struct xt_graph_value {
    int root, next;   /* next: of the same place in the table of storages, or -1 */
    int64_t offset;   /* from the root's beginning, in elements */
    int64_t absolute; /* in its storage while recording */
    enum xt_dtype dtype;
    int ndim;
    int64_t shape[XT_MAX_DIMS];
    int64_t stride[XT_MAX_DIMS];
};

/* A call. */
struct xt_graph_node {
    struct xt_call *call; /* the record: op, attributes, specs, line */
    int *values;          /* of the inputs, then of the outputs; -1: none */
    bool hidden;          /* its hidden outputs are wanted */
    int update;           /* the export whose runs it belongs to when it writes state; else -1 */
};

struct xt_graph_export {
    const char *name;
    const char **names; /* n; one that is "" stands for a bare tensor */
    int *values;        /* n */
    int n;
    struct xt_where where;
};

struct xt_plan;

struct xt_graph {
    struct xt_ctx *ctx;
    int64_t first_storage; /* storages with smaller numbers were made before */
    bool frozen;           /* variables are constants; what varies with no input is not recorded */
    struct xt_graph_root *roots;
    int n_roots, cap_roots;
    struct xt_graph_value *values;
    int n_values, cap_values;
    struct xt_graph_node *nodes;
    int n_nodes, cap_nodes;
    struct xt_graph_export *exports;
    int n_exports, cap_exports;
    int n_inputs, n_states; /* roots of those kinds */
    int *table;             /* storage number -> first value, of cap_table places; -1 */
    int cap_table;
    struct xt_plan *plans; /* a list */
};

/* Part of a plan's memory. */
struct xt_plan_memory {
    size_t arena;   /* of all values that live only in the run, and of scratch once it is placed */
    size_t outputs; /* of what the run gives out */
    size_t copies;  /* most that a call needs for inputs that do not lie as its kernel wants */
    size_t scratch; /* most that a kernel takes; 0 before a run */
    bool placed;    /* a run has been seen, and scratch lies in the arena */
    size_t backup;  /* of state that could not be written last */
    int calls, elided, views; /* launched; left out as x * 1; never launched */
};

static inline const struct xt_graph_value *xt_graph_value_at(const struct xt_graph *g, int v) {
    return &g->values[v];
}

/* graph.c */
bool xt_graph_node_updates(const struct xt_graph *g, const struct xt_graph_node *node);
/* Room for one more of an array that doubles. */
enum xt_status xt_graph_grow(struct xt_ctx *ctx, void *items, int n, int *cap, size_t size);

/* graph_values.c */
/* The value that t is, met here when the graph does not know it. */
enum xt_status xt_graph_value_of(struct xt_ctx *ctx, struct xt_graph *g, const struct xt_tensor *t,
                                 int *out);
/* The value that t is, or -1. */
int xt_graph_find(const struct xt_graph *g, const struct xt_tensor *t);
/* For recording. The value that a call reads or, `written`, writes in place: refused where a run
   could not do it. */
enum xt_status xt_graph_use(struct xt_ctx *ctx, struct xt_graph *g, struct xt_tensor *t,
                            bool written, int *out);
/* A tensor that the graph sees for the first time: a variable, a constant, memory to be written. */
enum xt_status xt_graph_meet(struct xt_ctx *ctx, struct xt_graph *g, struct xt_tensor *t,
                             bool written, int *out);
/* A root that begins where t does, without a value yet. */
enum xt_status xt_graph_add_root(struct xt_ctx *ctx, struct xt_graph *g, enum xt_root_kind kind,
                                 const struct xt_tensor *t, int *out);
/* t as a view of a root. */
enum xt_status xt_graph_add_value(struct xt_ctx *ctx, struct xt_graph *g, int root,
                                  const struct xt_tensor *t, int *out);
/* A root becomes state, with a number for a name where it has none. */
enum xt_status xt_graph_make_state(struct xt_ctx *ctx, struct xt_graph *g,
                                   struct xt_graph_root *root);

/* graph_load.c */
/* What a node's record says, for inspection and files. */
struct xt_graph_call {
    const struct xt_op *op;
    struct xt_where where;
    int n_inputs, n_outputs, n_attrs, n_ints;
    const union xt_attr *attrs; /* n_attrs */
    const int64_t *ints;        /* n_ints */
    bool updates;               /* writes to the state */
};
void xt_graph_call_of(const struct xt_graph *g, int node, struct xt_graph_call *out);
/* For files: an empty graph that no one records, and its parts in the order they had. What is
   given is copied, or retained. Where something does not fit, XT_FORMAT. */
enum xt_status xt_graph_blank(struct xt_ctx *ctx, struct xt_graph **out);
enum xt_status xt_graph_load_root(struct xt_ctx *ctx, struct xt_graph *g,
                                  const struct xt_graph_root *root);
enum xt_status xt_graph_load_value(struct xt_ctx *ctx, struct xt_graph *g,
                                   const struct xt_graph_value *value);
enum xt_status xt_graph_load_node(struct xt_ctx *ctx, struct xt_graph *g,
                                  const struct xt_graph_call *call, const int *values, bool hidden,
                                  int update);
enum xt_status xt_graph_load_export(struct xt_ctx *ctx, struct xt_graph *g,
                                    const struct xt_graph_export *export);

/* plan.c; what it is made of is in plan.h */
enum xt_status xt_plan_get(struct xt_ctx *ctx, struct xt_graph *g, int e, const bool *fed,
                           struct xt_plan **out);
void xt_plan_memory(const struct xt_plan *plan, struct xt_plan_memory *out);
/* The nodes that a plan launches, in order, as indices. */
const int *xt_plan_order(const struct xt_plan *plan, int *n);
bool xt_plan_needs(const struct xt_plan *plan, int root);
void xt_plan_free(struct xt_ctx *ctx, struct xt_plan *plan);

#endif
