"""The oracle's engine over a real disk tier, with its seams open: another file system, other clocks.

Put together as `engine.below` does it. The oracle computes in no time at all, so that loading would hardly ever be
worth it: each token that it computes takes 5 ms on the engine's clock, and none on the wall's.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rootstock.cache import KVCache
from rootstock.cache.families import Family, RecurrentState, SlidingWindow, row_bytes
from rootstock.cache.plan import Tokens
from rootstock.cache.tier_index import StoredIndex
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    Request,
    RequestId,
    SamplingParams,
    StopParams,
    TokenEvent,
)
from rootstock.engine.tiers.connector import Events, Space, TierConnector
from rootstock.runtime.base import Batch
from rootstock.testing.fake_runtime import FakeRuntime
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.tier import DiskTier
from rootstock.tiers.reader import TierReader
from rootstock.tiers.writer import TierWriter

COMPUTED_TOKEN_S = 5e-3
PATIENCE_S = 30.0  # for an event; longer means that a request hangs
QUEUE_BYTES = 64 * 2**20


class Hangs(Exception):
    """A request got no event for half a minute."""


@dataclass
class Asked:
    """A request and what it was answered."""

    prompt: Tokens
    answer: list[int] = field(default_factory=list)
    end: Event | None = None
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    @property
    def cached(self) -> int:
        return self.end.usage.cached_tokens if isinstance(self.end, Finished) else 0

    def wait(self) -> Asked:
        while self.end is None:
            try:
                self.take(self.events.get(timeout=PATIENCE_S))
            except queue.Empty:
                raise Hangs from None
        return self

    def take(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.answer.append(event.token)
        elif isinstance(event, Finished | Failed | Aborted):
            self.end = event


@dataclass(frozen=True)
class Shape:
    """What must be the same in every life of a directory, and how large memory and disk are."""

    families: tuple[Family, ...]
    block_size: int
    budget_bytes: int
    cap_bytes: int
    segment_bytes: int
    through: bool
    vocab: int = 97


class Life:
    """One engine, from its start to its stop."""

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        *,
        files: Files | None = None,
        disk_clock: Callable[[], float] = time.monotonic,
        waiting_clock: Callable[[], float] = time.monotonic,
        config: EngineConfig | None = None,
    ) -> None:
        self.shape = shape
        self.computed_s = 0.0
        self.runtime = FakeRuntime(shape.vocab, families=shape.families, fault=self._compute)
        stored = StoredIndex(shape.families, shape.block_size)
        self.cache = KVCache(
            shape.families, shape.budget_bytes, shape.block_size, stored=stored, through=shape.through
        )
        self.runtime.allocate(self.cache.rows, shape.block_size)
        events = Events()
        disk = DiskTier.open(
            folder,
            shape.cap_bytes,
            segment_bytes=shape.segment_bytes,
            clock=disk_clock,
            gone=events.gone,
            files=files,
        )
        assert isinstance(disk, DiskTier), disk
        self.disk = disk
        self.mover = TierWriter(disk, QUEUE_BYTES)
        self.loader = TierReader(self.mover.load)
        config = config or EngineConfig(max_batch=8, chunk_tokens=32)
        self.tiering = TierConnector(
            self.runtime,
            self.cache,
            disk,
            self.mover,
            self.loader,
            events,
            config.chunk_tokens,
            QUEUE_BYTES,
            waiting_clock,
            disk,
            lambda: Space(disk.usage().total_bytes, shape.cap_bytes),
        )
        self.engine = Engine(self.runtime, self.cache, config, clock=self._now, tier_connector=self.tiering)
        self.engine.start()
        self._count = 0

    def _compute(self, batch: Batch) -> None:
        self.computed_s += COMPUTED_TOKEN_S * batch.new_tokens

    def _now(self) -> float:
        return time.monotonic() + self.computed_s

    def ask(self, prompt: Tokens, max_tokens: int) -> Asked:
        """Submits, and does not wait."""
        asked = Asked(prompt)
        self._count += 1
        request = Request(
            RequestId(f"r{self._count}"),
            prompt,
            SamplingParams(temperature=0.0, seed=0),
            StopParams(max_tokens=max_tokens, ignore_eos=True),
        )
        self.engine.submit(request, asked.events.put)
        return asked

    def ask_all(self, prompts: Sequence[Tokens], max_tokens: int) -> list[Asked]:
        """All at once; waits for all."""
        return [asked.wait() for asked in [self.ask(prompt, max_tokens) for prompt in prompts]]

    def settle(self) -> None:
        """Returns when all that the last answers gave to the disk has been stored or refused."""
        self.engine.call(lambda: None)  # a step hands on what is to be stored after it has told the answer
        self.mover.drain()

    def stop(self) -> None:
        """What only memory has goes down."""
        self.engine.stop()


class Truth:
    """What the oracle must answer, by the tokens alone. Remembers what it was asked."""

    def __init__(self, families: tuple[Family, ...], vocab: int) -> None:
        self._runtime = FakeRuntime(vocab, families=families)
        self._known: dict[bytes, int] = {}

    def answer(self, prompt: Tokens, count: int) -> list[int]:
        tokens = prompt.tolist()
        for _ in range(count):
            key = np.array(tokens, np.int32).tobytes()
            if key not in self._known:
                logits = self._runtime.expected_logits(np.array(tokens, np.int32))
                self._known[key] = int(np.argmax(logits))
            tokens.append(self._known[key])
        return tokens[len(prompt) :]


def bytes_for(families: Sequence[Family], block_size: int, tokens: int, requests: float) -> int:
    """A budget in which so many requests of so many tokens have room at once, or a bit less than one more."""
    blocks = -(-tokens // block_size) + 1
    total = 0
    for family in families:
        if isinstance(family, RecurrentState):
            total += 4 * row_bytes(family, block_size)
        elif isinstance(family, SlidingWindow):
            most = min(blocks, -(-(family.window + 1) // block_size) + 3)
            total += 2 * most * row_bytes(family, block_size)
        else:
            total += blocks * row_bytes(family, block_size)
    return int(total * max(1.0, requests))
