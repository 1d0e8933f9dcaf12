"""Every request ends exactly once, and no failure of one stops another."""

from __future__ import annotations

import queue
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from engine.helpers import Bench, Client, numbers
from rootstock.cache.plan import Plan
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Aborted, Finished, PromptScored, RequestId, StopParams, TokenEvent
from rootstock.errors import EmptyPrompt, EngineFault, EngineStopped, InvalidParameter, PoolsLost, StepFailed
from rootstock.runtime.base import Batch, ExecutionMode, Logits
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime
from waiting import HANG_S, join, wait_for, wait_until


def breaks(*_: object) -> None:
    raise AssertionError("an invariant does not hold")


@pytest.mark.behaviour(47)
def test_a_failed_forward_fails_only_the_requests_of_its_step() -> None:
    def fault(batch: Batch) -> None:
        if any(99 in s.tokens for s in batch.segments):
            raise RuntimeError("a kernel broke")

    bench = Bench(vocab_size=100, fault=fault, max_batch=4, chunk_tokens=512)
    before = bench.answer(numbers(1, 20), max_tokens=1)
    poisoned, mate = bench.ask([1, 2, 99]), bench.ask(numbers(2, 20))
    bench.run()
    after = bench.answer(numbers(3, 20))
    assert isinstance(before.events[-1], Finished)
    for client in (poisoned, mate):
        assert isinstance(client.error, StepFailed)
        assert "a kernel broke" in str(client.error.cause)
        assert "a kernel broke" not in client.error.message, "it may tell of other requests in the same step"
    bench.expect(after)
    assert bench.cache.pool.live_blocks == 0


@pytest.mark.behaviour(47)
def test_a_forward_that_loses_the_pools_fails_every_open_request_once_and_empties_the_cache() -> None:
    def fault(batch: Batch) -> None:
        if any(99 in s.tokens for s in batch.segments):
            raise PoolsLost(MemoryError("the device is full"))

    bench = Bench(vocab_size=100, fault=fault, max_batch=1)
    before = bench.answer(numbers(1, 20), max_tokens=1)
    poisoned, waiting = bench.ask([1, 2, 99]), bench.ask(numbers(2, 20))
    bench.run()
    assert isinstance(before.events[-1], Finished)
    for client in (poisoned, waiting):
        assert isinstance(client.error, PoolsLost)
        assert "MemoryError" in client.error.message
        assert "the device is full" not in client.error.message
        assert len(client.events) == 1
    assert bench.engine.explain(before.request.tokens).matched_tokens == 0
    assert bench.engine.steps.counters.failed_steps == 1
    assert bench.cache.pool.free_blocks == 200
    bench.expect(bench.answer(numbers(3, 20)))


def test_a_failed_forward_leaves_nothing_in_the_cache() -> None:
    def fault(batch: Batch) -> None:
        raise RuntimeError("always")

    bench = Bench(fault=fault)
    client = bench.answer(numbers(1, 20))
    assert client.error
    assert bench.engine.explain(client.request.tokens).matched_tokens == 0
    assert bench.cache.pool.free_blocks == 200


@pytest.mark.behaviour(47)
def test_a_bug_between_forwards_fails_open_requests_and_empties_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.answer(numbers(1, 20))
    broken = [bench.ask(numbers(2, 20)), bench.ask(numbers(3, 20))]
    with monkeypatch.context() as patched:
        patched.setattr(bench.cache, "admit", breaks)
        bench.engine.step()
    assert all(client.error for client in broken)
    assert bench.cache.pool.free_blocks == 200, "a cache that may be wrong is not kept"
    after = bench.answer(numbers(1, 20))
    bench.expect(after)
    assert after.cached_tokens == 0


def test_a_sink_that_raises_stops_no_other_request() -> None:
    bench = Bench()
    bench.engine.submit(Client(numbers(1, 10)).request, breaks)
    good = bench.answer(numbers(2, 10))
    bench.expect(good)
    assert bench.cache.pool.live_blocks == 0


