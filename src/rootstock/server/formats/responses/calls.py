"""Calls of the Responses API: a body as a request to the engine, and the format of its response."""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.errors import (
    HistoryTooLong,
    InvalidParameter,
    JsonTooComplex,
    MissingParameter,
    ResponseNotFound,
    TooManyLogprobs,
    Unsupported,
)
from rootstock.pipeline.model import PreparedChat, PromptModel, RenderedChat, ServedModel
from rootstock.server.formats.responses.answers import Answering, CompactionFormat, ResponseFormat
from rootstock.server.formats.responses.compaction import MAX_SUMMARY_TOKENS, TRIGGER, stays
from rootstock.server.formats.responses.compaction import REQUEST as SUMMARY_REQUEST
from rootstock.server.formats.responses.items import Unseal, kept_items, kind_of, messages_of
from rootstock.server.formats.responses.output import OutputSettings
from rootstock.server.formats.responses.schema import ResponseRequest, echoed, json_text
from rootstock.server.formats.responses.sealing import Sealer
from rootstock.server.formats.responses.store import NewResponse, TenantResponses
from rootstock.server.formats.responses.tools import Toolbox, echoed_tool, tool_choice_of
from rootstock.server.http.request_bodies import check_shape, count_more_bytes
from rootstock.server.wire.api_call import ApiCall, Json, call_of, hints_of
from rootstock.server.wire.cache_diagnostics import openai_diagnose
from rootstock.server.wire.fields import USUAL_VERBOSITY
from rootstock.server.wire.sender import Sender
from rootstock.text.conversation.types import Conversation, Message, Text
from rootstock.text.limits import MAX_MESSAGES, refuse_more_than

# Log-probabilities with their alternatives, of one response. They are kept until its end, which repeats them.
MAX_RESPONSE_LOGPROBS = 131_072

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})([0-9a-f]{4,8})")


