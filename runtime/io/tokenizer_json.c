/*
 * tokenizer_json.c: a tokenizer.json to a tokenizer.
 *
 * What changes ids and is not done here is refused by name: a key that no reader below knows may
 * only be null, false or empty.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "tokenizer_parts.h"

/* ---- small readers -------------------------------------------------------------------------- */

/* Nothing was asked for: null, false, "" and empty lists. */
static bool is_off(const json_t *v) {
    return json_is_null(v) || json_is_false(v) || (json_is_string(v) && !json_string_length(v)) ||
           (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0);
}

/* `known` is "a|b|c". */
static bool is_known(const char *known, const char *key) {
    size_t n = strlen(key);
    for (const char *at = known; at; at = strchr(at, '|')) {
        if (*at == '|') at++;
        if (strncmp(at, key, n) == 0 && (at[n] == '|' || at[n] == '\0')) return true;
    }
    return false;
}

static enum xt_status check_keys(struct xt_ctx *ctx, json_t *object, const char *where,
                                 const char *known) {
    const char *key;
    json_t *value;
    if (!json_is_object(object)) return xt_fail(ctx, XT_FORMAT, "%s: wanted an object", where);
    json_object_foreach(object, key, value) {
        if (is_known(known, key) || is_off(value)) continue;
        return xt_fail(ctx, XT_UNSUPPORTED, "%s: option '%.60s' is not supported", where, key);
    }
    return XT_OK;
}

/* Only `wanted` will do; a key left out counts as that. */
static enum xt_status check_bool(struct xt_ctx *ctx, const json_t *object, const char *where,
                                 const char *key, bool wanted) {
    const json_t *v = json_object_get(object, key);
    if (!v || json_is_null(v) || (json_is_boolean(v) && json_boolean_value(v) == wanted))
        return XT_OK;
    if (!json_is_boolean(v)) return xt_fail(ctx, XT_FORMAT, "%s: %s: wanted a boolean", where, key);
    return xt_fail(ctx, XT_UNSUPPORTED, "%s: %s = %s is not supported", where, key,
                   wanted ? "false" : "true");
}

static const char *type_of(const json_t *v) {
    const char *type = json_string_value(json_object_get(v, "type"));
    return type ? type : "";
}

static enum xt_status refuse_type(struct xt_ctx *ctx, const json_t *v, const char *where,
                                  const char *known) {
    if (!json_is_object(v)) return xt_fail(ctx, XT_FORMAT, "%s: wanted an object", where);
    return xt_fail(ctx, XT_UNSUPPORTED, "%s: type '%.60s' is not supported: wanted %s", where,
                   type_of(v), known);
}

/* ---- normalizer, pre_tokenizer -------------------------------------------------------------- */

static enum xt_status read_normalizer(struct xt_ctx *ctx, struct xt_tokenizer *tok, json_t *v) {
    static const char where[] = "normalizer";
    if (!v || json_is_null(v)) return XT_OK;
    if (strcmp(type_of(v), "Sequence") == 0) {
        json_t *item;
        size_t i;
        XT_TRY(check_keys(ctx, v, where, "type|normalizers"));
        json_array_foreach(json_object_get(v, "normalizers"), i, item) {
            if (strcmp(type_of(item), "NFC") != 0) return refuse_type(ctx, item, where, "NFC");
            XT_TRY(read_normalizer(ctx, tok, item));
        }
        return XT_OK;
    }
    if (strcmp(type_of(v), "NFC") != 0) return refuse_type(ctx, v, where, "NFC");
    XT_TRY(check_keys(ctx, v, where, "type"));
    tok->split.nfc = true;
    return XT_OK;
}

static enum xt_status read_split(struct xt_ctx *ctx, struct xt_tokenizer *tok, json_t *v) {
    static const char where[] = "pre_tokenizer Split";
    XT_TRY(check_keys(ctx, v, where, "type|pattern|behavior|invert"));
    XT_TRY(check_bool(ctx, v, where, "invert", false));
    const char *behavior = json_string_value(json_object_get(v, "behavior"));
    if (!behavior || strcmp(behavior, "Isolated") != 0)
        return xt_fail(ctx, XT_UNSUPPORTED,
                       "%s: behavior '%.60s' is not supported: wanted Isolated", where,
                       behavior ? behavior : "");
    json_t *pattern = json_object_get(v, "pattern");
    json_t *regex = json_object_get(pattern, "Regex"), *plain = json_object_get(pattern, "String");
    json_t *text = regex ? regex : plain;
    if (!json_is_string(text))
        return xt_fail(ctx, XT_FORMAT, "%s: pattern: wanted a Regex or a String", where);
    return xt_split_add(ctx, &tok->split, json_string_value(text), json_string_length(text),
                        text == plain);
}

