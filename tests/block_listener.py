"""A listener to the changes of `ResumableBlocks`, as a router is one: it knows the events only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from rootstock.cache.resumable_blocks import BlockChange, BlocksCleared, BlocksStored


class BlockListener:
    """The blocks of each group that were announced and not removed since."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.groups: dict[int, set[int]] = {}

    def hear(self, changes: Iterable[BlockChange]) -> None:
        for change in changes:
            if isinstance(change, BlocksCleared):
                self.groups.clear()
                continue
            here, keys = self.groups.setdefault(change.group, set()), change.keys.tolist()
            assert len(set(keys)) == len(keys) > 0
            if isinstance(change, BlocksStored):
                assert here.isdisjoint(keys), "a block is stored that is there"
                if not change.group and change.parent is not None:
                    assert change.parent in here, "a block is stored before the block before it"
                assert keys == self._keys(change)
                here.update(keys)
            else:
                assert here.issuperset(keys), "a block is removed that is not there"
                here.difference_update(keys)

    def _keys(self, change: BlocksStored) -> list[int]:
        """Names the blocks by the tokens that were announced with them."""
        found, key = [], b"" if change.parent is None else change.parent.to_bytes(8, "little")
        for tokens in np.split(change.tokens.astype("<i4"), len(change.keys)):
            assert len(tokens) == self.block_size
            name = xxhash.xxh3_64(key + change.namespace.digest() + tokens.tobytes()).intdigest()
            found.append(name)
            key = name.to_bytes(8, "little")
        return found
