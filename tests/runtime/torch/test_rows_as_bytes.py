"""Rows as bytes: a row that is read and placed in another row has the same content."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from checkpoints import VOCAB
from rootstock.cache.families import RecurrentState, row_bytes
from rootstock.cache.plan import HostBytes, Plan, RowPart, RowsReturned
from rootstock.cache.types import NO_BLOCK, BlockIds
from rootstock.runtime.torch.lazy_rows import LazyRows
from rootstock.runtime.torch.runner import TorchRuntime
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from runtime.torch.helpers import pool_of
from twins.driving import ByHand, Running, allocate, random_tokens
from twins.torch_models import loaded

BLOCK_SIZE = 4
# Plain attention, windows, states beside full attention, states alone, latents with an indexer.
MODELS = ["llama", "gemma3_text", "qwen3_next", "mamba", "deepseek_v32"]
DTYPES = ["float32", "bfloat16"]


def with_pools(model_type: str, dtype: str = "float32") -> TorchRuntime:
    runtime = loaded(model_type, dtype)
    allocate(runtime, BLOCK_SIZE)
    return runtime


def memories_of(runtime: TorchRuntime, family: int) -> list[torch.Tensor]:
    pool = pool_of(runtime)
    if family == len(pool.families):
        assert pool.states is not None
        return [memory.tensor for memory in pool.states.memories]
    layers = [layer for _, layer in sorted(pool.layers.items()) if layer.family == family]
    return [tensor for layer in layers for tensor in layer.tensors]


def fill(runtime: TorchRuntime) -> None:
    """Fills every row of every memory with different numbers."""
    random = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        for family in range(len(runtime.description.families)):
            for memory in memories_of(runtime, family):
                memory.copy_(torch.randn(memory.shape, generator=random))


def parts_of(runtime: TorchRuntime, row: int) -> list[RowPart]:
    """Returns a whole block, a part of one and a single position of each token family, and a state."""
    return [
        RowPart(number, row, tokens)
        for number, family in enumerate(runtime.description.families)
        for tokens in ([0] if isinstance(family, RecurrentState) else [BLOCK_SIZE, 3, 1])
    ]


def expected_bytes(runtime: TorchRuntime, part: RowPart) -> list[bytes]:
    """Computes a part's bytes by torch alone."""
    size = BLOCK_SIZE if part.tokens else 1
    first, tokens = part.row * size, part.tokens or 1
    return [
        memory[first : first + tokens].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for memory in memories_of(runtime, part.family)
    ]


def move(runtime: TorchRuntime, source: RowPart, target: RowPart) -> None:
    """Moves a part through bytes, as a tier does."""
    kept, buffers = runtime.read(source), runtime.buffers(target)
    for buffer, content in zip(buffers, kept, strict=True):
        buffer[:] = content
    runtime.place(target, buffers)


def staged(runtime: TorchRuntime) -> TorchRuntime:
    """Makes the pools stage and copy, as those of another device do."""
    pool_of(runtime)._in_host_memory = False
    return runtime


def in_place(runtime: TorchRuntime) -> TorchRuntime:
    return runtime


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_row_is_read_layer_by_layer(model_type: str, dtype: str) -> None:
    runtime = with_pools(model_type, dtype)
    fill(runtime)
    for part in parts_of(runtime, 5):
        read = runtime.read(part)
        assert [buffer.tobytes() for buffer in read] == expected_bytes(runtime, part)
        assert all(buffer.dtype == np.uint8 and buffer.ndim == 1 for buffer in read)
        family = runtime.description.families[part.family]
        expected = row_bytes(family, part.tokens or 1)
        assert sum(buffer.nbytes for buffer in read) == expected


def test_keys_come_before_values_and_layers_by_their_number() -> None:
    runtime = with_pools("llama")
    with torch.inference_mode():
        for number, memory in enumerate(memories_of(runtime, 0)):
            memory.fill_(number)
    layers = pool_of(runtime).layers
    assert [(layers[n].keys[0, 0, 0], layers[n].values[0, 0, 0]) for n in range(3)] == [
        (0, 1),
        (2, 3),
        (4, 5),
    ]
    read = runtime.read(RowPart(0, 0, 2))
    assert [set(buffer.view(np.float32).tolist()) for buffer in read] == [{n} for n in range(6)]


@pytest.mark.parametrize("placed", [in_place, staged])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_row_placed_in_another_row_is_read_there(
    model_type: str, dtype: str, placed: Callable[[TorchRuntime], TorchRuntime]
) -> None:
    runtime = placed(with_pools(model_type, dtype))
    fill(runtime)
    for source, target in zip(parts_of(runtime, 3), parts_of(runtime, 7), strict=True):
        before = [bytes(buffer) for buffer in runtime.read(source)]
        assert before == expected_bytes(runtime, source)
        whole = RowPart(target.family, target.row, BLOCK_SIZE if target.tokens else 0)
        neighbours = [RowPart(whole.family, row, whole.tokens) for row in (6, 8)]
        around = [expected_bytes(runtime, neighbour) for neighbour in neighbours]
        rest = expected_bytes(runtime, whole)
        move(runtime, source, target)
        assert [bytes(buffer) for buffer in runtime.read(target)] == before
        assert [expected_bytes(runtime, neighbour) for neighbour in neighbours] == around
        # Positions after the part stay.
        for now, then, part in zip(expected_bytes(runtime, whole), rest, before, strict=True):
            assert now == part + then[len(part) :]


