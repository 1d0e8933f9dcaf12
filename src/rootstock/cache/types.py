"""Types that all of the cache shares: ids of pool rows, arrays of them, and token ids."""

from __future__ import annotations

from typing import NewType

import numpy as np
from numpy.typing import NDArray

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)  # a row of the pool of recurrent states
BlockIds = NDArray[np.int32]  # [blocks] ids of pool rows
Tokens = NDArray[np.int32]  # [tokens] token ids

NO_SLOT = SlotId(-1)  # the model has no recurrent states
NO_BLOCK = -1  # in a block table: this block was released, and no later forward reads it

NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False
