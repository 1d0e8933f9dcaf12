"""Diagnosis of a request: how much of its prompt was found in the cache, and the cause why no more was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rootstock.cache.explain import Explanation
from rootstock.cache.volatile import Realignment

Cause = Literal[
    "none",  # all that was ever cached of the prompt was found
    "cache_off",
    "scored",  # the log-probabilities of the prompt need every position
    "nothing_cached",  # the namespace holds no prefix that begins like this
    "diverged",  # every cached prefix goes on with another token
    "volatile_span",  # … and one agrees again after a few tokens
    "no_checkpoint",  # K/V are cached, but some family cannot resume so far
    "evicted",  # more of it was cached once
    "on_disk",  # more of it is in a tier, and computing was expected to be faster than loading
]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The prompt's way through the cache at its first admission, before its own tokens were published.

    Only prefixes of the request's own namespace count.
    """

    prompt_tokens: int
    matched_tokens: int  # found in memory
    cached_tokens: int  # found in memory or loaded: not computed
    cause: Cause
    position: int | None  # of the first token that the cause concerns
    missed_tokens: int  # computed because of the cause
    message: str
    family: str | None = None  # that has no checkpoint
    volatile: Realignment | None = None


def diagnosis_of(explanation: Explanation, cached_tokens: int, *, scored: bool) -> Diagnosis:
    """Derives a diagnosis from the explanation of the match with which a request was admitted.

    `cached_tokens` are more than were matched if the rest was loaded from a tier.
    """
    cause, position, missed = _cause(explanation, cached_tokens, scored)
    return Diagnosis(
        explanation.prompt_tokens,
        explanation.matched_tokens,
        cached_tokens,
        cause,
        position,
        missed,
        _SCORED if cause == "scored" else explanation.message,
        explanation.capped_by,
        explanation.volatile if cause == "volatile_span" else None,
    )


_SCORED = "All tokens are computed: the request asks for the log-probabilities of its prompt."


def _cause(told: Explanation, cached_tokens: int, scored: bool) -> tuple[Cause, int | None, int]:
    """Returns the cause, its position, and the tokens that it cost."""
    rest = told.prompt_tokens - cached_tokens
    if told.cap == "cache_off":
        return "cache_off", 0, rest
    if scored:
        return "scored", 0, told.found_tokens
    below = told.below
    if below is not None and not below.load and below.position > told.matched_tokens:
        return "on_disk", told.matched_tokens, below.position - told.matched_tokens
    if cached_tokens > told.matched_tokens:  # loaded
        return "none", None, 0
    match told.cap:
        case "no_checkpoint" if told.evicted_checkpoint is not None:
            return "evicted", told.matched_tokens, told.evicted_checkpoint - told.matched_tokens
        case "no_checkpoint":
            return "no_checkpoint", told.matched_tokens, max(0, told.found_tokens - told.matched_tokens)
        case "evicted":
            return "evicted", told.found_tokens, told.evicted_tokens or 0
        case "nothing_cached":
            return "nothing_cached", 0, rest
        case "diverged" if told.volatile is not None:
            return "volatile_span", told.found_tokens, told.volatile.agreed
        case "diverged":
            return "diverged", told.found_tokens, rest
        case "end_of_cached" | "last_token" | "not_cached":
            return "none", None, 0
