/*
 * main.c: the program: a prompt, a script with its arguments, a piece of code, or a verb.
 *
 * Exit status: 0 done, 1 the script raised or the run failed, 2 wrong usage. Errors go to standard
 * error with the script's file and line, and with a traceback when XT_TRACEBACK is set.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "program.h"

enum { DONE = 0, RAISED = 1, USAGE = 2 };

static const char usage_text[] =
    "usage: xtrain                          prompt; reads a script from standard input when that "
    "is\n"
    "                                       no terminal\n"
    "       xtrain FILE.lua [key=value...]  run a script or recipe; with --prompt, stopping at "
    "its\n"
    "                                       first step, at errors and at its end\n"
    "       xtrain -e CODE                  run a piece of Lua\n"
    "       xtrain info                     version, devices, libraries, ops\n"
    "       xtrain tokenize --tokenizer T --out DIR FILE...\n"
    "       xtrain generate DIR --prompt TEXT [--max N --temperature T --seed S]\n"
    "       xtrain export RUN OUT           a Hugging Face folder\n"
    "       xtrain eval DIR FILE...         mean loss, perplexity, bits a byte\n"
    "       xtrain plot RUN...              curves in the terminal and as one HTML page\n"
    "       xtrain verify RUN               replay the last saved interval\n"
    "       xtrain replay RUN --step N [--prompt]\n"
    "                                       a step again, or the prompt right before it\n"
    "       xtrain diff RUN RUN             the first step at which two runs part\n"
    "       xtrain ctl RUN eval|save|stop|set KEY VALUE   ask a run in another terminal\n"
    "       xtrain test [PATH...]           run specs\n"
    "       xtrain help, xtrain --version\n";

/* ---- running --------------------------------------------------------------------------------- */

static int message_handler(lua_State *L) {
    const char *text = getenv("XT_TRACEBACK");
    luaL_tolstring(L, 1, NULL);
    if (text && *text && strcmp(text, "0") != 0) luaL_traceback(L, L, lua_tostring(L, -1), 1);
    return 1;
}

/* Calls the chunk below its arguments. The message handler is message_handler, unless `prompt`:
   then the prompt opens where the error is raised. */
static int call_chunk(lua_State *L, int arguments, int results, enum xtbind_ctrl_c how) {
    int base = lua_gettop(L) - arguments;
    if (how == XTBIND_ENTER) {
        lua_getglobal(L, "require");
        lua_pushliteral(L, "xtrain.stop");
        lua_call(L, 1, 1);
        lua_getfield(L, -1, "failed");
        lua_remove(L, -2);
    } else
        lua_pushcfunction(L, message_handler);
    lua_insert(L, base);
    int status = xtbind_protected(L, arguments, results, base, how);
    lua_remove(L, base);
    return status;
}

static void report(lua_State *L) {
    const char *message = lua_tostring(L, -1);
    fflush(stdout);
    fprintf(stderr, "%s\n", message ? message : "(error without a message)");
    lua_pop(L, 1);
}

/* Loads (status says how that went) and calls the chunk on top with its arguments. */
static int run_chunk(lua_State *L, int status, int n, char **arguments, enum xtbind_ctrl_c how) {
    if (status == LUA_OK) {
        luaL_checkstack(L, n + 4, "arguments");
        for (int i = 0; i < n; i++) lua_pushstring(L, arguments[i]);
        status = call_chunk(L, n, 0, how);
    }
    if (status == LUA_OK) return DONE;
    report(L);
    return RAISED;
}

/* The global `arg`: arg[0] is the script, arg[1], ... what follows it, as it was typed. */
static void set_arg(lua_State *L, const char *script, int n, char **arguments) {
    lua_createtable(L, n, 1);
    lua_pushstring(L, script);
    lua_rawseti(L, -2, 0);
    for (int i = 0; i < n; i++) {
        lua_pushstring(L, arguments[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setglobal(L, "arg");
}

static void require_global(lua_State *L) {
    lua_getglobal(L, "require");
    lua_pushliteral(L, "xtrain");
    lua_call(L, 1, 1);
    lua_setglobal(L, "xt");
}

static int run_code(lua_State *L, const char *code, int n, char **arguments) {
    require_global(L);
    set_arg(L, "-e", n, arguments);
    return run_chunk(L, luaL_loadbuffer(L, code, strlen(code), "=(command line)"), n, arguments,
                     XTBIND_RAISE);
}

/* Takes the word --prompt out of the arguments: whether it was there. */
static bool take_prompt(int *n, char **arguments) {
    int kept = 0;
    for (int i = 0; i < *n; i++)
        if (strcmp(arguments[i], "--prompt") != 0) arguments[kept++] = arguments[i];
    bool found = kept < *n;
    *n = kept;
    return found;
}

/* With --prompt, stop.load pushes a chunk that ends in the prompt. */
static int load_file(lua_State *L, const char *path, bool prompt) {
    if (!prompt) return luaL_loadfile(L, path);
    lua_getglobal(L, "require");
    lua_pushliteral(L, "xtrain.stop");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "load");
    lua_remove(L, -2);
    lua_pushstring(L, path);
    lua_call(L, 1, 2);
    if (lua_isnil(L, -2)) return LUA_ERRSYNTAX;
    lua_pop(L, 1);
    return LUA_OK;
}

static int run_file(lua_State *L, const char *path, int n, char **arguments) {
    bool prompt = take_prompt(&n, arguments);
    bool person = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
    set_arg(L, path, n, arguments);
    int code = run_chunk(L, load_file(L, path, prompt), n, arguments,
                         prompt   ? XTBIND_ENTER
                         : person ? XTBIND_ENTER_RECIPE
                                  : XTBIND_RAISE);
    if (code == RAISED && person && !prompt && isatty(STDERR_FILENO))
        fputs("(with --prompt, the prompt opens where an error is raised)\n", stderr);
    return code;
}

static int run_stdin(lua_State *L) {
    require_global(L);
    set_arg(L, "stdin", 0, NULL);
    return run_chunk(L, luaL_loadfile(L, NULL), 0, NULL, XTBIND_RAISE);
}

/* ---- verbs ----------------------------------------------------------------------------------- */

/* A verb is a function of xtrain.cli; it takes the words that follow as one table, and returns the
   exit status (nothing or true: 0; false: 1). Nothing is pushed when there is no such verb. */
static bool find_verb(lua_State *L, const char *name) {
    if (*name < 'a' || *name > 'z' || strpbrk(name, "./")) return false;
    lua_getglobal(L, "require");
    lua_pushliteral(L, "xtrain.cli");
    if (lua_pcall(L, 1, 1, 0) != LUA_OK || !lua_istable(L, -1)) {
        lua_pop(L, 1);
        return false;
    }
    lua_getfield(L, -1, name);
    lua_remove(L, -2);
    if (lua_isfunction(L, -1)) return true;
    lua_pop(L, 1);
    return false;
}

static int run_verb(lua_State *L, const char *name, int n, char **arguments) {
    int code = DONE;
    set_arg(L, name, n, arguments);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushstring(L, arguments[i]);
        lua_rawseti(L, -2, i + 1);
    }
    if (call_chunk(L, 1, 1, XTBIND_RAISE) != LUA_OK) {
        report(L);
        return RAISED;
    }
    if (lua_isinteger(L, -1))
        code = (int)lua_tointeger(L, -1);
    else if (lua_isboolean(L, -1) && !lua_toboolean(L, -1))
        code = RAISED;
    lua_pop(L, 1);
    return code;
}

static int run_prompt(lua_State *L) {
    lua_getglobal(L, "require");
    lua_pushliteral(L, "xtrain.prompt");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "run");
    lua_call(L, 0, 0);
    lua_pop(L, 1);
    return DONE;
}

