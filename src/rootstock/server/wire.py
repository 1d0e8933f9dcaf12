"""Interfaces between the HTTP server and the wire formats: a call to the engine, and the format of its response.

A wire format is a package beside this module: `server/openai/`, `server/responses/`, `server/anthropic/`. It
translates a request's body to an `ApiCall`, and the engine's events to the response. No wire format imports another
one.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from rootstock.cache.hints import CacheHints
from rootstock.engine.adapters import NamedAdapter
from rootstock.engine.clearing import Clearing
from rootstock.engine.diagnosis import Diagnosis
from rootstock.engine.engine import Engine
from rootstock.engine.request import (
    Event,
    Finished,
    Logprobs,
    PromptScored,
    Request,
    ResolvedSampling,
    StopParams,
    TokenEvent,
    TokenLogprob,
    Usage,
    requests_for,
)
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.engine.stats import Cleared
from rootstock.errors import RootstockError, TooManyLogprobs, Unsupported
from rootstock.runtime.base import ModelDescription
from rootstock.server.hints.fields import HintFields
from rootstock.server.hints.headers import NO_HEAD, HeaderHints
from rootstock.server.hints.sent import HINT_FIELDS, NO_HINTS, SentHints, sent_hints
from rootstock.server.next_turns import NextTurn, NextTurns
from rootstock.text.constraints.asked import Constraint, JsonSchema, Lark
from rootstock.text.constraints.compiled import CompiledConstraint
from rootstock.text.constraints.compiler import ConstraintCompiler
from rootstock.text.conversation.media import mentioned, refuse_media
from rootstock.text.conversation.template import TemplateInput, template_input
from rootstock.text.conversation.types import Conversation, IgnoredField, Medium
from rootstock.text.conversation.volatile_heads import DroppedHead, without_volatile_heads
from rootstock.text.limits import MAX_LOGPROBS
from rootstock.text.output.deltas import CallEnded, CallStarted, Delta, DeltaParser, TextOnly
from rootstock.text.output.formats import PLAIN, OutputFormat
from rootstock.text.output.grammar import call_grammar, call_or_answer_grammar
from rootstock.text.output.parser import OutputParser
from rootstock.text.output.reasoning_tokens import CountingParser
from rootstock.text.prompts.boundaries import chat_with_boundaries, chat_with_marks
from rootstock.text.prompts.fingerprint import Fingerprint, Fingerprints, fingerprint_of
from rootstock.text.prompts.prompt_tokenizer import ChatPrompt, PlacedMark, PromptTokenizer, escaped
from rootstock.text.prompts.sampled_answers import AnswerPlace
from rootstock.text.tokenizer import ModelTokenizer, text_with_special_tokens

# Header with the length that an answer may have, if `max_tokens` was lowered. Not every stream has usage.
MAX_TOKENS_HEADER = "X-Max-Tokens"
_PROMPT_END_TOKENS = 64  # in which the parser looks for the opening of reasoning

Json = dict[str, Any]
Diagnose = Callable[[Diagnosis], Json | None]  # returns a diagnosis in the shape of a wire format
EndOfTurn = Callable[[Sequence[str]], None]  # gets the texts of the answer's tokens


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
        """Bounds the log-probabilities of the response: each choice repeats those of its prompt.

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
    tenant: str,
    marks: Sequence[PlacedMark] = (),
    warnings: tuple[IgnoredField, ...] = (),
) -> SentHints:
    """Returns the hints of a request, and warnings about its other fields.

    Raises InvalidParameter and Unsupported.
    """
    if head is NO_HEAD and not marks and not warnings and HINT_FIELDS.isdisjoint(body.model_fields_set):
        return NO_HINTS
    return sent_hints(body, head, tenant, getattr(body, "cache_salt", None), marks, warnings)


def _most_tokens(request: Request, context_limit: int) -> int:
    """Returns the length that an answer can have."""
    room = max(0, context_limit - len(request.tokens))
    return room if request.stop.max_tokens is None else min(room, request.stop.max_tokens)


