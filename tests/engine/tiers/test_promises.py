"""Promises of a tier to requests, with any fault of the disk and any stop of a process: behaviours 39 to 46.

tests/faults/test_disk_faults.py holds 40, and part of 39, 42 and 44.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.helpers import Client
from engine.tiered import KINDS, MIB, OTHER, PROMPT, Families, Tiered, kinds, of_kinds, opened_by, options
from faults.faulty_files import FaultyFiles
from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.pools import Rows
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.engine.request import Failed
from rootstock.engine.tiers.connector import OVERDUE_LEAST_S, STALE_S
from rootstock.errors import EngineFault, EngineStopped
from rootstock.runtime.base import Batch, Logits
from rootstock.testing.fake_runtime import FULL, STATE, window
from rootstock.tiers.base import Loaded, LoadResult, Miss, MissKind
from tiers.helpers import directory_bytes
from waiting import first_wait_on, join, wait_for, wait_until

evicted_kinds = of_kinds(KINDS[:-1])  # states alone never fill these budgets


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    """The files of every directory that a test opens."""
    files = FaultyFiles()
    monkeypatch.setattr("rootstock.tiers.disk.tier.Files", lambda: files)
    return files


# -- 39 ----------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour(39)
def test_a_store_is_invisible_on_disk_until_it_is_complete(files: FaultyFiles, bench: Tiered) -> None:
    bench.answer(PROMPT)
    stores = [store.identity for store in bench.cache.take_all_stores()]
    load, seen, committed = bench.disk.load, [], set[RecordKey]()

    def look(name: str) -> None:
        visible = {entry.identity.key for entry in bench.disk.entries()}
        if name == "commit done":
            committed.update(key for (key,) in bench.disk._index._db.execute("SELECT key FROM records"))
        elif name in ("open_new", "write", "sync", "sync_folder"):
            seen.append(name)
            assert visible == committed
            for identity in stores:
                found = load(identity) != Miss(MissKind.ABSENT)
                assert found == (identity.key in committed)

    files.boundary = look
    bench.connector.flush()
    files.boundary = lambda name: None
    assert {"open_new", "write", "sync", "sync_folder"} <= set(seen)
    assert committed == {identity.key for identity in stores}
    assert bench.tier.stored_records == len(stores)


@kinds
@pytest.mark.behaviour(39)
def test_no_row_of_a_failed_load_is_used(bench: Tiered) -> None:
    """Each record of a prompt fails once: it leaves garbage in its row and reports a miss."""
    bench.answer(PROMPT, 1)
    bench.forget()
    records = len(list(bench.disk.entries()))
    load = bench.disk.load
    for failing in range(records):
        asked = itertools.count()

        def spoilt(
            identity: Identity,
            into: object = None,
            then: Identity | None = None,
            asked: Iterator[int] = asked,
            failing: int = failing,
        ) -> LoadResult:
            if next(asked) == failing:
                assert isinstance(into, list)
                for buffer in into:
                    buffer[:] = 0xA5
                return Miss(MissKind.IO_ERROR)
            return load(identity, into)  # type: ignore[arg-type]

        bench.disk.load = spoilt  # type: ignore[method-assign]
        client = bench.answer([*PROMPT, 70])
        assert client.cached_tokens <= len(PROMPT)
        bench.disk.load = load  # type: ignore[method-assign]
        bench.forget()
    assert bench.tier.counters.loads["missed"] > 0


# -- 41 ----------------------------------------------------------------------------------------------------------

SERVES = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from engine.tiered import KINDS, PROMPT, Tiered
bench = Tiered(Path(sys.argv[1]), families=KINDS[int(sys.argv[3])], write="through")
for first in range(int(sys.argv[4]), 97):
    bench.answer([first, *PROMPT], 3)
    bench.writer.drain()  # everything is acknowledged
    print(first, flush=True)
    bench.answer([first, 1, *PROMPT], 3)  # not acknowledged
"""


