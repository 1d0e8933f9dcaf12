"""How a model is run, from best to last resort. The self-check of each rung decides whether to step down.

- packed: one forward a step, for all sequences
- packed, token-wise mixers: so, but recurrent layers continue a state one token at a time, since the multi-token path
  of some ignores what they stored
- one sequence per forward: the model's own attention and masks on K and V gathered from the pool

A packed rung is tried with the kernel that is compiled for the device, if there is one, and then without.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from rootstock.errors import InvalidOption, ModelUnsupported, SelfCheckFailed
from rootstock.kernels.torch.sliced_attention import Tuning
from rootstock.runtime.base import ModelDescription, Rung, Runtime
from rootstock.runtime.torch.attention_backends import Compiled
from rootstock.runtime.torch.fusion.base import NOTHING_FUSED, Fusion, undo_fusion
from rootstock.runtime.torch.hooks import LayerUnsupported
from rootstock.runtime.torch.inspect.attention_probe import probe_packed, undo_parts
from rootstock.runtime.torch.inspect.layout import Layout, sequential_layout
from rootstock.runtime.torch.inspect.mask_pattern import IMPLEMENTATION
from rootstock.runtime.torch.inspect.recurrent_mixers import refuse_forgetful_mixers
from rootstock.runtime.torch.inspect.survey import Surveyed
from rootstock.runtime.torch.lazy_rows import OutOfMemory
from rootstock.runtime.torch.self_check import Disagreement, self_check, use_attention

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A model that gives the right answers, and what it needs for that. The model is left as this rung needs it."""

    layout: Layout
    description: ModelDescription
    compiled: Compiled | None = None  # the kernel that is not torch's own
    fusion: Fusion = NOTHING_FUSED


def climb(
    model: nn.Module,
    found: Surveyed,
    context_limit: int,
    describe: Callable[[Layout], ModelDescription],
    make_runtime: Callable[[Served, Tuning], Runtime],
    progress: Callable[[float], None],
    compiled: Compiled | None = None,
) -> Served:
    """The best rung whose answers are right. Raises ModelUnsupported or SelfCheckFailed if there is none."""
    rungs: list[Rung] = ["packed", "packed, token-wise mixers", "one sequence per forward"]
    if not found.states:
        rungs.remove("packed, token-wise mixers")
    failures: list[Exception] = []
    refused: Rung | None = None  # on which the compiled kernel did not do
    for rung, kernel, fuses in _tries(rungs, compiled):
        try:
            layout = _put_on(rung, model, found, context_limit)
            fusion = _fuse(model, found, context_limit) if fuses else NOTHING_FUSED
            if fuses and not fusion.parts:
                undo_parts(model)
                continue  # the next try is the same
            served = Served(layout, replace(describe(layout), rung=rung), kernel, fusion)
            remark = self_check(
                model,
                layout.calling,
                served.description,
                functools.partial(make_runtime, served),
                progress,
            ).remark
        except (InvalidOption, *OutOfMemory):
            raise
        except Exception as failure:  # whatever the model's own code raises where it meets ours
            undo_parts(model)
            undo_fusion(model)
            failures.append(failure)
            refused = rung if kernel is not None else refused
            continue
        if refused == rung and kernel is None:
            _log.warning(
                "Attention is slower than it could be, without %s: %s", compiled, _reason(failures[-1])
            )
        reasons = dict.fromkeys([*map(_reason, failures), *([remark] if remark else [])])
        return replace(served, description=replace(served.description, rung_reason="; ".join(reasons)))
    name = describe(sequential_layout(found)).name
    disagreements = [failure for failure in failures if isinstance(failure, Disagreement)]
    if disagreements:
        last = disagreements[-1]
        raise SelfCheckFailed(name, last.figure, last.allowed, last.what) from last
    raise ModelUnsupported(name, "; ".join(dict.fromkeys(map(_reason, failures)))) from failures[-1]


def _tries(rungs: Sequence[Rung], compiled: Compiled | None) -> Iterator[tuple[Rung, Compiled | None, bool]]:
    """(rung, kernel, whether with the fused forms of the model's parts), from best to last resort."""
    for rung in rungs:
        if rung != "one sequence per forward":
            if compiled == "triton":
                yield rung, compiled, False
            elif compiled == "numba":  # what is fused is for CPUs, and so is this
                yield rung, compiled, True
                yield rung, compiled, False
            yield rung, None, True
        yield rung, None, False


def _fuse(model: nn.Module, found: Surveyed, context_limit: int) -> Fusion:
    try:
        from rootstock.runtime.torch.fusion.find import fuse
    except ImportError:  # no Numba here: the kernels say so
        return NOTHING_FUSED
    return fuse(model, found, next(model.parameters()).device, context_limit)


def _put_on(rung: Rung, model: nn.Module, found: Surveyed, context_limit: int) -> Layout:
    """Makes the model run as this rung says. Raises LayerUnsupported if it cannot."""
    if rung == "one sequence per forward":
        use_attention(model, "eager")
        return sequential_layout(found)
    if not model._can_set_attn_implementation():  # type: ignore[operator]
        raise LayerUnsupported(
            "does not call attention through transformers' AttentionInterface, so sequences cannot be packed",
            module=type(model).__name__,
        )
    use_attention(model, IMPLEMENTATION)
    device = next(model.parameters()).device
    layout = probe_packed(model, found, device, context_limit)
    if rung == "packed" and found.states:
        refuse_forgetful_mixers(model, found, device, context_limit)
    return layout


def _reason(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    said = lines[0] if lines else ""
    if isinstance(failure, (LayerUnsupported, Disagreement)):
        return said
    return f"{type(failure).__name__}: {said}"
