"""Talk with a server: the prompts of a case, what was sent, and what can be seen to be untrue at once."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from rootstock.conformance.server import BUSY, Answer, AskFailed, Json, Server
from rootstock.conformance.texts import words
from rootstock.conformance.truth import Ledger, Truth
from rootstock.errors import StartupError

READY_WITHIN_S = 600.0
# Statuses with which servers say that they do not take a request of this kind.
REFUSALS = (400, 404, 405, 413, 415, 422, 501)


class Refused(Exception):
    """A case that the server refuses from its first request on, or cannot be asked."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Prompt of a chat, or with `prompt` of a completion."""

    messages: tuple[Json, ...] = ()
    fields: Json = field(default_factory=dict)

    @property
    def body(self) -> Json:
        return {"messages": list(self.messages), **self.fields} if self.messages else dict(self.fields)

    def message(self, message: Json) -> Chat:
        return replace(self, messages=(*self.messages, message))

    def user(self, text: str) -> Chat:
        return self.message({"role": "user", "content": text})

    def system(self, text: str) -> Chat:
        return self.message({"role": "system", "content": text})

    def answered(self, answer: Answer) -> Chat:
        return self.message(answer.as_message())

    def results(self, answer: Answer, text: str) -> Chat:
        """Adds the results of an answer's calls."""
        chat = self
        for call in answer.as_message().get("tool_calls", ()):
            chat = chat.message({"role": "tool", "tool_call_id": call["id"], "content": text})
        return chat

    def edited(self, index: int, text: str) -> Chat:
        """Replaces the text of one message."""
        messages = list(self.messages)
        messages[index] = {**messages[index], "content": text}
        return replace(self, messages=tuple(messages))

    def with_fields(self, **fields: Any) -> Chat:
        return replace(self, fields={**self.fields, **fields})

    def without(self, name: str) -> Chat:
        return replace(self, fields={key: value for key, value in self.fields.items() if key != name})


