"""Content hashes name a prefix in a namespace."""

from __future__ import annotations

import numpy as np

from rootstock.cache.keys import Namespace, prefix_digest


def digests(tokens: list[int], namespace: Namespace) -> list[bytes]:
    """Returns the digest of each prefix, the empty one first."""
    return [prefix_digest(namespace, np.array(tokens[:end], np.int32)) for end in range(len(tokens) + 1)]


def test_equal_prefixes_have_equal_digests_and_a_change_changes_all_that_follow() -> None:
    namespace = Namespace("w", "float32")
    a, b = digests(list(range(16)), namespace), digests([*range(5), 99, *range(6, 16)], namespace)
    assert a[:6] == b[:6]
    assert not set(a[6:]) & set(b[6:])
    assert len(set(a)) == 17


def test_no_two_namespaces_spell_the_same_digest() -> None:
    assert Namespace("ab", "c").digest() != Namespace("a", "bc").digest()
    one, other = (digests(list(range(8)), Namespace("w", dtype)) for dtype in ("x", "y"))
    assert not set(one) & set(other)