def test_a_row_of_nan_fails_its_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    sick, well = bench.ask(numbers(1, 10)), bench.ask(numbers(2, 10))
    forward = bench.runtime.forward

    def poisoned(batch: Batch) -> object:
        logits = forward(batch)
        if len(logits) == 2:
            logits[0] = np.nan
        return logits

    monkeypatch.setattr(bench.runtime, "forward", poisoned)
    bench.run()
    assert sick.error
    bench.expect(well)


@pytest.mark.behaviour(28, 49)
@pytest.mark.parametrize("after_steps", range(8))
def test_an_abort_after_any_step_keeps_the_computed_tokens_and_leaks_nothing(after_steps: int) -> None:
    bench = Bench(chunk_tokens=8)
    client, other = bench.ask(numbers(1, 30), max_tokens=30), bench.ask(numbers(2, 12), max_tokens=6)
    bench.run(steps=after_steps)
    bench.engine.abort(client.request.id)
    bench.engine.abort(client.request.id)
    bench.run()
    assert client.is_aborted
    bench.expect(other)
    assert bench.cache.pool.live_blocks == 0
    found = bench.engine.explain(client.request.tokens).matched_tokens
    assert found == min(29, 8 * after_steps)


def test_aborting_an_ended_or_unknown_request_does_nothing() -> None:
    bench = Bench()
    client = bench.answer(numbers(1, 10))
    bench.engine.abort(client.request.id)
    bench.engine.abort(RequestId("unknown"))
    bench.engine.step()
    assert len(client.terminals) == 1


@pytest.mark.behaviour(49)
def test_a_token_limit_ends_with_length() -> None:
    bench = Bench()
    client = bench.answer(numbers(1, 10), max_tokens=3)
    assert client.finished.reason == "length"
    assert client.finished.usage.completion_tokens == 3


@pytest.mark.behaviour(49)
def test_stop_tokens_and_end_of_sequence_end_an_answer_before_themselves() -> None:
    bench = Bench()
    alone = bench.alone(numbers(1, 10), 8)
    for stop in (StopParams(stop_tokens=(alone[3],)), StopParams(max_tokens=20, stop_tokens=(alone[3], 200))):
        client = bench.answer(numbers(1, 10), stop=stop)
        assert client.tokens == alone[: alone.index(alone[3])]
        assert (client.finished.reason, client.finished.stopped_by) == ("stop", alone[3])
    other = Bench(eos_token_ids=(alone[3],))
    client = other.ask(numbers(1, 10), max_tokens=8)
    ignoring = other.answer(numbers(1, 10), stop=StopParams(max_tokens=8, ignore_eos=True))
    assert client.tokens == alone[: alone.index(alone[3])]
    assert ignoring.tokens == alone


def test_the_tokenizers_end_of_sequence_ends_an_answer_too() -> None:
    tokenizer = ByteTokenizer()
    bench = Bench(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    seed = next(s for s in range(5000) if tokenizer.END in bench.alone(numbers(s, 6), 4))
    client = bench.answer(numbers(seed, 6), max_tokens=4)
    assert client.finished.stopped_by == tokenizer.END


@pytest.mark.behaviour(49)
def test_stop_strings_end_the_text_before_themselves() -> None:
    bench = Bench(vocab_size=256, tokenizer=ByteTokenizer())
    alone = bench.alone(numbers(1, 10), 12)
    text = bytes(alone).decode("utf-8", errors="replace")
    stop = text[5:7]
    client = bench.answer(numbers(1, 10), stop=StopParams(max_tokens=12, stop_strings=(stop,)))
    assert client.text == text[: text.index(stop)]
    assert (client.finished.reason, client.finished.stopped_by) == ("stop", stop)
    assert bench.cache.pool.live_blocks == 0


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="no tokenizer"):
        Bench().ask(numbers(1, 10), stop=StopParams(stop_strings=("x",)))


