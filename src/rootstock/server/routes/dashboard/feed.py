"""The live feed of the dashboard: one snapshot a second of one engine, for all pages that watch it.

No work is done while no page watches. Every page gets the sections that have changed since its last event; of
requests and misses, the entries that have changed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rootstock.cache.stats import PoolUsage
from rootstock.cache.volatile import VolatileSpan
from rootstock.engine.activity import LiveRequest, PromptMiss
from rootstock.engine.engine import Engine
from rootstock.engine.stats import Health
from rootstock.engine.tiers.connector import TierStats
from rootstock.errors import RootstockError
from rootstock.server.routes.dashboard.views import (
    Names,
    Texts,
    View,
    health_json,
    misses_json,
    pool_json,
    rates_json,
    requests_json,
    volatile_json,
)
from rootstock.server.wire.api_call import Json

EVERY_S = 1.0
MAX_VIEWERS = 32
MAX_VIEWERS_OF_TENANT = 8  # the others stay for the operator and further tenants
# Streams that the server's own page has not asked for. A page of another site can make a browser ask for some: it
# must leave places to those who watch.
MAX_STRANGERS = 4
KEEP_ALIVE_S = 10.0
LONGEST_S = 3600.0  # of one stream; the browser connects again
_PATIENCE_S = 0.25  # for a figure of the engine's thread. A step may take longer: then the last one is shown.
_SLOW_EVERY = 5  # snapshots between two looks at the disk tier and the volatile spans
_BY_ID = ("requests", "misses")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an engine at one moment, before it is divided among views."""

    at: float
    health: Health
    live: list[LiveRequest]
    ended: list[LiveRequest]
    misses: list[PromptMiss]
    pool: PoolUsage | None  # None: the engine has not answered yet
    tier: TierStats | None
    volatile: list[VolatileSpan]


@dataclass(slots=True)
class FeedCost:
    """The work of a feed since its start."""

    snapshots: int = 0
    seconds: float = 0.0  # on all threads


