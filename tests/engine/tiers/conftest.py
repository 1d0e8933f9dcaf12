"""An engine above an empty directory, and one whose prompt is on the disk alone. `kinds` says of which models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.tiered import PROMPT, Tiered
from rootstock.cache.families import Family
from rootstock.testing.fake_runtime import FULL


@pytest.fixture
def families() -> tuple[Family, ...]:
    """Those of a test that `kinds` does not parametrize."""
    return (FULL,)


@pytest.fixture
def bench(tmp_path: Path, families: tuple[Family, ...]) -> Iterator[Tiered]:
    with Tiered(tmp_path, families=families) as bench:
        yield bench


@pytest.fixture
def stored(bench: Tiered) -> Tiered:
    """An engine that has answered PROMPT and has nothing of it in memory."""
    bench.answer(PROMPT)
    bench.forget()
    return bench
