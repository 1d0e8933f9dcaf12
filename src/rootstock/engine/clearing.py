"""Clearings: the cached prefixes that a request removes, and the namespaces in which they lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rootstock.cache.keys import Namespace, Scope


@dataclass(frozen=True, slots=True)
class ModelNamespaces:
    """A model's namespace without a salt, and the fingerprints of the LoRA adapters that it has had."""

    base: Namespace
    adapters: tuple[str, ...] = ()

    def of_salt(self, salt: str) -> list[Namespace]:
        """Returns the namespaces of a salt: of the base model, and of each adapter."""
        return [replace(self.base, salt=salt, adapter=adapter) for adapter in ("", *self.adapters)]

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
        """Returns the namespaces whose prefixes go; none, if those of all go."""
        if self.public:
            return [Scope(namespace).public for namespace in model.of_salt("")]
        return [] if self.salt is None else model.of_salt(self.salt)
