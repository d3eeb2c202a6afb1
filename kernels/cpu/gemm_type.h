/*
 * gemm_type.h: the arithmetic of gemm.c for one type. gemm.c includes it for f32 and for f64, with
 *   T        the type of the arithmetic
 *   INDEX    an integer of T's size, for shuffles
 *   F(name)  name with the type's suffix
 *
 * Words used here: a panel of b is GEMM_COLS columns, packed so that step p holds its GEMM_COLS
 * elements side by side; a strip of a is up to GEMM_ROWS rows; a tile is strip x panel of c, held
 * in registers while a block of k is summed.
 */

#define LANES ((int)(GEMM_VECTOR / sizeof(T)))
#define COLS (2 * LANES)

typedef T F(vec) __attribute__((vector_size(GEMM_VECTOR), aligned(sizeof(T)), may_alias));
typedef T F(four) __attribute__((vector_size(4 * sizeof(T)), aligned(sizeof(T)), may_alias));
typedef INDEX F(pick) __attribute__((vector_size(4 * sizeof(T))));

/* ---- the tile -------------------------------------------------------------------------------- */

/* c[rows][COLS] = or += sum over p < k of a[i * a_row + p * a_step] * b[p * COLS + j]. */
static inline __attribute__((always_inline)) void F(tile)(const int rows, int64_t k, const T *a,
                                                          int64_t a_row, int64_t a_step, const T *b,
                                                          T *c, int64_t c_row, bool add) {
#define ROW(i) F(vec) l##i = {0}, h##i = {0};
    GEMM_EACH_ROW(ROW)
#undef ROW
    for (int64_t p = 0; p < k; p++) {
        F(vec) b0 = *(const F(vec) *)b, b1 = *(const F(vec) *)(b + LANES);
#define ROW(i)                                                                                     \
    if (rows > i) {                                                                                \
        T x = a[i * a_row];                                                                        \
        l##i += x * b0;                                                                            \
        h##i += x * b1;                                                                            \
    }
        GEMM_EACH_ROW(ROW)
#undef ROW
        a += a_step;
        b += COLS;
    }
#define ROW(i)                                                                                     \
    if (rows > i) {                                                                                \
        F(vec) *to0 = (F(vec) *)(c + i * c_row), *to1 = (F(vec) *)(c + i * c_row + LANES);         \
        if (add) l##i += *to0, h##i += *to1;                                                       \
        *to0 = l##i;                                                                               \
        *to1 = h##i;                                                                               \
    }
    GEMM_EACH_ROW(ROW)
#undef ROW
}

/* A strip of a as a tile reads it: by rows where they lie (step 1), or packed (row 1). */
struct F(strip) {
    const T *data;
    int64_t row; /* 1 when packed: the step is then GEMM_ROWS */
};

static void F(tile_full)(int64_t k, struct F(strip) a, const T *b, T *c, int64_t c_row, bool add) {
    if (a.row == 1)
        F(tile)(GEMM_ROWS, k, a.data, 1, GEMM_ROWS, b, c, c_row, add);
    else
        F(tile)(GEMM_ROWS, k, a.data, a.row, 1, b, c, c_row, add);
}

static void F(tile_rows)(int rows, int64_t k, struct F(strip) a, const T *b, T *c, int64_t c_row,
                         bool add) {
    const int64_t step = a.row == 1 ? GEMM_ROWS : 1;
    switch (rows) {
#define ROW(i)                                                                                     \
    case i + 1: F(tile)(i + 1, k, a.data, a.row, step, b, c, c_row, add); break;
        GEMM_EACH_ROW(ROW)
#undef ROW
    default: break;
    }
}

/* ---- packing --------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) T F(one)(const void *data, bool half, int64_t at) {
    return half ? (T)xt_bf16_to_f32(((const uint16_t *)data)[at]) : ((const T *)data)[at];
}

static inline __attribute__((always_inline)) const void *F(place)(const void *data, bool half,
                                                                  int64_t at) {
    return (const char *)data + at * (half ? 2 : (int64_t)sizeof(T));
}

/* n side by side elements, converted. */
static inline __attribute__((always_inline)) void F(run)(const void *restrict data, bool half,
                                                         int64_t at, int64_t n, T *restrict to) {
    if (half)
        for (int64_t i = 0; i < n; i++) to[i] = F(one)(data, true, at + i);
    else
        memcpy(to, (const T *)data + at, (size_t)n * sizeof(T));
}

