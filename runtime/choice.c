/*
 * choice.c: which algorithm of the library each matrix product on a GPU takes.
 *
 * A choice belongs to a device, a version of the library and all that describes a product to it.
 * They come from the committed table (kernels/products.def, compiled in), from a run that is gone
 * on with, from the library's own ranking, and from tuning; a later one takes the place of an
 * earlier one. A set of them is read and written as text, so that the table, what a run has used
 * and what tuning found are one format:
 *
 *     PRODUCT("DEVICE", version, in, out, m, n, k, batch,
 *             lda, ldb, ldc, a_batch, b_batch, c_batch, a_turned, b_turned, bias, add, alignments,
 *             the eight words of the algorithm)
 *
 * Blanks and comments between rows mean nothing. Written rows are sorted, and one a product.
 */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"

#define ROW "PRODUCT("

/* The numbers of a row after its types, in their order there, and their least and largest. */
#define NUMBERS(X)                                                                                 \
    X(m, 1, INT64_MAX)                                                                             \
    X(n, 1, INT64_MAX)                                                                             \
    X(k, 1, INT64_MAX)                                                                             \
    X(batch, 1, INT64_MAX)                                                                         \
    X(lda, 1, INT64_MAX)                                                                           \
    X(ldb, 1, INT64_MAX)                                                                           \
    X(ldc, 1, INT64_MAX)                                                                           \
    X(a_batch, INT64_MIN, INT64_MAX)                                                               \
    X(b_batch, INT64_MIN, INT64_MAX)                                                               \
    X(c_batch, INT64_MIN, INT64_MAX)                                                               \
    X(a_turned, 0, 1)                                                                              \
    X(b_turned, 0, 1)                                                                              \
    X(bias, 0, 1)                                                                                  \
    X(add, 0, 1)                                                                                   \
    X(a_align, 1, 64)                                                                              \
    X(b_align, 1, 64)                                                                              \
    X(c_align, 1, 64)

struct xt_choices {
    struct xt_choice *rows; /* in no order */
    int n, room;            /* used of rows, and what it holds */
    int *places;            /* open addressing by device, version and product: a row's index + 1 */
    size_t n_places;        /* a power of two, at least 2 * n; or 0 */
};

/* ---- a set ----------------------------------------------------------------------------------- */

struct xt_choices *xt_choices_new(void) {
    return calloc(1, sizeof(struct xt_choices));
}

void xt_choices_free(struct xt_choices *set) {
    if (!set) return;
    free(set->rows);
    free(set->places);
    free(set);
}

static size_t hash_of(const char *device, int64_t version, const struct xt_choice_key *key) {
    uint64_t h = xt_hash(device, strlen(device));
    return (size_t)xt_seed_mix(xt_seed_mix(h, (uint64_t)version), xt_hash(key, sizeof *key));
}

/* Where the row is, or where it would go. The set has places. */
static int *place_of(const struct xt_choices *set, const char *device, int64_t version,
                     const struct xt_choice_key *key) {
    size_t at = hash_of(device, version, key) & (set->n_places - 1);
    for (; set->places[at]; at = (at + 1) & (set->n_places - 1)) {
        const struct xt_choice *row = &set->rows[set->places[at] - 1];
        if (row->version == version && strcmp(row->device, device) == 0 &&
            memcmp(&row->key, key, sizeof *key) == 0)
            break;
    }
    return &set->places[at];
}

const struct xt_choice *xt_choices_find(const struct xt_choices *set, const char *device,
                                        int64_t version, const struct xt_choice_key *key) {
    if (!set->n_places) return NULL;
    const int *place = place_of(set, device, version, key);
    return *place ? &set->rows[*place - 1] : NULL;
}

