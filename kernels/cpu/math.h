/*
 * math.h: exp, log, tanh and friends, for f32 as straight-line C and for f64 as libm's.
 *
 * The f32 functions have no branch and no call, so a plain loop over them becomes vector code.
 * Their errors, against f64, over all floats: at most 2 ulp (1 for exp and log), except that
 * sigmoid and erf results below the smallest normal number may be flushed to 0, and that sin and
 * cos are for |x| up to 4e8 and only bounded beyond. NaN stays NaN, infinities give the limits.
 * XT_EXP(x) and so on pick by the type of x: an expression in pointwise.def reads the same for f32,
 * f64 and CUDA.
 */
#ifndef XT_CPU_MATH_H
#define XT_CPU_MATH_H

#include <math.h>
#include <stdint.h>

union xt_f32_bits {
    float f;    /* the number */
    uint32_t u; /* its bits */
};

static inline uint32_t xt_bits_f32(float f) {
    return (union xt_f32_bits){.f = f}.u;
}
static inline float xt_from_bits_f32(uint32_t u) {
    return (union xt_f32_bits){.u = u}.f;
}

/* Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. */
#define XT_ROUND_F32 12582912.0f
#define XT_ROUND_F64 6755399441055744.0

/* 2^n for -126 <= n <= 127. */
static inline float xt_pow2_f32(int32_t n) {
    return xt_from_bits_f32((uint32_t)(n + 127) << 23);
}

/* x = n ln 2 + r, |r| <= ln 2 / 2; e^r by a polynomial; 2^n as two factors, for the subnormals. */
static inline float xt_exp_f32(float x) {
    x = x < -105.0f ? -105.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = x * 1.44269504f + XT_ROUND_F32;
    int32_t n = (int32_t)(xt_bits_f32(shifted) - xt_bits_f32(XT_ROUND_F32));
    float whole = shifted - XT_ROUND_F32;
    float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    int32_t half = n >> 1;
    return (p * xt_pow2_f32(half)) * xt_pow2_f32(n - half);
}

/* x = 2^e (1 + f), sqrt(1/2) <= 1 + f < sqrt(2); log(1 + f) by a polynomial. */
static inline float xt_log_f32(float x) {
    float scaled = x < 0x1p-126f ? x * 0x1p24f : x; /* subnormals become normal */
    uint32_t moved = xt_bits_f32(scaled) - 0x3F3504F3u;
    float e = (float)((int32_t)moved >> 23) - (x < 0x1p-126f ? 24.0f : 0.0f);
    float f = xt_from_bits_f32((moved & 0x7FFFFFu) + 0x3F3504F3u) - 1.0f;
    float z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    float y = (p * f) * z - e * 2.12194440e-4f;
    y = y - 0.5f * z;
    y = (f + y) + e * 0.693359375f;
    y = x > 3.40282347e38f ? x : y;
    y = x == 0.0f ? -INFINITY : y;
    return x >= 0.0f ? y : NAN;
}

static inline float xt_sigmoid_f32(float x) {
    return 1.0f / (1.0f + xt_exp_f32(-x));
}

/* Near 0 a polynomial, elsewhere 1 - 2 / (e^2|x| + 1). */
static inline float xt_tanh_f32(float x) {
    float a = fabsf(x), z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    float near = (p * z) * x + x;
    float far = copysignf(1.0f - 2.0f / (xt_exp_f32(2.0f * a) + 1.0f), x);
    return a < 0.625f ? near : far;
}