/* Through a pointer: vectors wider than the instruction set's have no calling convention. */
static inline __attribute__((always_inline)) void F(load4)(const void *data, bool half, int64_t at,
                                                           F(four) * to) {
    if (half)
        for (int i = 0; i < 4; i++) (*to)[i] = F(one)(data, true, at + i);
    else
        *to = *(const F(four) *)((const T *)data + at);
}

/* Transposes: to[p * to_row + j] = data[at + j * col + p] for j < n, p < k. */
static inline __attribute__((always_inline)) void F(turn)(const void *data, bool half, int64_t at,
                                                          int64_t col, int64_t n, int64_t k, T *to,
                                                          int64_t to_row) {
    int64_t j = 0;
    for (; j + 4 <= n; j += 4, at += 4 * col) {
        int64_t p = 0;
        for (; p + 4 <= k; p += 4) {
            F(four) a, b, c, d;
            F(load4)(data, half, at + p, &a);
            F(load4)(data, half, at + col + p, &b);
            F(load4)(data, half, at + 2 * col + p, &c);
            F(load4)(data, half, at + 3 * col + p, &d);
            F(four) ab0 = __builtin_shuffle(a, b, (F(pick)){0, 4, 1, 5});
            F(four) ab2 = __builtin_shuffle(a, b, (F(pick)){2, 6, 3, 7});
            F(four) cd0 = __builtin_shuffle(c, d, (F(pick)){0, 4, 1, 5});
            F(four) cd2 = __builtin_shuffle(c, d, (F(pick)){2, 6, 3, 7});
            T *t = to + p * to_row + j;
            *(F(four) *)t = __builtin_shuffle(ab0, cd0, (F(pick)){0, 1, 4, 5});
            *(F(four) *)(t + to_row) = __builtin_shuffle(ab0, cd0, (F(pick)){2, 3, 6, 7});
            *(F(four) *)(t + 2 * to_row) = __builtin_shuffle(ab2, cd2, (F(pick)){0, 1, 4, 5});
            *(F(four) *)(t + 3 * to_row) = __builtin_shuffle(ab2, cd2, (F(pick)){2, 3, 6, 7});
        }
        for (; p < k; p++)
            for (int i = 0; i < 4; i++)
                to[p * to_row + j + i] = F(one)(data, half, at + i * col + p);
    }
    for (; j < n; j++, at += col)
        for (int64_t p = 0; p < k; p++) to[p * to_row + j] = F(one)(data, half, at + p);
}

/* Packs one panel: k steps of n <= COLS columns of b from element `at`, the rest zeros. */
static inline __attribute__((always_inline)) void
F(pack_panel)(const struct xt_product_side *b, bool half, int64_t at, int64_t k, int64_t n, T *to) {
    if (n < COLS) memset(to, 0, (size_t)(k * COLS) * sizeof(T));
    if (b->row == 1)
        F(turn)(b->data, half, at, b->col, n, k, to, COLS);
    else if (b->col == 1 && n == COLS)
        for (int64_t p = 0; p < k; p++) {
            __builtin_prefetch(F(place)(b->data, half, at + (p + GEMM_AHEAD) * b->row));
            F(run)(b->data, half, at + p * b->row, COLS, to + p * COLS);
        }
    else
        for (int64_t p = 0; p < k; p++)
            for (int64_t j = 0; j < n; j++)
                to[p * COLS + j] = F(one)(b->data, half, at + p * b->row + j * b->col);
}

/* Packs a strip of rows of a, k steps from element `at`: whole rows GEMM_PITCH apart when a row is
   side by side (a.col 1), else GEMM_ROWS elements for each step. */
