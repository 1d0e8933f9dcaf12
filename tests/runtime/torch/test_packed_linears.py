"""Packed linear layers: the layers that are packed, those that stay unchanged, and the model's unchanged logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkpoints import VOCAB, save, saved
from rootstock.cache import Namespace
from rootstock.config import QUANTIZATIONS, ModelConfig
from rootstock.errors import InvalidOption
from rootstock.kernels.torch import linear
from rootstock.kernels.torch.linear import Plain, packs_bfloat16, prepare
from rootstock.kernels.torch.quantized_linear import FEW_ROWS, Int4, Int8, _packs_lanes
from rootstock.runtime.base import Logits
from rootstock.runtime.torch import runner
from rootstock.runtime.torch.packed_linears import Packing, pack_linears
from rootstock.runtime.torch.runner import load_model
from rootstock.server.models.model_card import numbers_of, table_of
from runtime.torch.helpers import STEPS
from twins.driving import allocate, packed_logits, random_tokens
from twins.torch_models import Dense, load, loaded

needs_bfloat16_units = pytest.mark.skipif(
    not packs_bfloat16(torch.device("cpu")),
    reason="this processor has no bfloat16 units, so nothing is packed",
)
PACKED = type(prepare(torch.zeros(2, 2, dtype=torch.bfloat16), None))  # format of bfloat16 on this processor
needs_packed_lanes = pytest.mark.skipif(
    not _packs_lanes(), reason="torch packs 4 bits in a different order on this processor: they are refused"
)


class Block(nn.Module):
    """Queries, keys and values from one input; rows of `readers` are multiplied by hand."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.q = nn.Linear(size, 24)
        self.k = nn.Linear(size, 16, bias=False)
        self.v = nn.Linear(size, 16, bias=False)
        self.out = nn.Linear(16, size)
        self.experts = nn.Parameter(torch.randn(2, size, size) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        mixed = q[..., :16] * k.sigmoid() + v
        return self.out(mixed) + x @ self.experts[0] + x @ self.experts[1]


class Tied(nn.Module):
    def __init__(self, block: nn.Module | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.block = block or Block()
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(ids)))


def exercise(model: nn.Module) -> dict[str, Logits]:
    with torch.inference_mode():
        return {
            "rows": model(torch.arange(12)[None]).float().numpy()[0],
            "a row": model(torch.tensor([7])).float().numpy(),
        }


def packed_of(module: nn.Module) -> linear.Linear | None:
    """Returns the packed layer of a linear that is packed on its own; None otherwise."""
    return getattr(vars(module).get("forward"), "linear", None)


def pack(model: nn.Module, groups: Sequence[Sequence[nn.Linear]] = ()) -> Packing:
    return pack_linears(model, groups, lambda: exercise(model), lambda: 0.01, lambda done: None)


def assert_unchanged(after: dict[str, Logits], before: dict[str, Logits]) -> None:
    for kind, rows in before.items():
        np.testing.assert_allclose(after[kind], rows, atol=0.02 * float(rows.std()))


# ------------------------------------------------------------------------------------------------ packed layers


@needs_bfloat16_units
def test_every_plain_linear_is_packed_and_its_own_memory_reads_as_not_a_number() -> None:
    model = Tied()
    before, shapes = exercise(model), {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}
    packing = pack(model)
    assert_unchanged(exercise(model), before)
    assert (packing.packed, packing.kept) == (5, {})
    for layer in (model.block.q, model.block.k, model.block.v, model.block.out, model.head):
        assert isinstance(packed_of(layer), PACKED)
        assert layer.weight.isnan().all()
        assert layer.weight.untyped_storage().nbytes() == layer.weight.element_size(), "one number, expanded"
        assert not layer.weight.requires_grad
    assert {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)} == shapes
    assert sum(parameter.numel() for parameter in model.parameters()) >= sum(
        shape.numel() for shape in set(shapes.values())
    )


@needs_bfloat16_units
def test_a_tied_head_is_packed_and_the_embedding_can_still_be_read() -> None:
    model = Tied()
    embedded = model.embedding.weight.clone()
    pack(model)
    assert isinstance(packed_of(model.head), PACKED)
    assert torch.equal(model.embedding.weight, embedded)


