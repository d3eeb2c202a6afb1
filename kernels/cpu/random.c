/*
 * random.c: numbers drawn by counting: element i hashes seed XOR i * golden (design, section 5).
 * What a loop hashes at a time goes through a small array, so that the 64-bit hashing and the
 * narrower work on the elements each become vector code.
 */
#include "../both.h"
#include "cpu.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define UNIT 1024 /* elements hashed at a time */

/* bits[j] = the top 24 bits of the hash of element first + j. */
static void draw_bits(uint64_t seed, int64_t first, int64_t n, uint32_t *bits) {
    uint64_t steps = (uint64_t)first * XT_GOLDEN;
    for (int64_t j = 0; j < n; j++, steps += XT_GOLDEN)
        bits[j] = (uint32_t)(xt_draw_high(seed, steps) >> 40);
}

/* u >= p in f32, u = bits / 2^24, is bits >= this: p * 2^24 is exact in f64. */
static uint32_t threshold(double p) {
    return (uint32_t)ceil((double)(float)p * 0x1p24);
}

/* ---- dropout --------------------------------------------------------------------------------- */

/* One dropout: the seed, and p as what the bits are compared with. */
struct drop {
    uint64_t seed;
    uint32_t least; /* bits of kept elements are this or more */
    float scale;    /* of kept elements: 1 / (1 - p) */
};

static struct drop drop_of(uint64_t seed, double p) {
    return (struct drop){seed, threshold(p), (float)(1.0 / (1.0 - p))};
}

/* Elements first .. first + n - 1 of x. */
static void drop_unit(const struct drop *drop, int64_t first, int64_t n, enum xt_dtype dtype,
                      const char *x, char *y) {
    uint32_t bits[UNIT], least = drop->least;
    float wide[UNIT], scale = drop->scale;
    draw_bits(drop->seed, first, n, bits);
    if (dtype == XT_F64) {
        const double *from = (const double *)(const void *)x + first;
        double *to = (double *)(void *)y + first;
        for (int64_t j = 0; j < n; j++) to[j] = bits[j] >= least ? from[j] * (double)scale : 0;
        return;
    }
    if (dtype == XT_F32) {
        const float *from = (const float *)(const void *)x + first;
        float *to = (float *)(void *)y + first;
        for (int64_t j = 0; j < n; j++) {
            float scaled = from[j] * scale;
            to[j] = bits[j] >= least ? scaled : 0.0f;
        }
        return;
    }
    XT_CPU(load_f32)(x + first * 2, dtype, n, wide);
    for (int64_t j = 0; j < n; j++) {
        float scaled = wide[j] * scale;
        wide[j] = bits[j] >= least ? scaled : 0.0f;
    }
    XT_CPU(store_f32)(wide, dtype, n, y + first * 2);
}

static enum xt_status dropout_apply(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    struct drop drop = drop_of(xt_launch_seed(l, 1, 1), l->attrs[0].f);
    int64_t n = xt_numel(x);
    const char *from = xt_data(x);
    char *to = xt_data(l->out[0]);
    if (n <= UNIT) {
        drop_unit(&drop, 0, n, x->dtype, from, to);
        return XT_OK;
    }
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (n > XT_CPU_GRAIN)
    for (int64_t i = 0; i < n; i += UNIT)
        drop_unit(&drop, i, n - i < UNIT ? n - i : UNIT, x->dtype, from, to);
    return XT_OK;
}

static enum xt_status dropout_mask(struct xt_ctx *ctx, const struct xt_launch *l) {
    struct drop drop = drop_of(xt_launch_seed(l, 2, 0), l->attrs[1].f);
    int64_t n = xt_numel(l->out[0]);
    float *y = xt_data(l->out[0]);
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (n > XT_CPU_GRAIN)
    for (int64_t i = 0; i < n; i += UNIT) {
        int64_t m = n - i < UNIT ? n - i : UNIT;
        uint32_t bits[UNIT];
        draw_bits(drop.seed, i, m, bits);
        for (int64_t j = 0; j < m; j++) y[i + j] = bits[j] >= drop.least ? drop.scale : 0.0f;
    }
    return XT_OK;
}

/* ---- rand, randn ----------------------------------------------------------------------------- */

static enum xt_status uniform(struct xt_ctx *ctx, const struct xt_launch *l) {
    uint64_t seed = xt_launch_seed(l, 1, 0);
    int64_t n = xt_numel(l->out[0]);
    float *y = xt_data(l->out[0]);
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (n > XT_CPU_GRAIN)
    for (int64_t i = 0; i < n; i += UNIT) {
        int64_t m = n - i < UNIT ? n - i : UNIT;
        uint32_t bits[UNIT];
        draw_bits(seed, i, m, bits);
        for (int64_t j = 0; j < m; j++) y[i + j] = (float)(int32_t)bits[j] * 0x1p-24f;
    }
    return XT_OK;
}

