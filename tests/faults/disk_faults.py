"""Faults of a disk, one to a case: no wrong token, no failed request, and each is counted as the fault that it is.

A case is a directory that an engine has filled by answering prompts, one fault in it, and an engine that starts there
and is asked for prompts that are on the disk. The oracle's engine, whose answers depend on every byte of its blocks,
over the real disk tier; models with full attention alone, with windows, with recurrent states and with both.

Damage is done to the files and to the index, while the directory is closed or under an open tier: a flipped bit
in a record or in its row, a segment that is cut off or gone, records that changed places, rows that lead to a whole
record of other weights, another dtype, another position or another tenant (whose bytes would give other answers), a
row that is missing. The damaged record is one that the next prompt would load. Errors come from the file system's
seam: a full disk, a read or a write that fails, a read that does not return.

Each answer is compared with the oracle's for the tokens alone. A fault is counted right if the tier counts a miss of
the expected kind and no other, removes the row, refuses stores and is `LoadsOnly` for as long as the disk fails, and
leaves a directory without damage.
"""

from __future__ import annotations

import errno
import functools
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np

from engine.helpers import Client, alone
from engine.tiered import Tiered
from faults.faulty_files import FaultyFiles
from rootstock.cache.families import Family
from rootstock.cache.keys import Identity, Namespace, RecordKey, RecordKind, Scope, prefix_digest
from rootstock.cache.tier_index import StoredIndex
from rootstock.cache.types import Tokens
from rootstock.engine.request import Finished
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from rootstock.tiers.base import LoadsOnly, MissKind, Ready, Record, Refusal, Stored
from rootstock.tiers.disk.files import Files
from rootstock.tiers.disk.index import INDEX_NAME
from rootstock.tiers.disk.record_reads import RecordLocation
from rootstock.tiers.disk.tier import RETRY_S, DiskTier
from rootstock.tiers.record import decode_identity
from tiers.helpers import Clock, open_tier

CAP_BYTES = 4 * 2**20
SEGMENT_BYTES = 8 * 1024  # so that a directory has several
ANSWER = 4  # tokens
NAMESPACE = Namespace("fake", "float32:float32")
FAMILIES: tuple[tuple[Family, ...], ...] = (
    (FULL,),
    (FULL, window(24)),
    (FULL, window(5), window(40)),
    (FULL, STATE),
    (window(24), STATE),
    (FULL, window(24), STATE),
)

Do = Callable[[], None]


# ------------------------------------------------------------------------------------------------ a directory


