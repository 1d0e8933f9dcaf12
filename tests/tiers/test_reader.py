"""Tier reader: jobs run in order, end at their first miss, and report their end exactly once."""

from __future__ import annotations

import gc
import logging
import random
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from rootstock.cache.keys import Identity, RecordKey
from rootstock.tiers.base import Buffer, Loaded, LoadResult, Miss, MissKind, as_bytes
from rootstock.tiers.reader import LoadEnded, LoadTask, TierReader
from tiers.helpers import identity_of, payload_of
from waiting import join, wait_for

PAYLOAD_BYTES = 96
IDENTITIES = [identity_of(seed) for seed in range(12)]


class Shelf:
    """Source of loads: a dictionary of payloads, whose loads a test can hold up."""

    def __init__(self) -> None:
        self.payloads: dict[RecordKey, bytes] = {}
        self.asked: list[RecordKey] = []
        self.announced: list[Identity | None] = []
        self.held: set[RecordKey] = set()  # loading these ends when `go` is set
        self.begun = threading.Event()
        self.go = threading.Event()
        self.raises: set[RecordKey] = set()
        self.now_s = 0.0
        for identity in IDENTITIES:
            self.payloads[identity.key] = content(identity)

    def load(
        self, identity: Identity, into: Sequence[Buffer] | None, then: Identity | None = None
    ) -> LoadResult:
        self.asked.append(identity.key)
        self.announced.append(then)
        self.now_s += 0.25
        if identity.key in self.held:
            self.begun.set()
            wait_for(self.go)
        if identity.key in self.raises:
            raise ZeroDivisionError("a bug")
        payload = self.payloads.get(identity.key)
        if payload is None:
            return Miss(MissKind.ABSENT, "not here")
        assert into is not None
        views = [as_bytes(buffer) for buffer in into]
        for view in views:
            view[:], payload = payload[: view.nbytes], payload[view.nbytes :]
        assert not payload
        return Loaded(tuple(views))


class Told:
    """Callback of a job, which a test can wait for."""

    def __init__(self) -> None:
        self.calls: list[LoadEnded] = []
        self.threads: list[threading.Thread] = []
        self.came = threading.Event()

    def __call__(self, ended: LoadEnded) -> None:
        self.calls.append(ended)
        self.threads.append(threading.current_thread())
        self.came.set()

    def wait(self) -> LoadEnded:
        wait_for(self.came)
        [ended] = self.calls
        return ended


def content(identity: Identity) -> bytes:
    return b"".join(part.tobytes() for part in payload_of(identity, PAYLOAD_BYTES))


def task_of(identity: Identity) -> LoadTask:
    return LoadTask(identity, [np.zeros(32, np.uint8), np.zeros(PAYLOAD_BYTES - 32, np.uint8)])


def tasks_of(identities: Sequence[Identity]) -> list[LoadTask]:
    return [task_of(identity) for identity in identities]


def is_loaded(task: LoadTask) -> bool:
    return b"".join(buffer.tobytes() for buffer in task.into) == content(task.identity)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def reader(shelf: Shelf) -> Iterator[TierReader]:
    reader = TierReader(shelf.load, clock=lambda: shelf.now_s)
    yield reader
    shelf.go.set()
    reader.close()


def test_a_job_fills_the_buffers_and_reports_its_time(shelf: Shelf, reader: TierReader) -> None:
    tasks, told = tasks_of(IDENTITIES[:4]), Told()
    reader.submit(tasks, told)
    assert told.wait() == LoadEnded(4, None, None, 4 * PAYLOAD_BYTES, 1.0, False, 4 * PAYLOAD_BYTES)
    assert all(is_loaded(task) for task in tasks)
    assert told.threads[0] is not threading.current_thread()


def test_the_bytes_from_memory_of_the_host_are_told_apart_from_those_from_the_disk() -> None:
    def load(identity: Identity, _into: Sequence[Buffer] | None, _then: Identity | None) -> Loaded:
        return Loaded((), "disk" if identity == IDENTITIES[1] else "host")

    reader, told = TierReader(load), Told()
    reader.submit(tasks_of(IDENTITIES[:3]), told)
    ended = told.wait()
    reader.close()
    assert (ended.payload_bytes, ended.host_bytes) == (3 * PAYLOAD_BYTES, 2 * PAYLOAD_BYTES)


def test_each_load_names_the_one_after_it(shelf: Shelf, reader: TierReader) -> None:
    for first, end in ((0, 3), (5, 6)):
        told = Told()
        reader.submit(tasks_of(IDENTITIES[first:end]), told)
        told.wait()
    assert shelf.announced == [*IDENTITIES[1:3], None, None]


def test_an_empty_job_ends_too(reader: TierReader) -> None:
    told = Told()
    reader.submit([], told)
    assert told.wait() == LoadEnded(0, None, None, 0, 0.0, cancelled=False)


