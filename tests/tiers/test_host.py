"""Host RAM tier: stores, loads, evictions, and the cap at every instant."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import rootstock.tiers.host
from rootstock.cache.keys import Identity, Namespace, RecordKey
from rootstock.tiers.base import (
    AlreadyStored,
    Miss,
    MissKind,
    NotStored,
    Off,
    Ready,
    Record,
    Refusal,
    Stored,
    StoreOutcome,
)
from rootstock.tiers.host import HostTier, charge
from tiers.helpers import (
    EACH,
    Clock,
    damage,
    identity_of,
    is_right,
    joined,
    keys_of,
    kind_of_miss,
    record_of,
    records,
)
from waiting import HANG_S, first_wait_on, join, wait_for


def tier_for(count: int, **options: object) -> HostTier:
    """Makes a tier with room for so many records of the usual size."""
    return HostTier(count * EACH, **options)  # type: ignore[arg-type]


def test_the_payload_may_change_once_it_is_stored() -> None:
    tier = tier_for(2)
    record, same = records(1)[0], records(1)[0]
    tier.store([record])
    for buffer in record.payload:
        np.asarray(buffer)[:] = 0
    record.identity.tokens[:] = 0
    assert is_right(tier.load(same.identity), same)


def test_the_least_recently_used_record_is_evicted_first_and_passed_on_whole() -> None:
    evicted: list[Record] = []
    tier = tier_for(3, on_evicted=evicted.append)
    group = records(6)
    tier.store(group[:3])
    tier.touch([group[0].identity.key])
    assert is_right(tier.load(group[1].identity), group[1])
    assert tier.store([group[2]]) == [AlreadyStored()]  # which is a use
    tier.store(group[3:5])
    assert keys_of(evicted) == keys_of(group[:2])
    assert [joined(record.payload) for record in evicted] == [joined(record.payload) for record in group[:2]]
    assert all(
        [bytes(part) for part in theirs.views()] == [bytes(part) for part in ours.views()]
        for theirs, ours in zip(evicted, group, strict=False)
    )
    assert tier.load(group[0].identity) == Miss(MissKind.ABSENT)


def test_without_a_receiver_evicted_records_are_reported_gone() -> None:
    told: list[RecordKey] = []
    tier = tier_for(1, gone=told.extend)
    group = records(2)
    tier.store(group)
    assert told == keys_of(group[:1])


def test_a_record_larger_than_the_cap_is_refused_and_evicts_nothing() -> None:
    tier = tier_for(2)
    group = records(2)
    tier.store(group)
    large = record_of(identity_of(9), 2 * EACH)
    (refused,) = tier.store([large])
    assert isinstance(refused, NotStored)
    assert refused.why is Refusal.TOO_LARGE
    assert len(tier) == 2


def test_room_is_made_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    tier = tier_for(2, on_evicted=lambda record: seen.append(tier.used_bytes))
    copied = rootstock.tiers.host._copied

    def watched(*arguments: object) -> object:
        held = sum(held.charged_bytes for held in [*tier._held.values(), *tier._leaving.values()])
        assert held + EACH <= tier.cap_bytes
        return copied(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rootstock.tiers.host, "_copied", watched)
    tier.store(records(5))
    assert seen == [2 * EACH] * 3  # an evicted record is charged until `on_evicted` has returned


def test_a_system_without_memory_refuses_the_record_and_is_charged_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = tier_for(3)
    first, second = records(2)
    tier.store([first])

    def fails(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(rootstock.tiers.host, "_copied", fails)
    assert tier.store([second]) == [NotStored(Refusal.FAILED, "the system has no memory left")]
    assert tier.used_bytes == EACH
    assert is_right(tier.load(first.identity), first)


def test_the_charge_covers_the_memory_of_a_record() -> None:
    group = [Record(identity_of(seed), [np.ones(500, np.uint8) for _ in range(24)]) for seed in range(200)]
    for record in group:
        record.views()  # NumPy notes once for each array how it was last looked at
    tier = HostTier(1 << 30)
    tracemalloc.start()
    tier.store(group)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * tier.used_bytes < taken < tier.used_bytes - 200 * 4096  # a page covers untraced memory


def test_a_damaged_record_is_a_miss_and_is_removed() -> None:
    told: list[RecordKey] = []
    tier = tier_for(2, gone=told.extend)
    (record,) = records(1)
    tier.store([record])
    damage(tier, record.identity.key)
    assert kind_of_miss(tier.load(record.identity)) is MissKind.CHECKSUM
    assert told == [record.identity.key]
    assert tier.load(record.identity) == Miss(MissKind.ABSENT)
    assert (tier.used_bytes, len(tier)) == (0, 0)
    assert tier.store([record]) == [Stored(EACH)]


def test_a_damaged_record_is_never_passed_on() -> None:
    evicted: list[Record] = []
    told: list[RecordKey] = []
    tier = tier_for(2, on_evicted=evicted.append, gone=told.extend)
    group = records(4)
    tier.store(group[:2])
    damage(tier, group[0].identity.key)
    tier.store(group[2:])
    assert keys_of(evicted) == keys_of(group[1:2])
    assert told == keys_of(group[:1])
    damage(tier, group[2].identity.key)
    assert keys_of(tier.records()) == keys_of(group[3:])


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (identity_of(1, namespace=Namespace("other", "float32")), MissKind.OTHER_NAMESPACE),
        (identity_of(1, layers=5), MissKind.OTHER_LAYERS),
        (identity_of(1, dtype="bfloat16"), MissKind.OTHER_DTYPE),
        (identity_of(1, start=17), MissKind.OTHER_POSITION),
        (identity_of(2), MissKind.OTHER_TOKENS),
    ],
)
def test_a_record_of_another_identity_is_never_loaded(
    other: Identity, kind: MissKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two keys are equal here, as a collision would make them."""
    monkeypatch.setattr(Identity, "key", property(lambda self: RecordKey(bytes(16))))
    tier = tier_for(2)
    tier.store([record_of(identity_of(1))])
    assert kind_of_miss(tier.load(other)) is kind