@pytest.mark.behaviour(13)
def test_an_empty_prompt_and_tokens_outside_the_vocabulary_are_clear_errors() -> None:
    bench = Bench()
    with pytest.raises(EmptyPrompt):
        bench.ask([])
    with pytest.raises(InvalidParameter, match="0 to 96"):
        bench.ask([1, 97])
    with pytest.raises(InvalidParameter, match="-1"):
        bench.ask([1, -1])


def test_two_open_requests_cannot_have_one_id() -> None:
    bench = Bench()
    bench.ask(numbers(1, 5), id="same")
    with pytest.raises(InvalidParameter, match="same"):
        bench.ask(numbers(1, 5), id="same")
    bench.run()
    bench.answer(numbers(1, 5), id="same")


@pytest.mark.parametrize("chunk_tokens", [3, 512])
def test_prompt_scores_do_not_depend_on_chunks_or_the_cache(chunk_tokens: int) -> None:
    bench = Bench(chunk_tokens=chunk_tokens)
    tokens = numbers(1, 17)
    bench.answer(tokens)
    client = bench.answer(tokens, max_tokens=1, prompt_logprobs=0)
    (scored,) = [event for event in client.events if isinstance(event, PromptScored)]
    assert client.events[0] is scored
    for position, score in enumerate(scored.logprobs):
        logits = bench.runtime.expected_logits(np.array(tokens[: position + 1], np.int32)).astype(np.float64)
        expected = logits[tokens[position + 1]] - np.log(np.exp(logits).sum())
        assert score.token == tokens[position + 1]
        assert score.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.behaviour(37)
def test_a_step_has_several_chunks_only_while_no_request_decodes() -> None:
    bench = Bench(chunk_tokens=8, idle_chunk_tokens=32)
    bench.ask(numbers(1, 5), max_tokens=1)
    first = bench.answer(numbers(2, 50), max_tokens=3)
    assert [batch.new_tokens for batch in bench.batches] == [8, 32, 15, 1, 1]
    bench.batches.clear()
    bench.ask(numbers(3, 5), max_tokens=3)
    bench.run(steps=1)
    bench.answer(numbers(4, 30), max_tokens=1)
    assert [batch.new_tokens for batch in bench.batches] == [5, 8, 8, 16]
    assert first.tokens == bench.alone(numbers(2, 50), 3)


@pytest.mark.parametrize(
    ("mode", "most"), [("packed", 32), ("packed, token-wise mixers", 32), ("one sequence per forward", 8)]
)
def test_a_model_that_runs_one_sequence_per_forward_has_one_chunk_a_step(
    mode: ExecutionMode, most: int
) -> None:
    bench = Bench(chunk_tokens=8)
    bench.runtime.description = replace(bench.runtime.description, execution_mode=mode)
    bench.engine = Engine(bench.runtime, bench.cache, EngineConfig(chunk_tokens=8))
    bench.answer(numbers(1, 50), max_tokens=1)
    assert max(batch.new_tokens for batch in bench.batches) == most


@pytest.mark.parametrize("first", [3, 8])
def test_the_first_request_does_not_wait_for_the_prompts_of_others(first: int) -> None:
    bench = Bench(chunk_tokens=8, idle_chunk_tokens=32)
    short = bench.ask(numbers(1, first), max_tokens=2)
    bench.ask(numbers(2, 50), max_tokens=1)
    bench.run(steps=1)
    assert len(short.tokens) == 1
    assert [batch.new_tokens for batch in bench.batches] == [8]
    bench.run()
    bench.batches.clear()
    # The second prompt gets the rest of the first one's last chunk.
    bench.ask(numbers(3, 21), max_tokens=1)
    bench.ask(numbers(4, 50), max_tokens=1)
    bench.run(steps=1)
    assert [[len(segment.tokens) for segment in batch.segments] for batch in bench.batches] == [[21, 3]]


