"""Speculative decoding by prompt lookup: guessing what comes next from what was seen before.

A draft is verified by the forward that computes the next token anyway: each of its positions is sampled as ever, with
the request's own sampler, and counts for as long as what was sampled is what was drafted. So drafts change how many
forwards an answer takes, and nothing about the answer (Leviathan et al. 2023, for a draft that is certain of itself;
Saxena 2023 for prompts as the source).
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Protocol

import numpy as np

from rootstock.cache import KVCache
from rootstock.cache.families import RecurrentState
from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Lease
from rootstock.cache.plan import Tokens
from rootstock.cache.types import NO_TOKENS
from rootstock.engine.sequence import Sequence
from rootstock.engine.speculation.draft_cost import DraftCost, could_pay, worth_verifying
from rootstock.engine.speculation.ngrams import LONGEST_AGREEMENT, NGRAM, TokenHistory
from rootstock.runtime.base import ModelDescription

MOST_DRAFT_TOKENS = 16  # for one sequence at once, unless asked otherwise
MOST_SEQUENCES = 32  # more of them keep the machine busy without drafts
SHARED_TOKENS = 1 << 17  # of one namespace's last requests, 3 MiB with their index
SHARED_NAMESPACES = 8  # that are remembered, those used last


class Proposer(Protocol):
    """What a scheduler asks for drafts. Any draft is right: it costs time at most."""

    def drafts(self, sequences: Listed[Sequence], leases: Listed[Lease], room: int) -> list[Tokens]:
        """What may follow each of these sequences, which are decoding; `room` tokens together at most."""
        ...

    def observe(self, sequences: int, drafts: int, context: int, seconds: float) -> None:
        """A forward of decodes alone, and how long it took."""
        ...

    def ended(self, sequence: Sequence, lease: Lease) -> None:
        """A sequence is complete; the lease has all its tokens."""
        ...

    def forget(self, namespace: Namespace | None = None) -> None:
        """Nothing is remembered of sequences that have ended, of all namespaces unless one is given."""
        ...


class NgramProposer:
    """Drafts from three places, the surest first: what the tree has behind the very same prefix, what followed the
    last tokens earlier in the sequence itself, and what followed them in the last requests of its namespace.

    How long they are is decided by how often the sequence's drafts were right and by what verifying them costs.
    """

    def __init__(self, cache: KVCache, most: int | None = None) -> None:
        self._cache = cache
        self._most = MOST_DRAFT_TOKENS if most is None else most
        self._cost = DraftCost()
        self._shared: dict[Namespace, TokenHistory] = {}  # in the order of their last use

    def drafts(self, sequences: Listed[Sequence], leases: Listed[Lease], room: int) -> list[Tokens]:
        count = len(sequences)
        if count > MOST_SEQUENCES or room <= 0:
            return [NO_TOKENS] * count
        context = sum(lease.computed for lease in leases)
        longer = self._cost.longer(count, context, min(room, count * self._most))
        if longer is None:
            return [NO_TOKENS] * count
        if not could_pay(count, longer):
            self._cost.hope(count)
            return [NO_TOKENS] * count
        found = [self._guess(sequence, lease) for sequence, lease in zip(sequences, leases, strict=True)]
        chances = [
            probability ** np.arange(1, len(tokens) + 1, dtype=np.float64) for tokens, probability in found
        ]
        worth = worth_verifying(count, chances, longer)
        if not any(worth) and any(len(tokens) for tokens, _ in found):
            self._cost.hope(count)
        return [tokens[:n] for (tokens, _), n in zip(found, worth, strict=True)]

    def observe(self, sequences: int, drafts: int, context: int, seconds: float) -> None:
        self._cost.observe(sequences, drafts, context, seconds)

    def ended(self, sequence: Sequence, lease: Lease) -> None:
        """Others will know what it computed, which is what nobody had computed before it."""
        if not self._cache.reuse:
            return
        shared = self._shared.pop(sequence.namespace, None) or TokenHistory(SHARED_TOKENS)
        for namespace in [each for each in self._shared if not self._cache.knows(each)]:
            del self._shared[namespace]
        if len(self._shared) >= SHARED_NAMESPACES:
            del self._shared[next(iter(self._shared))]
        self._shared[sequence.namespace] = shared
        shared.append(lease.tokens[max(0, lease.hit_tokens - NGRAM) :])

    def forget(self, namespace: Namespace | None = None) -> None:
        if namespace is None:
            self._shared.clear()
        else:
            self._shared.pop(namespace, None)

    def _guess(self, sequence: Sequence, lease: Lease) -> tuple[Tokens, float]:
        """What may come next, and the chance that one more token of it is right."""
        most = min(self._most, sequence.tokens_left - 1)
        if most <= 0:
            return NO_TOKENS, 0.0
        tokens, agreement = self._look_up(sequence, lease, most)
        if len(tokens):
            tokens = _before_end(tokens, sequence.stop_tokens)
        if not len(tokens) or sequence.acceptance.pauses:
            return NO_TOKENS, 0.0
        return tokens, sequence.acceptance.probability(_first_guess(agreement))

    def _look_up(self, sequence: Sequence, lease: Lease, most: int) -> tuple[Tokens, int]:
        """What was found, and how many tokens before it agreed."""
        behind = self._cache.following(lease, sequence.generated[-1], most)
        if len(behind):
            return behind, LONGEST_AGREEMENT
        own = _history(sequence)
        end = own.tokens[-LONGEST_AGREEMENT:]
        place = own.find(end)
        shared = self._shared.get(sequence.namespace)
        elsewhere = None if shared is None else shared.find(end)
        if elsewhere is not None and (place is None or elsewhere.agreement > place.agreement):
            assert shared is not None
            return shared.following(elsewhere, most), elsewhere.agreement
        return (NO_TOKENS, 0) if place is None else (own.repeating(place, most), place.agreement)


def why_not(described: ModelDescription, most: int | None) -> str | None:
    """Why no drafts are verified for a model, if up to `most` are asked for; None: they are."""
    if most == 0:
        return "not asked for"
    if any(isinstance(family, RecurrentState) for family in described.families):
        return "a recurrent state cannot be taken back to before a draft that was wrong"
    if described.rung == "one sequence per forward":
        return "it is run one sequence per forward"
    return None


def _history(sequence: Sequence) -> TokenHistory:
    """Of the sequence's own tokens, up to the last."""
    history = sequence.history
    if history is None:
        history = sequence.history = TokenHistory()
        history.append(sequence.request.tokens)
    known = history.length - len(sequence.request.tokens)
    if known < len(sequence.generated):
        history.append(np.array(sequence.generated[known:], np.int32))
    return history


def _before_end(tokens: Tokens, stop_tokens: frozenset[int]) -> Tokens:
    """A token that ends the sequence is not worth a row: nothing is computed behind it."""
    for i, token in enumerate(tokens.tolist()):
        if token in stop_tokens:
            return tokens[:i]
    return tokens


def _first_guess(agreement: int) -> float:
    """The more tokens agreed before it, the likelier one more does: 0.43 at 3, 0.9 from 11 on."""
    return min(0.9, 0.25 + 0.06 * agreement)
