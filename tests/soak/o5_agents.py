"""O5: two hours of agents of both APIs, of two tenants, against two models, whose sessions need twice the memory.

Each agent names its session, sends tools, answers the calls of the model (whose arguments the grammar of the tool
makes valid), pauses as Claude Code's tool calls do, twice as fast, and begins a new session after some turns. A
few streams are closed in the middle, and their turn is sent again. The server is a process of its own. Both models
share one budget: half of what the agents' sessions need on average where nothing is evicted. That is measured first.

Figures: tokens found of the prompts' tokens, by quarter of the time; resident memory, the mean of the last quarter
over that of the second; requests without an answer, and the longest. Afterwards some of the sessions are held again,
alone and with a salt of their own, and must get the same answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import httpx
from agent_world import WORDS, prose
from common import argument_parser, at_least, at_most, conclude, exactly
from h7_clients import watch
from o1_oversubscription import PAUSES_S
from peers import rootstock_server

from checkpoints import save_chat

Json = dict[str, Any]

SHOW = "O5"
MODELS = {"first": "full", "second": "states"}  # name → kind of the tiny model
TENANTS = {"many": 12, "few": 4}  # agents of each model
MOST_WAIT_S = 120.0
OPTIONS = ("--dtype", "float32", "--max-session-wait", f"{MOST_WAIT_S:.0f}s")
AMPLE = "512MiB"
FASTER = 2.0
LATEST_ANSWER_S = 600.0
LEAST_TURNS, MOST_TURNS = 8, 30
CALLS, STREAMS, DROPPED = 0.8, 0.7, 0.03  # shares of the turns
ASKED_TTL = "5m"
COMPARED = 40  # sessions
EVERY_S = 10.0
PARAMETERS: Json = {
    "type": "object",
    "properties": {"word": {"enum": list(WORDS)}},
    "required": ["word"],
    "additionalProperties": False,
}


@dataclass
class Turn:
    """A turn that was answered."""

    at: float
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Session:
    """The turns of a session: what was sent, and the answer."""

    tenant: str
    api: Chat | Messages
    turns: list[tuple[Json, Answered]] = field(default_factory=list)


@dataclass
class Counts:
    turns: list[Turn] = field(default_factory=list)
    sessions: int = 0
    dropped: int = 0
    refused: int = 0  # 429, sent again
    lost: Counter[str] = field(default_factory=Counter)  # requests without an answer, by what came instead
    longest_s: float = 0.0
    kept: list[Session] = field(default_factory=list)


@dataclass(frozen=True)
class Answered:
    content: Json  # what the next request sends back
    calls: list[str]  # their ids
    prompt_tokens: int
    cached_tokens: int


class Chat:
    """Client of /v1/chat/completions."""

    path = "/v1/chat/completions"
    stream_options: ClassVar[Json] = {"stream_options": {"include_usage": True}}

    def body(self, rules: str, messages: Sequence[Json], must_call: bool) -> Json:
        function = {"name": "look_up", "description": "Looks up a word.", "parameters": PARAMETERS}
        return {
            "messages": [{"role": "system", "content": rules}, *messages],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required" if must_call else "auto",
            "prompt_cache_options": {"ttl": ASKED_TTL},
        }

    def answered(self, answer: Json) -> Answered:
        message, usage = answer["choices"][0]["message"], answer["usage"]
        content = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answered({"content": "", **content}, self.call_ids(content), usage["prompt_tokens"], cached)

    def call_ids(self, content: Json) -> list[str]:
        return [call["id"] for call in content.get("tool_calls", ())]

    def joined(self, events: list[Json]) -> Json:
        """Makes the answer of a whole request from the chunks of a stream."""
        message: Json = {"role": "assistant", "content": ""}
        calls: dict[int, Json] = {}
        for event in events:
            for choice in event["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                for part in delta.get("tool_calls", ()):
                    call = calls.setdefault(part["index"], {"type": "function", "id": part.get("id")})
                    function = call.setdefault("function", {"name": "", "arguments": ""})
                    function["name"] += part["function"].get("name") or ""
                    function["arguments"] += part["function"].get("arguments") or ""
        if calls:
            message["tool_calls"] = list(calls.values())
        return {"choices": [{"message": message}], "usage": events[-1]["usage"]}

    def results(self, calls: list[str], text: str) -> list[Json]:
        return [{"role": "tool", "tool_call_id": id, "content": text} for id in calls]


class Messages:
    """Client of /v1/messages."""

    path = "/v1/messages"
    stream_options: ClassVar[Json] = {}

    def body(self, rules: str, messages: Sequence[Json], must_call: bool) -> Json:
        mark = {"type": "ephemeral", "ttl": ASKED_TTL}
        tool = {"name": "look_up", "description": "Looks up a word.", "input_schema": PARAMETERS}
        return {
            "system": [{"type": "text", "text": rules, "cache_control": mark}],
            "messages": [*messages],
            "tools": [tool],
            "tool_choice": {"type": "any" if must_call else "auto"},
            "cache_control": mark,
        }

    def answered(self, answer: Json) -> Answered:
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        blocks = [block for block in answer["content"] if block.get("text") or block["type"] == "tool_use"]
        content = {"role": "assistant", "content": blocks or [{"type": "text", "text": "-"}]}
        return Answered(content, self.call_ids(content), prompt, cached)

    def call_ids(self, content: Json) -> list[str]:
        return [block["id"] for block in content["content"] if block["type"] == "tool_use"]

    def joined(self, events: list[Json]) -> Json:
        """Makes the answer of a whole request from the events of a stream."""
        blocks: list[Json] = []
        usage: Json = {}
        is_cut = False
        for event in events:
            match event["type"]:
                case "message_start":
                    usage |= event["message"]["usage"]
                case "content_block_start":
                    blocks.append(event["content_block"] | {"parts": ""})
                case "content_block_delta":
                    delta = event["delta"]
                    blocks[-1]["parts"] += delta.get("text") or delta.get("partial_json") or ""
                case "message_delta":
                    usage |= event["usage"]
                    is_cut = event["delta"].get("stop_reason") == "max_tokens"
        if is_cut and blocks and blocks[-1]["type"] == "tool_use":
            del blocks[-1]  # the limit of the answer may lie inside of its arguments
        for block in blocks:
            parts = block.pop("parts")
            if block["type"] == "tool_use":
                block["input"] = json.loads(parts)
            elif block["type"] == "text":
                block["text"] = parts
        return {"content": blocks, "usage": usage}

    def results(self, calls: list[str], text: str) -> list[Json]:
        content = [{"type": "tool_result", "tool_use_id": id, "content": text} for id in calls]
        return [{"role": "user", "content": content}]


class Agent:
    """An agent that holds one session after the other."""

    def __init__(
        self, name: str, model: str, tenant: str, rng: random.Random, http: httpx.AsyncClient, counts: Counts
    ) -> None:
        self._name, self._model, self._tenant = name, model, tenant
        self._rng = rng
        self._http = http
        self._counts = counts
        self._api: Chat | Messages = rng.choice((Chat, Messages))()
        self.tokens = 0  # of its session
        self.session = ""

    async def run(self, until: float) -> None:
        await asyncio.sleep(self._rng.random() * 30)
        while time.monotonic() < until:
            await self._converse(until)

    async def _converse(self, until: float) -> None:
        rules = prose(random.Random(self._tenant), 150)
        self._counts.sessions += 1
        self.session, self.tokens = f"{self._name}-{self._counts.sessions}", 0
        messages: tuple[Json, ...] = ({"role": "user", "content": self._prose(40, 200)},)
        session = Session(self._tenant, self._api)
        for _ in range(self._rng.randrange(LEAST_TURNS, MOST_TURNS)):
            if time.monotonic() >= until:
                return
            must_call = self._rng.random() < CALLS
            body = self._api.body(rules, messages, must_call)
            body |= {"model": self._model, "temperature": 0, "max_tokens": 48 if must_call else 24}
            if self._rng.random() < STREAMS:
                body |= {"stream": True} | self._api.stream_options
            answered = await self._answer(body)
            if answered is None:
                return
            session.turns.append((body, answered))
            self.tokens = answered.prompt_tokens
            said = self._prose(5, 60)
            if answered.calls:
                messages += (answered.content, *self._api.results(answered.calls, said))
            else:
                messages += (answered.content, {"role": "user", "content": said})
            step = self._rng.random() * (len(PAUSES_S) - 1)
            pause_s = PAUSES_S[int(step)] + (step % 1) * (PAUSES_S[int(step) + 1] - PAUSES_S[int(step)])
            await asyncio.sleep(max(0.0, min(pause_s / FASTER, until - time.monotonic())))
        self._keep(session)

    def _prose(self, least: int, most: int) -> str:
        return prose(self._rng, self._rng.randrange(least, most))

    async def _answer(self, body: Json) -> Answered | None:
        """Sends a turn until it is answered. None: it was lost."""
        counts = self._counts
        while True:
            began = time.monotonic()
            try:
                status, answer = await self._send(body)
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                counts.lost[f"{type(error).__name__}: {error}"[:200]] += 1
                return None
            counts.longest_s = max(counts.longest_s, time.monotonic() - began)
            if status == 429:
                counts.refused += 1
                await asyncio.sleep(self._rng.random() * 2)
            elif status != 200:
                counts.lost[f"status {status}: {answer}"[:200]] += 1
                return None
            elif answer is not None:
                answered = self._api.answered(answer)
                counts.turns.append(Turn(time.monotonic(), answered.prompt_tokens, answered.cached_tokens))
                return answered

    async def _send(self, body: Json) -> tuple[int, Json | None]:
        """Returns the status and the answer; None: the stream was closed in the middle, on purpose."""
        headers = {"Authorization": f"Bearer {self._tenant}", "X-Claude-Code-Session-ID": self.session}
        if "stream" not in body:
            answer = await self._http.post(self._api.path, json=body, headers=headers)
            return answer.status_code, answer.json()
        closes_after = self._rng.randrange(1, 10) if self._rng.random() < DROPPED else None
        events: list[Json] = []
        is_whole = False
        async with self._http.stream("POST", self._api.path, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return answer.status_code, answer.json()
            async for line in answer.aiter_lines():
                is_whole = is_whole or line in ("data: [DONE]", "event: message_stop")
                events += event_of(line)
                if closes_after is not None and len(events) > closes_after:
                    self._counts.dropped += 1
                    return 200, None
        failed = next((event["error"] for event in events if "error" in event), None)
        if failed is not None:
            return (429 if failed["type"] == "rate_limit_error" else 500), failed
        if not is_whole:
            raise ValueError("a stream without its last event")
        return 200, self._api.joined(events)

    def _keep(self, session: Session) -> None:
        """Keeps a sample of all sessions, each as likely as any other."""
        kept = self._counts.kept
        if len(kept) < COMPARED:
            kept.append(session)
        elif (place := self._rng.randrange(self._counts.sessions)) < COMPARED:
            kept[place] = session


async def play(url: str, pid: int, seconds: float, counts: Counts, see: Callable[[list[Agent]], Any]) -> Json:
    """Runs the agents, calls `see` every few seconds, and returns what was seen."""
    began = time.monotonic()
    sizes: list[tuple[float, int]] = []
    seen: list[tuple[float, Any]] = []
    watching = asyncio.create_task(watch(pid, sizes))
    async with httpx.AsyncClient(
        base_url=url, timeout=LATEST_ANSWER_S, limits=httpx.Limits(max_connections=200), trust_env=False
    ) as http:
        agents = [
            Agent(
                f"{model}-{tenant}-{number}", model, tenant, random.Random(f"{tenant}{number}"), http, counts
            )
            for model in MODELS
            for tenant, count in TENANTS.items()
            for number in range(count)
        ]

        async def look() -> None:
            told_s = 0.0
            while time.monotonic() < began + seconds:
                await asyncio.sleep(EVERY_S)
                seen.append((time.monotonic(), await asyncio.to_thread(see, agents)))
                if time.monotonic() - told_s >= 60:
                    told_s = time.monotonic()
                    said = f"{len(counts.turns)} turns, {counts.sessions} sessions, {dict(counts.lost)} lost"
                    print(
                        f"{told_s - began:.0f} s: {said}, {sizes[-1][1] >> 20} MiB, {seen[-1][1]}", flush=True
                    )

        async with asyncio.TaskGroup() as group:
            group.create_task(look())
            for agent in agents:
                group.create_task(agent.run(began + seconds))
    watching.cancel()
    return {"began": began, "sizes": sizes, "seen": seen}


def bytes_of_sessions(url: str) -> Callable[[list[Agent]], tuple[int, int]]:
    """Returns a look at the bytes and the tokens of the agents' running sessions, where nothing is evicted."""

    def look(agents: list[Agent]) -> tuple[int, int]:
        names = {agent.session for agent in agents}
        listed = _asked_by_operator(url, "/v1/cache/sessions").json()["sessions"]
        size = sum(each["bytes"] for each in listed if each["session"] in names)
        return size, sum(agent.tokens for agent in agents)

    return look


