"""Items of the Responses API as messages of the canonical conversation.

An item's `id` is never shown to the model: agents choose a new one for each request. Consecutive items of the
assistant (reasoning, text, calls) are one message, as chat templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rootstock.errors import InvalidParameter, MissingParameter, Unsupported
from rootstock.server.formats.responses.compaction import KINDS as COMPACTIONS
from rootstock.server.formats.responses.compaction import TRIGGER, refuse_trigger, without_compacted
from rootstock.server.formats.responses.compaction import shown as compaction_text
from rootstock.server.formats.responses.tools import Toolbox, kept_tool, shown_name
from rootstock.server.wire.api_call import Json
from rootstock.text.conversation.marks import BREAKPOINT, breakpoint_of, count_marks
from rootstock.text.conversation.media import medium_of, name_of
from rootstock.text.conversation.openai import arguments_of
from rootstock.text.conversation.template import template_tool
from rootstock.text.conversation.types import (
    Message,
    MessagePart,
    Reasoning,
    Text,
    ToolCall,
    ToolReference,
    ToolResult,
)
from rootstock.text.limits import (
    MAX_CONTENT_PARTS,
    MAX_LABEL_CHARS,
    MAX_MARKS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    refuse_deep,
    refuse_more_than,
    refuse_other_text,
)

Unseal = Callable[[str], str | None]  # a sealed reasoning text, or None if this server cannot open it

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# Records of tools that this server ignores (tools.py), and a client's own: they hold no text for the model.
_SKIPPED = frozenset({"web_search_call", "image_generation_call", "ghost_snapshot"})
_CALL_OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "computer_call_output",
)


def kind_of(item: Any, path: str) -> str:
    """Returns the type of an item. A message may have none. Raises InvalidParameter and MissingParameter."""
    if not isinstance(item, Mapping):
        raise InvalidParameter(path, item, "an object with a 'type'")
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    if kind is None:
        raise MissingParameter(f"{path}.type")
    if not isinstance(kind, str):
        raise InvalidParameter(f"{path}.type", kind, "a string")
    return kind


# Fields of stored items that are kept as they are: the prompt shows all of them, or their size is bounded.
_KEPT_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"role", "content"}),
    "agent_message": frozenset({"content"}),
    "reasoning": frozenset({"content", "encrypted_content"}),
    "function_call": frozenset({"call_id", "name", "namespace", "arguments"}),
    "custom_tool_call": frozenset({"call_id", "name", "namespace", "input"}),
    "local_shell_call": frozenset({"call_id", "action"}),
    "computer_call": frozenset({"call_id", "action", "actions"}),
    "tool_search_call": frozenset({"call_id", "arguments"}),
    "tool_search_output": frozenset({"call_id", "tools"}),
    "additional_tools": frozenset({"tools"}),
    **dict.fromkeys(COMPACTIONS, frozenset({"encrypted_content"})),
    **dict.fromkeys(_CALL_OUTPUTS, frozenset({"call_id", "name", "namespace", "output"})),
}
# Of items and of parts of their contents: they are listed, and never shown to the model.
_KEPT_LABELS = ("id", "status", "role", "execution")
_KEPT_LABELS_OF_PARTS = ("type", "detail", "file_id", "file_url", "image_url")


def kept_items(items: Sequence[Json], unseal: Unseal) -> list[Json]:
    """Returns items, which were translated, with as much of them as is stored: that which the prompt shows.

    A prompt is bounded. All that it leaves out would be stored without a bound.
    """
    placed = [(item, "input") for item in items]
    shown = without_compacted(placed, [kind_of(item, "input") for item in items])
    kinds = ((item, kind_of(item, "input")) for item, _ in shown)
    return [_kept_item(item, kind, unseal) for item, kind in kinds if kind not in _SKIPPED]


def _kept_item(item: Json, kind: str, unseal: Unseal) -> Json:
    kept = {name: item[name] for name in item if name in _KEPT_FIELDS[kind]}
    kept |= {name: item[name] for name in _KEPT_LABELS if _is_label(item.get(name))}
    match kind:
        case "reasoning":
            texts = _texts_of_reasoning(item)
            kept.pop("content", None)
            if any(texts):
                kept["content"] = [{"type": "reasoning_text", "text": text} for text in texts]
        case "local_shell_call":
            kept["action"] = _shown_action(item["action"])
            if _is_label(type := item["action"].get("type")):
                kept["action"]["type"] = type
        case "tool_search_output" | "additional_tools":
            kept["tools"] = list(map(kept_tool, item["tools"]))
    for name in ("content", "output"):
        if kind != "reasoning" and isinstance(kept.get(name), Mapping | list):
            parts = kept[name] if isinstance(kept[name], list) else [kept[name]]
            kept[name] = list(map(_kept_part, parts))
    if isinstance(sealed := kept.get("encrypted_content"), str) and ("content" in kept or not unseal(sealed)):
        del kept["encrypted_content"]
    if isinstance(text := kept.get("arguments"), str):
        kept["arguments"] = _kept_arguments(text)
    return {"type": kind, **kept}


def _kept_part(part: Json) -> Json:
    """Returns a part of a content: its text, and of a medium all that its line is made of."""
    text = _TEXT_PARTS.get(part["type"])
    kept = {name: part[name] for name in _KEPT_LABELS_OF_PARTS if _is_label(part.get(name))}
    if text is not None:
        kept[text] = part[text]
    elif name := name_of(part):
        kept["filename"] = name
    if (mark := part.get(BREAKPOINT)) is not None:
        kept[BREAKPOINT] = {name: mark[name] for name in ("mode", "ttl") if mark.get(name) is not None}
    return kept


def _kept_arguments(text: str) -> str:
    """Returns the arguments of a call, without much white space and values that later ones replace."""
    read = arguments_of(text, "arguments")
    if isinstance(read, str):
        return text
    short = json.dumps(read, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= 2 * len(short) + MAX_LABEL_CHARS else short


def _is_label(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_LABEL_CHARS


def kept_output(items: list[Json]) -> list[Json]:
    """Returns the items of an answer as they are stored: without log-probabilities, which no prompt shows."""
    scored = {i for i, item in enumerate(items) if any(part.get("logprobs") for part in _parts_of(item))}
    if not scored:
        return items
    return [
        {**item, "content": [{**part, "logprobs": []} for part in _parts_of(item)]} if i in scored else item
        for i, item in enumerate(items)
    ]


def _parts_of(item: Json) -> list[Json]:
    return item.get("content") or []


def messages_of(
    history: Sequence[Any], items: Sequence[Any], tools: Toolbox, unseal: Unseal
) -> list[Message]:
    """Translates stored items and a request's own, and adds the tools that they load to `tools`.

    Raises InvalidParameter, MissingParameter and Unsupported.
    """
    refuse_more_than(MAX_MESSAGES, [*history, *items], "input")
    translator = _Translator(tools, unseal)
    placed = [(item, "previous_response_id") for item in history]
    for i, item in enumerate(items):
        refuse_deep(item, f"input[{i}]")
        placed.append((item, f"input[{i}]"))
    for item, path in without_compacted(placed, [kind_of(item, path) for item, path in placed]):
        translator.add(item, path)
    return translator.end()


class _Translator:
    """Translator of items, one after the other."""

    def __init__(self, tools: Toolbox, unseal: Unseal) -> None:
        self._tools = tools
        self._unseal = unseal
        self._messages: list[Message] = []
        self._turn: list[MessagePart] = []  # of the assistant, not ended yet
        self._turn_has_text = False
        self._turn_has_call = False

    def end(self) -> list[Message]:
        self._end_turn()
        marks = count_marks(self._messages)
        if marks > MAX_MARKS:
            raise InvalidParameter(BREAKPOINT, marks, f"sent at most {MAX_MARKS} times")
        return self._messages

    def add(self, item: Any, path: str) -> None:
        kind = kind_of(item, path)
        match kind:
            case "message":
                self._add_message(item, path)
            case "reasoning":
                self._add_reasoning(item, path)
            case "function_call":
                name = self._name_of(item, path)
                arguments = arguments_of(item.get("arguments"), f"{path}.arguments")
                self._add_call(item, name, arguments, path)
            case "custom_tool_call":
                text = item.get("input")
                if not isinstance(text, str):
                    raise InvalidParameter(f"{path}.input", text, "a string")
                self._add_call(item, self._name_of(item, path), {"input": text}, path)
            case "local_shell_call":
                action = item.get("action")
                if not isinstance(action, Mapping):
                    raise InvalidParameter(f"{path}.action", action, "an object")
                self._add_call(item, "local_shell", _shown_action(action), path)
            case "computer_call":
                # Of another server: the tool is refused here, and the history has its calls.
                action = {name: item[name] for name in ("action", "actions") if item.get(name) is not None}
                self._add_call(item, "computer", action, path)
            case "tool_search_call":
                arguments = arguments_of(item.get("arguments"), f"{path}.arguments")
                self._add_call(item, "tool_search", arguments, path)
            case "tool_search_output":
                loaded = self._tools.load(_list_of(item, "tools", path), f"{path}.tools")
                parts = tuple(ToolReference(tool.name) for tool in loaded)
                self._add_result(item, parts or (Text("No tools found."),), path)
            case "additional_tools":
                loaded = self._tools.load(_list_of(item, "tools", path), f"{path}.tools")
                lines = [json.dumps(template_tool(tool), ensure_ascii=False) for tool in loaded]
                text = "\n".join(["You can call these tools now:", *lines])
                self._add("system", [Text(text)], path)
            case "agent_message":
                self._add("user", self._texts_of(item.get("content"), f"{path}.content"), path)
            case _ if kind in COMPACTIONS:
                sealed = item.get("encrypted_content")
                refuse_other_text(sealed, f"{path}.encrypted_content", None)
                self._add("user", [Text(compaction_text(self._unseal(sealed) if sealed else None))], path)
            case _ if kind == TRIGGER:
                refuse_trigger(path)
            case _ if kind in _CALL_OUTPUTS:
                self._add_result(item, tuple(self._texts_of(item.get("output"), f"{path}.output")), path)
            case _ if kind in _SKIPPED:
                pass
            case "item_reference":
                raise InvalidParameter(f"{path}.id", item.get("id"), "the id of an item of a stored response")
            case _:
                raise Unsupported(
                    f"{path}.type",
                    f"{kind[:MAX_NAME_CHARS]!r}: This server reads messages, reasoning, and calls of tools that "
                    "the client runs, with their outputs. Leave the item out.",
                )

    def _add(self, role: str, parts: Sequence[MessagePart], path: str) -> None:
        self._end_turn()
        self._messages.append(Message(role, tuple(parts), origin=path))

    def _end_turn(self) -> None:
        if self._turn:
            self._messages.append(Message("assistant", tuple(self._turn), origin="input"))
            self._turn = []
            self._turn_has_text = self._turn_has_call = False

    def _add_message(self, item: Json, path: str) -> None:
        role = item.get("role")
        if role is None:
            raise MissingParameter(f"{path}.role")
        if role not in _ROLES:
            raise InvalidParameter(f"{path}.role", role, f"one of {', '.join(_ROLES)}")
        texts = self._texts_of(item.get("content"), f"{path}.content")
        if role != "assistant":
            self._add(role, texts, f"{path}.role")
            return
        if self._has_text_alone():
            self._end_turn()
        self._turn += texts
        self._turn_has_text = True

    def _add_reasoning(self, item: Json, path: str) -> None:
        text = self._reasoning_of(item, path)
        if self._has_text_alone():
            self._end_turn()
        if text:
            self._turn.append(Reasoning(text))

    def _has_text_alone(self) -> bool:
        """Returns whether the turn has text and no call, so that another text is another message."""
        return self._turn_has_text and not self._turn_has_call

    def _reasoning_of(self, item: Json, path: str) -> str:
        """Returns the text of reasoning: the item's text, else the unsealed text, else an empty text.

        A summary is not shown: the model did not write it.
        """
        texts = _texts_of_reasoning(item, path)
        if any(texts):
            return "".join(texts)
        sealed = item.get("encrypted_content")
        refuse_other_text(sealed, f"{path}.encrypted_content", None)
        return (self._unseal(sealed) if sealed else None) or ""

    def _name_of(self, item: Json, path: str) -> str:
        name, namespace = item.get("name"), item.get("namespace")
        if name is None:
            raise MissingParameter(f"{path}.name")
        refuse_other_text(name, f"{path}.name", MAX_NAME_CHARS)
        refuse_other_text(namespace, f"{path}.namespace", MAX_NAME_CHARS)
        return shown_name(str(name), namespace)

    def _add_call(self, item: Json, name: str, arguments: Mapping[str, Any] | str, path: str) -> None:
        call_id = item.get("call_id")
        if call_id is None and item.get("type") == "local_shell_call":
            call_id = item.get("id")
        refuse_other_text(call_id, f"{path}.call_id", None)
        self._turn.append(ToolCall(call_id, name, arguments))
        self._turn_has_call = True

    def _add_result(self, item: Json, parts: tuple[Text | ToolReference, ...], path: str) -> None:
        call_id = item.get("call_id")
        if call_id is None and item.get("type") == "local_shell_call_output":
            call_id = item.get("id")  # OpenAI's name of it, for this type alone
        refuse_other_text(call_id, f"{path}.call_id", None)
        name = self._name_of(item, path) if item.get("name") is not None else None
        self._add("tool", [ToolResult(call_id, parts, name)], path)

    def _texts_of(self, content: Any, path: str) -> list[Text]:
        if content is None or isinstance(content, str):
            return [Text(content or "")]
        if isinstance(content, Mapping):  # the output of a computer's call is one part
            content = [content]
        if not isinstance(content, list):
            raise InvalidParameter(path, content, "a string or a list of parts")
        refuse_more_than(MAX_CONTENT_PARTS, content, path)
        texts = [_text_of(part, f"{path}[{i}]") for i, part in enumerate(content)]
        return texts or [Text("")]


def _texts_of_reasoning(item: Json, path: str = "input") -> list[str]:
    content = item.get("content")
    if content is None:
        return []
    if not isinstance(content, list):
        raise InvalidParameter(f"{path}.content", content, "a list of parts, or null")
    refuse_more_than(MAX_CONTENT_PARTS, content, f"{path}.content")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InvalidParameter(f"{path}.content[{i}]", part, "a part of type 'reasoning_text'")
        texts.append(text)
    return texts


def _shown_action(action: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the action of a local shell's call as the arguments that the model reads."""
    return {key: value for key, value in action.items() if key != "type" and value}


def _text_of(part: Any, path: str) -> Text:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidParameter(path, part, "a part with a 'type'")
    mark = breakpoint_of(part, path)
    if kind not in _TEXT_PARTS:
        medium = medium_of(part, path, mark)
        if medium is None:
            raise InvalidParameter(f"{path}.type", kind, "'input_text', 'input_image' or 'input_file'")
        return medium
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidParameter(f"{path}.{_TEXT_PARTS[kind]}", text, "a string")
    return Text(text, mark)


def _list_of(item: Json, name: str, path: str) -> list[Any]:
    value = item.get(name)
    if not isinstance(value, list):
        raise InvalidParameter(f"{path}.{name}", value, "a list of tools")
    return value
