"""Prefetch for conversations that come back: their prefix is loaded from a tier before their request arrives.

After a tool call the client comes back by itself, once the tool has ended. Meanwhile its prefix may have been
evicted. It is loaded when there is free memory for it, or shortly before the client is expected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Lease
from rootstock.engine.idle.prefills import (
    LEAST_GAIN,
    IdleEnd,
    IdleKind,
    IdlePrefill,
    IdlePrefills,
    scope_touches,
)
from rootstock.engine.parts import Part
from rootstock.engine.sequence import Sequence
from rootstock.errors import RootstockError

MOST_AWAITED, MOST_AWAITED_OF_OWNER = 256, 64
MOST_AWAITED_TOKENS = 1 << 22
MAX_AGE_S = 3600.0
EXPECTED_PAUSE_S = 30.0  # of an owner whose pauses are not known
LEAD = 0.25  # share of the pause by which a load comes before the expected return
POLL_S = 0.5
_POLLED = 16  # conversations at each poll
_LEARNING = 0.3
_MOST_OWNERS = 1024
_TAIL = 16  # tokens that are compared first


@dataclass(slots=True, eq=False)
class _Awaited:
    prefill: IdlePrefill
    scope: Scope
    since: float
    loading: bool = False


class AwaitedReturns(Part):
    """The conversations whose next request is awaited. Owned by the engine's thread."""

    def __init__(
        self,
        cache: KVCache,
        prefills: IdlePrefills,
        clock: Callable[[], float],
        scope_of: Callable[[IdlePrefill], Scope],
    ) -> None:
        self._cache = cache
        self._prefills = prefills
        self._clock = clock
        self._scope_of = scope_of
        self._awaited: OrderedDict[_Awaited, None] = OrderedDict()  # the next to be polled first
        self._tokens = 0
        self._pauses_s: OrderedDict[str, float] = OrderedDict()  # moving average, by owner
        self._next_poll = 0.0

    def __len__(self) -> int:
        return len(self._awaited)

    def expect(self, prefill: IdlePrefill) -> None:
        """Awaits the return of the conversation whose next request begins with the prefill's tokens."""
        scope = self._scope_of(prefill)
        awaited = _Awaited(prefill, scope, self._clock())
        self._awaited[awaited] = None
        self._tokens += len(prefill.tokens)
        own = [each for each in self._awaited if each.prefill.owner == prefill.owner]
        if len(own) > MOST_AWAITED_OF_OWNER:
            self._drop(min(own, key=lambda each: each.since))
        while len(self._awaited) > MOST_AWAITED or self._tokens > MOST_AWAITED_TOKENS:
            self._drop(min(self._awaited, key=lambda each: each.since))

    def first_token(self, sequence: Sequence, lease: Lease) -> None:
        """Ends the wait for a request's conversation, and learns how long it took."""
        tokens = sequence.request.tokens
        for awaited in [each for each in self._awaited if each.scope == sequence.scope]:
            begin = awaited.prefill.tokens
            end = len(begin)
            if (
                end < len(tokens)
                and np.array_equal(tokens[max(0, end - _TAIL) : end], begin[-_TAIL:])
                and np.array_equal(tokens[:end], begin)
            ):
                self._learn(awaited)
                self._drop(awaited)

    # ------------------------------------------------------------------------------------- for idle time

    @property
    def holds_rows(self) -> bool:
        return False

    @property
    def next_poll_s(self) -> float | None:
        """Seconds until the next look at the conversations. None: there are none."""
        return max(0.0, self._next_poll - self._clock()) if self._awaited else None

    @property
    def has_work(self) -> bool:
        return bool(self._awaited) and self._clock() >= self._next_poll

    def step(self) -> None:
        """Submits the loads of a few conversations that are due, or that free memory has room for."""
        now = self._clock()
        self._next_poll = now + POLL_S
        for awaited in list(self._awaited)[:_POLLED]:
            if now - awaited.since > MAX_AGE_S:
                self._drop(awaited)
                continue
            self._awaited.move_to_end(awaited)
            if not awaited.loading:
                self._poll(awaited, now)

    def pause(self) -> bool:
        """Holds no rows: there is nothing to release."""
        return False

    def restart(self) -> None:
        self._awaited.clear()
        self._tokens = 0

    def forget(self, namespace: Namespace | None) -> None:
        """Drops the conversations of a namespace, or all."""
        for awaited in [each for each in self._awaited if scope_touches(each.scope, namespace)]:
            self._drop(awaited)

    def _poll(self, awaited: _Awaited, now: float) -> None:
        prefill = awaited.prefill
        tokens = np.append(prefill.tokens, np.int32(0))
        match = self._cache.match(tokens, awaited.scope.namespace, public_tokens=awaited.scope.public_tokens)
        if len(prefill.tokens) - match.length < LEAST_GAIN[IdleKind.PREFETCH]:
            return
        hit = self._cache.tier_hit(match)
        if hit is None:
            return
        due = awaited.since + (1 - LEAD) * self._pauses_s.get(prefill.owner or "", EXPECTED_PAUSE_S)
        if now < due and not self._cache.has_free_rows(match, hit):
            return

        def ended(end: IdleEnd) -> None:
            awaited.loading = False

        awaited.loading = True
        try:
            self._prefills.submit(
                IdlePrefill(
                    IdleKind.PREFETCH,
                    prefill.tokens,
                    prefill.salt,
                    prefill.owner,
                    end=prefill.end,
                    ended=ended,
                    adapter=prefill.adapter,
                    hints=prefill.hints,
                )
            )
        except RootstockError:
            awaited.loading = False

    def _learn(self, awaited: _Awaited) -> None:
        owner, pause_s = awaited.prefill.owner or "", self._clock() - awaited.since
        known = self._pauses_s.pop(owner, pause_s)
        self._pauses_s[owner] = known + _LEARNING * (pause_s - known)
        while len(self._pauses_s) > _MOST_OWNERS:
            self._pauses_s.popitem(last=False)

    def _drop(self, awaited: _Awaited) -> None:
        if awaited in self._awaited:
            del self._awaited[awaited]
            self._tokens -= len(awaited.prefill.tokens)
