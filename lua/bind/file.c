/*
 * file.c: require "xtrain.core.file": what Lua's own io and os leave out.
 *
 * All return what they promise, or nil and a message: the file system says no in ordinary life.
 */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "bind.h"
#include "io/file.h"

static int refused(lua_State *L, const char *doing, const char *path) {
    int code = errno;
    lua_pushnil(L);
    lua_pushfstring(L, "cannot %s %s: %s", doing, path, strerror(code));
    return 2;
}

static int yes(lua_State *L) {
    lua_pushboolean(L, 1);
    return 1;
}

/* mkdir(path) -> true: with all folders above it; one that is there is fine. */
static int make_folder(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    lua_pushstring(L, path);
    char *copy = strdup(path);
    if (!copy) return luaL_error(L, "out of memory");
    int code = 0;
    for (char *at = copy + 1; code == 0 && *at; at++) {
        if (*at != '/') continue;
        *at = '\0';
        if (mkdir(copy, 0777) != 0 && errno != EEXIST) code = errno;
        *at = '/';
    }
    if (code == 0 && mkdir(copy, 0777) != 0 && errno != EEXIST) code = errno;
    free(copy);
    struct stat info;
    if (code == 0 && (stat(path, &info) != 0 || !S_ISDIR(info.st_mode))) code = ENOTDIR;
    errno = code;
    return code ? refused(L, "make the folder", path) : yes(L);
}

/* rename(from, to) -> true. */
static int rename_file(lua_State *L) {
    const char *from = luaL_checkstring(L, 1), *to = luaL_checkstring(L, 2);
    return rename(from, to) != 0 ? refused(L, "rename", from) : yes(L);
}

/* sync(folder) -> true: its entries are on the disk. */
static int sync_folder(lua_State *L) {
    return xt_sync_folder(xtbind_ctx(L), luaL_checkstring(L, 1)) == XT_OK ? yes(L)
                                                                          : xtbind_nil(L, NULL);
}

/* Removes a file or a folder with what is in it; links are removed, not followed. 0 or errno. */
static int remove_all(const char *path) {
    struct stat info;
    if (lstat(path, &info) != 0) return errno;
    if (!S_ISDIR(info.st_mode)) return unlink(path) == 0 ? 0 : errno;
    DIR *folder = opendir(path);
    if (!folder) return errno;
    int code = 0;
    struct dirent *entry;
    while (code == 0 && (entry = readdir(folder))) {
        char *inner;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (asprintf(&inner, "%s/%s", path, entry->d_name) < 0)
            code = ENOMEM;
        else {
            code = remove_all(inner);
            free(inner);
        }
    }
    closedir(folder);
    return code ? code : rmdir(path) == 0 ? 0 : errno;
}

/* remove_tree(path) -> true: also when there is nothing. */
static int remove_tree(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    errno = remove_all(path);
    return errno && errno != ENOENT ? refused(L, "remove", path) : yes(L);
}

static int free_folder(lua_State *L) {
    DIR **box = lua_touserdata(L, 1);
    if (*box) closedir(*box);
    *box = NULL;
    return 0;
}

