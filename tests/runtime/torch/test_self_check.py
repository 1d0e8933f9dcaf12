"""Self-check: correct models pass in every dtype, and each mistake made here on purpose is found.

After a mistake in the packed path the model falls back to another execution mode; a mistake in all modes refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from checkpoints import SERVED, save, saved
from rootstock.cache.families import SlidingWindow, TokenFamily
from rootstock.cache.plan import Plan
from rootstock.errors import SelfCheckFailed
from rootstock.kernels.api import Scores
from rootstock.kernels.spans import EVERYTHING, Span
from rootstock.kernels.torch import gathered_attention, sliced_attention
from rootstock.runtime import trial
from rootstock.runtime.torch import hooks, kv_pool, runner, self_check, state_pool, step_cache
from rootstock.runtime.torch.fusion.recurrences import FusedRecurrence
from rootstock.runtime.torch.inspect import mask_pattern
from twins.torch_models import load, loaded

FULL = {"layer_types": ["full_attention"] * 3, "sliding_window": None}
DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(autouse=True)
def without_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables compiled kernels: the mistakes are made in torch's backends. See also test_compiled_kernel.py."""
    monkeypatch.setenv("ROOTSTOCK_TEST_ATTENTION", "torch")


def assert_refused(directory: Path, dtype: str) -> None:
    with pytest.raises(SelfCheckFailed) as refusal:
        load(directory, dtype)
    assert not refusal.value.figure <= refusal.value.tolerance
    assert f"{refusal.value.figure:.3g}" in str(refusal.value)


def assert_falls_back(directory: Path, dtype: str) -> None:
    described = load(directory, dtype).description
    assert described.execution_mode == "one sequence per forward"
    assert re.search(r"(difference|error) of .* is \S+, at most \S+ is allowed", described.mode_reason)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", SERVED)
def test_rounding_is_not_mistaken_for_a_mistake(model_type: str, dtype: str) -> None:
    loaded(model_type, dtype)


