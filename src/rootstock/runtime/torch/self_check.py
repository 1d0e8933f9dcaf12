"""Self-check of every load: the model's own attention and the runtime's must agree on a few dozen tokens.

The reference is the model's own code: its eager attention over dense K and V, one sequence at a time, in one pass.
`runtime/trial.py` has the schedule that the runtime runs, and the comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    ScoredRows,
    Trial,
    Variant,
    Verdict,
    allowed_difference,
    compare,
    trial_tokens,
)

_NOISE_SAMPLES = 3


def self_check(
    model: nn.Module,
    calling: Calling,
    description: ModelDescription,
    make_runtime: Callable[[Tuning], Runtime],
    progress: Callable[[float], None],
    variant: Variant | None = None,
) -> Verdict:
    """Runs the self-check. Raises Disagreement if the figure of a kind of row is larger than allowed."""
    tokens = trial_tokens(description)

    def served(sequence: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if variant is None else variant.serving(sequence)

    def decoded(rows: ScoredRows) -> Logits:
        with own_attention(model), served(rows.sequence):
            return _decoded(model, calling, tokens[rows.sequence], rows)

    def own_noise(measure: Measure) -> float:
        with own_attention(model), served("long"):
            return noise(model, tokens["long"], description.dtype, measure)

    expected: dict[str, Logits] = {}
    with own_attention(model):
        for name, sequence in tokens.items():
            with served(name):
                expected[name] = dense_logits(model, sequence[None])[0]
    progress(0.3)
    adapter = "" if variant is None else variant.adapter
    rows = Trial(make_runtime(_small_slices(description)), tokens["long"], tokens["short"], adapter).run()
    progress(0.7)
    verdict = compare(rows, expected, decoded, own_noise, description.dtype)
    progress(1.0)
    return verdict


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


def _decoded(model: nn.Module, calling: Calling, tokens: Tokens, rows: ScoredRows) -> Logits:
    """Computes the same rows by the model with its own cache: the prefilled positions in one pass, then token by
    token."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    end = rows.positions.stop
    prompt = min(rows.prefilled, end)
    cache, logits = None, []
    with torch.inference_mode():
        for first, last in [(0, prompt), *((position, position + 1) for position in range(prompt, end))]:
            positions = torch.arange(first, last, device=device)
            output = calling.own(model, ids[first:last], positions, cache)
            cache = getattr(output, calling.cache)
            logits.append(output.logits[0].float().cpu().numpy())
    scored: Logits = np.concatenate(logits)[rows.positions]
    return scored


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
