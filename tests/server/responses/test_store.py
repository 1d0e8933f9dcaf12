"""The store of responses: chains, bounds, tenants, restarts and damage."""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rootstock.errors import (
    HistoryTooLong,
    InvalidOption,
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStoreFailed,
)
from rootstock.server.formats.responses import store as store_module
from rootstock.server.formats.responses.store import NewResponse, ResponseStore, StoredResponse
from rootstock.units import MIB
from waiting import HANG_S

TENANT = "tenant"


def response(id: str, parent: str | None = None, text: str = "x") -> NewResponse:
    return NewResponse(id, parent, f'{{"id":"{id}"}}', f'["in {id} {text}"]', f'[{{"out":"{id}"}}]')


def chain(store: ResponseStore, name: str, length: int, tenant: str = TENANT, text: str = "x") -> list[str]:
    ids = [f"{name}{i}" for i in range(length)]
    for i, id in enumerate(ids):
        store.of(tenant).put(response(id, ids[i - 1] if i else None, text))
    return ids


def history(store: ResponseStore, id: str, tenant: str = TENANT, most: int = 64 * MIB) -> list[Any]:
    return [item for each in json.loads(store.of(tenant).history(id, most)) for item in each]


def holds(store: ResponseStore, id: str, tenant: str = TENANT) -> bool:
    try:
        store.of(tenant).get(id)
    except ResponseNotFound:
        return False
    return True


