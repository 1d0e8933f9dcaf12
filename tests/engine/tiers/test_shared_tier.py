"""Engines that share a Valkey server: each loads the prefixes that others have computed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.helpers import Bench, Families, numbers
from engine.tiered import KINDS, kinds
from rootstock.cache.keys import RecordKind
from rootstock.cache.public_heads import PublicHeads
from rootstock.config import TierConfig
from rootstock.tiers.remote.tier import RemoteTier
from shared_store import SharedStore
from waiting import wait_for

SIZE = 4
PROMPT = numbers(1, 62)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedStore]:
    with SharedStore(tmp_path) as store:
        yield store


class Replica(Bench):
    """An engine on the shared server, which a test drives. Its clock stands still: every hit is loaded."""

    def __init__(
        self, store: SharedStore, families: Families, disk: Path | None = None, **options: object
    ) -> None:
        tier = TierConfig(disk, 64 * 2**20, remote=store.config)
        super().__init__(
            400, SIZE, families=families, tier=tier, clock=lambda: 0.0, load_clock=lambda: 0.0, **options
        )

    def answer_of(self, prompt: list[int], **request: object) -> tuple[list[int], int]:
        """Returns the tokens of an answer, and how many of the prompt were cached."""
        client = self.ask(prompt, 6, **request)
        while not client.ended.is_set():  # the look-up ends on a thread of its own
            self.engine.step(self.engine.next_command() if not self.engine.scheduler.has_work else None)
            self.run()
        return client.tokens, client.cached_tokens

    def stop(self) -> None:
        """Ends the engine when everything is stored."""
        self.engine.stop()


def cold(families: Families, prompt: list[int]) -> list[int]:
    bench = Bench(400, SIZE, families=families)
    client = bench.answer(prompt, 6)
    return client.tokens


@kinds
def test_a_second_engine_loads_what_the_first_has_computed(families: Families, store: SharedStore) -> None:
    first, second = Replica(store, families), Replica(store, families)
    tokens, cached = first.answer_of(PROMPT)
    assert cached == 0
    first.stop()
    again, cached = second.answer_of(PROMPT)
    assert again == tokens == cold(families, PROMPT)
    assert cached >= len(PROMPT) - SIZE
    longer = [*PROMPT, *tokens, *numbers(2, 20)]
    more, cached = second.answer_of(longer)
    assert more == cold(families, longer)
    assert cached >= len(PROMPT) - 1
    second.stop()


@pytest.mark.parametrize("length", [4, 5, 60, 61, 62, 63, 64])
def test_a_prompt_that_fills_its_blocks_is_found_but_for_its_last_token(
    length: int, store: SharedStore
) -> None:
    first, second = Replica(store, KINDS[0]), Replica(store, KINDS[0])
    prompt = numbers(1, length)
    tokens, _ = first.answer_of(prompt)
    first.stop()
    again, cached = second.answer_of(prompt)
    assert again == tokens
    assert cached == (length - 1 if length % SIZE == 0 else length // SIZE * SIZE)
    second.stop()


@kinds
def test_a_prompt_leaves_others_inside_a_block(families: Families, store: SharedStore) -> None:
    """The first replica resumes there with its full block, which the second one cannot name."""
    first, second = Replica(store, families), Replica(store, families)
    head = PROMPT[:30]
    for seed in (5, 6):
        first.answer_of([*head, *numbers(seed, 20)])
    first.stop()
    prompt = [*head, *numbers(7, 20)]
    tokens, cached = second.answer_of(prompt)
    assert tokens == cold(families, prompt)
    assert cached == (28 if families == KINDS[0] else 30)
    second.stop()


@kinds
def test_other_weights_tenants_and_prompts_find_nothing(families: Families, store: SharedStore) -> None:
    first = Replica(store, families)
    first.answer_of(PROMPT, salt="tenant")
    first.stop()
    second, other = Replica(store, families), Replica(store, families, weights="other")
    assert second.answer_of(PROMPT)[1] == 0
    assert second.answer_of(PROMPT, salt="another")[1] == 0
    assert second.answer_of([90, *PROMPT[1:]], salt="tenant")[1] == 0
    assert other.answer_of(PROMPT, salt="tenant")[1] == 0
    assert second.answer_of(PROMPT, salt="tenant")[1] > 0
    second.stop()
    other.stop()


@pytest.mark.parametrize("head", [8, 30, 33])
def test_tenants_share_a_public_head(head: int, store: SharedStore) -> None:
    heads = PublicHeads([PROMPT[:head]])
    first, second = Replica(store, KINDS[0]), Replica(store, KINDS[0])
    for replica in (first, second):
        replica.engine.public_heads = heads
    first.answer_of(PROMPT, salt="tenant")
    first.stop()
    assert second.answer_of(PROMPT, salt="another")[1] == head
    assert second.answer_of(PROMPT, salt="tenant")[1] >= len(PROMPT) - SIZE
    second.stop()


def test_a_disk_and_a_shared_server(store: SharedStore, tmp_path: Path) -> None:
    families = KINDS[2]
    first = Replica(store, families, tmp_path / "one")
    tokens, _ = first.answer_of(PROMPT)
    first.stop()
    alone = Replica(store, families, tmp_path / "two")
    assert alone.answer_of(PROMPT)[1] > 0
    alone.stop()
    store.client().run([[b"FLUSHALL"]])
    again = Replica(store, families, tmp_path / "one")
    found, cached = again.answer_of(PROMPT)
    assert found == tokens
    assert cached > 0, "what is on the disk does not need the server"
    again.stop()


@kinds
def test_answers_are_right_without_the_server(families: Families, store: SharedStore) -> None:
    first = Replica(store, families)
    first.answer_of(PROMPT)
    first.stop()
    second = Replica(store, families)
    store.kill()
    tokens, cached = second.answer_of(PROMPT)
    assert tokens == cold(families, PROMPT)
    assert cached == 0
    second.stop()


def test_a_request_that_ends_while_its_prompt_is_looked_up(store: SharedStore) -> None:
    replica = Replica(store, KINDS[0])
    store.hold()
    client = replica.ask(PROMPT, 6)
    replica.engine.abort(client.request.id)
    replica.engine.step()
    assert client.ended.is_set()
    store.go_on()
    assert replica.answer_of(PROMPT)[0] == cold(KINDS[0], PROMPT)
    replica.stop()


@pytest.mark.parametrize("way", ["found", "stored"])
def test_the_index_does_not_claim_what_is_lost_at_the_same_time(
    way: str, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is found to be emptied after it has said that it has the records, and before the engine hears it."""
    first, second = Replica(store, KINDS[0]), Replica(store, KINDS[0])
    name = "found" if way == "found" else "store"
    original = getattr(RemoteTier, name)

    def lost(tier: RemoteTier, records: Iterable[Any]) -> object:
        of = list(records)
        result = original(tier, of)
        tier._forget([each.identity.key for each in of] if way == "stored" else of)
        return result

    if way == "stored":
        monkeypatch.setattr(RemoteTier, name, lost)
    first.answer_of(PROMPT)
    first.stop()
    monkeypatch.setattr(RemoteTier, name, lost)
    connector, ended = second.engine.tier_connector, threading.Event()
    assert connector is not None
    tokens = np.array(PROMPT, np.int32)
    connector.look_up(tokens, second.engine.scope(tokens), ended.set)
    wait_for(ended)
    for replica in (first, second):
        connector = replica.engine.tier_connector
        assert connector is not None
        connector._events.apply(replica.cache.stored)
    assert len((first if way == "stored" else second).cache.stored) == 0
    second.stop()


