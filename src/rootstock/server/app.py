"""The HTTP application: its routes, and the middleware before them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from rootstock._version import __version__
from rootstock.cache.explain import Explanation
from rootstock.cache.families import FullAttention
from rootstock.cache.plan import Tokens
from rootstock.config import CacheConfig, ServerConfig
from rootstock.engine.engine import Engine
from rootstock.engine.text import TextCodec, token_text
from rootstock.errors import ModelNotFound, RequestError
from rootstock.runtime.base import ModelDescription
from rootstock.server.answer import Answerer
from rootstock.server.defaults import SamplingDefaults
from rootstock.server.described import numbers_of
from rootstock.server.errors import install_error_handlers
from rootstock.server.guard import Guard
from rootstock.server.json_body import BoundedJsonRoute
from rootstock.server.metrics import Metrics
from rootstock.server.openai import ServedModel, salt_of
from rootstock.server.openai_request import ChatCompletionRequest, CompletionRequest, ExplainRequest
from rootstock.server.preparing import PreparationQueue
from rootstock.server.tokenized import PromptTokenizer

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
        PromptTokenizer(codec, engine.context_limit),
        defaults or SamplingDefaults(),
        engine.context_limit,
        config.parse_special_tokens,
        wants_boundaries=not all(isinstance(family, FullAttention) for family in description.families),
    )
    metrics = Metrics(engine)
    app = FastAPI(title="Rootstock", version=__version__, redoc_url=None)
    app.add_middleware(Guard, config=config)
    if config.allowed_origins:
        # Before the guard: a browser's preflight has no key, and a refusal is to be read by the page.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("Retry-After",),
        )
    install_error_handlers(app)
    queue = PreparationQueue(engine.config.max_batch, engine.config.max_queue)
    app.include_router(_generation_routes(model, Answerer(engine, metrics, queue)))
    app.include_router(_cache_routes(engine, model, queue))
    app.include_router(
        _state_routes(engine, model, metrics, numbers_of(description, block_size, engine.why_no_drafts))
    )
    return app


def _generation_routes(model: ServedModel, answerer: Answerer) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=BoundedJsonRoute)

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


def _cache_routes(engine: Engine, model: ServedModel, queue: PreparationQueue) -> APIRouter:
    router = APIRouter(prefix="/v1/cache", tags=["Cache"], route_class=BoundedJsonRoute)

    # Plain functions: they wait for the engine's thread, and so run on a thread of their own.
    @router.get("/stats")
    def stats() -> dict[str, Any]:
        found = engine.stats()
        derived = {"resident_bytes": found.cache.resident_bytes, "hit_rate": found.cache.hit_rate}
        return asdict(found) | {"cache": asdict(found.cache) | derived}

    @router.post("/explain")
    async def explain(body: ExplainRequest, request: Request, tenant: Tenant = "") -> dict[str, Any]:
        salt = salt_of(tenant, body.cache_salt)

        def explanation() -> dict[str, Any]:
            tokens = model.explained_tokens(body, salt)
            return explained(engine.explain(tokens, salt), tokens, model.codec)

        return await queue.run(request, explanation)

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

    @router.get("/", include_in_schema=False)
    async def root() -> dict[str, str]:
        return {"server": "rootstock", "docs": "/docs", "health": "/health"}

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
