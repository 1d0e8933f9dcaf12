"""J7: prompt tokens of agents that are found inside blocks, where a cache of whole blocks finds none.

The turns of agents go through the cache without a model, with each size of block. Beside it runs a cache of whole
blocks, made of nothing but the set of all prefixes that end with a block. Both keep everything. The cache's own
counter must be exactly the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from common import argument_parser, at_least, conclude, exactly

from engine_target import as_tokens
from rootstock.bench.workloads import make_workload
from rootstock.cache import Admitted, Deferred, FullAttention, KVCache, Namespace, ReleaseReason

SHOW = "J7"
BLOCK_SIZES = (16, 32, 64, 128)
VOCAB = 32_000
TOKENS = 1 << 20  # that the cache has room for: nothing is evicted
NAMESPACE = Namespace("agents", "float32")


@dataclass
class WholeBlocks:
    """A cache that finds whole blocks only."""

    size: int
    prefixes: set[bytes] = field(default_factory=set)

    def hit(self, tokens: np.ndarray) -> int:
        """Returns the length of the longest known prefix. The last token is always computed."""
        found = 0
        while found + self.size < len(tokens) and tokens[: found + self.size].tobytes() in self.prefixes:
            found += self.size
        return found

    def add(self, tokens: np.ndarray) -> None:
        for end in range(self.size, len(tokens) + 1, self.size):
            self.prefixes.add(tokens[:end].tobytes())


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    seeds = options.parse_args().seeds
    figures: dict[str, object] = {}
    wrong, saved_at_16 = 0, 0.0
    for size in BLOCK_SIZES:
        asked = hit = whole = counted = requests = 0
        for seed in range(seeds):
            found = run(size, seed)
            asked, hit, whole = asked + found[0], hit + found[1], whole + found[2]
            counted, requests = counted + found[3], requests + found[4]
        wrong += counted != hit - whole
        missed_by_blocks = asked - whole
        saved = (hit - whole) / missed_by_blocks
        saved_at_16 = saved if size == 16 else saved_at_16
        figures[f"blocks_of_{size}"] = {
            "requests": requests,
            "asked": asked,
            "hit": hit,
            "hit_by_whole_blocks": whole,
            "inside_blocks": counted,
            "inside_blocks_per_request": round(counted / requests, 1),
            "share_of_what_whole_blocks_compute": round(saved, 4),
        }
        print(f"blocks of {size}: {figures[f'blocks_of_{size}']}", flush=True)
    figures |= {"wrong_counters": wrong, "saved_at_16": round(saved_at_16, 4)}
    conclude(SHOW, figures, {"wrong_counters": exactly(0), "saved_at_16": at_least(0.01)})


def run(size: int, seed: int) -> tuple[int, int, int, int, int]:
    """Runs the agents of one seed, turn by turn. Returns the tokens asked, hit, hit by whole blocks, counted inside
    blocks, and the number of requests."""
    workload = make_workload("agents", seed)
    cache = KVCache([FullAttention(1, 1)], TOKENS, size)
    whole = WholeBlocks(size)
    rng = np.random.default_rng(seed)
    histories = [as_tokens(one.prefix, VOCAB) for one in workload.conversations]
    whole_hits = requests = 0
    for turn in range(workload.sizes.turns):
        for number, conversation in enumerate(workload.conversations):
            said = conversation.turns[turn]
            prompt = np.concatenate([histories[number], as_tokens(said.new, VOCAB)]).astype(np.int32)
            answer = rng.integers(0, VOCAB, said.answer_tokens, np.int32)
            whole_hits += whole.hit(prompt)
            sequence = answered(cache, prompt, answer)
            whole.add(sequence)
            histories[number] = np.concatenate([prompt, answer])
            requests += 1
    stats = cache.stats()
    return stats.asked_tokens, stats.hit_tokens, whole_hits, stats.inside_block_tokens, requests


def answered(cache: KVCache, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Lets one request go through its cycle. Returns the tokens that were computed: the last one of an answer never
    is."""
    admitted = cache.admit(cache.match(prompt, NAMESPACE))
    assert isinstance(admitted, Admitted)
    lease = admitted.lease
    rest = [prompt[lease.num_computed_tokens :], *answer[:-1, None]]
    for tokens in rest:
        assert not isinstance(cache.extend(lease, len(tokens)), Deferred)
        cache.commit(lease, tokens)
    cache.release(lease, ReleaseReason.FINISHED)
    return np.concatenate([prompt, answer[:-1]])


if __name__ == "__main__":
    main()
