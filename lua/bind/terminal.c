/*
 * terminal.c: the module xtrain.core.terminal, which the program alone has: lines read with
 * libedit, and calls that Ctrl-C stops. What the prompt is lies in lua/xtrain/prompt.lua.
 */
#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <wchar.h>

#include "program.h"

#define HISTORY_ENTRIES 2000

/* The userdata behind upvalue 1 of every function here. */
struct terminal {
    EditLine *edit;      /* NULL until the first line is read */
    History *history;    /* likewise */
    lua_State *L;        /* of the read in progress */
    int complete;        /* stack index of its completion function, or 0 */
    const char *prompt;  /* of it */
    mbstate_t multibyte; /* of the character being read */
};

/* Signals while a line is read. */
static volatile sig_atomic_t cancelled, resized;

static void on_cancel(int number) {
    (void)number;
    cancelled = 1;
}

static void on_resize(int number) {
    (void)number;
    resized = 1;
}

static struct terminal *terminal_of(lua_State *L) {
    return lua_touserdata(L, lua_upvalueindex(1));
}

/* ---- libedit's callbacks --------------------------------------------------------------------- */

static struct terminal *client(EditLine *edit) {
    struct terminal *t = NULL;
    el_get(edit, EL_CLIENTDATA, (void **)&t);
    return t;
}

static char *prompt_of(EditLine *edit) {
    return (char *)(uintptr_t)client(edit)->prompt;
}

/* One character: 1, or 0 at the end of the input, or -1 when Ctrl-C was pressed. */
static int read_character(EditLine *edit, wchar_t *out) {
    struct terminal *t = client(edit);
    for (;;) {
        char byte;
        ssize_t n = cancelled ? -1 : read(STDIN_FILENO, &byte, 1);
        if (cancelled) return -1;
        if (n < 0 && errno == EINTR) {
            if (resized) el_resize(edit);
            resized = 0;
            continue;
        }
        if (n <= 0) return (int)n;
        size_t used = mbrtowc(out, &byte, 1, &t->multibyte);
        if (used == (size_t)-2) continue; /* more bytes follow */
        if (used == (size_t)-1) {
            memset(&t->multibyte, 0, sizeof t->multibyte);
            *out = L'?';
        }
        return 1;
    }
}

