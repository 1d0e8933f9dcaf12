"""Routes that load and unload LoRA adapters while the server runs, by vLLM's names. For operators only."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from rootstock.config import MAX_MODEL_NAME_CHARS, ServerConfig
from rootstock.errors import AdapterExists, AdapterNotLoaded, InvalidParameter, Unsupported
from rootstock.runtime.adapter_files import allowed_directory
from rootstock.server.access.guard import is_operator, refuse_unless
from rootstock.server.http.errors import MODEL_ROUTE, documented_errors
from rootstock.server.http.request_bodies import StateRoute
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.wire.fields import ClosedWire, Label
from rootstock.text.limits import refuse_surrogates

_MAX_PATH_CHARS = 4_096
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}

Name = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME_CHARS)]


class LoadAdapterRequest(ClosedWire):
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=_MAX_PATH_CHARS)]
    model: Annotated[Label | None, Field(description="the base model, where several are served")] = None


class UnloadAdapterRequest(ClosedWire):
    lora_name: Name


def adapter_routes(models: ModelRegistry, config: ServerConfig) -> APIRouter:
    router = APIRouter(
        tags=["Adapters"],
        route_class=StateRoute,
        responses=documented_errors(*MODEL_ROUTE, 401, 403, 409),
    )

    def refuse(request: Request, param: str) -> None:
        """Refuses a client that is not an operator. On a server with fixed adapters, refuses every client."""
        refuse_unless(is_operator(request), config)
        if not config.adapter_directories:
            remedy = "The adapters of this server are fixed. To change them while it runs, start it with"
            raise Unsupported(param, f"{remedy} --adapter-directory DIR.")

    # Plain functions run on another thread: they read files and wait for the engine's.
    @router.post("/v1/load_lora_adapter", responses=_TEXT)
    def load(body: LoadAdapterRequest, request: Request) -> Response:
        """Loads a LoRA adapter from an allowed directory. Requests choose it by its name as their model."""
        refuse(request, "lora_path")
        refuse_surrogates(body.lora_name, "lora_name")
        refuse_surrogates(body.lora_path, "lora_path")
        if not body.lora_name.isprintable() or not body.lora_name.strip():
            raise InvalidParameter("lora_name", body.lora_name, "printable characters")
        directory = allowed_directory(body.lora_path, config.adapter_directories)
        if directory is None:
            raise InvalidParameter("lora_path", body.lora_path, "within a directory of --adapter-directory")
        if body.lora_name in models.names:
            raise AdapterExists(body.lora_name)
        models.ask_one(body.model, lambda model: model.engine.load_adapter(body.lora_name, directory))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", responses=_TEXT)
    def unload(body: UnloadAdapterRequest, request: Request) -> Response:
        """Removes a LoRA adapter by its name. Its running requests go on to their ends."""
        refuse(request, "lora_name")
        for model in models.loaded:
            if model.engine.adapters.find(body.lora_name) is not None:
                models.ask_one(model.name, lambda found: found.engine.unload_adapter(body.lora_name))
                return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
        raise AdapterNotLoaded(body.lora_name)

    return router
