"""C4: load or recompute. The same requests on a tier slowed to five speeds: the engine's choice may take at most 1.1
times as long as the better way.

An engine and a disk tier, on a model of 80 million random weights in bfloat16. A load sleeps in proportion to its
bytes, so that the tier has a set bandwidth. The five bandwidths are multiples of the break-even, at which a cold
prompt takes as long to load as to compute. It is measured first, and two of the five are next to it.

A case is a prompt of which the disk holds all but the end, and memory nothing or the beginning: the rest then costs
more to compute, for the same bytes. Each case is timed three ways, in turn: forced to load, forced to compute,
and as the engine chooses.

The engine learns from ordinary use only: each speed has an engine of its own, which has computed the prompts once and
served each of them LEARNING times more by its own choice. It does not learn from forced requests.

Against noise, times are medians of rounds. A chosen load is the same work as a forced one, so both count as times of
that way, and the time of the choice is the mean of the chosen ways (the measured time where a load was begun and
given up). Near the break-even either choice is fine, and the ratio shows that. The ratio of chosen requests alone is
given as well. If the machine's speed changes during the measurement, right estimates become wrong: look at
`cpu_share`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from common import argument_parser, at_most, conclude
from llamas import VOCAB, say, write_llama

from asking import generate, greedy
from rootstock.cache.explain import LoadChoice
from rootstock.cache.types import Tokens
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.build import build_engine
from rootstock.engine.engine import Engine

SHOW = "C4"
ROUNDS = 3
MOST = 1.1
LEARNING = 2
SPEEDS = (4.0, 1.3, 0.8, 0.5, 0.25)  # of the break-even
TAIL_TOKENS = 48  # after the stored ones, new ones in each request
POOL_BYTES = 2**30

Way = Literal["load", "compute"]


@dataclass(frozen=True)
class Case:
    stored: int  # tokens on the disk
    in_memory: int  # number of first tokens that memory has as well

    @property
    def name(self) -> str:
        return f"{self.in_memory}_to_{self.stored}"


CASES = (Case(1024, 0), Case(2560, 0), Case(5120, 0), Case(5120, 2560))


@dataclass(frozen=True)
class Timed:
    ttft_s: float
    load_s: float  # of the load itself
    cpu_share: float  # of the process's threads; well below 1 in a prefill: other processes were busy
    choice: LoadChoice | None
    gave_up: bool  # the load took far longer than predicted, and the prompt was computed

    @property
    def loads(self) -> bool:
        return self.choice is not None and self.choice.load


@dataclass
class Times:
    """Times of one case at one speed, round by round."""

    load: list[Timed] = field(default_factory=list)
    compute: list[Timed] = field(default_factory=list)
    chosen: list[Timed] = field(default_factory=list)
    in_memory: list[Timed] = field(default_factory=list)  # with the whole prompt in memory

    def way_s(self, way: Way) -> float:
        forced = self.load if way == "load" else self.compute
        return statistics.median(timed.ttft_s for timed in [*forced, *self.chose(way)])

    def chose(self, way: Way) -> list[Timed]:
        return [t for t in self.chosen if not t.gave_up and t.loads == (way == "load")]

    @property
    def better_s(self) -> float:
        return min(self.way_s("load"), self.way_s("compute"))

    @property
    def ratio(self) -> float:
        ways = [t.ttft_s if t.gave_up else self.way_s("load" if t.loads else "compute") for t in self.chosen]
        return statistics.mean(ways) / self.better_s

    @property
    def measured_ratio(self) -> float:
        return statistics.median(timed.ttft_s for timed in self.chosen) / self.better_s


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--speeds", default=",".join(map(str, SPEEDS)), help="times the break-even")
    options.add_argument("--threads", type=int, help="of the model; as many as torch takes unless given")
    given = options.parse_args()
    figures: dict[str, Any] = {"threads": given.threads or os.cpu_count(), "rounds": given.rounds}
    everything: dict[str, Times] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_llama(Path(folder) / "model")
        with Bench(model, Path(folder) / "even", given.threads, None) as bench:
            even = bench.break_even_bytes_per_s()
        say(f"break-even: a tier of {even / 1e6:.1f} MB/s loads as fast as this machine computes")
        figures["break_even_mb_per_s"] = round(even / 1e6, 2)
        for speed in map(float, given.speeds.split(",")):
            with Bench(model, Path(folder) / f"{speed}", given.threads, speed * even) as bench:
                times = bench.measure(given.rounds)
                choices = dict(bench.engine.stats().tier.counters.choices)  # type: ignore[union-attr]
            figures[f"x{speed}_choices"] = choices
            for case, of_case in times.items():
                everything[f"x{speed}_{case.name}"] = of_case
            describe(speed, speed * even, times)
    figures["cases"] = {name: of(of_case) for name, of_case in everything.items()}
    figures["cpu_share"] = round(
        statistics.median(t.cpu_share for each in everything.values() for t in each.compute), 3
    )
    figures["worst_ratio"] = round(max(of_case.ratio for of_case in everything.values()), 4)
    figures["worst_ratio_of_chosen_alone"] = round(max(t.measured_ratio for t in everything.values()), 4)
    figures["median_ratio"] = round(statistics.median(t.ratio for t in everything.values()), 4)
    for key in ("load_estimate", "compute_estimate"):
        off = [value for name in everything if (value := figures["cases"][name][f"{key}_over_measured"])]
        figures[f"{key}_over_measured"] = [min(off), statistics.median(off), max(off)]
    conclude(SHOW, figures, {"worst_ratio": at_most(MOST)})


def of(times: Times) -> dict[str, Any]:
    hit_s = statistics.median(timed.ttft_s for timed in times.in_memory)
    # The engine's estimates at its choices.
    estimates = [timed.choice for timed in times.chosen if timed.choice is not None]
    load = [c.load_s for c in estimates if c.load_s is not None]
    compute = [c.compute_s for c in estimates if c.compute_s is not None]
    load_s = statistics.median(timed.load_s for timed in times.load)
    return {
        "load_ms": round(times.way_s("load") * 1e3, 1),
        "compute_ms": round(times.way_s("compute") * 1e3, 1),
        "chosen_ms": round(statistics.median(timed.ttft_s for timed in times.chosen) * 1e3, 1),
        "in_memory_ms": round(hit_s * 1e3, 1),
        "loads_chosen": f"{len(times.chose('load'))}/{len(times.chosen)}",
        "ratio": round(times.ratio, 4),
        "load_estimate_over_measured": round(statistics.median(load) / load_s, 3) if load else None,
        "compute_estimate_over_measured": round(
            statistics.median(compute) / (times.way_s("compute") - hit_s), 3
        )
        if compute
        else None,
    }


def describe(speed: float, bytes_per_s: float, times: dict[Case, Times]) -> None:
    say(f"\n{speed} times the break-even, {bytes_per_s / 1e6:.1f} MB/s")
    say(f"  {'tokens':>14} {'load':>9} {'compute':>9} {'chosen':>9}  {'loads':>5}  ratio  estimates/measured")
    for case, of_case in times.items():
        f = of(of_case)
        say(
            f"  {case.in_memory:>6} – {case.stored:<5} {f['load_ms']:>6.0f} ms {f['compute_ms']:>6.0f} ms "
            f"{f['chosen_ms']:>6.0f} ms  {f['loads_chosen']:>5}  {f['ratio']:.3f}  load "
            f"{f['load_estimate_over_measured']}, compute {f['compute_estimate_over_measured']}"
        )


# ---- an engine on a slow tier


class Bench:
    def __init__(self, model: Path, disk: Path, threads: int | None, bytes_per_s: float | None) -> None:
        built = build_engine(
            ModelConfig(str(model), device="cpu", dtype="bfloat16", threads=threads),
            CacheConfig(budget_bytes=POOL_BYTES),
            EngineConfig(),
            TierConfig(disk_dir=disk),
        )
        self.engine: Engine = built.engine
        self._tiering: Any = built.engine.tier_connector
        self._token_bytes = sum(family.bytes_per_token for family in built.description.families)
        if bytes_per_s is not None:
            reader = self._tiering._reader
            reader._load = slowed(reader._load, bytes_per_s)
        self._requests = 0

    def __enter__(self) -> Bench:
        self.engine.start()
        self.ask(random_tokens(0, 700), 4)  # first uses allocate
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.clear_cache()  # then nothing is written at the stop
        self.engine.stop()

    def break_even_bytes_per_s(self) -> float:
        """Returns the bandwidth at which a prompt of middle size takes as long to load as to compute."""
        tokens = 2560
        times = [self.ask(random_tokens(1 + i, tokens), 1).ttft_s for i in range(3)]
        return tokens * self._token_bytes / statistics.median(times)

    def measure(self, rounds: int) -> dict[Case, Times]:
        for case in CASES:
            self.ask(stored_part(case), 1)
        self.engine.call(self._tiering.flush)
        self._forget_memory()
        for _ in range(LEARNING):
            for case in CASES:
                self._prepare(case)
                self.ask(with_tail(case, self._requests), 1)
                self._forget_memory()
        times = {case: Times() for case in CASES}
        for number in range(rounds):
            for case, of_case in times.items():
                ways = ["load", "compute", "chosen"]
                for way in ways[number % 3 :] + ways[: number % 3]:
                    self._prepare(case)
                    timed = getattr(of_case, way)
                    timed.append(self._timed(case, way))
                    if way == "load":
                        with self._forced(None):
                            of_case.in_memory.append(self.ask(with_tail(case, self._requests), 1))
                    self._forget_memory()
        return times

    def _timed(self, case: Case, way: str) -> Timed:
        prompt = with_tail(case, self._requests)
        if way == "chosen":
            return self.ask(prompt, 1)
        with self._forced("load" if way == "load" else "compute"):
            return self.ask(prompt, 1)

    def _prepare(self, case: Case) -> None:
        """Fills memory with the case's beginning."""
        if case.in_memory:
            with self._forced("compute"):
                self.ask(stored_part(case)[: case.in_memory], 1)

    def _forget_memory(self) -> None:
        self.engine.call(self.engine._cache.clear)

    @contextmanager
    def _forced(self, way: Way | None) -> Iterator[None]:
        """Forces one way, from which the estimates learn nothing. None: there is nothing to choose."""
        tiering = self._tiering
        choose = tiering.choose

        def choose_so(match: Any) -> Any:
            reach, choice = choose(match)
            if choice is None:
                return reach, choice
            return reach, LoadChoice(
                choice.position,
                choice.records,
                choice.payload_bytes,
                choice.load_s,
                choice.compute_s,
                way == "load",
            )

        self.engine.call(lambda: setattr(tiering, "choose", choose_so))
        speeds = tiering.load_or_recompute
        speeds.observe_forward = speeds.observe_load = tiering._probe = lambda *_: None
        tiering.overdue = list  # no load is given up
        yield
        self.engine.call(lambda: None)  # the request's last reports have arrived
        for name in ("choose", "_probe", "overdue"):
            delattr(tiering, name)
        for name in ("observe_forward", "observe_load"):
            delattr(speeds, name)

    def ask(self, prompt: Tokens, tokens: int) -> Timed:
        self._requests += 1
        tiering = self._tiering
        load_s, before = tiering.counters.load_s, tiering.counters.loads.copy()
        choose, seen = tiering.choose, []

        def watched(match: Any) -> Any:
            hit, choice = choose(match)
            seen.append(choice)
            return hit, choice

        tiering.choose = watched
        heard = generate(self.engine, greedy(prompt, tokens))
        tiering.choose = choose
        choice = next((choice for choice in seen if choice is not None), None)
        cpu_share = heard.ttft_cpu_s / heard.ttft_s / torch.get_num_threads()
        ends = tiering.counters.loads - before
        load_s = tiering.counters.load_s - load_s
        timed = Timed(heard.ttft_s, load_s, cpu_share, choice, bool(ends["overdue"]))
        assert timed.loads == bool(ends["loaded"] or timed.gave_up), "the engine did not do as it chose"
        return timed


def slowed(load: Callable[..., Any], bytes_per_s: float) -> Callable[..., Any]:
    """Returns a load that takes as long as a tier of this bandwidth would, checks and copies included."""

    def slow(identity: Any, into: Any) -> Any:
        due = time.perf_counter() + sum(buffer.nbytes for buffer in into) / bytes_per_s
        result = load(identity, into)
        time.sleep(max(0.0, due - time.perf_counter()))
        return result

    return slow


def stored_part(case: Case) -> Tokens:
    return random_tokens(100 + CASES.index(case), case.stored)


def with_tail(case: Case, number: int) -> Tokens:
    return np.concatenate([stored_part(case), random_tokens(1000 + number, TAIL_TOKENS)])


def random_tokens(seed: int, count: int) -> Tokens:
    return np.random.default_rng([4, seed]).integers(64, VOCAB, count).astype(np.int32)


if __name__ == "__main__":
    main()
