"""Mamba-2 mixers limit their time step in every token, for any number of tokens per step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from checkpoints import VOCAB, save
from rootstock.runtime.torch.mamba_time_steps import _limiting
from twins.driving import ByHand, allocate, random_tokens
from twins.torch_models import Dense, load, loaded
from twins.ways import pieces

TOLERANCE = 1e-3  # of the standard deviation of the logits

NARROW = {"time_step_limit": (0.4, 1.2)}  # binds from both sides


def in_chunks(directory: Path, tokens: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Runs the tokens one by one, by three, which leaves one of 31 over, and all at once."""
    runtime = load(directory)
    allocate(runtime)
    for chunk in (1, 3, len(tokens)):
        hand = ByHand(runtime)
        running = hand.start(tokens)
        for new in pieces(list(range(chunk, len(tokens), chunk)), len(tokens)):
            hand.step({running: new})
        yield np.concatenate(running.logits)


def largest(ours: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Returns the largest difference in standard deviations of the expected logits."""
    return float(np.abs(ours - expected).max() / expected.std())


@pytest.mark.behaviour(23)
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("zamba2", {}),
        ("nemotron_h", {}),
        ("nemotron_h", NARROW),
        ("mamba2", NARROW),
        ("bamba", NARROW),
        ("granitemoehybrid", NARROW),
        ("falcon_h1", NARROW),
    ],
)
def test_one_token_is_limited_like_several(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    directory, tokens = save(tmp_path, model_type, **fields), random_tokens(VOCAB, 31, 3)
    own = Dense(directory, attention="eager")
    if fields:
        use_limits(own, fields["time_step_limit"])
    expected = own.logits(tokens)
    decoded = own.cached_logits(tokens[None], range(1, len(tokens)))[0]
    assert largest(decoded, expected) > 10 * TOLERANCE, (
        "the limits bind, and the model's own decode ignores them"
    )
    for logits in in_chunks(directory, tokens):
        assert largest(logits, expected) <= TOLERANCE


@pytest.mark.behaviour(23)
def test_the_limits_are_those_of_the_configuration(tmp_path: Path) -> None:
    """transformers' Nemotron-H reads `time_step_min` instead, which describes how weights were initialised."""
    unlimited = (0.0, float("inf"))
    directory, tokens = save(tmp_path, "nemotron_h", time_step_limit=unlimited), random_tokens(VOCAB, 31, 3)
    own = Dense(directory, attention="eager")
    by_its_file = own.logits(tokens)
    use_limits(own, unlimited)
    expected = own.logits(tokens)
    assert largest(by_its_file, expected) > 10 * TOLERANCE
    for logits in in_chunks(directory, tokens):
        assert largest(logits, expected) <= TOLERANCE


def test_a_mixer_without_limits_stays_unchanged() -> None:
    runtime = loaded("mamba2")
    biases = [module.dt_bias for module in runtime._model.modules() if hasattr(module, "dt_bias")]
    assert biases
    assert {type(bias) for bias in biases} == {nn.Parameter}
    assert "time_steps" not in runtime.description.weights_fingerprint


def test_states_computed_with_other_limits_are_not_shared() -> None:
    """States of earlier versions, on a disk, were decoded without limits."""
    assert loaded("zamba2").description.weights_fingerprint.endswith("/time_steps.1")


@pytest.mark.parametrize("declared", [None, "0.1", [0.1], [0.9, 0.1], [None, 1.0], [float("nan"), 1.0]])
def test_invalid_limits_are_ignored(tmp_path: Path, declared: Any) -> None:
    """A configuration comes from outside."""
    directory = save(tmp_path, "zamba2")
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(
        config.replace("{", f'{{"time_step_limit": {json.dumps(declared)},', 1)
    )
    mixers = [m for m in load(directory)._model.modules() if hasattr(m, "time_step_limit")]
    assert {mixer.time_step_limit for mixer in mixers} == {(0.001, float("inf"))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_limited_step_is_bit_for_bit_the_clamped_one(dtype: torch.dtype) -> None:
    """Compares both forms: the scan's, and the update's with the bias widened to every channel of its head."""
    random = torch.Generator().manual_seed(0)
    bias, steps = (3 * torch.randn(shape, generator=random).to(dtype) for shape in ((8,), (5, 8)))
    limiting = _limiting(nn.Parameter(bias, requires_grad=False), (0.4, 1.2))

    def widened(of_heads: torch.Tensor) -> torch.Tensor:
        return of_heads[:, None].expand(-1, 16)

    with torch.inference_mode():
        for limited, plain in (
            (steps + limiting.to(dtype), steps + bias),
            (widened(steps[0]) + widened(limiting), widened(steps[0]) + widened(bias)),
        ):
            step, unlimited = functional.softplus(limited), functional.softplus(plain)
            assert type(step) is torch.Tensor
            assert torch.equal(step, unlimited.clamp(0.4, 1.2))
            assert not torch.equal(step, unlimited)


def use_limits(own: Dense, limits: tuple[float, float]) -> None:
    for module in own.model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = limits
