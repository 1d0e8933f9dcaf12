"""The code of docs/embedding.md runs, block after block in one namespace, with no package but NumPy and xxhash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/embedding.md"

BLOCKED = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {*sys.stdlib_module_names, "numpy", "xxhash", "rootstock"}:
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Refuse())
"""


def code_of_page() -> str:
    """Returns the Python blocks, each at its lines of the page."""
    lines, inside = [], False
    for line in PAGE.read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def run_with_two_packages(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_code_of_the_page_runs_with_two_packages() -> None:
    code = f"exec(compile({code_of_page()!r}, {PAGE.name!r}, 'exec'))"
    told = run_with_two_packages(code).splitlines()
    assert told[0].startswith("3 of 4 tokens are cached; at position 3 the prompt has token 49")
    assert "bytes needed" in told[1]


def test_the_package_and_its_cache_import_no_tensor_framework() -> None:
    code = (
        "import rootstock, rootstock.cache\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    told = run_with_two_packages(code).split()
    assert (
        {"numpy", "rootstock", "xxhash"}
        <= set(told)
        <= {"__main__", "_distutils_hack", "numpy", "rootstock", "xxhash"}
    )
    assert run_with_two_packages("import rootstock; print('numpy' in sys.modules)") == "False\n"
