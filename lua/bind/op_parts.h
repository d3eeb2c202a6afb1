/*
 * op_parts.h: what the files of the op userdata share: op.c calls, reading.c reads the arguments,
 * signature.c says what an op is.
 */
#ifndef XT_OP_PARTS_H
#define XT_OP_PARTS_H

#include "bind.h"

#define XTBIND_SMALL_INPUTS 16

/* The arguments of one call while they are read. */
struct xtbind_reading {
    struct xtbind *b;
    const struct xt_op *op;
    struct xt_args args;       /* attributes and lists */
    struct xt_tensor **inputs; /* `small`, or a userdata's memory for long lists */
    int n_inputs;              /* of inputs */
    unsigned numbers;          /* bit i: input i is to be made of the number at stack[i] */
    int stack[32];             /* where the numbers are */
    unsigned given;            /* bit p: parameter p was given */
    struct xt_tensor *small[XTBIND_SMALL_INPUTS]; /* room for the inputs of most calls */
};

/* reading.c */
/* Reads the arguments from stack index `first` on. args is initialised, inputs points to `small`,
   numbers and given are 0. */
void xtbind_read_arguments(lua_State *L, struct xtbind_reading *r, int first);

/* signature.c: __index and __tostring of the op userdata. */
int xtbind_op_index(lua_State *L);
int xtbind_op_to_string(lua_State *L);

#endif
