"""The canonical conversation as the arguments of the model's chat template.

Templates differ in the messages that they accept. Many skip messages of roles that they do not know, and some refuse
a system message after the first one. `_shown` renders short conversations to find out.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from typing import Any

from rootstock.errors import ChatTemplateFailed, InvalidParameter, Unsupported
from rootstock.text.chat_template import TemplateNames
from rootstock.text.conversation.types import (
    Conversation,
    Medium,
    Message,
    MessagePart,
    PrefixMark,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
)
from rootstock.text.limits import (
    MAX_LABEL_CHARS,
    MAX_NAME_CHARS,
    MAX_TEMPLATE_CHARS,
    refuse_deep,
    refuse_large,
)
from rootstock.text.tokenizer import Message as TemplateMessage
from rootstock.text.tokenizer import ModelTokenizer
from rootstock.text.tokenizer import Tool as TemplateTool

_Ends = Sequence[tuple[int, PrefixMark]]  # characters of a content at which marked parts end

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TEMPLATE_ROLES = {"developer": "system"}  # few templates know OpenAI's newer name of the role
_BETWEEN_PARTS = "\n"
_BETWEEN_MESSAGES = "\n\n"  # of two that become one
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # that templates read
_PROBE_WORD = "Kestrel7391"  # letters and digits: no template trims or escapes it
_PROBE_TOOL = "look_up"
_PROBE_CALL_ID = "call00000"  # the strictest templates want nine characters


_A_MARK = PrefixMark("cache_control")


@dataclass(frozen=True, slots=True)
class Mark:
    """A client's mark of a prefix that later requests will share: it ends after the tools, or within a message."""

    message: int | None  # None: the tools
    chars: int = 0  # of the message's content
    asked: PrefixMark = _A_MARK


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The arguments of a chat template."""

    messages: Sequence[TemplateMessage]
    tools: Sequence[TemplateTool] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    media: tuple[Medium, ...] = ()  # that the messages have lines of text for

    def render(self, model_tokenizer: ModelTokenizer) -> str:
        """Renders the prompt. Raises ChatTemplateMissing and ChatTemplateFailed."""
        return model_tokenizer.render_chat(self.messages, self.tools, **self.options)


def template_input(conversation: Conversation, tokenizer: ModelTokenizer) -> TemplateInput:
    """Translates a conversation for the tokenizer's chat template.

    A system message that the template does not render in its place is shown in a message of the user instead. Raises
    InvalidParameter, for a message that the template drops, and ChatTemplateMissing.
    """
    builder = _built(conversation, tokenizer, moves_system=False)
    if _has_later_system(builder.messages) and not _is_accepted(builder.messages, tokenizer):
        builder = _built(conversation, tokenizer, moves_system=True)
    shown = [tool for tool in conversation.tools if not tool.deferred]
    if conversation.tool_choice.mode == "none":
        shown = []
    marks = [Mark(None, asked=tool.mark) for tool in shown if tool.mark is not None] + builder.marks
    return TemplateInput(
        builder.messages,
        list(map(template_tool, shown)),
        conversation.options,
        tuple(marks),
        tuple(builder.media),
    )


def _built(conversation: Conversation, tokenizer: ModelTokenizer, *, moves_system: bool) -> _Builder:
    builder = _Builder(conversation, tokenizer, moves_system)
    for message in _with_results_in_order(conversation.messages):
        builder.add(message)
    builder.end()
    return builder


def _with_results_in_order(messages: Iterable[Message]) -> Iterator[Message]:
    """Puts the results of parallel calls into the order of the calls, as templates that show no ids expect it.

    Clients send the results as the tools end.
    """
    order: dict[str | None, int] = {}  # of the last calls, by id

    def place(result: MessagePart) -> int:
        assert isinstance(result, ToolResult)
        return order.get(result.call_id, len(order))

    for are_results, run in groupby(messages, lambda message: message.role == "tool"):
        together = list(run)
        if are_results and all(isinstance(part, ToolResult) for each in together for part in each.parts):
            yield from sorted(together, key=lambda message: min(map(place, message.parts), default=0))
            continue
        for message in together:
            results = iter(
                sorted((part for part in message.parts if isinstance(part, ToolResult)), key=place)
            )
            yield replace(
                message,
                parts=tuple(
                    next(results) if isinstance(part, ToolResult) else part for part in message.parts
                ),
            )
            if message.role == "assistant":
                calls = (part for part in message.parts if isinstance(part, ToolCall))
                order = {call.id: number for number, call in enumerate(calls)}


def _has_later_system(messages: Sequence[TemplateMessage]) -> bool:
    return any(message["role"] == "system" for message in messages[1:])


def _is_accepted(messages: Sequence[TemplateMessage], tokenizer: ModelTokenizer) -> bool:
    """Returns whether the template renders a conversation of these roles. The contents are left out to save time."""
    try:
        tokenizer.render_chat([{**message, "content": "x"} for message in messages], [])
    except ChatTemplateFailed:
        return False
    return True


def template_tool(tool: Tool) -> TemplateTool:
    """Returns a tool as templates print it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function | dict(tool.fields)}


