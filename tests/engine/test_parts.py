"""The parts of an engine: their order, which is behaviour, and that the loop calls nothing of what is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.helpers import Bench, numbers
from rootstock.cache.types import NO_TOKENS
from rootstock.config import TierConfig
from rootstock.engine.memory_watch import MemoryWatch
from rootstock.engine.parts import Part, PartHooks
from rootstock.engine.speculation.proposer import Proposer
from rootstock.units import GIB, MIB

HOOKS = [name for name, method in vars(Part).items() if callable(method)]


def names(hooks: PartHooks, name: str) -> list[str]:
    return [type(act.__self__).__name__ for act in getattr(hooks, name)]


def test_the_order_of_the_parts(tmp_path: Path) -> None:
    bench = Bench(
        tier=TierConfig(tmp_path, 16 * MIB),
        draft_tokens=4,
        itl_target_s=1.0,
        verify_hits=0.5,
        memory_watch=MemoryWatch(GIB, lambda: 0),
        idle_work=True,
    )
    hooks = bench.engine.parts.hooks
    bench.engine.stop()
    assert [type(part).__name__ for part in hooks.parts] == [
        "MemoryGuard",
        "PrefixLoads",
        "Pacing",
        "NgramProposer",
        "SessionGate",
        "AwaitedReturns",
        "IdlePrefills",
        "HitVerifier",
        "Activity",
    ]
    assert names(hooks, "before_step") == ["MemoryGuard", "PrefixLoads"]
    assert names(hooks, "forwarded") == ["PrefixLoads", "NgramProposer"]
    assert names(hooks, "after_step") == ["PrefixLoads", "Pacing"]
    assert names(hooks, "close") == ["IdlePrefills", "PrefixLoads"], "the tiers are written last"


def test_an_engine_without_options_has_few_parts() -> None:
    bench = Bench(draft_tokens=0, idle_work=False, max_session_wait_s=0.0)
    assert [type(part).__name__ for part in bench.engine.parts.hooks.parts] == ["Activity"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_part_is_called_only_where_it_has_a_method_of_its_own(hook: str) -> None:
    def act(self: Any, *_: Any, **__: Any) -> None: ...

    acting = type("Acting", (Part,), {hook: act})()
    hooks = PartHooks([Part(), acting])
    assert {name: names(hooks, name) for name in HOOKS if getattr(hooks, name)} == {hook: ["Acting"]}


def test_the_methods_of_parts_are_called_in_their_order() -> None:
    called: list[str] = []

    class Noting(Proposer):
        """A proposer of nothing that notes the calls of its methods."""

        def drafts(self, sequences: Any, _leases: Any, _room: int) -> list[Any]:
            return [NO_TOKENS for _ in sequences]

        def prepare(self, _sequence: Any, then: Any) -> None:
            called.append("prepare")
            then()

    for name in HOOKS:
        if name not in ("stats", "prepare"):
            setattr(Noting, name, lambda self, *_, _name=name, **__: called.append(_name))
    bench = Bench(proposer=Noting(), idle_work=False)
    bench.answer(numbers(1, 40), 2)
    bench.engine.stats()
    bench.engine.stop()
    assert called == [
        *(
            "prepare",
            "before_step",
            "planned",
            "before_forward",
            "forwarded",
            "prompt_computed",
            "first_token",
            "after_step",
        ),
        *("before_step", "planned", "before_forward", "forwarded", "ended", "after_step"),
        *("measure", "close"),
    ]
