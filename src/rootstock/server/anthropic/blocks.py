"""Content blocks of an answer: the deltas of the model's text as blocks that open, grow and close one after another.

Text that is only whitespace makes no block: Anthropic's API refuses such a block when a client sends it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rootstock.engine.output.deltas import (
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    ReasoningDelta,
    TextDelta,
)
from rootstock.server.anthropic.signatures import holding, signature_of
from rootstock.server.anthropic.tool_use_ids import tool_use_id
from rootstock.server.wire import Json


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """The form in which an answer shows its blocks."""

    shows_thinking: bool = True  # False: the signature of a thinking block holds its text
    parallel: bool = True  # False: only the first call is shown

    def shown(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yields the deltas without those of calls that are not shown."""
        for delta in deltas:
            if (
                self.parallel
                or not isinstance(delta, CallStarted | CallArguments | CallEnded)
                or not delta.index
            ):
                yield delta

    def signature(self, thinking: str) -> str:
        return signature_of(thinking) if self.shows_thinking else holding(thinking)


@dataclass(frozen=True, slots=True)
class BlockStarted:
    index: int
    block: Json


@dataclass(frozen=True, slots=True)
class BlockGrew:
    index: int
    kind: str  # of the delta
    field: str  # of the delta
    text: str


@dataclass(frozen=True, slots=True)
class BlockStopped:
    index: int


BlockEvent = BlockStarted | BlockGrew | BlockStopped


class StreamedBlocks:
    """The blocks of a streamed answer. A malformed call stays a block: its text has been sent as it came."""

    def __init__(self, style: AnswerStyle) -> None:
        self.has_calls = False  # complete ones
        self._style = style
        self._count = 0
        self._open: type[TextDelta | ReasoningDelta | CallStarted] | None = None
        self._spaces = ""  # that wait for the text after them
        self._thinking: list[str] = []  # of the open block
        self._has_arguments = False

    def add(self, deltas: Iterable[Delta]) -> Iterator[BlockEvent]:
        """Yields the events of deltas. Take all of them before the next deltas."""
        for delta in self._style.shown(deltas):
            match delta:
                case TextDelta(text):
                    yield from self._text(text)
                case ReasoningDelta(text):
                    yield from self._reason(text)
                case CallStarted(_, id, name):
                    yield from self._start(
                        CallStarted, {"type": "tool_use", "id": tool_use_id(id), "name": name, "input": {}}
                    )
                    self._has_arguments = False
                case CallArguments(_, text):
                    self._has_arguments |= bool(text)
                    yield self._grown("input_json_delta", "partial_json", text)
                case CallEnded(_, arguments):
                    self.has_calls |= arguments is not None
                    if not self._has_arguments:
                        yield self._grown("input_json_delta", "partial_json", "{}")
                    yield from self.close()

    def close(self) -> Iterator[BlockEvent]:
        """Closes the open block, if there is one."""
        self._spaces = ""
        if self._open is ReasoningDelta:
            yield self._grown("signature_delta", "signature", self._style.signature("".join(self._thinking)))
            self._thinking = []
        if self._open is not None:
            yield BlockStopped(self._count - 1)
        self._open = None

    def _text(self, text: str) -> Iterator[BlockEvent]:
        if self._open is not TextDelta:
            text = self._spaces + text
            if not text or text.isspace():
                self._spaces = text
                return
            yield from self._start(TextDelta, {"type": "text", "text": "", "citations": None})
        yield self._grown("text_delta", "text", text)

    def _reason(self, text: str) -> Iterator[BlockEvent]:
        if self._open is not ReasoningDelta:
            yield from self._start(ReasoningDelta, {"type": "thinking", "thinking": "", "signature": ""})
        self._thinking.append(text)
        if self._style.shows_thinking:
            yield self._grown("thinking_delta", "thinking", text)

    def _start(
        self, kind: type[TextDelta | ReasoningDelta | CallStarted], block: Json
    ) -> Iterator[BlockEvent]:
        yield from self.close()
        self._open = kind
        self._count += 1
        yield BlockStarted(self._count - 1, block)

    def _grown(self, kind: str, field: str, text: str) -> BlockGrew:
        return BlockGrew(self._count - 1, kind, field, text)


@dataclass(frozen=True, slots=True)
class WholeBlocks:
    """The content of a whole answer. A malformed call is text in its place."""

    content: list[Json]
    has_calls: bool

    @staticmethod
    def of(deltas: Iterable[Delta], style: AnswerStyle) -> WholeBlocks:
        content: list[Json] = []
        texts: list[str] = []  # of the run of text or of reasoning that is not in `content` yet
        kind: type[Delta] = TextDelta
        names: dict[int, CallStarted] = {}

        def end_run() -> None:
            text = "".join(texts)
            texts.clear()
            if kind is TextDelta and text and not text.isspace():
                content.append({"type": "text", "text": text, "citations": None})
            elif kind is ReasoningDelta and text:
                shown = text if style.shows_thinking else ""
                content.append({"type": "thinking", "thinking": shown, "signature": style.signature(text)})

        for delta in style.shown(deltas):
            match delta:
                case CallStarted(index):
                    names[index] = delta
                case CallEnded(index, arguments) if arguments is not None:
                    end_run()
                    call = names[index]
                    id = tool_use_id(call.id)
                    content.append({"type": "tool_use", "id": id, "name": call.name, "input": arguments})
                case TextDelta(text) | ReasoningDelta(text) | CallEnded(raw=text):
                    run = ReasoningDelta if isinstance(delta, ReasoningDelta) else TextDelta
                    if run is not kind:
                        end_run()
                        kind = run
                    texts.append(text)
                case _:
                    pass
        end_run()
        return WholeBlocks(content, any(block["type"] == "tool_use" for block in content))
