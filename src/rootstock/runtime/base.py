"""What the engine knows of a runtime: a description, a pool of blocks, plans, and one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import Family
from rootstock.cache.plan import BlockIds, Plan, Tokens

Logits = NDArray[np.float32]  # [rows, vocab]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the rest of Rootstock may know about a loaded model."""

    name: str  # as clients call it
    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int  # width of the logits
    context_limit: int  # positions the model was made for
    families: tuple[Family, ...]
    weights_fingerprint: str
    dtype: str  # "float32" | "bfloat16" | "float16": of weights and activations
    kv_dtype: str  # of the pool
    device: str
    parameters: int
    rope_regime: str = ""
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a packed forward.

    The runtime writes K/V of `tokens` at positions past … past+len(tokens)-1 through the block table, then
    attends positions 0 … past+len(tokens)-1.
    """

    tokens: Tokens  # [new] at least one
    past: int  # positions that the block table holds already
    blocks: BlockIds  # [≥ ceil((past + new) / block_size)] row of each block; read only, valid for this call
    score_last: int  # how many of the last rows need logits: 1 to sample, new to score a prompt, 0 for none


@dataclass(frozen=True, slots=True)
class Batch:
    segments: Sequence[Segment]  # at least one; sequences are distinct

    @property
    def new_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.segments)


class Runtime(Protocol):
    """Owned and called by one thread. Everything is synchronous; what it raises fails the step."""

    @property
    def description(self) -> ModelDescription: ...

    def allocate(self, blocks: int, block_size: int) -> None:
        """Make the pool: `blocks` rows of `block_size` positions. Called once, before anything else."""
        ...

    def apply(self, plan: Plan) -> None:
        """Execute a plan's copies, in order."""
        ...

    def forward(self, batch: Batch) -> Logits:
        """One packed forward. The rows asked for by `score_last`, segment by segment, in position order."""
        ...
