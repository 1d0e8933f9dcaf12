"""Ollama's wire format of answers: a whole body, or lines of JSON, the last of which tells the end and the times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rootstock.engine.request import Event, Finished, Logprobs, PromptScored, TokenEvent, Usage
from rootstock.errors import RootstockError
from rootstock.server.formats.ollama.errors import ollama_error_body
from rootstock.server.wire.api_call import ChoiceHistory, Json
from rootstock.server.wire.hints.sent import NO_HINTS, SentHints
from rootstock.server.wire.json_pieces import LazyList, dumps, items_text
from rootstock.server.wire.logprobs import logprob_body, slices
from rootstock.text.output.deltas import (
    CallEnded,
    CallStarted,
    ContentDelta,
    Delta,
    DeltaParser,
    ReasoningDelta,
    answer_of,
)
from rootstock.text.output.reasoning_tokens import parsed_answer
from rootstock.text.tokenizer import ModelTokenizer

NDJSON = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """The times of a request, of the monotonic clock in nanoseconds."""

    began_ns: int
    prepared_ns: int  # when its model was loaded, and its turn had come

    def told(self, end: Finished) -> Json:
        """Returns the counts and durations of an answer."""
        usage = end.usage
        return {
            "total_duration": time.monotonic_ns() - self.began_ns,
            "load_duration": self.prepared_ns - self.began_ns,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_cached_count": usage.cached_tokens,  # an addition to Ollama's fields
            "prompt_eval_duration": _nanoseconds(usage.ttft_s - usage.queued_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(usage.total_s - usage.ttft_s),
        }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class OllamaFormat:
    """The format of one answer to /api/chat or /api/generate."""

    model: str
    is_chat: bool
    new_parser: Callable[[], DeltaParser]
    tokenizer: ModelTokenizer
    times: AnswerTimes
    hints: SentHints

    def stream(self) -> LineWriter:
        return LineWriter(self)

    def whole(self, histories: Sequence[ChoiceHistory], usage: Usage) -> Json:
        [history] = histories
        assert history.end is not None
        answer = answer_of(parsed_answer(self.new_parser(), history.texts()))
        calls = [call_body(index, one.id, one.name, one.arguments) for index, one in enumerate(answer.calls)]
        body = self.body(answer.text, answer.reasoning, calls) | self.ending(history.end)
        scored = history.logprobs
        return (
            body
            if scored is None
            else body | {"logprobs": LazyList(map(self._logprobs_text, slices(scored)))}
        )

    def _logprobs_text(self, scored: Logprobs) -> str:
        return items_text([logprob_body(one, self.tokenizer) for one in scored])

    def body(self, content: str, thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        """Returns an answer, or a part of one, without its end."""
        said: Json = {"content" if self.is_chat else "response": content}
        if thinking:
            said["thinking"] = thinking
        if calls:
            said["tool_calls"] = list(calls)
        shown = {"message": {"role": "assistant", **said}} if self.is_chat else said
        return {"model": self.model, "created_at": now(), **shown, "done": False}

    def ending(self, end: Finished) -> Json:
        """Returns the fields of the end of an answer."""
        told = {"done": True, "done_reason": end.reason, **self.times.told(end)}
        return told if self.hints is NO_HINTS else told | self.hints.told([end])


def call_body(index: int, id: str, name: str, arguments: Any) -> Json:
    return {"id": id, "function": {"index": index, "name": name, "arguments": arguments}}


class LineWriter:
    """Writer of a stream: each part of the answer is a line. A call is sent when its arguments are complete."""

    def __init__(self, format: OllamaFormat) -> None:
        self._format = format
        self._parser = format.new_parser()
        self._started: dict[int, CallStarted] = {}

    def begin(self) -> str:
        return ""

    def keep_alive(self) -> str:
        return _line(self._format.body(""))

    def events(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[str]:
        match event:
            case TokenEvent(text=text, logprob=None):
                yield from map(_line, self._parts(self._parser.push(text)))
            case TokenEvent(text=text, logprob=scored):
                assert scored is not None
                first, *others = [*self._parts(self._parser.push(text))] or [self._format.body("")]
                yield _line(first | {"logprobs": [logprob_body(scored, self._format.tokenizer)]})
                yield from map(_line, others)
            case Finished(text=text):
                yield from map(_line, self._parts([*self._parser.push(text), *self._parser.finish()]))
            case PromptScored():
                pass

    def tokens(self, events: Sequence[tuple[int, Event]]) -> str | None:
        taken = [event for _, event in events if isinstance(event, TokenEvent)]
        if len(taken) < len(events):
            return None
        return "".join(line for event in taken for line in self.events(0, event))

    def end(self, ends: Sequence[Finished], usage: Usage) -> str:
        [end] = ends
        return _line(self._format.body("") | self._format.ending(end))

    def error(self, error: RootstockError) -> str:
        return _line(ollama_error_body(error))

    def _parts(self, deltas: Iterable[Delta]) -> Iterator[Json]:
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    yield self._format.body(text)
                case ReasoningDelta(text):
                    yield self._format.body("", text)
                case CallStarted(index):
                    self._started[index] = delta
                case CallEnded(_, None, raw):
                    yield self._format.body(raw)
                case CallEnded(index, arguments):
                    start = self._started[index]
                    yield self._format.body("", calls=[call_body(index, start.id, start.name, arguments)])


def _line(body: Json) -> str:
    return f"{dumps(body)}\n"
