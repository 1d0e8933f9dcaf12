"""J1: hostile bodies beside 8 streams: the server lives, answers each, and gives its memory back.

`rootstock serve` runs a tiny model in a process of its own, with 8 streams that never stop. Beside them clients send
bodies that once stopped or slowed a server (schemas and grammars that do not compile, thousands of messages that are
joined, stored responses that short requests refer to), and at least 200 that are drawn from generators: one after the
other, and each eighth time eight at once. Each has to be refused or answered.

A stream's gap is the time between two of its events. Each of its tokens is an event: tokens that are a part of a
character are not sampled. The longest gap beside bodies is compared with the longest of a quiet time of the same run.
At the end SIGTERM comes beside streams and hostile bodies.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from beside import Health, beside
from common import argument_parser, at_least, at_most, conclude, exactly
from e1_long_bodies import STREAMS, Server, Streams
from peers import PeerProcess, rootstock_server
from tokenizers import Tokenizer

from checkpoints import save_chat
from hostile_bodies import CHAT, RESPONSES, encoded, hostile_bodies
from hostile_constraints import hostile_constraints

SHOW = "J1"
QUIET_S = 15.0
DRAIN_S = 5.0
AT_ONCE = 8
WARM_UP = 64  # bodies before the memory is measured
KEPT_GRAMMARS = 24  # by a server, for later requests with them
SETTLE_S = 60.0  # for memory to be given back
MOST_ANSWER_S = 300.0
CHUNK_TOKENS = 64  # of a step: long chunks are gaps, too, and no fault of a body


@dataclass(frozen=True)
class Body:
    name: str
    path: str
    content: bytes | None  # None: a GET


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--bodies", type=int, default=200, help="that are drawn from generators")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--quiet", type=float, default=QUIET_S, help="seconds of quiet time")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = save_chat(Path(folder) / "model", "full")
        serve = (
            "--chunk-tokens",
            str(CHUNK_TOKENS),
            "--drain-timeout",
            f"{DRAIN_S:g}s",
            "--kv-budget",
            "256MiB",
        )
        serve += ("--answer-memory", "4MiB")  # bounded memory that fills would count as kept
        serve += ("--responses-file", str(Path(folder) / "responses.sqlite"))
        with rootstock_server(model, *serve) as process:
            figures = measure(process, given.bodies, given.seed, given.quiet, silent_tokens(model))
    bars = {
        "bodies": at_least(given.bodies),
        "not_refused_or_answered": exactly(0),
        "lives": exactly(True),
        "gap_over_quiet_ms": at_most(100),
        "worst_livez_ms": at_most(200),
        "kept_mb": at_most(100),
        "exit_status": exactly(0),
        "exit_over_drain_s": at_most(2),
        "children_left": exactly(0),
    }
    conclude(SHOW, figures, bars)


# ---- bodies


def known_bodies() -> Iterator[Body]:
    """Yields the bodies that were found once. Those of A1 are the first ones of their generator."""
    for name, fields in itertools.islice(hostile_constraints(1), 6):
        yield constrained(name, fields)
    said = {"role": "system", "content": "word " * 200}
    for count, route in ((16_000, CHAT), (16_000, "/v1/messages"), (13_000, "/v1/messages/count_tokens")):
        asked = {"messages": [*[said] * (count - 800), {"role": "user", "content": "x"}], "max_tokens": 1}
        yield Body(f"{count:,} system messages to {route}", route, encoded(asked))
    users = [{"role": "user", "content": "word " * 200}] * 15_000
    yield Body("15,000 items", RESPONSES, encoded({"input": users, "max_output_tokens": 1}))


def constrained(name: str, fields: dict[str, Any]) -> Body:
    asked = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 4, **fields}
    return Body(f"constraint: {name}", CHAT, encoded(asked))


def drawn_bodies(count: int, seed: int) -> list[Body]:
    """Returns bodies of both generators, in a random order. They are made before: encoding would delay the polls."""
    of_constraints = (constrained(name, fields) for name, fields in hostile_constraints(seed))
    of_bodies = (Body(each.name, each.path, each.content) for each in hostile_bodies(seed))
    drawn = [*itertools.islice(of_constraints, count // 3)]
    drawn += itertools.islice(of_bodies, count - len(drawn))
    random.Random(seed).shuffle(drawn)
    return drawn


def stored_bodies(server: Server) -> Iterator[list[Body]]:
    """Stores responses with much that no prompt shows, and yields requests that refer to them, several at once."""
    zeros = "0" * 15_000_000
    message = {"role": "user", "content": "x"}
    objects = [{} for _ in range(100_000)]
    ids, items = [], []
    for extra in (
        [{"type": "ghost_snapshot", "ghost_commit": zeros}],
        [{**message, "extra": objects}],
        [{"type": "web_search_call", "action": {"query": zeros}}],
        [{"role": "user", "content": "word " * 3_000}],
    ):
        status, answer = server.ask(
            "POST",
            RESPONSES,
            encoded({"input": [message, *extra], "max_output_tokens": 16, "ignore_eos": True}),
        )
        assert status == 200, answer
        ids.append(answer["id"])
        items += [item["id"] for item in answer["output"]]
    yield [
        Body("a short request to a long history", RESPONSES, short_request(id))
        for id in ids
        for _ in range(6)
    ]
    named = [{"type": "item_reference", "id": items[0]}] * 16_000
    yield [Body("references to one item", RESPONSES, encoded({"input": named, "max_output_tokens": 1}))] * 3
    yield [Body("a stored response", f"{RESPONSES}/{id}", None) for id in ids for _ in range(4)]
    yield [Body("stored items", f"{RESPONSES}/{id}/input_items", None) for id in ids for _ in range(4)]


def short_request(id: str) -> bytes:
    return encoded({"previous_response_id": id, "input": "more", "max_output_tokens": 1})


# ---- the server


class Family:
    """The processes of a server: itself and those below it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def pids(self) -> list[int]:
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parents[int(entry.name)] = int(
                        entry.joinpath("stat").read_text().rpartition(")")[2].split()[1]
                    )
        found = [self._pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def rss_mb(self) -> float:
        """Returns the resident memory of the server alone: cheap enough for a measurement of gaps."""
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def resident_mb(self) -> dict[str, float]:
        """Returns the resident memory of each process. Pages that several have are divided among them."""
        found: dict[str, float] = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
                found[f"process {pid}"] = round(kilobytes * 1024 / 1e6, 1)
        return found


def uncached_mb(server: Server, family: Family) -> float:
    """Returns the resident memory of the server and its children, without the KV cache's."""
    cached = float(server.ask("GET", "/v1/cache/stats")[1]["cache"]["resident_bytes"])
    return sum(family.resident_mb().values()) - cached / 1e6


class Answers:
    """The outcomes of bodies."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.statuses: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest: list[tuple[float, str]] = []

    def send(self, body: Body) -> None:
        """Sends a body and reads its answer. Never raises."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection(self._address, timeout=MOST_ANSWER_S)
        try:
            # A body that is too large is refused before all of it is sent.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(
                    "GET" if body.content is None else "POST",
                    body.path,
                    body.content,
                    {"Content-Type": "application/json"},
                )
            answer = connection.getresponse()
            text = answer.read()
            status, is_sound = str(answer.status), answer.status == 200 or 400 <= answer.status < 500
            detail = text[:300].decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            status, is_sound, detail = type(error).__name__, False, str(error)
        finally:
            connection.close()
        seconds = time.perf_counter() - began
        self.statuses[status] += 1
        self.slowest = sorted([*self.slowest, (round(seconds, 2), body.name)], reverse=True)[:8]
        if not is_sound:
            self.wrong.append(f"{body.name}: {status} {detail}")
            print(f"WRONG {self.wrong[-1]}", flush=True)


