"""No object reads or writes another object's private attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

# Attributes of other projects without a public way to them.
FOREIGN = {
    "_attn_implementation": "transformers: a configuration's way of attending",
    "_can_set_experts_implementation": "transformers: whether a model lets its experts' implementation be set",
    "_can_set_attn_implementation": "transformers: whether a model lets it be set",
    "_init": "Ray: a handle that begins to hear of replicas before its first request",
    "_replica": "Ray: the replica that a handle has chosen",
    "_with_ingress_request_router": "Ray: an application whose router HAProxy asks",
    "_apply_gate": "transformers: what a module of experts computes between its two products",
    "_is_expert_parallel": "transformers: whether a module of experts has a part of them",
    "_forward_hooks": "torch: a module's hooks, which a replaced forward would miss",
    "_forward_pre_hooks": "torch: the same, before the forward",
    "_grouped_mm": "torch: the operation that products of sorted rows with experts are",
    "_make_wrapper_subclass": "torch: a tensor whose numbers are elsewhere",
    "_to_copy": "torch: the operation that a conversion of a tensor is",
    "_parameters": "torch: a module's own parameters, without those of its children",
}


def own_names(of: ast.ClassDef) -> set[str]:
    """Returns the private attributes of a class: defined in its body, named in its slots, or set on `self`."""
    found: set[str] = set()
    for part in ast.walk(of):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(part.name)
        elif isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "__slots__":
            found |= set(ast.literal_eval(part.value))
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and is_self(part.value):
            found.add(part.attr)
    return found


def is_self(value: ast.expr) -> bool:
    """Returns whether the expression is `self`, `cls` or `super()`."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def root(value: ast.expr) -> str:
    """Returns the name at the beginning of a chain of attributes, or an empty string if there is none."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def private_accesses(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each access to a private attribute from outside its class.

    A class may access those of its other instances. Modules of other projects are left out."""
    tree = ast.parse(source)
    modules = {
        (alias.asname or alias.name).split(".")[0]
        for part in ast.walk(tree)
        if isinstance(part, ast.Import)
        for alias in part.names
    }

    def visit(part: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
        if isinstance(part, ast.ClassDef):
            own = own | own_names(part)
        if isinstance(part, ast.Attribute) and part.attr.startswith("_") and not part.attr.endswith("__"):
            allowed = is_self(part.value) or part.attr in own or root(part.value) in modules
            if not allowed and part.attr not in FOREIGN:
                yield part.lineno, ast.unparse(part)
        for child in ast.iter_child_nodes(part):
            yield from visit(child, own)

    return visit(tree, set())


def test_no_object_touches_the_private_attributes_of_another() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in private_accesses(path.read_text())
    ]
    assert not found, "give the owner a method for it:\n" + "\n".join(found)


def test_the_check_tells_own_attributes_from_those_of_others() -> None:
    source = """
import torch
class A:
    def __init__(self, other):
        self._mine = other._theirs
    def same(self, other):
        return self._mine == other._mine and torch._C
def outside(a):
    return a._mine
"""
    assert [text for _, text in private_accesses(source)] == ["other._theirs", "a._mine"]
