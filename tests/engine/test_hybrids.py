"""Models with windows and recurrent states through the whole engine: sharing, agents, preemption, faults."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.helpers import Bench, Client
from rootstock.cache.families import Family
from rootstock.cache.plan import Plan, RowsReturned
from rootstock.cache.radix_node import Boundary, CheckpointKind
from rootstock.engine.request import Failed
from rootstock.runtime.base import Batch
from rootstock.testing.fake_runtime import FULL, STATE, chunked, window

HYBRIDS: list[tuple[Family, ...]] = [
    (FULL, STATE),
    (FULL, window(7)),
    (FULL, window(7), chunked(8), STATE),
    (window(16),),
    (STATE,),
]
hybrids = pytest.mark.parametrize("families", HYBRIDS, ids=lambda fs: "+".join(f.name for f in fs))
SYSTEM = list(range(60))


def boundaries(**at: int) -> tuple[Boundary, ...]:
    return tuple(Boundary(position, CheckpointKind(kind)) for kind, position in at.items())


@hybrids
@pytest.mark.behaviour(23, 48)
def test_an_answer_does_not_depend_on_chunks_batch_mates_or_what_is_cached(
    families: tuple[Family, ...],
) -> None:
    prompts = [[*SYSTEM[:n], n, n] for n in (5, 23, 40, 60)]
    for chunk_tokens in (1, 7, 64):
        bench = Bench(blocks=400, families=families, chunk_tokens=chunk_tokens)
        for _ in range(3):  # cold, warm, warmer
            clients = [bench.ask(prompt, max_tokens=6, boundaries=boundaries(user=4)) for prompt in prompts]
            bench.run()
            for prompt, client in zip(prompts, clients, strict=True):
                assert client.tokens == bench.alone(prompt, 6)
        assert bench.cache.stats().checkpoints_hit > 0


@hybrids
@pytest.mark.behaviour(11)
def test_three_at_once_with_one_system_prompt_compute_it_once(families: tuple[Family, ...]) -> None:
    bench = Bench(blocks=400, families=families, chunk_tokens=512)  # the whole prompt would fit one chunk
    clients = [bench.ask([*SYSTEM, 70 + i, 80 + i]) for i in range(3)]
    bench.run()
    assert [client.finished.usage.cached_tokens for client in clients] == [0, 60, 60]
    for i, client in enumerate(clients):
        assert client.tokens == bench.alone([*SYSTEM, 70 + i, 80 + i], 4)


@hybrids
@pytest.mark.behaviour(24)
def test_a_checkpoint_is_left_at_each_place_where_the_next_turn_can_diverge(
    families: tuple[Family, ...],
) -> None:
    """System and tools, the last user turn before its reasoning, the prompt, the answer: on first sight."""
    bench = Bench(blocks=400, families=families)
    prompt = [*SYSTEM, *range(70, 90)]
    client = bench.ask(prompt, max_tokens=5, boundaries=boundaries(system=30, user=45))
    bench.run()
    whole = [*prompt, *client.tokens]
    for position in (30, 45, len(prompt), len(whole) - 1):
        assert bench.engine._cache.match(ints(whole[:position], 96), namespace(bench)).length == position


@hybrids
@pytest.mark.behaviour(25)
def test_a_turn_that_drops_the_reasoning_resumes_at_the_last_user_message(
    families: tuple[Family, ...],
) -> None:
    bench = Bench(blocks=400, families=families)
    user = [*SYSTEM, 61, 62, 63]
    prompt = [*user, 90, 91]  # the assistant's header
    first = bench.ask(prompt, max_tokens=20, boundaries=boundaries(system=60, user=len(user)))
    bench.run()
    answer = first.tokens[12:]  # the first twelve were reasoning
    second = bench.ask([*user, 90, *answer, 64, 65], max_tokens=3)
    bench.run()
    assert second.finished.usage.cached_tokens >= len(user)
    assert second.tokens == bench.alone([*user, 90, *answer, 64, 65], 3)


@pytest.mark.behaviour(25)
def test_full_attention_resumes_at_the_exact_token_where_the_reasoning_was_dropped() -> None:
    bench = Bench(blocks=400)
    first = bench.ask([*SYSTEM, 90, 91], max_tokens=20)
    bench.run()
    second = bench.ask([*SYSTEM, 90, 95, *first.tokens[12:], 64])
    bench.run()
    assert second.finished.usage.cached_tokens == 61


@hybrids
@pytest.mark.behaviour(17)
def test_where_two_requests_were_seen_to_part_the_third_resumes(families: tuple[Family, ...]) -> None:
    bench = Bench(blocks=400, families=families)
    cached = []
    for i in range(3):
        client = bench.ask([*SYSTEM, 70 + i, 80 + i, *range(10)])
        bench.run()
        cached.append(client.finished.usage.cached_tokens)
    assert cached[2] == 60


@hybrids
@pytest.mark.behaviour(35)
def test_a_preempted_request_comes_back_from_the_state_it_left(families: tuple[Family, ...]) -> None:
    bench = Bench(blocks=13, block_size=4, families=families, max_batch=4)
    clients = [bench.ask(list(range(start, start + 9)), max_tokens=24) for start in (0, 20, 40)]
    bench.run()
    for start, client in zip((0, 20, 40), clients, strict=True):
        assert client.finished.reason == "length"
        assert client.tokens == bench.alone(list(range(start, start + 9)), 24)
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
    broken = bench.ask(SYSTEM)
    bench.run()
    assert isinstance(broken.events[-1], Failed)
    failing.clear()
    again = bench.ask(SYSTEM)
    bench.run()
    assert again.tokens == bench.alone(SYSTEM, 4)


@hybrids
def test_a_conversation_hits_all_that_was_computed(families: tuple[Family, ...]) -> None:
    bench = Bench(blocks=800, families=families)
    history = list(SYSTEM)
    for turn in range(5):
        client = bench.ask(history, max_tokens=7)
        bench.run()
        if turn:
            assert client.finished.usage.cached_tokens == len(history) - 3
        history += [*client.tokens, turn, turn + 1]


def test_nobody_waits_for_a_state_that_its_producer_has_left_behind() -> None:
    bench = Bench(blocks=400, families=(FULL, STATE), chunk_tokens=16)
    bench.ask([*SYSTEM, *range(60, 90)], max_tokens=40)
    bench.run(steps=3)  # 48 of its tokens are computed
    late = bench.ask([*SYSTEM[:40], 91, 92, 93, 94, 95], max_tokens=2)
    bench.run(steps=11)
    assert late.tokens == bench.alone([*SYSTEM[:40], 91, 92, 93, 94, 95], 2), "while the other still runs"
    bench.run()


@hybrids
@pytest.mark.behaviour(11)
def test_requests_at_once_compute_a_prefix_once_though_its_blocks_are_cached_without_a_checkpoint(
    families: tuple[Family, ...],
) -> None:
    bench = Bench(blocks=400, families=families, chunk_tokens=512)
    bench.ask(SYSTEM, max_tokens=1)
    bench.run()
    for node in bench.cache.tree.nodes():
        for checkpoint in list(node.checkpoints.values()):
            bench.cache.tree.drop(checkpoint)
    clients = [bench.ask([*SYSTEM, 70, 80 + i]) for i in range(4)]
    bench.run()
    # The first may resume from what still stands of a window; the others from what the first one leaves.
    assert [client.finished.usage.cached_tokens for client in clients][1:] == [61, 61, 61]


def test_nobody_waits_for_a_request_that_publishes_nothing_more() -> None:
    bench = Bench(blocks=400, families=(FULL, window(7), STATE), chunk_tokens=16)
    bench.ask([*SYSTEM, *range(60, 90)], max_tokens=40)
    bench.run(steps=1)
    late = bench.ask([*SYSTEM, 91, 92], max_tokens=2)
    bench.run(steps=1)
    (lease,) = bench.cache._leases.values()
    bench.cache.tree.detach(lease)  # as for want of blocks
    bench.run(steps=10)
    assert late.tokens == bench.alone([*SYSTEM, 91, 92], 2), "while the other still runs"
    bench.run()


def test_memory_that_is_given_back_is_never_that_of_a_state_which_is_yet_to_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that ends in the step that snapshots its state frees it before the snapshot is taken."""
    bench = Bench(blocks=400, families=(FULL, STATE))
    states = bench.cache.pools.states
    assert states is not None

    def everything_free() -> Plan:
        held, used = states.pool.owners()
        free = np.flatnonzero((held == 0) & (used == 0)).astype(np.int32)
        return Plan(returned=(RowsReturned(states.index, free),))

    monkeypatch.setattr(bench.cache, "make_way", everything_free)
    bench.ask(SYSTEM, max_tokens=1)
    bench.run()
    again = bench.ask([*SYSTEM, 70])
    bench.run()
    assert again.finished.usage.cached_tokens == 60
    assert again.tokens == bench.alone([*SYSTEM, 70], 4)


@hybrids
def test_clearing_the_cache_tells_the_bytes_of_all_families(families: tuple[Family, ...]) -> None:
    bench = Bench(families=families)
    bench.ask(SYSTEM)
    bench.run()
    used = bench.cache.stats().used_bytes
    assert bench.engine.clear_cache().bytes == used > 0


@hybrids
def test_a_waiter_whose_producer_fails_computes_for_itself(families: tuple[Family, ...]) -> None:
    def fault(batch: Batch) -> None:
        if len(bench.batches) == 2:
            raise RuntimeError("injected")

    bench = Bench(families=families, chunk_tokens=16, fault=fault)
    bench.ask([*SYSTEM, 1])
    waiter = bench.ask([*SYSTEM, 2])
    bench.run()
    assert waiter.tokens == bench.alone([*SYSTEM, 2], 4)


def ints(*values: int | Sequence[int]) -> object:
    flat: list[int] = []
    for value in values:
        flat.extend([value] if isinstance(value, int) else value)
    return Client(flat).request.tokens


def namespace(bench: Bench) -> object:
    return bench.engine.namespace("")
