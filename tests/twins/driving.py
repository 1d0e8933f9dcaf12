"""Loaded model driven by hand: packed schedules, checkpoints, and prompts through the real cache, with the logits of
every row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rootstock.cache import KVCache, Namespace
from rootstock.cache.families import Family, RecurrentState, row_bytes, token_families
from rootstock.cache.lease import Admitted, Lease, LeaseId, ReleaseReason
from rootstock.cache.plan import BlockCopy, Plan, RowPart, StateCopy
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.cache.types import NO_BLOCK, NO_SLOT, BlockId, BlockIds, SlotId, Tokens
from rootstock.runtime.base import Batch, Logits, ModelDescription, Runtime, Segment

BLOCK_SIZE = 8
BLOCKS = 160
SLOTS = 40  # of recurrent states


def random_tokens(vocab_size: int, length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(3, vocab_size, length).astype(np.int32)


def allocate(runtime: Runtime, block_size: int = BLOCK_SIZE) -> None:
    """Allocates pools for a budget that pays for BLOCKS or SLOTS rows of every family."""
    families = runtime.description.families
    budget = pool_bytes(families, block_size)
    runtime.allocate([budget // row_bytes(family, block_size) for family in families], block_size)


def pool_bytes(families: Sequence[Family], block_size: int) -> int:
    """Returns the bytes of BLOCKS or SLOTS rows of every family."""
    return sum(
        row_bytes(family, block_size) * (SLOTS if isinstance(family, RecurrentState) else BLOCKS)
        for family in families
    )


class Running:
    """Sequence that is computed by hand, with rows of its own in every family's pool."""

    def __init__(self, tokens: Tokens, tables: Sequence[BlockIds], state: SlotId, past: int = 0) -> None:
        self.tokens = tokens
        self.tables = tuple(tables)  # for each token family
        self.state = state
        self.past = past
        self.logits: list[Logits] = []  # of each forward since the start
        self.cuts: list[int] = []  # positions between two forwards


@dataclass(frozen=True)
class Kept:
    """Checkpoint at `past`, kept by hand: tables into blocks that stay, and a copy of the state."""

    past: int
    tables: tuple[BlockIds, ...]
    state: SlotId
    cuts: tuple[int, ...]  # how `past` was reached


