"""OpenAI's format of messages and tools, checked and translated to the canonical conversation.

The `LLM` class takes this format, too. Other wire formats have their own translation beside their routes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rootstock.errors import InvalidParameter, MissingParameter
from rootstock.text.constraints.asked import Lark, Regex
from rootstock.text.conversation.marks import (
    BREAKPOINT,
    CACHE_CONTROL,
    breakpoint_of,
    cache_control_of,
    count_marks,
)
from rootstock.text.conversation.media import image_lines, medium_line, medium_of
from rootstock.text.conversation.types import (
    Conversation,
    Message,
    MessagePart,
    PrefixMark,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from rootstock.text.limits import (
    MAX_CONTENT_PARTS,
    MAX_GRAMMAR_CHARS,
    MAX_MARKS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PATTERN_CHARS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MAX_TOOLS_CHARS,
    refuse_deep,
    refuse_large,
    refuse_more_than,
    refuse_other_text,
    refuse_surrogates,
)

# Fields in which clients send back an answer's reasoning. All servers but this one have one of the first two.
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Fields of messages with media beside the content: OpenAI's spoken answers, and images of OpenRouter's and Ollama's.
_MEDIA_FIELDS = ("audio", "images")
# The arguments of a custom tool, which takes one text: templates and models know functions only.
CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def conversation_of(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
    options: Mapping[str, Any] | None = None,
    *,
    parallel: bool = True,
    names: tuple[str, str] = ("tools", "tool_choice"),
) -> Conversation:
    """Translates a client's conversation. `names` are the names of the client's two fields.

    Raises InvalidParameter, MissingParameter and Unsupported.
    """
    taken = tools_of(tools, names[0])
    match tool_choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": list(allowed)}}:
            # No constraint forbids calls of the others, so that the model must not see them.
            only = _allowed_names(allowed, taken, f"{names[1]}.allowed_tools.tools")
            taken, tool_choice = [tool for tool in taken if tool.name in only], "auto"
    choice = tool_choice_of(tool_choice, taken, names[1], parallel=parallel)
    return Conversation(messages_of(messages), taken, choice, options or {})


# ---- messages


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Translates messages. Raises InvalidParameter, MissingParameter and Unsupported."""
    refuse_more_than(MAX_MESSAGES, list(messages), "messages")
    result: list[Message] = []
    call_id: str | None = None  # of the last `function_call`, which messages of the role `function` answer
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        refuse_deep(message, path)
        if message.get("function_call") is not None:
            call_id = f"call{i:05}"
            message = _with_tool_call(message, call_id, path)
        elif message.get("role") == "function":
            message = {"tool_call_id": call_id, **message, "role": "tool"}
        result.append(_message_of(message, path))
    marks = count_marks(result)
    if marks > MAX_MARKS:
        raise InvalidParameter(CACHE_CONTROL, marks, f"sent at most {MAX_MARKS} times")
    return result


def _with_tool_call(message: Mapping[str, Any], id: str, path: str) -> Mapping[str, Any]:
    """Translates `function_call`, which OpenAI replaced by `tool_calls`."""
    call = message["function_call"]
    if message.get("tool_calls"):
        raise InvalidParameter(f"{path}.function_call", call, "left out where 'tool_calls' is sent")
    _refuse_unnamed(call, f"{path}.function_call")
    calls = [{"id": id, "type": "function", "function": call}]
    return {name: value for name, value in message.items() if name != "function_call"} | {"tool_calls": calls}


def _message_of(message: Mapping[str, Any], path: str) -> Message:
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
    refuse_other_text(message.get("name"), f"{path}.name", MAX_NAME_CHARS)
    # Of any length: some clients put kilobytes into it.
    refuse_other_text(message.get("tool_call_id"), f"{path}.tool_call_id", None)
    texts = _texts_of(content, cache_control_of(message, path), f"{path}.content")
    beside = [medium_line("audio", f"{path}.audio")] if message.get("audio") else []
    if message.get("images"):
        beside += image_lines(message["images"], f"{path}.images")
    if beside:
        texts = [*(text for text in texts if text.text or text.mark), *beside]
    known = {"role", "content", "tool_calls", CACHE_CONTROL, *_REASONING_FIELDS, *_MEDIA_FIELDS}
    if role == "tool":
        parts: list[MessagePart] = [
            ToolResult(message.get("tool_call_id"), tuple(texts), message.get("name"))
        ]
        known |= {"tool_call_id", "name"}
    else:
        reasoning = _reasoning_of(message, path)
        parts = [*([Reasoning(reasoning)] if reasoning else []), *texts]
        if calls:
            parts += _calls_of(calls, f"{path}.tool_calls")
    # Other fields pass through: some templates read them.
    fields = {name: value for name, value in message.items() if value is not None and name not in known}
    return Message(role, tuple(parts), fields, f"{path}.role")


