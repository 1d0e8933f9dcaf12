"""The engine above a disk: restarts, loads in flight, decisions, statistics, and disks that are small or missing."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.helpers import Bench, Client, Families
from engine.tiered import KINDS, MIB, OTHER, PROMPT, Tiered, kinds, options
from rootstock.cache.families import RecurrentState
from rootstock.config import TierConfig
from rootstock.engine.request import PromptScored
from rootstock.engine.tiers.build import stored_index
from rootstock.engine.tiers.connector import OVERDUE_LEAST_S
from rootstock.errors import InvalidOption
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from rootstock.text.prompts.tenant_salt import salt_of
from tiers.helpers import Clock, directory_bytes, records
from waiting import join, wait_for

# -- restarts ----------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_restart_keeps_all_computed_tokens(tmp_path: Path, families: Families, block_size: int) -> None:
    with Tiered(tmp_path, families=families, block_size=block_size) as bench:
        first = bench.answer(PROMPT, 5)
    with Tiered(tmp_path, families=families, block_size=block_size) as bench:
        again = bench.answer([*PROMPT, *first.tokens, 90, 91])
        assert again.cached_tokens == len(PROMPT) + 4  # the last token of an answer is never computed
        assert bench.tier.counters.loads == {"loaded": 1}
        assert bench.cache.stats().loaded_tokens == len(PROMPT) + 4


@pytest.mark.parametrize("agreed", [1, 17, 32, 33, 61])
@options(block_size=16)
def test_a_prompt_that_diverges_inside_a_stored_block_hits_to_the_token(agreed: int, bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.restart()
    assert bench.answer([*PROMPT[:agreed], 95, 96, 97 - 1]).cached_tokens == agreed


@kinds
def test_a_prompt_that_diverges_inside_a_stored_one_is_answered_right(bench: Tiered) -> None:
    bench.answer(PROMPT, 30)
    bench.restart()
    for agreed in (61, 33, 32, 5):
        bench.answer([*PROMPT[:agreed], 95, 96], 6)


@kinds
def test_a_conversation_continues_over_several_restarts(tmp_path: Path, families: Families) -> None:
    history = PROMPT
    for life in range(4):
        with Tiered(tmp_path, families=families) as bench:
            client = bench.answer(history, 5)
            assert client.cached_tokens == (len(history) - 2 if life else 0)
        history = [*history, *client.tokens, 90 + life]


@kinds
@options(write="through")
def test_with_write_through_a_crash_loses_nothing_published(bench: Tiered) -> None:
    first = bench.answer(PROMPT, 5)
    bench.crash()
    bench.restart()
    assert bench.answer([*PROMPT, *first.tokens, 90, 91]).cached_tokens == len(PROMPT) + 4


@kinds
@options(write="through")
def test_written_through_nothing_is_left_to_store_at_an_eviction_or_the_end(bench: Tiered) -> None:
    bench.answer(PROMPT, 5)
    bench.writer.drain()
    before = bench.tier
    assert before.stored_records > 0
    bench.forget()
    assert bench.tier.stored_records == before.stored_records
    assert bench.tier.counters.stored_rows == before.counters.stored_rows


@options(blocks=40)
def test_with_write_back_blocks_are_stored_when_they_are_evicted(bench: Tiered) -> None:
    bench.answer(PROMPT)
    assert bench.tier.counters.stored_rows == 0
    bench.answer(OTHER)
    bench.answer([91, *OTHER])
    assert 0 < bench.tier.counters.stored_rows < 40


@kinds
def test_tenants_do_not_find_each_others_records(bench: Tiered) -> None:
    salt = salt_of("", "one")  # without a tenant
    bench.answer(PROMPT, salt=salt)
    bench.restart()
    assert bench.answer([*PROMPT, 70], salt="another").cached_tokens == 0
    assert bench.answer([*PROMPT, 70]).cached_tokens == 0
    assert bench.answer([*PROMPT, 70], salt=salt).cached_tokens == bench.end_of(PROMPT)


@kinds
@options(weights="these")
def test_other_weights_find_no_records(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.restart(weights="those")
    assert bench.answer([*PROMPT, 70]).cached_tokens == 0
    bench.restart(weights="these")
    assert bench.answer([*PROMPT, 70]).cached_tokens == bench.end_of(PROMPT)


@options(families=(FULL, STATE))
def test_records_of_other_families_are_counted_as_foreign_and_kept(
    bench: Tiered, caplog: pytest.LogCaptureFixture
) -> None:
    bench.answer(PROMPT)
    bench.restart(families=(window(16),))
    assert "stored records are of models with other layers" in caplog.text
    bench.answer(PROMPT)
    assert bench.tier.foreign_records > 0
    bench.restart(families=(FULL, STATE))
    assert bench.answer([*PROMPT, 1]).cached_tokens == bench.end_of(PROMPT)


def test_another_block_size_never_gives_a_wrong_answer(tmp_path: Path) -> None:
    for block_size in (8, 4, 16, 3):
        for families in KINDS:
            with Tiered(tmp_path, families=families, block_size=block_size) as bench:
                bench.answer(PROMPT, 6)
                bench.answer([*PROMPT[:41], 95], 6)


# -- loads in flight ---------------------------------------------------------------------------------------------


@kinds
def test_a_request_waits_for_a_load_of_the_same_prefix(stored: Tiered) -> None:
    first = stored.begin_load([*PROMPT, 70])
    second = stored.ask([*PROMPT, 71])
    stored.run(steps=2)
    assert stored.connector.loading == 1
    assert not second.events
    computed = stored.runtime.computed_tokens
    stored.finish(first, second)
    assert (first.cached_tokens, second.cached_tokens) == (stored.end_of(PROMPT), len(PROMPT))
    assert stored.runtime.computed_tokens - computed <= 2 * (1 + 4)
    assert stored.tier.counters.loads == {"loaded": 1}
    assert stored.cache.stats().loaded_tokens == stored.end_of(PROMPT)


def test_other_requests_run_while_a_load_waits_for_the_disk(stored: Tiered) -> None:
    running = stored.ask(OTHER, 40)
    stored.run(steps=3)
    loading = stored.begin_load([*PROMPT, 70])
    newcomer = stored.ask([92, 93, 94], 4)
    stored.run(steps=20)
    assert len(running.tokens) > 15
    assert newcomer.terminals
    assert not loading.events
    stored.finish(loading, running, newcomer)


def test_two_different_prefixes_are_loaded_one_after_the_other(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.answer(OTHER)
    bench.forget()
    one = bench.begin_load([*PROMPT, 70])
    other = bench.ask([*OTHER, 71])
    bench.run(steps=1)
    assert bench.connector.loading == 2
    bench.finish(one, other)
    assert one.cached_tokens == other.cached_tokens == bench.end_of(PROMPT)


def test_a_started_engine_wakes_up_when_a_load_has_ended(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.restart()
    bench.loads.close()
    bench.engine.start()
    bench.clock.now_s += 1
    events = bench.engine.generate(Client([*PROMPT, 70]).request)
    opener = bench.when_reached(bench.loads, bench.loads.open)
    tokens = [event.token for event in events if hasattr(event, "token")]
    join(opener)
    assert tokens == bench.alone([*PROMPT, 70], 4)
    assert bench.engine.stats().tier.counters.loads == {"loaded": 1}  # type: ignore[union-attr]


@kinds
def test_a_small_pool_with_preemptions_changes_no_answer(tmp_path: Path, families: Families) -> None:
    for life in range(2):
        with Tiered(tmp_path, families=families, blocks=30, max_batch=4) as bench:
            prompts = [[*PROMPT[: 9 + 5 * i], 90 + i, *range(life)] for i in range(6)]
            for _ in range(3):
                clients = [bench.ask(prompt, 20) for prompt in prompts]
                bench.run()
                bench.expect(*clients)
            assert bench.cache.stats().leases == 0
            loads = bench.tier.counters.loads
    assert loads["loaded"] > 0


@pytest.mark.parametrize(
    ("families", "write"), [(KINDS[0], "through"), (KINDS[3], "back")], ids=["full", "everything"]
)
def test_aborts_clears_and_restarts_change_no_answer(tmp_path: Path, families: Families, write: str) -> None:
    rng = np.random.default_rng(len(families))
    seen: Counter[str] = Counter()
    for _ in range(3):
        with Tiered(
            tmp_path,
            families=families,
            blocks=60,
            write=write,
            max_batch=4,
            chunk_tokens=16,
            queue_bytes=4000,
        ) as bench:
            bench.engine.start()

            def asked_and_aborted(bench: Tiered = bench) -> Client:
                # On the engine's thread, between two steps: the request cannot have ended before.
                client = bench.ask(PROMPT, 8)
                bench.engine.abort(client.request.id)
                return client

            for _ in range(12):
                clients = [bench.engine.call(asked_and_aborted)]
                for _ in range(6):
                    start = int(rng.integers(0, 3))
                    prompt = [start, *PROMPT[: int(rng.integers(5, 60))], *rng.integers(0, 97, 2).tolist()]
                    clients.append(bench.ask(prompt, int(rng.integers(1, 8))))
                    if rng.random() < 0.3:
                        bench.engine.abort(clients[int(rng.integers(len(clients)))].request.id)
                if rng.random() < 0.1:
                    bench.engine.clear_cache()
                for client in clients:
                    wait_for(client.ended)
                    (end,) = client.terminals
                    seen[type(end).__name__] += 1
                    expected = bench.alone(client.request.tokens, len(client.tokens))
                    assert client.tokens == expected
            bench.engine.call(bench.reader.drain)
            bench.engine.call(lambda: None)  # the reader's events are applied before this
            bench.engine.call(bench.cache.check)
            stats = bench.engine.stats()
            assert stats.cache.leases == 0
            seen.update(stats.tier.counters.loads)
            assert stats.tier.misses.keys() <= {"absent"}
    assert seen["Finished"] > 100
    assert seen["Aborted"] > 0
    assert seen["Failed"] == 0
    assert seen["loaded"] > 0


# -- decisions and statistics ------------------------------------------------------------------------------------


def test_explain_returns_both_estimates_and_the_choice(bench: Tiered) -> None:
    bench.answer(PROMPT, 1)
    bench.forget()
    tokens = Client([*PROMPT, 70]).request.tokens
    bench.set_speeds(prefill_tokens_per_s=1000, load_bytes_per_s=1e9)
    below = bench.engine.explain(tokens).below
    assert (below.position, below.records, below.payload_bytes) == (62, 16, 62 * 16)
    assert below.load_s == pytest.approx(62 * 16 / 1e9)
    assert below.compute_s == pytest.approx(0.062)
    assert below.load
    assert below.message.endswith("computing at 62.0 ms. It is loaded.")
    bench.set_speeds(prefill_tokens_per_s=1000, load_bytes_per_s=1000)
    below = bench.engine.explain(tokens).below
    assert not below.load
    assert "loading is estimated at 992.0 ms" in below.message
    assert below.message.endswith("It is computed.")
    assert bench.tier.counters.choices == {}
    assert bench.engine.explain(Client(OTHER).request.tokens).below is None


def test_statistics_count_choices_loads_misses_and_bytes(bench: Tiered) -> None:
    bench.answer(PROMPT, 1)
    bench.forget()
    bench.answer([*PROMPT, 70])
    tier = bench.tier
    assert tier.state == "ready"
    assert tier.records == tier.stored_records == 16
    assert tier.stored_bytes > 62 * 16
    assert tier.counters.stored_rows == 16
    assert tier.counters.choices == {"load": 1}
    assert tier.counters.loads == {"loaded": 1}
    assert tier.counters.loaded_bytes == 62 * 16
    assert tier.counters.load_s > 0
    assert tier.load_bytes_per_s is not None
    assert tier.misses == tier.refused == {}
    assert tier.cap_bytes == 16 * MIB
    assert tier.used_bytes == sum(path.stat().st_size for path in bench.folder.iterdir())
    bench.forget()
    bench.disk.clear()
    bench.answer([*PROMPT, 70])
    tier = bench.tier
    assert tier.misses == {}, "a load was tried of a record that is gone"
    assert tier.records == 0


@pytest.mark.behaviour(50)
@pytest.mark.parametrize("given_up", ["not", "overdue", "missed", "aborted"])
@options(block_size=64)  # one record: its load cannot be stopped half way
def test_hits_and_misses_add_up_to_the_prompt_however_a_load_ends(given_up: str, stored: Tiered) -> None:
    client = stored.begin_load([*PROMPT, 70])
    match given_up:
        case "overdue":
            stored.clock.now_s += OVERDUE_LEAST_S + 0.1
            stored.run(steps=6)
            stored.expect(client)
        case "missed":
            stored.disk._segments.path(1).unlink()
        case "aborted":
            stored.engine.abort(client.request.id)
            stored.run(steps=1)
    stored.end_loads()
    stored.run()
    stats = stored.cache.stats()
    assert (
        stats.hit_tokens + stats.missed_tokens
        == stats.asked_tokens
        == 62 + (0 if given_up == "aborted" else 63)
    )
    assert stats.hit_tokens == (62 if given_up == "not" else 0)


# -- short of memory ---------------------------------------------------------------------------------------------


@options(blocks=20, queue_bytes=300)
def test_rows_that_do_not_fit_into_the_queue_are_not_stored(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.stores.close()
    for first in range(3):
        bench.answer([80 + first, *range(50)])
    tier = bench.tier
    assert tier.waiting_store_bytes <= 300
    assert tier.counters.stores_refused["queue_full"] > 0
    assert 0 < tier.records == tier.counters.stored_rows < 10
    bench.answer([*PROMPT, 70])
    assert bench.tier.misses == {}


def test_a_stop_writes_everything_through_a_small_queue(tmp_path: Path) -> None:
    with Tiered(tmp_path, queue_bytes=130) as bench:
        bench.answer(PROMPT)
    with Tiered(tmp_path) as bench:
        assert bench.answer([*PROMPT, 70]).cached_tokens == bench.end_of(PROMPT)


@options(blocks=20)
def test_prompts_that_do_not_fit_at_once_are_loaded_one_after_the_other(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.answer(OTHER)
    bench.restart()
    one, other = bench.ask([*PROMPT, 70]), bench.ask([*OTHER, 70])
    bench.finish(one, other)
    assert one.cached_tokens == other.cached_tokens == bench.end_of(PROMPT)


@kinds
def test_a_scored_prompt_is_computed_and_not_loaded(stored: Tiered) -> None:
    client = stored.answer([*PROMPT, 70], prompt_logprobs=0)
    assert client.cached_tokens == 0
    assert stored.tier.counters.loads == {}
    assert any(isinstance(event, PromptScored) for event in client.events)


# -- without a disk ----------------------------------------------------------------------------------------------


def test_an_unusable_directory_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tier").write_text("a file")
    with caplog.at_level(logging.WARNING), Tiered(tmp_path / "tier", blocks=30) as bench:
        for prompt in (PROMPT, OTHER, PROMPT):
            bench.answer(prompt)
        tier = bench.engine.stats().tier
        assert tier.state == "off"
        assert "cannot be used" in tier.reason
        assert tier.counters.stored_rows == 0
        assert bench.engine.explain(Client(PROMPT).request.tokens).below is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Requests go on without it." in caplog.text


def test_a_directory_in_use_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Tiered(tmp_path) as first, caplog.at_level(logging.WARNING), Tiered(tmp_path) as second:
        first.answer(PROMPT)
        second.answer(PROMPT)
        tier = second.engine.stats().tier
        assert tier.state == "off"
        assert first.tier.state == "ready"
        assert len(caplog.records) == 1
    with Tiered(tmp_path) as bench:
        assert bench.answer([*PROMPT, 70]).cached_tokens == bench.end_of(PROMPT)


def test_an_index_that_fails_later_gives_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Tiered(tmp_path, blocks=30) as bench:
        bench.answer(PROMPT)
        bench.forget()
        bench.disk._index.close()
        for _ in range(3):
            bench.answer([*PROMPT, 70])
            bench.answer(OTHER)
        assert bench.tier.state == "off"
        stored = bench.tier.counters.stored_rows
        bench.answer([91, *OTHER])
        bench.answer([92, *OTHER])
        assert bench.tier.counters.stored_rows == stored, "rows are copied that no tier takes"
        assert bench.cache.stats().leases == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_without_the_prefix_cache_there_is_no_tier(tmp_path: Path) -> None:
    with Tiered(tmp_path) as bench:
        bench.answer(PROMPT)
    without = Bench(tier=TierConfig(tmp_path, 16 * MIB), reuse=False)
    assert without.answer([*PROMPT, 70]).cached_tokens == 0
    assert without.engine.stats().tier is None
    without.engine.stop()


def test_a_host_tier_on_a_cpu_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="--kv-budget"):
        stored_index(FakeRuntime(), TierConfig(tmp_path, host_budget_bytes=MIB), 4)
    with pytest.raises(InvalidOption, match="--host-budget"):
        stored_index(FakeRuntime(), TierConfig(host_budget_bytes=MIB), 4)


def test_without_a_directory_there_is_no_index() -> None:
    assert stored_index(FakeRuntime(), TierConfig(), 4) is None


def test_foreign_files_are_counted_in_the_directorys_bytes(tmp_path: Path, stored: Tiered) -> None:
    (tmp_path / "v0-00000001.segment").write_bytes(bytes(1000))
    assert stored.tier.foreign_bytes == 1000
    assert stored.tier.used_bytes == directory_bytes(tmp_path)


# -- small disks -------------------------------------------------------------------------------------------------


@options(cap_bytes=MIB)
def test_records_of_a_planned_load_are_not_evicted_by_later_stores(stored: Tiered) -> None:
    fill = iter(range(10_000))
    while stored.disk.usage().total_bytes < 0.7 * MIB:
        stored.clock.now_s += 1
        stored.disk.store(records(1, 20_000, first=next(fill)))
    client = stored.begin_load([*PROMPT, 70])
    evicted = stored.disk.room_counts.evicted_bytes
    while stored.disk.room_counts.evicted_bytes < evicted + MIB // 2:
        stored.disk.store(records(1, 20_000, first=next(fill)))
    stored.finish(client)
    assert stored.tier.counters.loads == {"loaded": 1}
    assert stored.tier.misses == {}


@kinds
def test_on_a_full_disk_no_load_is_planned_for_evicted_records(tmp_path: Path, families: Families) -> None:
    rng = np.random.default_rng(0)
    with Tiered(tmp_path, families=families, cap_bytes=MIB) as bench:
        prompts = [[90, i, *range(40)] for i in range(12)]
        for turn in range(60):
            bench.clock.now_s += 1
            prompt = prompts[min(int(rng.exponential(3)), 11)]
            bench.answer(prompt)
            prompt.append(turn)
            bench.forget()
            bench.disk.store(records(4, 20_000, first=4 * turn))  # evicts without the engine's knowledge
        tier = bench.tier
        assert bench.disk.room_counts.evicted_records > 100
        assert tier.misses == {}
        assert set(tier.counters.loads) <= {"loaded"}
        assert tier.counters.loads["loaded"] > 5
        assert tier.written_bytes > tier.stored_bytes > 4 * MIB


def test_a_disk_budget_below_the_models_least_is_refused_with_it(tmp_path: Path) -> None:
    state = RecurrentState(layers=2, bytes_per_state=MIB)
    runtime = FakeRuntime(families=(FULL, state))
    least = 16 * MIB
    with pytest.raises(
        InvalidOption, match=f"--disk-budget is {least - 1}, but must be at least {least:,} bytes"
    ):
        stored_index(runtime, TierConfig(tmp_path, least - 1), 4)
    assert stored_index(runtime, TierConfig(tmp_path, least), 4) is not None
    with pytest.raises(InvalidOption, match="--disk-budget is 1048575, but must be at least 1,048,576 bytes"):
        TierConfig(tmp_path, MIB - 1)


def test_a_load_whose_records_are_evicted_before_it_begins_reads_nothing(
    stored: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = stored.loads.passed
    begin = stored.connector.begin

    def evict_and_begin(*planned: Any) -> None:
        monkeypatch.setattr(stored.connector, "begin", begin)
        stored.disk.clear()
        begin(*planned)

    monkeypatch.setattr(stored.connector, "begin", evict_and_begin)
    assert stored.answer([*PROMPT, 70]).cached_tokens == 0
    assert stored.loads.passed == passed
    assert stored.tier.counters.loads == {"evicted": 1}
    assert stored.tier.misses == {}
    assert stored.cache.stats().leases == 0


# -- the host's RAM, between an accelerator and the disk ------------------------------------------------------------


def above_host(tier: TierConfig, families: Families) -> Bench:
    """Returns an engine whose pools are in a device's memory. Its clock stands still: every tier hit is loaded."""
    runtime = FakeRuntime(97, 1 << 20, families=families)
    runtime.description = replace(runtime.description, memory="device")
    ticks = itertools.count()
    clock = Clock()
    return Bench(runtime=runtime, tier=tier, clock=clock, load_clock=lambda: next(ticks) * 1e-4)


