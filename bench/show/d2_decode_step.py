"""D2: a whole decode step of a 600M Llama in bfloat16 against dense batched `transformers.generate`.

B sequences of 512 or 4,096 tokens, nothing shared. Ours are steps of a real engine (schedule, plans, forward,
sampling, publishing) in which all B decode, through blocks that are scattered over the pool; theirs are the times
between two calls of a logits processor inside one `generate` that was handed a filled DynamicCache. How rounds count:
rounds.py.

Contexts are filled, not computed, on both sides alike: with the K and V of 512 computed positions, again and again.
Ours go to blocks that were scattered at random (our_side.py).

The limit is the time to read the weights of all linear layers and the K and V of every context once, at the bandwidth
of a plain sum over 1 GiB: the best of many measurements between the rounds. Like the ratios, it is a share of the
dense step's time.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import at_most, conclude
from dense_side import Clock, Dense
from llamas import random_prompts, save_model, say
from neighbours import Neighbours
from our_side import Ours
from rounds import ANYHOW, QUIET, Rounds, comparison_options, in_turn, parse_comparison

from rootstock.runtime.host_memory import free_host_bytes

SHOW = "D2"
MODEL = "600m"
CONTEXTS = (512, 4096)
BATCHES = (1, 4, 8, 16)
COMPUTED_TOKENS = 512  # with which contexts are filled
STEPS = {512: 12, 4096: 5}  # of each round
ROUNDS = (3, 7)  # least and most
SECONDS = 40.0  # of one batch and context, after which no round begins that is not required
ROOM_BYTES = 2**30  # left to other processes
READ_BYTES = 2**30  # far beyond the caches
BAR = {512: 0.75, 4096: 0.5}
GOAL = {512: 0.55, 4096: 0.32}
SMALLEST_BARRED_BATCH = {512: 1, 4096: 8}


def main() -> None:
    options = comparison_options(__doc__, MODEL)
    options.add_argument("--batches", default=",".join(map(str, BATCHES)), help="comma-separated")
    options.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="comma-separated")
    given, (least, most), figures = parse_comparison(options, ROUNDS)
    batches = [int(batch) for batch in given.batches.split(",")]
    contexts = [int(context) for context in given.contexts.split(",")]
    bandwidth = ReadBandwidth()
    bandwidth.measure()
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = save_model(given.model, Path(folder))
        clock = time.thread_time if given.cpu_time else time.perf_counter
        sides = Sides(path, max(batches) * (max(contexts) + 256), clock)
        quiet = ANYHOW if given.cpu_time else QUIET
        figures["parameters"] = sides.ours.parameters
        measured: dict[tuple[int, int], Rounds] = {}
        for context in contexts:
            prompts = random_prompts(max(batches), context)
            sides.ours.fill(prompts, sides.computed)
            for batch in batches:
                needed = sides.dense_bytes(batch, context) + ROOM_BYTES
                if needed > free_host_bytes():
                    say(
                        f"B={batch}, {context}: {needed / 2**30:.1f} GiB of memory needed, which are not free"
                    )
                    continue
                rounds = sides.compare(prompts[:batch], STEPS[context], (least, most), quiet, bandwidth)
                measured[batch, context] = rounds
    for (batch, context), rounds in measured.items():
        limit_ms = sides.read_bytes(batch, context) / bandwidth.best_gb_per_s / 1e6
        figures |= rounds.figures(f"b{batch}_{context}")
        figures |= {
            f"limit_ms_b{batch}_{context}": round(limit_ms, 2),
            f"limit_b{batch}_{context}": round(limit_ms / rounds.dense_ms, 4),
            f"at_goal_b{batch}_{context}": rounds.ratio <= GOAL.get(context, 0),
        }
    figures["read_gb_per_s"] = round(bandwidth.best_gb_per_s, 2)
    figures["read_gb_per_s_median"] = round(statistics.median(bandwidth.gb_per_s), 2)
    figures["others_share"] = neighbours.share()
    conclude(
        SHOW,
        figures,
        {
            f"ratio_b{batch}_{context}": at_most(BAR.get(context, 1.0))
            for context in contexts
            for batch in batches
            if batch >= SMALLEST_BARRED_BATCH.get(context, 1)
        },
    )


class Sides:
    def __init__(self, path: Path, pool_tokens: int, clock: Clock) -> None:
        self.dense = Dense(path, torch.bfloat16, clock)
        config = self.dense.config
        self.kv_bytes_per_token = (
            2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        )
        self.ours = Ours(path, "bfloat16", gib=pool_tokens * self.kv_bytes_per_token / 2**30, clock=clock)
        self.computed = random_prompts(1, COMPUTED_TOKENS, seed=1)[0]
        self.dense.keep(self.computed)
        # Of the embeddings a step reads a row for each sequence. Tied ones are read as the head.
        embeddings = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        self._weights_bytes = 2 * (self.ours.parameters - embeddings)

    def dense_bytes(self, batch: int, context: int) -> int:
        """Returns the bytes of the dense side beyond its weights: all K and V, and once more those of a layer or
        two."""
        return int(1.1 * batch * context * self.kv_bytes_per_token)

    def read_bytes(self, batch: int, context: int) -> int:
        """Returns the bytes that a step must read."""
        return self._weights_bytes + batch * context * self.kv_bytes_per_token

    def compare(
        self,
        prompts: np.ndarray,
        steps: int,
        rounds: tuple[int, int],
        quiet: float,
        bandwidth: ReadBandwidth,
    ) -> Rounds:
        batch, context = prompts.shape

        def ours_s() -> float:
            return self.ours.decode_step_s(prompts, steps)

        def dense_s() -> float:
            gc.collect()
            return self.dense.decode_step_s(prompts, steps)

        # First uses allocate.
        self.ours.decode_step_s(prompts, 2)
        self.dense.decode_step_s(prompts, 1)
        return in_turn(f"B={batch}, {context}", ours_s, dense_s, rounds, SECONDS, quiet, bandwidth.measure)


class ReadBandwidth:
    """Read bandwidth, measured many times during a script, because other users of the machine change it.

    The best counts: a limit must not be surpassed.
    """

    def __init__(self) -> None:
        self._memory = torch.ones(READ_BYTES // 4, dtype=torch.float32)
        self._memory.sum()
        self.gb_per_s: list[float] = []

    def measure(self) -> float:
        """Measures, keeps and returns the current GB/s."""
        began = time.perf_counter()
        self._memory.sum()
        self.gb_per_s.append(READ_BYTES / 1e9 / (time.perf_counter() - began))
        return self.gb_per_s[-1]

    @property
    def best_gb_per_s(self) -> float:
        return max(self.gb_per_s)


if __name__ == "__main__":
    main()
