"""docs/architecture.md names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = {path: path.read_text() for path in (ROOT / "src/rootstock").rglob("*.py")}
PAGE = (ROOT / "docs/architecture.md").read_text()
NOT_CODE = {"code", "n", "POST /v1/chat/completions", "make check", "--quantize", "--verify-hits"}


def names() -> list[str]:
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.S)
    return sorted(set(re.findall(r"`([^`\n]+)`", prose)) - NOT_CODE)


@pytest.mark.parametrize("name", names())
def test_every_name_in_the_architecture_page_exists(name: str) -> None:
    if name.endswith(".py"):
        assert (ROOT / "src/rootstock" / name).exists()
        return
    package = ROOT / "src/rootstock"
    if (package / name).is_dir() or (package / f"{name}.py").exists():
        return
    for part in name.split("."):
        pattern = re.compile(rf"(\bdef {part}\b|\bclass {part}\b|^\s*(self\.)?{part}\b\s*[:=])", re.M)
        assert any(pattern.search(text) for text in SOURCE.values()), f"nothing is called {part!r}"


def test_every_file_in_the_diagram_exists() -> None:
    diagram = re.search(r"```\n(.*?)```", PAGE, re.S)
    assert diagram is not None
    files = re.findall(r"\b\w+\.py\b", diagram[1])
    assert len(files) >= 10
    existing = {path.name for path in SOURCE}
    assert not set(files) - existing


def test_every_decision_is_a_page_of_its_own_with_all_its_parts() -> None:
    pages = sorted((ROOT / "docs/adr").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text()
        for part in ("**Context.**", "**Decision.**", "**Consequences.**", "**Revisit when.**"):
            assert part in text, f"{page.name} lacks {part}"
