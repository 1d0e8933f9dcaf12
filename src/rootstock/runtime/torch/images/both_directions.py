"""Attention of models in which the rows of an image see each other, also later ones.

All rows are attended first, as a text's are. The rows of images are then attended again, on K and V that are gathered
from the pool: each sees what its layer's family shows it, and the later rows of its run. The scheduler never ends a
chunk inside a run (`chunk_end`), so that all of its K and V are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rootstock.cache.families import TokenFamily
from rootstock.kernels.api import Scores, StepAttention
from rootstock.kernels.quantized_rows import PoolRows, select_rows
from rootstock.kernels.spans import Span, slots_of
from rootstock.kernels.torch.gathered_attention import attend_dense
from rootstock.runtime.base import Segment


@dataclass(frozen=True, slots=True)
class Run:
    """Adjoining rows of an image in a step."""

    row: int  # of the step
    first: int  # position of the row
    start: int  # position at which the run begins: before `first` if earlier rows are computed
    end: int  # position
    sequence: int  # index of the segment


def runs_of(segments: Sequence[Segment]) -> list[Run]:
    """Returns the runs of rows in a step that see both directions."""
    return list(_runs(segments))


def _runs(segments: Sequence[Segment]) -> Iterator[Run]:
    row = 0
    for number, segment in enumerate(segments):
        past, end = segment.past, segment.past + len(segment.tokens)
        for image in segment.images:
            if not image.layout.sees_both_directions:
                continue
            for begin, stop in image.layout.runs():
                start, last = image.start + begin, image.start + stop
                if start < end and last > past:
                    assert last <= end, "a chunk ends inside the rows of an image"
                    first = max(start, past)
                    yield Run(row + first - past, first, start, last, number)
        row += len(segment.tokens)


class BothDirections:
    """Attention of a step that has such runs. Has the interface of `StepAttention`."""

    def __init__(
        self,
        attention: StepAttention,
        runs: Sequence[Run],
        spans: Sequence[Span],
        family: TokenFamily,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._attention = attention
        self._prepared = []
        for run in runs:
            seen = family.first_visible(run.first)
            slots = slots_of(spans[run.sequence].blocks, seen, run.end, block_size)
            rows = torch.arange(run.first, run.end)
            visible = torch.tensor([family.first_visible(int(row)) for row in rows])
            keys = torch.arange(seen, run.end)
            allowed = (keys >= visible[:, None]) & ((keys <= rows[:, None]) | (keys >= run.start))
            where = slice(run.row, run.row + run.end - run.first)
            self._prepared.append((where, torch.from_numpy(slots).to(device), allowed.to(device)))

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: PoolRows,
        values: PoolRows,
        scores: Scores,
    ) -> Tensor:
        out = self._attention(query, key, value, keys, values, scores)
        for where, slots, allowed in self._prepared:
            of_keys, of_values = (select_rows(rows, slots).transpose(0, 1) for rows in (keys, values))
            attended = attend_dense(query[where].transpose(0, 1), of_keys, of_values, 0, scores, allowed)
            out[where] = attended.transpose(0, 1)
        return out
