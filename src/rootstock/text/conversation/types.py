"""Types of the canonical conversation: messages, their parts, tools, and the choice among tools.

Each wire format (OpenAI chat, OpenAI Responses, Anthropic Messages) translates its requests to a `Conversation`.
`text/conversation/template.py` translates a conversation to the arguments of the model's chat template. No wire
format knows another one, and no template knows a wire format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rootstock.text.constraints.asked import Lark, Regex


@dataclass(frozen=True, slots=True)
class PrefixMark:
    """A client's mark of the end of a prefix that later requests will share (`cache_control`)."""

    field: str = field(compare=False)  # of the client's body: answers name it
    ttl_s: float | None = None  # keep the prefix so long; None: as the request's options tell


MediumKind = Literal["image", "audio", "video", "file"]


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or another medium of the client: a line of text stands for it if the model does not read it."""

    kind: MediumKind
    # Of an image: its file in base64, or its address; "": it is elsewhere.
    source: str = field(default="", compare=False, repr=False, kw_only=True)
    field: str = field(compare=False)  # of the client's body: answers name it


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    mark: PrefixMark | None = None  # at the end of this part
    media: tuple[Medium, ...] = ()  # for which the text, or a line of it, stands
    is_image: bool = False  # the text is the marker of an image: it adjoins other texts without a line break


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning of an earlier answer, which the client sends back. A template may show or drop it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an earlier answer.

    `arguments` is an object, or the text of the arguments where it is not a JSON object: it is part of the history as
    it is. A custom tool's call has the object {"input": text}.
    """

    id: str | None  # some clients send none
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class ToolReference:
    """The place at which a tool with `deferred` is shown to the model for the first time."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str | None
    parts: tuple[Text | ToolReference, ...]
    name: str | None = None  # of the tool, if the client sends it
    is_error: bool = False


MessagePart = Text | Reasoning | ToolCall | ToolResult | ToolReference


@dataclass(frozen=True, slots=True)
class Message:
    """A message. Its parts keep the client's order.

    Roles are "system", "user", "assistant" and "tool", or another name that the model's template renders. A user's
    message may hold results of tools beside text: Anthropic's clients send them so.
    """

    role: str
    parts: tuple[MessagePart, ...]
    fields: Mapping[str, Any] = field(
        default_factory=dict
    )  # other fields that some templates read, such as `name`
    origin: str = field(default="messages", compare=False)  # of the role: the client's field, for errors


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. A custom tool is a function with one argument, `input`, which is a text."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # a JSON schema
    strict: bool = False  # calls must follow the schema
    deferred: bool = False  # shown at its first ToolReference, not before the conversation
    mark: PrefixMark | None = None  # for the tools up to this one
    grammar: Lark | Regex | None = None  # of a custom tool's input
    fields: Mapping[str, Any] = field(
        default_factory=dict
    )  # the tool's other fields, which templates may print


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The calls that an answer may or must hold."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()  # with "required": one of these; empty: any tool
    parallel: bool = True  # several calls in one answer are allowed


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """A field of the client's body, or a part of it, that has no effect with this model: the answer names it."""

    field: str
    reason: str
    # Of a switch for reasoning: its value. A model that always or never reasons, as the client wants it, is no cause
    # for a warning.
    wants_reasoning: bool | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    options: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    ignored: tuple[IgnoredField, ...] = ()

    def count_chars(self) -> int:
        """Counts the characters of the messages' texts, without calls and tools."""
        return sum(_chars_of(part) for message in self.messages for part in message.parts)


def _chars_of(part: MessagePart) -> int:
    match part:
        case Text(text) | Reasoning(text):
            return len(text)
        case ToolResult(parts=parts):
            return sum(map(_chars_of, parts))
        case _:
            return 0
