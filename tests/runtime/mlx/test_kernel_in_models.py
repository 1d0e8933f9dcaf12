"""Whole mlx-lm models whose attention is the Metal kernels, run as C++, equal themselves on views and gathers."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from kernels.metal.emulation import COMPILER, Emulation
from rootstock.cache.families import RecurrentState
from rootstock.kernels.metal.launch import Occupancy
from rootstock.kernels.metal.paged_attention import PagedKernel
from rootstock.runtime.mlx.runner import MlxRuntime
from rootstock.runtime.trial import ScoredRows, Trial, trial_tokens
from runtime.mlx.helpers import served

if COMPILER is None:
    pytest.skip("g++ is not installed", allow_module_level=True)

VOCAB = 199
BASE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 64},
    "gemma3_text": {
        "head_dim": 64,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
    },
    "gpt_oss": {
        "head_dim": 64,
        "sliding_window": 9,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": {
        "head_dim": 64,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _without_compiled_functions() -> Any:
    mx.disable_compile()  # on a CPU each function would be compiled by a C++ compiler
    yield
    mx.enable_compile()


def make_model(kind: str) -> nn.Module:
    """Makes a model with random weights, large enough that attention matters."""
    mx.random.seed(1)
    architecture: Any = importlib.import_module(f"mlx_lm.models.{kind}")
    fields = {"model_type": kind, **BASE, **MODELS[kind]}
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(fields))
    model.update(tree_map(lambda w: 1.5 * w + 0.2 * mx.random.normal(w.shape, w.dtype), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


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
    model = make_model(kind)
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
