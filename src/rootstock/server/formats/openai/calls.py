"""Calls of OpenAI's chats and completions: a body as requests to the engine, and the format of its response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from rootstock.engine.request import Request, requests_for
from rootstock.errors import EmptyPrompt, InvalidParameter
from rootstock.pipeline.model import PreparedChat, PromptModel, ServedModel
from rootstock.server.answers.prompt_bodies import PreparedPrompt
from rootstock.server.formats.openai.answers import ChoiceFormat, OpenAIFormat
from rootstock.server.formats.openai.chat_answers import ChatFormat
from rootstock.server.formats.openai.completion_answers import CompletionFormat, Echo, Prompt
from rootstock.server.formats.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    PromptRequest,
    StreamOptions,
)
from rootstock.server.wire.api_call import ApiCall, Diagnose, Json, call_of, hints_of
from rootstock.server.wire.cache_diagnostics import openai_diagnose
from rootstock.server.wire.hints.sent import SentHints
from rootstock.server.wire.sender import Sender
from rootstock.text.limits import MAX_PROMPTS, refuse_more_than
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer, text_tokens

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; a chat has no limit but the context's


def chat_call(model: ServedModel, body: ChatCompletionRequest, sender: Sender) -> ApiCall:
    """Renders and tokenizes: not for an event loop. Raises RequestError."""
    body.refuse_unsupported()
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling(model.vocab_size, model.defaults, top_logprobs)
    owner = sender.owner(body.cache_salt)
    stop = body.stopping(max_tokens, model.vocab_size)
    conversation = body.conversation(body.messages, model.model_tokenizer)
    chat = model.prepared_chat(conversation, owner, body.constraint(), body.reasoning_budget())
    id, n = f"chatcmpl-{uuid.uuid4().hex}", body.choices_per_prompt
    hints = hints_of(body, sender.head, owner, chat.prompt.marks, chat.ignored)
    diagnose = None
    if body.prompt_cache_options is not None:
        diagnose = openai_diagnose(model, chat, body.comparison_response_id)
    model.fingerprints.add(owner, id, chat.fingerprint)
    format = ChatFormat(
        _head(model, id, "chat.completion", body.model),
        model.model_tokenizer,
        chat.new_parser,
        body.call_style(),
    )
    return _call(
        model,
        body,
        format,
        chat.requests(id, n, sampling, stop, diagnose=diagnose is not None, hints=hints.cache),
        hints,
        chat,
        diagnose,
    )


def completion_call(model: ServedModel, body: CompletionRequest, sender: Sender) -> ApiCall:
    """Makes the call of a completion. It tokenizes: do not call it on an event loop. Raises RequestError."""
    body.refuse_unsupported()
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = body.sampling(model.vocab_size, model.defaults, body.logprobs)
    stop = body.stopping(max_tokens, model.vocab_size)
    owner = sender.owner(body.cache_salt)
    id, n = f"cmpl-{uuid.uuid4().hex}", body.choices_per_prompt
    sent = _listed(body.prompt)
    asked = len(sent) * n
    if asked > model.most_requests:
        allowed = f"such that prompts × n is at most {model.most_requests:,}, not {asked:,}"
        raise InvalidParameter("n", n, allowed)
    prompts = prompts_of(sent, model.tokenizer)
    hints = hints_of(body, sender.head, owner)
    echo = Echo(prompts, n, scored=body.logprobs is not None) if body.echo else None
    return _call(
        model,
        body,
        CompletionFormat(_head(model, id, "text_completion", body.model), model.model_tokenizer, echo),
        requests_for(
            id,
            [prompt.tokens for prompt in prompts],
            n,
            sampling,
            stop,
            salt=owner.salt,
            prompt_logprobs=body.logprobs if body.echo else None,
            constraint=model.compiled(body.constraint(), owner),
            hints=hints.cache,
            adapter=model.adapter,
        ),
        hints,
    )


def prepared_prompt(model: PromptModel, body: PromptRequest, sender: Sender) -> PreparedPrompt:
    """Renders and tokenizes: not for an event loop. Raises RequestError."""
    if (body.messages is None) == (body.prompt is None):
        raise InvalidParameter("messages", body.messages, "given, or else 'prompt', and not both")
    owner = sender.owner(body.cache_salt)
    if body.messages is not None:
        chat = model.rendered_chat(body.conversation(body.messages, model.model_tokenizer), owner)
        return PreparedPrompt.of_chat(chat)
    sent = _listed(body.prompt)
    if len(sent) != 1:
        raise InvalidParameter("prompt", body.prompt, "one prompt")
    [prompt] = prompts_of(sent, model.tokenizer)
    if len(prompt.tokens) == 0:
        raise EmptyPrompt
    return PreparedPrompt(prompt.tokens, owner.salt, adapter=model.adapter)


def _call(
    model: ServedModel,
    body: GenerationFields,
    format: ChoiceFormat,
    requests: tuple[Request, ...],
    hints: SentHints,
    chat: PreparedChat | None = None,
    diagnose: Diagnose | None = None,
) -> ApiCall:
    options = body.stream_options or StreamOptions()
    continuous_prompt_tokens = None
    if options.continuous_usage_stats:
        continuous_prompt_tokens = sum(len(one.tokens) for one in requests[:: body.choices_per_prompt])
    return call_of(
        model,
        OpenAIFormat(format, options.include_usage, diagnose, hints, continuous_prompt_tokens),
        requests,
        choices_per_prompt=body.choices_per_prompt,
        stream=bool(body.stream),
        strict_max_tokens=bool(body.strict_max_tokens),
        chat=chat,
    )


def _head(model: ServedModel, id: str, object: str, asked: str | None) -> Json:
    return {"id": id, "object": object, "created": int(time.time()), "model": asked or model.name}


def _listed(prompt: Any) -> list[str | list[int]]:
    """Returns the prompts of text, token ids, or a list of either. Raises InvalidParameter and EmptyPrompt."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return [prompt]
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
    return prompt


def prompts_of(prompts: Sequence[str | list[int]], tokenizer: PromptTokenizer) -> list[Prompt]:
    """Tokenizes prompts: not for an event loop. Refuses one that cannot fit before the others are tokenized."""
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer.refuse_more_chars(len(prompt))
    return [_prompt_of(prompt, tokenizer) for prompt in prompts]


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
