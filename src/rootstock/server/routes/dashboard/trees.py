"""The picture of an engine's prefix tree: a walk over it that all pages share, as columns of bytes."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.keys import Namespace
from rootstock.cache.tree_snapshot import NodeDetail, TreeWalk
from rootstock.cache.types import Tokens
from rootstock.engine.engine import Engine
from rootstock.server.routes.dashboard.views import Names, View, namespace_json

SLICE_S = 0.002  # of processor time of the engine's thread between two steps
# Of a long step: a longer slice then delays it as little, and the walk ends sooner.
_SHARE_OF_STEP, _LONGEST_SLICE_S = 0.01, 0.02
LEAST_PAUSE_S, MOST_PAUSE_S = 2.0, 60.0
# Walks take 1 % of one processor at most. Time in which others have it does not count: on a busy machine a walk lasts
# longer, and costs no more.
PAUSE_PER_WORK = 100
PATIENCE_S = 3.0  # a page waits so long for a picture that is due, and gets the last one then
AGAIN_S = 1.0  # after a picture that was not ready in time
FORGET_S = 3 * MOST_PAUSE_S  # without a page that asks
_ALIGNMENT = 8
_LIVE, _CHECKPOINT = 1, 2  # a running request uses the node; it has a checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A finished walk as arrays, one entry for each node. A parent's row comes before its children's."""

    serial: int
    at: float  # by the engine's clock
    walk: TreeWalk
    number: NDArray[np.uint32]
    parent: NDArray[np.int32]  # -1: none, or one that the view does not show
    root: NDArray[np.uint16]
    start: NDArray[np.int32]
    end: NDArray[np.int32]
    memory: NDArray[np.float32]  # bytes of its positions and its checkpoints, without the nodes below
    idle_s: NDArray[np.float32]
    session: NDArray[np.uint32]
    flags: NDArray[np.uint8]  # _LIVE, _CHECKPOINT

    @staticmethod
    def of(walk: TreeWalk, serial: int, now: float) -> Picture:
        columns = walk.columns
        idle = np.maximum(now - np.array(columns.last_used), 0)
        start, end = np.array(columns.start, np.int32), np.array(columns.end, np.int32)
        memory = (end - start) * walk.token_bytes + np.array(columns.checkpoint_bytes)
        flags = (np.array(columns.leases) > 0) * _LIVE + (np.array(columns.checkpoints) > 0) * _CHECKPOINT
        return Picture(
            serial,
            now,
            walk,
            np.array(columns.number, np.uint32),
            np.array(columns.parent, np.int32),
            np.array(columns.root, np.uint16),
            start,
            end,
            memory.astype(np.float32),
            idle.astype(np.float32),
            (np.array(columns.session) & np.uint64(0xFFFFFFFF)).astype(np.uint32),
            flags.astype(np.uint8),
        )

    def encode(self, view: View, names: Names) -> bytes:
        """Returns the nodes that a view shows: the length of the head, the head as JSON, and the columns.

        All numbers are little-endian. The head names the columns in their order.
        """
        shown = np.array([view.shows(each.salt) for each in self.walk.namespaces], bool)
        rows = np.flatnonzero(shown[self.root]) if len(self.root) else np.zeros(0, np.int64)
        places_of_roots = (np.cumsum(shown) - 1).astype(
            np.uint16
        )  # a view does not tell how many others there are
        place = np.full(len(self.root) + 1, -1, np.int32)  # the last entry is for parent -1
        place[rows] = np.arange(len(rows))
        columns: list[tuple[str, str, NDArray[np.generic]]] = [
            ("number", "Uint32", self.number[rows]),
            ("parent", "Int32", place[self.parent[rows]]),
            ("start", "Int32", self.start[rows]),
            ("end", "Int32", self.end[rows]),
            ("bytes", "Float32", self.memory[rows]),
            ("idle", "Float32", self.idle_s[rows]),
            ("session", "Uint32", self.session[rows]),
            ("root", "Uint16", places_of_roots[self.root[rows]]),
            ("flags", "Uint8", self.flags[rows]),
        ]
        head = json.dumps(
            {
                "nodes": len(rows),
                "serial": self.serial,
                "at": round(self.at, 3),
                "truncated": self.walk.is_truncated,
                "roots": [
                    namespace_json(each, names) for each in self.walk.namespaces if view.shows(each.salt)
                ],
                "columns": [[name, kind] for name, kind, _ in columns],
            }
        ).encode()
        parts = [len(head).to_bytes(_ALIGNMENT, "little"), _padded(head)]
        parts += [_padded(_little(column)) for _, _, column in columns]
        return b"".join(parts)


