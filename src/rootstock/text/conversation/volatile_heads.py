"""Volatile heads: lines that clients write before the system prompt and that change between requests.

Such a line tells the model nothing, and a prompt that begins with it has no prefix in common with any other one. The
rules name lines of known clients. `--no-drop-volatile` keeps the lines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rootstock.text.conversation.types import Conversation, Message, MessagePart, Text


@dataclass(frozen=True, slots=True)
class VolatileHead:
    """A rule: the first line of a text of the system prompt is dropped if it starts with `begins`."""

    begins: str


VOLATILE_HEADS = (
    # Claude Code's version and the entry point, with digits that depend on the first message.
    VolatileHead("x-anthropic-billing-header:"),
)


@dataclass(frozen=True, slots=True)
class DroppedHead:
    """A line that a rule dropped."""

    begins: str
    chars: int

    def __str__(self) -> str:
        return f"Dropped {self.chars} characters of a volatile block that begins with {self.begins!r}."


def without_volatile_heads(conversation: Conversation) -> tuple[Conversation, tuple[DroppedHead, ...]]:
    """Drops volatile lines of the system messages that begin the conversation. The rest of such a text stays."""
    messages = list(conversation.messages)
    dropped: list[DroppedHead] = []
    for index, message in enumerate(messages):
        if message.role not in ("system", "developer"):
            break
        messages[index] = _kept(message, dropped)
    if not dropped:
        return conversation, ()
    kept = [message for message in messages if message.parts]
    return replace(conversation, messages=kept), tuple(dropped)


def _kept(message: Message, dropped: list[DroppedHead]) -> Message:
    """Returns a message without its volatile lines, and notes them."""
    parts: list[MessagePart] = []
    for part in message.parts:
        rule = _rule_of(part)
        if isinstance(part, Text) and rule is not None:
            rest = part.text.partition("\n")[2].lstrip("\r\n")
            dropped.append(DroppedHead(rule.begins, len(part.text) - len(rest)))
            if not rest:
                continue
            part = replace(part, text=rest)
        parts.append(part)
    return replace(message, parts=tuple(parts))


def _rule_of(part: MessagePart) -> VolatileHead | None:
    if not isinstance(part, Text):
        return None
    return next((rule for rule in VOLATILE_HEADS if part.text.startswith(rule.begins)), None)
