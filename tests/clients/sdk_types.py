"""Comparison of an answer with a type of an official SDK, stricter than the SDK's own, which accepts anything.

The SDKs' models have no rule for absent optional fields: null and absent read alike. A client in another language may
accept only one of them, so that fields which are sent as null are listed as well.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel
from typing_extensions import TypeAliasType


@dataclass
class Findings:
    """Comparison of an answer's values with the types. Names are those of a type and its field."""

    wrong: set[str] = field(
        default_factory=set
    )  # required fields that are missing, and values of another type
    unknown: set[str] = field(default_factory=set)  # fields that the type does not have
    nulls: set[str] = field(default_factory=set)  # null in fields that may be absent

    def add(self, other: Findings) -> None:
        self.wrong |= other.wrong
        self.unknown |= other.unknown
        self.nulls |= other.nulls


def compared(value: Any, kind: Any, path: str = "") -> Findings:
    """Compares JSON with a type of an SDK."""
    found = Findings()
    kind = _plain(kind)
    origin = typing.get_origin(kind)
    if kind in (Any, object) or isinstance(kind, typing.TypeVar):
        return found
    if origin in (Union, UnionType):
        options = [
            compared(value, option, path)
            for option in typing.get_args(kind)
            if value is None or option is not NoneType
        ]
        return min(options, key=lambda one: (len(one.wrong), len(one.unknown), len(one.nulls)))
    if origin is Literal:
        if value not in typing.get_args(kind):
            found.wrong.add(f"{path}: {value!r} is none of {typing.get_args(kind)}")
    elif origin is list:
        if not isinstance(value, list):
            found.wrong.add(f"{path}: {value!r} is no list")
        else:
            for each in value:
                found.add(compared(each, typing.get_args(kind)[0], path))
    elif origin in (dict, Mapping):
        if not isinstance(value, dict):
            found.wrong.add(f"{path}: {value!r} is no object")
        else:
            for each in value.values():
                found.add(compared(each, typing.get_args(kind)[1], path))
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        _compare_fields(value, kind, path, found)
    elif kind is NoneType:
        if value is not None:
            found.wrong.add(f"{path}: {value!r} is not null")
    elif not _is_scalar(value, kind):
        found.wrong.add(f"{path}: {value!r} is no {getattr(kind, '__name__', kind)}")
    return found


def _compare_fields(value: Any, kind: type[BaseModel], path: str, found: Findings) -> None:
    name = kind.__name__
    if not isinstance(value, dict):
        found.wrong.add(f"{path}: {value!r} is no {name}")
        return
    known = {info.alias or field_name: info for field_name, info in kind.model_fields.items()}
    for key, info in known.items():
        if key not in value:
            if info.is_required():
                found.wrong.add(f"{name}.{key}: missing")
        elif value[key] is None and not info.is_required():
            found.nulls.add(f"{name}.{key}")
        else:
            found.add(compared(value[key], info.annotation, f"{name}.{key}"))
    found.unknown |= {f"{name}.{key}" for key in value.keys() - known.keys()}


def _is_scalar(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return type(value) is int
    if kind is str or kind is bool:
        return isinstance(value, kind)
    return isinstance(value, str)  # a date, which JSON spells as text


def _plain(kind: Any) -> Any:
    """Returns a type without its alias and annotations."""
    while True:
        if isinstance(kind, TypeAliasType):
            kind = kind.__value__
        elif typing.get_origin(kind) is Annotated:
            kind = typing.get_args(kind)[0]
        else:
            return kind


def events(stream: str) -> Iterator[Any]:
    """Yields the texts of a stream's `data` fields."""
    for block in stream.split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
