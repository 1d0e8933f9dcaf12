"""The release of blocks that a sliding window or a chunk has left behind."""

from __future__ import annotations

from rootstock.cache.lease import Lease
from rootstock.cache.pools import Pools


def release_behind_windows(pools: Pools, lease: Lease) -> int:
    """Gives up the blocks of window families that the lease's next position does not see. Returns their number."""
    count = 0
    for window, table in zip(pools.windows, lease.windows, strict=True):
        first_needed = window.family.first_visible(lease.num_computed_tokens) // pools.block_size
        released = table.release_before(first_needed)
        if len(released):
            window.pool.unuse(released)
            count += len(released)
    return count
