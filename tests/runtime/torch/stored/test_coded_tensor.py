"""Tensors of coded weights: operations give what they give on the unpacked weights, and codes stay codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rootstock.kernels.torch.coded_linear import Rounding, coded
from rootstock.runtime.torch.stored.coded_tensor import CodedTensor

EXPERTS, OUTPUTS, INPUTS = 3, 96, 128
Change = Callable[[Any], Any]


def weight(rounding: Rounding, *shape: int, seed: int = 0) -> CodedTensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    made = coded(numbers.reshape(-1, *shape[-2:]), rounding)
    return CodedTensor(made.rebuilt(part.view(*shape[:-1], -1) for part in made.tensors()), torch.bfloat16)


def plain(given: Any) -> Any:
    if isinstance(given, (tuple, list)):
        return [plain(one) for one in given]
    return given.unpacked() if isinstance(given, CodedTensor) else given


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
        return
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(plain(got), expected)


KEPT: dict[str, Change] = {
    "whole": lambda w: w[...],
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "to the same": lambda w: w.to(torch.bfloat16),
    "to float32 and back": lambda w: w.to(torch.float32).to(torch.bfloat16),
    "contiguous": lambda w: w.contiguous(),
    "cat": lambda w: torch.cat([w, w], -2),
    "cat of experts": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w, w]),
    "stack in between": lambda w: torch.stack([w, w], 1),
    "chunk": lambda w: w.chunk(3, -2),
    "split": lambda w: w.split([10, OUTPUTS - 10], -2),
    "slice": lambda w: w[..., 5:70:3, :],
    "select": lambda w: w[1],
    "select rows": lambda w: w.index_select(-2, torch.tensor([4, 0, 4])),
    "transpose": lambda w: w.transpose(-1, -2),
    "twice transposed": lambda w: w.mT.mT,
    "slice of a transposed": lambda w: w.mT[..., 3:40],
    "cat of transposed": lambda w: torch.cat([w.mT, w.mT], -1),
    "permute": lambda w: w.permute(1, 0, 2),
    "interleaved rows": lambda w: (
        w.view(EXPERTS, 8, 2, 6, INPUTS).transpose(2, 3).reshape(EXPERTS, OUTPUTS, INPUTS)
    ),
    "flat": lambda w: w.reshape(EXPERTS * OUTPUTS, INPUTS),
    "flat, by its last axis": lambda w: w.view(-1, INPUTS),
}

UNPACKED: dict[str, Change] = {
    "product": lambda w: torch.ones(2, INPUTS).bfloat16() @ w.mT,
    "sum": lambda w: w.sum(-1),
    "slice of inputs": lambda w: w[..., 3:],
    "cat of inputs": lambda w: torch.cat([w, w], -1),
    "view across inputs": lambda w: w.reshape(EXPERTS, -1),
    "view of a transposed": lambda w: w.mT.reshape(EXPERTS, -1),
    "permuted inputs": lambda w: w.permute(2, 0, 1),
    "select an input": lambda w: w[..., 3],
    "times two": lambda w: w * 2,
    "in integers": lambda w: w.to(torch.int32),
    "cat with a plain one": lambda w: torch.cat([w, plain(w)]),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("name", [*KEPT, *UNPACKED])
def test_operations_give_what_they_give_on_unpacked_weights(
    name: str, rounding: Rounding, inference: bool
) -> None:
    change = (KEPT | UNPACKED)[name]
    given = weight(rounding, EXPERTS, OUTPUTS, INPUTS)
    with torch.inference_mode(inference):
        got, expected = change(given), change(given.unpacked())
        assert_same(got, expected)
    results = got if isinstance(got, (tuple, list)) else [got]
    assert all(isinstance(one, CodedTensor) == (name in KEPT) for one in results)


@pytest.mark.parametrize("other", ["int8", "float32", "another table"])
def test_weights_that_are_coded_differently_are_joined_unpacked(other: str) -> None:
    one = weight("int4", OUTPUTS, INPUTS)
    two = weight("int8" if other == "int8" else "int4", OUTPUTS, INPUTS, seed=1)
    if other == "float32":
        two = two.to(torch.float32)  # type: ignore[assignment]
    elif other == "another table":
        two = CodedTensor(replace(two.coded, values=two.coded.values * 2), two.dtype)
    joined = torch.cat([one, two])
    assert not isinstance(joined, CodedTensor)
    assert torch.equal(joined, torch.cat([one.unpacked(), two.unpacked()]))


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_modules_compute_with_coded_weights_and_embeddings_read_rows_of_codes(rounding: Rounding) -> None:
    given = weight(rounding, OUTPUTS, INPUTS)
    linear, embedding = nn.Linear(INPUTS, OUTPUTS, bias=False), nn.Embedding(OUTPUTS, INPUTS)
    linear.weight = embedding.weight = nn.Parameter(given, requires_grad=False)
    assert isinstance(linear.weight, CodedTensor)
    x = torch.randn(4, INPUTS).bfloat16()
    ids = torch.tensor([[3, 0], [95, 3]])
    for inference in (False, True):
        with torch.inference_mode(inference):
            expected: Tensor = nn.functional.linear(x.float(), given.coded.widened()).bfloat16()
            assert torch.equal(linear(x), expected)
            assert torch.equal(embedding(ids), given.unpacked()[ids])
