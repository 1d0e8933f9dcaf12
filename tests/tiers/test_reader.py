"""The loader: in order, up to the first miss, and whoever submitted is told once, whatever happens."""

from __future__ import annotations

import gc
import logging
import random
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from rootstock.cache.record_identity import Identity, RecordKey
from rootstock.tiers.base import Buffer, Loaded, LoadResult, Miss, MissKind, as_bytes
from rootstock.tiers.reader import LoadEnded, LoadTask, TierReader
from tiers.helpers import identity_of, payload_of
from waiting import join, wait_for

PAYLOAD_BYTES = 96
IDENTITIES = [identity_of(seed) for seed in range(12)]


class Shelf:
    """A dictionary of payloads, which takes as long as it is told to."""

    def __init__(self) -> None:
        self.payloads: dict[RecordKey, bytes] = {}
        self.asked: list[RecordKey] = []
        self.held: set[RecordKey] = set()  # loading these ends when `go` is set
        self.begun = threading.Event()
        self.go = threading.Event()
        self.raises: set[RecordKey] = set()
        self.now_s = 0.0
        for identity in IDENTITIES:
            self.payloads[identity.key] = content(identity)

    def load(self, identity: Identity, into: Sequence[Buffer] | None) -> LoadResult:
        self.asked.append(identity.key)
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
    """Waits for the end of a job."""

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
def loader(shelf: Shelf) -> Iterator[TierReader]:
    loader = TierReader(shelf.load, clock=lambda: shelf.now_s)
    yield loader
    shelf.go.set()
    loader.close()


def test_a_job_fills_the_buffers_and_says_what_it_took(shelf: Shelf, loader: TierReader) -> None:
    tasks, told = tasks_of(IDENTITIES[:4]), Told()
    loader.submit(tasks, told)
    assert told.wait() == LoadEnded(4, None, None, 4 * PAYLOAD_BYTES, 1.0, cancelled=False)
    assert all(is_loaded(task) for task in tasks)
    assert told.threads[0] is not threading.current_thread()


def test_an_empty_job_ends_too(loader: TierReader) -> None:
    told = Told()
    loader.submit([], told)
    assert told.wait() == LoadEnded(0, None, None, 0, 0.0, cancelled=False)


def test_jobs_and_their_tasks_run_in_order(shelf: Shelf, loader: TierReader) -> None:
    order: list[int] = []
    for number in range(4):
        loader.submit(tasks_of(IDENTITIES[3 * number : 3 * number + 3]), lambda _, n=number: order.append(n))
    loader.drain()
    assert order == [0, 1, 2, 3]
    assert shelf.asked == [identity.key for identity in IDENTITIES]


def test_a_miss_ends_the_job_and_only_this_one(shelf: Shelf, loader: TierReader) -> None:
    del shelf.payloads[IDENTITIES[2].key]
    tasks, missing, next_one = tasks_of(IDENTITIES[:5]), Told(), Told()
    loader.submit(tasks, missing)
    loader.submit(tasks_of(IDENTITIES[5:6]), next_one)
    ended = missing.wait()
    assert (ended.loaded, ended.miss, ended.cancelled) == (2, Miss(MissKind.ABSENT, "not here"), False)
    assert ended.missed == IDENTITIES[2].key
    assert (ended.payload_bytes, ended.seconds) == (2 * PAYLOAD_BYTES, 0.5)
    assert [is_loaded(task) for task in tasks] == [True, True, False, False, False]
    assert next_one.wait().loaded == 1
    assert shelf.asked == [IDENTITIES[number].key for number in (0, 1, 2, 5)]


