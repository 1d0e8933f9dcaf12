"""Probes of an orchestrator: whether to restart the server, and whether to send it requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from rootstock.server.drain import Drain
from rootstock.server.errors import RETRY_AFTER_S, documented_errors
from rootstock.server.models import ModelRegistry


def probe_routes(models: ModelRegistry, drain: Drain) -> APIRouter:
    router = APIRouter(tags=["State"], responses=documented_errors())

    def probed(problem: str | None) -> JSONResponse:
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": problem}, 503, {"Retry-After": str(RETRY_AFTER_S)})

    def not_alive() -> str | None:
        found = models.health()
        return None if found.alive else f"dead: {found.detail}"

    @router.get("/livez", responses=_unless("The engine is dead or hangs: restart the server."))
    async def livez() -> JSONResponse:
        """Tells whether the server works. One that does not never recovers."""
        return probed(not_alive())

    @router.get(
        "/readyz", responses=_unless("The engine is dead, or the server drains: send requests elsewhere.")
    )
    async def readyz() -> JSONResponse:
        """Tells whether the server takes requests."""
        return probed("draining" if drain.is_draining else not_alive())

    return router


def _unless(description: str) -> dict[int | str, dict[str, Any]]:
    return {503: {"description": description, "content": {"application/json": {}}}}
