"""Recorded layers: the bits of the same functions one by one, for any number of rows, pool and projection."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import VOCAB, saved
from lora import linears_of, save_adapter
from rootstock.kernels.torch.linear import Blocked, prepare
from rootstock.runtime.adapter_files import read_adapter
from rootstock.runtime.torch.fusion import modules
from rootstock.runtime.torch.fusion.modules import (
    MOST_RECORDED_ROWS,
    FusedAttention,
    FusedLayer,
    RecordedEnding,
    RecordedOpening,
)
from rootstock.runtime.torch.fusion.recurrences import FusedRecurrence
from rootstock.runtime.torch.packed_linears import Packing, use_packed
from rootstock.runtime.torch.runner import TorchRuntime
from twins.driving import allocate, mixed_steps, packed_logits, random_tokens
from twins.torch_models import load

pytestmark = pytest.mark.skipif(
    not isinstance(prepare(torch.zeros(2, 2, dtype=torch.bfloat16), None), Blocked),
    reason="needs AVX512-BF16 without matrix units",
)

LENGTHS = (40, 21, 9, 33, 12)
STEPS = [{0: 30, 1: 9, 2: 1}, {0: 1, 1: 1, 2: 1}, *mixed_steps((9, 11, 7, 33, 12), seed=1)]


def assert_equal(got: list[Any], expected: list[Any]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def layers_of(runtime: TorchRuntime) -> list[FusedLayer]:
    forms = (vars(module).get("forward") for module in runtime._model.modules())
    return [form for form in forms if isinstance(form, FusedLayer)]


def openings_of(layer: FusedLayer) -> dict[Any, Any]:
    assert isinstance(layer.mixer, (FusedAttention, FusedRecurrence))
    return layer.mixer.openings


def logits_of(runtime: TorchRuntime) -> list[np.ndarray[Any, Any]]:
    allocate(runtime)
    return packed_logits(runtime, [random_tokens(VOCAB, n, n) for n in LENGTHS], STEPS)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("model_type", "has_openings", "has_endings"),
    [
        ("llama", True, True),
        ("qwen3", True, True),  # norms of heads
        ("gemma2", True, True),  # norms of summands, windows
        ("qwen3_moe", True, True),  # experts: the ending stops before them
        ("qwen3_next", True, True),  # gated attention, recurrent mixers and experts
        ("qwen3_5_text", True, True),  # the same with MLPs
        ("lfm2", True, True),  # gated convolutions
        ("bamba", True, True),  # state spaces
        ("jamba", True, True),  # scans with linear layers inside are not recorded
        ("mixtral", True, True),
    ],
)
def test_recorded_layers_have_the_bits_of_their_functions_one_by_one(
    model_type: str, has_openings: bool, has_endings: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = load(saved(model_type), "bfloat16")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(modules, "MOST_RECORDED_ROWS", 0)
    layers = layers_of(runtime)
    assert layers
    for layer in layers:  # the load records, too
        openings_of(layer).clear()
        layer.endings.clear()
    expected = logits_of(TorchRuntime(runtime._model, runtime._served))
    assert not any(openings_of(layer) or layer.endings for layer in layers)
    monkeypatch.setattr(modules, "MOST_RECORDED_ROWS", MOST_RECORDED_ROWS)
    for _ in range(2):  # the second has other pools at other addresses
        assert_equal(logits_of(TorchRuntime(runtime._model, runtime._served)), expected)
    assert any(map(openings_of, layers)) == has_openings
    assert any(layer.endings for layer in layers) == has_endings
    assert all(rows <= MOST_RECORDED_ROWS for layer in layers for rows, *_ in layer.endings)


@pytest.mark.parametrize("threads", [(1, 3), (3, 1), (2, 4)])
def test_threads_may_be_others_than_when_the_layers_were_recorded(
    threads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = load(saved("llama"), "bfloat16")
    computed = []
    for number in threads:
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        computed.append(logits_of(TorchRuntime(runtime._model, runtime._served)))
    assert_equal(*computed)


def test_a_cache_in_8_bits_has_no_recorded_opening() -> None:
    runtime = load(saved("llama"), "bfloat16", kv_dtype="int8")
    for layer in layers_of(runtime):  # the load is checked with an exact cache
        openings_of(layer).clear()
    logits_of(runtime)
    assert not any(map(openings_of, layers_of(runtime)))


def test_a_projection_that_is_replaced_is_called_and_recorded_again_when_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters replace projections from their load to their unload."""
    runtime = load(saved("llama"), "bfloat16")
    expected = logits_of(TorchRuntime(runtime._model, runtime._served))
    runs: list[str] = []
    for part in (RecordedOpening, RecordedEnding):

        def counted_run(self: Any, *tensors: torch.Tensor, run: Any = part.run_with) -> None:
            runs.append(type(self).__name__)
            run(self, *tensors)

        monkeypatch.setattr(part, "run_with", counted_run)
    projections = runtime._served.fusion.projections
    assert_equal(logits_of(TorchRuntime(runtime._model, runtime._served)), expected)
    whole = sorted(runs)
    assert whole
    for projection in projections:
        own = projection.multiply
        calls: list[int] = []

        def counted(rows: torch.Tensor, multiply: Any = own, calls: list[int] = calls) -> torch.Tensor:
            calls.append(len(rows))
            product: torch.Tensor = multiply(rows)
            return product

        del runs[:]
        projection.use(counted)
        assert_equal(logits_of(TorchRuntime(runtime._model, runtime._served)), expected)
        assert calls
        assert len(runs) < len(whole)
        del runs[:]
        projection.use(own)
        assert_equal(logits_of(TorchRuntime(runtime._model, runtime._served)), expected)
        assert sorted(runs) == whole


def test_an_adapter_is_loaded_and_unloaded_beside_recorded_layers(tmp_path: Path) -> None:
    runtime = load(saved("llama"), "bfloat16")
    allocate(runtime)
    sequences = [random_tokens(VOCAB, n, n) for n in LENGTHS]
    expected = packed_logits(runtime, sequences, STEPS)
    base = AutoModelForCausalLM.from_pretrained(saved("llama"))
    directory = save_adapter(tmp_path / "a", base, linears_of(base), seed=1, size=0.08)
    loaded = runtime.load_adapter(read_adapter("a", directory))
    alone = packed_logits(runtime, sequences, STEPS)
    runtime.unload_adapter(loaded.fingerprint)
    assert_equal(alone, expected)
    assert_equal(packed_logits(runtime, sequences, STEPS), expected)


def test_layers_go_on_one_by_one_if_packed_products_change_the_logits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The fused parts' use of packed products, and with it their recording, is checked at load."""

    class Wrong:
        def __init__(self, product: Any) -> None:
            self.product_of = product

        def product(self) -> Any:
            return lambda rows: self.product_of(rows) * 1.5

    runtime = load(saved("llama"), "bfloat16")
    expected = logits_of(TorchRuntime(runtime._model, runtime._served))
    projections = runtime._served.fusion.projections
    exercise = partial(exercised, runtime)
    packing = Packing([Wrong(projection.multiply) for projection in projections], logits=exercise())  # type: ignore[misc]
    use_packed(projections, packing, exercise, lambda: 0.02)
    assert "do not use packed products" in caplog.text
    assert not any(projection.is_packed for projection in projections)
    assert_equal(logits_of(TorchRuntime(runtime._model, runtime._served)), expected)


def exercised(runtime: TorchRuntime) -> dict[str, Any]:
    rows = logits_of(TorchRuntime(runtime._model, runtime._served))
    return {str(number): of_sequence for number, of_sequence in enumerate(rows)}
