"""Requests, their parameters, and the events that answer them.

Wire formats turn into `Request`. Each request gets token events, then exactly one terminal event: `Finished`,
`Failed` or `Aborted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.image_tokens import PlacedImage
from rootstock.cache.radix_node import Boundary
from rootstock.cache.retention.hint_types import CacheHints, HintOutcome
from rootstock.cache.types import Tokens
from rootstock.engine.diagnosis import Diagnosis
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.errors import RootstockError
from rootstock.text.constraints.compiled import CompiledConstraint
from rootstock.text.prompts.sampled_answers import AnswerPlace

RequestId = NewType("RequestId", str)


@dataclass(frozen=True, slots=True)
class StopParams:
    """Conditions that end a request.

    A token of `stop_tokens` or an end-of-sequence token ends it and is no part of the text. A stop string ends it and
    is cut from the text.

    With a grammar, an end-of-sequence token comes only where the grammar allows the end. The answer ends by itself
    where the grammar allows nothing else, before `min_tokens` and with `ignore_eos`, too. `max_tokens`, stop strings
    and `stop_tokens` that are text of the grammar end the answer wherever they are reached.
    """

    max_tokens: int | None = None  # None: as many as the context limit leaves
    min_tokens: int = 0  # no token that ends the answer is sampled before so many
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A sequence to generate. `n` choices are n requests, which share their prompt through the cache.

    Of n choices the first has `prompt_logprobs` if they are wanted.
    """

    id: RequestId
    tokens: Tokens  # [prompt] int32, owned by the request
    sampling: ResolvedSampling = field(default_factory=ResolvedSampling)
    stop: StopParams = StopParams()
    salt: str = ""  # of tenant and `cache_salt`: requests share cached prefixes only within one salt
    prompt_logprobs: int | None = None  # as top_logprobs, for every prompt token; computes the whole prompt
    boundaries: tuple[
        Boundary, ...
    ] = ()  # positions where later requests may diverge: each gets a checkpoint
    visible_tokens: frozenset[int] = (
        frozenset()
    )  # special tokens that the text shows, for the parser of the answer
    place: AnswerPlace | None = None  # to which the sampled ids are remembered; None: they are not
    diagnose: bool = False  # its events tell why its prompt was not found in the cache
    constraint: CompiledConstraint | None = None
    hints: CacheHints | None = None
    adapter: str = ""  # fingerprint of a LoRA adapter of the engine; empty: the base model
    http_id: str = ""  # of the HTTP request, for log lines
    images: tuple[PlacedImage, ...] = ()  # of the prompt, in order

    def fitted(self, context_limit: int) -> Request:
        """Lowers `max_tokens` to the room that the context has. The engine refuses a prompt that leaves none."""
        room, asked = context_limit - len(self.tokens), self.stop.max_tokens
        if asked is None or asked <= room or room < 1:
            return self
        return replace(self, stop=replace(self.stop, max_tokens=room))


