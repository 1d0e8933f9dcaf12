"""Deltas: the parts of an answer as they stream, in the order in which the model writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call whose tool is known. Calls are numbered from 0; one ends before the next one starts."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of a call's arguments. All of a call's texts together are JSON, unless the model wrote none."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call.

    `arguments` is None for a call that is incomplete or whose arguments are no JSON object: a whole answer shows
    `raw` as text in its place. A stream has already shown the text of the arguments as it came.
    """

    index: int
    arguments: Mapping[str, Any] | None
    raw: str  # the model's text of the call, with the markers around it


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is no content: markers, and the whitespace beside them. No client sees it."""

    text: str


Delta = TextDelta | ReasoningDelta | CallStarted | CallArguments | CallEnded | Markup


def source(delta: Delta) -> str:
    """Returns the model's text that a delta stands for. All of an answer's, joined, are the text of the answer."""
    match delta:
        case TextDelta(text) | ReasoningDelta(text) | Markup(text):
            return text
        case CallEnded(raw=raw):
            return raw
        case CallStarted() | CallArguments():
            return ""  # within the `raw` of the call's end
