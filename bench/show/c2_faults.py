"""C2: faults of a disk, one to a case: no wrong token, no failed request, and each is counted as what it is.

A case is a directory that an engine has filled by answering prompts, one fault in it, and an engine that starts there
and is asked for what is on the disk. The oracle's engine, whose answers depend on every byte that it is led to, over
the real disk tier; models with full attention alone, with windows, with recurrent states and with both.

Damage is done to the files and to the index, while nobody has the directory or behind the tier's back: a flipped bit
in a record or in its row, a segment that is cut off or gone, records that changed places, rows that lead to a whole
record of other weights, another dtype, another position or another tenant (whose bytes would give other answers), a
row that is missing. What is damaged is a record that the next prompt would load. Errors come from the file system's
seam: a full disk, a read or a write that fails, a read that does not return.

Each answer is compared with what the oracle says of the tokens alone. Counted right means: the tier names the miss as
it must and names no other, the row is struck, the store's refusal and the state `LoadsOnly` are as they must be and
end when the disk is well again, and the directory is whole afterwards.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from common import at_least, conclude, exactly
from oracle_below import Asked, Hangs, Life, Shape, Truth, bytes_for

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from faults.faulty_files import FaultyFiles
from rootstock.cache.families import Family
from rootstock.cache.keys import Namespace, prefix_digest
from rootstock.cache.plan import Tokens
from rootstock.cache.record_identity import Identity, Kind, RecordKey
from rootstock.cache.tier_index import LOSSY_MARK, StoredIndex
from rootstock.testing.fake_runtime import FULL, STATE, window
from rootstock.tiers.base import LoadsOnly, MissKind, Ready, Record, Refusal, Stored
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.index import INDEX_NAME
from rootstock.tiers.disk.record import Place, decode_identity
from rootstock.tiers.disk.tier import RETRY_S, DiskTier

CAP_BYTES = 4 * 2**20
SEGMENT_BYTES = 8 * 1024  # so that a directory has several
ANSWER = 4  # tokens
MEMORY = Path("/dev/shm")  # where there is one: no power is cut here, and waiting for syncs shows nothing
NAMESPACE = Namespace("fake", "float32:float32")
FAMILIES: tuple[tuple[Family, ...], ...] = (
    (FULL,),
    (FULL, window(24)),
    (FULL, window(5), window(40)),
    (FULL, STATE),
    (window(24), STATE),
    (FULL, window(24), STATE),
)


# ------------------------------------------------------------------------------------------------ a directory


@dataclass
class Case:
    """What is asked in a directory's first life, and in those after it."""

    rng: np.random.Generator
    folder: Path
    shape: Shape
    truth: Truth
    prompts: list[Tokens]
    wrong: int = 0
    failed: int = 0
    loaded_tokens: int = 0
    struck_by_probe: int = 0  # at start, or by a load that only measures
    remarks: list[str] = field(default_factory=list)  # what was not counted or struck as it must be

    @staticmethod
    def draw(
        rng: np.random.Generator, folder: Path, *, through: bool | None = None, ample: bool = False
    ) -> Case:
        families = FAMILIES[int(rng.integers(len(FAMILIES)))]
        block_size = int(rng.choice([4, 8, 16]))
        head = rng.integers(0, 96, rng.integers(15, 50))
        prompts = [
            np.concatenate(
                (head[: rng.integers(1, len(head) + 1)], rng.integers(0, 97, rng.integers(10, 40)))
            )
            for _ in range(3)
        ]
        longest = max(map(len, prompts)) + 3 * (ANSWER + 8)
        shape = Shape(
            families,
            block_size,
            bytes_for(families, block_size, longest, 6.0 if ample else float(rng.choice([1.2, 2.0, 6.0]))),
            CAP_BYTES,
            SEGMENT_BYTES,
            bool(rng.random() < 0.5) if through is None else through,
        )
        return Case(rng, folder, shape, Truth(families, 97), [p.astype(np.int32) for p in prompts])

    def fill(self) -> None:
        """The first life: prompts, and some of them continued. Afterwards the prompts of the second are longer."""
        life = Life(self.folder, self.shape)
        self.ask(life, self.prompts)
        continued = [self.continued(prompt) for prompt in self.prompts]
        self.ask(life, continued[:2])
        life.stop()
        self.prompts = [self.continued(prompt) for prompt in continued[:2]] + continued[2:] + self.prompts

    def continued(self, prompt: Tokens) -> Tokens:
        more = self.rng.integers(0, 97, self.rng.integers(1, 8))
        return np.concatenate((prompt, self.truth.answer(prompt, ANSWER), more)).astype(np.int32)

    def ask(self, life: Life, prompts: Sequence[Tokens]) -> list[Asked]:
        asked = life.ask_all(prompts, ANSWER)
        for one in asked:
            self.judge(one)
        return asked

    def judge(self, asked: Asked) -> None:
        if type(asked.end).__name__ != "Finished":
            self.failed += 1
        elif asked.answer != self.truth.answer(asked.prompt, ANSWER):
            self.wrong += 1

    def fresh(self) -> Tokens:
        """Begins as no prompt that is stored does."""
        return np.concatenate(([96], self.rng.integers(0, 97, self.rng.integers(20, 60)))).astype(np.int32)

    def check(self, right: bool, remark: str) -> None:
        if not right:
            self.remarks.append(remark)

    # -- looking into the directory while nobody has it ---------------------------------------------------------

    def rows(self) -> dict[RecordKey, tuple[Identity, Place]]:
        with sqlite3.connect(self.folder / INDEX_NAME) as db:
            found = db.execute(
                "SELECT key, identity, segment, offset, bytes, header_bytes FROM records ORDER BY first, last"
            ).fetchall()
        db.close()
        rows = {}
        for key, raw, *place in found:
            identity = decode_identity(raw)
            assert identity is not None
            rows[RecordKey(key)] = identity, Place(*place)
        return rows

    def change(self, sql: str, *values: object) -> None:
        with sqlite3.connect(self.folder / INDEX_NAME) as db:
            assert db.execute(sql, values).rowcount == 1
        db.close()

    def lead(self, key: RecordKey, place: Place) -> None:
        self.change(
            "UPDATE records SET segment = ?, offset = ?, bytes = ?, header_bytes = ? WHERE key = ?",
            place.segment,
            place.offset,
            place.stored_bytes,
            place.header_bytes,
            key,
        )

    def segment(self, number: int) -> Path:
        return self.folder / f"v1-{number:08d}.segment"

    def wanted(self) -> list[RecordKey]:
        """Records that one of the prompts would load, which becomes the first."""
        index = StoredIndex(self.shape.families, self.shape.block_size)
        for identity, _ in self.rows().values():
            index.add(identity)
        self.rng.shuffle(self.prompts)  # type: ignore[arg-type]
        for i, prompt in enumerate(self.prompts):
            reach = index.reach(prompt, NAMESPACE, 0, 0, len(prompt) - 1)
            if reach is not None:
                self.prompts[0], self.prompts[i] = self.prompts[i], self.prompts[0]
                keys = [block.identity.key for block in reach.blocks]
                return keys if reach.state is None else [*keys, reach.state.key]
        raise AssertionError("nothing that was stored is of any use")