def test_submitting_waits_for_nothing_and_the_wait_in_line_is_not_counted(
    shelf: Shelf, loader: TierReader
) -> None:
    shelf.held = {IDENTITIES[0].key}
    slow, quick = Told(), Told()
    loader.submit(tasks_of(IDENTITIES[:1]), slow)
    wait_for(shelf.begun)
    loader.submit(tasks_of(IDENTITIES[1:2]), quick)
    shelf.now_s += 100.0
    assert not quick.calls
    shelf.go.set()
    assert slow.wait().seconds == 100.25
    assert quick.wait().seconds == 0.25


@pytest.mark.behaviour(44)
def test_cancelling_waits_for_the_task_under_way_and_skips_the_rest(shelf: Shelf, loader: TierReader) -> None:
    shelf.held = {IDENTITIES[1].key}
    tasks, told = tasks_of(IDENTITIES[:4]), Told()
    job = loader.submit(tasks, told)
    wait_for(shelf.begun)
    job.cancel()
    job.cancel()
    assert not told.calls, "the loader still writes into a buffer"
    shelf.go.set()
    assert told.wait() == LoadEnded(2, None, None, 2 * PAYLOAD_BYTES, 0.5, cancelled=True)
    assert [is_loaded(task) for task in tasks] == [True, True, False, False]
    assert len(shelf.asked) == 2


def test_a_cancelled_job_in_line_ends_before_those_that_go_on(shelf: Shelf, loader: TierReader) -> None:
    """Its buffers are given back as soon as the thread is free, not when its turn would have come."""
    shelf.held = {IDENTITIES[0].key}
    order: list[str] = []
    loader.submit(tasks_of(IDENTITIES[:3]), lambda _: order.append("first"))
    wait_for(shelf.begun)
    told = Told()

    def second(ended: LoadEnded) -> None:
        order.append("second")
        told(ended)

    loader.submit(tasks_of(IDENTITIES[3:6]), second).cancel()
    shelf.go.set()
    loader.drain()
    assert told.wait() == LoadEnded(0, None, None, 0, 0.0, cancelled=True)
    assert order == ["second", "first"]
    assert len(shelf.asked) == 3


def test_cancelling_during_the_last_task_skips_nothing(shelf: Shelf, loader: TierReader) -> None:
    shelf.held = {IDENTITIES[1].key}
    told = Told()
    job = loader.submit(tasks_of(IDENTITIES[:2]), told)
    wait_for(shelf.begun)
    job.cancel()
    shelf.go.set()
    ended = told.wait()
    assert (ended.loaded, ended.cancelled) == (2, False)


def test_cancelling_what_has_ended_changes_nothing(loader: TierReader) -> None:
    told = Told()
    job = loader.submit(tasks_of(IDENTITIES[:2]), told)
    loader.drain()
    job.cancel()
    loader.drain()
    assert told.wait().loaded == 2


def test_what_waits_is_what_is_not_loaded_yet(shelf: Shelf, loader: TierReader) -> None:
    assert loader.waiting_bytes == 0
    shelf.held = {IDENTITIES[1].key}
    loader.submit(tasks_of(IDENTITIES[:3]), Told())
    wait_for(shelf.begun)
    job = loader.submit(tasks_of(IDENTITIES[3:7]), Told())
    assert loader.waiting_bytes == (2 + 4) * PAYLOAD_BYTES
    job.cancel()
    assert loader.waiting_bytes == 2 * PAYLOAD_BYTES
    shelf.go.set()
    loader.drain()
    assert loader.waiting_bytes == 0


