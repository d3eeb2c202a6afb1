/*
 * tokenizer_parts.h: what the files of the tokenizer share; tokenizer.h has the calls for others.
 *
 * A tokenizer is three parts in a row: split (text -> pieces), vocab and bpe (piece -> ids). All
 * work on bytes: the printable stand-ins that GPT-2's files write for bytes are undone in loading
 * and made again in saving (xt_bytes_from_text, xt_text_from_bytes).
 */
#ifndef XT_TOKENIZER_PARTS_H
#define XT_TOKENIZER_PARTS_H

#include "../op.h"
#include "tokenizer.h"

/* ---- buffers: plain memory that grows ------------------------------------------------------- */

/* Makes room for `want` items of `item` bytes: *data and *capacity (in items) are replaced. */
enum xt_status xt_grow(struct xt_ctx *ctx, void *data, size_t *capacity, size_t want, size_t item);

struct xt_text {
    char *data;      /* owned, may be NULL */
    size_t n;        /* bytes in use */
    size_t capacity; /* bytes there are */
};
enum xt_status xt_text_add(struct xt_ctx *ctx, struct xt_text *t, const void *bytes, size_t n);
enum xt_status xt_text_adds(struct xt_ctx *ctx, struct xt_text *t, const char *string);

struct xt_ids {
    int32_t *data;   /* owned, may be NULL */
    size_t n;        /* ids in use */
    size_t capacity; /* ids there are */
};

/* ---- vocab.c: ids and their bytes ----------------------------------------------------------- */

#define XT_MAX_IDS (1 << 24) /* an id above this is a broken file, not a vocabulary */

struct xt_token {
    size_t offset; /* of the token's bytes in the vocabulary's text */
    int32_t bytes; /* how many; -1: no token has this id */
    bool added;    /* a control token: found in text only when asked for, never by merging */
};

struct xt_vocab {
    struct xt_text text;     /* the bytes of all tokens, one behind the other */
    struct xt_token *tokens; /* by id */
    size_t n;                /* the largest id + 1 */
    size_t capacity;         /* of tokens */
    int32_t *table;          /* open addressing: bytes -> id; -1 is empty. Added tokens stay out */
    size_t table_size;       /* a power of two, or 0 */
    size_t table_used;       /* entries of table that are not -1 */
};

void xt_vocab_free(struct xt_vocab *v);
/* XT_FORMAT when the id is out of range or taken. */
enum xt_status xt_vocab_set(struct xt_ctx *ctx, struct xt_vocab *v, int64_t id, const char *bytes,
                            size_t n, bool added);
int32_t xt_vocab_find(const struct xt_vocab *v, const char *bytes, size_t n); /* -1: none */

/* GPT-2's stand-ins: every byte as one printable character. false: some character is none. */
bool xt_bytes_from_text(const char *text, size_t n, char *out, size_t *n_out); /* out: n bytes */
enum xt_status xt_text_from_bytes(struct xt_ctx *ctx, struct xt_text *out, const char *bytes,
                                  size_t n);
/* The 256 bytes in the order of their stand-ins: the order of GPT-2's first 256 ids. */
void xt_byte_order(unsigned char order[256]);

/* ---- utf8.c: validity and normal form ------------------------------------------------------- */

size_t xt_utf8_valid(const char *text, size_t n);   /* bytes of the longest valid prefix */
size_t xt_utf8_invalid(const char *text, size_t n); /* bytes before the next valid character */
/* NFC of valid UTF-8. *out is `text` itself when nothing changes, else in `buffer`. */
enum xt_status xt_utf8_nfc(struct xt_ctx *ctx, const char *text, size_t n, struct xt_text *buffer,
                           const char **out, size_t *n_out);

/* ---- pretokenize.c: text to pieces ---------------------------------------------------------- */

#define XT_MAX_SPLITS 8

struct xt_regex;

struct xt_split {
    struct xt_regex *regex[XT_MAX_SPLITS]; /* each cuts the pieces of the one before */
    int n;                                 /* of regex */
    bool nfc;                              /* bring valid UTF-8 to NFC first */
    struct xt_text buffer;                 /* of the normaliser */
};

extern const char xt_gpt2_pattern[]; /* the split of GPT-2 */
extern const char xt_qwen_pattern[]; /* the split of Qwen 2 and 3 */

void xt_split_free(struct xt_split *s);
/* pattern: a regular expression, or plain text when `literal`. */
enum xt_status xt_split_add(struct xt_ctx *ctx, struct xt_split *s, const char *pattern, size_t n,
                            bool literal);
