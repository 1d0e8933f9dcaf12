"""Load on a fleet: teams that share a system prompt, sessions in each team, turns in each session, all streamed.

What is asked depends on the seed alone, and answers are greedy: two fleets that work give the same answer to each
(team, session, turn).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cache

import httpx

from rootstock.bench.corpus import document

Place = tuple[int, int, int]  # team, session and turn

SYSTEM_WORDS, TURN_WORDS = 900, 80
ANSWER_TOKENS = 24
AT_ONCE = 6
MOST_THINK_S = 0.3
RETRY_AFTER_S = 0.5  # as OpenAI's client
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    teams: int = 6
    sessions: int = 5  # of a team
    turns: int = 5  # of a session

    @property
    def requests(self) -> int:
        return self.teams * self.sessions * self.turns


class NoAnswer(Exception):
    """A refusal, an error event, or a stream that was cut."""


@dataclass(frozen=True, slots=True)
class Answer:
    place: Place
    began: float
    first_s: float  # from the first try on
    prompt_tokens: int
    cached_tokens: int
    text: str


@dataclass(slots=True)
class Played:
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of single tries
    lost: list[Place] = field(default_factory=list)  # no try succeeded
    retried: int = 0

    @property
    def texts(self) -> dict[Place, str]:
        return {answer.place: answer.text for answer in self.answers}

    def figures(self) -> dict[str, float]:
        first_ms = sorted(answer.first_s * 1e3 for answer in self.answers)
        return {
            "hit_rate": round(hit_rate(self.answers), 4),
            "ttft_p50_ms": round(percentile(first_ms, 0.5), 1),
            "ttft_p95_ms": round(percentile(first_ms, 0.95), 1),
        }


def hit_rate(answers: Sequence[Answer]) -> float:
    asked = sum(answer.prompt_tokens for answer in answers)
    return sum(answer.cached_tokens for answer in answers) / max(1, asked)


def percentile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else float("nan")


@cache
def _lines() -> list[str]:
    return document(7, 4000)


def text(rng: random.Random, words: int) -> str:
    found: list[str] = []
    while len(found) < words:
        found += rng.choice(_lines()).split()
    return " ".join(found[:words])


class Load:
    """Sessions that ask a server, a few at a time. `tries` of a request: 2 with one retry by the client."""

    def __init__(self, url: str, shape: Shape | None = None, seed: int = 0, tries: int = 2) -> None:
        self.played = Played()
        self._url = url
        self._shape = shape or Shape()
        self._seed = seed
        self._tries = tries
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._systems = [
            text(random.Random(f"{seed}/{team}"), SYSTEM_WORDS) for team in range(self._shape.teams)
        ]

    def play(self, midway: Callable[[], None] = lambda: None) -> Played:
        """Plays every session once. Calls `midway` on a thread when half of the requests have ended."""
        ended = 0

        async def session(client: httpx.AsyncClient, team: int, number: int) -> None:
            nonlocal ended
            async for _ in self._turns(client, team, number):
                ended += 1
                if ended == self._shape.requests // 2:
                    await asyncio.to_thread(midway)

        asyncio.run(self._all(session))
        return self.played

    def play_until(self, stopped: Callable[[], bool]) -> Played:
        """Plays sessions, a new one wherever one has ended, until `stopped`."""

        async def sessions(client: httpx.AsyncClient, team: int, number: int) -> None:
            while not stopped():
                async for _ in self._turns(client, team, number):
                    if stopped():
                        break
                number += self._shape.sessions

        asyncio.run(self._all(sessions))
        return self.played

    async def _all(
        self, session: Callable[[httpx.AsyncClient, int, int], Coroutine[None, None, None]]
    ) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits) as client:
            shape = self._shape
            places = [(team, number) for number in range(shape.sessions) for team in range(shape.teams)]
            await asyncio.gather(*(session(client, team, number) for team, number in places))

    async def _turns(self, client: httpx.AsyncClient, team: int, number: int) -> AsyncIterator[None]:
        """Plays a session, and yields after each of its turns."""
        rng = random.Random(f"{self._seed}/{team}/{number}")
        messages = [{"role": "system", "content": self._systems[team]}]
        await asyncio.sleep(rng.random())
        for turn in range(self._shape.turns):
            messages.append({"role": "user", "content": text(rng, TURN_WORDS)})
            answer = await self._asked(client, (team, number, turn), messages)
            messages.append({"role": "assistant", "content": answer})
            yield
            await asyncio.sleep(rng.random() * MOST_THINK_S)

    async def _asked(self, client: httpx.AsyncClient, place: Place, messages: list[dict[str, str]]) -> str:
        """Asks, again after an error while tries are left, and returns the text; "" if no try succeeded."""
        began = None
        for left in reversed(range(self._tries)):
            try:
                async with self._gate:
                    began = began or time.perf_counter()
                    answer = await _streamed(client, place, messages, began)
            except (NoAnswer, httpx.HTTPError) as error:
                self.played.errors.append(f"{place}: {type(error).__name__}: {error}"[:200])
                if left:
                    await asyncio.sleep(RETRY_AFTER_S)
            else:
                self.played.answers.append(answer)
                self.played.retried += left < self._tries - 1
                return answer.text
        self.played.lost.append(place)
        return ""


async def _streamed(
    client: httpx.AsyncClient, place: Place, messages: list[dict[str, str]], began: float
) -> Answer:
    """Asks for a streamed answer. Raises NoAnswer, and httpx's errors."""
    team, number, _ = place
    body = {
        "model": "any",
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-session-id": f"{team}-{number}"}
    first_s, pieces, usage = 0.0, [], None
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            raise NoAnswer(f"status {response.status_code}: {(await response.aread())[:120]!r}")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                assert usage is not None, "the stream has no usage"
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                return Answer(place, began, first_s, usage["prompt_tokens"], cached, "".join(pieces))
            if not line.startswith("data: "):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise NoAnswer(f"an error event: {chunk['error']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if content := choice["delta"].get("content"):
                    first_s = first_s or time.perf_counter() - began
                    pieces.append(content)
    raise NoAnswer("a stream without its end")
