"""Request bodies: the shape of their JSON is bounded before parsing, and prompts are prepared a few at a time.

`json.loads` holds the interpreter's lock: 16 MiB take 60 ms as one string, but seconds and a gigabyte as five million
empty lists. The check counts separators with NumPy, in slices, so that other threads can run. Long bodies are parsed
one at a time, with pauses: a step needs the lock some hundred times, and would wait for a whole body each time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np
from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from rootstock.errors import InvalidJson, JsonTooComplex, QueueFull, Unsupported
from rootstock.runtime.host_memory import return_free_memory
from rootstock.server.http.errors import ClientGone
from rootstock.text.constraints.turns import let_others_work, refuse_gone
from rootstock.text.limits import MAX_BODY_DEPTH, MAX_BODY_OBJECTS, MAX_BODY_VALUES, MAX_LABEL_CHARS
from rootstock.units import MIB

T = TypeVar("T")
Bits = NDArray[np.bool_]

LONG_BODY_BYTES = 65_536  # a prompt of about 16,000 tokens: 30 ms of a core

_PAUSE = 3  # times as long as the parsing of a long body
_SLICE_BYTES = MIB
_NUMBER_DIGITS = 256  # Python reads a number in the square of its digits: 16 MiB of long ones took 0.3 s
_CORES_PER_PREPARATION = 4  # of long bodies, and of short ones
_SHORT_BODIES_AT_ONCE = 8  # most of them wait for a grammar or for their turn
_LARGE_BODIES_BYTES = MIB  # after so many bytes of bodies, unused memory is returned to the system
_RETURN_AFTER_S = 2.0  # when their requests have been read, and mostly answered


class BoundedJsonRoute(APIRoute):
    """A route whose JSON body is checked before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:
                raise ClientGone from None
            if len(body) < LONG_BODY_BYTES:
                check_shape(body)
                return await handle(request)
            parsing = ParsingQueue.of_loop()
            await parsing.wait(len(body))
            try:
                await anyio.to_thread.run_sync(check_shape, body)
            except BaseException:
                parsing.release(0.0)
                raise
            parsing.release_after_this_task()
            return await handle(_LongRequest(request, body))

        return checked


class StateRoute(BoundedJsonRoute):
    """A route that shows or changes the server's state, with a JSON body or none.

    It refuses parameters of the query that it does not declare.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = _parameters_of(self.dependant)

        async def checked(request: Request) -> Response:
            for name in request.query_params:
                if name not in known:
                    listed = ", ".join(sorted(known)) or "none"
                    raise Unsupported(name[:MAX_LABEL_CHARS], f"Parameters of this route: {listed}.")
            return await handle(request)

        return checked


def _parameters_of(dependant: Dependant) -> set[str]:
    """Returns the names of the parameters of a query that a route and its dependencies declare."""
    inner = (name for each in dependant.dependencies for name in _parameters_of(each))
    return {*(field.alias for field in dependant.query_params), *inner}


class _LongRequest(Request):
    """A request with a long body, which pydantic's parser reads in half the time."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._whole_body = body

    async def body(self) -> bytes:
        return self._whole_body

    async def json(self) -> Any:
        try:
            return from_json(self._whole_body)
        except ValueError:  # it is stricter: a lone surrogate, a byte order mark
            return json.loads(self._whole_body)


