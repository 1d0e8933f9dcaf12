"""Forwards on MLX: how segments share calls of the model, writes in place, and failures in the middle."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_checkpoints import logits_of
from rootstock.cache.families import RecurrentState
from rootstock.cache.plan import BlockCopy, Plan, RowPart, RowsReturned, StateCopy
from rootstock.cache.types import NO_TOKENS, BlockId, SlotId, Tokens
from rootstock.errors import PoolsLost
from rootstock.runtime.base import Batch, ExecutionMode, Logits, Segment
from rootstock.runtime.mlx.runner import MlxRuntime
from rootstock.runtime.mlx.self_check import own_logits
from runtime.mlx.helpers import Failing, failing_number, number_that_fails_later, runtime_of, segment

BLOCK_SIZE, BLOCKS = 4, 16  # blocks of each sequence
GATHERED: ExecutionMode = "batched, gathered K and V"
ALONE: ExecutionMode = "one sequence per forward"
MODES: tuple[ExecutionMode, ...] = ("batched", GATHERED, ALONE)


def drawn(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(3, 512, length).astype(np.int32)


def of(runtime: MlxRuntime, number: int, tokens: Tokens, past: int = 0, keep: int | None = None) -> Segment:
    """Makes the segment of sequence `number`, whose rows are its own: each second one of the pool's."""
    blocks = range(2 * number * BLOCKS, 2 * (number + 1) * BLOCKS, 2)
    return segment(runtime, tokens, past, keep, blocks, state=number)


def assert_right(model: nn.Module, logits: Logits, tokens: Tokens, rows: slice) -> None:
    own = own_logits(model, tokens)[rows]
    assert logits.shape == own.shape
    assert np.abs(logits - own).max() <= 1e-4 * own.std()


# ---- calls of the model


@pytest.mark.parametrize(
    ("kind", "mode", "shares", "calls"),
    [
        ("llama", "batched", [(1, 1)] * 4, 1),
        ("llama", "batched", [(5, 5), (3, 3), (1, 1)], 1),  # padded
        ("llama", "batched", [(16, 16), (15, 15)], 1),  # to 32 rows
        ("llama", "batched", [(17, 17), (15, 15)], 2),  # 34 rows
        ("llama", "batched", [(17, 17), (17, 17)], 1),  # nothing to pad
        ("llama", GATHERED, [(5, 5), (3, 3), (1, 1)], 1),
        ("llama", ALONE, [(5, 5), (3, 3), (1, 1)], 3),
        ("llama", "batched", [(9, 1)], 2),  # the rows before the last need no logits
        ("llama", "batched", [(9, 1), (7, 1), (1, 1)], 3),
        ("llama", "batched", [(9, 3), (2, 2)], 2),
        ("llama", "batched", [(9, 0), (4, 0)], 2),
        ("llama", "batched", [(9, 0), (4, 4), (1, 1)], 2),
        ("nemotron_h", "batched", [(1, 1)] * 4, 1),
        ("nemotron_h", "batched", [(5, 5), (3, 3), (5, 5)], 2),  # states are not padded
        ("nemotron_h", "batched", [(9, 1), (7, 1)], 3),
        ("nemotron_h", ALONE, [(5, 5), (5, 5)], 2),
    ],
)
def test_segments_share_calls_and_logits_come_in_the_order_of_segments(
    kind: str, mode: ExecutionMode, shares: Sequence[tuple[int, int]], calls: int
) -> None:
    model, runtime = runtime_of(kind, mode, rows=2 * BLOCKS * len(shares), block_size=BLOCK_SIZE)
    tokens = [drawn(new, seed) for seed, (new, _) in enumerate(shares)]
    logits = runtime.forward(
        Batch(
            [
                of(runtime, i, its, keep=keep)
                for i, (its, (_, keep)) in enumerate(zip(tokens, shares, strict=True))
            ]
        )
    )
    assert runtime.stats.calls == calls
    assert logits.dtype == np.float32
    assert len(logits) == sum(keep for _, keep in shares)
    row = 0
    for its, (new, keep) in zip(tokens, shares, strict=True):
        if keep:
            assert_right(model, logits[row : row + keep], its, slice(new - keep, new))
        row += keep


