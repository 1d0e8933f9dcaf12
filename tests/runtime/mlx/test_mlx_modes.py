"""Execution modes on MLX: the best one that passes its self-check, with the reason why no better one is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_checkpoints import make_mlx_model
from rootstock.errors import InvalidOption, ModelUnsupported, PoolsLost, SelfCheckFailed
from rootstock.runtime.base import Batch, ExecutionMode, Logits
from rootstock.runtime.mlx.modes import choose_mode
from rootstock.runtime.mlx.runner import MlxExecution, MlxRuntime
from rootstock.runtime.mlx.survey import survey
from runtime.mlx.helpers import described
from twins import mlx_models

GATHERED: ExecutionMode = "batched, gathered K and V"
ALONE: ExecutionMode = "one sequence per forward"
KERNEL: Any = "the kernel"  # the runtimes below never call it


def choose(
    model: nn.Module, make_runtime: Callable[[nn.Module, MlxExecution], Any] = MlxRuntime, **options: Any
) -> MlxExecution:
    layout = survey(model)

    def make(served: MlxExecution) -> Any:
        return make_runtime(model, served)

    return choose_mode(model, layout, described(layout), make, lambda done: None, **options)


class Wrong(MlxRuntime):
    """Runtime whose logits are wrong in some modes, or with a kernel."""

    modes: tuple[ExecutionMode, ...] = ()
    failure: Exception | None = None

    def __init__(self, model: nn.Module, served: MlxExecution) -> None:
        self._is_wrong = served.description.execution_mode in self.modes or served.kernel is not None
        super().__init__(model, replace(served, kernel=None))

    def forward(self, batch: Batch) -> Logits:
        if self._is_wrong and self.failure is not None:
            raise self.failure
        logits = super().forward(batch)
        return -logits if self._is_wrong else logits


def wrong(*modes: ExecutionMode, failure: Exception | None = None) -> type[Wrong]:
    return type("WrongHere", (Wrong,), {"modes": modes, "failure": failure})


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return make_mlx_model("llama")


@pytest.mark.parametrize(
    ("kind", "mode", "reason"),
    [
        ("llama", "batched", ""),
        ("gpt_oss", "batched", ""),
        ("deepseek_v3", GATHERED, "changes the K and V of its cache before its attention"),
        ("qwen3_next", "batched", ""),
        ("mamba", "batched", ""),
        ("llama4", ALONE, "TypeError: arange(): incompatible function arguments"),
    ],
)
def test_the_execution_mode_and_the_reason(kind: str, mode: str, reason: str) -> None:
    described = choose(make_mlx_model(kind)).description
    assert described.execution_mode == mode
    assert described.mode_reason == reason


@pytest.mark.parametrize(
    ("modes", "mode"), [((), "batched"), (("batched",), GATHERED), (("batched", GATHERED), ALONE)]
)
def test_a_mode_that_is_wrong_is_left_for_the_next(
    llama: nn.Module, modes: tuple[ExecutionMode, ...], mode: str
) -> None:
    described = choose(llama, wrong(*modes)).description
    assert described.execution_mode == mode
    assert described.mode_reason.count("is allowed") == min(1, len(modes)), "equal reasons are told once"


def test_a_model_that_groups_its_query_heads_is_batched() -> None:
    described = choose(mlx_models.build("gemma2")).description
    assert described.execution_mode == GATHERED
    assert "cannot be broadcast" in described.mode_reason


def test_an_indexer_that_keeps_keys_alone_is_served() -> None:
    described = choose(mlx_models.build("minimax_m3_vl, sparse")).description
    assert described.execution_mode == ALONE, "it numbers the blocks of a batch by slots, not by positions"


def test_a_mode_that_raises_is_left_for_the_next(llama: nn.Module) -> None:
    failure = ValueError("no such thing\nsecond line")
    described = choose(llama, wrong("batched", failure=failure)).description
    assert described.execution_mode == GATHERED
    assert described.mode_reason == "ValueError: no such thing"


def test_lost_pools_are_told_by_their_cause(llama: nn.Module) -> None:
    failure = PoolsLost(RuntimeError("[metal] an error of the device"))
    described = choose(llama, wrong("batched", failure=failure)).description
    assert described.mode_reason == "RuntimeError: [metal] an error of the device"


def test_a_model_that_is_wrong_in_all_modes_is_refused(llama: nn.Module) -> None:
    with pytest.raises(
        SelfCheckFailed, match="'tiny' failed its self-check: the largest difference of a logit"
    ):
        choose(llama, wrong("batched", GATHERED, ALONE))


def test_a_model_whose_prefills_and_decodes_differ_is_refused_with_that_reason() -> None:
    """mlx-lm's plamo3 hides one position fewer in its prefills than its own cache does in decodes."""
    with pytest.raises(ModelUnsupported, match="divided into a prefill and decodes"):
        choose(mlx_models.build("plamo3"))


