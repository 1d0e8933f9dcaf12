"""Records that hints keep: they survive the eviction of a tier, within shares, and on a disk a restart."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from rootstock.cache.keys import Identity
from rootstock.cache.retention.hint_types import MAX_TTL_S, Keep
from rootstock.tiers.base import Loaded, Record, Stored, Tier
from rootstock.tiers.chain import TierChain
from rootstock.tiers.disk.index import INDEX_NAME
from rootstock.tiers.disk.tier import DiskTier
from rootstock.tiers.host import HostTier, charge
from rootstock.tiers.kept import KeptBytes
from rootstock.tiers.writer import TierWriter
from tiers.helpers import CAP_BYTES, Clock, identity_of, open_tier, payload_of

SIZE = 2_000  # a segment of the disk has room for thirty: up to an eighth of it is copied when it is evicted


def record(seed: int, keep: Keep | None = None) -> Record:
    identity = identity_of(seed)
    return Record(identity, payload_of(identity, SIZE), keep)


def has(tier: Tier, identity: Identity) -> bool:
    return isinstance(tier.load(identity), Loaded)


def flood(tier: Tier, clock: Clock, first: int = 1000, groups: int = 60) -> None:
    """Stores twice as many bytes as the tier holds."""
    for group in range(groups):
        clock.now_s += 0.01
        tier.store([record(first + 20 * group + number) for number in range(20)])


def host(clock: Clock) -> HostTier:
    return HostTier(CAP_BYTES, clock=clock)


def disk(folder: Path, clock: Clock) -> DiskTier:
    return open_tier(folder, clock=clock)


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_kept_record_survives_a_flood_and_an_ordinary_one_does_not(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    tier: Tier = host(clock) if kind == "host" else disk(tmp_path, clock)
    tier.store([record(1, Keep("tenant", 3600.0)), record(2)])
    flood(tier, clock)
    assert has(tier, identity_of(1))
    assert not has(tier, identity_of(2))
    clock.now_s += 3600
    flood(tier, clock, 5000)
    assert not has(tier, identity_of(1))
    tier.close()


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_stored_record_can_be_kept_later(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    tier: Tier = host(clock) if kind == "host" else disk(tmp_path, clock)
    tier.store([record(1), record(2)])
    tier.retain({identity_of(1).key: Keep("tenant", 3600.0), identity_of(9).key: Keep("tenant", 3600.0)})
    flood(tier, clock)
    assert has(tier, identity_of(1))
    assert not has(tier, identity_of(2))
    tier.close()


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_tenant_cannot_keep_a_tier_full(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    tier: Tier = host(clock) if kind == "host" else disk(tmp_path, clock)
    for group in range(40):
        clock.now_s += 0.01
        tier.store([record(20 * group + number, Keep("greedy", MAX_TTL_S, 100)) for number in range(20)])
    flood(tier, clock)
    kept = sum(has(tier, identity_of(seed)) for seed in range(800))
    assert 0 < kept * SIZE <= CAP_BYTES * 5 / 8
    assert all(isinstance(outcome, Stored) for outcome in tier.store([record(9000)]))
    tier.close()


@pytest.mark.behaviour(27)
def test_on_the_disk_a_lower_priority_goes_first(tmp_path: Path) -> None:
    """Also if it was stored later."""
    clock = Clock()
    tier = disk(tmp_path, clock)
    for priority in (5, -5):
        first = 0 if priority > 0 else 100
        tier.store([record(first + number, Keep("tenant", 3600.0, priority)) for number in range(100)])
    for priority in (9, 10):
        first = 1000 * priority
        tier.store([record(first + number, Keep(f"{priority}", 3600.0, priority)) for number in range(200)])
    high = sum(has(tier, identity_of(number)) for number in range(100))
    low = sum(has(tier, identity_of(number)) for number in range(100, 200))
    assert high == 100
    assert low < 100
    tier.close()


@pytest.mark.behaviour(27)
def test_retention_on_the_disk_outlives_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    tier = disk(tmp_path, clock)
    tier.store([record(1, Keep("tenant", 3600.0)), record(2), record(3)])
    tier.retain({identity_of(3).key: Keep("tenant", 3600.0)})
    tier.store([record(seed) for seed in range(600, 640)])
    tier.close()
    clock.now_s += 600
    tier = disk(tmp_path, clock)
    flood(tier, clock)
    assert [has(tier, identity_of(seed)) for seed in (1, 2, 3)] == [True, False, True]
    assert tier._index.kept.total_bytes > 2 * SIZE
    tier.close()
    clock.now_s += 3600
    tier = disk(tmp_path, clock)
    flood(tier, clock, 5000)
    assert not has(tier, identity_of(1))
    tier.close()


@pytest.mark.behaviour(27)
def test_a_clock_that_is_set_back_keeps_no_record_for_longer_than_a_day(tmp_path: Path) -> None:
    clock = Clock()
    clock.now_s = 1e9
    tier = disk(tmp_path, clock)
    tier.store([record(1, Keep("tenant", 3600.0))])
    tier.close()
    clock.now_s = 1000.0
    tier = disk(tmp_path, clock)
    (known,) = tier._index._known.values()
    assert known.retention.until_s == 1000.0 + MAX_TTL_S
    tier.close()


@pytest.mark.behaviour(27)
def test_an_index_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    clock = Clock()
    tier = disk(tmp_path, clock)
    tier.store([record(1)])
    tier.close()
    with sqlite3.connect(tmp_path / INDEX_NAME) as db:
        for column in ("kept_until", "priority", "tenant"):
            db.execute(f"ALTER TABLE records DROP COLUMN {column}")
    db.close()
    tier = disk(tmp_path, clock)
    assert has(tier, identity_of(1))
    tier.retain({identity_of(1).key: Keep("tenant", 3600.0)})
    flood(tier, clock)
    assert has(tier, identity_of(1))
    tier.close()


@pytest.mark.behaviour(27)
def test_a_record_takes_its_retention_along_from_host_to_disk(tmp_path: Path) -> None:
    clock = Clock()
    lower = disk(tmp_path, clock)
    upper = HostTier(4 * charge(record(0)), clock=clock)
    chain = TierChain(upper, lower, TierWriter(lower, 10**8))
    chain.store([record(1, Keep("tenant", 3600.0)), record(2)])
    chain.store([record(seed) for seed in range(3, 8)])
    assert identity_of(1).key in upper
    lower.store([record(seed) for seed in range(600, 640)])
    chain.close()
    lower = disk(tmp_path, clock)
    flood(lower, clock)
    assert has(lower, identity_of(1))
    assert not has(lower, identity_of(2))
    lower.close()


@pytest.mark.behaviour(27)
def test_tenants_share_half_of_a_tier() -> None:
    kept = KeptBytes(1000)
    assert kept.has_room("a", 500)
    kept.add("a", 200)
    assert not kept.has_room("b", 251)
    assert kept.has_room("b", 250)
    kept.add("b", 250)
    assert not kept.has_room("a", 51)
    kept.add("b", -250)
    assert kept.has_room("a", 300)
    assert kept.of() == {"a": 200}
