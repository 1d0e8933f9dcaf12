"""Admission: reserves the rows of a prompt, and of the positions that a running request computes next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS
from rootstock.cache.checkpoint_writer import CheckpointWriter
from rootstock.cache.copy_on_write import copies_on_write
from rootstock.cache.lease import Admitted, BlockTable, Deferred, Lease, LeaseId, Match
from rootstock.cache.plan import NOTHING, Load, Plan, RowPart, StateCopy
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.cache.radix_node import Boundary, Checkpoint, Node, WindowBlocks, block_table, replaced_blocks
from rootstock.cache.retention.hint_decisions import Retainer
from rootstock.cache.stats import Counters
from rootstock.cache.tier_index import TierHit
from rootstock.cache.types import NO_BLOCK, BlockId, BlockIds, SlotId
from rootstock.cache.window_release import release_behind_windows


class _Hit(NamedTuple):
    """The cached rows that a lease starts from. Nothing is reserved yet."""

    length: int  # positions that need not be computed
    node: Node | None  # holds the last position; None: the lease references no cached prefix
    blocks: BlockIds  # of these positions
    copied: BlockId | None  # the last of them, if the hit ends inside it: its first positions are copied
    replaced: list[int]  # further blocks of the path: a deeper block replaces each of them
    windows: Sequence[WindowBlocks]  # of each window family: blocks that a resumption reads
    checkpoint: Checkpoint | None

    @property
    def shared(self) -> BlockIds:
        """The whole blocks: the lease's table begins with them."""
        return self.blocks if self.copied is None else self.blocks[:-1]

    @property
    def used(self) -> BlockIds:
        """All blocks of the path: the lease uses them, so that they cannot be evicted."""
        if not self.replaced:
            return self.blocks
        return np.concatenate((self.blocks, np.array(self.replaced, np.int32)))