@dataclass
class Expected:
    """What the tier must count, from its start on: of `kind` at least and at most so many, and nothing else."""

    kind: MissKind | None
    least: int = 1
    most: int = 1
    places: dict[RecordKey, Place] = field(default_factory=dict)  # rows that must not lead there any more
    left: frozenset[RecordKey] = frozenset()  # damage that may go unnoticed, because nobody asks for it
    while_open: Callable[[Life], None] | None = None  # the fault, if it comes after the start


# ------------------------------------------------------------------------------------------------ the damages


def flipped_bit(case: Case) -> Expected:
    key = pick(case.rng, case.wanted())
    _, place = case.rows()[key]
    if case.rng.random() < 0.2:  # in the row
        with sqlite3.connect(case.folder / INDEX_NAME) as db:
            raw = bytearray(db.execute("SELECT identity FROM records WHERE key = ?", (key,)).fetchone()[0])
            raw[int(case.rng.integers(len(raw)))] ^= 1 << int(case.rng.integers(8))
            db.execute("UPDATE records SET identity = ? WHERE key = ?", (bytes(raw), key))
        db.close()
        return Expected(MissKind.CHECKSUM, places={key: place})
    at, bit = place.offset + int(case.rng.integers(place.stored_bytes)), 1 << int(case.rng.integers(8))

    def flip(_: Life | None = None) -> None:
        with case.segment(place.segment).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ bit]))

    return now_or_later(case, flip, Expected(MissKind.CHECKSUM, places={key: place}))


