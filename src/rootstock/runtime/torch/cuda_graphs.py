"""CUDA graphs for decodes: a step of one token per sequence is recorded once and replayed with other contents.

A small model's decode is hundreds of kernels of a few microseconds each. Launching them takes longer than running
them. A graph needs one launch. It repeats the recorded kernels on the recorded memory, which has two consequences:

- All contents that differ from step to step (tokens, positions, slots, block tables) are in separate tensors that are
  filled before a replay. Nothing else of a step may come from the host. Only models whose layers are all attended by
  Triton are recorded, without recurrent states and without modules that run one sequence at a time.
- There is a graph for each of a few batch sizes. A smaller batch is padded by repeating its last sequence, which
  writes the same K and V to the same slot again.

Code that waits for the device or reads a number from it cannot be recorded and raises. Code that reads a number on
the host only would replay with the old number. Each graph is therefore compared with the plain forward, on changing
contents, while the pools are still empty. If anything raises or differs, decodes run like all other steps, and a
warning is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rootstock.cache.types import BlockIds
from rootstock.kernels.api import StepAttention
from rootstock.kernels.spans import slots_of
from rootstock.kernels.torch.latent_attention import LatentStepAttention
from rootstock.runtime.base import Logits, Segment
from rootstock.runtime.torch.fallback import TorchExecution
from rootstock.runtime.torch.hooks import Calling
from rootstock.runtime.torch.kv_pool import LayerMemory, TorchPool
from rootstock.runtime.torch.module_parts import StepCache
from rootstock.runtime.torch.step_cache import PackedCache
from rootstock.runtime.trial import largest_difference

_log = logging.getLogger(__name__)

_MOST_DECODES = 64
_CHECKED_STEPS = 3
# Largest allowed difference of a logit, in standard deviations. The kernels are the same; a padded batch may round
# differently. A wrong row is off by several standard deviations.
_ALLOWED = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}

Forward = Callable[[Sequence[Segment]], Logits]
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records a function. Returns a function that replays it, and the tensor that then holds its result."""


class DecodeGraphs:
    """CUDA graphs of decodes, one for each batch size. Made by `record_decodes`; owned by one thread."""

    def __init__(self, graphs: dict[int, _DecodeGraph], longest: int) -> None:
        self._graphs = graphs
        self._longest = longest

    def fits(self, segments: Sequence[Segment]) -> bool:
        """Returns whether this step can be replayed: one token of each sequence, with logits for each, of the base
        model."""
        return len(segments) <= max(self._graphs) and all(
            len(s.tokens) == s.logits_to_keep == 1 and s.past < self._longest and not s.adapter
            for s in segments
        )

    def forward(self, segments: Sequence[Segment]) -> Logits:
        """Replays a step. Returns logits [segments, vocab]."""
        return self._graphs[size_for(len(segments), list(self._graphs))].forward(segments)


def record_decodes(
    model: nn.Module, served: TorchExecution, pool: TorchPool, blocks: int, plain: Forward
) -> DecodeGraphs | None:
    """Records graphs for batches of up to 64 sequences, or fewer if the pools are small. Returns None if that fails.

    It writes to the pools, so they must be empty. `blocks`: number of blocks of the smallest family's pool. `plain`:
    the forward that the graphs must equal.
    """
    unfit = unfit_for_graphs(pool)
    if unfit is not None:
        _log.info("Decodes run without CUDA graphs: %s", unfit)
        return None
    try:
        return _recorded(model, served, pool, blocks, plain, cuda_capture(pool.device))
    except Exception as failure:  # the model's own code may raise anything if it cannot be recorded
        _log.warning("Decodes run without CUDA graphs: %s", str(failure).strip().split("\n", 1)[0])
        return None


def unfit_for_graphs(pool: TorchPool) -> str | None:
    """Returns the reason why steps of this model cannot be replayed; None if they can."""
    if pool.states is not None:
        return "the model has recurrent states"
    if any(layer.kernel != "triton" for layer in pool.layers.values()):
        return "not all layers are attended by Triton"
    return None


def batch_sizes(most: int) -> list[int]:
    """Returns the batch sizes of the graphs, largest first: graphs share memory, and the first allocates it."""
    return [1 << power for power in reversed(range(max(0, most).bit_length()))]


def size_for(batch: int, sizes: Sequence[int]) -> int:
    return min(size for size in sizes if size >= batch)


def filled_up(segments: Sequence[Segment], size: int) -> list[Segment]:
    return [*segments, *[segments[-1]] * (size - len(segments))]


def cuda_capture(device: torch.device) -> Capture:
    memory = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(2):  # warm-up: kernels are compiled, and libraries allocate their workspaces
                step()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # "thread_local", because the tiers' threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            out = step()
        return graph.replay, out

    return capture


