"""Check for recurrent mixers that ignore their stored state and start from zero when they get several tokens.

Each mixer runs on the same rows at once and in two parts. In the second run it returns its output of the first run,
so that the next mixer gets the same rows again. Errors then do not add up from layer to layer, and the two cases lie
far apart in every dtype. Of 22 architectures with random weights, correct mixers were off by up to 3e-6 in float32
and 7e-3 in bfloat16; wrong ones by 8e-2 to 1 in their worst layer. The self-check, which compares
logits, can mistake one case for the other in a model that amplifies rounding.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rootstock.runtime.torch.hooks import LayerUnsupported, runs_alone
from rootstock.runtime.torch.inspect.attention_probe import ProbeCache
from rootstock.runtime.torch.inspect.survey import Surveyed, forward_few
from rootstock.runtime.torch.module_parts import StepPart
from rootstock.runtime.torch.state_pool import StateCache, TorchStatePool

_TOKENS = 16
_AFTER = 2  # tokens after the cut: the stored state matters most to the first rows that follow it


def refuse_forgetful_mixers(
    model: nn.Module, found: Surveyed, device: torch.device, context_limit: int
) -> None:
    """Raises LayerUnsupported for the first layer whose mixer ignores its state. Call `probe_packed` before."""
    tokens = min(_TOKENS, context_limit)
    cut = tokens - _AFTER
    if cut < 1:
        return  # too short to test; only the self-check remains
    layer_of = {mixer: index for index, mixers in found.mixers.items() for mixer in mixers}
    mixers = [mixer for mixer in layer_of if not runs_alone(mixer)]
    pool = TorchStatePool(found.states, 1, device)
    at_once: list[Any] = []

    def record(mixer: nn.Module, inputs: object, output: Any) -> None:
        at_once.append(output)

    def run(cuts: list[int], hook: Callable[[nn.Module, object, Any], Any]) -> None:
        cache = _CutCache(device, pool, cuts)
        with cache.watching(model), _hooked(mixers, hook):
            forward_few(model, found.calling, cache, device, tokens)

    run([0, tokens], record)
    expected = iter(at_once)

    def compare(mixer: nn.Module, inputs: object, output: Any) -> Any:
        given = next(expected)
        own, continued = (_rows(rows)[:, cut:].float() for rows in (given, output))
        off = float((own - continued).square().mean().sqrt() / own.square().mean().sqrt())
        if off > max(1e-3, 3 * torch.finfo(_rows(given).dtype).eps):
            raise LayerUnsupported(
                f"ignores its stored state when it gets several tokens: its output is off by {off:.2g} of itself",
                module=f"({type(mixer).__name__})",
                layer=layer_of[mixer],
            )
        return given

    run([0, cut, tokens], compare)


def _rows(output: Any) -> Tensor:
    """Returns the rows [1, tokens, …] of a mixer's output: the output, or the first of several."""
    rows: Tensor = output[0] if isinstance(output, tuple) else output
    return rows


@contextlib.contextmanager
def _hooked(mixers: list[nn.Module], hook: Callable[[nn.Module, object, Any], Any]) -> Iterator[None]:
    hooks = [mixer.register_forward_hook(hook) for mixer in mixers]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


class _CutCache(ProbeCache):
    """Packed step of one sequence, whose mixers get it in parts that end at `cuts`."""

    def __init__(self, device: torch.device, pool: TorchStatePool, cuts: list[int]) -> None:
        super().__init__(device, cuts[-1])
        self._pool = pool
        self._cuts = cuts

    def groups(self) -> Iterator[StepPart]:
        slots = torch.zeros(1, dtype=torch.int64, device=self._device)
        for first, end in itertools.pairwise(self._cuts):
            rows = torch.arange(first, end, device=self._device)[None]
            yield StepPart(rows, StateCache(self._pool, slots, continues=first > 0), -1)
