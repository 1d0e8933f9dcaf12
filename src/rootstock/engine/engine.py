"""STUB of the public face (bodies follow): the thread that owns the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rootstock.cache import KVCache
from rootstock.cache.plan import Tokens
from rootstock.engine.request import Event, Request, RequestId, Sink
from rootstock.runtime.base import Runtime


@dataclass(frozen=True, slots=True)
class Health:
    alive: bool  # the thread runs, and has not hung
    detail: str
    running: int
    waiting: int
    steps: int


class Engine:
    """`with Engine(...) as engine:` starts and stops the thread. Every method may be called from any thread."""

    def __init__(self, runtime: Runtime, cache: KVCache, config: Any, codec: Any | None = None) -> None: ...

    def __enter__(self) -> Engine: ...
    def __exit__(self, *exc: object) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None:
        """Fails what still runs with EngineStopped, then ends the thread."""

    @property
    def context_limit(self) -> int:
        """Tokens that prompt and answer may have together: the model's limit or the pool's, if that is less."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Checks and queues. Raises EmptyPrompt, PromptTooLong, CompletionTooLong, QueueFull, EngineStopped,
        InvalidParameter at once; afterwards every outcome is an event."""

    def abort(self, request: RequestId) -> None:
        """Idempotent; the request gets `Aborted` unless it ended before."""

    def generate(self, request: Request) -> Iterator[Event]:
        """Submits and yields the events; blocking. Closing the iterator aborts."""

    def explain(self, tokens: Tokens, salt: str = "") -> Any:
        """cache.explain on the engine's thread (a frozen dataclass, see cache/explain.py)."""

    def stats(self) -> Any:
        """cache.stats plus the engine's own counters (frozen dataclasses)."""

    def clear_cache(self) -> Any:
        """Drops every cached prefix that no running request uses; returns blocks and bytes freed."""

    def health(self) -> Health: ...

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the engine's thread between two steps, and returns what it returns."""
