/*
 * pretokenize.c: text to pieces, by the regular expressions of GPT-2, of Qwen or of a file.
 *
 * The expressions were written for another library. PCRE2 agrees with it but for \s, which under
 * UCP also takes U+180E: so \s and \S are compiled as the Unicode property White_Space. Letters
 * that a Unicode newer than PCRE2's has added count as "other" here.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer_parts.h"

const char xt_gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+"
                               "|\\s+(?!\\S)|\\s+";
const char xt_qwen_pattern[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
                               "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

struct xt_regex {
    pcre2_code *code;             /* compiled */
    pcre2_match_data *match;      /* of one match: a pair of offsets */
    pcre2_match_context *context; /* limits and the stack of the compiled code */
    pcre2_jit_stack *stack;       /* grows to 8 MiB */
    bool jit;                     /* false: this machine runs no code made at run time */
};

static void regex_free(struct xt_regex *r) {
    if (!r) return;
    pcre2_code_free(r->code);
    pcre2_match_data_free(r->match);
    pcre2_match_context_free(r->context);
    pcre2_jit_stack_free(r->stack);
    free(r);
}

void xt_split_free(struct xt_split *s) {
    for (int i = 0; i < s->n; i++) regex_free(s->regex[i]);
    free(s->buffer.data);
    *s = (struct xt_split){0};
}

/* The same expression with \s and \S as White_Space. */
static enum xt_status translate(struct xt_ctx *ctx, const char *pattern, size_t n,
                                struct xt_text *out) {
    for (size_t i = 0; i < n; i++) {
        if (pattern[i] != '\\' || i + 1 == n) {
            XT_TRY(xt_text_add(ctx, out, &pattern[i], 1));
            continue;
        }
        char next = pattern[++i];
        if (next == 's')
            XT_TRY(xt_text_adds(ctx, out, "\\p{White_Space}"));
        else if (next == 'S')
            XT_TRY(xt_text_adds(ctx, out, "\\P{White_Space}"));
        else
            XT_TRY(xt_text_add(ctx, out, &pattern[i - 1], 2));
    }
    return XT_OK;
}

static enum xt_status compile(struct xt_ctx *ctx, struct xt_regex *r, const char *pattern, size_t n,
                              bool literal) {
    int error;
    PCRE2_SIZE at;
    uint32_t options = literal ? PCRE2_UTF | PCRE2_LITERAL : PCRE2_UTF | PCRE2_UCP;
    r->code = pcre2_compile((PCRE2_SPTR)pattern, n, options, &error, &at, NULL);
    if (!r->code) {
        PCRE2_UCHAR text[160] = "";
        pcre2_get_error_message(error, text, sizeof text);
        return xt_fail(ctx, error == PCRE2_ERROR_HEAP_FAILED ? XT_MEMORY : XT_FORMAT,
                       "pattern, at byte %zu: %s", (size_t)at + 1, (const char *)text);
    }
    r->jit = pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE) == 0;
    r->match = pcre2_match_data_create(1, NULL);
    r->context = pcre2_match_context_create(NULL);
    r->stack = pcre2_jit_stack_create(32 << 10, 8 << 20, NULL);
    if (!r->match || !r->context || (r->jit && !r->stack))
        return xt_fail(ctx, XT_MEMORY, "pattern: no memory to match it");
    if (r->stack) pcre2_jit_stack_assign(r->context, NULL, r->stack);
    pcre2_set_match_limit(r->context, UINT32_MAX);
    pcre2_set_heap_limit(r->context, UINT32_MAX);
    return XT_OK;
}

enum xt_status xt_split_add(struct xt_ctx *ctx, struct xt_split *s, const char *pattern, size_t n,
                            bool literal) {
    if (s->n == XT_MAX_SPLITS)
        return xt_fail(ctx, XT_UNSUPPORTED, "more than %d splits in a row", XT_MAX_SPLITS);
    struct xt_text text = {0};
    struct xt_regex *r = calloc(1, sizeof *r);
    enum xt_status status = XT_OK;
    if (!r) XT_GO(xt_fail(ctx, XT_MEMORY, "pattern: no memory"));
    if (!literal) XT_GO(translate(ctx, pattern, n, &text));
    XT_GO(compile(ctx, r, literal ? pattern : text.data, literal ? n : text.n, literal));
    s->regex[s->n++] = r;
    r = NULL;
done:
    regex_free(r);
    free(text.data);
    return status;
}

/* Cuts one piece of valid UTF-8 by the expressions from `level` on. */
static enum xt_status cut(struct xt_ctx *ctx, struct xt_split *s, int level, const char *text,
                          size_t n, xt_piece_fn *fn, void *user) {
    if (n == 0) return XT_OK;
    if (level == s->n) return fn(user, text, n);
    struct xt_regex *r = s->regex[level];
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(r->match);
    for (size_t at = 0; at < n;) {
        int rc = r->jit ? pcre2_jit_match(r->code, (PCRE2_SPTR)text, n, at, PCRE2_NOTEMPTY,
                                          r->match, r->context)
                        : pcre2_match(r->code, (PCRE2_SPTR)text, n, at,
                                      PCRE2_NOTEMPTY | PCRE2_NO_UTF_CHECK, r->match, r->context);
        if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) {
            PCRE2_UCHAR message[160] = "";
            pcre2_get_error_message(rc, message, sizeof message);
            return xt_fail(ctx, XT_VALUE, "cannot split the text at byte %zu: %s", at + 1,
                           (const char *)message);
        }
        /* \K in a look-around may turn a match inside out: what is matched then is nothing. */
        bool none = rc < 0 || found[0] < at || found[1] <= found[0];
        size_t first = none ? n : found[0], last = none ? n : found[1];
        XT_TRY(cut(ctx, s, level + 1, text + at, first - at, fn, user));
        XT_TRY(cut(ctx, s, level + 1, text + first, last - first, fn, user));
        at = last;
    }
    return XT_OK;
}

enum xt_status xt_split_run(struct xt_ctx *ctx, struct xt_split *s, const char *text, size_t n,
                            xt_piece_fn *fn, void *user) {
    for (size_t at = 0; at < n;) {
        size_t valid = xt_utf8_valid(text + at, n - at);
        const char *span = text + at;
        size_t bytes = valid;
        if (s->nfc) XT_TRY(xt_utf8_nfc(ctx, span, valid, &s->buffer, &span, &bytes));
        XT_TRY(cut(ctx, s, 0, span, bytes, fn, user));
        at += valid;
        size_t invalid = xt_utf8_invalid(text + at, n - at);
        if (invalid) XT_TRY(fn(user, text + at, invalid));
        at += invalid;
    }
    return XT_OK;
}
