"""Judgement of a model whose logits differ from the reference: by its own noise, and by other tokens after a tie.

Where a model chooses experts, two of them may lie within rounding of each other for one token. All later rows then
differ, in every way of computing them. A model beyond the bar is therefore run over two other draws of tokens and
counts by the worse of them (`tied` is the factor of the replaced draw). A wrong state differs in every draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers.utils import logging as transformers_logging

ALLOWED = 4.0  # times the model's own noise
DRAWS_AFTER_A_TIE = (100, 200)


@dataclass
class Measured:
    """Differences of one model from its one pass."""

    model_type: str
    noise: float = float("nan")  # largest difference of the model's own cached runs
    factors: dict[str, float] = field(default_factory=dict)  # way → largest difference, in noises
    refused: str = ""  # reason
    failed: str = ""  # error that is not a refusal
    tied: float | None = None
    seconds: float = 0.0

    @property
    def factor(self) -> float:
        """Returns the factor of the worst way."""
        return max(self.factors.values(), default=float("nan"))

    @property
    def is_served(self) -> bool:
        return bool(self.factors) and not self.failed

    def __str__(self) -> str:
        if not self.is_served:
            return f"{self.model_type:18} {'FAILED' if self.failed else 'refused'}: {self.failed or self.refused}"
        ways = " ".join(f"{way} {factor:.2f}" for way, factor in self.factors.items())
        return f"{self.model_type:18} factor {self.factor:5.2f}  own {self.noise:.1e}  {ways}  {self.seconds:.1f} s"


M = TypeVar("M", bound=Measured)


def run_quietly() -> None:
    """Makes this process compute on one thread and transformers write no warnings."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def judged(measure: Callable[[int], M]) -> M:
    """Measures draw 0 of the tokens and, if it is beyond the bar, the worse of two others."""
    first = measure(0)
    if not first.is_served or first.factor <= ALLOWED:
        return first
    print(first, flush=True)
    others = [measure(draw) for draw in DRAWS_AFTER_A_TIE]
    worse = max(others, key=lambda other: (not other.is_served, other.factor))
    worse.tied = round(first.factor, 2)
    return worse


def figures_of(served: Sequence[Measured], every: Iterable[Measured]) -> dict[str, Any]:
    factors = {m.model_type: round(m.factor, 2) for m in served}
    return {
        "worst_factor": max(factors.values(), default=None),
        "worst_model": max(factors, key=factors.__getitem__, default=None),
        "over": {name: factor for name, factor in factors.items() if not factor <= ALLOWED},
        "tied": {m.model_type: m.tied for m in every if m.tied is not None},
    }