static int run_info(lua_State *L) {
    lua_getglobal(L, "require");
    lua_pushliteral(L, "xtrain.info");
    if (call_chunk(L, 1, 0, XTBIND_RAISE) == LUA_OK) return DONE;
    report(L);
    return RAISED;
}

static int wrong_usage(const char *given) {
    fprintf(stderr, "xtrain: there is no verb and no file '%s'\n%s", given, usage_text);
    return USAGE;
}

static bool is_script(const char *path) {
    size_t n = strlen(path);
    return (n > 4 && strcmp(path + n - 4, ".lua") == 0) || strcmp(path, "-") == 0 ||
           strchr(path, '/');
}

static int run_arguments(lua_State *L, int n, char **arguments) {
    const char *first = n > 0 ? arguments[0] : "";
    if (n == 0) {
        if (!isatty(STDIN_FILENO)) return run_stdin(L);
        require_global(L);
        return run_prompt(L);
    }
    if (strcmp(first, "-e") == 0) {
        if (n > 1) return run_code(L, arguments[1], n - 2, arguments + 2);
        fprintf(stderr, "xtrain: -e wants a piece of Lua\n%s", usage_text);
        return USAGE;
    }
    if (strcmp(first, "help") == 0 || strcmp(first, "-h") == 0 || strcmp(first, "--help") == 0) {
        fputs(usage_text, stdout);
        return DONE;
    }
    if (strcmp(first, "--version") == 0 || strcmp(first, "-v") == 0) {
        puts("xtrain " XT_VERSION);
        return DONE;
    }
    if (strcmp(first, "-") == 0) return run_stdin(L);
    if (is_script(first)) {
        if (access(first, F_OK) != 0) return wrong_usage(first);
        return run_file(L, first, n - 1, arguments + 1);
    }
    if (strcmp(first, "info") == 0) return run_info(L);
    if (find_verb(L, first)) return run_verb(L, first, n - 1, arguments + 1);
    if (access(first, F_OK) == 0) return run_file(L, first, n - 1, arguments + 1);
    return wrong_usage(first);
}

/* ---- main ------------------------------------------------------------------------------------ */

struct job {
    int n;            /* of the words after the program's name */
    char **arguments; /* those */
    int code;         /* the exit status, out */
};

static int run_job(lua_State *L) {
    struct job *job = lua_touserdata(L, 1);
    luaL_openlibs(L);
    luaL_requiref(L, "xtrain", luaopen_xtrain, 0);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
    lua_pushcfunction(L, xtbind_terminal);
    lua_setfield(L, -2, "xtrain.core.terminal");
    lua_settop(L, 0);
    job->code = run_arguments(L, job->n, job->arguments);
    return 0;
}

/* A thread that waits for another one sleeps soon: where other programs run too, spinning makes a
   step several times slower. OpenMP reads this before main, hence the second start. */
static void calm_threads(char **argv) {
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    if (setenv("GOMP_SPINCOUNT", "1000", 1) == 0) execv("/proc/self/exe", argv);
}

int main(int argc, char **argv) {
    calm_threads(argv);
    struct job job = {argc > 0 ? argc - 1 : 0, argv + 1, RAISED};
    lua_State *L = luaL_newstate();
    if (!L) {
        fputs("xtrain: out of memory\n", stderr);
        return RAISED;
    }
    lua_pushcfunction(L, run_job);
    lua_pushlightuserdata(L, &job);
    if (lua_pcall(L, 1, 0, 0) != LUA_OK) {
        report(L);
        job.code = RAISED;
    }
    lua_close(L);
    return job.code;
}