@pytest.mark.behaviour(41)
@pytest.mark.parametrize("kind", [0, 3], ids=["full", "everything"])
def test_a_killed_engine_loses_only_stores_that_were_not_acknowledged(tmp_path: Path, kind: int) -> None:
    served: list[int] = []
    waits = random.Random(kind)
    for start in (0, 40):
        command = [sys.executable, "-c", SERVES, str(tmp_path), str(Path(__file__).parents[2])]
        process = subprocess.Popen([*command, str(kind), str(start)], stdout=subprocess.PIPE, text=True)
        lines = [process.stdout.readline() for _ in range(waits.randint(2, 12))]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        process.wait()
        served += [int(line) for line in lines if line.strip()]
        with Tiered(tmp_path, families=KINDS[kind]) as bench:
            assert bench.tier.state == "ready"
            for first in served:
                assert bench.answer([first, *PROMPT, 70]).cached_tokens > bench.end_of(PROMPT)
            bench.answer([served[-1], 1, *PROMPT, 70])  # of which some records may be stored
            assert bench.tier.misses == {}
    assert len(served) >= 4


# -- 42 ----------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour(42)
def test_the_cap_holds_for_the_whole_directory(tmp_path: Path) -> None:
    with Tiered(tmp_path, cap_bytes=MIB):
        pass
    (tmp_path / "left-by-another-program.tmp").write_bytes(bytes(100_000))
    (tmp_path / "000001.older").write_bytes(bytes(100_000))
    with Tiered(
        tmp_path, cap_bytes=MIB, write="through", block_size=256, blocks=40, chunk_tokens=2048
    ) as bench:
        for first in range(28):
            bench.answer([first, *([first] * 2000)], 1)
            bench.writer.drain()
            assert directory_bytes(tmp_path) <= MIB
        tier = bench.tier
        assert tier.stored_bytes > MIB
        assert tier.used_bytes <= tier.cap_bytes == MIB
        assert tier.records < tier.stored_records, "the index still holds records that the disk evicted"
        assert tier.records == len(list(bench.disk.entries()))
        assert bench.answer([27, *([27] * 2000), 1]).cached_tokens >= 2000
        bench.answer([0, *([0] * 2000), 1])
    assert directory_bytes(tmp_path) <= MIB
    with Tiered(tmp_path, cap_bytes=MIB, block_size=256, blocks=40) as bench:
        assert bench.tier.records > 0