def truncated_segment(case: Case) -> Expected:
    key = pick(case.rng, case.wanted())
    rows = case.rows()
    _, place = rows[key]
    cut = place.offset + int(case.rng.integers(place.stored_bytes))
    lost = {
        k: p for k, (_, p) in rows.items() if p.segment == place.segment and p.offset + p.stored_bytes > cut
    }

    def truncate(_: Life | None = None) -> None:
        os.truncate(case.segment(place.segment), cut)

    return lost_bytes(case, truncate, lost)


def missing_bytes(case: Case) -> Expected:
    """A segment's file is gone."""
    key = pick(case.rng, case.wanted())
    rows = case.rows()
    number = rows[key][1].segment
    lost = {k: p for k, (_, p) in rows.items() if p.segment == number}

    def remove(_: Life | None = None) -> None:
        case.segment(number).unlink()

    return lost_bytes(case, remove, lost)


def lost_bytes(case: Case, do: Callable[[Life | None], None], lost: dict[RecordKey, Place]) -> Expected:
    """What is not there at start is struck at once; what goes later, when it is asked for."""
    if case.rng.random() < 0.5:
        do(None)
        return Expected(MissKind.MISSING_BYTES, len(lost), len(lost), lost)
    # Which of them is asked for first is not certain, nor whether the others are then still of use.
    return Expected(MissKind.MISSING_BYTES, 1, len(lost), {}, frozenset(lost), do)


def swapped_records(case: Case) -> Expected:
    """Their bytes, or their rows; or only the payloads, under headers that are not their own."""
    rows = case.rows()
    content = {number: case.segment(number).read_bytes() for number in {p.segment for _, p in rows.values()}}

    def payload(key: RecordKey) -> bytes:
        place = rows[key][1]
        end = place.offset + place.stored_bytes
        return content[place.segment][end - place.payload_bytes : end]

    wanted = case.wanted()
    one = pick(case.rng, wanted)
    equal = [
        key
        for key, (_, place) in rows.items()
        if place.stored_bytes == rows[one][1].stored_bytes
        and place.header_bytes == rows[one][1].header_bytes
        and payload(key) != payload(one)  # a window keeps the same of a block as full attention does
    ]
    how = str(case.rng.choice(["bytes", "payloads"])) if equal and case.rng.random() < 0.8 else "rows"
    other = pick(case.rng, equal if how != "rows" else [key for key in rows if key != one])
    (identity_one, place_one), (identity_other, place_other) = rows[one], rows[other]
    kind = MissKind.CHECKSUM if how == "payloads" else first_difference(identity_one, identity_other)
    # If both are of use, whichever comes first is found out first, and the other may then not be asked for.
    expected = Expected(kind, 1, 2, left=frozenset({one, other}))
    if how == "rows":
        case.lead(one, place_other)
        case.lead(other, place_one)
        return expected

    def swap(_: Life | None = None) -> None:
        def span(place: Place) -> tuple[Path, int, bytes]:
            skip = place.stored_bytes - place.payload_bytes if how == "payloads" else 0
            begin, end = place.offset + skip, place.offset + place.stored_bytes
            return case.segment(place.segment), begin, content[place.segment][begin:end]

        a, b = span(place_one), span(place_other)
        for (path, at, _), (_, _, there) in ((a, b), (b, a)):
            with path.open("r+b") as file:
                file.seek(at)
                file.write(there)

    return now_or_later(case, swap, expected)


