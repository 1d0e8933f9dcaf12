"""Small models of text and images with random weights: every class that transformers knows, by shrinking its
configuration's defaults.

Sizes are found by the names of fields, the same ones in all configurations.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from twins.architectures import ARCHITECTURES, COMMON, VOCAB

WRAPPERS = tuple(sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))

# Sizes by names of fields: the first pattern that matches counts.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(^|_)vocab_size$|^vocab_size", VOCAB),
    (r"^(num_key_value_heads|num_kv_heads|n_kv_heads)$", 2),
    (r"num_.*heads$|^n_?heads?$|attention_heads$|^num_head$", 4),
    (r"per_tok$|top_k_experts$|experts_top_k$|^moe_topk$", 2),
    (r"^(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts)$", 4),
    (r"^(depth|num_hidden_layers|num_layers|n_layers?|.*_layers|layers|depths)$", 2),
    (r"intermediate_size$|ffn_dim$|mlp_dim$|inner_dim$|n_inner$|d_ff$|encoder_ffn_dim", 96),
    (r"^(head_dim|attention_head_dim|v_head_dim|d_kv)$", 16),
    (r"hidden_size$|d_model$|embed_dim$|^dim$|n_embd$|embedding_dim$|hidden_dim$|projection_dim$", 64),
    (r"^(max_position_embeddings|n_positions)$", 512),
)

# Fields by the type of a configuration, or of one inside it, that no rule finds.
_ROTATIONS = {"rope_type": "default", "rope_theta": 10_000.0}
_LATENTS = {"qk_rope_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4}
_FIELDS: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": VOCAB - 1}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROTATIONS, "sliding_attention": _ROTATIONS},
    },
    "cosmos3_edge_text": {"hidden_size": 512, "head_dim": 128},
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "head_dim": 16,
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"num_hidden_layers": 42, "adapter_in_dim": 64, "adapter_out_dim": 64},
    "emu3": {"vocabulary_map": {"<image>": VOCAB - 1}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48],
        "moe_num_experts": 4,
        "moe_k": 2,
        "hidden_size": 512,
    },
    "glm4v_moe_text": {"hidden_size": 512},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "4/8",
    },
    "hunyuan_vl_text": {"rope_parameters": _ROTATIONS | {"xdrope_section": [2, 2, 2, 2]}},
    "mistral4": _LATENTS,
    "mistral_large4_text": _LATENTS,
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "paddleocr_vl_text": {"head_dim": 128},
    "radio": {"video_temporal_patch_size": 2},
}
# Models whose rotations have sections for time, height and width that make up heads of so many numbers.
_WIDTHS = {"glm": 64, "qwen2": 128}
_OF_THREE_AXES = ("glm4v", "glm46v", "glm_ocr", "glmga", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni")

# Classes that checkpoints declare where transformers' table names another.
_CLASSES = {"shieldgemma2": "ShieldGemma2ForImageClassification"}


def shrunk(config: Any) -> Any:
    """Returns a configuration of the same kind with small sizes."""
    known, own = config.to_dict(), vars(config)
    declared = ARCHITECTURES.get(config.model_type, {})
    fields: dict[str, Any] = {}
    for name, value in known.items():
        inner = own.get(name)
        if isinstance(inner, PreTrainedConfig):
            fields[name] = shrunk(inner).to_dict()
        elif type(value) is int:
            size = next((size for pattern, size in _SIZES if re.search(pattern, name)), None)
            if size is not None and value > size:
                fields[name] = size
            elif name.endswith(("token_id", "token_index")) and value >= VOCAB:
                fields[name] = VOCAB - 1
    if declared or "num_key_value_heads" in known:
        fields |= {name: value for name, value in COMMON.items() if name in known} | declared
        fields = {name: value for name, value in fields.items() if value is not None}
        if "layer_types" in fields:
            fields["num_hidden_layers"] = len(fields["layer_types"])
    if config.model_type.startswith(_OF_THREE_AXES) and "num_attention_heads" in known:
        fields["hidden_size"] = 4 * next(
            width for of, width in _WIDTHS.items() if config.model_type.startswith(of)
        )
    return type(config)(**fields | _FIELDS.get(config.model_type, {}))


def tiny_wrapper(model_type: str, seed: int = 0) -> Any:
    """Returns a model in float32."""
    config = shrunk(AutoConfig.for_model(model_type))
    torch.manual_seed(seed)
    of = _CLASSES.get(model_type, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])
    return getattr(transformers, of)._from_config(config, dtype=torch.float32).eval()
