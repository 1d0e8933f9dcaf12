"""The conformance suite on our own server, right and with mistakes, and on servers that answer nonsense."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conformance.odd_server import serving
from rootstock.cache.families import Family
from rootstock.cli.main import app
from rootstock.conformance.cases import CASES
from rootstock.conformance.server import Answer, Scored, Server
from rootstock.conformance.suite import SuiteOptions, SuiteResult, run_suite
from rootstock.conformance.truth import Ledger, compared
from rootstock.engine.engine import Engine
from rootstock.engine.sequence import Sequence
from rootstock.errors import InvalidOption, StartupError
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from server.conftest import served_by_oracle

SMALL = SuiteOptions(prompt_words=20, answer_tokens=6, pressure=2)
SOME = replace(SMALL, cases=("again", "between", "cuts", "salts"))


def asked(options: SuiteOptions, families: tuple[Family, ...] = (FULL,)) -> SuiteResult:
    vocab = ByteTokenizer.vocab_size  # padding has no text to compare
    with (
        served_by_oracle(families=families, vocab_size=vocab, context_limit=1 << 14, blocks=20_000) as served,
        Server(served.url) as server,
    ):
        return run_suite(server, options)


@pytest.mark.parametrize("families", [(FULL,), (FULL, window(32), STATE)], ids=["full", "hybrid"])
def test_our_server_has_no_finding(families: tuple[Family, ...]) -> None:
    result = asked(SMALL, families)
    assert [each.case.name for each in result.cases] == list(CASES)
    assert result.findings == []
    assert all(each.compared == each.answers for each in result.cases)
    can = result.server.can
    assert (can.cold_by, can.tokenizes, can.has_logprobs, can.says_cached) == (
        "cache_salt",
        "messages",
        True,
        True,
    )
    skipped = {each.case.name: each.refused for each in result.cases if each.refused}
    assert set(skipped) == {"tool_calls", "restart"}, skipped  # the oracle's template forces no call


def test_rows_that_are_not_copied_are_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FakeRuntime.apply
    monkeypatch.setattr(FakeRuntime, "apply", lambda self, plan: right(self, replace(plan, copies=())))
    assert "wrong answer" in {each.kind for each in asked(SOME).findings}


def test_tokens_that_were_never_sent_are_a_false_count(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sequence.usage

    def usage(self: Sequence, now: float) -> Any:
        told = right(self, now)
        return replace(told, cached_tokens=-(-told.cached_tokens // 16) * 16)

    monkeypatch.setattr(Sequence, "usage", usage)
    assert {each.kind for each in asked(SOME).findings} == {"false count"}


def test_a_prompt_that_nobody_has_sent_is_a_false_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's own tokens are not another salt's."""
    right = Sequence.usage

    def usage(self: Sequence, now: float) -> Any:
        told = right(self, now)
        return replace(told, cached_tokens=told.prompt_tokens - 1)

    monkeypatch.setattr(Sequence, "usage", usage)
    result = asked(replace(SMALL, cases=("again", "choices")))
    assert {(each.case, each.kind) for each in result.findings} == {
        ("again", "false count"),
        ("choices", "false count"),
    }


def test_the_prompt_of_another_salt_is_not_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Engine.namespace
    monkeypatch.setattr(Engine, "namespace", lambda self, salt="", adapter="": right(self, "", adapter))
    result = asked(SOME)
    assert ("salts", "not isolated") in {(each.case, each.kind) for each in result.findings}
    assert result.server.can.cold_by != "cache_salt"


def scored(*tokens: tuple[str, dict[str, float]]) -> Answer:
    return Answer(scored=tuple(Scored(token, top[token], top) for token, top in tokens), prompt_tokens=1)


def test_a_tie_may_be_broken_in_either_way() -> None:
    tie = {"a": -0.70, "b": -0.69}
    one, other = scored(("b", tie), ("x", {"x": -0.1})), scored(("a", tie), ("y", {"y": -3.0}))
    assert compared(one, other, 0.01) == (None, 0.0)
    clear = {"a": -2.0, "b": -0.2}
    difference, _ = compared(scored(("b", clear)), scored(("a", clear)), 0.01)
    assert difference is not None
    assert difference.what == "'a' instead of 'b'"


