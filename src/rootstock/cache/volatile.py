"""Volatile spans: a few tokens that change from prompt to prompt, with equal tokens before and after them.

A date, a version or a session's id in the head of a prompt is enough to lose the cache of everything behind it. When
a prompt diverges from the cached prefixes, its next tokens are compared with the sibling branches. If both
agree again after at most `MAX_SPAN` tokens, and for at least `MIN_AGREED` tokens, the tokens between are a volatile
span.

The work is bounded: a prompt that diverges is compared with a few siblings, in windows of `_WINDOW` tokens, and walks
along each of these that agrees as far as it does. Nearly all prompts that diverge agree with none of them. A search
for a few runs of the prompt's tokens in all windows shows it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rootstock.cache.keys import Namespace
from rootstock.cache.longest_match import common_prefix
from rootstock.cache.radix_node import Node
from rootstock.cache.types import Tokens

MAX_SPAN = 64  # tokens: an id, a date or a path has up to about 40
# Two unrelated prompts have a sentence in common, of up to about 20 tokens, but hardly 32 tokens in a row.
MIN_AGREED = 32
MIN_DISTINCT = 8  # of the tokens that agree: runs of spaces or of one word tell nothing
MAX_SPANS = 32  # of one namespace; the least recently seen one is dropped first
MAX_NAMESPACES = 256
MAX_EXAMPLES = 4  # of one span, the latest ones

_WINDOW = MAX_SPAN + MIN_AGREED
_SIBLINGS = 4  # that a prompt is compared with: those used last
_CANDIDATES = 16  # among which these are chosen: those added last
_CONTEXT = 64  # tokens before a span that identify its place

# Any MIN_AGREED tokens in a row hold one of the samples whole: one begins at each `_SAMPLE`th token.
_SAMPLE = MIN_AGREED // 2

_LAST_USED = attrgetter("last_used")

# Of a polynomial hash of windows: powers of an odd number.
_FACTORS = np.array([pow(0xD1342543DE82EF95, power, 2**64) for power in range(MIN_AGREED)], np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Realignment:
    """The place at which a prompt and a cached branch agree again, after tokens in which they differ."""

    asked: Tokens  # [≤ MAX_SPAN] the prompt's tokens before it
    cached: Tokens  # [≤ MAX_SPAN] the branch's tokens before it
    agreed: int  # tokens that agree from there on


@dataclass(frozen=True, slots=True, eq=False)
class VolatileSpan:
    """A span of prompts of one namespace, over all requests that differed in it."""

    namespace: Namespace
    position: int  # where it begins
    before: Tokens  # [≤ 64] the tokens before it
    after: Tokens  # [MIN_AGREED] the tokens after it
    examples: tuple[Tokens, ...]  # [≤ MAX_SPAN] each: tokens of prompts there, the latest at the end
    count: int  # prompts that diverged in it
    recomputed_tokens: int  # which they would have found in the cache without it
    last_seen: float  # by the clock of the cache

    @property
    def longest(self) -> int:
        return max(map(len, self.examples), default=0)

    def is_at(self, position: int, tokens: Tokens) -> bool:
        """Returns whether a divergence of `tokens` at `position` is in this span.

        Two values of a span may begin alike. The place is then up to a span's length behind its beginning.
        """
        if abs(position - self.position) > MAX_SPAN:
            return False
        first = self.position - len(self.before)
        end = min(position, self.position)
        own, other = self.before[: max(0, end - first)], tokens[first:end]
        return len(own) == len(other) and bool(np.array_equal(own, other))


def realigned(asked: Tokens, cached: Tokens) -> tuple[int, int] | None:
    """Finds where two sequences agree again for `MIN_AGREED` tokens: the positions in both, with the smallest sum.

    Neither is larger than `MAX_SPAN`. Of equal sums, the one with fewer tokens of `asked` wins.
    """
    one, other = asked[:_WINDOW], cached[:_WINDOW]
    if min(len(one), len(other)) < MIN_AGREED:
        return None
    mine, theirs = sliding_window_view(one, MIN_AGREED), sliding_window_view(other, MIN_AGREED)
    same = _hashes(mine)[:, None] == _hashes(theirs)[None, :]
    pairs = np.argwhere(same)
    for i, j in pairs[np.argsort(pairs.sum(axis=1), kind="stable")].tolist():
        if np.array_equal(mine[i], theirs[j]) and len(np.unique(mine[i])) >= MIN_DISTINCT:
            return i, j
    return None


def _hashes(windows: Tokens) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    hashes: np.ndarray[tuple[int, ...], np.dtype[np.uint64]] = (windows.astype(np.uint64) + 1) @ _FACTORS
    return hashes


def realignment(node: Node, found: int, tokens: Tokens) -> Realignment | None:
    """Compares a prompt with the branches from which it diverges at `found`, at or within `node`.

    The prompt's own branch, if it is in the tree by now, does not count. Returns the realignment with the most tokens
    that agree. Changes nothing.
    """
    branches = _branches(node, found, int(tokens[found]))
    windows = [_following(branch, offset) for branch, offset in branches]
    if not _may_agree(tokens[found : found + _WINDOW], windows):
        return None
    best: Realignment | None = None
    for (branch, offset), following in zip(branches, windows, strict=True):
        place = realigned(tokens[found:], following)
        if place is not None:
            asked, cached = place
            agreed = _agreed(branch, offset + cached, tokens[found + asked :])
            if best is None or agreed > best.agreed:
                best = Realignment(tokens[found : found + asked].copy(), following[:cached].copy(), agreed)
    return best


def _may_agree(asked: Tokens, windows: Sequence[Tokens]) -> bool:
    """Returns False if no window agrees with the prompt for `MIN_AGREED` tokens. Costs a tenth of `realigned`."""
    text = b"".join([window.tobytes() for window in windows])
    starts = range(0, len(asked) - _SAMPLE + 1, _SAMPLE)
    return any(asked[at : at + _SAMPLE].tobytes() in text for at in starts)


def _branches(node: Node, found: int, own: int) -> Sequence[tuple[Node, int]]:
    """Returns the nodes in which cached branches go on after `found`, but not with the token `own`, and where in
    them."""
    if found < node.end:
        offset = found - node.start
        return [] if node.tokens[offset] == own else [(node, offset)]
    latest = [child for first, child in islice(reversed(node.children.items()), _CANDIDATES) if first != own]
    return [(child, 0) for child in sorted(latest, key=_LAST_USED, reverse=True)[:_SIBLINGS]]


def _path(node: Node) -> Iterator[Node]:
    """Yields a node and one path below it. Each step takes the most recently used of the newest children."""
    while True:
        yield node
        if not node.children:
            return
        latest = islice(reversed(node.children.values()), _CANDIDATES)
        node = max(latest, key=_LAST_USED)


def _following(node: Node, offset: int) -> Tokens:
    """Returns a window of tokens that follow an offset in a node's edge."""
    first = node.tokens[offset : offset + _WINDOW]
    if len(first) == _WINDOW:
        return first
    parts: list[Tokens] = []
    missing = _WINDOW
    for each in _path(node):
        parts.append(each.tokens[offset : offset + missing])
        missing -= len(parts[-1])
        offset = 0
        if missing <= 0:
            break
    return np.concatenate(parts)


