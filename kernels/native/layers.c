/* Decoder layers, one after the other, in one parallel region.
 *
 * A layer is a chain of phases, each cut into parts that threads take as they come: one that has to wait for its core
 * holds up a part, not a half. Between phases threads meet at a barrier of our own: phases last tens of microseconds, and
 * OpenMP's passive wait puts threads to sleep at each. Ours spins for about as long as a part lasts, then gives the core
 * to whoever wants it.
 */
#include "layers.h"

#include <omp.h>
#include <sched.h>
#include <time.h>

#include "rows.h"
#include "vectors.h"

#define PARTS 16      /* of a product, at most */
#define SPINS 2000    /* looks at a barrier before the core is given away */

enum part { PRODUCTS, ATTENTION, REST };

struct team {
    int64_t next;     /* the part of the present phase that is taken next */
    int32_t num_threads, num_arrived;
    double began;
    int32_t generation __attribute__((aligned(64))); /* who waits looks at it all the time */
};

static double now(const struct team *team) {
    struct timespec time;
    clock_gettime(team->num_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

INLINE void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* All threads have ended the phase, which was of kind `part`. */
static void meet(struct team *team, const struct step *step, enum part part) {
    int32_t generation = __atomic_load_n(&team->generation, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&team->num_arrived, 1, __ATOMIC_ACQ_REL) == team->num_threads) {
        if (step->seconds) {
            double time = now(team);
            step->seconds[part] += time - team->began;
            team->began = time;
        }
        team->num_arrived = 0;
        team->next = 0;
        __atomic_store_n(&team->generation, generation + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int64_t i = 0; __atomic_load_n(&team->generation, __ATOMIC_ACQUIRE) == generation; i++) {
        if (i < SPINS) relax();
        else sched_yield();
    }
}

INLINE int64_t take(struct team *team) { return __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED); }

/* The part [begin, end) of 0 to `total` that is taken next, in `parts` at most; 0: there is none. */
INLINE int take_part(struct team *team, int64_t total, int64_t parts, int64_t *begin, int64_t *end) {
    int64_t size = (total + parts - 1) / parts;
    *begin = take(team) * size;
    *end = *begin + size < total ? *begin + size : total;
    return *begin < total;
}

#define EACH_ROW(r, num)                                                                                               \
    for (int64_t begin, end; take_part(team, num, 4 * team->num_threads, &begin, &end);)                               \
        for (int64_t r = begin; r < end; r++)

static void product(struct team *team, const struct packed *w, const float *x, int64_t rows, float *out) {
    for (int64_t begin, end; take_part(team, num_panels(w), PARTS, &begin, &end);)
        product_part(w, x, w->in_features, rows, out, w->out_features, begin, end);
}

INLINE void add_row(float *x, const float *y, int64_t size) {
    for (int64_t i = 0; i < size; i++) x[i] += y[i];
}

/* Dimensions i and i + half turn together; what is behind the rotary dimensions stays. */
static void turn(float *x, const float *cos, const float *sin, int64_t rotary_dim) {
    int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

/* A token's queries, keys and values: normalised where the layer has such norms, turned, and the latter two stored. */
static void place_row(const struct layer *layer, const struct step *step, int64_t row) {
    const struct attention *a = &layer->attention;
    int64_t dim = a->head_dim, num_queries = a->num_kv_heads * a->group;
    float *x = step->qkv + row * layer->qkv.out_features, *keys = x + num_queries * dim, *values = keys + a->num_kv_heads * dim;
    const float *cos = step->cos + row * step->rotary_dim, *sin = step->sin + row * step->rotary_dim;
    for (int64_t h = 0; h < num_queries + a->num_kv_heads; h++) {
        float *head = x + h * dim;
        const float *weight = h < num_queries ? layer->query_norm : layer->key_norm;
        if (weight) norm_row(head, weight, head, dim, h < num_queries ? layer->query_epsilon : layer->key_epsilon);
        turn(head, cos, sin, step->rotary_dim);
    }
    int64_t slot = step->block_ids[row] * a->block_stride + step->offsets[row] * a->slot_stride;
    int64_t scale = step->block_ids[row] * a->scale_block_stride + step->offsets[row] * a->scale_slot_stride;
    for (int64_t h = 0; h < a->num_kv_heads; h++) {
        int64_t at = (slot + h * a->head_stride) * format_size(a->format);
        store_row(keys + h * dim, (char *)a->keys + at, a->key_scales ? (float *)a->key_scales + scale + h : 0, dim, a->format);
        store_row(values + h * dim, (char *)a->values + at, a->value_scales ? (float *)a->value_scales + scale + h : 0, dim,
                  a->format);
    }
}

static void attend_all(struct team *team, const struct layer *layer, const struct step *step) {
    const struct plan *plan = step->plans[layer->plan];
    struct attention a = layer->attention;
    a.query = step->qkv;
    a.query_stride = layer->qkv.out_features;
    a.out = step->attended;
    a.out_stride = layer->o.in_features;
    a.partials = step->partials[layer->plan];
    a.num_done = step->num_done[layer->plan];
    for (int64_t i; (i = take(team)) < plan->num_pieces * a.num_kv_heads;)
        attend_piece(plan, &a, plan->pieces + i / a.num_kv_heads, i % a.num_kv_heads);
}

/* For rows of at most `mlp_rows` at once, which bounds the memory that they take. */
static void feed_forward(struct team *team, const struct layer *layer, const struct step *step) {
    int64_t size = layer->down.in_features, pieces = size >= 256 ? 4 : 1;
    for (int64_t first = 0; first < step->num_tokens; first += step->mlp_rows) {
        int64_t rows = step->num_tokens - first < step->mlp_rows ? step->num_tokens - first : step->mlp_rows;
        float *normed = step->normed + first * step->hidden_size;
        product(team, &layer->gate_up, normed, rows, step->gate_up);
        meet(team, step, PRODUCTS);
        EACH_ROW(i, rows * pieces) {
            int64_t row = i / pieces, from = size * (i % pieces) / pieces, to = size * (i % pieces + 1) / pieces;
            const float *gate = step->gate_up + 2 * row * size + from;
            silu_row(gate, gate + size, step->activated + row * size + from, to - from);
        }
        meet(team, step, REST);
        product(team, &layer->down, step->activated, rows, normed);
        meet(team, step, PRODUCTS);
    }
}

static void run_layer(struct team *team, const struct layer *layer, const struct layer *next, const struct step *step) {
    int64_t size = step->hidden_size;
    product(team, &layer->qkv, step->normed, step->num_tokens, step->qkv);
    meet(team, step, PRODUCTS);
    EACH_ROW(r, step->num_tokens) place_row(layer, step, r);
    meet(team, step, REST);
    attend_all(team, layer, step);
    meet(team, step, ATTENTION);
    product(team, &layer->o, step->attended, step->num_tokens, step->normed);
    meet(team, step, PRODUCTS);
    EACH_ROW(r, step->num_tokens) {
        add_row(step->hidden + r * size, step->normed + r * size, size);
        norm_row(step->hidden + r * size, layer->post_norm, step->normed + r * size, size, layer->post_epsilon);
    }
    meet(team, step, REST);
    feed_forward(team, layer, step);
    EACH_ROW(r, step->num_tokens) {
        add_row(step->hidden + r * size, step->normed + r * size, size);
        if (next) norm_row(step->hidden + r * size, next->input_norm, step->normed + r * size, size, next->input_epsilon);
    }
    meet(team, step, REST);
}

void run_layers(const struct layer *layers, int64_t num_layers, const struct step *step) {
    struct team shared = {}, *team = &shared;
    int64_t size = step->hidden_size;
#pragma omp parallel
    {
#pragma omp single
        {
            team->num_threads = omp_get_num_threads();
            if (step->seconds) team->began = now(team);
        }
        EACH_ROW(r, step->num_tokens)
            norm_row(step->hidden + r * size, layers->input_norm, step->normed + r * size, size, layers->input_epsilon);
        meet(team, step, REST);
        for (int64_t i = 0; i < num_layers; i++)
            run_layer(team, layers + i, i + 1 < num_layers ? layers + i + 1 : 0, step);
    }
}
