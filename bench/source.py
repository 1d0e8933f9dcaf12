"""Commit of a measurement."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import rootstock


@dataclass(frozen=True, slots=True)
class Source:
    commit: str | None  # None: the package is not in a checkout
    changed: bool  # files of the package differ from the commit


def this_source() -> Source:
    package = Path(rootstock.__file__).resolve().parent
    if not _git(package, "ls-files", "__init__.py"):  # perhaps installed below another project's checkout
        return Source(None, changed=False)
    return Source(
        _git(package, "rev-parse", "--short=12", "HEAD") or None,
        changed=bool(_git(package, "status", "--porcelain", "--", ".")),
    )


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
