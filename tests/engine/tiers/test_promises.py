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

from engine.tiered import KINDS, MIB, OTHER, PROMPT, Tiered, cached, kinds, of_kinds, opened_by
from faults.faulty_files import FaultyFiles
from rootstock.cache.families import Family
from rootstock.cache.keys import Identity, RecordKey
from rootstock.cache.pools import Rows
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.engine.prompts.salt import salt_of
from rootstock.engine.request import Aborted, Failed
from rootstock.engine.step import PlanExecutor
from rootstock.engine.tiers.connector import OVERDUE_LEAST_S, STALE_S
from rootstock.errors import EngineFault, EngineStopped
from rootstock.runtime.base import Batch, Logits
from rootstock.testing.fake_runtime import FULL, STATE, window
from rootstock.tiers.base import Loaded, LoadResult, Miss, MissKind
from tiers.helpers import directory_bytes
from waiting import first_wait_on, join, wait_for, wait_until

evicted_kinds = of_kinds(KINDS[:-1])  # as many states as fit into these budgets are never had


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    """Those of every directory that is opened."""
    files = FaultyFiles()
    monkeypatch.setattr("rootstock.tiers.disk.tier.Files", lambda: files)
    return files


# -- 39 ----------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour(39)
def test_on_the_disk_a_store_is_invisible_until_it_is_complete(files: FaultyFiles, bench: Tiered) -> None:
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
    bench.tiering.flush()
    files.boundary = lambda name: None
    assert {"open_new", "write", "sync", "sync_folder"} <= set(seen)
    assert committed == {identity.key for identity in stores}
    assert bench.tier.stored_records == len(stores)


@kinds
@pytest.mark.behaviour(39)
def test_of_a_load_that_fails_in_the_middle_nothing_is_believed(bench: Tiered) -> None:
    """Each record of a prompt once: garbage is left in its row, and a miss is told."""
    bench.answer(PROMPT, 1)
    bench.forget()
    records = len(list(bench.disk.entries()))
    load = bench.disk.load
    for failing in range(records):
        asked = itertools.count()

        def spoilt(
            identity: Identity, into: object = None, asked: Iterator[int] = asked, failing: int = failing
        ) -> LoadResult:
            if next(asked) == failing:
                assert isinstance(into, list)
                for buffer in into:
                    buffer[:] = 0xA5
                return Miss(MissKind.IO_ERROR)
            return load(identity, into)  # type: ignore[arg-type]

        bench.disk.load = spoilt  # type: ignore[method-assign]
        client = bench.answer([*PROMPT, 70])
        assert cached(client) <= len(PROMPT)
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
    bench.mover.drain()  # everything is acknowledged
    print(first, flush=True)
    bench.answer([first, 1, *PROMPT], 3)  # is not
