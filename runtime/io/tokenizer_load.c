/*
 * tokenizer_load.c: the forms in which byte-level vocabularies come: a tokenizer.json, GPT-2's pair
 * vocab.bpe + encoder.json (or merges.txt + vocab.json), a .tiktoken file of ranks.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "file.h"
#include "tokenizer_parts.h"

/* ---- files ---------------------------------------------------------------------------------- */

/* The path stands in the sentence already. */
static enum xt_status read_text(struct xt_ctx *ctx, const char *path, struct xt_text *out) {
    char *data = NULL;
    size_t n = 0;
    XT_TRY(xt_read_text(ctx, path, &data, &n));
    *out = (struct xt_text){.data = data, .n = n, .capacity = n};
    return XT_OK;
}

/* "dir/name" in `out`, terminated. */
static enum xt_status join(struct xt_ctx *ctx, const char *dir, const char *name,
                           struct xt_text *out) {
    out->n = 0;
    XT_TRY(xt_text_adds(ctx, out, dir));
    XT_TRY(xt_text_adds(ctx, out, "/"));
    return xt_text_add(ctx, out, name, strlen(name) + 1);
}

static bool is_file(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && !S_ISDIR(info.st_mode);
}

static bool ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* ---- lines ---------------------------------------------------------------------------------- */

typedef enum xt_status line_fn(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *line,
                               size_t n, struct xt_text *scratch);

static enum xt_status each_line(struct xt_ctx *ctx, struct xt_tokenizer *tok,
                                const struct xt_text *text, line_fn *fn) {
    struct xt_text scratch = {0};
    enum xt_status status = XT_OK;
    size_t number = 0;
    for (size_t at = 0; at < text->n && status == XT_OK;) {
        const char *line = text->data + at;
        const char *end = memchr(line, '\n', text->n - at);
        size_t n = end ? (size_t)(end - line) : text->n - at;
        at += n + 1;
        number++;
        if (n && line[n - 1] == '\r') n--;
        if (n == 0 || (number == 1 && n >= 9 && memcmp(line, "#version:", 9) == 0)) continue;
        status = fn(ctx, tok, line, n, &scratch);
    }
    free(scratch.data);
    if (status == XT_OK) return XT_OK;
    char where[32];
    snprintf(where, sizeof where, "line %zu", number);
    return xt_fail_in(ctx, status, where);
}

/* ---- vocab.bpe and encoder.json ------------------------------------------------------------- */

/* An entry that is no byte and no merge's result can only be a control token: <|endoftext|>. */
static enum xt_status find_added(struct xt_ctx *ctx, struct xt_tokenizer *tok) {
    struct xt_vocab *v = &tok->vocab;
    bool *made = calloc(v->n ? v->n : 1, sizeof *made);
    struct xt_vocab kept = {0};
    enum xt_status status = XT_OK;
    if (!made) return xt_fail(ctx, XT_MEMORY, "tokenizer: no memory");
    for (size_t i = 0; i < tok->bpe.n_merges; i++) made[tok->bpe.merges[i].id] = true;
    /* Into a new vocabulary: what is added must not be in the table. */
    struct xt_vocab old = *v;
    *v = kept;
    for (size_t id = 0; id < old.n; id++) {
        const struct xt_token *t = &old.tokens[id];
        const char *bytes = old.text.data + t->offset;
        if (t->bytes < 0) continue;
        if (made[id] || t->bytes == 1)
            XT_GO(xt_vocab_set(ctx, v, (int64_t)id, bytes, (size_t)t->bytes, false));
        else
            XT_GO(xt_tokenizer_add(ctx, tok, (int64_t)id, bytes, (size_t)t->bytes, true));
    }
done:
    xt_vocab_free(&old);
    free(made);
    return status;
}

