/*
 * bpe_train.c: a byte-level BPE vocabulary from text.
 *
 * Text becomes words (pieces of the split) with counts; then the pair of neighbouring ids that is
 * seen most often becomes a new id, again and again. Counts are kept up to date by looking only at
 * the words that hold the pair. The same text gives the same vocabulary: of pairs seen equally
 * often the one with the lowest left id goes first, then the lowest right id. (So does the Hugging
 * Face library.) Ids 0 to 255 are the bytes in GPT-2's order.
 */
#include <stdlib.h>
#include <string.h>

#include "file.h"
#include "tokenizer_parts.h"

struct word {
    size_t first;   /* its bytes in text; its ids in ids */
    uint32_t bytes; /* how many */
    uint32_t n;     /* of ids: shrinks as pairs merge */
    int64_t count;  /* how often it was seen */
};

struct pair {
    uint64_t key;     /* left << 32 | right */
    int64_t count;    /* how often it is seen now */
    uint32_t *words;  /* words that hold it or once did, rising as far as they came at once */
    size_t n_words;   /* of words */
    size_t cap_words; /* of words */
};

struct candidate {
    int64_t count; /* when it was pushed: the pair's may be lower by now */
    uint64_t key;  /* of equal counts the lowest is on top */
    uint32_t pair; /* index into pairs */
};

struct training {
    struct xt_ctx *ctx;        /* for sentences */
    struct xt_tokenizer *tok;  /* what is made */
    struct xt_text text;       /* the bytes of all words */
    struct word *words;        /* in the order they were first seen */
    size_t n_words, cap_words; /* of words */
    uint32_t *word_table;      /* open addressing: bytes -> index + 1; 0 is empty */
    size_t word_table_size;    /* a power of two, or 0 */
    int32_t *ids;              /* of all words, at the places of their bytes */
    struct pair *pairs;        /* in the order they were first seen */
    size_t n_pairs, cap_pairs; /* of pairs */
    uint32_t *pair_table;      /* open addressing: key -> index + 1; 0 is empty */
    size_t pair_table_size;    /* a power of two, or 0 */
    struct candidate *heap;    /* the largest on top */
    size_t n_heap, cap_heap;   /* of heap */
};

static void training_free(struct training *t) {
    for (size_t i = 0; i < t->n_pairs; i++) free(t->pairs[i].words);
    free(t->text.data);
    free(t->words);
    free(t->word_table);
    free(t->ids);
    free(t->pairs);
    free(t->pair_table);
    free(t->heap);
}

/* A table of twice the size, empty, when `used` would fill more than half of it. */
static enum xt_status next_table(struct xt_ctx *ctx, size_t used, size_t *size, uint32_t **table,
                                 bool *grown) {
    *grown = used >= *size / 2;
    if (!*grown) return XT_OK;
    size_t larger = *size ? 2 * *size : 1 << 14;
    uint32_t *made = used < UINT32_MAX / 2 ? calloc(larger, sizeof *made) : NULL;
    if (!made) return xt_fail(ctx, XT_MEMORY, "tokenizer: no memory to train");
    free(*table);
    *table = made;
    *size = larger;
    return XT_OK;
}

/* ---- words ---------------------------------------------------------------------------------- */

static uint32_t *word_place(const struct training *t, const char *bytes, size_t n) {
    size_t mask = t->word_table_size - 1;
    size_t i = (size_t)xt_hash(bytes, n) & mask;
    for (; t->word_table[i]; i = (i + 1) & mask) {
        const struct word *w = &t->words[t->word_table[i] - 1];
        if (w->bytes == n && memcmp(t->text.data + w->first, bytes, n) == 0) break;
    }
    return &t->word_table[i];
}

static enum xt_status count_word(void *user, const char *piece, size_t n) {
    struct training *t = user;
    bool grown;
    if (n > UINT32_MAX / 2)
        return xt_fail(t->ctx, XT_UNSUPPORTED, "a piece of %zu bytes without a place to cut it", n);
    XT_TRY(next_table(t->ctx, t->n_words, &t->word_table_size, &t->word_table, &grown));
    for (size_t i = 0; grown && i < t->n_words; i++)
        *word_place(t, t->text.data + t->words[i].first, t->words[i].bytes) = (uint32_t)i + 1;
    uint32_t *place = word_place(t, piece, n);
    if (*place) {
        t->words[*place - 1].count++;
        return XT_OK;
    }
    size_t first = t->text.n;
    XT_TRY(xt_grow(t->ctx, &t->words, &t->cap_words, t->n_words + 1, sizeof *t->words));
    XT_TRY(xt_text_add(t->ctx, &t->text, piece, n));
    t->words[t->n_words++] =
        (struct word){.first = first, .bytes = (uint32_t)n, .n = (uint32_t)n, .count = 1};
    *place = (uint32_t)t->n_words;
    return XT_OK;
}

