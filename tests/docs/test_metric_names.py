"""docs/metrics.md has a row for each metric that a server exports, with its type, and no other rows."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rootstock.cache.families import row_bytes
from rootstock.config import CacheConfig, EngineConfig, ServerConfig, TierConfig
from rootstock.engine.build import assemble
from rootstock.engine.memory_watch import MemoryStats, Pressure
from rootstock.engine.stats import AdapterStats, KVEventStats
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.observe.metrics import Metrics, ResponseStoreStats
from rootstock.server.request_info import Measured, RequestInfo
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, FakeRuntime
from rootstock.tiers.base import MissKind, Refusal
from rootstock.tiers.remote.tier import RemoteCounts, RemoteUsage
from rootstock.units import MIB

OURS, VLLM = (Path(__file__).parents[2] / "docs/metrics.md").read_text().split("## vLLM's names")
NOT_OURS = re.compile("process_.*|.*_created")  # of the client library


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Types by name, of a server with tiers, a shared one, KV events, drafts, adapters, idle work and a target
    latency, in which all has happened."""
    tokenizer = ByteTokenizer()
    runtime = FakeRuntime(tokenizer.vocab_size, 4096, families=(FULL,), eos_token_ids=tokenizer.eos_token_ids)
    cache = CacheConfig(8, 100 * row_bytes(FULL, 8))
    tier = TierConfig(tmp_path_factory.mktemp("disk"), disk_budget_bytes=64 * MIB)
    made = assemble(runtime, tokenizer, cache, EngineConfig(idle_work=True), tier=tier)
    stats = made.engine.stats()
    assert stats.tier is not None
    assert stats.idle is not None
    once = Counter(any=1)
    stats.tier.counters.loads.update(once)
    stats.tier.counters.choices.update(once)
    full = replace(
        stats,
        counters=replace(stats.counters, accepted_by_position=[1]),
        tier=replace(
            stats.tier,
            misses=once,
            refused=once,
            load_bytes_per_s=1.0,
            remote=RemoteCounts(misses=Counter({MissKind.ABSENT: 1}), refused=Counter({Refusal.FAILED: 1})),
            remote_usage=RemoteUsage(1, 2, "allkeys-lru", 0),
        ),
        kv_events=KVEventStats(1, 1, 1),
        verified=dict(once),
        paced_tokens=1,
        idle=replace(stats.idle, ended={"warm": dict(once)}),
        adapters=AdapterStats(1, {}, {}),
        memory=MemoryStats(1, 2, Pressure.NONE, 0, 0),
        pool_copies=0,
    )
    stored = ResponseStoreStats(0, 0, 0, 0, once)
    metrics = Metrics(ModelRegistry.of_one(made, ServerConfig()), lambda: stored)
    info = RequestInfo("id", "POST", "/", model="fake", measured=Measured(1, unanswered=Counter(abort=1)))
    info.outcome = "disconnected"
    metrics.observe(info)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.engine, "stats", lambda: full)
        patch.setattr(made.engine, "parts", replace(made.engine.parts, why_no_drafts=None))
        text = metrics.render_for_operator().decode()
    made.engine.stop()
    found = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    return {name: kind for name, kind in found.items() if not NOT_OURS.fullmatch(name)}


def rows(text: str) -> list[tuple[str, str]]:
    """Returns the names and the second cell of each row of the tables."""
    found: list[Any] = re.findall(r"^\| (`.*?) \| (.*?) \|", text, re.MULTILINE)
    return [
        (name, second)
        for first, second in found
        for name in re.findall(r"`([^`…]+)`", first)
        if name.startswith(("rootstock_", "http_", "vllm:"))
    ]


def test_the_table_has_each_of_our_metrics_with_its_type(exported: dict[str, str]) -> None:
    documented = rows(OURS)
    assert len(dict(documented)) == len(documented), "a metric has two rows"
    assert dict(documented) == {name: kind for name, kind in exported.items() if not name.startswith("vllm:")}


def test_the_table_has_each_of_vllms_metrics(exported: dict[str, str]) -> None:
    documented = [name for name, _ in rows(VLLM.split("Not exported:")[0])]
    assert sorted(documented) == sorted(
        name.removesuffix("_total") for name in exported if name.startswith("vllm:")
    )


def test_the_names_of_vllm_that_are_not_exported_are_absent(exported: dict[str, str]) -> None:
    for name, _ in rows(VLLM.split("Not exported:")[1]):
        assert name not in exported
        assert f"{name}_total" not in exported
