"""Every line of docs/behaviours.md that is in force has a test with its number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
IN_FORCE = set(range(1, 53))


def numbers_held() -> dict[int, list[str]]:
    held: dict[int, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.behaviour":
                    for number in decorator.args:
                        assert isinstance(number, ast.Constant)
                        held.setdefault(int(number.value), []).append(node.name)
    return held


def test_every_behaviour_in_force_is_held_by_a_test() -> None:
    listed = {
        int(n) for n in re.findall(r"^(\d+)\. ", (TESTS.parent / "docs/behaviours.md").read_text(), re.M)
    }
    assert listed == IN_FORCE
    assert set(numbers_held()) >= IN_FORCE, f"no test holds {sorted(IN_FORCE - set(numbers_held()))}"