@dataclass(frozen=True)
class PreparedChat:
    """A conversation's prompt, and all that its answers need."""

    model: str
    template: TemplateInput
    prompt: ChatPrompt
    salt: str
    new_parser: Callable[[], DeltaParser]
    visible_tokens: frozenset[int] = frozenset()  # that the parser must see
    constraint: CompiledConstraint | None = None
    dropped: tuple[DroppedHead, ...] = ()
    ignored: tuple[IgnoredField, ...] = ()
    adapter: str = ""
    next_turn: EndOfTurn | None = None  # None: idle work is off

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint_of(self.model, self.template, len(self.prompt.tokens))

    def requests(
        self,
        id: str,
        choices: int,
        sampling: ResolvedSampling,
        stop: StopParams,
        *,
        diagnose: bool = False,
        hints: CacheHints | None = None,
    ) -> tuple[Request, ...]:
        """Makes the requests of the answers."""
        return requests_for(
            id,
            [self.prompt.tokens],
            choices,
            sampling,
            stop,
            salt=self.salt,
            boundaries=self.prompt.boundaries,
            visible_tokens=self.visible_tokens,
            place=self.prompt.place,
            constraint=self.constraint,
            diagnose=diagnose,
            hints=hints,
            adapter=self.adapter,
        )


class RememberingParser:
    """A parser that keeps the complete calls of an answer: a later prompt gets them back as the model wrote them."""

    def __init__(self, parser: DeltaParser, place: AnswerPlace) -> None:
        self._parser = parser
        self._place = place
        self._started: dict[int, CallStarted] = {}

    def push(self, text: str) -> list[Delta]:
        return self._noted(self._parser.push(text))

    def finish(self) -> list[Delta]:
        return self._noted(self._parser.finish())

    def _noted(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            match delta:
                case CallStarted(index):
                    self._started[index] = delta
                case CallEnded(index, arguments, raw) if arguments is not None:
                    call = self._started[index]
                    self._place.remember_call(call.id, call.name, arguments, raw)
        return deltas


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model and its engine: all that a request to it needs."""

    name: str
    vocab_size: int
    tokenizer: PromptTokenizer
    defaults: SamplingDefaults
    context_limit: int  # tokens of a prompt and its answer
    most_requests: int  # running and waiting in the engine at once
    engine: Engine
    description: ModelDescription
    block_size: int  # tokens of a block of its cache
    parse_special_tokens: bool = False  # special tokens in the text of messages are control tokens
    wants_boundaries: bool = False  # the model resumes only at checkpoints: boundaries place them
    reuses_prefixes: bool = True  # later requests find the prompts of earlier ones in the cache
    constraints: ConstraintCompiler | None = None  # None: the model has no tokenizer
    output: OutputFormat = PLAIN  # of the model's answers
    visible_tokens: frozenset[int] = frozenset()  # special tokens that its parser must see
    drop_volatile: bool = True  # lines that change at every request are dropped from the head of a chat
    refuses_media: bool = False  # an image or another medium is an error, rather than a line of the prompt
    fingerprints: Fingerprints = field(default_factory=Fingerprints)  # of chats, by the id of their answer
    next_turns: NextTurns | None = None  # None: idle work is off
    adapter: str = ""  # fingerprint of the LoRA adapter of its requests; empty: the base model
    parent: str | None = None  # of an adapter: the name of its base model

    def of_adapter(self, adapter: NamedAdapter) -> ServedModel:
        """Returns the same model with an adapter: it shares the engine and the tokenizer."""
        return replace(
            self,
            name=adapter.name,
            adapter=adapter.fingerprint,
            parent=self.parent or self.name,
        )

    def clear(self, clearing: Clearing) -> Cleared:
        """Removes cached prefixes, and what is kept of their texts. Raises the errors of `Engine.clear`."""
        if clearing.memory and not clearing.public:
            self.tokenizer.forget(clearing.salt)
            self.fingerprints.forget(clearing.salt)
        return self.engine.clear(clearing)

    @property
    def model_tokenizer(self) -> ModelTokenizer:
        return self.tokenizer.model_tokenizer

    def stored_tokens(self, prompt_tokens: int) -> int:
        """Returns how many tokens of a prompt later requests may find: the last one is always computed."""
        return prompt_tokens - 1 if self.reuses_prefixes else 0

    def prepared_chat(
        self,
        conversation: Conversation,
        salt: str,
        tenant: str,
        asked: Constraint | None = None,
        reasoning_budget: int | None = None,
    ) -> PreparedChat:
        """Renders and tokenizes: not for an event loop. Raises RequestError.

        `asked` has the grammar of the answer's text, and `reasoning_budget` is in tokens. A forced call comes before
        the grammar: its arguments follow the tool's schema. Beside a JSON schema the model may call a tool.
        """
        dropped: tuple[DroppedHead, ...] = ()
        first = conversation.messages[0].role if conversation.messages else ""
        if self.drop_volatile and first in ("system", "developer"):
            conversation, dropped = without_volatile_heads(conversation)
        self.tokenizer.refuse_more_chars(conversation.count_chars())
        template = template_input(conversation, self.model_tokenizer)
        if self.refuses_media:
            refuse_media(template.media)
        text = escaped(template, self.tokenizer, parse=self.parse_special_tokens)
        make = chat_with_boundaries if self.wants_boundaries else chat_with_marks
        prompt = make(text, self.tokenizer, salt, tenant)
        end = text_with_special_tokens(self.model_tokenizer, prompt.tokens[-_PROMPT_END_TOKENS:])
        constraint = self.compiled(self._constraint(conversation, asked, reasoning_budget, end), salt, tenant)
        tools = () if conversation.tool_choice.mode == "none" else conversation.tools
        output = self.output
        is_text = output is PLAIN or (not output.has_reasoning and not (tools and output.has_calls))
        new_parser: Callable[[], DeltaParser] = TextOnly
        if not is_text:
            new_parser = partial(OutputParser, output, tools, end)
        next_turn = None
        if self.next_turns is not None:
            turn = NextTurn(conversation, salt, tenant, 4 * len(prompt.tokens), new_parser, self.adapter)
            next_turn = partial(self.next_turns.answered, turn)
        return PreparedChat(
            self.name,
            template,
            prompt,
            salt,
            new_parser if is_text else lambda: CountingParser(RememberingParser(new_parser(), prompt.place)),
            frozenset() if is_text else self.visible_tokens,
            constraint=constraint,
            dropped=dropped,
            ignored=self._ignored(conversation, template),
            next_turn=next_turn,
            adapter=self.adapter,
        )

    def _ignored(self, conversation: Conversation, template: TemplateInput) -> tuple[IgnoredField, ...]:
        if not conversation.ignored and not template.media:
            return ()
        reasons = self.output.shows_reasoning
        ignored = [one for one in conversation.ignored if one.wants_reasoning is not reasons]
        return (*ignored, *(mentioned(template.media) if template.media else ()))

    def _constraint(
        self,
        conversation: Conversation,
        asked: Constraint | None,
        reasoning_budget: int | None,
        prompt_end: str,
    ) -> Constraint | None:
        choice = conversation.tool_choice
        if choice.mode == "required":
            grammar = call_grammar(self.output, conversation.tools, choice)
            if grammar is None:
                remedy = "The model's chat template writes no calls that the server can force. Send 'auto'."
                raise Unsupported("tool_choice", remedy)
            asked = Constraint(Lark(grammar), param="tool_choice")
        elif choice.mode == "auto" and asked is not None and isinstance(asked.grammar, JsonSchema):
            grammar = call_or_answer_grammar(
                self.output, conversation.tools, choice, asked.grammar, asked.param
            )
            asked = asked if grammar is None else replace(asked, grammar=Lark(grammar))
        if asked is None and reasoning_budget is None:
            return None
        found = self.output.reasoning_around_answers(prompt_end, calls=choice.mode == "required")
        reasoning = None if found is None else replace(found, budget_tokens=reasoning_budget)
        return replace(asked or Constraint(param="reasoning_budget"), reasoning=reasoning)

    def compiled(self, constraint: Constraint | None, salt: str, tenant: str) -> CompiledConstraint | None:
        """Compiles a constraint: not for an event loop.

        Raises ConstraintRefused, InvalidParameter, Unsupported, CompilerBusy and EngineStopped.
        """
        if constraint is None or (constraint.grammar is None and constraint.reasoning is None):
            return None
        if self.constraints is None:
            raise Unsupported(constraint.param, "This model has no tokenizer. Leave it out.")
        return self.constraints.compile(constraint, salt, tenant)

    def call(
        self,
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
            fitted = tuple(request.fitted(self.context_limit) for request in requests)
            lengths = [
                new.stop.max_tokens for new, old in zip(fitted, requests, strict=True) if new is not old
            ]
            requests, lowered = fitted, min((most for most in lengths if most is not None), default=None)
        call = ApiCall(format, requests, choices_per_prompt, stream, lowered, ignored_tools=ignored_tools)
        if chat is None:
            return call
        # Of several answers, the client goes on with one that is not known.
        next_turn = chat.next_turn if len(requests) == 1 else None
        return replace(call, dropped=chat.dropped, media=chat.template.media, next_turn=next_turn)
