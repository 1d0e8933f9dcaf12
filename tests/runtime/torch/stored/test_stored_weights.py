"""Checkpoints with quantized weights: served as they are stored, as near to the exact logits as bfloat16 comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoints import VOCAB
from rootstock.errors import ModelUnsupported
from rootstock.kernels.torch.coded_linear import Coded, CodedLayers, Reordered, Widened
from rootstock.kernels.torch.linear import has_coded_loops
from rootstock.runtime.torch.packed_experts import PackedExperts
from rootstock.runtime.torch.runner import TorchRuntime
from stored_checkpoints import FORMATS, save_mxfp4, save_quantized
from twins.torch_models import load, logit_errors

SIZES = {
    "llama": {"hidden_size": 128, "intermediate_size": 192},
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 64},
    "qwen3_5_text": {"hidden_size": 128, "intermediate_size": 192},
}


def kind_of(format: str, dtype: str) -> type:
    if dtype == "float32" or not has_coded_loops():
        return Widened
    return Reordered if "act-order" in format else Coded


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model_type", SIZES)
def test_a_checkpoint_is_served_as_it_is_stored(model_type: str, format: str, tmp_path: Path) -> None:
    stored, plain = save_quantized(tmp_path, model_type, format, **SIZES[model_type])
    for dtype in ("float32", "bfloat16"):
        runtime = assert_served_as_near_as_bfloat16(stored, plain, dtype)
        layers = coded_layers(runtime._model)
        assert layers
        assert all(isinstance(layer, kind_of(format, dtype)) for layer in layers)
        experts = packed_experts(runtime)
        assert bool(experts) == (model_type == "qwen3_moe" and dtype == "bfloat16" and has_coded_loops())
        assert all(isinstance(form._first, CodedLayers) == ("act-order" not in format) for form in experts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_are_served_as_they_are_stored(dtype: str, tmp_path: Path) -> None:
    runtime = assert_served_as_near_as_bfloat16(*save_mxfp4(tmp_path), dtype)
    experts = packed_experts(runtime)
    assert bool(experts) == (dtype == "bfloat16" and has_coded_loops())
    assert all(isinstance(form._first, CodedLayers) for form in experts)


def coded_layers(model: nn.Module) -> list[Coded | Reordered | Widened]:
    forms = (vars(module).get("forward") for module in model.modules())
    linears = (getattr(getattr(form, "together", form), "linear", None) for form in forms)
    return [linear for linear in linears if isinstance(linear, (Coded, Reordered, Widened))]


def packed_experts(runtime: TorchRuntime) -> list[PackedExperts]:
    forms = (vars(module).get("forward") for module in runtime._model.modules())
    return [form for form in forms if isinstance(form, PackedExperts)]


def assert_served_as_near_as_bfloat16(
    stored: Path, plain: Path, dtype: str, vocab: int = VOCAB
) -> TorchRuntime:
    """Asserts that logits are as near to the exact ones of the same numbers as the model's own in bfloat16."""
    runtime = load(stored, dtype)
    off, own = logit_errors(runtime, plain, vocab)
    assert off <= (1e-4 if dtype == "float32" else 1.5 * own)
    return runtime


def test_groups_of_different_sizes_are_refused_with_the_weights_name(tmp_path: Path) -> None:
    stored, _ = save_quantized(tmp_path, "llama", "GPTQ 4", **SIZES["llama"])
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.g_idx"
    tensors[name][0] = 1
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelUnsupported, match=r"0\.mlp\.up_proj\.weight: its groups do not have as many inputs each"
    ):
        load(stored, "bfloat16")


@pytest.mark.parametrize("rows", ["fewer", "more"])
def test_tensors_that_do_not_fit_together_are_refused(rows: str, tmp_path: Path) -> None:
    stored, _ = save_quantized(tmp_path, "llama", "W4A16", **SIZES["llama"])
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name] = tensors[name][:3] if rows == "fewer" else torch.cat([tensors[name]] * 3)
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"layers\.0\.mlp\.up_proj\.weight: "):
        load(stored, "bfloat16")


def test_formats_of_one_model_do_not_share_a_cache(tmp_path: Path) -> None:
    prints = set()
    for format in ("W4A16", "W8A16", "GPTQ 4", "GPTQ 4 v2"):
        stored, plain = save_quantized(tmp_path / format, "llama", format, **SIZES["llama"])
        of_plain = load(plain, "bfloat16").description.weights_fingerprint
        prints.add(load(stored, "bfloat16").description.weights_fingerprint)
        assert of_plain not in prints
    assert len(prints) == 4
