/*
 * tokenizer_test.c: cutting, merging, training and loading, on texts and files made here. Parity
 * with the Hugging Face library is in tests/lua/tokenizer_spec.lua.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "../../runtime/io/tokenizer_parts.h"

static void ok(struct xt_ctx *ctx, enum xt_status status) {
    if (status != XT_OK) fail_msg("%s: %s", xt_status_name(status), xt_error(ctx));
}

static int open_ctx(void **state) {
    *state = xt_ctx_new();
    return *state ? 0 : -1;
}

static int close_ctx(void **state) {
    xt_ctx_free(*state);
    return 0;
}

/* ---- files of a test ------------------------------------------------------------------------ */

struct folder {
    char path[64];  /* made by open_folder, gone after close_folder */
    char file[128]; /* the last one written */
};

static struct folder open_folder(void) {
    struct folder f = {.path = "/tmp/tokenizer_test.XXXXXX"};
    assert_non_null(mkdtemp(f.path));
    return f;
}

static const char *write_file(struct folder *f, const char *name, const char *text, size_t n) {
    snprintf(f->file, sizeof f->file, "%s/%s", f->path, name);
    FILE *file = fopen(f->file, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
    return f->file;
}

static void close_folder(struct folder *f) {
    static const char *const names[] = {"text",      "a.json",       "a.tiktoken",
                                        "vocab.bpe", "encoder.json", "tokenizer.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(f->file, sizeof f->file, "%s/%s", f->path, names[i]);
        unlink(f->file);
    }
    assert_int_equal(rmdir(f->path), 0);
}

static struct xt_tokenizer *train(struct xt_ctx *ctx, const char *text, int64_t vocab,
                                  const char *pattern) {
    struct folder f = open_folder();
    const char *special = "<|end|>";
    const char *path = write_file(&f, "text", text, strlen(text));
    struct xt_tokenizer_training how = {.files = &path,
                                        .n_files = 1,
                                        .vocab = vocab,
                                        .pattern = pattern,
                                        .special = &special,
                                        .n_special = 1};
    struct xt_tokenizer *tok = NULL;
    ok(ctx, xt_tokenizer_train(ctx, &how, &tok));
    close_folder(&f);
    return tok;
}

static const char rhyme[] =
    "Betty Botter bought some butter; but, she said, the butter's bitter. If I put it in my "
    "batter, "
    "it will make my batter bitter. But a bit of better butter will make my batter better. So she "
    "bought some better butter, better than the bitter butter, and it made her batter better.";

/* ---- cutting -------------------------------------------------------------------------------- */

struct pieces {
    char text[4096]; /* the pieces, each ended by 0x01 */
    size_t n;        /* of text */
};

static enum xt_status note_piece(void *user, const char *piece, size_t n) {
    struct pieces *p = user;
    assert_true(p->n + n + 1 < sizeof p->text);
    memcpy(p->text + p->n, piece, n);
    p->text[p->n + n] = 1;
    p->n += n + 1;
    return XT_OK;
}

static void cut(struct xt_ctx *ctx, const char *pattern, const char *text, size_t n,
                struct pieces *out) {
    struct xt_split split = {0};
    out->n = 0;
    ok(ctx, xt_split_add(ctx, &split, pattern, strlen(pattern), false));
    ok(ctx, xt_split_run(ctx, &split, text, n, note_piece, out));
    out->text[out->n] = '\0';
    xt_split_free(&split);
}

/* | stands for the end of a piece. */
static void check_cut(struct xt_ctx *ctx, const char *pattern, const char *wanted) {
    char text[256] = "", marked[256];
    struct pieces p;
    snprintf(marked, sizeof marked, "%s", wanted);
    for (char *c = marked, *t = text; *c; c++) {
        if (*c == '|')
            *c = 1;
        else
            *t++ = *c;
    }
    cut(ctx, pattern, text, strlen(text), &p);
    assert_string_equal(p.text, marked);
}

static void qwen_cuts_digits_punctuation_and_spaces_as_the_reference(void **state) {
    check_cut(*state, xt_qwen_pattern, "1|2|3|4|5|");
    check_cut(*state, xt_qwen_pattern, "a| | b|");
    check_cut(*state, xt_qwen_pattern, "x|->|y|");
    check_cut(*state, xt_qwen_pattern, "(x|):\n|");
    check_cut(*state, xt_qwen_pattern, "  \n| x|");
    check_cut(*state, xt_qwen_pattern, "\u2029| \ua3e4|");
    check_cut(*state, xt_qwen_pattern, "\U0001f999.|cpp|");
    check_cut(*state, xt_qwen_pattern, "日本語| test|");
    check_cut(*state, xt_qwen_pattern, "I|'M| he|'ll|");
}

static void gpt2_cuts_numbers_whole_and_contractions_in_lower_case(void **state) {
    check_cut(*state, xt_gpt2_pattern, "12345|");
    check_cut(*state, xt_gpt2_pattern, "a| | b|");
    check_cut(*state, xt_gpt2_pattern, "I|'m| I|'|M|");
    check_cut(*state, xt_gpt2_pattern, "end|  |");
}

/* U+180E was a space once and is none now; U+0085 is one. */
static void white_space_is_what_unicode_calls_so(void **state) {
    check_cut(*state, xt_gpt2_pattern, "a|\u180e|b|");
    check_cut(*state, xt_gpt2_pattern, "a|\u180e.|b|");
    check_cut(*state, xt_gpt2_pattern, "a|\xc2\x85|.|");
    check_cut(*state, xt_gpt2_pattern, "a|\u3000|.|");
}

static void pieces_together_are_the_text_whatever_the_bytes(void **state) {
    static const char *const parts[] = {" ",    "\n",       "a",        "Z",
                                        "7",    "'s",       "é",        "日",
                                        "\xff", "\xe2\x82", "\xc0\x80", "\xf0\x9f\xa6\x99",
                                        ".",    "\t"};
    for (uint64_t seed = 0; seed < 300; seed++) {
        char text[512], joined[4096];
        size_t n = 0, n_joined = 0;
        for (uint64_t i = 0; i < 40; i++) {
            const char *part = parts[xt_seed_mix(seed, i) % (sizeof parts / sizeof *parts)];
            memcpy(text + n, part, strlen(part));
            n += strlen(part);
        }
        struct pieces p;
        cut(*state, seed % 2 ? xt_gpt2_pattern : xt_qwen_pattern, text, n, &p);
        for (size_t i = 0; i < p.n; i++)
            if (p.text[i] != 1) joined[n_joined++] = p.text[i];
        assert_int_equal(n_joined, n);
        assert_memory_equal(joined, text, n);
    }
}

static void an_unfinished_character_is_not_whole(void **state) {
    static const struct {
        const char *text;
        size_t whole;
    } rows[] = {
        {"", 0},
        {"abc", 3},
        {"\xc3", 0},
        {"a\xc3", 1},
        {"\xc3\xa9", 2},
        {"a\xe2\x82", 1},
        {"a\xe2\x82\xac", 4},
        {"a\xf0\x9f\xa6", 1},
        {"\xf0\x9f\xa6\x99", 4},
        {"\xf0\x9f\xa6\x99z\xf0", 5},
        /* These can no longer become a character: they are not waited for. */
        {"a\x80", 2},
        {"a\xff", 2},
        {"a\xc0", 2},
        {"a\xe0\x80", 3},
        {"a\xed\xa0", 3},
        {"\x80\x80\x80\x80", 4},
        {"\xc3\xa9\xa9", 3},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_int_equal(xt_utf8_whole(rows[i].text, strlen(rows[i].text)), rows[i].whole);
}

static void normal_form_composes_and_leaves_the_rest(void **state) {
    static const char *const rows[][2] = {
        {"plain", "plain"},
        {"e\u0301clair", "\u00e9clair"},
        {"\u212b", "\u00c5"},
        {"x \u1100\u1161\u11a8 y", "x \uac01 y"},
        {"q\u0323\u0307", "q\u0323\u0307"},
        {"q\u0307\u0323", "q\u0323\u0307"},
        {"日本語 test", "日本語 test"},
        {"a=\u0338b", "a\u2260b"},
    };
    struct xt_text buffer = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *out;
        size_t n;
        ok(*state, xt_utf8_nfc(*state, rows[i][0], strlen(rows[i][0]), &buffer, &out, &n));
        assert_int_equal(n, strlen(rows[i][1]));
        assert_memory_equal(out, rows[i][1], n);
    }
    free(buffer.data);
}

/* ---- merging -------------------------------------------------------------------------------- */

/* The definition: the lowest rank of all pairs, the leftmost of equals, until there is none. */
static size_t merge_plainly(const struct xt_tokenizer *tok, int32_t *ids, size_t n) {
    const struct xt_bpe *b = &tok->bpe;
    for (;;) {
        size_t best = n, best_rank = b->n_merges;
        for (size_t i = 0; i + 1 < n; i++)
            for (size_t rank = 0; rank < best_rank; rank++)
                if (b->merges[rank].left == ids[i] && b->merges[rank].right == ids[i + 1]) {
                    best = i;
                    best_rank = rank;
                }
        if (best == n) return n;
        ids[best] = b->merges[best_rank].id;
        memmove(ids + best + 1, ids + best + 2, (n - best - 2) * sizeof *ids);
        n--;
    }
}

static void short_and_long_pieces_merge_as_the_definition_says(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tokenizer *tok = train(ctx, rhyme, 340, "gpt2");
    static const char letters[] = "bettrruai";
    for (size_t length = 1; length < 200; length += length < 80 ? 1 : 17) {
        for (uint64_t seed = 0; seed < 8; seed++) {
            char text[256];
            int32_t wanted[256];
            const int32_t *ids;
            size_t n;
            for (size_t i = 0; i < length; i++) {
                text[i] = seed ? letters[xt_seed_mix(seed, i) % (sizeof letters - 1)] : 't';
                wanted[i] = tok->bpe.byte_id[(unsigned char)text[i]];
            }
            size_t n_wanted = merge_plainly(tok, wanted, length);
            ok(ctx, xt_tokenizer_encode(ctx, tok, text, length, false, &ids, &n));
            assert_int_equal(n, n_wanted);
            assert_memory_equal(ids, wanted, n * sizeof *ids);
            /* And again, out of the cache. */
            ok(ctx, xt_tokenizer_encode(ctx, tok, text, length, false, &ids, &n));
            assert_int_equal(n, n_wanted);
            assert_memory_equal(ids, wanted, n * sizeof *ids);
        }
    }
    xt_tokenizer_free(tok);
}

static void every_byte_string_comes_back(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tokenizer *tok = train(ctx, rhyme, 300, "gpt2");
    for (uint64_t seed = 0; seed < 400; seed++) {
        char text[300];
        int64_t back[300];
        const int32_t *ids;
        const char *decoded;
        size_t bytes = (size_t)(xt_splitmix64(seed) % sizeof text), n, n_decoded;
        for (size_t i = 0; i < bytes; i++) text[i] = (char)(xt_seed_mix(seed, i) & 0xff);
        ok(ctx, xt_tokenizer_encode(ctx, tok, text, bytes, seed % 2, &ids, &n));
        for (size_t i = 0; i < n; i++) back[i] = ids[i];
        ok(ctx, xt_tokenizer_decode(ctx, tok, back, n, &decoded, &n_decoded));
        assert_int_equal(n_decoded, bytes);
        assert_memory_equal(decoded, text, bytes);
    }
    xt_tokenizer_free(tok);
}

static void the_longest_control_token_is_taken(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tokenizer *tok = NULL;
    const int32_t *ids;
    size_t n;
    ok(ctx, xt_tokenizer_bytes(ctx, &tok));
    ok(ctx, xt_tokenizer_add(ctx, tok, 256, "<a>", 3, true));
    ok(ctx, xt_tokenizer_add(ctx, tok, 257, "<a><b>", 6, true));
    ok(ctx, xt_tokenizer_encode(ctx, tok, "<a><a><b>x", 10, true, &ids, &n));
    assert_int_equal(n, 3);
    assert_int_equal(ids[0], 256);
    assert_int_equal(ids[1], 257);
    assert_int_equal(ids[2], 'x');
    ok(ctx, xt_tokenizer_encode(ctx, tok, "<a>", 3, false, &ids, &n));
    assert_int_equal(n, 3);
    assert_int_equal(xt_tokenizer_find(tok, "<a>", 3), 256);
    assert_int_equal(xt_tokenizer_find(tok, "<a", 2), -1);
    xt_tokenizer_free(tok);
}

/* ---- training ------------------------------------------------------------------------------- */

static void check_merge(const struct xt_tokenizer *tok, size_t rank, const char *left,
                        const char *right) {
    const struct xt_vocab *v = &tok->vocab;
    const struct xt_merge *m = &tok->bpe.merges[rank];
    assert_true(rank < tok->bpe.n_merges);
    assert_int_equal(m->left, xt_vocab_find(v, left, strlen(left)));
    assert_int_equal(m->right, xt_vocab_find(v, right, strlen(right)));
    assert_int_equal(m->id, 256 + rank);
}

/* "low" 5, "lower" 2, "newest" 6, "widest" 3 times: the example of Sennrich, Haddow and Birch 2016,
   each on its own line. es and st are seen 9 times, we 8: e has a lower id than s. */
static void training_merges_the_most_frequent_pair_and_the_lowest_of_equals(void **state) {
    char text[512] = "";
    static const struct {
        const char *word;
        int count;
    } words[] = {{"low", 5}, {"lower", 2}, {"newest", 6}, {"widest", 3}};
    for (size_t i = 0; i < 4; i++)
        for (int k = 0; k < words[i].count; k++) {
            strcat(text, words[i].word);
            strcat(text, "\n");
        }
    struct xt_tokenizer *tok = train(*state, text, 262, "gpt2");
    assert_int_equal(xt_tokenizer_vocab_size(tok), 262);
    check_merge(tok, 0, "e", "s");
    check_merge(tok, 1, "es", "t");
    check_merge(tok, 2, "l", "o");
    check_merge(tok, 3, "lo", "w");
    check_merge(tok, 4, "e", "w"); /* 6 times, as ne and w est: ew has the lowest ids */
    assert_int_equal(xt_tokenizer_find(tok, "<|end|>", 7), 261);
    xt_tokenizer_free(tok);
}

static void overlapping_pairs_are_counted_and_merged_from_the_left(void **state) {
    const int32_t *ids;
    size_t n;
    struct xt_tokenizer *tok = train(*state, "aaaaa aaaaa", 259, "gpt2");
    check_merge(tok, 0, "a", "a");
    check_merge(tok, 1, "aa", "a"); /* as often as aa aa, and a has the lower id */
    ok(*state, xt_tokenizer_encode(*state, tok, "aaaaa", 5, false, &ids, &n));
    assert_int_equal(n, 2);
    assert_int_equal(ids[0], 256);
    assert_int_equal(ids[1], 257);
    xt_tokenizer_free(tok);
}

/* ---- files ---------------------------------------------------------------------------------- */

#define HEAD                                                                                       \
    "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},"   \
    "\"decoder\":{\"type\":\"ByteLevel\"},"
#define MODEL(inside) HEAD "\"model\":{\"type\":\"BPE\"," inside "}}"

static void what_is_wrong_or_not_supported_is_named(void **state) {
    static const char *const rows[][2] = {
        {"", "line 1, column 0"},
        {"[]", "wanted an object"},
        {"{}", "pre_tokenizer: wanted an object"},
        {HEAD "\"model\":{\"type\":\"WordPiece\"}}", "type 'WordPiece' is not supported"},
        {HEAD "\"truncation\":{\"max_length\":8}}", "option 'truncation' is not supported"},
        {HEAD "\"padding\":{\"strategy\":1}}", "option 'padding' is not supported"},
        {HEAD "\"normalizer\":{\"type\":\"Lowercase\"}}", "type 'Lowercase' is not supported"},
        {"{\"pre_tokenizer\":{\"type\":\"Metaspace\"}}", "type 'Metaspace' is not supported"},
        {"{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true}}",
         "add_prefix_space = true is not supported"},
        {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
         "\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\",\"invert\":false}]}}",
         "pattern, at byte 2: missing closing parenthesis"},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},"
         "\"behavior\":\"Removed\"}}",
         "behavior 'Removed' is not supported"},
        {HEAD "\"post_processor\":{\"type\":\"RobertaProcessing\"}}", "'RobertaProcessing'"},
        {HEAD "\"added_tokens\":[{\"id\":0,\"content\":\"x\",\"lstrip\":true}]}",
         "added token 'x': lstrip = true is not supported"},
        {HEAD "\"added_tokens\":[{\"id\":0}]}", "entry 1: wanted an id and a content"},
        {HEAD "\"added_tokens\":[{\"id\":99999999,\"content\":\"x\"}]}", "id 99999999 is out of"},
        {MODEL("\"dropout\":0.1"), "option 'dropout' is not supported"},
        {MODEL("\"byte_fallback\":true"), "option 'byte_fallback' is not supported"},
        {MODEL("\"end_of_word_suffix\":\"</w>\""), "option 'end_of_word_suffix'"},
        {MODEL("\"vocab\":{\"a\":\"b\"}"), "'a': wanted an integer"},
        {MODEL("\"vocab\":{\"a\":-1}"), "id -1 is out of range"},
        {MODEL("\"vocab\":{\"a\":0,\"b\":0}"), "id 0 is given to two tokens"},
        {MODEL("\"vocab\":{\"a\":0,\"a\":1}"), "duplicate"},
        {MODEL("\"vocab\":{\"a\":0}"), "merges: wanted a list"},
        {MODEL("\"vocab\":{\"a\":0},\"merges\":[\"a b\"]"),
         "merge 1: the vocabulary lacks its right"},
        {MODEL("\"vocab\":{\"a\":0},\"merges\":[\"a a\"]"),
         "merge 1: the vocabulary lacks its result"},
        {MODEL("\"vocab\":{\"a\":0},\"merges\":[\"aa\"]"), "wanted two tokens with a space"},
        {MODEL("\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]"), "merge 1: wanted two tokens"},
    };
    struct folder f = open_folder();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct xt_tokenizer *tok = NULL;
        const char *path = write_file(&f, "a.json", rows[i][0], strlen(rows[i][0]));
        assert_int_not_equal(xt_tokenizer_load(*state, path, NULL, &tok), XT_OK);
        assert_null(tok);
        if (!strstr(xt_error(*state), path) || !strstr(xt_error(*state), rows[i][1]))
            fail_msg("'%s' should name the file and '%s'", xt_error(*state), rows[i][1]);
    }
    close_folder(&f);
}