def test_entries_list_use_and_size_with_parents_first() -> None:
    clock = Clock()
    tier = tier_for(4, clock=clock)
    later, first = record_of(identity_of(1, 16, 29)), record_of(identity_of(1, 0, 16))
    tier.store([later, first])
    clock.now_s = 1234.0
    tier.touch([later.identity.key, RecordKey(bytes(16))])
    entries = list(tier.entries())
    assert [entry.identity.key for entry in entries] == keys_of([first, later])
    assert [(entry.last_use_s, entry.uses) for entry in entries] == [(1000.0, 0), (1234.0, 1)]
    assert [entry.payload_bytes for entry in entries] == [3000, 3000]
    assert sum(entry.stored_bytes for entry in entries) == tier.used_bytes


def test_quarantine_and_clear_drop_records_and_report_them() -> None:
    told: list[RecordKey] = []
    evicted: list[Record] = []
    tier = tier_for(4, on_evicted=evicted.append, gone=told.extend)
    group = records(4)
    tier.store(group)
    tier.quarantine([*keys_of(group[:1]), RecordKey(bytes(16))])
    assert told == keys_of(group[:1])
    tier.clear()
    assert told == keys_of(group)
    assert evicted == []
    assert (len(tier), tier.used_bytes) == (0, 0)
    assert tier.store(group[:1]) == [Stored(EACH)]


def test_clearing_a_namespace_leaves_every_other() -> None:
    told: list[RecordKey] = []
    tier = tier_for(4, gone=told.extend)
    another = Namespace("weights", "float32", salt="another")
    ours, theirs = records(2), [record_of(identity_of(seed, namespace=another)) for seed in range(2)]
    tier.store([*ours, *theirs])
    tier.clear(another.digest())
    assert told == keys_of(theirs)
    assert all(is_right(tier.load(record.identity), record) for record in ours)
    assert all(tier.load(record.identity) == Miss(MissKind.ABSENT) for record in theirs)


