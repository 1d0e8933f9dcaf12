"""Public heads: all tenants share their K/V, and nothing that follows them."""

from __future__ import annotations

import numpy as np
import pytest

from cache.helpers import NAMESPACE, clock, decode, ints, make_cache, make_hybrid, nodes, prefill
from rootstock.cache import FullAttention, KVCache, Namespace
from rootstock.cache.families import RecurrentState, SlidingWindow
from rootstock.cache.keys import Scope
from rootstock.cache.lease import Admitted, Lease, ReleaseReason
from rootstock.cache.plan import Store
from rootstock.cache.public_heads import PublicHeads
from rootstock.cache.radix_node import CheckpointKind
from rootstock.cache.retention.pins import Pinned
from rootstock.cache.tier_index import StoredIndex
from rootstock.cache.types import Tokens

HEAD = ints(range(10))  # ends inside the third block of four
A, B = (Namespace("weights", "float32", salt=salt) for salt in "ab")
TAIL, OTHER = range(50, 60), range(70, 80)
HYBRID = (FullAttention(1, 1), SlidingWindow(1, 1, window=6), RecurrentState(1, 16))


def admitted(cache: KVCache, tokens: Tokens, namespace: Namespace, head: int = len(HEAD)) -> Lease:
    answer = cache.admit(cache.match(tokens, namespace, public_tokens=head))
    assert isinstance(answer, Admitted)
    cache.check()
    return answer.lease


def answered(cache: KVCache, tokens: Tokens, namespace: Namespace, head: int = len(HEAD)) -> Lease:
    lease = admitted(cache, tokens, namespace, head)
    prefill(cache, lease)
    cache.release(lease, ReleaseReason.FINISHED)
    cache.check()
    return lease


def length(cache: KVCache, tokens: Tokens, namespace: Namespace, head: int = len(HEAD)) -> int:
    return cache.match(tokens, namespace, public_tokens=head).length


# ---- the list


def test_the_longest_head_that_a_prompt_begins_with_is_its_own() -> None:
    heads = PublicHeads([HEAD, HEAD[:4], ints(HEAD[:4].tolist(), 99), ints()])
    assert len(heads) == 3
    assert [heads.longest(ints(HEAD.tolist(), 1)), heads.longest(HEAD), heads.longest(HEAD[:9])] == [
        10,
        10,
        4,
    ]
    assert [heads.longest(ints(range(4), 99)), heads.longest(HEAD[:3]), heads.longest(ints())] == [5, 0, 0]
    assert PublicHeads().longest(HEAD) == 0


def test_the_memory_up_to_the_end_of_a_head_is_public() -> None:
    scope = Scope(A, 10)
    assert [scope.of(end) for end in (1, 10)] == [scope.public] * 2
    assert [scope.of(end) for end in (0, 11)] == [A] * 2
    assert scope.public == Scope(B, 3).public
    assert scope.public not in (A, NAMESPACE)
    assert len({namespace.digest() for namespace in (scope.public, A, NAMESPACE)}) == 3
    assert Scope(A).first == A


# ---- hits


@pytest.mark.behaviour(9)
@pytest.mark.parametrize("families", [(FullAttention(1, 1),), HYBRID], ids=["full", "hybrid"])
def test_tenants_share_a_head_once_and_no_tail(families: tuple[FullAttention, ...]) -> None:
    cache = make_hybrid(*families)
    prompt = ints(HEAD.tolist(), TAIL)
    first = answered(cache, prompt, A)
    assert first.hit_tokens == 0
    blocks = cache.pool.cached_blocks
    assert length(cache, prompt, B) == len(HEAD)
    assert length(cache, prompt, A) == len(prompt) - 1
    second = answered(cache, prompt, B)
    assert second.hit_tokens == len(HEAD)
    assert cache.pool.cached_blocks == blocks + 3, "two whole blocks of the head are stored once"
    assert cache.stats().namespaces == 3
    held = {node.start: node for node in nodes(cache) if node.end == len(HEAD)}
    assert len(held) == 1
    assert len(held[0].private_roots) == 2
    assert length(cache, ints(HEAD.tolist(), 7, 7), NAMESPACE) == len(HEAD), "also without a tenant"
    assert length(cache, prompt, NAMESPACE, head=0) == 0, "a wholly private prompt"


