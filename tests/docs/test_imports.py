"""Modules of the package do not import each other in circles."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src/rootstock"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """Returns the modules that each module imports, those in functions and under TYPE_CHECKING included."""
    sources = {module_of(path): path.read_text() for path in PACKAGE.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.level == 0, f"{module} imports relatively"
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & sources.keys()
                named |= submodules or {node.module}
        found[module] = (named & sources.keys()) - {module}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        path.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in path:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            begin = path.index(module)
            if len(path) - begin > 1:
                found.append(sorted(path[begin:]))
            del path[begin:]

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(imports()) == []
