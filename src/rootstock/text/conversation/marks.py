"""Marks of clients at the end of a prefix that later requests will share, and the times that they ask for.

Anthropic's field is `cache_control`, which other servers take in OpenAI's chats, too. OpenAI's own is
`prompt_cache_breakpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rootstock.errors import InvalidParameter
from rootstock.text.conversation.types import Message, MessagePart, PrefixMark, Text, ToolResult

CACHE_CONTROL = "cache_control"
BREAKPOINT = "prompt_cache_breakpoint"

_ANTHROPIC_TTLS = {"5m": 300.0, "1h": 3600.0}
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,6})([smhd])")


def cache_control_of(block: Mapping[str, Any], path: str) -> PrefixMark | None:
    """Returns the mark of a block, a message or a tool. Fields of it that are unknown are ignored.

    Raises InvalidParameter.
    """
    value, path = block.get(CACHE_CONTROL), f"{path}.{CACHE_CONTROL}" if path else CACHE_CONTROL
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidParameter(path, value, "an object with the type 'ephemeral'")
    if value.get("type") != "ephemeral":
        raise InvalidParameter(f"{path}.type", value.get("type"), "'ephemeral'")
    asked = value.get("ttl")
    ttl_s = _ANTHROPIC_TTLS.get("5m" if asked is None else asked) if isinstance(asked, str | None) else None
    if ttl_s is None:
        raise InvalidParameter(f"{path}.ttl", asked, "'5m' or '1h'")
    return PrefixMark(path, ttl_s)


def breakpoint_of(part: Mapping[str, Any], path: str) -> PrefixMark | None:
    """Returns the mark of a part in OpenAI's formats. Raises InvalidParameter."""
    value, path = part.get(BREAKPOINT), f"{path}.{BREAKPOINT}"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidParameter(path, value, "an object with the mode 'explicit'")
    if value.get("mode") != "explicit":
        raise InvalidParameter(f"{path}.mode", value.get("mode"), "'explicit'")
    asked = value.get("ttl")
    return PrefixMark(path, None if asked is None else duration_s(asked, f"{path}.ttl"))


def duration_s(value: Any, path: str) -> float:
    """Returns the seconds of a duration such as '30m' or '12h'. Raises InvalidParameter."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise InvalidParameter(path, value, "a duration such as '30m' or '12h'")
    return float(int(found[1]) * _UNITS_S[found[2]])


def marks_in(parts: Sequence[MessagePart]) -> list[PrefixMark]:
    """Returns the marks of a message's parts, those within results of tools included."""
    inner = [part.parts if isinstance(part, ToolResult) else (part,) for part in parts]
    return [
        part.mark for group in inner for part in group if isinstance(part, Text) and part.mark is not None
    ]


def count_marks(messages: Sequence[Message]) -> int:
    return sum(len(marks_in(message.parts)) for message in messages)
