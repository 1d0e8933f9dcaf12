"""Ways of running sequences on a loaded model, each of which must give the model's own logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asking import greedy
from rootstock.cache.radix_node import NEAR_TOKENS, Boundary, CheckpointKind
from rootstock.cache.types import Tokens
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event, Failed
from rootstock.runtime.base import Runtime
from twins.driving import BLOCK_SIZE, ByHand, Cached, Scored, mixed_steps, random_tokens, small_cache

LONGEST_PIECE = 13
ANSWER_TOKENS = 6


@dataclass(frozen=True)
class Ran:
    """Logits of the last positions of a sequence, and where it was cut."""

    tokens: Tokens
    logits: NDArray[np.float32]  # [≤ tokens, vocab]
    cuts: Sequence[int]

    @property
    def first(self) -> int:
        return len(self.tokens) - len(self.logits)


Way = Callable[[Runtime, Sequence[Tokens]], Iterator[Ran]]


def whole(runtime: Runtime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    """Runs each in one forward."""
    for tokens in sequences:
        yield _alone(ByHand(runtime), tokens, ())


def chunked(runtime: Runtime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    """Runs each in random pieces, and prefilled and then decoded."""
    hand = ByHand(runtime)
    for seed, tokens in enumerate(sequences):
        yield _alone(hand, tokens, random_cuts(len(tokens), seed))
        yield _alone(hand, tokens, range(len(tokens) // 2, len(tokens)))


def batch(runtime: Runtime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    """Runs all in packed mixtures of pieces and decodes."""
    for seed in range(3):
        hand = ByHand(runtime)
        running = [hand.start(tokens) for tokens in sequences]
        for step in mixed_steps([len(tokens) for tokens in sequences], seed, LONGEST_PIECE):
            hand.step({running[i]: new for i, new in step.items()})
        for each in running:
            yield Ran(each.tokens, np.concatenate(each.logits), each.cuts)


def resumed(runtime: Runtime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    """Resumes from a checkpoint after every piece, kept by hand: another sequence first, and then the same one."""
    for seed, tokens in enumerate(sequences):
        hand = ByHand(runtime)
        running, kept = hand.start(tokens), []
        for new in pieces(random_cuts(len(tokens), 50 + seed), len(tokens)):
            hand.step({running: new})
            kept.append(hand.keep(running))
        for checkpoint in kept[:-1]:
            for resuming in (_other_after(runtime, tokens, checkpoint.past, seed), tokens):
                run = hand.resume(checkpoint, resuming)
                left = len(tokens) - checkpoint.past
                for new in pieces(random_cuts(left, seed), left):
                    hand.step({run: new})
                yield Ran(run.tokens, np.concatenate(run.logits), run.cuts)


def cached(runtime: Runtime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    """Runs each through the real cache, which leaves checkpoints at the boundaries and is hit at each of them."""
    cache = Cached(runtime)
    for seed, tokens in enumerate(sequences):
        boundaries = random_cuts(len(tokens), 80 + seed)
        first = cache.run(tokens, boundaries)
        yield Ran(tokens, first.logits, first.cuts)
        for position in boundaries:
            other = cache.run(_other_after(runtime, tokens, position, seed))
            far = position - other.tokens
            assert 0 <= far < NEAR_TOKENS, f"resumed at {other.tokens}, {far} tokens before the boundary"
            yield Ran(other.prompt, other.logits, other.cuts)
        again = cache.run(tokens)
        assert again.tokens >= len(tokens) - NEAR_TOKENS, f"resumed at {again.tokens} of {len(tokens)}"
        yield Ran(tokens, again.logits, again.cuts)
    cache.cache.check()


def readmitted(runtime: Runtime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    """Runs each through a cache that holds little more than the longest of them, so that each evicts the others."""
    cache = Cached(runtime, tokens=max(map(len, sequences)) + 2 * LONGEST_PIECE)
    random = np.random.default_rng(0)
    for _ in range(3):
        for i in random.permutation(len(sequences)):
            tokens = sequences[i]
            ran = cache.run(tokens, random_cuts(len(tokens), int(random.integers(100))))
            yield Ran(tokens, ran.logits, ran.cuts)
            cache.cache.check()
    assert cache.cache.stats().evicted_blocks or cache.cache.stats().checkpoints_evicted


def served(runtime: Runtime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    """Serves four requests at a time that share prefixes, with room for hardly more than two; all of them twice."""
    cache = small_cache(runtime, tokens=2 * max(map(len, sequences)) + 2 * LONGEST_PIECE)
    scored = Scored(runtime, cache)
    engine = Engine(scored, cache, EngineConfig(max_batch=4, chunk_tokens=64))
    events: list[Event] = []
    for _ in range(2):
        for seed, tokens in enumerate(sequences):
            cuts = random_cuts(len(tokens), 80 + seed)
            boundaries = tuple(Boundary(position, CheckpointKind.USER) for position in cuts)
            for prompt in (
                tokens,
                *(_other_after(runtime, tokens, position, seed) for position in cuts[::2]),
            ):
                engine.submit(greedy(prompt, ANSWER_TOKENS, boundaries=boundaries), events.append)
        while engine.step():
            pass
        cache.check()
    assert not [event for event in events if isinstance(event, Failed)]
    for one in scored.leases.values():
        yield Ran(one.tokens, np.concatenate(one.logits), one.cuts)
    assert cache.stats().hit_tokens


def unscored(runtime: Runtime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    """Runs all in the same forwards, each beginning a forward later than the one before: a piece without logits, a
    piece whose last row has logits, and then decodes."""
    hand = ByHand(runtime)
    running = [hand.start(tokens) for tokens in sequences]
    sizes = []
    for tokens in sequences:
        half = len(tokens) // 2
        sizes.append([half // 2, half - half // 2, *[1] * (len(tokens) - half)])
    for number in range(max(late + len(its) for late, its in enumerate(sizes))):
        at = {late: number - late for late, its in enumerate(sizes) if 0 <= number - late < len(its)}
        hand.step(
            {running[late]: sizes[late][step] for late, step in at.items()},
            {running[late]: min(step, 1) for late, step in at.items()},
        )
    for each in running:
        yield Ran(each.tokens, np.concatenate(each.logits), each.cuts)


def moved(runtime: Runtime, sequences: Sequence[Tokens]) -> Iterator[Ran]:
    """Runs all in mixtures of pieces and decodes. After each forward one sequence's rows move to others, as bytes."""
    hand = ByHand(runtime)
    running = [hand.start(tokens) for tokens in sequences]
    for number, step in enumerate(mixed_steps([len(tokens) for tokens in sequences], 3, LONGEST_PIECE)):
        hand.step({running[i]: new for i, new in step.items()})
        hand.move(running[number % len(running)])
    for each in running:
        yield Ran(each.tokens, np.concatenate(each.logits), each.cuts)


