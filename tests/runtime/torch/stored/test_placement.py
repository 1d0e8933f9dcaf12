"""Coded weights on devices: multiplied by Triton as they are stored, or unpacked with a line that says what it takes.

Without a CUDA device, Triton's interpreter multiplies on the CPU. The choice of the kernel, which depends on the
device's name alone, is replaced for that; moves from one device to another are not tested then.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from checkpoints import VOCAB
from lora import linears_of, save_adapter
from rootstock.cache.types import SlotId
from rootstock.kernels.torch.coded_weight import INTEGERS, NORMAL, UNSIGNED, CodedWeight, Numbers, nibbles
from rootstock.runtime.adapter_files import read_adapter
from rootstock.runtime.base import Batch, Segment
from rootstock.runtime.torch import attention_backends, packed_linears
from rootstock.runtime.torch.stored import coded_tensor, placement
from rootstock.runtime.torch.stored.coded_tensor import CodedTensor
from rootstock.runtime.torch.stored.placement import place_coded
from stored_checkpoints import save_quantized
from twins.driving import random_tokens
from twins.torch_models import load, logit_errors

CPU = torch.device("cpu")
OUTPUTS, INPUTS, EXPERTS = 72, 128, 3
needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs Triton's interpreter",
)


def weight(values: Tensor, *shape: int, dtype: torch.dtype = torch.bfloat16) -> CodedTensor:
    random = torch.Generator().manual_seed(len(values))
    codes = torch.randint(0, 16 if len(values) == 16 else 256, shape, generator=random).to(torch.uint8)
    scales = torch.rand(*shape[:-1], shape[-1] // 32, generator=random)
    packed = nibbles(codes) if len(values) == 16 else codes
    return CodedTensor(CodedWeight(packed, values, Numbers(scales), None, 32), dtype)


class Tied(nn.Module):
    """Embedding and head with one weight, a linear layer, and a weight that the model multiplies by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(OUTPUTS, INPUTS)
        self.head = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.embedding.weight = self.head.weight = parameter(weight(NORMAL, OUTPUTS, INPUTS))
        self.linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.linear.weight = parameter(weight(INTEGERS, OUTPUTS, INPUTS))
        self.table = nn.Embedding(OUTPUTS, INPUTS)
        self.table.weight = parameter(weight(UNSIGNED, OUTPUTS, INPUTS))
        self.own = parameter(weight(INTEGERS, OUTPUTS, INPUTS))


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def coded_of(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if isinstance(each, CodedTensor)}


