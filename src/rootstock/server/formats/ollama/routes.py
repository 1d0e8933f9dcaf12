"""Routes of Ollama's API. The models are those of the server: none is pulled, made or removed by a request."""

from __future__ import annotations

import time
from typing import NoReturn

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rootstock._version import __version__
from rootstock.config import ServerConfig
from rootstock.errors import Unsupported
from rootstock.server.access.guard import (
    SentBy,
    is_operator,
    may_use_model,
    refuse_model_of_others,
    refuse_unless,
)
from rootstock.server.answers.embedding_answers import (
    AskedEmbeddings,
    EmbeddingQuery,
    HeldEmbeddings,
    answer_embeddings,
)
from rootstock.server.answers.event_stream import Answerer, EventStream
from rootstock.server.answers.prompt_bodies import WireApi
from rootstock.server.formats.ollama.answers import NDJSON, now
from rootstock.server.formats.ollama.calls import ollama_call
from rootstock.server.formats.ollama.errors import OllamaErrorBody, ollama_error_body
from rootstock.server.formats.ollama.models import listed, running, served_name, shown
from rootstock.server.formats.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
)
from rootstock.server.http.errors import MODEL_ROUTE, documented_errors
from rootstock.server.http.request_bodies import BoundedJsonRoute
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.sender import Sender

ROOT = "/api"
# Of the API that these routes speak. Clients compare it with the versions that brought a feature.
OLLAMA_VERSION = "0.12.6"
_OTHER_MODELS = (
    "The models of this server are chosen when it starts: rootstock serve MODEL, or --models FILE for several. "
    "GET /api/tags lists them."
)


def ollama_api(models: ModelRegistry, answerer: Answerer, config: ServerConfig) -> WireApi:
    kinds = {"chat": "chat", "generate": "text_completion", "embed": "embeddings", "embeddings": "embeddings"}
    operations = {f"{ROOT}/{path}": operation for path, operation in kinds.items()}
    return WireApi(_routes(models, answerer, config), {}, operations, ROOT, ollama_error_body)


def _routes(models: ModelRegistry, answerer: Answerer, config: ServerConfig) -> APIRouter:
    router = APIRouter(
        prefix=ROOT,
        tags=["Ollama"],
        route_class=BoundedJsonRoute,
        responses=documented_errors(body=OllamaErrorBody),
    )
    posted = documented_errors(*MODEL_ROUTE, body=OllamaErrorBody)
    streamed = posted | {200: {"content": {NDJSON: {}}}}

    async def answered(
        body: OllamaChatRequest | OllamaGenerateRequest, request: Request, sender: Sender
    ) -> Response:
        began_ns = time.monotonic_ns()
        response = await answerer.answer(
            served_name(models, body.model),
            lambda model: ollama_call(model, body, sender, began_ns),
            request,
        )
        if isinstance(response, EventStream):
            response.headers["content-type"] = NDJSON
        return response

    async def loaded(body: OllamaChatRequest | OllamaGenerateRequest, request: Request) -> Json:
        """Loads the model, or unloads it where `keep_alive` is 0."""
        asked = served_name(models, body.model)
        name, reason = asked or models.slot(None).name, "load"
        if body.keep_alive_s() == 0:
            refuse_unless(is_operator(request), config)
            await models.unload(name, request)
            reason = "unload"
        else:
            (await models.use_any(asked, request, "generate")).end()
        is_chat = isinstance(body, OllamaChatRequest)
        said = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        told = {"model": body.model or name, "created_at": now(), **said}
        return told | {"done": True, "done_reason": reason}

    @router.post("/chat", response_model=None, responses=streamed)
    async def chat(body: OllamaChatRequest, request: Request, sender: SentBy) -> Response | Json:
        """Answers a conversation, as lines of JSON or whole. Without messages, loads the model."""
        return await (answered(body, request, sender) if body.messages else loaded(body, request))

    @router.post("/generate", response_model=None, responses=streamed)
    async def generate(body: OllamaGenerateRequest, request: Request, sender: SentBy) -> Response | Json:
        """Answers a prompt, as lines of JSON or whole. Without a prompt, loads the model."""
        return await (loaded(body, request) if body.is_empty else answered(body, request, sender))

    @router.post("/embed", response_class=Response, responses=posted)
    async def embed(body: OllamaEmbedRequest, request: Request, _sender: SentBy) -> Response:
        """Computes the embeddings of texts."""
        began_ns = time.monotonic_ns()
        name = served_name(models, body.model)

        def told(asked: AskedEmbeddings, held: HeldEmbeddings) -> Json:
            return {
                "model": body.model or asked.model,
                "embeddings": held.encoded(),
                "total_duration": time.monotonic_ns() - began_ns,
                "load_duration": 0,
                "prompt_eval_count": asked.tokens,
            }

        query = EmbeddingQuery(name, body.input, body.dimensions or None)
        return await answer_embeddings(models, answerer, request, lambda: query, told)

    @router.post("/embeddings", response_class=Response, responses=posted)
    async def embeddings(body: OllamaEmbeddingsRequest, request: Request, _sender: SentBy) -> Response:
        """Computes the embedding of a text: the older route."""
        query = EmbeddingQuery(served_name(models, body.model), body.prompt)
        return await answer_embeddings(
            models, answerer, request, lambda: query, lambda _, held: {"embedding": next(held.encoded(), [])}
        )

    async def tags(request: Request) -> Json:
        """Lists the models and their aliases that the tenant may use."""
        return {"models": [listed(models, name) for name in models.names if may_use_model(request, name)]}

    async def version() -> Json:
        """Tells the version of Ollama's API, and the server's own."""
        return {"version": OLLAMA_VERSION, "rootstock": __version__}

    for path, get in (("/tags", tags), ("/version", version)):
        router.get(path)(get)
        router.head(path, include_in_schema=False)(get)

    @router.get("/ps")
    async def loaded_models(request: Request) -> Json:
        """Lists the loaded models that the tenant may use."""
        found = [running(models, name) for name in models.names if may_use_model(request, name)]
        return {"models": [one for one in found if one is not None]}

    @router.post("/show", responses=posted)
    async def show(body: OllamaModelRequest, request: Request) -> Json:
        """Describes a model. One that is not loaded has no numbers."""
        name = served_name(models, body.model or body.name)
        refuse_model_of_others(request, name or models.slot(None).name)
        return shown(models, name)

    async def refused(request: Request) -> NoReturn:
        """Refuses to change the models."""
        raise Unsupported(request.url.path, _OTHER_MODELS)

    for path in ("/pull", "/push", "/create", "/copy"):
        name = path.removeprefix("/")
        router.post(path, name=name, status_code=400, response_model=None, responses=posted)(refused)
    router.delete("/delete", name="delete", status_code=400, response_model=None)(refused)
    return router
