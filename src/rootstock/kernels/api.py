"""Protocols of an attention backend, and the parameters that turn q·k products into softmax weights."""

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
    """Softmax parameters: weights = softmax(softcap · tanh(scale · q·k / softcap)).

    `softcap` None: no soft capping. `sinks`: an extra score per query head, which enters the softmax's sum only.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [q_heads]


class StepAttention(Protocol):
    """Attention of one packed step. It is prepared once and called by every layer of the same family."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keys: PoolRows, values: PoolRows, scores: Scores
    ) -> Tensor:
        """Computes causal attention of each row over the positions of its own sequence that its family sees.

        query          [tokens, q_heads, head_dim]
        key, value     [tokens, kv_heads, …] K and V of the new positions, equal to the pool's rows in their slots
        keys, values   [blocks · block_size, kv_heads, …] the layer's pool by slot; some backends take no int8 rows
        returns        [tokens, q_heads, value_dim] in the query's dtype
        """
        ...


class Attention(Protocol):
    """Attention backend. It may keep scratch memory between steps, so only one thread may use it."""

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        """Prepares everything about a step that does not depend on the layer, for the layers of one family.

        `spans` cover the rows in order and hold the family's block tables. The row at position p attends to
        family.first_visible(p) … p. Blocks before the block of position first_visible(past) are not read.
        """
        ...
