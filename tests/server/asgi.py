"""Requests straight to an ASGI application, without a server and its connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any


def scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"},
    }  # fmt: skip


async def stay() -> None:
    await asyncio.Event().wait()


async def ask(
    app: Any,
    path: str,
    body: dict[str, Any],
    on_part: Callable[[bytes], object] = lambda part: None,
    leave: Callable[[], Awaitable[object]] = stay,
) -> bytes:
    """Returns the body of the response. The client disconnects when `leave` returns."""
    waiting = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    answer = bytearray()

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        await leave()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if part := message.get("body"):
            answer.extend(part)
            on_part(part)

    await app(scope_of(path), receive, send)
    return bytes(answer)
