/* program.h: what the files of the program share; the module for a stock lua5.4 has none of it. */
#ifndef XT_PROGRAM_H
#define XT_PROGRAM_H

#include "bind.h"

/* terminal.c: the module xtrain.core.terminal: line editing, and calls that Ctrl-C stops. */
int xtbind_terminal(lua_State *L);

/* interrupt.c */
/* A recipe that asks xt.interrupted ends by itself after the first Ctrl-C; a second one opens the
   prompt in it, or ends the program. Other code is stopped by the first one: by an error
   "FILE:LINE: interrupted", or by the prompt, from where it may go on. */
enum xtbind_ctrl_c {
    XTBIND_RAISE,        /* no prompt */
    XTBIND_ENTER_RECIPE, /* the prompt in a recipe, an error elsewhere */
    XTBIND_ENTER,        /* the prompt in both */
};
/* Calls what lies on the stack. Returns Lua's status; a failure leaves what the handler made of the
   message on top. The handler is at index `handler`, or 0 for none. May be nested. */
int xtbind_protected(lua_State *L, int arguments, int results, int handler, enum xtbind_ctrl_c how);

#endif
