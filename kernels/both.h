/*
 * both.h: formulas of the CPU and of the GPU, where both must compute the same bits.
 *
 * C for one, CUDA for the other, with only what is correctly rounded on each: sums, products,
 * quotients and roots. Files that promise equal bits are compiled without fused multiply-adds.
 */
#ifndef XT_BOTH_H
#define XT_BOTH_H

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define XT_BOTH static __host__ __device__ inline
#else
#define XT_BOTH static inline
#endif

/* splitmix64 adds this, and an element's number is multiplied by it (design, section 5). */
#define XT_GOLDEN UINT64_C(0x9E3779B97F4A7C15)

/* splitmix64 of seed XOR steps but for its last x ^= x >> 31, which changes nothing from bit 33 up.
   steps is i * XT_GOLDEN: loops add XT_GOLDEN to it, as that is one operation and a product is
   eight. */
XT_BOTH uint64_t xt_draw_high(uint64_t seed, uint64_t steps) {
    uint64_t x = (seed ^ steps) + XT_GOLDEN;
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    return (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
}

XT_BOTH uint64_t xt_draw(uint64_t seed, uint64_t steps) {
    uint64_t x = xt_draw_high(seed, steps);
    return x ^ (x >> 31);
}

union xt_f64_bits {
    double f;   /* the number */
    uint64_t u; /* its bits */
};

XT_BOTH double xt_from_bits_f64(uint64_t bits) {
    union xt_f64_bits v;
    v.u = bits;
    return v.f;
}

XT_BOTH uint64_t xt_bits_f64(double x) {
    union xt_f64_bits v;
    v.f = x;
    return v.u;
}

/* u = 2^e m with sqrt(1/2) <= m < sqrt(2); log m = 2 atanh(s), s = (m - 1) / (m + 1), by its series
   to 1e-14. For 0 < u <= 1. */
XT_BOTH double xt_log_unit(double u) {
    const uint64_t root = UINT64_C(0x3FE6A09E667F3BCD); /* sqrt(1/2) */
    uint64_t moved = xt_bits_f64(u) - root;
    /* e + 1024 as an integer in the low bits of 2^52. */
    double e =
        xt_from_bits_f64(((moved + (UINT64_C(1024) << 52)) >> 52) | UINT64_C(0x4330000000000000));
    double m = xt_from_bits_f64((moved & UINT64_C(0xFFFFFFFFFFFFF)) + root);
    double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 17.0;
    p = p * z + 1.0 / 15.0;
    p = p * z + 1.0 / 13.0;
    p = p * z + 1.0 / 11.0;
    p = p * z + 1.0 / 9.0;
    p = p * z + 1.0 / 7.0;
    p = p * z + 1.0 / 5.0;
    p = p * z + 1.0 / 3.0;
    p = p * z + 1.0;
    return (e - (0x1p52 + 1024.0)) * 0.693147180559945309417 + 2.0 * s * p;
}

/* cos(2 pi turn / 2^31): quarter turns and a rest within an eighth, series to 1e-14. */
XT_BOTH double xt_cos_turn(int32_t turn) {
    uint32_t quarter = ((uint32_t)turn + (1u << 28)) >> 29;
    double r = (double)(int32_t)((uint32_t)turn - (quarter << 29)) * 2.925836158534319358e-9;
    double z = r * r;
    double c = -1.0 / 87178291200.0, s = -1.0 / 1307674368000.0;
    c = c * z + 1.0 / 479001600.0;
    s = s * z + 1.0 / 6227020800.0;
    c = c * z - 1.0 / 3628800.0;
    s = s * z - 1.0 / 39916800.0;
    c = c * z + 1.0 / 40320.0;
    s = s * z + 1.0 / 362880.0;
    c = c * z - 1.0 / 720.0;
    s = s * z - 1.0 / 5040.0;
    c = c * z + 1.0 / 24.0;
    s = s * z + 1.0 / 120.0;
    c = c * z - 0.5;
    s = s * z - 1.0 / 6.0;
    c = c * z + 1.0;
    s = s * z + 1.0;
    s *= r;
    double y = quarter & 1u ? s : c;
    return (quarter + 1) & 2u ? -y : y;
}

/*
 * Sine and cosine of a: k multiples of pi/2 are taken off, pi/2 cut in three so that each k * part
 * is exact while |k| < 2^20, and the rest, at most pi/4, goes through the Taylor series: below
 * 2^-50. Without branches, so that loops over it become vector code.
 */
XT_BOTH void xt_sine_cosine(double a, double *sine, double *cosine) {
    const double shift = 6755399441055744.0;             /* 1.5 * 2^52 */
    double shifted = a * 0.63661977236758134308 + shift; /* k sits in the low bits */
    uint64_t k = xt_bits_f64(shifted);
    double n = shifted - shift;
    double r = a - n * 0x1.921fb544p+0;
    r -= n * 0x1.0b4611a6p-34;
    r -= n * 0x1.3198a2e037073p-69;
    double z = r * r;
    double s = -1.0 / 1307674368000.0;
    s = s * z + 1.0 / 6227020800.0;
    s = s * z - 1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z - 1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z - 1.0 / 6.0;
    s = s * z * r + r;
    double c = 1.0 / 20922789888000.0;
    c = c * z - 1.0 / 87178291200.0;
    c = c * z + 1.0 / 479001600.0;
    c = c * z - 1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z - 1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    c = c * z - 0.5;
    c = c * z + 1.0;
    double p = k & 1 ? c : s, q = k & 1 ? s : c;
    *sine = k & 2 ? -p : p;
    *cosine = (k + 1) & 2 ? -q : q;
}

#endif
