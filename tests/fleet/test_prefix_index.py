"""The index against a set of keys for each replica, in random schedules and under readers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock.fleet.prefix_index import MOST_REPLICAS, Keys, NoFreeSlot, PrefixIndex
from waiting import join

KEYS = [0, 1, 2, 2**32, 2**63, 2**64 - 1, *range(10, 40)]


def keys(*of: int) -> Keys:
    return np.array(of, np.uint64)


class Model:
    """Sets of keys."""

    def __init__(self) -> None:
        self.of: dict[int, set[int]] = {}

    def matched(self, prompt: list[int], slots: list[int]) -> dict[int, int]:
        return {
            slot: next((n for n, key in enumerate(prompt) if key not in self.of[slot]), len(prompt))
            for slot in slots
        }


@settings(max_examples=100)
@given(st.data())
def test_the_index_equals_a_set_for_each_replica(data: st.DataObject) -> None:
    index, model = PrefixIndex(), Model()
    some = st.lists(st.sampled_from(KEYS), max_size=12)
    for _ in range(data.draw(st.integers(0, 40))):
        act = data.draw(st.sampled_from(["join", "leave", "store", "store", "remove", "clear", "match"]))
        slots = sorted(model.of)
        if act == "join":
            slot = index.join()
            assert slot not in model.of
            model.of[slot] = set()
        elif slots:
            slot = data.draw(st.sampled_from(slots))
            which = data.draw(some)
            if act == "store":
                index.stored(slot, keys(*which))
                model.of[slot].update(which)
            elif act == "remove":
                index.removed(slot, keys(*which))
                model.of[slot].difference_update(which)
            elif act == "clear":
                index.cleared(slot)
                model.of[slot].clear()
            elif act == "leave":
                index.leave(slot)
                del model.of[slot]
            else:
                asked = data.draw(st.lists(st.sampled_from(slots), unique=True))
                assert index.matched(keys(*which), asked) == model.matched(which, asked)
    assert len(index) == len(set().union(*model.of.values()))


@pytest.mark.parametrize("seed", range(3))
def test_a_large_index_equals_its_sets_through_all_layouts(seed: int) -> None:
    """Thousands of keys come and go, so that the table grows, is laid out anew, and reuses dead places."""
    rng = np.random.default_rng(seed)
    index, model = PrefixIndex(), Model()
    pool = rng.integers(0, 2**64, 30_000, np.uint64)
    pool[:2000] = np.arange(2000, dtype=np.uint64)  # neighbours
    for slot in range(5):
        assert index.join() == slot
        model.of[slot] = set()
    for _ in range(400):
        slot, part = int(rng.integers(5)), rng.choice(pool, int(rng.integers(1, 400)))
        if rng.random() < 0.6:
            index.stored(slot, part)
            model.of[slot].update(part.tolist())
        elif rng.random() < 0.95:
            index.removed(slot, part)
            model.of[slot].difference_update(part.tolist())
        else:
            index.cleared(slot)
            model.of[slot].clear()
    assert len(index) == len(set().union(*model.of.values()))
    for slot, of in model.of.items():
        present = np.array([index.matched(pool[n : n + 1], [slot])[slot] for n in range(len(pool))])
        assert set(pool[present > 0].tolist()) == of


def test_keys_that_begin_equal_do_not_make_the_table_slow() -> None:
    """A prompt's author may look for tokens whose keys have equal upper bits: the index scrambles them."""
    index = PrefixIndex()
    slot = index.join()
    alike = np.random.default_rng(0).choice(2**24, 5000, replace=False).astype(np.uint64)
    index.stored(slot, alike)
    used = index._table.keys != 0
    edges = np.flatnonzero(np.diff(np.concatenate(([0], used, [0]))))
    assert max(edges[1::2] - edges[::2]) < 500  # the longest run of used places


def test_keys_that_come_and_go_do_not_let_the_table_grow() -> None:
    index = PrefixIndex()
    slot, rng = index.join(), np.random.default_rng(0)
    window: list[Keys] = []
    for _ in range(2000):
        window.append(rng.integers(0, 2**64, 50, np.uint64))
        index.stored(slot, window[-1])
        if len(window) > 100:
            index.removed(slot, window.pop(0))
    assert len(index) == 5000
    assert index.nbytes <= 16 * 2**14


def test_a_slot_is_reused_when_its_blocks_are_gone() -> None:
    index = PrefixIndex()
    slots = [index.join() for _ in range(MOST_REPLICAS)]
    assert sorted(slots) == list(range(MOST_REPLICAS))
    with pytest.raises(NoFreeSlot):
        index.join()
    for slot in slots:
        index.stored(slot, keys(1, 2, 3))
    assert index.matched(keys(1, 2, 9), slots) == dict.fromkeys(slots, 2)
    index.leave(63)
    assert index.join() == 63
    assert index.matched(keys(1, 2, 3), [62, 63]) == {62: 3, 63: 0}


def test_readers_see_the_blocks_that_stay_while_others_change() -> None:
    index = PrefixIndex()
    stays, changes = index.join(), index.join()
    prompt = np.random.default_rng(0).integers(1, 2**64, 100, np.uint64)
    index.stored(stays, prompt)
    wrong, done = list[object](), threading.Event()

    def read() -> None:
        while not done.is_set():
            found = index.matched(prompt, [stays, changes])
            if found[stays] != 100:
                wrong.append(found)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    rng = np.random.default_rng(1)
    for round_ in range(60):
        index.stored(changes, rng.integers(0, 2**64, 2000, np.uint64))
        if round_ % 7 == 6:
            index.cleared(changes)
    done.set()
    join(*readers)
    assert not wrong
