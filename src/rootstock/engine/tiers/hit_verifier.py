"""Verification of hits: a sample is recomputed in idle time and compared with the cached rows.

Answers do not depend on it: it reports a faulty disk, faulty memory or a bug to the operator.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rootstock.cache.families import TokenFamily, token_families
from rootstock.cache.image_tokens import PlacedImage, chunk_end
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Admitted, Deferred, Lease, ReleaseReason
from rootstock.cache.plan import HostBytes, Plan, RowPart
from rootstock.cache.types import NO_BLOCK, BlockIds, Tokens
from rootstock.engine.parts import Part
from rootstock.engine.sequence import Sequence
from rootstock.errors import PoolsLost
from rootstock.runtime.base import Batch, Runtime, Segment

log = logging.getLogger(__name__)

MOST_WAITING = 16  # hits; the oldest are forgotten
# Largest relative RMS difference between a cached and a recomputed row. Another division of a prefill into chunks
# changes the last bits; another prefix changes the whole row.
_TOLERANCE = {"float32": 0.01, "float64": 0.01}
_LOW_PRECISION_TOLERANCE = 0.3


@dataclass(frozen=True, slots=True)
class Hit:
    tokens: Tokens  # [hit + 1 at least]
    length: int  # cached positions
    scope: Scope
    images: tuple[PlacedImage, ...] = ()  # of the prompt


@dataclass(slots=True)
class _Check:
    hit: Hit
    found: Lease  # the rows that a request would use
    anew: Lease  # recomputed, under a namespace that no request can name


class HitVerifier(Part):
    """Verifier of a sample of hits.

    It draws from the requests' first tokens, does its steps in idle time, and pauses when requests arrive.
    """

    next_poll_s = None  # requests bring its work

    def __init__(
        self,
        runtime: Runtime,
        cache: KVCache,
        share: float,
        chunk_tokens: int,
        apply: Callable[[Plan], None],
        distrust: Callable[[Tokens, Scope, int], None],
        seed: int | None = 0,
    ) -> None:
        """`distrust` gets tokens whose cached rows are wrong from a position on."""
        self._runtime = runtime
        self._cache = cache
        self._share = share
        self._chunk_tokens = chunk_tokens
        self._apply = apply
        self._distrust = distrust
        self._random = np.random.default_rng(seed)
        self._waiting: deque[Hit] = deque(maxlen=MOST_WAITING)
        self._check: _Check | None = None
        self.counts: Counter[str] = Counter()  # by outcome: "agrees", "differs" (the alarm), "given up"

    @property
    def has_work(self) -> bool:
        return self._check is not None or bool(self._waiting)

    @property
    def holds_rows(self) -> bool:
        return self._check is not None

    def first_token(self, sequence: Sequence, lease: Lease) -> None:
        """Draws whether the request's hit is verified."""
        if lease.hit_tokens and self._random.random() < self._share:
            request = sequence.request
            self._waiting.append(Hit(request.tokens, lease.hit_tokens, sequence.scope, request.images))

    def pause(self) -> bool:
        """Releases the rows of the check in progress, which starts over later. Returns False if there is none."""
        if self._check is None:
            return False
        self._waiting.appendleft(self._check.hit)
        self._end(self._check)
        return True

    def stats(self) -> dict[str, dict[str, int]]:
        return {"verified": dict(self.counts)}

    def restart(self) -> None:
        self._check = None
        self._waiting.clear()

    def drop_adapter(self, fingerprint: str) -> None:
        self.pause()
        kept = [hit for hit in self._waiting if hit.scope.namespace.adapter != fingerprint]
        self._waiting = deque(kept, maxlen=MOST_WAITING)

    def step(self) -> None:
        """Computes a chunk of the prefill, or compares."""
        check = self._check or self._begin()
        if check is None:
            return
        lease = check.anew
        new = min(self._chunk_tokens, lease.num_tokens - lease.num_computed_tokens)
        if new:
            if not self._compute(lease, new, check.hit.images):
                self.counts["given up"] += 1
                self._end(check)
            return
        wrong = self._first_difference(check)
        self._end(check)
        if wrong is None:
            self.counts["agrees"] += 1
            return
        self.counts["differs"] += 1
        log.error(
            "The cached rows of a prompt of %d tokens differ from the rows that the model computes, at position %d. "
            "They are dropped, in memory and in the tiers. The disk, the memory or Rootstock is faulty: please look "
            "into it.",
            check.hit.length,
            wrong,
        )
        self._distrust(check.hit.tokens, check.hit.scope, wrong)

    # ------------------------------------------------------------------------------------------------------

    def _begin(self) -> _Check | None:
        hit = self._waiting.popleft()
        tokens = hit.tokens[: hit.length + 1]
        namespace, public_tokens = hit.scope.namespace, hit.scope.public_tokens
        if not self._cache.match(tokens, namespace, public_tokens=public_tokens).length:
            self.counts["given up"] += 1  # evicted since
            return None
        found = self._admitted(tokens, namespace, public_tokens)
        if found is None:
            self.counts["given up"] += 1
            return None
        if not chunk_end(
            hit.images, -1, found.hit_tokens
        ):  # too little memory to resume there, or an image first
            self._cache.release(found, ReleaseReason.UNUSED)
            self.counts["given up"] += 1
            return None
        # Rows that see each other are computed together, or not at all.
        hit = replace(hit, length=chunk_end(hit.images, -1, found.hit_tokens))
        anew = self._admitted(hit.tokens[: hit.length], replace(namespace, is_private=True))
        if anew is None:
            self._cache.release(found, ReleaseReason.UNUSED)
            self.counts["given up"] += 1
            return None
        self._check = _Check(hit, found, anew)
        return self._check

    def _admitted(self, tokens: Tokens, namespace: Namespace, public_tokens: int = 0) -> Lease | None:
        match = self._cache.match(tokens, namespace, public_tokens=public_tokens)
        admitted = self._cache.admit(match, counted=False)
        if not isinstance(admitted, Admitted):
            return None
        self._apply(self._cache.take_pending_plan())
        self._apply(admitted.plan)
        return admitted.lease

    def _compute(self, lease: Lease, new: int, images: tuple[PlacedImage, ...]) -> bool:
        if lease.next_checkpoint_position is not None:
            new = min(new, lease.next_checkpoint_position - lease.num_computed_tokens)
        new = chunk_end(images, lease.num_computed_tokens, lease.num_computed_tokens + new)
        new -= lease.num_computed_tokens
        if isinstance(self._cache.extend(lease, new), Deferred):
            return False
        self._apply(self._cache.take_pending_plan())
        tokens = lease.tokens[lease.num_computed_tokens : lease.num_computed_tokens + new]
        try:
            past, adapter = lease.num_computed_tokens, lease.scope.namespace.adapter
            self._runtime.forward(
                Batch([Segment(tokens, past, lease.tables, 0, lease.slot, adapter, images)])
            )
        except PoolsLost:
            raise  # every cached row is lost, not only the rows of this check
        except Exception:
            log.exception("a hit could not be computed anew")
            return False
        self._apply(self._cache.commit(lease, tokens))
        return True

    def _end(self, check: _Check) -> None:
        self._check = None
        self._cache.discard(check.anew)
        self._cache.release(check.found, ReleaseReason.UNUSED)

    def _first_difference(self, check: _Check) -> int | None:
        """Returns the first position of the first row that differs; the last position for a state."""
        length, size = check.hit.length, self._cache.block_size
        for index, family, found, anew in self._tables(check):
            start = family.first_visible(length)
            if start >= length:  # no row is needed, and there may be none
                continue
            for block in range(start // size, -(-length // size)):
                ours, theirs = int(found[block]), int(anew[block])
                if NO_BLOCK in (ours, theirs):
                    continue
                kept = min(size, length - block * size)
                first = max(0, start - block * size)  # earlier positions of the row are not needed
                if self._rows_differ(RowPart(index, ours, kept), RowPart(index, theirs, kept), first):
                    return block * size
        states = self._cache.pools.states
        if states is not None:
            ours, theirs = check.found.slot, check.anew.slot
            if self._rows_differ(RowPart(states.index, ours, 0), RowPart(states.index, theirs, 0)):
                return length - 1
        return None

    def _rows_differ(self, ours: RowPart, theirs: RowPart, first: int = 0) -> bool:
        """Compares two rows from their position `first` on."""
        a, b = self._runtime.read(ours), self._runtime.read(theirs)
        dtypes = self._runtime.buffer_dtypes(ours.family) or [""] * len(a)
        positions = max(1, ours.tokens)
        # Scales of rounded rows are as coarse as their source, which may be bfloat16.
        coarse = "int8" in dtypes
        return any(
            _differs(x, y, dtype, first, positions, coarse=coarse)
            for x, y, dtype in zip(a, b, dtypes, strict=True)
        )

    def _tables(self, check: _Check) -> Iterator[tuple[int, TokenFamily, BlockIds, BlockIds]]:
        families = self._runtime.description.families
        tables = zip(token_families(families), check.found.tables, check.anew.tables, strict=True)
        for family, found, anew in tables:
            yield families.index(family), family, found, anew


def _differs(a: HostBytes, b: HostBytes, dtype: str, first: int, positions: int, *, coarse: bool) -> bool:
    """Returns whether two buffers differ: in any bit without a dtype, else beyond the tolerance."""
    skipped = len(a) // positions * first
    a, b = a[skipped:], b[skipped:]
    if not dtype:
        return not np.array_equal(a, b)
    x, y = _numbers(a, dtype), _numbers(b, dtype)
    error, scale = float(np.square(x - y).mean()), float(np.square(y).mean())
    # A value that is not finite counts as a difference.
    tolerance = _LOW_PRECISION_TOLERANCE if coarse else _TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE)
    return not (error <= tolerance**2 * scale) and not np.array_equal(a, b)


def _numbers(raw: HostBytes, dtype: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(np.dtype(dtype)).astype(np.float64)