class ByHand:
    """Driver of sequences whose rows are given out in random order and never twice: a runtime that reads beyond its
    tables reads garbage.

    Blocks that a family does not need any more are released in the table at once, as the cache does.
    """

    def __init__(self, runtime: Runtime, seed: int = 7, block_size: int = BLOCK_SIZE) -> None:
        random = np.random.default_rng(seed)
        self.runtime = runtime
        self.block_size = block_size
        self._families: tuple[Family, ...] = runtime.description.families
        self._tokens = token_families(self._families)
        self._blocks = [random.permutation(BLOCKS).astype(np.int32).tolist() for _ in self._tokens]
        self._slots = random.permutation(SLOTS).tolist()

    @property
    def has_state(self) -> bool:
        return len(self._tokens) < len(self._families)

    def start(self, tokens: Tokens) -> Running:
        tables = [self._take(family, len(tokens)) for family in range(len(self._tokens))]
        return Running(tokens, tables, self._take_slot())

    def step(self, work: Mapping[Running, int], scored: Mapping[Running, int] | None = None) -> None:
        """Computes so many tokens of each sequence in one forward, and gives each its rows' logits.

        `scored`: the last rows of each sequence that have logits; None: all.
        """
        kept = work if scored is None else scored
        segments = [
            Segment(r.tokens[r.past : r.past + new], r.past, r.tables, kept[r], r.state)
            for r, new in work.items()
        ]
        logits, row = self.runtime.forward(Batch(segments)), 0
        for running, new in work.items():
            if running.past:
                running.cuts.append(running.past)
            running.logits.append(logits[row : row + kept[running]])
            running.past, row = running.past + new, row + kept[running]
            self._release_behind(running.tables, running.past)

    def move(self, running: Running) -> None:
        """Moves a sequence to other rows, as bytes that a tier would have kept."""
        tables = []
        for family, table in enumerate(running.tables):
            others = self._take(family, len(running.tokens))
            for index, first in enumerate(range(0, running.past, self.block_size)):
                if table[index] == NO_BLOCK:
                    others[index] = NO_BLOCK
                else:
                    tokens = min(self.block_size, running.past - first)
                    self._move(RowPart(family, int(table[index]), tokens), int(others[index]))
            tables.append(others)
        running.tables = tuple(tables)
        if self.has_state and running.past:
            state = self._take_slot()
            self._move(RowPart(len(self._tokens), int(running.state), 0), int(state))
            running.state = state

    def _move(self, part: RowPart, row: int) -> None:
        target = replace(part, row=row)
        buffers = self.runtime.buffers(target)
        for buffer, kept in zip(buffers, self.runtime.read(part), strict=True):
            buffer[:] = kept
        self.runtime.place(target, buffers)

    def keep(self, running: Running) -> Kept:
        """Makes a checkpoint at the sequence's current position."""
        state = self._take_slot()
        if state != NO_SLOT:
            self.runtime.apply(Plan(states=(StateCopy(running.state, state),)))
        cuts = (*running.cuts, running.past)
        return Kept(running.past, tuple(table.copy() for table in running.tables), state, cuts)

    def resume(self, kept: Kept, tokens: Tokens) -> Running:
        """Starts another sequence with the same prefix. It shares whole blocks and copies the last, partial one."""
        whole, partly = divmod(kept.past, self.block_size)
        tables, copies = [], []
        for family, source in enumerate(kept.tables):
            table = self._take(family, len(tokens))
            if partly and source[whole] != NO_BLOCK:
                copies.append(
                    BlockCopy(BlockId(int(source[whole])), BlockId(int(table[whole])), partly, family)
                )
            table[:whole] = source[:whole]
            tables.append(table)
        state = self._take_slot()
        states = () if state == NO_SLOT else (StateCopy(kept.state, state),)
        self.runtime.apply(Plan(tuple(copies), states))
        running = Running(tokens, tables, state, kept.past)
        running.cuts = list(kept.cuts[:-1])
        return running

    def _take(self, family: int, tokens: int) -> BlockIds:
        blocks = -(-tokens // self.block_size)
        free = self._blocks[family]
        taken, free[:blocks] = free[:blocks], []
        assert len(taken) == blocks, "out of blocks"
        return np.array(taken, np.int32)

    def _take_slot(self) -> SlotId:
        return SlotId(self._slots.pop()) if self.has_state else NO_SLOT

    def _release_behind(self, tables: Sequence[BlockIds], past: int) -> None:
        for family, table in zip(self._tokens, tables, strict=True):
            table[: family.first_visible(past) // self.block_size] = NO_BLOCK


def packed_logits(
    runtime: Runtime, sequences: Sequence[Tokens], steps: Sequence[Mapping[int, int]]
) -> list[Logits]:
    """Runs steps, each a mapping of sequences to numbers of tokens. Returns [tokens, vocab] of each sequence."""
    hand = ByHand(runtime)
    running = [hand.start(tokens) for tokens in sequences]
    for step in steps:
        hand.step({running[i]: new for i, new in step.items()})
    return [np.concatenate(r.logits) for r in running]


def mixed_steps(lengths: Sequence[int], seed: int, longest_chunk: int = 13) -> list[dict[int, int]]:
    """Draws steps that mix chunks and decodes of several sequences until all are computed."""
    rng, left, steps = np.random.default_rng(seed), list(lengths), []
    while any(left):
        step = {}
        for i in rng.permutation(len(left)):
            if left[i] and rng.random() < 0.7:
                new = 1 if rng.random() < 0.4 else int(rng.integers(1, longest_chunk + 1))
                step[int(i)] = min(new, left[i])
        for i, new in step.items():
            left[i] -= new
        if step:
            steps.append(step)
    return steps


@dataclass(frozen=True)
class Hit:
    prompt: Tokens
    tokens: int  # found, not computed
    copies: int  # blocks copied for it
    cuts: tuple[int, ...]  # where it resumed, and between the forwards that followed
    logits: Logits  # [prompt - tokens, vocab]


def small_cache(runtime: Runtime, tokens: int | None, block_size: int = BLOCK_SIZE) -> KVCache:
    """Makes a cache whose budget pays for so many tokens in every family, and for as many states as blocks.
    Without `tokens` it pays for all rows of `allocate`."""
    families = runtime.description.families
    budget = pool_bytes(families, block_size)
    if tokens is not None:
        budget = -(-tokens // block_size) * sum(row_bytes(family, block_size) for family in families)
    return KVCache(families, budget, block_size)


class OfLease:
    """Computed tokens of one lease. A request that is preempted gets another lease."""

    def __init__(self, cuts: Sequence[int]) -> None:
        self.tokens: Tokens = np.empty(0, np.int32)  # from position 0 to the last computed one
        self.logits: list[Logits] = []  # of the forwards
        self.cuts = list(cuts)


class Scoring(ABC):
    """Runtime that scores every row, also those that the engine does not ask for. Subclasses keep the logits."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def description(self) -> ModelDescription:
        return self._runtime.description

    @property
    def computes_ahead(self) -> bool:
        return self._runtime.computes_ahead

    def apply(self, plan: Plan) -> None:
        self._runtime.apply(plan)

    def forward(self, batch: Batch) -> Logits:
        every = [replace(segment, logits_to_keep=len(segment.tokens)) for segment in batch.segments]
        logits, wanted, row = self._runtime.forward(Batch(every, batch.following)), [], 0
        for segment in batch.segments:
            rows = logits[row : row + len(segment.tokens)]
            self._keep(segment, rows)
            wanted.append(rows[len(rows) - segment.logits_to_keep :])
            row += len(rows)
        return np.concatenate(wanted)

    @abstractmethod
    def _keep(self, segment: Segment, rows: Logits) -> None:
        """Keeps the logits [new, vocab] of a segment."""


def lease_of(cache: KVCache, segment: Segment) -> Lease:
    """Finds the lease of a segment by its tables and state, which no two live leases share."""
    (lease,) = (
        lease
        for lease in cache._leases.values()
        if lease.num_computed_tokens == segment.past
        and lease.slot == segment.state
        and all(np.array_equal(a, b) for a, b in zip(lease.tables, segment.tables, strict=True))
    )
    return lease


class Scored(Scoring):
    """Runtime that scores every row and keeps the logits by lease."""

    def __init__(self, runtime: Runtime, cache: KVCache) -> None:
        super().__init__(runtime)
        self._cache = cache
        self._cuts: dict[bytes, list[int]] = {}  # tokens of a prefix → where its computation was cut
        self.leases: dict[LeaseId, OfLease] = {}

    def allocate(self, rows: Sequence[int], block_size: int) -> None:
        raise AssertionError("it is allocated already")

    def _keep(self, segment: Segment, rows: Logits) -> None:
        lease, past = lease_of(self._cache, segment), segment.past
        computed = np.concatenate([lease.tokens[:past], segment.tokens])
        one = self.leases.get(lease.id)
        if one is None:
            one = self.leases[lease.id] = OfLease(self._cuts.get(computed[:past].tobytes(), ()))
        one.cuts += [past] if past else []
        one.logits.append(rows)
        one.tokens = computed
        self._cuts.setdefault(computed.tobytes(), list(one.cuts))


class Cached:
    """Runner of one prompt after the other through the real cache: match, admit, extend, forward, commit, release."""

    def __init__(self, runtime: Runtime, block_size: int = BLOCK_SIZE, *, tokens: int | None = None) -> None:
        described = runtime.description
        self.cache = small_cache(runtime, tokens, block_size)
        self._runtime = runtime
        self._namespace = Namespace(described.weights_fingerprint, described.kv_dtype, described.rope_regime)

    def run(self, prompt: Tokens, boundaries: Sequence[int] = ()) -> Hit:
        """Prefills a prompt in pieces that end where the cache wants a checkpoint, as at the boundaries."""
        marks = [Boundary(position, CheckpointKind.MARK) for position in boundaries]
        admitted = self.cache.admit(self.cache.match(prompt, self._namespace), boundaries=marks)
        assert isinstance(admitted, Admitted)
        lease = admitted.lease
        self._runtime.apply(admitted.plan)
        cuts, rows = [], []
        while (past := lease.num_computed_tokens) < len(prompt):
            piece = prompt[past : lease.next_checkpoint_position]
            assert self.cache.extend(lease, len(piece)) is None
            segment = Segment(piece, past, lease.tables, len(piece), lease.slot)
            rows.append(self._runtime.forward(Batch([segment])))
            self._runtime.apply(self.cache.commit(lease, piece))
            cuts.append(past)
        self.cache.release(lease, ReleaseReason.FINISHED)
        first = lease.hit_tokens
        return Hit(
            prompt, first, len(admitted.plan.copies), tuple(c for c in cuts if c), np.concatenate(rows)
        )
