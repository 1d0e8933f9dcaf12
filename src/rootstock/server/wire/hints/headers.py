"""Hints in the head of a request: headers of Dynamo, and the headers in which coding agents name their session.

A header names a session only. It gives no access, and one tenant's name of a session never meets another's.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers

from rootstock.cache.retention.hint_types import HintOutcome, Verdict

MAX_SESSION_CHARS = 256

# In the order in which they count. An agent within an agent is a session of its own.
_SESSION_HEADERS = (
    "X-Dynamo-Session-ID",
    "X-Claude-Code-Agent-ID",
    "X-Claude-Code-Session-ID",
    "Thread-ID",  # Codex
    "Session-ID",  # Codex, in older versions
    "Session_ID",
    "X-Session-ID",  # opencode
)
PRIORITY = "X-Dynamo-Request-Priority"
STRICT_PRIORITY = "X-Dynamo-Request-Strict-Priority"
FINAL = "X-Dynamo-Session-Final"
PARENT = "X-Dynamo-Parent-Session-ID"
# Names as in an ASGI scope. A request without any of these headers has no hints to read.
HINT_HEADERS = frozenset(
    name.lower().encode() for name in (*_SESSION_HEADERS, PRIORITY, STRICT_PRIORITY, FINAL, PARENT)
)


@dataclass(frozen=True, slots=True)
class HeaderHints:
    """The hints in the head of a request."""

    session: str | None = None
    session_field: str = ""
    ends_session: bool = False
    priority: int | None = None
    strict_priority: int | None = None
    decided: tuple[HintOutcome, ...] = ()
    parent: str | None = None


NO_HEAD = HeaderHints()


def header_hints(headers: Headers) -> HeaderHints:
    """Reads the hints of a request's head."""
    decided = list[HintOutcome]()
    session, session_field = None, ""
    for name in _SESSION_HEADERS:
        session = _name_in(headers, name, decided)
        if session is not None:
            session_field = name
            break
    parent = _name_in(headers, PARENT, decided)
    numbers: dict[str, int | None] = {}
    for name in (PRIORITY, STRICT_PRIORITY):
        sent = headers.get(name)
        numbers[name] = None if sent is None else _number(sent)
        if sent is not None and numbers[name] is None:
            decided.append(HintOutcome(name, Verdict.REFUSED, "not a whole number"))
    ends = headers.get(FINAL, "").strip().lower() == "true"
    return HeaderHints(
        session, session_field, ends, numbers[PRIORITY], numbers[STRICT_PRIORITY], tuple(decided), parent
    )


def _name_in(headers: Headers, name: str, decided: list[HintOutcome]) -> str | None:
    """Returns the name of a session in a header; None: there is none, or it is too long."""
    value = headers.get(name, "").strip()
    if len(value) > MAX_SESSION_CHARS:
        decided.append(HintOutcome(name, Verdict.REFUSED, f"longer than {MAX_SESSION_CHARS} characters"))
        return None
    return value or None


def _number(value: str) -> int | None:
    digits = value.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
        return None
    return int(value)