def test_scored_prompts_have_one_chunk_a_step() -> None:
    """Logits of every token take much memory: a gigabyte for 2,000 tokens and a vocabulary of 150,000."""
    bench = Bench(chunk_tokens=8, idle_chunk_tokens=32)
    prompts = [numbers(seed, 20) for seed in range(3)]
    clients = [bench.ask(prompt, max_tokens=1, prompt_logprobs=0) for prompt in prompts]
    other = bench.answer(numbers(7, 40), max_tokens=1)
    scored = [sum(segment.logits_to_keep for segment in batch.segments) for batch in bench.batches]
    assert max(scored) <= 8 + len(clients)
    for client, prompt in zip(clients, prompts, strict=True):
        (told,) = [event for event in client.events if isinstance(event, PromptScored)]
        assert [score.token for score in told.logprobs] == prompt[1:]
    assert other.tokens == bench.alone(numbers(7, 40), 1)


def test_logits_of_scored_prompts_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 97
    monkeypatch.setattr("rootstock.engine.part_list.SCORED_LOGITS_BYTES", 5 * 4 * vocabulary + 3)
    bench = Bench(chunk_tokens=16)
    scored = bench.answer(numbers(1, 23), max_tokens=2, prompt_logprobs=3)
    assert [len(batch.segments[0].tokens) for batch in bench.batches] == [5, 5, 5, 5, 3, 1]
    (told,) = [event for event in scored.events if isinstance(event, PromptScored)]
    assert [one.token for one in told.logprobs] == numbers(1, 23)[1:]
    bench.batches.clear()
    bench.answer(numbers(2, 23), max_tokens=1)  # without scores a chunk is as long as ever
    assert [len(batch.segments[0].tokens) for batch in bench.batches] == [16, 7]


def test_choices_beside_a_scored_one_wait_for_its_prompt() -> None:
    bench = Bench(blocks=400, chunk_tokens=16)
    prompt = numbers(1, 60)
    bench.ask(prompt, max_tokens=3, prompt_logprobs=1)
    others = [bench.ask(prompt, max_tokens=3) for _ in range(7)]
    bench.run()
    assert bench.runtime.computed_tokens == 60 + 7 * 1 + 8 * 2
    assert {tuple(other.tokens) for other in others} == {tuple(bench.alone(prompt, 3))}


@pytest.mark.behaviour(50)
def test_stats_after_a_real_run_equal_a_recount() -> None:
    bench = Bench(blocks=40)
    rng = np.random.default_rng(0)
    asked = 0
    for _ in range(20):
        client = bench.ask(rng.integers(0, 3, int(rng.integers(1, 40))), max_tokens=3)
        asked += len(client.request.tokens)
        bench.run()
    stats = bench.engine.stats()
    assert stats.cache.hit_tokens + stats.cache.missed_tokens == stats.cache.asked_tokens == asked
    assert stats.counters.computed_tokens == bench.runtime.computed_tokens
    assert stats.counters.sampled_tokens == 60
    assert stats.cache.missed_tokens + 20 * 2 == bench.runtime.computed_tokens
    assert (stats.running, stats.waiting) == (0, 0)
    held, used = bench.cache.pool.owners()
    assert stats.cache.cached_blocks == int((held > 0).sum())
    assert stats.cache.live_blocks == int((used > 0).sum()) == 0


def test_a_request_that_is_failed_before_it_was_begun_stays_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    late: list[Client] = []

    def broken(*_: object, **__: object) -> None:
        late.append(bench.ask(numbers(9, 12)))
        breaks()

    bench.ask(numbers(1, 12))
    with monkeypatch.context() as patched:
        patched.setattr(bench.cache, "admit", broken)
        bench.engine.step()
    bench.run()
    assert len(late[0].events) == 1
    assert isinstance(late[0].error, EngineFault)


