"""Records in a shared server: two servers that use it, and all that can go wrong with it."""

from __future__ import annotations

import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rootstock.cache.keys import RecordKey
from rootstock.tiers.base import AlreadyStored, MissKind, NotStored, Off, Ready, Record, Refusal, Stored
from rootstock.tiers.record import encode, encode_identity
from rootstock.tiers.remote import connection_pool, record_stream
from rootstock.tiers.remote import tier as remote_tier
from rootstock.tiers.remote.connection import Reply, StoreConnection
from rootstock.tiers.remote.connection_pool import Connect
from rootstock.tiers.remote.record_code import RecordCodes
from rootstock.tiers.remote.record_stream import RECORD_KIND
from rootstock.tiers.remote.tier import RemoteTier
from shared_store import SharedStore
from tiers.helpers import is_right, keys_of, kind_of_miss, records
from waiting import wait_for, wait_until

CODES = RecordCodes(b"k" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedStore]:
    with SharedStore(tmp_path) as store:
        yield store


@pytest.fixture
def opened(store: SharedStore) -> Iterator[Callable[..., RemoteTier]]:
    """Opens tiers, which are closed at the end."""
    tiers: list[RemoteTier] = []

    def open_tier(codes: RecordCodes | None = CODES, **options: object) -> RemoteTier:
        tiers.append(RemoteTier(store.config, codes, **options))  # type: ignore[arg-type]
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


Opened = Callable[..., RemoteTier]


def test_what_one_server_stores_another_one_loads(opened: Opened) -> None:
    first, second = opened(), opened()
    some = records(20)
    assert all(isinstance(each, Stored) for each in first.store(some))
    assert all(isinstance(each, AlreadyStored) for each in second.store(some))
    for record in some:
        assert is_right(second.load(record.identity), record)
    assert first.counts.stored_records == second.counts.loaded_records == 20


class Noting(StoreConnection):
    """Connection that notes the values that are asked for, opened and ended."""

    notes: list[str]
    names: dict[bytes, str]

    def send(self, commands: Sequence[Sequence[bytes]], *, at_once: bool = True) -> None:
        self.notes += [f"ask {self.names[each[1]]}" for each in commands if each[0] == b"GET"]
        super().send(commands, at_once=at_once)

    def open_value(self, key: bytes) -> int | None:
        size = super().open_value(key)
        self.notes.append(f"open {self.names[key]}")
        return size

    def end_value(self) -> None:
        super().end_value()
        self.notes.append("end")


def noting(tier: RemoteTier, some: Sequence[Record]) -> tuple[list[str], Connect]:
    names = {name_of(tier, each.identity.key): "abc"[number] for number, each in enumerate(some)}
    made = type("Noting", (Noting,), {"notes": [], "names": names})
    return made.notes, made


def test_the_next_record_is_asked_for_while_one_is_read(opened: Opened) -> None:
    a, b, c = some = records(3)
    tier = opened()
    tier.store(some)
    notes, connect = noting(tier, some)
    reader = opened(connect=connect)
    reader.found(each.identity.key for each in (a, b))
    for record, then in ((a, b), (b, c), (c, None)):  # the reader does not know that the server has c
        assert is_right(reader.load(record.identity, None, then and then.identity), record)
    assert notes == ["ask a", "open a", "ask b", "end", "open b", "end", "ask c", "open c", "end"]


def test_a_record_that_is_not_loaded_next_is_not_taken_for_the_next_one(opened: Opened) -> None:
    a, b, c = some = records(3)
    tier = opened()
    tier.store(some)
    notes, connect = noting(tier, some)
    reader = opened(connect=connect)
    reader.found(each.identity.key for each in some)
    assert is_right(reader.load(a.identity, None, b.identity), a)
    assert is_right(reader.load(c.identity), c)  # the job of a and b was cancelled
    assert is_right(reader.load(b.identity), b)
    assert notes == ["ask a", "open a", "ask b", "end", "ask c", "open c", "end", "ask b", "open b", "end"]


