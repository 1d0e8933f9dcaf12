"""Every request ends exactly once, and nothing that goes wrong with one stops another."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from engine.helpers import GREEDY, Bench, Client
from rootstock.cache.plan import Plan
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    PromptScored,
    RequestId,
    StopParams,
    TokenEvent,
)
from rootstock.errors import EmptyPrompt, EngineFault, EngineStopped, InvalidParameter, StepFailed
from rootstock.runtime.base import Batch, ExecutionMode
from rootstock.testing.byte_tokenizer import ByteTokenizer
from waiting import HANG_S, join, wait_for, wait_until


def numbers(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 97, length)]


@pytest.mark.behaviour(47)
def test_an_exception_in_a_step_fails_the_requests_of_that_step_and_the_engine_goes_on() -> None:
    def fault(batch: Batch) -> None:
        if any(99 in s.tokens for s in batch.segments):
            raise RuntimeError("a kernel broke")

    bench = Bench(vocab_size=100, fault=fault, max_batch=4, chunk_tokens=512)
    before = bench.ask(numbers(1, 20), max_tokens=1)
    bench.run()
    poisoned, mate = bench.ask([1, 2, 99]), bench.ask(numbers(2, 20))
    bench.run()
    after = bench.ask(numbers(3, 20))
    bench.run()
    assert isinstance(before.events[-1], Finished)
    for client in (poisoned, mate):
        (failed,) = client.terminals
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, StepFailed)
        assert "a kernel broke" in str(failed.error.cause)
        assert "a kernel broke" not in failed.error.message, "it may tell of others in the same step"
    assert after.tokens == bench.alone(after.request.tokens, 4)
    assert bench.cache.pool.live_blocks == 0


def test_nothing_of_a_failed_forward_can_be_found() -> None:
    def fault(batch: Batch) -> None:
        raise RuntimeError("always")

    bench = Bench(fault=fault)
    client = bench.ask(numbers(1, 20))
    bench.run()
    assert isinstance(client.events[-1], Failed)
    assert bench.engine.explain(client.request.tokens).matched_tokens == 0
    assert bench.cache.pool.free_blocks == 200


@pytest.mark.behaviour(47)
def test_a_bug_of_our_own_fails_what_is_open_empties_the_cache_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.ask(numbers(1, 20))
    bench.run()
    broken = [bench.ask(numbers(2, 20)), bench.ask(numbers(3, 20))]

    def assertion(*_: object) -> None:
        raise AssertionError("an invariant does not hold")

    with monkeypatch.context() as patched:
        patched.setattr(bench.cache, "admit", assertion)
        bench.engine.step()
    assert all(isinstance(c.terminals[0], Failed) and len(c.terminals) == 1 for c in broken)
    assert bench.cache.pool.free_blocks == 200, "a cache that may be wrong is not kept"
    after = bench.ask(numbers(1, 20))
    bench.run()
    assert after.tokens == bench.alone(after.request.tokens, 4)
    assert after.finished.usage.cached_tokens == 0


def test_a_sink_that_raises_stops_nobody() -> None:
    bench = Bench()

    def bad(event: Event) -> None:
        raise ValueError("a client's bug")

    bench.engine.submit(Client(numbers(1, 10)).request, bad)
    good = bench.ask(numbers(2, 10))
    bench.run()
    assert good.tokens == bench.alone(good.request.tokens, 4)
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
    (failed,) = sick.terminals
    assert isinstance(failed, Failed)
    assert well.tokens == bench.alone(well.request.tokens, 4)


@pytest.mark.behaviour(28, 49)
@pytest.mark.parametrize("after_steps", range(8))
def test_a_request_cancelled_at_any_moment_leaves_what_it_computed_and_leaks_nothing(
    after_steps: int,
) -> None:
    bench = Bench(chunk_tokens=8)
    client, other = bench.ask(numbers(1, 30), max_tokens=30), bench.ask(numbers(2, 12), max_tokens=6)
    bench.run(steps=after_steps)
    bench.engine.abort(client.request.id)
    bench.engine.abort(client.request.id)
    bench.run()
    assert isinstance(client.events[-1], Aborted)
    assert len(client.terminals) == 1
    assert other.tokens == bench.alone(other.request.tokens, 6)
    assert bench.cache.pool.live_blocks == 0
    found = bench.engine.explain(client.request.tokens).matched_tokens
    assert found == min(29, 8 * after_steps)


def test_aborting_what_has_ended_or_never_was_does_nothing() -> None:
    bench = Bench()
    client = bench.ask(numbers(1, 10))
    bench.run()
    bench.engine.abort(client.request.id)
    bench.engine.abort("nobody")  # type: ignore[arg-type]
    bench.engine.step()
    assert len(client.terminals) == 1


@pytest.mark.behaviour(49)
def test_a_token_limit_ends_with_length() -> None:
    bench = Bench()
    client = bench.ask(numbers(1, 10), max_tokens=3)
    bench.run()
    assert client.finished.reason == "length"
    assert client.finished.usage.completion_tokens == 3


@pytest.mark.behaviour(49)
def test_end_of_sequence_and_stop_tokens_end_with_stop_and_are_no_part_of_the_answer() -> None:
    bench = Bench()
    alone = bench.alone(numbers(1, 10), 8)
    for stop in (StopParams(stop_tokens=(alone[3],)), StopParams(max_tokens=20, stop_tokens=(alone[3], 200))):
        client = bench.ask(numbers(1, 10), stop=stop)
        bench.run()
        assert client.tokens == alone[: alone.index(alone[3])]
        assert (client.finished.reason, client.finished.stopped_by) == ("stop", alone[3])
    other = Bench(eos_token_ids=(alone[3],))
    client = other.ask(numbers(1, 10), max_tokens=8)
    ignoring = other.ask(numbers(1, 10), stop=StopParams(max_tokens=8, ignore_eos=True))
    other.run()
    assert client.tokens == alone[: alone.index(alone[3])]
    assert ignoring.tokens == alone


def test_the_tokenizers_end_of_sequence_ends_an_answer_as_the_models_does() -> None:
    codec = ByteTokenizer()
    bench = Bench(vocab_size=codec.vocab_size, tokenizer=codec)
    seed = next(s for s in range(5000) if codec.END in bench.alone(numbers(s, 6), 4))
    client = bench.ask(numbers(seed, 6), max_tokens=4)
    bench.run()
    assert client.finished.stopped_by == codec.END


@pytest.mark.behaviour(49)
def test_stop_strings_end_the_text_before_themselves() -> None:
    bench = Bench(vocab_size=256, tokenizer=ByteTokenizer())
    alone = bench.alone(numbers(1, 10), 12)
    text = bytes(alone).decode("utf-8", errors="replace")
    stop = text[5:7]
    client = bench.ask(numbers(1, 10), stop=StopParams(max_tokens=12, stop_strings=(stop,)))
    bench.run()
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
    bench.ask(numbers(1, 5), id="same")
    bench.run()


@pytest.mark.parametrize("chunk_tokens", [3, 512])
def test_prompt_scores_are_those_of_each_position_whatever_the_chunks_and_the_cache(
    chunk_tokens: int,
) -> None:
    bench = Bench(chunk_tokens=chunk_tokens)
    tokens = numbers(1, 17)
    bench.ask(tokens)
    bench.run()
    client = bench.ask(tokens, max_tokens=1, prompt_logprobs=0)
    bench.run()
    (scored,) = [event for event in client.events if isinstance(event, PromptScored)]
    assert client.events[0] is scored
    for position, score in enumerate(scored.logprobs):
        logits = bench.runtime.expected_logits(np.array(tokens[: position + 1], np.int32)).astype(np.float64)
        expected = logits[tokens[position + 1]] - np.log(np.exp(logits).sum())
        assert score.token == tokens[position + 1]
        assert score.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.behaviour(37)
def test_a_step_takes_more_of_prompts_while_nobody_decodes_and_a_chunk_as_soon_as_somebody_does() -> None:
    bench = Bench(chunk_tokens=8, idle_chunk_tokens=32)
    bench.ask(numbers(1, 5), max_tokens=1)
    first = bench.ask(numbers(2, 50), max_tokens=3)
    bench.run()
    assert [batch.new_tokens for batch in bench.batches] == [8, 32, 15, 1, 1]
    bench.batches.clear()
    bench.ask(numbers(3, 5), max_tokens=3)
    bench.run(steps=1)
    bench.ask(numbers(4, 30), max_tokens=1)
    bench.run()
    assert [batch.new_tokens for batch in bench.batches] == [5, 8, 8, 16]
    assert first.tokens == bench.alone(numbers(2, 50), 3)


@pytest.mark.parametrize(
    ("mode", "most"), [("packed", 32), ("packed, token-wise mixers", 32), ("one sequence per forward", 8)]
)
def test_a_step_takes_several_chunks_only_of_models_whose_scores_need_no_more_memory_for_it(
    mode: ExecutionMode, most: int
) -> None:
    bench = Bench(chunk_tokens=8)
    bench.runtime.description = replace(bench.runtime.description, execution_mode=mode)
    bench.engine = Engine(bench.runtime, bench.cache, EngineConfig(chunk_tokens=8))
    bench.ask(numbers(1, 50), max_tokens=1)
    bench.run()
    assert max(batch.new_tokens for batch in bench.batches) == most


@pytest.mark.parametrize("first", [3, 8])
def test_who_is_first_does_not_wait_for_the_prompts_of_others_while_nobody_decodes(first: int) -> None:
    bench = Bench(chunk_tokens=8, idle_chunk_tokens=32)
    short = bench.ask(numbers(1, first), max_tokens=2)
    bench.ask(numbers(2, 50), max_tokens=1)
    bench.run(steps=1)
    assert len(short.tokens) == 1
    assert [batch.new_tokens for batch in bench.batches] == [8]
    bench.run()
    bench.batches.clear()
    # Who comes second goes along as far as the last chunk of the first one's has room.
    bench.ask(numbers(3, 21), max_tokens=1)
    bench.ask(numbers(4, 50), max_tokens=1)
    bench.run(steps=1)
    assert [[len(segment.tokens) for segment in batch.segments] for batch in bench.batches] == [[21, 3]]


def test_of_prompts_that_are_scored_a_step_has_one_chunk_even_while_nobody_decodes() -> None:
    """Logits of every token are a lot of memory: a vocabulary of 150,000 takes a gigabyte for 2,000 of them."""
    bench = Bench(chunk_tokens=8, idle_chunk_tokens=32)
    prompts = [numbers(seed, 20) for seed in range(3)]
    clients = [bench.ask(prompt, max_tokens=1, prompt_logprobs=0) for prompt in prompts]
    other = bench.ask(numbers(7, 40), max_tokens=1)
    bench.run()
    scored = [sum(segment.logits_to_keep for segment in batch.segments) for batch in bench.batches]
    assert max(scored) <= 8 + len(clients)
    for client, prompt in zip(clients, prompts, strict=True):
        (told,) = [event for event in client.events if isinstance(event, PromptScored)]
        assert [score.token for score in told.logprobs] == prompt[1:]
    assert other.tokens == bench.alone(numbers(7, 40), 1)


def test_logits_of_prompts_that_are_scored_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rootstock.engine.engine.SCORED_LOGITS_BYTES", 5 * 4 * 97 + 3
    )  # of a vocabulary of 97
    bench = Bench(chunk_tokens=16)
    scored = bench.ask(numbers(1, 23), max_tokens=2, prompt_logprobs=3)
    bench.run()
    assert [len(batch.segments[0].tokens) for batch in bench.batches] == [5, 5, 5, 5, 3, 1]
    (told,) = [event for event in scored.events if isinstance(event, PromptScored)]
    assert [one.token for one in told.logprobs] == numbers(1, 23)[1:]
    bench.batches.clear()
    bench.ask(numbers(2, 23), max_tokens=1)  # without scores a chunk is as long as ever
    bench.run()
    assert [len(batch.segments[0].tokens) for batch in bench.batches] == [16, 7]


def test_choices_beside_one_that_is_scored_wait_for_its_prompt_rather_than_computing_it() -> None:
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

    def broken(*_: object) -> None:
        late.append(bench.ask(numbers(9, 12)))
        raise AssertionError("an invariant does not hold")

    bench.ask(numbers(1, 12))
    with monkeypatch.context() as patched:
        patched.setattr(bench.cache, "admit", broken)
        bench.engine.step()
    bench.run()
    (failed,) = late[0].events
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineFault)


def test_k_and_v_of_a_forward_whose_logits_are_not_finite_are_not_kept() -> None:
    bench = Bench(chunk_tokens=8)
    forward, sick = bench.runtime.forward, {"calls": 3}

    def nan_at_first(batch: Batch) -> object:
        logits = forward(batch)
        sick["calls"] -= 1
        if sick["calls"] >= 0 and len(logits):
            logits[:] = np.nan
        return logits

    bench.runtime.forward = nan_at_first  # type: ignore[assignment, method-assign]
    first = bench.ask(numbers(1, 20))
    bench.run()
    (failed,) = first.terminals
    assert isinstance(failed, Failed)
    assert bench.cache.pool.free_blocks == 200, "earlier chunks of the prompt go as well"
    again = bench.ask(numbers(1, 20))
    bench.run()
    assert again.tokens == bench.alone(numbers(1, 20), 4)
    scored = bench.ask(numbers(1, 9), stop=StopParams(max_tokens=0), prompt_logprobs=1)
    sick["calls"] = 5
    bench.run()
    assert isinstance(scored.events[-1], Failed)


def test_a_function_that_finds_the_structures_broken_starts_the_cache_anew() -> None:
    bench = Bench()
    open_request = Client(numbers(1, 10), 500)

    def broken() -> None:
        raise AssertionError("an invariant does not hold")

    with bench.engine:
        bench.engine.submit(open_request.request, open_request.events.append)
        with pytest.raises(AssertionError):
            bench.engine.call(broken)
        assert bench.engine.stats().cache.leases == 0
    assert isinstance(open_request.events[-1], Failed)


# ---- with its thread


def test_an_abort_that_comes_between_the_lines_of_a_submit_hurts_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_when_the_thread_dies_everybody_is_told_and_nobody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    client = Client(numbers(3, 8), 100)

    def dies(*_: object) -> None:
        raise SystemExit

    bench.engine.start()
    monkeypatch.setattr(bench.engine.scheduler, "schedule", dies)
    bench.engine.submit(client.request, client.events.append)
    assert bench.engine._thread is not None
    join(bench.engine._thread)
    assert isinstance(client.events[-1], Failed)
    assert not bench.engine.health().alive
    with pytest.raises(EngineStopped):
        bench.engine.submit(Client([1]).request, print)


def test_a_call_that_takes_long_answers_all_the_same() -> None:
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


def test_stopping_fails_what_runs_and_refuses_what_comes() -> None:
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
        (terminal,) = client.terminals
        assert isinstance(terminal, Failed)
        assert isinstance(terminal.error, EngineStopped)
    with pytest.raises(EngineStopped):
        bench.engine.submit(Client([1]).request, print)
    with pytest.raises(EngineStopped):
        bench.engine.stats()
    assert not bench.engine.health().alive


def test_health_tells_of_a_step_that_hangs_without_asking_the_thread_that_hangs() -> None:
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


def test_an_exact_repeat_of_a_prompt_leaves_a_token_to_compute_and_answers() -> None:
    bench = Bench()
    with bench.engine:
        for _ in range(3):
            events = list(bench.engine.generate(Client(numbers(1, 32)).request))
            assert isinstance(events[-1], Finished)


def test_copies_are_executed_before_the_forward_that_needs_them() -> None:
    bench = Bench(block_size=8)
    order: list[str] = []
    apply, forward = bench.runtime.apply, bench.runtime.forward

    def spy_apply(plan: Plan) -> None:
        order.append("apply")
        apply(plan)

    def spy_forward(batch: Batch) -> object:
        order.append("forward")
        return forward(batch)

    bench.runtime.apply, bench.runtime.forward = spy_apply, spy_forward  # type: ignore[method-assign,assignment]
    bench.ask(numbers(1, 20), max_tokens=1)
    bench.run()
    bench.ask([*numbers(1, 11), 5, 6], max_tokens=1)
    bench.run()
    assert order == ["forward", "apply", "forward"]
    assert GREEDY.greedy


def test_who_collects_events_is_called_once_when_a_step_has_told_all_of_them() -> None:
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
    assert set(np.diff([0, *seen])) <= {0, 4, 8}, "nobody is told of half a step"
    bench.engine.no_call_after_events(count)
    calls = len(seen)
    bench.ask(numbers(9, 10))
    bench.run()
    assert len(seen) == calls


def test_one_who_raises_when_called_after_events_stops_nobody() -> None:
    bench = Bench()

    def bad() -> None:
        raise ValueError("a collector's bug")

    bench.engine.call_after_events(bad)
    client = bench.ask(numbers(1, 10))
    bench.run()
    assert client.tokens == bench.alone(client.request.tokens, 4)


def test_who_collects_events_learns_of_those_that_a_stop_ended() -> None:
    bench = Bench()
    client = bench.ask(numbers(1, 10))
    seen: list[int] = []
    bench.engine.call_after_events(lambda: seen.append(len(client.terminals)))
    bench.engine.stop()
    assert seen[-1] == 1
