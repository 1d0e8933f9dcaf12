"""GGUF files of small models, written by the `gguf` package as llama.cpp's converter does, and their plain twins.

Blocks of quantized weights are random: their numbers are what the package unpacks, and the twin gets these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoints import SIMPLE_TEMPLATE, tiny_model

Array = NDArray[Any]
Kinds = Callable[[str], str]
"""Names the type of a tensor with inputs by its name in the file."""

TOKENS = 320
SIZES: Mapping[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 512},
    "qwen2": {"hidden_size": 256, "intermediate_size": 512},
    "qwen3": {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True},
    "phi3": {"hidden_size": 256, "intermediate_size": 512, "pad_token_id": 256},
    "gemma3_text": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
    "lfm2": {"hidden_size": 256, "intermediate_size": 512, "block_auto_adjust_ff_dim": False},
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 256, "norm_topk_prob": True},
    "qwen3_5_text": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_value_head_dim": 64,
    },
}
_ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35"}
_HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)}
_HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "IQ4_NL": (0,)}


def mixed(name: str) -> str:
    """Q4_K_M: types differ by tensor."""
    if name.startswith(("output", "token_embd")) or "attn_v" in name or "ffn_down" in name:
        return "Q6_K"
    return "Q4_K"


def random_blocks(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Returns blocks of any codes, whose numbers have about the deviation of a weight with so many inputs."""
    qtype = gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[qtype]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    first, *second = _HALVES[kind]

    def put(scales: Array) -> Array:
        halves = scales.astype(np.float16)
        blocks[..., first : first + 2] = halves[..., None].view(np.uint8)
        for at in second:  # a minimum that puts the middle of all codes near zero
            blocks[..., at : at + 2] = (halves * _MIDDLES[kind]).astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(*shape[:-1], -1)

    deviation = gguf.dequantize(put(np.ones(blocks.shape[:-1])), qtype).std()
    return put(random.uniform(0.8, 1.2, blocks.shape[:-1]) * 0.5 / np.sqrt(shape[-1]) / deviation)


_MIDDLES = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}


@dataclass(frozen=True)
class Part:
    """Tensor of a file: a selection of a parameter, and what the converter does with its numbers."""

    name: str
    index: tuple[Any, ...] = (...,)
    forward: Callable[[Array], Array] = lambda array: array


def save_gguf(
    directory: Path, model_type: str, kinds: Kinds, seed: int = 0, shards: int = 0, **overrides: Any
) -> tuple[Path, Path]:
    """Saves a GGUF file and a directory of the same numbers in float32. Returns both."""
    fields = {"vocab_size": TOKENS, **SIZES[model_type], **overrides}
    model: Any = tiny_model(model_type, seed, **fields)
    config = model.config
    architecture = _ARCHITECTURES.get(model_type, model_type)
    file = directory / f"{model_type}.gguf"
    directory.mkdir(parents=True, exist_ok=True)
    split = {"split_max_tensors": shards, "small_first_shard": False} if shards else {}
    writer = gguf.GGUFWriter(file, architecture, **split)
    add_settings(writer, config, architecture)
    add_tokenizer(writer)
    random = np.random.default_rng(seed)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    if config.rope_parameters.get("rope_type") == "llama3":
        own, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        width = config.head_dim
        plain_frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        writer.add_tensor("rope_freqs.weight", (plain_frequencies / own).numpy())
    for name, tensor in state.items():
        for part in parts_of(model_type, name, tensor, config, names):
            _add(writer, part, tensor, kinds, random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = directory / "plain"
    model.load_state_dict(state, strict=False)
    model.save_pretrained(plain)
    if shards:
        file = sorted(directory.glob("*-00001-of-*.gguf"))[0]
    return file, plain


def _add(
    writer: gguf.GGUFWriter, part: Part, tensor: Tensor, kinds: Kinds, random: np.random.Generator
) -> None:
    """Adds a tensor, and writes the numbers that the file has of it back to the parameter."""
    numbers = tensor.numpy()
    chosen = numbers[part.index]
    array = np.ascontiguousarray(part.forward(chosen), np.float32)
    kind = kinds(part.name) if array.ndim > 1 and part.forward(chosen).shape == chosen.shape else "F32"
    if kind == "F32":
        writer.add_tensor(part.name, array)
        return
    qtype = gguf.GGMLQuantizationType[kind]
    if kind in ("F16", "BF16") or array.shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0]:
        qtype = qtype if kind in ("F16", "BF16") else gguf.GGMLQuantizationType.F16
        data = gguf.quantize(array, qtype)
    else:
        data = random_blocks(kind, array.shape, random)
    numbers[part.index] = gguf.dequantize(data, qtype).reshape(array.shape)
    writer.add_tensor(part.name, data, raw_dtype=qtype)


