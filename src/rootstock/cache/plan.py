"""What a runtime must do to its pools before a forward. The cache plans, the runtime executes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rootstock.cache.record_identity import Identity

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)  # a row of the pool of recurrent states
BlockIds = NDArray[np.int32]  # [blocks] ids of pool rows
Tokens = NDArray[np.int32]  # [tokens] token ids

HostBytes = NDArray[np.uint8]  # [bytes] contiguous

NO_SLOT = SlotId(-1)  # the model has no recurrent states
NO_BLOCK = -1  # in a block table: this block was released, and nothing that follows needs it


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `tokens` positions of row `source` to row `target`, in every layer (copy-on-write)."""

    source: BlockId
    target: BlockId
    tokens: int
    family: int = 0  # whose pool: an index into the model's token families


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy a recurrent state: a checkpoint restored into a working slot, or a working state kept as a checkpoint."""

    source: SlotId
    target: SlotId


@dataclass(frozen=True, slots=True)
class RowsReturned:
    """Give the memory of these rows back to the system: another family needs it. Their content is void, and they
    take memory again when they are next written."""

    family: int  # an index into the model's families
    rows: BlockIds


@dataclass(frozen=True, slots=True)
class RowPart:
    """Of one row, what a tier keeps: the first `tokens` positions of a block, or a whole state."""

    family: int  # an index into the model's families
    row: int
    tokens: int  # 0: the row is a state's slot


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Take a copy of this for the tier below: the row is about to be written by others."""

    identity: Identity
    part: RowPart


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Fill a row with what the tier below keeps under this identity. The row's owner does not read it before that."""

    identity: Identity
    part: RowPart


@dataclass(frozen=True, slots=True)
class Plan:
    """Executed in full before the next forward: first the stores, then what is returned, then the copies, each in
    order. The sources stay valid until then.

    The engine hands stores to the tier; a runtime's `apply` executes the rest.
    """

    copies: tuple[BlockCopy, ...] = ()
    states: tuple[StateCopy, ...] = ()
    returned: tuple[RowsReturned, ...] = ()
    stores: tuple[Store, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.returned or self.copies or self.states or self.stores)


NOTHING = Plan()


def together(plans: Iterable[Plan]) -> Plan:
    """One plan that does what these do, one after the other."""
    plans = [plan for plan in plans if plan]
    if len(plans) < 2:
        return plans[0] if plans else NOTHING
    return Plan(
        tuple(copy for plan in plans for copy in plan.copies),
        tuple(state for plan in plans for state in plan.states),
        tuple(rows for plan in plans for rows in plan.returned),
        tuple(store for plan in plans for store in plan.stores),
    )
