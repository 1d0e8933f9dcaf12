"""The processes in which llguidance compiles and matches the grammars of clients, apart from the server.

llguidance is native code. A hostile grammar can overflow its stack, take gigabytes, or never end; each such fault
must cost the requests with that grammar alone. The server starts one process (`main`), which has llguidance and
the vocabularies and never sees a grammar. It forks a process for each grammar, in which the system's limits hold and
which the server can kill at any moment. `host.py` is the server's side.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from rootstock.text.constraints.frames import Frame, Link, LinkBroken

_REAP_S = 1.0
_KEPT_STATUSES = 256
_PR_SET_PDEATHSIG = 1
_MOST_STACK_BYTES = 8 * 1024**2
_MOST_NEW_BYTES = 384 * 1024**2  # of the address space of one grammar's process
# Of a processor, counted by the system. The server has no clock of its own for them: a busy machine changes nothing.
_MOST_COMPILE_S = 2.0
_MOST_BEGIN_S = 0.5  # the first mask
_MOST_TOKEN_S = 0.08  # a later one, for which all requests wait
# Of a text that is forced only the next token counts. The tokens of 100,000 characters would take long at each token.
_MOST_FORCED_BYTES = 4_096
_MOST_ENCODED = 256
OUT_OF_MEMORY = 3  # exit status
_MOST_WAIT_S = 300.0  # for an answer, by the wall clock: a stopped process does not outlive a killed server
_SIGNALS = {"stop": signal.SIGSTOP, "go": signal.SIGCONT, "kill": signal.SIGKILL}


def main(control_fd: int) -> None:
    """Serves the other end of a socket until it is closed; then kills the processes of all grammars."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server drains first, and closes the socket at its end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _Parent(socket.socket(fileno=control_fd)).run()


