"""Directives of vLLM's `kv.retain`: ranges of the prompt, and how firmly each is kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootstock.cache.retention.hint_types import GREATEST_PRIORITY
from rootstock.errors import InvalidParameter
from rootstock.text.limits import MAX_NAME_CHARS

MAX_DIRECTIVES = 128
MAX_RETAIN_S = 30 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Directive:
    """One of vLLM's directives: a range of the prompt, and how firmly it is kept."""

    path: str
    start: float  # math.inf: the answer
    end: int | None
    priority: int
    ttl_s: float | None


def directive_of(value: Any, path: str) -> Directive:
    if not isinstance(value, Mapping):
        raise InvalidParameter(path, value, "an object")
    for name in value:
        if name not in ("start", "end", "priority", "duration", "covers_output"):
            allowed = "'start', 'end', 'priority', 'duration' and 'covers_output'"
            raise InvalidParameter(path, str(name)[:MAX_NAME_CHARS], f"an object of {allowed} alone")
    priority = _whole(value.get("priority"), f"{path}.priority", 0, GREATEST_PRIORITY)
    duration = value.get("duration")
    ttl_s: float | None = None
    if isinstance(duration, int | float) and not isinstance(duration, bool) and 0 <= duration <= MAX_RETAIN_S:
        ttl_s = float(duration)
    elif duration is not None:
        raise InvalidParameter(f"{path}.duration", duration, f"seconds from 0 to {MAX_RETAIN_S:,}, or null")
    if priority == 0:
        ttl_s = 0.0  # this priority releases a prefix that was kept
    covers = value.get("covers_output", False)
    if not isinstance(covers, bool):
        raise InvalidParameter(f"{path}.covers_output", covers, "true or false")
    if covers and ("start" in value or "end" in value):
        raise InvalidParameter(f"{path}.covers_output", covers, "false with 'start' or 'end'")
    if covers:
        return Directive(path, math.inf, None, priority, ttl_s)
    start = _whole(value.get("start", 0), f"{path}.start", 0, 2**31)
    end = value.get("end")
    if end is not None:
        end = _whole(end, f"{path}.end", start + 1, 2**31)
    return Directive(path, start, end, priority, ttl_s)


def _whole(value: Any, path: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidParameter(path, value, f"a whole number from {least} to {most:,}")
    return value


def refuse_rising(directives: Sequence[Directive], path: str) -> None:
    """Refuses priorities that rise along the prompt: a prefix is of no use without the tokens before it."""
    inside = sorted(directives, key=lambda each: each.start)
    for before, after in itertools.pairwise(inside):
        if after.priority > before.priority:
            raise InvalidParameter(path, after.priority, "such that no priority rises along the prompt")
