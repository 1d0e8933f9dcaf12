"""Workloads are pure functions of a seed."""

from __future__ import annotations

import numpy as np
import pytest

from rootstock.bench.workloads import (
    ALPHABET,
    SIZES,
    Sizes,
    as_text,
    make_workload,
)
from rootstock.errors import InvalidOption


@pytest.mark.parametrize("name", SIZES)
def test_one_seed_makes_one_workload_and_another_seed_another(name: str) -> None:
    first, again, other = make_workload(name, 3), make_workload(name, 3), make_workload(name, 4)
    assert _flat(first) == _flat(again)
    assert _flat(first) != _flat(other)


@pytest.mark.parametrize("name", SIZES)
def test_a_workload_has_the_sizes_that_it_was_asked_for(name: str) -> None:
    sizes = Sizes(3, 2, turns=4, prefix_tokens=20, new_tokens=(2, 5), answer_tokens=7)
    workload = make_workload(name, 0, sizes)
    assert workload.requests == 12
    for conversation in workload.conversations:
        assert len(conversation.prefix) == 20
        assert len(conversation.turns) == 4
        assert all(2 <= len(turn.new) <= 5 and turn.answer_tokens == 7 for turn in conversation.turns)


def test_all_conversations_begin_with_one_prefix_and_go_on_differently() -> None:
    first, second, *_ = make_workload("agents").conversations
    assert np.array_equal(first.prefix, second.prefix)
    assert not np.array_equal(first.turns[0].new[:8], second.turns[0].new[:8])


def test_scaling_makes_prompts_longer_and_leaves_the_number_of_requests() -> None:
    scaled = SIZES["agents"].scaled(2.0)
    assert scaled.prefix_tokens == 2 * SIZES["agents"].prefix_tokens
    assert scaled.conversations == SIZES["agents"].conversations
    assert SIZES["agents"].scaled(0.0001).new_tokens == (1, 1)


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidOption, match=r"agents \| chat \| fewshot \| burst"):
        make_workload("nope")


def test_different_symbols_are_different_words() -> None:
    assert len(set(as_text(np.arange(ALPHABET, dtype=np.int32)).split())) == ALPHABET


def _flat(workload: object) -> list[list[int]]:
    conversations = workload.conversations  # type: ignore[attr-defined]
    return [turn.new.tolist() for each in conversations for turn in each.turns] + [
        each.prefix.tolist() for each in conversations
    ]
