"""L3: a shared server: the first token of a second replica, and faults of the server, its network and its users.

Replicas of an 80M Llama in float32 share a Valkey server over loopback. One computes a prompt of 4,096 tokens. A
round measures the first token of a cold prompt, of one that another replica has stored, and of one that is on the
replica's own disk, each on an engine whose memory has not seen it. Memory has room for two such prompts, and is full
before the first round: on a virtual machine the first write of a page takes longer than to load what it holds. The K
and V of the prompt are then compared bit by bit with the ones of the replica that computed them.

Then cases of each kind of fault (tests/faults/shared_faults.py), on the oracle runtime: no wrong token, no failed
request, and no request that waits longer than the tier's time limit and a fifth of it.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from common import argument_parser, at_least, at_most, conclude, exactly
from llamas import write_streaming_llama

from asking import greedy
from faults.shared_faults import FAULTS, TIMEOUT_S, run
from rootstock.cache.plan import RowPart
from rootstock.cache.radix_node import block_table
from rootstock.config import CacheConfig, EngineConfig, ModelConfig, TierConfig
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.request import Event, Failed, Finished, TokenEvent
from shared_store import SharedStore
from waiting import wait_for

SHOW = "L3"
PROMPT_TOKENS = 4096
PROMPTS_IN_MEMORY = 2
MEMORY_BYTES = 320 * 2**20
MEMORY = Path("/dev/shm")


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--cases", type=int, default=100, help="of each kind of fault")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--part", choices=("speed", "faults", "both"), default="both")
    given = options.parse_args()
    figures: dict[str, Any] = {}
    bars = {}
    if given.part != "faults":
        figures |= speed(given.rounds)
        bars |= {"to_cold": at_most(0.1), "to_disk": at_most(1.5), "different_rows": exactly(0)}
    if given.part != "speed":
        logging.disable(logging.CRITICAL)  # warnings of faults that are injected on purpose
        figures |= faults(given.cases)
        bars |= {
            "kinds": at_least(12),
            "fewest_cases_of_a_kind": at_least(100),
            "wrong": exactly(0),
            "failed": exactly(0),
            "worst_wait_to_timeout": at_most(1.2),
        }
    conclude(SHOW, figures, bars)


# -- the first token


def opened(path: Path, tier: TierConfig) -> Assembly:
    return build_engine(
        ModelConfig(str(path), device="cpu", dtype="float32"),
        CacheConfig(budget_bytes=MEMORY_BYTES),
        EngineConfig(idle_work=False),
        tier,
    )


def first_token_ms(made: Assembly, prompt: np.ndarray) -> tuple[float, int]:
    """Returns the time from the submission to the first token, and how many tokens were cached."""
    first, ended = threading.Event(), threading.Event()
    at: list[float] = []
    cached: list[int] = []

    def sink(event: Event) -> None:
        if isinstance(event, TokenEvent) and not at:
            at.append(time.perf_counter())
            first.set()
        if isinstance(event, Finished | Failed):
            assert isinstance(event, Finished), event
            cached.append(event.usage.cached_tokens)
            ended.set()

    began = time.perf_counter()
    made.engine.submit(greedy(prompt, 2), sink)
    wait_for(ended)
    return (at[0] - began) * 1e3, cached[0]


def rows(made: Assembly, prompt: np.ndarray) -> list[bytes]:
    """Returns the K and V of the prompt's whole blocks."""

    def read() -> list[bytes]:
        cache, runtime = made.engine._cache, made.engine._runtime
        match = cache.match(prompt, made.engine.namespace())
        assert match.node is not None
        table = block_table(match.node, match.length // 32 * 32, 32)
        return [
            b"".join(
                np.ascontiguousarray(part).tobytes() for part in runtime.read(RowPart(0, int(block), 32))
            )
            for block in table
        ]

    return made.engine.call(read)


def speed(rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"cold": [], "shared": [], "disk": []}
    cached: list[int] = []
    kept: list[list[bytes]] = []
    different = 0
    with tempfile.TemporaryDirectory() as folder, SharedStore(Path(folder), "--maxmemory", "4gb") as store:
        path = write_streaming_llama(Path(folder) / "model", "80m")
        rng = np.random.default_rng(0)
        prompts = [
            rng.integers(300, 32_000, PROMPT_TOKENS).astype(np.int32)
            for _ in range(PROMPTS_IN_MEMORY + rounds)
        ]
        warm = rng.integers(300, 32_000, 64).astype(np.int32)
        shared = TierConfig(remote=store.config)
        own = TierConfig(Path(folder) / "disk", 4 * 2**30, disk_write="through")
        writer = opened(path, shared)
        with writer.engine:
            first_token_ms(writer, warm)
            for prompt in prompts:
                times["cold"].append(first_token_ms(writer, prompt)[0])
                kept.append(rows(writer, prompt))
        filler = opened(path, own)
        with filler.engine:
            for prompt in prompts:
                first_token_ms(filler, prompt)
        reader, disk = opened(path, shared), opened(path, own)
        with reader.engine, disk.engine:
            for made in (reader, disk):
                first_token_ms(made, warm[::-1].copy())
            for prompt, computed in zip(prompts, kept, strict=True):
                for name, made in (("shared", reader), ("disk", disk)):
                    took_ms, found = first_token_ms(made, prompt)
                    times[name].append(took_ms)
                    cached.append(found)
                different += sum(a != b for a, b in zip(rows(reader, prompt), computed, strict=True))
    medians = {name: statistics.median(each[PROMPTS_IN_MEMORY:]) for name, each in times.items()}
    return {
        **{f"{name}_ms": round(value, 1) for name, value in medians.items()},
        "to_cold": round(medians["shared"] / medians["cold"], 4),
        "to_disk": round(medians["shared"] / medians["disk"], 3),
        "least_cached_tokens": min(cached),
        "different_rows": different,
    }


# -- faults


def faults(cases: int) -> dict[str, Any]:
    tally: Counter[str] = Counter()
    worst: dict[str, float] = {}
    loaded: Counter[str] = Counter()
    base = MEMORY if MEMORY.is_dir() else None
    for kind in FAULTS:
        for seed in range(cases):
            with tempfile.TemporaryDirectory(dir=base) as folder, SharedStore(Path(folder)) as store:
                case = run(kind, seed, Path(folder), store)
            for remark in case.remarks:
                print(f"{kind} {seed}: {remark}", flush=True)
            tally["wrong"] += case.wrong
            tally["failed"] += case.failed
            loaded[kind] += case.loaded_tokens
            worst[kind] = max(worst.get(kind, 0.0), case.worst_wait_s)
        print(f"{kind}: worst wait {worst[kind]:.3f} s, {loaded[kind]} tokens loaded", flush=True)
    return {
        "kinds": len(FAULTS),
        "fewest_cases_of_a_kind": cases,
        "wrong": tally["wrong"],
        "failed": tally["failed"],
        "worst_wait_to_timeout": round(max(worst.values()) / TIMEOUT_S, 3),
        "worst_wait_s": {kind: round(wait, 3) for kind, wait in worst.items()},
        "loaded_tokens": sum(loaded.values()),
    }


if __name__ == "__main__":
    main()
