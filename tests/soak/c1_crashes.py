"""C1: `kill -9` at random instants under load, each followed by a restart: no wrong token, no lost record.

A child process runs an engine on a tiny float32 model with little memory, so that it evicts all the time, over a disk
tier that is soon full as well; six conversations that share their beginnings grow at once. The child reports through
a pipe the records that were acknowledged as stored, those about to be evicted from the disk, and each answer. It is
killed at a random instant. Then this process opens the directory and verifies that all acknowledged records are
there, and an engine that starts there continues the conversations. Its answers, and those of the child, are compared
with those of the same model without any cache.

Half of the rounds are of full attention, the others of recurrent states or sliding windows beside it; half store when
memory evicts, the others as blocks are published. Each of these has a directory of its own, which it keeps from kill
to kill. The system's cache of files survives a kill. tests/faults/test_crashes.py tests power cuts call by call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from common import argument_parser, at_least, conclude, exactly

from asking import Answer, Asker, engine_on, some_tokens
from checkpoints import save_chat
from rootstock.cache.keys import RecordKey
from rootstock.cache.types import Tokens
from rootstock.config import TierConfig
from rootstock.engine.build import Assembly
from rootstock.tiers.base import AlreadyStored, Ready, Record, Stored, StoreOutcome
from rootstock.tiers.disk.index import Index, IndexRow
from rootstock.tiers.disk.record_reads import RecordLocation
from rootstock.tiers.disk.tier import DiskTier

# With the larger cap several records make a group that is synced and committed at once; with the smaller one each is
# its own, and the disk is soon full.
CAP_BYTES = {"through": 16 * 2**20, "back": 4 * 2**20}
BUDGET_BYTES = {"full": 900_000, "states": 500_000, "windows": 500_000}  # of two or three conversations
ROUNDS = [
    *(("full", "through"), ("states", "through"), ("full", "back"), ("states", "back")),
    *(("full", "through"), ("windows", "through"), ("full", "back"), ("windows", "back")),
]
CONVERSATIONS = 6
ANSWER = 6  # tokens
LONGEST = 280  # tokens of a conversation, which then begins anew
EARLIEST_S, LATEST_S = 0.05, 1.5
COMPARED = 16  # answers of a child, drawn at random
CONTINUED = 8


# ------------------------------------------------------------------------------------------- watching a tier


@dataclass
class Book:
    """Records that a directory must hold."""

    promised: set[RecordKey] = field(default_factory=set)
    stored: int = 0
    evicted: int = 0
    within_a_store: bool = False

    def note(self, event: str, keys: Sequence[RecordKey]) -> None:
        match event:
            case "begin":
                self.within_a_store = True
            case "end":
                self.within_a_store = False
            case "stored":
                self.stored += len(keys)
                self.promised.update(keys)
            case "there":
                self.promised.update(keys)
            case "evicting":
                self.evicted += len(keys)
                self.promised.difference_update(keys)


Note = Callable[[str, Sequence[RecordKey]], None]


@contextlib.contextmanager
def watched(note: Note) -> Iterator[None]:
    """Notes the stores of every tier of this process when they return, and evictions before they happen."""
    store, replace = DiskTier.store, Index.replace
    going: set[RecordKey] = set()  # during the store that is under way

    def telling_store(tier: DiskTier, records: Sequence[Record]) -> list[StoreOutcome]:
        note("begin", ())
        going.clear()
        outcomes = store(tier, records)
        pairs = list(zip((record.identity.key for record in records), outcomes, strict=True))
        kept = [(key, outcome) for key, outcome in pairs if key not in going]
        note("stored", [key for key, outcome in kept if isinstance(outcome, Stored)])
        note("there", [key for key, outcome in kept if isinstance(outcome, AlreadyStored)])
        note("end", ())
        return outcomes

    def telling_replace(
        index: Index, lost: Sequence[RecordKey], moves: Sequence[tuple[IndexRow, RecordLocation]]
    ) -> None:
        going.update(lost)
        note("evicting", lost)
        replace(index, lost, moves)

    DiskTier.store, Index.replace = telling_store, telling_replace  # type: ignore[method-assign]
    try:
        yield
    finally:
        DiskTier.store, Index.replace = store, replace  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------ an engine


def serving(model: Path, folder: Path, write: str) -> Assembly:
    tier = TierConfig(disk_dir=folder, disk_budget_bytes=CAP_BYTES[write], disk_write=write)
    return engine_on(model, BUDGET_BYTES[model.name], tier, max_batch=8, chunk_tokens=128)


HEADS = [some_tokens(random.Random(i), 40, 90) for i in range(3)]  # the same in every round


def beginning(rng: random.Random) -> Tokens:
    return np.concatenate((rng.choice(HEADS), some_tokens(rng, 5, 25)))


def continued(rng: random.Random, answer: Answer) -> Tokens:
    return np.concatenate((answer.whole, some_tokens(rng, 3, 20)))


# -------------------------------------------------------------------------------------------------- the child


def child(model: Path, folder: Path, write: str, seed: int) -> None:
    """Serves conversations until the process is killed."""
    telling = threading.Lock()

    def tell(**fields: object) -> None:
        line = (json.dumps(fields) + "\n").encode()
        with telling:
            while line:
                line = line[os.write(1, line) :]

    def note(event: str, keys: Sequence[RecordKey]) -> None:
        tell(note=event, keys=[key.hex() for key in keys])

    import rootstock.runtime.torch.step_cache  # noqa: F401  nothing is left to import once the load begins

    tell(ready=True)
    sys.stdin.readline()
    with watched(note):
        made = serving(model, folder, write)
        made.engine.start()
        asker, rng = Asker(made.engine, ANSWER), random.Random(seed)
        tell(begun=True)
        for _ in range(CONVERSATIONS):
            asker.ask(beginning(rng))
        while True:
            answer = asker.next()
            tell(prompt=answer.prompt.tolist(), answer=answer.tokens, finished=answer.finished)
            going_on = len(answer.whole) < LONGEST
            asker.ask(continued(rng, answer) if going_on else beginning(rng))


class Child:
    """Child process, started ahead of its round, because its imports take longest."""

    def __init__(self, model: Path, folder: Path, write: str, seed: int) -> None:
        command = [sys.executable, __file__, "--child", str(model), str(folder), write, str(seed)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._begun = threading.Event()
        self._lines: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                break  # the kill came while it was written
            self._lines.append(line)
            if line.startswith(b'{"begun"'):
                self._begun.set()

    def run_and_kill(self, after_s: float) -> list[dict[str, object]]:
        """Lets the child begin, kills it after so many seconds, and returns its lines."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        assert self._begun.wait(120), "the child does not begin"
        time.sleep(after_s)
        assert self._process.poll() is None, "the child has ended by itself"
        self._process.kill()
        self._process.wait()
        self._reader.join()
        return [json.loads(line) for line in self._lines]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


