"""An engine above an empty directory, and one whose prompt is on the disk alone.

`@kinds` and `@options` choose their families and other options.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.helpers import Families
from engine.tiered import PROMPT, Tiered
from rootstock.testing.fake_runtime import FULL


@pytest.fixture
def families() -> Families:
    return (FULL,)


@pytest.fixture
def options() -> dict[str, Any]:
    return {}


@pytest.fixture
def bench(tmp_path: Path, families: Families, options: dict[str, Any]) -> Iterator[Tiered]:
    with Tiered(tmp_path, **{"families": families, **options}) as bench:
        yield bench


@pytest.fixture
def stored(bench: Tiered) -> Tiered:
    """An engine that has answered PROMPT and has nothing of it in memory."""
    bench.answer(PROMPT)
    bench.forget()
    return bench
