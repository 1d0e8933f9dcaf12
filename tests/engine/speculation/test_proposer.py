"""Drafts change the number of forwards of an answer, and nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.helpers import Bench, Families, numbers
from rootstock.cache.lease import Admitted, Lease, ReleaseReason
from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import StopParams, TokenEvent
from rootstock.engine.sequence import Sequence as Running
from rootstock.engine.speculation.proposer import NgramProposer, Proposer, why_not
from rootstock.errors import InvalidOption
from rootstock.options import parse_draft_tokens
from rootstock.runtime.base import Batch
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, chunked, window

Draft = Callable[[list[int]], Sequence[int]]  # from the generated tokens


class Scripted(Proposer):
    """A proposer whose drafts a test makes from the generated tokens."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.rooms: list[int] = []

    def drafts(self, sequences: Sequence[Running], leases: Sequence[Lease], room: int) -> list[Tokens]:
        self.rooms.append(room)
        return [np.array(self._draft(sequence.generated)[:room], np.int32) for sequence in sequences]


def rightly(answer: list[int], most: int = 5) -> Scripted:
    """Proposes the right tokens."""
    return Scripted(lambda generated: answer[len(generated) :][:most])


def test_right_drafts_save_forwards_and_wrong_ones_change_nothing() -> None:
    prompt = numbers(1, 20)
    alone = Bench().alone(prompt, 24)
    right = Bench(proposer=rightly(alone))
    wrong = Bench(proposer=Scripted(lambda generated: [(alone[len(generated)] + 1) % 97] * 5))
    for bench in (right, wrong):
        client = bench.answer(prompt, max_tokens=24)
        assert client.tokens == alone
    assert (right.steps, wrong.steps) == (1 + 4, 24)  # 1 + 6 + 6 + 6 + 5
    counters = right.engine.stats().counters
    assert (counters.draft_tokens, counters.accepted_draft_tokens) == (19, 19)
    assert wrong.engine.stats().counters.accepted_draft_tokens == 0


SETTINGS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalised": {
        "temperature": 1.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "greedy, penalised": {"temperature": 0.0, "frequency_penalty": 2.0},
    "biased": {"temperature": 1.0, "logit_bias": {5: 100.0, 6: 100.0, 7: 100.0}},
    "scored": {"temperature": 1.0, "top_logprobs": 3},
}


@pytest.mark.behaviour(48)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("families", [(FULL,), (FULL, window(6), chunked(8)), (FULL, STATE), (STATE,)])
def test_a_seeded_answer_is_the_same_with_drafts_and_without(setting: str, families: Families) -> None:
    """Each position is sampled from the same random numbers, so that answers are equal and not only alike."""
    prompt = numbers(2, 15)
    sampling = ResolvedSampling(seed=11, **SETTINGS[setting])
    stop = StopParams(max_tokens=30, min_tokens=12, stop_tokens=(5, 17))
    plain = Bench(families=families)
    expected = plain.answer(prompt, sampling=sampling, stop=stop)
    answer = [*expected.tokens, 5, 5, 5]
    rng = np.random.default_rng(0)

    def partly_right(generated: list[int]) -> list[int]:
        draft = answer[len(generated) :][:7]
        if draft and rng.random() < 0.6:
            draft[int(rng.integers(len(draft)))] = int(rng.integers(97))
        return draft

    bench = Bench(families=families, proposer=Scripted(partly_right))
    client = bench.answer(prompt, sampling=sampling, stop=stop)
    given = [event for event in client.events if isinstance(event, TokenEvent)]
    assert given == [
        replace(event, id=client.request.id) for event in expected.events if isinstance(event, TokenEvent)
    ]
    assert (client.finished.reason, client.finished.stopped_by) == (
        expected.finished.reason,
        expected.finished.stopped_by,
    )
    assert bench.engine.stats().counters.accepted_draft_tokens > 0


@pytest.mark.behaviour(49)
def test_a_stop_string_within_an_accepted_run_ends_it_there() -> None:
    prompt = numbers(1, 10, 256)
    bench = Bench(vocab_size=256, tokenizer=ByteTokenizer())
    alone = bench.alone(prompt, 12)
    text = bytes(alone).decode("utf-8", errors="replace")
    stop = StopParams(max_tokens=12, stop_strings=(text[5:7],))
    plain = bench.answer(prompt, stop=stop)
    drafted = Bench(vocab_size=256, tokenizer=ByteTokenizer(), proposer=rightly(alone, 11))
    client = drafted.answer(prompt, stop=stop)
    assert drafted.steps == 2
    assert (client.tokens, client.text) == (plain.tokens, plain.text)
    assert client.finished.usage.completion_tokens == len(plain.tokens)
    # Tokens that were accepted behind the stop are not kept.
    assert drafted.cache.stats().cached_tokens == bench.cache.stats().cached_tokens
    assert drafted.cache.pool.live_blocks == 0


