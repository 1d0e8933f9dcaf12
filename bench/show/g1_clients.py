"""G1: real clients from their registries' packages against the real server.

The server is bench/show/scripted_server.py: everything is real but the choice of tokens, which follows a script: the
model calls a tool and then answers. Each Python client runs in a virtual environment of its own and each JavaScript
client in an npm prefix of its own (bench/show/clients has the drivers). Each coding agent runs non-interactively,
started by `rootstock launch` if that knows it, with a home and a working directory of its own. Missing packages are
installed with pip and npm into --folder, which later runs use again.

A driver checks: a chat, a stream, a tool round trip that the client executes, structured output, and the cached
tokens of a second turn ÷ its prompt. The first turn has the tool's round trip, and all drivers have the same tool and
the same system prompt, which is as long as an agent's. It also goes on behind a turn with an image, and asks for an
effort of reasoning: the scripted model tells which of both its prompt has.

An agent is asked to run a command with its shell tool and to tell the output, then goes on in a second process. In a
third it gives an object by a JSON schema, if it has an option for that. Then it gets a picture with an effort of
reasoning, and goes on behind the picture. Agents always stream. An agent's share is that of the longest prompt of the
second process, which is the conversation's. Qwen Code also asks a subagent there for the first time, with a system
prompt and tools of its own. "all prompts" is the share of everything that the process asked, and "new session" that
of the longest prompt of a new conversation in the same directory.

pi, Continue and Cline are pointed at the server by files and variables of their own. Continue takes pictures only
from the clipboard of its screen: here its saved session gets one, in the form that the screen saves. Cline goes on in
a second process only in its screen or over the Agent Client Protocol, which is used here. There it sends no effort,
so a process of its own asks with one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import argument_parser, at_least, conclude, could_not, exactly
from peers import PeerProcess, PeerUnavailable, free_port
from scripted_server import ANSWER, COMMAND, IMAGE_LINE, NAME

SHOW = "G1"
HERE = Path(__file__).parent
LEAST_SHARE = 0.95
# The checkout's package, for `rootstock launch`. The drivers know nothing of it.
OUR_PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}
# A first start of an agent takes long on a busy machine.
INSTALL_S, RUN_S = 1800, 600
OUTPUT = COMMAND.removeprefix("echo ")
ASK_COMMAND = f"Use the tool for shell commands to run `{COMMAND}`, and say its output."
ASK_WHO = "Say who you are."
ASK_JSON = "Where is it how warm? Reply in JSON."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
ALL, NEW = "all prompts", "new session"  # shares without a bar
# For packages that send telemetry.
QUIET = {"DO_NOT_TRACK": "1"}
SCHEMA_FILE, PICTURE = "schema.json", "picture.png"  # in the agent's working directory
ASK_PICTURE = f"@{PICTURE} {ASK_WHO}"
LOOK = f"Look at the picture {{work}}/{PICTURE}"  # with a tool
SEES, THINKS_HIGH = "Images: 1.", "Reasoning: high."
KEY = "none"


@dataclass(frozen=True, slots=True)
class PythonClient:
    driver: str  # a file of `clients`
    package: str
    version_of: str


@dataclass(frozen=True, slots=True)
class NodeClient:
    driver: str  # a file of `clients`
    packages: tuple[str, ...]  # with versions, the first is the client; names of one driver share its prefix
    api: str = ""  # the driver's last argument


@dataclass(frozen=True, slots=True)
class Turns:
    """Arguments of two processes of an agent, the second of which goes on. The prompt follows."""

    first: tuple[str, ...]
    second: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Agent:
    package: str  # of the npm registry, with a version where a later one cannot be installed or is not known to fit
    command: tuple[str, ...]  # arguments follow; {url} is the server's
    turns: Turns
    pictured: Turns  # with a picture and an effort
    picture: str = ASK_PICTURE  # the first prompt with a picture; {work} is the working directory
    install: str = ""  # a script of the package's that puts its binary in place
    structured: tuple[str, ...] = ()  # arguments; (): it has no option for a schema
    effort: tuple[str, ...] = ()  # arguments, if the effort needs a process of its own
    thinks: str = THINKS_HIGH  # the model's words for the effort
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: tuple[str, ...] = ()  # a command that stores the settings; {url} is the server's
    settings: Callable[[str], dict[str, Any]] = lambda url: {}  # JSON by path, in the home
    picture_settings: Callable[[str], dict[str, Any]] = lambda url: {}  # written before the first picture
    show: Callable[[Path], None] | None = None  # puts a picture in the home's last session


PYTHON = {
    "openai": PythonClient("use_openai.py", "openai", "openai"),
    "anthropic": PythonClient("use_anthropic.py", "anthropic", "anthropic"),
    "litellm": PythonClient("use_litellm.py", "litellm", "litellm"),
    "langchain-openai": PythonClient("use_langchain.py", "langchain-openai", "langchain-openai"),
    "llama-index": PythonClient(
        "use_llama_index.py", "llama-index-llms-openai-like", "llama-index-llms-openai-like"
    ),
    "pydantic-ai": PythonClient("use_pydantic_ai.py", "pydantic-ai-slim[openai]", "pydantic-ai-slim"),
    "instructor": PythonClient("use_instructor.py", "instructor", "instructor"),
    "openai-agents": PythonClient("use_openai_agents.py", "openai-agents", "openai-agents"),
    "haystack": PythonClient("use_haystack.py", "haystack-ai", "haystack-ai"),
    "ollama": PythonClient("use_ollama.py", "ollama", "ollama"),
}
# Pinned: the packages of one client must fit each other, and a major version may rename a function of a driver.
ZOD = "zod@4.6.7"
AI_SDK = (
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@ai-sdk/anthropic@4.0.105",
)
LANGCHAIN_JS = ("@langchain/openai@1.6.0", "@langchain/core@1.4.0", "@langchain/anthropic@1.5.11")
JAVASCRIPT = {
    "openai-node": NodeClient("use_openai_node.mjs", ("openai@7.57.0", ZOD)),
    "anthropic-node": NodeClient("use_anthropic_node.mjs", ("@anthropic-ai/sdk@1.12.0", ZOD)),
    "ollama-js": NodeClient("use_ollama_node.mjs", ("ollama@0.6.3", ZOD)),
    "AI SDK compatible": NodeClient("use_ai_sdk.mjs", (*AI_SDK, ZOD), "compatible"),
    "AI SDK openai": NodeClient("use_ai_sdk.mjs", (*AI_SDK, ZOD), "responses"),
    "AI SDK openai.chat": NodeClient("use_ai_sdk.mjs", (*AI_SDK, ZOD), "chat"),
    "AI SDK anthropic": NodeClient("use_ai_sdk.mjs", (*AI_SDK, ZOD), "anthropic"),
    "LangChain.js chat": NodeClient("use_langchain_js.mjs", (*LANGCHAIN_JS, ZOD), "chat"),
    "LangChain.js Responses": NodeClient("use_langchain_js.mjs", (*LANGCHAIN_JS, ZOD), "responses"),
    "LangChain.js Anthropic": NodeClient("use_langchain_js.mjs", (*LANGCHAIN_JS[::-1], ZOD), "anthropic"),
}


def launched(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "rootstock", "launch", name, "--url", "{url}", "--")


# ---- settings of agents that `rootstock launch` does not know, or that it does not set


def opencode_sees(url: str) -> dict[str, Any]:
    """Returns opencode's settings of a model that sees images and has efforts, beside those of the launch."""
    model = {
        "attachment": True,
        "reasoning": True,
        "modalities": {"input": ["text", "image"], "output": ["text"]},
        "options": {"reasoningEffort": "high"},
    }
    return {"work/opencode.json": {"provider": {"rootstock": {"models": {NAME: model}}}}}


