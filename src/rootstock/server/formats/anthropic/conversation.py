"""Anthropic's format of messages, system prompts and tools, checked and translated to the canonical conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rootstock.errors import InvalidParameter, MissingParameter, Unsupported
from rootstock.server.formats.anthropic.client_tools import CLIENT_TOOLS, REFUSED_TOOLS
from rootstock.server.formats.anthropic.signatures import text_held
from rootstock.server.formats.anthropic.tool_use_ids import call_id_of
from rootstock.text.conversation.marks import CACHE_CONTROL, cache_control_of, count_marks
from rootstock.text.conversation.media import medium_line, medium_of
from rootstock.text.conversation.types import (
    Conversation,
    Medium,
    MediumKind,
    Message,
    MessagePart,
    PrefixMark,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from rootstock.text.limits import (
    MAX_CONTENT_PARTS,
    MAX_MARKS,
    MAX_NAME_CHARS,
    MAX_TOOL_CALLS,
    MAX_TOOLS_CHARS,
    refuse_deep,
    refuse_large,
    refuse_more_than,
    refuse_other_text,
)

ROLES = ("user", "assistant", "system")

# Blocks of answers that mean nothing to another server, or whose content cannot be read.
_SKIPPED = frozenset({"redacted_thinking", "fallback", "mcp_tool_listing"})
_ENCRYPTED = frozenset({"encrypted_content", "encrypted_index", "encrypted_stdout"})

Json = Mapping[str, Any]


def conversation_of(
    messages: Sequence[Json],
    system: Any,
    tools: Sequence[Json] | None,
    tool_choice: Any,
    options: Json,
    *,
    last_mark: PrefixMark | None = None,
) -> Conversation:
    """Translates a client's conversation. `last_mark` stands at its end.

    Raises InvalidParameter, MissingParameter and Unsupported.
    """
    taken = tools_of(tools)
    head = _system_of(system)
    rest = list(_messages_of(messages))
    if last_mark is not None and rest:
        rest[-1] = _marked(rest[-1], last_mark)
    translated = [*head, *rest]
    marks = sum(tool.mark is not None for tool in taken) + count_marks(translated)
    if marks > MAX_MARKS:
        raise InvalidParameter(CACHE_CONTROL, marks, f"sent at most {MAX_MARKS} times")
    return Conversation(
        translated, taken, _choice_of(tool_choice, taken), {**options, **_continuation(messages, rest)}
    )


def _continuation(messages: Sequence[Json], translated: Sequence[Message]) -> Json:
    """Returns the options of a template whose last message the answer continues, if it is the assistant's."""
    last = translated[-1] if translated else None
    if last is None or last.role != "assistant":
        return {}
    answered = {part.call_id for part in last.parts if isinstance(part, ToolResult)}
    if any(isinstance(part, ToolCall) and part.id not in answered for part in last.parts):
        path = f"messages[{len(messages) - 1}]"
        raise InvalidParameter(path, "tool_use", "followed by a user's message with the call's 'tool_result'")
    if not any(isinstance(part, Text) and part.text for part in last.parts):
        return {}
    return {"add_generation_prompt": False, "continue_final_message": True}


def _marked(message: Message, mark: PrefixMark) -> Message:
    """Marks the end of a message, if it ends with text."""
    *before, last = message.parts or (Text(""),)
    match last:
        case Text():
            last = replace(last, mark=mark)
        case ToolResult(parts=[*inner, Text() as end]):
            last = replace(last, parts=(*inner, replace(end, mark=mark)))
        case _:
            pass
    return replace(message, parts=(*before, last))


# ---- messages


def _system_of(system: Any) -> list[Message]:
    if system is None:
        return []
    parts = tuple(_system_parts(system, "system"))
    return [Message("system", parts, origin="system")] if parts else []


