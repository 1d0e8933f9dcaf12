"""H2: hints. Agents whose tool calls take 1 to 30 minutes share a cache with room for a quarter of them.

Two mixes of agents. *kinds*: of five agents, one runs unit tests (1 to 3 minutes), one builds (5 to 12), and three
wait for CI or other long jobs (12 to 30); each agent's calls have one expected time, log-uniform within its kind.
*claude_code*: each call's expected time is drawn from the pauses of 1 to 30 minutes behind 2,081 tool calls of 236
real Claude Code sessions (callanjfox/kv-cache-tester). In both, a call varies around its expected time (log-normal,
clipped to 1 and 30 minutes). A session has 4 to 16 turns, and a new one follows it. All of them begin with one
system prompt. The engine and the cache are the real ones on the oracle runtime, the cache with its default policy
in each run. The clock is the simulation's: a step takes as long as its tokens.

A prompt token is *recomputed* if an earlier request had computed it and it is computed again. The budget is a
quarter of the tokens of all running sessions, on average over time. With hints each request names its session and
asks for a time to live of twice the expected time of its call, and the last one ends the session. Without hints the
same requests are sent. `best_over_none` is the figure of a cache that knows when each session comes back (Belady's
rule, token by token, on the same pauses): no cache can be better.

Then a greedy tenant: it sends new prompts without a pause, each with the longest time to live, the highest priority
and a session of its own, beside a tenant whose agents pause for 1 to 5 minutes and whose sessions fill two fifths of
the cache. The hit rate of the second tenant is compared with that without the greedy one, and, where it sends no
hints itself, with that beside the same flood without hints.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import argument_parser, at_most, conclude

from rootstock.cache import KVCache
from rootstock.cache.families import row_bytes
from rootstock.cache.retention.hint_types import GREATEST_PRIORITY, MAX_TTL_S, CacheHints, RetentionWish
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import (
    Event,
    Finished,
    Request,
    RequestId,
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
# Kinds of agents, by the median time of their tool calls: unit tests, builds, and three of five wait for CI.
KINDS = ((60.0, 180.0), (300.0, 720.0), *[(720.0, 1800.0)] * 3)
# Seconds between a tool call and its result, in steps of 5 % of the calls that take 1 to 30 minutes.
CLAUDE_CODE_S = (
    *(60, 65, 67, 71, 78, 91, 98, 111, 123, 125, 129),
    *(139, 156, 183, 193, 246, 307, 372, 604, 683, 1795),
)
MOST_RATIO = 0.5
MOST_LOST_POINTS = 5.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Turn:
    """One request of an agent, and the pause after its answer."""

    new_tokens: list[int]
    answer_tokens: int
    pause_s: float
    expected_s: float  # the client's guess of the pause
    is_last: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """The time in which a session's tokens wait for their next use."""

    begins_s: float
    ends_s: float
    tokens: int  # the system prompt's excluded


@dataclass
class Client:
    """A client that sends its next request some time after the last answer."""

    name: str
    tenant: str
    turns: Iterator[Turn]
    hints: Callable[[Client, Turn], CacheHints | None]
    ready_at: float
    session: int = 0
    history: list[int] = field(default_factory=list)
    known_tokens: int = 0  # of the history, that were computed before
    is_waiting: bool = False
    asked_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    requests: int = 0
    pauses: list[Pause] = field(default_factory=list)

    @property
    def session_name(self) -> str:
        return f"{self.name}-{self.session}"


def request_of(client: Client, turn: Turn, number: int) -> Request:
    """Makes the request of a turn, whose tokens are in the client's history."""
    return Request(
        RequestId(f"{client.name}-{number}"),
        np.array(client.history, np.int32),
        ResolvedSampling(temperature=0.0),
        StopParams(max_tokens=turn.answer_tokens, ignore_eos=True),
        salt=client.tenant,
        hints=client.hints(client, turn),
    )