static enum xt_status read_digits(struct xt_ctx *ctx, struct xt_tokenizer *tok, json_t *v) {
    XT_TRY(check_keys(ctx, v, "pre_tokenizer Digits", "type|individual_digits"));
    const char *pattern =
        json_is_true(json_object_get(v, "individual_digits")) ? "\\p{N}" : "\\p{N}+";
    return xt_split_add(ctx, &tok->split, pattern, strlen(pattern), false);
}

static enum xt_status read_byte_level(struct xt_ctx *ctx, struct xt_tokenizer *tok, json_t *v) {
    static const char where[] = "pre_tokenizer ByteLevel";
    XT_TRY(check_keys(ctx, v, where, "type|add_prefix_space|trim_offsets|use_regex"));
    /* Left out, the library takes add_prefix_space for true. */
    if (!json_is_boolean(json_object_get(v, "add_prefix_space")))
        return xt_fail(ctx, XT_FORMAT, "%s: add_prefix_space: wanted a boolean", where);
    XT_TRY(check_bool(ctx, v, where, "add_prefix_space", false));
    const json_t *use_regex = json_object_get(v, "use_regex");
    if (use_regex && !json_is_boolean(use_regex))
        return xt_fail(ctx, XT_FORMAT, "%s: use_regex: wanted a boolean", where);
    if (json_is_false(use_regex)) return XT_OK;
    return xt_split_add(ctx, &tok->split, xt_gpt2_pattern, strlen(xt_gpt2_pattern), false);
}

/* Splits in a row; the last is ByteLevel, which turns pieces into bytes. */
static enum xt_status read_pre_tokenizer(struct xt_ctx *ctx, struct xt_tokenizer *tok, json_t *v) {
    static const char where[] = "pre_tokenizer";
    json_t *list = json_object_get(v, "pretokenizers");
    bool sequence = strcmp(type_of(v), "Sequence") == 0;
    if (sequence) XT_TRY(check_keys(ctx, v, where, "type|pretokenizers"));
    size_t n = sequence ? json_array_size(list) : 1;
    for (size_t i = 0; i < n; i++) {
        json_t *item = sequence ? json_array_get(list, i) : v;
        const char *type = type_of(item);
        if (strcmp(type, "ByteLevel") == 0 && i + 1 == n) return read_byte_level(ctx, tok, item);
        if (strcmp(type, "Split") == 0)
            XT_TRY(read_split(ctx, tok, item));
        else if (strcmp(type, "Digits") == 0)
            XT_TRY(read_digits(ctx, tok, item));
        else
            return refuse_type(ctx, item, where, "Split and Digits, and ByteLevel as the last");
    }
    return xt_fail(ctx, XT_UNSUPPORTED, "pre_tokenizer: without a ByteLevel at its end");
}

/* ---- post_processor, decoder ---------------------------------------------------------------- */

/* encode never adds tokens around the text: what a post_processor says about that is kept only. */
static enum xt_status read_post_processor(struct xt_ctx *ctx, json_t *v) {
    static const char known[] = "ByteLevel, TemplateProcessing or a Sequence of them";
    if (!v || json_is_null(v)) return XT_OK;
    if (strcmp(type_of(v), "Sequence") == 0) {
        json_t *item;
        size_t i;
        json_array_foreach(json_object_get(v, "processors"), i, item) {
            if (strcmp(type_of(item), "Sequence") == 0)
                return refuse_type(ctx, item, "post_processor", known);
            XT_TRY(read_post_processor(ctx, item));
        }
        return XT_OK;
    }
    if (is_known("ByteLevel|TemplateProcessing", type_of(v)) && *type_of(v)) return XT_OK;
    return refuse_type(ctx, v, "post_processor", known);
}

static enum xt_status read_decoder(struct xt_ctx *ctx, json_t *v) {
    if (strcmp(type_of(v), "Sequence") == 0) {
        json_t *list = json_object_get(v, "decoders");
        if (json_array_size(list) == 1) v = json_array_get(list, 0);
    }
    return strcmp(type_of(v), "ByteLevel") == 0 ? XT_OK
                                                : refuse_type(ctx, v, "decoder", "ByteLevel");
}

/* ---- added_tokens --------------------------------------------------------------------------- */

