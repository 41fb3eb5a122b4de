/* Whole decoder layers in one parallel region: see layers.c. */
#pragma once
#include "attention.h"
#include "gemm.h"

/* A layer as Llama has it: x += o(attention(rotary(qkv(norm(x))))); x += down(silu(gate(norm(x))) * up(norm(x))). */
struct layer {
    struct packed qkv, o, gate_up, down;
    const float *input_norm, *post_norm;          /* [hidden_size] */
    const float *query_norm, *key_norm;           /* [head_dim], or none */
    float input_epsilon, post_epsilon, query_epsilon, key_epsilon;
    struct attention attention;                   /* all but what a step has for all layers */
    int64_t plan;                                 /* which of the step's */
};

struct step {
    float *hidden;                                /* [num_tokens, hidden_size], changed in place */
    const float *cos, *sin;                       /* [num_tokens, rotary_dim] */
    const int64_t *block_ids, *offsets;           /* [num_tokens]: slots of keys and values */
    const struct plan *const *plans;
    float *const *partials;                       /* of each plan, as struct attention has it */
    int32_t *const *num_done;
    float *normed;                                /* [num_tokens, hidden_size], memory for what is in between */
    float *qkv;                                   /* [num_tokens, out_features of qkv] */
    float *attended;                              /* [num_tokens, in_features of o] */
    float *gate_up, *activated;                   /* [mlp_rows, out_features of gate_up], [mlp_rows, half of that] */
    double *seconds;                              /* in products, attention, the rest, added up; or none */
    int64_t num_tokens, hidden_size, rotary_dim, mlp_rows;
};

void run_layers(const struct layer *layers, int64_t num_layers, const struct step *step);
