/* What torch has no fast operation for on a CPU: attention of decodes over paged keys and values, and the small
 * operations between matrix products. Compiled when the worker starts (__init__.py), called through ctypes.
 *
 * Vectors are those of GCC and Clang, 16 floats: AVX-512, two of AVX2, four of NEON. Work is cut into tasks by what is
 * computed, never by the number of threads or by what else is in the batch, so a result does not depend on either.
 */
#include "gemm.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define SPLIT 256  /* tokens: a context is cut at multiples of it */
#define HEADS 4    /* query heads that are computed together */
#define MAX_DIM 512

typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t shorts __attribute__((vector_size(32), aligned(2), may_alias));
typedef int8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t ubytes __attribute__((vector_size(16), aligned(1), may_alias));

static inline __attribute__((always_inline)) floats load(const char *base, int64_t i, const enum format format) {
    if (format == FLOAT32) return *(const floats *)(base + 4 * i);
    if (format == BFLOAT16) return (floats)(__builtin_convertvector(*(const shorts *)(base + 2 * i), ints) << 16);
    if (format == INT8) return __builtin_convertvector(*(const bytes *)(base + i), floats);
    /* e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa. Moved to a float's places the exponent is 120 too low. */
    ints bits = __builtin_convertvector(*(const ubytes *)(base + i), ints);
    return (floats)((bits & 0x80) << 24 | (bits & 0x7f) << 20) * 0x1p120f;
}

/* exp to 2 units in the last place (Cephes: range reduction by ln 2, a polynomial). NaN stays NaN. */
static inline __attribute__((always_inline)) float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return p * power.f;
}

/* The decodes of a step under one window; the same for all layers of a shape. */
struct decodes {
    const int32_t *block_tables;  /* [num_seqs, table_width] */
    const int32_t *seqs;          /* [num_decodes]: their rows of the tables */
    const int32_t *context_lens;  /* [num_decodes] */
    const int32_t *tokens;        /* [num_decodes]: their queries in the batch */
    const int32_t *first_tasks;   /* [num_decodes + 1], of one kv head; a task is a split */
    int64_t num_decodes, table_width, block_size, window;  /* window 0: none */
};

struct layer {
    const float *query;           /* [num_tokens, num_kv_heads, group, head_dim] */
    const char *keys, *values;    /* [num_blocks, block_size, num_kv_heads, head_dim] by strides */
    const float *key_scales, *value_scales;  /* [num_blocks, block_size, num_kv_heads] by strides, or none */
    const float *sinks;           /* [num_kv_heads, group], or none */
    float *out;                   /* as query */
    float *partials;              /* [tasks, num_kv_heads, group, head_dim + 2] */
    int64_t block_stride, slot_stride, head_stride;  /* of keys and values, in numbers */
    int64_t scale_block_stride, scale_slot_stride;
    int64_t num_kv_heads, group, head_dim, format;
    float scale, softcap;         /* softcap 0: none */
};

/* Blocks lie far apart, so that the hardware does not see what comes next. */
static inline __attribute__((always_inline)) void prefetch(const char *row, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(row + i);
}

/* Attention of `num_heads` query heads over the positions [begin, end): out [num_heads, dim] not yet divided by its
 * sum of weights; `best` the largest score, `sum` of exp(score - best). */
