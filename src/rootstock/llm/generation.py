"""The requests of one call of the library, while the engine has them."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from rootstock.engine.engine import Engine
from rootstock.engine.request import Aborted, Event, Failed, Finished, Request
from rootstock.errors import EngineStopped, QueueFull, RequestError

Indexed = tuple[int, Event]  # the index of a request in its call, and one of its events


class CallRequests:
    """The requests of a call. Submits them as the engine's queue has room, and keeps track of their ends.

    Exactly one thread takes the events. Any thread may call `close`.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        prompt_of: Sequence[int],  # of each request: the index of its prompt in the call
        put: Callable[[Indexed], None],  # called on the engine's thread: must neither block nor raise
    ) -> None:
        self.requests = requests
        self._engine = engine
        self._prompt_of = prompt_of
        self._put = put
        self._most_open = engine.config.max_batch + engine.config.max_queue
        self._next = 0  # the first request that is not submitted
        self._open: set[int] = set()  # submitted and not ended
        self._closed = False

    @property
    def is_over(self) -> bool:
        return not self._open and (self._closed or self._next == len(self.requests))

    @property
    def may_submit(self) -> bool:
        return not self._closed and self._next < len(self.requests) and len(self._open) < self._most_open

    def submit(self) -> None:
        """Submits as many further requests as there is room for. Raises the errors of `Engine.submit`.

        QueueFull is raised only if none of this call's own requests would make room by ending.
        """
        while self.may_submit:
            index = self._next
            try:
                self._engine.submit(self.requests[index], self._sink(index))
            except QueueFull:
                if self._open:
                    return
                raise
            except RequestError as error:
                error.add_note(f"in prompt {self._prompt_of[index]} of this call")
                raise
            self._open.add(index)
            self._next += 1
        if self._closed:  # by another thread, which may not have seen the last request
            self._abort_open()

    def _sink(self, index: int) -> Callable[[Event], None]:
        put = self._put
        return lambda event: put((index, event))

    def note(self, index: int, event: Event) -> None:
        """Records the end of a request. Raises the error of one that failed or that another caller aborted."""
        match event:
            case Finished():
                self._open.discard(index)
            case Failed(error=error):
                self._open.discard(index)
                raise error
            case Aborted():
                self._open.discard(index)
                raise EngineStopped("The request was aborted")
            case _:
                pass

    def close(self) -> None:
        """Aborts all requests that have not ended. Idempotent."""
        self._closed = True  # before the requests are looked at: another thread may be submitting them
        self._abort_open()

    def _abort_open(self) -> None:
        for index in tuple(self._open):
            self._engine.abort(self.requests[index].id)
        self._open.clear()


class GenerationEvents:
    """Events of a call in the order in which they happened, for a thread.

    `close`, an error and the end of the last reference abort the requests that have not ended.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], prompt_of: Sequence[int]) -> None:
        self._arrived: queue.SimpleQueue[Indexed] = queue.SimpleQueue()
        self._requests = CallRequests(engine, requests, prompt_of, self._arrived.put)
        try:
            self._requests.submit()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Indexed]:
        return self

    def __next__(self) -> Indexed:
        if self._requests.is_over:
            raise StopIteration
        try:
            index, event = self._arrived.get()
            self._requests.note(index, event)
            if isinstance(event, Finished):
                self._requests.submit()
        except BaseException:  # KeyboardInterrupt as well
            self.close()
            raise
        return index, event

    def close(self) -> None:
        self._requests.close()

    def __del__(self) -> None:
        if hasattr(self, "_requests"):
            self.close()


class AsyncInbox:
    """Queue from the engine's thread into an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[Indexed] = deque()
        self._has_some = asyncio.Event()

    def put(self, item: Indexed) -> None:
        self._arrived.append(item)
        try:
            self._loop.call_soon_threadsafe(self._has_some.set)
        except RuntimeError:  # the loop is closed, with every task that could take the event
            self._arrived.clear()

    async def get(self) -> Indexed:
        while not self._arrived:
            self._has_some.clear()
            await self._has_some.wait()
        return self._arrived.popleft()


async def events_of(
    engine: Engine, requests: Sequence[Request], prompt_of: Sequence[int]
) -> AsyncGenerator[Indexed, None]:
    """Yields the events of a call, for a task.

    Cancelling the task or closing the iterator aborts the requests that have not ended. Requests are submitted on
    another thread, because a sampler with penalties reads the whole prompt.
    """
    inbox = AsyncInbox()
    call = CallRequests(engine, requests, prompt_of, inbox.put)
    try:
        await asyncio.to_thread(call.submit)
        while not call.is_over:
            index, event = await inbox.get()
            call.note(index, event)
            if isinstance(event, Finished) and call.may_submit:
                await asyncio.to_thread(call.submit)
            yield index, event
    finally:
        call.close()
