/* vocab.c: ids and their bytes; growing buffers; GPT-2's printable stand-ins for bytes. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_parts.h"

/* ---- buffers -------------------------------------------------------------------------------- */

enum xt_status xt_grow(struct xt_ctx *ctx, void *data, size_t *capacity, size_t want, size_t item) {
    if (want <= *capacity) return XT_OK;
    size_t grown = *capacity < 32 ? 64 : 2 * *capacity;
    if (grown < want) grown = want;
    void *old, *moved = NULL;
    memcpy(&old, data, sizeof old); /* a pointer to any kind of pointer */
    if (grown <= SIZE_MAX / 2 / item) moved = realloc(old, grown * item);
    if (!moved)
        return xt_fail(ctx, XT_MEMORY, "tokenizer: no memory for %zu items of %zu bytes", grown,
                       item);
    memcpy(data, &moved, sizeof moved);
    *capacity = grown;
    return XT_OK;
}

enum xt_status xt_text_add(struct xt_ctx *ctx, struct xt_text *t, const void *bytes, size_t n) {
    XT_TRY(xt_grow(ctx, &t->data, &t->capacity, t->n + n, 1));
    if (n) memcpy(t->data + t->n, bytes, n);
    t->n += n;
    return XT_OK;
}

enum xt_status xt_text_adds(struct xt_ctx *ctx, struct xt_text *t, const char *string) {
    return xt_text_add(ctx, t, string, strlen(string));
}

/* ---- the vocabulary ------------------------------------------------------------------------- */

void xt_vocab_free(struct xt_vocab *v) {
    free(v->text.data);
    free(v->tokens);
    free(v->table);
    *v = (struct xt_vocab){0};
}

/* Where `bytes` are in the table, or the empty place they would take. The table has one. */
static size_t place(const struct xt_vocab *v, const char *bytes, size_t n) {
    size_t mask = v->table_size - 1;
    size_t i = (size_t)xt_hash(bytes, n) & mask;
    for (; v->table[i] >= 0; i = (i + 1) & mask) {
        const struct xt_token *t = &v->tokens[v->table[i]];
        if ((size_t)t->bytes == n && memcmp(v->text.data + t->offset, bytes, n) == 0) break;
    }
    return i;
}

static enum xt_status grow_table(struct xt_ctx *ctx, struct xt_vocab *v) {
    if (v->table_used < v->table_size / 2) return XT_OK;
    size_t size = v->table_size ? 2 * v->table_size : 1024;
    int32_t *table = malloc(size * sizeof *table);
    if (!table) return xt_fail(ctx, XT_MEMORY, "tokenizer: no memory for the vocabulary");
    memset(table, 0xff, size * sizeof *table);
    int32_t *old = v->table;
    size_t old_size = v->table_size;
    v->table = table;
    v->table_size = size;
    for (size_t i = 0; i < old_size; i++) {
        if (old[i] < 0) continue;
        const struct xt_token *t = &v->tokens[old[i]];
        v->table[place(v, v->text.data + t->offset, (size_t)t->bytes)] = old[i];
    }
    free(old);
    return XT_OK;
}

enum xt_status xt_vocab_set(struct xt_ctx *ctx, struct xt_vocab *v, int64_t id, const char *bytes,
                            size_t n, bool added) {
    if (id < 0 || id >= XT_MAX_IDS)
        return xt_fail(ctx, XT_FORMAT, "id %lld is out of range: wanted 0 to %d", (long long)id,
                       XT_MAX_IDS - 1);
    if (n > INT32_MAX)
        return xt_fail(ctx, XT_FORMAT, "id %lld: the token is too long", (long long)id);
    size_t at = (size_t)id;
    if (at < v->n && v->tokens[at].bytes >= 0)
        return xt_fail(ctx, XT_FORMAT, "id %lld is given to two tokens", (long long)id);
    XT_TRY(xt_grow(ctx, &v->tokens, &v->capacity, at + 1, sizeof *v->tokens));
    XT_TRY(grow_table(ctx, v));
    size_t offset = v->text.n;
    XT_TRY(xt_text_add(ctx, &v->text, bytes, n));
    for (; v->n <= at; v->n++) v->tokens[v->n] = (struct xt_token){.bytes = -1};
    v->tokens[at] = (struct xt_token){.offset = offset, .bytes = (int32_t)n, .added = added};
    if (added) return XT_OK;
    size_t i = place(v, v->text.data + offset, n);
    if (v->table[i] >= 0) {
        v->tokens[at].bytes = -1;
        return xt_fail(ctx, XT_FORMAT, "ids %d and %lld have the same bytes", v->table[i],
                       (long long)id);
    }
    v->table[i] = (int32_t)id;
    v->table_used++;
    return XT_OK;
}

int32_t xt_vocab_find(const struct xt_vocab *v, const char *bytes, size_t n) {
    return v->table_size ? v->table[place(v, bytes, n)] : -1;
}

/* ---- stand-ins ------------------------------------------------------------------------------ */

/* Bytes that print stand for themselves; the others, in order, for U+0100, U+0101, ... */
static bool stands_for_itself(unsigned byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

void xt_byte_order(unsigned char order[256]) {
    size_t n = 0;
    for (unsigned b = 0; b < 256; b++)
        if (stands_for_itself(b)) order[n++] = (unsigned char)b;
    for (unsigned b = 0; b < 256; b++)
        if (!stands_for_itself(b)) order[n++] = (unsigned char)b;
}

/* The stand-in with code point 0x100 + i, i < 68: byte 0 to 32, 127 to 160, 173. */
static unsigned hidden_byte(unsigned i) {
    return i <= 32 ? i : i <= 66 ? i - 33 + 127 : 173;
}

bool xt_bytes_from_text(const char *text, size_t n, char *out, size_t *n_out) {
    size_t made = 0;
    for (size_t i = 0; i < n;) {
        unsigned a = (unsigned char)text[i++], byte = a;
        if (a >= 0x80) { /* two bytes of UTF-8: U+0080 to U+07FF */
            if (a < 0xc2 || a > 0xc5 || i == n) return false;
            unsigned c = (a & 0x1f) << 6 | ((unsigned char)text[i++] & 0x3f);
            if (c > 0x143) return false;
            byte = c < 0x100 ? c : hidden_byte(c - 0x100);
            if (c < 0x100 && !stands_for_itself(c)) return false;
        } else if (!stands_for_itself(a)) {
            return false;
        }
        out[made++] = (char)byte;
    }
    *n_out = made;
    return true;
}

enum xt_status xt_text_from_bytes(struct xt_ctx *ctx, struct xt_text *out, const char *bytes,
                                  size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned b = (unsigned char)bytes[i];
        unsigned c = b;
        if (!stands_for_itself(b)) c = 0x100 + (b <= 32 ? b : b <= 160 ? b - 127 + 33 : 67);
        char utf8[2] = {(char)(0xc0 | c >> 6), (char)(0x80 | (c & 0x3f))};
        if (c < 0x80)
            XT_TRY(xt_text_add(ctx, out, &bytes[i], 1));
        else
            XT_TRY(xt_text_add(ctx, out, utf8, 2));
    }
    return XT_OK;
}
