"""Models with windows and recurrent states through the whole engine: sharing, agents, preemption, faults."""

from __future__ import annotations

import numpy as np
import pytest

from engine.helpers import Bench, Families, MlxKind, of_kinds
from rootstock.cache.families import RecurrentState
from rootstock.cache.plan import Plan, RowsReturned
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.runtime.base import Batch
from rootstock.testing.fake_runtime import FULL, STATE, chunked, window

HYBRIDS: list[Families] = [
    (FULL, STATE),
    (FULL, window(7)),
    (FULL, window(7), chunked(8), STATE),
    (window(16),),
    (STATE,),
]
ON_MLX: list[MlxKind] = ["gemma3_text", "qwen3_next", "gear", "mamba", "llama4"]
hybrids = of_kinds([*HYBRIDS, *ON_MLX])
SYSTEM = list(range(60))


def boundaries(**at: int) -> tuple[Boundary, ...]:
    return tuple(Boundary(position, CheckpointKind(kind)) for kind, position in at.items())


@hybrids
@pytest.mark.behaviour(23, 48)
def test_an_answer_does_not_depend_on_chunks_batch_mates_or_the_cache(families: Families | MlxKind) -> None:
    prompts = [[*SYSTEM[:n], n, n] for n in (5, 23, 40, 60)]
    for chunk_tokens in (1, 7, 64):
        bench = Bench(blocks=400, families=families, chunk_tokens=chunk_tokens)
        for _ in range(3):  # cold, warm, warmer
            clients = [bench.ask(prompt, max_tokens=6, boundaries=boundaries(user=4)) for prompt in prompts]
            bench.run()
            bench.expect(*clients)
        assert bench.cache.stats().checkpoints_hit > 0


@hybrids
@pytest.mark.behaviour(11)
def test_three_at_once_with_one_system_prompt_compute_it_once(families: Families | MlxKind) -> None:
    bench = Bench(blocks=400, families=families, chunk_tokens=512)  # the whole prompt would fit one chunk
    clients = [bench.ask([*SYSTEM, 70 + i, 80 + i]) for i in range(3)]
    bench.run()
    assert [client.cached_tokens for client in clients] == [0, 60, 60]
    bench.expect(*clients)


@hybrids
@pytest.mark.behaviour(24)
def test_a_checkpoint_is_left_wherever_the_next_turn_can_diverge(families: Families | MlxKind) -> None:
    """After system and tools, the last user turn, the prompt and the answer."""
    bench = Bench(blocks=400, families=families)
    prompt = [*SYSTEM, *range(70, 90)]
    client = bench.answer(prompt, max_tokens=5, boundaries=boundaries(system=30, user=45))
    whole = [*prompt, *client.tokens]
    # The prompt's own is where the same prompt resumes: its last token is always computed.
    for position in (30, 45, len(prompt) - 1, len(whole) - 1):
        tokens = np.array([*whole[:position], 96], np.int32)
        assert bench.cache.match(tokens, bench.engine.namespace()).length == position


@hybrids
@pytest.mark.behaviour(25)
def test_a_turn_that_drops_the_reasoning_resumes_at_the_last_user_message(
    families: Families | MlxKind,
) -> None:
    bench = Bench(blocks=400, families=families)
    user = [*SYSTEM, 61, 62, 63]
    prompt = [*user, 90, 91]  # the assistant's header
    first = bench.answer(prompt, max_tokens=20, boundaries=boundaries(system=60, user=len(user)))
    answer = first.tokens[12:]  # the first twelve were reasoning
    second = bench.answer([*user, 90, *answer, 64, 65], max_tokens=3)
    assert second.cached_tokens >= len(user)
    bench.expect(second)


@pytest.mark.behaviour(25)
def test_full_attention_resumes_at_the_exact_token_where_the_reasoning_was_dropped() -> None:
    bench = Bench(blocks=400)
    first = bench.answer([*SYSTEM, 90, 91], max_tokens=20)
    second = bench.answer([*SYSTEM, 90, 95, *first.tokens[12:], 64])
    assert second.cached_tokens == 61


@hybrids
@pytest.mark.behaviour(17)
def test_a_third_request_resumes_where_two_have_diverged(families: Families | MlxKind) -> None:
    bench = Bench(blocks=400, families=families)
    cached = []
    for i in range(3):
        client = bench.answer([*SYSTEM, 70 + i, 80 + i, *range(10)])
        cached.append(client.cached_tokens)
    assert cached[2] == 60


@hybrids
@pytest.mark.behaviour(35)
def test_a_preempted_request_comes_back_from_the_state_it_left(families: Families | MlxKind) -> None:
    # With these numbers of blocks the requests begin, and do not all fit to their ends.
    block_size, blocks = {"qwen3_next": (4, 7), "llama4": (2, 22)}.get(str(families), (4, 9))
    bench = Bench(blocks=blocks, block_size=block_size, families=families, max_batch=4)
    clients = [bench.ask(list(range(start, start + 9)), max_tokens=24) for start in (0, 20, 40)]
    bench.run()
    bench.expect(*clients)
    grows = any(not isinstance(family, RecurrentState) for family in bench.runtime.description.families)
    assert (bench.cache.stats().preemptions > 0) == grows
    assert all(family.live_rows == 0 for family in bench.cache.stats().families)


