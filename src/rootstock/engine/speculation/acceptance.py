"""Acceptance of drafts: how many rows of a verified draft count."""

from __future__ import annotations

from collections.abc import Iterator

from rootstock.engine.scheduler import ScheduledSequence


def accepted_rows(item: ScheduledSequence) -> Iterator[int]:
    """Yields the rows to sample from, in order, while the draft agrees with the sampled tokens.

    Sample from each row before asking for the next. Row 0 follows the last known token. Row i counts if row i-1
    sampled the i-th draft token. Rows that are not yielded hold void K/V, which the next step overwrites.
    """
    sequence = item.sequence
    sequence.draft_tokens += item.drafts
    yield 0
    for row in range(1, 1 + item.drafts):
        # A sequence that has ended has no lease.
        if sequence.lease is not item.lease or sequence.generated[-1] != item.tokens[row]:
            break
        sequence.accepted_draft_tokens += 1
        yield row
