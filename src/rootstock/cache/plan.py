"""The work that a runtime does on its pools before a forward. The cache plans, the runtime executes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.keys import Identity
from rootstock.cache.retention.hint_types import Keep
from rootstock.cache.types import BlockId, BlockIds, SlotId

HostBytes = NDArray[np.uint8]  # [bytes] contiguous


class BlockCopy(NamedTuple):
    """Copy of the first `tokens` positions of row `source` to row `target`, in every layer (copy-on-write)."""

    source: BlockId
    target: BlockId
    tokens: int
    family: int = 0  # whose pool: an index into the model's token families


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy of a recurrent state: from a checkpoint into a working slot, or from a working slot into a checkpoint."""

    source: SlotId
    target: SlotId


@dataclass(frozen=True, slots=True)
class RowsReturned:
    """Return of free rows' memory to the operating system, since another family needs it. The rows' content is void;
    they take memory again at the next write."""

    family: int  # an index into the model's families
    rows: BlockIds


@dataclass(frozen=True, slots=True)
class RowPart:
    """The part of a row that a tier keeps: the first `tokens` positions of a block, or a whole state."""

    family: int  # an index into the model's families
    row: int
    tokens: int  # 0: the row is a state's slot


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Copy of a row for the tier below, made before another request writes to the row."""

    identity: Identity
    part: RowPart
    keep: Keep | None = None  # retention that hints ask for


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Load of a row from the record that the tier below keeps under this identity. The row's owner does not read it
    before."""

    identity: Identity
    part: RowPart


@dataclass(frozen=True, slots=True)
class Plan:
    """Work to execute in full before the next forward: first the stores, then `returned`, then the copies, each in
    order. All sources stay valid until then.

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
    """Joins plans into one that does their work one after the other."""
    plans = [plan for plan in plans if plan]
    if len(plans) < 2:
        return plans[0] if plans else NOTHING
    return Plan(
        tuple(copy for plan in plans for copy in plan.copies),
        tuple(state for plan in plans for state in plan.states),
        tuple(rows for plan in plans for rows in plan.returned),
        tuple(store for plan in plans for store in plan.stores),
    )
