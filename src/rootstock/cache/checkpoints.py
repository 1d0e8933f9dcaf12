"""Checkpoints: what lets every family of a model resume at exactly one position of exactly one prefix."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckpointKind(StrEnum):
    """Why a checkpoint is left where it is: what is likely to resume there."""

    SYSTEM = "system"  # end of system prompt and tools: other conversations branch off here
    USER = "user"  # end of the last user turn, before its reasoning: the next turn may drop what follows
    TOOL = "tool"  # end of a tool's result within a turn
    PROMPT = "prompt"  # end of a prompt
    ANSWER = "answer"  # end of what was generated
    DIVERGENCE = "divergence"  # where another request was seen to go another way
    MARK = "mark"  # asked for by the client


@dataclass(frozen=True, slots=True)
class Boundary:
    """A position of a prompt at which a later request can diverge: 0 < position <= prompt tokens."""

    position: int
    kind: CheckpointKind
