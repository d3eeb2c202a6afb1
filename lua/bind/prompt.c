/*
 * prompt.c: the interactive prompt: line editing, history, completion, results printed.
 *
 * A line is first tried as an expression, then as a statement; an incomplete one goes on. Results
 * are printed, and the first of them stays in the global `_`.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <editline/readline.h>

#include "prompt.h"

#define HISTORY_LINES 2000

/* What completion looks at: readline's functions take no argument of ours. */
static lua_State *completing;

/* ---- completion ------------------------------------------------------------------------------ */

struct word {
    const char *text;  /* what was typed, from the start of the word */
    size_t path_bytes; /* of "xt.nn." in "xt.nn.lin": up to and with the last separator */
    char separator;    /* '.' or ':', or 0 for a global */
};

static struct word split(const char *text) {
    struct word w = {text, 0, 0};
    for (size_t i = 0; text[i]; i++)
        if (text[i] == '.' || text[i] == ':') {
            w.path_bytes = i + 1;
            w.separator = text[i];
        }
    return w;
}

/* Pushes the value of "xt.nn" without calling anything of the user's but index functions that fail
   softly; false and nothing pushed when there is none. */
static bool push_path(lua_State *L, const struct word *w) {
    lua_pushglobaltable(L);
    size_t at = 0;
    while (at < w->path_bytes) {
        size_t n = strcspn(w->text + at, ".:");
        if (lua_type(L, -1) != LUA_TTABLE && lua_type(L, -1) != LUA_TUSERDATA &&
            lua_type(L, -1) != LUA_TSTRING)
            return false;
        lua_pushlstring(L, w->text + at, n);
        lua_gettable(L, -2);
        lua_remove(L, -2);
        at += n + 1;
    }
    return true;
}

/* Adds to the table `found` (name -> true) the names of the table on top, which is popped. */
static void add_names(lua_State *L, int found, const char *prefix, bool methods) {
    size_t n = strlen(prefix);
    lua_pushnil(L);
    while (lua_next(L, -2)) {
        bool wanted =
            lua_type(L, -2) == LUA_TSTRING && strncmp(lua_tostring(L, -2), prefix, n) == 0 &&
            (!methods || lua_type(L, -1) == LUA_TFUNCTION || lua_type(L, -1) == LUA_TUSERDATA);
        if (wanted) {
            lua_pushvalue(L, -2);
            lua_pushboolean(L, 1);
            lua_rawset(L, found);
        }
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

/* Argument 1: the word, as a struct. Returns a table of names. Called protected. */
static int find_names(lua_State *L) {
    struct word *w = lua_touserdata(L, 1);
    const char *prefix = w->text + w->path_bytes;
    lua_newtable(L);
    int found = lua_gettop(L);
    if (!push_path(L, w)) {
        lua_settop(L, found);
        return 1;
    }
    bool methods = w->separator == ':';
    for (int depth = 0; depth < 8; depth++) {
        int value = lua_gettop(L);
        if (lua_istable(L, value)) {
            lua_pushvalue(L, value);
            add_names(L, found, prefix, methods);
        }
        /* Names that are made when they are asked for, and a tensor's: the metatable lists them. */
        if (luaL_getmetafield(L, value, "__names") != LUA_TNIL)
            add_names(L, found, prefix, methods);
        if (luaL_getmetafield(L, value, "__index") != LUA_TTABLE) break;
        lua_replace(L, value);
        lua_settop(L, value);
    }
    lua_settop(L, found);
    return 1;
}

static char *join(const struct word *w, const char *name) {
    size_t n = strlen(name);
    char *text = malloc(w->path_bytes + n + 1);
    if (!text) return NULL;
    memcpy(text, w->text, w->path_bytes);
    memcpy(text + w->path_bytes, name, n + 1);
    return text;
}

/* The i-th call gives the i-th name: readline's way. The table of names stays in the registry. */
static char *next_match(const char *text, int state) {
    lua_State *L = completing;
    struct word w = split(text);
    if (state == 0) {
        lua_pushcfunction(L, find_names);
        lua_pushlightuserdata(L, &w);
        if (lua_pcall(L, 1, 1, 0) != LUA_OK) {
            lua_pop(L, 1);
            return NULL;
        }
        lua_rawsetp(L, LUA_REGISTRYINDEX, &completing);
    }
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &completing) != LUA_TTABLE) {
        lua_pop(L, 1);
        return NULL;
    }
    char *match = NULL;
    lua_pushnil(L);
    if (lua_next(L, -2)) {
        lua_pop(L, 1);
        match = join(&w, lua_tostring(L, -1));
        lua_pushnil(L);
        lua_rawset(L, -3); /* given out */
    }
    lua_pop(L, 1);
    return match;
}

