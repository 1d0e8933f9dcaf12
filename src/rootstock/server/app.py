"""The HTTP application: its routes, and the guard before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rootstock._version import __version__
from rootstock.cache.families import FullAttention
from rootstock.config import CacheConfig, ServerConfig
from rootstock.engine.engine import Engine
from rootstock.engine.text import TextCodec
from rootstock.errors import BodyTooLarge, ModelNotFound, RequestError, Unauthorized
from rootstock.runtime.base import ModelDescription
from rootstock.server.access import (
    Keys,
    Tenant,
    is_operator,
    names_tenant,
    refuse_unless,
    remember_caller,
)
from rootstock.server.answer import Answerer
from rootstock.server.cache_routes import cache_routes
from rootstock.server.defaults import SamplingDefaults
from rootstock.server.described import numbers_of
from rootstock.server.errors import error_response, install_error_handlers
from rootstock.server.metrics import Metrics
from rootstock.server.openai import ServedModel
from rootstock.server.openai_request import ChatCompletionRequest, CompletionRequest
from rootstock.server.tokenized import TokenizedPieces

MAX_BODY_BYTES = 64 * 1024**2


def create_app(
    engine: Engine,
    codec: TextCodec,
    description: ModelDescription,
    config: ServerConfig | None = None,
    defaults: SamplingDefaults | None = None,
    block_size: int = CacheConfig().block_size,
) -> FastAPI:
    """The application over an engine that its caller starts and stops. `block_size` is its cache's."""
    config = config or ServerConfig()
    model = ServedModel(
        description.name,
        description.vocab_size,
        codec,
        TokenizedPieces(codec),
        defaults or SamplingDefaults(),
        wants_boundaries=not all(isinstance(family, FullAttention) for family in description.families),
    )
    metrics = Metrics(engine)
    app = FastAPI(title="Rootstock", version=__version__, strict_content_type=False, redoc_url=None)
    app.add_middleware(Guard, config=config, max_body_bytes=MAX_BODY_BYTES)
    install_error_handlers(app)
    app.include_router(_generation_routes(model, Answerer(engine, metrics)))
    app.include_router(cache_routes(engine, model, config))
    app.include_router(
        _state_routes(
            engine, model, metrics, numbers_of(description, block_size, engine.why_no_drafts), config
        )
    )
    return app


def _generation_routes(model: ServedModel, answerer: Answerer) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions")
    async def chat(body: ChatCompletionRequest, request: Request, tenant: Tenant) -> Response:
        try:
            return await answerer.answer(lambda: model.chat_call(body, tenant), request)
        except RequestError as error:
            if error.param == "prompt":  # as the engine calls it
                error.param = "messages"
            raise

    @router.post("/v1/completions")
    async def completion(body: CompletionRequest, request: Request, tenant: Tenant) -> Response:
        return await answerer.answer(lambda: model.completion_call(body, tenant), request)

    return router


def _state_routes(
    engine: Engine, model: ServedModel, metrics: Metrics, numbers: dict[str, Any], config: ServerConfig
) -> APIRouter:
    router = APIRouter(tags=["State"])

    def described() -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "rootstock",
            "max_model_len": engine.context_limit,
            **numbers,
        }

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @router.get("/v1/models/{name:path}")
    def one_model(name: str) -> dict[str, Any]:
        if name != model.name:
            raise ModelNotFound(name, model.name)
        return described()

    @router.get("/health")
    async def health(request: Request) -> Response:
        found = engine.health()
        told = {"status": "ok" if found.alive else "dead", "alive": found.alive, "detail": found.detail}
        if is_operator(request):
            told |= asdict(found)  # how many requests run is what others do
        return JSONResponse(told, 200 if found.alive else 503)

    @router.get("/metrics")
    def prometheus(request: Request) -> Response:
        refuse_unless(not names_tenant(request), config)
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


class Guard:
    """Before every route: the API key, and the size of the body. Only /health needs no key."""

    def __init__(self, app: ASGIApp, config: ServerConfig, max_body_bytes: int) -> None:
        self._app = app
        self._keys = Keys(config)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        caller = self._keys.caller(headers.get(b"authorization", b""))
        if caller is None and scope["path"] != "/health":
            await error_response(Unauthorized())(scope, receive, send)
        elif int(headers.get(b"content-length", b"0")) > self._max_body_bytes:
            await error_response(BodyTooLarge(self._max_body_bytes))(scope, receive, send)
        else:
            if caller is not None:
                remember_caller(scope.setdefault("state", {}), caller)
            await self._app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:  # sent in chunks, without a length
                raise HTTPException(413, BodyTooLarge(self._max_body_bytes).message)
            return message

        return limited
