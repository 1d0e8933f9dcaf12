"""OpenAI's wire format of responses: a whole body, or the events of a stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from rootstock.engine.request import Event as EngineEvent
from rootstock.engine.request import Finished, PromptScored, TokenEvent, TokenLogprob, Usage
from rootstock.errors import RootstockError
from rootstock.server.formats.responses.compaction import CompactedOutput
from rootstock.server.formats.responses.items import kept_output
from rootstock.server.formats.responses.output import Event, Output, OutputSettings, WholeCalls
from rootstock.server.wire.api_call import ChoiceHistory, Diagnose, Json
from rootstock.server.wire.cache_diagnostics import openai_fields
from rootstock.server.wire.hints.sent import NO_HINTS, SentHints
from rootstock.server.wire.json_pieces import dumps
from rootstock.server.wire.logprobs import logprob_body
from rootstock.text.output.deltas import DeltaParser
from rootstock.text.output.reasoning_tokens import reasoning_tokens
from rootstock.text.tokenizer import ModelTokenizer

# OpenAI's codes of failed responses. Agents repeat a request after the first two.
_FAILED, _LIMITED, _REFUSED = "server_error", "rate_limit_exceeded", "invalid_prompt"

# The specification of Open Responses demands it. OpenAI's API does not send it, and its clients accept it.
DONE = "data: [DONE]\n\n"

# Takes the JSON of a response without its output, and the JSON of its output.
Keep = Callable[[str, str], None]


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseBody(BaseModel):
    """A response that has ended, for the OpenAPI document."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["completed", "incomplete"]
    incomplete_details: Json | None
    error: None
    instructions: str | None
    metadata: dict[str, str]
    output: list[Json]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    top_p: float
    tool_choice: str | Json
    tools: list[Json]
    usage: ResponseUsage
    prompt_cache_diagnostics: Json | None = None


class CompactionBody(BaseModel):
    """A compacted conversation, for the OpenAPI document."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Json]
    usage: ResponseUsage


class CountedInput(BaseModel):
    """The size of a prompt, for the OpenAPI document."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(BaseModel):
    """A page of a request's items, for the OpenAPI document."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """The answer to a DELETE, for the OpenAPI document."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


@dataclass(frozen=True, slots=True)
class Answering:
    """The parts of a request that its answer needs."""

    fields: Json  # of the response's object: those that do not change
    fields_text: str  # as JSON, encoded once: tools and instructions are long
    settings: OutputSettings
    new_parser: Callable[[], DeltaParser]
    tokenizer: ModelTokenizer
    stored_tokens: int  # of the prompt, that later requests may find
    keep: Keep | None = None  # stores the response; None: not asked for
    diagnose: Diagnose | None = None
    hints: SentHints = NO_HINTS
    compacts: bool = False  # the answer is the summary of a conversation

    def new_output(self, parser: DeltaParser) -> Output | CompactedOutput:
        return CompactedOutput(self.settings, parser) if self.compacts else Output(self.settings, parser)

    def text(self, changing: Json) -> str:
        """Returns the response's object without its output, as JSON."""
        return f"{self.fields_text[:-1]},{dumps(changing)[1:]}"

    def ended(self, end: Finished, usage: Usage, parser: DeltaParser) -> Json:
        """Returns the changing fields of a response that has ended."""
        cut = end.reason == "length" and not self.compacts  # a summary is used as far as it was written
        return _changing(
            "incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=usage_body(usage, self.stored_tokens, reasoning_tokens(parser)),
            **({} if self.diagnose is None else openai_fields(self.diagnose, [end])),
            **({} if self.hints is NO_HINTS else self.hints.told([end])),
        )

    def logprob(self, one: TokenLogprob) -> Json:
        return logprob_body(one, self.tokenizer)

    def whole(self, histories: Sequence[ChoiceHistory], usage: Usage) -> tuple[list[Json], Json]:
        """Returns the items of a whole answer, and the changing fields of its response."""
        [history] = histories
        assert history.end is not None
        parser = self.new_parser()
        output = self.new_output(WholeCalls(parser))
        *texts, held_back = history.texts()
        scored = map(self.logprob, history.logprobs or ())
        for text, logprob in itertools.zip_longest(texts, scored):
            output.push(text, logprob)
        output.finish(held_back, complete=history.end.reason == "stop")
        return output.items, self.ended(history.end, usage, parser)


