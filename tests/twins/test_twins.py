"""Tiny checkpoints of twelve architectures, through the real loader: our logits are the dense model's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rootstock.cache.plan import Tokens
from rootstock.runtime.base import Logits
from rootstock.runtime.torch_model import TorchRuntime
from twins.checkpoints import SERVED, VOCAB, save
from twins.driving import BLOCK_SIZE, BLOCKS, Cached, Dense, load, mixed_steps, packed_logits, random_tokens


@dataclass(frozen=True)
class Twin:
    runtime: TorchRuntime
    dense: Dense

    def assert_agrees(self, logits: Logits, tokens: Tokens, first: int = 0) -> None:
        """logits [tokens - first, vocab]"""
        expected = self.dense.logits(tokens)
        assert logits.shape == expected[first:].shape
        assert float(np.abs(logits - expected[first:]).max()) <= 1e-3 * float(expected.std())


@pytest.fixture(scope="module", params=SERVED)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    threads = torch.get_num_threads()
    directory = save(tmp_path_factory.mktemp("twin"), request.param)
    runtime = load(directory)
    runtime.allocate((BLOCKS,), BLOCK_SIZE)
    yield Twin(runtime, Dense(directory))
    torch.set_num_threads(threads)


@pytest.mark.behaviour(23)
def test_packed_and_chunked_in_any_mixture_gives_the_dense_logits(twin: Twin) -> None:
    sequences = [random_tokens(VOCAB, length, seed) for seed, length in enumerate((70, 33, 41, 9))]
    steps = mixed_steps([len(s) for s in sequences], seed=11)
    for tokens, logits in zip(sequences, packed_logits(twin.runtime, sequences, steps), strict=True):
        twin.assert_agrees(logits, tokens)


@pytest.mark.behaviour(23)
def test_a_cached_prefix_gives_the_dense_logits_wherever_it_ends(twin: Twin) -> None:
    """At the end of an edge, inside an edge, and inside a block, each continued by tokens of its own."""
    cached = Cached(twin.runtime)
    first = random_tokens(VOCAB, 6 * BLOCK_SIZE + 3, seed=20)
    hit = cached.run(first)
    assert hit.tokens == 0
    twin.assert_agrees(hit.logits, first)
    for end, copies in (
        (len(first), 1),  # the whole edge, which ends inside a block
        (4 * BLOCK_SIZE, 0),  # inside the edge, at the end of a block
        (2 * BLOCK_SIZE + 5, 1),  # inside the edge and inside a block
    ):
        other = (first[end : end + 1] + 1) % VOCAB if end < len(first) else random_tokens(VOCAB, 1, seed=21)
        prompt = np.concatenate([first[:end], other, random_tokens(VOCAB, 17, seed=22 + end)]).astype(
            np.int32
        )
        hit = cached.run(prompt)
        assert (hit.tokens, hit.copies) == (end, copies)
        twin.assert_agrees(hit.logits, prompt, first=end)
    again = cached.run(first)  # nothing that was written since has touched it
    assert again.tokens == len(first) - 1
    twin.assert_agrees(again.logits, first, first=len(first) - 1)
    cached.cache.check()