static char **complete(const char *text, int start, int end) {
    (void)start, (void)end;
    rl_attempted_completion_over = 1; /* no file names */
    rl_completion_append_character = 0;
    return rl_completion_matches(text, next_match);
}

/* ---- one entry ------------------------------------------------------------------------------- */

/* Whether the failed chunk only wants more lines. The message stays on the stack. */
static bool is_incomplete(lua_State *L, int status) {
    const char *message = lua_tostring(L, -1);
    size_t n = message ? strlen(message) : 0;
    return status == LUA_ERRSYNTAX && n >= 5 && strcmp(message + n - 5, "<eof>") == 0;
}

/* Pushes the chunk of `text` and returns LUA_OK, or pushes a message. */
static int load_entry(lua_State *L, const char *text) {
    const char *expression = lua_pushfstring(L, "return %s", *text == '=' ? text + 1 : text);
    int status = luaL_loadbuffer(L, expression, strlen(expression), "=prompt");
    if (status != LUA_OK) {
        lua_pop(L, 1);
        status = luaL_loadbuffer(L, text, strlen(text), "=prompt");
    }
    lua_remove(L, -2);
    return status;
}

/* Reads lines until they are a chunk or are none for good. NULL: the input has ended. */
static char *read_entry(lua_State *L, int *status) {
    char *entry = readline("> ");
    if (!entry) return NULL;
    while ((*status = load_entry(L, entry)) != LUA_OK && is_incomplete(L, *status)) {
        char *line = readline(">> ");
        if (!line) break;
        size_t n = strlen(entry), more = strlen(line);
        char *longer = realloc(entry, n + more + 2);
        if (!longer) {
            free(line);
            break;
        }
        entry = longer;
        entry[n] = '\n';
        memcpy(entry + n + 1, line, more + 1);
        free(line);
        lua_pop(L, 1);
    }
    return entry;
}

static void print_results(lua_State *L, int n) {
    if (n == 0) return;
    lua_pushvalue(L, -n);
    lua_setglobal(L, "_");
    lua_getglobal(L, "print");
    lua_insert(L, -n - 1);
    if (xtbind_protected(L, n, 0) != LUA_OK) xtbind_report(L);
}

static void run_entry(lua_State *L) {
    int base = lua_gettop(L) - 1;
    if (xtbind_protected(L, 0, LUA_MULTRET) != LUA_OK)
        xtbind_report(L);
    else
        print_results(L, lua_gettop(L) - base);
    lua_settop(L, base);
}

/* ---- the loop -------------------------------------------------------------------------------- */

int xtbind_prompt(lua_State *L) {
    char history[4096] = "";
    const char *home = getenv("HOME");
    if (home) snprintf(history, sizeof history, "%s/.xtrain_history", home);
    completing = L;
    rl_readline_name = "xtrain";
    rl_attempted_completion_function = complete;
    rl_basic_word_break_characters = " \t\n\"\\'><=;+-*/%^~#{}()[],";
    using_history();
    stifle_history(HISTORY_LINES);
    if (*history) read_history(history);
    puts("xtrain " XT_VERSION "  xt.help() for help, Ctrl-D to leave");
    int status;
    for (char *entry; (entry = read_entry(L, &status)); free(entry)) {
        if (*entry) add_history(entry);
        if (status == LUA_OK)
            run_entry(L);
        else
            xtbind_report(L);
        lua_settop(L, 0);
    }
    puts("");
    if (*history) write_history(history);
    return 0;
}
