"""Edits of the history that a client asks for in `context_management`.

An edit removes parts of earlier messages before the prompt is rendered. The cached prefix ends at the first part that
the request before did not remove yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rootstock.errors import InvalidParameter, Unsupported
from rootstock.text.conversation.marks import marks_in
from rootstock.text.conversation.types import (
    Conversation,
    Message,
    MessagePart,
    PrefixMark,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
)
from rootstock.text.limits import MAX_TOOLS, refuse_more_than, refuse_other_text

_CLEARED = "[cleared]"
_KEPT_THINKING_TURNS = 1  # Anthropic's defaults
_KEPT_TOOL_USES = 3
_TRIGGER_TOKENS = 100_000

CountTokens = Callable[[Conversation], int]  # of the prompt


@dataclass(frozen=True, slots=True)
class ClearThinking:
    """Removes the reasoning of all assistant turns but the last `keep` ones that have some. None keeps all."""

    keep: int | None


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Replaces the results of all calls but the last `keep` ones, once the prompt or the calls exceed a trigger."""

    keep: int
    over_tokens: int | None
    over_uses: int | None
    at_least_tokens: int
    excluded: frozenset[str]
    inputs: bool | frozenset[str]  # whose arguments are cleared, too


Edit = ClearThinking | ClearToolUses


def edits_of(config: Mapping[str, Any] | None, path: str, most: int) -> list[Edit]:
    """Translates `context_management`. Raises InvalidParameter and Unsupported."""
    edits = (config or {}).get("edits") or []
    if not isinstance(edits, list):
        raise InvalidParameter(f"{path}.edits", edits, "a list of edits")
    refuse_more_than(most, edits, f"{path}.edits")
    return [_edit_of(edit, f"{path}.edits[{i}]") for i, edit in enumerate(edits)]


def _edit_of(edit: Any, path: str) -> Edit:
    kind = edit.get("type") if isinstance(edit, Mapping) else None
    match kind:
        case "clear_thinking_20251015":
            keep = edit.get("keep")
            if keep == "all" or (isinstance(keep, Mapping) and keep.get("type") == "all"):
                return ClearThinking(None)
            return ClearThinking(_value(keep, "thinking_turns", f"{path}.keep", _KEPT_THINKING_TURNS))
        case "clear_tool_uses_20250919":
            return _clear_tool_uses(edit, path)
        case "compact_20260112":
            raise Unsupported(path, "The server summarizes nothing: the client does it. Leave it out.")
        case _:
            allowed = "an edit of type 'clear_thinking_20251015' or 'clear_tool_uses_20250919'"
            raise InvalidParameter(path, edit, allowed)


def _clear_tool_uses(edit: Mapping[str, Any], path: str) -> ClearToolUses:
    trigger = edit.get("trigger")
    by_uses = isinstance(trigger, Mapping) and trigger.get("type") == "tool_uses"
    inputs = edit.get("clear_tool_inputs") or False
    return ClearToolUses(
        keep=_value(edit.get("keep"), "tool_uses", f"{path}.keep", _KEPT_TOOL_USES),
        over_tokens=None if by_uses else _value(trigger, "input_tokens", f"{path}.trigger", _TRIGGER_TOKENS),
        over_uses=_value(trigger, "tool_uses", f"{path}.trigger", 0) if by_uses else None,
        at_least_tokens=_value(edit.get("clear_at_least"), "input_tokens", f"{path}.clear_at_least", 0),
        excluded=_names(edit.get("exclude_tools") or [], f"{path}.exclude_tools"),
        inputs=inputs if isinstance(inputs, bool) else _names(inputs, f"{path}.clear_tool_inputs"),
    )


def _value(given: Any, kind: str, path: str, default: int) -> int:
    if given is None:
        return default
    value = given.get("value") if isinstance(given, Mapping) and given.get("type") == kind else None
    if type(value) is not int or not 0 <= value < 2**63:
        raise InvalidParameter(path, given, f"an object with the type '{kind}' and a 'value', at least 0")
    return value


def _names(given: Any, path: str) -> frozenset[str]:
    if not isinstance(given, list):
        raise InvalidParameter(path, given, "a list of names of tools")
    refuse_more_than(MAX_TOOLS, given, path)
    for i, name in enumerate(given):
        refuse_other_text(name, f"{path}[{i}]", None)
    return frozenset(given)


# ---- application


