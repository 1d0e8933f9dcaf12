"""Choice of the records that `rootstock cache export` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rootstock.cache.keys import RecordKey
from rootstock.cache.types import Tokens
from rootstock.cli.output import counted, counting
from rootstock.errors import InvalidOption, StartupError
from rootstock.tiers.base import Entry
from rootstock.tiers.disk.prefixes import Prefixes, along, is_orphan
from rootstock.tiers.disk.tier import DiskTier, Progress


def parse_tokens(listed: str) -> Tokens:
    try:
        return np.array([int(token) for token in listed.split(",")], np.int32)
    except (ValueError, OverflowError):
        raise InvalidOption("--prefix-tokens", listed, "token ids such as 1,2,3") from None


def find_namespace(tier: DiskTier, beginning: str) -> bytes:
    there = {entry.identity.namespace for entry in tier.entries()}
    found = [one for one in there if one.hex().startswith(beginning.lower())]
    if len(found) != 1:
        listed = ", ".join(sorted(one.hex()[:8] for one in there)) or "none"
        raise InvalidOption("--namespace", beginning, f"the beginning of exactly one of the stored: {listed}")
    return found[0]


def chosen_records(
    tier: DiskTier,
    namespace: bytes | None,
    key: str | None,
    tokens: Sequence[Tokens],
    most_bytes: int | None,
    progress: Progress,
) -> list[RecordKey]:
    """Return keys of the records to export, each after the records of its prefix."""

    def entries() -> Iterator[Entry]:
        for entry in counting(tier.entries(), progress):
            if namespace is None or entry.identity.namespace == namespace:
                yield entry

    if key is None and not tokens and most_bytes is None:
        return [entry.identity.key for entry in entries()]
    prefixes = Prefixes.of(entries())
    wanted: set[bytes] | None = None
    if key is not None:
        leaf = prefixes.find(key)
        wanted = {node.own for node in leaf.path()} | prefixes.below({leaf.own})
    elif tokens:
        stored = max((along(entries(), prompt) for prompt in tokens), key=lambda found: found.reached)
        if not stored.at_end:
            raise StartupError(
                f"Of that prefix, only {stored.reached:,} of {counted(stored.tokens, 'token')} are stored. Give a "
                "shorter one: the last word of a text may have other tokens where the text goes on."
            )
        wanted = stored.path | prefixes.below(stored.at_end)
    if most_bytes is None:
        assert wanted is not None
        return [entry.identity.key for entry in entries() if entry.identity.own in wanted]

    # The most recently used first. Of records used at the same time, those of shorter prefixes first.
    prefixes.use_with_what_follows()
    candidates = []
    for order, entry in enumerate(entries()):
        node = prefixes.nodes[entry.identity.own]
        if not is_orphan(node) and (wanted is None or node.own in wanted):
            candidates.append(
                (-node.last_use_s, node.position, order, entry.stored_bytes, entry.identity.key)
            )
    candidates.sort()
    taken: list[tuple[int, RecordKey]] = []
    for _, _, order, stored_bytes, record_key in candidates:
        most_bytes -= stored_bytes
        if most_bytes < 0:
            break
        taken.append((order, record_key))
    return [record_key for _, record_key in sorted(taken)]
