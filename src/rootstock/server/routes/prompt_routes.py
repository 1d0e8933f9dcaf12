"""Routes that explain, pin or warm the prompt of a body, or apply its hints, of each API in the table of `Prompts`.

The earlier paths, `/v1/cache/explain/messages` and the like, take the API's body alone. They are not documented.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request

from rootstock.cache.retention.pins import PinRefused
from rootstock.config import ServerConfig
from rootstock.errors import IdleWorkFull, InvalidParameter, PinNotGranted, RateLimited
from rootstock.pipeline.model import ServedModel
from rootstock.server.access.guard import SentBy, is_operator, meter_of
from rootstock.server.answers.prompt_bodies import ApiPrompt, PromptOfApi, Prompts, PromptsOfApis
from rootstock.server.http.errors import MODEL_ROUTE, documented_errors
from rootstock.server.http.request_bodies import StateRoute
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.routes.explainer import Explainer
from rootstock.server.routes.hints_alone import HintedPrompt, follow_hints, hint_fields
from rootstock.server.routes.pin_routes import owner_of_pins, pin_body
from rootstock.server.routes.warming import Warmer
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.sender import Sender

Act = Callable[[ApiPrompt, Request, Sender], Awaitable[Json]]


def prompt_routes(
    models: ModelRegistry, prompts: Prompts, explainer: Explainer, warmer: Warmer, config: ServerConfig
) -> APIRouter:
    router = APIRouter(prefix="/v1/cache", tags=["Cache"], route_class=StateRoute)

    async def explained(prompt: ApiPrompt, request: Request, sender: Sender) -> Json:
        with prompt.naming_fields():
            return await explainer.explain(prompt, request, sender)

    async def pinned(prompt: ApiPrompt, request: Request, sender: Sender) -> Json:
        owner_of_pins(request, sender, config)
        prompt.refuse_misspelled()

        def pin_cached(model: ServedModel) -> Json:
            prepared = prompt.prepare(model, sender)
            found = model.engine.pin(prepared.tokens, sender.tenant, prepared.namespace(model.engine))
            if isinstance(found, PinRefused):
                raise PinNotGranted(found.reason)
            return pin_body(found)

        with prompt.naming_fields():
            return await models.run(prompt.model, request, pin_cached)

    async def warmed(prompt: ApiPrompt, request: Request, sender: Sender, *, wait: bool) -> Json:
        prompt.refuse_misspelled()
        with prompt.naming_fields():
            return await warmer.warm(prompt, request, sender, wait=wait)

    @router.post("/explain", responses=documented_errors(*MODEL_ROUTE))
    async def explain(body: PromptOfApi, request: Request, sender: SentBy) -> dict[str, Any]:
        """Explains how much of a prompt is cached, and why not more."""
        return await explained(prompts.read(body.api, body.body), request, sender)

    @router.post("/pin", responses=documented_errors(409, *MODEL_ROUTE))
    async def pin(body: PromptOfApi, request: Request, sender: SentBy) -> dict[str, Any]:
        """Keeps the cached part of a prompt in memory until it is released."""
        return await pinned(prompts.read(body.api, body.body), request, sender)

    @router.post("/hints", responses=documented_errors(*MODEL_ROUTE))
    async def hints(body: HintedPrompt, request: Request, sender: SentBy) -> dict[str, Any]:
        """Applies the hints of a body to the cached part of its prompt, without a request."""
        prompt, fields = prompts.read(body.api, body.whole_body), hint_fields(body.whole_body)
        prompt.refuse_misspelled()
        meter, may_pin = meter_of(request), bool(sender.tenant) or is_operator(request)

        def follow(model: ServedModel) -> Json:
            return follow_hints(model, prompt.prepare(model, sender), fields, sender, meter, may_pin=may_pin)

        with prompt.naming_fields():
            return await models.run(prompt.model, request, follow)

    @router.post("/warm", responses=documented_errors(*MODEL_ROUTE))
    async def warm(
        body: PromptsOfApis, request: Request, sender: SentBy, wait: bool = False
    ) -> dict[str, Any]:
        """Caches a prompt, or several, while no request runs. With `wait`, answers when all have ended."""
        if body.prompts is None:
            return await warmed(prompts.read(body.api, body.body or {}), request, sender, wait=wait)
        if (body.body or {}).keys() - {"model"}:
            raise InvalidParameter("prompts", body.prompts, "left out beside a prompt")
        whole = {"prompts": [each.body for each in body.prompts]}
        read = [
            prompts.read(each.api, each.body, ("prompts", at), whole) for at, each in enumerate(body.prompts)
        ]
        for each in read:
            each.refuse_misspelled()

        async def one(prompt: ApiPrompt) -> Json:
            try:
                return await warmed(prompt, request, sender, wait=wait)
            except (IdleWorkFull, RateLimited) as error:
                return {"state": "refused", "reason": error.message}

        return {"prompts": list(await asyncio.gather(*map(one, read)))}

    def add_paths_of(api: str, path: str) -> None:
        def add(name: str, act: Act) -> None:
            @router.post(f"/{name}{path}", include_in_schema=False)
            async def answer(body: Annotated[Any, Body()], request: Request, sender: SentBy) -> Json:
                return await act(prompts.read(api, body), request, sender)

        add("explain", explained)
        add("pin", pinned)

        @router.post(f"/warm{path}", include_in_schema=False)
        async def warm_body(
            body: Annotated[Any, Body()], request: Request, sender: SentBy, wait: bool = False
        ) -> Json:
            return await warmed(prompts.read(api, body), request, sender, wait=wait)

    for api, reader in prompts.readers.items():
        add_paths_of(api, reader.route.removeprefix("/v1"))
    return router
