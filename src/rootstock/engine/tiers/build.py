"""Builds the tiers (host RAM, disk) and their connector from TierConfig."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from rootstock.cache.families import row_bytes
from rootstock.cache.keys import RecordKey
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.tier_index import StoredIndex
from rootstock.config import TierConfig
from rootstock.engine.tiers.connector import Space, TierConnector, TierEvents
from rootstock.errors import InvalidOption
from rootstock.runtime.base import Runtime
from rootstock.runtime.host_memory import refuse_host_tier
from rootstock.tiers.base import Off, Tier, UnavailableTier
from rootstock.tiers.chain import TierChain
from rootstock.tiers.disk.space import SEGMENTS, least_cap_bytes
from rootstock.tiers.disk.tier import DiskTier
from rootstock.tiers.host import HostTier
from rootstock.tiers.pair import TierPair
from rootstock.tiers.reader import TierReader
from rootstock.tiers.remote.lookups import PromptLookups
from rootstock.tiers.remote.record_code import RecordCodes
from rootstock.tiers.remote.tier import RemoteTier
from rootstock.tiers.writer import TierWriter

log = logging.getLogger(__name__)

LINGER_S = 0.05  # delay of a sync, so that one sync serves the stores of several steps


def stored_index(runtime: Runtime, tier: TierConfig, block_size: int) -> StoredIndex | None:
    """Returns the cache's index of stored records, or None without tiers. Raises InvalidOption."""
    described = runtime.description
    refuse_host_tier(tier.host_budget_bytes, described.memory)
    if tier.disk_dir is None and not tier.host_budget_bytes and tier.remote is None:
        return None
    if tier.disk_dir is not None:
        largest_bytes = max(row_bytes(family, block_size) for family in described.families)
        least_bytes = least_cap_bytes(largest_bytes)
        if tier.disk_budget_bytes < least_bytes:
            raise InvalidOption(
                "--disk-budget",
                tier.disk_budget_bytes,
                f"at least {least_bytes:,} bytes: {SEGMENTS} of this model's largest records, {largest_bytes:,} "
                "bytes each, must fit",
            )
    return StoredIndex(described.families, block_size)


def open_below(
    runtime: Runtime,
    cache: KVCache,
    tier: TierConfig,
    chunk_tokens: int,
    clock: Callable[[], float] = time.monotonic,
    load_clock: Callable[[], float] = time.perf_counter,
) -> TierConnector | None:
    """Opens the tiers and reads their entries. An unusable directory gives one warning and no tier.

    `load_clock` times each load of a record; `clock` times all else.
    """
    if cache.stored is None:
        return None
    # Read first: with a wrong file, nothing is left open.
    codes: RecordCodes | None = None
    if tier.remote is not None and tier.remote_key_file is not None:
        codes = RecordCodes.of_file(tier.remote_key_file)
    events = TierEvents()

    def gone(keys: Sequence[RecordKey]) -> None:
        """Notes records that one tier has lost, unless another one has them."""
        events.gone(keys if pair is None else [key for key in keys if key not in pair])

    pair: TierPair | None = None
    disk: DiskTier | None = None
    host: HostTier | None = None
    bottom: Tier | None = None
    if tier.disk_dir is not None:
        opened = DiskTier.open(tier.disk_dir, tier.disk_budget_bytes, gone=gone)
        if isinstance(opened, Off):
            log.warning("There is no disk tier: %s Requests go on without it.", opened.reason)
            bottom = UnavailableTier(opened, has_records=True)
        else:
            bottom = disk = opened
    if tier.host_budget_bytes:
        # The host tier evicts to the disk, through a writer of its own.
        below = bottom or UnavailableTier(Off("there is no disk tier: --disk-dir is not given"))
        host = HostTier(tier.host_budget_bytes)
        bottom = TierChain(host, below, TierWriter(below, tier.queue_bytes), gone=gone)
    remote: RemoteTier | None = None
    if tier.remote is not None:
        remote = RemoteTier(tier.remote, codes, gone=gone)
        if bottom is not None:
            pair = TierPair(bottom, remote)
        bottom = pair or remote
    assert bottom is not None
    tier_writer = TierWriter(bottom, tier.queue_bytes, linger_s=LINGER_S)
    tier_reader = TierReader(tier_writer.load, load_clock)
    lookups = None if remote is None else PromptLookups(remote, cache.families, cache.block_size)

    def space() -> Space:
        in_host = (0, 0) if host is None else (host.used_bytes, host.cap_bytes)
        in_store = None if remote is None else remote.usage()
        if disk is not None:
            with suppress(Exception):  # an unreadable directory only lacks its statistics
                usage = disk.usage()
                return Space(
                    usage.total_bytes, tier.disk_budget_bytes, usage.foreign_bytes, *in_host, in_store
                )
        cap_bytes = tier.disk_budget_bytes if tier.disk_dir is not None else 0
        return Space(0, cap_bytes, 0, *in_host, in_store)

    connector = TierConnector(
        runtime,
        cache,
        bottom,
        tier_writer,
        tier_reader,
        events,
        chunk_tokens,
        tier.queue_bytes,
        clock,
        disk,
        space,
        remote,
        lookups,
    )
    if cache.stored.foreign_records:
        log.warning(
            "%d of %d stored records are of models with other layers, or of another --block-size: this one never "
            "finds them. They stay until their space is needed. A directory for each model keeps them.",
            cache.stored.foreign_records,
            cache.stored.foreign_records + len(cache.stored),
        )
    return connector
