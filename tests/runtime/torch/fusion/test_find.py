"""Fused parts of decoder layers: those that are found, those that are refused, and equal results."""

from __future__ import annotations

import builtins
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, PreTrainedModel

from checkpoints import saved
from rootstock.runtime.torch.fallback import use_attention
from rootstock.runtime.torch.fusion.base import NOTHING_FUSED, Fusion, is_fused, undo_fusion
from rootstock.runtime.torch.fusion.find import fuse
from rootstock.runtime.torch.fusion.modules import FusedAttention, FusedLayer, FusedMLP, FusedNorm
from rootstock.runtime.torch.fusion.recurrences import FusedRecurrence
from rootstock.runtime.torch.inspect.attention_probe import probe_packed
from rootstock.runtime.torch.inspect.mask_pattern import IMPLEMENTATION
from rootstock.runtime.torch.inspect.survey import survey
from rootstock.runtime.torch.module_parts import PartByPart
from rootstock.runtime.torch.self_check import own_attention
from rootstock.runtime.torch.step_cache import PackedCache
from rootstock.runtime.torch.weights import read_weights
from rootstock.runtime.trial import relative_error
from twins.architectures import VOCAB
from twins.driving import allocate, packed_logits, random_tokens
from twins.torch_models import load, loaded

CPU = torch.device("cpu")
SIZES: dict[str, int] = {  # of models that are made without files
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model_of(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(saved(model_type), dtype=dtype).eval()


def fused(model: PreTrainedModel) -> Fusion:
    """Fuses a model as the loader does."""
    with own_attention(model):
        found = survey(model, CPU)
    use_attention(model, IMPLEMENTATION)
    probe_packed(model, found, CPU, 64)
    return fuse(model, found, CPU, 64)


def kinds(fusion: Fusion) -> Counter[type]:
    return Counter(type(part) for part in fusion.parts.values())


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [("llama", 3), ("qwen3_moe", 3), ("gemma2", 4), ("gemma3_text", 4), ("smollm3", 3), ("qwen2", 3)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_made_of_common_parts_are_fused_whole(
    model_type: str, layers: int, dtype: torch.dtype
) -> None:
    found = kinds(fused(model_of(model_type, dtype)))
    assert found[FusedLayer] == found[FusedAttention] == layers


@pytest.mark.parametrize(
    ("model_type", "whole"), [("phi3", FusedAttention), ("olmo2", FusedMLP), ("deepseek_v3", FusedNorm)]
)
def test_common_parts_of_other_layers_are_fused(model_type: str, whole: type) -> None:
    found = kinds(fused(model_of(model_type)))
    assert found[whole] >= 3
    assert found[FusedLayer] == 0


@pytest.mark.parametrize(
    ("model_type", "mixers", "layers"),
    [
        ("qwen3_next", 3, 4),
        ("qwen3_5_text", 3, 4),
        ("qwen3_5_moe_text", 3, 4),
        ("olmo_hybrid", 3, 3),  # its attention normalises queries and keys of all heads together
        ("bamba", 2, 4),
        ("granitemoehybrid", 2, 0),  # its residuals have a multiplier
        ("nemotron_h", 2, 0),  # its layers have one part each
        ("zamba2", 4, 2),
        ("mamba2", 3, 0),
        ("falcon_h1", 3, 0),  # its layers have a mixer beside attention
        ("lfm2", 2, 4),
        ("lfm2_moe", 2, 4),
        ("lfm3", 3, 0),
        ("mamba", 3, 0),
        ("falcon_mamba", 3, 0),
        ("jamba", 2, 4),
        ("kimi_linear", 2, 2),
        ("bailing_hybrid", 2, 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recurrent_mixers_are_fused(model_type: str, mixers: int, layers: int, dtype: str) -> None:
    runtime = loaded(model_type, dtype)
    forms = Counter(type(module.forward) for module in runtime._model.modules() if is_fused(module))
    assert (forms[FusedRecurrence], forms[FusedLayer]) == (mixers, layers)
    described = runtime.description
    assert described.mode_reason == "" or described.execution_mode == "packed, token-wise mixers"


def changed(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Gives the module a class whose forward changes the result."""
    own = type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = own(self, *args, **kwargs)
        return (change(given[0]), *given[1:]) if isinstance(given, tuple) else change(given)

    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


@pytest.mark.parametrize(
    "change",
    [lambda x: 1.01 * x, lambda x: x.clamp(-1.0, 1.0), lambda x: x.roll(1, -1)],
    ids=["scaled", "clamped", "rolled"],
)
@pytest.mark.parametrize("part", ["mlp", "self_attn", "input_layernorm", ""])
def test_a_part_that_computes_something_else_is_not_fused(
    part: str, change: Callable[[Tensor], Tensor]
) -> None:
    model = model_of("llama")
    layer = model.model.layers[1]
    changed(layer.get_submodule(part), change)
    parts = fused(model).parts
    name = "model.layers.1"
    assert f"{name}.{part}".rstrip(".") not in parts
    assert "model.layers.0" in parts
    assert "model.layers.2" in parts
    if part in ("self_attn", "input_layernorm"):
        assert name not in parts, "a layer is made of its fused parts"


@pytest.mark.parametrize(
    "change",
    [lambda x: 1.01 * x, lambda x: x.clamp(-1e-3, 1e-3), lambda x: x.roll(1, -1)],
    ids=["scaled", "clamped", "rolled"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixer_that_computes_something_else_is_not_fused(
    change: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    model = model_of("qwen3_next", dtype)
    changed(model.model.layers[1].linear_attn, change)
    parts = fused(model).parts
    assert "model.layers.1.linear_attn" not in parts
    assert "model.layers.0.linear_attn" in parts


def doubled(parameter: str) -> Callable[[nn.Module], None]:
    """Returns a change of a mixer's formula: its forward doubles a parameter while it runs."""

    def change(mixer: nn.Module) -> None:
        own = type(mixer).forward

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            weight = self.get_parameter(parameter)
            with torch.no_grad():
                weight.mul_(2)
                given = own(self, *args, **kwargs)
                weight.div_(2)
            return given

        mixer.__class__ = type(type(mixer).__name__, (type(mixer),), {"forward": forward})

    return change


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba"])
@pytest.mark.parametrize("parameter", ["A_log", "D", "dt_proj.bias", "in_proj.weight", "conv1d.weight"])
def test_a_scan_by_another_formula_is_not_fused(model_type: str, parameter: str) -> None:
    model = model_of(model_type)
    layers = (model.backbone if hasattr(model, "backbone") else model.model).layers
    mixers = [layer.get_submodule("mixer" if hasattr(layer, "mixer") else "mamba") for layer in layers[::2]]
    doubled(parameter)(mixers[0])
    fused(model)
    assert [is_fused(mixer) for mixer in mixers[:2]] == [False, True]


@pytest.mark.parametrize("model_type", ["kimi_linear", "bailing_hybrid"])
@pytest.mark.parametrize("parameter", ["forget_gate.A_log", "forget_gate.dt_bias", "b_proj.weight"])
def test_a_delta_rule_by_another_formula_is_not_fused(model_type: str, parameter: str) -> None:
    model = model_of(model_type)
    first, second = (
        layer.get_submodule(name)
        for layer in model.model.layers[:2]
        for name, child in layer.named_children()
        if hasattr(child, "forget_gate")
    )
    doubled(parameter)(first)
    fused(model)
    assert [is_fused(first), is_fused(second)] == [False, True]


@pytest.mark.parametrize("part", ["recurrent", "conv"])
def test_a_mixer_that_keeps_another_state_is_not_fused(part: str) -> None:
    """Its first rows are right."""
    model = model_of("qwen3_next")
    mixer = model.model.layers[1].linear_attn
    own = type(mixer).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        states = kwargs["cache_params"].layers_touched[self.layer_idx]
        getattr(states, f"{part}_states")[0] *= 1.01
        return out

    mixer.__class__ = type("Keeps", (type(mixer),), {"forward": forward})
    parts = fused(model).parts
    assert "model.layers.1.linear_attn" not in parts
    assert "model.layers.0.linear_attn" in parts


def test_undoing_the_fusion_of_a_mixer_leaves_it_run_by_parts() -> None:
    model = model_of("qwen3_next")
    assert fused(model).parts
    undo_fusion(model)
    assert not any(is_fused(module) for module in model.modules())
    for layer in model.model.layers[:3]:
        assert isinstance(vars(layer.linear_attn)["forward"], PartByPart)


def test_a_difference_at_far_positions_only_is_found() -> None:
    model = model_of("llama")
    own = type(model.model.layers[1].self_attn).forward

    def forward(self: nn.Module, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        out, weights = own(self, *args, position_ids=position_ids, **kwargs)
        return out * torch.where(position_ids > 40, 1.5, 1.0)[..., None], weights

    module = model.model.layers[1].self_attn
    module.__class__ = type("Far", (type(module),), {"forward": forward})
    assert "model.layers.1.self_attn" not in fused(model).parts


@pytest.mark.parametrize(
    ("activation", "mlps"),
    [("silu", 2), ("gelu_pytorch_tanh", 2), ("gelu", 2), ("quick_gelu", 0), ("mish", 0), ("relu", 0)],
)
def test_similar_activations_are_told_apart_in_bfloat16_too(activation: str, mlps: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, hidden_act=activation, initializer_range=0.1)
    found = kinds(fused(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()))
    assert found[FusedMLP] == mlps
    assert found[FusedLayer] == 2


@pytest.mark.parametrize("share", [0.22, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_a_residual_multiplier_is_not_fused(share: float, dtype: torch.dtype) -> None:
    """The layer's own part is 1 % of these hidden states, about as much as the rounding of bfloat16."""
    torch.manual_seed(0)
    config = GraniteConfig(**SIZES, embedding_multiplier=100.0, residual_multiplier=share)
    found = kinds(fused(AutoModelForCausalLM.from_config(config, dtype=dtype).eval()))
    assert found[FusedAttention] == found[FusedMLP] == 2
    assert found[FusedLayer] == 0


def test_undoing_the_fusion_restores_every_forward() -> None:
    model = model_of("llama")
    assert fused(model).parts
    with own_attention(model):
        assert not any(is_fused(module) for module in model.modules())
    assert any(is_fused(module) for module in model.modules())
    undo_fusion(model)
    assert not any(is_fused(module) for module in model.modules())


def test_a_call_with_an_unknown_argument_goes_to_the_module_itself() -> None:
    model = model_of("llama")
    fused(model)
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    with pytest.raises(TypeError):
        mlp(torch.zeros(1, 1, model.config.hidden_size), scale=2.0)
    with pytest.raises(TypeError):
        norm(torch.zeros(1, 1, model.config.hidden_size), scale=2.0)


# The largest difference of a logit, relative to their spread. A whole Qwen3-Next by transformers in float32 is off by
# 1.4e-3 from float64, and a fused one by 7e-4.
@pytest.mark.parametrize(
    ("model_type", "allowed"),
    [
        ("llama", 1e-4),
        ("qwen3_next", 3e-3),
        ("qwen3_5_text", 2e-4),
        ("olmo_hybrid", 2e-4),
        ("bamba", 2e-4),
        ("nemotron_h", 1e-4),
        ("zamba2", 2e-3),
        ("mamba2", 1e-4),
        ("falcon_h1", 2e-4),
        ("granitemoehybrid", 2e-4),
        ("lfm2", 2e-4),
        ("mamba", 2e-4),
        ("falcon_mamba", 2e-4),
        ("jamba", 1e-3),
        ("kimi_linear", 1e-3),
        ("bailing_hybrid", 2e-4),
    ],
)
def test_fused_or_not_the_logits_are_the_same(
    monkeypatch: pytest.MonkeyPatch, model_type: str, allowed: float
) -> None:
    path = saved(model_type)
    sequences = [random_tokens(VOCAB, n, n) for n in (40, 21, 3)]
    both = []
    for fuses in (True, False):
        if not fuses:
            monkeypatch.setattr("rootstock.runtime.torch.fallback._fuse", lambda *given: NOTHING_FUSED)
        runtime = load(path)
        assert any(is_fused(m) for m in runtime._model.modules()) == fuses
        allocate(runtime)
        both.append(packed_logits(runtime, sequences, [{0: 5, 1: 20, 2: 2}, {0: 20, 1: 1, 2: 1}, {0: 15}]))
    for ours, own in zip(*both, strict=True):
        assert np.abs(ours - own).max() <= allowed * own.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_share_linear_layers_are_fused_and_served(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def sharing(*given: Any, **more: Any) -> nn.Module:
        model: Any = read_weights(*given, **more)
        first, second, third = model.model.layers
        second.self_attn.k_proj = first.self_attn.k_proj
        third.mlp.down_proj = first.mlp.down_proj
        return model  # type: ignore[no-any-return]

    monkeypatch.setattr("rootstock.runtime.torch.runner.read_weights", sharing)
    path, sequences = saved("llama"), [random_tokens(VOCAB, 20, 1)]
    both = []
    for fuses in (True, False):
        if not fuses:
            monkeypatch.setattr("rootstock.runtime.torch.fallback._fuse", lambda *given: NOTHING_FUSED)
        runtime = load(path, dtype)
        forms = [vars(layer).get("forward") for layer in runtime._model.model.layers]
        assert all(isinstance(form, FusedLayer) for form in forms) == fuses
        allocate(runtime)
        both.append(packed_logits(runtime, sequences, [{0: 12}, {0: 7}, {0: 1}])[0])
    assert relative_error(*both) <= (1e-4 if dtype == "float32" else 0.1)


def test_a_fused_form_that_fails_the_self_check_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = FusedLayer.rows
    monkeypatch.setattr(FusedLayer, "rows", lambda self, *given: 1.1 * wrong(self, *given))
    monkeypatch.setattr("rootstock.runtime.torch.fusion.find._Fuser._agrees", agrees_to_anything)
    runtime = load(saved("llama"))
    assert runtime.description.execution_mode == "packed"
    assert "logit" in runtime.description.mode_reason
    assert not any(is_fused(module) for module in runtime._model.modules())


def test_fused_parts_that_write_k_and_v_to_a_neighbours_slot_are_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = PackedCache.memory_of

    def neighbours(self: PackedCache, index: int, dtype: torch.dtype) -> Any:
        memory = right(self, index, dtype)
        return None if memory is None else (*memory[:2], (memory[2] + 1) % 8)

    monkeypatch.setattr(PackedCache, "memory_of", neighbours)
    runtime = load(saved("llama"))
    assert runtime.description.execution_mode == "packed"
    assert not any(is_fused(module) for module in runtime._model.modules())


def agrees_to_anything(self: Any, module: nn.Module, form: Any) -> bool:
    from rootstock.kernels.api import Scores

    if isinstance(form, FusedAttention):
        form.scores = Scores(module.scaling)  # type: ignore[arg-type]
    return not (isinstance(form, FusedNorm) and form.weight.mean() > 1.5)


def test_without_numba_no_part_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (
        "rootstock.runtime.torch.fusion.find",
        "rootstock.runtime.torch.fusion.modules",
        "rootstock.runtime.torch.fusion.recurrences",
    )
    for name in [name for name in sys.modules if name in parts]:
        monkeypatch.delitem(sys.modules, name)
    found = builtins.__import__

    def no_numba(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in parts:
            raise ImportError("no Numba")
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_numba)
    runtime = load(saved("llama"))
    assert runtime.description.execution_mode == "packed"
    assert not any(is_fused(module) for module in runtime._model.modules())


@pytest.mark.parametrize("model_type", ["deepseek_v3", "diffllama", "qwen3_next"])
def test_a_model_without_fused_parts_is_packed(model_type: str) -> None:
    """No part is fused in float16. Replacements of the first attempt do not disturb the next."""
    described = loaded(model_type, "float16").description
    assert (described.execution_mode, described.mode_reason) == ("packed", "")
