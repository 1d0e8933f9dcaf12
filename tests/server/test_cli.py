"""The command line as a user meets it: in a process of its own, with a signal at its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rootstock import __version__
from rootstock.errors import ModelFileInvalid
from waiting import HANG_S, join, wait_for

# `rootstock serve` with the oracle in the place of a model that is loaded; everything else is the real thing.
ORACLE = """
import sys, time
from pathlib import Path
import rootstock.cli.main as cli
import rootstock.engine.tiers.connector
import rootstock.server.listen
from rootstock.config import CacheConfig
from rootstock.engine.build import assemble
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FakeRuntime

def build_engine(model, cache, engine, tier, *, chat_template, progress, directory):
    progress("load", 0.0)
    progress("load", 1.0)
    runtime = FakeRuntime(
        ByteTokenizer.vocab_size, 1 << 17, eos_token_ids=(ByteTokenizer.END,), fault=lambda _: time.sleep(0.01)
    )
    return assemble(runtime, ByteTokenizer(), cache, engine, tier)

# On a busy machine a load, and the end of an answer, may take any time.
rootstock.engine.tiers.connector.OVERDUE_LEAST_S = rootstock.server.listen.GRACE_S = 600
cli.build_engine = build_engine
cli.locate = lambda model, **_: Path('no directory')
cli.main()
"""


def rootstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rootstock.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def get(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, timeout=HANG_S, **options)


class Process:
    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ORACLE, "serve", "oracle", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", self.ready)
        assert found, (self.ready, self.process.communicate())
        self.url = found[0]

    def stop(self, sent: signal.Signals) -> tuple[int, str, str]:
        self.process.send_signal(sent)
        out, err = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, out, err


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def test_the_version_is_shown() -> None:
    shown = rootstock("--version")
    assert (shown.returncode, shown.stdout) == (0, f"rootstock {__version__}\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--speculate", "wildly"], "--speculate is 'wildly', but must be auto, off, or how many tokens"),
        (["--kv-budget", "lots"], "--kv-budget is 'lots', but must be a size such as 4GiB"),
        (["--block-size", "0"], "--block-size is 0"),
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
        (["--tier-compress", "zip"], "--tier-compress is 'zip', but must be none | int8"),
        (["--verify-hits", "2"], "--verify-hits is 2.0, but must be from 0 to 1"),
        (["--chat-template", "/no/such/file"], "--chat-template is '/no/such/file'"),
        (["--host", "no.such.host.invalid"], "Cannot listen at no.such.host.invalid"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_what_is_allowed(options: list[str], said: str) -> None:
    done = rootstock("serve", "nowhere", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("rootstock: ")
    assert said in line


def test_a_port_in_use_is_one_line_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = rootstock("serve", "nowhere", "--port", str(port))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert f"Cannot listen at 127.0.0.1:{port}" in line


def test_a_server_says_in_one_line_that_it_is_ready_and_what_it_holds(processes: list[Process]) -> None:
    one = Process("--kv-budget", "1MiB", "--block-size", "16")
    processes.append(one)
    assert "fake" in one.ready
    assert "full × 1 layer, " in one.ready
    assert "pool of 65,536 tokens, 1.0 MiB" in one.ready
    assert get(f"{one.url}/health").json()["status"] == "ok"
    returncode, out, err = one.stop(signal.SIGTERM)
    assert (returncode, out) == (0, "")
    assert err == "rootstock: Loading the weights\n"  # plain lines where there is no terminal


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_running_streams_with_an_error_event_and_exits_with_0(
    processes: list[Process], sent: signal.Signals
) -> None:
    one = Process("--kv-budget", "1MiB")
    processes.append(one)
    events: list[str] = []
    started = threading.Event()

    def read() -> None:
        body: dict[str, Any] = {
            "prompt": "on and on",
            "max_tokens": 60_000,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=HANG_S) as response:
            for line in response.iter_lines():
                events.append(line)
                started.set()

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(started)
    returncode, _, err = one.stop(sent)
    join(reader)
    assert returncode == 0, err
    assert "Traceback" not in err
    last = [event for event in events if event][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"


def test_a_server_that_is_started_again_on_its_directory_finds_what_was_said(
    processes: list[Process], tmp_path: Path
) -> None:
    prompt = "What was said before the restart is not forgotten. " * 20
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    options = ("--kv-budget", "1MiB", "--disk-dir", str(tmp_path / "disk"), "--disk-budget", "64MiB")
    answers, cached = [], []
    for _ in range(2):
        one = Process(*options)
        processes.append(one)
        answer = httpx.post(f"{one.url}/v1/completions", json=body, timeout=HANG_S).json()
        answers.append(answer["choices"][0]["text"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        metrics = get(f"{one.url}/metrics").text
        returncode, _, err = one.stop(signal.SIGTERM)
        assert returncode == 0
        assert "writing down what only memory has" in err
    assert "on disk 0 records" in processes[0].ready
    assert "on disk 0 records" not in processes[1].ready
    assert answers[0] == answers[1]
    assert cached == [0, len(prompt) - 1]
    assert f"rootstock_loaded_prompt_tokens_total {len(prompt) - 1}.0" in metrics
    assert 'rootstock_tier_choices_total{choice="load"} 1.0' in metrics
    assert 'rootstock_tier_state{state="ready"} 1.0' in metrics


def test_a_second_server_on_a_directory_warns_once_and_serves_without_it(
    processes: list[Process], tmp_path: Path
) -> None:
    options = ("--kv-budget", "1MiB", "--disk-dir", str(tmp_path / "disk"), "--disk-budget", "64MiB")
    first, second = Process(*options), Process(*options)
    processes += [first, second]
    assert "nothing below it" in second.ready
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
    assert httpx.post(f"{second.url}/v1/completions", json=body, timeout=HANG_S).status_code == 200
    assert 'rootstock_tier_state{state="off"} 1.0' in get(f"{second.url}/metrics").text
    _, _, err = second.stop(signal.SIGTERM)
    assert err.count("WARNING") == 1, err
    assert "in use" in err


def test_the_api_key_may_come_from_the_environment(processes: list[Process]) -> None:
    one = Process("--kv-budget", "1MiB", env={"ROOTSTOCK_API_KEY": "from-the-environment"})
    processes.append(one)
    assert get(f"{one.url}/v1/models").status_code == 401
    known = {"Authorization": "Bearer from-the-environment"}
    assert get(f"{one.url}/v1/models", headers=known).status_code == 200


def test_keys_of_tenants_and_of_the_admin_are_given_at_the_start(
    processes: list[Process], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("key-a a\nkey-b b\n")
    options = ("--kv-budget", "1MiB", "--api-keys-file", str(tmp_path / "keys"), "--explain", "all")
    one = Process(*options, env={"ROOTSTOCK_ADMIN_KEY": "of-the-admin"})
    processes.append(one)

    def status(path: str, key: str) -> int:
        return get(f"{one.url}{path}", headers={"Authorization": f"Bearer {key}"}).status_code

    assert [status("/v1/models", key) for key in ("key-a", "key-b", "of-the-admin", "other")] == [
        200,
        200,
        200,
        401,
    ]
    assert [status("/v1/cache/stats", key) for key in ("key-a", "of-the-admin")] == [403, 200]


def test_a_models_sampling_defaults_are_read_from_its_directory(tmp_path: Path) -> None:
    from rootstock.server.sampling_defaults import SamplingDefaults

    assert SamplingDefaults.of_model("m", tmp_path) == SamplingDefaults()
    config = {"temperature": 0.6, "top_k": 20.0, "eos_token_id": 1, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert SamplingDefaults.of_model("m", tmp_path) == SamplingDefaults(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON at line 1, column 2"),
        ("[]", "holds a list"),
        ('{"temperature": "hot"}', "temperature is 'hot', but must be a number, 0 or more"),
        ('{"temperature": NaN}', "temperature is 'nan'"),
        ('{"top_p": 7}', "top_p is '7', but must be a number from 0 to 1"),
        ('{"top_k": 1.5}', "top_k is '1.5', but must be an integer"),
        ('{"top_k": -5}', "top_k is '-5'"),
        ('{"min_p": true}', "min_p is 'True'"),
        ('{"repetition_penalty": 0}', "repetition_penalty is '0', but must be a number above 0"),
        (f'{{"top_k": 1{"0" * 400}}}', "top_k is '1000"),
    ],
)
def test_sampling_defaults_that_no_request_could_ask_for_stop_the_start(
    tmp_path: Path, text: str, said: str
) -> None:
    from rootstock.server.sampling_defaults import SamplingDefaults

    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelFileInvalid) as refused:
        SamplingDefaults.of_model("m", tmp_path)
    assert said in refused.value.message
