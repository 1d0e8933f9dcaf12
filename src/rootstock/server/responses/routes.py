"""Routes of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from rootstock.engine.prompts.salt import salt_of
from rootstock.errors import InvalidParameter, RequestError, Unsupported
from rootstock.server.access import Tenant
from rootstock.server.errors import MODEL_ROUTE, documented_errors
from rootstock.server.event_stream import Answerer
from rootstock.server.explainer import EXPLAIN, ExplainedPrompt, Explainer
from rootstock.server.hints.headers import HeadHints
from rootstock.server.models import ModelRegistry
from rootstock.server.request_bodies import BoundedJsonRoute
from rootstock.server.responses.answers import CountedInput, DeletedResponse, InputItems, ResponseBody
from rootstock.server.responses.calls import Responses, input_items
from rootstock.server.responses.schema import ResponseRequest

# The engine's names of fields.
_PARAMS = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens", "logprobs": "include"}


def _rename(error: RequestError, body: ResponseRequest) -> None:
    """Gives an error the client's name of a field."""
    old = error.param
    if old is None or old not in _PARAMS or old in (body.model_extra or {}):
        return
    error.param = _PARAMS[old]
    if error.message.startswith(f"'{old}'"):
        error.message = f"'{error.param}'{error.message.removeprefix(repr(old))}"


_POSTED = documented_errors(*MODEL_ROUTE)


def response_routes(responses: Responses, answerer: Answerer, models: ModelRegistry) -> APIRouter:
    router = APIRouter(
        prefix="/v1/responses",
        tags=["Responses"],
        route_class=BoundedJsonRoute,
        responses=documented_errors(404, 429),
    )
    store = responses.store

    @router.post("", responses=_POSTED | {200: {"model": ResponseBody, "content": {"text/event-stream": {}}}})
    async def create(body: ResponseRequest, request: Request, tenant: Tenant, head: HeadHints) -> Response:
        """Makes a response, whole or as server-sent events."""
        try:
            return await answerer.answer(
                body.model, lambda model: responses.call(model, body, tenant, head), request
            )
        except RequestError as error:
            _rename(error, body)
            raise

    @router.post("/input_tokens", responses=_POSTED | {200: {"model": CountedInput}})
    async def count(body: ResponseRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Counts the tokens of the prompt that a request would have."""
        try:
            chat = await models.run(body.model, request, lambda model: responses.chat(model, body, tenant))
        except RequestError as error:
            _rename(error, body)
            raise
        return {"object": "response.input_tokens", "input_tokens": len(chat.prompt.tokens)}

    # Plain functions run on other threads: they wait for the store's.
    @router.get("/{id}", responses={200: {"model": ResponseBody}})
    def retrieve(id: str, tenant: Tenant, stream: bool = False) -> dict[str, Any]:
        """Returns a stored response."""
        if stream:
            raise Unsupported("stream", "A stored response has no events. Leave it out.")
        stored = store.get(salt_of(tenant, None), id)
        return stored.head | {"output": stored.output}

    @router.get("/{id}/input_items", responses={200: {"model": InputItems}})
    def list_input(
        id: str,
        tenant: Tenant,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """Lists the request's own items, without those of the responses before it."""
        items = input_items(id, store.get(salt_of(tenant, None), id).input)
        if order == "desc":
            items.reverse()
        if after is not None:
            at = next((i for i, item in enumerate(items) if item["id"] == after), None)
            if at is None:
                raise InvalidParameter("after", after, "the id of one of the items")
            items = items[at + 1 :]
        page = items[:limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }

    @router.delete("/{id}", responses={200: {"model": DeletedResponse}})
    def delete(id: str, tenant: Tenant) -> dict[str, Any]:
        """Removes a stored response."""
        store.delete(salt_of(tenant, None), id)
        return {"id": id, "object": "response", "deleted": True}

    @router.post("/{id}/cancel", status_code=400, response_model=None, responses=_POSTED)
    def cancel(id: str, tenant: Tenant) -> NoReturn:
        """Refuses to cancel: a stored response is complete."""
        store.get(salt_of(tenant, None), id)
        raise Unsupported(
            "background", "A stored response is complete. Close the connection of a response to cancel it."
        )

    return router


def explain_route(responses: Responses, explainer: Explainer) -> APIRouter:
    router = APIRouter(tags=["Cache"], route_class=BoundedJsonRoute)

    @router.post(f"{EXPLAIN}/responses", responses=_POSTED)
    async def explain(body: ResponseRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Explains how much of the prompt of a request is cached, and why not more."""
        try:
            return await explainer.explain(
                body.model,
                request,
                lambda model: ExplainedPrompt.of_chat(responses.chat(model, body, tenant)),
            )
        except RequestError as error:
            _rename(error, body)
            raise

    return router