@pytest.mark.parametrize("placed", [in_place, staged])
def test_read_buffers_belong_to_the_caller(placed: Callable[[TorchRuntime], TorchRuntime]) -> None:
    runtime = placed(with_pools("qwen3_next"))
    fill(runtime)
    for part in (RowPart(0, 3, 4), RowPart(1, 3, 0)):
        before = expected_bytes(runtime, part)
        for buffer in runtime.read(part):
            buffer[:] = 0
        assert expected_bytes(runtime, part) == before


def test_on_a_cpu_buffers_are_the_rows_own_memory() -> None:
    runtime = with_pools("qwen3_next", "bfloat16")
    for part in (RowPart(0, 3, 2), RowPart(1, 3, 0)):
        addresses = [
            memory.data_ptr() + part.row * (BLOCK_SIZE if part.tokens else 1) * memory[0].nbytes
            for memory in memories_of(runtime, part.family)
        ]
        assert [buffer.ctypes.data for buffer in runtime.buffers(part)] == addresses


def test_staging_becomes_the_rows_content_only_when_it_is_placed() -> None:
    runtime = staged(with_pools("llama"))
    part = RowPart(0, 2, 4)
    before = expected_bytes(runtime, part)
    buffers = runtime.buffers(part)
    for buffer in buffers:
        buffer[:] = 1
    assert expected_bytes(runtime, part) == before
    runtime.place(part, buffers)
    assert expected_bytes(runtime, part) == [bytes(buffer) for buffer in buffers]


def test_a_returned_row_can_be_written_again() -> None:
    """Rows of 64 KiB, so that whole pages are given back."""
    rows = LazyRows((64, 1 << 14), torch.float32, torch.device("cpu"))
    content: HostBytes = np.random.default_rng(0).integers(0, 256, 2 * rows.row_bytes, np.uint8)
    rows.host_bytes(10, 12)[:] = content
    rows.give_back(np.array([10, 11], np.int32))
    assert not rows.host_bytes(10, 12).any()
    rows.host_bytes(10, 12)[:] = content
    assert rows.tensor[10:12].flatten().view(torch.uint8).numpy().tobytes() == content.tobytes()


def test_rows_beyond_32_bits_have_their_own_slots() -> None:
    """A block table gives rows in 32 bits."""
    runtime = loaded("llama")
    runtime.allocate([0], BLOCK_SIZE)
    table: BlockIds = np.array([2**30], np.int32)
    part = RowPart(0, table[0], BLOCK_SIZE)  # type: ignore[arg-type]
    assert pool_of(runtime)._rows(part) == (2**32, 2**32 + BLOCK_SIZE)


def test_a_pool_without_rows_can_be_made() -> None:
    loaded("qwen3_next").allocate([0, 0], BLOCK_SIZE)


class Elsewhere:
    """Mover of a sequence's rows to rows that were never used."""

    def __init__(self, hand: ByHand) -> None:
        self._hand = hand
        self._runtime = hand.runtime

    def move(self, running: Running) -> None:
        families = self._runtime.description.families
        for number, family in enumerate(families):
            if isinstance(family, RecurrentState):
                target = self._hand._take_slot()
                move(self._runtime, RowPart(number, running.state, 0), RowPart(number, target, 0))
                self._void(number, running.state)
                running.state = target
            else:
                self._move_blocks(number, running.tables[number], running.past)

    def _move_blocks(self, family: int, table: BlockIds, past: int) -> None:
        for index in range(-(-past // BLOCK_SIZE)):
            tokens = min(BLOCK_SIZE, past - index * BLOCK_SIZE)
            if table[index] != NO_BLOCK:
                source, target = int(table[index]), int(self._hand._take(family, tokens)[0])
                move(self._runtime, RowPart(family, source, tokens), RowPart(family, target, tokens))
                self._void(family, source)
                table[index] = target

    def _void(self, family: int, row: int) -> None:
        """Overwrites the old row, so that a later read of it is noticed."""
        size = 1 if family == len(pool_of(self._runtime).families) else BLOCK_SIZE
        self._runtime.apply(Plan(returned=(RowsReturned(family, np.array([row], np.int32)),)))
        with torch.inference_mode():
            for memory in memories_of(self._runtime, family):
                memory[row * size : (row + 1) * size] = 77


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_sequence_continues_in_other_rows_with_the_same_logits(model_type: str, dtype: str) -> None:
    runtime = with_pools(model_type, dtype)
    tokens, logits = random_tokens(VOCAB, 40, 11), []
    for moves in (False, True):
        # The same rows both times: they are written anew from position 0 on.
        hand = ByHand(runtime, block_size=BLOCK_SIZE)
        elsewhere = Elsewhere(hand)
        running = hand.start(tokens)
        for new in (13, 1, 9, 1, 1):
            hand.step({running: new})
            if moves:
                elsewhere.move(running)
        logits.append(np.concatenate(running.logits))
    np.testing.assert_array_equal(logits[1], logits[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_buffer_of_a_block_has_a_dtype(dtype: str) -> None:
    runtime = with_pools("deepseek_v32", dtype)
    # Latents, rotary keys, and the indexer's keys, of three layers.
    dtypes = runtime.buffer_dtypes(0)
    assert dtypes == [dtype] * 9
    positions, itemsize = 3, {"float32": 4, "bfloat16": 2}[dtype]
    widths = [buffer.nbytes // (positions * itemsize) for buffer in runtime.read(RowPart(0, 1, positions))]
    assert widths == [24, 8, 16] * 3


def test_every_buffer_of_a_state_has_a_dtype() -> None:
    runtime = loaded("qwen3_next")
    assert runtime.buffer_dtypes(0) == ["float32"] * 2  # the pool is not allocated yet
    assert set(runtime.buffer_dtypes(1)) == {"float32"}
    fake = FakeRuntime(families=(FULL, window(5), STATE))
    assert [fake.buffer_dtypes(number) for number in range(3)] == [[], [], []]
