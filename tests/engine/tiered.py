"""An engine above a directory on disk, whose stores and loads a test can hold up."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.helpers import Bench, Client, Families, of_kinds
from rootstock.cache.keys import Identity
from rootstock.cache.types import Tokens
from rootstock.config import TierConfig
from rootstock.engine.cost_model import LoadSpeed, PrefillSpeed
from rootstock.engine.tiers.connector import TierConnector, TierStats
from rootstock.testing.fake_runtime import FULL, STATE, chunked, window
from rootstock.tiers.base import Buffer, LoadResult, Record, StoreOutcome
from rootstock.tiers.disk.tier import DiskTier
from rootstock.tiers.reader import TierReader
from rootstock.tiers.writer import TierWriter
from tiers.helpers import Clock
from waiting import wait_for

MIB = 2**20
KINDS: list[Families] = [
    (FULL,),
    (FULL, window(7)),
    (FULL, STATE),
    (FULL, window(5), window(24), chunked(8), STATE),
    (window(16),),
    (STATE,),
]
PROMPT = list(range(62))
OTHER = [90, *range(1, 62)]  # begins with another token


kinds = of_kinds(KINDS)


def options(**options: Any) -> pytest.MarkDecorator:
    """Gives the fixtures `bench` and `stored` these options of `Tiered`."""
    return pytest.mark.parametrize("options", [options], ids=["-".join(options)])


class Gate:
    """A gate that callers pass while it is open, and wait at while it is closed."""

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
    """An engine above a disk directory.

    Its clock stands still, so that forwards tell no speed and every tier hit is loaded. Each record takes the reader
    0.1 ms, however busy the machine is.
    """

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
        self._options = {"cap_bytes": cap_bytes, "write": write, "queue_bytes": queue_bytes, **options}
        tier = TierConfig(folder, cap_bytes, write, queue_bytes=queue_bytes)
        ticks = itertools.count()
        super().__init__(tier=tier, clock=self.clock, load_clock=lambda: next(ticks) * 1e-4, **options)
        self.stores, self.loads = Gate(), Gate()
        if self.connector._disk is not None:
            _put_gates(self.connector._disk, self.stores, self.loads)
        self.reader.drain()  # of the probe of the directory's speed
        self.connector.follow()

    def __enter__(self) -> Tiered:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stores.open()
        self.loads.open()
        self.engine.stop()

    def restart(self, **changed: Any) -> None:
        """Stops the engine, and starts another one with changed options above the same directory."""
        self.__exit__()
        Tiered.__init__(self, self.folder, **{**self._options, **changed})

    def crash(self) -> None:
        """Ends without writing the rows that only memory has."""
        self.connector.close()

    @property
    def connector(self) -> TierConnector:
        assert self.engine.tier_connector is not None
        return self.engine.tier_connector

    @property
    def reader(self) -> TierReader:
        return self.connector._reader

    @property
    def writer(self) -> TierWriter:
        return self.connector._writer

    @property
    def disk(self) -> DiskTier:
        assert self.connector._disk is not None
        return self.connector._disk

    @property
    def tier(self) -> TierStats:
        self.connector.follow()
        return self.connector.stats(self.connector.measure())

    def answer(self, tokens: Sequence[int] | Tokens, max_tokens: int | None = 4, **request: object) -> Client:
        """Submits a request, runs to the end and checks the answer."""
        client = super().answer(tokens, max_tokens, **request)
        self.expect(client)
        return client

    def forget(self) -> None:
        """Moves the whole cache from memory to the disk."""
        self.connector.flush()
        self.cache.clear()
        self.connector.follow()

    def begin_load(self, tokens: Sequence[int], max_tokens: int = 4) -> Client:
        """Submits a request whose load the disk holds up."""
        self.loads.close()
        client = self.ask(tokens, max_tokens)
        self.engine.step()
        self.loads.wait_until_reached()
        return client

    def end_loads(self) -> None:
        self.loads.open()
        self.reader.drain()
        self.engine.step()

    def finish(self, *clients: Client) -> None:
        """Lets loads go on, runs to the end and checks the answers."""
        self.loads.open()
        self.run()
        self.expect(*clients)

    @staticmethod
    def when_reached(gate: Gate, function: Callable[[], None]) -> threading.Thread:
        def wait() -> None:
            gate.wait_until_reached()
            function()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def set_speeds(self, prefill_tokens_per_s: float, load_bytes_per_s: float) -> None:
        """Sets the measured speeds to these alone."""
        self.reader.drain()
        self.connector.follow()
        self.connector.load_or_recompute.prefill_speed = PrefillSpeed()
        self.connector.load_or_recompute.prefill_speed.observe([(0, 1000)], 1000 / prefill_tokens_per_s)
        self.connector.load_or_recompute.load_speed = LoadSpeed()
        self.connector.load_or_recompute.load_speed.observe(1, 1000, 1000 / load_bytes_per_s)


def opened_by(gate: Gate, owner: object, method: str) -> None:
    """Opens the gate when the method is called, which then waits for the calls that the gate held up."""
    call = getattr(owner, method)

    def opening(*arguments: object) -> object:
        gate.open()
        return call(*arguments)

    setattr(owner, method, opening)


def _put_gates(disk: DiskTier, stores: Gate, loads: Gate) -> None:
    store, load = disk.store, disk.load

    def gated_store(records: Sequence[Record]) -> list[StoreOutcome]:
        stores.go_through()
        return store(records)

    def gated_load(
        identity: Identity, into: Sequence[Buffer] | None = None, then: Identity | None = None
    ) -> LoadResult:
        loads.go_through()
        return load(identity, into, then)

    disk.store, disk.load = gated_store, gated_load  # type: ignore[method-assign]
