/*
 * choice.c: which algorithms the matrix products of a GPU take: those in use, those of a run that
 * is gone on with, and the text of the table (runtime/choice.c).
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bind.h"

/* ---- what a function owns while Lua may raise ------------------------------------------------ */

/* Collected with the call that made it. */
struct owned {
    struct xt_choices *set;        /* or NULL */
    const struct xt_choice **list; /* or NULL */
    int n;                         /* of list */
};

static int free_owned(lua_State *L) {
    struct owned *o = lua_touserdata(L, 1);
    free(o->list);
    xt_choices_free(o->set);
    *o = (struct owned){NULL, NULL, 0};
    return 0;
}

static struct owned *push_owned(lua_State *L) {
    struct owned *o = lua_newuserdatauv(L, sizeof *o, 0);
    *o = (struct owned){NULL, NULL, 0};
    if (luaL_newmetatable(L, "xtrain choices")) {
        lua_pushcfunction(L, free_owned);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    return o;
}

/* ---- functions ------------------------------------------------------------------------------- */

static void set_integer(lua_State *L, const char *name, int64_t value) {
    lua_pushinteger(L, (lua_Integer)value);
    lua_setfield(L, -2, name);
}

static void set_boolean(lua_State *L, const char *name, bool value) {
    lua_pushboolean(L, value);
    lua_setfield(L, -2, name);
}

static void push_choice(lua_State *L, const struct xt_choice *c) {
    static const char *const from[] = {"heuristic", "table", "run", "tuned"};
    const struct xt_choice_key *k = &c->key;
    char text[XT_CHOICE_TEXT];
    lua_createtable(L, 0, 28);
    lua_pushstring(L, c->device);
    lua_setfield(L, -2, "device");
    set_integer(L, "version", c->version);
    lua_pushstring(L, xt_dtype_name((enum xt_dtype)k->in));
    lua_setfield(L, -2, "dtype");
    lua_pushstring(L, xt_dtype_name((enum xt_dtype)k->out));
    lua_setfield(L, -2, "out");
    set_integer(L, "m", k->m);
    set_integer(L, "n", k->n);
    set_integer(L, "k", k->k);
    set_integer(L, "batch", k->batch);
    set_integer(L, "lda", k->lda);
    set_integer(L, "ldb", k->ldb);
    set_integer(L, "ldc", k->ldc);
    set_boolean(L, "a_turned", k->a_turned);
    set_boolean(L, "b_turned", k->b_turned);
    set_boolean(L, "bias", k->bias);
    set_boolean(L, "add", k->add);
    lua_createtable(L, XT_CHOICE_WORDS, 0);
    for (int i = 0; i < XT_CHOICE_WORDS; i++) {
        lua_pushinteger(L, (lua_Integer)c->words[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "words");
    lua_pushstring(L, from[c->from]);
    lua_setfield(L, -2, "from");
    if (c->measured) {
        set_integer(L, "measured", c->measured);
        lua_pushnumber(L, c->before_us);
        lua_setfield(L, -2, "before_us");
        lua_pushnumber(L, c->after_us);
        lua_setfield(L, -2, "after_us");
    }
    xt_choice_write(c, text, sizeof text);
    lua_pushstring(L, text);
    lua_setfield(L, -2, "row");
}

/*
 * products(): the choices used in this process, sorted: {{device, version, dtype, out, m, n, k,
 * batch, lda, ldb, ldc, a_turned, b_turned, bias, add, words, from = "heuristic"|"table"|"run"|
 * "tuned", row = its text}, ...}; after tuning also measured, of how many algorithms the fastest
 * is taken, and the microseconds before_us and after_us. Without a GPU: none.
 */
static int products(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    struct xt_choices *choices = NULL;
    struct owned *o = push_owned(L);
    int n = 0;
    xtbind_check(L, xt_choices_of(b->ctx, &choices));
    xtbind_check(L, xt_choices_list(b->ctx, choices, &o->list, &o->n));
    lua_newtable(L);
    for (int i = 0; i < o->n; i++) {
        if (!o->list[i]->used) continue;
        push_choice(L, o->list[i]);
        lua_rawseti(L, -2, ++n);
    }
    return 1;
}

/* use_products(text, name): the rows of a run, to be taken before all others from here on. */
static int use_products(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    xtbind_check(L, xt_choices_use(b->ctx, luaL_checkstring(L, 1), luaL_checkstring(L, 2)));
    return 0;
}

/* forget_products(): what runs before took is forgotten, and nothing is tuned. */
static int forget_products(lua_State *L) {
    xt_choices_reset(xtbind_carried(L)->ctx);
    return 0;
}

/*
 * merge_products(old, old_name, new, new_name): the rows of both texts, sorted, one a product: the
 * new one's where both have it; how many are new, and how many changed.
 */
static int merge_products(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    const char *old_text = luaL_checkstring(L, 1), *old_name = luaL_checkstring(L, 2);
    const char *new_text = luaL_checkstring(L, 3), *new_name = luaL_checkstring(L, 4);
    struct owned *old = push_owned(L), *all = push_owned(L);
    int added = 0, changed = 0;
    old->set = xt_choices_new();
    all->set = xt_choices_new();
    if (!old->set || !all->set) return xtbind_error(L, "merge_products: out of memory");
    xtbind_check(L, xt_choices_read(b->ctx, old->set, old_text, old_name, XT_FROM_TABLE));
    xtbind_check(L, xt_choices_read(b->ctx, all->set, old_text, old_name, XT_FROM_TABLE));
    xtbind_check(L, xt_choices_read(b->ctx, all->set, new_text, new_name, XT_FROM_TUNING));
    xtbind_check(L, xt_choices_list(b->ctx, all->set, &all->list, &all->n));
    luaL_Buffer buffer;
    luaL_buffinit(L, &buffer);
    for (int i = 0; i < all->n; i++) {
        const struct xt_choice *c = all->list[i],
                               *was = xt_choices_find(old->set, c->device, c->version, &c->key);
        if (!was)
            added++;
        else if (memcmp(was->words, c->words, sizeof c->words) != 0)
            changed++;
        char text[XT_CHOICE_TEXT];
        xt_choice_write(c, text, sizeof text);
        luaL_addstring(&buffer, text);
    }
    luaL_pushresult(&buffer);
    lua_pushinteger(L, added);
    lua_pushinteger(L, changed);
    return 3;
}

/* tune(on): whether products are measured when they are first met. Raises without a GPU. */
static int tune(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    const bool on = lua_toboolean(L, 1);
    if (on) {
        enum xt_status status = xt_device_open(b->ctx, XT_CUDA);
        if (status != XT_OK) xtbind_check(L, xt_fail_in(b->ctx, status, "tune"));
    }
    xt_tune(b->ctx, on);
    return 0;
}

/* product_library(): the GPU's name, the version of the library of its products, and the digest of
   the compiled-in table. Raises without a GPU. */
static int product_library(lua_State *L) {
    struct xtbind *b = xtbind_carried(L);
    char device[XT_CHOICE_DEVICE] = "", digest[32];
    int64_t version = 0;
    xtbind_check(L, xt_product_library(b->ctx, device, &version));
    snprintf(digest, sizeof digest, "0x%016" PRIx64, xt_choices_digest());
    lua_pushstring(L, device);
    lua_pushinteger(L, (lua_Integer)version);
    lua_pushstring(L, digest);
    return 3;
}

void xtbind_open_choice(lua_State *L, struct xtbind *b) {
    static const luaL_Reg private[] = {{"products", products},
                                       {"use_products", use_products},
                                       {"forget_products", forget_products},
                                       {"merge_products", merge_products},
                                       {"tune", tune},
                                       {"product_library", product_library},
                                       {NULL, NULL}};
    xtbind_functions(L, b, NULL, private);
}
