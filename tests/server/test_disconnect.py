"""A client that disconnects aborts its requests: in the queue, in a stream, and while it waits for a whole answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rootstock.config import EngineConfig
from rootstock.server.app import create_app
from rootstock.server.formats.responses.store import TenantResponses
from server.asgi import ask
from server.held import Held
from server.raw_http import RawClient, post
from waiting import join, wait_until

ENDLESS: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


def ask_endlessly(served: Any, **fields: Any) -> RawClient:
    client = RawClient(served)
    client.send(post("/v1/completions", fields | ENDLESS))
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_disconnects_aborts_its_running_requests(serve: Any, stream: bool, n: int) -> None:
    held = Held(free_forwards=8)
    with serve(fault=held) as served:
        engine = served.assembly.engine
        client = ask_endlessly(served, prompt="forever", stream=stream, n=n)
        wait_until(lambda: engine.health().running == n and engine.health().steps > 5)
        client.close()
        wait_until(lambda: engine.health().running == 0)
        served.settled()
        outcome = {"outcome": "disconnected", "route": "/v1/completions"}
        wait_until(lambda: served.metric("rootstock_requests_total", **outcome) == 1)
        held.let_go()
        # The tokens that were computed until then stay cached.
        again = served.complete("forever", max_tokens=1).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == len("forever") - 1


LETTERS = {"logit_bias": {str(ord("a")): 100}}  # each token has text at once, which a stream shows
AGENTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "forever"}], **ENDLESS, **LETTERS},
    "/v1/messages": {"messages": [{"role": "user", "content": "forever"}], **ENDLESS, **LETTERS},
    "/v1/responses": {"input": "forever", "max_output_tokens": 3000, "ignore_eos": True, **LETTERS},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", AGENTS)
def test_an_aborted_answer_of_any_api_is_released_and_not_stored(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(TenantResponses, "put", lambda *arguments: stored.append(arguments))
    held = Held(free_forwards=8)
    with serve(fault=held) as served:
        engine = served.assembly.engine
        client = RawClient(served)
        client.send(post(path, AGENTS[path] | {"stream": stream}))
        if stream:  # the middle of the answer
            client.read_until(b"delta")
        wait_until(lambda: engine.health().running == 1 and engine.health().steps > 5)
        client.close()
        wait_until(lambda: engine.health().running == 0)
        served.settled()
        wait_until(lambda: served.metric("rootstock_requests_total", outcome="disconnected", route=path) == 1)
        held.let_go()
        assert not stored
        # The next request finds the prompt in the cache.
        length = "max_output_tokens" if "input" in AGENTS[path] else "max_tokens"
        usage = served.client.post(path, json=AGENTS[path] | {length: 1}).json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        assert details.get("cached_tokens", usage.get("cache_read_input_tokens")) > len("forever")
        assert len(stored) == (path == "/v1/responses")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_leaves_the_queue(serve: Any, stream: bool) -> None:
    with serve(EngineConfig(max_batch=1), fault=Held(free_forwards=8)) as served:
        engine = served.assembly.engine
        running = ask_endlessly(served, prompt="first")
        wait_until(lambda: engine.health().running == 1)
        waiting = ask_endlessly(served, prompt="second", stream=stream)
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
        gone = [ask_endlessly(served, prompt="steady", stream=True) for _ in range(4)]
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
        for left, client in zip((4, 3, 2, 1), gone, strict=True):
            client.close()
            wait_until(lambda left=left: health().running == left)
        held.let_go()
        join(ask)
        assert answers == [expected]
        served.settled()


def test_a_cancelled_server_task_aborts_too(serve: Any) -> None:
    """uvicorn cancels tasks at its end."""
    with serve(fault=Held(free_forwards=8)) as served:
        made = served.assembly
        app = create_app(made)

        async def call(stream: bool) -> None:
            body = {"prompt": "forever", "stream": stream, **ENDLESS}
            task = asyncio.ensure_future(ask(app, "/v1/completions", body))
            while made.engine.health().running == 0:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        for stream in (True, False):
            asyncio.run(call(stream))
            wait_until(lambda: made.engine.health().running == 0)
        served.settled()
