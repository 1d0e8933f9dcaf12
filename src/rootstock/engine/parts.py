"""The parts of an engine beside its loop, and the places at which the loop calls them.

The loop (`step.py`) plans a step, executes plans, runs the forward, samples and emits events. Tiers, drafts, pacing,
idle work, the memory guard and records for people are parts. A part overrides the methods that it needs, and the loop
calls no others, so that disabled features cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootstock.cache.keys import Namespace
from rootstock.cache.lease import Lease
from rootstock.engine.request import PromptTokens, Terminal
from rootstock.engine.scheduler import ScheduledSequence, StepPlan
from rootstock.engine.sequence import Sequence as RequestSequence
from rootstock.runtime.base import Segment


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward that has ended."""

    scheduled: Sequence[ScheduledSequence]
    segments: Sequence[Segment]
    seconds: float

    @property
    def only_decodes(self) -> bool:
        return all(item.decodes for item in self.scheduled)


class Part:
    """A part of an engine. The engine's thread calls its methods, but for `prepare`. They do nothing here."""

    def prepare(self, sequence: RequestSequence, then: Callable[[], None]) -> None:
        """Prepares a new request, and calls `then` when it may be scheduled. On the thread that submits it."""

    def before_step(self) -> None:
        """Acts between two steps, before the next one is planned."""

    def planned(self, plan: StepPlan, began: float) -> None:
        """Acts on the plan of a step that began at a time of the engine's clock. The plan may have no forward."""

    def before_forward(self) -> None:
        """Acts after the step's plans were executed."""

    def forwarded(self, forward: Forward) -> None:
        """Learns from a forward. Its results are not taken yet."""

    def after_step(self) -> None:
        """Acts after the results of a forward were taken."""

    def before_idle(self) -> None:
        """Acts before a piece of idle work."""

    def prompt_computed(self, sequence: RequestSequence, tokens: PromptTokens) -> None:
        """Notes that a prompt is computed for the first time."""

    def first_token(self, sequence: RequestSequence, lease: Lease) -> None:
        """Notes that a request has sampled its first token."""

    def taken_out(self, sequence: RequestSequence) -> None:
        """Acts before a request that ends early leaves the scheduler."""

    def ended(self, sequence: RequestSequence, event: Terminal) -> None:
        """Notes the end of a request, whose state is still the last one, before its terminal event."""

    def forget(self, namespace: Namespace | None) -> None:
        """Drops the part's data of a namespace, or all, because its prefixes are cleared. The part holds no rows."""

    def drop_adapter(self, fingerprint: str) -> None:
        """Drops the work of a LoRA adapter that is about to be unloaded."""

    def restart(self) -> None:
        """Drops all work, because the cache starts empty again. All leases are void."""

    def close(self, *, is_sound: bool) -> None:
        """Ends the part's threads and work. `is_sound`: the contents of memory can be trusted."""

    def measure(self) -> None:
        """Makes slow measurements for `stats`. Called on the thread that asks for statistics."""

    def stats(self) -> Mapping[str, Any]:
        """Returns its fields of `EngineStats`."""
        return {}


class PartHooks:
    """The methods that parts override, in the order of the parts, which is behaviour: tests name it."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(parts)
        self.prepare = self._overriding("prepare")
        self.before_step = self._overriding("before_step")
        self.planned = self._overriding("planned")
        self.before_forward = self._overriding("before_forward")
        self.forwarded = self._overriding("forwarded")
        self.after_step = self._overriding("after_step")
        self.before_idle = self._overriding("before_idle")
        self.prompt_computed = self._overriding("prompt_computed")
        self.first_token = self._overriding("first_token")
        self.taken_out = self._overriding("taken_out")
        self.ended = self._overriding("ended")
        self.forget = self._overriding("forget")
        self.drop_adapter = self._overriding("drop_adapter")
        self.restart = self._overriding("restart")
        self.close = self._overriding("close")[::-1]  # parts that others use are closed last
        self.measure = self._overriding("measure")
        self.stats = self._overriding("stats")

    def _overriding(self, name: str) -> tuple[Any, ...]:
        overriding = (part for part in self.parts if getattr(type(part), name) is not getattr(Part, name))
        return tuple(getattr(part, name) for part in overriding)
