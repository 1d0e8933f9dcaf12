"""With a target for the time between two tokens, steps with decodes take no more prefill than fits.

The forwards of the oracle take as long as the test's clock says.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.helpers import Bench, Client, numbers
from rootstock.config import EngineConfig
from rootstock.engine.cost_model import StepSize
from rootstock.engine.pacing import LEAST_TOKENS, Pacing
from rootstock.errors import InvalidOption
from rootstock.options import parse_seconds
from rootstock.runtime.base import Batch

TARGET_S = 0.1


class Machine:
    """A clock that only forwards move. A forward has a price, and so have prompt tokens and attended positions."""

    def __init__(self, forward_s: float = 0.02, token_s: float = 400e-6, attended_s: float = 200e-9) -> None:
        self.now = 0.0
        self.steps: list[tuple[int, int, float]] = []  # decodes, tokens of prompts, seconds
        self.slower = 1.0
        self._prices = forward_s, token_s, attended_s

    def clock(self) -> float:
        return self.now

    def __call__(self, batch: Batch) -> None:
        forward_s, token_s, attended_s = self._prices
        prefills = [s for s in batch.segments if len(s.tokens) > 1]
        decodes = [s for s in batch.segments if len(s.tokens) == 1]
        tokens = sum(len(s.tokens) for s in prefills)
        attended = sum((2 * s.past + len(s.tokens)) * len(s.tokens) / 2 for s in prefills)
        seconds = forward_s + token_s * tokens + attended_s * attended
        seconds += sum(1e-3 + 1e-7 * s.past for s in decodes)
        self.now += seconds * self.slower
        self.steps.append((len(decodes), tokens, seconds * self.slower))

    @property
    def mixed(self) -> list[tuple[int, int, float]]:
        return [step for step in self.steps if step[0] and step[1]]


def paced(machine: Machine, target_s: float | None = TARGET_S) -> Bench:
    bench = Bench(8000, 16, fault=machine, clock=machine.clock)
    config = EngineConfig(max_batch=8, chunk_tokens=512, itl_target_s=target_s, idle_chunk_tokens=512)
    bench.engine = type(bench.engine)(bench.runtime, bench.cache, config, clock=machine.clock)
    return bench


def mixed_traffic(bench: Bench) -> list[Client]:
    """Runs one request that decodes all the time, and long prompts that arrive beside it."""
    clients = [bench.ask(numbers(0, 700), max_tokens=400)]
    bench.run(steps=6)
    for seed in range(1, 9):
        clients.append(bench.ask(numbers(seed, 3000), max_tokens=3))
        bench.run(steps=30)
    bench.run()
    return clients


@pytest.mark.behaviour(48)
def test_steps_with_decodes_keep_to_the_target_and_answers_do_not_change() -> None:
    machine = Machine()
    bench = paced(machine)
    clients = mixed_traffic(bench)
    late = [seconds for _, _, seconds in machine.mixed[6:]]  # the first ones are for learning
    assert len(late) > 100
    assert max(late) <= TARGET_S
    assert np.median(late) > 0.5 * TARGET_S, "the target's time is not used"
    unpaced_machine = Machine()
    unpaced = mixed_traffic(paced(unpaced_machine, None))
    assert max(seconds for _, _, seconds in unpaced_machine.mixed) > 1.5 * TARGET_S
    assert [client.tokens for client in clients] == [client.tokens for client in unpaced]


def test_without_decodes_a_chunk_is_as_large_as_it_may_be() -> None:
    machine = Machine()
    bench = paced(machine)
    mixed_traffic(bench)
    machine.steps.clear()
    bench.answer(numbers(20, 2048), max_tokens=1)
    assert [tokens for _, tokens, _ in machine.steps] == [512, 512, 512, 512]


def test_a_target_that_cannot_be_kept_does_not_starve_prefill() -> None:
    machine = Machine(forward_s=0.5)
    bench = paced(machine)
    decoding = bench.ask(numbers(0, 100), max_tokens=500)
    bench.run(steps=5)
    newcomer = bench.ask(numbers(1, 1000), max_tokens=2)
    bench.run(steps=1000 // LEAST_TOKENS + 5)
    assert newcomer.finished.reason == "length"
    assert not decoding.terminals
    assert {tokens for _, tokens, _ in machine.mixed[1:-1]} == {LEAST_TOKENS}


@pytest.mark.parametrize("target_s", [TARGET_S, None], ids=["paced", "not paced"])
def test_short_prompts_pass_a_long_one_and_do_not_starve_it(target_s: float | None) -> None:
    machine = Machine()
    bench = paced(machine, target_s)
    mixed_traffic(bench)
    bench.ask(numbers(30, 100), max_tokens=2000)
    bench.run(steps=3)
    long = bench.ask(numbers(31, 20_000), max_tokens=1)
    bench.run(steps=2)
    passed = 0
    for number in range(400):
        if long.terminals:
            break
        short = bench.ask(numbers(100 + number, 12), max_tokens=1)
        bench.run(steps=2)
        passed += bool(short.terminals)
    assert long.finished.reason == "length"
    assert passed > 10


def test_several_prompts_share_the_room_of_a_step() -> None:
    machine = Machine()
    bench = paced(machine)
    mixed_traffic(bench)
    bench.ask(numbers(30, 100), max_tokens=300)
    bench.run(steps=3)
    machine.steps.clear()
    short = [bench.ask(numbers(40 + i, 40), max_tokens=2) for i in range(6)]
    bench.run()
    assert all(client.finished.reason == "length" for client in short)
    assert max(seconds for _, _, seconds in machine.steps) <= TARGET_S
    assert max(tokens for _, tokens, _ in machine.mixed) > 40, "more than one prompt in a step"


def test_a_machine_that_becomes_slower_gets_smaller_chunks() -> None:
    machine = Machine()
    bench = paced(machine)
    bench.ask(numbers(0, 300), max_tokens=3000)
    bench.run(steps=10)
    bench.ask(numbers(1, 6000), max_tokens=1)
    bench.run(steps=20)
    before = machine.mixed[-1][1]
    machine.slower = 2.0
    bench.ask(numbers(2, 6000), max_tokens=1)
    bench.run(steps=60)
    assert machine.mixed[-1][1] < before
    assert max(seconds for _, _, seconds in machine.mixed[-20:]) <= 1.05 * TARGET_S


def test_stats_have_the_room_of_the_last_step_with_decodes() -> None:
    bench = paced(Machine())
    assert bench.engine.stats().paced_tokens is None
    mixed_traffic(bench)
    told = bench.engine.stats().paced_tokens
    assert told is not None
    assert LEAST_TOKENS <= told < 512


def test_prefill_is_not_limited_before_a_measurement() -> None:
    assert Pacing(0.001, float).prefill_tokens(StepSize(0, 0, 1, 10), 0, 512) == 512


def test_times_are_read_with_their_unit_and_refused_with_an_example() -> None:
    assert parse_seconds("100ms", "--itl-target") == pytest.approx(0.1)
    assert parse_seconds(" 0.25 s ", "--itl-target") == pytest.approx(0.25)
    for wrong in ("100", "fast", "-1s", "1y", ""):
        with pytest.raises(InvalidOption, match="100ms"):
            parse_seconds(wrong, "--itl-target")
    with pytest.raises(InvalidOption, match="more than 0"):
        EngineConfig(itl_target_s=0.0)
