"""docs/tour.md names code that exists, counts its lines, and asks a reader for 4,000 of them at most."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tour.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([\d,]+) \| [^|]+ \| ([\d, ]*)\|$", PAGE, re.M)
BEHAVIOURS = set(re.findall(r"^(\d+)\. ", (ROOT / "docs/behaviours.md").read_text(), re.M))
MOST_LINES = 4_000
NEAR = 10  # lines by which a count of the page may be off


def places(tree: ast.Module) -> Iterator[tuple[str, range]]:
    """Yields the classes, functions and methods of a module, each with its lines."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, range(node.lineno, node.end_lineno + 1 if node.end_lineno else node.lineno)
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    yield f"{node.name}.{part.name}", range(part.lineno, (part.end_lineno or part.lineno) + 1)


def lines_of(file: str, read: str) -> set[int]:
    """Returns the lines to read. A name that the file does not have is a KeyError."""
    source = (ROOT / "src/rootstock" / file).read_text()
    if read == "all":
        return set(range(1, len(source.splitlines()) + 1))
    found = dict(places(ast.parse(source)))
    return {line for name in re.findall(r"`([^`]+)`", read) for line in found[name]}


@pytest.mark.parametrize(("file", "read", "lines"), [row[:3] for row in ROWS])
def test_a_stop_exists_and_has_as_many_lines_as_the_page_says(file: str, read: str, lines: str) -> None:
    assert abs(len(lines_of(file, read)) - int(lines)) <= NEAR


def test_the_tour_is_short_and_explains_behaviours_that_exist() -> None:
    tables = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(ROWS) == len(tables), "a stop without a count"
    total = len({(file, line) for file, read, *_ in ROWS for line in lines_of(file, read)})
    assert total <= MOST_LINES
    said = re.search(r"([\d,]+) lines, comments and docstrings", PAGE)
    assert said
    assert abs(total - int(said[1].replace(",", ""))) <= 50
    assert {number for *_, explains in ROWS for number in re.findall(r"\d+", explains)} <= BEHAVIOURS
