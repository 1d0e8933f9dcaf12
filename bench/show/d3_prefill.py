"""D3: prefill of a 600M Llama in bfloat16 against the dense forward: 2,048 tokens cold, and 512 new tokens
after 4,096 that are cached.

Ours is the time of a real engine's steps from the submission of a prompt to its first token, as configured by
default: schedule, plans, forward, sampling, publishing. Theirs is one call of the model with sdpa attention and a
DynamicCache, which is empty or holds the 4,096 (by filling, see our_side.py), logits of the last position only; the
512 new ones are attended under the model's own causal mask. Every prompt is new. How rounds count: rounds.py.

Further figures: the runtime's forward of the 2,048 tokens in one chunk, unlike the engine's; and the attention of one
layer alone, ours over scattered blocks against transformers' sdpa function over dense K and V.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import at_most, conclude
from dense_side import Clock, Dense
from llamas import random_prompts, save_model
from neighbours import Neighbours
from our_side import Ours
from rounds import ANYHOW, QUIET, comparison_options, in_turn, parse_comparison
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rootstock.kernels.api import Scores
from rootstock.kernels.cpu.prefill_attention import with_prefill_loops
from rootstock.kernels.spans import Span
from rootstock.kernels.torch.sliced_attention import SlicedAttention
from rootstock.runtime.base import Batch, Segment

SHOW = "D3"
MODEL = "600m"
COLD_TOKENS = 2048
CACHED_TOKENS = 4096
NEW_TOKENS = 512
COMPUTED_TOKENS = 512  # with which the cached context is filled
ROUNDS = (3, 7)  # least and most
SECONDS = 30.0  # of one comparison, after which no round begins that is not required
ATTENTION_ROUNDS = (7, 15)
POOL_TOKENS = 64 * 1024
BAR, GOAL = 1.05, 0.90


def main() -> None:
    options = comparison_options(__doc__, MODEL)
    given, (least, most), figures = parse_comparison(options, ROUNDS)
    clock, quiet = (time.thread_time, ANYHOW) if given.cpu_time else (time.perf_counter, QUIET)
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = save_model(given.model, Path(folder))
        prefill = Prefill(path, clock)
        for name, ours, dense in (
            ("cold_2048", prefill.ours_cold_s, prefill.dense_cold_s),
            ("cold_2048_one_forward", prefill.ours_one_forward_s, prefill.dense_cold_s),
            ("512_on_4096", prefill.ours_cached_s, prefill.dense_cached_s),
        ):
            ours()
            dense()  # first uses allocate
            figures |= in_turn(name, ours, dense, (least, most), SECONDS, quiet).figures(name)
        for name, past, new in (("cold_2048", 0, COLD_TOKENS), ("512_on_4096", CACHED_TOKENS, NEW_TOKENS)):
            layer = OneLayer(prefill.dense.config, prefill.ours.block_size, past, new, clock)
            layer.ours_s()
            layer.dense_s()
            rounds = in_turn(f"attention_{name}", layer.ours_s, layer.dense_s, ATTENTION_ROUNDS, 1.0, quiet)
            figures |= rounds.figures(f"attention_{name}")
    figures["others_share"] = neighbours.share()
    barred = ("ratio_cold_2048", "ratio_512_on_4096")
    figures |= {name.replace("ratio", "at_goal"): figures[name] <= GOAL for name in barred}
    conclude(SHOW, figures, {name: at_most(BAR) for name in barred})


class Prefill:
    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        self.dense = Dense(path, torch.bfloat16, clock)
        config = self.dense.config
        kv_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        self.ours = Ours(path, "bfloat16", gib=POOL_TOKENS * kv_bytes / 2**30, clock=clock)
        computed = random_prompts(1, COMPUTED_TOKENS, seed=1)[0]
        self.dense.keep(computed)
        self._cached = random_prompts(1, CACHED_TOKENS)[0]
        self.ours.fill(self._cached[None], computed)
        self._holding = self.dense.holding(1, CACHED_TOKENS)
        self._seed = 1

    def ours_cold_s(self) -> float:
        return self.ours.first_token_s(self._new(COLD_TOKENS))

    def ours_one_forward_s(self) -> float:
        """Times the runtime alone, on blocks that are free before and after."""
        pool = self.ours.cache.pools.full.pool
        table = pool.allocate(COLD_TOKENS // self.ours.block_size)
        batch = Batch([Segment(self._new(COLD_TOKENS), 0, (table,), logits_to_keep=1)])
        began = self._clock()
        self.ours.runtime.forward(batch)
        took = self._clock() - began
        pool.unuse(table)
        return took

    def dense_cold_s(self) -> float:
        return self.dense.first_token_s(self._new(COLD_TOKENS), DynamicCache(config=self.dense.config))

    def ours_cached_s(self) -> float:
        return self.ours.first_token_s(np.concatenate([self._cached, self._new(NEW_TOKENS)]))

    def dense_cached_s(self) -> float:
        took = self.dense.first_token_s(self._new(NEW_TOKENS), self._holding)
        self._holding.crop(-NEW_TOKENS)
        return took

    def _new(self, tokens: int) -> np.ndarray:
        self._seed += 1
        return random_prompts(1, tokens, self._seed)[0]


class OneLayer:
    """Attention of `new` tokens after `past`. The pool's blocks are scattered at random, dense K and V contiguous."""

    def __init__(self, config: Any, block_size: int, past: int, new: int, clock: Clock) -> None:
        self._clock = clock
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        rng = np.random.default_rng(0)
        blocks = (past + new) // block_size
        table = rng.permutation(2 * blocks)[:blocks].astype(np.int32)
        shape = (2 * blocks * block_size, kv_heads, dim)
        self._pool_keys, self._pool_values = (torch.randn(shape).to(torch.bfloat16) for _ in range(2))
        slots = torch.from_numpy(
            (table[:, None].astype(np.int64) * block_size + np.arange(block_size)).reshape(-1)
        )
        keys, values = self._pool_keys[slots], self._pool_values[slots]  # [past + new, kv_heads, dim]
        self._query = torch.randn(new, heads, dim).to(torch.bfloat16)
        self._new_key, self._new_value = keys[past:], values[past:]
        self._scale = dim**-0.5
        sliced = SlicedAttention(block_size, kv_heads * dim * keys.element_size())
        self._step = with_prefill_loops(block_size, sliced).prepare([Span(0, new, past, table)])
        self._dense_query, self._dense_keys, self._dense_values = (
            each.transpose(0, 1)[None].contiguous() for each in (self._query, keys, values)
        )
        self._module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
        # The model makes no mask where torch's causal attention is equal.
        seen = torch.arange(past + new)[None] <= torch.arange(past, past + new)[:, None]
        self._mask = seen[None, None] if past else None

    def ours_s(self) -> float:
        began = self._clock()
        self._step(
            self._query,
            self._new_key,
            self._new_value,
            self._pool_keys,
            self._pool_values,
            Scores(self._scale),
        )
        return self._clock() - began

    def dense_s(self) -> float:
        began = self._clock()
        sdpa_attention_forward(
            self._module,
            self._dense_query,
            self._dense_keys,
            self._dense_values,
            self._mask,
            scaling=self._scale,
        )
        return self._clock() - began


if __name__ == "__main__":
    main()
