"""A sequence: a request in the engine, with its state, its generated tokens and its events."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from rootstock.cache.explain import Explanation, LoadChoice
from rootstock.cache.keys import Namespace, Scope
from rootstock.cache.lease import Lease
from rootstock.cache.plan import NOTHING, Load, Plan
from rootstock.cache.radix_node import HitProtection
from rootstock.cache.retention.hint_types import HintOutcome
from rootstock.cache.retention.sessions import RequestCosts
from rootstock.cache.types import Tokens
from rootstock.engine.diagnosis import Diagnosis, diagnosis_of
from rootstock.engine.limits import RequestLimits
from rootstock.engine.request import Event, Logprobs, Request, Sink, Terminal, Usage
from rootstock.engine.sampling import Sampler
from rootstock.engine.speculation.draft_cost import AcceptanceRate, Guess
from rootstock.engine.speculation.ngrams import TokenHistory
from rootstock.text.constraints.progress import AnswerProgress
from rootstock.text.detokenizer import Detokenizer, NoText
from rootstock.text.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)


class Phase(StrEnum):
    """The part of a request's time that people see. Metrics and the dashboard have these names."""

    QUEUED = "queued"
    HELD = "held"
    WAITING_FOR_PREFIX = "waiting_for_prefix"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Waiting:
    """State in the queue, until there are blocks and a place in the batch."""


@dataclass(frozen=True, slots=True)
class Held:
    """State of a request that waits until its session has a place in memory."""


@dataclass(frozen=True, slots=True)
class WaitingForPrefix:
    """State in the queue, until a running request has computed the common prefix."""

    producer: Lease
    until: int  # position

    @property
    def is_over(self) -> bool:
        # Without a node it publishes no more tokens before it ends.
        return (
            self.producer.ended or self.producer.node is None or self.producer.num_cached_tokens >= self.until
        )


@dataclass(frozen=True, slots=True)
class Loading:
    """State with a place in the batch and blocks, into which a tier loads a part of the prompt."""

    lease: Lease
    position: int  # computing resumes here after the load
    loads: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Prefilling:
    lease: Lease


@dataclass(frozen=True, slots=True)
class Decoding:
    lease: Lease


@dataclass(frozen=True, slots=True)
class Preempted:
    """State at the head of the queue. The computed tokens stay in the cache until eviction."""


@dataclass(frozen=True, slots=True)
class Ended:
    """State after the terminal event."""


