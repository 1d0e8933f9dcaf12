"""Write-back queue: turns evicted or newly published rows into `Store` requests, deduplicated by content key.

Eviction adds rows here while they still hold their content. The engine executes the stores before the next write to
those rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import xxhash

from rootstock.cache.families import ChunkedAttention
from rootstock.cache.keys import Identity, Namespace, RecordKey, RecordKind, Scope, identify
from rootstock.cache.lease import Lease
from rootstock.cache.plan import RowPart, Store
from rootstock.cache.pools import FamilyPool, Pools
from rootstock.cache.radix_node import Checkpoint, Node, Root
from rootstock.cache.retention.grants import keep_of
from rootstock.cache.retention.hint_types import Keep
from rootstock.cache.tier_index import StoredIndex
from rootstock.cache.types import NO_SLOT, BlockIds, SlotId, Tokens


class WriteBackQueue:
    """Queue of stores. With `through`, published rows are stored at once: evictions are free, a crash loses less.

    With `shared`, other servers find records too, by the tokens of their prompts alone. A full block is of no use
    to a prompt that ends inside it or goes on with other tokens, so that a checkpoint inside a block is stored with
    the block's part up to there, also where a full block is stored that begins with it."""

    def __init__(
        self,
        pools: Pools,
        stored: StoredIndex,
        *,
        through: bool = False,
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stored = stored
        self._clock = clock
        self._kept: dict[RecordKey, Keep] = {}
        self.through = through or shared
        self._shared = shared
        self.is_open = True  # if not, the tier takes no stores: evicted rows are dropped
        self._pools = pools
        self._waiting: dict[RecordKey, Store] = {}
        self._used: list[RecordKey] = []
        self._wrong: list[RecordKey] = []

    def take(self) -> tuple[Store, ...]:
        """Takes the stores that were added since the last call."""
        if not self._waiting:
            return ()
        stores, self._waiting = tuple(self._waiting.values()), {}
        return stores

    def forget(self, namespace: Namespace | None = None) -> None:
        """Drops the waiting stores of a namespace, or all."""
        of = None if namespace is None else namespace.digest()
        self._waiting = {
            key: store
            for key, store in self._waiting.items()
            if of is not None and store.identity.namespace != of
        }

    def take_used(self) -> list[RecordKey]:
        """Takes the keys of records whose rows were in use in memory until now; the tier refreshes their age."""
        used, self._used = self._used, []
        return used

    def take_kept(self) -> dict[RecordKey, Keep]:
        """Takes the retention of records that the tier has already."""
        kept, self._kept = self._kept, {}
        return kept

    def take_wrong(self) -> list[RecordKey]:
        """Takes the keys of records that must not be loaded any more."""
        wrong, self._wrong = self._wrong, []
        return wrong

    # ------------------------------------------------------------------------------------ evicted rows

    def add_blocks(self, node: Node, kept: int = 0) -> None:
        """Adds the node's blocks but for the first `kept`, before they are evicted. Skips reasoning that a
        conversation has dropped: it is not worth space on the disk."""
        full = self._pools.full
        if not self.is_open or full.family is None or node.passed_by or kept >= len(node.blocks):
            return
        scope, tokens = path_tokens(node, node.end)
        keep = keep_of(node, self._clock())
        self._add_blocks(scope, tokens, node.start // self._size + kept, node.blocks[kept:], full, keep)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Adds the rows of a checkpoint before it is dropped."""
        node = checkpoint.node
        assert node is not None
        if self.is_open and not node.passed_by:
            scope, tokens = path_tokens(node, checkpoint.position)
            keep = keep_of(checkpoint, self._clock())
            self._add_checkpoint(scope, tokens, checkpoint, checkpoint.slot, keep)

    def add_node(self, node: Node) -> None:
        """Adds all rows of a node that stays: its checkpoints and its blocks, except for a last block that its
        children share."""
        full = self._pools.full
        if node.passed_by:
            return
        if full.family is not None:
            end = node.end if not node.children else node.end - node.end % self._size
            if end > node.start:
                scope, tokens = path_tokens(node, end)
                keep = keep_of(node, self._clock())
                self._add_blocks(scope, tokens, node.start // self._size, node.blocks, full, keep)
        for checkpoint in node.checkpoints.values():
            self.add_checkpoint(checkpoint)

    # ---------------------------------------------------------------------------------- published rows

    def add_published(self, lease: Lease, first: int, *, at_end: bool = False) -> None:
        """Adds the full blocks of newly published positions from `first` on; at the lease's end also a partly filled
        one. Only with `through`."""
        full = self._pools.full
        if not (self.through and self.is_open) or full.family is None:
            return
        size, end = self._size, lease.num_cached_tokens
        if not at_end:
            end -= end % size
        if first // size * size < end:
            blocks = slice(first // size, -(-end // size))
            table, tokens = lease.table[blocks], lease.tokens[:end]
            keep = _keep_of_claims(lease, end)
            self._add_blocks(lease.scope, tokens, blocks.start, table, full, keep)

    def add_new_checkpoint(self, checkpoint: Checkpoint, lease: Lease) -> None:
        """Adds the rows of a checkpoint at the lease's current position. Reads the state from the lease's working
        slot, since the copy may not have been executed yet. Only with `through`."""
        if self.through and self.is_open:
            tokens = lease.tokens[: checkpoint.position]
            keep = keep_of(checkpoint, self._clock())
            self._add_checkpoint(lease.scope, tokens, checkpoint, lease.slot, keep)
            full, first = self._pools.full, len(tokens) // self._size
            if self._shared and full.family is not None and len(tokens) % self._size:
                self._add_blocks(lease.scope, tokens, first, lease.table[first : first + 1], full, keep)

    def distrust(self, tokens: Tokens, scope: Scope, first: int, *, all_that_follows: bool = False) -> None:
        """Removes records and waiting stores of these tokens that end beyond position `first`: they may be wrong."""
        if all_that_follows:
            # Other requests continued the prefix with tokens unknown here: all records beyond `first` go, for
            # all tenants if they may have continued a public head.
            keys = self.stored.keys_beyond(None if first < scope.public_tokens else scope.namespace, first)
        else:
            keys = self.stored.keys_along(tokens, scope, first)
        for key in keys:
            self._wrong.append(key)
            self.stored.remove(key)
        self._waiting = {
            key: store
            for key, store in self._waiting.items()
            if store.identity.end <= first or not _is_prefix_of(store.identity, tokens, scope)
        }

    # ---------------------------------------------------------------------------------------- identity

    @property
    def _size(self) -> int:
        return self._pools.block_size

    def _add_checkpoint(
        self,
        scope: Scope,
        tokens: Tokens,
        checkpoint: Checkpoint,
        slot: SlotId,
        keep: Keep | None,
    ) -> None:
        """Adds all rows that a resumption after `tokens` reads, with the state in `slot`."""
        if self._is_storable(checkpoint):
            for pool, held in zip(self._pools.windows, checkpoint.windows, strict=True):
                self._add_blocks(scope, tokens, held.first, held.ids, pool, keep)
            self._add_state(scope.of(len(tokens)), tokens, slot, keep)

    def _is_storable(self, checkpoint: Checkpoint) -> bool:
        """Returns True if its blocks hold all their positions. Where a chunk begins inside a block, the positions
        before it may never have been written. Records begin at blocks, so such a block cannot be stored."""
        for pool, held in zip(self._pools.windows, checkpoint.windows, strict=True):
            inside = pool.family.first_visible(checkpoint.position) % self._size
            if isinstance(pool.family, ChunkedAttention) and inside and len(held.ids):
                return False
        return True

    def _add_blocks(
        self,
        scope: Scope,
        tokens: Tokens,
        first: int,
        ids: BlockIds,
        pool: FamilyPool,
        keep: Keep | None,
    ) -> None:
        """Adds block indices `first` …, the last of which is filled as far as `tokens` go."""
        public = scope.public_tokens // self._size - first  # blocks that lie within a public head
        if public > 0:
            rest = tokens[: (first + public) * self._size]
            self._add_blocks_of(scope.public, rest, first, ids[:public], pool, keep)
            first, ids = first + public, ids[public:]
        self._add_blocks_of(scope.of(len(tokens)), tokens, first, ids, pool, keep)

    def _add_blocks_of(
        self,
        namespace: Namespace,
        tokens: Tokens,
        first: int,
        ids: BlockIds,
        pool: FamilyPool,
        keep: Keep | None,
    ) -> None:
        assert pool.family is not None
        if namespace.is_private:
            return
        size, raw = self._size, np.ascontiguousarray(tokens, "<i4").data.cast("B")
        of_namespace, dtype = namespace.digest(), namespace.kv_dtype
        h = xxhash.xxh3_128(of_namespace)
        h.update(raw[: first * size * 4])
        for i, block in enumerate(ids.tolist(), first):
            parent = h.digest()
            start, end = i * size, min((i + 1) * size, len(tokens))
            if end <= start:
                return
            h.update(raw[start * 4 : end * 4])
            own = np.array(tokens[start:end], np.int32)
            identity = Identity(
                of_namespace,
                pool.family.name,
                pool.family.layers,
                dtype,
                RecordKind.BLOCKS,
                start,
                own,
                parent,
                h.digest(),
            )
            is_stored = identity.key in self.stored
            may_be_covered = end - start < size and not self._shared
            if not is_stored and may_be_covered and self.stored.covers(pool.index, parent, own):
                continue
            self._add(identity, RowPart(pool.index, block, end - start), keep)

    def _add_state(self, namespace: Namespace, tokens: Tokens, slot: SlotId, keep: Keep | None) -> None:
        pool = self._pools.states
        if pool is None or slot == NO_SLOT or namespace.is_private:
            return
        assert pool.family is not None
        # Found from the boundary before it, like the block that it lies in.
        start = (len(tokens) - 1) // self._size * self._size
        identity = identify(
            namespace,
            pool.family.name,
            pool.family.layers,
            namespace.kv_dtype,
            RecordKind.STATE,
            tokens,
            start,
        )
        self._add(identity, RowPart(pool.index, slot, 0), keep)

    def _add(self, identity: Identity, part: RowPart, keep: Keep | None) -> None:
        key = identity.key
        if key in self.stored:
            self._used.append(key)
            if keep is not None:
                self._kept[key] = keep
        else:
            self._waiting.setdefault(key, Store(identity, part, keep))


def _keep_of_claims(lease: Lease, end: int) -> Keep | None:
    """Returns the retention that the lease will give to its blocks up to `end`."""
    claims = [claim for claim in lease.claims if claim.covers(end)]
    kept = [claim for claim in claims if claim.ttl_s or claim.priority > 0]
    if not kept:
        return None
    best = max(kept, key=lambda claim: (claim.ttl_s > 0, claim.priority, claim.lasts_s))
    return Keep(best.tenant, best.lasts_s, best.priority)


def path_tokens(node: Node, position: int) -> tuple[Scope, Tokens]:
    """Collects the scope and the tokens 0 … position-1 on the path to `node`. O(position)."""
    tokens = np.empty(position, np.int32)
    scope: Scope | None = None
    for step in node.path():
        if isinstance(step, Root):
            scope = scope or Scope(step.namespace, step.end)
            if step.is_root:
                return scope, tokens
            continue
        end = min(step.end, position)
        tokens[step.start : end] = step.tokens[: end - step.start]
    raise AssertionError("a path without a root")


def _is_prefix_of(identity: Identity, tokens: Tokens, scope: Scope) -> bool:
    if identity.namespace != scope.of(identity.end).digest() or identity.end > len(tokens):
        return False
    return bool((identity.tokens == tokens[identity.start : identity.end]).all())