def test_jobs_and_their_tasks_run_in_order(shelf: Shelf, reader: TierReader) -> None:
    order: list[int] = []
    for number in range(4):
        reader.submit(tasks_of(IDENTITIES[3 * number : 3 * number + 3]), lambda _, n=number: order.append(n))
    reader.drain()
    assert order == [0, 1, 2, 3]
    assert shelf.asked == [identity.key for identity in IDENTITIES]


def test_a_miss_ends_the_job_and_only_this_one(shelf: Shelf, reader: TierReader) -> None:
    del shelf.payloads[IDENTITIES[2].key]
    tasks, missing, next_one = tasks_of(IDENTITIES[:5]), Told(), Told()
    reader.submit(tasks, missing)
    reader.submit(tasks_of(IDENTITIES[5:6]), next_one)
    ended = missing.wait()
    assert (ended.loaded, ended.miss, ended.cancelled) == (2, Miss(MissKind.ABSENT, "not here"), False)
    assert ended.missed == IDENTITIES[2].key
    assert (ended.payload_bytes, ended.seconds) == (2 * PAYLOAD_BYTES, 0.5)
    assert [is_loaded(task) for task in tasks] == [True, True, False, False, False]
    assert next_one.wait().loaded == 1
    assert shelf.asked == [IDENTITIES[number].key for number in (0, 1, 2, 5)]


def test_submitting_does_not_block_and_queueing_time_is_not_counted(shelf: Shelf, reader: TierReader) -> None:
    shelf.held = {IDENTITIES[0].key}
    slow, quick = Told(), Told()
    reader.submit(tasks_of(IDENTITIES[:1]), slow)
    wait_for(shelf.begun)
    reader.submit(tasks_of(IDENTITIES[1:2]), quick)
    shelf.now_s += 100.0
    assert not quick.calls
    shelf.go.set()
    assert slow.wait().seconds == 100.25
    assert quick.wait().seconds == 0.25


@pytest.mark.behaviour(44)
def test_cancelling_skips_all_tasks_after_the_current_one(shelf: Shelf, reader: TierReader) -> None:
    shelf.held = {IDENTITIES[1].key}
    tasks, told = tasks_of(IDENTITIES[:4]), Told()
    job = reader.submit(tasks, told)
    wait_for(shelf.begun)
    job.cancel()
    job.cancel()
    assert not told.calls, "the reader still writes to a buffer"
    shelf.go.set()
    assert told.wait() == LoadEnded(2, None, None, 2 * PAYLOAD_BYTES, 0.5, True, 2 * PAYLOAD_BYTES)
    assert [is_loaded(task) for task in tasks] == [True, True, False, False]
    assert len(shelf.asked) == 2


def test_a_cancelled_job_ends_before_running_ones(shelf: Shelf, reader: TierReader) -> None:
    """The buffers of a cancelled job are returned as soon as the thread is free, before its turn."""
    shelf.held = {IDENTITIES[0].key}
    order: list[str] = []
    reader.submit(tasks_of(IDENTITIES[:3]), lambda _: order.append("first"))
    wait_for(shelf.begun)
    told = Told()

    def second(ended: LoadEnded) -> None:
        order.append("second")
        told(ended)

    reader.submit(tasks_of(IDENTITIES[3:6]), second).cancel()
    shelf.go.set()
    reader.drain()
    assert told.wait() == LoadEnded(0, None, None, 0, 0.0, cancelled=True)
    assert order == ["second", "first"]
    assert len(shelf.asked) == 3


def test_cancelling_during_the_last_task_skips_nothing(shelf: Shelf, reader: TierReader) -> None:
    shelf.held = {IDENTITIES[1].key}
    told = Told()
    job = reader.submit(tasks_of(IDENTITIES[:2]), told)
    wait_for(shelf.begun)
    job.cancel()
    shelf.go.set()
    ended = told.wait()
    assert (ended.loaded, ended.cancelled) == (2, False)


def test_cancelling_an_ended_job_has_no_effect(reader: TierReader) -> None:
    told = Told()
    job = reader.submit(tasks_of(IDENTITIES[:2]), told)
    reader.drain()
    job.cancel()
    reader.drain()
    assert told.wait().loaded == 2


def test_waiting_bytes_are_those_not_loaded_yet(shelf: Shelf, reader: TierReader) -> None:
    assert reader.waiting_bytes == 0
    shelf.held = {IDENTITIES[1].key}
    reader.submit(tasks_of(IDENTITIES[:3]), Told())
    wait_for(shelf.begun)
    job = reader.submit(tasks_of(IDENTITIES[3:7]), Told())
    assert reader.waiting_bytes == (2 + 4) * PAYLOAD_BYTES
    job.cancel()
    assert reader.waiting_bytes == 2 * PAYLOAD_BYTES
    shelf.go.set()
    reader.drain()
    assert reader.waiting_bytes == 0