def held(url: str) -> Callable[[list[Agent]], tuple[int, int]]:
    """Returns a look at the requests held by now, and at the tokens of the agents' running sessions."""

    def look(agents: list[Agent]) -> tuple[int, int]:
        text = _asked_by_operator(url, "/metrics").text
        counts = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("rootstock_held_requests_total")
        ]
        return int(sum(counts)), sum(agent.tokens for agent in agents)

    return look


def _asked_by_operator(url: str, path: str) -> httpx.Response:
    headers = {"Authorization": "Bearer operator"}
    return httpx.get(f"{url}{path}", headers=headers, timeout=60, trust_env=False).raise_for_status()


def wrong_answers(url: str, sessions: Sequence[Session]) -> Counter[str]:
    """Compares sessions with the same ones alone, up to the first turn that differs. Counts the sessions by it.

    Both models sample tokens as no tokenizer would cut the text, and the server puts the tokens of remembered answers
    into the next prompts. A turn alone, without the turns before it, would thus be another prompt. It is another one
    as well where the answer before was forgotten in the meantime: its length shows that.
    """
    counts = Counter[str]()
    with httpx.Client(base_url=url, timeout=LATEST_ANSWER_S, trust_env=False) as http:
        for number, session in enumerate(sessions):
            new_ids: dict[str, str] = {}  # of calls
            for body, answered in session.turns:
                alone = with_ids(body, new_ids) | {"cache_salt": f"alone-{number}"}
                headers = {"Authorization": f"Bearer {session.tenant}"}
                answer = http.post(session.api.path, json=alone, headers=headers).raise_for_status()
                events = [event for line in answer.text.splitlines() for event in event_of(line)]
                whole = session.api.joined(events) if "stream" in body else answer.json()
                again = session.api.answered(whole)
                new_ids |= zip(answered.calls, again.calls, strict=False)
                if again.prompt_tokens != answered.prompt_tokens:
                    counts["other prompts"] += 1
                    break
                if with_ids(answered.content, new_ids) != again.content:
                    counts["wrong"] += 1
                    print(
                        f"{session.api.path} answered {answered.content}, and alone {again.content}",
                        flush=True,
                    )
                    break
    return counts