static inline __attribute__((always_inline)) void attend_split(
    const struct decodes *d, const struct layer *l, const int32_t *table, const float *query, int64_t kv_head,
    int64_t begin, int64_t end, const int num_heads, const int64_t dim, const enum format format, float *out, float *best,
    float *sum) {
    float scores[HEADS][SPLIT];
    const int64_t vectors = dim / LANES, rest = vectors * LANES, size = format == FLOAT32 ? 4 : format == BFLOAT16 ? 2 : 1;
    for (int64_t p = begin; p < end; p++) {
        int64_t block = table[p / d->block_size], slot = p % d->block_size;
        const char *key = l->keys + size * (block * l->block_stride + slot * l->slot_stride + kv_head * l->head_stride);
        if (p + d->block_size < end)
            prefetch(l->keys + size * ((int64_t)table[p / d->block_size + 1] * l->block_stride + slot * l->slot_stride +
                                       kv_head * l->head_stride), size * dim);
        else
            prefetch(l->values + size * ((int64_t)table[begin / d->block_size] * l->block_stride + slot * l->slot_stride +
                                         kv_head * l->head_stride), size * dim);
        floats dots[HEADS] = {};
        for (int64_t v = 0; v < vectors; v++) {
            floats k = load(key, v * LANES, format);
            for (int h = 0; h < num_heads; h++) dots[h] += *(const floats *)(query + h * dim + v * LANES) * k;
        }
        float scale = l->scale;
        if (l->key_scales)
            scale *= l->key_scales[block * l->scale_block_stride + slot * l->scale_slot_stride + kv_head];
        for (int h = 0; h < num_heads; h++) {
            float dot = 0;
            for (int i = 0; i < LANES; i++) dot += dots[h][i];
            if (rest < dim && format == FLOAT32)
                for (int64_t i = rest; i < dim; i++) dot += query[h * dim + i] * ((const float *)key)[i];
            scores[h][p - begin] = dot * scale;
        }
    }
    const int64_t count = end - begin;
    for (int h = 0; h < num_heads; h++) {
        float *s = scores[h], largest = -INFINITY, total = 0;
        if (l->softcap != 0)
            for (int64_t i = 0; i < count; i++) s[i] = l->softcap * tanhf(s[i] / l->softcap);
        for (int64_t i = 0; i < count; i++) largest = s[i] > largest ? s[i] : largest;
        if (largest == -INFINITY) largest = 0;  /* all are -inf or NaN */
        for (int64_t i = 0; i < count; i++) s[i] = fast_exp(s[i] - largest);
        for (int64_t i = 0; i < count; i++) total += s[i];
        best[h] = largest;
        sum[h] = total;
        memset(out + h * dim, 0, dim * sizeof(float));
    }
    for (int64_t p = begin; p < end;) {
        int64_t block = table[p / d->block_size], slot = p % d->block_size, n = d->block_size - slot;
        n = n < end - p ? n : end - p;
        const char *value = l->values + size * (block * l->block_stride + slot * l->slot_stride + kv_head * l->head_stride);
        if (p + n < end)
            for (int64_t i = 0; i < d->block_size; i++)
                prefetch(l->values + size * ((int64_t)table[p / d->block_size + 1] * l->block_stride + i * l->slot_stride +
                                             kv_head * l->head_stride), size * dim);
        if (l->value_scales)
            for (int64_t i = 0; i < n; i++) {
                float scale = l->value_scales[block * l->scale_block_stride + (slot + i) * l->scale_slot_stride + kv_head];
                for (int h = 0; h < num_heads; h++) scores[h][p - begin + i] *= scale;
            }
        for (int64_t v = 0; v < vectors; v++) {
            floats sums[HEADS];
            for (int h = 0; h < num_heads; h++) sums[h] = *(const floats *)(out + h * dim + v * LANES);
            for (int64_t i = 0; i < n; i++) {
                floats x = load(value + size * i * l->slot_stride, v * LANES, format);
                for (int h = 0; h < num_heads; h++) sums[h] += scores[h][p - begin + i] * x;
            }
            for (int h = 0; h < num_heads; h++) *(floats *)(out + h * dim + v * LANES) = sums[h];
        }
        if (rest < dim && format == FLOAT32)
            for (int64_t i = 0; i < n; i++)
                for (int h = 0; h < num_heads; h++)
                    for (int64_t j = rest; j < dim; j++)
                        out[h * dim + j] += scores[h][p - begin + i] * ((const float *)(value + size * i * l->slot_stride))[j];
        p += n;
    }
}

/* The same with what is constant in most models made constant for the compiler. */
static void attend_heads(
    const struct decodes *d, const struct layer *l, const int32_t *table, const float *query, int64_t kv_head,
    int64_t begin, int64_t end, int num_heads, float *out, float *best, float *sum) {
#define WITH(heads, dim, format) attend_split(d, l, table, query, kv_head, begin, end, heads, dim, format, out, best, sum)
#define OF_HEADS(dim, format)                                                                                          \
    switch (num_heads) {                                                                                               \
        case 1: WITH(1, dim, format); return;                                                                          \
        case 2: WITH(2, dim, format); return;                                                                          \
        case 3: WITH(3, dim, format); return;                                                                          \
        default: WITH(4, dim, format); return;                                                                         \
    }
    if (l->format == FLOAT32 && l->head_dim == 64) OF_HEADS(64, FLOAT32)
    if (l->format == FLOAT32 && l->head_dim == 128) OF_HEADS(128, FLOAT32)
    switch (l->format) {
        case FLOAT32: OF_HEADS(l->head_dim, FLOAT32)
        case BFLOAT16: OF_HEADS(l->head_dim, BFLOAT16)
        case INT8: OF_HEADS(l->head_dim, INT8)
        default: OF_HEADS(l->head_dim, FLOAT8)
    }
}

static void run_task(const struct decodes *d, const struct layer *l, int64_t decode, int64_t split, int64_t kv_head) {
    int64_t context = d->context_lens[decode], first = 0;
    if (d->window && context > d->window) first = context - d->window;
    int64_t index = first / SPLIT + split, begin = index * SPLIT, end = begin + SPLIT;
    begin = begin < first ? first : begin;
    end = end > context ? context : end;
    const int32_t *table = d->block_tables + d->seqs[decode] * d->table_width;
    int64_t group = l->group, dim = l->head_dim;
    float *partial = l->partials + ((d->first_tasks[decode] + split) * l->num_kv_heads + kv_head) * group * (dim + 2);
    float *best = partial + group * dim, *sum = best + group;
    for (int64_t h = 0; h < group; h += HEADS) {
        int64_t row = ((int64_t)d->tokens[decode] * l->num_kv_heads + kv_head) * group + h;
        int num_heads = group - h < HEADS ? group - h : HEADS;
        attend_heads(d, l, table, l->query + row * dim, kv_head, begin, end, num_heads, partial + h * dim, best + h, sum + h);
    }
}