@pytest.mark.behaviour(24)
def test_a_head_gets_a_checkpoint_without_any_boundary() -> None:
    cache = make_hybrid(*HYBRID)
    answered(cache, ints(HEAD.tolist(), TAIL), A)
    [checkpoint] = [
        each for node in nodes(cache) for each in node.checkpoints.values() if each.position == len(HEAD)
    ]
    assert checkpoint.kind is CheckpointKind.SYSTEM
    assert cache.match(ints(HEAD.tolist(), OTHER), B, public_tokens=len(HEAD)).checkpoint is checkpoint


def test_a_part_of_a_head_is_a_public_hit() -> None:
    cache = make_cache()
    lease = admitted(cache, ints(HEAD.tolist(), TAIL), A)
    prefill(cache, lease, 6)
    assert length(cache, ints(HEAD.tolist(), OTHER), B) == 6
    cache.release(lease, ReleaseReason.ABORTED)
    assert length(cache, ints(HEAD.tolist(), OTHER), B) == 6


def test_heads_within_heads_keep_their_tails_apart() -> None:
    cache = make_cache()
    longer = ints(HEAD.tolist(), range(50, 54))
    answered(cache, ints(longer.tolist(), 1, 2, 3), A, head=len(longer))
    short = ints(HEAD.tolist(), range(50, 53), 9, 9)  # has the shorter head alone
    assert length(cache, short, A) == len(HEAD)
    answered(cache, short, A)
    assert length(cache, ints(short.tolist(), 9), A) == len(short)
    assert length(cache, ints(longer.tolist(), 1, 2, 3, 4), A, head=len(longer)) == len(longer) + 3
    assert length(cache, ints(longer.tolist(), 1, 2, 3, 4), B, head=len(longer)) == len(longer)


def test_a_prompt_that_is_a_head_as_a_whole_has_a_private_answer() -> None:
    cache = make_cache()
    lease = admitted(cache, HEAD, A)
    prefill(cache, lease)
    decode(cache, lease, ints(TAIL))
    cache.release(lease, ReleaseReason.FINISHED)
    follow = ints(HEAD.tolist(), TAIL, 1)
    assert [length(cache, follow, A), length(cache, follow, B)] == [len(follow) - 1, len(HEAD)]


# ---- what others can see


def test_no_request_waits_for_the_tail_of_another_tenant() -> None:
    cache = make_cache()
    prompt = ints(HEAD.tolist(), TAIL)
    lease = admitted(cache, prompt, A)
    prefill(cache, lease, 4)
    pending = [cache.match(prompt, each, public_tokens=len(HEAD)).pending for each in (A, B)]
    assert [each.until for each in pending if each is not None] == [len(prompt), len(HEAD)]
    prefill(cache, lease, 12)
    assert cache.match(prompt, A, public_tokens=len(HEAD)).pending is not None
    assert cache.match(prompt, B, public_tokens=len(HEAD)).pending is None
    cache.release(lease, ReleaseReason.ABORTED)


@pytest.mark.behaviour(30)
def test_explanations_tell_of_own_tails_and_of_heads_only() -> None:
    cache = make_cache(blocks=8)
    answered(cache, ints(HEAD.tolist(), TAIL), A)
    asked = ints(HEAD.tolist(), range(50, 55), 1, 1)
    own, other = (cache.explain(asked, each, public_tokens=len(HEAD)) for each in (A, B))
    assert (own.cap, own.cached_tokens_there) == ("diverged", (55,))
    assert (other.cap, other.cached_tokens_there, other.found_tokens) == ("end_of_cached", (), len(HEAD))
    answered(cache, ints(range(200, 220)), B, head=0)  # evicts the tail
    own, other = (
        cache.explain(ints(HEAD.tolist(), TAIL, 1), each, public_tokens=len(HEAD)) for each in (A, B)
    )
    assert own.cap == "evicted"
    assert (other.cap, other.evicted_tokens) == ("end_of_cached", 0)


