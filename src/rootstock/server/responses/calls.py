"""Calls of the Responses API: a body as a request to the engine, and the format of its response."""

from __future__ import annotations

import functools
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rootstock.engine.conversation.types import Conversation, Message, Text
from rootstock.engine.limits import MAX_MESSAGES, refuse_more_than
from rootstock.engine.prompts.salt import salt_of
from rootstock.errors import InvalidParameter, MissingParameter, ResponseNotFound, TooManyLogprobs
from rootstock.server.cache_diagnostics import openai_diagnose
from rootstock.server.hints.headers import NO_HEAD, HeaderHints
from rootstock.server.hints.sent import sent_hints
from rootstock.server.responses.answers import Answering, ResponseFormat
from rootstock.server.responses.items import Unseal, kind_of, messages_of
from rootstock.server.responses.output import OutputSettings
from rootstock.server.responses.schema import ResponseRequest, echoed, json_text
from rootstock.server.responses.sealing import Sealer
from rootstock.server.responses.store import NewResponse, ResponseStore
from rootstock.server.responses.tools import Toolbox, tool_choice_of
from rootstock.server.wire import Call, Json, PreparedChat, ServedModel

# Log-probabilities with their alternatives, of one response. They are kept until its end, which repeats them.
MAX_RESPONSE_LOGPROBS = 131_072

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})([0-9a-f]{4,8})")


@dataclass(frozen=True, slots=True)
class Responses:
    """Maker of calls, and owner of the stored responses that requests refer to."""

    store: ResponseStore
    sealer: Sealer

    def call(
        self, model: ServedModel, body: ResponseRequest, tenant: str, head: HeaderHints = NO_HEAD
    ) -> Call:
        """Reads the store, renders and tokenizes: not for an event loop. Raises RequestError."""
        hex = uuid.uuid4().hex
        prepared = self._prepared(model, body, tenant)
        top_logprobs = body.wanted_logprobs
        sampling = body.sampling(model.vocab_size, model.defaults, top_logprobs)
        stop = body.stopping(body.max_output_tokens, model.vocab_size)
        settings = OutputSettings(
            f"resp_{hex}",
            prepared.tools,
            body.parallel_tool_calls is not False,
            partial(self.sealer.seal, tenant=tenant) if body.wants_sealed_reasoning else None,
        )
        keep = None
        if body.store is not False:
            own = json_text(prepared.own, "input")

            def keep(head: str, output: str) -> None:
                new = NewResponse(settings.response_id, body.previous_response_id, head, own, output)
                self.store.put(_owner(tenant), new)

        chat, id = prepared.chat, settings.response_id
        hints = sent_hints(body, head, tenant, body.cache_salt, chat.prompt.marks)
        diagnose = openai_diagnose(model, chat, tenant, body.comparison_response_id)
        model.fingerprints.add(chat.salt, tenant, id, chat.fingerprint)
        fields = _fields(model, body, prepared, id, sampling.temperature, sampling.top_p)
        answering = Answering(
            fields,
            json_text(fields, "body"),
            settings,
            chat.new_parser,
            model.model_tokenizer,
            model.stored_tokens(len(chat.prompt.tokens)),
            keep,
            diagnose,
            hints,
        )
        call = model.call(
            ResponseFormat(answering),
            chat.requests(id, 1, sampling, stop, diagnose=diagnose is not None, hints=hints.cache),
            stream=bool(body.stream),
            dropped=chat.dropped,
            ignored_tools=tuple(prepared.tools.ignored),
        )
        _refuse_many_logprobs(call, model.context_limit)
        return call

    def chat(self, model: ServedModel, body: ResponseRequest, tenant: str) -> PreparedChat:
        """Reads the store, renders and tokenizes: not for an event loop. Raises RequestError."""
        return self._prepared(model, body, tenant).chat

    def _prepared(self, model: ServedModel, body: ResponseRequest, tenant: str) -> _Prepared:
        body.refuse_unsupported()
        own = self._own_items(body, tenant)
        history = []
        if body.previous_response_id is not None:
            history = self.store.history(_owner(tenant), body.previous_response_id)
        if not (own or history or body.instructions):
            raise MissingParameter("input")
        tools = Toolbox()
        tools.add(body.tools or [], "tools")
        messages = messages_of(history, own, tools, self._unseal(model, tenant))
        if body.instructions:
            messages.insert(0, Message("system", (Text(body.instructions),), origin="instructions"))
        choice = tool_choice_of(body.tool_choice, tools, parallel=body.parallel_tool_calls is not False)
        options, effort = body.template_options(model.model_tokenizer.template_names)
        conversation = Conversation(messages, tools.shown, choice, options)
        chat = model.prepared_chat(conversation, salt_of(tenant, body.cache_salt), tenant, body.constraint())
        return _Prepared(own, tools, effort, chat)

    def _unseal(self, model: ServedModel, tenant: str) -> Unseal:
        """Returns a function that opens the seals of one request. Raises PromptTextTooLong.

        A seal is compressed: a small body with one of them many times would hold gigabytes.
        """
        chars = 0

        def unseal(sealed: str) -> str | None:
            nonlocal chars
            text = self.sealer.open(sealed, tenant)
            chars += len(text or "")
            model.tokenizer.refuse_more_chars(chars)
            return text

        return unseal

    def _own_items(self, body: ResponseRequest, tenant: str) -> list[Any]:
        """Returns the request's own items, with stored items in the place of references."""
        match body.input:
            case None:
                return []
            case str(text):
                return [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
                ]
            case list(items):
                refuse_more_than(MAX_MESSAGES, items, "input")
                outputs = functools.cache(partial(self._output, _owner(tenant)))  # many items of one response
                return [_resolved(item, f"input[{i}]", outputs) for i, item in enumerate(items)]
            case other:
                raise InvalidParameter("input", other, "a string or a list of items")

    def _output(self, owner: str, id: str) -> Sequence[Any]:
        try:
            return self.store.get(owner, id).output
        except ResponseNotFound:
            return ()


