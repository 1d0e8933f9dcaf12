"""Exports small models of many architectures to OpenVINO's graphs, with logits of transformers in float32.

For an interpreter that has optimum-intel, whose versions of transformers differ from Rootstock's: `PYTHON
openvino_exports.py FOLDER [ARCHITECTURE …]`. Each architecture gets a folder; one that these versions do not export
is named with the reason. Weights are random, and four times as large as usual: each layer shows in the logits.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

REFERENCE = "reference.npz"  # ids [tokens] and logits [tokens, vocab]
TOKENS, VOCABULARY, WINDOW = 100, 96, 40
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {},
    "cohere2": _WINDOWS,
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_shared_experts": 1,
    },
    "exaone4": _WINDOWS,
    "falcon": {"alibi": False, "new_decoder_architecture": False},
    "gemma": _HEAD,
    "gemma2": _HEAD | {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": _HEAD | _WINDOWS,
    "glm4": _HEAD,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "gpt_oss": _HEAD | _LOCAL_EXPERTS | _WINDOWS,
    "granite": {},
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoehybrid": {
        "num_local_experts": 0, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_n_groups": 1, "shared_intermediate_size": 48,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": _LOCAL_EXPERTS | {"sliding_window": None},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": _HEAD,
    "qwen3_5_text": _HEAD | _DELTA,
    "qwen3_moe": _HEAD | _EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_next": _HEAD | _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 16},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
}  # fmt: skip


def export(architecture: str, folder: Path) -> None:
    """Exports a model with random weights. Raises whatever the libraries raise."""
    import torch
    from optimum.exporters.openvino import export_from_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **(_COMMON | ARCHITECTURES[architecture]))
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
    ids = np.random.default_rng(5).integers(3, VOCABULARY, (1, TOKENS))
    with torch.inference_mode():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(4)
        logits = model(torch.from_numpy(ids)).logits[0].float().numpy()
    export_from_model(model, output=folder, task="text-generation-with-past", stateful=True, device="cpu")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    np.savez_compressed(folder / REFERENCE, ids=ids[0].astype(np.int32), logits=logits)


def main(arguments: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    folder = Path(arguments[0])
    for architecture in arguments[1:] or ARCHITECTURES:
        if (folder / architecture / REFERENCE).exists():
            continue
        try:
            export(architecture, folder / architecture)
            print(f"{architecture}: exported", flush=True)
        except Exception as error:  # whatever the libraries raise
            print(f"{architecture}: {' '.join(str(error).split())[:160]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
