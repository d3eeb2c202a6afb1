/*
 * tokenizer_save.c: a tokenizer as tokenizer.json, byte for byte the same each time.
 *
 * What bears the name is always whole: file.h writes beside and renames.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "file.h"
#include "tokenizer_parts.h"

/* A JSON string of valid UTF-8. */
static enum xt_status add_string(struct xt_ctx *ctx, struct xt_text *out, const char *s, size_t n) {
    XT_TRY(xt_text_adds(ctx, out, "\""));
    for (size_t i = 0; i < n; i++) {
        char escape[8];
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\') {
            XT_TRY(xt_text_add(ctx, out, &s[i], 1));
            continue;
        }
        if (c >= 0x20)
            snprintf(escape, sizeof escape, "\\%c", c);
        else
            snprintf(escape, sizeof escape, "\\u%04x", c);
        XT_TRY(xt_text_adds(ctx, out, escape));
    }
    return xt_text_adds(ctx, out, "\"");
}

/* One line of a list or object: a comma before all but the first. */
static enum xt_status next_line(struct xt_ctx *ctx, struct xt_text *out, size_t i) {
    return xt_text_adds(ctx, out, i ? ",\n" : "\n");
}

/* A token's bytes as the file spells them: stand-ins, or as they are. */
static enum xt_status spell(struct xt_ctx *ctx, const struct xt_vocab *v, size_t id,
                            struct xt_text *out) {
    const struct xt_token *t = &v->tokens[id];
    const char *bytes = v->text.data + t->offset;
    return t->added ? xt_text_add(ctx, out, bytes, (size_t)t->bytes)
                    : xt_text_from_bytes(ctx, out, bytes, (size_t)t->bytes);
}

static enum xt_status add_added(struct xt_ctx *ctx, const struct xt_tokenizer *tok,
                                struct xt_text *out) {
    for (size_t i = 0; i < tok->n_added; i++) {
        const struct xt_token *t = &tok->vocab.tokens[tok->added[i]];
        char head[64];
        snprintf(head, sizeof head, "    {\"id\": %d, \"content\": ", tok->added[i]);
        XT_TRY(next_line(ctx, out, i));
        XT_TRY(xt_text_adds(ctx, out, head));
        XT_TRY(add_string(ctx, out, tok->vocab.text.data + t->offset, (size_t)t->bytes));
        XT_TRY(xt_text_adds(ctx, out,
                            ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                            "\"normalized\": false, \"special\": "));
        XT_TRY(xt_text_adds(ctx, out, tok->special[i] ? "true}" : "false}"));
    }
    return XT_OK;
}

/* Added tokens behind all others need no entry: the reader numbers them so. Others do. */
static size_t vocab_end(const struct xt_tokenizer *tok) {
    size_t end = tok->vocab.n;
    while (end > 0) {
        size_t i = 0;
        while (i < tok->n_added && (size_t)tok->added[i] != end - 1) i++;
        if (i == tok->n_added) break;
        end--;
    }
    return end;
}

static enum xt_status add_vocab(struct xt_ctx *ctx, const struct xt_tokenizer *tok,
                                struct xt_text *out, struct xt_text *token) {
    size_t end = vocab_end(tok), written = 0;
    for (size_t id = 0; id < end; id++) {
        if (tok->vocab.tokens[id].bytes < 0) continue;
        char value[32];
        snprintf(value, sizeof value, ": %zu", id);
        token->n = 0;
        XT_TRY(spell(ctx, &tok->vocab, id, token));
        XT_TRY(next_line(ctx, out, written++));
        XT_TRY(xt_text_adds(ctx, out, "      "));
        XT_TRY(add_string(ctx, out, token->data, token->n));
        XT_TRY(xt_text_adds(ctx, out, value));
    }
    return XT_OK;
}

