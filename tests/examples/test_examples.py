"""Every script of examples/ runs on a small model, and prints what its text promises."""

from __future__ import annotations

import ast
import itertools
import re
import runpy
import sys
from pathlib import Path

import pytest

from rootstock.bench.tiny_model import TinyModelSpec, ensure_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = TinyModelSpec(
    hidden_size=64, intermediate_size=128, layers=2, heads=2, kv_heads=1, corpus_lines=400, context_limit=4096
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(SMALL, tmp_path_factory.mktemp("models"))


def printed(
    name: str, model: Path | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Runs a script in this process, in which torch is imported once."""
    monkeypatch.setattr(sys, "argv", [name, *([] if model is None else [str(model)])])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_offline_batch(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = printed("offline_batch.py", model, monkeypatch, capsys)
    cached = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens cached", told)]
    assert len(cached) == 3
    assert max(cached) > 50, "prompts that begin alike share their beginning, cold as well"
    assert len(set(re.findall(r"answer \d: (.*)", told))) == 3


def test_chat_with_shared_prefix(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = printed("chat_with_shared_prefix.py", model, monkeypatch, capsys)
    turns = [tuple(map(int, turn)) for turn in re.findall(r"(\d+) of (\d+) prompt tokens cached", told)]
    assert turns[0][0] == 0
    for (_, before), (cached, prompt) in itertools.pairwise(turns):
        assert before <= cached < prompt
    at_once = re.search(r"at once, cold: \[(.*)\] tokens", told)
    assert at_once is not None
    assert sorted(int(n) > 0 for n in at_once[1].split(", ")) == [False, True, True]


def test_streaming_asyncio(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = printed("streaming_asyncio.py", model, monkeypatch, capsys)
    assert "\ncancelled\n" in told
    for name in ("first", "second"):
        *pieces, whole = [ast.literal_eval(text) for text in re.findall(rf"^{name}: (.*)$", told, re.M)]
        assert len(pieces) > 10
        assert "".join(pieces) == whole


def test_explain_a_miss(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = printed("explain_a_miss.py", model, monkeypatch, capsys)
    same, other = (int(n) for n in re.findall(r"day, .*: (\d+) of \d+ tokens, diverged", told))
    assert 0 < other < same / 3
    assert re.search(r"After '.*Today is ?' it says", told)
    assert "another salt: 0 tokens, nothing_cached" in told


def test_embedded_cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = printed("embedded_cache.py", None, monkeypatch, capsys)
    assert re.findall(r"(\d+) of \d+ prompt tokens cached", told) == ["0", "39", "21"]
    assert "cached prefixes go on with 2" in told


def test_examples_are_short_and_each_has_a_test() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 5
    for script in scripts:
        assert len(script.read_text().splitlines()) <= 60, script.name
        assert f"test_{script.stem}" in globals()
