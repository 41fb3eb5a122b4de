/* Operations on one row: see rows.c. */
#pragma once
#include <stdint.h>

/* The largest |x|; NaN where something is not finite. */
float magnitude_of(const float *x, int64_t size);

/* y = x / sqrt(mean(x^2) + epsilon) * weight. */
void norm_row(const float *x, const float *weight, float *y, int64_t size, float epsilon);

/* out = silu(gate) * up. */
void silu_row(const float *gate, const float *up, float *out, int64_t size);

/* x as `format` at `to`: numbers of one byte with a scale, NaN where something is not finite. */
void store_row(const float *x, char *to, float *scale, int64_t size, int64_t format);