static enum xt_status count_file(struct training *t, const char *path) {
    char *text = NULL;
    size_t n = 0;
    XT_TRY(xt_read_text(t->ctx, path, &text, &n));
    enum xt_status status = xt_split_run(t->ctx, &t->tok->split, text, n, count_word, t);
    free(text);
    return status == XT_OK ? XT_OK : xt_fail_in(t->ctx, status, path);
}

/* ---- pairs ---------------------------------------------------------------------------------- */

static uint32_t *pair_place(const struct training *t, uint64_t key) {
    size_t mask = t->pair_table_size - 1;
    uint64_t h = key * UINT64_C(0x9e3779b97f4a7c15);
    size_t i = (size_t)(h ^ h >> 32) & mask;
    while (t->pair_table[i] && t->pairs[t->pair_table[i] - 1].key != key) i = (i + 1) & mask;
    return &t->pair_table[i];
}

static enum xt_status find_pair(struct training *t, uint64_t key, struct pair **out) {
    bool grown;
    XT_TRY(next_table(t->ctx, t->n_pairs, &t->pair_table_size, &t->pair_table, &grown));
    for (size_t i = 0; grown && i < t->n_pairs; i++)
        *pair_place(t, t->pairs[i].key) = (uint32_t)i + 1;
    uint32_t *place = pair_place(t, key);
    if (!*place) {
        XT_TRY(xt_grow(t->ctx, &t->pairs, &t->cap_pairs, t->n_pairs + 1, sizeof *t->pairs));
        t->pairs[t->n_pairs++] = (struct pair){.key = key};
        *place = (uint32_t)t->n_pairs;
    }
    *out = &t->pairs[*place - 1];
    return XT_OK;
}

/* `word` is the one being looked at: it enters a pair's list once, at its end. */
static enum xt_status count_pair(struct training *t, int32_t left, int32_t right, int64_t count,
                                 size_t word) {
    struct pair *p = NULL;
    XT_TRY(find_pair(t, (uint64_t)(uint32_t)left << 32 | (uint32_t)right, &p));
    p->count += count;
    if (count < 0 || (p->n_words && p->words[p->n_words - 1] == word)) return XT_OK;
    XT_TRY(xt_grow(t->ctx, &p->words, &p->cap_words, p->n_words + 1, sizeof *p->words));
    p->words[p->n_words++] = (uint32_t)word;
    return XT_OK;
}

/* ---- the heap ------------------------------------------------------------------------------- */

static bool before(const struct candidate *a, const struct candidate *b) {
    return a->count != b->count ? a->count > b->count : a->key < b->key;
}

static enum xt_status push(struct training *t, size_t pair) {
    const struct pair *p = &t->pairs[pair];
    struct candidate c = {.count = p->count, .key = p->key, .pair = (uint32_t)pair};
    if (c.count < 2) return XT_OK;
    XT_TRY(xt_grow(t->ctx, &t->heap, &t->cap_heap, t->n_heap + 1, sizeof *t->heap));
    size_t i = t->n_heap++;
    for (; i > 0 && before(&c, &t->heap[(i - 1) / 2]); i = (i - 1) / 2)
        t->heap[i] = t->heap[(i - 1) / 2];
    t->heap[i] = c;
    return XT_OK;
}

static struct candidate pop(struct training *t) {
    struct candidate top = t->heap[0], last = t->heap[--t->n_heap];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= t->n_heap) break;
        if (child + 1 < t->n_heap && before(&t->heap[child + 1], &t->heap[child])) child++;
        if (!before(&t->heap[child], &last)) break;
        t->heap[i] = t->heap[child];
        i = child;
    }
    t->heap[i] = last;
    return top;
}

/* ---- merging -------------------------------------------------------------------------------- */

/* Replaces left, right by id in one word, and keeps the counts of the pairs around true. */
static enum xt_status merge_word(struct training *t, size_t word, int32_t left, int32_t right,
                                 int32_t id) {
    struct word *w = &t->words[word];
    int32_t *ids = t->ids + w->first;
    uint32_t n = 0; /* ids written so far: never ahead of those read */
    for (uint32_t i = 0; i < w->n;) {
        if (ids[i] != left || i + 1 == w->n || ids[i + 1] != right) {
            ids[n++] = ids[i++];
            continue;
        }
        if (n > 0) {
            XT_TRY(count_pair(t, ids[n - 1], left, -w->count, word));
            XT_TRY(count_pair(t, ids[n - 1], id, w->count, word));
        }
        i += 2;
        if (i < w->n) {
            XT_TRY(count_pair(t, right, ids[i], -w->count, word));
            XT_TRY(count_pair(t, id, ids[i], w->count, word));
        }
        ids[n++] = id;
    }
    w->n = n;
    return XT_OK;
}

