"""Misuse of the public surface: every wrong call raises an error that names it, and leaves the cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cache.helpers import NAMESPACE, admit, clock, ints, prefill
from rootstock.cache import (
    Admitted,
    Boundary,
    CheckpointKind,
    ChunkedAttention,
    Deferred,
    FullAttention,
    KVCache,
    Lease,
    Namespace,
    RecurrentState,
    ReleaseReason,
    SlidingWindow,
)
from rootstock.errors import BudgetTooSmall, CacheMisuse, InvalidOption

FULL, WINDOW, STATE = FullAttention(1, 1), SlidingWindow(1, 1, 6), RecurrentState(1, 8)
FAMILIES = {"full": (FULL,), "window": (FULL, WINDOW), "state": (FULL, STATE), "all": (FULL, WINDOW, STATE)}
NO_COUNTS: tuple[Any, ...] = (-1, 1.5, "1", None, True, np.float32(1), [1])
NO_POSITIVE: tuple[Any, ...] = (0, *NO_COUNTS)
NO_TOKENS_AT_ALL: tuple[Any, ...] = (
    None,
    [1, 2, 3],
    (1, 2, 3),
    "text",
    b"123",
    range(3),
    7,
    np.int32(7),
    np.array(7, np.int32),
    np.array([1, 2], np.int64),
    np.array([1, 2], np.uint32),
    np.array([1, 2], ">i4"),
    np.array([1.0, 2.0], np.float32),
    np.array([True, False]),
    np.array(["a"]),
    np.array([[1, 2], [3, 4]], np.int32),
)


def make(kind: str = "full") -> KVCache:
    return KVCache(FAMILIES[kind], 4096, 4, clock=clock())


def counts(cache: KVCache) -> tuple[object, ...]:
    """Returns the state that a refused call must not change."""
    cache.check()
    stats = cache.stats()
    return stats, [(lease.num_computed_tokens, lease.table_blocks) for lease in cache._leases.values()]


def refused(cache: KVCache, call: Callable[[], object], said: str = "") -> None:
    before = counts(cache)
    with pytest.raises(CacheMisuse) as refusal:
        call()
    assert refusal.value.message.startswith(f"KVCache.{refusal.value.call}: ")
    assert said in refusal.value.message
    assert len(refusal.value.message) < 400
    assert counts(cache) == before


# ---- making a cache


@pytest.mark.parametrize("value", NO_POSITIVE)
@pytest.mark.parametrize("name", ["budget_bytes", "block_size"])
def test_wrong_sizes(name: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=f"^{name} is ") as refusal:
        KVCache([FULL], **{"budget_bytes": 4096, "block_size": 4, name: value})  # type: ignore[arg-type]
    assert refusal.value.option == name


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "1", None, True])
@pytest.mark.parametrize("name", ["retained_share", "pinned_share"])
def test_wrong_shares(name: str, value: Any) -> None:
    with pytest.raises(InvalidOption, match=f"^{name} is "):
        KVCache([FULL], 4096, 4, **{name: value})


@pytest.mark.parametrize(
    "families", [[], (), None, FULL, "full", [FULL, FULL], [STATE, STATE], [FULL, None], [FULL, 5]]
)
def test_wrong_families(families: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^families is "):
        KVCache(families, 4096, 4)


@pytest.mark.parametrize("rows", [[], [1], [1, 0], [1, -1], [1, 2, 3], [1.5, 2], 5, "12"])
def test_wrong_rows(rows: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^rows is "):
        KVCache([FULL, WINDOW], 4096, 4, rows=rows)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_budget_that_is_too_small_names_the_parameters(kind: str) -> None:
    with pytest.raises(
        BudgetTooSmall, match=r"^budget_bytes is 1 bytes.* Raise budget_bytes or lower block_size\.$"
    ):
        KVCache(FAMILIES[kind], 1, 4)


@pytest.mark.parametrize("value", NO_POSITIVE)
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (FullAttention, ("layers", "bytes_per_token")),
        (SlidingWindow, ("layers", "bytes_per_token", "window")),
        (ChunkedAttention, ("layers", "bytes_per_token", "chunk")),
        (RecurrentState, ("layers", "bytes_per_state")),
    ],
)
def test_wrong_fields_of_families(family: Any, fields: tuple[str, ...], value: object) -> None:
    for name in fields:
        with pytest.raises(InvalidOption, match=f"^{name} is "):
            family(**(dict.fromkeys(fields, 1) | {name: value}))


@pytest.mark.parametrize("field", ["weights", "kv_dtype", "rope_regime", "adapter", "salt"])
def test_wrong_fields_of_a_namespace(field: str) -> None:
    for value in (None, 5, b"w", ["w"]):
        with pytest.raises(InvalidOption, match=f"^{field} is "):
            Namespace(**({"weights": "w", "kv_dtype": "d"} | {field: value}))  # type: ignore[arg-type]


def test_sizes_of_numpy_are_sizes() -> None:
    one, two, eight, size, block = np.array([1, 2, 8, 4096, 4])
    cache = KVCache([FullAttention(one, two), RecurrentState(one, eight)], size, block)
    assert cache.rows == KVCache([FullAttention(1, 2), RecurrentState(1, 8)], 4096, 4).rows


# ---- tokens and namespaces


@pytest.mark.parametrize("wrong", NO_TOKENS_AT_ALL, ids=repr)
@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_of_a_wrong_type_or_shape(kind: str, wrong: Any) -> None:
    cache = make(kind)
    lease, _ = admit(cache, ints(range(9)))
    for call in (cache.match, cache.explain, cache.pin):
        refused(cache, lambda call=call: call(wrong, NAMESPACE), "must be a NumPy array")  # type: ignore[misc]
    refused(cache, lambda: cache.forget(wrong, NAMESPACE, 0), "must be a NumPy array")
    refused(cache, lambda: cache.commit(lease, wrong), "must be a NumPy array")


@pytest.mark.parametrize("wrong", [None, "weights", 5, ("w", "d"), b"w"])
def test_a_wrong_namespace(wrong: Any) -> None:
    cache = make()
    for call in (cache.match, cache.explain, cache.pin):
        refused(cache, lambda call=call: call(ints(1, 2), wrong), "must be a Namespace")  # type: ignore[misc]
    refused(cache, lambda: cache.forget(ints(1, 2), wrong, 0), "must be a Namespace")
    if wrong is not None:
        refused(cache, lambda: cache.clear(wrong), "must be a Namespace")


@pytest.mark.parametrize("wrong", [*NO_COUNTS, "", [], ints(), ints(1, 2)], ids=repr)
def test_wrong_counts_of_public_tokens(wrong: Any) -> None:
    cache = make()
    for call in (cache.match, cache.explain, cache.pin):
        refused(cache, lambda call=call: call(ints(1, 2), NAMESPACE, public_tokens=wrong), "public_tokens")  # type: ignore[misc]
    refused(cache, lambda: cache.forget(ints(1, 2), NAMESPACE, 0, public_tokens=wrong), "public_tokens")


def test_nothing_cannot_be_forgotten() -> None:
    cache = make()
    lease, _ = admit(cache, ints(range(9)))
    prefill(cache, lease)
    refused(cache, lambda: cache.forget(ints(), NAMESPACE, 0), "at least 1")


# ---- admissions


@pytest.mark.parametrize("kind", FAMILIES)
def test_wrong_arguments_of_an_admission(kind: str) -> None:
    cache = make(kind)
    match = cache.match(ints(range(9)), NAMESPACE)
    wrong: Any
    for wrong in (None, ints(1, 2), "match", 5):
        refused(cache, lambda wrong=wrong: cache.admit(wrong), "is no Match")  # type: ignore[misc]
    refused(cache, lambda: cache.admit(cache.match(ints(), NAMESPACE)), "no tokens")
    for wrong in NO_COUNTS:
        refused(cache, lambda wrong=wrong: cache.admit(match, wrong), "watermark_blocks")  # type: ignore[misc]
    for position in (0, -1, 10, 1.5, None):
        wrong = Boundary(position, CheckpointKind.SYSTEM)  # type: ignore[arg-type]
        refused(cache, lambda wrong=wrong: cache.admit(match, boundaries=[wrong]), "ound")  # type: ignore[misc]
    refused(cache, lambda: cache.admit(match, boundaries=[5]), "is no Boundary")  # type: ignore[list-item]
    unknown = Boundary(5, "elsewhere")  # type: ignore[arg-type]
    refused(cache, lambda: cache.admit(match, boundaries=[unknown]), "must be a CheckpointKind")
    for wrong in (None, 5, ints(), ints(1, 2), Boundary(5, CheckpointKind.USER)):
        refused(cache, lambda wrong=wrong: cache.admit(match, boundaries=wrong), "must be a list")  # type: ignore[misc]
    for wrong in (5, "hints", [], ints(1)):
        refused(cache, lambda wrong=wrong: cache.admit(match, hints=wrong), "is no CacheHints")  # type: ignore[misc]
        refused(cache, lambda wrong=wrong: cache.admit(match, tier_hit=wrong), "is no TierHit")  # type: ignore[misc]
    for wrong in (-1, 1.5, "1"):
        refused(cache, lambda wrong=wrong: cache.match(ints(1), NAMESPACE, wrong), "at_most")  # type: ignore[misc]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_match_of_another_cache_is_matched_again(kind: str) -> None:
    cache, other = make(kind), make(kind)
    lease, _ = admit(other, ints(range(9)))
    prefill(other, lease)
    other.release(lease, ReleaseReason.FINISHED)
    foreign = other.match(ints(range(12)), NAMESPACE)
    assert foreign.length > 0
    answer = cache.admit(foreign)
    assert isinstance(answer, Admitted)
    assert answer.lease.hit_tokens == 0
    assert not answer.plan.copies
    cache.check()
    other.check()


# ---- leases

CALLS: dict[str, Callable[[KVCache, Any], object]] = {
    "extend": lambda cache, lease: cache.extend(lease, 1),
    "commit": lambda cache, lease: cache.commit(lease, ints(1)),
    "release": lambda cache, lease: cache.release(lease, ReleaseReason.FINISHED),
    "discard": lambda cache, lease: cache.discard(lease),
    "loaded": lambda cache, lease: cache.loaded(lease, 1),
    "detach": lambda cache, lease: cache.detach(lease),
    "request_checkpoint": lambda cache, lease: cache.request_checkpoint(lease, 5),
}


def ended(cache: KVCache) -> Lease:
    lease, _ = admit(cache, ints(range(9)))
    prefill(cache, lease)
    cache.release(lease, ReleaseReason.FINISHED)
    return lease


def discarded(cache: KVCache) -> Lease:
    lease, _ = admit(cache, ints(range(9)))
    cache.discard(lease)
    return lease


def reset(cache: KVCache) -> Lease:
    lease, _ = admit(cache, ints(range(9)))
    cache.reset()
    return lease


def foreign(cache: KVCache) -> Lease:
    admit(cache, ints(range(9)))  # a lease of the same number
    return admit(KVCache(cache.families, 4096, 4, clock=clock()), ints(range(9)))[0]


UNUSABLE: dict[str, tuple[Callable[[KVCache], object], str]] = {
    "ended": (ended, "has ended"),
    "discarded": (discarded, "has ended"),
    "reset": (reset, "has ended"),
    "foreign": (foreign, "of another cache"),
    "none": (lambda cache: None, "is no Lease"),
    "admitted": (lambda cache: cache.admit(cache.match(ints(range(9)), NAMESPACE)), "is no Lease"),
    "deferred": (lambda cache: Deferred(1, 0), "is no Lease"),
}


@pytest.mark.parametrize("unusable", UNUSABLE)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_lease_that_cannot_be_used(kind: str, call: str, unusable: str) -> None:
    cache = make(kind)
    make_lease, said = UNUSABLE[unusable]
    lease = make_lease(cache)
    refused(cache, lambda: CALLS[call](cache, lease), said)


@pytest.mark.parametrize("kind", FAMILIES)
def test_wrong_counts_of_a_lease(kind: str) -> None:
    cache = make(kind)
    lease, _ = admit(cache, ints(range(9)))
    for wrong in NO_COUNTS:
        refused(cache, lambda wrong=wrong: cache.extend(lease, wrong), "new_tokens")  # type: ignore[misc]
        refused(cache, lambda wrong=wrong: cache.extend(lease, 1, wrong), "watermark_blocks")  # type: ignore[misc]
        refused(cache, lambda wrong=wrong: cache.request_checkpoint(lease, wrong), "position")  # type: ignore[misc]
    for reason in ("finished!", "finished", None, 5, True):
        refused(cache, lambda reason=reason: cache.release(lease, reason), "ReleaseReason")  # type: ignore[misc]
    cache.release(lease, ReleaseReason.UNUSED)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("position", [*NO_COUNTS, 3, 10, 99])
def test_a_load_ends_behind_the_computed_tokens_and_within_the_prompt(kind: str, position: Any) -> None:
    cache = make(kind)
    lease, _ = admit(cache, ints(range(9)))
    cache.extend(lease, 4)
    cache.commit(lease, ints(range(4)))
    refused(cache, lambda: cache.loaded(lease, position), "from 4 to 9")


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_lease_is_detached_once(kind: str) -> None:
    cache = make(kind)
    lease, _ = admit(cache, ints(range(9)))
    cache.detach(lease)
    refused(cache, lambda: cache.detach(lease), "out of the tree")


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9])
def test_a_commit_of_more_than_is_reserved(kind: str, prompt: int) -> None:
    cache = make(kind)
    lease, _ = admit(cache, ints(range(prompt)))
    cache.extend(lease, prompt)
    room = -(-prompt // 4) * 4
    too_many = np.arange(room + 1, dtype=np.int32)
    refused(cache, lambda: cache.commit(lease, too_many), f"blocks for {room} more: call extend")
    prefill(cache, lease)
    refused(cache, lambda: cache.commit(lease, too_many), f"blocks for {room - prompt} more: call extend")
    cache.release(lease, ReleaseReason.FINISHED)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("at", [0, 3, 4, 8])
def test_a_commit_of_other_tokens_than_the_prompts(kind: str, at: int) -> None:
    cache = make(kind)
    lease, _ = admit(cache, ints(range(9)))
    cache.extend(lease, 9)
    wrong = np.arange(9, dtype=np.int32)
    wrong[at] = 77
    refused(cache, lambda: cache.commit(lease, wrong), f"token 77 at position {at} is not the prompt's")
    cache.commit(lease, np.arange(9, dtype=np.int32))
    cache.check()


def test_a_window_without_blocks_is_no_room() -> None:
    cache = make("window")
    lease, _ = admit(cache, ints(range(9)))
    refused(cache, lambda: cache.commit(lease, ints(range(9))), "call extend before the forward")
