"""Slots and runs against the definition, position by position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.batches import make_batch
from rootstock.kernels.spans import Span, common_blocks, runs_of, slots_of
from rootstock.kernels.torch_paged import PagedAttention, Tuning

tables = st.lists(st.integers(0, 12), min_size=1, max_size=12, unique=True).map(
    lambda ids: np.array(ids, np.int32)
)


@given(tables, st.integers(1, 5), st.data())
def test_runs_are_the_slots_in_order_and_as_few_as_possible(
    table: np.ndarray, block_size: int, data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, len(table) * block_size))
    first = data.draw(st.integers(0, end))
    expected = [int(table[p // block_size]) * block_size + p % block_size for p in range(first, end)]
    assert slots_of(table, first, end, block_size).tolist() == expected
    runs = runs_of(table, first, end, block_size)
    assert [slot for run in runs for slot in range(run.first_slot, run.first_slot + run.tokens)] == expected
    assert all(run.tokens > 0 for run in runs)
    assert len(runs) == sum(1 for i, s in enumerate(expected) if i == 0 or s != expected[i - 1] + 1)


@given(st.lists(tables, min_size=1, max_size=4), st.integers(0, 3))
def test_common_blocks_is_the_longest_shared_stretch(tables: list[np.ndarray], first: int) -> None:
    found = common_blocks(tables, first)
    stretches = [table[first : first + found].tolist() for table in tables]
    assert all(s == stretches[0] for s in stretches)
    longer = {tuple(table[first : first + found + 1].tolist()) for table in tables}
    assert len(longer) > 1 or min(len(table) for table in tables) <= first + found


def test_a_prefix_that_decodes_share_is_read_once() -> None:
    batch = make_batch([(70, 1), (81, 1), (77, 1)], block_size=4, shared=64, layout="scattered")
    batch.spans.append(Span(3, 1, 4, np.array([90, 91], np.int32)))  # a stranger
    levels = PagedAttention(4, Tuning(share_from=32))._levels(batch.spans, gather := _gather())
    assert [piece.rows for piece in levels[0].pieces] == [(0, 1, 2), (3,)]
    assert [piece.rows for piece in levels[1].pieces] == [(0,), (1,), (2,)]
    assert levels[0].pieces[0].tokens == 64
    assert gather.tokens == 64 + 7 + 18 + 14  # each position once


def test_sharing_follows_the_tree() -> None:
    """Two pairs share more than all four do."""
    common, left, right = list(range(8)), list(range(10, 18)), list(range(20, 28))
    own = [[30], [31], [32], [33]]
    spans = [
        Span(i, 1, 16 * 2, np.array(common + branch + tail, np.int32))
        for i, (branch, tail) in enumerate(zip([left, left, right, right], own, strict=True))
    ]
    levels = PagedAttention(2, Tuning(share_from=4))._levels(spans, _gather())
    assert [[piece.rows for piece in level.pieces] for level in levels] == [
        [(0, 1, 2, 3)],
        [(0, 1), (2, 3)],
        [(0,), (1,), (2,), (3,)],
    ]
    # If what all have in common is not worth a call, the pairs' parts begin at 0.
    levels = PagedAttention(2, Tuning(share_from=20))._levels(spans, _gather())
    assert [piece.rows for piece in levels[0].pieces] == [(0, 1), (2, 3)]
    assert sum(piece.tokens for piece in levels[0].pieces) == 64


def _gather():
    from rootstock.kernels.torch_paged import _Gather

    return _Gather()
