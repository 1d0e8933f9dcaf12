"""Structures of mixers of families that no small model of the tests has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.glm5_next import configuration_glm5_next, modeling_glm5_next
from transformers.models.qwen4_exp import configuration_qwen4_exp, modeling_qwen4_exp

from rootstock.runtime.torch.fusion.delta_nets import channel_delta_nets, delta_nets
from rootstock.runtime.torch.fusion.modules import FusedLoops
from rootstock.runtime.torch.fusion.recurrences import FindParts, OneSequence, agreeing
from rootstock.runtime.torch.state_pool import StateKey, TorchStatePool, TorchStateShape

LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
HEADS = {"linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4}
GROUPS = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def glm5_next(**fields: Any) -> nn.Module:
    config = configuration_glm5_next.Glm5NextTextConfig(**LAYERS, **HEADS, **fields)
    mixer: nn.Module = modeling_glm5_next.Glm5NextTextLinearAttention(config, 0)
    return mixer


def qwen4_exp(**fields: Any) -> nn.Module:
    config = configuration_qwen4_exp.Qwen4ExpTextConfig(**LAYERS, **GROUPS, **fields)
    mixer: nn.Module = modeling_qwen4_exp.Qwen4ExpTextGatedDeltaNet(config, 0)
    return mixer


@pytest.mark.parametrize(
    ("mixer", "find"),
    [
        (glm5_next(linear_lower_bound=-5.0), channel_delta_nets),
        (glm5_next(linear_lower_bound=None), channel_delta_nets),
        (qwen4_exp(output_gate_type="silu"), delta_nets),
        (qwen4_exp(output_gate_type="sigmoid"), delta_nets),
    ],
    ids=["glm5_next, bounded", "glm5_next", "qwen4_exp", "qwen4_exp, sigmoid"],
)
def test_mixers_of_other_families_are_found(mixer: nn.Module, find: FindParts) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    shapes = [
        TorchStateShape(StateKey(0, kind, 0), shape, torch.float32, torch.float32, kernel)
        for kind, shape, kernel in (("conv_states", (192, 4), 4), ("recurrent_states", (4, 16, 16), None))
    ]
    step = OneSequence(TorchStatePool(shapes, 1, torch.device("cpu")), 5, continues=False)
    mixer.eval().forward = mixer.forward  # as a replacement of it would be
    with torch.inference_mode():
        call = (torch.randn(1, 5, 64),), {"cache_params": step}
        assert agreeing(find, mixer, call, 0, shapes, FusedLoops(torch.float32)) is not None
