"""A1: `make demo` and `make test` on a fresh clone: no virtual environment, no model, an empty cache directory.

The clone is of HEAD, without uncommitted changes. Packages are downloaded, or come from pip's own cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, at_most, conclude, exactly

SHOW = "A1"
TEST_AIM_S = 900
TEST_LIMIT_S = 3600
DEMO_LIMIT_S = 1800  # it also sets everything up

# Variables that the environment of this script may have, and that of a fresh machine has not.
NOT_INHERITED = {
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHOME",
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "ROOTSTOCK_SOAK",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "rootstock"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
        environment = fresh_environment(Path(folder))
        demo_status, demo_s = make("demo", clone, environment, DEMO_LIMIT_S)
        test_status, test_s = make("test", clone, environment, TEST_LIMIT_S)
    conclude(
        SHOW,
        {
            "demo_exit_status": demo_status,
            "demo_with_setup_s": round(demo_s, 1),
            "test_exit_status": test_status,
            "test_s": round(test_s, 1),
            "test_within_aim": test_s <= TEST_AIM_S,
            "test_aim_s": TEST_AIM_S,
        },
        {
            "demo_exit_status": exactly(0),
            "test_exit_status": exactly(0),
            "test_s": at_most(TEST_LIMIT_S),
        },
    )


def make(target: str, clone: Path, environment: dict[str, str], limit_s: float) -> tuple[int | None, float]:
    """Runs a target. Returns its exit status, None if it took longer than its limit, and the seconds."""
    print(f"$ make {target}", flush=True)
    began = time.monotonic()
    with subprocess.Popen(
        ["make", "-C", str(clone), target, python_of(environment)], env=environment
    ) as process:
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                process.terminate()
    return status, time.monotonic() - began


def fresh_environment(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    own = str(Path(sys.prefix) / "bin")
    path = environment.get("PATH", os.defpath).split(os.pathsep)
    environment["PATH"] = os.pathsep.join(each for each in path if each != own)
    # pip may use its cache of downloads: a mirror near the fresh machine would be as fast.
    users = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    environment.setdefault("PIP_CACHE_DIR", str(Path(users) / "pip"))
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    return environment


def python_of(environment: dict[str, str]) -> str:
    """Returns `python3` if it is new enough, as on a fresh machine, otherwise this interpreter outside of its
    venv."""
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    try:
        if subprocess.run(["python3", "-c", check], env=environment, check=False).returncode == 0:
            return "PYTHON=python3"
    except OSError:
        pass
    return f"PYTHON={getattr(sys, '_base_executable', sys.executable)}"


if __name__ == "__main__":
    main()
