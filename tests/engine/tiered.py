"""An engine above a directory on disk, whose stores and loads a test can hold up."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.helpers import Bench, Client
from rootstock.cache.families import Family
from rootstock.cache.keys import Identity
from rootstock.cache.types import Tokens
from rootstock.config import TierConfig
from rootstock.engine.cost_model import LoadSpeed, PrefillSpeed
from rootstock.engine.tiers.connector import TierConnector, TierStats
from rootstock.testing.fake_runtime import FULL, STATE, chunked, window
from rootstock.tiers.base import Buffer, LoadResult, Record, StoreOutcome
from rootstock.tiers.disk.tier import DiskTier
from rootstock.tiers.writer import TierWriter
from tiers.helpers import Clock
from waiting import wait_for

MIB = 2**20
KINDS: list[tuple[Family, ...]] = [
    (FULL,),
    (FULL, window(7)),
    (FULL, STATE),
    (FULL, window(5), window(24), chunked(8), STATE),
    (window(16),),
    (STATE,),
]
PROMPT = list(range(62))
OTHER = [90, *range(1, 62)]  # begins with another token


def of_kinds(families: Sequence[tuple[Family, ...]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("families", families, ids=lambda fs: "+".join(f.name for f in fs))


kinds = of_kinds(KINDS)


class Gate:
    """Whoever comes to it waits there while it is closed."""

    def __init__(self) -> None:
        self.passed = 0
        self._open = threading.Event()
        self._reached = threading.Event()
        self._open.set()

    def close(self) -> None:
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_until_reached(self) -> None:
        wait_for(self._reached)

    def go_through(self) -> None:
        self._reached.set()
        wait_for(self._open)
        self.passed += 1


class Tiered(Bench):
    """Time stands still for the engine, so that its forwards tell no speed: then whatever is found is loaded. Each
    record takes the loader 0.1 ms, however busy the machine is."""

    def __init__(
        self,
        folder: Path,
        *,
        cap_bytes: int = 16 * MIB,
        write: str = "back",
        queue_bytes: int = 64 * MIB,
        **options: Any,
    ) -> None:
        self.clock = Clock()
        self.folder = folder
        tier = TierConfig(folder, cap_bytes, write, queue_bytes=queue_bytes)
        ticks = itertools.count()
        super().__init__(tier=tier, clock=self.clock, load_clock=lambda: next(ticks) * 1e-4, **options)
        self.stores, self.loads = Gate(), Gate()
        if self.tiering._disk is not None:
            _put_gates(self.tiering._disk, self.stores, self.loads)
        self.tiering._reader.drain()  # it has looked how fast the directory is
        self.tiering.follow()

    def __enter__(self) -> Tiered:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stores.open()
        self.loads.open()
        self.engine.stop()

    def crash(self) -> None:
        """Memory is gone, and nothing of it is written down any more."""
        self.tiering.close()

    @property
    def tiering(self) -> TierConnector:
        assert self.engine.tier_connector is not None
        return self.engine.tier_connector

    @property
    def mover(self) -> TierWriter:
        return self.tiering._writer

    @property
    def disk(self) -> DiskTier:
        assert self.tiering._disk is not None
        return self.tiering._disk

    @property
    def tier(self) -> TierStats:
        self.tiering.follow()
        return self.tiering.stats(self.tiering.measure())

    def answer(self, tokens: Sequence[int] | Tokens, max_tokens: int = 4, **request: object) -> Client:
        """Asks, runs to the end, and compares with what the tokens alone say."""
        client = self.ask(tokens, max_tokens, **request)
        self.run()
        self.expect(client, max_tokens)
        return client

    def expect(self, client: Client, max_tokens: int = 4) -> None:
        assert client.finished.reason == "length"
        assert client.tokens == self.alone(client.request.tokens, max_tokens)

    def forget(self) -> None:
        """All that memory holds goes to the disk, and only there."""
        self.tiering.flush()
        self.cache.clear()
        self.tiering.follow()

    def begin_load(self, tokens: Sequence[int], max_tokens: int = 4) -> Client:
        """A request whose load is held up by the disk."""
        self.loads.close()
        client = self.ask(tokens, max_tokens)
        self.engine.step()
        self.loads.wait_until_reached()
        return client

    def client(self, tokens: Sequence[int]) -> Client:
        """One that asks for nothing yet."""
        return Client(tokens)

    @staticmethod
    def when_reached(gate: Gate, what: Callable[[], None]) -> threading.Thread:
        def wait() -> None:
            gate.wait_until_reached()
            what()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def end_loads(self) -> None:
        self.loads.open()
        self.tiering._reader.drain()
        self.engine.step()

    def set_speeds(self, prefill_tokens_per_s: float, load_bytes_per_s: float) -> None:
        """As if that had been measured, and nothing else."""
        self.tiering._reader.drain()
        self.tiering.follow()
        self.tiering.prefill_speed = PrefillSpeed()
        self.tiering.prefill_speed.observe([(0, 1000)], 1000 / prefill_tokens_per_s)
        self.tiering.load_speed = LoadSpeed()
        self.tiering.load_speed.observe(1, 1000, 1000 / load_bytes_per_s)


def opened_by(gate: Gate, owner: object, method: str) -> None:
    """The gate opens when the method is called, which then waits for what the gate held up."""
    call = getattr(owner, method)

    def opening(*arguments: object) -> object:
        gate.open()
        return call(*arguments)

    setattr(owner, method, opening)


def cached(client: Client) -> int:
    return client.finished.usage.cached_tokens


def _put_gates(disk: DiskTier, stores: Gate, loads: Gate) -> None:
    store, load = disk.store, disk.load

    def gated_store(records: Sequence[Record]) -> list[StoreOutcome]:
        stores.go_through()
        return store(records)

    def gated_load(identity: Identity, into: Sequence[Buffer] | None = None) -> LoadResult:
        loads.go_through()
        return load(identity, into)

    disk.store, disk.load = gated_store, gated_load  # type: ignore[method-assign]
