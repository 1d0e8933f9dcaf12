"""Statistics of an engine: requests by phase, prompts by source, drafts by position."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from engine.helpers import Bench, numbers
from rootstock.config import TierConfig
from rootstock.engine.request import PromptTokens
from rootstock.engine.speculation.proposer import Proposer
from rootstock.units import MIB

PROMPT = numbers(1, 40)


def phases(bench: Bench) -> dict[str, int]:
    return {phase: count for phase, count in bench.engine.stats().phases.items() if count}


def prompts(bench: Bench) -> PromptTokens:
    return bench.engine.stats().counters.prompts


def test_each_request_is_in_one_phase() -> None:
    bench = Bench(max_batch=2, chunk_tokens=64)
    for prompt in (PROMPT, PROMPT, numbers(2, 9), numbers(3, 9)):
        bench.ask(prompt, 20)
    assert phases(bench) == {}, "the commands that add them have not run"
    bench.run(1)
    assert phases(bench) == {"decode": 2, "waiting_for_prefix": 1, "queued": 1}
    bench.run()
    assert phases(bench) == {}


def test_a_prompt_of_several_chunks_is_in_prefill() -> None:
    bench = Bench(chunk_tokens=8)
    bench.ask(PROMPT)
    bench.run(1)
    assert phases(bench) == {"prefill": 1}


def test_prompts_are_counted_once_by_the_source_of_their_tokens() -> None:
    bench = Bench()
    bench.answer(PROMPT)
    assert prompts(bench) == PromptTokens(computed=40)
    bench.answer([*PROMPT, 1, 2])
    assert prompts(bench) == PromptTokens(memory=40, computed=42)
    bench.answer(PROMPT, 0)  # caches a prompt and samples nothing
    assert prompts(bench) == PromptTokens(memory=40 + 39, computed=42 + 1)
    assert prompts(bench).all == 40 + 42 + 40


def test_a_preempted_request_counts_its_prompt_once() -> None:
    bench = Bench(blocks=12, max_batch=4)
    clients = [bench.ask(numbers(seed, 10), 12) for seed in range(3)]
    bench.run()
    bench.expect(*clients)
    assert bench.cache.counters.preemptions
    assert prompts(bench).all == 3 * 10


def test_tokens_that_were_loaded_from_the_disk_are_told_with_the_time_of_the_load(tmp_path: Path) -> None:
    tier = TierConfig(tmp_path, 64 * MIB)
    with_prefix = Bench(tier=tier)
    with_prefix.answer(PROMPT)
    with_prefix.engine.stop()
    ticks = itertools.count()  # far below the time after which a load counts as overdue
    bench = Bench(tier=tier, clock=lambda: next(ticks) * 1e-6)
    usage = bench.answer([*PROMPT, 1]).finished.usage
    bench.engine.stop()
    assert (usage.cached_tokens, usage.loaded_tokens, usage.loaded_from_host_tokens) == (40, 40, 0)
    assert 0 < usage.queued_s < usage.queued_s + usage.loading_s < usage.ttft_s < usage.total_s
    assert prompts(bench) == PromptTokens(disk=40, computed=1)


class Copying(Proposer):
    """A proposer of drafts that agree with the oracle up to a position."""

    def __init__(self, bench: list[Bench], right: int, length: int) -> None:
        self._bench, self._right, self._length = bench, right, length

    def drafts(self, sequences: Any, _leases: Any, room: int) -> list[Any]:
        found = []
        for sequence in sequences:
            following = self._bench[0].alone(sequence.tokens, self._length)
            wrong = [(token + 1) % 97 for token in following[self._right :]]
            found.append(np.array([*following[: self._right], *wrong][:room], np.int32))
        return found


def test_accepted_draft_tokens_are_counted_by_their_position() -> None:
    made: list[Bench] = []
    bench = Bench(proposer=Copying(made, right=2, length=3))
    made.append(bench)
    bench.expect(bench.answer(PROMPT, 10))  # the first token alone, then three a step
    counters = bench.engine.stats().counters
    assert counters.drafts == 3
    assert counters.accepted_by_position == [3, 3]
    assert counters.accepted_draft_tokens == 6
