"""The oracle runtime's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from rootstock.testing.fake_runtime import _chain, _mix


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 8, 100, 1023, 1024])
@pytest.mark.parametrize("parent", [0, 1, 2**64 - 1, 12345678901234567890])
def test_the_chain_is_its_definition(tokens: int, parent: int) -> None:
    ids = np.random.default_rng(tokens).integers(0, 1 << 30, tokens).astype(np.int32)
    leaves = _mix(ids.astype(np.uint64) << np.uint64(32) | np.arange(7, 7 + tokens, dtype=np.uint64))
    expected, value = [], parent
    for leaf in leaves.tolist():
        value = (value * 0xD1342543DE82EF95 + leaf) % 2**64
        expected.append(value)
    assert _chain(parent, ids, 7).tolist() == expected
