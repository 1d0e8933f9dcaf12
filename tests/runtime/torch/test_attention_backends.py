"""Attention backends: their choice, their compilation before the first request, and warnings if it fails."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numba.core.event import install_recorder

from checkpoints import VOCAB, save
from rootstock.config import ModelConfig
from rootstock.errors import InvalidOption
from rootstock.kernels.cpu import compiler, decode_loops
from rootstock.kernels.cpu.attention import NumbaAttention, loops_for
from rootstock.kernels.cpu.prefill_attention import PrefillAttention
from rootstock.runtime.torch import attention_backends
from rootstock.runtime.torch.attention_backends import compiled_for
from rootstock.runtime.torch.runner import load_model
from runtime.torch.helpers import pool_of
from twins.driving import BLOCK_SIZE, BLOCKS, ByHand, mixed_steps, random_tokens

CPU = torch.device("cpu")


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ordinary = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("numba", "rootstock.kernels.cpu.attention")):
            raise ImportError("No module named 'numba'")
        return ordinary(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refusing)
    attention_backends._numba_missing.cache_clear()
    yield
    attention_backends._numba_missing.cache_clear()


@pytest.mark.usefixtures("without_numba")
def test_without_numba_attention_runs_on_torch_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert compiled_for(CPU) is None
        assert compiled_for(CPU) is None
    (record,) = caplog.records
    assert "Numba cannot be imported (No module named 'numba')" in record.getMessage()


@pytest.mark.usefixtures("without_numba")
def test_a_request_for_a_missing_numba_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with pytest.raises(InvalidOption, match="Numba cannot be imported"):
        load_model(ModelConfig(str(tmp_path), device="cpu", attention="numba"))


def test_numba_is_used_on_cpus_unless_torch_is_chosen() -> None:
    assert compiled_for(CPU) == compiled_for(CPU, "numba") == "numba"
    assert compiled_for(CPU, "torch") is None
    assert compiled_for(torch.device("mps")) is None
    with pytest.raises(InvalidOption, match="--attention"):
        ModelConfig("any", attention="fast")


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_compiled_after_a_model_is_loaded(model_type: str, dtype: str, tmp_path: Path) -> None:
    save(tmp_path, model_type)
    runtime = load_model(ModelConfig(str(tmp_path), dtype=dtype, device="cpu", threads=1))
    runtime.allocate([BLOCKS] * len(runtime.description.families), BLOCK_SIZE)
    sequences = [random_tokens(VOCAB, length, seed) for seed, length in enumerate((60, 33, 9))]
    with install_recorder("numba:compile") as recorded:
        hand = ByHand(runtime)
        running = [hand.start(tokens) for tokens in sequences]
        for step in mixed_steps([len(tokens) for tokens in sequences], 3, 13):
            hand.step({running[i]: new for i, new in step.items()})
    assert not recorded.buffer


def test_without_a_disk_cache_each_start_compiles_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refusing(signature: Any, cache: bool = False) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: SimpleNamespace(address=4711)

    monkeypatch.setattr(compiler.nb, "cfunc", refusing)
    decode_loops.loops_for.cache_clear()
    try:
        assert loops_for(torch.float32) == 4711
    finally:
        decode_loops.loops_for.cache_clear()
    assert asked == [True, False]
    assert "compiled at each start" in caplog.text


def test_the_torch_backend_can_be_chosen(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    for asked, compiled in (("torch", False), ("numba", True)):
        runtime = load_model(
            ModelConfig(str(tmp_path), dtype="float32", device="cpu", threads=1, attention=asked)
        )
        runtime.allocate((BLOCKS,), BLOCK_SIZE)
        assert isinstance(pool_of(runtime).kernels.sliced, NumbaAttention) is compiled


@pytest.mark.parametrize(("dtype", "is_new"), [(torch.float32, False), (torch.bfloat16, True)])
def test_only_layers_in_bfloat16_meet_the_prefill_loops(
    dtype: torch.dtype, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootstock.kernels.cpu.prefill_attention.has_pair_products", lambda: True)
    monkeypatch.setattr("rootstock.kernels.cpu.amx_tiles.are_there", lambda: False)
    layer = SimpleNamespace(
        kind="plain", kv_heads=2, key_dim=64, value_dim=64, dtype=dtype, softcap=False, bytes_per_token=512
    )
    kernels = attention_backends.Kernels([layer], 32, CPU, compiled="numba")
    for backend in (kernels.sliced, kernels.gather):
        assert isinstance(backend, NumbaAttention)
        assert isinstance(backend._beside, PrefillAttention) == is_new
