"""The actions of `kv_hints`: vLLM's directives and claims, and the payloads of Dynamo's policies and of SGLang."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootstock.cache.retention.hint_types import GREATEST_PRIORITY
from rootstock.errors import InvalidParameter
from rootstock.server.wire.hints.fields import KvHintAction
from rootstock.server.wire.hints.headers import MAX_SESSION_CHARS
from rootstock.text.limits import MAX_NAME_CHARS

MAX_DIRECTIVES = 128
MAX_RETAIN_S = 30 * 24 * 3600
_RANGE = ("start", "end", "covers_output")
_OF_ROUTERS = frozenset({"block_hashes", "execute_at", "include_current_request"})  # Dynamo's policies


@dataclass(frozen=True, slots=True)
class Directive:
    """A range of the prompt or a session, and how firmly it is kept."""

    path: str
    start: float = 0  # math.inf: the answer
    end: int | None = None  # None: the end of the prompt and its answer
    priority: int = 0
    ttl_s: float | None = None
    session: str | None = None  # in place of the range
    clipped: str = ""  # the part of the wish that is not followed


def directives_of(action: KvHintAction, path: str) -> Iterator[Directive]:
    """Yields the directives of a known action: those of its payload, or one for the whole prompt and its answer.

    Raises InvalidParameter.
    """
    payload, at = action.payload, f"{path}.payload"
    retains = action.action_type == "kv.retain"
    if "directives" in payload or (retains and not _OF_ROUTERS & payload.keys()):
        listed = payload.get("directives")
        if not isinstance(listed, list):
            raise InvalidParameter(f"{at}.directives", listed, "a list")
        if len(listed) > MAX_DIRECTIVES:
            raise InvalidParameter("kv_hints", len(listed), f"of at most {MAX_DIRECTIVES} directives")
        read = directive_of if retains else _range_of
        found = [read(each, f"{at}.directives[{j}]") for j, each in enumerate(listed)]
        if retains:
            refuse_rising(found, f"{at}.directives")
        yield from found
    elif action.action_type == "vllm.set_priority":
        value, ttl_s = payload.get("value"), payload.get("ttl_seconds")
        if value is not None:
            value = _whole(value, f"{at}.value", -(2**31), 2**31 - 1)
            ttl_s = _seconds(ttl_s or 0, f"{at}.ttl_seconds", least=1e-9)  # a claim ends
        yield Directive(path, priority=value or 0, ttl_s=0.0 if value is None else ttl_s)
    elif retains:
        priority = _whole(payload.get("priority", 0), f"{at}.priority", -(2**31), 2**31 - 1)
        ttl_s = _seconds(payload.get("ttl_seconds"), f"{at}.ttl_seconds", least=1e-9)
        yield Directive(path, priority=priority, ttl_s=ttl_s, clipped=_clipped(payload))
    else:
        session = payload.get("session_id")
        if session is not None and not (isinstance(session, str) and 0 < len(session) <= MAX_SESSION_CHARS):
            allowed = f"a name of at most {MAX_SESSION_CHARS} characters"
            raise InvalidParameter(f"{at}.session_id", session, allowed)
        yield Directive(path, session=session, clipped=_clipped(payload))


def _clipped(payload: Mapping[str, Any]) -> str:
    return "the prefix is that of the prompt: hashes are not looked up" if payload.get("block_hashes") else ""


def directive_of(value: Any, path: str) -> Directive:
    """Reads one of vLLM's directives. Raises InvalidParameter."""
    found = _range_of(value, path, (*_RANGE, "priority", "duration"))
    priority = _whole(value.get("priority"), f"{path}.priority", 0, GREATEST_PRIORITY)
    ttl_s = _seconds(value.get("duration"), f"{path}.duration")
    if priority == 0:
        ttl_s = 0.0  # this priority releases a prefix that was kept
    return Directive(path, found.start, found.end, priority, ttl_s)


def _range_of(value: Any, path: str, allowed: Collection[str] = _RANGE) -> Directive:
    if not isinstance(value, Mapping):
        raise InvalidParameter(path, value, "an object")
    for name in value:
        if name not in allowed:
            told = ", ".join(f"'{each}'" for each in allowed)
            raise InvalidParameter(path, str(name)[:MAX_NAME_CHARS], f"an object of {told} alone")
    covers = value.get("covers_output", False)
    if not isinstance(covers, bool):
        raise InvalidParameter(f"{path}.covers_output", covers, "true or false")
    if covers and ("start" in value or "end" in value):
        raise InvalidParameter(f"{path}.covers_output", covers, "false with 'start' or 'end'")
    if covers:
        return Directive(path, math.inf)
    start = _whole(value.get("start", 0), f"{path}.start", 0, 2**31)
    end = value.get("end")
    if end is not None:
        end = _whole(end, f"{path}.end", start + 1, 2**31)
    return Directive(path, start, end)


def _seconds(value: Any, path: str, least: float = 0.0) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and least <= value <= MAX_RETAIN_S:
        return float(value)
    more = "from 0 to" if not least else "above 0 and up to"
    raise InvalidParameter(path, value, f"seconds {more} {MAX_RETAIN_S:,}, or null")


def _whole(value: Any, path: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidParameter(path, value, f"a whole number from {least:,} to {most:,}")
    return value


def refuse_rising(directives: Sequence[Directive], path: str) -> None:
    """Refuses priorities that rise along the prompt: a prefix is of no use without the tokens before it."""
    inside = sorted(directives, key=lambda each: each.start)
    for before, after in itertools.pairwise(inside):
        if after.priority > before.priority:
            raise InvalidParameter(path, after.priority, "such that no priority rises along the prompt")
