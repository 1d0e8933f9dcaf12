"""Interface between engine and runtime: a model's description, a pool for each family, plans, and one packed
forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.families import Family
from rootstock.cache.image_tokens import ImageLayout, PlacedImage
from rootstock.cache.keys import Namespace
from rootstock.cache.plan import HostBytes, Plan, RowPart
from rootstock.cache.types import NO_SLOT, BlockIds, SlotId, Tokens
from rootstock.runtime.adapter_files import AdapterSource

Logits = NDArray[np.float32]  # [rows, vocab]

# Execution modes of a model, from best to last resort. The self-check at load falls back until the answers are right.
ExecutionMode = Literal[
    "packed",  # one forward a step, for all sequences
    "packed, token-wise mixers",  # packed, but recurrent layers continue a stored state one token at a time
    "batched",  # one forward for all sequences with equally many rows; attention reads the pools
    "batched, gathered K and V",  # the same, but the model's own attention reads dense copies of K and V
    "one sequence per forward",
]

# Memory of the pools. "host": main memory, taken from the system when a row is first written. "device": an
# accelerator's own, taken at once. "unified": main memory that an accelerator uses, too, taken at once.
PoolMemory = Literal["host", "device", "unified"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory in which a runtime makes its pools."""

    kind: PoolMemory
    free_bytes: int  # that pools and weights can still take


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description of a loaded model for the rest of Rootstock."""

    name: str  # the name that clients use
    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int  # width of the logits
    context_limit: int  # positions for which the model was made
    families: tuple[Family, ...]  # at most one FullAttention and one RecurrentState
    weights_fingerprint: str
    dtype: str  # of weights and activations: "float32" | "bfloat16" | "float16"
    kv_dtype: str  # of the pool
    device: str
    parameters: int
    rope_regime: str = ""
    eos_token_ids: tuple[int, ...] = ()
    execution_mode: ExecutionMode = "packed"
    mode_reason: str = ""  # reason why no better mode is used
    quantize: str = "none"  # format of linear layers' weights: "none" | "int8" | "int4"
    weights: str = ""  # formats of the files and sizes there and in memory, in words; "": not known
    images: str = ""  # "seen", or the reason why not; "": a model of text
    # Identifies the byte layout of rows and the code that makes them; a tier must not mix two.
    layout: str = ""
    runtime: str = "torch"  # "torch" | "mlx" | "openvino"
    memory: PoolMemory = "host"
    block_size: int = 0  # positions of a block that the pools need; 0: any
    lazy_states: bool = False  # a state takes memory when its slot is written, with any `memory`

    def namespace(self) -> Namespace:
        """Returns the cache namespace of this model, without a salt."""
        return Namespace.of_model(
            self.weights_fingerprint, self.layout, self.dtype, self.kv_dtype, self.rope_regime
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment of a packed forward: the share of one sequence.

    The runtime writes K/V of `tokens` at positions past … past+new-1 through the block tables. It then attends to the
    positions in 0 … past+new-1 that each family sees, and advances the recurrent state in place.
    """

    tokens: Tokens  # [new] at least one
    past: int  # number of positions that are already computed
    # For each token family, in the order of the model's families: [≥ ceil((past + new) / block_size)] the row of each
    # block. Read-only, valid during this call. Blocks before first_visible(past) // block_size may be NO_BLOCK.
    tables: tuple[BlockIds, ...]
    logits_to_keep: int  # number of last rows that need logits: 1 to sample, new to score a prompt, 0: none
    state: SlotId = NO_SLOT  # working state after `past` positions; undefined if past = 0
    adapter: str = ""  # fingerprint of a loaded LoRA adapter; empty: the base model
    # All images of the sequence's prompt, in order: the ones before `past` move the positions of later tokens.
    images: tuple[PlacedImage, ...] = ()
    # Identifies the sequence's lease: its segments have the same tokens up to `past`. -1: unknown.
    lease: int = -1


@dataclass(frozen=True, slots=True)
class Batch:
    segments: Sequence[Segment]  # at least one; each of another sequence
    # For a runtime that computes ahead, by the number of a sequence's segment here: its segment in the next batch,
    # unless its next token is not the most likely one, or it ends. `tokens` is empty; there are rows for one.
    following: Mapping[int, Segment] = field(default_factory=dict)

    @property
    def new_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.segments)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A LoRA adapter in a runtime's memory."""

    fingerprint: str  # of its files: the adapter of a `Segment` and of a `Namespace`
    modules: int  # of the base model that it changes
    rank: int  # the largest
    nbytes: int
    # "mixed": its requests share forwards with others. "apart": they have forwards of their own.
    batching: Literal["mixed", "apart"] = "mixed"


