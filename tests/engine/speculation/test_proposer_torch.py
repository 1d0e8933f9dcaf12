"""Real models, greedy and sampled, with drafts that are right in part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints import VOCAB, save
from engine.helpers import Client
from engine.speculation.test_proposer import Scripted
from rootstock.cache import KVCache
from rootstock.cache.families import row_bytes
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import ResolvedSampling, StopParams
from rootstock.engine.speculation.proposer import Proposer
from rootstock.runtime.torch.runner import TorchRuntime
from tiers.helpers import Clock
from twins.driving import load, random_tokens

# Plain attention, windows, latents.
MODELS = ["llama", "gemma3_text", "deepseek_v3"]
PROMPTS = [random_tokens(VOCAB, length, seed=length) for length in (40, 9)]
SAMPLINGS = {
    "greedy": ResolvedSampling(temperature=0.0),
    "sampled": ResolvedSampling(temperature=1.0, top_p=0.95, frequency_penalty=0.3, seed=5),
}


def answers(runtime: TorchRuntime, sampling: ResolvedSampling, proposer: Proposer | None) -> list[list[int]]:
    """Of two requests that decode together; time stands still."""
    families = runtime.description.families
    cache = KVCache(families, 60 * sum(row_bytes(family, 8) for family in families), 8)
    runtime.allocate(cache.rows, 8)
    config = EngineConfig(draft_tokens=0 if proposer is None else None)
    engine = Engine(runtime, cache, config, clock=Clock(), proposer=proposer)
    clients = [
        Client(prompt, sampling=sampling, stop=StopParams(max_tokens=24, ignore_eos=True))
        for prompt in PROMPTS
    ]
    for client in clients:
        engine.submit(client.request, client.events.append)
    while engine.step():
        cache.check()
    assert all(client.finished.reason == "length" for client in clients)
    return [client.tokens for client in clients]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("model", MODELS)
def test_a_models_answers_are_the_same_with_drafts_and_without(
    model: str, sampling: str, tmp_path: Path
) -> None:
    path = save(tmp_path, model)
    expected = answers(load(path), SAMPLINGS[sampling], None)
    rng = np.random.default_rng(0)

    def partly_right(generated: list[int]) -> list[int]:
        of = expected[0] if generated == expected[0][: len(generated)] else expected[1]
        draft = of[len(generated) :][: int(rng.integers(0, 9))]
        if draft and rng.random() < 0.5:
            draft[int(rng.integers(len(draft)))] = int(rng.integers(VOCAB))
        return draft

    assert answers(load(path), SAMPLINGS[sampling], Scripted(partly_right)) == expected
