"""Fallback: the execution mode of a model, the reason, and the state in which a failed mode leaves the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from checkpoints import VOCAB, save, saved
from rootstock.errors import ModelUnsupported
from rootstock.runtime.torch import runner
from rootstock.runtime.torch.hooks import IMPLEMENTATION, Unexpanded
from rootstock.runtime.torch.inspect import attention_probe, mask_pattern
from rootstock.runtime.torch.module_parts import PartByPart
from runtime.torch.helpers import STEPS, assert_agrees
from twins.driving import allocate, packed_logits, random_tokens
from twins.torch_models import load, loaded


def in_parts(model: nn.Module) -> dict[str, bool]:
    """Returns the class of each module that runs by parts, and True if it runs one sequence at a time."""
    found = {}
    for module in model.modules():
        forward: Any = vars(module).get("forward")
        if isinstance(forward, PartByPart):
            found[type(module).__name__] = forward.alone
    return found


@pytest.mark.parametrize(
    ("model_type", "mode", "reason"),
    [
        ("llama", "packed", ""),
        ("mamba", "packed, token-wise mixers", "layer 0 (MambaMixer) ignores its stored state"),
        ("jamba", "packed, token-wise mixers", "(JambaMambaMixer) ignores its stored state"),
        ("bloom", "one sequence per forward", "BloomForCausalLM does not call attention"),
    ],
)
def test_the_execution_mode_and_the_reason(model_type: str, mode: str, reason: str) -> None:
    """tests/twins/test_twins.py holds the modes of further models."""
    described = loaded(model_type).description
    assert described.execution_mode == mode
    assert reason in described.mode_reason
    assert bool(reason) == bool(described.mode_reason)


@pytest.mark.parametrize(
    ("dtype", "seed"), [("float32", 0), ("float16", 0), ("bfloat16", 0), ("bfloat16", 3), ("bfloat16", 4)]
)
@pytest.mark.parametrize(
    ("model_type", "forgets"), [("jamba", True), ("zamba", True), ("zamba2", False), ("minimax", False)]
)
def test_a_mixer_that_ignores_its_state_is_found_in_noisy_models(
    tmp_path: Path, model_type: str, forgets: bool, seed: int, dtype: str
) -> None:
    """In bfloat16 the logits of one Jamba in three do not show it."""
    described = load(save(tmp_path, model_type, seed), dtype).description
    assert described.execution_mode == ("packed, token-wise mixers" if forgets else "packed")


def test_a_context_too_short_to_be_divided_is_left_to_the_self_check(tmp_path: Path) -> None:
    directory = save(tmp_path, "qwen3_next", max_position_embeddings=2)
    assert load(directory).description.execution_mode == "packed"


def test_a_model_whose_decodes_differ_from_one_pass_is_served_as_it_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "limit_time_steps", lambda model, found: False)
    described = load(saved("zamba2")).description
    assert described.execution_mode == "packed"
    assert "a decode by the model itself differs from one pass" in described.mode_reason


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("llama", {}),
        ("qwen3_next", {}),  # its mixers are fused
        ("kimi_linear", {}),
        ("minimax", {"MiniMaxLightningAttention": False}),
        ("diffllama", {"DiffLlamaAttention": True}),
        ("deepseek_v32", {"DeepseekV32Attention": True}),
        ("inkling_text", {"InklingAttention": True, "InklingShortConvolution": False}),
    ],
)
def test_only_modules_that_need_it_run_by_parts(model_type: str, parts: dict[str, bool]) -> None:
    assert in_parts(loaded(model_type)._model) == parts


def test_an_unknown_mask_pattern_is_evaluated_for_one_sequence_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = mask_pattern.MaskPattern.rule
    monkeypatch.setattr(
        mask_pattern.MaskPattern, "rule", lambda self, device: None if self.local_size else rule(self, device)
    )
    runtime = load(saved("gemma3_text"))
    assert runtime.description.execution_mode == "packed"
    assert [family.name for family in runtime.description.families] == ["full"]
    assert in_parts(runtime._model) == {"Gemma3Attention": True}
    assert_agrees(runtime, saved("gemma3_text"))


def test_one_sequence_per_forward_serves_windows_and_states_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise attention_probe.LayerUnsupported("cannot be packed today")

    monkeypatch.setattr("rootstock.runtime.torch.fallback.probe_packed", refuse)
    for model_type in ("gemma3_text", "llama4_text", "qwen3_next", "deepseek_v32"):
        directory = saved(model_type)
        runtime = load(directory)
        described = runtime.description
        assert described.execution_mode == "one sequence per forward"
        assert described.mode_reason == "the model cannot be packed today"
        assert {family.name for family in described.families} <= {"full", "state"}
        assert_agrees(runtime, directory)


def test_a_mode_that_failed_leaves_no_replacement_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = attention_probe.probe_packed

    def late(*args: Any) -> Any:
        probe(*args)
        raise attention_probe.LayerUnsupported("is refused when all is in place")

    monkeypatch.setattr("rootstock.runtime.torch.fallback.probe_packed", late)
    model = load(saved("kimi_linear"))._model
    assert model.config._attn_implementation == "eager"
    for module in model.modules():
        assert not any(isinstance(value, (PartByPart, Unexpanded)) for value in vars(module).values())


def test_latents_are_attended_without_being_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = loaded("deepseek_v3")
    allocate(runtime)
    for module in runtime._model.modules():
        if isinstance(vars(module).get("expand_kv"), Unexpanded):
            monkeypatch.setattr(vars(module)["expand_kv"], "expand", lambda *_: pytest.fail("expanded"))
    packed_logits(runtime, [random_tokens(VOCAB, 40, 1), random_tokens(VOCAB, 21, 2)], STEPS)
    assert runtime._model.config._attn_implementation == IMPLEMENTATION


def test_if_no_mode_can_run_the_model_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("in the check")

    monkeypatch.setattr("rootstock.runtime.torch.fallback.self_check", broken)
    with pytest.raises(ModelUnsupported, match="ZeroDivisionError: in the check"):
        load(saved("llama"))