def test_a_damaged_record_ends_what_was_asked_for_behind_it(opened: Opened, store: SharedStore) -> None:
    a, b = some = records(2)
    tier = opened()
    tier.store(some)
    name = name_of(tier, a.identity.key)
    (value,) = store.client().run([[b"GET", name]])
    assert isinstance(value, bytes)
    store.client().run([[b"SET", name, value[:-1] + bytes([value[-1] ^ 1])]])
    assert kind_of_miss(tier.load(a.identity, None, b.identity)) is MissKind.CHECKSUM
    assert is_right(tier.load(b.identity), b)
    assert tier.counts.outages == 0


def test_a_group_with_the_same_record_twice_stores_it_once(opened: Opened) -> None:
    (record,) = records(1)
    first, second = opened().store([record, record])
    assert isinstance(first, Stored)
    assert isinstance(second, AlreadyStored)


def name_of(tier: RemoteTier, key: RecordKey) -> bytes:
    return tier.name(RECORD_KIND, key)


def test_a_clear_leaves_the_records_to_other_servers(opened: Opened) -> None:
    tier = opened()
    (record,) = records(1)
    tier.store([record])
    assert tier.clear()
    assert tier.clear(record.identity.namespace)
    assert is_right(tier.load(record.identity), record)


def test_a_quarantined_record_is_gone_for_all_servers(opened: Opened) -> None:
    gone: list[RecordKey] = []
    tier, other = opened(gone=gone.extend), opened()
    some = records(3)
    tier.store(some)
    tier.quarantine(keys_of(some)[:1])
    assert gone == keys_of(some)[:1]
    assert kind_of_miss(other.load(some[0].identity)) is MissKind.ABSENT
    assert is_right(other.load(some[1].identity), some[1])


def flipped(value: bytes) -> Iterator[bytes]:
    for at in range(0, len(value), 61):
        yield value[:at] + bytes([value[at] ^ 16]) + value[at + 1 :]


@pytest.mark.parametrize("codes", [None, CODES], ids=["checksums", "codes"])
@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(flipped, id="flipped bits"),
        pytest.param(lambda value: (value[:cut] for cut in range(0, len(value), 97)), id="cut off"),
        pytest.param(lambda value: [value + b"x", value * 2, b"\0" * len(value)], id="longer or empty"),
    ],
)
def test_a_damaged_record_is_a_miss_and_is_removed(
    codes: RecordCodes | None,
    damaged: Callable[[bytes], Sequence[bytes]],
    opened: Opened,
    store: SharedStore,
) -> None:
    tier, client = opened(codes), store.client()
    (record,) = records(1)
    tier.store([record])
    name = name_of(tier, record.identity.key)
    (value,) = client.run([[b"GET", name]])
    assert isinstance(value, bytes)
    for wrong in damaged(value):
        client.run([[b"SET", name, wrong]])
        result = tier.load(record.identity, [np.zeros(3000, np.uint8)])
        assert kind_of_miss(result) not in (None, MissKind.IO_ERROR, MissKind.UNAVAILABLE)
        assert client.run([[b"EXISTS", name]]) == [0] or not wrong
    tier.store([record])
    assert is_right(tier.load(record.identity), record)


def test_a_record_under_the_key_of_another_one_is_a_miss(opened: Opened, store: SharedStore) -> None:
    tier, client = opened(), store.client()
    first, second = records(2)
    tier.store([first, second])
    (value,) = client.run([[b"GET", name_of(tier, first.identity.key)]])
    assert isinstance(value, bytes)
    client.run([[b"SET", name_of(tier, second.identity.key), value]])
    assert kind_of_miss(tier.load(second.identity)) is MissKind.OTHER_TOKENS


def test_a_record_in_the_order_of_a_disk_is_a_miss(opened: Opened, store: SharedStore) -> None:
    """Records of the shared server had this order before `RECORD_KIND` had a number."""
    tier, client = opened(None), store.client()
    (record,) = records(1)
    client.run([[b"SET", name_of(tier, record.identity.key), b"".join(encode(record).views)]])
    assert kind_of_miss(tier.load(record.identity)) is MissKind.CHECKSUM
    (outcome,) = tier.store([record])
    assert isinstance(outcome, Stored)
    assert client.run([[b"STRLEN", name_of(tier, record.identity.key)]]) == [outcome.stored_bytes]
    assert is_right(tier.load(record.identity), record)