/* The pieces in order; together they are the (normalised) text. Bytes that are no UTF-8 form pieces
   of their own. A status other than XT_OK from fn ends the walk. */
typedef enum xt_status xt_piece_fn(void *user, const char *piece, size_t n);
enum xt_status xt_split_run(struct xt_ctx *ctx, struct xt_split *s, const char *text, size_t n,
                            xt_piece_fn *fn, void *user);

/* ---- bpe.c: a piece to ids ------------------------------------------------------------------ */

struct xt_merge {
    int32_t left, right; /* two ids that stand side by side ... */
    int32_t id;          /* ... become this one */
};

struct xt_pair {
    uint64_t key;  /* left << 32 | right; all ones is empty */
    uint32_t rank; /* position in merges: the lowest goes first */
    int32_t id;    /* of the result */
};

struct xt_word; /* one line of the cache */

struct xt_bpe {
    int32_t byte_id[256];    /* id of each byte; -1: the vocabulary lacks it */
    struct xt_merge *merges; /* by rank */
    size_t n_merges;         /* in use */
    size_t cap_merges;       /* there are */
    struct xt_pair *table;   /* open addressing over the merges */
    size_t table_size;       /* a power of two, or 0 */
    bool whole_first;        /* a piece that is a token is not merged ("ignore_merges") */
    struct xt_word *cache;   /* short pieces met before: made by the first xt_bpe_encode */
    void *scratch;           /* of a long piece being merged */
    size_t cap_scratch;      /* in bytes */
};

void xt_bpe_free(struct xt_bpe *b);
/* Merges come by rising rank. */
enum xt_status xt_bpe_add(struct xt_ctx *ctx, struct xt_bpe *b, int32_t left, int32_t right,
                          int32_t id);
/* Before the first piece, when the vocabulary has its bytes. More merges may be added later. */
enum xt_status xt_bpe_open(struct xt_ctx *ctx, struct xt_bpe *b, const struct xt_vocab *v);
/* Appends the ids of one piece. XT_VALUE when the vocabulary lacks one of its bytes. */
enum xt_status xt_bpe_merge(struct xt_ctx *ctx, struct xt_bpe *b, const struct xt_vocab *v,
                            const char *piece, size_t n, struct xt_ids *out);
/* The same through the cache: no merge may be added after the first call. */
enum xt_status xt_bpe_encode(struct xt_ctx *ctx, struct xt_bpe *b, const struct xt_vocab *v,
                             const char *piece, size_t n, struct xt_ids *out);

/* ---- the tokenizer -------------------------------------------------------------------------- */

struct xt_tokenizer {
    struct xt_vocab vocab; /* ids and their bytes */
    struct xt_bpe bpe;     /* merges */
    struct xt_split split; /* normaliser and patterns */
    int32_t *added;        /* ids of the added tokens, as the file gives them */
    bool *special;         /* for each of added: the file calls it special (kept for saving) */
    size_t n_added;        /* of added */
    size_t cap_added;      /* of added */
    size_t cap_special;    /* of special */
    bool added_first[256]; /* bytes that an added token begins with */
    char *pre_tokenizer;   /* JSON, for saving */
    char *post_processor;  /* JSON, for saving: encode never adds tokens */
    struct xt_ids ids;     /* what xt_tokenizer_encode lends */
    struct xt_text text;   /* what xt_tokenizer_decode lends */
};

/* Empty: for loaders, which fill the parts and then call xt_bpe_open. */
enum xt_status xt_tokenizer_new(struct xt_ctx *ctx, struct xt_tokenizer **out);
enum xt_status xt_tokenizer_add(struct xt_ctx *ctx, struct xt_tokenizer *tok, int64_t id,
                                const char *content, size_t n, bool special);
/* "gpt2" or "qwen": splits and their JSON. XT_ARGUMENT names the known ones. */
enum xt_status xt_tokenizer_pattern(struct xt_ctx *ctx, struct xt_tokenizer *tok,
                                    const char *pattern);
/* tokenizer_json.c: fills tok from the text of a tokenizer.json. */
enum xt_status xt_tokenizer_parse(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *text,
                                  size_t n);
/* Only a vocabulary: {"token": id, ...}; and one merge, "left right". bytes is scratch. */
enum xt_status xt_tokenizer_vocab_json(struct xt_ctx *ctx, struct xt_tokenizer *tok,
                                       const char *text, size_t n);
enum xt_status xt_tokenizer_merge(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *line,
                                  size_t n, struct xt_text *bytes);

#endif
