"""A5: time of the control plane for a request of 8,192 tokens, with 100 and with 10,000 cached sequences.

match + admit + commit + release, on a pool that is full, so that every request also evicts as many tokens as it adds:

    repeat   the prompt is cached whole
    hit      7,680 tokens are cached, 512 are new
    cold     nothing is cached, 256 blocks are evicted

Before the measurement each pool serves this mix until its first content has been evicted. Evicted nodes and free
blocks are then those of such requests: branches and remainders, not whole prompts side by side. The comparison of
prompts that diverged, which the engine makes between two steps, is timed apart. Both sizes are
measured in turn in every round, so that the machine's drift affects both.
"""

from __future__ import annotations

import gc
import time
from collections import deque

import numpy as np
from common import argument_parser, at_least, at_most, conclude

from rootstock.cache import FullAttention, Namespace
from rootstock.cache.kv_cache import KVCache  # as the engine uses it: without checks of arguments
from rootstock.cache.lease import Admitted, ReleaseReason
from rootstock.cache.types import Tokens

PROMPT = 8192
NEW = 512
BLOCK = 32
MIXED = 12  # requests of a kind in a row
NAMESPACE = Namespace("weights", "bfloat16")
BARS = {"repeat": 90, "hit": 80, "cold": 60}  # million tokens a second
EXPECTED = {"repeat": PROMPT - 1, "hit": PROMPT - NEW, "cold": 0}  # tokens found, or one more


class Cached:
    """Full pool that holds about `sequences` prompts, in the state in which the mix of requests leaves it."""

    def __init__(self, sequences: int, seed: int) -> None:
        self.newest = sequences // 2
        self.rng = np.random.default_rng(seed)
        blocks = sequences * (PROMPT // BLOCK)
        self.cache = KVCache([FullAttention(1, 2)], blocks * BLOCK * 2, BLOCK)
        self.prompts: deque[Tokens] = deque(maxlen=self.newest)
        self.after_s: deque[float] = deque(maxlen=1000)
        for _ in range(sequences):
            self.request(self.pick("cold"))
        for _ in range(-(-sequences // MIXED)):  # as many cold prompts as there is room for
            for kind in EXPECTED:
                for _ in range(MIXED):
                    self.request(self.pick(kind))

    def new_prompt(self) -> Tokens:
        return self.rng.integers(0, 128_000, PROMPT).astype(np.int32)

    def pick(self, kind: str) -> Tokens:
        """Picks from the newest prompts: eviction takes the oldest."""
        if kind == "cold":
            self.prompts.append(self.new_prompt())
            return self.prompts[-1]
        old = self.prompts[int(self.rng.integers(len(self.prompts)))]
        if kind == "repeat":
            return old
        fresh = self.rng.integers(0, 128_000, NEW).astype(np.int32)
        return np.concatenate((old[: PROMPT - NEW], fresh))

    def request(self, prompt: Tokens) -> tuple[float, int]:
        """Serves a prompt. Returns the seconds and the cached tokens."""
        began = time.perf_counter()
        match = self.cache.match(prompt, NAMESPACE)
        admitted = self.cache.admit(match)
        assert isinstance(admitted, Admitted)
        lease = admitted.lease
        self.cache.commit(lease, prompt[lease.num_computed_tokens :])
        self.cache.release(lease, ReleaseReason.FINISHED)
        ended = time.perf_counter()
        self.cache.compare_diverged()
        self.after_s.append(time.perf_counter() - ended)
        return ended - began, lease.hit_tokens


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    sizes = {100: Cached(100, 1), 10_000: Cached(10_000, 2)}
    for cached in sizes.values():
        cached.cache.check()
    figures: dict[str, object] = {}
    times: dict[tuple[str, int], list[float]] = {}
    ratios: dict[str, list[float]] = {}
    gc.collect()
    gc.disable()  # a collection would walk the benchmark's own arrays
    for _ in range(args.rounds):
        for kind, found in EXPECTED.items():
            medians = {}
            for size, cached in sizes.items():
                taken = []
                for _ in range(MIXED):
                    seconds, hit = cached.request(cached.pick(kind))
                    assert found <= hit <= found + 1, (kind, hit)
                    taken.append(seconds)
                times.setdefault((kind, size), []).extend(taken)
                medians[size] = float(np.median(taken))
            ratios.setdefault(kind, []).append(medians[10_000] / medians[100])
    gc.enable()
    for cached in sizes.values():
        cached.cache.check()
    print(f"{'':8}{'cached':>8}{'median µs':>12}{'p95 µs':>10}{'million tokens/s':>18}")
    for (kind, size), taken in times.items():
        median, p95 = np.median(taken) * 1e6, np.percentile(taken, 95) * 1e6
        print(f"{kind:8}{size:8}{median:12.1f}{p95:10.1f}{PROMPT / median:18.1f}")
        figures[f"{kind}_{size}_us"] = round(float(median), 1)
        figures[f"{kind}_{size}_million_tokens_per_s"] = round(PROMPT / float(median), 1)
    after = float(np.median([seconds for each in sizes.values() for seconds in each.after_s])) * 1e6
    print(f"comparison with siblings, between two steps: {after:.1f} µs")
    figures["after_us"] = round(after, 1)
    for kind, values in ratios.items():
        figures[f"{kind}_ratio"] = round(float(np.median(values)), 3)
    conclude(
        "A5",
        figures,
        {f"{kind}_ratio": at_most(1.3) for kind in EXPECTED}
        | {f"{kind}_10000_million_tokens_per_s": at_least(bar) for kind, bar in BARS.items()},
    )


if __name__ == "__main__":
    main()
