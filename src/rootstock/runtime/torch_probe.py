"""What a model is made of, found by running it on a few tokens.

`survey` lets the model run as its file says, with a cache that takes everything, and writes down which module gives
what to which layer of the cache. `probe_packed` runs it once more over the hooks and finds how each attention layer
must be served; a module that does something of its own there is set apart, to be run one sequence at a time.
Nothing is treated as full attention because nobody said otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.cache.families import Family, FullAttention, RecurrentState, TokenFamily
from rootstock.kernels.scores import Scores
from rootstock.kernels.spans import EVERYTHING
from rootstock.kernels.torch_gather import attend_dense
from rootstock.runtime.torch_config import NO_MEMORY, declared_kinds, layer_class, text_config
from rootstock.runtime.torch_hooks import (
    LayerUnsupported,
    Unexpanded,
    expansion,
    keeps_latents,
    mark,
    refuse_unknown,
    runs_alone,
)
from rootstock.runtime.torch_masks import MaskPattern
from rootstock.runtime.torch_parts import Part, PartByPart, StepCache
from rootstock.runtime.torch_pool import Kind, LayerShape
from rootstock.runtime.torch_states import StateCache, StateShape, shapes_of

_PROBE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Calling:
    """How this model wants to be called."""

    cache: str  # the parameter that takes the cache
    use_cache: bool  # what makes it use the one that is given, and make none of its own
    positions: bool  # whether it takes position ids
    keeps_rows: bool  # whether it takes an index tensor of the rows to score

    def __call__(
        self, model: nn.Module, ids: Tensor, positions: Tensor, cache: object, rows: Tensor
    ) -> Tensor:
        """ids and positions [tokens], rows [rows] of them → logits [rows, vocab]"""
        given: dict[str, Any] = {"input_ids": ids[None], self.cache: cache, "use_cache": self.use_cache}
        if self.positions:
            given["position_ids"] = positions[None]
        if self.keeps_rows:
            given["logits_to_keep"] = rows
        logits: Tensor = model(**given).logits[0]
        return logits if self.keeps_rows else logits[rows]

    def own(self, model: nn.Module, ids: Tensor, positions: Tensor, cache: object) -> Any:
        """As anybody would call it: with the cache that it made itself, None at first. → all it gives out"""
        given: dict[str, Any] = {"input_ids": ids[None], self.cache: cache, "use_cache": True}
        if self.positions:
            given["position_ids"] = positions[None]
        return model(**given)


@dataclass(slots=True)
class Surveyed:
    """What the model gives to a cache, layer by layer, in the order in which it runs them."""

    calling: Calling
    vocab_size: int  # width of the logits
    keys: dict[int, Tensor] = field(default_factory=dict)  # [1, kv_heads, tokens, key_dim], an example
    values: dict[int, Tensor] = field(default_factory=dict)
    indexer: dict[int, Tensor] = field(default_factory=dict)  # [1, tokens, indexer_dim], an example
    states: list[StateShape] = field(default_factory=list)
    attention: dict[int, nn.Module] = field(default_factory=dict)  # the innermost module that gives K and V
    mixers: dict[int, list[nn.Module]] = field(
        default_factory=dict
    )  # the innermost modules that ask for states

    def shape(self, index: int, kind: Kind, family: int, softcap: bool) -> LayerShape:
        key, value, indexer = self.keys[index], self.values[index], self.indexer.get(index)
        return LayerShape(
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
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory that a model needs, and how it is called. For one rung of the ladder."""

    calling: Calling
    vocab_size: int
    families: tuple[Family, ...]
    layers: tuple[
        LayerShape, ...
    ]  # that keep something per position, in the order in which the model runs them
    states: tuple[StateShape, ...]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of everything that is kept."""
        return {layer.dtype for layer in self.layers} | {state.stored for state in self.states}

    def with_stored_states(self, stored: torch.dtype) -> Layout:
        """Recurrent states rounded to this dtype in their slots."""
        states = tuple(state.stored_as(stored) for state in self.states)
        families = tuple(
            replace(family, bytes_per_state=sum(state.bytes_per_state for state in states))
            if isinstance(family, RecurrentState)
            else family
            for family in self.families
        )
        return replace(self, families=families, states=states)


def survey(model: nn.Module, device: torch.device) -> Surveyed:
    """One forward of a few tokens, as the model's file says. Raises LayerUnsupported if a layer keeps what it
    remembers anywhere else than in the cache."""
    parameters = inspect.signature(type(model).forward).parameters
    name = f"{type(model).__name__} (of {layer_class(model, 0)})"
    cache_name = next((given for given in ("past_key_values", "cache_params") if given in parameters), None)
    if cache_name is None:
        raise LayerUnsupported("takes no cache, so its memory cannot be kept", module=name)
    for use_cache in (False, True):
        calling = Calling(cache_name, use_cache, "position_ids" in parameters, "logits_to_keep" in parameters)
        cache = _SurveyCache(device)
        try:
            with cache.watching(model):
                logits = _forward(model, calling, cache, device)
        except LayerUnsupported:
            raise
        except (
            Exception
        ) as error:  # whatever the model's own code raises when it meets a cache that is not its own
            raise LayerUnsupported(f"cannot use a cache from outside ({_say(error)})", module=name) from error
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
    return found


def sequential_layout(found: Surveyed) -> Layout:
    """For one sequence per forward: every layer keeps every position, and the model's own masks say what it sees."""
    seen = {index: _Seen("alone", EVERYTHING) for index in found.keys}
    return _layout(found, seen, None)


