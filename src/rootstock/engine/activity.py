"""The activity of an engine for people who watch it: requests with their phases, hit rates, and recent misses.

`Activity` always records a few numbers for each request, so that a page that is opened now shows the last quarter of
an hour. The engine's thread writes; other threads read under the lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from rootstock.cache.types import Tokens
from rootstock.engine.diagnosis import Diagnosis
from rootstock.engine.parts import Part
from rootstock.engine.request import Aborted, Failed, Finished, PromptTokens, RequestId, Terminal
from rootstock.engine.sequence import Loading, Phase, Preempted, Sequence

SPAN_S = 10.0  # of one entry of the history of hits
HISTORY_S = 15 * 60.0
MAX_SALTS = 256  # of one span; the tokens of further salts count in the total alone
MAX_ENDED = 64  # ended requests that are kept
MAX_MISSES = 32
# A prompt that misses fewer tokens than a few blocks is not worth an explanation.
MIN_MISSED_TOKENS = 64
_BEFORE_TOKENS, _AFTER_TOKENS = 48, 24  # of a prompt, around the position of its miss


class Outcome(StrEnum):
    OPEN = "open"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    phase: Phase
    began: float  # by the engine's clock
    ended: float | None  # None: the request is in this phase now


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request as it is seen at one moment."""

    id: RequestId
    salt: str
    spans: tuple[PhaseSpan, ...]  # one after the other
    outcome: Outcome
    prompt_tokens: int
    cached_tokens: int | None  # None: not known yet
    computed_tokens: int  # of prompt and answer, those in the cache included
    completion_tokens: int
    max_tokens: int
    is_preempted: bool


@dataclass(frozen=True, slots=True, eq=False)
class PromptMiss:
    """A prompt of which a part was not found, with the tokens around the place."""

    id: RequestId
    salt: str
    at: float  # by the engine's clock
    diagnosis: Diagnosis
    before: Tokens  # the prompt's tokens before the place
    asked: Tokens  # the prompt's tokens from the place on
    cached: tuple[int, ...]  # tokens with which cached prefixes go on there


@dataclass(slots=True)
class Hits(PromptTokens):
    """Tokens of several prompts, and the number of these prompts."""

    requests: int = 0

    def count(self, requests: int, tokens: PromptTokens) -> None:
        self.requests += requests
        self.add(tokens)


@dataclass(slots=True)
class _Span:
    """The hits of SPAN_S seconds."""

    index: int
    total: Hits = field(default_factory=Hits)
    by_salt: dict[str, Hits] = field(default_factory=dict)


