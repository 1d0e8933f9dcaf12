"""The parser of one answer: text that streams, split into reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from rootstock.text.conversation.types import Tool
from rootstock.text.output.answer import MAX_HELD_CHARS, AnswerInProgress, Prose, copy_rest
from rootstock.text.output.calls import (
    CallInProgress,
    RandomText,
    Tools,
    call_ids,
    random_text,
    read_header_call,
    read_json_call,
    to_next_opening,
)
from rootstock.text.output.deltas import Delta
from rootstock.text.output.formats import (
    BareKeyCalls,
    CallFormat,
    Harmony,
    HeaderCalls,
    JsonCalls,
    Marked,
    OutputFormat,
    PythonicCalls,
    ReasoningMarks,
    TaggedCalls,
)
from rootstock.text.output.harmony import HarmonyReader
from rootstock.text.output.literals import read_bare_key_call, read_pythonic_call
from rootstock.text.output.scanner import EndOfText, Reading, Scanner, StopStrings
from rootstock.text.output.tagged import TaggedReader


class OutputParser:
    """Parser of one answer. It raises no error for any text.

    The deltas do not depend on how the text is cut into pieces, but for text that is cut into several deltas of a
    kind. All of the text is in them (`deltas.source`). A push takes time in proportion to its text.
    """

    def __init__(
        self,
        format: OutputFormat,
        tools: Sequence[Tool] = (),
        prompt: str = "",
        random_text: RandomText = random_text,
    ) -> None:
        """`prompt` is the rendered prompt, whose end may open the reasoning. Without tools, no calls are parsed."""
        self._scanner = Scanner()
        self._answer = AnswerInProgress(self._scanner, Tools(tools), call_ids(format.ids, random_text))
        match format.shape:
            case Harmony():
                self._reading = HarmonyReader(self._answer, prompt).read()
            case Marked() as shape:
                reader = _MarkedReader(shape, self._answer)
                self._reading = reader.read(in_reasoning=format.begins_in_reasoning(prompt))

    def push(self, text: str) -> list[Delta]:
        """Returns the deltas that became certain with more text."""
        self._scanner.push(text)
        self._read_on()
        return self._answer.taken()

    def finish(self) -> list[Delta]:
        """Returns the last deltas, now that no text follows."""
        self._scanner.end()
        self._read_on()
        return self._answer.taken()

    def _read_on(self) -> None:
        next(self._reading, None)


class _CallReader:
    """Readings of the calls of one format, behind the markers that open them."""

    def __init__(self, calls: CallFormat, answer: AnswerInProgress) -> None:
        self._calls = calls
        self._answer = answer
        self._scanner = answer.scanner
        opening, closing = calls.opening, calls.closing
        section = ("", "")
        if isinstance(calls, HeaderCalls | TaggedCalls):
            section = calls.section
        self.section_opening = section[0] or opening
        self.openings = tuple(dict.fromkeys(each for each in (section[0], opening) if each))
        self._closings = tuple(each for each in (closing, section[1]) if each)
        self._marks = (*self.openings, *self._closings)
        self._rest_stops = StopStrings(self._marks)
        self._tagged = TaggedReader(calls, self._marks) if isinstance(calls, TaggedCalls) else None
        # Models write calls in JSON within the markers of other formats, too.
        self._json = (
            calls if isinstance(calls, JsonCalls) else JsonCalls(self.section_opening, section[1] or closing)
        )

    def read(self, opening: str, prose: Prose, *, known_only: bool) -> Reading[None]:
        """Reads the calls of a section that begins with `opening`, "" for a call without one."""
        is_json = isinstance(self._calls, JsonCalls)
        is_first = True

        def read(call: CallInProgress) -> Reading[bool]:
            nonlocal is_json, is_first
            if is_first and opening:
                self._scanner.take(len(opening))
                yield from self._scanner.skip_space()
                is_json = is_json or (yield from self._goes_on_with_json())
            is_open = is_first and opening == self._calls.opening
            is_first = False
            if not (is_open or is_json or isinstance(self._calls, PythonicCalls)):
                yield from self._scanner.expect(self._calls.opening)
            return (yield from self._read(call, is_json=is_json, known_only=known_only))

        self._scanner.keep(MAX_HELD_CHARS)
        while (yield from self._answer.call(read, self._rest, prose)):
            prose = self._answer.text
            self._scanner.keep(MAX_HELD_CHARS)

    def _goes_on_with_json(self) -> Reading[bool]:
        first = yield from self._scanner.peek()
        if isinstance(self._calls, PythonicCalls) and first == "[":
            return (yield from self._scanner.peek(2)) == "[{"
        return first in ("{", "[")

    def _read(self, call: CallInProgress, *, is_json: bool, known_only: bool) -> Reading[bool]:
        if is_json:
            return read_json_call(self._json, self._scanner, call, self._marks, known_only=known_only)
        match self._calls:
            case JsonCalls():
                raise AssertionError("JSON was read")
            case HeaderCalls() as calls:
                return read_header_call(calls, self._scanner, call, self._marks, known_only=known_only)
            case TaggedCalls():
                assert self._tagged is not None
                return self._tagged.read(self._scanner, call, known_only=known_only)
            case PythonicCalls() as calls:
                return read_pythonic_call(calls, self._scanner, call, known_only=known_only)
            case BareKeyCalls() as calls:
                return read_bare_key_call(calls, self._scanner, call, known_only=known_only)

    def _rest(self, call: CallInProgress) -> Reading[bool]:
        stop = yield from copy_rest(self._scanner, call, self._rest_stops, self.openings)
        if stop == self._calls.closing and self.section_opening != self._calls.opening:
            return (yield from to_next_opening(self._calls.opening, self._closings[-1], self._scanner))
        return False


class _MarkedReader:
    """Reading of an answer that is text with marks around reasoning and calls."""

    def __init__(self, shape: Marked, answer: AnswerInProgress) -> None:
        self._reasoning: ReasoningMarks | None = shape.reasoning
        self._frame = shape.frame
        self._answer = answer
        self._scanner = answer.scanner
        self._calls = _CallReader(shape.calls, answer) if shape.calls is not None and answer.tools else None
        self._bare = ""  # the character with which a call without an opening begins
        openings: tuple[str, ...] = ()
        if self._calls is not None:
            openings = self._calls.openings
            if not openings:
                self._bare = "[" if isinstance(shape.calls, PythonicCalls) else "{"
        marks = () if shape.reasoning is None else (shape.reasoning.opening, shape.reasoning.closing)
        self._text_stops = StopStrings([*openings, *marks, *self._frame, self._bare])
        self._reasoning_stops = StopStrings([*openings, *marks])

    def read(self, *, in_reasoning: bool) -> Reading[None]:
        try:
            if in_reasoning:
                yield from self._read_reasoning()
            while True:
                yield from self._read_text()
        except EndOfText:
            self._answer.reasoning.finish()
            self._answer.text.finish()

    def _read_text(self) -> Reading[None]:
        text = self._answer.text
        stop = yield from self._scanner.before(self._text_stops, text.write)
        marks = self._reasoning
        if marks is not None and stop == marks.opening and text.is_blank:
            self._answer.mark(stop, text)
            yield from self._read_reasoning()
        elif stop in self._frame or (marks is not None and stop == marks.closing and text.is_blank):
            self._answer.mark(stop, text)
        elif stop == self._bare and self._answer.may_call and text.is_at_line_start:
            yield from self._read_calls("", text, known_only=True)
        elif self._calls is not None and stop in self._calls.openings and self._answer.may_call:
            yield from self._read_calls(stop, text, known_only=stop != self._calls.section_opening)
        else:
            text.write(self._scanner.take(len(stop)))

    def _read_calls(self, opening: str, prose: Prose, *, known_only: bool) -> Reading[None]:
        assert self._calls is not None
        yield from self._calls.read(opening, prose, known_only=known_only)

    def _read_reasoning(self) -> Reading[None]:
        """Reads reasoning up to its end, or up to a call of a known tool: some models do not close it before one."""
        prose, marks = self._answer.reasoning, self._reasoning
        assert marks is not None
        prose.end()
        calls_before = self._answer.calls
        while self._answer.calls == calls_before:
            stop = yield from self._scanner.before(self._reasoning_stops, prose.write)
            if stop == marks.closing:
                self._answer.mark(stop, prose)
                self._answer.text.end()
                return
            if stop == marks.opening and prose.is_blank:
                self._answer.mark(stop, prose)
            elif self._calls is not None and stop in self._calls.openings and self._answer.may_call:
                yield from self._read_calls(stop, prose, known_only=True)
            else:
                prose.write(self._scanner.take(len(stop)))


def parsed(
    format: OutputFormat,
    text: str,
    tools: Sequence[Tool] = (),
    prompt: str = "",
    random_text: RandomText = random_text,
) -> list[Delta]:
    """Returns the deltas of a whole answer."""
    parser = OutputParser(format, tools, prompt, random_text)
    return [*parser.push(text), *parser.finish()]
