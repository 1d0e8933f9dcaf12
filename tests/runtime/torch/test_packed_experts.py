"""Packed experts of mixtures: every kind that transformers dispatches, the same products, and a way back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import (
    OpenAIPrivacyFilterExperts,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from checkpoints import VOCAB, saved
from rootstock.kernels.cpu.coded_products import has_coded_products
from rootstock.kernels.torch.coded_linear import Rounding
from rootstock.runtime.torch.packed_experts import PackedExperts, find_experts, not_coded, pack_experts
from rootstock.runtime.torch.packed_linears import Packing, pack_linears
from runtime.torch.helpers import STEPS
from twins.driving import allocate, packed_logits, random_tokens
from twins.torch_models import Dense, load

HIDDEN, INNER, EXPERTS = 128, 72, 6
FIELDS = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "moe_hidden_size": HIDDEN,
    "num_attention_heads": 4,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
}
KINDS: dict[type[nn.Module], str] = {
    Qwen3MoeExperts: "qwen3_moe",
    NemotronHExperts: "nemotron_h",  # no gates
    MuseSparkExperts: "muse_spark_text",  # a norm after the products
    GptOssExperts: "gpt_oss",  # transposed, with biases, gates and the rest side by side
    OpenAIPrivacyFilterExperts: "openai_privacy_filter",  # transposed, with biases
    AriaExperts: "aria_text",  # transposed
}


def experts_of(kind: type[nn.Module], dtype: torch.dtype = torch.bfloat16, inner: int = INNER) -> Any:
    config = AutoConfig.for_model(KINDS[kind], **{n: inner if v == INNER else v for n, v in FIELDS.items()})
    config._experts_implementation = "grouped_mm"
    made = kind(config)
    random = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=random)
    return made.to(dtype).requires_grad_(False)


def routed(rows: int, choices: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=random)[:choices] for _ in range(rows)])
    weights = torch.rand(rows, choices, generator=random)
    return torch.randn(rows, HIDDEN, generator=random).to(dtype), chosen, weights.to(dtype)


def rms(numbers: Tensor) -> float:
    return float(numbers.double().square().mean().sqrt())


needs_loops = pytest.mark.skipif(
    not find_experts(nn.Sequential(experts_of(Qwen3MoeExperts))),
    reason="needs AVX512-BF16 without matrix units",
)


@needs_loops
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("choices", [1, 4])
def test_packed_experts_are_as_near_to_the_exact_products_as_torchs(
    kind: type[nn.Module], rows: int, choices: int
) -> None:
    module, exact = experts_of(kind), experts_of(kind).float()
    given = routed(rows, choices)
    expected = exact(given[0].float(), given[1], given[2].float())
    theirs = rms(module(*given) - expected)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    packed, _, _ = pack_experts(module)
    assert packed is not None
    assert module.forward is packed
    assert rms(module(*given) - expected) <= 1.05 * theirs + 1e-4 * rms(expected)
    assert {name: parameter.shape for name, parameter in module.named_parameters()} == shapes
    names = {name for name in shapes if name.endswith("_proj")}
    assert all(module.get_parameter(name).isnan().all() for name in names)


@needs_loops
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_batch_equals_the_row_alone(kind: type[nn.Module]) -> None:
    module = experts_of(kind)
    pack_experts(module)
    x, chosen, weights = routed(70, 3)
    together = module(x, chosen, weights)
    for row in (0, 33, 69):
        alone = slice(row, row + 1)
        assert torch.equal(module(x[alone], chosen[alone], weights[alone]), together[alone])


@needs_loops
@pytest.mark.parametrize("kind", KINDS)
def test_restored_experts_have_their_weights_and_forward_back(kind: type[nn.Module]) -> None:
    module = experts_of(kind)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    given = routed(9, 2)
    expected = module(*given)
    packed, _, _ = pack_experts(module)
    assert packed is not None
    packed.restore()
    assert all(torch.equal(module.get_parameter(name), weights) for name, weights in before.items())
    assert torch.equal(module(*given), expected)


@needs_loops
@pytest.mark.skipif(not has_coded_products(), reason="needs AVX512-VBMI")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rounding", "most"), [("int8", 0.02), ("int4", 0.2)])
def test_coded_experts_are_off_by_their_rounding_for_any_number_of_rows(
    kind: type[nn.Module], rounding: Rounding, most: float
) -> None:
    module, exact = (experts_of(kind, dtype, inner=96) for dtype in (torch.bfloat16, torch.float32))
    assert not_coded(module, rounding) == ""
    packed, _, error = pack_experts(module, rounding)
    assert packed is not None
    assert 0 < error < most
    x, chosen, weights = routed(130, 3)
    expected = exact(x.float(), chosen, weights.float())
    together = module(x, chosen, weights)
    assert rms(together - expected) <= most * rms(expected)
    for rows in (slice(0, 1), slice(4, 9), slice(100, 130)):
        assert torch.equal(module(x[rows], chosen[rows], weights[rows]), together[rows])


@needs_loops
@pytest.mark.skipif(not has_coded_products(), reason="needs AVX512-VBMI")
def test_experts_of_other_sizes_are_packed_unquantized() -> None:
    module = experts_of(Qwen3MoeExperts)
    assert not_coded(module, "int4") == "the number of its inputs, 72, is not a multiple of 32"
    model = nn.Sequential(module, experts_of(Qwen3MoeExperts, inner=96))

    def exercise() -> dict[str, Any]:
        x, chosen, routing = routed(5, 2)
        with torch.inference_mode():
            return {"rows": model[1](model[0](x, chosen, routing), chosen, routing).float().numpy()}

    packing = pack_linears(model, [], exercise, lambda: 0.05, lambda done: None, "int4")
    assert set(packing.experts) == {"0", "1"}
    assert set(packing.unrounded) == {"0"}
    assert set(packing.rounded) == {"1"}
    assert 0 < packing.difference < 0.5


def test_only_dispatched_modules_with_plain_bfloat16_weights_are_found() -> None:
    def hooked(module: Any) -> Any:
        module.register_forward_hook(lambda module, inputs, output: output)
        return module

    def changed(module: Any, name: str, value: Any) -> Any:
        setattr(module, name, value)
        return module

    odd = nn.Parameter(torch.ones(EXPERTS, HIDDEN, INNER - 1).bfloat16())
    others: list[Any] = [
        experts_of(Qwen3MoeExperts, torch.float32),
        experts_of(Qwen3MoeExperts, torch.float16),
        hooked(experts_of(Qwen3MoeExperts)),
        changed(experts_of(Qwen3MoeExperts), "forward", lambda *given: given[0]),
        changed(experts_of(Qwen3MoeExperts), "_is_expert_parallel", True),
        changed(experts_of(Qwen3MoeExperts), "scale", nn.Parameter(torch.ones(1))),
        changed(experts_of(Qwen3MoeExperts), "has_bias", True),
        changed(experts_of(Qwen3MoeExperts), "down_proj", odd),
        nn.Linear(4, 4).bfloat16(),
    ]
    assert find_experts(nn.Sequential(*others)) == {}


@needs_loops
@pytest.mark.parametrize("kind", KINDS)
def test_experts_take_what_routers_and_blocks_give(kind: type[nn.Module]) -> None:
    """Choices as a column of a wider tensor or in 32 bits, weights and rows in float32, and no rows at all."""
    module = experts_of(kind)
    pack_experts(module)
    x, chosen, weights = routed(7, 3)
    expected = module(x, chosen[:, :1].contiguous(), weights[:, :1].contiguous())
    assert torch.equal(module(x, chosen[:, :1], weights[:, :1]), expected)
    assert torch.equal(module(x, chosen[:, :1].int(), weights[:, :1]), expected)
    assert torch.equal(module(x.float(), chosen[:, :1], weights[:, :1]).bfloat16(), expected)
    assert rms(module(x, chosen[:, :1], weights[:, :1].float()) - expected) <= 0.01 * rms(expected)
    assert module(x[:0], chosen[:0], weights[:0]).shape == (0, HIDDEN)


@needs_loops
def test_experts_whose_code_takes_other_arguments_stay_as_they_are() -> None:
    class OtherExperts(Qwen3MoeExperts):
        def forward(self, rows: Tensor) -> Tensor:  # type: ignore[override]
            return rows

    module = experts_of(Qwen3MoeExperts)
    module.__class__ = OtherExperts
    packed, reason, _ = pack_experts(module)
    assert packed is None
    assert "its code is another one" in reason
    assert not module.down_proj.isnan().any()


@needs_loops
def test_experts_that_compute_something_else_stay_as_they_are() -> None:
    module = experts_of(Qwen3MoeExperts)
    module.act_fn = nn.Dropout(0.5)  # differs from call to call
    packed, reason, _ = pack_experts(module)
    assert packed is None
    assert "off by" in reason
    assert "forward" not in vars(module)
    assert not module.down_proj.isnan().any()


@needs_loops
@pytest.mark.parametrize("difference", [0.0, float("nan")])
def test_a_model_with_experts_is_restored_if_its_logits_change(difference: float) -> None:
    linear = nn.Linear(HIDDEN, HIDDEN).bfloat16().requires_grad_(False)
    model = nn.Sequential(linear, experts_of(Qwen3MoeExperts))
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    calls: list[Any] = []

    def exercise() -> dict[str, Any]:
        x, chosen, routing = routed(5, 2)
        calls.append(None)
        gc.collect()
        # Weights are never in memory twice.
        assert sum(parameter() is not None for parameter in parameters) == (4 if len(calls) == 1 else 1)
        with torch.inference_mode():
            logits = model[1](model[0](x), chosen, routing).float().numpy()
        return {"rows": logits + (difference if len(calls) > 1 else 0.0)}

    progress: list[float] = []
    packing: Packing = pack_linears(model, [], exercise, lambda: 0.05, progress.append)
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    assert len(packing.experts) == (difference == 0.0)
    if difference:
        assert all(torch.equal(model.get_parameter(name), weight) for name, weight in weights.items())


@needs_loops
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "nemotron_h"])
def test_a_served_mixture_with_packed_experts_is_as_near_to_exact_logits_as_the_model(
    model_type: str,
) -> None:
    runtime = load(saved(model_type), "bfloat16")
    packed = [
        module
        for module in runtime._model.modules()
        if isinstance(vars(module).get("forward"), PackedExperts)
    ]
    assert packed
    allocate(runtime)
    sequences = [random_tokens(VOCAB, n, n) for n in (40, 21)]
    own, exact = (
        Dense(saved(model_type), dtype, attention="eager") for dtype in (torch.bfloat16, torch.float32)
    )
    for tokens, logits in zip(sequences, packed_logits(runtime, sequences, STEPS), strict=True):
        expected, theirs = exact.logits(tokens), own.logits(tokens)
        ours_off, theirs_off = (np.sqrt(np.median((got - expected) ** 2)) for got in (logits, theirs))
        assert ours_off <= 1.5 * theirs_off