def first_difference(asked: Identity, found: Identity) -> MissKind:
    """By the order in which the documentation lists the kinds. All records are of one namespace and dtype."""
    if (asked.family, asked.kind) != (found.family, found.kind):
        return MissKind.OTHER_LAYERS
    if asked.end != found.end or (asked.kind is Kind.BLOCKS and asked.start != found.start):
        return MissKind.OTHER_POSITION
    return MissKind.OTHER_TOKENS


def other_weights(case: Case) -> Expected:
    return led_astray(case, MissKind.OTHER_NAMESPACE, replace(NAMESPACE, weights="others"))


def other_tenant(case: Case) -> Expected:
    return led_astray(case, MissKind.OTHER_NAMESPACE, replace(NAMESPACE, salt="another"))


def other_dtype(case: Case) -> Expected:
    """What a server stores that computes in bfloat16, which is another namespace too; or one that compresses."""
    if case.rng.random() < 0.5:
        of_bfloat16 = replace(NAMESPACE, kv_dtype="bfloat16:bfloat16")
        return led_astray(case, MissKind.OTHER_NAMESPACE, of_bfloat16, dtype="bfloat16:bfloat16")
    return led_astray(case, MissKind.OTHER_DTYPE, dtype=NAMESPACE.kv_dtype + LOSSY_MARK)


def other_position(case: Case) -> Expected:
    return led_astray(case, MissKind.OTHER_POSITION, later_by=int(case.rng.integers(1, 4)))


def led_astray(
    case: Case,
    kind: MissKind,
    namespace: Namespace = NAMESPACE,
    dtype: str = NAMESPACE.kv_dtype,
    later_by: int = 0,  # blocks
) -> Expected:
    """A row leads to a whole record of the same block of something else, with bytes that would give other answers."""
    wanted, rows = case.wanted(), case.rows()
    if dtype.endswith(LOSSY_MARK):  # as states never are
        wanted = [key for key in wanted if rows[key][0].kind is Kind.BLOCKS] or wanted
    key = pick(case.rng, wanted)
    identity, _ = rows[key]
    if dtype.endswith(LOSSY_MARK) and identity.kind is Kind.STATE:
        dtype, namespace, kind = "float16", replace(NAMESPACE, kv_dtype="float16"), MissKind.OTHER_NAMESPACE
    before = case.rng.integers(0, 97, later_by * case.shape.block_size).astype(np.int32)
    prefix = np.concatenate((before, case.prompts[0][: identity.start], identity.tokens))
    start = identity.start + len(before)
    other = replace(
        identity,
        namespace=namespace.digest(),
        dtype=dtype,
        start=start,
        parent=prefix_digest(namespace, prefix[:start]),
        own=prefix_digest(namespace, prefix),
    )
    tier = DiskTier.open(case.folder, CAP_BYTES, segment_bytes=SEGMENT_BYTES)
    assert isinstance(tier, DiskTier)
    loaded = tier.load(identity)
    payload = [np.frombuffer(view, np.uint8).copy() for view in loaded.payload]  # type: ignore[union-attr]
    payload[-1] ^= case.rng.integers(1, 256, len(payload[-1]), np.uint8)  # the hashes, as of other weights
    assert isinstance(tier.store([Record(other, payload)])[0], Stored)
    tier.close()
    place = case.rows()[other.key][1]
    case.lead(key, place)
    return Expected(kind, places={key: place})


def missing_row(case: Case) -> Expected:
    key = pick(case.rng, case.wanted())
    if case.rng.random() < 0.5:
        case.change("DELETE FROM records WHERE key = ?", key)
        return Expected(None)  # nobody knows of it
    # Several requests may be on their way to it before one has come back.
    behind = len(case.prompts)
    return Expected(MissKind.ABSENT, 1, behind, while_open=lambda life: life.disk._index.delete([key]))


