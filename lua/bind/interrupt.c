/*
 * interrupt.c: Ctrl-C (program.h says what it does).
 *
 * What must be whole is finished first: an op, an update of all parameters (core.shielded), and a
 * backward unless Ctrl-C is pressed again. Code is stopped between two instructions of Lua or, by
 * an error, before an op. While nothing could be done about a Ctrl-C yet, one more says so, and the
 * next ends the program.
 */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "program.h"

/* Of the innermost xtbind_protected: a signal handler has no argument of ours. */
static lua_State *volatile running;
static volatile sig_atomic_t mode;    /* enum xtbind_ctrl_c */
static volatile sig_atomic_t enter;   /* the next line of Lua shall open the prompt */
static volatile sig_atomic_t pressed; /* how often, since something was last done about it */

static void on_interrupt(int number);

static void listen(void) {
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
}

static void forget(void) {
    pressed = enter = 0;
    xtbind_interrupt = xtbind_stop = 0;
}

static void say(const char *text) {
    if (isatty(STDERR_FILENO) && write(STDERR_FILENO, text, strlen(text)) < 0) return;
}

static void raise_here(lua_State *L) {
    lua_Debug ar;
    /* In a hook, level 0 is the function that runs. */
    for (int level = 0; lua_getstack(L, level, &ar); level++) {
        lua_getinfo(L, "Sl", &ar);
        if (ar.currentline <= 0) continue;
        lua_pushfstring(L, "%s:%d: interrupted", ar.short_src, ar.currentline);
        lua_error(L);
    }
    lua_pushliteral(L, "interrupted");
    lua_error(L);
}

static void open_prompt(lua_State *L) {
    luaL_checkstack(L, 4, "prompt");
    lua_getglobal(L, "require");
    lua_pushliteral(L, "xtrain.stop");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "interrupted");
    lua_call(L, 0, 0);
    lua_pop(L, 1);
}

/* Runs before each instruction from a Ctrl-C on, until it may act. */
static void hook(lua_State *L, lua_Debug *ar) {
    (void)ar;
    if (pressed && xtbind_must_finish(xtbind_of(L), pressed)) return;
    lua_sethook(L, NULL, 0, 0);
    bool raises = xtbind_stop, enters = enter; /* neither when an op has failed already */
    forget();
    listen();
    if (raises) raise_here(L);
    if (enters) open_prompt(L);
}

static void on_interrupt(int number) {
    bool polled = xtbind_polled, prompts = mode == XTBIND_ENTER || (polled && mode);
    pressed++;
    xtbind_interrupt = 1;
    if (polled && pressed == 1) {
        say(prompts ? "\nstopping after this step; Ctrl-C again stops here, at the prompt\n"
                    : "\nstopping after this step; Ctrl-C again ends the program\n");
        if (!prompts) signal(number, SIG_DFL);
        return;
    }
    if (pressed == (polled ? 3 : 2)) {
        say("\nwaiting for what is running now; Ctrl-C again ends the program\n");
        signal(number, SIG_DFL);
    }
    enter = prompts;
    xtbind_stop = prompts ? 0 : pressed;
    if (running) lua_sethook(running, hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
}

int xtbind_protected(lua_State *L, int arguments, int results, int handler,
                     enum xtbind_ctrl_c how) {
    lua_State *outer = running;
    sig_atomic_t outer_mode = mode, outer_polled = xtbind_polled;
    struct sigaction before;
    sigaction(SIGINT, NULL, &before);
    forget();
    xtbind_polled = 0;
    mode = (sig_atomic_t)how;
    running = L;
    listen();
    int status = lua_pcall(L, arguments, results, handler);
    sigaction(SIGINT, &before, NULL);
    lua_sethook(L, NULL, 0, 0);
    forget();
    running = outer;
    mode = outer_mode;
    xtbind_polled = outer_polled;
    return status;
}
