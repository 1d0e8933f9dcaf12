"""Calls as the chat templates of a format write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rootstock.text.output.formats import (
    BareKeyCalls,
    Harmony,
    HeaderCalls,
    JsonCalls,
    OutputFormat,
    PythonicCalls,
    TaggedCalls,
    ValueType,
)

WrittenCall = tuple[str, Mapping[str, Any]]  # a name and arguments


def written(format: OutputFormat, calls: Sequence[WrittenCall]) -> str:
    """Returns the text of an answer's calls."""
    if isinstance(format.shape, Harmony):
        return "<|start|>assistant".join(_harmony(name, arguments) for name, arguments in calls)
    match format.shape.calls:
        case None:
            raise ValueError(f"the format {format.name!r} has no calls")
        case JsonCalls() as form:
            objects = [_json_object(form, name, arguments) for name, arguments in calls]
            if form.array:
                return f"{form.opening}{form.padding}[{', '.join(objects)}]{form.padding}{form.closing}"
            if not form.opening:
                return "; ".join(objects)
            return "\n".join(
                f"{form.opening}{form.padding}{each}{form.padding}{form.closing}" for each in objects
            )
        case HeaderCalls() as form:
            texts = [_header_call(form, i, name, arguments) for i, (name, arguments) in enumerate(calls)]
            return f"{form.section[0]}{form.separator.join(texts)}{form.section[1]}"
        case TaggedCalls() as form:
            texts = [_tagged_call(form, i, name, arguments) for i, (name, arguments) in enumerate(calls)]
            if form.section == ("", ""):
                return form.newline.join(texts)
            begin, end = form.section
            if form.section_holds == "one call":
                return "\n".join(f"{begin}{form.newline}{text}{form.newline}{end}" for text in texts)
            return f"{begin}{form.newline}{form.newline.join(texts)}{form.newline}{end}"
        case PythonicCalls() as form:
            return f"{form.opening}[{', '.join(_pythonic_call(*call) for call in calls)}]{form.closing}"
        case BareKeyCalls() as form:
            return "".join(
                f"{form.opening}call:{name}{_bare(arguments, form.quote)}{form.closing}"
                for name, arguments in calls
            )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _harmony(name: str, arguments: Mapping[str, Any]) -> str:
    return f" to=functions.{name}<|channel|>commentary json<|message|>{_json(arguments)}<|call|>"


def _json_object(form: JsonCalls, name: str, arguments: Mapping[str, Any]) -> str:
    return _json({form.name_key: name, form.arguments_key: arguments} if form.name_key else {name: arguments})


def _header_call(form: HeaderCalls, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    header = form.written_header.format(name=name, index=index, id=f"call{index:06}")
    return f"{form.opening}{header}{form.header_end}{_json(arguments)}{form.tail}{form.closing}"


def _tagged_call(form: TaggedCalls, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    if form.tag_end == "<|sep|>":
        tag = f'" index="{index + 1}"<|sep|>'
    elif form.tag_end:
        tag = form.name_ends[0] + form.tag_end
    else:
        tag = form.name_ends[0] if form.name_ends[0].strip() else ""
    parts = [f"{form.opening}{name}{tag}"]
    for key, value in arguments.items():
        kind = ValueType.STRING if isinstance(value, str) else ValueType.JSON
        end = next(
            (end for end, of in form.key_ends.items() if of is kind and _suits(end, value)),
            next(iter(form.key_ends)),
        )
        text = value if isinstance(value, str) else _json(value)
        between = form.newline if form.value_opening else ""
        parts.append(
            f"{form.key_opening}{key}{end}{between}{form.value_opening}{form.padding}{text}{form.padding}"
            f"{form.value_closing}"
        )
    return form.newline.join([*parts, form.closing])


def _suits(key_end: str, value: Any) -> bool:
    """Returns whether the end of a key's tag, which may name the type of the value, names the value's own."""
    if "type=" not in key_end:
        return True
    names = {bool: "boolean", int: "number", float: "number", str: "string", dict: "object", list: "array"}
    return f'"{names.get(type(value), "null")}"' in key_end


def _pythonic_call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _bare(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case Mapping():
            return "{" + ",".join(f"{key}:{_bare(each, quote)}" for key, each in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(_bare(each, quote) for each in value) + "]"
        case _:
            return _json(value)
