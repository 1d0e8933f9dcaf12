"""The longest match of tokens in the radix tree. It may end inside a node, and inside a block.

A walk compares NumPy arrays at memory speed and costs O(tokens), never O(cached tokens).
"""

from __future__ import annotations

import numpy as np

from rootstock.cache.radix_node import Node
from rootstock.cache.types import NO_TOKENS, Tokens


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Counts the leading tokens that are equal."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def descend(root: Node, tokens: Tokens) -> tuple[Node, int]:
    """Finds the deepest node that a prefix of `tokens` reaches, and how many tokens agree.

    The position lies in (node.start, node.end], or is the root's.
    """
    node, position, length = root, root.end, len(tokens)
    while position < length:
        child = node.children.get(int(tokens[position]))
        if child is None:
            break
        node = child
        position += common_prefix(child.tokens, tokens[position:])
        if position < child.end:
            break
    return node, position


def continuation(node: Node, tokens: Tokens, most: int) -> Tokens:
    """Finds the tokens that follow `tokens` in the tree, below the end of `node`: up to `most` tokens of the branch
    that was used last; empty if there are none."""
    passed = 0
    while passed < len(tokens):
        child = node.children.get(int(tokens[passed]))
        if child is None:
            return NO_TOKENS
        agreed = common_prefix(child.tokens, tokens[passed:])
        passed += agreed
        if agreed < len(child.tokens):
            return child.tokens[agreed : agreed + most] if passed == len(tokens) else NO_TOKENS
        node = child
    parts: list[Tokens] = []
    while most > 0 and node.children:
        node = max(node.children.values(), key=lambda child: child.last_used)
        parts.append(node.tokens[:most])
        most -= len(parts[-1])
    return np.concatenate(parts) if parts else NO_TOKENS
