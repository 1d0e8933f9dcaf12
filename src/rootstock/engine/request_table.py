"""The live requests: accepted and not ended. Bounds their number and gives each exactly one terminal event."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from rootstock.engine.request import Failed, Request, RequestId, Terminal
from rootstock.engine.sequence import Sequence
from rootstock.errors import EngineStopped, ImagesFull, InvalidParameter, QueueFull, RootstockError

log = logging.getLogger(__name__)

MOST_IMAGE_BYTES = 1 << 30  # of the image files of live requests


class RequestTable:
    """Table of the live requests. Any thread adds and looks up requests; the engine's thread ends them."""

    def __init__(
        self,
        max_batch: int,
        max_queue: int,
        on_end: Collection[Callable[[Sequence, Terminal], None]] = (),
    ) -> None:
        """`on_end` are called before a terminal event, on the engine's thread."""
        self._on_end = on_end
        self._after_events: tuple[Callable[[], None], ...] = ()
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._live: dict[RequestId, Sequence] = {}
        self._lock = threading.Lock()  # of _live, _arrivals, _image_bytes, closed and _after_events
        self._arrivals = 0
        self._image_bytes = 0  # of the files that live requests hold
        self.closed = False  # True after `close`: no request is accepted any more
        self.has_news = False  # events have been emitted since `notify`

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: RequestId) -> bool:
        with self._lock:  # a request that is found here was announced before
            return request in self._live

    @property
    def live(self) -> list[Sequence]:
        """The sequences that were accepted and have not ended, in order of arrival."""
        with self._lock:
            return list(self._live.values())

    def get(self, request: RequestId) -> Sequence | None:
        return self._live.get(request)

    def holds(self, sequence: Sequence) -> bool:
        """Returns whether a sequence was accepted and has not ended."""
        return self._live.get(sequence.request.id) is sequence

    def check(self, request: Request) -> None:
        """Raises EngineStopped, QueueFull, ImagesFull or InvalidParameter for a request that is not accepted now."""
        if self.closed:
            raise EngineStopped()
        if len(self._live) >= self._max_batch + self._max_queue:
            raise QueueFull(self._max_batch, self._max_queue)
        if request.images and self._image_bytes + _image_bytes(request) > MOST_IMAGE_BYTES:
            raise ImagesFull(MOST_IMAGE_BYTES)
        if request.id in self._live:
            raise InvalidParameter("request_id", request.id, "different from that of every open request")

    def add(self, sequence: Sequence, announce: Callable[[], None]) -> None:
        """Accepts a sequence, or raises as `check` does.

        Calls `announce` under the lock: commands about the request that other threads queue come after it.
        """
        with self._lock:
            self.check(sequence.request)
            sequence.arrival = self._arrivals
            self._arrivals += 1
            self._live[sequence.request.id] = sequence
            if sequence.request.images:
                self._image_bytes += _image_bytes(sequence.request)
            announce()

    def end(self, sequence: Sequence, event: Terminal) -> None:
        """Removes a sequence and emits its terminal event."""
        self.has_news = True
        with self._lock:
            if self._live.pop(sequence.request.id, None) is not None and sequence.request.images:
                self._image_bytes -= _image_bytes(sequence.request)
        for note in self._on_end:
            note(sequence, event)
        sequence.end(event)

    def fail(self, sequence: Sequence, error: RootstockError) -> None:
        self.end(sequence, Failed(sequence.request.id, error))

    def fail_all(self, error: RootstockError) -> None:
        self.has_news = True
        with self._lock:
            left, self._live, self._image_bytes = list(self._live.values()), {}, 0
        for sequence in left:
            sequence.end(Failed(sequence.request.id, error))

    def call_after_events(self, function: Callable[[], None]) -> None:
        """Registers a function that the engine's thread calls after each group of events, at least once a step.

        A sink that collects events uses it to pass them on all at once.
        """
        with self._lock:
            self._after_events += (function,)

    def no_call_after_events(self, function: Callable[[], None]) -> None:
        with self._lock:
            self._after_events = tuple(other for other in self._after_events if other != function)

    def notify(self) -> None:
        """Calls the registered functions."""
        self.has_news = False
        for function in self._after_events:
            try:
                function()
            except Exception:
                log.exception("a function to be called after events raised")

    def close(self) -> None:
        """Accepts no more requests."""
        with self._lock:
            self.closed = True


def _image_bytes(request: Request) -> int:
    return sum(len(image.data) for image in request.images)