def test_a_bug_in_a_load_is_a_miss_and_the_thread_continues(
    shelf: Shelf, reader: TierReader, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.raises = {IDENTITIES[1].key}
    broken, next_one = Told(), Told()
    with caplog.at_level(logging.ERROR):
        reader.submit(tasks_of(IDENTITIES[:3]), broken)
        reader.submit(tasks_of(IDENTITIES[3:4]), next_one)
        assert next_one.wait().loaded == 1
    ended = broken.wait()
    assert (ended.loaded, ended.miss, ended.missed) == (
        1,
        Miss(MissKind.IO_ERROR, "a bug"),
        IDENTITIES[1].key,
    )
    assert "Loading failed" in caplog.text


def test_a_bug_in_a_callback_is_logged_and_the_thread_continues(
    reader: TierReader, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: LoadEnded) -> None:
        raise ZeroDivisionError("a bug")

    told = Told()
    with caplog.at_level(logging.ERROR):
        reader.submit(tasks_of(IDENTITIES[:1]), fails)
        reader.submit(tasks_of(IDENTITIES[1:2]), told)
        assert told.wait().loaded == 1
    assert "The callback of a load failed" in caplog.text


def test_a_callback_may_submit_another_job(reader: TierReader) -> None:
    told = Told()

    def goes_on(_: LoadEnded) -> None:
        reader.submit(tasks_of(IDENTITIES[1:3]), told)

    reader.submit(tasks_of(IDENTITIES[:1]), goes_on)
    reader.drain()
    assert told.wait().loaded == 2


@pytest.mark.behaviour(44)
def test_closing_ends_every_job_after_the_current_task(shelf: Shelf, reader: TierReader) -> None:
    shelf.held = {IDENTITIES[0].key}
    under_way, queued = Told(), Told()
    reader.submit(tasks_of(IDENTITIES[:3]), under_way)
    reader.submit(tasks_of(IDENTITIES[3:6]), queued)
    wait_for(shelf.begun)
    closers = [threading.Thread(target=reader.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    assert not under_way.calls
    assert not queued.calls
    late = Told()
    while not late.calls:  # until one of them has come to close it, the job joins the line
        late = Told()
        reader.submit([], late)
    shelf.go.set()
    join(*closers)
    assert (under_way.wait().loaded, under_way.wait().cancelled) == (1, True)
    assert (queued.wait().loaded, queued.wait().cancelled) == (0, True)
    assert len(shelf.asked) == 1
    assert reader.waiting_bytes == 0
    reader.close()
    reader.drain()


def test_after_the_close_a_job_is_refused_at_once(shelf: Shelf, reader: TierReader) -> None:
    reader.close()
    told = Told()
    job = reader.submit(tasks_of(IDENTITIES[:2]), told)
    [ended] = told.calls
    assert (ended.loaded, ended.missed, ended.cancelled) == (0, IDENTITIES[0].key, False)
    assert ended.miss is not None
    assert ended.miss.kind is MissKind.UNAVAILABLE
    assert not shelf.asked
    job.cancel()
    empty = Told()
    reader.submit([], empty)
    assert empty.wait().missed is None


def test_an_ended_jobs_buffers_are_not_kept_alive(reader: TierReader) -> None:
    task = task_of(IDENTITIES[0])
    kept = weakref.ref(task.into[0])
    told = Told()
    job = reader.submit([task], told)
    del task
    reader.drain()
    again = Told()
    reader.submit([], again)  # when this one has been told, the thread has let go of the first
    again.wait()
    gc.collect()
    assert kept() is None
    assert not job.cancelled


def test_two_thousand_jobs_each_end_once() -> None:
    rng = random.Random(4)
    shelf = Shelf()
    for identity in rng.sample(IDENTITIES, 3):
        del shelf.payloads[identity.key]
    reader = TierReader(shelf.load)
    submitted: list[tuple[list[LoadTask], Told, bool]] = []
    lock = threading.Lock()

    def submit_many(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(500):
            tasks, told = tasks_of(own.choices(IDENTITIES, k=own.randrange(6))), Told()
            job, cancels = reader.submit(tasks, told), own.random() < 0.1
            if cancels:
                job.cancel()
            with lock:
                submitted.append((tasks, told, cancels))
            assert reader.waiting_bytes >= 0

    threads = [threading.Thread(target=submit_many, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    join(*threads)
    reader.drain()
    assert reader.waiting_bytes == 0
    reader.close()
    assert len(submitted) == 2000
    for tasks, told, cancels in submitted:
        ended = told.wait()
        there = [task.identity.key in shelf.payloads for task in tasks]
        until = there.index(False) if False in there else len(there)
        assert all(is_loaded(task) for task in tasks[: ended.loaded])
        assert ended.payload_bytes == ended.loaded * PAYLOAD_BYTES
        if ended.cancelled:
            assert cancels
            assert ended.loaded < len(tasks)
            assert ended.miss is None
        else:
            assert ended.loaded == until
            assert (ended.miss is None) == (until == len(tasks))
            assert ended.missed == (None if ended.miss is None else tasks[until].identity.key)