@dataclass
class Case:
    """Directory, the prompts of its engines, and findings about them."""

    rng: np.random.Generator
    folder: Path
    families: tuple[Family, ...]
    block_size: int
    blocks: int
    write: str
    prompts: list[Tokens]
    oracle: FakeRuntime
    wrong: int = 0
    failed: int = 0
    loaded_tokens: int = 0
    struck_by_probe: int = 0  # at start, or by a load that only measures
    remarks: list[str] = field(default_factory=list)  # on counts and rows that are not as they must be

    @staticmethod
    def draw(kind: str, seed: int, folder: Path) -> Case:
        rng = np.random.default_rng([seed, *kind.encode()])
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
        # Rows that a held-up read may still write to are not given out until the read returns.
        requests = 6.0 if kind == "slow_reads" else float(rng.choice([1.2, 2.0, 6.0]))
        return Case(
            rng,
            folder,
            families,
            block_size,
            int(requests * (-(-longest // block_size) + 1)),
            "through" if kind in ("enospc", "eio") or rng.random() < 0.5 else "back",
            [prompt.astype(np.int32) for prompt in prompts],
            FakeRuntime(97, families=families),
        )

    def open(self, files: Files | None = None, disk_clock: Clock | None = None) -> Tiered:
        """Starts an engine on the directory."""
        clocks = {} if disk_clock is None else {"clock": disk_clock, "wall_clock": disk_clock}
        opening = functools.partial(DiskTier.open, segment_bytes=SEGMENT_BYTES, files=files, **clocks)
        # The engine's own assembly opens the tier, and has no options for small segments, faults and clocks.
        with mock.patch.object(DiskTier, "open", staticmethod(opening)):
            return Tiered(
                self.folder,
                cap_bytes=CAP_BYTES,
                write=self.write,
                families=self.families,
                block_size=self.block_size,
                blocks=self.blocks,
                max_batch=8,
                chunk_tokens=32,
            )

    def fill(self) -> None:
        """Asks prompts in a first engine, and continues some. Afterwards the prompts of the second are longer."""
        with self.open() as life:
            self.ask(life, *self.prompts)
            continued = [self.continued(prompt) for prompt in self.prompts]
            self.ask(life, *continued[:2])
        self.prompts = [self.continued(prompt) for prompt in continued[:2]] + continued[2:] + self.prompts

    def continued(self, prompt: Tokens) -> Tokens:
        more = self.rng.integers(0, 97, self.rng.integers(1, 8))
        return np.concatenate((prompt, alone(self.oracle, prompt, ANSWER), more)).astype(np.int32)

    def fresh(self) -> Tokens:
        """Returns a prompt that begins as none that is stored does."""
        return np.concatenate(([96], self.rng.integers(0, 97, self.rng.integers(20, 60)))).astype(np.int32)

    def ask(self, life: Tiered, *prompts: Tokens) -> None:
        """Asks all at once, waits for all, and for their stores."""
        clients = [life.ask(prompt, ANSWER) for prompt in prompts]
        life.run()
        for client in clients:
            self.judge(client)
        life.writer.drain()

    def judge(self, client: Client) -> None:
        if not client.terminals or not isinstance(client.terminals[0], Finished):
            self.failed += 1
        elif client.tokens != alone(self.oracle, client.request.tokens, ANSWER):
            self.wrong += 1

    def check(self, right: bool, remark: str) -> None:
        if not right:
            self.remarks.append(remark)

    # -- looking into the directory while it is closed ----------------------------------------------------------

    def rows(self) -> dict[RecordKey, tuple[Identity, RecordLocation]]:
        with sqlite3.connect(self.folder / INDEX_NAME) as db:
            found = db.execute(
                "SELECT key, identity, segment, offset, bytes, header_bytes FROM records ORDER BY first, last"
            ).fetchall()
        db.close()
        rows = {}
        for key, raw, *place in found:
            identity = decode_identity(raw)
            assert identity is not None
            rows[RecordKey(key)] = identity, RecordLocation(*place)
        return rows

    def change(self, sql: str, *values: object) -> None:
        with sqlite3.connect(self.folder / INDEX_NAME) as db:
            assert db.execute(sql, values).rowcount == 1
        db.close()

    def lead(self, key: RecordKey, place: RecordLocation) -> None:
        where = (place.segment, place.offset, place.stored_bytes, place.header_bytes)
        self.change(
            "UPDATE records SET segment = ?, offset = ?, bytes = ?, header_bytes = ? WHERE key = ?",
            *where,
            key,
        )

    def segment(self, number: int) -> Path:
        return self.folder / f"v1-{number:08d}.segment"

    def wanted(self) -> list[RecordKey]:
        """Returns the records that one of the prompts would load; it becomes the first."""
        index = StoredIndex(self.families, self.block_size)
        for identity, _ in self.rows().values():
            index.add(identity)
        self.rng.shuffle(self.prompts)  # type: ignore[arg-type]
        for i, prompt in enumerate(self.prompts):
            hit = index.tier_hit(prompt, Scope(NAMESPACE), 0, 0, len(prompt) - 1)
            if hit is not None:
                self.prompts[0], self.prompts[i] = self.prompts[i], self.prompts[0]
                keys = [block.identity.key for block in hit.blocks]
                return keys if hit.state is None else [*keys, hit.state.key]
        raise AssertionError("nothing that was stored is of any use")

    def pick(self, keys: Sequence[RecordKey]) -> RecordKey:
        return keys[int(self.rng.integers(len(keys)))]


@dataclass
class Expected:
    """Counts that the tier must have from its start on: `least` to `most` misses of `kind`, and none of another."""

    kind: MissKind | None
    least: int = 1
    most: int = 1
    places: dict[RecordKey, RecordLocation] = field(
        default_factory=dict
    )  # rows that must not lead there any more
    left: frozenset[RecordKey] = frozenset()  # damage that may go unnoticed, because no request needs it
    while_open: Callable[[Tiered], None] | None = None  # the fault, if it comes after the start

    def at_some_time(self, case: Case, do: Do) -> Expected:
        """Does the damage now, or after the start."""
        if case.rng.random() < 0.5:
            do()
        else:
            self.while_open = lambda life: do()
        return self


# ------------------------------------------------------------------------------------------------ the damages


def flipped_bit(case: Case) -> Expected:
    key = case.pick(case.wanted())
    _, place = case.rows()[key]
    expected = Expected(MissKind.CHECKSUM, places={key: place})
    if case.rng.random() < 0.2:  # in the row
        with sqlite3.connect(case.folder / INDEX_NAME) as db:
            raw = bytearray(db.execute("SELECT identity FROM records WHERE key = ?", (key,)).fetchone()[0])
        db.close()
        raw[int(case.rng.integers(len(raw)))] ^= 1 << int(case.rng.integers(8))
        case.change("UPDATE records SET identity = ? WHERE key = ?", bytes(raw), key)
        return expected
    at, bit = place.offset + int(case.rng.integers(place.stored_bytes)), 1 << int(case.rng.integers(8))

    def flip() -> None:
        with case.segment(place.segment).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ bit]))

    return expected.at_some_time(case, flip)


