"""Prose of the repository: comments, docstrings and messages of Python files, and text of Markdown files.

`bench/show/k5_prose.py` counts forms that CONTRIBUTING.md forbids; `test_architecture.py` finds words that are gone.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

# Pronouns in the place of nouns. A sentence that ends with a question mark may have them.
NOUNS = re.compile(
    r"\b(what|whatever|whoever|nobody|anybody|somebody|everybody)\b(?![^.!?]{0,120}\?)", re.IGNORECASE
)
# First words of a docstring that are neither a noun nor a verb.
PRONOUNS = (
    "anybody everybody he i it its nobody none she somebody that their them these they this those we you"
)
QUESTION_WORDS = "how what whatever where whether which who whoever whose why"
BAD_STARTS = frozenset(f"{PRONOUNS} {QUESTION_WORDS} as else if so then there thus".split())
DATA = frozenset({"src/rootstock/bench/corpus.py", "src/rootstock/bench/scenario.py"})
BAD_START_OF_SENTENCE = re.compile(r"(?:^|(?<=[.!?:;]\s))(So|As|Else),?\s(?=\w)")
CODE_SPANS = re.compile(r"``[^`]*``|`[^`]*`|https?://\S+|\"[^\"\n]{1,80}\"")


@dataclass(frozen=True, slots=True)
class Finding:
    path: str
    line: int
    rule: str  # "noun", "docstring" or "sentence"
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    line: int
    text: str
    is_docstring: bool = False


def findings(path: str, source: str) -> list[Finding]:
    """Returns the places of one file that break a rule. Code spans and quotations are not prose."""
    found = []
    for text in texts_of(path, source):
        prose = CODE_SPANS.sub("X", text.text)
        for rule, pattern in (("noun", NOUNS), ("sentence", BAD_START_OF_SENTENCE)):
            for match in pattern.finditer(prose):
                line = text.line + prose[: match.start()].count("\n")
                found.append(Finding(path, line, rule, _around(prose, match)))
        words = re.findall(r"[A-Za-z']+", prose)
        if text.is_docstring and words and words[0].lower() in BAD_STARTS:
            found.append(Finding(path, text.line, "docstring", prose.strip().splitlines()[0][:100]))
    return found


def texts_of(path: str, source: str) -> Iterator[Text]:
    """Yields comment blocks, docstrings and messages (string literals with spaces), or Markdown without its fences.

    Strings of tests and of files in DATA are input for models, not messages.
    """
    if PurePath(path).suffix == ".md":
        yield Text(
            1, re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), source, flags=re.DOTALL)
        )
        return
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str(docstring)) as first), *_]:
                    docstrings.add(first)
                    yield Text(first.lineno, docstring, is_docstring=True)
    is_data = path.startswith("tests/") or path in DATA
    for node in () if is_data else ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in docstrings
            and " " in node.value
        ):
            yield Text(node.lineno, node.value)
    yield from _comments(source)


def _comments(source: str) -> Iterator[Text]:
    """Joins comments of consecutive lines into one text."""
    began, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last + 1:
            yield Text(began, "\n".join(lines))
            lines = []
        if not lines:
            began = token.start[0]
        last = token.start[0]
        lines.append(token.string.lstrip("#").strip())
    if lines:
        yield Text(began, "\n".join(lines))


def _around(text: str, match: re.Match[str]) -> str:
    return text[max(0, match.start() - 40) : match.end() + 40].replace("\n", " ")
