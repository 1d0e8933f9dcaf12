"""Windows, chunks and recurrent states: resume points, checkpoints, and the order of their eviction."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cache.helpers import (
    NAMESPACE,
    admit,
    checkpoints,
    clock,
    decode,
    hit,
    ints,
    make_hybrid,
    nodes,
    prefill,
    refused,
    run,
    state,
)
from rootstock.cache import FullAttention, KVCache
from rootstock.cache.eviction import MostValuableLast
from rootstock.cache.families import ChunkedAttention, Family, RecurrentState, SlidingWindow, row_bytes
from rootstock.cache.lease import Admitted, Deferred, ReleaseReason
from rootstock.cache.plan import StateCopy
from rootstock.cache.pools import Pools, Rows
from rootstock.cache.radix_node import FOOTHOLD, CheckpointKind
from rootstock.cache.resume_point import deepest_resumable
from rootstock.cache.types import NO_BLOCK

FULL = FullAttention(1, 1)
STATE = RecurrentState(1, 8)
WINDOW = SlidingWindow(1, 1, 8)
CHUNKED = ChunkedAttention(1, 1, 8)
KINDS: list[tuple[Family, ...]] = [
    (FULL, STATE),
    (FULL, WINDOW),
    (FULL, CHUNKED),
    (FULL, SlidingWindow(1, 1, 5), WINDOW, CHUNKED, STATE),
    (STATE,),
    (WINDOW,),
]


def kind(families: tuple[Family, ...]) -> str:
    return "+".join(family.name for family in families)


def table(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, np.int32)


@pytest.mark.behaviour(14)
def test_a_window_resumes_where_the_positions_just_before_are_there() -> None:
    # Blocks of 4, a window of 8: position p reads p-7 … p-1.
    assert deepest_resumable(WINDOW, table(1, 2, 3, 4), 16, 4) == 16
    assert deepest_resumable(WINDOW, table(NO_BLOCK, NO_BLOCK, 3, 4), 16, 4) == 16, "9 … 15"
    assert deepest_resumable(WINDOW, table(NO_BLOCK, 2, 3, 4), 14, 4) == 14, "7 … 13"
    assert deepest_resumable(WINDOW, table(NO_BLOCK, NO_BLOCK, 3, 4), 14, 4) == 0, "7 is gone"
    assert deepest_resumable(WINDOW, table(1, 2, NO_BLOCK, 4), 16, 4) == 8, "behind the gap"


@pytest.mark.behaviour(14)
def test_a_run_that_reaches_the_beginning_is_enough_for_a_window() -> None:
    assert deepest_resumable(WINDOW, table(1), 3, 4) == 3
    assert deepest_resumable(SlidingWindow(1, 1, 1000), table(1, 2, 3), 11, 4) == 11
    assert deepest_resumable(SlidingWindow(1, 1, 1000), table(NO_BLOCK, 2, 3), 11, 4) == 0


@pytest.mark.behaviour(14)
def test_a_chunk_resumes_from_its_start_on_and_needs_nothing_at_the_start() -> None:
    assert deepest_resumable(CHUNKED, table(NO_BLOCK, NO_BLOCK), 8, 4) == 8
    assert deepest_resumable(CHUNKED, table(NO_BLOCK, NO_BLOCK, 3, 4), 15, 4) == 15
    assert deepest_resumable(CHUNKED, table(NO_BLOCK, NO_BLOCK, 3, NO_BLOCK), 15, 4) == 12
    assert deepest_resumable(CHUNKED, table(1, 2, NO_BLOCK, 4), 15, 4) == 8


@pytest.mark.behaviour(14)
def test_the_match_is_the_largest_position_that_all_families_accept_in_any_order() -> None:
    """Compares with every position tried, with random gaps in the tables of three families."""
    random = np.random.default_rng(0)
    families: list[SlidingWindow | ChunkedAttention] = [
        SlidingWindow(1, 1, 5),
        SlidingWindow(1, 1, 11),
        CHUNKED,
    ]
    for _ in range(300):
        at_most = int(random.integers(1, 40))
        tables = [np.where(random.random(10) < 0.8, 1, NO_BLOCK).astype(np.int32) for _ in families]
        brute = max(
            p
            for p in range(at_most + 1)
            if all(
                (t[np.arange(f.first_visible(p), p) // 4] != NO_BLOCK).all()
                for f, t in zip(families, tables, strict=True)
            )
        )
        for order in itertools.permutations(range(3)):
            position, before = at_most, -1
            while position != before:
                before = position
                for i in order:
                    position = deepest_resumable(families[i], tables[i], position, 4)
            assert position == brute


@pytest.mark.behaviour(14)
def test_a_state_resumes_at_exactly_the_positions_of_its_checkpoints() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(30)), ints(range(100, 105)), boundaries={10: "system", 21: "user"})
    for asked, resumed in ((31, 29), (30, 29), (29, 21), (22, 21), (21, 10), (11, 10), (10, 0)):
        assert hit(cache, ints(range(asked))) == resumed
    assert hit(cache, ints(range(15), 99)) == 10, "and not where the K/V end"


@pytest.mark.behaviour(17)
def test_the_second_request_leaves_a_checkpoint_where_it_diverges_and_the_third_resumes_there() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(20), 100, 101))
    first = cache.match(ints(range(20), 200, 201), NAMESPACE)
    assert (first.found, first.length, first.capped_by) == (20, 0, "state")
    run(cache, ints(range(20), 200, 201))
    assert hit(cache, ints(range(20), 300, 301)) == 20


@pytest.mark.behaviour(3, 24)
@pytest.mark.parametrize("boundaries", [{}, {20: "user"}, {7: "system", 20: "user"}, {12: "system"}], ids=str)
@pytest.mark.parametrize("answer", [[], [50], [50, 51, 52], list(range(50, 70))], ids=len)
@pytest.mark.parametrize("families", KINDS, ids=kind)
def test_the_same_prompt_hits_all_but_its_last_token_from_the_second_time_on(
    families: tuple[Family, ...], answer: list[int], boundaries: dict[int, str]
) -> None:
    cache = make_hybrid(*families, blocks=200)
    for number in range(4):
        assert hit(cache, ints(range(20))) == (19 if number else 0)
        lease = run(cache, ints(range(20)), ints(answer), boundaries=boundaries)
        assert lease.hit_tokens == (19 if number else 0)
    assert {*boundaries, 19, 20 + len(answer)} >= set(checkpoints(cache))
    assert 20 not in checkpoints(cache), "it moved, and was not doubled"
    # A conversation goes on from its end, and from the prompt's where the answer is dropped.
    whole = [*range(20), *answer]
    assert hit(cache, ints(whole, 99)) >= (len(whole) if len(answer) >= 3 else 19)
    assert hit(cache, ints(range(20), 99)) >= 19


@pytest.mark.behaviour(17)
def test_a_prompt_that_extends_a_cached_one_a_little_leaves_no_second_checkpoint_beside_it() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(20)), ints(range(100, 110)))
    run(cache, ints(range(20), 60, 61), ints(range(200, 210)))
    assert sorted(checkpoints(cache)) == [19, 30, 32]
    assert hit(cache, ints(range(20), 60, 61)) == 19


@pytest.mark.behaviour(16)
def test_a_checkpoint_carries_its_position_and_the_digest_of_its_prefix() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(12)), boundaries={8: "user"})
    kept = checkpoints(cache)
    assert sorted(kept) == [8, 12]
    assert all(checkpoint.position == at for at, checkpoint in kept.items())
    assert len({checkpoint.digest for checkpoint in kept.values()}) == 2


@pytest.mark.behaviour(16)
def test_a_checkpoint_whose_prefix_is_another_is_refused_and_the_next_best_is_used() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(12)), boundaries={8: "user"})
    checkpoints(cache)[12].digest = b"of something else"
    lease, plan = admit(cache, ints(range(12), 50))
    assert lease.hit_tokens == 8, "a miss, never a wrong state"
    assert len(plan.states) == 1
    assert cache.stats().checkpoints_refused == 1


@pytest.mark.behaviour(18)
def test_a_checkpoint_survives_a_split_on_the_side_that_owns_its_position() -> None:
    cache = make_hybrid(FULL, WINDOW, STATE)
    run(cache, ints(range(20)), boundaries={6: "system", 13: "user"})
    before = {at: (c.digest, c.slot) for at, c in checkpoints(cache).items()}
    assert len(nodes(cache)) == 1
    run(cache, ints(range(10), 99))  # parts inside a block, between the two
    by_edge = {(n.start, n.end): sorted(n.checkpoints) for n in nodes(cache)}
    assert by_edge == {(0, 6): [6], (6, 10): [10], (10, 20): [13, 19], (10, 11): []}
    after = {at: (c.digest, c.slot) for at, c in checkpoints(cache).items()}
    assert before.items() <= after.items()
    assert hit(cache, ints(range(13), 99)) == 13
    assert hit(cache, ints(range(6), 99)) == 6


@pytest.mark.behaviour(19)
def test_evicting_kv_drops_the_checkpoints_behind_it() -> None:
    cache = make_hybrid(FULL, STATE, blocks=10)
    run(cache, ints(range(24)), boundaries={8: "user"})
    (leaf,) = nodes(cache)
    assert sorted(checkpoints(cache)) == [8, 23]
    cache.tree.queue.drop(leaf)
    cache.tree._trim(leaf, 1)  # up to the checkpoint inside the last block, which frees nothing
    assert (leaf.end, sorted(checkpoints(cache))) == (23, [8, 23])
    cache.tree.queue.drop(leaf)
    cache.pool.unhold(cache.tree._trim(leaf, 2))
    assert sorted(checkpoints(cache)) == [8]
    cache.check()
    assert hit(cache, ints(range(24), 9)) == 8


@pytest.mark.behaviour(19)
def test_evicting_a_checkpoint_keeps_the_kv_before_it() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(24)), boundaries={8: "user"})
    cache.tree.drop(checkpoints(cache)[23])
    cache.check()
    match = cache.match(ints(range(24), 9), NAMESPACE)
    assert (match.found, match.length) == (24, 8)
    assert cache.stats().cached_tokens == 24


@pytest.mark.behaviour(20)
def test_a_working_state_is_never_shared_and_a_checkpoint_is_never_written_to() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(17)))
    kept = checkpoints(cache)[16]
    leases = [admit(cache, ints(range(16), range(50 + 10 * i, 55 + 10 * i))) for i in range(3)]
    slots = [int(lease.slot) for lease, _ in leases]
    assert len({*slots, int(kept.slot)}) == 4
    for lease, plan in leases:
        assert plan.states == (StateCopy(kept.slot, lease.slot),)
        assert cache.extend(lease, 4) is None
        snapshot = cache.commit(lease, lease.tokens[16:20].copy())
        assert [copy.source for copy in snapshot.states] == [lease.slot]
        assert snapshot.states[0].target not in {*slots, int(kept.slot)}
    cache.check()


@pytest.mark.behaviour(20)
def test_a_checkpoint_stays_until_leases_that_resume_from_it_have_copied_it() -> None:
    cache = make_hybrid(FULL, STATE, blocks=12)
    run(cache, ints(range(9)))
    kept = checkpoints(cache)[8]
    lease, _ = admit(cache, ints(range(8), 50))
    assert kept.ref_count == 1
    run(cache, ints(range(100, 120)))  # wants all the room that there is
    assert kept.node is not None
    prefill(cache, lease)
    assert kept.ref_count == 0


@pytest.mark.behaviour(21)
def test_blocks_behind_the_window_are_released_while_the_sequence_runs() -> None:
    cache = make_hybrid(FULL, WINDOW, blocks=64)
    lease, _ = admit(cache, ints(range(8)))
    prefill(cache, lease)
    window = cache.pools.windows[0].pool
    at_prompt_end = int(window.total_blocks - window.free_blocks)
    decode(cache, lease, ints(range(100, 200)))
    assert len(lease.table) == 27
    # The checkpoint at the prompt's end keeps its 2 blocks, the running window at most 3.
    assert at_prompt_end == 2
    assert window.total_blocks - window.free_blocks <= 2 + 3
    assert (lease.tables[1][2:24] == NO_BLOCK).all()
    cache.release(lease, ReleaseReason.FINISHED)
    cache.check()


@pytest.mark.behaviour(21)
def test_window_blocks_of_a_checkpoint_stay_when_the_sequence_has_moved_on() -> None:
    cache = make_hybrid(FULL, WINDOW)
    run(cache, ints(range(40)), ints(range(100, 140)), boundaries={14: "system"})
    lease, plan = admit(cache, ints(range(14), 99, 98))
    assert lease.hit_tokens == 14
    assert [(copy.family, copy.tokens) for copy in plan.copies] == [(0, 2), (1, 2)], "the last block of both"
    assert (lease.tables[1][1:3] != NO_BLOCK).all()


@pytest.mark.behaviour(25)
def test_a_window_that_still_has_its_blocks_resumes_at_the_exact_token_of_divergence() -> None:
    cache = make_hybrid(FULL, SlidingWindow(1, 1, 64))
    run(cache, ints(range(30)))
    for parts_at in (29, 17, 8, 3):
        assert hit(cache, ints(range(parts_at), 99)) == parts_at
    only = make_hybrid(SlidingWindow(1, 1, 64))  # no full attention at all
    run(only, ints(range(30)))
    assert hit(only, ints(range(17), 99)) == 17


def test_chunked_attention_resumes_at_the_start_of_a_chunk_without_a_checkpoint() -> None:
    cache = make_hybrid(FULL, CHUNKED)
    run(cache, ints(range(40)))
    assert hit(cache, ints(range(19), 99)) == 16, "a multiple of 8, with no checkpoint there"


@pytest.mark.behaviour(15)
@pytest.mark.parametrize(
    "families", [(FULL, STATE), (FULL, WINDOW), (WINDOW, STATE), (FULL, WINDOW, CHUNKED, STATE)]
)
def test_after_any_evictions_every_family_can_resume_where_the_match_says(
    families: tuple[Family, ...],
) -> None:
    """`check` recounts owners. Here each hit is admitted; the rows that it reads must not be released."""
    random = np.random.default_rng(1)
    cache = make_hybrid(*families, blocks=24)
    for _ in range(300):
        prompt = ints(
            range(int(random.integers(1, 30))), *random.integers(0, 3, int(random.integers(1, 12))).tolist()
        )
        lease, _ = admit(cache, prompt, boundaries={int(random.integers(1, len(prompt) + 1)): "user"})
        for window, table in zip(cache.pools.windows, lease.windows, strict=True):
            needed = np.arange(window.family.first_visible(lease.hit_tokens), lease.hit_tokens)
            assert (table.ids[needed // cache.block_size] != NO_BLOCK).all()
        if cache.pools.states is not None and lease.hit_tokens:
            assert lease.resumed_from is not None
            assert lease.resumed_from.position == lease.hit_tokens
        prefill(cache, lease)
        cache.release(lease, ReleaseReason.FINISHED)
    assert cache.stats().checkpoints_evicted > 20
    assert cache.stats().hit_tokens > 300


@pytest.mark.behaviour(26)
def test_checkpoints_of_user_turns_outlive_checkpoints_of_tool_turns_of_the_same_age() -> None:
    cache = make_hybrid(FULL, STATE, blocks=16)
    run(cache, ints(range(40)), boundaries={10: "tool", 20: "user", 30: "tool"})
    assert sorted(checkpoints(cache)) == [10, 20, 30, 39]
    victims = []
    while cache.tree.checkpoints.peek() is not None:
        chosen = cache.tree.checkpoints.pop()
        victims.append(chosen.position)
        cache.tree.drop(chosen)
    assert victims.index(20) > max(victims.index(10), victims.index(30))


def test_reasoning_behind_a_user_turn_is_evicted_first_once_it_is_dropped() -> None:
    cache = make_hybrid(FULL, STATE, blocks=10)
    run(cache, ints(range(20)), ints(range(100, 116)), boundaries={18: "user"})  # reasoning and a tool's call
    run(cache, ints(range(200, 220)))  # another conversation, idle for as long
    run(cache, ints(range(18), 300, 301), ints(range(310, 318)))  # the next turn: the reasoning is gone
    run(cache, ints(range(400, 424)))
    assert hit(cache, ints(range(20), range(100, 116), 9)) == 18
    assert hit(cache, ints(range(200, 220), 9)) == 19
    assert hit(cache, ints(range(18), 300, 301, range(310, 318), 9)) == 28


def test_another_conversation_does_not_make_the_first_one_worthless() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(20), 1), ints(range(100, 110)), boundaries={20: "system"})
    run(cache, ints(range(20), 2), ints(range(200, 210)), boundaries={20: "system"})
    assert not any(node.passed_by for node in nodes(cache))


def test_blocks_behind_the_last_checkpoint_are_evicted_before_resumable_ones() -> None:
    cache = make_hybrid(FULL, STATE, blocks=20)
    run(cache, ints(range(40)), boundaries={16: "user"})
    run(cache, ints(range(100, 116)))
    cache.tree.drop(checkpoints(cache)[39])  # 16 … 39 are of no use without it
    cache.check()
    run(cache, ints(range(200, 224)))
    assert hit(cache, ints(range(16), 9)) == 16
    assert hit(cache, ints(range(100, 116), 9)) == 15


def test_a_checkpoint_inside_a_block_survives_the_eviction_of_the_blocks_behind_it() -> None:
    cache = make_hybrid(FULL, STATE, blocks=20)
    run(cache, ints(range(40)), boundaries={14: "system"})  # in the middle of its last block
    run(cache, ints(range(100, 116)))
    cache.tree.drop(checkpoints(cache)[39])
    behind = 6
    cache.tree.make_room(Rows(cache.pools.free_bytes // 4 + behind + 1))
    cache.check()
    assert hit(cache, ints(range(14), 9)) == 14
    assert hit(cache, ints(range(100, 116), 9)) == 0, "which is worth less"


def test_a_checkpoint_that_is_passed_later_is_ranked_anew() -> None:
    """Also where it was queued before the deeper one was left, or the shallower one."""
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(40)), ints(range(100, 108)))
    run(cache, ints(range(40), range(100, 107), range(50, 90)), ints(range(200, 208)))
    order = cache.tree.checkpoints
    for checkpoint in checkpoints(cache).values():
        (queued,) = (entry for entry in order._heap if entry[6] == checkpoint.queue_ticket)
        assert queued[:6] <= order.rank(checkpoint), checkpoint
    spent = {at: checkpoint.is_spent for at, checkpoint in checkpoints(cache).items()}
    assert spent == {39: True, 47: False, 48: False, 86: True, 95: False}


def test_passed_checkpoints_are_evicted_before_the_one_at_the_end() -> None:
    cache = make_hybrid(FULL, STATE)
    history = list(range(30))
    for step in range(4):  # a tool is called and answers
        lease = run(cache, ints(history), ints(range(1000 + 50 * step, 1010 + 50 * step)))
        history = [*lease.tokens.tolist(), *range(2000 + 50 * step, 2020 + 50 * step)]
    kept = checkpoints(cache)
    order = []
    while cache.tree.checkpoints.peek() is not None:
        chosen = cache.tree.checkpoints.pop()
        order.append(chosen.position)
        cache.tree.drop(chosen)
    assert order[-1] == max(kept)


def test_a_passed_checkpoint_stays_as_a_foothold_if_it_saves_much() -> None:
    """Of a long conversation that is evicted in part, the rest can be resumed. Dense checkpoints go first."""
    cache = make_hybrid(FULL, STATE, blocks=600)
    history = ints(range(8))
    for step in range(30):
        lease = run(cache, ints(history, range(1000 + 20 * step, 1020 + 20 * step)))
        history = lease.tokens
    at = checkpoints(cache)
    footholds = [position for position in sorted(at) if not at[position].is_spent]
    assert footholds[-1] == len(history) - 1, "the end"
    while any(checkpoint.is_spent for checkpoint in checkpoints(cache).values()):
        assert cache.tree.checkpoints.peek() is not None
        chosen = cache.tree.checkpoints.pop()
        assert chosen.is_spent, "spent ones go first"
        cache.tree.drop(chosen)
    left = sorted(checkpoints(cache))
    cost = max(checkpoint.cost_tokens for checkpoint in checkpoints(cache).values())
    assert len(left) > 1
    assert all(b - a >= FOOTHOLD * cost for a, b in zip([0, *left[:-1]], left[:-1], strict=False))
    cache.check()


def test_a_foothold_behind_a_new_checkpoint_is_ranked_anew() -> None:
    """Also where nodes without checkpoints lie between."""
    cache = make_hybrid(FULL, STATE, blocks=600)
    run(cache, ints(range(200)))
    run(cache, ints(range(260)))
    run(cache, ints(range(170), range(1000, 1020)))
    cache.tree.drop(checkpoints(cache)[170])
    foothold = next(each for each in checkpoints(cache).values() if each.position == 199)
    assert not foothold.is_spent
    cache.tree.checkpoints.peek()  # queues it again, at its higher rank
    run(cache, ints(range(150), range(2000, 2020)))
    assert foothold.is_spent
    cache.check()


def test_a_resumption_does_not_refresh_the_states_before_it() -> None:
    cache = make_hybrid(FULL, STATE, blocks=60)
    clock = [100.0]
    cache.tree._clock = cache._checkpoints._clock = lambda: clock[0]  # type: ignore[method-assign]
    run(cache, ints(range(20)), boundaries={8: "tool", 14: "user"})
    clock[0] = 200.0
    run(cache, ints(range(30)), boundaries={8: "tool", 14: "user"})
    used = {position: checkpoint.used_at for position, checkpoint in checkpoints(cache).items()}
    assert used[8] == 100.0
    assert used[14] == 200.0, "a boundary, where the next turn may leave the conversation"
    assert used[19] == used[29] == 200.0


def test_the_policy_learns_idle_times() -> None:
    policy = MostValuableLast(patience_s=60.0)
    assert not policy.observe_reuse(60.0)
    renewed = [policy.observe_reuse(5.0) for _ in range(60)]
    assert any(renewed)
    assert policy.patience_s < 10
    policy.observe_reuse(1e9)
    assert policy.patience_s < 100, "one that comes back after years does not count for all others"
    of_years = MostValuableLast(patience_s=60.0)
    for _ in range(100):
        of_years.observe_reuse(1e9)
    assert of_years.patience_s == 3600


@pytest.mark.behaviour(31)
def test_states_and_blocks_share_one_budget() -> None:
    cache = make_hybrid(FULL, RecurrentState(1, 64), blocks=8, block_size=4)
    run(cache, ints(range(40)), boundaries=dict.fromkeys(range(4, 40, 4), "user"))
    stats = cache.stats()
    assert stats.used_bytes <= stats.budget_bytes
    assert stats.checkpoints_taken > 5
    assert stats.checkpoints_evicted + stats.checkpoints_skipped > 0
    long = cache.capacity_tokens
    run(cache, ints(range(1000, 1000 + long)))  # a prompt of all that there is
    assert cache.stats().used_bytes <= stats.budget_bytes
    cache.check()


@pytest.mark.behaviour(36)
def test_capacity_is_that_of_one_request_with_its_state_and_its_window() -> None:
    cache = make_hybrid(FULL, WINDOW, STATE, blocks=32)
    cache_bytes = cache.pools.budget_bytes
    tokens = cache.capacity_tokens
    blocks = tokens // 4
    assert blocks * 4 + 4 * 4 + 8 <= cache_bytes < (blocks + 1) * 4 + 4 * 4 + 8 + 4
    lease, _ = admit(cache, ints(range(tokens)))
    while lease.num_computed_tokens < tokens:
        prefill(cache, lease, min(tokens, lease.num_computed_tokens + 4))


@pytest.mark.behaviour(36)
def test_capacity_is_that_of_the_smallest_pool_if_rows_are_divided_beforehand() -> None:
    families = (FULL, SlidingWindow(1, 1, 40), STATE)
    rows = [20, 5, 3]
    cache = KVCache(families, 20 * 4 + 5 * 4 + 3 * 8, 4, rows=rows, clock=clock())
    tokens = cache.capacity_tokens
    assert tokens == 5 * 4
    run(cache, ints(range(tokens)))


@pytest.mark.behaviour(8)
def test_a_rejected_admission_changes_nothing_in_any_pool() -> None:
    cache = make_hybrid(FULL, WINDOW, STATE, blocks=8)
    run(cache, ints(range(12)), boundaries={8: "user"})
    lease, _ = admit(cache, ints(range(100, 124)))
    prefill(cache, lease)
    before = state(cache)
    refused(cache, ints(range(8), range(200, 260)))
    assert state(cache) == before


def test_of_two_positions_near_each_other_the_first_has_the_checkpoint_of_both() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(40)), ints(range(100, 104)), boundaries={2: "system", 37: "tool", 38: "user"})
    assert sorted(checkpoints(cache)) == [37, 44]
    assert checkpoints(cache)[37].kind is CheckpointKind.USER, "the likelier one"
    run(cache, ints(range(500, 540)), ints(range(100, 104)), boundaries={35: "user"})
    assert 39 in checkpoints(cache), "there is no other near it"
    assert checkpoints(cache)[39].kind is CheckpointKind.PROMPT


def test_a_lease_keeps_the_rows_that_its_first_plan_reads() -> None:
    """Detaching it would free the block that its plan copies from."""
    cache = make_hybrid(FULL, WINDOW, blocks=12)
    run(cache, ints(range(22)))
    lease, plan = admit(cache, ints(range(22), *range(100, 104)))
    assert any(copy.family == 0 for copy in plan.copies)
    source = next(int(copy.source) for copy in plan.copies if copy.family == 0)
    other, _ = admit(cache, ints(range(200, 212)))
    prefill(cache, other)
    while not isinstance(cache.extend(other, 8), Deferred):
        decode(cache, other, ints(range(8)))
    cache.extend(lease, 60)
    assert cache.pool.refcount(source) > 0
    assert lease.node is not None


def test_a_failed_forward_leaves_no_state_behind() -> None:
    cache = make_hybrid(FULL, STATE)
    lease, _ = admit(cache, ints(range(20)), boundaries={8: "user"})
    prefill(cache, lease, 14)
    cache.release(lease, ReleaseReason.FAILED)
    cache.check()
    match = cache.match(ints(range(20)), NAMESPACE)
    assert (match.found, match.length) == (14, 8)


def test_discarding_a_lease_drops_its_checkpoints() -> None:
    cache = make_hybrid(FULL, WINDOW, STATE)
    lease, _ = admit(cache, ints(range(20)), boundaries={8: "user"})
    prefill(cache, lease, 14)
    cache.discard(lease)
    cache.check()
    assert checkpoints(cache) == {}
    assert cache.pools.owned_bytes == 0
    assert cache.tree.roots == {}, "an empty namespace is forgotten"


@pytest.mark.parametrize("families", [(FULL,), (FULL, WINDOW, STATE)])
def test_discarding_a_detached_lease_removes_its_tokens(families: tuple[Family, ...]) -> None:
    cache = make_hybrid(*families)
    run(cache, ints(range(20)))
    lease, _ = admit(cache, ints(range(20), range(100, 120)))
    prefill(cache, lease)
    cache.tree.detach(lease)
    cache.discard(lease)
    cache.check()
    kept = lease.hit_tokens
    assert kept >= 19
    assert cache.match(ints(range(20), range(100, 120), 9), NAMESPACE).found == kept
    assert hit(cache, ints(range(20), 9)) == kept, "what was there before stays"


def test_a_model_that_resumes_anywhere_leaves_no_checkpoints() -> None:
    cache = make_hybrid(FULL)
    lease = run(cache, ints(range(20)), boundaries={8: "user"})
    assert lease.checkpoint_positions == {}
    assert cache.stats().checkpoints_taken == 0


def test_explain_says_which_family_stopped_a_prompt_and_why() -> None:
    cache = make_hybrid(FULL, STATE)
    run(cache, ints(range(40)), boundaries={30: "user"})
    found = cache.explain(ints(range(36), 99), NAMESPACE)
    assert (found.cap, found.capped_by, found.found_tokens, found.matched_tokens) == (
        "no_checkpoint",
        "state",
        36,
        30,
    )
    assert found.message == (
        "KV to 36, state only to 30: 6 tokens recomputed because no checkpoint was left at the divergence point."
    )


def test_a_lease_is_detached_for_one_token_and_not_for_a_longer_chunk() -> None:
    """A detached lease could leave no more checkpoints."""
    cache = make_hybrid(FULL, WINDOW, blocks=30)
    run(cache, ints(range(10)), boundaries={10: "system"})
    lease, _ = admit(cache, ints(range(10), range(100, 140)))
    other, _ = admit(cache, ints(range(10), range(200, 203)))
    prefill(cache, lease, 20)
    cache.release(other, ReleaseReason.FINISHED)
    cache.clear()
    assert lease.replaced, "the end of the prefix that it copied from"
    cache.extend(lease, 0)  # releases the blocks behind the window
    taken = cache.pool.allocate((cache.pools.available_bytes - 4) // 4)  # all but one row
    assert isinstance(cache.extend(lease, 8), Deferred)
    assert lease.node is not None
    assert not isinstance(cache.extend(lease, 1), Deferred)
    assert lease.node is not None, "it fits without detaching"
    cache.pool.unuse(taken)
    cache.check()


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_lease_is_detached_for_its_shortest_chunk(tokens: int) -> None:
    """Rows of an image that see each other are one chunk."""
    cache = make_hybrid(FULL, WINDOW, blocks=30)
    run(cache, ints(range(3), range(100, 113)))
    lease, _ = admit(cache, ints(range(3), range(200, 240)))
    prefill(cache, lease, 8)
    cache.clear()
    assert lease.replaced, "the block of the first three tokens, which the other prompt has computed"
    cache.extend(lease, 0)  # releases the blocks behind the window
    row = row_bytes(FULL, cache.block_size)
    needed = row_bytes(WINDOW, cache.block_size) * -(-tokens // cache.block_size)
    # All but what it needs, and one row of that, which the replaced block has.
    taken = cache.pool.allocate((cache.pools.available_bytes - needed) // row + 1)
    if tokens > 1:
        assert isinstance(cache.extend(lease, tokens), Deferred)
        assert lease.node is not None
    assert not isinstance(cache.extend(lease, tokens, is_least=True), Deferred)
    assert lease.node is None
    cache.pool.unuse(taken)
    cache.check()


def test_a_match_is_void_when_a_detached_lease_ends() -> None:
    cache = make_hybrid(FULL, WINDOW)
    lease, _ = admit(cache, ints(range(40)))
    prefill(cache, lease)
    for checkpoint in checkpoints(cache).values():
        cache.tree.drop(checkpoint)
    cache.tree.detach(lease)
    prompt = ints(range(38), 99)
    match = cache.match(prompt, NAMESPACE)
    assert match.length == 38, "by blocks that only the running request owns"
    cache.release(lease, ReleaseReason.FINISHED)
    answer = cache.admit(match)
    assert isinstance(answer, Admitted)
    assert answer.lease.hit_tokens == 0
    cache.check()


def test_a_weak_reference_is_void_once_its_block_was_freed() -> None:
    pool = Pools([FULL, WINDOW], 256, 4).windows[0].pool
    first = pool.allocate(3)
    references = pool.weak_references(first)
    assert pool.resolve(references).tolist() == first.tolist()
    pool.unuse(first[:2])
    again = pool.allocate(2)
    assert set(again.tolist()) == set(first[:2].tolist())
    assert pool.resolve(references).tolist() == [NO_BLOCK, NO_BLOCK, int(first[2])]
    assert pool.resolve(np.array([-1], np.int64)).tolist() == [NO_BLOCK]


def test_a_prompts_last_checkpoint_is_dropped_when_the_next_turn_resumes_from_the_answer() -> None:
    cache = make_hybrid(FULL, STATE)
    lease = run(cache, ints(range(40)), ints(range(100, 110)), boundaries={40: "tool"})
    assert sorted(checkpoints(cache)) == [39, 50]
    run(cache, ints(range(36), 999))  # another conversation: nothing is known of this one
    assert {39, 50} <= set(checkpoints(cache))
    run(cache, ints(lease.tokens.tolist(), range(200, 220)))
    assert 39 not in checkpoints(cache)
    assert 50 in checkpoints(cache)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_an_awaited_checkpoint_evicts_entries_of_higher_rank(is_awaited: bool) -> None:
    cache = make_hybrid(FULL, RecurrentState(1, 40), blocks=3, block_size=4)
    run(cache, ints(range(40)), boundaries={40: "system"})  # worth a lot
    (valuable,) = checkpoints(cache).values()
    lease, _ = admit(cache, ints(range(100, 112)), boundaries={4: "tool"})
    if is_awaited:
        cache.request_checkpoint(lease, 4)
    assert cache.pools.free_bytes < 40
    prefill(cache, lease, 4)
    assert (4 in checkpoints(cache)) == is_awaited
    assert (valuable.node is None) == is_awaited


def test_the_answer_of_a_repeated_prompt_is_not_passed_by() -> None:
    """The repetition resumes at the user turn, below which its conversation could have gone on elsewhere."""
    cache = make_hybrid(FULL, STATE)
    for _ in range(2):
        run(cache, ints(range(40)), ints(range(100, 110)), boundaries={39: "user"})
    assert not any(node.passed_by for node in nodes(cache))
    run(cache, ints(range(40)), ints(range(200, 210)), boundaries={39: "user"})
    assert sorted(node.passed_by for node in nodes(cache) if node.end == 50) == [False, True], (
        "the first answer is"
    )