"""


@pytest.mark.behaviour(41)
@pytest.mark.parametrize("kind", [0, 3], ids=["full", "everything"])
def test_a_killed_engine_loses_at_most_what_was_not_acknowledged_and_the_next_serves_the_rest(
    tmp_path: Path, kind: int
) -> None:
    served: list[int] = []
    waits = random.Random(kind)
    for start in (0, 40):
        command = [sys.executable, "-c", SERVES, str(tmp_path), str(Path(__file__).parents[2])]
        process = subprocess.Popen([*command, str(kind), str(start)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(waits.randint(2, 12))]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.read().splitlines()
        process.wait()
        served += [int(line) for line in lines if line.strip()]
        with Tiered(tmp_path, families=KINDS[kind]) as bench:
            assert bench.tier.state == "ready"
            for first in served:
                assert cached(bench.answer([first, *PROMPT, 70])) == 1 + len(PROMPT)
            bench.answer([served[-1], 1, *PROMPT, 70])  # whatever is left of it
            assert bench.tier.misses == {}
    assert len(served) >= 4


# -- 42 ----------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour(42)
def test_the_cap_holds_for_the_whole_directory_while_an_engine_stores_more_than_that(tmp_path: Path) -> None:
    with Tiered(tmp_path, cap_bytes=MIB):
        pass
    (tmp_path / "left-by-somebody.tmp").write_bytes(bytes(100_000))
    (tmp_path / "000001.older").write_bytes(bytes(100_000))
    with Tiered(
        tmp_path, cap_bytes=MIB, write="through", block_size=256, blocks=40, chunk_tokens=2048
    ) as bench:
        for first in range(28):
            bench.answer([first, *([first] * 2000)], 1)
            bench.mover.drain()
            assert directory_bytes(tmp_path) <= MIB
        tier = bench.tier
        assert tier.stored_bytes > MIB
        assert tier.used_bytes <= tier.cap_bytes == MIB
        assert tier.records < tier.stored_records, "what was evicted from the disk is not looked for there"
        assert tier.records == len(list(bench.disk.entries()))
        assert cached(bench.answer([27, *([27] * 2000), 1])) >= 2000
        bench.answer([0, *([0] * 2000), 1])
    assert directory_bytes(tmp_path) <= MIB
    with Tiered(tmp_path, cap_bytes=MIB, block_size=256, blocks=40) as bench:
        assert bench.tier.records > 0


@pytest.mark.behaviour(42)
def test_a_full_disk_is_no_tier_with_one_warning_and_requests_go_on(
    tmp_path: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Tiered(tmp_path, blocks=40) as bench:
        bench.answer(PROMPT)
        bench.forget()
        files.free_bytes = 0
        for first in range(20):
            bench.answer([70 + first, *PROMPT])
            bench.mover.drain()
        assert bench.tier.state == "loads only"
        assert "No space left" in bench.tier.reason
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert cached(bench.answer([*PROMPT, 70])) == len(PROMPT), "what was there before is still loaded"
        bench.crash()
    assert len(caplog.records) == 1


# -- 43 ----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.behaviour(43)
def test_a_hit_deeper_on_disk_than_in_memory_is_used(tmp_path: Path, families: tuple[Family, ...]) -> None:
    with Tiered(tmp_path, families=families) as bench:
        bench.answer([*PROMPT, *range(20, 50)], boundaries=(Boundary(40, CheckpointKind.USER),))
    with Tiered(tmp_path, families=families) as bench:
        assert cached(bench.answer([*PROMPT[:40], 70], 1)) == 40
        loaded = bench.cache.stats().loaded_tokens
        deeper = bench.answer([*PROMPT, *range(20, 50), 70])
        assert cached(deeper) == 62 + 30
        assert bench.cache.stats().loaded_tokens - loaded <= 62 + 30 - 36, (
            "what memory has is not loaded again"
        )
        memory_only = bench.answer([*PROMPT, *range(20, 50), 71])
        assert cached(memory_only) == 62 + 30
        assert bench.tier.counters.loads == {"loaded": 2}


@kinds
@pytest.mark.behaviour(43)
def test_loading_is_chosen_only_where_it_was_measured_to_be_faster(stored: Tiered) -> None:
    stored.set_speeds(prefill_tokens_per_s=1e6, load_bytes_per_s=10)
    assert cached(stored.answer([*PROMPT, 70], 1)) == 0
    assert stored.tier.counters.choices == {"recompute": 1}
    assert stored.tier.counters.loads == {}
    stored.forget()
    stored.set_speeds(prefill_tokens_per_s=10, load_bytes_per_s=1e6)
    assert cached(stored.answer([*PROMPT, 71], 1)) == len(PROMPT)
    assert stored.tier.counters.choices == {"recompute": 1, "load": 1}


@pytest.mark.behaviour(43)
def test_what_waits_to_be_loaded_counts_against_loading(bench: Tiered) -> None:
    bench.answer(PROMPT, 1)
    bench.answer(OTHER, 1)
    bench.forget()
    # 992 bytes and 62 tokens each: 0.99 s against 1.55 s, but not after the other's.
    bench.set_speeds(prefill_tokens_per_s=40, load_bytes_per_s=1000)
    loading = bench.begin_load([*PROMPT, 70])
    computing = bench.ask([*OTHER, 70])
    bench.run(steps=6)
    bench.expect(computing)
    assert cached(computing) == 0
    bench.loads.open()
    bench.run()
    bench.expect(loading)
    assert cached(loading) == len(PROMPT)
    assert bench.tier.counters.choices == {"load": 1, "recompute": 1}


@pytest.mark.behaviour(43)
def test_while_nothing_was_measured_loading_is_tried(stored: Tiered) -> None:
    below = stored.engine.explain(stored.client([*PROMPT, 70]).request.tokens).below
    assert below is not None
    assert below.load
    assert below.load_s is below.compute_s is None
    assert below.message.endswith("loading is estimated at unknown, computing at unknown. It is loaded.")


@pytest.mark.behaviour(43)
def test_an_estimate_that_speaks_against_loading_is_checked_again_after_a_while(stored: Tiered) -> None:
    stored.set_speeds(prefill_tokens_per_s=1000, load_bytes_per_s=100)
    for turn in range(8):
        stored.clock.now_s += STALE_S + 1
        client = stored.answer([*PROMPT, 70 + turn], 1)
        stored.tiering._reader.drain()
        stored.forget()
    assert cached(client) == len(PROMPT), "the directory became fast"


# -- 44 ----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.behaviour(44)
def test_aborting_while_loading_keeps_the_rows_until_the_load_has_ended(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    with Tiered(tmp_path, families=families, blocks=40) as bench:
        bench.answer(PROMPT)
        bench.forget()
        before = live(bench)
        client = bench.begin_load([*PROMPT, 70])
        held = live(bench)
        assert all(now >= was for now, was in zip(held, before, strict=True))
        assert held != before
        bench.engine.abort(client.request.id)
        bench.run(steps=1)
        assert isinstance(client.events[-1], Aborted)
        assert len(client.terminals) == 1
        assert live(bench) == held
        for first in range(3):  # which need all the rows that there are, but for these
            bench.answer([80 + first, *range(50)])
        assert live(bench) == held
        bench.end_loads()
        assert live(bench) == before
        assert bench.cache.stats().leases == 0
        assert bench.tiering.loading == 0
        bench.cache.check()
        bench.answer([*PROMPT, 70])


@pytest.mark.behaviour(44)
def test_what_was_loaded_for_a_request_that_was_aborted_is_found_by_the_next(tmp_path: Path) -> None:
    with Tiered(tmp_path, block_size=64) as bench:  # one record: its load cannot be stopped half way
        bench.answer(PROMPT)
        bench.forget()
        client = bench.begin_load([*PROMPT, 70])
        bench.engine.abort(client.request.id)
        bench.run(steps=1)
        bench.end_loads()
        assert bench.cache.stats().leases == 0
        assert bench.tier.counters.loads == {"loaded": 1}
        assert cached(bench.answer([*PROMPT, 70])) == len(PROMPT)
        assert bench.tier.counters.loads == {"loaded": 1}


@pytest.mark.behaviour(44)
def test_a_load_that_nobody_wants_any_more_ends_with_the_record_under_way(stored: Tiered) -> None:
    passed = stored.loads.passed
    client = stored.begin_load([*PROMPT, 70])
    stored.engine.abort(client.request.id)
    stored.run(steps=1)
    stored.end_loads()
    assert stored.loads.passed == passed + 1
    assert stored.tier.counters.loads == {"cancelled": 1}
    assert cached(stored.answer([*PROMPT, 70])) == len(PROMPT), "and is there to be loaded again"


@kinds
@pytest.mark.behaviour(44)
def test_who_waits_for_a_load_that_is_aborted_is_loaded_or_computes(stored: Tiered) -> None:
    client = stored.begin_load([*PROMPT, 70])
    waiter = stored.ask([*PROMPT, 71])
    stored.run(steps=1)
    stored.engine.abort(client.request.id)
    stored.run(steps=1)
    stored.loads.open()
    stored.run()
    stored.expect(waiter)
    assert cached(waiter) == len(PROMPT)


@evicted_kinds
@pytest.mark.behaviour(44)
def test_aborting_with_stores_queued_changes_nothing_of_what_is_stored(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
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
        for first in range(4):  # its rows are written again and again
            bench.answer([85 + first, *range(50)], 10)
        bench.stores.open()
        bench.mover.drain()
        bench.crash()
    with Tiered(tmp_path, families=families) as bench:
        assert cached(bench.answer([*PROMPT, 70])) == len(PROMPT)
        assert bench.tier.counters.loads == {"loaded": 1}


@kinds
@pytest.mark.behaviour(44)
def test_stopping_an_engine_waits_for_the_record_that_is_being_loaded(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    with Tiered(tmp_path, families=families) as bench:
        bench.answer(PROMPT)
        bench.forget()
        client = bench.begin_load([*PROMPT, 70])
        stopping = threading.Thread(target=bench.engine.stop)
        stopping.start()
        wait_until(lambda: client.terminals)  # it is failed at once …
        assert isinstance(client.events[-1], Failed)
        assert isinstance(client.events[-1].error, EngineStopped)
        assert stopping.is_alive()  # … and the rows are kept until the disk has let go of them
        bench.loads.open()
        join(stopping)
    with Tiered(tmp_path, families=families) as bench:
        assert cached(bench.answer([*PROMPT, 70])) == len(PROMPT)


@kinds
@pytest.mark.behaviour(44)
def test_a_request_whose_load_takes_far_too_long_computes_and_the_load_keeps_its_rows(stored: Tiered) -> None:
    client = stored.begin_load([*PROMPT, 70])
    held = live(stored)
    stored.clock.now_s += OVERDUE_LEAST_S + 0.1
    stored.run(steps=10)
    stored.expect(client)
    assert cached(client) == 0
    assert live(stored) == held
    assert stored.tier.counters.loads == {"overdue": 1}
    stored.end_loads()
    assert stored.cache.stats().leases == 0
    assert sum(live(stored)) == 0
    stored.cache.check()
    stored.clock.now_s += STALE_S + 1
    assert cached(stored.answer([*PROMPT, 71])) == len(PROMPT)


@kinds
@pytest.mark.behaviour(44)
def test_nobody_waits_for_a_load_that_takes_far_too_long(stored: Tiered) -> None:
    client = stored.begin_load([*PROMPT, 70])
    waiter = stored.ask([*PROMPT, 71])
    stored.run(steps=1)
    stored.clock.now_s += OVERDUE_LEAST_S + 0.1
    stored.run(steps=14)
    stored.expect(client)
    stored.expect(waiter)
    assert (cached(client), cached(waiter)) == (0, len(PROMPT)), "one computes it for both"
    stored.end_loads()
    assert sum(live(stored)) == 0


@pytest.mark.behaviour(44)
def test_a_started_engine_notices_that_a_load_takes_far_too_long(stored: Tiered) -> None:
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
    assert cached(client) == 0


@kinds
@pytest.mark.behaviour(44)
def test_a_forward_that_raises_leaves_a_load_alone(tmp_path: Path, families: tuple[Family, ...]) -> None:
    failing = threading.Event()

    def fault(batch: Batch) -> None:
        if failing.is_set():
            raise RuntimeError("injected")

    with Tiered(tmp_path, families=families, fault=fault) as bench:
        bench.answer(PROMPT)
        bench.forget()
        running = bench.ask(OTHER, 20)
        bench.run(steps=3)
        client = bench.begin_load([*PROMPT, 70])
        failing.set()
        bench.run(steps=1)
        failing.clear()
        assert isinstance(running.events[-1], Failed)
        assert not client.events
        bench.loads.open()
        bench.run()
        bench.expect(client)
        assert cached(client) == len(PROMPT)


@pytest.mark.behaviour(44)
def test_an_engine_that_starts_anew_waits_for_the_loads_into_its_rows(
    stored: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = stored.begin_load([*PROMPT, 70])

    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug between forwards")

    with monkeypatch.context() as patch:
        patch.setattr(stored.engine.scheduler, "schedule", bug)
        stepping = threading.Thread(target=stored.engine.step)
        waits = first_wait_on(stored.tiering._reader._changed)
        stepping.start()
        wait_for(waits)
        assert stepping.is_alive()
        assert not client.terminals
        stored.loads.open()
        join(stepping)
    assert isinstance(client.events[-1], Failed)
    assert isinstance(client.events[-1].error, EngineFault)
    assert cached(stored.answer([*PROMPT, 70])) == len(PROMPT)


def live(bench: Tiered) -> list[int]:
    """Rows that somebody uses, of each family."""
    return [family.live_rows for family in bench.cache.stats().families]


# -- 45 ----------------------------------------------------------------------------------------------------------


@evicted_kinds
@pytest.mark.behaviour(45)
def test_what_was_evicted_is_served_from_the_queue_while_the_disk_has_not_taken_it(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    with Tiered(tmp_path, families=families, blocks=30) as bench:
        bench.answer(PROMPT)
        bench.stores.close()
        for first in range(4):
            bench.answer([80 + first, *range(80)])
        bench.stores.wait_until_reached()
        assert bench.tier.stored_records == 0
        again = bench.answer([*PROMPT, 70])
        assert cached(again) == len(PROMPT)
        assert bench.disk.counts.loaded_records == 0
        bench.stores.open()
        bench.mover.drain()
        bench.forget()
        assert cached(bench.answer([*PROMPT, 71])) == len(PROMPT)
        assert bench.disk.counts.loaded_records > 0


@kinds
@pytest.mark.behaviour(45)
def test_what_was_evicted_is_served_at_every_instant_of_its_way_down(
    files: FaultyFiles, stored: Tiered
) -> None:
    """Whatever the disk is about to do, the record can be had: from the queue, and from the disk once it is there."""
    payloads = {entry.identity.key: loaded(stored, entry.identity) for entry in stored.disk.entries()}
    stored.disk.clear()
    stored.tiering.follow()
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
        stored.tiering.store([store])
    files.boundary = look
    stored.stores.open()
    stored.mover.drain()
    files.boundary = lambda name: None
    look("stored")
    assert misses == []


def loaded(bench: Tiered, identity: Identity) -> bytes:
    """As the loader loads it."""
    result = bench.mover.load(identity)
    return b"".join(bytes(view) for view in result.payload) if isinstance(result, Loaded) else b"missed"


# -- 46 ----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.behaviour(46)
def test_clearing_while_something_is_loaded_is_put_off_until_it_has_ended(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    with Tiered(tmp_path, families=families) as bench:
        bench.answer(PROMPT)
        bench.answer(OTHER)
        bench.forget()
        loading = bench.begin_load([*PROMPT, 70])
        assert bench.engine.clear_cache().later
        assert list(bench.disk.entries()) != []
        newcomer = bench.ask([*OTHER, 70])
        bench.run(steps=8)
        bench.expect(newcomer)
        assert cached(newcomer) == 0, "what is to go is not loaded any more"
        bench.loads.open()
        bench.run()
        bench.expect(loading)
        assert cached(loading) == len(PROMPT), "what was under way was not torn"
        assert list(bench.disk.entries()) == []
        assert bench.tier.records == 0
        assert not bench.engine.clear_cache().later
    with Tiered(tmp_path, families=families) as bench:
        assert cached(bench.answer([*PROMPT, 70])) == 0


@kinds
@pytest.mark.behaviour(46)
def test_clearing_with_requests_that_run_leaves_them_alone_and_the_disk_empty(bench: Tiered) -> None:
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
    bench.expect(running, 30)
    assert cached(bench.answer([*OTHER, 70])) == 0


@evicted_kinds
@pytest.mark.behaviour(46)
def test_clearing_takes_what_is_still_on_its_way_down(tmp_path: Path, families: tuple[Family, ...]) -> None:
    with Tiered(tmp_path, families=families, blocks=30) as bench:
        bench.answer(PROMPT)
        bench.stores.close()
        for first in range(4):
            bench.answer([80 + first, *range(80)])
        bench.stores.wait_until_reached()
        opened_by(bench.stores, bench.mover, "drain")
        assert not bench.engine.clear_cache().later
        assert list(bench.disk.entries()) == []
        assert cached(bench.answer([*PROMPT, 70])) == 0
        assert bench.tier.counters.loads == {}


@pytest.mark.behaviour(46)
@pytest.mark.parametrize("end", ["stop", "fault"])
def test_a_clear_that_was_put_off_happens_though_the_engine_stops_or_fails_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    with Tiered(tmp_path) as bench:
        bench.answer(PROMPT)
        bench.forget()
        client = bench.begin_load([*PROMPT, 70])
        assert bench.engine.clear_cache().later
        opened_by(bench.loads, bench.tiering._reader, "drain")
        if end == "fault":
            with monkeypatch.context() as patch:
                patch.setattr(bench.engine.scheduler, "schedule", lambda *_: 1 / 0)
                bench.engine.step()
            assert isinstance(client.events[-1], Failed)
            assert cached(bench.answer([*PROMPT, 70])) == 0
            bench.forget()
            assert cached(bench.answer([*PROMPT, 71])) == len(PROMPT), (
                "and what is stored from then on is loaded"
            )
            bench.engine.clear_cache()
        bench.engine.stop()
    with Tiered(tmp_path) as bench:
        assert cached(bench.answer([*PROMPT, 70])) == 0


def test_who_computed_after_an_overdue_load_is_counted_as_such(stored: Tiered) -> None:
    stored.begin_load([*PROMPT, 70])
    stored.clock.now_s += OVERDUE_LEAST_S + 0.1
    stored.run(steps=10)
    assert stored.tier.counters.choices == {"recompute": 1}


def test_a_salt_without_a_tenant_is_stored_like_any_other(tmp_path: Path) -> None:
    salt = salt_of("", "mine")
    with Tiered(tmp_path) as bench:
        bench.answer(PROMPT, 4, salt=salt)
        bench.forget()
        assert cached(bench.answer([*PROMPT, 90], 4, salt=salt)) == len(PROMPT)


@pytest.mark.behaviour(45)
@pytest.mark.parametrize("families", [(FULL, STATE), (FULL, window(7)), (FULL, window(7), STATE)], ids=str)
def test_a_block_that_is_evicted_in_part_is_stored_whole(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    """A leaf is cut at a checkpoint inside a block: what was deeper must still find the block's end."""
    with Tiered(tmp_path, families=families, blocks=60, block_size=8, chunk_tokens=512) as bench:
        prompt = list(range(80))
        bench.answer(prompt, 1, boundaries=(Boundary(43, CheckpointKind.SYSTEM),))
        bench.answer([*prompt, 3], 1)
        while bench.cache.stats().cached_tokens:
            rows = Rows(bench.cache.pool.free_blocks + 1, (0,) * len(bench.cache.pools.windows))
            bench.cache.tree._evict(rows, None)
            PlanExecutor(bench.runtime, bench.tiering).apply(bench.cache.make_way())
        assert cached(bench.answer([*prompt, 90, 91], 2)) == 80