@pytest.mark.behaviour(42)
def test_a_full_disk_only_loads_and_gives_one_warning(
    tmp_path: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Tiered(tmp_path, blocks=40) as bench:
        bench.answer(PROMPT)
        bench.forget()
        files.free_bytes = 0
        for first in range(20):
            bench.answer([70 + first, *PROMPT])
            bench.writer.drain()
        assert bench.tier.state == "loads only"
        assert "No space left" in bench.tier.reason
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert bench.answer([*PROMPT, 70]).cached_tokens == bench.end_of(PROMPT), (
            "older records are not loaded"
        )
        bench.crash()
    assert len(caplog.records) == 1


# -- 43 ----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.behaviour(43)
def test_a_hit_deeper_on_disk_than_in_memory_is_used(bench: Tiered) -> None:
    bench.answer([*PROMPT, *range(20, 50)], boundaries=(Boundary(40, CheckpointKind.USER),))
    bench.restart()
    assert bench.answer([*PROMPT[:40], 70], 1).cached_tokens == 40
    loaded = bench.cache.stats().loaded_tokens
    deeper = bench.answer([*PROMPT, *range(20, 50), 70])
    assert deeper.cached_tokens == bench.end_of(range(62 + 30))
    assert bench.cache.stats().loaded_tokens - loaded <= 62 + 30 - 36, "what memory has is not loaded again"
    memory_only = bench.answer([*PROMPT, *range(20, 50), 71])
    assert memory_only.cached_tokens == 62 + 30
    assert bench.tier.counters.loads == {"loaded": 2}


@kinds
@pytest.mark.behaviour(43)
def test_a_load_is_chosen_only_if_it_was_measured_to_be_faster(stored: Tiered) -> None:
    stored.set_speeds(prefill_tokens_per_s=1e6, load_bytes_per_s=10)
    assert stored.answer([*PROMPT, 70], 1).cached_tokens == 0
    assert stored.tier.counters.choices == {"recompute": 1}
    assert stored.tier.counters.loads == {}
    stored.forget()
    stored.set_speeds(prefill_tokens_per_s=10, load_bytes_per_s=1e6)
    assert stored.answer([*PROMPT, 71], 1).cached_tokens == len(PROMPT)
    assert stored.tier.counters.choices == {"recompute": 1, "load": 1}


@pytest.mark.behaviour(43)
def test_waiting_loads_count_against_another_load(bench: Tiered) -> None:
    bench.answer(PROMPT, 1)
    bench.answer(OTHER, 1)
    bench.forget()
    # 992 bytes and 62 tokens each: loading takes 0.99 s, computing 1.55 s, but a second load waits for the first.
    bench.set_speeds(prefill_tokens_per_s=40, load_bytes_per_s=1000)
    loading = bench.begin_load([*PROMPT, 70])
    computing = bench.ask([*OTHER, 70])
    bench.run(steps=6)
    bench.expect(computing)
    assert computing.cached_tokens == 0
    bench.finish(loading)
    assert loading.cached_tokens == bench.end_of(PROMPT)
    assert bench.tier.counters.choices == {"load": 1, "recompute": 1}


@pytest.mark.behaviour(43)
def test_a_load_is_tried_before_anything_was_measured(stored: Tiered) -> None:
    below = stored.engine.explain(Client([*PROMPT, 70]).request.tokens).below
    assert below.load
    assert below.load_s is below.compute_s is None
    assert below.message.endswith("loading is estimated at unknown, computing at unknown. It is loaded.")


@pytest.mark.behaviour(43)
def test_an_estimate_against_loading_is_checked_again_later(stored: Tiered) -> None:
    stored.set_speeds(prefill_tokens_per_s=1000, load_bytes_per_s=100)
    for turn in range(8):
        stored.clock.now_s += STALE_S + 1
        client = stored.answer([*PROMPT, 70 + turn], 1)
        stored.reader.drain()
        stored.forget()
    assert client.cached_tokens == stored.end_of(PROMPT), "the directory became fast"


# -- 44 ----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.behaviour(44)
@options(blocks=40)
def test_an_abort_keeps_the_rows_until_the_load_has_ended(stored: Tiered) -> None:
    before = live(stored)
    client = stored.begin_load([*PROMPT, 70])
    held = live(stored)
    assert all(now >= was for now, was in zip(held, before, strict=True))
    assert held != before
    stored.engine.abort(client.request.id)
    stored.run(steps=1)
    assert client.is_aborted
    assert live(stored) == held
    for first in range(3):  # these need all other rows
        stored.answer([80 + first, *range(50)])
    assert live(stored) == held
    stored.end_loads()
    assert live(stored) == before
    assert stored.cache.stats().leases == 0
    assert stored.connector.loading == 0
    stored.cache.check()
    stored.answer([*PROMPT, 70])


@pytest.mark.behaviour(44)
@options(block_size=64)  # one record: its load cannot be stopped half way
def test_a_load_of_an_aborted_request_serves_the_next_one(stored: Tiered) -> None:
    client = stored.begin_load([*PROMPT, 70])
    stored.engine.abort(client.request.id)
    stored.run(steps=1)
    stored.end_loads()
    assert stored.cache.stats().leases == 0
    assert stored.tier.counters.loads == {"loaded": 1}
    assert stored.answer([*PROMPT, 70]).cached_tokens == stored.end_of(PROMPT)
    assert stored.tier.counters.loads == {"loaded": 1}


@pytest.mark.behaviour(44)
def test_a_load_of_an_aborted_request_ends_with_its_current_record(stored: Tiered) -> None:
    passed = stored.loads.passed
    client = stored.begin_load([*PROMPT, 70])
    stored.engine.abort(client.request.id)
    stored.run(steps=1)
    stored.end_loads()
    assert stored.loads.passed == passed + 1
    assert stored.tier.counters.loads == {"cancelled": 1}
    assert stored.answer([*PROMPT, 70]).cached_tokens == stored.end_of(PROMPT), "its records are gone"


@kinds
@pytest.mark.behaviour(44)
def test_a_waiter_loads_the_prefix_after_the_abort_of_the_loading_request(stored: Tiered) -> None:
    client = stored.begin_load([*PROMPT, 70])
    waiter = stored.ask([*PROMPT, 71])
    stored.run(steps=1)
    stored.engine.abort(client.request.id)
    stored.run(steps=1)
    stored.finish(waiter)
    assert waiter.cached_tokens == stored.end_of(PROMPT)


@evicted_kinds
@pytest.mark.behaviour(44)
def test_aborts_do_not_change_queued_stores(tmp_path: Path, families: Families) -> None:
    with Tiered(tmp_path, families=families, blocks=30) as bench:
        bench.answer(PROMPT)
        bench.stores.close()
        clients = [bench.ask([80 + i, *range(50)], 30) for i in range(2)]  # evict it
        while not bench.tier.counters.stored_rows:
            bench.run(steps=1)
        bench.stores.wait_until_reached()
        for client in clients:
            bench.engine.abort(client.request.id)
        bench.run()
        assert bench.cache.stats().leases == 0
        for first in range(4):  # these overwrite its rows many times
            bench.answer([85 + first, *range(50)], 10)
        bench.stores.open()
        bench.writer.drain()
        bench.crash()
    with Tiered(tmp_path, families=families) as bench:
        assert bench.answer([*PROMPT, 70]).cached_tokens == bench.end_of(PROMPT)
        assert bench.tier.counters.loads == {"loaded": 1}


@kinds
@pytest.mark.behaviour(44)
def test_a_stop_waits_for_the_record_in_flight(stored: Tiered) -> None:
    client = stored.begin_load([*PROMPT, 70])
    stopping = threading.Thread(target=stored.engine.stop)
    stopping.start()
    wait_until(lambda: client.terminals)  # it fails at once …
    assert isinstance(client.error, EngineStopped)
    assert stopping.is_alive()  # … and the rows stay until the load has ended
    stored.loads.open()
    join(stopping)
    stored.restart()
    assert stored.answer([*PROMPT, 70]).cached_tokens == stored.end_of(PROMPT)


@kinds
@pytest.mark.behaviour(44)
def test_a_request_with_an_overdue_load_computes(stored: Tiered) -> None:
    client = stored.begin_load([*PROMPT, 70])
    held = live(stored)
    stored.clock.now_s += OVERDUE_LEAST_S + 0.1
    stored.run(steps=10)
    stored.expect(client)
    assert client.cached_tokens == 0
    assert live(stored) == held
    assert stored.tier.counters.loads == {"overdue": 1}
    assert stored.tier.counters.choices == {"recompute": 1}
    stored.end_loads()
    assert stored.cache.stats().leases == 0
    assert sum(live(stored)) == 0
    stored.cache.check()
    stored.clock.now_s += STALE_S + 1
    assert stored.answer([*PROMPT, 71]).cached_tokens == len(PROMPT)


@kinds
@pytest.mark.behaviour(44)
def test_waiters_do_not_wait_for_an_overdue_load(stored: Tiered) -> None:
    client = stored.begin_load([*PROMPT, 70])
    waiter = stored.ask([*PROMPT, 71])
    stored.run(steps=1)
    stored.clock.now_s += OVERDUE_LEAST_S + 0.1
    stored.run(steps=14)
    stored.expect(client)
    stored.expect(waiter)
    assert (client.cached_tokens, waiter.cached_tokens) == (0, len(PROMPT)), "one computes it for both"
    stored.end_loads()
    assert sum(live(stored)) == 0


@pytest.mark.behaviour(44)
def test_a_started_engine_notices_an_overdue_load(stored: Tiered) -> None:
    stored.loads.close()
    stored.engine.start()
    client = stored.ask([*PROMPT, 70])
    stored.loads.wait_until_reached()
    stored.engine.call(lambda: None)
    assert not client.events
    stored.clock.now_s += OVERDUE_LEAST_S + 0.1
    stored.engine.call(lambda: None)
    wait_for(client.ended)
    stored.expect(client)
    assert client.cached_tokens == 0


def test_an_overdue_load_gives_the_engine_a_turn_between_those_of_other_models(stored: Tiered) -> None:
    stored.begin_load([*PROMPT, 70])
    stored.run(steps=1)
    assert stored.engine.has_requests
    assert not stored.engine.has_turn
    stored.clock.now_s += OVERDUE_LEAST_S + 0.1
    assert stored.engine.has_turn
    stored.run()


@kinds
@pytest.mark.behaviour(44)
def test_a_failed_forward_does_not_end_a_load(stored: Tiered) -> None:
    def fault(batch: Batch) -> None:
        raise RuntimeError("injected")

    running = stored.ask(OTHER, 20)
    stored.run(steps=3)
    client = stored.begin_load([*PROMPT, 70])
    stored.runtime.fault = fault
    stored.run(steps=1)
    stored.runtime.fault = None
    assert running.error
    assert not client.events
    stored.finish(client)
    assert client.cached_tokens == stored.end_of(PROMPT)


@pytest.mark.behaviour(44)
def test_emptying_the_cache_waits_for_loads_into_its_rows(
    stored: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = stored.begin_load([*PROMPT, 70])

    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug between forwards")

    with monkeypatch.context() as patch:
        patch.setattr(stored.engine.scheduler, "schedule", bug)
        stepping = threading.Thread(target=stored.engine.step)
        waits = first_wait_on(stored.reader._changed)
        stepping.start()
        wait_for(waits)
        assert stepping.is_alive()
        assert not client.terminals
        stored.loads.open()
        join(stepping)
    assert isinstance(client.error, EngineFault)
    assert stored.answer([*PROMPT, 70]).cached_tokens == stored.end_of(PROMPT)


def live(bench: Tiered) -> list[int]:
    """Counts the rows in use, of each family."""
    return [family.live_rows for family in bench.cache.stats().families]


# -- 45 ----------------------------------------------------------------------------------------------------------


@evicted_kinds
@pytest.mark.behaviour(45)
@options(blocks=30)
def test_evicted_blocks_are_served_from_the_queue_before_they_are_on_disk(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.stores.close()
    for first in range(4):
        bench.answer([80 + first, *range(80)])
    bench.stores.wait_until_reached()
    assert bench.tier.stored_records == 0
    again = bench.answer([*PROMPT, 70])
    assert again.cached_tokens >= len(PROMPT) - 1
    assert bench.disk.counts.loaded_records == 0
    bench.stores.open()
    bench.writer.drain()
    bench.forget()
    assert bench.answer([*PROMPT, 71]).cached_tokens == len(PROMPT)
    assert bench.disk.counts.loaded_records > 0


@kinds
@pytest.mark.behaviour(45)
def test_evicted_blocks_are_served_before_each_call_of_the_disk(files: FaultyFiles, stored: Tiered) -> None:
    """A record is loaded from the queue until it is on disk."""
    payloads = {entry.identity.key: loaded(stored, entry.identity) for entry in stored.disk.entries()}
    stored.disk.clear()
    stored.connector.follow()
    stored.answer(PROMPT)
    misses: list[str] = []

    def look(name: str) -> None:
        if name in ("open_read", "read", "commit", "commit done"):
            return
        for identity in queued:
            if loaded(stored, identity) != payloads[identity.key]:
                misses.append(name)

    queued = [store.identity for store in stored.cache.take_all_stores()]
    assert {identity.key for identity in queued} == set(payloads)
    for store in stored.cache.take_all_stores():
        stored.stores.close()
        stored.connector.store([store])
    files.boundary = look
    stored.stores.open()
    stored.writer.drain()
    files.boundary = lambda name: None
    look("stored")
    assert misses == []


def loaded(bench: Tiered, identity: Identity) -> bytes:
    """Loads a record like the reader."""
    result = bench.writer.load(identity)
    return b"".join(bytes(view) for view in result.payload) if isinstance(result, Loaded) else b"missed"


# -- 46 ----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.behaviour(46)
def test_a_clear_waits_for_loads_in_flight(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.answer(OTHER)
    bench.forget()
    loading = bench.begin_load([*PROMPT, 70])
    assert bench.engine.clear_cache().later
    assert list(bench.disk.entries()) != []
    newcomer = bench.ask([*OTHER, 70])
    bench.run(steps=8)
    bench.expect(newcomer)
    assert newcomer.cached_tokens == 0, "a record that is to be cleared was loaded"
    bench.finish(loading)
    assert loading.cached_tokens == bench.end_of(PROMPT), "the load in flight was cut off"
    assert list(bench.disk.entries()) == []
    assert bench.tier.records == 0
    assert not bench.engine.clear_cache().later
    bench.restart()
    assert bench.answer([*PROMPT, 70]).cached_tokens == 0


@kinds
@pytest.mark.behaviour(46)
def test_a_clear_empties_the_disk_and_leaves_running_requests_alone(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.answer(OTHER)
    bench.forget()
    running = bench.ask([*PROMPT, 70], 30)
    while len(running.tokens) < 5:
        bench.run(steps=1)
    assert not bench.engine.clear_cache().later
    assert list(bench.disk.entries()) == []
    assert bench.tier.records == 0
    bench.run()
    bench.expect(running)
    assert bench.answer([*OTHER, 70]).cached_tokens == 0


@evicted_kinds
@pytest.mark.behaviour(46)
@options(blocks=30)
def test_a_clear_removes_queued_stores(bench: Tiered) -> None:
    bench.answer(PROMPT)
    bench.stores.close()
    for first in range(4):
        bench.answer([80 + first, *range(80)])
    bench.stores.wait_until_reached()
    opened_by(bench.stores, bench.writer, "drain")
    assert not bench.engine.clear_cache().later
    assert list(bench.disk.entries()) == []
    assert bench.answer([*PROMPT, 70]).cached_tokens == 0
    assert bench.tier.counters.loads == {}


@pytest.mark.behaviour(46)
@pytest.mark.parametrize("end", ["stop", "fault"])
def test_a_delayed_clear_happens_though_the_engine_stops_or_fails(
    monkeypatch: pytest.MonkeyPatch, end: str, stored: Tiered
) -> None:
    client = stored.begin_load([*PROMPT, 70])
    assert stored.engine.clear_cache().later
    opened_by(stored.loads, stored.reader, "drain")
    if end == "fault":
        with monkeypatch.context() as patch:
            patch.setattr(stored.engine.scheduler, "schedule", lambda *_: 1 / 0)
            stored.engine.step()
        assert client.error
        assert stored.answer([*PROMPT, 70]).cached_tokens == 0
        stored.forget()
        assert stored.answer([*PROMPT, 71]).cached_tokens == stored.end_of(PROMPT), (
            "later stores are not loaded"
        )
        stored.engine.clear_cache()
    stored.engine.stop()
    stored.restart()
    assert stored.answer([*PROMPT, 70]).cached_tokens == 0


@pytest.mark.behaviour(45)
@pytest.mark.parametrize("families", [(FULL, STATE), (FULL, window(7)), (FULL, window(7), STATE)], ids=str)
@options(blocks=60, block_size=8, chunk_tokens=512)
def test_a_block_that_is_evicted_in_part_is_stored_whole(bench: Tiered) -> None:
    """Eviction cuts a leaf at a checkpoint inside a block. Deeper records need the block's end."""
    prompt = list(range(80))
    bench.answer(prompt, 1, boundaries=(Boundary(43, CheckpointKind.SYSTEM),))
    bench.answer([*prompt, 3], 1)
    while bench.cache.stats().cached_tokens:
        rows = Rows(bench.cache.pool.free_blocks + 1, (0,) * len(bench.cache.pools.windows))
        bench.cache.tree._evict(rows, None)
        bench.engine.parts.apply(bench.cache.take_pending_plan())
    assert bench.answer([*prompt, 90, 91], 2).cached_tokens >= 79


@pytest.mark.behaviour(41)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@options(families=(FULL, STATE))
def test_an_engine_that_dies_in_a_forward_stores_no_half_written_rows(bench: Tiered) -> None:
    forward, calls = bench.runtime.forward, iter(range(1000))

    def dying(batch: Batch) -> Logits:
        logits = forward(batch)
        if next(calls) == 2:
            raise SystemExit
        return logits

    bench.runtime.forward = dying
    bench.engine.start()
    client = bench.ask(PROMPT)
    wait_for(client.ended)
    join(bench.engine._thread)
    given = client.tokens
    assert given
    bench.restart()
    bench.answer([*PROMPT, *given, 5, 6], 4)  # checks the answer


def test_a_record_with_a_read_error_is_not_tried_forever(
    stored: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not make the disk drop the record."""
    asked: list[Identity] = []

    def busy(identity: Identity, into: object = None) -> LoadResult:
        asked.append(identity)
        return Miss(MissKind.IO_ERROR, "too many open files")

    monkeypatch.setattr(stored.disk, "load", busy)
    stored.answer([*PROMPT, 70])
    assert len(asked) == len({identity.key for identity in asked})


@pytest.mark.behaviour(44)
@options(blocks=12, block_size=8)
def test_a_request_waits_for_the_rows_of_a_load_that_was_given_up(stored: Tiered) -> None:
    """The last running request fails without memory, but not if a load in flight will free some."""
    loading = stored.begin_load([*PROMPT, 70])
    stored.engine.abort(loading.request.id)
    client = stored.ask(OTHER[:10], 60)
    for _ in range(80):
        stored.engine.step()
    assert not client.events or not isinstance(client.events[-1], Failed), client.events[-1]
    stored.end_loads()
    stored.run()
    stored.expect(client)


@pytest.mark.behaviour(44)
@options(block_size=8)
def test_a_load_below_a_prefix_in_memory_is_cached_though_its_request_was_aborted(stored: Tiered) -> None:
    stored.answer([*PROMPT[:32], 71])
    loading = stored.begin_load([*PROMPT[:40], 70])  # one block, which is under way
    stored.engine.abort(loading.request.id)
    stored.engine.step()
    stored.end_loads()
    stored.cache.check()
    loads = stored.loads.passed
    assert stored.answer([*PROMPT[:40], 72]).cached_tokens == 40
    assert stored.loads.passed == loads
