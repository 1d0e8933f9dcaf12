"""Self-check of every load: the model with mlx-lm's own caches and the runtime must agree on a few dozen tokens.

The reference is the model with the caches that it makes for itself, one sequence at a time. `runtime/trial.py` has
the schedule that the runtime runs, and the comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_cache

from rootstock.cache.types import Tokens
from rootstock.runtime.base import Logits, ModelDescription, Runtime
from rootstock.runtime.mlx.survey import UnsupportedModel
from rootstock.runtime.trial import (
    Measure,
    TrialResult,
    Variant,
    allowed_difference,
    check,
    measure_for,
    trial_tokens,
)

_NOISE_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class _CachedModel:
    """The model with the caches that it makes for itself, one sequence at a time."""

    model: nn.Module
    dtype: str

    def running(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def in_one_pass(self, tokens: Tokens) -> Logits:
        return own_logits(self.model, tokens)

    def decoded(self, tokens: Tokens, prefilled: int) -> Logits:
        return own_logits(self.model, tokens, prefilled)

    def noise(self, tokens: Tokens, measure: Measure) -> float:
        return noise(self.model, tokens, self.dtype, measure)


def self_check(
    model: nn.Module,
    description: ModelDescription,
    make_runtime: Callable[[], Runtime],
    progress: Callable[[float], None],
    variant: Variant | None = None,
) -> TrialResult:
    """Runs the self-check. Raises Disagreement if the figure of a kind of row is larger than allowed."""
    return check(_CachedModel(model, description.dtype), description, make_runtime, progress, variant)


def refuse_inconsistent(model: nn.Module, description: ModelDescription) -> None:
    """Raises UnsupportedModel if the model's logits with its own cache depend on how its tokens are divided into
    forwards.

    No runtime can then agree with it: the first half of the tokens is compared alone and followed by decodes, with
    one pass.
    """
    dtype, tokens = description.dtype, trial_tokens(description)["long"]
    figure = measure_for(dtype)(own_logits(model, tokens, len(tokens) // 2), own_logits(model, tokens))
    if not figure <= allowed_difference(dtype, lambda measure: noise(model, tokens, dtype, measure)):
        raise UnsupportedModel(
            f"gives other logits by mlx-lm's own cache if its tokens are divided into a prefill and decodes (they "
            f"differ by {figure:.2g}), so that no cache can repeat them"
        )


def own_logits(model: nn.Module, tokens: Tokens, prompt: int | None = None) -> Logits:
    """Computes [tokens, vocab] with the model's own caches: the first `prompt` tokens in one pass, the others one by
    one. None: all in one pass."""
    caches = mlx_cache.make_prompt_cache(model)
    first = len(tokens) if prompt is None else min(prompt, len(tokens))
    logits = []
    for start, end in [(0, first), *((position, position + 1) for position in range(first, len(tokens)))]:
        output: mx.array = model(mx.array(tokens[None, start:end]), cache=caches)
        logits.append(np.array(output[0].astype(mx.float32)))
    return np.concatenate(logits)


def noise(model: nn.Module, tokens: Tokens, dtype: str, measure: Measure) -> float:
    """Measures how much one more rounding of the embedded tokens changes the model's own logits.

    Raises UnsupportedModel if no module embeds them.
    """
    eps = float(mx.finfo(getattr(mx, dtype)).eps)
    still = own_logits(model, tokens)
    random = np.random.default_rng(0)
    shaken = []
    for _ in range(_NOISE_SAMPLES):
        with _shaken_embeddings(model, tokens, eps, random) as shakes:
            shaken.append(own_logits(model, tokens))
        if not shakes:
            raise UnsupportedModel(
                "embeds its tokens in no module of its own, so that its noise cannot be measured"
            )
    # The logits themselves are rounded to this dtype, so the two sides may always differ by eps.
    return max(eps, measure(np.concatenate(shaken), np.concatenate([still] * _NOISE_SAMPLES)))


@contextlib.contextmanager
def _shaken_embeddings(
    model: Any, tokens: Tokens, eps: float, random: np.random.Generator
) -> Iterator[Sequence[mx.array]]:
    """Adds noise to the embedded tokens of each forward. Yields the noise that was added so far.

    MLX has no hooks, and Python looks `__call__` up in the class. An embedding is therefore given a class of its own
    for a while. It is found by its argument, because a model may embed positions, too.
    """
    shakes: list[mx.array] = []

    def shake(ids: Any, embedded: mx.array) -> mx.array:
        if shakes or not _are_tokens(ids, tokens):
            return embedded
        shakes.append(mx.array(1 + eps * (random.random(embedded.shape, np.float32) - np.float32(0.5))))
        return (embedded.astype(mx.float32) * shakes[0]).astype(embedded.dtype)

    embeddings = [(module, type(module)) for module in model.modules() if _is_embedding(module)]
    for module, own in embeddings:
        module.__class__ = _shaken_class(own, shake)
    try:
        yield shakes
    finally:
        for module, own in embeddings:
            module.__class__ = own


def _are_tokens(ids: Any, tokens: Tokens) -> bool:
    is_integer = isinstance(ids, mx.array) and mx.issubdtype(ids.dtype, mx.integer)
    return is_integer and np.array_equal(np.array(ids).ravel(), tokens)


def _is_embedding(module: nn.Module) -> bool:
    """Returns whether a module embeds by a table of its own, in any format."""
    return isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)) or (
        "Embedding" in type(module).__name__ and "weight" in module
    )


def _shaken_class(own: type[nn.Module], shake: Callable[[Any, mx.array], mx.array]) -> type[nn.Module]:
    def call(self: Any, ids: Any, *arguments: Any, **options: Any) -> Any:
        return shake(ids, own.__call__(self, ids, *arguments, **options))

    return type(own.__name__, (own,), {"__call__": call})