def test_a_closed_tier_is_empty_and_off() -> None:
    tier = tier_for(4)
    (record,) = records(1)
    tier.store([record])
    assert tier.state == Ready()
    tier.close()
    tier.close()
    assert isinstance(tier.state, Off)
    assert tier.used_bytes == 0
    assert tier.load(record.identity) == Miss(MissKind.UNAVAILABLE, "closed")
    assert tier.store([record]) == [NotStored(Refusal.UNAVAILABLE, "closed")]


def test_a_record_can_be_loaded_until_its_receiver_has_returned() -> None:
    found: list[bool] = []
    group = records(3)

    def take(record: Record) -> None:
        (same,) = (other for other in group if other.identity.key == record.identity.key)
        found.append(is_right(tier.load(record.identity), same))
        assert record.identity.key in {entry.identity.key for entry in tier.entries()}

    tier = tier_for(1, on_evicted=take)
    tier.store(group)
    assert found == [True, True]


def test_a_receiver_that_fails_loses_only_that_record(caplog: pytest.LogCaptureFixture) -> None:
    def take(record: Record) -> None:
        raise ZeroDivisionError("a bug")

    tier = tier_for(1, on_evicted=take)
    group = records(2)
    assert tier.store(group) == [Stored(EACH)] * 2
    assert is_right(tier.load(group[1].identity), group[1])
    assert tier.used_bytes == EACH
    assert len(caplog.records) == 1


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def tier_with_a_slow_receiver() -> tuple[HostTier, threading.Event, threading.Event]:
    """Makes a tier for one record, and events: a record is being evicted; its receiver may return."""
    leaving, go_on = threading.Event(), threading.Event()

    def take(record: Record) -> None:
        leaving.set()
        wait_for(go_on)

    return tier_for(1, on_evicted=take), leaving, go_on


def test_quarantine_waits_for_a_record_that_is_being_evicted() -> None:
    tier, leaving, go_on = tier_with_a_slow_receiver()
    group = records(2)
    storing = in_thread(lambda: tier.store(group))
    wait_for(leaving)
    waits = first_wait_on(tier._changed)
    striking = in_thread(lambda: tier.quarantine(keys_of(group[:1])))
    wait_for(waits)
    assert striking.is_alive()
    go_on.set()
    join(striking, storing)
    assert len(tier) == 1


def test_a_store_waits_for_room_that_another_is_making() -> None:
    tier, leaving, go_on = tier_with_a_slow_receiver()
    first, second, third = records(3)
    tier.store([first])
    outcomes: list[StoreOutcome] = []
    threads = [in_thread(lambda: outcomes.extend(tier.store([second])))]
    wait_for(leaving)
    waits = first_wait_on(tier._changed)
    threads.append(in_thread(lambda: outcomes.extend(tier.store([third]))))
    wait_for(waits)
    assert threads[1].is_alive()
    assert tier.used_bytes == EACH
    go_on.set()
    join(*threads)
    assert outcomes == [Stored(EACH)] * 2
    assert tier.used_bytes == EACH


def test_two_threads_that_store_one_record_are_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    copied = rootstock.tiers.host._copied

    def at_once(*arguments: object) -> object:
        both.wait(HANG_S)
        return copied(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rootstock.tiers.host, "_copied", at_once)
    tier = tier_for(2)
    outcomes: list[StoreOutcome] = []
    threads = [in_thread(lambda: outcomes.extend(tier.store(records(1)))) for _ in range(2)]
    join(*threads)
    assert sorted(outcomes, key=str) == [AlreadyStored(), Stored(EACH)]
    assert (tier.used_bytes, len(tier)) == (EACH, 1)


def test_a_store_that_a_close_overtakes_is_refused_and_charged_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = rootstock.tiers.host._copied
    tier = tier_for(2)

    def overtaken(*arguments: object) -> object:
        tier.close()
        return copied(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rootstock.tiers.host, "_copied", overtaken)
    assert tier.store(records(1)) == [NotStored(Refusal.UNAVAILABLE, "closed")]
    assert (tier.used_bytes, len(tier)) == (0, 0)