def now_or_later(case: Case, do: Callable[[Life | None], None], expected: Expected) -> Expected:
    if case.rng.random() < 0.5:
        do(None)
    else:
        expected.while_open = do
    return expected


def pick(rng: np.random.Generator, keys: Sequence[RecordKey]) -> RecordKey:
    return keys[int(rng.integers(len(keys)))]


def damage(case: Case, do: Callable[[Case], Expected]) -> None:
    case.fill()
    expected = do(case)
    serve_damaged(case, expected, Files())
    serve_again(case, expected)


def serve_damaged(case: Case, expected: Expected, files: Files) -> None:
    life = Life(case.folder, case.shape, files=files)
    if expected.while_open is not None:
        life.loader.drain()  # what is measured at start may have read it before, and would have found it whole
        expected.while_open(life)
    case.ask(life, case.prompts)
    case.ask(life, [case.continued(case.prompts[0])])
    stats = life.engine.stats()
    case.loaded_tokens += stats.cache.loaded_tokens
    life.stop()
    misses = Counter(life.disk.counts.misses)
    noticed = misses.pop(expected.kind, 0) if expected.kind is not None else 0
    by_request = stats.tier.counters.loads["missed"] if stats.tier is not None else 0
    case.struck_by_probe += bool(noticed and not by_request)
    if expected.kind is not MissKind.ABSENT:
        misses.pop(MissKind.ABSENT, 0)  # asked for again by somebody who had not heard of it yet
    if expected.kind is not None:
        case.check(
            expected.least <= noticed <= expected.most,
            f"{expected.kind} is counted {noticed} times, not {expected.least} to {expected.most}",
        )
    case.check(not misses, f"counted besides: {dict(misses)}")
    rows = case.rows()
    still = [key for key, place in expected.places.items() if key in rows and rows[key][1] == place]
    case.check(not still, "the row still leads there")
    struck = life.disk.counts.quarantined_records
    absent = expected.kind in (None, MissKind.ABSENT)
    case.check(struck == (0 if absent else noticed), f"{struck} rows struck, {noticed} misses")


def serve_again(case: Case, expected: Expected | None = None) -> None:
    """The next start: what is there is right, is found again, and nothing is missed."""
    life = Life(case.folder, case.shape)
    life.loader.drain()
    left = frozenset() if expected is None else expected.left
    wrong = [failure for failure in life.disk.verify().failures if failure.key not in left]
    case.check(not wrong, f"left in the directory: {wrong}")
    case.ask(life, case.prompts[:3])
    case.loaded_tokens += life.engine.stats().cache.loaded_tokens
    life.stop()
    if not left:
        case.check(not life.disk.counts.misses.total(), f"missed again: {dict(life.disk.counts.misses)}")


# -------------------------------------------------------------------------------------------------- the errors


class DiskClock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def full_disk(case: Case) -> None:
    """Some bytes can still be written, or none; or what is full is noticed when a file or a name is made durable."""
    call = str(case.rng.choice(["", "open_new", "sync", "sync_folder", "commit"]))
    free_bytes = int(case.rng.integers(0, 150))  # less than a record

    def begin(files: FaultyFiles) -> None:
        files.free_bytes = 2**60 if call else free_bytes
        files.fail = lambda name: errno.ENOSPC if name == call else 0

    def end(files: FaultyFiles) -> None:
        files.free_bytes = 2**60
        files.fail = lambda name: 0

    refused_stores(case, begin, end)


def failing_disk(case: Case) -> None:
    """EIO: for a read, once, or for writes."""
    if case.rng.random() < 0.5:
        call = str(case.rng.choice(["write", "open_new", "sync", "sync_folder"]))

        def begin(files: FaultyFiles) -> None:
            files.fail = lambda name: errno.EIO if name == call else 0

        def end(files: FaultyFiles) -> None:
            files.fail = lambda name: 0

        refused_stores(case, begin, end)
        return
    case.fill()
    wanted = case.wanted()
    left = int(case.rng.integers(2 * len(wanted)))  # each record is opened, and read in one call at least

    def fail(name: str) -> int:
        nonlocal left
        if name in ("open_read", "read"):
            left -= 1
            return errno.EIO if left == -1 else 0
        return 0

    files = FaultyFiles()
    expected = Expected(MissKind.IO_ERROR)

    def arm(_: Life) -> None:
        files.fail = fail

    expected.while_open = arm
    serve_damaged(case, expected, files)
    case.check(left < 0, "the read that was to fail never came")
    serve_again(case)


