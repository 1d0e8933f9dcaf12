"""Calls: an HTTP request of OpenAI's API as requests to the engine, and the format of its response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rootstock.cache.types import Tokens
from rootstock.engine.limits import MAX_LOGPROBS, MAX_PROMPTS, refuse_more_than
from rootstock.engine.prompts.boundaries import chat_with_boundaries
from rootstock.engine.prompts.chat import Conversation
from rootstock.engine.prompts.prompt_tokenizer import (
    ChatPrompt,
    PromptTokenizer,
    chat_prompt,
    escaped,
    text_tokens,
)
from rootstock.engine.prompts.salt import salt_of
from rootstock.engine.request import Request, requests_for
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.engine.tokenizer import ModelTokenizer
from rootstock.errors import EmptyPrompt, InvalidParameter, ModelNotFound, TooManyLogprobs
from rootstock.server.openai.responses import ChatFormat, CompletionFormat, Echo, Prompt, WireFormat
from rootstock.server.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    ExplainRequest,
    GenerationFields,
    Json,
    TemplateFields,
)

# Header with the length that an answer may have, if `max_tokens` was lowered. Not every stream has usage.
MAX_TOKENS_HEADER = "X-Max-Tokens"
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; a chat has no limit but the context's


@dataclass(frozen=True, slots=True)
class Call:
    format: WireFormat
    requests: tuple[Request, ...]  # prompt by prompt, its choices side by side
    choices_per_prompt: int
    stream: bool
    include_usage: bool
    lowered_max_tokens: int | None = None  # the lowest, if the context has less room than `max_tokens`

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


def _most_tokens(request: Request, context_limit: int) -> int:
    """Returns the length that an answer can have."""
    room = max(0, context_limit - len(request.tokens))
    return room if request.stop.max_tokens is None else min(room, request.stop.max_tokens)


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    vocab_size: int
    tokenizer: PromptTokenizer
    defaults: SamplingDefaults
    context_limit: int  # tokens of a prompt and its answer
    most_requests: int  # running and waiting in the engine at once
    parse_special_tokens: bool = False  # special tokens in the text of messages are control tokens
    wants_boundaries: bool = False  # the model resumes only at checkpoints: boundaries place them
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_tokenizer(self) -> ModelTokenizer:
        return self.tokenizer.model_tokenizer

    def refuse_other(self, asked: str | None) -> None:
        if asked is not None and asked != self.name:
            raise ModelNotFound(asked, self.name)

    def chat_call(self, body: ChatCompletionRequest, tenant: str) -> Call:
        """Renders and tokenizes: not for an event loop. Raises RequestError."""
        self.refuse_other(body.model)
        body.refuse_unsupported()
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = body.sampling(self.vocab_size, self.defaults, top_logprobs)
        salt = salt_of(tenant, body.cache_salt)
        stop = body.stopping(max_tokens, self.vocab_size)
        prompt = self._chat_prompt(self._conversation(body, body.messages), salt, tenant)
        id, n = f"chatcmpl-{uuid.uuid4().hex}", body.choices_per_prompt
        return self._call(
            body,
            ChatFormat(self._head(id, "chat.completion"), self.model_tokenizer),
            requests_for(
                id,
                [prompt.tokens],
                n,
                sampling,
                stop,
                salt=salt,
                boundaries=prompt.boundaries,
                place=prompt.place,
            ),
        )

    def completion_call(self, body: CompletionRequest, tenant: str) -> Call:
        """Tokenizes: not for an event loop. Raises RequestError."""
        self.refuse_other(body.model)
        body.refuse_unsupported()
        max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(self.vocab_size, self.defaults, body.logprobs)
        stop = body.stopping(max_tokens, self.vocab_size)
        prompts = prompts_of(body.prompt, self.tokenizer)
        id, n = f"cmpl-{uuid.uuid4().hex}", body.choices_per_prompt
        asked = len(prompts) * n
        if asked > self.most_requests:
            allowed = f"such that prompts × n is at most {self.most_requests:,}, not {asked:,}"
            raise InvalidParameter("n", n, allowed)
        echo = Echo(prompts, n, scored=body.logprobs is not None) if body.echo else None
        return self._call(
            body,
            CompletionFormat(self._head(id, "text_completion"), self.model_tokenizer, echo),
            requests_for(
                id,
                [prompt.tokens for prompt in prompts],
                n,
                sampling,
                stop,
                salt=salt_of(tenant, body.cache_salt),
                prompt_logprobs=body.logprobs if body.echo else None,
            ),
        )

    def explained_prompt(self, body: ExplainRequest, salt: str, tenant: str) -> tuple[Tokens, int]:
        """Returns a prompt's tokens and how many of them are sampled ids of earlier answers.

        Renders and tokenizes: not for an event loop. Raises RequestError.
        """
        self.refuse_other(body.model)
        if (body.messages is None) == (body.prompt is None):
            raise InvalidParameter("messages", body.messages, "given, or else 'prompt', and not both")
        if body.messages is not None:
            prompt = chat_prompt(self._conversation(body, body.messages), self.tokenizer, salt, tenant)
            return prompt.tokens, prompt.sampled_tokens
        prompts = prompts_of(body.prompt, self.tokenizer)
        if len(prompts) != 1:
            raise InvalidParameter("prompt", body.prompt, "one prompt")
        if len(prompts[0].tokens) == 0:
            raise EmptyPrompt
        return prompts[0].tokens, 0

    def _conversation(self, body: TemplateFields, messages: Sequence[Json]) -> Conversation:
        conversation = body.conversation(messages, self.model_tokenizer)
        return escaped(conversation, self.tokenizer, parse=self.parse_special_tokens)

    def _chat_prompt(self, conversation: Conversation, salt: str, tenant: str) -> ChatPrompt:
        if not self.wants_boundaries:
            return chat_prompt(conversation, self.tokenizer, salt, tenant)
        return chat_with_boundaries(conversation, self.tokenizer, salt, tenant)

    def _call(self, body: GenerationFields, format: WireFormat, requests: tuple[Request, ...]) -> Call:
        lowered = None
        if not body.strict_max_tokens:
            fitted = tuple(request.fitted(self.context_limit) for request in requests)
            lengths = [
                new.stop.max_tokens for new, old in zip(fitted, requests, strict=True) if new is not old
            ]
            requests, lowered = fitted, min((most for most in lengths if most is not None), default=None)
        return Call(
            format,
            requests,
            body.choices_per_prompt,
            stream=bool(body.stream),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            lowered_max_tokens=lowered,
        )

    def _head(self, id: str, object: str) -> Json:
        return {"id": id, "object": object, "created": int(time.time()), "model": self.name}


def prompts_of(prompt: Any, tokenizer: PromptTokenizer) -> list[Prompt]:
    """Returns the prompts of text, token ids, or a list of either. Tokenizes: not for an event loop."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return [_prompt_of(prompt, tokenizer)]
    if not isinstance(prompt, list):
        raise InvalidParameter("prompt", prompt, "a string, a list of token ids, or a list of either")
    if not prompt:
        raise EmptyPrompt()
    if type(prompt[0]) is not int:
        refuse_more_than(MAX_PROMPTS, prompt, "prompt")
    ids = type(prompt[0]) is int
    for i, each in enumerate(prompt):
        if type(each) is not int if ids else not isinstance(each, str) and not _are_ids(each):
            allowed = "a token id" if ids else "a string or a list of token ids"
            raise InvalidParameter(f"prompt[{i}]", each, allowed)
    return [_prompt_of(each, tokenizer) for each in prompt]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _prompt_of(prompt: str | list[int], tokenizer: PromptTokenizer) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text_tokens(tokenizer, prompt), prompt)
    least, largest = min(prompt), max(prompt)
    if not 0 <= least <= largest < 2**31:
        wrong = least if least < 0 else largest
        raise InvalidParameter("prompt", wrong, "token ids of the model's vocabulary")
    return Prompt(np.array(prompt, dtype=np.int32), None)
