"""Tenants of one engine: what is cleared for one, and what is kept of ten thousand."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from engine.helpers import Bench
from engine.tiered import KINDS, Tiered, cached
from rootstock.cache.families import Family
from rootstock.cache.keys import Namespace
from rootstock.cache.prefix_tree import MAX_EMPTY_ROOTS
from rootstock.config import EngineConfig
from rootstock.engine.engine import Engine
from rootstock.engine.request import Request, RequestId, ResolvedSampling, StopParams
from rootstock.engine.speculation.proposer import SHARED_NAMESPACES, NgramProposer
from rootstock.errors import ClearUnderWay
from waiting import HANG_S

PROMPT = list(range(30, 60))


def salts_in(bench: Bench) -> set[str]:
    return {namespace.salt for namespace in bench.cache.tree.roots}


@pytest.mark.behaviour(9)
@pytest.mark.parametrize("families", KINDS, ids=lambda kinds: "+".join(f.name for f in kinds))
def test_clearing_for_one_tenant_leaves_the_others_in_memory_and_on_disk(
    tmp_path: Path, families: tuple[Family, ...]
) -> None:
    with Tiered(tmp_path, families=families) as bench:
        for salt in ("a", "b", ""):
            bench.answer(PROMPT, salt=salt)
        bench.forget()  # all of it is on the disk …
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
        assert cached(bench.answer([*PROMPT, 71], salt="b")) >= len(PROMPT)
        bench.forget()
        assert cached(bench.answer([*PROMPT, 72], salt="b")) == len(PROMPT), "from the disk"
        assert cached(bench.answer([*PROMPT, 72], salt="a")) == 0
        bench.answer([*PROMPT, 73], salt="a")
        assert cached(bench.answer([*PROMPT, 74], salt="a")) >= len(PROMPT), "and it goes on as ever"


def test_clearing_for_a_tenant_takes_what_is_on_its_way_down(tmp_path: Path) -> None:
    with Tiered(tmp_path) as bench:
        bench.answer(PROMPT, salt="a")
        bench.answer(PROMPT, salt="b")
        bench.stores.close()
        bench.tiering.store(bench.cache.take_all_stores())
        opened = bench.when_reached(bench.stores, bench.stores.open)
        bench.engine.clear_cache("a")
        opened.join()
        bench.tiering.follow()
        a, b = (bench.engine.namespace(salt).digest() for salt in "ab")
        assert {entry.identity.namespace for entry in bench.disk.entries()} == {b}
        assert {identity.namespace for identity in bench.cache.stored.some(100)} == {b}  # type: ignore[union-attr]
        assert a != b


def test_requests_go_on_while_the_disk_is_cleared_for_a_tenant(tmp_path: Path) -> None:
    with Tiered(tmp_path) as bench:
        for salt in ("a", "b"):
            bench.answer(PROMPT, salt=salt)
        bench.forget()
        begun, go_on = threading.Event(), threading.Event()
        clear = bench.disk.clear

        def held(namespace: bytes | None = None) -> None:
            begun.set()
            assert go_on.wait(HANG_S)
            clear(namespace)

        bench.disk.clear = held  # type: ignore[method-assign]
        bench.engine.start()
        clearing = threading.Thread(target=bench.engine.clear_cache, args=("a",))
        clearing.start()
        assert begun.wait(HANG_S)
        with pytest.raises(ClearUnderWay):
            bench.engine.clear_cache("b")
        ask = StopParams(max_tokens=1)
        tokens = bench.client([*PROMPT, 70]).request.tokens
        for salt, hit in (("a", 0), ("b", len(PROMPT))):
            *_, end = bench.engine.generate(Request(RequestId(salt), tokens, ResolvedSampling(), ask, salt))
            assert end.usage.cached_tokens == hit  # type: ignore[union-attr]
        go_on.set()
        clearing.join()
        bench.engine.clear_cache("b")


def test_thousands_of_tenants_leave_behind_what_is_cached_of_them() -> None:
    bench = Bench(blocks=24, draft_tokens=4)
    proposer = bench.engine.proposer
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


def test_what_is_known_of_the_disk_is_what_is_on_it_however_many_tenants_there_were(tmp_path: Path) -> None:
    with Tiered(tmp_path, blocks=24, cap_bytes=2**20) as bench:
        for number in range(120):
            bench.answer(PROMPT[:8], 2, salt=f"{number:064}")
        bench.mover.drain()
        bench.tiering.follow()
        stored = bench.cache.stored
        assert stored is not None
        on_disk = [entry.identity for entry in bench.disk.entries()]
        assert len(stored) == len(on_disk) > 0
        assert len(stored._at) == len({identity.parent for identity in on_disk})
        assert set(stored._of_namespace) == {identity.namespace for identity in on_disk}
        assert sum(map(len, stored._of_namespace.values())) == len(stored)
        assert len(bench.cache.tree.roots) <= 24 + MAX_EMPTY_ROOTS


def test_drafts_of_a_tenant_are_forgotten_with_what_was_cached_of_it() -> None:
    bench = Bench(draft_tokens=4)
    proposer = bench.engine.proposer
    assert isinstance(proposer, NgramProposer)
    for salt in ("a", "b"):
        bench.ask(PROMPT, salt=salt)
        bench.run()
    bench.engine.clear_cache("a")
    assert {namespace.salt for namespace in proposer._shared} == {"b"}
    bench.cache.clear()
    bench.ask(PROMPT, salt="c")
    bench.run()
    assert {namespace.salt for namespace in proposer._shared} == {"c"}


def test_a_hit_that_is_being_verified_does_not_outlast_a_clear() -> None:
    bench = Bench(chunk_tokens=4)
    engine = Engine(bench.runtime, bench.cache, EngineConfig(chunk_tokens=4), verify_hits=1.0)
    bench.engine = engine
    for _ in range(2):
        bench.ask(PROMPT, salt="a")
        bench.run()
    engine.verify_hits()
    assert engine.hit_verifier._check is not None
    engine.clear_cache("a")
    assert salts_in(bench) == set()
    bench.cache.check()
    while engine.hit_verifier.has_work:
        engine.verify_hits()
    assert engine.hit_verifier.counts == {"given up": 1}


def test_seeds_of_requests_without_one_say_nothing_of_how_many_others_asked() -> None:
    """They came from one stream that began the same at every start: a client could tell its place in it."""
    sampling = ResolvedSampling(temperature=5.0)
    answers = set()
    for _ in range(4):
        bench = Bench()
        client = bench.ask(PROMPT, 20, sampling=sampling)
        bench.run()
        answers.add(tuple(client.tokens))
    assert len(answers) == 4