def _messages_of(messages: Sequence[Json]) -> Iterator[Message]:
    last_user = max((i for i, each in enumerate(messages) if each.get("role") == "user"), default=-1)
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        refuse_deep(message, path)
        role = message.get("role")
        if role is None:
            raise MissingParameter(f"{path}.role")
        if role not in ROLES:
            raise InvalidParameter(f"{path}.role", role, "'user', 'assistant' or 'system'")
        content = message.get("content")
        if role == "system":
            # It is shown in the one turn that it precedes, and the client goes on to send it.
            is_over = message.get("clear_at") == "next_user_message" and last_user > i
            parts = tuple(_system_parts(content, f"{path}.content")) if content is not None else ()
            if parts and not is_over:
                yield Message("system", parts, origin=f"{path}.role")
            continue
        if content is None:
            raise MissingParameter(f"{path}.content")
        parts = tuple(_parts_of(content, f"{path}.content"))
        if sum(isinstance(part, ToolCall) for part in parts) > MAX_TOOL_CALLS:
            raise InvalidParameter(
                f"{path}.content", content, f"a message with at most {MAX_TOOL_CALLS:,} calls"
            )
        # The results first: templates want them right behind the calls, and Anthropic's API refuses another order.
        results = [part for part in parts if isinstance(part, ToolResult)]
        if role == "user" and results:
            parts = (*results, *(part for part in parts if not isinstance(part, ToolResult)))
        yield Message(role, parts, origin=f"{path}.role")


def _blocks(content: Any, path: str) -> Iterator[tuple[str, Json, str]]:
    """Yields the type, the block and the path of each block of a content. A string is one block of text."""
    if isinstance(content, str):
        yield "text", {"type": "text", "text": content}, path
        return
    if not isinstance(content, list):
        raise InvalidParameter(path, content, "a string or a list of blocks")
    refuse_more_than(MAX_CONTENT_PARTS, content, path)
    for i, block in enumerate(content):
        at = f"{path}[{i}]"
        if not isinstance(block, Mapping):
            raise InvalidParameter(at, block, "an object")
        kind = block.get("type")
        if kind is None:
            raise MissingParameter(f"{at}.type")
        if not isinstance(kind, str):
            raise InvalidParameter(f"{at}.type", kind, "a string")
        yield kind, block, at


def _system_parts(content: Any, path: str) -> Iterator[MessagePart]:
    for kind, block, at in _blocks(content, path):
        match kind:
            case "text" | "search_result" | "document":
                yield _text_of(block, at)
            case "tool_addition":
                yield ToolReference(_changed_tool(block, at))
            case "tool_removal":
                yield Text(
                    f"The tool {_changed_tool(block, at)} can no longer be called.",
                    cache_control_of(block, at),
                )
            case _:
                medium = medium_of(block, at, cache_control_of(block, at))
                if medium is None:
                    raise InvalidParameter(f"{at}.type", kind, "'text', 'tool_addition' or 'tool_removal'")
                yield medium


def _changed_tool(block: Json, path: str) -> str:
    tool = block.get("tool")
    if not isinstance(tool, Mapping) or tool.get("type") != "tool_reference":
        raise Unsupported(f"{path}.tool", "Send a 'tool_reference' to one of 'tools'.")
    return _name_of(tool, f"{path}.tool", "tool_name" if "tool_name" in tool else "name")


def _parts_of(content: Any, path: str) -> Iterator[MessagePart]:
    for kind, block, at in _blocks(content, path):
        match kind:
            case "text" | "search_result" | "document":
                yield _text_of(block, at)
            case "compaction":
                yield Text(str(block.get("content") or ""), cache_control_of(block, at))
            case "thinking":
                text = _string(block, "thinking", at)
                signature = block.get("signature")
                if not text and isinstance(signature, str):
                    text = text_held(signature)
                if text:
                    yield Reasoning(text)
            case "tool_use" | "server_tool_use" | "mcp_tool_use":
                yield _call_of(block, at)
            case "tool_result":
                yield _result_of(block, at)
            case _ if kind in _SKIPPED:
                pass
            case _ if kind.endswith("_tool_result"):
                yield _server_result_of(block, at)
            case _:
                medium = medium_of(block, at, cache_control_of(block, at))
                if medium is None:
                    allowed = "'text', 'thinking', 'tool_use', 'tool_result', 'image' or 'document'"
                    raise InvalidParameter(f"{at}.type", kind, allowed)
                yield medium


