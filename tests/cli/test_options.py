"""Options from the command line, the environment and a file, vLLM's names, and the generated page about them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.running import Run, refusal
from rootstock.cli import main
from rootstock.cli.config_file import MAX_CONFIG_BYTES
from rootstock.cli.reference import reference
from rootstock.config import Configuration
from rootstock.option_table import OPTIONS, VLLM_NAMES
from waiting import HANG_S

ROOT = Path(__file__).parents[2]
GROUP = typer.main.get_command(main.app)
assert isinstance(GROUP, typer.core.TyperGroup)
SERVE = GROUP.commands["serve"]

# Option → a value other than its default. Booleans have the form of the environment and of a file.
VALUES = {
    "runtime": "torch",
    "device": "cpu",
    "dtype": "bfloat16",
    "quantize": "int8",
    "attention": "torch",
    "cuda-graphs": "true",
    "threads": "3",
    "context-limit": "99",
    "chat-template": "{template}",
    "trust-remote-code": "true",
    "kv-budget": "3MiB",
    "memory-check": "false",
    "recheck": "true",
    "memory-limit": "3MiB",
    "kv-dtype": "int8",
    "state-dtype": "bfloat16",
    "block-size": "7",
    "cache": "off",
    "disk-dir": "a folder",
    "disk-budget": "2GiB",
    "disk-write": "through",
    "host-budget": "1GiB",
    "verify-hits": "0.25",
    "remote-url": "rediss://me:secret-3@host:7000/2?timeout=3s",
    "remote-key-file": "a file",
    "kv-events": "tcp://*:5557?replay=5558&format=array",
    "max-batch": "5",
    "chunk-tokens": "77",
    "idle-chunk-tokens": "888",
    "itl-target": "50ms",
    "max-queue": "9",
    "max-session-wait": "9s",
    "max-held": "9",
    "eviction": "lru",
    "retained-share": "0.5",
    "pinned-share": "0.1",
    "idle-work": "off",
    "warm": "a file",
    "sampling-defaults": "openai",
    "speculate": "4",
    "host": "127.0.0.2",
    "port": "1234",
    "served-model-name": "a name",
    "alias": "gpt-4o,claude-sonnet",
    "adapter": "mine=adapters/mine",
    "adapter-directory": "a folder",
    "api-key": "secret-1",
    "api-keys": "{keys}",
    "public-prompts": "{public}",
    "admin-key": "secret-2",
    "explain": "all",
    "max-body": "2MiB",
    "max-connections": "11",
    "sse-keep-alive": "3s",
    "allowed-origins": "https://a.example,https://b.example",
    "allowed-hosts": "a.example",
    "parse-special-tokens": "true",
    "drop-volatile": "off",
    "tool-parser": "hermes",
    "media": "refuse",
    "answer-memory": "3MiB",
    "responses-file": "{store}",
    "responses-budget": "4MiB",
    "metrics-tenants": "7",
    "traces": "true",
    "log-format": "json",
    "log-level": "debug",
    "access-log": "true",
    "dashboard": "false",
    "show-prompts": "true",
    "drain-timeout": "5s",
}

ADVANCED = {option.name for option in OPTIONS.values() if option.advanced}
VISIBLE = set(VALUES) - ADVANCED


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "template").write_text("{{ messages }}")
    (tmp_path / "keys").write_text("key-a a\nkey-b b\n")
    found = {"{template}": "template", "{keys}": "keys", "{store}": "store", "{public}": "public"}
    found = {name: str(tmp_path / file) for name, file in found.items()}
    return {name: found.get(value, value) for name, value in VALUES.items()}


@pytest.fixture
def configured(rootstock: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `serve` up to the point where the configuration is complete, and returns it."""

    def run(*arguments: object) -> Configuration:
        seen: list[Configuration] = []
        monkeypatch.setattr(main, "run_server", seen.append)
        done = rootstock("serve", *arguments)
        assert done.status == 0, done.err
        [configuration] = seen
        return configuration

    return run


def flags(values: dict[str, str]) -> list[str]:
    given: list[str] = []
    for name, value in values.items():
        if value in ("true", "false", "off"):
            given.append(f"--{name}" if value == "true" else f"--no-{name}")
        else:
            given += [f"--{name}", value]
    return given


def variable(name: str) -> str:
    return f"ROOTSTOCK_{name.upper().replace('-', '_')}"