def resumed_anywhere(runtime: Runtime) -> Iterator[Ran]:
    """Resumes a prompt, through the real cache of a model with full attention, at the end of an edge, inside an edge
    and inside a block, each time with other tokens after it, and then runs the prompt once more."""
    cache, vocab = Cached(runtime), runtime.description.vocab_size
    first = random_tokens(vocab, 6 * BLOCK_SIZE + 3, seed=20)
    hit = cache.run(first)
    assert hit.tokens == 0
    yield Ran(first, hit.logits, ())
    for end, copies in (
        (len(first), 1),  # the whole edge, which ends inside a block
        (4 * BLOCK_SIZE, 0),  # inside the edge, at the end of a block
        (2 * BLOCK_SIZE + 5, 1),  # inside the edge and inside a block
    ):
        rest = random_tokens(vocab, 60, seed=22 + end)
        if end < len(first):
            rest[0] = _another(first[end], vocab)
        prompt = np.concatenate([first[:end], rest])
        hit = cache.run(prompt)
        assert (hit.tokens, hit.copies) == (end, copies)
        yield Ran(prompt, hit.logits, ())
    again = cache.run(first)  # later prompts have not changed its rows; one token is always computed
    assert again.tokens == len(first) - 1
    yield Ran(first, again.logits, ())
    cache.cache.check()


WAYS: dict[str, Way] = {
    way.__name__: way for way in (whole, chunked, batch, resumed, cached, readmitted, served)
}


def random_cuts(length: int, seed: int, shortest: int = 1) -> list[int]:
    """Draws cuts between pieces of `shortest` to LONGEST_PIECE positions."""
    random, cuts, at = np.random.default_rng(seed), [], 0
    while True:
        at += int(random.integers(shortest, LONGEST_PIECE + 1))
        if at > length - shortest:
            return cuts
        cuts.append(at)


def pieces(cuts: Sequence[int], length: int) -> list[int]:
    return np.diff([0, *cuts, length]).tolist()


def _alone(hand: ByHand, tokens: Tokens, cuts: Sequence[int]) -> Ran:
    running = hand.start(tokens)
    for new in pieces(cuts, len(tokens)):
        hand.step({running: new})
    return Ran(tokens, np.concatenate(running.logits), running.cuts)


def _other_after(runtime: Runtime, tokens: Tokens, position: int, seed: int) -> Tokens:
    """Returns a sequence of the same length that differs from `position` on."""
    vocab = runtime.description.vocab_size
    other = random_tokens(vocab, len(tokens), seed=1000 + seed)
    other[:position] = tokens[:position]
    other[position] = _another(tokens[position], vocab)
    return other


def _another(token: int, vocab: int) -> int:
    return 3 + (token - 2) % (vocab - 3)
