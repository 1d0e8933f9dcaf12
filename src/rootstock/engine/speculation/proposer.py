"""Speculative decoding by n-gram lookup: drafts from tokens that were seen before.

The forward that computes the next token verifies a draft too. Each position is sampled with the request's own sampler
and counts while the sampled tokens equal the draft. Drafts change the number of forwards and never the answer
(Leviathan et al. 2023, for a deterministic draft; Saxena 2023 for prompts as the source).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Listed

import numpy as np

from rootstock.cache.families import RecurrentState
from rootstock.cache.image_tokens import FIRST_IMAGE_TOKEN
from rootstock.cache.keys import Namespace
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Lease
from rootstock.cache.types import NO_TOKENS, Tokens
from rootstock.engine.parts import Forward, Part
from rootstock.engine.sequence import Sequence
from rootstock.engine.speculation.draft_cost import DraftCost, could_pay, worth_verifying
from rootstock.engine.speculation.ngrams import LONGEST_AGREEMENT, NGRAM, TokenHistory
from rootstock.runtime.base import ModelDescription

MOST_DRAFT_TOKENS = 16  # for one sequence at once, unless asked otherwise
MOST_SEQUENCES = 32  # a larger batch uses the machine without drafts
SHARED_TOKENS = 1 << 17  # kept of one namespace's last requests: 3 MiB with their index
SHARED_NAMESPACES = 8  # kept, those used last


class Proposer(Part, ABC):
    """Source of drafts for the scheduler. A wrong draft costs time and never changes an answer."""

    @abstractmethod
    def drafts(self, sequences: Listed[Sequence], leases: Listed[Lease], room: int) -> list[Tokens]:
        """Proposes a draft for each of these decoding sequences, at most `room` tokens together."""

    def completed(self, sequence: Sequence, lease: Lease) -> None:
        """Learns from a complete sequence, whose lease has all its tokens."""


class NgramProposer(Proposer):
    """Proposer of drafts from three sources: the branch of the tree that follows the sequence, else an earlier
    occurrence of its last n-gram, in the sequence itself or in the last requests of its namespace.

    The length of a draft depends on the sequence's rate of acceptance and on the cost of verifying.
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
        context = sum(lease.num_computed_tokens for lease in leases)
        longer = self._cost.longer(count, context, min(room, count * self._most))
        if longer is None:
            return [NO_TOKENS] * count
        if not could_pay(count, longer):
            self._cost.relax(count)
            return [NO_TOKENS] * count
        found = [self._guess(sequence, lease) for sequence, lease in zip(sequences, leases, strict=True)]
        chances = [
            probability ** np.arange(1, len(tokens) + 1, dtype=np.float64) for tokens, probability in found
        ]
        worth = worth_verifying(count, chances, longer)
        if not any(worth) and any(len(tokens) for tokens, _ in found):
            self._cost.relax(count)
        return [tokens[:n] for (tokens, _), n in zip(found, worth, strict=True)]

    def forwarded(self, forward: Forward) -> None:
        if forward.only_decodes:
            drafts = sum(item.drafts for item in forward.scheduled)
            context = sum(segment.past for segment in forward.segments)
            self._cost.observe(len(forward.scheduled), drafts, context, forward.seconds)

    def completed(self, sequence: Sequence, lease: Lease) -> None:
        """Adds the tokens that the sequence computed, and that were not cached, to its namespace's history."""
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
        """Returns a draft, and the chance that one more token of it is accepted."""
        most = min(self._most, sequence.tokens_left - 1)
        if most <= 0:
            return NO_TOKENS, 0.0
        tokens, agreement = self._look_up(sequence, lease, most)
        if len(tokens):
            tokens = _before_end(tokens, sequence.stop_tokens)
        if (beyond := np.flatnonzero(tokens >= FIRST_IMAGE_TOKEN)).size:
            tokens = tokens[: beyond[0]]  # what followed elsewhere was a client's image
        progress = sequence.sampler.progress
        if len(tokens) and progress is not None:
            tokens = tokens[: progress.agreeing(tokens.tolist())]
        if not len(tokens) or sequence.acceptance.skip():
            return NO_TOKENS, 0.0
        return tokens, sequence.acceptance.probability(_first_guess(agreement))

    def _look_up(self, sequence: Sequence, lease: Lease, most: int) -> tuple[Tokens, int]:
        """Returns the tokens found, and how many tokens before them agreed."""
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
    """Returns the reason why speculative decoding is off, if up to `most` drafts are asked for. None: it is on."""
    if most == 0:
        return "not asked for"
    if any(isinstance(family, RecurrentState) for family in described.families):
        return "a recurrent state cannot be taken back to before a draft that was wrong"
    if described.execution_mode == "one sequence per forward":
        return "it is run one sequence per forward"
    return None


def _history(sequence: Sequence) -> TokenHistory:
    """Returns the history of the sequence's own tokens, up to the last."""
    history = sequence.history
    if history is None:
        history = sequence.history = TokenHistory()
        history.append(sequence.request.tokens)
    known = history.length - len(sequence.request.tokens)
    if known < len(sequence.generated):
        history.append(np.array(sequence.generated[known:], np.int32))
    return history


def _before_end(tokens: Tokens, stop_tokens: frozenset[int]) -> Tokens:
    """Cuts a draft before a stop token: no token is computed after it."""
    for i, token in enumerate(tokens.tolist()):
        if token in stop_tokens:
            return tokens[:i]
    return tokens


def _first_guess(agreement: int) -> float:
    """Guesses the chance of acceptance from the agreement: 0.43 at 3 tokens, 0.9 from 11 on."""
    return min(0.9, 0.25 + 0.06 * agreement)