def _little(column: NDArray[np.generic]) -> bytes:
    return (column if sys.byteorder == "little" else column.byteswap()).tobytes()


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % _ALIGNMENT)


def pause_s(work_s: float) -> float:
    """Returns the pause after a walk that took so much processor time."""
    return min(max(work_s * PAUSE_PER_WORK, LEAST_PAUSE_S), MOST_PAUSE_S)


class Trees:
    """The latest picture of one engine's tree. Used on an event loop's thread."""

    def __init__(self, engine: Engine, names: Names, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engine = engine
        self._names = names
        self._picture: Picture | None = None
        # Random, because a page may have a picture of an earlier engine or server.
        self._serial = secrets.randbits(48)
        # Numbers of nodes, also of pictures that were forgotten: a page may still ask about one of theirs.
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None
        self._forget: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the next walk may begin

    async def latest(self) -> Picture:
        """Returns a new picture if one is due and ready in time, else the last one. Raises EngineStopped."""
        self._forget_later()
        if self._task is None and self._clock() >= self._due:
            self._task = asyncio.create_task(self._renew())
            # The engine may stop while no page waits for the picture.
            self._task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=None if self._picture is None else PATIENCE_S)
            if self._picture is None:
                task.result()
        assert self._picture is not None
        return self._picture

    @property
    def next_s(self) -> float:
        """The time until a page should ask again."""
        return AGAIN_S if self._task is not None else max(AGAIN_S, self._due - self._clock())

    async def encoded(self, picture: Picture, view: View) -> bytes:
        """Returns the bytes of a picture for a view."""
        return await asyncio.to_thread(picture.encode, view, self._names)

    async def detail(self, number: int) -> NodeDetail | None:
        """Describes a node of the latest picture as it is now; None if it is gone."""
        picture = self._picture
        if picture is None:
            return None
        self._forget_later()
        return await asyncio.to_thread(self._engine.node_detail, picture.walk, number)

    async def prefix(self, number: int) -> tuple[Namespace, Tokens] | None:
        """Returns the namespace of a node of the latest picture, and all tokens up to its end; None if it is gone."""
        picture = self._picture
        if picture is None:
            return None
        self._forget_later()
        return await asyncio.to_thread(self._engine.node_prefix, picture.walk, number)

    async def _renew(self) -> None:
        try:
            previous = self._picture
            self._serial += 1
            made = await asyncio.to_thread(self._walk, previous, self._serial)
            self._picture = made
            self._due = self._clock() + pause_s(made.walk.work_s)
        finally:
            self._task = None

    def _walk(self, previous: Picture | None, serial: int) -> Picture:
        """Walks in slices between the engine's steps."""
        engine = self._engine
        walk = engine.walk_tree(self._numbers, None if previous is None else previous.walk)
        slice_s, goes_on = SLICE_S, True
        while goes_on:
            began = time.perf_counter()
            goes_on = engine.continue_walk(walk, slice_s)
            step_s = time.perf_counter() - began - slice_s
            slice_s = min(max(step_s * _SHARE_OF_STEP, SLICE_S), _LONGEST_SLICE_S)
            if goes_on:
                time.sleep(0)  # another thread may have the interpreter
        return Picture.of(walk, serial, engine.now())

    def _forget_later(self) -> None:
        if self._forget is not None:
            self._forget.cancel()

        this = weakref.ref(self)  # the timer must not keep the engine of an unloaded model

        def forget() -> None:
            trees = this()
            if trees is not None:
                trees._picture, trees._due = None, 0.0

        self._forget = asyncio.get_running_loop().call_later(FORGET_S, forget)