def test_a_context_shorter_than_the_check_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    for limit in (30, 5, 2):
        assert load(save(tmp_path, "llama", max_position_embeddings=limit)).description.context_limit == limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dropped_scale(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "Scores", lambda scale, softcap, sinks: Scores(1.0, softcap, sinks))
    assert_falls_back(saved("llama"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_counts_positions_itself(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = LlamaRotaryEmbedding.forward

    def own(self: LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor) -> Any:
        return given(self, x, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", own)
    assert_refused(saved("llama"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("missing", [1, 4], ids=["one position", "a block"])
def test_a_chunk_that_does_not_see_all_of_its_past(
    dtype: str, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = sliced_attention.SlicedAttention.prepare

    def less(self: sliced_attention.SlicedAttention, spans: Sequence[Span], family: TokenFamily) -> Any:
        return prepare(
            self,
            [Span(s.row, s.new, max(0, s.past - missing) if s.new > 1 else s.past, s.blocks) for s in spans],
            family,
        )

    monkeypatch.setattr(sliced_attention.SlicedAttention, "prepare", less)
    assert_falls_back(saved("llama"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_that_does_not_see_itself(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = sliced_attention.SlicedAttention.prepare

    def less(self: sliced_attention.SlicedAttention, spans: Sequence[Span], family: TokenFamily) -> Any:
        seen = [Span(s.row, s.new, s.past - (s.new == 1), s.blocks) for s in spans]
        return prepare(self, seen, family)

    monkeypatch.setattr(sliced_attention.SlicedAttention, "prepare", less)
    assert_falls_back(saved("llama"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_that_sees_its_own_future(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flash = sliced_attention._flash
    monkeypatch.setattr(
        sliced_attention,
        "_flash",
        lambda q, k, v, dropout=0.0, causal=False, *, scale: flash(q, k, v, dropout, False, scale=scale),
    )
    assert_falls_back(saved("llama"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_is_not_copied(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.TorchRuntime, "apply", lambda self, plan: None)
    assert_refused(saved("llama"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_written_to_a_neighbours_slot(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = kv_pool.LayerMemory.write
    monkeypatch.setattr(
        kv_pool.LayerMemory, "write", lambda self, slots, k, v: write(self, (slots + 1) % 8, k, v)
    )
    # Fused parts use the same write.
    monkeypatch.setattr(step_cache.PackedCache, "memory_of", lambda self, index, dtype: None)
    assert_refused(saved("llama"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("model_type", "dropped", "fields"),
    [
        ("gemma2", "softcap", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
        (
            "gpt_oss",
            "sinks",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}},
        ),
    ],
    ids=["softcap", "sinks"],
)
def test_a_dropped_feature(
    tmp_path: Path,
    model_type: str,
    dropped: str,
    fields: dict[str, Any],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(tmp_path, model_type, **fields | FULL)
    load(tmp_path, dtype)
    attend = (
        gathered_attention._GatherStep.__call__
        if dropped == "softcap"
        else sliced_attention._SlicedStep.__call__
    )

    def without(
        self: Any, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, s: Scores
    ) -> Any:
        return attend(self, query, key, value, keys, values, Scores(s.scale))

    kernel = gathered_attention._GatherStep if dropped == "softcap" else sliced_attention._SlicedStep
    monkeypatch.setattr(kernel, "__call__", without)
    assert_falls_back(tmp_path, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "llama4_text"])
def test_a_dropped_window_or_chunk(model_type: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and pools are treated as full attention."""
    assert loaded(model_type, dtype).description.execution_mode == "packed"
    monkeypatch.setattr(mask_pattern.MaskPattern, "rule", lambda self, device: EVERYTHING)
    assert_falls_back(saved(model_type), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_off_by_one(off: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = mask_pattern.MaskPattern.rule

    def other(self: mask_pattern.MaskPattern, device: torch.device) -> TokenFamily:
        family = rule(self, device)
        assert isinstance(family, SlidingWindow)
        return replace(family, window=family.window + off)

    monkeypatch.setattr(mask_pattern.MaskPattern, "rule", other)
    assert_falls_back(saved("mistral"), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_without_their_offsets(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 scales queries by the logarithm of positions that it counts from the cache's length. Over a few dozen
    positions that is less than the rounding of bfloat16."""
    monkeypatch.setattr(step_cache.PackedCache, "get_seq_length", lambda self, layer_idx=None: 0)
    assert_falls_back(saved("llama4_text"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2", "lfm2"])
def test_a_state_that_is_not_restored(model_type: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = runner.TorchRuntime.apply
    monkeypatch.setattr(
        runner.TorchRuntime, "apply", lambda self, plan: apply(self, Plan(copies=plan.copies))
    )
    assert_refused(saved(model_type), dtype)


def test_a_state_that_another_sequence_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = state_pool.StateCache.__init__

    def continuing(self: Any, pool: Any, slots: Tensor, *, continues: bool) -> None:
        made(self, pool, slots, continues=pool is not None)

    monkeypatch.setattr(state_pool.StateCache, "__init__", continuing)
    assert_refused(saved("minimax"), "float32")


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "kimi_linear"])
@pytest.mark.parametrize(
    ("column", "value"), [(3, 0), (3, 1), (2, 0)], ids=["ignored", "left behind", "another's"]
)
def test_fused_mixers_with_a_wrong_state_are_undone(
    model_type: str, column: int, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = state_pool.TorchStatePool.of_mixer

    def wrong(self: Any, index: int, dtype: torch.dtype, sequences: Tensor) -> Any:
        changed = sequences.clone()
        changed[:, column] = value
        return right(self, index, dtype, changed)

    monkeypatch.setattr(state_pool.TorchStatePool, "of_mixer", wrong)
    runtime = load(saved(model_type))
    assert runtime.description.execution_mode == "packed"
    assert not any(isinstance(module.forward, FusedRecurrence) for module in runtime._model.modules())


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_that_are_nan(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "Scores", lambda scale, softcap, sinks: Scores(float("nan"), None, None))
    assert_falls_back(saved("llama"), dtype)


def test_the_model_keeps_rootstocks_attention_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = loaded("llama")
    model, described = runtime._model, runtime.description
    assert model.config._attn_implementation == hooks.IMPLEMENTATION
    monkeypatch.setattr(self_check, "dense_logits", lambda model, tokens: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        self_check.self_check(
            model,
            runtime._layout.calling,
            described,
            lambda tuning: pytest.fail("comes later"),
            lambda done: None,
        )
    assert model.config._attn_implementation == hooks.IMPLEMENTATION


def test_noise_is_that_of_one_rounding() -> None:
    """Noise grows about in proportion to the rounding, and the embedding is left without a hook."""
    model = loaded("llama")._model
    tokens = np.arange(3, 40, dtype=np.int32)

    def noise(dtype: str) -> float:
        return self_check.noise(model, tokens, dtype, trial.relative_error)

    with self_check.own_attention(model):
        coarse, fine = noise("bfloat16"), noise("float16")
        assert noise("float16") == fine
    assert 4 < coarse / fine < 16
    assert not model.get_input_embeddings()._forward_hooks


def test_a_model_that_amplifies_rounding_is_measured_by_its_own_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32, noise is measured only if the difference exceeds the tolerance."""
    monkeypatch.setattr(trial, "_FLOAT32_TOLERANCE", 1e-4)
    asked = []
    noise = self_check.noise
    monkeypatch.setattr(self_check, "noise", lambda *args: asked.append(noise(*args)) or asked[-1])
    assert load(saved("minimax")).description.execution_mode == "packed"
    assert asked
