/*
 * convert.c: runs of elements from one dtype to another, each rounded once.
 *
 * Floats to integers truncate and saturate, NaN gives 0; integers to smaller integers wrap.
 */
#include "cpu.h"

#include <assert.h>
#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

/* f64 to f32 with the last bit sticky, so that rounding once more, to 16 bits, is as if done
   once. */
static inline float narrow_f64(double d) {
    union {
        float f;
        uint32_t u;
    } v = {(float)d};
    double error = (double)v.f - d;
    if (error != 0 && d == d) {
        v.u -= (error > 0) == (d > 0); /* towards zero */
        v.u |= 1u;
    }
    return v.f;
}
static inline float narrow_f32(float f) {
    return f;
}
static inline float narrow_i64(int64_t i) {
    return narrow_f64((double)i); /* beyond 2^53 rounded twice */
}

static inline int64_t truncate_f64(double d, int64_t low, int64_t high) {
    if (d != d) return 0;
    if (d <= (double)low) return low;
    if (d >= (double)high) return high;
    return (int64_t)d;
}
static inline int64_t truncate_f32(float f, int64_t low, int64_t high) {
    return truncate_f64((double)f, low, high);
}
static inline int64_t wrap_i64(int64_t i, int64_t low, int64_t high) {
    (void)low;
    (void)high;
    return i;
}

/* A stored element as the number it stands for: float, double or int64_t. */
#define LOAD_F32(e) (e)
#define LOAD_BF16(e) xt_bf16_to_f32(e)
#define LOAD_F16(e) xt_f16_to_f32(e)
#define LOAD_F64(e) (e)
#define LOAD_I32(e) ((int64_t)(e))
#define LOAD_I64(e) ((int64_t)(e))
#define LOAD_U8(e) ((int64_t)(e))

/* Such a number as a stored element. */
#define NARROW(v) _Generic((v), float : narrow_f32, double : narrow_f64, int64_t : narrow_i64)(v)
#define TRUNCATE(v, low, high)                                                                     \
    _Generic((v), float : truncate_f32, double : truncate_f64, int64_t : wrap_i64)(v, low, high)
#define STORE_F32(v) ((float)(v))
#define STORE_BF16(v) xt_f32_to_bf16(NARROW(v))
#define STORE_F16(v) xt_f32_to_f16(NARROW(v))
#define STORE_F64(v) ((double)(v))
#define STORE_I32(v) ((int32_t)TRUNCATE(v, INT32_MIN, INT32_MAX))
#define STORE_I64(v) TRUNCATE(v, INT64_MIN, INT64_MAX)
#define STORE_U8(v) ((uint8_t)TRUNCATE(v, 0, UINT8_MAX))

#define TYPE_F32 float
#define TYPE_BF16 uint16_t
#define TYPE_F16 uint16_t
#define TYPE_F64 double
#define TYPE_I32 int32_t
#define TYPE_I64 int64_t
#define TYPE_U8 uint8_t

#define PAIR(FROM, TO)                                                                             \
    static void FROM##_to_##TO(int64_t n, const void *from, void *to) {                            \
        const TYPE_##FROM *restrict f = from;                                                      \
        TYPE_##TO *restrict t = to;                                                                \
        for (int64_t i = 0; i < n; i++) t[i] = STORE_##TO(LOAD_##FROM(f[i]));                      \
    }
#define PAIRS(FROM)                                                                                \
    PAIR(FROM, F32)                                                                                \
    PAIR(FROM, BF16) PAIR(FROM, F16) PAIR(FROM, F64) PAIR(FROM, I32) PAIR(FROM, I64) PAIR(FROM, U8)
PAIRS(F32)
PAIRS(BF16)
PAIRS(F16)
PAIRS(F64)
PAIRS(I32)
PAIRS(I64)
PAIRS(U8)

#ifdef __F16C__
/* The tail goes through the same instruction: NaNs keep the same bits wherever they stand. */
static void wide_f16_to_f32(int64_t n, const void *from, void *to) {
    const uint16_t *f = from;
    float *t = to;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(t + i,
                         _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(f + i))));
    if (i == n) return;
    uint16_t tail[8] = {0};
    float out[8];
    memcpy(tail, f + i, (size_t)(n - i) * sizeof *f);
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)tail)));
    memcpy(t + i, out, (size_t)(n - i) * sizeof *t);
}

static void wide_f32_to_f16(int64_t n, const void *from, void *to) {
    const float *f = from;
    uint16_t *t = to;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(t + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(f + i), _MM_FROUND_TO_NEAREST_INT));
    if (i == n) return;
    float tail[8] = {0};
    uint16_t out[8];
    memcpy(tail, f + i, (size_t)(n - i) * sizeof *f);
    _mm_storeu_si128((__m128i *)(void *)out,
                     _mm256_cvtps_ph(_mm256_loadu_ps(tail), _MM_FROUND_TO_NEAREST_INT));
    memcpy(t + i, out, (size_t)(n - i) * sizeof *t);
}
#else
#define wide_f16_to_f32 F16_to_F32
#define wide_f32_to_f16 F32_to_F16
#endif

typedef void convert_fn(int64_t n, const void *from, void *to);

#define ROW(FROM)                                                                                  \
    [XT_##FROM] = {[XT_F32] = FROM##_to_F32, [XT_BF16] = FROM##_to_BF16, [XT_F16] = FROM##_to_F16, \
                   [XT_F64] = FROM##_to_F64, [XT_I32] = FROM##_to_I32,   [XT_I64] = FROM##_to_I64, \
                   [XT_U8] = FROM##_to_U8}
static convert_fn *const converters[XT_DTYPE_COUNT][XT_DTYPE_COUNT] = {
    ROW(F32), ROW(BF16), ROW(F16), ROW(F64), ROW(I32), ROW(I64), ROW(U8),
};

void XT_CPU(convert)(const void *from, enum xt_dtype from_dtype, int64_t n, void *to,
                     enum xt_dtype to_dtype) {
    if (n == 0) return; /* and the pointers may be NULL */
    if (from_dtype == to_dtype)
        memcpy(to, from, (size_t)n * xt_dtype_bytes(to_dtype));
    else if (from_dtype == XT_F16 && to_dtype == XT_F32)
        wide_f16_to_f32(n, from, to);
    else if (from_dtype == XT_F32 && to_dtype == XT_F16)
        wide_f32_to_f16(n, from, to);
    else
        converters[from_dtype][to_dtype](n, from, to);
}

void XT_CPU(load_f32)(const void *from, enum xt_dtype dtype, int64_t n, float *to) {
    XT_CPU(convert)(from, dtype, n, to, XT_F32);
}

void XT_CPU(store_f32)(const float *from, enum xt_dtype dtype, int64_t n, void *to) {
    XT_CPU(convert)(from, XT_F32, n, to, dtype);
}
