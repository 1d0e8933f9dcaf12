"""Token histories with an index from each n-gram to its last occurrence.

The index is one direct-mapped table. Of two n-grams that share a slot the older one is forgotten, and each hit is
compared with the tokens. A lookup has a constant cost, and a token takes 12 to 24 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.longest_match import common_prefix
from rootstock.cache.types import Tokens

NGRAM = 3  # shorter ones repeat by chance, longer ones are found later
LONGEST_AGREEMENT = 16  # most tokens compared backwards, to tell how similar two places are

_BULK = 8  # tokens from which on arrays are faster than numbers
_LEAST_CAPACITY = 256
# Odd random factors: multiply and take the highest bits (Dietzfelbinger et al. 1997), summed over the n-gram.
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD1342543DE82EF95)
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class NgramMatch:
    """Place of an earlier occurrence of the given tokens' last n-gram."""

    next: int  # position of the token that followed
    agreement: int  # equal tokens before it


class TokenHistory:
    """Tokens that grow at the end. With `most`, the older half is dropped when there would be more than that."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.length = 0
        self._tokens = np.empty(0, np.int32)  # [≥ length]
        self._next: NDArray[np.int32] = np.empty(0, np.int32)  # [2 × capacity, a power of two] 0: nothing
        self._shift = 64

    @property
    def tokens(self) -> Tokens:
        """[length] a view."""
        return self._tokens[: self.length]

    def append(self, tokens: Tokens) -> None:
        if self._most is not None and self.length + len(tokens) > self._most:
            tokens = tokens[-(self._most // 2) :]
            kept = self.tokens[max(0, self.length - self._most // 2) :].copy()
            self.length = 0
            self._next[:] = 0
            self._add(kept)
        self._add(tokens)

    def _add(self, tokens: Tokens) -> None:
        first, end = self.length, self.length + len(tokens)
        if end > len(self._tokens):
            first = 0
            self._grow(end)
        self._tokens[self.length : end] = tokens
        self.length = end
        self._index(max(first, NGRAM), end)

    def _grow(self, needed: int) -> None:
        capacity = _LEAST_CAPACITY
        while capacity < needed:
            capacity *= 2
        grown = np.empty(capacity, np.int32)
        grown[: self.length] = self.tokens
        self._tokens = grown
        self._next = np.zeros(2 * capacity, np.int32)
        self._shift = 64 - (2 * capacity).bit_length() + 1

    def _index(self, first: int, end: int) -> None:
        """Indexes positions first … end-1 by the n-grams right before them."""
        if end - first <= _BULK:
            around: list[int] = self._tokens[first - NGRAM : end].tolist()
            for i in range(end - first):
                self._next[self._slot(around[i], around[i + 1], around[i + 2])] = first + i
            return
        before = self._tokens[first - NGRAM : end - 1].astype(np.uint64)
        hashes = np.zeros(end - first, np.uint64)
        for i, factor in enumerate(_FACTORS):
            hashes += before[i : i + len(hashes)] * np.uint64(factor)
        # Of equal slots the last write stays: the latest occurrence.
        self._next[hashes >> np.uint64(self._shift)] = np.arange(first, end, dtype=np.int32)

    def _slot(self, a: int, b: int, c: int) -> int:
        hashed = (a * _FACTORS[0] + b * _FACTORS[1] + c * _FACTORS[2]) & _MASK
        return hashed >> self._shift

    def find(self, tokens: Tokens) -> NgramMatch | None:
        """Finds the last occurrence of the last n-gram of `tokens`, if a token follows it."""
        if len(tokens) < NGRAM or not self.length:
            return None
        position = int(self._next[self._slot(*tokens[-NGRAM:].tolist())])
        if not position:
            return None
        there = self._tokens[max(0, position - LONGEST_AGREEMENT) : position]
        agreement = common_prefix(there[::-1], tokens[-LONGEST_AGREEMENT:][::-1])
        return NgramMatch(position, agreement) if agreement >= NGRAM else None

    def following(self, place: NgramMatch, most: int) -> Tokens:
        """Returns at most `most` tokens that followed."""
        return self.tokens[place.next : place.next + most]

    def repeating(self, place: NgramMatch, most: int) -> Tokens:
        """Returns a continuation [most] of these tokens, if they repeated from `place` on."""
        return np.resize(self.following(place, most), most)
