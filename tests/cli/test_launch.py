"""`rootstock launch`: the settings of each coding agent, and the process that gets them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli.running import Run, run_process
from rootstock.cli import launch
from rootstock.cli.launch import AGENTS, AgentName, LaunchTarget
from waiting import unused_port

MODEL = {"id": "a/model", "object": "model", "max_model_len": 65_536}
LIST = {"object": "list", "data": [MODEL, {"id": "an alias"}]}


@dataclass
class Server:
    """A server that answers from a table, and records the keys that it is sent."""

    url: str
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    keys: list[str | None] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.keys.append(self.headers.get("Authorization"))
            status, body = found.answers.get(self.path, (404, {"error": {}}))
            sent = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        found = Server(f"http://127.0.0.1:{http.server_port}", {"/v1/models": (200, LIST)})
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield found
        http.shutdown()
        thread.join()


@dataclass
class Started:
    path: str
    command: list[str]
    environment: dict[str, str]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Started]:
    """Puts an executable of each agent on the PATH. Starting one adds to the list, and ends the command."""
    calls: list[Started] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        calls.append(Started(path, command, environment))

    for agent in AGENTS.values():
        (tmp_path / agent.executable).write_text("#!/bin/sh\n")
        (tmp_path / agent.executable).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(launch.os, "execve", execve)
    return calls


def run(rootstock: Run, started: list[Started], *arguments: object) -> Started:
    done = rootstock("launch", *arguments)
    assert (done.status, done.out) == (0, ""), done.err
    return started.pop()


def refused(rootstock: Run, *arguments: object) -> str:
    done = rootstock("launch", *arguments)
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    return line


# ---- settings


def test_claude_code_gets_the_url_the_model_in_every_role_and_one_key(
    rootstock: Run, started: list[Started], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "OTHER"):
        monkeypatch.setenv(name, "set before")
    call = run(
        rootstock, started, "claude", "--url", f"{server.url}/v1/", "--api-key", "s3cret", "--", "-p", "x"
    )
    assert (call.command[:2], call.command[3:]) == (["claude", "--settings"], ["-p", "x"])
    environment, settings = call.environment, json.loads(call.command[2])["env"]
    removed = {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"}
    assert {name: settings[name] for name in removed} == dict.fromkeys(removed, "")
    # The file ~/.claude/settings.json may have variables: these override them. Other users can see a command line.
    assert {**environment, **settings}.items() >= environment.items()
    assert "s3cret" not in call.command[2]
    assert environment["ANTHROPIC_BASE_URL"] == server.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "s3cret"
    models = {name for name, value in environment.items() if value == "a/model"}
    assert models == {
        "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_FABLE_MODEL",
        "CLAUDE_CODE_SUBAGENT_MODEL",
    }  # fmt: skip
    assert environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "65536"
    assert environment["OTHER"] == "set before"
    assert not removed & set(environment), "they would override"
    assert server.keys == ["Bearer s3cret"]


def test_codex_gets_a_provider_of_its_own(rootstock: Run, started: list[Started], server: Server) -> None:
    call = run(rootstock, started, "codex", "--url", server.url, "--", "exec", "hello")
    assert call.command[0] == "codex"
    assert call.command[-2:] == ["exec", "hello"]
    settings = call.command[1:-2]
    assert settings[::2] == ["-c"] * (len(settings) // 2)
    assert tomllib.loads("\n".join(settings[1::2])) == {
        "model": "a/model",
        "model_context_window": 65_536,
        "features": {"view_image": False},
        "model_provider": "rootstock",
        "model_providers": {
            "rootstock": {
                "name": "Rootstock",
                "base_url": f"{server.url}/v1",
                "wire_api": "responses",
                "env_key": "ROOTSTOCK_API_KEY",
                "stream_idle_timeout_ms": 3_600_000,
            }
        },
    }
    assert call.environment["ROOTSTOCK_API_KEY"] == "none"
    assert server.keys == [None]


def test_opencode_gets_a_configuration_in_its_environment(
    rootstock: Run, started: list[Started], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOTSTOCK_API_KEY", "s3cret")
    call = run(rootstock, started, "opencode", "--url", server.url, "run", "hello")
    assert call.command == ["opencode", "run", "hello"]
    config = json.loads(call.environment["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["rootstock"]
    assert provider["options"]["baseURL"] == f"{server.url}/v1"
    assert provider["options"]["apiKey"] == "{env:ROOTSTOCK_API_KEY}"
    assert provider["models"] == {
        "a/model": {"name": "a/model", "limit": {"context": 65_536, "output": 16_384}}
    }
    assert config["model"] == config["small_model"] == "rootstock/a/model"
    assert call.environment["ROOTSTOCK_API_KEY"] == "s3cret"


def test_qwen_code_gets_variables_and_arguments(
    rootstock: Run, started: list[Started], server: Server
) -> None:
    server.answers["/v1/models/an%20alias"] = (200, {"id": "an alias"})
    call = run(rootstock, started, "qwen-code", "--url", server.url, "--model", "an alias", "--", "-p", "x")
    base = f"{server.url}/v1"
    settings = ["--auth-type", "openai", f"--openai-base-url={base}", "--model=an alias"]
    assert call.command == ["qwen", *settings, "-p", "x"]
    expected = {"OPENAI_BASE_URL": base, "OPENAI_API_KEY": "none", "OPENAI_MODEL": "an alias"}
    assert expected.items() <= call.environment.items()


@pytest.mark.parametrize("agent", AgentName)
def test_settings_without_a_context_limit_are_complete(
    rootstock: Run, started: list[Started], server: Server, agent: AgentName
) -> None:
    server.answers["/v1/models"] = (200, {"data": [{"id": "m"}]})
    call = run(rootstock, started, agent, "--url", server.url)
    assert "None" not in " ".join([*call.command, *call.environment.values()])


def test_a_context_that_is_too_short_for_the_agent_is_told(
    rootstock: Run, started: list[Started], server: Server
) -> None:
    server.answers["/v1/models"] = (200, {"data": [{"id": "m", "max_model_len": 16_384}]})
    done = rootstock("launch", "claude", "--url", server.url)
    assert "context of 16,384 tokens, and claude's first prompt has about 26,000" in done.err
    assert len(started) == 1
    assert rootstock("launch", "codex", "--url", server.url).err == ""


# ---- printed


@pytest.mark.parametrize("agent", AgentName)
def test_printed_settings_are_shell_commands_without_the_key(
    rootstock: Run, started: list[Started], server: Server, agent: AgentName
) -> None:
    key = "s3cret-key"
    call = run(rootstock, started, agent, "--url", server.url, "--api-key", key, "--", "two words")
    done = rootstock("launch", agent, "--url", server.url, "--api-key", key, "--print", "--", "two words")
    shown = done.out
    assert not started
    assert key not in shown
    assert done.err == "rootstock: the key is not shown: the shell must have it as ROOTSTOCK_API_KEY.\n"
    *settings, command = shown.splitlines()
    assert shlex.split(command) == call.command
    tell = f"{shlex.quote(sys.executable)} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    script = "\n".join([*settings, tell])
    ran = subprocess.run(
        ["/bin/sh", "-c", script], env={"ROOTSTOCK_API_KEY": key}, capture_output=True, check=True
    )
    served = LaunchTarget(server.url, "a/model", key, 65_536)
    assert AGENTS[agent].settings(served).environment.items() <= json.loads(ran.stdout).items()


def test_a_key_of_the_shell_and_no_key_need_no_note(
    rootstock: Run, started: list[Started], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("launch", "claude", "--url", server.url, "--print")
    assert rootstock(*asked).err == ""
    monkeypatch.setenv("ROOTSTOCK_API_KEY", "s3cret")
    assert rootstock(*asked).err == ""


# ---- refusals


def test_a_missing_agent_is_one_line_that_says_how_to_install_it(
    rootstock: Run, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, agent in AGENTS.items():
        line = refused(rootstock, name, "--url", server.url)
        assert line.endswith(f"Install it with: npm install -g {agent.package}")


def test_a_server_that_does_not_help_is_one_line(
    rootstock: Run, started: list[Started], server: Server
) -> None:
    def with_answer(status: int, body: Any, *arguments: str) -> str:
        server.answers["/v1/models"] = (status, body)
        return refused(rootstock, "codex", "--url", server.url, *arguments)

    assert "requires an API key: set ROOTSTOCK_API_KEY" in with_answer(401, {})
    assert "refuses this API key: set ROOTSTOCK_API_KEY" in with_answer(401, {}, "--api-key", "wrong")
    for status, body in (
        (500, {}), (200, b"<html>"), (200, []), (200, {"data": []}), (200, {"data": [{}]}), (200, {"data": "x"}),
        (200, {"data": [7]}), (404, {}),
    ):  # fmt: skip
        told = f"does not answer /v1/models as OpenAI's API does (status {status})"
        assert told in with_answer(status, body)
    for name in ("{file:~/.ssh/key}", "a\nb", ""):
        assert "a name that is not usable" in with_answer(200, {"data": [{"id": name}]})
    assert "has no model 'other'" in refused(rootstock, "codex", "--url", server.url, "--model", "other")
    with unused_port() as port:
        line = refused(rootstock, "codex", "--url", f"http://127.0.0.1:{port}")
    assert f"No server answers at http://127.0.0.1:{port}" in line
    for url in ("localhost:8000", "ftp://x", "http://", "http://[::1", "http://x:99999"):
        assert refused(rootstock, "codex", "--url", url).startswith(f"rootstock: --url is '{url}'")
    assert not started


# ---- the process


def test_the_agent_takes_the_place_of_the_command(server: Server, tmp_path: Path) -> None:
    agent = tmp_path / "claude"
    agent.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint(os.environ['ANTHROPIC_MODEL'], sys.argv[3:])\nsys.exit(7)\n"
    )
    agent.chmod(0o755)
    ran = run_process("launch", "claude", "--url", server.url, "--", "-p", "--print", path=str(tmp_path))
    assert (ran.status, ran.out, ran.err) == (7, "a/model ['-p', '--print']\n", "")