def _recorded(
    model: nn.Module, served: TorchExecution, pool: TorchPool, blocks: int, plain: Forward, capture: Capture
) -> DecodeGraphs:
    """Records and compares all graphs. Raises the error of code that cannot be recorded, or RuntimeError if a graph
    differs."""
    layout, longest = served.layout, served.description.context_limit
    allowed = _ALLOWED[served.description.dtype]
    each = -(-_CHECKED_STEPS // pool.block_size)  # blocks of a sequence in the check
    sizes = batch_sizes(min(_MOST_DECODES, blocks // each))
    if not sizes or longest < _CHECKED_STEPS:
        raise RuntimeError("the pools are too small")
    graphs = {}
    for size in sizes:
        graph = graphs[size] = _DecodeGraph(model, layout.calling, pool, size, longest, capture)
        for segments in _trial_steps(pool, size, each, layout.vocab_size):
            for batch in (segments, segments[: max(1, size // 2 + 1)]):
                off = largest_difference(graph.forward(batch), plain(batch))
                if not off <= allowed:
                    raise RuntimeError(f"{len(batch)} decodes differ by {off:.2g}, {allowed:.2g} is allowed")
    return DecodeGraphs(graphs, longest)


def _trial_steps(pool: TorchPool, size: int, each: int, vocab_size: int) -> list[list[Segment]]:
    """Returns a few steps of `size` new sequences, in blocks that lie differently in each family."""
    random = np.random.default_rng(size)
    places = [random.permutation(size * each).astype(np.int32).reshape(size, each) for _ in pool.families]
    return [
        [
            Segment(
                random.integers(0, vocab_size, 1, np.int32), past, tuple(tables[i] for tables in places), 1
            )
            for i in range(size)
        ]
        for past in range(_CHECKED_STEPS)
    ]


class _DecodeGraph:
    """CUDA graph of one batch size, and the tensors that a replay reads."""

    def __init__(
        self, model: nn.Module, calling: Calling, pool: TorchPool, size: int, longest: int, capture: Capture
    ) -> None:
        self._model = model
        self._calling = calling
        self._pool = pool
        self._size = size
        self._longest = longest
        families, device = len(pool.families), pool.device
        width = -(-longest // (16 * pool.block_size)) * 16
        self._rows = torch.arange(size, device=device)
        self._numbers = torch.zeros(2 + families, size, dtype=torch.int64, device=device)
        self._tables = torch.zeros(families, size, width, dtype=torch.int32, device=device)
        self._replay, self._logits = capture(self._step)

    def forward(self, segments: Sequence[Segment]) -> Logits:
        """Replays a step. Returns logits [segments, vocab]."""
        batch = filled_up(segments, self._size)
        numbers, tables = decode_inputs(batch, len(self._pool.families), self._pool.block_size)
        self._numbers.copy_(torch.from_numpy(numbers))
        self._tables[:, :, : tables.shape[2]].copy_(torch.from_numpy(tables))
        self._replay()
        logits: Logits = self._logits[: len(segments)].cpu().numpy().copy()
        return logits

    def _step(self) -> Tensor:
        """Computes the step that is recorded. Returns logits [size, vocab] float32."""
        ids, positions, slots = self._numbers[0], self._numbers[1], self._numbers[2:]
        once = torch.ones_like(self._rows)
        records = torch.stack([self._rows, self._rows, positions, once, self._rows], 1).to(torch.int32)
        rows = self._rows.to(torch.int32)
        assert self._pool.kernels.triton is not None
        steps = [
            self._pool.kernels.triton.decodes(tables, records, rows, self._longest, family)
            for tables, family in zip(self._tables, self._pool.families, strict=True)
        ]
        cache = _StaticCache(self._pool, list(slots), steps, positions - self._rows)
        return self._calling(self._model, ids, positions, cache, self._rows).float()


def decode_inputs(
    segments: Sequence[Segment], families: int, block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Builds the inputs for one token per segment: int64 [2 + families, segments] with ids, positions and each
    family's slots, and int32 [families, segments, blocks] block tables, padded with zeros to the longest sequence's
    length."""
    past = np.array([segment.past for segment in segments], np.int64)
    numbers = np.empty((2 + families, len(segments)), np.int64)
    numbers[0] = [segment.tokens[0] for segment in segments]
    numbers[1] = past
    tables = np.zeros((families, len(segments), int(past.max()) // block_size + 1), np.int32)
    for family in range(families):
        for row, segment in enumerate(segments):
            blocks: BlockIds = segment.tables[family]
            seen = segment.past // block_size + 1
            tables[family, row, :seen] = blocks[:seen]
            numbers[2 + family, row] = slots_of(blocks, segment.past, segment.past + 1, block_size)[0]
    return numbers, tables


class _StaticCache(PackedCache):
    """Cache of a packed step whose contents are only on the device."""

    def __init__(
        self, pool: TorchPool, slots: list[Tensor], steps: list[StepAttention], offsets: Tensor
    ) -> None:
        """Takes slots int64 [tokens] of each family, and offsets int64 [tokens], which are added to a row's number to
        get its position."""
        StepCache.__init__(self)
        self._adapter_rows = None
        self._pool = pool
        self._slots = slots
        self._steps = steps
        self._offsets = offsets

    def _prepared(self, memory: LayerMemory) -> StepAttention | LatentStepAttention:
        return self._steps[memory.family]
