"""Survey of a model's memory: one forward shows which module gives which tensors to which layer of a cache.

A layer that keeps its memory anywhere else is refused, with its class.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.runtime.torch.hooks import Calling, LayerUnsupported
from rootstock.runtime.torch.inspect.config import NO_MEMORY, declared_kinds, layer_class, text_config
from rootstock.runtime.torch.kv_pool import Kind, TorchLayerShape
from rootstock.runtime.torch.lazy_rows import OutOfMemory
from rootstock.runtime.torch.state_pool import StateCache, TorchStateShape, shapes_of

PROBE_TOKENS = 3
_POSITIONS_MATTER = 0.1  # standard deviations of the logits: above rounding in any dtype


@dataclass(frozen=True, slots=True)
class Surveyed:
    """Tensors that a model gives to a cache, layer by layer, in the order in which layers run."""

    calling: Calling
    vocab_size: int  # width of the logits
    keys: dict[int, Tensor]  # [1, kv_heads, tokens, key_dim], an example
    values: dict[int, Tensor]  # [1, kv_heads, tokens, value_dim], an example
    indexer: dict[int, Tensor]  # [1, tokens, indexer_dim], an example
    hidden: dict[int, int]  # widths of the hidden states that draft heads keep
    states: list[TorchStateShape]
    attention: dict[int, nn.Module]  # the innermost module that gives K and V to the cache
    mixers: dict[int, list[nn.Module]]  # the innermost modules that ask the cache for states

    def shape(self, index: int, kind: Kind, family: int, *, softcap: bool) -> TorchLayerShape:
        """Returns the shape of layer `index` per position, for this kind of attention."""
        key, value, indexer = self.keys[index], self.values[index], self.indexer.get(index)
        return TorchLayerShape(
            index,
            type(self.attention[index]).__name__,
            kind,
            family,
            kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            dtype=key.dtype,
            softcap=softcap,
            indexer_dim=0 if indexer is None else indexer.shape[-1],
            indexer_dtype=torch.float32 if indexer is None else indexer.dtype,
            hidden_dim=self.hidden.get(index, 0),
        )


def survey(model: nn.Module, device: torch.device) -> Surveyed:
    """Runs one forward of a few tokens with the model's own code. Raises LayerUnsupported if a layer keeps its memory
    anywhere else than in the cache."""
    parameters = inspect.signature(type(model).forward).parameters
    name = f"{type(model).__name__} (of {layer_class(model, 0)})"
    cache_name = next((given for given in ("past_key_values", "cache_params") if given in parameters), None)
    if cache_name is None:
        raise LayerUnsupported("takes no cache, so its memory cannot be kept", module=name)
    for use_cache in (False, True):
        calling = Calling(cache_name, use_cache, "position_ids" in parameters, "logits_to_keep" in parameters)
        cache = SurveyCache(device)
        try:
            with cache.watching(model):
                logits = forward_few(model, calling, cache, device)
        except (LayerUnsupported, *OutOfMemory):
            raise
        except Exception as error:  # from the model's own code, when it meets an unknown cache
            reason = _refusal_of_text(model, device) or f"cannot use a cache from outside ({say(error)})"
            raise LayerUnsupported(reason, module=name) from error
        found = cache.found(calling, logits.shape[-1])
        if found.keys or found.states:
            break
    for index, kind in enumerate(declared_kinds(text_config(model))):
        if kind != NO_MEMORY and index not in found.attention and index not in found.mixers:
            raise LayerUnsupported(
                f"is declared as {kind}, but keeps its memory outside the cache",
                module=f"({layer_class(model, index)})",
                layer=index,
            )
    _refuse_both_directions(found)
    if device.type != "meta":
        _refuse_other_positions(model, calling, device, name)
    return found


def _refusal_of_text(model: nn.Module, device: torch.device) -> str:
    """Returns the reason why a model of text and images cannot run on text alone. "": it can, or takes no images."""
    if "pixel_values" not in inspect.signature(type(model).forward).parameters:
        return ""
    try:
        with torch.inference_mode():
            model(input_ids=_few_tokens(model, device)[None])
    except Exception as error:  # from the model's own code
        return f"does not run on text alone ({say(error)})"
    return ""


def _refuse_both_directions(found: Surveyed) -> None:
    """Raises LayerUnsupported for attention to later positions: a prefix would depend on what follows it."""
    for index, module in found.attention.items():
        if getattr(module, "is_causal", True) is False:
            raise LayerUnsupported(
                "attends to later positions, too, so no two prompts share a prefix",
                module=type(module).__name__,
                layer=index,
            )


def _refuse_other_positions(model: nn.Module, calling: Calling, device: torch.device, name: str) -> None:
    """Raises LayerUnsupported for a model that counts positions from another number than 0."""
    # Of models of text and images only: the models of text alone that B1 runs count from 0 on.
    if not calling.positions or text_config(model) is model.config:
        return
    ids = _few_tokens(model, device)[None]
    positions = torch.arange(PROBE_TOKENS, device=device)[None]
    try:
        with torch.inference_mode():
            own = model(input_ids=ids, use_cache=False).logits[0].float()
            given = model(input_ids=ids, position_ids=positions, use_cache=False)
    except Exception:  # from the model's own code, which may need a cache: the self-check gives it one
        return
    error = (given.logits[0].float() - own).square().mean().sqrt()
    if error > _POSITIONS_MATTER * own.std():
        raise LayerUnsupported("counts positions in a way of its own, not from 0 on", module=name)


def _few_tokens(model: nn.Module, device: torch.device) -> Tensor:
    """Returns tokens from the middle of the vocabulary, where no special ones are."""
    first = text_config(model).vocab_size // 2
    return torch.arange(first, first + PROBE_TOKENS, device=device)


def forward_few(
    model: nn.Module, calling: Calling, cache: object, device: torch.device, tokens: int = PROBE_TOKENS
) -> Tensor:
    """Runs a forward of a few tokens. Returns logits [tokens, vocab]."""
    positions = torch.arange(tokens, device=device)
    with torch.inference_mode():
        return calling(model, (positions + 1) % text_config(model).vocab_size, positions, cache, positions)


def say(error: Exception) -> str:
    """Returns an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Watch:
    """Tracker of the modules that are running."""

    running: list[nn.Module]  # outermost first

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        self.running = []

        def enter(module: nn.Module, inputs: object) -> None:
            self.running.append(module)

        def leave(module: nn.Module, inputs: object, output: object) -> None:
            self.running.pop()

        hooks = [m.register_forward_pre_hook(enter) for m in model.modules()]
        hooks += [m.register_forward_hook(leave) for m in model.modules()]
        try:
            yield  # if the model raises, `running` holds the modules in which it did
        finally:
            for hook in hooks:
                hook.remove()