/* Puts the splits of a decode together, for one kv head. */
static void merge(const struct decodes *d, const struct layer *l, int64_t decode, int64_t kv_head) {
    int64_t group = l->group, dim = l->head_dim, size = group * (dim + 2), step = l->num_kv_heads * size;
    int64_t num_splits = d->first_tasks[decode + 1] - d->first_tasks[decode];
    const float *partials = l->partials + (d->first_tasks[decode] * l->num_kv_heads + kv_head) * size;
    for (int64_t h = 0; h < group; h++) {
        float *out = l->out + (((int64_t)d->tokens[decode] * l->num_kv_heads + kv_head) * group + h) * dim;
        float largest = l->sinks ? l->sinks[kv_head * group + h] : -INFINITY, total = 0;
        for (int64_t s = 0; s < num_splits; s++) {
            float best = partials[s * step + group * dim + h];
            largest = best > largest ? best : largest;
        }
        if (l->sinks) total = expf(l->sinks[kv_head * group + h] - largest);
        memset(out, 0, dim * sizeof(float));
        for (int64_t s = 0; s < num_splits; s++) {
            const float *part = partials + s * step;
            float weight = expf(part[group * dim + h] - largest);
            total += weight * part[group * dim + group + h];
            for (int64_t i = 0; i < dim; i++) out[i] += weight * part[h * dim + i];
        }
        for (int64_t i = 0; i < dim; i++) out[i] /= total;
    }
}

/* Attention of all decodes in `d` for one layer. */
void attend_decodes(const struct decodes *d, const struct layer *l) {
    int64_t num_tasks = d->first_tasks[d->num_decodes], heads = l->num_kv_heads;
#pragma omp parallel if (num_tasks * heads > 2)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks * heads; i++) {
            /* The decode that the task belongs to: the last that begins at or before it. */
            int64_t task = i / heads, low = 0, high = d->num_decodes - 1;
            while (low < high) {
                int64_t middle = (low + high + 1) / 2;
                if (d->first_tasks[middle] <= task) low = middle;
                else high = middle - 1;
            }
            run_task(d, l, low, task - d->first_tasks[low], i % heads);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < d->num_decodes * heads; i++) merge(d, l, i / heads, i % heads);
    }
}

/* Rows of `size` bytes at source + i * source_stride go to target + ids[i] * block_stride + offsets[i] * slot_stride;
 * all strides in bytes. */
void store_rows(
    const char *source, int64_t source_stride, char *target, int64_t block_stride, int64_t slot_stride, const int64_t *ids,
    const int64_t *offsets, int64_t num_rows, int64_t size) {
    for (int64_t i = 0; i < num_rows; i++)
        memcpy(target + ids[i] * block_stride + offsets[i] * slot_stride, source + i * source_stride, size);
}

/* x [num_rows, size] as bytes around a zero at `largest` + 1, and a scale per row, NaN where a row is not finite. */
void quantise_rows(const float *x, uint8_t *rows, float *scales, int64_t num_rows, int64_t size, int largest) {
#pragma omp parallel for if (num_rows * size > 65536) schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const float *from = x + r * size;
        uint8_t *to = rows + r * size;
        float magnitude = 0, zero = 0;
        for (int64_t i = 0; i < size; i++) {
            float a = fabsf(from[i]);
            magnitude = a > magnitude ? a : magnitude;
            zero += from[i] * 0.0f;  /* NaN for infinities, too */
        }
        float scale = magnitude / largest, inverse = scale > 1e-30f && zero == 0 ? 1 / scale : 0;
        scales[r] = zero == 0 ? scale : NAN;
        for (int64_t i = 0; i < size; i++) {
            float rounded = __builtin_rintf(inverse == 0 ? 0 : from[i] * inverse);
            to[i] = (uint8_t)((int32_t)rounded + largest + 1);
        }
    }
}

/* y = x / sqrt(mean(x^2) + epsilon) * weight, rows of `size`. */
void rms_norm(const float *x, const float *weight, float *y, int64_t num_rows, int64_t size, float epsilon) {
#pragma omp parallel for if (num_rows * size > 65536) schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const float *from = x + r * size;
        float *to = y + r * size;
        float sum = 0;
        for (int64_t i = 0; i < size; i++) sum += from[i] * from[i];
        float factor = 1 / sqrtf(sum / size + epsilon);
        for (int64_t i = 0; i < size; i++) to[i] = from[i] * factor * weight[i];
    }
}

/* out = silu(gate) * up, from rows [gate, up] of 2 * `size`. */
void silu_and_mul(const float *gate_up, float *out, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > 16384) schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const float *gate = gate_up + 2 * r * size, *up = gate + size;
        float *to = out + r * size;
        for (int64_t i = 0; i < size; i++) {
            /* Below -87 silu is 0 to float32's smallest; 1 + exp must stay finite, and NaN stay NaN. */
            float x = -gate[i] > 87.0f ? 87.0f : -gate[i];
            to[i] = gate[i] / (1 + fast_exp(x)) * up[i];
        }
    }
}
