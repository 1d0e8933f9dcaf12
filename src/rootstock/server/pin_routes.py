"""Routes of pins: prefixes that stay in memory until they are released.

The route that pins the prompt of a body has the path of the route that answers it, below `/v1/cache/pin`. A pin takes
memory from all requests, so that a tenant is known by its key or header, or the sender is the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from rootstock.cache.pins import PinId, Pinned, PinRefused
from rootstock.config import ServerConfig
from rootstock.errors import PinNotFound, PinNotGranted, RequestError
from rootstock.pipeline.model import ServedModel
from rootstock.server.access import Tenant, is_operator, refuse_unless
from rootstock.server.anthropic.calls import explained_prompt as messages_prompt
from rootstock.server.anthropic.schema import CountTokensRequest
from rootstock.server.errors import MODEL_ROUTE, documented_errors
from rootstock.server.explainer import ExplainedPrompt
from rootstock.server.models import ModelRegistry
from rootstock.server.openai.calls import explained_prompt
from rootstock.server.openai.schema import ExplainRequest, ReleaseRequest
from rootstock.server.prompt_bodies import StateRoute, refuse_misspelled
from rootstock.server.responses.calls import Responses
from rootstock.server.responses.schema import ResponseRequest
from rootstock.server.wire import Json

_POSTED = documented_errors(409, *MODEL_ROUTE)


def pin_routes(models: ModelRegistry, responses: Responses, config: ServerConfig) -> APIRouter:
    router = APIRouter(prefix="/v1/cache", tags=["Cache"], route_class=StateRoute)

    async def pin(
        body: ExplainRequest | CountTokensRequest | ResponseRequest,
        request: Request,
        tenant: str,
        make_prompt: Callable[[ServedModel], ExplainedPrompt],
        name: str,
    ) -> Json:
        owner_of_pins(request, tenant, config)
        refuse_misspelled(body)

        def pinned(model: ServedModel) -> Json:
            prompt = make_prompt(model)
            found = model.engine.pin(
                prompt.tokens, tenant, model.engine.namespace(prompt.salt, prompt.adapter)
            )
            if isinstance(found, PinRefused):
                raise PinNotGranted(found.reason)
            return pin_body(found)

        try:
            return await models.run(body.model, request, pinned)
        except RequestError as error:
            if error.param == "prompt":  # the engine's name
                error.param = name
            raise

    @router.post("/pin/chat/completions", responses=_POSTED)
    @router.post("/pin/completions", responses=_POSTED)
    @router.post("/pin", responses=_POSTED)
    async def pin_prompt(body: ExplainRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Keeps the cached part of a prompt in memory until it is released."""
        name = "prompt" if body.messages is None else "messages"
        return await pin(body, request, tenant, lambda model: explained_prompt(model, body, tenant), name)

    @router.post("/pin/messages", responses=_POSTED)
    async def pin_messages(body: CountTokensRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Keeps the cached part of a conversation's prompt in memory until it is released."""
        return await pin(
            body, request, tenant, lambda model: messages_prompt(model, body, tenant), "messages"
        )

    @router.post("/pin/responses", responses=_POSTED)
    async def pin_response(body: ResponseRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Keeps the cached part of the prompt of a request in memory until it is released."""
        return await pin(
            body,
            request,
            tenant,
            lambda model: ExplainedPrompt.of_chat(responses.chat(model, body, tenant)),
            "input",
        )

    # Plain functions run on other threads: they wait for the engine's.
    @router.post("/release", responses=documented_errors(404, 415))
    def release(body: ReleaseRequest, request: Request, tenant: Tenant) -> dict[str, Any]:
        """Releases a pin. The prefix stays cached like any other."""
        if not release_pin(models, body.id, owner_of_pins(request, tenant, config)):
            raise PinNotFound(body.id)
        return {"id": body.id, "released": True}

    @router.get("/pins", responses=documented_errors())
    def pins(request: Request, tenant: Tenant) -> dict[str, Any]:
        """Lists the pins of the tenant. The operator sees the pins of all tenants."""
        owner = owner_of_pins(request, tenant, config)
        listed = models.ask_loaded(lambda model: model.engine.pins(owner))
        return {"pins": [pin_body(pinned) for _, of_model in listed for pinned in of_model]}

    return router


def owner_of_pins(request: Request, tenant: str, config: ServerConfig) -> str | None:
    """Returns the tenant whose pins the sender may see and release; None: the operator, who may all of them.

    Raises AdminOnly.
    """
    if is_operator(request):
        return None
    refuse_unless(bool(tenant), config)
    return tenant


def release_pin(models: ModelRegistry, id: str, owner: str | None) -> bool:
    """Releases a pin of an owner, or of all. Returns False if there is none. Waits for the engines' threads."""
    # Models of the same weights give a prefix the same id: each of them is asked.
    return any(
        released
        for _, released in models.ask_loaded(lambda model: model.engine.release_pin(PinId(id), owner))
    )


def pin_body(pinned: Pinned) -> Json:
    return {
        "id": pinned.id,
        "tenant": pinned.tenant,
        "tokens": pinned.tokens,
        "asked_tokens": pinned.asked_tokens,
        "bytes": pinned.size_bytes,
    }
