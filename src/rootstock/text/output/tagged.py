"""Reading of calls whose name and arguments stand in tags."""

from __future__ import annotations

from rootstock.text.output.calls import (
    MAX_HEADER_CHARS,
    CallInProgress,
    JsonReader,
    json_text,
    read_arguments,
    to_next_opening,
)
from rootstock.text.output.formats import TaggedCalls
from rootstock.text.output.scanner import Malformed, Reading, Scanner, StopStrings
from rootstock.text.output.values import ValueWriter, types_of


class TaggedReader:
    """Readings of one format's calls."""

    def __init__(self, calls: TaggedCalls, marks: tuple[str, ...]) -> None:
        self._calls = calls
        self._marks = marks
        self._ends_of_name = StopStrings([*calls.name_ends, calls.opening, "{"])
        self._end_of_tag = StopStrings([calls.tag_end])
        self._ends_of_key = StopStrings(calls.key_ends)
        self._end_of_value = StopStrings([calls.value_closing])

    def read(self, scanner: Scanner, call: CallInProgress, *, known_only: bool) -> Reading[bool]:
        """Reads one call, after its opening, and the text up to the next one. Returns whether there is one."""
        calls = self._calls
        yield from self._name(scanner, call, known_only=known_only)
        yield from scanner.skip_space()
        if (yield from scanner.peek()) == "{":
            yield from read_arguments(JsonReader(scanner, self._marks), scanner, call)
            yield from scanner.skip_space()
            yield from scanner.skips(calls.closing)
        else:
            yield from self._arguments(scanner, call)
            call.is_complete = True
        return (yield from to_next_opening(calls.opening, calls.section[1], scanner))

    def _name(self, scanner: Scanner, call: CallInProgress, *, known_only: bool) -> Reading[None]:
        calls = self._calls
        yield from scanner.skip_space()
        name: list[str] = []
        end = yield from scanner.before(self._ends_of_name, name.append, MAX_HEADER_CHARS)
        if end in (calls.opening, "{"):
            raise Malformed
        call.start("".join(name), known_only=known_only)
        scanner.keep_all()
        if end not in (calls.key_opening, calls.closing):
            yield from scanner.expect(end)
        if calls.tag_end:
            yield from scanner.before(self._end_of_tag, _ignore, MAX_HEADER_CHARS)
            yield from scanner.expect(calls.tag_end)

    def _arguments(self, scanner: Scanner, call: CallInProgress) -> Reading[None]:
        calls = self._calls
        before = "{"
        while not (yield from scanner.skips(calls.closing)):
            yield from scanner.expect(calls.key_opening)
            written: list[str] = []
            end = yield from scanner.before(self._ends_of_key, written.append, MAX_HEADER_CHARS)
            yield from scanner.expect(end)
            key = "".join(written).strip()
            call.write(f'{before}"{json_text(key)}": ')
            before = ", "
            if calls.value_opening:
                yield from scanner.skip_space()
                yield from scanner.expect(calls.value_opening)
            value = ValueWriter(
                calls.key_ends[end], types_of(call.parameters, key), calls.padding, call.write
            )
            yield from scanner.before(self._end_of_value, value.write)
            yield from scanner.expect(calls.value_closing)
            value.end()
            yield from scanner.skip_space()
        call.write("{}" if before == "{" else "}")


def _ignore(_: str) -> None:
    pass
