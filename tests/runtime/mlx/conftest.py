from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def _without_compiled_functions() -> Iterator[None]:
    """Disables mx.compile: on a CPU it calls a C++ compiler for each function."""
    mx.disable_compile()
    yield
    mx.enable_compile()
