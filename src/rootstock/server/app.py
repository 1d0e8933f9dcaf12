"""The HTTP application: its routes, and the middleware before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from rootstock._version import __version__
from rootstock.config import ServerConfig
from rootstock.engine.build import Assembly
from rootstock.server.access.guard import (
    DASHBOARD,
    Guard,
    Keys,
    is_for_metrics,
    is_operator,
    may_use_model,
    names_tenant,
    refuse_model_of_others,
    refuse_unless,
)
from rootstock.server.access.login_sessions import LoginSessions
from rootstock.server.access.rate_limits import LIMIT_HEADERS
from rootstock.server.access.rules import AccessRules
from rootstock.server.answers.event_stream import HELD_HEADER, Answerer
from rootstock.server.answers.prompt_bodies import Prompts
from rootstock.server.formats.anthropic.routes import anthropic_api
from rootstock.server.formats.ollama.routes import ollama_api
from rootstock.server.formats.openai.routes import openai_api
from rootstock.server.formats.responses.routes import responses_api
from rootstock.server.formats.responses.store import ResponseStore
from rootstock.server.http.drain import Drain
from rootstock.server.http.errors import (
    ANTHROPIC_ID_HEADER,
    REQUEST_ID_HEADER,
    ErrorForms,
    documented_errors,
    install_error_handlers,
)
from rootstock.server.http.request_bodies import BoundedJsonRoute
from rootstock.server.models.embedding_model import EmbeddingModel
from rootstock.server.models.model_card import anthropic_model_fields, numbers_of, numbers_of_embedder
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.observe.metrics import Metrics
from rootstock.server.observe.request_log import RequestLog
from rootstock.server.observe.tracing import Tracing
from rootstock.server.routes.adapter_routes import adapter_routes
from rootstock.server.routes.cache_routes import cache_routes
from rootstock.server.routes.dashboard.routes import install_dashboard, wants_html
from rootstock.server.routes.docs_page import install_docs
from rootstock.server.routes.explainer import Explainer
from rootstock.server.routes.pin_routes import pin_routes
from rootstock.server.routes.probes import probe_routes
from rootstock.server.routes.prompt_routes import prompt_routes
from rootstock.server.routes.warming import Warmer
from rootstock.server.wire.api_call import MAX_TOKENS_HEADER
from rootstock.server.wire.fields import ClosedWire


def create_app(
    served: ModelRegistry | Assembly,
    config: ServerConfig | None = None,
    drain: Drain | None = None,
    keys: Keys | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Makes the application of several models, or of one. The caller starts and stops them.

    Without `keys`, reads the keys of the configuration. The caller closes `tracing`, too. None: requests have no
    spans. The caller closes the store of responses, `app.state.responses`, after the engines have stopped.
    Raises InvalidOption.
    """
    drain = drain or Drain()
    config = config or ServerConfig()
    models = served if isinstance(served, ModelRegistry) else ModelRegistry.of_one(served, config)
    store = ResponseStore.open(config.responses_file, config.responses_budget_bytes)
    metrics = Metrics(models, lambda: store.stats, config.metrics_tenants)
    answerer = Answerer(models, metrics, config.sse_keep_alive_s)
    apis = (
        openai_api(models, answerer),
        anthropic_api(models, answerer),
        responses_api(models, answerer, config, store),
        ollama_api(models, answerer, config),
    )
    app = FastAPI(title="Rootstock", version=__version__, docs_url=None, redoc_url=None)
    forms = ErrorForms({api.root: api.error_form for api in apis if api.root is not None})
    sessions = LoginSessions()
    keys = keys or Keys(config)
    app.add_middleware(Guard, config=config, forms=forms, drain=drain, keys=keys, sessions=sessions)

    def limit_retained(rules: AccessRules) -> None:
        models.limit_retained(rules.retained)

    keys.follow(limit_retained)
    if config.allowed_origins:
        # Before the guard: a browser's preflight has no key, and a page can read a refusal only with CORS headers.
        app.add_middleware(
            _CorsOfApi,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=(
                "Retry-After",
                MAX_TOKENS_HEADER,
                REQUEST_ID_HEADER,
                HELD_HEADER,
                ANTHROPIC_ID_HEADER,
                *LIMIT_HEADERS,
            ),
        )
    app.add_middleware(RequestLog, metrics=metrics, tracing=tracing)
    install_error_handlers(app, forms)
    for api in apis:
        app.include_router(api.routes)
        if tracing is not None:
            tracing.operations.update(api.operations)
    app.state.responses = store
    prompts = Prompts.of(apis)
    app.state.warmer = Warmer(models, prompts)
    app.include_router(prompt_routes(models, prompts, Explainer(models, config), app.state.warmer, config))
    app.include_router(adapter_routes(models, config))
    app.include_router(cache_routes(models, config))
    app.include_router(pin_routes(models, config))
    app.include_router(_state_routes(models, metrics, config))
    app.include_router(probe_routes(models.health, drain))
    page = install_dashboard(app, models, config, sessions, keys, drain) if config.dashboard else None
    app.include_router(_root_route(page))
    install_docs(app)
    return app