/* Room for one more row. */
static bool grow(struct xt_choices *set) {
    if (set->n < set->room) return true;
    const int room = set->room ? 2 * set->room : 64;
    const size_t n_places = 2 * (size_t)room;
    struct xt_choice *rows = realloc(set->rows, (size_t)room * sizeof *rows);
    if (!rows) return false;
    set->rows = rows;
    int *places = calloc(n_places, sizeof *places);
    if (!places) return false;
    free(set->places);
    set->places = places;
    set->n_places = n_places;
    set->room = room;
    for (int i = 0; i < set->n; i++)
        *place_of(set, rows[i].device, rows[i].version, &rows[i].key) = i + 1;
    return true;
}

enum xt_status xt_choices_put(struct xt_ctx *ctx, struct xt_choices *set,
                              const struct xt_choice *choice) {
    const struct xt_choice *old =
        xt_choices_find(set, choice->device, choice->version, &choice->key);
    if (old) {
        set->rows[old - set->rows] = *choice;
        return XT_OK;
    }
    if (!grow(set)) return xt_fail(ctx, XT_MEMORY, "out of memory: the choices of algorithms");
    set->rows[set->n] = *choice;
    *place_of(set, choice->device, choice->version, &choice->key) = ++set->n;
    return XT_OK;
}

/* ---- order ----------------------------------------------------------------------------------- */

static int order(int64_t a, int64_t b) {
    return (a > b) - (a < b);
}

static int compare(const void *left, const void *right) {
    const struct xt_choice *a = *(const struct xt_choice *const *)left,
                           *b = *(const struct xt_choice *const *)right;
    int by = strcmp(a->device, b->device);
    if (!by) by = order(a->version, b->version);
    if (!by) by = order(a->key.in, b->key.in);
    if (!by) by = order(a->key.out, b->key.out);
#define COMPARE(name, least, most)                                                                 \
    if (!by) by = order(a->key.name, b->key.name);
    NUMBERS(COMPARE)
#undef COMPARE
    return by;
}

enum xt_status xt_choices_list(struct xt_ctx *ctx, const struct xt_choices *set,
                               const struct xt_choice ***out, int *n) {
    const struct xt_choice **list = malloc(((size_t)set->n + 1) * sizeof(void *));
    if (!list) return xt_fail(ctx, XT_MEMORY, "out of memory: the choices of algorithms");
    for (int i = 0; i < set->n; i++) list[i] = &set->rows[i];
    qsort(list, (size_t)set->n, sizeof(void *), compare);
    *out = list;
    *n = set->n;
    return XT_OK;
}

/* ---- text ------------------------------------------------------------------------------------ */

