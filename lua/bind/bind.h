/*
 * bind.h: what the files of the binding share. The only C that includes lua.h is in this folder.
 *
 * A tensor is a userdata that holds one pointer, an op one too. Empty box first: the userdata,
 * marked empty and with its metatable, is made before anything that can fail, so that luaL_error
 * never leaves something owned. Functions of the binding raise only when they own nothing.
 */
#ifndef XT_BIND_H
#define XT_BIND_H

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <signal.h>

#include "op.h"

/* Of one Lua state. Lives until the state is closed and the last tensor is finalised. */
struct xtbind {
    struct xt_ctx *ctx;
    lua_State *L;               /* the thread that called last: where `locate` looks */
    lua_State *main;            /* for full collections */
    int refs;                   /* the anchor in the registry, and each tensor that is not empty */
    int tensor_meta, op_meta;   /* references in the registry */
    const void *tensor_meta_at; /* the same tables, as lua_topointer gives them */
    const void *op_meta_at;
    size_t made_bytes;      /* made when the last full collection ended, all devices */
    size_t unchecked_bytes; /* made by ops since the collector's policy was last asked */
    bool collecting;        /* a full collection is running */
    int shields;            /* functions running that must not stop half-way: core.shielded */
    int walks;              /* backwards running: they are stopped when asked twice */
    enum xt_device device;  /* the default of constructors */
};

/* An embedded file of the Lua library; the table ends with a row whose name is NULL. */
struct xt_embedded {
    const char *name; /* of the module: "xtrain.nn" */
    const char *text; /* its source, NUL-terminated */
    size_t bytes;     /* of text, without the NUL */
};
extern const struct xt_embedded xt_embedded_files[];

/* The bind that a function of C carries as its first upvalue; notes L as the running thread. */
static inline struct xtbind *xtbind_carried(lua_State *L) {
    struct xtbind *b = lua_touserdata(L, lua_upvalueindex(1));
    b->L = L;
    return b;
}

/* state.c */
int luaopen_xtrain(lua_State *L);
struct xtbind *xtbind_of(lua_State *L);  /* of any function; raises when xtrain is not open */
struct xt_ctx *xtbind_ctx(lua_State *L); /* the same, and notes L as the running thread */
/* Raises "FILE:LINE: message" with the line of the user's own code. */
int xtbind_error(lua_State *L, const char *format, ...) __attribute__((noreturn));
void xtbind_locate(struct xtbind *b, struct xt_where *out);  /* the line of the user's own code */
void xtbind_push_where(lua_State *L, struct xt_where where); /* as "FILE:LINE", or "?" */
/* Raises the context's sentence unless status is XT_OK. Call it when nothing is owned. */
void xtbind_check(lua_State *L, enum xt_status status);
/* Pushes nil and the context's sentence, and returns 2: for what may fail in ordinary life. */
int xtbind_nil(lua_State *L, const char *who);
/* With `xt` on top of the stack: functions of it, and functions of xt.core, each carrying b as its
   first upvalue. NULL: none. */
void xtbind_functions(lua_State *L, struct xtbind *b, const luaL_Reg *public,
                      const luaL_Reg *private);
/* Collects everything when much was made since the last time; `all`: in any case. */
void xtbind_collect(struct xtbind *b, bool all);
void xtbind_collect_soon(struct xtbind *b); /* before a backward: unless little was made */
/* Whether Ctrl-C must wait: an update of parameters is half done, or a backward, whose gradients
   and records would be lost, and which is stopped only when Ctrl-C is pressed again. */
bool xtbind_must_finish(const struct xtbind *b, int pressed);
void xtbind_unref(struct xtbind *b); /* the last one frees the context */
/* Set by the program when Ctrl-C is pressed. Polled by xt.interrupted. */
extern volatile sig_atomic_t xtbind_interrupt;
extern volatile sig_atomic_t xtbind_polled; /* the script asks for itself */
/* The next op, or line of Lua, shall raise: how often that was asked for. */
extern volatile sig_atomic_t xtbind_stop;

