"""The engine above a disk: what comes back, what is waited for, what is chosen, and what is told of it."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.helpers import Bench, Client
from engine.tiered import KINDS, MIB, OTHER, PROMPT, Tiered, cached, kinds
from rootstock.cache.families import Family, RecurrentState
from rootstock.config import TierConfig
from rootstock.engine.request import PromptScored
from rootstock.engine.tiers.build import stored_index
from rootstock.engine.tiers.connector import OVERDUE_LEAST_S
from rootstock.errors import InvalidOption
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from tiers.helpers import directory_bytes, records
from waiting import join, wait_for

# -- restarts ----------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_first_request_after_a_restart_hits_all_that_was_computed_before(
    tmp_path: Path, families: tuple[Family, ...], block_size: int
) -> None:
    with Tiered(tmp_path, families=families, block_size=block_size) as bench:
        first = bench.answer(PROMPT, 5)
    with Tiered(tmp_path, families=families, block_size=block_size) as bench:
        again = bench.answer([*PROMPT, *first.tokens, 90, 91])
        assert cached(again) == len(PROMPT) + 4  # the last token of an answer is never computed
        assert bench.tier.counters.loads == {"loaded": 1}
        assert bench.cache.stats().loaded_tokens == len(PROMPT) + 4


@pytest.mark.parametrize("agreed", [1, 17, 32, 33, 61])
def test_a_prompt_that_diverges_inside_a_stored_block_hits_to_the_token(tmp_path: Path, agreed: int) -> None:
    with Tiered(tmp_path, block_size=16) as bench:
        bench.answer(PROMPT)
    with Tiered(tmp_path, block_size=16) as bench:
        assert cached(bench.answer([*PROMPT[:agreed], 95, 96, 97 - 1])) == agreed


@kinds
def test_a_prompt_that_diverges_inside_what_is_stored_is_answered_right(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    with Tiered(tmp_path, families=families) as bench:
        bench.answer(PROMPT, 30)
    with Tiered(tmp_path, families=families) as bench:
        for agreed in (61, 33, 32, 5):
            bench.answer([*PROMPT[:agreed], 95, 96], 6)


@kinds
def test_what_was_loaded_and_goes_on_is_there_after_another_restart(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    history = PROMPT
    for life in range(4):
        with Tiered(tmp_path, families=families) as bench:
            client = bench.answer(history, 5)
            assert cached(client) == (len(history) - 2 if life else 0)
        history = [*history, *client.tokens, 90 + life]


@kinds
def test_written_through_a_crash_loses_nothing_that_was_published(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    with Tiered(tmp_path, families=families, write="through") as bench:
        first = bench.answer(PROMPT, 5)
        bench.crash()
    with Tiered(tmp_path, families=families, write="through") as bench:
        assert cached(bench.answer([*PROMPT, *first.tokens, 90, 91])) == len(PROMPT) + 4


@kinds
def test_written_through_nothing_is_left_to_store_at_an_eviction_or_the_end(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    with Tiered(tmp_path, families=families, write="through") as bench:
        bench.answer(PROMPT, 5)
        bench.mover.drain()
        before = bench.tier
        assert before.stored_records > 0
        bench.forget()
        assert bench.tier.stored_records == before.stored_records
        assert bench.tier.counters.stored_rows == before.counters.stored_rows


def test_written_back_nothing_is_stored_before_it_is_evicted(tmp_path: Path) -> None:
    with Tiered(tmp_path, blocks=40) as bench:
        bench.answer(PROMPT)
        assert bench.tier.counters.stored_rows == 0
        bench.answer(OTHER)
        bench.answer([91, *OTHER])
        assert 0 < bench.tier.counters.stored_rows < 40


@kinds
def test_what_one_tenant_has_stored_no_other_finds(tmp_path: Path, families: tuple[Family, ...]) -> None:
    with Tiered(tmp_path, families=families) as bench:
        bench.answer(PROMPT, salt="one")
    with Tiered(tmp_path, families=families) as bench:
        assert cached(bench.answer([*PROMPT, 70], salt="another")) == 0
        assert cached(bench.answer([*PROMPT, 70])) == 0
        assert cached(bench.answer([*PROMPT, 70], salt="one")) == len(PROMPT)


@kinds
def test_what_other_weights_have_stored_is_never_found(tmp_path: Path, families: tuple[Family, ...]) -> None:
    with Tiered(tmp_path, families=families, weights="these") as bench:
        bench.answer(PROMPT)
    with Tiered(tmp_path, families=families, weights="those") as bench:
        assert cached(bench.answer([*PROMPT, 70])) == 0
    with Tiered(tmp_path, families=families, weights="these") as bench:
        assert cached(bench.answer([*PROMPT, 70])) == len(PROMPT)


def test_records_of_a_model_with_other_families_are_counted_as_foreign_and_left_alone(tmp_path: Path) -> None:
    with Tiered(tmp_path, families=(FULL, STATE)) as bench:
        bench.answer(PROMPT)
    with Tiered(tmp_path, families=(window(16),)) as bench:
        bench.answer(PROMPT)
        assert bench.tier.foreign_records > 0
    with Tiered(tmp_path, families=(FULL, STATE)) as bench:
        assert cached(bench.answer([*PROMPT, 1])) == len(PROMPT)


def test_another_block_size_never_gives_a_wrong_answer(tmp_path: Path) -> None:
    for block_size in (8, 4, 16, 3):
        for families in KINDS:
            with Tiered(tmp_path, families=families, block_size=block_size) as bench:
                bench.answer(PROMPT, 6)
                bench.answer([*PROMPT[:41], 95], 6)


# -- while something is loaded -----------------------------------------------------------------------------------


@kinds
def test_who_arrives_while_another_loads_the_same_prefix_waits_for_it_and_loads_nothing(
    stored: Tiered,
) -> None:
    first = stored.begin_load([*PROMPT, 70])
    second = stored.ask([*PROMPT, 71])
    stored.run(steps=2)
    assert stored.tiering.loading == 1
    assert not second.events
    computed = stored.runtime.computed_tokens
    stored.loads.open()
    stored.run()
    stored.expect(first)
    stored.expect(second)
    assert cached(first) == cached(second) == len(PROMPT)
    assert stored.runtime.computed_tokens - computed <= 2 * (1 + 4)
    assert stored.tier.counters.loads == {"loaded": 1}
    assert stored.cache.stats().loaded_tokens == len(PROMPT)


def test_others_go_on_while_a_load_waits_for_the_disk(stored: Tiered) -> None:
    running = stored.ask(OTHER, 40)
    stored.run(steps=3)
    loading = stored.begin_load([*PROMPT, 70])
    newcomer = stored.ask([92, 93, 94], 4)
    stored.run(steps=20)
    assert len(running.tokens) > 15
    assert newcomer.terminals
    assert not loading.events
    stored.loads.open()
    stored.run()
    stored.expect(loading)
    stored.expect(running, 40)
    stored.expect(newcomer)


def test_two_different_prefixes_are_loaded_one_after_the_other(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.answer(OTHER)
    bench.forget()
    one = bench.begin_load([*PROMPT, 70])
    other = bench.ask([*OTHER, 71])
    bench.run(steps=1)
    assert bench.tiering.loading == 2
    bench.loads.open()
    bench.run()
    for client in (one, other):
        bench.expect(client)
        assert cached(client) == len(PROMPT)


def test_a_started_engine_wakes_up_when_a_load_has_ended(tmp_path: Path) -> None:
    with Tiered(tmp_path) as bench:
        bench.answer(PROMPT)
    with Tiered(tmp_path) as bench:
        bench.loads.close()
        bench.engine.start()
        bench.clock.now_s += 1
        events = bench.engine.generate(bench.client([*PROMPT, 70]).request)
        opener = bench.when_reached(bench.loads, bench.loads.open)
        tokens = [event.token for event in events if hasattr(event, "token")]
        join(opener)
        assert tokens == bench.alone([*PROMPT, 70], 4)
        assert bench.engine.stats().tier.counters.loads == {"loaded": 1}  # type: ignore[union-attr]


@kinds
def test_preemption_and_a_small_pool_over_a_disk_change_no_answer(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    for life in range(2):
        with Tiered(tmp_path, families=families, blocks=30, max_batch=4) as bench:
            prompts = [[*PROMPT[: 9 + 5 * i], 90 + i, *range(life)] for i in range(6)]
            for _ in range(3):
                clients = [bench.ask(prompt, 20) for prompt in prompts]
                bench.run()
                for client in clients:
                    bench.expect(client, 20)
            assert bench.cache.stats().leases == 0
            loads = bench.tier.counters.loads
    assert loads["loaded"] > 0


@pytest.mark.parametrize(
    ("families", "write"), [(KINDS[0], "through"), (KINDS[3], "back")], ids=["full", "everything"]
)
def test_threads_aborts_clears_and_restarts_over_a_real_disk_change_no_answer_and_leak_nothing(
    tmp_path: Path, families: tuple[Family, ...], write: str
) -> None:
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
            bench.engine.call(bench.tiering._reader.drain)
            bench.engine.call(lambda: None)  # what the loader has told is taken in before this
            bench.engine.call(bench.cache.check)
            stats = bench.engine.stats()
            assert stats.cache.leases == 0
            assert stats.tier is not None
            seen.update(stats.tier.counters.loads)
            assert stats.tier.misses.keys() <= {"absent"}
    assert seen["Finished"] > 100
    assert seen["Aborted"] > 0
    assert seen["Failed"] == 0
    assert seen["loaded"] > 0


# -- what is told ------------------------------------------------------------------------------------------------


def test_both_estimates_and_the_choice_can_be_asked_for_without_a_request(bench: Tiered) -> None:
    bench.answer(PROMPT, 1)
    bench.forget()
    tokens = bench.client([*PROMPT, 70]).request.tokens
    bench.set_speeds(prefill_tokens_per_s=1000, load_bytes_per_s=1e9)
    below = bench.engine.explain(tokens).below
    assert below is not None
    assert (below.position, below.records, below.payload_bytes) == (62, 16, 62 * 16)
    assert below.load_s == pytest.approx(62 * 16 / 1e9)
    assert below.compute_s == pytest.approx(0.062)
    assert below.load
    assert below.message.endswith("computing at 62.0 ms. It is loaded.")
    bench.set_speeds(prefill_tokens_per_s=1000, load_bytes_per_s=1000)
    below = bench.engine.explain(tokens).below
    assert below is not None
    assert not below.load
    assert "loading is estimated at 992.0 ms" in below.message
    assert below.message.endswith("It is computed.")
    assert bench.tier.counters.choices == {}
    assert bench.engine.explain(bench.client(OTHER).request.tokens).below is None


def test_the_statistics_count_choices_loads_misses_and_bytes(bench: Tiered) -> None:
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
    assert tier.misses == {}, "what the disk says is gone is not asked for"
    assert tier.records == 0


@pytest.mark.behaviour(50)
@pytest.mark.parametrize("given_up", ["not", "overdue", "missed", "aborted"])
def test_hits_and_misses_are_the_tokens_asked_for_whatever_becomes_of_a_load(
    tmp_path: Path, given_up: str
) -> None:
    with Tiered(tmp_path, block_size=64) as bench:  # one record: its load cannot be stopped half way
        bench.answer(PROMPT)
        bench.forget()
        client = bench.begin_load([*PROMPT, 70])
        match given_up:
            case "overdue":
                bench.clock.now_s += OVERDUE_LEAST_S + 0.1
                bench.run(steps=6)
                bench.expect(client)
            case "missed":
                bench.disk._segments.path(1).unlink()
            case "aborted":
                bench.engine.abort(client.request.id)
                bench.run(steps=1)
        bench.end_loads()
        bench.run()
        stats = bench.cache.stats()
        assert (
            stats.hit_tokens + stats.missed_tokens
            == stats.asked_tokens
            == 62 + (0 if given_up == "aborted" else 63)
        )
        assert stats.hit_tokens == (62 if given_up == "not" else 0)


def test_who_computes_though_it_could_load_is_counted_too(stored: Tiered) -> None:
    stored.set_speeds(prefill_tokens_per_s=1e6, load_bytes_per_s=1)
    assert cached(stored.answer([*PROMPT, 70])) == 0
    assert stored.tier.counters.choices == {"recompute": 1}
    assert stored.tier.counters.loads == {}


# -- what does not fit -------------------------------------------------------------------------------------------


def test_what_the_queue_has_no_room_for_is_lost_to_the_disk_and_to_nobody_else(tmp_path: Path) -> None:
    with Tiered(tmp_path, blocks=20, queue_bytes=300) as bench:
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


def test_when_the_engine_stops_everything_goes_down_through_a_small_queue(tmp_path: Path) -> None:
    with Tiered(tmp_path, queue_bytes=130) as bench:
        bench.answer(PROMPT)
    with Tiered(tmp_path) as bench:
        assert cached(bench.answer([*PROMPT, 70])) == len(PROMPT)


def test_a_prompt_larger_than_the_pool_beside_it_is_loaded_into_what_can_be_had(tmp_path: Path) -> None:
    """Of two long prompts on disk only one fits into memory at a time."""
    with Tiered(tmp_path, blocks=20) as bench:
        bench.answer(PROMPT)
        bench.answer(OTHER)
    with Tiered(tmp_path, blocks=20) as bench:
        one, other = bench.ask([*PROMPT, 70]), bench.ask([*OTHER, 70])
        bench.run()
        bench.expect(one)
        bench.expect(other)
        assert cached(one) == cached(other) == len(PROMPT)


@kinds
def test_a_prompt_that_is_to_be_scored_is_computed_whole(stored: Tiered) -> None:
    client = stored.answer([*PROMPT, 70], prompt_logprobs=0)
    assert cached(client) == 0
    assert stored.tier.counters.loads == {}
    assert any(isinstance(event, PromptScored) for event in client.events)


# -- without a disk ----------------------------------------------------------------------------------------------


def unusable(folder: Path) -> Path:
    folder.write_text("a file")
    return folder


def test_a_directory_that_cannot_be_used_is_one_warning_and_an_engine_that_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Tiered(unusable(tmp_path / "tier"), blocks=30) as bench:
        for prompt in (PROMPT, OTHER, PROMPT):
            bench.answer(prompt)
        tier = bench.engine.stats().tier
        assert tier is not None
        assert tier.state == "off"
        assert "cannot be used" in tier.reason
        assert tier.counters.stored_rows == 0
        assert bench.engine.explain(bench.client(PROMPT).request.tokens).below is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Requests go on without it." in caplog.text


def test_a_directory_that_another_engine_has_is_one_warning_and_an_engine_that_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Tiered(tmp_path) as first, caplog.at_level(logging.WARNING), Tiered(tmp_path) as second:
        first.answer(PROMPT)
        second.answer(PROMPT)
        tier = second.engine.stats().tier
        assert tier is not None
        assert tier.state == "off"
        assert first.tier.state == "ready"
        assert len(caplog.records) == 1
    with Tiered(tmp_path) as bench:
        assert cached(bench.answer([*PROMPT, 70])) == len(PROMPT)


def test_an_index_that_fails_while_requests_run_is_one_warning_and_an_engine_that_works(
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
        assert bench.tier.counters.stored_rows == stored, "nothing is copied for nobody"
        assert bench.cache.stats().leases == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_with_the_prefix_cache_off_nothing_is_stored_or_found_below(tmp_path: Path) -> None:
    with Tiered(tmp_path) as bench:
        bench.answer(PROMPT)
    without = Bench(tier=TierConfig(tmp_path, 16 * MIB), reuse=False)
    client = without.ask([*PROMPT, 70])
    without.run()
    assert cached(client) == 0
    assert without.engine.stats().tier is None
    without.engine.stop()


def test_host_memory_below_a_cpu_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="--kv-budget"):
        stored_index(FakeRuntime(), TierConfig(tmp_path, host_budget_bytes=MIB), 4)
    with pytest.raises(InvalidOption, match="--host-budget"):
        stored_index(FakeRuntime(), TierConfig(host_budget_bytes=MIB), 4)


def test_without_a_directory_there_is_nothing_below() -> None:
    assert stored_index(FakeRuntime(), TierConfig(), 4) is None


def test_what_is_not_the_tiers_is_counted_in_its_bytes(tmp_path: Path) -> None:
    with Tiered(tmp_path) as bench:
        bench.answer(PROMPT)
        bench.forget()
        (tmp_path / "v0-00000001.segment").write_bytes(bytes(1000))
        assert bench.tier.foreign_bytes == 1000
        assert bench.tier.used_bytes == directory_bytes(tmp_path)


# -- small disks -------------------------------------------------------------------------------------------------


def test_records_of_a_planned_load_outlive_the_stores_that_come_between(tmp_path: Path) -> None:
    with Tiered(tmp_path, cap_bytes=MIB) as bench:
        bench.answer(PROMPT)
        bench.forget()
        fill = iter(range(10_000))
        while bench.disk.usage().total_bytes < 0.7 * MIB:
            bench.clock.now_s += 1
            bench.disk.store(records(1, 20_000, first=next(fill)))
        client = bench.begin_load([*PROMPT, 70])
        evicted = bench.disk.room_counts.evicted_bytes
        while bench.disk.room_counts.evicted_bytes < evicted + MIB // 2:
            bench.disk.store(records(1, 20_000, first=next(fill)))
        bench.loads.open()
        bench.run()
        bench.expect(client)
        assert bench.tier.counters.loads == {"loaded": 1}
        assert bench.tier.misses == {}


@kinds
def test_on_a_disk_that_is_always_full_no_load_is_planned_for_what_is_gone(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    rng = np.random.default_rng(0)
    with Tiered(tmp_path, families=families, cap_bytes=MIB) as bench:
        prompts = [[90, i, *range(40)] for i in range(12)]
        for turn in range(60):
            bench.clock.now_s += 1
            prompt = prompts[min(int(rng.exponential(3)), 11)]
            bench.answer(prompt)
            prompt.append(turn)
            bench.forget()
            bench.disk.store(records(4, 20_000, first=4 * turn))  # evicts, behind the engine's back
        tier = bench.tier
        assert bench.disk.room_counts.evicted_records > 100
        assert tier.misses == {}
        assert set(tier.counters.loads) <= {"loaded"}
        assert tier.counters.loads["loaded"] > 5
        assert tier.written_bytes > tier.stored_bytes > 4 * MIB


def test_a_budget_that_is_too_small_for_the_model_stops_the_start_and_says_the_least(tmp_path: Path) -> None:
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


def test_a_load_whose_records_are_evicted_before_it_begins_is_planned_anew_and_reads_nothing(
    stored: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = stored.loads.passed
    begin = stored.tiering.begin

    def evict_and_begin(*planned: Any) -> None:
        monkeypatch.setattr(stored.tiering, "begin", begin)
        stored.disk.clear()
        begin(*planned)

    monkeypatch.setattr(stored.tiering, "begin", evict_and_begin)
    assert cached(stored.answer([*PROMPT, 70])) == 0
    assert stored.loads.passed == passed
    assert stored.tier.counters.loads == {"evicted": 1}
    assert stored.tier.misses == {}
    assert stored.cache.stats().leases == 0
