"""Tiny checkpoints of some architectures through the real loader: in every way of running it, a sequence's logits are
the model's own. `tests/soak/b1_models.py` runs all architectures, and measures more closely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from checkpoints import save
from rootstock.runtime.base import ExecutionMode
from twins import chunkings, ways
from twins.driving import allocate
from twins.reference import Reference
from twins.torch_models import load
from twins.twin import Twin

TOKEN_WISE: ExecutionMode = "packed, token-wise mixers"
SEQUENTIAL: ExecutionMode = "one sequence per forward"


@dataclass(frozen=True)
class Expected:
    families: str
    execution_mode: ExecutionMode = "packed"


FULL = {name: Expected("full") for name in ("llama", "gpt2", "qwen3_moe")}
WINDOWS = {
    "mistral": Expected("window(7)"),
    "gemma2": Expected("full, window(7)"),  # with soft caps
    "gemma3n_text": Expected("full, window(7)"),  # its last layers use the K and V of others
    "gemma4_text": Expected("full, window(7)"),  # so do these; heads of two sizes
    "gpt_oss": Expected("full, window(7)"),  # with sinks
    "llama4_text": Expected("full, chunked(8)"),  # and a temperature that depends on the position
}
CHANGED_ON_THE_WAY = {
    "deepseek_v3": Expected("full"),  # latents
    "deepseek_v32": Expected("full"),  # an indexer chooses positions
    "dots3_note_text": Expected("full, window(7)"),  # indexers, and latents in windows
    "diffllama": Expected("full"),  # heads are split after the cache
    "doge": Expected("full"),  # a bias from the values
}
STATES = {
    "mamba": Expected("state", TOKEN_WISE),
    "mamba2": Expected("state"),
    "jamba": Expected("full, state", TOKEN_WISE),
    "qwen3_next": Expected("full, state"),  # of two kinds in a layer
    "lfm2": Expected("full, state"),  # of convolutions only
    "falcon_h1": Expected("full, state"),  # in the same layer as attention
    "nemotron_h": Expected("full, state"),  # limits the time step
    "zamba2": Expected("full, state"),  # so does this
    "kimi_linear": Expected("full, state"),  # beside latents
    "zaya": Expected("full, window(7), state"),
    "inkling_text": Expected("full, state"),  # on both sides of its own kind of attention
}
ALONE = {
    "bloom": Expected("full", SEQUENTIAL),
    "gpt_neo": Expected("full", SEQUENTIAL),  # with windows inside
}
EXPECTED = FULL | WINDOWS | CHANGED_ON_THE_WAY | STATES | ALONE


def twin_in(directory: Path, model_type: str) -> Twin:
    runtime = load(save(directory, model_type))
    allocate(runtime)
    reference = Reference(model_type, directory)
    return Twin(model_type, runtime, reference.logits, noise=reference.noise_of)


@pytest.fixture(scope="module", params=EXPECTED)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    threads = torch.get_num_threads()
    yield twin_in(tmp_path_factory.mktemp("twin"), request.param)
    torch.set_num_threads(threads)


def test_the_loader_finds_the_families_of_a_model(twin: Twin) -> None:
    expected, described = EXPECTED[twin.model_type], twin.runtime.description
    assert ", ".join(family.name for family in described.families) == expected.families
    assert described.execution_mode == expected.execution_mode
    assert bool(described.mode_reason) == (described.execution_mode != "packed")


@pytest.mark.behaviour(23)
def test_a_prefill_cut_anywhere_gives_the_models_own_logits(twin: Twin) -> None:
    twin.assert_agrees(ways.chunked)


@pytest.mark.behaviour(23)
def test_any_mixture_of_four_sequences_gives_the_models_own_logits(twin: Twin) -> None:
    twin.assert_agrees(ways.batch)


@pytest.mark.behaviour(23)
def test_every_checkpoint_can_be_resumed_repeatedly(twin: Twin) -> None:
    twin.assert_agrees(ways.resumed)


@pytest.mark.behaviour(23)
def test_the_cache_resumes_at_every_checkpoint_that_it_left(twin: Twin) -> None:
    twin.assert_agrees(ways.cached)


@pytest.mark.behaviour(15)
def test_evicted_prefixes_are_computed_again_and_right(twin: Twin) -> None:
    twin.assert_agrees(ways.readmitted)


@pytest.mark.behaviour(23, 48)
def test_requests_that_share_prefixes_are_served_as_if_alone(twin: Twin) -> None:
    twin.assert_agrees(ways.served)


@pytest.mark.behaviour(23)
def test_rows_without_logits_change_nothing(twin: Twin) -> None:
    twin.assert_agrees(ways.unscored)


@pytest.mark.behaviour(23)
def test_rows_that_move_as_bytes_stay_the_same(twin: Twin) -> None:
    twin.assert_agrees(ways.moved)


@pytest.mark.behaviour(23)
def test_chunks_of_every_size_give_the_models_own_logits(twin: Twin) -> None:
    """Cuts lengths so that a remainder of every size occurs, above all of one token."""
    for ran in chunkings.every_chunk(twin.runtime, twin.prompts, (1, 2, 7, 10)):
        twin.assert_right(ran)


@pytest.mark.behaviour(23)
def test_parting_and_repeated_prompts_give_the_models_own_logits(twin: Twin) -> None:
    for ran in chunkings.through_the_cache(twin.runtime, twin.prompts, 19, (1, 12, 18)):
        twin.assert_right(ran)


@pytest.mark.behaviour(23, 48)
@pytest.mark.parametrize("chunk_tokens", [1, 3])
def test_answers_depend_neither_on_chunks_nor_on_the_cache(twin: Twin, chunk_tokens: int) -> None:
    served = chunkings.served(twin.runtime, twin.prompts, (2, 10), chunk_tokens)
    twin.assert_steady(served)


@pytest.mark.behaviour(23, 48)
@pytest.mark.parametrize(
    "twin", ["llama", "gemma2", "qwen3_next", "falcon_h1", "nemotron_h", "zamba2"], indirect=True
)
def test_answers_do_not_depend_on_preemption(twin: Twin) -> None:
    served = chunkings.preempted(twin.runtime, twin.prompts, chunk_tokens=3)
    assert served.preemptions
    twin.assert_steady(served)


@pytest.mark.behaviour(23)
@pytest.mark.parametrize("twin", FULL, indirect=True)
def test_full_attention_resumes_wherever_a_prefix_ends(twin: Twin) -> None:
    for ran in ways.resumed_anywhere(twin.runtime):
        twin.assert_right(ran)
