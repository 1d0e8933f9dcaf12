"""Small mlx-lm models served by the real engine give the logits and the greedy answers of mlx-lm with its own cache.

`bench/show/i1_mlx_models.py` serves all architectures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as load_by_mlx_lm

from twins import mlx_models, mlx_served

KINDS_OF_ROWS = {"first chunk", "later chunk", "decode"}
FULL = KINDS_OF_ROWS | {"shared", "copied"}
HYBRID = KINDS_OF_ROWS | {"restored"}
MODELS = {"llama": FULL, "gemma3_text": HYBRID, "qwen3_next": HYBRID, "llama4": HYBRID}


@pytest.fixture(autouse=True)
def _without_compiled_functions() -> Iterator[None]:
    mx.disable_compile()  # on a CPU it calls a C++ compiler for each function
    yield
    mx.enable_compile()


@pytest.mark.parametrize("name", MODELS)
def test_a_served_model_is_mlx_lms_own(tmp_path: Path, name: str) -> None:
    directory = mlx_models.save(tmp_path / name, name)
    own, _ = load_by_mlx_lm(directory)
    recorder = mlx_served.Recorder(mlx_served.load(directory))
    scored, _ = mlx_served.serve(recorder)
    verdict = mlx_served.compared(recorder, own)
    assert set(verdict.figures) == MODELS[name]
    assert max(verdict.figures.values()) <= 1e-4
    assert recorder.forwards_of_several > 0
    plain = mlx_served.load(directory)
    served, _ = mlx_served.serve(plain)
    expected = [mlx_served.own_greedy(own, prompt) for prompt in served.prompts]
    assert scored.answers == served.answers == expected
    assert served.failed == scored.failed == []
    assert sum(served.cached) > 100
    assert recorder.pool_copies == plain.pool_copies == 0
