"""Repositories that mlx-lm quantized: served by torch with the numbers that MLX unpacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mlx_checkpoints import logits_of, save_mlx_checkpoint
from rootstock.errors import ModelUnsupported
from rootstock.runtime.torch.stored.formats import formats_of
from runtime.torch.stored.test_stored_weights import assert_served_as_near_as_bfloat16, coded_layers
from twins.torch_models import load


def save_plain_twin(stored: Path, directory: Path) -> Path:
    """Saves what MLX unpacks of a repository, by transformers' names, in float32."""
    arrays = dict(mx.load(str(stored / "model.safetensors")).items())
    config = json.loads((stored / "config.json").read_text())
    settings = config.pop("quantization")
    config.pop("quantization_config", None)
    state: dict[str, torch.Tensor] = {}
    for name, array in arrays.items():
        path = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{path}.scales" in arrays:
            own = settings.get(path) or settings
            scales, biases = (arrays[f"{path}.{of}"].astype(mx.float32) for of in ("scales", "biases"))
            array = mx.dequantize(array, scales, biases, own["group_size"], own["bits"])
        state[name] = torch.from_numpy(np.array(array.astype(mx.float32)))
    for name in [name for name in state if name.endswith(".switch_mlp.gate_proj.weight")]:
        head = name.removesuffix(".switch_mlp.gate_proj.weight")
        gate, up, down = (state.pop(f"{head}.switch_mlp.{of}_proj.weight") for of in ("gate", "up", "down"))
        state |= {f"{head}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{head}.experts.down_proj": down}
    for name in [name for name in state if name.endswith("conv.weight")]:
        state[name] = state[name].mT.contiguous()
    kind = config.pop("model_type")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])
    model.tie_weights()
    model.save_pretrained(directory)
    return directory


def drop_head(stored: Path) -> None:
    """Removes the head, as files of models have none whose head is the embedding."""
    file = stored / "model.safetensors"
    arrays = {name: array for name, array in mx.load(str(file)).items() if not name.startswith("lm_head.")}
    mx.eval(arrays)
    mx.save_safetensors(str(file), arrays, metadata={"format": "mlx"})


@pytest.mark.parametrize("quantization", ["4bit", "8bit", "mixed"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "gemma3_text", "lfm2"])
def test_a_repository_of_mlx_is_served_as_it_is_stored(kind: str, quantization: Any, tmp_path: Path) -> None:
    stored = save_mlx_checkpoint(tmp_path / "stored", kind, quantization=quantization, dtype=mx.bfloat16)
    if kind == "gemma3_text":
        drop_head(stored)
    plain = save_plain_twin(stored, tmp_path / "plain")
    for dtype in ("float32", "bfloat16"):
        runtime = assert_served_as_near_as_bfloat16(stored, plain, dtype, logits_of(kind))
        assert coded_layers(runtime._model)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_codes_of_all_widths_are_read(bits: int, group: int) -> None:
    weight = mx.random.normal((24, 256))
    codes, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    expected = np.array(mx.dequantize(codes, scales, biases, group_size=group, bits=bits))
    [format] = formats_of("mlx", {"bits": bits, "group_size": group})
    parts = {
        f".{name}": torch.from_numpy(np.array(array))
        for name, array in (("weight", codes), ("scales", scales), ("biases", biases))
    }
    got = format.decode(parts, format.sizes).weight
    assert got.problem() == ""
    np.testing.assert_allclose(got.widened().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_mlx_changes_is_left_to_mlx(tmp_path: Path) -> None:
    stored = save_mlx_checkpoint(tmp_path, "qwen3_next", quantization="4bit")
    with pytest.raises(ModelUnsupported, match="--runtime mlx"):
        load(stored, "float32")