static inline __attribute__((always_inline)) void F(pack_strip)(const struct xt_product_side *a,
                                                                bool half, int64_t at, int64_t rows,
                                                                int64_t k, T *to) {
    if (a->col == 1)
        for (int64_t i = 0; i < rows; i++)
            F(run)(a->data, half, at + i * a->row, k, to + i * GEMM_PITCH);
    else if (a->row == 1 && rows == GEMM_ROWS)
        for (int64_t p = 0; p < k; p++) {
            __builtin_prefetch(F(place)(a->data, half, at + (p + GEMM_AHEAD) * a->col));
            F(run)(a->data, half, at + p * a->col, GEMM_ROWS, to + p * GEMM_ROWS);
        }
    else
        for (int64_t p = 0; p < k; p++)
            for (int64_t r = 0; r < rows; r++)
                to[p * GEMM_ROWS + r] = F(one)(a->data, half, at + r * a->row + p * a->col);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Where b is packed: blocks of GEMM_DEPTH steps one after another, in each the panels. */
struct F(packed) {
    T *data;
    int64_t panels; /* of a block */
    bool fresh;     /* not packed yet: a panel is packed where it is first met */
};

/* Packs the panel at column j of the packed ones, block p: columns j0 + j.., steps p0 + p.. */
static T *F(panel)(const struct gemm *g, const struct F(packed) * b, bool pack, int64_t at,
                   int64_t p, int64_t depth, int64_t j, int64_t cols) {
    T *to = b->data + p * b->panels * COLS + j * depth;
    if (pack && g->dtype == XT_BF16)
        F(pack_panel)(&g->b, true, at, depth, cols, to);
    else if (pack)
        F(pack_panel)(&g->b, false, at, depth, cols, to);
    return to;
}

/*
 * Part t of item t->item: c (+)= the rows of a x the panels of b, over the part's steps. a_at and
 * b_at are the elements of a and b at the part's first row or column and first step; `pack` holds
 * the rows of a. n may reach to the end of the last panel when c has room for it.
 */
static void F(block)(const struct gemm *g, const struct gemm_part *t, int64_t a_at, int64_t b_at,
                     const struct F(packed) * b, T *c, int64_t n, int64_t c_row, bool add,
                     T *pack) {
    const bool half = g->dtype == XT_BF16;
    const bool direct = !half && g->a.col == 1 && g->a.row != 1;
    for (int64_t p = 0; p < t->k; p += GEMM_DEPTH, add = true) {
        const int64_t depth = t->k - p < GEMM_DEPTH ? t->k - p : GEMM_DEPTH;
        const int64_t a_block = a_at + p * g->a.col, b_block = b_at + p * g->b.row;
        for (int64_t j = 0; j < n; j += COLS) {
            const int64_t cols = t->n - j < COLS ? t->n - j : COLS;
            const T *panel =
                F(panel)(g, b, b->fresh, b_block + j * g->b.col, p, depth, t->b_j + j, cols);
            for (int64_t i = 0; i < t->m; i += GEMM_ROWS) {
                const int64_t rows = t->m - i < GEMM_ROWS ? t->m - i : GEMM_ROWS;
                const int64_t at = a_block + i * g->a.row;
                T *copy = pack + i * GEMM_PITCH, *to = c + i * c_row + j;
                struct F(strip) strip = {copy, g->a.col == 1 ? GEMM_PITCH : 1};
                if (direct)
                    strip = (struct F(strip)){(const T *)g->a.data + at, g->a.row};
                else if (j == 0 && half)
                    F(pack_strip)(&g->a, true, at, rows, depth, copy);
                else if (j == 0)
                    F(pack_strip)(&g->a, false, at, rows, depth, copy);
                if (n - j >= COLS) {
                    if (rows == GEMM_ROWS)
                        F(tile_full)(depth, strip, panel, to, c_row, add);
                    else
                        F(tile_rows)((int)rows, depth, strip, panel, to, c_row, add);
                    continue;
                }
                T edge[GEMM_ROWS * COLS];
                F(tile_rows)((int)rows, depth, strip, panel, edge, COLS, false);
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t q = 0; q < n - j; q++)
                        to[r * c_row + q] =
                            add ? to[r * c_row + q] + edge[r * COLS + q] : edge[r * COLS + q];
            }
        }
    }
}

/* Ends n elements of c from column j on: bias added, then rounded to `to` for a bf16 c. */
static void F(finish)(const struct gemm *g, T *sums, int64_t j, int64_t n, uint16_t *to) {
    if (g->bias && g->bias_dtype == XT_BF16)
        for (int64_t i = 0; i < n; i++) sums[i] += F(one)(g->bias, true, (j + i) * g->bias_step);
    else if (g->bias)
        for (int64_t i = 0; i < n; i++) sums[i] += F(one)(g->bias, false, (j + i) * g->bias_step);
    if (g->c_dtype == XT_BF16)
        for (int64_t i = 0; i < n; i++) to[i] = xt_f32_to_bf16((float)sums[i]);
}

