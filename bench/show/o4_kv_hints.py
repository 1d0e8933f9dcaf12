"""O4: the actions of `kv_hints`, as the clients of vLLM, Dynamo and SGLang write them, over HTTP to a real server.

A small model is served with room for ten prompts and a disk below. Each action is sent with a request, and without
one to /v1/cache/hints. The table has its verdicts and effects: bytes that are retained, pins, records on the disk,
whether the prefix is still found after a flood of other prompts, and whether a prefetched prompt is a hit.
Another tenant then sends every action for the same prompts, and a greedy tenant asks to keep more than its share.

    python bench/show/o4_kv_hints.py
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import argument_parser, at_most, conclude, exactly
from h3_idle import free_port, wait_for

SHOW = "O4"
Json = dict[str, Any]
PROMPT, ROOM = 400, 4096  # tokens of a prompt, and of the memory
TENANT = "X-Cache-Salt"


# ------------------------------------------------------------------------------------------- the clients


def vllm(type: str, payload: Json) -> Json:
    """vLLM's KvHintsEnvelope with one KvHintAction."""
    return _envelope("0.1", "router/message-1", type, payload)


def vllm_retain(priority: int, duration: float | None) -> Json:
    found = {"start": 0, "end": None, "priority": priority, "duration": duration}
    return vllm("kv.retain", {"scope": "agent-1", "directives": [found]})


def vllm_priority(value: int | None) -> Json:
    claim = {"target": "request_cached", "location": "local_g1", "claim_id": "router/s", "revision": 1}
    return vllm(
        "vllm.set_priority", {**claim, "value": value} | ({} if value is None else {"ttl_seconds": 60})
    )


def dynamo(type: str, **fields: Any) -> Json:
    """The message of Dynamo's policy for sessions: it names the blocks of the session by their hashes."""
    known = {
        "execute_at": "request_completion",
        "include_current_request": True,
        "block_hashes": ["11", "22"],
    }
    return _envelope("1.0", "session-1-9-0", type, {**fields, **known})


def sglang(type: str, **payload: Any) -> Json:
    return _envelope("0.1", "message-1", type, payload)


def _envelope(protocol: str, message: str, type: str, payload: Json) -> Json:
    action = {"action_id": message, "action_type": type, "action_version": "1.0", "payload": payload}
    return {"protocol_version": protocol, "message_id": message, "actions": [action]}


# ------------------------------------------------------------------------------------------- the server


