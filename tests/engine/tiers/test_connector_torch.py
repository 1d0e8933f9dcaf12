"""Real models above a disk: loaded records equal computed ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpoints import VOCAB, save
from engine.helpers import Client
from rootstock.cache import KVCache
from rootstock.cache.families import row_bytes
from rootstock.config import EngineConfig, TierConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import ResolvedSampling, TokenEvent
from rootstock.engine.tiers.build import open_below, stored_index
from rootstock.engine.tiers.connector import TierStats
from rootstock.tiers.base import Record, Stored
from rootstock.tiers.disk.tier import DiskTier
from tiers.helpers import Clock
from twins.driving import load, random_tokens

# Plain attention, windows, states beside full attention, latents.
MODELS = ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"]
BLOCK_SIZE = 8
BLOCKS = 60
CAP_BYTES = 2**24
PROMPT = random_tokens(VOCAB, 75, seed=3)
LOGPROBS = ResolvedSampling(temperature=0.0, top_logprobs=5)


class Served:
    """A model's life over a directory; time stands still for its engine, so that whatever is found is loaded."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        dtype: str = "float32",
        kv_dtype: str = "auto",
    ) -> None:
        runtime = load(model, dtype, kv_dtype=kv_dtype)
        families = runtime.description.families
        tier = TierConfig(folder, CAP_BYTES)
        budget = BLOCKS * sum(row_bytes(family, BLOCK_SIZE) for family in families)
        stored = stored_index(runtime, tier, BLOCK_SIZE)
        self.cache = KVCache(families, budget, BLOCK_SIZE, stored=stored)
        runtime.allocate(self.cache.rows, BLOCK_SIZE)
        clock = Clock()
        tiering = open_below(runtime, self.cache, tier, 512, clock)
        self.engine = Engine(runtime, self.cache, EngineConfig(), clock=clock, tier_connector=tiering)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.stop()

    def answer(self, tokens: np.ndarray, max_tokens: int = 8) -> Client:
        client = Client(tokens, max_tokens, sampling=LOGPROBS)
        self.engine.submit(client.request, client.events.append)
        while not client.terminals:
            waits = self.engine.steps.is_stalled and self.engine.scheduler.has_work
            self.engine.step(self.engine.next_command() if waits else None)
        assert client.finished.reason == "length"
        return client

    @property
    def tier(self) -> TierStats:
        tier = self.engine.stats().tier
        assert tier is not None
        return tier

    @property
    def disk(self) -> DiskTier:
        assert self.engine.tier_connector is not None
        assert self.engine.tier_connector._disk is not None
        return self.engine.tier_connector._disk


def logprobs(client: Client) -> np.ndarray:
    """[tokens] of those that were chosen."""
    return np.array([e.logprob.logprob for e in client.events if isinstance(e, TokenEvent) and e.logprob])


def cached(client: Client) -> int:
    return client.finished.usage.cached_tokens


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path / "model", request.param)


def test_after_a_restart_a_model_goes_on_as_if_nothing_had_happened(model: Path, tmp_path: Path) -> None:
    with Served(model, tmp_path / "tier") as served:
        first = served.answer(PROMPT)
    longer = np.concatenate((PROMPT, np.array(first.tokens, np.int32), PROMPT[:5]))
    with Served(model, tmp_path / "another") as served:
        served.answer(PROMPT)
        expected = served.answer(longer)
    with Served(model, tmp_path / "tier") as served:
        again = served.answer(longer)
        assert cached(again) == cached(expected) == len(PROMPT) + 7
        assert served.tier.counters.loads == {"loaded": 1}
        assert again.tokens == expected.tokens
        np.testing.assert_array_equal(logprobs(again), logprobs(expected))


@pytest.mark.parametrize("model", ["llama", "gemma3_text", "qwen3_next"], indirect=True)
def test_after_a_restart_rounded_rows_are_the_same_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """A forward is what it would have been in the first life: the same codes and scales lie below it."""
    longer = np.concatenate((PROMPT, PROMPT[5:11]))
    with Served(model, tmp_path / "tier", kv_dtype="int8") as served:
        served.answer(PROMPT, 1)
    with Served(model, tmp_path / "another", kv_dtype="int8") as served:
        served.answer(PROMPT, 1)
        expected = served.answer(longer, 3)
    with Served(model, tmp_path / "tier", kv_dtype="int8") as served:
        again = served.answer(longer, 3)
        assert cached(again) == cached(expected) > 0
        assert served.tier.counters.loads == {"loaded": 1}
        assert again.tokens == expected.tokens
        np.testing.assert_array_equal(logprobs(again), logprobs(expected))
    with Served(model, tmp_path / "tier") as served:
        assert cached(served.answer(longer, 3)) == 0, "exact rows and rounded ones are never exchanged"


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_with_rounded_rows_an_answer_is_the_same_whether_cached_or_not(
    model_type: str, tmp_path: Path
) -> None:
    """What is computed anew attends to itself as rounded as those who find it later will."""
    model = save(tmp_path / "model", model_type)
    longer = np.concatenate((PROMPT, PROMPT[5:30]))
    with Served(model, tmp_path / "cold", kv_dtype="int8") as served:
        cold = served.answer(longer, 5)
    with Served(model, tmp_path / "warm", kv_dtype="int8") as served:
        served.answer(PROMPT, 2)
        warm = served.answer(longer, 5)
    assert cached(cold) == 0
    assert cached(warm) > 60
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(logprobs(warm), logprobs(cold), atol=2e-3)


def test_other_weights_of_the_same_architecture_find_nothing(tmp_path: Path) -> None:
    for seed in range(2):
        model = save(tmp_path / f"model-{seed}", "llama", seed=seed)
        with Served(model, tmp_path / "tier") as served:
            assert cached(served.answer(PROMPT)) == 0


def test_another_dtype_finds_nothing(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "llama")
    for dtype in ("float32", "bfloat16"):
        with Served(model, tmp_path / "tier", dtype=dtype) as served:
            assert cached(served.answer(PROMPT)) == 0


def test_records_that_an_older_version_compressed_are_never_loaded(tmp_path: Path) -> None:
    """Versions with `--tier-compress int8` named them by the dtype of the cache and a suffix."""
    model = save(tmp_path / "model", "qwen3_next")
    folder = tmp_path / "tier"
    with Served(model, folder) as served:
        expected = served.answer(PROMPT)
    disk = DiskTier.open(folder, CAP_BYTES)
    assert isinstance(disk, DiskTier)
    exact = [entry.identity for entry in disk.entries()]
    disk.clear()
    half = np.zeros(1000, np.uint8)
    compressed = [Record(replace(one, dtype=f"{one.dtype}/int8"), [half]) for one in exact]
    assert all(isinstance(outcome, Stored) for outcome in disk.store(compressed))
    disk.close()
    with Served(model, folder) as served:
        assert (served.tier.records, served.tier.foreign_records) == (0, len(exact))
        again = served.answer(PROMPT)
        assert cached(again) == 0
        assert again.tokens == expected.tokens
        np.testing.assert_array_equal(logprobs(again), logprobs(expected))
    with Served(model, folder) as served:
        assert served.tier.records == len(exact)
        longer = np.concatenate((PROMPT, np.array(expected.tokens, np.int32), PROMPT[:5]))
        assert cached(served.answer(longer)) == len(PROMPT) + 7
        assert served.tier.counters.loads == {"loaded": 1}
