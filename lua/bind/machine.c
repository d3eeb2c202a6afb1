/*
 * machine.c: devices, threads, the instruction set, libraries opened at run time.
 */
#include <string.h>

#include "bind.h"

enum xt_device xtbind_check_device(lua_State *L, int index, const char *who) {
    const char *text = lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index) : "";
    struct xt_ctx *ctx = xtbind_ctx(L);
    for (int d = 0; d < XT_DEVICE_COUNT; d++) {
        if (strcmp(text, xt_device_name((enum xt_device)d)) != 0) continue;
        enum xt_status status = xt_device_open(ctx, (enum xt_device)d);
        if (status == XT_OK) return (enum xt_device)d;
        xt_fail_in(ctx, status, who);
        xtbind_check(L, status);
    }
    xtbind_error(L, "%s: device is %s, wanted 'cpu' or 'cuda'", who, xtbind_kind(L, index));
}

static int device(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    if (!lua_isnoneornil(L, 1)) {
        b->device = xtbind_check_device(L, 1, "device");
        xt_set_device(b->ctx, b->device);
    }
    lua_pushstring(L, xt_device_name(b->device));
    return 1;
}

/* describe(device): one line about it. */
static int describe(lua_State *L) {
    char text[256] = "";
    struct xtbind *b = xtbind_carried(L);
    xt_device_describe(b->ctx, xtbind_check_device(L, 1, "describe"), text, sizeof text);
    lua_pushstring(L, text);
    return 1;
}

/* finish(): waits for every open device, and raises what went wrong there. */
static int finish(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    xtbind_check(L, xt_devices_finish(b->ctx));
    return 0;
}

static int devices(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    int n = 0;
    lua_newtable(L);
    for (int d = 0; d < XT_DEVICE_COUNT; d++) {
        if (xt_device_open(b->ctx, (enum xt_device)d) != XT_OK) continue;
        lua_pushstring(L, xt_device_name((enum xt_device)d));
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

static int threads(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    int64_t n = 0;
    if (!lua_isnoneornil(L, 1)) {
        if (!xtbind_to_int(L, 1, &n) || n < 1 || n > 1024)
            xtbind_error(L, "threads: n is %s, wanted 1 to 1024", xtbind_kind(L, 1));
        xt_set_threads(b->ctx, (int)n);
    }
    lua_pushinteger(L, xt_threads(b->ctx));
    return 1;
}

static int isa(lua_State *L) {
    lua_pushstring(L, xt_isa(xtbind_carried(L)->ctx));
    return 1;
}

/* libraries(): {{name, found, version, detail}, ...} of what is opened at run time. */
static int libraries(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_library library = {.name = "oneDNN"};
    xtbind_check(L, xt_library_onednn(b->ctx, &library));
    lua_createtable(L, 1, 0);
    lua_createtable(L, 0, 4);
    lua_pushstring(L, library.name);
    lua_setfield(L, -2, "name");
    lua_pushboolean(L, library.found);
    lua_setfield(L, -2, "found");
    lua_pushstring(L, library.version);
    lua_setfield(L, -2, "version");
    lua_pushstring(L, library.detail);
    lua_setfield(L, -2, "detail");
    lua_rawseti(L, -2, 1);
    return 1;
}

/* kernels(op name, device): the dtypes of the first argument that have a kernel there. */
static int kernels(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    const struct xt_op *op = xt_op_find(b->ctx, luaL_checkstring(L, 1));
    enum xt_device on = xtbind_check_device(L, 2, "kernels");
    int n = 0;
    lua_newtable(L);
    for (int d = 0; op && d < XT_DTYPE_COUNT; d++) {
        if (!xt_op_has_kernel(b->ctx, op, on, (enum xt_dtype)d)) continue;
        lua_pushstring(L, xt_dtype_name((enum xt_dtype)d));
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

void xtbind_open_machine(lua_State *L, struct xtbind *b) {
    static const luaL_Reg public[] = {
        {"device", device}, {"devices", devices}, {"threads", threads}, {"isa", isa}, {NULL, NULL}};
    static const luaL_Reg private[] = {{"describe", describe},
                                       {"finish", finish},
                                       {"libraries", libraries},
                                       {"kernels", kernels},
                                       {NULL, NULL}};
    xtbind_functions(L, b, public, private);
}