class _Builder:
    """Builder of the template's messages. One of the conversation's messages may become several of the template's."""

    def __init__(self, conversation: Conversation, tokenizer: ModelTokenizer, moves_system: bool) -> None:
        """With `moves_system`, later system messages are shown in messages of the user."""
        self.messages: list[dict[str, Any]] = []
        self.marks: list[Mark] = []
        self._joined: list[str] = []  # texts that become the content of the last message when it ends
        self._joined_chars = 0
        self._only_system = True  # until a message of another role
        self.media: list[Medium] = []
        self._tokenizer = tokenizer
        self._moves_system = moves_system
        self._referable = {tool.name: tool for tool in conversation.tools if tool.deferred}
        self._names_of_calls: dict[str, str] = {}
        attributes = tokenizer.template_names.attributes
        self._reasoning_field = next(
            (name for name in _REASONING_FIELDS if name in attributes), _REASONING_FIELDS[0]
        )

    def add(self, message: Message) -> None:
        role, path = _TEMPLATE_ROLES.get(message.role, message.role), message.origin
        if role not in ROLES and not _is_named(self._tokenizer, role):
            raise InvalidParameter(path, message.role, f"one of {', '.join(ROLES)}")
        plain: list[MessagePart] = []
        for part in message.parts:
            if isinstance(part, ToolResult):
                if plain:
                    self._add_plain(role, plain, message.fields, path)
                    plain = []
                if message.role == "tool":
                    self._add_result(part, message.fields, path)
                else:
                    self._add_result(part, {}, path.removesuffix(".role"))
            else:
                plain.append(part)
        if plain or not message.parts:
            self._add_plain(role, plain, message.fields, path)

    def end(self) -> None:
        """Joins the texts of the last message: at its end, because joining each text to it takes quadratic time."""
        if self._joined:
            self.messages[-1]["content"] = _BETWEEN_MESSAGES.join(self._joined)
            self._joined = []

    def _add_plain(
        self, role: str, parts: Sequence[MessagePart], fields: Mapping[str, Any], path: str
    ) -> None:
        content, ends = self._content(parts)
        taken: dict[str, Any] = {**fields, "role": role, "content": content}
        if role == "assistant":
            reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
            if reasoning:
                taken[self._reasoning_field] = _BETWEEN_PARTS.join(reasoning)
            calls = [self._call(part) for part in parts if isinstance(part, ToolCall)]
            if calls:
                taken["tool_calls"] = calls
        if role == "system":
            self._add_system(taken, ends, path)
            return
        if content:
            self._refuse_dropped(role, path)
        doubled = role == "user" and self._last_role == "user" and not _takes_users_in_a_row(self._tokenizer)
        self._join_last(content, ends) if doubled else self._append(taken, ends)

    def _add_system(self, message: dict[str, Any], ends: _Ends, path: str) -> None:
        text = message["content"]
        is_first = not self.messages
        moves = self._moves_system and not is_first
        if not text or (not moves and _shown(self._tokenizer, "system", is_first) is _Shown.YES):
            self._append(message, ends)
        elif self._only_system and not is_first:
            self._join_last(text, ends)
        elif is_first:
            self._add_plain("user", [Text(text)], {}, path)
        else:
            # The markers tell the model that the user did not write it. Claude Code uses the same ones.
            self._add_plain("user", [Text(f"<system-reminder>\n{text}\n</system-reminder>")], {}, path)

    def _add_result(self, result: ToolResult, fields: Mapping[str, Any], path: str) -> None:
        content, ends = self._content(result.parts)
        if result.is_error and not content:
            content, ends = "Error", []
        message = {**fields, "role": "tool", "content": content}
        if result.call_id is not None:
            message["tool_call_id"] = result.call_id
        name = result.name or self._names_of_calls.get(result.call_id or "")
        if name is not None:
            message["name"] = name
        if content:
            self._refuse_dropped("tool", path)
        self._append(message, ends)

    def _content(self, parts: Iterable[MessagePart]) -> tuple[str, _Ends]:
        """Returns the texts among parts as one content, and the characters at which its marked parts end."""
        texts = [
            part if isinstance(part, Text) else Text(self._referred(part))
            for part in parts
            if isinstance(part, Text | ToolReference)
        ]
        for text in texts:
            self.media += text.media
        return _joined(texts)

    def _referred(self, reference: ToolReference) -> str:
        """Returns the text that shows a deferred tool to the model: its definition once, later its name."""
        tool = self._referable.pop(reference.name, None)
        if tool is None:
            return reference.name
        return f"You can call this tool now:\n{json.dumps(template_tool(tool), ensure_ascii=False)}"

    def _call(self, call: ToolCall) -> dict[str, Any]:
        taken: dict[str, Any] = {
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        if call.id is not None:
            self._names_of_calls[call.id] = call.name
            taken["id"] = call.id
        return taken

    def _append(self, message: dict[str, Any], ends: _Ends) -> None:
        self.end()
        self._only_system &= message["role"] == "system"
        self.marks += [Mark(len(self.messages), end, mark) for end, mark in ends]
        self.messages.append(message)

    def _join_last(self, text: str, ends: _Ends) -> None:
        """Appends a text to the last message, and its marks."""
        if not self._joined:
            self._joined = [self.messages[-1]["content"]]
            self._joined_chars = len(self._joined[0])
        if self._joined_chars == 0:
            self._joined = []
        before = self._joined_chars + len(_BETWEEN_MESSAGES) if self._joined_chars else 0
        self.marks += [Mark(len(self.messages) - 1, before + end, mark) for end, mark in ends]
        self._joined.append(text)
        self._joined_chars = before + len(text)

    @property
    def _last_role(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def _refuse_dropped(self, role: str, path: str) -> None:
        # Templates drop reasoning from the assistant's messages on purpose.
        if role == "assistant":
            return
        is_first = not self.messages
        if _shown(self._tokenizer, role, is_first) is _Shown.DROPPED:
            where = "first" if is_first else "after another message"
            allowed = f"a role that the model's chat template renders: it drops messages of this one {where}"
            raise InvalidParameter(path, role, allowed)


def _joined(texts: Iterable[Text]) -> tuple[str, _Ends]:
    """Returns the texts of parts as one content, and the characters at which its marked parts end."""
    pieces: list[str] = []
    ends: list[tuple[int, PrefixMark]] = []
    chars = 0
    breaks = False  # a line ends before the next text: beside an image none does
    for part in texts:
        if breaks and not part.is_image:
            pieces.append(_BETWEEN_PARTS)
            chars += len(_BETWEEN_PARTS)
        chars += len(part.text)
        pieces.append(part.text)
        breaks = not part.is_image
        if part.mark is not None:
            ends.append((chars, part.mark))
    return "".join(pieces), ends


class _Shown(Enum):
    YES = "yes"
    DROPPED = "dropped"
    REFUSED = "refused"


def _is_named(tokenizer: ModelTokenizer, role: str) -> bool:
    """Returns whether the template names the role: Llama's names `ipython`."""
    plain = len(role) <= MAX_NAME_CHARS and re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", role) is not None
    return plain and role in tokenizer.template_names.literals


@functools.lru_cache(maxsize=256)
def _shown(tokenizer: ModelTokenizer, role: str, is_first: bool) -> _Shown:
    """Returns whether a short conversation shows a message of the role. Raises ChatTemplateMissing."""
    probes = _probes(role, is_first)
    refused = 0
    for messages in probes:
        tool = {"type": "function", "function": {"name": _PROBE_TOOL, "parameters": {"type": "object"}}}
        try:
            if _PROBE_WORD in tokenizer.render_chat(messages, [tool] if role == "tool" else []):
                return _Shown.YES
        except ChatTemplateFailed:
            refused += 1
    # A template that refuses all of them refuses the request too, with a message of its own.
    return _Shown.REFUSED if refused == len(probes) else _Shown.DROPPED


@functools.lru_cache(maxsize=64)
def _takes_users_in_a_row(tokenizer: ModelTokenizer) -> bool:
    asked = {"role": "user", "content": "Yes?"}
    try:
        return _PROBE_WORD in tokenizer.render_chat([asked, {"role": "user", "content": _PROBE_WORD}], [])
    except ChatTemplateFailed:
        return False


def _probes(role: str, is_first: bool) -> list[list[TemplateMessage]]:
    said: TemplateMessage = {"role": role, "content": _PROBE_WORD}
    asked: TemplateMessage = {"role": "user", "content": "Yes?"}
    answered: TemplateMessage = {"role": "assistant", "content": "No."}
    if is_first:
        return [[said], [said, asked]]
    call = {"id": _PROBE_CALL_ID, "type": "function", "function": {"name": _PROBE_TOOL, "arguments": {}}}
    calls: TemplateMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: TemplateMessage = {**said, "tool_call_id": _PROBE_CALL_ID, "name": _PROBE_TOOL}
    return [[asked, said], [asked, answered, said], [asked, answered, said, asked], [asked, calls, result]]


def refuse_unread_variables(kwargs: Mapping[str, Any], names: TemplateNames) -> None:
    """Refuses `chat_template_kwargs` that the chat template does not read. Raises InvalidParameter and Unsupported.

    A template silently ignores a variable that it does not know, for example a misspelled one.
    """
    refuse_large(kwargs, "chat_template_kwargs", MAX_TEMPLATE_CHARS)
    refuse_deep(kwargs, "chat_template_kwargs")
    for name, value in kwargs.items():
        path = f"chat_template_kwargs.{name[:MAX_LABEL_CHARS]}"
        if name == "add_generation_prompt":
            if not isinstance(value, bool):
                raise InvalidParameter(path, value, "true or false")
        elif name not in names.variables:
            known = ", ".join(sorted(names.variables - {"add_generation_prompt"}))
            raise Unsupported(path, f"The model's chat template reads {known or 'no variable of a client'}.")
