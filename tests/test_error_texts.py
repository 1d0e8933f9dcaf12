"""Texts of errors: values are shown as users write them, on one line and of a bounded length."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any

import pytest

import rootstock.errors
from rootstock.errors import InvalidOption, InvalidParameter, KeyNotAllowed, RootstockError
from rootstock.server.access.rules import Role
from rootstock.server.formats.anthropic.errors import ThreadUnsupported

SOURCE = Path(rootstock.__file__).parent
AS_PYTHON = re.compile(r"<\w+\.\w+:|\bMember\.|PosixPath|object at 0x|Exception\(")
LONG = "x" * 10_000_000


class Member(StrEnum):
    WORD = "a word"


class Plain(Enum):
    WORD = "a word"


class Number(IntEnum):
    ONE = 1


def classes() -> Iterator[type[RootstockError]]:
    def below(cls: type[RootstockError]) -> Iterator[type[RootstockError]]:
        for each in cls.__subclasses__():
            yield each
            yield from below(each)

    assert ThreadUnsupported  # its module is imported: a wire format has errors of its own
    yield from (each for each in below(RootstockError) if each.__module__.startswith("rootstock."))


def values_of(hint: Any) -> list[Any]:
    """Returns values that a parameter of this type may have."""
    if hint in (str, object):
        text = [Member.WORD, "two\nlines"]
        return (
            text if hint is str else [*text, Plain.WORD, Number.ONE, Path("/a/b"), LONG, {"a": [Plain.WORD]}]
        )
    if hint is Path:
        return [Path("/a/b")]
    if hint in (int, float):
        return [hint(3)]
    if hint is bool:
        return [False, True]
    if isinstance(hint, type) and issubclass(hint, BaseException):
        return [ValueError("a secret")]
    if typing.get_origin(hint) is not None:
        inner = [each for each in typing.get_args(hint) if each is not type(None)]
        values = [value for each in inner for value in values_of(each)]
        return [values] if "Sequence" in str(typing.get_origin(hint)) else values
    raise AssertionError(f"a parameter of the type {hint}: give it values here")


def made(cls: type[RootstockError]) -> Iterator[RootstockError]:
    """Yields errors of a class, with each value of each parameter at least once."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    hints = typing.get_type_hints(cls.__init__)
    values = {each.name: values_of(hints[each.name]) for each in parameters}
    for at in range(max((len(each) for each in values.values()), default=1)):
        yield cls(**{name: each[at % len(each)] for name, each in values.items()})


@pytest.mark.parametrize(
    "cls", sorted(set(classes()), key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__
)
def test_no_error_shows_values_as_python_writes_them(cls: type[RootstockError]) -> None:
    for error in made(cls):
        assert not AS_PYTHON.search(error.message), error.message
        assert "a secret" not in error.message, "the text of a cause may be another client's"
        assert len(error.message) < 2000


def test_values_are_shown_as_users_write_them() -> None:
    assert "the role 'metrics' may" in KeyNotAllowed(Role.METRICS).message
    assert InvalidOption("--x", Plain.WORD, "another").message.startswith("--x is 'a word', but")
    assert InvalidOption("--x", Path("/a/b"), "another").message.startswith("--x is '/a/b', but")
    assert "'a word'" in InvalidParameter("x", Member.WORD, "another").message


def test_the_texts_of_errors_use_one_of_the_two_ways_to_show_a_value() -> None:
    """`{value!r}` shows an enum as `<Role.METRICS: 'metrics'>`, and a client's megabyte whole."""
    for path in (SOURCE / "errors").glob("*.py"):
        if path.name == "base.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.FormattedValue) and node.conversion == ord("r")), (
                path,
                node.lineno,
            )
