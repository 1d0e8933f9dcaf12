"""Conversations: messages and tools as clients send them, checked and translated for chat templates.

Many templates skip messages of roles that they do not know. `refuse_dropped_roles` renders short conversations to
find them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rootstock.engine.chat_template import TemplateNames
from rootstock.engine.limits import (
    MAX_CONTENT_PARTS,
    MAX_LABEL_CHARS,
    MAX_MARKS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_TEMPLATE_CHARS,
    MAX_TOOL_CALLS,
    MAX_TOOLS_CHARS,
    refuse_deep,
    refuse_large,
    refuse_more_than,
)
from rootstock.engine.tokenizer import Message, ModelTokenizer, Tool
from rootstock.errors import ChatTemplateFailed, InvalidParameter, MissingParameter, Unsupported

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MARK = "cache_control"  # Anthropic's; other servers take it in OpenAI's format, too

_TEMPLATE_ROLES = {"developer": "system"}  # few templates know OpenAI's newer name of the role
_BETWEEN_PARTS = "\n"
_PROBE_WORD = "Kestrel7391"  # letters and digits: no template trims or escapes it
_PROBE_TOOL = "look_up"
_PROBE_CALL_ID = "call00000"  # the strictest templates want nine characters


@dataclass(frozen=True, slots=True)
class Mark:
    """A client's mark of a prefix that later requests will share: it ends after the tools, or within a message."""

    message: int | None  # None: the tools
    chars: int = 0  # of the message's content


@dataclass(frozen=True, slots=True)
class Conversation:
    """The arguments of a chat template."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()

    def render(self, model_tokenizer: ModelTokenizer) -> str:
        """Renders the prompt. Raises ChatTemplateMissing and ChatTemplateFailed."""
        return model_tokenizer.render_chat(self.messages, self.tools, **self.options)


def conversation_of(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any] | None = None,
) -> Conversation:
    """Translates a client's conversation. Raises InvalidParameter, MissingParameter and Unsupported."""
    taken = template_messages(messages)
    marks = [mark for i, message in enumerate(messages) for mark in _marks_of(message, i, taken[i])]
    refuse_more_than(MAX_MARKS, marks, MARK)
    plain = [_unmarked(tool) for tool in tools]
    if any(map(_is_marked, tools)):
        marks.insert(0, Mark(None))
    return Conversation(taken, plain, options or {}, tuple(dict.fromkeys(marks)))


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    refuse_more_than(MAX_MESSAGES, list(messages), "messages")
    result = []
    call_id: str | None = None  # of the last `function_call`, which messages of the role `function` answer
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        refuse_deep(message, path)
        if message.get("function_call") is not None:
            call_id = f"call{i:05}"
            message = _with_tool_call(message, call_id, path)
        elif message.get("role") == "function":
            message = {"tool_call_id": call_id, **message, "role": "tool"}
        result.append(_template_message(message, path))
    return result


def _with_tool_call(message: Mapping[str, Any], id: str, path: str) -> Mapping[str, Any]:
    """Translates `function_call`, which OpenAI replaced by `tool_calls`."""
    call = message["function_call"]
    if message.get("tool_calls"):
        raise InvalidParameter(f"{path}.function_call", call, "left out where 'tool_calls' is sent")
    calls = [{"id": id, "type": "function", "function": _template_function(call, f"{path}.function_call")}]
    return {name: value for name, value in message.items() if name != "function_call"} | {"tool_calls": calls}


