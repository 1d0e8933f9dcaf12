"""Loads of prefixes from tiers, from the scheduler's decision until the sequence computes."""

from __future__ import annotations

from collections.abc import Callable

from rootstock.cache import KVCache
from rootstock.cache.lease import ReleaseReason
from rootstock.cache.plan import NOTHING, Plan, together
from rootstock.engine.scheduler import Scheduler
from rootstock.engine.sequence import Loading, Sequence
from rootstock.engine.tiers.connector import LoadInFlight, TierConnector
from rootstock.tiers.reader import LoadEnded


class PrefixLoads:
    """Loads of admitted sequences, which go back to the scheduler when their load ends.

    Owned by the engine's thread. `run_soon` queues a function for that thread, from any thread.
    """

    def __init__(
        self,
        connector: TierConnector,
        cache: KVCache,
        scheduler: Scheduler,
        apply: Callable[[Plan], None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._connector = connector
        self._cache = cache
        self._scheduler = scheduler
        self._apply = apply
        self._run_soon = run_soon

    @property
    def in_flight(self) -> int:
        """Loads in flight, also those of requests that have ended."""
        return self._connector.loading

    def requeue_overdue(self) -> None:
        """Gives up loads that take too long. Their requests compute instead."""
        for sequence in self._connector.overdue():
            self._connector.give_up(sequence)
            sequence.may_load = False
            sequence.did_not_load()
            self._scheduler.requeue(sequence)

    def begin(self, sequence: Sequence) -> None:
        """Begins the load of a sequence that the scheduler has just admitted."""
        assert isinstance(sequence.state, Loading)
        lease, position, loads = sequence.state.lease, sequence.state.position, sequence.state.loads
        self._apply(together([self._cache.take_pending_plan(), sequence.plan]))
        sequence.plan = NOTHING
        self._connector.begin(
            sequence,
            lease,
            position,
            loads,
            lambda load, ended: self._run_soon(lambda: self._end(load, ended)),
        )

    def give_up(self, sequence: Sequence) -> None:
        """Detaches a load in flight from its sequence, which leaves the scheduler."""
        self._connector.give_up(sequence)

    def _end(self, load: LoadInFlight, ended: LoadEnded) -> None:
        """Publishes a complete load. If records were missing, the sequence is admitted anew.

        A prefix loaded for a request that has ended stays in the cache.
        """
        if not self._connector.is_in_flight(load):
            return  # the cache started anew meanwhile
        if not self._connector.end(load, ended):
            self._cache.release(load.lease, ReleaseReason.UNUSED)
            if load.sequence is not None:
                self._scheduler.requeue(load.sequence)
            return
        self._apply(self._cache.loaded(load.lease, load.position))
        if load.sequence is None:
            self._cache.release(load.lease, ReleaseReason.FINISHED)
        else:
            self._scheduler.loaded(load.sequence, load.lease)
        self._apply(self._cache.take_pending_plan())
