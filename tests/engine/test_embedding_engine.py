"""The engine of an embedding model: order, bounds and turns of forwards, and the ends of requests."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig
from rootstock.engine import embedding
from rootstock.engine.device_thread import DeviceThread
from rootstock.engine.embedding import EmbeddingEngine, EmbeddingJob
from rootstock.errors import EmbeddingsFull, EngineStopped, QueueFull, StepFailed
from rootstock.runtime.base import EmbedderDescription
from waiting import HANG_S, join, wait_for, wait_until

CONFIG = EngineConfig(max_batch=4, chunk_tokens=32, max_queue=2, idle_chunk_tokens=64)


def embedding_of(tokens: Tokens) -> list[float]:
    return [float(tokens[0]), float(tokens.sum()), float(len(tokens))]


class FakeEmbedder:
    """An embedder whose embeddings are sums. It records the lengths of each forward's inputs."""

    description = EmbedderDescription("fake", "Fake", 1000, 3, (), 100, ("mean",), "float32", "cpu", 0)

    def __init__(self) -> None:
        self.forwards: list[list[int]] = []
        self.before: Callable[[Sequence[Tokens]], None] = lambda inputs: None

    def tokens_of(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def embed(
        self, inputs: Sequence[Tokens], between_layers: Callable[[float], None] = lambda done: None
    ) -> NDArray[np.float32]:
        self.before(inputs)
        for layer in range(1, 10):
            between_layers(layer / 10)
        self.forwards.append([len(tokens) for tokens in inputs])
        return np.array([embedding_of(tokens) for tokens in inputs], np.float32)


class Decoding:
    """An engine of the device that always decodes. It records its steps."""

    is_blocked = False
    next_overdue_s = None

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.on_step = on_step
        self.decodes = True
        self.has_turn = self.has_requests = True

    def step(self) -> bool:
        self.on_step()
        return True

    def work_idly(self) -> bool:
        return False

    def pause_idle_work(self) -> bool:
        return False

    def detach(self) -> None: ...

    def fail(self) -> None:
        raise AssertionError("it does not fail")


def inputs_of(*lengths: int, first: int = 1) -> list[Tokens]:
    return [
        np.arange(first + 7 * at, first + 7 * at + length, dtype=np.int32)
        for at, length in enumerate(lengths)
    ]


@pytest.fixture
def embedder() -> FakeEmbedder:
    return FakeEmbedder()


@pytest.fixture
def engine(embedder: FakeEmbedder) -> EmbeddingEngine:
    """An engine that the test drives."""
    return EmbeddingEngine(embedder, CONFIG)


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    with DeviceThread() as one:
        yield one


def run(engine: EmbeddingEngine) -> int:
    steps = 0
    while engine.step():
        steps += 1
    return steps


def test_rows_have_the_order_of_the_inputs(engine: EmbeddingEngine) -> None:
    requests = [inputs_of(*lengths) for lengths in ((3, 90, 1, 40, 40, 7), (5,), (100, 2))]
    jobs = [engine.submit(inputs) for inputs in requests]
    run(engine)
    for job, inputs in zip(jobs, requests, strict=True):
        expected = [embedding_of(tokens) for tokens in inputs]
        np.testing.assert_array_equal(job.done.result(0).rows, expected)
        assert 0 <= job.done.result(0).queued_s <= job.done.result(0).total_s


def test_requests_share_forwards(engine: EmbeddingEngine, embedder: FakeEmbedder) -> None:
    for length in (9, 12, 11):
        engine.submit(inputs_of(length))
    run(engine)
    assert embedder.forwards == [[9, 12, 11]]


def test_long_inputs_of_very_different_lengths_do_not_share_a_forward(
    engine: EmbeddingEngine, embedder: FakeEmbedder
) -> None:
    engine.submit(inputs_of(100, 60, 45, 10))
    run(engine)
    assert embedder.forwards == [[100, 60], [45, 10]]


def test_a_small_request_does_not_wait_for_a_large_one(engine: EmbeddingEngine) -> None:
    large = engine.submit(inputs_of(*[100] * 300))
    small = engine.submit(inputs_of(20))
    for _ in range(2):
        engine.step()
    assert small.done.done()
    assert not large.done.done()
    run(engine)
    assert len(large.done.result(0).rows) == 300


def test_a_forward_has_at_most_a_chunk_of_tokens_while_another_model_decodes(
    device: DeviceThread, embedder: FakeEmbedder
) -> None:
    engine = EmbeddingEngine(embedder, CONFIG)
    engine.start(device)
    other = Decoding(lambda: None)
    device.add(other)
    lengths = [90, 33, 31, *[8] * 30, *[3] * 30]
    engine.submit(inputs_of(*lengths)).done.result(HANG_S)
    assert sum(map(len, embedder.forwards)) == len(lengths)
    for forward in embedder.forwards:
        assert len(forward) == 1 or len(forward) * max(forward) <= CONFIG.chunk_tokens
    other.decodes = False
    embedder.forwards.clear()
    engine.submit(inputs_of(*[8] * 30)).done.result(HANG_S)
    assert max(map(len, embedder.forwards)) == 8, "64 tokens: no token of another model waits"
    device.remove(other)
    embedder.forwards.clear()
    engine.submit(inputs_of(*[8] * 30)).done.result(HANG_S)
    assert embedder.forwards == [[8] * 30], "no other model is there"
    engine.stop()


def test_forwards_and_the_steps_of_another_model_alternate(
    device: DeviceThread, embedder: FakeEmbedder
) -> None:
    order: list[str] = []
    threads = set[int]()
    engine = EmbeddingEngine(embedder, CONFIG)

    def note(kind: str) -> None:
        order.append(kind)
        threads.add(threading.get_ident())

    embedder.before = lambda inputs: note("forward")
    engine.start(device)
    device.add(Decoding(lambda: note("step")))
    engine.submit(inputs_of(*[30] * 20)).done.result(HANG_S)
    begin, end = order.index("forward"), len(order) - order[::-1].index("forward")
    assert order[begin:end] == (["forward", "step"] * 20)[:-1]
    assert len(threads) == 1
    engine.stop()


def test_another_model_decodes_in_the_middle_of_a_long_forward(
    device: DeviceThread, embedder: FakeEmbedder
) -> None:
    order: list[str] = []
    engine = EmbeddingEngine(embedder, CONFIG)
    other = Decoding(lambda: order.append("step"))
    embedder.before = lambda inputs: order.append("forward")
    engine.start(device)
    device.add(other)
    engine.submit(inputs_of(96, 20)).done.result(HANG_S)
    first, second = (at for at, kind in enumerate(order) if kind == "forward")
    assert second - first - 1 == 2 + 1, "after each third of 96 tokens, and after the forward"
    device.remove(other)
    other.decodes = False
    device.add(other)
    order.clear()
    engine.submit(inputs_of(96, 20)).done.result(HANG_S)
    first, second = (at for at, kind in enumerate(order) if kind == "forward")
    assert second - first - 1 == 1, "nothing waits for its next token"
    engine.stop()


def test_a_cancelled_request_is_dropped(engine: EmbeddingEngine, embedder: FakeEmbedder) -> None:
    running, waiting = engine.submit(inputs_of(*[100] * 300)), engine.submit(inputs_of(5))
    engine.step()
    assert running.done.cancel()
    assert waiting.done.cancel()
    assert run(engine) == 0
    assert len(embedder.forwards) == 1
    assert not engine.has_requests


def test_a_cancelled_request_keeps_no_memory_and_no_place(engine: EmbeddingEngine) -> None:
    running = engine.submit(inputs_of(*[100] * 300))
    engine.step()
    inputs = inputs_of(5)
    alive = weakref.ref(inputs[0])
    cancelled = engine.submit(inputs)
    del inputs
    waiting = [engine.submit(inputs_of(4)) for _ in range(CONFIG.max_batch + CONFIG.max_queue - 2)]
    with pytest.raises(QueueFull):
        engine.submit(inputs_of(1))
    assert cancelled.done.cancel()
    assert alive() is None, "without a step of the engine"
    assert engine.stats().waiting == len(waiting)
    waiting.append(engine.submit(inputs_of(3)))
    with pytest.raises(QueueFull):
        engine.submit(inputs_of(1))
    assert running.done.cancel()
    waiting.append(engine.submit(inputs_of(2)))
    run(engine)
    assert all(len(job.done.result(0).rows) == 1 for job in waiting)


def test_requests_that_are_cancelled_while_a_forward_is_put_together(embedder: FakeEmbedder) -> None:
    jobs: list[EmbeddingJob] = []

    def clock() -> float:  # it is read when a step begins
        for job in jobs:
            job.done.cancel()
        return 0.0

    engine = EmbeddingEngine(embedder, CONFIG, clock=clock)
    submitted = [engine.submit(inputs_of(5)) for _ in range(3)]
    jobs.extend(submitted)
    assert engine.step()
    assert all(job.done.cancelled() for job in jobs)
    jobs.clear()
    assert run(engine) == 0
    assert not embedder.forwards
    assert engine.health().alive
    last = engine.submit(inputs_of(6))
    run(engine)
    assert len(last.done.result(0).rows) == 1


def test_a_request_that_is_cancelled_during_its_last_forward(
    engine: EmbeddingEngine, embedder: FakeEmbedder
) -> None:
    job, other = engine.submit(inputs_of(5)), engine.submit(inputs_of(4))

    def cancel(inputs: Sequence[Tokens]) -> None:
        assert job.done.cancel()

    embedder.before = cancel
    run(engine)
    assert job.done.cancelled()
    assert len(other.done.result(0).rows) == 1


def test_a_forward_that_fails_fails_its_requests_only(
    engine: EmbeddingEngine, embedder: FakeEmbedder
) -> None:
    inputs = inputs_of(40)
    bad, good = engine.submit(inputs_of(100, 50)), engine.submit(inputs)

    def fault(inputs: Sequence[Tokens]) -> None:
        if len(inputs[0]) == 100:
            raise MemoryError

    embedder.before = fault
    run(engine)
    assert isinstance(bad.done.exception(0), StepFailed)
    np.testing.assert_array_equal(good.done.result(0).rows, [embedding_of(inputs[0])])
    assert engine.stats().failed_steps == 1
    assert (engine.stats().steps, engine.stats().computed_tokens) == (1, 40), "those that did not fail"
    assert engine.health().alive


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_an_embedding_that_is_not_finite_fails_its_request_only(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch, embedder: FakeEmbedder, number: float
) -> None:
    compute = embedder.embed

    def overflowing(inputs: Sequence[Tokens], between_layers: Callable[[float], None]) -> NDArray[np.float32]:
        rows = compute(inputs, between_layers)
        rows[[len(tokens) == 13 for tokens in inputs], 1] = number
        return rows

    monkeypatch.setattr(embedder, "embed", overflowing)
    bad, good, alone = (engine.submit(inputs_of(*lengths)) for lengths in ((12, 13, 11), (12, 11), (13,)))
    run(engine)
    assert max(map(len, embedder.forwards)) >= 5, "they share a forward"
    for job in (bad, alone):
        assert isinstance(job.done.exception(0), StepFailed)
    assert len(good.done.result(0).rows) == 2
    assert engine.stats().failed_steps == 0, "the forward itself did not fail"


def test_the_queue_is_bounded(engine: EmbeddingEngine) -> None:
    jobs = [engine.submit(inputs_of(100)) for _ in range(CONFIG.max_batch + CONFIG.max_queue)]
    with pytest.raises(QueueFull):
        engine.submit(inputs_of(1))
    assert (engine.stats().running, engine.stats().waiting) == (0, len(jobs))
    run(engine)
    assert all(job.done.done() for job in jobs)
    assert engine.stats().computed_tokens == 100 * len(jobs)


@pytest.mark.usefixtures("no_garbage_collector")
def test_the_memory_of_embeddings_is_bounded_until_nothing_holds_them(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "_MOST_BYTES", 10 * 3 * 4)  # of 10 inputs

    def refused(count: int) -> None:
        with pytest.raises(EmbeddingsFull, match="together"):
            engine.submit(inputs_of(*[5] * count))

    first, second = (engine.submit(inputs_of(*[5] * count)) for count in (6, 4))
    refused(1)
    run(engine)
    rows = first.done.result(0).rows
    del first
    refused(1)
    row = rows[0]
    del rows
    refused(1)
    del row
    refused(7)
    third = engine.submit(inputs_of(*[5] * 6))
    refused(1)
    assert third.done.cancel()
    third = engine.submit(inputs_of(*[5] * 6))
    del second
    run(engine)
    assert len(third.done.result(0).rows) == 6
    del third
    alone = engine.submit(inputs_of(*[5] * 20))
    refused(1)
    run(engine)
    assert len(alone.done.result(0).rows) == 20, "a request that is alone may have more"


@pytest.mark.usefixtures("no_garbage_collector")
def test_failed_and_cancelled_requests_hold_no_embeddings(
    engine: EmbeddingEngine, embedder: FakeEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "_MOST_BYTES", 300 * 3 * 4)

    def fault(inputs: Sequence[Tokens]) -> None:
        if embedder.forwards:
            raise MemoryError

    failing = engine.submit(inputs_of(*[100] * 300))
    embedder.before = fault
    run(engine)
    assert isinstance(failing.done.exception(0), StepFailed)
    embedder.before = lambda inputs: None
    cancelled = engine.submit(inputs_of(*[100] * 300))
    engine.step()
    assert cancelled.done.cancel()
    engine.step()
    engine.submit(inputs_of(*[100] * 300))


def test_stop_fails_the_requests_that_are_left(device: DeviceThread, embedder: FakeEmbedder) -> None:
    engine = EmbeddingEngine(embedder, CONFIG)
    reached, goes_on = threading.Event(), threading.Event()

    def hold(inputs: Sequence[Tokens]) -> None:
        reached.set()
        wait_for(goes_on)

    embedder.before = hold
    engine.start(device)
    first = engine.submit(inputs_of(*[100] * 300))
    wait_for(reached)
    second = engine.submit(inputs_of(5))
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    wait_until(lambda: not engine.health().alive)
    with pytest.raises(EngineStopped):
        engine.submit(inputs_of(1))
    goes_on.set()
    join(stopping)
    for job in (first, second):
        assert isinstance(job.done.exception(HANG_S), EngineStopped)
    engine.stop()


def test_an_engine_without_a_device_has_one_of_its_own(embedder: FakeEmbedder) -> None:
    engine = EmbeddingEngine(embedder, CONFIG, context_limit=50)
    assert engine.most_tokens == 50
    engine.start()
    assert len(engine.submit(inputs_of(5, 6)).done.result(HANG_S).rows) == 2
    engine.stop()
    assert engine.health().detail == "stopped"
