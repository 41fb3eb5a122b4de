"""Every family of causal language models that transformers knows: can it be served, and if not, why.

The tests build a small random model of each and hold it against transformers' own results, or see it refused;
`python -m worker.model.table` makes docs/models.md of it. One row is one `model_type` of transformers 5.24.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_DENSE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # with the defaults greedy decoding repeats one token, whatever it attends to
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 24}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}

# What a small model has, as far as its configuration knows these names.
SIZES = _DENSE | _WINDOW | _EXPERTS | _LATENT
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
_MLA = {"num_key_value_heads": 4, "head_dim": 8}
_MLP = {"mlp_layer_types": ["dense", "sparse"]}
_DECODER = {"is_decoder": True}

# Why a family is refused, as the message says it.
STATE = "it keeps a state beside its keys and values"
INSIDE = "its attention is written inside the model"
MIXED = "of its .* layers use the attention interface"
HALF = "it is half of an encoder-decoder model"
SPARSE = "it computes masks from what it reads"
OWN_MASK = "the model builds an attention mask of its own"
MASK = "its attention mask depends on more than positions"
POSITIONS = "its results are others with our attention"
BIAS = "its attention has a term that is not supported"
NO_CONTEXT = "the model does not hand the arguments of its forward on"


@dataclass(frozen=True, slots=True)
class Family:
    """A family and what to know of it."""

    model_type: str  # transformers' name
    name: str  # people's name
    features: str = ""  # of its attention and positions, beside causal attention over grouped heads
    config: dict[str, Any] = field(default_factory=dict)  # of a small model, beside SIZES
    refused: str | None = None  # a pattern of the reason; None: it is served
    tested: bool = True  # whether a small model can be built here


def small_config(family: Family) -> PreTrainedConfig:
    """The configuration of a random model of some 100,000 weights."""
    config_class = CONFIG_MAPPING[family.model_type]
    known = {*config_class.__dataclass_fields__, *getattr(config_class, "attribute_map", {})}
    return config_class(**{key: value for key, value in SIZES.items() if key in known} | family.config)


def _served(model_type: str, name: str, features: str, **config: Any) -> Family:
    return Family(model_type, name, features, config)


_TWO_ROPES = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("sliding_attention", 1e4), ("full_attention", 1e6))
    }
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_SERVED = (
    _served("llama", "Llama 1 to 3.3 and all that is built like it", "GQA"),
    _served("mistral", "Mistral", "GQA; sliding window"),
    _served(
        "qwen2", "Qwen2, Qwen2.5", "GQA; sliding window, by layer; biases", use_sliding_window=True, **_ALTERNATING
    ),
    _served("qwen3", "Qwen3", "GQA; QK norm", head_dim=32),
    _served(
        "gemma2", "Gemma 2", "GQA; sliding window, by layer; soft cap", attn_logit_softcapping=20.0, **_ALTERNATING
    ),
    _served("gpt_neox", "GPT-NeoX, Pythia", "MHA; partial rotary; parallel residual"),
    _served("phi3", "Phi-3, Phi-3.5, Phi-4", "GQA; sliding window; fused QKV"),
    # dense
    _served("apertus", "Apertus", "GQA; QK norm; Llama 3 rotary scaling"),
    _served("apertus1p5_text", "Apertus 1.5, text", "GQA; QK norm"),
    _served("arcee", "Arcee AFM", "GQA; squared ReLU"),
    _served("bitnet", "BitNet b1.58", "GQA; norms inside attention"),
    _served("cohere", "Command R", "GQA; QK norm; parallel residual; interleaved rotary", use_qk_norm=True),
    _served(
        "cohere2",
        "Command R7B, Command A",
        "GQA; sliding window, by layer; no positions on full layers",
        **_ALTERNATING,
    ),
    _served(
        "cohere_compass_text", "Cohere Compass, text", "GQA; sliding window, by layer", **_ALTERNATING, **_TWO_ROPES
    ),
    _served("cwm", "Code World Model", "GQA; sliding window, by layer", **_ALTERNATING),
    _served("ernie4_5", "ERNIE 4.5", "GQA; interleaved rotary"),
    _served("exaone", "EXAONE 3", "GQA"),
    _served("exaone4", "EXAONE 4", "GQA; sliding window, by layer; QK norm", **_ALTERNATING),
    _served("gemma", "Gemma", "GQA; tied embeddings"),
    _served("gemma3_text", "Gemma 3, text", "GQA; sliding window, by layer; QK norm; rotary by layer", **_ALTERNATING),
    _served(
        "gemma4_text",
        "Gemma 4, text",
        "GQA; sliding window, by layer; heads by layer; QK norm; rotary by layer",
        **_ALTERNATING,
        vocab_size_per_layer_input=211,
        hidden_size_per_layer_input=16,
    ),
    _served(
        "gemma4_unified_text", "Gemma 4 unified, text", "GQA; sliding window, by layer; heads by layer", **_ALTERNATING
    ),
    _served("glm", "GLM-4 (9B)", "GQA; partial rotary"),
    _served("glm4", "GLM-4 (0414)", "GQA; partial rotary; sandwich norms"),
    _served("granite", "Granite 3", "GQA; scaled attention and residuals", attention_multiplier=0.3),
    _served("granite_swa", "Granite, sliding", "GQA; sliding window, by layer; sinks", **_ALTERNATING),
    _served("helium", "Helium", "GQA; interleaved rotary"),
    _served("hunyuan_v1_dense", "Hunyuan, dense", "GQA; QK norm"),
    _served("hyperclovax", "HyperCLOVA X", "GQA; scaled attention"),
    _served("internlm3", "InternLM 3", "GQA"),
    _served("iquestcoder", "IQuest Coder", "GQA"),
    _served("jais2", "Jais 2", "GQA; biases"),
    _served("ministral", "Ministral", "GQA; sliding window, by layer", **_ALTERNATING),
    _served("ministral3", "Ministral 3", "GQA; sliding window; attention scaled by position"),
    _served("nanochat", "nanochat", "GQA; QK norm; capped logits"),
    _served("olmo", "OLMo", "GQA; clipped QKV", clip_qkv=4.0),
    _served("olmo2", "OLMo 2", "GQA; QK norm"),
    _served("olmo3", "OLMo 3", "GQA; sliding window, by layer; QK norm", **_ALTERNATING),
    _served("persimmon", "Persimmon", "MHA; partial rotary; QK norm"),
    _served("phi", "Phi-1, Phi-2", "GQA; partial rotary; parallel residual"),
    _served("seed_oss", "Seed-OSS", "GQA"),
    _served("smollm3", "SmolLM3", "GQA; no positions on some layers", no_rope_layers=[1, 0]),
    _served("starcoder2", "StarCoder2", "GQA; sliding window; biases"),
    _served(
        "vaultgemma",
        "VaultGemma",
        "GQA; sliding window, by layer; soft cap",
        attn_logit_softcapping=20.0,
        **_ALTERNATING,
    ),
    # dense, older
    _served("bert", "BERT, as a decoder", "MHA; learned positions", **_DECODER),
    _served("bert-generation", "BERT generation, as a decoder", "MHA; learned positions", **_DECODER),
    _served("biogpt", "BioGPT", "MHA; learned positions"),
    _served("codegen", "CodeGen", "MHA; partial rotary", rotary_dim=8),
    _served("ctrl", "CTRL", "MHA; sinusoidal positions", dff=96),
    _served("electra", "ELECTRA, as a decoder", "MHA; learned positions", **_DECODER, embedding_size=64),
    _served("ernie", "ERNIE, as a decoder", "MHA; learned positions", **_DECODER),
    _served("gpt2", "GPT-2", "MHA; learned positions"),
    _served("gpt-sw3", "GPT-SW3", "MHA; learned positions"),
    _served("gpt_bigcode", "StarCoder, SantaCoder", "MQA; learned positions"),
    _served("gptj", "GPT-J", "MHA; partial rotary; parallel residual", rotary_dim=8),
    _served(
        "modernbert-decoder",
        "ModernBERT decoder (Ettin)",
        "MHA; sliding window, by layer; rotary by layer",
        local_attention=48,
        **_ALTERNATING,
    ),
    _served("moshi", "Moshi, text", "GQA", ffn_dim=96, sliding_window=512),
    _served(
        "opt",
        "OPT",
        "MHA; learned positions",
        ffn_dim=96,
        word_embed_proj_dim=64,
        init_std=0.3,
        tie_word_embeddings=False,
    ),
    _served(
        "roc_bert",
        "RoCBert, as a decoder",
        "MHA; learned positions",
        **_DECODER,
        pronunciation_vocab_size=9,
        shape_vocab_size=9,
    ),
    # attention of another kind
    _served("diffllama", "DiffLlama", "GQA; two calls a layer (differential attention)"),
    _served(
        "dory",
        "Nemotron Labs Dory",
        "GQA; sliding window, by layer; QK norm; layers run repeatedly",
        num_hidden_layers=4,
        n_input_layers=1,
        n_output_layers=1,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    _served(
        "gemma3n_text",
        "Gemma 3n, text",
        "GQA; sliding window, by layer; keys and values shared by layers",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        intermediate_size=[96] * 4,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        laurel_rank=8,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=211,
    ),
    _served("hrm_text", "HRM-Text", "MHA; layers run repeatedly", initializer_range=0.1),
    _served("minicpm3", "MiniCPM3", "MLA", **_MLA),
    _served("youtu", "Youtu-LLM", "MLA", num_key_value_heads=4),
    # mixture of experts
    _served(
        "afmoe", "Arcee Trinity (AFMoE)", "GQA; sliding window, by layer; QK norm; gated attention; MoE", **_ALTERNATING
    ),
    _served("aria_text", "Aria, text", "GQA; MoE", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    _served("axk1", "A.X K1", "MLA; MoE", **_MLA, **_MLP),
    _served("beam", "Beam", "GQA; sliding window, by layer; QK norm; rotary by layer; MoE", **_ALTERNATING, **_MLP),
    _served("cohere2_moe", "Cohere 2 MoE", "GQA; sliding window, by layer; MoE", **_ALTERNATING),
    _served("deepseek_v2", "DeepSeek V2", "MLA; MoE", **_MLA, first_k_dense_replace=1),
    _served("deepseek_v3", "DeepSeek V3, R1; Kimi K2", "MLA; MoE", **_MLA, first_k_dense_replace=1),
    _served(
        "dots1",
        "dots.llm1",
        "GQA; sliding window, by layer; QK norm; MoE",
        **_ALTERNATING,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    _served("ernie4_5_moe", "ERNIE 4.5 MoE", "GQA; MoE"),
    _served("exaone_moe", "EXAONE MoE", "GQA; sliding window, by layer; QK norm; MoE", **_ALTERNATING, **_MLP),
    _served("flex_olmo", "FlexOlmo", "GQA; QK norm; MoE"),
    _served(
        "flint", "Flint", "GQA; sliding window, by layer; sinks; QK norm; MoE", **_ALTERNATING, mlp_only_layers=[0]
    ),
    _served(
        "glm4_moe", "GLM-4.5, 4.6, 4.7", "GQA; partial rotary; QK norm; MoE", use_qk_norm=True, first_k_dense_replace=1
    ),
    _served("glm4_moe_lite", "GLM-4.7 Flash", "MLA; MoE", **_MLA, **_MLP),
    _served("gpt_oss", "GPT-OSS", "GQA; sliding window, by layer; sinks; YaRN; MoE", **_ALTERNATING),
    _served("granitemoe", "Granite MoE", "GQA; MoE"),
    _served("granitemoe_swa", "Granite MoE, sliding", "GQA; sliding window, by layer; sinks; MoE", **_ALTERNATING),
    _served("granitemoeshared", "Granite MoE with shared experts", "GQA; MoE", shared_intermediate_size=32),
    _served("hunyuan_v1_moe", "Hunyuan A13B", "GQA; QK norm; MoE"),
    _served("hy_v3", "Hunyuan 3", "GQA; QK norm; MoE"),
    _served("jetmoe", "JetMoE", "MHA; mixture of attention heads; MoE", kv_channels=16),
    _served("kolibri1", "Kolibri 1", "GQA; sliding window, by layer; QK norm; MoE", **_ALTERNATING),
    _served("laguna", "Laguna", "GQA; sliding window, by layer; QK norm; gated attention; MoE", **_ALTERNATING, **_MLP),
    _served(
        "llama4_text",
        "Llama 4, text",
        "GQA; chunked, by layer; QK norm; no positions on full layers; MoE",
        attention_chunk_size=32,
        layer_types=["chunked_attention", "full_attention"],
        intermediate_size_mlp=96,
    ),
    _served(
        "longcat_flash",
        "LongCat Flash",
        "MLA; two calls a layer; MoE",
        num_layers=2,
        **_MLA,
        qk_head_dim=24,
        ffn_hidden_size=64,
        expert_ffn_hidden_size=32,
        zero_expert_num=2,
        moe_topk=2,
    ),
    _served("mellum", "Mellum", "GQA; sliding window, by layer; QK norm; MoE", **_ALTERNATING),
    _served(
        "mimo_v2_flash",
        "MiMo V2 Flash",
        "GQA; sliding window, by layer; sinks; heads by layer; keys wider than values; MoE",
        num_attention_heads=8,
        **_ALTERNATING,
        **_MLP,
    ),
    _served("minimax_m2", "MiniMax M2", "GQA; QK norm; partial rotary; MoE"),
    _served("mixtral", "Mixtral", "GQA; sliding window; MoE"),
    _served("olmoe", "OLMoE", "GQA; QK norm; MoE"),
    _served("phimoe", "Phi-3.5 MoE", "GQA; sliding window; MoE"),
    _served("qwen2_moe", "Qwen1.5 MoE, Qwen2 MoE", "GQA; shared experts; MoE", shared_expert_intermediate_size=32),
    _served("qwen3_moe", "Qwen3 MoE", "GQA; QK norm; MoE"),
    _served("sarvam_mla", "Sarvam, MLA", "MLA; MoE", **_MLA, first_k_dense_replace=1),
    _served("sarvam_moe", "Sarvam MoE", "GQA; QK norm; MoE", first_k_dense_replace=1),
    _served("solar_open", "Solar Open", "GQA; MoE"),
    # the text side of models that also see or hear
    _served(
        "gemma3",
        "Gemma 3",
        "GQA; sliding window, by layer; QK norm; rotary by layer",
        text_config=_DENSE | _WINDOW | _ALTERNATING,
        vision_config=_VISION,
        mm_tokens_per_image=4,
    ),
    _served(
        "gemma4",
        "Gemma 4",
        "GQA; sliding window, by layer; heads by layer; QK norm; rotary by layer",
        text_config=_DENSE
        | _WINDOW
        | _ALTERNATING
        | {"vocab_size_per_layer_input": 211, "hidden_size_per_layer_input": 16},
        vision_config=None,
        audio_config=None,
    ),
    _served(
        "got_ocr2",
        "GOT-OCR 2",
        "GQA",
        text_config=_DENSE,
        vision_config=_VISION | {"global_attn_indexes": [0], "output_channels": 16, "mlp_dim": 32},
    ),
    _served(
        "llama4",
        "Llama 4",
        "GQA; chunked, by layer; MoE",
        vision_config=_VISION,
        text_config=_DENSE
        | {"attention_chunk_size": 32, "num_local_experts": 4, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    _served(
        "emu3",
        "Emu3",
        "GQA",
        text_config=_DENSE,
        vocabulary_map={"<image>": 3},
        vq_config={
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "codebook_size": 8,
            "embed_dim": 8,
            "latent_channels": 8,
            "attn_resolutions": [],
        },
    ),
    _served("fuyu", "Fuyu", "MHA; partial rotary; QK norm", text_config=_DENSE | {"model_type": "persimmon"}),
    _served(
        "moss_transcribe_diarize",
        "MOSS transcribe-diarize",
        "GQA; QK norm",
        text_config=_DENSE,
        audio_config={
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 8,
        },
    ),
    _served(
        "phi4_multimodal",
        "Phi-4 multimodal",
        "GQA; sliding window",
        vision_config=_VISION | {"crop_size": 28},
        audio_config={"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    ),
)


def _refused(model_type: str, name: str, reason: str, **config: Any) -> Family:
    return Family(model_type, name, "", config, reason)


_REFUSED = (
    # a state beside the KV cache
    _refused("bailing_hybrid", "Bailing hybrid (Ling 2.5)", STATE),
    _refused("bamba", "Bamba", STATE),
    _refused("deepseek_v4", "DeepSeek V4", STATE),
    _refused("falcon_h1", "Falcon H1", STATE),
    _refused("falcon_mamba", "Falcon Mamba", STATE),
    _refused("granitemoehybrid", "Granite 4", STATE),
    _refused("jamba", "Jamba", STATE),
    _refused("kimi_linear", "Kimi Linear", STATE),
    _refused("lara_mini", "Lara mini", STATE),
    _refused("lfm2", "LFM2", MIXED, layer_types=["conv", "full_attention"]),
    _refused("lfm2_moe", "LFM2 MoE", MIXED, layer_types=["conv", "full_attention"], num_dense_layers=1),
    _refused("lfm3", "LFM3", MIXED, layer_types=["conv", "full_attention"]),
    _refused("mamba", "Mamba", STATE),
    _refused("mamba2", "Mamba 2", STATE, num_heads=8, head_dim=16),
    _refused("minimax", "MiniMax-01", MIXED),
    _refused("nemotron_h", "Nemotron H", STATE),
    _refused("olmo_hybrid", "OLMo hybrid", STATE),
    _refused("qwen3_5", "Qwen3.5", STATE, text_config=_DENSE, vision_config={"depth": 1, "hidden_size": 32}),
    _refused("qwen3_5_moe", "Qwen3.5 MoE", STATE),
    _refused("qwen3_5_moe_text", "Qwen3.5 MoE, text", STATE),
    _refused("qwen3_5_text", "Qwen3.5, text", STATE),
    _refused("qwen3_next", "Qwen3-Next", STATE),
    _refused("qwen4_exp", "Qwen4 (experimental)", STATE, text_config=_DENSE),
    _refused("qwen4_exp_text", "Qwen4 (experimental), text", STATE),
    _refused("recurrent_gemma", "RecurrentGemma", STATE),
    _refused("rwkv", "RWKV", STATE),
    _refused("xlstm", "xLSTM", STATE),
    _refused("zamba2", "Zamba 2", STATE, layers_block_type=["linear_attention", "hybrid"], n_mamba_heads=8),
    _refused("zaya", "Zaya", STATE, num_experts_per_tok=1),
    # attention outside of the interface
    _refused("big_bird", "BigBird", INSIDE, **_DECODER),
    _refused("bloom", "BLOOM", INSIDE),
    _refused("cpmant", "CPM-Ant", INSIDE, dim_head=16, dim_ff=96),
    _refused("falcon", "Falcon", INSIDE),
    _refused("git", "GIT", INSIDE, vision_config=_VISION),
    _refused("gpt_neo", "GPT-Neo", INSIDE, attention_types=[[["global", "local"], 1]]),
    _refused("gpt_neox_japanese", "GPT-NeoX Japanese", INSIDE),
    _refused("megatron-bert", "Megatron BERT", INSIDE, **_DECODER),
    _refused("mpt", "MPT", INSIDE),
    _refused("openai-gpt", "GPT", INSIDE),
    _refused("reformer", "Reformer", INSIDE, hidden_size=256, **_DECODER),
    _refused("rembert", "RemBERT", INSIDE, **_DECODER),
    _refused("roformer", "RoFormer", INSIDE, **_DECODER),
    _refused("trocr", "TrOCR", INSIDE),
    _refused("xglm", "XGLM", INSIDE),
    _refused("xlm", "XLM", INSIDE),
    _refused("xlnet", "XLNet", INSIDE, d_head=16),
    _refused("nemotron", "Nemotron", NO_CONTEXT),
    _refused("stablelm", "StableLM", NO_CONTEXT),
    # attention of a kind that we do not compute
    _refused("axk2", "A.X K2", SPARSE, **_MLA, **_MLP, index_topk=8, index_head_dim=16, index_n_heads=2),
    _refused("deepseek_v32", "DeepSeek V3.2", SPARSE, **_MLA, index_topk=8, index_head_dim=16, index_n_heads=2),
    _refused("doge", "Doge", OWN_MASK),
    _refused("dots3_note_text", "dots.note 3, text", SPARSE, num_key_value_heads=4),
    _refused("glm_moe_dsa", "GLM-5", SPARSE, **_MLA, **_MLP, index_topk=8, index_head_dim=16, index_n_heads=2),
    _refused("hy_v4", "Hunyuan 4", SPARSE),
    _refused("minimax_m3_vl_text", "MiniMax M3, text", BIAS, layer_types=["minimax_m3_sparse"] * 2),
    _refused("gemma4_unified", "Gemma 4 unified", MASK, text_config=_DENSE | _WINDOW | _ALTERNATING),
    _refused("inkling_text", "Inkling, text", BIAS),
    _refused("inkling2_text", "Inkling 2, text", BIAS),
    _refused("inkling2_loop_text", "Inkling 2 loop, text", BIAS),
    _refused(
        "mllama", "Llama 3.2 Vision", MIXED, vision_config=_VISION, text_config=_DENSE | {"cross_attention_layers": [1]}
    ),
    # positions from a table with an offset, or a language to be chosen
    _refused("camembert", "CamemBERT", POSITIONS, **_DECODER),
    _refused("data2vec-text", "Data2Vec text", POSITIONS, **_DECODER),
    _refused("roberta", "RoBERTa", POSITIONS, **_DECODER),
    _refused("roberta-prelayernorm", "RoBERTa, pre-layer-norm", POSITIONS, **_DECODER),
    _refused("xlm-roberta", "XLM-RoBERTa", POSITIONS, **_DECODER),
    _refused("xlm-roberta-xl", "XLM-RoBERTa XL", POSITIONS, **_DECODER),
    _refused("xmod", "X-MOD", POSITIONS, languages=["en"], default_language="en", **_DECODER),
    # one half of an encoder-decoder model
    _refused("bart", "BART", HALF),
    _refused("bigbird_pegasus", "BigBird-Pegasus", HALF),
    _refused("blenderbot", "Blenderbot", HALF),
    _refused("blenderbot-small", "Blenderbot, small", HALF),
    _refused("marian", "Marian", HALF),
    _refused("mbart", "mBART", HALF),
    _refused("mvp", "MVP", HALF),
    _refused("pegasus", "Pegasus", HALF),
    _refused("plbart", "PLBart", HALF),
    _refused("prophetnet", "ProphetNet", HALF),
    _refused("whisper", "Whisper", HALF),
)


def _untried(model_type: str, name: str, why: str) -> Family:
    return Family(model_type, name, refused=why, tested=False)


_UNTRIED = (
    _untried("blt", "Byte Latent Transformer", "its byte encoder has a size of its own"),
    _untried("dbrx", "DBRX", "transformers 5.24 cannot build it"),
    _untried("dots3_note", "dots.note 3", "no small vision part; its text side is refused"),
    _untried("gemma3n", "Gemma 3n", "needs the library timm; its text side is served"),
    _untried("gemma4_assistant", "Gemma 4 assistant", "it drafts for another model"),
    _untried("gemma4_unified_assistant", "Gemma 4 unified assistant", "it drafts for another model"),
    _untried("musicgen", "MusicGen", "half of an encoder-decoder model"),
    _untried("musicgen_melody", "MusicGen Melody", "half of an encoder-decoder model"),
    _untried("zamba", "Zamba", "no small model; it keeps a state, as Zamba 2"),
)

FAMILIES: tuple[Family, ...] = (*_SERVED, *_REFUSED, *_UNTRIED)