static enum xt_status load_pair(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *vocab,
                                const char *merges, const char *pattern) {
    struct xt_text text = {0};
    XT_TRY(read_text(ctx, vocab, &text));
    enum xt_status status = xt_tokenizer_vocab_json(ctx, tok, text.data, text.n);
    free(text.data);
    if (status != XT_OK) return xt_fail_in(ctx, status, vocab);
    XT_TRY(read_text(ctx, merges, &text));
    status = each_line(ctx, tok, &text, xt_tokenizer_merge);
    free(text.data);
    if (status != XT_OK) return xt_fail_in(ctx, status, merges);
    XT_TRY(find_added(ctx, tok));
    return xt_tokenizer_pattern(ctx, tok, pattern ? pattern : "gpt2");
}

/* ---- .tiktoken ------------------------------------------------------------------------------ */

static int base64_value(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

static enum xt_status read_rank(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *line,
                                size_t n, struct xt_text *bytes) {
    const char *space = memchr(line, ' ', n);
    size_t digits = space ? (size_t)(space - line) : 0, at = digits + 1;
    unsigned word = 0, bits = 0;
    int64_t rank = 0;
    bytes->n = 0;
    for (; digits && line[digits - 1] == '='; digits--) continue;
    for (size_t i = 0; i < digits; i++) {
        int value = base64_value(line[i]);
        if (value < 0) return xt_fail(ctx, XT_FORMAT, "character %zu is no base64", i + 1);
        word = word << 6 | (unsigned)value;
        bits += 6;
        if (bits < 8) continue;
        bits -= 8;
        char byte = (char)(word >> bits & 0xff);
        XT_TRY(xt_text_add(ctx, bytes, &byte, 1));
    }
    if (bytes->n == 0 || at >= n || n - at > 9)
        return xt_fail(ctx, XT_FORMAT, "wanted a token in base64, a space and its rank");
    for (; at < n; at++) {
        if (line[at] < '0' || line[at] > '9')
            return xt_fail(ctx, XT_FORMAT, "the rank is no number");
        rank = 10 * rank + (line[at] - '0');
    }
    return xt_vocab_set(ctx, &tok->vocab, rank, bytes->data, bytes->n, false);
}

/*
 * Ranks say which tokens there are, merges which two make one: the two that are left of a token
 * when everything of lower rank has been merged. A token of which more is left is never merged to;
 * tiktoken makes it only when it is a whole piece, and so does whole_first.
 */
static enum xt_status merges_of_ranks(struct xt_ctx *ctx, struct xt_tokenizer *tok) {
    const struct xt_vocab *v = &tok->vocab;
    struct xt_bpe *b = &tok->bpe;
    struct xt_ids ids = {0};
    bool all = true;
    enum xt_status status = xt_bpe_open(ctx, b, v);
    for (size_t id = 0; id < v->n && status == XT_OK; id++) {
        const struct xt_token *t = &v->tokens[id];
        if (t->bytes < 2) continue;
        ids.n = 0;
        XT_GO(xt_bpe_merge(ctx, b, v, v->text.data + t->offset, (size_t)t->bytes, &ids));
        if (ids.n == 2)
            XT_GO(xt_bpe_add(ctx, b, ids.data[0], ids.data[1], (int32_t)id));
        else
            all = false;
    }
    b->whole_first = !all;
done:
    free(ids.data);
    return status;
}

/* The most decimal digits that a token consists of: the pattern shows in it. */
static int longest_number(const struct xt_vocab *v) {
    int32_t longest = 0;
    for (size_t id = 0; id < v->n; id++) {
        const struct xt_token *t = &v->tokens[id];
        int32_t i = 0;
        while (i < t->bytes && v->text.data[t->offset + (size_t)i] >= '0' &&
               v->text.data[t->offset + (size_t)i] <= '9')
            i++;
        if (i == t->bytes && i > longest) longest = i;
    }
    return longest;
}

static enum xt_status load_ranks(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *path,
                                 const char *pattern) {
    struct xt_text text = {0};
    XT_TRY(read_text(ctx, path, &text));
    enum xt_status status = each_line(ctx, tok, &text, read_rank);
    free(text.data);
    if (status == XT_OK && tok->vocab.n == 0) status = xt_fail(ctx, XT_FORMAT, "it is empty");
    if (status == XT_OK) status = merges_of_ranks(ctx, tok);
    int digits = longest_number(&tok->vocab);
    if (status == XT_OK && !pattern) {
        if (digits == 2 || digits == 3)
            status = xt_fail(ctx, XT_UNSUPPORTED,
                             "numbers are cut at %d digits, so the pattern is neither 'gpt2' nor "
                             "'qwen': give one",
                             digits);
        pattern = digits > 1 ? "gpt2" : "qwen";
    }
    if (status != XT_OK) return xt_fail_in(ctx, status, path);
    return xt_tokenizer_pattern(ctx, tok, pattern);
}

/* ---- which of them -------------------------------------------------------------------------- */

static enum xt_status load_json(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *path) {
    struct xt_text text = {0};
    XT_TRY(read_text(ctx, path, &text));
    enum xt_status status = xt_tokenizer_parse(ctx, tok, text.data, text.n);
    free(text.data);
    return status == XT_OK ? XT_OK : xt_fail_in(ctx, status, path);
}

static enum xt_status load_folder(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *dir,
                                  bool pairs_only, const char *pattern) {
    static const char *const pairs[][2] = {{"encoder.json", "vocab.bpe"},
                                           {"vocab.json", "merges.txt"}};
    struct xt_text vocab = {0}, merges = {0};
    enum xt_status status = XT_OK;
    XT_GO(join(ctx, dir, "tokenizer.json", &vocab));
    if (!pairs_only && is_file(vocab.data)) {
        status = load_json(ctx, tok, vocab.data);
        goto done;
    }
    for (int i = 0; i < 2; i++) {
        XT_GO(join(ctx, dir, pairs[i][0], &vocab));
        XT_GO(join(ctx, dir, pairs[i][1], &merges));
        if (!is_file(vocab.data) && !is_file(merges.data)) continue;
        status = load_pair(ctx, tok, vocab.data, merges.data, pattern);
        goto done;
    }
    status =
        xt_fail(ctx, XT_IO,
                "%s: holds no tokenizer.json, no vocab.bpe and encoder.json, no merges.txt and "
                "vocab.json",
                dir);
done:
    free(vocab.data);
    free(merges.data);
    return status;
}

/* One half of a pair stands for its folder. */
static bool is_half(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    static const char *const halves[] = {"vocab.bpe", "encoder.json", "merges.txt", "vocab.json"};
    for (size_t i = 0; i < sizeof halves / sizeof *halves; i++)
        if (strcmp(name, halves[i]) == 0) return true;
    return false;
}

static enum xt_status load_path(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *path,
                                const char *pattern) {
    struct stat info;
    if (stat(path, &info) != 0)
        return xt_fail(ctx, XT_IO, "cannot open %s: %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode)) return load_folder(ctx, tok, path, false, pattern);
    if (ends_with(path, ".tiktoken")) return load_ranks(ctx, tok, path, pattern);
    if (!is_half(path)) return load_json(ctx, tok, path);
    const char *slash = strrchr(path, '/');
    char *dir = slash ? strndup(path, (size_t)(slash - path)) : strdup(".");
    if (!dir) return xt_fail(ctx, XT_MEMORY, "tokenizer: no memory");
    enum xt_status status = load_folder(ctx, tok, dir, true, pattern);
    free(dir);
    return status;
}

enum xt_status xt_tokenizer_load(struct xt_ctx *ctx, const char *path, const char *pattern,
                                 struct xt_tokenizer **out) {
    struct xt_tokenizer *tok = NULL;
    XT_TRY(xt_tokenizer_new(ctx, &tok));
    enum xt_status status = load_path(ctx, tok, path, pattern);
    if (status == XT_OK) status = xt_bpe_open(ctx, &tok->bpe, &tok->vocab);
    if (status != XT_OK) {
        xt_tokenizer_free(tok);
        return status;
    }
    *out = tok;
    return XT_OK;
}