def _reasoning_of(message: Mapping[str, Any], path: str) -> str:
    for field in _REASONING_FIELDS:
        value = message.get(field)
        if isinstance(value, str):
            return value
        if value is not None and field == "reasoning_content":
            raise InvalidParameter(f"{path}.{field}", value, "a string")
    return ""


def _texts_of(content: Any, mark: PrefixMark | None, path: str) -> list[Text]:
    """Returns the texts of a message's content. `mark` is the message's: it stands at the end of the last one."""
    if content is None or isinstance(content, str):
        return [Text(content or "", mark)]
    if not isinstance(content, list):
        raise InvalidParameter(path, content, "a string or a list of parts")
    refuse_more_than(MAX_CONTENT_PARTS, content, path)
    texts = [_text_of(part, f"{path}[{i}]") for i, part in enumerate(content)]
    if mark is not None:
        last = texts.pop() if texts else Text("")
        texts.append(replace(last, mark=mark))
    return texts


def _text_of(part: Any, path: str) -> Text:
    if not isinstance(part, Mapping):
        raise InvalidParameter(path, part, "a part with a 'type'")
    kind, mark = part.get("type"), breakpoint_of(part, path) or cache_control_of(part, path)
    if kind not in ("text", "refusal"):
        medium = medium_of(part, path, mark)
        if medium is None:
            raise InvalidParameter(f"{path}.type", kind, "'text', 'image_url', 'input_audio' or 'file'")
        return medium
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidParameter(f"{path}.{kind}", text, "a string")
    return Text(text, mark)