def qwen_sees(url: str) -> dict[str, Any]:
    config = {"modalities": {"image": True}, "reasoning": {"effort": "high"}}
    return {".qwen/settings.json": {"model": {"generationConfig": config}}}


def pi(api: str, path: str, thinks: str = THINKS_HIGH) -> Agent:
    def settings(url: str) -> dict[str, Any]:
        model = {
            "id": NAME,
            "reasoning": True,
            "input": ["text", "image"],
            "contextWindow": 131_072,
            "maxTokens": 8_192,
        }
        provider = {"baseUrl": url + path, "api": api, "apiKey": KEY, "models": [model]}
        return {".pi/agent/models.json": {"providers": {"rootstock": provider}}}

    return Agent(
        "@mariozechner/pi-coding-agent@0.73.1",
        ("pi", "--provider", "rootstock", "--model", NAME),
        Turns(("-p",), ("-p", "--continue")),
        Turns(("-p", "--thinking", "high", f"@{PICTURE}"), ("-p", "--thinking", "high", "--continue")),
        picture=ASK_WHO,
        thinks=thinks,
        environment={"PI_OFFLINE": "1"},
        settings=settings,
    )


def continue_settings(url: str, **request: Any) -> dict[str, Any]:
    model = {
        "name": NAME,
        "provider": "openai",
        "model": NAME,
        "apiBase": f"{url}/v1",
        "apiKey": KEY,
        "roles": ["chat"],
        "capabilities": ["tool_use", "image_input"],
        "requestOptions": request,
    }
    config = {"name": "rootstock", "version": "1.0.0", "schema": "v1", "models": [model]}
    return {"continue.yaml": config}  # JSON is YAML, too