static enum xt_status read_added(struct xt_ctx *ctx, struct xt_tokenizer *tok, json_t *list) {
    json_t *item;
    size_t i;
    if (list && !json_is_null(list) && !json_is_array(list))
        return xt_fail(ctx, XT_FORMAT, "added_tokens: wanted a list");
    json_array_foreach(list, i, item) {
        json_t *id = json_object_get(item, "id"), *content = json_object_get(item, "content");
        if (!json_is_integer(id) || !json_is_string(content))
            return xt_fail(ctx, XT_FORMAT, "added_tokens, entry %zu: wanted an id and a content",
                           i + 1);
        char where[128];
        snprintf(where, sizeof where, "added token '%.80s'", json_string_value(content));
        XT_TRY(check_keys(ctx, item, where,
                          "id|content|single_word|lstrip|rstrip|normalized|special"));
        XT_TRY(check_bool(ctx, item, where, "single_word", false));
        XT_TRY(check_bool(ctx, item, where, "lstrip", false));
        XT_TRY(check_bool(ctx, item, where, "rstrip", false));
        if (tok->split.nfc) XT_TRY(check_bool(ctx, item, where, "normalized", false));
        XT_TRY(xt_tokenizer_add(ctx, tok, json_integer_value(id), json_string_value(content),
                                json_string_length(content),
                                json_is_true(json_object_get(item, "special"))));
    }
    return XT_OK;
}

/* ---- model ---------------------------------------------------------------------------------- */

/* Tokens as they are written -> their bytes, in `bytes` (emptied first). */
static enum xt_status unmap(struct xt_ctx *ctx, struct xt_text *bytes, const char *text, size_t n,
                            bool *mapped) {
    bytes->n = 0;
    XT_TRY(xt_grow(ctx, &bytes->data, &bytes->capacity, n + 1, 1));
    *mapped = xt_bytes_from_text(text, n, bytes->data, &bytes->n);
    return XT_OK;
}

/* Added tokens are in already. An entry of theirs here must say the same. */
static enum xt_status read_vocab(struct xt_ctx *ctx, struct xt_tokenizer *tok, json_t *vocab,
                                 struct xt_text *bytes) {
    const char *key;
    json_t *value;
    if (!json_is_object(vocab)) return xt_fail(ctx, XT_FORMAT, "model: vocab: wanted an object");
    json_object_foreach(vocab, key, value) {
        size_t n = strlen(key);
        if (!json_is_integer(value))
            return xt_fail(ctx, XT_FORMAT, "model: vocab: '%.60s': wanted an integer", key);
        int64_t id = json_integer_value(value);
        struct xt_vocab *v = &tok->vocab;
        if (id >= 0 && (uint64_t)id < v->n && v->tokens[id].added) {
            const struct xt_token *t = &v->tokens[id];
            if ((size_t)t->bytes == n && memcmp(v->text.data + t->offset, key, n) == 0) continue;
            return xt_fail(ctx, XT_FORMAT, "id %lld is '%.60s' in vocab and '%.*s' in added_tokens",
                           (long long)id, key, (int)(t->bytes < 60 ? t->bytes : 60),
                           v->text.data + t->offset);
        }
        bool mapped;
        XT_TRY(unmap(ctx, bytes, key, n, &mapped));
        /* A text that stands for no bytes cannot be merged to: its id only decodes. */
        XT_TRY(mapped ? xt_vocab_set(ctx, v, id, bytes->data, bytes->n, false)
                      : xt_vocab_set(ctx, v, id, key, n, true));
    }
    return XT_OK;
}

static enum xt_status add_merge(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *left,
                                size_t n_left, const char *right, size_t n_right,
                                struct xt_text *bytes) {
    const struct xt_vocab *v = &tok->vocab;
    bool mapped_left, mapped_right;
    XT_TRY(xt_grow(ctx, &bytes->data, &bytes->capacity, n_left + n_right + 1, 1));
    mapped_left = xt_bytes_from_text(left, n_left, bytes->data, &n_left);
    mapped_right =
        mapped_left && xt_bytes_from_text(right, n_right, bytes->data + n_left, &n_right);
    if (!mapped_right) return xt_fail(ctx, XT_FORMAT, "it holds a character that is no byte's");
    int32_t a = xt_vocab_find(v, bytes->data, n_left);
    int32_t b = xt_vocab_find(v, bytes->data + n_left, n_right);
    int32_t id = xt_vocab_find(v, bytes->data, n_left + n_right);
    if (a < 0 || b < 0 || id < 0)
        return xt_fail(ctx, XT_FORMAT, "the vocabulary lacks its %s",
                       a < 0   ? "left part"
                       : b < 0 ? "right part"
                               : "result");
    return xt_bpe_add(ctx, &tok->bpe, a, b, id);
}

enum xt_status xt_tokenizer_merge(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *line,
                                  size_t n, struct xt_text *bytes) {
    const char *space = n ? memchr(line, ' ', n) : NULL;
    if (!space) return xt_fail(ctx, XT_FORMAT, "wanted two tokens with a space between");
    size_t left = (size_t)(space - line);
    return add_merge(ctx, tok, line, left, space + 1, n - left - 1, bytes);
}