class World:
    """An engine, its clients and the clock."""

    def __init__(self, budget_tokens: int, clients: list[Client]) -> None:
        self.clock = Clock()
        runtime = FakeRuntime(VOCAB, families=(FULL,), eos_token_ids=(), fault=self._compute)
        blocks = budget_tokens // BLOCK
        self.cache = KVCache((FULL,), blocks * row_bytes(FULL, BLOCK), BLOCK, clock=self.clock)
        runtime.allocate(self.cache.rows, BLOCK)
        self.engine = Engine(runtime, self.cache, EngineConfig(seed=1), clock=self.clock)
        self.clients = clients
        self._token_seconds = 0.0
        self._ids = itertools.count()

    def run(self, until_s: float) -> World:
        while self.clock.now < until_s:
            due = [each for each in self.clients if not each.is_waiting and each.ready_at <= self.clock.now]
            for client in due:
                self._ask(client)
            if not due and not self.engine.scheduler.has_work:
                self._pass_until(min(each.ready_at for each in self.clients))
                continue
            self.engine.step()
        return self

    @property
    def session_tokens(self) -> int:
        """Tokens of all running sessions, on average over time."""
        return int(self._token_seconds / self.clock.now)

    def _compute(self, batch: Batch) -> None:
        self._pass_until(self.clock.now + STEP_S + batch.new_tokens / TOKENS_PER_S)

    def _pass_until(self, then: float) -> None:
        held = sum(len(each.history) for each in self.clients)
        self._token_seconds += held * (then - self.clock.now)
        self.clock.now = then

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

        self.engine.submit(request_of(client, turn, next(self._ids)), take)

    def _ended(self, client: Client, turn: Turn, answer: list[int], cached: int) -> None:
        client.requests += 1
        client.asked_tokens += len(client.history)
        client.cached_tokens += cached
        client.recomputed_tokens += max(0, client.known_tokens - cached)
        client.history += answer
        client.known_tokens = len(client.history) - 1
        client.is_waiting = False
        client.ready_at = self.clock.now + turn.pause_s
        if not turn.is_last:
            client.pauses.append(Pause(self.clock.now, client.ready_at, client.known_tokens - SYSTEM_TOKENS))
        else:
            client.session += 1
            client.history, client.known_tokens = [], SYSTEM_TOKENS


def agent_turns(rng: np.random.Generator, expected: Iterator[float]) -> Iterator[Turn]:
    """Yields the turns of one session after the other."""
    system = np.random.default_rng(0).integers(0, VOCAB, SYSTEM_TOKENS).tolist()
    while True:
        turns = int(rng.integers(4, 17))
        for number in range(turns):
            head = system if number == 0 else []
            new = rng.integers(0, VOCAB, int(rng.integers(40, 160))).tolist()
            expected_s = next(expected)
            pause_s = float(np.clip(expected_s * rng.lognormal(0.0, 0.4), MINUTE_S, 30 * MINUTE_S))
            yield Turn([*head, *new], int(rng.integers(4, 12)), pause_s, expected_s, number == turns - 1)


def of_kinds(number: int, rng: np.random.Generator) -> Iterator[float]:
    least_s, most_s = KINDS[number % len(KINDS)]
    return log_uniform(rng, least_s, most_s)


def of_claude_code(number: int, rng: np.random.Generator) -> Iterator[float]:
    steps = np.arange(len(CLAUDE_CODE_S))
    while True:
        yield float(np.exp(np.interp(rng.random() * steps[-1], steps, np.log(CLAUDE_CODE_S))))


def of_short_calls(number: int, rng: np.random.Generator) -> Iterator[float]:
    return log_uniform(rng, MINUTE_S, 5 * MINUTE_S)


def log_uniform(rng: np.random.Generator, least_s: float, most_s: float) -> Iterator[float]:
    """Yields one expected time for all calls of an agent."""
    return itertools.repeat(least_s * math.exp(rng.random() * math.log(most_s / least_s)))


Mix = Callable[[int, np.random.Generator], Iterator[float]]  # the expected times of an agent's calls


def no_hints(client: Client, turn: Turn) -> None:
    return None


def ttl_and_session(client: Client, turn: Turn) -> CacheHints:
    kept = () if turn.is_last else (RetentionWish("ttl", ttl_s=2 * turn.expected_s),)
    return CacheHints(client.tenant, client.session_name, "session", turn.is_last, kept)


def session_alone(client: Client, turn: Turn) -> CacheHints:
    return CacheHints(client.tenant, client.session_name, "session", turn.is_last)


def ttl_alone(client: Client, turn: Turn) -> CacheHints:
    return CacheHints(client.tenant, retentions=(RetentionWish("ttl", ttl_s=2 * turn.expected_s),))


def agents(
    count: int, seed: int, hints: Callable[[Client, Turn], CacheHints | None], mix: Mix
) -> list[Client]:
    found = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        expected = mix(number, rng)
        ready_s = float(rng.random() * next(expected))
        found.append(Client(f"agent-{number}", "agents", agent_turns(rng, expected), hints, ready_s))
    return found


