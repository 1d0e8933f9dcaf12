"""H7: thirty minutes of 64 clients of all three APIs against two models, with a tiny budget for their caches.

Each client holds a conversation, whole or streamed, and begins a new one after some turns. At random it closes a
stream in the middle, repeats a request, gives hints, pins and releases prefixes, asks for an explanation, and changes
to the other model. The server runs in a process of its own, with a disk tier below memory.

Figures: answers that neither ended nor were dropped here, requests that got no answer in time, and unexpected
statuses (429 and 503 make a client wait, as clients do). The server's resident memory: mean of the last third of the
time over that of the second third. Blocks that are in use, leases and requests after the last client has left, and
bytes in the pools after a clear.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
from agent_world import WORDS, prose
from common import argument_parser, at_least, at_most, conclude, could_not, exactly
from peers import PeerUnavailable, rootstock_server

from checkpoints import save_chat

Json = dict[str, Any]

SHOW = "H7"
CLIENTS = 64
MODELS = {"first": "full", "second": "states"}  # name → kind of the tiny model
OPTIONS = ("--dtype", "float32", "--kv-budget", "6MiB", "--disk-budget", "64MiB", "--max-queue", "256")
# Bounded stores beside the caches, small enough to be full in the first third of the time: answers and tokenized
# prompts of each model, and stored responses.
OPTIONS += ("--answer-memory", "1MiB", "--responses-budget", "4MiB")
LATEST_ANSWER_S = 300.0
SAMPLE_EVERY_S = 2.0
TURNS = 6
DROPPED, REPEATED, EXPLAINED, PINNED, SWITCHED = 0.15, 0.1, 0.05, 0.03, 0.1  # shares of the requests


@dataclass
class Counts:
    ended: int = 0  # whole answers, and streams with their last event
    dropped: int = 0  # streams that the client closed
    refused: int = 0  # 429 and 503
    unended: int = 0  # streams that stopped without a last event
    hung: int = 0
    unexpected: Counter[str] = field(default_factory=Counter)  # other statuses and errors
    pinned: int = 0
    not_pinned: int = 0
    hints: Counter[str] = field(default_factory=Counter)  # verdicts on hints
    models: Counter[str] = field(default_factory=Counter)
    apis: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Api:
    """One of the three APIs: its route, and how a turn becomes a body with hints."""

    name: str
    path: str
    last_event: str
    body: Callable[[list[Json], str, random.Random], Json]


def chat_body(messages: list[Json], rules: str, rng: random.Random) -> Json:
    body: Json = {"messages": [{"role": "system", "content": rules}, *messages], "max_tokens": 12}
    body |= rng.choice(({}, {"prompt_cache_key": f"s{rng.randrange(40)}"}, {"prompt_cache_retention": "24h"}))
    return body


def messages_body(messages: list[Json], rules: str, rng: random.Random) -> Json:
    mark = {"type": "ephemeral", "ttl": rng.choice(("5m", "1h"))}
    system: Json = {"type": "text", "text": rules}
    if rng.random() < 0.7:
        system["cache_control"] = mark
    return {"system": [system], "messages": messages, "max_tokens": 12}


def responses_body(messages: list[Json], rules: str, rng: random.Random) -> Json:
    body: Json = {
        "instructions": rules,
        "input": messages,
        "max_output_tokens": 16,
        "store": rng.random() < 0.2,
    }
    return body | ({"prompt_cache_key": f"s{rng.randrange(40)}"} if rng.random() < 0.5 else {})


APIS = (
    Api("chat", "/v1/chat/completions", "data: [DONE]", chat_body),
    Api("messages", "/v1/messages", "event: message_stop", messages_body),
    Api("responses", "/v1/responses", "event: response.", responses_body),  # completed, incomplete or failed
)
RESPONSE_ENDS = ("event: response.completed", "event: response.incomplete", "event: response.failed")


class Client:
    """A user who talks to one API at a time."""

    def __init__(self, number: int, http: httpx.AsyncClient, counts: Counts) -> None:
        self._rng = random.Random(number)
        self._http = http
        self._counts = counts
        self._tenant = {"X-Cache-Salt": f"tenant-{number % 4}"}
        self._rules = [prose(self._rng, self._rng.randrange(40, 300)) for _ in range(3)]

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            api = self._rng.choice(APIS)
            model = self._rng.choice(list(MODELS))
            rules, messages = self._rng.choice(self._rules), list[Json]()
            for _ in range(self._rng.randrange(1, TURNS + 1)):
                if time.monotonic() >= until:
                    return
                if self._rng.random() < SWITCHED:
                    model = self._rng.choice(list(MODELS))
                question = prose(self._rng, self._rng.randrange(5, 60))
                messages.append({"role": "user", "content": question})
                body = api.body(messages, rules, self._rng) | {"model": model, "temperature": 0}
                await self._turn(api, body)
                messages.append({"role": "assistant", "content": self._rng.choice(WORDS)})

    async def _turn(self, api: Api, body: Json) -> None:
        self._counts.models[body["model"]] += 1
        self._counts.apis[api.name] += 1
        for _ in range(2 if self._rng.random() < REPEATED else 1):
            if self._rng.random() < 0.6:
                await self._guarded(lambda: self._stream(api, body | {"stream": True}))
            else:
                await self._guarded(lambda: self._whole(api.path, body))
        chat = {"model": body["model"], "messages": body.get("messages") or body["input"]}
        if self._rng.random() < EXPLAINED:
            await self._guarded(lambda: self._whole("/v1/cache/explain", chat))
        if self._rng.random() < PINNED:
            await self._guarded(lambda: self._pin(chat))

    async def _guarded(self, request: Callable[[], Any]) -> None:
        """Makes a request until the server takes it, as clients do, and counts its end."""
        for attempt in range(20):
            try:
                status = await request()
            except httpx.TimeoutException:
                self._counts.hung += 1
                return
            except httpx.HTTPError as error:
                self._counts.unexpected[type(error).__name__] += 1
                return
            if status not in (429, 503):
                if status != 200:
                    self._counts.unexpected[str(status)] += 1
                return
            self._counts.refused += 1
            await asyncio.sleep(min(4.0, 0.1 * 2**attempt) * self._rng.random())

    async def _whole(self, path: str, body: Json) -> int:
        answer = await self._http.post(path, json=body, headers=self._tenant)
        if answer.status_code == 200:
            self._counts.ended += 1
            self._count_hints(answer.json())
        return answer.status_code

    async def _stream(self, api: Api, body: Json) -> int:
        dropped_after = self._rng.randrange(12) if self._rng.random() < DROPPED else None
        ends = RESPONSE_ENDS if api.name == "responses" else (api.last_event,)
        async with self._http.stream("POST", api.path, json=body, headers=self._tenant) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return answer.status_code
            ended, lines = False, 0
            async for line in answer.aiter_lines():
                lines += 1
                ended = ended or line.startswith(ends)
                if dropped_after is not None and lines > dropped_after and not ended:
                    self._counts.dropped += 1
                    return 200
                if '"hints"' in line and line.startswith("data: {"):
                    self._count_hints(json.loads(line[6:]))
        if ended:
            self._counts.ended += 1
        else:
            self._counts.unended += 1
        return 200

    async def _pin(self, chat: Json) -> int:
        answer = await self._http.post("/v1/cache/pin", json=chat, headers=self._tenant)
        if answer.status_code == 409:  # nothing of it is cached any more, or the tenant's share is full
            self._counts.not_pinned += 1
            return 200
        if answer.status_code != 200:
            return answer.status_code
        self._counts.pinned += 1
        await asyncio.sleep(5 * self._rng.random())
        pin = {"id": answer.json()["id"]}
        released = await self._http.post("/v1/cache/release", json=pin, headers=self._tenant)
        # Another client of the tenant may have released it, or a request needed the memory.
        return 200 if released.status_code == 404 else released.status_code

    def _count_hints(self, body: Json) -> None:
        told = body.get("rootstock") or (body.get("response") or {}).get("rootstock") or {}
        for hint in told.get("hints", ()):
            self._counts.hints[hint["verdict"]] += 1


async def load(url: str, seconds: float, counts: Counts) -> None:
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=2 * CLIENTS)
    async with (
        httpx.AsyncClient(base_url=url, timeout=LATEST_ANSWER_S, limits=limits, trust_env=False) as http,
        asyncio.TaskGroup() as clients,
    ):
        for number in range(CLIENTS):
            clients.create_task(Client(number, http, counts).run(until))
        clients.create_task(_tell(until, counts))


async def _tell(until: float, counts: Counts) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(min(60.0, max(0.1, until - time.monotonic())))
        print(f"{until - time.monotonic():.0f} s left: {counts}", flush=True)


async def watch(pid: int, samples: list[tuple[float, int]]) -> None:
    """Samples the resident memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status")
    while True:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        samples.append((time.monotonic(), int(line.split()[1]) * 1024))
        await asyncio.sleep(SAMPLE_EVERY_S)