static enum xt_status read_merges(struct xt_ctx *ctx, struct xt_tokenizer *tok, json_t *merges,
                                  struct xt_text *bytes) {
    json_t *item;
    size_t i;
    if (!json_is_array(merges)) return xt_fail(ctx, XT_FORMAT, "model: merges: wanted a list");
    json_array_foreach(merges, i, item) {
        json_t *a = json_array_get(item, 0), *b = json_array_get(item, 1);
        enum xt_status status;
        if (json_is_string(item))
            status = xt_tokenizer_merge(ctx, tok, json_string_value(item), json_string_length(item),
                                        bytes);
        else if (json_array_size(item) == 2 && json_is_string(a) && json_is_string(b))
            status = add_merge(ctx, tok, json_string_value(a), json_string_length(a),
                               json_string_value(b), json_string_length(b), bytes);
        else
            status = xt_fail(ctx, XT_FORMAT, "wanted two tokens");
        if (status != XT_OK) {
            char where[64];
            snprintf(where, sizeof where, "model: merge %zu", i + 1);
            return xt_fail_in(ctx, status, where);
        }
    }
    return XT_OK;
}

static enum xt_status read_model(struct xt_ctx *ctx, struct xt_tokenizer *tok, json_t *model) {
    static const char where[] = "model";
    if (!json_is_object(model)) return xt_fail(ctx, XT_FORMAT, "model: wanted an object");
    if (json_object_get(model, "type") && strcmp(type_of(model), "BPE") != 0)
        return refuse_type(ctx, model, where, "BPE");
    /* unk_token and fuse_unk speak of bytes the vocabulary lacks: those are refused in encode. */
    XT_TRY(check_keys(ctx, model, where,
                      "type|vocab|merges|unk_token|fuse_unk|ignore_merges|dropout"));
    const json_t *dropout = json_object_get(model, "dropout");
    if (dropout && !is_off(dropout) && json_number_value(dropout) != 0.0)
        return xt_fail(ctx, XT_UNSUPPORTED, "model: option 'dropout' is not supported");
    tok->bpe.whole_first = json_is_true(json_object_get(model, "ignore_merges"));
    struct xt_text bytes = {0};
    enum xt_status status = read_vocab(ctx, tok, json_object_get(model, "vocab"), &bytes);
    if (status == XT_OK) status = read_merges(ctx, tok, json_object_get(model, "merges"), &bytes);
    free(bytes.data);
    return status;
}

/* ---- the file ------------------------------------------------------------------------------- */

static enum xt_status keep_json(struct xt_ctx *ctx, const json_t *v, char **out) {
    if (!v || json_is_null(v)) return XT_OK;
    *out = json_dumps(v, JSON_COMPACT);
    return *out ? XT_OK : xt_fail(ctx, XT_MEMORY, "tokenizer: no memory");
}

static enum xt_status parse_text(struct xt_ctx *ctx, const char *text, size_t n, json_t **out) {
    json_error_t error;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return xt_fail(ctx,
                       json_error_code(&error) == json_error_out_of_memory ? XT_MEMORY : XT_FORMAT,
                       "line %d, column %d: %s", error.line, error.column, error.text);
    *out = root;
    return XT_OK;
}

enum xt_status xt_tokenizer_vocab_json(struct xt_ctx *ctx, struct xt_tokenizer *tok,
                                       const char *text, size_t n) {
    json_t *root = NULL;
    struct xt_text bytes = {0};
    XT_TRY(parse_text(ctx, text, n, &root));
    enum xt_status status = read_vocab(ctx, tok, root, &bytes);
    free(bytes.data);
    json_decref(root);
    return status;
}

enum xt_status xt_tokenizer_parse(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *text,
                                  size_t n) {
    json_t *root = NULL;
    XT_TRY(parse_text(ctx, text, n, &root));
    json_t *pre = json_object_get(root, "pre_tokenizer");
    json_t *post = json_object_get(root, "post_processor");
    enum xt_status status = XT_OK;
    XT_GO(check_keys(ctx, root, "the file",
                     "version|added_tokens|normalizer|pre_tokenizer|post_processor|decoder|model"));
    XT_GO(read_normalizer(ctx, tok, json_object_get(root, "normalizer")));
    XT_GO(read_pre_tokenizer(ctx, tok, pre));
    XT_GO(read_post_processor(ctx, post));
    XT_GO(read_decoder(ctx, json_object_get(root, "decoder")));
    XT_GO(read_added(ctx, tok, json_object_get(root, "added_tokens")));
    XT_GO(read_model(ctx, tok, json_object_get(root, "model")));
    XT_GO(keep_json(ctx, pre, &tok->pre_tokenizer));
    XT_GO(keep_json(ctx, post, &tok->post_processor));
done:
    json_decref(root);
    return status;
}
