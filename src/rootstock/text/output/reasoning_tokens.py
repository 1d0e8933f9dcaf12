"""Count of the tokens of an answer whose text is reasoning."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from rootstock.text.output.deltas import Delta, DeltaParser, Markup, ReasoningDelta, source


class CountingParser:
    """A parser that counts tokens of reasoning, and leaves out markup, which no client sees.

    Each push has the text that one token made certain, and the last push before `finish` the text that was held back
    until the end.

    A token counts if a character of its text is part of a ReasoningDelta. Marks and the white space beside them are
    markup, and do not count. A token whose text is held back, such as the first bytes of a character, has the first
    character that follows.
    """

    def __init__(self, parser: DeltaParser) -> None:
        self._parser = parser
        self._ends = array("q")  # the characters of all pushes so far, after each push
        self._spans = array("q")  # begin, end, begin, … of the reasoning, in characters
        self._read = 0  # characters whose deltas are known

    def push(self, text: str) -> list[Delta]:
        self._note_push(text)
        return self._noted(self._parser.push(text))

    def _note_push(self, text: str) -> None:
        self._ends.append((self._ends[-1] if self._ends else 0) + len(text))

    def push_all(self, texts: Iterable[str]) -> list[Delta]:
        """Returns the deltas of the texts of several pushes."""
        *before, last = texts
        for text in before:
            self._note_push(text)
        return self._noted(self._parser.push("".join(before))) + self.push(last)

    def finish(self) -> list[Delta]:
        return self._noted(self._parser.finish())

    def _noted(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            begin = self._read
            self._read += len(source(delta))
            if isinstance(delta, ReasoningDelta) and self._read > begin:
                if self._spans and self._spans[-1] == begin:
                    self._spans[-1] = self._read
                else:
                    self._spans.extend((begin, self._read))
        return [delta for delta in deltas if not isinstance(delta, Markup)]

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of reasoning. Known after `finish`."""
        count = at = begin = waiting = 0
        spans = self._spans
        *ends, total = self._ends or (0,)

        def is_reasoning(begin: int, end: int) -> bool:
            """Tells whether a character from `begin` to `end` is reasoning. Both only grow."""
            nonlocal at
            while at < len(spans) and spans[at + 1] <= begin:
                at += 2
            return at < len(spans) and spans[at] < end

        for end in ends:
            if end == begin:
                waiting += 1
                continue
            if waiting:
                count += waiting * is_reasoning(begin, begin + 1)
                begin += end > begin + 1  # the rest of the text is the token's own
                waiting = 0
            count += is_reasoning(begin, end)
            begin = end
        return count + waiting * (total > begin and is_reasoning(begin, begin + 1))


def parsed_answer(parser: DeltaParser, texts: Iterable[str]) -> list[Delta]:
    """Parses a whole answer: the texts of its tokens, and the text that was held back until the end."""
    if isinstance(parser, CountingParser):
        return [*parser.push_all(texts), *parser.finish()]
    return [*parser.push("".join(texts)), *parser.finish()]


def reasoning_tokens(parser: DeltaParser) -> int:
    """Returns the number of tokens of reasoning in an answer that has ended."""
    return parser.reasoning_tokens if isinstance(parser, CountingParser) else 0
