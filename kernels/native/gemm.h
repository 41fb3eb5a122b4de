/* Products with weights that were packed once. */
#pragma once
#include <stdint.h>

enum format { FLOAT32, BFLOAT16, INT8, FLOAT8 };

/* A weight in panels, each of some out-features: [panels][in_features][width], the last panel filled up with zeros. */
struct packed {
    const void *weight;
    const float *bias;    /* [out_features], or none */
    const float *scales;  /* [out_features] of INT8, or none */
    int64_t in_features, out_features, format;  /* FLOAT32 or BFLOAT16 */
};

int64_t num_panels(const struct packed *w);

/* The out-features of panels [first, end) of x weight^T + bias: x [rows, in_features] and out [rows, out_features] by
 * their strides, in numbers. For use inside a parallel region, too: panels are independent of each other, and a row's
 * result has the same bits whatever the panels and rows that it is computed with. */
void product_part(
    const struct packed *w, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
    int64_t first, int64_t end);