class ShortRequests:
    """A client whose short requests come beside all others."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.slowest_s = 0.0

    def run(self, over: threading.Event) -> None:
        asked = {"messages": [{"role": "user", "content": "Yes?"}], "max_tokens": 1}
        while not over.wait(0.5):
            began = time.perf_counter()
            self._answers.send(Body("a short request", CHAT, encoded(asked)))
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began)


def silent_tokens(model: Path) -> list[int]:
    """Returns the tokens that have no text alone: control tokens, and bytes that are a part of a character."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = range(tokenizer.get_vocab_size())
    return [id for id in ids if tokenizer.decode([id]) in ("", "\N{REPLACEMENT CHARACTER}")]


@contextlib.contextmanager
def load(server: Server, silent: Sequence[int]) -> Iterator[tuple[Streams, Health]]:
    """Runs the streams and a poll of /livez until the end of the block."""
    streams, probe = Streams(server, silent), Health(server.connect(), 0.02, "/livez")
    with beside(probe.run, *(partial(streams.run, index) for index in range(STREAMS))):
        streams.wait_until_begun()
        yield streams, probe


def measure(
    process: PeerProcess, count: int, seed: int, quiet_s: float, silent: Sequence[int]
) -> dict[str, Any]:
    server, family = Server(process), Family(process.pid)
    address = process.url.removeprefix("http://")
    known, drawn = list(known_bodies()), drawn_bodies(count, seed)
    print(
        f"{len(known) + len(drawn)} bodies, {sum(len(b.content or b'') for b in known + drawn) / 1e6:.0f} MB"
    )
    warm_up(Answers(address), server, silent)
    before_mb, processes_before = uncached_mb(server, family), family.resident_mb()
    answers, others = Answers(address), ShortRequests(Answers(address))
    worst: dict[str, float] = {}
    peak_mb = before_mb
    with load(server, silent) as (streams, probe), beside(others.run):
        streams.gaps_ms()
        time.sleep(quiet_s)
        quiet = streams.gaps_ms()
        quiet_livez_ms = probe.longest_ms

        def timed(name: str, bodies: Sequence[Body]) -> None:
            nonlocal peak_mb
            streams.gaps_ms()
            with ThreadPoolExecutor(len(bodies)) as threads:
                list(threads.map(answers.send, bodies))
            time.sleep(0.1)
            worst[name] = max(worst.get(name, 0.0), max(streams.gaps_ms(), default=0.0))
            peak_mb = max(peak_mb, family.rss_mb())
            print(f"{name}: longest gap {worst[name]:.0f} ms", flush=True)

        for body in known:
            timed(body.name, [body])
        for group in stored_bodies(server):
            timed(f"{len(group)} × {group[0].name}", group)
        left = list(drawn)
        for turn in itertools.count(1):
            if not left:
                break
            taken = [left.pop() for _ in range(min(len(left), AT_ONCE if turn % AT_ONCE == 0 else 1))]
            timed(" + ".join(body.name for body in taken), taken)
    lives = server.ask("GET", "/health")[1]["alive"]
    kept_mb = settled_mb(server, family, before_mb) - before_mb
    figures = {
        "bodies": len(drawn),
        "statuses": dict(answers.statuses),
        "not_refused_or_answered": len(answers.wrong),
        "wrong": answers.wrong[:8],
        "lives": lives,
        "quiet_gap_ms": round(max(quiet), 1),
        "worst_gap_ms": round(max(worst.values()), 1),
        "gap_over_quiet_ms": round(max(worst.values()) - max(quiet), 1),
        "worst_gaps": sorted(((round(gap), name[:120]) for name, gap in worst.items()), reverse=True)[:8],
        "worst_livez_ms": round(probe.longest_ms, 1),
        "quiet_livez_ms": round(quiet_livez_ms, 1),
        "slowest_s": answers.slowest,
        "slowest_short_request_s": round(others.slowest_s, 2),
        "processes_before_mb": processes_before,
        "processes_after_mb": family.resident_mb(),
        "before_mb": round(before_mb),
        "peak_mb": round(peak_mb),
        "kept_mb": round(kept_mb, 1),
    }
    return figures | ended(process, server, family, known)


