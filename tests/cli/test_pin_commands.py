"""`rootstock cache pin`, `pins` and `release` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx

from cli.running import Process, Run
from waiting import HANG_S

ASKED = [{"role": "user", "content": "How do trees grow, and why do they shed their leaves? " * 4}]


def test_a_prompt_is_pinned_listed_and_released(
    start: Callable[..., Process], rootstock: Run, tmp_path: Path
) -> None:
    one = start("--kv-budget", "4MiB")
    body = {"messages": ASKED, "max_tokens": 1}
    assert httpx.post(f"{one.url}/v1/chat/completions", json=body, timeout=HANG_S).status_code == 200
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(ASKED))
    here = ("--url", f"{one.url}/v1")
    pinned = rootstock("cache", "pin", file, *here)
    assert pinned.status == 0, pinned.err
    id, told = pinned.out.split("\t")
    assert "tokens" in told
    [listed] = json.loads(rootstock("cache", "pins", *here, "--json").out)
    assert listed["id"] == id
    assert id in rootstock("cache", "pins", *here).out
    assert rootstock("cache", "release", id, *here).out == f"{id} released.\n"
    again = rootstock("cache", "release", id, *here)
    assert (again.status, again.out) == (2, "")
    assert "There is no pin" in again.err
    assert json.loads(rootstock("cache", "pins", *here, "--json").out) == []


def test_a_wrong_file_or_server_is_one_line(rootstock: Run, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_text("[")
    for arguments, said in [
        (("pin", file), "a file of JSON"),
        (("pin", tmp_path / "missing"), "a file that can be read"),
        (("pins", "--url", "here"), "the URL of a server"),
        (("pins", "--url", "http://127.0.0.1:1"), "No server answers"),
    ]:
        done = rootstock("cache", *arguments)
        assert (done.status, done.out) == (2, "")
        assert said in done.err
