"""C5: cost of storing. The `agents` workload on a model with the disk tier, against the same without it.

Three ways to store: *back*, where memory is full of earlier agents at the start, and all of it is evicted and
written as new ones come; *through*, where all blocks are written when they are published; and *idle*, writing back
with enough memory, so that nothing is stored. Each way is two engines on one model, with and without the tier, that
play the same rounds in turn. A pair is judged by the ratio of its times, and a way by the median of its pairs. Every
round has agents of its own, for which the disk has nothing useful, so that loads cannot hide the cost. Loaded bytes
are a figure.

A further figure depends less on other load of the machine: the time of the engine's thread in tier calls, as a share
of the time without the tier.

The model has all cores, as in a server: on a spare core, the writer's thread would cost nothing.

Last, without a bar, the same agents play once more on an engine whose disk knows them and whose memory does not.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, at_least, conclude
from llamas import VOCAB, say, write_llama

from engine_target import EngineTarget
from rootstock.bench.play import play
from rootstock.bench.workloads import Sizes, Workload, make_workload
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.engine import Engine

SHOW = "C5"
ROUNDS = 5
LEAST = 0.97
AGENTS = Sizes(8, 8, turns=6, prefix_tokens=1024, new_tokens=(16, 96), answer_tokens=32)  # as in A6
# Memory for about one round: 1,024 tokens that all share and, at the end, some 520 of each agent.
SMALL_TOKENS = 1024 + 9 * 544


@dataclass(frozen=True)
class Way:
    name: str
    disk_write: str
    pool_tokens: int | None  # None: a server's default


WAYS = (Way("back", "back", SMALL_TOKENS), Way("through", "through", None), Way("idle", "back", None))


@dataclass
class Side:
    """Measurements of one engine of a pair, round by round."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of the process: the model, the engine, the writer
    engine_s: list[float] = field(default_factory=list)  # of the engine's thread in tier calls
    end_s: list[float] = field(default_factory=list)  # from the last answer until the queue is written
    computed_tokens: list[int] = field(default_factory=list)
    stored_bytes: list[int] = field(default_factory=list)
    loaded_bytes: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)  # records that did not fit the queue


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--ways", default=",".join(way.name for way in WAYS), help="comma-separated")
    options.add_argument("--threads", type=int, help="of the model; as many as torch takes unless given")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    figures: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "dtype": "bfloat16",
        "rounds": given.rounds,
    }
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        model = write_llama(Path(folder) / "model")
        for way in WAYS:
            if way.name in given.ways.split(","):
                figures |= compare(way, model, Path(folder) / "disk", given.rounds)
        figures |= warm(model, Path(folder) / "disk")
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    figures["cpu_share"] = round(
        cpu_s / wall_s / torch.get_num_threads(), 3
    )  # below 0.8: the machine was busy
    judged = [figures[name] for way in WAYS if (name := f"{way.name}_ratio") in figures]
    figures["worst_ratio"] = min(judged)
    conclude(SHOW, figures, {"worst_ratio": at_least(LEAST)})


def compare(way: Way, model: Path, disk: Path, rounds: int) -> dict[str, Any]:
    with engine(model, way, disk) as on, engine(model, way, None) as off:
        for each in (on, off):  # first uses allocate
            play_once(each, agents(0), Side())
        sides = {True: Side(), False: Side()}
        for i in range(rounds):
            # The sides change places, so that neither always finds the machine in the other's state.
            for with_tier in (i % 2 == 0, i % 2 == 1):
                play_once(on if with_tier else off, agents(1 + i), sides[with_tier])
    shutil.rmtree(disk)
    with_tier, without = sides[True], sides[False]
    ratios = [off_s / on_s for on_s, off_s in zip(with_tier.wall_s, without.wall_s, strict=True)]
    cpu = [on_s / off_s for on_s, off_s in zip(with_tier.cpu_s, without.cpu_s, strict=True)]
    share = [on_s / off_s for on_s, off_s in zip(with_tier.engine_s, without.wall_s, strict=True)]
    measured = {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "cpu_times": round(statistics.median(cpu), 4),
        "engine_share": round(statistics.median(share), 4),
        "seconds": round(statistics.median(with_tier.wall_s), 3),
        "seconds_off": round(statistics.median(without.wall_s), 3),
        "written_after_s": round(statistics.median(with_tier.end_s), 3),
        "stored_mb": round(statistics.median(with_tier.stored_bytes) / 1e6, 1),
        "loaded_mb": round(max(with_tier.loaded_bytes) / 1e6, 1),
        "refused_records": max(with_tier.refused),
        "computed_tokens": round(statistics.median(with_tier.computed_tokens)),
        "computed_tokens_off": round(statistics.median(without.computed_tokens)),
    }
    say(
        f"{way.name}: {measured['seconds']} s with the tier, {measured['seconds_off']} s without; throughput "
        f"{measured['ratio']} {measured['ratio_spread']}, CPU {measured['cpu_times']} times, "
        f"{measured['engine_share']:.2%} on the engine's thread; {measured['stored_mb']} MB stored a round, "
        f"{measured['loaded_mb']} MB loaded"
    )
    return {f"{way.name}_{name}": figure for name, figure in measured.items()}


