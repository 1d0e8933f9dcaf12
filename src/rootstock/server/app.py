"""The HTTP application: its routes, and the guard before them."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rootstock._version import __version__
from rootstock.cache.explain import Explanation
from rootstock.cache.families import FullAttention
from rootstock.cache.plan import Tokens
from rootstock.config import CacheConfig, ServerConfig
from rootstock.engine.engine import Engine
from rootstock.engine.text import TextCodec, token_text
from rootstock.errors import BodyTooLarge, ModelNotFound, RequestError, Unauthorized
from rootstock.runtime.base import ModelDescription
from rootstock.server.answer import Answerer
from rootstock.server.defaults import SamplingDefaults
from rootstock.server.described import numbers_of
from rootstock.server.errors import error_response, install_error_handlers
from rootstock.server.metrics import Metrics
from rootstock.server.openai import ServedModel, salt_of
from rootstock.server.openai_request import ChatCompletionRequest, CompletionRequest, ExplainRequest
from rootstock.server.tokenized import TokenizedPieces

MAX_BODY_BYTES = 64 * 1024**2
_CONTEXT_CHARACTERS = 80

# The tenant, set by a proxy that knows who asks. Prefixes are shared within one tenant only.
Tenant = Annotated[str, Header(alias="X-Cache-Salt")]


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
        engine.context_limit,
        wants_boundaries=not all(isinstance(family, FullAttention) for family in description.families),
    )
    metrics = Metrics(engine)
    app = FastAPI(title="Rootstock", version=__version__, strict_content_type=False, redoc_url=None)
    app.add_middleware(Guard, api_key=config.api_key, max_body_bytes=MAX_BODY_BYTES)
    install_error_handlers(app)
    app.include_router(_generation_routes(model, Answerer(engine, metrics)))
    app.include_router(_cache_routes(engine, model))
    app.include_router(
        _state_routes(engine, model, metrics, numbers_of(description, block_size, engine.why_no_drafts))
    )
    return app


def _generation_routes(model: ServedModel, answerer: Answerer) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions")
    async def chat(body: ChatCompletionRequest, request: Request, tenant: Tenant = "") -> Response:
        try:
            return await answerer.answer(lambda: model.chat_call(body, tenant), request)
        except RequestError as error:
            if error.param == "prompt":  # as the engine calls it
                error.param = "messages"
            raise

    @router.post("/v1/completions")
    async def completion(body: CompletionRequest, request: Request, tenant: Tenant = "") -> Response:
        return await answerer.answer(lambda: model.completion_call(body, tenant), request)

    return router


def _cache_routes(engine: Engine, model: ServedModel) -> APIRouter:
    router = APIRouter(prefix="/v1/cache", tags=["Cache"])

    # Plain functions: they wait for the engine's thread, and so run on a thread of their own.
    @router.get("/stats")
    def stats() -> dict[str, Any]:
        found = engine.stats()
        derived = {"resident_bytes": found.cache.resident_bytes, "hit_rate": found.cache.hit_rate}
        return asdict(found) | {"cache": asdict(found.cache) | derived}

    @router.post("/explain")
    def explain(body: ExplainRequest, tenant: Tenant = "") -> dict[str, Any]:
        model.refuse_other(body.model)
        tokens = body.tokens(model.codec)
        return explained(engine.explain(tokens, salt_of(tenant, body.cache_salt)), tokens, model.codec)

    @router.post("/clear")
    def clear() -> dict[str, Any]:
        return asdict(engine.clear_cache())

    return router


def _state_routes(engine: Engine, model: ServedModel, metrics: Metrics, numbers: dict[str, Any]) -> APIRouter:
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
    async def health() -> Response:
        found = engine.health()
        status = "ok" if found.alive else "dead"
        return JSONResponse({"status": status, **asdict(found)}, 200 if found.alive else 503)

    @router.get("/metrics")
    def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


def explained(explanation: Explanation, tokens: Tokens, codec: TextCodec) -> dict[str, Any]:
    """An explanation with the text that its token ids stand for."""
    at = explanation.divergence
    divergence = None
    message = explanation.message
    if explanation.below is not None:
        message += f" {explanation.below.message}"
    if at is not None:

        def shown(token: int) -> dict[str, Any]:
            return {"token": token, "text": token_text(codec, token)}

        asked = shown(int(tokens[at]))
        cached = [shown(token) for token in explanation.cached_tokens_there]
        before = codec.decode(tokens[max(0, at - _CONTEXT_CHARACTERS) : at].tolist())[-_CONTEXT_CHARACTERS:]
        divergence = {"position": at, "before": before, "asked": asked, "cached": cached}
        if cached:
            others = ", ".join(repr(each["text"]) for each in cached)
            message += f" After {before[-40:]!r} it says {asked['text']!r}, cached prefixes say {others}."
    return {
        "prompt_tokens": explanation.prompt_tokens,
        "matched_tokens": explanation.matched_tokens,
        "found_tokens": explanation.found_tokens,
        "cap": explanation.cap,
        "capped_by": explanation.capped_by,
        "message": message,
        "divergence": divergence,
        "evicted_tokens": explanation.evicted_tokens,
        "pending_tokens": explanation.pending_tokens,
        "below": None if explanation.below is None else asdict(explanation.below),
    }


class Guard:
    """Before every route: the API key, and the size of the body. Only /health needs no key."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if not self._knows(headers.get(b"authorization", b"")) and scope["path"] != "/health":
            await error_response(Unauthorized())(scope, receive, send)
        elif int(headers.get(b"content-length", b"0")) > self._max_body_bytes:
            await error_response(BodyTooLarge(self._max_body_bytes))(scope, receive, send)
        else:
            await self._app(scope, self._limited(receive), send)

    def _knows(self, authorization: bytes) -> bool:
        return self._expected is None or hmac.compare_digest(authorization, self._expected)

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
