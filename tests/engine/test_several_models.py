"""Engines of several models on one thread and one budget: answers are never mixed, and none waits for ever."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from engine.helpers import Client, alone, numbers
from rootstock.cache import KVCache
from rootstock.cache.families import Family, row_bytes
from rootstock.cache.retention.pins import Pinned
from rootstock.cache.shared_budget import SharedBudget
from rootstock.config import EngineConfig
from rootstock.engine.device_thread import DeviceThread
from rootstock.engine.engine import Engine
from rootstock.engine.idle.prefills import IdleEnd, IdleKind, IdlePrefill
from rootstock.engine.request import Aborted, Event, Failed, Finished
from rootstock.errors import EngineStopped
from rootstock.runtime.base import Batch
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from waiting import HANG_S, wait_for, wait_until

SIZE = 4
BLOCK_BYTES = row_bytes(FULL, SIZE)
KINDS: list[tuple[Family, ...]] = [(FULL,), (FULL, STATE), (FULL, window(9))]


class Model:
    """One model of the device. `seen` has the budget's bytes at each of its forwards."""

    def __init__(
        self,
        budget: SharedBudget,
        families: Sequence[Family] = (FULL,),
        fault: Callable[[Batch], None] = lambda batch: None,
        vocab_size: int = 97,
        **config: int,
    ) -> None:
        self.seen: list[tuple[int, int]] = []

        def record(batch: Batch) -> None:
            self.seen.append((budget.owned_bytes, budget.backed_bytes))
            fault(batch)

        self.runtime = FakeRuntime(vocab_size, families=families, fault=record)
        ticks = itertools.count()
        self.cache = KVCache(
            families, budget.budget_bytes, SIZE, clock=lambda: next(ticks) * 1e-3, share=budget.join()
        )
        self.runtime.allocate(self.cache.rows, SIZE)
        self.engine = Engine(self.runtime, self.cache, EngineConfig(**config))  # type: ignore[arg-type]

    def ask(self, tokens: Sequence[int], max_tokens: int = 4) -> Client:
        client = Client(tokens, max_tokens)

        def sink(event: Event) -> None:
            client.events.append(event)
            if isinstance(event, Finished | Failed | Aborted):
                client.ended.set()

        self.engine.submit(client.request, sink)
        return client

    def expect(self, client: Client) -> None:
        wait_for(client.ended)
        max_tokens = client.request.stop.max_tokens
        assert max_tokens is not None
        assert client.finished.reason == "length"
        assert client.tokens == alone(self.runtime, client.request.tokens, max_tokens)


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    with DeviceThread() as thread:
        yield thread


def test_answers_of_models_that_share_a_tiny_budget_are_never_mixed(device: DeviceThread) -> None:
    """Same prompts, different models: wrong sharing, or rows lost to another model, would change an answer."""
    budget = SharedBudget(60 * BLOCK_BYTES)
    models = [Model(budget, families, max_batch=4, chunk_tokens=32) for families in KINDS]
    for model in models:
        model.engine.start(device)
    random = np.random.default_rng(0)
    asked: list[tuple[Model, Client]] = []
    for _ in range(90):
        model = models[random.integers(len(models))]
        tokens = numbers(int(random.integers(5)), int(random.integers(1, 80)))
        asked.append((model, model.ask(tokens, int(random.integers(1, 12)))))
        if len(asked) % 30 == 0:
            for one, client in asked[-30:]:
                one.expect(client)
    assert budget.moved_bytes > 0
    for model in models:
        assert max(owned for owned, _ in model.seen) <= budget.budget_bytes
        assert max(backed for _, backed in model.seen) <= budget.budget_bytes
        model.engine.call(model.cache.check)
        assert model.engine.stats().cache.leases == 0
    for model in models:
        model.engine.stop()


def test_requests_wait_for_memory_of_another_model_and_then_finish(device: DeviceThread) -> None:
    """Each answer grows until both models together need twice the budget: one gives way, and none fails."""
    budget = SharedBudget(24 * BLOCK_BYTES)
    first, second = Model(budget), Model(budget, vocab_size=89)
    first.engine.start(device)
    second.engine.start(device)
    clients = [(model, model.ask(numbers(i, 8, 80), 60)) for i in range(3) for model in (first, second)]
    for model, client in clients:
        model.expect(client)
    for model in (first, second):
        model.engine.call(model.cache.check)
        model.engine.stop()


