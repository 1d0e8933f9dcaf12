"""C6: ten minutes of churn in a directory with a cap that is never exceeded, and the cost of the cap.

An engine on a tiny model with little memory writes many times the cap to a disk tier. Conversations of a thousand
tokens and more continue in random order, more of them than memory and disk can hold. Several times the engine is
closed and another one opened, which stores on eviction or on publication. Meanwhile another process sums up the
lengths of all files under the directory as fast as it can.

Foreign files and segments of an older format ("strangers") appear there too, each whole at one instant. They count
for the cap, and are removed as soon as room is short. The tier keeps so much of the cap free that most of them fit.
Some are larger on purpose, and must exceed the cap: samples over the cap since a stranger appeared are counted apart,
with their duration, if the tier's own files are within the cap.

Some of the answers are compared with those of the same model without a cache.

Small budgets come last, without strangers: engines at 1, 3 and 16 MiB, and a stream of stores and loads of small
records to the tier itself at these and 256 MiB. Figures are the bytes written for a byte stored once the budget is
used up, as the tier and as the system count them, and misses of records that were evicted while their load was
planned.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import argument_parser, at_least, at_most, conclude, exactly

from asking import BLOCK_SIZE, Answer, Asker, engine_on, some_tokens
from checkpoints import save_chat
from rootstock.cache.keys import Identity, Namespace, RecordKind
from rootstock.config import TierConfig
from rootstock.engine.build import Assembly
from rootstock.tiers.base import Loaded, MissKind, Ready, Record
from rootstock.tiers.disk.files import LOCK_NAME
from rootstock.tiers.disk.index import INDEX_NAMES
from rootstock.tiers.disk.segments import segment_number
from rootstock.tiers.disk.tier import DiskTier

BUDGET_BYTES = 6 * 2**20
QUEUE_BYTES = 32 * 2**20
ANSWER = 2  # tokens
AT_ONCE = 4
CONVERSATIONS = 120
LONGEST = 1500  # tokens of a conversation, which then begins anew
LIVES = 4
STRANGER_EVERY_S = 5.0
COMPARED = 150  # answers, drawn at random
SMALL_MIB = (1, 3, 16)
STEADY = ((1, 4), (3, 1), (3, 16), (16, 16), (256, 64))  # MiB of budget, records stored together
STEADY_RECORD_BYTES = 2800


# ---------------------------------------------------------------------------------------- the other process


def measure(folder: Path, cap_bytes: int) -> None:
    """Samples the directory until standard input ends, then prints the figures."""
    samples = over = over_by_strangers = 0
    most = most_allocated = most_own = 0
    over_by_strangers_s = longest_gap_s = 0.0
    strangers: dict[str, float] = {}  # name → when it was first seen
    stays_s: list[float] = []
    before, is_excused = time.monotonic(), False
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        own, foreign, allocated, there = sizes(folder)
        now, total = time.monotonic(), own + foreign
        samples += 1
        most, most_own, most_allocated = max(most, total), max(most_own, own), max(most_allocated, allocated)
        was_excused, came = is_excused, not strangers.keys() >= set(there)
        is_excused = own <= cap_bytes < total and (came or was_excused)
        over += total > cap_bytes and not is_excused
        over_by_strangers += is_excused
        if is_excused and was_excused:
            over_by_strangers_s += now - before
        longest_gap_s = max(longest_gap_s, now - before)
        before = now
        stays_s += [now - since for name, since in strangers.items() if name not in there]
        strangers = {name: strangers.get(name, now) for name in there}
    figures = {
        "samples": samples,
        "longest_gap_ms": round(1e3 * longest_gap_s, 1),
        "over_cap_samples": over,
        "over_by_strangers_samples": over_by_strangers,
        "over_by_strangers_s": round(over_by_strangers_s, 3),
        "max_bytes": most,
        "max_bytes_without_strangers": most_own,
        "max_allocated_bytes": most_allocated,
        "strangers_gone": len(stays_s),
        "strangers_left": len(strangers),
        "longest_stay_s": round(max(stays_s, default=0.0), 2),
    }
    print(json.dumps(figures))


def sizes(folder: Path) -> tuple[int, int, int, list[str]]:
    """Returns the bytes of the tier's own files and of strangers, by length, of both by allocation, and the names of
    strangers."""
    own = foreign = allocated = 0
    there = []
    for entry in os.scandir(folder):
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        allocated += 512 * found.st_blocks
        if segment_number(Path(entry.path)) is None and entry.name not in {*INDEX_NAMES, LOCK_NAME}:
            foreign += found.st_size
            there.append(entry.name)
        else:
            own += found.st_size
    return own, foreign, allocated, there


@contextlib.contextmanager
def measured(folder: Path, cap_bytes: int, figures: dict[str, Any]) -> Iterator[None]:
    command = [sys.executable, __file__, "--measure", str(folder), str(cap_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield
        told, _ = process.communicate(timeout=60)  # closes its standard input
        figures |= json.loads(told)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def strangers(folder: Path, outside: Path, figures: dict[str, Any]) -> Iterator[threading.Event]:
    """Lets files appear until the event is set."""
    enough, rng = threading.Event(), random.Random(0)
    figures["strangers_dropped"] = 0

    def drop() -> None:
        while not enough.wait(STRANGER_EVERY_S * rng.uniform(0.5, 1.5)):
            number = figures["strangers_dropped"] = figures["strangers_dropped"] + 1
            name = f"notes-{number}.txt" if rng.random() < 0.5 else f"v0-{number:08d}.segment"
            whole = outside / name
            # One in eight is larger than all that is kept free.
            size = 16 * 2**20 if number % 8 == 5 else rng.randrange(2**20, 4 * 2**20)
            whole.write_bytes(rng.randbytes(size))
            whole.rename(folder / name)

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    try:
        yield enough
    finally:
        enough.set()
        thread.join()


# ------------------------------------------------------------------------------------------------- the load


@dataclass(eq=False)
class Conversation:
    prompt: np.ndarray
    is_asked: bool = False


class Conversations:
    """More conversations than memory and disk hold. Some continue more often than others, and all grow."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._heads = [some_tokens(self._rng, 100, 400) for _ in range(8)]
        self._all = [Conversation(self._new()) for _ in range(CONVERSATIONS)]
        self._asked: dict[bytes, Conversation] = {}

    def next(self) -> np.ndarray:
        free = [conversation for conversation in self._all if not conversation.is_asked]
        chosen = free[min(int(self._rng.expovariate(4.0 / len(free))), len(free) - 1)]
        chosen.is_asked = True
        self._asked[chosen.prompt.tobytes()] = chosen
        return chosen.prompt

    def heard(self, answer: Answer) -> None:
        conversation = self._asked.pop(answer.prompt.tobytes())
        conversation.is_asked = False
        more = some_tokens(self._rng, 10, 200)
        is_long = len(answer.whole) + len(more) > LONGEST
        conversation.prompt = self._new() if is_long else np.concatenate((answer.whole, more))
        if self._rng.random() < 0.02:  # from now on others continue more often
            self._rng.shuffle(self._all)

    def _new(self) -> np.ndarray:
        return np.concatenate((self._rng.choice(self._heads), some_tokens(self._rng, 50, 600)))


