"""The cost of an open dashboard: D4's workload with no page, with a page, and with the page's requests alone.

Chromium takes processor time of its own to draw the page, which a user's machine pays, not the server's. The plain
client is a process that reads the same feed and asks for the same pictures as the page, and draws nothing: the time
that it adds is the server's cost of the page. All three are run in each round, in an order that changes, and compared
within the round.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import torch
from d4_agents_http import KV_BUDGET, SIZES, Load, over_http
from llamas import say, write_chatting_llama
from neighbours import Neighbours, busy_s_of

from rootstock.bench.serving import ServerProcess
from rootstock.bench.workloads import Sizes, make_workload

MODEL, TURNS, ROUNDS = "80m", 3, 9
SESSION_EVERY_S = 20.0  # as in app.js
_opener = build_opener(ProxyHandler({}))


def measure(chromium: str, model: str, turns: int, rounds: int, *, draws: bool) -> dict[str, Any]:
    """Returns the ratios of wall time, and of the server's processor time, to those without a page. `draws=False`
    leaves Chromium out, so that more rounds fit into the time."""
    from playwright.sync_api import sync_playwright

    threads = torch.get_num_threads()
    sizes = Sizes(SIZES.conversations, SIZES.at_once, turns, SIZES.prefix_tokens, SIZES.new_tokens, 64)
    workload = make_workload("agents", 0, sizes)
    watching = ("client", "browser") if draws else ("client",)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ("nothing", *watching)}
    neighbours = Neighbours()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = write_chatting_llama(model, Path(folder) / "model")
        options = ["--port", "0", "--dtype", "bfloat16", "--threads", str(threads), "--kv-budget", KV_BUDGET]
        server = stack.enter_context(ServerProcess([str(path), *options]))
        play = stack.enter_context(sync_playwright())
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.callback(browser.close)
        watchers: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
            "nothing": contextlib.nullcontext,
            "client": lambda: page_client(server.url),
            "browser": lambda: open_page(browser, server.url),
        }

        def run(name: str) -> tuple[float, float]:
            _post(f"{server.url}/v1/cache/clear")
            with watchers[name]():
                busy_s = busy_s_of(server.pid)
                wall_s = over_http(server.url, Load(workload)).wall_s
                return wall_s, busy_s_of(server.pid) - busy_s

        run("nothing")
        names = list(runs)
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                runs[name].append(run(name))
            say(f"round {number + 1}: " + ", ".join(f"{name} {runs[name][-1][0]:.2f} s" for name in names))
    figures: dict[str, Any] = {
        "model": model,
        "turns": turns,
        "rounds": rounds,
        "wall_s": round(statistics.median(wall_s for wall_s, _ in runs["nothing"]), 2),
    }
    for name in watching:
        for kind, place in (("wall", 0), ("server_cpu", 1)):
            ratios = [
                one[place] / alone[place] for one, alone in zip(runs[name], runs["nothing"], strict=True)
            ]
            figures[f"{kind}_ratio_{name}"] = round(statistics.median(ratios), 4)
            figures[f"{kind}_ratios_{name}"] = [round(ratio, 3) for ratio in ratios]
    figures["others_share"] = neighbours.share()
    return figures


@contextlib.contextmanager
def open_page(browser: Any, url: str) -> Iterator[None]:
    """Keeps the dashboard open, with all of its panels on the screen."""
    page = browser.new_page(viewport={"width": 1440, "height": 2400})
    page.goto(url)
    page.wait_for_selector("#tree[data-nodes]", timeout=60_000)
    try:
        yield
    finally:
        page.close()


@contextlib.contextmanager
def page_client(url: str) -> Iterator[None]:
    """Runs a process that asks for all that the page asks for."""
    command = [sys.executable, str(Path(__file__)), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "watching\n"
            yield
            assert process.poll() is None, "the client has ended early"
        finally:
            process.terminate()


def watch(url: str) -> None:
    """Reads the feed, and asks for the tree and the session as often as the page does."""
    session = json.loads(_get(f"{url}/dashboard/session")[1])
    model = session["models"][0]
    _get(f"{url}/v1/cache/pins")
    feed = _opener.open(f"{url}/dashboard/events?model={model}")
    feed.readline()

    def read() -> None:
        while feed.readline():
            pass

    threading.Thread(target=read, daemon=True).start()
    seen, asked_session, said = "", time.monotonic(), False
    while True:
        headers, _ = _get(f"{url}/dashboard/tree?model={model}{seen}")
        seen = f"&seen={headers['X-Serial']}"
        if not said:
            print("watching", flush=True)
            said = True
        if time.monotonic() - asked_session >= SESSION_EVERY_S:
            asked_session = time.monotonic()
            _get(f"{url}/dashboard/session")
        time.sleep(float(headers["X-Next-S"]))


def _get(url: str) -> tuple[Any, bytes]:
    with _opener.open(url, timeout=60) as response:
        return response.headers, response.read()


def _post(url: str) -> None:
    request = Request(url, b"{}", {"Content-Type": "application/json"})
    with _opener.open(request, timeout=60) as response:
        response.read()


if __name__ == "__main__":
    watch(sys.argv[1])
