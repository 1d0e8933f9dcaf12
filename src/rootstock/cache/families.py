"""Families: groups of layers with one kind of memory. A model is a set of families.

Each family has a pool of its own: *rows* of fixed size, which are blocks of `block_size` positions for attention and
slots for recurrent states. A family has one rule: the memory that a resumption at position p needs. That is
everything before p, the last window, the positions since the last multiple of a chunk, or a state that was kept at
exactly p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootstock.cache.arguments import require_fields


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Layers that keep something for every position: K and V, latents (MLA), indexer keys.

    All of them share one block table, so a model has at most one such family.
    """

    layers: int
    bytes_per_token: int  # of all its layers, in the pool's dtype

    def __post_init__(self) -> None:
        require_fields(self, "layers", "bytes_per_token")

    @property
    def name(self) -> str:
        return "full"

    def first_visible(self, position: int) -> int:
        """Returns the first position that `position` attends to: a resumption there needs the memory from it on."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers that see `window` positions: the query's own and the `window` - 1 before it."""

    layers: int
    bytes_per_token: int
    window: int

    def __post_init__(self) -> None:
        require_fields(self, "layers", "bytes_per_token", "window")

    @property
    def name(self) -> str:
        return f"window({self.window})"

    @property
    def max_lookback(self) -> int:
        """Largest number of earlier positions that a position attends to, so that a resumption needs them."""
        return self.window - 1

    def first_visible(self, position: int) -> int:
        """Returns the first position that `position` attends to: a resumption there needs the memory from it on."""
        return max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class ChunkedAttention:
    """Layers that see the positions since the last multiple of `chunk`, and none across it."""

    layers: int
    bytes_per_token: int
    chunk: int

    def __post_init__(self) -> None:
        require_fields(self, "layers", "bytes_per_token", "chunk")

    @property
    def name(self) -> str:
        return f"chunked({self.chunk})"

    @property
    def max_lookback(self) -> int:
        """Largest number of earlier positions that a position attends to, so that a resumption needs them."""
        return self.chunk - 1

    def first_visible(self, position: int) -> int:
        """Returns the first position that `position` attends to: a resumption there needs the memory from it on."""
        return position - position % self.chunk


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Layers that fold all positions into one state of fixed size. It cannot be reset to an earlier position, so a
    request can only resume where a copy was kept. A model has at most one such family."""

    layers: int
    bytes_per_state: int  # of all its layers

    def __post_init__(self) -> None:
        require_fields(self, "layers", "bytes_per_state")

    @property
    def name(self) -> str:
        return "state"


WindowFamily = SlidingWindow | ChunkedAttention  # needs the positions just before to resume
TokenFamily = FullAttention | WindowFamily  # keeps something per position, in blocks
Family = TokenFamily | RecurrentState


def token_families(families: Sequence[Family]) -> tuple[TokenFamily, ...]:
    """Returns the families that have block tables, in the order of a segment's `tables`."""
    return tuple(family for family in families if not isinstance(family, RecurrentState))


def row_bytes(family: Family, block_size: int) -> int:
    """Returns the bytes of one row of the family's pool."""
    if isinstance(family, RecurrentState):
        return family.bytes_per_state
    return block_size * family.bytes_per_token
