"""Messages as clients send them → messages as chat templates take them → tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rootstock.cache.plan import Tokens
from rootstock.engine.text import Message, TextCodec, Tool
from rootstock.errors import EmptyPrompt, InvalidParameter, MissingParameter, Unsupported

# OpenAI's newer name for the role, which few templates know.
_ROLES = {"developer": "system"}


def chat_tokens(
    codec: TextCodec,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any] | None = None,
) -> Tokens:
    """The prompt of a conversation. Slow for long ones: not for an event loop.

    Raises InvalidParameter, Unsupported, ChatTemplateMissing, ChatTemplateFailed and EmptyPrompt.
    """
    rendered = codec.render_chat(template_messages(messages), tools, **(options or {}))
    refuse_surrogates(rendered, "messages")
    tokens = codec.encode_chat(rendered)
    if len(tokens) == 0:
        raise EmptyPrompt("messages")
    return tokens


def text_tokens(codec: TextCodec, text: str, param: str = "prompt") -> Tokens:
    refuse_surrogates(text, param)
    return codec.encode(text)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Mapping[str, Any], path: str) -> Message:
    role = message.get("role")
    if role is None:
        raise MissingParameter(f"{path}.role")
    if not isinstance(role, str):
        raise InvalidParameter(f"{path}.role", role, "a string")
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None and not calls and role != "assistant":
        raise MissingParameter(f"{path}.content")
    # What templates know beyond role and content (name, tool_call_id, reasoning_content, …) goes through.
    result = {name: value for name, value in message.items() if value is not None}
    result["role"] = _ROLES.get(role, role)
    result["content"] = _text_of(content, f"{path}.content")
    if calls:
        result["tool_calls"] = _template_calls(calls, f"{path}.tool_calls")
    return result


def _text_of(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(path, content, "a string or a list of parts")
    return "\n".join(_text_of_part(part, f"{path}[{i}]") for i, part in enumerate(content))


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
    """Clients send a call's arguments as a string of JSON; templates take them as an object."""
    if not isinstance(calls, list):
        raise InvalidParameter(path, calls, "a list of tool calls")
    result = []
    for i, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise InvalidParameter(f"{path}[{i}]", call, "a tool call with a 'function'")
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed(function["arguments"])
        result.append({**call, "function": function})
    return result


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments  # a model wrote it, and it is part of the history as it is


def chosen_tools(tools: Sequence[Tool] | None, tool_choice: Any) -> Sequence[Tool]:
    """The tools that the template shows to the model."""
    if tool_choice == "none":
        return ()
    if tool_choice not in (None, "auto"):
        raise Unsupported("tool_choice", "Only 'auto' and 'none' are: a call cannot be forced yet.")
    return tools or ()


def refuse_surrogates(text: str, param: str) -> None:
    """JSON can spell half of a surrogate pair, which is no text and which tokenizers cannot take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InvalidParameter(param, half, "valid Unicode: this is half of a surrogate pair") from None
