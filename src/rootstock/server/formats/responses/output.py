"""Output of a response: a model's answer as items, and the events that tell of them while they grow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rootstock.server.formats.responses.tools import ClientTool, Toolbox, ToolKind
from rootstock.server.wire.api_call import Json
from rootstock.text.output.deltas import (
    CallArguments,
    CallEnded,
    CallStarted,
    ContentDelta,
    Delta,
    DeltaParser,
    Markup,
    ReasoningDelta,
)

Event = tuple[str, Json]  # its type, and its fields without type and number

_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_INPUT_PREFIX_CHARS = 64  # arguments that begin otherwise have no input at their beginning
_STRING_BODY = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


@dataclass(frozen=True, slots=True)
class OutputSettings:
    response_id: str
    tools: Toolbox
    parallel: bool = True  # False: only the first call is shown
    seal: Callable[[str], str] | None = None  # of reasoning; None: not asked for

    def item_id(self, prefix: str, index: int) -> str:
        """Returns the id of an item, which names its response and its place: references need no table."""
        return f"{prefix}_{self.response_id.removeprefix('resp_')}{index:04x}"


class WholeCalls:
    """A parser that shows calls only when they are complete. A malformed call is text."""

    def __init__(self, parser: DeltaParser) -> None:
        self._parser = parser
        self._open: dict[int, list[Delta]] = {}

    def push(self, text: str) -> list[Delta]:
        return list(self._settled(self._parser.push(text)))

    def finish(self) -> list[Delta]:
        return list(self._settled(self._parser.finish()))

    def _settled(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            match delta:
                case CallStarted(index):
                    self._open[index] = [delta]
                case CallArguments(index):
                    self._open[index].append(delta)
                case CallEnded(index, arguments, raw):
                    parts = self._open.pop(index)
                    yield from [ContentDelta(raw)] if arguments is None else [*parts, delta]
                case _:
                    yield delta


class Output:
    """The items of one answer. `push` and `finish` return the events of their growth."""

    def __init__(self, settings: OutputSettings, parser: DeltaParser) -> None:
        self.items: list[Json] = []  # in the order of `output_index`; the last one may be open
        self._settings = settings
        self._parser = parser
        self._open: _OpenText | _OpenCall | None = None
        self._logprobs: list[Json] = []  # of the tokens pushed since the last delta
        self._held: dict[int, CallStarted] = {}  # calls whose items have no deltas

    def push(self, text: str, logprob: Json | None = None) -> list[Event]:
        """Takes the text of one token. `logprob` is the entry that describes it."""
        if logprob is not None:
            self._logprobs.append(logprob)
        return self._taken(self._parser.push(text))

    def finish(self, text: str, complete: bool) -> list[Event]:
        """Takes the text that was held back until the end, and closes the last item."""
        events = self._taken([*self._parser.push(text), *self._parser.finish()])
        if not self.items:
            events += self._text("", _MESSAGE, [])  # clients expect a message
        return events + self._closed("completed" if complete else "incomplete")

    def so_far(self) -> list[Json]:
        """Returns the items of an answer that is not complete."""
        if self._open is None:
            return self.items
        return [*self.items[:-1], self._open.item("incomplete")]

    def _taken(self, deltas: Sequence[Delta]) -> list[Event]:
        if not deltas:
            return []
        # A token without a delta of its own belongs to the delta that follows: its text was held back.
        scored, self._logprobs = self._logprobs, []
        events: list[Event] = []
        for delta in deltas:
            events += self._of(delta, scored)
            scored = []
        return events

    def _of(self, delta: Delta, scored: list[Json]) -> list[Event]:
        match delta:
            case ContentDelta(text):
                return self._text(text, _MESSAGE, scored)
            case ReasoningDelta(text):
                return self._text(text, _REASONING, [])
            case CallStarted(index) | CallArguments(index) | CallEnded(index):
                return self._call(delta) if index == 0 or self._settings.parallel else []
            case Markup():
                return []

    def _text(self, text: str, form: _TextForm, scored: list[Json]) -> list[Event]:
        events: list[Event] = []
        item = self._open
        if not isinstance(item, _OpenText) or item.form is not form:
            events = self._closed("completed")
            id = self._settings.item_id(form.prefix, len(self.items))
            item = self._open = _OpenText(form, id, len(self.items), self._settings.seal)
            self.items.append(item.item("in_progress"))
            events += item.opened()
        return events + item.more(text, scored)

    def _call(self, delta: CallStarted | CallArguments | CallEnded) -> list[Event]:
        match delta:
            case CallStarted(index, call_id, name):
                tool = self._settings.tools.client_tool(name)
                if tool.kind not in _CALLS:
                    self._held[index] = delta
                    return []
                events = self._closed("completed")
                at = len(self.items)
                form = _CALLS[tool.kind]
                call = _OpenCall(form, tool, self._settings.item_id(form.prefix, at), at, call_id)
                self._open = call
                self.items.append(call.item("in_progress"))
                return [*events, *call.opened()]
            case CallArguments(index, text):
                return self._open.more(text) if isinstance(self._open, _OpenCall) else []
            case CallEnded(index, arguments, raw):
                if index in self._held:
                    return self._ended_at_once(self._held.pop(index), arguments, raw)
                if isinstance(self._open, _OpenCall):
                    return [
                        *self._open.ended(arguments),
                        *self._closed("incomplete" if arguments is None else "completed"),
                    ]
                return []

    def _ended_at_once(
        self, start: CallStarted, arguments: Mapping[str, Any] | None, raw: str
    ) -> list[Event]:
        """Adds the item of a call whose arguments are an object rather than text."""
        arguments = _encodable(arguments)
        if arguments is None:
            return self._text(raw, _MESSAGE, [])
        events = self._closed("completed")
        at = len(self.items)
        tool = self._settings.tools.client_tool(start.name)
        if tool.kind is ToolKind.TOOL_SEARCH:
            fields: Json = {"type": "tool_search_call", "execution": "client", "arguments": arguments}
            prefix = "tsc"
        else:
            fields = {"type": "local_shell_call", "action": {"type": "exec", "env": {}, **arguments}}
            prefix = "lsh"
        item = {"id": self._settings.item_id(prefix, at), "call_id": start.id, **fields}
        self.items.append(item | {"status": "completed"})
        added = {"output_index": at, "item": item | {"status": "in_progress"}}
        done = {"output_index": at, "item": self.items[-1]}
        return [*events, ("response.output_item.added", added), ("response.output_item.done", done)]

    def _closed(self, status: str) -> list[Event]:
        """Closes the open item, if there is one."""
        if self._open is None:
            return []
        events = self._open.closed(status)
        self.items[self._open.index] = item = self._open.item(status)
        events.append(("response.output_item.done", {"output_index": self._open.index, "item": item}))
        self._open = None
        return events


@dataclass(frozen=True, slots=True)
class _TextForm:
    prefix: str
    events: str  # the type of its delta's event, without ".delta"
    part: Json


_MESSAGE = _TextForm("msg", "response.output_text", {"type": "output_text", "annotations": []})
_REASONING = _TextForm("rs", "response.reasoning_text", {"type": "reasoning_text"})


@dataclass(slots=True)
class _OpenText:
    """A message, or reasoning, that grows. It has one part."""

    form: _TextForm
    id: str
    index: int
    seal: Callable[[str], str] | None
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[Json] = field(default_factory=list)

    def item(self, status: str) -> Json:
        content = [self._part()] if self._texts or status != "in_progress" else []
        if self.form is _MESSAGE:
            return {
                "id": self.id,
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": content,
            }
        item: Json = {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
        }
        if self.seal is not None and status != "in_progress":
            item["encrypted_content"] = self.seal("".join(self._texts))
        return item

    def _part(self) -> Json:
        part = self.form.part | {"text": "".join(self._texts)}
        return part | {"logprobs": self._logprobs} if self.form is _MESSAGE else part

    def _place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def opened(self) -> list[Event]:
        return [
            ("response.output_item.added", {"output_index": self.index, "item": self.item("in_progress")}),
            ("response.content_part.added", self._place() | {"part": self._part()}),
        ]

    def more(self, text: str, scored: list[Json]) -> list[Event]:
        if not text and not scored:
            return []
        self._texts.append(text)
        delta = self._place() | {"delta": text}
        if self.form is _MESSAGE:
            self._logprobs += scored
            delta["logprobs"] = scored
        return [(f"{self.form.events}.delta", delta)]

    def closed(self, status: str) -> list[Event]:
        part = self._part()
        done = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        return [
            (f"{self.form.events}.done", self._place() | done),
            ("response.content_part.done", self._place() | {"part": part}),
        ]


@dataclass(frozen=True, slots=True)
class _CallForm:
    prefix: str
    type: str
    events: str
    text: str  # the field of the arguments or of the input


_CALLS = {
    ToolKind.FUNCTION: _CallForm("fc", "function_call", "response.function_call_arguments", "arguments"),
    ToolKind.CUSTOM: _CallForm("ctc", "custom_tool_call", "response.custom_tool_call_input", "input"),
}


@dataclass(slots=True)
class _OpenCall:
    """A call of a function or of a custom tool, that grows."""

    form: _CallForm
    tool: ClientTool
    id: str
    index: int
    call_id: str
    _texts: list[str] = field(default_factory=list)
    _arguments: list[str] = field(default_factory=list)  # of a custom tool: its input is a string inside
    _reader: _InputReader = field(default_factory=lambda: _InputReader())

    def item(self, status: str) -> Json:
        item: Json = {"id": self.id, "type": self.form.type, "status": status, "call_id": self.call_id}
        if self.tool.namespace is not None:
            item["namespace"] = self.tool.namespace
        return item | {"name": self.tool.name, self.form.text: "".join(self._texts)}

    def opened(self) -> list[Event]:
        item = self.item("in_progress")
        return [("response.output_item.added", {"output_index": self.index, "item": item})]

    def more(self, text: str) -> list[Event]:
        if self.tool.kind is ToolKind.CUSTOM:
            self._arguments.append(text)
            text = self._reader.push(text)
        return self._delta(text)

    def ended(self, arguments: Mapping[str, Any] | None) -> list[Event]:
        """Returns the rest of the input of a custom tool."""
        if self.tool.kind is not ToolKind.CUSTOM:
            return []
        seen = "".join(self._texts)
        if arguments is None:
            whole = seen or "".join(self._arguments)
        else:
            given = arguments.get("input", "")
            whole = _utf8(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
        if not whole.startswith(seen):  # a second `input`: the last one counts
            self._texts = [whole]
            return []
        return self._delta(whole[len(seen) :])

    def _delta(self, text: str) -> list[Event]:
        if not text:
            return []
        self._texts.append(text)
        return [
            (f"{self.form.events}.delta", {"item_id": self.id, "output_index": self.index, "delta": text})
        ]

    def closed(self, status: str) -> list[Event]:
        done: Json = {"item_id": self.id, "output_index": self.index, self.form.text: "".join(self._texts)}
        if self.tool.kind is ToolKind.FUNCTION:
            done["name"] = self.tool.name
        return [(f"{self.form.events}.done", done)]


class _InputReader:
    """Reader of the string `input` at the beginning of a custom tool's arguments, as far as it has arrived."""

    def __init__(self) -> None:
        self._unread = ""
        self._inside = False
        self._ended = False

    def push(self, text: str) -> str:
        """Returns the characters of the string that are certain."""
        if self._ended:
            return ""
        self._unread += text
        if not self._inside:
            begin = _INPUT.match(self._unread)
            if begin is None:
                self._ended = len(self._unread) > _INPUT_PREFIX_CHARS
                return ""
            self._inside = True
            self._unread = self._unread[begin.end() :]
        body = _STRING_BODY.match(self._unread)
        assert body is not None  # it may be empty
        taken = body[0]
        rest = self._unread[len(taken) :]
        self._ended = rest.startswith('"')
        half = _HALF_PAIR.search(taken)
        if half is not None and not self._ended:
            taken, rest = taken[: half.start()], taken[half.start() :] + rest
        self._unread = rest
        try:
            return _utf8(json.loads(f'"{taken}"', strict=False))
        except ValueError:  # the whole arguments are no JSON either
            self._ended = True
            return ""


def _utf8(text: str) -> str:
    """Replaces halves of surrogate pairs, which a model can spell in JSON."""
    return text.encode(errors="replace").decode()


def _encodable(arguments: Mapping[str, Any] | None) -> Json | None:
    """Returns the arguments of a call as JSON can have them; None for NaN, infinity and deep nesting."""
    try:
        return json.loads(_utf8(json.dumps(arguments, ensure_ascii=False, allow_nan=False)))  # type: ignore[no-any-return]
    except (ValueError, RecursionError):
        return None
