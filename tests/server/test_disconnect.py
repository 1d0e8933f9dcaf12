"""A client that goes away takes its requests with it: in the queue, in a prefill, in a stream, and when it
waits for a whole answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from rootstock.config import EngineConfig
from server.held import Held
from waiting import join, wait_until

ENDLESS: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


def ask_over_a_socket(served: Any, path: str, body: dict[str, Any]) -> socket.socket:
    """A client that can be cut off at any moment."""
    request = served.client.build_request("POST", path, json=body)
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in request.headers.items()) + "\r\n"
    connection = socket.create_connection((request.url.host, request.url.port))
    connection.sendall(head.encode() + request.read())
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_disconnects_aborts_its_running_requests(serve: Any, stream: bool, n: int) -> None:
    held = Held(free_forwards=8)
    with serve(fault=held) as served:
        engine = served.assembly.engine
        body = {"prompt": "forever", "stream": stream, "n": n, **ENDLESS}
        connection = ask_over_a_socket(served, "/v1/completions", body)
        wait_until(lambda: engine.health().running == n and engine.health().steps > 5)
        connection.close()
        wait_until(lambda: engine.health().running == 0)
        served.settled()
        outcome = {"outcome": "disconnected", "route": "/v1/completions"}
        wait_until(lambda: served.metric("rootstock_requests_total", **outcome) == 1)
        held.let_go()
        # What was computed until then is found again.
        again = served.complete("forever", max_tokens=1).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == len("forever") - 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_leaves_the_queue(serve: Any, stream: bool) -> None:
    with serve(EngineConfig(max_batch=1), fault=Held(free_forwards=8)) as served:
        engine = served.assembly.engine
        running = ask_over_a_socket(served, "/v1/completions", {"prompt": "first", **ENDLESS})
        wait_until(lambda: engine.health().running == 1)
        waiting = ask_over_a_socket(
            served, "/v1/completions", {"prompt": "second", "stream": stream, **ENDLESS}
        )
        wait_until(lambda: engine.health().waiting == 1)
        waiting.close()
        wait_until(lambda: engine.health().waiting == 0)
        assert engine.health().running == 1
        running.close()
        wait_until(lambda: engine.health().running == 0)
        served.settled()


def test_a_client_that_disconnects_does_not_disturb_the_others(serve: Any) -> None:
    held = Held()
    with serve(fault=held) as served:
        held.let_go()
        expected = served.complete("steady", max_tokens=40, temperature=0, ignore_eos=True).json()["choices"]
        held.hold()
        gone = [
            ask_over_a_socket(served, "/v1/completions", {"prompt": "steady", "stream": True, **ENDLESS})
            for _ in range(4)
        ]
        health = served.assembly.engine.health
        wait_until(lambda: health().running == 4)
        answers: list[Any] = []
        ask = threading.Thread(
            target=lambda: answers.append(
                served.complete("steady", max_tokens=40, temperature=0, ignore_eos=True).json()["choices"]
            )
        )
        ask.start()
        wait_until(lambda: health().running == 5)
        for left, connection in zip((4, 3, 2, 1), gone, strict=True):
            connection.close()
            wait_until(lambda left=left: health().running == left)
        held.let_go()
        join(ask)
        assert answers == [expected]
        served.settled()


def test_a_cancelled_server_task_aborts_too(serve: Any) -> None:
    """As when uvicorn gives up waiting at its end: straight through ASGI, with no socket in between."""
    from rootstock.server.app import create_app

    with serve(fault=Held(free_forwards=8)) as served:
        made = served.assembly
        app = create_app(made.engine, made.tokenizer, made.description)

        async def call(stream: str) -> None:
            body = (
                b'{"prompt": "forever", "max_tokens": 3000, "ignore_eos": true, "stream": '
                + stream.encode()
                + b"}"
            )
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> dict[str, Any]:
                if messages:
                    return messages.pop()
                await asyncio.Event().wait()
                raise AssertionError

            async def send(_message: dict[str, Any]) -> None: ...

            scope = {
                "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
                "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"},
            }  # fmt: skip
            task = asyncio.ensure_future(app(scope, receive, send))  # type: ignore[arg-type]
            while made.engine.health().running == 0:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        for stream in ("true", "false"):
            asyncio.run(call(stream))
            wait_until(lambda: made.engine.health().running == 0)
        served.settled()