class _Parent:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._link = Link(control, exactly=True)
        self._tokenizers: dict[int, LLTokenizer] = {}
        self._processes: dict[int, int] = {}  # pids by the server's numbers
        self._ended: OrderedDict[int, int] = OrderedDict()  # statuses of the last processes that ended

    def run(self) -> None:
        try:
            while True:
                wait_s = _REAP_S if self._processes else None
                ready = select.select([self._control], [], [], wait_s)[0]
                self._reap()
                if ready:
                    self._serve(self._link.receive())
        except LinkBroken:
            pass
        finally:
            for pid in self._processes.values():
                os.kill(pid, signal.SIGKILL)
            for pid in self._processes.values():
                os.waitpid(pid, 0)

    def _serve(self, message: Frame) -> None:
        head = message.head
        match head["do"]:
            case "add":
                self._tokenizers[head["vocabulary"]] = _tokenizer(head, message.body)
                gc.collect()
                gc.freeze()  # collections of the forked processes leave these pages shared
            case "forget":
                self._tokenizers.pop(head["vocabulary"], None)
            case "fork":
                descriptors = socket.recv_fds(self._control, 1, 1)[1]
                self._fork(head["process"], descriptors[0], self._tokenizers.get(head["vocabulary"]))
            case "end of":
                self._link.send({"status": self._end_of(head["process"])})
            case "signal":
                pid = self._processes.get(head["process"])
                if pid is not None:
                    os.kill(pid, _SIGNALS[head["signal"]])

    def _fork(self, number: int, descriptor: int, tokenizer: LLTokenizer | None) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = -1  # the server sees the end of the socket
        if pid == 0:
            try:
                self._control.close()
                _limit(parent)
                _HostedGrammar(Link(socket.socket(fileno=descriptor)), tokenizer).run()
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            finally:
                os._exit(0)
        os.close(descriptor)
        if pid > 0:
            self._processes[number] = pid

    def _reap(self) -> None:
        for number, pid in list(self._processes.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._end(number, status)

    def _end(self, number: int, status: int) -> None:
        del self._processes[number]
        self._ended[number] = os.waitstatus_to_exitcode(status)
        while len(self._ended) > _KEPT_STATUSES:
            self._ended.popitem(last=False)

    def _end_of(self, number: int) -> int | None:
        """Returns how a process ended whose socket is closed: its exit status, or minus a signal."""
        pid = self._processes.get(number)
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
            self._end(number, os.waitpid(pid, 0)[1])
        return self._ended.get(number)


def _limit(parent: int) -> None:
    """Sets the system's limits of a grammar's process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(0)
        # Without this a message to it would interrupt the server's step until all masks are computed.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        _lower(resource.RLIMIT_AS, pages * mmap.PAGESIZE + _MOST_NEW_BYTES)
    _lower(resource.RLIMIT_STACK, _MOST_STACK_BYTES)
    # A fault of the library writes to the standard error, once for each hostile request.
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    _lower(resource.RLIMIT_FSIZE, 0)


def _lower(which: int, most: int) -> None:
    soft, hard = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY or soft > most:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some
            resource.setrlimit(which, (most, hard))


# ---- the vocabulary


class _Tokens:
    """A vocabulary as llguidance reads it. The server tokenizes: its tokenizer needs libraries of its own."""

    bos_token_id = None
    asks: _HostedGrammar | None = None  # in the process of a grammar

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.eos_token_id = end
        self.tokens = tokens
        self.special_token_ids = special

    def __call__(self, text: bytes) -> list[int]:
        return [] if _Tokens.asks is None else _Tokens.asks.encode(text)


def _tokenizer(head: dict[str, Any], body: bytes) -> LLTokenizer:
    lengths = array.array("I")
    lengths.frombytes(body[: 4 * head["tokens"]])
    pieces, at = [], 4 * head["tokens"]
    for length in lengths:
        pieces.append(body[at : at + length])
        at += length
    end = head["tokens"] - 1
    tokens = _Tokens(pieces, head["special"], end)
    wrapper = TokenizerWrapper(tokens)
    tokenizer = LLTokenizer(wrapper, n_vocab=len(pieces), eos_token=end)
    wrapper.tokens = tokens.tokens = []  # the tokenizer has copied them
    return tokenizer


# ---- a grammar


def parser_limits() -> LLParserLimits:
    """Returns limits of one grammar: some 20 ms of work to begin, 10 ms for each token, 40 MB of lexer states.

    An object may have 1,000 properties that are not required: each takes four items of a row.
    """
    return LLParserLimits(
        max_items_in_row=4_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


class _HostedGrammar:
    """A grammar and the matchers of all answers that follow it, by the server's numbers."""

    def __init__(self, link: Link, tokenizer: LLTokenizer | None) -> None:
        self._link = link
        self._tokenizer = tokenizer
        self._waiting: deque[Frame] = deque()
        self._first: LLMatcher | None = None  # at the beginning of an answer; never advanced
        self._matchers: dict[int, LLMatcher] = {}
        self._rss_at_start = _rss_bytes()
        self._words = array.array("I")
        self._encoded: dict[bytes, list[int]] = {}  # texts that the grammar forces again and again
        _Tokens.asks = self

    def run(self) -> None:
        with contextlib.suppress(LinkBroken):
            while True:
                message = self._waiting.popleft() if self._waiting else self._link.receive()
                costly = message.head["do"] in ("compile", "patterns")
                # The signals of these timers end the process, also in the middle of native code.
                signal.setitimer(signal.ITIMER_PROF, _MOST_COMPILE_S if costly else _MOST_TOKEN_S)
                if costly:  # only then the server stops it for a while
                    signal.setitimer(signal.ITIMER_REAL, _MOST_WAIT_S)
                if message.head["do"] == "round":
                    self._round(message)
                    continue
                head, body = self._answer(message)
                if costly:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                self._send(message, head, body)

    def _send(self, message: Frame, head: dict[str, Any], body: bytes = b"") -> None:
        grown = max(0, _rss_bytes() - self._rss_at_start)
        self._link.send({"to": message.head["ask"], "grown": grown, **head}, body)

    def _round(self, message: Frame) -> None:
        """Has matchers take tokens, and sends the results. Then computes the masks after them, while the server
        goes on with its step."""
        self._forget(message.head.get("gone", ()))
        matchers, taken = [], []
        for number, tokens in message.head["items"]:
            signal.setitimer(signal.ITIMER_PROF, _MOST_TOKEN_S)
            matcher = self._matcher(number)
            for token in tokens:
                if not matcher.consume_token(token):
                    break
            matchers.append(matcher)
            taken.append({"stopped": matcher.is_stopped(), **_error_of(matcher)})
        self._send(message, {"items": taken})
        masks = []
        for matcher in matchers:
            signal.setitimer(signal.ITIMER_PROF, _MOST_TOKEN_S)
            masks.append(self._mask(matcher))
        heads, bodies = [head for head, _ in masks], [body for _, body in masks]
        self._send(message, {"masks": True, "items": heads}, b"".join(bodies))

    def encode(self, text: bytes) -> list[int]:
        """Has the server tokenize a text, or its beginning. Other requests may arrive before the answer."""
        end = _MOST_FORCED_BYTES
        while end < len(text) and text[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
        known = self._encoded.get(text[:end])
        if known is not None:
            return known
        self._link.send({"encode": True}, text[:end])
        while True:
            message = self._link.receive()
            if "ids" in message.head:
                ids: list[int] = message.head["ids"]
                if len(self._encoded) < _MOST_ENCODED:
                    self._encoded[text[:end]] = ids
                return ids
            self._waiting.append(message)

    def _answer(self, message: Frame) -> tuple[dict[str, Any], bytes]:
        head = message.head
        self._forget(head.get("gone", ()))
        match head["do"]:
            case "compile":
                return self._compile(head["kind"], message.body.decode())
            case "patterns":
                return {"supported": list(map(_is_supported, head["patterns"]))}, b""
            case "agree":
                return {"count": self._matcher(head["matcher"]).validate_tokens(head["tokens"])}, b""
            case other:
                raise AssertionError(other)

    def _forget(self, gone: Iterable[int]) -> None:
        for number in gone:
            self._matchers.pop(number, None)

    def _compile(self, kind: str, text: str) -> tuple[dict[str, Any], bytes]:
        try:
            match kind:
                case "json":
                    text = LLMatcher.grammar_from_json_schema(text)
                case "regex":
                    text = LLMatcher.grammar_from_regex(text)
        except ValueError as error:  # a number that llguidance cannot read
            return {"unreadable": str(error)}, b""
        assert self._tokenizer is not None
        self._first = LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())
        if self._first.is_error():
            return _error_of(self._first), b""
        compiled_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, _MOST_BEGIN_S)
        head, body = self._mask(self._first)
        return {"compiled_s": compiled_s, **head}, body

    def _matcher(self, number: int) -> LLMatcher:
        found = self._matchers.get(number)
        if found is None:
            assert self._first is not None
            # Copies share the states of the lexer, which only grow.
            found = self._matchers[number] = self._first.deep_copy()
        return found

    def _mask(self, matcher: LLMatcher) -> tuple[dict[str, Any], bytes]:
        assert self._tokenizer is not None
        words = (self._tokenizer.vocab_size + 31) // 32
        if matcher.is_error():
            return _error_of(matcher), bytes(4 * words)
        if len(self._words) != words:
            self._words = array.array("I", bytes(4 * words))
        address, _ = self._words.buffer_info()
        matcher.unsafe_compute_mask_ptr(address, 4 * words)
        return _error_of(matcher), self._words.tobytes()


def _error_of(matcher: LLMatcher) -> dict[str, Any]:
    return {"error": matcher.get_error()} if matcher.is_error() else {}


def _is_supported(pattern: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(grammar, limits=parser_limits())


def _rss_bytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
