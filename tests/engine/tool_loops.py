"""Long tool loops in little memory, on the oracle runtime, and a cache that keeps just the useful checkpoints.

A conversation is a system prompt, then user turns. In a turn the model calls a tool again and again. At the next
user turn the template drops all that followed the user's message, or keeps it. The cache has room for the K/V of the
longest prompts and for so many checkpoints beside them. Time is simulated: it passes with each token and each pause.
A client can also render each answer otherwise than the model sampled it, or leave it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.helpers import Client
from rootstock.cache import KVCache
from rootstock.cache.families import (
    ChunkedAttention,
    Family,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    row_bytes,
)
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Event
from rootstock.runtime.base import Batch
from rootstock.testing.fake_runtime import FULL, FakeRuntime, chunked, window

VOCAB = 97
BLOCK = 16
SYSTEM_TOKENS, USER_TOKENS, TOOL_TOKENS, ANSWER_TOKENS = 400, 60, 24, 8
STATE = RecurrentState(layers=1, bytes_per_state=64 * FULL.bytes_per_token)
FAMILIES: dict[str, tuple[Family, ...]] = {
    "states": (FULL, STATE),
    "windows": (FULL, window(64)),
    "chunked": (FULL, chunked(64)),
    "mixed": (FULL, window(48), STATE),
    "states_alone": (STATE,),
}


def checkpoint_bytes(families: Sequence[Family]) -> int:
    """Returns the bytes of a checkpoint that shares no block with another one, wherever it lies."""
    total = 0
    for family in families:
        if isinstance(family, RecurrentState):
            total += family.bytes_per_state
        elif isinstance(family, SlidingWindow | ChunkedAttention):
            total += (-(-family.max_lookback // BLOCK) + 1) * row_bytes(family, BLOCK)
    return total


def budget_bytes(families: Sequence[Family], tokens: int, checkpoints: int, running: int = 1) -> int:
    """Returns a budget for the K/V of so many tokens, for so many checkpoints and for running requests."""
    blocks = -(-tokens // BLOCK) + 4 * running  # blocks that branches divide have copies
    full = sum(row_bytes(family, BLOCK) for family in families if isinstance(family, FullAttention))
    return blocks * full + (checkpoints + running) * checkpoint_bytes(families)


@dataclass
class Conversation:
    """A client's side of a conversation. `drops`: the next user turn drops all that followed the user's message."""

    name: str
    system: list[int]
    drops: bool = True
    marks: bool = False  # it marks the end of each prompt, as clients of Anthropic's API do
    salt: str = ""
    repeats: int = ANSWER_TOKENS  # tokens of an answer that its next prompt has as they were sampled
    rng: np.random.Generator = field(init=False)
    history: list[int] = field(init=False)
    user_end: int = 0  # of the last user turn
    prompt: list[int] = field(default_factory=list)  # of the last request
    answer: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(list(self.name.encode()))
        self.history = list(self.system)

    def new(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, VOCAB, count).tolist()
        return tokens

    def user_turn(self) -> list[int]:
        """Returns the prompt of the next user turn."""
        kept = self.history[: self.user_end] if self.user_end and self.drops else self.history
        said = self.new(ANSWER_TOKENS) if self.user_end and self.drops else []
        self.history = [*kept, *said, *self.new(USER_TOKENS)]
        self.user_end = len(self.history)
        return self.history

    def tool_turn(self) -> list[int]:
        changed = ANSWER_TOKENS - self.repeats
        kept = self.history[: len(self.history) - changed]
        self.history = [*kept, *self.new(changed + TOOL_TOKENS)]
        return self.history

    def boundaries(self) -> tuple[Boundary, ...]:
        """Returns the template's positions: where others, the next turn and the next tool step diverge."""
        end = len(self.history)
        found = {len(self.system): CheckpointKind.SYSTEM}
        found[self.user_end if self.drops else end] = CheckpointKind.USER
        if end != self.user_end:
            found[end] = CheckpointKind.TOOL
        if self.marks:
            found[end] = CheckpointKind.MARK
        return tuple(Boundary(position, found[position]) for position in sorted(found))

    def next_user_turn(self) -> list[int]:
        """Returns a probe: a prompt that diverges where the next user turn does."""
        kept = self.history[: self.user_end] if self.drops else self.history
        return [*kept, *_unlike(self.history[len(kept) :]), 5, 6, 7]

    def new_session(self) -> list[int]:
        return [*self.system, *_unlike(self.history[len(self.system) :]), 5, 6, 7]


def _unlike(tokens: Sequence[int]) -> list[int]:
    return [(tokens[0] + 1) % VOCAB] if tokens else [1]