def test_idle_work_of_one_model_makes_way_for_a_request_of_another(device: DeviceThread) -> None:
    """The rows of an idle prefill, and the rest of it, are given up as soon as the other model needs memory."""
    budget = SharedBudget(60 * BLOCK_BYTES)
    order: list[str] = []
    asked: list[Client] = []

    def idly(batch: Batch) -> None:
        order.append("idle")
        if len(order) == 2:
            asked.append(urgent.ask(numbers(1, 200, 80), 4))

    idle = Model(budget, fault=idly, idle_work=True)
    urgent = Model(budget, vocab_size=89, fault=lambda batch: order.append("request"))
    ended: queue.SimpleQueue[IdleEnd] = queue.SimpleQueue()
    for engine in (idle.engine, urgent.engine):
        engine.start(device)
    for seed in (2, 3):
        tokens = np.array(numbers(seed, 160), np.int32)
        idle.engine.prefill_in_idle_time(IdlePrefill(IdleKind.WARM, tokens, "", None, ended=ended.put))
    assert {ended.get(timeout=HANG_S) for _ in range(2)}
    (client,) = asked
    urgent.expect(client)
    assert order[2] == "request", "idle work went on while a request waited for memory"
    for model in (idle, urgent):
        model.engine.call(model.cache.check)
        model.engine.stop()


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(200, 4), (20, 190)])
def test_pins_of_one_model_never_stop_a_request_of_another(
    device: DeviceThread, prompt_tokens: int, max_tokens: int
) -> None:
    """It may have all of the budget when it is alone: at its admission, and while its answer grows."""
    budget = SharedBudget(60 * BLOCK_BYTES)
    pinning, asking = Model(budget), Model(budget, vocab_size=89)
    for model in (pinning, asking):
        model.engine.start(device)
    prompt = np.array(numbers(1, 56), np.int32)
    pinning.expect(pinning.ask(prompt.tolist(), 1))
    assert isinstance(pinning.engine.pin(prompt), Pinned)
    asking.expect(asking.ask(numbers(2, prompt_tokens, 80), max_tokens))
    assert pinning.engine.pins() == []
    assert pinning.engine.stats().cache.dropped_pins == 1
    for model in (pinning, asking):
        model.engine.call(model.cache.check)
        model.engine.stop()


def test_a_long_prompt_of_one_model_leaves_turns_to_the_decodes_of_another(device: DeviceThread) -> None:
    """Between two forwards of the long prompt, the other model decodes: a token per step of each."""
    budget = SharedBudget(2_000 * BLOCK_BYTES)
    order: list[str] = []
    begun = threading.Event()

    def decoding(batch: Batch) -> None:
        order.append("decode")
        begun.set()
        if len(order) < 4:
            time.sleep(0.001)

    def prefilling(batch: Batch) -> None:
        order.append(f"prefill {batch.new_tokens}")

    chatty = Model(budget, fault=decoding, chunk_tokens=16)
    bulky = Model(budget, fault=prefilling, chunk_tokens=16, idle_chunk_tokens=64)
    bulky.engine.start(device)
    chatty.engine.start(device)
    answer = chatty.ask(numbers(1, 4), 400)
    wait_for(begun)
    long = bulky.ask(numbers(2, 640), 1)
    bulky.expect(long)
    chatty.expect(answer)
    first = next(i for i, step in enumerate(order) if step.startswith("prefill"))
    last = max(i for i, step in enumerate(order) if step.startswith("prefill"))
    during = order[first:last]
    assert all("decode" in pair for pair in itertools.pairwise(during)), during
    assert "prefill 64" not in during, "chunks are short while another model decodes"
    chatty.engine.stop()
    bulky.engine.stop()


def test_an_engine_that_stops_gives_its_memory_back_and_others_go_on(device: DeviceThread) -> None:
    budget = SharedBudget(40 * BLOCK_BYTES)
    first, second = Model(budget), Model(budget, vocab_size=89)
    first.engine.start(device)
    second.engine.start(device)
    first.expect(first.ask(numbers(1, 100), 4))
    first.engine.stop()
    first.engine.stop()
    with pytest.raises(EngineStopped):
        first.ask(numbers(1, 3))
    assert first.engine.budget_share is not None
    budget.leave(first.engine.budget_share)
    device.wake()
    second.expect(second.ask(numbers(1, 140, 80), 4))
    assert second.engine.health().alive
    second.engine.stop()


def test_an_engine_that_fails_beyond_recovery_ends_alone(
    device: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = SharedBudget(40 * BLOCK_BYTES)
    broken, sound = Model(budget), Model(budget, vocab_size=89)
    broken.engine.start(device)
    sound.engine.start(device)

    def breaks(*_: object) -> None:
        raise RuntimeError("beyond recovery")

    monkeypatch.setattr(broken.engine.steps, "run", breaks)
    monkeypatch.setattr(broken.engine.steps, "restart", breaks)
    client = broken.ask(numbers(1, 5))
    wait_for(client.ended)
    assert isinstance(client.error, EngineStopped)
    wait_until(lambda: not broken.engine.health().alive)
    sound.expect(sound.ask(numbers(1, 5, 80)))
    sound.engine.stop()


def test_the_thread_of_a_device_ends(device: DeviceThread) -> None:
    device.stop()
    device.thread.join(HANG_S)
    assert not device.thread.is_alive()
