"""OpenAI's API: its routes, and how its bodies make prompts."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rootstock.errors import RequestError
from rootstock.server.access.guard import SentBy
from rootstock.server.answers.event_stream import Answerer
from rootstock.server.answers.prompt_bodies import PromptReader, WireApi
from rootstock.server.formats.openai.calls import chat_call, completion_call, prepared_prompt
from rootstock.server.formats.openai.embeddings import embedding_routes
from rootstock.server.formats.openai.schema import (
    IGNORED,
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    PromptRequest,
)
from rootstock.server.formats.openai.tokenization import tokenization_routes
from rootstock.server.http.errors import MODEL_ROUTE, documented_errors
from rootstock.server.http.request_bodies import BoundedJsonRoute
from rootstock.server.models.registry import ModelRegistry
from rootstock.text.constraints.openai_fields import CONSTRAINT_FIELDS

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_FIELDS = frozenset(
    {
        *ChatCompletionRequest.model_fields,
        *CompletionRequest.model_fields,
        *REFUSED,
        *IGNORED,
        *CONSTRAINT_FIELDS,
    }
)


def openai_api(models: ModelRegistry, answerer: Answerer) -> WireApi:
    router = APIRouter()
    router.include_router(_generation_routes(answerer))
    router.include_router(embedding_routes(models, answerer))
    router.include_router(tokenization_routes(models, answerer))

    operations = {_CHAT: "chat", _COMPLETION: "text_completion", "/v1/embeddings": "embeddings"}
    return WireApi(router, openai_prompts(), operations)


def openai_prompts() -> Mapping[str, PromptReader[PromptRequest]]:
    def reader(route: str) -> PromptReader[PromptRequest]:
        return PromptReader(route, PromptRequest, _FIELDS, prepared_prompt, _rename)

    return {"chat": reader(_CHAT), "completions": reader(_COMPLETION)}


def _rename(error: RequestError, body: PromptRequest | ChatCompletionRequest) -> None:
    """Gives an error the client's name of a field."""
    if error.param == "prompt" and body.messages is not None:  # the engine's name for `messages`
        error.param = "messages"


def _generation_routes(answerer: Answerer) -> APIRouter:
    router = APIRouter(
        tags=["OpenAI"],
        route_class=BoundedJsonRoute,
        responses={200: {"content": {"text/event-stream": {}}}, **documented_errors(*MODEL_ROUTE)},
    )

    @router.post(_CHAT)
    async def chat(body: ChatCompletionRequest, request: Request, sender: SentBy) -> Response:
        """Answers a conversation, whole or as server-sent events."""
        try:
            return await answerer.answer(body.model, lambda model: chat_call(model, body, sender), request)
        except RequestError as error:
            _rename(error, body)
            raise

    @router.post(_COMPLETION)
    async def completion(body: CompletionRequest, request: Request, sender: SentBy) -> Response:
        """Continues text or token ids, whole or as server-sent events."""
        return await answerer.answer(body.model, lambda model: completion_call(model, body, sender), request)

    return router
