"""Clearings: the cached prefixes that a request removes, and the namespaces in which they lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.kv_cache import KVCache
from rootstock.engine.part_list import EngineParts
from rootstock.engine.stats import Cleared
from rootstock.engine.tiers.connector import TierConnector
from rootstock.errors import ClearFailed, ClearUnderWay


@dataclass(frozen=True, slots=True)
class ModelNamespaces:
    """A model's namespace without a salt, and the fingerprints of the LoRA adapters that it has had."""

    base: Namespace
    adapters: tuple[str, ...] = ()

    def of_salt(self, salt: str) -> list[Namespace]:
        """Returns the namespaces of a salt: of the base model, and of each adapter."""
        return [replace(self.base, salt=salt, adapter=adapter) for adapter in ("", *self.adapters)]

    def asked(self, salt: str | None) -> list[Namespace | None]:
        """Returns the namespaces of a salt. Without one, returns [None], which stands for all of the cache."""
        return [None] if salt is None else [*self.of_salt(salt)]

    @staticmethod
    def known(base: Namespace, adapters: Iterable[str]) -> ModelNamespaces:
        return ModelNamespaces(base, tuple(sorted(adapters)))


@dataclass(frozen=True, slots=True)
class Clearing:
    """The prefixes to remove: of all salts, of one, or the public heads; in memory, in the tiers, or in both."""

    salt: str | None = None  # None: all
    public: bool = False
    memory: bool = True
    disk: bool = True  # and the RAM of the host below an accelerator

    @property
    def is_of_all(self) -> bool:
        return self.salt is None and not self.public

    def namespaces(self, model: ModelNamespaces) -> list[Namespace]:
        """Returns the namespaces whose prefixes are dropped; an empty list if all prefixes are."""
        if self.public:
            return [Scope(namespace).public for namespace in model.of_salt("")]
        return [] if self.salt is None else model.of_salt(self.salt)


class CacheClearer:
    """Remover of cached prefixes from memory and from the tiers. Any thread may call it."""

    def __init__(
        self,
        call: Callable[[Callable[[], Cleared]], Cleared],
        cache: KVCache,
        parts: EngineParts,
        tiers: TierConnector | None,
    ) -> None:
        """`call` runs a function on the engine's thread between two steps."""
        self._call = call
        self._cache = cache
        self._parts = parts
        self._tiers = tiers
        self._lock = threading.Lock()  # held while one tenant's records in the tiers are cleared

    def clear(self, clearing: Clearing, namespaces: list[Namespace]) -> Cleared:
        """Clears these namespaces, or all if there are none.

        Raises ClearUnderWay, EngineStopped, and ClearFailed if records may remain on the disk.
        """
        tiers = self._tiers if clearing.disk else None
        kept: list[bool] = []

        def clear() -> Cleared:
            before = self._cache.pools.owned_bytes
            blocks, later = 0, False
            for namespace in namespaces or (None,):
                if clearing.memory:
                    blocks += self._clear_memory(namespace)
                if tiers is not None and namespace is not None:
                    tiers.forget(namespace)
                elif tiers is not None:
                    later = not tiers.clear()
                    kept.append(tiers.clear_failed)
            return Cleared(blocks, before - self._cache.pools.owned_bytes, later)

        if tiers is None or not namespaces:
            cleared = self._call(clear)
        else:
            if not self._lock.acquire(blocking=False):
                raise ClearUnderWay()
            try:
                cleared = self._call(clear)
                # On the caller's thread: the disk must not delay other tenants' requests.
                kept += [not tiers.clear_below(namespace) for namespace in namespaces]
                # Stores that ended in between have added records to the index.
                self._call(clear)
            finally:
                self._lock.release()
        if any(kept):
            raise ClearFailed("the disk failed, or could not be opened at the start")
        return cleared

    def _clear_memory(self, namespace: Namespace | None) -> int:
        """Clears a namespace, or all. Returns the number of blocks that became free. For the engine's thread."""
        self._parts.idle_work.pause()  # its leases protect cached rows
        for act in self._parts.hooks.forget:
            act(namespace)
        return self._cache.clear(namespace)
