"""Mutations of the package's code at run time, and whether the self-check of a load or the twins' ways notice them.

A mutation changes one thing. A small model that needs the changed code is loaded with the mutation: the self-check
should refuse the model or fall back to an execution mode that does not use the code. The twins' ways also run, with
the mutation, on a model that was loaded without it. A mutation is caught if either of the two notices it. Both
results are reported. The same models without a mutation must pass the same ways before and after.
"""

from __future__ import annotations
import __future__

import inspect
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from common import at_least, conclude, exactly

from twins.twin import Twin
from twins.ways import Way


@dataclass(frozen=True)
class Mutation:
    mistake: str
    model: str  # one that needs the changed attributes
    changed: tuple[tuple[Any, str], ...]  # objects and their attributes
    change: Callable[[Any], Any]  # from the right attribute to the wrong one

    @contextmanager
    def made(self) -> Iterator[None]:
        with ExitStack() as patches:
            for owner, name in self.changed:
                patches.enter_context(patch.object(owner, name, self.change(getattr(owner, name))))
            yield


def nothing(right: Any) -> Any:
    return lambda *args, **kwargs: None


def edited(old: str, new: str) -> Callable[[Any], Any]:
    """Changes a part of a function's source, which occurs in it once."""

    def change(right: Any) -> Any:
        function = getattr(right, "fget", None) or getattr(right, "func", None) or right
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {function.__qualname__}"
        names: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        code = compile(source.replace(old, new), inspect.getfile(function), "exec", flags)
        exec(code, vars(sys.modules[function.__module__]), names)
        wrong = names[function.__name__]
        if hasattr(wrong, "__set_name__"):
            wrong.__set_name__(None, function.__name__)
        return wrong

    return change


@dataclass(frozen=True)
class Subject:
    """How the models of a runtime are made for mutations."""

    twin_in: Callable[[Path, str], Twin]  # saves and loads a model
    mode_of: Callable[[Path, str], str]  # loads the saved model once more, and tells how it runs
    ways: Sequence[Way]


def show_mutations(show: str, subject: Subject, mutations: Sequence[Mutation], least: int) -> NoReturn:
    """Runs mutations one after the other and judges the results."""
    began = time.monotonic()
    by_self_check, by_ways, missed = 0, 0, []
    broken: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in dict.fromkeys(mutation.model for mutation in mutations):
            directory = Path(folder) / model
            twin = subject.twin_in(directory, model)
            mode = subject.mode_of(directory, model)
            _control(twin, subject.ways, broken)
            for mutation in (each for each in mutations if each.model == model):
                with mutation.made():
                    said = _said_by_self_check(subject, directory, model, mode)
                    failed = _failing_way(twin, subject.ways)
                by_self_check, by_ways = by_self_check + bool(said), by_ways + bool(failed)
                if not (said or failed):
                    missed.append(mutation.mistake)
                print(
                    f"{model:20} {mutation.mistake:64} self-check: {said or 'nothing'}; "
                    f"ways: {failed or 'nothing'}",
                    flush=True,
                )
            _control(twin, subject.ways, broken)  # rows that mutations left in the pools change nothing
    conclude(
        show,
        {
            "mutations": len(mutations),
            "caught": len(mutations) - len(missed),
            "by_self_check": by_self_check,
            "by_ways": by_ways,
            "missed": missed,
            "broken_controls": broken,
            "seconds": round(time.monotonic() - began, 1),
        },
        {"mutations": at_least(least), "caught": exactly(len(mutations)), "broken_controls": exactly({})},
    )


def _said_by_self_check(subject: Subject, directory: Path, model: str, mode: str) -> str:
    """Loads the model. Returns the reaction of the self-check, "" for none."""
    try:
        found = subject.mode_of(directory, model)
    except Exception as refusal:
        return f"refused ({type(refusal).__name__})"
    return "" if found == mode else f"fell back to {found!r}"


def _failing_way(twin: Twin, ways: Sequence[Way]) -> str:
    for way in ways:
        try:
            twin.assert_agrees(way)
        except Exception as error:
            return f"{way.__name__} ({type(error).__name__})"
    return ""


def _control(twin: Twin, ways: Sequence[Way], broken: dict[str, str]) -> None:
    """Checks that all ways agree without a mutation."""
    failure = _failing_way(twin, ways)
    if failure:
        broken[twin.model_type] = failure
        print(f"{twin.model_type:20} CONTROL FAILS: {failure}", flush=True)