/* "left right": no stand-in is a space, and readers of every age take this form. */
static enum xt_status add_merges(struct xt_ctx *ctx, const struct xt_tokenizer *tok,
                                 struct xt_text *out, struct xt_text *token) {
    for (size_t i = 0; i < tok->bpe.n_merges; i++) {
        token->n = 0;
        XT_TRY(spell(ctx, &tok->vocab, (size_t)tok->bpe.merges[i].left, token));
        XT_TRY(xt_text_adds(ctx, token, " "));
        XT_TRY(spell(ctx, &tok->vocab, (size_t)tok->bpe.merges[i].right, token));
        XT_TRY(next_line(ctx, out, i));
        XT_TRY(xt_text_adds(ctx, out, "      "));
        XT_TRY(add_string(ctx, out, token->data, token->n));
    }
    return XT_OK;
}

static enum xt_status add_file(struct xt_ctx *ctx, const struct xt_tokenizer *tok,
                               struct xt_text *out, struct xt_text *token) {
    const char *post = tok->post_processor ? tok->post_processor : "null";
    XT_TRY(xt_text_adds(ctx, out,
                        "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n"
                        "  \"padding\": null,\n  \"added_tokens\": ["));
    XT_TRY(add_added(ctx, tok, out));
    XT_TRY(xt_text_adds(ctx, out, "\n  ],\n  \"normalizer\": "));
    XT_TRY(xt_text_adds(ctx, out, tok->split.nfc ? "{\"type\":\"NFC\"}" : "null"));
    XT_TRY(xt_text_adds(ctx, out, ",\n  \"pre_tokenizer\": "));
    XT_TRY(xt_text_adds(ctx, out, tok->pre_tokenizer));
    XT_TRY(xt_text_adds(ctx, out, ",\n  \"post_processor\": "));
    XT_TRY(xt_text_adds(ctx, out, post));
    XT_TRY(xt_text_adds(ctx, out,
                        ",\n  \"decoder\": {\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                        "\"trim_offsets\":false,\"use_regex\":false},\n  \"model\": {\n"
                        "    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": null,\n"
                        "    \"continuing_subword_prefix\": \"\",\n"
                        "    \"end_of_word_suffix\": \"\",\n    \"fuse_unk\": false,\n"
                        "    \"byte_fallback\": false,\n    \"ignore_merges\": "));
    XT_TRY(xt_text_adds(ctx, out, tok->bpe.whole_first ? "true" : "false"));
    XT_TRY(xt_text_adds(ctx, out, ",\n    \"vocab\": {"));
    XT_TRY(add_vocab(ctx, tok, out, token));
    XT_TRY(xt_text_adds(ctx, out, "\n    },\n    \"merges\": ["));
    XT_TRY(add_merges(ctx, tok, out, token));
    return xt_text_adds(ctx, out, "\n    ]\n  }\n}\n");
}

/* ---- to disk -------------------------------------------------------------------------------- */

static enum xt_status write_file(struct xt_ctx *ctx, const char *path, const struct xt_text *text) {
    struct xt_writer w = {0};
    XT_TRY(xt_writer_open(ctx, path, &w));
    enum xt_status status = xt_writer_put(ctx, &w, text->data, text->n);
    if (status == XT_OK) return xt_writer_commit(ctx, &w);
    xt_writer_abandon(&w);
    return status;
}

enum xt_status xt_tokenizer_save(struct xt_ctx *ctx, const struct xt_tokenizer *tok,
                                 const char *dir) {
    static const char name[] = "/tokenizer.json";
    struct xt_text text = {0}, token = {0}, path = {0};
    enum xt_status status = XT_OK;
    XT_GO(add_file(ctx, tok, &text, &token));
    XT_GO(xt_text_adds(ctx, &path, dir));
    XT_GO(xt_text_add(ctx, &path, name, sizeof name));
    if (mkdir(dir, 0777) != 0 && errno != EEXIST)
        XT_GO(xt_fail(ctx, XT_IO, "cannot make the folder %s: %s", dir, strerror(errno)));
    status = write_file(ctx, path.data, &text);
done:
    free(path.data);
    free(text.data);
    free(token.data);
    return status;
}