# ---- names, and what the converter does with rows


def parts_of(model_type: str, name: str, tensor: Tensor, config: Any, names: Any) -> list[Part]:
    """Returns the tensors of a file that hold a parameter."""
    if model_type == "qwen3_5_text" and (special := _of_qwen35(name, tensor, config)):
        return special
    if ".experts." in name:
        prefix = f"blk.{name.split('.')[2]}.ffn"
        if name.endswith("down_proj"):
            return [Part(f"{prefix}_down_exps.weight")]
        half = tensor.shape[1] // 2
        return [
            Part(f"{prefix}_gate_exps.weight", (slice(None), slice(0, half))),
            Part(f"{prefix}_up_exps.weight", (slice(None), slice(half, None))),
        ]
    stem, _, end = name.rpartition(".")
    found = names.get_name(stem)
    assert found is not None, name
    own = f"{found}.{end}"
    if model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        rows = np.arange(len(tensor)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)  # halves to neighbours
        return [Part(own, (rows,))]
    if model_type == "gemma3_text" and name.endswith("norm.weight"):
        return [Part(own, forward=lambda array: array + 1)]
    if name.endswith("conv.conv.weight"):
        return [Part(own, forward=lambda array: array.squeeze(1))]
    return [Part(own)]


def _of_qwen35(name: str, tensor: Tensor, config: Any) -> list[Part]:
    """Value heads are stored tiled, norms with one added, and time constants as -exp."""
    keys, values, width = (
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_value_head_dim,
    )

    def tiled(each: int) -> Array:
        return np.arange(values * each).reshape(keys, values // keys, each).swapaxes(0, 1).reshape(-1)

    layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    before = 2 * keys * config.linear_key_head_dim
    behind = np.concatenate([np.arange(before), before + tiled(width)])
    plus_one = {
        "model.norm.weight": "output_norm.weight",
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "q_norm.weight": "attn_q_norm.weight",
        "k_norm.weight": "attn_k_norm.weight",
    }
    others = {
        "A_log": Part("ssm_a", (tiled(1),), lambda array: -np.exp(array)),
        "dt_bias": Part("ssm_dt.bias", (tiled(1),)),
        "in_proj_a.weight": Part("ssm_alpha.weight", (tiled(1),)),
        "in_proj_b.weight": Part("ssm_beta.weight", (tiled(1),)),
        "in_proj_z.weight": Part("attn_gate.weight", (tiled(width),)),
        "in_proj_qkv.weight": Part("attn_qkv.weight", (behind,)),
        "conv1d.weight": Part("ssm_conv1d.weight", (behind,), lambda array: array.squeeze(1)),
        "out_proj.weight": Part("ssm_out.weight", (slice(None), tiled(width))),
        "linear_attn.norm.weight": Part("ssm_norm.weight"),
    }
    for end, own in plus_one.items():
        if name.endswith(end):
            return [Part(layer + own, forward=lambda array: array + 1)]
    for end, part in others.items():
        if name.endswith(end):
            return [Part(layer + part.name, part.index, part.forward)]
    return []


# ---- metadata


def add_settings(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    parameters = config.rope_parameters
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    writer.add_rope_freq_base(parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    kinds = getattr(config, "layer_types", None)
    if architecture == "lfm2":
        kv = config.num_key_value_heads
        writer.add_head_count_kv([kv if kind == "full_attention" else 0 for kind in kinds])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(int(width * parameters.get("partial_rotary_factor", 1.0)))
    if architecture in ("gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "num_experts", 0):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen35":
        writer.add_uint32("qwen35.full_attention_interval", kinds.index("full_attention") + 1)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        pairs = int(width * parameters.get("partial_rotary_factor", 1.0)) // 2
        sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0]
        writer.add_array("qwen35.rope.dimension_sections", sections)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Adds a byte-level vocabulary, with tokens of turns and one that a person added."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), "<|end|>", "<|im_end|>", "<think>", "he", "ll"]
    control = ("<|end|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>")
    tokens += [token for token in control if token not in tokens]
    tokens += [f"<unused{i}>" for i in range(TOKENS - len(tokens))]
    kinds = gguf.TokenType
    types = [
        kinds.CONTROL
        if token in control
        else kinds.USER_DEFINED
        if token == "<think>"
        else kinds.UNUSED
        if token.startswith("<unused")
        else kinds.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_eot_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(SIMPLE_TEMPLATE)


def exact_model(plain: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