/* Tab: complete(line, cursor) -> what to insert, and a text to show above the line; either nil. */
static unsigned char complete(EditLine *edit, int key) {
    (void)key;
    struct terminal *t = client(edit);
    const LineInfo *line = el_line(edit);
    lua_State *L = t->L;
    int top = lua_gettop(L);
    if (!t->complete || !lua_checkstack(L, 8)) return CC_ERROR;
    lua_pushvalue(L, t->complete);
    lua_pushlstring(L, line->buffer, (size_t)(line->lastchar - line->buffer));
    lua_pushinteger(L, line->cursor - line->buffer);
    unsigned char result = CC_ERROR;
    if (lua_pcall(L, 2, 2, 0) == LUA_OK) {
        const char *insert = lua_tostring(L, -2), *show = lua_tostring(L, -1);
        if (show) {
            fputc('\n', stdout);
            fputs(show, stdout);
            fputc('\n', stdout);
            fflush(stdout);
            result = CC_REDISPLAY;
        }
        if (insert && *insert && el_insertstr(edit, insert) == 0 && result == CC_ERROR)
            result = CC_REFRESH;
    }
    lua_settop(L, top);
    return result;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Up and down look for what begins like the line; Ctrl-R searches; the rest is as in a shell. */
static void bind_keys(EditLine *edit) {
    static const char *const keys[][2] = {
        {"^I", "xt-complete"},
        {"^R", "em-inc-search-prev"},
        {"^W", "ed-delete-prev-word"},
        {"\033[A", "ed-search-prev-history"},
        {"\033OA", "ed-search-prev-history"},
        {"\033[B", "ed-search-next-history"},
        {"\033OB", "ed-search-next-history"},
        {"^P", "ed-search-prev-history"},
        {"^N", "ed-search-next-history"},
        {"\033[1;5C", "em-next-word"},
        {"\033[1;5D", "ed-prev-word"},
        {"\033[3~", "ed-delete-next-char"},
        {"\033[H", "ed-move-to-beg"},
        {"\033[1~", "ed-move-to-beg"},
        {"\033[F", "ed-move-to-end"},
        {"\033[4~", "ed-move-to-end"},
    };
    /* Wide: of narrow strings libedit makes copies that it never frees. */
    el_wset(edit, EL_ADDFN, L"xt-complete", L"completes names, fields, options, files", complete);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        el_set(edit, EL_BIND, keys[i][0], keys[i][1], NULL);
}

static void open_edit(lua_State *L, struct terminal *t) {
    HistEvent event;
    if (t->edit) return;
    /* Of character classes alone: numbers keep their point whatever the country. */
    if (!setlocale(LC_CTYPE, "") || MB_CUR_MAX == 1) setlocale(LC_CTYPE, "C.UTF-8");
    if (!t->history) t->history = history_init();
    if (!t->history) luaL_error(L, "out of memory");
    history(t->history, &event, H_SETSIZE, HISTORY_ENTRIES);
    history(t->history, &event, H_SETUNIQUE, 1);
    t->edit = el_init("xtrain", stdin, stdout, stderr);
    if (!t->edit) luaL_error(L, "the terminal cannot be set up");
    el_set(t->edit, EL_CLIENTDATA, t);
    el_set(t->edit, EL_EDITOR, "emacs");
    el_set(t->edit, EL_HIST, history, t->history);
    el_set(t->edit, EL_PROMPT, prompt_of);
    el_set(t->edit, EL_GETCFN, read_character);
    el_set(t->edit, EL_SIGNAL, 0);
    bind_keys(t->edit);
    el_source(t->edit, NULL); /* ~/.editrc */
}

static int close_terminal(lua_State *L) {
    struct terminal *t = lua_touserdata(L, 1);
    if (t->edit) el_end(t->edit);
    if (t->history) history_end(t->history);
    t->edit = NULL;
    t->history = NULL;
    return 0;
}

/* ---- the functions --------------------------------------------------------------------------- */

/* read(prompt [, complete]) -> line without its end; nil at the end of the input; nil,
   "interrupted" when Ctrl-C was pressed. */
static int read_line(lua_State *L) {
    struct terminal *t = terminal_of(L);
    const char *prompt = luaL_checkstring(L, 1);
    lua_settop(L, 2);
    open_edit(L, t);
    struct terminal outer = *t;
    t->L = L;
    t->complete = lua_isfunction(L, 2) ? 2 : 0;
    t->prompt = prompt;
    cancelled = resized = 0;
    fflush(stdout);
    struct sigaction cancel = {.sa_handler = on_cancel}, resize = {.sa_handler = on_resize};
    struct sigaction before_cancel, before_resize;
    sigaction(SIGINT, &cancel, &before_cancel);
    sigaction(SIGWINCH, &resize, &before_resize);
    el_resize(t->edit);
    int n = 0;
    const char *line = el_gets(t->edit, &n);
    sigaction(SIGINT, &before_cancel, NULL);
    sigaction(SIGWINCH, &before_resize, NULL);
    t->L = outer.L;
    t->complete = outer.complete;
    t->prompt = outer.prompt;
    if (cancelled) {
        el_reset(t->edit);
        lua_pushnil(L);
        lua_pushliteral(L, "interrupted");
        return 2;
    }
    if (!line || n <= 0) return 0;
    if (line[n - 1] == '\n') n--;
    lua_pushlstring(L, line, (size_t)n);
    return 1;
}

/* remember(entry): the newest of the history. */
static int remember(lua_State *L) {
    struct terminal *t = terminal_of(L);
    HistEvent event;
    const char *entry = luaL_checkstring(L, 1);
    open_edit(L, t);
    history(t->history, &event, H_ENTER, entry);
    return 0;
}

/* protected(handler, fn, ...) -> true, results; or false, what handler(message) returned. Ctrl-C
   makes fn raise. fn runs in a thread of its own, so that this works inside a hook, too. */
static int protected_call(lua_State *L) {
    int arguments = lua_gettop(L) - 2;
    luaL_checktype(L, 1, LUA_TFUNCTION);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_State *thread = lua_newthread(L);
    lua_insert(L, 1);
    lua_sethook(thread, NULL, 0, 0);
    if (!lua_checkstack(thread, arguments + 4)) luaL_error(L, "too many arguments");
    lua_xmove(L, thread, arguments + 2);
    int status = xtbind_protected(thread, arguments, LUA_MULTRET, 1, XTBIND_RAISE);
    int results = lua_gettop(thread) - 1; /* the handler lies below */
    lua_pushboolean(L, status == LUA_OK);
    if (!lua_checkstack(L, results)) luaL_error(L, "too many results");
    lua_xmove(thread, L, results);
    return 1 + results;
}

/* size() -> columns, rows; nothing where there is no terminal. */
static int size(lua_State *L) {
    struct winsize window;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || window.ws_col == 0) return 0;
    lua_pushinteger(L, window.ws_col);
    lua_pushinteger(L, window.ws_row);
    return 2;
}

/* is_terminal() -> whether a person is there to be asked. */
static int is_terminal(lua_State *L) {
    lua_pushboolean(L, isatty(STDIN_FILENO) && isatty(STDOUT_FILENO));
    return 1;
}

int xtbind_terminal(lua_State *L) {
    static const luaL_Reg functions[] = {{"read", read_line},           {"remember", remember},
                                         {"protected", protected_call}, {"size", size},
                                         {"is_terminal", is_terminal},  {NULL, NULL}};
    struct terminal *t = lua_newuserdatauv(L, sizeof *t, 0);
    *t = (struct terminal){.edit = NULL};
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, close_terminal);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    luaL_newlibtable(L, functions);
    lua_insert(L, -2);
    luaL_setfuncs(L, functions, 1);
    return 1;
}
