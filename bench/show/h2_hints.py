"""H2: hints. Agents whose tool calls take 1 to 30 minutes share a cache with room for a quarter of them.

Each agent has a kind of work: the median of its tool calls is log-uniform between 1 and 30 minutes, and each call
varies around it (log-normal, clipped to 1 and 30 minutes). A session has 4 to 16 turns, and a new one follows it. All
of them begin with one system prompt. The engine and the cache are the real ones on the oracle runtime, the cache with
its default policy in each run. The clock is the simulation's: a step takes as long as its tokens.

A prompt token is *recomputed* if an earlier request had computed it and it is computed again. The budget is a quarter
of the tokens of all running sessions at their peak. With hints each request names its session and asks for a time to
live of twice its agent's median, and the last one ends the session. Without hints the same requests are sent.

Then a greedy tenant: it sends new prompts without a pause, each with the longest time to live, the highest priority
and a session of its own, beside a tenant whose agents pause for 1 to 5 minutes and whose sessions fill two fifths of
the cache. The hit rate of the second tenant is compared with that without the greedy one, and, where it sends no
hints itself, with that beside the same flood without hints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import argument_parser, at_most, conclude

from rootstock.cache import KVCache
from rootstock.cache.families import row_bytes
from rootstock.cache.hints import GREATEST_PRIORITY, MAX_TTL_S, CacheHints, Retention
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import (
    Event,
    Finished,
    Request,
    RequestId,
    ResolvedSampling,
    StopParams,
    TokenEvent,
)
from rootstock.runtime.base import Batch
from rootstock.testing.fake_runtime import FULL, FakeRuntime

SHOW = "H2"
VOCAB = 1000
BLOCK = 16
SYSTEM_TOKENS = 120
TOKENS_PER_S = 5_000.0
STEP_S = 0.02
MINUTE_S = 60.0
MOST_RATIO = 0.5
MOST_LOST_POINTS = 5.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_for(self, batch: Batch) -> None:
        self.now += STEP_S + batch.new_tokens / TOKENS_PER_S


@dataclass
class Turn:
    """One request of an agent, and the pause after its answer."""

    new_tokens: list[int]
    answer_tokens: int
    pause_s: float
    is_last: bool


@dataclass
class Client:
    """A client that sends its next request some time after the last answer."""

    name: str
    tenant: str
    turns: Iterator[Turn]
    hints: Callable[[Client, Turn], CacheHints | None]
    median_s: float
    ready_at: float
    session: int = 0
    history: list[int] = field(default_factory=list)
    known_tokens: int = 0  # of the history, that were computed before
    is_waiting: bool = False
    asked_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    requests: int = 0

    @property
    def session_name(self) -> str:
        return f"{self.name}-{self.session}"


class World:
    """An engine, its clients and the clock."""

    def __init__(self, budget_tokens: int, clients: list[Client]) -> None:
        self.clock = Clock()
        runtime = FakeRuntime(VOCAB, families=(FULL,), eos_token_ids=(), fault=self.clock.pass_for)
        blocks = budget_tokens // BLOCK
        self.cache = KVCache((FULL,), blocks * row_bytes(FULL, BLOCK), BLOCK, clock=self.clock)
        runtime.allocate(self.cache.rows, BLOCK)
        self.engine = Engine(runtime, self.cache, EngineConfig(seed=1), clock=self.clock)
        self.clients = clients
        self.peak_tokens = 0
        self._ids = itertools.count()

    def run(self, until_s: float) -> World:
        while self.clock.now < until_s:
            due = [each for each in self.clients if not each.is_waiting and each.ready_at <= self.clock.now]
            for client in due:
                self._ask(client)
            if not self.engine.scheduler.has_work:
                self.clock.now = min(each.ready_at for each in self.clients)
                continue
            self.engine.step()
            self.peak_tokens = max(self.peak_tokens, sum(len(each.history) for each in self.clients))
        return self

    def _ask(self, client: Client) -> None:
        turn = next(client.turns)
        client.history += turn.new_tokens
        client.is_waiting = True
        answer: list[int] = []

        def take(event: Event) -> None:
            if isinstance(event, TokenEvent):
                answer.append(event.token)
            elif isinstance(event, Finished):
                self._ended(client, turn, answer, event.usage.cached_tokens)
            else:
                raise AssertionError(event)

        request = Request(
            RequestId(f"{client.name}-{next(self._ids)}"),
            np.array(client.history, np.int32),
            ResolvedSampling(temperature=0.0),
            StopParams(max_tokens=turn.answer_tokens),
            salt=client.tenant,
            hints=client.hints(client, turn),
        )
        self.engine.submit(request, take)

    def _ended(self, client: Client, turn: Turn, answer: list[int], cached: int) -> None:
        client.requests += 1
        client.asked_tokens += len(client.history)
        client.cached_tokens += cached
        client.recomputed_tokens += max(0, client.known_tokens - cached)
        client.history += answer
        client.known_tokens = len(client.history) - 1
        client.is_waiting = False
        client.ready_at = self.clock.now + turn.pause_s
        if turn.is_last:
            client.session += 1
            client.history, client.known_tokens = [], SYSTEM_TOKENS


def agent_turns(rng: np.random.Generator, median_s: float, least_s: float, most_s: float) -> Iterator[Turn]:
    """Yields the turns of one session after the other."""
    system = np.random.default_rng(0).integers(0, VOCAB, SYSTEM_TOKENS).tolist()
    while True:
        turns = int(rng.integers(4, 17))
        for number in range(turns):
            head = system if number == 0 else []
            new = rng.integers(0, VOCAB, int(rng.integers(40, 160))).tolist()
            pause_s = float(np.clip(median_s * rng.lognormal(0.0, 0.4), least_s, most_s))
            yield Turn([*head, *new], int(rng.integers(8, 40)), pause_s, number == turns - 1)


def no_hints(client: Client, turn: Turn) -> None:
    return None


def ttl_and_session(client: Client, turn: Turn) -> CacheHints:
    kept = () if turn.is_last else (Retention("ttl", ttl_s=2 * client.median_s),)
    return CacheHints(client.tenant, client.session_name, "session", turn.is_last, kept)


def session_alone(client: Client, turn: Turn) -> CacheHints:
    return CacheHints(client.tenant, client.session_name, "session", turn.is_last)


def ttl_alone(client: Client, turn: Turn) -> CacheHints:
    return CacheHints(client.tenant, retentions=(Retention("ttl", ttl_s=2 * client.median_s),))


def agents(
    count: int,
    seed: int,
    hints: Callable[[Client, Turn], CacheHints | None],
    least_s: float = MINUTE_S,
    most_s: float = 30 * MINUTE_S,
) -> list[Client]:
    found = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        median_s = least_s * math.exp(rng.random() * math.log(most_s / least_s))
        turns = agent_turns(rng, median_s, least_s, most_s)
        found.append(
            Client(f"agent-{number}", "agents", turns, hints, median_s, float(rng.random() * median_s))
        )
    return found


def greedy_turns(rng: np.random.Generator) -> Iterator[Turn]:
    while True:
        yield Turn(rng.integers(0, VOCAB, int(rng.integers(300, 900))).tolist(), 4, 0.5, True)


def greedy_hints(client: Client, turn: Turn) -> CacheHints:
    kept = (Retention("ttl", ttl_s=MAX_TTL_S, priority=GREATEST_PRIORITY),)
    return CacheHints(client.tenant, client.session_name, "session", False, kept)


def greedy(seed: int, hints: Callable[[Client, Turn], CacheHints | None]) -> list[Client]:
    return [
        Client(f"greedy-{number}", "greedy", greedy_turns(np.random.default_rng([seed, 9, number])), hints, 1.0, 0.0)
        for number in range(2)
    ]


def hit_rate(world: World, tenant: str) -> float:
    of = [client for client in world.clients if client.tenant == tenant]
    return sum(client.cached_tokens for client in of) / sum(client.asked_tokens for client in of)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--agents", type=int, default=48)
    options.add_argument("--hours", type=float, default=8.0, help="of simulated time")
    options.add_argument("--seed", type=int, default=3)
    given = options.parse_args()
    figures: dict[str, Any] = {"agents": given.agents, "simulated_hours": given.hours}
    until_s = given.hours * 3600.0

    ample = World(10**6, agents(given.agents, given.seed, no_hints)).run(until_s)
    budget = ample.peak_tokens // 4
    figures |= {"budget_tokens": budget, "peak_tokens_of_sessions": ample.peak_tokens}
    recomputed = {}
    for name, hints in (
        ("none", no_hints),
        ("ttl", ttl_alone),
        ("session", session_alone),
        ("ttl_and_session", ttl_and_session),
    ):
        world = World(budget, agents(given.agents, given.seed, hints)).run(until_s)
        recomputed[name] = sum(client.recomputed_tokens for client in world.clients)
        figures |= {
            f"{name}_requests": sum(client.requests for client in world.clients),
            f"{name}_recomputed_tokens": recomputed[name],
            f"{name}_hit_rate": round(hit_rate(world, "agents"), 3),
        }
        print({key: value for key, value in figures.items() if key.startswith(name)}, flush=True)
    for name in ("ttl", "session", "ttl_and_session"):
        figures[f"{name}_over_none"] = round(recomputed[name] / recomputed["none"], 3)

    def others(hints: Callable[[Client, Turn], CacheHints | None]) -> list[Client]:
        return agents(given.agents // 3, given.seed + 1, hints, MINUTE_S, 5 * MINUTE_S)

    until_s = min(until_s, 2 * 3600.0)
    alone = World(10**6, others(no_hints)).run(until_s)
    budget = alone.peak_tokens * 5 // 2
    flood, modest = greedy(given.seed, greedy_hints), greedy(given.seed, no_hints)
    rates = {
        "alone_with_hints": World(budget, others(ttl_and_session)),
        "hints_beside_greedy": World(budget, [*others(ttl_and_session), *flood]),
        "no_hints_beside_greedy": World(budget, [*others(no_hints), *greedy(given.seed, greedy_hints)]),
        "no_hints_beside_flood_without_hints": World(budget, [*others(no_hints), *modest]),
    }
    for name, world in rates.items():
        figures[f"hit_rate_{name}"] = round(hit_rate(world.run(until_s), "agents"), 4)
        print(name, figures[f"hit_rate_{name}"], flush=True)
        world.cache.check()
    figures["lost_points_with_hints"] = round(
        100 * (figures["hit_rate_alone_with_hints"] - figures["hit_rate_hints_beside_greedy"]), 2
    )
    figures["lost_points_without_hints"] = round(
        100
        * (figures["hit_rate_no_hints_beside_flood_without_hints"] - figures["hit_rate_no_hints_beside_greedy"]),
        2,
    )
    conclude(
        SHOW,
        figures,
        {
            "ttl_and_session_over_none": at_most(MOST_RATIO),
            "lost_points_with_hints": at_most(MOST_LOST_POINTS),
            "lost_points_without_hints": at_most(MOST_LOST_POINTS),
        },
    )


if __name__ == "__main__":
    main()