class Activity(Part):
    """Record of the hits, misses and ends of an engine's latest requests. Bounded in number and in time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: deque[_Span] = deque()
        self._ended: deque[LiveRequest] = deque(maxlen=MAX_ENDED)
        self._misses: deque[PromptMiss] = deque(maxlen=MAX_MISSES)

    # ------------------------------------------------------------------------- for the engine's thread

    def prompt_computed(self, sequence: Sequence, tokens: PromptTokens) -> None:
        """Records the sources of a prompt whose last token has been computed for the first time."""
        now = self._clock()
        miss = self._miss(sequence, now) if tokens.computed >= MIN_MISSED_TOKENS else None
        with self._lock:
            span = self._span_of(now)
            span.total.count(1, tokens)
            salt = sequence.request.salt
            if salt in span.by_salt or len(span.by_salt) < MAX_SALTS:
                span.by_salt.setdefault(salt, Hits()).count(1, tokens)
            if miss is not None:
                self._misses.append(miss)

    def ended(self, sequence: Sequence, event: Terminal) -> None:
        """Records the end of a request. Its state must still be the last one."""
        seen = live_request(sequence, self._clock(), event)
        with self._lock:
            self._ended.append(seen)

    def _span_of(self, now: float) -> _Span:
        index = int(now / SPAN_S)
        if not self._spans or self._spans[-1].index != index:
            self._spans.append(_Span(index))
            while self._spans[0].index <= index - HISTORY_S / SPAN_S:
                self._spans.popleft()
        return self._spans[-1]

    @staticmethod
    def _miss(sequence: Sequence, now: float) -> PromptMiss | None:
        diagnosis, explanation = sequence.explained, sequence.explanation
        if diagnosis is None or explanation is None or diagnosis.cause == "none":
            return None
        tokens = sequence.request.tokens
        at = diagnosis.position or 0
        return PromptMiss(
            sequence.request.id,
            sequence.request.salt,
            now,
            diagnosis,
            tokens[max(0, at - _BEFORE_TOKENS) : at].copy(),
            tokens[at : at + _AFTER_TOKENS].copy(),
            explanation.cached_tokens_there or () if diagnosis.position == explanation.divergence else (),
        )

    # ---------------------------------------------------------------------------------- for any thread

    def hits(self, last_s: float, salts: Iterable[str] | None = None) -> Hits:
        """Adds up the hits of the last seconds, in whole spans: of all requests, or of some salts."""
        now = self._clock()
        found = Hits()
        with self._lock:
            for span in self._spans:
                if span.index > (now - last_s) / SPAN_S:
                    for each in _of(span, salts):
                        found.count(each.requests, each)
        return found

    def history(self, salts: Iterable[str] | None = None) -> list[Hits]:
        """Returns the hits of each span of the last HISTORY_S, the latest at the end."""
        count = int(HISTORY_S / SPAN_S)
        found = [Hits() for _ in range(count)]
        last = int(self._clock() / SPAN_S)
        with self._lock:
            for span in self._spans:
                place = span.index - last + count - 1
                if 0 <= place < count:
                    for each in _of(span, salts):
                        found[place].count(each.requests, each)
        return found

    def latest_ended(self) -> list[LiveRequest]:
        """Returns requests that have ended, the latest at the end."""
        with self._lock:
            return list(self._ended)

    def latest_misses(self) -> list[PromptMiss]:
        with self._lock:
            return list(self._misses)


def _of(span: _Span, salts: Iterable[str] | None) -> Iterator[Hits]:
    if salts is None:
        yield span.total
        return
    for salt in salts:
        if salt in span.by_salt:
            yield span.by_salt[salt]


def live_request(sequence: Sequence, now: float, end: Terminal | None = None) -> LiveRequest:
    """Describes a sequence. Any thread may call it: numbers may be of two neighbouring steps."""
    state, tokens = sequence.state, len(sequence.request.tokens)
    lease = state.lease if isinstance(state, Loading) else sequence.lease
    generated = len(sequence.generated)
    computed = 0 if lease is None else lease.num_computed_tokens
    if end is not None:
        computed = tokens + max(0, generated - 1) if generated else computed
    return LiveRequest(
        sequence.request.id,
        sequence.request.salt,
        tuple(_spans(sequence, None if end is None else now)),
        _outcome(end),
        tokens,
        sequence.cached_tokens,
        computed,
        generated,
        sequence.max_tokens,
        isinstance(state, Preempted),
    )


def _spans(sequence: Sequence, ended: float | None) -> Iterator[PhaseSpan]:
    """Yields the phases of a sequence. The last one is open unless the request has ended."""
    begins = [
        (Phase.QUEUED, sequence.submitted_at),
        (Phase.WAITING_FOR_PREFIX, sequence.waited_at),
        (Phase.LOADING, sequence.load_began_at),
        (Phase.PREFILL, sequence.prefill_at),
        (Phase.DECODE, sequence.first_token_at),
    ]
    reached = [(phase, began) for phase, began in begins if began is not None]
    for (phase, began), (_, until) in zip(reached, [*reached[1:], (None, ended)], strict=True):
        if until is None or until > began:
            yield PhaseSpan(phase, began, until)


def _outcome(end: Terminal | None) -> Outcome:
    match end:
        case None:
            return Outcome.OPEN
        case Finished(reason=reason):
            return Outcome(reason)
        case Failed():
            return Outcome.FAILED
        case Aborted():
            return Outcome.ABORTED