class SurveyCache(Watch, StateCache):
    """Cache that records all tensors of one new sequence, and returns no earlier ones."""

    def __init__(self, device: torch.device, tokens: int = PROBE_TOKENS) -> None:
        super().__init__(None, torch.zeros(1, dtype=torch.int64, device=device), continues=False)
        self._tokens = tokens
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._indexer: dict[int, Tensor] = {}
        self._hidden: dict[int, int] = {}
        self._attention: dict[int, nn.Module] = {}
        self._mixers: dict[int, list[nn.Module]] = {}

    def found(self, calling: Calling, vocab_size: int) -> Surveyed:
        states = [
            shape for index, scratch in self.layers_touched.items() for shape in shapes_of(index, scratch)
        ]
        return Surveyed(
            calling,
            vocab_size,
            self._keys,
            self._values,
            self._indexer,
            self._hidden,
            states,
            self._attention,
            self._mixers,
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        shape, heads = tuple(key_states.shape), value_states.shape[1]
        if layer_idx in self._keys:
            raise self._refusal("gives K and V to the cache twice", layer_idx)
        if len(shape) != 4 or shape[0] != 1 or shape[2] != self._tokens:
            raise self._refusal(f"gives the cache K of shape {shape} for {self._tokens} tokens", layer_idx)
        if heads != shape[1]:
            raise self._refusal(f"has {shape[1]} heads of keys, and {heads} of values", layer_idx)
        if key_states.dtype != value_states.dtype:
            raise self._refusal(f"mixes {key_states.dtype} and {value_states.dtype} in K and V", layer_idx)
        self._keys[layer_idx], self._values[layer_idx] = key_states, value_states
        self._attention[layer_idx] = self.running[-1]
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self._indexer[layer_idx] = indexer_key_states
        return indexer_key_states

    def previous_hidden(self, layer_idx: int, hidden: Tensor) -> Tensor | None:
        self._hidden[layer_idx] = hidden.shape[-1]
        return super().previous_hidden(layer_idx, hidden)

    def _refusal(self, reason: str, layer_idx: int) -> LayerUnsupported:
        return LayerUnsupported(reason, module=f"({type(self.running[-1]).__name__})", layer=layer_idx)

    def _touch(self, layer_idx: int) -> Any:
        mixers = self._mixers.setdefault(layer_idx, [])
        if self.running[-1] not in mixers:
            mixers.append(self.running[-1])
        return super()._touch(layer_idx)