def _template_message(message: Mapping[str, Any], path: str) -> Message:
    role = message.get("role")
    if role is None:
        raise MissingParameter(f"{path}.role")
    if not isinstance(role, str):
        raise InvalidParameter(f"{path}.role", role, "a string")
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal")
    if content is None and not calls and role not in ("assistant", "tool"):
        raise MissingParameter(f"{path}.content")
    if message.get("audio") is not None:
        raise Unsupported(f"{path}.audio", "Only text is read. Send the transcript as 'content'.")
    _refuse_other_text(message.get("name"), f"{path}.name", MAX_NAME_CHARS)
    # Of any length: some clients put kilobytes into it.
    _refuse_other_text(message.get("tool_call_id"), f"{path}.tool_call_id", None)
    # Other fields (name, tool_call_id, reasoning_content, …) pass through: some templates read them.
    result = {name: value for name, value in message.items() if value is not None and name != MARK}
    result["role"] = _TEMPLATE_ROLES.get(role, role)
    result["content"] = _text_of(content, f"{path}.content")
    if calls:
        result["tool_calls"] = _template_calls(calls, f"{path}.tool_calls")
    return result


def _is_marked(tool: Tool) -> bool:
    function = tool.get("function")
    return bool(tool.get(MARK) or (isinstance(function, Mapping) and function.get(MARK)))


def _unmarked(tool: Tool) -> Tool:
    """Returns the tool without its mark, which some clients set at the function within."""
    plain = {name: value for name, value in tool.items() if name != MARK}
    function = plain.get("function")
    if isinstance(function, Mapping):
        plain["function"] = {name: value for name, value in function.items() if name != MARK}
    return plain


def _marks_of(message: Mapping[str, Any], index: int, taken: Message) -> Iterator[Mark]:
    content = message.get("content")
    if isinstance(content, list):
        chars = 0
        for part in content:
            chars += len(part[part["type"]])
            if part.get(MARK):
                yield Mark(index, chars)
            chars += len(_BETWEEN_PARTS)
    if message.get(MARK):
        yield Mark(index, len(taken["content"]))


