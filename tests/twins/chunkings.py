"""Ways of cutting prompts, each of which must give the logits of the model's one pass.

`Prompts` has two random sequences that differ in every token. Prompts are prefixes of the first; those that part from
it continue with the second. Few distinct contexts therefore occur, and few tokens lie between two experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from asking import greedy
from rootstock.cache import KVCache
from rootstock.cache.families import RecurrentState, row_bytes
from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import Event, Finished, TokenEvent
from rootstock.runtime.base import Runtime
from twins.driving import BLOCK_SIZE, ByHand, Cached, Scored, random_tokens, small_cache
from twins.ways import Ran, pieces

LONGEST = 70  # tokens of a prompt
ANSWER_TOKENS = 4
_SHORT, _LONG_ANSWER = 9, 32  # tokens of a prompt and its answer, where requests are preempted
# No token twice in an answer: equal tokens make equal scores, and their order is a matter of rounding.
_NO_REPEATS = ResolvedSampling(temperature=0.0, presence_penalty=1000.0)
_BATCH = 16  # sequences of one forward: as many as the pools of `allocate` hold


@dataclass(frozen=True)
class Prompts:
    base: Tokens
    other: Tokens  # another token at each position

    @classmethod
    def drawn(cls, seed: int, vocab: int) -> Prompts:
        base, shift = (random_tokens(vocab, LONGEST + ANSWER_TOKENS, seed + i) for i in (0, 1))
        return cls(base, (3 + (base - 3 + shift % (vocab - 4) + 1) % (vocab - 3)).astype(np.int32))

    def parting(self, position: int, length: int) -> Tokens:
        """Returns a prompt that equals the base up to `position` and differs from there on."""
        return np.concatenate([self.base[:position], self.other[position:length]])


def every_chunk(runtime: Runtime, prompts: Prompts, lengths: Sequence[int]) -> Iterator[Ran]:
    """Cuts each length into chunks of each size from 1 to itself, with other sizes in the same forwards."""
    for length in lengths:
        sizes = range(1, length + 1)
        yield from _together(
            runtime, prompts.base[:length], [list(range(size, length, size)) for size in sizes]
        )


def compositions(
    runtime: Runtime, prompts: Prompts, lengths: Sequence[int], of_each: int, seed: int
) -> Iterator[Ran]:
    """Cuts each length at a random share of its positions."""
    random = np.random.default_rng(seed)
    for length in lengths:
        cuts = [
            [at for at in range(1, length) if random.random() < share] for share in random.random(of_each)
        ]
        yield from _together(runtime, prompts.base[:length], cuts)


def through_the_cache(
    runtime: Runtime, prompts: Prompts, length: int, positions: Sequence[int]
) -> Iterator[Ran]:
    """Runs a prompt cold with a checkpoint at a position, then one that parts there, then the first prompt twice:
    from the deepest checkpoint, and from the token before the end. Each position has a cache of its own."""
    tokens = prompts.base[:length]
    for position in positions:
        cache = Cached(runtime)
        for prompt, boundaries in (
            (tokens, [position]),
            (prompts.parting(position, length), []),
            (tokens, []),
            (tokens, []),
        ):
            hit = cache.run(prompt, boundaries)
            yield Ran(prompt, hit.logits, hit.cuts)
        assert hit.tokens == length - 1, f"resumed at {hit.tokens} of {length}"


@dataclass
class Served:
    ran: list[Ran]
    preemptions: int
    answers: dict[bytes, set[tuple[int, ...]]]  # prompt → the different answers to it


class _Engine:
    """Engine that serves four requests at a time on a cache of its own."""

    def __init__(self, runtime: Runtime, cache: KVCache, chunk_tokens: int) -> None:
        self._cache = cache
        self._scored = Scored(runtime, self._cache)
        config = EngineConfig(max_batch=4, chunk_tokens=chunk_tokens, idle_chunk_tokens=chunk_tokens)
        self._engine = Engine(self._scored, self._cache, config)
        self.answers: dict[bytes, set[tuple[int, ...]]] = {}

    def run(self, submitted: Sequence[tuple[Tokens, str]], answer_tokens: int = ANSWER_TOKENS) -> None:
        """Submits prompts with their salts, all at once, and waits for their ends."""
        events: list[tuple[Tokens, list[Event]]] = []
        for tokens, salt in submitted:
            its_events = list[Event]()
            request = greedy(tokens, answer_tokens, sampling=_NO_REPEATS, salt=salt)
            self._engine.submit(request, its_events.append)
            events.append((tokens, its_events))
        while self._engine.step():
            pass
        self._cache.check()
        for tokens, its_events in events:
            assert isinstance(its_events[-1], Finished), its_events[-1]
            answer = tuple(event.token for event in its_events if isinstance(event, TokenEvent))
            self.answers.setdefault(tokens.tobytes(), set()).add(answer)

    def served(self) -> Served:
        ran = [Ran(one.tokens, np.concatenate(one.logits), one.cuts) for one in self._scored.leases.values()]
        return Served(ran, self._cache.counters.preemptions, self.answers)


def served(runtime: Runtime, prompts: Prompts, lengths: Sequence[int], chunk_tokens: int) -> Served:
    """Serves each prompt cold, in a namespace of its own; again; after its own prefixes; and parting from them. Then
    serves it with its answer and more tokens, in the namespace that decoded the answer and in a new one."""
    cache = small_cache(runtime, 2 * (max(lengths) + 2 * ANSWER_TOKENS))
    engine = _Engine(runtime, cache, chunk_tokens)
    prefixes = [prompts.base[:length] for length in lengths]
    for _ in range(2):
        engine.run([(tokens, f"of {len(tokens)}") for tokens in prefixes])
    engine.run([(tokens, "shared") for tokens in prefixes])
    engine.run([(prompts.parting(length // 2, length), "shared") for length in lengths if length > 1])
    following = []
    for tokens in prefixes:
        answer = np.array(min(engine.answers[tokens.tobytes()]), np.int32)
        longer = np.concatenate([tokens, answer, prompts.other[: ANSWER_TOKENS - 1]])
        following += [(longer, f"of {len(tokens)}"), (longer, f"anew {len(tokens)}")]
    engine.run(following)
    return engine.served()


def preempted(runtime: Runtime, prompts: Prompts, chunk_tokens: int) -> Served:
    """Serves four requests in too little room, and then each alone. After a preemption, decoded tokens are
    prefilled."""
    families = runtime.description.families
    blocks = -(-(_SHORT + _LONG_ANSWER) // BLOCK_SIZE) + 1
    budget = sum(
        row_bytes(family, BLOCK_SIZE) * (3 if isinstance(family, RecurrentState) else blocks)
        for family in families
    )
    engine = _Engine(runtime, KVCache(families, budget, BLOCK_SIZE), chunk_tokens)
    short = [prompts.parting(_SHORT - 1 - i, _SHORT) for i in range(4)]
    engine.run([(tokens, "at once") for tokens in short], _LONG_ANSWER)
    for tokens in short:
        engine.run([(tokens, "alone")], _LONG_ANSWER)
    return engine.served()


def _together(runtime: Runtime, tokens: Tokens, cuts: Sequence[Sequence[int]]) -> Iterator[Ran]:
    """Runs the same tokens once for each list of cuts, as many sequences in one forward as the pools hold."""
    for first in range(0, len(cuts), _BATCH):
        hand = ByHand(runtime)
        left = {hand.start(tokens): pieces(own, len(tokens)) for own in cuts[first : first + _BATCH]}
        running = list(left)
        while left := {each: sizes for each, sizes in left.items() if sizes}:
            hand.step({each: sizes.pop(0) for each, sizes in left.items()})
        for each in running:
            yield Ran(tokens, np.concatenate(each.logits), each.cuts)