def test_a_bug_in_loading_is_a_miss_and_the_thread_goes_on(
    shelf: Shelf, loader: TierReader, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.raises = {IDENTITIES[1].key}
    broken, next_one = Told(), Told()
    with caplog.at_level(logging.ERROR):
        loader.submit(tasks_of(IDENTITIES[:3]), broken)
        loader.submit(tasks_of(IDENTITIES[3:4]), next_one)
        assert next_one.wait().loaded == 1
    ended = broken.wait()
    assert (ended.loaded, ended.miss, ended.missed) == (
        1,
        Miss(MissKind.IO_ERROR, "a bug"),
        IDENTITIES[1].key,
    )
    assert "Loading failed" in caplog.text


def test_a_bug_of_whoever_waits_is_logged_and_the_thread_goes_on(
    loader: TierReader, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: LoadEnded) -> None:
        raise ZeroDivisionError("a bug")

    told = Told()
    with caplog.at_level(logging.ERROR):
        loader.submit(tasks_of(IDENTITIES[:1]), fails)
        loader.submit(tasks_of(IDENTITIES[1:2]), told)
        assert told.wait().loaded == 1
    assert "The callback of a load failed" in caplog.text


def test_whoever_is_told_may_submit_more(loader: TierReader) -> None:
    told = Told()

    def goes_on(_: LoadEnded) -> None:
        loader.submit(tasks_of(IDENTITIES[1:3]), told)

    loader.submit(tasks_of(IDENTITIES[:1]), goes_on)
    loader.drain()
    assert told.wait().loaded == 2


@pytest.mark.behaviour(44)
def test_closing_while_loading_ends_every_job_after_the_task_under_way(
    shelf: Shelf, loader: TierReader
) -> None:
    shelf.held = {IDENTITIES[0].key}
    under_way, queued = Told(), Told()
    loader.submit(tasks_of(IDENTITIES[:3]), under_way)
    loader.submit(tasks_of(IDENTITIES[3:6]), queued)
    wait_for(shelf.begun)
    closers = [threading.Thread(target=loader.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    assert not under_way.calls
    assert not queued.calls
    late = Told()
    while not late.calls:  # until one of them has come to close it, the job joins the line
        late = Told()
        loader.submit([], late)
    shelf.go.set()
    join(*closers)
    assert (under_way.wait().loaded, under_way.wait().cancelled) == (1, True)
    assert (queued.wait().loaded, queued.wait().cancelled) == (0, True)
    assert len(shelf.asked) == 1
    assert loader.waiting_bytes == 0
    loader.close()
    loader.drain()


def test_after_the_close_a_job_is_refused_at_once(shelf: Shelf, loader: TierReader) -> None:
    loader.close()
    told = Told()
    job = loader.submit(tasks_of(IDENTITIES[:2]), told)
    [ended] = told.calls
    assert (ended.loaded, ended.missed, ended.cancelled) == (0, IDENTITIES[0].key, False)
    assert ended.miss is not None
    assert ended.miss.kind is MissKind.UNAVAILABLE
    assert not shelf.asked
    job.cancel()
    empty = Told()
    loader.submit([], empty)
    assert empty.wait().missed is None


def test_nothing_of_an_ended_job_is_kept(loader: TierReader) -> None:
    task = task_of(IDENTITIES[0])
    kept = weakref.ref(task.into[0])
    told = Told()
    job = loader.submit([task], told)
    del task
    loader.drain()
    again = Told()
    loader.submit([], again)  # when this one has been told, the thread has let go of the first
    again.wait()
    gc.collect()
    assert kept() is None
    assert not job.cancelled


def test_two_thousand_jobs_end_once_each_with_what_is_there() -> None:
    rng = random.Random(4)
    shelf = Shelf()
    for identity in rng.sample(IDENTITIES, 3):
        del shelf.payloads[identity.key]
    loader = TierReader(shelf.load)
    submitted: list[tuple[list[LoadTask], Told, bool]] = []
    lock = threading.Lock()

    def submit_many(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(500):
            tasks, told = tasks_of(own.choices(IDENTITIES, k=own.randrange(6))), Told()
            job, cancels = loader.submit(tasks, told), own.random() < 0.1
            if cancels:
                job.cancel()
            with lock:
                submitted.append((tasks, told, cancels))
            assert loader.waiting_bytes >= 0

    threads = [threading.Thread(target=submit_many, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    join(*threads)
    loader.drain()
    assert loader.waiting_bytes == 0
    loader.close()
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
