"""One budget for the caches of several models: memory goes to the model where it saves the most prefill per byte.

The caches share no rows, only bytes: all rows in use, of all caches together, never cost more than the budget. A
cache that lacks bytes evicts the least valuable entry of all caches, be it its own or another's. One thread uses them
all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from rootstock.cache.active_tenants import Tenants
from rootstock.cache.retention.grants import Level

# Orders the entries of all caches as `Rank` orders the eviction queue of one cache. Only the last part differs: it is
# the logarithm of the seconds that a byte saves.
Value = tuple[bool, bool, int, int, bool, float]
# Orders retained entries within a tenant's share: the level, then the logarithm of the seconds that a byte saves.
Standing = tuple[Level, float]
_LEAST_PRICE = 1e-30
_LEAST_REUSE = 1e-3
_REUSE_GAIN = 0.02  # of each prompt, in the moving averages


class SharedCache(Protocol):
    """A cache as the other caches of its budget see it."""

    @property
    def owned_bytes(self) -> int: ...  # of all rows in use
    @property
    def cached_bytes(self) -> int: ...  # of the rows that can be evicted
    @property
    def backed_bytes(self) -> int: ...  # of the rows that have memory, in use or not
    def least_value(self) -> Value | None:
        """Returns the value of the entry to evict next, at the price of 1; None: there is none."""
        ...

    def evict_least(self, missing_bytes: int) -> None:
        """Makes one step towards so many free bytes: evicts from the entry to evict next."""
        ...


class PinningCache(Protocol):
    """The leases of a cache, as the other caches of its budget see them."""

    @property
    def has_requests(self) -> bool: ...  # its memory is in use by more than pins
    def pinned_bytes(self, tenant: str | None = None) -> int:
        """Returns the bytes of one tenant's pins, or of all."""
        ...

    def drop_own_pin(self) -> bool:
        """Releases the newest pin. Returns False if there is none."""
        ...


class RetainingCache(Protocol):
    """The entries that hints retain in a cache, as the other caches of its budget see them."""

    def expire(self) -> None:
        """Ends the grants that have expired."""
        ...

    @property
    def tenants(self) -> list[str]: ...  # with retained entries
    def bytes_of(self, tenant: str | None) -> int:
        """Returns the bytes that a tenant retains, or all of them."""
        ...

    def firm_bytes(self, tenant: str, level: Level, now: float) -> int:
        """Returns the bytes that do not yield to new entries of a level, with the promised bytes."""
        ...

    def least(
        self, tenant: str, kept: Collection[object], now: float, below: Level | None
    ) -> Standing | None:
        """Returns the standing, at the price of 1, of the entry that the tenant gives up first.

        None: there is none, it is in `kept`, or it does not yield to the level `below`.
        """
        ...

    def displace_least(self, tenant: str) -> None:
        """Takes the grant of that entry away. With a node, also takes the grants of the same tenant below it."""
        ...