def test_a_record_of_somebody_without_the_secret_is_a_miss(opened: Opened, store: SharedStore) -> None:
    tier, forger, client = opened(), opened(None), store.client()
    (record,) = records(1)
    forger.store([record])
    (value,) = client.run([[b"GET", name_of(forger, record.identity.key)]])
    assert isinstance(value, bytes)
    name = name_of(tier, record.identity.key)
    record_bytes, other = value[:-16], RecordCodes(b"x" * 32).begin()
    other.update(record_bytes)
    for forged in (value, record_bytes + bytes(32), record_bytes + other.digest()):
        client.run([[b"SET", name, forged]])
        assert kind_of_miss(tier.load(record.identity)) in (MissKind.CHECKSUM, MissKind.MISSING_BYTES)


def test_servers_with_other_secrets_do_not_delete_each_others_records(opened: Opened) -> None:
    tier, other = opened(), opened(RecordCodes(b"x" * 32))
    (record,) = records(1)
    tier.store([record])
    assert kind_of_miss(other.load(record.identity)) is MissKind.ABSENT
    assert is_right(tier.load(record.identity), record)


def test_a_full_server_that_evicts_nothing_refuses_records(opened: Opened, store: SharedStore) -> None:
    tier, client = opened(), store.client()
    client.run([[b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction"]])
    client.run([[b"CONFIG", b"SET", b"maxmemory", b"1"]])
    (outcome,) = tier.store(records(1))
    assert isinstance(outcome, NotStored)
    assert outcome.why is Refusal.NO_ROOM
    assert tier.state == Ready()
    usage = tier.usage()
    assert usage is not None
    assert (usage.cap_bytes, usage.policy) == (1, "noeviction")


def test_a_server_that_does_not_say_what_it_has_stores_nothing(tmp_path: Path) -> None:
    with SharedStore(tmp_path, "--rename-command", "EXISTS", "") as store:
        tier = RemoteTier(store.config)
        outcomes = tier.store(records(3))
        assert all(isinstance(each, NotStored) and each.why is Refusal.FAILED for each in outcomes)
        assert tier.run([[b"ECHO", b"next"]]) == [b"next"], "a reply was left unread"
        tier.close()


def test_a_server_that_dies_is_off_and_found_again(
    opened: Opened, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "RETRY_S", 0.01)
    gone: list[RecordKey] = []
    tier = opened(gone=gone.extend)
    some = records(5)
    tier.store(some)
    store.kill()
    assert kind_of_miss(tier.load(some[0].identity)) is MissKind.IO_ERROR
    assert isinstance(tier.state, Off)
    assert kind_of_miss(tier.load(some[0].identity)) is MissKind.UNAVAILABLE
    (outcome,) = tier.store(some[:1])
    assert isinstance(outcome, NotStored)
    assert outcome.why is Refusal.UNAVAILABLE
    store.start()  # empty
    wait_until(lambda: tier.state == Ready())
    assert set(gone) == set(keys_of(some)), "the index claims records that the server does not have"
    assert all(isinstance(each, Stored) for each in tier.store(some))
    assert is_right(tier.load(some[4].identity), some[4])
    assert tier.counts.outages == 1


def test_a_server_that_was_emptied_is_noticed_at_the_first_miss(opened: Opened, store: SharedStore) -> None:
    gone: list[RecordKey] = []
    tier = opened(gone=gone.extend)
    some = records(30)
    tier.store(some)
    store.client().run([[b"FLUSHALL"]])
    assert kind_of_miss(tier.load(some[0].identity)) is MissKind.ABSENT
    wait_until(lambda: set(gone) == set(keys_of(some)))
    assert all(isinstance(each, Stored) for each in tier.store(some))


def test_a_server_that_evicts_is_not_asked_for_all_records_again_and_again(
    opened: Opened, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[float] = []
    check = RemoteTier._check_known

    def noted(tier: RemoteTier) -> None:
        checks.append(time.monotonic())
        check(tier)

    monkeypatch.setattr(RemoteTier, "_check_known", noted)
    monkeypatch.setattr(remote_tier, "CHECK_PAUSE_S", 0.5)
    tier, client = opened(), store.client()
    some = records(10)
    tier.store(some)
    for record in some:
        client.run([[b"DEL", name_of(tier, record.identity.key)]])
        assert kind_of_miss(tier.load(record.identity)) is MissKind.ABSENT
        time.sleep(0.01)
    wait_until(lambda: len(checks) >= 2)  # one at once, and one for all misses since then
    assert all(after - before >= 0.5 for before, after in pairwise(checks))


def test_the_end_does_not_wait_for_a_check_of_all_records(
    opened: Opened, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "_CHECKED_AT_ONCE", 1)
    tier, client, asked = opened(), store.client(), threading.Event()
    some = records(10)
    tier.store(some)
    client.run([[b"DEL", name_of(tier, some[0].identity.key)]])
    run, exchanges = tier.run, list[int]()

    def held(commands: Sequence[Sequence[bytes]], seconds: float | None = None) -> list[Reply]:
        exchanges.append(len(commands))
        asked.set()
        wait_until(lambda: tier._closing)
        return run(commands, seconds)

    monkeypatch.setattr(tier, "run", held)
    tier.load(some[0].identity)
    wait_for(asked)
    tier.close()
    assert exchanges == [1]


def test_a_server_that_hangs_costs_one_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "RETRY_S", 0.01)
    with SharedStore(tmp_path, timeout_s=0.3) as store:
        tier = RemoteTier(store.config)
        some = records(5)
        tier.store(some)
        store.hold()
        kinds = [kind_of_miss(tier.load(record.identity)) for record in some]
        assert kinds == [MissKind.IO_ERROR, *[MissKind.UNAVAILABLE] * 4]
        store.go_on()
        wait_until(lambda: tier.state == Ready())
        tier.close()


def test_only_so_many_records_are_known(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "MOST_KNOWN", 10)
    gone: list[RecordKey] = []
    tier = opened(gone=gone.extend)
    some = records(25)
    for record in some:
        tier.store([record])
    assert gone == keys_of(some)[:15]
    assert is_right(tier.load(some[0].identity), some[0])


def test_a_server_that_cannot_be_reached_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "RETRY_S", 0.01)
    store = SharedStore(tmp_path)
    tier = RemoteTier(store.config)
    assert isinstance(tier.state, Off)
    with store:
        wait_until(lambda: tier.state == Ready())
        (outcome,) = tier.store(records(1))
        assert isinstance(outcome, Stored)
        tier.close()


def test_connections_that_were_idle_for_long_are_not_used_again(
    opened: Opened, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server, or a network, may have ended them: this is no outage."""
    tier = opened()
    some = records(3)
    tier.store(some)
    monkeypatch.setattr(connection_pool, "IDLE_S", 0.0)
    for record in some:
        store.client().run([[b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes"]])
        assert is_right(tier.load(record.identity), record)
    assert tier.counts.outages == 0


def test_a_connection_is_not_used_again_after_an_exception(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unread bytes would be the next command's reply."""
    tier = opened()
    first, second = records(2)
    tier.store([first, second])

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(record_stream, "decode_header", fail)
    with pytest.raises(MemoryError):
        tier.load(first.identity)
    monkeypatch.undo()
    assert is_right(tier.load(second.identity), second)
    assert tier.counts.outages == 0


def test_a_header_takes_no_more_memory_than_a_record_needs(opened: Opened, store: SharedStore) -> None:
    tier = opened(None)
    (record,) = records(1)
    identity, count = encode_identity(record.identity), 500_000
    sizes = struct.pack("<I", count) + bytes(8 * count)
    header = struct.pack("<I", len(identity)) + identity + sizes
    prefix = struct.pack("<8sIQ", b"RtStkRm2", len(header), 0)
    store.client().run([[b"SET", name_of(tier, record.identity.key), prefix + header + bytes(16)]])
    tracemalloc.start()
    result = tier.load(record.identity, [])
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kind_of_miss(result) is MissKind.MISSING_BYTES
    assert most_bytes < 2**20


@pytest.mark.parametrize("said", ["\u00b2", "9" * 5000, "-1", ""])
def test_a_server_that_reports_no_numbers(said: str, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened()
    reply = f"used_memory:{said}\r\nmaxmemory:7\r\n".encode()
    monkeypatch.setattr(tier, "run", lambda commands: [reply, b""])
    usage = tier.usage()
    assert usage is not None
    assert (usage.used_bytes, usage.cap_bytes) == (0, 7)
