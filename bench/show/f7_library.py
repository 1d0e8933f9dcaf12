"""F7: the examples run, and `rootstock.cache` imports in a bare virtual environment without torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, conclude, exactly

CACHE_NEEDS = ("numpy", "xxhash")
IMPORTS = """
import sys
import rootstock.cache
assert not {"torch", "transformers", "numba"} & set(sys.modules)
print("imported")
"""


def main() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/examples"]
    examples = subprocess.run(command, cwd=ROOT, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder, "bin/python"))
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *CACHE_NEEDS], check=True)
        subprocess.run([*pip, "--no-deps", str(ROOT)], check=True)
        torch = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode
        imported = subprocess.run([python, "-c", IMPORTS], cwd=folder, check=False).returncode
    conclude(
        "F7",
        {"examples_exit": examples, "torch_is_there": torch == 0, "import_exit": imported},
        {"examples_exit": exactly(0), "torch_is_there": exactly(False), "import_exit": exactly(0)},
    )


if __name__ == "__main__":
    main()
