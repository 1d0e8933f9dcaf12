"""Routes of pins: prefixes that stay in memory until they are released.

A pin takes memory from all requests, so that a tenant is known by its key or header, or the sender is the operator.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from rootstock.cache.retention.pins import PinId, Pinned
from rootstock.config import ServerConfig
from rootstock.errors import PinNotFound
from rootstock.server.access.guard import SentBy, is_operator, refuse_unless
from rootstock.server.http.errors import documented_errors
from rootstock.server.http.request_bodies import StateRoute
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.fields import ClosedWire, Label
from rootstock.server.wire.sender import Sender


class ReleaseRequest(ClosedWire):
    """The pin that is released."""

    id: Label


def pin_routes(models: ModelRegistry, config: ServerConfig) -> APIRouter:
    router = APIRouter(prefix="/v1/cache", tags=["Cache"], route_class=StateRoute)

    # Plain functions run on other threads: they wait for the engine's.
    @router.post("/release", responses=documented_errors(404, 415))
    def release(body: ReleaseRequest, request: Request, sender: SentBy) -> dict[str, Any]:
        """Releases a pin. The prefix stays cached like any other."""
        if not release_pin(models, body.id, owner_of_pins(request, sender, config)):
            raise PinNotFound(body.id)
        return {"id": body.id, "released": True}

    @router.get("/pins", responses=documented_errors())
    def pins(request: Request, sender: SentBy) -> dict[str, Any]:
        """Lists the pins of the tenant. The operator sees the pins of all tenants."""
        owner = owner_of_pins(request, sender, config)
        listed = models.ask_loaded(lambda model: model.engine.pins(owner))
        return {"pins": [pin_body(pinned) for _, of_model in listed for pinned in of_model]}

    return router


def owner_of_pins(request: Request, sender: Sender, config: ServerConfig) -> str | None:
    """Returns the tenant whose pins the sender may see and release; None: the operator, who may all of them.

    Raises AdminOnly.
    """
    if is_operator(request):
        return None
    refuse_unless(bool(sender.tenant), config)
    return sender.tenant


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
