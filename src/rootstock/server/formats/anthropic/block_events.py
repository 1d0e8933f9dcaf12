"""Content blocks of an answer: the deltas of the model's text as blocks that open, grow and close one after another.

Text that is only whitespace makes no block: Anthropic's API refuses such a block when a client sends it back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from rootstock.server.formats.anthropic.json_prefix import JsonPrefix
from rootstock.server.formats.anthropic.signatures import holding, signature_of
from rootstock.server.formats.anthropic.tool_use_ids import tool_use_id
from rootstock.server.wire.api_call import Json
from rootstock.text.output.deltas import (
    CallArguments,
    CallEnded,
    CallStarted,
    ContentDelta,
    Delta,
    ReasoningDelta,
)


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """The form in which an answer shows its blocks."""

    shows_thinking: bool = True  # False: the signature of a thinking block holds its text
    parallel: bool = True  # False: only the first call is shown

    def shown(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yields the deltas, except deltas of calls that are not shown."""
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
    """The blocks of a streamed answer.

    The arguments of a call are sent as the model writes them, up to the place where they cannot become JSON. Such a
    call stays a block, and its whole text follows as text.
    """

    def __init__(self, style: AnswerStyle) -> None:
        self.has_calls = False  # complete ones
        self._style = style
        self._count = 0
        self._open: type[ContentDelta | ReasoningDelta | CallStarted] | None = None
        self._spaces = ""  # that wait for the text after them
        self._thinking: list[str] = []  # of the open block
        self._arguments = JsonPrefix()  # of the open call
        self._has_arguments = False

    def add(self, deltas: Iterable[Delta]) -> Iterator[BlockEvent]:
        """Yields the events of deltas. Take all of them before the next deltas."""
        for delta in self._style.shown(deltas):
            match delta:
                case ContentDelta(text):
                    yield from self._text(text)
                case ReasoningDelta(text):
                    yield from self._reason(text)
                case CallStarted(_, id, name):
                    call = {"type": "tool_use", "id": tool_use_id(id), "name": name, "input": {}}
                    yield from self._start(CallStarted, call | {"caller": {"type": "direct"}})
                    self._arguments, self._has_arguments = JsonPrefix(), False
                case CallArguments(_, text):
                    if sound := self._arguments.accepted(text):
                        self._has_arguments = True
                        yield self._grown("input_json_delta", "partial_json", sound)
                case CallEnded(_, arguments, raw):
                    self.has_calls |= arguments is not None
                    if not self._has_arguments:
                        yield self._grown("input_json_delta", "partial_json", "{}")
                    yield from self.close()
                    if self._arguments.is_broken:
                        yield from self._text(raw)

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
        if self._open is not ContentDelta:
            text = self._spaces + text
            if not text or text.isspace():
                self._spaces = text
                return
            yield from self._start(ContentDelta, {"type": "text", "text": ""})
        yield self._grown("text_delta", "text", text)

    def _reason(self, text: str) -> Iterator[BlockEvent]:
        if self._open is not ReasoningDelta:
            yield from self._start(ReasoningDelta, {"type": "thinking", "thinking": "", "signature": ""})
        self._thinking.append(text)
        if self._style.shows_thinking:
            yield self._grown("thinking_delta", "thinking", text)

    def _start(
        self, kind: type[ContentDelta | ReasoningDelta | CallStarted], block: Json
    ) -> Iterator[BlockEvent]:
        yield from self.close()
        self._open = kind
        self._count += 1
        yield BlockStarted(self._count - 1, block)

    def _grown(self, kind: str, field: str, text: str) -> BlockGrew:
        return BlockGrew(self._count - 1, kind, field, text)


@dataclass(frozen=True, slots=True)
class WholeBlocks:
    """The content of a whole answer: the blocks of its stream. A malformed call is text in its place."""

    content: list[Json]
    has_calls: bool

    @staticmethod
    def of(deltas: Iterable[Delta], style: AnswerStyle) -> WholeBlocks:
        shown = list(style.shown(deltas))
        inputs = {
            delta.index: delta.arguments
            for delta in shown
            if isinstance(delta, CallEnded) and delta.arguments is not None
        }
        streamed = StreamedBlocks(style)
        content: list[Json] = []
        texts: list[list[str]] = []
        for event in [*streamed.add(_sound(shown, inputs)), *streamed.close()]:
            match event:
                case BlockStarted(_, block):
                    content.append(dict(block))
                    texts.append([])
                case BlockGrew(index, "signature_delta", field, text):
                    content[index][field] = text
                case BlockGrew(index, _, _, text):
                    texts[index].append(text)
                case BlockStopped():
                    pass
        of_calls = iter(inputs.values())
        for block, parts in zip(content, texts, strict=True):
            if block["type"] == "tool_use":
                block["input"] = next(of_calls)
            else:
                block[block["type"]] = "".join(parts)
        return WholeBlocks(content, streamed.has_calls)


def _sound(deltas: Iterable[Delta], inputs: Collection[int]) -> Iterator[Delta]:
    """Yields the deltas of an answer with malformed calls, those without `inputs`, as text."""
    for delta in deltas:
        if not isinstance(delta, CallStarted | CallArguments | CallEnded) or delta.index in inputs:
            yield delta
        elif isinstance(delta, CallEnded):
            yield ContentDelta(delta.raw)
