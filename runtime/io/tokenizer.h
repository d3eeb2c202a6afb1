/*
 * tokenizer.h: byte-level BPE tokenizers: loading, training, text to ids and back, saving.
 *
 * Text is any bytes. Ids count from 0. A tokenizer belongs to whoever made it and, like a context,
 * to one thread at a time; what it lends lives until the next call on it.
 */
#ifndef XT_TOKENIZER_H
#define XT_TOKENIZER_H

#include "../xtrain.h"

struct xt_tokenizer;
/* path: a tokenizer.json, a folder with one or with vocab.bpe and encoder.json (merges.txt and
   vocab.json), or a .tiktoken rank file. pattern: how text is cut where the files do not say it,
   "gpt2" or "qwen"; NULL: "gpt2", and for ranks by their longest number. */
enum xt_status xt_tokenizer_load(struct xt_ctx *ctx, const char *path, const char *pattern,
                                 struct xt_tokenizer **out);
/* 256 ids: the bytes themselves. */
enum xt_status xt_tokenizer_bytes(struct xt_ctx *ctx, struct xt_tokenizer **out);
struct xt_tokenizer_training {
    const char *const *files;   /* paths of the text */
    int n_files;                /* at least 1 */
    int64_t vocab;              /* ids wanted: 256 bytes, merges and special tokens */
    const char *pattern;        /* "gpt2" or "qwen" */
    const char *const *special; /* control tokens: the last ids */
    int n_special;              /* may be 0 */
};
/* Merges the pair seen most often, again and again; of equals the one with the lowest ids. Ends
   early when no pair is seen twice. */
enum xt_status xt_tokenizer_train(struct xt_ctx *ctx, const struct xt_tokenizer_training *how,
                                  struct xt_tokenizer **out);
void xt_tokenizer_free(struct xt_tokenizer *tok);                /* NULL is fine */
int64_t xt_tokenizer_vocab_size(const struct xt_tokenizer *tok); /* the largest id + 1 */
/* special: text that spells an added token becomes its id. *ids is lent. */
enum xt_status xt_tokenizer_encode(struct xt_ctx *ctx, struct xt_tokenizer *tok, const char *text,
                                   size_t bytes, bool special, const int32_t **ids, size_t *n);
/* XT_VALUE names an id that the vocabulary lacks. *text is lent, of any bytes, not terminated. */
enum xt_status xt_tokenizer_decode(struct xt_ctx *ctx, struct xt_tokenizer *tok, const int64_t *ids,
                                   size_t n, const char **text, size_t *bytes);
/* The id of the token that is exactly these bytes, control tokens first; -1: none. */
int64_t xt_tokenizer_find(const struct xt_tokenizer *tok, const char *text, size_t bytes);
/* DIR/tokenizer.json, as the Hugging Face library reads it: the same bytes each time. */
enum xt_status xt_tokenizer_save(struct xt_ctx *ctx, const struct xt_tokenizer *tok,
                                 const char *dir);
/* Bytes of text without an unfinished UTF-8 character at its end. */
size_t xt_utf8_whole(const char *text, size_t bytes);

#endif
