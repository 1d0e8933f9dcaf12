"""Families: groups of layers with one kind of memory. A model is a set of families.

Each family has a pool of its own: *rows* of fixed size, which are blocks of `block_size` positions for attention and
slots for recurrent states. A family has one rule: the memory that a resumption at position p needs. That is
everything before p, the last window, the positions since the last multiple of a chunk, or a state that was kept at
exactly p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Layers that keep something for every position: K and V, latents (MLA), indexer keys.

    All of them share one block table, so a model has at most one such family.
    """

    layers: int
    bytes_per_token: int  # of all its layers, in the pool's dtype

    def __post_init__(self) -> None:
        assert self.layers > 0
        assert self.bytes_per_token > 0

    @property
    def name(self) -> str:
        return "full"

    def tail_start(self, position: int) -> int:
        """The first position whose memory is needed to resume at `position`."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers that see `window` positions: the query's own and the `window` - 1 before it."""

    layers: int
    bytes_per_token: int
    window: int

    def __post_init__(self) -> None:
        assert self.layers > 0
        assert self.bytes_per_token > 0
        assert self.window > 0

    @property
    def name(self) -> str:
        return f"window({self.window})"

    @property
    def longest_tail(self) -> int:
        """The largest number of earlier positions that a resumption needs."""
        return self.window - 1

    def tail_start(self, position: int) -> int:
        """The first position whose memory is needed to resume at `position`."""
        return max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class ChunkedAttention:
    """Layers that see the positions since the last multiple of `chunk`, and none across it."""

    layers: int
    bytes_per_token: int
    chunk: int

    def __post_init__(self) -> None:
        assert self.layers > 0
        assert self.bytes_per_token > 0
        assert self.chunk > 0

    @property
    def name(self) -> str:
        return f"chunked({self.chunk})"

    @property
    def longest_tail(self) -> int:
        """The largest number of earlier positions that a resumption needs."""
        return self.chunk - 1

    def tail_start(self, position: int) -> int:
        """The first position whose memory is needed to resume at `position`."""
        return position - position % self.chunk


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Layers that fold all positions into one state of fixed size. It cannot be cut back to an earlier position, so a
    request can only resume where a copy was kept. A model has at most one such family."""

    layers: int
    bytes_per_state: int  # of all its layers

    def __post_init__(self) -> None:
        assert self.layers > 0
        assert self.bytes_per_state > 0

    @property
    def name(self) -> str:
        return "state"


WindowFamily = SlidingWindow | ChunkedAttention  # needs the positions just before to resume
TokenFamily = FullAttention | WindowFamily  # keeps something per position, in blocks
Family = TokenFamily | RecurrentState


def token_families(families: Sequence[Family]) -> tuple[TokenFamily, ...]:
    """The families that have block tables, in order; `tables` of a segment follow it."""
    return tuple(family for family in families if not isinstance(family, RecurrentState))


def row_bytes(family: Family, block_size: int) -> int:
    """Bytes of one row of the family's pool."""
    if isinstance(family, RecurrentState):
        return family.bytes_per_state
    return block_size * family.bytes_per_token