# ---------------------------------------------------------------------------------------------------- the whole


@dataclass
class Totals:
    kills: int = 0
    unreadable: int = 0
    acknowledged_records: int = 0
    evicted_from_disk: int = 0
    acknowledged_lost: int = 0
    damaged_records: int = 0  # of all records that are there
    compared: int = 0
    wrong: int = 0
    failed_requests: int = 0
    loaded_tokens: int = 0
    answers_before_kills: int = 0
    kills_within_a_store: int = 0
    kills_with_torn_bytes: int = 0
    kills_before_any_store: int = 0


class World:
    """Models, their answers without a cache, and directories."""

    def __init__(self, folder: Path) -> None:
        self.models = {kind: save_chat(folder / kind, kind) for kind in BUDGET_BYTES}
        self._folder = folder
        self._books: dict[Path, Book] = {}
        self._references: dict[str, Asker] = {}
        self._known: dict[tuple[str, bytes], list[int]] = {}
        self.totals = Totals()

    def child(self, number: int) -> Child:
        model, write = ROUNDS[number % len(ROUNDS)]
        return Child(self.models[model], self._directory(number), write, number)

    def _directory(self, number: int) -> Path:
        model, write = ROUNDS[number % len(ROUNDS)]
        return self._folder / f"{model}-{write}"

    def references(self, model: str, prompts: Sequence[Tokens]) -> list[list[int]]:
        """Returns the model's answers without any cache."""
        if model not in self._references:
            made = engine_on(self.models[model], 0, None, max_batch=8)
            made.engine.start()
            self._references[model] = Asker(made.engine, ANSWER)
        keys = [(model, prompt.tobytes()) for prompt in prompts]
        unknown = {key: p for key, p in zip(keys, prompts, strict=True) if key not in self._known}
        for answer in self._references[model].ask_all(list(unknown.values())):
            assert answer.finished
            self._known[model, answer.prompt.tobytes()] = answer.tokens
        return [self._known[key] for key in keys]

    def judge(self, model: str, answers: Sequence[Answer]) -> None:
        totals = self.totals
        right = self.references(model, [answer.prompt for answer in answers])
        for answer, tokens in zip(answers, right, strict=True):
            totals.compared += 1
            totals.failed_requests += not answer.finished
            if answer.finished and answer.tokens != tokens:
                totals.wrong += 1
                print(f"{model}: {len(answer.prompt)} tokens, {answer.tokens} instead of {tokens}")

    def round(self, number: int, running: Child, rng: random.Random) -> None:
        totals, folder = self.totals, self._directory(number)
        model, write = ROUNDS[number % len(ROUNDS)]
        book = self._books.setdefault(folder, Book())
        stored, evicted = book.stored, book.evicted
        answers = []
        for line in running.run_and_kill(rng.uniform(EARLIEST_S, LATEST_S)):
            if "note" in line:
                keys = [RecordKey(bytes.fromhex(key)) for key in line["keys"]]  # type: ignore[attr-defined]
                book.note(str(line["note"]), keys)
            elif "answer" in line:
                prompt = np.array(line["prompt"], np.int32)
                answers.append(Answer(prompt, line["answer"], bool(line["finished"])))  # type: ignore[arg-type]
        totals.kills += 1
        totals.acknowledged_records += book.stored - stored
        totals.kills_before_any_store += book.stored == stored
        totals.kills_within_a_store += book.within_a_store
        totals.answers_before_kills += len(answers)
        book.within_a_store = False
        with watched(book.note):
            if self._look(folder, CAP_BYTES[write], book):
                self._go_on(model, folder, write, answers, rng)
        totals.evicted_from_disk += book.evicted - evicted
        self.judge(model, rng.sample(answers, min(COMPARED, len(answers))))

    def _look(self, folder: Path, cap_bytes: int, book: Book) -> bool:
        """Opens the directory as a server does, and reads every record. Returns False if it cannot be opened."""
        totals = self.totals
        lengths = {path: path.stat().st_size for path in folder.glob("*.segment")}
        tier = DiskTier.open(folder, cap_bytes)
        if not isinstance(tier, DiskTier) or tier.counts.indexes_lost or tier.state != Ready():
            totals.unreadable += 1
            print(f"{folder.name}: {tier if not isinstance(tier, DiskTier) else tier.state}")
            return False
        newest = max(lengths, default=None)
        if newest is not None:
            length = newest.stat().st_size if newest.exists() else 0
            totals.kills_with_torn_bytes += length < lengths[newest]  # bytes behind the last committed record
        there = {entry.identity.key for entry in tier.entries()}
        lost = book.promised - there
        failures = tier.verify().failures
        totals.acknowledged_lost += len(
            lost | {failure.key for failure in failures if failure.key in book.promised}
        )
        totals.damaged_records += len(failures) + tier.counts.quarantined_records
        if lost or failures or tier.counts.quarantined_records:
            print(f"{folder.name}: {len(lost)} of {len(book.promised)} lost, damaged: {failures}")
        book.promised &= there  # each is lost once
        tier.close()
        return True

    def _go_on(self, model: str, folder: Path, write: str, answers: list[Answer], rng: random.Random) -> None:
        """Starts an engine on the directory, continues conversations and repeats prompts."""
        chosen = rng.sample(answers, min(CONTINUED, len(answers)))
        prompts = [continued(rng, answer) for answer in chosen] + [a.prompt for a in chosen[:2]]
        prompts += [beginning(rng)]
        made = serving(self.models[model], folder, write)
        with made.engine:
            given = Asker(made.engine, ANSWER).ask_all(prompts)
            self.totals.loaded_tokens += made.engine.stats().cache.loaded_tokens
        self.judge(model, given)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        model, folder, write, seed = sys.argv[2:]
        child(Path(model), Path(folder), write, int(seed))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    rng, began = random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        world = World(Path(temporary))
        waiting = world.child(0)
        try:
            for number in range(args.kills):
                running, waiting = waiting, world.child(number + 1)
                try:
                    world.round(number, running, rng)
                finally:
                    running.end()
                if number % 10 == 9:
                    print(
                        f"{number + 1} kills in {time.monotonic() - began:.0f} s: {world.totals}", flush=True
                    )
        finally:
            waiting.end()
    totals = world.totals
    figures = asdict(totals) | {
        "acknowledged_per_kill": round(totals.acknowledged_records / max(1, totals.kills), 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    bars = {
        "kills": exactly(100),
        "unreadable": exactly(0),
        "acknowledged_lost": exactly(0),
        "damaged_records": exactly(0),
        "acknowledged_records": at_least(100),
        "wrong": exactly(0),
        "failed_requests": exactly(0),
        "loaded_tokens": at_least(1),
        "kills_within_a_store": at_least(1),
    }
    conclude("C1", figures, bars)


if __name__ == "__main__":
    main()
