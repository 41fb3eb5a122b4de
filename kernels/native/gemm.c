/* Products of a few to a few hundred rows with packed weights: one pass over the weights, in the order in which they lie.
 *
 * A tile is ROWS rows by a panel of WIDTH out-features, whose sums are in registers. Each sum is added up over all
 * in-features in their order, in one chain: its bits depend neither on the tile's rows, nor on how depth is cut, nor on
 * the thread. This file is compiled without -fassociative-math for that reason.
 *
 * The weights of the next tiles are asked for while a tile is computed, so that memory is never idle.
 */
#include "gemm.h"

#include <string.h>

/* As wide as registers are, and as many sums as fit into 16 or 32 of them. */
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8
#elif defined(__AVX__)
#define LANES 8
#define ROWS 4
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 8
#else
#define LANES 4
#define ROWS 4
#endif
#define VECTORS 3
#define WIDTH (VECTORS * LANES)
#define DEPTH 256  /* in-features whose weights stay in the first cache while all rows of a block pass */
#define BLOCK 128  /* rows whose inputs stay in the second */
#define LINE 64    /* bytes */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline __attribute__((always_inline)) vec load(const char *weight, int64_t i, const enum format format) {
    if (format == FLOAT32) return *(const vec *)(weight + 4 * i);
    return (vec)(__builtin_convertvector(*(const hvec *)(weight + 2 * i), ivec) << 16);
}

/* sums [rows, WIDTH] += x [rows, depth] by its stride, times weight [depth, WIDTH]. Asks for `step`
 * bytes of `ahead` with each in-feature. */
static inline __attribute__((always_inline)) void tile(
    const int rows, const enum format format, const char *weight, const float *x, int64_t x_stride, int64_t depth,
    float *sums, const char *ahead, int64_t step) {
    vec acc[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) acc[r][v] = *(const vec *)(sums + r * WIDTH + v * LANES);
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; k++) {
        vec b[VECTORS];
        __builtin_prefetch(ahead);
        if (step > LINE) __builtin_prefetch(ahead + LINE);
        ahead += step;
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) b[v] = load(weight, k * WIDTH + v * LANES, format);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float a = x[r * x_stride + k];
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) acc[r][v] += a * b[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) *(vec *)(sums + r * WIDTH + v * LANES) = acc[r][v];
}

/* The same with the number of rows, at most ROWS, made constant for the compiler. */
static void tile_of(
    int64_t rows, int64_t format, const char *weight, const float *x, int64_t x_stride, int64_t depth, float *sums,
    const char *ahead, int64_t step) {
#define TILE(rows, format) tile(rows, format, weight, x, x_stride, depth, sums, ahead, step)
#define OF_ROWS(format)                                                                                                \
    switch (rows) {                                                                                                    \
        case 1: TILE(1, format); return;                                                                               \
        case 2: TILE(2, format); return;                                                                               \
        case 3: TILE(3, format); return;                                                                               \
        case 4: TILE(4, format); return;                                                                               \
        case 5: TILE(5 < ROWS ? 5 : ROWS, format); return;                                                             \
        case 6: TILE(6 < ROWS ? 6 : ROWS, format); return;                                                             \
        case 7: TILE(7 < ROWS ? 7 : ROWS, format); return;                                                             \
        default: TILE(ROWS, format); return;                                                                           \
    }
    if (format == FLOAT32) OF_ROWS(FLOAT32)
    OF_ROWS(BFLOAT16)
}

int64_t num_panels(const struct packed *w) { return (w->out_features + WIDTH - 1) / WIDTH; }

/* Bytes of the weight of `w`. */
int64_t packed_size(const struct packed *w) {
    return num_panels(w) * w->in_features * WIDTH * (w->format == FLOAT32 ? 4 : 2);
}

/* Columns [first, end) of a weight [out_features, in_features] by its strides, of the numbers of `w`, to where they
 * belong in `target`. */
void pack(const struct packed *w, const void *source, int64_t out_stride, int64_t in_stride, void *target) {
    const int64_t panels = num_panels(w), depth = w->in_features;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t i = 0; i < WIDTH; i++) {
                int64_t feature = p * WIDTH + i, to = (p * depth + k) * WIDTH + i, from = feature * out_stride + k * in_stride;
                int is_there = feature < w->out_features;
                if (w->format == FLOAT32) ((float *)target)[to] = is_there ? ((const float *)source)[from] : 0;
                else ((uint16_t *)target)[to] = is_there ? ((const uint16_t *)source)[from] : 0;
            }
}

void product_part(
    const struct packed *w, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
    int64_t first, int64_t end) {
    const int64_t size = w->format == FLOAT32 ? 4 : 2, depth = w->in_features;
    float sums[BLOCK * WIDTH] __attribute__((aligned(64)));
    for (int64_t begin = 0; begin < rows; begin += BLOCK) {
        const int64_t block = rows - begin < BLOCK ? rows - begin : BLOCK, tiles = (block + ROWS - 1) / ROWS;
        for (int64_t p = first; p < end; p++) {
            const int64_t column = p * WIDTH, columns = w->out_features - column < WIDTH ? w->out_features - column : WIDTH;
            memset(sums, 0, sizeof(float) * WIDTH * block);
            if (w->bias)
                for (int64_t r = 0; r < block; r++) memcpy(sums + r * WIDTH, w->bias + column, sizeof(float) * columns);
            /* One tile of rows: all of the depth at once. */
            const int64_t most = tiles == 1 ? depth : DEPTH;
            for (int64_t k = 0; k < depth; k += most) {
                const int64_t part = depth - k < most ? depth - k : most, bytes = part * WIDTH * size;
                const char *weight = (const char *)w->weight + (p * depth + k) * WIDTH * size;
                const char *ahead = tiles == 1 ? weight + 4096 : weight + bytes;
                /* Each tile asks for a share of what comes next. */
                const int64_t step = (WIDTH * size + tiles - 1) / tiles;
                for (int64_t t = 0; t < tiles; t++) {
                    const int64_t r = t * ROWS, count = block - r < ROWS ? block - r : ROWS;
                    tile_of(count, w->format, weight, x + (begin + r) * x_stride + k, x_stride, part, sums + r * WIDTH,
                            ahead + t * step * part, step);
                }
            }
            for (int64_t r = 0; r < block; r++)
                memcpy(out + (begin + r) * out_stride + column, sums + r * WIDTH, sizeof(float) * columns);
        }
    }
}

/* All of it, by the threads that there are. */
void multiply(const struct packed *w, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride) {
    const int64_t panels = num_panels(w);
    const int64_t chunk = 1;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t p = 0; p < panels; p += chunk)
        product_part(w, x, x_stride, rows, out, out_stride, p, p + chunk < panels ? p + chunk : panels);
}
