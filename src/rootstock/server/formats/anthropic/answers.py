"""Anthropic's wire format of answers: a message as a whole body, or as the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from rootstock.cache.retention.hint_types import HintOutcome
from rootstock.engine.diagnosis import Diagnosis
from rootstock.engine.request import Event, Finished, PromptScored, TokenEvent, Usage
from rootstock.errors import RootstockError
from rootstock.server.formats.anthropic.block_events import (
    AnswerStyle,
    BlockEvent,
    BlockGrew,
    BlockStarted,
    BlockStopped,
    StreamedBlocks,
    WholeBlocks,
)
from rootstock.server.formats.anthropic.errors import error_body
from rootstock.server.wire.api_call import ChoiceHistory, Diagnose, Json
from rootstock.server.wire.hints.sent import NO_HINTS, SentHints
from rootstock.server.wire.json_pieces import dumps, quoted
from rootstock.text.output.deltas import DeltaParser
from rootstock.text.output.reasoning_tokens import parsed_answer, reasoning_tokens


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(BaseModel):
    """A whole answer, for the OpenAPI document."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: Literal[
        "end_turn", "tool_use", "stop_sequence", "max_tokens", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: Json | None = None


class CountedTokens(BaseModel):
    """The size of a prompt, for the OpenAPI document."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """The tokens of a prompt, of which Anthropic's usage tells three disjoint parts.

    Tokens are *read* if the cache had them, and *created* if this request computed and stored them. The rest is
    computed by every request: the last token, whose logits are the answer's first, or all without prefix caching.
    Marks (`cache_control`) do not change them, because every prompt is cached. They tell how long created tokens are
    kept.
    """

    tokens: int
    stored_tokens: int  # that later requests may read
    hints: SentHints = NO_HINTS

    def created_body(self, created: int, cached_tokens: int, outcomes: Sequence[HintOutcome]) -> Json:
        """Tells how long created tokens are kept.

        Tokens up to a mark of an hour that the cache has accepted are kept for it. No time is promised for other
        tokens, and they are reported under the shortest time.
        """
        hour = max(0, min(self.hints.kept_an_hour(outcomes), self.stored_tokens) - cached_tokens)
        return {"ephemeral_5m_input_tokens": created - hour, "ephemeral_1h_input_tokens": hour}

    def body(self, cached_tokens: int, output_tokens: int) -> Json:
        created = max(0, self.stored_tokens - cached_tokens)
        return {
            "input_tokens": self.tokens - cached_tokens - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": output_tokens,
        }


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The format of one answer."""

    id: str
    model: str
    new_parser: Callable[[], DeltaParser]
    prompt: PromptUsage
    context_limit: int
    style: AnswerStyle
    applied_edits: Sequence[Mapping[str, Any]] | None  # None: the request asks for no edits
    diagnose: Diagnose | None  # None: the request does not ask why its prompt was not found

    def stream(self) -> MessageWriter:
        return MessageWriter(self)

    def whole(self, histories: Sequence[ChoiceHistory], usage: Usage) -> Json:
        [history] = histories
        assert history.end is not None
        parser = self.new_parser()
        blocks = WholeBlocks.of(parsed_answer(parser, history.texts()), self.style)
        message = self.message(blocks.content, usage.cached_tokens, usage.completion_tokens, history.end)
        message["usage"] |= thinking_tokens(parser)
        if self.prompt.hints is not NO_HINTS:
            message |= self.prompt.hints.told([history.end])
        return message | self.ending(history.end, blocks.has_calls, self.edits())

    def message(
        self, content: list[Json], cached_tokens: int, output_tokens: int, event: TokenEvent | Finished
    ) -> Json:
        """Returns the message, without its end. `event` is the first one with the decisions of the cache.

        Anthropic's schema has more fields that are null here, such as `container`. Its API leaves them out, and some
        clients accept no null.
        """
        usage = self.prompt.body(cached_tokens, output_tokens)
        created = usage["cache_creation_input_tokens"]
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            **self._diagnostics(event.diagnosis),
            "usage": usage
            | {
                "cache_creation": self.prompt.created_body(created, cached_tokens, event.hints),
                "service_tier": "standard",
                "inference_geo": "not_available",
            },
        }

    def _diagnostics(self, found: Diagnosis | None) -> Json:
        if self.diagnose is None:
            return {}
        return {"diagnostics": None if found is None else self.diagnose(found)}

    def edits(self) -> Json:
        if self.applied_edits is None:
            return {}
        return {"context_management": {"applied_edits": list(self.applied_edits)}}

    def ending(self, end: Finished, has_calls: bool, more: Json) -> Json:
        return {
            **more,
            "stop_reason": self._stop_reason(end, has_calls),
            "stop_sequence": _stop_sequence(end),
        }

    def _stop_reason(self, end: Finished, has_calls: bool) -> str:
        if end.reason == "length":
            is_full = end.usage.prompt_tokens + end.usage.completion_tokens >= self.context_limit
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if _stop_sequence(end) is not None:
            return "stop_sequence"
        return "tool_use" if has_calls else "end_turn"


