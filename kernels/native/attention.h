/* Causal attention over a paged cache: see attention.c. */
#pragma once
#include <stdint.h>

/* A piece of a step's attention, for every kv head: queries of one sequence, over the splits [begin_split, end_split).
 * Where several pieces share a query, `partial` is where the piece keeps its part, and who comes last puts the
 * `num_partials` from `first_partial` on together. */
struct piece {
    int32_t seq;          /* row of the block tables */
    int32_t token;        /* of its first query in the batch */
    int32_t num_queries;  /* 1 where there are partials */
    int32_t position;     /* of its first query in the sequence */
    int32_t begin_split, end_split;
    int32_t partial, first_partial, num_partials;
};

/* The pieces of a step under one window; the same for all layers of a shape. */
struct plan {
    const int32_t *block_tables; /* [num_seqs, table_width] */
    const struct piece *pieces;
    int64_t num_pieces, table_width, block_size, window; /* window 0: none */
};

struct attention {
    const float *query;                     /* [num_tokens, num_kv_heads, group, head_dim], tokens by stride */
    float *out;                             /* likewise */
    const char *keys, *values;              /* [num_blocks, block_size, num_kv_heads, head_dim] by strides */
    const float *key_scales, *value_scales; /* [num_blocks, block_size, num_kv_heads] by strides, or none */
    const float *sinks;                     /* [num_kv_heads, group], or none */
    float *partials;                        /* [partials, num_kv_heads, group, head_dim + 2] */
    int32_t *num_done;                      /* [partials, num_kv_heads], zeros before and after */
    int64_t query_stride, out_stride;       /* of tokens, in numbers */
    int64_t block_stride, slot_stride, head_stride; /* of keys and values, in numbers */
    int64_t scale_block_stride, scale_slot_stride;
    int64_t num_kv_heads, group, head_dim, format;
    float scale, softcap; /* softcap 0: none */
};

/* One kv head of a piece. Any thread may compute any, in any order. */
void attend_piece(const struct plan *plan, const struct attention *a, const struct piece *piece, int64_t kv_head);

/* All of them. */
void attend(const struct plan *plan, const struct attention *a);
