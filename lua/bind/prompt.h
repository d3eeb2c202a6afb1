/* prompt.h: what the two files of the program share. */
#ifndef XT_PROMPT_H
#define XT_PROMPT_H

#include "bind.h"

/* prompt.c: reads, runs and prints until the input ends. Returns the exit status. */
int xtbind_prompt(lua_State *L);

/* main.c: calls what lies on the stack, Ctrl-C raising an error. Returns Lua's status; on failure
   the message, a string, is on top. */
int xtbind_protected(lua_State *L, int arguments, int results);
void xtbind_report(lua_State *L); /* prints the message on top, and pops it */

#endif
