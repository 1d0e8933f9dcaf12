"""Idle work for the next turns of conversations: what the next request begins with is known when an answer ends."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from rootstock.cache.radix_node import CheckpointKind
from rootstock.engine.engine import Engine
from rootstock.engine.idle.prefills import IdleKind, IdlePrefill
from rootstock.errors import RootstockError
from rootstock.text.conversation.types import Conversation
from rootstock.text.output.deltas import Delta, DeltaParser, WholeAnswer, answer_of
from rootstock.text.prompts.next_turn import known_prefixes
from rootstock.text.prompts.prompt_tokenizer import PromptTokenizer

log = logging.getLogger(__name__)

MOST_WAITING, MOST_OF_TENANT = 64, 16
MOST_WAITING_CHARS = 1 << 25
MOST_WAIT_S = 30.0  # for a moment in which no request is in the engine


@dataclass(frozen=True, slots=True)
class _Answered:
    conversation: Conversation
    answer: WholeAnswer
    salt: str
    tenant: str
    chars: int
    adapter: str = ""


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

    def of(
        self, conversation: Conversation, salt: str, tenant: str, prompt_chars: int, adapter: str = ""
    ) -> NextTurn:
        """Returns the next turn of a conversation, whose answer is not known yet."""

        def answered(answer: WholeAnswer) -> None:
            chars = prompt_chars + len(answer.text) + len(answer.reasoning)
            self._answered(_Answered(conversation, answer, salt, tenant, chars, adapter))

        return NextTurn(answered)

    def _answered(self, answered: _Answered) -> None:
        with self._lock:
            self._waiting.append(answered)
            own = [each for each in self._waiting if each.tenant == answered.tenant]
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
        salt, tenant = answered.salt, answered.tenant
        prefixes = known_prefixes(
            answered.conversation, answered.answer, self._tokenizer, salt, tenant, parse=self._parse
        )
        for tokens in prefixes:
            self._engine.prefill_in_idle_time(
                IdlePrefill(
                    IdleKind.NEXT_TURN,
                    tokens,
                    salt,
                    tenant or salt,
                    end=CheckpointKind.ANSWER,
                    adapter=answered.adapter,
                    comes_back=bool(answered.answer.calls),
                )
            )


class NextTurn:
    """The next turn of one conversation. It waits for the end of the answer."""

    def __init__(self, answered: Callable[[WholeAnswer], None]) -> None:
        self._answered = answered
        self._is_known = True

    def give_up(self) -> None:
        """Submits nothing: of several answers, the client goes on with one that is not known."""
        self._is_known = False

    def parser_around(self, parser: DeltaParser) -> DeltaParser:
        """Wraps the parser of the answer."""
        return _ToldParser(parser, self._end)

    def _end(self, answer: WholeAnswer) -> None:
        if self._is_known:
            self._answered(answer)


class _ToldParser:
    """A parser that tells the whole answer when it ends."""

    def __init__(self, parser: DeltaParser, ended: Callable[[WholeAnswer], None]) -> None:
        self._parser = parser
        self._ended = ended
        self._deltas: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        deltas = self._parser.push(text)
        self._deltas += deltas
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._parser.finish()
        self._ended(answer_of([*self._deltas, *deltas]))
        return deltas