/* Near 0 a polynomial, elsewhere 1 - e^polynomial (after N. Juffa). */
static inline float xt_erf_f32(float x) {
    float a = fabsf(x), z = x * x;
    float p = -5.96761703e-4f;
    p = p * z + 4.99119423e-3f;
    p = p * z - 2.67681349e-2f;
    p = p * z + 1.12819925e-1f;
    p = p * z - 3.76125336e-1f;
    p = p * z + 1.28379166e-1f;
    float near = p * x + x;
    float t = a > 4.0f ? 4.0f : a; /* erf(4) is 1 to the last bit */
    float q = -1.72853470e-5f * t + 3.83197126e-4f;
    float u = -3.88396438e-3f * t + 2.42546219e-2f;
    q = q * (t * t) + u;
    q = q * t - 1.06777877e-1f;
    q = q * t - 6.34846687e-1f;
    q = q * t - 1.28717512e-1f;
    q = q * t - t;
    float far = copysignf(1.0f - xt_exp_f32(q), x);
    return a > 0.927734375f ? far : near;
}

/* sin(x + quarters pi/2). x = n pi/2 + r in f64, pi/2 in two parts so that n times the first is
 * exact. */
static inline float xt_sin_quarters_f32(float x, uint32_t quarters) {
    double shifted = (double)x * 0.63661977236758134308 + XT_ROUND_F64;
    double n = shifted - XT_ROUND_F64;
    double reduced = ((double)x - n * 1.57079631090164184570) - n * 1.58932547735281966916e-8;
    float r = (float)reduced;
    r = r < -0.8f ? -0.8f : r; /* only when |x| is too large to reduce */
    r = r > 0.8f ? 0.8f : r;
    /* n modulo 4 as a number, for it may not fit in 32 bits: all exact. */
    double fours = (n * 0.25 + XT_ROUND_F64) - XT_ROUND_F64;
    uint32_t k = (uint32_t)(int32_t)(n - fours * 4.0) + quarters;
    float z = r * r;
    float s = -1.9515295891e-4f;
    s = s * z + 8.3321608736e-3f;
    s = s * z - 1.6666654611e-1f;
    s = (s * z) * r + r;
    float c = 2.443315711809948e-5f;
    c = c * z - 1.388731625493765e-3f;
    c = c * z + 4.166664568298827e-2f;
    c = ((c * z) * z - 0.5f * z) + 1.0f;
    float y = (k & 1u) ? c : s;
    return xt_from_bits_f32(xt_bits_f32(y) ^ ((k & 2u) << 30));
}

static inline float xt_sin_f32(float x) {
    return xt_sin_quarters_f32(x, 0);
}
static inline float xt_cos_f32(float x) {
    return xt_sin_quarters_f32(x, 1);
}

/* Squares and their derivatives are common, and exact without a call; the rest is libm's. */
static inline float xt_pow_f32(float x, float p) {
    return p == 2.0f ? x * x : p == 1.0f ? x : powf(x, p);
}
static inline double xt_pow_f64(double x, double p) {
    return p == 2.0 ? x * x : p == 1.0 ? x : pow(x, p);
}
static inline double xt_sigmoid_f64(double x) {
    return 1.0 / (1.0 + exp(-x));
}

#define XT_BY_TYPE(x, f32, f64) _Generic((x), float : f32, double : f64)
#define XT_EXP(x) XT_BY_TYPE(x, xt_exp_f32, exp)(x)
#define XT_LOG(x) XT_BY_TYPE(x, xt_log_f32, log)(x)
#define XT_SQRT(x) XT_BY_TYPE(x, sqrtf, sqrt)(x)
#define XT_ABS(x) XT_BY_TYPE(x, fabsf, fabs)(x)
#define XT_SIN(x) XT_BY_TYPE(x, xt_sin_f32, sin)(x)
#define XT_COS(x) XT_BY_TYPE(x, xt_cos_f32, cos)(x)
#define XT_TANH(x) XT_BY_TYPE(x, xt_tanh_f32, tanh)(x)
#define XT_ERF(x) XT_BY_TYPE(x, xt_erf_f32, erf)(x)
#define XT_SIGMOID(x) XT_BY_TYPE(x, xt_sigmoid_f32, xt_sigmoid_f64)(x)
#define XT_POW(x, p) XT_BY_TYPE(x, xt_pow_f32, xt_pow_f64)(x, p)

#endif
