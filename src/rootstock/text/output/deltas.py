"""Deltas: the parts of an answer as they stream, in the order in which the model writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
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

    `arguments` is None if the call is incomplete or its arguments are no JSON object. A whole answer then shows `raw`
    as text in its place. A stream has already shown the text of the arguments as it came.
    """

    index: int
    arguments: Mapping[str, Any] | None
    raw: str  # the model's text of the call, with the markers around it


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is no content: markers, and the whitespace beside them. No client sees it."""

    text: str


Delta = ContentDelta | ReasoningDelta | CallStarted | CallArguments | CallEnded | Markup


def source(delta: Delta) -> str:
    """Returns the model's text that a delta stands for. All of an answer's, joined, are the text of the answer."""
    match delta:
        case ContentDelta(text) | ReasoningDelta(text) | Markup(text):
            return text
        case CallEnded(raw=raw):
            return raw
        case CallStarted() | CallArguments():
            return ""  # within the `raw` of the call's end


class DeltaParser(Protocol):
    """Interface of a parser of one answer. Its deltas do not depend on how the text is split into pieces."""

    def push(self, text: str) -> list[Delta]:
        """Returns the deltas that are certain after `text`."""
        ...

    def finish(self) -> list[Delta]:
        """Returns the last deltas, now that no text follows."""
        ...


class TextOnly:
    """A parser of answers without reasoning and calls."""

    def push(self, text: str) -> list[Delta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


@dataclass(frozen=True, slots=True)
class WholeCall:
    id: str
    name: str
    arguments: Mapping[str, Any]
    text: str  # of the arguments


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A whole answer. Calls that are incomplete or malformed are part of its text."""

    text: str
    reasoning: str
    calls: tuple[WholeCall, ...]


def answer_of(deltas: Iterable[Delta]) -> WholeAnswer:
    """Puts the deltas of a whole answer together."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[WholeCall] = []
    started: dict[int, tuple[CallStarted, list[str]]] = {}
    for delta in deltas:
        match delta:
            case ContentDelta(part):
                texts.append(part)
            case ReasoningDelta(part):
                reasoning.append(part)
            case CallStarted(index):
                started[index] = delta, []
            case CallArguments(index, part):
                started[index][1].append(part)
            case CallEnded(index, arguments, raw):
                start, parts = started.pop(index)
                if arguments is None:
                    texts.append(raw)
                else:
                    calls.append(WholeCall(start.id, start.name, arguments, "".join(parts)))
            case Markup():
                pass
    return WholeAnswer("".join(texts), "".join(reasoning), tuple(calls))
