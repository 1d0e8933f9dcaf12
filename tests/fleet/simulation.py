"""A fleet in simulated time: replicas that compute prompts at a given speed and cache them, sessions of teams, and
routers to compare. A run takes about a tenth of a second.

A replica works as the engine does: steps of 4 ms and the prefill of up to 512 tokens (2,048 if nothing decodes), in
the order of arrival, one new token for each decode; blocks are evicted by their last use; a request waits while
another one computes the block that it needs next.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import xxhash

from rootstock.fleet.policy import ReplicaReport, RoutingPolicy
from rootstock.fleet.prefix_index import Keys, PrefixIndex

BLOCK = 32
TOKENS_A_WORD = 1.4


@dataclass(frozen=True)
class Load:
    """Teams with a system prompt each, and sessions with several turns in each team."""

    teams: int = 6
    sessions: int = 5  # of a team
    turns: int = 5
    system_words: int = 900
    turn_words: int = 80
    answer_tokens: int = 24
    at_once: int = 6
    begin_within_s: float = 1.0
    think_s: float = 0.3  # at most


@dataclass(frozen=True)
class Fleet:
    replicas: int = 3
    cache_tokens: int = 8192
    tokens_per_s: float = 4000.0
    step_s: float = 0.004
    chunk_tokens: int = 512
    idle_chunk_tokens: int = 2048
    max_batch: int = 16
    report_s: float = 1.0


@dataclass(eq=False)
class Prompt:
    """A request."""

    session: int
    keys: list[int]  # of its full blocks
    tokens: int
    keys_after: list[int]  # of the full blocks of prompt and answer
    answer_tokens: int
    ended: Callable[[float], None]
    sent_s: float = 0.0
    first_s: float = 0.0
    cached_tokens: int = 0
    computed: int = 0  # tokens
    answered: int = 0

    @property
    def is_prefilled(self) -> bool:
        return self.computed >= self.tokens


class Clock:
    """Simulated time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), act))

    def run(self) -> None:
        while self._due:
            self.now_s, _, act = heapq.heappop(self._due)
            act()


