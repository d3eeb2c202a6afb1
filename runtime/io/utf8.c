/* utf8.c: which bytes are UTF-8, and their canonical composition (NFC) by utf8proc. */
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "tokenizer_parts.h"

/* Bytes of the character at s, of which n >= 1 bytes are there; 0 when it is none. */
static size_t character(const unsigned char *s, size_t n) {
    unsigned c = s[0];
    if (c < 0x80) return 1;
    if (c < 0xc2 || c > 0xf4) return 0;
    size_t bytes = c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    if (n < bytes) return 0;
    for (size_t i = 1; i < bytes; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    /* No longer form than needed, no surrogates, nothing above U+10FFFF. */
    if (c == 0xe0 && s[1] < 0xa0) return 0;
    if (c == 0xed && s[1] > 0x9f) return 0;
    if (c == 0xf0 && s[1] < 0x90) return 0;
    if (c == 0xf4 && s[1] > 0x8f) return 0;
    return bytes;
}

/* Bytes at the start of s that are ASCII, eight at a time. */
static size_t ascii(const unsigned char *s, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        memcpy(&word, s + i, 8);
        if (word & UINT64_C(0x8080808080808080)) break;
    }
    while (i < n && s[i] < 0x80) i++;
    return i;
}

size_t xt_utf8_valid(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    size_t i = 0;
    for (;;) {
        i += ascii(s + i, n - i);
        if (i == n) return n;
        size_t bytes = character(s + i, n - i);
        if (bytes == 0) return i;
        i += bytes;
    }
}

size_t xt_utf8_invalid(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    size_t i = 0;
    while (i < n && character(s + i, n - i) == 0) i++;
    return i;
}

size_t xt_utf8_whole(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    size_t at = n;
    /* Back over at most three continuations to the last byte that can begin a character. */
    while (at > 0 && n - at < 3 && (s[at - 1] & 0xc0) == 0x80) at--;
    if (at == 0 || s[at - 1] < 0xc2 || s[at - 1] > 0xf4) return n;
    at--;
    unsigned char padded[4] = {0, 0x80, 0x80, 0x80};
    size_t have = n - at;
    size_t bytes = s[at] < 0xe0 ? 2 : s[at] < 0xf0 ? 3 : 4;
    if (have >= bytes) return n;
    memcpy(padded, s + at, have);
    return have == 1 || character(padded, 4) ? at : n;
}

/* True when NFC may change text that holds this character: what it does not know, it calls true. */
static bool may_change(utf8proc_int32_t c) {
    if (c < 0x300) return false;
    if (c >= 0x1100 && c <= 0x11ff) return true; /* Hangul letters compose by rule, not by table */
    const utf8proc_property_t *p = utf8proc_get_property(c);
    return p->combining_class != 0 || p->decomp_seqindex != UINT16_MAX ||
           p->comb_index != UINT16_MAX;
}

/* Appends the NFC of one run: an ASCII character, perhaps, and what is not ASCII after it. */
static enum xt_status add_run(struct xt_ctx *ctx, struct xt_text *out, const char *run, size_t n) {
    const utf8proc_uint8_t *s = (const utf8proc_uint8_t *)run;
    bool same = true;
    for (size_t i = 0; i < n && same;) {
        utf8proc_int32_t c;
        i += (size_t)utf8proc_iterate(s + i, (utf8proc_ssize_t)(n - i), &c);
        same = !may_change(c);
    }
    if (same) return xt_text_add(ctx, out, run, n);
    utf8proc_uint8_t *made = NULL;
    utf8proc_ssize_t bytes =
        utf8proc_map(s, (utf8proc_ssize_t)n, &made, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (bytes < 0) return xt_fail(ctx, XT_MEMORY, "NFC: %s", utf8proc_errmsg(bytes));
    enum xt_status status = xt_text_add(ctx, out, made, (size_t)bytes);
    free(made);
    return status;
}

/* An ASCII character never composes with what stands before it: a run may be cut there. */
enum xt_status xt_utf8_nfc(struct xt_ctx *ctx, const char *text, size_t n, struct xt_text *buffer,
                           const char **out, size_t *n_out) {
    const unsigned char *s = (const unsigned char *)text;
    size_t first = 0;
    while (first < n && s[first] < 0xcc) first++; /* 0xcc begins U+0300; all below is in NFC */
    if (first == n) {
        *out = text;
        *n_out = n;
        return XT_OK;
    }
    buffer->n = 0;
    size_t done = 0;
    for (;;) {
        size_t from = done + ascii(s + done, n - done);
        size_t to = from;
        while (to < n && s[to] >= 0x80) to++;
        if (from > done) from--;
        XT_TRY(xt_text_add(ctx, buffer, text + done, from - done));
        if (to > from) XT_TRY(add_run(ctx, buffer, text + from, to - from));
        done = to;
        if (done == n) break;
    }
    *out = buffer->data;
    *n_out = buffer->n;
    return XT_OK;
}