def probe_packed(model: nn.Module, found: Surveyed, device: torch.device, context_limit: int) -> Layout:
    """Finds how each layer is served in a packed step, and puts what it needs in place (`undo_parts` undoes it).
    Raises LayerUnsupported if some layer cannot be packed."""
    for module in model.modules():
        if callable(getattr(module, "expand_kv", None)):
            module.expand_kv = Unexpanded(module)  # type: ignore[assignment]
    attention = set(found.attention.values())
    for module in {mixer for mixers in found.mixers.values() for mixer in mixers}:
        _run_by_parts(module, alone=module in attention)
    while True:
        cache = _ProbeCache(device)
        try:
            with cache.watching(model):
                _forward(model, found.calling, cache, device)
            seen = cache.seen()
            break
        except Exception as error:
            culprit = next((m for m in reversed(cache.running) if m in attention), None)
            if culprit is None or runs_alone(culprit):
                if isinstance(error, LayerUnsupported):
                    raise
                raise LayerUnsupported(
                    f"cannot be packed ({_say(error)})", module=type(model).__name__
                ) from error
            # All that are like it, so that a deep model is not probed once for every layer.
            likeness = _likeness(found, culprit)
            for module in attention:
                if type(module) is type(culprit) and _likeness(found, module) == likeness:
                    _run_by_parts(module, alone=True)
    for index, module in found.attention.items():
        if runs_alone(module):
            seen[index] = _Seen("alone", EVERYTHING)
        elif index not in seen:
            raise LayerUnsupported(
                "gives K and V to the cache and does not attend to them",
                module=f"({layer_class(model, index)})",
                layer=index,
            )
    return _layout(found, seen, context_limit)


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
    """Every module as its class says."""
    for module in model.modules():
        for name, kind in (("forward", PartByPart), ("expand_kv", Unexpanded)):
            if isinstance(vars(module).get(name), kind):
                delattr(module, name)


def _forward(model: nn.Module, calling: Calling, cache: object, device: torch.device) -> Tensor:
    tokens = torch.arange(_PROBE_TOKENS, device=device)
    with torch.inference_mode():
        return calling(model, (tokens + 1) % text_config(model).vocab_size, tokens, cache, tokens)


