"""Speculative decoding by n-gram lookup: drafts from tokens that were seen before.

The forward that computes the next token verifies a draft too. Each position is sampled with the request's own sampler
and counts while the sampled tokens equal the draft. Drafts change the number of forwards and never the answer
(Leviathan et al. 2023, for a deterministic draft; Saxena 2023 for prompts as the source).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Listed

import numpy as np

from rootstock.cache.image_tokens import FIRST_IMAGE_TOKEN
from rootstock.cache.keys import Namespace
from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Lease
from rootstock.cache.types import NO_SLOT, NO_TOKENS, Tokens
from rootstock.engine.parts import Forward, Part
from rootstock.engine.sequence import Sequence
from rootstock.engine.speculation.draft_cost import (
    NO_GUESS,
    Calibration,
    DraftCost,
    Floats,
    Guess,
    could_pay,
    worth_verifying,
)
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
        self._calibration = Calibration(1 + LONGEST_AGREEMENT)  # by agreement
        self._shared: dict[Namespace, TokenHistory] = {}  # in the order of their last use

    def drafts(self, sequences: Listed[Sequence], leases: Listed[Lease], room: int) -> list[Tokens]:
        count = len(sequences)
        if count > MOST_SEQUENCES or room <= 0:
            return [NO_TOKENS] * count
        for sequence in sequences:
            _learn(sequence)
        context = sum(lease.num_computed_tokens for lease in leases)
        longer = self._cost.longer(count, context, min(room, count * self._most))
        if longer is None:
            return [NO_TOKENS] * count
        if not could_pay(count, longer):
            self._cost.relax(count)
            return [NO_TOKENS] * count
        repeats = any(lease.slot != NO_SLOT for lease in leases)
        guesses = self._guesses(sequences, leases, longer, repeats=repeats)
        for sequence, guess in zip(sequences, guesses, strict=True):
            sequence.guess = guess if len(guess.tokens) else None
        worth = worth_verifying(count, [guess.chances for guess in guesses], longer, repeats=repeats)
        if not any(worth.counts) and any(len(guess.tokens) for guess in guesses):
            self._cost.relax(count)
        return [guess.tokens[:n] for guess, n in zip(guesses, worth.counts, strict=True)]

    def forwarded(self, forward: Forward) -> None:
        if forward.only_decodes:
            rows = sum(len(segment.tokens) for segment in forward.segments)
            context = sum(segment.past for segment in forward.segments)
            more = rows - len(forward.scheduled)  # draft tokens, and some that are computed again
            self._cost.observe(len(forward.scheduled), more, context, forward.seconds)

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

    def _guesses(
        self, sequences: Listed[Sequence], leases: Listed[Lease], longer: Floats, *, repeats: bool
    ) -> list[Guess]:
        """Returns a draft for each sequence. `longer` and `repeats`: as `worth_verifying` takes them."""
        return [self._guess(sequence, lease) for sequence, lease in zip(sequences, leases, strict=True)]

    def _guess(self, sequence: Sequence, lease: Lease) -> Guess:
        most = min(self._most, sequence.tokens_left - 1)
        if most <= 0 or len(sequence.uncomputed(lease)) > 1:
            return NO_GUESS
        tokens, agreement = self._look_up(sequence, lease, most)
        tokens = possible(sequence, tokens)
        if not len(tokens) or sequence.lookup_rate.skip():
            return NO_GUESS
        calibration = self._calibration
        probability = sequence.lookup_rate.probability(calibration.chance(agreement, _first_guess(agreement)))
        chances = probability ** np.arange(1, len(tokens) + 1, dtype=np.float64)
        levels = [agreement] * len(tokens)
        return Guess(tokens, chances, levels, calibration, sequence.lookup_rate, len(sequence.generated))

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


def _learn(sequence: Sequence) -> None:
    """Compares the sequence's last draft, verified or not, with the tokens that came."""
    guess = sequence.guess
    if guess is None:
        return
    came = sequence.generated[guess.place : guess.place + len(guess.tokens)]
    if not came:
        return
    sequence.guess, right = None, 0
    for token, drafted, level in zip(came, guess.tokens.tolist(), guess.levels, strict=False):
        guess.calibration.learn(level, came=token == drafted)
        if token != drafted:
            break
        right += 1
    guess.rate.compared(len(came), right)


def possible(sequence: Sequence, tokens: Tokens) -> Tokens:
    """Cuts a draft before the first token that cannot come: a stop token, an image's, or one against a grammar."""
    if not len(tokens):
        return tokens
    tokens = _before_end(tokens, sequence.stop_tokens)
    if (beyond := np.flatnonzero(tokens >= FIRST_IMAGE_TOKEN)).size:
        tokens = tokens[: beyond[0]]  # what followed elsewhere was a client's image
    progress = sequence.sampler.progress
    if len(tokens) and progress is not None:
        tokens = tokens[: progress.agreeing(tokens.tolist())]
    return tokens


def why_not(described: ModelDescription, most: int | None) -> str | None:
    """Returns the reason why speculative decoding is off, if up to `most` drafts are asked for. None: it is on."""
    if most == 0:
        return "not asked for"
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
