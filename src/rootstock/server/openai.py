"""One HTTP request of OpenAI's API → what the engine is asked and how it is answered."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rootstock.cache.checkpoints import Boundary
from rootstock.cache.plan import Tokens
from rootstock.engine.request import Request, RequestId, SamplingParams, StopParams
from rootstock.engine.text import TextCodec
from rootstock.errors import ModelNotFound
from rootstock.server.access import salt_of
from rootstock.server.boundaries import boundaries_of
from rootstock.server.chat import Conversation, chat_tokens, placed_chat
from rootstock.server.defaults import SamplingDefaults
from rootstock.server.openai_answer import ChatFormat, CompletionFormat, WireFormat
from rootstock.server.openai_request import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    Json,
    prompts_of,
)
from rootstock.server.tokenized import TokenizedPieces

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; a chat has no limit but the context's


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
    tokenized: TokenizedPieces  # of this codec
    defaults: SamplingDefaults
    wants_boundaries: bool = False  # it cannot resume just anywhere: say where later requests may diverge
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
        salt = salt_of(tenant, body.cache_salt)
        tokens, boundaries = self._chat_prompt(body.conversation(body.messages), salt)
        id = f"chatcmpl-{uuid.uuid4().hex}"
        return self._call(
            body,
            ChatFormat(self._head(id, "chat.completion"), self.codec),
            _requests(
                id,
                [tokens],
                body.choices_per_prompt,
                sampling,
                body.stopping(max_tokens),
                salt=salt,
                boundaries=boundaries,
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

    def _chat_prompt(self, conversation: Conversation, salt: str) -> tuple[Tokens, tuple[Boundary, ...]]:
        if not self.wants_boundaries:
            return chat_tokens(self.codec, conversation, partial(self.tokenized.encode_chat, salt=salt)), ()
        placed = placed_chat(self.codec, conversation)
        return placed.tokens, boundaries_of(self.codec, conversation, placed)

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
    boundaries: tuple[Boundary, ...] = (),
) -> tuple[Request, ...]:
    return tuple(
        Request(
            RequestId(f"{id}-{prompt * choices + choice}"),
            tokens,
            _reseeded(sampling, choice),
            stop,
            salt,
            prompt_logprobs,
            boundaries,
        )
        for prompt, tokens in enumerate(prompts)
        for choice in range(choices)
    )


def _reseeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Choices of one prompt with one seed would all be the same."""
    if sampling.seed is None or choice == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + choice)
