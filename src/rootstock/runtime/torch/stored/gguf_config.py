"""Configuration of a model by the metadata of its GGUF file: what transformers makes of it, and what it passes over.

A forward depends on rotations, windows, scales and widths. A key that neither transformers nor this module reads is
refused by its name.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config

from rootstock.errors import ModelUnsupported, shown
from rootstock.runtime.gguf_files import GgufTensor
from rootstock.runtime.model_files import in_one_line

# Exceptions of readers that meet broken or hostile metadata.
INVALID = (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, OSError, struct.error)


def configs_of(
    model: str, file: Path, metadata: Mapping[str, Any], tensors: Sequence[GgufTensor]
) -> dict[str, dict[str, Any]]:
    """Returns the fields of config.json and generation_config.json. Raises ModelUnsupported or ModelFileInvalid."""
    architecture = metadata["general.architecture"]
    try:
        config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    except Exception as error:  # the code that makes a configuration checks it, and may raise anything
        said = in_one_line(error)
        reason = f"transformers does not read GGUF files of the architecture {shown(architecture)}: {said}"
        raise ModelUnsupported(model, reason) from error
    fields = config.to_dict()
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    _Completed(model, fields, own, shapes, _read_keys(architecture, metadata, shapes)).complete(tensors)
    fields.pop("_name_or_path", None)
    own_ends = fields.get("eos_token_id")
    ends = own_ends if isinstance(own_ends, list) else [own_ends]
    ends += [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(end for end in ends if type(end) is int))
    sampling = {
        key.removeprefix("general.sampling.").replace("temp", "temperature"): value
        for key, value in metadata.items()
        if key in ("general.sampling.temp", "general.sampling.top_k", "general.sampling.top_p")
    }
    generation = {
        "eos_token_id": ids,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        **sampling,
    }
    if sampling:
        generation["do_sample"] = True
    return {"config.json": fields, "generation_config.json": {k: v for k, v in generation.items() if v}}


def _read_keys(architecture: str, metadata: Mapping[str, Any], names: Mapping[str, object]) -> set[str]:
    """Returns the keys of an architecture that transformers reads, without their prefix."""
    if architecture in GGUF_CONFIG_ARCHS:
        asked = _ReadMetadata(metadata)
        get_gguf_config(asked, tuple(names))
        return {key.removeprefix(f"{architecture}.") for key in asked.keys_read}
    name = {
        "qwen2moe": "qwen2_moe",
        "qwen3moe": "qwen3_moe",
        "gpt-oss": "gpt_oss",
        "minimax-m2": "minimax_m2",
    }
    mapping = GGUF_CONFIG_MAPPING.get(name.get(architecture, architecture), {})
    return {key for key, field in mapping.items() if field is not None}


class _ReadMetadata(dict[str, Any]):
    """Metadata that notes which keys are read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


# Fields of a configuration by keys that transformers passes over. A configuration without the field refuses the key.
_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "final_logit_softcapping": "final_logit_softcapping",
}
_OF_OTHER_MEDIA = ("vision.", "audio.", "mm.")
# Texts of control tokens that end a turn. A file names one or two ends, and llama.cpp finds the others by their text.
ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<|end_of_turn|>", "<|return|>", "<|call|>", "<EOT>"),
)
# Keys that repeat what tensors or other keys say.
_REPEATED = {"block_count", "context_length", "feed_forward_length", "vocab_size"}
# Keys that change nothing where they have this value.
_NEUTRAL = {
    "attention.causal": True,
    "expert_group_count": 1,
    "expert_weights_scale": 1.0,
    "rope.scaling.type": "none",
    "expert_count": 0,
    "expert_used_count": 0,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
    "attention.max_alibi_bias": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}