def _string(block: Json, field: str, path: str) -> str:
    value = block.get(field)
    if value is None:
        raise MissingParameter(f"{path}.{field}")
    if not isinstance(value, str):
        raise InvalidParameter(f"{path}.{field}", value, "a string")
    return value


def _text_of(block: Json, path: str) -> Text:
    """Returns the text of a text block, a search result, or a document."""
    match block.get("type"):
        case "search_result":
            head = [_string(block, "title", path), _string(block, "source", path)]
            texts = _inner_texts(block.get("content"), f"{path}.content")
        case "document":
            head, texts = _document_texts(block, path)
        case _:
            return Text(_string(block, "text", path), cache_control_of(block, path))
    media = tuple(medium for text in texts for medium in text.media)
    return Text("\n".join([*head, *(text.text for text in texts)]), cache_control_of(block, path), media)


def _document_texts(block: Json, path: str) -> tuple[list[str], list[Text]]:
    """Returns the title and the context of a document, and its text."""
    title, context, source = block.get("title"), block.get("context"), block.get("source")
    head = [text for text in (title, context) if isinstance(text, str)]
    at = f"{path}.source"
    if not isinstance(source, Mapping):
        raise InvalidParameter(at, source, "an object with a 'type'")
    match source.get("type"):
        case "text":
            return head, [Text(_string(source, "data", at))]
        case "content":
            return head, _inner_texts(source.get("content"), f"{at}.content")
        case "base64" | "url" | "file":
            # The line has the title, as it has the name of other files.
            return [text for text in (context,) if isinstance(text, str)], [medium_line("file", path, title)]
        case _:
            allowed = "an object of type 'text', 'content', 'base64', 'url' or 'file'"
            raise InvalidParameter(at, source, allowed)


def _inner_texts(content: Any, path: str) -> list[Text]:
    texts = []
    for kind, block, at in _blocks(content, path):
        text = Text(_string(block, "text", at)) if kind == "text" else medium_of(block, at)
        if text is None:
            raise InvalidParameter(f"{at}.type", kind, "'text' or 'image'")
        texts.append(text)
    return texts


# ---- calls and results


def _call_of(block: Json, path: str) -> ToolCall:
    given = block.get("input")
    # Clients send the text that they could not parse, if the model wrote no object.
    if given is not None and not isinstance(given, Mapping | str):
        raise InvalidParameter(f"{path}.input", given, "an object")
    name = _name_of(block, path)
    return ToolCall(call_id_of(_string(block, "id", path)), name, {} if given is None else given)


def _name_of(block: Json, path: str, field: str = "name") -> str:
    name = _string(block, field, path)
    refuse_other_text(name, f"{path}.{field}", MAX_NAME_CHARS)
    return name


def _result_of(block: Json, path: str) -> ToolResult:
    content = block.get("content")
    parts = [] if content is None else list(_result_parts(content, f"{path}.content"))
    mark = cache_control_of(block, path)
    if mark is not None:
        if parts and isinstance(parts[-1], Text):
            parts[-1] = replace(parts[-1], mark=mark)
        elif not parts:
            parts.append(Text("", mark))
    id = call_id_of(_string(block, "tool_use_id", path))
    return ToolResult(id, tuple(parts), is_error=bool(block.get("is_error")))


def _result_parts(content: Any, path: str) -> Iterator[Text | ToolReference]:
    for kind, block, at in _blocks(content, path):
        match kind:
            case "text" | "search_result" | "document":
                yield _text_of(block, at)
            case "tool_reference":
                yield ToolReference(_name_of(block, at, "tool_name"))
            case _:
                medium = medium_of(block, at, cache_control_of(block, at))
                if medium is None:
                    allowed = "'text', 'search_result', 'document', 'tool_reference' or 'image'"
                    raise InvalidParameter(f"{at}.type", kind, allowed)
                yield medium