class Replica:
    def __init__(self, slot: int, fleet: Fleet, clock: Clock, index: PrefixIndex) -> None:
        self.slot, self.fleet, self.clock, self.index = slot, fleet, clock, index
        self.capacity = fleet.cache_tokens // BLOCK
        self.cache: dict[int, None] = {}  # blocks, the one that was not used for longest first
        self.waiting: list[Prompt] = []
        self.running: list[Prompt] = []
        self.steps = False

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def take(self, prompt: Prompt) -> None:
        self.waiting.append(prompt)
        if not self.steps:
            self.steps = True
            self.clock.after(0.0, self.step)

    def report(self) -> ReplicaReport:
        speed = self.fleet.tokens_per_s
        prefilling = len(self.waiting) + sum(not prompt.is_prefilled for prompt in self.running)
        return ReplicaReport(len(self.waiting), len(self.running), prefilling, speed)

    def step(self) -> None:
        self._admit()
        decodes = [prompt for prompt in self.running if prompt.is_prefilled]
        room = self.fleet.chunk_tokens - len(decodes) if decodes else self.fleet.idle_chunk_tokens
        computed, work = 0, list[tuple[Prompt, int]]()
        for prompt in self.running:
            if not prompt.is_prefilled and room:
                part = min(room, prompt.tokens - prompt.computed)
                work.append((prompt, part))
                room, computed = room - part, computed + part
        if not work and not decodes:
            self.steps = False
            return
        due_s = self.fleet.step_s + computed / self.fleet.tokens_per_s
        self.clock.after(due_s, lambda: self._end_step(decodes, work))

    def _matched(self, keys: Sequence[int]) -> int:
        return next((n for n, key in enumerate(keys) if key not in self.cache), len(keys))

    def _admit(self) -> None:
        """Admits requests, but for those whose next block another one computes."""
        for prompt in list(self.waiting):
            matched = self._matched(prompt.keys)
            missing = prompt.keys[matched:]
            in_work = {key for each in self.running for key in each.keys[each.computed // BLOCK :]}
            pinned = {key for each in self.running for key in each.keys_after}
            if missing and missing[0] in in_work:
                continue
            if (
                len(self.running) >= self.fleet.max_batch
                or len(pinned | set(prompt.keys_after)) > self.capacity
            ):
                return
            self.waiting.remove(prompt)
            prompt.cached_tokens = prompt.computed = min(BLOCK * matched, prompt.tokens - 1)
            self._use(prompt.keys[:matched])
            self.running.append(prompt)

    def _use(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # the first block was used last
            self.cache.pop(key, None)
            self.cache[key] = None

    def _end_step(self, decodes: list[Prompt], work: list[tuple[Prompt, int]]) -> None:
        now_s = self.clock.now_s
        for prompt, part in work:
            prompt.computed += part
            self._store(prompt.keys[: prompt.computed // BLOCK])
            if prompt.is_prefilled:
                prompt.first_s = now_s
        for prompt in decodes:
            prompt.answered += 1
            if prompt.answered >= prompt.answer_tokens:
                self.running.remove(prompt)
                self._store(prompt.keys_after)
                prompt.ended(now_s)
        self.step()

    def _store(self, keys: list[int]) -> None:
        new = [key for key in keys if key not in self.cache]
        self._use(keys)
        pinned = {key for each in self.running for key in each.keys_after}
        gone = list[int]()
        for key in self.cache:
            if len(self.cache) - len(gone) <= self.capacity:
                break
            if key not in pinned:
                gone.append(key)
        for key in gone:
            del self.cache[key]
        self.index.stored(self.slot, np.array(new, np.uint64))
        self.index.removed(self.slot, np.array(gone, np.uint64))


class Router(Protocol):
    def choose(self, prompt: Prompt, now_s: float) -> int: ...
    def report(self, now_s: float) -> None: ...


@dataclass
class Unreported:
    """A router that needs no reports."""

    replicas: list[Replica]
    rng: random.Random
    index: PrefixIndex

    def report(self, now_s: float) -> None:
        pass


class PowerOfTwo(Unreported):
    def choose(self, prompt: Prompt, now_s: float) -> int:
        return self.of_two(self.replicas)

    def of_two(self, replicas: list[Replica]) -> int:
        two = self.rng.sample(replicas, min(2, len(replicas)))
        return min(two, key=lambda replica: replica.load).slot


class SessionAffinity(Unreported):
    def choose(self, prompt: Prompt, now_s: float) -> int:
        return random.Random(prompt.session).choice(self.replicas).slot


@dataclass
class PrefixAffinity(PowerOfTwo):
    """Ray's PrefixCacheAffinityRouter: the replica that has got the longest beginning, whatever it has evicted, if
    the load is balanced; the one that has got the least text if none has got a tenth of the prompt."""

    threshold: float = float("inf")
    got: dict[int, set[int]] = field(default_factory=dict)

    def choose(self, prompt: Prompt, now_s: float) -> int:
        got = {replica.slot: self.got.setdefault(replica.slot, set()) for replica in self.replicas}
        loads = [replica.load for replica in self.replicas]
        chosen = self.replicas
        if max(loads) - min(loads) <= self.threshold:
            matched = {
                slot: next((n for n, key in enumerate(prompt.keys) if key not in keys), len(prompt.keys))
                for slot, keys in got.items()
            }
            most, least = max(matched.values()), min(map(len, got.values()))
            if most >= 0.1 * len(prompt.keys):
                chosen = [replica for replica in self.replicas if matched[replica.slot] == most]
            else:
                chosen = [replica for replica in self.replicas if len(got[replica.slot]) == least]
        slot = self.of_two(chosen)
        got[slot].update(prompt.keys)
        return slot


@dataclass
class Ours(Unreported):
    def __post_init__(self) -> None:
        self.policy = RoutingPolicy(self.index, BLOCK)
        for replica in self.replicas:
            self.policy.add(replica.slot, f"replica {replica.slot}", 2000.0)

    def report(self, now_s: float) -> None:
        for replica in self.replicas:
            self.policy.report(replica.slot, replica.report(), now_s)

    def choose(self, prompt: Prompt, now_s: float) -> int:
        keys: Keys = np.array(prompt.keys, np.uint64)
        slots = [replica.slot for replica in self.replicas]
        best = self.policy.ranked(keys, prompt.tokens, slots, now_s)[0]
        self.policy.assigned(best, keys, now_s)
        return best.slot


@dataclass(frozen=True)
class Outcome:
    hit_rate: float
    ttft_p50_s: float
    ttft_p95_s: float
    requests_of: tuple[int, ...]  # by replica


RouterKind = Callable[[list[Replica], random.Random, PrefixIndex], Router]


class _Client:
    """Sessions that send their turns one after the other, so many requests at once together."""

    def __init__(self, load: Load, clock: Clock, rng: random.Random, send: Callable[[Prompt], None]) -> None:
        self.load, self.clock, self.rng, self.send = load, clock, rng, send
        self.queue: list[Prompt] = []
        self.in_flight = 0
        self.prompts: list[Prompt] = []
        self.left = load.teams * load.sessions * load.turns
        systems = [self._words(load.system_words, 0.03) for _ in range(load.teams)]
        for number in range(load.teams * load.sessions):
            team = number % load.teams
            clock.after(rng.random() * load.begin_within_s, self._turn(number, [(team, systems[team])], 0))

    def _words(self, words: int, spread: float) -> int:
        return round(words * TOKENS_A_WORD * self.rng.uniform(1 - spread, 1 + spread))

    def _turn(self, session: int, parts: list[tuple[int, int]], turn: int) -> Callable[[], None]:
        def act() -> None:
            prompt = [*parts, (1000 * session + turn + 10**6, 10 + self._words(self.load.turn_words, 0.05))]
            after = [*prompt, (1000 * session + turn + 10**9, self.load.answer_tokens)]

            def ended(now_s: float) -> None:
                self.in_flight -= 1
                self.left -= 1
                self._send_next()
                if turn + 1 < self.load.turns:
                    think_s = self.rng.random() * self.load.think_s
                    self.clock.after(think_s, self._turn(session, after, turn + 1))

            tokens = sum(size for _, size in prompt)
            request = Prompt(
                session, self._names(prompt), tokens, self._names(after), self.load.answer_tokens, ended
            )
            self.queue.append(request)
            self._send_next()

        return act

    def _names(self, parts: list[tuple[int, int]]) -> list[int]:
        """Names the full blocks of a text of parts: each by all parts that it and the blocks before it touch."""
        names, end, begun = list[int](), 0, list[int]()
        for part, size in parts:
            begun.append(part)
            end += size
            while (len(names) + 1) * BLOCK <= end:
                names.append(xxhash.xxh3_64_intdigest(np.array((*begun, len(names)), np.int64).tobytes()))
        return names

    def _send_next(self) -> None:
        while self.queue and self.in_flight < self.load.at_once:
            prompt = self.queue.pop(0)
            self.in_flight += 1
            prompt.sent_s = self.clock.now_s
            self.prompts.append(prompt)
            self.send(prompt)


def simulate(kind: RouterKind, seed: int, load: Load | None = None, fleet: Fleet | None = None) -> Outcome:
    load, fleet = load or Load(), fleet or Fleet()
    clock, index, rng = Clock(), PrefixIndex(), random.Random(seed)
    replicas = [Replica(index.join(), fleet, clock, index) for _ in range(fleet.replicas)]
    router = kind(replicas, random.Random(seed + 1), index)
    counts = [0] * fleet.replicas

    def send(prompt: Prompt) -> None:
        slot = router.choose(prompt, clock.now_s)
        counts[slot] += 1
        replicas[slot].take(prompt)

    def report() -> None:
        router.report(clock.now_s)
        if client.left:
            clock.after(fleet.report_s, report)

    client = _Client(load, clock, rng, send)
    report()
    clock.run()
    ttfts = sorted(prompt.first_s - prompt.sent_s for prompt in client.prompts)
    cached, asked = (sum(getattr(p, name) for p in client.prompts) for name in ("cached_tokens", "tokens"))
    return Outcome(cached / asked, ttfts[len(ttfts) // 2], ttfts[int(0.95 * len(ttfts))], tuple(counts))
