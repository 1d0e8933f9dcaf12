"""OpenAI's wire format of responses: the engine's events as a whole response, or as chunks of a stream."""

from __future__ import annotations

import codecs
import io
import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.engine.request import Event, Finished, Logprobs, PromptScored, TokenEvent, TokenLogprob, Usage
from rootstock.engine.tokenizer import ModelTokenizer, token_text
from rootstock.server.json_pieces import Kept, LazyList, items_text, json_pieces
from rootstock.server.openai.schema import Json

_LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in
_ENTRIES_PER_PIECE = 512  # log-probabilities: less than a millisecond of encoding


class ChoiceHistory:
    """The parts of a choice's events that a whole answer needs, in 12 bytes a log-probability instead of 100."""

    def __init__(self) -> None:
        self.prompt_logprobs: Logprobs | None = None
        self.end: Finished | None = None
        self._text = io.StringIO()
        self._tokens = array("i")
        self._logprobs = array("d")
        self._top_tokens = array("i")
        self._top_logprobs = array("d")

    def add(self, event: PromptScored | TokenEvent | Finished) -> None:
        match event:
            case PromptScored(logprobs=logprobs):
                self.prompt_logprobs = logprobs
            case TokenEvent(text=text, logprob=logprob):
                self._text.write(text)
                if logprob is not None:
                    self._add_logprob(logprob)
            case Finished(text=text):
                self._text.write(text)
                self.end = event

    def _add_logprob(self, logprob: TokenLogprob) -> None:
        self._tokens.append(logprob.token)
        self._logprobs.append(logprob.logprob)
        for token, value in logprob.top:
            self._top_tokens.append(token)
            self._top_logprobs.append(value)

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def logprobs(self) -> Logprobs | None:
        """The log-probabilities of the sampled tokens, if they have any."""
        rows = len(self._tokens)
        if rows == 0:
            return None
        return Logprobs(
            np.frombuffer(self._tokens, np.int32),
            np.frombuffer(self._logprobs, np.float64),
            np.frombuffer(self._top_tokens, np.int32).reshape(rows, -1),
            np.frombuffer(self._top_logprobs, np.float64).reshape(rows, -1),
        )


class WireFormat(Protocol):
    """The format of one HTTP request's response. It keeps the state that later events of the response need.

    Choices may hold LazyLists, which `json_pieces` encodes.
    """

    head: Json  # id, object, created, model

    @property
    def chunk_object(self) -> str: ...

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        """Yields the streamed choices of an event, also those of other requests with the same prompt."""
        ...

    def text_choice(self, index: int, text: str) -> Json:
        """Returns the choice of a token with text alone that is not the first event of its request."""
        ...

    def whole(self, index: int, history: ChoiceHistory) -> Json:
        """Returns the choice of a whole answer. Called in the order of the requests."""
        ...


class ChatFormat:
    def __init__(self, head: Json, tokenizer: ModelTokenizer) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._started: set[int] = set()

    chunk_object = "chat.completion.chunk"

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        if index not in self._started:
            self._started.add(index)
            yield self._choice(index, {"role": "assistant", "content": ""})
        match event:
            case TokenEvent(text=text, logprob=logprob):
                if logprob is not None:
                    yield self._choice(index, {"content": text}, self._logprobs([logprob]))
                elif text:
                    yield self.text_choice(index, text)
            case Finished(reason=reason, text=text, stopped_by=stopped_by):
                if text:
                    yield self.text_choice(index, text)
                yield self._choice(index, {}) | {"finish_reason": reason, "stop_reason": stopped_by}
            case PromptScored():
                pass

    def text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, {"content": text})

    def whole(self, index: int, history: ChoiceHistory) -> Json:
        end, scored = history.end, history.logprobs
        assert end is not None
        content = None if scored is None else LazyList(map(self._content_text, _slices(scored)))
        return {
            "index": index,
            "message": {"role": "assistant", "content": history.text, "refusal": None},
            "logprobs": None if content is None else {"content": content, "refusal": None},
            "finish_reason": end.reason,
            "stop_reason": end.stopped_by,
        }

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


class ChunkWriter:
    """Writer of server-sent events. Encodes the parts of a chunk around the choice once, and the parts of a choice
    around its text once if it has text alone."""

    def __init__(self, format: WireFormat, include_usage: bool) -> None:
        head = json.dumps(format.head | {"object": format.chunk_object}, ensure_ascii=False)
        self._format = format
        self._before = f'data: {head[:-1]}, "choices": ['
        self._after = '], "usage": null}\n\n' if include_usage else "]}\n\n"
        self._around_text: dict[int, tuple[str, str]] = {}  # of each choice that has begun

    def chunks(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[str]:
        """Yields the text of an event's chunks in pieces. Take all pieces before asking for the next event's."""
        text = self._text_chunk(index, event)
        if text is not None:
            yield text
            return
        for choice in self._format.choices(index, event):
            if isinstance(event, PromptScored):
                yield self._before
                yield from json_pieces(choice)
                yield self._after
            else:
                yield self._chunk(choice)
        if index not in self._around_text:
            before, after = self._chunk(self._format.text_choice(index, _TEXT)).split(_quoted(_TEXT))
            self._around_text[index] = before, after

    def texts(self, events: Sequence[tuple[int, Event]]) -> str | None:
        """Returns the chunks of tokens with text alone in choices that have begun; None for any other event.

        It changes no state: `chunks` may follow with the same events.
        """
        chunks = ""
        for index, event in events:
            chunk = self._text_chunk(index, event)
            if chunk is None:
                return None
            chunks += chunk
        return chunks

    def _text_chunk(self, index: int, event: Event) -> str | None:
        around = self._around_text.get(index)
        if around is None or not isinstance(event, TokenEvent) or event.logprob is not None:
            return None
        return f"{around[0]}{_quoted(event.text)}{around[1]}" if event.text else ""

    def _chunk(self, choice: Json) -> str:
        return f"{self._before}{_dumps(choice)}{self._after}"

    def keep_alive(self) -> str:
        return ": keep-alive\n\n"  # a comment: clients skip it

    def usage(self, usage: Usage) -> str:
        return f'{self._before}], "usage": {_dumps(usage_body(usage))}}}\n\n'


def error_event(body: Json) -> str:
    return f"data: {_dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"

_TEXT = "\0text"  # a placeholder for the text, unlike any other part of a chunk
_quoted: Callable[[str], str] = json.encoder.encode_basestring  # as `_dumps` writes a string
_dumps: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