@pytest.mark.parametrize(("kind", "calls"), [("nemotron_h", 2), ("llama", 1)])
def test_a_sequence_that_begins_is_apart_from_others_if_it_has_states(kind: str, calls: int) -> None:
    model, runtime = runtime_of(kind, rows=4 * BLOCKS, block_size=BLOCK_SIZE)
    first, second = drawn(7, 1), drawn(3, 2)
    runtime.forward(Batch([of(runtime, 0, first[:4])]))
    before = runtime.stats.calls
    logits = runtime.forward(Batch([of(runtime, 0, first[4:], 4), of(runtime, 1, second)]))
    assert runtime.stats.calls - before == calls
    assert_right(model, logits[:3], first, slice(4, 7))
    assert_right(model, logits[3:], second, slice(0, 3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "nemotron_h"])
def test_a_prompt_whose_rows_need_no_logits_is_continued_with_others(kind: str, mode: ExecutionMode) -> None:
    model, runtime = runtime_of(kind, mode, rows=6 * BLOCKS, block_size=BLOCK_SIZE)
    tokens = [drawn(24, seed) for seed in range(3)]
    runtime.forward(Batch([of(runtime, i, its[:9], keep=0) for i, its in enumerate(tokens[:2])]))
    steps = [
        ((0, 9, 20, 1), (1, 9, 10, 1), (2, 0, 13, 1)),
        ((0, 20, 24, 4), (1, 10, 11, 1), (2, 13, 17, 4)),
        ((2, 17, 18, 1), (1, 11, 12, 1)),
    ]
    for step in steps:
        logits = runtime.forward(Batch([of(runtime, i, tokens[i][a:b], a, keep) for i, a, b, keep in step]))
        row = 0
        for i, _, end, keep in step:
            assert_right(model, logits[row : row + keep], tokens[i], slice(end - keep, end))
            row += keep
    assert runtime.pool_copies == 0


def test_the_head_is_not_computed_for_rows_without_logits() -> None:
    model, runtime = runtime_of("llama")
    failing = model.lm_head = Failing(model.lm_head, failing_number)
    failing.fails = True
    nothing = runtime.forward(Batch([segment(runtime, drawn(9), keep=0)]))
    assert nothing.shape == (0, logits_of("llama"))
    with pytest.raises(PoolsLost) as lost:
        runtime.forward(Batch([segment(runtime, drawn(9), keep=1)]))
    assert "GatherMM" in str(lost.value.cause)


@pytest.mark.parametrize("mode", ["batched", GATHERED])
def test_only_the_best_mode_attends_on_the_pools(mode: ExecutionMode) -> None:
    _, runtime = runtime_of("llama", mode)
    runtime.forward(Batch([segment(runtime, drawn(5))]))
    assert runtime.stats.attentions_on_pools == (3 if mode == "batched" else 0), "one for each layer"


# ---- calls ahead


