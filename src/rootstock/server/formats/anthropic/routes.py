"""Anthropic's Messages API: its routes, and how its bodies make prompts.

Headers such as `anthropic-version` and `anthropic-beta` may have any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rootstock.errors import RequestError
from rootstock.server.access.guard import SentBy
from rootstock.server.answers.event_stream import Answerer
from rootstock.server.answers.prompt_bodies import PromptReader, WireApi
from rootstock.server.formats.anthropic.answers import CountedTokens, MessageBody
from rootstock.server.formats.anthropic.calls import counted_tokens, messages_call, prepared_prompt
from rootstock.server.formats.anthropic.errors import MessagesErrorBody, error_body, new_request_id
from rootstock.server.formats.anthropic.schema import REFUSED, CountTokensRequest, MessagesRequest
from rootstock.server.http.errors import MODEL_ROUTE, documented_errors
from rootstock.server.http.request_bodies import BoundedJsonRoute
from rootstock.server.models.registry import ModelRegistry

_FIELDS = frozenset({*MessagesRequest.model_fields, *REFUSED})


def _rename(error: RequestError, _body: object) -> None:
    """Gives an error the client's name of a field."""
    if error.param == "prompt":  # the engine's name for `messages`
        error.param = "messages"


def anthropic_api(models: ModelRegistry, answerer: Answerer) -> WireApi:
    router = APIRouter(
        tags=["Anthropic"],
        route_class=BoundedJsonRoute,
        responses=documented_errors(*MODEL_ROUTE, body=MessagesErrorBody),
    )

    @router.post(
        "/v1/messages",
        responses={200: {"model": MessageBody, "content": {"text/event-stream": {}}}},
    )
    async def messages(body: MessagesRequest, request: Request, sender: SentBy) -> Response:
        """Answers a conversation, whole or as server-sent events."""
        try:
            response = await answerer.answer(
                body.model, lambda model: messages_call(model, body, sender), request
            )
        except RequestError as error:
            _rename(error, body)
            raise
        response.headers["request-id"] = new_request_id()
        return response

    @router.post("/v1/messages/count_tokens", responses={200: {"model": CountedTokens}})
    async def count_tokens(body: CountTokensRequest, request: Request, sender: SentBy) -> dict[str, Any]:
        """Counts the tokens of a conversation's prompt."""
        return await models.run(body.model, request, lambda model: counted_tokens(model, body, sender))

    return WireApi(router, anthropic_prompts(), {"/v1/messages": "chat"}, "/v1/messages", error_body)


def anthropic_prompts() -> Mapping[str, PromptReader[CountTokensRequest]]:
    reader = PromptReader("/v1/messages", CountTokensRequest, _FIELDS, prepared_prompt, _rename)
    return {"messages": reader}