@kinds
@pytest.mark.parametrize("has_disk", [False, True])
def test_an_engine_over_the_host_tier(tmp_path: Path, families: Families, has_disk: bool) -> None:
    tier = TierConfig(tmp_path if has_disk else None, 16 * MIB, host_budget_bytes=4 * MIB)
    bench = above_host(tier, families)
    connector = bench.engine.tier_connector
    assert connector is not None
    try:
        bench.expect(bench.answer(PROMPT))
        # A prompt leaves its state where the same prompt resumes: before its last token.
        before = any(isinstance(family, RecurrentState) for family in families)
        first, other = len(PROMPT) - before, len(OTHER) - before
        for prompt, hit in (([*PROMPT, 70], first), (OTHER, 0), ([*OTHER, 71], other)):
            connector.flush()
            bench.cache.clear()
            connector.follow()
            client = bench.answer(prompt)
            bench.expect(client)
            assert client.cached_tokens == hit
        stats = connector.stats(connector.measure())
        assert stats.counters.loads == {"loaded": 2}
        assert stats.counters.loaded_from_host_bytes == stats.counters.loaded_bytes > 0
        prompts = bench.engine.stats().counters.prompts
        assert (prompts.host, prompts.disk) == (first + other, 0)
    finally:
        bench.engine.stop()
