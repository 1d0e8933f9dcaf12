"""Real models above a disk: loaded records equal computed ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpoints import VOCAB, save
from engine.helpers import Client
from engine.tiered import MIB, Tiered
from rootstock.cache.types import Tokens
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import TokenEvent
from rootstock.tiers.base import Record, Stored
from rootstock.tiers.disk.tier import DiskTier
from twins.driving import random_tokens
from twins.torch_models import load

# Plain attention, windows, states beside full attention, latents.
MODELS = ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"]
PROMPT = random_tokens(VOCAB, 75, seed=3)
LOGPROBS = ResolvedSampling(temperature=0.0, top_logprobs=5)


class Served(Tiered):
    """A model above a directory, whose greedy answers have log-probabilities."""

    def __init__(self, model: Path, folder: Path, dtype: str = "float32", kv_dtype: str = "auto") -> None:
        super().__init__(folder, runtime=load(model, dtype, kv_dtype=kv_dtype), blocks=60, block_size=8)

    def answer(self, tokens: Sequence[int] | Tokens, max_tokens: int | None = 8, **request: object) -> Client:
        client = self.ask(tokens, max_tokens, sampling=LOGPROBS)
        self.run()
        assert client.finished.reason == "length"
        return client


def logprobs(client: Client) -> np.ndarray:
    """Returns those of the sampled tokens [tokens]."""
    return np.array([e.logprob.logprob for e in client.events if isinstance(e, TokenEvent) and e.logprob])


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path / "model", request.param)


def test_after_a_restart_a_model_continues_from_the_loaded_prefix(model: Path, tmp_path: Path) -> None:
    with Served(model, tmp_path / "tier") as served:
        first = served.answer(PROMPT)
    longer = np.concatenate((PROMPT, np.array(first.tokens, np.int32), PROMPT[:5]))
    with Served(model, tmp_path / "another") as served:
        served.answer(PROMPT)
        expected = served.answer(longer)
    with Served(model, tmp_path / "tier") as served:
        again = served.answer(longer)
        assert again.cached_tokens == expected.cached_tokens == len(PROMPT) + 7
        assert served.tier.counters.loads == {"loaded": 1}
        assert again.tokens == expected.tokens
        np.testing.assert_array_equal(logprobs(again), logprobs(expected))


@pytest.mark.parametrize("model", ["llama", "gemma3_text", "qwen3_next"], indirect=True)
def test_after_a_restart_quantized_rows_are_the_same_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """A forward reads the same codes and scales as before the restart."""
    longer = np.concatenate((PROMPT[:-1], PROMPT[5:11]))
    with Served(model, tmp_path / "tier", kv_dtype="int8") as served:
        served.answer(PROMPT, 1)
    with Served(model, tmp_path / "another", kv_dtype="int8") as served:
        served.answer(PROMPT, 1)
        expected = served.answer(longer, 3)
    with Served(model, tmp_path / "tier", kv_dtype="int8") as served:
        again = served.answer(longer, 3)
        assert again.cached_tokens == expected.cached_tokens > 0
        assert served.tier.counters.loads == {"loaded": 1}
        assert again.tokens == expected.tokens
        np.testing.assert_array_equal(logprobs(again), logprobs(expected))
    with Served(model, tmp_path / "tier") as served:
        assert served.answer(longer, 3).cached_tokens == 0, "exact and quantized rows are never exchanged"


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_with_quantized_rows_cached_and_computed_answers_are_the_same(
    model_type: str, tmp_path: Path
) -> None:
    """New tokens attend to their own rows after rounding, as later requests will."""
    model = save(tmp_path / "model", model_type)
    longer = np.concatenate((PROMPT, PROMPT[5:30]))
    with Served(model, tmp_path / "cold", kv_dtype="int8") as served:
        cold = served.answer(longer, 5)
    with Served(model, tmp_path / "warm", kv_dtype="int8") as served:
        served.answer(PROMPT, 2)
        warm = served.answer(longer, 5)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens > 60
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(logprobs(warm), logprobs(cold), atol=2e-3)


def test_a_copied_tier_serves_a_copy_of_its_model(tmp_path: Path) -> None:
    """Another machine has the model and the tier at other paths."""
    model = save(tmp_path / "model", "qwen3_next")
    with Served(model, tmp_path / "tier") as served:
        first = served.answer(PROMPT)
    shutil.copytree(model, tmp_path / "machine" / "models" / "copy")
    shutil.copytree(tmp_path / "tier", tmp_path / "machine" / "cache")
    longer = np.concatenate((PROMPT, np.array(first.tokens, np.int32), PROMPT[:5]))
    with Served(tmp_path / "machine" / "models" / "copy", tmp_path / "machine" / "cache") as served:
        assert served.answer(longer).cached_tokens == len(PROMPT) + 7
        assert served.tier.counters.loads == {"loaded": 1}


def test_other_weights_of_the_same_architecture_find_nothing(tmp_path: Path) -> None:
    for seed in range(2):
        model = save(tmp_path / f"model-{seed}", "llama", seed=seed)
        with Served(model, tmp_path / "tier") as served:
            assert served.answer(PROMPT).cached_tokens == 0


def test_another_dtype_finds_nothing(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "llama")
    for dtype in ("float32", "bfloat16"):
        with Served(model, tmp_path / "tier", dtype=dtype) as served:
            assert served.answer(PROMPT).cached_tokens == 0


def test_compressed_records_of_older_versions_are_never_loaded(tmp_path: Path) -> None:
    """Versions with `--tier-compress int8` named them by the cache's dtype and a suffix."""
    model = save(tmp_path / "model", "qwen3_next")
    folder = tmp_path / "tier"
    with Served(model, folder) as served:
        expected = served.answer(PROMPT)
    disk = DiskTier.open(folder, 16 * MIB)
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
        assert again.cached_tokens == 0
        assert again.tokens == expected.tokens
        np.testing.assert_array_equal(logprobs(again), logprobs(expected))
    with Served(model, folder) as served:
        assert served.tier.records == len(exact)
        longer = np.concatenate((PROMPT, np.array(expected.tokens, np.int32), PROMPT[:5]))
        assert served.answer(longer).cached_tokens == len(PROMPT) + 7
        assert served.tier.counters.loads == {"loaded": 1}
