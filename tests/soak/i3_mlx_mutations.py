"""I3: mutations of the MLX runtime and the Metal kernels, each of which must be caught (mutations.py).

Most change a few characters of one function: an offset, a bound, a slot, an index. The kernels run as C++.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from common import could_not
from mutations import Mutation, Subject, edited, nothing, show_mutations

from kernels.metal.emulation import COMPILER, Emulation
from rootstock.cache.plan import BlockCopy, HostBytes
from rootstock.kernels.metal import source
from rootstock.kernels.metal.launch import Occupancy, StepRows
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.runtime.mlx import load as loader
from rootstock.runtime.mlx import survey
from rootstock.runtime.mlx.attention import PoolAttention
from rootstock.runtime.mlx.kv_pool import KVPool, LayerPool
from rootstock.runtime.mlx.rows import FamilyRows
from rootstock.runtime.mlx.runner import MlxRuntime
from rootstock.runtime.mlx.stand_ins import StandIn
from rootstock.runtime.mlx.state_pool import MlxStatePool
from twins import ways
from twins.mlx_served import load
from twins.test_mlx_twins import twin_in
from twins.twin import TOLERANCE, Twin

WAYS = (
    ways.batch,
    ways.chunked,
    ways.unscored,
    ways.moved,
    ways.resumed,
    ways.cached,
    ways.readmitted,
    ways.served,
)

IN_INT8, ON_THE_KERNEL = " in int8", " on the kernel"
# Rounding K and V to int8 changes a logit of these models by up to 0.8 standard deviations, because their weights are
# drawn wide. Logits of something else differ by more than 4.
INT8_TOLERANCE = 1.5

EMULATION = Emulation(Path(tempfile.mkdtemp()))
KERNEL = PagedKernel(EMULATION, Occupancy(threadgroups=100, least_split=16))


# ------------------------------------------------------------------------------------------------ the changes


def in_the_kernel(old: str, new: str) -> Any:
    """Changes a part of the source of the kernel that attends."""
    assert source.ATTEND.count(old) == 1, old
    return lambda right: Emulation(EMULATION.directory, replace={old: new})(
        "wrong_attention", source.ATTEND_INPUTS, source.ATTEND_OUTPUTS, source.ATTEND
    )


def in_the_merge(old: str, new: str) -> Any:
    """Changes a part of the source of the kernel that merges splits."""
    assert source.MERGE.count(old) == 1, old
    return lambda right: Emulation(EMULATION.directory, replace={old: new})(
        "wrong_merge", source.MERGE_INPUTS, source.MERGE_OUTPUTS, source.MERGE
    )


def of_the_first_family(right: Any) -> Any:
    """Copies blocks in the first family only."""

    def copy(self: KVPool, copies: Sequence[BlockCopy]) -> None:
        right(self, [c for c in copies if c.family == 0])

    return copy


def last_state_lost(right: Any) -> Any:
    """Clears the last array of each layer's states."""

    def take(self: MlxStatePool, slots: Sequence[int]) -> Any:
        states = right(self, slots)
        return {path: [*arrays[:-1], mx.zeros_like(arrays[-1])] for path, arrays in states.items()}

    return take


def in_reverse(right: Any) -> Any:
    """Returns a row's bytes in another order of layers and tensors."""

    def read(self: Any, *place: int) -> list[HostBytes]:
        return list(reversed(right(self, *place)))

    return read


def of_the_row_before(right: Any) -> Any:
    def place(self: KVPool, family: int, block: int, tokens: int, buffers: Sequence[HostBytes]) -> None:
        right(self, family, max(block - 1, 0), tokens, buffers)

    return place


def function(owner: Any, name: str) -> tuple[tuple[Any, str], ...]:
    return ((owner, name),)


LLAMA, GEMMA, GPT_OSS, QWEN = "llama", "gemma3_text", "gpt_oss", "qwen3_next"
MAMBA, NEMOTRON, DEEPSEEK, LLAMA4 = "mamba2", "nemotron_h", "deepseek_v3", "llama4"

OFFSET = function(FamilyRows, "offset")
MASK = function(FamilyRows, "mask")
RUN = function(FamilyRows, "_run_of")
TABLES = function(FamilyRows, "_padded_tables")
WRITE_SLOTS = function(FamilyRows, "write_slots")
READ_SLOTS = function(FamilyRows, "read_slots")
ONE_ROW = function(PoolAttention, "_row")
MAKE_MASK = function(StandIn, "make_mask")
CALLS = function(MlxRuntime, "_calls_of")
SHARED = function(MlxRuntime, "_shared_calls")
CALL = function(MlxRuntime, "_call_model")
FORWARD = function(MlxRuntime, "_forward")
ATTEND, MERGE = function(KERNEL, "_attend"), function(KERNEL, "_merge")