def best_recomputed(clients: Sequence[Client], budget_tokens: int, until_s: float) -> int:
    """Returns the tokens that a cache recomputes if it always drops those whose session comes back last (Belady)."""
    pauses = [each for client in clients for each in client.pauses if each.begins_s < until_s]
    begins = [(each.begins_s, True, number) for number, each in enumerate(pauses)]
    ends = [(each.ends_s, False, number) for number, each in enumerate(pauses) if each.ends_s < until_s]
    room, recomputed = budget_tokens - SYSTEM_TOKENS, 0
    held: dict[int, int] = {}
    last: list[tuple[float, int]] = []  # a heap: the one that comes back last first
    for _, is_begin, number in sorted(begins + ends):
        pause = pauses[number]
        if not is_begin:
            kept = held.pop(number, 0)
            room, recomputed = room + kept, recomputed + pause.tokens - kept
            continue
        held[number], room = pause.tokens, room - pause.tokens
        heapq.heappush(last, (-pause.ends_s, number))
        while room < 0:
            victim = last[0][1]
            dropped = min(held.get(victim, 0), -room)
            room += dropped
            if not dropped or dropped == held[victim]:
                held.pop(victim, None)
                heapq.heappop(last)
            else:
                held[victim] -= dropped
    return recomputed


def greedy_turns(rng: np.random.Generator) -> Iterator[Turn]:
    while True:
        yield Turn(rng.integers(0, VOCAB, int(rng.integers(300, 900))).tolist(), 4, 0.5, 0.5, True)


def greedy_hints(client: Client, turn: Turn) -> CacheHints:
    kept = (RetentionWish("ttl", ttl_s=MAX_TTL_S, priority=GREATEST_PRIORITY),)
    return CacheHints(client.tenant, client.session_name, "session", False, kept)


def greedy(seed: int, hints: Callable[[Client, Turn], CacheHints | None]) -> list[Client]:
    return [
        Client(
            f"greedy-{number}",
            "greedy",
            greedy_turns(np.random.default_rng([seed, 9, number])),
            hints,
            0.0,
        )
        for number in range(2)
    ]


def hit_rate(world: World, tenant: str) -> float:
    of = [client for client in world.clients if client.tenant == tenant]
    return sum(client.cached_tokens for client in of) / sum(client.asked_tokens for client in of)


def compare(given: argparse.Namespace, mix: Mix, until_s: float) -> dict[str, Any]:
    """Returns the recomputed tokens with each kind of hints over those without."""
    ample = World(10**6, agents(given.agents, given.seed, no_hints, mix)).run(until_s)
    budget = ample.session_tokens // 4
    figures: dict[str, Any] = {"budget_tokens": budget, "tokens_of_sessions": ample.session_tokens}
    recomputed = {"best": best_recomputed(ample.clients, budget, until_s)}
    for name, hints in (
        ("none", no_hints),
        ("ttl", ttl_alone),
        ("session", session_alone),
        ("ttl_and_session", ttl_and_session),
    ):
        world = World(budget, agents(given.agents, given.seed, hints, mix)).run(until_s)
        recomputed[name] = sum(client.recomputed_tokens for client in world.clients)
        figures |= {
            f"{name}_requests": sum(client.requests for client in world.clients),
            f"{name}_recomputed_tokens": recomputed[name],
            f"{name}_hit_rate": round(hit_rate(world, "agents"), 3),
        }
    for name in ("best", "ttl", "session", "ttl_and_session"):
        figures[f"{name}_over_none"] = round(recomputed[name] / recomputed["none"], 3)
    return figures


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--agents", type=int, default=60)
    options.add_argument("--hours", type=float, default=2.0, help="of simulated time")
    options.add_argument("--seed", type=int, default=3)
    given = options.parse_args()
    figures: dict[str, Any] = {"agents": given.agents, "simulated_hours": given.hours}
    until_s = given.hours * 3600.0
    for name, mix in (("kinds", of_kinds), ("claude_code", of_claude_code)):
        figures |= {f"{name}_{key}": value for key, value in compare(given, mix, until_s).items()}
        print(figures, flush=True)

    def others(hints: Callable[[Client, Turn], CacheHints | None]) -> list[Client]:
        return agents(given.agents // 3, given.seed + 1, hints, of_short_calls)

    until_s = min(until_s, 1800.0)
    alone = World(10**6, others(no_hints)).run(until_s)
    budget = alone.session_tokens * 5 // 2
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
        * (
            figures["hit_rate_no_hints_beside_flood_without_hints"]
            - figures["hit_rate_no_hints_beside_greedy"]
        ),
        2,
    )
    conclude(
        SHOW,
        figures,
        {
            "kinds_ttl_and_session_over_none": at_most(MOST_RATIO),
            "claude_code_ttl_and_session_over_none": at_most(MOST_RATIO),
            "lost_points_with_hints": at_most(MOST_LOST_POINTS),
            "lost_points_without_hints": at_most(MOST_LOST_POINTS),
        },
    )


if __name__ == "__main__":
    main()
