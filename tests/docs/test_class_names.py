"""A class name means one class: no name is defined twice in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def places_of(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the places at which each class name is defined, nested and private classes included."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in sorted(sources.items()):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return places


def test_places_of_classes_are_found() -> None:
    sources = {"a.py": "class A:\n    class _B: ...", "b.py": "def make():\n    class _B: ..."}
    assert places_of(sources) == {"A": ["a.py:1"], "_B": ["a.py:2", "b.py:2"]}


def test_no_class_name_is_defined_twice() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "src").rglob("*.py")}
    repeated = {name: where for name, where in places_of(sources).items() if len(where) > 1}
    assert not repeated
