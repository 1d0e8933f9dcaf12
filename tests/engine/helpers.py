"""An engine that a test drives step by step, on the oracle runtime by default, and clients that keep their events."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rootstock.cache import KVCache
from rootstock.cache.families import Family, row_bytes
from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig, TierConfig
from rootstock.engine.engine import Engine
from rootstock.engine.kv_budget import divided_rows
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.memory_watch import MemoryWatch
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    Request,
    RequestId,
    StopParams,
    TokenEvent,
)
from rootstock.engine.speculation.proposer import Proposer
from rootstock.engine.tiers.build import open_below, stored_index
from rootstock.errors import RootstockError
from rootstock.runtime.base import Batch, Runtime
from rootstock.testing.fake_runtime import FULL, FakeRuntime
from rootstock.text.tokenizer import ModelTokenizer

Families = tuple[Family, ...]
MlxKind = str  # of a tiny model: a key of `mlx_oracle.KINDS`

GREEDY = ResolvedSampling(temperature=0.0)
_ids = itertools.count()


def of_kinds(families: Sequence[Families | MlxKind]) -> pytest.MarkDecorator:
    """Runs a test on models of each of these combinations of families, and on tiny models on the MLX runtime."""
    return pytest.mark.parametrize(
        "families",
        families,
        ids=lambda fs: f"mlx {fs}" if isinstance(fs, str) else "+".join(f.name for f in fs),
    )


def numbers(seed: int, count: int, vocab_size: int = 97) -> list[int]:
    """Returns random tokens."""
    found: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return found


class Bench:
    """An engine and its parts. `runtime` replaces the oracle, and a name in place of `families` does so by a tiny
    model on the MLX runtime."""

    def __init__(
        self,
        blocks: int = 200,
        block_size: int = 4,
        *,
        vocab_size: int = 97,
        context_limit: int = 1 << 20,
        eos_token_ids: tuple[int, ...] = (),
        reuse: bool = True,
        fault: Callable[[Batch], None] | None = None,
        tokenizer: ModelTokenizer | None = None,
        families: Sequence[Family] | MlxKind = (FULL,),
        weights: str = "fake",
        tier: TierConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        load_clock: Callable[[], float] = time.perf_counter,
        proposer: Proposer | None = None,
        verify_hits: float = 0.0,
        runtime: Runtime | None = None,
        memory_watch: MemoryWatch | None = None,
        rows: Sequence[int] | None = None,
        **config: Any,
    ) -> None:
        self.batches: list[Batch] = []
        self.ended: list[Client] = []  # in the order of their ends

        def record(batch: Batch) -> None:
            self.batches.append(batch)
            if fault is not None:
                fault(batch)

        if isinstance(families, str):
            runtime = _on_mlx(families, vocab_size, eos_token_ids, record)
            families = ()
        self.runtime: Any = runtime or FakeRuntime(
            vocab_size,
            context_limit,
            families=families,
            weights=weights,
            eos_token_ids=eos_token_ids,
            fault=record,
        )
        described = self.runtime.description
        families = described.families
        budget = blocks * sum(row_bytes(family, block_size) for family in families)
        if proposer is not None:
            config.setdefault("draft_tokens", 16)
        # One chunk size for all steps, so that a test knows the tokens of each step.
        config = {"idle_chunk_tokens": config.get("chunk_tokens", EngineConfig().chunk_tokens), **config}
        tier, engine = tier or TierConfig(), EngineConfig(**config)
        ticks = itertools.count()
        self.cache = KVCache(
            families,
            budget,
            block_size,
            reuse=reuse,
            clock=lambda: next(ticks) * 1e-3,  # eviction depends on the time of the last use
            stored=stored_index(self.runtime, tier, block_size),
            through=tier.disk_write == "through",
            stored_is_shared=tier.remote is not None,
            rows=rows if described.memory == "host" else divided_rows(families, budget, block_size),
            lazy_states=described.lazy_states,
            announces=engine.kv_events is not None,
        )
        self.runtime.allocate(self.cache.rows, block_size)
        tier_connector = open_below(self.runtime, self.cache, tier, engine.chunk_tokens, clock, load_clock)
        self.engine = Engine(
            self.runtime,
            self.cache,
            engine,
            tokenizer,
            clock,
            tier_connector,
            verify_hits=verify_hits,
            proposer=proposer,
            memory_watch=memory_watch,
        )

    def ask(self, tokens: Sequence[int] | Tokens, max_tokens: int | None = 4, **request: object) -> Client:
        client = Client(tokens, max_tokens, **request)

        def sink(event: Event) -> None:
            client.events.append(event)
            if isinstance(event, Finished | Failed | Aborted):
                self.ended.append(client)
                client.ended.set()

        self.engine.submit(client.request, sink)
        return client

    def answer(self, tokens: Sequence[int] | Tokens, max_tokens: int | None = 4, **request: object) -> Client:
        """Submits a request, runs to the end and returns its client."""
        client = self.ask(tokens, max_tokens, **request)
        self.run()
        return client

    def expect(self, *clients: Client) -> None:
        """Asserts that each client has its full greedy answer, which depends on its tokens alone."""
        for client in clients:
            max_tokens = client.request.stop.max_tokens
            assert max_tokens is not None
            assert client.finished.reason == "length"
            assert client.tokens == self.alone(client.request.tokens, max_tokens, client.request.adapter)

    def load_always(self) -> None:
        """Keeps the engine from computing what it could load from its tier, whatever either takes here."""
        connector: Any = self.engine.tier_connector
        connector.load_or_recompute.observe_forward = lambda segments, seconds: None

    def run(self, steps: int | None = None) -> None:
        """Runs so many steps, or to the end. A run to the end waits for loads, like the engine's thread."""
        done = 0
        while (steps is None or done < steps) and self._step(may_wait=steps is None):
            self.cache.check()
            self.engine.scheduler.check()
            done += 1

    def _step(self, may_wait: bool) -> bool:
        stalled = may_wait and self.engine.steps.is_stalled and self.engine.scheduler.has_work
        return self.engine.step(self.engine.next_command() if stalled else None)

    def end_of(self, prompt: Sequence[int] | range) -> int:
        """Returns where a request resumes that goes on from the end of an answered prompt, without its answer."""
        return len(prompt) - (self.cache.pools.states is not None)

    def alone(self, tokens: Sequence[int] | Tokens, count: int, adapter: str = "") -> list[int]:
        return alone(self.runtime, tokens, count, adapter)

    @property
    def steps(self) -> int:
        return self.engine.stats().counters.steps