@dataclass(frozen=True, slots=True)
class Responses:
    """Maker of one sender's calls, with the stored responses to which they refer."""

    sender: Sender
    store: TenantResponses
    sealer: Sealer
    most_bytes: int  # of a history, and of the items that references stand for: as much as a body may have
    id_prefix: str = ""  # hexadecimal digits

    def call(self, model: ServedModel, body: ResponseRequest) -> ApiCall:
        """Reads the store, renders and tokenizes: not for an event loop. Raises RequestError."""
        prepared = self._prepared(model, body)
        call = self._call(model, body, prepared)
        _refuse_many_logprobs(call, model.context_limit)
        return call

    def compaction(self, model: ServedModel, body: ResponseRequest) -> ApiCall:
        """Makes the call of a summary, whose answer is a compacted conversation, and which is not stored.

        Reads the store, renders and tokenizes: not for an event loop. Raises RequestError.
        """
        if body.model is None:
            raise MissingParameter("model")  # as in the API, where other routes have a default here
        if body.stream:
            raise Unsupported("stream", "A compacted conversation has no events. Leave it out.")
        prepared = self._prepared(model, body, compacts=True)
        return self._call(model, body.model_copy(update={"store": False}), prepared)

    def _call(self, model: ServedModel, body: ResponseRequest, prepared: _Prepared) -> ApiCall:
        hex = self.id_prefix + uuid.uuid4().hex[len(self.id_prefix) :]
        top_logprobs = None if prepared.compacts else body.wanted_logprobs
        sampling = body.sampling(model.vocab_size, model.defaults, top_logprobs)
        most_tokens = body.max_output_tokens
        if most_tokens is None and prepared.compacts:
            most_tokens = MAX_SUMMARY_TOKENS
        elif most_tokens is None and top_logprobs is not None:
            most_tokens = MAX_RESPONSE_LOGPROBS // (1 + top_logprobs)
        stop = body.stopping(most_tokens, model.vocab_size)
        seals = prepared.compacts or body.wants_sealed_reasoning
        settings = OutputSettings(
            f"resp_{hex}",
            prepared.tools,
            body.parallel_tool_calls is not False,
            self.sealer.seal if seals else None,
        )
        keep = None
        if body.store is not False:
            own = json_text(kept_items(prepared.own, self.sealer.open), "input")

            def keep(head: str, output: str) -> None:
                new = NewResponse(settings.response_id, body.previous_response_id, head, own, output)
                self.store.put(new)

        chat, id = prepared.chat, settings.response_id
        hints = hints_of(body, self.sender.head, chat.owner, chat.prompt.marks, chat.ignored)
        diagnose = None
        if body.prompt_cache_options is not None:
            diagnose = openai_diagnose(model, chat, body.comparison_response_id)
        model.fingerprints.add(chat.owner, id, chat.fingerprint)
        fields = _fields(model, body, prepared, id, sampling)
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
            prepared.compacts,
        )
        kept = prepared.kept
        return call_of(
            model,
            ResponseFormat(answering) if kept is None else CompactionFormat(answering, input_items(id, kept)),
            chat.requests(id, 1, sampling, stop, diagnose=diagnose is not None, hints=hints.cache),
            stream=bool(body.stream),
            chat=chat,
            ignored_tools=tuple(prepared.tools.ignored),
        )

    def rendered_chat(self, model: PromptModel, body: ResponseRequest) -> RenderedChat:
        """Reads the store, renders and tokenizes: not for an event loop. Raises RequestError."""
        return model.rendered_chat(self._read(model, body).conversation, self.sender.owner(body.cache_salt))

    def _prepared(self, model: ServedModel, body: ResponseRequest, *, compacts: bool = False) -> _Prepared:
        """Prepares a request's prompt. `compacts`: it asks for a compacted conversation."""
        read = self._read(model, body, compacts=compacts)
        constraint = None if read.summarizes else body.constraint()
        owner = self.sender.owner(body.cache_salt)
        chat = model.prepared_chat(read.conversation, owner, constraint, body.reasoning_budget())
        effort = None if body.reasoning is None else body.reasoning.effort
        if any(one.field == "reasoning.effort" for one in read.conversation.ignored):
            effort = None
        if read.summarizes:  # the conversation does not go on from its summary's request
            chat = replace(chat, next_turn=None)
        kept = None
        if compacts:
            stay = [item for item in (*read.history, *read.own) if stays(item, kind_of(item, "input"))]
            kept = json.loads(json_text(stay, "input"))
        return _Prepared(read.own, read.tools, effort, chat, read.summarizes, kept)

    def _read(self, model: PromptModel, body: ResponseRequest, *, compacts: bool = False) -> _Read:
        """Reads a request's conversation. `compacts`: it asks for a compacted one."""
        body.refuse_unsupported()
        own = self._own_items(body)
        wants_item = bool(own) and kind_of(own[-1], f"input[{len(own) - 1}]") == TRIGGER
        if wants_item and not compacts:
            own = own[:-1]
        history = []
        if body.previous_response_id is not None:
            history = self._history(body.previous_response_id)
        if not (own or history or body.instructions):
            raise MissingParameter("input")
        tools = Toolbox()
        tools.add(body.tools or [], "tools")
        messages = messages_of(history, own, tools, self._unseal(model))
        if body.instructions:
            messages.insert(0, Message("system", (Text(body.instructions),), origin="instructions"))
        summarizes = compacts or wants_item
        if summarizes:
            # With the tools, as every other turn has them: the prompt begins as the conversation's own.
            messages.append(Message("user", (Text(SUMMARY_REQUEST),), origin="input"))
        asked_choice = None if summarizes else body.tool_choice
        choice = tool_choice_of(asked_choice, tools, parallel=body.parallel_tool_calls is not False)
        options, ignored = body.template_options(model.model_tokenizer.template_names)
        conversation = Conversation(messages, tools.shown, choice, options, ignored)
        return _Read(history, own, tools, conversation, summarizes)

    def _unseal(self, model: PromptModel) -> Unseal:
        """Returns a function that opens the seals of one request. Raises PromptTextTooLong.

        A seal is compressed: a small body with one of them many times would hold gigabytes.
        """
        chars = 0

        def unseal(sealed: str) -> str | None:
            nonlocal chars
            text = self.sealer.open(sealed)
            chars += len(text or "")
            model.tokenizer.refuse_more_chars(chars)
            count_more_bytes(len(text or ""))
            return text

        return unseal

    def _own_items(self, body: ResponseRequest) -> list[Any]:
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
                return self._resolved(items)
            case other:
                raise InvalidParameter("input", other, "a string or a list of items")

    def _resolved(self, items: Sequence[Any]) -> list[Any]:
        """Returns items with the stored ones in the place of references, which are bounded: references are short."""
        responses = {_response_of(item) for item in items} - {None}
        self._count(self.store.output_bytes([id for id in responses if id is not None]))

        @functools.cache  # many items of one response
        def outputs(id: str) -> list[tuple[Json, int]]:
            try:
                text = self.store.output(id)
            except ResponseNotFound:
                return []
            return [(item, len(json.dumps(item))) for item in parsed(text)]

        resolved, count = [], 0
        for i, item in enumerate(items):
            if kind_of(item, f"input[{i}]") == "item_reference":
                item, item_bytes = _referred(item, f"input[{i}].id", outputs)
                count += item_bytes
                self._refuse_more(count)
            resolved.append(item)
        return resolved

    def _count(self, count: int) -> None:
        self._refuse_more(count)
        count_more_bytes(count)

    def _refuse_more(self, count: int) -> None:
        if count > self.most_bytes:
            allowed = f"such that references stand for at most {self.most_bytes:,} bytes (--max-body)"
            raise InvalidParameter("input", count, allowed)

    def _history(self, id: str) -> list[Any]:
        """Returns the items of a response and of all before it.

        Raises PreviousResponseNotFound, HistoryTooLong and ResponseStoreFailed.
        """
        count_more_bytes(self.store.history_bytes(id, self.most_bytes))
        text = self.store.history(id, self.most_bytes)
        try:
            check_shape(text)
        except JsonTooComplex as error:
            raise HistoryTooLong(id, error.detail) from error
        return list(itertools.chain.from_iterable(parsed(text)))


