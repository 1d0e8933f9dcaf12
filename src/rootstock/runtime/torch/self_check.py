"""Self-check of every load: the model's own attention and the runtime's must agree on a few dozen tokens.

The reference is the model's own code: its eager attention over dense K and V, one sequence at a time, in one pass.
`runtime/trial.py` has the schedule that the runtime runs, and the comparison.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rootstock.cache.families import token_families
from rootstock.cache.types import Tokens
from rootstock.kernels.torch.sliced_attention import Tuning
from rootstock.runtime.base import Logits, ModelDescription, Runtime
from rootstock.runtime.torch.fusion.base import unfused
from rootstock.runtime.torch.hooks import Calling
from rootstock.runtime.trial import (
    BLOCK_SIZE,
    Measure,
    Trial,
    TrialResult,
    Variant,
    allowed_difference,
    check,
    trial_tokens,
)

_NOISE_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class _EagerModel:
    """The model by its own code, one sequence at a time."""

    model: nn.Module
    calling: Calling
    dtype: str

    def running(self) -> contextlib.AbstractContextManager[None]:
        return own_attention(self.model)

    def in_one_pass(self, tokens: Tokens) -> Logits:
        logits: Logits = dense_logits(self.model, tokens[None])[0]
        return logits

    def decoded(self, tokens: Tokens, prefilled: int) -> Logits:
        device = next(self.model.parameters()).device
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        ends = range(prefilled, len(tokens) + 1)
        cache, logits = None, []
        with torch.inference_mode():
            for first, last in itertools.pairwise([0, *ends]):
                positions = torch.arange(first, last, device=device)
                output = self.calling.own(self.model, ids[first:last], positions, cache)
                cache = getattr(output, self.calling.cache)
                logits.append(output.logits[0].float().cpu().numpy())
        return np.concatenate(logits)

    def noise(self, tokens: Tokens, measure: Measure) -> float:
        return noise(self.model, tokens, self.dtype, measure)


def self_check(
    model: nn.Module,
    calling: Calling,
    description: ModelDescription,
    make_runtime: Callable[[Tuning], Runtime],
    progress: Callable[[float], None],
    variant: Variant | None = None,
) -> TrialResult:
    """Runs the self-check. Raises Disagreement if the figure of a kind of row is larger than allowed."""
    own = _EagerModel(model, calling, description.dtype)
    return check(own, description, lambda: make_runtime(_small_slices(description)), progress, variant)


def trial_logits(
    description: ModelDescription, make_runtime: Callable[[Tuning], Runtime]
) -> dict[str, Logits]:
    """Runs the same schedule without comparing. Returns the logits [rows, vocab] of each kind of row."""
    tokens = trial_tokens(description)
    rows = Trial(make_runtime(_small_slices(description)), tokens["long"], tokens["short"]).run()
    return {kind: np.concatenate([scored.logits for scored in its]) for kind, its in rows.items()}


def rounding(model: nn.Module, description: ModelDescription) -> float:
    """Returns the difference that the self-check allows for the model's own noise in this dtype."""
    with own_attention(model):
        tokens, dtype = trial_tokens(description)["long"], description.dtype
        return allowed_difference(dtype, lambda measure: noise(model, tokens, dtype, measure))


def _small_slices(description: ModelDescription) -> Tuning:
    """Returns slices of about 8 positions, so that these few tokens reach all code paths of a kernel."""
    layer_bytes = [family.bytes_per_token // family.layers for family in token_families(description.families)]
    eight = max(1, 8 * max(layer_bytes, default=0) // 2)  # K is half of a position's bytes
    return Tuning(eight, 2 * eight, many_rows=8, share_from=2 * BLOCK_SIZE, split_positions=8)


def noise(model: nn.Module, tokens: Tokens, dtype: str, measure: Measure) -> float:
    """Measures how much one more rounding of the embedded tokens changes the model's own logits."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    random = torch.Generator().manual_seed(0)

    def shake(module: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
        """Adds noise to embedded [samples, tokens, hidden]. The first sample is unchanged."""
        move = eps * (torch.rand(embedded.shape, generator=random) - 0.5).to(embedded.device)
        move[0] = 0
        return (embedded.float() * (1 + move)).to(embedded.dtype)

    hook = model.get_input_embeddings().register_forward_hook(shake)  # type: ignore[operator]
    try:
        still, *shaken = dense_logits(model, np.stack([tokens] * (1 + _NOISE_SAMPLES)))
    finally:
        hook.remove()
    # The logits themselves are rounded to this dtype, so the two sides may always differ by eps.
    return max(float(eps), measure(np.concatenate(shaken), np.concatenate([still] * _NOISE_SAMPLES)))


@contextlib.contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Runs the model by its own code: transformers calls the attention of a modelling file "eager"."""
    config: Any = model.config
    before = str(config._attn_implementation)
    use_attention(model, "eager")
    try:
        with unfused(model):
            yield
    finally:
        use_attention(model, before)


def use_attention(model: nn.Module, implementation: str) -> None:
    """Sets a model's attention implementation. Models that have only one ignore it."""
    if model._can_set_attn_implementation():  # type: ignore[operator]
        model.set_attn_implementation(implementation)  # type: ignore[operator]


def dense_logits(model: nn.Module, tokens: Tokens) -> NDArray[np.float32]:
    """Computes tokens [sequences, tokens] → [sequences, tokens, vocab], each sequence in one pass without a cache."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        logits: NDArray[np.float32] = model(input_ids=ids, use_cache=False).logits.float().cpu().numpy()
    return logits