@pytest.mark.behaviour(47)
def test_a_forward_that_raises_leaves_no_half_advanced_state() -> None:
    failing: list[int] = []

    def fault(batch: Batch) -> None:
        if len(bench.batches) in failing:
            for segment in batch.segments:  # half of the layers had advanced
                bench.runtime._states[segment.state] += 1
            raise RuntimeError("injected")

    bench = Bench(blocks=400, families=(FULL, STATE), chunk_tokens=16, fault=fault)
    failing.append(3)
    broken = bench.answer(SYSTEM)
    assert broken.error
    failing.clear()
    again = bench.answer(SYSTEM)
    bench.expect(again)


@of_kinds([(FULL,), *HYBRIDS, "llama", *ON_MLX])
def test_a_conversation_hits_all_its_computed_tokens(families: Families | MlxKind) -> None:
    bench = Bench(blocks=800, families=families)
    history = list(SYSTEM)
    for turn in range(5):
        client = bench.answer(history, max_tokens=7)
        if turn:
            # The last token of an answer is sampled and never computed.
            assert client.cached_tokens == len(history) - 3
        history += [*client.tokens, turn, turn + 1]


def test_no_request_waits_for_a_state_that_its_producer_has_left_behind() -> None:
    bench = Bench(blocks=400, families=(FULL, STATE), chunk_tokens=16)
    bench.ask([*SYSTEM, *range(60, 90)], max_tokens=40)
    bench.run(steps=3)  # 48 of its tokens are computed
    late = bench.ask([*SYSTEM[:40], 91, 92, 93, 94, 95], max_tokens=2)
    bench.run(steps=11)
    bench.expect(late)  # while the other still runs
    bench.run()


@hybrids
@pytest.mark.behaviour(11)
def test_requests_at_once_compute_a_cached_prefix_without_a_checkpoint_once(
    families: Families | MlxKind,
) -> None:
    bench = Bench(blocks=400, families=families, chunk_tokens=512)
    bench.answer(SYSTEM, max_tokens=1)
    for node in bench.cache.tree.nodes():
        for checkpoint in list(node.checkpoints.values()):
            bench.cache.tree.drop(checkpoint)
    clients = [bench.ask([*SYSTEM, 70, 80 + i]) for i in range(4)]
    bench.run()
    # The first may resume from remaining window blocks. The others resume from the first one's checkpoint.
    assert [client.cached_tokens for client in clients][1:] == [61, 61, 61]


def test_no_request_waits_for_one_that_publishes_no_more() -> None:
    bench = Bench(blocks=400, families=(FULL, window(7), STATE), chunk_tokens=16)
    bench.ask([*SYSTEM, *range(60, 90)], max_tokens=40)
    bench.run(steps=1)
    late = bench.ask([*SYSTEM, 91, 92], max_tokens=2)
    bench.run(steps=1)
    (lease,) = bench.cache._leases.values()
    bench.cache.tree.detach(lease)  # eviction does this if blocks are short
    bench.run(steps=10)
    bench.expect(late)  # while the other still runs
    bench.run()


def test_returned_rows_never_include_a_state_that_is_yet_to_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that ends in the step that snapshots its state frees it before the snapshot is taken."""
    bench = Bench(blocks=400, families=(FULL, STATE))
    states = bench.cache.pools.states

    def everything_free() -> Plan:
        held, used = states.pool.owners()
        free = np.flatnonzero((held == 0) & (used == 0)).astype(np.int32)
        return Plan(returned=(RowsReturned(states.index, free),))

    monkeypatch.setattr(bench.cache, "take_pending_plan", everything_free)
    bench.answer(SYSTEM, max_tokens=1)
    again = bench.answer([*SYSTEM, 70])
    assert again.cached_tokens == 59
    bench.expect(again)


@hybrids
def test_clearing_the_cache_tells_the_bytes_of_all_families(families: Families | MlxKind) -> None:
    bench = Bench(families=families)
    bench.answer(SYSTEM)
    used = bench.cache.stats().used_bytes
    assert bench.engine.clear_cache().bytes == used > 0


@of_kinds([(FULL,), *HYBRIDS, "llama", *ON_MLX])
def test_a_waiter_whose_producer_fails_computes_for_itself(families: Families | MlxKind) -> None:
    def fault(batch: Batch) -> None:
        if len(bench.batches) == 2:
            raise RuntimeError("injected")

    bench = Bench(families=families, chunk_tokens=16, fault=fault)
    bench.ask([*SYSTEM, 1])
    waiter = bench.answer([*SYSTEM, 2])
    bench.expect(waiter)
