"""O1: agents whose sessions need more memory than there is, with and without admission by session.

*Simulated*: the engine, the scheduler and the cache are the real ones on the oracle runtime, and the clock is the
simulation's. A step takes 25 ms if it decodes and 8,000 tokens of prompts take a second, as on one GPU. Sessions are
those of Claude Code's traces (callanjfox/kv-cache-tester): 20,000 tokens at first, half of them shared, 20 to 49
turns of 640 tokens and 210 of an answer at the median, and the pauses of its tool calls (median 8 s, a tenth more
than 50 s). To be quick, a token of the simulation stands for 16. Each agent names its session and asks for five
minutes, as Claude Code does, and begins a new session after each. The memory has room for eight sessions of mean
length. The hybrid has a state of 78 MB beside 24 KiB a token. The disk has ten times the memory and reads 2 GB/s, one
load after the other, beside the forwards.

Throughput is in turns a second, after a quarter of the time as warm-up; waits are from submission to the first
admission. `peak` is the best throughput over all numbers of agents.

*Torch*: the same on the torch runtime with a tiny model, in real time, with pauses shortened.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import argument_parser, at_least, at_most, conclude
from h2_hints import VOCAB, Client, Clock, Turn, request_of

from checkpoints import save  # after `common`, which puts the tests on the path
from rootstock.cache import FullAttention, KVCache, RecurrentState
from rootstock.cache.families import Family, row_bytes
from rootstock.cache.lease import Lease
from rootstock.cache.plan import Load
from rootstock.cache.retention.hint_types import CacheHints, RetentionWish
from rootstock.config import EngineConfig, ModelConfig, TierConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event, Failed, Finished, TokenEvent
from rootstock.engine.tiers.build import open_below, stored_index
from rootstock.engine.tiers.connector import LoadInFlight
from rootstock.errors import EngineStopped
from rootstock.runtime.base import Batch
from rootstock.runtime.torch.runner import load_model
from rootstock.testing.fake_runtime import FULL, FakeRuntime
from rootstock.tiers.reader import LoadEnded

SHOW = "O1"
UNIT = 16  # tokens for which one of the simulation stands
BLOCK = 16
SYSTEM_TOKENS, FIRST_TOKENS = 10_000 // UNIT, 10_000 // UNIT
DECODE_S = 0.025 * UNIT
EMPTY_S = 0.05  # a step that decodes nothing
TOKENS_PER_S = 8_000 / UNIT
LOADED_S = 24 * 1024 * UNIT / 2e9  # a token of the simulation from the disk
STATE = RecurrentState(1, 78_000_000 // (24 * 1024 * UNIT) * row_bytes(FULL, BLOCK) // BLOCK)
FAMILIES: dict[str, tuple[Family, ...]] = {"full": (FULL,), "hybrid": (FULL, STATE)}
# Seconds between the end of an answer and the result of its tool calls, in steps of 5 % of 16,000 calls.
PAUSES_S = (
    *(2.5, 3.18, 3.73, 4.19, 4.64, 5.08, 5.53, 6.04, 6.63, 7.31, 8.15),
    *(9.24, 10.56, 12.47, 15.26, 19.35, 27.72, 47.28, 95.17, 184.72, 600.0),
)
# Of the disk, for a byte of memory. It then keeps about twelve times the rows of the memory: a record of a row of 256
# bytes takes 770, and some are stale.
DISK_BYTES = 40
SESSIONS = 8  # that fit
SESSION_TOKENS = 3_300  # of the simulation, that only the session uses, on average over time
MEMORY_TOKENS = SESSIONS * SESSION_TOKENS + SYSTEM_TOKENS
LEAST_OF_PEAK = 0.9
MOST_TIMES = 3.0
WAIT_S = 600.0
TORCH_AGENTS = (8, 16, 24)
TORCH_MODEL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "max_position_embeddings": 1 << 14,
    "eos_token_id": None,
}
TORCH_FASTER = 10.0  # pauses and waits are so much shorter


class World:
    """An engine, its agents and the clock."""

    def __init__(
        self,
        families: tuple[Family, ...],
        agents: Sequence[Client],
        memory_tokens: int,
        wait_s: float,
        disk: Path | None = None,
    ) -> None:
        self.clock = Clock()
        self.agents = agents
        runtime = FakeRuntime(VOCAB, families=families, eos_token_ids=(), fault=self._compute)
        budget = memory_tokens * row_bytes(FULL, BLOCK) // BLOCK
        tier = TierConfig() if disk is None else TierConfig(disk, DISK_BYTES * budget)
        config = EngineConfig(chunk_tokens=256, max_session_wait_s=wait_s, seed=1)
        stored = stored_index(runtime, tier, BLOCK)
        self.cache = KVCache(families, budget, BLOCK, clock=self.clock, stored=stored)
        runtime.allocate(self.cache.rows, BLOCK)
        connector = open_below(runtime, self.cache, tier, config.chunk_tokens, self.clock)
        self.engine = Engine(runtime, self.cache, config, clock=self.clock, tier_connector=connector)
        self.ends: list[tuple[float, Client, Finished]] = []
        self.waits: list[tuple[float, Client, float]] = []  # when they ended, from the moment of sending
        self._token_seconds = 0.0
        self._ids = itertools.count()
        self._disk_is_free_at = 0.0
        self._begun_loads = 0
        self._landing: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self._loads: list[
            tuple[float, Callable[[], None]]
        ] = []  # that were read, and the time at which they end
        if connector is not None:
            self._begin = connector.begin
            connector.begin = self._begin_load  # type: ignore[method-assign]

    @property
    def session_tokens(self) -> float:
        """Tokens that sessions use for themselves, and the shared ones, on average over time."""
        return self._token_seconds / self.clock.now

    def run(self, until_s: float) -> World:
        scheduler = self.engine.scheduler
        while self.clock.now < until_s:
            due = [each for each in self.agents if not each.is_waiting and each.ready_at <= self.clock.now]
            for agent in due:
                self._ask(agent)
            self._end_loads()
            is_stalled = self.engine.steps.is_stalled and self.engine._commands.empty()
            if not due and (is_stalled or not scheduler.has_work):
                self._pass_until(self._next_event())
                continue
            self.engine.step()
        return self

    def _next_event(self) -> float:
        """Returns when an agent sends its next request, or a load ends."""
        times = [each.ready_at for each in self.agents if not each.is_waiting]
        times += [ends_at for ends_at, _ in self._loads]
        return max(min(times), self.clock.now + 1e-3)

    def _begin_load(
        self,
        sequence: Sequence | None,
        lease: Lease,
        position: int,
        loads: tuple[Load, ...],
        ended: Callable[[LoadInFlight, LoadEnded], None],
    ) -> None:
        """Begins a load that takes time of the simulation: one follows the other, beside the forwards."""
        took_s = (position - lease.hit_tokens) * LOADED_S
        ends_at = self._disk_is_free_at = max(self._disk_is_free_at, self.clock.now) + took_s
        self._begun_loads += 1

        def landed(load: LoadInFlight, end: LoadEnded) -> None:
            self._landing.put((ends_at, lambda: ended(load, end)))

        self._begin(sequence, lease, position, loads, landed)

    def _end_loads(self) -> None:
        """Waits until the loads that were begun are read, and ends those whose time is over."""
        while self._begun_loads:
            self._loads.append(self._landing.get(timeout=60))
            self._begun_loads -= 1
        for ends_at, end in self._loads:
            if ends_at <= self.clock.now:
                end()
        self._loads = [each for each in self._loads if each[0] > self.clock.now]

    def _compute(self, batch: Batch) -> None:
        decodes = any(len(each.tokens) == 1 and each.past for each in batch.segments)
        self._pass_until(
            self.clock.now + (DECODE_S if decodes else EMPTY_S) + batch.new_tokens / TOKENS_PER_S
        )

    def _pass_until(self, then: float) -> None:
        held = SYSTEM_TOKENS + sum(max(0, len(each.history) - SYSTEM_TOKENS) for each in self.agents)
        self._token_seconds += held * (then - self.clock.now)
        self.clock.now = then

    def _ask(self, agent: Client) -> None:
        turn = next(agent.turns)
        agent.history += turn.new_tokens
        agent.is_waiting = True
        answer: list[int] = []
        before_s = self.clock.now - agent.ready_at  # in the step that ran

        def take(event: Event) -> None:
            if isinstance(event, TokenEvent):
                answer.append(event.token)
                return
            if isinstance(event, Failed):
                assert isinstance(event.error, EngineStopped), event
                return
            assert isinstance(event, Finished), event
            self.waits.append((self.clock.now, agent, before_s + event.usage.queued_s))
            self.ends.append((self.clock.now, agent, event))
            agent.history += answer
            agent.is_waiting, agent.ready_at = False, self.clock.now + turn.pause_s
            if turn.is_last:
                agent.session, agent.history = agent.session + 1, []

        self.engine.submit(request_of(agent, turn, next(self._ids)), take)


def claude_code(agent: Client, turn: Turn) -> CacheHints:
    kept = (RetentionWish("ttl", ttl_s=300.0),)
    return CacheHints(agent.tenant, agent.session_name, "session", retentions=kept)


def turns(rng: np.random.Generator, salt: int) -> Iterator[Turn]:
    """Yields the turns of one session after the other."""
    system = np.random.default_rng(salt).integers(0, VOCAB, SYSTEM_TOKENS).tolist()
    steps = np.arange(len(PAUSES_S))
    while True:
        count = int(rng.integers(20, 50))
        for number in range(count):
            new = FIRST_TOKENS if number == 0 else int(np.clip(rng.lognormal(np.log(40), 1.0), 8, 400))
            tokens = [*(system if number == 0 else ()), *rng.integers(0, VOCAB, new).tolist()]
            answer = int(np.clip(rng.lognormal(np.log(13), 0.6), 4, 60))
            pause_s = float(np.exp(np.interp(rng.random() * steps[-1], steps, np.log(PAUSES_S))))
            yield Turn(tokens, answer, pause_s, pause_s, number == count - 1)


def agents(count: int, seed: int, tenant: str = "agents") -> list[Client]:
    found = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        begins_s = float(rng.random() * 60)
        found.append(Client(f"{tenant}-{number}", tenant, turns(rng, len(tenant)), claude_code, begins_s))
    return found


@dataclass(frozen=True)
class Case:
    family: str
    agents: int
    wait_s: float  # 0: no admission by session
    has_disk: bool
    seed: int
    until_s: float
    memory_tokens: int = MEMORY_TOKENS


def play(case: Case) -> dict[str, float]:
    """Returns the figures of one case."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder) if case.has_disk else None
        clients = agents(case.agents, case.seed)
        world = World(FAMILIES[case.family], clients, case.memory_tokens, case.wait_s, disk)
        world.run(case.until_s)
        world.cache.check()
        sessions, now = world.engine.stats().sessions, world.clock.now
        world.engine.stop()
    ends = [end.usage for at, _, end in world.ends if at >= case.until_s / 4]
    waits, held = [usage.queued_s for usage in ends], [usage.held_s for usage in ends]
    still = [
        now - sequence.held_at
        for sequence in world.engine.scheduler.sequences()
        if sequence.held_at is not None
    ]
    first = [usage.ttft_s for usage in ends]
    return {
        "times": world.session_tokens / case.memory_tokens,
        "turns_per_s": len(ends) / (case.until_s * 0.75),
        "hits": sum(usage.cached_tokens for usage in ends) / sum(usage.prompt_tokens for usage in ends),
        "wait_p50_s": float(np.median(waits)),
        "wait_p95_s": float(np.quantile(waits, 0.95)),
        "held_most_s": max([*held, *still], default=0.0),
        "ttft_p50_s": float(np.median(first)),
        "ttft_p95_s": float(np.quantile(first, 0.95)),
        "held": 0.0 if sessions is None else sum(sessions.admitted.values()),
    }