def following(segment: Segment, lease: int, past: int) -> Segment:
    """Makes the segment behind another one, of the same sequence."""
    return replace(segment, tokens=NO_TOKENS, past=past, logits_to_keep=1, lease=lease)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("llama4", ALONE),
        *itertools.product(["llama", "gemma3_text", "qwen3_next", "nemotron_h", "mamba"], MODES),
    ],
)
def test_what_is_computed_ahead_counts_only_if_the_next_step_is_as_expected(
    kind: str, mode: ExecutionMode
) -> None:
    """Four sequences, of which some go on with the most likely token, some with another, and some not at all, while
    others begin, and rows of some are copied to other blocks, or come from outside."""
    model, runtime = runtime_of(kind, mode, rows=10 * BLOCKS, block_size=BLOCK_SIZE)
    random = np.random.default_rng(0)
    answers: dict[int, list[int]] = {}
    leases = itertools.count(1)
    of_sequence: dict[int, int] = {}
    asked_ahead = 0
    for step in range(60):
        segments, asked = list[Segment](), list[int]()
        for number in range(4):
            known = answers.get(number)
            if known is None or len(known) > 40 or random.random() < 0.1:
                if random.random() < 0.5:
                    answers.pop(number, None)
                    continue
                answers[number] = known = drawn(int(random.integers(1, 9)), step).tolist()
                of_sequence[number], past = next(leases), 0
            elif random.random() < 0.1:
                continue
            else:
                past = len(known) - 1
            tokens = np.array(known[past:], np.int32)
            segments.append(replace(of(runtime, number, tokens, past, 1), lease=of_sequence[number]))
            asked.append(number)
        if not segments:
            continue
        goes_on = {
            i: following(segments[i], of_sequence[number], len(answers[number]))
            for i, number in enumerate(asked)
            if random.random() < 0.9
        }
        asked_ahead += len(goes_on)
        logits = runtime.forward(Batch(segments, goes_on))
        for row, number in enumerate(asked):
            tokens = np.array(answers[number], np.int32)
            assert_right(model, logits[row : row + 1], tokens, slice(len(tokens) - 1, len(tokens)))
            expected = int(logits[row].argmax())
            answers[number].append(expected if random.random() < 0.9 else (expected + 1) % 500)
        if kind != "mamba" and random.random() < 0.2:  # writes to the pools between two steps
            source, target = BlockId(9 * BLOCKS), BlockId(9 * BLOCKS + 1)
            runtime.apply(Plan(copies=(BlockCopy(source, target, 3, 0),)))
            part = RowPart(0, target, 2)
            runtime.place(part, runtime.read(part))
    assert runtime.pool_copies == 0
    if mode != ALONE:
        assert runtime.stats.taken_ahead > asked_ahead / 3


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
@pytest.mark.parametrize(
    "changed",
    [
        {"lease": 2},
        {"lease": -1},
        {"state": SlotId(1)},
        {"tokens": np.array([7], np.int32)},
        {"logits_to_keep": 0},
        {"tables": (np.array([20, 21, *range(2, 8)], np.int32),)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_segment_that_differs_from_the_expected_one_is_computed_anew(
    kind: str, changed: dict[str, Any]
) -> None:
    model, runtime = runtime_of(kind, block_size=BLOCK_SIZE)
    tokens = drawn(7)
    first = replace(segment(runtime, tokens, keep=1), lease=1)
    logits = runtime.forward(Batch([first], {0: following(first, 1, 7)}))
    token = np.array([logits[0].argmax()], np.int32)
    calls = runtime.stats.calls
    # The rows that other tables and slots lead to are those of the first forward.
    if kind == "qwen3_next":
        runtime.apply(Plan(states=(StateCopy(SlotId(0), SlotId(1)),)))
    for block in (0, 1):
        runtime.apply(Plan(copies=(BlockCopy(BlockId(block), BlockId(block + 20), BLOCK_SIZE, 0),)))
    asked = replace(first, **({"tokens": token, "past": 7} | changed))
    again = runtime.forward(Batch([asked]))
    assert runtime.stats.taken_ahead == 0
    assert runtime.stats.calls == calls + 1
    if asked.logits_to_keep:
        assert_right(model, again, np.concatenate((tokens, asked.tokens)), slice(7, 8))


def test_a_step_after_the_expected_one_is_computed_anew() -> None:
    model, runtime = runtime_of("llama")
    tokens = drawn(7)
    first = replace(segment(runtime, tokens, keep=1), lease=1)
    runtime.forward(Batch([first], {0: following(first, 1, 7)}))
    runtime.forward(Batch([replace(segment(runtime, drawn(3), blocks=range(20, 28)), lease=2)]))
    token = np.array([own_logits(model, tokens)[6].argmax()], np.int32)
    logits = runtime.forward(Batch([replace(first, tokens=token, past=7)]))
    assert runtime.stats.taken_ahead == 0
    assert_right(model, logits, np.concatenate((tokens, token)), slice(7, 8))


def test_a_failure_ahead_fails_the_step_behind_which_it_was_begun() -> None:
    _, broken, runtime = failing("llama")
    first = replace(segment(runtime, drawn(6), keep=1), lease=1)
    logits = runtime.forward(Batch([first]))
    token = np.array([logits[0].argmax()], np.int32)
    goes_on = replace(first, tokens=token, past=6)
    broken.fails = True
    with pytest.raises(PoolsLost):
        runtime.forward(Batch([goes_on], {0: following(goes_on, 1, 7)}))
    broken.fails = False
    again = runtime.forward(Batch([first], {0: following(first, 1, 6)}))
    assert np.array_equal(again, logits)
    assert runtime.pool_copies == 0


# ---- writes in place


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("llama", "batched"), ("llama", GATHERED), ("gpt_oss", "batched"), ("nemotron_h", "batched")],
)
def test_240_decodes_copy_no_pool_and_take_no_memory(kind: str, mode: ExecutionMode) -> None:
    steps = 240
    _, runtime = runtime_of(kind, mode, rows=4 * 64, block_size=BLOCK_SIZE)
    tokens = [drawn(5 + steps, seed) for seed in range(2)]

    def run(begin: int, end: int) -> None:
        segments = []
        for i, its in enumerate(tokens):
            blocks = range(i, 128 + i, 2)
            segments.append(segment(runtime, its[begin:end], begin, 1, blocks, state=i))
        runtime.forward(Batch(segments))

    run(0, 5)
    used = []
    for position in range(5, 5 + steps):
        run(position, position + 1)
        used.append(mx.get_active_memory())
    assert runtime.pool_copies == 0
    # MLX may give an array the buffer of another that is up to 16 KiB larger. An array that a step kept would take at
    # least 64 bytes, and those of all steps more than this.
    kept = max(used[-20:]) - max(used[:20])
    assert kept < 64 * steps, "arrays of a step are dropped with it"


def test_a_copy_of_a_pool_is_counted() -> None:
    model, runtime = runtime_of("llama")
    held: list[mx.array] = []

    class Holding(nn.Module):
        """Attention that keeps the keys of its cache."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, x: mx.array, mask: object = None, cache: object = None) -> mx.array:
            out: mx.array = self.inner(x, mask, cache)
            held.append(cache.keys)  # type: ignore[attr-defined]
            return out

    model.model.layers[1].self_attn = Holding(model.model.layers[1].self_attn)
    for past in range(3):
        runtime.forward(Batch([segment(runtime, drawn(1, past), past)]))
    assert runtime.pool_copies == 2, "by each write after the first"


# ---- what earlier users of rows left there


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_rows_that_no_row_sees_may_hold_anything(kind: str, mode: ExecutionMode) -> None:
    model, runtime = runtime_of(kind, mode, rows=4 * BLOCKS, block_size=BLOCK_SIZE)
    families = len(runtime.description.families) - (kind == "qwen3_next")
    for family in range(families):
        for row in range(4 * BLOCKS):
            part = RowPart(family, row, BLOCK_SIZE)
            buffers = runtime.buffers(part)
            for buffer in buffers:
                buffer.view(np.float32)[:] = np.nan
            runtime.place(part, buffers)
    first, second = drawn(18, 1), drawn(6, 2)
    for begin, end in ((0, 5), (5, 6)):
        logits = runtime.forward(
            Batch(
                [
                    of(runtime, 0, first[3 * begin : 3 * end], 3 * begin),
                    of(runtime, 1, second[begin:end], begin),
                ]
            )
        )
        new = 3 * (end - begin)
        assert_right(model, logits[:new], first[: 3 * end], slice(3 * begin, 3 * end))
        assert_right(model, logits[new:], second[:end], slice(begin, end))


# ---- rows as bytes


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "nemotron_h", "mamba2"])
def test_buffers_have_the_sizes_and_dtypes_that_are_told(kind: str) -> None:
    _, runtime = runtime_of(kind)
    runtime.forward(Batch([segment(runtime, drawn(6), state=3)]))
    for family, its in enumerate(runtime.description.families):
        part = RowPart(family, 3, 0) if its.name == "state" else RowPart(family, 1, 2)
        read = runtime.read(part)
        assert [buffer.nbytes for buffer in read] == [buffer.nbytes for buffer in runtime.buffers(part)]
        dtypes = runtime.buffer_dtypes(family)
        assert dtypes == ["float32"] * len(read)
        if its.name != "state":
            assert sum(buffer.nbytes for buffer in read) == 2 * its.bytes_per_token
        else:
            assert sum(buffer.nbytes for buffer in read) == its.bytes_per_state


def test_states_that_are_returned_take_no_memory() -> None:
    _, runtime = runtime_of("mamba2")
    before = mx.get_active_memory()
    for slot in range(4):
        runtime.forward(Batch([segment(runtime, drawn(4, slot), keep=0, state=slot)]))
    copies = tuple(StateCopy(SlotId(slot), SlotId(8 + slot)) for slot in range(4))
    runtime.apply(Plan(states=copies))
    runtime.apply(Plan(returned=(RowsReturned(0, np.arange(12, dtype=np.int32)),)))
    assert mx.get_active_memory() <= before


# ---- failures


def failing(
    kind: str, number: Callable[[], mx.array] = failing_number
) -> tuple[nn.Module, Failing, MlxRuntime]:
    """Makes a runtime whose model fails, on demand, after the attention of its second layer."""
    model, runtime = runtime_of(kind)
    block = model.layers[1]
    name = "mlp" if hasattr(block, "mlp") else "mixer"
    broken = Failing(getattr(block, name), number)
    setattr(block, name, broken)
    return model, broken, runtime


@pytest.mark.parametrize("keep", [0, 1])
def test_a_failed_evaluation_loses_the_pools_and_later_sequences_are_right(keep: int) -> None:
    model, broken, runtime = failing("llama")
    tokens = drawn(12)
    runtime.forward(Batch([segment(runtime, tokens[:6])]))
    broken.fails = True
    with pytest.raises(PoolsLost) as lost:
        runtime.forward(Batch([segment(runtime, tokens[6:8], 6, keep)]))
    broken.fails = False
    cause = lost.value.cause
    assert isinstance(cause, RuntimeError)
    assert "GatherMM" in str(cause)
    assert_right(model, runtime.forward(Batch([segment(runtime, tokens)])), tokens, slice(0, 12))
    runtime.forward(Batch([segment(runtime, tokens[:1], 12)]))
    assert runtime.pool_copies == 0


def test_a_failure_holds_no_array_but_its_traceback_as_text() -> None:
    """The frames of a traceback hold arrays of the pools, and each of them would make the next write a copy."""
    _, broken, runtime = failing("llama")
    runtime.forward(Batch([segment(runtime, drawn(6))]))
    broken.fails = True
    with pytest.raises(PoolsLost) as lost:
        runtime.forward(Batch([segment(runtime, drawn(6))]))
    broken.fails = False
    cause = lost.value.cause
    assert cause.__context__ is None
    assert cause.__cause__ is None
    assert "in _hand_over" in "".join(cause.__notes__)
    frames = []
    traceback = cause.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "_call_model" not in frames
    for _ in range(3):
        runtime.forward(Batch([segment(runtime, drawn(6))]))
    assert runtime.pool_copies == 0


def test_a_computation_that_fails_in_another_thread_loses_the_pools() -> None:
    """MLX tells of it when the evaluation is under way, or after all of it has been computed with wrong numbers."""
    for _ in range(8):
        model, broken, runtime = failing("llama", number_that_fails_later)
        tokens = drawn(12)
        runtime.forward(Batch([segment(runtime, tokens[:6])]))
        broken.fails = True
        with pytest.raises(PoolsLost):
            runtime.forward(Batch([segment(runtime, drawn(2, 1), blocks=range(8, 16))]))
        broken.fails = False
        assert_right(model, runtime.forward(Batch([segment(runtime, tokens)])), tokens, slice(0, 12))
        assert runtime.pool_copies == 0


class Refusing:
    """Replacement of `mx.eval` that fails `times` times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self._own = mx.eval

    def __call__(self, *arrays: object) -> None:
        if self.times:
            self.times -= 1
            raise RuntimeError("[metal::malloc] no memory")
        self._own(*arrays)


@pytest.mark.parametrize("failures", [1, 2, 4])
def test_pools_that_cannot_be_made_anew_stay_lost_until_they_can(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runtime = runtime_of("qwen3_next", rows=4 * BLOCKS, block_size=BLOCK_SIZE)
    tokens = drawn(12)
    runtime.forward(Batch([of(runtime, 0, tokens[:7])]))
    monkeypatch.setattr(mx, "eval", Refusing(failures))
    contexts = []
    while True:
        try:
            logits = runtime.forward(Batch([of(runtime, 0, tokens)]))
            break
        except PoolsLost as error:
            contexts.append(error.__context__)
    assert not any(contexts), "its frames would hold the pools"
    assert len(contexts) == (1 if failures == 1 else failures - 1), (
        "the first failed evaluation is followed by a renewal"
    )
    assert_right(model, logits, tokens, slice(0, 12))
    assert runtime.pool_copies == 0


@pytest.mark.parametrize("work", ["copy", "read", "place"])
def test_failures_of_plans_and_tiers_lose_the_pools_and_hold_no_array(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runtime = runtime_of("llama", rows=4 * BLOCKS, block_size=BLOCK_SIZE)
    tokens = drawn(12)
    runtime.forward(Batch([of(runtime, 0, tokens[:7])]))
    part = RowPart(0, 0, BLOCK_SIZE)
    buffers = runtime.read(part)
    doing: dict[str, Callable[[], object]] = {
        "copy": lambda: runtime.apply(Plan((BlockCopy(BlockId(0), BlockId(9), 2, 0),))),
        "read": lambda: runtime.read(part),
        "place": lambda: runtime.place(part, buffers),
    }
    monkeypatch.setattr(mx, "eval", Refusing(1))
    with pytest.raises(PoolsLost) as lost:
        doing[work]()
    assert "no memory" in str(lost.value.cause)
    assert_right(model, runtime.forward(Batch([of(runtime, 0, tokens)])), tokens, slice(0, 12))
    assert runtime.pool_copies == 0
    assert lost.value.cause.__traceback__ is None, "and the exception is still held"


@pytest.mark.parametrize("kind", ["lfm2", "mamba", "mamba2", "nemotron_h"])
def test_a_state_keeps_nothing_of_its_chunk(kind: str) -> None:
    """Many models keep the end of a chunk's array as their state, as a view of all of it."""
    _, runtime = runtime_of(kind, rows=64, block_size=8)
    families = runtime.description.families
    (of_state,) = (family for family in families if isinstance(family, RecurrentState))
    tokens = drawn(256)
    runtime.forward(Batch([segment(runtime, tokens[:8], 0, 0, range(40), state=0)]))
    before = mx.get_active_memory()
    runtime.forward(Batch([segment(runtime, tokens[8:], 8, 0, range(40), state=0)]))
    runtime.apply(Plan(states=(StateCopy(SlotId(0), SlotId(1)),)))
    # MLX takes memory in pages.
    assert mx.get_active_memory() - before <= of_state.bytes_per_state


def test_an_exception_of_the_models_code_leaves_other_sequences_as_they_were() -> None:
    model, runtime = runtime_of("llama", rows=4 * BLOCKS, block_size=BLOCK_SIZE)
    tokens = drawn(12)
    runtime.forward(Batch([of(runtime, 0, tokens[:7])]))

    class Raising(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            raise ValueError("not today")

    own = model.layers[2].mlp
    model.layers[2].mlp = Raising()
    with pytest.raises(ValueError, match="not today") as failure:
        runtime.forward(Batch([of(runtime, 1, drawn(5, 1))]))
    model.layers[2].mlp = own
    logits = runtime.forward(Batch([of(runtime, 0, tokens[7:], 7)]))
    assert_right(model, logits, tokens, slice(7, 12))
    assert runtime.pool_copies == 0
    assert "not today" in str(failure.value), "and is still held"
