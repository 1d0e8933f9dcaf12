"""What the engine knows of a runtime: a description, a pool for each family, plans, and one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import Family
from rootstock.cache.keys import Namespace
from rootstock.cache.plan import NO_SLOT, BlockIds, HostBytes, Plan, RowPart, SlotId, Tokens

Logits = NDArray[np.float32]  # [rows, vocab]

# How a model is run, from best to last resort. The load-time self-check steps down until the answers are right.
Rung = Literal[
    "packed",  # one forward a step, for all sequences
    "packed, token-wise mixers",  # so, but its recurrent layers continue a stored state one token at a time
    "one sequence per forward",
]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the rest of Rootstock may know about a loaded model."""

    name: str  # as clients call it
    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int  # width of the logits
    context_limit: int  # positions the model was made for
    families: tuple[Family, ...]  # at most one FullAttention and one RecurrentState
    weights_fingerprint: str
    dtype: str  # "float32" | "bfloat16" | "float16": of weights and activations
    kv_dtype: str  # of the pool
    device: str
    parameters: int
    rope_regime: str = ""
    eos_token_ids: tuple[int, ...] = ()
    rung: Rung = "packed"
    rung_reason: str = ""  # why no better one
    quantize: str = "none"  # "none" | "int8" | "int4": how weights of linear layers are kept
    layout: str = ""  # names how rows lie as bytes, and what made them: a tier must not mix two of these

    def namespace(self) -> Namespace:
        """Returns the cache namespace of this model, without a salt."""
        return Namespace.of_model(
            self.weights_fingerprint, self.layout, self.dtype, self.kv_dtype, self.rope_regime
        )


@dataclass(frozen=True, slots=True)
class BufferFormat:
    """What numbers a buffer of `read` holds: vectors of `width`, for each of the part's positions one or several."""

    dtype: str  # "float32" | "bfloat16" | "float16" | another name that torch has
    width: int  # of the last axis: a head's, or a latent's


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a packed forward.

    The runtime writes what it keeps of `tokens` at positions past … past+new-1 through the block tables, then
    attends what each family may see of positions 0 … past+new-1, and advances the recurrent state in place.
    """

    tokens: Tokens  # [new] at least one
    past: int  # positions that are computed already
    # For each token family, in the order of the model's families: [≥ ceil((past + new) / block_size)] row of each
    # block; read only, valid for this call. Blocks before tail_start(past) // block_size may be NO_BLOCK.
    tables: tuple[BlockIds, ...]
    logits_to_keep: int  # number of last rows that need logits: 1 to sample, new to score a prompt, 0: none
    state: SlotId = NO_SLOT  # the working state after `past` positions; with past = 0 its content is void


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

    def allocate(self, rows: Sequence[int], block_size: int) -> None:
        """Make the pools: rows[i] blocks of `block_size` positions, or slots for states, of families[i].

        Called once, before anything else. Rows may be many more than the budget pays for, since families share it:
        memory is to be taken from the system when a row is first written, where the device can do that.
        """
        ...

    def apply(self, plan: Plan) -> None:
        """Execute a plan, in order; all but its stores, which `read` serves."""
        ...

    def read(self, part: RowPart) -> list[HostBytes]:
        """What the row holds, copied to the host: for each of the family's layers in order, what it keeps of the
        part's positions (K, then V, then whatever else), or its states. The bytes are the caller's."""
        ...

    def buffers(self, part: RowPart) -> list[HostBytes]:
        """Where what `read` gave once may be written, in the same order and sizes, by another thread, while the
        row's owner does not use it. `place` follows, or the row is given up."""
        ...

    def place(self, part: RowPart, buffers: Sequence[HostBytes]) -> None:
        """The buffers that `buffers` gave are written: they are the row's content now."""
        ...

    def formats(self, family: int) -> list[BufferFormat]:
        """Of each buffer that `read` gives for a row of this family (an index into the model's families). Empty: only
        whole bytes are known of it. May be asked before `allocate`."""
        ...

    def forward(self, batch: Batch) -> Logits:
        """One packed forward. The rows asked for by `logits_to_keep`, segment by segment, in position order."""
        ...