def test_a_stop_token_within_an_accepted_run_ends_it_there() -> None:
    prompt = numbers(3, 10)
    alone = Bench().alone(prompt, 12)
    bench = Bench(proposer=rightly(alone, 11))
    client = bench.answer(prompt, stop=StopParams(max_tokens=12, stop_tokens=(alone[6],)))
    first = alone.index(alone[6])
    assert client.tokens == alone[:first]
    assert client.finished.stopped_by == alone[6]
    assert client.finished.usage.completion_tokens == first + 1
    assert bench.cache.stats().cached_tokens == 10 + first
    usage = client.finished.usage
    assert (usage.draft_tokens, usage.accepted_draft_tokens) == (10, first - 1)


def test_a_draft_never_reaches_beyond_the_last_token() -> None:
    prompt = numbers(4, 10)
    alone = Bench().alone(prompt, 30)
    bench = Bench(proposer=rightly(alone, 16))
    client = bench.answer(prompt, max_tokens=5)
    assert client.tokens == alone[:5]
    assert client.finished.usage.draft_tokens == 3
    assert bench.cache.stats().cached_tokens == 10 + 4


def test_drafts_take_the_rest_of_the_steps_tokens() -> None:
    proposer = Scripted(lambda generated: [1] * 8)
    bench = Bench(chunk_tokens=6, proposer=proposer)
    bench.ask(numbers(5, 3), max_tokens=20)
    bench.run(1)
    bench.answer(numbers(6, 40), max_tokens=2)
    assert all(batch.new_tokens <= 6 for batch in bench.batches)
    assert any(len(batch.segments) == 1 and batch.new_tokens == 6 for batch in bench.batches)
    mixed = [batch for batch in bench.batches if len(batch.segments) == 2 and batch.segments[1].past < 35]
    assert mixed
    assert all(len(batch.segments[0].tokens) == 1 for batch in mixed), "a draft held up a prefill"


def test_drafts_take_no_block_that_a_request_may_need() -> None:
    def preemptions(proposer: Scripted | None) -> tuple[int, list[list[int]]]:
        bench = Bench(blocks=24, block_size=4, proposer=proposer)
        clients = [bench.ask(numbers(seed, 9), max_tokens=14) for seed in range(4)]
        bench.run()
        return bench.cache.counters.preemptions, [client.tokens for client in clients]

    wrong = Scripted(lambda generated: [1] * 12)
    assert preemptions(wrong) == preemptions(None)
    assert preemptions(None)[0] == 0, "the pool is exactly large enough"


def test_no_new_blocks_go_to_drafts_while_a_request_waits_for_blocks() -> None:
    bench = Bench(blocks=8, block_size=4, max_batch=2, proposer=Scripted(lambda generated: [1] * 12))
    bench.ask(numbers(1, 4), max_tokens=12)
    bench.run(1)
    bench.ask(numbers(2, 26), max_tokens=2)  # not before the first one has ended
    bench.run(1)
    waiting = bench.batches[-1].segments[0]
    assert waiting.past + len(waiting.tokens) <= 8, "it took a third block"
    bench.run()


def test_rejected_positions_are_void_for_other_requests() -> None:
    """Another request continues right behind the accepted tokens, inside the block of the rejected ones."""
    prompt = numbers(7, 9)
    alone = Bench().alone(prompt, 6)
    bench = Bench(block_size=16, proposer=Scripted(lambda generated: [*alone[len(generated) :][:2], 1, 1, 1]))
    first = bench.ask(prompt, max_tokens=6)
    bench.run(2)
    bench.engine.abort(first.request.id)
    bench.run()
    longer = [*prompt, *first.tokens, *numbers(8, 6)]
    second = bench.answer(longer, max_tokens=4)
    assert second.cached_tokens == len(prompt) + len(first.tokens) - 1
    assert second.tokens == bench.alone(longer, 4)


# ----------------------------------------------------------------------------------------- n-gram proposer