def curve(
    pool: Any, family: str, counts: Sequence[int], wait_s: float, has_disk: bool, given: Any
) -> dict[int, dict[str, float]]:
    """Returns the mean figures over the seeds, by the number of agents."""
    seeds = range(1, given.seeds + 1)
    cases = [
        Case(family, count, wait_s, has_disk, seed, given.hours * 3600) for count in counts for seed in seeds
    ]
    played = dict(zip(cases, pool.map(play, cases, chunksize=1), strict=True))
    found = {}
    for count in counts:
        of_count = [figures for case, figures in played.items() if case.agents == count]
        found[count] = {name: float(np.mean([each[name] for each in of_count])) for name in of_count[0]}
        found[count]["held_most_s"] = max(each["held_most_s"] for each in of_count)
        what = f"{family}{' with a disk' if has_disk else ''}, {'admission' if wait_s else 'no admission'}"
        rounded = {name: round(value, 3) for name, value in found[count].items()}
        print(f"{what}, {count} agents: {rounded}", flush=True)
    return found


def of_peak(found: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Returns the peak of the throughput, its parts, and the least part of the best that fewer agents reach, up to
    MOST_TIMES of the memory: where more agents do more, nothing is lost."""
    peak = max(each["turns_per_s"] for each in found.values())
    parts = {each["times"]: each["turns_per_s"] / peak for each in found.values()}
    best = itertools.accumulate(parts.values(), max)
    kept = [
        part / most for (times, part), most in zip(parts.items(), best, strict=True) if times <= MOST_TIMES
    ]
    return {
        "peak": round(peak, 4),
        "of_peak": {round(times, 2): round(part, 3) for times, part in parts.items()},
        "least_of_peak": round(min(kept), 3),
    }


def below_full_memory(pool: Any, given: Any) -> float:
    """Returns the largest relative change of the throughput by admission where all sessions fit."""
    cases = [
        Case(family, count, wait_s, False, seed, given.hours * 1800)
        for family in FAMILIES
        for count in (4, 6)
        for seed in range(1, given.seeds + 1)
        for wait_s in (0.0, WAIT_S)
    ]
    figures = [each["turns_per_s"] for each in pool.map(play, cases, chunksize=1)]
    return max(
        0.0, *(abs(gated / without - 1) for without, gated in zip(figures[::2], figures[1::2], strict=True))
    )


def on_torch(seconds: float) -> dict[str, Any]:
    """Returns the turns a second of agents on tiny models, in real time, with and without admission."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model_type in {"full": "llama", "hybrid": "qwen3_next"}.items():
            model = save(Path(folder) / name, model_type, **TORCH_MODEL)
            for wait_s in (0.0, WAIT_S / TORCH_FASTER):
                label = f"torch_{name}_{'with' if wait_s else 'without'}"
                found = {count: torch_turns_per_s(model, count, wait_s, seconds) for count in TORCH_AGENTS}
                peak = max(found.values())
                figures |= {f"{label}_{count}": round(rate, 2) for count, rate in found.items()}
                figures[f"{label}_last_of_peak"] = round(found[TORCH_AGENTS[-1]] / peak, 3)
                print({key: value for key, value in figures.items() if key.startswith(label)}, flush=True)
    return figures


def torch_turns_per_s(model: Path, count: int, wait_s: float, seconds: float) -> float:
    """Runs agents for some time, and returns the turns a second in its last two thirds."""
    runtime = load_model(ModelConfig(str(model), device="cpu", dtype="float32"))
    families = runtime.description.families
    cache = KVCache(families, MEMORY_TOKENS * row_bytes(_full(families), BLOCK) // BLOCK, BLOCK)
    runtime.allocate(cache.rows, BLOCK)
    clients = agents(count, 1)
    ended: queue.SimpleQueue[tuple[Client, Turn, list[int]]] = queue.SimpleQueue()
    done: list[float] = []
    numbers = itertools.count()
    with Engine(runtime, cache, EngineConfig(max_session_wait_s=wait_s, idle_work=False, seed=1)) as engine:
        began = time.monotonic()
        for client in clients:
            client.ready_at = began + client.ready_at / TORCH_FASTER
        while (now := time.monotonic()) < began + seconds:
            for client in clients:
                if not client.is_waiting and client.ready_at <= now:
                    _ask_torch(engine, client, ended, numbers)
            due_s = min([each.ready_at - now for each in clients if not each.is_waiting], default=1.0)
            try:
                client, turn, answer = ended.get(timeout=max(0.0, min(due_s, 0.1)))
            except queue.Empty:
                continue
            done.append(time.monotonic() - began)
            client.history += answer
            client.is_waiting, client.ready_at = False, time.monotonic() + turn.pause_s / TORCH_FASTER
            if turn.is_last:
                client.session, client.history = client.session + 1, []
    return sum(at > seconds / 3 for at in done) / (seconds * 2 / 3)


def _full(families: Sequence[Family]) -> Family:
    return next(family for family in families if isinstance(family, FullAttention))


def _ask_torch(
    engine: Engine,
    client: Client,
    ended: queue.SimpleQueue[tuple[Client, Turn, list[int]]],
    numbers: Iterator[int],
) -> None:
    turn = next(client.turns)
    client.history += turn.new_tokens
    client.is_waiting = True
    answer: list[int] = []

    def take(event: Event) -> None:
        if isinstance(event, TokenEvent):
            answer.append(event.token)
        else:
            ended.put((client, turn, answer))

    engine.submit(request_of(client, turn, next(numbers)), take)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--parts", default="simulated,disk,below,torch", help="comma-separated")
    options.add_argument("--counts", default="8,16,20,24,32,44,64", help="agents, comma-separated")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--hours", type=float, default=1.2, help="of simulated time")
    options.add_argument("--torch-seconds", type=float, default=60.0, help="of each run in real time")
    given = options.parse_args()
    counts = [int(each) for each in given.counts.split(",")]
    parts = given.parts.split(",")
    figures: dict[str, Any] = {}
    bars = {}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for has_disk in (False, True):
            if ("disk" if has_disk else "simulated") not in parts:
                continue
            for family in FAMILIES:
                name = f"{family}_disk" if has_disk else family
                today = curve(pool, family, counts, 0.0, has_disk, given)
                held = curve(pool, family, counts, WAIT_S, has_disk, given)
                for label, found in (("without", today), ("with", held)):
                    figures |= {f"{name}_{label}_{key}": value for key, value in of_peak(found).items()}
                figures[f"{name}_longest_hold_s"] = round(
                    max(each["held_most_s"] for each in held.values()), 1
                )
                bars[f"{name}_with_least_of_peak"] = at_least(LEAST_OF_PEAK)
                bars[f"{name}_longest_hold_s"] = at_most(WAIT_S + 5)  # a step may take seconds
        if "below" in parts:
            figures["change_below_full_memory"] = round(below_full_memory(pool, given), 4)
            bars["change_below_full_memory"] = at_most(0.01)
    if "torch" in parts:
        figures |= on_torch(given.torch_seconds)
        bars |= {f"torch_{family}_with_last_of_peak": at_least(LEAST_OF_PEAK) for family in FAMILIES}
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
