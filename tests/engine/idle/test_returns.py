"""Prefetch for conversations that are expected back: loaded in idle time, before their request arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.helpers import numbers
from engine.tiered import Tiered
from rootstock.engine.idle.prefills import IdleKind, IdlePrefill
from rootstock.engine.idle.returns import (
    EXPECTED_PAUSE_S,
    LEAD,
    MAX_AGE_S,
    MOST_AWAITED_OF_OWNER,
    POLL_S,
    AwaitedReturns,
)

PROMPT = numbers(1, 64)


class Returning(Tiered):
    """An engine whose memory holds little more than one prompt, above a disk."""

    def __init__(self, folder: Path, **options: Any) -> None:
        options = {"blocks": 20, "block_size": 8, "chunk_tokens": 32, "write": "through", **options}
        super().__init__(folder, idle_work=True, **options)

    @property
    def returns(self) -> AwaitedReturns:
        assert self.engine.parts.returns is not None
        return self.engine.parts.returns

    def await_return(self, tokens: list[int], salt: str = "") -> None:
        """Caches the beginning of a conversation's next request, whose client is expected back."""
        self.engine.prefill_in_idle_time(
            IdlePrefill(IdleKind.NEXT_TURN, np.array(tokens, np.int32), salt, None, comes_back=True)
        )
        self.idle()

    def idle(self) -> None:
        """Does all idle work that can be done now, and waits for its loads."""
        assert self.engine.parts.idle_prefills is not None
        self.engine.step()
        while self.engine.parts.idle_work.has_work or self.engine.parts.idle_prefills.waiting:
            if self.engine.parts.idle_work.has_work:
                self.engine.work_idly()
            else:
                self.engine.step(self.engine._commands.get(timeout=60))
            self.cache.check()

    def evict(self) -> None:
        self.writer.drain()
        self.connector.follow()
        self.answer(numbers(2, 140), 1)
        assert self.engine.cached_tokens(np.array(PROMPT, np.int32)) < 64
        self.writer.drain()


def test_an_evicted_prefix_is_loaded_shortly_before_its_conversation_comes_back(tmp_path: Path) -> None:
    with Returning(tmp_path) as bench:
        bench.await_return(PROMPT)
        assert len(bench.returns) == 1
        bench.evict()
        bench.clock.now_s += POLL_S
        bench.idle()
        assert bench.engine.cached_tokens(np.array(PROMPT, np.int32)) < 64, "loaded although memory is full"
        bench.clock.now_s += (1 - LEAD) * EXPECTED_PAUSE_S
        bench.cache.tree._clock = lambda: 1e6  # what fills the memory is old by then
        bench.idle()
        assert bench.engine.cached_tokens(np.array(PROMPT, np.int32)) == 64
        client = bench.answer([*PROMPT, 1, 2], 3)
        bench.expect(client)
        assert client.cached_tokens == 64
        assert len(bench.returns) == 0


def test_free_memory_is_used_at_once(tmp_path: Path) -> None:
    with Returning(tmp_path) as bench:
        bench.await_return(PROMPT)
        bench.evict()
        bench.cache.tree.clear()
        bench.clock.now_s += POLL_S
        bench.idle()
        assert bench.engine.cached_tokens(np.array(PROMPT, np.int32)) == 64


def test_the_pause_of_an_owner_is_learnt(tmp_path: Path) -> None:
    with Returning(tmp_path) as bench:
        bench.await_return(PROMPT)
        bench.clock.now_s += 600.0
        bench.answer([*PROMPT, 1], 1)
        assert bench.returns._pauses_s[""] == pytest.approx(600.0)


def test_clearing_and_age_end_the_wait(tmp_path: Path) -> None:
    with Returning(tmp_path) as bench:
        bench.await_return(PROMPT, "a")
        bench.await_return(PROMPT, "b")
        bench.engine.clear_cache("a")
        assert len(bench.returns) == 1
        bench.clock.now_s += MAX_AGE_S + 1
        bench.idle()
        assert len(bench.returns) == 0


def test_the_awaited_conversations_are_bounded(tmp_path: Path) -> None:
    with Returning(tmp_path) as bench:
        for i in range(MOST_AWAITED_OF_OWNER + 5):
            bench.await_return(numbers(i, 20))
        assert len(bench.returns) == MOST_AWAITED_OF_OWNER
