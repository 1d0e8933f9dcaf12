"""Kinds of layers that a model's configuration declares."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.cache_utils import get_layer_types_and_kwargs

from rootstock.runtime.torch.hooks import LayerUnsupported

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
    if getattr(config, "num_hidden_layers", None) is None:
        raise LayerUnsupported("declares no decoder of text", module=type(model).__name__)
    if any(getattr(each, "is_encoder_decoder", False) for each in (config, model.config)):
        raise LayerUnsupported(
            "has an encoder, and only decoders are served",
            module=f"{type(model).__name__} (of {layer_class(model, 0)})",
        )
    for index, kind in enumerate(declared_kinds(config)):
        if kind not in _KNOWN_KINDS:
            raise LayerUnsupported(
                f"is of kind {kind!r}, which this version does not know",
                module=f"({layer_class(model, index)})",
                layer=index,
            )


def declared_kinds(config: Any) -> list[str]:
    """Returns transformers' name of each layer's kind of memory."""
    kinds, _ = get_layer_types_and_kwargs(config)
    return list(kinds)


def text_config(model: nn.Module) -> Any:
    """Returns the decoder's configuration, which may be the whole model's."""
    return model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]


def layer_class(model: nn.Module, index: int) -> str:
    """Returns the class name of a decoder layer. The outermost list with that many modules is the stack of layers."""
    layers = len(declared_kinds(text_config(model)))
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return type(module[index]).__name__
    return type(model).__name__