def test_tokens_of_a_forward_with_nan_logits_are_not_cached() -> None:
    bench = Bench(chunk_tokens=8)
    forward, sick = bench.runtime.forward, {"calls": 3}

    def nan_at_first(batch: Batch) -> object:
        logits = forward(batch)
        sick["calls"] -= 1
        if sick["calls"] >= 0 and len(logits):
            logits[:] = np.nan
        return logits

    bench.runtime.forward = nan_at_first
    first = bench.answer(numbers(1, 20))
    assert first.error
    assert bench.cache.pool.free_blocks == 200, "earlier chunks of the prompt go as well"
    again = bench.answer(numbers(1, 20))
    bench.expect(again)
    scored = bench.ask(numbers(1, 9), stop=StopParams(max_tokens=0), prompt_logprobs=1)
    sick["calls"] = 5
    bench.run()
    assert scored.error


def test_an_assertion_that_fails_in_a_call_empties_the_cache() -> None:
    bench = Bench()
    open_request = Client(numbers(1, 10), 500)
    with bench.engine:
        bench.engine.submit(open_request.request, open_request.events.append)
        with pytest.raises(AssertionError):
            bench.engine.call(breaks)
        assert bench.engine.stats().cache.leases == 0
    assert open_request.error


# ---- with its thread


class LateQueue(queue.SimpleQueue):  # type: ignore[type-arg]
    """Queue of commands whose first entry arrives late: after `other` has ended, or was seen to wait."""

    other: threading.Thread

    def put(self, command, block=True, timeout=None):  # type: ignore[no-untyped-def]
        if self.other.ident is None:
            self.other.start()
            self.other.join(0.1)
        super().put(command)


def test_an_abort_never_comes_before_the_submission_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, client = Bench(), Client(numbers(0, 10), 5)
    commands = LateQueue()
    commands.other = threading.Thread(target=bench.engine.abort, args=(client.request.id,))
    monkeypatch.setattr(bench.engine, "_commands", commands)
    bench.engine.submit(client.request, client.events.append)
    join(commands.other)
    bench.engine.step()
    assert client.is_aborted


def test_aborts_during_submissions_end_only_their_own_requests() -> None:
    bench = Bench(blocks=400)
    stop = threading.Event()
    names = [f"r{i}" for i in range(150)]

    def abort_all_the_time() -> None:
        while not stop.is_set():
            for name in names:
                bench.engine.abort(RequestId(name))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    aborter = threading.Thread(target=abort_all_the_time)
    try:
        with bench.engine:
            aborter.start()
            innocent = Client(numbers(0, 10), 5)
            clients = [Client(numbers(i, 8), 3, id=name) for i, name in enumerate(names)]
            for client in (innocent, *clients):
                bench.engine.submit(client.request, client.events.append)
            wait_until(lambda: not (bench.engine.health().running + bench.engine.health().waiting))
            stop.set()
            join(aborter)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
    assert innocent.tokens == bench.alone(numbers(0, 10), 5)
    for client in clients:
        (terminal,) = client.terminals
        assert isinstance(terminal, Finished | Aborted), terminal


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_requests_fail_and_new_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    client = Client(numbers(3, 8), 100)

    def dies(*_: object) -> None:
        raise SystemExit

    bench.engine.start()
    monkeypatch.setattr(bench.engine.scheduler, "schedule", dies)
    bench.engine.submit(client.request, client.events.append)
    join(bench.engine._thread)
    assert client.error
    assert not bench.engine.health().alive
    with pytest.raises(EngineStopped):
        bench.engine.submit(Client([1]).request, print)


def test_a_slow_call_returns_its_result() -> None:
    bench = Bench()

    def slow() -> int:
        time.sleep(1.2)
        return 7

    def raises() -> None:
        raise TimeoutError("its own")

    with bench.engine:
        assert bench.engine.call(slow) == 7
        with pytest.raises(TimeoutError, match="its own"):
            bench.engine.call(raises)


def test_many_threads_submit_and_each_gets_its_own_answer() -> None:
    bench = Bench(blocks=400, max_batch=16)
    answers: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        events = list(bench.engine.generate(Client(numbers(seed, 20), 6).request))
        answers[seed] = [event.token for event in events if isinstance(event, TokenEvent)]
        assert isinstance(events[-1], Finished)

    with bench.engine:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(24)]
        for thread in threads:
            thread.start()
        join(*threads)
        assert bench.engine.health().alive
    assert answers == {seed: bench.alone(numbers(seed, 20), 6) for seed in range(24)}