def noise(count: int) -> str:
    """Returns text that no compression shortens much."""
    return secrets.token_urlsafe(count * 3 // 4)


@pytest.fixture
def store() -> Any:
    one = ResponseStore.open(None, MIB)
    yield one
    one.close()


def test_a_read_sees_the_writes_before_it(store: ResponseStore) -> None:
    for i in range(50):
        store.of(TENANT).put(response(f"r{i}"))
        assert json.loads(store.of(TENANT).get(f"r{i}").output) == [{"out": f"r{i}"}]


def test_the_history_is_every_input_and_output_in_order(store: ResponseStore) -> None:
    ids = chain(store, "r", 5)
    assert history(store, ids[2]) == [each for id in ids[:3] for each in (f"in {id} x", {"out": id})]
    fork = response("fork", ids[1])
    store.of(TENANT).put(fork)
    assert history(store, "fork")[-3:] == [{"out": ids[1]}, "in fork x", {"out": "fork"}]
    assert len(history(store, ids[4])) == 10


def test_a_chain_that_was_cut_cannot_be_continued(store: ResponseStore) -> None:
    ids = chain(store, "r", 4)
    store.of(TENANT).delete(ids[1])
    assert history(store, ids[0])
    for id in (ids[1], ids[2], ids[3], "unknown"):
        with pytest.raises(PreviousResponseNotFound):
            history(store, id)
    assert holds(store, ids[3])
    store.of(TENANT).put(response("late", ids[1]))  # it was deleted while this one was made
    with pytest.raises(PreviousResponseNotFound):
        history(store, "late")


def test_other_tenants_see_nothing(store: ResponseStore) -> None:
    [id] = chain(store, "r", 1)
    for tenant in ("", "other"):
        assert not holds(store, id, tenant)
        with pytest.raises(PreviousResponseNotFound):
            history(store, id, tenant)
        with pytest.raises(ResponseNotFound):
            store.of(tenant).delete(id)
        store.of(tenant).put(response(f"of{tenant}", id))  # names another tenant's
        with pytest.raises(PreviousResponseNotFound):
            history(store, f"of{tenant}", tenant)
    assert holds(store, id)


def test_the_least_recently_used_chain_is_evicted_whole(store: ResponseStore) -> None:
    text = noise(100_000)
    first, second = chain(store, "a", 3, text=text), chain(store, "b", 3, text=text)
    assert all(holds(store, id) for id in first + second)
    history(store, first[2])  # a use
    third = chain(store, "c", 6, text=text)
    assert not any(holds(store, id) for id in second)
    assert all(holds(store, id) for id in third)


def test_a_response_larger_than_the_store_is_not_kept(store: ResponseStore) -> None:
    [small] = chain(store, "small", 1, tenant="other")
    store.of(TENANT).put(response("large", text=noise(4 * MIB)))
    assert not holds(store, "large")
    assert holds(store, small, "other")


def test_a_tenant_with_much_does_not_evict_another_with_little(store: ResponseStore) -> None:
    little = chain(store, "little", 2, tenant="other", text=noise(1000))
    for i in range(40):
        store.of(TENANT).put(response(f"much{i}", text=noise(100_000)))
    assert all(holds(store, id, "other") for id in little)
    kept = [i for i in range(40) if holds(store, f"much{i}")]
    assert kept == list(range(40 - len(kept), 40))
    assert 8 < len(kept) < 11


def test_entries_are_bounded(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 10)
    ids = [chain(store, f"r{i}-", 1)[0] for i in range(25)]
    assert [id for id in ids if holds(store, id)] == ids[15:]


def test_a_read_takes_no_text_that_it_does_not_need(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short request may refer to many responses: what it reads must be what is counted."""
    large = "x" * 100_000
    store.of(TENANT).put(NewResponse("a", None, f'{{"instructions":"{large}"}}', "[1]", "[2]"))
    store.of(TENANT).put(NewResponse("b", "a", "{}", f'["{large}"]', "[3]"))
    checked: list[int] = []
    checksum = store_module._checksum

    def counted(number: int, content: bytes) -> bytes:
        checked.append(len(content))
        return checksum(number, content)

    store.of(TENANT).get("b")  # both are written
    monkeypatch.setattr(store_module, "_checksum", counted)
    assert history(store, "a") == [1, 2]
    assert store.of(TENANT).output("b") == b"[3]"
    assert sum(checked) < 1_000
    assert history(store, "b") == [1, 2, large, 3]
    assert sum(checked) < len(large) + 2_000


def test_a_long_history_is_refused_before_it_is_read(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = chain(store, "r", 6)
    sizes = [store.of(TENANT).history_bytes(id, MIB) for id in ids]
    assert sizes == [len(f'["in {ids[0]} x"][{{"out":"{ids[0]}"}}]') * count for count in range(1, 7)]
    monkeypatch.setattr(store, "read", lambda *_: pytest.fail("it was read"))
    own = store.of(TENANT)
    for ask in (own.history, own.history_bytes):
        with pytest.raises(HistoryTooLong, match=f"more than {sizes[4] - 1:,} bytes"):
            ask(ids[4], sizes[4] - 1)
    monkeypatch.undo()
    assert history(store, ids[4], most=sizes[4])
    monkeypatch.setattr(store_module, "MAX_DEPTH", 5)
    assert history(store, ids[4])
    with pytest.raises(HistoryTooLong, match="more than 5 responses"):
        history(store, ids[5])


def test_the_limit_counts_the_bytes_that_a_read_returns(store: ResponseStore) -> None:
    zeros = "0" * 100_000  # one kilobyte, if it was compressed
    ids = [chain(store, f"r{i}-", 1, text=zeros)[0] for i in range(40)]
    kept = [id for id in ids if holds(store, id)]
    assert kept == ids[-len(kept) :]
    assert sum(store.of(TENANT).bytes_of(id) for id in kept) <= MIB < (len(kept) + 1) * 102_000
    assert store.stats.stored_bytes == sum(store.of(TENANT).bytes_of(id) for id in kept)
    for id in kept:
        stored = store.of(TENANT).get(id)
        assert store.of(TENANT).bytes_of(id) >= len(stored.head) + len(stored.input) + len(stored.output)
    assert store.of(TENANT).output_bytes([kept[0], kept[0], "unknown"]) == 2 * len(stored.output)
    assert store.of("other").output_bytes(kept) == 0


def test_responses_that_wait_are_bounded(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "MAX_WAITING_BYTES", 1000)
    store.of(TENANT).put(response("small"))
    store.of(TENANT).put(response("large", text="x" * 1000))
    assert holds(store, "small")
    assert not holds(store, "large")
    assert "already wait" in caplog.text
    store.of(TENANT).put(response("later", text="x" * 800))  # the first is written: there is room again
    assert holds(store, "later")


def test_a_file_keeps_responses_and_the_key_of_seals(tmp_path: Path) -> None:
    path = tmp_path / "state" / "responses.sqlite"
    first = ResponseStore.open(path, MIB)
    ids = chain(first, "r", 3)
    first.close()
    assert path.stat().st_mode & 0o077 == 0
    second = ResponseStore.open(path, MIB)
    assert second.sealing_key == first.sealing_key
    assert len(history(second, ids[2])) == 6
    second.close()
    assert ResponseStore.open(None, MIB).sealing_key != first.sealing_key


def test_a_smaller_limit_applies_to_a_file_at_its_start(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    first = ResponseStore.open(path, 8 * MIB)
    ids = [chain(first, f"r{i}-", 1, text=noise(400_000))[0] for i in range(10)]
    first.close()
    assert path.stat().st_size > 2 * MIB
    second = ResponseStore.open(path, MIB)
    kept = [id for id in ids if holds(second, id)]
    assert kept == ids[-len(kept) :]
    assert len(kept) == 2
    second.close()
    assert path.stat().st_size < 2 * MIB


def test_a_file_serves_one_server_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    first = ResponseStore.open(path, MIB)
    with pytest.raises(InvalidOption, match="no other server"):
        ResponseStore.open(path, MIB)
    first.of(TENANT).put(response("r"))
    assert holds(first, "r")
    first.close()


def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="--responses-file"):
        ResponseStore.open(tmp_path, MIB)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidOption, match="--responses-file"):
        ResponseStore.open(tmp_path / "file" / "inside.sqlite", MIB)


@pytest.mark.parametrize("damage", ["all", "middle", "short"])
def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "responses.sqlite"
    first = ResponseStore.open(path, 8 * MIB)
    chain(first, "r", 20, text=noise(20_000))
    first.close()
    content = bytearray(path.read_bytes())
    if damage == "all":
        content = bytearray(os.urandom(len(content)))
    elif damage == "middle":
        content[4096 : 4096 * 20] = os.urandom(4096 * 19)
    else:
        del content[len(content) // 2 :]
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        second = ResponseStore.open(path, 8 * MIB)
    assert "damaged" in caplog.text
    assert not holds(second, "r0")
    chain(second, "n", 2)
    assert len(history(second, "n1")) == 4
    second.close()
    [aside] = tmp_path.glob("responses.sqlite.damaged-*")
    assert aside.read_bytes()[4096:] == bytes(content)[4096:]  # SQLite may have changed its header


def test_ten_thousand_tiny_responses_stay_within_the_limit(tmp_path: Path) -> None:
    store = ResponseStore.open(tmp_path / "responses.sqlite", MIB)
    ids = [chain(store, f"r{i}-", 1)[0] for i in range(10_000)]
    kept = [id for id in ids if holds(store, id)]
    assert kept == ids[-len(kept) :]
    assert 150 < len(kept) < 9_000
    assert (tmp_path / "responses.sqlite").stat().st_size < 2 * MIB
    assert (tmp_path / "responses.sqlite-wal").stat().st_size < 8 * MIB
    store.close()
    assert [file.name for file in tmp_path.iterdir()] == ["responses.sqlite"]


def test_a_chain_of_a_thousand_is_one_history() -> None:
    with closing(ResponseStore.open(None, 8 * MIB)) as store:
        ids = chain(store, "r", 1000)
        assert history(store, ids[-1]) == [each for id in ids for each in (f"in {id} x", {"out": id})]


def test_a_file_that_cannot_be_written_any_more_loses_only_what_comes_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResponseStore.open(tmp_path / "responses.sqlite", MIB)
    ids = chain(store, "r", 3)
    assert len(history(store, ids[-1])) == 6
    store._db.execute("PRAGMA query_only=ON")  # as a disk that became read-only
    chain(store, "lost", 2)
    assert not holds(store, "lost1")
    assert "a response is not stored" in caplog.text
    assert len(history(store, ids[-1])) == 6
    with pytest.raises(ResponseStoreFailed, match="OperationalError"):
        store.of(TENANT).delete(ids[0])
    store._db.execute("PRAGMA query_only=OFF")
    assert holds(store, ids[0])
    later = chain(store, "later", 2)
    assert len(history(store, later[-1])) == 4
    store.of(TENANT).delete(ids[0])
    store.close()


def test_a_file_that_is_damaged_while_it_is_used_is_set_aside_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "responses.sqlite"
    for ask in ("get", "history", "delete", "put"):
        store = ResponseStore.open(path, 8 * MIB)
        ids = chain(store, "r", 40, text=noise(20_000))
        assert holds(store, ids[-1])
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        store._db.execute("PRAGMA cache_size=10")
        path.write_bytes(os.urandom(path.stat().st_size))
        if ask == "put":
            store.of(TENANT).put(response("first", text=noise(200_000)))
        elif ask == "history":
            with pytest.raises(PreviousResponseNotFound):
                history(store, ids[0])
        else:
            with pytest.raises(ResponseNotFound):
                getattr(store.of(TENANT), ask)(ids[0])
        assert ask == "put" or "is damaged" in caplog.text
        assert not any(holds(store, id) for id in ids)
        assert "is damaged" in caplog.text
        caplog.clear()
        new = chain(store, "new", 2)
        assert len(history(store, new[-1])) == 4
        key = store.sealing_key
        store.close()
        again = ResponseStore.open(path, 8 * MIB)
        assert holds(again, new[0])
        assert again.sealing_key == key  # seals that clients hold stay valid
        again.close()
        path.unlink()
        assert len(list(tmp_path.glob("responses.sqlite.damaged-*"))) == 1
        for aside in tmp_path.iterdir():
            aside.unlink()


# ---- damage


@dataclass
class Known:
    """A store's file with responses of two tenants, and their content."""

    path: Path
    content: bytes
    responses: dict[tuple[str, str], StoredResponse]
    parents: dict[str, str | None]


def known_file(path: Path) -> Known:
    store = ResponseStore.open(path, 8 * MIB)
    parents: dict[str, str | None] = {}
    owners = {}
    for tenant in ("tenant", "other"):
        for conversation in range(3):
            before = None
            for turn in range(3):
                id = f"{tenant}-{conversation}-{turn}"
                # Rows of one page, rows of many, and texts of equal length: rows that can be mistaken for others.
                store.of(tenant).put(response(id, before, f"{tenant} " * (1 + 400 * (turn % 2))))
                parents[id], owners[id], before = before, tenant, id
    responses = {(tenant, id): store.of(tenant).get(id) for id, tenant in owners.items()}
    store.close()
    return Known(path, path.read_bytes(), responses, parents)


def assert_sound(known: Known, content: bytes) -> bool:
    """Asserts that a store on a changed file starts, and gives what was stored or nothing.

    Returns whether it kept all.
    """
    for file in known.path.parent.iterdir():
        file.unlink()
    known.path.write_bytes(content)
    store = ResponseStore.open(known.path, 8 * MIB)
    found = 0
    try:
        for (tenant, id), stored in known.responses.items():
            for asking in ("tenant", "other", ""):
                try:
                    got = store.of(asking).get(id)
                except ResponseNotFound:
                    continue
                assert (asking, got) == (tenant, stored)
                found += 1
            with suppress(PreviousResponseNotFound):
                text, at = [], id
                while at is not None:
                    one = known.responses[tenant, at]
                    text, at = [json.loads(one.input), json.loads(one.output), *text], known.parents[at]
                assert json.loads(store.of(tenant).history(id, MIB)) == text
        store.of("tenant").put(response("new"))
        assert holds(store, "new", "tenant")
        store.of("tenant").delete("new")
    finally:
        store.close()
    assert found in (0, len(known.responses))  # a damaged file is set aside as a whole
    return found > 0


@pytest.fixture
def known(tmp_path: Path) -> Known:
    folder = tmp_path / "state"
    folder.mkdir()
    return known_file(folder / "responses.sqlite")


def test_no_flipped_bit_stops_the_start_or_gives_other_content(known: Known) -> None:
    """The bits of the first page (the header and the schema), and of others as far as time allows."""
    content = known.content
    assert assert_sound(known, content)
    first = [*range(0, 100 * 8, 9), *range(100 * 8, 4096 * 8, 421)]
    places = [*first, *range(4096 * 8, len(content) * 8, max(1, len(content) * 8 // 125))]
    lost = 0
    for place in places:
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        lost += not assert_sound(known, bytes(changed))
    assert lost > len(places) // 4  # the damage was seen


def test_no_length_of_a_file_stops_the_start_or_gives_other_content(known: Known) -> None:
    content = known.content
    lengths = [*range(0, 600, 37), *range(600, len(content), len(content) // 60)]
    kept = [length for length in lengths if assert_sound(known, content[:length])]
    assert all(length > len(content) - 4096 for length in kept)  # only padding is gone
    assert_sound(known, content + bytes(512))


def test_pages_in_each_others_place_give_no_other_content(known: Known) -> None:
    pages = [known.content[at : at + 4096] for at in range(0, len(known.content), 4096)]
    rng = random.Random(1)
    for _ in range(40):
        changed = list(pages)
        one, other = rng.sample(range(len(pages)), 2)
        changed[one], changed[other] = pages[other], pages[one]
        assert_sound(known, b"".join(changed))
        changed[one] = pages[other]
        assert_sound(known, b"".join(changed))


_ROW_CHANGES = (
    "UPDATE responses SET content = (SELECT content FROM responses WHERE number = {other}) WHERE number = {one}",
    "UPDATE responses SET number = 1000 WHERE number = {one}",
    "UPDATE responses SET content = 5 WHERE number = {one}",
    "UPDATE responses SET content = 'text' WHERE number = {one}",
    "UPDATE responses SET content = x'' WHERE number = {one}",
    "UPDATE responses SET content = zeroblob(10000) WHERE number = {one}",
    "UPDATE responses SET content = substr(content, 1, 550) WHERE number = {one}",
    "INSERT INTO responses SELECT 1000, content FROM responses WHERE number = {one}",
    "UPDATE keys SET value = zeroblob(32)",
    "DROP TABLE responses",
    "DROP TABLE keys",
    "ALTER TABLE responses RENAME COLUMN content TO other",
    "CREATE TABLE more (a)",
    "CREATE TRIGGER t AFTER INSERT ON responses BEGIN DELETE FROM responses; END",
)


@pytest.mark.parametrize("change", _ROW_CHANGES)
def test_changed_rows_are_damage(known: Known, change: str) -> None:
    for one, other in ((1, 10), (2, 5), (9, 18)):
        known.path.write_bytes(known.content)
        with closing(sqlite3.connect(known.path)) as db, db:
            db.execute(change.format(one=one, other=other))
        changed = known.path.read_bytes()
        assert not assert_sound(known, changed)


def test_a_database_of_another_kind_is_set_aside(known: Known) -> None:
    known.path.unlink()
    with closing(sqlite3.connect(known.path)) as db, db:
        db.execute("CREATE TABLE responses (id TEXT)")
    assert not assert_sound(known, known.path.read_bytes())


# ---- traces


def traces(folder: Path, word: bytes) -> list[str]:
    return [file.name for file in folder.iterdir() if word in file.read_bytes()]


def test_no_trace_of_a_deleted_response_stays_in_any_file(tmp_path: Path) -> None:
    """Rows of many sizes, in many orders: SQLite moves rows between pages, and leaves copies behind."""
    rng = random.Random(3)
    path = tmp_path / "responses.sqlite"
    store = ResponseStore.open(path, 64 * MIB)
    sizes = [0, 10, 200, 900, 2_000, 3_900, 4_100, 9_000, 50_000, 400_000]
    living: list[int] = []
    for number in range(150):
        text = f"<{number:06}>" * (1 + rng.choice(sizes) // 8)
        store.of(TENANT).put(response(f"r{number}", text=text))
        living.append(number)
        while living and rng.random() < 0.55:
            gone = living.pop(rng.randrange(len(living)))
            store.of(TENANT).delete(f"r{gone}")
            assert traces(tmp_path, f"<{gone:06}>".encode()) == []
    for number in living:
        assert traces(tmp_path, f"<{number:06}>".encode())
        store.of(TENANT).delete(f"r{number}")
    assert traces(tmp_path, b">") == traces(
        tmp_path, b">\x00"
    )  # a control of the search itself: no text is left
    assert not any(traces(tmp_path, f"<{number:06}>".encode()) for number in range(150))
    store.close()


def test_no_trace_of_an_evicted_response_stays_in_any_file(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    store = ResponseStore.open(path, MIB)
    for number in range(40):
        store.of(TENANT).put(response(f"r{number}", text=f"<{number:06}>" * 8_000))
    kept = {number for number in range(40) if holds(store, f"r{number}")}
    assert 5 < len(kept) < 40
    for number in range(40):
        assert bool(traces(tmp_path, f"<{number:06}>".encode())) == (number in kept)
    store.close()
    smaller = ResponseStore.open(path, MIB // 2)
    left = {number for number in range(40) if holds(smaller, f"r{number}")}
    assert 0 < len(left) < len(kept)
    for number in range(40):
        assert bool(traces(tmp_path, f"<{number:06}>".encode())) == (number in left)
    smaller.close()


def test_all_files_are_private_also_those_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    before = os.umask(0)
    try:
        for existing in ([], ["", "-wal", "-shm", "-journal"]):
            for suffix in existing:
                path.with_name(path.name + suffix).touch(mode=0o644)
            store = ResponseStore.open(path, MIB)
            chain(store, "r", 3)
            assert holds(store, "r2")
            modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
            assert path.name in modes
            assert set(modes.values()) == {0o600}, modes
            store.close()
            path.chmod(0o644)
        path.write_bytes(b"no database" * 1000)
        ResponseStore.open(path, MIB).close()
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    finally:
        os.umask(before)


def test_a_closed_store_has_all_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    store = ResponseStore.open(path, 8 * MIB)
    ids = chain(store, "r", 50, text=noise(10_000))
    store.close()
    store.close()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    copied = tmp_path / "copy" / "responses.sqlite"
    copied.parent.mkdir()
    copied.write_bytes(path.read_bytes())
    again = ResponseStore.open(copied, 8 * MIB)
    assert len(history(again, ids[-1])) == 100
    again.close()


_WRITER = """
import sys
from pathlib import Path
from rootstock.server.formats.responses.store import NewResponse, ResponseStore
store = ResponseStore.open(Path(sys.argv[1]), 1 << 20)
i = 0
while True:
    parent = f"r{i - 1}" if i else None
    store.of("tenant").put(NewResponse(f"r{i}", parent, "{}", f'["in {i}"]', "[]"))
    store.of("tenant").get(f"r{i}")
    print(i, flush=True)
    i += 1
"""


def test_a_killed_process_leaves_a_usable_file(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        written = [int(writer.stdout.readline()) for _ in range(20)]
    finally:
        writer.kill()
        writer.wait(HANG_S)
        writer.stdout.close()
    store = ResponseStore.open(path, MIB)
    assert history(store, f"r{written[-1]}") == [f"in {i}" for i in written]
    store.close()