def _server_result_of(block: Json, path: str) -> ToolResult:
    """Returns the result of a tool that Anthropic's servers executed in an earlier answer."""
    content = block.get("content")
    id = call_id_of(_string(block, "tool_use_id", path))
    found = content.get("tool_references") if isinstance(content, Mapping) else None
    if isinstance(found, list):
        parts: tuple[Text | ToolReference, ...] = tuple(
            _result_parts(found, f"{path}.content.tool_references")
        )
        return ToolResult(id, parts)
    media: list[Medium] = []
    if not isinstance(content, str):
        content = json.dumps(_readable(content, f"{path}.content", media), ensure_ascii=False)
    text = Text(content, cache_control_of(block, path), tuple(media))
    return ToolResult(id, (text,), is_error=bool(block.get("is_error")))


def _readable(value: Any, path: str, media: list[Medium]) -> Any:
    """Returns a JSON value without content that only Anthropic's servers can read. Its depth is bounded.

    A line stands for each medium, which is added to `media`.
    """
    if isinstance(value, list):
        return [_readable(each, path, media) for each in value]
    if not isinstance(value, Mapping):
        return value
    source = value.get("source")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        kind: MediumKind = "image" if value.get("type") == "image" else "file"
        line = medium_line(kind, path, value.get("title"))
        media += line.media
        return line.text
    return {name: _readable(each, path, media) for name, each in value.items() if name not in _ENCRYPTED}


# ---- tools


def tools_of(tools: Sequence[Json] | None) -> list[Tool]:
    """Translates tools. Raises InvalidParameter, MissingParameter and Unsupported."""
    refuse_large(tools, "tools", MAX_TOOLS_CHARS)
    return [_tool_of(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]


def _tool_of(tool: Json, path: str) -> Tool:
    refuse_deep(tool, path)
    kind = tool.get("type") or "custom"
    deferred, mark = bool(tool.get("defer_loading")), cache_control_of(tool, path)
    if kind == "custom":
        description, schema = tool.get("description"), tool.get("input_schema")
        refuse_other_text(description, f"{path}.description", None)
        if schema is None:
            raise MissingParameter(f"{path}.input_schema")
        if not isinstance(schema, Mapping):
            raise InvalidParameter(f"{path}.input_schema", schema, "a JSON schema, which is an object")
        name = _name_of(tool, path)
        return Tool(name, description, schema, bool(tool.get("strict")), deferred, mark)
    if not isinstance(kind, str):
        raise InvalidParameter(f"{path}.type", kind, "a string")
    known = CLIENT_TOOLS.get(kind)
    if known is not None:
        # The client answers to its own name of the tool.
        name = known.name if tool.get("name") is None else _name_of(tool, path)
        return replace(known, name=name, deferred=deferred, mark=mark)
    for begin, remedy in REFUSED_TOOLS.items():
        if kind.startswith(begin):
            raise Unsupported(path, remedy)
    allowed = f"'custom' or a tool that the client executes: {', '.join(CLIENT_TOOLS)}"
    raise InvalidParameter(f"{path}.type", kind, allowed)


def _choice_of(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    parallel = not choice.get("disable_parallel_tool_use")
    match choice.get("type"):
        case "auto":
            return ToolChoice(parallel=parallel)
        case "none":
            return ToolChoice("none", parallel=parallel)
        case "any":
            found = ToolChoice("required", parallel=parallel)
        case "tool":
            name = _name_of(choice, "tool_choice")
            if name not in {tool.name for tool in tools}:
                raise InvalidParameter("tool_choice.name", name, "the name of a tool of the request")
            found = ToolChoice("required", (name,), parallel)
        case other:
            raise InvalidParameter("tool_choice.type", other, "'auto', 'any', 'tool' or 'none'")
    if not tools:
        raise InvalidParameter("tool_choice", choice, "left out in a request without tools")
    return found
