"""L2: KV events: a listener's set against the tree, and Dynamo's unmodified selector against `explain`.

Random schedules of the oracle runtime (tests/property/schedules.py) with all families, salts, public heads, clears,
pins and lost pools, which are restarts of the cache: after each step a listener that knows the events only has
exactly the blocks up to which a request can resume, and so has one that came late and got a dump.

Then two engines of each kind of model publish their events over TCP, and Dynamo's selection service listens. After
each round of agents' requests it is asked for prompts: repeated ones, next turns, new sessions, new questions, and
ones that were evicted or cleared. Its number of blocks has to be the one that `explain` names. For models that do
not resume anywhere, the same blocks by the events of vLLM and SGLang, which announce every block of full attention,
are counted beside it: they overrate the hit.

A prompt that leaves a cached one between two checkpoints is the one case in which no set of blocks is exact: it is
counted apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import argument_parser, at_least, conclude, exactly

from engine.helpers import Bench
from engine.tiered import KINDS
from property import schedules
from property.schedules import run_schedule, run_scoped_schedule
from rootstock.cache.families import Family, FullAttention, RecurrentState
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.fleet_config import KVEventsConfig
from waiting import unused_port, wait_for, wait_until

SHOW = "L2"
SIZE = 4
SELECTOR = Path(__file__).resolve().parents[2] / "bench" / "show" / "dynamo_selector.py"
ROUNDS = 12
BLOCKS, STATES = 150, 5  # of each family
Tokens = list[int]


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--runs", type=int, default=300, help="random schedules of each of two kinds")
    options.add_argument(
        "--dynamo-python",
        default=os.environ.get("ROOTSTOCK_DYNAMO_PYTHON"),
        help="an interpreter with ai-dynamo-runtime",
    )
    given = options.parse_args()
    figures: dict[str, Any] = random_runs(given.runs)
    if given.dynamo_python is None:
        figures["could_not"] = "neither --dynamo-python nor ROOTSTOCK_DYNAMO_PYTHON is given"
    else:
        figures |= against_dynamo(given.dynamo_python)
    bars = {
        "runs": at_least(200),
        "differences": exactly(0),
        "compared_with_dynamo": at_least(500),
        "dynamo_differs": exactly(0),
        "between_checkpoints_below_explain": exactly(0),
    }
    conclude(SHOW, figures, bars)


# -- random schedules


def random_runs(runs: int) -> dict[str, Any]:
    counted: Counter[str] = Counter()
    hear = schedules._hear

    def counting(listener: Any, cache: KVCache) -> None:
        try:
            hear(listener, cache)
        except AssertionError:
            counted["differences"] += 1
            raise
        if cache.tree.resumable is not None:
            counted["comparisons"] += 1
            counted["blocks"] += sum(map(len, listener.groups.values()))

    schedules._hear = counting
    seeds = [seed for seed in range(7_000_000, 7_000_000 + 2 * runs) if seed % 3 > 0][:runs]
    for seed in seeds:
        for play in (run_schedule, lambda seed: run_scoped_schedule(seed, tiered=False)):
            try:
                play(seed)
                counted["runs"] += 1
            except AssertionError as error:
                counted["failed_runs"] += 1
                print(f"seed {seed}: {error}", flush=True)
    return {
        "runs": counted["runs"],
        "comparisons": counted["comparisons"],
        "compared_blocks": counted["blocks"],
        "differences": counted["differences"] + counted["failed_runs"],
    }


# -- Dynamo


class Selector:
    """Dynamo's selection service in a process of its own."""

    def __init__(self, python: str, workers: Sequence[dict[str, str]]) -> None:
        self._process = subprocess.Popen(
            [python, str(SELECTOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # its log
            text=True,
        )
        self._ask({"block_size": SIZE, "workers": list(workers)})

    def _ask(self, line: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the selector has ended"
        return answer

    def blocks(self, tokens: Tokens) -> list[int]:
        found: list[int] = json.loads(self._ask(tokens))
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Worker:
    """An engine with its events at a port, and the sessions that it has served."""

    bench: Bench
    addresses: dict[str, str]
    sessions: list[Tokens] = field(default_factory=list)

    def answer(self, prompt: Tokens, system: int, *, is_broken_off: bool) -> Tokens:
        """Answers a prompt whose system prompt and last user turn are boundaries, as a template finds them. The user
        may break a long answer off."""
        places = [
            Boundary(system, CheckpointKind.SYSTEM),
            Boundary(len(prompt), CheckpointKind.USER),
        ]
        client = self.bench.ask(prompt, 150 if is_broken_off else 5, boundaries=tuple(places))
        if is_broken_off:
            wait_until(lambda: len(client.tokens) > 30)
            self.bench.engine.abort(client.request.id)
        wait_for(client.ended)
        return [*prompt, *client.tokens]

    def explained(self, tokens: Tokens) -> tuple[int, int]:
        """Returns the whole blocks that a request would not compute, and those of full attention that are cached."""
        found = self.bench.engine.explain(np.array([*tokens, 0], np.int32))
        return found.matched_tokens // SIZE, found.found_tokens // SIZE


@contextmanager
def workers_of(families: tuple[Family, ...]) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            with unused_port() as events, unused_port() as replay:
                addresses = {"events": f"tcp://127.0.0.1:{events}", "replay": f"tcp://127.0.0.1:{replay}"}
            config = KVEventsConfig.parse(f"{addresses['events']}?replay={addresses['replay']}")
            # Room for few checkpoints, so that some are evicted and their K and V stay.
            rows = [STATES if isinstance(family, RecurrentState) else BLOCKS for family in families]
            bench = Bench(2 * BLOCKS, SIZE, families=families, kv_events=config, idle_work=False, rows=rows)
            stack.enter_context(bench.engine)
            made.append(Worker(bench, addresses))
        yield made


def against_dynamo(python: str) -> dict[str, Any]:
    counted: Counter[str] = Counter()
    overrated: dict[str, list[int]] = {}
    models = [families for families in KINDS if any(isinstance(family, FullAttention) for family in families)]
    for families in models:
        name = "+".join(family.name for family in families)
        with workers_of(families) as workers:
            selector = Selector(python, [worker.addresses for worker in workers])
            try:
                compare(
                    workers,
                    selector,
                    np.random.default_rng(1),
                    counted,
                    overrated.setdefault(name, [0, 0, 0]),
                )
            finally:
                selector.close()
        asked, ours, theirs = overrated[name]
        print(
            f"{name}: {asked} prompts, {ours} blocks by `explain`, {theirs} by events of all blocks",
            flush=True,
        )
    return {
        "models": len(models),
        "compared_with_dynamo": counted["compared"],
        "dynamo_differs": counted["differs"],
        "between_checkpoints": counted["between"],
        "between_checkpoints_below_explain": counted["below"],
        "between_checkpoints_above_explain": counted["above"],
        "blocks_between": [counted[f"blocks_between{way}"] for way in ("", "_by_events", "_by_all_blocks")],
        "hit_blocks_and_blocks_of_full_attention": {name: each[1:] for name, each in overrated.items()},
    }


def compare(
    workers: Sequence[Worker],
    selector: Selector,
    rng: np.random.Generator,
    counted: Counter[str],
    overrated: list[int],
) -> None:
    systems = [rng.integers(0, 97, int(length)).tolist() for length in (17, 40)]
    for number in range(ROUNDS):
        for worker in workers:
            system = systems[int(rng.integers(2))]
            if worker.sessions and rng.random() < 0.5:
                at = int(rng.integers(len(worker.sessions)))
                prompt = [*worker.sessions[at], *rng.integers(0, 97, int(rng.integers(3, 25))).tolist()]
            else:
                at = len(worker.sessions)
                worker.sessions.append([])
                prompt = [*system, *rng.integers(0, 97, int(rng.integers(3, 40))).tolist()]
            length = next(len(each) for each in systems if prompt[: len(each)] == each)
            worker.sessions[at] = worker.answer(prompt, length, is_broken_off=rng.random() < 0.25)
        if number % 5 == 4:
            workers[number % 2].bench.engine.clear_cache()
        asked: list[tuple[Tokens, bool]] = []
        for worker in workers:
            for session in worker.sessions:
                asked.append((session, True))
                asked.append(([*session, *rng.integers(0, 97, 9).tolist()], True))
                cut = int(rng.integers(1, len(session)))
                asked.append(([*session[:cut], 96 - session[cut], *session[cut + 1 :]], False))
        asked += [([*system, *rng.integers(0, 97, 20).tolist()], True) for system in systems]
        asked.append((rng.integers(0, 97, 30).tolist(), True))
        for prompt, is_exact in asked:
            check(workers, selector, prompt, is_exact, counted, overrated)


def check(
    workers: Sequence[Worker],
    selector: Selector,
    prompt: Tokens,
    is_exact: bool,
    counted: Counter[str],
    overrated: list[int],
) -> None:
    explained = [worker.explained(prompt) for worker in workers]
    hits = [ours for ours, _ in explained]
    is_exact = is_exact or workers[0].bench.cache.resume_anywhere
    said = selector.blocks(prompt)
    until = time.monotonic() + (2.0 if is_exact else 0.2)
    while said != hits and time.monotonic() < until:  # events are on their way
        time.sleep(0.02)
        said = selector.blocks(prompt)
    if not is_exact:
        counted["between"] += 1
        counted["blocks_between"] += sum(hits)
        counted["blocks_between_by_events"] += sum(said)
        counted["blocks_between_by_all_blocks"] += sum(theirs for _, theirs in explained)
        counted["below"] += any(there < here for there, here in zip(said, hits, strict=True))
        counted["above"] += any(there > here for there, here in zip(said, hits, strict=True))
        return
    counted["compared"] += 1
    overrated[0] += 1
    overrated[1] += sum(hits)
    overrated[2] += sum(theirs for _, theirs in explained)
    if said != hits:
        counted["differs"] += 1
        print(f"a prompt of {len(prompt)}: Dynamo says {said}, `explain` {hits}", flush=True)


if __name__ == "__main__":
    main()
