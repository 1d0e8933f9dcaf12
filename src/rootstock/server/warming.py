"""Warming: prompts that clients or the operator declare are cached in idle time, before requests send them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from pydantic import ValidationError

from rootstock.cache.hints import CacheHints, RetentionWish
from rootstock.cache.types import Tokens
from rootstock.engine.idle.prefills import IdleEnd, IdleKind, IdlePrefill
from rootstock.errors import (
    EngineStopped,
    IdleWorkFull,
    IdleWorkOff,
    InvalidParameter,
    RateLimited,
    RequestError,
    RootstockError,
)
from rootstock.pipeline.model import ServedModel
from rootstock.server.access import Tenant, meter_of
from rootstock.server.anthropic.calls import explained_prompt as messages_prompt
from rootstock.server.anthropic.schema import CountTokensRequest
from rootstock.server.declared_prompts import DeclaredPrompt
from rootstock.server.errors import MODEL_ROUTE, ClientGone, documented_errors
from rootstock.server.explainer import ExplainedPrompt
from rootstock.server.models import ModelRegistry
from rootstock.server.openai.calls import explained_prompt
from rootstock.server.openai.schema import ExplainRequest, WarmRequest
from rootstock.server.prompt_bodies import StateRoute, refuse_misspelled
from rootstock.server.rate_limits import Meter
from rootstock.server.responses.calls import Responses
from rootstock.server.responses.schema import ResponseRequest
from rootstock.server.wire import Json

log = logging.getLogger(__name__)

WARM = "/v1/cache/warm"
_AT_ONCE = 8  # declared prompts that wait for idle time together
_WATCH_S = 1.0  # between two looks at whether a client that waits is still there


@dataclass(eq=False)
class Warming:
    """One prompt, until it is cached or given up."""

    tokens: Tokens
    cached_tokens: int  # when it was queued
    end: IdleEnd | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def told(self) -> Json:
        """Returns the JSON of its state."""
        tokens = len(self.tokens)
        state = "queued" if self.end is None else self.end.value
        cached = tokens if self.end is IdleEnd.CACHED else self.cached_tokens
        return {"tokens": tokens, "cached_tokens": cached, "state": state}


def begin_warming(
    model: ServedModel,
    prompt: ExplainedPrompt,
    owner: str | None,
    ended: Callable[[], None] = lambda: None,
    hints: CacheHints | None = None,
    meter: Meter | None = None,
) -> Warming:
    """Queues a prompt. `ended` is called on the engine's thread. Do not call it on an event loop.

    Raises IdleWorkOff, IdleWorkFull, RateLimited, EngineStopped and the refusals of prompts.
    """
    if model.engine.parts.idle_prefills is None:
        raise IdleWorkOff()
    # The same prompt has its last token computed: models that cannot resume anywhere need a checkpoint before it.
    tokens = prompt.tokens[:-1] if len(prompt.tokens) > 1 else prompt.tokens
    warming = Warming(
        tokens, model.engine.cached_tokens(tokens, model.engine.namespace(prompt.salt, prompt.adapter))
    )

    if meter is not None:
        meter.prepared(len(tokens), warming.cached_tokens)

    def end(how: IdleEnd) -> None:
        warming.end = how
        warming.ended.set()
        ended()

    model.engine.prefill_in_idle_time(
        IdlePrefill(
            IdleKind.WARM,
            tokens,
            prompt.salt,
            owner,
            prompt.boundaries,
            adapter=prompt.adapter,
            hints=hints,
            ended=end,
        )
    )
    return warming


class Warmer:
    """Warmer of the prompts in requests' bodies, and of those that the operator declares."""

    def __init__(self, models: ModelRegistry, responses: Responses) -> None:
        self._models = models
        self._responses = responses

    async def warm(
        self,
        asked: str | None,
        request: Request,
        tenant: str,
        make_prompt: Callable[[ServedModel], ExplainedPrompt],
        *,
        wait: bool,
    ) -> Json:
        """Queues the prompt that `make_prompt` renders and tokenizes, and waits until it is cached if asked.

        Raises the errors of `begin_warming` and of `make_prompt`, and ClientGone.
        """
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(done.set)

        def begin(model: ServedModel) -> Warming:
            prompt = make_prompt(model)
            return begin_warming(model, prompt, tenant or prompt.salt, tell, meter=meter_of(request))

        warming = await self._models.run(asked, request, begin)
        while wait and not done.is_set():
            try:
                await asyncio.wait_for(done.wait(), _WATCH_S)
            except TimeoutError:
                if await request.is_disconnected():
                    raise ClientGone from None
        return warming.told()

    def prompt_of(self, declared: DeclaredPrompt) -> tuple[ServedModel, ExplainedPrompt]:
        """Renders and tokenizes a declared prompt. Raises RequestError."""
        route, tenant = declared.route, declared.tenant
        try:
            if route == "/v1/messages":
                message = CountTokensRequest.model_validate(declared.body)
                model = self._models.find(message.model)
                return model, messages_prompt(model, message, tenant)
            if route == "/v1/responses":
                response = ResponseRequest.model_validate(declared.body)
                model = self._models.find(response.model)
                return model, ExplainedPrompt.of_chat(self._responses.chat(model, response, tenant))
            body = ExplainRequest.model_validate(declared.body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise InvalidParameter(place, first.get("input"), f"valid: {first['msg']}") from None
        model = self._models.find(body.model)
        return model, explained_prompt(model, body, tenant)

    def start(self, declared: Iterable[DeclaredPrompt]) -> None:
        """Caches prompts of the operator on a thread of its own."""
        threading.Thread(target=self.warm_all, args=(declared,), name="rootstock-warm", daemon=True).start()

    def warm_all(self, declared: Iterable[DeclaredPrompt]) -> None:
        """Caches prompts of the operator, a few at a time, and logs the progress. Returns when all have ended.

        A prompt that is refused is logged, and the others go on.
        """
        open_ones: deque[Warming] = deque()
        ends: Counter[str] = Counter()
        tokens = 0
        try:
            for one in declared:
                if len(open_ones) >= _AT_ONCE:
                    self._wait(open_ones.popleft(), ends)
                try:
                    model, prompt = self.prompt_of(one)
                    open_ones.append(begin_warming(model, prompt, None, hints=_hints_of(one)))
                except (RequestError, IdleWorkFull) as error:
                    ends["refused"] += 1
                    log.warning("%s is not cached: %s", one.place, error.message)
                    continue
                tokens += len(prompt.tokens)
            while open_ones:
                self._wait(open_ones.popleft(), ends)
        except EngineStopped:
            return
        except RootstockError as error:
            log.warning("the declared prompts are not cached: %s", error.message)
            return
        told = ", ".join(f"{count:,} {end.replace('_', ' ')}" for end, count in sorted(ends.items()))
        log.warning("declared prompts: %s, %s tokens in all", told or "none", f"{tokens:,}")

    @staticmethod
    def _wait(warming: Warming, ends: Counter[str]) -> None:
        warming.ended.wait()
        assert warming.end is not None
        ends[warming.end.value] += 1


def _hints_of(declared: DeclaredPrompt) -> CacheHints | None:
    if declared.retain_s is None:
        return None
    return CacheHints(declared.tenant, retentions=(RetentionWish("retain_s", None, declared.retain_s),))


def warm_routes(models: ModelRegistry, responses: Responses, warmer: Warmer) -> APIRouter:
    router = APIRouter(
        prefix=WARM,
        tags=["Cache"],
        route_class=StateRoute,
        responses=documented_errors(*MODEL_ROUTE, 404),
    )

    def warmed(body: ExplainRequest, request: Request, tenant: str, *, wait: bool) -> Awaitable[Json]:
        return warmer.warm(
            body.model, request, tenant, lambda model: explained_prompt(model, body, tenant), wait=wait
        )

    @router.post("/chat/completions")
    @router.post("/completions")
    @router.post("")
    async def warm(body: WarmRequest, request: Request, tenant: Tenant, wait: bool = False) -> Json:
        """Caches a prompt, or several, while no request runs. With `wait`, answers when all have ended."""
        for each in (body, *(body.prompts or ())):
            refuse_misspelled(each)
        if body.prompts is None:
            return await warmed(body, request, tenant, wait=wait)
        if body.messages is not None or body.prompt is not None:
            raise InvalidParameter("prompts", body.prompts, "left out beside 'messages' and 'prompt'")

        async def one(each: ExplainRequest) -> Json:
            try:
                return await warmed(each, request, tenant, wait=wait)
            except (IdleWorkFull, RateLimited) as error:
                return {"state": "refused", "reason": error.message}

        return {"prompts": list(await asyncio.gather(*map(one, body.prompts)))}

    @router.post("/messages")
    async def warm_messages(
        body: CountTokensRequest, request: Request, tenant: Tenant, wait: bool = False
    ) -> Json:
        """Caches the prompt of a conversation of the Messages API while no request runs."""
        refuse_misspelled(body)
        return await warmer.warm(
            body.model, request, tenant, lambda model: messages_prompt(model, body, tenant), wait=wait
        )

    @router.post("/responses")
    async def warm_responses(
        body: ResponseRequest, request: Request, tenant: Tenant, wait: bool = False
    ) -> Json:
        """Caches the prompt of a request to the Responses API while no request runs."""
        refuse_misspelled(body)
        return await warmer.warm(
            body.model,
            request,
            tenant,
            lambda model: ExplainedPrompt.of_chat(responses.chat(model, body, tenant)),
            wait=wait,
        )

    return router
