"""Explanation of a hit: the position at which a prompt stops hitting, and the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rootstock.cache.eviction import EvictionHistory
from rootstock.cache.lease import Match
from rootstock.cache.radix_node import NEAR_TOKENS
from rootstock.cache.volatile import Realignment

Cap = Literal[
    "cache_off",
    "nothing_cached",  # this namespace holds no prefix that begins like this
    "diverged",  # every cached prefix goes on with another token
    "not_cached",  # the reason is withheld (`Explanation.of_the_prompt`)
    "no_checkpoint",  # K/V are cached, but some family cannot resume so far
    "evicted",  # more of it was cached once
    "end_of_cached",  # the cached prefix agrees to its end; the rest was never seen
    "last_token",  # all of it is cached; the last token is always computed
]

MAX_ALTERNATIVES = 8


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The choice between loading a tier hit and computing it, with the estimates behind it. Estimates are None until
    something was measured; then loading is tried."""

    position: int  # up to which it could be loaded
    records: int
    payload_bytes: int
    load_s: float | None  # including the loads that are queued before it
    compute_s: float | None
    load: bool

    @property
    def message(self) -> str:
        def told(seconds: float | None) -> str:
            return "unknown" if seconds is None else f"{seconds * 1000:,.1f} ms"

        chosen = "It is loaded." if self.load else "It is computed."
        return (
            f"{self.position:,} tokens can be resumed with {self.payload_bytes:,} bytes from the tier below: loading "
            f"is estimated at {told(self.load_s)}, computing at {told(self.compute_s)}. {chosen}"
        )


@dataclass(frozen=True, slots=True)
class FoundRetention:
    """The retention of the deepest part of a found prefix."""

    lasts_s: float  # from now on, if it is not used again
    priority: int
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    prompt_tokens: int
    matched_tokens: int  # that need not be computed
    cap: Cap
    divergence: int | None  # position of the first token that is not cached; None: all are
    asked_token: int | None  # the prompt's token there
    # The tokens with which cached prefixes go on there. None, here and in the fields below: withheld from clients.
    cached_tokens_there: tuple[int, ...] | None
    evicted_tokens: int | None  # how many of the following tokens were cached once
    pending_tokens: int | None  # how many of the following tokens a running request is computing now
    found_tokens: int  # of the prompt, whose K/V are cached, resumable or not
    capped_by: str | None  # the family that cannot resume as far as that
    message: str
    below: LoadChoice | None = None  # of a deeper hit in the tier below; None: there is none
    # The span in which the prompt diverges, if a cached prefix agrees with it again soon after. None: none does.
    volatile: Realignment | None = None
    retention: FoundRetention | None = None  # of the found prefix; None: no hint keeps it
    lost_although_retained: bool = False  # the evicted tokens were within their time to live
    evicted_checkpoint: int | None = (
        None  # the deepest position of an evicted checkpoint that would have been hit
    )

    def of_the_prompt(self) -> Explanation:
        """Returns the part that a client may see: how much of its own prompt is cached. Withholds tokens, evictions
        and running requests of others in the namespace, and whether there are any."""
        cap, message = self.cap, self.message
        if cap in ("diverged", "evicted", "end_of_cached"):
            cap = "not_cached" if self.found_tokens else "nothing_cached"
            message = _NOTHING_CACHED
        if cap == "no_checkpoint":
            found = min(self.found_tokens, self.prompt_tokens - 1)  # the last token is always computed
            message = _no_checkpoint(found, self.matched_tokens, self.capped_by, _NONE_THERE)
        if cap == "not_cached":
            message = (
                f"{self.matched_tokens:,} of {self.prompt_tokens:,} tokens are cached; nothing cached has token "
                f"{self.asked_token} at position {self.found_tokens:,}, as the prompt does."
            )
        return replace(
            self,
            cap=cap,
            message=message,
            cached_tokens_there=None,
            evicted_tokens=None,
            pending_tokens=None,
            below=None,
            volatile=None,
            retention=None,
            lost_although_retained=False,
            evicted_checkpoint=None,
        )