class Feed:
    """The feed of one engine. Used on an event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        names: Names,
        texts: Texts,
        every_s: float = EVERY_S,
        most: int = MAX_VIEWERS,
        server: Callable[[View], Json] = lambda view: {},
    ) -> None:
        """`server` returns the section that is of the whole server, for a view."""
        self._engine = engine
        self._server = server
        self._names = names
        self._texts = texts
        self._every_s = every_s
        self._most = most
        self._viewers: Counter[View] = Counter()
        self._strangers = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._snapshot: Snapshot | None = None
        self._sections: dict[View, Json] = {}  # of the snapshot
        self._engine_figures: _EngineFigures | None = None
        self.cost = FeedCost()

    @property
    def viewers(self) -> int:
        return self._viewers.total()

    def is_full_for(self, view: View, *, is_page: bool = True) -> bool:
        """Returns whether no further page with this view may watch, or no stranger."""
        if not is_page and self._strangers >= MAX_STRANGERS:
            return True
        own = self._most if view.is_all else MAX_VIEWERS_OF_TENANT
        return self.viewers >= self._most or self._viewers[view] >= own

    async def events(
        self, view: View, may_go_on: Callable[[], bool], *, is_page: bool = True
    ) -> AsyncGenerator[str, None]:
        """Yields the text of server-sent events until the engine stops or `may_go_on` returns False.

        `is_page`: the server's own page has asked for them.
        """
        if self.is_full_for(view, is_page=is_page):
            yield event_text({"full": True})
            return
        self._viewers[view] += 1
        self._strangers += not is_page
        try:
            self._start()
            shown: Json = {}
            began = sent = time.monotonic()
            yield f"retry: {int(2 * self._every_s * 1000)}\n\n"
            while may_go_on() and time.monotonic() - began < LONGEST_S:
                changed = self._changed
                if self._snapshot is not None:
                    sections = self._sections_of(view)
                    told = difference(shown, sections)
                    shown = sections
                    if told or time.monotonic() - sent >= KEEP_ALIVE_S:
                        sent = time.monotonic()
                        yield event_text({"at": round(self._snapshot.at, 3), **told})
                    if not self._snapshot.health.alive:
                        return
                await changed.wait()
        finally:
            self._viewers[view] -= 1
            self._strangers -= not is_page
            self._viewers = +self._viewers
            if not self._viewers:
                self._stop()

    # ------------------------------------------------------------------------------------ one snapshot

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._changed = asyncio.Event()
            self._engine_figures = _EngineFigures(self._engine)
            self._task = asyncio.create_task(self._run(self._engine_figures))

    def _stop(self) -> None:
        """Ends the work, now that no page watches."""
        if self._task is not None:
            self._task.cancel()
        if self._engine_figures is not None:
            self._engine_figures.close()
        self._task, self._snapshot, self._engine_figures = None, None, None
        self._sections.clear()

    async def _run(self, figures: _EngineFigures) -> None:
        while True:
            began = time.perf_counter()
            await figures.renew(_PATIENCE_S)
            work = time.perf_counter()
            engine = self._engine
            self._snapshot = Snapshot(
                engine.now(),
                engine.health(),
                engine.requests(),
                engine.parts.activity.latest_ended(),
                engine.parts.activity.latest_misses(),
                figures.pool,
                figures.tier,
                figures.volatile,
            )
            self._sections.clear()
            self.cost.snapshots += 1
            self.cost.seconds += time.perf_counter() - work + figures.take_seconds()
            self._wake()
            await asyncio.sleep(max(0.05, self._every_s - (time.perf_counter() - began)))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _sections_of(self, view: View) -> Json:
        """Returns the sections of the snapshot for a view: computed once for all pages with that view."""
        found = self._sections.get(view)
        if found is None:
            began = time.perf_counter()
            found = self._sections[view] = self._divide(view)
            self.cost.seconds += time.perf_counter() - began
        return found

    def _divide(self, view: View) -> Json:
        snapshot = self._snapshot
        assert snapshot is not None
        names, texts = self._names, self._texts
        sections: Json = {
            "health": health_json(snapshot.health),
            "rates": rates_json(self._engine.parts.activity, view),
            "requests": requests_json(snapshot.live, snapshot.ended, view, names),
            "open": sum(view.shows(request.salt) for request in snapshot.live),
            "server": self._server(view),
            "misses": misses_json(snapshot.misses, view, names, texts),
            "volatile": volatile_json(snapshot.volatile, view, names, texts),
        }
        if view.is_all and snapshot.pool is not None:  # the pools' figures are of all tenants
            sections["pool"] = pool_json(snapshot.pool, snapshot.tier)
        return sections


@dataclass(slots=True)
class _EngineFigures:
    """Figures that only the engine's thread can give. A long step delays them, and nothing else."""

    engine: Engine
    pool: PoolUsage | None = None
    tier: TierStats | None = None
    volatile: list[VolatileSpan] = field(default_factory=list)
    _asked: asyncio.Future[None] | None = None
    _seconds: float = 0.0
    _count: int = 0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rootstock-dashboard"))

    async def renew(self, within_s: float) -> None:
        """Asks for new figures, and waits for them for a short time. An earlier question is waited for first."""
        if self._asked is None:
            self._asked = asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
        done, _ = await asyncio.wait({self._asked}, timeout=within_s)
        if done:
            asked, self._asked = self._asked, None
            asked.result()

    def _ask(self) -> None:
        is_slow_one = self._count % _SLOW_EVERY == 0
        self._count += 1
        engine = self.engine
        try:
            connector = engine.tier_connector
            space = None if connector is None or not is_slow_one else connector.measure()

            def read() -> None:
                began = time.perf_counter()
                self.pool = engine.usage()
                if space is not None and connector is not None:
                    self.tier = connector.stats(space)
                if is_slow_one:
                    self.volatile = engine.volatile_spans()
                self._seconds += time.perf_counter() - began

            engine.call(read)
        except RootstockError:  # the engine has stopped: its health says so
            pass

    def take_seconds(self) -> float:
        """Returns the time of the engine's thread since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def difference(shown: Json, new: Json) -> Json:
    """Returns the sections that have changed. For sections keyed by id: changed entries and removed ids."""
    told: Json = {}
    for name, section in new.items():
        before = shown.get(name)
        if before == section:
            continue
        if name in _BY_ID:
            before = before or {}
            told[name] = {
                "set": {id: entry for id, entry in section.items() if before.get(id) != entry},
                "gone": [id for id in before if id not in section],
            }
            if name not in shown:
                told[name]["first"] = True
        else:
            told[name] = section
    return told


def event_text(data: dict[str, Any]) -> str:
    """Returns a server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
