/* Causal attention over paged keys and values, read where they lie.
 *
 * A context is cut at multiples of SPLIT positions. Within a split a query's scores, their largest, the sum of weights
 * and the weighted values are made in one order, whatever queries are computed beside it, and splits are put together
 * from the first to the last: a query's result does not depend on the batch, on how its prompt was cut into chunks, or
 * on the number of threads. Positions that a query does not see have the weight 0, which changes no sum.
 */
#include "attention.h"

#include "vectors.h"

#define SPLIT 256     /* positions */
#define WIDTH (SPLIT + COLUMNS) /* of a row of scores: a tile may reach over the end */
#define AHEAD 16      /* positions that are fetched before they are used */
#define TILE 64       /* positions whose keys or values are at hand together */
#define MAX_ROWS 48   /* query heads that are computed together */
#define MAX_DIM 512
#if defined(__AVX512F__)
#define ROWS 6        /* of a register tile: 24 of 32 registers hold sums, of AVX2's 16 registers 12 */
#else
#define ROWS 3
#endif
#define COLUMNS 4

/* Query heads of one kv head, and what they have come to. A row is a head of a query. */
struct rows {
    int64_t num, dim;           /* dim: whole vectors, zeros after head_dim */
    int64_t first[MAX_ROWS], end[MAX_ROWS]; /* positions that a row sees */
    float query[MAX_ROWS * MAX_DIM];  /* [num, dim], scaled */
    float scores[MAX_ROWS][WIDTH];
    float part[MAX_ROWS * MAX_DIM];   /* of the present split */
    float part_best[MAX_ROWS], part_sum[MAX_ROWS];
    float out[MAX_ROWS * MAX_DIM];    /* of all splits so far, not yet divided by the sum of weights */
    float best[MAX_ROWS], sum[MAX_ROWS];
    float tile[TILE * MAX_DIM];       /* keys or values that had to be converted */
};

/* Positions [begin, end) of a split, and where their slots are, in numbers from the beginning of the keys or values, and
 * of their scales. */
struct slots {
    int64_t begin, end;
    int64_t at[SPLIT], scale_at[SPLIT];
};

static void find_slots(const struct plan *plan, const struct attention *a, const int32_t *table, int64_t kv_head,
                       struct slots *slots) {
    int64_t block = slots->begin / plan->block_size, slot = slots->begin % plan->block_size;
    for (int64_t i = 0; i < slots->end - slots->begin; block++, slot = 0) {
        int64_t at = table[block] * a->block_stride + kv_head * a->head_stride;
        int64_t scale_at = table[block] * a->scale_block_stride + kv_head;
        for (; slot < plan->block_size && i < slots->end - slots->begin; slot++, i++) {
            slots->at[i] = at + slot * a->slot_stride;
            slots->scale_at[i] = scale_at + slot * a->scale_slot_stride;
        }
    }
}

INLINE void convert(const char *from, float *to, int64_t head_dim, int64_t dim, float scale, const enum format format) {
    int64_t i = 0;
    for (; i + LANES <= head_dim; i += LANES) *(floats *)(to + i) = load(from, i, format) * scale;
    for (; i < head_dim; i++) to[i] = load_one(from, i, format) * scale;
    for (; i < dim; i++) to[i] = 0;
}

/* Where the float32 rows of the slots [i, i + count) are, which are converted into `tile` if the cache has others. */
static void find_rows(const struct attention *a, const char *base, const float *scales, const struct slots *slots, int64_t i,
                      int64_t count, int64_t dim, float *tile, const float **found) {
    int64_t size = format_size(a->format);
    if (a->format == FLOAT32 && dim == a->head_dim) {
        for (int64_t k = 0; k < count; k++) found[k] = (const float *)(base + size * slots->at[i + k]);
        return;
    }
    for (int64_t k = 0; k < count; k++) {
        const char *row = base + size * slots->at[i + k];
        float scale = scales ? scales[slots->scale_at[i + k]] : 1.0f, *to = tile + k * dim;
        switch (a->format) {
            case FLOAT32: convert(row, to, a->head_dim, dim, scale, FLOAT32); break;
            case BFLOAT16: convert(row, to, a->head_dim, dim, scale, BFLOAT16); break;
            case INT8: convert(row, to, a->head_dim, dim, scale, INT8); break;
            default: convert(row, to, a->head_dim, dim, scale, FLOAT8);
        }
        found[k] = to;
    }
}

/* Blocks lie far apart, so that the hardware does not see what comes next. */
INLINE void prefetch_row(const struct attention *a, const char *base, const struct slots *slots, int64_t i) {
    int64_t size = format_size(a->format);
    if (i < slots->end - slots->begin)
        for (int64_t k = 0; k < size * a->head_dim; k += 64) __builtin_prefetch(base + size * slots->at[i] + k);
}

