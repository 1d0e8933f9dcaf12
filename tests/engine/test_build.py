from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rootstock.config import CacheConfig, EngineConfig, TierConfig
from rootstock.engine.build import assemble
from rootstock.engine.kv_budget import FREE_SHARES, auto_budget_bytes
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import (
    Finished,
    Request,
    RequestId,
    StopParams,
)
from rootstock.errors import BudgetTooSmall, InvalidOption
from rootstock.fleet_config import KVEventsConfig, RemoteConfig
from rootstock.runtime.host_memory import free_host_bytes
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime
from rootstock.tiers.disk.tier import DiskTier

TOKEN_BYTES = FakeRuntime().description.families[0].bytes_per_token


def test_the_budget_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(runtime, "free_bytes", lambda: 1_000_000)
    assert auto_budget_bytes(runtime, EngineConfig()) == FREE_SHARES["host"] * 1_000_000
    runtime.description = replace(runtime.description, memory="device")
    assert auto_budget_bytes(runtime, EngineConfig()) == FREE_SHARES["device"] * 1_000_000


def test_the_budget_is_no_more_than_the_batch_can_use() -> None:
    runtime = FakeRuntime()
    runtime.description = replace(runtime.description, context_limit=100)
    assert auto_budget_bytes(runtime, EngineConfig(max_batch=4)) == 4 * 100 * TOKEN_BYTES
    assert auto_budget_bytes(runtime, EngineConfig(max_batch=4, context_limit=50)) == 4 * 50 * TOKEN_BYTES


def test_free_memory_is_known_and_is_not_all_there_is() -> None:
    assert 0 < free_host_bytes() < 2**50


def test_a_budget_that_holds_no_two_blocks_is_refused_with_the_numbers() -> None:
    with pytest.raises(BudgetTooSmall, match="--kv-budget is 100 bytes"):
        assemble(FakeRuntime(), ByteTokenizer(), CacheConfig(budget_bytes=100))


@pytest.mark.parametrize("enabled", [True, False])
def test_an_assembled_engine_answers_and_reuses_prefixes_only_if_it_may(enabled: bool) -> None:
    budget = 1000 * TOKEN_BYTES
    made = assemble(
        FakeRuntime(ByteTokenizer.vocab_size, 512),
        ByteTokenizer(),
        CacheConfig(block_size=10, budget_bytes=budget, enabled=enabled),
    )
    assert (made.pool_tokens, made.pool_bytes) == (1000, budget)
    assert made.serves_chat
    with made.engine as engine:
        for turn in range(2):
            prompt = np.frombuffer(b"the same prompt", np.uint8).astype(np.int32)
            request = Request(
                RequestId(str(turn)), prompt, ResolvedSampling(temperature=0), StopParams(max_tokens=3)
            )
            *_, end = engine.generate(request)
            assert isinstance(end, Finished)
            assert end.usage.cached_tokens == (len(prompt) - 1 if enabled and turn else 0)


@pytest.mark.parametrize("wrong", ["--remote-key-file", "--kv-events"])
def test_an_engine_that_is_not_made_leaves_its_disk_to_the_next_one(wrong: str, tmp_path: Path) -> None:
    tier = TierConfig(tmp_path / "disk", remote=RemoteConfig(path=str(tmp_path / "no server")))
    engine = EngineConfig()
    if wrong == "--kv-events":
        engine = EngineConfig(kv_events=KVEventsConfig.parse(f"ipc://{tmp_path}/no directory/events"))
    else:
        tier = replace(tier, remote_key_file=tmp_path / "no file")
    cache = CacheConfig(budget_bytes=1000 * TOKEN_BYTES)
    with pytest.raises(InvalidOption, match=wrong):
        assemble(FakeRuntime(), ByteTokenizer(), cache, engine, tier)
    disk = DiskTier.open(tmp_path / "disk", tier.disk_budget_bytes)
    assert isinstance(disk, DiskTier), disk
    disk.close()
