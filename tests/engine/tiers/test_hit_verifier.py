"""`--verify-hits`: a sample of hits is computed anew when there is nothing else to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.tiered import Tiered, cached
from rootstock.cache.families import Family
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Admitted
from rootstock.testing.fake_runtime import FULL, STATE, window

PROMPT = list(range(40))
FAMILIES: list[tuple[Family, ...]] = [(FULL,), (FULL, STATE), (FULL, window(6)), (window(6), STATE)]


class Verified(Tiered):
    """An engine that computes every hit anew when it has nothing else to do."""

    def __init__(self, folder: Path, families: tuple[Family, ...]) -> None:
        super().__init__(
            folder, write="through", families=families, block_size=8, chunk_tokens=16, verify_hits=1.0
        )

    def told(self, tokens: list[int]) -> tuple[list[int], int]:
        """Asks and runs to the end. → tokens, found tokens"""
        client = self.ask(tokens, 3)
        self.run()
        return client.tokens, cached(client)

    def idle(self) -> None:
        while self.engine.hit_verifier.has_work:
            self.engine.verify_hits()
        self.cache.check()

    def spoil(self) -> None:
        """A bit of what is cached flips, in every row of every pool that is held."""
        for pool in self.runtime._pools:
            pool.hashes ^= np.uint64(1 << 17)


@pytest.fixture(params=FAMILIES, ids=lambda families: "+".join(f.name for f in families))
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Verified]:
    with Verified(tmp_path, request.param) as made:
        yield made


def test_a_hit_that_is_right_agrees_and_stays(bench: Verified) -> None:
    bench.told(PROMPT)
    _, hit = bench.told([*PROMPT, 50, 51])
    assert hit
    bench.idle()
    assert bench.engine.stats().verified == {"agrees": 1}
    assert bench.cache.stats().leases == 0
    assert bench.cache.stats().namespaces == 1, "what was computed anew is still there"
    assert bench.told([*PROMPT, 50, 52])[1] >= hit


def test_a_hit_that_is_wrong_raises_the_alarm_and_goes_from_memory_and_from_below(bench: Verified) -> None:
    bench.told(PROMPT)
    bench.told([*PROMPT, 50, 51])
    bench.tiering.flush()
    stored = bench.engine.stats().tier.records
    bench.spoil()
    bench.idle()
    assert bench.engine.stats().verified == {"differs": 1}
    assert bench.engine.stats().tier.records < stored
    tokens, hit = bench.told([*PROMPT, 50, 53])
    assert hit == 0, "what was found to be wrong was used again"
    assert tokens == bench.alone([*PROMPT, 50, 53], 3)


def test_a_request_that_comes_meanwhile_is_served_first_and_the_check_begins_anew(bench: Verified) -> None:
    bench.told(PROMPT)
    bench.told([*PROMPT, 50, 51])
    bench.engine.verify_hits()
    assert bench.cache.stats().leases == 2
    other = [60, *PROMPT[1:]]
    assert bench.told(other)[0] == bench.alone(other, 3)
    assert bench.cache.stats().leases == 0
    bench.idle()
    assert bench.engine.stats().verified == {"agrees": 1}


def test_what_is_computed_anew_is_never_stored(bench: Verified) -> None:
    bench.told(PROMPT)
    bench.told([*PROMPT, 50, 51])
    bench.tiering.flush()
    stored = bench.engine.stats().tier.records
    bench.idle()
    bench.tiering.flush()
    assert bench.engine.stats().tier.records == stored


def test_without_a_share_nothing_is_computed_anew(tmp_path: Path) -> None:
    bench = Verified(tmp_path, (FULL,))
    bench.engine.hit_verifier._share = 0.0
    bench.told(PROMPT)
    bench.told([*PROMPT, 50, 51])
    assert not bench.engine.hit_verifier.has_work
    bench.engine.stop()


@pytest.mark.parametrize("families", [(FULL,), (FULL, STATE)], ids=lambda families: f"{len(families)}")
def test_what_was_computed_upon_something_wrong_goes_as_well_wherever_it_branched(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    bench = Verified(tmp_path, families)
    verifier = bench.engine.hit_verifier
    verifier._share = 0.0
    bench.told(PROMPT)
    bench.spoil()
    longer = [*PROMPT, *range(41, 70)]
    bench.told(longer)  # computed upon what lies, and stored
    bench.tiering._writer.drain()
    verifier._share = 1.0
    bench.told([*PROMPT, 50, 51])  # the hit that is checked
    bench.idle()
    assert bench.engine.stats().verified == {"differs": 1}
    verifier._share = 0.0
    bench.told(PROMPT)  # right now
    assert bench.told([*longer, 1])[0] == bench.alone([*longer, 1], 3)
    bench.engine.stop()


def test_hits_that_are_verified_are_no_requests(bench: Verified) -> None:
    bench.told(PROMPT)
    bench.told([*PROMPT, 50, 51])
    before = bench.cache.stats()
    bench.idle()
    after = bench.cache.stats()
    assert (after.asked_tokens, after.hit_tokens) == (before.asked_tokens, before.hit_tokens)


def test_a_check_for_which_there_is_no_memory_is_given_up(bench: Verified) -> None:
    """A request that holds this many blocks. The cache is not emptied for it."""
    bench.told(PROMPT)
    bench.told([*PROMPT, 50, 51])
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