MUTATIONS = (
    # positions
    Mutation(
        "several sequences have the offset of the first",
        LLAMA,
        OFFSET,
        edited("mx.array(self.pasts, mx.int32)", "self.pasts[0]"),
    ),
    Mutation(
        "offsets are counted in the call", LLAMA, OFFSET, edited("return self.pasts[0] if", "return 0 if")
    ),
    Mutation(
        "offsets of several sequences are one too large",
        GEMMA,
        OFFSET,
        edited("mx.array(self.pasts, mx.int32)", "mx.array(self.pasts, mx.int32) + 1"),
    ),
    Mutation(
        "the offset of one sequence is one too large",
        LLAMA4,
        OFFSET,
        edited("return self.pasts[0] if", "return self.pasts[0] + 1 if"),
    ),
    Mutation(
        "a chunked model is told that its chunk begins at 0",
        LLAMA4,
        function(StandIn, "__init__"),
        edited("rows.starts[0]", "0"),
    ),
    # masks and windows
    Mutation(
        "a mask shows one position ahead", DEEPSEEK, MASK, edited("keys <= queries", "keys <= queries + 1")
    ),
    Mutation(
        "a mask hides a row's own position", DEEPSEEK, MASK, edited("keys <= queries", "keys < queries")
    ),
    Mutation(
        "a mask's window is one wider",
        GEMMA,
        MASK,
        edited("keys > queries - window", "keys >= queries - window"),
    ),
    Mutation(
        "a mask's window is one narrower", GPT_OSS, MASK, edited("queries - window", "queries - window + 1")
    ),
    Mutation(
        "a window is ignored",
        GEMMA,
        function(FamilyRows, "window"),
        edited("return min(", "return None and min("),
    ),
    Mutation(
        "a survey finds a window one narrower",
        GPT_OSS,
        function(survey, "_rule_of"),
        edited("int(cache.max_size))", "int(cache.max_size) - 1)"),
    ),
    Mutation(
        "sequences of unlike lengths are attended without a mask",
        DEEPSEEK,
        function(FamilyRows, "hides_nothing"),
        edited("return equal and len(set(self.lengths)) == 1 and", "return"),
    ),
    Mutation(
        "a model gets no mask", DEEPSEEK, MAKE_MASK, edited("if self.rows.hides_nothing(window):", "if True:")
    ),
    # slots
    Mutation(
        "K and V are written one slot late",
        LLAMA,
        WRITE_SLOTS,
        edited("positions % size", "(positions + 1) % size"),
    ),
    Mutation(
        "K and V of a lone sequence are written from its first slot on",
        LLAMA,
        function(FamilyRows, "write_run"),
        edited("self.pasts[0], self.ends[0]", "0, self.ends[0] - self.pasts[0]"),
    ),
    Mutation("padding is written to the first block", LLAMA, WRITE_SLOTS, edited("self._padding_slot", "0")),
    Mutation(
        "a sequence reads the blocks of the one before",
        GEMMA,
        TABLES,
        edited("padded[row, : len(table)]", "padded[row - 1, : len(table)]"),
    ),
    Mutation(
        "a gather begins one position late",
        GPT_OSS,
        READ_SLOTS,
        edited(
            "slots + self._positions % self._block_size", "slots + (self._positions + 1) % self._block_size"
        ),
    ),
    Mutation("a view begins one slot late", LLAMA, RUN, edited("+ start % size", "+ start % size + 1")),
    Mutation(
        "scattered blocks are read as a view",
        LLAMA,
        RUN,
        edited("not (np.diff(used) == 1).all()", "not len(used)"),
    ),
    Mutation(
        "a view begins at its block's first slot",
        GEMMA,
        RUN,
        edited("int(used[0]) * size + start % size", "int(used[0]) * size"),
    ),
    # attention on the pools
    Mutation("sinks are lost", GPT_OSS, ONE_ROW, edited("mask=seen, sinks=sinks", "mask=seen, sinks=None")),
    Mutation("the scale is lost", LLAMA, ONE_ROW, edited("scale=scale", "scale=1.0")),
    Mutation(
        "a decode's window is one narrower",
        GPT_OSS,
        ONE_ROW,
        edited("past - window + 1", "past - window + 2"),
    ),
    Mutation(
        "the last queries of a padded sequence are attended",
        LLAMA,
        ONE_ROW,
        edited("query[row : row + 1, :, :new]", "query[row : row + 1, :, -new:]"),
    ),
    Mutation(
        "a padded sequence's results are at the end", LLAMA, ONE_ROW, edited("(0, missing)", "(missing, 0)")
    ),
    Mutation(
        "all sequences read the first one's view", LLAMA, ONE_ROW, edited("rows.run(row)", "rows.run(0)")
    ),
    # blocks
    Mutation("a shared part of a block is not copied", LLAMA, function(KVPool, "copy"), nothing),
    Mutation(
        "a copy of a block lacks its last position",
        QWEN,
        function(KVPool, "_slots"),
        edited("np.arange(n)", "np.arange(n - 1)"),
    ),
    Mutation("a block of a window is not copied", GEMMA, function(KVPool, "copy"), of_the_first_family),
    Mutation(
        "V is K",
        NEMOTRON,
        function(LayerPool, "write"),
        edited("enumerate((keys, values)[:kept])", "enumerate((keys, keys)[:kept])"),
    ),
    Mutation(
        "the scales of int8 are lost",
        LLAMA + IN_INT8,
        function(LayerPool, "_at"),
        edited("* scales[..., None]", ""),
    ),
    Mutation(
        "the scales of int8 are those of other slots",
        LLAMA + IN_INT8,
        function(LayerPool, "write"),
        edited("[at] = scales", "[at] = scales[::-1]"),
    ),
    # bytes of rows
    Mutation("a block's bytes come back in another order", LLAMA, function(KVPool, "read"), in_reverse),
    Mutation("a block's bytes go to the row before", DEEPSEEK, function(KVPool, "place"), of_the_row_before),
    Mutation(
        "a block's bytes come back as another dtype",
        LLAMA,
        function(KVPool, "place"),
        edited("from_host(buffer, array.dtype,", "from_host(buffer, mx.int32,"),
    ),
    Mutation(
        "a block's bytes lack its last position",
        NEMOTRON,
        function(KVPool, "place"),
        edited(
            "array[first : first + tokens] = from_host(buffer, array.dtype, (tokens, *array.shape[1:]))",
            "array[first : first + tokens - 1] = from_host(buffer, array.dtype, (tokens, *array.shape[1:]))[:-1]",
        ),
    ),
    # states
    Mutation("states are not restored", MAMBA, function(MlxStatePool, "copy"), nothing),
    Mutation(
        "states are restored from the next slot",
        QWEN,
        function(MlxStatePool, "copy"),
        edited("self._rows.get(copy.source)", "self._rows.get((copy.source + 1) % self._slots)"),
    ),
    Mutation(
        "sequences get one another's states",
        QWEN,
        function(MlxStatePool, "joined"),
        edited("[self._rows[slot] for slot in slots]", "[self._rows[slot] for slot in reversed(slots)]"),
    ),
    Mutation(
        "the last batch's states are returned for other slots",
        NEMOTRON,
        function(MlxStatePool, "joined"),
        edited("self._last.slots == tuple(slots)", "len(self._last.slots) == len(slots)"),
    ),
    Mutation(
        "a batch is split into the states of its first sequence",
        MAMBA,
        function(MlxStatePool, "_split"),
        edited("array[row : row + 1]", "array[:1]"),
    ),
    Mutation(
        "a batch is split in another order",
        NEMOTRON,
        function(MlxStatePool, "_split"),
        edited("enumerate(last.slots)", "enumerate(reversed(last.slots))"),
    ),
    Mutation(
        "a batch keeps the states of its first forward",
        MAMBA,
        function(MlxStatePool, "put"),
        edited("self._last = _BatchStates(", "self._last = self._last or _BatchStates("),
    ),
    Mutation(
        "the recurrent part of a state is lost", QWEN, function(MlxStatePool, "joined"), last_state_lost
    ),
    Mutation("states stay as they were", MAMBA, CALL, edited("self._state_pool.put(slots, states)", "pass")),
    Mutation("a state's bytes come back in another order", QWEN, function(MlxStatePool, "read"), in_reverse),
    Mutation(
        "a sequence begins with its slot's old state",
        MAMBA,
        CALL,
        edited("segments[0].past > 0", "set(slots) <= {*self._state_pool._rows}"),
    ),
    # calls
    Mutation(
        "the rows of a prompt without logits are left out", LLAMA, CALLS, edited("unscored.append(", "(")
    ),
    Mutation(
        "a prompt's last row forgets the rows before it",
        GEMMA,
        CALLS,
        edited("past=segment.past + lead", "past=segment.past"),
    ),
    Mutation(
        "logits come in the order of the calls", QWEN, FORWARD, edited("in sorted(scored)", "in scored")
    ),
    Mutation(
        "logits of a padded sequence are its last ones",
        LLAMA,
        FORWARD,
        edited("logits[row, : len(segment.tokens)]", "logits[row, -len(segment.tokens) :]"),
    ),
    Mutation(
        "states are padded", MAMBA, SHARED, edited("not self._layout.has_states and longest", "longest")
    ),
    Mutation(
        "sequences that begin share a call with others",
        NEMOTRON,
        SHARED,
        edited("self._layout.has_states and segment.past == 0", "False"),
    ),
    Mutation(
        "tokens of padded sequences are at the end",
        LLAMA,
        CALL,
        edited("tokens[row, : len(segment.tokens)]", "tokens[row, -len(segment.tokens) :]"),
    ),
    # the kernels
    Mutation(
        "the kernel's window is one wider",
        GPT_OSS + ON_THE_KERNEL,
        function(FamilyRows, "paged"),
        edited("at - window + 1", "at - window"),
    ),
    Mutation(
        "the kernel's rows do not see themselves",
        GPT_OSS + ON_THE_KERNEL,
        function(FamilyRows, "paged"),
        edited("at + 1, 0)", "at, 0)"),
    ),
    Mutation(
        "the kernel reads the next sequence's blocks",
        GPT_OSS + ON_THE_KERNEL,
        function(StepRows, "_build"),
        edited("self.sequence_of[at] * self", "(self.sequence_of[at] + 1) % len(self.table) * self"),
    ),
    Mutation(
        "the kernel's last split ends early",
        GPT_OSS + ON_THE_KERNEL,
        function(StepRows, "_build"),
        edited("-(-longest // splits)", "longest // splits"),
    ),
    Mutation(
        "the kernel counts sinks in each part of a context",
        GPT_OSS + ON_THE_KERNEL,
        ATTEND,
        in_the_kernel("SINKS && split == 0 && part == 0", "SINKS && split == 0"),
    ),
    Mutation(
        "the kernel counts sinks in each split",
        GPT_OSS + ON_THE_KERNEL,
        ATTEND,
        in_the_kernel("SINKS && split == 0 && part == 0", "SINKS && part == 0"),
    ),
    Mutation(
        "the kernel reads K of the first head",
        GPT_OSS + ON_THE_KERNEL,
        ATTEND,
        in_the_kernel("(slot * HEADS + head) * D", "slot * HEADS * D"),
    ),
    Mutation(
        "the kernel merges splits as if they weighed the same",
        GPT_OSS + ON_THE_KERNEL,
        MERGE,
        in_the_merge("metal::fast::exp(piece[V] - highest)", "1.0f"),
    ),
)


