"""Truth of an answer: what the server says to the same prompt when its cache can give nothing.

A reference is asked for *after* the requests of a case, in a way that finds nothing in the cache, so that the case
itself runs as clients would run it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock.conformance.server import Answer, AskFailed, Json, Server
from rootstock.conformance.texts import words

LEAST_TOLERANCE, MOST_TOLERANCE = 1e-3, 0.25  # nats
NOISE_TIMES = 10.0
LEAST_LOGPROB = -8.0  # rounding of rarer tokens says nothing
EXACT_DRAWS = 0.01  # nats of tolerance up to which rounding hardly ever changes what a seed draws
NO_NUMBER = 9999.0  # nats between a number and NaN or infinity
FLOODS = (4, 8, 16, 32, 64)  # requests after which a server may have forgotten
COLD_TRIES = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference of an answer from the reference."""

    position: int  # token of the answer
    what: str
    nats: float  # largest difference of a log-probability up to there


def compared(
    cold: Answer, got: Answer, tolerance: float, *, in_one_form: bool = True, drawn: bool = False
) -> tuple[Difference | None, float]:
    """Compares an answer with the reference. Returns the difference, and the largest one of a log-probability.

    Where two tokens are as likely as each other within twice the tolerance, either may be chosen: the comparison
    ends there. So it does at any other token that was `drawn` with a seed from numbers that are rounded much.
    `in_one_form`: both were asked for in the same way, so that equal tokens give equal texts and calls.
    """
    may_draw_another = drawn and tolerance > EXACT_DRAWS
    worst = 0.0
    for i, (mine, its) in enumerate(zip(cold.scored, got.scored, strict=False)):
        for token in mine.top.keys() & its.top.keys():
            if not mine.top[token] < LEAST_LOGPROB:  # NaN is compared
                worst = max(worst, _apart(mine.top[token], its.top[token]))
        if mine.token == its.token:
            worst = max(worst, _apart(mine.logprob, its.logprob))
        elif not may_draw_another and not _is_tie(mine.top, mine.token, its.token, 2 * tolerance):
            return Difference(i, f"{its.token!r} instead of {mine.token!r}", worst), worst
        if worst > tolerance:
            return Difference(i, f"log-probabilities differ by {worst:.4f} nats", worst), worst
        if mine.token != its.token:
            return None, worst
    shorter, longer = sorted((cold.scored, got.scored), key=len)
    if cold.scored and got.scored:
        if len(shorter) < len(longer):
            if longer[len(shorter)].logprob <= math.log(0.5) + tolerance:
                return None, worst
            return Difference(len(shorter), "one answer ends here and the other goes on", worst), worst
        if not in_one_form:
            return None, worst
    if cold.said != got.said:
        return Difference(len(shorter), f"{_brief(got)} instead of {_brief(cold)}", worst), worst
    return None, worst


