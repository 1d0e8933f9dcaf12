"""Behaviours that every tier has: host RAM, a disk, a chain of both, and a shared server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rootstock.cache.keys import Namespace, RecordKind, identify
from rootstock.tiers.base import Loaded, Miss, MissKind, NotStored, Off, Ready, Record, Refusal, Stored, Tier
from rootstock.tiers.chain import TierChain
from rootstock.tiers.host import HostTier
from rootstock.tiers.pair import TierPair
from rootstock.tiers.remote.record_code import RecordCodes
from rootstock.tiers.remote.tier import RemoteTier
from rootstock.tiers.writer import TierWriter
from shared_store import SharedStore
from tiers.helpers import (
    CAP_BYTES,
    NAMESPACE,
    identity_of,
    is_right,
    joined,
    kind_of_miss,
    open_tier,
    prefix,
    record_of,
    records,
)


@pytest.fixture(params=["host", "disk", "chain", "remote", "remote with codes", "disk and remote"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made: Tier
    if "remote" in request.param:
        with SharedStore(tmp_path) as store:
            remote = RemoteTier(store.config, RecordCodes(b"k" * 32) if "codes" in request.param else None)
            made = TierPair(open_tier(tmp_path / "tier"), remote) if "disk" in request.param else remote
            yield made
            made.close()
        return
    if request.param == "host":
        made = HostTier(CAP_BYTES)
    elif request.param == "disk":
        made = open_tier(tmp_path / "tier")
    else:
        disk = open_tier(tmp_path / "tier")
        made = TierChain(HostTier(CAP_BYTES), disk, TierWriter(disk, CAP_BYTES))
    yield made
    made.close()


def test_a_stored_record_is_loaded_in_the_same_buffers(tier: Tier) -> None:
    (record,) = records(1)
    assert isinstance(tier.store([record])[0], Stored)
    loaded = tier.load(record.identity)
    assert isinstance(loaded, Loaded)
    assert [bytes(view) for view in loaded.payload] == [bytes(part) for part in record.payload if len(part)]
    loaded.payload[0][0] ^= 1  # it is the caller's
    assert is_right(tier.load(record.identity), record)


def test_a_load_fills_the_callers_buffers_however_they_are_divided(tier: Tier) -> None:
    (record,) = records(1)
    tier.store([record])
    buffers = [np.zeros(n, np.uint8) for n in (1, 0, 2000, 999)]
    assert is_right(tier.load(record.identity, buffers), record)
    assert joined(buffers) == joined(record.payload)


def test_a_load_into_buffers_of_another_size_is_a_miss(tier: Tier) -> None:
    (record,) = records(1)
    tier.store([record])
    assert kind_of_miss(tier.load(record.identity, [np.zeros(2999, np.uint8)])) is MissKind.OTHER_SIZE


def test_a_record_without_a_payload_is_a_record(tier: Tier) -> None:
    record = Record(identity_of(1), [])
    assert isinstance(tier.store([record])[0], Stored)
    loaded = tier.load(record.identity, [np.empty(0, np.uint8)])
    assert isinstance(loaded, Loaded)
    assert joined(loaded.payload) == b""


def test_a_state_is_found_by_its_position_with_any_start(tier: Tier) -> None:
    tokens = prefix(3, 40)
    record = record_of(identify(NAMESPACE, "state", 2, "float32", RecordKind.STATE, tokens, 16))
    tier.store([record])
    for start in (0, 16, 39, 40):
        state = identify(NAMESPACE, "state", 2, "float32", RecordKind.STATE, tokens, start)
        assert is_right(tier.load(state), record)
    earlier = identify(NAMESPACE, "state", 2, "float32", RecordKind.STATE, tokens[:39], 16)
    assert tier.load(earlier) == Miss(MissKind.ABSENT)


def test_another_namespace_dtype_position_or_token_is_another_record(tier: Tier) -> None:
    tier.store([record_of(identity_of(1))])
    for other in (
        identity_of(2),
        identity_of(1, start=15),
        identity_of(1, end=28),
        identity_of(1, dtype="bfloat16"),
        identity_of(1, layers=5),
        identity_of(1, kind=RecordKind.STATE),
        identity_of(1, namespace=Namespace("weights", "float32", salt="tenant")),
        identity_of(1, namespace=Namespace("other weights", "float32")),
    ):
        assert tier.load(other) == Miss(MissKind.ABSENT)


def test_entries_come_with_parents_first(tier: Tier) -> None:
    ends = [48, 16, 40, 32]
    if isinstance(tier, RemoteTier):
        return  # it has records of others, which it does not list
    tier.store([record_of(identity_of(1, end - 8, end)) for end in ends])
    assert [entry.identity.end for entry in tier.entries()] == sorted(ends)


def test_a_closed_tier_is_off(tier: Tier) -> None:
    (record,) = records(1)
    tier.store([record])
    assert tier.state == Ready()
    tier.close()
    tier.close()
    assert isinstance(tier.state, Off)
    assert kind_of_miss(tier.load(record.identity)) is MissKind.UNAVAILABLE
    (refused,) = tier.store([record])
    assert isinstance(refused, NotStored)
    assert refused.why is Refusal.UNAVAILABLE