@dataclass
class Side:
    """The server, and the rows of the table."""

    client: httpx.Client
    rows: list[tuple[str, ...]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def prompt(self) -> list[int]:
        """Returns a prompt that no request has sent."""
        rng = np.random.default_rng(next(self.numbers))
        return [int(token) for token in rng.integers(20, 1000, PROMPT)]

    def ask(self, prompt: list[int], tenant: str = "ann", **fields: Any) -> Json:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        return self._sent("/v1/completions", body, tenant)

    def alone(self, prompt: list[int], tenant: str = "ann", **fields: Any) -> Json:
        return self._sent(
            "/v1/cache/hints", {"api": "completions", "body": {"prompt": prompt, **fields}}, tenant
        )

    def _sent(self, path: str, body: Json, tenant: str) -> Json:
        response = self.client.post(path, json=body, headers={TENANT: tenant})
        assert response.status_code == 200, response.text
        found: Json = response.json()
        return found

    def cached(self, prompt: list[int], tenant: str = "ann") -> int:
        body = {"api": "completions", "body": {"prompt": prompt}}
        return int(self._sent("/v1/cache/explain", body, tenant)["matched_tokens"])

    def stats(self) -> Json:
        found: Json = self.client.get("/v1/cache/stats").json()
        return found

    @property
    def records(self) -> int:
        """Number of records on the disk."""
        return int(self.stats()["tier"]["records"])

    def fill(self) -> None:
        """Sends prompts of another tenant that take the whole memory."""
        cache = self.stats()["cache"]
        for _ in range(cache["total_blocks"] * cache["block_size"] // PROMPT + 2):
            self.ask(self.prompt(), "crowd")

    def clear(self) -> None:
        assert self.client.post("/v1/cache/clear", json={"tiers": ["memory"]}).status_code == 200

    def until(self, is_so: Callable[[], bool]) -> bool:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if is_so():
                return True
            time.sleep(0.05)
        return False

    def note(
        self, client: str, action: str, way: str, told: Json, expected: str, effect: str, is_so: bool
    ) -> None:
        verdicts = [hint["verdict"] for hint in told.get("rootstock", {}).get("hints", ())]
        reasons = [hint.get("reason", "") for hint in told.get("rootstock", {}).get("hints", ())]
        self.rows.append((client, action, way, ", ".join(verdicts), f"{effect}: {'yes' if is_so else 'NO'}"))
        if verdicts != [expected] or not is_so:
            self.unexpected.append(f"{client} {action} {way}: {verdicts} {reasons}, {effect} {is_so}")


def retains(side: Side, client: str, envelope: Json, expected: str = "accepted") -> None:
    name = envelope["actions"][0]["action_type"]
    for way in ("with a request", "alone"):
        side.clear()
        prompt = side.prompt()
        told = side.ask(prompt, kv_hints=envelope if way != "alone" else None)
        if way == "alone":
            told = side.alone(prompt, kv_hints=envelope)
        side.fill()
        side.note(client, name, way, told, expected, "found after a flood", _is_hit(side, prompt))
        told = side.alone(prompt, kv_hints=vllm("kv.release", {}))
        side.note(
            "Rootstock", "kv.release", f"after {name}", told, "accepted", "nothing retained", not _kept(side)
        )


def unhinted(side: Side) -> bool:
    """Returns whether a prompt without hints is lost in the same flood."""
    side.clear()
    prompt = side.prompt()
    side.ask(prompt)
    side.fill()
    is_lost = not _is_hit(side, prompt)
    side.rows.append(("any", "none", "with a request", "", f"lost in a flood: {'yes' if is_lost else 'NO'}"))
    return is_lost


def releases(side: Side, client: str, envelope: Json, name: str) -> None:
    for way in ("with a request", "alone"):
        side.clear()
        prompt = side.prompt()
        side.ask(prompt, kv_hints=vllm_retain(50, 300.0))
        was_kept = _kept(side) > 0
        told = (
            side.ask(prompt, kv_hints=envelope) if way != "alone" else side.alone(prompt, kv_hints=envelope)
        )
        side.note(
            client, name, way, told, "accepted", "retained before, not after", was_kept and not _kept(side)
        )


def demotes(side: Side, client: str, envelope: Json, expected: str = "accepted", **fields: Any) -> None:
    name = envelope["actions"][0]["action_type"]
    for way in ("with a request", "alone"):
        side.clear()
        older, prompt = side.prompt(), side.prompt()
        side.ask(older)
        before = side.records
        told = side.ask(prompt, **fields, kv_hints=envelope if way != "alone" else None)
        if way == "alone":
            told = side.alone(prompt, kv_hints=envelope, **fields)
        hints = told["rootstock"]["hints"]  # one of them names the session
        told["rootstock"]["hints"] = [hint for hint in hints if hint["field"].startswith("kv_hints")]
        is_stored = side.until(partial(_is_more, side, before))
        while side.cached(prompt) >= PROMPT - 1:
            side.ask(side.prompt(), "crowd")
        kept = side.cached(older) >= PROMPT - 1
        side.note(
            client, name, way, told, expected, "on disk, and gone before an older one", is_stored and kept
        )


def _is_more(side: Side, records: int) -> bool:
    return side.records > records


def _is_hit(side: Side, prompt: list[int]) -> bool:
    return side.cached(prompt) >= PROMPT - 1  # each request computes the last token


def pins(side: Side) -> None:
    for way in ("with a request", "alone"):
        side.clear()
        prompt, envelope = side.prompt(), vllm("kv.pin", {"directives": [{"start": 0, "end": PROMPT}]})
        told = side.ask(prompt, kv_hints=envelope if way != "alone" else None)
        if way == "alone":
            told = side.alone(prompt, kv_hints=envelope)
        side.fill()
        is_so = side.stats()["cache"]["pins"] == 1 and _is_hit(side, prompt)
        side.note("Rootstock", "kv.pin", way, told, "accepted", "pinned and found after a flood", is_so)
        told = side.alone(prompt, kv_hints=vllm("kv.release", {}))
        is_so = side.stats()["cache"]["pins"] == 0
        side.note("Rootstock", "kv.release", "after kv.pin", told, "accepted", "no pin is left", is_so)


def prefetches(side: Side) -> None:
    side.clear()
    prompt = side.prompt()
    told = side.ask(prompt, kv_hints=sglang("kv.prefetch"))
    side.note("SGLang", "kv.prefetch", "with a request", told, "refused", "answered", True)
    for way, stored in (("alone, new", False), ("alone, on disk", True)):
        prompt = side.prompt()
        if stored:
            side.ask(prompt, kv_hints=vllm("kv.demote", {}))
            side.clear()
        told = side.alone(prompt, kv_hints=sglang("kv.prefetch"))
        is_so = side.until(partial(_is_hit, side, prompt))
        side.note("SGLang", "kv.prefetch", way, told, "accepted", "a hit", is_so)


def foreign(side: Side) -> None:
    """Sends actions of another tenant for the prompt of one that retains and pins it."""
    side.clear()
    prompt = side.prompt()
    side.ask(prompt, kv_hints=vllm_retain(50, 300.0))
    side.alone(prompt, kv_hints=vllm("kv.pin", {}))
    before = _kept(side), side.stats()["cache"]["pins"]
    for name in ("kv.demote", "kv.release", "kv.evict", "kv.pin"):
        told = side.alone(prompt, "bob", kv_hints=vllm(name, {}))
        is_so = (_kept(side), side.stats()["cache"]["pins"]) == before
        side.note("another tenant", name, "alone", told, "refused", "nothing has changed", is_so)
    side.alone(prompt, kv_hints=vllm("kv.release", {}))


def greedy(side: Side) -> float:
    """Returns the part of the memory that a tenant retains at most beside another one, asking for everything."""
    side.clear()
    most, verdicts = 0.0, list[str]()
    side.ask(side.prompt(), "crowd", kv_hints=vllm_retain(1, 300.0))
    for _ in range(2 * ROOM // PROMPT):
        told = side.ask(side.prompt(), "greedy", kv_hints=vllm_retain(100, 3600.0))
        verdicts += [hint["verdict"] for hint in told["rootstock"]["hints"]]
        cache = side.stats()["cache"]
        most = max(most, cache["retained_bytes"] / cache["budget_bytes"])
    side.rows.append(
        ("greedy tenant", "kv.retain", "with requests", _counted(verdicts), f"retains {most:.0%}")
    )
    return most


def _counted(verdicts: list[str]) -> str:
    return ", ".join(f"{verdicts.count(one)} {one}" for one in dict.fromkeys(verdicts))


def _kept(side: Side) -> int:
    return int(side.stats()["cache"]["retained_bytes"])


def main() -> None:
    argument_parser(__doc__).parse_args()
    from rootstock.bench.tiny_model import TinyModelSpec, ensure_tiny_model

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        spec = TinyModelSpec(layers=2, corpus_lines=2000)
        model, port = ensure_tiny_model(spec, Path(folder)), free_port()
        budget = ROOM * 2 * spec.layers * spec.kv_heads * (spec.hidden_size // spec.heads) * 4
        command = [
            sys.executable,
            "-m",
            "rootstock",
            "serve",
            str(model),
            "--device",
            "cpu",
            "--threads",
            "1",
        ]
        command += ["--port", str(port), "--kv-budget", str(budget), "--disk-dir", f"{folder}/disk"]
        command += ["--context-limit", str(ROOM // 2)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process)
            with httpx.Client(base_url=url, timeout=120.0) as client:
                side = Side(client)
                is_lost = unhinted(side)
                retains(side, "vLLM", vllm_retain(90, 300.0))
                retains(side, "vLLM", vllm_priority(10))
                retains(side, "Dynamo", dynamo("kv.retain", priority=3, ttl_seconds=60.0), "clipped")
                releases(side, "vLLM", vllm_priority(None), "vllm.set_priority null")
                releases(side, "vLLM", vllm_retain(0, None), "kv.retain, priority 0")
                releases(side, "Rootstock", vllm("kv.release", {"directives": [{"start": 0}]}), "kv.release")
                demotes(side, "Rootstock", vllm("kv.demote", {"directives": [{"start": 0}]}))
                demotes(side, "SGLang", sglang("kv.demote", session_id="s"), prompt_cache_key="s")
                demotes(side, "SGLang", sglang("kv.deref"), prompt_cache_key="t")
                demotes(side, "Dynamo", dynamo("kv.evict"), "clipped", prompt_cache_key="u")
                pins(side)
                prefetches(side)
                foreign(side)
                share = greedy(side)
        finally:
            process.terminate()
            process.wait()
    for row in side.rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, (14, 24, 32, 10, 0), strict=True)))
    for one in side.unexpected:
        print(f"unexpected: {one}", file=sys.stderr)
    figures = {
        "rows": len(side.rows),
        "unexpected": len(side.unexpected),
        "lost_without_hints": is_lost,
        "greedy_part": round(share, 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    conclude(
        SHOW,
        figures,
        {
            "unexpected": exactly(0),
            "lost_without_hints": exactly(True),
            "greedy_part": at_most(0.5),
            "seconds": at_most(180),
        },
    )


if __name__ == "__main__":
    main()