class ParsingQueue:
    """Queue of long bodies that an event loop parses and validates, one at a time and the shortest first.

    After each of them the next one waits for `_PAUSE` times as long, in which steps run.
    """

    _of_loops: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, ParsingQueue]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_taken = False
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # heap by bytes, then by arrival

    @classmethod
    def of_loop(cls) -> ParsingQueue:
        """Returns the queue of the running event loop."""
        loop = asyncio.get_running_loop()
        queue = cls._of_loops.get(loop)
        if queue is None:
            queue = cls._of_loops[loop] = cls(loop)
        return queue

    async def wait(self, count_bytes: int) -> None:
        """Waits for a body's turn, which lasts until `release`."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = self._loop.create_future()
        heapq.heappush(self._waiting, (count_bytes, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn has come in this very moment
                self.release(0.0)
            raise

    def release(self, parsing_s: float) -> None:
        """Ends a turn in which the loop was busy for so long. The next one begins after a pause."""
        self._loop.call_later(_PAUSE * parsing_s, self._begin_next)

    def release_after_this_task(self) -> None:
        """Ends the turn when the running task gives the loop back: the framework parses and validates until then."""
        began = self._loop.time()
        self._loop.call_soon(lambda: self.release(self._loop.time() - began))

    def _begin_next(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False


def check_shape(body: bytes) -> None:
    """Raises JsonTooComplex if JSON is nested too deeply or has too many values.

    Raises InvalidJson for UTF-16 and UTF-32, which `json.loads` would accept.
    """
    if not json.detect_encoding(body).startswith("utf-8"):
        raise InvalidJson("it is not in UTF-8")
    if len(body) <= 2 * MAX_BODY_DEPTH:  # a list in a list takes two characters
        return
    depth = values = objects = 0
    in_string = escaped = False
    for start in range(0, len(body), _SLICE_BYTES):
        chars = np.frombuffer(body, np.uint8, min(_SLICE_BYTES, len(body) - start), start)
        outside, in_string, escaped = _outside_strings(chars, in_string, escaped)
        opened = ((chars == ord("[")) | (chars == ord("{"))) & outside
        closed = ((chars == ord("]")) | (chars == ord("}"))) & outside
        lists = int(np.count_nonzero(opened))
        values += lists + int(np.count_nonzero((chars == ord(",")) & outside))
        objects += lists + int(np.count_nonzero((chars == ord(":")) & outside))
        steps = np.flatnonzero(opened | closed)
        depths = depth + np.cumsum(np.where(opened[steps], 1, -1))
        if len(depths):
            if depths.max() > MAX_BODY_DEPTH:
                raise JsonTooComplex(f"lists and objects nested more than {MAX_BODY_DEPTH} deep")
            depth = int(depths[-1])
        if values > MAX_BODY_VALUES:
            raise JsonTooComplex(f"more than {MAX_BODY_VALUES:,} values")
        if _has_long_number(chars, outside):
            raise JsonTooComplex(f"a number of more than {_NUMBER_DIGITS} digits")
        if objects > MAX_BODY_OBJECTS:
            raise JsonTooComplex(f"more than {MAX_BODY_OBJECTS:,} lists, objects and fields of objects")


def _has_long_number(chars: NDArray[np.uint8], outside: Bits) -> bool:
    """Returns whether there is a number of twice as many digits as allowed. Some shorter ones are found, too.

    Such a number fills one of the rows into which the characters are divided.
    """
    rows = len(chars) // _NUMBER_DIGITS
    digits = chars[: rows * _NUMBER_DIGITS] - np.uint8(ord("0")) < 10
    full = digits.reshape(rows, _NUMBER_DIGITS).all(axis=1)
    return bool((full & outside[: rows * _NUMBER_DIGITS : _NUMBER_DIGITS]).any())


def _outside_strings(chars: NDArray[np.uint8], in_string: bool, escaped: bool) -> tuple[Bits, bool, bool]:
    """Returns the characters outside of strings, and the state after the last character.

    `in_string` and `escaped` are the state before the first character. It is escaped if an unescaped backslash
    precedes it.
    """
    quotes = chars == ord('"')
    backslashes = np.flatnonzero(chars == ord("\\"))
    ends_escaped = False
    if len(backslashes) or escaped:
        # In a run of backslashes every second one is escaped: a run of odd length escapes the next character.
        begins = np.ones(len(backslashes), dtype=np.bool_)
        begins[1:] = np.diff(backslashes) > 1
        run = np.cumsum(begins) - 1
        first = backslashes[begins]
        length = np.bincount(run, minlength=len(first))
        odd = length % 2 == 1
        if escaped:
            if len(first) and first[0] == 0:
                odd[0] = not odd[0]
            else:
                quotes[0] = False
        behind = (first + length)[odd]
        ends_escaped = bool(len(behind)) and int(behind[-1]) == len(chars)
        quotes[behind[behind < len(chars)]] = False
    inside = (np.cumsum(quotes) + in_string) % 2 == 1  # true from an opening quote up to its closing one
    return ~inside, bool(inside[-1]), ends_escaped


@dataclass(slots=True)
class _Preparation:
    """The bytes of a request from which its prompt is made: its body, and the stored bytes that it refers to."""

    count_bytes: int

    @property
    def is_long(self) -> bool:
        return self.count_bytes >= LONG_BODY_BYTES


class _IsLong(Exception):
    """The preparation of a short body turns out to be a long one, before it has begun."""


_at_once = max(1, (os.cpu_count() or 1) // _CORES_PER_PREPARATION)
# Places for the work of short bodies, of all models. Each thread that works holds the interpreter up for a switch
# interval whenever a step needs it, some hundred times. Long bodies are as few by their queue.
_short_work = threading.Semaphore(_at_once)

_preparation: ContextVar[tuple[_Preparation, bool] | None] = ContextVar("preparation", default=None)


def count_more_bytes(count: int) -> None:
    """Counts bytes that a preparation is about to read beside the body of its request.

    A short body can refer to a long history. Its preparation ends here, and begins again when it is its turn among
    the long ones: call this before work that cannot be repeated.
    """
    current = _preparation.get()
    if current is not None:
        preparation, among_long = current
        preparation.count_bytes += count
        if preparation.is_long and not among_long:
            raise _IsLong


@contextmanager
def _without_place() -> Iterator[None]:
    """Gives up the thread's place for the work of short bodies, and takes one again at the end."""
    _short_work.release()
    try:
        yield
    finally:
        _short_work.acquire()