@needs_bfloat16_units
def test_subclasses_hooks_own_forwards_and_raw_experts_are_left_alone() -> None:
    class Mine(nn.Linear):
        pass

    model = Tied()
    model.block.q = Mine(32, 24).to(torch.bfloat16)
    model.block.k.register_forward_hook(lambda module, inputs, output: output * 2)
    model.block.v.forward = lambda x: x[..., :16]  # type: ignore[method-assign]
    experts = model.block.experts.clone()
    before = exercise(model)
    packing = pack(model)
    for after, expected in zip(exercise(model).values(), before.values(), strict=True):
        np.testing.assert_array_equal(after, expected)
    assert packing.packed == 2
    assert packing.kept == dict.fromkeys(("block.k", "block.v"), "it has hooks or its own forward")
    assert torch.equal(model.block.experts, experts)
    assert not model.block.q.weight.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_other_dtypes_stay_unchanged(dtype: torch.dtype) -> None:
    model = Tied(dtype=dtype)
    calls: list[None] = []
    packing = pack_linears(model, [], lambda: calls.append(None) or {}, lambda: 0.0, lambda done: None)  # type: ignore[func-returns-value]
    assert packing.packed == 0
    assert len(packing.kept) == 5
    assert not calls, "there is nothing to try"


@needs_bfloat16_units
def test_linears_that_share_their_weights_share_the_packed_layer() -> None:
    model = Tied()
    model.block.v.weight = model.block.k.weight
    before = exercise(model)
    assert pack(model).packed == 5
    assert packed_of(model.block.v) is packed_of(model.block.k)
    assert_unchanged(exercise(model), before)


# ---------------------------------------------------------------------------------------------- reads of weights


