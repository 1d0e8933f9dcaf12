"""The pools of a model's families, and the one budget that they share.

Each family takes rows from a pool of its own; all rows in use together never cost more than the budget. A pool
therefore has as many rows as the budget could pay for if only that family used it, unless the device needs memory to
be divided beforehand. A row takes memory when it is first written; free rows return theirs when other families
need it, so that the memory of all pools stays within the budget, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS, BlockPool
from rootstock.cache.families import Family, FullAttention, RecurrentState, WindowFamily, row_bytes
from rootstock.cache.plan import RowsReturned
from rootstock.cache.shared_budget import BudgetShare
from rootstock.cache.types import NO_SLOT, BlockIds, SlotId
from rootstock.errors import BudgetTooSmall

# A model without full attention keeps nothing for most positions. The tree still gives them blocks, of no bytes: they
# bound the size of the tree itself, about 4 bytes a token, to a fraction of the budget and to 64 MiB.
_UNPAID_TOKENS = 16 * 2**20
_BUDGET_BYTES_PER_UNPAID_TOKEN = 16
_LEAST_UNPAID_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class FamilyPool:
    family: Family | None  # None: positions for which nothing is kept
    pool: BlockPool
    row_bytes: int
    table: int  # the family's index among the model's token families; -1 if it has no block table
    index: int = -1  # the family's index among the model's families

    @property
    def owned_bytes(self) -> int:
        return (self.pool.total_blocks - self.pool.free_blocks) * self.row_bytes

    @property
    def cached_bytes(self) -> int:
        return self.pool.cached_blocks * self.row_bytes


@dataclass(frozen=True, slots=True)
class WindowPool(FamilyPool):
    """The pool of a window family, with the family's type known."""

    family: WindowFamily

    def most_blocks(self, block_size: int) -> int:
        """Blocks that hold the longest window wherever it begins, and one to copy a shared block into."""
        return -(-(self.family.max_lookback + 1) // block_size) + 2


class Rows(NamedTuple):
    """A number of rows of each pool."""

    full: int
    windows: tuple[int, ...] = ()  # one number for each window family
    states: int = 0


def refuse_small_budget(families: Sequence[Family], budget_bytes: int, block_size: int) -> None:
    """Raises BudgetTooSmall if the budget cannot pay for one short request: two blocks of everything, one to compute
    into and one to copy a shared block from, and a working state."""
    of_state = sum(family.bytes_per_state for family in families if isinstance(family, RecurrentState))
    of_block = sum(row_bytes(family, block_size) for family in families) - of_state
    if budget_bytes < 2 * of_block + of_state:
        raise BudgetTooSmall(budget_bytes, 2 * of_block + of_state, of_block, of_state)


class Pools:
    """The pools of a model. `full` is always there: without a full family its blocks cost nothing.

    `every` lists the full pool, the pools of window families, then the states' pool. Raises BudgetTooSmall if the
    budget cannot pay for one short request.
    """

    def __init__(
        self,
        families: Sequence[Family],
        budget_bytes: int,
        block_size: int,
        rows: Sequence[int] | None = None,
        share: BudgetShare | None = None,
        *,
        lazy_states: bool = False,
    ) -> None:
        assert families
        full = [f for f in families if isinstance(f, FullAttention)]
        states = [f for f in families if isinstance(f, RecurrentState)]
        assert len(full) <= 1, "one family of full attention at most"
        assert len(states) <= 1, "one family of recurrent states at most"
        refuse_small_budget(families, budget_bytes, block_size)
        costs = [row_bytes(family, block_size) for family in families]
        self.budget_bytes = budget_bytes
        self.share = share  # in a budget that several caches share; None: the budget is this cache's alone
        self.block_size = block_size
        # Rows of each family, in the model's order.
        self.rows = tuple(budget_bytes // cost for cost in costs) if rows is None else tuple(rows)
        self.windows: list[WindowPool] = []
        unpaid = min(_UNPAID_TOKENS, budget_bytes // _BUDGET_BYTES_PER_UNPAID_TOKEN)
        self.full = FamilyPool(None, BlockPool(max(_LEAST_UNPAID_BLOCKS, unpaid // block_size)), 0, -1)
        self.states: FamilyPool | None = None
        table = 0
        for index, (family, cost, count) in enumerate(zip(families, costs, self.rows, strict=True)):
            is_window = not isinstance(family, RecurrentState | FullAttention)
            is_lazy = lazy_states and isinstance(family, RecurrentState)
            pool = BlockPool(
                count,
                weakly_referenced=is_window,
                returnable=is_lazy or (rows is None and (len(families) > 1 or share is not None)),
            )
            if isinstance(family, RecurrentState):
                self.states = FamilyPool(family, pool, cost, -1, index)
                continue
            if isinstance(family, FullAttention):
                self.full = FamilyPool(family, pool, cost, table, index)
            else:
                self.windows.append(WindowPool(family, pool, cost, table, index))
            table += 1
        self.tables = table
        self.every: list[FamilyPool] = [
            self.full,
            *self.windows,
            *(() if self.states is None else (self.states,)),
        ]
        # A cached prefix can be resumed at any position, so that checkpoints have no use.
        self.resume_anywhere = len(self.every) == 1
        # There is one pool, and the budget pays for every row of it: rows are counted, and bytes need not be.
        self._only_rows = self.resume_anywhere and share is None

    @staticmethod
    def slot_rows(slot: SlotId) -> BlockIds:
        """Returns a state's slot as rows of the states' pool; no rows if there is no state."""
        return NO_BLOCKS if slot == NO_SLOT else np.array([slot], np.int32)

    @property
    def owned_bytes(self) -> int:
        return sum(pool.owned_bytes for pool in self.every)

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.owned_bytes if self.share is None else self.share.budget.free_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of the rows that can be evicted."""
        return sum(pool.cached_bytes for pool in self.every)

    @property
    def available_bytes(self) -> int:
        """Bytes of free rows, and of cached rows that no lease uses: all of them can be evicted, also in the
        other caches of a shared budget."""
        others = 0 if self.share is None else self.share.others_cached_bytes
        return self.free_bytes + self.cached_bytes + others

    @property
    def backed_bytes(self) -> int:
        """Bytes of the rows that have memory, in use or not."""
        return sum(pool.pool.backed_blocks * pool.row_bytes for pool in self.every)

    @property
    def excess_bytes(self) -> int:
        """Bytes of memory beyond the budget, which free rows must give back to the system."""
        return self.backed_bytes - self.budget_bytes if self.share is None else self.share.excess_bytes

    @property
    def capacity_blocks(self) -> int:
        """Blocks of full attention that one request can have when it is alone."""
        fits, too_many = 0, self.full.pool.total_blocks + 1
        while too_many - fits > 1:
            blocks = (fits + too_many) // 2
            if self._can_ever_allocate(self._rows_alone(blocks)):
                fits = blocks
            else:
                too_many = blocks
        return fits

    def _rows_alone(self, blocks: int) -> Rows:
        """Returns the rows of each pool that a request of so many blocks uses, if it is computed in small steps."""
        windows = (min(blocks, window.most_blocks(self.block_size)) for window in self.windows)
        return Rows(blocks, tuple(windows), int(self.states is not None))

    def return_rows(self) -> list[RowsReturned]:
        """Chooses free rows that must lose their memory so that the memory of all pools stays within the budget."""
        returned: list[RowsReturned] = []
        for pool in sorted(self.every, key=lambda p: p.owned_bytes - p.pool.backed_blocks * p.row_bytes):
            over = self.excess_bytes
            if over > 0 and pool.row_bytes:
                rows = pool.pool.return_blocks(-(-over // pool.row_bytes))
                if len(rows):
                    returned.append(RowsReturned(pool.index, rows))
        return returned

    @property
    def returnable(self) -> list[FamilyPool]:
        """The pools whose memory is taken, and can be returned, row by row."""
        return [pool for pool in self.every if pool.row_bytes and pool.pool.returnable]

    @property
    def returnable_bytes(self) -> int:
        """Bytes of the rows in use of these pools."""
        return sum(pool.owned_bytes for pool in self.returnable)

    def return_free_rows(self) -> list[RowsReturned]:
        """Chooses all free rows that have memory, of the pools that can return it."""
        returned = [
            RowsReturned(pool.index, pool.pool.return_blocks(pool.pool.total_blocks))
            for pool in self.returnable
        ]
        return [one for one in returned if len(one.rows)]

    def _counts(self, rows: Rows) -> tuple[int, ...]:
        """Returns one number for each pool in `every`."""
        return (rows.full, *rows.windows, *(() if self.states is None else (rows.states,)))

    def bytes_of(self, rows: Rows) -> int:
        counts = self._counts(rows)
        return sum(count * pool.row_bytes for count, pool in zip(counts, self.every, strict=True))

    def _can_ever_allocate(self, rows: Rows) -> bool:
        """Returns True if so many rows can be allocated while no other request uses any."""
        return self.bytes_of(rows) <= self.budget_bytes and all(
            wanted <= pool.pool.total_blocks
            for pool, wanted in zip(self.every, self._counts(rows), strict=True)
        )

    def missing_bytes(self, rows: Rows) -> int:
        """Returns the bytes of these rows beyond the free ones; 0 for a single pool, all of whose rows the budget
        pays for."""
        return 0 if self._only_rows else max(0, self.bytes_of(rows) - self.free_bytes)

    def can_allocate(self, rows: Rows, kept: Rows | None = None) -> bool:
        """Returns True if so many rows can be allocated, with eviction where needed. `kept` of the cached rows must
        stay; a negative number counts used rows that can be evicted besides the cached ones."""
        if self._only_rows:
            full = self.full.pool
            return rows.full + (kept.full if kept else 0) <= full.free_blocks + full.cached_blocks
        wanted = self._counts(rows)
        stay = (0,) * len(wanted) if kept is None else self._counts(kept)
        for pool, count, staying in zip(self.every, wanted, stay, strict=True):
            if count > pool.pool.free_blocks + pool.pool.cached_blocks - staying:
                return False
        kept_bytes = 0 if kept is None else self.bytes_of(kept)
        return self.bytes_of(rows) <= self.available_bytes - kept_bytes

    def has_free(self, rows: Rows) -> bool:
        if self._only_rows:
            return rows.full <= self.full.pool.free_blocks
        return self.bytes_of(rows) <= self.free_bytes and all(
            wanted <= pool.pool.free_blocks
            for pool, wanted in zip(self.every, self._counts(rows), strict=True)
        )

    def check(self) -> None:
        for pool in self.every:
            pool.pool.check()
        assert 0 <= self.owned_bytes <= self.budget_bytes, "over the budget"
        if self.share is not None:
            self.share.budget.check()
