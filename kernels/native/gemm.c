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

/* As wide as registers are, and as many sums as fit into 16 or 32 of them beside weights and an input. */
#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 4
#elif defined(__AVX__)
#define LANES 8
#define VECTORS 2
#elif defined(__aarch64__)
#define LANES 4
#define VECTORS 4
#else
#define LANES 4
#define VECTORS 2
#endif
#define ROWS 6
#define WIDTH (VECTORS * LANES)
#define DEPTH 192    /* in-features whose weights stay in the first cache while all rows of a block pass */
#define BLOCK 128    /* rows whose inputs stay in the second */
#define GROUP 4      /* in-features between two looks ahead */
#define PARTS 64     /* of a product, at most */
#define LINE 64      /* bytes */
#define AHEAD 4096   /* bytes, where each weight is used once */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t size_of(int64_t format) { return format == FLOAT32 ? 4 : 2; }

INLINE vec load(const char *weight, const enum format format) {
    if (format == FLOAT32) return *(const vec *)weight;
    return (vec)(__builtin_convertvector(*(const hvec *)weight, ivec) << 16);
}

/* acc [rows] += x [rows] by its stride, times weight [WIDTH]: one in-feature. */
INLINE void add(
    const int rows, const enum format format, const char *weight, const float *x, int64_t x_stride,
    vec acc[ROWS][VECTORS]) {
    vec b[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) b[v] = load(weight + v * LANES * size_of(format), format);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) acc[r][v] += x[r * x_stride] * b[v];
}

/* sums [rows, WIDTH] += x [rows, depth] by its stride, times weight [depth, WIDTH]. Asks for `step` bytes of `ahead`
 * with each group. */
INLINE void tile(
    const int rows, const enum format format, const char *weight, const float *x, int64_t x_stride, int64_t depth,
    float *sums, const char *ahead, int64_t step) {
    vec acc[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) acc[r][v] = *(const vec *)(sums + r * WIDTH + v * LANES);
    const int64_t size = WIDTH * size_of(format), groups = depth / GROUP;
    for (int64_t g = 0; g < groups; g++, weight += GROUP * size, x += GROUP, ahead += step) {
        __builtin_prefetch(ahead);
        for (int64_t i = LINE; i < step; i += LINE) __builtin_prefetch(ahead + i);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; i++) add(rows, format, weight + i * size, x + i, x_stride, acc);
    }
#pragma GCC unroll 1
    for (int64_t i = 0; i < depth % GROUP; i++) add(rows, format, weight + i * size, x + i, x_stride, acc);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
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
        case 5: TILE(5, format); return;                                                                               \
        default: TILE(6, format); return;                                                                              \
    }
    if (format == FLOAT32) OF_ROWS(FLOAT32)
    OF_ROWS(BFLOAT16)
}

int64_t num_panels(const struct packed *w) { return (w->out_features + WIDTH - 1) / WIDTH; }

/* Bytes of the weight of `w`. */
int64_t packed_size(const struct packed *w) {
    return num_panels(w) * w->in_features * WIDTH * size_of(w->format);
}

/* Writes `w`'s weight into `target`, from one [out_features, in_features] by its strides, of the same format. */
void pack(const struct packed *w, const void *source, int64_t out_stride, int64_t in_stride, void *target) {
    const int64_t panels = num_panels(w), depth = w->in_features;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t i = 0; i < WIDTH; i++) {
                int64_t feature = p * WIDTH + i, from = feature * out_stride + k * in_stride, to = (p * depth + k) * WIDTH + i;
                int is_there = feature < w->out_features;
                if (w->format == FLOAT32) ((float *)target)[to] = is_there ? ((const float *)source)[from] : 0;
                else ((uint16_t *)target)[to] = is_there ? ((const uint16_t *)source)[from] : 0;
            }
}

/* One panel of a block of rows. */
static void panel(
    const struct packed *w, int64_t p, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride) {
    float sums[BLOCK * WIDTH] __attribute__((aligned(64)));
    const int64_t depth = w->in_features, size = WIDTH * size_of(w->format), first = p * WIDTH;
    const int64_t columns = w->out_features - first < WIDTH ? w->out_features - first : WIDTH;
    memset(sums, 0, sizeof(float) * WIDTH * rows);
    if (w->bias)
        for (int64_t r = 0; r < rows; r++) memcpy(sums + r * WIDTH, w->bias + first, sizeof(float) * columns);
    const int64_t tiles = (rows + ROWS - 1) / ROWS, most = tiles == 1 ? depth : DEPTH;
    const int64_t step = GROUP * size / tiles;  /* each tile asks for its share of what comes next */
    for (int64_t k = 0; k < depth; k += most) {
        const int64_t part = depth - k < most ? depth - k : most;
        const char *weight = (const char *)w->weight + (p * depth + k) * size;
        const char *ahead = weight + (tiles == 1 ? AHEAD : part * size);
        for (int64_t t = 0; t < tiles; t++) {
            /* Tiles are equal, or one row apart: 8 rows are 4 and 4. */
            const int64_t r = rows * t / tiles, count = rows * (t + 1) / tiles - r;
            tile_of(count, w->format, weight, x + r * x_stride + k, x_stride, part, sums + r * WIDTH,
                    ahead + t * step * (part / GROUP), step);
        }
    }
    for (int64_t r = 0; r < rows; r++) memcpy(out + r * out_stride + first, sums + r * WIDTH, sizeof(float) * columns);
}

void product_part(
    const struct packed *w, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride,
    int64_t first, int64_t end) {
    for (int64_t r = 0; r < rows; r += BLOCK)
        for (int64_t p = first; p < end; p++)
            panel(w, p, x + r * x_stride, x_stride, rows - r < BLOCK ? rows - r : BLOCK, out + r * out_stride, out_stride);
}

/* All of it, by the threads that there are. Parts are small: a thread that has to wait for a core holds up one of them. */
void multiply(const struct packed *w, const float *x, int64_t x_stride, int64_t rows, float *out, int64_t out_stride) {
    const int64_t panels = num_panels(w), part = (panels + PARTS - 1) / PARTS, parts = (panels + part - 1) / part;
    /* Reading a weight costs what multiplying it by 8 rows does. Less than some 50 us is not worth waking a thread. */
    const int pays = w->out_features * w->in_features * (rows + 8) > 1 << 20;
#pragma omp parallel for schedule(dynamic, 1) if (pays)
    for (int64_t i = 0; i < parts; i++)
        product_part(w, x, x_stride, rows, out, out_stride, i * part, (i + 1) * part < panels ? (i + 1) * part : panels);
}