class Reader(Block):
    """Multiplies with the weights of `out` by hand."""

    def __init__(self, read: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.read(self.out, x[..., :16])


@needs_bfloat16_units
@pytest.mark.parametrize(
    "read",
    [
        lambda linear, x: x @ linear.weight.T,
        lambda linear, x: nn.functional.linear(x, linear.weight),
        lambda linear, x: torch.cat([linear.weight, linear.weight])[:32].sum() + 0 * x[..., :1],
        lambda linear, x: nn.functional.linear(x, linear.weight.data),
    ],
)
def test_a_linear_whose_weight_is_read_elsewhere_stays_unchanged(
    read: Callable[[nn.Linear, Tensor], Tensor],
) -> None:
    model = Tied(Reader(read))
    before = exercise(model)
    packing = pack(model)
    assert packing.kept == {"block.out": "its weight is read by other code"}
    assert packing.packed == 4
    assert_unchanged(exercise(model), before)


@needs_bfloat16_units
def test_reading_a_weights_shape_and_dtype_does_not_count() -> None:
    def ask(linear: nn.Linear, x: Tensor) -> Tensor:
        weight = linear.weight
        assert weight.device.type == "cpu"
        assert weight.dim() == 2
        assert weight.size(0) == weight.shape[0] == len(weight)
        return nn.functional.pad(x.to(weight.dtype), (0, 16))

    assert pack(Tied(Reader(ask))).packed == 5


@needs_bfloat16_units
def test_a_model_whose_weights_were_read_unseen_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights read as NaN, so a read that the watch missed shows in the logits."""
    monkeypatch.setattr(
        "rootstock.runtime.torch.packed_linears._SHAPE_ONLY", {"T", "matmul", "__matmul__", "linear"}
    )
    model = Tied(Reader(lambda linear, x: x @ linear.weight.T))
    weights = {name: parameter.clone() for name, parameter in model.named_parameters(remove_duplicate=False)}
    before = exercise(model)
    block = model.block
    packing = pack(model, [[block.q, block.k, block.v]])
    assert packing.packed == 0
    assert set(packing.kept) == {"block.q", "block.k", "block.v", "block.out", "head"}
    assert "the logits differ by inf" in packing.kept["head"]
    assert isinstance(packing.groups[0], Plain)
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in weights.items())
    assert_unchanged(exercise(model), before)


@needs_bfloat16_units
def test_a_packed_product_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(PACKED):  # type: ignore[misc, valid-type]
        def __call__(self, x: Tensor) -> Tensor:
            product: Tensor = super().__call__(x)
            return product * (1.05 if self.out_features == 50 else 1)

    monkeypatch.setattr(linear, PACKED.__name__, Wrong)
    model = Tied()
    before = exercise(model)
    packing = pack(model)
    assert list(packing.kept) == ["head"]
    assert "off by" in packing.kept["head"]
    assert_unchanged(exercise(model), before)


# ------------------------------------------------------------------------------------------------------ groups


@needs_bfloat16_units
def test_a_group_computes_all_members_at_once_and_each_member_gives_its_part() -> None:
    model = Tied()
    block, before = model.block, exercise(model)
    packing = pack(model, [[block.q, block.k, block.v]])
    assert_unchanged(exercise(model), before)
    group = packing.groups[0]
    assert group is not None
    assert (group.in_features, group.out_features) == (32, 56)
    x = torch.randn(3, 32).to(torch.bfloat16)
    assert torch.equal(group(x), torch.cat([block.q(x), block.k(x), block.v(x)], -1))
    assert packed_of(block.q) is None, "it is a member of a group"


@needs_bfloat16_units
def test_members_compute_once_for_one_input_and_again_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    block = model.block
    pack(model, [[block.q, block.k, block.v]])
    calls = 0
    multiply = PACKED.__call__

    def counted(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return multiply(self, x)

    monkeypatch.setattr(PACKED, "__call__", counted)
    x = torch.randn(3, 32).to(torch.bfloat16)
    first = block.q(x), block.k(x), block.v(x)
    assert calls == 1
    x.mul_(2)
    assert not torch.equal(block.q(x), first[0])
    block.q(x)
    block.v(x.clone())
    assert calls == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_groups_are_one_tensor_of_which_members_keep_views(dtype: torch.dtype) -> None:
    model = Tied(dtype=dtype)
    block, before = model.block, exercise(model)
    block.v.register_forward_hook(lambda *given: None)
    packing = pack(model, [[block.q, block.k], [block.v]])
    group = packing.groups[0]
    assert group is not None
    assert packing.groups[1] is None
    x = torch.randn(3, 32).to(dtype)
    torch.testing.assert_close(group(x), torch.cat([block.q(x), block.k(x)], -1))
    if isinstance(group, Plain):
        assert block.k.weight.data_ptr() == group.weight[24:].data_ptr(), (
            "members keep views of the group's tensor"
        )
        assert torch.equal(block.k.weight, group.weight[24:])
    assert_unchanged(exercise(model), before)


# ------------------------------------------------------------------------------------------------- whole models


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[Packing]:
    """Records the packing of each model that is loaded from here on."""
    made: list[Packing] = []

    def spy(*args: Any) -> Packing:
        made.append(pack_linears(*args))
        return made[-1]

    monkeypatch.setattr(runner, "pack_linears", spy)
    return made


@needs_bfloat16_units
@pytest.mark.parametrize(
    ("model_type", "kept"),
    [
        ("llama", set()),
        ("gemma", set()),
        ("qwen3_moe", set()),
        ("qwen3_next", set()),
        ("bloom", set()),
        ("deepseek_v3", {"kv_b_proj"}),  # absorbed
        ("mamba", {"dt_proj"}),  # multiplied by hand
    ],
)
def test_a_loaded_model_is_packed_except_weights_that_its_code_reads(
    packings: list[Packing], model_type: str, kept: set[str]
) -> None:
    load(saved(model_type), "bfloat16")
    assert packings[0].packed > 8
    assert {name.rpartition(".")[2] for name in packings[0].kept} == kept
    assert set(packings[0].kept.values()) <= {"its weight is read by other code"}


@needs_bfloat16_units
def test_a_packed_model_is_as_near_to_exact_logits_as_the_model_itself() -> None:
    runtime = loaded("llama", "bfloat16")
    described = runtime.description
    allocate(runtime)
    sequences = [random_tokens(VOCAB, n, n) for n in (40, 21)]
    own, exact = (
        Dense(saved("llama"), dtype, attention="eager") for dtype in (torch.bfloat16, torch.float32)
    )
    assert described.parameters == sum(parameter.numel() for parameter in own.model.parameters())
    for tokens, logits in zip(sequences, packed_logits(runtime, sequences, STEPS), strict=True):
        expected, theirs = exact.logits(tokens), own.logits(tokens)
        ours_off, theirs_off = (np.sqrt(np.mean((got - expected) ** 2)) for got in (logits, theirs))
        assert ours_off <= 1.2 * theirs_off <= 0.2 * expected.std()


def test_float32_is_not_touched(packings: list[Packing]) -> None:
    runtime = load(saved("llama"))
    assert packings[0].packed == 0
    assert not any(p.isnan().any() for p in runtime._model.parameters())


# ------------------------------------------------------------------------------------------------------ rounded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("quantize", "most"), [("int8", 0.15), pytest.param("int4", 0.8, marks=needs_packed_lanes)]
)
def test_quantized_weights_change_the_logits_within_bounds(
    tmp_path: Path, packings: list[Packing], quantize: str, most: float, dtype: str
) -> None:
    """Weights of the tiny models vary widely, which amplifies every error."""
    save(tmp_path, "llama", num_key_value_heads=4)
    runtime = load(tmp_path, dtype, quantize=quantize)
    assert len(packings[0].rounded) == 3 * 7 + 1
    assert not packings[0].unrounded
    assert max(packings[0].rounded.values()) < 0.12
    allocate(runtime)
    sequences = [random_tokens(VOCAB, n, n) for n in (40, 21)]
    own = Dense(tmp_path, attention="eager")
    for tokens, logits in zip(sequences, packed_logits(runtime, sequences, STEPS), strict=True):
        expected = own.logits(tokens)
        error = float(np.sqrt(np.mean((logits - expected) ** 2))) / float(expected.std())
        assert 0.0 < error <= most


@needs_packed_lanes
def test_the_head_keeps_8_bits_when_the_rest_gets_4() -> None:
    runtime = loaded("llama", quantize="int4")
    model: Any = runtime._model
    assert isinstance(packed_of(model.lm_head), Int8)
    assert isinstance(packed_of(model.model.layers[0].mlp.down_proj), Int4)
    assert model.lm_head.weight.isnan().all()


def test_layers_that_cannot_be_quantized_stay_and_are_logged(
    packings: list[Packing], caplog: pytest.LogCaptureFixture
) -> None:
    load(saved("llama"), quantize="int8")  # of 2 heads of 16: 32 outputs
    assert {name.rpartition(".")[2] for name in packings[0].unrounded} == {"k_proj", "v_proj"}
    assert packings[0].unrounded == packings[0].unrounded | dict.fromkeys(
        packings[0].unrounded, "it has 32 outputs, and fewer than 64 are not quantized"
    )
    said = (
        "6 of 22 linear layers and modules of experts are not int8: model.layers.0.self_attn.k_proj, because"
    )
    assert said in caplog.text


def test_keys_and_values_of_quantized_weights_are_never_shared_with_others() -> None:
    prints = [loaded("llama", quantize=name).description.weights_fingerprint for name in QUANTIZATIONS]
    assert len(set(prints)) == len(QUANTIZATIONS)
    namespaces = {Namespace(name, "float32", "") for name in prints}
    assert len(namespaces) == len(QUANTIZATIONS)


def test_the_description_has_the_format_of_weights() -> None:
    described = loaded("llama", quantize="int4").description
    assert described.quantize == "int4"
    assert dict(table_of(described, 16))["dtype"].startswith("float32 with int4 weights, cache in float32")
    assert numbers_of(described, 16)["quantize"] == "int4"
    assert described.parameters == loaded("llama").description.parameters


def test_a_model_that_gives_nan_with_quantized_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Int8):
        def __call__(self, x: Tensor) -> Tensor:
            probed = len(x) in (4, 4 * FEW_ROWS)  # rows that every linear is tried with
            return super().__call__(x) * (1.0 if probed else torch.nan)

    monkeypatch.setattr("rootstock.kernels.torch.quantized_linear.Int8", Broken)
    with pytest.raises(
        InvalidOption, match="--quantize is 'int8', but must be none: this model computes NaN or infinity"
    ):
        load(saved("llama"), quantize="int8")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantize": "int3"}, "must be none | int8 | int4"),
        ({"quantize": "int8", "dtype": "float16"}, "none with --dtype float16: use bfloat16 or float32"),
    ],
)
def test_impossible_quantization_is_refused_with_the_remedy(fields: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        load_model(ModelConfig("anything", device="cpu", **fields))  # type: ignore[arg-type]
    assert said in refused.value.message


def test_quantization_is_for_cpus() -> None:
    with pytest.raises(InvalidOption, match="none on cuda: weights are quantized on CPUs only"):
        runner._refuse_rounding("int4", torch.device("cuda"), torch.bfloat16)
