"""A rewritten grammar takes a text as JSON if and only if the grammar takes the text."""

from __future__ import annotations

import json
import random

import pytest

from rootstock.text.constraints.asked import Constraint, Grammar, Lark, Regex
from rootstock.text.output.json_quoting import NotQuotable, quoted_lark, quoted_pattern
from text.constraints.helpers import accepts, byte_compiler

PATTERNS = [
    r'a"b', r"\\n", r"\n+", r'[^\n"]{1,5}', r".{0,6}", r"(?s:.{0,6})", r"(?s).\n?", r'[\s"x]{3}', r"\S\s",
    r"\W{2}", r"[\x00-\x20]{2}", r"a/b\/c", r'(?i:ab)"', r"[\\\]a-c]{3}", r"\x22\x{5C}", r"[^a-z]{2}", r"[\n]+",
    "\n\t", r'(?P<x>")+', r'(a|"|\\){2}', r"\.\"\-", r'[-"]{2}', r'[]a"]{2}', r"\D\d", r"[^\S]{1,2}",
]  # fmt: skip
PIECES = [
    "a",
    "b",
    "c",
    '"',
    "\\",
    "\n",
    "\t",
    "\x01",
    " ",
    "x",
    "/",
    ".",
    "-",
    "]",
    "é",
    "7",
    "\\n",
    "a/b/c",
]


class Taking:
    """A grammar as a function: whether it takes a text."""

    def __init__(self, grammar: Grammar) -> None:
        self._constraint = byte_compiler().compile(Constraint(grammar))

    def __call__(self, text: str) -> bool:
        return accepts(self._constraint, text.encode())


def inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_takes_the_same_texts(pattern: str) -> None:
    plain, quoted = Taking(Regex(pattern)), Taking(Regex(quoted_pattern(pattern)))
    rng = random.Random(pattern)
    for _ in range(300):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 5)))
        assert quoted(inside(text)) == plain(text), text


def test_a_grammar_takes_the_same_texts() -> None:
    grammar = """
    start: "say \\"" word+ END // a comment with "quotes
    word: NAME | /[^a-z\\n]/ | LINE
    NAME: "a".."f" | "x\\\\y"
    END: /"$/s
    %import common.LF -> LINE
    """.replace("$", "")
    plain, quoted = Taking(Lark(grammar)), Taking(Lark(quoted_lark(grammar)))
    taken = 0
    for text in ('say "abc"', 'say "x\\y\n"', 'say "\t\\"', 'say "', "say abc", 'say "g"', 'say "\n\n"'):
        assert quoted(inside(text)) == plain(text), text
        taken += plain(text)
    assert taken == 4


@pytest.mark.parametrize(
    "grammar",
    [
        'start: %json {"type": "string"}',
        "start: %lark {\nstart: /a/\n}",
        "start: C\n%import common.C_COMMENT -> C",
        "start: /a/m",
        r"start: /\p{L}/",
        r"start: /\bword/",
        "start: /[a-z&&[^b]]/",
        "start: /(?x:a b)/",
        r'start: "\q"',
    ],
)
def test_a_part_that_has_no_equivalent_is_refused(grammar: str) -> None:
    with pytest.raises(NotQuotable):
        quoted_lark(grammar)


@pytest.mark.parametrize(("opening", "rest"), [('"', "/[^a]/"), ("/", r'"\n"')])
def test_an_opening_without_an_end_is_searched_once(opening: str, rest: str) -> None:
    # All up to the end of the line is one piece: a search behind every opening would take the square of the length.
    unclosed = "start: " + opening + f"\\{opening}" * 1_000 + rest
    assert quoted_lark(unclosed) == unclosed
    assert quoted_lark(f"start: {rest}") != f"start: {rest}"
