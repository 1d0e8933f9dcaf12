"""Execution modes of a model, from best to last resort. The self-check of each mode decides whether to fall back.

- packed: one forward a step, for all sequences
- packed, token-wise mixers: packed, but recurrent layers continue a state one token at a time, because the
  multi-token path of some layers ignores the stored state
- one sequence per forward: the model's own attention and masks on K and V gathered from the pool

A packed mode is tried first with the attention backend that is compiled for the device, if there is one, then
without.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from rootstock.errors import InvalidOption, ModelUnsupported, SelfCheckFailed
from rootstock.kernels.torch.sliced_attention import Tuning
from rootstock.runtime.base import ExecutionMode, ModelDescription, Runtime
from rootstock.runtime.torch.attention_backends import Compiled
from rootstock.runtime.torch.fusion.base import NOTHING_FUSED, Fusion, undo_fusion
from rootstock.runtime.torch.hooks import LayerUnsupported
from rootstock.runtime.torch.inspect.attention_probe import probe_packed, undo_parts
from rootstock.runtime.torch.inspect.layout import TorchLayout, sequential_layout
from rootstock.runtime.torch.inspect.mask_pattern import IMPLEMENTATION
from rootstock.runtime.torch.inspect.recurrent_mixers import refuse_forgetful_mixers
from rootstock.runtime.torch.inspect.survey import Surveyed
from rootstock.runtime.torch.lazy_rows import OutOfMemory
from rootstock.runtime.torch.passed_checks import PassedCheck, PassedChecks
from rootstock.runtime.torch.self_check import self_check, use_attention
from rootstock.runtime.trial import Disagreement

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchExecution:
    """Model that passed the self-check, and its configuration. The model is left in its execution mode."""

    layout: TorchLayout
    description: ModelDescription
    compiled: Compiled | None = None  # the compiled attention backend; None: torch's operations only
    fusion: Fusion = NOTHING_FUSED


def choose_mode(
    model: nn.Module,
    found: Surveyed,
    context_limit: int,
    describe: Callable[[TorchLayout], ModelDescription],
    make_runtime: Callable[[TorchExecution, Tuning], Runtime],
    progress: Callable[[float], None],
    compiled: Compiled | None = None,
    checks: PassedChecks | None = None,
) -> TorchExecution:
    """Chooses the best execution mode that passes the self-check, or passed it before. Raises ModelUnsupported or
    SelfCheckFailed if none does."""
    if checks is not None and (known := checks.passed()) is not None:
        try:
            return _as_before(known, model, found, context_limit, describe)
        except OutOfMemory:
            raise
        except Exception:  # nothing is believed of a check that does not fit the model
            _log.warning("A remembered self-check does not fit; the model is checked again.", exc_info=True)
            undo_fusion(model)
            undo_parts(model)
            checks.forget()
    modes: list[ExecutionMode] = ["packed", "packed, token-wise mixers", "one sequence per forward"]
    if not found.states:
        modes.remove("packed, token-wise mixers")
    failures: list[Exception] = []
    refused: ExecutionMode | None = None  # the mode in which the compiled backend failed
    for mode, kernel, fuses in _attempts(modes, compiled):
        try:
            layout = _set_mode(mode, model, found, context_limit)
            fusion = _fuse(model, found, context_limit) if fuses else NOTHING_FUSED
            if fuses and not fusion.parts:
                undo_parts(model)
                continue  # the next attempt is the same
            served = TorchExecution(layout, replace(describe(layout), execution_mode=mode), kernel, fusion)
            remark = self_check(
                model,
                layout.calling,
                served.description,
                functools.partial(make_runtime, served),
                progress,
            ).remark
        except (InvalidOption, *OutOfMemory):
            raise
        except Exception as failure:  # the model's own code may raise anything when it meets the hooks
            undo_fusion(model)
            undo_parts(model)
            failures.append(failure)
            refused = mode if kernel is not None else refused
            continue
        if refused == mode and kernel is None:
            _log.warning(
                "Attention is slower than it could be, without %s: %s", compiled, _reason(failures[-1])
            )
        reason = "; ".join(dict.fromkeys([*map(_reason, failures), *([remark] if remark else [])]))
        if checks is not None:
            checks.remember(PassedCheck(mode, kernel, fuses, reason, fusion.forms))
        return replace(served, description=replace(served.description, mode_reason=reason))
    name = describe(sequential_layout(found)).name
    disagreements = [failure for failure in failures if isinstance(failure, Disagreement)]
    if disagreements:
        last = disagreements[-1]
        raise SelfCheckFailed(name, last.figure, last.allowed, last.quantity) from last
    raise ModelUnsupported(name, "; ".join(dict.fromkeys(map(_reason, failures)))) from failures[-1]


def _as_before(
    known: PassedCheck,
    model: nn.Module,
    found: Surveyed,
    context_limit: int,
    describe: Callable[[TorchLayout], ModelDescription],
) -> TorchExecution:
    """Makes the model run as when it passed its check."""
    layout = _set_mode(known.mode, model, found, context_limit)
    fusion = _fuse(model, found, context_limit, known.parts) if known.fuses else NOTHING_FUSED
    if dict(fusion.forms) != dict(known.parts):
        raise ValueError("other parts of the model are fused")
    description = replace(describe(layout), execution_mode=known.mode, mode_reason=known.reason)
    return TorchExecution(layout, description, known.compiled, fusion)


def _attempts(
    modes: Sequence[ExecutionMode], compiled: Compiled | None
) -> Iterator[tuple[ExecutionMode, Compiled | None, bool]]:
    """Yields (mode, compiled backend, whether the model's parts are fused), from best to last resort."""
    for mode in modes:
        if mode != "one sequence per forward":
            if compiled == "triton":
                yield mode, compiled, False
            elif compiled == "numba":  # fused parts are for CPUs, like this backend
                yield mode, compiled, True
                yield mode, compiled, False
            yield mode, None, True
        yield mode, None, False


def _fuse(
    model: nn.Module, found: Surveyed, context_limit: int, known: Mapping[str, str] | None = None
) -> Fusion:
    try:
        from rootstock.runtime.torch.fusion.find import fuse
    except ImportError:  # Numba is missing; attention_backends logs it
        return NOTHING_FUSED
    return fuse(model, found, next(model.parameters()).device, context_limit, known)


def _set_mode(mode: ExecutionMode, model: nn.Module, found: Surveyed, context_limit: int) -> TorchLayout:
    """Makes the model run in this mode. Raises LayerUnsupported if it cannot."""
    if mode == "one sequence per forward":
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
    if mode == "packed" and found.states:
        refuse_forgetful_mixers(model, found, device, context_limit)
    return layout


def _reason(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    said = lines[0] if lines else ""
    if isinstance(failure, (LayerUnsupported, Disagreement)):
        return said
    return f"{type(failure).__name__}: {said}"