def test_drafts_follow_own_tails_only() -> None:
    cache = make_cache()
    answered(cache, ints(HEAD.tolist(), TAIL), A)
    for namespace, follows in ((A, list(TAIL)[1:5]), (B, [])):
        lease = admitted(cache, HEAD, namespace)
        prefill(cache, lease)
        assert cache.following(lease, 50, 4).tolist() == follows
        cache.release(lease, ReleaseReason.FINISHED)


def test_volatile_spans_are_found_among_own_tails_only() -> None:
    cache = make_cache(blocks=200)
    rest = list(range(100, 140))
    for value, namespace in ((1, A), (2, B), (3, A)):
        answered(cache, ints(HEAD.tolist(), value, rest), namespace)
    assert len(cache.volatile.of(A)) == 1
    assert cache.volatile.of(B) == []


# ---- eviction and clearing


def test_clearing_public_heads_ends_the_pins_that_hold_them() -> None:
    cache = make_cache()
    prompt = ints(HEAD.tolist(), TAIL)
    answered(cache, prompt, A)
    assert isinstance(cache.pin(prompt, A, "a", public_tokens=len(HEAD)), Pinned)
    assert isinstance(cache.pin(HEAD[:7], B, "b", public_tokens=len(HEAD)), Pinned)
    cache.clear(B)
    assert [pin.tenant for pin in cache.pins()] == ["a"]
    cache.clear(Scope(A).public)
    cache.check()
    assert cache.pins() == []
    assert length(cache, prompt, B) == 0


def test_a_head_is_evicted_after_the_tails_behind_it() -> None:
    cache = make_cache(blocks=9)
    answered(cache, ints(HEAD.tolist(), TAIL), A)
    answered(cache, ints(HEAD.tolist(), OTHER), B)
    answered(cache, ints(range(200, 216)), A, head=0)
    assert length(cache, ints(HEAD.tolist(), 1), B) == len(HEAD)
    answered(cache, ints(range(300, 336)), A, head=0)
    assert length(cache, ints(HEAD.tolist(), 1), B) == 0
    cache.check()
    assert Scope(A, 1).public not in cache.tree.roots or cache.tree.roots[Scope(A, 1).public].is_empty


def test_thousands_of_tenants_of_one_head_leave_no_more_roots_than_tails() -> None:
    cache = make_cache(blocks=24)
    for number in range(3_000):
        answered_quickly(cache, ints(HEAD.tolist(), TAIL), Namespace("weights", "float32", salt=str(number)))
    cache.check()
    assert len(nodes(cache)) <= 24
    assert cache.tree.namespaces <= 24 + 64
    assert length(cache, ints(HEAD.tolist(), 1), A) == len(HEAD)


def answered_quickly(cache: KVCache, tokens: Tokens, namespace: Namespace) -> None:
    answer = cache.admit(cache.match(tokens, namespace, public_tokens=len(HEAD)))
    assert isinstance(answer, Admitted)
    lease = answer.lease
    cache.extend(lease, len(tokens) - lease.num_computed_tokens)
    cache.commit(lease, lease.tokens[lease.num_computed_tokens :].copy())
    cache.release(lease, ReleaseReason.FINISHED)