def _apart(one: float, other: float) -> float:
    """Returns the difference of two log-probabilities."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other)
    return difference if difference < NO_NUMBER else NO_NUMBER  # of NaN, too


def _is_tie(top: Mapping[str, float], first: str, second: str, tolerance: float) -> bool:
    return first in top and second in top and abs(top[first] - top[second]) <= tolerance


def _brief(answer: Answer) -> str:
    return repr((answer.text or answer.reasoning or str(answer.calls))[:60])


def key_of(body: Json) -> str:
    """Returns a key that equal bodies share."""
    return json.dumps(body, sort_keys=True)


class Ledger:
    """Prompts that were sent, by salt: the most that a later prompt can share with them."""

    def __init__(self) -> None:
        self._sent: dict[str, list[tuple[NDArray[np.int64], int]]] = {}
        self._lock = threading.Lock()

    def add(self, salt: str, ids: Sequence[int], answer_tokens: int) -> None:
        with self._lock:
            self._sent.setdefault(salt, []).append((np.array(ids, np.int64), answer_tokens))

    def shared(self, salt: str | None, ids: Sequence[int]) -> int:
        """Returns how many first tokens of a prompt were sent before, with this salt or with any. An answer continues
        its prompt."""
        prompt, most = np.array(ids, np.int64), 0
        with self._lock:
            salts = self._sent if salt is None else (salt,)
            sent = [each for of in salts for each in self._sent.get(of, ())]
        for other, answer_tokens in sent:
            length = min(len(prompt), len(other))
            differs = np.flatnonzero(prompt[:length] != other[:length])
            agreed = int(differs[0]) if len(differs) else length
            if agreed == len(other):
                agreed = min(len(prompt), agreed + answer_tokens)
            most = max(most, agreed)
        return most


class Truth:
    """References of one server, each asked for once."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._known: dict[str, Answer | None] = {}
        self._flood = 0
        self._head = 0  # tokens that any prompt finds: the template's head
        self.ledger = Ledger()

    def find_way(self, body: Json, new: Json) -> None:
        """Finds out how a prompt that was sent before finds nothing in this server's cache.

        `new` is a prompt that shares only the template's head with `body`.
        """
        can = self._server.can
        for each in (body, new):
            self._note(each)
        self._server.ask(body)
        warm, other = self._server.ask(body)[0], self._server.ask(new)[0]
        self._head = other.cached_tokens or 0
        can.says_cached = can.says_cached or bool(warm.cached_tokens)  # some leave out a count of 0
        if not warm.cached_tokens or warm.cached_tokens <= self._head:
            return
        for way in ("cache_salt", "cache_prompt"):
            can.cold_by = way
            if self._is_cold(body):
                return
        can.cold_by = "flood"
        for self._flood in FLOODS:
            if self._is_cold(body):
                return
        can.cold_by = ""

    def _is_cold(self, body: Json) -> bool:
        try:
            return self._found_nothing(self._ask_cold(body)[0])
        except AskFailed:
            return False

    def _found_nothing(self, answer: Answer) -> bool:
        return answer.cached_tokens is not None and answer.cached_tokens <= self._head

    def _ask_cold(self, body: Json, *, stream: bool = False) -> list[Answer]:
        way = self._server.can.cold_by
        if way == "flood":
            self._send_others()
        if way != "cache_salt":
            self._note(body)
        return self._server.ask({**body, **self._cold_fields(way)}, stream=stream)

    def _send_others(self) -> None:
        """Sends other prompts, until those before are forgotten."""
        for _ in range(self._flood):
            other = {"messages": [{"role": "user", "content": words(self._rng, 8)}], "max_tokens": 1}
            self._note(other)
            with contextlib.suppress(AskFailed):
                self._server.ask(other)

    def ask_in_rounds(self, bodies: Sequence[Sequence[Json]]) -> None:
        """Asks for the references of several cases at once, where a flood comes before each.

        Prompts of different cases share nothing, so that one flood serves a prompt of each.
        """
        if self._server.can.cold_by != "flood":
            return
        for of_round in itertools.zip_longest(*bodies):
            self._send_others()
            for body in of_round:
                if body is None:
                    continue
                self._note(body)
                with contextlib.suppress(AskFailed):
                    answer = self._server.ask(body)[0]
                    if self._found_nothing(answer):
                        self._known[key_of(body)] = answer

    def _note(self, body: Json) -> None:
        """Notes a prompt that later ones may find."""
        ids = self._server.tokens_of(body)
        if ids is not None:
            self.ledger.add("", ids, int(body.get("max_tokens", 0)))

    def _cold_fields(self, way: str) -> Json:
        if way == "cache_salt":
            return {"cache_salt": uuid.uuid4().hex}
        return {"cache_prompt": False} if way == "cache_prompt" else {}

    def of(self, body: Json) -> Answer | None:
        """Returns the reference of a prompt; None if none can be had."""
        key = key_of(body)
        if key not in self._known:
            self._known[key] = self._asked_for(body)
        return self._known[key]

    def of_ids(self, body: Json, ids: Sequence[int]) -> Answer | None:
        """Returns the reference of a chat whose prompt had these token ids; None if none can be had, or if
        the usual reference has the same ones.

        A server that keeps the sampled tokens of an answer tokenizes a history otherwise than one that does not. Both
        must stand for the same text.
        """
        usual = self._server.tokens_of({**body, **self._cold_fields(self._server.can.cold_by)})
        if usual == ids:
            return None
        text = self._server.text_of(ids)
        if usual is None or text is None or self._server.text_of(usual) != text:
            return None
        dropped = ("messages", "tools", "tool_choice")
        return self.of(
            {name: value for name, value in body.items() if name not in dropped} | {"prompt": list(ids)}
        )

    def first(self, body: Json, answer: Answer) -> Answer | None:
        """Returns the first answer to a prompt, where a server has no way to compute it anew."""
        if self._server.can.cold_by:
            return None
        key = key_of(body)
        self._known[key] = self._known[key] or answer
        return self._known[key]

    def refuses(self, body: Json, *, stream: bool) -> bool:
        """Returns whether the server refuses a prompt where nothing is cached, too."""
        if not self._server.can.cold_by:
            return False
        try:
            self._ask_cold(_unsalted(body), stream=stream)
        except AskFailed as error:
            return error.status is not None
        return False

    def _asked_for(self, body: Json) -> Answer | None:
        if not self._server.can.cold_by:
            return None
        body = _unsalted(body)
        for _ in range(COLD_TRIES):
            try:
                answer = self._ask_cold(body)[0]
            except AskFailed:
                return None
            if self._found_nothing(answer):
                return answer
        return None

    def noise(self, bodies: Sequence[Json]) -> float:
        """Returns the largest difference between answers that were computed alone and beside others, in nats.

        Both find nothing in the cache, or as much of the same prompts, so that only the rounding differs.
        """

        is_cold = self._server.can.cold_by in ("cache_salt", "cache_prompt")

        def ask(body: Json) -> Answer:
            if is_cold:
                return self._ask_cold(body)[0]
            self._note(body)
            return self._server.ask(body)[0]

        for body in () if is_cold else bodies:
            ask(body)
        alone = [ask(body) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as threads:
            beside = list(threads.map(ask, bodies))
        return max(_distances(alone, beside), default=0.0)


def _unsalted(body: Json) -> Json:
    return {name: value for name, value in body.items() if name != "cache_salt"}


def _distances(answers: Sequence[Answer], others: Sequence[Answer]) -> Iterator[float]:
    for one, other in zip(answers, others, strict=True):
        yield compared(one, other, MOST_TOLERANCE)[1]


def tolerance_of(noise: float) -> float:
    """Returns the difference of log-probabilities that counts as rounding, in nats."""
    return min(MOST_TOLERANCE, max(LEAST_TOLERANCE, NOISE_TIMES * noise))