class World:
    """An engine on the oracle runtime, and its clock."""

    def __init__(self, families: Sequence[Family], budget: int, tokens_per_s: float = 2000.0) -> None:
        self.now = 0.0
        self._tokens_per_s = tokens_per_s
        runtime = FakeRuntime(VOCAB, families=families, fault=self._compute)
        self.cache = KVCache(families, budget, BLOCK, clock=lambda: self.now)
        runtime.allocate(self.cache.rows, BLOCK)
        config = EngineConfig(chunk_tokens=512, idle_chunk_tokens=512, draft_tokens=0, idle_work=False)
        self.engine = Engine(runtime, self.cache, config, clock=lambda: self.now)
        self.runtime = runtime

    def _compute(self, batch: Batch) -> None:
        self.now += 0.001 + batch.new_tokens / self._tokens_per_s

    def submit(self, tokens: list[int], boundaries: tuple[Boundary, ...] = (), salt: str = "") -> Client:
        client = Client(tokens, ANSWER_TOKENS, boundaries=boundaries, salt=salt)

        def sink(event: Event) -> None:
            client.events.append(event)

        self.engine.submit(client.request, sink)
        return client

    def run(self) -> None:
        while self.engine.step():
            pass

    def ask(self, conversation: Conversation, prompt: list[int]) -> int:
        """Sends a request of a conversation, adds the answer to it, and returns the cached tokens of the prompt."""
        client = self.submit(prompt, conversation.boundaries(), conversation.salt)
        self.run()
        conversation.prompt, conversation.answer = prompt, client.tokens
        conversation.history = [*prompt, *client.tokens]
        return client.cached_tokens

    def matched(self, conversation: Conversation, prompt: list[int]) -> int:
        """Returns how much of a prompt would hit now. Changes nothing."""
        namespace = self.engine.namespace(conversation.salt)
        return self.cache.match(np.array(prompt, np.int32), namespace).length

    def wait(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Loop:
    """A case: user turns with so many tool rounds each, in a cache with room for so many checkpoints."""

    family: str
    rounds: int
    room: int
    turns: int = 1
    drops: bool = True
    marks: bool = False
    tokens_per_s: float = 2000.0  # at 20, a request takes far longer than the pause after it
    repeats: int = ANSWER_TOKENS

    def __str__(self) -> str:
        kind = "marks" if self.marks else "drops" if self.drops else "keeps"
        kind += f"{self.repeats}" if self.repeats < ANSWER_TOKENS else ""
        return f"{self.family}-{kind}-{self.turns}x{self.rounds}-room{self.room}-{self.tokens_per_s:g}"


@dataclass(frozen=True)
class Found:
    """The hits of the next user turn and of a new session.

    `best_…` are those in a cache that keeps just the checkpoints at the newest tip, at the end of the last user turn
    and at the system's end, or the best two of them.
    """

    next_turn: int
    new_session: int
    best_next_turn: int
    best_new_session: int
    least_of_a_round: float  # of the tool rounds: cached tokens over those of the request before

    @property
    def ratio(self) -> float:
        return (self.next_turn + self.new_session) / (self.best_next_turn + self.best_new_session)


def play(loop: Loop) -> Found:
    families = FAMILIES[loop.family]
    system = np.random.default_rng(0).integers(0, VOCAB, SYSTEM_TOKENS).tolist()
    own = Conversation("a", system, loop.drops, loop.marks, repeats=loop.repeats)
    of_rounds = loop.rounds * (TOOL_TOKENS + ANSWER_TOKENS) * (1 if loop.drops else loop.turns)
    longest = SYSTEM_TOKENS + loop.turns * (USER_TOKENS + ANSWER_TOKENS) + of_rounds + ANSWER_TOKENS
    if loop.repeats < ANSWER_TOKENS:
        longest += loop.rounds * BLOCK  # each round's branch has a copy of the block that it divides
    world = World(families, budget_bytes(families, longest, loop.room), loop.tokens_per_s)
    least = 1.0
    for turn in range(loop.turns):
        world.wait(60.0 if turn else 0.0)
        world.ask(own, own.user_turn())
        for _ in range(loop.rounds):
            world.wait(0.05)
            before = len(own.history) - ANSWER_TOKENS + own.repeats
            before -= own.repeats == ANSWER_TOKENS  # the last token of an answer is never computed
            least = min(least, world.ask(own, own.tool_turn()) / before)
    world.cache.check()
    # The end of the conversation is its tip, unless the next turn drops what followed the user's message.
    best_next = own.user_end if loop.drops else len(own.history) - 1
    if loop.drops and loop.room < 3:  # the tip and one more: the system's end serves both
        best_next = SYSTEM_TOKENS
    return Found(
        world.matched(own, own.next_user_turn()),
        world.matched(own, own.new_session()),
        best_next,
        SYSTEM_TOKENS,
        least,
    )
