"""Declarations of a configuration: as an object in JSON, and as transformers' object of attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rootstock.runtime.model_config import context_limit, eos_token_ids

NESTED = {
    "max_position_embeddings": 1000,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default"},
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 100},
    },
}


@pytest.mark.parametrize("config", [NESTED, SimpleNamespace(**NESTED)], ids=["JSON", "object"])
def test_a_regime_of_one_layer_kind_counts(config: Any) -> None:
    assert context_limit(config) == (100, "longrope<=100")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (1 << 20, "")),
        ({"max_position_embeddings": None}, (1 << 20, "")),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 2.0}}, (512, "")),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "dynamic"}}, (512, "dynamic<=512")),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "longrope"}}, (512, "longrope<=512")),
        (
            {
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "longrope"},
            },
            (64, "longrope<=64"),
        ),
        (
            {
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "su"},
            },
            (64, "longrope<=64"),
        ),
        ({"rope_scaling": "dynamic"}, (1 << 20, "")),
    ],
)
def test_the_context_limit_and_the_regime(config: dict[str, Any], expected: tuple[int, str]) -> None:
    assert context_limit(config) == expected
    assert context_limit(SimpleNamespace(**config)) == expected


def test_a_library_with_fixed_frequencies_has_no_limit_for_them() -> None:
    assert context_limit(NESTED, changing=("dynamic",)) == (1000, "")


@pytest.mark.parametrize("limit", [-1, "4096", True, [512], float("nan"), float("inf"), 1 << 62])
def test_a_limit_that_is_no_number_of_positions(limit: object) -> None:
    with pytest.raises(ValueError, match=r"max_position_embeddings is .*, but must be a number of positions"):
        context_limit({"max_position_embeddings": limit})


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ((), ()),
        ((None, {}), ()),
        (({"eos_token_id": 7}, {"eos_token_id": 2}), (7,)),
        (({"eos_token_id": None}, SimpleNamespace(eos_token_id=[2, 3])), (2, 3)),
        ((SimpleNamespace(eos_token_id=0), {"eos_token_id": 2}), (0,)),
    ],
)
def test_end_of_sequence_tokens_are_those_of_the_first_source(
    sources: tuple[object, ...], expected: tuple[int, ...]
) -> None:
    assert eos_token_ids(*sources) == expected
