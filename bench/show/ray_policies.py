"""Rootstock's server behind Ray Serve with Ray's own ways to choose a replica, for comparison with `rootstock fleet`.

    pow2           the replica with the shorter queue of two, behind Serve's proxy and an ingress
    prefix         ray.llm's router by the prefixes that it has sent to each replica, in the same place
    pow2-direct    pow2, asked by Serve's HAProxy, which forwards to the replica's own port

Behind the ingress a replica calls its application in place, and its answer passes through Ray's streams. Ray's prefix
router works there only: asked for a choice without a request, it never learns what it has chosen.
"""

# Without `from __future__ import annotations`: Serve copies the routes to its processes without the names that only
# annotations have.

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig

from rootstock.config import Configuration
from rootstock.engine.build import Assembly
from rootstock.server.app import create_app

PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
)
POLICIES = ("pow2", "prefix", "pow2-direct")
Build = Callable[[Configuration], Assembly]


class Replica:
    def __init__(self, asked: Configuration, build: Build) -> None:
        self._made = build(asked)
        self._made.engine.start()
        self._web = create_app(self._made, asked.server)

    def check_health(self) -> None:
        assert self._made.engine.health().alive


class InPlace(Replica):
    """A replica behind a handle."""

    async def __call__(
        self, prompt: SimpleNamespace, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> AsyncIterator[int | bytes]:
        """Yields the status, and then the body. The prefix router reads `prompt`."""
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (message := next(requests, None)) is not None:
                return message
            await asyncio.Event().wait()  # until the task is cancelled
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.put_nowait(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 1),
        }
        task = asyncio.create_task(self._web(scope, receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"]
                elif message.get("body"):
                    yield message["body"]
        finally:
            task.cancel()


ingress_app = FastAPI()


@serve.ingress(ingress_app)
class Ingress:
    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True)

    @ingress_app.post("/v1/chat/completions")
    async def chat(self, request: Request) -> StreamingResponse:
        body = await request.body()
        prompt = SimpleNamespace(messages=json.loads(body)["messages"])
        pieces = self._handle.remote(prompt, body, request.headers.raw)
        status = await anext(pieces)
        return StreamingResponse(pieces, status, media_type="text/event-stream")


class Direct(Replica):
    """A replica on a port of its own."""

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return self._web


router_app = FastAPI()


@serve.ingress(router_app)
class Chooser:
    """Router that HAProxy asks for the replica of a request."""

    def __init__(self, handle: Any) -> None:
        handle._init()
        self._handle = handle

    @router_app.post("/internal/route")
    async def route(self) -> dict[str, Any]:
        async with self._handle.choose_replica(_reserve=False) as chosen:
            host, port = chosen._replica.backend_http_endpoint
            return {
                "host": host,
                "port": port,
                "replica_id": chosen._replica.replica_id.to_full_id_str(),
            }


def application(policy: str, asked: Configuration, build: Build, replicas: int) -> serve.Application:
    router = RequestRouterConfig(request_router_class=PREFIX_ROUTER) if policy == "prefix" else None
    options: dict[str, Any] = {
        "num_replicas": replicas,
        "max_ongoing_requests": 64,
        "ray_actor_options": {"num_cpus": 0.1},
        **({"request_router_config": router} if router else {}),
    }
    light = {"max_ongoing_requests": 1000, "ray_actor_options": {"num_cpus": 0.1}}
    if policy != "pow2-direct":
        engines = serve.deployment(InPlace, **options).bind(asked, build)
        return serve.deployment(Ingress, **light).bind(engines)
    engines = serve.deployment(serve.ingress()(Direct), **options).bind(asked, build)
    return engines._with_ingress_request_router(serve.deployment(Chooser, **light).bind(engines))