def test_an_option_means_the_same_on_the_command_line_in_the_environment_and_in_a_file(
    configured: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {parameter.opts[0].lstrip("-") for parameter in SERVE.params}
    assert options - {"model", "more_models", "models", "config"} == set(VALUES)
    expected = configured("a model", *flags(files))
    assert expected != configured("a model")

    for form in ("-", "_"):
        values = {**files, "model": "a model"}
        text = "\n".join(f"{name.replace('-', form)}: {value}" for name, value in values.items())
        (tmp_path / "rootstock.yaml").write_text(text)
        assert configured("--config", tmp_path / "rootstock.yaml") == expected

    for name, value in files.items():
        monkeypatch.setenv(variable(name), value)
    assert configured("a model") == expected


def test_an_advanced_option_is_set_in_its_section_and_elsewhere_with_a_line_that_names_the_section(
    configured: Any, rootstock: Run, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: files[name] for name in ADVANCED}
    file = tmp_path / "rootstock.yaml"
    lines = [f"{name.replace('-', '_')}: {value}" for name, value in given.items()]
    file.write_text("advanced:\n" + "\n".join(f"  {line}" for line in lines))
    expected = configured("m", "--config", file)
    assert expected != configured("m")
    monkeypatch.setattr(main, "run_server", lambda config: None)
    assert rootstock("serve", "m", "--config", file).err == ""

    said = "is the section 'advanced' of the file of --config (docs/cli.md)"
    file.write_text("max_queue: 9")
    for arguments in (("--config", file), ("--max-queue", "9")):
        assert rootstock("serve", "m", *arguments).err == f"rootstock: the place of --max-queue {said}\n"
    for name, value in given.items():
        monkeypatch.setenv(variable(name), value)
    [line] = rootstock("serve", "m").err.splitlines()
    assert all(f"--{name}" in line for name in ADVANCED)
    assert said in line


def test_the_earlier_name_of_the_file_of_keys_goes_on_working(
    configured: Any, rootstock: Run, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = configured("m", "--api-keys", files["api-keys"])
    assert configured("m", "--api-keys-file", files["api-keys"]) == expected
    (tmp_path / "rootstock.yaml").write_text(f"api_keys_file: {files['api-keys']}")
    assert configured("m", "--config", tmp_path / "rootstock.yaml") == expected
    monkeypatch.setenv("ROOTSTOCK_API_KEYS_FILE", files["api-keys"])
    assert configured("m") == expected


@pytest.mark.parametrize("name", VALUES)
def test_an_option_changes_the_configuration_by_its_environment_variable(
    configured: Any, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain, by_flag = configured("m"), configured("m", *flags({name: files[name]}))
    monkeypatch.setenv(variable(name), files[name])
    assert plain != configured("m") == by_flag


def test_the_command_line_overrides_the_environment_which_overrides_the_file(
    configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rootstock.yaml"
    file.write_text("max-batch: 2\nmax-queue: 2\nport: 2\nmodel: of the file\n")
    monkeypatch.setenv("ROOTSTOCK_CONFIG", str(file))
    monkeypatch.setenv("ROOTSTOCK_MAX_QUEUE", "3")
    monkeypatch.setenv("ROOTSTOCK_PORT", "3")
    made = configured("--port", 4)
    assert (made.model.model, made.engine.max_batch) == ("of the file", 2)
    assert (made.engine.max_queue, made.server.port) == (3, 4)
    assert configured("of the command line").model.model == "of the command line"


@pytest.mark.parametrize(("theirs", "ours"), VLLM_NAMES.items())
def test_vllms_names_mean_the_same(configured: Any, tmp_path: Path, theirs: str, ours: str) -> None:
    value = VALUES.get(ours, "off")
    arguments = [] if value == "off" else [value]
    expected = configured("m", f"--{ours}", *arguments)
    assert configured("m", f"--{theirs}", *arguments) == expected
    (tmp_path / "rootstock.yaml").write_text(f"{theirs}: {arguments[0] if arguments else 'on'}\n")
    assert configured("m", "--config", tmp_path / "rootstock.yaml") == expected


def test_an_alias_may_be_repeated(configured: Any, rootstock: Run) -> None:
    server = configured("m", "--alias", "gpt-4o", "--alias", "a name,*").server
    assert server.aliases == ("gpt-4o", "a name", "*")
    assert "--alias is 'x\\ny'" in refusal(rootstock, "--alias", "x\ny")


def test_a_file_may_have_lists_words_like_off_and_nothing(configured: Any, tmp_path: Path) -> None:
    file = tmp_path / "rootstock.yaml"
    file.write_text(
        "allowed-origins: [https://a.example, 'https://b.example']\nspeculate: off\nno-cache: yes\n"
    )
    made = configured("m", "--config", file)
    assert made.server.allowed_origins == ("https://a.example", "https://b.example")
    assert (made.engine.draft_tokens, made.cache.enabled) == (0, False)
    assert made.server.aliases is None
    file.write_text("alias: [gpt-4o, 'another, and one more']\n")
    assert configured("m", "--config", file).server.aliases == ("gpt-4o", "another", "and one more")
    file.write_text("# only a remark\n")
    assert configured("m", "--config", file) == configured("m")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# a remark\nmax_bach: 3", "line 2: there is no option 'max_bach'. Did you mean 'max-batch'?"),
        ("nothing-like-it: 3", "line 1: there is no option 'nothing-like-it'. See `rootstock serve --help`."),
        ("config: other.yaml", "line 1: there is no option 'config'."),
        ("max-batch: many", "line 1: max-batch is 'many': "),
        ("cuda-graphs: maybe", "line 1: cuda-graphs is 'maybe': "),
        ("sampling-defaults: hot", "line 1) is 'hot', but must be model | openai."),
        ("advanced:\n  max-queue: 0", "line 2) is 0, but must be at least 1."),
        ("advanced:\n  max-batch: 1", "line 2: 'max-batch' is written outside the section 'advanced'."),
        ("max-queue: 1\nadvanced: {max_queue: 2}", "line 2: 'max_queue' is set twice."),
        ("advanced: 1", "line 1: not a mapping of options to values."),
        ("max-batch:\n  - 1", "line 2: max-batch must be a single value, not a list."),
        ("max-batch: {a: 1}", "line 1: max-batch must be a single value, not a mapping."),
        ("port: 1\napi-key:", "line 2: api-key has no value."),
        ("host: !!python/name:os.system ''", "line 1: host has the tag "),
        ("max-batch: 1\nmax-num-seqs: 2", "line 2: 'max-num-seqs' is set twice."),
        ("- max-batch", "line 1: not a mapping of options to values."),
        ("port: 1\n[a]: 1", "line 2: not the name of an option."),
        ("port: 1\nhost: 'a", "line 2: not YAML: found unexpected end of stream."),
        ("host: \x01", "not YAML: "),
        ("a: 1\n---\nb: 1", "not YAML: "),
        ("[" * 60_000, "line 1: values are nested too deeply."),
        ("port: 70000", "line 1) is 70000, but must be from 0"),
        (" " * (MAX_CONFIG_BYTES + 1), "but must be a file of at most 64.0 KiB"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_place(
    rootstock: Run, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "rootstock.yaml"
    file.write_text(text)
    line = refusal(rootstock, "--config", file)
    assert str(file) in line
    assert said in line


def test_a_file_that_cannot_be_read_is_one_line(rootstock: Run, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"host: \xff")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "latin", "/dev/zero"):
        line = refusal(rootstock, "--config", path)
        assert line.startswith(f"rootstock: --config is '{path}', but must be a file")


def test_an_error_names_the_variable_that_set_the_value(
    rootstock: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOTSTOCK_MAX_BATCH", "0")
    said = "--max-batch (environment variable ROOTSTOCK_MAX_BATCH) is 0, but must be at least 1."
    assert refusal(rootstock) == f"rootstock: {said}"
    assert "environment" not in refusal(rootstock, "--max-batch", "0")


def test_a_key_is_never_shown(rootstock: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "not for others"  # not allowed in a key either
    file = tmp_path / "rootstock.yaml"
    wrong = (f"api-key: {key}", f"api-key: '{key}", f"admin-key: [{key}]", f"admin-key: {{{key}: 1}}")
    for text in wrong:
        file.write_text(text)
        assert key not in refusal(rootstock, "--config", file)
    file.write_text(f"api-key: {key}\n")
    for name in ("ROOTSTOCK_API_KEY", "ROOTSTOCK_ADMIN_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, key)
    for arguments in (("serve", "--config", file, "--help"), ("serve", "--help"), ("bench", "--help")):
        done = rootstock(*arguments)
        assert done.status == 0
        assert key not in done.out + done.err
    assert key not in reference()


@pytest.mark.parametrize("columns", [80, 120])
def test_help_shows_every_option_and_its_variable_uncut(
    rootstock: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = rootstock("serve", "--help").out
    assert len(VISIBLE) + len(("--models", "--config")) <= 50
    for name in VALUES:
        assert bool(re.search(rf"--{name}\b[^'.]", shown)) == (name in VISIBLE)
        assert bool(re.search(rf"\b{variable(name)}[],]", shown)) == (name in VISIBLE)
    for name in VLLM_NAMES:
        assert f"--{name}" in shown
    panels = re.findall(r"╭─ ([\w ,]+) ─", shown)
    assert panels[2:] == [
        "Model",
        "Cache",
        "Hints and idle work",
        "Tiers",
        "Scheduling",
        "Sampling and speculation",
        "Server",
        "Dashboard, metrics, traces and logs",
        "Several servers",
    ]


def test_docs_cli_is_the_page_that_the_commands_generate() -> None:
    assert (ROOT / "docs/cli.md").read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["serve", "m", "--port", "70000"]])
def test_help_and_a_wrong_option_import_no_tensor_framework(arguments: list[str]) -> None:
    code = (
        "import sys; from rootstock.__main__ import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'transformers', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == (2 if "m" in arguments else 0)
    assert done.stdout.endswith("[]\n"), done.stdout[-200:]
