"""Bodies of requests in JSON: their shape is bounded before they are parsed.

`json.loads` holds the interpreter's lock: for 60 ms where 16 MiB are one text, for seconds where they are five
million empty lists, which also take a gigabyte. NumPy counts separators in slices and lets others run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect

from rootstock.engine.limits import MAX_BODY_DEPTH, MAX_BODY_OBJECTS, MAX_BODY_VALUES
from rootstock.errors import InvalidJson, JsonTooComplex
from rootstock.server.errors import ClientGone
from rootstock.units import MIB

_ON_A_THREAD_FROM_BYTES = 262_144
_SLICE_BYTES = MIB

Bits = NDArray[np.bool_]


class BoundedJsonRoute(APIRoute):
    """A route whose JSON body is checked before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:
                raise ClientGone from None
            if len(body) < _ON_A_THREAD_FROM_BYTES:
                check_shape(body)
            else:
                await run_sync(check_shape, body)
            return await handle(request)

        return checked


def check_shape(body: bytes) -> None:
    """Raises JsonTooComplex if `body`, taken as JSON, is nested too deeply or has too many values.

    Raises InvalidJson for UTF-16 and UTF-32, which `json.loads` would take.
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
        if objects > MAX_BODY_OBJECTS:
            raise JsonTooComplex(f"more than {MAX_BODY_OBJECTS:,} lists, objects and fields of objects")


def _outside_strings(chars: NDArray[np.uint8], in_string: bool, escaped: bool) -> tuple[Bits, bool, bool]:
    """Tells which characters lie outside of strings, and the state behind the last one.

    `in_string` and `escaped` are the state before the first one; `escaped` means that it follows a backslash that
    counts.
    """
    quotes = chars == ord('"')
    backslashes = np.flatnonzero(chars == ord("\\"))
    ends_escaped = False
    if len(backslashes) or escaped:
        # Of a run of backslashes every second one is itself escaped: a run of odd length escapes what follows it.
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