@dataclass(frozen=True, slots=True)
class _Prepared:
    own: Sequence[Any]  # items of the request itself
    tools: Toolbox
    effort: str | None  # of reasoning, if the template knows it
    chat: PreparedChat


def _fields(
    model: ServedModel, body: ResponseRequest, prepared: _Prepared, id: str, temperature: float, top_p: float
) -> Json:
    """Returns the fields of the response's object that are known before the answer. Raises InvalidParameter."""
    fields: Json = {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model or model.name,
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": prepared.effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": temperature,
        "top_logprobs": body.wanted_logprobs or 0,
        "top_p": top_p,
        "truncation": "disabled",
    }
    if prepared.tools.ignored:
        fields["ignored_tools"] = prepared.tools.ignored
    return fields | echoed(
        {
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "prompt_cache_key": body.prompt_cache_key,
            "safety_identifier": body.safety_identifier,
            "text": {"format": body.text_format, "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "user": body.user,
        }
    )


def _resolved(item: Any, path: str, outputs: Callable[[str], Sequence[Any]]) -> Any:
    """Returns an item, or the stored one to which it refers. `outputs` returns the output of a stored response."""
    if kind_of(item, path) != "item_reference":
        return item
    id = item.get("id")
    match = _ITEM_ID.fullmatch(id) if isinstance(id, str) else None
    if match is not None:
        output, index = outputs(f"resp_{match[1]}"), int(match[2], 16)
        if index < len(output) and output[index].get("id") == id:
            return output[index]
    raise InvalidParameter(f"{path}.id", id, "the id of an item in the output of a stored response")


def _owner(tenant: str) -> str:
    """Returns the name under which the store keeps a tenant's responses."""
    return salt_of(tenant, None)


def _refuse_many_logprobs(call: Call, context_limit: int) -> None:
    """Raises TooManyLogprobs."""
    [request] = call.requests
    top = request.sampling.top_logprobs
    if top is None:
        return
    room = max(0, context_limit - len(request.tokens))
    most = room if request.stop.max_tokens is None else request.stop.max_tokens
    if most * (1 + top) > MAX_RESPONSE_LOGPROBS:
        raise TooManyLogprobs(
            prompts=1,
            choices=1,
            prompt_tokens=0,
            max_tokens=most,
            top=top,
            count=most * (1 + top),
            limit=MAX_RESPONSE_LOGPROBS,
        )


def input_items(id: str, items: Sequence[Any]) -> list[Json]:
    """Returns a response's own input as its items are listed: each has an id, and messages are complete."""
    listed = []
    for i, item in enumerate(items):
        kind = kind_of(item, f"input[{i}]")
        item = {**item, "type": kind, "id": item.get("id") or f"{kind}_{id.removeprefix('resp_')}i{i:x}"}
        if kind == "message":
            item.setdefault("status", "completed")
            if isinstance(item.get("content"), str):
                text = {"type": "input_text", "text": item["content"]}
                if item.get("role") == "assistant":
                    text = {"type": "output_text", "text": item["content"], "annotations": []}
                item["content"] = [text]
        listed.append(item)
    return listed
