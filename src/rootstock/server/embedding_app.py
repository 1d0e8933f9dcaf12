"""The HTTP application of an embedding model."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from rootstock._version import __version__
from rootstock.config import ANY_NAME, EngineConfig, ServerConfig
from rootstock.engine.limits import refuse_surrogates
from rootstock.engine.stats import Health
from rootstock.errors import ModelNotFound, Unsupported
from rootstock.runtime.base import Embedder
from rootstock.server.access import Guard
from rootstock.server.anthropic.errors import error_body as messages_error_body
from rootstock.server.docs_page import install_docs
from rootstock.server.drain import Drain
from rootstock.server.errors import ErrorForms, documented_errors, install_error_handlers
from rootstock.server.openai.embeddings import embedding_routes
from rootstock.server.probes import probe_routes
from rootstock.server.rate_limits import LIMIT_HEADERS
from rootstock.server.request_bodies import BoundedJsonRoute, PreparationQueue

_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def create_embedding_app(
    embedder: Embedder, config: ServerConfig, engine: EngineConfig, drain: Drain | None = None
) -> FastAPI:
    """Makes the application of one embedding model. `engine` bounds the requests that wait."""
    drain = drain or Drain()
    names = list(dict.fromkeys([embedder.name, *(alias for alias in config.aliases if alias != ANY_NAME)]))

    def find(asked: str | None) -> Embedder:
        if asked is not None and asked not in names:
            if ANY_NAME not in config.aliases:
                raise ModelNotFound(asked, names)
            refuse_surrogates(asked, "model")
        return embedder

    app = FastAPI(title="Rootstock", version=__version__, docs_url=None, redoc_url=None)
    forms = ErrorForms({"/v1/messages": messages_error_body})
    app.add_middleware(Guard, config=config, forms=forms, drain=drain)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("Retry-After", *LIMIT_HEADERS),
        )
    install_error_handlers(app, forms)
    app.include_router(embedding_routes(find, PreparationQueue(engine.max_batch, engine.max_queue)))
    app.include_router(_state_routes(embedder, names, int(time.time())))
    app.include_router(_refusals(embedder))
    app.include_router(probe_routes(lambda: Health(True, "ok", 0, 0, 0), drain))
    install_docs(app)
    return app


def _state_routes(embedder: Embedder, names: list[str], created: int) -> APIRouter:
    router = APIRouter(tags=["State"], responses=documented_errors())

    def described(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "rootstock",
            "root": embedder.name,
            "parent": None,
            "max_model_len": embedder.most_tokens,
            "dimensions": embedder.dimensions,
        }

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        """Lists the model and its aliases."""
        return {"object": "list", "data": [described(name) for name in names]}

    @router.get("/v1/models/{name:path}", responses=documented_errors(404))
    def one_model(name: str) -> dict[str, Any]:
        """Describes the model."""
        if name not in names:
            raise ModelNotFound(name, names)
        return described(name)

    @router.get("/health")
    async def health() -> dict[str, Any]:
        """Tells whether the server works."""
        return {"status": "ok", "alive": True, "detail": "ok"}

    return router


def _refusals(embedder: Embedder) -> APIRouter:
    """Routes of generation models: the error names the reason, which a 404 would not."""
    router = APIRouter(route_class=BoundedJsonRoute, include_in_schema=False)

    async def refuse() -> None:
        remedy = f"{embedder.name!r} is an embedding model and generates no text: POST /v1/embeddings."
        raise Unsupported("model", remedy)

    for path in _GENERATING:
        router.post(path)(refuse)
    return router
