"""Real models, greedy and sampled, with partly right drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints import VOCAB, save
from engine.helpers import Bench
from engine.speculation.test_proposer import Scripted
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import StopParams
from rootstock.engine.speculation.proposer import Proposer
from tiers.helpers import Clock
from twins.driving import random_tokens
from twins.torch_models import load

# Plain attention, windows, latents.
MODELS = ["llama", "gemma3_text", "deepseek_v3"]
PROMPTS = [random_tokens(VOCAB, length, seed=length) for length in (40, 9)]
SAMPLINGS = {
    "greedy": ResolvedSampling(temperature=0.0),
    "sampled": ResolvedSampling(temperature=1.0, top_p=0.95, frequency_penalty=0.3, seed=5),
}


def answers(model: Path, sampling: ResolvedSampling, proposer: Proposer | None) -> list[list[int]]:
    """Answers two requests that decode together. Time stands still."""
    drafts = {"draft_tokens": 0 if proposer is None else None}
    bench = Bench(60, 8, runtime=load(model), clock=Clock(), proposer=proposer, **drafts)
    stop = StopParams(max_tokens=24, ignore_eos=True)
    clients = [bench.ask(prompt, sampling=sampling, stop=stop) for prompt in PROMPTS]
    bench.run()
    assert all(client.finished.reason == "length" for client in clients)
    return [client.tokens for client in clients]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("model", MODELS)
def test_drafts_change_no_answer_of_a_model(model: str, sampling: str, tmp_path: Path) -> None:
    path = save(tmp_path, model)
    expected = answers(path, SAMPLINGS[sampling], None)
    rng = np.random.default_rng(0)

    def partly_right(generated: list[int]) -> list[int]:
        of = expected[0] if generated == expected[0][: len(generated)] else expected[1]
        draft = of[len(generated) :][: int(rng.integers(0, 9))]
        if draft and rng.random() < 0.5:
            draft[int(rng.integers(len(draft)))] = int(rng.integers(VOCAB))
        return draft

    assert answers(path, SAMPLINGS[sampling], Scripted(partly_right)) == expected
