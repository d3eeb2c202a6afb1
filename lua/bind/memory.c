/*
 * memory.c: how much memory there is, who holds it, and the switches that tests of it throw.
 */
#include "bind.h"

static enum xt_device optional_device(lua_State *L, const struct xtbind *b, int index,
                                      const char *who) {
    return lua_isnoneornil(L, index) ? b->device : xtbind_check_device(L, index, who);
}

static int memory(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_memory m;
    xt_memory(b->ctx, optional_device(L, b, 1, "memory"), &m);
    const struct {
        const char *name;
        lua_Integer value;
    } fields[] = {{"live_bytes", (lua_Integer)m.live_bytes},
                  {"peak_bytes", (lua_Integer)m.peak_bytes},
                  {"reserved_bytes", (lua_Integer)m.reserved_bytes},
                  {"made_bytes", (lua_Integer)m.made_bytes},
                  {"live_storages", m.live_storages},
                  {"system_allocs", m.system_allocs},
                  {"waits", m.waits}};
    lua_createtable(L, 0, 7);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        lua_pushinteger(L, fields[i].value);
        lua_setfield(L, -2, fields[i].name);
    }
    return 1;
}

static int memory_reset_peak(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    xt_memory_reset_peak(b->ctx, optional_device(L, b, 1, "memory_reset_peak"));
    return 0;
}

static int memory_trim(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    xt_memory_trim(b->ctx, optional_device(L, b, 1, "memory_trim"));
    return 0;
}

/* memory_limit(bytes [, device]); 0: none. */
static int memory_limit(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    int64_t bytes = 0;
    if (!xtbind_to_int(L, 1, &bytes) || bytes < 0)
        xtbind_error(L, "memory_limit: bytes is %s, wanted 0 or more", xtbind_kind(L, 1));
    xt_memory_limit(b->ctx, optional_device(L, b, 2, "memory_limit"), (size_t)bytes);
    return 0;
}

struct holder {
    struct xt_where where; /* the line that made them */
    size_t bytes;          /* of its storages together */
    int64_t storages;      /* their count */
};

struct holders {
    struct holder list[64]; /* by falling size */
    int n;                  /* used of list */
};

static void note_holder(void *user, struct xt_where where, size_t bytes, int64_t storages) {
    struct holders *h = user;
    if (h->n < 64) h->list[h->n++] = (struct holder){where, bytes, storages};
}

/* memory_holders([most [, device]]): {{where, bytes, storages}, ...} by falling size. */
static int memory_holders(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct holders h = {.n = 0};
    int most = (int)luaL_optinteger(L, 1, 16);
    xt_memory_holders(b->ctx, optional_device(L, b, 2, "memory_holders"), most, note_holder, &h);
    lua_createtable(L, h.n, 0);
    for (int i = 0; i < h.n; i++) {
        lua_createtable(L, 0, 3);
        xtbind_push_where(L, h.list[i].where);
        lua_setfield(L, -2, "where");
        lua_pushinteger(L, (lua_Integer)h.list[i].bytes);
        lua_setfield(L, -2, "bytes");
        lua_pushinteger(L, h.list[i].storages);
        lua_setfield(L, -2, "storages");
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int collect(lua_State *L) {
    xtbind_collect(xtbind_carried(L), true);
    return 0;
}

/* ---- switches for tests and for looking inside ----------------------------------------------- */

static int fail_allocation(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    xt_fail_allocation(b->ctx, luaL_checkinteger(L, 1));
    return 0;
}

static int live_count(lua_State *L) {
    lua_pushinteger(L, xt_live_count(xtbind_carried(L)->ctx));
    return 1;
}

static int poison(lua_State *L) {
    xt_memory_poison(xtbind_carried(L)->ctx, lua_toboolean(L, 1));
    return 0;
}

static int cache(lua_State *L) {
    xt_memory_cache(xtbind_carried(L)->ctx, lua_toboolean(L, 1));
    return 0;
}

void xtbind_open_memory(lua_State *L, struct xtbind *b) {
    static const luaL_Reg public[] = {{"memory", memory},
                                      {"memory_reset_peak", memory_reset_peak},
                                      {"collect", collect},
                                      {NULL, NULL}};
    static const luaL_Reg private[] = {{"memory_trim", memory_trim},
                                       {"memory_limit", memory_limit},
                                       {"memory_holders", memory_holders},
                                       {"fail_allocation", fail_allocation},
                                       {"live_count", live_count},
                                       {"poison", poison},
                                       {"cache", cache},
                                       {NULL, NULL}};
    xtbind_functions(L, b, public, private);
}
