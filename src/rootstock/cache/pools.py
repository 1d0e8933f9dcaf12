"""The pools of a model's families, and the one budget that they share.

Each family takes rows from a pool of its own; what all rows in use cost together never exceeds the budget. A pool
therefore has as many rows as the budget could pay for if only that family used it, unless the device needs memory to
be divided beforehand. A row takes memory when it is first written; free rows give theirs back when other families
need it, so that what all pools really take stays within the budget, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rootstock.cache.block_pool import NO_BLOCKS, BlockPool
from rootstock.cache.families import Family, FullAttention, RecurrentState, TailFamily, row_bytes
from rootstock.cache.plan import RowsReturned
from rootstock.cache.types import NO_SLOT, BlockIds, SlotId
from rootstock.errors import BudgetTooSmall

# A model without full attention keeps nothing for most positions. The tree still gives them blocks, of no bytes: they
# bound what the tree itself takes, about 4 bytes a token, to a fraction of the budget and to 64 MiB.
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
class TailPool(FamilyPool):
    """A window's or a chunk's pool, with the family's type known."""

    family: TailFamily


Rows = list[int]  # one number for each of `Pools.every`


class Pools:
    """`full` is always there: without a full family its blocks cost nothing.

    `every` lists the full pool, the tails' pools, then the states' pool. Raises BudgetTooSmall if the budget cannot
    pay for one short request.
    """

    def __init__(
        self,
        families: Sequence[Family],
        budget_bytes: int,
        block_size: int,
        rows: Sequence[int] | None = None,
    ) -> None:
        assert families
        full = [f for f in families if isinstance(f, FullAttention)]
        states = [f for f in families if isinstance(f, RecurrentState)]
        assert len(full) <= 1, "one family of full attention at most"
        assert len(states) <= 1, "one family of recurrent states at most"
        costs = [row_bytes(family, block_size) for family in families]
        # Two blocks of everything, one to compute into and one to copy a shared tail from, and a working state.
        of_state = sum(family.bytes_per_state for family in states)
        of_block = sum(costs) - of_state
        if budget_bytes < 2 * of_block + of_state:
            raise BudgetTooSmall(budget_bytes, 2 * of_block + of_state, of_block, of_state)
        self.budget_bytes = budget_bytes
        self.block_size = block_size
        # Of each family, in the model's order.
        self.rows = tuple(budget_bytes // cost for cost in costs) if rows is None else tuple(rows)
        self.tails: list[TailPool] = []
        unpaid = min(_UNPAID_TOKENS, budget_bytes // _BUDGET_BYTES_PER_UNPAID_TOKEN)
        self.full = FamilyPool(None, BlockPool(max(_LEAST_UNPAID_BLOCKS, unpaid // block_size)), 0, -1)
        self.states: FamilyPool | None = None
        table = 0
        for index, (family, cost, count) in enumerate(zip(families, costs, self.rows, strict=True)):
            is_tail = not isinstance(family, RecurrentState | FullAttention)
            pool = BlockPool(count, referred=is_tail, returnable=rows is None and len(families) > 1)
            if isinstance(family, RecurrentState):
                self.states = FamilyPool(family, pool, cost, -1, index)
                continue
            if isinstance(family, FullAttention):
                self.full = FamilyPool(family, pool, cost, table, index)
            else:
                self.tails.append(TailPool(family, pool, cost, table, index))
            table += 1
        self.tables = table
        self.every: list[FamilyPool] = [
            self.full,
            *self.tails,
            *(() if self.states is None else (self.states,)),
        ]
        # Whether everything cached can be resumed at any position, so that checkpoints have no use.
        self.resume_anywhere = len(self.every) == 1

    @staticmethod
    def slot_rows(slot: SlotId) -> BlockIds:
        """A state's slot as rows of the states' pool; none if there is no state."""
        return NO_BLOCKS if slot == NO_SLOT else np.array([slot], np.int32)

    @property
    def owned_bytes(self) -> int:
        return sum(pool.owned_bytes for pool in self.every)

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.owned_bytes

    @property
    def available_bytes(self) -> int:
        """Free, or held and used by nobody: all of it can be evicted."""
        cached_bytes: int = sum(pool.cached_bytes for pool in self.every)
        return self.free_bytes + cached_bytes

    @property
    def backed_bytes(self) -> int:
        """Of rows that have memory, in use or not."""
        return sum(pool.pool.backed_blocks * pool.row_bytes for pool in self.every)

    def give_back(self) -> list[RowsReturned]:
        """Free rows that must lose their memory for the rest to stay within the budget."""
        returned: list[RowsReturned] = []
        for pool in sorted(self.every, key=lambda p: p.owned_bytes - p.pool.backed_blocks * p.row_bytes):
            over = self.backed_bytes - self.budget_bytes
            if over > 0 and pool.row_bytes:
                rows = pool.pool.give_back(-(-over // pool.row_bytes))
                if len(rows):
                    returned.append(RowsReturned(pool.index, rows))
        return returned

    def cost(self, rows: Rows) -> int:
        return sum(count * pool.row_bytes for count, pool in zip(rows, self.every, strict=True))

    def can_ever_have(self, rows: Rows) -> bool:
        """Whether so many rows can be had when nobody uses any."""
        return self.cost(rows) <= self.budget_bytes and all(
            wanted <= pool.pool.total_blocks for pool, wanted in zip(self.every, rows, strict=True)
        )

    def missing_bytes(self, rows: Rows) -> int:
        """What these rows cost beyond what is free; where one pool's rows are all paid for, none."""
        return 0 if self.resume_anywhere else max(0, self.cost(rows) - self.free_bytes)

    def can_have(self, rows: Rows, kept: Rows | None = None) -> bool:
        """Whether so many rows can be had by eviction, while `kept` of the cached ones must stay (or, if negative,
        so many more than the cached ones can go)."""
        if self.resume_anywhere:  # one pool, every row of which the budget pays for
            full = self.full.pool
            return rows[0] + (kept[0] if kept else 0) <= full.free_blocks + full.cached_blocks
        kept = kept or [0] * len(rows)
        for pool, wanted, stay in zip(self.every, rows, kept, strict=True):
            if wanted > pool.pool.free_blocks + pool.pool.cached_blocks - stay:
                return False
        return self.cost(rows) <= self.available_bytes - self.cost(kept)

    def has_free(self, rows: Rows) -> bool:
        if self.resume_anywhere:
            return rows[0] <= self.full.pool.free_blocks
        return self.cost(rows) <= self.free_bytes and all(
            wanted <= pool.pool.free_blocks for pool, wanted in zip(self.every, rows, strict=True)
        )

    def check(self) -> None:
        for pool in self.every:
            pool.pool.check()
        assert 0 <= self.owned_bytes <= self.budget_bytes, "over the budget"
