"""Comparison of a loaded model with transformers' own, and a runtime's pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from checkpoints import VOCAB
from rootstock.runtime.torch.kv_pool import TorchPool
from rootstock.runtime.torch.runner import TorchRuntime
from twins.driving import allocate, packed_logits, random_tokens
from twins.torch_models import Dense

STEPS = [{0: 17, 1: 20}, {1: 1, 0: 22}, {0: 1}]  # chunks and decodes of sequences with 40 and 21 tokens


def pool_of(runtime: TorchRuntime) -> TorchPool:
    assert runtime._pool is not None
    return runtime._pool


def assert_agrees(
    runtime: TorchRuntime,
    directory: Path,
    lengths: Sequence[int] = (40, 21),
    steps: Sequence[Mapping[int, int]] = STEPS,
) -> None:
    """Compares packed logits with those of the model by its own attention, one sequence at a time."""
    allocate(runtime)
    sequences = [random_tokens(VOCAB, length, length) for length in lengths]
    own = Dense(directory, attention="eager")
    for tokens, logits in zip(sequences, packed_logits(runtime, sequences, steps), strict=True):
        expected = own.logits(tokens)
        assert float(np.abs(logits - expected).max()) <= 1e-3 * float(expected.std())
