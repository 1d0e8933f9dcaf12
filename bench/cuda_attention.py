"""Attention on a CUDA device: Triton through block tables against dense SDPA, gathering, and the read limit.

    python bench/cuda_attention.py [--out results.json]

Blocks of 32 are scattered at random; 32 query and 8 KV heads of 128 in bfloat16. Decodes: batches of 1, 8 and 32 with
512, 4k and 16k of context; chunks: 512 new positions on 0, 4k and 16k. Dense SDPA has contiguous K and V of each
sequence, and for chunks a mask. Each way is recorded as a CUDA graph over several layers, together beyond the L2
cache, so what is timed is the device and not Python. Ways take turns, and the median of the rounds' ratios counts.
The limit is the bytes of K and V over the read bandwidth that a sum over 4 GiB reached in the same run.

Results are compared with dense SDPA before anything is timed. Without a CUDA device it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from rootstock.kernels.api import Attention, Scores
from rootstock.kernels.spans import Span
from rootstock.kernels.torch.gathered_attention import GatherAttention

BLOCK_SIZE, Q_HEADS, KV_HEADS, DIM, DTYPE = 32, 32, 8, 128, torch.bfloat16
BEYOND_CACHES = 512 << 20  # bytes
ROUNDS, MOST_LAYERS = 15, 64

Step = Callable[[], list[Tensor]]


class Case:
    """Some sequences with `past` positions and `new` ones, in as many layers as exceed the caches."""

    def __init__(self, batch: int, past: int, new: int, device: torch.device) -> None:
        self.batch, self.past, self.new = batch, past, new
        end = past + new
        blocks = -(-end // BLOCK_SIZE)
        self.kv_bytes = 2 * batch * end * KV_HEADS * DIM * DTYPE.itemsize  # of a layer
        layers = max(1, min(MOST_LAYERS, BEYOND_CACHES // self.kv_bytes))
        ids = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32)
        self.spans = [
            Span(row * new, new, past, ids[row * blocks : (row + 1) * blocks]) for row in range(batch)
        ]
        slots = batch * blocks * BLOCK_SIZE
        self.query = torch.randn(batch * new, Q_HEADS, DIM, dtype=DTYPE, device=device)
        self.pools = [
            (
                torch.randn(slots, KV_HEADS, DIM, dtype=DTYPE, device=device),
                torch.randn(slots, KV_HEADS, DIM, dtype=DTYPE, device=device),
            )
            for _ in range(layers)
        ]
        order = torch.from_numpy(ids.astype(np.int64)).to(device).view(batch, blocks)
        self.dense = [tuple(_contiguous(pool, order, end) for pool in pools) for pools in self.pools]

    def by(self, attention: Attention) -> Step:
        step, scores = attention.prepare(self.spans), Scores(DIM**-0.5)
        own = self.query[:, :KV_HEADS]  # new K and V: kernels here read them from the pool
        return lambda: [step(self.query, own, own, *pools, scores) for pools in self.pools]

    def densely(self) -> Step:
        query = self.query.view(self.batch, self.new, Q_HEADS, DIM).transpose(1, 2)
        end = self.past + self.new
        mask = None
        if self.new > 1:
            positions = torch.arange(end, device=query.device)
            mask = positions <= positions[self.past :, None]

        def attend(key: Tensor, value: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
            return out.transpose(1, 2).reshape(-1, Q_HEADS, DIM)

        return lambda: [attend(key, value) for key, value in self.dense]


def _contiguous(pool: Tensor, order: Tensor, end: int) -> Tensor:
    """pool [slots, kv_heads, dim], order [batch, blocks] → [batch, kv_heads, end, dim]"""
    blocks = pool.view(-1, BLOCK_SIZE, KV_HEADS, DIM)[order]
    return blocks.flatten(1, 2)[:, :end].transpose(1, 2).contiguous()


def recorded(step: Step) -> Callable[[], None]:
    """The step as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(replay: Callable[[], None]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    replay()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second, the best of ten."""
    memory = torch.ones(1 << 30, device=device)
    memory.sum()
    return memory.nbytes / min(seconds(memory.sum) for _ in range(10))


def measure(case: Case, device: torch.device, bytes_per_s: float) -> dict[str, float]:
    from rootstock.kernels.cuda.triton_attention import TritonAttention

    ways = {
        "dense": case.densely(),
        "gather": case.by(GatherAttention(BLOCK_SIZE, device)),
        "triton": case.by(TritonAttention(BLOCK_SIZE, device, 256)),
    }
    expected = ways["dense"]()[0].float()
    for name, way in ways.items():
        off = float((way()[0].float() - expected).norm() / expected.norm())
        assert off < 1e-2, f"{name} is off by {off:.2g}"
    replays = {name: recorded(way) for name, way in ways.items()}
    rounds = [{name: seconds(replay) for name, replay in replays.items()} for _ in range(ROUNDS)]
    layers = len(case.pools)
    triton_s = statistics.median(r["triton"] for r in rounds) / layers
    return {
        "batch": case.batch,
        "past": case.past,
        "new": case.new,
        "triton_us": triton_s * 1e6,
        "triton_to_dense": statistics.median(r["triton"] / r["dense"] for r in rounds),
        "gather_to_dense": statistics.median(r["gather"] / r["dense"] for r in rounds),
        "triton_to_read_limit": triton_s / (case.kv_bytes / bytes_per_s),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--out", type=Path, help="where the rows go as JSON")
    given = options.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        bytes_per_s = read_bandwidth(device)
        print(f"{torch.cuda.get_device_name(device)}, reads {bytes_per_s / 1e12:.2f} TB/s")
        decodes = [(batch, context - 1, 1) for batch in (1, 8, 32) for context in (512, 4096, 16384)]
        chunks = [(1, past, 512) for past in (0, 4096, 16384)]
        rows = []
        for batch, past, new in decodes + chunks:
            rows.append(measure(Case(batch, past, new, device), device, bytes_per_s))
            print("  ".join(f"{name} {figure:.4g}" for name, figure in rows[-1].items()))
    if given.out is not None:
        found = {"device": torch.cuda.get_device_name(device), "read_bytes_per_s": bytes_per_s, "rows": rows}
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
