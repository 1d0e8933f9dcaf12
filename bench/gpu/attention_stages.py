"""Attention through block tables in Triton: correct, and how fast.

Correctness: ragged batches against `kernels/reference.py`, long contexts against dense attention in float32.
Speed: blocks of 32 scattered at random over the pool, 32 query and 8 KV heads of 128 in bfloat16. Each way is
recorded as a CUDA graph over several layers, which together exceed the L2 cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from devices import Bench, as_graph, copy_bandwidth, read_bandwidth, seconds
from isolation import Row
from torch import Tensor

from kernels.batches import RaggedBatch, make_batch
from rootstock.cache.families import ChunkedAttention, SlidingWindow, TokenFamily
from rootstock.kernels import reference
from rootstock.kernels.api import Attention, Scores
from rootstock.kernels.cuda.triton_attention import TritonAttention
from rootstock.kernels.spans import EVERYTHING, Span
from rootstock.kernels.torch.gathered_attention import GatherAttention

BLOCK_SIZE, LEAST_SPLIT = 32, 256
BEYOND_CACHES = 512 << 20  # bytes
MOST_LAYERS = 64
MEMORY_SHARE = 0.8  # of the free memory
ROUNDS = 11

# Relative error in the Euclidean norm. K, V and Q are exact in float32 on both sides; the kernel rounds the weights
# and the result to the dtype of the pool.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


# ---- correctness


def reference_cases(interpreted: bool) -> dict[str, dict[str, Any]]:
    """Returns arguments of `make_batch` by name: decodes, chunks, and both in one step."""
    if interpreted:
        lengths = [(40, 1), (30, 9), (0, 5)]
        sizes: dict[str, Any] = {"block_size": 8, "head_dim": 16, "lengths": lengths}
    else:
        lengths = [(700, 1), (257, 1), (0, 1), (290, 40), (0, 65)]
        sizes = {"block_size": 32, "head_dim": 128, "lengths": lengths}
    gqa = {"q_heads": 32, "kv_heads": 8} if not interpreted else {"q_heads": 4, "kv_heads": 2}
    window, chunk = (
        SlidingWindow(1, 1, 10 if interpreted else 100),
        ChunkedAttention(1, 1, 16 if interpreted else 128),
    )
    plain = sizes | gqa
    half = {"dtype": torch.bfloat16}
    return {
        "bfloat16": plain | half,
        "float32": plain,
        "window": plain | half | {"family": window},
        "softcap": plain | half | {"softcap": 30.0},
        "sinks": plain | half | {"sinks": True},
        "window, softcap, sinks": plain | half | {"family": window, "softcap": 30.0, "sinks": True},
        "chunked attention": plain | half | {"family": chunk},
        "head_dim 64": plain | half | {"head_dim": 64},
        "head_dim 96": plain | half | {"head_dim": 96},
        "head_dim 256": plain | half | {"head_dim": 256, "q_heads": 8, "kv_heads": 4},
        "K of 192, V of 128": plain | half | {"head_dim": 192, "value_dim": 128, "q_heads": 8, "kv_heads": 8},
        "one KV head": plain | half | {"q_heads": 8, "kv_heads": 1},
        "group of 7": plain | half | {"q_heads": 14, "kv_heads": 2},
        "no groups": plain | half | {"q_heads": 4, "kv_heads": 4},
        "float16": plain | {"dtype": torch.float16},
        "block_size 16": plain | half | {"block_size": 16},
        "block_size 1": plain | half | {"block_size": 1},
    }


def attention_against_reference(bench: Bench) -> Iterator[Row]:
    for name, arguments in reference_cases(bench.interpreted).items():
        arguments = dict(arguments)
        dtype = arguments.setdefault("dtype", torch.float32)
        batch = make_batch(arguments.pop("lengths"), **arguments)
        expected = reference.attend(
            batch.query, batch.keys, batch.values, batch.spans, batch.scores, batch.family
        )
        attention = TritonAttention(batch.block_size, bench.device, 16 if bench.interpreted else LEAST_SPLIT)
        error = relative_error(_attend(attention, batch, bench.device).cpu(), expected)
        allowed = TOLERANCES[dtype]
        yield {"case": name, "error": error, "allowed": allowed, "ok": error <= allowed}


def _attend(attention: Attention, batch: RaggedBatch, device: torch.device) -> Tensor:
    query, key, value = (tensor.to(device) for tensor in (batch.query, batch.key, batch.value))
    keys, values = (pool.flatten(0, 1).to(device) for pool in (batch.keys, batch.values))
    sinks = batch.scores.sinks
    scores = replace(batch.scores, sinks=None if sinks is None else sinks.to(device))
    return attention.prepare(batch.spans, batch.family)(query, key, value, keys, values, scores)


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int


LLAMA = Heads(32, 8, 128)
TINY = Heads(4, 2, 16)


def attention_against_dense(bench: Bench) -> Iterator[Row]:
    """Checks long contexts, with and without windows, softcaps and sinks, against dense attention in float32."""
    variants: dict[str, tuple[TokenFamily, float | None, bool]] = {
        "full": (EVERYTHING, None, False),
        "window of 4096": (SlidingWindow(1, 1, 4096), None, False),
        "softcap": (EVERYTHING, 50.0, False),
        "sinks": (EVERYTHING, None, True),
        "chunks of 8192": (ChunkedAttention(1, 1, 8192), None, False),
    }
    shapes = [(1, 131071, 1), (8, 32767, 1), (128, 8191, 1), (128, 511, 1), (1, 130944, 128), (4, 16000, 512)]
    if bench.interpreted:
        shapes = [(1, 130, 1), (3, 70, 1), (1, 90, 40)]
        variants["window of 4096"] = (SlidingWindow(1, 1, 40), None, False)
        variants["chunks of 8192"] = (ChunkedAttention(1, 1, 40), None, False)
    for batch, past, new in shapes:
        for name, (family, softcap, with_sinks) in variants.items():
            heads = TINY if bench.interpreted else LLAMA
            case = Case(bench, batch, past, new, heads, layers=1)
            sinks = torch.randn(heads.query, device=bench.device, dtype=case.dtype) if with_sinks else None
            scores = Scores(heads.dim**-0.5, softcap, sinks)
            out = case.through(TritonAttention(BLOCK_SIZE, bench.device, LEAST_SPLIT), scores, family)()[0]
            errors = []
            for row in sorted({0, batch // 2, batch - 1}):
                expected = case.dense_rows(row, scores, family)
                errors.append(relative_error(out[row * new : (row + 1) * new], expected))
            allowed = TOLERANCES[case.dtype]
            yield {
                "case": name,
                "batch": batch,
                "context": past + new,
                "new": new,
                "error": max(errors),
                "allowed": allowed,
                "ok": max(errors) <= allowed,
            }
            del case, out


# ---- speed

Step = Callable[[], list[Tensor]]


class Case:
    """`batch` sequences of `past` positions and `new` further ones, in so many layers' pools."""

    dtype = torch.bfloat16

    def __init__(self, bench: Bench, batch: int, past: int, new: int, heads: Heads, layers: int) -> None:
        self.batch, self.past, self.new, self.heads = batch, past, new, heads
        self.device = bench.device
        self.blocks = -(-(past + new) // BLOCK_SIZE)  # of a sequence
        ids = np.random.default_rng(0).permutation(batch * self.blocks).astype(np.int32)
        self.tables = ids.reshape(batch, self.blocks)
        self.spans = [Span(row * new, new, past, table) for row, table in enumerate(self.tables)]
        self.query = self._draw(batch * new, heads.query)
        slots = batch * self.blocks * BLOCK_SIZE
        self.pools = [(self._draw(slots, heads.kv), self._draw(slots, heads.kv)) for _ in range(layers)]

    def _draw(self, rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, self.heads.dim, dtype=self.dtype, device=self.device)

    def through(self, attention: Attention, scores: Scores, family: TokenFamily = EVERYTHING) -> Step:
        """Returns a step that attends in all layers through the pools."""
        step = attention.prepare(self.spans, family)
        new = self.query[:, : self.heads.kv]  # unused: the pools hold the new positions
        return lambda: [step(self.query, new, new, *pools, scores) for pools in self.pools]

    def contiguous(self, pool: Tensor, rows: Sequence[int]) -> Tensor:
        """Gathers a pool [slots, kv_heads, dim] to [rows, kv_heads, past + new, dim]."""
        order = torch.from_numpy(self.tables[list(rows)].astype(np.int64)).to(self.device)
        blocks = pool.view(-1, BLOCK_SIZE, self.heads.kv, self.heads.dim)[order]
        return blocks.flatten(1, 2)[:, : self.past + self.new].transpose(1, 2).contiguous()

    def dense_rows(self, row: int, scores: Scores, family: TokenFamily) -> Tensor:
        """Computes the first layer's result for one sequence in float32: [new, q_heads, dim]."""
        keys, values = (self.contiguous(pool, [row])[0].float() for pool in self.pools[0])
        query = self.query[row * self.new : (row + 1) * self.new].float().transpose(0, 1)
        end, group = self.past + self.new, self.heads.query // self.heads.kv
        positions = torch.arange(end, device=self.device)
        out = []
        for first in range(0, self.new, 64):  # a few rows at once bound the memory of the scores
            own = range(self.past + first, min(self.past + first + 64, end))
            begins = torch.tensor([reference.first_seen(family, p) for p in own], device=self.device)
            seen = (positions <= torch.tensor(list(own), device=self.device)[:, None]) & (
                positions >= begins[:, None]
            )
            some = query[:, first : first + len(own)].unflatten(0, (self.heads.kv, group))
            score = torch.einsum("hgnd,hpd->hgnp", some, keys) * scores.scale
            if scores.softcap is not None:
                score = scores.softcap * torch.tanh(score / scores.softcap)
            score = score.masked_fill(~seen, float("-inf"))
            if scores.sinks is not None:
                sinks = scores.sinks.float().view(self.heads.kv, group, 1, 1)
                score = torch.cat([score, sinks.expand(*score.shape[:3], 1)], -1)
            weights = score.softmax(-1)[..., :end]
            out.append(torch.einsum("hgnp,hpd->hgnd", weights, values).flatten(0, 1).transpose(0, 1))
        return torch.cat(out)

    def densely(self) -> Step:
        """Returns a step of torch's scaled_dot_product_attention over contiguous K and V. For a chunk, K and V are
        repeated for every query head beforehand, so that flash attention is used."""
        rows = range(self.batch)
        dense = [tuple(self.contiguous(pool, rows) for pool in pools) for pools in self.pools]
        query = self.query.view(self.batch, self.new, self.heads.query, -1).transpose(1, 2)
        if self.new == 1:
            return lambda: [F.scaled_dot_product_attention(query, *kv, enable_gqa=True) for kv in dense]
        group = self.heads.query // self.heads.kv
        repeated = [tuple(tensor.repeat_interleave(group, 1) for tensor in kv) for kv in dense]
        if self.past == 0:
            return lambda: [F.scaled_dot_product_attention(query, *kv, is_causal=True) for kv in repeated]
        from torch.nn.attention.bias import causal_lower_right

        mask: Any = causal_lower_right(self.new, self.past + self.new)
        return lambda: [F.scaled_dot_product_attention(query, *kv, attn_mask=mask) for kv in repeated]


def decode_speed(bench: Bench) -> Iterator[Row]:
    batches, contexts = (1, 2, 4, 8, 16, 32, 64, 128), (512, 2048, 8192, 32768, 131072)
    if bench.interpreted:
        batches, contexts = (1, 3), (40, 90)
    copied, read = copy_bandwidth(bench), read_bandwidth(bench)
    yield {"copy_tb_per_s": copied / 1e12, "read_tb_per_s": read / 1e12}
    for context in contexts:
        for batch in batches:
            yield _timed(bench, batch, context - 1, 1, copied)


def prefill_speed(bench: Bench) -> Iterator[Row]:
    shapes = [(1, 0, 512), (1, 0, 2048), (1, 0, 8192), (1, 3584, 512), (1, 15872, 512), (1, 65024, 512)]
    shapes += [(1, 130560, 512), (8, 0, 1024), (8, 3072, 1024)]
    if bench.interpreted:
        shapes = [(1, 0, 20), (1, 40, 10)]
    copied = copy_bandwidth(bench)
    for batch, past, new in shapes:
        yield _timed(bench, batch, past, new, copied)


def _timed(bench: Bench, batch: int, past: int, new: int, copied: float) -> Row:
    """Times one shape by Triton, and by dense attention and by gathering where the memory suffices for copies."""
    heads = TINY if bench.interpreted else LLAMA
    end = past + new
    kv_bytes = 2 * batch * end * heads.kv * heads.dim * Case.dtype.itemsize  # of a layer
    row: Row = {"batch": batch, "context": end, "new": new, "kv_mib": kv_bytes / 2**20}
    bench.release_memory()
    room = MEMORY_SHARE * bench.free_bytes()
    if kv_bytes > room:
        return row | {"not_measured": "K and V exceed the device's memory"}
    layers = 1 if bench.interpreted else max(1, min(MOST_LAYERS, BEYOND_CACHES // kv_bytes))
    group = heads.query // heads.kv
    copies = (
        layers * (2 if new == 1 else 2 + group) + 1
    )  # pools, dense copies, and gathering's scratch memory
    scores = Scores(heads.dim**-0.5)
    case = Case(bench, batch, past, new, heads, layers)
    triton = case.through(TritonAttention(BLOCK_SIZE, bench.device, LEAST_SPLIT), scores)
    replays = {"triton": as_graph(bench, triton)}
    others: dict[str, Callable[[], Step]] = {}
    if copies * kv_bytes <= room:
        others["dense"] = case.densely
        if new == 1:
            others["gather"] = lambda: case.through(GatherAttention(BLOCK_SIZE, bench.device), scores)
    for name, make in others.items():
        try:
            other = make()
            if name == "dense":
                expected = other()[0].transpose(1, 2).reshape(-1, heads.query, heads.dim)
                error = relative_error(triton()[0], expected)
                row |= {"error": error, "ok": error <= 2 * TOLERANCES[Case.dtype]}  # both sides round
            replays[name] = as_graph(bench, other)
        except (RuntimeError, TypeError) as failure:  # torch refuses a shape: ours is timed all the same
            row[f"{name}_failed"] = str(failure).split("\n", 1)[0][:200]
    rounds = [{name: seconds(bench, replay) for name, replay in replays.items()} for _ in range(ROUNDS)]
    triton_s = statistics.median(each["triton"] for each in rounds) / layers
    seen = sum(past + i + 1 for i in range(new))
    row |= {
        "layers": layers,
        "triton_us": triton_s * 1e6,
        "share_of_copy": kv_bytes / triton_s / copied,
        "tflops": 4 * batch * heads.query * heads.dim * seen / triton_s / 1e12,
    }
    for name in [name for name in replays if name != "triton"]:
        row[f"{name}_us"] = statistics.median(each[name] for each in rounds) / layers * 1e6
        row[f"triton_to_{name}"] = statistics.median(each["triton"] / each[name] for each in rounds)
    return row