class PreparationQueue:
    """Queue that bounds how many requests are rendered and tokenized at once. Used on event loops' threads.

    Tokenizing keeps a core busy: many long prompts at once would take the cores from the forward pass. Long prompts
    therefore wait for each other, in the order of their arrival, and short prompts overtake them.
    """

    def __init__(self, max_batch: int, max_queue: int) -> None:
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._long = anyio.CapacityLimiter(_at_once)
        self._short = anyio.CapacityLimiter(_SHORT_BODIES_AT_ONCE)
        self._waiting = {self._long: 0, self._short: 0}
        self._prepared_bytes = 0  # since memory was returned
        self._returns = False

    async def run(self, request: Request, prepare: Callable[[], T]) -> T:
        """Calls `prepare` on another thread when it is this request's turn, and returns its result.

        Raises QueueFull, ClientGone if the client leaves while the request waits, and the errors of `prepare`.
        """
        preparation = _Preparation(len(await request.body()))
        try:
            return await self._run(request, prepare, preparation)
        except _IsLong:
            return await self._run(request, prepare, preparation)

    async def _run(self, request: Request, prepare: Callable[[], T], preparation: _Preparation) -> T:
        limiter = self._long if preparation.is_long else self._short
        if self._waiting[limiter] >= self._max_batch + self._max_queue:
            raise QueueFull(self._max_batch, self._max_queue)
        self._waiting[limiter] += 1
        try:
            async with limiter:
                if await request.is_disconnected():
                    raise ClientGone
                refuse_gone.set(lambda: anyio.from_thread.run(_refuse_gone, request))
                token = _preparation.set((preparation, limiter is self._long))
                try:
                    if limiter is self._short:
                        return await anyio.to_thread.run_sync(_in_turn, prepare)
                    return await anyio.to_thread.run_sync(prepare)
                finally:
                    _preparation.reset(token)
                    self._return_later(preparation.count_bytes)
        finally:
            self._waiting[limiter] -= 1

    def _return_later(self, prepared_bytes: int) -> None:
        """Returns unused memory to the system some seconds after large bodies, or many small ones."""
        self._prepared_bytes += prepared_bytes
        if self._prepared_bytes >= _LARGE_BODIES_BYTES and not self._returns:
            self._returns = True
            asyncio.get_running_loop().call_later(_RETURN_AFTER_S, self._return)

    def _return(self) -> None:
        self._prepared_bytes, self._returns = 0, False
        asyncio.get_running_loop().run_in_executor(None, return_free_memory)


def _in_turn(prepare: Callable[[], T]) -> T:
    """Calls `prepare` when there is a place for the work of a short body."""
    let_others_work.set(_without_place)
    with _short_work:
        return prepare()


async def _refuse_gone(request: Request) -> None:
    if await request.is_disconnected():
        raise ClientGone
