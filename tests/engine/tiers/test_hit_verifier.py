"""`--verify-hits`: a sample of hits is recomputed while the engine is idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.helpers import Bench, Families, of_kinds
from engine.tiered import Tiered
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Admitted
from rootstock.engine.tiers.hit_verifier import HitVerifier
from rootstock.errors import PoolsLost
from rootstock.runtime.base import Batch
from rootstock.testing.fake_runtime import FULL, STATE, window

PROMPT = list(range(40))
FAMILIES: list[Families] = [(FULL,), (FULL, STATE), (FULL, window(6)), (window(6), STATE)]


class Verified(Tiered):
    """An engine that verifies every hit."""

    hit = 0  # tokens of the one to verify

    def __init__(self, folder: Path, families: Families) -> None:
        super().__init__(
            folder, write="through", families=families, block_size=8, chunk_tokens=16, verify_hits=1.0
        )

    def told(self, tokens: list[int]) -> tuple[list[int], int]:
        """Returns the answer, which may be wrong, and the cached tokens."""
        client = self.ask(tokens, 3)
        self.run()
        return client.tokens, client.cached_tokens

    @property
    def verifier(self) -> HitVerifier:
        assert self.engine.parts.hit_verifier is not None
        return self.engine.parts.hit_verifier

    def idle(self) -> None:
        while self.verifier.has_work:
            self.engine.work_idly()
        self.cache.check()

    def spoil(self) -> None:
        """Flips a bit of every row of every pool."""
        for pool in self.runtime._pools:
            pool.hashes ^= np.uint64(1 << 17)


@pytest.fixture(params=FAMILIES, ids=lambda families: "+".join(f.name for f in families))
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Verified]:
    """An engine with one hit to verify."""
    with Verified(tmp_path, request.param) as made:
        made.told(PROMPT)
        _, made.hit = made.told([*PROMPT, 50, 51])
        assert made.hit
        yield made


def test_a_right_hit_agrees_and_stays(bench: Verified) -> None:
    bench.idle()
    assert bench.engine.stats().verified == {"agrees": 1}
    assert bench.cache.stats().leases == 0
    assert bench.cache.stats().namespaces == 1, "the recomputed rows are still there"
    assert bench.told([*PROMPT, 50, 52])[1] >= bench.hit


def test_a_wrong_hit_raises_the_alarm_and_is_dropped_from_memory_and_disk(bench: Verified) -> None:
    bench.connector.flush()
    stored = bench.engine.stats().tier.records
    bench.spoil()
    bench.idle()
    assert bench.engine.stats().verified == {"differs": 1}
    assert bench.engine.stats().tier.records < stored
    tokens, hit = bench.told([*PROMPT, 50, 53])
    assert hit == 0, "rows that were found to be wrong were used again"
    assert tokens == bench.alone([*PROMPT, 50, 53], 3)


def test_a_request_during_a_check_is_served_first_and_the_check_restarts(bench: Verified) -> None:
    bench.engine.work_idly()
    assert bench.cache.stats().leases == 2
    other = [60, *PROMPT[1:]]
    assert bench.told(other)[0] == bench.alone(other, 3)
    assert bench.cache.stats().leases == 0
    bench.idle()
    assert bench.engine.stats().verified == {"agrees": 1}


def test_recomputed_rows_are_never_stored(bench: Verified) -> None:
    bench.connector.flush()
    stored = bench.engine.stats().tier.records
    bench.idle()
    bench.connector.flush()
    assert bench.engine.stats().tier.records == stored


def test_without_a_share_no_hit_is_verified() -> None:
    assert Bench(verify_hits=0.0).engine.parts.hit_verifier is None


@of_kinds([(FULL,), (FULL, STATE)])
def test_rows_computed_from_wrong_rows_are_dropped_too(tmp_path: Path, families: Families) -> None:
    with Verified(tmp_path, families) as bench:
        verifier = bench.verifier
        verifier._share = 0.0
        bench.told(PROMPT)
        bench.spoil()
        longer = [*PROMPT, *range(41, 70)]
        bench.told(longer)  # computed from wrong rows, and stored
        bench.writer.drain()
        verifier._share = 1.0
        bench.told([*PROMPT, 50, 51])  # the hit that is checked
        bench.idle()
        assert bench.engine.stats().verified == {"differs": 1}
        verifier._share = 0.0
        bench.told(PROMPT)  # computed again, from right rows
        assert bench.told([*longer, 1])[0] == bench.alone([*longer, 1], 3)


def test_verified_hits_are_not_counted_as_requests(bench: Verified) -> None:
    before = bench.cache.stats()
    bench.idle()
    after = bench.cache.stats()
    assert (after.asked_tokens, after.hit_tokens) == (before.asked_tokens, before.hit_tokens)


def test_a_check_without_enough_memory_is_given_up(bench: Verified) -> None:
    """Another request holds the blocks. The cache is not emptied for the check."""
    other = Namespace("another", "float32")
    held = np.arange(8 * bench.cache.pool.total_blocks, dtype=np.int32) % 90
    for blocks in range(bench.cache.pool.total_blocks, 0, -1):
        if isinstance(bench.cache.admit(bench.cache.match(held[: 8 * blocks - 7], other)), Admitted):
            break
    before = bench.cache.stats().cached_tokens
    bench.idle()
    assert set(bench.engine.stats().verified) <= {"agrees", "given up"}
    assert bench.cache.stats().cached_tokens <= before
    assert bench.cache.stats().leases == 1, "the cache was started anew"


def test_a_check_that_loses_the_pools_empties_the_cache(bench: Verified) -> None:
    def fault(batch: Batch) -> None:
        bench.spoil()
        raise PoolsLost(RuntimeError("injected"))

    bench.runtime.fault = fault
    bench.idle()
    bench.runtime.fault = None
    assert bench.cache.stats().cached_tokens == 0
    assert bench.told([*PROMPT, 50, 54])[0] == bench.alone([*PROMPT, 50, 54], 3)
