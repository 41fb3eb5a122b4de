/* What all kernels are written in: vectors of GCC and Clang, 16 floats with AVX-512, else 8 (one of AVX2, two of NEON).
 * Sums are written out in the order in which they are made, and the compiler may not change it: on one machine the same
 * numbers give the same bits wherever they are computed. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "gemm.h"

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint8_t ubytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define PART(type, x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
typedef int32_t eight_ints __attribute__((vector_size(32)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (eight_ints){__VA_ARGS__})
#define PART(type, x, first, ...) (*(const type *)((const float *)&(x) + (first)))
#endif

INLINE int64_t format_size(enum format format) { return format == FLOAT32 ? 4 : format == BFLOAT16 ? 2 : 1; }

INLINE floats load(const char *base, int64_t i, const enum format format) {
    if (format == FLOAT32) return *(const floats *)(base + 4 * i);
    if (format == BFLOAT16) return (floats)(__builtin_convertvector(*(const shorts *)(base + 2 * i), ints) << 16);
    if (format == INT8) return __builtin_convertvector(*(const bytes *)(base + i), floats);
    /* e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa. Moved to a float's places the exponent is 120 too low. */
    ints bits = __builtin_convertvector(*(const ubytes *)(base + i), ints);
    return (floats)((bits & 0x80) << 24 | (bits & 0x7f) << 20) * 0x1p120f;
}

INLINE float load_one(const char *base, int64_t i, const enum format format) {
    if (format == FLOAT32) return ((const float *)base)[i];
    char copy[LANES * 4] = {};
    memcpy(copy, base + i * format_size(format), format_size(format));
    return load(copy, 0, format)[0];
}

/* (Less zero: plus zero would make 0 of -0.) */
INLINE floats all_of(float x) { return x - (floats){}; }

INLINE floats chosen(ints mask, floats yes, floats no) { return (floats)((mask & (ints)yes) | (~mask & (ints)no)); }

/* The larger of each, `b` where one is not a number. */
INLINE floats larger(floats a, floats b) { return chosen(a > b, a, b); }

/* Lanes i and i + 8 added up. */
INLINE eight halved(floats x) {
#if LANES == 16
    return PART(eight, x, 0, 1, 2, 3, 4, 5, 6, 7) + PART(eight, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    return x;
#endif
}

INLINE float sum_of(floats x) {
    eight half = halved(x);
    four y = {half[0] + half[4], half[1] + half[5], half[2] + half[6], half[3] + half[7]};
    return (y[0] + y[2]) + (y[1] + y[3]);
}

INLINE float largest_of(floats x) {
    float largest = -INFINITY;
    for (int i = 0; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* The sums of four vectors. */
INLINE four sums_of(floats wide_a, floats wide_b, floats wide_c, floats wide_d) {
    eight a = halved(wide_a), b = halved(wide_b), c = halved(wide_c), d = halved(wide_d);
    eight ab = SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    eight cd = SHUFFLE(c, d, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(c, d, 2, 3, 10, 11, 6, 7, 14, 15);
    eight all = SHUFFLE(ab, cd, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(ab, cd, 1, 3, 9, 11, 5, 7, 13, 15);
    return PART(four, all, 0, 1, 2, 3) + PART(four, all, 4, 5, 6, 7);
}

/* exp to 2 units in the last place (Cephes: range reduction by ln 2, a polynomial); 0 below -87, for x up to 88. NaN
 * stays NaN. */
INLINE floats exp_of(floats x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: what is added to it loses its fraction */
    floats n = (x * 1.44269504f + round) - round;
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return chosen(x < -87.0f, (floats){}, p * (floats)power);
}