class ImageReader(Protocol):
    """Reader of the images that a model sees."""

    def layout(self, data: bytes, field: str, owner: str, salt: str) -> ImageLayout:
        """Decodes an image's file, unless its layout is known, and returns what it takes in a prompt. From any
        thread. What is kept of it is for prompts of this salt alone, and counts for the owner. Raises ImageUnusable,
        with the client's `field`."""
        ...

    def forget(self, salt: str | None) -> None:
        """Drops what is kept of the images of one salt, or of all."""
        ...


class DraftHeads(Protocol):
    """Draft heads of a model, over the pools of its runtime."""

    def draft(self, batch: Batch, most: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Computes drafts behind the last known token of each segment, the only one that it has: the tokens
        [segments, most], and the head's probability of each. Writes rows of the heads' layers from there on."""
        ...


class Runtime(Protocol):
    """Runtime of a model. One thread owns and calls it. All calls are synchronous; an exception fails the step."""

    @property
    def description(self) -> ModelDescription: ...

    @property
    def images(self) -> ImageReader | None:
        """The reader of images; None: the model sees none."""
        ...

    @property
    def computes_ahead(self) -> bool:
        """True if the device computes the `following` segments of a batch while the engine takes its results. They
        may write to the rows of their tokens, although another token may come there."""
        ...

    def free_bytes(self) -> int:
        """Returns the bytes that pools can still take, once the weights are loaded."""
        ...

    @property
    def draft_heads(self) -> DraftHeads | None:
        """The model's draft heads; None: it has none."""
        ...

    @property
    def pool_copies(self) -> int | None:
        """Returns how many arrays of the pools writes have copied, instead of changing them in place. None: writes
        cannot copy, or the device does not tell."""
        ...

    def release_unused(self) -> None:
        """Gives memory back to the system that the library keeps for later computations. Called between forwards."""
        ...

    def allocate(self, rows: Sequence[int], block_size: int) -> None:
        """Makes the pools: for families[i], rows[i] blocks of `block_size` positions, or rows[i] slots of states.

        Called once, before anything else. The rows may be many more than fit the budget, because families share it.
        If the device supports it, memory must be taken from the system only when a row is first written.
        """
        ...

    def apply(self, plan: Plan) -> None:
        """Executes a plan in order, except its stores, which `read` serves."""
        ...

    def read(self, part: RowPart) -> list[HostBytes]:
        """Copies a row to the host. Returns buffers in the order of the family's layers: K and V of the part's
        positions and any further tensors, or the layer's states. The caller owns the bytes."""
        ...

    def buffers(self, part: RowPart) -> list[HostBytes]:
        """Returns buffers to write a row into, in the order and sizes of `read`. Another thread may fill them while
        the row's owner does not use the row. Afterwards the caller calls `place`, or releases the row."""
        ...

    def place(self, part: RowPart, buffers: Sequence[HostBytes]) -> None:
        """Makes the filled buffers of `buffers` the row's content."""
        ...

    def buffer_dtypes(self, family: int) -> list[str]:
        """Names the dtype of each buffer of `read` for a row of this family (an index into the model's families), as
        torch names it. Empty: the buffers are known only as bytes. May be called before `allocate`."""
        ...

    def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        """Loads and checks a LoRA adapter: later segments may name its fingerprint. Raises AdapterUnusable."""
        ...

    def unload_adapter(self, fingerprint: str) -> None:
        """Drops an adapter's weights. No later segment names it."""
        ...

    def forward(self, batch: Batch) -> Logits:
        """Runs one forward. Returns the rows of `logits_to_keep`, segment by segment, in order of position.

        Raises PoolsLost if the content of the pools can no longer be trusted, also for other sequences.
        """
        ...


@dataclass(frozen=True, slots=True)
class EmbedderDescription:
    """Description of a loaded embedding model for the rest of Rootstock."""

    name: str  # the name that clients use
    architecture: str  # e.g. "BertModel"
    vocab_size: int
    dimensions: int
    # Numbers of dimensions to which an embedding may be cut. None: any; (): none.
    shorter_dimensions: tuple[int, ...] | None
    most_tokens: int  # of an input
    pooling: tuple[str, ...]  # their results are concatenated
    dtype: str  # of weights and activations
    device: str
    parameters: int


class Embedder(Protocol):
    """An embedding model."""

    @property
    def description(self) -> EmbedderDescription: ...

    def tokens_of(self, text: str) -> Tokens:
        """Tokenizes a text, with the model's special tokens around it. From any thread. Raises InputTooLong."""
        ...

    def embed(
        self, inputs: Sequence[Tokens], between_layers: Callable[[float], None] = lambda done: None
    ) -> NDArray[np.float32]:
        """Computes the embeddings [inputs, dimensions] of inputs of 1 to `most_tokens` tokens, in one forward.

        Calls `between_layers` with the done share of the forward, where it can be interrupted. One thread calls it.
        """
        ...
