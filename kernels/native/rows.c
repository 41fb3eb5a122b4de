/* What is done row by row between matrix products. Compiled when the worker starts (__init__.py), called through ctypes. */
#include "rows.h"

#include "vectors.h"

/* Rows of `size` bytes at source + i * source_stride go to target + ids[i] * block_stride + offsets[i] * slot_stride;
 * all strides in bytes. */
void store_rows(
    const char *source, int64_t source_stride, char *target, int64_t block_stride, int64_t slot_stride, const int64_t *ids,
    const int64_t *offsets, int64_t num_rows, int64_t size) {
    for (int64_t i = 0; i < num_rows; i++)
        memcpy(target + ids[i] * block_stride + offsets[i] * slot_stride, source + i * source_stride, size);
}

/* The nearest float8 e4m3, of two the even one; NaN for NaN. For |x| up to 448. */
INLINE uint8_t float8_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7f;
    if (magnitude < 121u << 23) return sign | (uint8_t)__builtin_rintf(fabsf(x) * 512.0f); /* below 2^-6 steps are equal */
    magnitude += 0x7ffff + (magnitude >> 20 & 1);
    return sign | (uint8_t)((magnitude >> 20) - (120 << 3));
}

void store_row(const float *x, char *to, float *scale, int64_t size, int64_t format) {
    if (format == FLOAT32) {
        memcpy(to, x, size * sizeof(float));
        return;
    }
    float magnitude = magnitude_of(x, size) / (format == INT8 ? 127.0f : 448.0f);
    float inverse = magnitude > 1e-30f ? 1.0f / magnitude : 0.0f;
    *scale = magnitude;
    for (int64_t i = 0; i < size; i++) {
        float y = x[i] * inverse;
        if (format == INT8) ((int8_t *)to)[i] = y == y ? (int8_t)floorf(y + 0.5f) : 0;
        else ((uint8_t *)to)[i] = float8_of(y);
    }
}

/* x [num_rows, size] as bytes around a zero at `largest` + 1, and a scale per row, NaN where a row is not finite. */
void quantise_rows(const float *x, uint8_t *rows, float *scales, int64_t num_rows, int64_t size, int largest) {
#pragma omp parallel for if (num_rows * size > 65536) schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const float *from = x + r * size;
        uint8_t *to = rows + r * size;
        float magnitude = magnitude_of(from, size);
        float scale = magnitude / largest, inverse = scale > 1e-30f && scale < INFINITY ? 1 / scale : 0;
        scales[r] = scale < INFINITY ? scale : NAN;
        for (int64_t i = 0; i < size; i++) {
            float rounded = __builtin_rintf(inverse == 0 ? 0 : from[i] * inverse);
            to[i] = (uint8_t)((int32_t)rounded + largest + 1);
        }
    }
}

float magnitude_of(const float *x, int64_t size) {
    floats largest = {}, zeros = {}; /* NaN where something is not finite */
    float rest = 0, rest_zero = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        floats v = *(const floats *)(x + i);
        largest = larger(chosen(v < 0, -v, v), largest);
        zeros += v * 0;
    }
    for (; i < size; i++) {
        float a = fabsf(x[i]);
        rest = a > rest ? a : rest;
        rest_zero += x[i] * 0;
    }
    float all = largest_of(largest), zero = sum_of(zeros) + rest_zero;
    return zero == 0 ? (rest > all ? rest : all) : NAN;
}

void norm_row(const float *x, const float *weight, float *y, int64_t size, float epsilon) {
    floats sums[2] = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES)
        for (int k = 0; k < 2; k++) sums[k] += *(const floats *)(x + i + k * LANES) * *(const floats *)(x + i + k * LANES);
    for (; i < size; i++) rest += x[i] * x[i];
    float factor = 1 / sqrtf((sum_of(sums[0] + sums[1]) + rest) / size + epsilon);
    for (i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
}

/* y = x / sqrt(mean(x^2) + epsilon) * weight, rows of `size`. */
void rms_norm(const float *x, const float *weight, float *y, int64_t num_rows, int64_t size, float epsilon) {
#pragma omp parallel for if (num_rows * size > 65536) schedule(static)
    for (int64_t r = 0; r < num_rows; r++) norm_row(x + r * size, weight, y + r * size, size, epsilon);
}

/* Below -87 silu is 0 to float32's smallest; 1 + exp must stay finite, and NaN stay NaN. */
INLINE floats silu_of(floats x) { return x / (1 + exp_of(chosen(x < -87.0f, all_of(87), -x))); }

void silu_row(const float *gate, const float *up, float *out, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        *(floats *)(out + i) = silu_of(*(const floats *)(gate + i)) * *(const floats *)(up + i);
    for (; i < size; i++) out[i] = silu_of(all_of(gate[i]))[0] * up[i];
}

/* out = silu(gate) * up, from rows [gate, up] of 2 * `size`. */
void silu_and_mul(const float *gate_up, float *out, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > 16384) schedule(static)
    for (int64_t r = 0; r < num_rows; r++)
        silu_row(gate_up + 2 * r * size, gate_up + (2 * r + 1) * size, out + r * size, size);
}
