"""What a model is made of: what its configuration declares, and what one small forward shows.

A layer kind that is not known to be served is refused, with the layer's class. Nothing is treated as full
attention because nobody said otherwise.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import get_layer_types_and_kwargs

from rootstock.kernels.scores import Scores
from rootstock.kernels.torch_gather import attend_dense
from rootstock.runtime.torch_hooks import HookedCache, LayerUnsupported, MaskPattern, mark
from rootstock.runtime.torch_pool import LayerShape

_PROBE_TOKENS = 3
_UNLIMITED = 1 << 20  # positions, for a model that declares no limit (ALiBi)

_FULL = "full_attention"
_NO_MEMORY = "dummy"  # transformers' word for a layer that keeps nothing of its own

# What models pass to attention and what changes nothing in it, or is said by the mask as well.
_HARMLESS = {
    "cache_position",
    "is_causal",
    "layer_idx",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "training",
    "use_cache",
}


def refuse_unless_packable(model: nn.Module) -> None:
    """Raises LayerUnsupported for what can be told without a forward; the model may be on the meta device."""
    config = text_config(model)
    kinds = declared_kinds(config)
    for index, kind in enumerate(kinds):
        if kind not in (_FULL, _NO_MEMORY):
            raise LayerUnsupported(
                f"is of kind {kind!r}, and this version serves full attention only",
                module=f"({layer_class(model, index)})",
                layer=index,
            )
    name = f"{type(model).__name__} (of {layer_class(model, 0)})"
    if getattr(config, "is_encoder_decoder", False):
        raise LayerUnsupported("has an encoder, and only decoders are served", module=name)
    if not model._can_set_attn_implementation():  # type: ignore[operator]  # a PreTrainedModel's
        raise LayerUnsupported(
            "does not call attention through transformers' AttentionInterface, so sequences cannot be packed",
            module=name,
        )
    parameters = inspect.signature(type(model).forward).parameters
    for needed in ("past_key_values", "position_ids"):
        if needed not in parameters:
            raise LayerUnsupported(f"takes no {needed}, so sequences cannot be packed", module=name)


def declared_kinds(config: Any) -> list[str]:
    """transformers' name for each layer's kind of memory."""
    kinds, _ = get_layer_types_and_kwargs(config)
    return list(kinds)


def text_config(model: nn.Module) -> Any:
    """The decoder's configuration; that of the whole model if it is nothing else."""
    return model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]


def layer_class(model: nn.Module, index: int) -> str:
    """The class of the decoder's layer. The outermost list of that many modules is the stack of layers."""
    layers = len(declared_kinds(text_config(model)))
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return type(module[index]).__name__
    return type(model).__name__


@dataclass(frozen=True, slots=True)
class Probed:
    layers: tuple[LayerShape, ...]  # that keep K and V, in the order in which the model runs them
    vocab_size: int  # width of the logits


def probe(model: nn.Module, device: torch.device) -> Probed:
    """One forward of a few tokens. Raises LayerUnsupported if a layer does what the hooks cannot serve."""
    cache = _ProbeCache()
    vocab = text_config(model).vocab_size
    with torch.inference_mode():
        ids = torch.arange(1, 1 + _PROBE_TOKENS, device=device)[None] % vocab
        positions = torch.arange(_PROBE_TOKENS, device=device)[None]
        logits = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=False).logits
    kept = {index for index, kind in enumerate(declared_kinds(text_config(model))) if kind != _NO_MEMORY}
    for index in sorted(kept - set(cache.seen)):
        raise LayerUnsupported(
            "is declared as full attention, but keeps its K and V outside the cache",
            module=f"({layer_class(model, index)})",
            layer=index,
        )
    for index, layer in cache.seen.items():
        if layer.module is None:
            raise LayerUnsupported(
                "gives K and V to the cache and does not attend to them",
                module=f"({layer_class(model, index)})",
                layer=index,
            )
    return Probed(tuple(layer.shape for layer in cache.seen.values()), logits.shape[-1])


class _ProbeCache(HookedCache):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, _ProbedLayer] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.seen:
            raise LayerUnsupported("gives K and V to the cache twice", layer=layer_idx)
        layer = self.seen[layer_idx] = _ProbedLayer(layer_idx, key_states, value_states)
        mark(key_states, value_states, layer)
        return key_states, value_states


class _ProbedLayer:
    """Attends densely, and writes down what it was asked."""

    def __init__(self, index: int, key: Tensor, value: Tensor) -> None:
        self.index = index
        self.key_shape = key.shape  # [1, kv_heads, tokens, key_dim]
        self.value_shape = value.shape
        self.dtype = key.dtype
        self.module: str | None = None
        self.softcap = False

    @property
    def shape(self) -> LayerShape:
        assert self.module is not None
        return LayerShape(
            self.index,
            self.module,
            kv_heads=self.key_shape[1],
            key_dim=self.key_shape[3],
            value_dim=self.value_shape[3],
            dtype=self.dtype,
            softcap=self.softcap,
        )

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        scores: Scores,
        extra: dict[str, Any],
    ) -> Tensor:
        self.module = type(module).__name__
        refusal = self._refusal(query, value, mask, extra)
        if refusal is not None:
            raise LayerUnsupported(refusal, module=f"({self.module})", layer=self.index)
        self.softcap = self.softcap or scores.softcap is not None
        return attend_dense(query[0], key[0], value[0], 0, scores).transpose(0, 1)[None]

    def _refusal(self, query: Tensor, value: Tensor, mask: object, extra: dict[str, Any]) -> str | None:
        if not isinstance(mask, MaskPattern):
            return f"attends with a mask of its own ({type(mask).__name__})"
        if not mask.is_causal:
            return (
                f"attends with the pattern {getattr(mask.function, '__qualname__', mask.function)!r} over "
                f"{mask.local_size or 'all'} positions, and this version serves causal full attention only"
            )
        unknown = sorted(name for name, given in extra.items() if given is not None and name not in _HARMLESS)
        if unknown:
            return f"passes {', '.join(unknown)} to attention, which this version does not know"
        tokens, kv_heads = self.key_shape[2], self.key_shape[1]
        if self.key_shape[0] != 1 or tokens != _PROBE_TOKENS or query.shape[2] != tokens:
            return f"gives the cache K of shape {tuple(self.key_shape)} for {_PROBE_TOKENS} tokens"
        if query.shape[1] % kv_heads or self.value_shape[1] != kv_heads:
            return f"has {query.shape[1]} query, {kv_heads} key and {self.value_shape[1]} value heads"
        if not query.dtype == self.dtype == value.dtype:
            return f"mixes {query.dtype}, {self.dtype} and {value.dtype} in attention"
        return None


def context_limit(config: Any) -> tuple[int, str]:
    """(positions that the model can serve, RoPE regime or "").

    RoPE of type "dynamic" and "longrope" takes its frequencies from the longest sequence of a forward: a short
    sequence packed with a long one would get the wrong ones, and so would cached K. Such models are served up to
    the length at which the frequencies begin to change, and the regime tells those K apart.
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
    """RoPE's parameters: one set, or one for each layer kind."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return []
    nested = [inner for inner in parameters.values() if isinstance(inner, dict)]
    return nested or [parameters]
