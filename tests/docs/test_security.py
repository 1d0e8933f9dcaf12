"""The limits of a request in docs/security.md are those in the code, and its promises have tests."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from docs.security_promises import PROMISES
from rootstock.errors import Unsupported
from rootstock.server.formats.openai.schema import (
    IGNORED,
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from rootstock.server.wire.fields import NOT_SAMPLED
from rootstock.text import limits
from rootstock.text.constraints.openai_fields import CONSTRAINT_FIELDS

TESTS = Path(__file__).parents[1]
DOC = TESTS.parent / "docs" / "security.md"
UNIMPLEMENTED = "Fields that are not implemented"  # a section; this file compares its names with the tables
# Their sentences repeat promises of the other sections, or name things that are out of scope.
WITHOUT_PROMISES = {"Security", "Use of `X-Cache-Salt`", "Rights of each sender", "HTTP", UNIMPLEMENTED}


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


def sections() -> dict[str, str]:
    """Returns the text of each section by its title."""
    parts = re.split(r"^#+ (.*)$", DOC.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_section_has_promises() -> None:
    for title, text in sections().items():
        found = [promise for promise in PROMISES if plain(promise) in plain(text)]
        assert found or title in WITHOUT_PROMISES, title


# ---- fields that are not implemented

DECLARED = (
    ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys() | CONSTRAINT_FIELDS
)


def named(pattern: str) -> list[str]:
    """Returns the names in backquotes in the part of the section that the pattern's group matches."""
    found = re.search(pattern, plain(sections()[UNIMPLEMENTED]))
    assert found, f"the section has no text of the form {pattern}"
    names = re.findall(r"`([^`]+)`", found[1])
    assert names
    return names


def requests_with(name: str, value: object) -> list[GenerationFields]:
    """Returns a request of each route with this field."""
    return [
        ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], name: value}),
        CompletionRequest.model_validate({"prompt": "x", name: value}),
    ]


def test_fields_that_the_page_calls_refused_are_refused() -> None:
    names = named(r"are refused unless they are null or neutral: (.*?) and others \(`REFUSED` in")
    assert set(names) <= REFUSED.keys()
    assert set(names) & NOT_SAMPLED.keys(), "a parameter of sampling is an example, too"
    assert not set(names) & DECLARED, "a declared field is read"
    for name in names:
        for request in requests_with(name, {"asks": 1}):
            with pytest.raises(Unsupported) as raised:
                request.refuse_unsupported()
            assert raised.value.param == name
        for request in requests_with(name, None):
            request.refuse_unsupported()


def test_fields_that_the_page_calls_ignored_are_ignored() -> None:
    names = named(r"change nothing in the answer \((.*?), …; `IGNORED` there\) are ignored")
    assert not set(names) & DECLARED, "a declared field is read"
    assert set(names) <= IGNORED
    for name in names:
        for request in requests_with(name, {"asks": 1}):
            request.refuse_unsupported()


def test_the_page_names_the_fields_whose_empty_value_is_refused() -> None:
    names = named(r" In (`[^.]*`) an empty object asks for ")
    assert set(names) == {name for name, refused in REFUSED.items() if refused.empty_asks}
