"""The engine's requests of one HTTP request, and the way of their events from its thread to an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from weakref import WeakSet

from starlette.types import Receive

from rootstock.engine.engine import Engine
from rootstock.engine.request import Aborted, Event, Failed, Finished, Request, TokenEvent, Usage
from rootstock.errors import EngineStopped, RootstockError
from rootstock.server.access.rate_limits import Meter
from rootstock.server.answers.keep_alive import KeepAlive
from rootstock.server.http.errors import ClientGone
from rootstock.server.request_info import Measured

Indexed = tuple[int, Event]  # the index of a request in its HTTP request, and one of its events
Shortcut = Callable[[list[Indexed]], bool]  # returns whether it took them: all or none


class Bridge:
    """A carrier of events from the engines' threads to one event loop, which it wakes once for all events of a step.

    A loop that is woken by the first event would take the interpreter from the engine before the others are emitted.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._engines: WeakSet[Engine] = WeakSet()  # a model that is unloaded leaves no engine here
        self._lock = threading.Lock()  # of _engines
        self._arrived: deque[tuple[Mailbox, Indexed]] = deque()
        self._awaited = False

    def connect(self, engine: Engine) -> None:
        """Carries the events of an engine, from any thread. Idempotent."""
        with self._lock:
            if engine not in self._engines:
                self._engines.add(engine)
                engine.call_after_events(self._wake)

    def close(self) -> None:
        with self._lock:
            for engine in self._engines:
                engine.no_call_after_events(self._wake)

    def send(self, mailbox: Mailbox, event: Indexed) -> None:
        """Queues an event on an engine's thread, which calls `_wake` after the last event of a step."""
        self._arrived.append((mailbox, event))

    def _wake(self) -> None:
        if self._awaited or not self._arrived:
            return
        self._awaited = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and no task waits for the events
            self._awaited = False  # otherwise later events would pile up
            self._arrived.clear()

    def _deliver(self) -> None:
        # First the flag, then the events: an event that arrives in between wakes the loop again.
        self._awaited = False
        arrived, mail = self._arrived, dict[Mailbox, list[Indexed]]()
        while arrived:
            mailbox, event = arrived.popleft()
            mail.setdefault(mailbox, []).append(event)
        for mailbox, events in mail.items():
            mailbox.put(events)


@dataclass(frozen=True, slots=True)
class NoEvents:
    """Result of a wait for events, none of which came in time."""


