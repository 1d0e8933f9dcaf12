"""Work for the time in which no request can run. A request that arrives waits for one piece of it at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

LEAST_TOKENS = 16  # of a chunk
HELD_RETRY_S = 1.0  # time after which held idle work is tried again
_GROWTH = 4  # largest factor between two chunks


class IdleTask(Protocol):
    """A task that runs in pieces. Owned by the engine's thread."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> None:
        """Does one piece. Called only while no request is in the engine."""
        ...

    def pause(self) -> bool:
        """Releases all rows, because requests have arrived. The piece in progress starts over later.

        Returns False if there were none.
        """
        ...

    @property
    def holds_rows(self) -> bool:
        """True if `pause` has something to release or to cancel."""
        ...

    @property
    def next_poll_s(self) -> float | None:
        """Seconds until it looks for work; None: it gets its work from others."""
        ...


class IdleWork:
    """The tasks for idle time, the most urgent first."""

    def __init__(self, tasks: Sequence[IdleTask], is_held: Callable[[], bool]) -> None:
        """`is_held` tells whether memory is too scarce for work that no request waits for."""
        self._tasks = tuple(tasks)
        self.is_held = is_held
        self.may_hold_rows = False

    @property
    def next_turn_s(self) -> float | None:
        """Seconds until it may have work; None: only if others bring some."""
        if self.has_work and self.is_held():
            return HELD_RETRY_S
        polls = [task.next_poll_s for task in self._tasks]
        return min((seconds for seconds in polls if seconds is not None), default=None)

    @property
    def has_work(self) -> bool:
        return any(task.has_work for task in self._tasks)

    def step(self) -> None:
        """Does a piece of the first task that has work."""
        for task in self._tasks:
            if task.has_work:
                self.may_hold_rows = True  # also if the step raises
                task.step()
                self.may_hold_rows = any(each.holds_rows for each in self._tasks)
                return

    def pause(self) -> bool:
        """Releases the rows of all tasks. Returns False if there were none."""
        self.may_hold_rows = False
        held = [task.pause() for task in self._tasks]
        return any(held)


class ChunkPace:
    """Sizes of a prefill's chunks such that each forward takes at most `target_s`, by prediction.

    The seconds of a forward are a fixed part and a part in proportion to its tokens. A chunk of k times as many
    tokens therefore takes at most k times as long: the last chunk alone gives a bound, before any prices are fitted.
    """

    def __init__(self, target_s: float, most_tokens: int) -> None:
        self._target_s = target_s
        self._most_tokens = most_tokens
        self.tokens = min(LEAST_TOKENS, most_tokens)  # of the next chunk

    def restart(self) -> None:
        """Begins another prefill, whose tokens may attend to more positions."""
        self.tokens = min(LEAST_TOKENS, self._most_tokens)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learns from a chunk, which may have been smaller than `self.tokens`."""
        if tokens < self.tokens and seconds <= self._target_s:
            return  # the end of a prompt tells nothing about a whole chunk
        within = _GROWTH * tokens if seconds <= 0.0 else int(tokens * self._target_s / seconds)
        self.tokens = max(
            min(LEAST_TOKENS, self._most_tokens), min(within, _GROWTH * tokens, self._most_tokens)
        )