def _say(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# --------------------------------------------------------------------------------------- from layers to families


@dataclass(frozen=True, slots=True)
class _Seen:
    """How a layer attends."""

    kind: Kind
    family: TokenFamily  # its rule; counts mean nothing
    softcap: bool = False


def _layout(found: Surveyed, seen: dict[int, _Seen], context_limit: int | None) -> Layout:
    rules = {index: _within(layer.family, context_limit) for index, layer in seen.items()}
    # Full attention first, then windows and chunks as they come.
    order = sorted(dict.fromkeys(rules.values()), key=lambda rule: not isinstance(rule, FullAttention))
    layers = tuple(
        found.shape(index, seen[index].kind, order.index(rules[index]), seen[index].softcap)
        for index in found.keys
    )
    families: list[Family] = []
    for number, rule in enumerate(order):
        its = [layer for layer in layers if layer.family == number]
        families.append(
            replace(rule, layers=len(its), bytes_per_token=sum(layer.bytes_per_token for layer in its))
        )
    if found.states:
        kept = len({shape.key.layer for shape in found.states})
        families.append(RecurrentState(kept, sum(shape.bytes_per_state for shape in found.states)))
    return Layout(found.calling, found.vocab_size, tuple(families), layers, tuple(found.states))


def _within(family: TokenFamily, context_limit: int | None) -> TokenFamily:
    """A window or chunk as long as all that the model reads hides nothing."""
    if context_limit is not None and family.tail_start(context_limit - 1) == 0:
        return EVERYTHING
    return family


# -------------------------------------------------------------------------------------------- the probes' caches


class _Watch:
    """Knows which modules are running."""

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
            yield  # if the model raises, `running` says where
        finally:
            for hook in hooks:
                hook.remove()


class _SurveyCache(_Watch, StateCache):
    """Takes everything of one sequence that starts, and says nothing of it back."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, torch.zeros(1, dtype=torch.int64, device=device), continues=False)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._indexer: dict[int, Tensor] = {}
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
            states,
            self._attention,
            self._mixers,
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        shape = key_states.shape
        where = {"module": f"({type(self.running[-1]).__name__})", "layer": layer_idx}
        if layer_idx in self._keys:
            raise LayerUnsupported("gives K and V to the cache twice", **where)  # type: ignore[arg-type]
        if len(shape) != 4 or shape[0] != 1 or shape[2] != _PROBE_TOKENS:
            said = f"gives the cache K of shape {tuple(shape)} for {_PROBE_TOKENS} tokens"
            raise LayerUnsupported(said, **where)  # type: ignore[arg-type]
        if value_states.shape[1] != shape[1] or value_states.dtype != key_states.dtype:
            said = f"has {shape[1]} heads of {key_states.dtype} keys, and {value_states.shape[1]} of values"
            raise LayerUnsupported(said, **where)  # type: ignore[arg-type]
        self._keys[layer_idx], self._values[layer_idx] = key_states, value_states
        self._attention[layer_idx] = self.running[-1]
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self._indexer[layer_idx] = indexer_key_states
        return indexer_key_states

    def _touch(self, layer_idx: int) -> Any:
        mixers = self._mixers.setdefault(layer_idx, [])
        if self.running[-1] not in mixers:
            mixers.append(self.running[-1])
        return super()._touch(layer_idx)


class _ProbeCache(_Watch, StepCache):
    """A packed step of one sequence that starts. Layers attend densely, and write down what they were asked."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._layers: dict[int, _ProbedLayer] = {}

    def seen(self) -> dict[int, _Seen]:
        return {index: layer.seen for index, layer in self._layers.items() if layer.seen is not None}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self._layers[layer_idx] = _ProbedLayer(layer_idx, key_states, value_states)
        mark(key_states, value_states, layer)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        return 0 if layer_idx is None else torch.zeros(_PROBE_TOKENS, dtype=torch.int64, device=self._device)

    def groups(self) -> Iterator[Part]:
        part = _SurveyCache(self._device)
        part.running = self.running
        yield Part(torch.arange(_PROBE_TOKENS, device=self._device)[None], part, 0)

    sequences = groups


class _ProbedLayer:
    def __init__(self, index: int, key: Tensor, value: Tensor) -> None:
        self._index = index
        self._key = key
        self._value = value
        self.seen: _Seen | None = None

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
        refuse_unknown(module, extra)
        seen = self._how(module, query, key, mask, scores)
        if self.seen is not None and self.seen.family != seen.family:
            raise self._refusal(module, "is attended to with two different masks")
        self.seen = seen
        if seen.kind == "latent":
            if seen.softcap:
                raise self._refusal(module, "caps the scores of latents")
            expansion(module)  # or a refusal
            key, value = vars(module)["expand_kv"].expand(key, value)
        return attend_dense(query[0], key[0], value[0], 0, scores).transpose(0, 1)[None].contiguous()

    def _how(self, module: nn.Module, query: Tensor, key: Tensor, mask: object, scores: Scores) -> _Seen:
        if not isinstance(mask, MaskPattern):
            raise self._refusal(module, f"attends with a mask of its own ({type(mask).__name__})")
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
            return _Seen("latent", family, softcap)
        if query.shape[1] % key.shape[1]:
            raise self._refusal(module, f"has {query.shape[1]} query and {key.shape[1]} key heads")
        return _Seen("plain", family, softcap)

    def _refusal(self, module: nn.Module, reason: str) -> LayerUnsupported:
        return LayerUnsupported(reason, module=f"({type(module).__name__})", layer=self._index)
