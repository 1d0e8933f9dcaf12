"""Libraries over the oracle runtime, and one small model in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rootstock import LLM
from rootstock.bench.tiny_model import TinyModelSpec, ensure_tiny_model
from rootstock.cache.families import Family, row_bytes
from rootstock.config import CacheConfig, EngineConfig
from rootstock.engine.build import assemble
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.runtime.base import Batch
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, FakeRuntime

# A second or two of a core: every answer depends on the whole context, and has words.
SMALL = TinyModelSpec(
    hidden_size=64, intermediate_size=128, layers=2, heads=2, kv_heads=1, corpus_lines=400, context_limit=2048
)


@dataclass
class Oracle:
    """A library whose answers are known from the tokens alone."""

    llm: LLM
    runtime: FakeRuntime
    codec: ByteTokenizer

    def answer(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """The greedy answer, if no token of it ends it."""
        import numpy as np

        so_far = [int(token) for token in tokens]
        for _ in range(count):
            so_far.append(int(self.runtime.expected_logits(np.array(so_far, np.int32)).argmax()))
        return tuple(so_far[len(tokens) :])


@pytest.fixture
def oracle() -> Iterator[Callable[..., Oracle]]:
    """Makes libraries, and closes them after the test."""
    made: list[LLM] = []

    def make(
        families: Sequence[Family] = (FULL,),
        fault: Callable[[Batch], None] | None = None,
        defaults: SamplingDefaults | None = None,
        blocks: int = 400,
        **engine: int,
    ) -> Oracle:
        codec = ByteTokenizer()
        runtime = FakeRuntime(
            codec.vocab_size, 4096, families=families, eos_token_ids=codec.eos_token_ids, fault=fault
        )
        budget = blocks * sum(row_bytes(family, 8) for family in families)
        assembly = assemble(
            runtime, codec, CacheConfig(block_size=8, budget_bytes=budget), EngineConfig(**engine)
        )
        made.append(LLM.from_assembly(assembly, defaults))
        return Oracle(made[-1], runtime, codec)

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(SMALL, tmp_path_factory.mktemp("models"))
