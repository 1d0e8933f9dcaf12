"""A call to the engine as one HTTP request makes it, and the interface of its answer's format.

A wire format is a package of `server/formats/`: it translates a request's body to an `ApiCall`, and the engine's
events to the answer. No wire format imports another one.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rootstock.engine.diagnosis import Diagnosis
from rootstock.engine.request import (
    Event,
    Finished,
    Logprobs,
    PromptScored,
    Request,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from rootstock.errors import RootstockError, TooManyLogprobs
from rootstock.pipeline.model import EndOfTurn, PreparedChat, ServedModel
from rootstock.server.wire.hints.fields import HintFields
from rootstock.server.wire.hints.headers import NO_HEAD, HeaderHints
from rootstock.server.wire.hints.sent import HINT_FIELDS, NO_HINTS, SentHints, sent_hints
from rootstock.text.conversation.types import IgnoredField, Medium
from rootstock.text.conversation.volatile_heads import DroppedHead
from rootstock.text.limits import MAX_LOGPROBS
from rootstock.text.prompts.prompt_tokenizer import PlacedMark
from rootstock.text.prompts.tenant_salt import PromptOwner

# Header with the length that an answer may have, if `max_tokens` was lowered. Not every stream has usage.
MAX_TOKENS_HEADER = "X-Max-Tokens"
Json = dict[str, Any]
Diagnose = Callable[[Diagnosis], Json | None]  # returns a diagnosis in the shape of a wire format


class StreamWriter(Protocol):
    """The text of one response as a stream of server-sent events. Used on one event loop's thread."""

    def begin(self) -> str:
        """Returns the events that need none of the engine's, when the requests were accepted."""
        ...

    def keep_alive(self) -> str:
        """Returns the text that tells a waiting client that the server still works."""
        ...

    def events(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[str]:
        """Yields the text of an event of one of the requests, in pieces. Take all pieces before the next event."""
        ...

    def tokens(self, events: Sequence[tuple[int, Event]]) -> str | None:
        """Returns the text of tokens; None, before any change of state, if `events` must take one of these."""
        ...

    def end(self, ends: Sequence[Finished], usage: Usage) -> str:
        """Returns the last text of the stream, after the end of all requests."""
        ...

    def error(self, error: RootstockError) -> str:
        """Returns the last text of a stream that fails."""
        ...


class WireFormat(Protocol):
    """The format of one HTTP request's response."""

    def stream(self) -> StreamWriter: ...

    def whole(self, histories: Sequence[ChoiceHistory], usage: Usage) -> Json:
        """Returns the body. It may hold LazyLists and iterators, which `json_pieces` encodes."""
        ...


class ChoiceHistory:
    """The parts of a choice's events that a whole answer needs, in 12 bytes a log-probability instead of 100."""

    def __init__(self) -> None:
        self.prompt_logprobs: Logprobs | None = None
        self.end: Finished | None = None
        self._text = io.StringIO()
        self._lengths = array("i")  # of the tokens' texts
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
                self._lengths.append(len(text))
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
    def chars(self) -> int:
        """Length of the text."""
        return self._text.tell()

    @property
    def text(self) -> str:
        return self._text.getvalue()

    def texts(self) -> Iterator[str]:
        """Yields the text of each token, and the text that was held back until the end."""
        text, begin = self.text, 0
        for length in self._lengths:
            yield text[begin : begin + length]
            begin += length
        yield text[begin:]

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


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One HTTP request as requests to the engine, and the format of its response."""

    format: WireFormat
    requests: tuple[Request, ...]  # prompt by prompt, its choices side by side
    choices_per_prompt: int
    stream: bool
    lowered_max_tokens: int | None = None  # the lowest, if the context has less room than `max_tokens`
    dropped: tuple[DroppedHead, ...] = ()  # from the prompt
    ignored_tools: tuple[str, ...] = ()  # their types: the model does not see them
    media: tuple[Medium, ...] = ()  # that lines of the prompt stand for
    next_turn: EndOfTurn | None = None  # to be called after the response

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.lowered_max_tokens is None else {MAX_TOKENS_HEADER: str(self.lowered_max_tokens)}

    def refuse_too_many_logprobs(self, context_limit: int) -> None:
        """Bounds the log-probabilities of the response: each choice repeats the log-probabilities of its prompt.

        Raises TooManyLogprobs.
        """
        top = self.requests[0].sampling.top_logprobs
        if top is None:
            return
        first_choices = self.requests[:: self.choices_per_prompt]
        scored = sum(len(one.tokens) for one in first_choices if one.prompt_logprobs is not None)
        answers = [_most_tokens(one, context_limit) for one in first_choices]
        count = self.choices_per_prompt * (scored + sum(answers)) * (1 + top)
        if count > MAX_LOGPROBS:
            raise TooManyLogprobs(
                prompts=len(first_choices),
                choices=self.choices_per_prompt,
                prompt_tokens=scored,
                max_tokens=max(answers),
                top=top,
                count=count,
                limit=MAX_LOGPROBS,
            )


def hints_of(
    body: HintFields,
    head: HeaderHints,
    owner: PromptOwner,
    marks: Sequence[PlacedMark] = (),
    warnings: tuple[IgnoredField, ...] = (),
) -> SentHints:
    """Returns the hints of a request, and warnings about its other fields.

    Raises InvalidParameter and Unsupported.
    """
    if head is NO_HEAD and not marks and not warnings and HINT_FIELDS.isdisjoint(body.model_fields_set):
        return NO_HINTS
    return sent_hints(body, head, owner, marks, warnings)


def _most_tokens(request: Request, context_limit: int) -> int:
    """Returns the length that an answer can have."""
    room = max(0, context_limit - len(request.tokens))
    return room if request.stop.max_tokens is None else min(room, request.stop.max_tokens)


def call_of(
    model: ServedModel,
    format: WireFormat,
    requests: tuple[Request, ...],
    *,
    choices_per_prompt: int = 1,
    stream: bool = False,
    strict_max_tokens: bool = False,
    chat: PreparedChat | None = None,
    ignored_tools: tuple[str, ...] = (),
) -> ApiCall:
    """Makes a call, of a chat unless it continues text.

    Lowers `max_tokens` to the room that the context has, unless it is strict.
    """
    lowered = None
    if not strict_max_tokens:
        fitted = tuple(request.fitted(model.context_limit) for request in requests)
        lengths = [new.stop.max_tokens for new, old in zip(fitted, requests, strict=True) if new is not old]
        requests, lowered = fitted, min((most for most in lengths if most is not None), default=None)
    call = ApiCall(format, requests, choices_per_prompt, stream, lowered, ignored_tools=ignored_tools)
    if chat is None:
        return call
    # Of several answers, the client goes on with one that is not known.
    next_turn = chat.next_turn if len(requests) == 1 else None
    return replace(call, dropped=chat.dropped, media=chat.template.media, next_turn=next_turn)
