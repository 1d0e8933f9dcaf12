"""What a runtime must do to its pool before a forward. The cache plans, the runtime executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import numpy as np
from numpy.typing import NDArray

BlockId = NewType("BlockId", int)
BlockIds = NDArray[np.int32]  # [blocks] ids of pool rows
Tokens = NDArray[np.int32]  # [tokens] token ids


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `tokens` positions of pool row `source` to row `target`, in every layer (copy-on-write)."""

    source: BlockId
    target: BlockId
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Executed in full before the next forward; the sources stay valid until then."""

    copies: tuple[BlockCopy, ...] = ()


NOTHING = Plan()
