"""Tenants of one engine: clearing the cache of one, and the state that thousands leave behind."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from engine.helpers import Bench, Client, Families
from engine.tiered import Tiered, kinds
from rootstock.cache.keys import Namespace
from rootstock.cache.prefix_tree import MAX_EMPTY_ROOTS
from rootstock.config import EngineConfig, TierConfig
from rootstock.engine.clearing import Clearing
from rootstock.engine.engine import Engine
from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import Finished
from rootstock.engine.speculation.proposer import SHARED_NAMESPACES, NgramProposer
from rootstock.errors import ClearFailed, ClearUnderWay
from rootstock.units import MIB
from waiting import HANG_S

PROMPT = list(range(30, 60))


def salts_in(bench: Bench) -> set[str]:
    return {namespace.salt for namespace in bench.cache.tree.roots}


@pytest.mark.behaviour(9)
@kinds
def test_clearing_one_tenant_keeps_others_in_memory_and_on_disk(tmp_path: Path, families: Families) -> None:
    with Tiered(tmp_path, families=families) as bench:
        for salt in ("a", "b", ""):
            bench.answer(PROMPT, salt=salt)
        bench.forget()  # from memory: everything is on the disk …
        for salt in ("a", "b", ""):
            bench.answer([*PROMPT, 70], salt=salt)  # … and in memory
        on_disk = bench.tier.stored_records
        bench.engine.clear_cache("a")
        bench.cache.check()
        assert salts_in(bench) == {"b", ""}
        entries = [entry.identity.namespace for entry in bench.disk.entries()]
        assert bench.engine.namespace("a").digest() not in entries
        assert len(entries) == on_disk * 2 // 3
        assert bench.tier.quarantined_records == 0
        assert bench.answer([*PROMPT, 71], salt="b").cached_tokens >= len(PROMPT)
        bench.forget()
        assert bench.answer([*PROMPT, 72], salt="b").cached_tokens == len(PROMPT), "from the disk"
        assert bench.answer([*PROMPT, 72], salt="a").cached_tokens == 0
        bench.answer([*PROMPT, 73], salt="a")
        assert bench.answer([*PROMPT, 74], salt="a").cached_tokens >= len(PROMPT), "and it goes on as ever"


def test_clearing_a_tenant_removes_its_queued_stores(tmp_path: Path) -> None:
    with Tiered(tmp_path) as bench:
        bench.answer(PROMPT, salt="a")
        bench.answer(PROMPT, salt="b")
        bench.stores.close()
        bench.connector.store(bench.cache.take_all_stores())
        opened = bench.when_reached(bench.stores, bench.stores.open)
        bench.engine.clear_cache("a")
        opened.join()
        bench.connector.follow()
        a, b = (bench.engine.namespace(salt).digest() for salt in "ab")
        assert {entry.identity.namespace for entry in bench.disk.entries()} == {b}
        assert {identity.namespace for identity in bench.cache.stored.some(100)} == {b}  # type: ignore[union-attr]
        assert a != b


def test_requests_run_while_the_disk_is_cleared_of_a_tenant(tmp_path: Path) -> None:
    with Tiered(tmp_path) as bench:
        for salt in ("a", "b"):
            bench.answer(PROMPT, salt=salt)
        bench.forget()
        begun, go_on = threading.Event(), threading.Event()
        clear = bench.disk.clear

        def held(namespace: bytes | None = None) -> bool:
            begun.set()
            assert go_on.wait(HANG_S)
            return clear(namespace)

        bench.disk.clear = held  # type: ignore[method-assign]
        bench.engine.start()
        clearing = threading.Thread(target=bench.engine.clear_cache, args=("a",))
        clearing.start()
        assert begun.wait(HANG_S)
        with pytest.raises(ClearUnderWay):
            bench.engine.clear_cache("b")
        for salt, hit in (("a", 0), ("b", len(PROMPT))):
            *_, end = bench.engine.generate(Client([*PROMPT, 70], 1, salt=salt).request)
            assert isinstance(end, Finished)
            assert end.usage.cached_tokens == hit
        go_on.set()
        clearing.join()
        bench.engine.clear_cache("b")


def test_thousands_of_tenants_leave_only_their_cached_entries() -> None:
    bench = Bench(blocks=24, draft_tokens=4)
    proposer = bench.engine.parts.proposer
    assert isinstance(proposer, NgramProposer)
    kept: list[int] = []
    for number in range(3_000):
        bench.ask(PROMPT[:8], 2, salt=f"{number:064}")
        while bench.engine.step():
            pass
        if number in (1_000, 2_999):
            bench.ended.clear()
            gc.collect()
            kept.append(sum(isinstance(each, Namespace) for each in gc.get_objects()))
    bench.cache.check()
    stats = bench.cache.stats()
    assert stats.namespaces <= stats.nodes + MAX_EMPTY_ROOTS
    assert stats.nodes <= 24
    assert len(proposer._shared) <= SHARED_NAMESPACES
    assert all(map(bench.cache.knows, proposer._shared))
    assert kept[1] == kept[0], "namespaces pile up somewhere"


def test_the_index_holds_the_records_on_disk_after_many_tenants(tmp_path: Path) -> None:
    with Tiered(tmp_path, blocks=24, cap_bytes=2**20) as bench:
        for number in range(120):
            bench.answer(PROMPT[:8], 2, salt=f"{number:064}")
        bench.writer.drain()
        bench.connector.follow()
        stored = bench.cache.stored
        on_disk = [entry.identity for entry in bench.disk.entries()]
        assert len(stored) == len(on_disk) > 0
        assert len(stored._at) == len({identity.parent for identity in on_disk})
        assert set(stored._of_namespace) == {identity.namespace for identity in on_disk}
        assert sum(map(len, stored._of_namespace.values())) == len(stored)
        assert len(bench.cache.tree.roots) <= 24 + MAX_EMPTY_ROOTS


def test_clearing_a_tenant_forgets_its_drafts() -> None:
    bench = Bench(draft_tokens=4)
    proposer = bench.engine.parts.proposer
    assert isinstance(proposer, NgramProposer)
    for salt in ("a", "b"):
        bench.answer(PROMPT, salt=salt)
    bench.engine.clear_cache("a")
    assert {namespace.salt for namespace in proposer._shared} == {"b"}
    bench.cache.clear()
    bench.answer(PROMPT, salt="c")
    assert {namespace.salt for namespace in proposer._shared} == {"c"}


def test_a_hit_in_verification_does_not_outlast_a_clear() -> None:
    bench = Bench(chunk_tokens=4)
    engine = Engine(bench.runtime, bench.cache, EngineConfig(chunk_tokens=4), verify_hits=1.0)
    bench.engine = engine
    for _ in range(2):
        bench.answer(PROMPT, salt="a")
    engine.work_idly()
    verifier = engine.parts.hit_verifier
    assert verifier._check is not None
    engine.clear_cache("a")
    assert salts_in(bench) == set()
    bench.cache.check()
    while verifier.has_work:
        engine.work_idly()
    assert verifier.counts == {"given up": 1}


def test_drawn_seeds_do_not_repeat_after_a_restart() -> None:
    """With the same stream at every start, a client could infer the number of earlier requests."""
    sampling = ResolvedSampling(temperature=5.0)
    answers = set()
    for _ in range(4):
        bench = Bench()
        client = bench.answer(PROMPT, 20, sampling=sampling)
        answers.add(tuple(client.tokens))
    assert len(answers) == 4


def in_memory_and_on_disk(bench: Tiered, *salts: str) -> None:
    for salt in salts:
        bench.answer(PROMPT, salt=salt)
    bench.forget()
    for salt in salts:
        bench.answer([*PROMPT, 70], salt=salt)


@pytest.mark.parametrize("salt", [None, "a"])
@pytest.mark.parametrize(("memory", "disk"), [(True, False), (False, True), (True, True), (False, False)])
def test_memory_and_disk_are_cleared_apart(
    tmp_path: Path, salt: str | None, memory: bool, disk: bool
) -> None:
    with Tiered(tmp_path) as bench:
        in_memory_and_on_disk(bench, "a", "b")
        cleared = bench.engine.clear(Clearing(salt, memory=memory, disk=disk))
        assert bool(cleared.blocks) is memory
        bench.cache.check()
        on_disk = {entry.identity.namespace for entry in bench.disk.entries()}
        for each in ("a", "b"):
            namespace, is_cleared = bench.engine.namespace(each), salt in (None, each)
            assert bench.cache.knows(namespace) is not (memory and is_cleared), each
            assert (namespace.digest() in on_disk) is not (disk and is_cleared), each


@pytest.mark.parametrize("salt", [None, "a"])
def test_a_disk_that_fails_is_told_and_memory_is_cleared(tmp_path: Path, salt: str | None) -> None:
    def failing(_keys: object) -> None:
        raise OSError("the disk is gone")

    with Tiered(tmp_path) as bench:
        in_memory_and_on_disk(bench, "a")
        bench.disk._index.delete = failing  # type: ignore[method-assign]
        with pytest.raises(ClearFailed, match="Records may remain"):
            bench.engine.clear_cache(salt)
        assert not bench.cache.knows(bench.engine.namespace("a"))


def test_a_directory_that_could_not_be_opened_is_told(tmp_path: Path) -> None:
    with Tiered(tmp_path):  # it has the lock
        tier = TierConfig(tmp_path, 16 * MIB)
        second = Bench(tier=tier)
        with pytest.raises(ClearFailed, match="could not be opened"):
            second.engine.clear_cache()
        second.engine.clear(Clearing(disk=False))
        second.engine.stop()
