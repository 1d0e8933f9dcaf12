"""docs/architecture.md names code that exists and a request's traced way. Words that it declares gone are gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from docs.prose import DATA, texts_of
from docs.traced_chat import Tracer, chat
from server.conftest import served_by_oracle

ROOT = Path(__file__).parents[2]
SOURCE = {path: path.read_text() for path in (ROOT / "src/rootstock").rglob("*.py")}
PAGE = (ROOT / "docs/architecture.md").read_text()
TABLE = PAGE[PAGE.index("### Words that are gone") : PAGE.index("## Layers")]
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TABLE, re.M)[1:]
GONE = [entry.strip() for _, row in ROWS for entry in row.split(",")]
NAMES = {entry.strip("`") for entry in GONE if "`" in entry}
WORDS = [entry for entry in GONE if "`" not in entry]
ANY_WORD = re.compile("|".join(rf"\b{word}\b" for word in WORDS), re.I)
ABOUT_WORDS = "docs/adr/0018-the-fields-words.md"  # the decision: it may use them
# Every name that is defined, assigned or annotated. One pass over the code serves all names of the page.
DEFINITION = re.compile(r"\b(?:def|class) (\w+)|^\s*(?:self\.)?(\w+)\s*[:=]", re.M)
DEFINED = {name for text in SOURCE.values() for found in DEFINITION.findall(text) for name in found if name}
NOT_CODE = {"code", "n", "POST /v1/chat/completions", "make check", "--quantize", "--verify-hits"}


def names() -> list[str]:
    prose = re.sub(r"```.*?```", "", PAGE.replace(TABLE, "\n".join(now for now, _ in ROWS)), flags=re.S)
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
        assert part in DEFINED, f"nothing is called {part!r}"


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


def names_of_code(node: ast.AST, owner: str = "") -> Iterator[str]:
    """Yields names, and each also as `Class.name`: of the class around it, or of the attribute's object."""
    match node:
        case ast.Name(id=name) | ast.arg(arg=name) | ast.alias(name=name):
            yield from (name, f"{owner}.{name}")
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield from (name, f"{owner}.{name}")
        case ast.Attribute(value=value, attr=name):
            of = ast.unparse(value).split(".")[-1]
            yield from (name, f"{owner if of == 'self' else class_of(of)}.{name}")
        case ast.Constant(value=str(name)) if name.isidentifier():  # a slot, or a key of JSON
            yield from (name, f"{owner}.{name}")
        case _:
            pass
    for child in ast.iter_child_nodes(node):
        yield from names_of_code(child, node.name if isinstance(node, ast.ClassDef) else owner)


def names_of_text(text: str) -> Iterator[str]:
    """Yields names in code marks and in fences, as `names_of_code` does."""
    for code in re.findall(r"```.*?```|`[^`\n]+`", text, re.S):
        for dotted in re.findall(r"[A-Za-z_][\w.]*", code):
            parts = dotted.split(".")
            yield from parts
            yield from (f"{class_of(of)}.{name}" for of, name in pairwise(parts))


def class_of(name: str) -> str:
    """Returns the class that a variable or attribute is likely of: `Lease` for `lease` and `_lease`."""
    return name.lstrip("_")[:1].upper() + name.lstrip("_")[1:]


def gone_from(path: str, source: str) -> Iterator[str]:
    """Yields the places of words that are gone, in one file."""
    is_page = path.endswith(".md")
    texts = [(each.line, each.text) for each in texts_of(path, source)] if path not in DATA else []
    names = set(names_of_text(source)) if is_page else set(names_of_code(ast.parse(source)))
    for line, text in texts:
        names |= set(names_of_text(text))
        if not ANY_WORD.search(text):
            continue
        for word in WORDS:
            for found in re.finditer(rf"\b{word}\b", text, re.I):
                yield f"{path}:{line + text[: found.start()].count(chr(10))}: {word}"
    for name in sorted(names):
        parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", name)
        if ("." not in name and ANY_WORD.search(parts)) or name in NAMES:
            yield f"{path}: `{name}`"


def test_no_word_that_is_gone_is_in_the_code_the_docs_or_the_help() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    sources = {str(path.relative_to(ROOT)): path.read_text().replace(TABLE, "") for path in sorted(files)}
    del sources[ABOUT_WORDS]
    found = [place for path, source in sources.items() for place in gone_from(path, source)]
    assert not found, "docs/architecture.md has the words of today:\n" + "\n".join(found)


def test_words_that_are_gone_are_told_from_everyday_words() -> None:
    source = '''
"""Tips of a tail: everybody wants to reach `lease.known`."""
class Lease:
    __slots__ = ("computed", "known_tokens")
def old_tip(text, reach, Loader=None):
    return Reach(text.known, Loader=Loader, rung="packed") and "no headroom is left"
'''
    assert list(gone_from("a.py", source)) == [
        "a.py:2: tips",
        "a.py:6: headroom",
        "a.py: `Lease.computed`",
        "a.py: `Lease.known`",
        "a.py: `Loader`",
        "a.py: `Reach`",
        "a.py: `old_tip`",
        "a.py: `reach`",
    ]
    assert list(gone_from("a.md", "A rung, and `lease.known`; a `Work` of art is work.")) == [
        "a.md:1: rung",
        "a.md: `Lease.known`",
        "a.md: `Work`",
    ]


def test_the_way_of_one_request_is_the_traced_one() -> None:
    """The functions of the section "One request" are called for a plain chat, in this order."""
    section = PAGE[PAGE.index("## One request") : PAGE.index("## Additions of other requests")]
    rows = re.findall(r"^\|[^|]*\| \**`([\w/]+\.py)`\** \| `([\w.]+)` \|", section, re.M)
    assert len(rows) == section.count("\n|") - 2, "a row without a file and a function"
    tracer = Tracer()
    with tracer.installed(), served_by_oracle() as served:
        request = {"body": {"model": "fake", "max_tokens": 16, "ignore_eos": True}, "headers": {}}
        tracer.trace(lambda: chat(served.url, request, "Name the lakes of Africa."))
    way = [(file, name.split("<locals>.")[-1]) for file, name in tracer.functions]
    assert not set(rows) - set(way), "not on the way of a plain chat"
    assert rows == sorted(rows, key=way.index)
