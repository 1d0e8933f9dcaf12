"""OpenAI's wire format: what its requests mean to the engine, and what its answers look like.

Fields that OpenAI does not have (top_k, min_p, cache_salt, …) are named as other OpenAI-compatible servers name
them. Fields that are not known are ignored, as those servers do; a known field that cannot be obeyed and would
change the answer is refused.
"""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rootstock.cache.plan import Tokens
from rootstock.engine.request import (
    Finished,
    PromptScored,
    Request,
    RequestId,
    SamplingParams,
    StopParams,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from rootstock.engine.text import TextCodec, token_text
from rootstock.errors import EmptyPrompt, InvalidParameter, ModelNotFound, Unsupported
from rootstock.server.chat import chat_tokens, chosen_tools, refuse_surrogates, text_tokens
from rootstock.server.defaults import SamplingDefaults

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512  # characters
MAX_TOP_LOGPROBS = 20
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; a chat has no limit but the context's
_LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's stand-in

Json = dict[str, Any]


# ---- requests


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Wire):
    include_usage: bool = False


class TemplateFields(Wire):
    """What a chat template is given beside the messages."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def tokens_of(self, messages: Sequence[Json], codec: TextCodec) -> Tokens:
        """Renders and tokenises: not for an event loop."""
        options = {"add_generation_prompt": self.add_generation_prompt, **(self.chat_template_kwargs or {})}
        if "chat_template" in options:
            raise Unsupported("chat_template_kwargs.chat_template", "Serve with --chat-template FILE.")
        if self.continue_final_message:
            if options["add_generation_prompt"]:
                raise InvalidParameter("add_generation_prompt", True, "false with 'continue_final_message'")
            options["continue_final_message"] = True
        return chat_tokens(codec, messages, chosen_tools(self.tools, self.tool_choice), options)


class GenerationFields(Wire):
    """What both routes share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, description="0 and -1: off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    prompt_cache_key: Annotated[str | None, Field(description="a hint, never part of what is cached")] = None
    cache_salt: Annotated[str | None, Field(description="prefixes are shared only within one salt")] = None

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    def sampling(
        self, vocab_size: int, defaults: SamplingDefaults, top_logprobs: int | None
    ) -> SamplingParams:
        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        return SamplingParams(
            temperature=given(self.temperature, defaults.temperature),
            top_p=given(self.top_p, defaults.top_p),
            top_k=max(0, given(self.top_k, defaults.top_k)),
            min_p=given(self.min_p, defaults.min_p),
            repetition_penalty=given(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=given(self.presence_penalty, 0.0),
            frequency_penalty=given(self.frequency_penalty, 0.0),
            logit_bias=_biases(self.logit_bias or {}, vocab_size),
            seed=self.seed,
            top_logprobs=top_logprobs,
        )

    def stopping(self, max_tokens: int | None) -> StopParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", stop, f"at most {MAX_STOP_STRINGS} strings")
        for text in stop:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidParameter("stop", text, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        min_tokens = self.min_tokens or 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise InvalidParameter("min_tokens", min_tokens, f"at most max_tokens, which is {max_tokens}")
        return StopParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_strings=tuple(stop),
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatCompletionRequest(GenerationFields, TemplateFields):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None

    def refuse_unsupported(self) -> None:
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise Unsupported("response_format", "Only {'type': 'text'} is.")
        if self.modalities is not None and self.modalities != ["text"]:
            raise Unsupported("modalities", "Only ['text'] is.")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("logprobs", self.logprobs, "true with 'top_logprobs'")


class CompletionRequest(GenerationFields):
    # Any: pydantic would try four alternatives, element by element, and answer with all that is wrong in each.
    prompt: Annotated[Any, Field(description="text, token ids, or a list of either")]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def refuse_unsupported(self) -> None:
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise Unsupported("best_of", "Ask for n choices, and choose.")
        if self.suffix:
            raise Unsupported("suffix", "Put the marks of the model's own infilling format into 'prompt'.")


class ExplainRequest(TemplateFields):
    """Either `messages`, as in a chat, or `prompt`, as in a completion."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    prompt: Any = None
    cache_salt: str | None = None

    def tokens(self, codec: TextCodec) -> Tokens:
        """Renders and tokenises: not for an event loop."""
        if (self.messages is None) == (self.prompt is None):
            raise InvalidParameter("messages", self.messages, "given, or else 'prompt', and not both")
        if self.messages is not None:
            return self.tokens_of(self.messages, codec)
        prompts = prompts_of(self.prompt, codec)
        if len(prompts) != 1:
            raise InvalidParameter("prompt", self.prompt, "one prompt")
        if len(prompts[0].tokens) == 0:
            raise EmptyPrompt
        return prompts[0].tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Tokens
    text: str | None  # None: given as tokens


def prompts_of(prompt: Any, codec: TextCodec) -> list[Prompt]:
    """Text, token ids, or a list of either. Tokenises: not for an event loop."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return [_prompt_of(prompt, codec)]
    if not isinstance(prompt, list):
        raise InvalidParameter("prompt", prompt, "a string, a list of token ids, or a list of either")
    if not prompt:
        raise EmptyPrompt()
    ids = type(prompt[0]) is int
    for i, each in enumerate(prompt):
        if type(each) is not int if ids else not isinstance(each, str) and not _are_ids(each):
            allowed = "a token id" if ids else "a string or a list of token ids"
            raise InvalidParameter(f"prompt[{i}]", each, allowed)
    return [_prompt_of(each, codec) for each in prompt]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _prompt_of(prompt: str | list[int], codec: TextCodec) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text_tokens(codec, prompt), prompt)
    if not 0 <= min(prompt) <= max(prompt) < 2**31:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise InvalidParameter("prompt", wrong, "token ids of the model's vocabulary")
    return Prompt(np.array(prompt, dtype=np.int32), None)


def _biases(logit_bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in logit_bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= vocab_size:
            allowed = f"a mapping of token ids from 0 to {vocab_size - 1} to biases"
            raise InvalidParameter("logit_bias", key, allowed)
        if not -100 <= bias <= 100:
            raise InvalidParameter(f"logit_bias.{key}", bias, "from -100 to 100")
        biases[int(key)] = bias
    return biases


# ---- calls: one HTTP request, ready for the engine


@dataclass(frozen=True, slots=True)
class Call:
    format: WireFormat
    requests: tuple[Request, ...]  # prompt by prompt, its choices side by side
    choices_per_prompt: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    vocab_size: int
    codec: TextCodec
    defaults: SamplingDefaults
    created: int = field(default_factory=lambda: int(time.time()))

    def refuse_other(self, asked: str | None) -> None:
        if asked is not None and asked != self.name:
            raise ModelNotFound(asked, self.name)

    def chat_call(self, body: ChatCompletionRequest, tenant: str) -> Call:
        """Renders and tokenises: not for an event loop. Raises RequestError."""
        self.refuse_other(body.model)
        body.refuse_unsupported()
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = body.sampling(self.vocab_size, self.defaults, top_logprobs)
        id = f"chatcmpl-{uuid.uuid4().hex}"
        return self._call(
            body,
            ChatFormat(self._head(id, "chat.completion"), self.codec),
            _requests(
                id,
                [body.tokens_of(body.messages, self.codec)],
                body.choices_per_prompt,
                sampling,
                body.stopping(max_tokens),
                salt=salt_of(tenant, body.cache_salt),
            ),
        )

    def completion_call(self, body: CompletionRequest, tenant: str) -> Call:
        """Tokenises: not for an event loop. Raises RequestError."""
        self.refuse_other(body.model)
        body.refuse_unsupported()
        max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(self.vocab_size, self.defaults, body.logprobs)
        prompts = prompts_of(body.prompt, self.codec)
        id = f"cmpl-{uuid.uuid4().hex}"
        n = body.choices_per_prompt
        echoed = [prompt for prompt in prompts for _ in range(n)] if body.echo else None
        return self._call(
            body,
            CompletionFormat(self._head(id, "text_completion"), self.codec, echoed),
            _requests(
                id,
                [prompt.tokens for prompt in prompts],
                n,
                sampling,
                body.stopping(max_tokens),
                salt=salt_of(tenant, body.cache_salt),
                prompt_logprobs=body.logprobs if body.echo else None,
            ),
        )

    def _call(self, body: GenerationFields, format: WireFormat, requests: tuple[Request, ...]) -> Call:
        return Call(
            format,
            requests,
            body.choices_per_prompt,
            stream=bool(body.stream),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )

    def _head(self, id: str, object: str) -> Json:
        return {"id": id, "object": object, "created": int(time.time()), "model": self.name}


def _requests(
    id: str,
    prompts: Sequence[Tokens],
    choices: int,
    sampling: SamplingParams,
    stop: StopParams,
    *,
    salt: str,
    prompt_logprobs: int | None = None,
) -> tuple[Request, ...]:
    return tuple(
        Request(
            RequestId(f"{id}-{prompt * choices + choice}"),
            tokens,
            _reseeded(sampling, choice),
            stop,
            salt,
            prompt_logprobs,
        )
        for prompt, tokens in enumerate(prompts)
        for choice in range(choices)
    )


def _reseeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Choices of one prompt with one seed would all be the same."""
    if sampling.seed is None or choice == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + choice)


def salt_of(tenant: str, salt: str | None) -> str:
    """A proxy's header and a client's field, so that no field leads into another tenant's namespace."""
    refuse_surrogates(salt or "", "cache_salt")
    return f"{tenant}\0{salt or ''}" if tenant or salt else ""


# ---- answers


class WireFormat(Protocol):
    """How one HTTP request's events look on the wire. Keeps what its answer needs of earlier events."""

    head: Json  # id, object, created, model

    @property
    def chunk_object(self) -> str: ...

    def choices(self, index: int, event: PromptScored | TokenEvent | Finished) -> Iterator[Json]:
        """The streamed choices that an event becomes."""
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
                    yield self._choice(index, {"content": text})
            case Finished(reason=reason, text=text, stopped_by=stopped_by):
                if text:
                    yield self._choice(index, {"content": text})
                yield self._choice(index, {}) | {"finish_reason": reason, "stop_reason": stopped_by}
            case PromptScored():
                pass

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
                    yield self._choice(index, text)
            case Finished(reason=reason, text=text, stopped_by=stopped_by):
                yield self._choice(index, text) | {"finish_reason": reason, "stop_reason": stopped_by}
            case PromptScored():
                pass

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
    }


class ChunkWriter:
    """Server-sent events. Everything but the choice is the same in every chunk, and is written once."""

    def __init__(self, format: WireFormat, include_usage: bool) -> None:
        head = json.dumps(format.head | {"object": format.chunk_object}, ensure_ascii=False)
        self._before = f'data: {head[:-1]}, "choices": ['
        self._after = '], "usage": null}\n\n' if include_usage else "]}\n\n"

    def chunk(self, choice: Json) -> str:
        return f"{self._before}{_dumps(choice)}{self._after}"

    def usage(self, usage: Usage) -> str:
        return f'{self._before}], "usage": {_dumps(usage_body(usage))}}}\n\n'


def error_event(body: Json) -> str:
    return f"data: {_dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"

_dumps: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
