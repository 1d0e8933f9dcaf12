"""OpenAI's wire format of answers to chats and completions: as a whole body, or as chunks of a stream."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.engine.output.deltas import (
    Answer,
    Call,
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    DeltaParser,
    ReasoningDelta,
    TextDelta,
    TextOnly,
    answer_of,
)
from rootstock.engine.request import Event, Finished, Logprobs, PromptScored, TokenEvent, TokenLogprob, Usage
from rootstock.engine.tokenizer import ModelTokenizer, token_text
from rootstock.errors import RootstockError
from rootstock.server.errors import error_body
from rootstock.server.json_pieces import Kept, LazyList, dumps, items_text, json_pieces, quoted
from rootstock.server.wire import ChoiceHistory, Json

_LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in
_ENTRIES_PER_PIECE = 512  # log-probabilities: less than a millisecond of encoding


class ChoiceFormat(Protocol):
    """The format of the choices of one response. It keeps the state that later events of a choice need.

    Choices may hold LazyLists, which `json_pieces` encodes.
    """

    head: Json  # id, object, created, model

    @property
    def chunk_object(self) -> str: ...

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        """Yields the streamed choices of an event, also those of other requests with the same prompt."""
        ...

    def text_choice(self, index: int, text: str) -> Json:
        """Returns the choice of text alone that is not the first of its request."""
        ...

    def parts(self, index: int, event: TokenEvent) -> Iterable[str | Json]:
        """Yields the parts of a token without log-probability, in a choice that has begun: texts, and choices."""
        ...

    def whole(self, index: int, history: ChoiceHistory) -> Json:
        """Returns the choice of a whole answer. Called in the order of the requests."""
        ...


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
            if isinstance(delta, TextDelta):
                yield delta.text
            else:
                yield from (self._choice(index, fields) for fields in choice.fields([delta]))

    def whole(self, index: int, history: ChoiceHistory) -> Json:
        end, scored = history.end, history.logprobs
        assert end is not None
        content = None if scored is None else LazyList(map(self._content_text, _slices(scored)))
        answer = answer_of(self._new_parser(), history.text)
        return {
            "index": index,
            "message": self._message(answer),
            "logprobs": None if content is None else {"content": content, "refusal": None},
            "finish_reason": self._finish_reason(end, bool(answer.calls)),
            "stop_reason": end.stopped_by,
        }

    def _message(self, answer: Answer) -> Json:
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

    def _call(self, call: Call) -> Json:
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
        top = [self._scored(token, logprob) for token, logprob in one.top]
        return self._scored(one.token, one.logprob) | {"top_logprobs": top}

    def _scored(self, token: int, logprob: float) -> Json:
        return {
            "token": token_text(self._tokenizer, token),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


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
                case TextDelta(text):
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


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Tokens
    text: str | None  # None: the client sent tokens


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts with which the choices of an answer begin."""

    prompts: Sequence[Prompt]
    choices_per_prompt: int
    scored: bool  # with log-probabilities, which come with the first choice of each prompt


