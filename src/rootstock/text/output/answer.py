"""The deltas of an answer as they arise: its prose and its calls."""

from __future__ import annotations

from collections.abc import Callable

from rootstock.text.output.calls import MAX_CALLS, CallInProgress, NewId, Tools
from rootstock.text.output.deltas import (
    CallArguments,
    CallStarted,
    ContentDelta,
    Delta,
    Markup,
    ReasoningDelta,
)
from rootstock.text.output.scanner import EndOfText, Malformed, Reading, Scanner, StopStrings

MAX_HELD_CHARS = 65_536  # of a call whose name is not known yet: a longer one is text

_MAX_SPACES = 1_024  # that wait for the text after them


class Prose:
    """Text or reasoning. The whitespace beside markers and calls is markup, not prose."""

    def __init__(
        self, kind: type[ContentDelta] | type[ReasoningDelta], give: Callable[[Delta], None]
    ) -> None:
        self._kind = kind
        self._give = give
        self._spaces = ""  # that wait for the text after them
        self._trims = False  # whitespace that comes first
        self.is_blank = True  # nothing but whitespace was written since the start or the last marker
        self.is_at_line_start = True

    def write(self, text: str) -> None:
        self._note_line(text)
        if self.is_blank and self._trims:
            bare = text.lstrip()
            self._markup(text[: len(text) - len(bare)])
            text = bare
        end = len(text.rstrip())
        if end:
            self.is_blank = False
            self._prose(self._spaces + text[:end])
            self._spaces = ""
        self._spaces += text[end:]
        if len(self._spaces) > _MAX_SPACES:
            self._prose(self._spaces[:-_MAX_SPACES])
            self._spaces = self._spaces[-_MAX_SPACES:]

    def _note_line(self, text: str) -> None:
        _, newline, line = text.rpartition("\n")
        if newline:
            self.is_at_line_start = not line.strip()
        elif line.strip():
            self.is_at_line_start = False

    def end(self) -> None:
        """Ends the prose before a marker or a call. More may follow after it."""
        self._markup(self._spaces)
        self._spaces = ""
        self._trims = self.is_blank = self.is_at_line_start = True

    def finish(self) -> None:
        """Ends the prose at the end of the answer, where whitespace is part of it."""
        if self.is_blank and self._trims:
            self._markup(self._spaces)
        else:
            self._prose(self._spaces)
        self._spaces = ""

    def _prose(self, text: str) -> None:
        if text:
            self._give(self._kind(text))

    def _markup(self, text: str) -> None:
        if text:
            self._give(Markup(text))


class AnswerInProgress:
    """The deltas of one answer that were not taken yet."""

    def __init__(self, scanner: Scanner, tools: Tools, new_id: NewId) -> None:
        self.scanner = scanner
        self.tools = tools
        self.text = Prose(ContentDelta, self._give)
        self.reasoning = Prose(ReasoningDelta, self._give)
        self._new_id = new_id
        self.calls = 0  # that have ended
        self._deltas: list[Delta] = []

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.calls < MAX_CALLS

    def taken(self) -> list[Delta]:
        """Returns the deltas since the last time."""
        taken = self._deltas
        self._deltas = []
        return taken

    def mark(self, marker: str, prose: Prose) -> None:
        """Consumes a marker that stands after `prose`."""
        prose.end()
        self.markup(self.scanner.take(len(marker)))

    def markup(self, text: str) -> None:
        self._give(Markup(text))

    def _give(self, delta: Delta) -> None:
        match delta, self._deltas[-1:]:
            case ContentDelta(text), [ContentDelta(before)]:
                self._deltas[-1] = ContentDelta(before + text)
            case ReasoningDelta(text), [ReasoningDelta(before)]:
                self._deltas[-1] = ReasoningDelta(before + text)
            case CallArguments(index, text), [CallArguments(_, before)]:
                self._deltas[-1] = CallArguments(index, before + text)
            case Markup(text), [Markup(before)]:
                self._deltas[-1] = Markup(before + text)
            case _:
                self._deltas.append(delta)

    def call(
        self,
        read: Callable[[CallInProgress], Reading[bool]],
        rest: Callable[[CallInProgress], Reading[bool]],
        prose: Prose,
    ) -> Reading[bool]:
        """Reads one call, whose text the scanner keeps. Returns whether another one of its section follows.

        `rest` reads the text of a malformed call from where it is malformed. A text that does not become a call is
        prose.
        """

        def give(delta: Delta) -> None:
            if isinstance(delta, CallStarted):
                prose.end()
            self._give(delta)

        call = CallInProgress(self.calls, self.tools, self._new_id, give)
        more = False
        try:
            try:
                more = yield from read(call)
            except EndOfText:
                raise
            except Malformed:
                if call.name is not None and not call.is_complete:
                    more = yield from rest(call)
        except EndOfText:
            pass
        raw = self.scanner.kept()
        if call.name is None:
            prose.write(raw)
            return False
        self.calls += 1
        call.end(raw)
        self.text.end()
        return more and self.may_call


def copy_rest(
    scanner: Scanner, call: CallInProgress, closings: StopStrings, openings: tuple[str, ...]
) -> Reading[str]:
    """Gives the rest of a malformed call as its arguments, up to a closing, which is consumed, or to an opening."""
    stop = yield from scanner.before(closings, call.write)
    if stop not in openings:
        scanner.take(len(stop))
    return stop
