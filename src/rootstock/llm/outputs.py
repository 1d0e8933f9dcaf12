"""Outputs of the library: whole answers, and pieces of streamed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
from rootstock.text.output.deltas import (
    ContentDelta,
    Delta,
    DeltaParser,
    ReasoningDelta,
    WholeAnswer,
    WholeCall,
    answer_of,
)
from rootstock.text.output.reasoning_tokens import parsed_answer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `text` ends before a stop string and has no special tokens.

    The text of a chat's answer has no reasoning and no complete calls. `token_ids` holds all tokens but the one that
    ended the answer.
    """

    index: int  # among the `n` answers to one prompt
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or the token that ended it
    usage: Usage  # tokens, and times from submission on
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of `token_ids`, if asked for
    reasoning: str = ""  # of a chat
    tool_calls: tuple[WholeCall, ...] = ()  # of a chat: with `name`, `arguments` and their `text`


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. Its own properties describe the first answer."""

    prompt: str | None  # None: given as token ids. Of a chat, the rendered conversation is not kept
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]  # `n` of them
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # None for the first token, which has none

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def tool_calls(self) -> tuple[WholeCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.outputs[0].logprobs

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache; with several answers, by the one that found the fewest."""
        return min(output.usage.cached_tokens for output in self.outputs)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers, those that ended them included."""
        return sum(output.usage.completion_tokens for output in self.outputs)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of a streamed answer: one token, or the end. The texts of one answer's pieces, joined, are its text.

    The text of a token comes once it is certain: it may be empty, and it may hold the text of earlier tokens.
    """

    index: int  # of the answer, among `n`
    text: str
    token_id: int | None  # None: the end
    logprob: TokenLogprob | None
    cached_tokens: int  # of the prompt
    finish_reason: FinishReason | None = None  # set at the end
    stop_reason: str | int | None = None
    usage: Usage | None = None  # set at the end
    reasoning: str = ""  # of a chat
    deltas: tuple[Delta, ...] = ()  # of a chat: calls as they begin, go on and end


def delta_of(index: int, event: TokenEvent | Finished, parser: DeltaParser | None = None) -> TextDelta:
    """Turns an event of answer `index` into a piece of it. `parser` is a chat's, and gets all events in order."""
    text, reasoning, others = event.text, "", ()
    if parser is not None:
        deltas = [*parser.push(text), *(parser.finish() if isinstance(event, Finished) else ())]
        text = "".join(each.text for each in deltas if isinstance(each, ContentDelta))
        reasoning = "".join(each.text for each in deltas if isinstance(each, ReasoningDelta))
        others = tuple(each for each in deltas if not isinstance(each, ContentDelta | ReasoningDelta))
    if isinstance(event, TokenEvent):
        return TextDelta(
            index, text, event.token, event.logprob, event.cached_tokens, reasoning=reasoning, deltas=others
        )
    usage = event.usage
    return TextDelta(
        index,
        text,
        None,
        None,
        usage.cached_tokens,
        event.reason,
        event.stopped_by,
        usage,
        reasoning,
        others,
    )


class CollectedAnswer:
    """Collector of one request's events."""

    def __init__(self, wants_logprobs: bool, parser: DeltaParser | None = None) -> None:
        """`parser` is a chat's. Without it, the answer is its text."""
        self._parser = parser
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] | None = [] if wants_logprobs else None
        self.prompt_scores: Logprobs | None = None
        self._end: Finished | None = None

    def take(self, event: Event) -> None:
        match event:
            case PromptScored():
                self.prompt_scores = event.logprobs
            case TokenEvent():
                self._tokens.append(event.token)
                self._texts.append(event.text)
                if self._logprobs is not None and event.logprob is not None:
                    self._logprobs.append(event.logprob)
            case Finished():
                self._texts.append(event.text)
                self._end = event
            case _:
                raise AssertionError(f"{event} is no part of an answer")

    def output(self, index: int) -> CompletionOutput:
        """Returns the answer, which has ended."""
        assert self._end is not None, "the answer has not ended"
        answer = WholeAnswer("".join(self._texts), "", ())
        if self._parser is not None:
            answer = answer_of(parsed_answer(self._parser, self._texts))
        return CompletionOutput(
            index,
            answer.text,
            tuple(self._tokens),
            self._end.reason,
            self._end.stopped_by,
            self._end.usage,
            None if self._logprobs is None else tuple(self._logprobs),
            answer.reasoning,
            answer.calls,
        )


def output_of(prompt: str | None, request: Request, answers: Sequence[CollectedAnswer]) -> RequestOutput:
    """Puts the answers to one prompt together. `request` is the first answer's."""
    scores = answers[0].prompt_scores
    return RequestOutput(
        prompt,
        tuple(request.tokens.tolist()),
        tuple(answer.output(index) for index, answer in enumerate(answers)),
        None if scores is None else (None, *scores),
    )
