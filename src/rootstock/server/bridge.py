"""From the engine's thread to the event loop: the events of one HTTP request, and its client's going away."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rootstock.engine.engine import Engine
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    Request,
    TokenEvent,
    Usage,
)
from rootstock.errors import EngineStopped, RootstockError
from rootstock.server.errors import ClientGone
from rootstock.server.metrics import Metrics

Receive = Callable[[], Awaitable[Mapping[str, Any]]]  # ASGI's
Indexed = tuple[int, Event]  # the index of a request in its HTTP request, and one of its events
Shortcut = Callable[[list[Indexed]], bool]  # whether it took them, all or none


class Bridge:
    """Carries events from the engine's thread into one event loop, and wakes it once for all events of a step.

    A step's events are carried when all of them are there: a loop that was woken by the first would take the
    interpreter from the engine while it still makes the others.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self.loop = loop
        self._engine = engine
        self._arrived: deque[tuple[Mailbox, Indexed]] = deque()
        self._awaited = False
        engine.call_after_events(self._wake)

    def close(self) -> None:
        self._engine.no_call_after_events(self._wake)

    def send(self, mailbox: Mailbox, event: Indexed) -> None:
        """Called on the engine's thread, which calls `_wake` when the step has no more of them."""
        self._arrived.append((mailbox, event))

    def _wake(self) -> None:
        if self._awaited or not self._arrived:
            return
        self._awaited = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and with it whoever waited for the event
            self._awaited = False  # or what comes until the requests have ended would pile up
            self._arrived.clear()

    def _deliver(self) -> None:
        # First the flag, then the events: one that arrives in between wakes the loop once too often, not never.
        self._awaited = False
        arrived, mail = self._arrived, dict[Mailbox, list[Indexed]]()
        while arrived:
            mailbox, event = arrived.popleft()
            mail.setdefault(mailbox, []).append(event)
        for mailbox, events in mail.items():
            mailbox.put(events)


class Mailbox:
    """Events of one HTTP request, for one task to take. Of the event loop's thread."""

    def __init__(self) -> None:
        self._events: list[Indexed] = []
        self.hung_up = False
        self._waiter: asyncio.Future[None] | None = None
        self._shortcut: Shortcut = _takes_nothing

    def put(self, events: list[Indexed]) -> None:
        # Past the task only while it sleeps: then it has dealt with all that came before, and the order is kept.
        sleeps = self._waiter is not None and not self._waiter.done()
        if not (sleeps and self._shortcut(events)):
            self._events += events
            self._wake()

    def offer_to(self, shortcut: Shortcut) -> None:
        """From now on events that come while the task waits for some are offered to it first: what it takes the task
        does not get, and sleeps on."""
        self._shortcut = shortcut

    def hang_up(self) -> None:
        """The client is gone: what has come is still to be had, and then ClientGone."""
        self.hung_up = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Indexed]:
        """All that has come, at least one event. Raises ClientGone."""
        if not self._events and not self.hung_up:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._events:
            raise ClientGone
        events, self._events = self._events, []
        return events


def _takes_nothing(_events: list[Indexed]) -> bool:
    return False


class Generation:
    """The requests that one HTTP request became, in the engine. Leaving the block aborts what has not ended.

    async with Generation(engine, bridge, metrics) as generation:
        await run_in_threadpool(generation.submit, requests)
        generation.watch(receive)
        while events := await generation.next(): …
    """

    def __init__(self, engine: Engine, bridge: Bridge, metrics: Metrics) -> None:
        self.requests: tuple[Request, ...] = ()
        self._engine = engine
        self._bridge = bridge
        self._metrics = metrics
        self._timing = metrics.timing(0)
        self._mailbox = Mailbox()
        self._open: set[int] = set()  # indices of requests that the engine has not ended
        self._error: RootstockError | None = None  # to be raised after what happened before it was told
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True  # before the requests are looked at: another thread may be submitting them
        if self._watcher is not None:
            self._watcher.cancel()
        self._abort_open()

    def submit(self, requests: Sequence[Request]) -> None:
        """All requests or none, once. Raises what `Engine.submit` raises.

        Not for the loop's thread: a sampler with penalties looks at the whole prompt, and the engine may hold its
        lock.
        """
        self.requests = tuple(requests)
        self._timing = self._metrics.timing(len(self.requests))
        for index, request in enumerate(self.requests):
            self._engine.submit(request, self._sink(index))
            self._open.add(index)
        if self._closed:  # whoever asked was cancelled meanwhile
            self._abort_open()

    def _abort_open(self) -> None:
        for index in tuple(self._open):
            self._engine.abort(self.requests[index].id)
        self._open.clear()

    def _sink(self, index: int) -> Callable[[Event], None]:
        send, mailbox = self._bridge.send, self._mailbox
        return lambda event: send(mailbox, (index, event))

    def watch(self, receive: Receive) -> None:
        """From now on `next` raises ClientGone when the client closes the connection."""
        self._watcher = asyncio.create_task(self._hang_up_when_gone(receive))

    async def _hang_up_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._mailbox.hang_up()

    def refuse_if_gone(self) -> None:
        """Raises ClientGone, for an answer that takes long to be sent."""
        if self._mailbox.hung_up:
            raise ClientGone

    def offer_to(self, shortcut: Shortcut) -> None:
        """From now on events that come while `next` is awaited are offered to it, on the loop's thread; it takes none
        but tokens. What it did not take, or raised at, comes by `next`."""
        timing = self._timing

        def timed(events: list[Indexed]) -> bool:
            try:
                if not shortcut(events):
                    return False
            except Exception:  # to be raised where somebody can deal with it: in the task that awaits `next`
                return False
            now = timing.now()
            for index, _ in events:
                timing.token(index, now)
            return True

        self._mailbox.offer_to(timed)

    async def next(self) -> list[Indexed]:
        """Events in the order in which they happened, as many at once as there are; none when all have ended.

        Raises the error of a request that fails, and ClientGone.
        """
        if self._error is not None:
            raise self._error
        if not self._open:
            return []
        events = await self._mailbox.take()
        now = self._timing.now()
        for at, (index, event) in enumerate(events):
            if isinstance(event, TokenEvent):
                self._timing.token(index, now)
                continue
            self._error = self._ended(index, event)
            if self._error is not None:
                if at == 0:
                    raise self._error
                return events[:at]
        return events

    def _ended(self, index: int, event: Event) -> RootstockError | None:
        """Takes note of an end; answers the error that it is."""
        match event:
            case Finished():
                self._open.discard(index)
                self._timing.finished(event.usage)
            case Failed(error=error):
                self._open.discard(index)
                return error
            case Aborted():  # not by us, since we are still reading
                self._open.discard(index)
                return EngineStopped("The request was cancelled on the server")
            case _:
                pass
        return None


def total_usage(ends: Sequence[Finished], choices_per_prompt: int) -> Usage:
    """Of one HTTP request. Several choices share their prompt: its tokens count once, and those are cached
    that even the choice with the fewest cached tokens did not compute."""
    prompts = [ends[at : at + choices_per_prompt] for at in range(0, len(ends), choices_per_prompt)]
    return Usage(
        prompt_tokens=sum(choices[0].usage.prompt_tokens for choices in prompts),
        cached_tokens=sum(min(end.usage.cached_tokens for end in choices) for choices in prompts),
        completion_tokens=sum(end.usage.completion_tokens for end in ends),
        draft_tokens=sum(end.usage.draft_tokens for end in ends),
        accepted_draft_tokens=sum(end.usage.accepted_draft_tokens for end in ends),
    )