def test_a_small_difference_counts_from_the_tolerance_on() -> None:
    one, other = scored(("a", {"a": -0.10, "b": -3.0})), scored(("a", {"a": -0.10, "b": -3.2}))
    assert compared(one, other, 0.3)[0] is None
    assert compared(one, other, 0.1)[0] is not None
    rare = scored(("a", {"a": -0.1, "b": -20.0})), scored(("a", {"a": -0.1, "b": -25.0}))
    assert compared(*rare, 0.1)[0] is None


def test_a_seed_may_draw_another_token_where_rounding_is_large() -> None:
    first = {"a": -1.0, "b": -2.0, "c": -3.0}
    one, other = scored(("a", first), ("x", {"x": -1.0})), scored(("c", first), ("y", {"y": -1.0}))
    assert compared(one, other, 0.25, drawn=True)[0] is None
    assert compared(one, other, 0.25)[0] is not None
    assert compared(one, other, 0.001, drawn=True)[0] is not None
    moved = scored(("c", {"a": -1.0, "b": -2.6, "c": -3.0}))
    assert compared(one, moved, 0.25, drawn=True)[0] is not None


def test_an_answer_that_ends_early_differs_unless_the_end_was_as_likely() -> None:
    sure, unsure = ("a", {"a": -0.1}), ("a", {"a": -1.2})
    assert compared(scored(sure, sure), scored(sure), 0.01)[0] is not None
    assert compared(scored(sure, unsure), scored(sure), 0.01)[0] is None


def test_the_ledger_knows_the_longest_prefix_with_an_answer_behind_it() -> None:
    ledger = Ledger()
    ledger.add("", [1, 2, 3, 4], 2)
    ledger.add("", [1, 2, 9], 0)
    assert ledger.shared("", [1, 2, 3, 7]) == 3
    assert ledger.shared("", [1, 2, 3, 4, 5, 6, 7, 8]) == 6
    assert ledger.shared("other", [1, 2, 3]) == 0
    assert ledger.shared("", [5]) == 0


def test_the_command_prints_each_case_and_writes_the_requests_of_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Sequence.usage
    monkeypatch.setattr(Sequence, "usage", lambda self, now: replace(right(self, now), cached_tokens=5000))
    out = tmp_path / "result.json"
    with served_by_oracle(context_limit=1 << 14, blocks=20_000) as served:
        ran = CliRunner().invoke(
            app, ["conformance", served.url, "--cases", "again", "--words", "20", "--out", str(out)]
        )
    assert ran.exit_code == 1, ran.output
    assert "again " in ran.output
    assert "false count" in ran.output
    told = json.loads(out.read_text())
    assert told["findings"] > 0
    assert told["cases"][0]["sent"][0]["body"]["messages"]


def test_an_unknown_case_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(InvalidOption, match="between"):
        SuiteOptions(cases=("agian",))


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Runs a server that gives the same answer to everything."""

    class Same(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *args: Any) -> None: ...

    with serving(Same) as url:
        yield url


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b""),
        (200, b"[]"),
        (200, b'{"data": []}'),
        (500, b"\xff\xfe"),
        (401, b"no"),
        (200, b'{"choices": [{"message": null}]}'),
        (200, b'{"choices": 3, "data": [{"id": "m"}]}'),
        (200, b'{"choices": [{"message": {"tool_calls": [{}]}}], "data": [{"id": "m"}]}'),
        (200, b"[" * 100_000),
    ],
)
def test_a_server_that_answers_nonsense_ends_the_command_with_one_line(status: int, body: bytes) -> None:
    with answering(status, body) as url, pytest.raises(StartupError) as raised, Server(url) as server:
        run_suite(server, SMALL)
    assert "\n" not in raised.value.message
