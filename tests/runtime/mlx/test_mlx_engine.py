"""The engine on the MLX runtime for a few hundred steps: no pool is copied, memory is flat, and failures end cleanly.

`make show ID=I4` runs the same for 10,000 steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_checkpoints import save_mlx_checkpoint
from rootstock.units import KIB
from twins.mlx_decodes import Decodes, fail, wrong_after_exception, wrong_after_loss

LAYERS = {"llama": 3, "gemma3_text": 2, "qwen3_next": 2}


@pytest.fixture(params=LAYERS)
def decodes(request: pytest.FixtureRequest, tmp_path: Path) -> Decodes:
    config = {"num_hidden_layers": LAYERS[request.param]}
    return Decodes(save_mlx_checkpoint(tmp_path, request.param, config=config), 1 << 20)


def test_decodes_copy_no_pool_and_their_memory_is_flat(decodes: Decodes) -> None:
    decodes.decode(40, 20, 60, collect_garbage=True)
    before = decodes.memory()
    decodes.decode(100, 20, 60, collect_garbage=False)
    # MLX may give an array the buffer of another that is up to 16 KiB larger.
    assert decodes.memory().active_bytes <= before.active_bytes + 16 * KIB
    assert decodes.pool_copies == 0
    assert all(asked.finished for asked in decodes.asked)
    assert decodes.other_answers(decodes.asked) == 0


@pytest.mark.behaviour(47)
@pytest.mark.parametrize("in_prefill", [False, True], ids=["decode", "prefill"])
def test_a_failed_evaluation_fails_every_open_request_once_and_begins_the_cache_anew(
    decodes: Decodes, in_prefill: bool
) -> None:
    assert wrong_after_loss(fail(decodes, "evaluation", 8, in_prefill=in_prefill)) == []


@pytest.mark.behaviour(47)
@pytest.mark.parametrize("in_prefill", [False, True], ids=["decode", "prefill"])
def test_an_exception_of_the_models_code_fails_its_step_and_keeps_the_cache(
    decodes: Decodes, in_prefill: bool
) -> None:
    assert wrong_after_exception(fail(decodes, "graph", 8, in_prefill=in_prefill)) == []
