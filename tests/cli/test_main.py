"""Errors of the command line, and servers in processes of their own, from the ready line to the signal."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cli.running import Process, Run, get, refusal, run_process
from rootstock import __version__
from waiting import HANG_S

DISK_OPTIONS = ("--kv-budget", "1MiB", "--disk-budget", "64MiB", "--disk-dir")
Start = Callable[..., Process]


def test_the_version_is_shown(rootstock: Run) -> None:
    shown = rootstock("--version")
    assert (shown.status, shown.out) == (0, f"rootstock {__version__}\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--speculate", "wildly"], "--speculate is 'wildly', but must be auto, off, or the largest number"),
        (["--kv-budget", "lots"], "--kv-budget is 'lots', but must be a size such as 4GiB"),
        (["--block-size", "0"], "--block-size is 0"),
        (["--runtime", "tpu"], "--runtime is 'tpu', but must be auto | torch | mlx"),
        (["--device", "tpu"], "--device is 'tpu', but must be auto | cpu | cuda | mps"),
        (["--dtype", "int3"], "--dtype is 'int3'"),
        (["--kv-budget", "9" * 400], "but must be a size such as 4GiB"),
        (["--itl-target", "9" * 400 + "s"], "but must be a time with its unit"),
        (["--threads", "0"], "--threads is 0, but must be from 1"),
        (["--served-model-name", ""], "--served-model-name is '', but must be a name"),
        (["--served-model-name", "a\nb"], "--served-model-name is 'a\\nb', but must be a name"),
        (
            ["--chat-template", "/dev/zero"],
            "--chat-template is '/dev/zero', but must be a file of at most 1.0 MiB",
        ),
        (["--max-batch", "0"], "--max-batch is 0, but must be at least 1"),
        (["--port", "70000"], "--port is 70000"),
        (["--disk-budget", "much"], "--disk-budget is 'much', but must be a size"),
        (["--disk-write", "never"], "--disk-write is 'never', but must be back | through"),
        (["--verify-hits", "2"], "--verify-hits is 2.0, but must be from 0 to 1"),
        (["--chat-template", "/no/such/file"], "--chat-template is '/no/such/file'"),
        (["--host", "no.such.host.invalid"], "Cannot listen at no.such.host.invalid"),
        (["--max-body", "lots"], "--max-body is 'lots', but must be a size"),
        (["--allowed-origins", "chat.example.com"], "--allowed-origins is 'chat.example.com'"),
        (["--allowed-hosts", '["a"'], "--allowed-hosts is"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_the_allowed_values(
    rootstock: Run, options: list[str], said: str
) -> None:
    assert said in refusal(rootstock, *options)


@pytest.mark.parametrize(
    "given", [("--mlx-report", "report.jsonl"), ("--mlx-report", "x", "--small"), ("--small",)]
)
def test_the_report_of_a_mac_has_moved_to_the_checkout(rootstock: Run, given: tuple[str, ...]) -> None:
    done = rootstock("bench", *given)
    assert (done.status, done.out) == (2, "")
    assert f"{given[0]} is " in done.err
    assert "must be left out: the report of a Mac is `make mac-report` in a checkout" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv-budget", "lots"], "--kv-budget is 'lots'"),
        (["--runtime", "tpu"], "--runtime is 'tpu'"),
        (["--max-batch", "0"], "--max-batch is 0"),
        (["--url", "http://x", "--model", "there"], "--model is 'there', but must be left out with --url"),
        (["--cache", "hot"], "--cache is 'hot'"),
    ],
)
def test_a_bench_refuses_wrong_options_before_it_starts_a_server(
    rootstock: Run, options: list[str], said: str
) -> None:
    done = rootstock("bench", *options)
    assert (done.status, done.out) == (2, "")
    assert said in done.err


def test_a_process_exits_with_the_status_of_the_command() -> None:
    done = run_process("serve", "nowhere", "--max-batch", "0")
    assert (done.status, done.out) == (2, "")
    assert done.err == "rootstock: --max-batch is 0, but must be at least 1.\n"


def test_a_port_in_use_is_one_line_before_anything_is_loaded(rootstock: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Cannot listen at 127.0.0.1:{port}" in refusal(rootstock, "--port", port)


def test_the_ready_line_describes_the_server(start: Start) -> None:
    one = start("--kv-budget", "1MiB", "--block-size", "16")
    assert "fake" in one.ready
    assert "full × 1 layer, " in one.ready
    assert "pool of 65,536 tokens, 1.0 MiB" in one.ready
    assert get(f"{one.url}/health").json()["status"] == "ok"
    returncode, out, err = one.stop(signal.SIGTERM)
    assert (returncode, out) == (0, "")
    moved, loading = err.splitlines()  # plain lines where there is no terminal
    assert moved.startswith("rootstock: the place of --block-size is the section 'advanced'")
    assert loading == "rootstock: Loading the weights"


def test_log_lines_and_messages_are_json_if_they_should_be(start: Start) -> None:
    one = start("--kv-budget", "1MiB", "--log-format", "json", "--log-level", "info", "--access-log")
    body = {"prompt": "a secret", "max_tokens": 2}
    headers = {"X-Request-Id": "mine"}
    answer = httpx.post(f"{one.url}/v1/completions", json=body, headers=headers, timeout=HANG_S)
    assert answer.headers["X-Request-Id"] == "mine"
    _, _, err = one.stop(signal.SIGTERM)
    lines = [json.loads(line) for line in err.splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    assert lines[0]["message"] == "Loading the weights"
    assert any(line["logger"].startswith("uvicorn") for line in lines)
    [access] = [line for line in lines if line["logger"] == "rootstock.access"]
    assert (access["request_id"], access["route"], access["status"]) == ("mine", "/v1/completions", 200)
    assert "secret" not in err


def test_a_server_that_is_started_again_on_its_directory_finds_its_prefixes(
    start: Start, tmp_path: Path
) -> None:
    prompt = "What was said before the restart is not forgotten. " * 20
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answers, cached, ready = [], [], []
    for _ in range(2):
        one = start(*DISK_OPTIONS, str(tmp_path / "disk"))
        ready.append(one.ready)
        answer = httpx.post(f"{one.url}/v1/completions", json=body, timeout=HANG_S).json()
        answers.append(answer["choices"][0]["text"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        metrics = get(f"{one.url}/metrics").text
        returncode, _, err = one.stop(signal.SIGTERM)
        assert returncode == 0
        assert "writing the cache to disk" in err
    assert ["on disk 0 records" in line for line in ready] == [True, False]
    assert answers[0] == answers[1]
    assert cached == [0, len(prompt) - 1]
    name = re.findall('rootstock_alive{model_name="(.*)"} 1.0', metrics)[0]
    for family, label, value in (
        ("rootstock_loaded_prompt_tokens_total", "", len(prompt) - 1),
        ("rootstock_prompt_tokens_by_source_total", ',source="disk"', len(prompt) - 1),
        ("rootstock_tier_choices_total", ',choice="load"', 1),
        ("rootstock_tier_state", ',state="ready"', 1),
    ):
        labels = ",".join(sorted(f'model_name="{name}"{label}'.split(",")))
        assert f"{family}{{{labels}}} {value}.0" in metrics


def test_a_second_server_on_a_directory_warns_once_and_serves_without_it(
    start: Start, tmp_path: Path
) -> None:
    _, second = (start(*DISK_OPTIONS, str(tmp_path / "disk")) for _ in range(2))
    assert "no disk tier" in second.ready
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
    assert httpx.post(f"{second.url}/v1/completions", json=body, timeout=HANG_S).status_code == 200
    assert re.search('rootstock_tier_state{.*state="off"} 1.0', get(f"{second.url}/metrics").text)
    _, _, err = second.stop(signal.SIGTERM)
    assert err.count("WARNING") == 1, err
    assert "in use" in err