@pytest.mark.behaviour(41)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_in_a_forward_stores_nothing_of_what_it_left_half_done(tmp_path: Path) -> None:
    with Tiered(tmp_path, families=(FULL, STATE)) as bench:
        forward, calls = bench.runtime.forward, iter(range(1000))

        def dying(batch: Batch) -> Logits:
            logits = forward(batch)
            if next(calls) == 2:
                raise SystemExit
            return logits

        bench.runtime.forward = dying  # type: ignore[method-assign]
        bench.engine.start()
        client = bench.ask(PROMPT)
        wait_for(client.ended)
        assert bench.engine._thread is not None
        join(bench.engine._thread)
        given = client.tokens
    assert given
    with Tiered(tmp_path, families=(FULL, STATE)) as bench:
        bench.answer([*PROMPT, *given, 5, 6], 4)  # compares with what it would be given alone


def test_a_record_that_cannot_be_read_just_now_is_not_asked_for_for_ever(
    stored: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk says nothing against the record, which stays where it is."""
    asked: list[Identity] = []

    def busy(identity: Identity, into: object = None) -> LoadResult:
        asked.append(identity)
        return Miss(MissKind.IO_ERROR, "too many open files")

    monkeypatch.setattr(stored.disk, "load", busy)
    stored.answer([*PROMPT, 70])
    assert len(asked) == len({identity.key for identity in asked})


@pytest.mark.behaviour(44)
def test_who_needs_the_rows_of_a_load_that_was_given_up_waits_for_it_to_end(tmp_path: Path) -> None:
    """The last running request is failed if there is no memory for it, but not if there will be."""
    with Tiered(tmp_path, blocks=12, block_size=8) as bench:
        bench.answer(PROMPT)
        bench.forget()
        loading = bench.begin_load([*PROMPT, 70])
        bench.engine.abort(loading.request.id)
        client = bench.ask(OTHER[:10], 60)
        for _ in range(80):
            bench.engine.step()
        assert not client.events or not isinstance(client.events[-1], Failed), client.events[-1]
        bench.end_loads()
        bench.run()
        bench.expect(client, 60)


@pytest.mark.behaviour(44)
def test_what_was_loaded_below_a_part_that_memory_had_is_found_though_its_request_is_gone(
    tmp_path: Path,
) -> None:
    with Tiered(tmp_path, block_size=8) as bench:
        bench.answer(PROMPT)
        bench.forget()
        bench.answer([*PROMPT[:32], 71])
        loading = bench.begin_load([*PROMPT[:40], 70])  # one block, which is under way
        bench.engine.abort(loading.request.id)
        bench.engine.step()
        bench.end_loads()
        bench.cache.check()
        loads = bench.loads.passed
        assert cached(bench.answer([*PROMPT[:40], 72])) == 40
        assert bench.loads.passed == loads