void xt_choice_write(const struct xt_choice *c, char *text, size_t bytes) {
    const struct xt_choice_key *k = &c->key;
    const uint64_t *w = c->words;
    snprintf(text, bytes,
             ROW "\"%s\", %" PRId64 ", %s, %s, %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                 ",\n"
                 "        %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                 ", %d, %d, %d, %d, %d, %d, %d,\n"
                 "        0x%" PRIx64 ", 0x%" PRIx64 ", 0x%" PRIx64 ", 0x%" PRIx64 ",\n"
                 "        0x%" PRIx64 ", 0x%" PRIx64 ", 0x%" PRIx64 ", 0x%" PRIx64 ")\n",
             c->device, c->version, xt_dtype_name((enum xt_dtype)k->in),
             xt_dtype_name((enum xt_dtype)k->out), k->m, k->n, k->k, k->batch, k->lda, k->ldb,
             k->ldc, k->a_batch, k->b_batch, k->c_batch, k->a_turned, k->b_turned, k->bias, k->add,
             k->a_align, k->b_align, k->c_align, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
}

/* What is left of a text. */
struct reader {
    struct xt_ctx *ctx;
    const char *at;   /* the next byte; the text ends with 0 */
    const char *name; /* of the text, in errors */
    int line;         /* of `at`, from 1 */
};

static enum xt_status wrong(const struct reader *r, const char *wanted) {
    char found[24] = "the end";
    if (*r->at) snprintf(found, sizeof found, "'%.*s'", (int)strcspn(r->at, "\n"), r->at);
    return xt_fail(r->ctx, XT_FORMAT, "%s:%d: %s is wanted, not %s", r->name, r->line, wanted,
                   found);
}

static void skip_blanks(struct reader *r) {
    for (; isspace((unsigned char)*r->at); r->at++) r->line += *r->at == '\n';
}

/* Blanks and comments; false at a comment that does not end. */
static bool skip(struct reader *r) {
    for (skip_blanks(r); r->at[0] == '/' && r->at[1] == '*'; skip_blanks(r)) {
        const char *end = strstr(r->at + 2, "*/");
        if (!end) return false;
        for (; r->at < end + 2; r->at++) r->line += *r->at == '\n';
    }
    return true;
}

static enum xt_status take(struct reader *r, const char *text) {
    char wanted[24];
    skip_blanks(r);
    if (strncmp(r->at, text, strlen(text)) != 0) {
        snprintf(wanted, sizeof wanted, "'%s'", text);
        return wrong(r, wanted);
    }
    r->at += strlen(text);
    return XT_OK;
}

static enum xt_status read_device(struct reader *r, char *device) {
    XT_TRY(take(r, "\""));
    const size_t n = strcspn(r->at, "\"\\\n");
    if (n == 0 || n >= XT_CHOICE_DEVICE || r->at[n] != '"') return wrong(r, "a device's name");
    memcpy(device, r->at, n);
    r->at += n + 1;
    return XT_OK;
}

static enum xt_status read_dtype(struct reader *r, const char *name, int32_t *out) {
    XT_TRY(take(r, ","));
    skip_blanks(r);
    for (int d = 0; d < XT_DTYPE_COUNT; d++) {
        const char *dtype = xt_dtype_name((enum xt_dtype)d);
        const size_t n = strlen(dtype);
        if (!(XT_FLOATS & XT_BIT(d)) || strncmp(r->at, dtype, n) != 0 ||
            isalnum((unsigned char)r->at[n]))
            continue;
        r->at += n;
        *out = d;
        return XT_OK;
    }
    char wanted[48];
    snprintf(wanted, sizeof wanted, "%s, a float's dtype,", name);
    return wrong(r, wanted);
}

static enum xt_status read_number(struct reader *r, const char *name, int64_t least, int64_t most,
                                  int64_t *out) {
    XT_TRY(take(r, ","));
    skip_blanks(r);
    const size_t sign = *r->at == '-', n = strspn(r->at + sign, "0123456789");
    if (n > 0 && n <= 18) { /* fits 63 bits */
        const int64_t value = strtoll(r->at, NULL, 10);
        if (value >= least && value <= most) {
            r->at += sign + n;
            *out = value;
            return XT_OK;
        }
    }
    char wanted[64];
    if (most == INT64_MAX)
        snprintf(wanted, sizeof wanted, "%s, %s", name, least == 1 ? "1 or more," : "a number,");
    else
        snprintf(wanted, sizeof wanted, "%s, %d to %d,", name, (int)least, (int)most);
    return wrong(r, wanted);
}

static enum xt_status read_word(struct reader *r, uint64_t *out) {
    XT_TRY(take(r, ","));
    skip_blanks(r);
    const size_t n =
        r->at[0] == '0' && r->at[1] == 'x' ? strspn(r->at + 2, "0123456789abcdefABCDEF") : 0;
    if (n == 0 || n > 16) return wrong(r, "a word 0x...");
    *out = strtoull(r->at + 2, NULL, 16);
    r->at += 2 + n;
    return XT_OK;
}

static enum xt_status read_row(struct reader *r, struct xt_choice *c) {
    int64_t value = 0;
    memset(c, 0, sizeof *c);
    XT_TRY(take(r, ROW));
    XT_TRY(read_device(r, c->device));
    XT_TRY(read_number(r, "version", 1, INT64_MAX, &c->version));
    XT_TRY(read_dtype(r, "in", &c->key.in));
    XT_TRY(read_dtype(r, "out", &c->key.out));
#define READ(name, least, most)                                                                    \
    XT_TRY(read_number(r, #name, least, most, &value));                                            \
    c->key.name = (__typeof__(c->key.name))value;
    NUMBERS(READ)
#undef READ
    for (int i = 0; i < XT_CHOICE_WORDS; i++) XT_TRY(read_word(r, &c->words[i]));
    return take(r, ")");
}

/* All rows of a text; with a set, they go there. */
static enum xt_status read_rows(struct reader r, struct xt_choices *set, enum xt_choice_from from) {
    for (;;) {
        struct xt_choice c;
        if (!skip(&r)) return wrong(&r, "the end of a comment");
        if (!*r.at) return XT_OK;
        XT_TRY(read_row(&r, &c));
        c.from = from;
        if (set) XT_TRY(xt_choices_put(r.ctx, set, &c));
    }
}

enum xt_status xt_choices_read(struct xt_ctx *ctx, struct xt_choices *set, const char *text,
                               const char *name, enum xt_choice_from from) {
    const struct reader r = {ctx, text, name, 1};
    XT_TRY(read_rows(r, NULL, from)); /* a text that is wrong changes nothing */
    return read_rows(r, set, from);
}

/* ---- of a context ---------------------------------------------------------------------------- */

#define PRODUCT(...) ROW #__VA_ARGS__ ")",
static const char *const table[] = {
#include "products.def"
    NULL,
};
#undef PRODUCT

static enum xt_status read_table(struct xt_ctx *ctx, struct xt_choices *set) {
    for (int i = 0; table[i]; i++) {
        char name[48];
        snprintf(name, sizeof name, "kernels/products.def, row %d", i + 1);
        XT_TRY(xt_choices_read(ctx, set, table[i], name, XT_FROM_TABLE));
    }
    return XT_OK;
}

enum xt_status xt_choices_of(struct xt_ctx *ctx, struct xt_choices **out) {
    if (!ctx->choices) {
        struct xt_choices *set = xt_choices_new();
        if (!set) return xt_fail(ctx, XT_MEMORY, "out of memory: the choices of algorithms");
        enum xt_status status = read_table(ctx, set);
        if (status != XT_OK) {
            xt_choices_free(set);
            return status;
        }
        ctx->choices = set;
    }
    *out = ctx->choices;
    return XT_OK;
}

enum xt_status xt_choices_use(struct xt_ctx *ctx, const char *text, const char *name) {
    struct xt_choices *set = NULL;
    XT_TRY(xt_choices_of(ctx, &set));
    ctx->choices_changed++; /* before: a set that ran out of memory has changed, too */
    return xt_choices_read(ctx, set, text, name, XT_FROM_RUN);
}

void xt_choices_reset(struct xt_ctx *ctx) {
    xt_choices_free(ctx->choices);
    ctx->choices = NULL;
    ctx->choices_changed++;
    ctx->tuning = false;
}

int xt_choices_changed(const struct xt_ctx *ctx) {
    return ctx->choices_changed;
}

void xt_tune(struct xt_ctx *ctx, bool on) {
    if (ctx->tuning != on) ctx->choices_changed++;
    ctx->tuning = on;
}

bool xt_tuning(const struct xt_ctx *ctx) {
    return ctx->tuning;
}

uint64_t xt_choices_digest(void) {
    uint64_t h = 0;
    for (int i = 0; table[i]; i++) h = xt_seed_mix(h, xt_hash(table[i], strlen(table[i])));
    return h;
}

enum xt_status xt_product_library(struct xt_ctx *ctx, char device[XT_CHOICE_DEVICE],
                                  int64_t *version) {
    XT_TRY(xt_device_open(ctx, XT_CUDA));
    if (!ctx->backend[XT_CUDA]->product_library)
        return xt_fail(ctx, XT_UNSUPPORTED, "this device has no library of products");
    return ctx->backend[XT_CUDA]->product_library(ctx, device, XT_CHOICE_DEVICE, version);
}
