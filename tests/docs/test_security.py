"""The limits of a request in docs/security.md are those in the code, and its promises have tests."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from docs.security_promises import PROMISES
from rootstock.text import limits

TESTS = Path(__file__).parents[1]
DOC = TESTS.parent / "docs" / "security.md"
# Their sentences repeat promises of the other sections, or name things that are out of scope.
WITHOUT_PROMISES = {
    "Security",
    "Use of `X-Cache-Salt`",
    "Rights of each sender",
    "HTTP",
    "Fields that are not implemented",
}


def test_the_table_of_limits_holds_every_limit_with_its_value() -> None:
    rows = re.findall(r"^\|.*\| ([\d,.]+) \| `(M\w+)` \|$", DOC.read_text(), re.MULTILINE)
    stated = {name: float(value.replace(",", "")) for value, name in rows}
    assert stated == {
        name: float(value) for name, value in vars(limits).items() if re.match("(MAX|MIN)_", name)
    }


def plain(text: str) -> str:
    return " ".join(text.split())


@functools.cache
def functions_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_is_on_the_page_and_has_tests(promise: str) -> None:
    assert plain(promise) in plain(DOC.read_text()), (
        "the page has changed: so must the promise, and perhaps its tests"
    )
    assert PROMISES[promise]
    for test in PROMISES[promise]:
        file, name = test.split("::")
        assert name.startswith("test_")
        assert name in functions_in(file), f"{test} is gone: a promise without a test"


def test_every_section_has_promises() -> None:
    parts = re.split(r"^#+ (.*)$", DOC.read_text(), flags=re.MULTILINE)[1:]
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        found = [promise for promise in PROMISES if plain(promise) in plain(text)]
        assert found or title in WITHOUT_PROMISES, title
