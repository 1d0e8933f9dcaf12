"""A4: 32 requests at one instant that share a 2,048-token prefix, on a real model: computed once, stored once.

Each runs twice, with sharing and without. At every step in which all 32 run, the pool's resident bytes are compared
with two ideals: *tokens*, each distinct token's K/V once, and *blocks*, the same rounded up to whole blocks for each
request's own part, which is the least that any pool of blocks can do. With tails and answers that end on block
boundaries the two agree at the last step; with random ones they differ by the unfilled ends of the last blocks.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import argument_parser, at_most, conclude, exactly

from asking import greedy
from checkpoints import save_plain
from rootstock.cache import KVCache
from rootstock.config import EngineConfig, ModelConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event, TokenEvent
from rootstock.runtime.torch.runner import TorchRuntime, load_model

REQUESTS = 32
PREFIX = 2048


@dataclass(frozen=True)
class Load:
    name: str
    block_size: int
    tails: tuple[int, ...]
    answer: int


@dataclass(frozen=True)
class Measured:
    computed_prompt_tokens: int
    most_bytes: int  # resident at any step
    peak_bytes: int  # resident at steps in which all run, of which there may be none without sharing
    ideal_tokens_bytes: int  # at the peak
    ideal_blocks_bytes: int
    answers: tuple[tuple[int, ...], ...]


def make_model(folder: Path) -> None:
    save_plain(
        folder, "llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip


def run(folder: Path, load: Load, reuse: bool) -> Measured:
    runtime: TorchRuntime = load_model(ModelConfig(str(folder), dtype="float32", device="cpu"))
    described = runtime.description
    token_bytes = sum(family.bytes_per_token for family in described.families)
    blocks = (PREFIX + max(load.tails) + load.answer + load.block_size) * REQUESTS // load.block_size
    cache = KVCache(described.families, blocks * load.block_size * token_bytes, load.block_size, reuse=reuse)
    runtime.allocate((cache.pool.total_blocks,), load.block_size)
    engine = Engine(runtime, cache, EngineConfig(max_batch=REQUESTS, chunk_tokens=512))
    rng = np.random.default_rng(5)
    prefix = rng.integers(0, 512, PREFIX)
    events: list[list[Event]] = [[] for _ in range(REQUESTS)]
    for i, tail in enumerate(load.tails):
        tokens = np.concatenate((prefix, [i], rng.integers(0, 512, tail - 1))).astype(np.int32)
        engine.submit(greedy(tokens, load.answer), events[i].append)
    peak, ideal_tokens, ideal_blocks = 0, 0, 0
    most = 0
    while engine.step():
        most = max(most, cache.stats().resident_bytes)
        if engine.scheduler.running == REQUESTS:
            resident = cache.stats().resident_bytes
            if resident >= peak:
                peak = resident
                own = [
                    s.lease.num_computed_tokens - PREFIX
                    for s in engine.scheduler.sequences()
                    if s.lease is not None
                ]
                size = load.block_size
                ideal_tokens = (PREFIX + sum(own)) * token_bytes
                ideal_blocks = (PREFIX // size + sum(-(-n // size) for n in own)) * size * token_bytes
    cache.check()
    decoded = REQUESTS * (load.answer - 1)  # the last token of an answer is sampled, not computed
    return Measured(
        engine.stats().counters.computed_tokens - decoded,
        most,
        peak,
        ideal_tokens,
        ideal_blocks,
        tuple(tuple(e.token for e in got if isinstance(e, TokenEvent)) for got in events),
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.parse_args()
    rng = np.random.default_rng(1)
    random_tails = tuple(int(n) for n in rng.integers(10, 150, REQUESTS))
    loads = (
        Load("aligned", 32, (64,) * REQUESTS, 33),  # 64 + 32 computed tokens of its own: three blocks
        Load("random", 32, random_tails, 24),
        Load("random_small_blocks", 4, random_tails, 24),
    )
    figures: dict[str, object] = {}
    bars = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder)
        for load in loads:
            shared, alone = run(folder, load, True), run(folder, load, False)
            least = PREFIX + sum(load.tails)
            name = load.name
            figures |= {
                f"{name}_computed_over_least": round(shared.computed_prompt_tokens / least, 4),
                f"{name}_computed_prompt_tokens": shared.computed_prompt_tokens,
                f"{name}_computed_without_sharing": alone.computed_prompt_tokens,
                f"{name}_resident_bytes": shared.peak_bytes,
                f"{name}_resident_without_sharing": alone.most_bytes,
                f"{name}_resident_over_ideal_blocks": round(shared.peak_bytes / shared.ideal_blocks_bytes, 4),
                f"{name}_resident_over_ideal_tokens": round(shared.peak_bytes / shared.ideal_tokens_bytes, 4),
                f"{name}_same_answers": shared.answers == alone.answers,
            }
            bars |= {
                f"{name}_computed_over_least": at_most(1.0),
                f"{name}_resident_over_ideal_blocks": at_most(1.02),
                f"{name}_same_answers": exactly(True),
            }
    bars["aligned_resident_over_ideal_tokens"] = at_most(1.02)
    bars["random_small_blocks_resident_over_ideal_tokens"] = at_most(1.02)
    for name, value in figures.items():
        print(f"{name:48} {value}")
    conclude("A4", figures, bars)


if __name__ == "__main__":
    main()