class Admission:
    """Maker of leases. `reuse` tells whether computed tokens are published for other requests."""

    def __init__(
        self,
        pools: Pools,
        tree: PrefixTree,
        counters: Counters,
        checkpoints: CheckpointWriter,
        lease_ids: Iterator[int],
        reuse: bool,
        retainer: Retainer,
    ) -> None:
        self._retainer = retainer
        self._pools = pools
        self._tree = tree
        self._counters = counters
        self._checkpoints = checkpoints
        self._lease_ids = lease_ids
        self._reuse = reuse
        self._size = pools.block_size
        self._working_states = int(pools.states is not None)  # rows that each lease takes
        self._none_loaded = (0,) * len(pools.windows)
        self._no_windows = tuple(WindowBlocks(0, NO_BLOCKS) for _ in pools.windows)
        windows = {window.table: i for i, window in enumerate(pools.windows)}
        self._order = tuple(windows.get(table, -1) for table in range(pools.tables))

    # -------------------------------------------------------------------------------------- a new request

    def admit(
        self,
        match: Match,
        watermark_blocks: int,
        boundaries: Sequence[Boundary],
        tier_hit: TierHit | None,
        is_idle: bool = False,
        session: int = 0,
    ) -> Admitted | Deferred:
        """Reserves the rows of a prompt, or changes nothing at all. `match` is up to date. `session` is the
        session of the request, if it is known already.

        The full family's blocks of a prompt of n tokens:

            0                              hit          tier hit                     n
            |------------------------------|------------|----------------------------|- - - - - - - -|
            | shared         | copied      | loaded     | computed                   | watermark     |
            | cached in the  | first part  | from a     | by forwards, in chunks     | must remain   |
            | tree, used     | of the next | tier, if   | that end at checkpoint     | available for |
            | as they are    | block       | it has any | positions                  | running leases|
            |----------------|------------------------------------------------------|- - - - - - - -|
              referenced      new blocks: allocated now, for the whole prompt         not allocated

        - *shared*: whole blocks. The lease references the path, so none of its blocks can be evicted.
        - *copied*: only if the hit ends inside a block. The plan copies that block's cached positions into the first
          new block (copy-on-write).
        - *loaded*: only with `tier_hit`. Its `base` is the hit then, and `Admitted.loads` fill the new blocks.
        - *computed*: at least the last token, since the request needs its logits.
        - *watermark*: `watermark_blocks` of every family must remain available, so that running requests can
          continue.

        A window family shares the blocks of the last window before the hit. Of its new blocks, only a copied one and
        loaded ones are allocated now, the others in `extend`; but one whole window must be available. A recurrent
        state takes one row, the working slot: the plan copies the checkpoint's state into it.

        If too few rows are available, a smaller hit may be enough: if the lease does not reference the path, blocks
        that only the path needs can be evicted.
        """
        pools = self._pools
        hit = self._hit(match)
        new_blocks = self._new_blocks(match, hit)
        loaded = self._none_loaded if tier_hit is None else self._loaded_windows(tier_hit)
        rows = self._rows_needed(new_blocks, hit, loaded, watermark_blocks)
        # An upper bound of the hit's cached rows is enough in most cases; the exact number costs a lookup.
        if not pools.can_allocate(rows, self._most_cached_rows(hit)):
            kept = self._cached_rows(hit)
            if tier_hit is None and not pools.can_allocate(rows, kept):
                hit = self._smaller(hit)
                new_blocks = self._new_blocks(match, hit)
                rows = self._rows_needed(new_blocks, hit, loaded, watermark_blocks)
                kept = self._cached_rows(hit)
            if not pools.can_allocate(rows, kept):
                return Deferred(pools.bytes_of(rows), pools.available_bytes - pools.bytes_of(kept))

        # Nothing can fail from here on. The lease uses the hit first, so that eviction does not take it.
        lease = self._lease(match, hit)
        lease.is_idle = is_idle
        lease.session = session
        self._attach(lease, hit)
        self._make_room(lease, new_blocks, loaded)
        plan = self._first_plan(lease, hit, new_blocks)
        if not pools.resume_anywhere:
            self._checkpoints.plan_positions(lease, match, boundaries)
        loads = () if tier_hit is None else self._loads(lease, tier_hit)
        return Admitted(lease, plan, loads)

    def has_free_rows(self, match: Match, tier_hit: TierHit | None) -> bool:
        """Returns whether the rows of a prompt are free without an eviction."""
        return self._pools.has_free(self._idle_rows(match, self._hit(match), tier_hit))

    def _idle_rows(self, match: Match, hit: _Hit, tier_hit: TierHit | None) -> Rows:
        loaded = self._none_loaded if tier_hit is None else self._loaded_windows(tier_hit)
        return self._rows_needed(self._new_blocks(match, hit), hit, loaded, 0)

    def has_rows(self, match: Match) -> bool:
        """Returns whether the rows of a prompt are free, or can be evicted beside its hit."""
        hit = self._hit(match)
        return self._pools.can_allocate(self._idle_rows(match, hit, None), self._cached_rows(hit))

    def make_idle_room(self, match: Match, tier_hit: TierHit | None) -> bool:
        """Evicts entries that rank below idle work until the rows of a prompt are free. Keeps the prompt's hit.

        Returns False if that frees too little.
        """
        hit = self._hit(match)
        rows = self._idle_rows(match, hit, tier_hit)
        if not self._pools.can_allocate(rows, self._cached_rows(hit)):
            return False
        protection = self._tree.protect(match)
        try:
            return self._tree.make_room_below(rows, self._tree.unasked_rank())
        finally:
            self._tree.unprotect(protection)

    def pin(self, match: Match) -> Lease:
        """Makes a lease that only references the hit of a match, so that its rows stay. Takes no row."""
        hit = self._hit(match)
        assert hit.node is not None
        lease = self._lease(match, hit)
        node = self._tree.split(hit.node, hit.length) if hit.length < hit.node.end else hit.node
        lease.replaced = hit.replaced if hit.copied is None else [*hit.replaced, hit.copied]
        self._tree.hold(lease, node)
        return lease

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _new_blocks(self, match: Match, hit: _Hit) -> int:
        return self._blocks(len(match.tokens)) - hit.length // self._size

    def _hit(self, match: Match) -> _Hit:
        """Collects the rows that the match leads to."""
        size, length, node = self._size, match.length, match.node
        windows = match.windows or self._no_windows
        while node is not None and length <= node.start and not node.is_root:
            node = node.parent  # a cap moved the position to an ancestor's end, or it is a private root
        if node is None or not length:
            return _Hit(length, None, NO_BLOCKS, None, [], windows, None)
        table = block_table(node, length, size)
        replaced = replaced_blocks(node, table, size)
        copied = BlockId(int(table[-1])) if length % size else None
        return _Hit(length, node, table, copied, replaced, windows, match.checkpoint)

    def _smaller(self, hit: _Hit) -> _Hit:
        """Returns the hit that needs the least memory: whole blocks without references to the path, which lets its
        replaced blocks go. A model that can resume only at some positions gives up the hit."""
        if self._pools.resume_anywhere:
            length = hit.length - hit.length % self._size
            return _Hit(length, None, hit.shared, None, [], hit.windows, hit.checkpoint)
        return _Hit(0, None, NO_BLOCKS, None, [], self._no_windows, None)

    def _loaded_windows(self, tier_hit: TierHit) -> tuple[int, ...]:
        """Counts the blocks of each window family that are to be loaded."""
        return tuple(
            [sum(block.family == window.index for block in tier_hit.blocks) for window in self._pools.windows]
        )

    def _rows_needed(
        self, new_blocks: int, hit: _Hit, loaded: tuple[int, ...], watermark_blocks: int
    ) -> Rows:
        """Returns the rows of each pool that must be available: for the prompt's new blocks, for one window of each
        window family, for a working state, and for the watermark."""
        if not hit.windows:
            return Rows(new_blocks + watermark_blocks, (), self._working_states)
        size = self._size
        windows = []
        for window, held, of_loads in zip(self._pools.windows, hit.windows, loaded, strict=True):
            rest_of_window = window.most_blocks(size) - len(held.whole(hit.length, size))
            windows.append(max(0, min(new_blocks, rest_of_window), of_loads) + watermark_blocks)
        return Rows(new_blocks + watermark_blocks, tuple(windows), self._working_states)

    def _most_cached_rows(self, hit: _Hit) -> Rows:
        """Returns an upper bound of `_cached_rows`, assuming that no lease uses the rows. Cheaper: skips the refcount
        lookup."""
        windows = tuple([len(held.ids) for held in hit.windows])
        return Rows(len(hit.blocks) + len(hit.replaced), windows, int(hit.checkpoint is not None))

    def _cached_rows(self, hit: _Hit) -> Rows:
        """Counts the rows of the hit that no lease uses yet. They count as evictable, but must stay for this
        request."""
        pools = self._pools
        windows = (
            window.pool.unused_among(held.ids)
            for window, held in zip(pools.windows, hit.windows, strict=True)
        )
        states = 0
        if pools.states is not None and hit.checkpoint is not None:
            states = pools.states.pool.unused_among(pools.slot_rows(hit.checkpoint.slot))
        return Rows(pools.full.pool.unused_among(hit.used), tuple(windows), states)

    def _lease(self, match: Match, hit: _Hit) -> Lease:
        """Makes the lease and uses all rows of the hit."""
        pools, size = self._pools, self._size
        pools.full.pool.use(hit.used)
        first_new = hit.length // size
        tables: list[BlockTable] = []
        sources: list[WindowBlocks | None] = []
        for window, held in zip(pools.windows, hit.windows, strict=True):
            whole = held.whole(hit.length, size)
            ids = np.full(first_new, NO_BLOCK, np.int32)
            ids[first_new - len(whole) :] = whole
            tables.append(BlockTable(ids, first_new - len(whole)))
            partly_filled = held.ids[len(whole) :]  # one block at most
            sources.append(WindowBlocks(first_new, partly_filled) if len(partly_filled) else None)
            window.pool.use(held.ids)
        lease = Lease(
            LeaseId(next(self._lease_ids)),
            match.scope,
            match.tokens,
            hit.length,
            BlockTable(hit.shared),
            tables,
            self._order,
            sources,
        )
        if hit.checkpoint is not None:
            lease.resumed_from = hit.checkpoint
            self._tree.reference(hit.checkpoint)
            if pools.states is not None:
                pools.states.pool.use(pools.slot_rows(hit.checkpoint.slot))
        return lease

    def _attach(self, lease: Lease, hit: _Hit) -> None:
        """References the path of the hit. A smaller hit without its path stays outside the tree."""
        if hit.node is not None:
            node = self._tree.split(hit.node, hit.length) if hit.length < hit.node.end else hit.node
            lease.replaced = hit.replaced if hit.copied is None else [*hit.replaced, hit.copied]
            self._tree.attach(lease, node)
        elif self._reuse and hit.length == 0:
            self._tree.attach(lease, self._tree.ensure_root(lease.scope.first))

    def _make_room(self, lease: Lease, new_blocks: int, loaded: tuple[int, ...]) -> None:
        """Evicts until the rows that are allocated now are free."""
        windows = [n + (source is not None) for n, source in zip(loaded, lease.copy_sources, strict=True)]
        self._tree.make_room(Rows(new_blocks, tuple(windows), self._working_states))

    def _first_plan(self, lease: Lease, hit: _Hit, new_blocks: int) -> Plan:
        """Allocates the prompt's blocks and working state. Plans to copy the shared part of a block and the state."""
        pools = self._pools
        new = pools.full.pool.allocate(new_blocks, lease.full.last)
        lease.full.grow(new)
        copies = copies_on_write(pools, lease, hit.copied, new, hit.length % self._size)
        self._counters.copied_blocks += len(copies)
        states: tuple[StateCopy, ...] = ()
        if pools.states is not None:
            lease.slot = SlotId(int(pools.states.pool.allocate(1)[0]))
            if lease.resumed_from is not None:
                states = (StateCopy(lease.resumed_from.slot, lease.slot),)
        return Plan(copies=copies, states=states) if copies or states else NOTHING

    def _loads(self, lease: Lease, tier_hit: TierHit) -> tuple[Load, ...]:
        """Gives the lease the window blocks that are to be loaded; maps each record to its row."""
        pools = self._pools
        tables = {pools.full.index: lease.full}
        for window, table in zip(pools.windows, lease.windows, strict=True):
            tables[window.index] = table
            indices = [block.index for block in tier_hit.blocks if block.family == window.index]
            table.begin_at(min(indices, default=tier_hit.position // self._size))
            table.grow(window.pool.allocate(len(indices)))
        loads = [
            Load(
                block.identity,
                RowPart(block.family, int(tables[block.family].ids[block.index]), len(block.identity.tokens)),
            )
            for block in tier_hit.blocks
        ]
        if tier_hit.state is not None:
            assert pools.states is not None
            loads.append(Load(tier_hit.state, RowPart(pools.states.index, lease.slot, 0)))
        if not pools.resume_anywhere:
            self._checkpoints.plan_loaded_positions(lease, tier_hit)
        return tuple(loads)

    # ---------------------------------------------------------------------------------- a running request

    def extend(
        self, lease: Lease, new_tokens: int, watermark_blocks: int, *, is_least: bool = False
    ) -> Deferred | None:
        """Allocates the blocks of the next `new_tokens` positions. See `KVCache.extend`."""
        pools = self._pools
        if lease.windows and release_behind_windows(pools, lease):
            self._tree.version += 1
        blocks = self._blocks(lease.num_computed_tokens + new_tokens)
        full = max(0, blocks - lease.full.length)
        windows = tuple([max(0, blocks - table.length) for table in lease.windows])
        if not full and not any(windows):
            return None
        if watermark_blocks:
            rows = Rows(full + watermark_blocks, tuple([n + watermark_blocks for n in windows]))
            if not pools.can_allocate(rows):
                return Deferred(pools.bytes_of(rows), pools.available_bytes)
        rows = Rows(full, windows)
        if lease.is_idle and not self._tree.make_room_below(rows, self._tree.unasked_rank()):
            return Deferred(pools.bytes_of(rows), pools.available_bytes)
        if not pools.can_allocate(rows):
            if not (new_tokens == 1 or is_least) or not self._can_detach(lease, rows):
                return Deferred(pools.bytes_of(rows), pools.available_bytes)
            if lease.hints is not None:
                self._retainer.retain(lease)
            self._tree.detach(lease)
        self._tree.make_room(rows)
        if full:
            lease.full.grow(pools.full.pool.allocate(full, lease.full.last))
        for window, table, count in zip(pools.windows, lease.windows, windows, strict=True):
            if count:
                table.grow(window.pool.allocate(count, table.last))
        return None

    def _can_detach(self, lease: Lease, rows: Rows) -> bool:
        """Returns True if the lease gets its rows once it is detached from the tree: the replaced blocks that only it
        uses can be evicted then."""
        if lease.node is None:
            return False
        # Before the first forward the copy plan still reads these blocks, so they stay used.
        if not lease.started:
            return False
        gained = self._pools.full.pool.used_once_among(np.array(lease.replaced, np.int32))
        if not gained:
            return False
        return self._pools.can_allocate(rows, Rows(-gained, (0,) * len(rows.windows)))
