"""Predictions of prefills and loads, against machines whose prices are known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from rootstock.engine.cost_model import LoadSpeed, PrefillSpeed

CHUNK = 512
QUERIES = [(0, 300), (0, 4096), (0, 16384), (2048, 2560), (8192, 8500), (8192, 16384), (15000, 15100)]
LOADS = [(1, 40_000), (1, 4 << 20), (64, 64 << 20), (200, 8_000_000), (1000, 1 << 30)]


@dataclass
class Machine:
    """Forwards and loads at known prices, with noise."""

    rng: np.random.Generator
    forward_s: float = 4e-3
    token_s: float = 60e-6
    attended_s: float = 9e-9
    record_s: float = 120e-6
    byte_s: float = 1 / 900e6
    noise: float = 0.05
    slower: float = 1.0

    def prefill_s(self, segments: list[tuple[int, int]]) -> float:
        tokens = sum(new for _, new in segments)
        attended = sum(sum(range(past, past + new)) for past, new in segments)
        return self.slower * (self.forward_s + self.token_s * tokens + self.attended_s * attended)

    def job_s(self, first: int, end: int) -> float:
        return sum(self.prefill_s([(at, min(CHUNK, end - at))]) for at in range(first, end, CHUNK))

    def load_s(self, records: int, payload_bytes: int) -> float:
        return self.slower * (self.record_s * records + self.byte_s * payload_bytes)

    def noisy(self, seconds: float) -> float:
        return seconds * math.exp(self.rng.normal(0.0, self.noise))

    def forwards(self) -> Iterator[list[tuple[int, int]]]:
        """Prompts of 100 to 16384 tokens, in chunks, now and then with the end of another prompt or a few decodes."""
        while True:
            end = int(math.exp(self.rng.uniform(math.log(100), math.log(16384))))
            for past in range(0, end, CHUNK):
                segments = [(past, min(CHUNK, end - past))]
                if self.rng.random() < 0.2:
                    segments.append((int(self.rng.integers(0, 4000)), int(self.rng.integers(1, 200))))
                yield segments

    def loads(self) -> Iterator[tuple[int, int]]:
        while True:
            records = int(self.rng.integers(1, 200))
            yield records, records * int(math.exp(self.rng.uniform(math.log(20_000), math.log(2 << 20))))


class Speeds:
    """Both cost models, taught by a machine."""

    def __init__(self) -> None:
        self.prefill, self.load = PrefillSpeed(), LoadSpeed()

    def teach(self, machine: Machine, count: int, hiccups: float = 0.0) -> None:
        """Observes so many forwards and loads. A share of `hiccups` takes five times as long."""

        def measured(seconds: float) -> float:
            return machine.noisy(seconds) * (5.0 if machine.rng.random() < hiccups else 1.0)

        for _, segments in zip(range(count), machine.forwards(), strict=False):
            self.prefill.observe(segments, measured(machine.prefill_s(segments)))
        for _, load in zip(range(count), machine.loads(), strict=False):
            self.load.observe(*load, measured(machine.load_s(*load)))

    def worst_error(self, machine: Machine) -> float:
        """Returns the largest relative error over all queries and loads."""
        predicted = [self.prefill.seconds(*query, CHUNK) for query in QUERIES]
        predicted += [self.load.seconds(*load) for load in LOADS]
        right = [machine.job_s(*query) for query in QUERIES] + [machine.load_s(*load) for load in LOADS]
        assert None not in predicted
        return max(
            abs(one / other - 1.0) for one, other in zip(predicted, right, strict=True) if one is not None
        )


@pytest.fixture
def speeds() -> Speeds:
    return Speeds()


@pytest.fixture(params=range(5))
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(np.random.default_rng(request.param))


def test_there_is_no_prediction_before_an_observation() -> None:
    prefill, load = PrefillSpeed(), LoadSpeed()
    assert prefill.seconds(0, 100, CHUNK) is None
    assert prefill.tokens_per_s_at(0) is None
    assert load.seconds(1, 100, waiting_bytes=100) is None
    assert load.bytes_per_s is None


def test_one_forward_is_a_price_per_token() -> None:
    speed = PrefillSpeed()
    speed.observe([(0, 400), (1000, 100)], 0.5)
    assert speed.seconds(0, 500, CHUNK) == pytest.approx(0.5)
    assert speed.seconds(3000, 5000, CHUNK) == pytest.approx(2.0)
    assert speed.tokens_per_s_at(0) == pytest.approx(1000.0)


def test_one_load_is_a_bandwidth() -> None:
    speed = LoadSpeed()
    speed.observe(4, 8_000_000, 0.01)
    assert speed.seconds(1, 2_000_000) == pytest.approx(0.0025)
    assert speed.seconds(1, 2_000_000, waiting_bytes=8_000_000) == pytest.approx(0.0125)
    assert speed.bytes_per_s == pytest.approx(800e6)


def test_thirty_observations_predict_any_job_within_a_tenth(machine: Machine, speeds: Speeds) -> None:
    speeds.teach(machine, 30)
    assert speeds.worst_error(machine) < 0.10


def test_exact_prices_are_found_exactly(speeds: Speeds) -> None:
    machine = Machine(np.random.default_rng(0), noise=0.0)
    speeds.teach(machine, 60)
    assert speeds.worst_error(machine) < 0.01


@pytest.mark.parametrize("slower", [3.0, 1 / 3])
def test_twenty_observations_show_that_the_machine_has_changed(
    machine: Machine, speeds: Speeds, slower: float
) -> None:
    speeds.teach(machine, 100)
    machine.slower = slower
    speeds.teach(machine, 20)
    assert speeds.worst_error(machine) < 0.15


def test_one_hiccup_changes_next_to_nothing(machine: Machine, speeds: Speeds) -> None:
    speeds.teach(machine, 40)
    before = [speeds.prefill.seconds(first, end, CHUNK) or 0.0 for first, end in QUERIES]
    speeds.prefill.observe([(4096, CHUNK)], 5.0 * machine.prefill_s([(4096, CHUNK)]))
    after = [speeds.prefill.seconds(first, end, CHUNK) or 0.0 for first, end in QUERIES]
    assert after == pytest.approx(before, rel=0.03)


def test_one_in_ten_forwards_may_hiccup(machine: Machine, speeds: Speeds) -> None:
    speeds.teach(machine, 100, hiccups=0.1)
    assert speeds.worst_error(machine) < 0.15


def test_a_cold_first_forward_is_soon_forgotten(machine: Machine, speeds: Speeds) -> None:
    speeds.prefill.observe([(0, CHUNK)], 20.0 * machine.prefill_s([(0, CHUNK)]))
    speeds.load.observe(10, 1_000_000, 20.0 * machine.load_s(10, 1_000_000))
    speeds.teach(machine, 30)
    assert speeds.worst_error(machine) < 0.15


def test_depth_is_learnt_when_it_comes(machine: Machine) -> None:
    """After short prompts only, a long one is no hiccup."""
    speed = PrefillSpeed()
    for _ in range(60):
        tokens = int(machine.rng.integers(50, CHUNK))
        speed.observe([(0, tokens)], machine.noisy(machine.prefill_s([(0, tokens)])))
    for past in range(0, 32 * CHUNK, CHUNK):
        speed.observe([(past, CHUNK)], machine.noisy(machine.prefill_s([(past, CHUNK)])))
    for first, end in QUERIES:
        assert speed.seconds(first, end, CHUNK) == pytest.approx(machine.job_s(first, end), rel=0.2)


def test_prices_that_cannot_be_told_apart_are_right_in_sum(machine: Machine) -> None:
    """With chunks and records of one size, only the sum of the two prices is known."""
    prefill, load = PrefillSpeed(), LoadSpeed()
    for number in range(200):
        segments = [(number % 32 * CHUNK, CHUNK)]
        prefill.observe(segments, machine.noisy(machine.prefill_s(segments)))
        load.observe(
            1 + number % 7,
            (1 + number % 7) << 20,
            machine.noisy(machine.load_s(1 + number % 7, (1 + number % 7) << 20)),
        )
    for first, end in [(0, 4096), (4096, 16384)]:
        assert prefill.seconds(first, end, CHUNK) == pytest.approx(machine.job_s(first, end), rel=0.1)
    assert load.seconds(5, 5 << 20) == pytest.approx(machine.load_s(5, 5 << 20), rel=0.1)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
def test_no_scale_of_seconds_is_special(machine: Machine, speeds: Speeds, scale: float) -> None:
    machine.slower = scale
    speeds.teach(machine, 40)
    assert speeds.worst_error(machine) < 0.1


def test_predictions_hold_for_very_large_numbers() -> None:
    machine = Machine(np.random.default_rng(0), noise=0.0)
    prefill, load = PrefillSpeed(), LoadSpeed()
    for past in range(0, 1_000_000, 20_000):
        prefill.observe([(past, 20_000)], machine.prefill_s([(past, 20_000)]))
        load.observe(past + 1, past << 30, machine.load_s(past + 1, past << 30))
    expected = machine.prefill_s([(500_000, 20_000)])
    assert prefill.seconds(500_000, 520_000, 20_000) == pytest.approx(expected, rel=0.02)
    assert load.seconds(1000, 1 << 50) == pytest.approx(machine.load_s(1000, 1 << 50), rel=0.02)


def test_no_answer_is_ever_negative_or_not_a_number() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        prefill, load = PrefillSpeed(), LoadSpeed()
        for _ in range(60):
            seconds = float(rng.choice([0.0, -1.0, math.nan, math.inf, *(10.0 ** rng.uniform(-8, 6, 12))]))
            shape = [
                (int(10 ** rng.uniform(0, 6)) - 1, int(10 ** rng.uniform(0, 5)))
                for _ in range(rng.integers(0, 4))
            ]
            prefill.observe(shape, seconds)
            load.observe(int(rng.integers(0, 3)), int(10 ** rng.uniform(0, 12)) - 1, seconds)
            answers = [
                prefill.seconds(first, end, CHUNK) for first, end in [*QUERIES, (0, 0), (0, 1), (5, 3)]
            ]
            answers += [
                load.seconds(records, size, waiting_bytes=size) for records, size in [*LOADS, (0, 0), (1, 0)]
            ]
            assert all(answer is None or (answer >= 0.0 and math.isfinite(answer)) for answer in answers)
            rates = [prefill.tokens_per_s_at(0), prefill.tokens_per_s_at(100_000), load.bytes_per_s]
            assert all(rate is None or (rate > 0.0 and math.isfinite(rate)) for rate in rates)


def test_times_that_are_not_positive_are_ignored() -> None:
    prefill, load = PrefillSpeed(), LoadSpeed()
    for seconds in (0.0, -1.0, math.nan, math.inf):
        prefill.observe([(0, 10)], seconds)
        load.observe(1, 10, seconds)
    prefill.observe([], 1.0)
    load.observe(0, 0, 1.0)
    assert prefill.seconds(0, 10, CHUNK) is None
    assert load.seconds(1, 10) is None


def test_the_deeper_the_slower(machine: Machine, speeds: Speeds) -> None:
    speeds.teach(machine, 60)
    rates = [speeds.prefill.tokens_per_s_at(depth) or 0.0 for depth in (0, 8192, 65536)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.5 * rates[2] > 0.0


def test_many_small_records_load_more_slowly_than_few_large_ones(machine: Machine, speeds: Speeds) -> None:
    speeds.teach(machine, 60)
    load = speeds.load
    assert (load.seconds(1000, 1 << 24) or 0.0) > 2.0 * (load.seconds(1, 1 << 24) or math.inf)
    assert (load.bytes_per_s or 0.0) < 900e6