def _agreed(node: Node, offset: int, tokens: Tokens) -> int:
    """Counts the leading `tokens` that agree with the branch from an offset on, as `_following` counts it."""
    for each in _path(node):
        node = each
        if offset < len(each.tokens):
            break
        offset -= len(each.tokens)
    agreed = common_prefix(node.tokens[offset:], tokens)
    while offset + agreed == len(node.tokens) and agreed < len(tokens):
        child = node.children.get(int(tokens[agreed]))
        if child is None:
            break
        node, offset = child, -agreed
        agreed += common_prefix(child.tokens, tokens[agreed:])
    return agreed


class VolatileSpans:
    """The volatile spans that were seen lately, by namespace. Bounded in number. Owned by the cache."""

    def __init__(self) -> None:
        self._spans: OrderedDict[Namespace, list[VolatileSpan]] = (
            OrderedDict()
        )  # the namespace seen last at the end

    def __len__(self) -> int:
        return sum(map(len, self._spans.values()))

    def of(self, namespace: Namespace | None) -> list[VolatileSpan]:
        """Returns the spans of one namespace, or of all, the costliest first."""
        lists = self._spans.values() if namespace is None else [self._spans.get(namespace, [])]
        return sorted((span for spans in lists for span in spans), key=lambda span: -span.recomputed_tokens)

    def add(
        self, namespace: Namespace, tokens: Tokens, position: int, place: Realignment, now: float
    ) -> None:
        """Counts a prompt that diverges at `position` and agrees again at `place`."""
        end = position + len(place.asked)
        spans = self._spans.setdefault(namespace, [])
        known = next((span for span in spans if span.is_at(position, tokens)), None)
        first = position if known is None else min(position, known.position)
        value = tokens[first:end][:MAX_SPAN].copy()
        if known is None:
            span = VolatileSpan(
                namespace=namespace,
                position=position,
                before=tokens[max(0, position - _CONTEXT) : position].copy(),
                after=tokens[end : end + MIN_AGREED].copy(),
                examples=(place.cached, value),
                count=1,
                recomputed_tokens=place.agreed,
                last_seen=now,
            )
        else:
            spans.remove(known)
            moved = first < known.position
            span = replace(
                known,
                position=first,
                before=tokens[max(0, first - _CONTEXT) : first].copy() if moved else known.before,
                examples=(*known.examples, value)[-MAX_EXAMPLES:],
                count=known.count + 1,
                recomputed_tokens=known.recomputed_tokens + place.agreed,
                last_seen=now,
            )
        spans.append(span)
        del spans[:-MAX_SPANS]
        self._spans.move_to_end(namespace)
        while len(self._spans) > MAX_NAMESPACES:
            self._spans.popitem(last=False)

    def forget(self, namespace: Namespace | None) -> None:
        """Drops the spans of one namespace, or all."""
        if namespace is None:
            self._spans.clear()
        else:
            self._spans.pop(namespace, None)