@dataclass
class Churned:
    """Counts of the disk tier, summed up over its lives."""

    stored_bytes: int = 0
    written_bytes: int = 0
    evicted_records: int = 0
    compactions: int = 0
    removed_segments: int = 0
    removed_strangers: int = 0
    refused_stores: int = 0
    misses_absent: int = 0  # misses of records that were evicted just before
    misses_damaged: int = 0  # misses of any other kind
    lives_not_ready_at_end: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    loaded_tokens: int = 0
    loaded_records: int = 0

    def add(self, made: Assembly, disk: DiskTier) -> None:
        """Adds the counts of an engine that has stopped."""
        cache, room, counts = made.engine._cache.stats(), disk.room_counts, disk.counts
        self.stored_bytes += counts.stored_bytes
        self.written_bytes += disk.written_bytes
        self.evicted_records += room.evicted_records
        self.compactions += room.compacted_segments
        self.removed_segments += room.removed_segments
        self.removed_strangers += room.removed_foreign_files
        self.refused_stores += counts.refused.total()
        absent = counts.misses[MissKind.ABSENT]
        self.misses_absent += absent
        self.misses_damaged += counts.misses.total() - absent
        self.asked_tokens += cache.asked_tokens
        self.hit_tokens += cache.hit_tokens
        self.loaded_tokens += cache.loaded_tokens
        self.loaded_records += counts.loaded_records