/* scores [num_rows, COLUMNS] of neighbouring rows and positions. */
INLINE void score_tile(const float *query, const float *const *keys, int64_t dim, float *scores, const int num_rows) {
    floats sums[ROWS][COLUMNS] = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        floats q[ROWS];
        for (int r = 0; r < num_rows; r++) q[r] = *(const floats *)(query + r * dim + i);
        for (int c = 0; c < COLUMNS; c++) {
            floats k = *(const floats *)(keys[c] + i);
            for (int r = 0; r < num_rows; r++) sums[r][c] += q[r] * k;
        }
    }
    for (int r = 0; r < num_rows; r++)
        *(four *)(scores + r * WIDTH) = sums_of(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

/* part [num_rows, `width` vectors from `offset` on] += weights x values of `count` positions. */
INLINE void add_tile(float *part, const float *weights, const float *const *values, int64_t offset, int64_t count,
                     int64_t dim, const int num_rows, const int width) {
    part += offset;
    floats sums[ROWS][4];
    for (int r = 0; r < num_rows; r++)
        for (int w = 0; w < width; w++) sums[r][w] = *(floats *)(part + r * dim + w * LANES);
    for (int64_t i = 0; i < count; i++) {
        floats weight[ROWS];
        for (int r = 0; r < num_rows; r++) weight[r] = all_of(weights[r * WIDTH + i]);
        for (int w = 0; w < width; w++) {
            floats v = *(const floats *)(values[i] + offset + w * LANES);
            for (int r = 0; r < num_rows; r++) sums[r][w] += weight[r] * v;
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int w = 0; w < width; w++) *(floats *)(part + r * dim + w * LANES) = sums[r][w];
}

#if ROWS > 3
#define MORE_ROWS(call)                                                                                                \
    case 3: call(3); break;                                                                                            \
    case 4: call(4); break;                                                                                            \
    case 5: call(5); break;
#else
#define MORE_ROWS(call)
#endif
#define WITH_ROWS(n, call)                                                                                             \
    switch (n) {                                                                                                       \
        case 1: call(1); break;                                                                                        \
        case 2: call(2); break;                                                                                        \
        MORE_ROWS(call)                                                                                                \
        default: call(ROWS);                                                                                           \
    }

static void score_rows(const float *query, const float *const *keys, int64_t dim, float *scores, int64_t num_rows) {
#define SCORE(n) score_tile(query, keys, dim, scores, n)
#define SCORE_64(n) score_tile(query, keys, 64, scores, n)
    if (dim == 64) WITH_ROWS(num_rows, SCORE_64)
    else WITH_ROWS(num_rows, SCORE)
}

static void add_rows(float *part, const float *weights, const float *const *values, int64_t count, int64_t dim,
                     int64_t num_rows) {
    int64_t i = 0;
#define ADD_4(n) add_tile(part, weights, values, i, count, dim, n, 4)
#define ADD_1(n) add_tile(part, weights, values, i, count, dim, n, 1)
    for (; i + 4 * LANES <= dim; i += 4 * LANES) WITH_ROWS(num_rows, ADD_4)
    for (; i < dim; i += LANES) WITH_ROWS(num_rows, ADD_1)
}

/* How many rows the next register tile has, of those that are left: 4 rows in tiles of at most 3 are 2 and 2. */
INLINE int64_t tile_rows(int64_t left) { return left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : ROWS; }

/* Scores [from, to) of a split become weights exp(score - largest), 0 outside of [low, high), which the row sees. */
static void weigh(float *scores, int64_t from, int64_t to, int64_t low, int64_t high, float softcap, float *best,
                  float *sum) {
    if (low >= high) {
        memset(scores + from, 0, (to - from) * sizeof(float));
        *best = -INFINITY;
        *sum = 0;
        return;
    }
    int64_t begin = low / LANES * LANES, end = (high + LANES - 1) / LANES * LANES;
    for (int64_t i = begin; i < low; i++) scores[i] = -INFINITY;
    for (int64_t i = high; i < end; i++) scores[i] = -INFINITY;
    floats largest = all_of(-INFINITY), total = {};
    for (int64_t i = begin; i < end; i += LANES) {
        floats x = *(floats *)(scores + i);
        if (softcap != 0) {
            /* tanh(x) = 1 - 2 / (exp(2 x) + 1), and 1 from 20 on. */
            floats y = x * (2 / softcap);
            y = softcap - 2 * softcap / (exp_of(chosen(y > 40.0f, all_of(40), y)) + 1);
            *(floats *)(scores + i) = x = chosen(x == -INFINITY, x, y);
        }
        largest = larger(x, largest);
    }
    float most = largest_of(largest);
    most = most == -INFINITY ? 0 : most; /* all are -inf or NaN */
    for (int64_t i = begin; i < end; i += LANES) {
        floats weight = exp_of(*(floats *)(scores + i) - most);
        *(floats *)(scores + i) = weight;
        total += weight;
    }
    for (int64_t i = from; i < begin; i++) scores[i] = 0;
    for (int64_t i = end; i < to; i++) scores[i] = 0;
    *best = most;
    *sum = sum_of(total);
}

/* The rows' scores at the slots. */
static void score_split(const struct attention *a, const struct slots *slots, struct rows *rows) {
    const float *found[TILE + COLUMNS];
    int64_t dim = rows->dim, total = slots->end - slots->begin;
    for (int64_t first = 0; first < total; first += TILE) {
        int64_t count = total - first < TILE ? total - first : TILE;
        find_rows(a, a->keys, a->key_scales, slots, first, count, dim, rows->tile, found);
        for (int64_t i = count; i % COLUMNS; i++) found[i] = found[count - 1];
        for (int64_t i = 0; i < count; i += COLUMNS) {
            for (int64_t k = first + i + AHEAD; k < first + i + AHEAD + COLUMNS; k++) {
                if (k < total) prefetch_row(a, a->keys, slots, k);
                else prefetch_row(a, a->values, slots, k - total);
            }
            for (int64_t r = 0, n; r < rows->num; r += n) {
                n = tile_rows(rows->num - r);
                score_rows(rows->query + r * dim, found + i, dim, rows->scores[r] + slots->begin % SPLIT + first + i, n);
            }
        }
    }
}

/* Weighted values of the slots, which are all of a split that one of the rows sees. */
static void compute_split(const struct attention *a, const struct slots *slots, struct rows *rows) {
    int64_t dim = rows->dim, begin = slots->begin, end = slots->end, start = begin / SPLIT * SPLIT;
    score_split(a, slots, rows);
    for (int64_t r = 0; r < rows->num; r++) {
        int64_t low = rows->first[r] > begin ? rows->first[r] : begin, high = rows->end[r] < end ? rows->end[r] : end;
        weigh(rows->scores[r], begin - start, end - start, low - start, high - start, a->softcap, rows->part_best + r,
              rows->part_sum + r);
    }
    memset(rows->part, 0, rows->num * dim * sizeof(float));
    const float *found[TILE];
    for (int64_t first = 0; first < end - begin; first += TILE) {
        int64_t count = end - begin - first < TILE ? end - begin - first : TILE;
        for (int64_t i = first + AHEAD; i < first + AHEAD + TILE; i++) prefetch_row(a, a->values, slots, i);
        find_rows(a, a->values, a->value_scales, slots, first, count, dim, rows->tile, found);
        for (int64_t r = 0, n; r < rows->num; r += n) {
            n = tile_rows(rows->num - r);
            int64_t seen = rows->end[r + n - 1] - begin - first; /* the last row sees furthest */
            if (seen > 0)
                add_rows(rows->part + r * dim, rows->scores[r] + begin - start + first, found, seen < count ? seen : count,
                         dim, n);
        }
    }
}

/* Adds a part to what splits before it have come to: out [dim], its largest score and its sum of weights. */
static __attribute__((noinline)) void merge(float *out, float *best, float *sum, const float *part, float part_best,
                                            float part_sum, int64_t dim) {
    if (part_best == -INFINITY) return; /* it sees nothing there */
    float most = *best > part_best ? *best : part_best;
    floats old = exp_of(all_of(*best - most)), new = exp_of(all_of(part_best - most));
    for (int64_t i = 0; i < dim; i += LANES) {
        floats kept = *(floats *)(out + i) * old;
        *(floats *)(out + i) = kept + *(const floats *)(part + i) * new;
    }
    *sum = *sum * old[0] + part_sum * new[0];
    *best = most;
}

static void begin_rows(const struct attention *a, int64_t kv_head, int64_t head, struct rows *rows) {
    memset(rows->out, 0, rows->num * rows->dim * sizeof(float));
    for (int64_t r = 0; r < rows->num; r++) {
        rows->best[r] = a->sinks ? a->sinks[kv_head * a->group + (head + r) % a->group] : -INFINITY;
        rows->sum[r] = a->sinks != 0;
    }
}

static void end_row(const struct attention *a, int64_t row, int64_t token, int64_t kv_head, int64_t head, struct rows *rows) {
    float *to = a->out + token * a->out_stride + (kv_head * a->group + head) * a->head_dim, *from = rows->out + row * rows->dim;
    for (int64_t i = 0; i < a->head_dim; i++) to[i] = from[i] / rows->sum[row];
}

/* Puts the parts of a query together; the first of them is at `partials`. */
static void merge_partials(const struct attention *a, const struct piece *piece, int64_t kv_head, struct rows *rows) {
    int64_t size = a->group * (rows->dim + 2);
    for (int64_t head = 0; head < a->group; head++) {
        rows->num = 1;
        begin_rows(a, kv_head, head, rows);
        for (int64_t i = 0; i < piece->num_partials; i++) {
            const float *part = a->partials + ((piece->first_partial + i) * a->num_kv_heads + kv_head) * size;
            const float *ends = part + a->group * rows->dim + 2 * head;
            merge(rows->out, rows->best, rows->sum, part + head * rows->dim, ends[0], ends[1], rows->dim);
        }
        end_row(a, 0, piece->token, kv_head, head, rows);
    }
}

/* Rows [row, row + rows->num) of a piece, a row being a head of a query: head `row % group` of query `row / group`. */
static void compute_rows(const struct plan *plan, const struct attention *a, const struct piece *piece, int64_t kv_head,
                         int64_t row, struct rows *rows) {
    int64_t dim = rows->dim, group = a->group;
    const int32_t *table = plan->block_tables + piece->seq * plan->table_width;
    for (int64_t r = 0; r < rows->num; r++) {
        int64_t query = (row + r) / group, position = piece->position + query;
        rows->end[r] = position + 1;
        rows->first[r] = plan->window && position + 1 > plan->window ? position + 1 - plan->window : 0;
        const float *from = a->query + (piece->token + query) * a->query_stride + (kv_head * group + (row + r) % group) * a->head_dim;
        convert((const char *)from, rows->query + r * dim, a->head_dim, dim, a->scale, FLOAT32);
    }
    begin_rows(a, kv_head, row, rows);
    for (int64_t split = piece->begin_split; split < piece->end_split; split++) {
        struct slots slots = {.begin = split * SPLIT, .end = (split + 1) * SPLIT};
        if (slots.begin < rows->first[0]) slots.begin = rows->first[0];
        if (slots.end > rows->end[rows->num - 1]) slots.end = rows->end[rows->num - 1];
        if (slots.begin >= slots.end) continue;
        find_slots(plan, a, table, kv_head, &slots);
        compute_split(a, &slots, rows);
        if (piece->partial >= 0) continue;
        for (int64_t r = 0; r < rows->num; r++)
            merge(rows->out + r * dim, rows->best + r, rows->sum + r, rows->part + r * dim, rows->part_best[r], rows->part_sum[r], dim);
    }
}

void attend_piece(const struct plan *plan, const struct attention *a, const struct piece *piece, int64_t kv_head) {
    struct rows rows;
    int64_t total = piece->num_queries * a->group;
    rows.dim = (a->head_dim + LANES - 1) / LANES * LANES;
    for (int64_t row = 0; row < total; row += MAX_ROWS) {
        rows.num = total - row < MAX_ROWS ? total - row : MAX_ROWS;
        compute_rows(plan, a, piece, kv_head, row, &rows);
        if (piece->partial < 0) {
            for (int64_t r = 0; r < rows.num; r++)
                end_row(a, r, piece->token + (row + r) / a->group, kv_head, (row + r) % a->group, &rows);
            continue;
        }
        float *part = a->partials + (piece->partial * a->num_kv_heads + kv_head) * a->group * (rows.dim + 2);
        memcpy(part + row * rows.dim, rows.part, rows.num * rows.dim * sizeof(float));
        for (int64_t r = 0; r < rows.num; r++) {
            float *ends = part + a->group * rows.dim + 2 * (row + r);
            ends[0] = rows.part_best[r];
            ends[1] = rows.part_sum[r];
        }
    }
    if (piece->partial < 0) return;
    int32_t *num_done = a->num_done + piece->first_partial * a->num_kv_heads + kv_head;
    if (__atomic_add_fetch(num_done, 1, __ATOMIC_ACQ_REL) < piece->num_partials) return;
    *num_done = 0;
    merge_partials(a, piece, kv_head, &rows);
}

void attend(const struct plan *plan, const struct attention *a) {
    int64_t num = plan->num_pieces * a->num_kv_heads;
#pragma omp parallel for if (num > 2) schedule(dynamic, 1)
    for (int64_t i = 0; i < num; i++) attend_piece(plan, a, plan->pieces + i / a->num_kv_heads, i % a->num_kv_heads);
}