def lookup(**options: Any) -> Bench:
    """Makes an engine whose clock gives every forward the same time, so that any draft pays."""
    ticks = iter(range(10**9))
    return Bench(clock=lambda: float(next(ticks)), draft_tokens=8, **options)


def test_tokens_that_followed_the_same_prefix_are_drafted() -> None:
    bench = lookup()
    prompt = numbers(9, 20)
    first, again = bench.answer(prompt, 24), bench.answer(prompt, 24)
    bench.expect(first, again)
    usage = again.finished.usage
    assert usage.accepted_draft_tokens == usage.draft_tokens >= 14


def test_another_tenants_text_is_never_drafted() -> None:
    bench = lookup()
    prompt = numbers(9, 20)
    bench.answer(prompt, 24, salt="one")
    other = bench.answer(prompt, 24, salt="another")
    assert other.finished.usage.draft_tokens == 0
    same = bench.answer(prompt, 24, salt="one")
    assert same.finished.usage.accepted_draft_tokens > 0


def test_of_two_continuations_the_last_used_one_is_drafted() -> None:
    bench = lookup()
    prompt = numbers(9, 20)
    for last in (2, 3, 2):
        bench.answer([*prompt, 1, last], max_tokens=1)
        match = bench.cache.match(np.array(prompt, np.int32), bench.engine.namespace(""))
        admitted = bench.cache.admit(match)
        assert isinstance(admitted, Admitted)
        assert bench.cache.following(admitted.lease, 1, 8).tolist() == [last]
        assert bench.cache.following(admitted.lease, 4, 8).tolist() == []
        bench.cache.release(admitted.lease, ReleaseReason.ABORTED)


def test_a_text_that_repeats_itself_is_drafted_from_itself() -> None:
    """A bias makes the oracle repeat itself: it may choose only one token."""
    bench = lookup()
    only = ResolvedSampling(temperature=0.0, logit_bias={7: 100.0})
    client = bench.answer(numbers(1, 5), max_tokens=60, sampling=only)
    assert client.tokens == [7] * 60
    assert client.finished.usage.accepted_draft_tokens > 30


def test_tokens_of_recent_requests_of_the_namespace_are_drafted() -> None:
    bench = lookup()
    phrase = numbers(2, 40)
    proposer = bench.engine.parts.proposer
    assert isinstance(proposer, NgramProposer)
    bench.answer([*numbers(3, 10), *phrase], max_tokens=1)
    client = bench.ask([*numbers(4, 10), *phrase[:10]], max_tokens=30)
    bench.run(1)
    (running,) = bench.engine.scheduler.sequences()
    running.generated[-1:] = phrase[10:11]
    assert running.lease is not None
    found, agreement = proposer._look_up(running, running.lease, 6)
    assert found.tolist() == phrase[11:17]
    assert agreement >= 11
    bench.engine.abort(client.request.id)
    bench.run()


def test_a_cache_that_is_cleared_leaves_nothing_to_draft_from() -> None:
    bench = lookup()
    prompt = numbers(9, 20)
    bench.answer(prompt, 24)
    bench.engine.clear_cache()
    assert bench.answer(prompt, 24).finished.usage.draft_tokens == 0


def test_wrong_drafts_are_soon_left_out() -> None:
    bench = lookup(vocab_size=3)  # every n-gram was seen before and predicts nothing
    sampling = ResolvedSampling(temperature=1.0, seed=1)
    client = bench.answer(numbers(1, 50, 3), max_tokens=300, sampling=sampling)
    usage = client.finished.usage
    assert 0 < usage.draft_tokens < 300
    plain = Bench(vocab_size=3)
    assert plain.answer(numbers(1, 50, 3), max_tokens=300, sampling=sampling).tokens == client.tokens


STATEFUL: list[Families] = [(STATE,), (FULL, STATE), (FULL, window(6), STATE)]


@pytest.mark.parametrize("families", STATEFUL)
@pytest.mark.parametrize("right", range(8))
def test_a_state_is_never_advanced_by_a_wrong_draft(right: int, families: Families) -> None:
    prompt = numbers(1, 20)
    alone = Bench(families=families).alone(prompt, 33)

    def draft(generated: list[int]) -> list[int]:
        known = alone[len(generated) :]
        return [*known[:right], *((token + 1) % 97 for token in known[right : right + 2])]

    bench = Bench(families=families, proposer=Scripted(draft))
    assert bench.answer(prompt, max_tokens=33).tokens == alone
    counters = bench.engine.stats().counters
    assert counters.draft_tokens > counters.accepted_draft_tokens
    assert (counters.accepted_draft_tokens > 0) == (right > 0)
    longest = max(
        len(segment.tokens) for batch in bench.batches for segment in batch.segments if segment.past > 20
    )
    assert longest <= right + 3, "no more is computed again than one draft"


