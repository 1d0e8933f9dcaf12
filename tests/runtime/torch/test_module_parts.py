"""Modules that run by parts of a packed step: their arguments, and the rows of their results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from rootstock.runtime.torch.inspect.mask_pattern import MaskPattern
from rootstock.runtime.torch.module_parts import PartByPart, PartCache, StepCache, StepPart


class Kept(PartCache):
    def __init__(self) -> None:
        super().__init__()
        self.kept = 0

    def keep(self) -> None:
        self.kept += 1


class Step(StepCache):
    """Step of five rows: two sequences with two new tokens each, and one with one."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = [Kept(), Kept(), Kept()]

    def groups(self) -> Iterator[StepPart]:
        yield StepPart(torch.tensor([[0, 1], [3, 4]]), self.caches[0], -1)
        yield StepPart(torch.tensor([[2]]), self.caches[1], -1)

    def sequences(self) -> Iterator[StepPart]:
        for rows, past, cache in zip(([0, 1], [2], [3, 4]), (0, 3, 2), self.caches, strict=True):
            yield StepPart(torch.tensor([rows]), cache, past)


class Echo(nn.Module):
    """Module that returns its rows times ten, and None as attention weights; it records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        self.given.append({"hidden_states": hidden_states, **given})
        return hidden_states * 10, None


ROWS = torch.arange(5.0).view(1, 5, 1)


def by_parts(*, alone: bool) -> Echo:
    module = Echo()
    module.forward = PartByPart(module, alone=alone)  # type: ignore[assignment]
    return module


def test_rows_go_to_their_part_and_results_back_to_their_rows() -> None:
    module, step = by_parts(alone=False), Step()
    out, weights = module(ROWS, cache_params=step)
    assert out.flatten().tolist() == [0, 10, 20, 30, 40]
    assert weights is None
    assert [call["hidden_states"].squeeze(-1).tolist() for call in module.given] == [[[0, 1], [3, 4]], [[2]]]
    assert [call["cache_params"] for call in module.given] == step.caches[:2]
    assert [cache.kept for cache in step.caches] == [1, 1, 0]


def test_arguments_with_rows_are_divided_and_all_others_stay() -> None:
    module = by_parts(alone=False)
    other = torch.ones(5, 7)
    module(
        ROWS,
        position_embeddings=(ROWS + 0.5, ROWS - 0.5),
        position_ids=torch.arange(5)[None],
        other=other,
        cache_params=Step(),
    )
    last = module.given[-1]
    assert [tensor.tolist() for tensor in last["position_embeddings"]] == [[[[2.5]]], [[[1.5]]]]
    assert last["position_ids"].tolist() == [[2]]
    assert last["other"] is other


def test_a_module_that_runs_alone_gets_real_masks() -> None:
    module, mask = by_parts(alone=True), MaskPattern(causal_mask_function, None)
    module(ROWS, attention_mask=mask, past_key_values=Step())
    seen = [call["attention_mask"][0, 0].int().tolist() for call in module.given]
    assert seen == [[[1, 0], [1, 1]], [[1, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]]


def test_a_module_that_runs_in_groups_gets_mask_patterns() -> None:
    module, mask = by_parts(alone=False), MaskPattern(causal_mask_function, None)
    module(ROWS, attention_mask=mask, past_key_values=Step())
    assert all(call["attention_mask"] is mask for call in module.given)


def test_without_a_packed_step_the_module_is_called_directly() -> None:
    module = by_parts(alone=True)
    mask = object()
    module(ROWS, attention_mask=mask, past_key_values=None)
    assert len(module.given) == 1
    assert module.given[0]["hidden_states"] is ROWS
    assert module.given[0]["attention_mask"] is mask


class Choosing(nn.Module):
    """Indexer: chooses positions for each row, as many as its sequence has, at most three."""

    def forward(self, hidden_states: Tensor, past_key_values: Any = None) -> tuple[Tensor, Tensor]:
        new = hidden_states.shape[1]
        return hidden_states, torch.arange(min(3, new + 1)).expand(1, new, -1)


def test_an_indexers_positions_are_filled_up_by_repeating_them() -> None:
    module = Choosing()
    module.forward = PartByPart(module, alone=True)  # type: ignore[method-assign]
    _, chosen = module(ROWS, past_key_values=Step())
    assert chosen.shape == (1, 5, 3)
    assert [sorted(set(row)) for row in chosen[0].tolist()] == [
        [0, 1, 2],
        [0, 1, 2],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2],
    ]


class Weighing(nn.Module):
    """Module that also returns attention weights, of as many heads as the first part has new tokens."""

    def forward(self, hidden_states: Tensor, past_key_values: Any = None) -> tuple[Tensor, Tensor]:
        sequences, new = hidden_states.shape[:2]
        return hidden_states, torch.ones(sequences, 2, new, new)


def test_attention_weights_are_not_mistaken_for_rows() -> None:
    module = Weighing()
    module.forward = PartByPart(module, alone=True)  # type: ignore[method-assign]
    rows, weights = module(ROWS, past_key_values=Step())
    assert rows.tolist() == ROWS.tolist()
    assert weights is None