def warm_up(answers: Answers, server: Server, silent: Sequence[int]) -> None:
    """Sends bodies of each kind before the memory is measured: first uses allocate, and bounded memories fill."""
    for body in drawn_bodies(WARM_UP, seed=0):
        answers.send(body)
    for number in range(KEPT_GRAMMARS):
        answers.send(constrained("warm", {"guided_regex": f"warm{number}[ab]*"}))
    prompt = {"prompt": list(range(10, 500)) * 32, "max_tokens": 1}
    answers.send(Body("the longest prompt", "/v1/completions", encoded(prompt)))
    with load(server, silent):
        time.sleep(2)


def settled_mb(server: Server, family: Family, before_mb: float) -> float:
    """Returns the memory when it is back, or after a time."""
    until = time.monotonic() + SETTLE_S
    while True:
        found = uncached_mb(server, family)
        if found <= before_mb + 50 or time.monotonic() > until:
            return found
        time.sleep(1)


def ended(process: PeerProcess, server: Server, family: Family, bodies: Sequence[Body]) -> dict[str, Any]:
    """Sends SIGTERM beside streams and hostile bodies, and measures how long the server takes to end."""
    cut = Answers(process.url.removeprefix("http://"))  # bodies that the end cuts off: their outcome is free
    over = threading.Event()
    threads = [threading.Thread(target=cut.send, args=(body,), daemon=True) for body in bodies]
    streams = Streams(server)
    for index in range(STREAMS):
        threads.append(threading.Thread(target=until_cut, args=(streams, index, over), daemon=True))
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    below = family.pids()
    began = time.perf_counter()
    os.kill(process.pid, signal.SIGTERM)
    status = process.wait(DRAIN_S + 60)
    seconds = time.perf_counter() - began
    over.set()
    for thread in threads:
        thread.join(30)
    left = [pid for pid in below[1:] if Path(f"/proc/{pid}").exists()]
    return {
        "exit_status": status,
        "exit_s": round(seconds, 2),
        "exit_over_drain_s": round(seconds - DRAIN_S, 2),
        "children_left": len(left),
    }


def until_cut(streams: Streams, index: int, over: threading.Event) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException, AssertionError, json.JSONDecodeError):
        streams.run(index, over)


if __name__ == "__main__":
    main()