def test_a_record_names_no_token_in_its_place(store: SharedStore) -> None:
    """A place is all that says which records follow a prefix. It has no tokens, which may be secret."""
    replica = Replica(store, KINDS[2])
    replica.answer_of(PROMPT)
    replica.stop()
    client = store.client()
    (names,) = client.run([[b"KEYS", b"*at:*"]])
    assert isinstance(names, list)
    places = set()
    for name in names:
        assert isinstance(name, bytes)
        (members,) = client.run([[b"SMEMBERS", name]])
        places.update(members)
    kinds_of = {tuple(place.split()[0:3:2]) for place in places}
    assert kinds_of == {
        (b"full", b"%d" % RecordKind.BLOCKS),
        (b"state", b"%d" % RecordKind.STATE),
    }
    assert all(len(place) < 30 for place in places)


def test_the_server_learns_no_salt(store: SharedStore) -> None:
    replica = Replica(store, KINDS[2])
    replica.answer_of(PROMPT, salt="salt of a tenant")
    replica.stop()
    client = store.client()
    (names,) = client.run([[b"KEYS", b"*"]])
    assert isinstance(names, list)
    assert names
    for name in names:
        assert isinstance(name, bytes)
        (value,) = client.run([[b"SMEMBERS" if b"at:" in name else b"GET", name]])
        parts = value if isinstance(value, list) else [value]
        assert not any(b"salt of a tenant" in part for part in [name, *parts] if isinstance(part, bytes))
