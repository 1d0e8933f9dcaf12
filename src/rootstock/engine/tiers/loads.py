"""Loads of prefixes from tiers, from the scheduler's decision until the sequence computes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Lease, ReleaseReason
from rootstock.cache.plan import NOTHING, Plan, together
from rootstock.engine.parts import Forward, Part
from rootstock.engine.scheduler import Scheduler, StepPlan
from rootstock.engine.sequence import Loading, Sequence
from rootstock.engine.tiers.connector import UNMEASURED, LoadInFlight, TierConnector, TierStats
from rootstock.tiers.reader import LoadEnded

log = logging.getLogger(__name__)


class PrefixLoads(Part):
    """Loads of admitted sequences, which go back to the scheduler when their load ends."""

    def __init__(
        self,
        connector: TierConnector,
        cache: KVCache,
        scheduler: Scheduler,
        apply: Callable[[Plan], None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`run_soon` queues a function for the engine's thread, from any thread."""
        self._connector = connector
        self._cache = cache
        self._scheduler = scheduler
        self._apply = apply
        self._run_soon = run_soon
        self._space = UNMEASURED

    def prepare(self, sequence: Sequence, then: Callable[[], None]) -> None:
        self._connector.look_up(sequence.request.tokens, sequence.scope, then)

    def before_step(self) -> None:
        """Gives up loads that take too long. Their requests compute instead."""
        self._connector.follow()
        for sequence in self._connector.overdue():
            self._connector.give_up(sequence)
            sequence.may_load = False
            sequence.did_not_load()
            self._scheduler.requeue(sequence)

    def planned(self, plan: StepPlan, began: float) -> None:
        for sequence in plan.to_load:
            self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
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

    def forwarded(self, forward: Forward) -> None:
        if not forward.only_decodes:
            self._connector.load_or_recompute.observe_forward(forward.segments, forward.seconds)

    def after_step(self) -> None:
        self._connector.follow()

    def before_idle(self) -> None:
        self._connector.follow()

    def first_token(self, sequence: Sequence, lease: Lease) -> None:
        self._connector.count(sequence.load_choice)

    def taken_out(self, sequence: Sequence) -> None:
        """Detaches a load in flight from its sequence."""
        if isinstance(sequence.state, Loading):
            self._connector.give_up(sequence)

    def restart(self) -> None:
        self._connector.settle()  # no load writes to rows that are reused

    def close(self, *, is_sound: bool) -> None:
        """Writes rows that only memory has to the tiers, and ends their threads."""
        try:
            self._connector.settle()
            if is_sound:
                self._connector.flush()
        except Exception:
            log.exception("the cache could not be written to the tiers")
        finally:
            self._connector.close()

    def measure(self) -> None:
        self._space = self._connector.measure()

    def stats(self) -> dict[str, TierStats]:
        return {"tier": self._connector.stats(self._space)}

    def _end(self, load: LoadInFlight, ended: LoadEnded) -> None:
        """Publishes a complete load. If records were missing, the sequence is admitted again.

        A prefix loaded for a request that has ended stays in the cache.
        """
        if not self._connector.is_in_flight(load):
            return  # the cache was emptied meanwhile
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
