"""The part that announces the blocks from which a request can resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rootstock.cache.kv_cache import KVCache
from rootstock.cache.resumable_blocks import BlockChange, BlocksCleared, ResumableBlocks
from rootstock.engine.parts import Part
from rootstock.engine.stats import KVEventStats
from rootstock.errors import InvalidOption
from rootstock.fleet_config import KVEventsConfig


class Publisher(Protocol):
    """The other end of the announcements. Its methods do not wait."""

    @property
    def stats(self) -> KVEventStats: ...
    def publish(self, changes: Sequence[BlockChange]) -> None: ...
    def close(self) -> None: ...


Put = Callable[[Sequence[BlockChange]], None]


class KVEvents(Part):
    """Announcement of an engine's changes after each step."""

    def __init__(
        self,
        cache: KVCache,
        run_soon: Callable[[Callable[[], None]], None],
        open_publisher: Callable[[KVEvents], Publisher],
    ) -> None:
        """`run_soon` queues a function for the engine's thread, from any thread."""
        self._cache = cache
        self._run_soon = run_soon
        self._publisher = open_publisher(self)

    @classmethod
    def open(
        cls,
        config: KVEventsConfig,
        cache: KVCache,
        run_soon: Callable[[Callable[[], None]], None],
        adapter_name: Callable[[str], str],
    ) -> KVEvents:
        """Opens the sockets. Raises InvalidOption."""
        try:
            from rootstock.engine.kv_events.publisher import EventPublisher
            from rootstock.engine.kv_events.wire import EventEncoder
        except ImportError as error:
            remedy = f"left out, or with the package's extra: pip install 'rootstock[events]' ({error})"
            raise InvalidOption("--kv-events", str(config), remedy) from error
        encoder = EventEncoder(cache.families, cache.block_size, adapter_name, as_arrays=config.as_arrays)
        return cls(cache, run_soon, lambda part: EventPublisher(config, encoder, part.refresh, part.dump))

    @property
    def _resumable(self) -> ResumableBlocks:
        resumable = self._cache.tree.resumable
        assert resumable is not None, "a cache whose blocks are announced keeps their set"
        return resumable

    def before_step(self) -> None:
        self._announce()

    def after_step(self) -> None:
        self._announce()

    def before_idle(self) -> None:
        self._announce()

    def close(self, *, is_sound: bool) -> None:
        """Announces that all blocks are gone, because memory ends with the process."""
        self._publisher.publish([BlocksCleared()])
        self._publisher.close()

    def stats(self) -> Mapping[str, Any]:
        return {"kv_events": self._publisher.stats}

    def refresh(self) -> None:
        """Has changes between two steps announced, such as a cleared cache. For any thread."""
        self._run_soon(self._announce)

    def dump(self, put: Put) -> None:
        """Passes the whole set to `put`, on the engine's thread. For any thread."""

        def pass_on() -> None:
            self._announce()  # the set as it is after all batches that were published
            put([BlocksCleared(), *self._resumable.all(self._cache.tree.nodes())])

        self._run_soon(pass_on)

    def _announce(self) -> None:
        if changes := self._resumable.take():
            self._publisher.publish(changes)
