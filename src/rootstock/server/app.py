"""The HTTP application: its routes, and the middleware before them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from rootstock._version import __version__
from rootstock.cache.families import FullAttention
from rootstock.config import CacheConfig, ServerConfig
from rootstock.engine.engine import Engine
from rootstock.engine.prompts.prompt_tokenizer import PromptTokenizer
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.engine.tokenizer import ModelTokenizer
from rootstock.errors import ModelNotFound, RequestError
from rootstock.runtime.base import ModelDescription
from rootstock.server.access import Guard, Tenant, is_operator, names_tenant, refuse_unless
from rootstock.server.cache_routes import cache_routes
from rootstock.server.errors import install_error_handlers
from rootstock.server.event_stream import Answerer
from rootstock.server.metrics import Metrics
from rootstock.server.model_card import numbers_of
from rootstock.server.openai.calls import chat_call, completion_call
from rootstock.server.openai.schema import ChatCompletionRequest, CompletionRequest
from rootstock.server.request_bodies import BoundedJsonRoute, PreparationQueue
from rootstock.server.responses.calls import Responses
from rootstock.server.responses.routes import response_routes
from rootstock.server.responses.sealing import Sealer
from rootstock.server.responses.store import ResponseStore
from rootstock.server.wire import MAX_TOKENS_HEADER, ServedModel


def create_app(
    engine: Engine,
    tokenizer: ModelTokenizer,
    description: ModelDescription,
    config: ServerConfig | None = None,
    defaults: SamplingDefaults | None = None,
    block_size: int = CacheConfig().block_size,
) -> FastAPI:
    """Makes the application of an engine. The caller starts and stops the engine. `block_size` is its cache's."""
    config = config or ServerConfig()
    model = ServedModel(
        description.name,
        description.vocab_size,
        PromptTokenizer(tokenizer, engine.context_limit),
        defaults or SamplingDefaults(),
        engine.context_limit,
        engine.config.max_batch + engine.config.max_queue,
        config.parse_special_tokens,
        wants_boundaries=not all(isinstance(family, FullAttention) for family in description.families),
    )
    metrics = Metrics(engine)
    app = FastAPI(title="Rootstock", version=__version__, redoc_url=None)
    app.add_middleware(Guard, config=config)
    if config.allowed_origins:
        # Before the guard: a browser's preflight has no key, and a page can read a refusal only with CORS headers.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("DELETE", "GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("Retry-After", MAX_TOKENS_HEADER),
        )
    install_error_handlers(app)
    queue = PreparationQueue(engine.config.max_batch, engine.config.max_queue)
    answerer = Answerer(engine, metrics, queue)
    app.include_router(_generation_routes(model, answerer))
    store = ResponseStore.open(config.responses_store, config.responses_store_bytes)
    responses = Responses(model, store, Sealer(store.sealing_key))
    app.include_router(response_routes(responses, answerer, queue))
    app.include_router(cache_routes(engine, model, config, queue))
    app.include_router(
        _state_routes(
            engine, model, metrics, numbers_of(description, block_size, engine.why_no_drafts), config
        )
    )
    return app


def _generation_routes(model: ServedModel, answerer: Answerer) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=BoundedJsonRoute)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatCompletionRequest, request: Request, tenant: Tenant) -> Response:
        try:
            return await answerer.answer(lambda: chat_call(model, body, tenant), request)
        except RequestError as error:
            if error.param == "prompt":  # the engine's name for `messages`
                error.param = "messages"
            raise

    @router.post("/v1/completions")
    async def completion(body: CompletionRequest, request: Request, tenant: Tenant) -> Response:
        return await answerer.answer(lambda: completion_call(model, body, tenant), request)

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
    async def health(request: Request) -> Response:
        found = engine.health()
        told = {"status": "ok" if found.alive else "dead", "alive": found.alive, "detail": found.detail}
        if is_operator(request):
            told |= asdict(found)  # the number of running requests tells about other tenants
        return JSONResponse(told, 200 if found.alive else 503)

    @router.get("/metrics")
    def prometheus(request: Request) -> Response:
        refuse_unless(not names_tenant(request), config)
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