class Churn:
    def __init__(self, model: Path, folder: Path, cap_bytes: int) -> None:
        self.totals = Churned()
        self.answers = 0
        self.failed = 0
        self.kept: list[Answer] = []  # a sample of all answers, each as likely as any other
        self._model, self._folder, self._cap_bytes = model, folder, cap_bytes
        self._conversations = Conversations(6)
        self._rng = random.Random(7)

    def live(self, write: str, until_s: float) -> None:
        """Runs one engine from its start to its stop."""
        tier = TierConfig(
            disk_dir=self._folder,
            disk_budget_bytes=self._cap_bytes,
            disk_write=write,
            queue_bytes=QUEUE_BYTES,
        )
        made = engine_on(self._model, BUDGET_BYTES, tier, max_batch=AT_ONCE)
        assert made.engine.tier_connector is not None
        disk = made.engine.tier_connector._disk
        assert disk is not None, "the directory can't be used"
        with made.engine:
            asker = Asker(made.engine, ANSWER)
            for _ in range(AT_ONCE):
                asker.ask(self._conversations.next())
            for left in range(AT_ONCE, 0, -1):
                self._hear(asker.next())
                while left == AT_ONCE and time.monotonic() < until_s:
                    asker.ask(self._conversations.next())
                    self._hear(asker.next())
            self.totals.lives_not_ready_at_end += disk.state != Ready()
        self.totals.add(made, disk)

    def _hear(self, answer: Answer) -> None:
        self._conversations.heard(answer)
        self.answers += 1
        self.failed += not answer.finished
        if len(self.kept) < COMPARED:
            self.kept.append(answer)
        elif (place := self._rng.randrange(self.answers)) < COMPARED:
            self.kept[place] = answer

    def wrong(self) -> int:
        made = engine_on(self._model, 0, None, max_batch=AT_ONCE)
        with made.engine:
            right = {
                a.prompt.tobytes(): a.tokens
                for a in Asker(made.engine, ANSWER).ask_all([a.prompt for a in self.kept])
            }
        return sum(
            answer.finished and right[answer.prompt.tobytes()] != answer.tokens for answer in self.kept
        )


# -------------------------------------------------------------------------------------------- small budgets


def small_budgets(model: Path, folder: Path, seconds: float) -> dict[str, float]:
    """Runs engines at small budgets."""
    figures: dict[str, float] = {}
    for mib in SMALL_MIB:
        (here := folder / f"small-{mib}").mkdir()
        churn = Churn(model, here, mib * 2**20)
        for write in ("back", "through"):
            churn.live(write, time.monotonic() + seconds / 2)
        totals = churn.totals
        figures[f"engine_{mib}_mib_write_amplification"] = round(
            totals.written_bytes / max(1, totals.stored_bytes), 3
        )
        figures[f"engine_{mib}_mib_churned_over_cap"] = round(totals.stored_bytes / (mib * 2**20), 1)
        figures[f"engine_{mib}_mib_misses_absent"] = totals.misses_absent
        figures[f"engine_{mib}_mib_loaded_records"] = totals.loaded_records
        figures[f"engine_{mib}_mib_failed"] = churn.failed
    return figures


def steady_churn(folder: Path, cap_bytes: int, group: int) -> dict[str, float]:
    """Stores small records in a tier, and loads as many of the latest ones."""
    rng = random.Random(0)
    payload = np.frombuffer(rng.randbytes(STEADY_RECORD_BYTES), np.uint8)
    tokens = np.arange(BLOCK_SIZE, dtype=np.int32)
    namespace = Namespace("weights", "float32").digest()

    def record(number: int) -> Record:
        before, whole = (n.to_bytes(16, "little") for n in (number, number + 2**32))
        start = BLOCK_SIZE * (number % 50)
        return Record(
            Identity(namespace, "full", 4, "float32", RecordKind.BLOCKS, start, tokens, before, whole),
            [payload],
        )

    tier = DiskTier.open(folder, cap_bytes)
    assert isinstance(tier, DiskTier), tier
    stored = loads = found = 0
    counted = False  # from the first eviction on
    while tier.room_counts.evicted_bytes < cap_bytes / 4:
        if tier.room_counts.evicted_bytes and not counted:
            counted, loads, found = True, 0, 0
            system_bytes, written_bytes = system_written_bytes(), tier.written_bytes
            stored_bytes = tier.counts.stored_bytes
        tier.store([record(number) for number in range(stored, stored + group)])
        stored += group
        lately = [
            record(max(0, stored - 1 - int(rng.expovariate(8 * STEADY_RECORD_BYTES / cap_bytes)))).identity
            for _ in range(group)
        ]
        loads += group
        found += sum(isinstance(tier.load(identity), Loaded) for identity in lately)
        tier.touch([identity.key for identity in lately])
    stored_bytes = tier.counts.stored_bytes - stored_bytes
    figures = {
        "write_amplification": round((tier.written_bytes - written_bytes) / stored_bytes, 3),
        "as_the_system_counts": round((system_written_bytes() - system_bytes) / stored_bytes, 3),
        "found": round(found / loads, 3),
    }
    tier.close()
    return figures


