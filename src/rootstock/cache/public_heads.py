"""Public heads: beginnings of prompts that are no secret, so that all tenants share their K/V."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from rootstock.cache.types import Tokens


class PublicHeads:
    """The public heads of one model, as tokens. A prompt has one if it begins with all of its tokens."""

    def __init__(self, heads: Iterable[Tokens] = ()) -> None:
        self._heads: dict[bytes, Tokens] = {}  # by digest
        for head in heads:
            if len(head):
                own = np.array(head, np.int32)
                self._heads[xxhash.xxh3_128_digest(_raw(own))] = own
        self._lengths = sorted({len(head) for head in self._heads.values()})

    def __len__(self) -> int:
        return len(self._heads)

    def longest(self, tokens: Tokens) -> int:
        """Returns the length of the longest head with which `tokens` begin; 0: of none. O(the longest head)."""
        found = start = 0
        h = xxhash.xxh3_128()
        for length in self._lengths:
            if length > len(tokens):
                break
            h.update(_raw(tokens[start:length]))
            start = length
            head = self._heads.get(h.digest())
            if head is not None and np.array_equal(head, tokens[:length]):
                found = length
        return found


def _raw(tokens: Tokens) -> memoryview:
    return np.ascontiguousarray(tokens, "<i4").data.cast("B")
