"""From the engine's thread to the event loop: the events of one HTTP request, and its client's going away."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from fastapi.concurrency import run_in_threadpool

from rootstock.engine.engine import Engine
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    PromptScored,
    Request,
    TokenEvent,
    Usage,
)
from rootstock.errors import EngineStopped, RootstockError
from rootstock.server.errors import ClientGone
from rootstock.server.metrics import Metrics

Receive = Callable[[], Awaitable[Mapping[str, Any]]]  # ASGI's
Indexed = tuple[int, Event]  # the index of a request in its HTTP request, and one of its events
_HUNG_UP = object()


class Bridge:
    """Carries events from the engine's thread into one event loop, waking it once for many of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[tuple[asyncio.Queue[Any], Indexed]] = deque()
        self._awaited = False

    def send(self, queue: asyncio.Queue[Any], event: Indexed) -> None:
        """Called on the engine's thread."""
        self._arrived.append((queue, event))
        if self._awaited:
            return
        self._awaited = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and with it whoever waited for the event
            self._arrived.clear()

    def _deliver(self) -> None:
        # First the flag, then the events: one that arrives in between wakes the loop once too often, not never.
        self._awaited = False
        while self._arrived:
            queue, event = self._arrived.popleft()
            queue.put_nowait(event)


class Generation:
    """The requests that one HTTP request became, in the engine. Leaving the block aborts what has not ended.

    async with Generation(engine, bridge, metrics, requests) as generation:
        await generation.submit()
        generation.watch(receive)
        async for events in generation: …
    """

    def __init__(self, engine: Engine, bridge: Bridge, metrics: Metrics, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._engine = engine
        self._bridge = bridge
        self._timing = metrics.timing(len(self.requests))
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._open: set[int] = set()  # indices of requests that the engine has not ended
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        for index in self._open:
            self._engine.abort(self.requests[index].id)
        self._open.clear()

    async def submit(self) -> None:
        """All requests or none. Raises what `Engine.submit` raises."""
        # Off the loop: a sampler with penalties looks at the whole prompt, and the engine may hold its lock.
        await run_in_threadpool(self._submit)

    def _submit(self) -> None:
        for index, request in enumerate(self.requests):
            self._engine.submit(request, self._sink(index))
            self._open.add(index)

    def _sink(self, index: int) -> Callable[[Event], None]:
        bridge, queue = self._bridge, self._queue
        return lambda event: bridge.send(queue, (index, event))

    def watch(self, receive: Receive) -> None:
        """From now on the iteration raises ClientGone when the client closes the connection."""
        self._watcher = asyncio.create_task(self._hang_up_when_gone(receive))

    async def _hang_up_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(_HUNG_UP)

    def __aiter__(self) -> AsyncIterator[list[Indexed]]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[list[Indexed]]:
        """Events in the order in which they happened, as many at once as there are; until all have ended.

        Raises the error of a request that fails, and ClientGone.
        """
        while self._open:
            batch: list[Indexed] = []
            try:
                batch.append(self._checked(await self._queue.get()))
                while not self._queue.empty():
                    batch.append(self._checked(self._queue.get_nowait()))
            except (RootstockError, ClientGone):
                if batch:  # what happened before the failure is told before it
                    yield batch
                raise
            yield batch

    def _checked(self, item: Any) -> Indexed:
        if item is _HUNG_UP:
            raise ClientGone
        index, event = item
        match event:
            case TokenEvent():
                self._timing.token(index)
            case Finished():
                self._open.discard(index)
                self._timing.finished(event.usage)
            case Failed(error=error):
                self._open.discard(index)
                raise error
            case Aborted():  # not by us, since we are still reading
                self._open.discard(index)
                raise EngineStopped("The request was cancelled on the server")
            case PromptScored():
                pass
        return index, event


def total_usage(ends: Sequence[Finished], choices_per_prompt: int) -> Usage:
    """Of one HTTP request. Several choices share their prompt: its tokens count once, and those are cached
    that even the choice with the fewest cached tokens did not compute."""
    prompts = [ends[at : at + choices_per_prompt] for at in range(0, len(ends), choices_per_prompt)]
    return Usage(
        prompt_tokens=sum(choices[0].usage.prompt_tokens for choices in prompts),
        cached_tokens=sum(min(end.usage.cached_tokens for end in choices) for choices in prompts),
        completion_tokens=sum(end.usage.completion_tokens for end in ends),
    )