def warm(model: Path, disk: Path) -> dict[str, Any]:
    """Plays the same agents before and after a restart that leaves only the disk."""
    first, again = Side(), Side()
    for side in (first, again):
        with engine(model, WAYS[2], disk) as each:
            play_once(each, agents(0), side)
    shutil.rmtree(disk)
    say(
        f"with a warm disk: {again.wall_s[0]:.2f} s, {again.loaded_bytes[0] / 1e6:.0f} MB loaded, "
        f"{again.computed_tokens[0]:,} tokens computed; cold {first.wall_s[0]:.2f} s"
    )
    return {
        "warm_disk_seconds": round(again.wall_s[0], 3),
        "warm_disk_times_faster": round(first.wall_s[0] / again.wall_s[0], 3),
        "warm_disk_loaded_mb": round(again.loaded_bytes[0] / 1e6, 1),
        "warm_disk_computed_tokens": again.computed_tokens[0],
    }


@contextmanager
def engine(model: Path, way: Way, disk: Path | None) -> Iterator[Assembly]:
    token_bytes = 2 * 13 * 5 * 64 * 2
    budget = None if way.pool_tokens is None else way.pool_tokens * token_bytes
    built = build_engine(
        ModelConfig(str(model), device="cpu", dtype="bfloat16", threads=torch.get_num_threads()),
        CacheConfig(budget_bytes=budget),
        EngineConfig(),
        TierConfig(disk_dir=disk, disk_write=way.disk_write),
    )
    with built.engine:
        yield built
    gc.collect()


def agents(seed: int) -> Workload:
    return make_workload("agents", seed, AGENTS)


def play_once(built: Assembly, workload: Workload, side: Side) -> None:
    engine, before = built.engine, built.engine.stats()
    cpu_s = time.process_time()
    with watched(engine) as spent_s:
        played = play(workload, EngineTarget(engine, VOCAB))
    ended_s = time.perf_counter()
    after = engine.stats()
    assert all(sample.error is None for sample in played.flat)
    while (tier := engine.stats().tier) is not None and tier.waiting_store_bytes:
        time.sleep(0.005)
    side.end_s.append(time.perf_counter() - ended_s)
    side.wall_s.append(played.wall_s)
    # After everything is written, so that all of the writer's work counts.
    side.cpu_s.append(time.process_time() - cpu_s)
    side.engine_s.append(sum(spent_s))
    side.computed_tokens.append(after.counters.computed_tokens - before.counters.computed_tokens)
    if tier is not None:
        assert before.tier is not None
        side.stored_bytes.append(tier.stored_bytes - before.tier.stored_bytes)
        side.loaded_bytes.append(tier.counters.loaded_bytes - before.tier.counters.loaded_bytes)
        side.refused.append(
            tier.counters.stores_refused.total() - before.tier.counters.stores_refused.total()
        )


@contextmanager
def watched(engine: Engine) -> Iterator[list[float]]:
    """Records the seconds of each call of the engine to its tiers."""
    spent_s: list[float] = []
    tiering: Any = engine.tier_connector
    if tiering is None:
        yield spent_s
        return

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            spent_s.append(time.perf_counter() - began)
            return result

        return call

    timed_methods = [
        *((tiering, name) for name in ("store", "follow", "choose")),
        (tiering.load_or_recompute, "observe_forward"),
    ]
    for owner, name in timed_methods:
        setattr(owner, name, timed(getattr(owner, name)))
    yield spent_s
    for owner, name in timed_methods:
        delattr(owner, name)


if __name__ == "__main__":
    main()