@dataclass(frozen=True, slots=True)
class _Read:
    history: Sequence[Any]  # items of stored responses
    own: Sequence[Any]  # items of the request itself
    tools: Toolbox
    conversation: Conversation
    summarizes: bool  # the answer is a summary


@dataclass(frozen=True, slots=True)
class _Prepared:
    own: Sequence[Any]  # items of the request itself
    tools: Toolbox
    effort: str | None  # of reasoning, if the template knows it
    chat: PreparedChat
    compacts: bool = False  # the answer is a summary
    kept: Sequence[Any] | None = None  # items of a compacted conversation; None: the answer is a response


def _fields(
    model: ServedModel, body: ResponseRequest, prepared: _Prepared, id: str, sampling: ResolvedSampling
) -> Json:
    """Returns the fields of the response's object that are known before the answer. Raises InvalidParameter."""
    fields: Json = {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model or model.name,
        "background": False,
        "frequency_penalty": sampling.frequency_penalty,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": prepared.effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "top_logprobs": body.wanted_logprobs or 0,
        "top_p": sampling.top_p,
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
            "text": {"format": body.text_format, "verbosity": USUAL_VERBOSITY},
            "tool_choice": body.tool_choice or "auto",
            "tools": list(map(echoed_tool, body.tools or ())),
            "user": body.user,
        }
    )


def _response_of(item: Any) -> str | None:
    """Returns the id of the response to whose output a reference refers; None for any other item."""
    if not isinstance(item, Mapping) or item.get("type") != "item_reference":
        return None
    id = item.get("id")
    match = _ITEM_ID.fullmatch(id) if isinstance(id, str) else None
    return None if match is None else f"resp_{match[1]}"


def _referred(
    item: Json, path: str, outputs: Callable[[str], Sequence[tuple[Json, int]]]
) -> tuple[Json, int]:
    """Returns the stored item to which a reference refers, and its bytes. `outputs` returns a response's items."""
    id, response = item.get("id"), _response_of(item)
    if response is not None and (match := _ITEM_ID.fullmatch(str(id))) is not None:
        output, index = outputs(response), int(match[2], 16)
        if index < len(output) and output[index][0].get("id") == id:
            return output[index]
    raise InvalidParameter(path, id, "the id of an item in the output of a stored response")


def parsed(text: bytes) -> Any:
    return json.loads(text.decode(errors="surrogatepass"))


def _refuse_many_logprobs(call: ApiCall, context_limit: int) -> None:
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
    """Returns a response's own input as its items are listed: with ids, a status, and parts of messages."""
    listed = []
    for i, item in enumerate(items):
        kind = kind_of(item, f"input[{i}]")
        item = {**item, "type": kind, "id": item.get("id") or f"{kind}_{id.removeprefix('resp_')}i{i:x}"}
        if kind == "reasoning":
            item.setdefault("summary", [])  # it is not stored, because no prompt shows it
        if kind == "message" or kind.endswith(("_call", "_output")):
            item["status"] = item.get("status") or "completed"
        if kind == "message" and isinstance(item.get("content"), str):
            part = {"type": "input_text", "text": item["content"]}
            if item.get("role") == "assistant":
                part = {"type": "output_text", "text": item["content"], "annotations": []}
            item["content"] = [part]
        listed.append(item)
    return listed
