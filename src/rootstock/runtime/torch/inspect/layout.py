"""Layout of a model's memory: its layers grouped into families, for one execution mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rootstock.cache.families import Family, FullAttention, RecurrentState, TokenFamily, token_families
from rootstock.kernels.spans import EVERYTHING
from rootstock.runtime.torch.hooks import Calling
from rootstock.runtime.torch.inspect.survey import Surveyed
from rootstock.runtime.torch.kv_pool import Kind, TorchLayerShape
from rootstock.runtime.torch.state_pool import TorchStateShape


@dataclass(frozen=True, slots=True)
class TorchLayout:
    """Tensors that every layer keeps, and the arguments of a forward."""

    calling: Calling
    vocab_size: int
    families: tuple[Family, ...]
    layers: tuple[TorchLayerShape, ...]  # layers with K and V, in the order in which they run
    states: tuple[TorchStateShape, ...]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Returns the dtypes of all stored tensors."""
        return {layer.kept_dtype for layer in self.layers} | {state.stored for state in self.states}

    def with_stored_states(self, stored: torch.dtype) -> TorchLayout:
        """Returns the layout with recurrent states rounded to this dtype in their slots."""
        states = tuple(state.stored_as(stored) for state in self.states)
        families = tuple(
            replace(family, bytes_per_state=sum(state.bytes_per_state for state in states))
            if isinstance(family, RecurrentState)
            else family
            for family in self.families
        )
        return replace(self, families=families, states=states)

    def with_quantized_rows(self) -> TorchLayout:
        """Returns the layout with K and V in int8, except latents and the indexers' keys."""
        layers = tuple(replace(layer, is_quantized=layer.kind != "latent") for layer in self.layers)
        rules = self.families[: max((layer.family + 1 for layer in layers), default=0)]
        families = tuple(
            replace(family, bytes_per_token=_bytes_per_token(layers, number))
            for number, family in enumerate(token_families(rules))
        )
        return replace(self, families=(*families, *self.families[len(families) :]), layers=layers)


@dataclass(frozen=True, slots=True)
class Seen:
    """Attention of a layer, as the probe observed it."""

    kind: Kind
    family: TokenFamily  # the rule of visible positions; its counts are unused
    softcap: bool = False


def lay_out(found: Surveyed, seen: dict[int, Seen], context_limit: int) -> TorchLayout:
    """Groups the surveyed layers into families, in the order of the description: full attention, then windows and
    chunks in order of appearance, then states."""
    rules = {index: _within(layer.family, context_limit) for index, layer in seen.items()}
    order = sorted(dict.fromkeys(rules.values()), key=lambda rule: not isinstance(rule, FullAttention))
    layers = tuple(
        found.shape(index, seen[index].kind, order.index(rules[index]), softcap=seen[index].softcap)
        for index in found.keys
    )
    families: list[Family] = []
    for number, rule in enumerate(order):
        its = [layer for layer in layers if layer.family == number]
        families.append(replace(rule, layers=len(its), bytes_per_token=_bytes_per_token(layers, number)))
    if found.states:
        kept = len({shape.key.layer for shape in found.states})
        families.append(RecurrentState(kept, sum(shape.bytes_per_state for shape in found.states)))
    return TorchLayout(found.calling, found.vocab_size, tuple(families), layers, tuple(found.states))


def _bytes_per_token(layers: Sequence[TorchLayerShape], family: int) -> int:
    return sum(layer.bytes_per_token for layer in layers if layer.family == family)


def _within(family: TokenFamily, context_limit: int) -> TokenFamily:
    """Returns full attention for a window or chunk that covers the whole context."""
    return EVERYTHING if family.first_visible(context_limit - 1) == 0 else family


def sequential_layout(found: Surveyed) -> TorchLayout:
    """Returns the layout for one sequence per forward: every layer keeps every position, and the model's own masks
    hide positions."""
    seen = {index: Seen("alone", EVERYTHING) for index in found.keys}
    return lay_out(found, seen, context_limit=1)
