"""SIGTERM to a real process: running requests finish, new ones are refused, and probes tell so."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.running import Process, get
from waiting import HANG_S, join, wait_for, wait_until

Start = Callable[..., Process]


@contextmanager
def streaming(one: Process, max_tokens: int) -> Iterator[list[str]]:
    """Reads a stream, which has begun, and waits for its end afterwards. Yields the data of its events."""
    events: list[str] = []
    started = threading.Event()

    def read() -> None:
        body = {"prompt": "on and on", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=HANG_S) as response:
            for line in response.iter_lines():
                events.append(line.removeprefix("data: "))
                started.set()

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(started)
    yield events
    join(reader)


def is_draining(one: Process) -> bool:
    return get(f"{one.url}/readyz").status_code == 503


def error_of(events: list[str]) -> Any:
    return json.loads([event for event in events if event][-1])["error"]["code"]


def test_running_requests_finish_and_new_ones_are_refused(start: Start) -> None:
    one = start("--kv-budget", "1MiB", "--drain-timeout", "600s")
    assert get(f"{one.url}/readyz").json() == get(f"{one.url}/livez").json() == {"status": "ok"}
    with streaming(one, 300) as events:
        one.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_draining(one))
        ready = get(f"{one.url}/readyz")
        assert (ready.json(), ready.headers["retry-after"]) == ({"status": "draining"}, "1")
        assert get(f"{one.url}/livez").status_code == 200
        assert get(f"{one.url}/metrics").status_code == 200
        refused = httpx.post(f"{one.url}/v1/completions", json={"prompt": "x"}, timeout=HANG_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
    out, err = one.process.communicate(timeout=HANG_S)
    assert (one.process.returncode, out) == (0, "")
    assert "waiting for 1 request to finish" in err
    assert [event for event in events if event][-1] == "[DONE]"
    finished = [json.loads(event)["choices"][0]["finish_reason"] for event in events if event.startswith("{")]
    assert finished[-1] == "length"


def test_stored_responses_are_in_their_file_alone_when_the_server_has_ended(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "responses.sqlite"
    one = start("--kv-budget", "1MiB", "--responses-file", str(file))
    body = {"input": "x", "max_output_tokens": 1}
    ids = [httpx.post(f"{one.url}/v1/responses", json=body, timeout=HANG_S).json()["id"] for _ in range(3)]
    one.stop_cleanly(signal.SIGTERM)
    assert [found.name for found in tmp_path.iterdir()] == [file.name]
    again = start("--kv-budget", "1MiB", "--responses-file", str(file))
    for id in ids:
        assert get(f"{again.url}/v1/responses/{id}").status_code == 200
    again.stop_cleanly(signal.SIGTERM)


def test_a_second_signal_ends_the_drain_at_once(start: Start) -> None:
    one = start("--kv-budget", "1MiB", "--drain-timeout", "600s")
    with streaming(one, 60_000) as events:
        one.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_draining(one))
        returncode, _, err = one.stop(signal.SIGTERM)
    assert returncode == 0, err
    assert error_of(events) == "engine_stopped"


@pytest.mark.parametrize(
    ("sent", "timeout"), [(signal.SIGTERM, "0s"), (signal.SIGTERM, "100ms"), (signal.SIGINT, "600s")]
)
def test_a_drain_ends_after_its_time_and_ctrl_c_does_not_drain(
    start: Start, sent: signal.Signals, timeout: str
) -> None:
    one = start("--kv-budget", "1MiB", "--drain-timeout", timeout)
    with streaming(one, 60_000) as events:
        returncode, _, err = one.stop(sent)
    assert returncode == 0, err
    assert "Traceback" not in err
    assert error_of(events) == "engine_stopped"
    assert ("waiting" in err) == (timeout == "100ms")
