"""Probes of an orchestrator: whether to restart the server, and whether to send it requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from rootstock.engine.stats import Health
from rootstock.server.http.drain import Drain
from rootstock.server.http.errors import RETRY_AFTER_S, documented_errors


def probe_routes(health: Callable[[], Health], drain: Drain) -> APIRouter:
    router = APIRouter(tags=["State"], responses=documented_errors())

    def probed(problem: str | None) -> JSONResponse:
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": problem}, 503, {"Retry-After": str(RETRY_AFTER_S)})

    def not_alive() -> str | None:
        found = health()
        return None if found.alive else f"dead: {found.detail}"

    not_working = _unless("An engine is dead or hangs: restart the server.")

    @router.get("/livez", responses=not_working)
    async def livez() -> JSONResponse:
        """Tells whether the server works. One that does not never recovers."""
        return probed(not_alive())

    @router.post("/ping", responses=documented_errors(415) | not_working)
    @router.get("/ping", responses=not_working)
    async def ping() -> JSONResponse:
        """Tells the same as /livez, under the name that SageMaker and vLLM's clients use."""
        return probed(not_alive())

    @router.get(
        "/readyz", responses=_unless("An engine is dead, or the server drains: send requests elsewhere.")
    )
    async def readyz() -> JSONResponse:
        """Tells whether the server takes requests."""
        return probed("draining" if drain.is_draining else not_alive())

    return router


def _unless(description: str) -> dict[int | str, dict[str, Any]]:
    return {503: {"description": description, "content": {"application/json": {}}}}
