"""The beginning of a text that can become JSON is told, wherever the text is split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock.server.formats.anthropic.json_prefix import JsonPrefix

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=15,
)


def accepted(text: str, cut: int = 0) -> str:
    prefix = JsonPrefix()
    return prefix.accepted(text[:cut]) + prefix.accepted(text[cut:])


@given(value=values, indent=st.sampled_from([None, 1]), ascii=st.booleans(), cut=st.integers(0, 60))
def test_any_json_is_taken(value: Any, indent: Any, ascii: bool, cut: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert accepted(text, cut) == text
    assert accepted(f" {text}\n", cut) == f" {text}\n"


@given(
    value=values, at=st.integers(0, 60), char=st.sampled_from("\"\\{}[]:,x0-.e \n'"), cut=st.integers(0, 60)
)
def test_text_that_is_not_taken_is_no_json(value: Any, at: int, char: str, cut: int) -> None:
    text = json.dumps(value)
    text = text[:at] + char + text[at:]
    taken = accepted(text, cut)
    assert text.startswith(taken)
    assert taken == accepted(text)
    if taken != text:
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("{'a': 1}", "{"),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a" 1}', '{"a" '),
        ('{"a": tru}', '{"a": tru'),
        ('{"a": 01}', '{"a": 0'),
        ('{"a": 1}}', '{"a": 1}'),
        ('{"a": "\n"}', '{"a": "'),
        ('{"a": "\\x"}', '{"a": "\\'),
        ("[1}", "[1"),
        ("hello", ""),
        ("", ""),
        ('{"a": {"b": [1, 2', '{"a": {"b": [1, 2'),
    ],
)
def test_breaks(text: str, taken: str) -> None:
    assert accepted(text) == taken