def truncated_segment(case: Case) -> Expected:
    rows, key = case.rows(), case.pick(case.wanted())
    _, place = rows[key]
    cut = place.offset + int(case.rng.integers(place.stored_bytes))
    lost = {
        k: p for k, (_, p) in rows.items() if p.segment == place.segment and p.offset + p.stored_bytes > cut
    }
    return lost_bytes(case, lambda: os.truncate(case.segment(place.segment), cut), lost)


def missing_bytes(case: Case) -> Expected:
    """Removes a segment's file."""
    rows, key = case.rows(), case.pick(case.wanted())
    number = rows[key][1].segment
    lost = {k: p for k, (_, p) in rows.items() if p.segment == number}
    return lost_bytes(case, case.segment(number).unlink, lost)


def lost_bytes(case: Case, do: Do, lost: dict[RecordKey, RecordLocation]) -> Expected:
    """Removes bytes. Rows whose bytes are gone at start are removed at once, others at the first load."""
    if case.rng.random() < 0.5:
        do()
        return Expected(MissKind.MISSING_BYTES, len(lost), len(lost), lost)
    # Which of them is asked for first is not certain, nor whether the others are then still of use.
    return Expected(MissKind.MISSING_BYTES, 1, len(lost), {}, frozenset(lost), lambda life: do())


