"""Routes of Anthropic's Messages API. Headers such as `anthropic-version` and `anthropic-beta` may have any value."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rootstock.errors import RequestError
from rootstock.server.access import Tenant
from rootstock.server.anthropic.answers import CountedTokens, MessageBody
from rootstock.server.anthropic.calls import counted_tokens, explained_prompt, messages_call
from rootstock.server.anthropic.errors import MessagesErrorBody, new_request_id
from rootstock.server.anthropic.schema import CountTokensRequest, MessagesRequest
from rootstock.server.errors import MODEL_ROUTE, documented_errors
from rootstock.server.event_stream import Answerer
from rootstock.server.explainer import EXPLAIN, Explainer
from rootstock.server.models import ModelRegistry
from rootstock.server.request_bodies import BoundedJsonRoute


def _rename(error: RequestError) -> None:
    """Gives an error the client's name of a field."""
    if error.param == "prompt":  # the engine's name for `messages`
        error.param = "messages"


def anthropic_routes(models: ModelRegistry, answerer: Answerer, explainer: Explainer) -> APIRouter:
    router = APIRouter(
        route_class=BoundedJsonRoute,
        responses=documented_errors(*MODEL_ROUTE, body=MessagesErrorBody),
    )

    @router.post(
        "/v1/messages",
        tags=["Anthropic"],
        responses={200: {"model": MessageBody, "content": {"text/event-stream": {}}}},
    )
    async def messages(body: MessagesRequest, request: Request, tenant: Tenant) -> Response:
        """Answers a conversation, whole or as server-sent events."""
        try:
            response = await answerer.answer(
                body.model, lambda model, head: messages_call(model, body, tenant, head), request
            )
        except RequestError as error:
            _rename(error)
            raise
        response.headers["request-id"] = new_request_id()
        return response

    @router.post("/v1/messages/count_tokens", tags=["Anthropic"], responses={200: {"model": CountedTokens}})
    async def count_tokens(body: CountTokensRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Counts the tokens of a conversation's prompt."""
        return await models.run(body.model, request, lambda model: counted_tokens(model, body, tenant))

    @router.post(f"{EXPLAIN}/messages", tags=["Cache"], responses=documented_errors(*MODEL_ROUTE))
    async def explain(body: CountTokensRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Explains how much of a conversation's prompt is cached, and why not more."""
        try:
            return await explainer.explain(
                body.model, request, lambda model: explained_prompt(model, body, tenant)
            )
        except RequestError as error:
            _rename(error)
            raise

    return router
