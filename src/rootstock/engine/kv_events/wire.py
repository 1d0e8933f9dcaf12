"""Batches of KV events as vLLM's publisher writes them: MessagePack, each event a map or an array.

A batch is [time, events, data-parallel rank]. vLLM 0.33 writes maps, earlier releases and llm-d's adapter arrays;
Dynamo reads both. Group 0 has the prefixes from which a request can resume, as full attention: routers that know
one group read this one. Each further group has the last full block before every checkpoint, for one family of
windows or states.

A salt is secret. `cache_salt` has a hash of the namespace's salt instead, by which a router tells tenants apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rootstock.cache.families import ChunkedAttention, Family, RecurrentState, SlidingWindow
from rootstock.cache.keys import Namespace
from rootstock.cache.resumable_blocks import BlockChange, BlocksCleared, BlocksStored, block_groups

MEDIUM = "GPU"  # vLLM's name of the engine's own memory, on any device
AdapterName = Callable[[str], str]  # from an adapter's fingerprint


class EventEncoder:
    """Encoder of batches of one engine's changes."""

    def __init__(
        self, families: Sequence[Family], block_size: int, adapter_name: AdapterName, *, as_arrays: bool
    ) -> None:
        self._block_size = block_size
        self._adapter_name = adapter_name
        self._as_arrays = as_arrays
        self._kinds = [_kind(family) for family in block_groups(families)]
        self._encode = msgspec.msgpack.Encoder().encode

    def batch(self, changes: Sequence[BlockChange], at_s: float) -> bytes:
        """Encodes a batch; an empty one is a sign of life. `at_s`: seconds since the Unix epoch."""
        return self._encode([at_s, [self._event(change) for change in changes], 0])

    def _event(self, change: BlockChange) -> dict[str, Any] | list[Any]:
        if isinstance(change, BlocksCleared):
            fields: dict[str, Any] = {"type": "AllBlocksCleared"}
        elif isinstance(change, BlocksStored):
            fields = self._stored(change)
        else:
            fields = {
                "type": "BlockRemoved",
                "block_hashes": change.keys.tolist(),
                "medium": MEDIUM,
                "group_idx": change.group,
            }
        if self._as_arrays:
            fields.pop("cache_salt", None)  # in `extra_keys` as well; arrays have no place for it
            return list(fields.values())
        return fields

    def _stored(self, change: BlocksStored) -> dict[str, Any]:
        kind, window = self._kinds[change.group]
        owner = salt_hash(change.namespace)
        fields: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": change.keys.tolist(),
            "parent_block_hash": change.parent,
            "token_ids": change.tokens.tolist(),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": self._adapter_name(change.namespace.adapter) if change.namespace.adapter else None,
            "extra_keys": None if owner is None else [[owner]] * len(change.keys),
            "group_idx": change.group,
            "kv_cache_spec_kind": kind,
            "kv_cache_spec_sliding_window": window,
        }
        if owner is not None:
            fields["cache_salt"] = owner
        return fields


def salt_hash(namespace: Namespace) -> str | None:
    """Returns the text that stands for the namespace's salt in events, or None if it has no salt."""
    if not namespace.salt:
        return None
    # Of the digest, which depends on the weights: a salt that is easy to guess is not found by a table.
    return hashlib.blake2b(namespace.digest(), digest_size=16, person=b"kv-events").hexdigest()


def _kind(family: Family | None) -> tuple[str, int | None]:
    """Returns vLLM's name of a group's kind, and its window."""
    if isinstance(family, RecurrentState):
        return "mamba", None
    if isinstance(family, SlidingWindow):
        return "sliding_window", family.window
    if isinstance(family, ChunkedAttention):
        return "chunked_local_attention", None
    return "full_attention", None
