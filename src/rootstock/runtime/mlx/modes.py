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
from rootstock.kernels.metal.trial import why_not
from rootstock.runtime.base import ExecutionMode, ModelDescription
from rootstock.runtime.mlx.runner import MlxRuntime, Served
from rootstock.runtime.mlx.self_check import self_check
from rootstock.runtime.mlx.survey import Layout, Unsupported
from rootstock.runtime.model_files import first_line
from rootstock.runtime.trial import Disagreement

_log = logging.getLogger(__name__)

_MODES: tuple[ExecutionMode, ...] = ("batched", "batched, gathered K and V", "one sequence per forward")


def choose_mode(
    model: nn.Module,
    layout: Layout,
    description: ModelDescription,
    make_runtime: Callable[[Served], MlxRuntime],
    progress: Callable[[float], None],
    kernel: PagedKernel | None = None,
) -> Served:
    """Chooses the best execution mode that passes the self-check. Raises ModelUnsupported or SelfCheckFailed if none
    does."""
    failures: list[Exception] = []
    for mode, its_kernel in _attempts(kernel):
        served = Served(layout, replace(description, execution_mode=mode), its_kernel)
        try:
            runtime = make_runtime(served)
            remark = self_check(model, served.description, lambda: runtime, progress).remark  # noqa: B023
            if its_kernel is not None and (reason := why_not(its_kernel, its_kernel.uses)):
                raise _KernelWrong(reason)
        except (InvalidOption, MemoryError):
            raise
        except Exception as failure:  # the model's own code may raise anything when it meets the stand-ins
            if _is_out_of_memory(failure):
                raise
            failures.append(failure)
            if its_kernel is not None:
                _log.warning(
                    "Attention is slower than it could be, without the Metal kernel: %s", _reason(failure)
                )
            continue
        reasons = list(map(_reason, failures))
        if mode == "batched" and layout.layers and not runtime.stats.attentions_on_pools:
            # The model changes K, V or the mask before it attends (MLA), so that it has read gathers.
            mode = "batched, gathered K and V"
            reasons.append("its attention is not called with K, V and mask as its caches return them")
        reasons += [remark] if remark else []
        said = "; ".join(dict.fromkeys(reasons))
        return replace(served, description=replace(served.description, execution_mode=mode, mode_reason=said))
    disagreements = [failure for failure in failures if isinstance(failure, Disagreement)]
    if disagreements:
        last = disagreements[-1]
        raise SelfCheckFailed(description.name, last.figure, last.allowed, last.quantity) from last
    raise ModelUnsupported(description.name, "; ".join(dict.fromkeys(map(_reason, failures)))) from failures[
        -1
    ]


class _KernelWrong(Exception):
    """Error: the Metal kernel fails, or disagrees with attention over gathers."""


def _attempts(kernel: PagedKernel | None) -> Iterator[tuple[ExecutionMode, PagedKernel | None]]:
    """Yields (mode, kernel), from best to last resort."""
    if kernel is not None:
        yield "batched", kernel
    for mode in _MODES:
        yield mode, None


def _reason(failure: BaseException) -> str:
    if isinstance(failure, PoolsLost):
        return _reason(failure.cause)
    said = first_line(failure)
    return (
        said
        if isinstance(failure, (Unsupported, Disagreement, _KernelWrong))
        else f"{type(failure).__name__}: {said}"
    )


def _is_out_of_memory(failure: BaseException) -> bool:
    """Returns whether MLX could not allocate an array: it has no exception of its own for that."""
    if isinstance(failure, PoolsLost):
        return _is_out_of_memory(failure.cause)
    return isinstance(failure, MemoryError) or "malloc" in str(failure)
