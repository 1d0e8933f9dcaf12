"""The Responses API: its routes, and how its bodies make prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NoReturn

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from rootstock.config import ServerConfig
from rootstock.errors import InvalidParameter, RequestError, Unsupported
from rootstock.pipeline.model import PromptModel
from rootstock.server.access.guard import SentBy
from rootstock.server.answers.event_stream import Answerer
from rootstock.server.answers.prompt_bodies import PreparedPrompt, PromptReader, WireApi
from rootstock.server.formats.responses.answers import (
    CompactionBody,
    CountedInput,
    DeletedResponse,
    InputItems,
    ResponseBody,
)
from rootstock.server.formats.responses.calls import Responses, input_items, parsed
from rootstock.server.formats.responses.schema import ResponseRequest
from rootstock.server.formats.responses.sealing import Sealer
from rootstock.server.formats.responses.store import ResponseStore, StoredResponse
from rootstock.server.http.errors import MODEL_ROUTE, documented_errors
from rootstock.server.http.request_bodies import BoundedJsonRoute, count_more_bytes
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.wire.json_pieces import dumps
from rootstock.server.wire.sender import Sender

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


def responses_api(
    models: ModelRegistry, answerer: Answerer, config: ServerConfig, store: ResponseStore
) -> WireApi:
    of = _responses_of(config, store)
    routes = _response_routes(of, answerer, models)
    return WireApi(routes, responses_prompts(config, store), {"/v1/responses": "chat"})


def responses_prompts(
    config: ServerConfig, store: ResponseStore
) -> Mapping[str, PromptReader[ResponseRequest]]:
    of = _responses_of(config, store)

    def prepared(model: PromptModel, body: ResponseRequest, sender: Sender) -> PreparedPrompt:
        return PreparedPrompt.of_chat(of(sender).rendered_chat(model, body))

    return {"responses": PromptReader("/v1/responses", ResponseRequest, frozenset(), prepared, _rename)}


def _responses_of(config: ServerConfig, store: ResponseStore) -> Callable[[Sender], Responses]:
    def of(sender: Sender) -> Responses:
        sealer = Sealer(config.sealing_key or store.sealing_key, sender.tenant)
        return Responses(
            sender, store.of(sender.salt), sealer, config.max_body_bytes, config.response_id_prefix
        )

    return of


def _response_routes(
    of: Callable[[Sender], Responses], answerer: Answerer, models: ModelRegistry
) -> APIRouter:
    """Returns the routes. `of` returns the responses of a sender."""
    router = APIRouter(
        prefix="/v1/responses",
        tags=["Responses"],
        route_class=BoundedJsonRoute,
        responses=documented_errors(404, 429),
    )

    @router.post("", responses=_POSTED | {200: {"model": ResponseBody, "content": {"text/event-stream": {}}}})
    async def create(body: ResponseRequest, request: Request, sender: SentBy) -> Response:
        """Makes a response, whole or as server-sent events."""
        try:
            return await answerer.answer(body.model, lambda model: of(sender).call(model, body), request)
        except RequestError as error:
            _rename(error, body)
            raise

    @router.post("/compact", responses=_POSTED | {200: {"model": CompactionBody}})
    async def compact(body: ResponseRequest, request: Request, sender: SentBy) -> Response:
        """Compacts a conversation: the user's messages, and an item that stands for the rest."""
        try:
            return await answerer.answer(
                body.model, lambda model: of(sender).compaction(model, body), request
            )
        except RequestError as error:
            _rename(error, body)
            raise

    @router.post("/input_tokens", responses=_POSTED | {200: {"model": CountedInput}})
    async def count(body: ResponseRequest, request: Request, sender: SentBy) -> dict[str, Any]:
        """Counts the tokens of the prompt that a request would have."""
        try:
            chat = await models.run(body.model, request, lambda model: of(sender).rendered_chat(model, body))
        except RequestError as error:
            _rename(error, body)
            raise
        return {"object": "response.input_tokens", "input_tokens": len(chat.prompt.tokens)}

    async def read(
        request: Request, sender: Sender, id: str, answer: Callable[[StoredResponse], bytes]
    ) -> Response:
        """Answers with a stored response, when it is the request's turn: it may be as long as a body."""
        own = of(sender).store

        def found() -> bytes:
            count_more_bytes(own.bytes_of(id))
            return answer(own.get(id))

        return Response(await models.queue.run(request, found), media_type="application/json")

    @router.get("/{id}", responses={200: {"model": ResponseBody}})
    async def retrieve(id: str, request: Request, sender: SentBy, stream: bool = False) -> Response:
        """Returns a stored response."""
        if stream:
            raise Unsupported("stream", "A stored response has no events. Leave it out.")
        return await read(
            request, sender, id, lambda stored: b'%s,"output":%s}' % (stored.head[:-1], stored.output)
        )

    @router.get("/{id}/input_items", responses={200: {"model": InputItems}})
    async def list_input(
        id: str,
        request: Request,
        sender: SentBy,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """Lists the request's own items, without the items of the responses before it."""

        def listed(stored: StoredResponse) -> bytes:
            items = input_items(id, parsed(stored.input))
            if order == "desc":
                items.reverse()
            if after is not None:
                at = next((i for i, item in enumerate(items) if item["id"] == after), None)
                if at is None:
                    raise InvalidParameter("after", after, "the id of one of the items")
                items = items[at + 1 :]
            page = items[:limit]
            body = {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > limit,
            }
            return dumps(body).encode(errors="replace")

        return await read(request, sender, id, listed)

    # Plain functions run on other threads: they wait for the store's.
    @router.delete("/{id}", responses={200: {"model": DeletedResponse}})
    def delete(id: str, sender: SentBy) -> dict[str, Any]:
        """Removes a stored response."""
        of(sender).store.delete(id)
        return {"id": id, "object": "response", "deleted": True}

    @router.post("/{id}/cancel", status_code=400, response_model=None, responses=_POSTED)
    def cancel(id: str, sender: SentBy) -> NoReturn:
        """Refuses to cancel: a stored response is complete."""
        of(sender).store.bytes_of(id)
        raise Unsupported(
            "background", "A stored response is complete. Close the connection of a response to cancel it."
        )

    return router
