"""Declarations of a model's configuration: kinds of layers, context limit and RoPE regime."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.cache_utils import get_layer_types_and_kwargs

from rootstock.runtime.torch.hooks import LayerUnsupported

_UNLIMITED = 1 << 20  # positions, for a model that declares no limit (ALiBi, recurrent models)

NO_MEMORY = "dummy"  # transformers' name for a layer that keeps no cache

# transformers' kinds of layers whose memory is K and V, indexer keys, or states. Running a layer shows which of these
# it keeps and which positions it sees. A kind that is not listed keeps something that this version does not know.
_KNOWN_KINDS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    NO_MEMORY,
}


def refuse_unknown_kinds(model: nn.Module) -> None:
    """Raises LayerUnsupported if the configuration alone shows it. The model may be on the meta device."""
    config = text_config(model)
    for index, kind in enumerate(declared_kinds(config)):
        if kind not in _KNOWN_KINDS:
            raise LayerUnsupported(
                f"is of kind {kind!r}, which this version does not know",
                module=f"({layer_class(model, index)})",
                layer=index,
            )
    if getattr(config, "is_encoder_decoder", False):
        raise LayerUnsupported(
            "has an encoder, and only decoders are served",
            module=f"{type(model).__name__} (of {layer_class(model, 0)})",
        )


def declared_kinds(config: Any) -> list[str]:
    """Returns transformers' name of each layer's kind of memory."""
    kinds, _ = get_layer_types_and_kwargs(config)
    return list(kinds)


def text_config(model: nn.Module) -> Any:
    """Returns the decoder's configuration, which may be that of the whole model."""
    return model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]


def layer_class(model: nn.Module, index: int) -> str:
    """Returns the class name of a decoder layer. The outermost list with that many modules is the stack of layers."""
    layers = len(declared_kinds(text_config(model)))
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return type(module[index]).__name__
    return type(model).__name__


def context_limit(config: Any) -> tuple[int, str]:
    """Returns (positions that the model can serve, RoPE regime or "").

    RoPE of type "dynamic" and "longrope" takes its frequencies from the longest sequence of a forward. A short
    sequence packed with a long one would get wrong frequencies, and cached K would be wrong. Such models are served
    up to the length at which the frequencies begin to change. The regime keeps their cached K apart from that of
    other regimes.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or _UNLIMITED)
    regimes = []
    for parameters in _rope_parameters(config):
        kind = str(parameters.get("rope_type", "default"))
        if kind == "longrope":
            fixed = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, int(fixed or limit))
        elif "dynamic" not in kind:
            continue
        regimes.append(kind)
    return limit, ",".join(f"{kind}<={limit}" for kind in sorted(set(regimes)))


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Returns RoPE's parameters: one set, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return []
    nested = [inner for inner in parameters.values() if isinstance(inner, dict)]
    return nested or [parameters]