class ResponseFormat:
    """The wire format of a response."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def stream(self) -> EventWriter:
        return EventWriter(self._answering)

    def whole(self, histories: Sequence[ChoiceHistory], usage: Usage) -> Json:
        answering = self._answering
        items, changing = answering.whole(histories, usage)
        if answering.keep is not None:
            answering.keep(answering.text(changing), dumps(kept_output(items)))
        return answering.fields | changing | {"output": items}


class CompactionFormat:
    """The wire format of a compacted conversation, which is always whole."""

    def __init__(self, answering: Answering, kept: Sequence[Json]) -> None:
        self._answering = answering
        self._kept = kept  # items of the conversation that stay

    def stream(self) -> EventWriter:
        return EventWriter(self._answering)

    def whole(self, histories: Sequence[ChoiceHistory], usage: Usage) -> Json:
        items, changing = self._answering.whole(histories, usage)
        fields = self._answering.fields
        return {
            "id": fields["id"],
            "object": "response.compaction",
            "created_at": fields["created_at"],
            "output": [*self._kept, *items],
            "usage": changing["usage"],
        }


class EventWriter:
    """Writer of the events of one response, which are numbered."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._parser = answering.new_parser()
        self._output = answering.new_output(self._parser)
        self._number = 0

    def begin(self) -> str:
        return self._lifecycle("response.created") + self.keep_alive()

    def keep_alive(self) -> str:
        # An event, not a comment: clients' parsers drop comments, and a timer for silence does not see them.
        return self._lifecycle("response.in_progress")

    def _lifecycle(self, kind: str) -> str:
        return self._framed_response(kind, self._answering.text(_changing("in_progress")), "[]")

    def events(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[str]:
        match event:
            case TokenEvent(text=text, logprob=logprob):
                scored = None if logprob is None else self._answering.logprob(logprob)
                yield from self._texts(self._output.push(text, scored))
            case Finished(text=text, reason=reason):
                yield from self._texts(self._output.finish(text, complete=reason == "stop"))
            case PromptScored():
                pass

    def tokens(self, events: Sequence[tuple[int, EngineEvent]]) -> str | None:
        texts: list[str] = []
        if not all(isinstance(event, TokenEvent) for _, event in events):
            return None
        for index, event in events:
            assert isinstance(event, TokenEvent)
            texts += self.events(index, event)
        return "".join(texts)

    def end(self, ends: Sequence[Finished], usage: Usage) -> str:
        [end] = ends
        changing = self._answering.ended(end, usage, self._parser)
        head, output = self._answering.text(changing), dumps(self._output.items)
        if self._answering.keep is not None:
            kept = kept_output(self._output.items)
            self._answering.keep(head, output if kept is self._output.items else dumps(kept))
        return self._framed_response(f"response.{changing['status']}", head, output) + DONE

    def error(self, error: RootstockError) -> str:
        """Returns the last event of a stream that fails. The output so far is part of it."""
        code = _FAILED if error.http_status >= 500 else _REFUSED
        if error.http_status == 429:
            code = _LIMITED
        told = {"code": code, "message": error.message, "param": error.param, "type": error.code}
        head = self._answering.text(_changing("failed", error=told))
        return self._framed_response("response.failed", head, dumps(self._output.so_far())) + DONE

    def _texts(self, events: Sequence[Event]) -> Iterator[str]:
        return (self._event(kind, fields) for kind, fields in events)

    def _event(self, kind: str, fields: Json) -> str:
        return self._framed(kind, dumps(fields)[1:])

    def _framed_response(self, kind: str, head: str, output: str) -> str:
        return self._framed(kind, f'"response":{head[:-1]},"output":{output}}}}}')

    def _framed(self, kind: str, rest: str) -> str:
        """Returns an event. `rest` is the JSON of its other fields with the closing brace."""
        number, self._number = self._number, self._number + 1
        return f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number},{rest}\n\n'


def _changing(status: str, **changes: object) -> Json:
    """Returns the fields of a response's object that change until its end."""
    fields = ("completed_at", "error", "incomplete_details", "usage")
    return {"status": status, **dict.fromkeys(fields), **changes}


def usage_body(usage: Usage, stored_tokens: int, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": max(0, stored_tokens - usage.cached_tokens),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
