"""Reading of an answer in the harmony format of gpt-oss: messages with a channel, and perhaps with a recipient.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant to=functions.NAME<|channel|>commentary
    <|constrain|>json<|message|>{"a": 1}<|call|>

The prompt ends with the beginning of the first message's header. `<|call|>` and `<|return|>` are end tokens of the
model, which usually are not part of the text.
"""

from __future__ import annotations

import re

from rootstock.text.output.answer import MAX_HELD_CHARS, AnswerInProgress, Prose, copy_rest
from rootstock.text.output.calls import MAX_HEADER_CHARS, CallInProgress, JsonReader, read_arguments
from rootstock.text.output.formats import HARMONY_MARKS
from rootstock.text.output.scanner import EndOfText, Malformed, Reading, StopStrings

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BETWEEN = StopStrings([_START, _CHANNEL, *_ENDS])
_HEADER = StopStrings([_MESSAGE, _START, *_ENDS])
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyReader:
    def __init__(self, answer: AnswerInProgress, prompt: str) -> None:
        self._answer = answer
        self._scanner = answer.scanner
        start = prompt.rfind(_START)
        self._begun = prompt[start:] if start >= 0 else ""  # a message that the prompt begins

    def read(self) -> Reading[None]:
        try:
            if _MESSAGE in self._begun:
                yield from self._body(self._begun)
            elif self._begun:
                yield from self._message(self._begun)
            while True:
                stop = yield from self._scanner.before(_BETWEEN, self._answer.text.write)
                if stop in _ENDS:
                    self._answer.mark(stop, self._answer.text)
                else:
                    yield from self._message("")
        except EndOfText:
            self._answer.reasoning.finish()
            self._answer.text.finish()

    def _message(self, begun: str) -> Reading[None]:
        """Reads a message from its header, or the part of the header after `begun`. Text that is not a message is
        returned as plain text."""
        self._scanner.keep(MAX_HELD_CHARS)
        pieces: list[str] = []
        try:
            if begun and (yield from self._scanner.peek()) not in (" ", "<"):
                raise Malformed
            yield from self._scanner.skips(_START)
            yield from self._scanner.before(_HEADER, pieces.append, MAX_HEADER_CHARS)
            header = begun + "".join(pieces)
            function = self._function(header)
            if function is None:
                yield from self._scanner.expect(_MESSAGE)
        except Malformed:
            self._answer.text.write(self._scanner.kept())
            return
        if function is None:
            self._answer.text.end()
            self._answer.markup(self._scanner.kept())
            yield from self._body(header)
        else:
            yield from self._answer.call(
                lambda call: self._call(call, function), self._rest, self._answer.text
            )

    def _function(self, header: str) -> str | None:
        recipient = _RECIPIENT.search(header)
        if recipient is None or not self._answer.may_call:
            return None
        name = recipient[1]
        if name.startswith(_FUNCTIONS):
            return name.removeprefix(_FUNCTIONS)
        return name if name in self._answer.tools else None

    def _call(self, call: CallInProgress, function: str) -> Reading[bool]:
        yield from self._scanner.expect(_MESSAGE)
        call.start(function, known_only=False)
        self._scanner.keep_all()
        yield from self._scanner.skip_space()
        if (yield from self._ends()):
            call.write("{}")  # a function without parameters
        else:
            yield from read_arguments(JsonReader(self._scanner, tuple(HARMONY_MARKS)), self._scanner, call)
            yield from self._scanner.skip_space()
            yield from self._ends()
        return False

    def _ends(self) -> Reading[bool]:
        for end in _ENDS:
            if (yield from self._scanner.skips(end)):
                return True
        return False

    def _rest(self, call: CallInProgress) -> Reading[bool]:
        yield from copy_rest(self._scanner, call, _BETWEEN, (_START, _CHANNEL))
        return False

    def _body(self, header: str) -> Reading[None]:
        prose = self._prose(header)
        prose.end()
        stop = yield from self._scanner.before(_BETWEEN, prose.write)
        if stop in _ENDS:
            self._answer.mark(stop, prose)
        else:
            prose.end()
        self._answer.text.end()

    def _prose(self, header: str) -> Prose:
        channel = _CHANNEL_NAME.search(header)
        return self._answer.reasoning if channel and channel[1] == "analysis" else self._answer.text
