"""How a layer turns products of queries and keys into weights, and what a way of attending looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rootstock.cache.families import TokenFamily
from rootstock.kernels.quantized_rows import PoolRows
from rootstock.kernels.spans import EVERYTHING, Span


@dataclass(frozen=True, slots=True)
class Scores:
    """weights = softmax(softcap · tanh(scale · q·k / softcap)), with one sink's score beside each head's."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [q_heads]


class StepAttention(Protocol):
    """Attention of one packed step: made once, called by every layer whose positions lie in the same slots."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: PoolRows, values: PoolRows, scores: Scores
    ) -> Tensor:
        """Causal attention of each row over what its family sees of its own sequence.

        query          [tokens, q_heads, head_dim]
        key, value     [tokens, kv_heads, …] of the new positions: what the pool holds in their slots
        keys, values   [blocks · block_size, kv_heads, …] the layer's pool, by slot; not every way knows rounded rows
        returns        [tokens, q_heads, value_dim] in the query's dtype
        """
        ...


class Attention(Protocol):
    """A way of attending. It may keep scratch memory from step to step, so one thread uses it."""

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        """Everything about a step that does not depend on the layer, for layers of one family.

        `spans` cover the rows in order and hold the family's block tables. The row at position p attends to
        family.tail_start(p) … p; blocks before the one that holds tail_start(past) are not read.
        """
        ...
