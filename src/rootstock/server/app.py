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
from rootstock.engine.output.detect import detect, named, visible_tokens
from rootstock.engine.prompts.prompt_tokenizer import PromptTokenizer
from rootstock.engine.prompts.public_prompts import public_heads, read_public_prompts
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.engine.tokenizer import ModelTokenizer
from rootstock.errors import RequestError
from rootstock.runtime.base import ModelDescription
from rootstock.server.access import Guard, Keys, Tenant, is_operator, names_tenant, refuse_unless
from rootstock.server.anthropic.errors import error_body as messages_error_body
from rootstock.server.anthropic.routes import anthropic_routes
from rootstock.server.cache_routes import cache_routes
from rootstock.server.docs_page import install_docs
from rootstock.server.errors import MODEL_ROUTE, ErrorForms, documented_errors, install_error_handlers
from rootstock.server.event_stream import Answerer
from rootstock.server.explainer import Explainer
from rootstock.server.metrics import Metrics
from rootstock.server.model_card import anthropic_model_fields, numbers_of
from rootstock.server.openai.calls import chat_call, completion_call
from rootstock.server.openai.schema import ChatCompletionRequest, CompletionRequest
from rootstock.server.request_bodies import BoundedJsonRoute, PreparationQueue
from rootstock.server.responses.calls import Responses
from rootstock.server.responses.routes import explain_route, response_routes
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
    keys: Keys | None = None,
) -> FastAPI:
    """Makes the application of an engine. The caller starts and stops the engine. `block_size` is its cache's.

    Without `keys` reads those of the configuration. Raises InvalidOption.
    """
    config = config or ServerConfig()
    output = detect(tokenizer) if config.tool_parser == "auto" else named(config.tool_parser, tokenizer)
    model = ServedModel(
        description.name,
        description.vocab_size,
        PromptTokenizer(tokenizer, engine.context_limit, engine.config.answer_memory_bytes),
        defaults or SamplingDefaults(),
        engine.context_limit,
        engine.config.max_batch + engine.config.max_queue,
        config.parse_special_tokens,
        wants_boundaries=not all(isinstance(family, FullAttention) for family in description.families),
        aliases=config.aliases,
        constraints=engine.constraints,
        output=output,
        visible_tokens=visible_tokens(output, tokenizer),
        reuses_prefixes=engine.reuses_prefixes,
        drop_volatile=config.drop_volatile,
    )
    if config.public_prompts is not None:
        engine.public_heads = public_heads(
            read_public_prompts(config.public_prompts),
            model.tokenizer,
            parse=config.parse_special_tokens,
            drop_volatile=config.drop_volatile,
        )
    store = ResponseStore.open(config.responses_file, config.responses_budget_bytes)
    metrics = Metrics(engine, model.tokenizer.answers, lambda: store.stats)
    app = FastAPI(title="Rootstock", version=__version__, docs_url=None, redoc_url=None)
    forms = ErrorForms({"/v1/messages": messages_error_body})
    app.state.default_model = model.name
    app.add_middleware(Guard, config=config, forms=forms, keys=keys or Keys(config))
    if config.allowed_origins:
        # Before the guard: a browser's preflight has no key, and a page can read a refusal only with CORS headers.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("Retry-After", MAX_TOKENS_HEADER),
        )
    install_error_handlers(app, forms)
    queue = PreparationQueue(engine.config.max_batch, engine.config.max_queue)
    answerer = Answerer(engine, metrics, queue, config.sse_keep_alive_s)
    app.include_router(_generation_routes(model, answerer))
    explainer = Explainer(engine, tokenizer, config, queue)
    app.include_router(anthropic_routes(model, answerer, queue, explainer))
    responses = Responses(model, store, Sealer(store.sealing_key))
    app.include_router(response_routes(responses, answerer, queue))
    app.include_router(explain_route(responses, explainer))
    app.include_router(cache_routes(engine, model, config, explainer))
    app.include_router(
        _state_routes(
            engine, model, metrics, numbers_of(description, block_size, engine.why_no_drafts), config
        )
    )
    install_docs(app)
    return app


def _generation_routes(model: ServedModel, answerer: Answerer) -> APIRouter:
    router = APIRouter(
        tags=["OpenAI"],
        route_class=BoundedJsonRoute,
        responses={200: {"content": {"text/event-stream": {}}}, **documented_errors(*MODEL_ROUTE)},
    )

    @router.post("/v1/chat/completions")
    async def chat(body: ChatCompletionRequest, request: Request, tenant: Tenant) -> Response:
        """Answers a conversation, whole or as server-sent events."""
        try:
            return await answerer.answer(lambda: chat_call(model, body, tenant), request)
        except RequestError as error:
            if error.param == "prompt":  # the engine's name for `messages`
                error.param = "messages"
            raise

    @router.post("/v1/completions")
    async def completion(body: CompletionRequest, request: Request, tenant: Tenant) -> Response:
        """Continues text or token ids, whole or as server-sent events."""
        return await answerer.answer(lambda: completion_call(model, body, tenant), request)

    return router


def _state_routes(
    engine: Engine, model: ServedModel, metrics: Metrics, numbers: dict[str, Any], config: ServerConfig
) -> APIRouter:
    router = APIRouter(tags=["State"], responses=documented_errors())

    def described(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "rootstock",
            "root": model.name,  # the model that an alias stands for
            "max_model_len": engine.context_limit,
            **numbers,
            **anthropic_model_fields(name, model.created, engine.context_limit),
        }

    @router.get("/", include_in_schema=False)
    async def root() -> dict[str, str]:
        return {"server": "rootstock", "docs": "/docs", "health": "/health"}

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        """Lists the model and its aliases."""
        data = [described(name) for name in model.names]
        ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return {"object": "list", "data": data, "has_more": False, **ids}

    @router.get("/v1/models/{name:path}", responses=documented_errors(404))
    def one_model(name: str) -> dict[str, Any]:
        """Describes the model."""
        model.refuse_other(name)
        return described(name)

    @router.get(
        "/health",
        responses={503: {"description": "The engine is dead.", "content": {"application/json": {}}}},
    )
    async def health(request: Request) -> Response:
        """Tells whether the engine runs."""
        found = engine.health()
        told = {"status": "ok" if found.alive else "dead", "alive": found.alive, "detail": found.detail}
        if is_operator(request):
            told |= asdict(found)  # the number of running requests tells about other tenants
        return JSONResponse(told, 200 if found.alive else 503)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def prometheus(request: Request) -> Response:
        """Exports metrics for Prometheus."""
        refuse_unless(not names_tenant(request), config)
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