def stopping(families: Families, prompt: Tokens, tokens: int) -> tuple[list[int], StopParams]:
    """Returns the first tokens of an answer, up to one that comes for the first time, and the stop that ends it
    there. A limit of tokens bounds drafts, too: only a stop ends an answer within one."""
    alone = Bench(families=families).alone(prompt, 3 * tokens)
    at = next(i for i in range(tokens - 1, len(alone)) if alone[i] not in alone[:i])
    return alone[: at + 1], StopParams(max_tokens=100, stop_tokens=(alone[at],))


@pytest.mark.parametrize("families", STATEFUL)
@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("answer", [2, 3, 9, 24])
def test_the_next_turn_finds_as_much_as_without_drafts(answer: int, right: int, families: Families) -> None:
    """The end of an answer may fall on a right draft, on a wrong one, or behind both."""
    prompt = numbers(1, 20)
    expected, stop = stopping(families, prompt, answer)

    def draft(generated: list[int]) -> list[int]:
        return [*expected[len(generated) :][:right], 96, 95]

    plain, bench = Bench(families=families), Bench(families=families, proposer=Scripted(draft))
    for one in (plain, bench):
        one.answer(prompt, stop=stop)
        assert one.ended[-1].finished.usage.completion_tokens == len(expected)
    after = [*map(int, prompt), *expected, *map(int, numbers(2, 6))]
    found = [one.answer(after, max_tokens=1).cached_tokens for one in (plain, bench)]
    assert found[0] == found[1]
    assert (
        answer < 9 or found[0] == len(prompt) + len(expected) - 1
    )  # else the prompt's checkpoint is near enough


@pytest.mark.parametrize("families", STATEFUL)
def test_a_failure_after_the_last_draft_leaves_the_state_before_it(families: Families) -> None:
    """The runtime may have advanced the state of the forward that fails."""
    prompt = numbers(1, 20)
    ends: list[int] = []
    expected, stop = stopping(families, prompt, 24)

    def fault(batch: Batch) -> None:
        (segment,) = batch.segments
        if not segment.logits_to_keep and segment.past > len(prompt) and not ends:
            bench.runtime._states[segment.state] = 77
            ends.append(segment.past)
            raise RuntimeError("on purpose")

    bench = Bench(
        families=families,
        fault=fault,
        proposer=Scripted(lambda generated: [*expected[len(generated) :][:3], 96, 95]),
    )
    bench.answer(prompt, stop=stop)
    assert len(ends) == 1, "the answer did not end within a draft"
    bench.cache.check()
    after = [*map(int, prompt), *expected, *map(int, numbers(2, 6))]
    later = bench.answer(after, max_tokens=4)
    assert later.cached_tokens == ends[-1]
    bench.expect(later)


@pytest.mark.parametrize("families", STATEFUL)
def test_second_states_are_given_up_when_a_request_needs_their_memory(families: Families) -> None:
    prompts = [numbers(seed, 24) for seed in range(6)]
    bench = Bench(families=families, blocks=14, proposer=Scripted(lambda generated: [1, 2]))
    clients = [bench.ask(prompt, 40) for prompt in prompts]
    bench.run()
    for client in clients:
        bench.expect(client)
    assert bench.engine.stats().counters.draft_tokens > 0


def test_models_that_run_one_sequence_per_forward_have_no_drafts() -> None:
    alone = replace(FakeRuntime().description, execution_mode="one sequence per forward")
    assert "one sequence" in str(why_not(alone, None))
    assert why_not(FakeRuntime().description, None) is None
    assert why_not(FakeRuntime().description, 0) == "not asked for"


def test_the_option_is_auto_off_or_a_number() -> None:
    assert [parse_draft_tokens(text) for text in ("auto", "off", "0", "12")] == [None, 0, 0, 12]
    for text in ("", "some", "-3", "1.5", "99999"):
        with pytest.raises(InvalidOption, match="--speculate"):
            parse_draft_tokens(text)
    with pytest.raises(InvalidOption, match="--speculate"):
        EngineConfig(draft_tokens=-1)
