"""Every script of examples/ runs on a small model and prints the results that its text promises."""

from __future__ import annotations

import ast
import itertools
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

Run = Callable[[str], str]


@pytest.fixture
def output_of(small_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script in this process, in which torch is imported once, and returns its output."""

    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, str(small_model)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_offline_batch(output_of: Run) -> None:
    told = output_of("offline_batch.py")
    cached = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens cached", told)]
    assert len(cached) == 3
    assert max(cached) > 50, "prompts that begin alike share their beginning, cold as well"
    assert len(set(re.findall(r"answer \d: (.*)", told))) == 3


def test_chat_with_shared_prefix(output_of: Run) -> None:
    told = output_of("chat_with_shared_prefix.py")
    turns = [tuple(map(int, turn)) for turn in re.findall(r"(\d+) of (\d+) prompt tokens cached", told)]
    assert turns[0][0] == 0
    for (_, before), (cached, prompt) in itertools.pairwise(turns):
        assert before <= cached < prompt
    at_once = re.search(r"at once, cold: \[(.*)\] tokens", told)
    assert sorted(int(n) > 0 for n in at_once[1].split(", ")) == [False, True, True]


def test_streaming_asyncio(output_of: Run) -> None:
    told = output_of("streaming_asyncio.py")
    assert "cancelled" in told.splitlines()
    for name in ("first", "second"):
        *pieces, whole = [ast.literal_eval(text) for text in re.findall(rf"^{name}: (.*)$", told, re.M)]
        assert len(pieces) > 10
        assert "".join(pieces) == whole


def test_explain_a_miss(output_of: Run) -> None:
    told = output_of("explain_a_miss.py")
    same, other = (int(n) for n in re.findall(r"day, .*: (\d+) of \d+ tokens, diverged", told))
    assert 0 < other < same / 3
    assert re.search(r"After '.*Today is ?' it says", told)
    assert "another salt: 0 tokens, nothing_cached" in told


def test_embedded_cache(output_of: Run) -> None:
    told = output_of("embedded_cache.py")
    assert re.findall(r"(\d+) of \d+ prompt tokens cached", told) == ["0", "39", "21"]
    assert "cached prefixes go on with 2" in told


def test_examples_are_short_and_each_has_a_test() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 5
    for script in scripts:
        assert len(script.read_text().splitlines()) <= 60, script.name
        assert f"test_{script.stem}" in globals()