def test_a_tenant_clears_its_own_tails_and_the_operator_clears_heads() -> None:
    cache = make_hybrid(*HYBRID)
    tokens = ints(HEAD.tolist(), TAIL)
    for namespace in (A, B):
        answered(cache, tokens, namespace)
    answered(cache, ints(range(200, 216)), A, head=0)
    assert cache.clear(A) > 0
    cache.check()
    assert not cache.knows(A)
    assert cache.knows(B)
    assert cache.match(tokens, A, public_tokens=len(HEAD)).found == len(HEAD)
    answered(cache, ints(range(200, 216)), A, head=0)
    running = admitted(cache, ints(HEAD.tolist(), OTHER), A)
    cache.clear(Scope(A).public)
    cache.check()
    assert not cache.knows(B), "tails go with the head that they need"
    prefill(cache, running)
    cache.release(running, ReleaseReason.FINISHED)
    cache.clear(Scope(A).public)
    cache.check()
    assert length(cache, ints(HEAD.tolist(), 1), A) == 0
    assert cache.knows(A), "a prompt without a head is no part of it"
    cache.clear()
    assert cache.pools.owned_bytes == 0
    assert cache.tree.namespaces == 0


def test_wrong_rows_of_a_head_take_the_tails_of_all_tenants_with_them() -> None:
    cache = make_cache()
    for namespace in (A, B):
        answered(cache, ints(HEAD.tolist(), TAIL), namespace)
    cache.forget(ints(HEAD.tolist(), TAIL), A, 12, public_tokens=len(HEAD))
    cache.check()
    assert [cache.knows(A), cache.knows(B)] == [False, True]
    cache.forget(ints(HEAD.tolist(), TAIL), A, 4, public_tokens=len(HEAD))
    cache.check()
    assert nodes(cache) == []


def test_a_discarded_lease_takes_back_its_part_of_the_head() -> None:
    cache = make_cache()
    lease = admitted(cache, ints(HEAD.tolist(), TAIL), A)
    prefill(cache, lease)
    cache.discard(lease)
    cache.check()
    assert nodes(cache) == []
    assert cache.pools.owned_bytes == 0


# ---- tiers


def stored(cache: KVCache) -> list[Store]:
    return list(cache.take_all_stores())


@pytest.mark.parametrize("families", [(FullAttention(1, 1),), HYBRID], ids=["full", "hybrid"])
def test_records_of_heads_are_public_and_those_of_tails_are_not(families: tuple[FullAttention, ...]) -> None:
    index = StoredIndex(families, 4)
    cache = KVCache(families, 10_000, 4, clock=clock(), stored=index)
    prompt = ints(HEAD.tolist(), TAIL)
    answered(cache, prompt, A)
    public = Scope(A).public.digest()
    for store in stored(cache):
        assert store.identity.namespace == (public if store.identity.end <= len(HEAD) else A.digest())
        index.add(store.identity)
    for tokens, namespace, head, position in (
        (prompt, B, len(HEAD), len(HEAD)),
        (ints(HEAD.tolist(), OTHER), B, len(HEAD), len(HEAD)),
        (ints(prompt.tolist(), 1), A, len(HEAD), len(prompt) - (not cache.resume_anywhere)),
        (prompt, B, 0, 0),
    ):
        hit = index.tier_hit(tokens, Scope(namespace, head), 0, 0, len(tokens) - 1)
        assert (0 if hit is None else hit.position) == position
    assert index.keys_beyond(A, 0) != index.keys_beyond(None, 0)
    index.clear_namespace(A)
    assert {identity.namespace for identity in index.some(100)} == {public}


def test_a_longer_head_on_disk_serves_a_shorter_one_up_to_its_end() -> None:
    index = StoredIndex([FullAttention(1, 1)], 4)
    cache = KVCache([FullAttention(1, 1)], 10_000, 4, clock=clock(), stored=index)
    longer = np.arange(16, dtype=np.int32)
    answered(cache, ints(longer.tolist(), 1, 2), A, head=16)
    for store in stored(cache):
        index.add(store.identity)
    hit = index.tier_hit(longer, Scope(B, 10), 0, 0, 15)
    assert hit is not None
    assert hit.position == 10, "behind its own head, the prompt is private"
