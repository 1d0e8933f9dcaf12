"""The bytes of KV events, field by field, as routers of others read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from rootstock.cache.keys import Namespace
from rootstock.cache.resumable_blocks import BlockChange, BlocksCleared, BlocksRemoved, BlocksStored
from rootstock.engine.kv_events.wire import EventEncoder
from rootstock.testing.fake_runtime import FULL, STATE, chunked, window

FAMILIES = (FULL, window(24), chunked(16), STATE)
MODEL = Namespace("weights", "float32")
KEYS = np.array([2**64 - 1, 7], np.uint64)
TOKENS = np.arange(8, dtype=np.int32)


def stored(group: int = 0, namespace: Namespace = MODEL, parent: int | None = 2**63) -> BlocksStored:
    return BlocksStored(group, KEYS, parent, namespace, TOKENS)


def decoded(*changes: BlockChange, as_arrays: bool = False) -> Any:
    encoder = EventEncoder(FAMILIES, 4, {"fingerprint": "support"}.__getitem__, as_arrays=as_arrays)
    return msgspec.msgpack.decode(encoder.batch(changes, 12.5))


def test_a_batch_is_time_events_and_rank() -> None:
    assert decoded() == [12.5, [], 0]
    assert decoded(BlocksCleared()) == [12.5, [{"type": "AllBlocksCleared"}], 0]


def test_maps_have_the_fields_of_vllm() -> None:
    _, (first, second), _ = decoded(stored(), BlocksRemoved(0, KEYS))
    assert first == {
        "type": "BlockStored",
        "block_hashes": KEYS.tolist(),
        "parent_block_hash": 2**63,
        "token_ids": TOKENS.tolist(),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
    }
    assert second == {
        "type": "BlockRemoved",
        "block_hashes": KEYS.tolist(),
        "medium": "GPU",
        "group_idx": 0,
    }


def test_arrays_have_the_same_fields_in_the_same_places() -> None:
    salted = replace(MODEL, salt="secret")
    _, maps, _ = decoded(stored(namespace=salted), BlocksRemoved(0, KEYS), BlocksCleared())
    _, arrays, _ = decoded(stored(namespace=salted), BlocksRemoved(0, KEYS), BlocksCleared(), as_arrays=True)
    for of_map, of_array in zip(maps, arrays, strict=True):
        of_map.pop("cache_salt", None)
        assert list(of_map.values()) == of_array


@pytest.mark.parametrize(
    ("group", "kind", "size"),
    [(1, "sliding_window", 24), (2, "chunked_local_attention", None), (3, "mamba", None)],
)
def test_groups_of_checkpoints_have_the_kind_of_their_family(group: int, kind: str, size: int | None) -> None:
    _, (event,), _ = decoded(stored(group))
    assert event["group_idx"] == group
    assert event["kv_cache_spec_kind"] == kind
    assert event["kv_cache_spec_sliding_window"] == size


@pytest.mark.parametrize("as_arrays", [False, True])
def test_a_salt_never_leaves_in_clear_and_tells_tenants_apart(as_arrays: bool) -> None:
    encoder = EventEncoder(FAMILIES, 4, str, as_arrays=as_arrays)

    def batch(salt: str) -> bytes:
        return encoder.batch([stored(namespace=replace(MODEL, salt=salt))], 0.0)

    assert b"tenant-7" not in batch("tenant-7")
    assert batch("tenant-7") == batch("tenant-7")
    assert len({batch(salt) for salt in ("", "tenant-7", "tenant-8")}) == 3


def test_an_adapter_has_its_name() -> None:
    _, (event,), _ = decoded(stored(namespace=replace(MODEL, adapter="fingerprint")))
    assert event["lora_name"] == "support"