def explain_match(
    match: Match,
    history: EvictionHistory,
    reuse: bool,
    volatile: Realignment | None = None,
    retention: FoundRetention | None = None,
) -> Explanation:
    """Derives the reason from the match and from the history of evictions."""
    tokens, found = match.tokens, match.found
    all_cached = found == len(tokens)
    alternatives: tuple[int, ...] = ()
    evicted = 0
    lost_although_retained = False
    evicted_checkpoint = _evicted_checkpoint(match, history) if match.capped_by is not None else None
    if match.node is not None and not all_cached:
        node = match.node
        if found < node.end:
            alternatives = (int(node.tokens[found - node.start]),)
        else:
            alternatives = tuple(node.children)[:MAX_ALTERNATIVES]
            evicted = history.evicted_after(node, tokens[found:])
            lost_although_retained = evicted > 0 and history.was_retained(node, tokens[found:])
    cap: Cap
    if not reuse:
        cap = "cache_off"
    elif match.capped_by is not None:
        cap = "no_checkpoint"
    elif all_cached and len(tokens):
        cap = "last_token"
    elif evicted:
        cap = "evicted"
    elif found == 0:
        cap = "nothing_cached"
    elif alternatives:
        cap = "diverged"
    else:
        cap = "end_of_cached"
    return Explanation(
        prompt_tokens=len(tokens),
        matched_tokens=match.length,
        cap=cap,
        divergence=None if all_cached else found,
        asked_token=None if all_cached else int(tokens[found]),
        cached_tokens_there=alternatives,
        evicted_tokens=evicted,
        pending_tokens=0 if match.pending is None else max(0, match.pending.until - found),
        found_tokens=found,
        capped_by=match.capped_by,
        message=_message(cap, match, alternatives, evicted, volatile, evicted_checkpoint)
        + (_LOST_ALTHOUGH_RETAINED if cap == "evicted" and lost_although_retained else ""),
        volatile=volatile,
        retention=retention,
        lost_although_retained=lost_although_retained,
        evicted_checkpoint=evicted_checkpoint,
    )


def _evicted_checkpoint(match: Match, history: EvictionHistory) -> int | None:
    """Returns the deepest position of an evicted checkpoint at which the prompt would resume if it were there."""
    assert match.node is not None
    positions = [at for node in match.node.path() for at in node.evicted_checkpoints if at <= match.found]
    rest = match.tokens[match.found :]
    if match.found == match.node.end and len(rest):
        end = match.found + history.evicted_after(match.node, rest)
        positions += [at for at in history.checkpoints_after(match.node, rest) if at <= end]
    return max((at for at in positions if match.length < at <= match.limit), default=None)


def _no_checkpoint(found: int, length: int, family: str | None, reason: str) -> str:
    return f"KV to {found:,}, {family} only to {length:,}: {found - length:,} tokens recomputed because {reason}."


def _reason(match: Match, found: int, evicted_checkpoint: int | None) -> str:
    if evicted_checkpoint is not None:
        return f"the checkpoint at {evicted_checkpoint:,} has been evicted since"
    assert match.node is not None
    deeper = [at for node in match.node.path() for at in node.checkpoints if match.limit < at <= match.found]
    if deeper:
        return f"the next checkpoint is at {min(deeper):,}, behind the last position at which the prompt can resume"
    if match.length and found - match.length < NEAR_TOKENS:
        return f"no checkpoint is left less than {NEAR_TOKENS} tokens behind another one"
    return "no checkpoint was left at the divergence point"


def _message(
    cap: Cap,
    match: Match,
    alternatives: tuple[int, ...],
    evicted: int,
    volatile: Realignment | None,
    evicted_checkpoint: int | None,
) -> str:
    of = f"{match.length:,} of {len(match.tokens):,} tokens are cached"
    match cap:
        case "cache_off":
            return "The prefix cache is switched off."
        case "no_checkpoint":
            found = min(match.found, match.limit)
            reason = _reason(match, found, evicted_checkpoint)
            return _no_checkpoint(found, match.length, match.capped_by, reason)
        case "last_token":
            return f"{of}; the last token is always computed."
        case "evicted":
            return f"{of}; {evicted:,} more were cached and have been evicted since."
        case "nothing_cached":
            return _NOTHING_CACHED
        case "diverged":
            there = ", ".join(map(str, alternatives))
            asked = int(match.tokens[match.found])
            where = f"at position {match.found:,} the prompt has token {asked}"
            told = f"{of}; {where}, cached prefixes go on with {there}."
            return told if volatile is None else f"{told} {_volatile_message(volatile)}"
        case "end_of_cached":
            return f"{of}; no cached prefix is longer."
        case "not_cached":
            raise AssertionError("only `of_the_prompt` answers this")


def _volatile_message(volatile: Realignment) -> str:
    return (
        f"{len(volatile.asked):,} tokens differ (in the cached prefix {len(volatile.cached):,}), and the next "
        f"{volatile.agreed:,} are cached behind other tokens."
    )


_LOST_ALTHOUGH_RETAINED = (
    " A hint retained them: running requests or retained prefixes of higher rank needed their memory."
)
_NONE_THERE = "no checkpoint is at the divergence point"
_NOTHING_CACHED = "Nothing cached begins with this prompt's first token."