def refused_stores(
    case: Case, begin: Callable[[FaultyFiles], None], end: Callable[[FaultyFiles], None]
) -> None:
    """Stores are refused, and loads go on; a minute after the disk is well again, stores do."""
    case.fill()
    case.wanted()
    files, clock = FaultyFiles(), DiskClock()
    life = Life(case.folder, case.shape, files=files, disk_clock=clock)
    counts = life.disk.counts
    begin(files)
    case.ask(life, [case.fresh()])
    life.settle()
    case.check(counts.refused[Refusal.FAILED] >= 1, f"refused: {dict(counts.refused)}")
    case.check(isinstance(life.disk.state, LoadsOnly), f"the state is {life.disk.state}")
    case.ask(life, case.prompts)
    loaded = life.engine.stats().cache.loaded_tokens
    case.check(loaded > 0, "nothing was loaded while stores were refused")
    life.settle()
    case.check(
        counts.stored_records == 0, f"{counts.stored_records} records stored on a disk that takes none"
    )
    clock.ahead_s += RETRY_S + 1  # it is tried again, and refused again
    failed = counts.refused[Refusal.FAILED]
    case.ask(life, [case.fresh()])
    life.settle()
    case.check(counts.refused[Refusal.FAILED] > failed, "a store was not tried again after a minute")
    end(files)
    clock.ahead_s += RETRY_S + 1
    case.ask(life, [case.fresh()])
    life.settle()
    case.check(isinstance(life.disk.state, Ready), f"the disk is well, and the state {life.disk.state}")
    case.check(counts.stored_records > 0, "the disk is well, and nothing is stored")
    case.check(not counts.misses.total(), f"missed: {dict(counts.misses)}")
    case.loaded_tokens += loaded
    life.stop()
    serve_again(case)


