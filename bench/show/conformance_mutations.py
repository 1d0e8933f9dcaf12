"""Mistakes that a prompt cache can make, put into ours at run time, for P3: each must be found by HTTP alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from rootstock.cache.kv_cache import KVCache
from rootstock.cache.lease import Lease
from rootstock.cache.plan import Plan
from rootstock.cache.prefix_tree import PrefixTree
from rootstock.engine.engine import Engine
from rootstock.engine.sampling import Sampler
from rootstock.engine.sequence import Sequence, SequenceFactory
from rootstock.engine.step import StepRunner
from rootstock.pipeline.model import ServedModel
from rootstock.runtime.base import Batch, Segment
from rootstock.testing import fake_runtime
from rootstock.testing.fake_runtime import FakeRuntime

Change = Callable[[Any], Any]  # from the right function to the wrong one


@dataclass(frozen=True)
class Mutation:
    owner: Any
    name: str
    change: Change
    kind: str  # of the model that shows it

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        with patch.object(self.owner, self.name, self.change(getattr(self.owner, self.name))):
            yield


MUTATIONS: dict[str, Mutation] = {}  # by the mistake


def mutation(owner: Any, name: str, kind: str = "hybrid") -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        assert change.__doc__ is not None
        MUTATIONS[change.__doc__.rstrip(".")] = Mutation(owner, name, change, kind)
        return change

    return register


@mutation(FakeRuntime, "apply")
def stale_states(right: Any) -> Any:
    """A restored state is one that another request left in its slot."""

    def apply(self: FakeRuntime, plan: Plan) -> None:
        right(self, replace(plan, states=plan.states[1:]))

    return apply


@mutation(FakeRuntime, "apply")
def no_copy_on_write(right: Any) -> Any:
    """The shared part of a block is not copied."""

    def apply(self: FakeRuntime, plan: Plan) -> None:
        right(self, replace(plan, copies=()))

    return apply


@mutation(FakeRuntime, "forward")
def shifted_positions(right: Any) -> Any:
    """Tokens behind a hit that ends inside a block stand one position too far."""

    def forward(self: FakeRuntime, batch: Batch) -> Any:
        write = fake_runtime._Pool.write

        def shifted(pool: Any, blocks: Any, tokens: Any, past: int, hashes: Any) -> None:
            write(pool, blocks, tokens, past, hashes)
            if past % pool.block_size and len(tokens) > 1:
                rows = pool._at(blocks, np.arange(past, past + len(tokens)))
                pool.positions[rows] += 1

        with patch.object(fake_runtime._Pool, "write", shifted):
            return right(self, batch)

    return forward


@mutation(FakeRuntime, "forward")
def logits_of_the_row_before(right: Any) -> Any:
    """Where one token of a prompt is left to compute, the logits are those of another row."""

    def forward(self: FakeRuntime, batch: Batch) -> Any:
        logits: NDArray[np.float32] = right(self, batch)
        if batch.segments[0].past > 40 and batch.new_tokens == 1 and logits.shape[0] == 1:
            return np.roll(logits, 1, axis=1) if batch.segments[0].past % 5 == 0 else logits
        return logits

    return forward


@mutation(FakeRuntime, "forward")
def rows_of_a_batch_mate(right: Any) -> Any:
    """Of sequences in one forward, the second one reads the table of the first in its last block."""

    def forward(self: FakeRuntime, batch: Batch) -> Any:
        segments = list(batch.segments)
        if len(segments) > 1 and segments[0].past > 32 and segments[1].past > 32:
            segments[1] = _with_first_block_of(segments[0], segments[1])
        return right(self, Batch(segments))

    return forward


def _with_first_block_of(other: Segment, mine: Segment) -> Segment:
    table = mine.tables[0].copy()
    table[0] = other.tables[0][1]
    return replace(mine, tables=(table, *mine.tables[1:]))


@mutation(Engine, "namespace")
def foreign_salt(right: Any) -> Any:
    """The salt of a request does not count."""
    return lambda self, salt="", adapter="": right(self, "", adapter)


@mutation(Sequence, "usage")
def rounded_up(right: Any) -> Any:
    """Cached tokens are rounded up to whole blocks."""

    def usage(self: Sequence, now: float) -> Any:
        told = right(self, now)
        return replace(told, cached_tokens=-(-told.cached_tokens // 16) * 16)

    return usage


@mutation(Sequence, "usage")
def whole_prompt(right: Any) -> Any:
    """A prompt of which anything was found counts as cached."""

    def usage(self: Sequence, now: float) -> Any:
        told = right(self, now)
        return replace(told, cached_tokens=told.prompt_tokens - 1 if told.cached_tokens else 0)

    return usage


@mutation(Sequence, "usage")
def prompt_without_hits(right: Any) -> Any:
    """Prompt tokens are those that were computed."""

    def usage(self: Sequence, now: float) -> Any:
        told = right(self, now)
        return replace(told, prompt_tokens=told.prompt_tokens - told.cached_tokens, cached_tokens=0)

    return usage


@mutation(StepRunner, "_finish", "full")
def last_token_not_computed(right: Any) -> Any:
    """The last sampled token of an answer counts as computed."""

    def finish(self: StepRunner, sequence: Sequence, lease: Lease, *args: Any, **more: Any) -> None:
        if sequence.generated and lease.num_computed_tokens % 16:  # there is room in its block
            lease.append(np.array(sequence.generated[-1:], np.int32))
        right(self, sequence, lease, *args, **more)

    return finish


@mutation(KVCache, "_match", "full")
def one_too_deep(right: Any) -> Any:
    """A prompt that differs inside of a node counts as equal up to the token behind."""

    def match(self: KVCache, tokens: Any, *args: Any, **more: Any) -> Any:
        found = right(self, tokens, *args, **more)
        node = found.node
        if node is not None and found.length == found.found < min(node.end, found.limit):
            return replace(found, length=found.length + 1, found=found.found + 1)
        return found

    return match


@mutation(PrefixTree, "_trim", "full")
def evicted_and_found(right: Any) -> Any:
    """The evicted end of a prefix is still found."""

    def trim(self: PrefixTree, leaf: Any, blocks: int) -> Any:
        before = leaf.tokens, leaf.blocks, leaf.end
        gone = right(self, leaf, blocks)
        if leaf.parent is not None:
            leaf.tokens, leaf.blocks, leaf.end = before
        return gone

    return trim


@mutation(SequenceFactory, "make")
def seeds_by_number(right: Any) -> Any:
    """A seed depends on the number of requests before."""
    count = iter(range(1 << 30))

    def make(self: SequenceFactory, request: Any, *args: Any) -> Any:
        if request.sampling.seed is not None and not request.sampling.greedy:
            request = replace(
                request, sampling=replace(request.sampling, seed=request.sampling.seed + next(count) // 3)
            )
        return right(self, request, *args)

    return make


@mutation(Sampler, "sample")
def logprobs_of_the_last_request(right: Any) -> Any:
    """The log-probabilities of a first token are those of the request before."""
    kept: list[Any] = []

    def sample(self: Sampler, logits: Any) -> Any:
        told = right(self, logits)
        if self._sampled == 1 and told.logprob is not None:
            kept.append(told.logprob)
            if len(kept) > 1 and len(kept) % 3 == 0:
                return replace(told, logprob=replace(told.logprob, top=kept[-2].top))
        return told

    return sample


@mutation(FakeRuntime, "place")
def damaged_on_disk(right: Any) -> Any:
    """A row that was loaded from the disk has the bytes of another one."""

    def place(self: FakeRuntime, part: Any, buffers: Any) -> None:
        right(self, part, buffers)
        for buffer in buffers[-1:]:
            buffer[...] ^= 1

    return place


@mutation(ServedModel, "rendered_chat")
def tools_forgotten(right: Any) -> Any:
    """A chat whose messages were seen before has the tools that it had then."""
    seen: dict[str, Any] = {}

    def rendered(self: ServedModel, conversation: Any, owner: Any) -> Any:
        return seen.setdefault(f"{owner} {conversation.messages}", right(self, conversation, owner))

    return rendered


@mutation(Sequence, "usage")
def answers_count(right: Any) -> Any:
    """Tokens of the answer count as cached ones of the prompt."""

    def usage(self: Sequence, now: float) -> Any:
        told = right(self, now)
        more = told.completion_tokens if told.cached_tokens else 0
        return replace(told, cached_tokens=min(told.prompt_tokens - 1, told.cached_tokens + more))

    return usage
