"""Configurations of the tiny checkpoints: for each architecture, its fields beyond the common sizes.

Windows are 7 and chunks 8 positions long, so that they slide within a few dozen tokens. Where an architecture mixes
kinds of layers, its few layers do so too.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]  # of a configuration

VOCAB = 199
WINDOW = 7
CHUNK = 8

# The same size has many names. Each configuration is given those that it knows.
COMMON: Fields = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    # width and depth
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks"), 3),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "model_max_length"), 512),
    # attention
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "head_dim": 16,
    "sliding_window": WINDOW,
    "attention_chunk_size": CHUNK,
    # latents (MLA) and indexers
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 16,
    # experts
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    # recurrent layers
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("expand", "mamba_expand"), 2),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), CHUNK),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "rescale_prenorm_residual": False,
}

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_LINEAR, _CONV, _INDEXED = "linear_attention", "conv", "indexed_attention"


def _layers(*kinds: str, **fields: Any) -> Fields:
    return {"layer_types": list(kinds), **fields}


_TWO_WINDOWS = _layers(_SLIDING, _FULL, _SLIDING, _FULL)
_THREE_WINDOWS = _layers(_SLIDING, _SLIDING, _SLIDING, _FULL)
_WINDOWS_LAST = _layers(_FULL, _SLIDING, _SLIDING, _SLIDING)
_TWO_STATES = _layers(_LINEAR, _FULL, _LINEAR, _FULL)
_THREE_STATES = _layers(_LINEAR, _LINEAR, _LINEAR, _FULL)
_STATES_AND_LATENTS = _layers(_LINEAR, _LINEAR, _FULL, _FULL)
_GRANITE = {"attention_multiplier": 0.2}  # 1 is made for other weights: softmax of wide ones would be a step
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # as many heads as queries; head_dim is RoPE's

# All positions, K and V as they are.
FULL_ATTENTION: dict[str, Fields] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "gemma": {"tie_word_embeddings": True},
    "phi": {"num_key_value_heads": 4},
    "olmo": {"clip_qkv": 8.0},
    "olmo2": {},
    "olmoe": {},
    "cohere": {},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "qwen3_moe": {"use_sliding_window": False},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "smollm3": {"use_sliding_window": False},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 64},
    "gpt2": {},
    "biogpt": {},
    "gpt_bigcode": {},
    "minimax_m2": {},
    "hy_v3": {},
    "ernie4_5_moe": {"moe_layer_end_index": 2},
    "hunyuan_v1_moe": {},
    "seed_oss": {},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "stablelm": {},
    "nemotron": {},
    "persimmon": {},
}

# Windows and chunks, most of them among layers that see everything; sinks, soft caps and shared K/V on top.
WINDOWS: dict[str, Fields] = {
    "mistral": {},
    "ministral3": {},
    "mixtral": {},
    "phi3": {},
    "phimoe": {},
    "starcoder2": {},
    "gemma2": _TWO_WINDOWS | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "gemma3_text": _THREE_WINDOWS | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "gemma3n_text": _TWO_WINDOWS
    | {
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
    },
    "gemma4_text": _TWO_WINDOWS
    | {
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
    },
    "vaultgemma": _TWO_WINDOWS,
    "olmo3": _THREE_WINDOWS,
    "cohere2": _THREE_WINDOWS,
    "cohere2_moe": _THREE_WINDOWS,
    "granite_swa": _WINDOWS_LAST | _GRANITE,
    "gpt_oss": _TWO_WINDOWS,
    "qwen2_moe": _TWO_WINDOWS | {"use_sliding_window": True},
    "dots1": {"max_window_layers": 2, "num_hidden_layers": 4},
    "mimo_v2_flash": _WINDOWS_LAST,
    "exaone4": _THREE_WINDOWS,
    "exaone_moe": _THREE_WINDOWS,
    "cwm": _WINDOWS_LAST,
    "llama4_text": _layers(_CHUNKED, _CHUNKED, _CHUNKED, _FULL)
    | {
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 1, 1, 0],
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "interleave_moe_layer_step": 2,
    },
}

# K and V of attention are computed from the cached rows: latents that expand, or K and V that are changed afterwards.
LATENT_AND_DERIVED: dict[str, Fields] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "glm4_moe_lite": _LATENT,
    "minicpm3": _LATENT,
    "longcat_flash": _LATENT | {"zero_expert_num": 2},
    "dots3_note_text": _layers(_INDEXED, _INDEXED, _SLIDING, _SLIDING)
    | {
        "num_key_value_heads": 4,
        "head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 40,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 20,
    },
    "diffllama": {},
    "doge": {},
    "jetmoe": {"kv_channels": 16},
}

# Recurrent states, alone or beside attention.
STATES: dict[str, Fields] = {
    "mamba": {"time_step_rank": 8},
    "mamba2": {"num_heads": 8},
    "falcon_mamba": {"time_step_rank": 8},
    "qwen3_next": _THREE_STATES,
    "qwen3_5_text": _THREE_STATES,
    "qwen3_5_moe_text": _THREE_STATES,
    "olmo_hybrid": _THREE_STATES,
    "granitemoehybrid": _TWO_STATES | _GRANITE | {"shared_intermediate_size": 48},
    "minimax": _TWO_STATES | {"sliding_window": None, "block_size": 8},
    "kimi_linear": _STATES_AND_LATENTS | _LATENT,
    "bailing_hybrid": _STATES_AND_LATENTS | _LATENT,
    "lfm2": _layers(_CONV, _FULL, _CONV, _FULL, block_multiple_of=8),
    "lfm2_moe": _layers(_CONV, _FULL, _CONV, _FULL, num_dense_layers=1),
    "lfm3": _layers(_CONV, _CONV, _FULL, _CONV),
    "jamba": {
        "num_hidden_layers": 4,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": None,
        # transformers' modelling file uses these limits for any configuration, and its one pass is the reference.
        "time_step_limit": [0.001, float("inf")],
    },
    "zamba": {
        "num_hidden_layers": 4,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
}

# Models whose sequences cannot share a forward: attention outside transformers' interface, or K/V mixed by states.
SEQUENTIAL: dict[str, Fields] = {
    "falcon": {"new_decoder_architecture": True, "alibi": False, "num_kv_heads": 2, "multi_query": False},
    "bloom": {},
    "mpt": {},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW, "num_layers": 4},
    "codegen": {"rotary_dim": 8},
    "xglm": {},
    "hy_v4": {"num_key_value_heads": 4, "num_hidden_layers": 4},
    "inkling_text": _layers("hybrid_sliding", "hybrid_sliding", "hybrid_sliding", "hybrid")
    | {
        "sliding_window_size": WINDOW,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "d_rel": 4,
        "rel_extent": 16,
    },
    "zaya": _layers("hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid")
    | {"num_experts_per_tok": 1, "router_hidden_size": 32},
}

REFUSED: dict[str, Fields] = {
    "recurrent_gemma": {
        "num_hidden_layers": 4,
        "lru_width": 64,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv": {"attention_hidden_size": 64, "context_length": 512},
    "xlstm": {"chunk_size": 64},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "o_groups": 2,
        "o_lora_rank": 16,
    },
    # Its stacks run eight times over. With random weights they amplify rounding until the model's own cached run is
    # unrelated to its one pass. No check can distinguish that from a mistake.
    "hrm_text": {"num_hidden_layers": 8},
}

ARCHITECTURES: dict[str, Fields] = (
    FULL_ATTENTION | WINDOWS | LATENT_AND_DERIVED | STATES | SEQUENTIAL
)  # that are served

# transformers limits their time step in a prefill and not in a decode.
OWN_DECODES_ARE_WRONG = {"nemotron_h", "zamba2"}
# Their own cache cannot be filled in pieces: the first four forget the state, the last one fails.
OWN_PIECES_ARE_WRONG = {"mamba", "falcon_mamba", "jamba", "zamba", "minimax"}