def _calls_of(calls: Any, path: str) -> list[ToolCall]:
    if not isinstance(calls, list):
        raise InvalidParameter(path, calls, "a list of tool calls")
    refuse_more_than(MAX_TOOL_CALLS, calls, path)
    return [_call_of(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _call_of(call: Any, path: str) -> ToolCall:
    if isinstance(call, Mapping):
        id = call.get("id")
        refuse_other_text(id, f"{path}.id", None)
        function, custom = call.get("function"), call.get("custom")
        if function is not None:
            name = _refuse_unnamed(function, f"{path}.function")
            return ToolCall(id, name, arguments_of(function.get("arguments"), f"{path}.function.arguments"))
        if isinstance(custom, Mapping):
            name = _refuse_unnamed(custom, f"{path}.custom")
            return ToolCall(id, name, {"input": custom.get("input", "")})
    raise InvalidParameter(path, call, "a tool call with a 'function'")


def _refuse_unnamed(function: Any, path: str) -> str:
    """Returns the name of a function. Raises InvalidParameter and MissingParameter."""
    if not isinstance(function, Mapping):
        raise InvalidParameter(path, function, "an object with 'name' and 'arguments'")
    name = function.get("name")
    if name is None:
        raise MissingParameter(f"{path}.name")
    refuse_other_text(name, f"{path}.name", MAX_NAME_CHARS)
    return str(name)


def arguments_of(arguments: Any, path: str) -> Mapping[str, Any] | str:
    """Returns a call's arguments, of which clients send the JSON as a string. Raises InvalidParameter.

    A text that is not a JSON object stays text: a model wrote it, and it is a part of the history.
    """
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return arguments
    if not isinstance(arguments, str):
        raise InvalidParameter(path, arguments, "a string of JSON or an object")
    try:
        parsed = json.loads(arguments or "{}")
        refuse_deep(parsed, path)
    except (ValueError, RecursionError, InvalidParameter):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


# ---- tools


def tools_of(tools: Sequence[Mapping[str, Any]] | None, path: str = "tools") -> list[Tool]:
    """Translates tools. Raises InvalidParameter, MissingParameter and Unsupported."""
    refuse_large(tools, path, MAX_TOOLS_CHARS)
    return [_tool_of(tool, f"{path}[{i}]") for i, tool in enumerate(tools or ())]


def _tool_of(tool: Mapping[str, Any], path: str) -> Tool:
    refuse_deep(tool, path)
    kind = tool.get("type") or "function"
    if kind == "custom":
        return _custom_tool_of(tool.get("custom"), f"{path}.custom")
    if kind != "function":
        raise InvalidParameter(
            f"{path}.type", kind, "'function' or 'custom': no other tools are shown to the model"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameter(f"{path}.function", function, "an object with a 'name'")
    name = _refuse_unnamed(function, f"{path}.function")
    refuse_other_text(function.get("description"), f"{path}.function.description", None)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidParameter(f"{path}.function.parameters", parameters, "a JSON schema, which is an object")
    known = ("name", "description", "parameters", "strict", CACHE_CONTROL, BREAKPOINT)
    return Tool(
        name,
        function.get("description"),
        parameters,
        strict=bool(function.get("strict")),
        # Some clients set the mark at the function within.
        mark=cache_control_of(tool, path) or cache_control_of(function, f"{path}.function"),
        fields={
            field: value for field, value in function.items() if field not in known and value is not None
        },
    )


def _custom_tool_of(custom: Any, path: str) -> Tool:
    name = _refuse_unnamed(custom, path)
    refuse_other_text(custom.get("description"), f"{path}.description", None)
    return custom_tool(name, custom.get("description"), custom.get("format"), f"{path}.format")


def custom_tool(name: str, about: str | None, format: Any, path: str) -> Tool:
    """Returns a tool that takes a text, in a format of OpenAI's chats or of its Responses. Raises InvalidParameter.

    The model reads the grammar in the description. A forced call must follow it.
    """
    grammar = _grammar_of(format, path)
    if grammar is None:
        return Tool(name, about, CUSTOM_PARAMETERS)
    kind, text = ("lark", grammar.grammar) if isinstance(grammar, Lark) else ("regex", grammar.pattern)
    told = f"The input follows this grammar ({kind}):\n{text}"
    return Tool(name, f"{about}\n\n{told}" if about else told, CUSTOM_PARAMETERS, grammar=grammar)


def _grammar_of(format: Any, path: str) -> Lark | Regex | None:
    match format:
        case None | {"type": "text"}:
            return None
        case {"type": "grammar", "grammar": {"syntax": "lark" | "regex" as syntax, "definition": str(text)}}:
            path = f"{path}.grammar"
        case {"type": "grammar", "syntax": "lark" | "regex" as syntax, "definition": str(text)}:
            pass
        case _:
            allowed = "{'type': 'text'}, or a grammar with 'syntax' (lark, regex) and 'definition'"
            raise InvalidParameter(path, format, allowed)
    most = MAX_GRAMMAR_CHARS if syntax == "lark" else MAX_PATTERN_CHARS
    refuse_other_text(text, f"{path}.definition", most)
    refuse_surrogates(text, f"{path}.definition")
    return Lark(text) if syntax == "lark" else Regex(text)


def tool_choice_of(choice: Any, tools: Sequence[Tool], path: str, *, parallel: bool = True) -> ToolChoice:
    """Translates OpenAI's choices: a mode, a named tool, or a list of tools of which one must be called.

    Raises InvalidParameter.
    """
    match choice:
        case None | "auto":
            return ToolChoice(parallel=parallel)
        case "none":
            return ToolChoice("none", parallel=parallel)
        case "required" | "any":  # "any": Anthropic's and Mistral's name, which some clients send here
            found = ToolChoice("required", parallel=parallel)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [_, *_] as allowed}}:
            names = _allowed_names(allowed, tools, f"{path}.allowed_tools.tools")
            found = ToolChoice("required", names, parallel)
        case {"type": "allowed_tools"}:
            allowed_values = "'allowed_tools' with a 'mode' (auto, required) and a list of 'tools'"
            raise InvalidParameter(path, choice, allowed_values)
        case {"type": "function" | "custom"} | {"name": str()}:
            found = ToolChoice("required", _allowed_names([choice], tools, path), parallel)
        case _:
            allowed_values = "'auto', 'none', 'required', or an object that names a function"
            raise InvalidParameter(path, choice, allowed_values)
    if not tools:
        raise InvalidParameter(path, choice, "'auto' or 'none' in a request without tools")
    return found


def _allowed_names(allowed: Sequence[Any], tools: Sequence[Tool], path: str) -> tuple[str, ...]:
    refuse_more_than(MAX_TOOLS, list(allowed), path)
    known = {tool.name for tool in tools}
    names = tuple(dict.fromkeys(_chosen_name(tool, path) for tool in allowed))
    for name in names:
        if name not in known:
            raise InvalidParameter(path, name, "the name of a tool of the request")
    return names


def _chosen_name(chosen: Any, path: str) -> str:
    """Returns the name in {"type": "function", "function": {"name"}}, or in the same without the inner object."""
    if isinstance(chosen, Mapping):
        inner = chosen.get("function") or chosen.get("custom") or chosen
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
            return str(inner["name"])
    raise InvalidParameter(path, chosen, "an object that names a function")
