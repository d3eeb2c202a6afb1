/*
 * bpe.c: the merging of one piece. The lowest rank goes first, of equals the leftmost.
 *
 * Three ways, same ids: a cache for the short pieces that text repeats, repeated scans for pieces
 * of ordinary length, a heap for long ones (so that a megabyte without a space takes n log n).
 */
#include <stdlib.h>
#include <string.h>

#include "tokenizer_parts.h"

#define CACHE_LINES (1u << 15) /* 2 MiB: about what stays in a core's own cache */
#define LONG_PIECE 64          /* bytes from which on the heap is faster */

/* One cache line of the processor. bytes 0: empty. */
struct xt_word {
    uint8_t bytes;  /* of piece */
    uint8_t n;      /* of ids */
    char piece[30]; /* the key */
    int32_t ids[8]; /* the answer */
};

void xt_bpe_free(struct xt_bpe *b) {
    free(b->merges);
    free(b->table);
    free(b->cache);
    free(b->scratch);
    *b = (struct xt_bpe){0};
}

/* ---- the table of merges -------------------------------------------------------------------- */

static uint64_t pair_key(int32_t left, int32_t right) {
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static struct xt_pair *pair_place(const struct xt_bpe *b, uint64_t key) {
    size_t mask = b->table_size - 1;
    uint64_t h = key * UINT64_C(0x9e3779b97f4a7c15);
    size_t i = (size_t)(h ^ h >> 32) & mask;
    while (b->table[i].key != key && b->table[i].key != UINT64_MAX) i = (i + 1) & mask;
    return &b->table[i];
}

/* The merge of two neighbours; rank UINT32_MAX: none. */
static struct xt_pair merge_of(const struct xt_bpe *b, int32_t left, int32_t right) {
    const struct xt_pair *p = pair_place(b, pair_key(left, right));
    return p->key == UINT64_MAX ? (struct xt_pair){.rank = UINT32_MAX} : *p;
}

static void insert(struct xt_bpe *b, size_t rank) {
    const struct xt_merge *m = &b->merges[rank];
    uint64_t key = pair_key(m->left, m->right);
    /* A pair given twice goes by its last rank, as in the Hugging Face library. */
    *pair_place(b, key) = (struct xt_pair){.key = key, .rank = (uint32_t)rank, .id = m->id};
}

static enum xt_status grow_table(struct xt_ctx *ctx, struct xt_bpe *b) {
    if (b->table && b->n_merges < b->table_size / 2) return XT_OK;
    size_t size = b->table_size ? 2 * b->table_size : 64;
    struct xt_pair *table = malloc(size * sizeof *table);
    if (!table) return xt_fail(ctx, XT_MEMORY, "tokenizer: no memory for the merges");
    for (size_t i = 0; i < size; i++) table[i] = (struct xt_pair){.key = UINT64_MAX};
    free(b->table);
    b->table = table;
    b->table_size = size;
    for (size_t i = 0; i < b->n_merges; i++) insert(b, i);
    return XT_OK;
}

enum xt_status xt_bpe_add(struct xt_ctx *ctx, struct xt_bpe *b, int32_t left, int32_t right,
                          int32_t id) {
    XT_TRY(xt_grow(ctx, &b->merges, &b->cap_merges, b->n_merges + 1, sizeof *b->merges));
    XT_TRY(grow_table(ctx, b));
    b->merges[b->n_merges] = (struct xt_merge){.left = left, .right = right, .id = id};
    insert(b, b->n_merges++);
    return XT_OK;
}

enum xt_status xt_bpe_open(struct xt_ctx *ctx, struct xt_bpe *b, const struct xt_vocab *v) {
    for (unsigned byte = 0; byte < 256; byte++) {
        char c = (char)byte;
        b->byte_id[byte] = xt_vocab_find(v, &c, 1);
    }
    return grow_table(ctx, b);
}

/* ---- ordinary pieces: scan for the lowest rank ---------------------------------------------- */

/* Merges n ids in place and returns how many are left. 2 <= n < LONG_PIECE. */
static size_t merge_short(const struct xt_bpe *b, int32_t *ids, size_t n) {
    uint32_t rank[LONG_PIECE]; /* of ids i and i + 1 */
    int32_t made[LONG_PIECE];  /* what they become */
    for (size_t i = 0; i + 1 < n; i++) {
        struct xt_pair p = merge_of(b, ids[i], ids[i + 1]);
        rank[i] = p.rank;
        made[i] = p.id;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == UINT32_MAX) break;
        ids[best] = made[best];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            ids[i] = ids[i + 1];
            rank[i - 1] = rank[i];
            made[i - 1] = made[i];
        }
        /* The two pairs that the new id is part of. */
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            struct xt_pair p = merge_of(b, ids[i], ids[i + 1]);
            rank[i] = p.rank;
            made[i] = p.id;
        }
    }
    return n;
}

/* ---- long pieces: a heap of pairs over a linked list ---------------------------------------- */

struct node {
    int32_t id;    /* -1: merged into its left neighbour */
    uint32_t prev; /* UINT32_MAX: none */
    uint32_t next; /* UINT32_MAX: none */
};

struct entry {
    uint32_t rank;    /* the lowest is at the top, then the lowest left */
    uint32_t left;    /* the node on the left of the pair */
    int32_t left_id;  /* what stood there when the pair was found: else the entry is stale */
    int32_t right_id; /* the same for its right neighbour */
    int32_t id;       /* what they become */
};

struct heap {
    struct entry *entries; /* a binary heap */
    size_t n;              /* in use */
};

static bool before(const struct entry *a, const struct entry *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->left < b->left;
}

