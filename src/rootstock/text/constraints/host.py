"""The server's side of the processes of grammars (`grammar_process.py`): their start, their end, their answers.

A process has one grammar and the matchers of all answers that follow it. It ends when nothing refers to it.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rootstock.errors import CompilerBusy
from rootstock.text.constraints.frames import Frame, Link, LinkBroken
from rootstock.text.constraints.turns import TURN_S, CompileTurns, refuse_gone
from rootstock.units import MIB

_START = (
    "import json, sys; sys.path += json.loads(sys.argv[1]); "
    "from rootstock.text.constraints.grammar_process import main; main(int(sys.argv[2]))"
)
_MOST_PROCESSES = 256
_MOST_BYTES = 1024 * MIB  # that all processes of grammars have taken beyond the shared vocabularies
_GROWTH_STEP_BYTES = MIB
# A limit for a machine that stands still. Before it the system ends a process that computes too long.
_MOST_WAIT_S = 60.0
_END_S = 5.0
_OUT_OF_MEMORY = 3

_SMALLER = "make it smaller and less deep, or send it in parts"
_REASONS: Mapping[int, str] = {
    -signal.SIGPROF: f"it takes too long to compile or to follow: {_SMALLER}",
    -signal.SIGSEGV: f"its values, references or rules lead too deep into each other: {_SMALLER}",
    -signal.SIGBUS: f"its values, references or rules lead too deep into each other: {_SMALLER}",
    -signal.SIGABRT: f"it takes too much memory: {_SMALLER}",
    -signal.SIGKILL: f"it takes too much memory: {_SMALLER}",
    _OUT_OF_MEMORY: f"it takes too much memory: {_SMALLER}",
}


class GrammarLost(Exception):
    """The process of a grammar has ended. The message says why, for the client."""


class MatcherTokens(Protocol):
    """Interface of a vocabulary as matchers need it."""

    @property
    def matcher_pieces(self) -> Sequence[bytes]:
        """Returns the bytes of each token. The last one is the end of the answer."""
        ...

    @property
    def matcher_special(self) -> Sequence[int]:
        """Returns the tokens without text."""
        ...

    def encode(self, text: bytes) -> list[int]: ...


class HostedVocabulary:
    """A vocabulary in the process that forks grammars. It is removed when no compiler and no grammar refers to it."""

    def __init__(self, host: GrammarHost, number: int) -> None:
        self.number = number
        self._remove = weakref.finalize(self, host.remove, number)

    def close(self) -> None:
        """Removes it at once. Idempotent."""
        self._remove()


class GrammarHost:
    """The process that forks a process for each grammar. It starts when it is needed, and again after it has ended.

    All models of this process share it. Any thread may use it.
    """

    def __init__(self) -> None:
        self.turns = CompileTurns()
        self._lock = threading.RLock()  # of everything below
        self._held = 0  # times that its thread holds it
        self._removed: list[int] = []  # vocabularies
        self._link: Link | None = None
        self._stop: weakref.finalize[..., GrammarHost] | None = None
        self._end: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._vocabularies: dict[int, MatcherTokens] = {}
        self._droppers: dict[int, Callable[[], bool]] = {}
        self._users = 0
        self._live: weakref.WeakValueDictionary[int, GrammarProcess] = weakref.WeakValueDictionary()

    @property
    def pid(self) -> int | None:
        """The process's id; None: it does not run."""
        return None if self._process is None else self._process.pid

    def add(self, vocabulary: MatcherTokens, drop_oldest: Callable[[], bool]) -> HostedVocabulary:
        """Adds a vocabulary, and starts the process if it does not run.

        `drop_oldest` gives up one kept grammar of the vocabulary, and returns False if none is kept.
        """
        with self._locked():
            number = next(self._numbers)
            self._vocabularies[number] = vocabulary
            self._droppers[number] = drop_oldest
            if self._link is not None:
                self._send_vocabulary(number)
            self._started()
            return HostedVocabulary(self, number)

    def remove(self, number: int) -> None:
        """Removes a vocabulary. The process ends with the last one. Idempotent."""
        self._removed.append(number)
        with self._locked():
            pass

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keeps the process for a while, also without a vocabulary."""
        with self._locked():
            self._users += 1
        try:
            yield
        finally:
            with self._locked():
                self._users -= 1
                if not self._users and not self._vocabularies:
                    self._ended()

    def fork(self, hosted: HostedVocabulary | None) -> GrammarProcess:
        """Starts the process of a grammar. Raises CompilerBusy if there are too many."""
        self._make_room()
        ours, theirs = socket.socketpair()
        with theirs, self._locked():
            number = next(self._numbers)
            vocabulary = 0 if hosted is None else hosted.number
            head = {"do": "fork", "process": number, "vocabulary": vocabulary}
            if not self._send(head, theirs):  # it has ended
                self._ended()
                self._send(head, theirs)
            made = GrammarProcess(self, number, ours, self._vocabularies.get(vocabulary), hosted)
            self._live[number] = made
        return made

    def signal(self, number: int, name: str) -> None:
        """Sends a signal to the process of a grammar: "stop", "go" or "kill"."""
        self._send({"do": "signal", "process": number, "signal": name})

    def end_of(self, number: int) -> int | None:
        """Returns how a process ended whose socket is closed; None: that is not known."""
        with self._locked():
            if not self._send({"do": "end of", "process": number}) or self._link is None:
                return None
            assert self._end is not None
            self._end.settimeout(_MOST_WAIT_S)
            try:
                status = self._link.receive().head.get("status")
            except (LinkBroken, TimeoutError):
                return None
            return status if isinstance(status, int) else None

    def grown(self) -> None:
        """Gives up grammars until all together take less than their most memory: first those without answers."""
        while sum(each.grown_bytes for each in list(self._live.values())) > _MOST_BYTES:
            if not self._drop_oldest():
                largest = max(list(self._live.values()), key=lambda each: each.grown_bytes, default=None)
                if largest is not None:
                    largest.kill()
                return

    def forget_after_fork(self) -> None:
        """Forgets the processes, in a fork of this process: they are its parent's."""
        if self._stop is not None:
            self._stop.detach()
        if self._end is not None:
            self._end.close()
        for each in list(self._live.values()):
            each.close()
        self.__init__()  # type: ignore[misc]

    def _make_room(self) -> None:
        while len(self._live) >= _MOST_PROCESSES:
            if not self._drop_oldest():
                raise CompilerBusy

    def _drop_oldest(self) -> bool:
        return any(drop() for drop in list(self._droppers.values()))

    # ------------------------------------------------------------------------------------ the process

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock. At its end, makes the removals of finalizers, which run at any point of the code."""
        with self._lock:
            self._held += 1
            try:
                yield
            finally:
                if self._held == 1:
                    while self._removed:
                        self._remove(self._removed.pop())
                self._held -= 1

    def _remove(self, number: int) -> None:
        self._droppers.pop(number, None)
        if self._vocabularies.pop(number, None) is None:
            return
        if self._vocabularies or self._users:
            self._send({"do": "forget", "vocabulary": number})
        else:
            self._ended()

    def _send(self, head: dict[str, Any], descriptor: socket.socket | None = None, body: bytes = b"") -> bool:
        """Sends a message. Returns False if the process has ended."""
        with self._locked():
            if descriptor is not None:
                self._started()
            if self._link is None or self._end is None:
                return False
            try:
                self._end.settimeout(_MOST_WAIT_S)
                self._link.send(head, body)
                if descriptor is not None:
                    socket.send_fds(self._end, [b"f"], [descriptor.fileno()])
            except (LinkBroken, OSError):
                return False
            return True

    def _started(self) -> None:
        if self._link is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            paths = [str(_folder_of(name)) for name in ("rootstock", "llguidance")]
            # -I and -S: neither the environment nor the site's start files run code there.
            command = [sys.executable, "-I", "-S", "-c", _START, json.dumps(paths), str(theirs.fileno())]
            self._process = process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._end, self._link = ours, Link(ours)
        self._stop = weakref.finalize(self, _stopped, process, ours)
        for number in self._vocabularies:
            self._send_vocabulary(number)

    def _send_vocabulary(self, number: int) -> None:
        vocabulary = self._vocabularies[number]
        pieces = vocabulary.matcher_pieces
        lengths = array.array("I", map(len, pieces)).tobytes()
        special = list(vocabulary.matcher_special)
        head = {"do": "add", "vocabulary": number, "tokens": len(pieces), "special": special}
        self._send(head, body=b"".join((lengths, *pieces)))

    def _ended(self) -> None:
        if self._stop is not None:
            self._stop()
        self._stop = self._link = self._end = self._process = None


class MatcherRound:
    """A question about several matchers of one process, in one message: tokens to take, and the masks after them.

    It is open, and other matchers may join it, until the first of them waits for an answer or calls `send`.
    """

    __slots__ = ("__weakref__", "is_open", "items", "masks", "taken")

    def __init__(self) -> None:
        self.is_open = True
        self.items: list[tuple[int, list[int]]] = []  # matchers and their tokens
        self.taken: Frame | None = None
        self.masks: Frame | None = None


class GrammarProcess:
    """The process of a grammar. A process answers in the order in which it was asked."""

    def __init__(
        self,
        host: GrammarHost,
        number: int,
        end: socket.socket,
        vocabulary: MatcherTokens | None,
        hosted: HostedVocabulary | None,
    ) -> None:
        self._host = host
        self._hosted = hosted  # is not removed before this process ends
        self._number = number
        self._end = end
        self._vocabulary = vocabulary
        self._link = Link(end)
        self._lock = threading.RLock()  # of everything below
        self._asked = itertools.count()
        self._answers: dict[int, Frame] = {}
        self._open: MatcherRound | None = None
        # Nothing else refers to a round once its answers have ended: messages that come for it later are dropped.
        self._rounds: weakref.WeakValueDictionary[int, MatcherRound] = weakref.WeakValueDictionary()
        self._lost: str | None = None
        self.grown_bytes = 0
        self._told_bytes = 0
        self.gone: list[int] = []  # matchers that nothing refers to
        self.matchers = itertools.count()
        weakref.finalize(self, end.close)

    def ask(self, head: dict[str, Any], body: bytes = b"") -> int:
        """Sends a question. Returns its number, for `answer`. Raises GrammarLost."""
        with self._lock:
            self._refuse_lost()
            asked = next(self._asked)
            gone, self.gone = self.gone, []
            try:
                self._end.settimeout(_MOST_WAIT_S)
                self._link.send(
                    {**head, "ask": asked, "gone": gone} if gone else {**head, "ask": asked}, body
                )
            except (LinkBroken, TimeoutError):
                self._lose()
            return asked

    def answer(self, asked: int, timeout_s: float = _MOST_WAIT_S, *, patient: bool = False) -> Frame:
        """Waits for the answer to a question. Raises GrammarLost; with `patient`, TimeoutError instead."""
        with self._lock:
            while asked not in self._answers:
                self._receive(timeout_s, patient=patient)
            found = self._answers.pop(asked)
        self._note_growth(found)
        return found

    def join(self, matcher: int, tokens: list[int]) -> tuple[MatcherRound, int]:
        """Adds a matcher to the open round. Returns the round, and the matcher's index in it. Raises GrammarLost.

        `tokens` may grow while the round is open.
        """
        with self._lock:
            self._refuse_lost()
            if self._open is None:
                self._open = MatcherRound()
            self._open.items.append((matcher, tokens))
            return self._open, len(self._open.items) - 1

    def send(self) -> None:
        """Sends the open round, if there is one. Does not wait. Raises GrammarLost."""
        with self._lock:
            opened, self._open = self._open, None
            if opened is not None:
                opened.is_open = False
                self._rounds[self.ask({"do": "round", "items": opened.items})] = opened

    def taken(self, of: MatcherRound, index: int) -> dict[str, Any]:
        """Waits until the matchers of a round have taken their tokens. Returns one's answer. Raises GrammarLost."""
        with self._lock:
            if of.is_open:
                self.send()
            while of.taken is None:
                self._receive(_MOST_WAIT_S)
        self._note_growth(of.taken)
        return _item(of.taken, index)

    def mask(self, of: MatcherRound, index: int, size: int) -> tuple[dict[str, Any], bytes]:
        """Waits for the masks of a round. Returns one's answer, and its mask of `size` bytes. Raises GrammarLost."""
        with self._lock:
            if of.is_open:
                self.send()
            while of.masks is None:
                self._receive(_MOST_WAIT_S)
        self._note_growth(of.masks)
        return _item(of.masks, index), of.masks.body[index * size : (index + 1) * size]

    def _receive(self, timeout_s: float, *, patient: bool = False) -> None:
        """Receives a message. Raises GrammarLost; with `patient`, TimeoutError instead."""
        self._refuse_lost()
        try:
            self._end.settimeout(timeout_s)
            self._take(self._link.receive())
        except TimeoutError:
            if patient:
                raise
            self._lose()
        except LinkBroken:
            self._lose()

    def _note_growth(self, message: Frame) -> None:
        grown = message.head.get("grown")
        if isinstance(grown, int) and grown > self.grown_bytes + _GROWTH_STEP_BYTES:
            self.grown_bytes = grown
            self._host.grown()

    def compiled(self, head: dict[str, Any], body: bytes, tenant: str) -> Frame:
        """Asks a question that may take long, in turns with others. Raises GrammarLost and CompilerBusy."""
        turns, check = self._host.turns, refuse_gone.get()
        asked = None
        stopped = False
        try:
            with turns.of(tenant, len(body)) as turn:
                while True:
                    with turns.wait(turn):
                        if asked is None:
                            asked = self.ask(head, body)
                        if stopped:
                            self._host.signal(self._number, "go")
                            stopped = False
                        try:
                            return self.answer(asked, TURN_S, patient=True)
                        except TimeoutError:
                            if turns.waiting:
                                self._host.signal(self._number, "stop")
                                stopped = True
                    if check is not None:
                        check()
        except GrammarLost:
            raise
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends the process at once. Its answers fail."""
        self._host.signal(self._number, "kill")

    def close(self) -> None:
        """Closes this end. The process ends when all copies of it are closed."""
        self._end.close()

    def _take(self, message: Frame) -> None:
        head = message.head
        if "encode" in head:
            assert self._vocabulary is not None
            ids = self._vocabulary.encode(message.body)
            self._end.settimeout(_MOST_WAIT_S)
            self._link.send({"ids": ids})
        elif isinstance(asked := head.get("to"), int):
            found = self._rounds.get(asked)
            if found is not None and "masks" in head:
                found.masks = message
            elif found is not None:
                found.taken = message
            elif "items" not in head:
                self._answers[asked] = message

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise GrammarLost(self._lost)

    def _lose(self) -> None:
        """Ends a process that has failed, and raises GrammarLost with the reason."""
        self.kill()
        self._end.close()
        status = self._host.end_of(self._number)
        self._lost = _REASONS.get(status or 0, f"its compiler ended: {_SMALLER}")
        raise GrammarLost(self._lost)


def _item(message: Frame, index: int) -> dict[str, Any]:
    """Returns an item of a message, in which a process that fails may have written anything."""
    items = message.head.get("items")
    found = items[index] if isinstance(items, list) and index < len(items) else None
    return found if isinstance(found, dict) else {"error": "its process answered wrongly"}


def supported_patterns(patterns: Sequence[str]) -> list[bool]:
    """Returns for each pattern whether llguidance can follow it. All are, if a process failed on one of them."""
    if not patterns:
        return []
    with HOST.used():
        process = HOST.fork(None)
        try:
            found = process.compiled({"do": "patterns", "patterns": list(patterns)}, b"", "").head.get(
                "supported"
            )
        except GrammarLost:
            return [True] * len(patterns)  # the compiler fails, too, and says why
        finally:
            process.kill()
    if not isinstance(found, list) or len(found) != len(patterns):
        return [True] * len(patterns)
    return [bool(each) for each in found]


def _folder_of(package: str) -> Path:
    found = find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parents[1]


def _stopped(process: subprocess.Popen[bytes], end: socket.socket) -> None:
    end.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


HOST = GrammarHost()
os.register_at_fork(after_in_child=HOST.forget_after_fork)