def test_many_threads_never_exceed_the_cap_and_never_see_a_wrong_byte() -> None:
    taken: list[RecordKey] = []
    tier = tier_for(8, on_evicted=lambda record: taken.append(record.identity.key))
    group = records(24)
    wrong: list[object] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(300):
            record = group[int(random.integers(len(group)))]
            choice = random.integers(8)
            if choice < 3:
                tier.store([record])
            elif choice < 7:
                result = tier.load(record.identity)
                if not is_right(result, record) and result != Miss(MissKind.ABSENT):
                    wrong.append(result)
            else:
                tier.quarantine([record.identity.key])
            if tier.used_bytes > tier.cap_bytes:
                wrong.append(tier.used_bytes)

    threads = [in_thread(lambda seed=seed: work(seed)) for seed in range(4)]  # type: ignore[misc]
    join(*threads)
    assert wrong == []
    assert tier.used_bytes == EACH * len(tier)
    assert tier._leaving == {}
    assert taken


class AgainstAModel(RuleBasedStateMachine):
    """State machine that compares the tier with a list of records, the least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[RecordKey] = []
        self.tier = HostTier(4 * EACH, lambda record: self.evicted.append(record.identity.key))
        self.model: list[Record] = []
        self.expected_evictions: list[RecordKey] = []

    def _find(self, record: Record) -> Record | None:
        return next((r for r in self.model if r.identity.key == record.identity.key), None)

    def _use(self, record: Record) -> None:
        self.model.remove(record)
        self.model.append(record)

    @rule(seed=st.integers(0, 9))
    def store(self, seed: int) -> None:
        record = record_of(identity_of(seed), 500 * seed)
        (outcome,) = self.tier.store([record])
        if (there := self._find(record)) is not None:
            assert outcome == AlreadyStored()
            self._use(there)
            return
        while sum(map(charge, self.model)) + charge(record) > self.tier.cap_bytes:
            self.expected_evictions.append(self.model.pop(0).identity.key)
        self.model.append(record)
        assert outcome == Stored(charge(record))

    @rule(seed=st.integers(0, 9))
    def load(self, seed: int) -> None:
        record = record_of(identity_of(seed), 500 * seed)
        result = self.tier.load(record.identity)
        if (there := self._find(record)) is not None:
            assert is_right(result, there)
            self._use(there)
        else:
            assert result == Miss(MissKind.ABSENT)

    @rule(seeds=st.lists(st.integers(0, 9), max_size=3))
    def touch(self, seeds: list[int]) -> None:
        identities = [identity_of(seed) for seed in seeds]
        self.tier.touch([identity.key for identity in identities])
        for identity in identities:
            if (there := self._find(Record(identity, []))) is not None:
                self._use(there)

    @rule(seed=st.integers(0, 9))
    def quarantine(self, seed: int) -> None:
        identity = identity_of(seed)
        self.tier.quarantine([identity.key])
        self.model = [record for record in self.model if record.identity.key != identity.key]

    @invariant()
    def holds_what_it_should(self) -> None:
        assert keys_of(self.tier.records()) == keys_of(self.model)
        assert self.tier.used_bytes == sum(map(charge, self.model)) <= self.tier.cap_bytes
        assert self.evicted == self.expected_evictions


AgainstAModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTheHostTierAgainstAModel = AgainstAModel.TestCase


def test_a_prompts_tokens_are_not_kept_alive_by_a_record_of_its_end() -> None:
    tier = tier_for(2)
    record = records(1)[0]
    prompt = np.concatenate([np.zeros(100_000, np.int32), record.identity.tokens])
    tier.store([Record(replace(record.identity, tokens=prompt[100_000:]), record.payload)])
    (entry,) = tier.entries()
    assert entry.identity.tokens.base is None
