"""The engine above a disk: what comes back, what is waited for, what is chosen, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.tiered import KINDS, Tiered, cached
from rootstock.cache.families import Family

kinds = pytest.mark.parametrize("families", KINDS, ids=lambda fs: "+".join(f.name for f in fs))
PROMPT = list(range(62))


@kinds
def test_the_first_request_after_a_restart_hits_all_that_was_computed_before(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    with Tiered(tmp_path, families=families) as bench:
        first = bench.answer(PROMPT, 5)
    with Tiered(tmp_path, families=families) as bench:
        again = bench.answer([*PROMPT, *first.tokens, 90, 91])
        assert cached(again) == len(PROMPT) + 4  # the last token of an answer is never computed
        assert bench.tier.counters.loads == {"loaded": 1}
        assert bench.cache.stats().loaded_tokens == len(PROMPT) + 4