class SlowFiles(Files):
    """Reads return when they are let."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()
        self.begun = threading.Event()

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.begun.set()
        self.may_read.wait()
        return super().read(fd, views, offset)


class WaitingClock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def slow_reads(case: Case) -> None:
    """A read does not return. Another request decodes meanwhile, from its first token to its last; then either the
    read returns and its prompt is found, or the load is overdue, and its request computes and ends before it does."""
    case.fill()
    case.wanted()
    files, clock = SlowFiles(), WaitingClock()
    life = Life(case.folder, case.shape, files=files, waiting_clock=clock)
    life.loader.drain()
    files.may_read.clear()
    files.begun.clear()
    slow = life.ask(case.prompts[0], ANSWER)
    case.check(files.begun.wait(20.0), "nothing was loaded")
    before = life.engine.call(lambda: life.engine.steps.counters.steps)
    other = life.ask(case.fresh(), ANSWER).wait()
    case.judge(other)
    steps = life.engine.call(lambda: life.engine.steps.counters.steps) - before
    case.check(steps >= ANSWER, f"{steps} steps while a read did not return")
    case.check(not slow.answer and slow.events.empty(), "it was answered before it was loaded")
    given_up = bool(case.rng.random() < 0.5)
    if given_up:
        clock.ahead_s += 1000.0
        life.engine.call(lambda: None)  # wakes the engine, which looks at the clock
        slow.wait()  # the read still has not returned
        files.may_read.set()
    else:
        files.may_read.set()
        slow.wait()
    case.judge(slow)
    life.loader.drain()
    stats = life.engine.stats()
    assert stats.tier is not None
    loads = {how: n for how, n in stats.tier.counters.loads.items() if n}
    expected = {"overdue": 1, "cancelled": 1} if given_up else {"loaded": 1}
    case.check(loads == expected, f"loads ended: {loads}")
    case.check((slow.cached == 0) == given_up, f"{slow.cached} tokens found, given up: {given_up}")
    case.ask(life, case.prompts)
    case.check(not life.disk.counts.misses.total(), f"missed: {dict(life.disk.counts.misses)}")
    case.loaded_tokens += life.engine.stats().cache.loaded_tokens
    life.stop()
    serve_again(case)


# ---------------------------------------------------------------------------------------------------- the whole

DAMAGES: dict[str, Callable[[Case], Expected]] = {
    "flipped_bit": flipped_bit,
    "truncated_segment": truncated_segment,
    "swapped_records": swapped_records,
    "other_weights": other_weights,
    "other_dtype": other_dtype,
    "other_position": other_position,
    "other_tenant": other_tenant,
    "missing_row": missing_row,
    "missing_bytes": missing_bytes,
}
ERRORS: dict[str, Callable[[Case], None]] = {
    "enospc": full_disk,
    "eio": failing_disk,
    "slow_reads": slow_reads,
}


@dataclass
class Tally:
    cases: int = 0
    wrong: int = 0
    miscounted: int = 0
    failed: int = 0
    loaded_tokens: int = 0
    by_probe: int = 0
    seconds: float = 0.0


def run(kind: str, seed: int, tally: Tally) -> None:
    rng = np.random.default_rng([seed, *kind.encode()])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as temporary:
        case = Case.draw(
            rng,
            Path(temporary) / "tier",
            through=True if kind in ("enospc", "eio") else None,
            ample=kind
            == "slow_reads",  # rows that a read may still write to are nobody else's until it returns
        )
        try:
            if kind in DAMAGES:
                damage(case, DAMAGES[kind])
            else:
                ERRORS[kind](case)
        except Hangs:
            case.failed += 1
        for remark in case.remarks:
            print(f"{kind} {seed}: {remark}", flush=True)
        if case.wrong or case.failed:
            print(f"{kind} {seed}: {case.wrong} wrong, {case.failed} failed", flush=True)
    tally.cases += 1
    tally.wrong += case.wrong
    tally.failed += case.failed
    tally.miscounted += bool(case.remarks)
    tally.loaded_tokens += case.loaded_tokens
    tally.by_probe += case.struck_by_probe
    tally.seconds += time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=200, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", help="one kind")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # warnings of faults that are injected on purpose
    tallies = {kind: Tally() for kind in (*DAMAGES, *ERRORS) if args.only in (None, kind)}
    for kind, tally in tallies.items():
        for seed in range(args.first, args.first + args.cases):
            run(kind, seed, tally)
        if len(tallies) > 1:
            print(f"{kind}: {tally.cases} cases in {tally.seconds:.1f} s", flush=True)
    print("\n| fault | cases | wrong tokens | counted right | requests failed | tokens loaded |")
    print("|---|---|---|---|---|---|")
    for kind, tally in tallies.items():
        right = tally.cases - tally.miscounted
        print(
            f"| {kind} | {tally.cases} | {tally.wrong} | {right} | {tally.failed} | {tally.loaded_tokens} |"
        )
    everything = tallies.values()
    figures = {
        "kinds": len(tallies),
        "cases": sum(tally.cases for tally in everything),
        "fewest_cases_of_a_kind": min(tally.cases for tally in everything),
        "wrong": sum(tally.wrong for tally in everything),
        "miscounted": sum(tally.miscounted for tally in everything),
        "failed_requests": sum(tally.failed for tally in everything),
        "loaded_tokens": sum(tally.loaded_tokens for tally in everything),
        "found_before_a_request": sum(tally.by_probe for tally in everything),  # at start, or measuring
        "seconds": round(sum(tally.seconds for tally in everything), 1),
    }
    bars = {
        "kinds": exactly(len(DAMAGES) + len(ERRORS)),
        "fewest_cases_of_a_kind": at_least(200),
        "wrong": exactly(0),
        "miscounted": exactly(0),
        "failed_requests": exactly(0),
    }
    conclude("C2", figures, bars)


if __name__ == "__main__":
    main()
