"""Checkpoints: what lets every family of a model resume at exactly one position of exactly one prefix.

A checkpoint hangs on the node that holds its position. It holds the blocks of windows and chunks that a resumption
there reads, and a copy of the recurrent state. Nothing writes to it: whoever resumes gets a copy of the state and of
a block that is filled in part. It carries its position and its prefix's digest, and is refused where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rootstock.cache.types import BlockIds, SlotId

if TYPE_CHECKING:
    from rootstock.cache.radix_node import Node


class CheckpointKind(StrEnum):
    """Why a checkpoint is left where it is: what is likely to resume there."""

    SYSTEM = "system"  # end of system prompt and tools: other conversations branch off here
    USER = "user"  # end of the last user turn, before its reasoning: the next turn may drop what follows
    TOOL = "tool"  # end of a tool's result within a turn
    PROMPT = "prompt"  # end of a prompt
    ANSWER = "answer"  # end of what was generated
    DIVERGENCE = "divergence"  # where another request was seen to go another way
    MARK = "mark"  # asked for by the client


# How much likelier than the end of a tool's turn each kind is to be resumed, other things being equal. A turn of a
# tool is followed up at once or never; users come back, and every new conversation comes by the system prompt's end.
CHANCE = {
    CheckpointKind.SYSTEM: 8.0,
    CheckpointKind.MARK: 8.0,
    CheckpointKind.USER: 4.0,
    CheckpointKind.DIVERGENCE: 4.0,
    CheckpointKind.ANSWER: 2.0,
    CheckpointKind.TOOL: 1.0,
    CheckpointKind.PROMPT: 1.0,
}


# Kinds that one conversation goes on from, once. When it has, and has left a deeper checkpoint, little remains.
_ONCE = {CheckpointKind.ANSWER, CheckpointKind.TOOL, CheckpointKind.PROMPT}
_CHANCE_WHEN_PASSED = 1 / 16


@dataclass(frozen=True, slots=True)
class Boundary:
    """A position of a prompt at which a later request can diverge: 0 < position <= prompt tokens."""

    position: int
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class TailBlocks:
    """One tail family's blocks up to a position: of block indices `first` … `first` + len(ids) - 1."""

    first: int
    ids: BlockIds


class Checkpoint:
    __slots__ = (
        "cost_tokens",
        "digest",
        "hits",
        "kind",
        "last_used",
        "node",
        "pins",
        "position",
        "queue_ticket",
        "slot",
        "tails",
        "wants",
    )

    def __init__(
        self,
        node: Node,
        position: int,
        digest: bytes,
        kind: CheckpointKind,
        tails: tuple[TailBlocks, ...],
        slot: SlotId,
        cost_tokens: float,
        now: float,
    ) -> None:
        self.node: Node | None = node  # None: it is gone
        self.position = position
        self.digest = digest  # of tokens 0 … position-1 and their namespace
        self.kind = kind
        self.tails = tails  # one for each tail family
        self.slot = slot  # NO_SLOT if the model has no recurrent states
        self.cost_tokens = cost_tokens  # how many tokens of full attention its bytes would pay for
        self.last_used = now
        self.hits = 0
        self.pins = 0  # requests that resume from it and have not computed anything yet
        self.wants: dict[object, None] = {}  # queued requests that would resume from it
        self.queue_ticket = 0

    @property
    def before(self) -> Checkpoint | None:
        """The next shallower one on its path."""
        assert self.node is not None
        return self.node.checkpoint_up_to(self.position - 1)

    @property
    def start(self) -> int:
        """Where a request would resume without it."""
        before = self.before
        return 0 if before is None else before.position

    @property
    def is_idle(self) -> bool:
        """Nobody has resumed from it, or is about to."""
        return not (self.hits or self.pins or self.wants)

    @property
    def end(self) -> int:
        return self.position

    @property
    def is_wanted(self) -> bool:
        return bool(self.wants)

    @property
    def is_passed(self) -> bool:
        """Whether there is a deeper one: on its node, or the first below it on a branch that has any."""
        assert self.node is not None
        if max(self.node.checkpoints, default=0) > self.position:
            return True
        for child in self.node.children.values():
            step = child
            while not step.checkpoints and len(step.children) == 1:
                (step,) = step.children.values()
            if step.checkpoints:
                return True
        return False

    @property
    def worth(self) -> float:
        """Prefill saved, times the chance of that relative to other kinds, per byte: in tokens per token's bytes.

        The last one of a leaf takes along the blocks since the one before, which serve nothing else.
        """
        assert self.node is not None
        chance = CHANCE[self.kind]
        if self.node.passed_by:
            chance *= _CHANCE_WHEN_PASSED
        saved, cost = self.position - self.start, self.cost_tokens
        if self.kind not in _ONCE:
            chance *= 1 + min(self.hits, 7)
        elif self.is_passed:
            chance *= _CHANCE_WHEN_PASSED
        if not self.node.children and self.position >= max(self.node.checkpoints, default=0):
            cost += saved
        return chance * saved / cost

    def __repr__(self) -> str:
        return f"Checkpoint({self.kind} at {self.position}, slot {self.slot})"
