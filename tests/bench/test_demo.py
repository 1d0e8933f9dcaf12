"""The demo's judgement, its agents against a real server in this process, and the process that it starts."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from rootstock.bench.agents import Answered, Asked, FirstToken, GaveUp, Progress, Sent, run_agents
from rootstock.bench.demo import DemoRound, requests_table, savings, summary
from rootstock.bench.scenario import AGENTS
from rootstock.bench.serving import READY, ServerProcess
from rootstock.cli.main import ready_line
from rootstock.config import CacheConfig, EngineConfig
from rootstock.engine.build import assemble
from rootstock.errors import StartupError
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.testing.byte_tokenizer import PADDED_LOGITS, ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime
from waiting import HANG_S, unused_port


def round_of(title: str, text: str = "yes", *, missed_tokens: int = 100) -> DemoRound:
    found = DemoRound(title, wall_s=2.0)
    asked = Asked("writer", 1)
    found.take(Sent(asked))
    found.take(FirstToken(asked, 0.5))
    found.take(Answered(asked, 0.5, 1.0, 100, 100 - missed_tokens, text, "length"))
    found.cache = {
        "asked_tokens": 100, "missed_tokens": missed_tokens, "block_bytes": 640, "block_size": 32,
    }  # fmt: skip
    return found


def test_saved_tokens_are_those_that_only_the_other_server_computed() -> None:
    found = savings(round_of("with", missed_tokens=30), round_of("without"))
    assert found.saved_tokens == 70
    assert found.saved_bytes == 70 * 20
    assert not found.different


def test_answers_that_differ_are_found() -> None:
    found = savings(round_of("with"), round_of("without", "no"))
    assert found.different == (Asked("writer", 1),)
    assert "NO" in _shown(summary(found))


def test_an_answer_that_both_rounds_lack_is_a_difference() -> None:
    with_cache, without = round_of("with"), round_of("without")
    for each in (with_cache, without):
        each.take(Sent(Asked("writer", 2)))
    assert savings(with_cache, without).different == (Asked("writer", 2),)


def test_the_table_can_be_drawn_before_during_and_after() -> None:
    assert "waits" not in _shown(requests_table(AGENTS, DemoRound("with"), DemoRound("without")))
    during = DemoRound("with")
    during.take(Sent(Asked("writer", 1)))
    assert "waits" in _shown(requests_table(AGENTS, during, DemoRound("without")))
    assert "500 ms" in _shown(requests_table(AGENTS, round_of("with"), round_of("without")))


def test_agents_keep_their_own_histories_and_share_the_system_prompt() -> None:
    runtime = FakeRuntime(PADDED_LOGITS, 1 << 16)
    made = assemble(runtime, ByteTokenizer(), CacheConfig(budget_bytes=4 << 20), EngineConfig())
    told: list[Progress] = []
    app = create_app(made)
    with made.engine, running(app, made.engine) as url:
        run_agents(AGENTS, url, made.description.name, told.append)
    assert not [each for each in told if isinstance(each, GaveUp)]
    answers = {each.asked: each for each in told if isinstance(each, Answered)}
    assert len(answers) == sum(len(agent.steps) for agent in AGENTS)
    first = [answers[Asked(agent.name, 1)] for agent in AGENTS]
    assert sorted(answer.cached_tokens > 5000 for answer in first) == [False, True, True]
    for agent in AGENTS:
        for turn in range(2, len(agent.steps) + 1):
            assert (
                answers[Asked(agent.name, turn)].cached_tokens
                > answers[Asked(agent.name, 1)].prompt_tokens - 100
            )


def test_an_agent_without_a_server_gives_up_with_a_reason() -> None:
    told: list[Progress] = []
    with unused_port() as port:
        run_agents(AGENTS[:1], f"http://127.0.0.1:{port}", "none", told.append)
    assert [type(each) for each in told] == [Sent, GaveUp]


def test_a_server_that_does_not_start_is_reported_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = _stub(monkeypatch, "import sys; print('no model there', file=sys.stderr); sys.exit(2)")
    with pytest.raises(StartupError, match=r"ended with status 2 (.|\n)*no model there"):
        server.__enter__()


def test_the_server_is_ended_whatever_happens_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _stub(monkeypatch, "print('Stub serves at http://127.0.0.1:1/v1', flush=True); time.sleep(3600)")

    def interrupted() -> None:
        with server:
            assert server.url == "http://127.0.0.1:1"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert server._process.returncode is not None


def test_a_server_that_never_gets_ready_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _stub(monkeypatch, "time.sleep(3600)", within_s=0.3)
    with pytest.raises(StartupError, match="not ready after"):
        server.__enter__()
    assert server._process.returncode is not None


def test_the_servers_ready_line_is_understood() -> None:
    made = assemble(FakeRuntime(), ByteTokenizer(), CacheConfig(budget_bytes=1 << 16), EngineConfig())
    found = READY.search(ready_line(made, "http://127.0.0.1:4242"))
    assert found[1] == "http://127.0.0.1:4242"


def _stub(monkeypatch: pytest.MonkeyPatch, program: str, within_s: float = HANG_S) -> ServerProcess:
    server = ServerProcess([], within_s)
    monkeypatch.setattr(server, "_command", [sys.executable, "-c", f"import time; {program}"])
    return server


def _shown(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(renderable)
    return out.getvalue()