def test_a_model_that_raises_in_all_modes_is_unsupported(llama: nn.Module) -> None:
    with pytest.raises(ModelUnsupported, match="Rootstock cannot run 'tiny': ValueError: no such thing"):
        choose(llama, wrong("batched", GATHERED, ALONE, failure=ValueError("no such thing")))


@pytest.mark.parametrize(
    "failure",
    [
        InvalidOption("--device", "cpu", "another"),
        MemoryError(),
        RuntimeError("[malloc] Unable to allocate 8 bytes."),
        PoolsLost(RuntimeError("[metal::malloc] Attempting to allocate 8 bytes")),
    ],
)
def test_a_failure_that_no_other_mode_avoids_is_raised(llama: nn.Module, failure: Exception) -> None:
    with pytest.raises(type(failure)) as raised:
        choose(llama, wrong("batched", failure=failure))
    assert raised.value is failure


# ---- the kernel


class WithKernel(MlxRuntime):
    """Runtime that has a kernel and never calls it."""

    def __init__(self, model: nn.Module, served: MlxExecution) -> None:
        super().__init__(model, replace(served, kernel=None))


def test_a_kernel_that_is_right_is_used(llama: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    tried: list[Any] = []
    served = choose(llama, WithKernel, kernel=KERNEL, why_not=tried.append)
    assert (served.kernel, tried) == (KERNEL, [KERNEL])
    assert (served.description.execution_mode, served.description.mode_reason) == ("batched", "")
    assert not caplog.records


@pytest.mark.parametrize(
    ("make_runtime", "why_not", "said"),
    [
        (wrong(), lambda kernel: None, "the largest difference of a logit"),
        (wrong(failure=RuntimeError("cannot compile")), lambda kernel: None, "RuntimeError: cannot compile"),
        (WithKernel, lambda kernel: "the Metal kernel is wrong by 1", "the Metal kernel is wrong by 1"),
    ],
    ids=["wrong logits", "raises", "wrong for long contexts"],
)
def test_a_kernel_that_fails_is_left_out_with_one_line(
    llama: nn.Module,
    caplog: pytest.LogCaptureFixture,
    make_runtime: Any,
    why_not: Callable[[Any], str | None],
    said: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        served = choose(llama, make_runtime, kernel=KERNEL, why_not=why_not)
    assert served.kernel is None
    assert served.description.execution_mode == "batched"
    assert said in served.description.mode_reason
    (record,) = caplog.records
    assert record.getMessage().startswith("Attention is slower than it could be, without the Metal kernel: ")
    assert said in record.getMessage()


def test_a_failed_mode_leaves_the_model_as_it_was(llama: nn.Module) -> None:
    classes = [type(module) for module in llama.modules()]
    choose(llama, wrong("batched", GATHERED))
    assert [type(module) for module in llama.modules()] == classes
    assert isinstance(llama(mx.array([[1, 2]])), mx.array)
