"""Rootstock as a side of a comparison: an engine in this process, without a tokenizer or a server.

To time decodes of long contexts, contexts can be *filled* instead of computed: the engine admits, schedules and
publishes their prompts as always, but a forward of a prompt copies K and V of positions that were computed once.
Later steps are the engine's own, over distinct blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llamas import VOCAB

from asking import greedy
from engine_target import EngineTarget
from rootstock.bench.play import play
from rootstock.bench.workloads import Workload
from rootstock.cache import KVCache
from rootstock.cache.block_pool import NO_BLOCKS
from rootstock.cache.plan import HostBytes, RowPart
from rootstock.config import CacheConfig, EngineConfig, ModelConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event, Failed, TokenEvent
from rootstock.runtime.base import Batch, Logits
from rootstock.runtime.torch.runner import load_model

Clock = Callable[[], float]  # seconds


class Ours:
    def __init__(
        self,
        path: Path,
        dtype: str,
        gib: float,
        engine: EngineConfig | None = None,
        threads: int | None = None,
        clock: Clock = time.perf_counter,
        **options: str,
    ) -> None:
        """Loads the model. `options` are further fields of ModelConfig."""
        self._clock = clock
        config_of_model = ModelConfig(str(path), device="cpu", dtype=dtype, threads=threads, **options)  # type: ignore[arg-type]
        self.runtime = load_model(config_of_model)
        self.parameters = self.runtime.description.parameters
        config = CacheConfig()
        self.block_size = config.block_size
        self.cache = KVCache(self.runtime.description.families, int(gib * 1024**3), config.block_size)
        self.runtime.allocate(self.cache.pools.rows, config.block_size)
        self._filling = FillingRuntime(self.runtime, config.block_size)
        self.engine = Engine(self._filling, self.cache, engine or EngineConfig())

    def decode_step_s(self, prompts: np.ndarray, steps: int) -> float:
        """Returns the median seconds of steps in which every prompt has one token to decode."""
        got = self._submit(list(prompts), steps + 2)
        while min(map(len, got)) == 0:
            assert self.engine.step(), "nothing to do, and no first token"
        times = []
        for _ in range(steps):
            before = sum(map(len, got))
            began = self._clock()
            self.engine.step()
            times.append(self._clock() - began)
            assert sum(map(len, got)) == before + len(prompts), "not every sequence decoded in this step"
        while self.engine.step():
            pass
        return statistics.median(times)

    def first_token_s(self, prompt: np.ndarray) -> float:
        """Returns the seconds of the steps from a prompt's submission to its first token."""
        got = self._submit([prompt], 1)
        began = self._clock()
        while not got[0]:
            assert self.engine.step(), "nothing to do, and no first token"
        took = self._clock() - began
        while self.engine.step():
            pass
        return took

    def generate(self, prompts: list[np.ndarray], tokens: int) -> list[list[int]]:
        got = self._submit(prompts, tokens)
        while self.engine.step():
            pass
        return got

    def fill(self, prompts: np.ndarray, computed: np.ndarray) -> None:
        """Caches these prompts and no others, each in blocks of its own that are scattered at random over the pool,
        in ascending order. Their K and V are those of the prompt `computed`, again and again."""
        self.engine.clear_cache()
        self.generate([computed], 1)
        self._filling.keep_last(len(computed))
        self.engine.clear_cache()
        pool = self.cache.pools.full.pool
        withheld = np.random.default_rng(0).permutation(pool.allocate(pool.free_blocks))
        self._filling.fills = True
        for prompt in prompts:
            needed = -(-len(prompt) // self.block_size) + 1
            released, withheld = withheld[:needed], withheld[needed:]
            pool.unuse(np.sort(released))
            self.generate([prompt], 1)
        self._filling.fills = False
        pool.unuse(np.sort(withheld))

    def agents_s(self, workload: Workload) -> tuple[float, int, int]:
        """Plays a workload with nothing cached at the start. Returns seconds, computed and all prompt tokens."""
        self.engine.clear_cache()
        played = play(workload, EngineTarget(self.engine, VOCAB))
        assert all(sample.error is None for sample in played.flat)
        prompt_tokens = sum(sample.prompt_tokens or 0 for sample in played.flat)
        cached_tokens = sum(sample.cached_tokens or 0 for sample in played.flat)
        return played.wall_s, prompt_tokens - cached_tokens, prompt_tokens

    def _submit(self, prompts: list[np.ndarray], tokens: int) -> list[list[int]]:
        """Submits the prompts. Returns a list for each, to which the tokens of its answer will be added."""
        got: list[list[int]] = [[] for _ in prompts]

        def sink(answer: list[int], event: Event) -> None:
            assert not isinstance(event, Failed), event
            if isinstance(event, TokenEvent):
                answer.append(event.token)

        for prompt, answer in zip(prompts, got, strict=True):
            self.engine.submit(greedy(prompt, tokens), lambda event, answer=answer: sink(answer, event))
        return got


class FillingRuntime:
    """Runtime that, while `fills` is set, copies kept rows to the rows that a forward would write. For one family of
    full attention; all else is the runtime's own."""

    def __init__(self, runtime: Any, block_size: int) -> None:
        self._runtime = runtime
        self._block_size = block_size
        self._last_table = NO_BLOCKS
        self._kept: list[list[HostBytes]] = []  # of each kept block, its buffers
        self.fills = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def keep_last(self, tokens: int) -> None:
        """Copies the whole blocks of the last computed sequence, to fill others with."""
        blocks = self._last_table[: tokens // self._block_size]
        self._kept = [self._runtime.read(RowPart(0, int(block), self._block_size)) for block in blocks]

    def forward(self, batch: Batch) -> Logits:
        if not self.fills:
            self._last_table = batch.segments[-1].tables[0].copy()
            logits: Logits = self._runtime.forward(batch)
            return logits
        for segment in batch.segments:
            first, end = segment.past // self._block_size, segment.past + len(segment.tokens)
            for index in range(first, -(-end // self._block_size)):
                part = RowPart(0, int(segment.tables[0][index]), self._block_size)
                buffers = self._runtime.buffers(part)
                for buffer, kept in zip(buffers, self._kept[index % len(self._kept)], strict=True):
                    np.copyto(buffer, kept)
                self._runtime.place(part, buffers)
        scored = sum(segment.logits_to_keep for segment in batch.segments)
        return np.zeros((scored, self._runtime.description.vocab_size), np.float32)
