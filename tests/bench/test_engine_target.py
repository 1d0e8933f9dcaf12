"""Workloads played against an engine in this process, beside the least that any cache could compute."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_target import EngineTarget, as_tokens
from least_possible import LeastPossible, least_possible
from rootstock.bench.play import Played, play
from rootstock.bench.rows import make_row, same_answers, table_of
from rootstock.bench.workloads import ALPHABET, SIZES, Sizes, make_workload
from rootstock.config import CacheConfig, EngineConfig
from rootstock.engine.build import Assembly, assemble
from rootstock.runtime.base import Batch
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime

SIZES_OF_A_TEST = Sizes(4, 3, turns=3, prefix_tokens=100, new_tokens=(3, 9), answer_tokens=6)
RUN = ("2031-04-02T10:00:00+00:00", "tiny")


def engine_of(runtime: FakeRuntime | None = None, *, enabled: bool = True) -> Assembly:
    runtime = runtime or FakeRuntime(PADDED_LOGITS, 8192)
    return assemble(
        runtime, ByteTokenizer(), CacheConfig(budget_bytes=1 << 20, enabled=enabled), EngineConfig()
    )


def played_on(made: Assembly, name: str = "agents") -> Played:
    with made.engine:
        return play(
            make_workload(name, 0, SIZES_OF_A_TEST), EngineTarget(made.engine, made.description.vocab_size)
        )


def computed(played: Played) -> int:
    return sum(sample.prompt_tokens - sample.cached_tokens for sample in played.flat)


@pytest.mark.parametrize("name", SIZES)
def test_every_request_of_a_workload_is_answered_in_turn(name: str) -> None:
    played = played_on(engine_of(), name)
    assert [len(conversation) for conversation in played.samples] == [3] * 4
    for conversation in played.samples:
        for sample in conversation:
            assert sample.error is None
            assert len(sample.answer_tokens) == len(sample.token_times) == sample.completion_tokens == 6
        for before, after in itertools.pairwise(conversation):
            history = np.concatenate([before.prompt, before.answer_tokens])
            assert np.array_equal(after.prompt[: len(history)], history)
            assert before.ended_at <= after.sent_at


def test_no_more_conversations_are_open_than_the_workload_says() -> None:
    spans = [(each[0].sent_at, each[-1].ended_at) for each in played_on(engine_of()).samples]
    at_once = [sum(begin <= start < end for begin, end in spans) for start, _ in spans]
    assert max(at_once) == SIZES_OF_A_TEST.at_once


def test_a_cold_cache_computes_the_least_possible() -> None:
    played = played_on(engine_of())
    assert computed(played) == least_possible(played).tokens


def test_a_warm_cache_computes_one_token_a_request_and_answers_the_same() -> None:
    workload, made = make_workload("chat", 0, SIZES_OF_A_TEST), engine_of()
    with made.engine:
        target = EngineTarget(made.engine, made.description.vocab_size)
        cold, warm = play(workload, target), play(workload, target)
    assert computed(warm) == least_possible(warm, cold).tokens == workload.requests
    before, after = make_row(*RUN, workload, "cold", cold), make_row(*RUN, workload, "warm", warm)
    assert before.answers_digest == after.answers_digest
    assert "the same" in same_answers([before, after])


def test_without_the_cache_every_prompt_token_is_computed_and_the_answers_stay() -> None:
    workload = make_workload("agents", 0, SIZES_OF_A_TEST)
    on = make_row(*RUN, workload, "cold", played_on(engine_of()))
    off = make_row(*RUN, workload, "off", played_on(engine_of(enabled=False)))
    assert off.cached_share == 0.0
    assert off.answers_digest == on.answers_digest


def test_a_request_that_fails_ends_its_conversation_and_is_counted() -> None:
    failures = iter([None] * 4 + [RuntimeError("a step that fails")])

    def fault(batch: Batch) -> None:
        if (error := next(failures, None)) is not None:
            raise error

    workload = make_workload("agents", 0, SIZES_OF_A_TEST)
    played = played_on(engine_of(FakeRuntime(PADDED_LOGITS, 8192, fault=fault)))
    row = make_row(*RUN, workload, "cold", played)
    assert row.failed >= 1
    assert any("RuntimeError" in (sample.error or "") for sample in played.flat)
    assert "failed" in str(table_of([row]).caption)


def test_different_symbols_are_different_tokens() -> None:
    tokens = as_tokens(np.arange(ALPHABET, dtype=np.int32), 4096)
    assert len(set(tokens.tolist())) == ALPHABET


def test_a_small_vocabulary_is_never_exceeded() -> None:
    tokens = as_tokens(np.arange(ALPHABET, dtype=np.int32), 97)
    assert 0 <= tokens.min() <= tokens.max() < 97


_PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12)


@given(_PROMPTS)
def test_the_least_possible_is_the_number_of_distinct_prefixes_and_of_known_prompts(
    prompts: list[list[int]],
) -> None:
    least, prefixes, known = LeastPossible(), set(), 0
    for prompt in prompts:
        new = {tuple(prompt[: i + 1]) for i in range(len(prompt))} - prefixes
        known += not new
        prefixes |= new
        least.asked(np.array(prompt))
    assert least.tokens == len(prefixes) + known


@given(_PROMPTS, st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=12, max_size=12))
def test_what_answers_computed_is_free_but_for_their_last_token(
    prompts: list[list[int]], answers: list[list[int]]
) -> None:
    least, prefixes, cost = LeastPossible(), set(), 0
    for prompt, answer in zip(prompts, answers, strict=False):
        new = {tuple(prompt[: i + 1]) for i in range(len(prompt))} - prefixes
        cost += max(1, len(new))
        whole = (prompt + answer)[:-1]
        prefixes |= new | {tuple(whole[: i + 1]) for i in range(len(whole))}
        least.asked(np.array(prompt))
        least.answered(np.array(prompt + answer))
    assert least.tokens == cost