class _Completed:
    """Configuration that transformers made of a GGUF file's metadata, with what it has passed over."""

    def __init__(
        self,
        model: str,
        fields: dict[str, Any],
        own: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        read: set[str],
    ) -> None:
        self._model, self._fields, self._shapes = model, fields, shapes
        self._left = {key: value for key, value in own.items() if key not in read}
        self._own = own

    def complete(self, tensors: Sequence[GgufTensor]) -> None:
        """Sets the fields. Raises ModelUnsupported for a key that nothing reads."""
        self._set_heads()
        self._set_scale()
        self._set_rotation(tensors)
        self._set_biases()
        for key, value in self._left.items():
            if _NEUTRAL.get(key) == value or key in _REPEATED or key.startswith(_OF_OTHER_MEDIA):
                continue
            field = _FIELDS.get(key)
            if field is None or field not in self._fields:
                raise self._refusal(f"{key} is {shown(value)}, which transformers does not read")
            no_window = key == "attention.sliding_window" and value == 0  # of Phi-4
            self._fields[field] = None if no_window else value

    def _refusal(self, reason: str) -> ModelUnsupported:
        return ModelUnsupported(
            self._model, f"its GGUF metadata cannot be served as it is: {reason}. {_REMEDY}"
        )

    def _take(self, key: str) -> Any:
        self._left.pop(key, None)
        return self._own.get(key)

    def _set_heads(self) -> None:
        """Sets the width of heads, and how much of it is rotated."""
        width, of_values = self._take("attention.key_length"), self._take("attention.value_length")
        if width is not None and of_values not in (None, width):
            raise self._refusal(f"keys of {width} and values of {of_values} numbers")
        heads = self._fields.get("num_attention_heads")
        if width is not None and "head_dim" in self._fields:
            self._fields["head_dim"] = width
        elif (
            width is not None
            and heads
            and width * heads != self._fields.get("hidden_size")
            and "global_head_dim" not in self._fields
        ):
            raise self._refusal(f"heads of {width} numbers, which its architecture does not have")
        rotated = self._take("rope.dimension_count")
        whole = self._fields.get("head_dim") or (heads and self._fields["hidden_size"] // heads)
        if rotated is None or rotated in (whole, self._fields.get("global_head_dim")):
            return
        parameters = self._fields.get("rope_parameters") or {}
        for holder in (self._fields, parameters):
            if "partial_rotary_factor" in holder:
                holder["partial_rotary_factor"] = rotated / whole
                return
        raise self._refusal(f"{rotated} of {whole} numbers of a head are rotated")

    def _set_scale(self) -> None:
        """Sets the scale of attention scores. llama.cpp knows Gemma 2 and 3 of 27B by the number of layers."""
        if self._fields.get("query_pre_attn_scalar") is None:
            return
        width, of_27b = self._fields["head_dim"], {"gemma2": 46, "gemma3_text": 62}
        if self._fields["num_hidden_layers"] == of_27b.get(self._fields["model_type"]):
            width = self._fields["hidden_size"] // self._fields["num_attention_heads"]
        self._fields["query_pre_attn_scalar"] = width

    def _set_rotation(self, tensors: Sequence[GgufTensor]) -> None:
        """Sets the scaling of rotary positions: of long contexts, and by a factor for each frequency."""
        kind = self._take("rope.scaling.type")
        factor = self._take("rope.scaling.factor")
        original = self._take("rope.scaling.original_context_length")
        attention = self._take("rope.scaling.attn_factor")
        self._take("rope.scaling.finetuned")
        betas = {of: self._take(f"rope.scaling.yarn_{of}") for of in ("beta_fast", "beta_slow")}
        by_name = {tensor.name: tensor for tensor in tensors}
        parameters = self._fields.get("rope_parameters")
        local = self._take("rope.freq_base_swa")
        if local is not None:
            if not isinstance(parameters, dict) or "sliding_attention" not in parameters:
                raise self._refusal("its windows have rotary positions of their own")
            parameters["sliding_attention"]["rope_theta"] = local
        factors = [by_name.get(f"rope_factors_{which}.weight") for which in ("short", "long")]
        whole = by_name.get("rope_freqs.weight")
        longest = self._fields.get("max_position_embeddings")
        scaling: dict[str, Any] = {}
        if whole is not None:
            values = _numbers(whole)
            scaling = {"rope_type": "longrope", "short_factor": values, "long_factor": values}
            scaling |= {"attention_factor": 1.0, "original_max_position_embeddings": longest}
        elif factors[0] is not None and factors[1] is not None:
            scaling = {"rope_type": "longrope", "short_factor": _numbers(factors[0])}
            scaling |= {
                "long_factor": _numbers(factors[1]),
                "original_max_position_embeddings": original or longest,
            }
            if attention is not None:
                scaling["attention_factor"] = attention
        elif kind == "linear" and factor is not None:
            scaling = {"rope_type": "linear", "factor": factor}
        elif kind == "yarn" and factor is not None:
            first = original or int(longest / factor)
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": first}
            scaling |= {of: beta for of, beta in betas.items() if beta is not None}
        elif kind not in (None, "none"):
            raise self._refusal(f"rope.scaling.type is {shown(kind)}")
        if attention not in (None, 1.0) and "short_factor" not in scaling:
            raise self._refusal(f"rope.scaling.attn_factor is {shown(attention)}")
        if not scaling:
            return
        if not isinstance(parameters, dict):
            raise self._refusal("its rotary positions are scaled")
        by_layer = any(isinstance(inner, dict) for inner in parameters.values())
        if by_layer and "full_attention" not in parameters:
            raise self._refusal("its rotary positions are scaled, and differ by layer")
        (parameters["full_attention"] if by_layer else parameters).update(scaling)  # windows are never scaled

    def _set_biases(self) -> None:
        """Sets what tensors show: linear layers with biases."""
        for field, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
            if field in self._fields:
                self._fields[field] = tensor in self._shapes


_REMEDY = "Serve the model from which it was made, in safetensors"


def _numbers(tensor: GgufTensor) -> list[float]:
    if tensor.dtype != "F32":
        raise ValueError(f"{tensor.name} is {tensor.dtype}")
    count = tensor.nbytes // 4
    return [float(n) for n in np.fromfile(tensor.file, np.float32, count, offset=tensor.offset)]