/* The bytes of both, as an id: a new one, unless the vocabulary has them by another way. */
static enum xt_status new_id(struct training *t, int32_t left, int32_t right, struct xt_text *bytes,
                             int32_t *id) {
    struct xt_vocab *v = &t->tok->vocab;
    const struct xt_token *a = &v->tokens[left], *b = &v->tokens[right];
    bytes->n = 0;
    XT_TRY(xt_text_add(t->ctx, bytes, v->text.data + a->offset, (size_t)a->bytes));
    XT_TRY(xt_text_add(t->ctx, bytes, v->text.data + b->offset, (size_t)b->bytes));
    *id = xt_vocab_find(v, bytes->data, bytes->n);
    if (*id >= 0) return XT_OK;
    *id = (int32_t)v->n;
    return xt_vocab_set(t->ctx, v, *id, bytes->data, bytes->n, false);
}

static enum xt_status merge_pair(struct training *t, size_t pair, struct xt_text *bytes) {
    uint64_t key = t->pairs[pair].key;
    int32_t left = (int32_t)(key >> 32), right = (int32_t)(key & UINT32_MAX), id;
    size_t first_new = t->n_pairs;
    XT_TRY(new_id(t, left, right, bytes, &id));
    XT_TRY(xt_bpe_add(t->ctx, &t->tok->bpe, left, right, id));
    /* The list moves out: pairs may grow, and this one is done with. */
    uint32_t *words = t->pairs[pair].words;
    size_t n = t->pairs[pair].n_words;
    t->pairs[pair].words = NULL;
    t->pairs[pair].n_words = t->pairs[pair].cap_words = 0;
    enum xt_status status = XT_OK;
    for (size_t i = 0; i < n && status == XT_OK; i++)
        status = merge_word(t, words[i], left, right, id);
    free(words);
    t->pairs[pair].count = 0;
    for (size_t i = first_new; i < t->n_pairs && status == XT_OK; i++) status = push(t, i);
    return status;
}

static enum xt_status merge_all(struct training *t, size_t vocab) {
    struct xt_text bytes = {0};
    enum xt_status status = XT_OK;
    while (t->n_heap && t->tok->vocab.n < vocab && status == XT_OK) {
        struct candidate c = pop(t);
        if (t->pairs[c.pair].count == c.count)
            status = merge_pair(t, c.pair, &bytes);
        else /* it has become rarer: back with its true count */
            status = push(t, c.pair);
    }
    free(bytes.data);
    return status;
}

static enum xt_status count_pairs(struct training *t) {
    size_t n = t->text.n ? t->text.n : 1;
    t->ids = n <= SIZE_MAX / sizeof *t->ids ? malloc(n * sizeof *t->ids) : NULL;
    if (!t->ids) return xt_fail(t->ctx, XT_MEMORY, "tokenizer: no memory to train");
    for (size_t i = 0; i < t->text.n; i++)
        t->ids[i] = t->tok->bpe.byte_id[(unsigned char)t->text.data[i]];
    for (size_t i = 0; i < t->n_words; i++) {
        const struct word *w = &t->words[i];
        const int32_t *ids = t->ids + w->first;
        for (uint32_t k = 0; k + 1 < w->n; k++)
            XT_TRY(count_pair(t, ids[k], ids[k + 1], w->count, i));
    }
    for (size_t i = 0; i < t->n_pairs; i++) XT_TRY(push(t, i));
    return XT_OK;
}

static enum xt_status train(struct training *t, const struct xt_tokenizer_training *how) {
    struct xt_tokenizer *tok = t->tok;
    unsigned char order[256];
    xt_byte_order(order);
    for (int i = 0; i < 256; i++)
        XT_TRY(xt_vocab_set(t->ctx, &tok->vocab, i, (const char *)&order[i], 1, false));
    XT_TRY(xt_tokenizer_pattern(t->ctx, tok, how->pattern));
    XT_TRY(xt_bpe_open(t->ctx, &tok->bpe, &tok->vocab));
    for (int i = 0; i < how->n_files; i++) XT_TRY(count_file(t, how->files[i]));
    XT_TRY(count_pairs(t));
    XT_TRY(merge_all(t, (size_t)how->vocab - (size_t)how->n_special));
    for (int i = 0; i < how->n_special; i++)
        XT_TRY(xt_tokenizer_add(t->ctx, tok, (int64_t)tok->vocab.n, how->special[i],
                                strlen(how->special[i]), true));
    return XT_OK;
}

enum xt_status xt_tokenizer_train(struct xt_ctx *ctx, const struct xt_tokenizer_training *how,
                                  struct xt_tokenizer **out) {
    if (how->vocab < 256 + how->n_special || how->vocab > XT_MAX_IDS)
        return xt_fail(ctx, XT_ARGUMENT,
                       "vocab is %lld, wanted %d (bytes and special tokens) to %d",
                       (long long)how->vocab, 256 + how->n_special, XT_MAX_IDS);
    struct training t = {.ctx = ctx};
    XT_TRY(xt_tokenizer_new(ctx, &t.tok));
    enum xt_status status = train(&t, how);
    training_free(&t);
    if (status != XT_OK) {
        xt_tokenizer_free(t.tok);
        return status;
    }
    *out = t.tok;
    return XT_OK;
}
