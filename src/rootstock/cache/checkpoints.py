"""Kinds of checkpoints, the boundaries at which they are left, and the window blocks that they hold.

A checkpoint lets every family of a model resume at exactly one position of exactly one prefix. The class is in
`radix_node`, since a checkpoint hangs on a node of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rootstock.cache.types import BlockIds


class CheckpointKind(StrEnum):
    """The reason why a checkpoint is left at its position, which tells how likely a resumption there is."""

    SYSTEM = "system"  # end of system prompt and tools: other conversations branch off here
    USER = "user"  # end of the last user turn, before its reasoning: the next turn may drop the reasoning
    TOOL = "tool"  # end of a tool's result within a turn
    PROMPT = "prompt"  # end of a prompt
    ANSWER = "answer"  # end of an answer
    DIVERGENCE = "divergence"  # another request was seen to go another way here
    MARK = "mark"  # asked for by the client


# Likelihood of a resumption, relative to the end of a tool's turn. A tool's turn is followed up at once or never;
# users come back, and every new conversation passes the end of the system prompt.
CHANCE = {
    CheckpointKind.SYSTEM: 8.0,
    CheckpointKind.MARK: 8.0,
    CheckpointKind.USER: 4.0,
    CheckpointKind.DIVERGENCE: 4.0,
    CheckpointKind.ANSWER: 2.0,
    CheckpointKind.TOOL: 1.0,
    CheckpointKind.PROMPT: 1.0,
}

# Kinds that a single conversation resumes from once. After it has left a deeper checkpoint, little chance remains.
RESUMED_ONCE = frozenset({CheckpointKind.ANSWER, CheckpointKind.TOOL, CheckpointKind.PROMPT})
CHANCE_WHEN_PASSED = 1 / 16


@dataclass(frozen=True, slots=True)
class Boundary:
    """A position of a prompt at which a later request can diverge: 0 < position <= prompt tokens."""

    position: int
    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """The blocks of one window family that a resumption reads: block indices `first` … `first` + len(ids) - 1."""

    first: int
    ids: BlockIds

    def whole(self, position: int, block_size: int) -> BlockIds:
        """The blocks that are full up to `position`. They are shared; a partly filled one is copied."""
        return self.ids[: max(0, position // block_size - self.first)]