# ------------------------------------------------------------------------------------------------- the models


def mlx_twin(directory: Path, model: str) -> Twin:
    kind, options, tolerance = variant(model)
    with kernel_of(model):
        return twin_in(directory, kind, tolerance, **options)


def mode_of(directory: Path, model: str) -> str:
    _, options, _ = variant(model)
    with kernel_of(model):
        runtime = load(directory, **options)
    return runtime.description.execution_mode + (ON_THE_KERNEL if runtime._served.kernel else "")


def variant(model: str) -> tuple[str, dict[str, Any], float]:
    """Returns the architecture, the options and the tolerance of a model."""
    if model.endswith(IN_INT8):
        return model.removesuffix(IN_INT8), {"kv_dtype": "int8"}, INT8_TOLERANCE
    return model.removesuffix(ON_THE_KERNEL), {}, TOLERANCE


def kernel_of(model: str) -> Any:
    """Returns a context in which loads find the kernel, if the model is to run on it."""
    return patch.object(loader, "_metal_kernel", lambda: KERNEL if model.endswith(ON_THE_KERNEL) else None)


if __name__ == "__main__":
    if COMPILER is None:
        could_not("I3", "g++ is not installed")
    mx.disable_compile()  # on a CPU it calls a C++ compiler for each function
    show_mutations("I3", Subject(mlx_twin, mode_of, WAYS), MUTATIONS, least=25)
