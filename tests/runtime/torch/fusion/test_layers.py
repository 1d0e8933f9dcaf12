"""Recorded layers: the bits of the same functions one by one, for any number of rows, pool and projection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import VOCAB, saved
from rootstock.kernels.torch.linear import Blocked, prepare
from rootstock.runtime.torch.fusion import layers as fused_layers
from rootstock.runtime.torch.fusion.layers import FusedLayer
from rootstock.runtime.torch.runner import TorchRuntime
from twins.driving import allocate, mixed_steps, packed_logits, random_tokens
from twins.torch_models import load

pytestmark = pytest.mark.skipif(
    not isinstance(prepare(torch.zeros(2, 2, dtype=torch.bfloat16), None), Blocked),
    reason="needs AVX512-BF16 without matrix units",
)

LENGTHS = (40, 21, 9, 33, 12)
STEPS = [{0: 30, 1: 9, 2: 1}, {0: 1, 1: 1, 2: 1}, *mixed_steps((9, 11, 7, 33, 12), seed=1)]


def layers_of(runtime: TorchRuntime) -> list[FusedLayer]:
    forms = (vars(module).get("forward") for module in runtime._model.modules())
    return [form for form in forms if isinstance(form, FusedLayer)]


def logits_of(runtime: TorchRuntime) -> list[np.ndarray[Any, Any]]:
    allocate(runtime)
    return packed_logits(runtime, [random_tokens(VOCAB, n, n) for n in LENGTHS], STEPS)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("model_type", "has_openings", "has_endings"),
    [
        ("llama", True, True),
        ("qwen3", True, True),  # norms of heads
        ("gemma2", True, True),  # norms of summands, windows
        ("qwen3_moe", True, True),  # experts: the ending stops before them
        ("qwen3_next", False, False),  # gated attention, recurrent mixers and experts
        ("qwen3_5_text", False, True),  # the same with MLPs
        ("mixtral", True, True),
    ],
)
def test_recorded_layers_have_the_bits_of_their_functions_one_by_one(
    model_type: str, has_openings: bool, has_endings: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = load(saved(model_type), "bfloat16")
    torch.set_num_threads(threads)
    monkeypatch.setattr(fused_layers, "MOST_RECORDED_ROWS", 0)
    expected = logits_of(TorchRuntime(runtime._model, runtime._served))
    assert not any(layer.openings or layer.endings for layer in layers_of(runtime))
    monkeypatch.undo()
    for _ in range(2):  # the second has other pools at other addresses
        got = logits_of(TorchRuntime(runtime._model, runtime._served))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    layers = layers_of(runtime)
    assert layers
    assert any(layer.openings for layer in layers) == has_openings
    assert any(layer.endings for layer in layers) == has_endings
    assert all(rows <= fused_layers.MOST_RECORDED_ROWS for layer in layers for rows, *_ in layer.endings)
    torch.set_num_threads(1)


def test_a_cache_in_8_bits_has_no_recorded_opening() -> None:
    runtime = load(saved("llama"), "bfloat16", kv_dtype="int8")
    logits_of(runtime)
    assert not any(layer.openings for layer in layers_of(runtime))


def test_a_projection_that_is_replaced_is_called_and_recorded_again_when_it_returns() -> None:
    """Adapters replace projections while a request uses them."""
    runtime = load(saved("llama"), "bfloat16")
    expected = logits_of(TorchRuntime(runtime._model, runtime._served))
    projections = runtime._served.fusion.projections
    own = [projection.multiply for projection in projections]
    for number, projection in enumerate(projections):
        calls: list[int] = []

        def counted(
            rows: torch.Tensor, multiply: Any = own[number], calls: list[int] = calls
        ) -> torch.Tensor:
            calls.append(len(rows))
            product: torch.Tensor = multiply(rows)
            return product

        projection.use(counted)
        got = logits_of(TorchRuntime(runtime._model, runtime._served))
        assert calls
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        projection.use(own[number])
        del calls[:]
        logits_of(TorchRuntime(runtime._model, runtime._served))
        assert not calls