def swapped_records(case: Case) -> Expected:
    """Swaps the bytes of two records, or their rows, or only the payloads under each other's headers."""
    rows = case.rows()
    content = {number: case.segment(number).read_bytes() for number in {p.segment for _, p in rows.values()}}

    def payload(key: RecordKey) -> bytes:
        place = rows[key][1]
        end = place.offset + place.stored_bytes
        return content[place.segment][end - place.payload_bytes : end]

    one = case.pick(case.wanted())
    lengths = (rows[one][1].stored_bytes, rows[one][1].header_bytes)
    equal = [
        key
        for key, (_, place) in rows.items()
        if (place.stored_bytes, place.header_bytes) == lengths
        and payload(key) != payload(one)  # a window keeps the same of a block as full attention does
    ]
    how = str(case.rng.choice(["bytes", "payloads"])) if equal and case.rng.random() < 0.8 else "rows"
    other = case.pick(equal if how != "rows" else [key for key in rows if key != one])
    (identity_one, place_one), (identity_other, place_other) = rows[one], rows[other]
    kind = MissKind.CHECKSUM if how == "payloads" else first_difference(identity_one, identity_other)
    # If both are of use, the one that comes first is found out first, and the other may then not be asked for.
    expected = Expected(kind, 1, 2, left=frozenset({one, other}))
    if how == "rows":
        case.lead(one, place_other)
        case.lead(other, place_one)
        return expected

    def swap() -> None:
        for here, there in ((place_one, place_other), (place_other, place_one)):
            moved = here.payload_bytes if how == "payloads" else here.stored_bytes
            end = there.offset + there.stored_bytes
            with case.segment(here.segment).open("r+b") as file:
                file.seek(here.offset + here.stored_bytes - moved)
                file.write(content[there.segment][end - moved : end])

    return expected.at_some_time(case, swap)


def first_difference(asked: Identity, found: Identity) -> MissKind:
    """Returns the kind of the first difference, in the order of the documentation, for one namespace and dtype."""
    if (asked.family, asked.kind) != (found.family, found.kind):
        return MissKind.OTHER_LAYERS
    if asked.end != found.end or (asked.kind is RecordKind.BLOCKS and asked.start != found.start):
        return MissKind.OTHER_POSITION
    return MissKind.OTHER_TOKENS


def other_weights(case: Case) -> Expected:
    return led_astray(case, MissKind.OTHER_NAMESPACE, replace(NAMESPACE, weights="others"))


def other_tenant(case: Case) -> Expected:
    return led_astray(case, MissKind.OTHER_NAMESPACE, replace(NAMESPACE, salt="another"))


def other_dtype(case: Case) -> Expected:
    """Leads to a record of a server that computes in bfloat16, another namespace too; or of another dtype alone."""
    other = "bfloat16:bfloat16"
    if case.rng.random() < 0.5:
        return led_astray(case, MissKind.OTHER_NAMESPACE, replace(NAMESPACE, kv_dtype=other), dtype=other)
    return led_astray(case, MissKind.OTHER_DTYPE, dtype=other)


def other_rope(case: Case) -> Expected:
    return led_astray(case, MissKind.OTHER_NAMESPACE, replace(NAMESPACE, rope_regime="yarn"))


def other_position(case: Case) -> Expected:
    return led_astray(case, MissKind.OTHER_POSITION, later_by=int(case.rng.integers(1, 4)))


def led_astray(
    case: Case,
    kind: MissKind,
    namespace: Namespace = NAMESPACE,
    dtype: str = NAMESPACE.kv_dtype,
    later_by: int = 0,  # blocks
) -> Expected:
    """Leads a row to a whole record of the same block of something else, with bytes that would give other answers."""
    key = case.pick(case.wanted())
    identity, _ = case.rows()[key]
    before = case.rng.integers(0, 97, later_by * case.block_size).astype(np.int32)
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
    tier = open_tier(case.folder, CAP_BYTES, SEGMENT_BYTES)
    loaded = tier.load(identity)
    payload = [np.frombuffer(view, np.uint8).copy() for view in loaded.payload]  # type: ignore[union-attr]
    payload[-1] ^= case.rng.integers(1, 256, len(payload[-1]), np.uint8)  # the hashes, as of other weights
    assert isinstance(tier.store([Record(other, payload)])[0], Stored)
    tier.close()
    place = case.rows()[other.key][1]
    case.lead(key, place)
    return Expected(kind, places={key: place})