def _text_of(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(path, content, "a string or a list of parts")
    refuse_more_than(MAX_CONTENT_PARTS, content, path)
    return _BETWEEN_PARTS.join(_text_of_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _text_of_part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal"):
        named = path if kind is None else f"{path}.type"
        raise InvalidParameter(
            named, part if kind is None else kind, "a part of type 'text': this model reads no other"
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidParameter(f"{path}.{kind}", text, "a string")
    return text


def _template_calls(calls: Any, path: str) -> list[Any]:
    if not isinstance(calls, list):
        raise InvalidParameter(path, calls, "a list of tool calls")
    refuse_more_than(MAX_TOOL_CALLS, calls, path)
    return [_template_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _template_call(call: Any, path: str) -> Mapping[str, Any]:
    if isinstance(call, Mapping):
        if call.get("function") is not None:
            return {**call, "function": _template_function(call["function"], f"{path}.function")}
        custom = call.get("custom")
        if isinstance(custom, Mapping):  # templates know functions only
            function = {"name": custom.get("name"), "arguments": {"input": custom.get("input", "")}}
            others = {name: value for name, value in call.items() if name != "custom"}
            return {**others, "type": "function", "function": _template_function(function, f"{path}.custom")}
    raise InvalidParameter(path, call, "a tool call with a 'function'")


def _template_function(function: Any, path: str) -> Mapping[str, Any]:
    """Parses a call's arguments: clients send a string of JSON, and templates take an object."""
    if not isinstance(function, Mapping):
        raise InvalidParameter(path, function, "an object with 'name' and 'arguments'")
    if function.get("name") is None:
        raise MissingParameter(f"{path}.name")
    _refuse_other_text(function["name"], f"{path}.name", MAX_NAME_CHARS)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, Mapping):
        raise InvalidParameter(f"{path}.arguments", arguments, "a string of JSON or an object")
    return {**function, "arguments": arguments}


def _parsed(arguments: str) -> Any:
    try:
        parsed = json.loads(arguments or "{}")
        refuse_deep(parsed, "arguments")
    except (ValueError, RecursionError, InvalidParameter):
        return arguments  # a model wrote it, and it is part of the history as it is
    return parsed


def _refuse_other_text(value: Any, path: str, most_chars: int | None) -> None:
    """Refuses a value that is neither absent nor a string of at most `most_chars`."""
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidParameter(path, value, "a string")
    if most_chars is not None and len(value) > most_chars:
        raise InvalidParameter(path, value, f"a string of at most {most_chars:,} characters")


def chosen_tools(
    tools: Sequence[Tool] | None, tool_choice: Any, names: tuple[str, str] = ("tools", "tool_choice")
) -> Sequence[Tool]:
    """Returns the tools that the template shows to the model. `names` are those of the client's two fields."""
    refuse_large(tools, names[0], MAX_TOOLS_CHARS)
    for i, tool in enumerate(tools or ()):
        _refuse_unusable(tool, f"{names[0]}[{i}]")
    if tool_choice == "none":
        return ()
    if tool_choice not in (None, "auto"):
        raise Unsupported(names[1], "Only 'auto' and 'none' are: a call cannot be forced yet.")
    return tools or ()


def _refuse_unusable(tool: Tool, path: str) -> None:
    refuse_deep(tool, path)
    kind, function = tool.get("type") or "function", tool.get("function")
    if kind != "function":
        raise InvalidParameter(f"{path}.type", kind, "'function': templates show no other tools to the model")
    if not isinstance(function, Mapping):
        raise InvalidParameter(f"{path}.function", function, "an object with a 'name'")
    if function.get("name") is None:
        raise MissingParameter(f"{path}.function.name")
    _refuse_other_text(function["name"], f"{path}.function.name", MAX_NAME_CHARS)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidParameter(f"{path}.function.parameters", parameters, "a JSON schema, which is an object")


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


def refuse_surrogates(text: str, param: str) -> None:
    """Refuses half of a surrogate pair: JSON can spell it, and tokenizers cannot take it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InvalidParameter(param, half, "valid Unicode: this is half of a surrogate pair") from None


def refuse_dropped_roles(tokenizer: ModelTokenizer, messages: Sequence[Message]) -> None:
    """Refuses roles whose messages the chat template skips. Raises InvalidParameter and ChatTemplateMissing."""
    for i, message in enumerate(messages):
        role, path = message["role"], f"messages[{i}].role"
        if role not in ROLES and not _is_named(tokenizer, role):
            raise InvalidParameter(path, role, f"one of {', '.join(ROLES)}")
        # Templates drop reasoning from the assistant's messages on purpose.
        if role != "assistant" and message["content"] and not _is_rendered(tokenizer, role, i == 0):
            where = "first" if i == 0 else "after another message"
            raise InvalidParameter(
                path,
                role,
                f"a role that the model's chat template renders: it drops messages of this one {where}",
            )


def _is_named(tokenizer: ModelTokenizer, role: str) -> bool:
    """Returns whether the template names the role: Llama's names `ipython`."""
    plain = len(role) <= MAX_NAME_CHARS and re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", role) is not None
    return plain and role in tokenizer.template_names.literals


@functools.lru_cache(maxsize=256)
def _is_rendered(tokenizer: ModelTokenizer, role: str, is_first: bool) -> bool:
    """Returns whether a short conversation shows a message of the role.

    A template that refuses all of them counts: it also refuses the request, with a message of its own.
    """
    probes = _probes(role, is_first)
    refused = 0
    for messages in probes:
        tool = {"type": "function", "function": {"name": _PROBE_TOOL, "parameters": {"type": "object"}}}
        try:
            if _PROBE_WORD in tokenizer.render_chat(messages, [tool] if role == "tool" else []):
                return True
        except ChatTemplateFailed:
            refused += 1
    return refused == len(probes)


def _probes(role: str, is_first: bool) -> list[list[Message]]:
    said: Message = {"role": role, "content": _PROBE_WORD}
    asked: Message = {"role": "user", "content": "Yes?"}
    answered: Message = {"role": "assistant", "content": "No."}
    if is_first:
        return [[said], [said, asked]]
    call = {"id": _PROBE_CALL_ID, "type": "function", "function": {"name": _PROBE_TOOL, "arguments": {}}}
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {**said, "tool_call_id": _PROBE_CALL_ID, "name": _PROBE_TOOL}
    return [[asked, said], [asked, answered, said], [asked, answered, said, asked], [asked, calls, result]]