@pytest.fixture
def by_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Triton multiply the codes that are on the CPU. Experts stay in their own code, as on a CUDA device."""
    for module in (coded_tensor, placement, packed_linears):
        monkeypatch.setattr(module, "by_triton", lambda device: True)
    monkeypatch.setattr(packed_linears, "find_experts", lambda model: {})


@needs_interpreter
def test_weights_are_multiplied_as_codes_and_tied_ones_stay_one(
    by_interpreter: None, caplog: pytest.LogCaptureFixture
) -> None:
    from rootstock.kernels.cuda.triton_coded import TritonCodedLayers

    model, before = Tied(), Tied()
    place_coded(model, CPU)
    assert coded_of(model) == {"embedding.weight", "linear.weight", "table.weight"}
    assert model.embedding.weight is model.head.weight
    for linear in (model.head, model.linear):
        assert isinstance(linear.weight, CodedTensor)
        assert isinstance(linear.weight.layers, TritonCodedLayers)
    assert torch.equal(model.own, before.own.unpacked())  # type: ignore[operator]
    x, ids = torch.randn(3, INPUTS).bfloat16(), torch.tensor([[4, 0, 71]])
    for name in ("head", "linear"):
        got, expected = (each.get_submodule(name)(x).float() for each in (model, before))
        assert float((got - expected).norm() / expected.norm()) < 2**-7
    for name in ("embedding", "table"):
        assert torch.equal(model.get_submodule(name)(ids), before.get_submodule(name)(ids))
    assert not caplog.records


@needs_interpreter
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_experts_are_grouped(by_interpreter: None, is_transposed: bool) -> None:
    stored = weight(NORMAL, EXPERTS, OUTPUTS, INPUTS)
    made = stored.looped()
    assert made.layers is not None
    given = made.mT if is_transposed else made
    ends = torch.tensor([0, 5, 9], dtype=torch.int32)
    x = torch.randn(9, INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = nn.functional.grouped_mm(x, given if is_transposed else given.mT, offs=ends).float()
    exact = stored.unpacked(torch.float32)
    expected = torch.cat([x[:5].float() @ exact[1].T, x[5:].float() @ exact[2].T])
    assert float((got - expected).norm() / expected.norm()) < 2**-7
    one: Any = made[2]
    alone = nn.functional.linear(x, one).float()
    assert float((alone - x.float() @ exact[2].T).norm() / (x.float() @ exact[2].T).norm()) < 2**-7


@needs_interpreter
@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_a_kernel_that_fails_its_check_is_not_used(
    how: str, by_interpreter: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rootstock.kernels.cuda.triton_coded import TritonCodedLayers

    right = TritonCodedLayers.multiply

    def multiply(self: TritonCodedLayers, x: Tensor, experts: Tensor | None = None) -> Tensor:
        if how == "raises":
            raise RuntimeError("ptxas fatal: no such target")
        products = right(self, x, experts)
        return products.roll(1, 1) if len(x) > 64 else products  # wrong for many rows alone

    monkeypatch.setattr(TritonCodedLayers, "multiply", multiply)
    model = Tied()
    with caplog.at_level(logging.WARNING):
        place_coded(model, CPU)
    assert coded_of(model) == {"table.weight"}
    assert model.embedding.weight is model.head.weight
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("2 of 3 quantized weights are unpacked for cpu, because its kernel ")
    assert ("computes them wrong" if how == "wrong" else "fails: ptxas fatal: no such target") in line


@pytest.mark.parametrize(
    ("device", "capability", "installed", "reason"),
    [
        ("mps", (0, 0), True, "nothing multiplies codes on mps"),
        ("cuda", (7, 5), True, "its compute capability is below 8.0, which the kernel needs"),
        ("cuda", (9, 0), False, "triton is not installed"),
    ],
)
def test_devices_without_a_kernel_get_unpacked_weights_and_a_line(
    device: str,
    capability: tuple[int, int],
    installed: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        attention_backends.importlib.util, "find_spec", lambda name: object() if installed else None
    )
    model, before = Tied(), Tied()
    with caplog.at_level(logging.WARNING):
        place_coded(model, torch.device(device))
    assert coded_of(model) == set()
    assert model.embedding.weight is model.head.weight
    for name, placed in model.named_parameters():
        assert torch.equal(placed, before.get_parameter(name).unpacked())  # type: ignore[operator]
    # 72 · 128 weights: 3 of 2 bytes; one of a byte and two of half a byte, and 4 scales of 4 bytes an output
    line = (
        f"3 of 3 quantized weights are unpacked for {device}, because {reason}: they take 54.0 KiB instead of"
    )
    assert [record.getMessage() for record in caplog.records] == [f"{line} 21.4 KiB"]


def test_operations_keep_codes_on_their_device() -> None:
    given = weight(NORMAL, OUTPUTS, INPUTS)
    assert isinstance(given.to(CPU), CodedTensor)
    assert isinstance(given.to(CPU, torch.float32), CodedTensor)
    elsewhere = given.to("meta")
    assert not isinstance(elsewhere, CodedTensor)
    assert elsewhere.device.type == "meta"
    assert given.on(torch.device("meta")).device.type == "meta"


@needs_interpreter
@pytest.mark.parametrize(
    ("model_type", "format", "sizes"),
    [
        ("llama", "GPTQ act-order", {"intermediate_size": 192, "num_hidden_layers": 1}),
        ("qwen3_moe", "FP8", {"moe_intermediate_size": 64, "num_hidden_layers": 1}),
    ],
)
def test_models_are_served_by_triton(
    model_type: str, format: str, sizes: dict[str, int], by_interpreter: None, tmp_path: Path
) -> None:
    """A checkpoint is served with its codes, as near to the exact logits as bfloat16 comes, and LoRA on top of it."""
    from rootstock.kernels.cuda.triton_coded import TritonCoded, TritonCodedLayers

    stored, plain = save_quantized(tmp_path, model_type, format, hidden_size=128, **sizes)
    runtime = load(stored, "bfloat16")
    forms = [vars(module).get("forward") for module in runtime._model.modules()]
    linears = [getattr(form, "linear", None) for form in forms]
    assert any(isinstance(linear, TritonCoded) for linear in linears)
    experts = [each for each in runtime._model.parameters() if isinstance(each, CodedTensor)]
    assert len(experts) == (2 if model_type == "qwen3_moe" else 0)
    assert all(isinstance(each.layers, TritonCodedLayers) for each in experts)
    off, own = logit_errors(runtime, plain, VOCAB)
    assert off <= 1.5 * own
    if experts:
        return
    base = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    directory = save_adapter(tmp_path / "lora", base, linears_of(base), size=0.05)
    adapter = runtime.load_adapter(read_adapter("lora", directory))  # compares with merged weights
    assert adapter.batching == "mixed"
    prompt = random_tokens(VOCAB, 9, 3)
    families = len(runtime.description.families)
    tables = [(np.arange(4 * number, 4 * number + 4, dtype=np.int32),) * families for number in range(2)]
    segments = [
        Segment(prompt, 0, table, 1, SlotId(number), name)
        for number, (table, name) in enumerate(zip(tables, ("", adapter.fingerprint), strict=True))
    ]
    without, changed = runtime.forward(Batch(segments))
    assert float(np.abs(changed - without).max()) > 0.05 * float(without.std())
