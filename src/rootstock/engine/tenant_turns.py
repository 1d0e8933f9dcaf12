"""Turns of tenants: whose requests a step serves first, while several tenants have requests."""

from __future__ import annotations

from collections.abc import Iterable

from rootstock.engine.sequence import Sequence

MOST_TENANTS = 4096  # whose counters are kept without requests


class TenantTurns:
    """Counters of the tokens that were computed for each tenant. The tenant with the fewest goes first.

    These are the virtual token counters of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024). Over
    time, tenants that always have requests get equal numbers of tokens, and one that asks for less than its equal
    part does not wait for the requests of others. Unlike there, a tenant that had no requests may come back with a
    credit of `most_credit` tokens: its next prompt is computed at once.
    """

    def __init__(self, most_credit: int) -> None:
        self._most_credit = most_credit
        self._present: dict[str, None] = {}  # tenants with requests, in a fixed order: ties are broken by it
        self._counts: dict[str, int] = {}  # tokens of these, and of others with a part of the credit
        self._reached = 0  # by the lowest counter of those with requests: it never decreases

    def begin(self, sequences: Iterable[Sequence], alone: str = "", tokens: int = 0) -> set[str]:
        """Begins a step with these requests, and returns their tenants.

        Since the last step of several tenants, `tokens` were computed for the tenant `alone`.
        """
        present = dict.fromkeys(sequence.tenant for sequence in sequences)
        counts = self._counts
        if tokens:
            counts[alone] = max(counts.get(alone, 0), self._reached - self._most_credit) + tokens
            self._present = {alone: None}
        self._reached = max(
            self._reached, min((counts[each] for each in present if each in self._present), default=0)
        )
        least = self._reached - self._most_credit
        gone = [tenant for tenant, count in counts.items() if tenant not in present and count > least]
        if len(gone) > MOST_TENANTS:
            gone = sorted(gone, key=counts.__getitem__)[-MOST_TENANTS:]
        kept = {tenant: counts[tenant] for tenant in gone}
        self._counts = kept | {tenant: max(least, counts.get(tenant, least)) for tenant in present}
        self._present = present
        return {*present}

    def grouped(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence]
    ) -> list[tuple[list[Sequence], list[Sequence]]]:
        """Returns the running and the waiting requests of each tenant, the tenant whose turn it is first."""
        order = sorted(self._present, key=self._counts.__getitem__)
        groups: dict[str, tuple[list[Sequence], list[Sequence]]] = {tenant: ([], []) for tenant in order}
        for which, sequences in enumerate((running, waiting)):
            for sequence in sequences:
                groups[sequence.tenant][which].append(sequence)
        return list(groups.values())

    def in_turn(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Orders requests by their tenants' turns, and those of one tenant as they are."""
        return sorted(sequences, key=lambda sequence: self._counts[sequence.tenant])

    def served(self, sequence: Sequence, tokens: int) -> None:
        """Counts the tokens that a step computes for a request."""
        self._counts[sequence.tenant] += tokens
