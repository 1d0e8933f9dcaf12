"""OpenAI's choices of a chat: text, reasoning and tool calls in fields of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootstock.engine.request import Finished, Logprobs, PromptScored, TokenEvent, TokenLogprob
from rootstock.server.wire.api_call import ChoiceHistory, Json
from rootstock.server.wire.json_pieces import LazyList, items_text
from rootstock.server.wire.logprobs import logprob_body, slices
from rootstock.text.output.deltas import (
    CallArguments,
    CallEnded,
    CallStarted,
    ContentDelta,
    Delta,
    DeltaParser,
    ReasoningDelta,
    TextOnly,
    WholeAnswer,
    WholeCall,
    answer_of,
)
from rootstock.text.output.reasoning_tokens import parsed_answer, reasoning_tokens
from rootstock.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which an answer shows its calls."""

    custom: frozenset[str] = frozenset()  # names of custom tools, whose calls have one text as input
    legacy: bool = False  # one call as `function_call`, OpenAI's older name
    parallel: bool = True  # False: only the first call is shown


class ChatFormat:
    """The format of a chat's choices: text, reasoning and tool calls in fields of their own."""

    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        head: Json,
        tokenizer: ModelTokenizer,
        new_parser: Callable[[], DeltaParser] = TextOnly,
        calls: CallStyle = CallStyle(),
    ) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._new_parser = new_parser
        self._calls = calls
        self._open: dict[int, _ChatChoice] = {}
        self.reasoning_tokens = 0

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        choice = self._open.get(index)
        if choice is None:
            choice = self._open[index] = _ChatChoice(self._new_parser(), self._calls)
            yield self._choice(index, {"role": "assistant", "content": ""})
        match event:
            case TokenEvent(text=text, logprob=logprob):
                scored = None if logprob is None else self._logprobs([logprob])
                fields = list(choice.fields(choice.parser.push(text)))
                if scored is not None and not fields:
                    fields = [{"content": ""}]
                for delta in fields:
                    yield self._choice(index, delta, scored)
                    scored = None
            case Finished(text=text, stopped_by=stopped_by):
                for delta in choice.fields([*choice.parser.push(text), *choice.parser.finish()]):
                    yield self._choice(index, delta)
                self.reasoning_tokens += reasoning_tokens(choice.parser)
                yield self._choice(index, {}) | {
                    "finish_reason": self._finish_reason(event, choice.has_calls),
                    "stop_reason": stopped_by,
                }
            case PromptScored():
                pass

    def text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, {"content": text})

    def parts(self, index: int, event: TokenEvent) -> Iterator[str | Json]:
        choice = self._open[index]
        for delta in choice.parser.push(event.text):
            if isinstance(delta, ContentDelta):
                yield delta.text
            else:
                yield from (self._choice(index, fields) for fields in choice.fields([delta]))

    def whole(self, index: int, history: ChoiceHistory) -> Json:
        end, scored = history.end, history.logprobs
        assert end is not None
        content = None if scored is None else LazyList(map(self._content_text, slices(scored)))
        parser = self._new_parser()
        answer = answer_of(parsed_answer(parser, history.texts()))
        self.reasoning_tokens += reasoning_tokens(parser)
        return {
            "index": index,
            "message": self._message(answer),
            "logprobs": None if content is None else {"content": content, "refusal": None},
            "finish_reason": self._finish_reason(end, bool(answer.calls)),
            "stop_reason": end.stopped_by,
        }

    def _message(self, answer: WholeAnswer) -> Json:
        calls = answer.calls if self._calls.parallel else answer.calls[:1]
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
        if calls:
            message["content"] = answer.text or None
            if self._calls.legacy:
                message["function_call"] = {"name": calls[0].name, "arguments": calls[0].text}
            else:
                message["tool_calls"] = [self._call(call) for call in calls]
        return message

    def _call(self, call: WholeCall) -> Json:
        if call.name in self._calls.custom:
            custom = {"name": call.name, "input": _input_of(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}

    def _finish_reason(self, end: Finished, has_calls: bool) -> str:
        if end.reason != "stop" or not has_calls:
            return end.reason
        return "function_call" if self._calls.legacy else "tool_calls"

    @staticmethod
    def _choice(index: int, delta: Json, logprobs: Json | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scored: Sequence[TokenLogprob]) -> Json:
        return {"content": list(map(self._content, scored)), "refusal": None}

    def _content_text(self, scored: Logprobs) -> str:
        return items_text(list(map(self._content, scored)))

    def _content(self, one: TokenLogprob) -> Json:
        return logprob_body(one, self._tokenizer)


class _ChatChoice:
    """A streamed choice: its parser, and its deltas as fields of chunks."""

    def __init__(self, parser: DeltaParser, style: CallStyle) -> None:
        self.parser = parser
        self.has_calls = False  # complete ones that are shown
        self._style = style
        self._custom: dict[int, CallStarted] = {}  # open calls of custom tools

    def fields(self, deltas: Sequence[Delta]) -> Iterator[Json]:
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    yield {"content": text}
                case ReasoningDelta(text):
                    yield {"reasoning_content": text, "reasoning": text}
                case CallStarted(index) | CallArguments(index) if index > 0 and not self._shows_several:
                    pass
                case CallStarted():
                    yield from self._started(delta)
                case CallArguments(index, text) if index not in self._custom:
                    yield self._arguments(index, text)
                case CallEnded(index, arguments):
                    self.has_calls |= arguments is not None and (index == 0 or self._shows_several)
                    if index in self._custom:
                        self._custom.pop(index)
                        yield {"tool_calls": [{"index": index, "custom": {"input": _input_of(arguments)}}]}

    @property
    def _shows_several(self) -> bool:
        return self._style.parallel and not self._style.legacy

    def _started(self, call: CallStarted) -> Iterator[Json]:
        if self._style.legacy:
            yield {"function_call": {"name": call.name, "arguments": ""}}
        elif call.name in self._style.custom:  # its input is known when its arguments are complete
            self._custom[call.index] = call
            custom = {"name": call.name, "input": ""}
            yield {"tool_calls": [{"index": call.index, "id": call.id, "type": "custom", "custom": custom}]}
        else:
            function = {"name": call.name, "arguments": ""}
            yield {
                "tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": function}]
            }

    def _arguments(self, index: int, text: str) -> Json:
        if self._style.legacy:
            return {"function_call": {"arguments": text}}
        return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _input_of(arguments: Mapping[str, Any] | None) -> str:
    """Returns the input of a custom tool's call."""
    given = (arguments or {}).get("input", "")
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
