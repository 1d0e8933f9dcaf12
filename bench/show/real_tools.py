"""Schemas of the tools of real clients and MCP servers, read from them when they run. None is stored here.

A client sends its tools with its first request: it is started against a small HTTP server that keeps the request and
answers with an error. An MCP server lists its tools over its standard input and output. Nothing leaves this machine:
no tool is called, and the servers get neither keys nor accounts.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

CLIENTS = {
    "claude": ("@anthropic-ai/claude-code", ["-p", "hello"]),
    "codex": ("@openai/codex", ["exec", "--skip-git-repo-check", "hello"]),
    "opencode": ("opencode-ai", ["run", "hello"]),
    "qwen-code": ("@qwen-code/qwen-code", ["-p", "hello"]),
}
# MCP servers, with arguments that let them start.
SERVERS: Mapping[str, list[str]] = {
    "@modelcontextprotocol/server-everything": [],
    "@modelcontextprotocol/server-filesystem": ["."],
    "@modelcontextprotocol/server-github": [],
    "@modelcontextprotocol/server-memory": [],
    "@modelcontextprotocol/server-sequential-thinking": [],
    "@notionhq/notion-mcp-server": [],
    "@playwright/mcp": [],
    "@upstash/context7-mcp": [],
    "chrome-devtools-mcp": [],
}
VERSIONS = {
    "@anthropic-ai/claude-code": "2.1.197",
    "@openai/codex": "0.169.0",
    "opencode-ai": "1.18.33",
    "@qwen-code/qwen-code": "0.15.10",
    "@modelcontextprotocol/server-everything": "2026.8.31",
    "@modelcontextprotocol/server-filesystem": "2026.8.31",
    "@modelcontextprotocol/server-github": "2025.4.8",
    "@modelcontextprotocol/server-memory": "2026.8.31",
    "@modelcontextprotocol/server-sequential-thinking": "2026.8.31",
    "@notionhq/notion-mcp-server": "2.5.2",
    "@playwright/mcp": "0.0.83",
    "@upstash/context7-mcp": "4.1.1",
    "chrome-devtools-mcp": "1.11.0",
}
WAIT_S = 60


def install(folder: Path) -> Path | None:
    """Installs the packages by npm, without their scripts. Returns the folder of modules; None: it failed."""
    command = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", str(folder)]
    command += [f"{package}@{version}" for package, version in VERSIONS.items()]
    try:
        failed = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    except FileNotFoundError:
        failed = 1
    return None if failed else folder / "node_modules"


def real_schemas(modules: Path, folder: Path) -> dict[str, Schema]:
    """Returns the schemas of all tools that the installed packages have, by package and name of the tool."""
    found: dict[str, Schema] = {}
    for agent, (package, arguments) in CLIENTS.items():
        if (modules / package).is_dir():
            tools = _of_client(agent, arguments, modules, _home(folder, agent))
            found |= {f"{agent}: {name}": schema for name, schema in tools.items()}
    for package, arguments in SERVERS.items():
        if (modules / package).is_dir():
            tools = _of_server(modules / package, arguments, _home(folder, package.replace("/", "-")))
            found |= {f"{package}: {name}": schema for name, schema in tools.items()}
    return found


def _home(folder: Path, name: str) -> Path:
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    return home


def _environment(home: Path, modules: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "NO_PROXY": "127.0.0.1",
        "PATH": f"{modules / '.bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "TERM": "xterm",
    }


@contextlib.contextmanager
def _started(command: list[str], home: Path, modules: Path, **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """Starts a process in a group of its own, which ends with the block."""
    process = subprocess.Popen(
        command,
        cwd=home,
        env=_environment(home, modules),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
        **pipes,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---- clients


def _of_client(agent: str, arguments: list[str], modules: Path, home: Path) -> dict[str, Schema]:
    bodies: queue.Queue[dict[str, Any]] = queue.Queue()

    class Recorder(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(200, {})

        def do_GET(self) -> None:
            model = {"id": "recorder", "object": "model", "max_model_len": 200_000}
            self._answer(200, {**model, "object": "list", "data": [model]})

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("content-length", 0)))
            with contextlib.suppress(ValueError):
                bodies.put(json.loads(text))
            self._answer(
                400, {"type": "error", "error": {"type": "invalid_request_error", "message": "kept"}}
            )

        def _answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    command = [sys.executable, "-m", "rootstock", "launch", agent, "--url", url, "--model", "recorder", "--"]
    found: dict[str, Schema] = {}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with _started([*command, *arguments], home, modules, **pipes), contextlib.suppress(queue.Empty):
        while not found:  # some clients first ask for a title, without tools
            found = _schemas_in(bodies.get(timeout=WAIT_S).get("tools") or [])
    server.shutdown()
    return found


def _schemas_in(tools: list[Any]) -> dict[str, Schema]:
    """Returns the schemas of tools in the format of any of the three APIs."""
    found: dict[str, Schema] = {}
    for tool in tools:
        if tool.get("type") == "namespace":
            found |= _schemas_in(tool["tools"])
        function = tool.get("function", tool)
        schema = function.get("parameters", function.get("input_schema"))
        if isinstance(schema, dict):
            found[function["name"]] = schema
    return found


# ---- MCP servers


def _of_server(package: Path, arguments: list[str], home: Path) -> dict[str, Schema]:
    programs = json.loads((package / "package.json").read_text()).get("bin") or {}
    program = programs if isinstance(programs, str) else next(iter(programs.values()), None)
    if program is None:
        return {}
    command = ["node", str((package / program).resolve()), *arguments]
    initialize = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "schemas", "version": "1"},
    }
    messages = (
        {"id": 1, "method": "initialize", "params": initialize},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/list", "params": {}},
    )
    modules = package.parents[len(package.name.split("/")) - 1]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with _started(command, home, modules, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(WAIT_S, process.kill)
        watch.start()
        try:
            for message in messages:
                process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
                process.stdin.flush()
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict) and answer.get("id") == 2:
                        tools = answer.get("result", {}).get("tools", [])
                        return {tool["name"]: tool["inputSchema"] for tool in tools}
        except BrokenPipeError:
            pass
        finally:
            watch.cancel()
    return {}
