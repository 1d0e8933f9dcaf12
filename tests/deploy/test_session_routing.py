"""The configurations for HAProxy and nginx as shipped, with the real programs: a session keeps its replica."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from balancers import balancer_command
from waiting import unused_port, wait_for, wait_until

PROGRAMS = ("haproxy", "nginx")
REPLICAS = ("replica-1", "replica-2")


class Replica:
    """An HTTP server that says who it is, and can hold requests up."""

    def __init__(self, name: str) -> None:
        self.free = threading.Event()
        self.free.set()
        self.counting = threading.Lock()
        self.waiting = 0
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self._answer(b"ok")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with replica.counting:
                    replica.waiting += 1
                wait_for(replica.free)
                with replica.counting:
                    replica.waiting -= 1
                self._answer(name.encode())

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Connection", "close")  # a replica that is gone keeps no connections
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.free.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


class Balancer:
    """A running program between clients and replicas."""

    def __init__(self, url: str, replicas: dict[str, Replica]) -> None:
        self.url = url
        self.replicas = replicas

    def ask(self, body: dict[str, Any] | None = None, **headers: str) -> str:
        """Returns the replica that answered."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body or {}, headers=sent, timeout=60.0)
        assert answer.status_code == 200, answer.text
        return answer.text


@contextmanager
def running(program: str, folder: Path) -> Iterator[Balancer]:
    """Starts a program with its configuration, in which only addresses are replaced."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    with ExitStack() as stack:
        replicas = {name: Replica(name) for name in REPLICAS}
        for replica in replicas.values():
            stack.callback(replica.close)
        with unused_port() as port:
            pass
        ports = {name: replica.port for name, replica in replicas.items()}
        command = balancer_command(program, port, ports, folder)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        balancer = Balancer(f"http://127.0.0.1:{port}", replicas)
        wait_until(lambda: process.poll() is not None or _answers(balancer.url))
        assert process.poll() is None, f"{program} refuses its configuration"
        yield balancer


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10.0).status_code == 200
    except httpx.TransportError:
        return False


SESSIONS = 24
MOST_REQUESTS = 16  # of a replica, before others get its sessions


def assert_kept(ask: Callable[[int], str]) -> None:
    """Asserts that each of some sessions stays on its replica, and that all replicas have some."""
    first = [ask(number) for number in range(SESSIONS)]
    assert [ask(number) for number in range(SESSIONS)] == first
    assert set(first) == set(REPLICAS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_session_stays_on_its_replica(program: str, tmp_path: Path) -> None:
    with running(program, tmp_path) as balancer:
        for header in (
            "X-Dynamo-Session-ID",
            "X-Claude-Code-Agent-ID",
            "X-Claude-Code-Session-ID",
            "Thread-ID",
            "Session-ID",
            "X-Session-ID",
        ):
            assert_kept(lambda number, header=header: balancer.ask(**{header: f"session {number}"}))
        assert_kept(lambda number: balancer.ask(Cookie=f"a=b; session={number}"))
        # An agent within an agent has a session of its own; otherwise the first header counts.
        names = {"X-Claude-Code-Agent-ID": "one", "X-Claude-Code-Session-ID": "two"}
        assert balancer.ask(**names) == balancer.ask(**{"X-Claude-Code-Agent-ID": "one"})


BODIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "prompt_cache_key": lambda number: {"messages": [], "prompt_cache_key": f"key {number}"},
    "chat": lambda number: {
        "model": "m",
        "messages": [
            {"role": "system", "content": "the same " * 2000},
            {"role": "user", "content": f"question {number}"},
        ],
    },
    "messages": lambda number: {
        "system": "the same",
        "messages": [{"role": "user", "content": [{"type": "text", "text": f"question {number}"}]}],
    },
    "chat in parts": lambda number: {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "the same"}]},
            {"role": "user", "content": [{"type": "text", "text": f"question {number}"}]},
        ]
    },
    "completions": lambda number: {"prompt": f"prompt {number}"},
    "responses": lambda number: {"instructions": "the same", "input": f"question {number}"},
}


@pytest.mark.parametrize("kind", BODIES)
def test_haproxy_finds_the_session_in_the_body(kind: str, tmp_path: Path) -> None:
    with running("haproxy", tmp_path) as balancer:
        assert_kept(lambda number: balancer.ask(BODIES[kind](number)))
        body = BODIES[kind](1)
        if "messages" in body:  # the next turn
            later = [
                *body["messages"],
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": "more"},
            ]
            assert balancer.ask(body | {"messages": later}) == balancer.ask(body)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_loaded_replica_passes_sessions_on(program: str, tmp_path: Path) -> None:
    with running(program, tmp_path) as balancer, ExitStack() as stack:
        name = balancer.ask(X_Session_ID="busy")
        loaded = balancer.replicas[name]
        (other,) = (each for each in REPLICAS if each != name)
        loaded.free.clear()
        elsewhere: list[str] = []

        def ask() -> None:
            answered = balancer.ask(X_Session_ID="busy")
            if not loaded.free.is_set():
                elsewhere.append(answered)

        for _ in range(2 * MOST_REQUESTS):
            thread = threading.Thread(target=ask)
            there = loaded.waiting
            thread.start()
            stack.callback(thread.join)
            stack.callback(loaded.free.set)
            wait_until(lambda there=there: loaded.waiting > there or elsewhere)
            if elsewhere:
                break
        assert elsewhere == [other]
        # A request that has just ended may still count, and one that has just come not yet.
        assert MOST_REQUESTS - 2 <= loaded.waiting <= MOST_REQUESTS + 2
        loaded.free.set()
        wait_until(lambda: loaded.waiting == 0)
        wait_until(lambda: balancer.ask(X_Session_ID="busy") == name)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_replica_that_is_gone_is_replaced(program: str, tmp_path: Path) -> None:
    with running(program, tmp_path) as balancer:
        name = balancer.ask(X_Session_ID="session")
        balancer.replicas[name].server.shutdown()
        balancer.replicas[name].server.server_close()
        (other,) = (each for each in REPLICAS if each != name)
        assert balancer.ask(X_Session_ID="session") == other