def _on_mlx(
    kind: MlxKind, vocab_size: int, eos_token_ids: tuple[int, ...], fault: Callable[[Batch], None]
) -> Runtime:
    from mlx_oracle import MlxOracle, tiny_model  # here: most tests need no MLX

    return MlxOracle(tiny_model(kind, vocab_size), eos_token_ids=eos_token_ids, fault=fault)


def alone(runtime: FakeRuntime, tokens: Sequence[int] | Tokens, count: int, adapter: str = "") -> list[int]:
    """Computes the greedy continuation from the tokens alone, without a cache."""
    so_far = list(map(int, tokens))
    for _ in range(count):
        so_far.append(int(runtime.expected_logits(np.array(so_far, np.int32), adapter).argmax()))
    return so_far[len(tokens) :]


class Client:
    def __init__(self, tokens: Sequence[int] | Tokens, max_tokens: int | None = 4, **request: object) -> None:
        stop = request.pop("stop", None) or StopParams(max_tokens=max_tokens)
        assert isinstance(stop, StopParams)
        sampling = request.pop("sampling", GREEDY)
        assert isinstance(sampling, ResolvedSampling)
        self.request = Request(
            RequestId(str(request.pop("id", next(_ids)))),
            np.array(tokens, np.int32),
            sampling,
            stop,
            **request,  # type: ignore[arg-type]
        )
        self.events: list[Event] = []
        self.ended = threading.Event()

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, TokenEvent)]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, TokenEvent | Finished))

    @property
    def terminals(self) -> list[Event]:
        return [event for event in self.events if isinstance(event, Finished | Failed | Aborted)]

    @property
    def cached_tokens(self) -> int:
        return self.finished.usage.cached_tokens

    @property
    def error(self) -> RootstockError:
        """Returns the error of a request that failed."""
        (failed,) = self.terminals
        assert self.events[-1] is failed
        assert isinstance(failed, Failed), failed
        return failed.error

    @property
    def is_aborted(self) -> bool:
        return [type(event) for event in self.terminals] == [Aborted] and self.events[-1] is self.terminals[0]

    @property
    def finished(self) -> Finished:
        assert len(self.terminals) == 1, self.events
        assert self.events[-1] is self.terminals[0]
        assert isinstance(self.events[-1], Finished), self.events[-1]
        return self.events[-1]
