"""Content keys name a prefix in a namespace."""

from __future__ import annotations

import numpy as np

from rootstock.cache.keys import Namespace, block_keys


def keys(tokens: list[int], namespace: Namespace, size: int = 4) -> list[bytes]:
    return list(block_keys(namespace, np.array(tokens, np.int32), size))


def test_equal_prefixes_have_equal_keys_and_a_change_changes_all_that_follow() -> None:
    namespace = Namespace("w", "float32")
    a, b = keys(list(range(16)), namespace), keys([*range(5), 99, *range(6, 16)], namespace)
    assert a[0] == b[0]
    assert not set(a[1:]) & set(b[1:])
    assert len(a) == 4


def test_only_whole_blocks_have_keys() -> None:
    assert len(keys(list(range(15)), Namespace("w", "float32"))) == 3
    assert keys([1, 2, 3], Namespace("w", "float32")) == []


def test_no_two_namespaces_spell_the_same_digest() -> None:
    assert Namespace("ab", "c").digest() != Namespace("a", "bc").digest()
    assert keys(list(range(8)), Namespace("w", "x")) != keys(list(range(8)), Namespace("w", "y"))