class _CorsOfApi(CORSMiddleware):
    """CORS headers for pages of the allowed origins: on all routes but the dashboard's, which take a cookie."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(DASHBOARD):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _root_route(page: Callable[[Request], Response] | None) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    @router.head("/")  # with which Ollama's clients ask whether the server runs
    async def root(request: Request) -> Response:
        if page is not None and wants_html(request):
            return page(request)
        return JSONResponse(
            {"server": "rootstock", "docs": "/docs", "health": "/health"}, headers={"Vary": "Accept"}
        )

    return router


class ModelRequest(ClosedWire):
    """The name of a model to load or unload."""

    model: str


def _state_routes(models: ModelRegistry, metrics: Metrics, config: ServerConfig) -> APIRouter:
    router = APIRouter(tags=["State"], route_class=BoundedJsonRoute, responses=documented_errors())

    def described(name: str) -> dict[str, Any]:
        slot = models.slot(name)
        model = slot.model  # an unloaded one is described as it was loaded last
        if isinstance(model, EmbeddingModel):
            most = model.engine.most_tokens
            numbers = numbers_of_embedder(model.description)
            slot.card = {"max_model_len": most, **numbers, "max_input_tokens": most}
        elif model is not None:
            slot.card = {
                "max_model_len": model.context_limit,
                **numbers_of(model.description, model.block_size, model.engine.parts.why_no_drafts),
                **anthropic_model_fields(name, slot.created, model.context_limit),
            }
        return {
            "id": name,
            "object": "model",
            "created": slot.created,
            "owned_by": "rootstock",
            "root": name if models.is_adapter(name) else slot.name,  # the model that an alias stands for
            "status": {"value": slot.status},
            "task": slot.task,
            "parent": slot.name if models.is_adapter(name) else None,  # of a LoRA adapter: its base
            **anthropic_model_fields(name, slot.created, None),
            **slot.card,
            "display_name": name,
        }

    @router.get("/v1/models")
    def all_models(request: Request) -> dict[str, Any]:
        """Lists the models and their aliases that the tenant may use."""
        data = [described(name) for name in models.names if may_use_model(request, name)]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"object": "list", "data": data, "has_more": False, "first_id": first, "last_id": last}

    @router.post("/v1/models/load", responses=documented_errors(404, 409, 415, 429))
    async def load(body: ModelRequest, request: Request) -> dict[str, Any]:
        """Loads a model, and waits until requests can use it."""
        refuse_unless(is_operator(request), config)
        (await models.use_any(body.model, request)).end()
        return described(body.model)

    @router.post("/v1/models/unload", responses=documented_errors(404, 409, 415, 429))
    async def unload(body: ModelRequest, request: Request) -> dict[str, Any]:
        """Unloads a model that no request uses. A later request loads it again."""
        refuse_unless(is_operator(request), config)
        await models.unload(body.model, request)
        return described(body.model)

    @router.get("/v1/models/{name:path}", responses=documented_errors(404))
    def one_model(name: str, request: Request) -> dict[str, Any]:
        """Describes a model."""
        refuse_model_of_others(request, name)
        return described(name)

    @router.get(
        "/health",
        responses={503: {"description": "An engine is dead.", "content": {"application/json": {}}}},
    )
    async def health(request: Request) -> Response:
        """Tells whether the engines run."""
        found = models.health()
        told = {"status": "ok" if found.alive else "dead", "alive": found.alive, "detail": found.detail}
        if is_operator(request):
            told |= asdict(found)  # the number of running requests tells about other tenants
        return JSONResponse(told, 200 if found.alive else 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Tells the server's version."""
        return {"version": __version__}

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def prometheus(request: Request) -> Response:
        """Exports metrics for Prometheus."""
        refuse_unless(not names_tenant(request), config)
        shows_tenants = is_operator(request) or is_for_metrics(request)
        text = metrics.render_for_operator() if shows_tenants else metrics.render()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router
