"""Whole mlx-lm models whose attention is the Metal kernels, run as C++, equal themselves on views and gathers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

from kernels.metal.emulation import COMPILER, Emulation
from rootstock.cache.families import RecurrentState
from rootstock.kernels.metal.launch import Occupancy
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.runtime.mlx.runner import MlxRuntime
from rootstock.runtime.trial import ScoredRows, Trial, trial_tokens
from runtime.mlx.helpers import served
from twins.mlx_models import build

if COMPILER is None:
    pytest.skip("g++ is not installed", allow_module_level=True)

# Heads as wide as the kernel takes, and windows that slide within the trial's tokens.
SIZES = {
    "vocab_size": 199,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
WINDOWS = SIZES | {"sliding_window": 9}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "gemma3_text": WINDOWS,
    "gpt_oss": WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_next": SIZES,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def run(
    model: nn.Module, kernel: PagedKernel | None, *, is_quantized: bool = False
) -> tuple[dict[str, list[ScoredRows]], MlxRuntime]:
    made = served(model, kernel=kernel)
    if is_quantized:
        made = replace(made, layout=made.layout.with_quantized_rows())
    runtime = MlxRuntime(model, made)
    tokens = trial_tokens(runtime.description)
    return Trial(runtime, tokens["long"], tokens["short"]).run(), runtime


@pytest.mark.parametrize("is_quantized", [False, True], ids=["exact", "int8"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_on_the_kernel_equals_itself_on_views_and_gathers(
    kind: str, is_quantized: bool, compiled: Path
) -> None:
    model = build(kind, seed=1, sizes=MODELS[kind])
    kernel = PagedKernel(Emulation(compiled), Occupancy(threadgroups=100, least_split=16))
    ours, runtime = run(model, kernel, is_quantized=is_quantized)
    without, _ = run(model, None, is_quantized=is_quantized)
    assert ours.keys() == without.keys()
    worst = 0.0
    for name, rows in without.items():
        for one, other in zip(ours[name], rows, strict=True):
            scale = float(np.std(other.logits))
            worst = max(worst, float(np.abs(one.logits - other.logits).max()) / scale)
    assert worst <= 2e-5
    assert runtime.stats.attentions_by_kernel > 0
    assert runtime.pool_copies == 0
    has_states = any(isinstance(family, RecurrentState) for family in runtime.description.families)
    assert has_states is (kind == "qwen3_next")
    assert {use.has_sinks for use in kernel.uses} == {kind == "gpt_oss"}
    assert {use.is_quantized for use in kernel.uses} == {is_quantized}