def missing_row(case: Case) -> Expected:
    key = case.pick(case.wanted())
    if case.rng.random() < 0.5:
        case.change("DELETE FROM records WHERE key = ?", key)
        return Expected(None)  # the index does not know the record
    # Several requests may be on their way to it before one has come back.
    behind = len(case.prompts)
    return Expected(MissKind.ABSENT, 1, behind, while_open=lambda life: life.disk._index.delete([key]))


def serve_damaged(case: Case, expected: Expected, files: Files | None = None) -> None:
    with case.open(files) as life:
        if expected.while_open is not None:
            expected.while_open(life)
        case.ask(life, *case.prompts)
        case.ask(life, case.continued(case.prompts[0]))
        case.loaded_tokens += life.engine.stats().cache.loaded_tokens
        missed_by_requests = life.tier.counters.loads["missed"]
        counts = life.disk.counts
    misses = Counter(counts.misses)
    noticed = misses.pop(expected.kind, 0) if expected.kind is not None else 0
    case.struck_by_probe += bool(noticed and not missed_by_requests)
    if expected.kind is not MissKind.ABSENT:
        misses.pop(MissKind.ABSENT, 0)  # asked for again by a request that had not heard of it yet
    if expected.kind is not None:
        case.check(
            expected.least <= noticed <= expected.most,
            f"{expected.kind} is counted {noticed} times, not {expected.least} to {expected.most}",
        )
    case.check(not misses, f"counted besides: {dict(misses)}")
    rows = case.rows()
    still = [key for key, place in expected.places.items() if key in rows and rows[key][1] == place]
    case.check(not still, "the row still leads there")
    struck = counts.quarantined_records
    absent = expected.kind in (None, MissKind.ABSENT)
    case.check(struck == (0 if absent else noticed), f"{struck} rows struck, {noticed} misses")


def serve_again(case: Case, left: frozenset[RecordKey] = frozenset()) -> None:
    """Starts again: all records in the directory are right and are found, and no load misses."""
    with case.open() as life:
        wrong = [failure for failure in life.disk.verify().failures if failure.key not in left]
        case.check(not wrong, f"left in the directory: {wrong}")
        case.ask(life, *case.prompts[:3])
        case.loaded_tokens += life.engine.stats().cache.loaded_tokens
        counts = life.disk.counts
    if not left:
        case.check(not counts.misses.total(), f"missed again: {dict(counts.misses)}")


# -------------------------------------------------------------------------------------------------- the errors


def full_disk(case: Case) -> None:
    """Raises ENOSPC after some bytes or none, or where a file or a name is made durable."""
    call = str(case.rng.choice(["", "open_new", "sync", "sync_folder", "commit"]))
    refused_stores(case, errno.ENOSPC, call, int(case.rng.integers(0, 150)))  # less than a record


def failing_disk(case: Case) -> None:
    """Raises EIO for one read, or for writes."""
    if case.rng.random() < 0.5:
        refused_stores(case, errno.EIO, str(case.rng.choice(["write", "open_new", "sync", "sync_folder"])))
        return
    # Each record is opened, and read in one call at least.
    left = int(case.rng.integers(2 * len(case.wanted())))
    files = FaultyFiles()

    def fail(name: str) -> int:
        nonlocal left
        if name in ("open_read", "read"):
            left -= 1
            return errno.EIO if left == -1 else 0
        return 0

    def arm(_: Tiered) -> None:
        files.fail = fail

    serve_damaged(case, Expected(MissKind.IO_ERROR, while_open=arm), files)
    case.check(left < 0, "the read that was to fail never came")
    serve_again(case)


