"""Execution modes of an mlx-lm model, from best to last resort. The self-check of each decides whether to fall back.

- batched: sequences with equally many rows share a forward, and attention reads the pools, by the Metal kernel if
  there is one, otherwise over views and gathers
- batched, gathered K and V: the same, but the model's own attention reads dense copies of K and V
- one sequence per forward: for models that take no batch of sequences with different lengths
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import mlx.nn as nn

from rootstock.errors import InvalidOption, ModelUnsupported, PoolsLost, SelfCheckFailed
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.runtime.base import ExecutionMode, ModelDescription
from rootstock.runtime.mlx.runner import MlxExecution, MlxRuntime
from rootstock.runtime.mlx.self_check import refuse_inconsistent, self_check
from rootstock.runtime.mlx.survey import MlxLayout, UnsupportedModel
from rootstock.runtime.model_files import first_line
from rootstock.runtime.trial import Disagreement

_log = logging.getLogger(__name__)

_BATCHED: ExecutionMode = "batched"
_GATHERED: ExecutionMode = "batched, gathered K and V"


def choose_mode(
    model: nn.Module,
    layout: MlxLayout,
    description: ModelDescription,
    make_runtime: Callable[[MlxExecution], MlxRuntime],
    progress: Callable[[float], None],
    kernel: PagedKernel | None = None,
    why_not: Callable[[PagedKernel], str | None] = lambda kernel: None,
) -> MlxExecution:
    """Chooses the best execution mode that passes the self-check. Raises ModelUnsupported or SelfCheckFailed if none
    does.

    `why_not` tries the kernel for longer contexts than the self-check's, and returns a reason against it, or None.
    """
    failures: list[Exception] = []
    for mode, its_kernel, grouped_masks in _attempts(kernel):
        served = MlxExecution(layout, replace(description, execution_mode=mode), its_kernel, grouped_masks)
        runtimes: list[MlxRuntime] = []

        def make(served: MlxExecution = served, made: list[MlxRuntime] = runtimes) -> MlxRuntime:
            made.append(make_runtime(served))
            return made[-1]

        try:
            remark = self_check(model, served.description, make, progress).remark
            if mode == _BATCHED and layout.layers and not runtimes[-1].stats.attentions_on_pools:
                # The next mode computes the same, and does not wait for attentions on the pools, which never come.
                failures.append(UnsupportedModel("changes the K and V of its cache before its attention"))
                served = MlxExecution(layout, replace(description, execution_mode=_GATHERED))
            elif its_kernel is not None and (fault := why_not(its_kernel)):
                raise UnsupportedModel(fault)
        except (InvalidOption, MemoryError):
            raise
        except Exception as failure:  # the model's own code may raise anything when it meets the stand-ins
            if _is_out_of_memory(failure):
                raise
            if grouped_masks:
                continue  # a trial of a rare kind of model; the failure before it is the reason
            failures.append(failure)
            if its_kernel is not None:
                _log.warning(
                    "Attention is slower than it could be, without the Metal kernel: %s", _reason(failure)
                )
            continue
        reasons = dict.fromkeys([*map(_reason, failures), *([remark] if remark else [])])
        return replace(served, description=replace(served.description, mode_reason="; ".join(reasons)))
    disagreements = [failure for failure in failures if isinstance(failure, Disagreement)]
    if disagreements:
        try:
            refuse_inconsistent(model, description)
        except UnsupportedModel as refusal:
            raise ModelUnsupported(description.name, f"it {refusal}") from refusal
        last = disagreements[-1]
        raise SelfCheckFailed(description.name, last.figure, last.allowed, last.quantity) from last
    raise ModelUnsupported(description.name, "; ".join(dict.fromkeys(map(_reason, failures)))) from failures[
        -1
    ]


def _attempts(kernel: PagedKernel | None) -> Iterator[tuple[ExecutionMode, PagedKernel | None, bool]]:
    """Yields (mode, kernel, whether masks are grouped), from best to last resort."""
    if kernel is not None:
        yield _BATCHED, kernel, False
    yield _BATCHED, None, False
    yield _GATHERED, None, False
    yield _GATHERED, None, True
    yield "one sequence per forward", None, False


def _reason(failure: BaseException) -> str:
    if isinstance(failure, PoolsLost):
        return _reason(failure.cause)
    said = first_line(failure)
    if isinstance(failure, (UnsupportedModel, Disagreement)):
        return said
    return f"{type(failure).__name__}: {said.partition('. ')[0]}"  # further sentences list the types of arguments


def _is_out_of_memory(failure: BaseException) -> bool:
    """Returns whether memory was missing. MLX has no exception of its own for that: its allocator names malloc, and
    Metal says "Insufficient Memory"."""
    if isinstance(failure, PoolsLost):
        return _is_out_of_memory(failure.cause)
    said = str(failure)
    return isinstance(failure, MemoryError) or "malloc" in said or "Insufficient Memory" in said
