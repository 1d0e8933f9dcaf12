"""Calls of Ollama's chats and generations: a body as a request to the engine, and the format of its response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from rootstock.cache.retention.hint_types import MAX_TTL_S, CacheHints, HintOutcome, RetentionWish, Verdict
from rootstock.engine.request import requests_for
from rootstock.pipeline.model import ServedModel
from rootstock.server.formats.ollama.answers import AnswerTimes, OllamaFormat
from rootstock.server.formats.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from rootstock.server.wire.api_call import ApiCall, Json, call_of, hints_of
from rootstock.server.wire.hints.sent import SentHints
from rootstock.server.wire.sender import Sender
from rootstock.text.conversation.types import IgnoredField
from rootstock.text.output.deltas import TextOnly
from rootstock.text.prompts.prompt_tokenizer import PlacedMark, text_tokens


def ollama_call(
    model: ServedModel,
    body: OllamaChatRequest | OllamaGenerateRequest,
    sender: Sender,
    began_ns: int,
) -> ApiCall:
    """Renders and tokenizes: not for an event loop. Raises RequestError."""
    times = AnswerTimes(began_ns, time.monotonic_ns())
    body.refuse_unsupported()
    options, asked, name = body.options, body.constraint(), body.model or model.name
    sampling = options.sampling(model.vocab_size, model.defaults, body.asked_logprobs)
    stop = options.stopping(options.max_tokens, model.vocab_size)
    owner, id = sender.owner(body.salt), f"ollama-{uuid.uuid4().hex}"

    def hints_for(marks: Sequence[PlacedMark], warnings: tuple[IgnoredField, ...]) -> SentHints:
        hints = hints_of(body, sender.head, owner, marks, warnings)
        return with_keep_alive(hints, body.keep_alive_s(), sender.tenant)

    if isinstance(body, OllamaGenerateRequest) and body.raw:
        hints, tokenizer = hints_for((), tuple(body.ignored())), model.tokenizer
        tokenizer.refuse_more_chars(len(body.prompt))
        prompts, constraint = [text_tokens(tokenizer, body.prompt)], model.compiled(asked, owner)
        fields: Json = {"salt": owner.salt, "constraint": constraint, "hints": hints.cache}
        requests = requests_for(id, prompts, 1, sampling, stop, adapter=model.adapter, **fields)
        raw = OllamaFormat(name, False, TextOnly, model.model_tokenizer, times, hints)
        return call_of(model, raw, requests, stream=body.stream)
    conversation = body.conversation(model.model_tokenizer.template_names)
    chat = model.prepared_chat(conversation, owner, asked, body.reasoning_budget())
    hints, is_chat = hints_for(chat.prompt.marks, chat.ignored), isinstance(body, OllamaChatRequest)
    format = OllamaFormat(name, is_chat, chat.new_parser, model.model_tokenizer, times, hints)
    requests = chat.requests(id, 1, sampling, stop, hints=hints.cache)
    return call_of(model, format, requests, stream=body.stream, chat=chat)


def with_keep_alive(hints: SentHints, kept_s: float | None, tenant: str) -> SentHints:
    """Adds the wish of `keep_alive`: the cache keeps the prompt and its answer for so long. 0: it wishes nothing."""
    if not kept_s:
        return hints
    ttl_s = kept_s if 0 < kept_s <= MAX_TTL_S else MAX_TTL_S
    decided = hints.decided
    if ttl_s != kept_s:
        decided = (*decided, HintOutcome("keep_alive", Verdict.CLIPPED, f"at most {MAX_TTL_S:.0f} s"))
    cache = hints.cache or CacheHints(tenant)
    retentions = (*cache.retentions, RetentionWish("keep_alive", None, ttl_s))
    return replace(hints, cache=replace(cache, retentions=retentions), decided=decided)