/* Products and sums are rounded apart, with the same bits on every instruction set and device. */
__attribute__((optimize("fp-contract=off"))) static void normal_unit(uint64_t seed, int64_t first,
                                                                     int64_t n, float *y) {
    int32_t high[UNIT], low[UNIT];
    double radius[UNIT];
    uint64_t steps = (uint64_t)first * XT_GOLDEN;
    for (int64_t j = 0; j < n; j++, steps += XT_GOLDEN) {
        uint64_t h = xt_draw(seed, steps);
        high[j] = (int32_t)(h >> 33);
        low[j] = (int32_t)(h >> 2 & 0x7FFFFFFF);
    }
    for (int64_t j = 0; j < n; j++)
        radius[j] = sqrt(-2.0 * xt_log_unit(((double)high[j] + 1.0) * 0x1p-31));
    for (int64_t j = 0; j < n; j++) y[j] = (float)(radius[j] * xt_cos_turn(low[j]));
}

static enum xt_status normal(struct xt_ctx *ctx, const struct xt_launch *l) {
    uint64_t seed = xt_launch_seed(l, 1, 0);
    int64_t n = xt_numel(l->out[0]);
    float *y = xt_data(l->out[0]);
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (n > XT_CPU_GRAIN)
    for (int64_t i = 0; i < n; i += UNIT) normal_unit(seed, i, n - i < UNIT ? n - i : UNIT, y + i);
    return XT_OK;
}

/* ---- multinomial ----------------------------------------------------------------------------- */

/* The position drawn from one row; -1 when it holds no weights that can be drawn from. */
static int64_t draw_row(const char *row, enum xt_dtype dtype, int64_t n, double u) {
    int64_t bytes = (int64_t)xt_dtype_bytes(dtype), last = -1;
    double sum = 0, target = 0;
    /* Twice: for the row's sum, then to where the running sum, the same bits, passes u times it. */
    for (int pass = 0; pass < 2; pass++) {
        double running = 0;
        bool bad = false;
        for (int64_t i = 0; i < n; i += UNIT) {
            int64_t m = n - i < UNIT ? n - i : UNIT;
            double weight[UNIT];
            float wide[UNIT];
            if (dtype == XT_F64)
                memcpy(weight, row + i * bytes, (size_t)m * sizeof *weight);
            else {
                XT_CPU(load_f32)(row + i * bytes, dtype, m, wide);
                for (int64_t j = 0; j < m; j++) weight[j] = (double)wide[j];
            }
            for (int64_t j = 0; j < m; j++) {
                bad |= !(weight[j] >= 0);
                running += weight[j];
                if (pass == 0 || weight[j] == 0) continue;
                last = i + j;
                if (running > target) return last;
            }
        }
        if (bad || !(running > 0) || isinf(running)) return -1;
        sum = running;
        target = u * sum;
    }
    return last; /* u * sum was rounded up to the sum */
}

static enum xt_status multinomial(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *probs = l->in[0];
    uint64_t seed = xt_launch_seed(l, 0, 1);
    int64_t n = probs->shape[probs->ndim - 1], rows = xt_numel(probs) / n;
    int64_t row_bytes = n * (int64_t)xt_dtype_bytes(probs->dtype);
    const char *from = xt_data(probs);
    int64_t *y = xt_data(l->out[0]);
#pragma omp parallel for num_threads(xt_threads(ctx)) schedule(static) if (rows * n > XT_CPU_GRAIN)
    for (int64_t r = 0; r < rows; r++) {
        double u = (double)(xt_draw(seed, (uint64_t)r * XT_GOLDEN) >> 11) * 0x1p-53;
        y[r] = draw_row(from + r * row_bytes, probs->dtype, n, u);
    }
    for (int64_t r = 0; r < rows; r++)
        if (y[r] < 0)
            return xt_fail(ctx, XT_VALUE,
                           "row %" PRId64 " of probs cannot be drawn from: wanted weights of 0 or "
                           "more with a finite sum above 0",
                           r + 1);
    return XT_OK;
}

static enum xt_status seed_mix(struct xt_ctx *ctx, const struct xt_launch *l) {
    (void)ctx;
    *(uint64_t *)xt_data(l->out[0]) = xt_seed_mix(xt_launch_seed(l, 0, 0), xt_launch_seed(l, 1, 1));
    return XT_OK;
}

const struct xt_kernel XT_CPU(random_kernels)[] = {
    {"dropout_apply", XT_FLOATS, XT_CONTIGUOUS, dropout_apply},
    {"dropout_mask", XT_ANY, XT_CONTIGUOUS, dropout_mask},
    {"rand", XT_ANY, XT_CONTIGUOUS, uniform},
    {"randn", XT_ANY, XT_CONTIGUOUS, normal},
    {"multinomial", XT_FLOATS, XT_CONTIGUOUS, multinomial},
    {"seed_mix", XT_ANY, XT_STRIDED, seed_mix},
    {0},
};
