"""The conformance suite on servers that are right in odd ways, wrong in quiet ones, or hostile."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rootstock.conformance.server as client
from conformance.odd_server import odd_server
from rootstock.cli.main import app
from rootstock.conformance.report import summary
from rootstock.conformance.server import Server
from rootstock.conformance.suite import SuiteOptions, SuiteResult, run_suite
from rootstock.errors import StartupError

OPTIONS = SuiteOptions(prompt_words=40, answer_tokens=12, pressure=0)
CASES = ("again", "between", "turns", "tool_calls", "tools_changed", "choices", "salts", "cancelled")


@pytest.fixture(autouse=True)
def waits_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BUSY_EVERY_S", 0.001)


def asked(*flags: str, cases: tuple[str, ...] = CASES, timeout_s: float = 60.0) -> SuiteResult:
    with odd_server(*flags) as url, Server(url, timeout_s=timeout_s) as server:
        return run_suite(server, replace(OPTIONS, cases=cases))


def kinds(result: SuiteResult) -> set[str]:
    return {finding.kind for finding in result.findings}


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("no_usage",),
        ("counts_nothing",),
        ("leaves_out_zero",),
        ("noise",),
        ("noise", "counts_nothing"),
        ("tokenizes_no_tools",),
        ("text_for_ids",),
        ("huge_ids",),
        ("busy",),
        ("refuses_streams",),
    ],
    ids=" ".join,
)
def test_a_server_that_is_right_has_no_finding(flags: tuple[str, ...]) -> None:
    result = asked(*flags)
    assert result.findings == []
    assert result.compared > 40


def test_counts_that_cannot_be_checked_are_told() -> None:
    told = "\n".join(summary(asked("tokenizes_no_tools", cases=("tools_changed",))))
    assert "wrong token ids of 5 prompts" in told
    assert "token ids" not in "\n".join(summary(asked(cases=("tools_changed",))))


@pytest.mark.parametrize("way", [(), ("no_usage",), ("counts_nothing",), ("leaves_out_zero",)], ids=" ".join)
@pytest.mark.parametrize("mistake", ["wrong", "nan", "other_text"])
def test_a_mistake_shows_however_the_server_counts(mistake: str, way: tuple[str, ...]) -> None:
    first_is_reference = {"no_usage", "counts_nothing"} & set(way)
    result = asked(mistake, *way, cases=("again", "between"))
    assert kinds(result) == {"wrong answer"}
    assert len(result.findings) >= (3 if first_is_reference else 6)


def test_a_count_that_is_left_out_where_it_is_0_hides_no_mistake() -> None:
    said, left_out = (asked("wrong", *more, cases=("turns",)) for more in ((), ("leaves_out_zero",)))
    assert len(said.findings) == len(left_out.findings) > 4
    assert left_out.server.can.cold_by == "cache_salt"


@pytest.mark.parametrize(
    "flag",
    ["later_text_for_logprob", "later_text_for_cached", "later_text_for_prompt", "later_no_choice"],
)
def test_an_answer_of_another_form_is_a_failed_request(flag: str) -> None:
    assert "failed" in kinds(asked(flag, cases=("again", "between")))


def test_a_stream_that_only_breaks_off_is_a_failed_request() -> None:
    result = asked("cuts_streams", cases=("again",))
    assert [finding.kind for finding in result.findings] == ["failed"] * 3
    assert "[DONE]" in result.findings[0].what


def test_a_stream_without_an_end_ends_in_time() -> None:
    assert kinds(asked("pings", cases=("again",), timeout_s=0.3)) == {"failed"}


def test_a_stream_without_lines_is_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_ANSWER_BYTES", 4 << 20)
    tracemalloc.start()
    try:
        result = asked("no_line", cases=("again",))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kinds(result) == {"failed"}
    assert most < 20 << 20


def test_no_text_of_a_server_moves_the_terminal() -> None:
    with odd_server("later_refuses") as url:
        ran = CliRunner().invoke(app, ["conformance", url, "--words", "40", "--cases", "again,between,turns"])
    assert ran.output.replace("\n", "").isprintable(), ran.output
    assert "\nNo finding.\n" not in ran.output.split("Each answer")[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://[::1"], "is no URL of a server"),
        (["http://127.0.0.1:1", "--api-key", "sk-caché"], "The API key"),
        (["http://bob:hunter2@127.0.0.1:1"], "names no model"),
        (["http://127.0.0.1:1", "--out", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(arguments: list[str], said: str) -> None:
    ran = CliRunner().invoke(app, ["conformance", *arguments])
    assert isinstance(ran.exception, StartupError)
    assert said in ran.exception.message
    assert "hunter2" not in ran.exception.message
    assert "caché" not in ran.exception.message
    assert "\n" not in ran.exception.message


def test_a_run_that_compares_nothing_does_not_pass() -> None:
    with odd_server("text_for_ids") as url:
        ran = CliRunner().invoke(app, ["conformance", url, "--words", "40", "--cases", "token_ids"])
    assert isinstance(ran.exception, StartupError)
    assert "token_ids        skipped: it tells no token ids" in ran.output


def test_a_restart_that_fails_ends_its_case_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--words", "40", "--cases", "restart,again", "--restart", "false", "--out", str(out)]
    with odd_server("wrong") as url:
        ran = CliRunner().invoke(app, ["conformance", url, *arguments])
    assert ran.exit_code == 1
    assert "then skipped: The command of --restart failed" in ran.output
    assert json.loads(out.read_text())["findings"] > 0


def test_the_requests_of_a_finding_can_be_sent_again(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with odd_server("wrong", "half_a_pair") as url:
        ran = CliRunner().invoke(
            app, ["conformance", url, "--words", "40", "--cases", "cancelled", "--out", str(out)]
        )
    assert ran.exit_code == 1, ran.output
    cancelled, answered, *_ = json.loads(out.read_text())["cases"][0]["sent"]
    assert "closed behind" in cancelled["how"]
    assert cancelled["body"]["stream"]
    assert answered["path"] == "/v1/chat/completions"
    assert (answered["body"]["model"], answered["body"]["temperature"]) == ("m", 0)
