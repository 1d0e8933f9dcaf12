"""D1: decode attention through the block table against dense attention, of the same queries, keys and values.

16 query heads and 8 KV heads of 128, blocks of 16 positions scattered over a pool at random, one new token of each
sequence. The bar's comparison is `F.scaled_dot_product_attention` with `enable_gqa` on contiguous K and V, as a model
without a paged cache calls it; `folded` is the same with the query heads of a group as rows of one problem, the best
shape that dense attention has. With 75 % shared, three quarters of every context are the same blocks, and the dense
side has its own copy for every sequence, as it must.

Every case runs `--runs` times, the ways in turn within each round; a figure is the median over the rounds of all
runs of the ratio of two neighbours, and its spread are the least and the largest of the runs' own medians. K and V
are random for 4096 positions and repeat from there on. `of_limit` is the share of the read bandwidth (torch adds up
256 MiB, best of five, in the same process) at which the K and V were read, each shared position once.

    python bench/show/d1_decode_attention.py [--quick] [--runs 3] [--threads N]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from common import Bar, argument_parser, at_most, conclude
from torch import Tensor

from rootstock.kernels.api import Scores
from rootstock.kernels.cpu.attention import NumbaAttention, loops_for
from rootstock.kernels.spans import Span
from rootstock.kernels.torch.sliced_attention import SlicedAttention

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
MOST_POSITIONS = 32 * 16384  # of all sequences: 4 GiB of K and V in float32, twice
ROUND_SECONDS = 0.05  # of one way in a round, about; at least one call
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Case:
    batch: int
    context: int
    dtype: torch.dtype
    shared: bool

    @property
    def name(self) -> str:
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return f"{dtype}_b{self.batch}_{self.context}" + ("_shared" if self.shared else "")

    @property
    def bar(self) -> Bar:
        if self.shared:
            return at_most(0.35 if self.context >= 4096 else 0.5)
        if self.dtype == torch.float32 or self.context >= 4096:
            return at_most(0.75)
        return at_most(1.0 if self.batch == 1 else 0.85)


class Memory:
    """Buffers of K and V in a pool's layout and in the dense one, for every case in turn."""

    def __init__(self, positions: int) -> None:
        size = positions * KV_HEADS * HEAD_DIM
        self.buffers = [torch.empty(size) for _ in range(4)]

    def views(self, case: Case) -> tuple[list[Tensor], list[Tensor], list[Span]]:
        """Returns pools [slots, kv_heads, head_dim], dense [batch, kv_heads, context, head_dim], and spans."""
        positions = case.batch * case.context
        tables = self._tables(case)
        slots = torch.from_numpy(
            (tables[:, :, None].astype(np.int64) * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
        )
        pools, dense = [], []
        for number in (0, 1):
            size = positions * KV_HEADS * HEAD_DIM
            pool, own = (self.buffers[number + each].view(case.dtype)[:size] for each in (0, 2))
            pool = pool.view(positions, KV_HEADS, HEAD_DIM)
            pool[: 1 << 12].normal_()
            for begin in range(1 << 12, positions, 1 << 12):
                pool[begin : begin + (1 << 12)] = pool[: min(1 << 12, positions - begin)]
            own = own.view(case.batch, KV_HEADS, case.context, HEAD_DIM)
            for sequence, its in enumerate(slots.view(case.batch, case.context)):
                own[sequence] = pool[its].transpose(0, 1)
            pools.append(pool)
            dense.append(own)
        spans = [Span(row, 1, case.context - 1, table) for row, table in enumerate(tables)]
        return pools, dense, spans

    @staticmethod
    def _tables(case: Case) -> np.ndarray:
        """Returns [batch, blocks of a context] int32."""
        blocks = case.context // BLOCK_SIZE
        ids = np.random.default_rng(0).permutation(case.batch * blocks).astype(np.int32)
        tables = ids.reshape(case.batch, blocks)
        if case.shared:
            tables[:, : blocks * 3 // 4] = tables[0, : blocks * 3 // 4]
        return tables


def ways(memory: Memory, case: Case) -> dict[str, Callable[[], Tensor]]:
    (keys, values), (dense_keys, dense_values), spans = memory.views(case)
    query = torch.randn(case.batch, Q_HEADS, HEAD_DIM).to(case.dtype)
    group = Q_HEADS // KV_HEADS
    position_bytes = KV_HEADS * HEAD_DIM * case.dtype.itemsize
    attention = NumbaAttention(BLOCK_SIZE, SlicedAttention(BLOCK_SIZE, position_bytes))
    step, scores = attention.prepare(spans), Scores(HEAD_DIM**-0.5)
    new = query[:, ::group]  # the new positions' own K and V are in the pool already
    single, folded = query[:, :, None], query.view(case.batch, KV_HEADS, group, HEAD_DIM)
    found = {
        "dense": lambda: F.scaled_dot_product_attention(single, dense_keys, dense_values, enable_gqa=True),
        "folded": lambda: F.scaled_dot_product_attention(folded, dense_keys, dense_values),
        "ours": lambda: step(query, new, new, keys, values, scores),
    }
    with torch.inference_mode():
        expected, ours = found["dense"]()[:, :, 0].float(), found["ours"]().float()
    error = float((ours - expected).norm() / expected.norm())
    assert error < (2e-2 if case.dtype == torch.bfloat16 else 1e-5), f"{case.name}: wrong by {error:.2g}"
    return found


def measure(found: Mapping[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of a call in each round."""
    times: dict[str, list[float]] = {name: [] for name in found}
    started = time.perf_counter()
    found["dense"]()
    calls = max(1, int(ROUND_SECONDS / (time.perf_counter() - started)))
    for _ in range(rounds):
        for name, way in found.items():
            if calls > 1:  # a long call warms the processor's caches itself
                way()
            started = time.perf_counter()
            for _ in range(calls):
                way()
            times[name].append((time.perf_counter() - started) / calls)
    return times


def read_bandwidth(buffer: Tensor) -> float:
    """Returns bytes per second. Writes first: memory that was never written is one page of zeros."""
    part, best = buffer[: 64 << 20].fill_(1), float("inf")
    for _ in range(5):
        started = time.perf_counter()
        part.sum()
        best = min(best, time.perf_counter() - started)
    return part.nbytes / best


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="contexts up to 4096, one run, batches of 1 and 8"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    batches, contexts = ((1, 8), (512, 4096)) if asked.quick else ((1, 8, 32), (512, 4096, 16384))
    runs = 1 if asked.quick else asked.runs
    for dtype in (torch.bfloat16, torch.float32):
        loops_for(dtype)
    memory = Memory(1 << 16 if asked.quick else MOST_POSITIONS)
    figures: dict[str, object] = {"threads": torch.get_num_threads(), "runs": runs}
    bars: dict[str, Bar] = {}
    cases = [
        Case(batch, context, dtype, shared)
        for dtype in (torch.bfloat16, torch.float32)
        for shared in (False, True)
        for batch in batches
        for context in contexts
        if batch > 1 or not shared
    ]
    with torch.inference_mode():
        for case in cases:
            bandwidth = read_bandwidth(memory.buffers[0])
            found = ways(memory, case)
            ratios, folded, best = [], [], float("inf")
            for _ in range(runs):
                times = measure(found, ROUNDS)
                ratios.append([a / b for a, b in zip(times["ours"], times["dense"], strict=True)])
                folded += [a / b for a, b in zip(times["ours"], times["folded"], strict=True)]
                best = min(best, statistics.median(times["ours"]))
            medians = [statistics.median(run) for run in ratios]
            positions = case.batch * case.context
            if case.shared:
                positions = case.context * 3 // 4 + case.batch * (case.context // 4)
            read = positions * KV_HEADS * 2 * HEAD_DIM * case.dtype.itemsize
            figures[case.name] = round(statistics.median(itertools.chain(*ratios)), 3)
            figures[f"{case.name}_detail"] = {
                "spread": [round(min(medians), 3), round(max(medians), 3)],
                "to_folded": round(statistics.median(folded), 3),
                "us": round(best * 1e6, 1),
                "of_limit": round(read / best / bandwidth, 2),
                "bandwidth_gb_s": round(bandwidth / 1e9, 1),
            }
            bars[case.name] = case.bar
            print(case.name, figures[case.name], figures[f"{case.name}_detail"], flush=True)
    conclude("D1", figures, bars)


if __name__ == "__main__":
    main()
