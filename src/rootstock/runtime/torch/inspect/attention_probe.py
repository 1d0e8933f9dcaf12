"""Probe of attention layers: runs the model once over the hooks to find how a packed step serves each layer.

A module whose attention the hooks cannot serve is marked to run one sequence at a time. The recurrent mixers that the
survey found are marked to run by groups. No layer is treated as full attention only because it declares nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.kernels.spans import EVERYTHING
from rootstock.kernels.torch.gathered_attention import attend_dense
from rootstock.runtime.torch.hooks import (
    AttentionCall,
    LayerUnsupported,
    Unexpanded,
    expansion,
    keeps_latents,
    mark,
    refuse_unknown,
    runs_alone,
)
from rootstock.runtime.torch.inspect.config import layer_class
from rootstock.runtime.torch.inspect.layout import Seen, TorchLayout, lay_out
from rootstock.runtime.torch.inspect.mask_pattern import MaskPattern
from rootstock.runtime.torch.inspect.survey import (
    PROBE_TOKENS,
    SurveyCache,
    Surveyed,
    Watch,
    forward_few,
    say,
)
from rootstock.runtime.torch.lazy_rows import OutOfMemory
from rootstock.runtime.torch.module_parts import PartByPart, StepCache, StepPart


def probe_packed(model: nn.Module, found: Surveyed, device: torch.device, context_limit: int) -> TorchLayout:
    """Finds how each layer is served in a packed step, and installs the replacements it needs (`undo_parts` removes
    them). Raises LayerUnsupported if some layer cannot be packed."""
    for module in model.modules():
        if callable(getattr(module, "expand_kv", None)):
            module.expand_kv = Unexpanded(module)  # type: ignore[assignment]
    attention = set(found.attention.values())
    for module in {mixer for mixers in found.mixers.values() for mixer in mixers}:
        _run_by_parts(module, alone=module in attention)
    while True:
        cache = ProbeCache(device)
        try:
            with cache.watching(model):
                forward_few(model, found.calling, cache, device)
            seen = cache.seen()
            break
        except OutOfMemory:
            raise
        except Exception as error:  # from a hook, or from the model's code when it meets the hooks' results
            culprit = next((m for m in reversed(cache.running) if m in attention), None)
            if culprit is None or runs_alone(culprit):
                if isinstance(error, LayerUnsupported):
                    raise
                raise LayerUnsupported(
                    f"cannot be packed ({say(error)})", module=type(model).__name__
                ) from error
            # Set apart all modules like it, so that a deep model is not probed once for every layer.
            likeness = _likeness(found, culprit)
            for module in attention:
                if type(module) is type(culprit) and _likeness(found, module) == likeness:
                    _run_by_parts(module, alone=True)
    for index, module in found.attention.items():
        if runs_alone(module):
            seen[index] = Seen("alone", EVERYTHING)
        elif index not in seen:
            raise LayerUnsupported(
                "gives K and V to the cache but does not attend to them",
                module=f"({layer_class(model, index)})",
                layer=index,
            )
    return lay_out(found, seen, context_limit)


def _run_by_parts(module: nn.Module, *, alone: bool) -> None:
    vars(module).pop("forward", None)
    module.forward = PartByPart(module, alone=alone)


def _likeness(found: Surveyed, module: nn.Module) -> set[tuple[bool, tuple[int, ...]]]:
    return {
        (index in found.indexer, tuple(found.keys[index].shape))
        for index, owner in found.attention.items()
        if owner is module
    }


def undo_parts(model: nn.Module) -> None:
    """Restores the original methods of every module."""
    for module in model.modules():
        for name, kind in (("forward", PartByPart), ("expand_kv", Unexpanded)):
            if isinstance(vars(module).get(name), kind):
                delattr(module, name)


class ProbeCache(Watch, StepCache):
    """Packed step of one new sequence. Layers attend densely and record how they attend."""

    def __init__(self, device: torch.device, tokens: int = PROBE_TOKENS) -> None:
        super().__init__()
        self._device = device
        self._tokens = tokens
        self._layers: dict[int, _ProbedLayer] = {}

    def seen(self) -> dict[int, Seen]:
        return {index: layer.seen for index, layer in self._layers.items() if layer.seen is not None}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self._layers[layer_idx] = _ProbedLayer(layer_idx)
        mark(key_states, value_states, layer)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        return 0 if layer_idx is None else torch.zeros(self._tokens, dtype=torch.int64, device=self._device)

    def sequences(self) -> Iterator[StepPart]:
        part = SurveyCache(self._device, self._tokens)
        part.running = self.running
        yield StepPart(torch.arange(self._tokens, device=self._device)[None], part, 0)

    def groups(self) -> Iterator[StepPart]:
        return self.sequences()


class _ProbedLayer:
    def __init__(self, index: int) -> None:
        self._index = index
        self.seen: Seen | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        module, query, key, value, _, scores, extra = call
        refuse_unknown(module, extra)
        seen = self._how(call)
        if self.seen is not None and self.seen.family != seen.family:
            raise self._refusal(module, "is attended to with two different masks")
        self.seen = seen
        if seen.kind == "latent":
            if seen.softcap:
                raise self._refusal(module, "caps the scores of latents")
            expansion(module)  # raises if it cannot be absorbed
            key, value = vars(module)["expand_kv"].expand(key, value)
        return attend_dense(query[0], key[0], value[0], 0, scores).transpose(0, 1)[None].contiguous()

    def _how(self, call: AttentionCall) -> Seen:
        module, query, key, _, mask, scores, _ = call
        if not isinstance(mask, MaskPattern):
            raise self._refusal(module, f"attends with its own mask ({type(mask).__name__})")
        family = mask.rule(query.device)
        if family is None:
            name = getattr(mask.function, "__qualname__", mask.function)
            raise self._refusal(
                module, f"attends with the pattern {name!r} over {mask.local_size or 'all'} positions"
            )
        if query.dtype != key.dtype:
            raise self._refusal(module, f"mixes {query.dtype} and {key.dtype} in attention")
        softcap = scores.softcap is not None or (self.seen is not None and self.seen.softcap)
        if keeps_latents(module):
            return Seen("latent", family, softcap)
        if query.shape[1] % key.shape[1]:
            raise self._refusal(module, f"has {query.shape[1]} query and {key.shape[1]} key heads")
        return Seen("plain", family, softcap)

    def _refusal(self, module: nn.Module, reason: str) -> LayerUnsupported:
        return LayerUnsupported(reason, module=f"({type(module).__name__})", layer=self._index)