def system_written_bytes() -> int:
    """Returns the bytes that this process has written to files, and 0 where the system does not count them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("wchar"):
                return int(line.split()[1])
    return 0


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--cap-mib", type=int, default=64)
    parser.add_argument("--small-seconds", type=float, default=30.0, help="of an engine at each small budget")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    cap_bytes = args.cap_mib * 2**20
    figures: dict[str, Any] = {"cap_bytes": cap_bytes}
    with tempfile.TemporaryDirectory() as temporary:
        model, outside, folder = (Path(temporary) / name for name in ("full", "outside", "tier"))
        outside.mkdir()
        folder.mkdir()
        churn = Churn(save_chat(model, "full"), folder, cap_bytes)
        began_s = time.monotonic()
        with measured(folder, cap_bytes, figures):
            churn.live("through", began_s + args.seconds / LIVES)  # the directory is the tier's from here on
            with strangers(folder, outside, figures) as enough:
                for life in range(1, LIVES):
                    write = ("through", "back")[life % 2]
                    if life == LIVES - 1:
                        churn.live(write, began_s + args.seconds * (LIVES - 0.3) / LIVES)
                        enough.set()
                    churn.live(write, began_s + args.seconds * (life + 1) / LIVES)
                    print(
                        f"{time.monotonic() - began_s:.0f} s: {churn.answers} answers, {churn.totals}",
                        flush=True,
                    )
        figures["seconds"] = took_s = round(time.monotonic() - began_s, 1)
        figures["compared"], figures["wrong"] = len(churn.kept), churn.wrong()
        figures |= small_budgets(model, Path(temporary), args.small_seconds)
        for mib, group in STEADY:
            steady = steady_churn(Path(temporary) / f"steady-{mib}-{group}", mib * 2**20, group)
            figures |= {f"steady_{mib}_mib_by_{group}_{name}": figure for name, figure in steady.items()}
        amplified = [figure for name, figure in figures.items() if name.endswith("mib_write_amplification")]
        amplified += [
            figure for name, figure in figures.items() if name.startswith("steady") and "ampl" in name
        ]
        figures["worst_small_write_amplification"] = max(amplified)
        misses = sum(figures[f"engine_{mib}_mib_misses_absent"] for mib in SMALL_MIB)
        loads = sum(figures[f"engine_{mib}_mib_loaded_records"] for mib in SMALL_MIB)
        figures["small_misses_absent_of_loaded"] = round(misses / max(1, loads), 5)
    totals = churn.totals
    figures |= asdict(totals) | {
        "max_of_cap": round(figures["max_bytes_without_strangers"] / cap_bytes, 4),
        "max_of_cap_with_strangers": round(figures["max_bytes"] / cap_bytes, 4),
        "churned_over_cap": round(totals.stored_bytes / cap_bytes, 2),
        "write_amplification": round(totals.written_bytes / max(1, totals.stored_bytes), 3),
        "lives": LIVES + 1,
        "answers": churn.answers,
        "answers_per_s": round(churn.answers / took_s, 1),
        "stored_mb_per_s": round(totals.stored_bytes / took_s / 1e6, 2),
        "found_of_asked": round(totals.hit_tokens / max(1, totals.asked_tokens), 3),
        "found_on_disk_of_asked": round(totals.loaded_tokens / max(1, totals.asked_tokens), 3),
        "failed_requests": churn.failed,
    }
    bars = {
        "seconds": at_least(600),
        "samples": at_least(10_000),
        "over_cap_samples": exactly(0),
        "churned_over_cap": at_least(5),
        "worst_small_write_amplification": at_most(2.0),
        "small_misses_absent_of_loaded": at_most(0.001),
        "strangers_left": exactly(0),
        "removed_strangers": at_least(1),
        "lives_not_ready_at_end": exactly(0),
        "misses_damaged": exactly(0),
        "wrong": exactly(0),
        "failed_requests": exactly(0),
    }
    conclude("C6", figures, bars)


if __name__ == "__main__":
    main()
