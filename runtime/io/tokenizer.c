/*
 * tokenizer.c: the parts put together: text to ids and back, control tokens, the named patterns.
 *
 * Control tokens never come out of ordinary text: merging cannot make them, and text that spells
 * one becomes its id only when the caller asks for it.
 */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_parts.h"

#define KEEP_IDS (1u << 20) /* lent buffers larger than this are given back at the next call */

enum xt_status xt_tokenizer_new(struct xt_ctx *ctx, struct xt_tokenizer **out) {
    struct xt_tokenizer *tok = calloc(1, sizeof *tok);
    if (!tok) return xt_fail(ctx, XT_MEMORY, "tokenizer: no memory");
    *out = tok;
    return XT_OK;
}

void xt_tokenizer_free(struct xt_tokenizer *tok) {
    if (!tok) return;
    xt_vocab_free(&tok->vocab);
    xt_bpe_free(&tok->bpe);
    xt_split_free(&tok->split);
    free(tok->added);
    free(tok->special);
    free(tok->pre_tokenizer);
    free(tok->post_processor);
    free(tok->ids.data);
    free(tok->text.data);
    free(tok);
}

enum xt_status xt_tokenizer_add(struct xt_ctx *ctx, struct xt_tokenizer *tok, int64_t id,
                                const char *content, size_t n, bool special) {
    if (n == 0) return xt_fail(ctx, XT_FORMAT, "added token %lld is empty", (long long)id);
    XT_TRY(xt_grow(ctx, &tok->added, &tok->cap_added, tok->n_added + 1, sizeof *tok->added));
    XT_TRY(xt_grow(ctx, &tok->special, &tok->cap_special, tok->n_added + 1, sizeof *tok->special));
    for (size_t i = 0; i < tok->n_added; i++) {
        const struct xt_token *t = &tok->vocab.tokens[tok->added[i]];
        if ((size_t)t->bytes == n && memcmp(tok->vocab.text.data + t->offset, content, n) == 0)
            return xt_fail(ctx, XT_FORMAT, "added tokens %d and %lld have the same content",
                           tok->added[i], (long long)id);
    }
    XT_TRY(xt_vocab_set(ctx, &tok->vocab, id, content, n, true));
    tok->added[tok->n_added] = (int32_t)id;
    tok->special[tok->n_added++] = special;
    tok->added_first[(unsigned char)content[0]] = true;
    return XT_OK;
}

enum xt_status xt_tokenizer_bytes(struct xt_ctx *ctx, struct xt_tokenizer **out) {
    struct xt_tokenizer *tok = NULL;
    XT_TRY(xt_tokenizer_new(ctx, &tok));
    enum xt_status status = XT_OK;
    for (int i = 0; i < 256; i++) {
        char byte = (char)i;
        XT_GO(xt_vocab_set(ctx, &tok->vocab, i, &byte, 1, false));
    }
    XT_GO(xt_tokenizer_pattern(ctx, tok, "gpt2"));
    XT_GO(xt_bpe_open(ctx, &tok->bpe, &tok->vocab));
    *out = tok;
    tok = NULL;
done:
    xt_tokenizer_free(tok);
    return status;
}

/* ---- the named patterns --------------------------------------------------------------------- */

#define BYTE_LEVEL(regex)                                                                          \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":false,"                   \
    "\"use_regex\":" regex "}"

static const struct pattern {
    const char *name;
    const char *regex;
    const char *pre_tokenizer; /* as tokenizer.json says it; Qwen's regex in it, escaped */
    bool nfc;
} patterns[] = {
    {"gpt2", xt_gpt2_pattern, BYTE_LEVEL("true"), false},
    {"qwen", xt_qwen_pattern,
     "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"
     "\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}"
     "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},"
     "\"behavior\":\"Isolated\",\"invert\":false}," BYTE_LEVEL("false") "]}",
     true},
};

enum xt_status xt_tokenizer_pattern(struct xt_ctx *ctx, struct xt_tokenizer *tok,
                                    const char *pattern) {
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        const struct pattern *p = &patterns[i];
        if (strcmp(p->name, pattern) != 0) continue;
        XT_TRY(xt_split_add(ctx, &tok->split, p->regex, strlen(p->regex), false));
        tok->split.nfc = p->nfc;
        tok->pre_tokenizer = strdup(p->pre_tokenizer);
        tok->post_processor = strdup(BYTE_LEVEL("false"));
        if (!tok->pre_tokenizer || !tok->post_processor)
            return xt_fail(ctx, XT_MEMORY, "tokenizer: no memory");
        return XT_OK;
    }
    return xt_fail(ctx, XT_ARGUMENT, "pattern is '%s', wanted 'gpt2' or 'qwen'", pattern);
}

