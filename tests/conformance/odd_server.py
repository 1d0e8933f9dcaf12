"""A server with a prompt cache, of words for tokens, that can be wrong or odd in the ways that its flags name.

It answers as its cache and its flags say, from a random number generator that the prompt seeds.
"""

from __future__ import annotations

import json
import random
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from typing import Any

BLOCK = 4  # tokens that it finds together
GOOD_ANSWERS = 20  # before those that flags "later_…" spoil
PATHS = ("/v1/chat/completions", "/v1/completions")


def ids_of(body: dict[str, Any], *, with_tools: bool = True) -> list[int]:
    if "prompt" in body:
        return list(body["prompt"])
    parts = [json.dumps(body["tools"])] if with_tools and body.get("tools") else []
    for message in body["messages"]:
        parts += message["role"], str(message.get("content")), json.dumps(message.get("tool_calls") or "")
    return [zlib.crc32(word.encode()) % 50_000 for word in " ".join(parts).split()] + [7]


class OddServer:
    """State of the server: prompts by salt, and the number of answers."""

    def __init__(self, flags: frozenset[str]) -> None:
        self.flags = flags
        self._sent: dict[str, list[list[int]]] = {}
        self._answers = 0
        self._lock = threading.Lock()

    def number(self) -> int:
        with self._lock:
            self._answers += 1
            return self._answers

    def found(self, ids: list[int], salt: str) -> int:
        """Returns how many tokens of a prompt are cached, and keeps the prompt."""
        with self._lock:
            earlier = self._sent.setdefault(salt, [])
            agreed = (
                sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other, strict=False)))
                for other in earlier
            )
            most = min(max(agreed, default=0), len(ids) - 1)
            earlier.append(ids)
            return most // BLOCK * BLOCK

    def answer(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        """Returns the answer of a request that is not streamed."""
        flags, ids = self.flags, ids_of(body)
        found, later = self.found(ids, body.get("cache_salt", "")), number > GOOD_ANSWERS
        is_hit = found > 5 * BLOCK
        picks = random.Random(number if "wrong" in flags and is_hit else str(ids))
        tokens = [f" t{picks.randrange(99)}" for _ in range(min(body.get("max_tokens", 4), 12))]
        logprob: Any = -0.01
        if "noise" in flags:
            logprob -= random.random() * 0.01
        if "nan" in flags and is_hit:
            logprob = float("nan")
        if "later_text_for_logprob" in flags and later:
            logprob = "much"
        text = "".join(tokens)
        if "other_text" in flags and is_hit:
            text = "as cached"
        if "half_a_pair" in flags and later:
            text += "\ud83d"
        usage: Any = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": found}}
        if "counts_nothing" in flags or ("leaves_out_zero" in flags and not found):
            usage["prompt_tokens_details"] = None
        if "later_text_for_cached" in flags and later:
            usage["prompt_tokens_details"]["cached_tokens"] = "40"
        if "later_text_for_prompt" in flags and later:
            usage["prompt_tokens"] = "\x1b[31mX"
        if "no_usage" in flags:
            usage = None
        scored = [{"token": each, "logprob": logprob, "top_logprobs": []} for each in tokens]
        choice: dict[str, Any] = {"message": {"content": text}, "logprobs": {"content": scored}}
        if "prompt" in body:
            choice = {"text": text, "logprobs": {"tokens": tokens, "token_logprobs": [logprob] * len(tokens)}}
        choices = [] if "later_no_choice" in flags and later else [choice] * body.get("n", 1)
        return {"choices": choices, "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    odd: OddServer

    def log_message(self, *args: Any) -> None: ...

    def _say(self, body: Any, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._say({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body, flags = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.odd.flags
        if self.path == "/tokenize":
            ids: list[Any] = ids_of(body, with_tools="tokenizes_no_tools" not in flags)
            if "text_for_ids" in flags:
                ids = list(map(str, ids))
            self._say({"tokens": [1 << 70 for _ in ids] if "huge_ids" in flags else ids})
        elif self.path not in PATHS:
            self._say(b"", 404)
        else:
            self._complete(body, self.odd.number(), flags)

    def _complete(self, body: dict[str, Any], number: int, flags: frozenset[str]) -> None:
        if "busy" in flags and number % 9 == 0:
            return self._say({"error": "later"}, 429)
        if "later_refuses" in flags and number > GOOD_ANSWERS:
            return self._say(b"\x1b[2J\r\nNo finding.", 403)
        if not body.get("stream"):
            return self._say(self.odd.answer(body, number))
        if "refuses_streams" in flags:
            return self._say({"error": "no streams"}, 400)
        return self._stream(self.odd.answer(body, number), flags)

    def _stream(self, answer: dict[str, Any], flags: frozenset[str]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            while "pings" in flags:
                self.wfile.write(b": ping\n\n")
                time.sleep(0.01)
            while "no_line" in flags:
                self.wfile.write(b"x" * (1 << 20))
            for choice in answer["choices"]:
                chunk = {"choices": [{"delta": choice["message"], "logprobs": choice["logprobs"]}]}
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n")
            if "cuts_streams" in flags:
                return
            last = {"choices": [], "usage": answer["usage"]}
            self.wfile.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        except OSError:
            return


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Runs a server with this handler and yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def odd_server(*flags: str) -> Iterator[str]:
    """Runs an odd server and yields its URL."""
    with serving(type("Handler", (_Handler,), {"odd": OddServer(frozenset(flags))})) as url:
        yield url
