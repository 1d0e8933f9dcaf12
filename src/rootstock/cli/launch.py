"""`rootstock launch`: a coding agent, started with the settings that point it at a running server.

Settings are environment variables and arguments of the one process. The agent's own files are not changed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from rootstock.cli import options
from rootstock.errors import InvalidOption, StartupError, shown

KEY_VARIABLE = f"{options.ENV_PREFIX}_API_KEY"
NO_KEY = "none"  # agents refuse to start without a key; a server without keys reads none
ANSWERS_WITHIN_S = 10.0
# An agent waits this long for an answer: a long first prompt takes minutes on a CPU.
AGENT_WAITS_S = 3600


class AgentName(StrEnum):
    claude = "claude"
    codex = "codex"
    opencode = "opencode"
    qwen_code = "qwen-code"


@dataclass(frozen=True, slots=True)
class LaunchTarget:
    """The model of a running server, as an agent needs it."""

    url: str  # without /v1
    model: str
    key: str = field(repr=False)
    context_tokens: int | None = None  # None: the server does not say


@dataclass(frozen=True, slots=True)
class Settings:
    arguments: tuple[str, ...] = ()  # before the user's own
    environment: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # variables that would override the settings


@dataclass(frozen=True, slots=True)
class AgentProgram:
    executable: str
    package: str  # of the npm registry
    first_prompt_tokens: int  # about: its system prompt and tools
    settings: Callable[[LaunchTarget], Settings]


def _claude(served: LaunchTarget) -> Settings:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    tiers = ("OPUS", "SONNET", "HAIKU", "FABLE")
    environment = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        **dict.fromkeys(names, served.model),
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": served.model for tier in tiers},
        "API_TIMEOUT_MS": str(AGENT_WAITS_S * 1000),
        # The block has a text that changes with each session, before the rest of the prompt: nothing stays cached.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if served.context_tokens is not None:
        environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(served.context_tokens)
    # The first would be a second key, the others lead to other servers.
    others = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS")
    removed = ("ANTHROPIC_API_KEY", *(f"CLAUDE_CODE_USE_{other}" for other in others))
    # Variables in the agent's settings files override the environment, and --settings overrides these. A key stays
    # out of it: other users of the machine can see a command line.
    public = {name: value for name, value in environment.items() if value == NO_KEY or value != served.key}
    settings = {"env": {**dict.fromkeys(removed, ""), **public}}
    return Settings(("--settings", json.dumps(settings)), environment, removed)


def _codex(served: LaunchTarget) -> Settings:
    provider: dict[str, str | int] = {
        "name": "Rootstock",
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
        "stream_idle_timeout_ms": AGENT_WAITS_S * 1000,
    }
    table = ", ".join(f"{name} = {_toml(value)}" for name, value in provider.items())
    values = {
        "model_provider": _toml("rootstock"),
        "model_providers.rootstock": f"{{ {table} }}",
        "model": _toml(served.model),
        # The tool adds images to the conversation, which most models do not see.
        "features.view_image": "false",
    }
    if served.context_tokens is not None:
        values["model_context_window"] = _toml(served.context_tokens)
    arguments = tuple(part for name, value in values.items() for part in ("-c", f"{name}={value}"))
    return Settings(arguments, {KEY_VARIABLE: served.key})


def _toml(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)  # TOML's basic strings and integers have JSON's form


def _opencode(served: LaunchTarget) -> Settings:
    model: dict[str, Any] = {"name": served.model}
    if served.context_tokens is not None:
        model["limit"] = {"context": served.context_tokens, "output": served.context_tokens // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Rootstock",
        "options": {
            "baseURL": f"{served.url}/v1",
            "apiKey": f"{{env:{KEY_VARIABLE}}}",
            "timeout": AGENT_WAITS_S * 1000,
        },
        "models": {served.model: model},
    }
    name = f"rootstock/{served.model}"
    config = {"provider": {"rootstock": provider}, "model": name, "small_model": name}
    return Settings((), {"OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY_VARIABLE: served.key})


def _qwen_code(served: LaunchTarget) -> Settings:
    environment = {
        "OPENAI_API_KEY": served.key,
        "OPENAI_BASE_URL": f"{served.url}/v1",
        "OPENAI_MODEL": served.model,
    }
    # The arguments override a choice that the agent has saved.
    arguments = ("--auth-type", "openai", f"--openai-base-url={served.url}/v1", f"--model={served.model}")
    return Settings(arguments, environment)


AGENTS = {
    AgentName.claude: AgentProgram("claude", "@anthropic-ai/claude-code", 26_000, _claude),
    AgentName.codex: AgentProgram("codex", "@openai/codex", 8_500, _codex),
    AgentName.opencode: AgentProgram("opencode", "opencode-ai", 8_500, _opencode),
    AgentName.qwen_code: AgentProgram("qwen", "@qwen-code/qwen-code", 21_500, _qwen_code),
}


def launch(
    agent: Annotated[
        AgentName, typer.Argument(metavar="AGENT", help="claude, codex, opencode or qwen-code.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Arguments of the agent.")
    ] = None,
    url: Annotated[str, typer.Option(help="URL of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            allow_from_autoenv=False,
            metavar="KEY",
            show_default=False,
            help="API key of the server.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name or alias.", show_default="the first that the server lists")
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the settings as shell commands, and start nothing.")
    ] = False,
) -> None:
    """Start a coding agent with the settings that point it at a running server.

    It must be installed. Its own files are not changed: the settings hold for the one process."""
    chosen = AGENTS[agent]
    served = _ask(_base_of(url), api_key, model)
    if served.context_tokens is not None and served.context_tokens < chosen.first_prompt_tokens:
        _note(
            f"{served.model} has a context of {served.context_tokens:,} tokens, and {agent}'s first prompt has about "
            f"{chosen.first_prompt_tokens:,}."
        )
    settings = chosen.settings(served)
    command = [chosen.executable, *settings.arguments, *(arguments or ())]
    if only_print:
        print(_as_shell(command, settings, served.key))
        if api_key and os.environ.get(KEY_VARIABLE) != api_key:
            _note(f"the key is not shown: the shell must have it as {KEY_VARIABLE}.")
        return
    path = shutil.which(chosen.executable)
    if path is None:
        raise StartupError(
            f"There is no {chosen.executable!r} on the PATH. Install it with: npm install -g {chosen.package}"
        )
    environment = {name: value for name, value in os.environ.items() if name not in settings.removed}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(
        path, command, {**environment, **settings.environment}
    )  # the terminal is the agent's from now on


def _base_of(url: str) -> str:
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidOption("--url", url, "the URL of a server, such as http://127.0.0.1:8000")
    return base


def _ask(base: str, key: str | None, model: str | None) -> LaunchTarget:
    """Asks the server for its model. Raises StartupError."""
    import httpx

    path = "/v1/models" if model is None else f"/v1/models/{quote(model, safe='')}"
    try:
        with httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=ANSWERS_WITHIN_S,
            # The environment's proxies cannot reach this machine's own ports.
            trust_env=urlsplit(base).hostname not in ("localhost", "127.0.0.1", "::1"),
        ) as client:
            answer = client.get(base + path)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
        raise StartupError(
            f"No server answers at {base} ({type(error).__name__}). Start one with 'rootstock serve MODEL', or name "
            "its address with --url."
        ) from error
    if answer.status_code == 401:
        refused = "requires an API key" if not key else "refuses this API key"
        raise StartupError(f"The server at {base} {refused}: set {KEY_VARIABLE}, or give --api-key.")
    if answer.status_code == 404 and model is not None:
        raise StartupError(
            f"The server at {base} has no model {model!r}. Leave --model out, or serve with --alias."
        )
    try:
        told = answer.raise_for_status().json()
        described = told["data"][0] if model is None else told
        name, context = str(described["id"]), described.get("max_model_len")
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(
            f"The server at {base} does not answer {path} as OpenAI's API does (status {answer.status_code})."
        ) from error
    if not name or not name.isprintable() or not set(name).isdisjoint("{}"):
        # In opencode's configuration, braces stand for variables and files of this machine.
        raise StartupError(f"The server at {base} has a model with a name that is not usable: {shown(name)}.")
    return LaunchTarget(base, name, key or NO_KEY, context if type(context) is int else None)


def _as_shell(command: list[str], settings: Settings, key: str) -> str:
    """Returns the settings for a shell. A key is not shown: the shell reads it from a variable."""
    lines = [f"unset {name}" for name in settings.removed]
    for name, value in settings.environment.items():
        shown_value = f'"${{{KEY_VARIABLE}:?}}"' if value == key != NO_KEY else shlex.quote(value)
        lines.append(f"export {name}={shown_value}")
    return "\n".join([*lines, shlex.join(command)])


def _note(text: str) -> None:
    print(f"rootstock: {text}", file=sys.stderr)