def refused_stores(case: Case, number: int, call: str, free_bytes: int = 0) -> None:
    """Checks that stores are refused while loads go on, and that stores resume a minute after the disk has recovered.

    `call` fails with the errno `number`. If `call` is empty, no call fails and `free_bytes` can be written.
    """
    case.wanted()
    files, clock = FaultyFiles(), Clock()
    with case.open(files, clock) as life:
        counts = life.disk.counts
        files.free_bytes = 2**60 if call else free_bytes
        files.fail = lambda name: number if name == call else 0
        case.ask(life, case.fresh())
        case.check(counts.refused[Refusal.FAILED] >= 1, f"refused: {dict(counts.refused)}")
        case.check(isinstance(life.disk.state, LoadsOnly), f"the state is {life.disk.state}")
        case.ask(life, *case.prompts)
        loaded = life.engine.stats().cache.loaded_tokens
        case.check(loaded > 0, "nothing was loaded while stores were refused")
        stored = counts.stored_records
        case.check(not stored, f"{stored} records stored on a disk that takes none")
        clock.now_s += RETRY_S + 1  # it is tried again, and refused again
        failed = counts.refused[Refusal.FAILED]
        case.ask(life, case.fresh())
        case.check(counts.refused[Refusal.FAILED] > failed, "a store was not tried again after a minute")
        missed = Counter(counts.misses)
        files.free_bytes, files.fail = 2**60, lambda name: 0
        clock.now_s += RETRY_S + 1
        case.ask(life, case.fresh())
        case.check(isinstance(life.disk.state, Ready), f"the disk is well, and the state {life.disk.state}")
        case.check(counts.stored_records > 0, "the disk is well, and nothing is stored")
        case.check(counts.misses == missed, f"the disk is well, and missed: {dict(counts.misses)}")
        missed.pop(MissKind.ABSENT, 0)  # planned while the record waited for a store, which was refused
        case.check(not missed, f"missed: {dict(missed)}")
        case.loaded_tokens += loaded
    serve_again(case)


def slow_reads(case: Case) -> None:
    """Holds up a read while another request decodes from its first token to its last. Then either the read returns
    and its prompt is found, or the load is overdue and its request computes and ends before the read does."""
    case.wanted()
    with case.open() as life:
        slow = life.begin_load(case.prompts[0].tolist(), ANSWER)
        before = len(life.batches)
        other = life.ask(case.fresh(), ANSWER)
        while not other.ended.is_set():
            life.run(steps=1)
        case.judge(other)
        steps = len(life.batches) - before
        case.check(steps >= ANSWER, f"{steps} steps while a read did not return")
        case.check(not slow.events, "it was answered before it was loaded")
        given_up = bool(case.rng.random() < 0.5)
        if given_up:
            life.clock.now_s += 1000.0
            while not slow.ended.is_set():  # the read still has not returned
                life.run(steps=1)
            life.end_loads()
        else:
            life.loads.open()
            life.run()
        case.judge(slow)
        loads = {how: n for how, n in life.tier.counters.loads.items() if n}
        expected = {"overdue": 1, "cancelled": 1} if given_up else {"loaded": 1}
        case.check(loads == expected, f"loads ended: {loads}")
        found = slow.cached_tokens
        case.check((found == 0) == given_up, f"{found} tokens found, given up: {given_up}")
        case.ask(life, *case.prompts)
        misses = life.disk.counts.misses
        case.check(not misses.total(), f"missed: {dict(misses)}")
        case.loaded_tokens += life.engine.stats().cache.loaded_tokens
    serve_again(case)


# ---------------------------------------------------------------------------------------------------- the whole

DAMAGES: dict[str, Callable[[Case], Expected]] = {
    "flipped_bit": flipped_bit,
    "truncated_segment": truncated_segment,
    "swapped_records": swapped_records,
    "other_weights": other_weights,
    "other_dtype": other_dtype,
    "other_rope": other_rope,
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
KINDS = (*DAMAGES, *ERRORS)


def run(kind: str, seed: int, folder: Path) -> Case:
    """Plays one case in a directory that it makes."""
    case = Case.draw(kind, seed, folder)
    case.fill()
    if kind in DAMAGES:
        expected = DAMAGES[kind](case)
        serve_damaged(case, expected)
        serve_again(case, expected.left)
    else:
        ERRORS[kind](case)
    return case