@dataclass(frozen=True, slots=True)
class Edited:
    conversation: Conversation
    applied: tuple[Mapping[str, Any], ...] = ()  # as the answer reports them


def edited(conversation: Conversation, edits: Sequence[Edit], count_tokens: CountTokens) -> Edited:
    """Applies edits in their order. `count_tokens` renders and tokenizes: it is called for edits that change much."""
    applied: list[Mapping[str, Any]] = []
    for edit in edits:
        before = conversation
        match edit:
            case ClearThinking(keep):
                conversation, turns = _without_thinking(before, keep)
                if turns:
                    cleared = count_tokens(before) - count_tokens(conversation)
                    applied.append(
                        {
                            "type": "clear_thinking_20251015",
                            "cleared_thinking_turns": turns,
                            "cleared_input_tokens": max(0, cleared),
                        }
                    )
            case ClearToolUses():
                conversation, uses, cleared = _without_tool_uses(before, edit, count_tokens)
                if uses:
                    applied.append(
                        {
                            "type": "clear_tool_uses_20250919",
                            "cleared_tool_uses": uses,
                            "cleared_input_tokens": cleared,
                        }
                    )
    return Edited(conversation, tuple(applied))


def _without_thinking(conversation: Conversation, keep: int | None) -> tuple[Conversation, int]:
    """Returns the conversation, and the number of turns whose reasoning was removed.

    A turn lasts from one question of the user to the next one: its messages between calls count as one.
    """
    if keep is None:
        return conversation, 0
    turn, turns = 0, list[int]()  # the turn of each message
    for message in conversation.messages:
        turn += message.role == "user" and not any(isinstance(part, ToolResult) for part in message.parts)
        turns.append(turn)
    pairs = list(zip(conversation.messages, turns, strict=True))
    thinking = list(dict.fromkeys(turn for message, turn in pairs if _thinks(message)))
    old = set(thinking[: max(0, len(thinking) - keep)])
    messages = [_unthinking(message) if turn in old else message for message, turn in pairs]
    return replace(conversation, messages=messages), len(old)


def _thinks(message: Message) -> bool:
    return any(isinstance(part, Reasoning) for part in message.parts)


def _unthinking(message: Message) -> Message:
    return replace(message, parts=tuple(part for part in message.parts if not isinstance(part, Reasoning)))


def _without_tool_uses(
    conversation: Conversation, edit: ClearToolUses, count_tokens: CountTokens
) -> tuple[Conversation, int, int]:
    """Returns the conversation, the number of cleared results, and the tokens that they had."""
    names = {
        part.id: part.name
        for message in conversation.messages
        for part in message.parts
        if isinstance(part, ToolCall)
    }
    uses = [
        part.call_id
        for message in conversation.messages
        for part in message.parts
        if isinstance(part, ToolResult) and names.get(part.call_id) not in edit.excluded
    ]
    old = frozenset(uses[: max(0, len(uses) - edit.keep)])
    if not old or (edit.over_uses is not None and len(uses) <= edit.over_uses):
        return conversation, 0, 0
    tokens = count_tokens(conversation)
    if edit.over_tokens is not None and tokens <= edit.over_tokens:
        return conversation, 0, 0
    messages = [_cleared(message, old, edit.inputs) for message in conversation.messages]
    shorter = replace(conversation, messages=messages)
    cleared = tokens - count_tokens(shorter)
    if cleared <= 0 or cleared < edit.at_least_tokens:
        return conversation, 0, 0
    return shorter, len(old), cleared


def _cleared(message: Message, ids: Collection[str | None], inputs: bool | frozenset[str]) -> Message:
    parts: list[MessagePart] = []
    for part in message.parts:
        match part:
            case ToolResult(call_id=id) if id in ids:
                part = replace(part, parts=(Text(_CLEARED, _mark_of(part.parts)),))
            case ToolCall(id=id, name=name) if id in ids and _includes(inputs, name):
                part = replace(part, arguments={})
            case _:
                pass
        parts.append(part)
    return replace(message, parts=tuple(parts))


def _includes(inputs: bool | frozenset[str], name: str) -> bool:
    return inputs if isinstance(inputs, bool) else name in inputs


def _mark_of(parts: Sequence[MessagePart]) -> PrefixMark | None:
    """Returns the last mark of a result, which its short text takes over."""
    return next(reversed(marks_in(parts)), None)