def test_closing_a_generator_aborts_its_request() -> None:
    bench = Bench()
    with bench.engine:
        events = bench.engine.generate(Client(numbers(1, 10), 500).request)
        next(events)
        events.close()
        wait_until(lambda: not bench.engine.stats().running)
        assert bench.engine.stats().cache.live_blocks == 0


def test_stopping_fails_open_requests_and_refuses_new_ones() -> None:
    started = threading.Event()

    def runs_until_the_stop(batch: Batch) -> None:
        started.set()
        wait_until(lambda: not bench.engine.health().alive)

    bench = Bench(fault=runs_until_the_stop)
    clients = [Client(numbers(seed, 10), 500) for seed in range(3)]
    bench.engine.start()
    for client in clients:
        bench.engine.submit(client.request, client.events.append)
    wait_for(started)
    bench.engine.stop()
    bench.engine.stop()
    for client in clients:
        assert isinstance(client.error, EngineStopped)
    with pytest.raises(EngineStopped):
        bench.engine.submit(Client([1]).request, print)
    with pytest.raises(EngineStopped):
        bench.engine.stats()
    assert not bench.engine.health().alive


def test_health_reports_a_step_that_hangs() -> None:
    release, entered = threading.Event(), threading.Event()

    def hang(batch: Batch) -> None:
        entered.set()
        release.wait(HANG_S)

    clock = {"now": 0.0}
    bench = Bench(fault=hang)
    engine = Engine(bench.runtime, bench.cache, EngineConfig(), clock=lambda: clock["now"])
    with engine:
        engine.submit(Client(numbers(1, 4)).request, lambda event: None)
        wait_for(entered)
        assert engine.health().alive
        clock["now"] = 1000.0
        health = engine.health()
        release.set()
        assert not health.alive
        assert "1000 s" in health.detail


def test_copies_are_executed_before_the_forward_that_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    apply, forward = FakeRuntime.apply, FakeRuntime.forward

    def spy_apply(self: FakeRuntime, plan: Plan) -> None:
        order.append("apply")
        apply(self, plan)

    def spy_forward(self: FakeRuntime, batch: Batch) -> Logits:
        order.append("forward")
        return forward(self, batch)

    monkeypatch.setattr(FakeRuntime, "apply", spy_apply)
    monkeypatch.setattr(FakeRuntime, "forward", spy_forward)
    bench = Bench(block_size=8)
    bench.answer(numbers(1, 20), max_tokens=1)
    bench.answer([*numbers(1, 11), 5, 6], max_tokens=1)
    assert order == ["forward", "apply", "forward"]


def test_a_function_called_after_events_sees_whole_steps_only() -> None:
    bench = Bench()
    clients = [bench.ask(numbers(seed, 10), max_tokens=3) for seed in range(4)]
    seen: list[int] = []

    def count() -> None:
        seen.append(sum(len(client.events) for client in clients))

    bench.engine.call_after_events(count)
    bench.run(steps=1)
    assert seen[-1] == 4, "a token of each"
    bench.run()
    assert seen[-1] == 4 * 4, "three tokens and the end"
    assert set(np.diff([0, *seen])) <= {0, 4, 8}, "it saw half a step"
    bench.engine.no_call_after_events(count)
    calls = len(seen)
    bench.answer(numbers(9, 10))
    assert len(seen) == calls


def test_a_function_called_after_events_may_raise() -> None:
    bench = Bench()
    bench.engine.call_after_events(breaks)
    bench.expect(bench.answer(numbers(1, 10)))


def test_a_stop_calls_functions_after_its_events() -> None:
    bench = Bench()
    client = bench.ask(numbers(1, 10))
    seen: list[int] = []
    bench.engine.call_after_events(lambda: seen.append(len(client.terminals)))
    bench.engine.stop()
    assert seen[-1] == 1
