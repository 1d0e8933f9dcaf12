"""Limits of a Mamba-2 time step, applied to updates by one token as to scans over several.

A mixer computes its time step as softplus(dt + dt_bias). transformers clamps the result to `time_step_limit` in the
scan over several tokens, but not in the update by one token. The two disagree where a limit binds. Logits then depend
on how a prompt is cut into chunks, and on the positions that were decoded.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rootstock.runtime.torch.inspect.config import text_config
from rootstock.runtime.torch.inspect.survey import Surveyed

_UNLIMITED = (0.0, float("inf"))  # softplus is never negative

Limits = tuple[float, float]


def limit_time_steps(model: nn.Module, found: Surveyed) -> bool:
    """Makes every mixer of the model apply its limits to each token. Returns whether this changed any mixer.

    The limits are the configuration's `time_step_limit`. Some model files ignore that field (transformers' Nemotron-H
    clamps to at least `time_step_min`, which only describes how weights are initialised); a model whose configuration
    declares no limits keeps the limits of its file.
    """
    declared = _limits(getattr(text_config(model), "time_step_limit", None))
    changed = False
    for mixer in {mixer for mixers in found.mixers.values() for mixer in mixers}:
        own = _limits(getattr(mixer, "time_step_limit", None))
        bias = getattr(mixer, "dt_bias", None)
        if own is None or not isinstance(bias, nn.Parameter):
            continue
        limits = declared or own
        if limits != own:
            mixer.time_step_limit = limits  # type: ignore[assignment]
            changed = True
        if limits != _UNLIMITED:
            mixer.dt_bias = _limiting(bias, limits)
            changed = True
    return changed


def limits_of(mixer: nn.Module) -> Limits:
    """Returns the limits that a mixer applies to each token, after `limit_time_steps`."""
    bias = getattr(mixer, "dt_bias", None)
    return bias.limits if isinstance(bias, _LimitingBias) else _UNLIMITED


def _limits(given: object) -> Limits | None:
    """Returns the two limits, or None if these are not two numbers in order."""
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        return None
    if not all(isinstance(bound, (int, float)) for bound in given):
        return None
    low, high = map(float, given)
    return (max(0.0, low), high) if low <= high and high > 0.0 else None


class _LimitingBias(Tensor):
    """Parameter class for a mixer's `dt_bias`: the softplus of any sum with it is clamped, in the scan and the
    update."""

    limits: ClassVar[Limits]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(Tensor).detach().clone()
        copied = _limiting(nn.Parameter(plain, requires_grad=False), self.limits)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is not functional.softplus:
            return result  # a sum or a view, which has this class again
        with torch._C.DisableTorchFunctionSubclass():
            return result.as_subclass(Tensor).clamp(*cls.limits)


def _limiting(bias: nn.Parameter, limits: Limits) -> nn.Parameter:
    of_limits = type("LimitingBias", (_LimitingBias,), {"limits": limits})
    return nn.Parameter(bias.detach().as_subclass(of_limits), requires_grad=False)