class CompletionFormat:
    def __init__(self, head: Json, tokenizer: ModelTokenizer, echo: Echo | None) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._echo = echo
        self._started: set[int] = set()
        self._held: dict[int, list[TokenEvent | Finished]] = {}  # of choices whose prompt is not scored yet
        self._scored: _ScoredPrompt | None = None  # of the choice that `whole` made last
        self._offsets: dict[int, _Offsets] = {}  # by choice
        self._texts: dict[int, str] = {}  # by token
        self._decoded: dict[int, str] = {}  # texts of prompts that were given as tokens, by prompt

    chunk_object = "text_completion"

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        echo = self._echo
        if isinstance(event, PromptScored):
            assert echo is not None
            scored = self._scored_prompt(index, echo, event.logprobs)
            for choice in range(index, index + echo.choices_per_prompt):
                self._started.add(choice)
                columns = {name: LazyList(pieces) for name, pieces in scored.columns.items()}
                yield self._choice(choice, self._prompt_text(choice, echo), columns)
                self._offsets[choice] = scored.offsets_after()
                for held in self._held.pop(choice, ()):
                    yield from self._continued(choice, held)
        elif echo is None or index in self._started:
            yield from self._continued(index, event)
        elif echo.scored:
            self._held.setdefault(index, []).append(event)
        else:
            self._started.add(index)
            yield self._choice(index, self._prompt_text(index, echo))
            yield from self._continued(index, event)

    def _continued(self, index: int, event: TokenEvent | Finished) -> Iterator[Json]:
        match event:
            case TokenEvent(text=text, logprob=logprob):
                if logprob is not None:
                    yield self._choice(index, text, self._logprobs(index, logprob))
                elif text:
                    yield self.text_choice(index, text)
            case Finished(reason=reason, text=text, stopped_by=stopped_by):
                yield self._choice(index, text) | {"finish_reason": reason, "stop_reason": stopped_by}

    def text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, text)

    def parts(self, index: int, event: TokenEvent) -> Iterable[str | Json]:
        return (event.text,)

    def whole(self, index: int, history: ChoiceHistory) -> Json:
        end, echo = history.end, self._echo
        assert end is not None
        text = history.text
        parts: list[Mapping[str, Iterable[str]]] = []
        offsets: Callable[[], _Offsets] = partial(_Offsets, self._tokenizer)
        if echo is not None:
            text = self._prompt_text(index, echo) + text
            if history.prompt_logprobs is not None:
                self._scored = self._scored_prompt(index, echo, history.prompt_logprobs)
            if self._scored is not None:
                parts.append(self._scored.columns)
                offsets = self._scored.offsets_after
        if history.logprobs is not None:
            parts.append(self._columns(history.logprobs, offsets))
        logprobs = {name: LazyList(*(part[name] for part in parts)) for name in _COLUMNS} if parts else None
        return self._choice(index, text, logprobs) | {
            "finish_reason": end.reason,
            "stop_reason": end.stopped_by,
        }

    def _prompt_text(self, index: int, echo: Echo) -> str:
        at = index // echo.choices_per_prompt
        prompt = echo.prompts[at]
        if prompt.text is not None:
            return prompt.text
        if at not in self._decoded:
            self._decoded[at] = self._tokenizer.decode(prompt.tokens.tolist())
        return self._decoded[at]

    @staticmethod
    def _choice(index: int, text: str, logprobs: Json | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, index: int, one: TokenLogprob) -> Json:
        offsets = self._offsets.setdefault(index, _Offsets(self._tokenizer))
        return {
            "tokens": [self._token_text(one.token)],
            "token_logprobs": [max(one.logprob, _LEAST_LOGPROB)],
            "top_logprobs": [self._top(one)],
            "text_offset": [offsets.next(one.token)],
        }

    def _scored_prompt(self, index: int, echo: Echo, logprobs: Logprobs) -> _ScoredPrompt:
        prompt = echo.prompts[index // echo.choices_per_prompt]
        first, offsets = int(prompt.tokens[0]), _Offsets(self._tokenizer)
        # No token comes before the first one: it has no log-probability.
        begin = {"tokens": self._token_text(first), "text_offset": offsets.next(first)}
        columns = {
            name: Kept(itertools.chain([items_text([begin.get(name)])], pieces))
            for name, pieces in self._columns(logprobs, lambda: offsets).items()
        }
        return _ScoredPrompt(columns, offsets)

    def _columns(self, scored: Logprobs, offsets: Callable[[], _Offsets]) -> dict[str, Iterator[str]]:
        """Returns the pieces of each column. `offsets` returns the offset before the first token, when it is due."""

        def pieces(items: Callable[[Logprobs], list[Any]]) -> Iterator[str]:
            return (items_text(items(part)) for part in _slices(scored))

        def places() -> Iterator[str]:
            place = offsets().next
            for part in _slices(scored):
                yield items_text(list(map(place, part.tokens.tolist())))

        return {
            "tokens": pieces(lambda part: list(map(self._token_text, part.tokens.tolist()))),
            "token_logprobs": pieces(lambda part: np.maximum(part.logprobs, _LEAST_LOGPROB).tolist()),
            "top_logprobs": pieces(lambda part: list(map(self._top, part))),
            "text_offset": places(),
        }

    def _top(self, one: TokenLogprob) -> Json:
        return {
            self._token_text(token): max(logprob, _LEAST_LOGPROB)
            for token, logprob in (*one.top, (one.token, one.logprob))
        }

    def _token_text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = token_text(self._tokenizer, token)
        return text


_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(frozen=True, slots=True)
class _ScoredPrompt:
    """A prompt's columns as text, encoded once for all of its choices."""

    columns: dict[str, Kept]
    _offsets: _Offsets  # advanced by the pieces of `text_offset`

    def offsets_after(self) -> _Offsets:
        """Returns the offsets of a choice that follows the prompt."""
        for _ in self.columns["text_offset"]:
            pass
        return self._offsets.copy()


def _slices(scored: Logprobs) -> Iterator[Logprobs]:
    """Yields slices of rows with as many entries as one piece of JSON has."""
    rows = max(1, _ENTRIES_PER_PIECE // (1 + scored.top_tokens.shape[1]))
    return (scored[at : at + rows] for at in range(0, len(scored), rows))


class _Offsets:
    """Positions of a request's tokens in its text, in characters."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def next(self, token: int) -> int:
        offset = self._characters
        if not self._tokenizer.is_hidden(token):
            self._characters += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offset

    def copy(self) -> _Offsets:
        other = _Offsets(self._tokenizer)
        other._characters = self._characters
        other._decoder.setstate(self._decoder.getstate())
        return other


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        # OpenAI means a client's prediction, here it is the server's drafts. Rejected ones are no completion tokens.
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.draft_tokens - usage.accepted_draft_tokens,
        },
    }


class OpenAIFormat:
    """The wire format of chats and completions: a body or chunks around the choices."""

    def __init__(self, choices: ChoiceFormat, include_usage: bool) -> None:
        self._choices = choices
        self._include_usage = include_usage

    def stream(self) -> ChunkWriter:
        return ChunkWriter(self._choices, self._include_usage)

    def whole(self, histories: Sequence[ChoiceHistory], usage: Usage) -> Json:
        choices = (self._choices.whole(index, history) for index, history in enumerate(histories))
        return self._choices.head | {"choices": choices, "usage": usage_body(usage)}


class ChunkWriter:
    """Writer of server-sent events. Encodes the parts of a chunk around the choice once, and the parts of a choice
    around its text once if it has text alone."""

    def __init__(self, format: ChoiceFormat, include_usage: bool) -> None:
        head = dumps(format.head | {"object": format.chunk_object})
        self._format = format
        self._include_usage = include_usage
        self._before = f'data: {head[:-1]},"choices":['
        self._after = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self._around_text: dict[int, tuple[str, str]] = {}  # of each choice that has begun

    def begin(self) -> str:
        return ""

    def keep_alive(self) -> str:
        return ": keep-alive\n\n"

    def events(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[str]:
        if self._is_plain(index, event):
            yield from self._plain_chunks(index, event)
            return
        for choice in self._format.choices(index, event):
            if isinstance(event, PromptScored):
                yield self._before
                yield from json_pieces(choice)
                yield self._after
            else:
                yield self._chunk(choice)
        if index not in self._around_text:
            before, after = self._chunk(self._format.text_choice(index, _TEXT)).split(quoted(_TEXT))
            self._around_text[index] = before, after

    def tokens(self, events: Sequence[tuple[int, Event]]) -> str | None:
        if not all(self._is_plain(index, event) for index, event in events):
            return None
        return "".join(chunk for index, event in events for chunk in self._plain_chunks(index, event))

    def _is_plain(self, index: int, event: Event) -> bool:
        return isinstance(event, TokenEvent) and event.logprob is None and index in self._around_text

    def _plain_chunks(self, index: int, event: Event) -> Iterator[str]:
        assert isinstance(event, TokenEvent)
        before, after = self._around_text[index]
        for part in self._format.parts(index, event):
            if not isinstance(part, str):
                yield self._chunk(part)
            elif part:
                yield f"{before}{quoted(part)}{after}"

    def _chunk(self, choice: Json) -> str:
        return f"{self._before}{dumps(choice)}{self._after}"

    def end(self, ends: Sequence[Finished], usage: Usage) -> str:
        if not self._include_usage:
            return DONE
        return f'{self._before}],"usage":{dumps(usage_body(usage))}}}\n\n{DONE}'

    def error(self, error: RootstockError) -> str:
        return error_event(error_body(error))  # the stream ends without [DONE]


def error_event(body: Json) -> str:
    return f"data: {dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"

_TEXT = "\0text"  # a placeholder for the text, unlike any other part of a chunk
