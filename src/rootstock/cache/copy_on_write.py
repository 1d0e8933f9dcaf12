"""Copy-on-write: a lease that goes on inside a shared block writes to a copy of it."""

from __future__ import annotations

from rootstock.cache.lease import Lease
from rootstock.cache.plan import BlockCopy
from rootstock.cache.pools import Pools
from rootstock.cache.types import BlockId, BlockIds


def copies_on_write(
    pools: Pools, lease: Lease, shared: BlockId | None, new: BlockIds, filled: int
) -> tuple[BlockCopy, ...]:
    """Plans to copy the first `filled` positions of the shared blocks behind which a new lease goes on.

    `shared` is the full family's block, if the hit ends inside one, and `new` are the lease's new blocks of that
    family: the first takes the copy. Each window family has its source in `lease.copy_sources`; its target is
    allocated here.
    """
    copies = []
    if shared is not None and pools.full.table >= 0:
        copies.append(BlockCopy(shared, BlockId(int(new[0])), filled, pools.full.table))
    for window, table, source in zip(pools.windows, lease.windows, lease.copy_sources, strict=True):
        if source is not None:
            target = window.pool.allocate(1, table.last)
            table.grow(target)
            copies.append(
                BlockCopy(BlockId(int(source.ids[0])), BlockId(int(target[0])), filled, window.table)
            )
    return tuple(copies)
