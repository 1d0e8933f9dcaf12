"""The store of responses: chains, bounds, tenants, restarts and damage."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
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
from rootstock.server.responses import store as store_module
from rootstock.server.responses.store import NewResponse, ResponseStore
from rootstock.units import MIB
from waiting import HANG_S

TENANT = "tenant"


def response(id: str, parent: str | None = None, text: str = "x") -> NewResponse:
    return NewResponse(id, parent, f'{{"id":"{id}"}}', f'["in {id} {text}"]', f'[{{"out":"{id}"}}]')


def chain(store: ResponseStore, name: str, length: int, tenant: str = TENANT, text: str = "x") -> list[str]:
    ids = [f"{name}{i}" for i in range(length)]
    for i, id in enumerate(ids):
        store.put(tenant, response(id, ids[i - 1] if i else None, text))
    return ids


def holds(store: ResponseStore, id: str, tenant: str = TENANT) -> bool:
    try:
        store.get(tenant, id)
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
        store.put(TENANT, response(f"r{i}"))
        assert store.get(TENANT, f"r{i}").output == [{"out": f"r{i}"}]


def test_the_history_is_every_input_and_output_in_order(store: ResponseStore) -> None:
    ids = chain(store, "r", 5)
    assert store.history(TENANT, ids[2]) == [each for id in ids[:3] for each in (f"in {id} x", {"out": id})]
    fork = response("fork", ids[1])
    store.put(TENANT, fork)
    assert store.history(TENANT, "fork")[-3:] == [{"out": ids[1]}, "in fork x", {"out": "fork"}]
    assert len(store.history(TENANT, ids[4])) == 10


def test_a_chain_that_was_cut_cannot_be_continued(store: ResponseStore) -> None:
    ids = chain(store, "r", 4)
    store.delete(TENANT, ids[1])
    assert store.history(TENANT, ids[0])
    for id in (ids[1], ids[2], ids[3], "unknown"):
        with pytest.raises(PreviousResponseNotFound):
            store.history(TENANT, id)
    assert holds(store, ids[3])
    store.put(TENANT, response("late", ids[1]))  # it was deleted while this one was made
    with pytest.raises(PreviousResponseNotFound):
        store.history(TENANT, "late")


def test_other_tenants_see_nothing(store: ResponseStore) -> None:
    [id] = chain(store, "r", 1)
    for tenant in ("", "other"):
        assert not holds(store, id, tenant)
        with pytest.raises(PreviousResponseNotFound):
            store.history(tenant, id)
        with pytest.raises(ResponseNotFound):
            store.delete(tenant, id)
        store.put(tenant, response(f"of{tenant}", id))  # names another tenant's
        with pytest.raises(PreviousResponseNotFound):
            store.history(tenant, f"of{tenant}")
    assert holds(store, id)


def test_the_least_recently_used_chain_is_evicted_whole(store: ResponseStore) -> None:
    text = noise(100_000)
    first, second = chain(store, "a", 3, text=text), chain(store, "b", 3, text=text)
    assert all(holds(store, id) for id in first + second)
    store.history(TENANT, first[2])  # a use
    third = chain(store, "c", 9, text=text)
    assert not any(holds(store, id) for id in second)
    assert all(holds(store, id) for id in third)


def test_a_response_larger_than_the_store_is_not_kept(store: ResponseStore) -> None:
    [small] = chain(store, "small", 1, tenant="other")
    store.put(TENANT, response("large", text=noise(4 * MIB)))
    assert not holds(store, "large")
    assert holds(store, small, "other")


def test_a_tenant_with_much_does_not_evict_another_with_little(store: ResponseStore) -> None:
    little = chain(store, "little", 2, tenant="other", text=noise(1000))
    for i in range(40):
        store.put(TENANT, response(f"much{i}", text=noise(100_000)))
    assert all(holds(store, id, "other") for id in little)
    kept = [i for i in range(40) if holds(store, f"much{i}")]
    assert kept == list(range(40 - len(kept), 40))
    assert 10 < len(kept) < 30


def test_entries_are_bounded(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 10)
    ids = [chain(store, f"r{i}-", 1)[0] for i in range(25)]
    assert [id for id in ids if holds(store, id)] == ids[15:]


def test_a_long_history_is_refused_before_it_is_read(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = chain(store, "r", 6)
    monkeypatch.setattr(store_module, "MAX_DEPTH", 5)
    assert store.history(TENANT, ids[4])
    with pytest.raises(HistoryTooLong, match="more than 5 responses"):
        store.history(TENANT, ids[5])
    monkeypatch.setattr(store_module, "MAX_HISTORY_BYTES", 40)
    with pytest.raises(HistoryTooLong, match="more than 40 bytes"):
        store.history(TENANT, ids[4])


def test_responses_that_wait_are_bounded(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "MAX_WAITING_BYTES", 1000)
    store.put(TENANT, response("small"))
    store.put(TENANT, response("large", text="x" * 1000))
    assert holds(store, "small")
    assert not holds(store, "large")
    assert "already wait" in caplog.text
    store.put(TENANT, response("later", text="x" * 800))  # the first is written: there is room again
    assert holds(store, "later")


def test_a_file_keeps_responses_and_the_key_of_seals(tmp_path: Path) -> None:
    path = tmp_path / "state" / "responses.sqlite"
    first = ResponseStore.open(path, MIB)
    ids = chain(first, "r", 3)
    first.close()
    assert path.stat().st_mode & 0o077 == 0
    second = ResponseStore.open(path, MIB)
    assert second.sealing_key == first.sealing_key
    assert len(second.history(TENANT, ids[2])) == 6
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
    assert 0 < len(kept) < 6
    second.close()
    assert path.stat().st_size < 2 * MIB


def test_a_file_serves_one_server_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    first = ResponseStore.open(path, MIB)
    with pytest.raises(InvalidOption, match="no other server"):
        ResponseStore.open(path, MIB)
    first.put(TENANT, response("r"))
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
    assert len(second.history(TENANT, "n1")) == 4
    second.close()
    [aside] = tmp_path.glob("responses.sqlite.damaged-*")
    assert aside.read_bytes()[4096:] == bytes(content)[4096:]  # SQLite may have changed its header


def test_ten_thousand_tiny_responses_stay_within_the_limit(tmp_path: Path) -> None:
    store = ResponseStore.open(tmp_path / "responses.sqlite", MIB)
    ids = [chain(store, f"r{i}-", 1)[0] for i in range(10_000)]
    kept = [id for id in ids if holds(store, id)]
    assert kept == ids[-len(kept) :]
    assert 500 < len(kept) < 9_000
    assert (tmp_path / "responses.sqlite").stat().st_size < 2 * MIB
    assert (tmp_path / "responses.sqlite-wal").stat().st_size < 8 * MIB
    store.close()
    assert [file.name for file in tmp_path.iterdir()] == ["responses.sqlite"]


def test_a_chain_of_a_thousand_is_one_history(store: ResponseStore) -> None:
    ids = chain(store, "r", 1000)
    history = store.history(TENANT, ids[-1])
    assert history == [each for id in ids for each in (f"in {id} x", {"out": id})]


def test_a_file_that_cannot_be_written_any_more_loses_only_what_comes_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResponseStore.open(tmp_path / "responses.sqlite", MIB)
    ids = chain(store, "r", 3)
    assert len(store.history(TENANT, ids[-1])) == 6
    store._db.execute("PRAGMA query_only=ON")  # as a disk that became read-only
    chain(store, "lost", 2)
    assert not holds(store, "lost1")
    assert "a response is not stored" in caplog.text
    assert len(store.history(TENANT, ids[-1])) == 6
    with pytest.raises(ResponseStoreFailed, match="OperationalError"):
        store.delete(TENANT, ids[0])
    store._db.execute("PRAGMA query_only=OFF")
    assert holds(store, ids[0])
    later = chain(store, "later", 2)
    assert len(store.history(TENANT, later[-1])) == 4
    store.delete(TENANT, ids[0])
    store.close()


def test_a_file_that_is_damaged_while_it_is_used_fails_clearly_until_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "responses.sqlite"
    store = ResponseStore.open(path, 8 * MIB)
    ids = chain(store, "r", 40, text=noise(20_000))
    assert holds(store, ids[-1])
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    store._db.execute("PRAGMA cache_size=10")
    path.write_bytes(os.urandom(path.stat().st_size))
    for ask in (store.history, store.get, store.delete):
        with pytest.raises(ResponseStoreFailed):
            ask(TENANT, ids[0])
    chain(store, "lost", 2)  # raises nothing
    with pytest.raises((ResponseStoreFailed, PreviousResponseNotFound)):
        store.history(TENANT, "lost1")
    assert "a response is not stored" in caplog.text
    store.close()
    again = ResponseStore.open(path, 8 * MIB)
    assert not holds(again, ids[0])
    new = chain(again, "new", 2)
    assert len(again.history(TENANT, new[-1])) == 4
    again.close()


_WRITER = """
import sys
from pathlib import Path
from rootstock.server.responses.store import NewResponse, ResponseStore
store = ResponseStore.open(Path(sys.argv[1]), 1 << 20)
i = 0
while True:
    parent = f"r{i - 1}" if i else None
    store.put("tenant", NewResponse(f"r{i}", parent, "{}", f'["in {i}"]', "[]"))
    store.get("tenant", f"r{i}")
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
    assert store.history(TENANT, f"r{written[-1]}") == [f"in {i}" for i in written]
    store.close()
