"""Idle work for the next turns of conversations: the next request's beginning is known when an answer ends."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rootstock.cache.image_tokens import placed_images
from rootstock.cache.radix_node import CheckpointKind
from rootstock.engine.engine import Engine
from rootstock.engine.idle.prefills import IdleKind, IdlePrefill
from rootstock.errors import RootstockError
from rootstock.text.conversation.media import SentImages
from rootstock.text.conversation.types import Conversation
from rootstock.text.output.deltas import DeltaParser, answer_of
from rootstock.text.prompts.next_turn import known_prefixes
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer
from rootstock.text.prompts.tenant_salt import PromptOwner

log = logging.getLogger(__name__)

MOST_WAITING, MOST_OF_TENANT = 64, 16
MOST_WAITING_CHARS = 1 << 25
MOST_WAIT_S = 30.0  # for a moment in which no request is in the engine


@dataclass(frozen=True, slots=True)
class NextTurn:
    """The next turn of a conversation, whose answer is not known yet."""

    conversation: Conversation
    owner: PromptOwner
    prompt_chars: int
    new_parser: Callable[[], DeltaParser]  # of the answer
    adapter: str = ""
    sent: SentImages = field(default_factory=list)  # images of the conversation


@dataclass(frozen=True, slots=True)
class _Answered:
    turn: NextTurn
    texts: Sequence[str]  # of the answer's tokens
    chars: int


class NextTurns:
    """Submitter of the known beginnings of next requests. Any thread may tell it an answer.

    A thread of its own renders and tokenizes, while no request is in the engine. It lives as long as there is work.
    """

    def __init__(self, engine: Engine, tokenizer: PromptTokenizer, *, parse_special_tokens: bool) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._parse = parse_special_tokens
        self._lock = threading.Lock()  # of the fields below
        self._waiting: deque[_Answered] = deque()
        self._is_running = False
        self.counts: Counter[str] = Counter()  # answers by outcome: "submitted", "dropped", "failed"

    def answered(self, turn: NextTurn, texts: Sequence[str]) -> None:
        """Queues a turn whose answer has ended."""
        answered = _Answered(turn, texts, turn.prompt_chars + sum(map(len, texts)))
        with self._lock:
            self._waiting.append(answered)
            own = [each for each in self._waiting if each.turn.owner.tenant == turn.owner.tenant]
            if len(own) > MOST_OF_TENANT:
                self._waiting.remove(own[0])
                self.counts["dropped"] += 1
            while (
                len(self._waiting) > MOST_WAITING
                or sum(each.chars for each in self._waiting) > MOST_WAITING_CHARS
            ):
                self._waiting.popleft()
                self.counts["dropped"] += 1
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="rootstock-next-turns", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                answered = self._waiting.popleft()
            outcome = "dropped"
            if self._engine.wait_until_idle(MOST_WAIT_S):
                try:
                    self._submit(answered)
                    outcome = "submitted"
                except RootstockError as error:  # the template refuses it, the engine is full, has stopped, …
                    log.debug("no idle work for a next turn: %s", error)
                    outcome = "failed"
                except Exception:
                    log.exception("no idle work for a next turn")
                    outcome = "failed"
            self.counts[outcome] += 1

    def _submit(self, answered: _Answered) -> None:
        turn, parser = answered.turn, answered.turn.new_parser()
        answer = answer_of([*parser.push("".join(answered.texts)), *parser.finish()])
        prefixes = known_prefixes(turn.conversation, answer, self._tokenizer, turn.owner, parse=self._parse)
        for tokens in prefixes:
            self._engine.prefill_in_idle_time(
                IdlePrefill(
                    IdleKind.NEXT_TURN,
                    tokens,
                    turn.owner.salt,
                    turn.owner.share,
                    end=CheckpointKind.ANSWER,
                    adapter=turn.adapter,
                    comes_back=bool(answer.calls),
                    images=placed_images(tokens, turn.sent) if turn.sent else (),
                )
            )
