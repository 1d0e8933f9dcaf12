"""Small configurations of mlx-lm's models: for each, its fields beyond the common sizes.

They are the models of mlx-lm's own tests (tests/test_models.py of 0.32.2), and the modules that those leave out.
Windows are 7 and chunks 8 positions long, so that they slide within a few dozen tokens. Where an architecture mixes
kinds of layers, its few layers do so too.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]  # of a configuration

VOCAB = 260  # of `mlx_models.byte_tokenizer`
WINDOW = 7
CHUNK = 8

# The same size has many names. `ModelArgs.from_dict` takes those that the architecture knows.
COMMON: Fields = {
    "vocab_size": VOCAB,
    "num_vocab": VOCAB,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    **dict.fromkeys(
        ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), 1e-5
    ),
    "layernorm_epsilon": 1e-5,
    # width and depth
    **dict.fromkeys(("hidden_size", "hidden_dim", "d_model", "n_embd", "model_dim", "block_dim"), 64),
    "dim_model_base": 64,
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "n_inner", "ff_intermediate_size", "block_ff_dim"), 96
    ),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers"), 4),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "block_size", "model_max_length"), 512
    ),
    # attention
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "hidden_size_per_head"), 16),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "swa_rope_theta", "rotary_emb_base"), 10_000.0),
    "rotary_dim": 8,
    "rotary_pct": 0.5,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), WINDOW
    ),
    "attention_chunk_size": CHUNK,
    "query_pre_attn_scalar": 16,
    "use_qk_norm": True,
    # latents (MLA) and indexers
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 4,
    # experts
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"), 48),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    # recurrent layers
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv"), 4),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "use_conv_bias": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

_FULL, _SLIDING, _LINEAR, _CONV = "full_attention", "sliding_attention", "linear_attention", "conv"
_BASES = {"rope_theta": 10_000.0}


def _layers(*kinds: str) -> Fields:
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


def _text(**fields: Any) -> Fields:
    """Returns the configuration of a model whose text model has one of its own."""
    return {"text_config": COMMON | fields}


_TWO_WINDOWS = _layers(_SLIDING, _FULL, _SLIDING, _FULL)
_THREE_WINDOWS = _layers(_SLIDING, _SLIDING, _SLIDING, _FULL)
_THREE_STATES = _layers(_LINEAR, _LINEAR, _LINEAR, _FULL)
_CONVOLUTIONS = _layers(_CONV, _FULL, _CONV, _FULL)
_ROPE_BY_KIND = {"rope_parameters": {_FULL: _BASES | {"partial_rotary_factor": 0.5}, _SLIDING: _BASES}}
_ONES = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
_GRANITE = _ONES | {
    "attention_multiplier": 0.2
}  # 1 is made for other weights: softmax of wide ones would be a step
_GROUPED_EXPERTS = {"n_group": 2, "topk_group": 1}
_YARN = {
    **dict.fromkeys(("type", "rope_type"), "yarn"),
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,  # small, so that positions of the zoo are behind it
}
_LATENT_YARN = {"num_key_value_heads": 4, "rope_scaling": _YARN, "routed_scaling_factor": 1.0}
_LONGCAT = {
    "num_layers": 2,
    "zero_expert_num": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
}
_LLAMA4 = {
    "model_type": "llama4",
    "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 1,
    "attn_temperature_tuning": True,  # as in config.json; mlx-lm only asks whether it is 0
    "floor_scale": 8,
}
_GEMMA4 = _ROPE_BY_KIND | {
    "model_type": "gemma4_text",
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "sliding_window_pattern": 2,
    "num_hidden_layers": 6,
    "num_experts": None,
    **_layers(_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL),
}
_KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "short_conv_kernel_size": 4,
    },
}
_KIMI_K3 = {
    "model_type": "kimi_linear",
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
}
_MLA_TEXT = {"num_key_value_heads": 4, "routed_scaling_factor": 1.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_HUNYUAN_ROPE = {
    "type": "dynamic",
    "alpha": 1000.0,
    "factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 64,
}

# The models of mlx-lm's tests/test_models.py. Names with a remark are further models of an architecture.
ARCHITECTURES: dict[str, Fields] = {
    "Klear": {"mlp_only_layers": [0], "decoder_sparse_step": 2},
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": _THREE_WINDOWS | {"num_dense_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 4, "num_key_value_heads": 4}
    | {"routed_scaling_factor": 2.5, "rope_interleave": True},
    "bailing_moe": {},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1, "num_key_value_heads": 4},
    "bailing_moe_v3": {"moe_shared_expert_intermediate_size": 48} | _GROUPED_EXPERTS,
    "bailing_moe_v3, no latent queries": {"moe_shared_expert_intermediate_size": 48, "q_lora_rank": None},
    "bitnet": {},
    "cohere": {},
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek": {},
    "deepseek_v2": _LATENT_YARN,
    "deepseek_v3": _LATENT_YARN | _GROUPED_EXPERTS,
    "deepseek_v32": _LATENT_YARN | _GROUPED_EXPERTS,
    "deepseek_v41": {
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_hidden_layers": 6,
        "compress_ratios": (0, 2, 2, 2, 1, 1),
        "kv_source_layer_ids": (1, 4),
        "index_source_layer_ids": (1, 2, 4, 5),
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "index_head_dim": 32,
    },
    "dots1": {"routed_scaling_factor": 1.0},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone": {},
    "exaone4": {"sliding_window_pattern": "LLGL"},
    "exaone_moe": _THREE_WINDOWS | {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {},
    "gear": _layers(_SLIDING, "conv_mixer", _FULL, "conv_mixer"),
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n": _text(
        **_TWO_WINDOWS,
        model_type="gemma3n",
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        final_logit_softcapping=30.0,
        activation_sparsity_pattern=[0.5] * 4,
        altup_num_inputs=4,
        altup_coef_clip=1.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=8,
    ),
    "gemma4": _text(**_GEMMA4),
    "gemma4_text": _GEMMA4,
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5, "routed_scaling_factor": 1.0} | _GROUPED_EXPERTS,
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": _TWO_WINDOWS,
    "gptj": {},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE | _layers("mamba", "attention", "mamba", "attention"),
    "granitemoehybrid, no experts": _GRANITE
    | _layers("mamba", "attention", "mamba", "attention")
    | {"num_local_experts": None, "num_experts_per_tok": None, "shared_intermediate_size": None},
    "helium": {},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": _HUNYUAN_ROPE,
    },
    "hunyuan_v1_dense": {"rope_scaling": _HUNYUAN_ROPE},
    "internlm2": {"bias": True},
    "internlm3": {"bias": False},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW, "num_hidden_layers": 2},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_dt_rank": 8,
    },
    "kimi_k3": _text(**_KIMI_K3),
    "kimi_linear": _KIMI_LINEAR,
    "kimi_vl": _text(**_MLA_TEXT),
    "laguna": _layers(_FULL, _SLIDING, _SLIDING, _SLIDING)
    | {
        "gating": True,
        "partial_rotary_factor": 0.5,
        "num_attention_heads_per_layer": [4, 4, 4, 4],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.0,
        "rope_parameters": {
            _FULL: _YARN | _BASES | {"partial_rotary_factor": 0.5},
            _SLIDING: _BASES | {"rope_type": "default", "partial_rotary_factor": 1.0},
        },
    },
    "lfm2": {"full_attn_idxs": [1, 3], "block_multiple_of": 8}
    | {"block_ffn_dim_multiplier": 1.5}
    | {"block_auto_adjust_ff_dim": True},
    "lfm2-vl": _text(
        **_CONVOLUTIONS,
        model_type="lfm2",
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.5,
        block_auto_adjust_ff_dim=True,
    ),
    "lfm2_moe": {"full_attn_idxs": [1, 3], "num_dense_layers": 1, "use_expert_bias": True},
    "lille-130m": {},
    "llama": {},
    "llama, RoPE of llama 3": {"model_type": "llama", "rope_scaling": _LLAMA3_ROPE},
    "llama, windows": {"model_type": "llama"} | _layers(_FULL, _SLIDING, _SLIDING, _FULL),
    "llama4": _text(**_LLAMA4),
    "llama4_text": {"no_rope_layers": [0, 0, 1, 1]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba": {"intermediate_size": 128, "time_step_rank": 8},
    "mamba2": {
        "num_heads": 8,
        "intermediate_size": 128,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": "auto",
    },
    "mimo": {},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "routed_scaling_factor": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "v_head_dim": 8,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {"scale_depth": 1.0, "scale_emb": 1.0},
    "minicpm3": {
        "num_key_value_heads": 4,
        "scale_depth": 1.0,
        "scale_emb": 1.0,
        "rope_scaling": {
            "original_max_position_embeddings": 512,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    },
    "minimax": {"num_key_value_heads": 4},
    "minimax_m3_vl": _text(moe_layer_freq=[0, 0, 1, 1]),
    "minimax_m3_vl, sparse": _text(
        moe_layer_freq=[0, 0, 1, 1],
        sparse_attention_config={
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 3,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 0, 1],
        },
    )
    | {"model_type": "minimax_m3_vl"},
    "mistral4": _LATENT_YARN
    | {"qk_head_dim": 24, "head_dim": 24}
    | {"rope_parameters": _YARN | _BASES | {"llama_4_scaling_beta": 0.1}},
    "mixtral": {},
    "muse_glimmer": _THREE_WINDOWS | {"layer_rope_theta": [100.0, 100.0, 100.0, 0]},
    "nanbeige": {"num_loops": 2, "num_hidden_layers": 2},
    "nanochat": {"num_key_value_heads": 4},
    "nemotron": {"hidden_act": "gelu"},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": no_op, "replace_with_linear": linear},
                "ffn": {"ffn_mult": 1.3125, "no_op": False, "replace_with_linear": False},
            }
            for no_op, linear in ((False, False), (True, False), (False, True), (False, False))
        ]
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["*", "M", "-", "E", "*", "M"],
        "num_hidden_layers": 6,
        "time_step_limit": (0.001, 100.0),
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 1.0,
    },
    "olmo2": {},
    "olmo3": {"num_key_value_heads": 4, **_THREE_WINDOWS},
    "olmo_hybrid": _THREE_STATES | {"linear_allow_neg_eigval": True},
    "olmoe": {},
    "openelm": {
        "ffn_dim_divisor": 16,
        "ffn_multipliers": [1.0, 1.5, 1.5, 2.0],
        "normalize_qk_projections": True,
        "num_kv_heads": [1, 1, 2, 2],
        "num_query_heads": [2, 2, 4, 4],
        "num_transformer_layers": 4,
    },
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {},
    # Its code hides tokens with ids up to 100,351.
    "phi3small": {"vocab_size": 100_352, "dense_attention_every_n_layers": 2, "gegelu_limit": 1.0},
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0 + 0.1 * i for i in range(8)],
            "short_factor": [1.0] * 8,
            "long_mscale": 1.24,
            "short_mscale": 1.24,
            "original_max_position_embeddings": 4096,
        }
    },
    "phixtral": {},
    "pixtral": _text(model_type="llama"),
    "plamo": {"n_shared_head": 2},
    "plamo2": {},
    "plamo3": {"sliding_window_pattern": 2, "sliding_window": None},
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "gdn_activation_layout": "grouped",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.embed_tokens", "block": 512, "embedding": True, "dtype": "float16"},
            {
                "path": "model.layers.0.linear_attn.in_proj_qkv",
                "block": 512,
                "embedding": False,
                "dtype": "float16",
            },
            {"path": "model.layers.2.mlp.down_proj", "block": 0, "embedding": False, "dtype": "float16"},
        ],
        **_text(model_type="qwen3_5", num_experts=0, hidden_size=512, intermediate_size=128),
    },
    "qwen": {"no_bias": True},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3, RoPE by its newer name": {
        "model_type": "qwen3",
        "rope_parameters": _BASES | {"rope_type": "default"},
    },
    "qwen3_5": _text(model_type="qwen3_5", num_experts=0),
    "qwen3_5_moe": _text(model_type="qwen3_5_moe"),
    "qwen3_moe": {},
    "qwen3_next": {"partial_rotary_factor": 0.5, "full_attention_interval": 2},
    "qwen3_vl": _text(model_type="qwen3"),
    "qwen3_vl_moe": _text(model_type="qwen3_moe"),
    "recurrent_gemma": {
        "conv1d_width": 3,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_hidden_layers": 6,
    },
    "rwkv7": dict.fromkeys(
        ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 16
    ),
    "seed_oss": {},
    "smollm3": {},
    "spark2_5": _THREE_WINDOWS
    | _ROPE_BY_KIND
    | {"hidden_act": "gelu", "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True},
    "stablelm": {"use_qkv_bias": False, "partial_rotary_factor": 1.0},
    "stablelm, version 2": {"model_type": "stablelm", "use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "starcoder2": {},
    "step3p5": _layers(_FULL, _SLIDING, _SLIDING, _FULL)
    | {
        "rope_theta": [10_000.0] * 4,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "use_head_wise_attn_gate": True,
        "moe_layers_enum": "1,2,3",
        "moe_router_scaling_factor": 3.0,
        "norm_expert_weight": True,
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {"num_key_value_heads": 4},
}

# Further modules of mlx-lm that its tests/test_models.py does not build.
UNTESTED: dict[str, Fields] = {
    "gemma3": _text(model_type="gemma3_text", sliding_window_pattern=2),
    "glm_moe_dsa": _LATENT_YARN
    | _GROUPED_EXPERTS
    | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": _YARN | _BASES,
    },
    "kimi_k25": _text(**_MLA_TEXT),
    "mellum": _TWO_WINDOWS | _ROPE_BY_KIND,
    "ministral3": _TWO_WINDOWS | {"rope_parameters": _YARN | _BASES | {"llama_4_scaling_beta": 0.1}},
    "mistral3": _text(model_type="llama"),
    "muse_spark": _text(
        **_THREE_WINDOWS,
        post_norm_eps=1e-5,
        rope_parameters=_BASES,
        layer_rope_theta=[100.0, 100.0, 100.0, 0],
        final_logit_softcapping=20.0,
        output_multiplier=0.2,
        moe_hidden_size=64,
        num_shared_experts=0,
    ),
    "qwen2_vl": _text(model_type="qwen2"),
    "solar_open": {"routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5},
}
