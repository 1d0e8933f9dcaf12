"""OpenAI's wire format, outwards: what the engine's events look like, whole and in chunks."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rootstock.engine.request import Event, Finished, PromptScored, TokenEvent, TokenLogprob, Usage
from rootstock.engine.text import TextCodec, token_text
from rootstock.server.openai_request import Json, Prompt

_LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in


class WireFormat(Protocol):
    """How one HTTP request's events look on the wire. Keeps what its answer needs of earlier events."""

    head: Json  # id, object, created, model

    @property
    def chunk_object(self) -> str: ...

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        """The streamed choices that an event becomes."""
        ...

    def text_choice(self, index: int, text: str) -> Json:
        """What `choices` makes of a token that has text and no log-probability, and is not the first event."""
        ...

    def whole(self, index: int, events: Sequence[PromptScored | TokenEvent | Finished]) -> Json:
        """The choice that all events of one request become."""
        ...


class ChatFormat:
    def __init__(self, head: Json, codec: TextCodec) -> None:
        self.head = head
        self._codec = codec
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

    def whole(self, index: int, events: Sequence[PromptScored | TokenEvent | Finished]) -> Json:
        end = events[-1]
        assert isinstance(end, Finished)
        scored = [event.logprob for event in events if isinstance(event, TokenEvent) and event.logprob]
        return {
            "index": index,
            "message": {"role": "assistant", "content": _text(events), "refusal": None},
            "logprobs": self._logprobs(scored) if scored else None,
            "finish_reason": end.reason,
            "stop_reason": end.stopped_by,
        }

    @staticmethod
    def _choice(index: int, delta: Json, logprobs: Json | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scored: Sequence[TokenLogprob]) -> Json:
        content = [
            self._scored(one.token, one.logprob)
            | {"top_logprobs": [self._scored(token, logprob) for token, logprob in one.top]}
            for one in scored
        ]
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float) -> Json:
        return {
            "token": token_text(self._codec, token),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(self._codec.token_bytes(token)),
        }


class CompletionFormat:
    """`echoed`: the prompt of each request, if the answer is to begin with it."""

    def __init__(self, head: Json, codec: TextCodec, echoed: Sequence[Prompt] | None) -> None:
        self.head = head
        self._codec = codec
        self._echoed = echoed
        self._offsets: dict[int, _Offsets] = {}
        self._started: set[int] = set()

    chunk_object = "text_completion"

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        echo = self._echo(index, event)
        if echo is not None:
            yield echo
        match event:
            case TokenEvent(text=text, logprob=logprob):
                if logprob is not None:
                    yield self._choice(index, text, self._logprobs(index, [logprob]))
                elif text:
                    yield self.text_choice(index, text)
            case Finished(reason=reason, text=text, stopped_by=stopped_by):
                yield self._choice(index, text) | {"finish_reason": reason, "stop_reason": stopped_by}
            case PromptScored():
                pass

    def text_choice(self, index: int, text: str) -> Json:
        return self._choice(index, text)

    def whole(self, index: int, events: Sequence[PromptScored | TokenEvent | Finished]) -> Json:
        end = events[-1]
        assert isinstance(end, Finished)
        pieces = [choice for event in events for choice in self.choices(index, event)]
        logprobs: Json | None = None
        for piece in pieces:
            if logprobs is None:
                logprobs = piece["logprobs"]
            elif piece["logprobs"] is not None:
                logprobs = {name: logprobs[name] + values for name, values in piece["logprobs"].items()}
        return self._choice(index, "".join(piece["text"] for piece in pieces), logprobs) | {
            "finish_reason": end.reason,
            "stop_reason": end.stopped_by,
        }

    def _echo(self, index: int, event: PromptScored | TokenEvent | Finished) -> Json | None:
        """The prompt, once, before everything else."""
        if self._echoed is None or index in self._started:
            return None
        self._started.add(index)
        prompt = self._echoed[index]
        text = self._codec.decode(prompt.tokens.tolist()) if prompt.text is None else prompt.text
        logprobs = None
        if isinstance(event, PromptScored):
            first = TokenLogprob(int(prompt.tokens[0]), 0.0)
            logprobs = self._logprobs(index, [first, *event.logprobs])
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None  # nothing comes before it
        return self._choice(index, text, logprobs)

    @staticmethod
    def _choice(index: int, text: str, logprobs: Json | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, index: int, scored: Sequence[TokenLogprob]) -> Json:
        offsets = self._offsets.setdefault(index, _Offsets(self._codec))
        return {
            "tokens": [token_text(self._codec, one.token) for one in scored],
            "token_logprobs": [max(one.logprob, _LEAST_LOGPROB) for one in scored],
            "top_logprobs": [
                {
                    token_text(self._codec, token): max(logprob, _LEAST_LOGPROB)
                    for token, logprob in (*one.top, (one.token, one.logprob))
                }
                for one in scored
            ],
            "text_offset": [offsets.next(one.token) for one in scored],
        }


class _Offsets:
    """At which character of a request's text each of its tokens begins."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def next(self, token: int) -> int:
        offset = self._characters
        if not self._codec.is_hidden(token):
            self._characters += len(self._decoder.decode(self._codec.token_bytes(token)))
        return offset


def _text(events: Sequence[PromptScored | TokenEvent | Finished]) -> str:
    return "".join(event.text for event in events if not isinstance(event, PromptScored))


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        # OpenAI's names for what a client predicts; here it is the server that does. Those rejected cost no token.
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.draft_tokens - usage.accepted_draft_tokens,
        },
    }


class ChunkWriter:
    """Server-sent events. Everything but the choice is the same in every chunk, and is written once; of a choice that
    is nothing but text, everything but the text."""

    def __init__(self, format: WireFormat, include_usage: bool) -> None:
        head = json.dumps(format.head | {"object": format.chunk_object}, ensure_ascii=False)
        self._format = format
        self._before = f'data: {head[:-1]}, "choices": ['
        self._after = '], "usage": null}\n\n' if include_usage else "]}\n\n"
        self._around_text: dict[int, tuple[str, str]] = {}  # of each choice that has begun

    def chunks(self, index: int, event: PromptScored | TokenEvent | Finished) -> str:
        text = self._text_chunk(index, event)
        if text is not None:
            return text
        chunks = "".join(map(self._chunk, self._format.choices(index, event)))
        if index not in self._around_text:
            before, after = self._chunk(self._format.text_choice(index, _TEXT)).split(_quoted(_TEXT))
            self._around_text[index] = before, after
        return chunks

    def texts(self, events: Sequence[tuple[int, Event]]) -> str | None:
        """Their chunks, if they are tokens of nothing but text in choices that have begun; otherwise None. Changes
        nothing, so that `chunks` may be asked for the same events afterwards."""
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

    def usage(self, usage: Usage) -> str:
        return f'{self._before}], "usage": {_dumps(usage_body(usage))}}}\n\n'


def error_event(body: Json) -> str:
    return f"data: {_dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"

_TEXT = "\0text"  # stands where text goes, and in nothing else that a chunk holds
_quoted: Callable[[str], str] = json.encoder.encode_basestring  # as `_dumps` writes a string
_dumps: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