def continue_thinks(url: str) -> dict[str, Any]:
    return continue_settings(url, extraBodyProperties={"reasoning_effort": "high"})


def show_continue(place: Path) -> None:
    """Adds a picture to the first message of the last session, as the screen saves one from the clipboard."""
    sessions = (place / ".continue" / "sessions").glob("*-*.json")
    last = max(sessions, key=lambda session: session.stat().st_mtime_ns)
    session = json.loads(last.read_text())
    message = session["history"][0]["message"]
    image = base64.b64encode((HERE / "clients" / PICTURE).read_bytes()).decode()
    shown = {"type": "imageUrl", "imageUrl": {"url": f"data:image/png;base64,{image}"}}
    message["content"] = [{"type": "text", "text": message["content"]}, shown]
    last.write_text(json.dumps(session))


CONTINUE = Turns(("-p",), ("--resume", "-p"))
ACP = (sys.executable, str(HERE / "clients" / "use_acp.py"))
CLINE = Turns((*ACP, "cline", "--acp"), (*ACP, "--continue", "cline", "--acp"))
CODEX_SEES = ("-c", 'model_reasoning_effort="high"', "-c", "features.view_image=true")
AGENTS = {
    "Claude Code": Agent(
        "@anthropic-ai/claude-code",
        launched("claude"),
        Turns(("-p", "--allowedTools", "Bash", "--"), ("-p", "--continue", "--")),
        Turns(("-p", "--effort", "high", "--"), ("-p", "--effort", "high", "--continue", "--")),
        install="install.cjs",
        structured=("-p", "--output-format", "json", "--json-schema", json.dumps(SCHEMA), "--"),
    ),
    # Its own sandbox needs namespaces, which containers often forbid. The script runs one harmless command. The tool
    # for pictures is switched on again for these turns, as a user's own settings may.
    "Codex": Agent(
        "@openai/codex",
        launched("codex"),
        Turns(
            ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
            ("exec", "resume", "--last", "--skip-git-repo-check"),
        ),
        Turns(
            ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", *CODEX_SEES),
            ("exec", "resume", "--last", "--skip-git-repo-check", *CODEX_SEES),
        ),
        picture=LOOK,
        structured=("exec", "--skip-git-repo-check", "--output-schema", SCHEMA_FILE),
    ),
    "opencode": Agent(
        "opencode-ai",
        launched("opencode"),
        Turns(("run",), ("run", "--continue")),
        Turns(("run", "--file", PICTURE, "--"), ("run", "--continue")),
        picture=ASK_WHO,
        install="postinstall.mjs",
        picture_settings=opencode_sees,
    ),
    "Qwen Code": Agent(
        "@qwen-code/qwen-code",
        launched("qwen-code"),
        Turns(("--yolo",), ("--yolo", "--continue")),
        Turns(("--yolo",), ("--yolo", "--continue")),
        structured=("--yolo", "--json-schema", json.dumps(SCHEMA)),
        picture_settings=qwen_sees,
    ),
    # The package's later name cannot be installed from every registry.
    "pi chat": pi("openai-completions", "/v1"),
    "pi Responses": pi("openai-responses", "/v1"),
    "pi Messages": pi("anthropic-messages", "", thinks="Reasoning: on."),
    "Continue": Agent(
        "@continuedev/cli@1.5.47",
        ("cn", "--config", "../continue.yaml", "--auto"),
        CONTINUE,
        CONTINUE,
        picture=ASK_WHO,
        environment={"CONTINUE_TELEMETRY_ENABLED": "0"},
        settings=continue_settings,
        picture_settings=continue_thinks,
        show=show_continue,
    ),
    "Cline": Agent(
        "cline@3.0.65",
        (),
        CLINE,
        CLINE,
        picture=LOOK,
        effort=("cline", "--thinking", "high"),
        # Otherwise its first process leaves one behind, which serves the others.
        environment={
            "CLINE_SESSION_BACKEND_MODE": "local",
            "CLINE_PROVIDER": "openai-compatible",
            "CLINE_API_KEY": KEY,
        },
        prepare=("cline", "auth", "--provider", "openai", "-k", KEY, "-m", NAME, "-b", "{url}/v1"),
    ),
}

