"""Libraries on the oracle runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from engine.helpers import alone
from rootstock import LLM
from rootstock.cache.families import Family, row_bytes
from rootstock.config import CacheConfig, EngineConfig
from rootstock.engine.build import assemble
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.runtime.base import Batch
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FULL, FakeRuntime


@dataclass
class Oracle:
    """A library whose answers are known from the tokens alone."""

    llm: LLM
    runtime: FakeRuntime
    tokenizer: ByteTokenizer

    def answer(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Computes the greedy answer, if no token of it ends it."""
        return tuple(alone(self.runtime, tokens, count))


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
        tokenizer = ByteTokenizer()
        runtime = FakeRuntime(
            PADDED_LOGITS, 4096, families=families, eos_token_ids=tokenizer.eos_token_ids, fault=fault
        )
        budget = blocks * sum(row_bytes(family, 8) for family in families)
        assembly = assemble(
            runtime, tokenizer, CacheConfig(block_size=8, budget_bytes=budget), EngineConfig(**engine)
        )
        made.append(LLM.from_assembly(assembly, defaults))
        return Oracle(made[-1], runtime, tokenizer)

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def one(oracle: Callable[..., Oracle]) -> Oracle:
    return oracle()
