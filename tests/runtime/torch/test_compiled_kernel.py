"""Kernels compiled for a device: one that agrees is used, another backend serves the model otherwise."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import saved
from rootstock.cache.families import TokenFamily
from rootstock.config import ModelConfig
from rootstock.kernels.api import StepAttention
from rootstock.kernels.cpu import attention
from rootstock.kernels.spans import EVERYTHING, Span
from rootstock.kernels.torch.gathered_attention import GatherAttention
from rootstock.runtime.torch import attention_backends, runner
from rootstock.runtime.torch.attention_backends import compiled_for
from runtime.torch.helpers import assert_agrees, pool_of
from twins.torch_models import load, loaded

CUDA = torch.device("cuda")


class Right(GatherAttention):
    used = 0

    def __init__(self, block_size: int, device: torch.device, least_split: int) -> None:
        super().__init__(block_size, device)

    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        type(self).used += 1
        return super().prepare(spans, family)


class Wrong(Right):
    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        """Prepares a step that gives heads each other's results."""
        step = super().prepare(spans, family)
        return lambda *given: step(*given).flip(1)


class Uncompilable(Right):
    def prepare(self, spans: Sequence[Span], family: TokenFamily = EVERYTHING) -> StepAttention:
        raise RuntimeError("ptxas fatal: no such target\nand a long listing")


@pytest.fixture(params=[Right, Wrong, Uncompilable])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Right]:
    """Replaces Triton's kernel, on a CPU."""
    monkeypatch.setitem(
        sys.modules, "rootstock.kernels.cuda.triton_attention", SimpleNamespace(TritonAttention=request.param)
    )
    monkeypatch.setattr(runner, "compiled_for", lambda *asked: "triton")
    monkeypatch.setattr(request.param, "used", 0)
    return request.param


def test_a_compiled_kernel_is_used_only_if_it_agrees(
    kernel: type[Right], caplog: pytest.LogCaptureFixture
) -> None:
    directory = saved("gemma3_text")  # full attention and windows
    with caplog.at_level(logging.WARNING):
        runtime = load(directory)
    described, before = runtime.description, kernel.used
    assert described.execution_mode == "packed"
    assert_agrees(runtime, directory)
    warnings = [record.getMessage() for record in caplog.records]
    if kernel is Right:
        assert (described.mode_reason, warnings) == ("", [])
        assert kernel.used > before
        return
    assert kernel.used == before
    said = "of a first chunk is" if kernel is Wrong else "RuntimeError: ptxas fatal: no such target"
    assert said in described.mode_reason
    assert len(warnings) == 1
    assert "without triton" in warnings[0]
    assert said in warnings[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_decodes_that_miss_a_position_are_not_used(
    dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lay_out = attention._lay_out

    def less(spans: Sequence[Span], family: TokenFamily, block_size: int) -> Any:
        cut = [Span(s.row, s.new, s.past - (s.new == 1), s.blocks) for s in spans]
        return lay_out(cut, family, block_size)

    directory = saved("llama")
    assert loaded("llama", dtype)._served.compiled == "numba"
    monkeypatch.setattr(attention, "_lay_out", less)
    with caplog.at_level(logging.WARNING):
        runtime = load(directory, dtype)
    assert (runtime.description.execution_mode, runtime._served.compiled) == ("packed", None)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "without numba" in warning


def test_a_model_that_cannot_be_packed_logs_no_kernel_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "compiled_for", lambda *asked: "triton")
    with caplog.at_level(logging.WARNING):
        described = load(saved("bloom")).description
    assert described.execution_mode == "one sequence per forward"
    assert described.mode_reason.count("does not call attention") == 1
    assert not caplog.records


@pytest.mark.parametrize(
    ("capability", "installed", "compiled", "said"),
    [
        ((9, 0), True, "triton", ""),
        ((9, 0), False, None, "triton is not installed"),
        ((7, 5), True, None, "compute capability is below 8.0"),
    ],
)
def test_which_cuda_devices_get_a_compiled_kernel(
    capability: tuple[int, int],
    installed: bool,
    compiled: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        attention_backends.importlib.util, "find_spec", lambda name: object() if installed else None
    )
    assert compiled_for(CUDA) == compiled
    assert [said in record.getMessage() for record in caplog.records] == ([True] if said else [])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "llama4_text"])
def test_models_are_served_by_triton(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention; windows and softcaps; sinks; chunks. Without a device, by Triton's interpreter."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(runner, "compiled_for", lambda *asked: "triton")
    directory = saved(model_type)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runtime = runner.load_model(ModelConfig(str(directory), dtype="float32", device=device))
    assert (runtime.description.execution_mode, runtime.description.mode_reason) == ("packed", "")
    assert runtime._served.compiled == "triton"
    assert_agrees(runtime, directory)
    assert {layer.kernel for layer in pool_of(runtime).layers.values()} == {"triton"}
