"""LoRA adapters of an engine, by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rootstock.engine.stats import AdapterStats
from rootstock.errors import AdapterExists, AdapterLimit, AdapterNotLoaded
from rootstock.runtime.base import LoadedAdapter

MAX_ADAPTERS = 256


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A loaded adapter, and the name by which requests choose it."""

    name: str
    directory: Path
    loaded: LoadedAdapter
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str:
        """The adapter of a `Request`, and of its namespace."""
        return self.loaded.fingerprint


class AdapterTable:
    """The adapters of an engine by name. Any thread may call it. Several names may be of the same files."""

    def __init__(self) -> None:
        self._by_name: dict[str, NamedAdapter] = {}
        self._fingerprints: set[str] = set()  # with weights in the runtime, also without a name
        self._known: set[str] = set()  # ever loaded: their prefixes may be cached
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> NamedAdapter | None:
        return self._by_name.get(name)

    @property
    def all(self) -> list[NamedAdapter]:
        """The adapters that have a name, in the order of their loading."""
        with self._lock:
            return list(self._by_name.values())

    @property
    def known(self) -> list[str]:
        """The fingerprints of all adapters that were loaded since the start."""
        with self._lock:
            return sorted(self._known)

    def name_of(self, fingerprint: str) -> str:
        """Returns a name of an adapter, or its fingerprint if it has no name any more."""
        return next((each.name for each in self.all if each.fingerprint == fingerprint), fingerprint)

    def stats(self, running: Mapping[str, int], waiting: Mapping[str, int]) -> AdapterStats | None:
        """Returns the requests of each adapter by its names. The arguments have them by fingerprint."""
        if not self._known:
            return None
        named = self.all

        def by_name(requests: Mapping[str, int]) -> dict[str, int]:
            return {each.name: count for each in named if (count := requests.get(each.fingerprint, 0))}

        return AdapterStats(MAX_ADAPTERS, by_name(running), by_name(waiting))

    def is_loaded(self, fingerprint: str) -> bool:
        return fingerprint in self._fingerprints

    def refuse_taken(self, name: str) -> None:
        """Raises AdapterExists or AdapterLimit if no adapter can get this name."""
        if name in self._by_name:
            raise AdapterExists(name)
        if len(self._by_name) >= MAX_ADAPTERS:
            raise AdapterLimit(MAX_ADAPTERS)

    def add(self, adapter: NamedAdapter) -> None:
        """Names an adapter whose weights are in the runtime. Raises as `refuse_taken`."""
        with self._lock:
            self._fingerprints.add(adapter.fingerprint)
            self._known.add(adapter.fingerprint)
            self.refuse_taken(adapter.name)
            self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Removes a name. The weights stay until `drop`. Raises AdapterNotLoaded."""
        with self._lock:
            if name not in self._by_name:
                raise AdapterNotLoaded(name)
            del self._by_name[name]

    @property
    def nameless(self) -> set[str]:
        """The fingerprints whose weights no name needs any more."""
        if len(self._fingerprints) == 0:
            return set()
        with self._lock:
            return self._fingerprints - {adapter.fingerprint for adapter in self._by_name.values()}

    def drop(self, fingerprint: str) -> None:
        """Records that the weights are gone."""
        with self._lock:
            self._fingerprints.discard(fingerprint)