def event_of(line: str) -> list[Json]:
    """Returns the event of a line of a stream, if it has one."""
    return [json.loads(line.removeprefix("data: "))] if line.startswith("data: {") else []


def with_ids(value: Json, ids: Mapping[str, str]) -> Json:
    """Returns a message or a body with other ids of calls."""
    text = json.dumps(value)
    for old, new in ids.items():
        text = text.replace(old, new)
    return dict(json.loads(text))


def quarters(began: float, seconds: float, turns: list[Turn]) -> list[float]:
    """Returns the part of the prompts' tokens that was found, by quarter of the time."""
    found = []
    for quarter in range(4):
        first, last = (began + seconds * part / 4 for part in (quarter, quarter + 1))
        of = [turn for turn in turns if first <= turn.at < last]
        found.append(sum(turn.cached_tokens for turn in of) / max(1, sum(turn.prompt_tokens for turn in of)))
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--ample-seconds", type=float, default=400.0, help="with memory for all sessions")
    parser.add_argument("--times", type=float, default=2.0, help="the sessions' need over the memory")
    # The memory is full in the second quarter, and has room for the answers of the open sessions.
    parser.add_argument("--answer-memory", default="4MiB")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = [save_chat(Path(folder) / name, kind) for name, kind in MODELS.items()]
        keys = Path(folder) / "keys.yaml"
        each = ", ".join(f"{{key: {name}, tenant: {name}}}" for name in TENANTS)
        keys.write_text(f"keys: [{each}, {{key: operator, role: operator}}]")
        options = (str(models[1]), *OPTIONS, "--api-keys", str(keys), "--answer-memory", args.answer_memory)
        with rootstock_server(models[0], *options, "--kv-budget", AMPLE) as server:
            played = asyncio.run(
                play(server.url, server.pid, args.ample_seconds, Counts(), bytes_of_sessions(server.url))
            )
        steady = [seen for at, seen in played["seen"] if at >= played["began"] + args.ample_seconds / 2]
        need, tokens = (mean(each[part] for each in steady) for part in (0, 1))
        budget = int(need / args.times)
        counts = Counts()
        with rootstock_server(models[0], *options, "--kv-budget", str(budget)) as server:
            played = asyncio.run(play(server.url, server.pid, args.seconds, counts, held(server.url)))
            compared = wrong_answers(server.url, counts.kept)
    began = played["began"]
    hits = quarters(began, args.seconds, counts.turns)
    memory = [
        mean(size for at, size in played["sizes"] if quarter <= (at - began) / args.seconds * 4 < quarter + 1)
        for quarter in range(4)
    ]
    steady = [seen for at, seen in played["seen"] if at >= began + args.seconds / 4]
    figures = {
        "seconds": args.seconds,
        "agents": len(MODELS) * sum(TENANTS.values()),
        "need_bytes": int(need),
        "budget_bytes": budget,
        "times_memory": round(args.times * mean(seen[1] for seen in steady) / tokens, 2),
        "turns": len(counts.turns),
        "sessions": counts.sessions,
        "held": played["seen"][-1][1][0],
        "refused": counts.refused,
        "dropped": counts.dropped,
        "longest_s": round(counts.longest_s, 1),
        "lost": dict(counts.lost),
        "hits_by_quarter": [round(each, 4) for each in hits],
        "last_over_second_quarter": round(hits[3] / hits[1], 4),
        "memory_mib_by_quarter": [round(each / 2**20, 1) for each in memory],
        "memory_growth": round(memory[3] / memory[1] - 1, 4),
        "compared_sessions": len(counts.kept),
        "compared_turns": sum(len(session.turns) for session in counts.kept),
        "other_prompts": compared["other prompts"],
        "wrong": compared["wrong"],
    }
    bars = {
        "seconds": at_least(7200),
        "times_memory": at_least(1.8),
        "held": at_least(1),
        "last_over_second_quarter": at_least(0.98),
        "memory_growth": at_most(0.03),
        "longest_s": at_most(MOST_WAIT_S + 60),  # the bound, and the time of its answer on a busy machine
        "lost": exactly({}),
        "wrong": exactly(0),
    }
    conclude(SHOW, figures, bars)


if __name__ == "__main__":
    main()