/* tensor.c */
struct xt_tensor **xtbind_new_box(lua_State *L);                     /* pushes an empty tensor */
struct xt_tensor **xtbind_box(lua_State *L, const struct xtbind *b); /* the same, faster */
/* Fills the box; the reference becomes the box's. */
void xtbind_fill(struct xtbind *b, struct xt_tensor **box, struct xt_tensor *t);
/* Pushes a tensor, taking over the caller's reference. May raise only while making the box: call it
   when the tensor is all that is owned and a leak on a failed malloc of Lua's is acceptable; else
   xtbind_new_box first. */
void xtbind_push_tensor(lua_State *L, struct xt_tensor *t);
struct xt_tensor *xtbind_to_tensor(lua_State *L, int index); /* NULL: not a tensor */
struct xt_tensor *xtbind_as_tensor(lua_State *L, const struct xtbind *b, int index); /* the same */
struct xt_tensor *xtbind_check_tensor(lua_State *L, int index);                      /* raises */
/* A shape table at index; {} is a scalar. `who` and `what` name the op and argument in errors. */
void xtbind_check_shape(lua_State *L, int index, const char *who, struct xt_spec *spec);
enum xt_dtype xtbind_check_dtype(lua_State *L, int index, const char *who);
/* backward's and grad's tail: [seed tensor] [, {retain = true}]. */
bool xtbind_check_seed_and_retain(lua_State *L, int index, const char *who,
                                  struct xt_tensor **seed);
/* The open functions find `xt` on top of the stack, with a table xt.core for the library's own
   use. */
void xtbind_open_tensor(lua_State *L, struct xtbind *b);

/* value.c */
/* A 64-bit seed: an integer, or a float that is exactly one. */
uint64_t xtbind_check_seed(lua_State *L, int index, const char *who, const char *what);
/* An integer, or a float that is exactly one. False: it is neither. */
bool xtbind_to_int(lua_State *L, int index, int64_t *out);
const char *xtbind_kind(lua_State *L, int index); /* "a string", "f32 2x3", "the number 0.5" */
/* "'a', 'b', 'c'", nearest to `given` first, as a string on the stack. */
const char *xtbind_nearest(lua_State *L, const char *given, const char *const *names, int n);
/* The string key of a table that is nearest to a misspelt name, or NULL when none is near. */
const char *xtbind_near(lua_State *L, const char *given, int table);
/* Letters to be changed, put in or taken out to make one word of the other. */
int xtbind_distance(const char *a, const char *b);

/* op.c */
void xtbind_open_op(lua_State *L, struct xtbind *b);
/* signature.c */
/* "sum(x [, dims] [, {keepdim = false}])", pushed. */
const char *xtbind_signature(lua_State *L, const struct xt_op *op);

/* machine.c: devices, threads, libraries. */
void xtbind_open_machine(lua_State *L, struct xtbind *b);
/* A device by name, one that is there; opens it. */
enum xt_device xtbind_check_device(lua_State *L, int index, const char *who);
/* memory.c */
void xtbind_open_memory(lua_State *L, struct xtbind *b);
/* constructor.c: tensors and variables made of numbers. */
void xtbind_open_constructor(lua_State *L, struct xtbind *b);
/* autograd.c */
void xtbind_open_autograd(lua_State *L, struct xtbind *b);
/* seed.c */
void xtbind_open_seed(lua_State *L, struct xtbind *b);
/* core.c: the script that runs, the embedded library. */
void xtbind_open_core(lua_State *L, struct xtbind *b);

/* observe.c: who looks on, the trap, statistics. */
void xtbind_open_observe(lua_State *L, struct xtbind *b);
/* choice.c: the algorithms of a GPU's products. */
void xtbind_open_choice(lua_State *L, struct xtbind *b);
/* graph.c */
void xtbind_open_graph(lua_State *L, struct xtbind *b);

/* One table each, as require "xtrain.core.json" and so on. */
int xtbind_json(lua_State *L);
int xtbind_safetensors(lua_State *L);
int xtbind_data(lua_State *L);
int xtbind_file(lua_State *L);
int xtbind_tokenizer(lua_State *L);

#endif