def thinking_tokens(parser: DeltaParser) -> Json:
    return {"output_tokens_details": {"thinking_tokens": reasoning_tokens(parser)}}


def _stop_sequence(end: Finished) -> str | None:
    return end.stopped_by if isinstance(end.stopped_by, str) else None


class MessageWriter:
    """Writer of the events of one message. It begins with the first token, when the cached tokens are known."""

    def __init__(self, format: MessageFormat) -> None:
        self._format = format
        self._parser = format.new_parser()
        self._blocks = StreamedBlocks(format.style)
        self._has_begun = False

    def begin(self) -> str:
        return ""

    def keep_alive(self) -> str:
        return _event({"type": "ping"})

    def events(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[str]:
        match event:
            case TokenEvent(text=text, cached_tokens=cached_tokens):
                yield from self._beginning(cached_tokens, 1, event)
                yield from self._texts(self._blocks.add(self._parser.push(text)))
            case Finished(text=text, usage=usage):
                yield from self._beginning(usage.cached_tokens, usage.completion_tokens, event)
                deltas = [*self._parser.push(text), *self._parser.finish()]
                yield from self._texts([*self._blocks.add(deltas), *self._blocks.close()])
            case PromptScored():
                pass

    def tokens(self, events: Sequence[tuple[int, Event]]) -> str | None:
        if not self._has_begun or not all(isinstance(event, TokenEvent) for _, event in events):
            return None
        texts = (event.text for _, event in events if isinstance(event, TokenEvent))
        return "".join(
            piece for text in texts for piece in self._texts(self._blocks.add(self._parser.push(text)))
        )

    def end(self, ends: Sequence[Finished], usage: Usage) -> str:
        [end] = ends
        delta = self._format.ending(end, self._blocks.has_calls, {"stop_details": None})
        told = self._format.prompt.body(usage.cached_tokens, usage.completion_tokens)
        told |= thinking_tokens(self._parser)
        last = {"type": "message_delta", "delta": delta, "usage": told, **self._format.edits()}
        if self._format.prompt.hints is not NO_HINTS:
            last |= self._format.prompt.hints.told(ends)
        return _event(last) + _event({"type": "message_stop"})

    def error(self, error: RootstockError) -> str:
        return _event(error_body(error))

    def _beginning(
        self, cached_tokens: int, output_tokens: int, event: TokenEvent | Finished
    ) -> Iterator[str]:
        if not self._has_begun:
            self._has_begun = True
            message = self._format.message([], cached_tokens, output_tokens, event)
            yield _event({"type": "message_start", "message": message})

    @staticmethod
    def _texts(events: Iterable[BlockEvent]) -> Iterator[str]:
        for event in events:
            match event:
                case BlockStarted(index, block):
                    yield _event({"type": "content_block_start", "index": index, "content_block": block})
                case BlockGrew(index, kind, field, text):
                    # Most events are of this kind: only their text is encoded.
                    yield (
                        f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{index},'
                        f'"delta":{{"type":"{kind}","{field}":{quoted(text)}}}}}\n\n'
                    )
                case BlockStopped(index):
                    yield _event({"type": "content_block_stop", "index": index})


def _event(body: Json) -> str:
    return f"event: {body['type']}\ndata: {dumps(body)}\n\n"
