"""Closed loop that plays a workload against a target: a conversation's next turn follows its last answer."""

from __future__ import annotations

import queue
import time
from collections import deque
from dataclasses import dataclass

from rootstock.bench.targets import Dialogue, Sample, Target
from rootstock.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class Played:
    samples: tuple[tuple[Sample, ...], ...]  # of each conversation, of each turn that was sent
    wall_s: float  # from the first request to the end of the last answer

    @property
    def flat(self) -> list[Sample]:
        return [sample for conversation in self.samples for sample in conversation]


def play(workload: Workload, target: Target) -> Played:
    """Plays all conversations. A conversation ends early if one of its requests fails."""
    waiting = deque(range(len(workload.conversations)))
    dialogues: dict[int, Dialogue] = {}
    samples: list[list[Sample]] = [[] for _ in workload.conversations]
    ended: queue.SimpleQueue[tuple[int, Sample]] = queue.SimpleQueue()

    def ask(index: int) -> None:
        turn = workload.conversations[index].turns[len(samples[index])]
        dialogues[index].ask(turn.new, turn.answer_tokens, lambda sample: ended.put((index, sample)))

    def open_next() -> None:
        index = waiting.popleft()
        dialogues[index] = target.open(workload.conversations[index].prefix)
        ask(index)

    began = time.monotonic()
    while waiting and len(dialogues) < workload.sizes.at_once:
        open_next()
    while dialogues:
        index, sample = ended.get()
        samples[index].append(sample)
        over = len(samples[index]) == len(workload.conversations[index].turns)
        if sample.error is None and not over:
            ask(index)
            continue
        del dialogues[index]
        if waiting:
            open_next()
    return Played(tuple(tuple(each) for each in samples), time.monotonic() - began)