def requests_for(
    id: str,
    prompts: Sequence[Tokens],
    choices: int,
    sampling: ResolvedSampling,
    stop: StopParams,
    *,
    salt: str,
    prompt_logprobs: int | None = None,
    boundaries: tuple[Boundary, ...] = (),
    visible_tokens: frozenset[int] = frozenset(),
    place: AnswerPlace | None = None,
    diagnose: bool = False,
    constraint: CompiledConstraint | None = None,
    hints: CacheHints | None = None,
    adapter: str = "",
    images: tuple[PlacedImage, ...] = (),
) -> tuple[Request, ...]:
    """Makes one request for each choice of each prompt: prompt by prompt, the choices of one side by side.

    A seed is increased by the choice's index: choices of one prompt with one seed would all be the same.
    """
    return tuple(
        Request(
            RequestId(f"{id}-{prompt * choices + choice}"),
            tokens,
            sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + choice),
            stop,
            salt,
            prompt_logprobs if choice == 0 else None,  # the other choices' prompt has the same
            boundaries,
            visible_tokens,
            place,
            diagnose,
            constraint,
            hints,
            adapter,
            images=images,
        )
        for prompt, tokens in enumerate(prompts)
        for choice in range(choices)
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token in the model's distribution, before temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # best first


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """TokenLogprobs of consecutive tokens, as arrays: a long prompt would be a million objects."""

    tokens: Tokens  # [rows] int32
    logprobs: NDArray[np.float64]  # [rows]
    top_tokens: Tokens  # [rows, top] int32, best first
    top_logprobs: NDArray[np.float64]  # [rows, top]

    @staticmethod
    def joined(parts: Sequence[Logprobs]) -> Logprobs:
        """Concatenates at least one part; all have the same number of top entries."""
        return Logprobs(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.top_tokens for part in parts]),
            np.concatenate([part.top_logprobs for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> Logprobs:
        return Logprobs(
            self.tokens[rows], self.logprobs[rows], self.top_tokens[rows], self.top_logprobs[rows]
        )

    def __iter__(self) -> Iterator[TokenLogprob]:
        columns = (self.tokens, self.logprobs, self.top_tokens, self.top_logprobs)
        for token, logprob, tokens, logprobs in zip(*(each.tolist() for each in columns), strict=True):
            yield TokenLogprob(token, logprob, tuple(zip(tokens, logprobs, strict=True)))


@dataclass(slots=True)
class PromptTokens:
    """Tokens of prompts that were computed to their end, by the source of their K/V."""

    memory: int = 0
    host: int = 0  # loaded from the host's RAM
    disk: int = 0  # loaded from the disk
    computed: int = 0

    @property
    def loaded(self) -> int:
        return self.host + self.disk

    @property
    def all(self) -> int:
        return self.memory + self.loaded + self.computed

    def add(self, other: PromptTokens) -> None:
        self.memory += other.memory
        self.host += other.host
        self.disk += other.disk
        self.computed += other.computed


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the cache or loaded, at first admission
    completion_tokens: int
    draft_tokens: int = 0  # draft tokens that were verified
    accepted_draft_tokens: int = 0  # accepted ones: each saved a forward, and is a completion token
    queued_s: float = 0.0  # submission → first admission
    held_s: float = 0.0  # of queued_s: until the session had a place in memory
    ttft_s: float = 0.0  # submission → first token
    total_s: float = 0.0
    loading_s: float = 0.0  # first admission → first forward: the load from a tier, if there was one
    loaded_tokens: int = 0  # of cached_tokens: loaded from a tier
    loaded_from_host_tokens: int = 0  # of loaded_tokens: the host's RAM had them, the disk had the others


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The log-probabilities of a prompt, once before the first token. Entry i scores prompt token i + 1."""

    id: RequestId
    logprobs: Logprobs  # [prompt - 1]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    id: RequestId
    token: int
    text: str  # text that became certain with this token: empty, or of several tokens
    logprob: TokenLogprob | None = None
    cached_tokens: int = 0  # of the request's prompt, as in Usage: known with the first token
    diagnosis: Diagnosis | None = None  # with the first token, if the request asks for it
    hints: tuple[HintOutcome, ...] = ()  # with the first token: decisions about the request's hints


@dataclass(frozen=True, slots=True)
class Finished:
    id: RequestId
    reason: Literal["stop", "length"]
    usage: Usage
    text: str = ""  # text held back until the end, to be appended
    stopped_by: str | int | None = None  # the stop string or token
    diagnosis: Diagnosis | None = None  # if the request asks for it
    hints: tuple[HintOutcome, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    id: RequestId
    error: RootstockError


@dataclass(frozen=True, slots=True)
class Aborted:
    id: RequestId
    usage: Usage


Terminal = Finished | Failed | Aborted
Event = PromptScored | TokenEvent | Terminal
Sink = Callable[[Event], None]  # called on the engine's thread: must not block and must not raise