CLIENTS = [*PYTHON, *JAVASCRIPT, *AGENTS]


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument(
        "--folder", type=Path, help="for the clients' packages; a temporary folder if left out"
    )
    options.add_argument("--only", nargs="+", choices=CLIENTS, default=CLIENTS)
    given = options.parse_args()
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        usage = Path(stack.enter_context(tempfile.TemporaryDirectory()), "usage.jsonl")
        usage.touch()
        command = [sys.executable, str(HERE / "scripted_server.py"), "--port", str(port)]
        command += ["--usage-file", str(usage)]
        try:
            server = stack.enter_context(PeerProcess(command, port, ready_within_s=RUN_S))
        except PeerUnavailable as error:
            could_not(SHOW, str(error))
        figures = measure(server.url, folder.resolve(), given.only, usage)
    # A figure of no client is no figure: the bars hold for the clients that were asked for.
    bars = {f"{name}: failed": exactly(0) for name in given.only}
    bars |= {f"{name}: share": at_least(LEAST_SHARE) for name in given.only}
    conclude(SHOW, figures, bars)


def measure(url: str, folder: Path, names: Sequence[str], usage: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in names:
        try:
            if name in PYTHON:
                version, lines = run_driver(PYTHON[name], name, url, folder)
            elif name in JAVASCRIPT:
                version, lines = run_node_driver(JAVASCRIPT[name], url, folder)
            else:
                version, lines = run_agent(AGENTS[name], url, folder, usage)
        except (subprocess.SubprocessError, OSError) as error:
            version, lines = "", [{"check": "run", "ok": False, "detail": f"{type(error).__name__}: {error}"}]
        failed = [line for line in lines if not line["ok"]]
        shares = [share_of(line["detail"]) for line in lines if line["ok"] and "second_turn" in line["check"]]
        passed = sum(line["ok"] and line["check"] not in (ALL, NEW) for line in lines)
        figures |= {
            f"{name}: version": version,
            f"{name}: passed": passed,
            f"{name}: failed": len(failed),
            f"{name}: share": min(shares, default=0.0),
            **{
                f"{name}: {line['check']}": share_of(line["detail"])
                for line in lines
                if line["check"] in (ALL, NEW)
            },
        }
        print(f"{name} {version}: {passed} passed, {len(failed)} failed", flush=True)
        for line in lines:
            print(f"    {'passed' if line['ok'] else 'FAILED'} {line['check']}: {line['detail']}", flush=True)
    return figures


def share_of(detail: str) -> float:
    cached, prompt = map(int, detail.split("/"))
    return round(cached / prompt, 4) if prompt else 0.0


# ---- Python's clients


def run_driver(client: PythonClient, name: str, url: str, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    venv = folder / name
    python = venv / "bin" / "python"
    done = venv / "installed"
    if not done.exists():
        quietly([sys.executable, "-m", "venv", str(venv)], INSTALL_S)
        quietly([str(python), "-m", "pip", "install", "--quiet", client.package], INSTALL_S)
        done.touch()
    told = f"import importlib.metadata; print(importlib.metadata.version({client.version_of!r}))"
    version = quietly([str(python), "-c", told], RUN_S).strip()
    return version, checked([str(python), str(HERE / "clients" / client.driver), url, NAME])


def checked(command: Sequence[str]) -> list[dict[str, Any]]:
    """Runs a driver and returns its lines."""
    with home() as environment:
        ended = run(command, env=environment)
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith('{"check"')]
    if ended.failure or not lines:
        lines.append({"check": "run", "ok": False, "detail": ended.failure or "it printed no check"})
    return lines


# ---- JavaScript's clients


def run_node_driver(client: NodeClient, url: str, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    prefix = folder / Path(client.driver).stem
    done = prefix / "installed"
    packages = sorted(client.packages)
    if not done.exists() or done.read_text() != str(packages):
        install(prefix, *packages)
        done.write_text(str(packages))
    # Node looks for packages in the folders above a module: the drivers stand beside theirs.
    for name in ("checks.mjs", PICTURE, client.driver):
        shutil.copy(HERE / "clients" / name, prefix)
    command = ["node", str(prefix / client.driver), url, NAME]
    return client.packages[0].rpartition("@")[2], checked([*command, client.api] if client.api else command)


def install(prefix: Path, *packages: str) -> None:
    quiet = ("--no-fund", "--no-audit", "--ignore-scripts")
    quietly(["npm", "install", "--prefix", str(prefix), *quiet, *packages], INSTALL_S)


# ---- agents


def run_agent(agent: Agent, url: str, folder: Path, usage: Path) -> tuple[str, list[dict[str, Any]]]:
    version = install_agent(agent, folder / "node")
    with home(folder / "node" / "node_modules" / ".bin") as variables:
        place = Path(variables["HOME"])
        work = place / "work"
        quietly(["git", "init", "--quiet", str(work)], RUN_S)
        (work / SCHEMA_FILE).write_text(json.dumps(SCHEMA))
        shutil.copy(HERE / "clients" / PICTURE, work)
        environment = {**variables, **OUR_PATH, **agent.environment}

        def execute(command: Sequence[str], *rest: str) -> str:
            ended = run([*(part.replace("{url}", url) for part in command), *rest], environment, str(work))
            return f"{ended.out}\n{ended.failure}"

        def ask(arguments: Sequence[str], prompt: str) -> str:
            return execute(agent.command, *arguments, prompt)

        def go_on(turns: Turns) -> tuple[str, list[Asked]]:
            before = len(asked_so_far(usage))
            return ask(turns.second, ASK_WHO), asked_so_far(usage)[before:]

        write(agent.settings(url), place)
        if agent.prepare:
            execute(agent.prepare)

        text = ask(agent.turns.first, ASK_COMMAND)
        lines = [check("tool", re.search(rf"The tool says:[^\n]*{OUTPUT}", text), text)]
        text, asked = go_on(agent.turns)
        lines.append(check("chat", re.search(re.escape(ANSWER), text), text))
        lines.append(shared("second_turn", longest(asked)))
        lines.append(shared(ALL, total(asked)))
        before = len(asked_so_far(usage))
        ask(agent.turns.first, ASK_WHO)
        lines.append(shared(NEW, longest(asked_so_far(usage)[before:])))
        if agent.structured:
            text = ask(agent.structured, ASK_JSON).replace("\\", "")  # JSON within JSON
            lines.append(check("structured", re.search(r'"city": *"Paris", *"degrees": *21\b', text), text))

        write(agent.picture_settings(url), place)
        text = ask(agent.pictured.first, agent.picture.replace("{work}", str(work)))
        if agent.show is not None:
            agent.show(place)
            text, _ = go_on(agent.pictured)
        # An agent whose tool looked at it repeats the tool's result.
        lines.append(check("image", re.search(f"{re.escape(SEES)}|{re.escape(IMAGE_LINE)}", text), text))
        text, asked = go_on(agent.pictured)
        lines.append(check("image_stays", re.search(re.escape(SEES), text), text))
        lines.append(shared("image_second_turn", longest(asked)))
        if agent.effort:
            text = execute(agent.effort, ASK_WHO)
        lines.append(check("effort", re.search(re.escape(agent.thinks), text), text))
    return version, lines


def install_agent(agent: Agent, prefix: Path) -> str:
    """Installs an agent's package, if it is not there, and returns its version."""
    scope, _, rest = agent.package.rpartition("/")
    name, _, pinned = rest.partition("@")
    package = prefix / "node_modules" / scope / name
    described = package / "package.json"
    if not described.exists() or pinned not in ("", json.loads(described.read_text())["version"]):
        install(prefix, agent.package)
        if agent.install:
            quietly(["node", agent.install], INSTALL_S, cwd=package)
    version: str = json.loads(described.read_text())["version"]
    return version


def write(settings: Mapping[str, Any], place: Path) -> None:
    for name, value in settings.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(json.dumps(value))


def check(name: str, found: re.Match[str] | None, text: str) -> dict[str, Any]:
    return {"check": name, "ok": found is not None, "detail": found[0] if found else text[-600:]}


@dataclass(frozen=True, slots=True)
class Asked:
    cached: int  # tokens of the prompt
    prompt: int


def shared(name: str, asked: Asked) -> dict[str, Any]:
    return {"check": name, "ok": asked.prompt > 0, "detail": f"{asked.cached}/{asked.prompt}"}


def asked_so_far(usage: Path) -> list[Asked]:
    return [Asked(**json.loads(line)) for line in usage.read_text().splitlines()]


def longest(asked: Sequence[Asked]) -> Asked:
    return max(asked, key=lambda one: one.prompt, default=Asked(0, 0))


def total(asked: Sequence[Asked]) -> Asked:
    return Asked(sum(one.cached for one in asked), sum(one.prompt for one in asked))


# ---- processes


@dataclass(frozen=True, slots=True)
class Ended:
    out: str
    failure: str  # "" if there was none


def run(command: Sequence[str], env: Mapping[str, str], cwd: str | None = None) -> Ended:
    """Runs a client to its end, or for RUN_S."""
    with subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its session: an agent has processes of its own
            out, errors = process.communicate()
            return Ended(out, f"it had not ended after {RUN_S} s. {errors[-600:]}")
    return Ended(out, errors[-600:] if process.returncode else "")


@contextlib.contextmanager
def home(*path: Path) -> Iterator[dict[str, str]]:
    """Yields an environment without this user's settings and keys, whose home is a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
        paths = os.pathsep.join([*map(str, path), os.environ["PATH"]])
        yield {**kept, "PATH": paths, "HOME": folder, "NO_PROXY": "127.0.0.1", **QUIET}


def quietly(command: Sequence[str], within_s: float, cwd: Path | None = None) -> str:
    """Runs a command and returns its output. Raises SubprocessError with the end of its errors."""
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=within_s)
    if ran.returncode:
        raise subprocess.SubprocessError(f"{command[0]} {command[1]}: {ran.stderr[-400:]}")
    return ran.stdout


if __name__ == "__main__":
    main()