class SharedBudget:
    """A number of bytes for several caches."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.moved_bytes = 0  # evicted from one cache for another
        self.tenants = Tenants()  # of the requests to all caches
        self._shares: tuple[BudgetShare, ...] = ()  # replaced as a whole: other threads read it

    @property
    def owned_bytes(self) -> int:
        return sum(share.owned_bytes for share in self._shares)

    @property
    def backed_bytes(self) -> int:
        return sum(share.backed_bytes for share in self._shares)

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.owned_bytes

    def join(self) -> BudgetShare:
        """Returns the share of a new cache."""
        share = BudgetShare(self)
        self._shares += (share,)
        return share

    def leave(self, share: BudgetShare) -> None:
        """Removes the share of a cache whose memory has been freed."""
        self._shares = tuple(other for other in self._shares if other is not share)

    def beside(self, share: BudgetShare) -> Iterator[BudgetShare]:
        """Yields the other shares from which memory can be taken."""
        return (other for other in self._shares if other is not share and not other.is_closed)

    def has_requests_beside(self, share: BudgetShare) -> bool:
        """Returns whether requests use memory of the other caches, also of one that is about to end."""
        return any(other.has_requests for other in self._shares if other is not share)

    def check(self) -> None:
        """Asserts that the caches stay within the budget."""
        assert 0 <= self.owned_bytes <= self.budget_bytes, "over the shared budget"


class BudgetShare:
    """A cache's part in a shared budget."""

    def __init__(self, budget: SharedBudget) -> None:
        self.budget = budget
        # Seconds of prefill that a byte of plain blocks saves, relative to the other caches of the budget.
        self.price = 1.0
        # Moving averages: tokens of a prompt, and how many of them are cached or were cached before an eviction.
        # Entries that no request uses again save nothing, even if their prefill is expensive.
        self._prompt_tokens = self._known_tokens = 0.0
        # Executes the cache's pending plan, which gives memory back to the system. Set by the cache's engine.
        self.settle: Callable[[], None] = lambda: None
        # Bytes of the sessions whose requests run or are expected soon. Set by the cache.
        self.expected_bytes: Callable[[], int] = lambda: 0
        self.is_closed = False  # True: nothing is evicted for others any more, but its rows still count
        self._cache: SharedCache | None = None
        self._pinning: PinningCache | None = None
        self._retaining: RetainingCache | None = None

    def attach(
        self,
        cache: SharedCache,
        pinning: PinningCache | None = None,
        retaining: RetainingCache | None = None,
    ) -> None:
        """Counts the rows of a cache, in place of the one before. `pinning` has its leases, `retaining` its hints."""
        self._cache, self._pinning, self._retaining = cache, pinning, retaining

    def close(self) -> None:
        """Keeps other caches from evicting: the cache's owner is about to end."""
        self.is_closed = True

    @property
    def owned_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.owned_bytes

    @property
    def cached_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.cached_bytes

    @property
    def backed_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.backed_bytes

    @property
    def others_cached_bytes(self) -> int:
        """Bytes that other caches can give."""
        return sum(other.cached_bytes for other in self.budget.beside(self))

    @property
    def has_requests(self) -> bool:
        """True if the cache gives memory back by itself: when a request ends, or the cache's owner."""
        if self.is_closed:
            return self.owned_bytes > 0
        return self._pinning is not None and self._pinning.has_requests

    @property
    def others_have_requests(self) -> bool:
        return self.budget.has_requests_beside(self)

    def pinned_bytes(self, tenant: str | None = None) -> int:
        return 0 if self._pinning is None else self._pinning.pinned_bytes(tenant)

    def others_pinned_bytes(self, tenant: str | None = None) -> int:
        """Returns the bytes that a tenant, or all of them, have pinned in other caches."""
        return sum(other.pinned_bytes(tenant) for other in self.budget.beside(self))

    def drop_pin_elsewhere(self) -> bool:
        """Releases a pin of another cache. Returns False if there is none."""
        return any(other.drop_own_pin() for other in self.budget.beside(self))

    def drop_own_pin(self) -> bool:
        return self._pinning is not None and self._pinning.drop_own_pin()

    def others_retained(self) -> Iterator[tuple[RetainingCache, float]]:
        """Yields the retained entries of each other cache, and the logarithm of its price. A cache that is about to
        end takes nothing from others, and sees none."""
        for other in () if self.is_closed else self.budget.beside(self):
            retaining = other.retaining
            if retaining is not None:
                yield retaining, other.log_price

    @property
    def retaining(self) -> RetainingCache | None:
        return self._retaining

    def observe_prompt(self, known_tokens: int, prompt_tokens: int) -> None:
        """Learns how many tokens of a prompt were cached before, evicted since or not.

        The averages begin with as many tokens as the first prompt has, all known.
        """
        if not self._prompt_tokens:
            self._prompt_tokens = self._known_tokens = float(prompt_tokens)
        self._known_tokens += _REUSE_GAIN * (known_tokens - self._known_tokens)
        self._prompt_tokens += _REUSE_GAIN * (prompt_tokens - self._prompt_tokens)

    @property
    def reuse(self) -> float:
        """Share of the tokens of recent prompts that the cache has, or had."""
        return self._known_tokens / self._prompt_tokens if self._prompt_tokens else 1.0

    @property
    def log_price(self) -> float:
        """The logarithm of the time that a byte of a plain block saves, by the chance that it is asked for again."""
        return math.log(max(self.price, _LEAST_PRICE)) + math.log(max(self.reuse, _LEAST_REUSE))

    @property
    def excess_bytes(self) -> int:
        """Bytes of memory that the caches must give back to the system to stay within the budget."""
        return self.budget.backed_bytes - self.budget.budget_bytes

    def valued(self, value: Value) -> Value:
        """Returns a value at this cache's price, comparable with values of the other caches."""
        return *value[:5], value[5] + self.log_price

    def evict_elsewhere(self, missing_bytes: int, below: Value | None) -> bool:
        """Makes one step towards so many free bytes in the cache whose next entry is worth the least.

        Returns False, without any change, if no other cache has an entry below this value.
        """
        found: tuple[Value, BudgetShare] | None = None
        for other in self.budget.beside(self):
            value = other.least_value()
            if value is not None and (found is None or value < found[0]):
                found = value, other
        if found is None or (below is not None and found[0] >= below):
            return False
        before = self.budget.owned_bytes
        found[1].evict_least(missing_bytes)
        self.budget.moved_bytes += before - self.budget.owned_bytes
        return True

    def least_value(self) -> Value | None:
        value = None if self._cache is None else self._cache.least_value()
        return None if value is None else self.valued(value)

    def evict_least(self, missing_bytes: int) -> None:
        assert self._cache is not None
        self._cache.evict_least(missing_bytes)

    def settle_others(self) -> None:
        """Makes the other caches give memory back to the system, as far as the budget needs it."""
        for other in self.budget.beside(self):
            if self.excess_bytes <= 0:
                return
            other.settle()
