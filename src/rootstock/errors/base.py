"""The roots of the errors, and the form in which their messages show wrong values."""

from __future__ import annotations

import reprlib
from enum import Enum
from pathlib import PurePath
from typing import Any, ClassVar

_MOST_SHOWN_CHARS = 160
_MOST_QUOTED_CHARS = 1000


class _Quotes(reprlib.Repr):
    """Text of values, shortened, in which an enum's member is its value, and a path its text."""

    def __init__(self, most_chars: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = most_chars

    def repr_instance(self, x: Any, level: int) -> str:
        plain = x.value if isinstance(x, Enum) else str(x) if isinstance(x, PurePath) else None
        return super().repr_instance(x, level) if plain is None else self.repr1(plain, level)


_SHORT, _WHOLE = _Quotes(80), _Quotes(_MOST_QUOTED_CHARS)


def shown(value: object) -> str:
    """Returns a wrong value in quotes, shortened: it may be a megabyte."""
    return _cut(_SHORT.repr(value), _MOST_SHOWN_CHARS)


def quoted(value: object) -> str:
    """Returns a name or a path in quotes, whole unless it is absurdly long."""
    return _cut(_WHOLE.repr(value), _MOST_QUOTED_CHARS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


class RootstockError(Exception):
    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(RootstockError):
    code = "invalid_request"
    http_status = 400
