"""`--verify-hits`: a sample of hits is computed anew when there is nothing else to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rootstock.cache import KVCache
from rootstock.cache.families import Family, row_bytes
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Admitted
from rootstock.cache.tier_index import StoredIndex
from rootstock.config import EngineConfig, TierConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Finished, Request, RequestId, SamplingParams, StopParams, TokenEvent
from rootstock.engine.tiers.build import open_below
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window

PROMPT = list(range(40))
FAMILIES: list[tuple[Family, ...]] = [(FULL,), (FULL, STATE), (FULL, window(6)), (window(6), STATE)]


class Bench:
    def __init__(self, folder: Path, families: tuple[Family, ...]) -> None:
        self.runtime = FakeRuntime(families=families)
        budget = 200 * sum(row_bytes(family, 8) for family in families)
        self.cache = KVCache(families, budget, 8, stored=StoredIndex(families, 8), through=True)
        self.runtime.allocate(self.cache.rows, 8)
        self.tiering = open_below(self.runtime, self.cache, TierConfig(folder, 2**24, "through"), 16)
        assert self.tiering is not None
        config = EngineConfig(chunk_tokens=16)
        self.engine = Engine(self.runtime, self.cache, config, tier_connector=self.tiering, verify_hits=1.0)
        self.asked = 0

    def ask(self, tokens: list[int]) -> tuple[list[int], int]:
        self.asked += 1
        events: list[object] = []
        self.engine.submit(
            Request(
                RequestId(str(self.asked)),
                np.array(tokens, np.int32),
                SamplingParams(temperature=0.0),
                StopParams(max_tokens=3),
            ),
            events.append,
        )
        while self.engine.step():
            pass
        (finished,) = (event for event in events if isinstance(event, Finished))
        return [e.token for e in events if isinstance(e, TokenEvent)], finished.usage.cached_tokens

    def alone(self, tokens: list[int]) -> list[int]:
        given: list[int] = []
        for _ in range(3):
            logits = self.runtime.expected_logits(np.array([*tokens, *given], np.int32))
            given.append(int(logits.argmax()))
        return given

    def idle(self) -> None:
        while self.engine.hit_verifier.has_work:
            self.engine.verify_hits()
        self.cache.check()

    def spoil(self) -> None:
        """A bit of what is cached flips, in every row of every pool that is held."""
        for pool in self.runtime._pools:
            pool.hashes ^= np.uint64(1 << 17)


@pytest.fixture(params=FAMILIES, ids=lambda families: "+".join(f.name for f in families))
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, request.param)
    yield made
    made.engine.stop()


def test_a_hit_that_is_right_agrees_and_stays(bench: Bench) -> None:
    bench.ask(PROMPT)
    _, hit = bench.ask([*PROMPT, 50, 51])
    assert hit
    bench.idle()
    assert bench.engine.stats().verified == {"agrees": 1}
    assert bench.cache.stats().leases == 0
    assert bench.cache.stats().namespaces == 1, "what was computed anew is still there"
    assert bench.ask([*PROMPT, 50, 52])[1] >= hit


def test_a_hit_that_is_wrong_raises_the_alarm_and_goes_from_memory_and_from_below(bench: Bench) -> None:
    bench.ask(PROMPT)
    bench.ask([*PROMPT, 50, 51])
    assert bench.tiering is not None
    bench.tiering.flush()
    stored = bench.engine.stats().tier.records
    bench.spoil()
    bench.idle()
    assert bench.engine.stats().verified == {"differs": 1}
    assert bench.engine.stats().tier.records < stored
    tokens, hit = bench.ask([*PROMPT, 50, 53])
    assert hit == 0, "what was found to be wrong was used again"
    assert tokens == bench.alone([*PROMPT, 50, 53])


def test_a_request_that_comes_meanwhile_is_served_first_and_the_check_begins_anew(bench: Bench) -> None:
    bench.ask(PROMPT)
    bench.ask([*PROMPT, 50, 51])
    bench.engine.verify_hits()
    assert bench.cache.stats().leases == 2
    other = [60, *PROMPT[1:]]
    assert bench.ask(other)[0] == bench.alone(other)
    assert bench.cache.stats().leases == 0
    bench.idle()
    assert bench.engine.stats().verified == {"agrees": 1}


def test_what_is_computed_anew_is_never_stored(bench: Bench) -> None:
    bench.ask(PROMPT)
    bench.ask([*PROMPT, 50, 51])
    assert bench.tiering is not None
    bench.tiering.flush()
    stored = bench.engine.stats().tier.records
    bench.idle()
    bench.tiering.flush()
    assert bench.engine.stats().tier.records == stored


def test_without_a_share_nothing_is_computed_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (FULL,))
    bench.engine.hit_verifier._share = 0.0
    bench.ask(PROMPT)
    bench.ask([*PROMPT, 50, 51])
    assert not bench.engine.hit_verifier.has_work
    bench.engine.stop()


@pytest.mark.parametrize("families", [(FULL,), (FULL, STATE)], ids=lambda families: f"{len(families)}")
def test_what_was_computed_upon_something_wrong_goes_as_well_wherever_it_branched(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    bench = Bench(tmp_path, families)
    verifier = bench.engine.hit_verifier
    verifier._share = 0.0
    bench.ask(PROMPT)
    bench.spoil()
    longer = [*PROMPT, *range(41, 70)]
    bench.ask(longer)  # computed upon what lies, and stored
    assert bench.tiering is not None
    bench.tiering._writer.drain()
    verifier._share = 1.0
    bench.ask([*PROMPT, 50, 51])  # the hit that is checked
    bench.idle()
    assert bench.engine.stats().verified == {"differs": 1}
    verifier._share = 0.0
    bench.ask(PROMPT)  # right now
    assert bench.ask([*longer, 1])[0] == bench.alone([*longer, 1])
    bench.engine.stop()


def test_hits_that_are_verified_are_no_requests(bench: Bench) -> None:
    bench.ask(PROMPT)
    bench.ask([*PROMPT, 50, 51])
    before = bench.cache.stats()
    bench.idle()
    after = bench.cache.stats()
    assert (after.asked_tokens, after.hit_tokens) == (before.asked_tokens, before.hit_tokens)


def test_a_check_for_which_there_is_no_memory_is_given_up(bench: Bench) -> None:
    """Whoever holds so many blocks: the cache is not emptied for it."""
    bench.ask(PROMPT)
    bench.ask([*PROMPT, 50, 51])
    other = Namespace("another", "float32")
    held = np.arange(8 * bench.cache.pool.total_blocks, dtype=np.int32) % 90
    for blocks in range(bench.cache.pool.total_blocks, 0, -1):
        if isinstance(bench.cache.admit(bench.cache.match(held[: 8 * blocks - 7], other)), Admitted):
            break
    cached = bench.cache.stats().cached_tokens
    bench.idle()
    assert set(bench.engine.stats().verified) <= {"agrees", "given up"}
    assert bench.cache.stats().cached_tokens <= cached
    assert bench.cache.stats().leases == 1, "the cache was started anew"