async def run(url: str, pid: int, seconds: float, counts: Counts) -> list[tuple[float, int]]:
    samples: list[tuple[float, int]] = []
    watching = asyncio.create_task(watch(pid, samples))
    await load(url, seconds, counts)
    watching.cancel()
    minutes = {round((at - samples[0][0]) / 60): round(size / 2**20, 1) for at, size in samples}
    print(f"resident MiB by minute: {minutes}", flush=True)
    return samples


def growth(samples: list[tuple[float, int]]) -> float:
    """Returns the mean of the last third of the time over that of the second third, less one."""
    began, ended = samples[0][0], samples[-1][0]

    def mean_of(third: int) -> float:
        first, last = (began + (ended - began) * part / 3 for part in (third, third + 1))
        return mean(size for at, size in samples if first <= at <= last)

    return mean_of(2) / mean_of(1) - 1


def settled(url: str) -> Json:
    """Returns the state of the caches after the last request, and after a clear."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        figures: Json = {}
        deadline = time.monotonic() + LATEST_ANSWER_S
        while True:
            health = http.get("/health").json()
            told = [http.get("/v1/cache/stats", params={"model": name}).json() for name in MODELS]
            stats = [each["cache"] for each in told]
            # Idle work goes on for a while: the next turns of the last answers, and prefixes on disk.
            idle = sum(each["idle"]["waiting"] for each in told)
            busy = health["running"] + health["waiting"] + idle + sum(each["leases"] for each in stats)
            if not busy or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        figures |= {"running": health["running"], "waiting": health["waiting"], "idle_waiting": idle}
        figures["leases"] = sum(each["leases"] for each in stats)
        figures["live_blocks"] = sum(each["live_blocks"] for each in stats)
        figures["unbalanced_blocks"] = sum(
            each["total_blocks"] - each["free_blocks"] - each["cached_blocks"] - each["live_blocks"]
            for each in stats
        )
        figures["evicted_blocks"] = sum(each["evicted_blocks"] for each in stats)
        http.post("/v1/cache/clear").raise_for_status()
        stats = [http.get("/v1/cache/stats", params={"model": name}).json()["cache"] for name in MODELS]
        figures["bytes_after_clear"] = sum(each["used_bytes"] for each in stats)
        return figures


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    args = parser.parse_args()
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        models = [save_chat(Path(folder) / name, kind) for name, kind in MODELS.items()]
        tier = ("--disk-dir", str(Path(folder) / "tier"))
        try:
            with rootstock_server(models[0], str(models[1]), *OPTIONS, *tier) as server:
                samples = asyncio.run(run(server.url, server.pid, args.seconds, counts))
                figures: Json = settled(server.url)
        except PeerUnavailable as error:
            could_not(SHOW, str(error))
    figures |= {
        "clients": CLIENTS,
        "seconds": args.seconds,
        "requests": sum(counts.apis.values()),
        "ended": counts.ended,
        "dropped": counts.dropped,
        "refused": counts.refused,
        "unended": counts.unended,
        "hung": counts.hung,
        "unexpected": dict(counts.unexpected),
        "hints": dict(counts.hints),
        "pinned": counts.pinned,
        "not_pinned": counts.not_pinned,
        "apis": dict(counts.apis),
        "models": dict(counts.models),
        "memory_growth": round(growth(samples), 4),
        "memory_mib": round(samples[-1][1] / 2**20, 1),
    }
    bars = {
        "seconds": at_least(1800),
        "unended": exactly(0),
        "hung": exactly(0),
        "unexpected": exactly({}),
        "memory_growth": at_most(0.03),
        "running": exactly(0),
        "waiting": exactly(0),
        "idle_waiting": exactly(0),
        "leases": exactly(0),
        "live_blocks": exactly(0),
        "unbalanced_blocks": exactly(0),
        "bytes_after_clear": exactly(0),
    }
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