def completion(ids: Sequence[int]) -> Chat:
    """Returns a completion of token ids."""
    return Chat(fields={"prompt": list(ids), "max_tokens": 8})


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request of a case, with its answer. A restart of the server has no body."""

    number: int
    how: str
    body: Json
    answer: Answer | None  # None: it failed, or its client closed the connection
    ids: Sequence[int] | None = None  # of the prompt; None: not known
    streamed: bool = False
    shared: int | None = None  # tokens that were sent before; None: not known
    by_any: int = 0  # tokens that were sent before with any salt


@dataclass(frozen=True, slots=True)
class Violation:
    """Something untrue that a case showed, and the requests that showed it."""

    case: str
    kind: str  # "wrong answer" | "false count" | "not isolated" | "failed"
    what: str
    request: int  # number of the request that showed it
    nats: float = 0.0


class Talk:
    """Talk of one case with the server. Its requests are checked at once as far as no reference is needed."""

    def __init__(
        self,
        case: str,
        server: Server,
        truth: Truth,
        rng: random.Random,
        *,
        size: int,
        answer_tokens: int,
        pressure: int,
        restart: Callable[[], None] | None,
    ) -> None:
        self.case = case
        self.answer_tokens = answer_tokens
        self.pressure = pressure
        self.sent: list[Exchange] = []
        self.findings: list[Violation] = []
        self._server = server
        self._truth = truth
        self._ledger = truth.ledger
        self._rng = rng
        self._size = size
        self._restart = restart
        self._lock = threading.Lock()

    # ----------------------------------------------------------------------------------- prompts

    def words(self, part: float) -> str:
        """Returns new words, as a part of the suite's length of a prompt."""
        return words(self._rng, max(3, int(self._size * part)))

    def nonce(self) -> str:
        """Returns a word that no earlier run had: the server may still keep that run's prompts."""
        return uuid.uuid4().hex[:16]

    def chat(self, part: float = 1.0) -> Chat:
        """Returns a prompt that shares nothing with an earlier one but the template's head."""
        system = f"{self.nonce()} {self.words(part / 2)}"
        chat = Chat(({"role": "system", "content": system},), {"max_tokens": self.answer_tokens})
        return chat.user(self.words(part / 2))

    def samples(self, of: Iterable[int], count: int) -> list[int]:
        of = list(of)
        return self._rng.sample(of, min(count, len(of)))

    def some_ids(self, count: int) -> list[int]:
        """Returns token ids of a text. Raises Refused if the server tells none."""
        ids = self._server.tokens_of(self.chat(count / self._size * 2).body)
        if ids is None:
            raise Refused("it tells no token ids")
        return ids[:count]

    # ---------------------------------------------------------------------------------- requests

    def ask(self, chat: Chat, how: str, *, stream: bool = False, optional: bool = False) -> Answer:
        """Sends a prompt. `optional`: a server may refuse it, and then the case ends. Raises Refused."""
        return self._asked([chat], how, stream=stream, optional=optional)[0]

    def ask_at_once(self, chats: Sequence[Chat], how: str) -> None:
        self._asked(chats, how)

    def _asked(
        self, chats: Sequence[Chat], how: str, *, stream: bool = False, optional: bool = False
    ) -> list[Answer]:
        ids = [self._ids(chat.body) for chat in chats]
        # Of requests at once each may find what another one computes.
        shared = [self._shared(i, chats, ids) for i in range(len(chats))]
        by_any = [0 if of_chat is None else self._ledger.shared(None, of_chat) for of_chat in ids]
        for chat, of_chat in zip(chats, ids, strict=True):
            if of_chat is not None:
                self._ledger.add(_salt(chat.body), of_chat, int(chat.fields["max_tokens"]))
        with ThreadPoolExecutor(len(chats)) as threads:
            answers = list(threads.map(lambda chat: self._one(chat, how, stream, optional), chats))
        for chat, of_chat, choices, own, of_any in zip(chats, ids, answers, shared, by_any, strict=True):
            for answer in (*choices,) or (None,):
                sent = Exchange(len(self.sent), how, chat.body, answer, of_chat, stream, own, of_any)
                # A server may put more into a prompt than it tells of it: tools, say, or a schema.
                if of_chat and answer and answer.prompt_tokens not in (None, len(of_chat)):
                    sent = replace(sent, ids=None, shared=None)
                self.sent.append(sent)
                self._check_counts(sent)
        return [choices[0] if choices else Answer() for choices in answers]

    def _one(self, chat: Chat, how: str, stream: bool, optional: bool) -> list[Answer]:
        """Returns the choices of an answer; none: the request failed."""
        try:
            return self._server.ask(chat.body, stream=stream)
        except AskFailed as error:
            is_expected = optional or not self.sent or not self._server.can.cold_by
            if (error.status in REFUSALS and is_expected) or (
                error.status not in (None, *BUSY) and self._truth.refuses(chat.body, stream=stream)
            ):
                raise Refused(f"{how}: {error.reason}") from error
            self._find("failed", f"{how}: no answer ({error.reason})")
            return []

    def cancel(self, chat: Chat, chunks: int) -> None:
        """Closes a stream behind so many chunks."""
        ids = self._ids(chat.body)
        if ids is not None:
            self._ledger.add(_salt(chat.body), ids, int(chat.fields["max_tokens"]))
        try:
            stream = self._server.chunks(chat.body)
            for _ in range(chunks + 1):
                next(stream, None)
            stream.close()  # type: ignore[attr-defined]
        except AskFailed as error:
            raise Refused(f"a stream: {error.reason}") from error
        how = f"a stream, closed behind {chunks} chunks"
        self.sent.append(Exchange(len(self.sent), how, chat.body, None, ids, streamed=True))

    def needs_repeatable(self, chat: Chat) -> None:
        """Raises Refused if the server answers a prompt in two ways although nothing is cached."""
        first, second = self._truth.of(chat.body), self._truth.of({**chat.body, "user": "again"})
        if first is None or second is None or first.said != second.said:
            raise Refused("its seeds do not repeat an answer")

    def restart(self) -> None:
        if self._restart is None:
            raise Refused("no --restart command was given")
        try:
            self._restart()
        except StartupError as error:
            raise Refused(error.message) from error
        self.sent.append(Exchange(len(self.sent), "a restart of the server", {}, None))
        deadline = time.monotonic() + READY_WITHIN_S
        while not self._server.is_up():
            if time.monotonic() > deadline:
                self._find("failed", f"the server was not up {READY_WITHIN_S:.0f} s after a restart")
                raise Refused("the server is not up")
            time.sleep(0.2)

    # ------------------------------------------------------------------------------------ checks

    def _ids(self, body: Json) -> list[int] | None:
        return body["prompt"] if "prompt" in body else self._server.tokens_of(body)

    def _shared(self, i: int, chats: Sequence[Chat], ids: Sequence[list[int] | None]) -> int | None:
        mine, salt = ids[i], _salt(chats[i].body)
        if mine is None:
            return None
        most = self._ledger.shared(salt, mine)
        beside = Ledger()
        for j, others in enumerate(ids):
            if j != i and others is not None:
                beside.add(_salt(chats[j].body), others, 0)
        return max(most, beside.shared(salt, mine))

    def _check_counts(self, sent: Exchange) -> None:
        if sent.answer is None:
            return
        cached, prompt = sent.answer.cached_tokens, sent.answer.prompt_tokens
        if cached is None or prompt is None:
            return
        if not 0 <= cached < prompt:
            self._find("false count", f"{sent.how}: {cached} tokens cached of a prompt of {prompt}", sent)
        elif sent.shared is not None and cached > sent.shared:
            # Nearer to what all salts have sent together than to what this one has: it found another's.
            is_others = 2 * cached > sent.shared + sent.by_any > 2 * sent.shared
            kind = "not isolated" if is_others else "false count"
            what = f"{sent.how}: {cached} tokens cached, of which {sent.shared} were sent before"
            self._find(kind, what, sent)

    def _find(self, kind: str, what: str, sent: Exchange | None = None, nats: float = 0.0) -> None:
        with self._lock:
            number = len(self.sent) if sent is None else sent.number
            self.findings.append(Violation(self.case, kind, what, number, nats))


def _salt(body: Json) -> str:
    return str(body.get("cache_salt") or "")
