"""Warming: prompts that clients or the operator declare are cached in idle time, before requests send them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fastapi import Request

from rootstock.cache.retention.hint_types import CacheHints, RetentionWish
from rootstock.cache.types import Tokens
from rootstock.engine.idle.prefills import IdleEnd, IdleKind, IdlePrefill
from rootstock.errors import EngineStopped, IdleWorkFull, IdleWorkOff, RequestError, RootstockError
from rootstock.pipeline.model import ServedModel
from rootstock.server.access.guard import meter_of
from rootstock.server.access.rate_limits import Meter
from rootstock.server.answers.prompt_bodies import ApiPrompt, PreparedPrompt, Prompts
from rootstock.server.http.errors import ClientGone
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.routes.declared_prompts import DeclaredPrompt
from rootstock.server.wire.api_call import Json
from rootstock.server.wire.sender import Sender

log = logging.getLogger(__name__)

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
    prompt: PreparedPrompt,
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
    warming = Warming(tokens, model.engine.cached_tokens(tokens, prompt.namespace(model.engine)))

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

    def __init__(self, models: ModelRegistry, prompts: Prompts) -> None:
        self._models = models
        self._prompts = prompts

    async def warm(self, prompt: ApiPrompt, request: Request, sender: Sender, *, wait: bool) -> Json:
        """Queues a prompt, and waits until it is cached if asked.

        Raises the errors of `begin_warming`, RequestError and ClientGone.
        """
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(done.set)

        def begin(model: ServedModel) -> Warming:
            prepared = prompt.prepare(model, sender)
            return begin_warming(
                model, prepared, sender.tenant or prepared.salt, tell, meter=meter_of(request)
            )

        warming = await self._models.run(prompt.model, request, begin)
        while wait and not done.is_set():
            try:
                await asyncio.wait_for(done.wait(), _WATCH_S)
            except TimeoutError:
                if await request.is_disconnected():
                    raise ClientGone from None
        return warming.told()

    def prompt_of(self, declared: DeclaredPrompt) -> tuple[ServedModel, PreparedPrompt]:
        """Renders and tokenizes a declared prompt. Raises RequestError."""
        prompt = self._prompts.read_declared(declared.route, declared.body)
        model = self._models.find(prompt.model)
        return model, prompt.prepare(model, Sender(declared.tenant))

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