static void a_byte_without_a_token_is_refused_when_it_is_met(void **state) {
    static const char text[] = MODEL("\"vocab\":{\"a\":0,\"aa\":2},\"merges\":[[\"a\",\"a\"]]");
    struct folder f = open_folder();
    struct xt_tokenizer *tok = NULL;
    const int32_t *ids;
    size_t n;
    ok(*state,
       xt_tokenizer_load(*state, write_file(&f, "a.json", text, sizeof text - 1), NULL, &tok));
    assert_int_equal(xt_tokenizer_vocab_size(tok), 3);
    ok(*state, xt_tokenizer_encode(*state, tok, "aaa", 3, false, &ids, &n));
    assert_int_equal(n, 2);
    assert_int_equal(xt_tokenizer_encode(*state, tok, "ab", 2, false, &ids, &n), XT_VALUE);
    assert_string_equal(xt_error(*state), "the vocabulary has no token for byte 0x62");
    const int64_t hole = 1;
    const char *decoded;
    assert_int_equal(xt_tokenizer_decode(*state, tok, &hole, 1, &decoded, &n), XT_VALUE);
    assert_string_equal(xt_error(*state), "id 1 at position 1: no token has it");
    xt_tokenizer_free(tok);
    close_folder(&f);
}

static void a_file_cut_short_anywhere_is_refused(void **state) {
    struct xt_ctx *ctx = *state;
    struct folder f = open_folder();
    struct xt_tokenizer *tok = train(ctx, rhyme, 280, "qwen"), *again = NULL;
    ok(ctx, xt_tokenizer_save(ctx, tok, f.path));
    snprintf(f.file, sizeof f.file, "%s/tokenizer.json", f.path);
    FILE *file = fopen(f.file, "rb");
    char text[32768];
    size_t n = fread(text, 1, sizeof text, file);
    fclose(file);
    assert_in_range(n, 1000, sizeof text - 1);
    for (size_t cut_at = 0; cut_at + 2 < n; cut_at += 37) {
        assert_int_not_equal(
            xt_tokenizer_load(ctx, write_file(&f, "a.json", text, cut_at), NULL, &again), XT_OK);
        assert_null(again);
    }
    ok(ctx, xt_tokenizer_load(ctx, write_file(&f, "a.json", text, n), NULL, &again));
    assert_int_equal(xt_tokenizer_vocab_size(again), xt_tokenizer_vocab_size(tok));
    xt_tokenizer_free(again);
    xt_tokenizer_free(tok);
    close_folder(&f);
}