State = Waiting | Held | WaitingForPrefix | Loading | Prefilling | Decoding | Preempted | Ended


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Sequence:
    """A request in the engine. Owned by the engine's thread."""

    request: Request
    sink: Sink
    scope: Scope  # of the prompt: generated tokens are not public
    max_tokens: int
    sampler: Sampler
    detokenizer: Detokenizer | NoText
    stop_tokens: frozenset[int]
    submitted_at: float
    arrival: int = -1  # order of submission, set by the request table: breaks ties
    tenant: str = field(init=False)  # whose turns it has: no salt, which clients may choose
    state: State = field(default_factory=Waiting)
    generated: list[int] = field(default_factory=list)
    cached_tokens: int | None = None  # None: not admitted yet
    prompt_scored: bool = field(init=False)  # no prompt tokens are left to score
    prompt_scores: list[Logprobs] = field(default_factory=list)  # one for each chunk
    plan: Plan = NOTHING  # to be executed before its next forward
    hit_protection: HitProtection | None = None
    load_choice: LoadChoice | None = None  # the last decision about loading
    explanation: Explanation | None = None  # of the hit, for a diagnosis
    hint_outcomes: tuple[HintOutcome, ...] = ()  # of its first admission
    may_load: bool = True  # from a tier: False after a load that took too long
    lookup_rate: AcceptanceRate = field(default_factory=AcceptanceRate)  # of drafts by lookup
    head_rate: AcceptanceRate = field(default_factory=AcceptanceRate)  # of drafts by the model's heads
    guess: Guess | None = None  # its last draft, until it is compared with the tokens that came
    draft_tokens: int = 0  # verified
    accepted_draft_tokens: int = 0
    history: TokenHistory | None = None  # its own tokens, once a draft was looked up
    admitted_at: float | None = None
    computed_at: float | None = None  # when its first forward began
    first_token_at: float | None = None
    memory_tokens: int = 0  # of cached_tokens: found in memory
    loaded_from_host_share: float = 0.0  # of the bytes that were loaded
    waited_at: float | None = None  # since when it waits, or waited, for a prefix that another one computes
    load_began_at: float | None = None
    prefill_at: float | None = None  # start of the step with its first chunk
    held_at: float | None = None  # since when it is held, or was, for its session's place in memory
    held_s: float = 0.0  # for how long it was
    was_held_for_memory: bool = False  # its admission has waited because memory was scarce

    def __post_init__(self) -> None:
        self.tenant = "" if self.request.hints is None else self.request.hints.tenant
        self.prompt_scored = self.request.prompt_logprobs is None

    @property
    def namespace(self) -> Namespace:
        return self.scope.namespace

    @property
    def phase(self) -> Phase:
        """The phase that it is in. A preempted request is queued again."""
        match self.state:
            case Held():
                return Phase.HELD
            case WaitingForPrefix():
                return Phase.WAITING_FOR_PREFIX
            case Loading():
                return Phase.LOADING
            case Prefilling():
                return Phase.PREFILL
            case Decoding():
                return Phase.DECODE
            case Waiting() | Preempted() | Ended():
                return Phase.QUEUED

    def did_not_load(self) -> None:
        """Records that the sequence computes its prefix although a load was chosen."""
        if self.load_choice is not None:
            self.load_choice = replace(self.load_choice, load=False)

    @property
    def tokens(self) -> Tokens:
        """[prompt + generated] all known tokens: those to compute before the next one is sampled."""
        if not self.generated:
            return self.request.tokens
        return np.concatenate((self.request.tokens, np.array(self.generated, np.int32)))

    def uncomputed(self, lease: Lease) -> Tokens:
        """Returns the known tokens behind the lease's computed ones, while it decodes: the last one, and those before
        it that were computed with a wrong draft."""
        computed = lease.num_computed_tokens - len(self.request.tokens)
        return np.array(self.generated[computed:], np.int32)

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still generate."""
        return self.max_tokens - len(self.generated)

    @property
    def lease(self) -> Lease | None:
        """The lease, while the sequence takes part in steps. A load in flight owns its lease itself."""
        match self.state:
            case Prefilling(lease) | Decoding(lease):
                return lease
            case _:
                return None

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of the first admission; None if the request does not ask for it."""
        return self.explained if self.request.diagnose else None

    @property
    def explained(self) -> Diagnosis | None:
        """The diagnosis of the first admission; None if that was not explained."""
        if self.explanation is None or self.cached_tokens is None:
            return None
        told = replace(self.explanation, below=self.load_choice)
        return diagnosis_of(told, self.cached_tokens, scored=self.request.prompt_logprobs is not None)

    def rest_of_text(self) -> str:
        """Returns the text held back so far, now that no token follows. Call it once, at the end."""
        return self.detokenizer.finish()

    @property
    def log_fields(self) -> dict[str, str]:
        """The fields of a log line about the sequence."""
        return {"request_id": self.request.http_id}

    @property
    def loaded_tokens(self) -> int:
        """Prompt tokens that were loaded from a tier."""
        return max(0, (self.cached_tokens or 0) - self.memory_tokens)

    @property
    def loaded_from_host_tokens(self) -> int:
        """Prompt tokens that were loaded from the host's RAM. A load from two tiers is divided by its bytes."""
        return round(self.loaded_tokens * self.loaded_from_host_share)

    def usage(self, now: float) -> Usage:
        admitted_at = now if self.admitted_at is None else self.admitted_at
        return Usage(
            prompt_tokens=len(self.request.tokens),
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=len(self.generated),
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
            held_s=self.held_s,
            queued_s=admitted_at - self.submitted_at,
            ttft_s=(self.first_token_at if self.first_token_at is not None else now) - self.submitted_at,
            total_s=now - self.submitted_at,
            loading_s=(now if self.computed_at is None else self.computed_at) - admitted_at,
            loaded_tokens=self.loaded_tokens,
            loaded_from_host_tokens=self.loaded_from_host_tokens,
        )

    @property
    def costs(self) -> RequestCosts:
        """The costs of the request, for the report of its session. Its prompt is computed."""
        began = self.admitted_at if self.computed_at is None else self.computed_at
        first = began if self.first_token_at is None else self.first_token_at
        queued_s = 0.0 if self.admitted_at is None else self.admitted_at - self.submitted_at - self.held_s
        prefill_s = 0.0 if began is None or first is None else first - began
        return RequestCosts(max(0.0, queued_s), prefill_s, self.draft_tokens, self.accepted_draft_tokens)

    def emit(self, event: Event) -> None:
        """Passes an event to the sink. A sink that raises loses its events and disturbs no other request."""
        try:
            self.sink(event)
        except BaseException:
            log.exception("the sink of request %s raised", self.request.id, extra=self.log_fields)

    def end(self, event: Terminal) -> None:
        """Emits the terminal event. Called by the request table, once."""
        assert not isinstance(self.state, Ended), "a request ended twice"
        self.state = Ended()
        self._remember_answer()  # before a client can send it back
        self.emit(event)

    def _remember_answer(self) -> None:
        if self.request.place is None:
            return
        try:
            self.request.place.remember(self.generated)
        except Exception:  # costs a later hit, and no request
            log.exception(
                "the answer of request %s could not be remembered", self.request.id, extra=self.log_fields
            )


class SequenceFactory:
    """Maker of the sequences of one engine's requests. Any thread may call it."""

    def __init__(self, tokenizer: ModelTokenizer | None, limits: RequestLimits, seed: int | None) -> None:
        """Without a tokenizer, tokens have no text. `seed` fixes the seeds of requests that choose none."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._seeds = np.random.default_rng(seed)
        self._lock = threading.Lock()  # of _seeds

    def make(self, request: Request, sink: Sink, scope: Scope, now: float) -> Sequence:
        ends = self._limits.end_tokens(request)
        seed, constraint = request.sampling.seed, request.constraint
        return Sequence(
            request=request,
            sink=sink,
            scope=scope,
            max_tokens=self._limits.max_tokens(request),
            sampler=Sampler(
                request.sampling,
                request.tokens,
                self._limits.vocab_size,
                self._next_seed() if seed is None else seed,
                ends,
                request.stop.min_tokens,
                progress=None if constraint is None else AnswerProgress(constraint),
            ),
            detokenizer=NoText()
            if self._tokenizer is None
            else Detokenizer(
                self._tokenizer, request.stop.stop_strings, request.tokens, request.visible_tokens
            ),
            stop_tokens=frozenset(ends),
            submitted_at=now,
        )

    def _next_seed(self) -> int:
        with self._lock:
            return int(self._seeds.integers(2**63))
