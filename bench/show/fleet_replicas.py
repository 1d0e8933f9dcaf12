"""Replicas of the fleets in shows: of a torch model, or on the oracle runtime at the speed of a small accelerator.

The oracle's forward sleeps until as much time has passed as a device would need for the batch, so that a machine with
few processors can hold several replicas that wait for their devices. Tokens are those of the tiny model's real
tokenizer. Its answers are whole words only: their text has the tokens that were sampled whichever replica tokenizes
it again, so that an answer does not depend on which one has given the answer before.

    fleet_replicas.py MODEL [REMOTE_URL]    a plain server of the oracle

Each oracle appends a byte per step to a file with the number of its process as name, in the folder `steps` beside
the model: the script that measures sees there which replica works, and which processes are replicas at all.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import numpy as np

from rootstock.bench.tiny_model import DEMO_SPEC
from rootstock.config import (
    CacheConfig,
    Configuration,
    EngineConfig,
    ModelConfig,
    ServerConfig,
    TierConfig,
)
from rootstock.engine.build import Assembly, assemble, build_engine
from rootstock.fleet_config import RemoteConfig
from rootstock.runtime.base import Batch, Logits
from rootstock.server.app import create_app
from rootstock.server.http.listen import listen, serve, url_of
from rootstock.testing.fake_runtime import FULL, FakeRuntime
from rootstock.text.tokenizer import HFTokenizer

PREFILL_TOKENS_PER_S = 4000.0
STEP_S = 0.004
CACHE_TOKENS = 8192
TORCH_BYTES_PER_TOKEN = (
    DEMO_SPEC.layers * 2 * DEMO_SPEC.kv_heads * (DEMO_SPEC.hidden_size // DEMO_SPEC.heads) * 4
)
STEPS = "steps"


class TimedOracle(FakeRuntime):
    """The oracle at a device's speed, which answers in words."""

    def __init__(self, tokenizer: HFTokenizer, steps: Path) -> None:
        super().__init__(DEMO_SPEC.vocab_size, DEMO_SPEC.context_limit)
        self._not_a_word = np.ones(DEMO_SPEC.vocab_size, bool)
        self._not_a_word[words(tokenizer)] = False
        steps.mkdir(exist_ok=True)
        self._steps = (steps / str(os.getpid())).open("ab", buffering=0)

    def forward(self, batch: Batch) -> Logits:
        began = time.perf_counter()
        self._steps.write(b".")
        logits = super().forward(batch)
        logits[:, self._not_a_word] = -1.0  # below all others
        prefilled = sum(len(segment.tokens) for segment in batch.segments if len(segment.tokens) > 1)
        due_s = STEP_S + prefilled / PREFILL_TOKENS_PER_S
        time.sleep(max(0.0, began + due_s - time.perf_counter()))
        return logits


def words(tokenizer: HFTokenizer) -> list[int]:
    """Returns the tokens that are a space and a word, wherever they stand."""
    found = []
    for token in range(DEMO_SPEC.vocab_size):
        text = tokenizer.decode([token])
        if re.fullmatch(r" [a-z]+", text) and tokenizer.encode(text).tolist()[-1:] == [token]:
            found.append(token)
    return found


def configuration(model: Path, runtime: str, remote_url: str | None = None) -> Configuration:
    """`runtime` is oracle or torch."""
    token_bytes = FULL.bytes_per_token if runtime == "oracle" else TORCH_BYTES_PER_TOKEN
    return Configuration(
        ModelConfig(str(model), device="cpu", dtype="float32", threads=1),
        CacheConfig(budget_bytes=CACHE_TOKENS * token_bytes),
        EngineConfig(max_batch=16),
        TierConfig(remote=None if remote_url is None else RemoteConfig.parse(remote_url)),
        ServerConfig(),
    )


def build_torch(asked: Configuration) -> Assembly:
    return build_engine(asked.model, asked.cache, asked.engine, asked.tier)


def build_oracle(asked: Configuration) -> Assembly:
    model = Path(asked.model.model)
    tokenizer = HFTokenizer.load(str(model))
    runtime = TimedOracle(tokenizer, model.parent / STEPS)
    return assemble(runtime, tokenizer, asked.cache, asked.engine, asked.tier)


BUILDS = {"oracle": build_oracle, "torch": build_torch}


def main() -> None:
    model, *remote_url = sys.argv[1:]
    asked = configuration(Path(model), "oracle", *remote_url)
    taken = listen("127.0.0.1", 0)
    made = build_oracle(asked)
    with made.engine:
        serve(
            create_app(made, asked.server), made.engine, taken, lambda: print(">", url_of(taken), flush=True)
        )


if __name__ == "__main__":
    main()
