"""Look-ups of prompts in a shared server: they find exactly the records of a prompt, and ask as little as they
can."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rootstock.cache.keys import Identity, Namespace, RecordKind, Scope, identify
from rootstock.cache.types import Tokens
from rootstock.testing.fake_runtime import FULL, STATE, window
from rootstock.tiers.base import AlreadyStored, Off, Ready, Record, Stored
from rootstock.tiers.remote import lookups as module
from rootstock.tiers.remote import tier as remote_tier
from rootstock.tiers.remote.connection import Reply
from rootstock.tiers.remote.lookups import Found, PromptLookups
from rootstock.tiers.remote.place import Places
from rootstock.tiers.remote.tier import RemoteTier
from shared_store import SharedStore
from tiers.helpers import Clock
from waiting import join, wait_for, wait_until

FAMILIES = (FULL, window(16), STATE)
SIZE = 8
MODEL = Namespace("weights", "float32")
PROMPT = np.arange(700, dtype=np.int32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedStore]:
    with SharedStore(tmp_path) as store:
        yield store


@pytest.fixture
def tier(store: SharedStore) -> Iterator[RemoteTier]:
    tier = RemoteTier(store.config)
    yield tier
    tier.close()


class Asking:
    """Look-ups of a second server, and the commands that they send."""

    def __init__(self, store: SharedStore) -> None:
        self.clock = Clock()
        self.tier = RemoteTier(store.config)
        self.lookups = PromptLookups(self.tier, FAMILIES, SIZE, self.clock)
        self.commands: list[bytes] = []
        self.each_takes_s = 0.0  # by the clock of the look-ups
        run = self.tier.run

        def noted(commands: Sequence[Sequence[bytes]], seconds: float) -> list[object]:
            self.commands += [command[0] for command in commands]
            self.clock.now_s += self.each_takes_s
            return run(commands, 60.0)  # type: ignore[return-value]

        self.tier.run = noted  # type: ignore[method-assign,assignment]

    def find(self, tokens: Tokens, scope: Scope) -> list[Identity]:
        found: list[Identity] = []
        ended = threading.Event()

        def end(records: Found) -> None:
            found.extend(records.values())
            ended.set()

        self.lookups.look_up(tokens, scope, end)
        wait_for(ended)
        return found

    def close(self) -> None:
        self.lookups.close()
        self.tier.close()


@pytest.fixture
def asking(store: SharedStore) -> Iterator[Asking]:
    asking = Asking(store)
    yield asking
    asking.close()


def block(
    tokens: Tokens, start: int, end: int, namespace: Namespace = MODEL, family: object = FULL
) -> Identity:
    name, layers = family.name, family.layers  # type: ignore[attr-defined]
    return identify(namespace, name, layers, "float32", RecordKind.BLOCKS, tokens[:end], start)


def state(tokens: Tokens, position: int, namespace: Namespace = MODEL) -> Identity:
    start = (position - 1) // SIZE * SIZE
    return identify(
        namespace, STATE.name, STATE.layers, "float32", RecordKind.STATE, tokens[:position], start
    )


def put(tier: RemoteTier, identities: Sequence[Identity]) -> None:
    tier.store([Record(identity, [np.zeros(16, np.uint8)]) for identity in identities])


def keys(identities: Sequence[Identity]) -> set[bytes]:
    return {identity.key for identity in identities}


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 64, 65, 299, 700])
@pytest.mark.parametrize("at_once", [1, 3, 128])
def test_a_look_up_finds_the_records_of_a_prompt_and_no_others(
    length: int, at_once: int, tier: RemoteTier, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    other = np.concatenate((PROMPT[:100], PROMPT[:100]))
    own = [block(PROMPT, start, start + SIZE) for start in range(0, 304, SIZE)]
    own += [block(PROMPT, start, start + SIZE, family=FAMILIES[1]) for start in range(48, 64, SIZE)]
    own += [state(PROMPT, position) for position in (5, 8, 61, 64, 299)] + [block(PROMPT, 296, 299)]
    theirs = [block(other, start, start + SIZE) for start in range(104, 200, SIZE)] + [state(other, 150)]
    theirs += [block(other, 96, 102)]
    put(tier, own + theirs)
    found = asking.find(PROMPT[:length], Scope(MODEL))
    assert keys(found) == keys([each for each in own if each.end <= length])
    for each in found:
        assert (each.tokens == PROMPT[each.start : each.end]).all()
    assert {type(each.tokens.dtype) for each in found} <= {type(np.dtype(np.int32))}


def test_the_parts_of_a_public_head_and_of_tenants_are_kept_apart(tier: RemoteTier, asking: Asking) -> None:
    tenant, another = (Namespace("weights", "float32", salt=salt) for salt in ("tenant", "another"))
    scope = Scope(tenant, 20)
    own = [block(PROMPT, start, start + SIZE, scope.public) for start in (0, 8)]
    own += [block(PROMPT, 16, 20, scope.public), block(PROMPT, 16, 24, tenant), state(PROMPT, 30, tenant)]
    own += [state(PROMPT, 13, scope.public), state(PROMPT, 20, scope.public)]
    theirs = [block(PROMPT, 16, 24, another), block(PROMPT, 24, 32, another), block(PROMPT, 0, 8, MODEL)]
    put(tier, own + theirs)
    assert keys(asking.find(PROMPT[:60], scope)) == keys(own)
    assert keys(asking.find(PROMPT[:60], Scope(MODEL))) == keys(theirs[-1:])


def test_a_namespace_without_records_is_asked_for_once_in_a_while(tier: RemoteTier, asking: Asking) -> None:
    assert asking.find(PROMPT, Scope(MODEL)) == []
    assert asking.commands == [b"TOUCH"]
    put(tier, [block(PROMPT, 0, 8)])
    assert asking.find(PROMPT, Scope(MODEL)) == []
    assert asking.commands == [b"TOUCH"]
    asking.clock.now_s += module.ABSENT_S
    assert len(asking.find(PROMPT, Scope(MODEL))) == 1


def test_a_block_is_asked_for_once_in_a_while(tier: RemoteTier, asking: Asking) -> None:
    put(tier, [block(PROMPT, start, start + SIZE) for start in range(0, 80, SIZE)])
    assert len(asking.find(PROMPT[:80], Scope(MODEL))) == 10
    asking.commands.clear()
    assert asking.find(PROMPT[:80], Scope(MODEL)) == []
    assert asking.commands == [b"TOUCH"], "the index knows what was found"
    asking.commands.clear()
    put(tier, [block(PROMPT, 80, 88)])
    assert len(asking.find(PROMPT[:90], Scope(MODEL))) == 1
    assert asking.commands.count(b"SMEMBERS") == 2, "the new blocks"
    other = np.concatenate((PROMPT[:48], PROMPT[:48]))
    put(tier, [block(other, 48, 56)])
    assert keys(asking.find(other, Scope(MODEL))) == keys([block(other, 48, 56)])
    asking.clock.now_s += module.FOUND_S
    assert len(asking.find(PROMPT[:80], Scope(MODEL))) == 10


def test_blocks_are_asked_for_again_after_an_outage(
    tier: RemoteTier, asking: Asking, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "RETRY_S", 0.01)
    some = [block(PROMPT, start, start + SIZE) for start in range(0, 80, SIZE)]
    put(tier, some)
    assert len(asking.find(PROMPT[:80], Scope(MODEL))) == 10
    store.kill()
    assert asking.find(PROMPT[:80], Scope(MODEL)) == []
    store.start()
    wait_until(lambda: asking.tier.state == Ready())
    wait_until(
        lambda: isinstance(tier.store([Record(some[0], [np.zeros(16, np.uint8)])])[0], Stored | AlreadyStored)
    )
    put(tier, some)
    assert len(asking.find(PROMPT[:80], Scope(MODEL))) == 10


def test_only_so_many_blocks_are_remembered(
    tier: RemoteTier, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FOUND", 4)
    put(tier, [block(PROMPT, start, start + SIZE) for start in range(0, 80, SIZE)])
    for _ in range(2):
        assert len(asking.find(PROMPT[:80], Scope(MODEL))) >= 6
    assert len(asking.lookups._found) == 4


@pytest.mark.parametrize("lost", [b"at:", b"ns:"])
def test_records_whose_place_the_server_has_evicted_are_found_after_the_next_store(
    lost: bytes, tier: RemoteTier, asking: Asking, store: SharedStore
) -> None:
    """A replica that dies between a record and its place leaves it without, too."""
    own = [block(PROMPT, start, start + SIZE) for start in range(0, 80, SIZE)]
    put(tier, own)
    client = store.client()
    (names,) = client.run([[b"KEYS", b"*" + lost + b"*"]])
    assert isinstance(names, list)
    client.run([[b"DEL", name] for name in names if isinstance(name, bytes)])
    assert asking.find(PROMPT[:80], Scope(MODEL)) == []
    asking.clock.now_s += module.ABSENT_S
    put(tier, own)  # they are there already
    assert keys(asking.find(PROMPT[:80], Scope(MODEL))) == keys(own)


def test_a_look_up_is_a_use_of_the_marks_by_which_the_server_evicts(
    tier: RemoteTier, asking: Asking, store: SharedStore
) -> None:
    put(tier, [block(PROMPT, 0, 8)])
    client, mark = store.client(), tier.name(b"ns:", MODEL.digest())
    client.run(
        [
            [b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lfu"],
            [b"CONFIG", b"SET", b"lfu-log-factor", b"0"],
        ]
    )
    client.run([[b"SET", mark, b"1"]])
    (before,) = client.run([[b"OBJECT", b"FREQ", mark]])
    for _ in range(3):
        asking.find(PROMPT[:60], Scope(MODEL))
    (after,) = client.run([[b"OBJECT", b"FREQ", mark]])
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after > before


def test_a_gap_of_some_hundred_blocks_ends_a_look_up(
    tier: RemoteTier, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 4)
    put(tier, [block(PROMPT, start, start + SIZE) for start in (0, 24, 32, 40)])
    assert len(asking.find(PROMPT[:100], Scope(MODEL))) == 4
    put(tier, [block(PROMPT, 400, 408)])
    assert asking.find(PROMPT[:500], Scope(MODEL)) == []


@pytest.mark.parametrize("name", [b"at:", b"ns:"])
def test_a_server_that_lies_finds_nothing_wrong(
    name: bytes, tier: RemoteTier, asking: Asking, store: SharedStore
) -> None:
    client = store.client()
    put(tier, [block(PROMPT, 0, 8)])
    parent = block(PROMPT, 0, 8).parent
    lies = [
        b"",
        b"full",
        b"full 1 1 9",
        b"full 1 1 0",
        b"full 1 2 8",
        b"state 1 1 8",
        b"full -1 1 8",
        b"\xff 1 1 8",
    ]
    lies += [b"full 1 1 " + b"9" * 40, b"full 1 1 8 8", b"x" * 5000, b"full 2 1 8"]
    client.run([[b"SADD", tier.name(b"at:", parent), lie] for lie in lies])
    if name == b"ns:":
        client.run(
            [[b"DEL", tier.name(b"ns:", MODEL.digest())], [b"SADD", tier.name(b"ns:", MODEL.digest()), b"x"]]
        )
    found = asking.find(PROMPT[:60], Scope(MODEL))
    assert keys(found) == keys([block(PROMPT, 0, 8)])


def test_a_prompt_is_not_looked_up_where_the_server_cannot_be_asked(
    asking: Asking, store: SharedStore
) -> None:
    store.kill()
    assert asking.find(PROMPT, Scope(MODEL)) == []
    assert isinstance(asking.tier.state, Off)
    asking.commands.clear()
    assert asking.find(PROMPT, Scope(MODEL)) == []
    assert asking.commands == []


def test_private_prompts_are_not_looked_up(asking: Asking) -> None:
    assert asking.find(PROMPT, Scope(Namespace("weights", "float32", is_private=True))) == []
    assert asking.commands == []


def test_places_of_other_models_are_no_places() -> None:
    places = Places(FAMILIES, SIZE)
    assert places.decode(b"full 1 1 8", 8) is not None
    for raw in (b"full 1 1 9", b"other 1 1 8", b"full 2 1 8", b"full 1 1 8\n", b"full 1 1 \xb2"):
        assert places.decode(raw, 8) is None


def test_a_look_up_that_takes_long_ends_with_what_it_has(
    tier: RemoteTier, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 4)
    put(tier, [block(PROMPT, start, start + SIZE) for start in range(0, 400, SIZE)])
    asking.each_takes_s = module.BEGIN_SHARE * tier.timeout_s / 3
    found = asking.find(PROMPT[:401], Scope(MODEL))
    assert 4 <= len(found) < 50
    assert keys(found) == keys([block(PROMPT, each * SIZE, (each + 1) * SIZE) for each in range(len(found))])
    assert not isinstance(asking.tier.state, Off), "the prompt was long, and the server was not slow"


def test_a_long_prompt_does_not_turn_the_tier_off(
    tier: RemoteTier, store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up ends with the records that were found in its time."""
    monkeypatch.setattr(module, "AT_ONCE", 1)
    put(tier, [block(PROMPT, start, start + SIZE) for start in range(0, 696, SIZE)])
    other = RemoteTier(replace(store.config, timeout_s=4.0))
    lookups, found = PromptLookups(other, FAMILIES, SIZE), queue.SimpleQueue[Found]()
    run = other.run

    def slow(commands: Sequence[Sequence[bytes]], seconds: float | None = None) -> list[Reply]:
        time.sleep(0.05)
        return run(commands, seconds)

    other.run = slow  # type: ignore[method-assign]
    for _ in range(8):
        lookups.look_up(PROMPT, Scope(MODEL), found.put)
    lengths = [len(found.get()) for _ in range(8)]
    assert 0 < lengths[0] < 87, "it has all the time, or none"
    assert lengths[-1] == 0, "its time is over: it has waited for the others"
    assert other.state == Ready()
    lookups.close()
    other.close()


def test_the_end_does_not_wait_for_prompts_to_be_looked_up(tier: RemoteTier, store: SharedStore) -> None:
    lookups, ended, asked = PromptLookups(tier, FAMILIES, SIZE), list[Found](), threading.Event()
    goes_on, run = threading.Event(), tier.run

    def held(commands: Sequence[Sequence[bytes]], seconds: float | None = None) -> list[Reply]:
        assert not asked.is_set(), "a prompt is looked up after the end"
        asked.set()
        wait_for(goes_on)
        return run(commands, seconds)

    tier.run = held  # type: ignore[method-assign]
    for _ in range(10):
        lookups.look_up(PROMPT, Scope(MODEL), ended.append)
    wait_for(asked)
    closing = threading.Thread(target=lookups.close)
    closing.start()
    wait_until(lambda: lookups._closing)
    goes_on.set()
    join(closing)
    assert ended == [{}] * 10