/* The same into c, whatever its dtype: a part of a bf16 c is summed in `tile`, which must live from
   its first steps to its last. */
static void F(part)(const struct gemm *g, const struct gemm_part *t, const struct F(packed) * b,
                    T *pack, T *tile) {
    const int64_t a_at = gemm_item(g, g->a.batch, t->item) + t->i * g->a.row + t->p * g->a.col;
    const int64_t b_at = gemm_item(g, g->b.batch, t->item) + t->j * g->b.col + t->p * g->b.row;
    const int64_t c_at = (t->item * g->m + t->i) * g->n + t->j;
    const bool apart = g->c_dtype == XT_BF16;
    const int64_t padded = (t->n + COLS - 1) / COLS * COLS, row = apart ? padded : g->n;
    T *sums = apart ? tile : (T *)g->c + c_at;
    F(block)(g, t, a_at, b_at, b, sums, apart ? padded : t->n, row, g->add || t->p > 0, pack);
    if (t->p + t->k < g->k || !(apart || g->bias)) return;
    for (int64_t i = 0; i < t->m; i++)
        F(finish)(g, sums + i * row, t->j, t->n, (uint16_t *)g->c + c_at + i * g->n);
}

/* ---- plans ----------------------------------------------------------------------------------- */

/* Each thread takes columns of an item and packs b by itself: many items, or few rows. */
static void F(run_apart)(const struct gemm *g, const struct gemm_plan *plan, T *scratch) {
    const int64_t blocks = (g->n + plan->n - 1) / plan->n;
    T *pack = scratch, *tile = pack + plan->pack;
#pragma omp for schedule(dynamic) nowait
    for (int64_t unit = 0; unit < plan->items * blocks; unit++) {
        struct gemm_part t = {.item = unit / blocks, .j = unit % blocks * plan->n};
        t.n = g->n - t.j < plan->n ? g->n - t.j : plan->n;
        for (t.p = 0; t.p < g->k; t.p += plan->k) {
            t.k = g->k - t.p < plan->k ? g->k - t.p : plan->k;
            struct F(packed) b = {tile + plan->tile, (t.n + COLS - 1) / COLS, true};
            for (t.i = 0; t.i < g->m; t.i += plan->m, b.fresh = false) {
                t.m = g->m - t.i < plan->m ? g->m - t.i : plan->m;
                F(part)(g, &t, &b, pack, tile);
            }
        }
    }
}

/* Each thread packs all of b by itself, at its first rows, and no thread ever waits for another. */
static void F(run_rows)(const struct gemm *g, const struct gemm_plan *plan, T *scratch) {
    T *pack = scratch, *tile = pack + plan->pack;
    struct F(packed) b = {tile + plan->tile, (g->n + COLS - 1) / COLS, true};
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < g->m; i += plan->m) {
        struct gemm_part t = {.i = i, .k = g->k};
        t.m = g->m - i < plan->m ? g->m - i : plan->m;
        for (; t.j < g->n; t.j = t.b_j = t.j + plan->n) {
            t.n = g->n - t.j < plan->n ? g->n - t.j : plan->n;
            F(part)(g, &t, &b, pack, tile);
        }
        b.fresh = false;
    }
}