/* aa is the fourth token; its parts and its rank are all a rank file says. */
static void ranks_become_merges(void **state) {
    static const char ranks[] = "YQ== 0\nYg== 1\nYWE= 2\nYWFi 3\nMA== 4\nMQ== 5\n";
    struct xt_ctx *ctx = *state;
    struct folder f = open_folder();
    struct xt_tokenizer *tok = NULL;
    const int32_t *ids;
    size_t n;
    ok(ctx,
       xt_tokenizer_load(ctx, write_file(&f, "a.tiktoken", ranks, sizeof ranks - 1), NULL, &tok));
    assert_true(tok->split.nfc); /* no number of two digits: Qwen's pattern */
    ok(ctx, xt_tokenizer_encode(ctx, tok, "aaab01", 6, false, &ids, &n));
    static const int32_t wanted[] = {2, 0, 1, 4, 5};
    assert_int_equal(n, 5);
    assert_memory_equal(ids, wanted, sizeof wanted);
    ok(ctx, xt_tokenizer_encode(ctx, tok, "aab", 3, false, &ids, &n));
    assert_int_equal(n, 1);
    assert_int_equal(ids[0], 3);
    xt_tokenizer_free(tok);
    static const char *const wrong[][2] = {
        {"YQ== 0\nYg==\n", "line 2: wanted a token in base64"},
        {"Y*== 0\n", "line 1: character 2 is no base64"},
        {"YQ== x\n", "line 1: the rank is no number"},
        {"YQ== 0\nYg== 0\n", "line 2: id 0 is given to two tokens"},
        {"YQ== 0\nYQ== 1\n", "line 2: ids 0 and 1 have the same bytes"},
        {"MQ== 0\nMTE= 1\n", "neither 'gpt2' nor 'qwen'"},
        {"", "it is empty"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *path = write_file(&f, "a.tiktoken", wrong[i][0], strlen(wrong[i][0]));
        assert_int_not_equal(xt_tokenizer_load(ctx, path, NULL, &tok), XT_OK);
        if (!strstr(xt_error(ctx), path) || !strstr(xt_error(ctx), wrong[i][1]))
            fail_msg("'%s' should name the file and '%s'", xt_error(ctx), wrong[i][1]);
    }
    close_folder(&f);
}

static void the_pair_of_files_is_loaded_with_its_control_token(void **state) {
    struct xt_ctx *ctx = *state;
    struct folder f = open_folder();
    struct xt_tokenizer *tok = NULL;
    static const char vocab[] =
        "{\"a\": 0, \"b\": 1, \"\\u0120\": 2, \"\\u0120a\": 3, \"<|x|>\": 4}";
    static const char merges[] = "#version: 0.2\n\u0120 a\n";
    const int32_t *ids;
    size_t n;
    write_file(&f, "encoder.json", vocab, sizeof vocab - 1);
    write_file(&f, "vocab.bpe", merges, sizeof merges - 1);
    ok(ctx, xt_tokenizer_load(ctx, f.file, NULL, &tok));
    ok(ctx, xt_tokenizer_encode(ctx, tok, "b a<|x|>", 8, true, &ids, &n));
    static const int32_t wanted[] = {1, 3, 4};
    assert_int_equal(n, 3);
    assert_memory_equal(ids, wanted, sizeof wanted);
    xt_tokenizer_free(tok);
    write_file(&f, "vocab.bpe", "a b\n", 4);
    assert_int_equal(xt_tokenizer_load(ctx, f.path, NULL, &tok), XT_FORMAT);
    assert_non_null(strstr(xt_error(ctx), "vocab.bpe: line 1: the vocabulary lacks its result"));
    close_folder(&f);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, open_ctx, close_ctx)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(qwen_cuts_digits_punctuation_and_spaces_as_the_reference),
        TEST(gpt2_cuts_numbers_whole_and_contractions_in_lower_case),
        TEST(white_space_is_what_unicode_calls_so),
        TEST(pieces_together_are_the_text_whatever_the_bytes),
        TEST(an_unfinished_character_is_not_whole),
        TEST(normal_form_composes_and_leaves_the_rest),
        TEST(short_and_long_pieces_merge_as_the_definition_says),
        TEST(every_byte_string_comes_back),
        TEST(the_longest_control_token_is_taken),
        TEST(training_merges_the_most_frequent_pair_and_the_lowest_of_equals),
        TEST(overlapping_pairs_are_counted_and_merged_from_the_left),
        TEST(what_is_wrong_or_not_supported_is_named),
        TEST(a_byte_without_a_token_is_refused_when_it_is_met),
        TEST(a_file_cut_short_anywhere_is_refused),
        TEST(ranks_become_merges),
        TEST(the_pair_of_files_is_loaded_with_its_control_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