/* list(folder) -> {name, ...} sorted by byte. */
static int list(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    DIR **box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = NULL;
    if (luaL_newmetatable(L, "xtrain.folder")) {
        lua_pushcfunction(L, free_folder);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    *box = opendir(path);
    if (!*box) return refused(L, "list", path);
    lua_newtable(L);
    struct dirent *entry;
    for (int n = 0; (entry = readdir(*box));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        int at = ++n;
        for (; at > 1; at--) { /* insertion sort: folders of runs are small */
            lua_rawgeti(L, -1, at - 1);
            bool before = strcmp(lua_tostring(L, -1), entry->d_name) < 0;
            if (before)
                lua_pop(L, 1);
            else
                lua_rawseti(L, -2, at);
            if (before) break;
        }
        lua_pushstring(L, entry->d_name);
        lua_rawseti(L, -2, at);
    }
    closedir(*box);
    *box = NULL;
    return 1;
}

/* exists(path) -> "file", "folder" or "other"; nil when there is nothing. */
static int exists(lua_State *L) {
    struct stat info;
    if (stat(luaL_checkstring(L, 1), &info) != 0)
        lua_pushnil(L);
    else
        lua_pushstring(L, S_ISREG(info.st_mode)   ? "file"
                          : S_ISDIR(info.st_mode) ? "folder"
                                                  : "other");
    return 1;
}

/* size(path) -> bytes, modification time in seconds. */
static int size(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    struct stat info;
    if (stat(path, &info) != 0) return refused(L, "look at", path);
    lua_pushinteger(L, info.st_size);
    lua_pushnumber(L, (double)info.st_mtim.tv_sec + 1e-9 * (double)info.st_mtim.tv_nsec);
    return 2;
}

/* read(path) -> text; .gz and .zst are unpacked. */
static int read_file(lua_State *L) {
    char *text;
    size_t bytes;
    if (xt_read_text(xtbind_ctx(L), luaL_checkstring(L, 1), &text, &bytes) != XT_OK)
        return xtbind_nil(L, NULL);
    lua_pushlstring(L, text, bytes);
    free(text);
    return 1;
}

/* write_atomic(path, text) -> true: written beside, synced, renamed into place. */
static int write_atomic(lua_State *L) {
    size_t bytes;
    const char *path = luaL_checkstring(L, 1), *text = luaL_checklstring(L, 2, &bytes);
    struct xt_ctx *ctx = xtbind_ctx(L);
    struct xt_writer w;
    enum xt_status status = xt_writer_open(ctx, path, &w);
    if (status != XT_OK) return xtbind_nil(L, NULL);
    status = xt_writer_put(ctx, &w, text, bytes);
    if (status == XT_OK)
        status = xt_writer_commit(ctx, &w);
    else
        xt_writer_abandon(&w);
    return status == XT_OK ? yes(L) : xtbind_nil(L, NULL);
}

/* truncate(path, bytes) -> true. */
static int truncate_file(lua_State *L) {
    const char *path = luaL_checkstring(L, 1);
    return truncate(path, luaL_checkinteger(L, 2)) != 0 ? refused(L, "shorten", path) : yes(L);
}

/* monotonic() -> seconds from some fixed moment. */
static int monotonic(lua_State *L) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    lua_pushnumber(L, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
    return 1;
}

/* sleep(seconds): a signal ends it early. */
static int sleep_for(lua_State *L) {
    double seconds = luaL_checknumber(L, 1);
    struct timespec wanted = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&wanted, NULL);
    return 0;
}

/* isatty(descriptor) -> boolean. */
static int is_terminal(lua_State *L) {
    lua_pushboolean(L, isatty((int)luaL_checkinteger(L, 1)));
    return 1;
}

/* columns() -> width of the terminal on standard error, or 80. */
static int columns(lua_State *L) {
    struct winsize w = {0};
    bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0;
    lua_pushinteger(L, known ? w.ws_col : 80);
    return 1;
}

static int process(lua_State *L) {
    lua_pushinteger(L, getpid());
    return 1;
}

/* resident() -> bytes of anonymous memory of this process, from /proc/self/status; or nil. */
static int resident(lua_State *L) {
    FILE *f = fopen("/proc/self/status", "r");
    long long kib = -1;
    char line[256];
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "RssAnon: %lld", &kib) == 1) break;
    if (f) fclose(f);
    if (kib < 0)
        lua_pushnil(L);
    else
        lua_pushinteger(L, kib * 1024);
    return 1;
}

int xtbind_file(lua_State *L) {
    static const luaL_Reg functions[] = {{"mkdir", make_folder},
                                         {"rename", rename_file},
                                         {"sync", sync_folder},
                                         {"remove_tree", remove_tree},
                                         {"list", list},
                                         {"exists", exists},
                                         {"size", size},
                                         {"read", read_file},
                                         {"write_atomic", write_atomic},
                                         {"truncate", truncate_file},
                                         {"monotonic", monotonic},
                                         {"sleep", sleep_for},
                                         {"isatty", is_terminal},
                                         {"columns", columns},
                                         {"pid", process},
                                         {"resident", resident},
                                         {NULL, NULL}};
    luaL_newlib(L, functions);
    return 1;
}