/* ---- text to ids ---------------------------------------------------------------------------- */

struct encoding {
    struct xt_ctx *ctx;       /* for sentences */
    struct xt_tokenizer *tok; /* whose ids grow */
};

static enum xt_status encode_piece(void *user, const char *piece, size_t n) {
    const struct encoding *e = user;
    return xt_bpe_encode(e->ctx, &e->tok->bpe, &e->tok->vocab, piece, n, &e->tok->ids);
}

/* The longest added token that text begins with; -1: none. */
static int32_t added_at(const struct xt_tokenizer *tok, const char *text, size_t n) {
    int32_t best = -1, best_bytes = 0;
    for (size_t i = 0; i < tok->n_added; i++) {
        const struct xt_token *t = &tok->vocab.tokens[tok->added[i]];
        if (t->bytes > best_bytes && (size_t)t->bytes <= n &&
            memcmp(tok->vocab.text.data + t->offset, text, (size_t)t->bytes) == 0) {
            best = tok->added[i];
            best_bytes = t->bytes;
        }
    }
    return best;
}

static enum xt_status encode_special(struct encoding *e, const char *text, size_t bytes) {
    struct xt_tokenizer *tok = e->tok;
    size_t done = 0;
    for (size_t at = 0; at < bytes;) {
        int32_t id = -1;
        if (tok->added_first[(unsigned char)text[at]]) id = added_at(tok, text + at, bytes - at);
        if (id < 0) {
            at++;
            continue;
        }
        XT_TRY(xt_split_run(e->ctx, &tok->split, text + done, at - done, encode_piece, e));
        struct xt_ids *ids = &tok->ids;
        XT_TRY(xt_grow(e->ctx, &ids->data, &ids->capacity, ids->n + 1, sizeof *ids->data));
        ids->data[ids->n++] = id;
        at += (size_t)tok->vocab.tokens[id].bytes;
        done = at;
    }
    return xt_split_run(e->ctx, &tok->split, text + done, bytes - done, encode_piece, e);
}

enum xt_status xt_tokenizer_encode(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *text,
                                   size_t bytes, bool special, const int32_t **ids, size_t *n) {
    struct encoding e = {.ctx = ctx, .tok = tok};
    if (tok->ids.capacity > KEEP_IDS) {
        free(tok->ids.data);
        tok->ids = (struct xt_ids){0};
    }
    tok->ids.n = 0;
    if (special && tok->n_added)
        XT_TRY(encode_special(&e, text, bytes));
    else
        XT_TRY(xt_split_run(ctx, &tok->split, text, bytes, encode_piece, &e));
    *ids = tok->ids.data;
    *n = tok->ids.n;
    return XT_OK;
}

/* ---- ids to text ---------------------------------------------------------------------------- */

enum xt_status xt_tokenizer_decode(struct xt_ctx *ctx, struct xt_tokenizer *tok, const int64_t *ids,
                                   size_t n, const char **text, size_t *bytes) {
    const struct xt_vocab *v = &tok->vocab;
    if (tok->text.capacity > KEEP_IDS) {
        free(tok->text.data);
        tok->text = (struct xt_text){0};
    }
    tok->text.n = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t id = ids[i];
        if (id < 0 || (uint64_t)id >= v->n)
            return xt_fail(ctx, XT_VALUE, "id %lld at position %zu: the vocabulary has 0 to %zu",
                           (long long)id, i + 1, v->n - 1);
        const struct xt_token *t = &v->tokens[id];
        if (t->bytes < 0)
            return xt_fail(ctx, XT_VALUE, "id %lld at position %zu: no token has it", (long long)id,
                           i + 1);
        XT_TRY(xt_text_add(ctx, &tok->text, v->text.data + t->offset, (size_t)t->bytes));
    }
    *text = tok->text.data ? tok->text.data : "";
    *bytes = tok->text.n;
    return XT_OK;
}

int64_t xt_tokenizer_vocab_size(const struct xt_tokenizer *tok) {
    return (int64_t)tok->vocab.n;
}

int64_t xt_tokenizer_find(const struct xt_tokenizer *tok, const char *text, size_t bytes) {
    int32_t id = added_at(tok, text, bytes);
    if (id >= 0 && (size_t)tok->vocab.tokens[id].bytes == bytes) return id;
    return xt_vocab_find(&tok->vocab, text, bytes);
}
