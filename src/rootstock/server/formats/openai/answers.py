"""OpenAI's wire format of answers to chats and completions: as a whole body, or as chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from rootstock.engine.request import Event, Finished, PromptScored, TokenEvent, Usage
from rootstock.errors import RootstockError
from rootstock.server.http.errors import error_body
from rootstock.server.wire.api_call import ChoiceHistory, Diagnose, Json
from rootstock.server.wire.cache_diagnostics import openai_fields
from rootstock.server.wire.hints.sent import NO_HINTS, SentHints
from rootstock.server.wire.json_pieces import Late, dumps, json_pieces, quoted


class ChoiceFormat(Protocol):
    """The format of the choices of one response. It keeps the state that later events of a choice need.

    Choices may hold LazyLists, which `json_pieces` encodes.
    """

    head: Json  # id, object, created, model

    @property
    def chunk_object(self) -> str: ...

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of reasoning in the choices that have ended."""
        ...

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        """Yields the streamed choices of an event, also for other requests with the same prompt."""
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


def usage_body(usage: Usage, reasoning_tokens: int) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        # OpenAI means a client's prediction, here it is the server's drafts. Rejected ones are no completion tokens.
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.draft_tokens - usage.accepted_draft_tokens,
        },
    }


class OpenAIFormat:
    """The wire format of chats and completions: a body or chunks around the choices."""

    def __init__(
        self,
        choices: ChoiceFormat,
        include_usage: bool,
        diagnose: Diagnose | None = None,
        hints: SentHints = NO_HINTS,
        continuous_prompt_tokens: int | None = None,
    ) -> None:
        self._choices = choices
        self._include_usage = include_usage
        self._diagnose = diagnose
        self._hints = hints
        self._continuous_prompt_tokens = continuous_prompt_tokens  # None: no usage in each chunk

    def stream(self) -> ChunkWriter:
        prompt_tokens = self._continuous_prompt_tokens
        if self._include_usage and prompt_tokens is not None:
            return UsageChunkWriter(self._choices, prompt_tokens, self._diagnose, self._hints)
        return ChunkWriter(self._choices, self._include_usage, self._diagnose, self._hints)

    def whole(self, histories: Sequence[ChoiceHistory], usage: Usage) -> Json:
        choices = (self._choices.whole(index, history) for index, history in enumerate(histories))
        told = Late(lambda: usage_body(usage, self._choices.reasoning_tokens))
        ends = [history.end for history in histories if history.end is not None]
        body = self._choices.head | {"choices": choices, "usage": told}
        if self._diagnose is not None:
            body |= openai_fields(self._diagnose, ends)
        return body if self._hints is NO_HINTS else body | self._hints.told(ends)


class ChunkWriter:
    """Writer of server-sent events. Encodes the parts of a chunk around the choice once, and the parts of a choice
    around its text once if it has text alone."""

    def __init__(
        self,
        format: ChoiceFormat,
        include_usage: bool,
        diagnose: Diagnose | None = None,
        hints: SentHints = NO_HINTS,
    ) -> None:
        head = dumps(format.head | {"object": format.chunk_object})
        self._format = format
        self._include_usage = include_usage
        self._diagnose = diagnose
        self._hints = hints
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
        told: Json = {}
        if self._include_usage:
            told["usage"] = usage_body(usage, self._format.reasoning_tokens)
        if self._diagnose is not None:
            told |= openai_fields(self._diagnose, ends)
        if (
            told and self._hints is not NO_HINTS
        ):  # a chunk for the hints alone would surprise clients that expect a choice in each one
            told |= self._hints.told(ends)
        return f"{self._before}],{dumps(told)[1:]}\n\n{DONE}" if told else DONE

    def error(self, error: RootstockError) -> str:
        return error_event(error_body(error))  # the stream ends without [DONE]


class UsageChunkWriter(ChunkWriter):
    """Writer of server-sent events whose chunks tell the usage up to them."""

    def __init__(
        self, format: ChoiceFormat, prompt_tokens: int, diagnose: Diagnose | None, hints: SentHints
    ) -> None:
        super().__init__(format, True, diagnose, hints)
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._tokens_of_event = 0
        self._after = self._end_of_chunk(0)

    def events(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[str]:
        self._tokens_of_event = int(isinstance(event, TokenEvent))
        yield from super().events(index, event)
        self._completion_tokens += self._tokens_of_event

    def _chunk(self, choice: Json) -> str:
        # The role alone comes before the text of the token.
        is_role = "role" in choice.get("delta", ())
        tokens = self._completion_tokens + (0 if is_role else self._tokens_of_event)
        self._after = self._end_of_chunk(tokens)
        return super()._chunk(choice)

    def _end_of_chunk(self, tokens: int) -> str:
        usage = f'"prompt_tokens":{self._prompt_tokens},"completion_tokens":{tokens}'
        return f'],"usage":{{{usage},"total_tokens":{self._prompt_tokens + tokens}}}}}\n\n'

    def _is_plain(self, index: int, event: Event) -> bool:
        return False  # the end of each chunk is another one


def error_event(body: Json) -> str:
    return f"data: {dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"

_TEXT = "\0text"  # a placeholder for the text, unlike any other part of a chunk