static void heap_push(struct heap *h, struct entry e) {
    size_t i = h->n++;
    for (; i > 0 && before(&e, &h->entries[(i - 1) / 2]); i = (i - 1) / 2)
        h->entries[i] = h->entries[(i - 1) / 2];
    h->entries[i] = e;
}

static struct entry heap_pop(struct heap *h) {
    struct entry top = h->entries[0], last = h->entries[--h->n];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= h->n) break;
        if (child + 1 < h->n && before(&h->entries[child + 1], &h->entries[child])) child++;
        if (!before(&h->entries[child], &last)) break;
        h->entries[i] = h->entries[child];
        i = child;
    }
    if (h->n) h->entries[i] = last;
    return top;
}

static void push_pair(const struct xt_bpe *b, struct heap *h, const struct node *nodes,
                      uint32_t left) {
    if (left == UINT32_MAX || nodes[left].next == UINT32_MAX) return;
    int32_t left_id = nodes[left].id, right_id = nodes[nodes[left].next].id;
    struct xt_pair p = merge_of(b, left_id, right_id);
    if (p.rank == UINT32_MAX) return;
    heap_push(
        h, (struct entry){
               .rank = p.rank, .left = left, .left_id = left_id, .right_id = right_id, .id = p.id});
}

/* The same for many ids. Every merge pushes at most two pairs: 3 n entries are enough. */
static enum xt_status merge_long(struct xt_ctx *ctx, struct xt_bpe *b, int32_t *ids, size_t *n) {
    size_t count = *n;
    if (count >= UINT32_MAX / 4)
        return xt_fail(ctx, XT_UNSUPPORTED, "a piece of %zu bytes without a place to cut it",
                       count);
    size_t node_bytes = count * sizeof(struct node);
    XT_TRY(xt_grow(ctx, &b->scratch, &b->cap_scratch, node_bytes + 3 * count * sizeof(struct entry),
                   1));
    struct node *nodes = b->scratch;
    struct heap heap = {.entries = (struct entry *)(void *)(nodes + count)};
    for (size_t i = 0; i < count; i++)
        nodes[i] = (struct node){.id = ids[i],
                                 .prev = i ? (uint32_t)i - 1 : UINT32_MAX,
                                 .next = i + 1 < count ? (uint32_t)i + 1 : UINT32_MAX};
    for (size_t i = 0; i + 1 < count; i++) push_pair(b, &heap, nodes, (uint32_t)i);
    while (heap.n) {
        struct entry e = heap_pop(&heap);
        struct node *left = &nodes[e.left];
        if (left->id != e.left_id || left->next == UINT32_MAX) continue;
        struct node *right = &nodes[left->next];
        if (right->id != e.right_id) continue;
        left->id = e.id;
        left->next = right->next;
        right->id = -1;
        if (left->next != UINT32_MAX) nodes[left->next].prev = e.left;
        push_pair(b, &heap, nodes, left->prev);
        push_pair(b, &heap, nodes, e.left);
    }
    size_t left = 0;
    for (uint32_t i = 0; i != UINT32_MAX; i = nodes[i].next) ids[left++] = nodes[i].id;
    *n = left;
    return XT_OK;
}

/* ---- a piece -------------------------------------------------------------------------------- */

enum xt_status xt_bpe_merge(struct xt_ctx *ctx, struct xt_bpe *b, const struct xt_vocab *v,
                            const char *piece, size_t n, struct xt_ids *out) {
    XT_TRY(xt_grow(ctx, &out->data, &out->capacity, out->n + n, sizeof *out->data));
    int32_t *ids = out->data + out->n;
    if (b->whole_first) {
        int32_t id = xt_vocab_find(v, piece, n);
        if (id >= 0) {
            out->data[out->n++] = id;
            return XT_OK;
        }
    }
    for (size_t i = 0; i < n; i++) {
        ids[i] = b->byte_id[(unsigned char)piece[i]];
        if (ids[i] < 0)
            return xt_fail(ctx, XT_VALUE, "the vocabulary has no token for byte 0x%02x",
                           (unsigned char)piece[i]);
    }
    if (n >= LONG_PIECE)
        XT_TRY(merge_long(ctx, b, ids, &n));
    else if (n > 1)
        n = merge_short(b, ids, n);
    out->n += n;
    return XT_OK;
}

enum xt_status xt_bpe_encode(struct xt_ctx *ctx, struct xt_bpe *b, const struct xt_vocab *v,
                             const char *piece, size_t n, struct xt_ids *out) {
    if (n == 0) return XT_OK;
    if (n > sizeof((struct xt_word *)0)->piece) return xt_bpe_merge(ctx, b, v, piece, n, out);
    if (!b->cache) {
        b->cache = calloc(CACHE_LINES, sizeof *b->cache);
        if (!b->cache) return xt_fail(ctx, XT_MEMORY, "tokenizer: no memory for the cache");
    }
    struct xt_word *w = &b->cache[xt_hash(piece, n) & (CACHE_LINES - 1)];
    if (w->bytes != n || memcmp(w->piece, piece, n) != 0) {
        size_t first = out->n;
        XT_TRY(xt_bpe_merge(ctx, b, v, piece, n, out));
        size_t made = out->n - first;
        if (made <= sizeof w->ids / sizeof *w->ids) {
            w->bytes = (uint8_t)n;
            w->n = (uint8_t)made;
            memcpy(w->piece, piece, n);
            memcpy(w->ids, out->data + first, made * sizeof *w->ids);
        }
        return XT_OK;
    }
    XT_TRY(xt_grow(ctx, &out->data, &out->capacity, out->n + w->n, sizeof *out->data));
    for (size_t i = 0; i < w->n; i++) out->data[out->n + i] = w->ids[i];
    out->n += w->n;
    return XT_OK;
}
