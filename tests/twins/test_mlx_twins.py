"""Small mlx-lm models through the real loader. However a sequence is run, it has the logits of mlx-lm with its own
cache. `bench/show/i1_mlx_models.py` serves all architectures."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_by_mlx_lm
from numpy.typing import NDArray

from rootstock.cache.types import Tokens
from rootstock.runtime.base import ExecutionMode
from rootstock.runtime.mlx.self_check import own_logits
from twins import chunkings, mlx_models, ways
from twins.driving import allocate
from twins.mlx_served import load, names_of
from twins.twin import TOLERANCE, Twin

EXPECTED: dict[str, tuple[str, ExecutionMode]] = {
    "llama": ("full", "batched"),
    "gemma3_text": ("full, window(7)", "batched"),
    "gpt_oss": ("full, window(7)", "batched"),  # with sinks
    "qwen3_next": ("full, state", "batched"),  # of two kinds in a layer
    "mamba2": ("state", "batched"),
    "nemotron_h": ("full, state", "batched"),
    "deepseek_v3": ("full", "batched, gathered K and V"),  # latents
    "gemma2": ("full", "batched, gathered K and V"),  # with its query heads grouped
    "llama4": ("full, chunked(8)", "one sequence per forward"),
}


def twin_in(directory: Path, name: str, tolerance: float = TOLERANCE, **options: Any) -> Twin:
    runtime = load(mlx_models.save(directory, name), **options)
    allocate(runtime)
    own, _ = load_by_mlx_lm(directory)

    @functools.cache
    def logits_of(tokens: bytes) -> NDArray[np.float32]:
        return own_logits(own, np.frombuffer(tokens, np.int32))

    return Twin(name, runtime, lambda tokens: logits_of(tokens.tobytes()), tolerance)


@pytest.fixture(scope="module", params=EXPECTED)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    mx.disable_compile()  # on a CPU it calls a C++ compiler for each function
    yield twin_in(tmp_path_factory.mktemp("twin"), request.param)
    mx.enable_compile()


def test_the_loader_finds_the_families_of_a_model(twin: Twin) -> None:
    described = twin.runtime.description
    assert (names_of(described), described.execution_mode) == EXPECTED[twin.model_type]


@pytest.mark.behaviour(23, 48)
@pytest.mark.parametrize("way", [*ways.WAYS.values(), ways.unscored, ways.moved])
def test_every_way_gives_the_models_own_logits(twin: Twin, way: ways.Way) -> None:
    twin.assert_agrees(way)


@pytest.mark.behaviour(23)
def test_chunks_of_every_size_give_the_models_own_logits(twin: Twin) -> None:
    for ran in chunkings.every_chunk(twin.runtime, twin.prompts, (1, 2, 7, 10)):
        twin.assert_right(ran)


@pytest.mark.behaviour(23)
def test_parting_and_repeated_prompts_give_the_models_own_logits(twin: Twin) -> None:
    for ran in chunkings.through_the_cache(twin.runtime, twin.prompts, 19, (1, 12, 18)):
        twin.assert_right(ran)


@pytest.mark.behaviour(23, 48)
@pytest.mark.parametrize("chunk_tokens", [1, 3])
def test_answers_depend_neither_on_chunks_nor_on_the_cache(twin: Twin, chunk_tokens: int) -> None:
    twin.assert_steady(chunkings.served(twin.runtime, twin.prompts, (2, 10), chunk_tokens))


@pytest.mark.behaviour(23, 48)
@pytest.mark.parametrize("twin", ["llama", "gemma3_text", "qwen3_next", "nemotron_h"], indirect=True)
def test_answers_do_not_depend_on_preemption(twin: Twin) -> None:
    served = chunkings.preempted(twin.runtime, twin.prompts, chunk_tokens=3)
    assert served.preemptions
    twin.assert_steady(served)


@pytest.mark.behaviour(23)
@pytest.mark.parametrize("twin", ["llama", "deepseek_v3"], indirect=True)
def test_full_attention_resumes_wherever_a_prefix_ends(twin: Twin) -> None:
    for ran in ways.resumed_anywhere(twin.runtime):
        twin.assert_right(ran)


@pytest.mark.behaviour(23)
@pytest.mark.parametrize("twin", ["llama", "gemma3_text", "qwen3_next"], indirect=True)
def test_rows_in_int8_do_not_depend_on_how_a_sequence_is_run(twin: Twin, tmp_path: Path) -> None:
    """Attention reads the rounded rows in each case, those of its own chunk, too."""
    directory = mlx_models.save(tmp_path, twin.model_type)
    runtime, apart = (load(directory, kv_dtype="int8") for _ in range(2))
    allocate(runtime)
    allocate(apart)

    def in_one_pass(tokens: Tokens) -> NDArray[np.float32]:
        (ran,) = ways.whole(apart, [tokens])
        return ran.logits

    rounded = Twin(twin.model_type, runtime, in_one_pass)
    for way in (ways.chunked, ways.batch, ways.moved, ways.cached):
        rounded.assert_agrees(way)
    with pytest.raises(AssertionError, match="differs by"):
        Twin(twin.model_type, runtime, twin.logits).assert_agrees(ways.whole)