/* All threads pack a part of b, then share the rows: one item after another. */
static void F(run_together)(const struct gemm *g, const struct gemm_plan *plan, T *all,
                            T *scratch) {
    const int64_t rows = (g->m + plan->m - 1) / plan->m;
    T *pack = scratch, *tile = pack + plan->pack;
    for (int64_t item = 0; item < plan->items; item++)
        for (int64_t j0 = 0; j0 < g->n; j0 += plan->wide)
            for (int64_t p0 = 0; p0 < g->k; p0 += plan->k) {
                const int64_t wide = g->n - j0 < plan->wide ? g->n - j0 : plan->wide;
                const int64_t parts = (wide + plan->n - 1) / plan->n;
                const int64_t k = g->k - p0 < plan->k ? g->k - p0 : plan->k;
                const struct F(packed) b = {all, (wide + COLS - 1) / COLS, false};
                const int64_t units = b.panels * ((k + GEMM_DEPTH - 1) / GEMM_DEPTH);
                const int64_t b_at = gemm_item(g, g->b.batch, item);
#pragma omp for schedule(static)
                for (int64_t u = 0; u < units; u++) {
                    const int64_t p = u / b.panels * GEMM_DEPTH, j = u % b.panels * COLS;
                    const int64_t depth = k - p < GEMM_DEPTH ? k - p : GEMM_DEPTH;
                    F(panel)
                    (g, &b, true, b_at + (p0 + p) * g->b.row + (j0 + j) * g->b.col, p, depth, j,
                     wide - j < COLS ? wide - j : COLS);
                }
#pragma omp for schedule(dynamic) nowait
                for (int64_t unit = 0; unit < rows * parts; unit++) {
                    struct gemm_part t = {.item = item,
                                          .i = unit / parts * plan->m,
                                          .p = p0,
                                          .k = k,
                                          .b_j = unit % parts * plan->n};
                    t.j = j0 + t.b_j;
                    t.m = g->m - t.i < plan->m ? g->m - t.i : plan->m;
                    t.n = wide - t.b_j < plan->n ? wide - t.b_j : plan->n;
                    F(part)(g, &t, &b, pack, tile);
                }
                if (item + 1 == plan->items && j0 + wide == g->n && p0 + k == g->k) return;
#pragma omp barrier
            }
}

/* c = its first chunk and the others, in order, then bias and rounding: elements from..end, which
   are whole rows. */
static void F(add_chunks)(const struct gemm *g, T *first, const T *sums, int64_t from,
                          int64_t end) {
    const int64_t chunks = (g->k + GEMM_CHUNK - 1) / GEMM_CHUNK, count = g->m * g->n;
    for (int64_t at = from; at < end; at += g->n) {
        T *to = first + at;
        for (int64_t q = 0; q < chunks - 1; q++)
            for (int64_t i = 0; i < g->n; i++) to[i] += sums[q * count + at + i];
        F(finish)(g, to, 0, g->n, (uint16_t *)g->c + at);
    }
}

/*
 * Few elements, long sums: each thread takes GEMM_CHUNK steps and rows, and packs for itself. The
 * first chunk goes to c, the others to `sums`, which are then added in order: by the thread that
 * ends last when they are few, which saves the others a wait. The only plan that the bits know of,
 * so gemm_split looks at the shape alone.
 */
static void F(run_split)(const struct gemm *g, struct gemm_plan *plan, T *sums, T *scratch) {
    const int64_t chunks = (g->k + GEMM_CHUNK - 1) / GEMM_CHUNK, count = g->m * g->n;
    const int64_t parts = (g->m + plan->split - 1) / plan->split, units = chunks * parts;
    const bool few = (chunks - 1) * count <= GEMM_FEW;
    T *pack = scratch, *first = g->c_dtype == XT_BF16 ? sums : g->c;
    if (first == sums) sums += count;
#pragma omp for schedule(dynamic) nowait
    for (int64_t unit = 0; unit < units; unit++) {
        struct gemm_part t = {.p = unit / parts * GEMM_CHUNK, .i = unit % parts * plan->split};
        t.n = g->n;
        t.k = g->k - t.p < GEMM_CHUNK ? g->k - t.p : GEMM_CHUNK;
        T *c = t.p ? sums + (t.p / GEMM_CHUNK - 1) * count : first;
        struct F(packed) b = {pack + plan->pack, (t.n + COLS - 1) / COLS, true};
        const int64_t end = t.i + plan->split < g->m ? t.i + plan->split : g->m;
        for (; t.i < end; t.i += plan->m, b.fresh = false) {
            const int64_t a_at = t.i * g->a.row + t.p * g->a.col, b_at = t.p * g->b.row;
            const bool add = g->add && t.p == 0;
            t.m = end - t.i < plan->m ? end - t.i : plan->m;
            F(block)(g, &t, a_at, b_at, &b, c + t.i * g->n, t.n, g->n, add, pack);
        }
        const bool last = __atomic_add_fetch(&plan->ended, 1, __ATOMIC_ACQ_REL) == units;
        if (last && few) F(add_chunks)(g, first, sums, 0, count);
    }
    if (few) return;
#pragma omp barrier
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < g->m; i++) F(add_chunks)(g, first, sums, i * g->n, (i + 1) * g->n);
}

#undef LANES
#undef COLS
