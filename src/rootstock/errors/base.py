"""The roots of the errors, and the form in which their messages show wrong values."""

from __future__ import annotations

import reprlib
from typing import ClassVar

SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80
_MOST_SHOWN_CHARS = 160


def shown(value: object) -> str:
    """Returns the repr of a wrong value, shortened: it may be a megabyte."""
    text = SHORT.repr(value)
    return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[:_MOST_SHOWN_CHARS]}..."


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