class Mailbox:
    """The events of one HTTP request, for one task. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._events: list[Indexed] = []
        self.hung_up = False
        self._waiter: asyncio.Future[None] | None = None
        self._shortcut: Shortcut = lambda events: False

    def put(self, events: list[Indexed]) -> None:
        # Bypasses the task only while it sleeps: it has then handled all earlier events, so order is preserved.
        sleeps = self._waiter is not None and not self._waiter.done()
        if not (sleeps and self._shortcut(events)):
            self._events += events
            self._wake()

    def offer_to(self, shortcut: Shortcut) -> None:
        """Offers later events to `shortcut` while the task waits. The task sleeps on if the shortcut takes them."""
        self._shortcut = shortcut

    def hang_up(self) -> None:
        """Notes that the client is gone: `take` returns the events that have arrived, then raises ClientGone."""
        self.hung_up = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, within_s: float | None = None) -> list[Indexed] | NoEvents:
        """Returns all events that have arrived, at least one unless the time passes. Raises ClientGone."""
        if not self._events and not self.hung_up:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if within_s is None else loop.call_later(within_s, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        if not self._events:
            if self.hung_up:
                raise ClientGone
            return NoEvents()
        events, self._events = self._events, []
        return events


class Generation:
    """The engine's requests of one HTTP request. Leaving the `with` block aborts those that have not ended.

    async with Generation(bridge) as generation:
        await run_in_threadpool(generation.submit, engine, requests)
        generation.watch(receive)
        while events := await generation.next(): …
    """

    def __init__(self, bridge: Bridge, meter: Meter | None = None) -> None:
        self._meter = meter  # None: its tenant has no limits
        self.requests: tuple[Request, ...] = ()
        self._engine: Engine | None = None
        self._at_close: Callable[[], None] = lambda: None
        self._bridge = bridge
        self.measured = Measured()
        self.said: list[str] | None = None  # texts of the answer's tokens; None: they are not read
        self._mailbox = Mailbox()
        self._open: set[int] = set()  # indices of requests that the engine has not ended
        self._error: RootstockError | None = None  # raised after the events that precede it
        self._keep_alive: KeepAlive | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True  # before the requests are read: another thread may be submitting them
        if self._watcher is not None:
            self._watcher.cancel()
        self._abort_open()
        at_close, self._at_close = self._at_close, lambda: None
        at_close()

    def on_close(self, function: Callable[[], None]) -> None:
        """Makes `close` call a function, once, on the loop's thread."""
        self._at_close = function

    def submit(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Submits all requests or none, once. Raises the errors of `Engine.submit`.

        Not for the loop's thread: a sampler with penalties reads the whole prompt, and the engine may hold its lock.
        """
        self._bridge.connect(engine)
        self._engine, self.requests = engine, tuple(requests)
        self.measured.requests, self.measured.submitted_at = len(self.requests), time.monotonic()
        for index, request in enumerate(self.requests):
            engine.submit(request, self._sink(index))
            self._open.add(index)
        if self._closed:  # the task was cancelled meanwhile
            self._abort_open()

    def _abort_open(self) -> None:
        for index in tuple(self._open):
            assert self._engine is not None, "no request is open before it was submitted"
            self._engine.abort(self.requests[index].id)
        if self._open:
            self.measured.unanswered["abort"] += len(self._open)
        self._open.clear()

    def _sink(self, index: int) -> Callable[[Event], None]:
        send, mailbox = self._bridge.send, self._mailbox
        return lambda event: send(mailbox, (index, event))

    def watch(self, receive: Receive) -> None:
        """Makes `next` raise ClientGone when the client closes the connection."""
        self._watcher = asyncio.create_task(self._hang_up_when_gone(receive))

    async def _hang_up_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._mailbox.hang_up()

    def refuse_if_gone(self) -> None:
        """Raises ClientGone, for an answer that takes long to send."""
        if self._mailbox.hung_up:
            raise ClientGone

    def offer_to(self, shortcut: Shortcut) -> None:
        """Offers the events that arrive while `next` is awaited to `shortcut`, on the loop's thread.

        The shortcut takes tokens only. `next` returns the events that it refuses or fails at.
        """

        def timed(events: list[Indexed]) -> bool:
            try:
                if not shortcut(events):
                    return False
            except Exception:  # is raised again, and handled, in the task that awaits `next`
                return False
            self._arrived(events)
            if self._meter is not None:
                for index, event in events:
                    if isinstance(event, TokenEvent):
                        self._meter.admitted(index, event.cached_tokens)
                self._meter.generated(len(events))
            return True

        self._mailbox.offer_to(timed)

    def keep_alive(self, sender: KeepAlive) -> None:
        """Makes `next` send keep-alives while it waits for events."""
        self._keep_alive = sender

    async def next(self) -> list[Indexed]:
        """Returns all events that have arrived, in order, and none when all requests have ended.

        Raises the error of a request that fails, and ClientGone.
        """
        if self._error is not None:
            raise self._error
        if not self._open:
            return []
        events = await self._take()
        self._arrived([each for each in events if isinstance(each[1], TokenEvent)])
        for at, (index, event) in enumerate(events):
            if isinstance(event, TokenEvent):
                if self._meter is not None:
                    self._meter.admitted(index, event.cached_tokens)
                    self._meter.generated(1)
                continue
            self._error = self._ended(index, event)
            if self._error is not None:
                if at == 0:
                    raise self._error
                return events[:at]
        return events

    def _arrived(self, tokens: list[Indexed]) -> None:
        """Notes the arrival of events, all of which are tokens."""
        now = time.monotonic()
        self.measured.token_times.extend([now] * len(tokens))
        self.measured.token_requests.extend([index for index, _ in tokens])
        if self.said is not None:
            self.said += [event.text for _, event in tokens if isinstance(event, TokenEvent)]

    async def _take(self) -> list[Indexed]:
        while True:
            sender = self._keep_alive
            events = await self._mailbox.take(None if sender is None else sender.due_in_s())
            if not isinstance(events, NoEvents):
                return events
            if sender is not None:
                await sender.send_if_due()

    def _ended(self, index: int, event: Event) -> RootstockError | None:
        """Records the end of a request, and returns the error that ended it."""
        match event:
            case Finished():
                self._open.discard(index)
                self.measured.finished.append((event, self.requests[index].stop.max_tokens))
                if self.said is not None:
                    self.said.append(event.text)
                if self._meter is not None:  # an answer may have no tokens
                    self._meter.admitted(index, event.usage.cached_tokens)
            case Failed(error=error):
                self._open.discard(index)
                self.measured.unanswered["error"] += 1
                return error
            case Aborted():  # not by this generation, which still reads
                self._open.discard(index)
                self.measured.unanswered["abort"] += 1
                return EngineStopped("The request was cancelled on the server")
            case _:
                pass
        return None


def total_usage(ends: Sequence[Finished], choices_per_prompt: int) -> Usage:
    """Adds up the usage of one HTTP request.

    The tokens of a prompt count once for all of its choices. A prompt's cached tokens are the fewest of its choices.
    """
    prompts = [ends[at : at + choices_per_prompt] for at in range(0, len(ends), choices_per_prompt)]
    return Usage(
        prompt_tokens=sum(choices[0].usage.prompt_tokens for choices in prompts),
        cached_tokens=sum(min(end.usage.cached_tokens for end in choices) for choices in prompts),
        completion_tokens=sum(end.usage.completion_tokens for end in ends),
        draft_tokens=sum(end.usage.draft_tokens for end in ends),
        accepted_draft_tokens=sum(end.usage.accepted_draft_tokens for end in ends),
    )
