/* half.h: the 16-bit floats, converted bit by bit; included by op.h. */
#ifndef XT_HALF_H
#define XT_HALF_H

#include <stdint.h>

static inline float xt_bf16_to_f32(uint16_t h) {
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)h << 16};
    return v.f;
}

/* To nearest, ties to even; NaN stays a (quiet) NaN. */
static inline uint16_t xt_f32_to_bf16(float f) {
    union {
        float f;
        uint32_t u;
    } v = {f};
    uint32_t rounded = (v.u + 0x7FFFu + ((v.u >> 16) & 1u)) >> 16;
    uint32_t quiet = (v.u >> 16) | 0x40u;
    return (uint16_t)((v.u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

static inline float xt_f16_to_f32(uint16_t h) {
    uint32_t sign = ((uint32_t)h & 0x8000u) << 16, exponent = (h >> 10) & 31u, m = h & 1023u;
    union {
        uint32_t u;
        float f;
    } v;
    if (exponent == 31)
        v.u = sign | 0x7F800000u | (m << 13);
    else if (exponent)
        v.u = sign | ((exponent + 112) << 23) | (m << 13);
    else {
        v.f = (float)m * 0x1p-24f; /* subnormal or zero: exact */
        v.u |= sign;
    }
    return v.f;
}

/* To nearest, ties to even; overflow gives infinity, NaN stays NaN. */
static inline uint16_t xt_f32_to_f16(float f) {
    union {
        float f;
        uint32_t u;
    } v = {f}, magic;
    uint32_t sign = (v.u >> 16) & 0x8000u;
    v.u &= 0x7FFFFFFFu;
    if (v.u > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);
    if (v.u >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);
    if (v.u < 0x38800000u) { /* subnormal: let the float adder round at 2^-24 */
        magic.f = 0.5f;
        magic.f += v.f;
        return (uint16_t)(sign | (magic.u - 0x3F000000u));
    }
    return (uint16_t)(sign | ((v.u - 0x38000000u + 0xFFFu + ((v.u >> 13) & 1u)) >> 13));
}

#endif
